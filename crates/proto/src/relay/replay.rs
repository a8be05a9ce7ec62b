//! Replay of a message log to an endpoint: a restarted incarnation receives everything that the
//! previous one received, and a slow endpoint receives the frames that found no capacity.
//!
//! The relay replays to a restarted incarnation piece by piece through the queue of its port: each
//! determinant, then the frames that the previous incarnation delivered with this determinant
//! ([`super::Relay::replay_next`]). After the last determinant, and whenever the endpoint merely
//! has a
//! backlog, replay is *direct*: the link writes frames straight out of the log segments that hold
//! them ([`Replay::direct`]). So the message log of an endpoint that may be restarted is also
//! its output queue, and a frame that finds no capacity at once is not copied a second time.
//!
//! What enters: frames that found no capacity, and the number of bytes that the link wrote. What
//! leaves: determinants and frames, in the order in which the endpoint received them. What may
//! never happen: replay omits or repeats a frame; the queue and direct replay interleave (the link
//! empties the queue first, and the relay puts nothing else into the queue while replay is
//! incomplete).

use alloc::collections::BTreeSet;

use super::byte_log::Cursor;
use super::checkpoint_position::CheckpointPosition;
use super::determinant_log::DeterminantLog;
use super::empty_frame::empty;
use super::log_storage::{LogStorage, READ_AHEAD};
use super::output_queue::OutputQueue;
use super::recent_channels::ChannelKey;
use super::replay_state::ReplayState;
use super::segmented_log::{FrameLookup, SegmentPosition, SegmentedLog};
use super::writer::Writer;
use crate::id::Address;
use crate::replay::Determinant;
use crate::route::byte_queue::ChunkPool;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};

/// Bytes of replayed frames that wait in the queue of an endpoint, approximately: the capacity of
/// its shared-memory ring. Direct replay writes as many bytes before other links get their turn.
pub const REPLAY_BYTES_MAX: usize = 256 << 10;

/// The replay to an endpoint: see the module head. Its methods receive the logs of the endpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replay {
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

impl Replay {
    /// The replay to an incarnation that has attached at log position `position`.
    pub fn starting_at(position: &CheckpointPosition) -> Self {
        let CheckpointPosition { determinants, determinants_left, inbound, .. } = *position;
        let left = inbound.segment;
        Self { determinants, determinants_left, frames_left: 0, inbound, left, new: None }
    }

    /// The replay of a backlog, whose first frame is at `inbound`.
    pub fn of_backlog(inbound: SegmentPosition) -> Self {
        let (determinants, left, new) = (Cursor::default(), inbound.segment, Some(inbound));
        Self { determinants, determinants_left: 0, frames_left: 0, inbound, left, new }
    }

    fn is_direct(&self) -> bool {
        self.determinants_left == 0 && self.frames_left == 0
    }

    /// Whether all frames that are still to be replayed arrived during the replay.
    pub fn has_only_backlog(&self) -> bool {
        self.is_direct() && self.new.is_some_and(|new| self.inbound >= new)
    }

    /// Notes that the last frame of the log, of `bytes` bytes, has arrived during the replay.
    #[inline]
    pub fn note_arrival(&mut self, inbound: &SegmentedLog, bytes: usize) {
        if self.new.is_none() {
            self.new = Some(inbound.last(bytes));
        }
    }

    /// Channels of the frames that no incarnation has received, as far as these frames are in
    /// memory.
    pub fn undelivered(&self, inbound: &SegmentedLog) -> BTreeSet<ChannelKey> {
        let Some(new) = self.new else { return BTreeSet::new() };
        let mut place = self.inbound.max(new);
        let mut undelivered = BTreeSet::new();
        while let FrameLookup::Frame(header, frame) = inbound.find(&mut place) {
            place.advance(frame.len());
            undelivered.insert(ChannelKey::of(&header));
        }
        undelivered.retain(|entry| entry.channel().is_some());
        undelivered
    }

    /// Whether the replay reads this segment now or within the next [`READ_AHEAD`] segments.
    pub fn is_reading(&self, segment: usize) -> bool {
        let at = self.inbound.segment;
        (at..at + READ_AHEAD).contains(&segment)
    }

    /// Ends the replay: evicts the segments that were cached for it.
    pub fn finish(self, inbound: &mut SegmentedLog, storage: &mut LogStorage) {
        inbound.evict(self.left..self.inbound.segment + READ_AHEAD, &mut storage.buffer_pool);
    }

    /// Requests from the disk the next [`READ_AHEAD`] segments that replay needs, and evicts the
    /// segments that replay has passed.
    fn fetch(&mut self, address: Address, inbound: &mut SegmentedLog, storage: &mut LogStorage) {
        let at = self.inbound.segment;
        inbound.evict(core::mem::replace(&mut self.left, at)..at, &mut storage.buffer_pool);
        for number in at..at + READ_AHEAD {
            if let Some((id, length)) = inbound.begin_read(number) {
                storage.fetch(address, number, id, length);
            }
        }
    }

