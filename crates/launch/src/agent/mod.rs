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
//! What may never happen: a process that the agent has started outlives the agent. When the stream
//! to the parent ends, for whatever reason, the agent ends everything that it has started.

mod checkpoint_scheduler;
mod child_agent;
mod contact;
mod durable_effects;
mod end;
mod exits;
mod forwarded_input;
mod groups;
mod held_files;
mod input;
mod node_failover;
mod parent_agent;
mod pmi_replay;
mod poll_set;
mod prepare;
pub mod rank;
mod rank_recording;
mod refusals;
pub mod relay;
mod replicated_rank_state;
mod restore;
mod spare_reachability;
mod state;
mod state_transfer;
mod statistics_page;
mod stdio;
mod tagged_output;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::PollFlags;

use crate::agent_startup::{self, AgentStartup, StartupNotice};
use crate::checkpoint::lease::Lease;
use crate::control::rank_state::RankUpdate;
use crate::control::{ALIVE_INTERVAL, Assignment, Ending, Message, PING_INTERVAL, Stream};
use crate::control_stream::ControlStream;
use crate::spawn;
use crate::sys::{self, Signals};
use checkpoint_scheduler::{
    CheckpointRequester, CheckpointRound, CheckpointScheduler, CheckpointStep,
};
use child_agent::{ChildAgent, start_child};
use end::Phase;
use exits::Exits;
use forwarded_input::ForwardedInput;
use groups::AgentGroup;
use parent_agent::ParentAgent;
use poll_set::{PollSet, Source};
use rank::LocalRank;
use relay::RelayProcess;
use relay::RelayService;
use restore::Restore;
use state::{Course, ImageService, NodeFailover, Programs, ReportTimes};
use state_transfer::StateTransfer;
use statistics_page::PathQuery;

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
    /// The process groups that have ranks on this node or below, by group number.
    groups: BTreeMap<u32, AgentGroup>,
    children: Vec<ChildAgent>,
    ranks: Vec<LocalRank>,
    exits: Exits,
    failover: NodeFailover,
    images: ImageService,
    relay: RelayService,
    programs: Programs,
    course: Course,
    times: ReportTimes,
    /// Standard input on its way to rank 0 on a node below.
    forwarded_input: ForwardedInput,
    /// A query for the state of the ranks' paths that is not answered yet.
    path_query: Option<PathQuery>,
}

