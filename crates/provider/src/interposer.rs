//! The library that records what the program reads of clocks and chance (`crates/interpose`), where it is loaded.
//!
//! It keeps how often the program has looked for messages, in memory that outlives this process: whoever looked without
//! finding anything does so again, however much there is by then. Otherwise it would go another way than before, and
//! read other clocks. (What this library reads itself it does not record: our time is not the program's.)

use std::ffi::{CStr, c_int, c_void};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub use landbridge_proto::nondeterminism::Extent;
use landbridge_proto::nondeterminism::{POLLS_AT, Polls, RECORD_HEAD_BYTES, RecordHead};
use landbridge_proto::recent_determinants::{
    RECENT_DETERMINANTS_AT, RECORD_ENTRIES_BYTES, RecentDeterminants,
};

use crate::param;

/// What the library has kept, if this process is recorded.
static INTERPOSER: OnceLock<Interposer> = OnceLock::new();

struct Interposer {
    polls: &'static Polls,
    /// Of whichever start came furthest before this one.
    before: AtomicU64,
    /// Images of this process that it has made way for.
    checkpoints: AtomicU64,
}

type PollsFn = unsafe extern "C" fn() -> *const Polls;
type IsRecordedFn = unsafe extern "C" fn() -> c_int;
type QuiesceFn = unsafe extern "C" fn() -> c_int;
/// What the last one says of a descriptor that must stay open.
const TAKES_DESCRIPTOR: c_int = 2;
type ResumeFn = unsafe extern "C" fn(c_int, u64) -> c_int;

/// The library's function, if it is loaded.
fn library() -> Option<PollsFn> {
    // SAFETY: the function is that library's, of this type.
    symbol(c"landbridge_interpose_polls")
        .map(|found| unsafe { std::mem::transmute::<NonNull<c_void>, PollsFn>(found) })
}

fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: a lookup.
    NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
}

/// Called once, before anything else of the provider runs.
pub fn init() {
    let Some(find) = library() else { return };
    // SAFETY: it gives null or a place that stays.
    if let Some(polls) = unsafe { find().as_ref() } {
        let before = AtomicU64::new(polls.furthest.load(Relaxed));
        let checkpoints = AtomicU64::new(polls.checkpoints_requested.load(Relaxed));
        let _ = INTERPOSER.set(Interposer { polls, before, checkpoints });
    }
}

type SelectorFn = unsafe extern "C" fn() -> *mut u8;

/// While it lives, the system calls of this thread are not recorded: they are ours, not the program's.
pub struct UnrecordedCalls(Option<(NonNull<u8>, u8)>);

impl UnrecordedCalls {
    const ALLOW: u8 = 0;

    #[inline]
    pub fn begin() -> Self {
        static FOUND: OnceLock<Option<SelectorFn>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            // SAFETY: the function is that library's, of this type.
            symbol(c"landbridge_interpose_selector")
                .map(|found| unsafe { std::mem::transmute::<NonNull<c_void>, SelectorFn>(found) })
        });
        // SAFETY: it gives null or a byte that stays, and that is this thread's alone.
        let selector = found.and_then(|find| NonNull::new(unsafe { find() }));
        Self(selector.map(|selector| {
            // SAFETY: as above. The kernel reads it at each system call of this thread.
            let before = unsafe { selector.read_volatile() };
            // SAFETY: as above.
            unsafe { selector.write_volatile(Self::ALLOW) };
            (selector, before)
        }))
    }
}

impl Drop for UnrecordedCalls {
    #[inline]
    fn drop(&mut self) {
        if let Some((selector, before)) = self.0 {
            // SAFETY: as in `begin`.
            unsafe { selector.write_volatile(before) };
        }
    }
}

/// Whether the library says that this process is a child of one that is recorded: a `fork` leaves the environment as it was.
fn is_child() -> bool {
    symbol(c"landbridge_interpose_is_child").is_some_and(|found| {
        // SAFETY: the function is that library's, of this type.
        unsafe {
            std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn() -> c_int>(found)() != 0
        }
    })
}

/// Why nothing is recorded of what this process reads, if it should be.
pub fn missing_reason() -> Option<&'static str> {
    let is_on = param::RECOVER_CLOCKS.is_on() == Ok(true);
    if INTERPOSER.get().is_some() || !is_on || param::INCARNATION.text().is_none() {
        return None;
    }
    // The agent says where the record is; the library takes that away from whoever has none.
    let is_told = std::env::var_os("LANDBRIDGE_RECORD").is_some() && !is_child();
    Some(match (library().is_some(), is_told) {
        (true, true) => {
            "there is no memory for their record: is address space limited (ulimit -v)?"
        }
        (true, false) => {
            "this is not the process that the launcher has started, but a child of it (a script should end with `exec`)"
        }
        (false, true) => {
            "their library is not loaded here: something on the way has set LD_PRELOAD anew"
        }
        (false, false) => {
            "this is not the process that the launcher has started, or its environment was emptied on the way"
        }
    })
}

/// Whether clocks that this thread reads are recorded, or nobody's are.
pub fn is_of_recorded_thread() -> bool {
    let Some((_, found)) = INTERPOSER.get().zip(symbol(c"landbridge_interpose_is_recorded_thread"))
    else {
        return true;
    };
    // SAFETY: the function is that library's, of this type.
    let is_recorded = unsafe { std::mem::transmute::<NonNull<c_void>, IsRecordedFn>(found) };
    // SAFETY: as above.
    unsafe { is_recorded() != 0 }
}

