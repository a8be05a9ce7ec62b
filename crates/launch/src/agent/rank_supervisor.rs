//! The supervisor of this host's ranks: starts ranks, observes how they end, and restarts killed
//! ones from a checkpoint image or from the start of the program.
//!
//! In: orders of the agent above, ends of processes, the outcome of restores. Out: running ranks,
//! and reports to the agent above.
//!
//! What may never happen: a rank is restarted that cannot be replayed; two incarnations of a rank
//! run at once.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::carried_logs::CarriedLogs;
use super::checkpoint_scheduler::{CheckpointRequester, CheckpointScheduler};
use super::contact::Libraries;
use super::exits::{Exit, Exits};
use super::frame_carrier::AGENT_TICKETS;
use super::image_service::ImageService;
use super::node_cut::NodeCut;
use super::node_logs::{LogNews, NodeLogs};
use super::parent_agent::ParentAgent;
use super::pmi_replay::PmiReplay;
use super::prepare::{plan, plans};
use super::process_manager::ProcessManager;
use super::rank::{LaunchSpec, LocalRank, NodeSpecificError, SharedMemory, usual_pid};
use super::rank_recording::RankRecording;
use super::recovery_unit::RecoveryUnit;
use super::refusals::{check_program, check_replayable, forbid_unseen};
use super::restore::{ImageSource, RestartCause, Restore};
use super::statistics_page::StatisticsPage;
use crate::cleanup;
use crate::control::rank_state::RankUpdate;
use crate::control::spawn_order::SpawnOrder;
use crate::control::{Assignment, FrameTransfer, Job, Message, Node};
use crate::ending::Ending;
use crate::limits;
use crate::limits::ResourceLimits;
use crate::mpi;
use crate::restart::{self, Decision, GiveUpReason, RestartLimits};
use crate::sys;

/// Longest wait until the processes that a killed rank has started are gone.
const GROUP_WAIT_MAX: Duration = Duration::from_millis(500);

/// Interval of reports about the replay progress of ranks.
pub const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// Whether killed ranks of this job are to be restarted.
pub fn recovers(job: &Job) -> bool {
    mpi::recovers(&job.environment)
}

