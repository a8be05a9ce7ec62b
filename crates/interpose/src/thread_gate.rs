//! A gate for the threads that are not recorded, closed while a checkpoint image is taken: the
//! record is unmapped then, descriptors are placeholders, and no call is dispatched.
//!
//! A thread stops at the gate where it makes a system call (`trap`), where a call that was let
//! through returns (`trampoline`), and in the handler of a signal that is sent to threads which
//! compute ([`STOP`]). A thread that waits in the kernel goes on waiting there, and stops as it
//! returns: so no call of the program is interrupted.
//!
//! In: the recorded thread, before and after an image. Out: whether all other threads of the
//! program stand still. What may never happen: a thread uses the record or a placeholder while the
//! gate is closed; the recorded thread waits at the gate.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use crate::descriptor_table::DESCRIPTORS;
use crate::dispatch;
use crate::file_metadata::call_path;
use crate::kernel_calls::{HERE, error, kernel};
use crate::processes::each_other_thread;
use crate::used_descriptors::begins_with_descriptor;

/// Value of a queued SIGSYS that asks a thread to stop at the gate.
pub const STOP: usize = 0x6c62_7374_6f70_2121;

/// 1 while the gate is closed. The trampoline reads this word, and threads wait for its change
/// (futex(2)).
pub static GATE: AtomicU32 = AtomicU32::new(OPEN);
const OPEN: u32 = 0;
const CLOSED: u32 = 1;

/// Number of threads within the handler of dispatched calls, where they may read the record.
static INSIDE: AtomicU32 = AtomicU32::new(0);

/// Looks at the threads before an image is given up for now, and nanoseconds between two of them.
const LOOKS: u32 = 100;
const BETWEEN_LOOKS_NANOS: i64 = 500_000;
/// The look from which on threads that still run are asked to stop. A thread that was only passing
/// through the kernel waits by then.
const ASKING_LOOK: u32 = 2;

/// Begins a dispatched call of a thread that is not recorded.
pub fn enter() {
    loop {
        INSIDE.fetch_add(1, SeqCst);
        if GATE.load(SeqCst) == OPEN {
            return;
        }
        INSIDE.fetch_sub(1, SeqCst);
        wait();
    }
}

/// Ends what [`enter`] has begun.
pub fn leave() {
    INSIDE.fetch_sub(1, SeqCst);
    wait();
}

/// Waits until the gate is open.
pub fn wait() {
    while GATE.load(SeqCst) == CLOSED {
        let wait = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as u64;
        kernel(libc::SYS_futex, [address(), wait, CLOSED.into(), 0, 0, 0]);
    }
}

/// Opens the gate in a child that was forked, whose only thread this is.
pub fn reset() {
    GATE.store(OPEN, SeqCst);
    INSIDE.store(0, SeqCst);
}

/// Closes the gate, and waits until every other thread stands still. `is_used`: whether the
/// recorded thread has a file open under a descriptor. False: a thread goes on, and the gate is
/// open.
pub fn close(is_used: impl Fn(u64) -> bool) -> bool {
    GATE.store(CLOSED, SeqCst);
    for look in 0..LOOKS {
        let mut all_stand = INSIDE.load(SeqCst) == 0;
        let has_seen_all = each_other_thread(|process, thread| {
            let stands = stands_still(thread, &is_used);
            if !stands && look == ASKING_LOOK {
                dispatch::queue_signal(process, thread, STOP);
            }
            all_stand &= stands;
        });
        // A thread may have entered between the two looks at it.
        if has_seen_all && all_stand && INSIDE.load(SeqCst) == 0 {
            return true;
        }
        let time = libc::timespec { tv_sec: 0, tv_nsec: BETWEEN_LOOKS_NANOS };
        kernel(libc::SYS_nanosleep, [(&raw const time).addr() as u64, 0, 0, 0, 0, 0]);
    }
    open();
    false
}

/// Opens the gate and wakes all who wait there.
pub fn open() {
    GATE.store(OPEN, SeqCst);
    let wake = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as u64;
    kernel(libc::SYS_futex, [address(), wake, i32::MAX as u64, 0, 0, 0]);
}

fn address() -> u64 {
    (&raw const GATE).addr() as u64
}

/// Whether a thread waits at the gate, or in a call of the kernel that uses no descriptor of the
/// recorded thread's files.
fn stands_still(thread: u64, is_used: &impl Fn(u64) -> bool) -> bool {
    let mut text = [0; 256];
    // `running`, or number and arguments of the call; -1: it waits elsewhere, as for a page.
    let found = match call_of(thread, &mut text) {
        Ok(found) => found,
        // It has ended. Of any other error nothing is known.
        Err(problem) => return problem == error(libc::ENOENT) || problem == error(libc::ESRCH),
    };
    let mut words = found.split(|byte| *byte == b' ');
    let number = words.next().and_then(|word| std::str::from_utf8(word).ok()?.trim().parse().ok());
    let Some(number) = number.filter(|number: &i64| *number >= 0) else { return false };
    let mut hexadecimal = words.map(|word| {
        let digits = std::str::from_utf8(word).ok()?.trim().strip_prefix("0x")?;
        u64::from_str_radix(digits, 16).ok()
    });
    let first = hexadecimal.next().flatten().unwrap_or(0);
    let is_of_file = first < DESCRIPTORS as u64 && is_used(first);
    !(begins_with_descriptor(number) && is_of_file)
}

/// What proc_pid_syscall(5) says of a thread of this process, or the error of the kernel.
fn call_of(thread: u64, into: &mut [u8]) -> Result<&[u8], i64> {
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let path = call_path(thread);
    let name = path.text().as_ptr().addr() as u64;
    let descriptor = kernel(libc::SYS_openat, [HERE, name, flags, 0, 0, 0]);
    let descriptor = u64::try_from(descriptor).map_err(|_| descriptor)?;
    let room = into.as_mut_ptr().addr() as u64;
    let length = kernel(libc::SYS_read, [descriptor, room, into.len() as u64, 0, 0, 0]);
    kernel(libc::SYS_close, [descriptor, 0, 0, 0, 0, 0]);
    // A thread that ends meanwhile has no call.
    let length = usize::try_from(length).map_err(|_| length)?;
    if length == 0 { Err(error(libc::ESRCH)) } else { Ok(&into[..length]) }
}
