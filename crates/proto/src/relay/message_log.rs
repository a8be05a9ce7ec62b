//! Message logs: everything that brings a killed process back to its last state, i.e. all frames
//! that its relay gave to the process, the determinants of their delivery, and a digest of each
//! sent frame.
//!
//! A process is deterministic except for the frames that it delivers and the moments of delivery.
//! So a restarted incarnation that receives the same frames, in the same order, at the same polls
//! and the same times ([`Kind::Determinant`]), behaves as the previous one did and sends the same
//! frames. The relay compares the repeated frames with their digests and drops them: no other
//! process notices the restart.
//!
//! The relay *replays* the log ([`super::replay`]): first the number of determinants and the number
//! of sent frames, then each determinant with the frames that it delivered, then the frames that no
//! incarnation has delivered. Frames that arrive during the replay follow in their turn.
//!
//! An incarnation that was restored from a checkpoint image receives only the part of the log after
//! the position of that checkpoint ([`CheckpointPosition`]).
//!
//! What may never happen: a restarted incarnation sends a frame that differs from the original
//! frame, and another process receives it; frames wait for a process that cannot be restarted, and
//! no source is notified.

use alloc::collections::{BTreeMap, BTreeSet};

use crate::id::Address;
use crate::route::byte_queue::ChunkPool;
use crate::route::routing_table::LinkId;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use crate::wire::hello::LogPosition;

use super::byte_log::{ByteLog, Cursor};
use super::checkpoint_position::{CheckpointPosition, CheckpointPositions};
use super::determinant_log::{Determinant, DeterminantLog};
use super::divergence::{SENT_DIGEST_BYTES, SentDigest};
use super::log_storage::{LogLimits, LogStorage};
use super::nondeterminism_copies::NondeterminismCopy;
use super::port::{Piece, Port, PortKind};
use super::recent_channels::ChannelKey;
use super::replay::{ReplayProgress, ReplayState, push_determinant};
use super::segmented_log::SegmentedLog;
use super::{Malformed, Relay, Stop};

/// Memory that all message logs of a relay together may take, in bytes, unless the setting
/// `recover_memory` changes it. Log segments beyond this bound go to a disk, if there is one;
/// without a disk, an endpoint whose log would exceed the bound cannot be restarted any more.
pub const MESSAGE_LOGS_BYTES_MAX: u64 = 4 << 30;

/// Reason for a discarded log that exceeded the memory bound. The next checkpoint of the endpoint
/// ends this state, because logging starts again there.
pub(super) const LOG_TOO_LARGE: &str =
    "what it was given was too much to be kept: it cannot come back";

/// The message logs of all endpoints of a relay.
#[derive(Debug)]
pub(super) struct MessageLogs {
    pub all: BTreeMap<Address, MessageLog>,
    /// Bytes of all logs, in memory and on the disk.
    pub bytes: u64,
    pub storage: LogStorage,
}

impl MessageLogs {
    pub fn new(room: LogLimits) -> Self {
        Self { all: BTreeMap::new(), bytes: 0, storage: LogStorage::new(room) }
    }

    /// The log of the endpoint `address` if the endpoint may be restarted, after `bytes` more bytes
    /// have been accounted. Discards the log and returns `None` if these bytes exceed the bound.
    #[inline]
    pub fn log_mut(
        &mut self,
        address: Address,
        bytes: usize,
    ) -> Option<(&mut MessageLog, &mut LogStorage)> {
        let Self { all, bytes: held, storage } = self;
        let count = all.len();
        let log = all.entry(address).or_default();
        if log.discard_reason.is_some() {
            return None;
        }
        // A log under replay stays, because the endpoint still needs the rest
        // ([`MessageLogs::queue_backlog`] handles a mere backlog). A log stays while the disk
        // writes, too: few frames arrive meanwhile, because inputs wait for the disk.
        let is_over = storage.is_over(*held + bytes as u64, count);
        if is_over && log.replay.is_none() && !storage.is_writing() {
            *held -= log.discard(LOG_TOO_LARGE, storage);
            storage.note_unrecoverable(address, LOG_TOO_LARGE);
            return None;
        }
        *held += bytes as u64;
        Some((log, storage))
    }

    /// Discards the log of `address` for the reason `why`: the endpoint cannot be restarted any
    /// more.
    pub fn discard(&mut self, address: Address, why: &'static str) {
        let Self { all, bytes, storage } = self;
        *bytes -= all.entry(address).or_default().discard(why, storage);
        storage.note_unrecoverable(address, why);
    }

