//! The message log of one endpoint, and the replay from it.
//!
//! What enters: frames for the endpoint, its determinants, and digests of the frames that it sends.
//! What leaves: the same frames and determinants for its next incarnation, and whether a frame that
//! this incarnation sends repeats the original ([`SendComparison`]). What may never happen: a log
//! that has been discarded grows again without a new beginning; the parts of the log stand at
//! different positions.

use alloc::collections::BTreeSet;

use super::byte_log::{ByteLog, Cursor};
use super::checkpoint_position::{CheckpointPosition, CheckpointPositions};
use super::determinant_log::DeterminantLog;
use super::divergence::{SENT_DIGEST_BYTES, SentDigest};
use super::log_storage::LogStorage;
use super::nondeterminism_copies::NondeterminismCopy;
use super::output_queue::OutputQueue;
use super::recent_channels::ChannelKey;
use super::replay::{Replay, push_empty};
use super::replay_state::ReplayState;
use super::segmented_log::SegmentedLog;
use super::writer::Writer;
use crate::id::Address;
use crate::route::byte_queue::ChunkPool;
use crate::wire::frame::{Header, Kind};
use crate::wire::hello::LogPosition;

/// The message log of one endpoint: see the module head.
#[derive(Debug, Default)]
pub(super) struct MessageLog {
    /// Why the log has been discarded, if it has.
    pub discard_reason: Option<&'static str>,
    /// Frames that the relay has given to the endpoint, in order.
    pub inbound: SegmentedLog,
    /// Determinants of the endpoint: at which polls it delivered how many frames.
    pub determinants: DeterminantLog,
    /// Digests of the frames that the endpoint has sent, [`SENT_DIGEST_BYTES`] each.
    pub sent: ByteLog,
    /// Number of frames that the endpoint has sent.
    pub sent_count: u64,
    /// Number of frames that the present incarnation has sent; `next_sent_digest` is the position
    /// of the digest that follows.
    replayed_sends: u64,
    next_sent_digest: Cursor,
    /// Replay to the present incarnation, while a replay is in progress.
    replay: Option<Replay>,
    /// Copy of the recorded nondeterminism of the program, if the endpoint is on another node.
    pub nondeterminism: Option<NondeterminismCopy>,
    /// Log positions at which incarnations of the endpoint have attached.
    pub checkpoints: CheckpointPositions,
    /// Whether the relay has reported that the log has grown by `checkpoint_log_bytes` since the
    /// last checkpoint.
    is_growth_reported: bool,
}

/// Result of comparing a frame that an endpoint sends with the frame that the previous incarnation
/// sent at the same position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendComparison {
    /// The previous incarnation did not get so far: the frame is new.
    New(SentDigest),
    /// The frame equals the original frame.
    Repeated,
    /// The frame differs from the original frame, whose digest this is (`None`: the digest is
    /// missing).
    Diverged(Option<SentDigest>),
}

impl MessageLog {
    /// The log of an endpoint that stands at log position `standing`, without anything before this
    /// position.
    pub fn starting_at(standing: LogPosition) -> Self {
        Self {
            inbound: SegmentedLog::starting_at(standing.taken),
            determinants: DeterminantLog::starting_at(standing.determinants),
            sent: ByteLog::starting_at(standing.sent.saturating_mul(SENT_DIGEST_BYTES as u64)),
            sent_count: standing.sent,
            ..Self::default()
        }
    }

    pub fn bytes(&self) -> u64 {
        let reads = self.nondeterminism.as_ref().map_or(0, NondeterminismCopy::bytes);
        self.determinants.bytes() + self.sent.len() + self.inbound.len() + reads
    }

    /// Discards the log and returns the number of bytes that it held.
    pub fn discard(&mut self, why: &'static str, storage: &mut LogStorage) -> u64 {
        let bytes = self.bytes();
        let end = self.inbound.end();
        let freed = self.inbound.trim(end, &mut storage.buffer_pool);
        storage.account_freed(&freed);
        let reads = self.nondeterminism.as_ref().map(NondeterminismCopy::dropped);
        *self = Self { discard_reason: Some(why), nondeterminism: reads, ..Self::default() };
        bytes
    }

