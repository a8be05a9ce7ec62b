//! What brings a process that was killed back to where it was: all that its relay has given it, when it took that in,
//! and what it has sent since.
//!
//! A process is deterministic but for what it takes in, and when. So a new start of it that is given the same frames,
//! in the same order, at the same polls and the same times ([`Kind::Intake`]), does the same and sends the same. What the
//! earlier start has sent already is compared and goes nowhere: nobody else notices.
//!
//! It is *told* what was ([`super::telling`]): first how many intakes there are and how many frames it has sent, then each
//! intake with the frames that it took in, then the frames that nobody has taken in yet. What comes for it meanwhile is told in
//! its turn.
//!
//! One that stands where an image of it was taken is told what came after that ([`Mark`]).
//!
//! What may never happen: a new start sends something else than the earlier one, and anybody is given it; frames wait for
//! one that cannot come back, and nobody is told.

use alloc::collections::{BTreeMap, BTreeSet};

use crate::id::Address;
use crate::route::queue::Pool;
use crate::route::table::LinkId;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use crate::wire::hello::Standing;

use super::archive::Archive;
use super::diverged::{SENT_BYTES, Sent};
use super::intakes::{Intake, Intakes};
use super::mark::{Mark, Marks};
use super::port::{Party, Piece, Port};
use super::reads::Reads;
use super::record::Entry;
use super::shelf::{Room, Shelf};
use super::store::{Cursor, Store};
use super::telling::{Telling, Told, push_intake};
use super::{Malformed, Relay, Stop};

/// Memory that all histories of a relay together may take, unless the user says otherwise. What is beyond it goes to a disk,
/// if there is one; otherwise whose history would need more can come back no longer.
pub const HISTORIES_BYTES_MAX: u64 = 4 << 30;

/// Why there is nothing of one for which there was not enough room. That ends with its next image.
pub(super) const TOO_MUCH: &str = "what it was given was too much to be kept: it cannot come back";

/// The histories of all endpoints of a relay.
#[derive(Debug)]
pub(super) struct Histories {
    pub all: BTreeMap<Address, History>,
    /// What all of them take, wherever it lies.
    pub bytes: u64,
    pub shelf: Shelf,
}

impl Histories {
    pub fn new(room: Room) -> Self {
        Self { all: BTreeMap::new(), bytes: 0, shelf: Shelf::new(room) }
    }

    /// Of an endpoint, if it may come back; there is room for `bytes` more.
    #[inline]
    pub fn of(&mut self, address: Address, bytes: usize) -> Option<(&mut History, &mut Shelf)> {
        let Self { all, bytes: held, shelf } = self;
        let count = all.len();
        let history = all.entry(address).or_default();
        if history.given_up.is_some() {
            return None;
        }
        // Of one that is being told it the rest is still needed ([`Histories::catch_up`] when it is not). Little comes while the
        // disk is busy as well: inputs wait for that.
        let is_over = shelf.is_over(*held + bytes as u64, count);
        if is_over && history.telling.is_none() && !shelf.is_writing() {
            *held -= history.give_up(TOO_MUCH, shelf);
            shelf.note_given_up(address, TOO_MUCH);
            return None;
        }
        *held += bytes as u64;
        Some((history, shelf))
    }

    /// It may come back no longer.
    pub fn give_up(&mut self, address: Address, why: &'static str) {
        let Self { all, bytes, shelf } = self;
        *bytes -= all.entry(address).or_default().give_up(why, shelf);
        shelf.note_given_up(address, why);
    }

    /// One that is only behind is told the rest at once, by its queue, if too much is kept for it to come back: so much waits
    /// for it as its peers may send unasked. `buffer`: of the pieces that go there first. Whether something was put there.
    fn catch_up(
        &mut self,
        address: Address,
        bytes: usize,
        port: &mut Port,
        pool: &mut Pool,
        buffer: &[u8],
    ) -> bool {
        let Self { all, bytes: held, shelf } = self;
        if !shelf.is_over(*held + bytes as u64, all.len()) || shelf.is_writing() {
            return false;
        }
        let Some(history) = all.get_mut(&address).filter(|history| history.is_only_behind()) else {
            return false;
        };
        port.keep(pool, buffer);
        // What lies on the disk comes later.
        let told = history.push_rest(address, port, pool, shelf);
        port.note_told(told);
        true
    }

