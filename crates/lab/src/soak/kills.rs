//! The trouble of a punishment: ranks that are killed with SIGKILL.
//!
//! `Kills` is pure: in a seed and a mean time, out blows without end, in the order of their times, each with whom it
//! strikes. The times between them are those of chance without memory (exponential), so that some follow at once and
//! some rest for long. `Killer` strikes: it asks `landbridge ps` which processes the ranks have.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;

use super::run::{Scene, Trouble};
use super::tally::Kind;
use crate::net::link::mix;

/// How soon the same rank is killed again where a blow says so: in the middle of its coming back, mostly.
const AGAIN_AFTER_MS: u64 = 400;
/// A blow that finds no rank alive (between two programs) is tried again after this time.
const RETRY: Duration = Duration::from_millis(50);
/// No gap is longer than so many mean ones.
const GAPS_MAX: f64 = 8.0;

/// Whom a blow strikes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Whom {
    One,
    Two,
    All,
    /// The one that was struck last, once more.
    Same,
}

impl Whom {
    pub const ALL: [Whom; 4] = [Whom::One, Whom::Two, Whom::All, Whom::Same];

    /// Name and meaning.
    pub fn kind(self) -> Kind {
        match self {
            Whom::One => ("one", "a rank is killed"),
            Whom::Two => ("two", "two ranks are killed at once"),
            Whom::All => ("all", "all ranks are killed at once"),
            Whom::Same => ("same", "the rank that was killed last is killed again, soon after"),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Blow {
    /// Since the beginning.
    pub at: Duration,
    pub whom: Whom,
    /// Which of those that are there.
    pub draw: u64,
}

/// Blows to come.
#[derive(Clone, Debug)]
pub struct Kills {
    seed: u64,
    draws: u64,
    now_ms: u64,
    mean_ms: f64,
    /// The next blow strikes the same again.
    is_double: bool,
}

impl Kills {
    pub fn new(seed: u64, mean: Duration) -> Kills {
        Kills { seed, draws: 0, now_ms: 0, mean_ms: mean.as_secs_f64() * 1e3, is_double: false }
    }

    fn draw(&mut self) -> u64 {
        self.draws += 1;
        mix(mix(self.seed).wrapping_add(self.draws))
    }

    fn gap_ms(&mut self) -> u64 {
        // Between 0, which it never is, and 1.
        let share = (self.draw() >> 11) as f64 / (1u64 << 53) as f64;
        ((-(1.0 - share).ln()).min(GAPS_MAX) * self.mean_ms) as u64
    }
}

impl Iterator for Kills {
    type Item = Blow;

    fn next(&mut self) -> Option<Blow> {
        if std::mem::take(&mut self.is_double) {
            self.now_ms += self.draw() % AGAIN_AFTER_MS;
            let at = Duration::from_millis(self.now_ms);
            return Some(Blow { at, whom: Whom::Same, draw: 0 });
        }
        self.now_ms += self.gap_ms();
        let whom = match self.draw() % 12 {
            0 => Whom::All,
            1 | 2 => Whom::Two,
            _ => Whom::One,
        };
        let draw = self.draw();
        self.is_double = whom == Whom::One && self.draw().is_multiple_of(5);
        Some(Blow { at: Duration::from_millis(self.now_ms), whom, draw })
    }
}

/// Strikes the ranks of the program that runs.
pub struct Killer {
    landbridge: PathBuf,
    blows: std::iter::Peekable<Kills>,
    /// No blow falls after that.
    time: Duration,
    /// When a blow that could not fall is tried again.
    retry_at: Option<Duration>,
    last: Option<u32>,
}

/// What of `landbridge ps --json` is needed here.
#[derive(Deserialize)]
struct Job {
    launcher: u32,
    ranks: Vec<Rank>,
}

#[derive(Clone, Deserialize)]
struct Rank {
    process: u32,
    pid: Option<u32>,
    incarnation: u32,
    state: String,
}

impl Killer {
    pub fn new(landbridge: PathBuf, blows: Kills, time: Duration) -> Killer {
        Killer { landbridge, blows: blows.peekable(), time, retry_at: None, last: None }
    }

    /// The ranks of the job of this launcher that have a process, by their numbers.
    fn ranks(&self, launcher: u32) -> anyhow::Result<BTreeMap<u32, Rank>> {
        let done = Command::new(&self.landbridge).args(["ps", "--json"]).output()?;
        if !done.status.success() {
            bail!("`landbridge ps` says: {}", String::from_utf8_lossy(&done.stderr).trim());
        }
        let jobs: Vec<Job> =
            serde_json::from_slice(&done.stdout).context("`landbridge ps` speaks no JSON")?;
        let own = jobs.into_iter().filter(|job| job.launcher == launcher);
        let ranks = own.flat_map(|job| job.ranks).filter(|rank| rank.pid.is_some());
        Ok(ranks.map(|rank| (rank.process, rank)).collect())
    }

    /// Those that a blow strikes, of those that are there.
    fn victims(&self, blow: &Blow, ranks: &BTreeMap<u32, Rank>) -> Vec<Rank> {
        let all: Vec<&Rank> = ranks.values().collect();
        let at = |place: u64| all.get((place % all.len().max(1) as u64) as usize).copied();
        let chosen: Vec<&Rank> = match blow.whom {
            Whom::One => at(blow.draw).into_iter().collect(),
            // The second is another one, where there is one.
            Whom::Two if all.len() > 1 => {
                let (first, count) = (blow.draw % all.len() as u64, all.len() as u64);
                let second = first + 1 + (blow.draw >> 32) % (count - 1);
                [first, second].into_iter().filter_map(at).collect()
            }
            Whom::Two | Whom::All => all,
            Whom::Same => self.last.and_then(|last| ranks.get(&last)).into_iter().collect(),
        };
        chosen.into_iter().cloned().collect()
    }

    fn strike(&mut self, blow: Blow, scene: &mut Scene) -> anyhow::Result<bool> {
        let victims = self.victims(&blow, &self.ranks(scene.program)?);
        let words: Vec<String> = victims.iter().map(Rank::words).collect();
        for victim in &victims {
            let pid = victim.pid.and_then(|pid| Pid::from_raw(pid.cast_signed()));
            // It may have ended since.
            let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
        }
        self.last = victims.last().map(|victim| victim.process).or(self.last);
        if !victims.is_empty() {
            scene.say(&format!("killed: {}", words.join(", ")));
            scene.tally.fault(blow.whom.kind().0, Duration::ZERO);
        }
        Ok(!victims.is_empty())
    }
}

impl Rank {
    fn words(&self) -> String {
        let Rank { process, incarnation, .. } = self;
        let state = self.state.replace('-', " ");
        format!("rank {process} (start {incarnation}, {state})")
    }
}

impl Trouble for Killer {
    fn next_time(&mut self) -> Option<Duration> {
        let next = self.blows.peek().map(|blow| blow.at);
        self.retry_at.or(next).filter(|at| *at < self.time)
    }

    fn act(&mut self, now: Duration, scene: &mut Scene) {
        let Some(blow) = self.blows.peek().copied() else { return };
        if now >= self.time || now < self.retry_at.unwrap_or(blow.at) {
            return;
        }
        self.retry_at = None;
        match self.strike(blow, scene) {
            Ok(false) if blow.whom != Whom::Same => self.retry_at = Some(now + RETRY),
            Ok(_) => drop(self.blows.next()),
            Err(error) => {
                scene.say(&format!("a blow is left out: {error:#}"));
                self.blows.next();
            }
        }
    }

    fn end(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kills(seed: u64) -> Kills {
        Kills::new(seed, Duration::from_secs(4))
    }

    #[test]
    fn the_same_seed_gives_the_same_blows_for_ever() {
        let take = |seed| kills(seed).take(300).collect::<Vec<Blow>>();
        assert_eq!(take(7), take(7));
        assert_ne!(take(7), take(8));
        let first = take(7)[0];
        // A seed that somebody has written down must go on to mean what it meant.
        assert_eq!((first.at.as_millis(), first.whom), FIRST_OF_SEED_7);
    }

    #[test]
    fn gaps_are_those_of_chance_without_memory() {
        let blows: Vec<Blow> = kills(3).take(20_000).collect();
        assert!(blows.is_sorted_by_key(|blow| blow.at));
        let mut gaps = Vec::new();
        for pair in blows.windows(2).filter(|pair| pair[1].whom != Whom::Same) {
            gaps.push((pair[1].at - pair[0].at).as_secs_f64());
        }
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        assert!((3.8..4.2).contains(&mean), "{mean}");
        let long = gaps.iter().filter(|gap| **gap > 4.0).count() as f64 / gaps.len() as f64;
        assert!((0.35..0.39).contains(&long), "1/e of them are longer than the mean: {long}");
        for whom in Whom::ALL {
            assert!(blows.iter().filter(|blow| blow.whom == whom).count() > 1_000, "{whom:?}");
        }
    }

    #[test]
    fn a_blow_strikes_who_is_there() {
        let rank =
            |process| Rank { process, pid: Some(1), incarnation: 0, state: "running".to_owned() };
        let mut killer = Killer::new(PathBuf::new(), kills(1), Duration::MAX);
        let struck = |killer: &Killer, whom, draw, there: &[u32]| {
            let ranks = there.iter().map(|&process| (process, rank(process))).collect();
            let blow = Blow { at: Duration::ZERO, whom, draw };
            let victims = killer.victims(&blow, &ranks);
            victims.iter().map(|rank| rank.process).collect::<Vec<u32>>()
        };
        assert_eq!(struck(&killer, Whom::One, 5, &[0, 2, 3]), [3]);
        assert_eq!(struck(&killer, Whom::Two, u64::MAX, &[0, 2]), [2, 0]);
        assert_eq!(struck(&killer, Whom::Two, 1, &[4]), [4]);
        assert_eq!(struck(&killer, Whom::All, 9, &[0, 2, 3]), [0, 2, 3]);
        assert!(struck(&killer, Whom::One, 9, &[]).is_empty());
        assert!(struck(&killer, Whom::Same, 9, &[0, 2]).is_empty());
        killer.last = Some(2);
        assert_eq!(struck(&killer, Whom::Same, 9, &[0, 2]), [2]);
    }

    const FIRST_OF_SEED_7: (u128, Whom) = (677, Whom::One);
}
