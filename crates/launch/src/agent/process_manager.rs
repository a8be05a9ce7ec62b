//! The process manager of this host's ranks: a PMI server for each process group, as long as
//! processes of the group live on this node or below. Group 0 is the job's first processes; ranks
//! spawn the other groups.
//!
//! In: lines of ranks, barriers and answers of the agents above and below. Out: answers to ranks,
//! and messages to the agents above and below.
//!
//! A rank that calls MPI_Abort is stopped (SIGSTOP) until the job ends: MPI libraries return from
//! that call, and the launcher looks for a better cause for a while before it ends the job. The
//! rank is not killed, because the launcher would take the end of a rank for the cause of other
//! failures.
//!
//! What may never happen: a request of a rank reaches the server, or an answer the rank, before the
//! agent above has it, if the agent above replicates the state of the rank.

use std::collections::BTreeMap;

use super::child_agent::ChildAgents;
use super::parent_agent::ParentAgent;
use super::pmi_replay::{PmiReplay, RequestReplay};
use super::rank::LocalRank;
use super::refusals::asked_too_much;
use crate::cleanup;
use crate::control::rank_state::RankUpdate;
use crate::control::spawn_order::{Block, SpawnOrder};
use crate::control::{Job, Message, Node};
use crate::ending::Ending;
use crate::pmi::kvs::Delta;
use crate::pmi::server::{Server, ServerConfig, ServerEvent};
use crate::pmi::wire::{Input, block_text, is_answered_later};
use crate::sys;
use crate::watch::is_library_code;

pub struct AgentGroup {
    pub server: Server,
    /// Processes on this node and below that have not ended.
    living: u32,
    /// A part of the group could not be started: the remaining processes are killed, and their ends
    /// are not reported.
    revoked: bool,
}

impl AgentGroup {
    /// The group of the job's first processes.
    pub fn first(job: &Job, node: &Node) -> AgentGroup {
        let config = ServerConfig {
            group: 0,
            kvsname: job.kvsname.clone(),
            universe: job.universe,
            mapping: job.mapping.clone(),
        };
        let ranks = node.first_rank..node.first_rank + node.rank_count;
        let ranks = ranks.map(|rank| (rank, job.application(rank).0));
        // Spare nodes take no part until they have ranks.
        let below = node.children.iter().enumerate().filter(|(_, child)| child.total_ranks() > 0);
        let server = Server::new(config, ranks, below.map(|(index, _)| index), &Delta::new());
        AgentGroup { server, living: node.total_ranks(), revoked: false }
    }

    /// The group of ranks of a lost node that this node has taken over.
    pub fn adopted(server: Server, living: u32) -> AgentGroup {
        AgentGroup { server, living, revoked: false }
    }

    pub fn spawned(job: &Job, node: &Node, order: &SpawnOrder, children: &[usize]) -> AgentGroup {
        let config = ServerConfig {
            group: order.group,
            kvsname: order.kvsname.clone(),
            universe: job.universe,
            mapping: order.mapping.clone(),
        };
        let ranks = |block: &Block| {
            let appnum = block.appnum;
            block.indices().map(move |index| (index, appnum))
        };
        let own = order.on(node).flat_map(ranks);
        let server = Server::new(config, own, children.iter().copied(), &order.keys);
        let living = order.below(node).map(|block| block.count).sum();
        AgentGroup { server, living, revoked: false }
    }

    pub fn handle_ended(&mut self, rank: u32) {
        self.living = self.living.saturating_sub(1);
        self.server.handle_ended(rank);
    }
}

/// The groups with processes on this node or below.
#[derive(Default)]
pub struct ProcessManager {
    /// The groups by their numbers.
    pub groups: BTreeMap<u32, AgentGroup>,
    is_stuck_sent: bool,
}

impl ProcessManager {
    /// Reads and handles what the rank has sent.
    pub fn handle_rank(&mut self, rank: &mut LocalRank, parent: &mut ParentAgent) {
        let Some(pmi) = &mut rank.pmi else { return };
        let inputs = match pmi.read() {
            Ok(inputs) => inputs,
            Err(error) => {
                rank.pmi = None;
                let number = rank.rank;
                return parent.fail(format!(
                    "rank {number} spoke no PMI-1 to its process manager: {error:?}"
                ));
            }
        };
        for input in inputs {
            let line = match input {
                Input::Line(line) => line,
                Input::Block(lines) => block_text(&lines),
            };
            rank.check_attached(parent);
            rank.contact.handle_line(&line, rank.shared.statistics_page.as_deref(), parent);
            self.handle_question(rank, &line, parent);
        }
        if let Some(pmi) = &mut rank.pmi {
            pmi.flush();
            if pmi.at_end() {
                rank.pmi = None;
            }
        }
    }

