//! Statistics of each peer's paths, including closed paths.
//!
//! A path in the statistics stands for all consecutive connections of one kind between the same two
//! addresses. What enters: links that end, and frames that arrive corrupt. What leaves: entries for
//! the log when the endpoint closes, and for the statistics page (`statistics_page`) on request.
//! The statistics decide nothing, and cost nothing per frame.

use std::fmt;
use std::net::IpAddr;

use landbridge_drive::sys;
use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::Peer;
use landbridge_proto::id::Address;
use landbridge_proto::statistics_page::{self, TEXT_BYTES_MAX, write_lines};

use super::Engine;
use super::handshake::Carrier;
use super::links::{Link, RELAY_PATH};
use crate::log;

/// A path with fewer bytes than this, a few headers, is logged only if its peer has no other path:
/// it was a spare connection between the same addresses as another one.
const LOGGED_BYTES_MIN: u64 = 256;
/// Maximum number of peers whose paths are logged one by one when an endpoint closes. Paths with
/// trouble come first; the others are summed up.
const LOGGED_PEERS_MAX: usize = 64;
/// Maximum number of entries per peer; further paths count with the last entry.
const CLOSED_PATHS_MAX: usize = 16;

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
    fn new(what: &'static str, ends: Option<(IpAddr, IpAddr)>) -> Self {
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
    fn word(&self) -> &'static str {
        match self.what {
            "shared memory" => "shm",
            other => other,
        }
    }

    fn done(&self) -> statistics_page::PathCounters {
        let &PathStatistics { bytes, retransmitted_bytes, corrupt, losses, .. } = self;
        statistics_page::PathCounters { bytes, retransmitted_bytes, corrupt, losses }
    }

    /// The row of the path on the statistics page.
    fn row(&self, peer: Option<u32>) -> statistics_page::PathRow<'static> {
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
        if self.peer.is_none() { "relay" } else { self.describe() }
    }

    fn state(&self, is_spare: bool) -> PathState {
        match &self.carrier {
            Carrier::Datagram(udp_path) if !udp_path.is_open() => PathState::Probing,
            _ if self.is_suspected || !self.works() => PathState::Suspected,
            _ if is_spare => PathState::Spare,
            _ => PathState::Up,
        }
    }
}

impl Engine {
    /// Counts a frame of `peer` that arrived corrupt by the open path `path`.
    #[cold]
    pub(super) fn count_corrupt(&mut self, peer: Peer, path: PathId) {
        self.peers[peer].corrupt[path.0 as usize] += 1;
    }

    /// Adds the counters of path `path` of `peer` over `link` to the closed paths. `is_lost`: the
    /// path failed, and was still wanted. The protocol must still know the path.
    #[cold]
    pub(super) fn finish_statistics(
        &mut self,
        peer: Peer,
        path: PathId,
        link: &Link,
        is_lost: bool,
    ) {
        let done = self.core.channel(peer).path_statistics(path);
        let peer_state = &mut self.peers[peer];
        let corrupt = std::mem::take(&mut peer_state.corrupt[path.0 as usize]);
        let entry = entry_of(&mut peer_state.closed_paths, link.what(), link.ends);
        entry.losses += u64::from(is_lost);
        entry.corrupt += u64::from(corrupt);
        if let Some(done) = done {
            entry.bytes += done.bytes;
            entry.retransmitted_bytes += done.retransmitted_bytes;
        }
    }

    /// Adds the counters of all open paths of a peer that is given up, or has left.
    #[cold]
    pub(super) fn finish_all_statistics(&mut self, peer: Peer) {
        for open_path in self.peers[peer].open_paths.clone() {
            // A link that is being read is not in `links`; the function that reads the link has
            // handled its statistics.
            let Some(link) = self.links[open_path.link].take() else { continue };
            self.finish_statistics(peer, open_path.path, &link, false);
            self.links[open_path.link] = Some(link);
        }
    }

