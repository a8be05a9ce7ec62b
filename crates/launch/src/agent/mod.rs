//! The agent of one host: starts the host's ranks, is their process manager, and starts the agents
//! below it in the tree.
//!
//! In: messages of the parent (the launcher, or the agent of the cluster's relay host) over stdin,
//! messages of the agents below, PMI lines and output of ranks, signals. Out: messages to the
//! parent over stdout, in the order in which events happen to ranks; messages to the agents below.
//!
//! One loop serves everything: every descriptor is non-blocking, and every pass handles signals,
//! messages, PMI lines and output, in this order. (`spawn/command_stderr.rs` handles the standard
//! error of ssh and other start commands.)
//!
//! Each module uses only modules of its row and of the rows above:
//!
//! | module | is |
//! |---|---|
//! | `exits` | the order in which child processes end |
//! | `log_file`, `log_region` | the files of message logs |
//! | `parent_agent`, `relay` | the agent above, with the assignment; the relay daemon |
//! | `input`, `forwarded_input`, `child_agent` | what rank 0 reads; the agents below |
//! | `course` | how far the job is |
//! | `tagged_output`, `pmi_replay` | what a rank has printed and asked |
//! | `held_files`, `rank_recording` | what a rank has recorded, and its open files |
//! | `replicated_recording`, `replicated_rank_state` | what other nodes need of a rank |
//! | `state_transfer` | how they get it |
//! | `image_logs` | what images hold of message logs |
//! | `node_logs`, `node_cut` | message logs of the ranks of this node |
//! | `log_comparison` | whether a moved rank sends the same again |
//! | `frame_carrier` | frames of logs that the agents carry to other nodes |
//! | `end_comparison` | what a moved rank has sent again, before its end is reported |
//! | `carried_logs` | what agents do for logs between nodes: carry and compare |
//! | `statistics_page`, `contact` | what a rank tells of its paths, and whether it uses us |
//! | `prepare`, `image_service` | programs of ranks; where checkpoint images lie |
//! | `checkpoint_scheduler` | when a checkpoint image is taken, step by step |
//! | `rank` | a rank: its process, its PMI socket, its streams |
//! | `checkpoint_round` | one round of a rank's checkpoint |
//! | `restore` | the return of a rank from an image |
//! | `stdio`, `refusals` | the streams of a rank; why it cannot be replayed |
//! | `recovery_unit` | ranks of this node that begin again together |
//! | `process_manager`, `rank_supervisor` | PMI servers of groups; starts and restarts of ranks |
//! | `wanted_images` | which image full message logs have first |
//! | `unit_rollback` | the steps by which ranks begin again together |
//! | `durable_effects`, `node_failover` | lost nodes, and ranks that come from them |
//! | `path_query`, `log_report` | queries for paths and for message logs |
//! | `poll_set` | what the loop waits for |
//! | `messages`, `end` | parts of the loop: messages of other agents; the end |
//!
//! What may never happen: a process that the agent has started outlives the agent. When the stream
//! to the parent ends, for whatever reason, the agent ends everything that it has started.

mod carried_logs;
mod checkpoint_round;
mod checkpoint_scheduler;
mod child_agent;
mod contact;
mod course;
mod durable_effects;
mod end;
mod end_comparison;
mod exits;
mod forwarded_input;
mod frame_carrier;
mod held_files;
mod image_logs;
mod image_service;
mod input;
mod log_comparison;
mod log_file;
mod log_region;
mod log_report;
mod messages;
mod node_cut;
mod node_failover;
mod node_logs;
mod parent_agent;
mod path_query;
mod pmi_replay;
mod poll_set;
mod prepare;
mod process_manager;
pub mod rank;
mod rank_recording;
mod rank_supervisor;
mod recovery_unit;
mod refusals;
pub mod relay;
mod replicated_rank_state;
mod replicated_recording;
mod restore;
mod state_transfer;
mod statistics_page;
mod stdio;
mod tagged_output;
mod unit_rollback;
mod wanted_images;

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::PollFlags;