    /// Prepares the comparison of sent frames for an incarnation that attaches at `position`.
    pub fn resume_at(&mut self, position: &CheckpointPosition) {
        (self.replayed_sends, self.next_sent_digest) = (position.standing.sent, position.sent);
    }

    pub fn compare(&mut self, header: &Header, frame: &[u8]) -> SendComparison {
        let sent = SentDigest::of(header, frame);
        if self.replayed_sends == self.sent_count {
            return SendComparison::New(sent);
        }
        let before = self.sent.take(&mut self.next_sent_digest).map(SentDigest::from_bytes);
        self.replayed_sends += 1;
        if before == Some(sent) {
            SendComparison::Repeated
        } else {
            SendComparison::Diverged(before)
        }
    }

    /// Appends the digest of a frame that the relay has forwarded.
    pub fn append_sent(&mut self, sent: SentDigest) {
        self.sent.push(&sent.bytes());
        self.sent_count += 1;
        self.replayed_sends += 1;
    }

    /// Number of frames that the present incarnation has sent.
    pub fn replayed_sends(&self) -> u64 {
        self.replayed_sends
    }

    /// Whether this growth of the log is to be reported: once after each checkpoint, as soon as the
    /// storage says so.
    pub fn note_growth(&mut self, address: Address, storage: &mut LogStorage) {
        if !self.is_growth_reported {
            let grown = self.inbound.total().saturating_sub(self.checkpoints.newest().taken);
            self.is_growth_reported = storage.note_growth(address, grown);
        }
    }

