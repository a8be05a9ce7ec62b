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

use landbridge_drive::check::Sum;
use landbridge_drive::link::shm;
use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{Path, Peer, Place};
use landbridge_proto::limit;
use landbridge_proto::path::time::Time;
use landbridge_proto::wire::frame::HEADER_BYTES;

use super::Engine;
use super::handshake::Carrier;
use super::integrity::{self, Summing};
use super::neighbours::Out;
use super::peers::{self, Token, watch};
use crate::log;

/// Payload of one frame in a ring.
pub const RING_PAYLOAD_MAX: usize =
    shm::FRAME_BYTES_MAX - HEADER_BYTES - limit::HEAD_BYTES_MAX - limit::CHECK_BYTES;
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
    pub(super) is_theirs: bool,
    /// It has sent something that may not be confirmed yet.
    pub(super) has_sent: bool,
    /// Since when something that it has sent was unconfirmed at each look.
    pub(super) waits_since: Option<Instant>,
    /// For how long nothing was confirmed while something could have been, as of the last look.
    pub(super) silent: Duration,
    /// So long that nothing goes out by it while there is another.
    pub(super) is_doubted: bool,
    /// For so long that another connection is tried beside it.
    pub(super) is_suspect: bool,
    /// When it came up.
    pub(super) since: Instant,
    /// When something came by it; kept only while there are lines of datagrams.
    pub(super) heard: Time,
    /// Frames are summed this way.
    pub(super) sum: Sum,
    /// The payload that is arriving, as far as it has been summed.
    pub(super) summing: Option<Summing>,
    /// Peers that have frames for which it had no room.
    pub(super) blocked: VecDeque<Peer>,
    /// Whose frame it has sent only in part.
    pub(super) holding: Option<Peer>,
    /// Whose payload is arriving.
    pub(super) inside: Option<(Peer, Place)>,
    /// Its sender is to be given up with this errno, as soon as that has arrived.
    pub(super) doomed: Option<i32>,
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
            is_theirs: false,
            has_sent: false,
            waits_since: None,
            silent: Duration::ZERO,
            is_doubted: false,
            is_suspect: false,
            since: Instant::now(),
            heard: Time(0),
            sum: Sum::Off,
            summing: None,
            blocked: VecDeque::new(),
            holding: None,
            inside: None,
            doomed: None,
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
            Carrier::Shm(link) => watch(epoll, link.fd(), Token::Link(id), interest),
            Carrier::Stream(link) => watch(epoll, link.fd(), Token::Link(id), interest),
            Carrier::Whole(link) => watch(epoll, link.fd(), Token::Link(id), interest),
            // Their socket is watched.
            Carrier::Datagram(_) | Carrier::Loop => Ok(()),
        }
    }

    pub fn is_stream(&self) -> bool {
        matches!(self.carrier, Carrier::Stream(_))
    }

    /// The number of the socket that a line of datagrams shares with others.
    #[inline]
    pub fn socket(&self) -> Option<usize> {
        match &self.carrier {
            Carrier::Datagram(line) => Some(line.socket()),
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
            Carrier::Stream(_) | Carrier::Whole(_) => "tcp",
            Carrier::Datagram(_) => "udp",
            Carrier::Loop => "itself",
        }
    }

    /// The stream has sent only a part of a frame of `peer`, which may lie in memory that is given back before
    /// the rest has left ([`Outgoing::must_let_go`](landbridge_proto::endpoint::Outgoing)).
    pub(super) fn hold(&mut self, peer: Peer, must_let_go: bool) {
        match &mut self.carrier {
            Carrier::Stream(stream) if must_let_go => {
                stream.own_held();
                self.await_room(peer);
            }
            _ => self.holding = Some(peer),
        }
    }

    /// What the path can do, for peers behind it.
    pub fn traits(&self, may_pull: bool, copy_max: u32) -> Path {
        let checked = self.sum != Sum::Off;
        if self.peer.is_none() {
            return Path { checked, ..Path::RELAY };
        }
        match self.carrier {
            Carrier::Shm(_) => Path { checked, ..peers::ring_path(may_pull) },
            Carrier::Datagram(ref line) => Path { checked, ..line.traits(copy_max) },
            Carrier::Stream(_) | Carrier::Whole(_) | Carrier::Loop => Path {
                payload_max: TCP_PAYLOAD_MAX,
                eager_max: TCP_EAGER_MAX,
                first_piece: TCP_FIRST_PIECE,
                pull: false,
                window: u64::MAX,
                ahead: false,
                lossless: matches!(self.carrier, Carrier::Loop),
                checked,
                copy_max,
                spare: false,
                silent: false,
                datagram: None,
                overtakes: false,
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
    pub(super) fn fail_given_up(&mut self) {
        for peer in std::mem::take(&mut self.dropped) {
            self.drop_relay_route(peer);
        }
        for (peer, errno) in std::mem::take(&mut self.given_up) {
            self.fail_peer(peer, errno);
        }
    }

    /// Gives up `peer`: its operations end, and their memory is the application's again. So no link may touch it any more.
    /// Those to the peer alone are closed. The relay's, which others use too, gets a copy of what it has begun to send; and
    /// if it is in the middle of a payload from the peer, the rest of that is taken in first.
    #[cold]
    pub(super) fn fail_peer(&mut self, peer: Peer, errno: i32) {
        self.settle_accounts(peer);
        let neighbour = &mut self.neighbours[peer.0 as usize];
        (neighbour.out, neighbour.repair) = (Out::Gone, None);
        neighbour.routes.clear();
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
                stream.own_held();
            }
            if link.inside.is_some_and(|(from, _)| from == peer) {
                link.doomed = Some(errno);
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
            Carrier::Datagram(line) => self.forget_line(id, line),
            Carrier::Shm(_) | Carrier::Whole(_) | Carrier::Loop => (),
        }
        Some(link)
    }

    /// Link `id` is broken or has ended.
    #[cold]
    pub(super) fn link_down(&mut self, id: usize, error: &io::Error) {
        if self.is_recorded() && self.relay.link() == Some(id) {
            self.hear_last_word();
        }
        let Some(mut link) = self.close_link(id) else {
            return;
        };
        let Some(peer) = link.peer else {
            log!(Warn, "the connection to the relay is lost: {error}");
            let (doomed, inside) = (link.doomed.take(), link.inside.take());
            if let (Some(errno), Some((peer, _))) = (doomed, inside) {
                self.fail_peer(peer, errno);
            }
            return self.relay_lost(id, &link, integrity::was_spoilt(error));
        };
        // What a ring holds outlives neither of its processes, nor does it break; and who breaks the protocol breaks it again.
        let is_final = matches!(link.carrier, Carrier::Shm(_) | Carrier::Loop)
            || error.kind() == io::ErrorKind::InvalidData;
        let ends = link.ends;
        if integrity::was_spoilt(error) {
            self.count_spoilt(peer, link.path);
        }
        self.settle_account(peer, link.path, &link, !self.core.has_left(peer));
        drop(link);
        let address = self.core.address(peer);
        if error.kind() == io::ErrorKind::InvalidData {
            self.core.revoke_goodbye(peer);
        }
        if !is_final && !self.core.has_left(peer) {
            return self.lose_route(peer, id, ends, error);
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
