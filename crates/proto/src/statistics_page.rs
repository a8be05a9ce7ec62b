//! Statistics page of a process: memory that the process shares with its node agent, in which the
//! process reports the statistics of its paths on request.
//!
//! The reader writes a new request number at [`REQUEST_AT`]. Each endpoint of the process has a
//! slot of its own ([`slot_at`]); when the endpoint next polls its network it finds the number, and
//! writes a report and the request number into its slot. A process that computes does not answer:
//! its slot then holds an earlier report, with an earlier request number. The version of a report
//! is odd while the report is being written, and has changed afterwards.
//!
//! A report is text: a [`PathRow`] for each path, as many as fit, and a [`PathSummary`] over all
//! paths of each kind. What may never happen: a reader takes other bytes for a report.

use alloc::string::String;
use core::fmt;
use core::net::IpAddr;

/// Bytes of a statistics page. Only what is written takes memory.
pub const STATISTICS_PAGE_BYTES: usize = 256 << 10;
/// Slots of a statistics page, one for each endpoint that can report: MPI libraries open one or
/// two.
pub const SLOTS: usize = 4;
/// First bytes of every statistics page, which distinguish a page from any other descriptor.
pub const MAGIC: [u8; 16] = *b"landbridge stats";
/// Offset of the request number: eight bytes in the machine's byte order.
pub const REQUEST_AT: usize = 16;
/// Offset of eight bytes that are not 0 from when the process has opened an endpoint until it ends.
pub const OPENED_AT: usize = 24;

/// Offset in a slot of eight bytes that are not 0 while an endpoint uses the slot.
pub const IN_USE_AT: usize = 0;
/// Offset in a slot of the version of the report: eight bytes.
pub const VERSION_AT: usize = 8;
/// Offset in a slot of the request number that the report answers: eight bytes.
pub const REPLY_AT: usize = 16;
/// Offset in a slot of the length of the report in bytes: eight bytes.
pub const LENGTH_AT: usize = 24;
/// Offset in a slot of the text of the report.
pub const TEXT_AT: usize = 32;
/// Most bytes of a report.
pub const TEXT_BYTES_MAX: usize = SLOT_BYTES - TEXT_AT;

const HEAD_BYTES: usize = 4096;
const SLOT_BYTES: usize = (STATISTICS_PAGE_BYTES - HEAD_BYTES) / SLOTS;
const _: () = assert!(SLOT_BYTES.is_multiple_of(8) && HEAD_BYTES.is_multiple_of(8));

/// Offset of slot `number`, in bytes.
pub fn slot_at(number: usize) -> usize {
    HEAD_BYTES + (number % SLOTS) * SLOT_BYTES
}

/// Statistics of one path to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathRow<'a> {
    /// The peer's index in the job; `None` for processes that the launcher has not started.
    pub peer: Option<u32>,
    /// Kind of the path, in one word.
    pub what: &'a str,
    /// State of the path, in one word.
    pub state: &'a str,
    /// Own address and the peer's address, if the path has addresses.
    pub ends: Option<(IpAddr, IpAddr)>,
    /// The counters of the path.
    pub counters: PathCounters,
    /// Delivery rate of the path in bytes per second; 0: not measured.
    pub bytes_per_second: u64,
    /// Round-trip time of the path in nanoseconds; 0: not measured.
    pub round_trip_nanos: u64,
}

/// Statistics of all paths of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathSummary<'a> {
    /// Kind of the paths, in one word.
    pub what: &'a str,
    /// Number of paths of this kind.
    pub paths: u64,
    /// Number of paths of this kind that are or were in trouble.
    pub troubled: u64,
    /// Sums of the counters of these paths.
    pub counters: PathCounters,
}

/// Counters of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCounters {
    /// Bytes sent on the path.
    pub bytes: u64,
    /// Retransmitted bytes among the sent bytes.
    pub retransmitted_bytes: u64,
    /// Frames that arrived corrupt on the path.
    pub corrupt: u64,
    /// How often the path was lost.
    pub losses: u64,
}

/// Largest count: documents that contain counts (JSON) hold no larger numbers.
const COUNT_MAX: u64 = i64::MAX as u64;

/// The sum of both counts, at most 2^63 - 1.
pub fn add(one: u64, other: u64) -> u64 {
    one.saturating_add(other).min(COUNT_MAX)
}

fn count(word: &str) -> Option<u64> {
    word.parse().ok().filter(|count| *count <= COUNT_MAX)
}

impl PathCounters {
    /// The sums of both sets of counters.
    pub fn with(self, other: PathCounters) -> PathCounters {
        PathCounters {
            bytes: add(self.bytes, other.bytes),
            retransmitted_bytes: add(self.retransmitted_bytes, other.retransmitted_bytes),
            corrupt: add(self.corrupt, other.corrupt),
            losses: add(self.losses, other.losses),
        }
    }

    fn parse<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<PathCounters> {
        let mut number = || words.next().and_then(count);
        Some(PathCounters {
            bytes: number()?,
            retransmitted_bytes: number()?,
            corrupt: number()?,
            losses: number()?,
        })
    }
}

impl fmt::Display for PathCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {}", self.bytes, self.retransmitted_bytes, self.corrupt, self.losses)
    }
}

/// One line of a report.
impl fmt::Display for PathRow<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.peer {
            Some(peer) => write!(f, "row {peer}")?,
            None => f.write_str("row -")?,
        }
        write!(f, " {} {}", self.what, self.state)?;
        match self.ends {
            Some((own, to)) => write!(f, " {own} {to}")?,
            None => f.write_str(" - -")?,
        }
        write!(f, " {} {} {}", self.counters, self.bytes_per_second, self.round_trip_nanos)
    }
}

