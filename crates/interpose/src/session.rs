//! One recorded call: performed and noted in the record, or answered from the record.
//!
//! While an incarnation replays, calls take the recorded results and no effect on a file is
//! performed. A read takes its content from the record where the file may differ by now; otherwise
//! the file is read and compared by digest. The first call after the end of the record makes the
//! process *live*: the process then reopens each open file under its present name. The file must be
//! the same file as before, and gets the position that the program has reached.
//!
//! What may never happen: an effect is performed twice; a process continues with another file than
//! it had.

use std::cell::UnsafeCell;
use std::fmt;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use landbridge_proto::digest::digest;
use landbridge_proto::nondeterminism::{FileCall, PRECONDITION_WORDS, RecordError};
use libc::c_long;

use crate::descriptor_table::DescriptorTable;
use crate::kernel_calls::kernel;
use crate::messages::{Path, warn};
use crate::record_lock::{self, RecordGuard};
use crate::restart_refusals::{self, abort_replay};
use crate::{change_times, file_metadata, file_status, held_files, origin, processes, record_head};

struct TableCell(UnsafeCell<DescriptorTable>);
// SAFETY: the recorded thread alone uses the table, within one session at a time.
unsafe impl Sync for TableCell {}
static TABLE: TableCell = TableCell(UnsafeCell::new(DescriptorTable::EMPTY));

/// Bytes of recorded content of files that may change but are not known to. Beyond
/// [`CONTENT_BYTES_MAX`] the record holds digests.
static CONTENT: AtomicI32 = AtomicI32::new(0);
/// Bound of [`CONTENT`] in bytes: a quarter of the record.
const CONTENT_BYTES_MAX: i32 = 64 << 20;

/// Exclusive access to the record and the descriptor table, for one call.
///
/// A session has no state of its own: it lends both for the time of one call. Each module of calls
/// adds the methods of its calls, and uses only those of modules before it (the table in `lib.rs`).
/// So the type has more than 40 methods: their number is that of the calls.
pub struct Session {
    pub guard: RecordGuard,
    pub table: &'static mut DescriptorTable,
}

/// Result of an effect during which the last incarnation was killed.
pub enum EffectOutcome {
    /// The effect has not happened, or a repetition makes no difference.
    NotPerformed,
    /// The effect has happened, with this result.
    Performed(i64),
    /// Nothing shows whether the effect has happened.
    Unknown,
}

impl Session {
    pub fn new(guard: RecordGuard) -> Self {
        // SAFETY: one session exists at a time.
        Self { guard, table: unsafe { &mut *TABLE.0.get() } }
    }

    /// Whether the recorded thread has a file open at this descriptor, as another thread sees it.
    pub fn has_open(descriptor: u64) -> bool {
        // SAFETY: the word may be out of date when the caller uses it, as is true of any
        // descriptor.
        unsafe { (*TABLE.0.get()).index(descriptor).is_some() }
    }

    /// Whether the descriptor is a placeholder without a file, as another thread or a child sees
    /// it.
    pub fn is_placeholder(descriptor: u64) -> bool {
        // SAFETY: the entry may be out of date when the caller uses it, as is true of any
        // descriptor.
        let table = unsafe { &mut *TABLE.0.get() };
        table.get(descriptor).is_some_and(|open| !open.is_real)
    }

    /// Prepares a replaying process for a thread or a child that begins: reopens every open file,
    /// because the thread or child may use a descriptor.
    pub fn share(&mut self) {
        if !self.is_live_for_unrecorded() {
            self.table.share();
        }
    }

    /// Passes every open file to the agent before a checkpoint. False: the agent cannot hold a
    /// file, and nothing has changed.
    pub fn quiesce(&mut self) -> bool {
        self.check_maps_for_image();
        self.table.quiesce()
    }

    /// Whether the record is replayed completely. At the first such answer, all open files are
    /// restored.
    pub fn is_live(&mut self) -> bool {
        let was_live = self.was_live();
        let is_live = self.is_live_except_files();
        if is_live && !was_live {
            self.restore_files();
        }
        is_live
    }

