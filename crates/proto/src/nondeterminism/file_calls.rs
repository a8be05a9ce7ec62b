//! System calls on files in the record of nondeterminism: the result of each call, and the effect
//! that was in progress when a process was killed.
//!
//! What enters: a call of the program ([`FileCall`]), its result, and the bytes that the kernel
//! wrote for the call. What leaves, in a later incarnation: the same result and bytes. An effect (a
//! write, a rename) is announced in the [`FileRecord`] before the kernel performs the effect, and
//! recorded afterwards. If the process was killed in between, the next incarnation knows which
//! effect may or may not have happened.
//!
//! What may never happen: a call receives the result of another call; the kernel performs an effect
//! that was not announced.

use core::mem::offset_of;
use core::sync::atomic::{
    AtomicU8, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use super::{
    CALL_TAG, NUMBER_BYTES_MAX, NondeterminismRecord, ReadRequest, RecordError, RecordHead,
    UNKNOWN_WRITTEN, put_number,
};

/// Number of words that describe the files before an effect: inode, size, times, as the effect
/// needs them.
pub const PRECONDITION_WORDS: usize = 8;

/// Longest reason for which a process cannot be restarted, in bytes.
pub const NO_RESTART_BYTES: usize = 504;

/// Size of a message between the interposer and the agent that holds open files for the process: a
/// command and the number of the file, eight bytes each.
pub const HELD_WORD_BYTES: usize = 16;
/// Command: hold the descriptor that comes along under this number.
pub const HELD_KEEP: u64 = 1;
/// Command: hold the file of this number no longer.
pub const HELD_DROP: u64 = 2;
/// Command: return the file of this number. The answer is the same message, with the descriptor if
/// the agent holds one.
pub const HELD_GET: u64 = 3;
/// Command of the agent to its own thread: release all files and end.
pub const HELD_END: u64 = 4;
/// Command on the agent's other socket, whose name ends with [`DURABLE_SUFFIX`]: make the record
/// known on another node. The answer, the same message, confirms that another node holds the
/// record.
pub const HELD_MAKE_DURABLE: u64 = 5;
/// Age in seconds up to which the answer to [`HELD_MAKE_DURABLE`] counts. A process performs the
/// effect at most so long after it has asked, so the node that answers lets the process's next
/// incarnation begin elsewhere only after that time, although the process may be alive behind a
/// connection that has ended.
pub const DURABLE_ANSWER_SECONDS_MAX: i64 = 4;
/// Command: the process has ended and will not be restarted, so release all files held for the
/// process.
pub const HELD_CLEAR: u64 = 6;
/// Suffix of the name of the agent's other socket, after the name of the first one ([`held_name`]).
pub const DURABLE_SUFFIX: &str = "-ship";
const HELD_PREFIX: &[u8; 16] = b"landbridge-held-";
/// Length of the name of the agent's first socket, in bytes.
pub const HELD_NAME_BYTES: usize = HELD_PREFIX.len() + 32;

/// Name of the agent's first socket, in the abstract namespace (unix(7)), from the 128 random bits
/// in the record's head ([`super::HELD_AT`]).
pub fn held_name(chance: [u64; 2]) -> [u8; HELD_NAME_BYTES] {
    let mut name = [0; HELD_NAME_BYTES];
    name[..HELD_PREFIX.len()].copy_from_slice(HELD_PREFIX);
    let bits = u128::from(chance[0]) << 64 | u128::from(chance[1]);
    for (place, letter) in name[HELD_PREFIX.len()..].iter_mut().enumerate() {
        *letter = b"0123456789abcdef"[(bits >> (124 - 4 * place)) as usize & 0xf];
    }
    name
}

const DIGEST_BYTES: usize = 4;

/// One system call of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileCall {
    /// Number of the system call on this machine's architecture.
    pub number: u32,
    /// Digest of the arguments that are the same in every incarnation.
    pub digest: u32,
}

/// Part of the record's head for system calls on files.
#[repr(C)]
#[derive(Debug)]
pub struct FileRecord {
    /// Start of the first incarnation, in nanoseconds since 1970; 0 before.
    pub since: AtomicU64,
    /// Position of the announced effect's entry, plus one; 0: no effect was announced.
    at: AtomicU64,
    call: AtomicU64,
    /// Not 0: the process was about to perform the announced effect, or has performed it. On
    /// another node than that of the announcement the word says nothing.
    has_begun: AtomicU64,
    precondition: [AtomicU64; PRECONDITION_WORDS],
    /// Digests of the name of the node, and of the boot id of the kernel (random(4)), on which the
    /// first incarnation began; 0 before.
    origin: [AtomicU64; 2],
    /// Not 0: the process cannot be restarted, and `text` gives the reason in so many bytes.
    reason_length: AtomicU64,
    text: [AtomicU8; NO_RESTART_BYTES],
}

