//! One direction between two processes: a bounded pipe that keeps order and loses nothing.
//!
//! Bytes enter as far as there is room; what remains of a frame stays with the writer (as a socket or a ring would have
//! it) and still lies in the sender's memory. Bytes leave in pieces of any size.

use std::collections::VecDeque;

use landbridge_proto::endpoint::PayloadDestination;
use landbridge_proto::wire::frame::Header;

use super::Violation;
use super::datagrams::LossyNetwork;
use super::memory::{Arena, Piece};

/// See the module head.
pub struct Pipe {
    pub bytes: VecDeque<u8>,
    capacity: usize,
    /// A frame that does not fit may enter in part; otherwise it waits for room if it can ever have it.
    partial: bool,
    /// What of the last frame has not entered.
    pub pending_write: Option<PendingWrite>,
    /// The frame that is being taken out.
    pub incoming: Option<IncomingFrame>,
    /// Broken: what is written vanishes.
    pub is_cut: bool,
    /// Frames are datagrams, and on their way here before they come into the pipe.
    pub network: Option<LossyNetwork>,
}

/// The part of a frame that waits for room.
pub struct PendingWrite {
    front: Vec<u8>,
    payload: Option<(Piece, u64, u64)>,
}

/// A frame whose payload is on its way into its place.
pub struct IncomingFrame {
    pub header: Header,
    pub place: PayloadDestination,
    /// Memory, offset and bytes that it takes.
    pub target: Target,
    pub payload: u64,
    pub done: u64,
    /// It has come by another path meanwhile.
    pub is_duplicate: bool,
}

/// Where the bytes of a payload go.
#[derive(Clone, Debug)]
pub enum Target {
    /// The first `take` bytes to `at` of a piece.
    Piece { piece: Piece, at: u64, take: u64 },
    /// A store, from byte `at` on.
    Store { store: u32, at: u64 },
    /// What is kept of a frame that came early, from byte `at` on.
    Early { frame: u64, at: u64 },
    /// The scratch memory of the pipe.
    Scratch(Vec<u8>),
    /// Nowhere.
    Skip,
}

/// What became of an attempt to write a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    Busy,
    Part,
    Whole,
}

impl Pipe {
    pub fn new(capacity: usize, partial: bool) -> Self {
        let bytes = VecDeque::new();
        Self {
            bytes,
            capacity,
            partial,
            pending_write: None,
            incoming: None,
            is_cut: false,
            network: None,
        }
    }

    fn room(&self) -> usize {
        if self.is_cut { usize::MAX } else { self.capacity - self.bytes.len() }
    }

    /// Whether a frame of `size` bytes may begin to enter.
    pub fn accepts(&self, size: usize) -> bool {
        let fits = size <= self.room();
        self.pending_write.is_none()
            && (fits || (self.room() > 0 && (self.partial || size > self.capacity)))
    }

    /// Whether a frame of `size` bytes may enter at once.
    pub fn fits(&self, size: usize) -> bool {
        self.pending_write.is_none() && size <= self.room()
    }

    /// Begins a frame.
    pub fn begin(
        &mut self,
        front: &[u8],
        payload: Option<(Piece, u64, u64)>,
        arena: &Arena,
    ) -> Result<WriteOutcome, Violation> {
        let size = front.len() + payload.map_or(0, |(_, _, length)| length as usize);
        if !self.accepts(size) {
            return Ok(WriteOutcome::Busy);
        }
        self.pending_write = Some(PendingWrite { front: front.to_vec(), payload });
        Ok(if self.resume(arena)? { WriteOutcome::Whole } else { WriteOutcome::Part })
    }

    /// Goes on with the frame that has not quite entered; true if it has now.
    pub fn resume(&mut self, arena: &Arena) -> Result<bool, Violation> {
        let Some(mut pending_write) = self.pending_write.take() else {
            return Ok(true);
        };
        let now = pending_write.front.len().min(self.room());
        let front: Vec<u8> = pending_write.front.drain(..now).collect();
        self.put(&front);
        if let Some((piece, at, left)) = pending_write.payload
            && pending_write.front.is_empty()
        {
            let now = left.min(self.room() as u64);
            let bytes = arena.read(piece, at, now)?.to_vec();
            self.put(&bytes);
            pending_write.payload = (now < left).then_some((piece, at + now, left - now));
        }
        let is_whole = pending_write.front.is_empty() && pending_write.payload.is_none();
        if !is_whole {
            self.pending_write = Some(pending_write);
        }
        Ok(is_whole)
    }

    /// Copies the part of the frame that waits for room.
    pub fn own_pending_write(&mut self, arena: &mut Arena) -> Result<(), Violation> {
        if let Some(PendingWrite { payload: Some((piece, at, length)), .. }) =
            &mut self.pending_write
        {
            let bytes = arena.read(*piece, *at, *length)?.to_vec();
            (*piece, *at) = (arena.keep(bytes, false), 0);
        }
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) {
        if !self.is_cut {
            self.bytes.extend(bytes);
        }
    }

    /// Room for the frame that waits.
    pub fn may_resume(&self) -> bool {
        self.pending_write.is_some() && self.room() > 0
    }

    /// The first `count` bytes, left in the pipe.
    pub fn peek(&self, count: usize) -> Vec<u8> {
        self.bytes.iter().take(count).copied().collect()
    }

    /// Takes `count` bytes out.
    pub fn take(&mut self, count: usize) -> Vec<u8> {
        self.bytes.drain(..count).collect()
    }

    /// Breaks the pipe for writers; what is in the pipe may still be read.
    pub fn cut(&mut self) {
        self.is_cut = true;
        self.pending_write = None;
    }
}
