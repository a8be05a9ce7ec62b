//! Syscall user dispatch (prctl(2), Linux 5.11): the kernel delivers system calls of a thread as
//! signals.
//!
//! In: threads whose calls are dispatched from now on, and checkpoints. Out: the kernel's state and
//! one byte, which lets the calls of a thread through while it is 0. `trap` has the handler of the
//! signals. What may never happen: a call of CRIU or of the provider is dispatched.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};

use libc::c_long;

use crate::{processes, record_head, trampoline};

pub const PR_SET_SYSCALL_USER_DISPATCH: u64 = 59;
const DISPATCH_OFF: u64 = 0;
const DISPATCH_ON: u64 = 1;
const ALLOW: u8 = 0;
const BLOCK: u8 = 1;

/// Value of a queued SIGSYS that asks a thread to turn syscall user dispatch on again.
pub const REARM: usize = 0x6c62_7265_6172_6d21;

/// Bytes of the signal stack that replaces a smaller one of an observed thread. No program asks for
/// exactly this length, so the length identifies stacks that this module has mapped.
pub const WIDE_STACK_BYTES: usize = (128 << 10) + 4096;

pub const SIGSYS_BIT: u64 = 1 << (libc::SIGSYS - 1);

/// Dispatch selector of the recorded thread: `BLOCK` while its calls are dispatched.
static SELECTOR: AtomicU8 = AtomicU8::new(ALLOW);

/// Dispatch selector of observed threads and processes: `BLOCK`, except while a checkpoint is
/// taken.
static OBSERVED_SELECTOR: AtomicU8 = AtomicU8::new(BLOCK);

static IS_INSTALLED: AtomicBool = AtomicBool::new(false);

/// Whether the SIGSYS handler of this process is installed.
#[inline]
pub fn is_installed() -> bool {
    IS_INSTALLED.load(Relaxed)
}

/// Notes that the handler is installed.
pub fn note_installed() {
    IS_INSTALLED.store(true, Relaxed);
}

/// Dispatches the calls of a signal handler that begins in the recorded thread; returns what
/// [`end_handler`] restores.
pub fn begin_handler() -> u8 {
    SELECTOR.swap(BLOCK, Relaxed)
}

/// Ends what [`begin_handler`] has begun.
pub fn end_handler(before: u8) {
    SELECTOR.store(before, Relaxed);
}

/// Turns dispatch of an observed thread on again ([`rearm`]).
pub fn observe_again() {
    dispatch(&OBSERVED_SELECTOR);
}

/// Dispatches all system calls of the calling thread, which is not the recorded one, in a process
/// that has the handler. False: the kernel does not support dispatch.
pub fn observe_this_thread() -> bool {
    unblock();
    widen_present_stack() && dispatch(&OBSERVED_SELECTOR)
}

/// Replaces the signal stack of the calling thread, if the thread has one that is too small for the
/// handler. False: there is no memory.
fn widen_present_stack() -> bool {
    let mut now = libc::stack_t { ss_sp: null_mut(), ss_flags: 0, ss_size: 0 };
    // SAFETY: the structures live until the calls return; the memory is new.
    unsafe {
        raw(libc::SYS_sigaltstack, [0, (&raw mut now).addr() as u64, 0, 0, 0, 0]);
        if now.ss_flags & libc::SS_DISABLE != 0 || now.ss_size >= WIDE_STACK_BYTES {
            return true;
        }
        let Some(wide) = new_wide_stack() else { return false };
        (now.ss_sp, now.ss_size, now.ss_flags) = (wide, WIDE_STACK_BYTES, 0);
        raw(libc::SYS_sigaltstack, [(&raw const now).addr() as u64, 0, 0, 0, 0, 0]) == 0
    }
}

/// Memory for a signal stack of [`WIDE_STACK_BYTES`].
pub fn new_wide_stack() -> Option<*mut c_void> {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as u64;
    let bytes = WIDE_STACK_BYTES as u64;
    // SAFETY: the kernel chooses free addresses.
    let found = unsafe { raw(libc::SYS_mmap, [0, bytes, protection, flags, !0, 0]) };
    (found > 0).then_some(found as *mut c_void)
}

