//! The links of an engine: transport, peer and state of each link, and the end of a link.
//!
//! Frames are sent in `transmit` and received in `receive`. What may never happen: a link touches
//! memory of an operation that has ended.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};

use landbridge_drive::checksum::Checksum;
use landbridge_drive::link::shm;
use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{PathProperties, PayloadDestination, Peer};
use landbridge_proto::limit;
use landbridge_proto::path::time::Time;
use landbridge_proto::wire::frame::HEADER_BYTES;

use super::Engine;
use super::dialling::{self, EventToken, watch};
use super::handshake::Carrier;
use super::integrity::{self, IncomingChecksum};
use super::peer_state::SendState;
use crate::log;

/// Maximum payload of one frame in a ring.
pub const RING_PAYLOAD_MAX: usize =
    shm::FRAME_BYTES_MAX - HEADER_BYTES - limit::KIND_HEADER_BYTES_MAX - limit::CHECKSUM_BYTES;
/// Messages of more bytes are read out of the sender's memory where that is allowed: one copy and a
/// system call instead of two copies.
pub const RING_EAGER_MAX: u32 = 16 << 10;
/// Maximum payload of one frame over a direct TCP connection.
const TCP_PAYLOAD_MAX: u32 = 1 << 20;
/// Messages of up to this many bytes are sent in one frame over TCP.
const TCP_EAGER_MAX: u32 = 1 << 20;
/// First piece of a longer message: the receiver's grant arrives while this piece is under way.
const TCP_FIRST_PIECE: u32 = 256 << 10;

/// The number of the path through the relay, for every peer. Direct paths have higher numbers.
pub const RELAY_PATH: PathId = PathId(0);

pub struct Link {
    pub(super) carrier: Carrier,
    /// The peer at the other end; `None`: the relay.
    pub(super) peer: Option<Peer>,
    /// The number of the path that this link is for its peers.
    pub(super) path: PathId,
    /// The addresses that a direct stream or UDP path joins: the local address and the peer's.
    pub(super) ends: Option<(IpAddr, IpAddr)>,
    /// The peer has dialled this connection.
    pub(super) is_accepted: bool,
    /// The link has sent bytes that may not be confirmed yet.
    pub(super) has_sent: bool,
    /// Time since when every check has found unconfirmed bytes.
    pub(super) unacked_since: Option<Instant>,
    /// Time without confirmation, while confirmations were possible, as of the last check.
    pub(super) unacked_for: Duration,
    /// Nothing is sent over this link while there is another one: confirmations are missing.
    pub(super) is_suspected: bool,
    /// Confirmations have been missing for so long that another connection is dialled in addition.
    pub(super) is_unresponsive: bool,
    /// When the link came up.
    pub(super) since: Instant,
    /// When something was received over the link; kept only while UDP paths are in use.
    pub(super) last_received: Time,
    /// The checksum of frames on this link.
    pub(super) sum: Checksum,
    /// The arriving payload, as far as it has been summed.
    pub(super) summing: Option<IncomingChecksum>,
    /// Peers with frames for which the link had no free space.
    pub(super) blocked: VecDeque<Peer>,
    /// The peer whose frame the link has sent only in part.
    pub(super) holding: Option<Peer>,
    /// The peer whose payload is arriving, and the destination of the payload.
    pub(super) inside: Option<(Peer, PayloadDestination)>,
    /// The errno with which the sender is given up, as soon as its payload has arrived.
    pub(super) fail_after_payload: Option<i32>,
    /// Operands of an atomic operation that are arriving.
    pub(super) scratch: Vec<u8>,
}

impl Link {
    pub fn new(carrier: Carrier, peer: Option<Peer>) -> Self {
        Self {
            carrier,
            peer,
            path: RELAY_PATH,
            ends: None,
            is_accepted: false,
            has_sent: false,
            unacked_since: None,
            unacked_for: Duration::ZERO,
            is_suspected: false,
            is_unresponsive: false,
            since: Instant::now(),
            last_received: Time(0),
            sum: Checksum::Off,
            summing: None,
            blocked: VecDeque::new(),
            holding: None,
            inside: None,
            fail_after_payload: None,
            scratch: Vec::new(),
        }
    }

