//! What the paths of each peer have carried and how they are, those that are gone included.
//!
//! A path stands here for all connections of one kind that have followed each other between the same two addresses. What
//! enters: links that end, and what arrives spoilt. What leaves: entries, for the log as the endpoint closes and for whoever
//! asks how the job goes (`board`). Nothing here decides anything, and nothing is done per frame.

use std::fmt;
use std::net::IpAddr;

use landbridge_drive::sys;
use landbridge_proto::board::{self, TEXT_BYTES_MAX, write_lines};
use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::Peer;
use landbridge_proto::id::Address;

use super::Engine;
use super::handshake::Carrier;
use super::links::{Link, RELAY_PATH};
use crate::log;

/// A path that has carried less than this, a few headers, is told of only if its peer has no other: a connection that stood
/// by beside another one between the same addresses.
const TOLD_BYTES_MIN: u64 = 256;
/// Peers whose paths are told one by one as an endpoint closes; those with trouble come first, the rest is summed up.
const TOLD_PEERS_MAX: usize = 64;
/// Paths of a peer that are gone and remembered; what is beyond counts with the last.
const PAST_MAX: usize = 16;

/// How a path is, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    Up,
    /// It carries frames only while no other does.
    Spare,
    /// It is silent: frames go by others, if there are any.
    Doubted,
    /// A line of datagrams that has not shown yet that anything gets through, or not any more.
    Probing,
    Down,
}

impl State {
    /// In one word.
    pub fn word(self) -> &'static str {
        match self {
            State::Up => "up",
            State::Spare => "spare",
            State::Doubted => "doubted",
            State::Probing => "probing",
            State::Down => "down",
        }
    }
}

/// See the module head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub what: &'static str,
    /// Our address and the peer's.
    pub ends: Option<(IpAddr, IpAddr)>,
    pub state: State,
    pub bytes: u64,
    /// Of those, sent again.
    pub bytes_again: u64,
    /// Frames that arrived spoilt.
    pub spoilt: u64,
    /// How often it was lost.
    pub losses: u64,
    pub bytes_per_second: Option<u64>,
    pub round_trip_nanos: Option<u64>,
}

impl Entry {
    fn new(what: &'static str, ends: Option<(IpAddr, IpAddr)>) -> Self {
        Self {
            what,
            ends,
            state: State::Down,
            bytes: 0,
            bytes_again: 0,
            spoilt: 0,
            losses: 0,
            bytes_per_second: None,
            round_trip_nanos: None,
        }
    }

    /// Its kind in one word.
    fn word(&self) -> &'static str {
        match self.what {
            "shared memory" => "shm",
            other => other,
        }
    }

    fn done(&self) -> board::Done {
        let &Entry { bytes, bytes_again, spoilt, losses, .. } = self;
        board::Done { bytes, bytes_again, spoilt, losses }
    }

    /// As it stands on the board.
    fn row(&self, peer: Option<u32>) -> board::Row<'static> {
        board::Row {
            peer,
            what: self.word(),
            state: self.state.word(),
            ends: self.ends,
            done: self.done(),
            bytes_per_second: self.bytes_per_second.unwrap_or(0),
            round_trip_nanos: self.round_trip_nanos.unwrap_or(0),
        }
    }

    /// Whether somebody who looks for trouble wants to see it.
    pub fn has_trouble(&self) -> bool {
        let is_well = matches!(self.state, State::Up | State::Spare);
        !is_well || (self.spoilt, self.losses, self.bytes_again) != (0, 0, 0)
    }
}

/// As the log has it, without its peer.
impl fmt::Display for Entry {
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
            (self.bytes_again, "bytes sent again"),
            (self.spoilt, "frames arrived spoilt"),
            (self.losses, "times lost"),
        ];
        for (count, what) in counts.into_iter().filter(|(count, _)| *count > 0) {
            write!(f, ", {count} {what}")?;
        }
        Ok(())
    }
}

impl Link {
    /// What a path by it is called.
    pub(super) fn what(&self) -> &'static str {
        if self.peer.is_none() { "relay" } else { self.describe() }
    }

    fn state(&self, is_spare: bool) -> State {
        match &self.carrier {
            Carrier::Datagram(line) if !line.is_open() => State::Probing,
            _ if self.is_doubted || !self.works() => State::Doubted,
            _ if is_spare => State::Spare,
            _ => State::Up,
        }
    }
}

impl Engine {
    /// A frame of `peer` has arrived spoilt by `path`, which is up.
    #[cold]
    pub(super) fn count_spoilt(&mut self, peer: Peer, path: PathId) {
        self.neighbours[peer.0 as usize].spoilt[path.0 as usize] += 1;
    }

