//! Process groups as one agent sees them: the job's first processes (group 0) and the groups that
//! ranks spawn. The agent has one process manager for each group, as long as processes of the group
//! live on this node or below.

use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::checkpoint_scheduler::CheckpointScheduler;
use super::node_failover::NodeSpecificError;
use super::pmi_replay::{PmiReplay, RequestReplay};
use super::rank::{LaunchSpec, LocalRank};
use super::rank_recording::RankRecording;
use super::refusals::{asked_too_much, check_program, check_replayable, forbid_unseen};
use super::restore::Restore;
use super::statistics_page::StatisticsPage;
use super::{Agent, Phase};
use crate::cleanup;
use crate::control::rank_state::RankUpdate;
use crate::control::spawn_order::{Block, SpawnOrder};
use crate::control::{Assignment, Ending, Job, Message, Node};
use crate::limits;
use crate::mpi;
use crate::pmi::kvs::Delta;
use crate::pmi::server::{Server, ServerConfig, ServerEvent};
use crate::pmi::wire::{Input, block_text, is_answered_later};
use crate::restart::{self, Decision, GiveUpReason, RestartLimits};
use crate::sys;

/// Interval of reports about the replay progress of ranks.
pub(super) const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

pub(super) struct AgentGroup {
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

    fn spawned(job: &Job, node: &Node, order: &SpawnOrder, children: &[usize]) -> AgentGroup {
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

/// A new statistics page; `None` on error, because a rank can run without its statistics page.
pub(super) fn new_statistics_page() -> Option<Rc<StatisticsPage>> {
    StatisticsPage::new().ok().map(Rc::new)
}

/// Whether killed ranks of this job are to be restarted.
pub(super) fn recovers(job: &Job) -> bool {
    mpi::recovers(&job.environment)
}

/// The message that reports the present process of a rank to the launcher.
pub(super) fn alive_message(rank: &LocalRank, is_live: bool) -> Message {
    let replay = rank.replay.as_ref();
    let incarnation = replay.map_or(0, |replay| replay.restarts);
    let percent = replay.and_then(|replay| replay.percent(rank.poll_counts()));
    Message::Alive {
        group: rank.group,
        rank: rank.rank,
        pid: rank.pid,
        incarnation,
        is_live,
        percent,
    }
}

impl Agent {
    // --- starting and ending ranks

    pub(super) fn start_own_ranks(&mut self, assignment: &Assignment) -> Result<()> {
        let Assignment { job, node } = assignment;
        if node.rank_count == 0 {
            // Other nodes see by this node's announcement that this node can read their images.
            if node.is_spare {
                self.images.spare_config = self.images.config(job, node, &mut self.parent);
            }
            self.images.begin_announcing(job, node);
            return Ok(());
        }
        cleanup::remove_orphaned_mpich_files();
        let plans = self.plans(job, node)?;
        let config = self.images.config(job, node, &mut self.parent);
        let waits_for_replica = job.has_spares && node.relay_unix.is_none();
        for rank in node.first_rank..node.first_rank + node.rank_count {
            let recording =
                if recovers(job) { RankRecording::new(job, waits_for_replica)? } else { None };
            let recording = recording.map(Rc::new);
            let (appnum, task) = job.application(rank);
            forbid_unseen(rank, recording.as_deref(), &plans[&appnum], &mut self.parent);
            let start = LaunchSpec {
                recording,
                statistics_page: new_statistics_page(),
                group: 0,
                index: rank,
                rank,
                size: job.size,
                task,
                plan: &plans[&appnum],
                machine_processes: node.machine_ranks.max(node.rank_count),
                node_processes: node.rank_count,
                incarnation: recovers(job).then_some(0),
                has_images: config.is_some(),
                pid: None,
            };
            let scheduler =
                config.clone().filter(|_| start.recording.is_some() && start.has_images);
            self.start_rank(job, node, &start)?;
            if let Some(local) = self.ranks.last_mut() {
                let turn = (rank - node.first_rank, node.rank_count);
                local.scheduler =
                    scheduler.map(|config| CheckpointScheduler::new(config, rank, 0, turn));
            }
        }
        Ok(())
    }

    /// Restarts a rank whose process has ended, if the rank is to be restarted; returns whether the
    /// end is handled here. The end of a restarted process is not reported to the launcher.
    pub(super) fn restart_rank(&mut self, index: usize, ending: Ending) -> bool {
        if self.course.phase != Phase::Working || self.ranks[index].replay.is_none() {
            return false;
        }
        // All PMI lines and output of the ended process are part of its progress, so they are read
        // first.
        self.handle_pmi(index);
        self.drain_servers();
        self.ranks[index].handle_output(&mut self.parent);
        if !self.decide_restart(index, ending) {
            return false;
        }
        // Processes that the ended process has started would repeat their work.
        sys::kill_group(self.ranks[index].pid, libc::SIGKILL);
        // The ended process may not have removed the name of its shared memory, which its next
        // incarnation uses as well.
        self.remove_files_of(index);
        let has_lost_relay =
            self.ranks[index].replay.as_ref().is_some_and(PmiReplay::has_lost_relay);
        let how = match ending {
            _ if has_lost_relay => "lost the connection to its relay".to_string(),
            Ending::Killed(signal) => format!("was killed by {}", sys::signal_name(signal)),
            Ending::Exited(code) => format!("ended with exit code {code} before MPI_Finalize"),
        };
        let outcome = match self.prepare_restart(index) {
            Ok(()) if self.ranks[index].scheduler.is_some() => {
                let rank = &mut self.ranks[index];
                rank.restore = Some(Restore::begin(rank, Some(how), &[]));
                return true;
            }
            Ok(()) => self.restart_from_start(index).map(|()| None),
            Err(error) => Err(error),
        };
        self.report_restart(index, Some(&how), outcome)
    }

    /// Reports a restart to the user: from the image of this number, or from the start of the
    /// program. Returns false if the rank could not be restarted and stays on this node. `how`: how
    /// the last incarnation has ended; `None` for a rank that comes from another node, because its
    /// move is reported already.
    pub(super) fn report_restart(
        &mut self,
        index: usize,
        how: Option<&str>,
        outcome: Result<Option<u64>>,
    ) -> bool {
        let number = self.ranks[index].rank;
        let node = self.parent.node_name().to_string();
        let text = match (&outcome, how) {
            (Ok(None), Some(how)) => format!("rank {number} {how}: restarted"),
            (Ok(Some(image)), Some(how)) => {
                format!("rank {number} {how}: restarted from checkpoint {image}")
            }
            (Err(error), how)
                if error.is::<NodeSpecificError>() && self.parent.is_replicated_for_spare() =>
            {
                let why = match how {
                    Some(how) => {
                        format!("rank {number} {how} and cannot be restarted there: {error:#}")
                    }
                    None => format!("on node {node}: rank {number} cannot be started: {error:#}"),
                };
                self.parent.request_other_node(number, why);
                return true;
            }
            (Err(error), Some(how)) => {
                format!("rank {number} {how} and cannot be restarted: {error:#}")
            }
            (Ok(None), None) => return true,
            (Ok(Some(image)), None) => {
                format!("rank {number} is restored from checkpoint {image} on {node}")
            }
            (Err(error), None) => {
                format!("rank {number} cannot be started on {node}: {error:#}")
            }
        };
        self.parent.note(limits::advise(text));
        outcome.is_ok()
    }

    fn remove_files_of(&self, index: usize) {
        let rank = &self.ranks[index];
        if let Some(group) = self.groups.get(&rank.group) {
            cleanup::remove_mpich_files(group.server.kvsname(), |it| it == rank.group_rank);
        }
    }

    /// Applies the restart rule; notes to the user why a rank is given up.
    fn decide_restart(&mut self, index: usize, ending: Ending) -> bool {
        let is_replicated = self.parent.is_replicated();
        let limits =
            self.parent.assignment.as_ref().map_or(RestartLimits::default(), |own| own.job.limits);
        let rank = &mut self.ranks[index];
        let polls = rank.poll_counts();
        let Some(replay) = rank.replay.as_mut().filter(|replay| !replay.has_aborted) else {
            return false;
        };
        let incarnations = replay.end(ending, polls, Instant::now());
        match restart::decide(incarnations, limits) {
            Decision::Restart => {
                if let (true, Some(incarnation)) = (is_replicated, incarnations.last()) {
                    let update =
                        RankUpdate::IncarnationEnded { rank: rank.rank, incarnation: *incarnation };
                    self.parent.update_rank(update);
                }
                true
            }
            Decision::Ended => {
                rank.check_output(&mut self.parent);
                false
            }
            Decision::GiveUp(why) => {
                let text = restart::give_up_text(rank.rank, incarnations, limits, &why);
                if matches!(why, GiveUpReason::Unrecoverable | GiveUpReason::RelayLost) {
                    rank.ending = Some(Ending::Exited(1));
                }
                self.parent.note(text);
                false
            }
        }
    }

    /// Begins another incarnation of the rank in the record and in the PMI replay. Fails if the
    /// rank cannot be replayed.
    fn prepare_restart(&mut self, index: usize) -> Result<()> {
        if self.ranks[index].replay.as_ref().is_some_and(PmiReplay::has_printed) {
            self.ranks[index].check_attached(&mut self.parent);
        }
        let old = &mut self.ranks[index];
        check_replayable(old)?;
        // Output of processes that the ended process has started belongs to no incarnation.
        old.close_output();
        let polls = old.recording.as_ref().map(|recording| recording.end_incarnation());
        old.replay.iter_mut().for_each(|replay| replay.begin(polls, Instant::now()));
        Ok(())
    }

    /// Restarts the rank from the start of its program, because no image of the rank is usable.
    pub(super) fn restart_from_start(&mut self, index: usize) -> Result<()> {
        let old = &self.ranks[index];
        let can_replay_from_start =
            old.scheduler.as_ref().is_none_or(CheckpointScheduler::can_replay_from_start)
                && old.recording.as_ref().is_none_or(|recording| recording.can_replay_from_start());
        if !can_replay_from_start {
            bail!(
                "none of its checkpoints can be used, and what it did before them is not kept any more"
            );
        }
        if !old.input.has(0) {
            bail!("more of standard input had been given to it than is kept");
        }
        // Files that an unusable image has put back are removed as well.
        self.remove_files_of(index);
        let assignment = self.parent.assignment.clone().context("there is no job")?;
        let Assignment { job, node } = &*assignment;
        let (_, task) = job.application(self.ranks[index].rank);
        let plan = mpi::prepare(task, job).map_err(NodeSpecificError::error)?;
        let old = &mut self.ranks[index];
        check_program(old, &plan)?;
        let replay = old.replay.as_ref().context("it does not come back")?;
        let start = LaunchSpec {
            recording: old.recording.clone(),
            statistics_page: old.statistics_page.clone(),
            has_images: old.scheduler.is_some(),
            pid: Some(old.pid).filter(|pid| *pid > 0),
            group: 0,
            index: old.rank,
            rank: old.group_rank,
            size: job.size,
            task,
            plan: &plan,
            machine_processes: node.machine_ranks.max(node.rank_count),
            node_processes: node.rank_count,
            incarnation: Some(replay.incarnation()),
        };
        let rank = LocalRank::start(job, node, &self.relay.address, &start);
        let mut rank = rank.map_err(NodeSpecificError::error)?;
        rank.replay = old.replay.take();
        rank.scheduler = old.scheduler.take();
        rank.inherit_input(old, 0);
        self.put_in_place(index, rank);
        Ok(())
    }

    pub(super) fn put_in_place(&mut self, index: usize, rank: LocalRank) {
        self.exits.watch(rank.pid);
        self.parent.send(&alive_message(&rank, false));
        self.ranks[index] = rank;
        self.ranks[index].write_input(&mut self.parent);
    }

    /// Reports the replay progress of restarted ranks every [`PROGRESS_INTERVAL`], and once that a
    /// rank has become live.
    pub(super) fn report_replayed(&mut self) {
        let is_time = self.times.progress_reported_at.elapsed() >= PROGRESS_INTERVAL;
        let mut is_reported = false;
        for rank in self.ranks.iter_mut().filter(|rank| rank.is_replaying()) {
            let polls = rank.poll_counts();
            if rank.replay.as_mut().is_some_and(|replay| replay.take_replayed(polls)) {
                self.parent.send(&alive_message(rank, true));
            } else if is_time {
                is_reported = true;
                self.parent.send(&alive_message(rank, false));
            }
        }
        if is_reported {
            self.times.progress_reported_at = Instant::now();
            self.kill_hung_replays();
        }
    }

    /// Kills ranks whose replay hangs, so that they are restarted once more. A rank that a user has
    /// stopped (SIGSTOP) is not killed.
    fn kill_hung_replays(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.is_replaying()) {
            let polls = rank.poll_counts();
            let still = rank.replay.as_mut().and_then(|replay| replay.hangs(polls, Instant::now()));
            let Some(still) = still.filter(|_| !sys::is_stopped(rank.pid)) else { continue };
            let (number, seconds) = (rank.rank, still.as_secs());
            let text = format!(
                "rank {number} has come no further for {seconds} s on its way back: it is ended, and restarted"
            );
            self.parent.note(text);
            sys::kill_group(rank.pid, libc::SIGKILL);
        }
    }

    /// Handles what a rank sends to its process manager: a line, or a block ([`block_text`]).
    fn handle_question(&mut self, index: usize, line: &str) {
        let is_replicated = self.parent.is_replicated();
        let rank = &mut self.ranks[index];
        let number = rank.rank;
        let had_room = rank.replay.as_ref().is_some_and(|replay| !replay.has_asked_too_much());
        let asked = rank.replay.as_mut().map_or(RequestReplay::New, |replay| replay.ask(line));
        if had_room && rank.replay.as_ref().is_some_and(PmiReplay::has_asked_too_much) {
            self.parent.note(asked_too_much(number));
        }
        match asked {
            RequestReplay::New => {
                if is_replicated && rank.replay.is_some() {
                    self.ranks[index].send_recording_updates(&mut self.parent);
                    let update =
                        RankUpdate::PmiRequest { rank: number, question: line.to_string() };
                    self.parent.update_rank(update);
                }
                if let Some(group) = self.groups.get_mut(&self.ranks[index].group) {
                    group.server.handle_question(number, line);
                }
                if is_answered_later(line) {
                    self.reply(number, "");
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
                self.parent.fail(format!(
                    "incarnation {incarnation} of rank {number} does not repeat what was done before: as question {asked} it asked its \
                     process manager {line:?}, before {before:?}"
                ));
            }
        }
    }

    fn start_rank(&mut self, job: &Job, node: &Node, start: &LaunchSpec) -> Result<()> {
        let rank = LocalRank::start(job, node, &self.relay.address, start)?;
        self.exits.watch(rank.pid);
        self.parent.send(&alive_message(&rank, true));
        self.ranks.push(rank);
        Ok(())
    }

    /// Starts the part of a new group that runs on this node, and forwards the order to the agents
    /// below.
    pub(super) fn handle_order(&mut self, order: SpawnOrder) {
        let Some(assignment) = self.parent.assignment.clone() else { return };
        if self.course.phase == Phase::Working {
            self.refuse_for_lost_nodes(&order);
            let children = self.forward_order(&order);
            let group = AgentGroup::spawned(&assignment.job, &assignment.node, &order, &children);
            self.groups.insert(order.group, group);
            if order.on(&assignment.node).next().is_some() {
                let problem = match self.start_group(&assignment, &order) {
                    Ok(()) => String::new(),
                    Err(error) => format!("on node {}: {error:#}", assignment.node.name),
                };
                self.parent.send(&Message::Started { group: order.group, problem });
            }
        }
    }

    /// Answers for lost nodes: the launcher has ordered processes there before it knew of the loss.
    fn refuse_for_lost_nodes(&mut self, order: &SpawnOrder) {
        let lost = self.children.iter().filter(|child| child.is_lost);
        for child in lost.filter(|child| order.below(&child.node).next().is_some()) {
            let problem = format!("node {} is lost", child.node.name);
            self.parent.send(&Message::Started { group: order.group, problem });
        }
    }

    /// Forwards the order to the agents below that take part; returns their indices.
    fn forward_order(&mut self, order: &SpawnOrder) -> Vec<usize> {
        let mut children = Vec::new();
        let all = self.children.iter_mut().enumerate();
        for (index, child) in all.filter(|(_, child)| !child.is_lost) {
            let blocks = order.below(&child.node).map(|block| (order.group, block.indices()));
            let before = child.spawned.len();
            child.spawned.extend(blocks);
            if child.spawned.len() > before {
                child.process.stream.send(&Message::SpawnOrder(Box::new(order.clone())));
                children.push(index);
            }
        }
        children
    }

    fn start_group(&mut self, assignment: &Assignment, order: &SpawnOrder) -> Result<()> {
        let Assignment { job, node } = assignment;
        let plans = order.on(node).map(|block| {
            let task = &order.tasks[block.appnum as usize];
            Ok((block, task, self.plan(task, job, node)?))
        });
        let plans = plans.collect::<Result<Vec<_>>>()?;
        let own: u32 = plans.iter().map(|(block, ..)| block.count).sum();
        let living = self.ranks.iter().filter(|rank| rank.ending.is_none()).count() as u32;
        for (block, task, plan) in plans {
            for (number, index) in block.indices().enumerate() {
                let start = LaunchSpec {
                    group: order.group,
                    index,
                    rank: block.first_rank + number as u32,
                    size: order.size,
                    task,
                    plan: &plan,
                    machine_processes: node.machine_ranks.saturating_sub(node.rank_count)
                        + living
                        + own,
                    node_processes: own,
                    incarnation: None,
                    recording: None,
                    statistics_page: new_statistics_page(),
                    has_images: false,
                    pid: None,
                };
                self.start_rank(job, node, &start)?;
            }
        }
        Ok(())
    }

    /// Kills the processes of a group of which a part could not be started.
    pub(super) fn revoke(&mut self, number: u32) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        group.revoked = true;
        for child in group.server.children() {
            self.children[child].process.stream.send(&Message::Revoke { group: number });
        }
        let own = self.ranks.iter().filter(|rank| rank.group == number && rank.ending.is_none());
        own.for_each(|rank| sys::kill_group(rank.pid, libc::SIGKILL));
    }

    /// Drops groups of which no process is left on this node or below, because a job may spawn
    /// groups for as long as it runs.
    pub(super) fn retire_groups(&mut self) {
        let ranks = &self.ranks;
        let is_over = |number: u32, group: &AgentGroup| {
            let own = || ranks.iter().filter(|rank| rank.group == number);
            number != 0 && (group.revoked || group.living == 0) && own().all(|rank| rank.reported)
        };
        let over: Vec<u32> = self
            .groups
            .iter()
            .filter(|&(&number, group)| is_over(number, group))
            .map(|(&number, _)| number)
            .collect();
        for number in over {
            self.remove_files(number);
            self.groups.remove(&number);
            self.ranks.retain(|rank| rank.group != number);
            for child in &mut self.children {
                child.spawned.retain(|&(group, _)| group != number);
            }
        }
    }

    /// Removes the files that killed ranks of a group have left in shared memory.
    pub(super) fn remove_files(&self, number: u32) {
        let Some(group) = self.groups.get(&number) else { return };
        let own =
            |rank| self.ranks.iter().any(|local| local.group == number && local.group_rank == rank);
        cleanup::remove_mpich_files(group.server.kvsname(), own);
    }

    pub(super) fn report_ending(&mut self, number: u32, rank: u32, ending: Ending) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        // The server knows what all incarnations of the rank have sent; the PMI replay knows what
        // the last incarnation has sent.
        let local = self.ranks.iter().find(|local| (local.group, local.rank) == (number, rank));
        let replay = local.and_then(|local| local.replay.as_ref());
        let stage = replay.map_or_else(|| group.server.stage(rank), PmiReplay::stage);
        group.handle_ended(rank);
        if !group.revoked {
            self.parent.send(&Message::Exited { group: number, rank, ending, stage });
        }
    }

