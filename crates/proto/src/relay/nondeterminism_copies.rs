//! Copies of the recorded nondeterminism (clocks and random numbers) of endpoints on other nodes
//! than this relay: if such a node is lost, the incarnation on a third node receives the copy.
//!
//! What enters: pieces of an endpoint's record ([`Kind::Nondeterminism`]), each before the frames
//! that may depend on it; a restarted incarnation may repeat pieces. What leaves: the whole copy
//! ([`Relay::nondeterminism_of`]), once nothing more from that node can arrive ([`Relay::fence`]).
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
use super::message_log::{MessageLog, MessageLogs};
use super::*;
use crate::wire::nondeterminism_frame::{self, NondeterminismFrame};

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
    fn drop_incomplete(&mut self) {
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
    fn trim(&mut self, place: u64) {
        if place > self.end() {
            self.bytes = ByteLog::starting_at(place);
        } else if let Some(cursor) = self.bytes.at(place) {
            self.bytes.trim(cursor);
        }
        self.base = self.base.max(place);
        self.complete_end = self.complete_end.max(place);
    }

    /// Drops all bytes up to `end`, where a piece ended that exceeded the memory bound.
    fn skip(&mut self, end: u64) {
        self.bytes = ByteLog::starting_at(self.end().max(end));
        self.base = self.base.max(self.complete_end);
    }

    /// Number of bytes in a piece that are new, counted from its end.
    ///
    /// # Errors
    /// If the piece leaves a gap after the copy, or differs from the copy.
    fn new_bytes(&self, from: u64, bytes: &[u8]) -> Result<usize, Malformed> {
        let known = self.end().checked_sub(from);
        let known = known.ok_or(Malformed("it leaves out what it has read of clocks"))?;
        let known = known.min(bytes.len() as u64) as usize;
        let mut cursor = self.bytes.at(from.max(self.first())).unwrap_or(self.bytes.end());
        // Bytes that were dropped cannot be compared.
        let mut left = bytes.get(self.first().saturating_sub(from) as usize..known).unwrap_or(&[]);
        while !left.is_empty() {
            let before = self.bytes.read(&mut cursor, left.len());
            let (now, later) = left.split_at(before.len());
            if before.is_empty() || now != before {
                return Err(Malformed("it has read other clocks than before"));
            }
            left = later;
        }
        Ok(bytes.len() - known)
    }

    /// Completes a batch that ends at `end`: its polls and its full flag count from now on.
    fn complete(&mut self, end: u64, polls: u64, is_full: bool) {
        self.complete_end = self.complete_end.max(end);
        self.polls = self.polls.max(polls);
        self.is_full |= is_full;
    }

    fn kept(&self) -> KeptNondeterminism {
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

impl MessageLogs {
    /// Starts the copy for an endpoint, unless its log has been discarded. Called before the
    /// endpoint attaches.
    fn keep_nondeterminism(&mut self, address: Address) {
        let MessageLog { discard_reason, nondeterminism: reads, .. } =
            self.all.entry(address).or_default();
        if discard_reason.is_none() && reads.is_none() {
            *reads = Some(NondeterminismCopy::default());
        }
    }

    /// Drops the incomplete batch of earlier incarnations of the endpoint, which will send nothing
    /// more.
    pub fn drop_incomplete_batch(&mut self, address: Address) {
        let reads = self.all.get_mut(&address).and_then(|log| log.nondeterminism.as_mut());
        if let Some(reads) = reads {
            let before = reads.bytes();
            reads.drop_incomplete();
            self.bytes -= before - reads.bytes();
        }
    }
}

impl Relay {
    /// Starts a copy of the recorded nondeterminism of this endpoint. Call this before the endpoint
    /// attaches.
    pub fn keep_nondeterminism_of(&mut self, address: Address) {
        if let Some(logs) = &mut self.logs {
            logs.keep_nondeterminism(address);
        }
    }

    /// Handles a piece of an endpoint's record, or the position before which the record is not
    /// needed.
    pub(super) fn handle_nondeterminism(
        &mut self,
        from: LinkId,
        header: &Header,
        body: &[u8],
    ) -> Result<(), Malformed> {
        const UNASKED: Malformed = Malformed("nobody wants to know what it reads of clocks");
        let polls = header.delivered;
        let said = nondeterminism_frame::parse(header, body)?;
        let Self { ports, logs, counters, .. } = self;
        let port = ports[from.0 as usize].as_ref();
        let (Some(logs), Some(PortKind::Endpoint(address))) = (logs, port.map(|it| it.kind)) else {
            return Ok(());
        };
        let log = logs.all.entry(address).or_default();
        let reads = log.nondeterminism.as_mut().ok_or(UNASKED)?;
        let (from, bytes, is_full, has_more) = match said {
            NondeterminismFrame::Append { from, bytes, is_full, has_more } => {
                (from, bytes, is_full, has_more)
            }
            NondeterminismFrame::Trim(place) => {
                let before = reads.bytes();
                reads.trim(place);
                logs.bytes -= before - reads.bytes();
                return Ok(());
            }
        };
        let news = reads.new_bytes(from, bytes)?;
        let news = &bytes[bytes.len() - news..];
        let end = from + bytes.len() as u64;
        // Discards the log, with this copy, if the new bytes exceed the memory bound.
        let has_room = logs.log_mut(address, news.len()).is_some();
        let log = logs.all.get_mut(&address);
        let Some(reads) = log.and_then(|log| log.nondeterminism.as_mut()) else {
            return Ok(());
        };
        if has_room {
            reads.bytes.push(news);
            counters.nondeterminism_bytes += news.len() as u64;
        }
        if !has_more {
            reads.complete(end, polls, is_full);
        }
        if !has_room {
            reads.skip(end);
        }
        Ok(())
    }

    /// Fences an endpoint: from now on the relay refuses incarnations of it before `incarnation`,
    /// none of which is attached. An incomplete batch is dropped, unless a newer incarnation is
    /// attached.
    pub fn fence(&mut self, address: Address, incarnation: u32) {
        if self.cluster_of(address) != Some(self.table.own()) {
            return;
        }
        // The record of the next incarnation ends with the last whole batch, here or on the node
        // that holds a longer copy: the incarnation may continue with other bytes after this
        // position.
        let is_attached = self.incarnation(address).is_some();
        if let Some(logs) = self.logs.as_mut().filter(|_| !is_attached) {
            logs.drop_incomplete_batch(address);
        }
        let link = match self.table.route(address) {
            Route::Link(link) => link,
            _ => {
                let since = self.now_millis;
                let link =
                    self.open_port(PortKind::Endpoint(address), PortState::Disconnected { since });
                self.table.set_endpoint(address, Some(link));
                link
            }
        };
        let last = &mut self.port_mut(link).incarnation;
        *last = (*last).max(Some(incarnation));
    }

    /// The copy of an endpoint's recorded nondeterminism, whole batches only. `None`: there is no
    /// copy.
    pub fn nondeterminism_of(&self, address: Address) -> Option<KeptNondeterminism> {
        let log = self.logs.as_ref()?.all.get(&address)?;
        log.nondeterminism.as_ref().map(NondeterminismCopy::kept)
    }
}
