//! Replay of a message log to an endpoint: a restarted incarnation receives everything that the
//! previous one received, and a slow endpoint receives the frames that found no capacity.
//!
//! The relay replays to a restarted incarnation piece by piece through the queue of its port: each
//! determinant, then the frames that the previous incarnation delivered with this determinant
//! ([`Relay::replay_next`]). After the last determinant, and whenever the endpoint merely has a
//! backlog, replay is *direct*: the link writes frames straight out of the log segments that hold
//! them ([`MessageLog::direct`]). So the message log of an endpoint that may be restarted is also
//! its output queue, and a frame that finds no capacity at once is not copied a second time.
//!
//! What enters: frames that found no capacity, and the number of bytes that the link wrote. What
//! leaves: determinants and frames, in the order in which the endpoint received them. What may
//! never happen: replay omits or repeats a frame; the queue and direct replay interleave (the link
//! empties the queue first, and the relay puts nothing else into the queue while replay is
//! incomplete).

use alloc::collections::BTreeSet;

use crate::id::Address;
use crate::route::byte_queue::ChunkPool;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};

use super::byte_log::Cursor;
use super::checkpoint_position::CheckpointPosition;
use super::determinant_log::Determinant;
use super::log_storage::{LogStorage, READ_AHEAD};
use super::message_log::{MessageLog, MessageLogs};
use super::port::{Port, Writer};
use super::recent_channels::ChannelKey;
use super::segmented_log::{FrameLookup, SegmentPosition};
use super::undeliverable::empty;

/// Bytes of replayed frames that wait in the queue of an endpoint, approximately: the capacity of
/// its shared-memory ring. Direct replay writes as many bytes before other links get their turn.
pub(super) const REPLAY_BYTES_MAX: usize = 256 << 10;

/// Progress of the replay to an endpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplayProgress {
    determinants: Cursor,
    determinants_left: u32,
    /// Frames of the last replayed determinant that are still to be replayed.
    frames_left: u32,
    /// Log position of the next frame to replay.
    inbound: SegmentPosition,
    /// Number of the first segment that may still be cached in memory: replay has evicted the
    /// earlier ones.
    left: usize,
    /// Log position of the first frame that arrived during the replay: no incarnation has received
    /// this frame or a later one. `None`: no frame has arrived.
    new: Option<SegmentPosition>,
}

/// What the relay does next for an endpoint under replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplayState {
    /// More frames follow, through the queue of the port.
    Queued,
    /// More frames follow, which the link writes straight out of the log segments.
    Direct,
    /// More frames follow, and the disk has still to read the next segment.
    AwaitsDisk,
    Complete,
    /// The rest of the log cannot be read.
    Unreadable,
}

impl ReplayProgress {
    fn is_direct(&self) -> bool {
        self.determinants_left == 0 && self.frames_left == 0
    }
}

impl MessageLog {
    /// Whether a restarted incarnation has still to receive frames that the previous one received.
    pub fn is_replaying(&self) -> bool {
        self.replay.is_some() && !self.has_only_backlog()
    }

    /// Starts a backlog: the last frames of the log, of `bytes` bytes together, found no capacity,
    /// and the relay sends these frames from the log as soon as the link takes more.
    pub fn begin_backlog(&mut self, bytes: usize) {
        debug_assert!(self.replay.is_none(), "it is told something already");
        let inbound = self.inbound.last(bytes);
        let (left, new) = (inbound.segment, Some(inbound));
        let determinants = Cursor::default();
        self.replay = Some(ReplayProgress {
            determinants,
            determinants_left: 0,
            frames_left: 0,
            inbound,
            left,
            new,
        });
    }

    /// Whether a replay is in progress, which then sends the last frame of the log, of `bytes`
    /// bytes, in its turn.
    #[inline]
    pub fn defer(&mut self, bytes: usize) -> bool {
        let Some(replay) = &mut self.replay else { return false };
        if replay.new.is_none() {
            replay.new = Some(self.inbound.last(bytes));
        }
        true
    }

    /// Whether all frames that are still to be replayed arrived during the replay.
    pub fn has_only_backlog(&self) -> bool {
        self.replay.as_ref().is_some_and(|replay| {
            replay.is_direct() && replay.new.is_some_and(|new| replay.inbound >= new)
        })
    }

    /// Moves the frames that direct replay would send into the queue of the port, as far as these
    /// frames are in memory, and returns the next state of the replay.
    pub fn push_backlog(
        &mut self,
        address: Address,
        port: &mut Port,
        pool: &mut ChunkPool,
        storage: &mut LogStorage,
    ) -> ReplayState {
        while let Some(replay) = &mut self.replay
            && let FrameLookup::Frame(header, frame) = self.inbound.find(&mut replay.inbound)
        {
            replay.inbound.advance(frame.len());
            port.push_frame(pool, frame, &header);
        }
        self.next_state(address, storage)
    }

