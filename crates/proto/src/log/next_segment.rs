//! Where a log goes on when its segment has no room for the next frame.
//!
//! What costs nothing comes first: a segment that was released. As long as memory is not full, a
//! new segment follows. Where it is full, the disk comes before anything is given up, and of the
//! log only as much is given up as is used again, the oldest part first: an image that was taken
//! since then may be of use yet. [`ORDER`] is the whole decision.
//!
//! What enters: the length of the frame, how much memory is taken, and up to where the log is
//! released and read. What leaves: the segment, and what is to be discarded before it is written.
//! What may never happen: a segment is chosen that holds something that was neither released nor
//! discarded; something is discarded that was not read.

use super::memory_share::{MemoryFill, MemoryShare};
use super::segment::{LogSegment, SegmentChain};

/// A segment for a frame of this many bytes is large.
const LARGE_BYTES: usize = 480 << 10;

/// What decides where a log goes on, apart from its segments.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Bytes of the frame, header included.
    pub bytes: usize,
    /// The memory of all logs of the process.
    pub memory: MemoryShare,
    /// Whether the log may go on on disk.
    pub has_disk: bool,
    /// Whether a log of which something was discarded is of no use: there are no images.
    pub is_all_or_nothing: bool,
    /// Whether the log is released as soon as it is read: both processes begin again together.
    pub is_soon_released: bool,
}

/// Up to where the segments of a log may be used again.
pub trait Releases {
    /// The position before which no incarnation needs anything.
    fn released(&self) -> u64;

    /// Up to where the reader has the log.
    fn read(&self) -> u64;

    /// The position before which the log was discarded.
    fn discarded(&self) -> u64;

    /// Discards the log before the position `wanted`, if its reader has it up to there; returns up
    /// to where the log was discarded.
    fn discard(&self, wanted: u64) -> u64;
}

/// Where a segment may come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// The smallest large one that was read, after all that was read is discarded.
    SmallestRead,
    /// A large one that was released.
    LargeReleased,
    /// One that was released.
    Released,
    /// Memory that was never used.
    Untouched,
    /// The disk: what was released there, or new space.
    Disk,
    /// What was discarded before.
    Discarded,
    /// What is discarded now.
    DiscardedNow,
    /// What was released or discarded on disk.
    FreeOnDisk,
}

/// When a source is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Always,
    /// Small segments are not used again as long as larger ones can be had: where a log is soon
    /// released, its segments are used again and again, and small ones are left every few frames.
    MayGrow,
    Full,
    NotFull,
    /// Memory is full, and images never need what was read.
    NobodyNeedsWhatWasRead,
    /// The log takes less than others, so that it takes more although memory is full.
    MayBecomeFair,
}

/// Which sources are asked, in which order, until one has a segment.
const ORDER: [(When, Source); 13] = [
    (When::NobodyNeedsWhatWasRead, Source::SmallestRead),
    (When::MayGrow, Source::LargeReleased),
    (When::MayGrow, Source::Untouched),
    (When::Always, Source::Released),
    (When::Full, Source::Disk),
    (When::MayBecomeFair, Source::Untouched),
    (When::Full, Source::DiscardedNow),
    (When::NotFull, Source::Discarded),
    (When::Always, Source::FreeOnDisk),
    (When::Always, Source::Untouched),
    (When::Always, Source::Disk),
    // The region of the log is full.
    (When::Always, Source::DiscardedNow),
    (When::Always, Source::FreeOnDisk),
];

impl SegmentChain {
    /// The segment in which the log goes on. `None`: the region is full, and nothing in it was
    /// read. `take_disk` takes disk for a segment, unless it has
    /// some, and returns whether there was room.
    pub fn next_segment(
        &mut self,
        demand: &Demand,
        releases: &impl Releases,
        take_disk: impl Fn(LogSegment) -> bool,
    ) -> Option<LogSegment> {
        let more_than_fair = self.taken().saturating_sub(demand.memory.fair_bytes);
        let released = releases.released();
        let chain = self;
        let mut search = Search { chain, demand, releases, take_disk, more_than_fair, released };
        ORDER.into_iter().find_map(|(when, source)| match search.is(when) {
            true => search.ask(source),
            false => None,
        })
    }
}

struct Search<'a, R, D> {
    chain: &'a mut SegmentChain,
    demand: &'a Demand,
    releases: &'a R,
    take_disk: D,
    /// Bytes of memory that the log takes beyond its part.
    more_than_fair: usize,
    /// The position before which the log is not needed.
    released: u64,
}

impl<R: Releases, D: Fn(LogSegment) -> bool> Search<'_, R, D> {
    fn is(&self, when: When) -> bool {
        let Demand { memory, has_disk, is_all_or_nothing, is_soon_released, .. } = *self.demand;
        let is_fair = self.more_than_fair == 0;
        match when {
            When::Always => true,
            When::MayGrow => is_soon_released && memory.fill == MemoryFill::Little,
            When::Full => memory.is_full(),
            When::NotFull => !memory.is_full(),
            When::NobodyNeedsWhatWasRead => {
                memory.is_full() && !is_fair && !has_disk && is_all_or_nothing
            }
            When::MayBecomeFair => is_fair && memory.may_become_fair,
        }
    }

    fn ask(&mut self, source: Source) -> Option<LogSegment> {
        let bytes = self.demand.bytes;
        let large = bytes.max(LARGE_BYTES);
        match source {
            Source::SmallestRead => {
                let discarded = self.releases.discard(self.releases.read());
                self.released = self.released.max(discarded);
                self.chain.smallest_segment(large, self.released)
            }
            Source::LargeReleased => self.chain.released_segment(large, self.released),
            Source::Released => self.chain.released_segment(bytes, self.released),
            Source::Untouched => self.chain.new_segment(bytes),
            Source::Disk => self.segment_on_disk(),
            Source::Discarded => self.chain.released_segment(bytes, self.releases.discarded()),
            Source::DiscardedNow => {
                let discarded = self.releases.discard(self.discards());
                self.chain.released_segment(bytes, discarded)
            }
            Source::FreeOnDisk => {
                let (segment, is_free) = self.chain.segment_on_disk(bytes, 0)?;
                (is_free && (self.take_disk)(segment)).then_some(segment)
            }
        }
    }

    /// Up to where the log is to be discarded: no more than is used, because an image that is taken
    /// now needs what follows; or as much as all logs take beyond their memory.
    fn discards(&self) -> u64 {
        let bytes = self.demand.bytes;
        match self.demand.memory.excess.min(self.more_than_fair) {
            0 => self.chain.frees_segment(bytes).unwrap_or(0),
            excess => {
                self.chain.frees_memory(bytes.max(LARGE_BYTES) + excess, self.releases.read())
            }
        }
    }

    /// A segment on disk. `None`: there is no disk, or it is full.
    fn segment_on_disk(&mut self) -> Option<LogSegment> {
        if !self.demand.has_disk {
            return None;
        }
        let (segment, _) = self.chain.segment_on_disk(self.demand.bytes, self.released)?;
        (self.take_disk)(segment).then_some(segment)
    }
}

#[cfg(test)]
mod tests;
