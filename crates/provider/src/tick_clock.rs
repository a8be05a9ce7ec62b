//! A clock for the polls of a waiting loop: nanoseconds a reading, no system call.
//!
//! What enters: nothing. What leaves: ticks of the time-stamp counter, and spans in microseconds.
//! The rate of the counter is measured once for the process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A clock that costs a few nanoseconds: the time-stamp counter where the processor has one.
#[derive(Clone, Copy)]
pub struct Clock {
    pub ticks_per_micro: u64,
}

impl Clock {
    /// Returns the clock. The first call takes 100 microseconds, to measure the counter's rate.
    pub fn get() -> Self {
        const CALIBRATION: Duration = Duration::from_micros(100);
        static TICKS_PER_MICRO: AtomicU64 = AtomicU64::new(0);
        let known = TICKS_PER_MICRO.load(Ordering::Relaxed);
        if known > 0 {
            return Self { ticks_per_micro: known };
        }
        let (start, first) = (Instant::now(), ticks());
        while start.elapsed() < CALIBRATION {
            std::hint::spin_loop();
        }
        let micros = start.elapsed().as_micros().max(1) as u64;
        let found = ((ticks() - first) / micros).max(1);
        TICKS_PER_MICRO.store(found, Ordering::Relaxed);
        Self { ticks_per_micro: found }
    }

    #[inline]
    pub fn now(self) -> u64 {
        ticks()
    }

    /// Nanoseconds since an arbitrary origin, with a resolution of one microsecond.
    #[inline]
    pub fn nanos(self) -> u64 {
        self.now() / self.ticks_per_micro * 1_000
    }

    #[inline]
    pub fn micros(self, ticks: u64) -> u64 {
        // Counters of two processors may differ slightly: a negative span counts as zero.
        if ticks > u64::MAX / 2 { 0 } else { ticks / self.ticks_per_micro }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has this instruction.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}