    /// The statistics of all paths that `peer` has or had.
    pub(super) fn paths_of(&self, peer: Peer) -> Vec<PathStatistics> {
        let peer_state = &self.peers[peer];
        let mut entries = peer_state.closed_paths.clone();
        for open_path in &peer_state.open_paths {
            let Some(link) = self.links[open_path.link].as_ref() else { continue };
            let Some(done) = self.core.channel(peer).path_statistics(open_path.path) else {
                continue;
            };
            let entry = entry_of(&mut entries, link.what(), link.ends);
            entry.bytes += done.bytes;
            entry.retransmitted_bytes += done.retransmitted_bytes;
            entry.corrupt += u64::from(peer_state.corrupt[open_path.path.0 as usize]);
            // Two connections between the same addresses are one path.
            entry.state = entry.state.min(link.state(done.is_spare));
            entry.bytes_per_second = entry.bytes_per_second.or(done.bytes_per_second);
            entry.round_trip_nanos = entry.round_trip_nanos.or(done.round_trip_nanos);
            if let (Carrier::Stream(stream), true) = (&link.carrier, open_path.path != RELAY_PATH)
                && let Some(known) = sys::tcp_info(stream.fd())
            {
                let round_trip = u64::from(known.round_trip_micros) * 1_000;
                let is_known = |value: &u64| *value > 0;
                entry.bytes_per_second =
                    entry.bytes_per_second.or(Some(known.bytes_per_second).filter(is_known));
                entry.round_trip_nanos =
                    entry.round_trip_nanos.or(Some(round_trip).filter(is_known));
            }
        }
        if self.datagrams.is_some() {
            self.add_unvalidated_udp_paths(peer, &mut entries);
        }
        entries
    }

    /// Adds UDP paths in validation, which carry no frames.
    fn add_unvalidated_udp_paths(&self, peer: Peer, entries: &mut Vec<PathStatistics>) {
        let is_it = |link: &&Link| link.peer == Some(peer) && link.socket().is_some();
        let udp_paths = self.links.iter().flatten().map(|link| &**link).filter(is_it);
        for udp_path in udp_paths.filter(|udp_path| udp_path.state(false) == PathState::Probing) {
            let entry = entry_of(entries, udp_path.what(), udp_path.ends);
            entry.state = entry.state.min(PathState::Probing);
        }
    }

    /// Writes the statistics of all paths to the statistics page, paths with trouble first.
    #[cold]
    pub(super) fn write_statistics(&mut self) {
        let peers = (0..self.peers.len() as u32).map(Peer);
        let of_peer = |peer: Peer| self.paths_of(peer).into_iter().map(move |entry| (peer, entry));
        let mut all: Vec<(Peer, PathStatistics)> = peers.flat_map(of_peer).collect();
        all.sort_by_key(|(_, entry)| !entry.has_trouble());
        let mut text = String::new();
        let sums = sums(all.iter().map(|(_, entry)| entry));
        write_lines(
            &mut text,
            TEXT_BYTES_MAX,
            sums.iter().map(|(sum, paths, troubled)| statistics_page::PathSummary {
                what: sum.word(),
                paths: *paths,
                troubled: *troubled,
                counters: sum.done(),
            }),
        );
        write_lines(
            &mut text,
            TEXT_BYTES_MAX,
            all.iter().map(|(peer, entry)| {
                let address = self.core.address(*peer);
                let peer = (address != Address::ANONYMOUS).then(|| address.index());
                entry.row(peer)
            }),
        );
        if let Some(slot) = &mut self.links.statistics_slot {
            slot.write(&text);
        }
    }

    /// Logs the statistics of each peer's paths.
    pub(super) fn log_paths(&self) {
        let dropped = self.datagrams.as_ref().map(|datagrams| datagrams.dropped());
        if let Some((unknown, corrupt)) = dropped.filter(|&dropped| dropped != (0, 0)) {
            log!(Info, "datagrams dropped: {unknown} of unknown senders, {corrupt} corrupt");
        }
        if let Some(corrupt) = self.uplink.corrupt() {
            log!(Info, "the relay: {corrupt} frames of unknown senders arrived corrupt");
        }
        let peers = (0..self.peers.len() as u32).map(Peer);
        let all: Vec<_> = peers.map(|peer| (peer, self.paths_of(peer))).collect();
        for line in summary(all, |peer| self.core.address(peer).to_string()) {
            log!(Info, "{line}");
        }
    }
}

fn entry_of<'a>(
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

