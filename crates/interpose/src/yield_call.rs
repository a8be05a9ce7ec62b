//! The replacement of `sched_yield`, by which a waiting MPI library lets others run.
//!
//! In: calls of the program, the counters of its polls. Out: calls to the kernel, which bypass
//! dispatch: an MPI library makes one for each message, and they have no effect worth recording.
//! Behind a poll that is repeated the call lets nobody run: what the library waited for then comes
//! at a later poll, which waits for it. Without that, a replay takes as long as the waiting took.
//!
//! What may never happen: the call leaves other bytes on the stack in a replay than before.
//! Programs send such bytes in fields that they have never set.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::dispatch::raw;
use crate::{record_head, record_lock};

/// Replaces the C library's `sched_yield`.
pub extern "C" fn sched_yield() -> c_int {
    // Two numbers for one call, so that both ways use the stack alike.
    let number = match is_behind_repeated_poll() {
        // Changes nothing, and returns 0 as the other call does.
        true => libc::SYS_sched_get_priority_min,
        false => libc::SYS_sched_yield,
    };
    // SAFETY: a call without arguments, or with the number of a policy.
    unsafe { raw(number, [0; 6]) as c_int }
}

/// Whether this thread repeats polls of an earlier incarnation, and has polled since the last call.
/// A second call behind the same poll waits for something else.
fn is_behind_repeated_poll() -> bool {
    static POLLS_BEFORE: AtomicU64 = AtomicU64::new(0);
    // In a checkpoint the record is not mapped.
    if !record_head::is_owner() || record_lock::is_excluded() {
        return false;
    }
    let Some(polls) = record_head::polls() else { return false };
    let present = polls.present.load(Relaxed);
    present < polls.furthest.load(Relaxed) && POLLS_BEFORE.swap(present, Relaxed) != present
}
