//! The library that records what the program reads of clocks and chance (`crates/clocks`), where it is loaded.
//!
//! It keeps how often the program has looked for messages, in memory that outlives this process: whoever looked without
//! finding anything does so again, however much there is by then. Otherwise it would go another way than before, and
//! read other clocks. (What this library reads itself it does not record: our time is not the program's.)

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use landbridge_proto::clocks::Polls;

use crate::param;

/// What the library has kept, if this process is recorded.
static KEPT: OnceLock<Kept> = OnceLock::new();

struct Kept {
    polls: &'static Polls,
    /// Of whichever start came furthest before this one.
    before: u64,
}

type Find = unsafe extern "C" fn() -> *const Polls;

/// The library's function, if it is loaded.
fn library() -> Option<Find> {
    // SAFETY: a lookup.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"landbridge_clocks_polls".as_ptr()) };
    // SAFETY: the function is that library's, of this type.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Find>(found) })
}

/// Called once, before anything else of the provider runs.
pub fn join() {
    let Some(find) = library() else { return };
    // SAFETY: it gives null or a place that stays.
    if let Some(polls) = unsafe { find().as_ref() } {
        let _ = KEPT.set(Kept { polls, before: polls.furthest.load(Relaxed) });
    }
}

/// Why nothing is recorded of what this process reads, if it should be.
pub fn lack() -> Option<&'static str> {
    let is_on = param::RECOVER_CLOCKS.is_on() == Ok(true);
    if KEPT.get().is_some() || !is_on || param::INCARNATION.text().is_none() {
        return None;
    }
    // The agent says where the record is; the library takes that away from whoever has none.
    let is_told = std::env::var_os("LANDBRIDGE_CLOCKS").is_some();
    Some(match (library().is_some(), is_told) {
        (true, _) => {
            "this is not the process that the launcher has started, but a child of it (a script should end with `exec`)"
        }
        (false, true) => {
            "their library is not loaded here: something on the way has set LD_PRELOAD anew"
        }
        (false, false) => {
            "this is not the process that the launcher has started, or its environment was emptied on the way"
        }
    })
}

/// The program looks for messages. Whether an earlier start of it has done so.
#[inline]
pub fn count_poll() -> bool {
    KEPT.get().is_some_and(Kept::count)
}

/// Whether an earlier start has looked more often than this one has so far.
#[inline]
pub fn is_behind() -> bool {
    KEPT.get().is_some_and(|kept| kept.polls.present.load(Relaxed) < kept.before)
}

impl Kept {
    fn count(&self) -> bool {
        let polls = self.polls.present.load(Relaxed) + 1;
        self.polls.present.store(polls, Relaxed);
        if polls <= self.before {
            return true;
        }
        self.polls.furthest.store(polls, Relaxed);
        false
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn polls_of_earlier_starts_come_first() {
        static POLLS: Polls = Polls { furthest: AtomicU64::new(2), present: AtomicU64::new(0) };
        let kept = Kept { polls: &POLLS, before: 2 };
        assert!(kept.count() && kept.count());
        assert_eq!(POLLS.furthest.load(Relaxed), 2);
        assert!(!kept.count());
        assert_eq!((POLLS.furthest.load(Relaxed), POLLS.present.load(Relaxed)), (3, 3));
    }
}