    /// Adds the link to the epoll set, for incoming data.
    pub fn watch(&self, epoll: &OwnedFd, id: usize) -> io::Result<()> {
        self.set_interest(epoll, id, EventFlags::IN)
    }

    pub(super) fn set_interest(
        &self,
        epoll: &OwnedFd,
        id: usize,
        interest: EventFlags,
    ) -> io::Result<()> {
        match &self.carrier {
            Carrier::Shm(link) => watch(epoll, link.fd(), EventToken::Link(id), interest),
            Carrier::Stream(link) => watch(epoll, link.fd(), EventToken::Link(id), interest),
            Carrier::Recorded(link) => watch(epoll, link.fd(), EventToken::Link(id), interest),
            // The engine watches the socket that UDP paths share.
            Carrier::Datagram(_) | Carrier::Loopback => Ok(()),
        }
    }

    pub fn is_stream(&self) -> bool {
        matches!(self.carrier, Carrier::Stream(_))
    }

    /// The number of the socket that a UDP path shares with other UDP paths.
    #[inline]
    pub fn socket(&self) -> Option<usize> {
        match &self.carrier {
            Carrier::Datagram(udp_path) => Some(udp_path.socket()),
            _ => None,
        }
    }

    /// Whether the link has no free space. Epoll reports when there is space again; earlier
    /// attempts are useless.
    #[inline]
    pub fn is_full(&self) -> bool {
        matches!(&self.carrier, Carrier::Stream(stream) if stream.is_holding())
            || (self.is_stream() && !self.blocked.is_empty())
    }

    /// Records that `peer` has frames for this link, which has no free space.
    #[cold]
    pub(super) fn await_room(&mut self, peer: Peer) {
        if !self.blocked.contains(&peer) {
            self.blocked.push_back(peer);
        }
    }

    pub fn describe(&self) -> &'static str {
        match self.carrier {
            Carrier::Shm(_) => "shared memory",
            Carrier::Stream(_) | Carrier::Recorded(_) => "tcp",
            Carrier::Datagram(_) => "udp",
            Carrier::Loopback => "itself",
        }
    }

    /// Handles a stream that has sent only a part of a frame of `peer`. If the frame's memory may
    /// be released before the rest has left
    /// ([`OutgoingFrame::must_release_memory`](landbridge_proto::endpoint::OutgoingFrame)), the
    /// stream copies the rest.
    pub(super) fn hold(&mut self, peer: Peer, must_release_memory: bool) {
        match &mut self.carrier {
            Carrier::Stream(stream) if must_release_memory => {
                stream.copy_held();
                self.await_room(peer);
            }
            _ => self.holding = Some(peer),
        }
    }

    /// The properties of this path, for the peers that the link reaches.
    pub fn traits(&self, may_pull: bool, copy_max: u32) -> PathProperties {
        let checked = self.sum != Checksum::Off;
        if self.peer.is_none() {
            return PathProperties { checked, ..PathProperties::RELAY };
        }
        match self.carrier {
            Carrier::Shm(_) => PathProperties { checked, ..dialling::ring_path(may_pull) },
            Carrier::Datagram(ref udp_path) => {
                PathProperties { checked, ..udp_path.traits(copy_max) }
            }
            Carrier::Stream(_) | Carrier::Recorded(_) | Carrier::Loopback => PathProperties {
                payload_max: TCP_PAYLOAD_MAX,
                eager_max: TCP_EAGER_MAX,
                first_piece: TCP_FIRST_PIECE,
                pull: false,
                window: u64::MAX,
                ahead: false,
                lossless: matches!(self.carrier, Carrier::Loopback),
                checked,
                copy_max,
                spare: false,
                silent_loss: false,
                datagram: None,
                reorders: false,
            },
        }
    }
}

impl Engine {
    /// Lets epoll watch stream `id` or not; returns false if that is impossible.
    pub(super) fn set_watched(&mut self, id: usize, watched: bool) -> bool {
        let Some(link) = self.links.get(id).and_then(Option::as_ref) else {
            return false;
        };
        let Carrier::Stream(stream) = &link.carrier else {
            return false;
        };
        if stream.is_holding() || !link.blocked.is_empty() {
            return watched;
        }
        let changed = if watched {
            link.watch(&self.own.epoll, id)
        } else {
            epoll::delete(&self.own.epoll, stream.fd()).map_err(io::Error::from)
        };
        changed.is_ok()
    }

