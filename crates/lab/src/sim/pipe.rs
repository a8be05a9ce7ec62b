//! One direction between two processes: a bounded pipe that keeps order and loses nothing.
//!
//! Bytes enter as far as the pipe has capacity; the rest of a frame waits with the writer (as for a
//! socket or a ring) and still lies in the sender's memory. Bytes leave in pieces of any size.

use std::collections::VecDeque;

use landbridge_testbed::endpoint::ByteStore;

use super::Violation;
use super::datagrams::LossyNetwork;
use super::memory::{Arena, Piece};

/// The bytes in the pipe, and the frame that is entering.
pub struct Pipe {
    pub bytes: VecDeque<u8>,
    capacity: usize,
    /// Whether a frame that does not fit may enter in part; if not, the frame waits until it fits,
    /// unless it is larger than the pipe.
    partial: bool,
    /// The part of the last frame that has not entered.
    pub pending_write: Option<PendingWrite>,
    /// The pipe is broken: written bytes vanish.
    pub is_cut: bool,
    /// The network of a path of datagrams, which datagrams pass before they enter the pipe.
    pub network: Option<LossyNetwork>,
}

/// The part of a frame that waits for capacity.
pub struct PendingWrite {
    front: Vec<u8>,
    payload: Option<(Piece, u64, u64)>,
}

/// The result of an attempt to write a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    Busy,
    Part,
    Whole,
}

impl Pipe {
    pub fn new(capacity: usize, partial: bool) -> Self {
        let bytes = VecDeque::new();
        Self { bytes, capacity, partial, pending_write: None, is_cut: false, network: None }
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

    /// Whether a frame of `size` bytes may enter completely now.
    pub fn fits(&self, size: usize) -> bool {
        self.pending_write.is_none() && size <= self.room()
    }

    /// Begins to write a frame.
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

    /// Continues to write the pending frame; returns true if the whole frame has entered.
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

    /// Copies the part of the frame that waits for capacity, so that the sender may free its
    /// memory.
    pub fn own_pending_write(&mut self, arena: &mut Arena) -> Result<(), Violation> {
        if let Some(PendingWrite { payload: Some((piece, at, length)), .. }) =
            &mut self.pending_write
        {
            (*piece, *at) = (arena.copy(piece, *at, *length)?, 0);
        }
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) {
        if !self.is_cut {
            self.bytes.extend(bytes);
        }
    }

    /// Whether a frame waits and the pipe has capacity.
    pub fn may_resume(&self) -> bool {
        self.pending_write.is_some() && self.room() > 0
    }

    /// The first `count` bytes, which stay in the pipe.
    pub fn peek(&self, count: usize) -> Vec<u8> {
        self.bytes.iter().take(count).copied().collect()
    }

    /// Removes `count` bytes from the pipe.
    pub fn take(&mut self, count: usize) -> Vec<u8> {
        self.bytes.drain(..count).collect()
    }

    /// Breaks the pipe for writers; bytes in the pipe can still be read.
    pub fn cut(&mut self) {
        self.is_cut = true;
        self.pending_write = None;
    }
}
