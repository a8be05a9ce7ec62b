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

use alloc::vec;
use alloc::vec::Vec;

/// How far the logs of one process had come at some moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogPositions {
    /// The position in the log to each process of the node.
    pub sent: Vec<u64>,
    /// The position in the log from each process of the node.
    pub received: Vec<u64>,
    /// The bytes of the process's deliveries.
    pub deliveries: u64,
}

impl LogPositions {
    /// The beginning, on a node of this many processes.
    pub fn start(processes: usize) -> LogPositions {
        LogPositions { sent: vec![0; processes], received: vec![0; processes], deliveries: 0 }
    }

    /// Everything, in a job of this many processes.
    fn end(processes: usize) -> LogPositions {
        let all = vec![u64::MAX; processes];
        LogPositions { sent: all.clone(), received: all, deliveries: u64::MAX }
    }

    /// The words of a report: what was sent, what was received, and deliveries.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        self.sent.iter().chain(&self.received).copied().chain([self.deliveries])
    }

    /// Reads the words of a report on a node of this many processes.
    pub fn from_words(processes: usize, mut word: impl FnMut(usize) -> u64) -> LogPositions {
        LogPositions {
            sent: (0..processes).map(&mut word).collect(),
            received: (processes..2 * processes).map(&mut word).collect(),
            deliveries: word(2 * processes),
        }
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
#[derive(Clone, Debug)]
pub struct LogReleases {
    oldest: Vec<LogPositions>,
}

impl LogReleases {
    /// A job of this many processes without images. `is_local`: whether a process runs on this
    /// node. A process of another node needs nothing of this node's file.
    pub fn new(processes: usize, is_local: impl Fn(usize) -> bool) -> LogReleases {
        let oldest = |process| match is_local(process) {
            true => LogPositions::start(processes),
            false => LogPositions::end(processes),
        };
        LogReleases { oldest: (0..processes).map(oldest).collect() }
    }

    /// Notes what the oldest kept image of `process` covers; returns what is released further.
    pub fn advance(&mut self, process: usize, positions: LogPositions) -> Vec<LogRelease> {
        let before: Vec<u64> = self.of(process).collect();
        self.oldest[process] = positions;
        let after: Vec<u64> = self.of(process).collect();
        let processes = self.oldest.len();
        let pair = |place: usize| match place < processes {
            true => (process, place),
            false => (place - processes, process),
        };
        let changes = before.into_iter().zip(after).enumerate();
        let further = changes.filter(|(_, (before, after))| before < after);
        let release = |(place, (_, position))| {
            let (from, to) = pair(place);
            LogRelease { from, to, position }
        };
        further.map(release).collect()
    }

    /// The positions up to which the logs to each process, then from each process, are released.
    fn of(&self, process: usize) -> impl Iterator<Item = u64> {
        let own = &self.oldest[process];
        let to = self
            .oldest
            .iter()
            .zip(&own.sent)
            .map(move |(other, sent)| other.received[process].min(*sent));
        let from = self
            .oldest
            .iter()
            .zip(&own.received)
            .map(move |(other, received)| other.sent[process].min(*received));
        to.chain(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn positions(sent: [u64; 3], received: [u64; 3]) -> LogPositions {
        LogPositions { sent: sent.to_vec(), received: received.to_vec(), deliveries: 7 }
    }

    #[test]
    fn a_log_is_released_up_to_what_both_images_cover() {
        let mut releases = LogReleases::new(3, |_| true);
        assert_eq!(releases.advance(0, positions([0, 500, 300], [0, 90, 80])), []);
        let release = |from, to, position| LogRelease { from, to, position };
        assert_eq!(
            releases.advance(1, positions([100, 0, 0], [400, 0, 0])),
            [release(1, 0, 90), release(0, 1, 400)]
        );
        assert_eq!(releases.advance(1, positions([100, 0, 0], [400, 0, 0])), []);
        assert_eq!(releases.advance(1, positions([200, 0, 0], [600, 0, 0])), [release(0, 1, 500)]);
        assert_eq!(
            releases.advance(0, positions([0, 700, 300], [0, 150, 80])),
            [release(0, 1, 600), release(1, 0, 150)]
        );
    }

    #[test]
    fn the_logs_of_another_node_are_released_by_the_own_images() {
        let mut releases = LogReleases::new(3, |process| process < 2);
        let released = releases.advance(0, positions([0, 500, 300], [0, 90, 80]));
        let release = |from, to, position| LogRelease { from, to, position };
        assert_eq!(released, [release(0, 2, 300), release(2, 0, 80)]);
    }

    #[test]
    fn a_report_is_read_as_it_was_written() {
        let report = positions([1, 2, 3], [4, 5, 6]);
        let words: Vec<u64> = report.words().collect();
        assert_eq!(LogPositions::from_words(3, |at| words[at]), report);
    }
}
