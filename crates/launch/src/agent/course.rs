//! How far the job is, as this agent sees it: from the start of the agents below to the end.
//!
//! In: the state of the agents below, the time. Out: reports to the agent above about the start;
//! `end` advances the phases of the end.
//!
//! What may never happen: the agent reports twice that it is ready.

use std::time::{Instant, SystemTime};

use super::child_agent::ChildAgents;
use super::parent_agent::ParentAgent;
use crate::agent_startup::{self, AgentStartup, StartupNotice};
use crate::control::Message;

/// How far the end of the job has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Working,
    /// SIGTERM is sent; SIGKILL follows at this instant.
    Ending(Instant),
    /// SIGKILL is sent; agents below have until this instant.
    Killing(Instant),
}

/// How far the job is, as this agent sees it.
pub struct Course {
    /// When the agent began.
    pub started_at: SystemTime,
    pub phase: Phase,
    /// Indices in `ranks` of ranks that have ended in this pass, in the order of their ends.
    pub unreported: Vec<usize>,
    /// The start of the agents below, until all of them are ready.
    startup: Option<AgentStartup>,
    is_ready_sent: bool,
    pub done: bool,
    /// The stream to the parent has ended or timed out before the end of the job: the ranks may
    /// go on on another node.
    pub is_orphaned: bool,
}

impl Course {
    pub fn new() -> Course {
        Course {
            started_at: SystemTime::now(),
            phase: Phase::Working,
            unreported: Vec::new(),
            startup: None,
            is_ready_sent: false,
            done: false,
            is_orphaned: false,
        }
    }

    pub fn is_working(&self) -> bool {
        self.phase == Phase::Working
    }

    /// Begins to wait for the agents below.
    pub fn begin_startup(&mut self) {
        self.startup = Some(AgentStartup::new(Instant::now()));
    }

    /// When to look again for agents below that have not answered.
    pub fn startup_time(&self) -> Option<Instant> {
        self.startup.as_ref().and_then(AgentStartup::next_time)
    }

    /// Reports once that this agent and all agents below are ready.
    pub fn check_ready(&mut self, children: &ChildAgents, parent: &mut ParentAgent) {
        let is_ready = children.all.iter().all(|child| child.state().was_ready());
        if parent.assignment.is_some() && !self.is_ready_sent && is_ready {
            self.is_ready_sent = true;
            self.startup = None;
            parent.send(&Message::Ready);
        }
    }

    /// Reports agents below that have not answered for long.
    pub fn check_unanswered(&mut self, children: &ChildAgents, parent: &mut ParentAgent) {
        let is_working = self.is_working();
        let Some(startup) = self.startup.as_mut().filter(|_| is_working) else { return };
        let links = children.all.iter().map(|child| (&child.node, &child.process.stream));
        let unanswered: Vec<_> =
            links.filter_map(|(node, stream)| agent_startup::unanswered(node, stream)).collect();
        match startup.poll(Instant::now(), &unanswered) {
            Some(StartupNotice::Notice(text)) => parent.note(text),
            Some(StartupNotice::GiveUp(text)) => parent.fail(text),
            None => {}
        }
    }
}
