//! Statistics of one path.
//!
//! A path in the statistics stands for all consecutive connections of one kind between the same two
//! addresses. What enters: links that end, and frames that arrive corrupt. What leaves: entries
//! that `path_report` puts together. The statistics decide nothing, and cost nothing per frame.

use std::fmt;
use std::net::IpAddr;

use landbridge_proto::statistics_page;

use super::carrier::Carrier;
use super::links::Link;

/// Maximum number of entries per peer; further paths count with the last entry.
pub const CLOSED_PATHS_MAX: usize = 16;

/// State of a path, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathState {
    Up,
    /// Frames use the path only while no other path works.
    Spare,
    /// Confirmations are missing: frames use other paths, if there are any.
    Suspected,
    /// A UDP path in validation.
    Probing,
    Down,
}

impl PathState {
    /// The state as a word.
    pub fn word(self) -> &'static str {
        match self {
            PathState::Up => "up",
            PathState::Spare => "spare",
            PathState::Suspected => "suspected",
            PathState::Probing => "probing",
            PathState::Down => "down",
        }
    }
}

/// Statistics of one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathStatistics {
    pub what: &'static str,
    /// The local address and the peer's.
    pub ends: Option<(IpAddr, IpAddr)>,
    pub state: PathState,
    pub bytes: u64,
    /// Retransmitted bytes, which `bytes` includes.
    pub retransmitted_bytes: u64,
    /// Frames that arrived corrupt.
    pub corrupt: u64,
    /// Number of times that the path was lost.
    pub losses: u64,
    pub bytes_per_second: Option<u64>,
    pub round_trip_nanos: Option<u64>,
}

impl PathStatistics {
    pub fn new(what: &'static str, ends: Option<(IpAddr, IpAddr)>) -> Self {
        Self {
            what,
            ends,
            state: PathState::Down,
            bytes: 0,
            retransmitted_bytes: 0,
            corrupt: 0,
            losses: 0,
            bytes_per_second: None,
            round_trip_nanos: None,
        }
    }

    /// The kind of the path as a word.
    pub fn word(&self) -> &'static str {
        match self.what {
            "shared memory" => "shm",
            "message logs" => "log",
            other => other,
        }
    }

    pub fn done(&self) -> statistics_page::PathCounters {
        let &PathStatistics { bytes, retransmitted_bytes, corrupt, losses, .. } = self;
        statistics_page::PathCounters { bytes, retransmitted_bytes, corrupt, losses }
    }

    /// The row of the path on the statistics page.
    pub fn row(&self, peer: Option<u32>) -> statistics_page::PathRow<'static> {
        statistics_page::PathRow {
            peer,
            what: self.word(),
            state: self.state.word(),
            ends: self.ends,
            counters: self.done(),
            bytes_per_second: self.bytes_per_second.unwrap_or(0),
            round_trip_nanos: self.round_trip_nanos.unwrap_or(0),
        }
    }

    /// Whether the path is down, suspected or in validation, or has had losses or corrupt frames.
    pub fn has_trouble(&self) -> bool {
        let is_well = matches!(self.state, PathState::Up | PathState::Spare);
        !is_well || (self.corrupt, self.losses, self.retransmitted_bytes) != (0, 0, 0)
    }
}

/// The log line of the path, without its peer.
impl fmt::Display for PathStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what)?;
        if let Some((own, to)) = self.ends {
            write!(f, " {own} to {to}")?;
        }
        write!(f, ": {} bytes sent", self.bytes)?;
        if let Some(rate) = self.bytes_per_second {
            write!(f, ", {:.0} MB/s", rate as f64 / 1e6)?;
        }
        if let Some(nanos) = self.round_trip_nanos {
            write!(f, ", confirmed after {:.0} us", nanos as f64 / 1e3)?;
        }
        let counts = [
            (self.retransmitted_bytes, "bytes retransmitted"),
            (self.corrupt, "frames arrived corrupt"),
            (self.losses, "times lost"),
        ];
        for (count, what) in counts.into_iter().filter(|(count, _)| *count > 0) {
            write!(f, ", {count} {what}")?;
        }
        Ok(())
    }
}

impl Link {
    /// The kind of a path over this link.
    pub(super) fn what(&self) -> &'static str {
        match self.carrier {
            Carrier::Logs(_) => self.describe(),
            _ if self.peer.is_none() => "relay",
            _ => self.describe(),
        }
    }

    pub fn state(&self, is_spare: bool) -> PathState {
        match &self.carrier {
            Carrier::Datagram(udp_path) if !udp_path.is_open() => PathState::Probing,
            _ if self.health.is_suspected || !self.works() => PathState::Suspected,
            _ if is_spare => PathState::Spare,
            _ => PathState::Up,
        }
    }
}

/// The entry of a path in `entries`; a new one if there is none.
pub fn entry_of<'a>(
    entries: &'a mut Vec<PathStatistics>,
    what: &'static str,
    ends: Option<(IpAddr, IpAddr)>,
) -> &'a mut PathStatistics {
    let known = entries.iter().position(|entry| (entry.what, entry.ends) == (what, ends));
    let place = known.unwrap_or_else(|| {
        if entries.len() < CLOSED_PATHS_MAX {
            entries.push(PathStatistics::new(what, ends));
        }
        entries.len() - 1
    });
    &mut entries[place]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_between_the_same_addresses_are_one_path_and_their_number_is_bounded() {
        let mut entries = Vec::new();
        let ends = |last| Some(([10, 0, 0, 1].into(), [10, 0, 0, last].into()));
        entry_of(&mut entries, "tcp", ends(2)).bytes += 5;
        entry_of(&mut entries, "tcp", ends(2)).bytes += 6;
        entry_of(&mut entries, "udp", ends(2)).bytes += 7;
        assert_eq!(entries.iter().map(|it| it.bytes).collect::<Vec<_>>(), [11, 7]);
        (0..100).for_each(|last| entry_of(&mut entries, "tcp", ends(last)).losses += 1);
        assert_eq!(entries.len(), CLOSED_PATHS_MAX);
        assert_eq!(entries.iter().map(|it| it.losses).sum::<u64>(), 100);
    }
}
