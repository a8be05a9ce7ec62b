//! The paths of a job's ranks: the statistics of all ranks, merged.
//!
//! The module is pure. The texts of statistics pages ([`landbridge_proto::statistics_page`]) enter,
//! agent by agent; the output of `landbridge ps --paths` leaves. A job of thousands of ranks has
//! millions of pairs: the sums cover all pairs. The number of rows is bounded: rows with trouble
//! come first, then the rows that have carried the most bytes.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write as _;

use landbridge_proto::statistics_page::{self, StatisticsLine};
use serde::{Deserialize, Serialize};

/// Rows of all agents together at most.
pub const ROWS_MAX: usize = 4096;
/// Rows that each agent is asked for at least, even if its share of [`ROWS_MAX`] is smaller.
const ROWS_MIN: usize = 8;
/// Ranks without an answer that are listed at most; further ranks are only counted.
const UNANSWERED_MAX: usize = 64;
/// Rows that the table shows unless the user asks for all rows.
const SHOWN: usize = 32;

/// The merged statistics of the paths of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paths {
    /// Number of ranks that have answered.
    pub ranks: u32,
    /// The first ranks that have not answered, because they compute, are stopped, or have no
    /// endpoint yet.
    pub unanswered: Vec<u32>,
    pub unanswered_count: u32,
    /// Hosts that have not answered in time.
    pub hosts_missing: u32,
    /// Sums over all paths of each kind.
    pub sums: BTreeMap<String, PathSum>,
    pub rows: Vec<PathRow>,
    /// Paths that have no row.
    pub left_out: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathSum {
    pub paths: u64,
    pub troubled: u64,
    #[serde(flatten)]
    pub done: PathCounters,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathCounters {
    pub bytes: u64,
    pub retransmitted_bytes: u64,
    pub corrupt: u64,
    pub losses: u64,
}

/// The statistics that one rank reports for one path to one peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathRow {
    /// The number, in the job, of the rank that reports the row.
    pub process: u32,
    pub peer: Option<u32>,
    pub what: String,
    pub state: String,
    /// The rank's own address and the peer's address.
    pub ends: Option<[String; 2]>,
    #[serde(flatten)]
    pub done: PathCounters,
    pub bytes_per_second: Option<u64>,
    pub round_trip_nanos: Option<u64>,
    /// The rank wrote the row for an earlier query: the rank has not polled the network since.
    pub is_old: bool,
}

/// Number of rows that each of `agents` agents is asked for.
pub fn rows_for(agents: usize) -> u32 {
    (ROWS_MAX / agents.max(1)).max(ROWS_MIN) as u32
}

impl Paths {
    /// Adds the statistics of a rank; `is_old` says that the rank wrote the text for an earlier
    /// query.
    pub fn add_statistics(&mut self, process: u32, statistics: &str, is_old: bool) {
        for line in statistics.lines().filter_map(StatisticsLine::parse) {
            match line {
                StatisticsLine::Path(row) => self.rows.push(PathRow::new(process, &row, is_old)),
                StatisticsLine::Summary(sum) => {
                    let known = self.sums.entry(sum.what.to_string()).or_default();
                    known.paths = statistics_page::add(known.paths, sum.paths);
                    known.troubled = statistics_page::add(known.troubled, sum.troubled);
                    known.done = known.done.with(sum.counters);
                }
            }
        }
    }

    /// Records that a rank has not answered.
    pub fn add_unanswered(&mut self, process: u32) {
        self.unanswered_count += 1;
        if self.unanswered.len() < UNANSWERED_MAX {
            self.unanswered.push(process);
        }
    }

    /// Adds the statistics of another agent.
    pub fn merge(&mut self, other: Paths) {
        self.ranks += other.ranks;
        self.unanswered_count += other.unanswered_count;
        let room = UNANSWERED_MAX.saturating_sub(self.unanswered.len());
        self.unanswered.extend(other.unanswered.into_iter().take(room));
        self.hosts_missing += other.hosts_missing;
        for (what, sum) in other.sums {
            let known = self.sums.entry(what).or_default();
            known.paths = statistics_page::add(known.paths, sum.paths);
            known.troubled = statistics_page::add(known.troubled, sum.troubled);
            known.done = known.done.with(sum.done.into());
        }
        self.rows.extend(other.rows);
    }

    /// Keeps at most `rows_max` rows, those with trouble and then those with the most bytes, and
    /// sorts the rows by rank.
    pub fn cut(&mut self, rows_max: usize) {
        if self.rows.len() > rows_max {
            self.rows.sort_by_key(|row| (!row.has_trouble(), Reverse(row.done.bytes)));
            self.rows.truncate(rows_max);
        }
        self.rows.sort_by_key(|row| (!row.has_trouble(), row.process, row.peer));
        let all: u64 = self.sums.values().map(|sum| sum.paths).sum();
        self.left_out = all.saturating_sub(self.rows.len() as u64);
    }

