//! System calls that may block for long, made with the program's signal mask.
//!
//! The handler of dispatched calls runs with every signal blocked. A call that waits there for
//! another process (a lock, a full pipe) must let signals in, as it does without the interposer: a
//! handler of the program interrupts the wait (EINTR), and a signal without a handler ends the
//! process.
//!
//! In: the program's mask at the present recorded call, from `trap`. Out: the call's result.
//!
//! What may never happen: a handler of the program runs while this thread uses the record. The
//! handler may leave the call by `siglongjmp`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::kernel_calls::{error, kernel};

const SIGSYS_BIT: u64 = 1 << (libc::SIGSYS - 1);

/// The program's signal mask at the present recorded call.
static PROGRAM_MASK: AtomicU64 = AtomicU64::new(!0);
/// Mask within the handler of dispatched calls.
const EVERY_SIGNAL: u64 = !0;
/// Highest signal number of Linux.
const SIGNALS: u32 = u64::BITS;

/// Notes the program's mask at a recorded call, which never contains SIGSYS.
pub fn note_program_mask(mask: u64) {
    PROGRAM_MASK.store(mask, Relaxed);
}

/// Makes a call that may block, with the program's signal mask. A signal that has arrived since the
/// program made the call, and whose handler interrupts calls, interrupts this call as well.
///
/// The caller holds no guard of the record ([`crate::record_lock::RecordGuard::while_released`]).
pub fn interruptible(perform: impl FnOnce() -> i64) -> i64 {
    let mask = PROGRAM_MASK.load(Relaxed);
    let is_interrupted = interrupts(pending() & !mask);
    set_mask(mask);
    let result = if is_interrupted { error(libc::EINTR) } else { perform() };
    set_mask(EVERY_SIGNAL);
    result
}

/// Whether one of these signals has a handler that interrupts calls (no SA_RESTART).
fn interrupts(signals: u64) -> bool {
    let of_set = |signal: &u32| signals >> (signal - 1) & 1 == 1;
    (1..=SIGNALS).filter(of_set).any(has_interrupting_handler)
}

fn has_interrupting_handler(signal: u32) -> bool {
    // `struct sigaction` of the system call: handler, flags, restorer, mask.
    let mut action = [0_u64; 4];
    let place = (&raw mut action).addr() as u64;
    kernel(libc::SYS_rt_sigaction, [u64::from(signal), 0, place, 8, 0, 0]);
    let [handler, flags, ..] = action;
    let is_handled = ![libc::SIG_DFL as u64, libc::SIG_IGN as u64].contains(&handler);
    is_handled && flags & libc::SA_RESTART as u64 == 0
}

/// Blocks every signal in this thread, but that of dispatched calls. Returns the mask of before.
pub fn block_all() -> u64 {
    let (all, mut before) = (EVERY_SIGNAL & !SIGSYS_BIT, 0_u64);
    let (how, place) = (libc::SIG_SETMASK as u64, (&raw const all).addr() as u64);
    kernel(libc::SYS_rt_sigprocmask, [how, place, (&raw mut before).addr() as u64, 8, 0, 0]);
    before
}

/// Sets the mask that [`block_all`] has returned.
pub fn unblock(mask: u64) {
    set_mask(mask);
}

fn pending() -> u64 {
    let mut signals = 0_u64;
    kernel(libc::SYS_rt_sigpending, [(&raw mut signals).addr() as u64, 8, 0, 0, 0, 0]);
    signals
}

fn set_mask(mask: u64) {
    let (how, place) = (libc::SIG_SETMASK as u64, (&raw const mask).addr() as u64);
    kernel(libc::SYS_rt_sigprocmask, [how, place, 0, 8, 0, 0]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_interrupted_and_the_mask_is_whole_again_afterwards() {
        extern "C" fn nothing(_: libc::c_int) {}
        let thread = std::thread::spawn(|| {
            // SAFETY: structures for which all zeros are a valid value, and a handler.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = nothing as *const () as usize;
                assert_eq!(libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut()), 0);
            }
            set_mask(EVERY_SIGNAL);
            note_program_mask(!(1 << (libc::SIGUSR2 - 1)));
            let (process, own) =
                (kernel(libc::SYS_getpid, [0; 6]), kernel(libc::SYS_gettid, [0; 6]));
            let other = std::thread::spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(50));
                let signal = libc::SIGUSR2 as u64;
                kernel(libc::SYS_tgkill, [process as u64, own as u64, signal, 0, 0, 0]);
            });
            let long = libc::timespec { tv_sec: 60, tv_nsec: 0 };
            let long = (&raw const long).addr() as u64;
            let wait = || kernel(libc::SYS_nanosleep, [long, 0, 0, 0, 0, 0]);
            assert_eq!(interruptible(wait), error(libc::EINTR));
            other.join().unwrap();
            let mut mask = 0_u64;
            kernel(libc::SYS_rt_sigprocmask, [0, 0, (&raw mut mask).addr() as u64, 8, 0, 0]);
            let never_blocked = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
            assert_eq!(mask | never_blocked, EVERY_SIGNAL);
        });
        thread.join().unwrap();
    }
}
