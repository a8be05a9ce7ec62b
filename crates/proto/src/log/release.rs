//! Up to where the logs of a node are needed no more.
//!
//! A frame may be needed by a later incarnation of its receiver, which reads it again, and of its
//! sender, which produces it again and compares. So the log of one process to another is released
//! up to what both oldest kept images cover: what the sender's image had sent, and what the
//! receiver's image had received. The log to a process of another node is released up to what that
//! node has of it, and the log from there up to what the receiver's image had received: that node
//! has a file of its own. A process without images may begin again with its program, so
//! nothing of its logs is released.
//!
//! What enters: how far the logs of a process had come in its oldest kept image. What leaves: for
//! each pair of processes whose log is released further, the position. What may never happen: a
//! release is taken back, or goes beyond one of the two images.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::layout::LOGGED_PROCESSES_MAX;

/// How far the two logs between a process and another one have come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PairPositions {
    /// The position in the log to the other process.
    pub sent: u64,
    /// The position in the log from the other process.
    pub received: u64,
}

impl PairPositions {
    const END: PairPositions = PairPositions { sent: u64::MAX, received: u64::MAX };
}

/// How far the logs of one process had come at some moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogPositions {
    /// By process; those without an entry are at their beginning.
    pub pairs: BTreeMap<usize, PairPositions>,
    /// The bytes of the process's deliveries.
    pub deliveries: u64,
}

impl LogPositions {
    /// The words of a report: deliveries, number of pairs; of each pair process, sent, received.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        let pairs = self.pairs.iter();
        let words = pairs.flat_map(|(process, pair)| [*process as u64, pair.sent, pair.received]);
        [self.deliveries, self.pairs.len() as u64].into_iter().chain(words)
    }

    /// Reads the words of a report. `None`: it is none.
    pub fn from_words(word: impl Fn(usize) -> u64) -> Option<LogPositions> {
        let count = usize::try_from(word(1)).ok().filter(|count| *count <= LOGGED_PROCESSES_MAX)?;
        let pair = |number: usize| {
            let at = 2 + 3 * number;
            let process = usize::try_from(word(at)).ok()?;
            let pair = PairPositions { sent: word(at + 1), received: word(at + 2) };
            (process < LOGGED_PROCESSES_MAX).then_some((process, pair))
        };
        let pairs = (0..count).map(pair).collect::<Option<_>>()?;
        Some(LogPositions { pairs, deliveries: word(0) })
    }

    /// How far the logs between the process and another one have come.
    pub fn pair(&self, other: usize) -> PairPositions {
        self.pairs.get(&other).copied().unwrap_or_default()
    }
}

/// What of one log the next image of a process lets release, which is its sender or its receiver.
/// The memory is there again once the image is the oldest one that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogCover {
    /// The log is released up to here.
    pub released: u64,
    /// The receiver has the log up to here.
    pub read: u64,
    /// The newest image of the process covers the log up to here.
    pub own: u64,
    /// The newest image of the process on the other side covers the log up to here; `u64::MAX`: no
    /// image of that process is needed. `None`: the log stays, since that process has no images.
    pub other: Option<u64>,
}

impl LogCover {
    /// Bytes that the next image of the process covers and that no image has covered before. Bytes
    /// that lack an image of the other process, too, count half: two images let release them.
    pub fn released_by_image(self) -> u64 {
        let Some(other) = self.other else { return 0 };
        let own = self.own.max(self.released);
        let at_once = other.min(self.read).saturating_sub(own);
        at_once + self.read.saturating_sub(own.max(other)) / 2
    }
}

/// The log of one process to another is released up to a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRelease {
    /// The sender.
    pub from: usize,
    /// The receiver.
    pub to: usize,
    /// Frames before this position are not needed.
    pub position: u64,
}

/// What the oldest kept image of each process of a node covers.
#[derive(Clone, Debug, Default)]
pub struct LogReleases {
    /// By process of this node. A process of another node needs nothing of this node's file.
    oldest: BTreeMap<usize, LogPositions>,
}

impl LogReleases {
    /// Notes a process of this node, of which there is no image.
    pub fn add(&mut self, process: usize) {
        self.oldest.entry(process).or_default();
    }

    /// Forgets what images of a process cover: it begins again with the file of another node.
    pub fn begin_again(&mut self, process: usize) {
        self.oldest.insert(process, LogPositions::default());
    }

