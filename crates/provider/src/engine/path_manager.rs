//! The path manager: which links are the paths of which peer, and how the protocol may use them.
//!
//! What enters: links that come up, fail, or are suspected. What leaves: paths opened, changed and
//! closed in the protocol, and the sending state of each peer. [`PathManager`] borrows the
//! protocol, the peers and the links of the engine for one such change.
//!
//! What may never happen: the protocol keeps a path whose link is closed; a peer sends on a link
//! that is not among its open paths.

use std::io;
use std::net::IpAddr;
use std::time::Instant;

use landbridge_proto::channel::{PATHS_MAX, PathId};
use landbridge_proto::endpoint::{Endpoint, PathProperties, Peer};
use landbridge_proto::id::Address;
use landbridge_proto::wire::frame::Header;

use super::candidates::{CandidateSearch, PathCandidate};
use super::carrier::Carrier;
use super::identity::Identity;
use super::integrity;
use super::link_table::LinkTable;
use super::links::{Link, RELAY_PATH};
use super::local_endpoint::LocalEndpoint;
use super::memory::Bytes;
use super::peer_state::{OpenPath, SendState};
use super::peer_table::PeerTable;
use super::rails::advertisement_of;
use crate::log;

/// Size of a piece while there are several rails: half a millisecond at 1 Gbit/s, so that all rails
/// finish at about the same time.
const PIECE_BYTES: u32 = 64 << 10;
/// Maximum number of unsent bytes in a socket while there are several rails: a larger bound would
/// bind bytes to a slow rail while a fast rail is idle.
const UNSENT_BYTES: u32 = 128 << 10;

/// The parts of the engine that change together when a path opens, changes or closes.
pub struct PathManager<'a> {
    pub identity: &'static Identity,
    pub own: &'a LocalEndpoint,
    pub core: &'a mut Endpoint<Bytes>,
    pub peers: &'a mut PeerTable,
    pub links: &'a mut LinkTable,
    /// UDP paths may exist.
    pub uses_udp: bool,
}