impl Default for FileRecord {
    fn default() -> Self {
        Self {
            since: AtomicU64::new(0),
            at: AtomicU64::new(0),
            call: AtomicU64::new(0),
            has_begun: AtomicU64::new(0),
            precondition: Default::default(),
            origin: Default::default(),
            reason_length: AtomicU64::new(0),
            text: [const { AtomicU8::new(0) }; NO_RESTART_BYTES],
        }
    }
}

impl FileRecord {
    /// Offset of the length of the reason for no restart, in bytes.
    pub(super) const NO_RESTART_AT: usize = offset_of!(FileRecord, reason_length);

    /// Forbids every restart of the process, for this reason. Returns false if an earlier reason
    /// stands.
    pub fn forbid_restart(&self, reason: &[u8]) -> bool {
        // The first caller writes the text; the text counts as soon as its length is stored.
        if self.reason_length.compare_exchange(0, u64::MAX, Relaxed, Relaxed).is_err() {
            return false;
        }
        let length = reason.len().min(NO_RESTART_BYTES);
        self.text.iter().zip(&reason[..length]).for_each(|(to, from)| to.store(*from, Relaxed));
        self.reason_length.store(length as u64, Release);
        true
    }

    /// Notes the node and the kernel of the first incarnation, by their digests. Returns whether
    /// this incarnation is on another node, and on another kernel.
    pub fn note_origin(&self, node: u64, kernel: u64) -> (bool, bool) {
        let is_other = |noted: &AtomicU64, now: u64| {
            noted.compare_exchange(0, now, Relaxed, Relaxed).is_err_and(|before| before != now)
        };
        (is_other(&self.origin[0], node), is_other(&self.origin[1], kernel))
    }

    /// Whether the process cannot be restarted.
    #[inline]
    pub fn is_restart_forbidden(&self) -> bool {
        self.reason_length.load(Acquire) != 0
    }
}

impl RecordHead {
    /// Notes the directory in which an incarnation begins, by words that name it. False: the first
    /// incarnation began in another one.
    pub fn note_directory(&self, words: [u64; 2]) -> bool {
        let is_it = |(noted, now): (&AtomicU64, u64)| {
            let before = noted.compare_exchange(0, now, Relaxed, Relaxed);
            before.map_or_else(|before| before == now, |_| true)
        };
        self.directory.iter().zip(words).all(is_it)
    }
}

