//! Calls into the interposer (`crates/interpose`), the preloaded library that records the clocks,
//! random numbers and files that the program reads.
//!
//! The interposer counts the polls of the program in memory that outlives this process. After a
//! restart, a poll that found nothing in an earlier incarnation finds nothing again, whatever has
//! arrived by then. Otherwise the program would diverge from its earlier incarnation, and read
//! other clocks. The interposer does not record reads by this library: the provider's time is not
//! the program's time.

use std::ffi::{CStr, c_int, c_void};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

pub use landbridge_proto::nondeterminism::Extent;
use landbridge_proto::nondeterminism::{POLLS_AT, Polls, RECORD_HEAD_BYTES, RecordHead};
use landbridge_proto::recent_determinants::{
    RECENT_DETERMINANTS_AT, RECORD_ENTRIES_BYTES, RecentDeterminants,
};

use crate::param;

/// The interposer's record, if this process is recorded.
static INTERPOSER: OnceLock<Interposer> = OnceLock::new();

/// True once the interposer knows that this incarnation is live.
static IS_LIVE_CONFIRMED: AtomicBool = AtomicBool::new(false);

struct Interposer {
    polls: &'static Polls,
    /// Number of polls of the earlier incarnation that polled most.
    before: AtomicU64,
    /// Value of `checkpoints_requested` at the last checkpoint for which this process quiesced.
    checkpoints: AtomicU64,
}

type PollsFn = unsafe extern "C" fn() -> *const Polls;
type IsRecordedFn = unsafe extern "C" fn() -> c_int;
type ConfirmLiveFn = unsafe extern "C" fn() -> c_int;
type QuiesceFn = unsafe extern "C" fn() -> c_int;
/// Result of [`ResumeFn`] for a descriptor that must stay open.
const TAKES_DESCRIPTOR: c_int = 2;
type ResumeFn = unsafe extern "C" fn(c_int, u64) -> c_int;

/// The interposer's function that returns the poll counters, if the interposer is loaded.
fn library() -> Option<PollsFn> {
    // SAFETY: the interposer defines the function with this type.
    symbol(c"landbridge_interpose_polls")
        .map(|found| unsafe { std::mem::transmute::<NonNull<c_void>, PollsFn>(found) })
}

fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: dlsym only looks up a symbol.
    NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
}

/// Finds the interposer. The provider calls this once, before any of its other functions runs.
pub fn init() {
    let Some(find) = library() else { return };
    // SAFETY: the function returns null, or a pointer that stays valid.
    if let Some(polls) = unsafe { find().as_ref() } {
        let before = AtomicU64::new(polls.furthest.load(Relaxed));
        let checkpoints = AtomicU64::new(polls.checkpoints_requested.load(Relaxed));
        let _ = INTERPOSER.set(Interposer { polls, before, checkpoints });
    }
}

type SelectorFn = unsafe extern "C" fn() -> *mut u8;

/// While a value of this type lives, the interposer does not record the system calls of this
/// thread: they are calls of the provider, not of the program.
pub struct UnrecordedCalls(Option<(NonNull<u8>, u8)>);

impl UnrecordedCalls {
    const ALLOW: u8 = 0;

    #[inline]
    pub fn begin() -> Self {
        static FOUND: OnceLock<Option<SelectorFn>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            // SAFETY: the interposer defines the function with this type.
            symbol(c"landbridge_interpose_selector")
                .map(|found| unsafe { std::mem::transmute::<NonNull<c_void>, SelectorFn>(found) })
        });
        // SAFETY: the function returns null, or a byte that stays valid and belongs to this thread
        // alone.
        let selector = found.and_then(|find| NonNull::new(unsafe { find() }));
        Self(selector.map(|selector| {
            // SAFETY: the byte is valid. The kernel reads the byte at each system call of this
            // thread.
            let before = unsafe { selector.read_volatile() };
            // SAFETY: the byte is valid and belongs to this thread.
            unsafe { selector.write_volatile(Self::ALLOW) };
            (selector, before)
        }))
    }
}

