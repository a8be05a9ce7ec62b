//! Recorded nondeterminism of one process: every clock value and random number that its program
//! reads, and the results of its system calls on files (`file_calls`), so that a restarted
//! incarnation reads the same values.
//!
//! What enters: the reads of the program, and the answers of the system where the record holds
//! none. What leaves: the answers that the previous incarnation received. The record lies in shared
//! memory that outlives the process: a [`RecordHead`], then one entry for each read, in order. A
//! process can be killed between any two instructions, so an entry counts as soon as
//! [`RecordHead`]'s `recorded` covers the entry, which happens before the program receives the
//! answer.
//!
//! Positions in the record are byte counts from the beginning of the first incarnation. No
//! incarnation needs the entries before the oldest checkpoint image of the process any more
//! (`base`): the record is a ring that reuses their memory from its first byte on. An entry that
//! does not fit before the end of the ring begins at the first byte of the ring, and a `WRAP_TAG`
//! takes its place at the old position.
//!
//! What may never happen: a read receives the answer of another read, or a part of such an answer;
//! a program receives an answer that is in no record while the process may still be restarted.
//!
//! | module | does |
//! |---|---|
//! | `file_calls` | recorded calls on files |
//! | `read_names` | names of recorded reads, for messages |

use core::fmt;
use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::Release};

pub use file_calls::{
    DURABLE_ANSWER_SECONDS_MAX, DURABLE_SUFFIX, FileCall, FileRecord, HELD_CLEAR, HELD_DROP,
    HELD_END, HELD_GET, HELD_KEEP, HELD_MAKE_DURABLE, HELD_NAME_BYTES, HELD_WORD_BYTES,
    NO_RESTART_BYTES, PRECONDITION_WORDS, held_name,
};

mod file_calls;
mod read_names;

/// Size of the record of one process, head and entries, in bytes. Only pages that are written take
/// memory. A clock read takes two to five bytes.
pub const NONDETERMINISM_BYTES: usize = 256 << 20;

/// Offset of the first entry in the record, in bytes.
pub const RECORD_HEAD_BYTES: usize = 4096;

/// Offset of `base` in the record: eight bytes, the position before which no entry is needed any
/// more.
pub const BASE_AT: usize = offset_of!(RecordHead, base);

/// Offset of `incarnation` in the record: eight bytes, the incarnation that owns the record,
/// counted from 1; 0 before the first.
pub const INCARNATION_AT: usize = offset_of!(RecordHead, incarnation);

/// Offset of `is_full` in the record: eight bytes, not 0 if the record is full.
pub const FULL_AT: usize = offset_of!(RecordHead, is_full);

/// Offset of the polls in the record: eight bytes for the incarnation that got furthest, then eight
/// bytes for the present incarnation.
pub const POLLS_AT: usize = offset_of!(RecordHead, polls);

/// Offset of `recorded` in the record: eight bytes, the end position of all entries; then eight
/// bytes (`consumed`), the end position of the entries that the present incarnation has replayed or
/// recorded.
pub const RECORDED_AT: usize = offset_of!(RecordHead, recorded);

