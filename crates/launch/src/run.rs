//! The launcher's loop: the root of the tree of agents. The launcher runs no ranks itself.
//!
//! Order of a job: the launcher starts agents and sends their assignments; it starts the relays
//! that accept connections, then the other relays; the agents start the ranks. From then on
//! [`Watch`] judges the reports of the agents. At the end every agent is ordered to end, and
//! confirms it.
//!
//! The modules in order; each uses only those before it:
//!
//! | module | holds |
//! |---|---|
//! | `cluster_agents` | the agents that the launcher has started |
//! | `deadlines` | the times of the launcher |
//! | `forwarded_stdin` | standard input, which rank 0 reads |
//! | `log_query` | a query to all relays about message logs |
//! | `status_line` | the status line of a job |
//! | `status_reporter` | reports of the launcher about its ranks |

mod cluster_agents;
mod deadlines;
mod forwarded_stdin;
mod log_query;
mod status_line;
mod status_reporter;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::event::{PollFd, PollFlags};

use crate::agent_startup::{self, AgentStartup, StartupNotice};
use crate::cleanup;
use crate::control::spawn_order::{Block, SpawnOrder};
use crate::control::{Job, Message, Node};
use crate::ending::Ending;
use crate::groups::{Groups, SpawnOutcome, SpawningRank};
use crate::mpi;
use crate::pmi::kvs::Delta;
use crate::pmi::server::{Names, Server, ServerEvent, Stage};
use crate::pmi::spawn::{Request, answer};
use crate::ps::rank_table::{RankReport, RankTable};
use crate::relays::Relays;
use crate::spawn;
use crate::sys::{self, Signals};
use crate::ui::OutputPrinter;
use crate::watch::{Cause, SETTLE, Verdict, Watch};
use cluster_agents::ClusterAgents;
use deadlines::Deadlines;
use forwarded_stdin::ForwardedStdin;
use status_reporter::{StatusReporter, place};

/// Time that agents have to end all of their processes before the launcher cuts their connections.
const END_GRACE: Duration = Duration::from_secs(15);
/// Time that agents have to end all of their processes after a second Ctrl-C.
const IMPATIENT_GRACE: Duration = Duration::from_secs(1);
/// Time that the launcher waits for a relay to become ready; a slower relay ends the job.
const RELAY_PATIENCE: Duration = Duration::from_secs(30);
/// Time that the launcher waits for further agents after one agent has failed to start, so that the
/// user reads about all failures at once.
const STARTUP_SETTLE: Duration = Duration::from_secs(1);
/// Time after the forced end of a job at which the launcher drops output that no one reads.
const OUTPUT_GRACE: Duration = Duration::from_secs(3);
/// Text that the user reads once per job, under `--recover`.
const SPAWNED_NOT_RESTARTED: &str = "ranks spawn processes: these cannot be restarted: if one is \
                                     killed, the job ends (--recover)";

pub struct Options {
    pub label: bool,
    pub verbose: bool,
    pub timeout: Option<Duration>,
    pub relay_log: Option<std::fs::File>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JobPhase {
    StartingAgents,
    /// The launcher waits for the relay at this position of the start order.
    Relays(usize),
    /// The launcher waits for the links between relays.
    Linking,
    Running,
    Ending(Instant),
}

pub struct Launcher {
    options: Options,
    signals: Signals,
    signals_seen: u32,
    children: ClusterAgents,
    process_manager: RootProcessManager,
    watch: Watch,
    rank_table: RankTable,
    status_reporter: StatusReporter,
    output: OutputPrinter,
    phase: JobPhase,
    relays: Relays,
    deadlines: Deadlines,
    stdin: ForwardedStdin,
    code: i32,
    startup: Startup,
}

/// The PMI servers of the root, and the process groups that they serve.
struct RootProcessManager {
    /// Name of the key-value space of the ranks that the launcher has started.
    kvsname: String,
    /// The PMI server of each process group, by group number.
    servers: BTreeMap<u32, Server>,
    names: Names,
    groups: Groups,
}

impl RootProcessManager {
    /// Records that all ranks of `group` below agent `index` have reached the barrier.
    fn handle_barrier_up(&mut self, group: u32, index: usize, delta: Delta) {
        if let Some(server) = self.servers.get_mut(&group) {
            server.handle_barrier_up(index, delta);
        }
    }