    pub(super) fn report_stuck(&mut self) {
        let mut groups = self.groups.values().filter(|group| !group.revoked);
        let stuck = groups.find_map(|group| group.server.stuck());
        if let (Some(rank), false) = (stuck, self.course.stuck_sent) {
            self.course.stuck_sent = true;
            self.parent.send(&Message::Stuck { rank });
        }
    }

    // --- being the process manager of the ranks

    pub(super) fn handle_pmi(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        let Some(pmi) = &mut rank.pmi else { return };
        let number = rank.rank;
        let mut lines_of = Vec::new();
        match pmi.read() {
            Ok(inputs) => {
                for input in inputs {
                    match input {
                        Input::Line(line) => lines_of.push(line),
                        Input::Block(lines) => lines_of.push(block_text(&lines)),
                    }
                }
            }
            Err(error) => {
                rank.pmi = None;
                self.parent.fail(format!(
                    "rank {number} spoke no PMI-1 to its process manager: {error:?}"
                ));
                return;
            }
        }
        for line in lines_of {
            self.ranks[index].check_attached(&mut self.parent);
            self.ranks[index].handle_contact(&line, &mut self.parent);
            self.handle_question(index, &line);
        }
        if let Some(pmi) = &mut self.ranks[index].pmi {
            pmi.flush();
            if pmi.at_end() {
                self.ranks[index].pmi = None;
            }
        }
    }