    /// Handles what a rank sends to its process manager: a line, or a block ([`block_text`]).
    fn handle_question(&mut self, rank: &mut LocalRank, line: &str, parent: &mut ParentAgent) {
        let number = rank.rank;
        let had_room = rank.replay.as_ref().is_some_and(|replay| !replay.has_asked_too_much());
        let asked = rank.replay.as_mut().map_or(RequestReplay::New, |replay| replay.ask(line));
        if had_room && rank.replay.as_ref().is_some_and(PmiReplay::has_asked_too_much) {
            parent.note(asked_too_much(number));
        }
        match asked {
            RequestReplay::New => {
                if parent.is_replicated() && rank.replay.is_some() {
                    rank.send_recording_updates(parent);
                    let question = line.to_string();
                    parent.update_rank(RankUpdate::PmiRequest { rank: number, question });
                }
                if let Some(group) = self.groups.get_mut(&rank.group) {
                    group.server.handle_question(number, line);
                }
                if is_answered_later(line) {
                    rank.reply("", parent);
                }
            }
            RequestReplay::Answered(answer) => {
                if let Some(pmi) = &mut rank.pmi {
                    pmi.send(&answer);
                }
            }
            RequestReplay::Pending => (),
            RequestReplay::Diverged { before } => {
                let replay = rank.replay.as_ref();
                let (incarnation, asked) =
                    replay.map_or((0, 0), |it| (it.restarts, it.position().0));
                parent.fail(format!(
                    "incarnation {incarnation} of rank {number} differs from the one before: its \
                     PMI request {asked} is {line:?}, and was {before:?}"
                ));
            }
        }
    }

    /// Handles everything that the servers have to say.
    pub fn drain(
        &mut self,
        ranks: &mut [LocalRank],
        children: &mut ChildAgents,
        parent: &mut ParentAgent,
    ) {
        loop {
            let mut groups = self.groups.values_mut();
            let Some(event) = groups.find_map(|group| group.server.poll_event()) else { return };
            match event {
                ServerEvent::Reply { rank, line } => reply(ranks, rank, &line, parent),
                ServerEvent::BarrierUp { group, delta } => {
                    parent.send(&Message::BarrierUp { group, delta });
                }
                ServerEvent::BarrierDown { group, delta } => self.pass_down(group, delta, children),
                ServerEvent::Abort { rank, code, message } => {
                    // The rank demands the end of the job, and must not be restarted.
                    let aborting = ranks.iter_mut().find(|local| local.rank == rank);
                    let replay = aborting.and_then(|local| local.replay.as_mut());
                    replay.into_iter().for_each(PmiReplay::abort);
                    stop_aborting(ranks, rank, code);
                    parent.send(&Message::Abort { rank, code, message });
                }
                ServerEvent::Name { rank, request } => {
                    parent.send(&Message::Name { rank, request });
                }
                ServerEvent::Spawn { rank, request } => {
                    parent.send(&Message::Spawn { rank, request: Box::new(request) });
                }
                ServerEvent::SpawnRefused { rank, problem } => {
                    parent.note(format!("rank {rank} cannot spawn: {problem}"));
                }
            }
        }
    }

    fn pass_down(&self, number: u32, delta: Delta, children: &mut ChildAgents) {
        let Some(group) = self.groups.get(&number) else { return };
        let message = Message::BarrierDown { group: number, delta };
        for child in group.server.children() {
            children.all[child].process.stream.send(&message);
        }
    }

