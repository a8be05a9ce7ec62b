//! What the logs of this node hold of a rank.
//!
//! In: the words of the rank in the file, and its images. Out: numbers, and where an incarnation
//! may begin. What may never happen: what was given up is said to be there.

use landbridge_proto::log::counts::LogCounts;
use landbridge_proto::log::layout::{DELIVERIES_DISCARDED_AT, DELIVERIES_END_AT, control_at};

use super::NodeLogs;

/// What the logs hold of one rank.
pub struct HeldLogs {
    /// What the rank has done.
    pub counts: LogCounts,
    /// What it had done before the deliveries that an incarnation may replay.
    pub released: LogCounts,
    /// Bytes of deliveries before these.
    pub released_bytes: u64,
    /// Bytes of deliveries that were written.
    pub end: u64,
    /// The rank has given up deliveries that each incarnation needs, because memory was full.
    pub is_discarded: bool,
}

impl NodeLogs {
    /// What the logs hold of a rank of this node. `newest`: the number of its newest kept image,
    /// which may cover what the rank has given up.
    pub fn held(&self, rank: u32, newest: Option<u64>) -> HeldLogs {
        let state = self.state.borrow();
        let word = |at: usize| self.word(control_at(rank as usize) + at as u64);
        let (end, discarded) = (word(DELIVERIES_END_AT), word(DELIVERIES_DISCARDED_AT));
        let released = self.deliveries.released(rank);
        let newest = newest.and_then(|number| state.images.get(&(rank, number)));
        let newest = newest.map(|(positions, counts)| (positions.deliveries, *counts));
        let mut begins = [Some(released), newest].into_iter().flatten();
        let begin = begins.find(|(position, _)| *position >= discarded);
        let (released_bytes, released) = begin.unwrap_or(released);
        let is_discarded = begin.is_none();
        HeldLogs { counts: self.counts(rank), released, released_bytes, end, is_discarded }
    }
}