use crate::checkpoint::lease::Lease;
use crate::control::{ALIVE_INTERVAL, Message, PING_INTERVAL};
use crate::control_stream::ControlStream;
use crate::ending::Ending;
use crate::sys::{self, Signals};
use checkpoint_round::{CheckpointRound, CheckpointStep};
use checkpoint_scheduler::{CheckpointRequester, CheckpointScheduler};
use child_agent::ChildAgents;
use course::{Course, Phase};
use exits::Exit;
use image_service::ImageService;
use node_failover::NodeFailover;
use parent_agent::ParentAgent;
use path_query::PathQuery;
use poll_set::{PollSet, Source};
use process_manager::ProcessManager;
use rank::LocalRank;
use rank_supervisor::RankSupervisor;
use relay::RelayProcess;
use relay::RelayService;
use restore::{RestoreContext, RestoreOutcome};
use state_transfer::StateTransfer;
use wanted_images::WantedImages;

/// The shortest wait for events.
const MILLISECOND: Duration = Duration::from_millis(1);

/// `landbridge agent`: runs until the parent has ended the stream and everything below is over.
pub fn main() -> Result<()> {
    let signals = [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
    let signals = Signals::block(&signals)?;
    sys::adopt_orphans()?;
    sys::keep_inherited();
    sys::raise_open_files();
    let mut agent = Agent::new(signals)?;
    agent.run();
    Ok(())
}

struct Agent {
    parent: ParentAgent,
    signals: Signals,
    processes: ProcessManager,
    children: ChildAgents,
    supervisor: RankSupervisor,
    failover: NodeFailover,
    images: ImageService,
    relay: RelayService,
    course: Course,
    /// A query for the state of the ranks' paths that is not answered yet.
    path_query: Option<PathQuery>,
    wanted_images: WantedImages,
}

impl Agent {
    fn new(signals: Signals) -> Result<Agent> {
        let input = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
        let output = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?;
        close_standard_streams()?;
        Ok(Agent {
            parent: ParentAgent::new(ControlStream::to_parent(input, output)?),
            signals,
            processes: ProcessManager::default(),
            children: ChildAgents::new(),
            supervisor: RankSupervisor::new(),
            failover: NodeFailover::default(),
            images: ImageService::default(),
            relay: RelayService::default(),
            course: Course::new(),
            path_query: None,
            wanted_images: WantedImages::default(),
        })
    }

    fn run(&mut self) {
        loop {
            let ready = self.wait();
            self.handle_signals();
            // The agent reports endings before it reads what running ranks say, because a running
            // rank may report that it has lost a rank that has ended.
            self.report_endings();
            self.handle_parent();
            self.handle_children();
            for &source in &ready {
                self.handle_source(source);
            }
            self.drain_servers();
            self.advance_restores();
            advance_unit(self);
            self.supervisor.note_presence();
            self.supervisor.report_replayed(&mut self.parent);
            self.advance_checkpoints();
            self.images.advance_announcing(&mut self.parent);
            self.images.lease.iter_mut().for_each(Lease::renew);
            self.processes.report_stuck(&mut self.parent);
            self.supervisor.watch_contacts(&self.processes, &mut self.parent);
            self.supervisor.carry_frames(&mut self.parent);
            self.retire_groups();
            self.check_parent();
            self.parent.send_keepalive();
            self.failover_round().check_lost_nodes();
            self.failover_round().advance_transfers();
            self.course.check_unanswered(&self.children, &mut self.parent);
            self.advance_path_query();
            self.advance_end();
            self.parent.stream.flush();
            self.relay.process.iter_mut().for_each(RelayProcess::flush);
            self.children.flush();
            if self.course.done
                && (self.parent.stream.output().is_none() || self.parent.stream.at_end())
            {
                return;
            }
        }
    }

    fn wait(&self) -> Vec<Source> {
        let room = self.parent.has_room();
        let mut set = PollSet::default();
        set.add(Source::Wake, self.signals.as_fd(), PollFlags::IN);
        set.add_stream(Source::Parent, &self.parent.stream, true);
        for (index, child) in self.children.all.iter().enumerate() {
            set.add_stream(Source::Child(index), &child.process.stream, room);
        }
        for (index, rank) in self.supervisor.ranks.iter().enumerate() {
            set.add_rank(index, rank, room);
        }
        self.relay.process.iter().for_each(|relay| set.add_relay(relay));
        if let Some(logs) = self.supervisor.node_logs() {
            set.add(Source::LogBell, logs.contacts.bell(), PollFlags::IN);
        }
        set.wait(self.timeout())
    }

    fn timeout(&self) -> Option<Duration> {
        match self.course.phase {
            Phase::Working => {
                let notice = self.course.startup_time();
                let path_query = self.path_query.as_ref().map(PathQuery::next_time);
                let images = self.supervisor.ranks.iter().filter_map(LocalRank::checkpoint_time);
                let returns = self.supervisor.restore_times();
                let contacts =
                    self.supervisor.running().filter_map(|rank| rank.contact.next_time());
                let transfer = self.failover.transfers.first().and_then(StateTransfer::begins_at);
                let may_move_ranks = self.parent.may_move_ranks();
                let loss = may_move_ranks
                    .then(|| self.children.next_loss(self.parent.node_patience()))
                    .flatten();
                let frames = self.supervisor.frames_time();
                let unit = self.supervisor.unit.as_ref().and_then(|unit| unit.next_time());
                let frames = frames.into_iter().chain(unit).chain(self.wanted_images.next_time());
                let times = notice.into_iter().chain(path_query).chain(images).chain(transfer);
                let notice = times.chain(returns).chain(contacts).chain(loss).chain(frames).min();
                let wait = |at: Instant| at.saturating_duration_since(Instant::now());
                let is_replaying = self.supervisor.ranks.iter().any(LocalRank::is_replaying);
                let most =
                    if is_replaying { rank_supervisor::PROGRESS_INTERVAL } else { PING_INTERVAL };
                let most = if may_move_ranks { most.min(ALIVE_INTERVAL) } else { most };
                Some(notice.map_or(PING_INTERVAL, wait).clamp(MILLISECOND, most))
            }
            // No signal reports that an orphan has become a child of this process: look again every
            // 20 ms.
            Phase::Ending(_) | Phase::Killing(_) => Some(Duration::from_millis(20)),
        }
    }

    fn handle_source(&mut self, source: Source) {
        match source {
            Source::Pmi(index) => {
                self.processes.handle_rank(&mut self.supervisor.ranks[index], &mut self.parent)
            }
            Source::Output(index) => self.supervisor.ranks[index].handle_output(&mut self.parent),
            Source::RankInput(index) => self.supervisor.ranks[index].write_input(&mut self.parent),
            Source::EffectRequest(index) => {
                self.failover
                    .effects
                    .handle_request(&self.supervisor.ranks[index], &mut self.parent);
            }
            Source::Relay => self.handle_relay(),
            Source::LogBell => {
                let news = self.supervisor.take_log_news();
                self.wanted_images.add(news.wishes);
                for (rank, contact) in news.contacts {
                    self.parent.send(&Message::LogContact { rank, contact });
                }
                self.supervisor.pass_on_for_tickets(&mut self.parent);
                self.supervisor.handle_emptied_mailboxes(&mut self.parent);
            }
            Source::Parent | Source::Child(_) | Source::Wake | Source::Readiness => {}
        }
    }

    // --- signals and processes

    fn handle_signals(&mut self) {
        while let Some(signal) = self.signals.poll_signal() {
            if signal != libc::SIGCHLD {
                self.begin_end(false);
            }
        }
        for Exit { pid, ending, written } in self.supervisor.reap() {
            if let Some(index) = self.supervisor.index_of(pid) {
                let recording = self.supervisor.ranks[index].recording.as_ref();
                recording.into_iter().for_each(|recording| recording.note_written(written));
                self.handle_ending(index, ending);
            } else if let Some(child) =
                self.children.all.iter_mut().find(|child| child.runs_as(pid))
            {
                child.is_reaped = true;
            } else if self.supervisor.note_exit(pid, ending) {
                // The checkpoint scheduler or the restore has noted the end of its process.
            } else if let Some(relay) = self.relay.process.as_mut().filter(|relay| relay.pid == pid)
            {
                relay.ended = true;
                if self.course.phase == Phase::Working {
                    let text = relay.failure(ending);
                    self.parent.fail(text);
                }
            }
        }
    }

    /// Handles all that a rank has said on PMI and has printed.
    fn read_rank(&mut self, index: usize) {
        self.processes.handle_rank(&mut self.supervisor.ranks[index], &mut self.parent);
        self.drain_servers();
        self.supervisor.ranks[index].handle_output(&mut self.parent);
    }

    /// Restarts a rank whose process has ended, if the rank is to be restarted; returns whether the
    /// end is handled here.
    fn restart_rank(&mut self, index: usize, ending: Ending) -> bool {
        if self.course.phase != Phase::Working || self.supervisor.ranks[index].replay.is_none() {
            return false;
        }
        self.read_rank(index);
        let relay = &self.relay.address;
        self.supervisor.restart(index, ending, &self.processes, relay, &mut self.parent)
    }

    /// Handles the end of a rank's process: restarts the rank, or reports the end to the agent
    /// above.
    fn handle_ending(&mut self, index: usize, ending: Ending) {
        self.supervisor.ranks[index].ending = Some(ending);
        if self.course.phase == Phase::Working {
            self.supervisor.explain_ending(ending, &mut self.parent);
        }
        if !self.restart_rank(index, ending) {
            self.course.unreported.push(index);
        }
    }

    /// Reports ended ranks to the parent, after all PMI lines and output of these ranks.
    fn report_endings(&mut self) {
        for index in std::mem::take(&mut self.course.unreported) {
            let Some(ending) = self.supervisor.ranks[index].ending else { continue };
            if self.course.is_working()
                && ending == Ending::Exited(0)
                && !self.supervisor.is_compared(index, &mut self.parent)
            {
                self.course.unreported.push(index);
                continue;
            }
            self.read_rank(index);
            let rank = &mut self.supervisor.ranks[index];
            rank.reported = Some(ending);
            rank.streams.input.close();
            self.failover.effects.release(&self.supervisor.ranks[index]);
            let rank = &mut self.supervisor.ranks[index];
            let unit = self.supervisor.unit.as_ref();
            if unit.is_some_and(|unit| unit.had_ended_otherwise(rank.rank, ending)) {
                self.parent.fail(unit_rollback::ended_otherwise(rank.rank));
            }
            // The rank may be executed again, after others have changed what it did last.
            rank.send_recording_updates(&mut self.parent);
            rank.contact.handle_end(rank.rank, ending, &mut self.parent);
            self.processes.report_ending(&self.supervisor.ranks[index], ending, &mut self.parent);
        }
    }

    fn handle_relay(&mut self) {
        let room = self.parent.has_room();
        let Some(relay) = &mut self.relay.process else { return };
        for message in relay.read(room) {
            match message {
                // The relay knows how many bytes it has delivered to a rank since the last image of
                // the rank.
                Message::TakeCheckpoints { rank } => {
                    self.request_checkpoints(rank, CheckpointRequester::FullLog)
                }
                message => self.parent.send(&message),
            }
        }
        let whole = |rank: u32| {
            let local = self.supervisor.ranks.iter().find(|local| local.rank == rank);
            let scheduler = local.and_then(|local| local.scheduler.as_ref());
            scheduler.map_or(0, CheckpointScheduler::whole_image)
        };
        self.relay.check_recoverable_again(whole, &mut self.parent);
    }

    // --- checkpoints and restores

    /// Advances the restore of each rank that is being restored.
    fn advance_restores(&mut self) {
        for index in 0..self.supervisor.ranks.len() {
            let Some(mut restore) = self.supervisor.take_restore(index) else { continue };
            if self.course.phase != Phase::Working {
                restore.stop();
                self.course.unreported.push(index);
                continue;
            }
            let unrelated = self.supervisor.unrelated(self.own_processes());
            let (old, parent) = (&mut self.supervisor.ranks[index], &mut self.parent);
            let mut report = |text| parent.note(text);
            let mut context = RestoreContext { unrelated: &unrelated, report: &mut report };
            match restore.advance(old, &mut context) {
                RestoreOutcome::Busy => self.supervisor.put_back_restore(index, restore),
                RestoreOutcome::Restored(rank, image, early) => {
                    self.supervisor.put_in_place(index, *rank, &mut self.parent);
                    let outcome = Ok(Some(image));
                    self.supervisor.report_restart(
                        index,
                        &restore.cause,
                        outcome,
                        &mut self.parent,
                    );
                    if let Some(ending) = early {
                        self.handle_ending(index, ending);
                    }
                }
                RestoreOutcome::NoUsableImage
                    if unit_rollback::note_unusable(&mut self.supervisor, index, &restore) => {}
                RestoreOutcome::NoUsableImage => {
                    let outcome = self.supervisor.restart_from_start(
                        index,
                        &self.processes,
                        &self.relay.address,
                        &mut self.parent,
                    );
                    let outcome = outcome.map(|()| None);
                    let (cause, parent) = (&restore.cause, &mut self.parent);
                    if !self.supervisor.report_restart(index, cause, outcome, parent) {
                        self.course.unreported.push(index);
                    }
                }
            }
        }
    }

    /// Requests images of this rank, or of all ranks here and below, before the next images are
    /// due.
    fn request_checkpoints(&mut self, rank: Option<u32>, asker: CheckpointRequester) {
        self.supervisor.request_checkpoints(rank, asker);
        self.children.send(&Message::TakeCheckpoints { rank });
    }

    /// Advances the checkpoint scheduler of each rank.
    fn advance_checkpoints(&mut self) {
        for index in 0..self.supervisor.ranks.len() {
            if self.course.phase != Phase::Working {
                return;
            }
            if self.supervisor.ranks[index].scheduler.is_none()
                || self.supervisor.ranks[index].ending.is_some()
            {
                continue;
            }
            let outcome = self.advance_checkpoint(index);
            self.checkpoint_round(index).end(outcome);
        }
        unit_rollback::advance_round(&mut self.supervisor, &mut self.parent);
        self.wanted_images.request(&mut self.supervisor);
    }

    fn advance_checkpoint(&mut self, index: usize) -> Result<()> {
        match self.checkpoint_round(index).advance()? {
            CheckpointStep::Nothing => Ok(()),
            CheckpointStep::Due if self.supervisor.unit.is_some() => begin_round(self),
            CheckpointStep::Due => {
                let taken = self.supervisor.image_bytes();
                self.checkpoint_round(index).request(taken);
                Ok(())
            }
            CheckpointStep::Quiesced(position) => {
                self.processes.handle_rank(&mut self.supervisor.ranks[index], &mut self.parent);
                self.drain_servers();
                self.supervisor.ranks[index].forward_output(true, &mut self.parent);
                self.checkpoint_round(index).prepare(position)
            }
        }
    }

    fn checkpoint_round(&mut self, index: usize) -> CheckpointRound<'_> {
        CheckpointRound {
            rank: &mut self.supervisor.ranks[index],
            images: &mut self.images,
            relay: &mut self.relay,
            parent: &mut self.parent,
        }
    }

    fn advance_path_query(&mut self) {
        let query = self.path_query.as_ref();
        if let Some(paths) = query.and_then(|query| query.poll(&self.supervisor.ranks)) {
            self.path_query = None;
            self.parent.send(&paths);
        }
    }

    fn drain_servers(&mut self) {
        self.processes.drain(&mut self.supervisor.ranks, &mut self.children, &mut self.parent);
    }

    fn retire_groups(&mut self) {
        for number in self.processes.retire(&self.supervisor.ranks) {
            self.supervisor.ranks.retain(|rank| rank.group != number);
        }
    }
}

