//! What brings a process that was killed back to where it was: all that its relay has given it, when it took that in,
//! and what it has sent since.
//!
//! A process is deterministic but for what it takes in, and when. So a new start of it that is given the same frames,
//! in the same order, at the same polls and the same times ([`Kind::Determinant`]), does the same and sends the same. What the
//! earlier start has sent already is compared and goes nowhere: nobody else notices.
//!
//! It is *told* what was ([`super::replay`]): first how many determinants there are and how many frames it has sent, then each
//! determinant with the frames that it took in, then the frames that nobody has taken in yet. What comes for it meanwhile is told in
//! its turn.
//!
//! One that stands where an image of it was taken is told what came after that ([`CheckpointPosition`]).
//!
//! What may never happen: a new start sends something else than the earlier one, and anybody is given it; frames wait for
//! one that cannot come back, and nobody is told.

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

/// Memory that all logs of a relay together may take, unless the user says otherwise. What is beyond it goes to a disk,
/// if there is one; otherwise whose log would need more can come back no longer.
pub const MESSAGE_LOGS_BYTES_MAX: u64 = 4 << 30;

/// Why there is nothing of one for which there was not enough room. That ends with its next image.
pub(super) const LOG_TOO_LARGE: &str =
    "what it was given was too much to be kept: it cannot come back";

/// The logs of all endpoints of a relay.
#[derive(Debug)]
pub(super) struct MessageLogs {
    pub all: BTreeMap<Address, MessageLog>,
    /// What all of them take, wherever it lies.
    pub bytes: u64,
    pub storage: LogStorage,
}

impl MessageLogs {
    pub fn new(room: LogLimits) -> Self {
        Self { all: BTreeMap::new(), bytes: 0, storage: LogStorage::new(room) }
    }

    /// Of an endpoint, if it may come back; there is room for `bytes` more.
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
        // Of one that is being told it the rest is still needed ([`MessageLogs::queue_backlog`] when it is not). Little comes while the
        // disk is busy as well: inputs wait for that.
        let is_over = storage.is_over(*held + bytes as u64, count);
        if is_over && log.replay.is_none() && !storage.is_writing() {
            *held -= log.discard(LOG_TOO_LARGE, storage);
            storage.note_unrecoverable(address, LOG_TOO_LARGE);
            return None;
        }
        *held += bytes as u64;
        Some((log, storage))
    }

    /// It may come back no longer.
    pub fn discard(&mut self, address: Address, why: &'static str) {
        let Self { all, bytes, storage } = self;
        *bytes -= all.entry(address).or_default().discard(why, storage);
        storage.note_unrecoverable(address, why);
    }

    /// One that is only behind is told the rest at once, by its queue, if too much is kept for it to come back: so much waits
    /// for it as its peers may send unasked. `buffer`: of the pieces that go there first. Whether something was put there.
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
        // What lies on the disk comes later.
        let state = log.push_backlog(address, port, pool, storage);
        port.set_replay_state(state);
        true
    }

    /// A frame is given to an endpoint. Whether it is being told what was: then it hears this in its turn. `None`: it may not come
    /// back.
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

    /// Its present start has gone. Channels of frames that nobody was given.
    pub fn stop_replay(&mut self, address: Address) -> BTreeSet<ChannelKey> {
        let Self { all, storage, .. } = self;
        let Some(log) = all.get_mut(&address) else { return BTreeSet::new() };
        let undelivered = log.undelivered();
        log.stop_replay(storage);
        undelivered
    }

    /// The place in the log of an endpoint where it says it stands.
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

    /// Whether all that an endpoint is still to be told has come while it was there.
    pub fn has_only_backlog(&self, address: Address) -> bool {
        self.all.get(&address).is_some_and(MessageLog::has_only_backlog)
    }

    /// Why no new start of an endpoint can be brought to where it was, if none can.
    pub fn unrecoverable_reason(&self, address: Address) -> Option<&'static str> {
        self.all.get(&address)?.discard_reason
    }
}

/// See the module head.
#[derive(Debug, Default)]
pub(super) struct MessageLog {
    /// Why there is nothing of it.
    pub discard_reason: Option<&'static str>,
    /// Frames that were given to it, in order.
    pub inbound: SegmentedLog,
    /// When it has taken in how many of them.
    pub determinants: DeterminantLog,
    /// Of each frame that it has sent what is kept of it,
    pub sent: ByteLog,
    /// and how many these are.
    pub sent_count: u64,
    /// Of these, how many its present start has sent, and where the next one is.
    replayed_sends: u64,
    next_sent_digest: Cursor,
    /// What its present start is still to be told.
    pub replay: Option<ReplayProgress>,
    /// What its program has read of clocks, if it is on another node.
    pub nondeterminism: Option<NondeterminismCopy>,
    /// Where starts of it have stood.
    pub checkpoints: CheckpointPositions,
    /// It is said that much was given to it since.
    is_growth_reported: bool,
}

/// A frame that an endpoint sends, compared with what its earlier start has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendComparison {
    /// The earlier one had not come so far.
    New(SentDigest),
    /// The same.
    Repeated,
    /// Something else than this.
    Diverged(Option<SentDigest>),
}

impl MessageLog {
    /// Of one that stands here, without what led there.
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

