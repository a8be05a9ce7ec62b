//! The library that records what the program reads of clocks and chance (`crates/clocks`), where it is loaded.
//!
//! It keeps how often the program has looked for messages, in memory that outlives this process: whoever looked without
//! finding anything does so again, however much there is by then. Otherwise it would go another way than before, and
//! read other clocks. (What this library reads itself it does not record: our time is not the program's.)

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What the library has kept, if this process is recorded.
static KEPT: OnceLock<Kept> = OnceLock::new();

struct Kept {
    /// Polls of whichever start came furthest;
    furthest: &'static AtomicU64,
    /// and of those before this one.
    before: u64,
    /// Of this start.
    polls: AtomicU64,
}

/// Called once, before anything else of the provider runs.
pub fn join() {
    type Polls = unsafe extern "C" fn() -> *const AtomicU64;
    // SAFETY: a lookup.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"landbridge_clocks_polls".as_ptr()) };
    if found.is_null() {
        return;
    }
    // SAFETY: the function is that library's, of this type; it gives null or a place that stays.
    let kept = unsafe { std::mem::transmute::<*mut c_void, Polls>(found)().as_ref() };
    if let Some(furthest) = kept {
        let before = furthest.load(Relaxed);
        let _ = KEPT.set(Kept { furthest, before, polls: AtomicU64::new(0) });
    }
}

/// The program looks for messages. Whether an earlier start of it has done so.
#[inline]
pub fn count_poll() -> bool {
    KEPT.get().is_some_and(Kept::count)
}

/// Whether an earlier start has looked more often than this one has so far.
#[inline]
pub fn is_behind() -> bool {
    KEPT.get().is_some_and(|kept| kept.polls.load(Relaxed) < kept.before)
}

impl Kept {
    fn count(&self) -> bool {
        let polls = self.polls.load(Relaxed) + 1;
        self.polls.store(polls, Relaxed);
        if polls <= self.before {
            return true;
        }
        self.furthest.store(polls, Relaxed);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_of_earlier_starts_come_first() {
        static FURTHEST: AtomicU64 = AtomicU64::new(2);
        let kept = Kept { furthest: &FURTHEST, before: 2, polls: AtomicU64::new(0) };
        assert!(kept.count() && kept.count());
        assert_eq!(FURTHEST.load(Relaxed), 2);
        assert!(!kept.count());
        assert_eq!(FURTHEST.load(Relaxed), 3);
    }
}
