//! How much of its memory the logs of a process take, and what each log may take of it.
//!
//! What enters: bytes that are taken, and the bound (`recover_memory`, divided among the processes
//! of the node). What leaves: whether memory is full, and by how much each log should become
//! shorter. What may never happen: a log that begins late gets no memory because others have it.

use super::segment::{SEGMENT_BYTES_MAX, SegmentChain};

/// How much a log takes, and where it has come.
#[derive(Clone, Copy, Debug)]
pub struct LogExtent {
    /// Bytes of memory and disk that its segments take.
    taken: usize,
    /// Where its present segment begins in the region.
    segment: usize,
}

impl LogExtent {
    /// The extent of a log with these segments.
    #[inline]
    pub fn of(chain: &SegmentChain) -> LogExtent {
        let taken = chain.taken() + chain.taken_on_disk();
        LogExtent { taken, segment: chain.cursor().segment().start() }
    }
}

/// How much of their memory logs and deliveries of a process take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryFill {
    /// Less than a quarter.
    Little,
    /// A quarter or more, and no more than they may.
    Some,
    /// More than they may.
    Full,
}

/// Bytes that a process takes beyond its memory at most for long: a segment.
const EXCESS_BYTES_MAX: u64 = SEGMENT_BYTES_MAX as u64;

impl MemoryFill {
    /// `bytes_max`: what logs and deliveries of the process may take.
    pub fn of(taken: u64, bytes_max: u64) -> MemoryFill {
        match taken {
            _ if taken > bytes_max => MemoryFill::Full,
            _ if taken < bytes_max / 4 => MemoryFill::Little,
            _ => MemoryFill::Some,
        }
    }
}

/// The memory of the logs of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryShare {
    /// How much of it is taken.
    pub fill: MemoryFill,
    /// What they take beyond their memory, if that is more than [`EXCESS_BYTES_MAX`].
    pub excess: usize,
    /// Half of the memory, in equal parts for all logs.
    pub fair_bytes: usize,
    /// All logs take at most a quarter more than their memory, and two segments.
    pub may_become_fair: bool,
}

impl MemoryShare {
    /// Nothing is known yet.
    pub const UNKNOWN: MemoryShare =
        MemoryShare { fill: MemoryFill::Little, excess: 0, fair_bytes: 0, may_become_fair: false };

    /// The share of this number of logs, which take `taken` bytes of `bytes_max`.
    pub fn of(taken: u64, bytes_max: u64, logs: usize) -> MemoryShare {
        let excess = taken.saturating_sub(bytes_max);
        MemoryShare {
            fill: MemoryFill::of(taken, bytes_max),
            excess: if excess > EXCESS_BYTES_MAX { excess as usize } else { 0 },
            fair_bytes: bytes_max as usize / (2 * logs.max(1)),
            may_become_fair: excess <= bytes_max / 4 + 2 * EXCESS_BYTES_MAX,
        }
    }

    /// Whether memory is to be counted again after a log has changed.
    #[inline]
    pub fn is_changed(self, before: LogExtent, now: LogExtent) -> bool {
        before.taken != now.taken || self.excess > 0 && before.segment != now.segment
    }

    /// Whether more is taken than may be.
    #[inline]
    pub fn is_full(self) -> bool {
        self.fill == MemoryFill::Full
    }
}
