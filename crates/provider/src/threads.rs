//! Observes which threads of a recorded process call MPI.
//!
//! The provider records at which poll a message was delivered. The interposer records which clocks
//! and random numbers one thread reads: the thread that begins the program. No record holds the
//! order in which several threads call MPI. So the user is warned at the first call of another
//! thread, and not when the process is killed.
//!
//! In: the thread of each call. Out: warnings, each of them once in a process, and a reason that
//! the message about a difference in a replay names. A program that
//! requests `MPI_THREAD_MULTIPLE` and calls from one thread only gets no warning, and costs
//! nothing. The first call of a thread also makes the thread-local memory of the provider.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use crate::poll_policy::PollPolicy;
use crate::{interposer, log};

/// What a call reveals about the threads of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThreadingProblem {
    /// One thread calls MPI, but the clocks of another thread are recorded.
    OtherThread,
    /// More than one thread calls MPI.
    SeveralThreads,
}

/// The threads that have called so far. The address of its control block identifies a thread.
struct Callers {
    first: AtomicUsize,
    are_several: AtomicBool,
}

static CALLERS: Callers = Callers::new();

impl Callers {
    const fn new() -> Callers {
        Callers { first: AtomicUsize::new(0), are_several: AtomicBool::new(false) }
    }

    /// `is_recorded`: whether clock reads of this thread are recorded, if any clock reads are.
    #[inline]
    fn note(&self, thread: usize, is_recorded: impl FnOnce() -> bool) -> Option<ThreadingProblem> {
        if self.first.load(Relaxed) == thread {
            return None;
        }
        self.note_other(thread, is_recorded)
    }

    #[cold]
    fn note_other(
        &self,
        thread: usize,
        is_recorded: impl FnOnce() -> bool,
    ) -> Option<ThreadingProblem> {
        make_thread_local_memory();
        if self.first.compare_exchange(0, thread, Relaxed, Relaxed).is_ok() {
            return (!is_recorded()).then_some(ThreadingProblem::OtherThread);
        }
        (!self.are_several.swap(true, Relaxed)).then_some(ThreadingProblem::SeveralThreads)
    }

    fn reason(&self) -> &'static str {
        match self.are_several.load(Relaxed) {
            true => {
                "; a second thread calls MPI, and the order of calls of threads is not recorded"
            }
            false => "",
        }
    }
}

/// Makes the thread-local memory of the provider. The dynamic linker takes this memory from the
/// program's heap at a thread's first use, which must be the same call in a replay as before: a
/// program sends what a freed block of its heap holds, in fields that it has never set.
pub fn make_thread_local_memory() {
    PollPolicy::of_this_thread(|_| ());
}

/// Records a call of this thread, in a process that is recorded.
#[inline]
pub fn note_call() {
    if let Some(problem) = CALLERS.note(this_thread(), interposer::is_of_recorded_thread) {
        warn_user(problem);
    }
}

/// A reason to add to the message about a difference in a replay: a second thread has called MPI.
/// Empty if none has.
pub fn reason() -> &'static str {
    CALLERS.reason()
}

#[cold]
fn warn_user(problem: ThreadingProblem) {
    match problem {
        ThreadingProblem::OtherThread => log!(
            Warn,
            "MPI is called by another thread than the one that begins the program: clocks and \
             random numbers that this thread reads are not recorded. If this process is killed and \
             its next incarnation reads others, the difference in what it sends or prints ends the \
             job"
        ),
        ThreadingProblem::SeveralThreads => log!(
            Warn,
            "a second thread calls MPI: the order of calls of several threads is not recorded. If \
             this process is killed and its threads call in another order, the difference in what \
             it sends or prints ends the job"
        ),
    }
}

/// The address of this thread's control block, read without a function call.
#[inline]
fn this_thread() -> usize {
    let pointer: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the first word of a thread's control block holds the address of the block.
    unsafe {
        std::arch::asm!(
            "mov {}, fs:0",
            out(reg) pointer,
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction reads a register.
    unsafe {
        std::arch::asm!(
            "mrs {}, tpidr_el0",
            out(reg) pointer,
            options(nostack, preserves_flags, nomem)
        );
    }
    pointer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_is_as_it_should_be() {
        let callers = Callers::new();
        for _ in 0..3 {
            assert_eq!(callers.note(7, || true), None);
        }
    }

    #[test]
    fn another_thread_and_a_second_one_are_reported_once() {
        let callers = Callers::new();
        assert_eq!(callers.note(7, || false), Some(ThreadingProblem::OtherThread));
        assert_eq!(callers.note(7, || false), None);
        assert_eq!(callers.note(8, || true), Some(ThreadingProblem::SeveralThreads));
        for thread in [7, 8, 9] {
            assert_eq!(callers.note(thread, || true), None);
        }
    }

    #[test]
    fn a_second_thread_is_a_reason_for_a_difference_and_another_one_is_not() {
        let callers = Callers::new();
        callers.note(7, || false);
        assert_eq!(callers.reason(), "");
        callers.note(8, || true);
        assert!(callers.reason().contains("a second thread calls MPI"));
    }

    #[test]
    fn threads_are_distinguished() {
        let here = this_thread();
        assert_eq!(here, this_thread());
        let there = std::thread::spawn(this_thread).join().unwrap();
        assert!(here != there && here != 0);
    }
}
