//! What a program reads of clocks and of chance, kept so that a new start of it is told the same.
//!
//! In: what is read, and how the system answers where nothing is on record. Out: what the earlier start was told. The
//! record lies in memory that outlives the process: a [`Head`], then one entry for each read, in their order. A process
//! can be killed between any two instructions, so an entry counts from when [`Head::recorded`] says so, which is before the
//! program has its answer.
//!
//! Places in the record are counted from the beginning of the first start. What lies before the oldest image of the process is needed
//! no more ([`Head::base`]): its room is used again, from the first byte on. An entry that does not fit before the end of the
//! room begins there, behind a mark.
//!
//! What may never happen: a read is answered with what another one was told, or with a part of that; a program has an answer that is in
//! no record while it may still be started anew.

use core::fmt;
use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::Release};

pub use calls::{
    Call, FACTS, Files, HELD_CLEAR, HELD_DROP, HELD_END, HELD_GET, HELD_KEEP, HELD_NAME_BYTES,
    HELD_SHIP, HELD_WORD_BYTES, REFUSAL_BYTES, SHIP_SUFFIX, held_name,
};

mod calls;

/// The record of one process, head and entries. Only what is written takes memory. Reading a clock takes two to
/// five bytes.
pub const CLOCKS_BYTES: usize = 256 << 20;

/// Where the entries begin.
pub const HEAD_BYTES: usize = 4096;

/// Where in the record stands, as eight bytes, before which place nothing is needed any more.
pub const BASE_AT: usize = offset_of!(Head, base);

/// Where in the record stands, as eight bytes, whether it is full.
pub const FULL_AT: usize = offset_of!(Head, is_full);

/// Where stands, as eight bytes each, how often whichever start came furthest has looked for messages, and the present one.
pub const POLLS_AT: usize = offset_of!(Head, polls);

/// Where stands, as eight bytes each, how many bytes of entries there are, and how many of them the present start has been told.
pub const RECORDED_AT: usize = offset_of!(Head, recorded);

/// Where stands, as eight bytes, how often an image of the process has been asked for.
pub const WANTED_AT: usize = POLLS_AT + offset_of!(Polls, wanted);
/// Where stands, as eight bytes and a text of so many bytes behind them, why the process cannot be restarted; 0 bytes: it can be.
pub const REFUSAL_AT: usize = offset_of!(Head, files) + Files::REFUSED_AT;
/// Where the part about files begins ([`Files`]): first come [`FILES_WORDS`] words of eight bytes, of which the last is the length of
/// the reason; the text follows.
pub const FILES_AT: usize = offset_of!(Head, files);
/// See [`FILES_AT`].
pub const FILES_WORDS: usize = (Files::REFUSED_AT + size_of::<u64>()) / size_of::<u64>();
/// Where stands, as eight bytes, whether an effect waits until the agent has told another node of it ([`Head::ships`]).
pub const SHIPS_AT: usize = offset_of!(Head, ships);
/// Where stand, as two times eight bytes, the random bits of the name under which the agent holds open files for the process
/// ([`held_name`]); zeros: nobody does.
pub const HELD_AT: usize = offset_of!(Head, held);
/// And where the number of frames is that were taken in again.
pub const TAKEN_AT: usize = POLLS_AT + offset_of!(Polls, taken);

/// Clocks that are told apart.
const CLOCKS: usize = 24;

/// What begins a record: shared by all starts of a process, one after the other.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Head {
    /// Which start of the process has it: 0 before the first.
    start: AtomicU64,
    /// The process id of that start.
    pub owner: AtomicU64,
    /// Not 0: something was told that had no room here.
    is_full: AtomicU64,
    /// Looks for messages.
    pub polls: Polls,
    /// Bytes of entries.
    recorded: AtomicU64,
    /// Of these, how many this start has been told. Behind it, see [`RECORDED_AT`].
    told: AtomicU64,
    /// Reads of this start.
    reads: AtomicU64,
    /// What each clock said last.
    last: [AtomicU64; CLOCKS],
    /// What to add to each of them: some begin anew with the process.
    ahead: [AtomicU64; CLOCKS],
    /// What lies before this place is needed by no start any more. Written by whoever starts the process.
    base: AtomicU64,
    /// System calls on files.
    pub files: Files,
    /// Not 0: the process may go on on another node if this one is lost, so that what it has recorded is known there before it
    /// performs an effect. Written by whoever starts the process.
    ships: AtomicU64,
    /// See [`HELD_AT`]. Of the agent that has started the present process, so it is not in an image of one.
    held: [AtomicU64; 2],
}

