//! Recorded calls whose answer comes from the kernel itself and not from a file: random numbers
//! (getrandom(2)), and the names of the node and of its kernel (uname(2)), by which also
//! gethostname(3) is made.
//!
//! In: arguments of such a call. Out: the kernel's answer, noted in the record, or the answer from
//! the record. The names are noted once, as the program begins: a process that goes on on another
//! node keeps the names of the first one, so that it does what it would have done there.
//!
//! What may never happen: two incarnations get different answers to the same call.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};

use landbridge_proto::nondeterminism::RandomSource;

use crate::kernel_calls::{bytes, kernel};
use crate::record_lock;
use crate::session::{CallDescription, Session, call_of};

impl Session {
    /// Handles `getrandom`.
    ///
    /// # Safety
    /// The arguments are those of the call.
    pub unsafe fn random(&mut self, into: u64, length: u64, flags: u64) -> Option<i64> {
        // SAFETY: the program's buffer.
        let room = unsafe { bytes(into, length as usize) };
        let draw = |room: &mut [u8]| {
            let (pointer, length) = (room.as_mut_ptr().addr() as u64, room.len() as u64);
            kernel(libc::SYS_getrandom, [pointer, length, flags, 0, 0, 0])
        };
        let drawn = self.guard.record().bytes(RandomSource::Random, room, draw);
        Some(record_lock::outcome_of(drawn))
    }

    /// Records the names of the node and of its kernel, as the program begins.
    pub fn record_names(&mut self) {
        let mut names = [0; NAME_BYTES];
        let call = call_of(libc::SYS_uname, [0; 5], &[]);
        if self.is_live() {
            let room = names.as_mut_ptr().addr() as u64;
            let result = kernel(libc::SYS_uname, [room, 0, 0, 0, 0, 0]);
            self.note(call, result, &[&names]);
        } else {
            self.replay(call, CallDescription::Path("uname", &[]), &mut [&mut names]);
        }
        // SAFETY: the process has one thread, and no other code uses the names yet.
        unsafe { *NAMES.0.get() = names };
        HAS_NAMES.store(true, Release);
    }
}

/// Bytes of the names (`struct new_utsname`).
const NAME_BYTES: usize = size_of::<libc::utsname>();

struct Names(UnsafeCell<[u8; NAME_BYTES]>);
// SAFETY: written once, before `HAS_NAMES`.
unsafe impl Sync for Names {}
static NAMES: Names = Names(UnsafeCell::new([0; NAME_BYTES]));
static HAS_NAMES: AtomicBool = AtomicBool::new(false);

/// Handles `uname` of any thread of the process. `None`: the call is let through.
///
/// # Safety
/// The argument is that of the call.
pub unsafe fn system_name(into: u64) -> Option<i64> {
    if !HAS_NAMES.load(Acquire) {
        return None;
    }
    let result = kernel(libc::SYS_uname, [into, 0, 0, 0, 0, 0]);
    if result < 0 {
        return Some(result);
    }
    // SAFETY: the kernel has just written the program's structure. The names change no more.
    unsafe { bytes(into, NAME_BYTES).copy_from_slice(&*NAMES.0.get()) };
    Some(0)
}