/// Offset of the number of requested checkpoints in the record: eight bytes.
pub const CHECKPOINT_REQUESTS_AT: usize = POLLS_AT + offset_of!(Polls, checkpoints_requested);
/// Offset of the reason why the process cannot be restarted: eight bytes with the length of the
/// text, then the text. Length 0: the process can be restarted.
pub const NO_RESTART_AT: usize = offset_of!(RecordHead, files) + FileRecord::NO_RESTART_AT;
/// Offset of the [`FileRecord`] in the record: first come [`FILES_WORDS`] words of eight bytes, of
/// which the last one is the length of the reason for no restart; the text of the reason follows.
pub const FILES_AT: usize = offset_of!(RecordHead, files);
/// Number of words of eight bytes at [`FILES_AT`], before the text of the reason for no restart.
pub const FILES_WORDS: usize = (FileRecord::NO_RESTART_AT + size_of::<u64>()) / size_of::<u64>();
/// Offset of `durable_effects` in the record: eight bytes, not 0 if an effect waits until the agent
/// has reported the effect to another node.
pub const DURABLE_EFFECTS_AT: usize = offset_of!(RecordHead, durable_effects);
/// Offset of `held` in the record: two times eight bytes, the random bits of the socket name under
/// which the agent holds open files for the process ([`held_name`]). Zeros: no agent holds files.
pub const HELD_AT: usize = offset_of!(RecordHead, held);
/// Offset of `last_written` in the record: eight bytes, written by the agent when a process has
/// ended. 0: the process that announced the last effect has not ended. [`UNKNOWN_WRITTEN`]: the
/// agent does not know. Else one more than the bytes that its recorded thread had written to files
/// in all (`wchar` of `proc_pid_io(5)`).
pub const LAST_WRITTEN_AT: usize = offset_of!(RecordHead, last_written);
/// See [`LAST_WRITTEN_AT`].
pub const UNKNOWN_WRITTEN: u64 = u64::MAX;
/// Offset of `unsaved` in the record: eight bytes, of the flags that follow.
pub const UNSAVED_AT: usize = offset_of!(RecordHead, unsaved);
/// The process has made an eventfd with EFD_SEMAPHORE.
pub const UNSAVED_SEMAPHORE: u64 = 1;
/// The process has protection keys (pkeys(7)).
pub const UNSAVED_KEYS: u64 = 2;
/// The process has restricted itself (landlock(7), prctl(2) with PR_SET_MDWE).
pub const UNSAVED_RESTRICTIONS: u64 = 4;
/// Offset of `absences` in the record: eight bytes. Odd while a rank of this node has no process,
/// because the last one was killed and the next one has not begun. Written by the agent, which
/// makes it odd before the process id of the killed one disappears.
pub const ABSENCES_AT: usize = offset_of!(RecordHead, absences);
/// Offset of `program_random` in the record: 16 bytes, written by the agent. Zeros: the program
/// keeps those of the kernel.
pub const PROGRAM_RANDOM_AT: usize = offset_of!(RecordHead, program_random);
/// Offset of `image_mask` in the record: eight bytes, a bit for each signal (sigprocmask(2)).
pub const IMAGE_MASK_AT: usize = offset_of!(RecordHead, image_mask);
/// Offset of the number of redelivered frames in the record: eight bytes.
pub const REDELIVERED_AT: usize = POLLS_AT + offset_of!(Polls, redelivered);

/// Number of distinct clocks.
const CLOCKS: usize = 24;

/// Head of a record, which all incarnations of a process share, one after the other. The fields are
/// the layout of the memory that agent, interposer and provider share.
#[repr(C)]
#[derive(Debug, Default)]
pub struct RecordHead {
    /// Incarnation that owns the record, from 1; 0 before the first.
    incarnation: AtomicU64,
    /// Process id of the incarnation that owns the record.
    pub owner: AtomicU64,
    /// Not 0: the program has received an answer that found no space in the record.
    is_full: AtomicU64,
    /// Polls for messages.
    pub polls: Polls,
    /// End position of all entries, in bytes.
    recorded: AtomicU64,
    /// End position of the entries that this incarnation has replayed or recorded. The field
    /// follows `recorded`, see [`RECORDED_AT`].
    consumed: AtomicU64,
    /// Number of reads of this incarnation.
    reads: AtomicU64,
    /// Last value of each clock.
    last: [AtomicU64; CLOCKS],
    /// Offset that is added to each clock: some clocks start at zero in every process.
    ahead: [AtomicU64; CLOCKS],
    /// No incarnation needs the entries before this position any more. Written by the agent.
    base: AtomicU64,
    /// System calls on files.
    pub files: FileRecord,
    /// Not 0: another node may restart the process if this node is lost, so the other node must
    /// hold the record before the process performs an effect. Written by the agent.
    durable_effects: AtomicU64,
    /// Random bits of the agent's socket name, see [`HELD_AT`]. The agent that has started the
    /// present process writes these bits, so a checkpoint image does not contain them.
    held: [AtomicU64; 2],
    /// What the process uses that no checkpoint image restores, see [`UNSAVED_AT`].
    unsaved: AtomicU64,
    /// What the process that announced the last effect had written, see [`LAST_WRITTEN_AT`].
    last_written: AtomicU64,
    /// Time at which the present incarnation had replayed everything, in nanoseconds by the clock
    /// since the boot. 0: the first incarnation; [`STILL_REPLAYS`]: not yet.
    live_since: AtomicU64,
    /// Inode and time of birth of the directory in which the first incarnation began.
    directory: [AtomicU64; 2],
    /// How often ranks of this node had no process, see [`ABSENCES_AT`].
    pub absences: AtomicU64,
    /// What each incarnation gets as `AT_RANDOM` (getauxval(3)), see [`PROGRAM_RANDOM_AT`].
    pub program_random: [AtomicU64; 2],
    /// Signals that the program blocked when the process began to stand still for an image. All are
    /// blocked while the image is taken.
    image_mask: AtomicU64,
}

