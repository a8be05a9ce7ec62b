//! What brings a process that was killed back to where it was: all that its relay has given it, when it took that in,
//! and what it has sent since.
//!
//! A process is deterministic but for what it takes in, and when. So a new start of it that is given the same frames,
//! in the same order, at the same polls and the same times ([`Kind::Intake`]), does the same and sends the same. What the
//! earlier start has sent already is compared and goes nowhere: nobody else notices.
//!
//! It is *told* piece by piece, as it takes them: others are served in between ([`Relay::tell`]), and no more than a piece
//! waits. First comes how many intakes there are and how many frames it has sent, then each intake with the frames that it
//! took in, then the frames that nobody has taken in yet. What comes for it meanwhile is told in its turn.
//!
//! What may never happen: a new start sends something else than the earlier one, and anybody is given it; frames wait for
//! one that cannot come back, and nobody is told.

use alloc::collections::BTreeMap;

use crate::id::Address;
use crate::route::queue::Pool;
use crate::route::table::LinkId;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use crate::wire::hello::Standing;

use super::intakes::{Intake, Intakes};
use super::mark::{Mark, Marks};
use super::notice::empty;
use super::port::{Party, Piece, Port};
use super::record::Entry;
use super::store::{Cursor, Store};
use super::{Malformed, Relay, Stop};

/// What all histories of a relay together may take. Whose history would need more can come back no longer.
pub const HISTORIES_BYTES_MAX: u64 = 4 << 30;

/// What an endpoint is told waits for it up to about so many bytes: as much as its ring holds.
pub(super) const TOLD_BYTES_MAX: usize = 256 << 10;

/// The histories of all endpoints of a relay.
#[derive(Debug, Default)]
pub(super) struct Histories {
    all: BTreeMap<Address, History>,
    bytes: u64,
    /// [`HISTORIES_BYTES_MAX`]; less in tests that fill it.
    bytes_max: u64,
}

impl Histories {
    pub fn new(bytes_max: u64) -> Self {
        Self { all: BTreeMap::new(), bytes: 0, bytes_max }
    }

    #[cfg(test)]
    pub fn set_bytes_max(&mut self, bytes_max: u64) {
        self.bytes_max = bytes_max;
    }

    /// Of an endpoint, if it may come back; there is room for `bytes` more.
    #[inline]
    fn of(&mut self, address: Address, bytes: usize) -> Option<&mut History> {
        let history = self.all.entry(address).or_default();
        if history.given_up.is_some() {
            return None;
        }
        // Of one that is being told it the rest is still needed; it grants its peers nothing meanwhile, so little more comes.
        if self.bytes + bytes as u64 > self.bytes_max && history.telling.is_none() {
            self.bytes -=
                history.give_up("what it was given was too much to be kept: it cannot come back");
            return None;
        }
        self.bytes += bytes as u64;
        Some(history)
    }

    /// It may come back no longer.
    pub fn give_up(&mut self, address: Address, why: &'static str) {
        self.bytes -= self.all.entry(address).or_default().give_up(why);
    }

    /// A frame made here is given to an endpoint.
    pub fn give(&mut self, address: Address, frame: &[u8]) {
        if let Some(history) = self.of(address, frame.len()) {
            history.give(frame);
        }
    }

    /// Its present start has gone.
    pub fn stop_telling(&mut self, address: Address) {
        if let Some(history) = self.all.get_mut(&address) {
            history.telling = None;
        }
    }

    /// The place in the history of an endpoint where it says it stands.
    pub fn mark_at(&mut self, address: Address, standing: Standing) -> Result<Mark, &'static str> {
        let Some(history) = self.all.get_mut(&address) else {
            return match standing == Standing::default() {
                true => Ok(Mark::default()),
                false => Err("it stands where it has never been"),
            };
        };
        history.marks.find(standing, &history.intakes, &history.given, &history.sent)
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
    given_up: Option<&'static str>,
    /// Frames that were given to it, in order.
    given: Store,
    /// When it has taken in how many of them.
    intakes: Intakes,
    /// A digest of each frame that it has sent,
    sent: Store,
    /// and how many these are.
    sent_count: u64,
    /// Of these, how many its present start has sent, and where the next one is.
    repeated: u64,
    next_sent: Cursor,
    /// What its present start is still to be told.
    telling: Option<Telling>,
    /// Where starts of it have stood.
    marks: Marks,
}