impl Agent {
    fn new(signals: Signals) -> Result<Agent> {
        let input = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
        let output = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?;
        close_standard_streams()?;
        Ok(Agent {
            parent: ParentAgent::new(ControlStream::to_parent(input, output)?),
            signals,
            groups: BTreeMap::new(),
            children: Vec::new(),
            ranks: Vec::new(),
            exits: Exits::new(),
            failover: NodeFailover::default(),
            images: ImageService::default(),
            relay: RelayService::default(),
            programs: Programs::default(),
            course: Course::new(),
            times: ReportTimes::new(),
            forwarded_input: ForwardedInput::default(),
            path_query: None,
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
            self.report_replayed();
            self.advance_checkpoints();
            self.images.advance_announcing(&mut self.parent);
            self.images.lease.iter_mut().for_each(Lease::renew);
            self.report_stuck();
            self.watch_contacts();
            self.retire_groups();
            self.check_parent();
            self.parent.send_keepalive();
            self.check_lost_nodes();
            self.advance_transfers();
            self.check_unanswered();
            self.advance_path_query();
            self.advance_end();
            self.parent.stream.flush();
            self.relay.process.iter_mut().for_each(RelayProcess::flush);
            self.children.iter_mut().for_each(|child| child.process.stream.flush());
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
        for (index, child) in self.children.iter().enumerate() {
            set.add_stream(Source::Child(index), &child.process.stream, room);
        }
        for (index, rank) in self.ranks.iter().enumerate() {
            set.add_rank(index, rank, room);
        }
        self.relay.process.iter().for_each(|relay| set.add_relay(relay));
        set.wait(self.timeout())
    }

    fn timeout(&self) -> Option<Duration> {
        match self.course.phase {
            Phase::Working => {
                let notice = self.course.startup.as_ref().and_then(AgentStartup::next_time);
                let path_query = self.path_query.as_ref().map(PathQuery::next_time);
                let images = self.ranks.iter().filter_map(LocalRank::checkpoint_time);
                let returns = self.ranks.iter().filter_map(|rank| rank.restore.as_ref());
                let returns = returns.map(Restore::next_time);
                let contacts = self.ranks.iter().filter_map(LocalRank::contact_time);
                let transfer = self.failover.transfers.first().and_then(StateTransfer::begins_at);
                let times = notice.into_iter().chain(path_query).chain(images).chain(transfer);
                let notice = times.chain(returns).chain(contacts).min();
                let wait = |at: Instant| at.saturating_duration_since(Instant::now());
                let is_replaying = self.ranks.iter().any(LocalRank::is_replaying);
                let most = if is_replaying { groups::PROGRESS_INTERVAL } else { PING_INTERVAL };
                let most =
                    if self.parent.may_move_ranks() { most.min(ALIVE_INTERVAL) } else { most };
                Some(notice.map_or(PING_INTERVAL, wait).clamp(MILLISECOND, most))
            }
            // No signal reports that an orphan has become a child of this process: look again every
            // 20 ms.
            Phase::Ending(_) | Phase::Killing(_) => Some(Duration::from_millis(20)),
        }
    }

    fn handle_source(&mut self, source: Source) {
        match source {
            Source::Pmi(index) => self.handle_pmi(index),
            Source::Output(index) => self.ranks[index].handle_output(&mut self.parent),
            Source::RankInput(index) => self.ranks[index].write_input(&mut self.parent),
            Source::EffectRequest(index) => self.handle_effect_request(index),
            Source::Relay => self.handle_relay(),
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
        for (pid, ending) in self.exits.reap() {
            // The system may give the process id of a process that has ended to another process.
            let runs = |rank: &LocalRank| rank.pid == pid && rank.ending.is_none();
            if let Some(index) = self.ranks.iter().position(runs) {
                self.handle_ending(index, ending);
            } else if let Some(child) = self.children.iter_mut().find(|child| child.runs_as(pid)) {
                child.is_reaped = true;
            } else if self.note_criu(pid, ending) || self.note_restore_exit(pid, ending) {
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

    /// Handles the end of a rank's process: restarts the rank, or reports the end to the agent
    /// above.
    fn handle_ending(&mut self, index: usize, ending: Ending) {
        self.ranks[index].ending = Some(ending);
        self.explain_ending(ending);
        if !self.restart_rank(index, ending) {
            self.course.unreported.push(index);
        }
    }

    /// Reports ended ranks to the parent, after all PMI lines and output of these ranks.
    fn report_endings(&mut self) {
        for index in std::mem::take(&mut self.course.unreported) {
            let Some(ending) = self.ranks[index].ending else { continue };
            self.handle_pmi(index);
            self.drain_servers();
            self.ranks[index].handle_output(&mut self.parent);
            let rank = &mut self.ranks[index];
            rank.reported = true;
            rank.input.close();
            let (number, group) = (rank.rank, rank.group);
            self.release_rank(index);
            self.ranks[index].check_contact(ending, &mut self.parent);
            self.report_ending(group, number, ending);
        }
    }

    /// Notes to the user which limits of this node may have caused this ending.
    fn explain_ending(&mut self, ending: Ending) {
        let Some(own) =
            self.parent.assignment.as_ref().filter(|_| self.course.phase == Phase::Working)
        else {
            return;
        };
        for text in self.programs.limits.explain(&own.node.name, ending) {
            self.parent.note(text);
        }
    }

    // --- the agent above

    fn handle_parent(&mut self) {
        if !self.parent.stream.at_end() {
            if self.parent.stream.fill().is_err() {
                self.parent.stream.close_output();
            }
            loop {
                match self.parent.stream.poll_message() {
                    Ok(Some(message)) => self.handle_parent_message(message),
                    Ok(None) => break,
                    Err(error) => {
                        self.parent.fail(error.to_string());
                        break;
                    }
                }
            }
        }
        if self.parent.stream.at_end() {
            self.end_orphaned();
        }
    }

    /// Pings the agents below, and ends the ranks if a remote parent has been silent for
    /// [`SILENCE_MAX`].
    fn check_parent(&mut self) {
        self.ping_children();
        if self.parent.is_silent() {
            self.parent.stream.close_output();
            self.end_orphaned();
        }
    }

    fn ping_children(&mut self) {
        if self.times.pinged_at.elapsed() >= PING_INTERVAL {
            self.times.pinged_at = Instant::now();
            self.children.iter_mut().for_each(|child| child.process.stream.send(&Message::Ping));
        }
    }

    fn check_unanswered(&mut self) {
        let Some(startup) =
            self.course.startup.as_mut().filter(|_| self.course.phase == Phase::Working)
        else {
            return;
        };
        let links = self.children.iter().map(|child| (&child.node, &child.process.stream));
        let unanswered: Vec<_> =
            links.filter_map(|(node, stream)| agent_startup::unanswered(node, stream)).collect();
        match startup.poll(Instant::now(), &unanswered) {
            Some(StartupNotice::Notice(text)) => self.parent.note(text),
            Some(StartupNotice::GiveUp(text)) => self.parent.fail(text),
            None => {}
        }
    }

    fn handle_parent_message(&mut self, message: Message) {
        match message {
            Message::Assign(assignment) => self.handle_assignment(*assignment),
            Message::StartRelay { config } => self.relay.start(&config, &mut self.parent),
            Message::Start { relay } => self.start_ranks(&relay),
            Message::BarrierDown { group, delta } => self.handle_barrier_down(group, delta),
            Message::Answer { rank, line } => self.deliver_answer(rank, line),
            Message::SpawnOrder(order) => self.handle_order(*order),
            Message::RecordingUpdate(update) => self.apply_update(&update),
            Message::Durable { serial, .. } => self.handle_durable(serial),
            Message::Adopt(adoption) => self.handle_adoption(&adoption),
            Message::Spares(spares) => {
                if let Some(own) = &self.parent.assignment {
                    self.images.handle_spares(spares.names, own, &mut self.ranks);
                }
            }
            Message::Revoke { group } => self.revoke(group),
            Message::Stdin { bytes } => self.deliver_stdin(bytes),
            Message::StdinEnd => self.deliver_stdin_end(),
            Message::End { at_once } => self.begin_end(at_once),
            Message::Ping => {}
            Message::QueryPaths { serial, rows_max } => {
                for child in &mut self.children {
                    child.process.stream.send(&message);
                }
                self.path_query = Some(PathQuery::begin(serial, rows_max, &self.ranks));
            }
            Message::QueryLog { serial, question } => {
                self.relay.query_log(serial, &question, &mut self.parent);
            }
            Message::TakeCheckpoints { rank } => {
                self.request_checkpoints(rank, CheckpointRequester::User)
            }
            other => self.parent.fail(format!("the agent was sent {other:?}")),
        }
    }

    fn handle_assignment(&mut self, assignment: Assignment) {
        let (job, node) = (&assignment.job, &assignment.node);
        self.groups.insert(0, AgentGroup::first(job, node));
        self.course.startup = Some(AgentStartup::new(Instant::now()));
        for child in &node.children {
            match start_child(job, child) {
                Ok(child) => self.children.push(child),
                Err(error) => {
                    let text = format!("cannot start an agent on {}: {error:#}", child.name);
                    self.parent.send(&Message::Failed { text });
                    return;
                }
            }
        }
        self.parent.assignment = Some(Rc::new(assignment));
        self.check_ready();
    }

    fn check_ready(&mut self) {
        if self.parent.assignment.is_some()
            && !self.course.ready_sent
            && self.children.iter().all(|c| c.ready)
        {
            self.course.ready_sent = true;
            self.course.startup = None;
            self.parent.send(&Message::Ready);
        }
    }

    fn start_ranks(&mut self, relay: &str) {
        self.relay.address = relay.to_string();
        for child in &mut self.children {
            child.process.stream.send(&Message::Start { relay: relay.to_string() });
        }
        let Some(assignment) = self.parent.assignment.clone() else { return };
        if let Err(error) = self.start_own_ranks(&assignment) {
            self.parent.fail(format!("on node {}: {error:#}", assignment.node.name));
        }
    }

    // --- agents below

    fn handle_children(&mut self) {
        let room = self.parent.has_room() || self.course.phase != Phase::Working;
        for index in 0..self.children.len() {
            let stream = &mut self.children[index].process.stream;
            if stream.at_end() || !room {
                continue;
            }
            let mut problem = stream.fill().err();
            while problem.is_none() {
                match self.children[index].process.stream.poll_message() {
                    Ok(Some(message)) => self.handle_child_message(index, message),
                    Ok(None) => break,
                    Err(error) => problem = Some(error),
                }
            }
            self.check_child_end(index, problem);
        }
    }

    fn check_child_end(&mut self, index: usize, problem: Option<anyhow::Error>) {
        let child = &mut self.children[index];
        if child.process.stream.at_end() && !child.done {
            if problem.is_none() && self.is_running() {
                return self.handle_lost_node(index, "the connection to its agent has ended");
            }
            let child = &mut self.children[index];
            child.done = true;
            if self.course.phase == Phase::Working {
                let here = self.parent.assignment.as_ref().map(|own| own.node.name.as_str());
                let child = &self.children[index];
                let text = spawn::agent_failure::text(&child.node, &child.process, problem, here);
                self.parent.fail(text);
            }
        }
    }

    fn handle_child_message(&mut self, index: usize, message: Message) {
        match message {
            _ if self.children[index].is_lost => {}
            Message::Ready => {
                self.children[index].ready = true;
                self.check_ready();
            }
            Message::BarrierUp { group, delta } => {
                if let Some(group) = self.groups.get_mut(&group) {
                    group.server.handle_barrier_up(index, delta);
                }
            }
            Message::Done => self.children[index].done = true,
            Message::Exited { group, rank, .. } => {
                if let Some(group) = self.groups.get_mut(&group) {
                    group.handle_ended(rank);
                }
                self.failover.replicas.handle_end(rank);
                self.parent.send(&message);
            }
            Message::Ping => {}
            Message::StdinTaken { bytes } => {
                let bytes = self.forwarded_input.take(bytes);
                self.parent.send(&Message::StdinTaken { bytes });
            }
            Message::RankUpdate(update) => match *update {
                RankUpdate::Unstartable { rank, why } => self.handle_unstartable(index, rank, &why),
                update => self.failover.replicas.handle_update(update),
            },
            Message::RecordingUpdate(update) => {
                self.failover.replicas.handle_recording_update(*update)
            }
            Message::MakeDurable { rank, serial } => {
                self.children[index].allow_effect(rank, serial);
            }
            Message::Name { rank, .. } | Message::Spawn { rank, .. }
                if self.is_repeated_request(index, rank) => {}
            Message::Output { rank, stream, ref bytes, own } => {
                self.record_output(rank, stream, bytes, own);
                self.parent.send(&message);
            }
            Message::Checkpoint { rank, number, .. } => {
                self.parent.send(&message);
                self.relay.report_recoverable_again(rank, number, &mut self.parent);
            }
            Message::Alive { group: 0, rank, incarnation, .. } => {
                self.failover.replicas.handle_incarnation(rank, incarnation, Instant::now());
                self.parent.send(&message);
            }
            // The launcher handles every other message.
            other => self.parent.send(&other),
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
                    self.request_checkpoints(rank, CheckpointRequester::Relay)
                }
                message => self.parent.send(&message),
            }
        }
        let whole = |rank: u32| {
            let local = self.ranks.iter().find(|local| local.rank == rank);
            let scheduler = local.and_then(|local| local.scheduler.as_ref());
            scheduler.map_or(0, CheckpointScheduler::whole_image)
        };
        self.relay.check_recoverable_again(whole, &mut self.parent);
    }

    fn deliver_stdin(&mut self, bytes: Vec<u8>) {
        if let Some(child) = self.children.iter_mut().find(|child| child.holds(0)) {
            self.forwarded_input.forward(&bytes);
            return child.process.stream.send(&Message::Stdin { bytes });
        }
        if let Some(rank) = self.ranks.iter_mut().find(|rank| rank.rank == 0) {
            rank.input.queue(&bytes);
            rank.write_input(&mut self.parent);
        }
    }

    fn deliver_stdin_end(&mut self) {
        if let Some(child) = self.children.iter_mut().find(|child| child.holds(0)) {
            self.forwarded_input.end();
            return child.process.stream.send(&Message::StdinEnd);
        }
        if let Some(rank) = self.ranks.iter_mut().find(|rank| rank.rank == 0) {
            rank.input.end();
            rank.write_input(&mut self.parent);
        }
    }

    // --- checkpoints

    fn note_criu(&mut self, pid: u32, ending: Ending) -> bool {
        let mut schedulers = self.ranks.iter_mut().filter_map(|rank| rank.scheduler.as_mut());
        schedulers.any(|scheduler| scheduler.note_exit(pid, ending))
    }

    /// Advances the checkpoint scheduler of each rank.
    fn advance_checkpoints(&mut self) {
        for index in 0..self.ranks.len() {
            if self.course.phase != Phase::Working {
                return;
            }
            if self.ranks[index].scheduler.is_none() || self.ranks[index].ending.is_some() {
                continue;
            }
            let outcome = self.advance_checkpoint(index);
            self.checkpoint_round(index).end(outcome);
        }
    }

    fn advance_checkpoint(&mut self, index: usize) -> Result<()> {
        match self.checkpoint_round(index).advance()? {
            CheckpointStep::Nothing => Ok(()),
            CheckpointStep::Due => {
                let schedulers = self.ranks.iter().filter_map(|rank| rank.scheduler.as_ref());
                let taken = schedulers.map(CheckpointScheduler::bytes).sum();
                self.checkpoint_round(index).request(taken);
                Ok(())
            }
            CheckpointStep::Quiesced(position) => {
                self.handle_pmi(index);
                self.drain_servers();
                self.ranks[index].forward_output(true, &mut self.parent);
                self.checkpoint_round(index).prepare(position)
            }
        }
    }

    fn checkpoint_round(&mut self, index: usize) -> CheckpointRound<'_> {
        CheckpointRound {
            rank: &mut self.ranks[index],
            images: &mut self.images,
            relay: &mut self.relay,
            parent: &mut self.parent,
        }
    }

    /// Requests images of this rank, or of all ranks here and below, before the next images are
    /// due.
    fn request_checkpoints(&mut self, rank: Option<u32>, asker: CheckpointRequester) {
        let is_it = |it: &&mut LocalRank| rank.is_none_or(|rank| rank == it.rank);
        for it in self.ranks.iter_mut().filter(is_it) {
            if let Some(scheduler) = it.scheduler.as_mut().filter(|_| it.ending.is_none()) {
                scheduler.request(asker, Instant::now());
            }
        }
        for child in &mut self.children {
            child.process.stream.send(&Message::TakeCheckpoints { rank });
        }
    }

    /// Checks the ranks whose contact with this process manager is due.
    fn watch_contacts(&mut self) {
        let now = Instant::now();
        let groups = &self.groups;
        let is_waiting = |rank: &LocalRank| {
            groups.get(&rank.group).is_none_or(|group| group.server.is_waiting(rank.rank))
        };
        for rank in &mut self.ranks {
            rank.watch_contact(now, &mut self.programs.libraries, is_waiting, &mut self.parent);
        }
    }

    fn advance_path_query(&mut self) {
        let query = self.path_query.as_ref();
        if let Some(paths) = query.and_then(|query| query.poll(&self.ranks)) {
            self.path_query = None;
            self.parent.send(&paths);
        }
    }

    /// Records output of a rank of an agent below, if the rank may move to another node.
    fn record_output(&mut self, rank: u32, stream: Stream, bytes: &[u8], own: u32) {
        if own > 0 && self.parent.may_move_ranks() && self.parent.has_spares() {
            self.failover.replicas.handle_print(rank, stream, bytes);
        }
    }
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