    /// Channels of the frames that no incarnation has received, as far as these frames are in
    /// memory.
    pub fn undelivered(&self) -> BTreeSet<ChannelKey> {
        let Some(ReplayProgress { inbound, new: Some(new), .. }) = self.replay else {
            return BTreeSet::new();
        };
        let mut place = inbound.max(new);
        let mut undelivered = BTreeSet::new();
        while let FrameLookup::Frame(header, frame) = self.inbound.find(&mut place) {
            place.advance(frame.len());
            undelivered.insert(ChannelKey::of(&header));
        }
        undelivered.retain(|entry| entry.channel().is_some());
        undelivered
    }

    /// Whether the replay reads this segment now or within the next [`READ_AHEAD`] segments.
    pub fn is_reading(&self, segment: usize) -> bool {
        let first = |replay: &ReplayProgress| replay.inbound.segment;
        self.replay.as_ref().map(first).is_some_and(|at| (at..at + READ_AHEAD).contains(&segment))
    }

    pub fn stop_replay(&mut self, storage: &mut LogStorage) {
        if let Some(ReplayProgress { inbound, left, .. }) = self.replay.take() {
            self.inbound.evict(left..inbound.segment + READ_AHEAD, &mut storage.buffer_pool);
        }
    }

    /// Requests from the disk the next [`READ_AHEAD`] segments that replay needs, and evicts the
    /// segments that replay has passed.
    fn fetch(&mut self, address: Address, storage: &mut LogStorage) {
        let Some(ReplayProgress { inbound, left, .. }) = &mut self.replay else { return };
        let at = inbound.segment;
        self.inbound.evict(core::mem::replace(left, at)..at, &mut storage.buffer_pool);
        for number in at..at + READ_AHEAD {
            if let Some((id, length)) = self.inbound.begin_read(number) {
                storage.fetch(address, number, id, length);
            }
        }
    }

    /// Starts the replay for the incarnation of `address` that has attached at log position
    /// `position`: the endpoint receives again every frame after this position.
    pub fn begin_replay(
        &mut self,
        address: Address,
        position: CheckpointPosition,
        port: &mut Port,
        pool: &mut ChunkPool,
    ) {
        self.resume_at(&position);
        // Each determinant takes at least three bytes of the log memory, so the count fits into 32
        // bits unless the log of this endpoint takes more than 12 GiB (`recover_memory` is 4 GiB by
        // default).
        let determinants_left = (self.determinants.count() - position.standing.determinants) as u32;
        let (determinants, inbound) = (position.determinants, position.inbound);
        let left = inbound.segment;
        let new = None;
        self.replay = Some(ReplayProgress {
            determinants,
            determinants_left,
            frames_left: 0,
            inbound,
            left,
            new,
        });
        if let Some(reads) = &self.nondeterminism {
            push_empty(Kind::Nondeterminism, address, [reads.complete_end(), 0], 0, port, pool);
        }
        // The opening determinant carries the number of sent frames: before the endpoint has sent
        // these frames again it delivers nothing beyond the replay.
        let sent = self.sent_count - position.standing.sent;
        let opening = Determinant { polls: 0, frames: determinants_left, micros: sent };
        push_determinant(address, opening, port, pool);
    }

    /// Pushes the next piece of the replay into the queue of the port, as far as the log is in
    /// memory, and returns the next state of the replay.
    pub fn replay_next(
        &mut self,
        address: Address,
        port: &mut Port,
        pool: &mut ChunkPool,
        storage: &mut LogStorage,
    ) -> ReplayState {
        self.fetch(address, storage);
        while let Some(replay) = self.replay.as_mut().filter(|replay| !replay.is_direct()) {
            if port.waiting_bytes() >= REPLAY_BYTES_MAX {
                return ReplayState::Queued;
            }
            if replay.frames_left == 0 {
                replay.determinants_left -= 1;
                if let Some(determinant) = self.determinants.read(&mut replay.determinants) {
                    replay.frames_left = determinant.frames;
                    push_determinant(address, determinant, port, pool);
                }
                continue;
            }
            match self.inbound.find(&mut replay.inbound) {
                FrameLookup::Frame(header, frame) => {
                    replay.frames_left -= 1;
                    replay.inbound.advance(frame.len());
                    port.push_frame(pool, frame, &header);
                }
                FrameLookup::OnDisk => {
                    self.fetch(address, storage);
                    return ReplayState::AwaitsDisk;
                }
                FrameLookup::Corrupt => return ReplayState::Unreadable,
                FrameLookup::End => self.stop_replay(storage),
            }
        }
        self.next_state(address, storage)
    }