/// How far a new start has been told what was.
#[derive(Clone, Copy, Debug)]
struct Telling {
    intakes: Cursor,
    intakes_left: u32,
    /// Of the intake that was told last.
    frames_left: u32,
    given: Cursor,
}

/// A frame that an endpoint sends, compared with what its earlier start has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sending {
    /// The earlier one had not come so far.
    New(u64),
    /// The same.
    Repeated,
    /// Something else.
    Other,
}

/// Bytes that the digest of a frame takes.
pub(super) const DIGEST_BYTES: usize = size_of::<u64>();

impl History {
    fn bytes(&self) -> u64 {
        self.intakes.bytes() + self.sent.len() + self.given.len()
    }

    /// Nothing is kept of it any more. So many bytes were.
    fn give_up(&mut self, why: &'static str) -> u64 {
        let bytes = self.bytes();
        *self = Self { given_up: Some(why), ..Self::default() };
        bytes
    }

    pub fn give(&mut self, frame: &[u8]) {
        self.given.push(frame);
    }

    pub fn compare(&mut self, frame: &[u8]) -> Sending {
        let digest = digest(frame);
        if self.repeated == self.sent_count {
            return Sending::New(digest);
        }
        let before = self.sent.take(&mut self.next_sent).map(u64::from_le_bytes);
        self.repeated += 1;
        if before == Some(digest) { Sending::Repeated } else { Sending::Other }
    }

    /// It has been passed on.
    pub fn note_sent(&mut self, digest: u64) {
        self.sent.push(&digest.to_le_bytes());
        self.sent_count += 1;
        self.repeated += 1;
    }

    /// `address` is there, and stands at `mark`: it is told everything that came after, once more.
    fn begin(&mut self, address: Address, mark: Mark, port: &mut Port, pool: &mut Pool) {
        (self.repeated, self.next_sent) = (mark.standing.sent, mark.sent);
        let intakes_left = self.intakes.count() - mark.standing.intakes as u32;
        let (intakes, given) = (mark.intakes, mark.given);
        self.telling = Some(Telling { intakes, intakes_left, frames_left: 0, given });
        // Until it has sent that again nothing else may be taken in.
        let sent = self.sent_count - mark.standing.sent;
        let opening = Intake { polls: 0, frames: intakes_left, micros: sent };
        push_intake(address, opening, port, pool);
    }

    /// Tells the next piece; whether there is more.
    fn tell(&mut self, address: Address, port: &mut Port, pool: &mut Pool) -> bool {
        while let Some(telling) = &mut self.telling {
            if port.waiting_bytes() >= TOLD_BYTES_MAX {
                return true;
            }
            if telling.frames_left == 0 && telling.intakes_left > 0 {
                telling.intakes_left -= 1;
                if let Some(intake) = self.intakes.read(&mut telling.intakes) {
                    telling.frames_left = intake.frames;
                    push_intake(address, intake, port, pool);
                }
                continue;
            }
            telling.frames_left = telling.frames_left.saturating_sub(1);
            let given = &self.given;
            let header = given.take::<HEADER_BYTES>(&mut telling.given);
            let parsed = header.as_ref().and_then(|bytes| Header::parse(bytes).ok());
            let (Some(bytes), Some(header)) = (header, parsed) else {
                self.telling = None;
                break;
            };
            let mut left = header.length as usize;
            port.push_part(pool, &bytes);
            while left > 0 {
                let part = given.read(&mut telling.given, left);
                // Frames are kept whole.
                debug_assert!(!part.is_empty());
                left -= part.len().max(1);
                port.push_part(pool, part);
            }
            port.note_pushed(&header);
        }
        false
    }
}

fn push_intake(address: Address, intake: Intake, port: &mut Port, pool: &mut Pool) {
    let Intake { polls, frames, micros } = intake;
    let header = empty(Kind::Intake, Address::ANONYMOUS, address);
    let header = Header { sequence: polls, credit: frames, delivered: micros, ..header };
    let mut bytes = [0; HEADER_BYTES];
    header.emit(&mut bytes);
    port.push_notice(pool, &bytes, &header);
}

