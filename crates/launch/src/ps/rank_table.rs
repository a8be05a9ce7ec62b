//! The rank table of a job: the process, the incarnation and the state of each rank.
//!
//! The module is pure. Reports of agents enter; the rows of `landbridge ps` and the counts of the
//! status line leave. A row holds the state of the rank's latest report, which is older than the
//! present by the delay of the network.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::ending::Ending;
use crate::sys::signal_name;

/// Minimum time of observation before a replay rate is shown.
const RATE_AFTER: Duration = Duration::from_millis(400);

/// The state of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RankState {
    /// The rank's agent has not started the rank yet.
    Starting,
    Running,
    /// The rank was killed and has been restarted; how far it has replayed is not known yet.
    Restarting,
    /// The restarted rank replays, and how far is known.
    Replaying,
    Ended,
}

impl RankState {
    /// Whether a restarted process has not yet replayed everything.
    fn is_on_its_way_back(self) -> bool {
        matches!(self, RankState::Restarting | RankState::Replaying)
    }

    /// The state as a word for users.
    pub fn words(self) -> &'static str {
        match self {
            RankState::Starting => "starting",
            RankState::Running => "running",
            RankState::Restarting => "restarting",
            RankState::Replaying => "replaying",
            RankState::Ended => "ended",
        }
    }
}

/// The row of one rank in the output of `landbridge ps`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRow {
    /// The name of the rank: its number, or `1:0` for rank 0 of the first spawned group.
    pub rank: String,
    /// The number of the rank's process in the job.
    pub process: u32,
    /// Process id on the rank's node; `None` if the rank has no process, or no process that is
    /// visible here.
    pub pid: Option<u32>,
    pub node: String,
    pub cluster: String,
    /// Number of restarts of the rank.
    pub incarnation: u32,
    pub state: RankState,
    /// Share of the log that the rank has replayed, in percent, while the rank replays and the
    /// share is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<u8>,
    /// How the rank's last process ended, if it has ended.
    pub ending: Option<String>,
    /// The rank's newest checkpoint, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<NewestCheckpoint>,
    /// Bytes of the message log that the rank's relay holds for the rank, if the number is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logged_bytes: Option<u64>,
}

/// Number, size and age of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewestCheckpoint {
    pub number: u64,
    pub bytes: u64,
    /// Seconds since the checkpoint became complete.
    pub age_s: u64,
}

/// The replay progress of a restarted rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplayProgress {
    pub rank: u32,
    pub percent: Option<u8>,
    /// Percent per second since the first report of this incarnation's replay.
    pub per_second: Option<f64>,
}

/// The name of a rank, and the node and cluster where it runs.
#[derive(Debug, Clone, Default)]
pub struct RankLocation {
    pub rank: String,
    pub node: String,
    pub cluster: String,
}

/// The number of ranks in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankCounts {
    pub running: usize,
    pub restarting: usize,
    pub ended: usize,
    /// Restarts of all ranks since the job began.
    pub restarts: u64,
}

/// The state of all ranks of a job.
#[derive(Debug, Default)]
pub struct RankTable {
    ranks: BTreeMap<u32, RankEntry>,
    /// For each rank with a checkpoint: number, bytes, and completion time of the newest one.
    images: BTreeMap<u32, (u64, u64, Instant)>,
    restarts: u64,
}

#[derive(Debug)]
struct RankEntry {
    group: u32,
    pid: u32,
    incarnation: u32,
    state: RankState,
    percent: Option<u8>,
    /// Time and percentage of the first report of this incarnation's replay.
    first_seen: Option<(Instant, u8)>,
    per_second: Option<f64>,
    ending: Option<Ending>,
}

/// An agent's report about a running process.
#[derive(Debug, Clone, Copy)]
pub struct RankReport {
    pub pid: u32,
    /// Number of restarts of the rank.
    pub incarnation: u32,
    /// The process has replayed everything that earlier incarnations did.
    pub is_live: bool,
    /// Share of the log that the process has replayed, in percent.
    pub percent: Option<u8>,
}

impl RankTable {
    /// A table of the job's first processes, none of which has been started.
    pub fn new(size: u32) -> RankTable {
        let entry = || RankEntry {
            group: 0,
            pid: 0,
            incarnation: 0,
            state: RankState::Starting,
            percent: None,
            first_seen: None,
            per_second: None,
            ending: None,
        };
        RankTable { ranks: (0..size).map(|rank| (rank, entry())).collect(), ..RankTable::default() }
    }