    pub fn handle_barrier_down(&mut self, group: u32, delta: Delta) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.server.handle_barrier_down(delta);
        }
    }

    pub fn handle_barrier_up(&mut self, group: u32, child: usize, delta: Delta) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.server.handle_barrier_up(child, delta);
        }
    }

    /// Whether the rank waits in a barrier.
    pub fn is_waiting(&self, group: u32, rank: u32) -> bool {
        self.groups.get(&group).is_none_or(|group| group.server.is_waiting(rank))
    }

    /// Kills the processes of a group of which a part could not be started.
    pub fn revoke(&mut self, number: u32, ranks: &[LocalRank], children: &mut ChildAgents) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        group.revoked = true;
        for child in group.server.children() {
            let child = &mut children.all[child];
            child.spawned.remove(&number);
            child.process.stream.send(&Message::Revoke { group: number });
        }
        let own = ranks.iter().filter(|rank| rank.group == number && rank.ending.is_none());
        own.for_each(|rank| _ = sys::kill_group(rank.pid, libc::SIGKILL));
    }

    /// Drops groups of which no process is left on this node or below, because a job may spawn
    /// groups for as long as it runs. Returns their numbers.
    pub fn retire(&mut self, ranks: &[LocalRank]) -> Vec<u32> {
        let is_over = |number: u32, group: &AgentGroup| {
            let own = || ranks.iter().filter(|rank| rank.group == number);
            number != 0
                && (group.revoked || group.living == 0)
                && own().all(|rank| rank.reported.is_some())
        };
        let all = self.groups.iter().filter(|&(&number, group)| is_over(number, group));
        let over: Vec<u32> = all.map(|(&number, _)| number).collect();
        for &number in &over {
            self.remove_files(number, ranks);
            self.groups.remove(&number);
        }
        over
    }

    pub fn remove_all_files(&self, ranks: &[LocalRank]) {
        self.groups.keys().for_each(|&group| self.remove_files(group, ranks));
    }

    /// Removes the files that killed ranks of a group have left in shared memory.
    fn remove_files(&self, number: u32, ranks: &[LocalRank]) {
        let Some(group) = self.groups.get(&number) else { return };
        let own =
            |rank| ranks.iter().any(|local| local.group == number && local.group_rank == rank);
        cleanup::remove_mpich_files(group.server.kvsname(), own);
    }

    /// Removes the files that one rank has left in shared memory.
    pub fn remove_files_of(&self, rank: &LocalRank) {
        if let Some(group) = self.groups.get(&rank.group) {
            cleanup::remove_mpich_files(group.server.kvsname(), |it| it == rank.group_rank);
        }
    }

    /// Reports the end of a rank of this node.
    pub fn report_ending(&mut self, rank: &LocalRank, ending: Ending, parent: &mut ParentAgent) {
        let Some(group) = self.groups.get_mut(&rank.group) else { return };
        // The server knows what all incarnations of the rank have sent; the PMI replay knows what
        // the last incarnation has sent.
        let replay = rank.replay.as_ref();
        let stage = replay.map_or_else(|| group.server.stage(rank.rank), PmiReplay::stage);
        group.handle_ended(rank.rank);
        if !group.revoked {
            parent.send(&Message::Exited { group: rank.group, rank: rank.rank, ending, stage });
        }
    }

    /// Reports once that a rank waits for a rank that has ended.
    pub fn report_stuck(&mut self, parent: &mut ParentAgent) {
        let mut groups = self.groups.values().filter(|group| !group.revoked);
        let stuck = groups.find_map(|group| group.server.stuck());
        if let (Some(rank), false) = (stuck, self.is_stuck_sent) {
            self.is_stuck_sent = true;
            parent.send(&Message::Stuck { rank });
        }
    }
}

/// Answers the rank of this process index, if it runs on this node.
pub fn reply(ranks: &mut [LocalRank], rank: u32, line: &str, parent: &mut ParentAgent) {
    if let Some(local) = ranks.iter_mut().find(|local| local.rank == rank) {
        local.reply(line, parent);
    }
}

/// Stops a rank that has called MPI_Abort and, if the program itself has called it, all other
/// ranks of this node as well, so that they do and print nothing more. If the MPI library has
/// called it because of an error, another rank may be the cause and is yet to report its own
/// error, so the other ranks go on.
fn stop_aborting(ranks: &[LocalRank], aborting: u32, code: i32) {
    let stands = |rank: &&LocalRank| rank.rank == aborting || !is_library_code(code);
    for rank in ranks.iter().filter(|rank| rank.ending.is_none()).filter(stands) {
        sys::kill_group(rank.pid, libc::SIGSTOP);
    }
}

impl LocalRank {
    /// Answers a request of the rank.
    pub fn reply(&mut self, line: &str, parent: &mut ParentAgent) {
        if parent.is_replicated() && self.replay.is_some() {
            let answer = line.to_string();
            parent.update_rank(RankUpdate::PmiReply { rank: self.rank, answer });
        }
        if self.replay.as_mut().is_some_and(|replay| !replay.answer(line)) {
            return;
        }
        if let Some(pmi) = &mut self.pmi {
            pmi.send(line);
        }
    }
}
