//! Reports of the launcher about its ranks: where a rank runs, the status line, and for `landbridge
//! ps` the state of all ranks.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::cluster_agents::ClusterAgent;
use super::log_query::LogQuery;
use super::status_line::StatusLine;
use super::{JobPhase, Launcher};
use crate::checkpoint::CheckpointConfig;
use crate::control::spawn_order::Task;
use crate::control::{Job, Message, Node};
use crate::groups::Groups;
use crate::local_transport::LocalTransport;
use crate::mpi;
use crate::ps::log_status::LogStatus;
use crate::ps::paths::{self, Paths};
use crate::ps::rank_table::RankLocation;
use crate::ps::status_socket::{self, JobStatus, StatusQuery, StatusSocket};

/// Characters of the program and its arguments that a report contains at most.
const PROGRAM_CHARS_MAX: usize = 200;

/// Time after which agents that have not answered a path query are not waited for.
const PATH_QUERY_TIME: Duration = Duration::from_millis(1_500);
/// Time in which the answers to a path query serve further clients.
const PATH_QUERY_AGE_MAX: Duration = Duration::from_millis(500);
/// Interval at which the launcher updates the status line and asks for the sizes of message logs.
const STATUS_LINE_INTERVAL: Duration = Duration::from_secs(2);
/// Number of ranks that lengthens [`STATUS_LINE_INTERVAL`] by once its value, because the relays'
/// answer has a line for each rank.
const STATUS_LINE_RANKS: u32 = 1024;

/// The constant part of a [`JobStatus`], the status socket, and the running queries.
pub(super) struct StatusReporter {
    status_socket: StatusSocket,
    fixed: JobStatus,
    path_query: JobPathQuery,
    log_query: LogQuery,
    /// Time of the next update of the status line, while there is a status line.
    status_line_due: Option<Instant>,
    status_line_interval: Duration,
    /// Bytes of message logs that were reported last: in total, and on a disk.
    logged: Option<(u64, u64)>,
}

/// A query to all agents about the paths of their ranks.
#[derive(Default)]
struct JobPathQuery {
    serial: u32,
    /// Number of agents that have not answered.
    awaited: usize,
    /// While agents have not answered: the deadline of their answers. Afterwards: the time until
    /// which the answers are fresh.
    until: Option<Instant>,
    paths: Paths,
}

impl JobPathQuery {
    fn begin(&mut self, agents: usize, now: Instant) -> Message {
        let serial = self.serial.wrapping_add(1).max(1);
        *self = JobPathQuery {
            serial,
            awaited: agents,
            until: Some(now + PATH_QUERY_TIME),
            ..JobPathQuery::default()
        };
        Message::QueryPaths { serial, rows_max: paths::rows_for(agents) }
    }

    fn add_answer(&mut self, serial: u32, paths: Paths, now: Instant) {
        if serial != self.serial || self.awaited == 0 {
            return;
        }
        self.paths.merge(paths);
        self.awaited -= 1;
        if self.awaited == 0 {
            self.end(now);
        }
    }

    /// Ends the wait for agents that have not answered.
    fn end(&mut self, now: Instant) {
        self.paths.hosts_missing = std::mem::take(&mut self.awaited) as u32;
        self.paths.cut(paths::ROWS_MAX);
        self.until = Some(now + PATH_QUERY_AGE_MAX);
    }

    fn pass_time(&mut self, now: Instant) {
        if self.until.is_some_and(|until| until <= now) {
            match self.awaited {
                0 => self.until = None,
                _ => self.end(now),
            }
        }
    }

    /// The paths, if all agents have answered or timed out and the answers are fresh.
    fn found(&self) -> Option<&Paths> {
        (self.awaited == 0 && self.until.is_some()).then_some(&self.paths)
    }
}

fn recovers(job: &Job) -> bool {
    let is_it = |(name, value): &(String, String)| name == "LANDBRIDGE_RECOVER" && value == "on";
    job.environment.iter().any(is_it)
}

