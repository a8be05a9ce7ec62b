//! A completion counter: successes and errors, counted by the engines and read by the program.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::engine_set::EngineSet;

#[derive(Default)]
pub struct Counter {
    successes: AtomicU64,
    errors: AtomicU64,
    /// The counter counts more than one-sided operations of this process.
    counts_messages: AtomicBool,
    pub engines: EngineSet,
}

impl Counter {
    pub fn value(&self) -> u64 {
        self.successes.load(Ordering::Acquire)
    }

    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Acquire)
    }

    /// Declares that the counter counts messages, or remote operations of peers on this process's
    /// memory.
    pub fn set_counts_messages(&self) {
        self.counts_messages.store(true, Ordering::Relaxed);
    }

    /// Makes progress for a program that reads the counter.
    #[inline]
    pub fn progress(&self) {
        if self.counts_messages.load(Ordering::Relaxed) {
            self.engines.progress();
        } else {
            self.engines.progress_for_counter();
        }
    }

    #[inline]
    pub fn add(&self, count: u64) {
        self.successes.fetch_add(count, Ordering::Release);
    }

    #[inline]
    pub fn add_errors(&self, count: u64) {
        self.errors.fetch_add(count, Ordering::Release);
    }

    pub fn set(&self, value: u64) {
        self.successes.store(value, Ordering::Release);
    }

    pub fn set_errors(&self, value: u64) {
        self.errors.store(value, Ordering::Release);
    }
}