    /// Records a report: the process has been started, replays, or has completed its replay.
    pub fn handle_alive(&mut self, group: u32, rank: u32, report: RankReport, now: Instant) {
        let RankReport { pid, incarnation, is_live, percent } = report;
        let state = match (is_live, percent) {
            (true, _) => RankState::Running,
            (false, Some(_)) => RankState::Replaying,
            (false, None) => RankState::Restarting,
        };
        let before = self.ranks.get(&rank);
        self.restarts +=
            u64::from(incarnation.saturating_sub(before.map_or(0, |before| before.incarnation)));
        let same = before.filter(|before| before.incarnation == incarnation && !is_live);
        let first_seen = same.and_then(|before| before.first_seen);
        let first_seen = first_seen.or(percent.map(|percent| (now, percent)));
        let per_second = first_seen.zip(percent).and_then(|((since, first), percent)| {
            let time = now.saturating_duration_since(since);
            let share = f64::from(percent.saturating_sub(first));
            (time >= RATE_AFTER).then(|| share / time.as_secs_f64())
        });
        let ending = None;
        let entry =
            RankEntry { group, pid, incarnation, state, percent, first_seen, per_second, ending };
        self.ranks.insert(rank, entry);
    }

    /// Records number and bytes of the rank's newest checkpoint; number 0 stands for no checkpoint.
    pub fn handle_image(&mut self, rank: u32, number: u64, bytes: u64, now: Instant) {
        match number {
            0 => _ = self.images.remove(&rank),
            _ => _ = self.images.insert(rank, (number, bytes, now)),
        }
    }

    /// The ages of the youngest and the oldest among the newest checkpoints of running ranks.
    pub fn ages(&self, now: Instant) -> Option<(Duration, Duration)> {
        let living = self.images.iter().filter(|(rank, _)| self.is_there(**rank));
        let ages = living.map(|(_, (.., since))| now.saturating_duration_since(*since));
        ages.fold(None, |found, age| {
            let (youngest, oldest) = found.unwrap_or((age, age));
            Some((age.min(youngest), age.max(oldest)))
        })
    }

    fn is_there(&self, rank: u32) -> bool {
        self.ranks.get(&rank).is_some_and(|entry| entry.state != RankState::Ended)
    }

    /// The progress of all ranks that replay.
    pub fn replaying(&self) -> Vec<ReplayProgress> {
        let replaying = self.ranks.iter().filter(|(_, entry)| entry.state.is_on_its_way_back());
        let of = |(&rank, entry): (&u32, &RankEntry)| {
            let &RankEntry { percent, per_second, .. } = entry;
            ReplayProgress { rank, percent, per_second }
        };
        replaying.map(of).collect()
    }

    /// Records that the rank has ended and is not restarted.
    pub fn handle_exit(&mut self, rank: u32, ending: Ending) {
        if let Some(entry) = self.ranks.get_mut(&rank) {
            (entry.state, entry.ending) = (RankState::Ended, Some(ending));
        }
    }

    /// Removes the ranks of a spawned group that has ended, because a job may spawn groups without
    /// a limit.
    pub fn forget(&mut self, group: u32) {
        self.ranks.retain(|_, entry| group == 0 || entry.group != group);
    }

    pub fn counts(&self) -> RankCounts {
        let count = |is_it: fn(RankState) -> bool| {
            self.ranks.values().filter(|entry| is_it(entry.state)).count()
        };
        RankCounts {
            running: count(|state| state == RankState::Running),
            restarting: count(RankState::is_on_its_way_back),
            ended: count(|state| state == RankState::Ended),
            restarts: self.restarts,
        }
    }

    /// The rows of all ranks. `place` gives name and location of a rank; `logged` gives the bytes
    /// of the message log that relays hold for a rank, if the number is known.
    pub fn lines(
        &self,
        now: Instant,
        place: impl Fn(u32) -> RankLocation,
        logged: impl Fn(u32) -> Option<u64>,
    ) -> Vec<RankRow> {
        let line = |(&process, entry): (&u32, &RankEntry)| {
            let RankLocation { rank, node, cluster } = place(process);
            let is_back = entry.state == RankState::Running;
            let has_process = is_back || entry.state.is_on_its_way_back();
            RankRow {
                rank,
                process,
                pid: has_process.then_some(entry.pid),
                node,
                cluster,
                incarnation: entry.incarnation,
                state: entry.state,
                percent: entry.percent.filter(|_| entry.state == RankState::Replaying),
                ending: entry.ending.map(words),
                image: self.images.get(&process).map(|&(number, bytes, since)| NewestCheckpoint {
                    number,
                    bytes,
                    age_s: now.saturating_duration_since(since).as_secs(),
                }),
                logged_bytes: logged(process),
            }
        };
        self.ranks.iter().map(line).collect()
    }
}