impl PathManager<'_> {
    /// Makes link `id` the sending path of `peer`.
    pub fn use_link(&mut self, peer: Peer, id: usize) {
        if self.add_path(peer, id) {
            self.peers[peer].send_state = SendState::Up(id);
            self.core.channel_mut(peer).mark_busy();
        }
    }

    /// Adds link `id` to the peer's paths; returns false if the link is closed, or the peer has too
    /// many paths.
    pub fn add_path(&mut self, peer: Peer, id: usize) -> bool {
        let peer_state = &mut self.peers[peer];
        if peer_state.open_paths.iter().any(|open_path| open_path.link == id) {
            return true;
        }
        let Some(link) = self.links[id].as_mut() else {
            return false;
        };
        if link.peer.is_some() {
            let is_free = |number: &u8| {
                peer_state.open_paths.iter().all(|open_path| open_path.path.0 != *number)
            };
            let direct = RELAY_PATH.0 + 1..PATHS_MAX as u8;
            let Some(number) = direct.clone().find(is_free) else {
                return false;
            };
            link.path = PathId(number);
        }
        let path = link.path;
        let traits = link.traits(peer_state.readable.is_some(), self.identity.settings.copy_max);
        peer_state.open_paths.push(OpenPath { path, link: id });
        self.core.channel_mut(peer).open_path(path, traits);
        true
    }

    /// Closes the path of `peer` over link `id`; frames go on by another path if there is one.
    /// Returns false if the peer has no such path.
    pub fn remove_path(&mut self, peer: Peer, id: usize, error: &io::Error) -> bool {
        let address = self.core.address(peer);
        let open_paths = &self.peers[peer].open_paths;
        let Some(place) = open_paths.iter().position(|open_path| open_path.link == id) else {
            return false;
        };
        // The statistics of a closed link are final already.
        let path = open_paths[place].path;
        if let Some(link) = self.links[id].take() {
            self.finish_statistics(peer, path, &link, true);
            self.links[id] = Some(link);
        }
        let peer_state = &mut self.peers[peer];
        let lost = peer_state.open_paths.remove(place);
        let other = peer_state.open_paths.last().map(|open_path| open_path.link);
        match other {
            Some(link) => peer_state.send_state = SendState::Up(link),
            None => peer_state.send_state = SendState::Reconnecting,
        }
        let goes_on = if other.is_some() { "goes on by another" } else { "is made again" };
        log!(Warn, "a path to {address} is lost and {goes_on}: {error}");
        self.core.close_path(peer, lost.path);
        self.restripe(peer);
        true
    }

    /// Closes the paths of all peers over link `id` to the relay, which is lost. Peers without
    /// another path wait for the relay.
    pub fn remove_relay_paths(&mut self, id: usize, link: &Link) {
        for peer in self.peers.all() {
            let peer_state = &mut self.peers[peer];
            let Some(place) =
                peer_state.open_paths.iter().position(|open_path| open_path.link == id)
            else {
                continue;
            };
            let lost = peer_state.open_paths[place];
            self.finish_statistics(peer, lost.path, link, true);
            let peer_state = &mut self.peers[peer];
            peer_state.open_paths.remove(place);
            if peer_state.send_state == SendState::Up(id) {
                peer_state.send_state = peer_state
                    .open_paths
                    .last()
                    .map_or(SendState::AwaitRelay, |r| SendState::Up(r.link));
            }
            self.core.close_path(peer, lost.path);
            self.restripe(peer);
        }
    }

    /// Adds the counters of path `path` of `peer` over `link` to the peer's closed paths.
    /// `is_lost`: the path failed, and was still wanted. The protocol must still know the path.
    #[cold]
    pub fn finish_statistics(&mut self, peer: Peer, path: PathId, link: &Link, is_lost: bool) {
        let done = self.core.channel(peer).path_statistics(path);
        self.peers[peer].finish_path(path, link, done, is_lost);
    }

    /// Adds the counters of all open paths of a peer that is given up, or has left.
    #[cold]
    pub fn finish_all_statistics(&mut self, peer: Peer) {
        for open_path in self.peers[peer].open_paths.clone() {
            // A link that is being read is not in `links`; the function that reads the link has
            // handled its statistics.
            let Some(link) = self.links[open_path.link].take() else { continue };
            self.finish_statistics(peer, open_path.path, &link, false);
            self.links[open_path.link] = Some(link);
        }
    }

    /// Adapts the paths of `peer` after a change of its direct paths: several paths share messages
    /// in small pieces, a single path takes whole messages.
    pub fn restripe(&mut self, peer: Peer) {
        let peer_state = &mut self.peers[peer];
        let may_pull = peer_state.readable.is_some();
        let through_relay =
            peer_state.open_paths.iter().find(|open_path| open_path.path == RELAY_PATH);
        let direct = peer_state.open_paths.iter().rfind(|open_path| open_path.path != RELAY_PATH);
        if let (Some(relay), Some(direct), SendState::Up(link)) =
            (through_relay, direct, peer_state.send_state)
            && relay.link == link
        {
            peer_state.send_state = SendState::Up(direct.link);
        }
        let mut seen = Vec::new();
        let mut several = false;
        for open_path in &peer_state.open_paths {
            let ends = self.links[open_path.link].as_ref().and_then(|link| link.ends);
            several |= open_path.path != RELAY_PATH && !seen.is_empty() && !seen.contains(&ends);
            if open_path.path != RELAY_PATH {
                seen.push(ends);
            }
        }
        let open_paths = self.peers[peer].open_paths.clone();
        let is_direct = |open_path: &OpenPath| {
            open_path.path != RELAY_PATH && self.links.may_carry(open_path.link)
        };
        let has_direct = open_paths.iter().any(is_direct);
        self.peers.has_several |= several;
        for open_path in open_paths {
            let Some(link) = self.links[open_path.link].as_ref() else {
                continue;
            };
            let traits = link.traits(may_pull, self.identity.settings.copy_max);
            let is_primary = self.peers[peer].send_state == SendState::Up(open_path.link);
            let is_duplicate = several
                && self.duplicate_link(peer, link.ends).is_some_and(|id| id != open_path.link);
            let spare = match (open_path.path, &link.carrier) {
                (RELAY_PATH, _) => has_direct,
                (_, Carrier::Datagram(udp_path)) => udp_path.is_suspected(),
                _ => {
                    (self.uses_udp && self.links.is_covered(peer, link.ends))
                        || (!is_primary && (!several || is_duplicate))
                }
            };
            let path = if several && link.is_stream() && open_path.path != RELAY_PATH {
                if let Carrier::Stream(stream) = &link.carrier {
                    stream.set_unsent_max(UNSENT_BYTES);
                }
                PathProperties {
                    payload_max: PIECE_BYTES,
                    eager_max: PIECE_BYTES,
                    first_piece: PIECE_BYTES,
                    ahead: true,
                    spare,
                    ..traits
                }
            } else {
                PathProperties { spare, ..traits }
            };
            self.core.channel_mut(peer).set_path(open_path.path, path);
        }
        self.core.channel_mut(peer).mark_busy();
    }

    /// The link of another direct path of `peer` between the same two addresses `ends`, if there is
    /// one.
    pub fn duplicate_link(&self, peer: Peer, ends: Option<(IpAddr, IpAddr)>) -> Option<usize> {
        let ends = ends?;
        let mut links = self.peers[peer].open_paths.iter().map(|open_path| open_path.link);
        links.find(|&id| {
            self.links[id].as_ref().is_some_and(|link| link.is_stream() && link.ends == Some(ends))
        })
    }

    /// Whether no path to `peer` delivers frames any more, as far as is known.
    pub fn is_unreachable(&self, peer: Peer) -> bool {
        let open_paths = &self.peers[peer].open_paths;
        // A link in use has been taken out of `links`, and counts as working.
        !open_paths
            .iter()
            .any(|open_path| self.links[open_path.link].as_ref().is_none_or(|link| link.works()))
    }

    /// Time since when `peer` is unreachable; `None` if `peer` is reachable or has no reconnect
    /// under way.
    pub fn unreachable_since(&mut self, peer: Peer) -> Option<Instant> {
        let is_unreachable = self.is_unreachable(peer);
        let reconnect = self.peers[peer].reconnect.as_mut()?;
        reconnect.note_unreachable(is_unreachable, Instant::now())
    }

    /// Whether `peer` has a path that is not a UDP path.
    pub fn has_connection(&self, peer: Peer) -> bool {
        let is_udp_path = |link: &Link| link.socket().is_some();
        let open_paths = &self.peers[peer].open_paths;
        open_paths
            .iter()
            .any(|open_path| !self.links[open_path.link].as_deref().is_some_and(is_udp_path))
    }

    /// Detaches `peer` from the relay's link, which other peers still use: the link copies what it
    /// holds of a frame for `peer`, and discards the rest of a payload that arrives from `peer`.
    pub fn leave_relay_link(&mut self, peer: Peer, id: usize, path: PathId) {
        let Some(link) = self.links[id].as_mut() else {
            return;
        };
        if link.inside.is_some_and(|(from, _)| from == peer) {
            link.discard_rest();
        }
        if let Carrier::Stream(stream) = &mut link.carrier
            && link.holding.take_if(|holder| *holder == peer).is_some()
        {
            stream.copy_held();
            link.blocked.push_back(peer);
            self.core.handle_flushed(peer, path);
        }
    }

    /// Suspects link `id`: the bytes that the link carried are retransmitted over another path, as
    /// far as they have not arrived.
    #[cold]
    pub fn suspect(&mut self, id: usize) {
        let Some(link) = self.links[id].as_mut() else {
            return;
        };
        let (path, Some(peer)) = (link.path, link.peer) else {
            return;
        };
        link.health.is_suspected = true;
        log!(
            Debug,
            "{}: a path is silent for {:?}",
            self.core.address(peer),
            link.health.unacked_for
        );
        if let Carrier::Stream(stream) = &mut link.carrier
            && link.holding.take_if(|holder| *holder == peer).is_some()
        {
            // The held frame may arrive over another path, and its memory may then be released.
            stream.copy_held();
            link.blocked.push_back(peer);
            self.core.handle_flushed(peer, path);
        }
        self.core.channel_mut(peer).suspect_path(path, true);
    }

    /// Ends the suspicion of link `id`, which works again.
    #[cold]
    pub fn clear_suspicion(&mut self, id: usize) {
        let Some(link) = self.links[id].as_mut() else {
            return;
        };
        let was_suspect = std::mem::take(&mut link.health.is_unresponsive);
        link.health.is_suspected = false;
        let (path, Some(peer)) = (link.path, link.peer) else {
            return;
        };
        if was_suspect {
            // The reconnect continues if another path has been lost meanwhile.
            self.peers[peer].reconnect.take_if(|reconnect| !reconnect.has_lost);
        }
        self.core.channel_mut(peer).suspect_path(path, false);
    }

    /// Handles a corrupt payload, which the sender retransmits.
    ///
    /// # Errors
    /// Too many frames arrive corrupt, or the path is lossless: of memory that both processes share
    /// the sender has nothing else.
    #[cold]
    pub fn note_corrupt(&mut self, peer: Peer, path: PathId, header: &Header) -> io::Result<()> {
        log!(Info, "{}: a frame arrived corrupt", self.core.address(peer));
        if self.core.channel(peer).is_lossless(path) {
            return Err(integrity::corrupt("a payload in shared memory is corrupt"));
        }
        self.peers[peer].count_corrupt(path);
        let is_bearable = self.core.channel_mut(peer).handle_corrupt_frame(header);
        if is_bearable { Ok(()) } else { Err(integrity::corrupt("too many frames arrive corrupt")) }
    }

    /// Discards the rest of a payload that is arriving by `path`, because it has arrived by another
    /// path.
    #[cold]
    pub fn discard_rest(&mut self, peer: Peer, path: PathId) {
        let open_paths = &self.peers[peer].open_paths;
        let Some(open_path) = open_paths.iter().find(|open_path| open_path.path == path) else {
            return;
        };
        // The link that is being read is not in `links`. That link needs no change here: its
        // arriving payload has ended.
        if let Some(link) = self.links[open_path.link].as_mut()
            && link.inside.is_some_and(|(from, _)| from == peer)
        {
            link.discard_rest();
        }
    }

    /// The candidates for a peer, in reverse order: the best is the last.
    pub fn candidates(&self, peer: Peer) -> Vec<PathCandidate> {
        let open_paths = &self.peers[peer].open_paths;
        let search = CandidateSearch {
            identity: self.identity,
            own: self.own,
            name: self.peers[peer].name,
            is_addressed: self.core.address(peer) != Address::ANONYMOUS,
            has_open_path: !open_paths.is_empty(),
            has_usable_path: open_paths
                .iter()
                .any(|open_path| self.links.may_carry(open_path.link)),
        };
        search.candidates(|address| self.peers.rails.is_advertised(peer, address))
    }

    /// Whether a connection between `ends` leads to a further address of the peer, or to a further
    /// address of this side if `is_accepted`.
    pub fn is_rail(&self, peer: Peer, ends: Option<(IpAddr, IpAddr)>, is_accepted: bool) -> bool {
        let (main, further) = (self.identity.ip, &self.identity.rails);
        let is_ours = ends.is_some_and(|(own, _)| own != main && further.contains(&own));
        (is_accepted && is_ours) || self.peers.rails.joins(peer, ends)
    }

    /// Advertises the further addresses of this side to `peer` over a new direct connection.
    pub fn advertise_rails(&mut self, peer: Peer, link: usize) {
        let Some(port) = self.own.port().filter(|_| self.own.own_format) else {
            return;
        };
        let known = self.links[link].as_ref().and_then(|link| link.ends).map(|(own, _)| own);
        for ip in &self.identity.rails {
            if Some(*ip) == known || *ip == self.identity.ip || self.identity.ip.is_loopback() {
                continue;
            }
            self.core.channel_mut(peer).advertise_address(advertisement_of(*ip, port, None));
        }
    }
}
