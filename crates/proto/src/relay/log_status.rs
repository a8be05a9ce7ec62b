//! Status and excerpts of the message logs, for `landbridge log`.
//!
//! Nothing enters, and nothing is changed. What leaves is bounded, whatever the size of the logs.

use alloc::vec::Vec;

use super::message_log::MessageLog;
use super::nondeterminism_copies::NondeterminismCopy;
use super::segmented_log::ShownFrame;
use crate::id::Address;

/// Most determinants that the relay skips before the first one of an excerpt: the relay decodes
/// them one by one, and all links wait meanwhile.
const SKIPPED_MAX: u64 = 1 << 22;
/// Most determinants in one excerpt.
const DETERMINANTS_MAX: u64 = 100;
/// Most frames in one excerpt.
const FRAMES_MAX: u64 = 200;

/// Size of the message log of one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogStatus {
    /// The endpoint of the log.
    pub address: Address,
    /// Why the log has been discarded, if it has.
    pub discard_reason: Option<&'static str>,
    /// Frames that the relay has given to the endpoint since its first incarnation.
    pub frames: u64,
    /// Bytes of the frames in the log.
    pub bytes: u64,
    /// Bytes of logged frames that are on the disk and not in memory.
    pub disk_bytes: u64,
    /// Frames that the endpoint has sent.
    pub sent: u64,
    /// Bytes of the logged digests of the sent frames.
    pub sent_bytes: u64,
    /// Bytes of the copy of the endpoint's recorded nondeterminism, if the endpoint is on another
    /// node.
    pub nondeterminism_bytes: u64,
    /// Determinants of the endpoint: how often it has delivered frames, or advanced its clock.
    pub determinants: u64,
    /// Bytes of the logged determinants.
    pub determinant_bytes: u64,
    /// Frames that the endpoint has delivered.
    pub delivered_frames: u64,
    /// Polls of the endpoint up to its last determinant.
    pub polls: u64,
    /// Whether the present incarnation is replaying.
    pub is_replaying: bool,
}

/// One determinant, with the sums of all determinants before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeterminantStatus {
    /// Number of the determinant, from 0.
    pub number: u64,
    /// Number of the poll, counted from the first poll of the endpoint.
    pub polls: u64,
    /// Microseconds of the endpoint's own clock.
    pub micros: u64,
    /// Number of frames that the endpoint delivered at this poll.
    pub frames: u32,
    /// Number of the first frame that the endpoint delivered at this poll.
    pub first_frame: u64,
}

/// An excerpt of the message log of one endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogExcerpt {
    /// Determinants, in order.
    pub determinants: Vec<DeterminantStatus>,
    /// Frames that these determinants delivered; after the last determinant, the frames that the
    /// endpoint has not delivered yet.
    pub frames: Vec<ShownFrame>,
}

impl LogStatus {
    pub(super) fn of(address: Address, log: &MessageLog) -> Self {
        Self {
            address,
            discard_reason: log.discard_reason,
            frames: log.inbound.frame_count(),
            bytes: log.inbound.len(),
            disk_bytes: log.inbound.evicted_bytes(),
            sent: log.sent_count,
            sent_bytes: log.sent.len(),
            nondeterminism_bytes: log.nondeterminism.as_ref().map_or(0, NondeterminismCopy::bytes),
            determinants: log.determinants.count(),
            determinant_bytes: log.determinants.bytes(),
            delivered_frames: log.determinants.frames(),
            polls: log.determinants.polls(),
            is_replaying: log.is_replaying(),
        }
    }
}

impl LogExcerpt {
    /// An excerpt of `count` determinants of `log`, beginning with number `from`, and their frames,
    /// up to `DETERMINANTS_MAX` and `FRAMES_MAX`. `None`: the log has been discarded, or more than
    /// `SKIPPED_MAX` determinants precede `from`.
    pub(super) fn of(log: &MessageLog, from: u64, count: u64) -> Option<Self> {
        let end = log.determinants.count();
        let from = from.min(end);
        // The determinants before the oldest checkpoint have been trimmed.
        let start = log.determinants.start();
        let from = from.max(start.number);
        if log.discard_reason.is_some() || from - start.number > SKIPPED_MAX {
            return None;
        }
        let mut cursor = start.cursor;
        let (mut polls, mut micros, mut first_frame) = (start.polls, start.micros, start.frames);
        let mut determinants = Vec::new();
        for number in start.number..end.min(from.saturating_add(count.min(DETERMINANTS_MAX))) {
            let determinant = log.determinants.read(&mut cursor)?;
            polls = determinant.polls.saturating_add(polls);
            micros = determinant.micros.saturating_add(micros);
            if number >= from {
                determinants.push(DeterminantStatus {
                    number,
                    polls,
                    micros,
                    frames: determinant.frames,
                    first_frame,
                });
            }
            first_frame += determinant.frames as u64;
        }
        let start = determinants.first().map_or(first_frame, |moment| moment.first_frame);
        // After the last determinant follow the frames that wait.
        let last = if determinants.is_empty() { start.saturating_add(count) } else { first_frame };
        let frames = log.inbound.show_frames(start..last.min(start.saturating_add(FRAMES_MAX)));
        Some(Self { determinants, frames })
    }
}