/// One line of a report.
impl fmt::Display for PathSummary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sum {} {} {} {}", self.what, self.paths, self.troubled, self.counters)
    }
}

/// A parsed line of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatisticsLine<'a> {
    /// Statistics of one path.
    Path(PathRow<'a>),
    /// Statistics of all paths of one kind.
    Summary(PathSummary<'a>),
}

impl<'a> StatisticsLine<'a> {
    /// Parses a line. `None`: the line belongs to no report.
    pub fn parse(line: &'a str) -> Option<StatisticsLine<'a>> {
        let mut words = line.split(' ');
        let parsed = match words.next()? {
            "row" => StatisticsLine::Path(PathRow::parse(&mut words)?),
            "sum" => StatisticsLine::Summary(PathSummary {
                what: word(words.next()?)?,
                paths: count(words.next()?)?,
                troubled: count(words.next()?)?,
                counters: PathCounters::parse(&mut words)?,
            }),
            _ => return None,
        };
        words.next().is_none().then_some(parsed)
    }
}

impl<'a> PathRow<'a> {
    fn parse(words: &mut impl Iterator<Item = &'a str>) -> Option<PathRow<'a>> {
        let peer = match words.next()? {
            "-" => None,
            index => Some(index.parse().ok()?),
        };
        let (what, state) = (word(words.next()?)?, word(words.next()?)?);
        let ends = match (words.next()?, words.next()?) {
            ("-", "-") => None,
            (own, to) => Some((own.parse().ok()?, to.parse().ok()?)),
        };
        let counters = PathCounters::parse(words)?;
        let bytes_per_second = count(words.next()?)?;
        let round_trip_nanos = count(words.next()?)?;
        Some(PathRow { peer, what, state, ends, counters, bytes_per_second, round_trip_nanos })
    }
}

/// A word of lower-case letters and hyphens, shorter than 20 bytes: words are shown on terminals.
fn word(text: &str) -> Option<&str> {
    let is_good = |byte: u8| byte.is_ascii_lowercase() || byte == b'-';
    (!text.is_empty() && text.len() < 20 && text.bytes().all(is_good)).then_some(text)
}

/// Appends whole lines to a report of at most `room` bytes; returns how many lines did not fit.
pub fn write_lines(
    text: &mut String,
    room: usize,
    lines: impl Iterator<Item = impl fmt::Display>,
) -> usize {
    use fmt::Write;
    let mut left_out = 0;
    for line in lines {
        let before = text.len();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{line}");
        if text.len() > room {
            text.truncate(before);
            left_out += 1;
        }
    }
    left_out
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use alloc::vec::Vec;

    use super::*;

    fn row() -> PathRow<'static> {
        let counters = PathCounters { bytes: 1, retransmitted_bytes: 2, corrupt: 3, losses: 4 };
        let ends = Some(([10, 0, 0, 1].into(), IpAddr::V6(core::net::Ipv6Addr::LOCALHOST)));
        PathRow {
            peer: Some(7),
            what: "tcp",
            state: "up",
            ends,
            counters,
            bytes_per_second: 5,
            round_trip_nanos: COUNT_MAX,
        }
    }

    #[test]
    fn lines_are_read_as_they_were_written() {
        let rows = [row(), PathRow { peer: None, ends: None, ..row() }];
        for row in rows {
            assert_eq!(StatisticsLine::parse(&row.to_string()), Some(StatisticsLine::Path(row)));
        }
        let sum = PathSummary { what: "relay", paths: 9, troubled: 1, counters: row().counters };
        assert_eq!(StatisticsLine::parse(&sum.to_string()), Some(StatisticsLine::Summary(sum)));
    }

    #[test]
    fn what_is_no_line_is_not_taken_for_one() {
        for text in [
            row().to_string(),
            PathSummary { what: "tcp", paths: 1, troubled: 0, counters: row().counters }
                .to_string(),
        ] {
            for cut in 0..text.len() - 1 {
                let is_shorter_number = text[..cut].split(' ').count() == text.split(' ').count();
                assert!(
                    StatisticsLine::parse(&text[..cut]).is_none() || is_shorter_number,
                    "{}",
                    &text[..cut]
                );
            }
            assert_eq!(StatisticsLine::parse(&(text.clone() + " 1")), None);
            assert_eq!(StatisticsLine::parse(&text.replace("tcp", "\u{1b}[2J")), None);
        }
        let too_large = "sum tcp 9223372036854775808 0 0 0 0 0";
        for wrong in ["", "row", "sum tcp -1 0 0 0 0 0", "row 1 TCP up - - 0 0 0 0 0 0", too_large]
        {
            assert_eq!(StatisticsLine::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn sums_stay_numbers() {
        let most = PathCounters { bytes: COUNT_MAX, ..PathCounters::default() };
        assert_eq!((most.with(most), add(COUNT_MAX, 1)), (most, COUNT_MAX));
    }

    #[test]
    fn lines_without_room_are_left_out_whole() {
        let mut text = String::new();
        let lines: Vec<&str> = ["12", "345678", "9"].to_vec();
        assert_eq!(write_lines(&mut text, 6, lines.iter()), 1);
        assert_eq!(text, "12\n9\n");
        assert!(
            (0..SLOTS)
                .all(|slot| slot_at(slot) + TEXT_AT + TEXT_BYTES_MAX <= STATISTICS_PAGE_BYTES)
        );
    }
}
