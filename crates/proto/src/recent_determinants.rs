//! Recent determinants of a process whose relay is on another node, in shared memory that outlives
//! the process.
//!
//! Such a process sends its determinants to its relay over a network, and the last ones are lost if
//! the process is killed. Effects that depend on these determinants (a printed line, an answer of
//! the process manager, a recorded clock) stay. So the process writes each determinant here before
//! it sends the determinant, and the next incarnation on the same node replays the determinants
//! that its relay has not received.
//!
//! What enters: determinants, by number. What leaves: the last [`RECENT_DETERMINANTS_MAX`] of them.
//! A process can be killed between any two instructions, so a determinant counts as soon as the
//! count of determinants includes it.
//!
//! What may never happen: a reader receives a determinant that was not written, or that has another
//! number.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use crate::nondeterminism::{NONDETERMINISM_BYTES, RECORD_HEAD_BYTES};

/// Number of determinants kept, more than can be in flight to a relay: the socket holds
/// [`UPLINK_BUFFER_BYTES_MAX`], and a determinant takes 40 bytes there.
pub const RECENT_DETERMINANTS_MAX: usize = 1 << 16;

/// Bytes that the socket to the relay may hold, as the system counts them (it allows twice the
/// requested size, see socket(7)).
pub const UPLINK_BUFFER_BYTES_MAX: usize = 2 << 20;

/// Bytes of the recent determinants, at the end of the nondeterminism record.
pub const RECENT_DETERMINANTS_BYTES: usize = size_of::<RecentDeterminants>().next_multiple_of(4096);

/// Offset of the recent determinants in the nondeterminism record, in bytes.
pub const RECENT_DETERMINANTS_AT: usize = NONDETERMINISM_BYTES - RECENT_DETERMINANTS_BYTES;

/// Bytes for entries in the nondeterminism record, between its head and the recent determinants.
pub const RECORD_ENTRIES_BYTES: usize = RECENT_DETERMINANTS_AT - RECORD_HEAD_BYTES;

/// Offset of the count of determinants in the nondeterminism record: eight bytes.
pub const DETERMINANT_COUNT_AT: usize =
    RECENT_DETERMINANTS_AT + offset_of!(RecentDeterminants, count);

/// Offset of determinant `number` in the nondeterminism record: three numbers of eight bytes, for
/// polls, frames and microseconds.
pub const fn determinant_at(number: u64) -> usize {
    let entries = RECENT_DETERMINANTS_AT + offset_of!(RecentDeterminants, slots);
    entries + number as usize % RECENT_DETERMINANTS_MAX * size_of::<DeterminantSlot>()
}

const _: () =
    assert!(UPLINK_BUFFER_BYTES_MAX / crate::wire::frame::HEADER_BYTES < RECENT_DETERMINANTS_MAX);

/// Recent determinants of a process: see the module head.
#[repr(C)]
#[derive(Debug)]
pub struct RecentDeterminants {
    /// Number of determinants of the incarnation that got furthest.
    count: AtomicU64,
    slots: [DeterminantSlot; RECENT_DETERMINANTS_MAX],
}

/// Polls, frames and microseconds of one determinant.
#[repr(C)]
#[derive(Debug)]
struct DeterminantSlot([AtomicU64; 3]);

impl RecentDeterminants {
    /// Number of determinants of the incarnation that got furthest.
    pub fn count(&self) -> u64 {
        self.count.load(Acquire)
    }

    /// Writes determinant `number`, counted from 0.
    pub fn note(&self, number: u64, determinant: [u64; 3]) {
        let words = &self.slots[number as usize % RECENT_DETERMINANTS_MAX].0;
        words.iter().zip(determinant).for_each(|(word, value)| word.store(value, Relaxed));
        self.count.store(number + 1, Release);
    }

    /// Determinant `number`, if it was written and is still kept.
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
    fn the_last_ones_are_reported_and_no_others() {
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
