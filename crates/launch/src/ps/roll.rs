//! The roll of a job's ranks: which process each one is, for which time it has been started, and how it goes.
//!
//! Pure. What agents report enters; the lines of `landbridge ps` and the counts of the status line leave. It says where a
//! rank stood when its agent last spoke of it, which over a wide area network was a moment ago.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::control::Ending;
use crate::sys::signal_name;

/// How a rank goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Its agent has not started it yet.
    Starting,
    Running,
    /// It was killed, has been started anew, and does not do what it did before yet.
    StartingAnew,
    Ended,
}

impl State {
    /// For people.
    pub fn words(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Running => "running",
            State::StartingAnew => "starting anew",
            State::Ended => "ended",
        }
    }
}

/// Of one rank, as `landbridge ps` says it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Its number, `1:0` for rank 0 of the first group that was spawned.
    pub rank: String,
    /// Its number in the job.
    pub process: u32,
    /// On its node; none where it has no process, or none that can be named from here.
    pub pid: Option<u32>,
    pub node: String,
    pub cluster: String,
    /// How often it has been started anew.
    pub incarnation: u32,
    pub state: State,
    /// How much of what was before it has done again, while it starts anew and that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<u8>,
    /// How its last process ended, if that has.
    pub ending: Option<String>,
}

/// Where a rank is, and what it is called.
#[derive(Debug, Clone, Default)]
pub struct Place {
    pub rank: String,
    pub node: String,
    pub cluster: String,
}

/// How many ranks there are of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub running: usize,
    pub starting_anew: usize,
    pub ended: usize,
    /// New starts since the job began.
    pub restarts: u64,
}

/// See the module head.
#[derive(Debug, Default)]
pub struct Roll {
    ranks: BTreeMap<u32, Entry>,
    restarts: u64,
}

#[derive(Debug)]
struct Entry {
    group: u32,
    pid: u32,
    incarnation: u32,
    state: State,
    percent: Option<u8>,
    ending: Option<Ending>,
}

/// What an agent says of a process that runs.
#[derive(Debug, Clone, Copy)]
pub struct Sight {
    pub pid: u32,
    /// How often the rank has been started anew.
    pub start: u32,
    /// It is where the one before it was,
    pub is_back: bool,
    /// or has gone so much of the way.
    pub percent: Option<u8>,
}

impl Roll {
    /// The job's first processes, none of which has been started.
    pub fn new(size: u32) -> Roll {
        let entry = || Entry {
            group: 0,
            pid: 0,
            incarnation: 0,
            state: State::Starting,
            percent: None,
            ending: None,
        };
        Roll { ranks: (0..size).map(|rank| (rank, entry())).collect(), restarts: 0 }
    }

    /// It has been started, comes back to where it was, or has done so.
    pub fn handle_alive(&mut self, group: u32, rank: u32, sight: Sight) {
        let Sight { pid, start: incarnation, is_back, percent } = sight;
        let state = if is_back { State::Running } else { State::StartingAnew };
        let entry = Entry { group, pid, incarnation, state, percent, ending: None };
        let before = self.ranks.insert(rank, entry).map_or(0, |before| before.incarnation);
        self.restarts += u64::from(incarnation.saturating_sub(before));
    }

    /// It has ended for good.
    pub fn handle_exit(&mut self, rank: u32, ending: Ending) {
        if let Some(entry) = self.ranks.get_mut(&rank) {
            (entry.state, entry.ending) = (State::Ended, Some(ending));
        }
    }

    /// Nothing is left of a spawned group: a job may spawn for a long time.
    pub fn forget(&mut self, group: u32) {
        self.ranks.retain(|_, entry| group == 0 || entry.group != group);
    }

    pub fn counts(&self) -> Counts {
        let count = |state| self.ranks.values().filter(|entry| entry.state == state).count();
        Counts {
            running: count(State::Running),
            starting_anew: count(State::StartingAnew),
            ended: count(State::Ended),
            restarts: self.restarts,
        }
    }

    pub fn lines(&self, place: impl Fn(u32) -> Place) -> Vec<Line> {
        let line = |(&process, entry): (&u32, &Entry)| {
            let Place { rank, node, cluster } = place(process);
            let has_process = matches!(entry.state, State::Running | State::StartingAnew);
            Line {
                rank,
                process,
                pid: has_process.then_some(entry.pid),
                node,
                cluster,
                incarnation: entry.incarnation,
                state: entry.state,
                percent: entry.percent.filter(|_| entry.state == State::StartingAnew),
                ending: entry.ending.map(words),
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

    /// Process, its id, how often it was started anew, state, share, ending.
    type Short = (u32, Option<u32>, u32, &'static str, Option<u8>, Option<String>);

    fn lines(roll: &Roll) -> Vec<Short> {
        let lines = roll.lines(|rank| Place { rank: rank.to_string(), ..Place::default() });
        let of = |line: Line| {
            let Line { process, pid, incarnation, state, percent, ending, .. } = line;
            (process, pid, incarnation, state.words(), percent, ending)
        };
        lines.into_iter().map(of).collect()
    }

    fn sight(pid: u32, start: u32, percent: Option<u8>) -> Sight {
        Sight { pid, start, is_back: percent.is_none(), percent }
    }

    #[test]
    fn every_rank_is_there_from_the_start_to_the_end() {
        let mut roll = Roll::new(2);
        let starting = |rank| (rank, None, 0, "starting", None, None);
        assert_eq!(lines(&roll), [starting(0), starting(1)]);
        roll.handle_alive(0, 0, sight(70, 0, None));
        roll.handle_alive(0, 1, sight(71, 0, None));
        roll.handle_alive(0, 1, sight(80, 1, Some(0)));
        roll.handle_alive(0, 1, sight(80, 1, Some(43)));
        let counts = Counts { running: 1, starting_anew: 1, ended: 0, restarts: 1 };
        assert_eq!(roll.counts(), counts);
        assert_eq!(lines(&roll)[1], (1, Some(80), 1, "starting anew", Some(43), None));
        roll.handle_alive(0, 1, sight(80, 1, None));
        roll.handle_exit(1, Ending::Killed(9));
        let end = (1, None, 1, "ended", None, Some("SIGKILL".to_string()));
        assert_eq!(lines(&roll), [(0, Some(70), 0, "running", None, None), end]);
        assert_eq!(roll.counts(), Counts { running: 1, starting_anew: 0, ended: 1, restarts: 1 });
    }

    #[test]
    fn spawned_groups_are_forgotten_and_the_first_processes_never() {
        let mut roll = Roll::new(1);
        roll.handle_alive(0, 0, sight(70, 0, None));
        roll.handle_alive(1, 5, sight(71, 0, None));
        roll.handle_alive(2, 6, sight(72, 0, None));
        roll.forget(1);
        roll.forget(0);
        assert_eq!(lines(&roll).iter().map(|line| line.0).collect::<Vec<_>>(), [0, 6]);
    }
}