    /// A table for users. `name` gives the name of a process.
    pub fn text(&self, wants_all: bool, name: impl Fn(u32) -> String) -> String {
        let mut text = String::new();
        self.write_sums(&mut text);
        let shown = if wants_all { self.rows.len() } else { self.rows.len().min(SHOWN) };
        let head = [
            "from",
            "to",
            "path",
            "state",
            "round trip",
            "rate",
            "sent",
            "retransmitted",
            "corrupt",
            "lost",
            "addresses",
        ];
        let rows = self.rows[..shown].iter().map(|row| row.cells(&name));
        let rows: Vec<[String; 11]> = std::iter::once(head.map(String::from)).chain(rows).collect();
        if shown > 0 {
            write_table(&mut text, &rows);
        }
        let more = self.left_out + (self.rows.len() - shown) as u64;
        if more > 0 {
            let how = if wants_all { "" } else { " (--all shows more)" };
            let more = counted(more, "more path");
            let _ = writeln!(text, "  and {more}, without trouble or less to report{how}");
        }
        if self.unanswered_count > 0 {
            let names: Vec<String> =
                self.unanswered.iter().take(8).map(|&rank| name(rank)).collect();
            let dots = if self.unanswered_count as usize > names.len() { ", …" } else { "" };
            let _ = writeln!(
                text,
                "  not inside MPI just now, so nothing new of {}: {}{dots}",
                counted(self.unanswered_count.into(), "rank"),
                names.join(", ")
            );
        }
        if self.hosts_missing > 0 {
            let hosts = counted(self.hosts_missing.into(), "host");
            let has = if self.hosts_missing == 1 { "has" } else { "have" };
            let _ = writeln!(text, "  {hosts} {has} not answered in time");
        }
        text
    }

    fn write_sums(&self, text: &mut String) {
        let count: u64 = self.sums.values().map(|sum| sum.paths).sum();
        let troubled: u64 = self.sums.values().map(|sum| sum.troubled).sum();
        let _ = writeln!(
            text,
            "  {} of {}, {troubled} of them with trouble now or before",
            counted(count, "path"),
            counted(self.ranks.into(), "rank")
        );
        for (what, PathSum { paths, done, .. }) in &self.sums {
            let (paths, sent) = (counted(*paths, "path"), bytes(done.bytes));
            let _ = write!(text, "    {what}: {paths}, {sent} sent");
            let PathCounters { retransmitted_bytes, corrupt, losses, .. } = *done;
            let retransmitted = (retransmitted_bytes > 0)
                .then(|| format!(", {} of them retransmitted", bytes(retransmitted_bytes)));
            let corrupt =
                (corrupt > 0).then(|| format!(", {} arrived corrupt", counted(corrupt, "frame")));
            let losses = (losses > 0).then(|| format!(", lost {}", counted(losses, "time")));
            let _ = writeln!(
                text,
                "{}",
                [retransmitted, corrupt, losses].into_iter().flatten().collect::<String>()
            );
        }
    }
}

impl PathCounters {
    fn with(self, other: statistics_page::PathCounters) -> PathCounters {
        statistics_page::PathCounters::from(self).with(other).into()
    }
}

impl From<statistics_page::PathCounters> for PathCounters {
    fn from(counters: statistics_page::PathCounters) -> PathCounters {
        let statistics_page::PathCounters { bytes, retransmitted_bytes, corrupt, losses } =
            counters;
        PathCounters { bytes, retransmitted_bytes, corrupt, losses }
    }
}

impl From<PathCounters> for statistics_page::PathCounters {
    fn from(
        PathCounters { bytes, retransmitted_bytes, corrupt, losses }: PathCounters,
    ) -> statistics_page::PathCounters {
        statistics_page::PathCounters { bytes, retransmitted_bytes, corrupt, losses }
    }
}

impl PathRow {
    fn new(process: u32, row: &statistics_page::PathRow, is_old: bool) -> PathRow {
        let known = |value: u64| Some(value).filter(|&value| value > 0);
        PathRow {
            process,
            peer: row.peer,
            what: row.what.to_string(),
            state: row.state.to_string(),
            ends: row.ends.map(|(own, to)| [own.to_string(), to.to_string()]),
            done: row.counters.into(),
            bytes_per_second: known(row.bytes_per_second),
            round_trip_nanos: known(row.round_trip_nanos),
            is_old,
        }
    }

    fn has_trouble(&self) -> bool {
        let PathCounters { retransmitted_bytes, corrupt, losses, .. } = self.done;
        !matches!(self.state.as_str(), "up" | "spare")
            || (retransmitted_bytes, corrupt, losses) != (0, 0, 0)
    }