    /// The position in this log that matches the log position `standing` of an endpoint.
    ///
    /// # Errors
    /// If the log has never held this position, or has been trimmed beyond it.
    pub fn checkpoint_position(
        &mut self,
        standing: LogPosition,
    ) -> Result<CheckpointPosition, &'static str> {
        let position =
            self.checkpoints.find(standing, &self.determinants, &self.inbound, &self.sent)?;
        self.is_growth_reported = false;
        Ok(position)
    }

    /// Drops the log before the position of `determinants`: no incarnation of the endpoint will
    /// ever attach at an earlier position.
    pub fn trim(&mut self, determinants: u64, storage: &mut LogStorage) {
        let Some((standing, position)) = self.checkpoints.trim_before(determinants) else { return };
        let sent = self.sent.at(standing.sent * SENT_DIGEST_BYTES as u64);
        let inbound = self.inbound.at(standing.taken);
        if let Some((inbound, sent)) = inbound.zip(sent) {
            let freed = self.inbound.trim(inbound, &mut storage.buffer_pool);
            storage.account_freed(&freed);
            self.sent.trim(sent);
            self.determinants.trim(position);
        }
    }

    // ---- replay --------------------------------------------------------------------------

    /// Whether any frames are still to be replayed.
    #[inline]
    pub fn has_replay(&self) -> bool {
        self.replay.is_some()
    }

    /// Whether a restarted incarnation has still to receive frames that the previous one received.
    pub fn is_replaying(&self) -> bool {
        self.replay.is_some_and(|replay| !replay.has_only_backlog())
    }

    /// Whether all frames that are still to be replayed arrived during the replay.
    pub fn has_only_backlog(&self) -> bool {
        self.replay.is_some_and(|replay| replay.has_only_backlog())
    }

    /// Starts a backlog: the last frames of the log, of `bytes` bytes together, found no capacity,
    /// and the relay sends these frames from the log as soon as the link takes more.
    pub fn begin_backlog(&mut self, bytes: usize) {
        debug_assert!(self.replay.is_none(), "a replay is in progress");
        self.replay = Some(Replay::of_backlog(self.inbound.last(bytes)));
    }

    /// Whether a replay is in progress, which then sends the last frame of the log, of `bytes`
    /// bytes, in its turn.
    #[inline]
    pub fn defer(&mut self, bytes: usize) -> bool {
        let Some(replay) = &mut self.replay else { return false };
        replay.note_arrival(&self.inbound, bytes);
        true
    }

    /// Channels of the frames that no incarnation has received, as far as these frames are in
    /// memory.
    pub fn undelivered(&self) -> BTreeSet<ChannelKey> {
        self.replay.map_or_else(BTreeSet::new, |replay| replay.undelivered(&self.inbound))
    }

    /// Whether the replay reads this segment soon.
    pub fn is_reading(&self, segment: usize) -> bool {
        self.replay.is_some_and(|replay| replay.is_reading(segment))
    }

    pub fn stop_replay(&mut self, storage: &mut LogStorage) {
        if let Some(replay) = self.replay.take() {
            replay.finish(&mut self.inbound, storage);
        }
    }

    /// Starts the replay for the incarnation of `address` that has attached at log position
    /// `position`: the endpoint receives again every frame after this position.
    pub fn begin_replay(
        &mut self,
        address: Address,
        position: CheckpointPosition,
        output: &mut OutputQueue,
        pool: &mut ChunkPool,
    ) {
        self.resume_at(&position);
        self.replay = Some(Replay::starting_at(&position));
        if let Some(reads) = &self.nondeterminism {
            let end = [reads.complete_end(), 0];
            push_empty(Kind::NondeterminismState, address, end, 0, output, pool);
        }
        // Before the endpoint has sent again all frames that earlier incarnations have sent, it
        // delivers nothing beyond the replay.
        let sent = self.sent_count - position.standing.sent;
        let count = position.determinants_left;
        push_empty(Kind::ReplayStart, address, [0, sent], count, output, pool);
    }

    /// Moves the backlog into the queue `output`: see [`Replay::push_backlog`].
    pub fn push_backlog(
        &mut self,
        address: Address,
        output: &mut OutputQueue,
        pool: &mut ChunkPool,
        storage: &mut LogStorage,
    ) -> ReplayState {
        let Self { replay, inbound, .. } = self;
        let Some(replay) = replay else { return ReplayState::Complete };
        let state = replay.push_backlog(address, inbound, output, pool, storage);
        self.finish_if_complete(state, storage)
    }

    /// Pushes the next piece of the replay into the queue `output`: see [`Replay::push_next`].
    pub fn replay_next(
        &mut self,
        address: Address,
        output: &mut OutputQueue,
        pool: &mut ChunkPool,
        storage: &mut LogStorage,
    ) -> ReplayState {
        let Self { replay, inbound, determinants, .. } = self;
        let Some(replay) = replay else { return ReplayState::Complete };
        let state = replay.push_next(address, (determinants, inbound), output, pool, storage);
        self.finish_if_complete(state, storage)
    }

    /// The frames that direct replay sends next: see [`Replay::direct`].
    pub fn direct(&self) -> impl Iterator<Item = (Header, &[u8])> {
        self.replay.into_iter().flat_map(|replay| replay.direct(&self.inbound))
    }

    /// Advances direct replay: see [`Replay::consume_direct`].
    pub fn consume_direct(
        &mut self,
        address: Address,
        bytes: usize,
        writing: (&mut Writer, &mut ChunkPool),
        storage: &mut LogStorage,
    ) -> ReplayState {
        let Self { replay, inbound, .. } = self;
        let Some(replay) = replay else { return ReplayState::Complete };
        let state = replay.consume_direct(address, inbound, bytes, writing, storage);
        self.finish_if_complete(state, storage)
    }

    fn finish_if_complete(&mut self, state: ReplayState, storage: &mut LogStorage) -> ReplayState {
        if !state.is_incomplete() {
            self.stop_replay(storage);
        }
        state
    }
}