/// The last determinants of this process, if it has a record.
fn recent() -> Option<&'static RecentDeterminants> {
    let polls: *const Polls = INTERPOSER.get()?.polls;
    // SAFETY: the place is one in the record, of which all is mapped, and whose end is so used.
    Some(unsafe {
        &*polls.byte_sub(POLLS_AT).byte_add(RECENT_DETERMINANTS_AT).cast::<RecentDeterminants>()
    })
}

/// The whole record.
fn head() -> Option<&'static RecordHead> {
    let polls: *const Polls = INTERPOSER.get()?.polls;
    // SAFETY: they are a part of it, and it stays mapped; nobody asks while it is aside.
    Some(unsafe { &*polls.byte_sub(POLLS_AT).cast::<RecordHead>() })
}

/// What there is of its record for the present start. Nothing without one.
#[inline]
pub fn extent() -> Extent {
    head().map_or(Extent::default(), RecordHead::extent)
}

/// The bytes of it from one place to another, or to one in between: neither is beyond what was told, nor before what is needed.
pub fn entries(from: u64, to: u64) -> &'static [u8] {
    let Some(head) = head() else { return &[] };
    let start: *const RecordHead = head;
    let offset = from as usize % RECORD_ENTRIES_BYTES;
    let count = (to.saturating_sub(from) as usize).min(RECORD_ENTRIES_BYTES - offset);
    // SAFETY: entries lie behind the head, and those that were told and are needed do not change.
    unsafe { std::slice::from_raw_parts(start.cast::<u8>().add(RECORD_HEAD_BYTES + offset), count) }
}

/// Determinants that were noted on this node; 0 without a record.
pub fn determinant_count() -> u64 {
    recent().map_or(0, RecentDeterminants::count)
}

/// One of the last of them.
pub fn determinant(number: u64) -> Option<[u64; 3]> {
    recent()?.get(number)
}

/// The determinant of this number is made: a new start on this node must know.
pub fn note_determinant(number: u64, determinant: [u64; 3]) {
    if let Some(recent) = recent() {
        recent.note(number, determinant);
    }
}

/// The program looks for messages. Whether an earlier start of it has done so.
#[inline]
pub fn count_poll() -> bool {
    INTERPOSER.get().is_some_and(Interposer::count)
}

/// Whether an earlier start has looked more often than this one has so far.
#[inline]
pub fn has_earlier_polls() -> bool {
    INTERPOSER.get().is_some_and(|interposer| {
        interposer.polls.present.load(Relaxed) < interposer.before.load(Relaxed)
    })
}

/// Whether an image of this process is to be taken.
#[inline]
pub fn is_checkpoint_wanted() -> bool {
    INTERPOSER.get().is_some_and(|interposer| {
        interposer.polls.checkpoints_requested.load(Relaxed) != interposer.checkpoints.load(Relaxed)
    })
}

/// How many have ever been wanted.
pub fn checkpoints_wanted() -> u64 {
    INTERPOSER.get().map_or(0, |interposer| interposer.polls.checkpoints_requested.load(Relaxed))
}

/// So many frames more were taken in again.
pub fn note_replayed(frames: u64) {
    if let Some(interposer) = INTERPOSER.get() {
        interposer.polls.redelivered.fetch_add(frames, Relaxed);
    }
}

/// How often the program has looked for messages.
pub fn polls() -> u64 {
    INTERPOSER.get().map_or(0, |interposer| interposer.polls.present.load(Relaxed))
}

/// Lets go of the record; see the library. False: nothing has changed.
pub fn quiesce() -> bool {
    let Some((interposer, found)) = INTERPOSER.get().zip(symbol(c"landbridge_interpose_quiesce"))
    else {
        return false;
    };
    // SAFETY: the function is that library's, of this type; nobody looks at polls before `resume`.
    let quiesce = unsafe { std::mem::transmute::<NonNull<c_void>, QuiesceFn>(found) };
    // SAFETY: as above.
    interposer.quiesce_with(|| unsafe { quiesce() != 0 })
}

/// Takes hold of the record again, as incarnation `incarnation` of the process, the same as before or another one. False: that cannot be.
pub fn resume(record: OwnedFd, incarnation: u32, is_same: bool) -> bool {
    let Some((interposer, found)) = INTERPOSER.get().zip(symbol(c"landbridge_interpose_resume"))
    else {
        return false;
    };
    // SAFETY: as above.
    let resume_record = unsafe { std::mem::transmute::<NonNull<c_void>, ResumeFn>(found) };
    // SAFETY: the descriptor is open.
    let outcome = unsafe { resume_record(record.as_raw_fd(), incarnation.into()) };
    if outcome == TAKES_DESCRIPTOR {
        // It has come under the very number that the record had, and belongs to the library now.
        let _ = record.into_raw_fd();
    }
    let is_resumed = outcome != 0;
    if is_resumed {
        interposer.before.store(interposer.polls.furthest.load(Relaxed), Relaxed);
    }
    // What earlier starts were asked for since is nothing to another one; the same may have been asked again already.
    if is_resumed && !is_same {
        interposer.checkpoints.store(interposer.polls.checkpoints_requested.load(Relaxed), Relaxed);
    }
    is_resumed
}

impl Interposer {
    /// An image counts as made way for only if nobody refuses: otherwise it is wanted still. Afterwards nobody can look.
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
        // What is wanted cannot be read while it is aside.
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