/// How often a process has looked for messages, counted from the beginning of each start.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Polls {
    /// Of whichever start came furthest.
    pub furthest: AtomicU64,
    /// Of the present one.
    pub present: AtomicU64,
    /// How often an image of the process has been asked for.
    pub wanted: AtomicU64,
    /// Frames that starts have taken in again: whoever waits at a poll for its relay to read them from a disk comes further.
    pub taken: AtomicU64,
}

/// What there is of a record for a start of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Before this place nothing is needed any more.
    pub base: u64,
    /// Up to this one the start has been told what is there, or has made it.
    pub end: u64,
    /// There is no more room.
    pub is_full: bool,
}

/// How far a start has come in its record: for an image of the process, which has no record in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    told: u64,
    reads: u64,
    present: u64,
    last: [u64; CLOCKS],
    ahead: [u64; CLOCKS],
}

impl Place {
    /// So many bytes of the record it has been told.
    pub fn told(&self) -> u64 {
        self.told
    }
}

const _: () = assert!(size_of::<Head>() <= HEAD_BYTES);
const _: () = assert!(offset_of!(Head, told) == RECORDED_AT + size_of::<u64>());

impl Head {
    /// A start of the process, counted from 1, takes hold of the record. False: it had it before, as another program, or a later
    /// start has it. (What a process was told of its number stays what it was told, though it was made of an image since, as another
    /// start; its children are told the same.)
    pub fn begin(&self, start: u64, owner: u64) -> bool {
        if self.start.load(Relaxed) >= start {
            return false;
        }
        let words = [&self.told, &self.reads, &self.polls.present];
        let words = words.into_iter().chain(&self.last).chain(&self.ahead);
        words.for_each(|word| word.store(0, Relaxed));
        self.owner.store(owner, Relaxed);
        self.start.store(start, Release);
        true
    }

    /// What there is of the record for the present start.
    #[inline]
    pub fn extent(&self) -> Extent {
        Extent {
            base: self.base.load(Relaxed),
            end: self.told.load(Relaxed),
            is_full: self.is_full.load(Relaxed) != 0,
        }
    }

    /// Whether an effect waits until another node knows of it.
    pub fn ships(&self) -> bool {
        self.ships.load(Relaxed) != 0
    }

    /// The name under which open files are held for the process, if they are.
    pub fn held_name(&self) -> Option<[u8; HELD_NAME_BYTES]> {
        let chance = [self.held[0].load(Relaxed), self.held[1].load(Relaxed)];
        (chance != [0; 2]).then(|| held_name(chance))
    }

    /// Whether this start of the process, counted from 1, has the record.
    pub fn is_of(&self, start: u64) -> bool {
        self.start.load(Relaxed) == start
    }

    /// How far the present start has come.
    pub fn place(&self) -> Place {
        let all = |words: &[AtomicU64; CLOCKS]| core::array::from_fn(|at| words[at].load(Relaxed));
        Place {
            told: self.told.load(Relaxed),
            reads: self.reads.load(Relaxed),
            present: self.polls.present.load(Relaxed),
            last: all(&self.last),
            ahead: all(&self.ahead),
        }
    }

    /// As [`Head::begin`], for a start that does not begin with the program but where an earlier one stood. False: it has
    /// the record already, or the record does not go so far.
    pub fn resume(&self, start: u64, owner: u64, place: &Place) -> bool {
        let kept = self.base.load(Relaxed)..=self.recorded.load(Relaxed);
        if !kept.contains(&place.told) || !self.begin(start, owner) {
            return false;
        }
        self.told.store(place.told, Relaxed);
        self.reads.store(place.reads, Relaxed);
        self.polls.present.store(place.present, Relaxed);
        let words = self.last.iter().zip(&place.last).chain(self.ahead.iter().zip(&place.ahead));
        words.for_each(|(word, value)| word.store(*value, Relaxed));
        true
    }
}

/// Something that says what time it is. Below 16: the numbers of `clock_gettime`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock(u8);