impl Drop for UnrecordedCalls {
    #[inline]
    fn drop(&mut self) {
        if let Some((selector, before)) = self.0 {
            // SAFETY: the byte is valid and belongs to this thread, as in `begin`.
            unsafe { selector.write_volatile(before) };
        }
    }
}

/// Whether this process is a child of a recorded process, according to the interposer. After a
/// `fork` the environment is the same.
fn is_child() -> bool {
    symbol(c"landbridge_interpose_is_child").is_some_and(|found| {
        // SAFETY: the interposer defines the function with this type.
        unsafe {
            std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn() -> c_int>(found)() != 0
        }
    })
}

/// The reason why clocks and random numbers of this process are not recorded, although they should
/// be; and what follows from that.
pub fn missing_reason() -> Option<(&'static str, &'static str)> {
    let is_on = param::RECOVER_CLOCKS.is_on() == Ok(true);
    if INTERPOSER.get().is_some() || !is_on || param::INCARNATION.text().is_none() {
        return None;
    }
    // The agent passes the record in the environment; the interposer removes the variable from
    // processes without a record.
    let has_record = std::env::var_os("LANDBRIDGE_RECORD").is_some() && !is_child();
    let is_observed = library().is_some() && !has_record;
    let has_files = std::env::var_os("LANDBRIDGE_RECORD_FILES").is_none_or(|it| it != "0");
    let consequence = match has_files && !is_observed {
        true => "if this process is killed it cannot be restarted",
        false => "a restart may go another way",
    };
    let reason = match (library().is_some(), has_record) {
        (true, true) => {
            "there is no memory for their record: is address space limited (ulimit -v)?"
        }
        (true, false) => {
            "this is not the process that the launcher has started, but a child of it (a script \
             should end with `exec`)"
        }
        (false, true) => {
            "their library is not loaded here: something on the way has set LD_PRELOAD again"
        }
        (false, false) => {
            "this is not the process that the launcher has started, or its environment was emptied \
             on the way"
        }
    };
    Some((reason, consequence))
}

/// Whether clock reads of this thread are recorded, or clock reads of no thread are.
pub fn is_of_recorded_thread() -> bool {
    let Some((_, found)) = INTERPOSER.get().zip(symbol(c"landbridge_interpose_is_recorded_thread"))
    else {
        return true;
    };
    // SAFETY: the interposer defines the function with this type.
    let is_recorded = unsafe { std::mem::transmute::<NonNull<c_void>, IsRecordedFn>(found) };
    // SAFETY: the interposer defines the function with this type.
    unsafe { is_recorded() != 0 }
}

/// The last determinants of this process, if this process has a record.
fn recent() -> Option<&'static RecentDeterminants> {
    let polls: *const Polls = INTERPOSER.get()?.polls;
    // SAFETY: the counters are a part of the record, which is mapped whole, and whose end holds the
    // determinants.
    Some(unsafe {
        &*polls.byte_sub(POLLS_AT).byte_add(RECENT_DETERMINANTS_AT).cast::<RecentDeterminants>()
    })
}

/// The head of the record.
fn head() -> Option<&'static RecordHead> {
    let polls: *const Polls = INTERPOSER.get()?.polls;
    // SAFETY: the counters are a part of the record, which stays mapped; no caller asks while the
    // record is released for a checkpoint.
    Some(unsafe { &*polls.byte_sub(POLLS_AT).cast::<RecordHead>() })
}

/// The extent of the record for this incarnation; empty without a record.
#[inline]
pub fn extent() -> Extent {
    head().map_or(Extent::default(), RecordHead::extent)
}

