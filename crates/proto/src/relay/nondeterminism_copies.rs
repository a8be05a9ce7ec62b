//! Copies of the recorded nondeterminism (clocks and random numbers) of endpoints on other nodes
//! than this relay: if such a node is lost, the incarnation on a third node receives the copy.
//!
//! What enters: pieces of an endpoint's record ([`crate::wire::frame::Kind::Nondeterminism`]), each
//! before the frames
//! that may depend on it; a restarted incarnation may repeat pieces. What leaves: the whole copy
//! ([`super::Recovery::nondeterminism_of`]), once nothing more from that node can arrive
//! ([`super::Relay::fence`]).
//!
//! A copy includes the number of polls of the endpoint at the end of the copy: a restarted
//! incarnation finds no new message before it has polled as often. Otherwise the incarnation could
//! take another path through the program than the one that the recorded clock values belong to.
//!
//! The relay drops everything before the oldest checkpoint image of the endpoint as soon as the
//! endpoint reports the image. If a message log is discarded because it is too large, the relay
//! remembers the end of the copy: if logging restarts, the copy goes on from there.
//!
//! A program sometimes reads much at once, which arrives in several pieces: a *batch*. A piece may
//! end in the middle of an entry of the record, so only whole batches count. An incomplete batch is
//! returned to no incarnation, and is dropped when the endpoint is fenced or when another
//! incarnation attaches, which sends the record again from the end of the last whole batch. No
//! other process has seen an effect of an incomplete batch, because every dependent frame follows
//! the whole batch.
//!
//! What may never happen: a copy has a gap; a fenced incarnation adds bytes; the relay returns a
//! part of a batch.

use alloc::vec::Vec;

use super::byte_log::ByteLog;
use crate::wire::Malformed;

/// Copy of the recorded nondeterminism of one endpoint: see the module head.
#[derive(Debug, Default)]
pub(super) struct NondeterminismCopy {
    bytes: ByteLog,
    /// Position before which no byte of the record is needed.
    base: u64,
    /// End position of the last whole batch; the bytes after it belong to an incomplete batch.
    complete_end: u64,
    /// Polls of the endpoint at the end of the last whole batch.
    polls: u64,
    /// Whether the record of the endpoint was full at the end of the last whole batch.
    is_full: bool,
}

/// The relay's copy of an endpoint's recorded nondeterminism, whole batches only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptNondeterminism {
    /// Position of the first byte of the copy in the endpoint's record.
    pub first: u64,
    /// The copied bytes of the record.
    pub bytes: Vec<u8>,
    /// Polls of the endpoint at the end of the copy.
    pub polls: u64,
    /// Whether the endpoint's record is full.
    pub is_full: bool,
}

impl NondeterminismCopy {
    /// A copy with the same end and without any bytes. An incomplete batch continues.
    pub fn dropped(&self) -> Self {
        Self { bytes: ByteLog::starting_at(self.end()), base: self.complete_end, ..*self }
    }

    /// Drops an incomplete batch, whose end will never arrive.
    pub fn drop_incomplete(&mut self) {
        if self.bytes.first() > self.complete_end {
            self.bytes = ByteLog::starting_at(self.complete_end);
        } else {
            self.bytes.truncate(self.complete_end);
        }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.len()
    }

    fn first(&self) -> u64 {
        self.base.max(self.bytes.first())
    }

    /// End position of the last whole batch.
    pub fn complete_end(&self) -> u64 {
        self.complete_end
    }

    /// End position of all received bytes, those of an incomplete batch included.
    fn end(&self) -> u64 {
        self.bytes.first() + self.bytes.len()
    }

    /// Drops the bytes before position `place`, at which an entry begins.
    pub fn trim(&mut self, place: u64) {
        if place > self.end() {
            self.bytes = ByteLog::starting_at(place);
        } else if let Some(cursor) = self.bytes.at(place) {
            self.bytes.trim(cursor);
        }
        self.base = self.base.max(place);
        self.complete_end = self.complete_end.max(place);
    }

    /// Drops all bytes up to `end`, where a piece ended that exceeded the memory bound.
    pub fn skip(&mut self, end: u64) {
        self.bytes = ByteLog::starting_at(self.end().max(end));
        self.base = self.base.max(self.complete_end);
    }

    /// Number of bytes in a piece that are new, counted from its end.
    ///
    /// # Errors
    /// If the piece leaves a gap after the copy, or differs from the copy.
    pub fn new_bytes(&self, from: u64, bytes: &[u8]) -> Result<usize, Malformed> {
        let known = self.end().checked_sub(from);
        let known = known.ok_or(Malformed("its nondeterminism record arrives with a gap"))?;
        let known = known.min(bytes.len() as u64) as usize;
        let mut cursor = self.bytes.at(from.max(self.first())).unwrap_or(self.bytes.end());
        // Bytes that were dropped cannot be compared.
        let mut left = bytes.get(self.first().saturating_sub(from) as usize..known).unwrap_or(&[]);
        while !left.is_empty() {
            let before = self.bytes.read(&mut cursor, left.len());
            let (now, later) = left.split_at(before.len());
            if before.is_empty() || now != before {
                return Err(Malformed("its nondeterminism record differs from the earlier one"));
            }
            left = later;
        }
        Ok(bytes.len() - known)
    }

    /// Appends bytes that are new: see [`NondeterminismCopy::new_bytes`].
    pub fn append(&mut self, bytes: &[u8]) {
        self.bytes.push(bytes);
    }

    /// Completes a batch that ends at `end`: its polls and its full flag count from now on.
    pub fn complete(&mut self, end: u64, polls: u64, is_full: bool) {
        self.complete_end = self.complete_end.max(end);
        self.polls = self.polls.max(polls);
        self.is_full |= is_full;
    }

    /// The copy, whole batches only.
    pub fn kept(&self) -> KeptNondeterminism {
        // After a discard in the middle of a batch, `first` lies after the end of the last whole
        // batch.
        let first = self.first().min(self.complete_end);
        let length = (self.complete_end - first) as usize;
        let mut bytes = Vec::with_capacity(length);
        let mut cursor = self.bytes.at(first).unwrap_or_default();
        while bytes.len() < length {
            match self.bytes.read(&mut cursor, length - bytes.len()) {
                [] => break,
                more => bytes.extend_from_slice(more),
            }
        }
        KeptNondeterminism { first, bytes, polls: self.polls, is_full: self.is_full }
    }
}
