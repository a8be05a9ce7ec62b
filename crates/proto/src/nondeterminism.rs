//! What a program reads of clocks and of chance, kept so that a new start of it is told the same.
//!
//! In: what is read, and how the system answers where nothing is on record. Out: what the earlier start was told. The
//! record lies in memory that outlives the process: a [`RecordHead`], then one entry for each read, in their order. A process
//! can be killed between any two instructions, so an entry counts from when [`RecordHead::recorded`] says so, which is before the
//! program has its answer.
//!
//! Places in the record are counted from the beginning of the first start. What lies before the oldest image of the process is needed
//! no more ([`RecordHead::base`]): its room is used again, from the first byte on. An entry that does not fit before the end of the
//! room begins there, behind a mark.
//!
//! What may never happen: a read is answered with what another one was told, or with a part of that; a program has an answer that is in
//! no record while it may still be restarted.

use core::fmt;
use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::Release};

pub use file_calls::{
    DURABLE_SUFFIX, FileCall, FileRecord, HELD_CLEAR, HELD_DROP, HELD_END, HELD_GET, HELD_KEEP,
    HELD_MAKE_DURABLE, HELD_NAME_BYTES, HELD_WORD_BYTES, NO_RESTART_BYTES, PRECONDITION_WORDS,
    held_name,
};

mod file_calls;

/// The record of one process, head and entries. Only what is written takes memory. Reading a clock takes two to
/// five bytes.
pub const NONDETERMINISM_BYTES: usize = 256 << 20;

/// Where the entries begin.
pub const RECORD_HEAD_BYTES: usize = 4096;

/// Where in the record stands, as eight bytes, before which place nothing is needed any more.
pub const BASE_AT: usize = offset_of!(RecordHead, base);

/// Where in the record stands, as eight bytes, whether it is full.
pub const FULL_AT: usize = offset_of!(RecordHead, is_full);

/// Where stands, as eight bytes each, how often whichever start came furthest has looked for messages, and the present one.
pub const POLLS_AT: usize = offset_of!(RecordHead, polls);

/// Where stands, as eight bytes each, how many bytes of entries there are, and how many of them the present start has been told.
pub const RECORDED_AT: usize = offset_of!(RecordHead, recorded);

/// Where stands, as eight bytes, how often an image of the process has been asked for.
pub const CHECKPOINT_REQUESTS_AT: usize = POLLS_AT + offset_of!(Polls, checkpoints_requested);
/// Where stands, as eight bytes and a text of so many bytes behind them, why the process cannot be restarted; 0 bytes: it can be.
pub const NO_RESTART_AT: usize = offset_of!(RecordHead, files) + FileRecord::NO_RESTART_AT;
/// Where the part about files begins ([`FileRecord`]): first come [`FILES_WORDS`] words of eight bytes, of which the last is the length of
/// the reason; the text follows.
pub const FILES_AT: usize = offset_of!(RecordHead, files);
/// See [`FILES_AT`].
pub const FILES_WORDS: usize = (FileRecord::NO_RESTART_AT + size_of::<u64>()) / size_of::<u64>();
/// Where stands, as eight bytes, whether an effect waits until the agent has told another node of it ([`RecordHead::durable_effects`]).
pub const DURABLE_EFFECTS_AT: usize = offset_of!(RecordHead, durable_effects);
/// Where stand, as two times eight bytes, the random bits of the name under which the agent holds open files for the process
/// ([`held_name`]); zeros: nobody does.
pub const HELD_AT: usize = offset_of!(RecordHead, held);
/// And where the number of frames is that were taken in again.
pub const REDELIVERED_AT: usize = POLLS_AT + offset_of!(Polls, redelivered);

/// Clocks that are told apart.
const CLOCKS: usize = 24;

