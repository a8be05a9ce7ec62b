//! Memory for what a relay is going to keep: what it does not need any more, and what a thread of its own prepares.
//!
//! The system finds and clears a page when it is touched first. For a segment that takes longer than to fill it, much longer on
//! a virtual machine whose host has to find the page as well, and whoever waits for the relay would wait for that. So a thread
//! prepares some segments ahead. The relay never waits for it: without a spare segment it takes memory as it comes.
//!
//! What it does not need any more, as after an image, is lent to the system: it stays as it is, and costs nothing when it is used
//! again, unless somebody else is short of memory before that.
//!
//! What may never happen: more than [`PREPARED_SEGMENTS_MAX`] segments, and one in its hands, are prepared that nobody has asked for; new memory
//! is taken while there is some that has been in use before.

use std::io;
use std::mem::MaybeUninit;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use landbridge_proto::relay::SEGMENT_BYTES;
use rustix::mm::{Advice, madvise};

/// Segments that are prepared ahead of those that the relay holds itself: what a burst of long messages fills before the
/// thread, which prepares 2 to 4 GB/s, has to keep up with it.
const PREPARED_SEGMENTS_MAX: usize = 32;

/// Pages are not smaller than this anywhere.
const PAGE_BYTES: usize = 4 << 10;

/// See the module head.
pub struct SegmentPool {
    prepared: Receiver<Vec<u8>>,
    returned: Vec<Vec<u8>>,
}

impl SegmentPool {
    /// Starts the thread. What signals are blocked here are blocked in that, too.
    ///
    /// # Errors
    /// If there can be none.
    pub fn open() -> io::Result<Self> {
        let (sender, prepared) = sync_channel(PREPARED_SEGMENTS_MAX);
        std::thread::Builder::new().name("segments".into()).spawn(move || prepare(&sender))?;
        Ok(Self { prepared, returned: Vec::new() })
    }

    /// A segment without content, if one is ready.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        self.returned.pop().or_else(|| self.prepared.try_recv().ok())
    }

    /// What is not needed for now takes no more than this.
    pub fn shrink_to(&mut self, bytes: u64) {
        self.returned.truncate((bytes / SEGMENT_BYTES as u64) as usize);
    }

    /// Takes a segment without content that is not needed for now.
    pub fn put(&mut self, mut segment: Vec<u8>) {
        segment.clear();
        let (start, bytes) = whole_pages(segment.spare_capacity_mut());
        // SAFETY: these pages are ours alone, and nobody will read what is in them now.
        let _ = unsafe { madvise(start.cast(), bytes, Advice::LinuxFree) };
        self.returned.push(segment);
    }
}

/// Until nobody takes them any more.
fn prepare(sender: &SyncSender<Vec<u8>>) {
    loop {
        let mut segment = Vec::with_capacity(SEGMENT_BYTES);
        touch(segment.spare_capacity_mut());
        if sender.send(segment).is_err() {
            return;
        }
    }
}

/// Has the system find its pages: all at once, which takes it two thirds of the time, or one by one where it cannot (before
/// Linux 5.14).
fn touch(memory: &mut [MaybeUninit<u8>]) {
    let (start, bytes) = whole_pages(memory);
    // SAFETY: these pages are ours alone, and their content stays as it is.
    let is_done = unsafe { madvise(start.cast(), bytes, Advice::LinuxPopulateWrite) }.is_ok();
    let rest = if is_done { memory.len() - 1 } else { 0 };
    for byte in memory[rest..].iter_mut().step_by(PAGE_BYTES) {
        *byte = MaybeUninit::new(0);
    }
}

/// The part of `memory` that is whole pages: where it begins, and how long it is.
fn whole_pages(memory: &mut [MaybeUninit<u8>]) -> (*mut MaybeUninit<u8>, usize) {
    let pages = memory.as_mut_ptr_range();
    let start = pages.start.map_addr(|address| address.next_multiple_of(PAGE_BYTES));
    (start, (pages.end.addr() - start.addr()) & !(PAGE_BYTES - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_needed_any_more_is_used_before_anything_new_and_has_its_pages_yet() {
        let mut pool = SegmentPool::open().unwrap();
        let mut segment = pool.prepared.recv().unwrap();
        segment.resize(SEGMENT_BYTES, 7);
        let place = segment.as_ptr();
        pool.put(segment);
        pool.put(Vec::with_capacity(SEGMENT_BYTES));
        pool.shrink_to(2 * SEGMENT_BYTES as u64 - 1);
        assert_eq!(pool.returned.len(), 1);
        let mut again = pool.take().unwrap();
        assert!(again.is_empty() && again.as_ptr() == place && pool.returned.is_empty());
        again.extend_from_slice(&[3; SEGMENT_BYTES]);
        assert!(again.iter().all(|byte| *byte == 3), "what is written behind that stays");
    }

    #[test]
    fn segments_come_empty_and_no_more_than_a_few_are_prepared() {
        let mut pool = SegmentPool::open().unwrap();
        for _ in 0..10 * PREPARED_SEGMENTS_MAX {
            let segment = pool.prepared.recv().unwrap();
            assert!(segment.is_empty() && segment.capacity() >= SEGMENT_BYTES);
        }
        let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let mut taken = Vec::new();
        while taken.len() < PREPARED_SEGMENTS_MAX && std::time::Instant::now() < until {
            taken.extend(pool.take());
        }
        assert_eq!(taken.len(), PREPARED_SEGMENTS_MAX);
    }
}
