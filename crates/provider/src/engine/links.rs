//! Frames out and in.
//!
//! Out: whatever the protocol has for a peer goes to its link until the link is full; then the peer waits in the
//! link's line. In: a frame's header and head are shown to the protocol, which says where the
//! payload belongs; the payload goes there directly.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;

use rustix::event::epoll::{self, EventFlags};

use landbridge_drive::link::shm;
use landbridge_drive::link::stream::{PIECES_MAX, Piece, Sent};
use landbridge_proto::endpoint::{Memory, Passing, Path, Peer, Place};
use landbridge_proto::limit;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind as FrameKind};
use landbridge_proto::wire::head::Head;
use landbridge_proto::wire::hello::Introduction;

use super::Engine;
use super::handshake::Carrier;
use super::memory::Bytes;
use super::neighbours::Out;
use super::peers::{self, Token, watch};
use super::request::{Completion, Kind, SendRequest};
use crate::abi;
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
/// Reads of one stream before others get their turn.
const READS_PER_TURN: usize = 8;
/// Frames of one ring before others get their turn.
const FRAMES_PER_TURN: usize = 32;

pub struct Link {
    pub carrier: Carrier,
    /// Whom it leads to; `None`: the relay.
    peer: Option<Peer>,
    /// Peers that have frames for which it had no room.
    blocked: VecDeque<Peer>,
    /// Whose frame it has sent only in part.
    holding: Option<Peer>,
    /// Whose payload is arriving.
    inside: Option<(Peer, Place)>,
    /// Its sender is to be given up with this errno, as soon as that has arrived.
    doomed: Option<i32>,
    /// Operands that are arriving.
    scratch: Vec<u8>,
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

