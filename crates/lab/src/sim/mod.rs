//! A simulator that runs endpoints against each other under a seed and checks all of their results.
//!
//! Two to six [`Endpoint`](landbridge_proto::endpoint::Endpoint)s are connected by pipes that keep
//! order (as shared memory and streams do), one or several between any two. Pipes break, are
//! reopened, and corrupt frames ([`frame_transfer`]). All other decisions are random: the
//! properties of paths, the capacity of pipes, the pieces in which bytes move, the order of
//! commands and deliveries, the failures of processes. A model that contains only the definition of
//! matching gives the expected results ([`model`], [`remote`]).
//!
//! Processes that are killed and restarted are simulated separately: with relays ([`recovery`]),
//! and with logs of the senders ([`sender_logs`]).
//!
//! The modules in order; each uses only modules of its row and of the rows above. Modules from
//! `bounds` to `schedule` contain methods of the [`World`](world::World):
//!
//! | module | holds |
//! |---|---|
//! | `random` | the only source of randomness |
//! | `memory` | memory of the simulated processes |
//! | `remote` | remote memory, and the expected effects of operations on it |
//! | `model` | the expected behaviour of messages |
//! | `datagrams` | datagrams under way, with their faults |
//! | `pipe` | one direction of a path |
//! | `node` | a simulated process |
//! | `channel_record` | what is known of one channel |
//! | `world` | the state of one run; actions of endpoints |
//! | `bounds` | what endpoints hold, compared with its bounds |
//! | `frame_transfer`, `path_faults` | frames, and the paths that break under them |
//! | `outages` | paths that let nothing through; single-path periods |
//! | `schedule` | order and times of the steps of a run |
//! | `commands` | commands of the simulated applications |
//! | `hostile` | a peer that sends arbitrary frames |
//! | `recovery` | processes that crash and replay from the logs of relays |
//! | `sender_logs` | processes that crash and replay from the logs of their senders |
//! | `throughput` | throughput of one path of datagrams |
//! | `command` | the subcommand `simulate` |
//!
//! What may never happen: two runs of one seed differ; a wrong completion stays undetected; an
//! endpoint panics, whatever a peer sends ([`hostile`]).

mod bounds;
mod channel_record;
pub mod command;
mod commands;
mod datagrams;
mod frame_transfer;
mod hostile;
mod memory;
mod model;
mod node;
mod outages;
mod path_faults;
mod pipe;
mod random;
mod recovery;
mod remote;
mod schedule;
mod sender_logs;
mod throughput;
mod world;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use landbridge_testbed::Violation;
pub(crate) use landbridge_testbed::require;

/// The kind of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// All endpoints follow the protocol.
    Honest,
    /// One peer sends arbitrary frames.
    Hostile,
    /// All endpoints follow the protocol, and processes are killed at random.
    Recovery,
    /// Processes are killed at random, whose messages lie in logs of the senders.
    SenderLogs,
}

/// A seed that has found a violation.
#[derive(Clone, Debug)]
pub struct FailedSeed {
    /// The seed.
    pub seed: u64,
    /// The mode of the run.
    pub mode: Mode,
    /// The violation.
    pub violation: Violation,
}

/// Number of occurrences of each event.
#[derive(Clone, Debug, Default)]
pub struct EventCounts(BTreeMap<&'static str, u64>);

impl EventCounts {
    fn count(&mut self, event: &'static str) {
        self.add_some(event, 1);
    }

    fn add_some(&mut self, event: &'static str, times: u64) {
        *self.0.entry(event).or_default() += times;
    }

    /// Adds the counts of another run.
    pub fn add(&mut self, other: &EventCounts) {
        for (event, times) in &other.0 {
            *self.0.entry(event).or_default() += times;
        }
    }

    /// Number of occurrences of `event`.
    pub fn of(&self, event: &str) -> u64 {
        self.0.get(event).copied().unwrap_or(0)
    }
}

impl fmt::Display for EventCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(event, times)| writeln!(f, "{times:>12}  {event}"))
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Honest => "honest",
            Mode::Hostile => "hostile",
            Mode::Recovery => "recovery",
            Mode::SenderLogs => "sender logs",
        })
    }
}

impl fmt::Display for FailedSeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, mode, violation } = self;
        write!(f, "seed {seed} ({mode}): {}\n  rerun: {}", violation.0, rerun_command(*seed, *mode))
    }
}

/// The command that runs one seed again.
fn rerun_command(seed: u64, mode: Mode) -> String {
    let option = match mode {
        Mode::Honest => "",
        Mode::Hostile => " --hostile",
        Mode::Recovery => " --recovery",
        Mode::SenderLogs => " --sender-logs",
    };
    let end = seed + 1;
    format!("cargo run -p landbridge-lab -- simulate --seeds {seed}..{end}{option} --trace")
}