/// How a process ended, in a few words.
pub fn words(ending: Ending) -> String {
    match ending {
        Ending::Exited(code) => format!("exit code {code}"),
        Ending::Killed(signal) => signal_name(signal),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Process, process id, number of restarts, state, percentage, ending.
    type Short = (u32, Option<u32>, u32, &'static str, Option<u8>, Option<String>);

    fn lines(rank_table: &RankTable) -> Vec<Short> {
        let place = |rank: u32| RankLocation { rank: rank.to_string(), ..RankLocation::default() };
        let lines = rank_table.lines(Instant::now(), place, |_| None);
        let of = |line: RankRow| {
            let RankRow { process, pid, incarnation, state, percent, ending, .. } = line;
            (process, pid, incarnation, state.words(), percent, ending)
        };
        lines.into_iter().map(of).collect()
    }

    fn report(pid: u32, incarnation: u32, percent: Option<u8>) -> RankReport {
        RankReport { pid, incarnation, is_live: percent.is_none(), percent }
    }

    #[test]
    fn every_rank_is_there_from_the_start_to_the_end() {
        let mut rank_table = RankTable::new(2);
        let starting = |rank| (rank, None, 0, "starting", None, None);
        assert_eq!(lines(&rank_table), [starting(0), starting(1)]);
        let now = Instant::now();
        rank_table.handle_alive(0, 0, report(70, 0, None), now);
        rank_table.handle_alive(0, 1, report(71, 0, None), now);
        rank_table.handle_alive(0, 1, report(80, 1, Some(0)), now);
        rank_table.handle_alive(0, 1, report(80, 1, Some(43)), now);
        let counts = RankCounts { running: 1, restarting: 1, ended: 0, restarts: 1 };
        assert_eq!(rank_table.counts(), counts);
        assert_eq!(lines(&rank_table)[1], (1, Some(80), 1, "replaying", Some(43), None));
        rank_table.handle_alive(0, 1, report(80, 1, None), now);
        rank_table.handle_exit(1, Ending::Killed(9));
        let end = (1, None, 1, "ended", None, Some("SIGKILL".to_string()));
        assert_eq!(lines(&rank_table), [(0, Some(70), 0, "running", None, None), end]);
        assert_eq!(
            rank_table.counts(),
            RankCounts { running: 1, restarting: 0, ended: 1, restarts: 1 }
        );
    }

    #[test]
    fn a_replay_rate_is_that_of_this_incarnation() {
        let (mut rank_table, now) = (RankTable::new(2), Instant::now());
        let later = |millis| now + Duration::from_millis(millis);
        let rates = |rank_table: &RankTable| {
            let all = rank_table.replaying().into_iter();
            all.map(|it| (it.rank, it.percent, it.per_second)).collect::<Vec<_>>()
        };
        let replaying =
            |incarnation, percent| RankReport { pid: 80, incarnation, is_live: false, percent };
        rank_table.handle_alive(0, 1, replaying(1, None), now);
        assert_eq!(rates(&rank_table), [(1, None, None)]);
        rank_table.handle_alive(0, 1, replaying(1, Some(10)), later(500));
        rank_table.handle_alive(0, 1, replaying(1, Some(20)), later(700));
        assert_eq!(rates(&rank_table), [(1, Some(20), None)], "that is not long");
        rank_table.handle_alive(0, 1, replaying(1, Some(50)), later(2500));
        assert_eq!(rates(&rank_table), [(1, Some(50), Some(20.0))]);
        rank_table.handle_alive(0, 1, replaying(2, Some(0)), later(3000));
        assert_eq!(rates(&rank_table), [(1, Some(0), None)], "another start");
        rank_table.handle_alive(0, 1, report(80, 2, None), later(4000));
        assert_eq!(rates(&rank_table), []);
    }

    #[test]
    fn images_have_an_age_while_their_ranks_run() {
        let (mut rank_table, now) = (RankTable::new(2), Instant::now());
        let later = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(rank_table.ages(now), None);
        rank_table.handle_image(0, 1, 100, now);
        rank_table.handle_image(1, 1, 100, later(5));
        rank_table.handle_image(1, 2, 200, later(7));
        let seconds = Duration::from_secs;
        assert_eq!(rank_table.ages(later(9)), Some((seconds(2), seconds(9))));
        let lines =
            rank_table.lines(later(9), |_| RankLocation::default(), |rank| Some(u64::from(rank)));
        let of = |line: &RankRow| {
            (line.image.map(|it| (it.number, it.bytes, it.age_s)), line.logged_bytes)
        };
        assert_eq!(of(&lines[0]), (Some((1, 100, 9)), Some(0)));
        assert_eq!(of(&lines[1]), (Some((2, 200, 2)), Some(1)));
        rank_table.handle_exit(0, Ending::Exited(0));
        assert_eq!(rank_table.ages(later(9)), Some((seconds(2), seconds(2))));
        rank_table.handle_image(1, 0, 0, later(9));
        assert_eq!(rank_table.ages(later(9)), None);
    }

    #[test]
    fn spawned_groups_are_forgotten_and_the_first_processes_never() {
        let mut rank_table = RankTable::new(1);
        let now = Instant::now();
        rank_table.handle_alive(0, 0, report(70, 0, None), now);
        rank_table.handle_alive(1, 5, report(71, 0, None), now);
        rank_table.handle_alive(2, 6, report(72, 0, None), now);
        rank_table.forget(1);
        rank_table.forget(0);
        assert_eq!(lines(&rank_table).iter().map(|line| line.0).collect::<Vec<_>>(), [0, 6]);
    }
}
