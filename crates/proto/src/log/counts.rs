//! What a recorded process has sent and delivered, and what its logs take: for reports.
//!
//! The process adds to these numbers in its control words while it runs ([`super::layout`]). A
//! later incarnation goes on with them, so they count what all incarnations together have done
//! once. A number may lack what was done right before a kill.
//!
//! What enters: words of the file. What leaves: numbers. What may never happen: anything but a
//! report depends on them.

use super::layout::COUNTS_AT;

/// Which number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogCount {
    /// Deliveries.
    Deliveries,
    /// Frames that the deliveries have delivered.
    DeliveredFrames,
    /// Polls up to the last delivery.
    Polls,
    /// Microseconds by which the protocol's clock has advanced up to the last delivery.
    Micros,
    /// Frames that were sent.
    SentFrames,
    /// Bytes of the region of this node's file that the logs of the process take.
    LogBytes,
}

impl LogCount {
    /// Where the word lies among the control words of the process.
    #[inline]
    pub const fn at(self) -> usize {
        COUNTS_AT + 8 * self as usize
    }
}

/// All numbers of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogCounts {
    /// See [`LogCount::Deliveries`].
    pub deliveries: u64,
    /// See [`LogCount::DeliveredFrames`].
    pub delivered_frames: u64,
    /// See [`LogCount::Polls`].
    pub polls: u64,
    /// See [`LogCount::Micros`].
    pub micros: u64,
    /// See [`LogCount::SentFrames`].
    pub sent_frames: u64,
    /// See [`LogCount::LogBytes`].
    pub log_bytes: u64,
}

impl LogCounts {
    /// Number of words.
    pub const WORDS: usize = LogCount::LogBytes as usize + 1;

    /// Reads the words from [`COUNTS_AT`] on.
    pub fn from_words(words: [u64; LogCounts::WORDS]) -> LogCounts {
        let [deliveries, delivered_frames, polls, micros, sent_frames, log_bytes] = words;
        LogCounts { deliveries, delivered_frames, polls, micros, sent_frames, log_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::DELIVERIES_RELEASED_AT;
    use super::*;

    #[test]
    fn each_number_lies_where_it_is_read() {
        let all = [
            LogCount::Deliveries,
            LogCount::DeliveredFrames,
            LogCount::Polls,
            LogCount::Micros,
            LogCount::SentFrames,
            LogCount::LogBytes,
        ];
        let places = all.map(|count| (count.at() - COUNTS_AT) / 8);
        assert_eq!(places, [0, 1, 2, 3, 4, 5]);
        const { assert!(COUNTS_AT + 8 * LogCounts::WORDS <= DELIVERIES_RELEASED_AT) };
        let counts = LogCounts::from_words([1, 2, 3, 4, 5, 6]);
        assert_eq!((counts.deliveries, counts.delivered_frames, counts.polls), (1, 2, 3));
        assert_eq!((counts.micros, counts.sent_frames, counts.log_bytes), (4, 5, 6));
    }
}