    fn set_interest(&self, epoll: &OwnedFd, id: usize, interest: EventFlags) -> io::Result<()> {
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

    /// Sends whatever can be sent.
    #[inline]
    pub(super) fn flush(&mut self) {
        while let Some(peer) = self.core.next_busy() {
            self.transmit(peer);
        }
    }

    #[inline]
    fn transmit(&mut self, peer: Peer) {
        if let Some(better) = self.neighbours[peer.0 as usize].better
            && self.core.is_settled(peer)
        {
            self.use_link(peer, better);
        }
        let id = match self.neighbours[peer.0 as usize].out {
            Out::Up(id) => id,
            Out::Unknown => return self.dial(peer),
            Out::Dialling | Out::AwaitTurn | Out::AwaitRelay => return,
            Out::Gone => return self.fail_peer(peer, libc::ECONNRESET),
        };
        let Some(mut link) = self.links[id].take() else {
            return;
        };
        let outcome = self.transmit_on(&mut link, id, peer);
        self.links[id] = Some(link);
        self.drain_actions();
        if let Err(error) = outcome {
            // What the peer sent before it went is still there to be read, its goodbye for one.
            while self.read_stream(id) > 0 {}
            self.link_down(id, &error);
        }
    }

    /// The short way of an injected message: straight to the link, if nothing is in the way. False: take the long way.
    #[inline]
    pub(super) fn pass(&mut self, peer: Peer, request: &SendRequest) -> bool {
        let neighbour = &self.neighbours[peer.0 as usize];
        let (Out::Up(id), None) = (neighbour.out, neighbour.better) else {
            return false;
        };
        let Some(link) = self.links[id].as_mut() else {
            return false;
        };
        let memory = Bytes::borrow(request.payload);
        let size = memory.size();
        let passing = Passing { peer, tag: request.tag, data: request.data, size };
        let Some(frame) = self.core.pass(&passing) else {
            return false;
        };
        let pieces = memory.range(0, size);
        let sent = match &mut link.carrier {
            Carrier::Shm(ring) => send_to_ring(ring, frame.front(), pieces.as_slice()),
            // SAFETY: the memory is the caller's during this call; what is held is copied below.
            Carrier::Stream(stream) => {
                match unsafe { stream.send(frame.front(), pieces.as_slice()) } {
                    Ok(sent) => sent,
                    // The long way meets the same error and deals with it.
                    Err(_) => return false,
                }
            }
            Carrier::Loop => return false,
        };
        if sent == Sent::Busy {
            return false;
        }
        if sent == Sent::Held {
            if let Carrier::Stream(stream) = &mut link.carrier {
                stream.own_held();
            }
            link.holding = Some(peer);
            // If epoll cannot be told, the next attempt to send finds out.
            let _ = link.set_interest(&self.epoll, id, EventFlags::IN | EventFlags::OUT);
        }
        self.core.passed(&passing);
        let kind = if request.tag.is_some() { Kind::TaggedSend } else { Kind::Send };
        self.sink.complete(Completion::quiet(kind, request.context));
        true
    }

    fn transmit_on(&mut self, link: &mut Link, id: usize, peer: Peer) -> io::Result<()> {
        if let Carrier::Loop = link.carrier {
            return self.transmit_to_self(peer);
        }
        while let Some(frame) = self.core.poll_transmit(peer) {
            let pieces = frame.payload.map(|(memory, at, len)| memory.range(at, len));
            let pieces = pieces.as_ref().map_or(&[][..], |pieces| pieces.as_slice());
            let sent = match &mut link.carrier {
                Carrier::Shm(ring) => send_to_ring(ring, frame.front(), pieces),
                // SAFETY: the memory is valid until the operation is done, which `transmitted` or `handle_flushed` tells.
                Carrier::Stream(stream) => unsafe { stream.send(frame.front(), pieces) }?,
                Carrier::Loop => return Ok(()),
            };
            match sent {
                Sent::All => self.core.transmitted(peer, true),
                Sent::Held => {
                    self.core.transmitted(peer, false);
                    link.holding = Some(peer);
                    return link.set_interest(&self.epoll, id, EventFlags::IN | EventFlags::OUT);
                }
                Sent::Busy => {
                    link.blocked.push_back(peer);
                    if let Carrier::Shm(_) = link.carrier {
                        self.full_rings.push(id);
                        return Ok(());
                    }
                    return link.set_interest(&self.epoll, id, EventFlags::IN | EventFlags::OUT);
                }
            }
            self.drain_actions();
        }
        Ok(())
    }

    fn transmit_to_self(&mut self, peer: Peer) -> io::Result<()> {
        while let Some(frame) = self.core.poll_transmit(peer) {
            let front = frame.front().to_vec();
            let payload = frame.payload.map(|(memory, at, len)| (memory.clone(), at, len));
            self.core.transmitted(peer, true);
            let mut bytes = front;
            if let Some((memory, at, len)) = payload {
                for piece in memory.range(at, len).as_slice() {
                    // SAFETY: the memory is the sender's, who has not been told that it is done.
                    bytes.extend_from_slice(unsafe {
                        std::slice::from_raw_parts(piece.base, piece.len)
                    });
                }
            }
            self.drain_actions();
            self.take_frame(Some(peer), &bytes)?;
        }
        Ok(())
    }

    /// A stream takes bytes again.
    pub(super) fn handle_writable(&mut self, id: usize) {
        let Some(link) = self.links.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        let Carrier::Stream(stream) = &mut link.carrier else {
            return;
        };
        match stream.flush() {
            Ok(false) => return,
            Ok(true) => (),
            Err(error) => return self.link_down(id, &error),
        }
        if let Some(peer) = link.holding.take() {
            self.core.handle_flushed(peer);
            self.core.mark_busy(peer);
        }
        for peer in std::mem::take(&mut link.blocked) {
            self.core.mark_busy(peer);
        }
        if let Err(error) = link.set_interest(&self.epoll, id, EventFlags::IN) {
            return self.link_down(id, &error);
        }
        self.drain_actions();
        self.flush();
    }

    /// Rings that were full may have room.
    #[inline]
    pub(super) fn retry_full_rings(&mut self) {
        for id in std::mem::take(&mut self.full_rings) {
            let Some(link) = self.links[id].as_mut() else {
                continue;
            };
            for peer in std::mem::take(&mut link.blocked) {
                self.core.mark_busy(peer);
            }
        }
    }

    /// Takes in what has arrived in the ring of link `id`; the number of frames.
    #[inline]
    pub(super) fn poll_ring(&mut self, id: usize) -> usize {
        let Some(link) = self.links[id].as_mut() else {
            return 0;
        };
        // The usual case, kept short: nothing there.
        if let Carrier::Shm(ring) = &mut link.carrier
            && matches!(ring.peek(), Ok(None))
        {
            return 0;
        }
        self.read_ring(id)
    }

    fn read_ring(&mut self, id: usize) -> usize {
        let Some(mut link) = self.links[id].take() else {
            return 0;
        };
        let mut frames = 0;
        let outcome = self.read_frames(&mut link, &mut frames);
        self.links[id] = Some(link);
        if !self.given_up.is_empty() {
            self.fail_given_up();
        }
        if let Err(error) = outcome {
            self.link_down(id, &error);
        }
        frames
    }

    fn read_frames(&mut self, link: &mut Link, frames: &mut usize) -> io::Result<()> {
        let peer = link.peer;
        let Carrier::Shm(ring) = &mut link.carrier else {
            return Ok(());
        };
        while *frames < FRAMES_PER_TURN
            && let Some(frame) = ring.peek()?
        {
            self.take_frame(peer, frame)?;
            ring.consume();
            *frames += 1;
        }
        Ok(())
    }

    /// Takes in a whole frame.
    fn take_frame(&mut self, from: Option<Peer>, frame: &[u8]) -> io::Result<()> {
        let header = Header::parse(frame).map_err(invalid)?;
        let body = frame
            .get(HEADER_BYTES..HEADER_BYTES + header.length as usize)
            .ok_or_else(|| fault("a frame is cut off"))?;
        let Some(peer) = self.sender(from, &header)? else {
            return Ok(());
        };
        let place = self.core.handle_frame(peer, header, body).map_err(|bad| fault(bad.0))?;
        let payload = &body[Head::size(header.kind, header.flags)..];
        self.put(peer, place, payload);
        self.end_payload(peer);
        Ok(())
    }

    /// The peer a frame is from; `None` if it needs no further treatment.
    #[inline]
    fn sender(&mut self, from: Option<Peer>, header: &Header) -> io::Result<Option<Peer>> {
        if let Some(peer) = from {
            return Ok(Some(peer));
        }
        if header.target != self.own.address {
            return Err(fault("the relay delivers a frame for somebody else"));
        }
        let peer = self.peer_addressed(header.source);
        if header.kind == FrameKind::Unreachable {
            self.handle_unreachable(peer);
            return Ok(None);
        }
        Ok(Some(peer))
    }

    /// The relay could not deliver a frame. For a peer that has left in good order that is no news: it was the last
    /// confirmation, which nobody needs any more.
    #[cold]
    fn handle_unreachable(&mut self, peer: Peer) {
        if !self.core.has_left(peer) {
            log!(Warn, "the relay cannot reach peer {:?}", self.core.address(peer));
        }
        self.given_up.push((peer, libc::EHOSTUNREACH));
    }

    /// Gives up those for whom reading a link brought the reason.
    #[cold]
    fn fail_given_up(&mut self) {
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

    #[inline]
    fn end_payload(&mut self, peer: Peer) {
        self.core.handle_payload(peer);
        self.drain_actions();
    }

    /// Copies a whole payload to its place.
    #[inline]
    fn put(&mut self, peer: Peer, place: Place, payload: &[u8]) {
        match place {
            Place::Nowhere => (),
            Place::Receive { .. } | Place::Answer { .. } => {
                if let Some((memory, at, take)) = self.core.place_memory(place) {
                    let take = payload.len().min(take.min(payload.len() as u64) as usize);
                    // SAFETY: the application's memory until the completion, which comes later.
                    unsafe { memory.fill(at, &payload[..take]) };
                }
            }
            Place::Store { store, size } if size == payload.len() as u64 => {
                if size > 0 {
                    self.keep_store(store, payload.into());
                }
            }
            Place::Store { .. } | Place::Stored { .. } => {
                let base = self.store_memory(place);
                // SAFETY: the store holds what its message announced, of which the protocol places each byte once.
                unsafe { payload.as_ptr().copy_to_nonoverlapping(base, payload.len()) };
            }
            Place::Region { op, key, offset } => {
                if let Some(base) = self.region(peer, op, key, offset, payload.len()) {
                    // SAFETY: `region` found all of it inside a registered region.
                    unsafe { payload.as_ptr().copy_to_nonoverlapping(base, payload.len()) };
                }
            }
            Place::Scratch => {
                self.scratch.clear();
                self.scratch.extend_from_slice(payload);
            }
        }
    }

    /// Where a payload for `place` begins in its store, which is made if it is new.
    fn store_memory(&mut self, place: Place) -> *mut u8 {
        match place {
            Place::Store { store, size } => self.keep_store(store, vec![0; size as usize].into()),
            Place::Stored { store, at } => self.stored_at(store, at),
            _ => unreachable!("only stores have store memory"),
        }
    }

    /// Registered memory for a peer's write; if there is none, the peer is told.
    fn region(
        &mut self,
        peer: Peer,
        op: u32,
        key: u64,
        offset: u64,
        len: usize,
    ) -> Option<*mut u8> {
        match self.mr.resolve(key, offset, len, abi::REMOTE_WRITE) {
            Ok(base) => Some(base),
            Err(errno) => {
                self.core.refuse(peer, op, errno.0);
                None
            }
        }
    }

    /// Where a payload of `len` bytes goes that has not arrived whole: pieces of memory, then bytes to skip.
    fn target(&mut self, link: &mut Link, peer: Peer, place: Place, len: usize) -> (Target, usize) {
        let mut target = Target::default();
        let taken = match place {
            Place::Nowhere => 0,
            Place::Receive { .. } | Place::Answer { .. } => {
                let Some((memory, at, take)) = self.core.place_memory(place) else {
                    return (target, len);
                };
                let take = take.min(len as u64);
                target.extend(memory.range(at, take).as_slice());
                take as usize
            }
            Place::Store { .. } | Place::Stored { .. } => {
                let base = self.store_memory(place);
                target.push(Piece { base, len });
                len
            }
            Place::Region { op, key, offset } => match self.region(peer, op, key, offset, len) {
                Some(base) => {
                    target.push(Piece { base, len });
                    len
                }
                None => 0,
            },
            Place::Scratch => {
                link.scratch.clear();
                link.scratch.resize(len, 0);
                target.push(Piece { base: link.scratch.as_mut_ptr(), len });
                len
            }
        };
        (target, len - taken)
    }

    /// Reads what has arrived on stream `id`; the number of reads that brought something.
    pub(super) fn read_stream(&mut self, id: usize) -> usize {
        let Some(mut link) = self.links.get_mut(id).and_then(Option::take) else {
            return 0;
        };
        let mut stage = std::mem::take(&mut self.stage);
        let mut reads = 0;
        let outcome = self.read_turn(&mut link, &mut stage, &mut reads);
        self.stage = stage;
        self.links[id] = Some(link);
        if !self.given_up.is_empty() {
            self.fail_given_up();
        }
        match outcome {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => (),
            Err(error) => self.link_down(id, &error),
            Ok(()) => (),
        }
        reads
    }

    fn read_turn(
        &mut self,
        link: &mut Link,
        stage: &mut [u8],
        reads: &mut usize,
    ) -> io::Result<()> {
        while *reads < READS_PER_TURN {
            let Carrier::Stream(stream) = &mut link.carrier else {
                return Ok(());
            };
            let read = match stream.read(stage) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            *reads += 1;
            if read.ended
                && let Some((peer, place)) = link.inside.take()
            {
                if place == Place::Scratch {
                    std::mem::swap(&mut self.scratch, &mut link.scratch);
                }
                self.end_payload(peer);
                if let Some(errno) = link.doomed.take() {
                    self.given_up.push((peer, errno));
                }
            }
            self.take_staged(link, &stage[read.start..read.end])?;
            if read.drained {
                break;
            }
        }
        Ok(())
    }

    fn take_staged(&mut self, link: &mut Link, mut staged: &[u8]) -> io::Result<()> {
        while staged.len() >= HEADER_BYTES {
            let header = Header::parse(staged).map_err(invalid)?;
            let front = HEADER_BYTES + Head::size(header.kind, header.flags);
            if staged.len() < front {
                break;
            }
            let whole = HEADER_BYTES + header.length as usize;
            if whole <= staged.len() {
                self.take_frame(link.peer, &staged[..whole])?;
                staged = &staged[whole..];
                continue;
            }
            let Some(peer) = self.sender(link.peer, &header)? else {
                return Err(fault("a control frame with a payload"));
            };
            let head = &staged[HEADER_BYTES..front];
            let place = self.core.handle_frame(peer, header, head).map_err(|bad| fault(bad.0))?;
            self.drain_actions();
            let (target, skip) = self.target(link, peer, place, whole - front);
            if let Carrier::Stream(stream) = &mut link.carrier {
                // SAFETY: the protocol keeps the place until the payload is complete or the link is dropped.
                unsafe { stream.begin(target.as_slice(), skip, &staged[front..]) };
            }
            link.inside = Some((peer, place));
            return Ok(());
        }
        if let Carrier::Stream(stream) = &mut link.carrier {
            stream.keep(staged);
        }
        Ok(())
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
            log!(Debug, "peer {address:?} has left");
        } else {
            log!(Warn, "the connection to peer {address:?} is lost: {error}");
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

/// Pieces of memory for a payload.
#[derive(Default)]
struct Target {
    pieces: Vec<Piece>,
}

impl Target {
    fn push(&mut self, piece: Piece) {
        if piece.len > 0 {
            self.pieces.push(piece);
        }
    }

    fn extend(&mut self, pieces: &[Piece]) {
        self.pieces.extend_from_slice(pieces);
    }

    fn as_slice(&self) -> &[Piece] {
        &self.pieces
    }
}

#[inline]
fn send_to_ring(ring: &mut shm::ShmLink, front: &[u8], pieces: &[Piece]) -> Sent {
    let mut slices = [IoSlice::new(&[]); PIECES_MAX];
    for (slice, piece) in slices.iter_mut().zip(pieces) {
        // SAFETY: the application's memory until the operation is done.
        *slice = IoSlice::new(unsafe { std::slice::from_raw_parts(piece.base, piece.len) });
    }
    if ring.send(front, &slices[..pieces.len()]) { Sent::All } else { Sent::Busy }
}

/// Whether this process may read the memory of process `pid`: it tries with the number it was told.
pub fn may_read(pid: i32, introduction: &Introduction) -> bool {
    let mut seen = 0u64;
    let piece = Piece { base: (&raw mut seen).cast(), len: 8 };
    // SAFETY: eight bytes of our own.
    let read = unsafe { read_process(pid, introduction.cookie_address, &[piece]) };
    read.is_ok() && seen == introduction.cookie
}

/// Reads another process's memory at `address` into `pieces`.
///
/// # Safety
/// The pieces are valid memory of ours.
pub unsafe fn read_process(pid: i32, mut address: u64, pieces: &[Piece]) -> io::Result<()> {
    for piece in pieces {
        let mut done = 0;
        while done < piece.len {
            // SAFETY: `done` bytes lie inside the piece.
            let base = unsafe { piece.base.add(done) };
            let local = libc::iovec { iov_base: base.cast(), iov_len: piece.len - done };
            let remote = libc::iovec {
                iov_base: std::ptr::with_exposed_provenance_mut(address as usize),
                iov_len: local.iov_len,
            };
            // SAFETY: writes only to `local`; the other process's address is checked by the kernel.
            let got = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
            if got <= 0 {
                return Err(io::Error::last_os_error());
            }
            done += got as usize;
            address += got as u64;
        }
    }
    Ok(())
}

fn invalid(bad: landbridge_proto::wire::Malformed) -> io::Error {
    fault(bad.0)
}

fn fault(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