impl StatusReporter {
    /// Opens the status socket. A job without a status socket runs as well; `say` gets the error
    /// text.
    pub fn open(job: &Job, mut say: impl FnMut(&str)) -> StatusReporter {
        let status_socket = StatusSocket::open(&status_socket::directory(), &job.id)
            .unwrap_or_else(|error| {
                say(&format!("`landbridge ps` will not show this job: {error:#}"));
                StatusSocket::default()
            });
        let line = |task: &Task| {
            let words = std::iter::once(&task.program).chain(&task.arguments);
            words.map(String::as_str).collect::<Vec<_>>().join(" ")
        };
        let lines: Vec<String> = job.applications.iter().map(|it| line(&it.task)).collect();
        let fixed = JobStatus {
            job: job.id.clone(),
            launcher: std::process::id(),
            program: lines.join(" : ").chars().take(PROGRAM_CHARS_MAX).collect(),
            began: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            recover: recovers(job),
            checkpoints: CheckpointConfig::find(&job.environment).is_some_and(|_| recovers(job)),
            // With several clusters on one machine the launcher does not know who carries: that
            // depends on the library of each program.
            local_by_library: job.provider.is_none() && job.local == LocalTransport::Library,
            restarts: 0,
            ranks: Vec::new(),
            paths: None,
            log_status: None,
        };
        let path_query = JobPathQuery::default();
        let log_query = LogQuery::new(mpi::senders_keep_logs(&job.environment));
        let status_line_interval = STATUS_LINE_INTERVAL * (1 + job.size / STATUS_LINE_RANKS);
        StatusReporter {
            status_socket,
            fixed,
            path_query,
            log_query,
            status_line_due: None,
            status_line_interval,
            logged: None,
        }
    }

    /// Adds an agent's answer about the paths of its ranks.
    pub fn handle_paths(&mut self, serial: u32, paths: Paths) {
        self.path_query.add_answer(serial, paths, Instant::now());
    }

    /// Adds an agent's answer about message logs.
    pub fn handle_record(&mut self, serial: u32, lines: &str) {
        self.log_query.add_answer(serial, lines, Instant::now());
        self.logged =
            self.log_query.found(StatusQuery::Log).map(LogStatus::logged_bytes).or(self.logged);
    }

    pub fn next_time(&self) -> Option<Instant> {
        let times = self.path_query.until.into_iter().chain(self.log_query.next_time());
        times.chain(self.status_socket.next_time()).chain(self.status_line_due).min()
    }

    /// Whether killed ranks are restarted.
    pub fn recovers(&self) -> bool {
        self.fixed.recover
    }

    /// Whether checkpoints of ranks are taken.
    pub fn has_images(&self) -> bool {
        self.fixed.checkpoints
    }

    pub fn status_socket(&self) -> &StatusSocket {
        &self.status_socket
    }
}

impl Launcher {
    /// Answers clients of the status socket.
    pub(super) fn serve(&mut self) {
        let (groups, children, rank_table) =
            (&self.process_manager.groups, &self.children.0, &self.rank_table);
        let StatusReporter { status_socket, fixed, path_query, log_query, .. } =
            &mut self.status_reporter;
        let now = Instant::now();
        path_query.pass_time(now);
        log_query.pass_time(now);
        let (is_wanted, wanted) = (Cell::new(false), Cell::new(None));
        let mut images = Vec::new();
        let to_take = RefCell::new(&mut images);
        status_socket.serve(now, |question| {
            let (mut paths, mut log_status, mut logged) = (None, None, None);
            match question {
                StatusQuery::Ranks if fixed.recover => {
                    logged = log_query.found(StatusQuery::Log);
                    if logged.is_none() && log_query.is_near(StatusQuery::Log) {
                        wanted.set(Some(StatusQuery::Log));
                        return None;
                    }
                }
                StatusQuery::Ranks => (),
                // This query is answered at once, so each client adds its checkpoint request once.
                StatusQuery::Checkpoint { rank } => to_take.borrow_mut().push(rank),
                StatusQuery::Paths => {
                    is_wanted.set(true);
                    paths = Some(path_query.found()?.clone());
                }
                StatusQuery::Log | StatusQuery::Deliveries { .. } => {
                    if let Some(found) = log_query.found(question) {
                        log_status = Some(found.clone());
                    } else {
                        wanted.set(Some(question));
                        return None;
                    }
                }
            }
            Some(JobStatus {
                restarts: rank_table.counts().restarts,
                ranks: rank_table.lines(
                    now,
                    |rank| location_of(groups, children, rank),
                    |rank| logged.and_then(|logged| logged.logged_bytes_of(rank)),
                ),
                paths,
                log_status,
                ..fixed.clone()
            })
        });
        if is_wanted.get() && path_query.until.is_none() {
            let agents = children.iter().map(|child| child.node.hosts().len()).sum();
            let message = path_query.begin(agents, now);
            self.children.send_to_all(&message);
        }
        if self.is_status_line_due(now) {
            wanted.set(wanted.get().or(Some(StatusQuery::Log)));
            self.show_status();
        }
        for rank in images {
            self.take_images(rank);
        }
        let log_query = &mut self.status_reporter.log_query;
        // A client with another question waits until the answers of this query are no longer fresh.
        if let (Some(question), true) = (wanted.get(), log_query.is_idle()) {
            let message = log_query.begin(question, log_query.answers(&self.children.0), now);
            self.children.send_to_all(&message);
        }
    }

