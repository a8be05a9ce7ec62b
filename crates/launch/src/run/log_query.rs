//! A query about message logs: to all relays that hold them, or, if the senders keep messages, to
//! the agents of all nodes.

use std::time::{Duration, Instant};

use super::cluster_agents::ClusterAgent;
use crate::control::Message;
use crate::ps::log_status::LogStatus;
use crate::ps::status_socket::StatusQuery;

/// Time after which relays that have not answered are not waited for.
const PATIENCE: Duration = Duration::from_millis(1_500);
/// Time after which a client that also asks for other status gets its answer without the logs.
const BRIEF: Duration = Duration::from_millis(300);
/// Time in which the answers of relays serve further clients with the same query.
const AGE_MAX: Duration = Duration::from_millis(500);

/// The state of the query and the answers.
#[derive(Default)]
pub struct LogQuery {
    /// The senders keep messages, so the agents of all nodes answer.
    asks_nodes: bool,
    serial: u32,
    asked: Option<StatusQuery>,
    /// Number of agents that have not answered.
    awaited: usize,
    /// While agents have not answered: the deadline of their answers. Afterwards: the time until
    /// which the answers are fresh.
    until: Option<Instant>,
    /// Deadline of clients that also ask for other status.
    brief_until: Option<Instant>,
    log_status: LogStatus,
}

impl LogQuery {
    /// No query. `asks_nodes`: the agents of all nodes answer, not those of the relays.
    pub fn new(asks_nodes: bool) -> LogQuery {
        LogQuery { asks_nodes, ..LogQuery::default() }
    }

    /// How many agents answer a query.
    pub fn answers(&self, children: &[ClusterAgent]) -> usize {
        match self.asks_nodes {
            true => children.iter().map(|child| child.node.hosts().len()).sum(),
            false => children.len(),
        }
    }

    /// Whether no query is running and no fresh answers are held.
    pub fn is_idle(&self) -> bool {
        self.until.is_none()
    }

    pub fn next_time(&self) -> Option<Instant> {
        self.until.into_iter().chain(self.brief_until).min()
    }

    /// Whether a client that asks this together with other status may wait for the answer: the
    /// query is running, or no other query is.
    pub fn is_near(&self, question: StatusQuery) -> bool {
        self.is_idle() || (self.brief_until.is_some() && self.asked == Some(question))
    }

    /// Begins a query, and returns the message for the agents, of which so many answer.
    pub fn begin(&mut self, question: StatusQuery, agents: usize, now: Instant) -> Message {
        let serial = self.serial.wrapping_add(1).max(1);
        let (asked, log_status) = (Some(question), LogStatus::default());
        let (until, brief_until) = (Some(now + PATIENCE), Some(now + BRIEF));
        let asks_nodes = self.asks_nodes;
        *self =
            LogQuery { asks_nodes, serial, asked, awaited: agents, until, brief_until, log_status };
        let question = match question {
            StatusQuery::Deliveries { rank, from, count } => format!("one {rank} {from} {count}"),
            _ => "all 0".to_string(),
        };
        Message::QueryLog { serial, question }
    }

    pub fn add_answer(&mut self, serial: u32, lines: &str, now: Instant) {
        if serial != self.serial || self.awaited == 0 {
            return;
        }
        self.log_status.add_lines(lines);
        self.awaited -= 1;
        if self.awaited == 0 {
            (self.until, self.brief_until) = (Some(now + AGE_MAX), None);
        }
    }

    pub fn pass_time(&mut self, now: Instant) {
        self.brief_until = self.brief_until.filter(|until| *until > now);
        if self.until.is_some_and(|until| until <= now) {
            let missing = std::mem::take(&mut self.awaited) as u32;
            match self.asks_nodes {
                true => self.log_status.hosts_missing = missing,
                false => self.log_status.relays_missing = missing,
            }
            self.until = (missing > 0).then_some(now + AGE_MAX);
        }
    }

    /// The answers to `question`, if all agents have answered or timed out and the answers are
    /// fresh.
    pub fn found(&self, question: StatusQuery) -> Option<&LogStatus> {
        let is_it = self.awaited == 0 && self.until.is_some() && self.asked == Some(question);
        is_it.then_some(&self.log_status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_query_ends_when_all_have_answered_or_timed_out() {
        let (mut log_query, now) = (LogQuery::default(), Instant::now());
        let story = StatusQuery::Deliveries { rank: 3, from: 4, count: 5 };
        let message = log_query.begin(story, 2, now);
        let question = "one 3 4 5".to_string();
        assert_eq!(message, Message::QueryLog { serial: 1, question });
        log_query.add_answer(1, "", now);
        log_query.add_answer(7, "", now);
        assert_eq!(log_query.found(story), None, "one is missing");
        log_query.add_answer(1, "", now);
        assert!(log_query.found(story).is_some() && log_query.found(StatusQuery::Log).is_none());
        log_query.pass_time(now + AGE_MAX);
        assert!(log_query.found(story).is_none() && log_query.is_idle(), "it is old");
        assert!(log_query.is_near(StatusQuery::Log));
        log_query.begin(StatusQuery::Log, 2, now);
        log_query.add_answer(2, "", now);
        assert!(log_query.is_near(StatusQuery::Log) && !log_query.is_near(story));
        log_query.pass_time(now + BRIEF);
        assert!(!log_query.is_near(StatusQuery::Log), "that is not waited for");
        log_query.pass_time(now + PATIENCE);
        let missing = log_query.found(StatusQuery::Log).map(|log_status| log_status.relays_missing);
        assert_eq!(missing, Some(1));
        log_query.pass_time(now + PATIENCE + AGE_MAX);
        assert!(log_query.is_idle());
    }
}
