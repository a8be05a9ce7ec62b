//! The links of an engine: what each is, whom it leads to, and its end.
//!
//! Frames go out in `transmit` and come in in `receive`. What may never happen: a link touches memory of an operation that
//! has ended.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;

use rustix::event::epoll::{self, EventFlags};

use landbridge_drive::link::shm;
use landbridge_proto::endpoint::{Path, Peer, Place};
use landbridge_proto::limit;
use landbridge_proto::wire::frame::HEADER_BYTES;

use super::Engine;
use super::handshake::Carrier;
use super::neighbours::Out;
use super::peers::{self, Token, watch};
use crate::log;

/// Payload of one frame in a ring.
pub const RING_PAYLOAD_MAX: usize = shm::FRAME_BYTES_MAX - HEADER_BYTES - limit::HEAD_BYTES_MAX;
/// Messages beyond this are read out of the sender's memory where that is allowed: one copy and a system call
/// instead of two copies.
pub const RING_EAGER_MAX: u32 = 16 << 10;
/// Payload of one frame over a direct TCP connection.
const TCP_PAYLOAD_MAX: u32 = 1 << 20;
/// Messages up to this go out whole over TCP.
const TCP_EAGER_MAX: u32 = 1 << 20;
/// First piece of longer ones: the receiver's grant arrives while it is under way.
const TCP_FIRST_PIECE: u32 = 256 << 10;
pub struct Link {
    pub(super) carrier: Carrier,
    /// Whom it leads to; `None`: the relay.
    pub(super) peer: Option<Peer>,
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
            Carrier::Loop => Ok(()),
        }
    }

    pub fn describe(&self) -> &'static str {
        match self.carrier {
            Carrier::Shm(_) => "shared memory",
            Carrier::Stream(_) => "tcp",
            Carrier::Loop => "itself",
        }
    }

    /// What the path can do, for peers behind it.
    pub fn path(&self, may_pull: bool) -> Path {
        if self.peer.is_none() {
            return Path::RELAY;
        }
        match self.carrier {
            Carrier::Shm(_) => peers::ring_path(may_pull),
            Carrier::Stream(_) | Carrier::Loop => Path {
                payload_max: TCP_PAYLOAD_MAX,
                eager_max: TCP_EAGER_MAX,
                first_piece: TCP_FIRST_PIECE,
                pull: false,
                window: u64::MAX,
                ahead: false,
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
        for (peer, errno) in std::mem::take(&mut self.given_up) {
            self.fail_peer(peer, errno);
        }
    }

    /// Gives up `peer`: its operations end, and their memory is the application's again. So no link may touch it any more.
    /// Those to the peer alone are closed. The relay's, which others use too, gets a copy of what it has begun to send; and
    /// if it is in the middle of a payload from the peer, the rest of that is taken in first.
    #[cold]
    pub(super) fn fail_peer(&mut self, peer: Peer, errno: i32) {
        let neighbour = &mut self.neighbours[peer.0 as usize];
        (neighbour.out, neighbour.better) = (Out::Gone, None);
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
        self.core.fail(peer, errno);
        self.drain_actions();
    }

    /// Takes link `id` out of use.
    fn close_link(&mut self, id: usize) -> Option<Box<Link>> {
        let link = self.links[id].take()?;
        self.rings.retain(|&ring| ring != id);
        self.full_rings.retain(|&ring| ring != id);
        if let Carrier::Stream(_) = link.carrier {
            self.streams -= 1;
            self.hot_stream = self.hot_stream.filter(|&hot| hot != id);
        }
        Some(link)
    }

    /// Link `id` is broken or has ended.
    #[cold]
    pub(super) fn link_down(&mut self, id: usize, error: &io::Error) {
        let Some(mut link) = self.close_link(id) else {
            return;
        };
        let Some(peer) = link.peer else {
            log!(Warn, "the connection to the relay is lost: {error}");
            let (doomed, inside) = (link.doomed.take(), link.inside.take());
            drop(link);
            if let (Some(errno), Some((peer, _))) = (doomed, inside) {
                self.fail_peer(peer, errno);
            }
            return self.relay_gone_from(id);
        };
        drop(link);
        self.drain_links_of(peer);
        let address = self.core.address(peer);
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

    fn relay_gone_from(&mut self, id: usize) {
        for neighbour in &mut self.neighbours {
            if neighbour.out == Out::Up(id) {
                neighbour.out = Out::AwaitRelay;
            }
        }
        self.relay_gone();
    }
}
