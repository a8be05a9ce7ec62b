//! Recovery units: processes of a node that begin again together (`recover_unit=node`).
//!
//! If one process of a unit is killed, all of it are ended and begin again. So they produce the
//! frames of the logs between them once more, and such a log is needed only until it was read. What
//! each poll has delivered is kept as everywhere, and so are the logs to and from other processes.
//! What a unit does inside may therefore differ from what it did before, as long as nobody outside
//! can see it: what leaves the unit is compared.
//!
//! A unit begins again from its programs, or from a *round* of images, one of each process. The
//! images of a round are taken at different moments, and until all are there, nothing of the logs
//! inside of the unit is written over. Of the two images at the ends of a log the later one holds
//! an excerpt ([`super::image_logs`]) that begins where the side was that had come less far.
//!
//! ```text
//! log of A to B:  ──[ A stands still for its image ── … ── B stands still for its image ]──
//!                    from here on the image of B has the frames; A sends them again
//! ```
//!
//! What enters: where in its logs each process stands for its image. What leaves: where the
//! excerpts of an image begin. What may never happen: a process begins again with an image of
//! another round than the others.

use alloc::collections::BTreeMap;

use super::image_logs::LogStarts;
use super::layout::{
    LOGGED_PROCESSES_MAX, REGION_BYTES, RELEASE_BYTES, begins_at, consumed_at, discarded_at,
    log_at, release_at,
};
use super::segment::LogCursor;

/// Words of the cursors of one pair: the other process, and two cursors.
const PAIR_WORDS: usize = 7;

/// Where a process is in both logs between it and another process of its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairCursors {
    /// In the log to the other process.
    pub sent: LogCursor,
    /// In the log from the other process.
    pub received: LogCursor,
}

impl Default for PairCursors {
    fn default() -> PairCursors {
        PairCursors { sent: LogCursor::START, received: LogCursor::START }
    }
}

/// Where a process that stands still for its image is in its logs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitCursors {
    /// By process; those without an entry are at their beginning.
    pub pairs: BTreeMap<usize, PairCursors>,
}

impl UnitCursors {
    /// The words of a report: number of pairs; of each pair process, and both cursors.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        let words = self.pairs.iter().flat_map(|(process, pair)| {
            let cursors = [pair.sent.words(), pair.received.words()];
            [*process as u64].into_iter().chain(cursors.into_iter().flatten())
        });
        [self.pairs.len() as u64].into_iter().chain(words)
    }

    /// Reads the words of a report. `None`: it is none.
    pub fn from_words(word: impl Fn(usize) -> u64) -> Option<UnitCursors> {
        let count = usize::try_from(word(0)).ok().filter(|count| *count <= LOGGED_PROCESSES_MAX)?;
        let pair = |number: usize| {
            let at = 1 + PAIR_WORDS * number;
            let process = usize::try_from(word(at)).ok().filter(|it| *it < LOGGED_PROCESSES_MAX)?;
            let cursor =
                |at| LogCursor::from_words([0, 1, 2].map(|next| word(at + next)), REGION_BYTES);
            Some((process, PairCursors { sent: cursor(at + 1)?, received: cursor(at + 4)? }))
        };
        Some(UnitCursors { pairs: (0..count).map(pair).collect::<Option<_>>()? })
    }

    fn pair(&self, other: usize) -> PairCursors {
        self.pairs.get(&other).copied().unwrap_or_default()
    }

    /// Where the excerpts of an image of `process`, of which this is, begin. `round`: the cursors
    /// of all processes of the unit that stand still or have stood still in this round.
    pub fn starts(&self, process: usize, round: &BTreeMap<usize, UnitCursors>) -> LogStarts {
        let mut starts = LogStarts::default();
        for peer in self.pairs.keys().copied() {
            let (to, from) = self.excerpt_starts((process, peer), round.get(&peer));
            starts.put((process, peer), to);
            starts.put((peer, process), Some(from));
        }
        starts
    }

    /// Where the excerpts begin of the log to a peer, and of the log from it. `theirs`: of the
    /// peer, if it has stood still in this round. If not, the peer's image will hold what it has
    /// not received of the log to it.
    fn excerpt_starts(
        &self,
        (process, peer): (usize, usize),
        theirs: Option<&UnitCursors>,
    ) -> (Option<LogCursor>, LogCursor) {
        let own = self.pair(peer);
        let Some(theirs) = theirs.map(|theirs| theirs.pair(process)) else {
            return (None, own.received);
        };
        (Some(earlier(own.sent, theirs.received)), earlier(own.received, theirs.sent))
    }
}

/// What the agent writes into the file so that the log of one process to another is empty and
/// begins at this position: places and words. None of both may run.
pub fn emptied_log((from, to): (usize, usize), begins: u64) -> [(u64, u64); 6] {
    let release = release_at(from, to);
    [
        (log_at(from, to), 0),
        (release, begins),
        (release + RELEASE_BYTES as u64 / 2, begins),
        (consumed_at(from, to), begins),
        (discarded_at(from, to), 0),
        (begins_at(from, to), begins),
    ]
}

fn earlier(one: LogCursor, other: LogCursor) -> LogCursor {
    if one.position() <= other.position() { one } else { other }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    fn cursor(position: u64) -> LogCursor {
        LogCursor::beginning(position)
    }

    fn cursors(pairs: &[(usize, u64, u64)]) -> UnitCursors {
        let pair = |&(process, sent, received): &(usize, u64, u64)| {
            (process, PairCursors { sent: cursor(sent), received: cursor(received) })
        };
        UnitCursors { pairs: pairs.iter().map(pair).collect() }
    }

    #[test]
    fn a_report_is_read_as_it_was_written_and_nothing_else_is() {
        let report = cursors(&[(1, 64, 128), (4, 640, 0)]);
        let words: Vec<u64> = report.words().collect();
        assert_eq!(UnitCursors::from_words(|at| words[at]), Some(report));
        for (at, word) in [(0, u64::MAX), (0, 1025), (1, 1024), (3, u64::MAX), (4, 7)] {
            let word = |place: usize| if place == at { word } else { words[place] };
            assert_eq!(UnitCursors::from_words(word), None, "word {at}");
        }
    }

    #[test]
    fn the_later_image_holds_what_either_side_needs() {
        let (zero, one) = (cursors(&[(1, 640, 64)]), cursors(&[(0, 320, 576)]));
        let positions = |(to, from): (Option<LogCursor>, LogCursor)| {
            (to.map(|to| to.position()), from.position())
        };
        assert_eq!(positions(zero.excerpt_starts((0, 1), None)), (None, 64));
        assert_eq!(positions(one.excerpt_starts((1, 0), Some(&zero))), (Some(64), 576));
        assert_eq!(positions(zero.excerpt_starts((0, 1), Some(&one))), (Some(576), 64));
        // Who has read further than the sender was for its image gets the rest sent again.
        let later = cursors(&[(0, 320, 704)]);
        assert_eq!(positions(later.excerpt_starts((1, 0), Some(&zero))), (Some(64), 640));
        // The peer knew nothing of this process then.
        let silent = cursors(&[]);
        assert_eq!(positions(zero.excerpt_starts((0, 1), Some(&silent))), (Some(0), 0));
    }
}
