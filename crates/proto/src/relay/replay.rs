//! What an endpoint is told out of what is kept of it: a new start of it all that was, one that takes more slowly than others
//! send what it has not taken yet.
//!
//! A new start is told piece by piece, by its queue, when the earlier one has taken in what: each determinant, and then the frames
//! that it took in ([`Relay::replay_next`]). Behind the last determinant, and whenever it is only behind, it is told *directly*: its link
//! writes frames straight out of the segments in which they lie ([`MessageLog::direct`]). So what is kept is the queue of an
//! endpoint that may come back, and a frame that does not find room at once is copied no second time.
//!
//! What enters: what found no room, and how much was written. What leaves: determinants and frames, in the order in which they were
//! given to the endpoint. What may never happen: one is left out, or told twice; the queue and what is told directly get in each
//! other's way (the queue comes first, and while there is more to tell nothing else is put there).

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

/// What an endpoint is told waits in its queue up to about so many bytes: as much as its ring holds. As much it takes directly before
/// others have their turn.
pub(super) const REPLAY_BYTES_MAX: usize = 256 << 10;

/// How far an endpoint has been told what was.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplayProgress {
    determinants: Cursor,
    determinants_left: u32,
    /// Of the determinant that was told last.
    frames_left: u32,
    /// The frame that is told next.
    inbound: SegmentPosition,
    /// Segments before this one have been left.
    left: usize,
    /// The first frame that came meanwhile: no start of it has been given that.
    new: Option<SegmentPosition>,
}

/// What is to be done for an endpoint that is told what was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplayState {
    /// There is more for its queue.
    Queued,
    /// There is more, which it takes straight out of what is kept.
    Direct,
    /// There is more, and it is on the disk.
    AwaitsDisk,
    Complete,
    /// The rest is of no use.
    Unreadable,
}

impl ReplayProgress {
    fn is_direct(&self) -> bool {
        self.determinants_left == 0 && self.frames_left == 0
    }
}

impl MessageLog {
    /// Whether a new start of it is still to be told what the earlier one was.
    pub fn is_replaying(&self) -> bool {
        self.replay.is_some() && !self.has_only_backlog()
    }

    /// The frames that came last, of so many bytes together, found no room: they are told as soon as there is some.
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

    /// Whether the frame that came last, of so many bytes, is told in its turn.
    #[inline]
    pub fn defer(&mut self, bytes: usize) -> bool {
        let Some(replay) = &mut self.replay else { return false };
        if replay.new.is_none() {
            replay.new = Some(self.inbound.last(bytes));
        }
        true
    }

    /// Whether all that is left to tell has come meanwhile.
    pub fn has_only_backlog(&self) -> bool {
        self.replay.as_ref().is_some_and(|replay| {
            replay.is_direct() && replay.new.is_some_and(|new| replay.inbound >= new)
        })
    }

    /// Tells by its queue all that is left of what it takes directly, as far as it is in memory; and what comes then.
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

    /// Channels of frames that no start of it has been given, as far as they are in memory.
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

    /// Whether somebody is told what lies in this segment, or soon will be.
    pub fn is_reading(&self, segment: usize) -> bool {
        let first = |replay: &ReplayProgress| replay.inbound.segment;
        self.replay.as_ref().map(first).is_some_and(|at| (at..at + READ_AHEAD).contains(&segment))
    }

    pub fn stop_replay(&mut self, storage: &mut LogStorage) {
        if let Some(ReplayProgress { inbound, left, .. }) = self.replay.take() {
            self.inbound.evict(left..inbound.segment + READ_AHEAD, &mut storage.buffer_pool);
        }
    }

    /// Has what is told next in memory, as far as the disk has read it.
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

    /// `address` is there, and stands at `position`: it is told everything that came after, once more.
    pub fn begin_replay(
        &mut self,
        address: Address,
        position: CheckpointPosition,
        port: &mut Port,
        pool: &mut ChunkPool,
    ) {
        self.resume_at(&position);
        // Each that is kept takes three bytes at least, and all together no more than there is for logs.
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
        // Until it has sent that again nothing else may be taken in.
        let sent = self.sent_count - position.standing.sent;
        let opening = Determinant { polls: 0, frames: determinants_left, micros: sent };
        push_determinant(address, opening, port, pool);
    }

    /// Tells the next piece by its queue, as far as it is in memory; and what comes then.
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

    /// What comes next for one that is told directly, or is told nothing any more.
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

    /// What it is told directly next, as far as it is in memory.
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

    /// `bytes` bytes of that have left by `writer`, who takes what is left of the last frame; and what comes next.
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
            // The driver writes what `slices` shows.
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
            // It keeps pace: it goes on when others have had their turn.
            ReplayState::Direct if bytes >= REPLAY_BYTES_MAX => ReplayState::Queued,
            state => state,
        }
    }
}

impl MessageLogs {
    /// See [`MessageLog::consume_direct`].
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

    /// What found no room of what was given to an endpoint just now, so many bytes, is told in its turn. False: it is not kept.
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