    /// Whether a call that is not recorded is beyond everything that an earlier incarnation has
    /// done. If that incarnation was killed within an effect, calls before this effect are not: the
    /// effect may have renamed or removed a file that is still open here.
    pub fn is_live_for_unrecorded(&mut self) -> bool {
        self.was_live() || !self.guard.record().has_interrupted_effect() && self.is_live()
    }

    /// Whether the record is replayed completely, without restoring files. For a call during which
    /// the earlier incarnation may have been killed and that may have renamed a file: the caller
    /// calls [`Session::restore_files`] when the outcome is known.
    pub fn is_live_except_files(&mut self) -> bool {
        let was_live = self.was_live();
        let is_live = was_live || self.guard.record().is_live();
        record_lock::note_live(is_live);
        if is_live && !was_live {
            record_head::head().into_iter().for_each(|head| head.note_live(since_boot()));
        }
        is_live
    }

    pub fn was_live(&self) -> bool {
        record_lock::has_been_live()
    }

    /// Begins another replay, in a process restored from a checkpoint image.
    pub fn restart_replay(&mut self) {
        record_lock::note_live(false);
        record_head::head().into_iter().for_each(origin::compare);
        change_times::forget_devices();
        self.check_restored_maps();
        self.table.working_directory.enter_in_replay();
        let mut has_others = false;
        processes::each_other_thread(|_, _| has_others = true);
        if has_others {
            self.table.share();
        }
    }

    /// Performs and notes a call without effects. `perform` makes the call; `pieces` returns the
    /// bytes that the kernel has written for a result.
    pub fn observe<'a>(
        &mut self,
        call: FileCall,
        perform: impl FnOnce() -> i64,
        pieces: impl FnOnce(i64) -> [&'a [u8]; 2],
    ) -> i64 {
        let result = perform();
        self.note(call, result, &pieces(result));
        result
    }

    /// Notes the result of a call in the record.
    pub fn note(&mut self, call: FileCall, result: i64, pieces: &[&[u8]]) {
        match self.guard.record().note_call(call, result, pieces) {
            Err(problem @ RecordError::Full(_)) => {
                warn(format_args!("{problem}: if this process is killed it cannot be restarted"));
                make_durable();
            }
            noted => noted.unwrap_or_else(|problem| abort_replay(format_args!("{problem}"))),
        }
    }

    /// The recorded result of a call. The bytes that the kernel wrote are copied into `into`, as
    /// many as fit.
    pub fn replay(
        &mut self,
        call: FileCall,
        about: CallDescription<'_>,
        into: &mut [&mut [u8]],
    ) -> i64 {
        match self.guard.record().replay_call(call) {
            Ok((result, mut bytes)) => {
                for room in into {
                    let now = bytes.len().min(room.len());
                    room[..now].copy_from_slice(&bytes[..now]);
                    bytes = &bytes[now..];
                }
                result
            }
            Err(problem) => abort_replay(format_args!("{about}: {problem}")),
        }
    }

    /// The recorded result of a call on an open file, as [`Session::replay`] takes it.
    pub fn replay_on(
        &mut self,
        call: FileCall,
        what: &'static str,
        descriptor: u64,
        into: &mut [&mut [u8]],
    ) -> i64 {
        let about = CallDescription::Path(what, self.table.path_of(descriptor));
        self.replay(call, about, into)
    }

    /// Performs an effect after its announcement in the record, or finds that the effect of an
    /// interrupted call has happened. `precondition` gets that of an earlier announcement of this
    /// effect, if there is one. Returns the result; the caller notes it.
    pub fn effect(
        &mut self,
        call: FileCall,
        about: CallDescription<'_>,
        precondition: impl FnOnce(Option<[u64; PRECONDITION_WORDS]>) -> [u64; PRECONDITION_WORDS],
        outcome: impl FnOnce([u64; PRECONDITION_WORDS]) -> EffectOutcome,
        perform: impl FnOnce() -> i64,
    ) -> i64 {
        let interrupted = self.guard.record().interrupted(call);
        let interrupted =
            interrupted.unwrap_or_else(|problem| abort_replay(format_args!("{about}: {problem}")));
        // Another node does not know whether the effect had begun.
        let may_have_happened = self.guard.record().has_begun_effect() || origin::is_other_node();
        let interrupted = interrupted.filter(|_| may_have_happened);
        let outcome = |before| crate::file_status::with_fresh_attributes(|| outcome(before));
        match interrupted.map_or(EffectOutcome::NotPerformed, outcome) {
            EffectOutcome::Performed(result) => return result,
            EffectOutcome::Unknown => abort_replay(format_args!(
                "it was killed within {about}, and whether that has happened cannot be known"
            )),
            EffectOutcome::NotPerformed => (),
        }
        self.guard.record().announce(call, precondition(interrupted));
        if !make_durable() {
            abort_replay(format_args!(
                "its agent has not confirmed that {about} is recorded, so another node may repeat \
                 it"
            ));
        }
        self.guard.record().begin_effect();
        perform()
    }