    /// Moves the backlog of an endpoint into the queue of its port if the log would exceed its
    /// bound and is about to be discarded. At most the bytes that peers may send without a grant
    /// wait there. `buffer` holds the pieces that the port sends first. Returns whether the backlog
    /// was moved.
    fn queue_backlog(
        &mut self,
        address: Address,
        bytes: usize,
        port: &mut Port,
        pool: &mut ChunkPool,
        buffer: &[u8],
    ) -> bool {
        let Self { all, bytes: held, storage } = self;
        if !storage.is_over(*held + bytes as u64, all.len()) || storage.is_writing() {
            return false;
        }
        let Some(log) = all.get_mut(&address).filter(|log| log.has_only_backlog()) else {
            return false;
        };
        port.keep(pool, buffer);
        // Frames on the disk follow later.
        let state = log.push_backlog(address, port, pool, storage);
        port.set_replay_state(state);
        true
    }

    /// Appends a frame for an endpoint to its log. Returns whether a replay is in progress, which
    /// sends this frame in its turn; `None` if the endpoint cannot be restarted.
    pub fn append(&mut self, address: Address, frame: &[u8]) -> Option<bool> {
        let (log, storage) = self.log_mut(address, frame.len())?;
        let sealed = log.inbound.push(frame, &mut storage.buffer_pool);
        let is_replaying = log.defer(frame.len());
        if let Some(number) = sealed {
            storage.note_sealed(address, number);
            if !log.is_growth_reported {
                let grown = log.inbound.total().saturating_sub(log.checkpoints.newest().taken);
                log.is_growth_reported = storage.note_growth(address, grown);
            }
            self.write_out();
        }
        Some(is_replaying)
    }

    /// Stops the replay to `address`, whose incarnation has disconnected. Returns the channels of
    /// the frames that no incarnation has received.
    pub fn stop_replay(&mut self, address: Address) -> BTreeSet<ChannelKey> {
        let Self { all, storage, .. } = self;
        let Some(log) = all.get_mut(&address) else { return BTreeSet::new() };
        let undelivered = log.undelivered();
        log.stop_replay(storage);
        undelivered
    }

    /// The position in the log of `address` that matches the log position `standing` of an
    /// endpoint.
    ///
    /// # Errors
    /// If the log has never held this position, or has been trimmed beyond it.
    pub fn checkpoint_position(
        &mut self,
        address: Address,
        standing: LogPosition,
    ) -> Result<CheckpointPosition, &'static str> {
        let Some(log) = self.all.get_mut(&address) else {
            return match standing == LogPosition::default() {
                true => Ok(CheckpointPosition::default()),
                false => Err("it stands where it has never been"),
            };
        };
        let position =
            log.checkpoints.find(standing, &log.determinants, &log.inbound, &log.sent)?;
        log.is_growth_reported = false;
        Ok(position)
    }

    /// Whether all frames that the endpoint has still to receive arrived while it was attached.
    pub fn has_only_backlog(&self, address: Address) -> bool {
        self.all.get(&address).is_some_and(MessageLog::has_only_backlog)
    }

    /// The reason why no incarnation of the endpoint can be restarted, if that is the case.
    pub fn unrecoverable_reason(&self, address: Address) -> Option<&'static str> {
        self.all.get(&address)?.discard_reason
    }
}

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
    /// Progress of the replay to the present incarnation, while a replay is in progress.
    pub replay: Option<ReplayProgress>,
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
    fn discard(&mut self, why: &'static str, storage: &mut LogStorage) -> u64 {
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
}

impl Relay {
    /// Filters a frame of `from`. Returns `Some` if the relay is to forward the frame, with the
    /// digest to log if the sender is recorded, and `None` if the frame ends here: the endpoint
    /// repeats a frame of the previous incarnation, or the frame carries a determinant or recorded
    /// nondeterminism for the relay.
    #[inline]
    pub(super) fn filter_replayed(
        &mut self,
        from: LinkId,
        header: &Header,
        frame: &[u8],
    ) -> Result<Option<Option<SentDigest>>, Stop> {
        if header.kind == Kind::Determinant {
            let determinant = Determinant::of(header).map_err(Stop::Broken)?;
            if let Some(log) = self.log_of(from, determinant.bytes()) {
                log.determinants.push(determinant);
                self.counters.determinant_bytes += determinant.bytes() as u64;
                self.counters.delivered_frames += determinant.frames as u64;
            }
            return Ok(None);
        }
        if header.kind == Kind::Nondeterminism && self.logs.is_some() {
            let outcome = self.handle_nondeterminism(from, header, &frame[HEADER_BYTES..]);
            return outcome.map(|()| None).map_err(Stop::Broken);
        }
        let Some(log) = self.log_of(from, 0) else { return Ok(Some(None)) };
        match log.compare(header, frame) {
            SendComparison::New(sent) => Ok(Some(Some(sent))),
            SendComparison::Repeated => Ok(None),
            SendComparison::Diverged(before) => {
                self.note_divergence(from, before, frame);
                Err(Stop::Broken(Malformed("it does not do again what it did before")))
            }
        }
    }