const STILL_REPLAYS: u64 = u64::MAX;

/// Number of polls for messages, counted from the beginning of each incarnation.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Polls {
    /// Polls of the incarnation that got furthest.
    pub furthest: AtomicU64,
    /// Polls of the present incarnation.
    pub present: AtomicU64,
    /// Number of checkpoints that were requested of the process.
    pub checkpoints_requested: AtomicU64,
    /// Frames that incarnations have redelivered during replay. The count shows progress while a
    /// process waits at a poll until its relay has read frames from a disk.
    pub redelivered: AtomicU64,
}

/// Positions of a record as an incarnation sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// No incarnation needs the entries before this position any more.
    pub base: u64,
    /// End of the entries that this incarnation has replayed or recorded.
    pub end: u64,
    /// Whether the record is full.
    pub is_full: bool,
}

/// Progress of an incarnation in its record. A checkpoint image holds this position, and not the
/// record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordPosition {
    consumed: u64,
    reads: u64,
    present: u64,
    last: [u64; CLOCKS],
    ahead: [u64; CLOCKS],
}

impl RecordPosition {
    /// End position of the entries that the incarnation has replayed or recorded.
    pub fn consumed(&self) -> u64 {
        self.consumed
    }
}

const _: () = assert!(size_of::<RecordHead>() <= RECORD_HEAD_BYTES);
const _: () = assert!(offset_of!(RecordHead, consumed) == RECORDED_AT + size_of::<u64>());

impl RecordHead {
    /// Takes over the record for `incarnation` of the process, counted from 1. Returns false if
    /// this or a later incarnation owns the record already, for instance because the process runs
    /// its second program. (A process keeps the number that it received first, although it may have
    /// been restored from an image as another incarnation since; its child processes receive the
    /// same number.)
    pub fn begin(&self, incarnation: u64, owner: u64) -> bool {
        if self.incarnation.load(Relaxed) >= incarnation {
            return false;
        }
        let words = [&self.consumed, &self.reads, &self.polls.present];
        let words = words.into_iter().chain(&self.last).chain(&self.ahead);
        words.for_each(|word| word.store(0, Relaxed));
        self.owner.store(owner, Relaxed);
        self.live_since.store(if incarnation > 1 { STILL_REPLAYS } else { 0 }, Relaxed);
        self.incarnation.store(incarnation, Release);
        true
    }

    /// Positions of the record as the present incarnation sees them.
    #[inline]
    pub fn extent(&self) -> Extent {
        Extent {
            base: self.base.load(Relaxed),
            end: self.consumed.load(Relaxed),
            is_full: self.is_full.load(Relaxed) != 0,
        }
    }

    /// Whether this incarnation has still to repeat entries or polls of an earlier incarnation.
    pub fn is_replaying(&self) -> bool {
        let polls = &self.polls;
        self.consumed.load(Relaxed) < self.recorded.load(Relaxed)
            || polls.present.load(Relaxed) < polls.furthest.load(Relaxed)
    }

    /// Notes that the present incarnation has replayed everything at this time, in nanoseconds by
    /// the clock since the boot (`CLOCK_BOOTTIME`).
    pub fn note_live(&self, now: u64) {
        let _ = self.live_since.compare_exchange(STILL_REPLAYS, now, Relaxed, Relaxed);
    }

    /// Whether a thread or a child that began at this time, by the same clock, began while the
    /// present incarnation replayed: it may repeat what one of an earlier incarnation did, however
    /// late it does so.
    pub fn replayed_at(&self, began: u64) -> bool {
        began <= self.live_since.load(Relaxed)
    }

    /// Counts a read as answered whose program was interrupted within the read and never continued
    /// it. The process has nothing to replay.
    pub fn skip_interrupted_read(&self) {
        self.consumed.store(self.recorded.load(Relaxed), Relaxed);
    }

    /// Whether an effect waits until another node knows of the effect.
    pub fn has_durable_effects(&self) -> bool {
        self.durable_effects.load(Relaxed) != 0
    }

    /// Notes the signals that the program blocks. The process begins to stand still for an image.
    pub fn note_image_mask(&self, mask: u64) {
        self.image_mask.store(mask, Relaxed);
    }