    /// A frame is given to an endpoint. Whether it is being told what was: then it hears this in its turn. `None`: it may not come
    /// back.
    pub fn give(&mut self, address: Address, frame: &[u8]) -> Option<bool> {
        let (history, shelf) = self.of(address, frame.len())?;
        let sealed = history.given.push(frame, &mut shelf.spare);
        let is_told = history.hold_back(frame.len());
        if let Some(number) = sealed {
            shelf.note_sealed(address, number);
            if !history.is_grown {
                let grown = history.given.total().saturating_sub(history.marks.newest().taken);
                history.is_grown = shelf.note_growth(address, grown);
            }
            self.move_out();
        }
        Some(is_told)
    }

    /// Its present start has gone. Channels of frames that nobody was given.
    pub fn stop_telling(&mut self, address: Address) -> BTreeSet<Entry> {
        let Self { all, shelf, .. } = self;
        let Some(history) = all.get_mut(&address) else { return BTreeSet::new() };
        let untold = history.untold();
        history.stop_telling(shelf);
        untold
    }

    /// The place in the history of an endpoint where it says it stands.
    pub fn mark_at(&mut self, address: Address, standing: Standing) -> Result<Mark, &'static str> {
        let Some(history) = self.all.get_mut(&address) else {
            return match standing == Standing::default() {
                true => Ok(Mark::default()),
                false => Err("it stands where it has never been"),
            };
        };
        let mark = history.marks.find(standing, &history.intakes, &history.given, &history.sent)?;
        history.is_grown = false;
        Ok(mark)
    }

    /// Whether all that an endpoint is still to be told has come while it was there.
    pub fn is_only_behind(&self, address: Address) -> bool {
        self.all.get(&address).is_some_and(History::is_only_behind)
    }

    /// Why no new start of an endpoint can be brought to where it was, if none can.
    pub fn refusal(&self, address: Address) -> Option<&'static str> {
        self.all.get(&address)?.given_up
    }
}

/// See the module head.
#[derive(Debug, Default)]
pub(super) struct History {
    /// Why there is nothing of it.
    pub given_up: Option<&'static str>,
    /// Frames that were given to it, in order.
    pub given: Archive,
    /// When it has taken in how many of them.
    pub intakes: Intakes,
    /// Of each frame that it has sent what is kept of it,
    pub sent: Store,
    /// and how many these are.
    pub sent_count: u64,
    /// Of these, how many its present start has sent, and where the next one is.
    repeated: u64,
    next_sent: Cursor,
    /// What its present start is still to be told.
    pub telling: Option<Telling>,
    /// What its program has read of clocks, if it is on another node.
    pub reads: Option<Reads>,
    /// Where starts of it have stood.
    pub marks: Marks,
    /// It is said that much was given to it since.
    is_grown: bool,
}

/// A frame that an endpoint sends, compared with what its earlier start has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sending {
    /// The earlier one had not come so far.
    New(Sent),
    /// The same.
    Repeated,
    /// Something else than this.
    Other(Option<Sent>),
}

impl History {
    /// Of one that stands here, without what led there.
    pub fn behind(standing: Standing) -> Self {
        Self {
            given: Archive::behind(standing.taken),
            intakes: Intakes::behind(standing.intakes),
            sent: Store::behind(standing.sent.saturating_mul(SENT_BYTES as u64)),
            sent_count: standing.sent,
            ..Self::default()
        }
    }

    pub fn bytes(&self) -> u64 {
        let reads = self.reads.as_ref().map_or(0, Reads::bytes);
        self.intakes.bytes() + self.sent.len() + self.given.len() + reads
    }

    /// Nothing is kept of it any more. So many bytes were.
    fn give_up(&mut self, why: &'static str, shelf: &mut Shelf) -> u64 {
        let bytes = self.bytes();
        let end = self.given.end();
        let freed = self.given.trim(end, &mut shelf.spare);
        shelf.take_back(&freed);
        let reads = self.reads.as_ref().map(Reads::dropped);
        *self = Self { given_up: Some(why), reads, ..Self::default() };
        bytes
    }

    /// A start of it is there that has sent all that is known there.
    pub fn stand_at(&mut self, mark: &Mark) {
        (self.repeated, self.next_sent) = (mark.standing.sent, mark.sent);
    }

    pub fn compare(&mut self, header: &Header, frame: &[u8]) -> Sending {
        let sent = Sent::of(header, frame);
        if self.repeated == self.sent_count {
            return Sending::New(sent);
        }
        let before = self.sent.take(&mut self.next_sent).map(Sent::from_bytes);
        self.repeated += 1;
        if before == Some(sent) { Sending::Repeated } else { Sending::Other(before) }
    }