    pub(super) fn drain_servers(&mut self) {
        loop {
            let mut groups = self.groups.values_mut();
            match groups.find_map(|group| group.server.poll_event()) {
                Some(event) => self.handle_event(event),
                None => return,
            }
        }
    }

    fn handle_event(&mut self, event: ServerEvent) {
        match event {
            ServerEvent::Reply { rank, line } => self.reply(rank, &line),
            ServerEvent::BarrierUp { group, delta } => {
                self.parent.send(&Message::BarrierUp { group, delta });
            }
            ServerEvent::BarrierDown { group, delta } => self.pass_down(group, delta),
            ServerEvent::Abort { rank, code, message } => {
                // The rank demands the end of the job, and must not be restarted.
                let aborting = self.ranks.iter_mut().find(|local| local.rank == rank);
                let replay = aborting.and_then(|local| local.replay.as_mut());
                replay.into_iter().for_each(PmiReplay::abort);
                self.stop_aborting(rank, code);
                self.parent.send(&Message::Abort { rank, code, message });
            }
            ServerEvent::Name { rank, request } => {
                self.parent.send(&Message::Name { rank, request })
            }
            ServerEvent::Spawn { rank, request } => {
                self.parent.send(&Message::Spawn { rank, request: Box::new(request) });
            }
            ServerEvent::SpawnRefused { rank, problem } => {
                let text = format!("rank {rank} cannot spawn: {problem}");
                self.parent.note(text);
            }
        }
    }