    /// Moves the frames that direct replay would send into the queue `output`, as far as these
    /// frames are in memory, and returns the next state of the replay.
    pub fn push_backlog(
        &mut self,
        address: Address,
        inbound: &mut SegmentedLog,
        output: &mut OutputQueue,
        pool: &mut ChunkPool,
        storage: &mut LogStorage,
    ) -> ReplayState {
        while let FrameLookup::Frame(header, frame) = inbound.find(&mut self.inbound) {
            self.inbound.advance(frame.len());
            output.push_frame(pool, frame, &header);
        }
        self.next_state(address, inbound, storage)
    }

    /// Pushes the next piece of the replay into the queue `output`, as far as the logs are in
    /// memory, and returns the next state of the replay.
    pub fn push_next(
        &mut self,
        address: Address,
        (determinants, inbound): (&DeterminantLog, &mut SegmentedLog),
        output: &mut OutputQueue,
        pool: &mut ChunkPool,
        storage: &mut LogStorage,
    ) -> ReplayState {
        self.fetch(address, inbound, storage);
        while !self.is_direct() {
            if output.waiting_bytes() >= REPLAY_BYTES_MAX {
                return ReplayState::Queued;
            }
            if self.frames_left == 0 {
                self.determinants_left -= 1;
                if let Some(determinant) = determinants.read(&mut self.determinants) {
                    self.frames_left = determinant.frames;
                    push_determinant(address, determinant, output, pool);
                }
                continue;
            }
            match inbound.find(&mut self.inbound) {
                FrameLookup::Frame(header, frame) => {
                    self.frames_left -= 1;
                    self.inbound.advance(frame.len());
                    output.push_frame(pool, frame, &header);
                }
                FrameLookup::OnDisk => {
                    self.fetch(address, inbound, storage);
                    return ReplayState::AwaitsDisk;
                }
                FrameLookup::Corrupt => return ReplayState::Unreadable,
                FrameLookup::End => return ReplayState::Complete,
            }
        }
        self.next_state(address, inbound, storage)
    }

    /// The next state of a replay that is direct or complete.
    fn next_state(
        &mut self,
        address: Address,
        inbound: &mut SegmentedLog,
        storage: &mut LogStorage,
    ) -> ReplayState {
        let found = match inbound.find(&mut self.inbound) {
            FrameLookup::Frame(..) => ReplayState::Direct,
            FrameLookup::OnDisk => ReplayState::AwaitsDisk,
            FrameLookup::Corrupt => ReplayState::Unreadable,
            FrameLookup::End => ReplayState::Complete,
        };
        if found.is_incomplete() {
            self.fetch(address, inbound, storage);
        }
        found
    }

    /// The frames that direct replay sends next, as far as they are in memory: up to the frame that
    /// reaches [`REPLAY_BYTES_MAX`].
    pub fn direct(self, inbound: &SegmentedLog) -> impl Iterator<Item = (Header, &[u8])> {
        let mut place = self.is_direct().then_some(self.inbound);
        let mut bytes = 0;
        core::iter::from_fn(move || {
            let place = place.as_mut().filter(|_| bytes < REPLAY_BYTES_MAX)?;
            let FrameLookup::Frame(header, frame) = inbound.find(place) else { return None };
            place.advance(frame.len());
            bytes += frame.len();
            Some((header, frame))
        })
    }

    /// Advances direct replay by the `bytes` bytes that `writer` has written, gives `writer` the
    /// rest of the last frame, and returns the next state of the replay.
    pub fn consume_direct(
        &mut self,
        address: Address,
        inbound: &mut SegmentedLog,
        bytes: usize,
        (writer, pool): (&mut Writer, &mut ChunkPool),
        storage: &mut LogStorage,
    ) -> ReplayState {
        let mut left = bytes;
        while left > 0 {
            // The driver writes only the frames that `slices` returns, and these frames are in
            // memory.
            let FrameLookup::Frame(header, frame) = inbound.find(&mut self.inbound) else {
                panic!("only what is in memory can be sent");
            };
            self.inbound.advance(frame.len());
            writer.recent_channels.add(frame.len(), ChannelKey::of(&header));
            if let Some(rest) = frame.get(left..) {
                writer.rest.push(pool, rest);
            }
            left = left.saturating_sub(frame.len());
        }
        match self.next_state(address, inbound, storage) {
            // The endpoint keeps pace: direct replay goes on after other links have had their turn.
            ReplayState::Direct if bytes >= REPLAY_BYTES_MAX => ReplayState::Queued,
            state => state,
        }
    }
}

/// Pushes a determinant for the endpoint `address` into its queue.
pub(super) fn push_determinant(
    address: Address,
    determinant: Determinant,
    output: &mut OutputQueue,
    pool: &mut ChunkPool,
) {
    let Determinant { polls, frames, micros } = determinant;
    push_empty(Kind::Determinant, address, [polls, micros], frames, output, pool);
}

/// Pushes a frame of the relay for the endpoint `address` into its queue.
pub(super) fn push_empty(
    kind: Kind,
    address: Address,
    [sequence, delivered]: [u64; 2],
    credit: u32,
    output: &mut OutputQueue,
    pool: &mut ChunkPool,
) {
    let header = empty(kind, Address::ANONYMOUS, address);
    let header = Header { sequence, credit, delivered, ..header };
    let mut bytes = [0; HEADER_BYTES];
    header.emit(&mut bytes);
    output.push_frame(pool, &bytes, &header);
}
