//! The agents below this one in the tree: their processes, and the nodes whose ranks they start.
//!
//! In: orders for all of them. Out: messages to them. The agent's loop reads their streams.
//!
//! What may never happen: standard input reaches an agent and is not kept for the next one.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::Result;
use landbridge_proto::nondeterminism::DURABLE_ANSWER_SECONDS_MAX;

use super::forwarded_input::ForwardedInput;
use super::parent_agent::ParentAgent;
use crate::agent_state::{AgentEvent, AgentState};
use crate::control::spawn_order::{Block, SpawnOrder};
use crate::control::{Assignment, Job, Message, Node, PING_INTERVAL};
use crate::spawn::{self, AgentProcess};
use crate::sys;

/// Time after a [`Message::Durable`] within which a rank performs the effect that it asked for: the
/// age up to which the answer counts, and a second for a rank that has just compared the clock.
const EFFECT_TIME_MAX: Duration = Duration::from_secs(DURABLE_ANSWER_SECONDS_MAX as u64 + 1);

/// An agent that this agent has started on another node of its cluster.
pub struct ChildAgent {
    pub process: AgentProcess,
    pub node: Node,
    /// Process indices of processes that were spawned under this agent, by their group, without
    /// groups that could not be started completely. Those of processes that have ended stay: what
    /// they have sent may be asked for as long as the job runs.
    pub spawned: BTreeMap<u32, Vec<Range<u32>>>,
    /// If the agent is lost, its further messages are ignored.
    state: AgentState,
    /// The process by which the agent was started has ended and was reaped.
    pub is_reaped: bool,
    /// When this agent last got a [`Message::Durable`].
    effect_allowed_at: Option<Instant>,
}

impl ChildAgent {
    pub fn state(&self) -> AgentState {
        self.state
    }

    pub fn note(&mut self, event: AgentEvent) {
        self.state = self.state.after(event);
    }

    pub fn holds(&self, rank: u32) -> bool {
        self.node.holds(rank) || self.spawned.values().flatten().any(|own| own.contains(&rank))
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

/// The agents below this one, and what they are sent together.
pub struct ChildAgents {
    pub all: Vec<ChildAgent>,
    /// Standard input on its way to rank 0 on a node below.
    pub input: ForwardedInput,
    pinged_at: Instant,
}

impl ChildAgents {
    pub fn new() -> ChildAgents {
        let (all, input) = (Vec::new(), ForwardedInput::default());
        ChildAgents { all, input, pinged_at: Instant::now() }
    }

    pub fn send(&mut self, message: &Message) {
        self.all.iter_mut().for_each(|child| child.process.stream.send(message));
    }

    pub fn flush(&mut self) {
        self.all.iter_mut().for_each(|child| child.process.stream.flush());
    }

    /// Pings the agents every [`PING_INTERVAL`].
    pub fn ping(&mut self) {
        if self.pinged_at.elapsed() >= PING_INTERVAL {
            self.pinged_at = Instant::now();
            self.send(&Message::Ping);
        }
    }

    /// The next time at which an agent that stays silent counts as lost, after `patience`.
    pub fn next_loss(&self, patience: Duration) -> Option<Instant> {
        let running = self.all.iter().filter(|child| !child.state.is_over());
        let ends = running.map(|child| child.process.stream.last_received_at() + patience);
        let now = Instant::now();
        ends.map(|at| at + Duration::from_millis(1)).filter(|at| *at > now).min()
    }

    /// The agent under which a process of the job runs.
    pub fn holder(&mut self, rank: u32) -> Option<&mut ChildAgent> {
        self.all.iter_mut().find(|child| child.holds(rank))
    }

    /// Forwards standard input, or its end (`None`); returns whether rank 0 runs on a node below.
    pub fn forward_input(&mut self, bytes: Option<&[u8]>) -> bool {
        let Some(child) = self.all.iter_mut().find(|child| child.holds(0)) else { return false };
        match bytes {
            Some(bytes) => {
                self.input.forward(bytes);
                child.process.stream.send(&Message::Stdin { bytes: bytes.to_vec() });
            }
            None => {
                self.input.end();
                child.process.stream.send(&Message::StdinEnd);
            }
        }
        true
    }

    /// Answers for lost nodes: the launcher has ordered processes there before it knew of the loss.
    pub fn refuse_for_lost_nodes(&self, order: &SpawnOrder, parent: &mut ParentAgent) {
        let lost = self.all.iter().filter(|child| child.state == AgentState::Lost);
        for child in lost.filter(|child| order.below(&child.node).next().is_some()) {
            let problem = format!("node {} is lost", child.node.name);
            parent.send(&Message::Started { group: order.group, problem });
        }
    }

    /// Forwards the order to the agents below that take part; returns their indices.
    pub fn forward_order(&mut self, order: &SpawnOrder) -> Vec<usize> {
        let mut children = Vec::new();
        let all = self.all.iter_mut().enumerate();
        for (index, child) in all.filter(|(_, child)| child.state != AgentState::Lost) {
            let blocks: Vec<_> = order.below(&child.node).map(Block::indices).collect();
            if !blocks.is_empty() {
                child.spawned.insert(order.group, blocks);
                child.process.stream.send(&Message::SpawnOrder(Box::new(order.clone())));
                children.push(index);
            }
        }
        children
    }

    /// Orders the agents to end. `is_orphaned`: the stream to the agent above this one has ended.
    pub fn end(&mut self, at_once: bool, is_orphaned: bool) {
        for child in &mut self.all {
            child.process.stream.send(&Message::End { at_once });
            // An agent that has not answered has started nothing yet, so its connection can be cut.
            if !child.process.stream.has_answered() {
                child.kill(libc::SIGTERM);
            }
            if is_orphaned {
                child.process.stream.flush();
                child.process.stream.close_output();
            }
            // A node that was lost before the ranks start has waited for the start: no longer.
            if child.process.stream.at_end() {
                child.note(AgentEvent::End);
            }
        }
    }

    /// Kills the connections to agents that have not ended in time.
    pub fn abandon(&mut self) {
        for child in self.all.iter_mut().filter(|child| !child.state.is_over()) {
            child.kill(libc::SIGKILL);
            child.note(AgentEvent::End);
        }
    }

    pub fn close_output(&mut self) {
        self.all.iter_mut().for_each(|child| child.process.stream.close_output());
    }

    /// Process ids of the connections to the agents.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.all.iter().filter(|child| !child.is_reaped).map(|child| child.process.pid)
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
        spawned: BTreeMap::new(),
        state: AgentState::Starting,
        is_reaped: false,
        effect_allowed_at: None,
    })
}
