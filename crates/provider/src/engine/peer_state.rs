//! State of each peer.
//!
//! The engine knows a peer by its name in the address vector or by the address in its frames,
//! whichever comes first. A peer is the endpoint that introduced itself first. An endpoint that
//! uses the same socket address later is another peer. An endpoint that uses the same rank address
//! is refused.

use std::io;
use std::time::Duration;

use landbridge_proto::channel::{PATHS_MAX, PathId};
use landbridge_proto::endpoint;
use landbridge_proto::wire::hello::Introduction;

use super::candidates::PathCandidate;
use super::known_regions::KnownRegions;
use super::links::Link;
use super::local_endpoint::NameBytes;
use super::memory::ReadableProcess;
use super::path_statistics::{PathStatistics, entry_of};
use super::reconnect::Reconnect;
use crate::abi::FiAddr;

/// Number of times that a peer is dialled again after it accepted a connection and closed it at
/// once.
const DIAL_RETRIES: u8 = 5;

/// A peer, as this endpoint sees it.
pub struct PeerState {
    pub name: Option<NameBytes>,
    pub send_state: SendState,
    /// The open paths, including paths by which only the peer sends.
    pub open_paths: Vec<OpenPath>,
    /// A candidate path is being tried.
    pub is_dialling: bool,
    /// The candidate is a further address, whose failure says little about the peer.
    pub is_further_address: bool,
    /// Attempts to reopen a lost path.
    pub reconnect: Option<Reconnect>,
    /// Number of times that all candidates may still be tried again.
    pub retries: u8,
    /// The cookie of the endpoint, which differs from that of any earlier endpoint with the same
    /// name.
    instance: Option<u64>,
    /// Candidates not yet tried; the best is the last.
    pub candidates: Option<Vec<PathCandidate>>,
    /// The peer's process, if its memory may be read and written.
    pub readable: Option<ReadableProcess>,
    /// What is known of its registered memory, once it was accessed.
    pub regions: Option<Box<KnownRegions>>,
    /// The peer's address-vector number, once looked up.
    pub number: Option<FiAddr>,
    /// Statistics of the peer's closed paths: see `path_statistics`.
    pub closed_paths: Vec<PathStatistics>,
    /// Frames that arrived corrupt, for each open path.
    pub corrupt: [u32; PATHS_MAX],
}

/// An open path of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenPath {
    pub path: PathId,
    pub link: usize,
}

/// State of sending to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendState {
    Unknown,
    /// A connection is being dialled.
    Dialling,
    /// The dial waits until fewer other dials are under way.
    DialQueued,
    /// Frames wait for the relay's connection.
    AwaitRelay,
    /// Frames are sent on this link.
    Up(usize),
    /// Every path is lost, and the engine is reopening a path.
    Reconnecting,
    /// The peer has left, or is given up.
    Closed,
}

impl PeerState {
    pub fn new(name: Option<NameBytes>) -> Self {
        Self {
            name,
            send_state: SendState::Unknown,
            open_paths: Vec::new(),
            is_dialling: false,
            is_further_address: false,
            reconnect: None,
            retries: DIAL_RETRIES,
            instance: None,
            candidates: None,
            readable: None,
            regions: None,
            number: None,
            closed_paths: Vec::new(),
            corrupt: [0; PATHS_MAX],
        }
    }
    /// Sets the state of frames for the peer, unless an open path sends them.
    pub fn set_send_state(&mut self, send_state: SendState) {
        if !matches!(self.send_state, SendState::Up(_)) {
            self.send_state = send_state;
        }
    }

    /// Postpones the dial of a candidate until fewer other dials are under way.
    pub fn queue_dial(&mut self, candidate: PathCandidate) {
        self.set_send_state(SendState::DialQueued);
        self.candidates.get_or_insert_default().push(candidate);
    }

    /// The pause until the next attempt, if the dial under way is one of several attempts.
    pub fn pause_after_dial(&self) -> Option<Duration> {
        let is_further = |candidate: &PathCandidate| matches!(candidate, PathCandidate::Further(_));
        let has_further = self.candidates.iter().flatten().any(is_further);
        let is_one_of_several = has_further || self.is_further_address;
        let alone = is_one_of_several.then_some(Duration::ZERO);
        self.reconnect.as_ref().map(Reconnect::pause).or(alone)
    }

    /// Adds the counters of path `path` over `link`, which has ended, to the closed paths. `done`:
    /// what the protocol has counted. `is_lost`: the path failed, and was still wanted.
    #[cold]
    pub fn finish_path(
        &mut self,
        path: PathId,
        link: &Link,
        done: Option<endpoint::PathStatistics>,
        is_lost: bool,
    ) {
        let corrupt = std::mem::take(&mut self.corrupt[path.0 as usize]);
        let entry = entry_of(&mut self.closed_paths, link.what(), link.ends);
        entry.losses += u64::from(is_lost);
        entry.corrupt += u64::from(corrupt);
        if let Some(done) = done {
            entry.bytes += done.bytes;
            entry.retransmitted_bytes += done.retransmitted_bytes;
        }
    }

    /// Counts a frame that arrived corrupt by path `path`. A UDP path that is not open has no
    /// counter.
    #[cold]
    pub fn count_corrupt(&mut self, path: PathId) {
        if let Some(count) = self.corrupt.get_mut(path.0 as usize) {
            *count += 1;
        }
    }

    /// Whether another endpoint than the one that `introduction` describes has introduced itself
    /// first.
    pub fn is_another(&self, introduction: &Introduction) -> bool {
        self.instance.is_some_and(|known| known != introduction.cookie)
    }

    /// Binds the peer to the endpoint that has introduced itself first.
    ///
    /// # Errors
    /// Another endpoint uses the peer's address. All data so far was exchanged with the first
    /// endpoint, so the other endpoint cannot continue.
    pub fn recognise(&mut self, introduction: &Introduction) -> io::Result<()> {
        if *self.instance.get_or_insert(introduction.cookie) == introduction.cookie {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::AddrInUse, "another endpoint goes by the peer's address"))
    }
}