    pub(super) fn handle_barrier_down(&mut self, group: u32, delta: Delta) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.server.handle_barrier_down(delta);
        }
    }

    fn pass_down(&mut self, number: u32, delta: Delta) {
        let Some(group) = self.groups.get(&number) else { return };
        let message = Message::BarrierDown { group: number, delta };
        for child in group.server.children() {
            self.children[child].process.stream.send(&message);
        }
    }

    pub(super) fn reply(&mut self, rank: u32, line: &str) {
        let is_replicated = self.parent.is_replicated();
        let Some(local) = self.ranks.iter_mut().find(|local| local.rank == rank) else { return };
        if is_replicated && local.replay.is_some() {
            let update = RankUpdate::PmiReply { rank, answer: line.to_string() };
            self.parent.update_rank(update);
        }
        if local.replay.as_mut().is_some_and(|replay| !replay.answer(line)) {
            return;
        }
        if let Some(pmi) = &mut local.pmi {
            pmi.send(line);
        }
    }

    pub(super) fn deliver_answer(&mut self, rank: u32, line: String) {
        // The rank's node may be lost: then the next node receives the answer with the state of the
        // rank.
        self.failover.replicas.handle_answer(rank, &line);
        match self.children.iter_mut().find(|child| child.holds(rank)) {
            Some(child) => child.process.stream.send(&Message::Answer { rank, line }),
            None => self.reply(rank, &line),
        }
    }
}
