//! Up to where a log may be used again: released by the agent, or discarded where memory is full.
//!
//! A log is discarded up to what the present incarnation of its reader has. Then neither side can
//! be restarted before its next image. The reader says where an incarnation begins, and then looks
//! for what was discarded; the writer says what it discards, and then looks again where the reader
//! is. So one of both sees the other.
//!
//! What enters: the words of a log in the file. What leaves: a position. What may never happen:
//! what an incarnation reads, or compares, is written over.

use std::cell::Cell;
use std::sync::atomic::{Ordering, fence};

use landbridge_proto::log::layout::{consumed_at, discarded_at, release_at};

use super::log_end::Releases;
use super::window::Mapped;

pub(super) struct PairReleases<'a> {
    pub head: &'a Mapped,
    pub from: usize,
    pub to: usize,
    /// Memory is full.
    pub is_full: bool,
    /// Up to where the process of another node has the log, if it is one.
    pub confirmed: Option<u64>,
    /// Gets the process on the other side of a log that was discarded.
    pub notice: &'a Cell<Option<usize>>,
    pub own: usize,
}

impl PairReleases<'_> {
    fn consumed(&self) -> u64 {
        let word = self.head.word(consumed_at(self.from, self.to) as usize);
        self.confirmed.unwrap_or_else(|| word.load(Ordering::Acquire))
    }
}

impl Releases for PairReleases<'_> {
    fn released(&self) -> u64 {
        self.head.release(release_at(self.from, self.to) as usize, 0)
    }

    #[cold]
    fn discarded(&self) -> u64 {
        let word = self.head.word(discarded_at(self.from, self.to) as usize);
        let (before, consumed) = (word.load(Ordering::Relaxed), self.consumed());
        if !self.is_full || consumed <= before {
            return before;
        }
        word.store(consumed, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.consumed() < consumed {
            // The reader has begun again since.
            word.store(before, Ordering::Release);
            return before;
        }
        self.notice.set(Some(if self.from == self.own { self.to } else { self.from }));
        consumed
    }
}
