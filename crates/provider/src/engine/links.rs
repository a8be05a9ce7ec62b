//! The links of an engine: what each is, whom it leads to, and its end.
//!
//! Frames go out in `transmit` and come in in `receive`. What may never happen: a link touches memory of an operation that
//! has ended.

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

/// Payload of one frame in a ring.
pub const RING_PAYLOAD_MAX: usize =
    shm::FRAME_BYTES_MAX - HEADER_BYTES - limit::KIND_HEADER_BYTES_MAX - limit::CHECKSUM_BYTES;
/// Messages beyond this are read out of the sender's memory where that is allowed: one copy and a system call
/// instead of two copies.
pub const RING_EAGER_MAX: u32 = 16 << 10;
/// Payload of one frame over a direct TCP connection.
const TCP_PAYLOAD_MAX: u32 = 1 << 20;
/// Messages up to this go out whole over TCP.
const TCP_EAGER_MAX: u32 = 1 << 20;
/// First piece of longer ones: the receiver's grant arrives while it is under way.
const TCP_FIRST_PIECE: u32 = 256 << 10;

/// The number of the path through the relay, for every peer. Direct ones come after it.
pub const RELAY_PATH: PathId = PathId(0);

pub struct Link {
    pub(super) carrier: Carrier,
    /// Whom it leads to; `None`: the relay.
    pub(super) peer: Option<Peer>,
    /// The number of the path that it is for its peers.
    pub(super) path: PathId,
    /// The addresses that it joins, if it is a direct stream: ours and the peer's.
    pub(super) ends: Option<(IpAddr, IpAddr)>,
    /// The peer has dialled.
    pub(super) is_accepted: bool,
    /// It has sent something that may not be confirmed yet.
    pub(super) has_sent: bool,
    /// Since when something that it has sent was unconfirmed at each look.
    pub(super) unacked_since: Option<Instant>,
    /// For how long nothing was confirmed while something could have been, as of the last look.
    pub(super) unacked_for: Duration,
    /// So long that nothing goes out by it while there is another.
    pub(super) is_suspected: bool,
    /// For so long that another connection is tried beside it.
    pub(super) is_unresponsive: bool,
    /// When it came up.
    pub(super) since: Instant,
    /// When something came by it; kept only while there are lines of datagrams.
    pub(super) last_received: Time,
    /// Frames are summed this way.
    pub(super) sum: Checksum,
    /// The payload that is arriving, as far as it has been summed.
    pub(super) summing: Option<IncomingChecksum>,
    /// Peers that have frames for which it had no room.
    pub(super) blocked: VecDeque<Peer>,
    /// Whose frame it has sent only in part.
    pub(super) holding: Option<Peer>,
    /// Whose payload is arriving.
    pub(super) inside: Option<(Peer, PayloadDestination)>,
    /// Its sender is to be given up with this errno, as soon as that has arrived.
    pub(super) fail_after_payload: Option<i32>,
    /// Operands that are arriving.
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

