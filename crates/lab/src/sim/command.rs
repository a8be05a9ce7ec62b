//! The subcommand `simulate`.

use std::ops::Range;

use clap::Args;

use super::{Mode, name_seed_in_panics, run, run_all, throughput};

/// Arguments of `landbridge lab simulate`.
#[derive(Args)]
pub struct Simulate {
    /// Range of seeds, as FROM..TO (TO is not run)
    #[arg(long, default_value = "0..10000", value_parser = parse_range)]
    seeds: Range<u64>,
    /// Let one peer send arbitrary frames
    #[arg(long)]
    hostile: bool,
    /// Kill processes, which replay from the message logs of their relays
    #[arg(long, conflicts_with = "hostile")]
    recovery: bool,
    /// Kill processes, which replay from the logs of their senders
    #[arg(long, conflicts_with_all = ["hostile", "recovery"])]
    sender_logs: bool,
    /// Number of threads
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Print every step of every seed to standard error
    #[arg(long)]
    trace: bool,
    /// Measure the throughput of datagrams over a simulated link with delay and losses, in place of
    /// the seeds
    #[arg(long)]
    throughput: bool,
}

impl Simulate {
    /// Runs the seeds and prints the event counts; returns 0 if no seed has found a violation, else
    /// 1.
    pub fn execute(&self) -> u8 {
        if self.throughput {
            throughput::print();
            return 0;
        }
        name_seed_in_panics();
        let mode = match (self.hostile, self.recovery, self.sender_logs) {
            (true, ..) => Mode::Hostile,
            (_, true, _) => Mode::Recovery,
            (.., true) => Mode::SenderLogs,
            _ => Mode::Honest,
        };
        let outcome = if self.trace {
            let runs = self.seeds.clone().map(|seed| run(seed, mode, true));
            runs.reduce(|all, next| {
                all.and_then(|mut all| next.map(|next| all.add(&next)).map(|()| all))
            })
            .unwrap_or_else(|| Ok(Default::default()))
        } else {
            run_all(self.seeds.clone(), mode, self.jobs)
        };
        match outcome {
            Ok(counts) => {
                println!("seeds {}..{} ({mode}): nothing found", self.seeds.start, self.seeds.end);
                print!("{counts}");
                0
            }
            Err(found) => {
                println!("{found}");
                1
            }
        }
    }
}

fn parse_range(text: &str) -> Result<Range<u64>, String> {
    let wrong = || format!("{text} is no range of seeds: write FROM..TO, for example 0..10000");
    let (start, end) = text.split_once("..").ok_or_else(wrong)?;
    Ok(start.parse().map_err(|_| wrong())?..end.parse().map_err(|_| wrong())?)
}
