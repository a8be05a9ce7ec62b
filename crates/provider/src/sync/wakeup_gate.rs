//! How threads that wait for a lock and threads that sleep while they hold one find each other.
//!
//! In: threads that begin to wait or to sleep. Out: whether a sleeper must be woken, and whether a
//! thread may sleep. What may never happen: a thread sleeps for ever while another one waits for
//! its lock.

use std::sync::atomic::{AtomicU32, Ordering, fence};

/// A number of threads.
pub trait ThreadCount {
    fn add_one(&self);
    fn remove_one(&self);
    fn is_zero(&self) -> bool;
    /// A sequentially consistent fence.
    fn fence();
}

/// The threads of this process that wait for a lock of any object, and those that sleep and may
/// hold a lock.
pub struct WakeupGate<C> {
    waiting: C,
    asleep: C,
}

impl<C: ThreadCount> WakeupGate<C> {
    pub const fn new(waiting: C, asleep: C) -> Self {
        WakeupGate { waiting, asleep }
    }

    /// Notes that a thread waits for a lock. True: a thread sleeps, and must be woken.
    pub fn begin_wait(&self) -> bool {
        self.waiting.add_one();
        // Pairs with the fence in `begin_sleep`: either this thread sees the sleeper, or the
        // sleeper sees this waiting thread.
        C::fence();
        !self.asleep.is_zero()
    }

    pub fn end_wait(&self) {
        self.waiting.remove_one();
    }

    /// Notes that a thread sleeps. False: a thread waits for a lock, and the caller must not sleep.
    /// In either case the caller calls [`Self::end_sleep`].
    pub fn begin_sleep(&self) -> bool {
        self.asleep.add_one();
        C::fence();
        self.waiting.is_zero()
    }

    pub fn end_sleep(&self) {
        self.asleep.remove_one();
    }

    /// Whether a thread waits for a lock now.
    pub fn is_contended(&self) -> bool {
        !self.waiting.is_zero()
    }

    /// Whether a thread sleeps although another one waits.
    pub fn must_wake_another(&self) -> bool {
        self.is_contended() && !self.asleep.is_zero()
    }
}

impl ThreadCount for AtomicU32 {
    fn add_one(&self) {
        self.fetch_add(1, Ordering::Relaxed);
    }

    fn remove_one(&self) {
        self.fetch_sub(1, Ordering::Relaxed);
    }

    fn is_zero(&self) -> bool {
        self.load(Ordering::Relaxed) == 0
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// A thread that holds a lock and sleeps, and one that waits for the lock, in every order of their
/// steps that the memory model allows.
#[cfg(test)]
mod tests {
    use loom::sync::atomic::{AtomicBool, AtomicU32 as ModelCount, fence as model_fence};
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    use super::*;

    struct Fenced(ModelCount);
    struct Unfenced(ModelCount);

    impl ThreadCount for Fenced {
        fn add_one(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn remove_one(&self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }

        fn is_zero(&self) -> bool {
            self.0.load(Ordering::Relaxed) == 0
        }

        fn fence() {
            model_fence(Ordering::SeqCst);
        }
    }

    impl ThreadCount for Unfenced {
        fn add_one(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn remove_one(&self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }

        fn is_zero(&self) -> bool {
            self.0.load(Ordering::Relaxed) == 0
        }

        fn fence() {}
    }

    /// The lock, the gate and the bell of one process.
    struct Process<C> {
        gate: WakeupGate<C>,
        is_held: AtomicBool,
        has_rung: Mutex<bool>,
        condition: Condvar,
    }

    impl<C: ThreadCount> Process<C> {
        fn sleep_and_release(&self) {
            if self.gate.begin_sleep() {
                let mut has_rung = self.has_rung.lock().unwrap();
                while !*has_rung {
                    has_rung = self.condition.wait(has_rung).unwrap();
                }
            }
            self.gate.end_sleep();
            self.is_held.store(false, Ordering::Release);
        }

        fn wait(&self) {
            if self.gate.begin_wait() {
                *self.has_rung.lock().unwrap() = true;
                self.condition.notify_one();
            }
            while self.is_held.load(Ordering::Acquire) {
                thread::yield_now();
            }
            self.gate.end_wait();
        }
    }

    fn every_order<C: ThreadCount + Send + Sync + 'static>(count: fn(ModelCount) -> C) {
        loom::model(move || {
            let counts = || count(ModelCount::new(0));
            let process = Arc::new(Process {
                gate: WakeupGate::new(counts(), counts()),
                is_held: AtomicBool::new(true),
                has_rung: Mutex::new(false),
                condition: Condvar::new(),
            });
            let holder = process.clone();
            let other = thread::spawn(move || holder.sleep_and_release());
            process.wait();
            other.join().unwrap();
        });
    }

    #[test]
    fn a_holder_that_sleeps_is_woken_by_a_waiting_thread() {
        every_order(Fenced);
    }

    /// The waiting thread looks at the lock for ever.
    #[test]
    #[should_panic(expected = "maximum number of branches")]
    fn without_the_fences_a_wake_up_is_lost() {
        every_order(Unfenced);
    }
}