    /// Gives up the peers whose failure was found while a link was being read.
    #[cold]
    pub(super) fn fail_pending_peers(&mut self) {
        for peer in std::mem::take(&mut self.pending.dropped) {
            self.drop_relay_path(peer);
        }
        for (peer, errno) in std::mem::take(&mut self.pending.failed) {
            self.fail_peer(peer, errno);
        }
    }

    /// Gives up `peer`: its operations end, and their memory belongs to the application again, so
    /// no link may touch this memory any more. Links to the peer alone are closed. The relay's
    /// link, which other peers use too, copies the rest of a frame that it has begun to send. If a
    /// payload from the peer is arriving on the relay's link, the peer fails only after the rest of
    /// this payload.
    #[cold]
    pub(super) fn fail_peer(&mut self, peer: Peer, errno: i32) {
        self.finish_all_statistics(peer);
        let peer_state = &mut self.peers[peer];
        (peer_state.send_state, peer_state.reconnect) = (SendState::Closed, None);
        peer_state.open_paths.clear();
        for id in 0..self.links.len() {
            let Some(link) = self.links[id].as_mut() else {
                continue;
            };
            if link.peer == Some(peer) {
                self.close_link(id);
                continue;
            }
            if let Carrier::Stream(stream) = &mut link.carrier
                && link.holding == Some(peer)
            {
                stream.copy_held();
            }
            if link.inside.is_some_and(|(from, _)| from == peer) {
                link.fail_after_payload = Some(errno);
                return;
            }
        }
        self.forget_tokens(peer);
        self.core.fail(peer, errno);
        self.buffers.early.retain(|&(of, _), _| of != peer);
        self.drain_actions();
    }

    /// Takes link `id` out of use.
    pub(super) fn close_link(&mut self, id: usize) -> Option<Box<Link>> {
        let link = self.links.remove(id)?;
        if let Carrier::Datagram(udp_path) = &link.carrier {
            self.forget_udp_path(id, udp_path);
        }
        Some(link)
    }

    /// Handles the end or failure of link `id`.
    #[cold]
    pub(super) fn link_down(&mut self, id: usize, error: &io::Error) {
        if self.is_recorded() && self.uplink.link() == Some(id) {
            self.end_if_refused();
        }
        let Some(mut link) = self.close_link(id) else {
            return;
        };
        let Some(peer) = link.peer else {
            log!(Warn, "the connection to the relay is lost: {error}");
            let (fail_after_payload, inside) = (link.fail_after_payload.take(), link.inside.take());
            if let (Some(errno), Some((peer, _))) = (fail_after_payload, inside) {
                self.fail_peer(peer, errno);
            }
            return self.relay_lost(id, &link, integrity::was_corrupt(error));
        };
        // The end of a shared-memory link is the end of a process, and a peer that has broken the
        // protocol would break it again.
        let is_final = matches!(link.carrier, Carrier::Shm(_) | Carrier::Loopback)
            || error.kind() == io::ErrorKind::InvalidData;
        let ends = link.ends;
        if integrity::was_corrupt(error) {
            self.count_corrupt(peer, link.path);
        }
        self.finish_statistics(peer, link.path, &link, !self.core.channel(peer).has_left());
        drop(link);
        let address = self.core.address(peer);
        if error.kind() == io::ErrorKind::InvalidData {
            self.core.channel_mut(peer).revoke_goodbye();
        }
        if !is_final && !self.core.channel(peer).has_left() {
            return self.lose_path(peer, id, ends, error);
        }
        self.drain_links_of(peer);
        if self.core.channel(peer).has_left() {
            log!(Debug, "{address} has left");
        } else {
            log!(Warn, "the connection to {address} is lost: {error}");
        }
        self.fail_peer(peer, libc::ECONNRESET);
    }

    /// Receives what the other links of `peer` have brought. When both sides have dialled there are
    /// two links, and the peer's frames on one of them may answer frames on the other.
    fn drain_links_of(&mut self, peer: Peer) {
        for id in 0..self.links.len() {
            if self.links[id].as_ref().is_some_and(|link| link.peer == Some(peer)) {
                while self.read_ring(id) > 0 {}
                while self.read_stream(id) > 0 {}
            }
        }
    }
}
