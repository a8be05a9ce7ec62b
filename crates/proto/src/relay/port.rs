//! One link of a relay: who is at its other end, what waits for it, and who waits to send to it.
//!
//! An endpoint has one port. A peer relay has a port where frames wait, and one more for each stream
//! to it (a *stream*): streams take whole frames from the front of what waits. A frame that a link has
//! begun to write belongs to it alone, and what is left of it waits in its [`Writer`].

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::recent_channels::{ChannelKey, FrameClass, RecentChannels};
use super::replay::{REPLAY_BYTES_MAX, ReplayState};
use crate::id::{Address, ClusterId};
use crate::route::byte_queue::{ByteQueue, ChunkPool};
use crate::route::routing_table::LinkId;
use crate::wire::frame::{Header, Kind};

/// Notices that may be owed over one port: 2 MiB. Beyond, they are dropped and counted; sources
/// that are not told find out by themselves, later.
pub(super) const PENDING_REPORTS_MAX: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PortKind {
    Endpoint(Address),
    Peer(ClusterId),
    /// A stream to the relay of a cluster, which has the port `peer`.
    Stream {
        peer: LinkId,
        cluster: ClusterId,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PortState {
    Up,
    /// Not connected; what waits for it is given up some time after `since`.
    Disconnected {
        since: u64,
    },
    /// Given up: nothing may wait for it.
    Abandoned,
}

/// A whole frame in the buffer of the input that is being handled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub at: usize,
    pub length: usize,
}

/// A frame that waits.
#[derive(Clone, Copy, Debug)]
struct QueuedFrame {
    length: u32,
    entry: ChannelKey,
}

/// What one connection has begun to write, and what it has written.
#[derive(Debug, Default)]
pub(super) struct Writer {
    /// The rest of a frame that has been begun, and signs of life behind it.
    pub rest: ByteQueue,
    pub recent_channels: RecentChannels,
}

#[derive(Debug)]
pub(super) struct Port {
    pub kind: PortKind,
    pub state: PortState,
    /// Start of the process that was connected last, if any was.
    pub incarnation: Option<u32>,
    /// The endpoint has said to some peer that it will send nothing more.
    pub has_said_goodbye: bool,

    // as an input
    /// Its frames pass outputs that are full: see [`super::Relay::begin_drain`].
    pub is_draining: bool,
    /// This frame of it was another one before.
    pub diverged_frame: Option<u64>,
    pub waits_for: Option<LinkId>,
    /// Of a stream: bytes of whole frames taken in,
    pub received: u64,
    /// how many of them the other side has been told of,
    pub acknowledged: u64,
    /// and when.
    pub acknowledged_at: u64,

    // as an output
    pub queue: ByteQueue,
    /// Frames of the current buffer, adjacent ones joined.
    pub pieces: Vec<Piece>,
    /// All frames that wait, those of the queue before those of the pieces.
    queued_frames: VecDeque<QueuedFrame>,
    pieces_bytes: usize,
    /// Inputs that wait for room, in order.
    pub waiting_inputs: VecDeque<LinkId>,
    /// Notices to go out here: to whom, and about whom.
    pub pending_reports: BTreeMap<(Address, Address), Kind>,
    /// Channels that have lost frames here while the other side is away.
    pub lossy_channels: BTreeSet<(Address, Address)>,
    /// Of a peer relay: channels that streams have carried which are gone.
    pub past_channels: BTreeSet<(Address, Address)>,
    pub in_flush: bool,
    pub in_resume: bool,
    pub in_report_queue: bool,
    /// Of an endpoint that is being told what was before: there is more,
    pub is_replaying: bool,
    /// which it takes straight out of what is kept,
    pub is_direct: bool,
    /// or which the disk has not read yet,
    pub awaits_disk: bool,
    /// or it is its turn.
    pub in_replay_queue: bool,

    pub writer: Writer,
    /// Of a stream: it finishes what it has begun, and takes nothing new.
    pub is_retired: bool,
    /// Of a peer relay: the streams to it,
    pub streams: Vec<LinkId>,
    /// and which of them writes first.
    pub turn: usize,
}

impl Port {
    pub fn new(kind: PortKind, state: PortState) -> Self {
        let recent_channels = match kind {
            PortKind::Stream { .. } => RecentChannels::confirmed(),
            _ => RecentChannels::default(),
        };
        Self {
            kind,
            state,
            incarnation: None,
            has_said_goodbye: false,
            is_draining: false,
            diverged_frame: None,
            waits_for: None,
            received: 0,
            acknowledged: 0,
            acknowledged_at: 0,
            queue: ByteQueue::default(),
            pieces: Vec::new(),
            queued_frames: VecDeque::new(),
            pieces_bytes: 0,
            waiting_inputs: VecDeque::new(),
            pending_reports: BTreeMap::new(),
            lossy_channels: BTreeSet::new(),
            past_channels: BTreeSet::new(),
            in_flush: false,
            in_resume: false,
            in_report_queue: false,
            is_replaying: false,
            is_direct: false,
            awaits_disk: false,
            in_replay_queue: false,
            writer: Writer { rest: ByteQueue::default(), recent_channels },
            is_retired: false,
            streams: Vec::new(),
            turn: 0,
        }
    }

    #[inline]
    pub fn is_up(&self) -> bool {
        self.state == PortState::Up
    }

    /// Memory that what waits for this port takes, queued_frames included.
    #[inline]
    pub fn waiting_bytes(&self) -> usize {
        self.queue.len() + self.pieces_bytes + self.queued_frames.len() * size_of::<QueuedFrame>()
    }

    /// A frame of the current buffer goes out here.
    #[inline]
    pub fn take(&mut self, piece: Piece, header: &Header) {
        self.note_frame(piece.length, header);
        self.pieces_bytes += piece.length;
        match self.pieces.last_mut() {
            Some(last) if last.at + last.length == piece.at => last.length += piece.length,
            _ => self.pieces.push(piece),
        }
    }

    pub fn set_replay_state(&mut self, state: ReplayState) {
        self.is_replaying = state != ReplayState::Complete;
        self.is_direct = state == ReplayState::Direct;
        self.awaits_disk = state == ReplayState::AwaitsDisk;
    }

    /// Whether it has taken most of what it was told, and there is more for its queue.
    #[inline]
    pub fn needs_replay(&self) -> bool {
        let may_be =
            self.is_replaying && !self.in_replay_queue && !self.is_direct && !self.awaits_disk;
        may_be && self.waiting_bytes() <= REPLAY_BYTES_MAX / 2
    }

    #[inline]
    pub fn pieces_bytes(&self) -> usize {
        self.pieces_bytes
    }

    /// Bytes of frames that wait here, rather than somewhere else for this port.
    #[inline]
    pub fn own_bytes(&self) -> usize {
        self.queue.len() + self.pieces_bytes
    }

    /// A frame that does not come from an input goes out after all that waits. Only while there are no pieces.
    pub fn push_frame(&mut self, pool: &mut ChunkPool, bytes: &[u8], header: &Header) {
        debug_assert!(self.pieces.is_empty(), "pieces would be overtaken");
        self.note_frame(bytes.len(), header);
        self.queue.push(pool, bytes);
    }

    #[inline]
    fn note_frame(&mut self, length: usize, header: &Header) {
        self.queued_frames
            .push_back(QueuedFrame { length: length as u32, entry: ChannelKey::of(header) });
    }

    pub fn frame_lengths(&self) -> impl Iterator<Item = usize> {
        self.queued_frames.iter().map(|frame| frame.length as usize)
    }

    /// `bytes` bytes have left by `writer`: first from the queue, then from the pieces, which lie in
    /// `buffer`. What is left of the last frame goes to the writer.
    pub fn send(&mut self, pool: &mut ChunkPool, buffer: &[u8], bytes: usize, writer: &mut Writer) {
        self.drop_front(pool, bytes);
        let mut left = bytes;
        while left > 0 {
            // The driver writes what `slices` shows, and all of that has queued_frames.
            let frame = self.queued_frames.pop_front().expect("only what waits can be sent");
            let length = frame.length as usize;
            writer.recent_channels.add(length, frame.entry);
            if length > left {
                self.move_front(pool, buffer, length - left, writer);
            }
            left = left.saturating_sub(length);
        }
        if self.queued_frames.is_empty() && self.queued_frames.capacity() > QUEUED_FRAMES_IDLE_MAX {
            self.queued_frames = VecDeque::new();
        }
    }

    /// Gives the first `bytes` bytes, which are of one frame, to `writer`.
    fn move_front(
        &mut self,
        pool: &mut ChunkPool,
        buffer: &[u8],
        bytes: usize,
        writer: &mut Writer,
    ) {
        let mut left = bytes;
        for slice in self.queue.slices() {
            let size = slice.len().min(left);
            writer.rest.push(pool, &slice[..size]);
            left -= size;
        }
        if left > 0 {
            let at = self.pieces[0].at;
            writer.rest.push(pool, &buffer[at..at + left]);
        }
        self.drop_front(pool, bytes);
    }

    fn drop_front(&mut self, pool: &mut ChunkPool, bytes: usize) {
        let queued = bytes.min(self.queue.len());
        self.queue.pop(pool, queued);
        self.advance_pieces(bytes - queued);
    }

    fn advance_pieces(&mut self, mut bytes: usize) {
        self.pieces_bytes -= bytes;
        let whole = |piece: &&Piece| {
            let fits = piece.length <= bytes;
            bytes -= if fits { piece.length } else { 0 };
            fits
        };
        let gone = self.pieces.iter().take_while(whole).count();
        self.pieces.drain(..gone);
        if bytes > 0 {
            self.pieces[0].at += bytes;
            self.pieces[0].length -= bytes;
        }
    }

    /// Copies what is left of the pieces to the queue.
    pub fn keep(&mut self, pool: &mut ChunkPool, buffer: &[u8]) {
        for piece in &self.pieces {
            self.queue.push(pool, &buffer[piece.at..piece.at + piece.length]);
        }
        self.pieces.clear();
        self.pieces_bytes = 0;
    }

    /// What is left of the pieces, which is whole frames, waits somewhere else.
    pub fn drop_pieces(&mut self) {
        self.pieces.clear();
        let mut left = core::mem::take(&mut self.pieces_bytes);
        while left > 0 {
            // Each frame of the pieces has its note.
            left -= self.queued_frames.pop_back().expect("a frame has a note").length as usize;
        }
    }

    /// Something has been lost on the way to the other side: its source, or whoever the notice is
    /// for, is to be told once the other side is back. False: there are too many to remember.
    pub fn record_loss(&mut self, entry: ChannelKey) -> bool {
        let pair = (entry.source, entry.target);
        match entry.class {
            FrameClass::Forwarded => {
                let has_room = self.lossy_channels.len() < PENDING_REPORTS_MAX;
                (has_room && self.lossy_channels.insert(pair))
                    || self.lossy_channels.contains(&pair)
            }
            FrameClass::LossReport => self.add_report(entry.target, entry.source, Kind::Lost),
            FrameClass::UnreachableReport => {
                self.add_report(entry.target, entry.source, Kind::Unreachable)
            }
        }
    }

    /// A notice for `to` about `about` is to go out here. False: too many are.
    pub fn add_report(&mut self, to: Address, about: Address, kind: Kind) -> bool {
        let has_room = self.pending_reports.len() < PENDING_REPORTS_MAX
            || self.pending_reports.contains_key(&(to, about));
        if has_room {
            self.pending_reports.insert((to, about), kind);
        }
        has_room
    }

    /// All that waits is lost, as what is told to sources when the other side is back.
    pub fn lose_all(&mut self, pool: &mut ChunkPool) {
        let owed = core::mem::take(&mut self.pending_reports);
        let entries: Vec<ChannelKey> = self.queued_frames.iter().map(|frame| frame.entry).collect();
        self.lossy_channels = self.discard(pool);
        self.pending_reports = owed;
        for entry in entries.into_iter().filter(|entry| entry.channel().is_none()) {
            self.record_loss(entry);
        }
    }

    /// Drops all that waits; gives the channels whose frames it has lost here.
    pub fn discard(&mut self, pool: &mut ChunkPool) -> BTreeSet<(Address, Address)> {
        self.queue.pop(pool, self.queue.len());
        self.writer.rest.pop(pool, self.writer.rest.len());
        self.pieces = Vec::new();
        self.pieces_bytes = 0;
        self.pending_reports = BTreeMap::new();
        self.past_channels = BTreeSet::new();
        let mut lost = core::mem::take(&mut self.lossy_channels);
        let frames = core::mem::take(&mut self.queued_frames).into_iter().map(|frame| frame.entry);
        lost.extend(frames.filter_map(ChannelKey::channel));
        lost
    }
}

impl ChannelKey {
    #[inline]
    pub fn of(header: &Header) -> Self {
        let class = FrameClass::of(header.kind);
        Self { source: header.source, target: header.target, class }
    }

    /// The channel of a frame. Notices have none.
    pub fn channel(self) -> Option<(Address, Address)> {
        (self.class == FrameClass::Forwarded).then_some((self.source, self.target))
    }
}

/// Notes for which an idle port keeps room: a few, since most ports are idle.
const QUEUED_FRAMES_IDLE_MAX: usize = 64;
