//! `landbridge doctor --pairs`: the paths between the hosts of a topology, and their latency and
//! bandwidth.
//!
//! The check runs a job of one test process on each host, with the first MPI library found that
//! `landbridge run` can start. The job uses the same paths as any job, relays included. The job
//! prints the measurements of each pair. While the processes wait inside MPI, the check queries
//! their paths (as `landbridge ps --paths` does), and then ends the job. The whole check takes at
//! most 90 s.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::{Finding, own_name, progress};
use crate::mpi::detect::{DetectedLibrary, Family};
use crate::own_lines::last_message;
use crate::ps::status_socket::{self, StatusQuery};
use crate::ps::{self, paths::PathRow};
use crate::spawn::ssh::quote;

/// Timeout of the job in seconds: a longer job hangs, or its paths are very slow.
const TIMEOUT_S: &str = "90";

/// The output of the job.
#[derive(Default)]
struct PairMeasurements {
    /// Node and cluster of each rank.
    hosts: BTreeMap<u32, (String, String)>,
    /// For each pair: one-way time of 8 B in microseconds, and bandwidth in MB/s.
    pairs: BTreeMap<(u32, u32), (String, String)>,
    is_done: bool,
}

impl PairMeasurements {
    fn add_line(&mut self, line: &str) {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        match words[..] {
            ["host", rank, node, cluster] => {
                let place = (node.to_string(), cluster.to_string());
                self.hosts.extend(rank.parse().ok().map(|rank: u32| (rank, place)));
            }
            ["pair", a, b, "latency_us", latency, "bandwidth_mb_s", rate] => {
                if let (Ok(a), Ok(b)) = (a.parse(), b.parse()) {
                    self.pairs.insert((a, b), (latency.to_string(), rate.to_string()));
                }
            }
            ["done"] => self.is_done = true,
            _ => {}
        }
    }

    fn name(&self, rank: u32) -> String {
        self.hosts.get(&rank).map_or_else(|| format!("rank {rank}"), |(node, _)| node.clone())
    }

    /// One finding for each pair.
    fn findings(&self, rows: &[PathRow]) -> Vec<Finding> {
        let of_pair = |&(a, b): &(u32, u32)| {
            let is_it = move |row: &&PathRow| {
                let ends = (row.process, row.peer.unwrap_or(u32::MAX));
                ends == (a, b) || ends == (b, a)
            };
            let mut paths: Vec<&PathRow> = rows.iter().filter(is_it).collect();
            // Both sides of a path report the bytes that they have sent, so one side's row is
            // enough.
            if paths.iter().any(|row| row.process == a) {
                paths.retain(|row| row.process == a);
            }
            paths
        };
        let finding = |(pair, (latency, rate)): (&(u32, u32), &(String, String))| {
            let paths = of_pair(pair);
            let words: Vec<String> = paths.iter().map(|row| words(row)).collect();
            let (a, b) = (self.name(pair.0), self.name(pair.1));
            let by = if words.is_empty() { "paths not known".into() } else { words.join("; ") };
            let text = format!("{a} and {b}: 8 B in {latency} us, {rate} MB/s; {by}");
            match paths.iter().all(|row| matches!(row.state.as_str(), "up" | "spare")) {
                true => Finding::good(text),
                false => Finding::notice(
                    text,
                    "a path that is not up carries nothing; others do meanwhile",
                ),
            }
        };
        self.pairs.iter().map(finding).collect()
    }
}

/// A path in a few words.
fn words(row: &PathRow) -> String {
    let ends = row.ends.as_ref().map(|[own, to]| format!(" {own} to {to}")).unwrap_or_default();
    let state = if row.state == "up" { String::new() } else { format!(" ({})", row.state) };
    format!("{}{ends}{state}", row.what)
}

/// Runs the check. `said` holds the options that set settings.
pub fn check(
    libraries: &[DetectedLibrary],
    topology: Option<&Path>,
    said: Vec<String>,
) -> Vec<Finding> {
    let starts = |found: &&DetectedLibrary| matches!(found.family, Family::Mpich | Family::Intel);
    let Some(library) = libraries.iter().find(starts) else {
        let text = "not tried: no MPI library was found that `landbridge run` can start";
        let advice = "name the place of an MPICH or Intel MPI, the same on every host: landbridge \
                      doctor --pairs --in DIR";
        return vec![Finding::bad(text, advice)];
    };
    let mut arguments = said;
    arguments.extend(["--ranks-per-node".to_string(), "1".to_string()]);
    if let Some(file) = topology {
        arguments.extend(["--topology".to_string(), file.display().to_string()]);
    }
    match attempt(library, &arguments) {
        Ok((measurements, rows)) if !measurements.pairs.is_empty() => {
            let with = format!("with {} {}", library.family.name(), library.library.display());
            let mut findings = vec![Finding::good(with)];
            let all = measurements.hosts.len() * measurements.hosts.len().saturating_sub(1) / 2;
            if measurements.pairs.len() < all {
                let text =
                    format!("{} of {all} pairs of hosts were tried", measurements.pairs.len());
                findings.push(Finding::good(text));
            }
            findings.extend(measurements.findings(&rows));
            findings
        }
        Ok((measurements, _)) => {
            let text =
                format!("there are no pairs of hosts, but {} host", measurements.hosts.len());
            vec![Finding::notice(
                text,
                "name a topology: landbridge doctor --pairs --topology FILE",
            )]
        }
        Err(why) => {
            let library = quote(&library.library.display().to_string());
            let arguments: Vec<String> = arguments.iter().map(|word| quote(word)).collect();
            let (own, arguments) = (own_name(), arguments.join(" "));
            let advice =
                format!("see why: {own} run -v {arguments} {own} doctor-peer --pairs {library}");
            vec![Finding::bad(why, advice)]
        }
    }
}

