//! The agents that the launcher has started: one of each cluster.
//!
//! What enters: messages for one agent, for some or for all of them. What leaves: their bytes.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::agent_state::{AgentEvent, AgentState};
use crate::control::{Assignment, FrameTransfer, Job, Message, Node};
use crate::spawn::{self, AgentProcess};
use crate::sys;

/// Time that agents which have confirmed their end, and their ssh processes, have to exit.
const LEFTOVERS_GRACE: Duration = Duration::from_millis(500);

/// The agent of a cluster, which starts the agents of the cluster's other hosts.
pub(super) struct ClusterAgent {
    pub process: AgentProcess,
    pub node: Node,
    state: AgentState,
}

/// The agents by the number of their cluster.
pub(super) struct ClusterAgents(pub Vec<ClusterAgent>);

impl ClusterAgent {
    pub fn state(&self) -> AgentState {
        self.state
    }

    pub fn note_ready(&mut self) {
        self.state = self.state.after(AgentEvent::Ready);
    }

    pub fn note_end(&mut self) {
        self.state = self.state.after(AgentEvent::End);
    }
}

impl ClusterAgents {
    /// Starts an agent on each of `nodes` and sends its assignment.
    ///
    /// # Errors
    /// If a process cannot be started on this host.
    pub fn start(job: &Job, nodes: Vec<Node>) -> anyhow::Result<ClusterAgents> {
        let mut children = Vec::new();
        for node in nodes {
            let mut process = spawn::start(&node.spawn)?;
            let assignment = Assignment { job: job.clone(), node: node.clone() };
            process.stream.send(&Message::Assign(Box::new(assignment)));
            children.push(ClusterAgent { process, node, state: AgentState::Starting });
        }
        Ok(ClusterAgents(children))
    }

    pub fn send(&mut self, index: usize, message: &Message) {
        self.0[index].process.stream.send(message);
    }

    pub fn send_to_all(&mut self, message: &Message) {
        self.0.iter_mut().for_each(|child| child.process.stream.send(message));
    }

    /// Passes a message on to the agent for which it is. Only the agents know where spawned ranks
    /// are: those of other nodes do nothing with it.
    pub fn pass_on(&mut self, transfer: Box<FrameTransfer>) {
        let holder = self.holder(transfer.target());
        let message = Message::FrameTransfer(transfer);
        match holder {
            Some(holder) => self.send(holder, &message),
            None => self.send_to_all(&message),
        }
    }

    pub fn flush(&mut self) {
        self.0.iter_mut().for_each(|child| child.process.stream.flush());
    }

    pub fn are_ready(&self) -> bool {
        self.0.iter().all(|child| child.state.was_ready())
    }

    pub fn are_done(&self) -> bool {
        self.0.iter().all(|child| child.state.is_over())
    }

    /// The cluster whose hosts hold `rank`.
    pub fn holder(&self, rank: u32) -> Option<usize> {
        self.0.iter().position(|child| child.node.holds(rank))
    }

    /// Descriptors to wait for; `takes_input` says whether messages of agents are read now.
    pub fn descriptors(&self, takes_input: bool) -> impl Iterator<Item = PollFd<'_>> {
        self.0.iter().flat_map(move |child| {
            let stream = &child.process.stream;
            let input = stream.input().filter(|_| takes_input);
            let input = input.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            let output = stream.output().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::OUT));
            input.into_iter().chain(output)
        })
    }

    /// Ends the agents that have not answered. Such an agent has started nothing.
    pub fn end_unanswered(&self) {
        for child in self.0.iter().filter(|child| !child.process.stream.has_answered()) {
            sys::kill(child.process.pid, libc::SIGTERM);
        }
    }

    /// Kills the processes that agents on this machine have left behind. Agents have ended by now;
    /// an agent that was killed has left its processes to the launcher.
    pub fn kill_leftovers(&mut self) {
        self.0.iter_mut().for_each(|child| child.process.stream.close_output());
        let begun = Instant::now();
        let mut left = sys::descendants(&[]);
        // The launcher does not wait for a process that survives SIGKILL for that long, because
        // such a process hangs in the kernel.
        while !left.is_empty() && begun.elapsed() < 4 * LEFTOVERS_GRACE {
            if begun.elapsed() > LEFTOVERS_GRACE {
                left.iter().for_each(|&pid| sys::kill(pid, libc::SIGKILL));
            }
            std::thread::sleep(Duration::from_millis(2));
            while sys::reap_any().is_some() {}
            left = sys::descendants(&[]);
        }
    }
}
