//! Memory for a relay's message logs: segments that the relay no longer needs, and segments that a
//! thread prepares.
//!
//! The kernel finds and clears a page when the page is touched first. For a segment this takes
//! longer than filling the segment, and much longer on a virtual machine whose host must find the
//! page as well. So a thread touches some segments ahead. The relay never waits for the thread:
//! without a prepared segment, it allocates memory as usual.
//!
//! Segments that are no longer needed, for example after a checkpoint, are lent to the kernel
//! (`MADV_FREE`): they remain as they are, and cost nothing when they are used again, unless
//! another process is short of memory before that.
//!
//! What may never happen: more than [`PREPARED_SEGMENTS_MAX`] segments, and one in the thread's
//! hands, are prepared without a request; new memory is allocated while a used segment is free.

use std::io;
use std::mem::MaybeUninit;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use landbridge_proto::relay::SEGMENT_BYTES;
use rustix::mm::{Advice, madvise};

/// The most segments that are prepared ahead, in addition to those that the relay holds itself:
/// what a burst of long messages fills before the thread, which prepares 2 to 4 GB/s, must keep up
/// with it.
const PREPARED_SEGMENTS_MAX: usize = 32;

/// The smallest page size of any supported system, in bytes.
const PAGE_BYTES: usize = 4 << 10;

/// The pool of segments: see the module documentation.
pub struct SegmentPool {
    prepared: Receiver<Vec<u8>>,
    returned: Vec<Vec<u8>>,
}

impl SegmentPool {
    /// Starts the thread. It inherits the signal mask of this thread.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn open() -> io::Result<Self> {
        let (sender, prepared) = sync_channel(PREPARED_SEGMENTS_MAX);
        std::thread::Builder::new().name("segments".into()).spawn(move || prepare(&sender))?;
        Ok(Self { prepared, returned: Vec::new() })
    }

    /// An empty segment, if one is ready.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        self.returned.pop().or_else(|| self.prepared.try_recv().ok())
    }

    /// Frees returned segments until those that remain take at most `bytes` bytes.
    pub fn shrink_to(&mut self, bytes: u64) {
        self.returned.truncate((bytes / SEGMENT_BYTES as u64) as usize);
    }

    /// Returns an empty segment to the pool, which is not needed for now.
    pub fn put(&mut self, mut segment: Vec<u8>) {
        segment.clear();
        let (start, bytes) = whole_pages(segment.spare_capacity_mut());
        // SAFETY: only this process uses these pages, and nobody will read their present content.
        let _ = unsafe { madvise(start.cast(), bytes, Advice::LinuxFree) };
        self.returned.push(segment);
    }
}

/// Prepares segments until the pool is dropped.
fn prepare(sender: &SyncSender<Vec<u8>>) {
    loop {
        let mut segment = Vec::with_capacity(SEGMENT_BYTES);
        touch(segment.spare_capacity_mut());
        if sender.send(segment).is_err() {
            return;
        }
    }
}

/// Makes the kernel allocate all pages: with one call, which takes two thirds of the time, or one
/// by one where the kernel does not support this (before Linux 5.14).
fn touch(memory: &mut [MaybeUninit<u8>]) {
    let (start, bytes) = whole_pages(memory);
    // SAFETY: only this process uses these pages, and their content stays as it is.
    let is_done = unsafe { madvise(start.cast(), bytes, Advice::LinuxPopulateWrite) }.is_ok();
    let rest = if is_done { memory.len() - 1 } else { 0 };
    for byte in memory[rest..].iter_mut().step_by(PAGE_BYTES) {
        *byte = MaybeUninit::new(0);
    }
}

/// The part of `memory` that consists of whole pages: its start and its length.
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
