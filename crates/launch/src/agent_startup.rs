//! Waits for child agents to answer. The launcher or agent that has started child agents reports
//! after [`NOTICE`] which hosts have not answered, and after [`PATIENCE`] that the job cannot
//! start. The module reads no clock.

use std::time::{Duration, Instant};

use crate::control::Node;
use crate::control_stream::ControlStream;
use crate::ps::paths::counted;
use crate::spawn::agent_failure::by_hand;

/// Time after which the user reads which hosts have not answered; logins usually take less.
const NOTICE: Duration = Duration::from_secs(10);
/// Time after which the job cannot start. ssh gives up on a host that is switched off after 20 s,
/// and a slow login takes some seconds; a host that has not answered by then asks for a password,
/// or hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// Hosts that a text names at most.
const NAMES_MAX: usize = 8;

pub struct AgentStartup {
    begun: Instant,
    noticed: bool,
    over: bool,
}

/// A text that the user has to read.
#[derive(Debug, PartialEq, Eq)]
pub enum StartupNotice {
    Notice(String),
    GiveUp(String),
}

impl AgentStartup {
    pub fn new(now: Instant) -> AgentStartup {
        AgentStartup { begun: now, noticed: false, over: false }
    }

    /// Ends the wait: every agent has answered, or the job ends.
    pub fn end(&mut self) {
        self.over = true;
    }

    /// The next time at which [`AgentStartup::poll`] may have a text.
    pub fn next_time(&self) -> Option<Instant> {
        let patience = if self.noticed { PATIENCE } else { NOTICE };
        (!self.over).then(|| self.begun + patience)
    }

    /// Returns the text that is due at `now`. `unanswered` holds the hosts that have not answered,
    /// each with the bytes received in place of the banner.
    pub fn poll(&mut self, now: Instant, unanswered: &[(&Node, String)]) -> Option<StartupNotice> {
        if self.next_time().is_none_or(|time| now < time) {
            return None;
        }
        self.noticed = true;
        self.over = now >= self.begun + PATIENCE;
        if unanswered.is_empty() {
            return None;
        }
        let names = names(unanswered);
        if !self.over {
            return Some(StartupNotice::Notice(format!("still waiting for an answer of {names}")));
        }
        let mut text = format!("no answer of {names} after {} s", PATIENCE.as_secs());
        let (node, noise) = &unanswered[0];
        if !noise.is_empty() {
            text.push_str(&format!("; {} said: {noise}", node.name));
        }
        let command = by_hand(&node.spawn);
        text.push_str(&format!("\n  Try by hand, it must not ask anything: {command}"));
        Some(StartupNotice::GiveUp(text))
    }
}

/// The host of an agent that has not answered yet, with the bytes received in place of the banner,
/// for [`AgentStartup::poll`].
pub fn unanswered<'a>(node: &'a Node, stream: &ControlStream) -> Option<(&'a Node, String)> {
    (!stream.has_answered()).then(|| (node, stream.noise()))
}

/// The first line of each further failure, for a report that shows one failure in full.
pub fn others<'a>(failures: impl Iterator<Item = &'a String>) -> Vec<String> {
    let mut lines: Vec<String> =
        failures.map(|text| text.lines().next().unwrap_or_default().to_string()).collect();
    let more = lines.len().saturating_sub(NAMES_MAX);
    if more > 0 {
        lines.truncate(NAMES_MAX);
        let have = if more == 1 { "has" } else { "have" };
        lines.push(format!("and {} {have} failed", counted(more as u64, "more host")));
    }
    lines
}

fn names(unanswered: &[(&Node, String)]) -> String {
    let name = |(node, _): &(&Node, String)| format!("{} ({})", node.name, node.cluster_name);
    let named: Vec<String> = unanswered.iter().take(NAMES_MAX).map(name).collect();
    let named = named.join(", ");
    match unanswered.len().saturating_sub(NAMES_MAX) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> Node {
        Node {
            cluster: 0,
            cluster_name: "nancy".to_string(),
            name: name.to_string(),
            address: None,
            first_rank: 0,
            rank_count: 0,
            slots: 0,
            machine_ranks: 0,
            is_spare: false,
            spares: Vec::new(),
            relay_unix: None,
            remote: false,
            spawn: vec!["ssh".to_string(), name.to_string()],
            children: Vec::new(),
        }
    }

    #[test]
    fn silent_hosts_are_named_once_and_then_given_up() {
        let (one, two) = (node("n1"), node("n2"));
        let unanswered = [(&one, "Password:".to_string()), (&two, String::new())];
        let begun = Instant::now();
        let mut gather = AgentStartup::new(begun);
        assert_eq!(gather.poll(begun, &unanswered), None);
        let notice = "still waiting for an answer of n1 (nancy), n2 (nancy)".to_string();
        assert_eq!(gather.poll(begun + NOTICE, &unanswered), Some(StartupNotice::Notice(notice)));
        assert_eq!(gather.poll(begun + NOTICE, &unanswered), None);
        let Some(StartupNotice::GiveUp(text)) = gather.poll(begun + PATIENCE, &unanswered) else {
            panic!()
        };
        assert!(text.starts_with("no answer of n1 (nancy), n2 (nancy) after 60 s"), "{text}");
        assert!(text.contains("n1 said: Password:") && text.ends_with("ssh n1"), "{text}");
        assert_eq!(gather.next_time(), None);
    }

    #[test]
    fn nobody_is_waited_for_who_has_answered() {
        let begun = Instant::now();
        let mut gather = AgentStartup::new(begun);
        assert_eq!(gather.poll(begun + NOTICE, &[]), None);
        assert_eq!(gather.next_time(), Some(begun + PATIENCE));
        gather.end();
        assert_eq!(gather.poll(begun + PATIENCE, &[(&node("n1"), String::new())]), None);
    }

    #[test]
    fn further_failures_get_a_line_each() {
        let failures: Vec<String> =
            (0..NAMES_MAX + 2).map(|i| format!("no agent on n{i}: why\n  do this")).collect();
        let lines = others(failures.iter());
        assert_eq!(lines[0], "no agent on n0: why");
        assert_eq!(lines[NAMES_MAX..], ["and 2 more hosts have failed"]);
        assert_eq!(others(failures[..1].iter()).len(), 1);
    }

    #[test]
    fn long_lists_are_cut() {
        let nodes: Vec<Node> = (0..NAMES_MAX + 2).map(|i| node(&format!("n{i}"))).collect();
        let unanswered: Vec<_> = nodes.iter().map(|node| (node, String::new())).collect();
        assert!(names(&unanswered).ends_with("n7 (nancy) and 2 more"), "{}", names(&unanswered));
    }
}