    /// Ends a barrier that all ranks of `group` have reached.
    fn release(&mut self, group: u32, delta: Delta) {
        if let Some(server) = self.servers.get_mut(&group) {
            server.handle_barrier_down(delta);
        }
    }
}

/// What the user reads about agents that start.
struct Startup {
    agents: AgentStartup,
    /// Failures before every agent has answered: several hosts may fail for the same reason.
    failures: Vec<String>,
    /// Advice of nodes that the user has read; each text is shown once.
    advised: BTreeSet<String>,
}

impl Startup {
    /// The line about advice of a node, unless the user has read the same advice.
    fn new_advice(&mut self, node: &str, text: String) -> Option<String> {
        let line = format!("on node {node}: {text}");
        self.advised.insert(text).then_some(line)
    }
}

/// Runs the job and returns its exit code.
pub fn run(job: Job, nodes: Vec<Node>, relays: Relays, options: Options) -> Result<i32> {
    let ending = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];
    let others = [libc::SIGCHLD, libc::SIGTTIN, libc::SIGTSTP, libc::SIGUSR1];
    let signals = Signals::block(&[ending, others].concat())?;
    sys::adopt_orphans()?;
    let mut launcher = Launcher::new(&job, nodes, relays, options, signals)?;
    Ok(launcher.run())
}

impl Launcher {
    fn new(
        job: &Job,
        nodes: Vec<Node>,
        relays: Relays,
        options: Options,
        signals: Signals,
    ) -> Result<Launcher> {
        let groups = Groups::new(job, &nodes);
        let server = Server::of_root(0, 0..nodes.len());
        let mut output = OutputPrinter::new(options.label);
        let status_reporter = StatusReporter::open(job, |text| {
            if options.verbose {
                output.say(text);
            }
        });
        let now = Instant::now();
        Ok(Launcher {
            children: ClusterAgents::start(job, nodes)?,
            process_manager: RootProcessManager {
                kvsname: job.kvsname.clone(),
                servers: BTreeMap::from([(0, server)]),
                names: Names::default(),
                groups,
            },
            signals,
            signals_seen: 0,
            watch: Watch::new(job.size, mpi::recovers(&job.environment)),
            rank_table: RankTable::new(job.size),
            status_reporter,
            output,
            phase: JobPhase::StartingAgents,
            relays,
            deadlines: Deadlines::new(options.timeout, now),
            options,
            stdin: ForwardedStdin::new(),
            code: 0,
            startup: Startup {
                agents: AgentStartup::new(now),
                failures: Vec::new(),
                advised: BTreeSet::new(),
            },
        })
    }

    fn run(&mut self) -> i32 {
        while !self.is_over() {
            let stdin_ready = self.wait();
            self.handle_signals();
            drop_unread_output(&self.phase, self.code, &mut self.output);
            self.handle_children();
            self.drain_servers();
            if stdin_ready {
                self.read_stdin();
            }
            if self.deadlines.is_ping_due(Instant::now()) {
                self.children.send_to_all(&Message::Ping);
            }
            self.check_unanswered();
            self.judge();
            self.serve();
            self.output.handle_time(Instant::now());
            self.children.flush();
            self.output.flush();
        }
        self.children.kill_leftovers();
        // Agents on this machine have removed their files, unless the agents were killed.
        cleanup::remove_mpich_files(&self.process_manager.kvsname, |_| true);
        self.code
    }

    /// Reports agents below the launcher that have not answered. An agent that has answered watches
    /// the agents below itself.
    fn check_unanswered(&mut self) {
        let links = self.children.0.iter().map(|child| (&child.node, &child.process.stream));
        let unanswered: Vec<_> =
            links.filter_map(|(node, stream)| agent_startup::unanswered(node, stream)).collect();
        match self.startup.agents.poll(Instant::now(), &unanswered) {
            Some(StartupNotice::Notice(text)) => self.output.say(&text),
            Some(StartupNotice::GiveUp(text)) => self.handle_cause(Cause::Failed { text }),
            None => {}
        }
    }

    fn is_over(&self) -> bool {
        let JobPhase::Ending(begun) = self.phase else { return false };
        let patience = if self.signals_seen > 1 { IMPATIENT_GRACE } else { END_GRACE };
        let patience_over = begun.elapsed() > patience;
        (self.children.are_done() || patience_over) && self.output.is_empty()
    }