    /// It has been passed on.
    pub fn note_sent(&mut self, sent: Sent) {
        self.sent.push(&sent.bytes());
        self.sent_count += 1;
        self.repeated += 1;
    }
}

impl Relay {
    /// A frame of `from`: whether it goes on its way, and then what is kept of it. It does not if the endpoint only does again what
    /// it did before, or tells of what it has taken in.
    #[inline]
    pub(super) fn recall(
        &mut self,
        from: LinkId,
        header: &Header,
        frame: &[u8],
    ) -> Result<Option<Option<Sent>>, Stop> {
        if header.kind == Kind::Intake {
            let intake = Intake::of(header).map_err(Stop::Broken)?;
            if let Some(history) = self.history_of(from, intake.bytes()) {
                history.intakes.push(intake);
                self.counters.intake_bytes += intake.bytes() as u64;
                self.counters.taken_in += intake.frames as u64;
            }
            return Ok(None);
        }
        if header.kind == Kind::Clocks && self.histories.is_some() {
            let outcome = self.take_reads(from, header, &frame[HEADER_BYTES..]);
            return outcome.map(|()| None).map_err(Stop::Broken);
        }
        let Some(history) = self.history_of(from, 0) else { return Ok(Some(None)) };
        match history.compare(header, frame) {
            Sending::New(sent) => Ok(Some(Some(sent))),
            Sending::Repeated => Ok(None),
            Sending::Other(before) => {
                self.note_other(from, before, frame);
                Err(Stop::Broken(Malformed("it does not do again what it did before")))
            }
        }
    }

    /// The endpoint at `from` sends `frame` where it was another one before. It may not know why its connection ends, and whoever
    /// comes after it would do the same: it is told which frame that was, and the user what both are.
    #[cold]
    fn note_other(&mut self, from: LinkId, before: Option<Sent>, frame: &[u8]) {
        let Self { ports, pool, histories, .. } = self;
        let (Some(histories), Some(port)) = (histories, &mut ports[from.0 as usize]) else {
            return;
        };
        let Party::Endpoint(address) = port.party else { return };
        let sent = histories.all.get(&address).map_or(0, |history| history.repeated);
        let which = (address, port.incarnation.unwrap_or(0), sent.saturating_sub(1));
        if let Some(apart) = before.and_then(|was| histories.tell_apart(which, was, frame)) {
            histories.shelf.note_diverged(apart);
        }
        histories.give_up(
            address,
            "a new start did not do again what was done before: it cannot come back",
        );
        // What it has begun to read it must be able to end.
        let rest = core::mem::take(&mut port.writer.rest);
        port.lose_all(pool);
        port.writer.rest = rest;
        push_intake(address, Intake { polls: 0, frames: 0, micros: which.2 }, port, pool);
        port.refused = Some(which.2);
        self.touch(from);
    }

    /// The frame of the endpoint at `link` that was another one before: why its input was broken. It is told so, but maybe there
    /// is no room for that in front of it.
    pub fn refused_frame(&self, link: LinkId) -> Option<u64> {
        self.port(link).refused
    }

    /// A frame of `from` is on its way, of which this is kept.
    #[inline]
    pub(super) fn note_sending(&mut self, from: LinkId, sent: Option<Sent>) {
        if let Some(sent) = sent
            && let Some(history) = self.history_of(from, SENT_BYTES)
        {
            history.note_sent(sent);
        }
    }

    /// Gives a frame to an endpoint that may come back; one that is away gets it then, or its source hears that it never will.
    /// It has no bound, for whoever is recorded must not have to wait: what finds no room at once it is told out of what is kept
    /// ([`Relay::keep`]). False: it may not come back.
    pub(super) fn forward_recorded(
        &mut self,
        to: LinkId,
        bytes: &mut [u8],
        at: usize,
        header: &Header,
    ) -> bool {
        let length = HEADER_BYTES + header.length as usize;
        let Self { ports, pool, histories, .. } = self;
        let (Some(histories), Some(port)) = (histories, &mut ports[to.0 as usize]) else {
            return false;
        };
        let Party::Endpoint(address) = port.party else { return false };
        let is_catching_up = port.is_told && histories.catch_up(address, length, port, pool, bytes);
        bytes[at + 6] += 1;
        let Some(is_told) = histories.give(address, &bytes[at..at + length]) else {
            bytes[at + 6] -= 1;
            return false;
        };
        self.counters.frames += 1;
        self.counters.bytes += length as u64;
        if is_catching_up {
            self.touch(to);
        }
        let port = self.port_mut(to);
        if is_told {
            // In its turn: as soon as it has taken what waits already.
        } else if port.is_up() {
            port.take(Piece { at, length }, header);
            self.touch(to);
        } else {
            self.lose(to, [Entry::of(header)].into());
        }
        true
    }