/// Lets the ranks of this node begin again together, if one of them has to.
fn advance_unit(agent: &mut Agent) {
    if agent.course.phase == Phase::Working {
        let (relay, parent) = (&agent.relay.address, &mut agent.parent);
        let supervisor = &mut agent.supervisor;
        let failed = unit_rollback::advance(supervisor, &agent.processes, relay, parent);
        agent.course.unreported.extend(failed);
    }
}

/// Requests an image of each rank of the recovery unit, if all can be taken.
fn begin_round(agent: &mut Agent) -> Result<()> {
    let ranks = unit_rollback::ranks(&agent.supervisor);
    let mut taken = agent.supervisor.image_bytes();
    for index in ranks.iter().copied() {
        let is_ready = unit_rollback::is_ready(&agent.supervisor.ranks[index]);
        let is_possible = is_ready && agent.checkpoint_round(index).is_possible()?;
        if !is_possible || !agent.checkpoint_round(index).has_space(taken) {
            unit_rollback::postpone(&mut agent.supervisor);
            return Ok(());
        }
        taken += sys::resident_bytes(agent.supervisor.ranks[index].pid);
    }
    let round = unit_rollback::begin_round(&mut agent.supervisor)?;
    ranks.into_iter().for_each(|index| agent.checkpoint_round(index).begin_request(Some(round)));
    Ok(())
}

/// Opens `/dev/null` as stdin and stdout: the control stream has moved to other descriptors, and no
/// process that this agent starts may hold the control stream.
fn close_standard_streams() -> Result<()> {
    let null = OwnedFd::from(
        std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/null")
            .context("cannot open /dev/null")?,
    );
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    Ok(())
}
