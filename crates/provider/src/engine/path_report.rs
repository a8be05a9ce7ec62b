//! The statistics of all paths of an endpoint, put together for the log and the statistics page.
//!
//! What enters: the counters of open and closed paths. What leaves: entries for the log when the
//! endpoint closes, and for the statistics page (`statistics_page`) on request. What may never
//! happen: a report changes what it reads.

use landbridge_drive::sys;
use landbridge_proto::endpoint::{Endpoint, Peer};
use landbridge_proto::id::Address;
use landbridge_proto::statistics_page::{self, TEXT_BYTES_MAX, write_lines};

use super::carrier::Carrier;
use super::link_table::LinkTable;
use super::links::{Link, RELAY_PATH};
use super::memory::Bytes;
use super::path_statistics::{CLOSED_PATHS_MAX, PathState, PathStatistics, entry_of};
use super::peer_table::PeerTable;
use crate::log;

/// A path with fewer bytes than this, a few headers, is logged only if its peer has no other path:
/// it was a spare connection between the same addresses as another one.
const LOGGED_BYTES_MIN: u64 = 256;
/// Maximum number of peers whose paths are logged one by one when an endpoint closes. Paths with
/// trouble come first; the others are summed up.
const LOGGED_PEERS_MAX: usize = 64;

/// The statistics of all paths of an endpoint, read from the engine's peers and links.
pub struct PathReport<'a> {
    pub core: &'a Endpoint<Bytes>,
    pub peers: &'a PeerTable,
    pub links: &'a LinkTable,
    /// UDP paths may exist.
    pub uses_udp: bool,
}

impl PathReport<'_> {
    /// The statistics of all paths that `peer` has or had.
    pub fn paths_of(&self, peer: Peer) -> Vec<PathStatistics> {
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
        if self.uses_udp {
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

    /// The text of the statistics page, paths with trouble first.
    pub fn page_text(&self) -> String {
        let of_peer = |peer: Peer| self.paths_of(peer).into_iter().map(move |entry| (peer, entry));
        let mut all: Vec<(Peer, PathStatistics)> = self.peers.all().flat_map(of_peer).collect();
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
        text
    }

    /// Logs the statistics of each peer's paths.
    pub fn log_paths(&self) {
        let all: Vec<_> = self.peers.all().map(|peer| (peer, self.paths_of(peer))).collect();
        for line in summary(all, |peer| self.core.address(peer).to_string()) {
            log!(Info, "{line}");
        }
    }
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
}
