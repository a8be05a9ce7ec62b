//! What a relay keeps of endpoints that may come back, for whoever looks for trouble.
//!
//! Nothing enters, and nothing is changed. What leaves is bounded, however much there is.

use alloc::vec::Vec;

use super::message_log::MessageLog;
use super::nondeterminism_copies::NondeterminismCopy;
use super::segmented_log::ShownFrame;
use super::*;

/// Determinants that are read over to come to the first that is shown: they are read one by one, and others wait meanwhile.
const SKIPPED_MAX: u64 = 1 << 22;
/// Determinants that are shown at once,
const DETERMINANTS_MAX: u64 = 100;
/// and frames.
const FRAMES_MAX: u64 = 200;

/// What is kept of one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogStatus {
    /// Whose it is.
    pub address: Address,
    /// Why nothing is kept of it any more.
    pub discard_reason: Option<&'static str>,
    /// Frames that it was given,
    pub frames: u64,
    /// their bytes,
    pub bytes: u64,
    /// and those of them that are not in memory.
    pub disk_bytes: u64,
    /// Frames that it has sent,
    pub sent: u64,
    /// and what is kept of them.
    pub sent_bytes: u64,
    /// What is kept of what it has read of clocks, if it is on another node.
    pub nondeterminism_bytes: u64,
    /// How often it has taken something in, or let its time go on,
    pub determinants: u64,
    /// and what the record of that takes.
    pub determinant_bytes: u64,
    /// Frames that it has taken in.
    pub delivered_frames: u64,
    /// How often it had looked for messages when it did so last.
    pub polls: u64,
    /// Whether its present start is being told what was.
    pub is_replaying: bool,
}

/// One determinant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeterminantStatus {
    /// Its number.
    pub number: u64,
    /// At which poll since the endpoint began,
    pub polls: u64,
    /// and after how much time of its own.
    pub micros: u64,
    /// How many frames it has taken in,
    pub frames: u32,
    /// and the number of the first of them.
    pub first_frame: u64,
}

/// A piece of what is kept of one endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogExcerpt {
    /// Determinants, in order.
    pub determinants: Vec<DeterminantStatus>,
    /// Frames that these have taken in; behind the last determinant those that nobody has taken in yet.
    pub frames: Vec<ShownFrame>,
}

impl LogStatus {
    fn of(address: Address, log: &MessageLog) -> Self {
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

impl Relay {
    /// What is kept of each endpoint from `first` on.
    pub fn log_statuses(&self, first: Address) -> impl Iterator<Item = LogStatus> {
        let logs = self.logs.iter();
        logs.flat_map(move |it| it.all.range(first..)).map(|(who, it)| LogStatus::of(*who, it))
    }

    /// So many determinants of an endpoint, beginning with this one, and their frames, as far as they are shown at once. `None`:
    /// nothing is kept of it, or there are too many before.
    pub fn log_excerpt(&self, address: Address, from: u64, count: u64) -> Option<LogExcerpt> {
        let log = self.logs.as_ref()?.all.get(&address)?;
        let end = log.determinants.count();
        let from = from.min(end);
        // What led to the oldest image is not kept any more.
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
        // Behind the last one comes what waits.
        let last = if determinants.is_empty() { start.saturating_add(count) } else { first_frame };
        let frames = log.inbound.show_frames(start..last.min(start.saturating_add(FRAMES_MAX)));
        Some(LogExcerpt { determinants, frames })
    }
}