impl NondeterminismRecord<'_> {
    /// Whether the program has repeated everything that the record holds of earlier incarnations.
    #[inline]
    pub fn is_live(&self) -> bool {
        self.head.consumed.load(Relaxed) >= self.head.recorded.load(Relaxed)
    }

    /// The part of the record's head for system calls on files.
    pub fn files(&self) -> &FileRecord {
        &self.head.files
    }

    /// Announces an effect that the program is about to perform.
    pub fn announce(&self, call: FileCall, precondition: [u64; PRECONDITION_WORDS]) {
        let files = &self.head.files;
        files.at.store(0, Release);
        files.precondition.iter().zip(precondition).for_each(|(to, from)| to.store(from, Relaxed));
        files.call.store(call.word(), Relaxed);
        files.has_begun.store(0, Relaxed);
        self.head.last_written.store(0, Relaxed);
        files.at.store(self.head.consumed.load(Relaxed) + 1, Release);
    }

    /// Notes that the announced effect is performed now.
    pub fn begin_effect(&self) {
        self.head.files.has_begun.store(1, Release);
    }

    /// Whether the announced effect may have been performed, as the node of the announcement knows.
    pub fn has_begun_effect(&self) -> bool {
        self.head.files.has_begun.load(Acquire) != 0
    }

    /// Bytes that the process which announced the last effect, and has ended, had written to files
    /// in all. `None`: its agent does not know.
    pub fn written_by_last(&self) -> Option<u64> {
        let word = self.head.last_written.load(Relaxed);
        word.checked_sub(1).filter(|_| word != UNKNOWN_WRITTEN)
    }

    /// The announced precondition, if `call` is the effect during which the last incarnation was
    /// killed. Fails if that incarnation was killed here during another effect.
    pub fn interrupted(
        &self,
        call: FileCall,
    ) -> Result<Option<[u64; PRECONDITION_WORDS]>, RecordError> {
        if !self.is_live() || !self.has_interrupted_effect() {
            return Ok(None);
        }
        self.check_announced(self.head.consumed.load(Relaxed), ReadRequest::FileCall(call))?;
        let words = &self.head.files.precondition;
        Ok(Some(core::array::from_fn(|at| words[at].load(Relaxed))))
    }

    /// Checks that the entry that is about to be recorded at position `at` is that of the announced
    /// effect, if an effect was announced there. An incarnation that does anything else there does
    /// not repeat what the last one did.
    #[inline]
    pub(super) fn check_announced(&self, at: u64, now: ReadRequest) -> Result<(), RecordError> {
        if self.head.files.at.load(Relaxed) == at + 1 {
            self.compare_announced(now)
        } else {
            Ok(())
        }
    }

    #[cold]
    fn compare_announced(&self, now: ReadRequest) -> Result<(), RecordError> {
        let before = ReadRequest::FileCall(FileCall::of(self.head.files.call.load(Relaxed)));
        if before == now { Ok(()) } else { Err(self.diverged(now, before)) }
    }

    /// Checks that the program, which is about to end well, has repeated everything that earlier
    /// incarnations did.
    pub fn end(&mut self) -> Result<(), RecordError> {
        let at = self.head.consumed.load(Relaxed);
        if self.is_full() || self.is_live() && !self.has_interrupted_effect() {
            return Ok(());
        }
        if self.is_live() {
            return self.compare_announced(ReadRequest::End);
        }
        let entry = self.locate(at);
        let before = entry.map_or(ReadRequest::Unknown, |(_, offset)| self.request_at(offset).0);
        Err(self.diverged(ReadRequest::End, before))
    }

    /// Whether the last incarnation was killed within an effect that follows the replayed entries:
    /// the next recorded call is this effect.
    pub fn has_interrupted_effect(&self) -> bool {
        self.head.files.at.load(Acquire) == self.head.consumed.load(Relaxed) + 1
    }

    /// Records the result of a call, and the pieces of bytes that the kernel wrote.
    pub fn note_call(
        &mut self,
        call: FileCall,
        result: i64,
        pieces: &[&[u8]],
    ) -> Result<(), RecordError> {
        let bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
        let at = self.head.consumed.load(Relaxed);
        self.check_announced(at, ReadRequest::FileCall(call))?;
        let Some((at, room)) = self.room(at, 1 + 3 * NUMBER_BYTES_MAX + DIGEST_BYTES + bytes)
        else {
            return Err(self.mark_full(result));
        };
        let mut length = put_call(room, call);
        length += put_number(&mut room[length..], result);
        length += put_number(&mut room[length..], bytes as i64);
        for piece in pieces {
            room[length..length + piece.len()].copy_from_slice(piece);
            length += piece.len();
        }
        self.note_recorded(at + length as u64);
        Ok(())
    }

    /// The result of this call in an earlier incarnation, and the bytes that the kernel wrote.
    pub fn replay_call(&mut self, call: FileCall) -> Result<(i64, &[u8]), RecordError> {
        let now = ReadRequest::FileCall(call);
        let (at, answer) = self.answer_of(now, self.head.consumed.load(Relaxed))?;
        let parsed = self.read_number(answer).and_then(|(result, rest)| {
            let (bytes, rest) = self.read_number(rest)?;
            Some((result, usize::try_from(bytes).ok()?, rest))
        });
        let Some((result, bytes, rest)) =
            parsed.filter(|(_, bytes, rest)| *bytes <= self.entries.len() - rest)
        else {
            return Err(self.diverged(now, ReadRequest::Unknown));
        };
        let end = self.entry_end(at, rest + bytes - answer, now)?;
        self.note_consumed(end);
        Ok((result, &self.entries[rest..rest + bytes]))
    }

    /// The call of the entry whose call number begins at offset `at`, and the offset of its result.
    pub(super) fn call_at(&self, at: usize) -> Option<(FileCall, usize)> {
        let (number, rest) = self.read_number(at)?;
        let digest = self.entries.get(rest..rest + DIGEST_BYTES)?;
        let digest = u32::from_le_bytes(digest.try_into().ok()?);
        Some((FileCall { number: u32::try_from(number).ok()?, digest }, rest + DIGEST_BYTES))
    }
}

impl FileCall {
    fn word(self) -> u64 {
        u64::from(self.number) << 32 | u64::from(self.digest)
    }

    fn of(word: u64) -> FileCall {
        FileCall { number: (word >> 32) as u32, digest: word as u32 }
    }
}

