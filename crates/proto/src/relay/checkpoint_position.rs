//! Places in a process's log where a start of it has stood: its beginning, and wherever an image of it was taken.
//!
//! In: how often it has taken something in, how many bytes these frames had, and how many frames it has sent
//! ([`LogPosition`]). Out: where what came after that begins, in each of the lists that are kept ([`CheckpointPosition`]). What has a number of
//! bytes is found by that. Determinants have not: where they go on is remembered when somebody first stands there, as a rule behind
//! all that there have been until then.
//!
//! What lies before the oldest image of a process is dropped, as soon as that is said ([`MessageLogs::trim`]). One of which there
//! was too much to be kept is recorded again from where it stands for an image ([`MessageLogs::restart_log`]): nothing before that
//! is needed to bring it back to there.
//!
//! What may never happen: somebody is told what came after another place than where it stands.

use alloc::vec::Vec;

use super::byte_log::{ByteLog, Cursor};
use super::determinant_log::{DeterminantLog, DeterminantPosition};
use super::divergence::SENT_DIGEST_BYTES;
use super::log_storage::UNREADABLE;
use super::message_log::{LOG_TOO_LARGE, MessageLog, MessageLogs};
use super::segmented_log::{SegmentPosition, SegmentedLog};
use crate::id::Address;
use crate::wire::hello::LogPosition;

/// Of those that are remembered, the later ones are: images of a process are few, and taken one after the other.
const CHECKPOINT_POSITIONS_MAX: usize = 64;

/// What somebody is told who says that it stands where it cannot,
const UNKNOWN_POSITION: &str = "it stands where it has never been";
/// or cannot any more.
const TRIMMED: &str = "what it did before its checkpoints is not kept any more";

/// See the module head.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CheckpointPosition {
    pub standing: LogPosition,
    pub determinants: Cursor,
    pub inbound: SegmentPosition,
    pub sent: Cursor,
}

/// Where determinants go on, for places in their order.
#[derive(Debug, Default)]
pub(super) struct CheckpointPositions {
    all: Vec<(LogPosition, DeterminantPosition)>,
}

impl CheckpointPositions {
    /// Where `standing` is in these lists.
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

    /// The last place where somebody has stood.
    pub fn newest(&self) -> LogPosition {
        self.all.last().map_or(LogPosition::default(), |(standing, _)| *standing)
    }

    /// Nobody will stand before so many determinants any more: the place where they have been made, if somebody has stood there.
    fn trim_before(&mut self, determinants: u64) -> Option<(LogPosition, DeterminantPosition)> {
        let found = self.all.iter().position(|(known, _)| known.determinants == determinants)?;
        self.all.drain(..found);
        self.all.first().copied()
    }
}

impl MessageLogs {
    /// No start of the endpoint will ever stand before so many determinants: what led there is dropped.
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

    /// An endpoint of which nothing is kept since there was too much of that, or what there was could not be read, stands here, as
    /// the same start of it as ever: from here on all of it is kept. False: it is none.
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