    /// The next state of a replay that is direct or complete.
    fn next_state(&mut self, address: Address, storage: &mut LogStorage) -> ReplayState {
        let Some(replay) = &mut self.replay else { return ReplayState::Complete };
        let found = match self.inbound.find(&mut replay.inbound) {
            FrameLookup::Frame(..) => ReplayState::Direct,
            FrameLookup::OnDisk => ReplayState::AwaitsDisk,
            FrameLookup::Corrupt => ReplayState::Unreadable,
            FrameLookup::End => ReplayState::Complete,
        };
        match found {
            ReplayState::Complete => self.stop_replay(storage),
            _ => self.fetch(address, storage),
        }
        found
    }

    /// The frames that direct replay sends next, as far as they are in memory: up to the frame that
    /// reaches [`REPLAY_BYTES_MAX`].
    pub fn direct(&self) -> impl Iterator<Item = (Header, &[u8])> {
        let replay = self.replay.filter(ReplayProgress::is_direct);
        let mut place = replay.map(|replay| replay.inbound);
        let mut bytes = 0;
        core::iter::from_fn(move || {
            let place = place.as_mut().filter(|_| bytes < REPLAY_BYTES_MAX)?;
            let FrameLookup::Frame(header, frame) = self.inbound.find(place) else { return None };
            place.advance(frame.len());
            bytes += frame.len();
            Some((header, frame))
        })
    }

    /// Advances direct replay by the `bytes` bytes that `writer` has written, gives `writer` the
    /// rest of the last frame, and returns the next state of the replay.
    fn consume_direct(
        &mut self,
        address: Address,
        bytes: usize,
        writer: &mut Writer,
        pool: &mut ChunkPool,
        storage: &mut LogStorage,
    ) -> ReplayState {
        let mut left = bytes;
        while let Some(replay) = self.replay.as_mut().filter(|_| left > 0) {
            // The driver writes only the frames that `slices` returns, and these frames are in
            // memory.
            let FrameLookup::Frame(header, frame) = self.inbound.find(&mut replay.inbound) else {
                panic!("only what is in memory can be sent");
            };
            replay.inbound.advance(frame.len());
            writer.recent_channels.add(frame.len(), ChannelKey::of(&header));
            if let Some(rest) = frame.get(left..) {
                writer.rest.push(pool, rest);
            }
            left = left.saturating_sub(frame.len());
        }
        match self.next_state(address, storage) {
            // The endpoint keeps pace: direct replay goes on after other links have had their turn.
            ReplayState::Direct if bytes >= REPLAY_BYTES_MAX => ReplayState::Queued,
            state => state,
        }
    }
}

impl MessageLogs {
    /// Advances direct replay to `address`: see [`MessageLog::consume_direct`].
    pub fn consume_direct(
        &mut self,
        address: Address,
        bytes: usize,
        writer: &mut Writer,
        pool: &mut ChunkPool,
    ) -> ReplayState {
        let Self { all, storage, .. } = self;
        let log = all.get_mut(&address);
        log.map_or(ReplayState::Complete, |it| {
            it.consume_direct(address, bytes, writer, pool, storage)
        })
    }

    /// Starts a backlog of `bytes` bytes, which the endpoint `address` just received and whose link
    /// had no capacity for them. Returns false if the relay keeps no log of the endpoint.
    pub fn begin_backlog(&mut self, address: Address, bytes: usize) -> bool {
        let log = self.all.get_mut(&address).filter(|log| log.discard_reason.is_none());
        log.map(|log| log.begin_backlog(bytes)).is_some()
    }
}

pub(super) fn push_determinant(
    address: Address,
    determinant: Determinant,
    port: &mut Port,
    pool: &mut ChunkPool,
) {
    let Determinant { polls, frames, micros } = determinant;
    push_empty(Kind::Determinant, address, [polls, micros], frames, port, pool);
}

fn push_empty(
    kind: Kind,
    address: Address,
    [sequence, delivered]: [u64; 2],
    credit: u32,
    port: &mut Port,
    pool: &mut ChunkPool,
) {
    let header = empty(kind, Address::ANONYMOUS, address);
    let header = Header { sequence, credit, delivered, ..header };
    let mut bytes = [0; HEADER_BYTES];
    header.emit(&mut bytes);
    port.push_frame(pool, &bytes, &header);
}
