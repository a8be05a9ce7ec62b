//! Faults of `punish`: ranks that are killed with SIGKILL.
//!
//! `KillSchedule` is pure: from a seed and a mean interval it generates an endless sequence of
//! kills in the order of their times, each with its victims. The intervals are exponentially
//! distributed, so some kills follow at once and some intervals are long. `RankKiller` performs the
//! kills: `landbridge ps` reports the processes of the ranks.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;

use super::run::{FaultInjector, SoakContext};
use super::tally::FaultLabel;
use crate::net::link::mix;

/// Milliseconds after which a kill of kind `Same` kills the same rank a second time, usually during
/// its restart.
const AGAIN_AFTER_MS: u64 = 400;
/// Time after which a kill that finds no live rank (between two programs) is tried again.
const RETRY: Duration = Duration::from_millis(50);
/// Bound of an interval, as a multiple of the mean.
const GAPS_MAX: f64 = 8.0;

/// Victims of a kill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KillTarget {
    One,
    Two,
    All,
    /// The rank that was killed last.
    Same,
}

impl KillTarget {
    pub const ALL: [KillTarget; 4] =
        [KillTarget::One, KillTarget::Two, KillTarget::All, KillTarget::Same];

    /// Name and description.
    pub fn kind(self) -> FaultLabel {
        match self {
            KillTarget::One => ("one", "a rank is killed"),
            KillTarget::Two => ("two", "two ranks are killed at once"),
            KillTarget::All => ("all", "all ranks are killed at once"),
            KillTarget::Same => {
                ("same", "the rank that was killed last is killed again, soon after")
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kill {
    /// Time since the first disturbed program began.
    pub at: Duration,
    pub target: KillTarget,
    /// Random number that selects the victims among the live ranks.
    pub draw: u64,
}

/// Endless sequence of kills.
#[derive(Clone, Debug)]
pub struct KillSchedule {
    seed: u64,
    draws: u64,
    now_ms: u64,
    mean_ms: f64,
    /// True if the next kill hits the last victim.
    is_repeat: bool,
}

impl KillSchedule {
    pub fn new(seed: u64, mean: Duration) -> KillSchedule {
        KillSchedule {
            seed,
            draws: 0,
            now_ms: 0,
            mean_ms: mean.as_secs_f64() * 1e3,
            is_repeat: false,
        }
    }

    fn draw(&mut self) -> u64 {
        self.draws += 1;
        mix(mix(self.seed).wrapping_add(self.draws))
    }

    fn gap_ms(&mut self) -> u64 {
        // The share is at least 0 and less than 1.
        let share = (self.draw() >> 11) as f64 / (1u64 << 53) as f64;
        ((-(1.0 - share).ln()).min(GAPS_MAX) * self.mean_ms) as u64
    }
}

impl Iterator for KillSchedule {
    type Item = Kill;

    fn next(&mut self) -> Option<Kill> {
        if std::mem::take(&mut self.is_repeat) {
            self.now_ms += self.draw() % AGAIN_AFTER_MS;
            let at = Duration::from_millis(self.now_ms);
            return Some(Kill { at, target: KillTarget::Same, draw: 0 });
        }
        self.now_ms += self.gap_ms();
        let target = match self.draw() % 12 {
            0 => KillTarget::All,
            1 | 2 => KillTarget::Two,
            _ => KillTarget::One,
        };
        let draw = self.draw();
        self.is_repeat = target == KillTarget::One && self.draw().is_multiple_of(5);
        Some(Kill { at: Duration::from_millis(self.now_ms), target, draw })
    }
}

/// Kills ranks of the running program.
pub struct RankKiller {
    landbridge: PathBuf,
    kills: std::iter::Peekable<KillSchedule>,
    /// End of the soak: no kill happens after this time.
    time: Duration,
    /// Time at which a kill that found no live rank is tried again.
    retry_at: Option<Duration>,
    last: Option<u32>,
}

/// Fields of `landbridge ps --json` that a kill needs.
#[derive(Deserialize)]
struct JobStatus {
    launcher: u32,
    ranks: Vec<RankStatus>,
}

#[derive(Clone, Deserialize)]
struct RankStatus {
    process: u32,
    pid: Option<u32>,
    incarnation: u32,
    state: String,
}

impl RankKiller {
    pub fn new(landbridge: PathBuf, kills: KillSchedule, time: Duration) -> RankKiller {
        RankKiller { landbridge, kills: kills.peekable(), time, retry_at: None, last: None }
    }

    /// Ranks with a process in the job of this launcher, by rank number.
    fn ranks(&self, launcher: u32) -> anyhow::Result<BTreeMap<u32, RankStatus>> {
        let done = Command::new(&self.landbridge).args(["ps", "--json"]).output()?;
        if !done.status.success() {
            bail!("`landbridge ps` says: {}", String::from_utf8_lossy(&done.stderr).trim());
        }
        let jobs: Vec<JobStatus> =
            serde_json::from_slice(&done.stdout).context("`landbridge ps` speaks no JSON")?;
        let own = jobs.into_iter().filter(|job| job.launcher == launcher);
        let ranks = own.flat_map(|job| job.ranks).filter(|rank| rank.pid.is_some());
        Ok(ranks.map(|rank| (rank.process, rank)).collect())
    }

    /// The victims of a kill among the live ranks.
    fn victims(&self, kill: &Kill, ranks: &BTreeMap<u32, RankStatus>) -> Vec<RankStatus> {
        let all: Vec<&RankStatus> = ranks.values().collect();
        let at = |place: u64| all.get((place % all.len().max(1) as u64) as usize).copied();
        let chosen: Vec<&RankStatus> = match kill.target {
            KillTarget::One => at(kill.draw).into_iter().collect(),
            // The second victim is another rank than the first.
            KillTarget::Two if all.len() > 1 => {
                let (first, count) = (kill.draw % all.len() as u64, all.len() as u64);
                let second = first + 1 + (kill.draw >> 32) % (count - 1);
                [first, second].into_iter().filter_map(at).collect()
            }
            KillTarget::Two | KillTarget::All => all,
            KillTarget::Same => self.last.and_then(|last| ranks.get(&last)).into_iter().collect(),
        };
        chosen.into_iter().cloned().collect()
    }

    fn kill_ranks(&mut self, kill: Kill, context: &mut SoakContext) -> anyhow::Result<bool> {
        let victims = self.victims(&kill, &self.ranks(context.program)?);
        let words: Vec<String> = victims.iter().map(RankStatus::describe).collect();
        for victim in &victims {
            let pid = victim.pid.and_then(|pid| Pid::from_raw(pid.cast_signed()));
            // The process may have ended since.
            let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
        }
        self.last = victims.last().map(|victim| victim.process).or(self.last);
        if !victims.is_empty() {
            context.log_line(&format!("killed: {}", words.join(", ")));
            context.tally.fault(kill.target.kind().0, Duration::ZERO);
        }
        Ok(!victims.is_empty())
    }
}

impl RankStatus {
    fn describe(&self) -> String {
        let RankStatus { process, incarnation, .. } = self;
        let state = self.state.replace('-', " ");
        format!("rank {process} (incarnation {incarnation}, {state})")
    }
}

impl FaultInjector for RankKiller {
    fn next_time(&mut self) -> Option<Duration> {
        let next = self.kills.peek().map(|kill| kill.at);
        self.retry_at.or(next).filter(|at| *at < self.time)
    }

    fn act(&mut self, now: Duration, context: &mut SoakContext) {
        let Some(kill) = self.kills.peek().copied() else { return };
        if now >= self.time || now < self.retry_at.unwrap_or(kill.at) {
            return;
        }
        self.retry_at = None;
        match self.kill_ranks(kill, context) {
            Ok(false) if kill.target != KillTarget::Same => self.retry_at = Some(now + RETRY),
            Ok(_) => drop(self.kills.next()),
            Err(error) => {
                context.log_line(&format!("a kill is left out: {error:#}"));
                self.kills.next();
            }
        }
    }

    fn end(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(seed: u64) -> KillSchedule {
        KillSchedule::new(seed, Duration::from_secs(4))
    }

    #[test]
    fn the_same_seed_gives_the_same_kills_for_ever() {
        let take = |seed| schedule(seed).take(300).collect::<Vec<Kill>>();
        assert_eq!(take(7), take(7));
        assert_ne!(take(7), take(8));
        let first = take(7)[0];
        // A recorded seed must give the same schedule in later versions.
        assert_eq!((first.at.as_millis(), first.target), FIRST_OF_SEED_7);
    }

    #[test]
    fn gaps_are_exponential() {
        let kills: Vec<Kill> = schedule(3).take(20_000).collect();
        assert!(kills.is_sorted_by_key(|kill| kill.at));
        let mut gaps = Vec::new();
        for pair in kills.windows(2).filter(|pair| pair[1].target != KillTarget::Same) {
            gaps.push((pair[1].at - pair[0].at).as_secs_f64());
        }
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        assert!((3.8..4.2).contains(&mean), "{mean}");
        let long = gaps.iter().filter(|gap| **gap > 4.0).count() as f64 / gaps.len() as f64;
        assert!((0.35..0.39).contains(&long), "1/e of them are longer than the mean: {long}");
        for target in KillTarget::ALL {
            assert!(
                kills.iter().filter(|kill| kill.target == target).count() > 1_000,
                "{target:?}"
            );
        }
    }

    #[test]
    fn a_kill_strikes_who_is_there() {
        let rank = |process| RankStatus {
            process,
            pid: Some(1),
            incarnation: 0,
            state: "running".to_owned(),
        };
        let mut killer = RankKiller::new(PathBuf::new(), schedule(1), Duration::MAX);
        let killed = |killer: &RankKiller, target, draw, there: &[u32]| {
            let ranks = there.iter().map(|&process| (process, rank(process))).collect();
            let kill = Kill { at: Duration::ZERO, target, draw };
            let victims = killer.victims(&kill, &ranks);
            victims.iter().map(|rank| rank.process).collect::<Vec<u32>>()
        };
        assert_eq!(killed(&killer, KillTarget::One, 5, &[0, 2, 3]), [3]);
        assert_eq!(killed(&killer, KillTarget::Two, u64::MAX, &[0, 2]), [2, 0]);
        assert_eq!(killed(&killer, KillTarget::Two, 1, &[4]), [4]);
        assert_eq!(killed(&killer, KillTarget::All, 9, &[0, 2, 3]), [0, 2, 3]);
        assert!(killed(&killer, KillTarget::One, 9, &[]).is_empty());
        assert!(killed(&killer, KillTarget::Same, 9, &[0, 2]).is_empty());
        killer.last = Some(2);
        assert_eq!(killed(&killer, KillTarget::Same, 9, &[0, 2]), [2]);
    }

    const FIRST_OF_SEED_7: (u128, KillTarget) = (677, KillTarget::One);
}