    /// Has epoll tell of it.
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
            // Their socket is watched.
            Carrier::Datagram(_) | Carrier::Loopback => Ok(()),
        }
    }

    pub fn is_stream(&self) -> bool {
        matches!(self.carrier, Carrier::Stream(_))
    }

    /// The number of the socket that a line of datagrams shares with others.
    #[inline]
    pub fn socket(&self) -> Option<usize> {
        match &self.carrier {
            Carrier::Datagram(udp_path) => Some(udp_path.socket()),
            _ => None,
        }
    }

    /// It has no room, and says when it has: there is no use in trying before.
    #[inline]
    pub fn is_full(&self) -> bool {
        matches!(&self.carrier, Carrier::Stream(stream) if stream.is_holding())
            || (self.is_stream() && !self.blocked.is_empty())
    }

    /// `peer` has frames for when it has room.
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

    /// The stream has sent only a part of a frame of `peer`, which may lie in memory that is given back before
    /// the rest has left ([`OutgoingFrame::must_release_memory`](landbridge_proto::endpoint::OutgoingFrame)).
    pub(super) fn hold(&mut self, peer: Peer, must_release_memory: bool) {
        match &mut self.carrier {
            Carrier::Stream(stream) if must_release_memory => {
                stream.copy_held();
                self.await_room(peer);
            }
            _ => self.holding = Some(peer),
        }
    }

    /// What the path can do, for peers behind it.
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
    /// Has epoll tell of stream `id` or not; false if that cannot be had.
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
            link.watch(&self.epoll, id)
        } else {
            epoll::delete(&self.epoll, stream.fd()).map_err(io::Error::from)
        };
        changed.is_ok()
    }

    /// Gives up those for whom reading a link brought the reason.
    #[cold]
    pub(super) fn fail_pending_peers(&mut self) {
        for peer in std::mem::take(&mut self.dropped) {
            self.drop_relay_path(peer);
        }
        for (peer, errno) in std::mem::take(&mut self.failed_peers) {
            self.fail_peer(peer, errno);
        }
    }

    /// Gives up `peer`: its operations end, and their memory is the application's again. So no link may touch it any more.
    /// Those to the peer alone are closed. The relay's, which others use too, gets a copy of what it has begun to send; and
    /// if it is in the middle of a payload from the peer, the rest of that is taken in first.
    #[cold]
    pub(super) fn fail_peer(&mut self, peer: Peer, errno: i32) {
        self.finish_all_statistics(peer);
        let peer_state = &mut self.peer_states[peer.0 as usize];
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
        self.early.retain(|&(of, _), _| of != peer);
        self.drain_actions();
    }

    /// Takes link `id` out of use.
    pub(super) fn close_link(&mut self, id: usize) -> Option<Box<Link>> {
        let link = self.links[id].take()?;
        self.rings.retain(|&ring| ring != id);
        self.full_rings.retain(|&ring| ring != id);
        match &link.carrier {
            Carrier::Stream(_) => {
                self.streams -= 1;
                self.hot_stream = self.hot_stream.filter(|&hot| hot != id);
            }
            Carrier::Datagram(udp_path) => self.forget_udp_path(id, udp_path),
            Carrier::Shm(_) | Carrier::Recorded(_) | Carrier::Loopback => (),
        }
        Some(link)
    }

    /// Link `id` is broken or has ended.
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
        // What a ring holds outlives neither of its processes, nor does it break; and who breaks the protocol breaks it again.
        let is_final = matches!(link.carrier, Carrier::Shm(_) | Carrier::Loopback)
            || error.kind() == io::ErrorKind::InvalidData;
        let ends = link.ends;
        if integrity::was_corrupt(error) {
            self.count_corrupt(peer, link.path);
        }
        self.finish_statistics(peer, link.path, &link, !self.core.has_left(peer));
        drop(link);
        let address = self.core.address(peer);
        if error.kind() == io::ErrorKind::InvalidData {
            self.core.revoke_goodbye(peer);
        }
        if !is_final && !self.core.has_left(peer) {
            return self.lose_path(peer, id, ends, error);
        }
        self.drain_links_of(peer);
        if self.core.has_left(peer) {
            log!(Debug, "{address} has left");
        } else {
            log!(Warn, "the connection to {address} is lost: {error}");
        }
        self.fail_peer(peer, libc::ECONNRESET);
    }

    /// Takes in what the other links of `peer` brought: when both sides dialled there are two, and what it sent on
    /// one may be the answer to what went out on the other.
    fn drain_links_of(&mut self, peer: Peer) {
        for id in 0..self.links.len() {
            if self.links[id].as_ref().is_some_and(|link| link.peer == Some(peer)) {
                while self.read_ring(id) > 0 {}
                while self.read_stream(id) > 0 {}
            }
        }
    }
}
