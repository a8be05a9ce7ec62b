//! A completion counter: successes and errors, counted by the engines and read by the program.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Default)]
pub struct Counter {
    successes: AtomicU64,
    errors: AtomicU64,
}

impl Counter {
    pub fn value(&self) -> u64 {
        self.successes.load(Ordering::Acquire)
    }

    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Acquire)
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
