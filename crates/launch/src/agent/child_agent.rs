//! An agent below this one in the tree: its process, and the node whose ranks it starts.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::Result;
use landbridge_proto::nondeterminism::DURABLE_ANSWER_SECONDS_MAX;

use crate::control::{Assignment, Job, Message, Node};
use crate::spawn::{self, AgentProcess};
use crate::sys;

/// Time after a [`Message::Durable`] within which a rank performs the effect that it asked for: the
/// age up to which the answer counts, and a second for a rank that has just compared the clock.
const EFFECT_TIME_MAX: Duration = Duration::from_secs(DURABLE_ANSWER_SECONDS_MAX as u64 + 1);

/// An agent that this agent has started on another node of its cluster.
pub struct ChildAgent {
    pub process: AgentProcess,
    pub node: Node,
    /// Group and process indices of processes that were spawned under this agent.
    pub spawned: Vec<(u32, Range<u32>)>,
    pub ready: bool,
    pub done: bool,
    pub is_reaped: bool,
    /// The ranks of this agent move to another node, and further messages of this agent are
    /// ignored.
    pub is_lost: bool,
    /// When this agent last got a [`Message::Durable`].
    effect_allowed_at: Option<Instant>,
}

impl ChildAgent {
    pub fn holds(&self, rank: u32) -> bool {
        self.node.holds(rank) || self.spawned.iter().any(|(_, indices)| indices.contains(&rank))
    }

    /// Answers that this agent has received what `serial` asked for: a rank of the node may now
    /// perform an effect.
    pub fn allow_effect(&mut self, rank: u32, serial: u32) {
        self.effect_allowed_at = Some(Instant::now());
        self.process.stream.send(&Message::Durable { rank, serial });
    }

    /// Time from which on no rank of the node performs an effect that was allowed, if no further
    /// one is allowed; `None`: no effect was.
    pub fn effects_end(&self) -> Option<Instant> {
        self.effect_allowed_at.map(|at| at + EFFECT_TIME_MAX)
    }

    pub fn runs_as(&self, pid: u32) -> bool {
        self.process.pid == pid && !self.is_reaped
    }

    pub fn kill(&self, signal: i32) {
        if !self.is_reaped {
            sys::kill(self.process.pid, signal);
        }
    }
}

/// Starts the agent of `node` and sends its assignment.
///
/// # Errors
/// If the command that starts the agent cannot be run.
pub fn start_child(job: &Job, node: &Node) -> Result<ChildAgent> {
    let mut process = spawn::start(&node.spawn)?;
    let assignment = Assignment { job: job.clone(), node: node.clone() };
    process.stream.send(&Message::Assign(Box::new(assignment)));
    Ok(ChildAgent {
        process,
        node: node.clone(),
        spawned: Vec::new(),
        ready: false,
        done: false,
        is_reaped: false,
        is_lost: false,
        effect_allowed_at: None,
    })
}