    /// Waits for something to do. Returns whether stdin has input.
    fn wait(&self) -> bool {
        let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
        fds.extend(self.children.descriptors(self.takes_more()));
        let asking = self.status_reporter.status_socket().descriptors();
        fds.extend(asking.map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
        let waiting = self.output.waiting();
        fds.extend(waiting.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::OUT)));
        let wants_stdin = self.stdin.wants_input() && self.phase == JobPhase::Running;
        if wants_stdin {
            fds.push(PollFd::from_borrowed_fd(rustix::stdio::stdin(), PollFlags::IN));
        }
        sys::wait(&mut fds, self.timeout());
        wants_stdin && fds.last().is_some_and(|fd| !fd.revents().is_empty())
    }

    fn takes_more(&self) -> bool {
        !self.output.is_full() || matches!(self.phase, JobPhase::Ending(_))
    }

    fn timeout(&self) -> Option<Duration> {
        if matches!(self.phase, JobPhase::Ending(_)) {
            return Some(Duration::from_millis(100));
        }
        let output = self.output.next_time();
        let startup = self.startup.agents.next_time();
        let left = self.watch.next_time();
        let asking = self.status_reporter.next_time();
        let times = [self.deadlines.next_time(), left, output, startup, asking];
        let next = times.into_iter().flatten().min();
        next.map(|at| at.saturating_duration_since(Instant::now()) + Duration::from_millis(1))
    }

    // --- signals and stdin

    fn handle_signals(&mut self) {
        while let Some(signal) = self.signals.poll_signal() {
            match signal {
                // The launcher only reaps children here: the control stream of an agent reports the
                // agent's end.
                libc::SIGCHLD => while sys::reap_any().is_some() {},
                libc::SIGUSR1 => self.take_images(None),
                // The launcher runs in the background of a terminal, so it may not read the
                // terminal's input.
                libc::SIGTTIN => self.stdin.close(),
                // A stopped launcher sends nothing, and agents treat a silent launcher as lost.
                libc::SIGTSTP => {
                    self.output.say("a job cannot be stopped: it goes on (Ctrl-C ends it)")
                }
                signal => self.handle_interrupt(signal),
            }
        }
    }

    fn handle_interrupt(&mut self, signal: i32) {
        self.signals_seen += 1;
        let cause = Cause::Interrupted { signal };
        let (code, is_over) = (cause.code(), matches!(self.phase, JobPhase::Ending(_)));
        self.watch.handle_cause("", cause);
        if self.signals_seen == 1 {
            self.deadlines.settled = Some(Instant::now());
            if is_over && !self.output.is_empty() {
                self.output.say("the job has ended, and its output is still being read");
            }
            return;
        }
        if self.output.discard() && self.code == 0 {
            // A job whose output is not whole has not ended well.
            self.code = code;
        }
        self.children.send_to_all(&Message::End { at_once: true });
    }

    fn read_stdin(&mut self) {
        let Some(message) = self.stdin.read() else { return };
        if let Some(holder) = self.children.holder(0) {
            self.children.send(holder, &message);
        }
    }

    // --- agents

    fn handle_children(&mut self) {
        for index in 0..self.children.0.len() {
            if self.children.0[index].process.stream.at_end() || !self.takes_more() {
                continue;
            }
            let mut problem = self.children.0[index].process.stream.fill().err();
            while problem.is_none() {
                match self.children.0[index].process.stream.poll_message() {
                    Ok(Some(message)) => self.handle_message(index, message),
                    Ok(None) => break,
                    Err(error) => problem = Some(error),
                }
            }
            self.check_child_end(index, problem);
        }
    }

    fn check_child_end(&mut self, index: usize, problem: Option<anyhow::Error>) {
        let child = &mut self.children.0[index];
        if child.process.stream.at_end() && !child.state().is_over() {
            child.note_end();
            let text = spawn::agent_failure::text(&child.node, &child.process, problem, None);
            self.handle_cause(Cause::Failed { text });
        }
    }

    fn handle_message(&mut self, index: usize, message: Message) {
        match message {
            Message::Ready => self.handle_ready(index),
            Message::RelayReady { ranks, relays } => {
                self.handle_relay_ready(index, &ranks, &relays)
            }
            Message::RelayLink { cluster, address, problem } => {
                self.handle_relay_link(index, cluster as usize, &address, &problem);
            }
            Message::BarrierUp { group, delta } => {
                self.process_manager.handle_barrier_up(group, index, delta);
            }
            Message::Name { rank, request } => {
                let line = self.process_manager.names.handle_request(request);
                self.children.send(index, &Message::Answer { rank, line });
            }
            Message::Spawn { rank, request } => self.handle_spawn(index, rank, &request),
            Message::Started { group, problem } => self.handle_started(group, problem),
            Message::Abort { rank, code, message } => {
                let node = self.node_of(rank);
                self.handle_cause_on(&node, Cause::Aborted { rank, code, message });
            }
            Message::Output { rank, stream, bytes, .. } => {
                self.output.handle_bytes(rank, stream, &bytes, Instant::now());
                self.watch.handle_peer_losses(self.output.take_lost_peer_ranks());
            }
            Message::StdinTaken { bytes } => self.stdin.handle_taken(bytes),
            Message::Exited { group, rank, ending, stage } => {
                self.handle_exit(group, rank, ending, stage);
            }
            Message::Alive { group, rank, pid, incarnation, is_live, percent } => {
                let report = RankReport { pid, incarnation, is_live, percent };
                self.rank_table.handle_alive(group, rank, report, Instant::now());
                self.show_status();
            }
            Message::Moved(moved) => {
                self.process_manager.groups.handle_moved(&moved);
                moved.apply(&mut self.children.0[index].node);
            }
            Message::Again { ranks } => self.handle_again(index, ranks),
            Message::Ping => {}
            Message::LogContact { .. } | Message::LogImages(_) | Message::LogsLost { .. } => {
                self.children.send_to_all(&message)
            }
            Message::FrameTransfer(transfer) => self.children.pass_on(transfer),
            Message::Checkpoint { rank, number, bytes } => {
                self.rank_table.handle_image(rank, number, bytes, Instant::now());
            }
            Message::Stuck { rank } => self.handle_cause(Cause::Stuck { rank }),
            Message::Failed { text } => self.handle_cause(Cause::Failed { text }),
            Message::Note { text } => self.output.say(&text),
            Message::Advice { node, text } => {
                self.startup.new_advice(&node, text).iter().for_each(|line| self.output.say(line));
            }
            Message::RelayLog { text } => self.log_relay(&text),
            Message::Paths { serial, paths } => self.status_reporter.handle_paths(serial, *paths),
            Message::LogStatus { serial: to, lines } => {
                self.status_reporter.handle_record(to, &lines)
            }
            Message::Done => {
                self.children.0[index].note_end();
                self.output.handle_last();
            }
            other => {
                let text = format!("an agent has sent {other:?}");
                self.handle_cause(Cause::Failed { text });
            }
        }
    }

    /// Ranks that had ended are to be executed again: their agent may begin, unless the job is
    /// ending.
    fn handle_again(&mut self, index: usize, ranks: Vec<u32>) {
        if !matches!(self.phase, JobPhase::Ending(_)) {
            self.watch.handle_again(&ranks);
            if self.signals_seen == 0 {
                // A rank whose end was about to end the job runs again.
                self.deadlines.settled = None;
            }
            self.children.send(index, &Message::Again { ranks });
        }
    }

    /// Records a cause that concerns the job as a whole.
    fn handle_cause(&mut self, cause: Cause) {
        if let (JobPhase::StartingAgents, Cause::Failed { text }) = (self.phase, &cause) {
            self.startup.failures.push(text.clone());
        }
        self.handle_cause_on("", cause);
    }

    fn handle_cause_on(&mut self, node: &str, cause: Cause) {
        if !matches!(self.phase, JobPhase::Ending(_)) {
            self.watch.handle_cause(node, cause);
        }
    }

    fn log_relay(&mut self, text: &str) {
        use std::io::Write;
        match &mut self.options.relay_log {
            // A write error, such as a full disk, must not end the job.
            Some(file) => drop(writeln!(file, "{text}")),
            // At the end of a successful job relays and ranks disconnect, as they should.
            None if matches!(self.phase, JobPhase::Ending(_)) && self.code == 0 => {}
            None if self.options.verbose => self.output.say(text),
            None => {}
        }
    }

    fn drain_servers(&mut self) {
        loop {
            let mut servers = self.process_manager.servers.values_mut();
            match servers.find_map(Server::poll_event) {
                Some(ServerEvent::BarrierUp { group, delta }) => {
                    self.process_manager.release(group, delta);
                }
                Some(ServerEvent::BarrierDown { group, delta }) => {
                    self.send_to_group(group, &Message::BarrierDown { group, delta });
                }
                // The root's PMI server has no ranks, which cause all other events.
                Some(other) => unreachable!("{other:?}"),
                None => break,
            }
        }
        if let Some(rank) = self.process_manager.servers.values().find_map(Server::stuck) {
            self.handle_cause(Cause::Stuck { rank });
        }
    }

    fn send_to_group(&mut self, group: u32, message: &Message) {
        let Some(server) = self.process_manager.servers.get(&group) else { return };
        for child in server.children() {
            self.children.send(child, message);
        }
    }

    fn handle_exit(&mut self, group: u32, rank: u32, ending: Ending, stage: Stage) {
        self.output.handle_end(rank);
        self.stdin.handle_exit(rank);
        if let Some(server) = self.process_manager.servers.get_mut(&group) {
            server.handle_ended(rank);
        }
        if group == 0 || self.process_manager.groups.is_known(group) {
            let node = self.node_of(rank);
            self.watch.handle_exit(&node, rank, ending, stage, Instant::now());
        }
        self.rank_table.handle_exit(rank, ending);
        self.show_status();
        if self.process_manager.groups.handle_exit(group) {
            self.rank_table.forget(group);
            self.process_manager.servers.remove(&group);
        }
    }

    // --- processes that ranks spawn

    fn handle_spawn(&mut self, cluster: usize, rank: u32, request: &Request) {
        // A job that is ending starts no processes: the rank that asked is ended while it waits.
        if self.phase != JobPhase::Running {
            return;
        }
        let spawner = SpawningRank { cluster, rank };
        match self.process_manager.groups.order(spawner, request) {
            Ok(order) => self.start_group(order),
            Err(problem) => self.refuse_spawn(spawner, &problem),
        }
    }

    fn start_group(&mut self, order: SpawnOrder) {
        self.watch.handle_spawn(order.size);
        if order.group == 1 && self.status_reporter.recovers() {
            self.output.say(SPAWNED_NOT_RESTARTED);
        }
        for index in order.blocks.iter().flat_map(Block::indices) {
            let name = self.process_manager.groups.name(index).unwrap_or_default();
            self.output.set_name(index, name);
        }
        let takes_part =
            |&child: &usize| order.below(&self.children.0[child].node).next().is_some();
        let children: Vec<usize> = (0..self.children.0.len()).filter(takes_part).collect();
        let group = order.group;
        self.process_manager.servers.insert(group, Server::of_root(group, children));
        self.send_to_group(group, &Message::SpawnOrder(Box::new(order)));
    }

    fn handle_started(&mut self, group: u32, problem: String) {
        match self.process_manager.groups.handle_started(group, problem) {
            SpawnOutcome::Waiting => {}
            SpawnOutcome::Running { spawner } => self.answer_spawn(spawner, true),
            SpawnOutcome::Failed { spawner, problem, indices } => {
                self.send_to_group(group, &Message::Revoke { group });
                self.process_manager.servers.remove(&group);
                indices.iter().for_each(|&rank| self.output.handle_end(rank));
                self.watch.handle_revoke(indices.into_iter());
                self.rank_table.forget(group);
                self.refuse_spawn(spawner, &problem);
            }
        }
    }

    fn refuse_spawn(&mut self, spawner: SpawningRank, problem: &str) {
        let place = self.place(spawner.rank);
        self.output.say(&format!("{place} cannot spawn: {problem}"));
        self.answer_spawn(spawner, false);
    }

    fn answer_spawn(&mut self, spawner: SpawningRank, started: bool) {
        let answer = Message::Answer { rank: spawner.rank, line: answer(started) };
        self.children.send(spawner.cluster, &answer);
    }

    // --- the course of the job

    fn handle_ready(&mut self, index: usize) {
        self.children.0[index].note_ready();
        if self.phase == JobPhase::StartingAgents && self.children.are_ready() {
            self.startup.agents.end();
            self.start_relay(0);
        }
    }

    fn start_relay(&mut self, place: usize) {
        match self.relays.config(place) {
            Some((cluster, config)) => {
                self.phase = JobPhase::Relays(place);
                self.deadlines.relay = Some(Instant::now() + RELAY_PATIENCE);
                self.relays.expect_links(cluster);
                self.children.send(cluster, &Message::StartRelay { config });
            }
            None if self.relays.links().are_up() => self.start_ranks(),
            None => {
                self.phase = JobPhase::Linking;
                self.deadlines.relay = Some(Instant::now() + self.relays.links().patience());
            }
        }
    }

    fn handle_relay_link(&mut self, from: usize, to: usize, address: &str, problem: &str) {
        // Relays that end close their links, which is no problem.
        if matches!(self.phase, JobPhase::Ending(_)) {
            return;
        }
        if let Some(text) = self.relays.links().handle(from, to, address, problem) {
            self.output.say(&text);
        }
        if self.phase == JobPhase::Linking && self.relays.links().are_up() {
            self.start_ranks();
        }
    }

    fn handle_relay_ready(&mut self, index: usize, ranks: &str, relays: &str) {
        let JobPhase::Relays(place) = self.phase else { return };
        match self.relays.handle_ready(index, ranks, relays) {
            Ok(()) => self.start_relay(place + 1),
            Err(error) => self.handle_cause(Cause::Failed { text: error.to_string() }),
        }
    }

    fn start_ranks(&mut self) {
        self.phase = JobPhase::Running;
        self.deadlines.relay = None;
        for (index, child) in self.children.0.iter_mut().enumerate() {
            let relay = self.relays.rank_address(index);
            child.process.stream.send(&Message::Start { relay });
        }
    }

    fn judge(&mut self) {
        let now = Instant::now();
        if let JobPhase::Ending(_) = self.phase {
            if self.output.is_unread() && self.code == 0 {
                self.code = Cause::Unread.code();
            }
            return;
        }
        if self.deadlines.job.is_some_and(|deadline| now >= deadline) {
            let seconds = self.options.timeout.map_or(0, |timeout| timeout.as_secs());
            self.watch.handle_cause("", Cause::Timeout { seconds });
            self.deadlines.settled = Some(now);
        }
        if self.deadlines.relay.is_some_and(|deadline| now >= deadline) {
            let seconds = RELAY_PATIENCE.as_secs();
            let text = match self.phase {
                JobPhase::Linking => self.relays.links().failure(),
                _ => format!("a relay was not ready after {seconds} s; see its log with -v"),
            };
            self.watch.handle_cause("", Cause::Failed { text });
        }
        if self.output.is_unread() {
            self.watch.handle_cause("", Cause::Unread);
            self.deadlines.settled = Some(now);
        }
        match self.watch.verdict(now) {
            Verdict::GoOn => self.say_notice(now),
            Verdict::Finished { code } => {
                if let Some((rank, code)) = self.watch.failed_after_finalize() {
                    let place = self.place(rank);
                    self.output
                        .say(&format!("{place} ended with exit code {code}, after MPI_Finalize"));
                }
                self.end(code)
            }
            Verdict::End(cause) => {
                let settle =
                    if self.phase == JobPhase::StartingAgents { STARTUP_SETTLE } else { SETTLE };
                let settled_at = *self.deadlines.settled.get_or_insert(now + settle);
                if now >= settled_at || self.watch.all_ended() {
                    let text = cause.text(|rank| self.place(rank));
                    let failures = self.startup.failures.iter();
                    let others = failures.filter(|&failure| Some(failure) != text.as_ref());
                    let others = agent_startup::others(others);
                    text.iter().chain(&others).for_each(|line| self.output.say(line));
                    self.end(cause.code());
                }
            }
        }
    }

    fn say_notice(&mut self, now: Instant) {
        let (groups, children) = (&self.process_manager.groups, &self.children.0);
        let place = |rank| place(groups, children, rank);
        if let Some(text) = self.watch.poll_notice(now, place) {
            self.output.say(&text);
        }
    }

    fn end(&mut self, code: i32) {
        self.code = code;
        self.phase = JobPhase::Ending(Instant::now());
        self.startup.agents.end();
        self.show_status();
        self.children.send_to_all(&Message::End { at_once: false });
        self.children.end_unanswered();
    }
}

/// Drops output that nobody has read for a while after the forced end of the job; what comes now
/// may still be read.
fn drop_unread_output(phase: &JobPhase, code: i32, output: &mut OutputPrinter) {
    if matches!(phase, JobPhase::Ending(begun) if begun.elapsed() > OUTPUT_GRACE) && code != 0 {
        output.discard();
    }
}
