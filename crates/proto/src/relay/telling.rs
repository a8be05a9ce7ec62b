//! What an endpoint is told out of what is kept of it: a new start of it all that was, one that takes more slowly than others
//! send what it has not taken yet.
//!
//! A new start is told piece by piece, by its queue, when the earlier one has taken in what: each intake, and then the frames
//! that it took in ([`Relay::tell`]). Behind the last intake, and whenever it is only behind, it is told *directly*: its link
//! writes frames straight out of the segments in which they lie ([`History::direct`]). So what is kept is the queue of an
//! endpoint that may come back, and a frame that does not find room at once is copied no second time.
//!
//! What enters: what found no room, and how much was written. What leaves: intakes and frames, in the order in which they were
//! given to the endpoint. What may never happen: one is left out, or told twice; the queue and what is told directly get in each
//! other's way (the queue comes first, and while there is more to tell nothing else is put there).

use alloc::collections::BTreeSet;

use crate::id::Address;
use crate::route::queue::Pool;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};

use super::archive::{Found, Place};
use super::history::{Histories, History};
use super::intakes::Intake;
use super::mark::Mark;
use super::notice::empty;
use super::port::{Port, Writer};
use super::record::Entry;
use super::shelf::{READ_AHEAD, Shelf};
use super::store::Cursor;

/// What an endpoint is told waits in its queue up to about so many bytes: as much as its ring holds. As much it takes directly before
/// others have their turn.
pub(super) const TOLD_BYTES_MAX: usize = 256 << 10;

/// How far an endpoint has been told what was.
#[derive(Clone, Copy, Debug)]
pub(super) struct Telling {
    intakes: Cursor,
    intakes_left: u32,
    /// Of the intake that was told last.
    frames_left: u32,
    /// The frame that is told next.
    given: Place,
    /// Segments before this one have been left.
    left: usize,
    /// The first frame that came meanwhile: no start of it has been given that.
    new: Option<Place>,
}

/// What is to be done for an endpoint that is told what was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// There is more for its queue.
    More,
    /// There is more, which it takes straight out of what is kept.
    Direct,
    /// There is more, and it is on the disk.
    Waits,
    All,
    /// The rest is of no use.
    Useless,
}

impl Telling {
    fn is_direct(&self) -> bool {
        self.intakes_left == 0 && self.frames_left == 0
    }
}

impl History {
    /// Whether a new start of it is still to be told what the earlier one was.
    pub fn is_told(&self) -> bool {
        self.telling.is_some() && !self.is_only_behind()
    }

    /// The frames that came last, of so many bytes together, found no room: they are told as soon as there is some.
    pub fn fall_behind(&mut self, bytes: usize) {
        debug_assert!(self.telling.is_none(), "it is told something already");
        let given = self.given.last(bytes);
        let (left, new) = (given.segment, Some(given));
        let intakes = Cursor::default();
        self.telling = Some(Telling { intakes, intakes_left: 0, frames_left: 0, given, left, new });
    }

    /// Whether the frame that came last, of so many bytes, is told in its turn.
    #[inline]
    pub fn hold_back(&mut self, bytes: usize) -> bool {
        let Some(telling) = &mut self.telling else { return false };
        if telling.new.is_none() {
            telling.new = Some(self.given.last(bytes));
        }
        true
    }

    /// Whether all that is left to tell has come meanwhile.
    pub fn is_only_behind(&self) -> bool {
        self.telling.as_ref().is_some_and(|telling| {
            telling.is_direct() && telling.new.is_some_and(|new| telling.given >= new)
        })
    }

    /// Tells by its queue all that is left of what it takes directly, as far as it is in memory; and what comes then.
    pub fn push_rest(
        &mut self,
        address: Address,
        port: &mut Port,
        pool: &mut Pool,
        shelf: &mut Shelf,
    ) -> Told {
        while let Some(telling) = &mut self.telling
            && let Found::Frame(header, frame) = self.given.find(&mut telling.given)
        {
            telling.given.advance(frame.len());
            port.push_notice(pool, frame, &header);
        }
        self.look_ahead(address, shelf)
    }

    /// Channels of frames that no start of it has been given, as far as they are in memory.
    pub fn untold(&self) -> BTreeSet<Entry> {
        let Some(Telling { given, new: Some(new), .. }) = self.telling else {
            return BTreeSet::new();
        };
        let mut place = given.max(new);
        let mut untold = BTreeSet::new();
        while let Found::Frame(header, frame) = self.given.find(&mut place) {
            place.advance(frame.len());
            untold.insert(Entry::of(&header));
        }
        untold.retain(|entry| entry.channel().is_some());
        untold
    }

    /// Whether somebody is told what lies in this segment, or soon will be.
    pub fn is_reading(&self, segment: usize) -> bool {
        let first = |telling: &Telling| telling.given.segment;
        self.telling.as_ref().map(first).is_some_and(|at| (at..at + READ_AHEAD).contains(&segment))
    }

    pub fn stop_telling(&mut self, shelf: &mut Shelf) {
        if let Some(Telling { given, left, .. }) = self.telling.take() {
            self.given.leave(left..given.segment + READ_AHEAD, &mut shelf.spare);
        }
    }

    /// Has what is told next in memory, as far as the disk has read it.
    fn fetch(&mut self, address: Address, shelf: &mut Shelf) {
        let Some(Telling { given, left, .. }) = &mut self.telling else { return };
        let at = given.segment;
        self.given.leave(core::mem::replace(left, at)..at, &mut shelf.spare);
        for number in at..at + READ_AHEAD {
            if let Some((id, length)) = self.given.call(number) {
                shelf.fetch(address, number, id, length);
            }
        }
    }