/// The log lines: the paths of each peer, peers with trouble first if there are many peers, and the
/// sum of the others.
fn summary(all: Vec<(Peer, Vec<PathStatistics>)>, name: impl Fn(Peer) -> String) -> Vec<String> {
    let mut peers: Vec<_> = all.into_iter().filter(|(_, entries)| !entries.is_empty()).collect();
    if peers.len() > LOGGED_PEERS_MAX {
        peers.sort_by_key(|(_, entries)| !entries.iter().any(PathStatistics::has_trouble));
    }
    let rest = peers.split_off(peers.len().min(LOGGED_PEERS_MAX));
    let mut lines = Vec::new();
    for (peer, entries) in &peers {
        let is_logged =
            |entry: &&PathStatistics| entry.bytes >= LOGGED_BYTES_MIN || entry.corrupt > 0;
        let has_logged = entries.iter().any(|entry| is_logged(&entry));
        let most = entries.iter().map(|entry| entry.bytes).max();
        let logged = |entry: &&PathStatistics| {
            is_logged(entry) || (!has_logged && Some(entry.bytes) == most)
        };
        let logged =
            entries.iter().filter(logged).take(if has_logged { CLOSED_PATHS_MAX } else { 1 });
        lines.extend(logged.map(|entry| format!("{}: {entry}", name(*peer))));
    }
    let sums = sums(rest.iter().flat_map(|(_, entries)| entries));
    lines.extend(sums.iter().map(|(sum, ..)| format!("{} more peers: {sum}", rest.len())));
    lines
}

/// For each kind of path: the summed counters, the number of paths, and the number with trouble.
fn sums<'a>(entries: impl Iterator<Item = &'a PathStatistics>) -> Vec<(PathStatistics, u64, u64)> {
    let mut sums: Vec<(PathStatistics, u64, u64)> = Vec::new();
    for entry in entries {
        let known = sums.iter().position(|(sum, ..)| sum.what == entry.what);
        let place = known.unwrap_or_else(|| {
            sums.push((PathStatistics::new(entry.what, None), 0, 0));
            sums.len() - 1
        });
        let (sum, paths, troubled) = &mut sums[place];
        sum.bytes += entry.bytes;
        sum.retransmitted_bytes += entry.retransmitted_bytes;
        sum.corrupt += entry.corrupt;
        sum.losses += entry.losses;
        *paths += 1;
        *troubled += u64::from(entry.has_trouble());
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(what: &'static str, bytes: u64) -> PathStatistics {
        PathStatistics { bytes, state: PathState::Up, ..PathStatistics::new(what, None) }
    }

    fn lines(all: Vec<Vec<PathStatistics>>) -> Vec<String> {
        let all = all.into_iter().enumerate();
        let all = all.map(|(index, entries)| (Peer(index as u32), entries)).collect();
        summary(all, |peer| format!("rank {}", peer.0))
    }

    #[test]
    fn each_pair_is_reported_however_little_went_by_it() {
        let logged = lines(vec![
            vec![entry("shared memory", 7)],
            vec![entry("tcp", 10), entry("udp", 1 << 20)],
            vec![],
            vec![PathStatistics {
                corrupt: 2,
                losses: 1,
                retransmitted_bytes: 9,
                ..entry("tcp", 1000)
            }],
        ]);
        let expected = [
            "rank 0: shared memory: 7 bytes sent",
            "rank 1: udp: 1048576 bytes sent",
            "rank 3: tcp: 1000 bytes sent, 9 bytes retransmitted, 2 frames arrived corrupt, 1 times lost",
        ];
        assert_eq!(logged, expected);
    }

    #[test]
    fn of_many_pairs_those_with_trouble_are_reported_and_the_others_summed_up() {
        let mut all = vec![vec![entry("tcp", 1000)]; LOGGED_PEERS_MAX + 1000];
        all.last_mut().unwrap()[0].corrupt = 1;
        let logged = lines(all);
        assert_eq!(logged.len(), LOGGED_PEERS_MAX + 1);
        assert!(
            logged[0].starts_with("rank 1063: tcp: 1000 bytes sent, 1 frames"),
            "{}",
            logged[0]
        );
        assert_eq!(logged[LOGGED_PEERS_MAX], "1000 more peers: tcp: 1000000 bytes sent");
    }

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
