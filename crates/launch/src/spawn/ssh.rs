//! A host behind ssh. The command is the user's own (`ssh = ["ssh", "-p", "2222"]`), followed by
//! options that a job needs: no terminal, no questions, and a dead connection detected within a
//! minute.

use super::Spawn;

/// Seconds between two probes of a silent connection. ssh gives up after [`ALIVE_COUNT`] unanswered
/// probes.
const ALIVE_INTERVAL_S: u32 = 15;
const ALIVE_COUNT: u32 = 4;
/// Seconds after which a connection attempt to a host that is switched off fails.
const CONNECT_TIMEOUT_S: u32 = 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ssh {
    /// The program and its options as the user gave them.
    pub command: Vec<String>,
    pub user: Option<String>,
    pub port: Option<u16>,
}

impl Default for Ssh {
    fn default() -> Ssh {
        Ssh { command: vec!["ssh".to_string()], user: None, port: None }
    }
}

impl Spawn for Ssh {
    fn command(&self, host: &str, agent: &[String]) -> Vec<String> {
        // ssh uses the first value of an option, so the user's options come before ours.
        let mut command = self.command.clone();
        let options = [
            "BatchMode=yes".to_string(),
            format!("ConnectTimeout={CONNECT_TIMEOUT_S}"),
            format!("ServerAliveInterval={ALIVE_INTERVAL_S}"),
            format!("ServerAliveCountMax={ALIVE_COUNT}"),
        ];
        command.extend(options.into_iter().flat_map(|option| ["-o".to_string(), option]));
        command.extend(["-T".to_string(), "-x".to_string()]);
        if let Some(port) = self.port {
            command.extend(["-p".to_string(), port.to_string()]);
        }
        if let Some(user) = &self.user {
            command.extend(["-l".to_string(), user.clone()]);
        }
        command.extend(["--".to_string(), host.to_string()]);
        // ssh joins its arguments with spaces and passes the text to the login shell on the host.
        command.push(agent.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" "));
        command
    }
}

/// Quotes `word` so that a POSIX shell reads it back unchanged.
pub fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_string();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_options_come_first_and_words_are_quoted() {
        let ssh = Ssh {
            command: vec!["ssh".into(), "-F".into(), "config".into()],
            user: Some("ann".into()),
            port: Some(2222),
        };
        let command = ssh.command("n1", &["/opt/land bridge".to_string(), "agent".to_string()]);
        assert_eq!(command[..3], ["ssh", "-F", "config"]);
        let tail = &command[command.len() - 7..];
        assert_eq!(tail, ["-p", "2222", "-l", "ann", "--", "n1", "'/opt/land bridge' agent"]);
    }

    #[test]
    fn quoting_survives_a_shell() {
        for word in ["", "plain", "two words", "it's", "$HOME `id` \"x\" \\", "a\nb"] {
            let script = format!("printf %s {}", quote(word));
            let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), word);
        }
    }
}
