//! The text about a host whose agent has ended, or has never started. The first line is complete by
//! itself; further lines say what to do.

use super::AgentProcess;
use super::ssh::quote;
use crate::control::Node;

/// The text about the failure. `from` is the host on which the command was run, or `None` for this
/// host. `problem` is the error in the bytes received over the connection.
pub fn text(
    node: &Node,
    process: &AgentProcess,
    problem: Option<anyhow::Error>,
    from: Option<&str>,
) -> String {
    let place = format!("node {} (cluster {})", node.name, node.cluster_name);
    if let Some(problem) = process.stream.problem() {
        return format!("{place} cannot be sent what to do: {problem}");
    }
    let command = by_hand(&node.spawn);
    let here = from.unwrap_or("this machine");
    if let Some(error) = problem {
        return format!("lost {place}: {error:#}");
    }
    let words = process.stderr.last_words();
    if process.stream.has_answered() {
        let colon = if words.is_empty() { "" } else { ": " };
        return format!(
            "lost {place}: the connection to its agent ended{colon}{words}\n  \
             The command, on {here}, was: {command}"
        );
    }
    let noise = process.stream.noise();
    let why = match (words.as_str(), noise.as_str()) {
        ("", "") => "the command ended without a word".to_string(),
        ("", noise) => format!("instead of an agent there was: {noise}"),
        (words, _) => words.to_string(),
    };
    let mut text = format!("cannot start the agent on {place}: {why}");
    if let Some(advice) = advice(&why, program(&node.spawn), here) {
        text.push_str(&format!("\n  {advice}"));
    }
    text.push_str(&format!("\n  Try by hand on {here}, it must not ask anything: {command}"));
    text
}

/// A command quoted for a shell.
pub fn by_hand(command: &[String]) -> String {
    command.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ")
}

/// The path at which the command expects `landbridge` on the other host. For ssh, the path and its
/// argument are one word.
fn program(command: &[String]) -> &str {
    match command {
        [.., program, last] => last.strip_suffix(" agent").unwrap_or(program),
        _ => "",
    }
}

fn advice(why: &str, program: &str, here: &str) -> Option<String> {
    let missing = why.contains("not found") || why.contains("No such file or directory");
    let missing = missing || why.contains("ermission denied") && why.contains(program);
    if missing && !program.is_empty() && why.contains(program.trim_matches('\'')) {
        return Some(format!(
            "There is no landbridge to run as {program} on that host: install it there, or say \
             where it is with landbridge = \"PATH\" in the topology's [[cluster]]"
        ));
    }
    if why.contains("Host key verification failed") {
        return Some(format!("Log in once by hand from {here}, to accept the host's key"));
    }
    if why.contains("Permission denied (") {
        return Some(format!(
            "ssh has to log in from {here} without a password: with a key that is known there \
             (ssh-copy-id), or an ssh-agent"
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_fits_the_last_words() {
        let at = "/opt/landbridge";
        for (why, program, piece) in [
            ("bash: line 1: /opt/landbridge: No such file or directory", at, "landbridge = "),
            ("sh: 1: /opt/landbridge: not found", at, "landbridge = "),
            ("sh: 1: /opt/landbridge: Permission denied", at, "landbridge = "),
            ("ann@n1: Permission denied (publickey).", at, "from gw without a password"),
            ("Host key verification failed.", at, "Log in once by hand from gw"),
        ] {
            let advice = advice(why, program, "gw").unwrap();
            assert!(advice.contains(piece), "{advice}");
        }
        assert_eq!(advice("ssh: connect to host n1 port 22: No route to host", at, "gw"), None);
    }

    #[test]
    fn the_program_is_found_in_the_command() {
        let words = |text: &[&str]| text.iter().map(|word| word.to_string()).collect::<Vec<_>>();
        assert_eq!(program(&words(&["ssh", "--", "n1", "/opt/lb agent"])), "/opt/lb");
        assert_eq!(program(&words(&["nsenter", "/opt/lb", "agent"])), "/opt/lb");
        assert_eq!(by_hand(&words(&["ssh", "n1", "/opt/lb agent"])), "ssh n1 '/opt/lb agent'");
    }
}