    /// `address` is there, and stands at `mark`: it is told everything that came after, once more.
    pub fn begin(&mut self, address: Address, mark: Mark, port: &mut Port, pool: &mut Pool) {
        self.stand_at(&mark);
        // Each that is kept takes three bytes at least, and all together no more than there is for histories.
        let intakes_left = (self.intakes.count() - mark.standing.intakes) as u32;
        let (intakes, given) = (mark.intakes, mark.given);
        let left = given.segment;
        let new = None;
        self.telling = Some(Telling { intakes, intakes_left, frames_left: 0, given, left, new });
        if let Some(reads) = &self.reads {
            push_empty(Kind::Clocks, address, [reads.whole(), 0], 0, port, pool);
        }
        // Until it has sent that again nothing else may be taken in.
        let sent = self.sent_count - mark.standing.sent;
        let opening = Intake { polls: 0, frames: intakes_left, micros: sent };
        push_intake(address, opening, port, pool);
    }

    /// Tells the next piece by its queue, as far as it is in memory; and what comes then.
    pub fn tell(
        &mut self,
        address: Address,
        port: &mut Port,
        pool: &mut Pool,
        shelf: &mut Shelf,
    ) -> Told {
        self.fetch(address, shelf);
        while let Some(telling) = self.telling.as_mut().filter(|telling| !telling.is_direct()) {
            if port.waiting_bytes() >= TOLD_BYTES_MAX {
                return Told::More;
            }
            if telling.frames_left == 0 {
                telling.intakes_left -= 1;
                if let Some(intake) = self.intakes.read(&mut telling.intakes) {
                    telling.frames_left = intake.frames;
                    push_intake(address, intake, port, pool);
                }
                continue;
            }
            match self.given.find(&mut telling.given) {
                Found::Frame(header, frame) => {
                    telling.frames_left -= 1;
                    telling.given.advance(frame.len());
                    port.push_notice(pool, frame, &header);
                }
                Found::Elsewhere => {
                    self.fetch(address, shelf);
                    return Told::Waits;
                }
                Found::Damaged => return Told::Useless,
                Found::End => self.stop_telling(shelf),
            }
        }
        self.look_ahead(address, shelf)
    }

    /// What comes next for one that is told directly, or is told nothing any more.
    fn look_ahead(&mut self, address: Address, shelf: &mut Shelf) -> Told {
        let Some(telling) = &mut self.telling else { return Told::All };
        let found = match self.given.find(&mut telling.given) {
            Found::Frame(..) => Told::Direct,
            Found::Elsewhere => Told::Waits,
            Found::Damaged => Told::Useless,
            Found::End => Told::All,
        };
        match found {
            Told::All => self.stop_telling(shelf),
            _ => self.fetch(address, shelf),
        }
        found
    }

    /// What it is told directly next, as far as it is in memory.
    pub fn direct(&self) -> impl Iterator<Item = (Header, &[u8])> {
        let telling = self.telling.filter(Telling::is_direct);
        let mut place = telling.map(|telling| telling.given);
        let mut bytes = 0;
        core::iter::from_fn(move || {
            let place = place.as_mut().filter(|_| bytes < TOLD_BYTES_MAX)?;
            let Found::Frame(header, frame) = self.given.find(place) else { return None };
            place.advance(frame.len());
            bytes += frame.len();
            Some((header, frame))
        })
    }

    /// `bytes` bytes of that have left by `writer`, who takes what is left of the last frame; and what comes next.
    fn take_direct(
        &mut self,
        address: Address,
        bytes: usize,
        writer: &mut Writer,
        pool: &mut Pool,
        shelf: &mut Shelf,
    ) -> Told {
        let mut left = bytes;
        while let Some(telling) = self.telling.as_mut().filter(|_| left > 0) {
            // The driver writes what `slices` shows.
            let Found::Frame(header, frame) = self.given.find(&mut telling.given) else {
                panic!("only what is in memory can be sent");
            };
            telling.given.advance(frame.len());
            writer.record.add(frame.len(), Entry::of(&header));
            if let Some(rest) = frame.get(left..) {
                writer.rest.push(pool, rest);
            }
            left = left.saturating_sub(frame.len());
        }
        match self.look_ahead(address, shelf) {
            // It keeps pace: it goes on when others have had their turn.
            Told::Direct if bytes >= TOLD_BYTES_MAX => Told::More,
            told => told,
        }
    }
}

impl Histories {
    /// See [`History::take_direct`].
    pub fn take_direct(
        &mut self,
        address: Address,
        bytes: usize,
        writer: &mut Writer,
        pool: &mut Pool,
    ) -> Told {
        let Self { all, shelf, .. } = self;
        let history = all.get_mut(&address);
        history.map_or(Told::All, |it| it.take_direct(address, bytes, writer, pool, shelf))
    }

    /// What found no room of what was given to an endpoint just now, so many bytes, is told in its turn. False: it is not kept.
    pub fn fall_behind(&mut self, address: Address, bytes: usize) -> bool {
        let history = self.all.get_mut(&address).filter(|history| history.given_up.is_none());
        history.map(|history| history.fall_behind(bytes)).is_some()
    }
}

pub(super) fn push_intake(address: Address, intake: Intake, port: &mut Port, pool: &mut Pool) {
    let Intake { polls, frames, micros } = intake;
    push_empty(Kind::Intake, address, [polls, micros], frames, port, pool);
}

fn push_empty(
    kind: Kind,
    address: Address,
    [sequence, delivered]: [u64; 2],
    credit: u32,
    port: &mut Port,
    pool: &mut Pool,
) {
    let header = empty(kind, Address::ANONYMOUS, address);
    let header = Header { sequence, credit, delivered, ..header };
    let mut bytes = [0; HEADER_BYTES];
    header.emit(&mut bytes);
    port.push_notice(pool, &bytes, &header);
}