impl Clock {
    /// `gettimeofday`, in microseconds.
    pub const TIME_OF_DAY: Clock = Clock(16);
    /// `time`, in seconds.
    pub const TIME: Clock = Clock(17);
    /// `timespec_get`, in nanoseconds.
    pub const TIMESPEC: Clock = Clock(18);
    /// `clock`, in microseconds.
    pub const CLOCK: Clock = Clock(19);

    /// Of `clock_gettime`: those that every system has.
    #[inline]
    pub const fn of(id: i32) -> Option<Clock> {
        match id {
            0..=7 | 11 => Some(Clock(id as u8)),
            _ => None,
        }
    }

    /// Whether somebody may put it back; the others never go back, whichever start is asked.
    #[inline]
    const fn is_of_the_day(self) -> bool {
        matches!(self.0, 0 | 5 | 11 | 16 | 17 | 18)
    }
}

/// Something that gives bytes which nobody can foresee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `getrandom`
    Random = 0,
    /// `getentropy`
    Entropy = 1,
    /// `arc4random` and its kin
    Arc4 = 2,
}

/// One read, without its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// The time.
    Clock(Clock),
    /// So many bytes of chance.
    Bytes(Source, u64),
    /// A system call on files.
    Call(Call),
    /// What stands there is the beginning of an entry: the rest of it is not on record.
    Torn,
    /// What stands there is no entry.
    Unknown,
}

impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids =
            ["REALTIME", "MONOTONIC", "PROCESS_CPUTIME_ID", "THREAD_CPUTIME_ID", "MONOTONIC_RAW"];
        let coarse = ["REALTIME_COARSE", "MONOTONIC_COARSE", "BOOTTIME"];
        match self {
            Question::Clock(Clock::TIME_OF_DAY) => write!(f, "gettimeofday"),
            Question::Clock(Clock::TIME) => write!(f, "time"),
            Question::Clock(Clock::TIMESPEC) => write!(f, "timespec_get"),
            Question::Clock(Clock::CLOCK) => write!(f, "clock"),
            Question::Clock(Clock(id)) => {
                let name = ids.iter().chain(&coarse).nth(*id as usize).unwrap_or(&"TAI");
                write!(f, "clock_gettime of CLOCK_{name}")
            }
            Question::Bytes(source, length) => {
                let name = ["getrandom", "getentropy", "arc4random"][*source as usize];
                write!(f, "{name} of {length} bytes")
            }
            Question::Call(Call { number, digest }) => {
                write!(f, "system call {number} with arguments of digest {digest:08x}")
            }
            Question::Torn => write!(f, "something of which not all is on record"),
            Question::Unknown => write!(f, "nothing that is known"),
        }
    }
}

/// Why a read is not answered as usual.
#[derive(Debug, PartialEq, Eq)]
pub enum Problem {
    /// The earlier start has read something else in this place: nothing may be told.
    Other {
        /// Which read of the process, from 1.
        read: u64,
        /// Of this start.
        now: Question,
        /// Of the earlier one.
        before: Question,
    },
    /// There is no room for this answer, which is true, nor for any other from now on.
    Full(i64),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::Other { read, now, before } => {
                write!(f, "its read {read} of clocks and chance is {now}, and was {before}")
            }
            Problem::Full(_) => write!(f, "its record of clocks and chance is full"),
        }
    }
}

/// See the module head.
pub struct Record<'a> {
    head: &'a Head,
    entries: &'a mut [u8],
    /// The place at which the room that is being filled or read began,
    lap: u64,
    /// and the one behind what may be filled of it, as far as anybody has looked.
    limit: u64,
}

/// Tags of entries: below, clocks.
const BYTES_TAG: u8 = 32;
/// A system call on files.
const CALL_TAG: u8 = 40;
/// What follows stands at the beginning of the room.
const TURN_TAG: u8 = 255;
const NUMBER_BYTES_MAX: usize = 10;

impl<'a> Record<'a> {
    /// `entries`: all the room there is for them.
    pub fn new(head: &'a Head, entries: &'a mut [u8]) -> Self {
        Self { head, entries, lap: 0, limit: 0 }
    }

