//! The board of a process: memory that it shares with whoever has started it, on which it says how its paths are when it is
//! asked.
//!
//! Whoever asks writes a new number at [`REQUEST_AT`]. Each endpoint of the process has a slot of its own ([`slot_at`]); the
//! next time it looks at its network it finds the number, writes its account there, and the number beside it. A process that
//! computes does not answer: what stands there is of an earlier question, which its number shows. The version is odd while an
//! account is being written, and another one afterwards.
//!
//! An account is text: a [`PathRow`] for each path, as many as there is room for, and a [`PathSummary`] for each kind of path over all of
//! them. What may never happen: a reader takes what is not an account for one.

use alloc::string::String;
use core::fmt;
use core::net::IpAddr;

/// Bytes of a board. Only what is written takes memory.
pub const STATISTICS_PAGE_BYTES: usize = 256 << 10;
/// Endpoints of a process that can be told of: MPI libraries open one or two.
pub const SLOTS: usize = 4;
/// How every board begins: a descriptor that has this number by chance is none.
pub const MAGIC: [u8; 16] = *b"landbridge stats";
/// Where the number of the question stands, as eight bytes in the machine's order.
pub const REQUEST_AT: usize = 16;
/// Not 0 once the process has opened an endpoint, for as long as it lives.
pub const OPENED_AT: usize = 24;

/// From the beginning of a slot: not 0 while an endpoint has it,
pub const IN_USE_AT: usize = 0;
/// the version of the account,
pub const VERSION_AT: usize = 8;
/// the number of the question that it answers,
pub const REPLY_AT: usize = 16;
/// its length,
pub const LENGTH_AT: usize = 24;
/// and the account itself.
pub const TEXT_AT: usize = 32;
/// Bytes of an account.
pub const TEXT_BYTES_MAX: usize = SLOT_BYTES - TEXT_AT;

const HEAD_BYTES: usize = 4096;
const SLOT_BYTES: usize = (STATISTICS_PAGE_BYTES - HEAD_BYTES) / SLOTS;
const _: () = assert!(SLOT_BYTES.is_multiple_of(8) && HEAD_BYTES.is_multiple_of(8));

/// Where slot `number` begins.
pub fn slot_at(number: usize) -> usize {
    HEAD_BYTES + (number % SLOTS) * SLOT_BYTES
}

/// What is told of one path to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathRow<'a> {
    /// The peer's index in the job; unknown of processes that others have started.
    pub peer: Option<u32>,
    /// Its kind, in one word.
    pub what: &'a str,
    /// How it is, in one word.
    pub state: &'a str,
    /// Our address and the peer's, where it has some.
    pub ends: Option<(IpAddr, IpAddr)>,
    /// The counters of the path.
    pub counters: PathCounters,
    /// What it delivers, in bytes a second; 0: not measured.
    pub bytes_per_second: u64,
    /// 0: not measured.
    pub round_trip_nanos: u64,
}

/// What is told of all paths of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathSummary<'a> {
    /// The kind.
    pub what: &'a str,
    /// How many there are,
    pub paths: u64,
    /// how many of them have had or have trouble,
    pub troubled: u64,
    /// and the sum of their counters.
    pub counters: PathCounters,
}

/// Counters of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCounters {
    /// Bytes sent by it,
    pub bytes: u64,
    /// of those, sent again.
    pub retransmitted_bytes: u64,
    /// Frames that arrived corrupt by it.
    pub corrupt: u64,
    /// How often it was lost.
    pub losses: u64,
}

/// No count is larger: documents that tell of them have no numbers beyond it.
const COUNT_MAX: u64 = i64::MAX as u64;

/// Both counts together, or [`COUNT_MAX`].
pub fn add(one: u64, other: u64) -> u64 {
    one.saturating_add(other).min(COUNT_MAX)
}

fn count(word: &str) -> Option<u64> {
    word.parse().ok().filter(|count| *count <= COUNT_MAX)
}

impl PathCounters {
    /// Both together.
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

/// One line of an account.
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

/// One line of an account.
impl fmt::Display for PathSummary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sum {} {} {} {}", self.what, self.paths, self.troubled, self.counters)
    }
}

/// A line of an account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatisticsLine<'a> {
    /// Of one path.
    Path(PathRow<'a>),
    /// Of all of a kind.
    Summary(PathSummary<'a>),
}

impl<'a> StatisticsLine<'a> {
    /// Reads a line. `None`: it is none.
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

/// Words are of letters: they are shown on terminals.
fn word(text: &str) -> Option<&str> {
    let is_good = |byte: u8| byte.is_ascii_lowercase() || byte == b'-';
    (!text.is_empty() && text.len() < 20 && text.bytes().all(is_good)).then_some(text)
}

/// Puts lines into an account of at most `room` bytes, whole ones; gives how many had no room.
pub fn write_lines(
    text: &mut String,
    room: usize,
    lines: impl Iterator<Item = impl fmt::Display>,
) -> usize {
    use fmt::Write;
    let mut left_out = 0;
    for line in lines {
        let before = text.len();
        // A string takes all that is written to it.
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