impl Relay {
    /// A frame of `from`: whether it goes on its way, and then its digest. It does not if the endpoint only does again what
    /// it did before, or tells of what it has taken in.
    #[inline]
    pub(super) fn recall(
        &mut self,
        from: LinkId,
        header: &Header,
        frame: &[u8],
    ) -> Result<Option<Option<u64>>, Stop> {
        if header.kind == Kind::Intake {
            let intake = Intake::of(header).map_err(Stop::Broken)?;
            if let Some(history) = self.history_of(from, intake.bytes()) {
                history.intakes.push(intake);
                self.counters.intake_bytes += intake.bytes() as u64;
                self.counters.taken_in += intake.frames as u64;
            }
            return Ok(None);
        }
        let Some(history) = self.history_of(from, 0) else { return Ok(Some(None)) };
        match history.compare(frame) {
            Sending::New(digest) => Ok(Some(Some(digest))),
            Sending::Repeated => Ok(None),
            Sending::Other => {
                Err(Stop::Broken(Malformed("it does not do again what it did before")))
            }
        }
    }

    /// A frame of `from` with this digest is on its way.
    #[inline]
    pub(super) fn note_sending(&mut self, from: LinkId, digest: Option<u64>) {
        if let Some(digest) = digest
            && let Some(history) = self.history_of(from, DIGEST_BYTES)
        {
            history.note_sent(digest);
        }
    }

    /// Gives a frame to an endpoint that may come back; one that is away gets it then, or its source hears that it never will.
    /// Its queue has no bound, for whoever is recorded must not have to wait. False: it may not come back.
    pub(super) fn forward_recorded(
        &mut self,
        to: LinkId,
        bytes: &mut [u8],
        at: usize,
        header: &Header,
    ) -> bool {
        let length = HEADER_BYTES + header.length as usize;
        let Some(history) = self.history_of(to, length) else { return false };
        bytes[at + 6] += 1;
        history.give(&bytes[at..at + length]);
        let is_told = history.telling.is_some();
        self.counters.frames += 1;
        self.counters.bytes += length as u64;
        let port = self.port_mut(to);
        if is_told {
            // In its turn.
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
    fn history_of(&mut self, link: LinkId, bytes: usize) -> Option<&mut History> {
        let histories = self.histories.as_mut()?;
        match self.ports[link.0 as usize].as_ref()?.party {
            Party::Endpoint(address) => histories.of(address, bytes),
            _ => None,
        }
    }

    /// The endpoint at `link` has attached, and stands at `mark`: it is given once more all that it was given after that.
    pub(super) fn replay(&mut self, link: LinkId, mark: Mark) {
        let Self { ports, pool, histories, .. } = self;
        let (Some(histories), Some(port)) = (histories, &mut ports[link.0 as usize]) else {
            return;
        };
        let Party::Endpoint(address) = port.party else { return };
        if let Some(history) = histories.of(address, 0) {
            // Nobody has given it that yet.
            let owed = core::mem::take(&mut port.owed);
            port.discard(pool);
            port.owed = owed;
            history.begin(address, mark, port, pool);
            port.is_told = history.tell(address, port, pool);
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
            let history = histories.all.get_mut(&address);
            if let Some(history) = history.filter(|_| port.is_told && port.is_up()) {
                port.is_told = history.tell(address, port, pool);
                has_told = true;
                self.touch(link);
            }
        }
        has_told
    }

    /// Whether [`Relay::tell`] has something to do.
    pub fn has_to_tell(&self) -> bool {
        !self.told.is_empty()
    }

    /// The start at `link` that was being told what was has gone.
    pub(super) fn stop_telling(&mut self, link: LinkId) {
        let port = self.port_mut(link);
        port.is_told = false;
        if let (Party::Endpoint(address), Some(histories)) = (port.party, &mut self.histories) {
            histories.stop_telling(address);
        }
    }

    /// The process at `link` has been killed, and its next start is there: what it has still said is taken as it comes, for
    /// whatever follows from it may be known already. To be followed by the rest of its input, and [`Relay::suspend`].
    pub fn hear_out(&mut self, link: LinkId) {
        self.leave_line(link);
        self.port_mut(link).is_heard_out = true;
    }
}

/// Of all bytes of a frame.
fn digest(frame: &[u8]) -> u64 {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut words = frame.chunks_exact(8);
    for word in &mut words {
        // Chunks of eight bytes have eight bytes.
        let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
        state = (state ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29);
    }
    for byte in words.remainder() {
        state = (state ^ *byte as u64).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29);
    }
    state
}