/// What begins a record: shared by all starts of a process, one after the other.
#[repr(C)]
#[derive(Debug, Default)]
pub struct RecordHead {
    /// Which start of the process has it: 0 before the first.
    incarnation: AtomicU64,
    /// The process id of that start.
    pub owner: AtomicU64,
    /// Not 0: something was told that had no room here.
    is_full: AtomicU64,
    /// Looks for messages.
    pub polls: Polls,
    /// Bytes of entries.
    recorded: AtomicU64,
    /// Of these, how many this start has been told. Behind it, see [`RECORDED_AT`].
    consumed: AtomicU64,
    /// Reads of this start.
    reads: AtomicU64,
    /// What each clock said last.
    last: [AtomicU64; CLOCKS],
    /// What to add to each of them: some begin anew with the process.
    ahead: [AtomicU64; CLOCKS],
    /// What lies before this place is needed by no start any more. Written by whoever starts the process.
    base: AtomicU64,
    /// System calls on files.
    pub files: FileRecord,
    /// Not 0: the process may go on on another node if this one is lost, so that what it has recorded is known there before it
    /// performs an effect. Written by whoever starts the process.
    durable_effects: AtomicU64,
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
    pub checkpoints_requested: AtomicU64,
    /// Frames that starts have taken in again: whoever waits at a poll for its relay to read them from a disk comes further.
    pub redelivered: AtomicU64,
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
pub struct RecordPosition {
    consumed: u64,
    reads: u64,
    present: u64,
    last: [u64; CLOCKS],
    ahead: [u64; CLOCKS],
}

impl RecordPosition {
    /// So many bytes of the record it has been told.
    pub fn consumed(&self) -> u64 {
        self.consumed
    }
}

const _: () = assert!(size_of::<RecordHead>() <= RECORD_HEAD_BYTES);
const _: () = assert!(offset_of!(RecordHead, consumed) == RECORDED_AT + size_of::<u64>());

impl RecordHead {
    /// A start of the process, counted from 1, takes hold of the record. False: it had it before, as another program, or a later
    /// start has it. (What a process was told of its number stays what it was told, though it was made of an image since, as another
    /// start; its children are told the same.)
    pub fn begin(&self, incarnation: u64, owner: u64) -> bool {
        if self.incarnation.load(Relaxed) >= incarnation {
            return false;
        }
        let words = [&self.consumed, &self.reads, &self.polls.present];
        let words = words.into_iter().chain(&self.last).chain(&self.ahead);
        words.for_each(|word| word.store(0, Relaxed));
        self.owner.store(owner, Relaxed);
        self.incarnation.store(incarnation, Release);
        true
    }

    /// What there is of the record for the present start.
    #[inline]
    pub fn extent(&self) -> Extent {
        Extent {
            base: self.base.load(Relaxed),
            end: self.consumed.load(Relaxed),
            is_full: self.is_full.load(Relaxed) != 0,
        }
    }

    /// Whether this incarnation has not yet come as far as an earlier one: with what is recorded, or with its polls.
    pub fn is_replaying(&self) -> bool {
        let polls = &self.polls;
        self.consumed.load(Relaxed) < self.recorded.load(Relaxed)
            || polls.present.load(Relaxed) < polls.furthest.load(Relaxed)
    }

    /// Whether an effect waits until another node knows of it.
    pub fn has_durable_effects(&self) -> bool {
        self.durable_effects.load(Relaxed) != 0
    }

    /// The name under which open files are held for the process, if they are.
    pub fn held_name(&self) -> Option<[u8; HELD_NAME_BYTES]> {
        let chance = [self.held[0].load(Relaxed), self.held[1].load(Relaxed)];
        (chance != [0; 2]).then(|| held_name(chance))
    }

    /// Whether this start of the process, counted from 1, has the record.
    pub fn is_of(&self, incarnation: u64) -> bool {
        self.incarnation.load(Relaxed) == incarnation
    }