    /// Path `path` of `peer` over `link` ends; it `is_lost` unless nobody wants it any more. To be called while the protocol
    /// still knows it.
    #[cold]
    pub(super) fn settle_account(&mut self, peer: Peer, path: PathId, link: &Link, is_lost: bool) {
        let done = self.core.path_use(peer, path);
        let neighbour = &mut self.neighbours[peer.0 as usize];
        let spoilt = std::mem::take(&mut neighbour.spoilt[path.0 as usize]);
        let entry = entry_of(&mut neighbour.past, link.what(), link.ends);
        entry.losses += u64::from(is_lost);
        entry.spoilt += u64::from(spoilt);
        if let Some(done) = done {
            entry.bytes += done.bytes;
            entry.bytes_again += done.bytes_again;
        }
    }

    /// The same for all paths of a peer that is given up, or has left.
    #[cold]
    pub(super) fn settle_accounts(&mut self, peer: Peer) {
        for route in self.neighbours[peer.0 as usize].routes.clone() {
            // Out of its place: it is being read, and whoever does so has seen to it.
            let Some(link) = self.links[route.link].take() else { continue };
            self.settle_account(peer, route.path, &link, false);
            self.links[route.link] = Some(link);
        }
    }

    /// All paths that `peer` has or has had.
    pub(super) fn paths_of(&self, peer: Peer) -> Vec<Entry> {
        let neighbour = &self.neighbours[peer.0 as usize];
        let mut entries = neighbour.past.clone();
        for route in &neighbour.routes {
            let Some(link) = self.links[route.link].as_ref() else { continue };
            let Some(done) = self.core.path_use(peer, route.path) else { continue };
            let entry = entry_of(&mut entries, link.what(), link.ends);
            entry.bytes += done.bytes;
            entry.bytes_again += done.bytes_again;
            entry.spoilt += u64::from(neighbour.spoilt[route.path.0 as usize]);
            // Two connections between the same addresses are one path.
            entry.state = entry.state.min(link.state(done.is_spare));
            entry.bytes_per_second = entry.bytes_per_second.or(done.bytes_per_second);
            entry.round_trip_nanos = entry.round_trip_nanos.or(done.round_trip_nanos);
            if let (Carrier::Stream(stream), true) = (&link.carrier, route.path != RELAY_PATH)
                && let Some(known) = sys::silence(stream.fd())
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
            self.add_lines_on_trial(peer, &mut entries);
        }
        entries
    }

    /// Lines of datagrams that carry nothing, as nobody knows whether anything would get through.
    fn add_lines_on_trial(&self, peer: Peer, entries: &mut Vec<Entry>) {
        let is_it = |link: &&Link| link.peer == Some(peer) && link.socket().is_some();
        let lines = self.links.iter().flatten().map(|link| &**link).filter(is_it);
        for line in lines.filter(|line| line.state(false) == State::Probing) {
            let entry = entry_of(entries, line.what(), line.ends);
            entry.state = entry.state.min(State::Probing);
        }
    }