    /// The history of the endpoint at `link`, with room for so many bytes more, if it may come back.
    #[inline]
    pub(super) fn history_of(&mut self, link: LinkId, bytes: usize) -> Option<&mut History> {
        let histories = self.histories.as_mut()?;
        match self.ports[link.0 as usize].as_ref()?.party {
            Party::Endpoint(address) => histories.of(address, bytes).map(|(history, _)| history),
            _ => None,
        }
    }

    /// The endpoint at `link` has attached, and stands at `mark`: it is given once more all that it was given after that.
    /// `is_anew`: of what was given to it until now nothing is kept.
    pub(super) fn replay(&mut self, link: LinkId, mark: Mark, is_anew: bool) {
        let Self { ports, pool, histories, .. } = self;
        let (Some(histories), Some(port)) = (histories, &mut ports[link.0 as usize]) else {
            return;
        };
        let Party::Endpoint(address) = port.party else { return };
        histories.drop_torn_reads(address);
        let Histories { all, shelf, .. } = histories;
        // Whatever there is room for: it is there, and must hear how it stands.
        let history = all.entry(address).or_default();
        if history.given_up.is_none() {
            if is_anew {
                // Its sources send it again.
                port.lose_all(pool);
            } else {
                // Nobody has given it that yet.
                let owed = core::mem::take(&mut port.owed);
                port.discard(pool);
                port.owed = owed;
            }
            history.begin(address, mark, port, pool);
            let told = history.tell(address, port, pool, shelf);
            self.note_told(link, address, told);
        }
    }

    /// How it goes on for an endpoint that is told what was.
    pub(super) fn note_told(&mut self, link: LinkId, address: Address, told: Told) {
        self.port_mut(link).note_told(told);
        if told == Told::Useless {
            self.strand(link, address);
        }
    }

    /// Tells new starts of endpoints the next piece of what was, once each: those that have taken most of the one before. To be
    /// called once in each round, between others' turns. Whether anything is to be written.
    pub fn tell(&mut self) -> bool {
        let mut has_told = false;
        for _ in 0..self.told.len() {
            let Some(link) = self.told.pop_front() else { break };
            let Self { ports, pool, histories, .. } = self;
            let (Some(histories), Some(port)) = (histories, &mut ports[link.0 as usize]) else {
                continue;
            };
            port.in_told = false;
            let Party::Endpoint(address) = port.party else { continue };
            let Histories { all, shelf, .. } = histories;
            let history = all.get_mut(&address);
            if let Some(history) = history.filter(|_| port.is_told && port.is_up()) {
                let told = history.tell(address, port, pool, shelf);
                self.note_told(link, address, told);
                has_told = true;
                self.touch(link);
            }
        }
        has_told
    }

    /// What the endpoint at `link` is told next has been read from the disk.
    pub(super) fn note_telling(&mut self, link: LinkId) {
        let Some(Some(port)) = self.ports.get_mut(link.0 as usize) else { return };
        port.awaits_disk = false;
        if port.has_to_be_told() {
            port.in_told = true;
            self.told.push_back(link);
        }
    }

    /// Whether [`Relay::tell`] has something to do.
    pub fn has_to_tell(&self) -> bool {
        !self.told.is_empty()
    }

    /// The start at `link` that was being told what was has gone.
    pub(super) fn stop_telling(&mut self, link: LinkId) {
        let port = self.port_mut(link);
        port.note_told(Told::All);
        if let (Party::Endpoint(address), Some(histories)) = (port.party, &mut self.histories) {
            let untold = histories.stop_telling(address);
            self.lose(link, untold);
        }
    }

    /// The process at `link` has been killed, and its next start is there: what it has still said is taken as it comes, for
    /// whatever follows from it may be known already. To be followed by the rest of its input, and [`Relay::suspend`].
    pub fn hear_out(&mut self, link: LinkId) {
        self.leave_line(link);
        self.port_mut(link).is_heard_out = true;
    }
}