    /// How far the present start has come.
    pub fn position(&self) -> RecordPosition {
        let all = |words: &[AtomicU64; CLOCKS]| core::array::from_fn(|at| words[at].load(Relaxed));
        RecordPosition {
            consumed: self.consumed.load(Relaxed),
            reads: self.reads.load(Relaxed),
            present: self.polls.present.load(Relaxed),
            last: all(&self.last),
            ahead: all(&self.ahead),
        }
    }

    /// As [`RecordHead::begin`], for a start that does not begin with the program but where an earlier one stood. False: it has
    /// the record already, or the record does not go so far.
    pub fn resume(&self, incarnation: u64, owner: u64, place: &RecordPosition) -> bool {
        let kept = self.base.load(Relaxed)..=self.recorded.load(Relaxed);
        if !kept.contains(&place.consumed) || !self.begin(incarnation, owner) {
            return false;
        }
        self.consumed.store(place.consumed, Relaxed);
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
    const fn is_wall_clock(self) -> bool {
        matches!(self.0, 0 | 5 | 11 | 16 | 17 | 18)
    }
}

/// Something that gives bytes which nobody can foresee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RandomSource {
    /// `getrandom`
    Random = 0,
    /// `getentropy`
    Entropy = 1,
    /// `arc4random` and its kin
    Arc4 = 2,
}

/// One read, without its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadRequest {
    /// The time.
    Clock(Clock),
    /// So many bytes of chance.
    Bytes(RandomSource, u64),
    /// A system call on files.
    FileCall(FileCall),
    /// What stands there is the beginning of an entry: the rest of it is not on record.
    Truncated,
    /// What stands there is no entry.
    Unknown,
}

impl fmt::Display for ReadRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids =
            ["REALTIME", "MONOTONIC", "PROCESS_CPUTIME_ID", "THREAD_CPUTIME_ID", "MONOTONIC_RAW"];
        let coarse = ["REALTIME_COARSE", "MONOTONIC_COARSE", "BOOTTIME"];
        match self {
            ReadRequest::Clock(Clock::TIME_OF_DAY) => write!(f, "gettimeofday"),
            ReadRequest::Clock(Clock::TIME) => write!(f, "time"),
            ReadRequest::Clock(Clock::TIMESPEC) => write!(f, "timespec_get"),
            ReadRequest::Clock(Clock::CLOCK) => write!(f, "clock"),
            ReadRequest::Clock(Clock(id)) => {
                let name = ids.iter().chain(&coarse).nth(*id as usize).unwrap_or(&"TAI");
                write!(f, "clock_gettime of CLOCK_{name}")
            }
            ReadRequest::Bytes(source, length) => {
                let name = ["getrandom", "getentropy", "arc4random"][*source as usize];
                write!(f, "{name} of {length} bytes")
            }
            ReadRequest::FileCall(FileCall { number, digest }) => {
                write!(f, "system call {number} with arguments of digest {digest:08x}")
            }
            ReadRequest::Truncated => write!(f, "something of which not all is on record"),
            ReadRequest::Unknown => write!(f, "nothing that is known"),
        }
    }
}

/// Why a read is not answered as usual.
#[derive(Debug, PartialEq, Eq)]
pub enum RecordError {
    /// The earlier start has read something else in this place: nothing may be told.
    Diverged {
        /// Which read of the process, from 1.
        read: u64,
        /// Of this start.
        now: ReadRequest,
        /// Of the earlier one.
        before: ReadRequest,
    },
    /// There is no room for this answer, which is true, nor for any other from now on.
    Full(i64),
}

impl fmt::Display for RecordError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecordError::Diverged { read, now, before } => {
                write!(f, "its read {read} of clocks and chance is {now}, and was {before}")
            }
            RecordError::Full(_) => write!(f, "its nondeterminism record is full"),
        }
    }
}

/// See the module head.
pub struct NondeterminismRecord<'a> {
    head: &'a RecordHead,
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
const WRAP_TAG: u8 = 255;
const NUMBER_BYTES_MAX: usize = 10;