    /// Handles a divergence: the endpoint at `from` sends `frame`, and the previous incarnation
    /// sent another frame at this position. The endpoint cannot know why its connection ends, and
    /// its next incarnation would diverge again. So the relay reports the frame number to the
    /// endpoint, and both frames to the user.
    #[cold]
    fn note_divergence(&mut self, from: LinkId, before: Option<SentDigest>, frame: &[u8]) {
        let Self { ports, pool, logs, .. } = self;
        let (Some(logs), Some(port)) = (logs, &mut ports[from.0 as usize]) else {
            return;
        };
        let PortKind::Endpoint(address) = port.kind else { return };
        let sent = logs.all.get(&address).map_or(0, |log| log.replayed_sends);
        let which = (address, port.incarnation.unwrap_or(0), sent.saturating_sub(1));
        if let Some(divergence) = before.and_then(|was| logs.describe_divergence(which, was, frame))
        {
            logs.storage.note_diverged(divergence);
        }
        logs.discard(
            address,
            "a new start did not do again what was done before: it cannot come back",
        );
        // The endpoint must be able to read the rest of the frame that it has begun to read.
        let rest = core::mem::take(&mut port.writer.rest);
        port.lose_all(pool);
        port.writer.rest = rest;
        push_determinant(address, Determinant { polls: 0, frames: 0, micros: which.2 }, port, pool);
        port.diverged_frame = Some(which.2);
        self.touch(from);
    }

    /// The number of the diverged frame of the endpoint at `link`, if a divergence ended its input.
    /// The relay reports this number to the endpoint as well, but the link may have no capacity for
    /// the report.
    pub fn diverged_frame(&self, link: LinkId) -> Option<u64> {
        self.port(link).diverged_frame
    }

    /// Logs the digest `sent` of a frame that the relay has forwarded for `from`.
    #[inline]
    pub(super) fn log_sent(&mut self, from: LinkId, sent: Option<SentDigest>) {
        if let Some(sent) = sent
            && let Some(log) = self.log_of(from, SENT_DIGEST_BYTES)
        {
            log.append_sent(sent);
        }
    }

    /// Appends a frame to the log of an endpoint that may be restarted, and sends it if the
    /// endpoint is connected. A disconnected endpoint receives the frame after its restart, or the
    /// source receives Unreachable. The queue has no bound here, because a recorded endpoint must
    /// never make an input wait: frames that find no capacity at once are sent from the log
    /// ([`Relay::keep`]). Returns false if the endpoint cannot be restarted, and then does nothing.
    pub(super) fn forward_logged(
        &mut self,
        to: LinkId,
        bytes: &mut [u8],
        at: usize,
        header: &Header,
    ) -> bool {
        let length = HEADER_BYTES + header.length as usize;
        let Self { ports, pool, logs, .. } = self;
        let (Some(logs), Some(port)) = (logs, &mut ports[to.0 as usize]) else {
            return false;
        };
        let PortKind::Endpoint(address) = port.kind else { return false };
        let is_backlog_queued =
            port.is_replaying && logs.queue_backlog(address, length, port, pool, bytes);
        bytes[at + 6] += 1;
        let Some(is_replaying) = logs.append(address, &bytes[at..at + length]) else {
            bytes[at + 6] -= 1;
            return false;
        };
        self.counters.frames += 1;
        self.counters.bytes += length as u64;
        if is_backlog_queued {
            self.touch(to);
        }
        let port = self.port_mut(to);
        if is_replaying {
            // The replay sends this frame after the frames that already wait.
        } else if port.is_up() {
            port.take(Piece { at, length }, header);
            self.touch(to);
        } else {
            self.record_loss(to, [ChannelKey::of(header)].into());
        }
        true
    }

