//! A thread that sends what engines have gathered, if the program does not poll soon.
//!
//! A program that has posted messages may compute for seconds before its next MPI call. What it
//! believes sent must not wait so long. In: a note that something waits, from a thread that leaves
//! the provider. Out: calls of a function that sends it. The thread starts at the first note, looks
//! again every [`PERIOD`] while there are notes, and sleeps in the kernel otherwise; a note costs a
//! system call only while it sleeps.
//!
//! What may never happen: the thread sleeps although something waits; the thread waits for a lock
//! that a program's thread holds; a signal of the program is handled in this thread.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use rustix::thread::futex;

/// Longest time that something waits, if the program does not poll: a multiple of what a program
/// needs between two posts, and a fraction of what programs compute between two MPI calls.
const PERIOD: Duration = Duration::from_micros(200);
/// Periods without a note after which the thread sleeps.
const IDLE_PERIODS_MAX: u32 = 16;
/// Bytes of the thread's stack.
const STACK_BYTES: usize = 128 << 10;

/// States of the thread. A note wakes a thread that is [`ASLEEP`].
static STATE: AtomicU32 = AtomicU32::new(ABSENT);
const ABSENT: u32 = 0;
const AWAKE: u32 = 1;
const ASLEEP: u32 = 2;
/// There can be no thread: whoever leaves something has to send it at once.
const IMPOSSIBLE: u32 = 3;

/// Something waits.
static IS_OWED: AtomicBool = AtomicBool::new(false);

/// Notes that something waits, which `send` sends; `send` returns whether something may be left.
/// False: no thread can be started, and the caller must send at once.
#[inline]
pub fn note(send: fn() -> bool) -> bool {
    IS_OWED.store(true, SeqCst);
    STATE.load(SeqCst) == AWAKE || wake(send)
}

#[cold]
fn wake(send: fn() -> bool) -> bool {
    if STATE.compare_exchange(ASLEEP, AWAKE, SeqCst, SeqCst).is_ok() {
        // Only a word that is no futex could make this fail.
        let _ = futex::wake(&STATE, futex::Flags::PRIVATE, 1);
        return true;
    }
    if STATE.compare_exchange(ABSENT, AWAKE, SeqCst, SeqCst).is_ok() && !start(send) {
        STATE.store(IMPOSSIBLE, SeqCst);
    }
    STATE.load(SeqCst) != IMPOSSIBLE
}

/// Starts the thread with all signals blocked: they are the program's.
fn start(send: fn() -> bool) -> bool {
    let thread = std::thread::Builder::new().name("landbridge".into()).stack_size(STACK_BYTES);
    // SAFETY: both sets are local, and the calls fill them.
    unsafe {
        let (mut all, mut before) = std::mem::zeroed::<(libc::sigset_t, libc::sigset_t)>();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before);
        let is_started = thread.spawn(move || run(send)).is_ok();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        is_started
    }
}

fn run(send: fn() -> bool) -> ! {
    let mut idle_periods = 0;
    loop {
        std::thread::sleep(PERIOD);
        if IS_OWED.swap(false, SeqCst) {
            idle_periods = 0;
            if send() {
                IS_OWED.store(true, SeqCst);
            }
            continue;
        }
        idle_periods += 1;
        if idle_periods == IDLE_PERIODS_MAX {
            idle_periods = 0;
            sleep_until_noted();
        }
    }
}

/// Sleeps until the next note. A note between the last look and the sleep either finds the thread
/// asleep and wakes it, or is seen here.
fn sleep_until_noted() {
    STATE.store(ASLEEP, SeqCst);
    while STATE.load(SeqCst) == ASLEEP {
        if IS_OWED.load(SeqCst) {
            STATE.store(AWAKE, SeqCst);
            return;
        }
        let _ = futex::wait(&STATE, futex::Flags::PRIVATE, ASLEEP, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::time::Instant;

    static CALLS: AtomicUsize = AtomicUsize::new(0);

    fn send() -> bool {
        CALLS.fetch_add(1, SeqCst);
        false
    }

    fn wait_for_calls(wanted: usize) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while CALLS.load(SeqCst) < wanted && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(100));
        }
        assert_eq!(CALLS.load(SeqCst), wanted);
    }

    #[test]
    fn each_note_is_followed_by_a_look_also_when_the_thread_has_slept() {
        for round in 1..=3 {
            assert!(note(send));
            wait_for_calls(round);
            let deadline = Instant::now() + Duration::from_secs(10);
            while STATE.load(SeqCst) != ASLEEP && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(STATE.load(SeqCst), ASLEEP, "there is nothing to do");
            assert_eq!(CALLS.load(SeqCst), round, "nothing was noted since");
        }
    }
}