    /// Bytes that the process which announced the last effect had written when it ended. `None`:
    /// not known, because it ended on another node, or its kernel does not count.
    pub fn written_at_end(&mut self) -> Option<u64> {
        self.guard.record().written_by_last().filter(|_| !origin::is_other_node())
    }

    /// Forbids a restart of this process from now on, and reports the reason once.
    pub fn forbid_restart(&mut self, reason: fmt::Arguments<'_>) {
        restart_refusals::forbid_restart(reason);
    }

    /// Reserves `bytes` of recorded content for a read that could be repeated instead. False:
    /// [`CONTENT_BYTES_MAX`] is reached.
    pub fn may_record_content(&self, bytes: usize) -> bool {
        let bytes = bytes.min(CONTENT_BYTES_MAX as usize) as i32;
        let before = CONTENT.fetch_add(bytes, Relaxed);
        let fits = before.saturating_add(bytes) <= CONTENT_BYTES_MAX;
        if !fits {
            CONTENT.store(before, Relaxed);
        }
        fits
    }

    /// Reopens every open file at its position, and restores the working directory.
    pub fn restore_files(&mut self) {
        self.check_changed_files();
        self.check_mapped_files();
        self.table.restore_those(|_| true);
        self.table.working_directory.restore();
    }
}

/// The clock by which the kernel notes when threads begin, in nanoseconds.
fn since_boot() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let room = (&raw mut now).addr() as u64;
    kernel(libc::SYS_clock_gettime, [libc::CLOCK_BOOTTIME as u64, room, 0, 0, 0, 0]);
    file_status::nanoseconds(now.tv_sec, now.tv_nsec) as u64
}

/// Waits until another node has the record, if another node may need it. False: the agent does not
/// answer.
fn make_durable() -> bool {
    record_head::head()
        .is_none_or(|head| !head.has_durable_effects() || held_files::make_durable(head))
}

/// Builds a [`FileCall`]: the call's number, and a digest of the arguments that must be equal in
/// every incarnation.
pub fn call_of(number: c_long, words: [u64; 5], path: &[u8]) -> FileCall {
    let mut bytes = [0; 48];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes[40..].copy_from_slice(&path_digest(path).to_le_bytes());
    FileCall { number: number as u32, digest: (digest(&bytes) >> 32) as u32 }
}

/// Digest of a path. The process's own directory in proc(5) has one digest in every incarnation,
/// whatever the process id.
fn path_digest(path: &[u8]) -> u64 {
    file_metadata::in_own_proc_directory(path)
        .map_or_else(|| digest(path), |rest| digest(rest).wrapping_add(1))
}

/// Value of `offset` in a [`CallDescription`] of an append.
pub const AT_END: i64 = -1;

/// Description of a call for a message.
#[derive(Clone, Copy)]
pub enum CallDescription<'a> {
    Path(&'static str, &'a [u8]),
    Bytes { what: &'static str, path: &'a [u8], offset: i64, length: u64 },
}

impl fmt::Display for CallDescription<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            CallDescription::Path(what, path) => write!(f, "its {what} of {}", Path(path)),
            CallDescription::Bytes { what, path, offset: AT_END, length } => {
                write!(f, "its {what} of {length} bytes at the end of {}", Path(path))
            }
            CallDescription::Bytes { what, path, offset, length } => {
                write!(f, "its {what} of {length} bytes at {offset} of {}", Path(path))
            }
        }
    }
}