/// The bytes of the record between the positions `from` and `to`, or fewer if the record's buffer
/// wraps around between them. Neither position may lie beyond the valid end or before the base of
/// the record.
pub fn entries(from: u64, to: u64) -> &'static [u8] {
    let Some(head) = head() else { return &[] };
    let start: *const RecordHead = head;
    let offset = from as usize % RECORD_ENTRIES_BYTES;
    let count = (to.saturating_sub(from) as usize).min(RECORD_ENTRIES_BYTES - offset);
    // SAFETY: entries lie behind the head, and entries between the base and the valid end do not
    // change.
    unsafe { std::slice::from_raw_parts(start.cast::<u8>().add(RECORD_HEAD_BYTES + offset), count) }
}

/// Number of determinants that were recorded on this node; 0 without a record.
pub fn determinant_count() -> u64 {
    recent().map_or(0, RecentDeterminants::count)
}

/// The determinant of this number, if it is among the last ones that this node keeps.
pub fn determinant(number: u64) -> Option<[u64; 3]> {
    recent()?.get(number)
}

/// Records a determinant on this node, for the next incarnation on this node.
pub fn note_determinant(number: u64, determinant: [u64; 3]) {
    if let Some(recent) = recent() {
        recent.note(number, determinant);
    }
}

/// Counts a poll of the program. Returns whether an earlier incarnation has made this poll, too.
#[inline]
pub fn count_poll() -> bool {
    INTERPOSER.get().is_some_and(Interposer::count)
}

/// Whether an earlier incarnation has polled more often than this incarnation has so far.
#[inline]
pub fn has_earlier_polls() -> bool {
    INTERPOSER.get().is_some_and(|interposer| {
        interposer.polls.present.load(Relaxed) < interposer.before.load(Relaxed)
    })
}

/// Whether a checkpoint of this process is requested.
#[inline]
pub fn is_checkpoint_wanted() -> bool {
    INTERPOSER.get().is_some_and(|interposer| {
        interposer.polls.checkpoints_requested.load(Relaxed) != interposer.checkpoints.load(Relaxed)
    })
}

/// Number of checkpoints requested so far.
pub fn checkpoints_wanted() -> u64 {
    INTERPOSER.get().map_or(0, |interposer| interposer.polls.checkpoints_requested.load(Relaxed))
}

/// Adds to the number of frames delivered during replay.
pub fn note_replayed(frames: u64) {
    if let Some(interposer) = INTERPOSER.get() {
        interposer.polls.redelivered.fetch_add(frames, Relaxed);
    }
}

/// Number of polls of the program.
pub fn polls() -> u64 {
    INTERPOSER.get().map_or(0, |interposer| interposer.polls.present.load(Relaxed))
}

/// Notifies the interposer once that this process has repeated every poll of earlier incarnations.
/// While the interposer has recorded calls left to replay, the next call notifies it again.
#[inline]
pub fn confirm_live() {
    if !IS_LIVE_CONFIRMED.load(Relaxed) && notify_live() {
        IS_LIVE_CONFIRMED.store(true, Relaxed);
    }
}

#[cold]
fn notify_live() -> bool {
    static FOUND: OnceLock<Option<ConfirmLiveFn>> = OnceLock::new();
    let confirm = FOUND.get_or_init(|| {
        let found = symbol(c"landbridge_interpose_confirm_live");
        // SAFETY: the interposer defines the function with this type.
        found.map(|found| unsafe { std::mem::transmute::<NonNull<c_void>, ConfirmLiveFn>(found) })
    });
    // SAFETY: the interposer's function has no arguments.
    INTERPOSER.get().is_none() || confirm.is_none_or(|confirm| unsafe { confirm() != 0 })
}

/// Releases the record for a checkpoint; see `landbridge_interpose_quiesce`. False: nothing has
/// changed.
pub fn quiesce() -> bool {
    let Some((interposer, found)) = INTERPOSER.get().zip(symbol(c"landbridge_interpose_quiesce"))
    else {
        return false;
    };
    // SAFETY: the interposer defines the function with this type; no code reads polls before
    // `resume`.
    let quiesce = unsafe { std::mem::transmute::<NonNull<c_void>, QuiesceFn>(found) };
    // SAFETY: the interposer defines the function with this type.
    interposer.quiesce_with(|| unsafe { quiesce() != 0 })
}