    /// Notes that the process uses what no checkpoint image restores.
    pub fn note_unsaved(&self, what: u64) {
        self.unsaved.fetch_or(what, Relaxed);
    }

    /// Name of the socket under which the agent holds open files for the process, if an agent does.
    pub fn held_name(&self) -> Option<[u8; HELD_NAME_BYTES]> {
        let chance = [self.held[0].load(Relaxed), self.held[1].load(Relaxed)];
        (chance != [0; 2]).then(|| held_name(chance))
    }

    /// Whether `incarnation` of the process, counted from 1, owns the record.
    pub fn is_of(&self, incarnation: u64) -> bool {
        self.incarnation.load(Relaxed) == incarnation
    }

    /// Progress of the present incarnation.
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

    /// Takes over the record as [`RecordHead::begin`] does, for an incarnation that was restored
    /// from a checkpoint image at `place`. Returns false if this incarnation owns the record
    /// already, or if the record does not cover the position of `place`.
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

/// A source of time. Numbers below 16 are the clock ids of `clock_gettime`.
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

    /// The clock `id` of `clock_gettime`, if every system has this clock.
    #[inline]
    pub const fn of(id: i32) -> Option<Clock> {
        match id {
            0..=7 | 11 => Some(Clock(id as u8)),
            _ => None,
        }
    }

    /// The clock id of `clock_gettime`, of a clock of [`Clock::of`].
    #[inline]
    pub const fn id(self) -> i32 {
        self.0 as i32
    }

    /// Whether an administrator may set the clock back; all other clocks are monotonic across
    /// incarnations.
    #[inline]
    const fn is_wall_clock(self) -> bool {
        matches!(self.0, 0 | 5 | 11 | 16 | 17 | 18)
    }
}

/// A source of random bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RandomSource {
    /// `getrandom`
    Random = 0,
    /// `getentropy`
    Entropy = 1,
    /// `arc4random` and similar functions
    Arc4 = 2,
}

/// One read of the program, without its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadRequest {
    /// A clock read.
    Clock(Clock),
    /// A read of so many random bytes.
    Bytes(RandomSource, u64),
    /// A system call on files.
    FileCall(FileCall),
    /// The program ends.
    End,
    /// The record holds only the beginning of this entry.
    Truncated,
    /// The bytes at this position are no entry.
    Unknown,
}

/// Why a read has no recorded or recordable answer.
#[derive(Debug, PartialEq, Eq)]
pub enum RecordError {
    /// The earlier incarnation read something else at this position: the read must not be answered.
    Diverged {
        /// Number of the read, counted from 1 in each incarnation.
        read: u64,
        /// The read of this incarnation.
        now: ReadRequest,
        /// The read of the earlier incarnation.
        before: ReadRequest,
    },
    /// The record has no space for this answer, which is valid, and records nothing from now on.
    Full(i64),
}

impl fmt::Display for RecordError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecordError::Diverged { read, now, before } => {
                write!(f, "its read {read} of clocks and random numbers is {now}, and was {before}")
            }
            RecordError::Full(_) => write!(f, "its nondeterminism record is full"),
        }
    }
}

/// The record of one process, head and entries: see the module head.
pub struct NondeterminismRecord<'a> {
    head: &'a RecordHead,
    entries: &'a mut [u8],
    /// Position at which the current lap of the ring began.
    lap: u64,
    /// Position up to which the current lap may be filled, as of the last check of `base`.
    limit: u64,
}

/// Tag of an entry of random bytes, plus the number of the source; smaller tags are clocks.
const BYTES_TAG: u8 = 32;
/// Tag of an entry of a system call on files.
const CALL_TAG: u8 = 40;
/// Tag at a position whose entry stands at the beginning of the ring instead.
const WRAP_TAG: u8 = 255;
/// Bytes of a 64-bit number, with seven bits to a byte.
const NUMBER_BYTES_MAX: usize = 10;

impl<'a> NondeterminismRecord<'a> {
    /// The record with head `head`, whose ring of entries is `entries`.
    pub fn new(head: &'a RecordHead, entries: &'a mut [u8]) -> Self {
        Self { head, entries, lap: 0, limit: 0 }
    }

