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

    /// The position from which on all deliveries of a rank are there: what is before is released,
    /// or the rank has given it up.
    pub fn kept_deliveries_begin(&self, rank: u32) -> u64 {
        let discarded = self.word(control_at(rank as usize) + DELIVERIES_DISCARDED_AT as u64);
        self.deliveries.released(rank).0.max(discarded)
    }
}

#[cfg(test)]
mod tests {
    use landbridge_proto::log::counts::LogCounts;
    use rustix::io::pwrite;

    use super::super::tests::logs;
    use super::*;

    #[test]
    fn deliveries_that_a_rank_has_given_up_are_not_kept_and_neither_are_released_ones() {
        let logs = logs(0..2);
        let discard = |position: u64| {
            let at = control_at(1) + DELIVERIES_DISCARDED_AT as u64;
            pwrite(&logs.files.memory, &position.to_ne_bytes(), at).unwrap();
        };
        assert_eq!(logs.kept_deliveries_begin(1), 0);
        discard(5_000);
        assert_eq!((logs.kept_deliveries_begin(1), logs.held(1, None).is_discarded), (5_000, true));
        logs.deliveries.release(1, 9_000, LogCounts::default()).unwrap();
        assert_eq!(
            (logs.kept_deliveries_begin(1), logs.held(1, None).is_discarded),
            (9_000, false)
        );
        discard(20_000);
        assert_eq!(logs.kept_deliveries_begin(1), 20_000);
        assert_eq!(logs.kept_deliveries_begin(0), 0);
    }
}