    fn cells(&self, name: impl Fn(u32) -> String) -> [String; 11] {
        let unknown = || "-".to_string();
        let rate = |rate| format!("{}/s", bytes(rate));
        let old = if self.is_old { " (earlier)" } else { "" };
        [
            name(self.process),
            self.peer.map_or_else(unknown, &name),
            self.what.clone(),
            format!("{}{old}", self.state),
            self.round_trip_nanos.map_or_else(unknown, time),
            self.bytes_per_second.map_or_else(unknown, rate),
            bytes(self.done.bytes),
            bytes(self.done.retransmitted_bytes),
            self.done.corrupt.to_string(),
            self.done.losses.to_string(),
            self.ends.as_ref().map_or_else(unknown, |[own, to]| format!("{own} to {to}")),
        ]
    }
}

pub fn write_table(text: &mut String, rows: &[impl AsRef<[String]>]) {
    let width = |column: usize| rows.iter().map(|row| row.as_ref()[column].chars().count()).max();
    let columns = rows.first().map_or(0, |row| row.as_ref().len());
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    for row in rows {
        let mut line = String::from("  ");
        for (cell, width) in row.as_ref().iter().zip(&widths) {
            let _ = write!(line, "{cell:width$}  ");
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
}

/// A count with its noun, in the plural unless the count is 1.
pub fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// A number of bytes in three digits with a unit.
pub fn bytes(count: u64) -> String {
    scaled(count as f64, 1_000.0, &["B", "kB", "MB", "GB", "TB", "PB", "EB"])
}

fn time(nanos: u64) -> String {
    scaled(nanos as f64, 1_000.0, &["ns", "us", "ms", "s"])
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCOUNT: &str = "sum tcp 2 1 1500 20 1 2\nrow 1 tcp up 10.0.0.1 10.0.0.2 1000 0 0 0 \
                           1250000 120000\n\
                           row 2 tcp suspected - - 500 20 1 2 0 0\nnonsense\n";

    #[test]
    fn path_statistics_are_merged_with_trouble_first() {
        let mut paths = Paths { ranks: 1, ..Paths::default() };
        paths.add_statistics(0, ACCOUNT, false);
        paths.add_unanswered(2);
        let mut all = Paths::default();
        all.merge(paths);
        all.cut(ROWS_MAX);
        let expected = "  2 paths of 1 rank, 1 of them with trouble now or before\n    tcp: 2 \
            paths, 1.50 kB sent, 20 B of them retransmitted, 1 frame arrived corrupt, lost 2 \
            times\n  from  to  path  state      round trip  rate       sent     retransmitted  \
            corrupt  lost  addresses\n  r0    r2  tcp   suspected  -           -          500 B    \
            20 B           1        2     -\n  r0    r1  tcp   up         120 us      1.25 MB/s  \
            1.00 kB  0 B            0        0     10.0.0.1 to 10.0.0.2\n  not inside MPI just \
            now, so nothing new of 1 rank: r2\n";
        assert_eq!(all.text(false, |rank| format!("r{rank}")), expected);
        let json = serde_json::to_string(&all).unwrap();
        assert_eq!(serde_json::from_str::<Paths>(&json).unwrap(), all);
    }

    #[test]
    fn a_job_of_thousands_is_reported_in_few_rows() {
        let mut all = Paths::default();
        for agent in 0..1000 {
            let mut paths = Paths { ranks: 1, ..Paths::default() };
            let rows = |peer| format!("row {peer} shm up - - {peer} 0 0 0 0 0\n");
            let rows: String = (0..1000).map(rows).collect();
            paths.add_statistics(agent, &format!("sum shm 1000 0 7 0 0 0\n{rows}"), false);
            paths.add_unanswered(5000 + agent);
            paths.cut(rows_for(1000) as usize);
            assert_eq!(paths.rows.len(), ROWS_MIN);
            all.merge(paths);
        }
        all.rows[7999].done.corrupt = 1;
        all.cut(ROWS_MAX);
        assert_eq!((all.rows.len(), all.rows[0].done.corrupt), (ROWS_MAX, 1));
        assert_eq!(
            (all.left_out, all.unanswered.len()),
            (1_000_000 - ROWS_MAX as u64, UNANSWERED_MAX)
        );
        assert_eq!(all.text(false, |rank| rank.to_string()).lines().count(), 2 + 1 + SHOWN + 2);
    }

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        assert_eq!(
            [0, 999, 1000, 12_345, 999_600, u64::MAX].map(bytes),
            ["0 B", "999 B", "1.00 kB", "12.3 kB", "1.00 MB", "18.4 EB"]
        );
        assert_eq!(
            [120_000, 35_000_000, 12_000_000_000].map(time),
            ["120 us", "35.0 ms", "12.0 s"]
        );
    }
}
