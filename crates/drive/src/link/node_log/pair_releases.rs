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

use landbridge_proto::log::layout::{
    NO_IMAGES_AT, UNIT_KEEPS_AT, consumed_at, discarded_at, release_at,
};
use landbridge_proto::log::memory_share::MemoryShare;
use landbridge_proto::log::next_segment::{Demand, Releases};

use super::window::Mapped;

/// The words of a log in the file: of its reader, and of its writer.
pub trait PairWords {
    /// Up to where the reader's incarnation has the log.
    fn load_consumed(&self) -> u64;
    /// The reader's incarnation has the log up to there.
    fn store_consumed(&self, position: u64);
    /// Up to where the writer has discarded the log.
    fn load_discarded(&self) -> u64;
    /// The writer discards the log up to there.
    fn store_discarded(&self, position: u64);
    /// A sequentially consistent fence.
    fn fence(&self);
}

/// An incarnation of the reader begins at this position; returns whether all behind it is kept.
pub fn begin_reading(words: &impl PairWords, position: u64) -> bool {
    words.store_consumed(position);
    words.fence();
    words.load_discarded() <= position
}

/// The writer, which has discarded the log up to `before`, discards it up to `wanted`, which the
/// reader has; returns whether it has: not if the reader has begun again.
pub fn discard(words: &impl PairWords, before: u64, wanted: u64) -> bool {
    words.store_discarded(wanted);
    words.fence();
    let is_reader_behind = words.load_consumed() < wanted;
    if is_reader_behind {
        words.store_discarded(before);
    }
    !is_reader_behind
}

/// The words of the log of one process to another.
pub(super) struct FileWords<'a> {
    pub head: &'a Mapped,
    pub from: usize,
    pub to: usize,
    /// Up to where the process of another node has the log, if the reader is one.
    pub confirmed: Option<u64>,
}

/// Up to where the log of one process to another is needed no more. `is_in_unit`: both are of the
/// node's recovery unit ([`landbridge_proto::log::unit`]), so they need only what was not read, but
/// while images of the unit are taken.
pub(super) fn released(head: &Mapped, (from, to): (usize, usize), is_in_unit: bool) -> u64 {
    let released = head.release(release_at(from, to) as usize, 0);
    let keeps = || head.word(UNIT_KEEPS_AT as usize).load(Ordering::Acquire) != 0;
    if !is_in_unit || keeps() {
        return released;
    }
    released.max(head.word(consumed_at(from, to) as usize).load(Ordering::Acquire))
}

impl PairWords for FileWords<'_> {
    fn load_consumed(&self) -> u64 {
        let word = self.head.word(consumed_at(self.from, self.to) as usize);
        self.confirmed.unwrap_or_else(|| word.load(Ordering::Acquire))
    }

    fn store_consumed(&self, position: u64) {
        let word = self.head.word(consumed_at(self.from, self.to) as usize);
        word.store(position, Ordering::Release);
    }

    fn load_discarded(&self) -> u64 {
        self.head.word(discarded_at(self.from, self.to) as usize).load(Ordering::Acquire)
    }

    fn store_discarded(&self, position: u64) {
        let word = self.head.word(discarded_at(self.from, self.to) as usize);
        word.store(position, Ordering::Release);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

pub(super) struct PairReleases<'a> {
    pub words: FileWords<'a>,
    pub is_in_unit: bool,
    pub memory: MemoryShare,
    /// Gets the process on the other side of a log that was discarded.
    pub notice: &'a Cell<Option<usize>>,
    pub own: usize,
}

impl PairReleases<'_> {
    /// What decides where the log goes on for a frame of this many bytes.
    #[cold]
    pub fn demand(&self, bytes: usize, has_disk: bool) -> Demand {
        let has_no_images = self.words.head.word(NO_IMAGES_AT as usize).load(Ordering::Relaxed);
        Demand {
            bytes,
            memory: self.memory,
            has_disk,
            is_all_or_nothing: has_no_images != 0,
            is_soon_released: self.is_in_unit,
        }
    }
}

impl Releases for PairReleases<'_> {
    fn released(&self) -> u64 {
        let FileWords { head, from, to, .. } = self.words;
        released(head, (from, to), self.is_in_unit)
    }

    fn read(&self) -> u64 {
        self.words.load_consumed()
    }

    /// A writer may have been killed before it took back what it was about to discard, so this is
    /// no more than what the reader has.
    fn discarded(&self) -> u64 {
        self.words.load_discarded().min(self.words.load_consumed())
    }

    #[cold]
    fn discard(&self, wanted: u64) -> u64 {
        let (before, consumed) = (self.words.load_discarded(), self.words.load_consumed());
        if wanted <= before || wanted > consumed || !discard(&self.words, before, wanted) {
            return self.discarded();
        }
        let FileWords { from, to, .. } = self.words;
        // Of a log inside of the unit only images need this that are being taken.
        if !self.is_in_unit {
            self.notice.set(Some(if from == self.own { to } else { from }));
        }
        wanted
    }
}
