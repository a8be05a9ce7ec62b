//! What a moved rank has sent again is compared with what ranks of other nodes got that have ended.
//!
//! A rank whose node was lost sends its logs again from another node. Ranks that are still there
//! take part in the comparison, or their agents do ([`super::frame_carrier`]). A rank that has
//! ended reads nothing more, but has acted on what it had got: so before the end of a moved rank is
//! reported, this agent asks the agents of ended ranks for digests.
//!
//! In: the file with the logs of this node's ranks, answers of other agents. Out: questions, and
//! whether the end of a rank may be reported. What may never happen: a rank that has sent something
//! else than before to a rank that has ended ends as if it had not; an end waits longer than
//! [`WAIT_MAX`].

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use landbridge_proto::log::agent_transfer::{ArrivedDigest, Verification, VerifiedLog};

use super::frame_carrier::{digest_of, is_compared};
use super::node_logs::NodeLogs;
use super::parent_agent::ParentAgent;
use crate::control::{FrameTransfer, FrameTransferStep, Message};

/// Time between two questions about the same log.
const QUESTION_INTERVAL: Duration = Duration::from_millis(100);
/// Longest time for which the end of a rank waits: agents answer at once, unless they are lost.
const WAIT_MAX: Duration = Duration::from_secs(20);
/// Questions at once: all of them go through the launcher.
const QUESTIONS_MAX: usize = 64;

/// Compares what moved ranks of this node have sent with what ended ranks have got.
pub struct EndedPeers {
    logs: Rc<NodeLogs>,
    /// By rank of this node that has moved and ended.
    comparisons: BTreeMap<u32, Comparison>,
    ask_at: Instant,
}

struct Comparison {
    until: Instant,
    /// By rank that has ended: up to where the log to it was compared.
    open: BTreeMap<u32, VerifiedLog>,
    /// Ranks whose agents do not keep enough to compare.
    unknown: Vec<u32>,
}

impl EndedPeers {
    pub fn new(logs: Rc<NodeLogs>) -> EndedPeers {
        EndedPeers { logs, comparisons: BTreeMap::new(), ask_at: Instant::now() }
    }

    /// When questions are due; `None`: there are none.
    pub fn next_time(&self) -> Option<Instant> {
        let is_any_open = self.comparisons.values().any(|comparison| !comparison.open.is_empty());
        is_any_open.then_some(self.ask_at)
    }

    /// Whether all that a rank of this node has sent, which has ended, was compared that has to be.
    /// Begins with it at the first call. What cannot be compared, the user reads.
    pub fn is_compared(&mut self, rank: u32, now: Instant, parent: &mut ParentAgent) -> bool {
        if !self.logs.has_moved(rank) {
            return true;
        }
        let logs = &self.logs;
        let comparison = self.comparisons.entry(rank).or_insert_with(|| {
            let peers = logs.ended_elsewhere().filter(|to| !is_compared(logs, rank, *to));
            let open = peers.map(|to| (to, VerifiedLog::new(logs.sent_before(rank, to))));
            Comparison { until: now + WAIT_MAX, open: open.collect(), unknown: Vec::new() }
        });
        if now >= comparison.until {
            let open = std::mem::take(&mut comparison.open);
            comparison.unknown.extend(open.into_keys());
        }
        if !comparison.open.is_empty() {
            return false;
        }
        let unknown = std::mem::take(&mut comparison.unknown);
        if !unknown.is_empty() {
            let names: Vec<_> = unknown.iter().map(u32::to_string).collect();
            parent.note(format!(
                "what rank {rank} has sent again to ranks that have ended ({}) cannot be compared \
                 with what it sent before it moved",
                names.join(", ")
            ));
        }
        true
    }

    /// Asks the agents of ended ranks what is due.
    pub fn advance(&mut self, now: Instant, parent: &mut ParentAgent) {
        if self.next_time().is_none_or(|at| now < at) {
            return;
        }
        self.ask_at = now + QUESTION_INTERVAL;
        let open = self.comparisons.iter().flat_map(|(from, comparison)| {
            comparison.open.iter().map(|(to, verified)| (*from, *to, verified.position()))
        });
        for (from, to, position) in open.take(QUESTIONS_MAX) {
            let step = FrameTransferStep::Ask { digest_from: Some(position) };
            parent.send(&Message::FrameTransfer(Box::new(FrameTransfer { from, to, step })));
        }
    }

    /// Handles the answer of an agent, if it was asked here. False: it was not.
    ///
    /// # Errors
    /// The rank has sent something else than before it moved.
    pub fn handle(&mut self, transfer: &FrameTransfer) -> Result<bool> {
        let FrameTransferStep::Arrived { position, digest } = &transfer.step else {
            return Ok(false);
        };
        let (from, to) = (transfer.from, transfer.to);
        let Some(comparison) = self.comparisons.get_mut(&from) else { return Ok(false) };
        let Some(verified) = comparison.open.get_mut(&to) else { return Ok(false) };
        let part = (verified.position(), *position);
        let arrived = digest.as_ref().map(|it| ArrivedDigest { from: it.from, digest: it.digest });
        let logs = &self.logs;
        match verified.verify(*position, arrived, || digest_of(logs, (from, to), part)) {
            Verification::Same => drop(comparison.open.remove(&to)),
            // The rank sends nothing more, so what it keeps from there on is all of it.
            Verification::Unknown if digest.is_some() && logs.keeps((from, to), part.0) => {
                bail!(sends_otherwise(from, to))
            }
            Verification::Unknown => {
                comparison.open.remove(&to);
                comparison.unknown.push(to);
            }
            Verification::Other => bail!(sends_otherwise(from, to)),
        }
        Ok(true)
    }
}

fn sends_otherwise(from: u32, to: u32) -> String {
    format!("what rank {from} sends to rank {to} is not what it sent before it moved")
}
