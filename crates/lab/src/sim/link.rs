//! One direction between two processes: a bounded pipe that keeps order and loses nothing.
//!
//! Bytes enter as far as there is room; the rest of a frame stays with the writer (as a socket or a ring would have
//! it) and still lies in the sender's memory. Bytes leave in pieces of any size.

use std::collections::VecDeque;

use landbridge_proto::endpoint::Place;
use landbridge_proto::wire::frame::Header;

use super::Violation;
use super::datagrams::Air;
use super::memory::{Arena, Piece};

/// See the module head.
pub struct Link {
    pub pipe: VecDeque<u8>,
    capacity: usize,
    /// A frame that does not fit may enter in part; otherwise it waits for room if it can ever have it.
    partial: bool,
    /// What of the last frame has not entered.
    pub rest: Option<Rest>,
    /// The frame that is being taken out.
    pub reading: Option<Reading>,
    /// Broken: what is written vanishes.
    pub is_cut: bool,
    /// Frames are datagrams, and on their way here before they come into the pipe.
    pub air: Option<Air>,
}

/// The part of a frame that waits for room.
pub struct Rest {
    front: Vec<u8>,
    payload: Option<(Piece, u64, u64)>,
}

/// A frame whose payload is on its way into its place.
pub struct Reading {
    pub header: Header,
    pub place: Place,
    /// Memory, offset and bytes that it takes.
    pub target: Target,
    pub payload: u64,
    pub done: u64,
    /// It has come by another path meanwhile.
    pub is_elsewhere: bool,
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
    /// The scratch memory of the link.
    Scratch(Vec<u8>),
    /// Nowhere.
    Skip,
}

/// What became of an attempt to write a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    Busy,
    Part,
    Whole,
}

impl Link {
    pub fn new(capacity: usize, partial: bool) -> Self {
        let pipe = VecDeque::new();
        Self { pipe, capacity, partial, rest: None, reading: None, is_cut: false, air: None }
    }

    fn room(&self) -> usize {
        if self.is_cut { usize::MAX } else { self.capacity - self.pipe.len() }
    }

    /// Whether a frame of `size` bytes may begin to enter.
    pub fn accepts(&self, size: usize) -> bool {
        let fits = size <= self.room();
        self.rest.is_none() && (fits || (self.room() > 0 && (self.partial || size > self.capacity)))
    }

    /// Whether a frame of `size` bytes may enter at once.
    pub fn fits(&self, size: usize) -> bool {
        self.rest.is_none() && size <= self.room()
    }

    /// Begins a frame.
    pub fn begin(
        &mut self,
        front: &[u8],
        payload: Option<(Piece, u64, u64)>,
        arena: &Arena,
    ) -> Result<Written, Violation> {
        let size = front.len() + payload.map_or(0, |(_, _, length)| length as usize);
        if !self.accepts(size) {
            return Ok(Written::Busy);
        }
        self.rest = Some(Rest { front: front.to_vec(), payload });
        Ok(if self.resume(arena)? { Written::Whole } else { Written::Part })
    }

    /// Goes on with the frame that has not quite entered; true if it has now.
    pub fn resume(&mut self, arena: &Arena) -> Result<bool, Violation> {
        let Some(mut rest) = self.rest.take() else {
            return Ok(true);
        };
        let now = rest.front.len().min(self.room());
        let front: Vec<u8> = rest.front.drain(..now).collect();
        self.put(&front);
        if let Some((piece, at, left)) = rest.payload
            && rest.front.is_empty()
        {
            let now = left.min(self.room() as u64);
            let bytes = arena.read(piece, at, now)?.to_vec();
            self.put(&bytes);
            rest.payload = (now < left).then_some((piece, at + now, left - now));
        }
        let is_whole = rest.front.is_empty() && rest.payload.is_none();
        if !is_whole {
            self.rest = Some(rest);
        }
        Ok(is_whole)
    }

    /// Copies the part of the frame that waits for room.
    pub fn own_rest(&mut self, arena: &mut Arena) -> Result<(), Violation> {
        if let Some(Rest { payload: Some((piece, at, length)), .. }) = &mut self.rest {
            let bytes = arena.read(*piece, *at, *length)?.to_vec();
            (*piece, *at) = (arena.keep(bytes, false), 0);
        }
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) {
        if !self.is_cut {
            self.pipe.extend(bytes);
        }
    }

    /// Room for the frame that waits.
    pub fn may_resume(&self) -> bool {
        self.rest.is_some() && self.room() > 0
    }

    /// The first `count` bytes, left in the pipe.
    pub fn peek(&self, count: usize) -> Vec<u8> {
        self.pipe.iter().take(count).copied().collect()
    }

    /// Takes `count` bytes out.
    pub fn take(&mut self, count: usize) -> Vec<u8> {
        self.pipe.drain(..count).collect()
    }

    /// Breaks the link for writers; what is in the pipe may still be read.
    pub fn cut(&mut self) {
        self.is_cut = true;
        self.rest = None;
    }
}