    /// Notes what the oldest kept image of `process` covers; returns what is released further.
    pub fn advance(&mut self, process: usize, positions: LogPositions) -> Vec<LogRelease> {
        let others: Vec<usize> = positions.pairs.keys().copied().collect();
        let released = |releases: &LogReleases| -> Vec<LogRelease> {
            others.iter().flat_map(|other| releases.between(process, *other)).collect()
        };
        let before = released(self);
        self.oldest.insert(process, positions);
        let after = released(self);
        let pairs = before.into_iter().zip(after);
        pairs.filter(|(old, new)| old.position < new.position).map(|(_, new)| new).collect()
    }

    /// Up to where both logs between two processes are released.
    fn between(&self, process: usize, other: usize) -> [LogRelease; 2] {
        let of = |process: usize, other| {
            self.oldest.get(&process).map_or(PairPositions::END, |own| own.pair(other))
        };
        let (own, others) = (of(process, other), of(other, process));
        let to = own.sent.min(others.received);
        let from = own.received.min(others.sent);
        [
            LogRelease { from: process, to: other, position: to },
            LogRelease { from: other, to: process, position: from },
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn positions(pairs: &[(usize, u64, u64)]) -> LogPositions {
        let pair = |&(process, sent, received)| (process, PairPositions { sent, received });
        LogPositions { pairs: pairs.iter().map(pair).collect(), deliveries: 7 }
    }

    fn releases(local: &[usize]) -> LogReleases {
        let mut releases = LogReleases::default();
        local.iter().for_each(|process| releases.add(*process));
        releases
    }

    fn release(from: usize, to: usize, position: u64) -> LogRelease {
        LogRelease { from, to, position }
    }

    #[test]
    fn a_log_is_released_up_to_what_both_images_cover() {
        let mut releases = releases(&[0, 1, 2]);
        assert_eq!(releases.advance(0, positions(&[(1, 500, 90), (2, 300, 80)])), []);
        assert_eq!(
            releases.advance(1, positions(&[(0, 100, 400)])),
            [release(1, 0, 90), release(0, 1, 400)]
        );
        assert_eq!(releases.advance(1, positions(&[(0, 100, 400)])), []);
        assert_eq!(releases.advance(1, positions(&[(0, 200, 600)])), [release(0, 1, 500)]);
        assert_eq!(
            releases.advance(0, positions(&[(1, 700, 150), (2, 300, 80)])),
            [release(0, 1, 600), release(1, 0, 150)]
        );
    }

    #[test]
    fn the_logs_of_another_node_are_released_by_the_own_images() {
        let released = releases(&[0, 1]).advance(0, positions(&[(1, 500, 90), (2, 300, 80)]));
        assert_eq!(released, [release(0, 2, 300), release(2, 0, 80)]);
    }

    #[test]
    fn an_image_counts_what_it_releases_alone_and_half_of_what_two_images_release() {
        const ALL: u64 = u64::MAX;
        // Up to where the log is released, read, covered by the own image and by the other one;
        // bytes that the next image releases.
        let rows = [
            (0, 1000, 0, Some(1000), 1000, "the other image covers all"),
            (0, 1000, 0, Some(0), 500, "both images are missing"),
            (0, 1000, 0, Some(400), 400 + 300, "the other image covers a part"),
            (0, 1000, 400, Some(0), 300, "the other image is missing behind this one"),
            (0, 1000, 1000, Some(0), 0, "only the other image is missing"),
            (0, 1000, 1000, Some(1000), 0, "nothing new was read"),
            (900, 1000, 0, Some(1000), 100, "most is released"),
            (1000, 1000, 0, Some(0), 0, "all is released"),
            (0, 1000, 0, Some(5000), 1000, "what was not read is not released"),
            (200, 1000, 600, Some(ALL), 400, "the other process is on another node"),
            (0, 1000, 0, None, 0, "the other process has no images"),
        ];
        for (released, read, own, other, bytes, what) in rows {
            let cover = LogCover { released, read, own, other };
            assert_eq!(cover.released_by_image(), bytes, "{what}");
        }
    }

    #[test]
    fn a_process_that_comes_later_keeps_what_it_may_need() {
        let mut releases = releases(&[0]);
        releases.add(9);
        assert_eq!(releases.advance(0, positions(&[(9, 500, 90)])), []);
    }

    #[test]
    fn a_report_is_read_as_it_was_written_and_nothing_else_is() {
        let report = positions(&[(1, 2, 3), (4, 5, 6)]);
        let words: Vec<u64> = report.words().collect();
        assert_eq!(LogPositions::from_words(|at| words[at]), Some(report));
        for (at, word) in [(1, u64::MAX), (1, 1025), (2, 1024), (5, u64::MAX)] {
            let word =
                |place: usize| if place == at { word } else { *words.get(place).unwrap_or(&0) };
            assert_eq!(LogPositions::from_words(word), None, "word {at}");
        }
    }
}