    /// Whether the record is full: nothing more is recorded, and every read goes to the system.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.head.is_full.load(Relaxed) != 0
    }

    /// Reads `clock`: from the record during replay, else from the system by `now`.
    #[inline]
    pub fn clock(&mut self, clock: Clock, now: impl FnOnce() -> i64) -> Result<i64, RecordError> {
        let at = self.head.consumed.load(Relaxed);
        if at < self.head.recorded.load(Relaxed) {
            return self.replay_clock(clock, at);
        }
        self.check_announced(at, ReadRequest::Clock(clock))?;
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

    /// Fills `into` with random bytes of `source`: from the record during replay, else from the
    /// system by `draw`, which returns the number of bytes, or an error below 0 as the system call
    /// does.
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
        self.check_announced(at, ReadRequest::Bytes(source, into.len() as u64))?;
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
        self.note_recorded(at + (length + given) as u64);
        Ok(result)
    }

    /// Reserves space for the next entry, of at most `length` bytes, at position `at` or at the
    /// beginning of the ring. `None`: there is no space.
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
            // The byte is free, because `start` is not beyond the limit.
            self.entries[(at % all) as usize] = WRAP_TAG;
        }
        (self.lap, self.limit) = (lap, limit);
        Some(start)
    }

    /// Position and offset of the entry that follows at `at`. `None`: the entry is before `base`.
    fn locate(&mut self, mut at: u64) -> Option<(u64, usize)> {
        // The next reservation computes the limit again.
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

    /// Forgets the computed limit, which may be outdated, or that of another node.
    pub fn refresh(&mut self) {
        self.limit = 0;
    }

    #[cold]
    fn replay_clock(&mut self, clock: Clock, at: u64) -> Result<i64, RecordError> {
        let now = ReadRequest::Clock(clock);
        let (at, answer) = self.answer_of(now, at)?;
        let Some((delta, end)) = self.read_number(answer) else {
            return Err(self.diverged(now, now));
        };
        let end = self.entry_end(at, end - answer, now)?;
        let last = self.head.last[clock.0 as usize].load(Relaxed) as i64;
        let value = last.wrapping_add(delta);
        self.note_clock(clock, value, end);
        Ok(value)
    }

    fn replay_bytes(
        &mut self,
        source: RandomSource,
        into: &mut [u8],
        at: u64,
    ) -> Result<i64, RecordError> {
        let now = ReadRequest::Bytes(source, into.len() as u64);
        let (at, answer) = self.answer_of(now, at)?;
        let Some((result, rest)) = self.read_number(answer) else {
            return Err(self.diverged(now, now));
        };
        let given = usize::try_from(result).unwrap_or(0).min(into.len());
        let Some(bytes) = self.entries.get(rest..rest + given) else {
            return Err(self.diverged(now, ReadRequest::Unknown));
        };
        let end = self.entry_end(at, rest + given - answer, now)?;
        into[..given].copy_from_slice(bytes);
        self.note_consumed(end);
        Ok(result)
    }

    /// Position and offset of the answer to the read `now`, which the entry at position `at` must
    /// hold.
    fn answer_of(&mut self, now: ReadRequest, at: u64) -> Result<(u64, usize), RecordError> {
        let Some((at, offset)) = self.locate(at) else {
            return Err(self.diverged(now, ReadRequest::Unknown));
        };
        match self.request_at(offset) {
            (before, answer) if before == now => Ok((at + (answer - offset) as u64, answer)),
            (before, _) => Err(self.diverged(now, before)),
        }
    }

    /// End of the entry that answers the read `now` with `length` bytes at position `at`. The bytes
    /// after the recorded ones are zeros or entries of an earlier lap: an entry that extends there
    /// is truncated.
    fn entry_end(&self, at: u64, length: usize, now: ReadRequest) -> Result<u64, RecordError> {
        let end = at + length as u64;
        if end > self.head.recorded.load(Relaxed) {
            return Err(self.diverged(now, ReadRequest::Truncated));
        }
        Ok(end)
    }

    /// Keeps a monotonic clock from going back when a restarted incarnation reads the clock, whose
    /// origin may differ: the clock continues at `last`.
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

    /// Makes the entry that ends at `end` valid, and counts its read.
    fn note_recorded(&self, end: u64) {
        self.head.recorded.store(end, Release);
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

    /// The read of the entry at offset `at`, and the offset of its answer.
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

    /// The number at offset `at`, and the offset of its end.
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

/// Writes a number in seven bits of each byte, zigzag-coded, so that small numbers of either sign
/// are short. Returns the number of bytes.
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