/// The message that reports the present process of a rank to the launcher.
pub fn alive_message(rank: &LocalRank, is_live: bool) -> Message {
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

/// Notes for all ranks whether one of them has no process.
fn note_absence(ranks: &[LocalRank], is_absent: bool) {
    let recordings = ranks.iter().filter_map(|rank| rank.recording.as_ref());
    recordings.for_each(|recording| recording.note_absence(is_absent));
}

/// The ranks of this host and what is known of their processes.
pub struct RankSupervisor {
    pub ranks: Vec<LocalRank>,
    /// The restores in progress, by rank.
    restores: BTreeMap<u32, Restore>,
    pub exits: Exits,
    /// Whether the records of the ranks say that a rank has no process ([`Self::reap`]).
    has_absent: bool,
    /// MPI libraries that were found in processes of the ranks.
    libraries: Libraries,
    limits: ResourceLimits,
    /// The message logs of this node's ranks, if the senders keep messages.
    node_logs: Option<Rc<NodeLogs>>,
    node_cut: Option<Rc<NodeCut>>,
    carried_logs: Option<CarriedLogs>,
    /// The ranks of this node, if they begin again together.
    pub unit: Option<RecoveryUnit>,
    /// When the replay progress of the ranks was reported last.
    progress_reported_at: Instant,
}

impl RankSupervisor {
    pub fn new() -> RankSupervisor {
        RankSupervisor {
            ranks: Vec::new(),
            restores: BTreeMap::new(),
            exits: Exits::new(),
            has_absent: false,
            libraries: Libraries::default(),
            limits: ResourceLimits::default(),
            node_logs: None,
            node_cut: None,
            carried_logs: None,
            unit: None,
            progress_reported_at: Instant::now(),
        }
    }

    /// The rank that runs as `pid`. The system may give the process id of a process that has ended
    /// to another process.
    pub fn index_of(&self, pid: u32) -> Option<usize> {
        self.ranks.iter().position(|rank| rank.pid == pid && rank.ending.is_none())
    }

    pub fn running(&self) -> impl Iterator<Item = &LocalRank> {
        self.ranks.iter().filter(|rank| rank.ending.is_none())
    }

    /// Reaps processes that have ended. Before the process id of a rank disappears, all ranks are
    /// notified that it is absent: one that asks for the process waits ([`Self::note_presence`]).
    pub fn reap(&mut self) -> Vec<Exit> {
        let (ranks, has_absent) = (&self.ranks, Cell::new(self.has_absent));
        let exits = self.exits.reap(&|pid| {
            let is_rank = ranks.iter().any(|rank| rank.pid == pid && rank.ending.is_none());
            if is_rank {
                note_absence(ranks, true);
                has_absent.set(true);
            }
        });
        self.has_absent = has_absent.get();
        exits
    }

    /// Notifies the ranks that each of them has a process again, or has none for good.
    pub fn note_presence(&mut self) {
        let is_absent = |rank: &LocalRank| rank.ending.is_some() && rank.reported.is_none();
        if self.has_absent && !self.ranks.iter().any(is_absent) {
            note_absence(&self.ranks, false);
            self.has_absent = false;
        }
    }

    /// Passes the end of `pid` to the checkpoint scheduler or the restore whose process it is;
    /// returns whether there was one.
    pub fn note_exit(&mut self, pid: u32, ending: Ending) -> bool {
        let mut schedulers = self.ranks.iter_mut().filter_map(|rank| rank.scheduler.as_mut());
        if schedulers.any(|scheduler| scheduler.note_exit(pid, ending)) {
            return true;
        }
        self.restores.values_mut().any(|restore| restore.note_exit(pid, ending))
    }

    /// Begins to restore a rank without a process: see [`Restore::begin`].
    pub fn begin_restore(&mut self, index: usize, cause: RestartCause, images: ImageSource) {
        let restore = Restore::begin(&mut self.ranks[index], cause, images);
        self.put_back_restore(index, restore);
    }

    /// Takes the restore of a rank out, to advance or to end it.
    pub fn take_restore(&mut self, index: usize) -> Option<Restore> {
        let rank = &mut self.ranks[index];
        rank.is_restoring = false;
        self.restores.remove(&rank.rank)
    }

    /// Puts a restore back that has not ended.
    pub fn put_back_restore(&mut self, index: usize, restore: Restore) {
        let rank = &mut self.ranks[index];
        rank.is_restoring = true;
        self.restores.insert(rank.rank, restore);
    }

    /// Whether this rank is being restored from an image.
    pub fn is_restoring(&self, rank: u32) -> bool {
        self.restores.contains_key(&rank)
    }

    /// When the restores in progress want to be advanced.
    pub fn restore_times(&self) -> impl Iterator<Item = Instant> {
        self.restores.values().map(Restore::next_time)
    }

    /// Notes to the user which limits of this node may have caused this ending.
    pub fn explain_ending(&mut self, ending: Ending, parent: &mut ParentAgent) {
        let Some(own) = parent.assignment.clone() else { return };
        for text in self.limits.explain(&own.node.name, ending) {
            parent.note(text);
        }
    }

    /// Checks the ranks whose contact with this process manager is due.
    pub fn watch_contacts(&mut self, processes: &ProcessManager, parent: &mut ParentAgent) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.ending.is_none()) {
            let is_waiting = || processes.is_waiting(rank.group, rank.rank);
            let page = rank.shared.statistics_page.as_deref();
            rank.contact.watch(rank.pid, page, &mut self.libraries, is_waiting, parent);
        }
    }

    /// Requests a checkpoint image of this rank, or of all ranks, before the next images are due.
    pub fn request_checkpoints(&mut self, rank: Option<u32>, asker: CheckpointRequester) {
        let is_it = |it: &&mut LocalRank| rank.is_none_or(|rank| rank == it.rank);
        for it in self.ranks.iter_mut().filter(is_it) {
            if let Some(scheduler) = it.scheduler.as_mut().filter(|_| it.ending.is_none()) {
                scheduler.request(asker, Instant::now());
            }
        }
    }

    /// Informs the checkpoint schedulers which nodes may take over the ranks, by the numbers of
    /// their lease files.
    pub fn set_spares(&mut self, leases: &[u32]) {
        let schedulers = self.ranks.iter_mut().filter_map(|rank| rank.scheduler.as_mut());
        schedulers.for_each(|scheduler| scheduler.set_spares(leases));
    }

    /// Bytes that all checkpoint images of this node take.
    pub fn image_bytes(&self) -> u64 {
        let schedulers = self.ranks.iter().filter_map(|rank| rank.scheduler.as_ref());
        schedulers.map(CheckpointScheduler::bytes).sum()
    }

    /// Starts the ranks that the assignment places on this node.
    pub fn start_own(
        &mut self,
        assignment: &Assignment,
        images: &mut ImageService,
        relay: &str,
        parent: &mut ParentAgent,
    ) -> Result<()> {
        let Assignment { job, node } = assignment;
        self.node_logs = NodeLogs::new(job, node)?;
        if mpi::begin_again_together(&job.environment) {
            let ranks = node.first_rank..node.first_rank + node.rank_count;
            self.unit = Some(RecoveryUnit::new(ranks));
        }
        let waits_for_replica = job.has_spares && node.relay_unix.is_none();
        self.node_cut = self.node_logs.clone().filter(|_| waits_for_replica).map(NodeCut::new);
        let carried = |logs| CarriedLogs::new(logs, self.node_cut.clone());
        self.carried_logs = self.node_logs.clone().map(carried);
        if node.rank_count == 0 {
            // Other nodes see by this node's announcement that this node can read their images.
            if node.is_spare {
                images.spare_config = images.config(job, node, parent);
            }
            images.begin_announcing(job, node);
            return Ok(());
        }
        cleanup::remove_orphaned_mpich_files();
        let plans = plans(job, node, parent)?;
        let config = images.config(job, node, parent);
        for rank in node.first_rank..node.first_rank + node.rank_count {
            let recording = if recovers(job) {
                RankRecording::new(job, rank, waits_for_replica)?
            } else {
                None
            };
            let recording = recording.map(Rc::new);
            self.note_recorded(rank, recording.as_ref());
            let (appnum, task) = job.application(rank);
            forbid_unseen(rank, recording.as_deref(), &plans[&appnum], parent);
            let start = LaunchSpec {
                recording,
                shared: self.shared_memory(),
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
                pid: usual_pid(job, rank),
            };
            let scheduler =
                config.clone().filter(|_| start.recording.is_some() && start.has_images);
            self.start(job, node, &start, relay, parent)?;
            if let Some(local) = self.ranks.last_mut() {
                let turn = (rank - node.first_rank, node.rank_count);
                local.scheduler =
                    scheduler.map(|config| CheckpointScheduler::new(config, rank, 0, turn));
            }
        }
        Ok(())
    }

    /// Memory files of a rank besides its record.
    pub fn shared_memory(&self) -> SharedMemory {
        SharedMemory {
            statistics_page: StatisticsPage::shared(),
            node_logs: self.node_logs.clone(),
            node_cut: self.node_cut.clone(),
        }
    }

    /// Notes a rank that is to start here, and its record.
    pub fn note_recorded(&self, rank: u32, recording: Option<&Rc<RankRecording>>) {
        if let (Some(cut), Some(recording)) = (&self.node_cut, recording) {
            cut.add(rank, recording);
        }
    }

    /// Sends the agent above what frames of this node depend on that wait to leave it.
    pub fn pass_on_for_tickets(&self, parent: &mut ParentAgent) {
        let Some(logs) = &self.node_logs else { return };
        if let (Some(cut), Some(ticket)) = (&self.node_cut, logs.tickets.take_new_ticket()) {
            cut.send(ticket, parent);
        }
    }

    /// The message logs of this node, if the senders keep messages.
    pub fn node_logs(&self) -> Option<&NodeLogs> {
        self.node_logs.as_deref()
    }

    /// What ranks have written into the file of their logs since the last time.
    pub fn take_log_news(&self) -> LogNews {
        let has_images = |rank: u32| {
            self.ranks.iter().any(|local| local.rank == rank && local.scheduler.is_some())
        };
        self.node_logs.as_ref().map_or_else(LogNews::default, |logs| logs.take_news(has_images))
    }

    // --- frames of logs that the agents carry

    /// When ranks are looked at next that may do nothing.
    pub fn frames_time(&self) -> Option<Instant> {
        self.carried_logs.as_ref().and_then(CarriedLogs::next_time)
    }

    pub fn carry_frames(&mut self, parent: &mut ParentAgent) {
        self.carried_logs.iter_mut().for_each(|logs| logs.advance(parent));
    }

    /// Whether the end of a rank may be reported ([`CarriedLogs::is_compared`]).
    pub fn is_compared(&mut self, index: usize, parent: &mut ParentAgent) -> bool {
        let rank = self.ranks[index].rank;
        self.carried_logs.as_mut().is_none_or(|logs| logs.is_compared(rank, parent))
    }

    pub fn handle_emptied_mailboxes(&mut self, parent: &mut ParentAgent) {
        self.carried_logs.iter_mut().for_each(|logs| logs.carrier.handle_bell(parent));
    }

    /// The agent above knows what the frames depend on for which this ticket was drawn.
    pub fn handle_stable(&mut self, ticket: u64) -> Result<()> {
        match (&mut self.carried_logs, &self.node_logs) {
            (Some(carried), _) if ticket >= AGENT_TICKETS => carried.carrier.handle_stable(ticket),
            (_, Some(logs)) => logs.answer_ticket(ticket)?,
            _ => (),
        }
        Ok(())
    }

    /// Handles what another agent says about a log of, or to, a rank of this node.
    pub fn handle_frame_transfer(&mut self, transfer: FrameTransfer, parent: &mut ParentAgent) {
        if let Some(logs) = &mut self.carried_logs {
            logs.handle(transfer, parent);
        }
    }

    /// Starts the ranks of a spawned group that the order places on this node.
    pub fn start_group(
        &mut self,
        assignment: &Assignment,
        order: &SpawnOrder,
        relay: &str,
        parent: &mut ParentAgent,
    ) -> Result<()> {
        let Assignment { job, node } = assignment;
        let plans = order.on(node).map(|block| {
            let task = &order.tasks[block.appnum as usize];
            Ok((block, task, plan(task, job, node, parent)?))
        });
        let plans = plans.collect::<Result<Vec<_>>>()?;
        let own: u32 = plans.iter().map(|(block, ..)| block.count).sum();
        let living = self.ranks.iter().filter(|rank| rank.ending.is_none()).count() as u32;
        for (block, task, plan) in plans {
            for (number, index) in block.indices().enumerate() {
                if let Some(logs) = &self.node_logs {
                    logs.add(index..index + 1)?;
                }
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
                    shared: self.shared_memory(),
                    has_images: false,
                    pid: None,
                };
                self.start(job, node, &start, relay, parent)?;
            }
        }
        Ok(())
    }

    fn start(
        &mut self,
        job: &Job,
        node: &Node,
        start: &LaunchSpec,
        relay: &str,
        parent: &mut ParentAgent,
    ) -> Result<()> {
        let rank = LocalRank::start(job, node, relay, start)?;
        self.exits.watch(rank.pid);
        parent.send(&alive_message(&rank, true));
        self.ranks.push(rank);
        Ok(())
    }

    /// Restarts a rank whose process has ended, if the rank is to be restarted; returns whether the
    /// end is handled here. The end of a restarted process is not reported to the launcher. The
    /// caller has read all PMI lines and output of the ended process, which are part of its
    /// progress.
    pub fn restart(
        &mut self,
        index: usize,
        ending: Ending,
        processes: &ProcessManager,
        relay: &str,
        parent: &mut ParentAgent,
    ) -> bool {
        if self.goes_back(index, ending) {
            return true;
        }
        if !self.decide_restart(index, ending, parent) {
            return false;
        }
        let has_lost_relay =
            self.ranks[index].replay.as_ref().is_some_and(PmiReplay::has_lost_relay);
        let how = match ending {
            _ if has_lost_relay => "lost the connection to its relay".to_string(),
            Ending::Killed(signal) => format!("was killed by {}", sys::signal_name(signal)),
            Ending::Exited(code) => format!("ended with exit code {code} before MPI_Finalize"),
        };
        if let Some(unit) = self.unit.as_mut().filter(|unit| unit.has(self.ranks[index].rank)) {
            unit.begin_again(self.ranks[index].rank, how);
            return true;
        }
        let cause = RestartCause::Ended(how);
        self.begin_incarnation(index, (cause, Some(ImageSource::Own)), processes, relay, parent)
    }

    /// Whether the end of this process belongs to a recovery unit that begins again.
    fn goes_back(&mut self, index: usize, ending: Ending) -> bool {
        let rank = &mut self.ranks[index];
        let is_ended = self.unit.as_ref().is_some_and(|unit| unit.has_ended(rank.rank));
        let goes_back = is_ended && ending == Ending::Killed(libc::SIGKILL);
        if goes_back {
            let polls = rank.poll_counts();
            let now = Instant::now();
            rank.replay.iter_mut().for_each(|replay| replay.go_back(ending, polls, now));
        }
        goes_back
    }

    /// Begins another incarnation of a rank whose process has ended: from `images`, if images of it
    /// are taken, or with its program. Returns false if the rank cannot be restarted and stays on
    /// this node.
    pub fn begin_incarnation(
        &mut self,
        index: usize,
        (cause, images): (RestartCause, Option<ImageSource>),
        processes: &ProcessManager,
        relay: &str,
        parent: &mut ParentAgent,
    ) -> bool {
        // Processes that the ended process has started would repeat their work, and as long as one
        // is there the process id is not free.
        sys::end_group(self.ranks[index].pid, GROUP_WAIT_MAX);
        // The ended process may not have removed the name of its shared memory, which its next
        // incarnation uses as well.
        processes.remove_files_of(&self.ranks[index]);
        let images = images.filter(|_| self.ranks[index].scheduler.is_some());
        let outcome = match (self.ranks[index].prepare_restart(parent), images) {
            (Ok(()), Some(images)) => {
                self.begin_restore(index, cause, images);
                return true;
            }
            (Ok(()), None) => {
                self.restart_from_start(index, processes, relay, parent).map(|()| None)
            }
            (Err(error), _) => Err(error),
        };
        self.report_restart(index, &cause, outcome, parent)
    }

    /// Applies the restart rule; notes to the user why a rank is given up.
    fn decide_restart(&mut self, index: usize, ending: Ending, parent: &mut ParentAgent) -> bool {
        let is_replicated = parent.is_replicated();
        let limits =
            parent.assignment.as_ref().map_or(RestartLimits::default(), |own| own.job.limits);
        let rank = &mut self.ranks[index];
        let polls = rank.poll_counts();
        let Some(replay) = rank.replay.as_mut().filter(|replay| !replay.has_aborted) else {
            return false;
        };
        let incarnations = replay.end(ending, polls, Instant::now());
        match restart::decide(incarnations, limits) {
            Decision::Restart => {
                if let (true, Some(incarnation)) = (is_replicated, incarnations.last()) {
                    let (rank, incarnation) = (rank.rank, *incarnation);
                    let last_words = replay.last_words();
                    parent.update_rank(RankUpdate::IncarnationEnded {
                        rank,
                        incarnation,
                        last_words,
                    });
                }
                true
            }
            Decision::Ended => {
                rank.check_repeated(ending, parent);
                false
            }
            Decision::GiveUp(why) => {
                let text = restart::give_up_text(rank.rank, incarnations, limits, &why);
                if matches!(why, GiveUpReason::Unrecoverable | GiveUpReason::RelayLost) {
                    rank.ending = Some(Ending::Exited(1));
                }
                parent.note(text);
                false
            }
        }
    }

    /// Restarts the rank from the start of its program, because no image of the rank is usable.
    pub fn restart_from_start(
        &mut self,
        index: usize,
        processes: &ProcessManager,
        relay: &str,
        parent: &mut ParentAgent,
    ) -> Result<()> {
        let old = &self.ranks[index];
        let can_replay_from_start =
            old.scheduler.as_ref().is_none_or(|it| it.images.can_replay_from_start())
                && old.recording.as_ref().is_none_or(|recording| recording.can_replay_from_start());
        if !can_replay_from_start {
            bail!(
                "none of its checkpoints can be used, and what it did before them is not kept any \
                 more"
            );
        }
        if !old.streams.input.has(0) {
            bail!("more of standard input had been given to it than is kept");
        }
        // Files that an unusable image has put back are removed as well.
        processes.remove_files_of(&self.ranks[index]);
        let assignment = parent.assignment.clone().context("there is no job")?;
        let Assignment { job, node } = &*assignment;
        let (_, task) = job.application(self.ranks[index].rank);
        let plan = mpi::prepare(task, job).map_err(NodeSpecificError::error)?;
        let old = &mut self.ranks[index];
        check_program(old, &plan)?;
        let replay = old.replay.as_ref().context("it cannot be restarted")?;
        let start = LaunchSpec {
            recording: old.recording.clone(),
            shared: old.shared.clone(),
            has_images: old.scheduler.is_some(),
            pid: Some(old.pid).filter(|pid| *pid > 0).or_else(|| usual_pid(job, old.rank)),
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
        let rank = LocalRank::start(job, node, relay, &start);
        let mut rank = rank.map_err(NodeSpecificError::error)?;
        rank.replay = old.replay.take();
        rank.scheduler = old.scheduler.take();
        rank.inherit_input(old, 0);
        self.put_in_place(index, rank, parent);
        Ok(())
    }

    /// Reports a restart to the user: from the image of this number, or from the start of the
    /// program. Returns false if the rank could not be restarted and stays on this node.
    pub fn report_restart(
        &mut self,
        index: usize,
        cause: &RestartCause,
        outcome: Result<Option<u64>>,
        parent: &mut ParentAgent,
    ) -> bool {
        let number = self.ranks[index].rank;
        let node = parent.node_name().to_string();
        if let Err(error) = &outcome
            && error.is::<NodeSpecificError>()
            && parent.is_replicated_for_spare()
        {
            parent.request_other_node(number, cause.cannot_here(number, &node, error));
            return true;
        }
        let Some(text) = cause.text(number, &node, &outcome) else { return true };
        parent.note(limits::advise(text));
        outcome.is_ok()
    }

    /// Replaces a rank by its next incarnation.
    pub fn put_in_place(&mut self, index: usize, rank: LocalRank, parent: &mut ParentAgent) {
        self.exits.watch(rank.pid);
        parent.send(&alive_message(&rank, false));
        self.ranks[index] = rank;
        self.ranks[index].write_input(parent);
    }

    /// Reports the replay progress of restarted ranks every [`PROGRESS_INTERVAL`], and once that a
    /// rank has become live.
    pub fn report_replayed(&mut self, parent: &mut ParentAgent) {
        let is_time = self.progress_reported_at.elapsed() >= PROGRESS_INTERVAL;
        let mut is_reported = false;
        for rank in self.ranks.iter_mut().filter(|rank| rank.is_replaying()) {
            let polls = rank.poll_counts();
            if rank.replay.as_mut().is_some_and(|replay| replay.take_replayed(polls)) {
                parent.send(&alive_message(rank, true));
            } else if is_time {
                is_reported = true;
                parent.send(&alive_message(rank, false));
            }
        }
        if is_reported {
            self.progress_reported_at = Instant::now();
            self.kill_hung_replays(parent);
        }
    }

    /// Kills ranks whose replay hangs, so that they are restarted once more. A rank that a user has
    /// stopped (SIGSTOP) is not killed.
    fn kill_hung_replays(&mut self, parent: &mut ParentAgent) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.is_replaying()) {
            let polls = rank.poll_counts();
            let still = rank.replay.as_mut().and_then(|replay| replay.hangs(polls, Instant::now()));
            let Some(still) = still.filter(|_| !sys::is_stopped(rank.pid)) else { continue };
            let (number, seconds) = (rank.rank, still.as_secs());
            let text = format!(
                "rank {number} has made no progress for {seconds} s in its replay: it is ended, \
                 and restarted"
            );
            parent.note(text);
            sys::kill_group(rank.pid, libc::SIGKILL);
        }
    }

    /// Process ids that do not belong to a rank that has ended, besides those in `others`.
    pub fn unrelated(&self, others: Vec<u32>) -> Vec<u32> {
        let mut unrelated = others;
        for rank in &self.ranks {
            unrelated.extend(rank.ending.is_none().then_some(rank.pid));
            unrelated.extend(rank.scheduler.as_ref().and_then(CheckpointScheduler::criu));
        }
        unrelated.extend(self.restores.values().filter_map(Restore::criu));
        unrelated
    }
}

impl LocalRank {
    /// Begins another incarnation of the rank in the record and in the PMI replay. Fails if the
    /// rank cannot be replayed.
    fn prepare_restart(&mut self, parent: &mut ParentAgent) -> Result<()> {
        if self.replay.as_ref().is_some_and(PmiReplay::has_printed) {
            self.check_attached(parent);
        }
        check_replayable(self)?;
        // Output of processes that the ended process has started belongs to no incarnation.
        self.streams.close_output();
        let polls = self.recording.as_ref().map(|recording| recording.end_incarnation());
        self.replay.iter_mut().for_each(|replay| replay.begin(polls, Instant::now()));
        Ok(())
    }
}