    /// Nothing is kept of it any more. So many bytes were.
    fn discard(&mut self, why: &'static str, storage: &mut LogStorage) -> u64 {
        let bytes = self.bytes();
        let end = self.inbound.end();
        let freed = self.inbound.trim(end, &mut storage.buffer_pool);
        storage.account_freed(&freed);
        let reads = self.nondeterminism.as_ref().map(NondeterminismCopy::dropped);
        *self = Self { discard_reason: Some(why), nondeterminism: reads, ..Self::default() };
        bytes
    }

    /// A start of it is there that has sent all that is known there.
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

    /// It has been passed on.
    pub fn append_sent(&mut self, sent: SentDigest) {
        self.sent.push(&sent.bytes());
        self.sent_count += 1;
        self.replayed_sends += 1;
    }
}

impl Relay {
    /// A frame of `from`: whether it goes on its way, and then what is kept of it. It does not if the endpoint only does again what
    /// it did before, or tells of what it has taken in.
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

    /// The endpoint at `from` sends `frame` where it was another one before. It may not know why its connection ends, and whoever
    /// comes after it would do the same: it is told which frame that was, and the user what both are.
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
        // What it has begun to read it must be able to end.
        let rest = core::mem::take(&mut port.writer.rest);
        port.lose_all(pool);
        port.writer.rest = rest;
        push_determinant(address, Determinant { polls: 0, frames: 0, micros: which.2 }, port, pool);
        port.diverged_frame = Some(which.2);
        self.touch(from);
    }

    /// The frame of the endpoint at `link` that was another one before: why its input was broken. It is told so, but maybe there
    /// is no room for that in front of it.
    pub fn diverged_frame(&self, link: LinkId) -> Option<u64> {
        self.port(link).diverged_frame
    }

    /// A frame of `from` is on its way, of which this is kept.
    #[inline]
    pub(super) fn log_sent(&mut self, from: LinkId, sent: Option<SentDigest>) {
        if let Some(sent) = sent
            && let Some(log) = self.log_of(from, SENT_DIGEST_BYTES)
        {
            log.append_sent(sent);
        }
    }

    /// Gives a frame to an endpoint that may come back; one that is away gets it then, or its source hears that it never will.
    /// It has no bound, for whoever is recorded must not have to wait: what finds no room at once it is told out of what is kept
    /// ([`Relay::keep`]). False: it may not come back.
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
            // In its turn: as soon as it has taken what waits already.
        } else if port.is_up() {
            port.take(Piece { at, length }, header);
            self.touch(to);
        } else {
            self.record_loss(to, [ChannelKey::of(header)].into());
        }
        true
    }

    /// The log of the endpoint at `link`, with room for so many bytes more, if it may come back.
    #[inline]
    pub(super) fn log_of(&mut self, link: LinkId, bytes: usize) -> Option<&mut MessageLog> {
        let logs = self.logs.as_mut()?;
        match self.ports[link.0 as usize].as_ref()?.kind {
            PortKind::Endpoint(address) => logs.log_mut(address, bytes).map(|(log, _)| log),
            _ => None,
        }
    }

    /// The endpoint at `link` has attached, and stands at `position`: it is given once more all that it was given after that.
    /// `is_log_restarted`: of what was given to it until now nothing is kept.
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
        // Whatever there is room for: it is there, and must hear how it stands.
        let log = all.entry(address).or_default();
        if log.discard_reason.is_none() {
            if is_log_restarted {
                // Its sources send it again.
                port.lose_all(pool);
            } else {
                // Nobody has given it that yet.
                let owed = core::mem::take(&mut port.pending_reports);
                port.discard(pool);
                port.pending_reports = owed;
            }
            log.begin_replay(address, position, port, pool);
            let state = log.replay_next(address, port, pool, storage);
            self.set_replay_state(link, address, state);
        }
    }

    /// How it goes on for an endpoint that is told what was.
    pub(super) fn set_replay_state(&mut self, link: LinkId, address: Address, state: ReplayState) {
        self.port_mut(link).set_replay_state(state);
        if state == ReplayState::Unreadable {
            self.fail_replay(link, address);
        }
    }

    /// Tells restarts of endpoints the next piece of what was, once each: those that have taken most of the one before. To be
    /// called once in each round, between others' turns. Whether anything is to be written.
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

    /// What the endpoint at `link` is told next has been read from the disk.
    pub(super) fn resume_replay(&mut self, link: LinkId) {
        let Some(Some(port)) = self.ports.get_mut(link.0 as usize) else { return };
        port.awaits_disk = false;
        if port.needs_replay() {
            port.in_replay_queue = true;
            self.replaying.push_back(link);
        }
    }

    /// Whether [`Relay::replay_next`] has something to do.
    pub fn has_replay_work(&self) -> bool {
        !self.replaying.is_empty()
    }

    /// The start at `link` that was being told what was has gone.
    pub(super) fn stop_replay(&mut self, link: LinkId) {
        let port = self.port_mut(link);
        port.set_replay_state(ReplayState::Complete);
        if let (PortKind::Endpoint(address), Some(logs)) = (port.kind, &mut self.logs) {
            let undelivered = logs.stop_replay(address);
            self.record_loss(link, undelivered);
        }
    }

    /// The process at `link` has been killed, and its next start is there: what it has still said is taken as it comes, for
    /// whatever follows from it may be known already. To be followed by the rest of its input, and [`Relay::suspend`].
    pub fn begin_drain(&mut self, link: LinkId) {
        self.dequeue_input(link);
        self.port_mut(link).is_draining = true;
    }
}