/// Maps the record again, as incarnation `incarnation` of the process. `is_same`: this process is
/// the one that quiesced, not one that was restored. False: the record cannot be used.
pub fn resume(record: OwnedFd, incarnation: u32, is_same: bool) -> bool {
    let Some((interposer, found)) = INTERPOSER.get().zip(symbol(c"landbridge_interpose_resume"))
    else {
        return false;
    };
    // SAFETY: the interposer defines the function with this type.
    let resume_record = unsafe { std::mem::transmute::<NonNull<c_void>, ResumeFn>(found) };
    // SAFETY: the descriptor is open.
    let outcome = unsafe { resume_record(record.as_raw_fd(), incarnation.into()) };
    if outcome == TAKES_DESCRIPTOR {
        // The descriptor has the number that the record's descriptor had before, and now belongs to
        // the interposer.
        let _ = record.into_raw_fd();
    }
    let is_resumed = outcome != 0;
    if is_resumed {
        interposer.before.store(interposer.polls.furthest.load(Relaxed), Relaxed);
    }
    // Earlier requests do not concern a restored process; the process that quiesced may have been
    // asked again already.
    if is_resumed && !is_same {
        IS_LIVE_CONFIRMED.store(false, Relaxed);
        interposer.checkpoints.store(interposer.polls.checkpoints_requested.load(Relaxed), Relaxed);
    }
    is_resumed
}

impl Interposer {
    /// Counts a checkpoint as served only if `quiesce` succeeds; otherwise the checkpoint is still
    /// requested. After success no code may read the counters.
    fn quiesce_with(&self, quiesce: impl FnOnce() -> bool) -> bool {
        let wanted = self.polls.checkpoints_requested.load(Relaxed);
        let is_quiesced = quiesce();
        if is_quiesced {
            self.checkpoints.store(wanted, Relaxed);
        }
        is_quiesced
    }

    fn count(&self) -> bool {
        let polls = self.polls.present.load(Relaxed) + 1;
        self.polls.present.store(polls, Relaxed);
        if polls <= self.before.load(Relaxed) {
            return true;
        }
        self.polls.furthest.store(polls, Relaxed);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_step_aside_is_asked_again() {
        static POLLS: Polls = Polls {
            furthest: AtomicU64::new(0),
            present: AtomicU64::new(0),
            checkpoints_requested: AtomicU64::new(3),
            redelivered: AtomicU64::new(0),
        };
        let interposer =
            Interposer { polls: &POLLS, before: AtomicU64::new(0), checkpoints: AtomicU64::new(2) };
        assert!(!interposer.quiesce_with(|| false));
        assert_eq!(interposer.checkpoints.load(Relaxed), 2);
        // The counter of requests cannot be read while the record is released.
        assert!(interposer.quiesce_with(|| {
            POLLS.checkpoints_requested.store(9, Relaxed);
            true
        }));
        assert_eq!(interposer.checkpoints.load(Relaxed), 3);
    }

    #[test]
    fn polls_of_earlier_starts_come_first() {
        static POLLS: Polls = Polls {
            furthest: AtomicU64::new(2),
            present: AtomicU64::new(0),
            checkpoints_requested: AtomicU64::new(0),
            redelivered: AtomicU64::new(0),
        };
        let interposer =
            Interposer { polls: &POLLS, before: AtomicU64::new(2), checkpoints: AtomicU64::new(0) };
        assert!(interposer.count() && interposer.count());
        assert_eq!(POLLS.furthest.load(Relaxed), 2);
        assert!(!interposer.count());
        assert_eq!((POLLS.furthest.load(Relaxed), POLLS.present.load(Relaxed)), (3, 3));
    }
}