    /// The log of the endpoint at `link`, with `bytes` more bytes accounted, if the endpoint may be
    /// restarted.
    #[inline]
    pub(super) fn log_of(&mut self, link: LinkId, bytes: usize) -> Option<&mut MessageLog> {
        let logs = self.logs.as_mut()?;
        match self.ports[link.0 as usize].as_ref()?.kind {
            PortKind::Endpoint(address) => logs.log_mut(address, bytes).map(|(log, _)| log),
            _ => None,
        }
    }

    /// Starts the replay to the endpoint at `link`, which has attached at log position `position`:
    /// the endpoint receives again all frames after this position. `is_log_restarted`: logging
    /// starts here, and the log holds none of the frames that the endpoint has received.
    pub(super) fn start_replay(
        &mut self,
        link: LinkId,
        position: CheckpointPosition,
        is_log_restarted: bool,
    ) {
        let Self { ports, pool, logs, .. } = self;
        let (Some(logs), Some(port)) = (logs, &mut ports[link.0 as usize]) else {
            return;
        };
        let PortKind::Endpoint(address) = port.kind else { return };
        logs.drop_incomplete_batch(address);
        let MessageLogs { all, storage, .. } = logs;
        // The entry is created whatever the memory bound: the endpoint is attached and must learn
        // its position.
        let log = all.entry(address).or_default();
        if log.discard_reason.is_none() {
            if is_log_restarted {
                // The sources send these frames again.
                port.lose_all(pool);
            } else {
                // No incarnation has received these pending reports.
                let owed = core::mem::take(&mut port.pending_reports);
                port.discard(pool);
                port.pending_reports = owed;
            }
            log.begin_replay(address, position, port, pool);
            let state = log.replay_next(address, port, pool, storage);
            self.set_replay_state(link, address, state);
        }
    }

    /// Applies the next state of a replay to the port, and ends a replay that cannot be read.
    pub(super) fn set_replay_state(&mut self, link: LinkId, address: Address, state: ReplayState) {
        self.port_mut(link).set_replay_state(state);
        if state == ReplayState::Unreadable {
            self.fail_replay(link, address);
        }
    }

    /// Pushes the next piece of each pending replay whose endpoint has taken most of the previous
    /// piece. The driver calls this once a round, between the turns of other links. Returns whether
    /// there is anything to write.
    pub fn replay_next(&mut self) -> bool {
        let mut has_replayed = false;
        for _ in 0..self.replaying.len() {
            let Some(link) = self.replaying.pop_front() else { break };
            let Self { ports, pool, logs, .. } = self;
            let (Some(logs), Some(port)) = (logs, &mut ports[link.0 as usize]) else {
                continue;
            };
            port.in_replay_queue = false;
            let PortKind::Endpoint(address) = port.kind else { continue };
            let MessageLogs { all, storage, .. } = logs;
            let log = all.get_mut(&address);
            if let Some(log) = log.filter(|_| port.is_replaying && port.is_up()) {
                let state = log.replay_next(address, port, pool, storage);
                self.set_replay_state(link, address, state);
                has_replayed = true;
                self.touch(link);
            }
        }
        has_replayed
    }

    /// Resumes a replay: the disk has read the next segment that the endpoint at `link` needs.
    pub(super) fn resume_replay(&mut self, link: LinkId) {
        let Some(Some(port)) = self.ports.get_mut(link.0 as usize) else { return };
        port.awaits_disk = false;
        if port.needs_replay() {
            port.in_replay_queue = true;
            self.replaying.push_back(link);
        }
    }

    /// Whether [`Relay::replay_next`] has a replay to continue.
    pub fn has_replay_work(&self) -> bool {
        !self.replaying.is_empty()
    }

    /// Stops the replay to the incarnation at `link`, which has disconnected.
    pub(super) fn stop_replay(&mut self, link: LinkId) {
        let port = self.port_mut(link);
        port.set_replay_state(ReplayState::Complete);
        if let (PortKind::Endpoint(address), Some(logs)) = (port.kind, &mut self.logs) {
            let undelivered = logs.stop_replay(address);
            self.record_loss(link, undelivered);
        }
    }

    /// Starts draining the link of a killed process whose next incarnation has connected: the relay
    /// accepts all remaining frames at once, even if outputs are full, because other processes may
    /// already know what follows from these frames. The driver hands in the rest of the input and
    /// then calls [`Relay::suspend`].
    pub fn begin_drain(&mut self, link: LinkId) {
        self.dequeue_input(link);
        self.port_mut(link).is_draining = true;
    }
}