    /// Takes a checkpoint of one rank, or of all ranks, at once.
    pub(super) fn take_images(&mut self, rank: Option<u32>) {
        if !self.status_reporter.has_images() {
            self.output
                .say("no checkpoints are taken of this job: it was started without --checkpoint");
        } else if self.phase == JobPhase::Running {
            self.children.send_to_all(&Message::TakeCheckpoints { rank });
        }
    }

    /// Whether the status line has to be updated now, if there is one.
    fn is_status_line_due(&mut self, now: Instant) -> bool {
        let has_status_line = self.has_status_line();
        let StatusReporter { status_line_due, status_line_interval, .. } =
            &mut self.status_reporter;
        let is_due = has_status_line && status_line_due.is_none_or(|due| due <= now);
        if is_due || !has_status_line {
            *status_line_due = has_status_line.then(|| now + *status_line_interval);
        }
        is_due
    }

    /// Whether the job has a status line: a job with recovery, while its ranks run, on a terminal.
    fn has_status_line(&self) -> bool {
        self.status_reporter.fixed.recover
            && self.phase == JobPhase::Running
            && self.output.is_terminal()
    }

    /// Updates the status line, if the job has one.
    pub(super) fn show_status(&mut self) {
        let now = Instant::now();
        let text = self.has_status_line().then(|| {
            let (counts, replaying) = (self.rank_table.counts(), self.rank_table.replaying());
            let (logged, images) = (self.status_reporter.logged, self.rank_table.ages(now));
            StatusLine { counts, replaying, logged, images }.text()
        });
        self.output.set_status(text);
    }

    pub(super) fn place(&self, rank: u32) -> String {
        place(&self.process_manager.groups, &self.children.0, rank)
    }

    /// A name for the node of a rank that is unique in the job.
    pub(super) fn node_of(&self, rank: u32) -> String {
        match location_of(&self.process_manager.groups, &self.children.0, rank) {
            RankLocation { node, .. } if node.is_empty() => String::new(),
            RankLocation { node, cluster, .. } => format!("{cluster}/{node}"),
        }
    }
}

fn location_of(groups: &Groups, children: &[ClusterAgent], rank: u32) -> RankLocation {
    if let (Some(name), Some((_, node, cluster))) = (groups.name(rank), groups.place_of(rank)) {
        return RankLocation { rank: name, node: node.to_string(), cluster: cluster.to_string() };
    }
    let node = children.iter().find_map(|child| find_node(&child.node, rank));
    let (node, cluster) =
        node.map_or_else(Default::default, |node| (node.name.clone(), node.cluster_name.clone()));
    RankLocation { rank: rank.to_string(), node, cluster }
}

/// The name and the location of a rank, for texts that the user reads.
pub(super) fn place(groups: &Groups, children: &[ClusterAgent], rank: u32) -> String {
    let spawned = groups.place_of(rank).map(|(name, ..)| name);
    let RankLocation { node, cluster, .. } = location_of(groups, children, rank);
    let name = spawned.unwrap_or_else(|| format!("rank {rank}"));
    match children.len() {
        _ if node.is_empty() => name,
        1 => format!("{name} on node {node}"),
        _ => format!("{name} on node {node} (cluster {cluster})"),
    }
}

fn find_node(node: &Node, rank: u32) -> Option<&Node> {
    let own = node.first_rank..node.first_rank + node.rank_count;
    if own.contains(&rank) {
        return Some(node);
    }
    node.children.iter().find_map(|child| find_node(child, rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_query_ends_when_all_have_answered_or_timed_out() {
        let (mut path_query, now) = (JobPathQuery::default(), Instant::now());
        let said = || Paths { ranks: 1, ..Paths::default() };
        path_query.begin(2, now);
        assert_eq!(path_query.found(), None);
        path_query.add_answer(1, said(), now);
        path_query.add_answer(7, said(), now);
        assert_eq!(path_query.found(), None, "one is missing");
        path_query.add_answer(1, said(), now);
        assert_eq!(
            path_query.found().map(|paths| (paths.ranks, paths.hosts_missing)),
            Some((2, 0))
        );
        path_query.pass_time(now + PATH_QUERY_AGE_MAX);
        assert_eq!(path_query.found(), None, "it is old");
        path_query.begin(2, now);
        path_query.add_answer(2, said(), now);
        path_query.pass_time(now + PATH_QUERY_TIME);
        assert_eq!(
            path_query.found().map(|paths| (paths.ranks, paths.hosts_missing)),
            Some((1, 1))
        );
    }
}
