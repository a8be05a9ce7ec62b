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
//! this image ([`MessageLogs::trim`]). A log that was discarded because it exceeded its bound
//! restarts at the next checkpoint ([`MessageLogs::restart_log`]): restoring that image needs
//! nothing before its position.
//!
//! What may never happen: an incarnation receives the replay from another position than its own.

use alloc::vec::Vec;

use super::byte_log::{ByteLog, Cursor};
use super::determinant_log::{DeterminantLog, DeterminantPosition};
use super::divergence::SENT_DIGEST_BYTES;
use super::log_storage::UNREADABLE;
use super::message_log::{LOG_TOO_LARGE, MessageLog, MessageLogs};
use super::segmented_log::{SegmentPosition, SegmentedLog};
use crate::id::Address;
use crate::wire::hello::LogPosition;

/// Most stored positions; beyond, the earliest is dropped. Checkpoint images of a process are few,
/// and taken one after the other.
const CHECKPOINT_POSITIONS_MAX: usize = 64;

/// Error for a log position that the log has never held.
const UNKNOWN_POSITION: &str = "it stands where it has never been";
/// Error for a log position before the first kept determinant.
const TRIMMED: &str = "what it did before its checkpoints is not kept any more";

/// One log position, as a position in each of the three logs: see the module head.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CheckpointPosition {
    pub standing: LogPosition,
    pub determinants: Cursor,
    pub inbound: SegmentPosition,
    pub sent: Cursor,
}

/// Positions of determinants, for log positions in ascending order.
#[derive(Debug, Default)]
pub(super) struct CheckpointPositions {
    all: Vec<(LogPosition, DeterminantPosition)>,
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
        if known.number < standing.determinants || before.is_none() {
            self.all.insert(place, (standing, position));
            if self.all.len() > CHECKPOINT_POSITIONS_MAX {
                self.all.remove(0);
            }
        }
        Ok(CheckpointPosition { standing, determinants: position.cursor, inbound, sent })
    }

    /// The latest stored log position.
    pub fn newest(&self) -> LogPosition {
        self.all.last().map_or(LogPosition::default(), |(standing, _)| *standing)
    }

    /// Drops the stored positions before `determinants`. Returns the position of `determinants`, if
    /// an incarnation has attached there.
    fn trim_before(&mut self, determinants: u64) -> Option<(LogPosition, DeterminantPosition)> {
        let found = self.all.iter().position(|(known, _)| known.determinants == determinants)?;
        self.all.drain(..found);
        self.all.first().copied()
    }
}

impl MessageLogs {
    /// Drops the log before the position of `determinants`: no incarnation of the endpoint will
    /// ever attach at an earlier position.
    pub fn trim(&mut self, address: Address, determinants: u64) {
        let Self { all, bytes, storage } = self;
        let Some(log) = all.get_mut(&address) else { return };
        let Some((standing, position)) = log.checkpoints.trim_before(determinants) else { return };
        let before = log.bytes();
        let sent = log.sent.at(standing.sent * SENT_DIGEST_BYTES as u64);
        let inbound = log.inbound.at(standing.taken);
        if let Some((inbound, sent)) = inbound.zip(sent) {
            let freed = log.inbound.trim(inbound, &mut storage.buffer_pool);
            storage.account_freed(&freed);
            log.sent.trim(sent);
            log.determinants.trim(position);
        }
        *bytes -= before - log.bytes();
    }

    /// Restarts logging for an endpoint whose log was discarded because it was too large or
    /// unreadable, and whose incarnation attaches again at `standing`. Returns false if the
    /// endpoint has no such discarded log.
    pub fn restart_log(&mut self, address: Address, standing: LogPosition) -> bool {
        let Some(log) = self.all.get_mut(&address) else { return false };
        if !matches!(log.discard_reason, Some(LOG_TOO_LARGE | UNREADABLE)) {
            return false;
        }
        let reads = log.nondeterminism.take();
        *log = MessageLog::starting_at(standing);
        log.nondeterminism = reads;
        self.storage.note_recoverable(address);
        true
    }
}
