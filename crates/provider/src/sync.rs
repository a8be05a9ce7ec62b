//! The provider's lock: a word that a waiting thread polls, first spinning and then yielding.
//!
//! The lock is nearly always free, because MPI libraries serialise their calls. So taking the lock
//! is one exchange, and releasing it is one store. Waiting for the lock never sleeps in the kernel
//! and never allocates.
//!
//! The holder of a lock may sleep for another reason ([`Sleep`]); a thread that wants the lock
//! wakes the holder.

mod wakeup_gate;

use std::cell::UnsafeCell;
use std::hint;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use wakeup_gate::WakeupGate;

/// Rounds of spinning before a waiting thread yields: about a microsecond. Yielding lets a holder
/// run that was descheduled, where there are more threads than cores.
const SPINS_BEFORE_YIELD: u32 = 64;

/// The lock without a value.
pub struct RawSpinLock {
    held: AtomicBool,
}

impl RawSpinLock {
    pub const fn new() -> Self {
        RawSpinLock { held: AtomicBool::new(false) }
    }

    #[inline]
    pub fn try_lock(&self) -> bool {
        self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    pub fn lock(&self) {
        if !self.try_lock() {
            self.lock_contended();
        }
    }

    #[cold]
    fn lock_contended(&self) {
        let _waiting = Waiting::begin();
        let mut spins = 0;
        loop {
            while self.held.load(Ordering::Relaxed) {
                spins += 1;
                if spins < SPINS_BEFORE_YIELD {
                    hint::spin_loop()
                } else {
                    std::thread::yield_now()
                }
            }
            if self.try_lock() {
                return;
            }
        }
    }

    /// # Safety
    /// The caller holds the lock.
    #[inline]
    pub unsafe fn unlock(&self) {
        self.held.store(false, Ordering::Release);
    }
}

static GATE: WakeupGate<AtomicU32> = WakeupGate::new(AtomicU32::new(0), AtomicU32::new(0));
/// The eventfd that wakes sleeping threads. The eventfd is only written, never read.
static WAKEUP_FD: OnceLock<Option<OwnedFd>> = OnceLock::new();

/// A thread waits for a lock, whose holder is awake or has been woken.
struct Waiting;

impl Waiting {
    fn begin() -> Self {
        if GATE.begin_wait() {
            Sleep::ring();
        }
        Waiting
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        GATE.end_wait();
    }
}

/// A sleep of a thread that may hold locks. The sleep must end when [`Sleep::wakeup_fd`] becomes
/// readable.
pub struct Sleep;

impl Sleep {
    /// Returns `None` if a thread waits for a lock: the caller must not sleep.
    pub fn begin() -> Option<Self> {
        let may_sleep = GATE.begin_sleep();
        let sleep = Sleep;
        may_sleep.then_some(sleep)
    }

    /// Wakes the next sleeping thread if a thread still waits, since the eventfd wakes one sleeper
    /// only.
    pub fn pass_wakeup_on() {
        if GATE.must_wake_another() {
            Self::ring();
        }
    }

    fn ring() {
        if let Some(bell) = Self::wakeup_fd() {
            let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
        }
    }

    /// Whether a thread waits for a lock now.
    pub fn is_contended() -> bool {
        GATE.is_contended()
    }

    /// The eventfd that becomes readable, edge-triggered, each time that sleeping threads have to
    /// wake. `None`: no descriptor was available.
    pub fn wakeup_fd() -> Option<BorrowedFd<'static>> {
        use rustix::event::{EventfdFlags, eventfd};
        let open = || {
            let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
            // Numbers from 512 on do not change the numbers that programs see.
            Some(rustix::io::fcntl_dupfd_cloexec(&fd, 512).unwrap_or(fd))
        };
        WAKEUP_FD.get_or_init(open).as_ref().map(AsFd::as_fd)
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        GATE.end_sleep();
    }
}

impl Default for RawSpinLock {
    fn default() -> Self {
        RawSpinLock::new()
    }
}

pub struct SpinLock<T> {
    raw: RawSpinLock,
    value: UnsafeCell<T>,
}

// SAFETY: only a guard reaches the value, and there is one guard at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}
// SAFETY: moving the lock moves the value.
unsafe impl<T: Send> Send for SpinLock<T> {}

impl<T> SpinLock<T> {
    pub const fn new(value: T) -> Self {
        SpinLock { raw: RawSpinLock::new(), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
        self.raw.try_lock().then(|| SpinGuard { lock: self })
    }

    #[inline]
    pub fn lock(&self) -> SpinGuard<'_, T> {
        self.raw.lock();
        SpinGuard { lock: self }
    }
}

impl<T: Default> Default for SpinLock<T> {
    fn default() -> Self {
        SpinLock::new(T::default())
    }
}

pub struct SpinGuard<'a, T> {
    lock: &'a SpinLock<T>,
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard exists, so this thread holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread holds the lock, and `&mut self` makes the borrow unique.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the guard proves that this thread holds the lock.
        unsafe { self.lock.raw.unlock() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_holder_at_a_time() {
        const ROUNDS: usize = 10_000;
        let counter = SpinLock::new(0usize);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..ROUNDS).for_each(|_| *counter.lock() += 1));
            }
        });
        assert_eq!(*counter.lock(), 4 * ROUNDS);
    }

    #[test]
    fn a_held_lock_is_refused() {
        let lock = SpinLock::new(());
        let guard = lock.lock();
        assert!(lock.try_lock().is_none());
        drop(guard);
        assert!(lock.try_lock().is_some());
    }
}