    /// Says on the board how all paths are, those with trouble first.
    #[cold]
    pub(super) fn show_paths(&mut self) {
        let peers = (0..self.neighbours.len() as u32).map(Peer);
        let of_peer = |peer: Peer| self.paths_of(peer).into_iter().map(move |entry| (peer, entry));
        let mut all: Vec<(Peer, Entry)> = peers.flat_map(of_peer).collect();
        all.sort_by_key(|(_, entry)| !entry.has_trouble());
        let mut text = String::new();
        let sums = sums(all.iter().map(|(_, entry)| entry));
        write_lines(
            &mut text,
            TEXT_BYTES_MAX,
            sums.iter().map(|(sum, paths, troubled)| board::Sum {
                what: sum.word(),
                paths: *paths,
                troubled: *troubled,
                done: sum.done(),
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
        if let Some(slot) = &mut self.slot {
            slot.write(&text);
        }
    }

    /// Tells what the paths of every peer have carried.
    pub(super) fn log_paths(&self) {
        let dropped = self.datagrams.as_ref().map(|datagrams| datagrams.dropped());
        if let Some((strange, spoilt)) = dropped.filter(|&dropped| dropped != (0, 0)) {
            log!(Info, "datagrams dropped: {strange} of nobody known, {spoilt} spoilt");
        }
        if let Some(spoilt) = self.relay.spoilt() {
            log!(Info, "the relay: {spoilt} frames of nobody known arrived spoilt");
        }
        let peers = (0..self.neighbours.len() as u32).map(Peer);
        let all: Vec<_> = peers.map(|peer| (peer, self.paths_of(peer))).collect();
        for line in account(all, |peer| self.core.address(peer).to_string()) {
            log!(Info, "{line}");
        }
    }
}

fn entry_of<'a>(
    entries: &'a mut Vec<Entry>,
    what: &'static str,
    ends: Option<(IpAddr, IpAddr)>,
) -> &'a mut Entry {
    let known = entries.iter().position(|entry| (entry.what, entry.ends) == (what, ends));
    let place = known.unwrap_or_else(|| {
        if entries.len() < PAST_MAX {
            entries.push(Entry::new(what, ends));
        }
        entries.len() - 1
    });
    &mut entries[place]
}

/// The lines of the log: each peer's paths, those with trouble first if there are many peers, and the sum of the rest.
fn account(all: Vec<(Peer, Vec<Entry>)>, name: impl Fn(Peer) -> String) -> Vec<String> {
    let mut peers: Vec<_> = all.into_iter().filter(|(_, entries)| !entries.is_empty()).collect();
    if peers.len() > TOLD_PEERS_MAX {
        peers.sort_by_key(|(_, entries)| !entries.iter().any(Entry::has_trouble));
    }
    let rest = peers.split_off(peers.len().min(TOLD_PEERS_MAX));
    let mut lines = Vec::new();
    for (peer, entries) in &peers {
        let is_told = |entry: &&Entry| entry.bytes >= TOLD_BYTES_MIN || entry.spoilt > 0;
        let has_told = entries.iter().any(|entry| is_told(&entry));
        let most = entries.iter().map(|entry| entry.bytes).max();
        let told = |entry: &&Entry| is_told(entry) || (!has_told && Some(entry.bytes) == most);
        let told = entries.iter().filter(told).take(if has_told { PAST_MAX } else { 1 });
        lines.extend(told.map(|entry| format!("{}: {entry}", name(*peer))));
    }
    let sums = sums(rest.iter().flat_map(|(_, entries)| entries));
    lines.extend(sums.iter().map(|(sum, ..)| format!("{} more peers: {sum}", rest.len())));
    lines
}

/// Of each kind of path what all have done, how many there are, and how many with trouble.
fn sums<'a>(entries: impl Iterator<Item = &'a Entry>) -> Vec<(Entry, u64, u64)> {
    let mut sums: Vec<(Entry, u64, u64)> = Vec::new();
    for entry in entries {
        let known = sums.iter().position(|(sum, ..)| sum.what == entry.what);
        let place = known.unwrap_or_else(|| {
            sums.push((Entry::new(entry.what, None), 0, 0));
            sums.len() - 1
        });
        let (sum, paths, troubled) = &mut sums[place];
        sum.bytes += entry.bytes;
        sum.bytes_again += entry.bytes_again;
        sum.spoilt += entry.spoilt;
        sum.losses += entry.losses;
        *paths += 1;
        *troubled += u64::from(entry.has_trouble());
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(what: &'static str, bytes: u64) -> Entry {
        Entry { bytes, state: State::Up, ..Entry::new(what, None) }
    }

    fn lines(all: Vec<Vec<Entry>>) -> Vec<String> {
        let all = all.into_iter().enumerate();
        let all = all.map(|(index, entries)| (Peer(index as u32), entries)).collect();
        account(all, |peer| format!("rank {}", peer.0))
    }

    #[test]
    fn each_pair_is_told_of_however_little_went_by_it() {
        let told = lines(vec![
            vec![entry("shared memory", 7)],
            vec![entry("tcp", 10), entry("udp", 1 << 20)],
            vec![],
            vec![Entry { spoilt: 2, losses: 1, bytes_again: 9, ..entry("tcp", 1000) }],
        ]);
        let expected = [
            "rank 0: shared memory: 7 bytes sent",
            "rank 1: udp: 1048576 bytes sent",
            "rank 3: tcp: 1000 bytes sent, 9 bytes sent again, 2 frames arrived spoilt, 1 times lost",
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn of_many_pairs_those_with_trouble_are_told_and_the_others_summed_up() {
        let mut all = vec![vec![entry("tcp", 1000)]; TOLD_PEERS_MAX + 1000];
        all.last_mut().unwrap()[0].spoilt = 1;
        let told = lines(all);
        assert_eq!(told.len(), TOLD_PEERS_MAX + 1);
        assert!(told[0].starts_with("rank 1063: tcp: 1000 bytes sent, 1 frames"), "{}", told[0]);
        assert_eq!(told[TOLD_PEERS_MAX], "1000 more peers: tcp: 1000000 bytes sent");
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
        assert_eq!(entries.len(), PAST_MAX);
        assert_eq!(entries.iter().map(|it| it.losses).sum::<u64>(), 100);
    }
}