/// Runs the job and returns its measurements and its paths.
fn attempt(
    library: &DetectedLibrary,
    arguments: &[String],
) -> Result<(PairMeasurements, Vec<PathRow>), String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(&program);
    command.args(["run", "--timeout", TIMEOUT_S]).args(arguments).arg(&program);
    command.args(["doctor-peer", "--pairs"]).arg(&library.library).env_remove("FI_PROVIDER");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    progress(&format!("starting a test process on each host (up to {TIMEOUT_S} s)"));
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    // Both streams were requested as pipes above. The user also reads what the job prints while it
    // starts: which relay cannot be reached, and which firewall may be the reason.
    let stderr = BufReader::new(child.stderr.take().expect("stderr is a pipe"));
    let said = std::thread::spawn(move || {
        let lines = stderr.lines().map_while(Result::ok);
        lines.inspect(|line| eprintln!("{line}")).collect::<Vec<_>>().join("\n")
    });
    let (mut measurements, mut rows) = (PairMeasurements::default(), Vec::new());
    let stdout = child.stdout.take().expect("stdout is a pipe");
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        measurements.add_line(&line);
        if measurements.is_done
            && let Some(mut stdin) = child.stdin.take()
        {
            rows = paths_of(&child);
            // The process may have ended; lines that other processes have printed may still be
            // under way.
            let _ = stdin.write_all(b"\n");
        }
    }
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    if output.status.success() && measurements.is_done {
        return Ok((measurements, rows));
    }
    let trouble = said.join().unwrap_or_default();
    Err(last_message(&trouble)
        .unwrap_or_else(|| "the test job has ended without a word".to_string()))
}

/// The paths that the job's launcher reports.
fn paths_of(launcher: &Child) -> Vec<PathRow> {
    let answers =
        ps::ask_all(&status_socket::directory(), "", StatusQuery::Paths).unwrap_or_default();
    let status = answers.jobs.into_iter().find(|status| status.launcher == launcher.id());
    status.and_then(|status| status.paths).map(|paths| paths.rows).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::Grade;
    use super::*;

    #[test]
    fn each_pair_is_reported_with_its_paths() {
        let mut measurements = PairMeasurements::default();
        for line in [
            "host 0 near-1 0",
            "host 1 near-2 0",
            "host 2 far-1 1",
            "pair 0 1 latency_us 60.1 bandwidth_mb_s 117.0",
            "pair 0 2 latency_us 5100.0 bandwidth_mb_s 11.0",
            "pair 1 2 latency_us",
            "done",
        ] {
            measurements.add_line(line);
        }
        let row = |process, peer, what: &str, state: &str, ends: Option<[&str; 2]>| PathRow {
            process,
            peer: Some(peer),
            what: what.into(),
            state: state.into(),
            ends: ends.map(|ends| ends.map(String::from)),
            done: Default::default(),
            bytes_per_second: None,
            round_trip_nanos: None,
            is_old: false,
        };
        let rows = [
            row(0, 1, "tcp", "up", Some(["10.0.0.1", "10.0.0.2"])),
            row(1, 0, "tcp", "up", Some(["10.0.0.2", "10.0.0.1"])),
            row(0, 1, "udp", "probing", Some(["10.0.0.1", "10.0.0.2"])),
            row(2, 0, "relay", "up", None),
        ];
        let found = measurements.findings(&rows);
        let grades: Vec<(Grade, &str)> =
            found.iter().map(|it| (it.grade, it.text.as_str())).collect();
        let expected = [
            (
                Grade::Notice,
                "near-1 and near-2: 8 B in 60.1 us, 117.0 MB/s; tcp 10.0.0.1 to 10.0.0.2; udp \
                 10.0.0.1 to 10.0.0.2 (probing)",
            ),
            (Grade::Good, "near-1 and far-1: 8 B in 5100.0 us, 11.0 MB/s; relay"),
        ];
        assert!(measurements.is_done);
        assert_eq!(grades, expected);
    }
}
