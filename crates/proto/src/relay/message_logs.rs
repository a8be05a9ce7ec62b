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
use alloc::vec::Vec;

use super::checkpoint_position::CheckpointPosition;
use super::divergence::{Divergence, SentDigest};
use super::log_storage::{LogLimits, LogStorage, UNREADABLE};
use super::message_log::MessageLog;
use super::nondeterminism_copies::NondeterminismCopy;
use super::output_queue::OutputQueue;
use super::recent_channels::ChannelKey;
use super::replay_state::ReplayState;
use super::segment_buffers::SegmentId;
use super::writer::Writer;
use crate::id::Address;
use crate::route::byte_queue::ChunkPool;
use crate::wire::Malformed;
use crate::wire::frame::Header;
use crate::wire::hello::LogPosition;
use crate::wire::nondeterminism_frame::NondeterminismFrame;

/// Memory that all message logs of a relay together may take, in bytes, unless the setting
/// `recover_memory` changes it. Log segments beyond this bound go to a disk, if there is one;
/// without a disk, an endpoint whose log would exceed the bound cannot be restarted any more.
pub const MESSAGE_LOGS_BYTES_MAX: u64 = 4 << 30;

/// Reason for a discarded log that exceeded the memory bound. The next checkpoint of the endpoint
/// ends this state, because logging starts again there.
pub(super) const LOG_TOO_LARGE: &str =
    "its message log is larger than its bound: it cannot be restarted";

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
        if is_over && !log.has_replay() && !storage.is_writing() {
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

    /// Moves the backlog of an endpoint into its queue `output` if the log would exceed its bound
    /// and is about to be discarded. At most the bytes that peers may send without a grant wait
    /// there. `buffer` holds the pieces that the port sends first. Returns the next state of the
    /// replay if the backlog was moved.
    pub fn queue_backlog(
        &mut self,
        address: Address,
        bytes: usize,
        output: &mut OutputQueue,
        pool: &mut ChunkPool,
        buffer: &[u8],
    ) -> Option<ReplayState> {
        let Self { all, bytes: held, storage } = self;
        if !storage.is_over(*held + bytes as u64, all.len()) || storage.is_writing() {
            return None;
        }
        let log = all.get_mut(&address).filter(|log| log.has_only_backlog())?;
        output.keep(pool, buffer);
        // Frames on the disk follow later.
        Some(log.push_backlog(address, output, pool, storage))
    }

    /// Appends a frame for an endpoint to its log. Returns whether a replay is in progress, which
    /// sends this frame in its turn; `None` if the endpoint cannot be restarted.
    pub fn append(&mut self, address: Address, frame: &[u8]) -> Option<bool> {
        let (log, storage) = self.log_mut(address, frame.len())?;
        let sealed = log.inbound.push(frame, &mut storage.buffer_pool);
        let is_replaying = log.defer(frame.len());
        if let Some(number) = sealed {
            storage.note_sealed(address, number);
            log.note_growth(address, storage);
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
                false => Err("its position is beyond its log"),
            };
        };
        log.checkpoint_position(standing)
    }

    /// Whether all frames that the endpoint has still to receive arrived while it was attached.
    pub fn has_only_backlog(&self, address: Address) -> bool {
        self.all.get(&address).is_some_and(MessageLog::has_only_backlog)
    }

    /// The reason why no incarnation of the endpoint can be restarted, if that is the case.
    pub fn unrecoverable_reason(&self, address: Address) -> Option<&'static str> {
        self.all.get(&address)?.discard_reason
    }

    /// Drops the log before the position of `determinants`: see [`MessageLog::trim`].
    pub fn trim(&mut self, address: Address, determinants: u64) {
        let Self { all, bytes, storage } = self;
        let Some(log) = all.get_mut(&address) else { return };
        let before = log.bytes();
        log.trim(determinants, storage);
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

    // ---- replay --------------------------------------------------------------------------

    /// Starts the replay to an endpoint that has attached at `position`, and pushes its first piece
    /// into the queue `output`, from which everything else has been dropped. Returns the next state
    /// of the replay.
    pub fn begin_replay(
        &mut self,
        address: Address,
        position: CheckpointPosition,
        output: &mut OutputQueue,
        pool: &mut ChunkPool,
    ) -> ReplayState {
        let Self { all, storage, .. } = self;
        // The entry is created whatever the memory bound: the endpoint is attached and must learn
        // its position.
        let log = all.entry(address).or_default();
        log.begin_replay(address, position, output, pool);
        log.replay_next(address, output, pool, storage)
    }

    /// Pushes the next piece of a replay: see [`MessageLog::replay_next`]. `None`: the endpoint has
    /// no log.
    pub fn replay_next(
        &mut self,
        address: Address,
        output: &mut OutputQueue,
        pool: &mut ChunkPool,
    ) -> Option<ReplayState> {
        let log = self.all.get_mut(&address)?;
        Some(log.replay_next(address, output, pool, &mut self.storage))
    }

    /// Advances direct replay to `address`: see [`MessageLog::consume_direct`].
    pub fn consume_direct(
        &mut self,
        address: Address,
        bytes: usize,
        writing: (&mut Writer, &mut ChunkPool),
    ) -> ReplayState {
        let Some(log) = self.all.get_mut(&address) else { return ReplayState::Complete };
        log.consume_direct(address, bytes, writing, &mut self.storage)
    }

    /// Starts a backlog of `bytes` bytes, which the endpoint `address` just received and whose link
    /// had no capacity for them. Returns false if the relay keeps no log of the endpoint.
    pub fn begin_backlog(&mut self, address: Address, bytes: usize) -> bool {
        let log = self.all.get_mut(&address).filter(|log| log.discard_reason.is_none());
        log.map(|log| log.begin_backlog(bytes)).is_some()
    }

    // ---- disk ----------------------------------------------------------------------------

    /// Requests writes of full segments until enough memory will be free.
    pub fn write_out(&mut self) {
        while self.storage.may_write(self.bytes, self.all.len()) {
            let Some((address, number)) = self.storage.pop_sealed() else { break };
            let id = self.storage.next_id();
            let log = self.all.get_mut(&address);
            let Some(bytes) = log.and_then(|it| it.inbound.begin_write(number, id)) else {
                continue;
            };
            self.storage.write(address, number, bytes);
        }
    }

    /// Whether `bytes` more bytes exceed the memory bound while the disk is writing.
    pub fn must_wait(&self, bytes: usize) -> bool {
        self.storage.is_writing() && self.storage.is_over(self.bytes + bytes as u64, self.all.len())
    }

    pub fn handle_written(&mut self, id: SegmentId, is_written: bool) {
        let storage = &mut self.storage;
        let Some(io) = storage.end_write(id, is_written) else { return };
        if let Some(log) = self.all.get_mut(&io.address) {
            let is_read = log.is_reading(io.number);
            let buffer_pool = &mut storage.buffer_pool;
            let is_there = log.inbound.holds(io.number, id);
            let away = log.inbound.finish_write(io.number, id, is_written, is_read, buffer_pool);
            storage.evicted_bytes += away.unwrap_or(0) as u64;
            if is_there && !is_written {
                storage.disk_bytes -= io.bytes;
            }
        }
        self.write_out();
    }

    /// The endpoint of the segment that was read, and whether the read succeeded.
    pub fn handle_read(
        &mut self,
        id: SegmentId,
        bytes: Option<Vec<u8>>,
    ) -> Option<(Address, bool)> {
        let io = self.storage.end_read(id)?;
        let log = self.all.get_mut(&io.address)?;
        if !log.inbound.holds(io.number, id) {
            return None;
        }
        let is_wanted = log.is_reading(io.number);
        // No segment is empty, so a failed read fails the length check.
        let bytes = bytes.unwrap_or_default();
        let buffer_pool = &mut self.storage.buffer_pool;
        let is_good = log.inbound.finish_read(io.number, id, bytes, is_wanted, buffer_pool);
        Some((io.address, is_good))
    }

    // ---- divergence ----------------------------------------------------------------------

    /// Handles that the incarnation of an endpoint sends `frame`, and the previous incarnation sent
    /// another frame at this position, `before` (`None`: its digest is missing). Reports both
    /// frames to the user, and discards the log: the next incarnation would diverge again. Returns
    /// the number of the frame.
    #[cold]
    pub fn note_divergence(
        &mut self,
        (who, incarnation): (Address, u32),
        before: Option<SentDigest>,
        frame: &[u8],
    ) -> u64 {
        let sent = self.all.get(&who).map_or(0, MessageLog::replayed_sends);
        let number = sent.saturating_sub(1);
        let which = (who, incarnation, number);
        let divergence = before
            .and_then(|was| Divergence::of(which, was, self.find_sent_frame(who, was), frame));
        if let Some(divergence) = divergence {
            self.storage.note_diverged(divergence);
        }
        self.discard(who, "its replay sent something else than before: it cannot be restarted");
        number
    }

    /// The original frame itself, from the log of its receiver, if the frame is in memory there.
    fn find_sent_frame(&self, source: Address, sent: SentDigest) -> Option<(Header, Vec<u8>)> {
        sent.find_in(source, self.all.get(&sent.target())?.inbound.in_memory())
    }

    // ---- recorded nondeterminism -----------------------------------------------------------

    /// Starts the copy for an endpoint, unless its log has been discarded. Called before the
    /// endpoint attaches.
    pub fn keep_nondeterminism(&mut self, address: Address) {
        let MessageLog { discard_reason, nondeterminism: reads, .. } =
            self.all.entry(address).or_default();
        if discard_reason.is_none() && reads.is_none() {
            *reads = Some(NondeterminismCopy::default());
        }
    }

    /// Drops the incomplete batch of earlier incarnations of the endpoint, which will send nothing
    /// more.
    pub fn drop_incomplete_batch(&mut self, address: Address) {
        let reads = self.all.get_mut(&address).and_then(|log| log.nondeterminism.as_mut());
        if let Some(reads) = reads {
            let before = reads.bytes();
            reads.drop_incomplete();
            self.bytes -= before - reads.bytes();
        }
    }

    /// Handles a piece of an endpoint's record, or the position before which the record is not
    /// needed. Returns how many bytes were added.
    ///
    /// # Errors
    /// If the relay has not asked for the record, or the piece contradicts the copy.
    pub fn handle_nondeterminism(
        &mut self,
        address: Address,
        polls: u64,
        said: NondeterminismFrame,
    ) -> Result<usize, Malformed> {
        const UNASKED: Malformed =
            Malformed("a nondeterminism record that this relay does not keep");
        let log = self.all.entry(address).or_default();
        let reads = log.nondeterminism.as_mut().ok_or(UNASKED)?;
        let (from, bytes, is_full, has_more) = match said {
            NondeterminismFrame::Append { from, bytes, is_full, has_more } => {
                (from, bytes, is_full, has_more)
            }
            NondeterminismFrame::Trim(place) => {
                let before = reads.bytes();
                reads.trim(place);
                self.bytes -= before - reads.bytes();
                return Ok(0);
            }
        };
        let news = reads.new_bytes(from, bytes)?;
        let news = &bytes[bytes.len() - news..];
        let end = from + bytes.len() as u64;
        // Discards the log, with this copy, if the new bytes exceed the memory bound.
        let has_room = self.log_mut(address, news.len()).is_some();
        let log = self.all.get_mut(&address);
        let Some(reads) = log.and_then(|log| log.nondeterminism.as_mut()) else {
            return Ok(0);
        };
        if has_room {
            reads.append(news);
        }
        if !has_more {
            reads.complete(end, polls, is_full);
        }
        if !has_room {
            reads.skip(end);
            return Ok(0);
        }
        Ok(news.len())
    }
}