/// Writes the beginning of an entry, up to the result: what `call_at` reads. Returns the number of
/// bytes.
fn put_call(room: &mut [u8], call: FileCall) -> usize {
    room[0] = CALL_TAG;
    let length = 1 + put_number(&mut room[1..], i64::from(call.number));
    room[length..length + DIGEST_BYTES].copy_from_slice(&call.digest.to_le_bytes());
    length + DIGEST_BYTES
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::super::{Clock, RandomSource, RecordHead};
    use super::*;

    const WRITE: FileCall = FileCall { number: 1, digest: 0xabcd_ef01 };
    const READ: FileCall = FileCall { number: 0, digest: 7 };

    #[test]
    fn a_later_incarnation_is_given_the_same_results_and_bytes() {
        let (head, mut room) = (RecordHead::default(), vec![0; 500]);
        head.begin(1, 1);
        let mut record = NondeterminismRecord::new(&head, &mut room);
        record.note_call(WRITE, 64, &[]).unwrap();
        record.note_call(READ, 5, &[b"he", b"llo"]).unwrap();
        record.note_call(READ, -2, &[]).unwrap();
        assert!(record.is_live());
        head.begin(2, 1);
        assert!(!record.is_live());
        assert_eq!(record.replay_call(WRITE), Ok((64, &[][..])));
        assert_eq!(record.replay_call(READ), Ok((5, &b"hello"[..])));
        let other = FileCall { digest: 8, ..READ };
        let problem = record.replay_call(other).unwrap_err();
        let (now, before) = (ReadRequest::FileCall(other), ReadRequest::FileCall(READ));
        assert_eq!(problem, RecordError::Diverged { read: 3, now, before });
        assert_eq!(record.replay_call(READ), Ok((-2, &[][..])));
        assert!(record.is_live());
    }

    #[test]
    fn a_call_of_which_not_all_is_on_record_is_answered_by_nobody() {
        let (head, mut room) = (RecordHead::default(), vec![0; 500]);
        head.begin(1, 1);
        let mut record = NondeterminismRecord::new(&head, &mut room);
        record.note_call(READ, 5, &[b"hello"]).unwrap();
        let first = head.position().consumed();
        record.note_call(READ, 100, &[&[7; 100]]).unwrap();
        let second = head.position().consumed();
        let kept = record.entries.to_vec();
        // A copy on another node may end at any byte `known` of the record.
        for known in first..=second {
            let mut room = vec![0; 500];
            room[..known as usize].copy_from_slice(&kept[..known as usize]);
            head.recorded.store(known, Relaxed);
            head.begin(2 + known, 1);
            let mut record = NondeterminismRecord::new(&head, &mut room);
            assert_eq!(record.replay_call(READ), Ok((5, &b"hello"[..])));
            let outcome = record.replay_call(READ);
            if known == second {
                assert_eq!(outcome, Ok((100, &[7; 100][..])));
                continue;
            }
            let Err(RecordError::Diverged { read: 2, now, before }) = outcome else {
                panic!("{known}: {outcome:?}")
            };
            assert_eq!(now, ReadRequest::FileCall(READ));
            assert_ne!(before, now);
            assert_eq!(head.position().consumed(), first, "nothing was replayed");
        }
    }

    #[test]
    fn a_length_that_no_record_has_is_none() {
        let (head, mut room) = (RecordHead::default(), vec![0; 50]);
        head.begin(1, 1);
        let mut record = NondeterminismRecord::new(&head, &mut room);
        record.note_call(READ, 5, &[b"hello"]).unwrap();
        let length = head.position().consumed() as usize - 5 - 1;
        head.recorded.store(50, Relaxed);
        for bytes in [45, i64::MAX, -1] {
            put_number(&mut record.entries[length..], bytes);
            head.consumed.store(0, Relaxed);
            let outcome = record.replay_call(READ);
            assert!(matches!(outcome, Err(RecordError::Diverged { .. })), "{bytes}: {outcome:?}");
        }
    }

    #[test]
    fn an_effect_counts_as_interrupted_until_it_has_its_entry() {
        let (head, mut room) = (RecordHead::default(), vec![0; 500]);
        head.begin(1, 1);
        let mut record = NondeterminismRecord::new(&head, &mut room);
        record.announce(WRITE, [1, 2, 3, 4, 5, 6, 7, 8]);
        record.begin_effect();
        assert!(record.has_begun_effect());
        record.note_call(WRITE, 64, &[]).unwrap();
        record.announce(WRITE, [8, 7, 6, 5, 4, 3, 2, 1]);
        assert!(!record.has_begun_effect());
        assert_eq!(record.written_by_last(), None, "its process has not ended");
        // The agent notes what the process had written.
        head.last_written.store(65, Relaxed);
        head.begin(2, 1);
        assert_eq!(record.written_by_last(), Some(64));
        assert_eq!(record.interrupted(WRITE), Ok(None), "it has an entry");
        record.replay_call(WRITE).unwrap();
        assert_eq!(record.interrupted(WRITE), Ok(Some([8, 7, 6, 5, 4, 3, 2, 1])));
        record.announce(WRITE, [0; PRECONDITION_WORDS]);
        assert_eq!(record.written_by_last(), None);
        head.last_written.store(UNKNOWN_WRITTEN, Relaxed);
        assert_eq!(record.written_by_last(), None);
        record.note_call(WRITE, 64, &[]).unwrap();
        assert_eq!(record.interrupted(WRITE), Ok(None));
        assert_eq!(record.end(), Ok(()));
    }

    #[test]
    fn an_announced_effect_is_the_next_thing_that_is_recorded() {
        let (head, mut room) = (RecordHead::default(), vec![0; 500]);
        head.begin(1, 1);
        let mut record = NondeterminismRecord::new(&head, &mut room);
        record.note_call(READ, 5, &[]).unwrap();
        record.announce(WRITE, [0; PRECONDITION_WORDS]);
        head.begin(2, 1);
        record.replay_call(READ).unwrap();
        let other = FileCall { digest: 9, ..WRITE };
        let differs = |now| {
            let before = ReadRequest::FileCall(WRITE);
            RecordError::Diverged { read: 2, now, before }
        };
        let call = ReadRequest::FileCall;
        assert_eq!(record.interrupted(other), Err(differs(call(other))), "of another length, say");
        assert_eq!(record.note_call(READ, 5, &[]), Err(differs(call(READ))));
        let real = Clock::of(0).unwrap();
        assert_eq!(record.clock(real, || 1), Err(differs(ReadRequest::Clock(real))));
        let request = ReadRequest::Bytes(RandomSource::Random, 4);
        assert_eq!(record.bytes(RandomSource::Random, &mut [0; 4], |_| 4), Err(differs(request)));
        assert_eq!(record.end(), Err(differs(ReadRequest::End)));
        assert_eq!(record.interrupted(WRITE), Ok(Some([0; PRECONDITION_WORDS])));
        record.note_call(WRITE, 64, &[]).unwrap();
        assert_eq!(record.clock(real, || 1), Ok(1));
    }

    #[test]
    fn a_program_that_ends_early_has_not_done_what_it_did_before() {
        let (head, mut room) = (RecordHead::default(), vec![0; 500]);
        head.begin(1, 1);
        let mut record = NondeterminismRecord::new(&head, &mut room);
        record.note_call(READ, 5, &[]).unwrap();
        record.note_call(WRITE, 64, &[]).unwrap();
        assert_eq!(record.end(), Ok(()));
        head.begin(2, 1);
        record.replay_call(READ).unwrap();
        let (now, before) = (ReadRequest::End, ReadRequest::FileCall(WRITE));
        assert_eq!(record.end(), Err(RecordError::Diverged { read: 2, now, before }));
        record.replay_call(WRITE).unwrap();
        assert_eq!(record.end(), Ok(()));
    }

    #[test]
    fn what_has_no_room_is_said_once_and_nothing_follows() {
        let (head, mut room) = (RecordHead::default(), vec![0; 100]);
        head.begin(1, 1);
        let mut record = NondeterminismRecord::new(&head, &mut room);
        assert_eq!(record.note_call(READ, 200, &[&[0; 200]]), Err(RecordError::Full(200)));
        assert!(record.is_full());
    }

    #[test]
    fn another_node_and_another_kernel_are_seen() {
        let head = RecordHead::default();
        assert_eq!(head.files.note_origin(1, 2), (false, false));
        assert_eq!(head.files.note_origin(1, 2), (false, false));
        assert_eq!(head.files.note_origin(3, 2), (true, false));
        assert_eq!(head.files.note_origin(3, 4), (true, true));
    }

    #[test]
    fn the_first_reason_for_no_restart_stands() {
        let head = RecordHead::default();
        assert!(!head.files.is_restart_forbidden());
        assert!(head.files.forbid_restart(b"it maps FILE"));
        assert!(!head.files.forbid_restart(b"another"));
        assert!(head.files.is_restart_forbidden());
        assert_eq!(head.files.reason_length.load(Relaxed), 12);
        let long = RecordHead::default();
        assert!(long.files.forbid_restart(&[b'x'; 2 * NO_RESTART_BYTES]));
        assert_eq!(long.files.reason_length.load(Relaxed), NO_RESTART_BYTES as u64);
    }
}