impl<'a> NondeterminismRecord<'a> {
    /// `entries`: all the room there is for them.
    pub fn new(head: &'a RecordHead, entries: &'a mut [u8]) -> Self {
        Self { head, entries, lap: 0, limit: 0 }
    }

    /// Whether nothing more is recorded, and everybody asks the system.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.head.is_full.load(Relaxed) != 0
    }

    /// What `clock` says; `now` asks the system.
    #[inline]
    pub fn clock(&mut self, clock: Clock, now: impl FnOnce() -> i64) -> Result<i64, RecordError> {
        let at = self.head.consumed.load(Relaxed);
        if at < self.head.recorded.load(Relaxed) {
            return self.replay_clock(clock, at);
        }
        let last = self.head.last[clock.0 as usize].load(Relaxed) as i64;
        let value = self.monotonic(clock, last, now());
        let Some((at, room)) = self.room(at, 1 + NUMBER_BYTES_MAX) else {
            return Err(self.mark_full(value));
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
        source: RandomSource,
        into: &mut [u8],
        draw: impl FnOnce(&mut [u8]) -> i64,
    ) -> Result<i64, RecordError> {
        let at = self.head.consumed.load(Relaxed);
        if at < self.head.recorded.load(Relaxed) {
            return self.replay_bytes(source, into, at);
        }
        let result = draw(into);
        let given = usize::try_from(result).unwrap_or(0).min(into.len());
        let length = 1 + 2 * NUMBER_BYTES_MAX + given;
        let Some((at, room)) = self.room(at, length) else {
            return Err(self.mark_full(result));
        };
        room[0] = BYTES_TAG + source as u8;
        let mut length = 1 + put_number(&mut room[1..], into.len() as i64);
        length += put_number(&mut room[length..], result);
        room[length..length + given].copy_from_slice(&into[..given]);
        length += given;
        self.head.recorded.store(at + length as u64, Release);
        self.note_consumed(at + length as u64);
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
        let is_wrapping = at + length > lap + all;
        if is_wrapping {
            lap += all;
        }
        let start = if is_wrapping { lap } else { at };
        let limit = lap.min(base) + all;
        if start + length > limit {
            return None;
        }
        if is_wrapping && !at.is_multiple_of(all) {
            // So much of this room is free: `start` is not beyond the limit.
            self.entries[(at % all) as usize] = WRAP_TAG;
        }
        (self.lap, self.limit) = (lap, limit);
        Some(start)
    }

    /// Where the entry stands that follows at `at`, and where that is in the room. `None`: it is gone.
    fn locate(&mut self, mut at: u64) -> Option<(u64, usize)> {
        // It is found out anew how much room there is.
        self.refresh();
        if at < self.head.base.load(Relaxed) {
            return None;
        }
        let all = self.entries.len() as u64;
        self.lap = at - at % all;
        if self.entries.get((at - self.lap) as usize) == Some(&WRAP_TAG) {
            self.lap += all;
            at = self.lap;
        }
        Some((at, (at - self.lap) as usize))
    }

    /// What is known of the room may be that of an earlier time, or of another node.
    pub fn refresh(&mut self) {
        self.limit = 0;
    }

    #[cold]
    fn replay_clock(&mut self, clock: Clock, at: u64) -> Result<i64, RecordError> {
        let Some((at, offset)) = self.locate(at) else {
            return Err(self.diverged(ReadRequest::Clock(clock), ReadRequest::Unknown));
        };
        let (before, rest) = self.request_at(offset);
        match (before, self.read_number(rest)) {
            (ReadRequest::Clock(known), Some((delta, end))) if known == clock => {
                let end = self.entry_end(at, end - offset, ReadRequest::Clock(clock))?;
                let last = self.head.last[clock.0 as usize].load(Relaxed) as i64;
                let value = last.wrapping_add(delta);
                self.note_clock(clock, value, end);
                Ok(value)
            }
            _ => Err(self.diverged(ReadRequest::Clock(clock), before)),
        }
    }

    fn replay_bytes(
        &mut self,
        source: RandomSource,
        into: &mut [u8],
        at: u64,
    ) -> Result<i64, RecordError> {
        let now = ReadRequest::Bytes(source, into.len() as u64);
        let Some((at, offset)) = self.locate(at) else {
            return Err(self.diverged(now, ReadRequest::Unknown));
        };
        let (before, rest) = self.request_at(offset);
        let Some((result, rest)) = self.read_number(rest).filter(|_| now == before) else {
            return Err(self.diverged(now, before));
        };
        let given = usize::try_from(result).unwrap_or(0).min(into.len());
        let Some(bytes) = self.entries.get(rest..rest + given) else {
            return Err(self.diverged(now, ReadRequest::Unknown));
        };
        let end = self.entry_end(at, rest + given - offset, now)?;
        into[..given].copy_from_slice(bytes);
        self.note_consumed(end);
        Ok(result)
    }

    /// Where an entry of so many bytes ends that answers this. Behind what is recorded there is what an earlier lap has left, or zeros:
    /// then it is none.
    fn entry_end(&self, at: u64, length: usize, now: ReadRequest) -> Result<u64, RecordError> {
        let end = at + length as u64;
        if end > self.head.recorded.load(Relaxed) {
            return Err(self.diverged(now, ReadRequest::Truncated));
        }
        Ok(end)
    }

    /// Clocks that never go back do not when a new start begins to ask them.
    #[inline]
    fn monotonic(&self, clock: Clock, last: i64, now: i64) -> i64 {
        let ahead = &self.head.ahead[clock.0 as usize];
        let value = now.wrapping_add(ahead.load(Relaxed) as i64);
        if value >= last || clock.is_wall_clock() {
            return value;
        }
        ahead.store(last.wrapping_sub(now) as u64, Relaxed);
        last
    }

    #[inline]
    fn note_clock(&self, clock: Clock, value: i64, end: u64) {
        self.head.last[clock.0 as usize].store(value as u64, Relaxed);
        self.note_consumed(end);
    }

    #[inline]
    fn note_consumed(&self, end: u64) {
        self.head.consumed.store(end, Relaxed);
        self.head.reads.store(self.head.reads.load(Relaxed).wrapping_add(1), Relaxed);
    }

    #[cold]
    fn mark_full(&self, answer: i64) -> RecordError {
        self.head.is_full.store(1, Release);
        RecordError::Full(answer)
    }

    #[cold]
    fn diverged(&self, now: ReadRequest, before: ReadRequest) -> RecordError {
        RecordError::Diverged { read: self.head.reads.load(Relaxed).wrapping_add(1), now, before }
    }

    /// What was read there, and where its answer begins.
    fn request_at(&self, at: usize) -> (ReadRequest, usize) {
        let Some(&tag) = self.entries.get(at) else { return (ReadRequest::Unknown, at) };
        if (tag as usize) < CLOCKS {
            return (ReadRequest::Clock(Clock(tag)), at + 1);
        }
        if tag == CALL_TAG {
            let call = self.call_at(at + 1);
            return call.map_or((ReadRequest::Unknown, at), |(call, rest)| {
                (ReadRequest::FileCall(call), rest)
            });
        }
        let source = [RandomSource::Random, RandomSource::Entropy, RandomSource::Arc4]
            .into_iter()
            .find(|source| BYTES_TAG + *source as u8 == tag);
        match (source, self.read_number(at + 1)) {
            (Some(source), Some((length, rest))) => {
                (ReadRequest::Bytes(source, length as u64), rest)
            }
            _ => (ReadRequest::Unknown, at),
        }
    }

    /// The number that stands there, and where it ends.
    fn read_number(&self, at: usize) -> Option<(i64, usize)> {
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
