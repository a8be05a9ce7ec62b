//! Positions in the message log of a process at which an incarnation has attached: the beginning,
//! and the log position of each checkpoint image.
//!
//! What enters: the numbers of determinants, delivered bytes and sent frames of an incarnation
//! ([`LogPosition`]). What leaves: the corresponding position in each of the three logs
//! ([`CheckpointPosition`]). Positions of frames and digests follow from the byte counts. The
//! position of a determinant does not, so it is stored when an incarnation first attaches there,
//! which usually is the end of the log at that time.
//!
//! The relay drops everything before the oldest checkpoint image as soon as the endpoint reports
//! this image ([`CheckpointPositions::trim_before`]). A log that was discarded because it exceeded
//! its bound
//! restarts at the next checkpoint: restoring that image needs
//! nothing before its position.
//!
//! What may never happen: an incarnation receives the replay from another position than its own.

use alloc::vec::Vec;

use super::byte_log::{ByteLog, Cursor};
use super::determinant_log::{DeterminantLog, DeterminantPosition};
use super::divergence::SENT_DIGEST_BYTES;
use super::segmented_log::{SegmentPosition, SegmentedLog};
use crate::wire::hello::LogPosition;

/// Why a replay is refused that is longer than its opening frame can say.
const TOO_LONG: &str = "its log holds 4,294,967,296 determinants or more: take checkpoints, from \
                        which a replay is shorter";

/// Most stored positions; beyond, the earliest is dropped. Checkpoint images of a process are few,
/// and taken one after the other.
const CHECKPOINT_POSITIONS_MAX: usize = 64;

/// Error for a log position that the log has never held.
const UNKNOWN_POSITION: &str = "its position is beyond its log";
/// Error for a log position before the first kept determinant.
const TRIMMED: &str = "the log before its checkpoints is released";

/// One log position, as a position in each of the three logs: see the module head.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CheckpointPosition {
    pub standing: LogPosition,
    /// Determinants between this position and the end of the log.
    pub determinants_left: u32,
    pub determinants: Cursor,
    pub inbound: SegmentPosition,
    pub sent: Cursor,
}

/// Positions of determinants, for log positions in ascending order.
#[derive(Debug, Default)]
pub(super) struct CheckpointPositions {
    all: Vec<(LogPosition, DeterminantPosition)>,
}

/// The number of determinants that a replay from `standing` delivers, of `count` that were ever
/// recorded.
///
/// # Errors
/// If the opening frame of a replay cannot count them: its field has 32 bits.
pub(super) fn replay_length(count: u64, standing: u64) -> Result<u32, &'static str> {
    u32::try_from(count.saturating_sub(standing)).map_err(|_| TOO_LONG)
}

impl CheckpointPositions {
    /// Finds the position of `standing` in the three logs.
    pub fn find(
        &mut self,
        standing: LogPosition,
        determinants: &DeterminantLog,
        inbound: &SegmentedLog,
        sent: &ByteLog,
    ) -> Result<CheckpointPosition, &'static str> {
        let start = determinants.start();
        if standing.determinants < start.number {
            return Err(TRIMMED);
        }
        let inbound = inbound.at(standing.taken).ok_or(UNKNOWN_POSITION)?;
        let bytes = standing.sent.checked_mul(SENT_DIGEST_BYTES as u64).ok_or(UNKNOWN_POSITION)?;
        let sent = sent.at(bytes).ok_or(UNKNOWN_POSITION)?;
        let place =
            self.all.partition_point(|(known, _)| known.determinants <= standing.determinants);
        let before = place.checked_sub(1).map(|place| self.all[place].1);
        let known = before.unwrap_or(start);
        let position =
            determinants.position_after(known, standing.determinants).ok_or(UNKNOWN_POSITION)?;
        let determinants_left = replay_length(determinants.count(), standing.determinants)?;
        if known.number < standing.determinants || before.is_none() {
            self.all.insert(place, (standing, position));
            if self.all.len() > CHECKPOINT_POSITIONS_MAX {
                self.all.remove(0);
            }
        }
        let determinants = position.cursor;
        Ok(CheckpointPosition { standing, determinants, determinants_left, inbound, sent })
    }

    /// The latest stored log position.
    pub fn newest(&self) -> LogPosition {
        self.all.last().map_or(LogPosition::default(), |(standing, _)| *standing)
    }

    /// Drops the stored positions before `determinants`. Returns the position of `determinants`, if
    /// an incarnation has attached there.
    pub fn trim_before(&mut self, determinants: u64) -> Option<(LogPosition, DeterminantPosition)> {
        let found = self.all.iter().position(|(known, _)| known.determinants == determinants)?;
        self.all.drain(..found);
        self.all.first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_too_long_to_be_counted_is_refused() {
        let longest = u64::from(u32::MAX);
        assert_eq!(replay_length(longest + 7, 7), Ok(u32::MAX));
        assert_eq!(replay_length(longest + 8, 7), Err(TOO_LONG));
    }
}
