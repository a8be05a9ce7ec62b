//! The last determinants of a process whose relay is on another node, in memory that outlives the process.
//!
//! What such a process tells its relay goes over a network, and the end of that is lost if the process is killed. What followed
//! from it (a line that was printed, an answer of the process manager, a clock that was read) is not. So each determinant is written
//! here before it is sent, and a new start on the same node does again what its relay has not heard of.
//!
//! In: determinants, by their number. Out: the last [`RECENT_DETERMINANTS_MAX`] of them. A process can be killed between any two instructions, so
//! a determinant counts from when the number of them says so.
//!
//! What may never happen: something is told that was not written, or of another number.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use crate::nondeterminism::{NONDETERMINISM_BYTES, RECORD_HEAD_BYTES};

/// More than can be under way to a relay: the socket holds [`UPLINK_BUFFER_BYTES_MAX`], and a determinant takes 40 bytes there.
pub const RECENT_DETERMINANTS_MAX: usize = 1 << 16;

/// What the socket to the relay may hold, as the system counts it (it gives twice of what it is asked for).
pub const UPLINK_BUFFER_BYTES_MAX: usize = 2 << 20;

/// Room for them, at the end of the record of clocks.
pub const RECENT_DETERMINANTS_BYTES: usize = size_of::<RecentDeterminants>().next_multiple_of(4096);

/// Where in that record they lie.
pub const RECENT_DETERMINANTS_AT: usize = NONDETERMINISM_BYTES - RECENT_DETERMINANTS_BYTES;

/// Room for entries in that record, between its head and these.
pub const RECORD_ENTRIES_BYTES: usize = RECENT_DETERMINANTS_AT - RECORD_HEAD_BYTES;

/// Where in that record stands, as eight bytes, how many determinants there have been.
pub const DETERMINANT_COUNT_AT: usize =
    RECENT_DETERMINANTS_AT + offset_of!(RecentDeterminants, count);

/// Where in that record the determinant of this number lies: three numbers of eight bytes, polls, frames and time.
pub const fn determinant_at(number: u64) -> usize {
    let entries = RECENT_DETERMINANTS_AT + offset_of!(RecentDeterminants, slots);
    entries + number as usize % RECENT_DETERMINANTS_MAX * size_of::<DeterminantSlot>()
}

const _: () =
    assert!(UPLINK_BUFFER_BYTES_MAX / crate::wire::frame::HEADER_BYTES < RECENT_DETERMINANTS_MAX);

/// See the module head.
#[repr(C)]
#[derive(Debug)]
pub struct RecentDeterminants {
    /// Determinants of whichever start came furthest.
    count: AtomicU64,
    slots: [DeterminantSlot; RECENT_DETERMINANTS_MAX],
}

/// Polls, frames and time of one determinant.
#[repr(C)]
#[derive(Debug)]
struct DeterminantSlot([AtomicU64; 3]);

impl RecentDeterminants {
    /// Determinants of whichever start came furthest.
    pub fn count(&self) -> u64 {
        self.count.load(Acquire)
    }

    /// The determinant of this number, counted from 0, is made.
    pub fn note(&self, number: u64, determinant: [u64; 3]) {
        let words = &self.slots[number as usize % RECENT_DETERMINANTS_MAX].0;
        words.iter().zip(determinant).for_each(|(word, value)| word.store(value, Relaxed));
        self.count.store(number + 1, Release);
    }

    /// The determinant of this number, if it was made and is still there.
    pub fn get(&self, number: u64) -> Option<[u64; 3]> {
        let count = self.count();
        let is_there = number < count && count - number <= RECENT_DETERMINANTS_MAX as u64;
        let words = &self.slots[number as usize % RECENT_DETERMINANTS_MAX].0;
        is_there.then(|| core::array::from_fn(|at| words[at].load(Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec::Vec;

    use super::*;

    fn empty() -> Box<RecentDeterminants> {
        let entry = |_| DeterminantSlot([0, 0, 0].map(AtomicU64::new));
        let slots: Vec<DeterminantSlot> = (0..RECENT_DETERMINANTS_MAX).map(entry).collect();
        let slots: Box<[DeterminantSlot; RECENT_DETERMINANTS_MAX]> = slots.try_into().unwrap();
        Box::new(RecentDeterminants { count: AtomicU64::new(0), slots: *slots })
    }

    #[test]
    fn the_last_ones_are_told_and_no_others() {
        let recent = empty();
        assert_eq!((recent.count(), recent.get(0)), (0, None));
        for number in 0..RECENT_DETERMINANTS_MAX as u64 + 2 {
            recent.note(number, [number + 1, 2, number]);
        }
        let count = recent.count();
        assert_eq!(count, RECENT_DETERMINANTS_MAX as u64 + 2);
        assert_eq!(recent.get(1), None, "another one has its place");
        assert_eq!(recent.get(2), Some([3, 2, 2]));
        assert_eq!(recent.get(count - 1), Some([count, 2, count - 1]));
        assert_eq!(recent.get(count), None);
    }
}
