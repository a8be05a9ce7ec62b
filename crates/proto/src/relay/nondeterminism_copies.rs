//! What programs have read of clocks and chance, of endpoints on other nodes than this relay: if such a node is lost, a start on
//! a third one is given it.
//!
//! In: pieces of an endpoint's record ([`Kind::Nondeterminism`]), each in front of the frames that may follow from it; an earlier start's come
//! again. Out: all of it ([`Relay::nondeterminism_of`]), once nothing more of that node can come ([`Relay::fence`]).
//!
//! With the bytes goes how often the endpoint has looked for messages until then: a new start finds nothing new before it has
//! looked as often. Otherwise it could go another way than what it will be told of clocks belongs to.
//!
//! What lies before the oldest image of the endpoint is dropped as soon as that is said. Of one of which nothing is kept, since
//! there was too much of it, it is known how far it has come: if its record begins anew, then from there.
//!
//! A program reads much at once sometimes, which comes in several pieces: a *batch*. Where one of them ends may be in the middle of
//! an entry of the record, so what counts are whole batches: the rest of one of which the end never came is given to nobody, and is
//! forgotten when the endpoint is fenced or another start of it attaches, which says it again from where the last whole batch ended.
//! Nobody has seen anything that follows from such a rest: the frame that does comes behind the batch.
//!
//! What may never happen: a piece is missing in the middle; a start that was fenced adds something; a part of a batch is given out.

use alloc::vec::Vec;

use super::byte_log::ByteLog;
use super::message_log::{MessageLog, MessageLogs};
use super::*;
use crate::wire::nondeterminism_frame::{self, NondeterminismFrame};

/// See the module head.
#[derive(Debug, Default)]
pub(super) struct NondeterminismCopy {
    bytes: ByteLog,
    /// Before this place nothing of it is needed.
    base: u64,
    /// The last whole batch ends here: what lies behind is the beginning of one.
    complete_end: u64,
    /// Looks for messages,
    polls: u64,
    /// There was no room on its node for what came then.
    is_full: bool,
}

/// What a relay has of that: from byte `first` on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptNondeterminism {
    /// Where the bytes begin in the endpoint's record.
    pub first: u64,
    /// What was read.
    pub bytes: Vec<u8>,
    /// How often it has looked for messages.
    pub polls: u64,
    /// There is no more room in its record.
    pub is_full: bool,
}

impl NondeterminismCopy {
    /// As far as this, and nothing of it. A batch that has begun goes on.
    pub fn dropped(&self) -> Self {
        Self { bytes: ByteLog::starting_at(self.end()), base: self.complete_end, ..*self }
    }

    /// The end of a batch that has begun will not come any more.
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

    /// Behind the last whole batch.
    pub fn complete_end(&self) -> u64 {
        self.complete_end
    }

    /// Behind all that is known, also of a batch that has begun.
    fn end(&self) -> u64 {
        self.bytes.first() + self.bytes.len()
    }

    /// What lies before this place, at which an entry begins, is needed no more.
    fn trim(&mut self, place: u64) {
        if place > self.end() {
            self.bytes = ByteLog::starting_at(place);
        } else if let Some(cursor) = self.bytes.at(place) {
            self.bytes.trim(cursor);
        }
        self.base = self.base.max(place);
        self.complete_end = self.complete_end.max(place);
    }

    /// There was no room for a piece that ends here, nor is there for what came before.
    fn skip(&mut self, end: u64) {
        self.bytes = ByteLog::starting_at(self.end().max(end));
        self.base = self.base.max(self.complete_end);
    }

    /// So many of these bytes are news, if they go on where it ended or repeat what is known.
    fn new_bytes(&self, from: u64, bytes: &[u8]) -> Result<usize, Malformed> {
        let known = self.end().checked_sub(from);
        let known = known.ok_or(Malformed("it leaves out what it has read of clocks"))?;
        let known = known.min(bytes.len() as u64) as usize;
        let mut cursor = self.bytes.at(from.max(self.first())).unwrap_or(self.bytes.end());
        // What was dropped is compared no more.
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

    /// A batch ends here, and what came with it holds from now on.
    fn complete(&mut self, end: u64, polls: u64, is_full: bool) {
        self.complete_end = self.complete_end.max(end);
        self.polls = self.polls.max(polls);
        self.is_full |= is_full;
    }

    fn kept(&self) -> KeptNondeterminism {
        // Of one of which nothing is kept what is there may lie behind that.
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
    /// Reads of an endpoint are kept from its attachment on, if nothing else than that keeps it from coming back.
    fn keep_nondeterminism(&mut self, address: Address) {
        let MessageLog { discard_reason, nondeterminism: reads, .. } =
            self.all.entry(address).or_default();
        if discard_reason.is_none() && reads.is_none() {
            *reads = Some(NondeterminismCopy::default());
        }
    }

    /// Starts of the endpoint that have been there say nothing more: the end of what they have begun to say will not come.
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
    /// Of the endpoint of this address it is kept what it reads of clocks: to be called before it attaches.
    pub fn keep_nondeterminism_of(&mut self, address: Address) {
        if let Some(logs) = &mut self.logs {
            logs.keep_nondeterminism(address);
        }
    }

    /// An endpoint says what it has read, or what of it is needed no more.
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
        // As much as there is room for: otherwise it can come back no longer.
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

    /// Nothing of starts of this endpoint before this one is taken any more; none of them is attached.
    pub fn fence(&mut self, address: Address, incarnation: u32) {
        if self.cluster_of(address) != Some(self.table.own()) {
            return;
        }
        // The record of the next start ends where the last whole batch did, there or at whoever knows more: it may go on otherwise.
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

    /// What is kept of what an endpoint has read, if that is: whole batches.
    pub fn nondeterminism_of(&self, address: Address) -> Option<KeptNondeterminism> {
        let log = self.logs.as_ref()?.all.get(&address)?;
        log.nondeterminism.as_ref().map(NondeterminismCopy::kept)
    }
}
