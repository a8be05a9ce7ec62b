//! What programs have read of clocks and chance, of endpoints on other nodes than this relay: if such a node is lost, a start on
//! a third one is given it.
//!
//! In: pieces of an endpoint's record ([`Kind::Clocks`]), each in front of the frames that may follow from it; an earlier start's come
//! again. Out: all of it ([`Relay::reads_of`]), once nothing more of that node can come ([`Relay::fence`]).
//!
//! With the bytes goes how often the endpoint has looked for messages until then: a new start finds nothing new before it has
//! looked as often. Otherwise it could go another way than what it will be told of clocks belongs to.
//!
//! What lies before the oldest image of the endpoint is dropped as soon as that is said. Of one of which nothing is kept, since
//! there was too much of it, it is known how far it has come: if its record begins anew, then from there.
//!
//! What may never happen: a piece is missing in the middle; a start that was fenced adds something.

use alloc::vec::Vec;

use super::history::{Histories, History};
use super::store::Store;
use super::*;
use crate::wire::reads::{self, Said};

/// See the module head.
#[derive(Debug, Default)]
pub(super) struct Reads {
    bytes: Store,
    /// Before this place nothing of it is needed.
    base: u64,
    /// Looks for messages,
    polls: u64,
    /// There was no room on its node for what came then.
    is_full: bool,
}

/// What a relay has of that: from byte `first` on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadsKept {
    /// Where the bytes begin in the endpoint's record.
    pub first: u64,
    /// What was read.
    pub bytes: Vec<u8>,
    /// How often it has looked for messages.
    pub polls: u64,
    /// There is no more room in its record.
    pub is_full: bool,
}

impl Reads {
    /// As far as this, and nothing of it.
    pub fn dropped(&self) -> Self {
        Self { bytes: Store::behind(self.end()), base: self.end(), ..*self }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.len()
    }

    fn first(&self) -> u64 {
        self.base.max(self.bytes.first())
    }

    /// Behind all that is known.
    pub fn end(&self) -> u64 {
        self.bytes.first() + self.bytes.len()
    }

    /// What lies before this place is needed no more.
    fn cut(&mut self, place: u64) {
        if place > self.end() {
            self.bytes = Store::behind(place);
        } else if let Some(cursor) = self.bytes.at(place) {
            self.bytes.trim(cursor);
        }
        self.base = self.base.max(place);
    }

    /// So many of these bytes are news, if they go on where it ended or repeat what is known.
    fn news(&self, from: u64, bytes: &[u8]) -> Result<usize, Malformed> {
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

    fn take(&mut self, polls: u64, is_full: bool, news: &[u8]) {
        self.bytes.push(news);
        self.note(polls, is_full);
    }

    fn note(&mut self, polls: u64, is_full: bool) {
        self.polls = self.polls.max(polls);
        self.is_full |= is_full;
    }

    fn kept(&self) -> ReadsKept {
        let length = (self.end() - self.first()) as usize;
        let mut bytes = Vec::with_capacity(length);
        let mut cursor = self.bytes.at(self.first()).unwrap_or_default();
        while bytes.len() < length {
            match self.bytes.read(&mut cursor, usize::MAX) {
                [] => break,
                more => bytes.extend_from_slice(more),
            }
        }
        ReadsKept { first: self.first(), bytes, polls: self.polls, is_full: self.is_full }
    }
}

impl Histories {
    /// Reads of an endpoint are kept from its attachment on, if nothing else than that keeps it from coming back.
    fn keep_reads(&mut self, address: Address) {
        let History { given_up, reads, .. } = self.all.entry(address).or_default();
        if given_up.is_none() && reads.is_none() {
            *reads = Some(Reads::default());
        }
    }
}

impl Relay {
    /// Of the endpoint of this address it is kept what it reads of clocks: to be called before it attaches.
    pub fn keep_reads_of(&mut self, address: Address) {
        if let Some(histories) = &mut self.histories {
            histories.keep_reads(address);
        }
    }

    /// An endpoint says what it has read, or what of it is needed no more.
    pub(super) fn take_reads(
        &mut self,
        from: LinkId,
        header: &Header,
        body: &[u8],
    ) -> Result<(), Malformed> {
        const UNASKED: Malformed = Malformed("nobody wants to know what it reads of clocks");
        let polls = header.delivered;
        let said = reads::parse(header, body)?;
        let Self { ports, histories, counters, .. } = self;
        let port = ports[from.0 as usize].as_ref();
        let (Some(histories), Some(Party::Endpoint(address))) =
            (histories, port.map(|it| it.party))
        else {
            return Ok(());
        };
        let history = histories.all.entry(address).or_default();
        let reads = history.reads.as_mut().ok_or(UNASKED)?;
        let (from, bytes, is_full) = match said {
            Said::Read { from, bytes, is_full } => (from, bytes, is_full),
            Said::Cut(place) => {
                let before = reads.bytes();
                reads.cut(place);
                histories.bytes -= before - reads.bytes();
                return Ok(());
            }
        };
        let news = reads.news(from, bytes)?;
        let news = &bytes[bytes.len() - news..];
        // As much as there is room for: otherwise it can come back no longer.
        if let Some((History { reads: Some(reads), .. }, _)) = histories.of(address, news.len()) {
            reads.take(polls, is_full, news);
            counters.read_bytes += news.len() as u64;
        } else if let Some(History { reads: Some(reads), .. }) = histories.all.get_mut(&address) {
            reads.note(polls, is_full);
            reads.cut(from + bytes.len() as u64);
        }
        Ok(())
    }

    /// Nothing of starts of this endpoint before this one is taken any more; none of them is attached.
    pub fn fence(&mut self, address: Address, incarnation: u32) {
        if self.cluster_of(address) != Some(self.table.own()) {
            return;
        }
        let link = match self.table.route(address) {
            Route::Link(link) => link,
            _ => {
                let since = self.now_millis;
                let link = self.open_port(Party::Endpoint(address), State::Away { since });
                self.table.set_endpoint(address, Some(link));
                link
            }
        };
        let last = &mut self.port_mut(link).incarnation;
        *last = (*last).max(Some(incarnation));
    }

    /// What is kept of what an endpoint has read, if that is.
    pub fn reads_of(&self, address: Address) -> Option<ReadsKept> {
        let history = self.histories.as_ref()?.all.get(&address)?;
        history.reads.as_ref().map(Reads::kept)
    }
}