    /// Whether nothing more is recorded, and everybody asks the system.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.head.is_full.load(Relaxed) != 0
    }

    /// What `clock` says; `now` asks the system.
    #[inline]
    pub fn clock(&mut self, clock: Clock, now: impl FnOnce() -> i64) -> Result<i64, Problem> {
        let at = self.head.told.load(Relaxed);
        if at < self.head.recorded.load(Relaxed) {
            return self.recall_clock(clock, at);
        }
        let last = self.head.last[clock.0 as usize].load(Relaxed) as i64;
        let value = self.not_before(clock, last, now());
        let Some((at, room)) = self.room(at, 1 + NUMBER_BYTES_MAX) else {
            return Err(self.fill(value));
        };
        room[0] = clock.0;
        let length = 1 + put_number(&mut room[1..], value.wrapping_sub(last));
        self.head.recorded.store(at + length as u64, Release);
        self.note_clock(clock, value, at + length as u64);
        Ok(value)
    }

    /// Fills `into` from `source`; `draw` asks the system, and says as the system how many bytes it has given, or below 0
    /// its error.
    pub fn bytes(
        &mut self,
        source: Source,
        into: &mut [u8],
        draw: impl FnOnce(&mut [u8]) -> i64,
    ) -> Result<i64, Problem> {
        let at = self.head.told.load(Relaxed);
        if at < self.head.recorded.load(Relaxed) {
            return self.recall_bytes(source, into, at);
        }
        let result = draw(into);
        let given = usize::try_from(result).unwrap_or(0).min(into.len());
        let length = 1 + 2 * NUMBER_BYTES_MAX + given;
        let Some((at, room)) = self.room(at, length) else {
            return Err(self.fill(result));
        };
        room[0] = BYTES_TAG + source as u8;
        let mut length = 1 + put_number(&mut room[1..], into.len() as i64);
        length += put_number(&mut room[length..], result);
        room[length..length + given].copy_from_slice(&into[..given]);
        length += given;
        self.head.recorded.store(at + length as u64, Release);
        self.note_told(at + length as u64);
        Ok(result)
    }

    /// Where the next entry, of so many bytes at most, is to stand that would stand at `at`. `None`: there is no room.
    #[inline]
    fn room(&mut self, mut at: u64, length: usize) -> Option<(u64, &mut [u8])> {
        if at + length as u64 > self.limit {
            at = self.make_room(at, length as u64)?;
        }
        let offset = (at - self.lap) as usize;
        Some((at, &mut self.entries[offset..offset + length]))
    }

    #[cold]
    fn make_room(&mut self, at: u64, length: u64) -> Option<u64> {
        let all = self.entries.len() as u64;
        let base = self.head.base.load(Relaxed);
        let mut lap = at - at % all;
        let is_turning = at + length > lap + all;
        if is_turning {
            lap += all;
        }
        let start = if is_turning { lap } else { at };
        let limit = lap.min(base) + all;
        if start + length > limit {
            return None;
        }
        if is_turning && !at.is_multiple_of(all) {
            // So much of this room is free: `start` is not beyond the limit.
            self.entries[(at % all) as usize] = TURN_TAG;
        }
        (self.lap, self.limit) = (lap, limit);
        Some(start)
    }

    /// Where the entry stands that follows at `at`, and where that is in the room. `None`: it is gone.
    fn locate(&mut self, mut at: u64) -> Option<(u64, usize)> {
        // It is found out anew how much room there is.
        self.look_anew();
        if at < self.head.base.load(Relaxed) {
            return None;
        }
        let all = self.entries.len() as u64;
        self.lap = at - at % all;
        if self.entries.get((at - self.lap) as usize) == Some(&TURN_TAG) {
            self.lap += all;
            at = self.lap;
        }
        Some((at, (at - self.lap) as usize))
    }

    /// What is known of the room may be that of an earlier time, or of another node.
    pub fn look_anew(&mut self) {
        self.limit = 0;
    }

    #[cold]
    fn recall_clock(&mut self, clock: Clock, at: u64) -> Result<i64, Problem> {
        let Some((at, offset)) = self.locate(at) else {
            return Err(self.other(Question::Clock(clock), Question::Unknown));
        };
        let (before, rest) = self.question(offset);
        match (before, self.number(rest)) {
            (Question::Clock(known), Some((delta, end))) if known == clock => {
                let end = self.whole(at, end - offset, Question::Clock(clock))?;
                let last = self.head.last[clock.0 as usize].load(Relaxed) as i64;
                let value = last.wrapping_add(delta);
                self.note_clock(clock, value, end);
                Ok(value)
            }
            _ => Err(self.other(Question::Clock(clock), before)),
        }
    }

    fn recall_bytes(&mut self, source: Source, into: &mut [u8], at: u64) -> Result<i64, Problem> {
        let now = Question::Bytes(source, into.len() as u64);
        let Some((at, offset)) = self.locate(at) else {
            return Err(self.other(now, Question::Unknown));
        };
        let (before, rest) = self.question(offset);
        let Some((result, rest)) = self.number(rest).filter(|_| now == before) else {
            return Err(self.other(now, before));
        };
        let given = usize::try_from(result).unwrap_or(0).min(into.len());
        let Some(bytes) = self.entries.get(rest..rest + given) else {
            return Err(self.other(now, Question::Unknown));
        };
        let end = self.whole(at, rest + given - offset, now)?;
        into[..given].copy_from_slice(bytes);
        self.note_told(end);
        Ok(result)
    }

    /// Where an entry of so many bytes ends that answers this. Behind what is recorded there is what an earlier lap has left, or zeros:
    /// then it is none.
    fn whole(&self, at: u64, length: usize, now: Question) -> Result<u64, Problem> {
        let end = at + length as u64;
        if end > self.head.recorded.load(Relaxed) {
            return Err(self.other(now, Question::Torn));
        }
        Ok(end)
    }

    /// Clocks that never go back do not when a new start begins to ask them.
    #[inline]
    fn not_before(&self, clock: Clock, last: i64, now: i64) -> i64 {
        let ahead = &self.head.ahead[clock.0 as usize];
        let value = now.wrapping_add(ahead.load(Relaxed) as i64);
        if value >= last || clock.is_of_the_day() {
            return value;
        }
        ahead.store(last.wrapping_sub(now) as u64, Relaxed);
        last
    }

    #[inline]
    fn note_clock(&self, clock: Clock, value: i64, end: u64) {
        self.head.last[clock.0 as usize].store(value as u64, Relaxed);
        self.note_told(end);
    }

    #[inline]
    fn note_told(&self, end: u64) {
        self.head.told.store(end, Relaxed);
        self.head.reads.store(self.head.reads.load(Relaxed).wrapping_add(1), Relaxed);
    }

    #[cold]
    fn fill(&self, answer: i64) -> Problem {
        self.head.is_full.store(1, Release);
        Problem::Full(answer)
    }

    #[cold]
    fn other(&self, now: Question, before: Question) -> Problem {
        Problem::Other { read: self.head.reads.load(Relaxed).wrapping_add(1), now, before }
    }

    /// What was read there, and where its answer begins.
    fn question(&self, at: usize) -> (Question, usize) {
        let Some(&tag) = self.entries.get(at) else { return (Question::Unknown, at) };
        if (tag as usize) < CLOCKS {
            return (Question::Clock(Clock(tag)), at + 1);
        }
        if tag == CALL_TAG {
            let call = self.call_at(at + 1);
            return call
                .map_or((Question::Unknown, at), |(call, rest)| (Question::Call(call), rest));
        }
        let source = [Source::Random, Source::Entropy, Source::Arc4]
            .into_iter()
            .find(|source| BYTES_TAG + *source as u8 == tag);
        match (source, self.number(at + 1)) {
            (Some(source), Some((length, rest))) => (Question::Bytes(source, length as u64), rest),
            _ => (Question::Unknown, at),
        }
    }

    /// The number that stands there, and where it ends.
    fn number(&self, at: usize) -> Option<(i64, usize)> {
        let mut folded = 0;
        for (place, byte) in self.entries.get(at..)?.iter().take(NUMBER_BYTES_MAX).enumerate() {
            folded |= ((byte & 0x7f) as u64) << (7 * place);
            if byte & 0x80 == 0 {
                return Some(((folded >> 1) as i64 ^ -((folded & 1) as i64), at + place + 1));
            }
        }
        None
    }
}

/// Writes a number in seven bits of each byte, small ones of either sign short. How many bytes it took.
#[inline]
fn put_number(room: &mut [u8], value: i64) -> usize {
    let mut folded = ((value << 1) ^ (value >> 63)) as u64;
    let mut length = 0;
    while folded >= 0x80 {
        room[length] = folded as u8 | 0x80;
        folded >>= 7;
        length += 1;
    }
    room[length] = folded as u8;
    length + 1
}

#[cfg(test)]
mod tests;
