//! Frames in: a frame's header and head are shown to the protocol, which says where the payload belongs; the
//! payload goes there directly.

use std::io;

use landbridge_drive::link::stream::Piece;
use landbridge_proto::endpoint::{Peer, Place};
use landbridge_proto::wire::Malformed;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind as FrameKind};
use landbridge_proto::wire::head::Head;

use super::Engine;
use super::handshake::Carrier;
use super::links::Link;
use crate::abi;
use crate::log;

/// Reads of one stream before others get their turn.
const READS_PER_TURN: usize = 8;
/// Frames of one ring before others get their turn.
const FRAMES_PER_TURN: usize = 32;

impl Engine {
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

    pub(super) fn read_ring(&mut self, id: usize) -> usize {
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
    pub(super) fn take_frame(&mut self, from: Option<Peer>, frame: &[u8]) -> io::Result<()> {
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
            log!(Warn, "the relay cannot reach {}", self.core.address(peer));
        }
        self.given_up.push((peer, libc::EHOSTUNREACH));
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

fn invalid(bad: Malformed) -> io::Error {
    fault(bad.0)
}

fn fault(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