fn dispatch(selector: &'static AtomicU8) -> bool {
    let (start, length) = trampoline::range();
    let selector = (&raw const *selector).addr() as u64;
    let arguments =
        [PR_SET_SYSCALL_USER_DISPATCH, DISPATCH_ON, start as u64, length as u64, selector, 0];
    // SAFETY: the selector is a static.
    unsafe { raw(libc::SYS_prctl, arguments) == 0 }
}

/// Dispatches the system calls of the recorded thread. False: the kernel does not support dispatch.
pub fn start_dispatch() -> bool {
    SELECTOR.store(ALLOW, Relaxed);
    let is_on = dispatch(&SELECTOR);
    if is_on {
        SELECTOR.store(BLOCK, Relaxed);
    }
    is_on
}

/// Turns dispatch on again after [`suspend_dispatch`]. The caller is the recorded thread, whose own
/// calls pass until the caller resets the selector. In a process restored from a checkpoint image
/// no thread's calls are dispatched, so this function asks every other thread to turn dispatch on
/// again.
pub fn resume_dispatch(is_restored: bool) {
    start_dispatch();
    SELECTOR.store(ALLOW, Relaxed);
    OBSERVED_SELECTOR.store(BLOCK, Relaxed);
    if is_restored {
        processes::each_other_thread(rearm);
    }
}

/// `struct siginfo` of a queued SIGSYS: number, error, code, padding, sender, and a pointer.
#[repr(C, align(8))]
struct QueuedSignal([i32; 32]);

/// Asks a thread to turn dispatch on again.
pub fn rearm(process: u64, thread: u64) {
    queue_signal(process, thread, REARM);
}

/// Queues a SIGSYS with this value for a thread.
pub fn queue_signal(process: u64, thread: u64, value: usize) {
    let mut queued = QueuedSignal([0; 32]);
    queued.0[..3].copy_from_slice(&[libc::SIGSYS, 0, libc::SI_QUEUE]);
    queued.0[4] = process as i32;
    queued.0[6..8].copy_from_slice(&[value as u32 as i32, (value >> 32) as i32]);
    let queued = (&raw const queued).addr() as u64;
    let arguments = [process, thread, libc::SIGSYS as u64, queued, 0, 0];
    // SAFETY: the structure lives until the call returns.
    unsafe { raw(libc::SYS_rt_tgsigqueueinfo, arguments) };
}

/// Lets every system call of every thread through: CRIU makes calls in each thread while it takes a
/// checkpoint image.
pub fn suspend_dispatch() {
    SELECTOR.store(ALLOW, Relaxed);
    OBSERVED_SELECTOR.store(ALLOW, Relaxed);
    // SAFETY: the call changes only how the kernel treats calls of this thread.
    unsafe { raw(libc::SYS_prctl, [PR_SET_SYSCALL_USER_DISPATCH, DISPATCH_OFF, 0, 0, 0, 0]) };
}

/// Address of the byte that is 0 while the calls of this thread are let through; null if they are
/// always let through.
pub fn selector() -> *mut u8 {
    if record_head::is_owner() { SELECTOR.as_ptr() } else { null_mut() }
}

/// Makes a system call that is not dispatched.
///
/// # Safety
/// The arguments are valid for the system call `number`.
pub unsafe fn raw(number: c_long, arguments: [u64; 6]) -> i64 {
    // SAFETY: the caller's promise.
    unsafe { trampoline::call(number, arguments) }
}

/// Takes SIGSYS out of the calling thread's signal mask.
pub fn unblock() {
    let sigsys = SIGSYS_BIT;
    let how = libc::SIG_UNBLOCK as u64;
    // SAFETY: the mask lives until the call returns.
    unsafe { raw(libc::SYS_rt_sigprocmask, [how, (&raw const sigsys).addr() as u64, 0, 8, 0, 0]) };
}
