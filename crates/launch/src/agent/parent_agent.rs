//! The agent above this one in the tree (or the launcher): the stream to it, and what it has
//! assigned to this agent.
//!
//! In: the assignment. Out: messages, in the order in which events happen to ranks. The agent's
//! loop reads the stream and acts on the messages.
//!
//! What may never happen: this agent sends replicated state of its ranks to an agent that does not
//! keep it.

use std::rc::Rc;
use std::time::{Duration, Instant};

use landbridge_proto::setting::{PEER_TIMEOUT, Value};

use crate::control::rank_state::RankUpdate;
use crate::control::{ALIVE_INTERVAL, Assignment, LOST_AFTER, Message, SILENCE_MAX};
use crate::control_stream::{BACKLOG_BYTES_MAX, ControlStream};
use crate::limits;
use crate::mpi;

/// The stream to the agent above, and the assignment from there.
pub struct ParentAgent {
    pub stream: ControlStream,
    /// `None`: the agent above has assigned no job yet.
    pub assignment: Option<Rc<Assignment>>,
    keepalive_sent_at: Instant,
}

impl ParentAgent {
    pub fn new(stream: ControlStream) -> ParentAgent {
        ParentAgent { stream, assignment: None, keepalive_sent_at: Instant::now() }
    }

    pub fn send(&mut self, message: &Message) {
        self.stream.send(message);
    }

    /// Sends a text for the user.
    pub fn note(&mut self, text: String) {
        self.send(&Message::Note { text });
    }

    /// Sends a text for the user that several nodes may send and that the user reads once.
    pub fn advise(&mut self, text: String) {
        let node = self.node_name().to_string();
        self.send(&Message::Advice { node, text });
    }

    /// Reports an error that ends the job.
    pub fn fail(&mut self, text: String) {
        self.send(&Message::Failed { text: limits::advise(text) });
    }

    /// Sends a change of the replicated state of a rank.
    pub fn update_rank(&mut self, update: RankUpdate) {
        self.send(&Message::RankUpdate(Box::new(update)));
    }

    /// Asks the agent above to move a rank that cannot be started here.
    pub fn request_other_node(&mut self, rank: u32, why: String) {
        self.update_rank(RankUpdate::Unstartable { rank, why });
    }

    /// Sends a keepalive every [`ALIVE_INTERVAL`].
    pub fn send_keepalive(&mut self) {
        if self.is_replicated() && self.keepalive_sent_at.elapsed() >= ALIVE_INTERVAL {
            self.keepalive_sent_at = Instant::now();
            self.send(&Message::Ping);
        }
    }

    /// Whether this agent reads more output of ranks: not while the backlog is at
    /// [`BACKLOG_BYTES_MAX`] or above.
    pub fn has_room(&self) -> bool {
        self.stream.backlog_bytes() < BACKLOG_BYTES_MAX
    }

    /// Whether a parent on another node has been silent for [`SILENCE_MAX`].
    pub fn is_silent(&self) -> bool {
        let remote = self.assignment.as_ref().is_some_and(|own| own.node.remote);
        remote && self.stream.last_received_at().elapsed() > SILENCE_MAX
    }

    /// The name of this agent's node.
    pub fn node_name(&self) -> &str {
        self.assignment.as_ref().map_or("?", |own| &own.node.name)
    }

    /// Whether ranks may be started on another node.
    pub fn may_move_ranks(&self) -> bool {
        self.assignment.as_ref().is_some_and(|own| mpi::recovers(&own.job.environment))
    }

    /// Whether the senders log messages of recorded ranks, and not relays.
    pub fn senders_keep_logs(&self) -> bool {
        self.assignment.as_ref().is_some_and(|own| mpi::senders_keep_logs(&own.job.environment))
    }

    /// Whether the job has spare nodes.
    pub fn has_spares(&self) -> bool {
        self.assignment.as_ref().is_some_and(|own| own.job.has_spares)
    }

    /// Whether the agent above keeps the state with which the ranks of this node can be restarted
    /// on another node.
    pub fn is_replicated(&self) -> bool {
        let is_below = |own: &Rc<Assignment>| own.node.relay_unix.is_none();
        self.may_move_ranks() && self.assignment.as_ref().is_some_and(is_below)
    }

    /// Whether a spare node may take over the ranks of this node, so that the agent above also
    /// keeps their recorded nondeterminism.
    pub fn is_replicated_for_spare(&self) -> bool {
        self.is_replicated() && self.has_spares()
    }

    /// How long an agent below may be silent: as long as any path may be, because ranks that move
    /// restart from an image or from the program.
    pub fn node_patience(&self) -> Duration {
        let variable = PEER_TIMEOUT.variable();
        let environment = self.assignment.as_ref().map(|own| &own.job.environment);
        let said = environment.into_iter().flatten().find(|(name, _)| *name == variable);
        let text = said.map_or(PEER_TIMEOUT.default, |(_, text)| text);
        match PEER_TIMEOUT.parse(text) {
            Ok(Value::Time(time)) => time.max(LOST_AFTER),
            _ => LOST_AFTER,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn an_error_that_ends_the_job_names_the_limit_that_has_caused_it() {
        let (theirs, ours) = UnixStream::pair().unwrap();
        let mut above =
            ControlStream::to_agent(theirs.try_clone().unwrap().into(), theirs.into()).unwrap();
        let stream =
            ControlStream::to_parent(ours.try_clone().unwrap().into(), ours.into()).unwrap();
        let mut parent = ParentAgent::new(stream);
        let error = std::io::Error::from_raw_os_error(libc::EMFILE);
        parent.fail(format!("cannot start an agent on n1: {error}"));
        parent.stream.flush();
        above.fill().unwrap();
        let Some(Message::Failed { text }) = above.poll_message().unwrap() else { panic!() };
        assert!(text.starts_with("cannot start an agent on n1: "), "{text}");
        assert!(text.contains("raise that limit (ulimit -n"), "{text}");
    }
}