/// Runs one seed. With `trace`, every step is printed to standard error.
///
/// # Errors
/// The seed with the violation that it has found.
pub fn run(seed: u64, mode: Mode, trace: bool) -> Result<EventCounts, FailedSeed> {
    RUNNING.set(Some((seed, mode)));
    let outcome = match mode {
        Mode::Honest => commands::Applications::new(seed, trace).run(),
        Mode::Hostile => hostile::run(seed, trace),
        Mode::Recovery => recovery::run(seed, trace),
        Mode::SenderLogs => sender_logs::run(seed, trace),
    };
    RUNNING.set(None);
    outcome.map_err(|violation| FailedSeed { seed, mode, violation })
}

/// Runs many seeds on `jobs` threads, until a seed finds a violation.
///
/// # Errors
/// The first seed that has found a violation.
pub fn run_all(seeds: Range<u64>, mode: Mode, jobs: usize) -> Result<EventCounts, FailedSeed> {
    let next = AtomicU64::new(seeds.start);
    let stop = AtomicBool::new(false);
    let outcome = Mutex::new(Ok(EventCounts::default()));
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                let mine = run_worker(&next, seeds.end, mode, &stop);
                // The lock is poisoned only if another thread has panicked, which ends the scope
                // anyway.
                let mut outcome = outcome.lock().unwrap_or_else(|poison| poison.into_inner());
                match (&mut *outcome, mine) {
                    (Ok(all), Ok(mine)) => all.add(&mine),
                    (Ok(_), Err(found)) => *outcome = Err(found),
                    (Err(_), _) => (),
                }
            });
        }
    });
    outcome.into_inner().unwrap_or_else(|poison| poison.into_inner())
}

fn run_worker(
    next: &AtomicU64,
    end: u64,
    mode: Mode,
    stop: &AtomicBool,
) -> Result<EventCounts, FailedSeed> {
    let mut counts = EventCounts::default();
    while !stop.load(Ordering::Relaxed) {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        if seed >= end {
            break;
        }
        match run(seed, mode, false) {
            Ok(run) => counts.add(&run),
            Err(found) => {
                stop.store(true, Ordering::Relaxed);
                return Err(found);
            }
        }
    }
    Ok(counts)
}

thread_local! {
    static RUNNING: Cell<Option<(u64, Mode)>> = const { Cell::new(None) };
}

/// Makes later panics print the seed that was running.
pub fn name_seed_in_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if let Some((seed, mode)) = RUNNING.get() {
            eprintln!("seed {seed} ({mode}) panics\n  rerun: {}", rerun_command(seed, mode));
        }
        before(info);
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of seeds that meets every path of the protocol many times and is small enough for
    /// every `cargo test` (a debug build takes ten times as long for a seed as a release build).
    const SEEDS: u64 = if cfg!(debug_assertions) { 500 } else { 5_000 };

    /// Runs seeds, which find nothing, and of which each of these events happens in some.
    pub(super) fn find_nothing(seeds: Range<u64>, mode: Mode, events: &[&str]) {
        name_seed_in_panics();
        let counts = run_all(seeds, mode, 2).unwrap_or_else(|found| panic!("{found}"));
        for event in events {
            assert!(counts.of(event) > 0, "{event}: never happened\n{counts}");
        }
    }

    #[test]
    fn honest_endpoints_do_what_the_model_says() {
        find_nothing(0..SEEDS, Mode::Honest, &EVENTS);
    }

    #[test]
    fn a_hostile_peer_harms_nobody_else() {
        find_nothing(0..SEEDS, Mode::Hostile, &["faults"]);
    }

    #[test]
    fn a_seed_gives_the_same_run_twice() {
        for seed in 0..20 {
            let (first, second) = (run(seed, Mode::Honest, false), run(seed, Mode::Honest, false));
            assert_eq!(first.unwrap().to_string(), second.unwrap().to_string());
        }
    }

    const EVENTS: [&str; 32] = [
        "datagrams lost",
        "datagrams duplicated",
        "outages in both directions",
        "outages in one direction",
        "unresponsive paths made spare",
        "single-path periods",
        "frames lost silently",
        "sleeps",
        "paths broken",
        "paths suspected",
        "payloads corrupted",
        "frames corrupted",
        "frames retransmitted",
        "frames that came early",
        "fragments",
        "messages passed the short way",
        "sends done",
        "sends failed",
        "receives done",
        "receives truncated",
        "receives cancelled",
        "receives failed",
        "multi-receive parts",
        "looks",
        "claims",
        "pulls",
        "pulls that failed",
        "frames in parts",
        "remote operations done",
        "remote operations refused",
        "commands refused as too many",
        "peers lost",
    ];
}
