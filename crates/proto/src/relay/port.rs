//! One link of a relay: the peer at its other end, the frames that wait for it, and the inputs that
//! wait to send to it.
//!
//! An endpoint has one port. A peer relay has a port whose queue holds the waiting frames, and one
//! more port for each *stream* to it: streams take whole frames from the front of the queue of the
//! peer relay. A frame that a link has begun to write belongs to this link alone, and the rest of
//! the frame waits in the [`Writer`] of the link.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::recent_channels::{ChannelKey, FrameClass, RecentChannels};
use super::replay::{REPLAY_BYTES_MAX, ReplayState};
use crate::id::{Address, ClusterId};
use crate::route::byte_queue::{ByteQueue, ChunkPool};
use crate::route::routing_table::LinkId;
use crate::wire::frame::{Header, Kind};

/// Most reports that may be pending for one port: 2 MiB. Reports beyond this bound are dropped and
/// counted; a source without a report detects the loss by itself, later.
pub(super) const PENDING_REPORTS_MAX: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PortKind {
    Endpoint(Address),
    Peer(ClusterId),
    /// A stream to the relay of `cluster`, whose queue is that of the port `peer`.
    Stream {
        peer: LinkId,
        cluster: ClusterId,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PortState {
    Up,
    /// Not connected since `since` (in milliseconds); some time later the relay gives up the frames
    /// that wait here.
    Disconnected {
        since: u64,
    },
    /// Given up: no frame may wait here.
    Abandoned,
}

/// A whole frame in the buffer of the input that is being handled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub at: usize,
    pub length: usize,
}

/// Length and channel of a frame that waits.
#[derive(Clone, Copy, Debug)]
struct QueuedFrame {
    length: u32,
    entry: ChannelKey,
}

/// The frame that one connection has begun to write, and the channels of the frames that it has
/// written.
#[derive(Debug, Default)]
pub(super) struct Writer {
    /// The rest of a frame whose first bytes have been written, and keepalives after it.
    pub rest: ByteQueue,
    pub recent_channels: RecentChannels,
}

#[derive(Debug)]
pub(super) struct Port {
    pub kind: PortKind,
    pub state: PortState,
    /// Incarnation of the process that was connected last, if any was.
    pub incarnation: Option<u32>,
    /// Whether the endpoint has sent Goodbye to some peer: it will send nothing more to this peer.
    pub has_said_goodbye: bool,

    // State of the port as an input.
    /// Whether the frames of this input pass full outputs: see [`super::Relay::begin_drain`].
    pub is_draining: bool,
    /// Number of the frame with which this endpoint diverged from its previous incarnation, if it
    /// did.
    pub diverged_frame: Option<u64>,
    pub waits_for: Option<LinkId>,
    /// Bytes of whole frames received on a stream.
    pub received: u64,
    /// Bytes that the last keepalive of the stream reported to the peer relay.
    pub acknowledged: u64,
    /// Time of the last keepalive of the stream, in milliseconds.
    pub acknowledged_at: u64,

    // State of the port as an output.
    pub queue: ByteQueue,
    /// Frames in the current buffer; adjacent frames are joined to one piece.
    pub pieces: Vec<Piece>,
    /// All frames that wait: the frames of the queue, then the frames of the pieces.
    queued_frames: VecDeque<QueuedFrame>,
    pieces_bytes: usize,
    /// Inputs that wait for capacity of this output, in order.
    pub waiting_inputs: VecDeque<LinkId>,
    /// Reports to be sent here: target of the report, and endpoint that the report is about.
    pub pending_reports: BTreeMap<(Address, Address), Kind>,
    /// Channels that have lost frames here while the other side is disconnected.
    pub lossy_channels: BTreeSet<(Address, Address)>,
    /// Channels of a peer relay whose frames went by streams that have broken.
    pub past_channels: BTreeSet<(Address, Address)>,
    pub in_flush: bool,
    pub in_resume: bool,
    pub in_report_queue: bool,
    /// Whether the replay to this endpoint is incomplete.
    pub is_replaying: bool,
    /// Whether the link sends the replay straight out of the log segments.
    pub is_direct: bool,
    /// Whether the replay waits for a segment that the disk is reading.
    pub awaits_disk: bool,
    /// Whether the endpoint is in the list of replays that get their next piece.
    pub in_replay_queue: bool,

    pub writer: Writer,
    /// Whether this stream is retired: it finishes the frame that it has begun, and takes no
    /// further frame.
    pub is_retired: bool,
    /// Links of the streams to this peer relay.
    pub streams: Vec<LinkId>,
    /// Index of the stream that writes first.
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

    /// Memory of the frames that wait for this port, in bytes, their entries in `queued_frames`
    /// included.
    #[inline]
    pub fn waiting_bytes(&self) -> usize {
        self.queue.len() + self.pieces_bytes + self.queued_frames.len() * size_of::<QueuedFrame>()
    }

    /// Assigns a frame of the current buffer to this output.
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

    /// Whether the endpoint has taken most of the last replayed piece, and more is to go into its
    /// queue.
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

    /// Bytes of the frames that wait in this port rather than in the message log.
    #[inline]
    pub fn own_bytes(&self) -> usize {
        self.queue.len() + self.pieces_bytes
    }

    /// Appends a frame that comes from no input after all frames that wait. Only while there are no
    /// pieces.
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

    /// Accounts for `bytes` bytes that `writer` has written: first from the queue, then from the
    /// pieces, which are in `buffer`. The rest of the last frame goes to the writer.
    pub fn send(&mut self, pool: &mut ChunkPool, buffer: &[u8], bytes: usize, writer: &mut Writer) {
        self.drop_front(pool, bytes);
        let mut left = bytes;
        while left > 0 {
            // The driver writes only bytes that `slices` returns, and every such frame is in
            // `queued_frames`.
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

    /// Moves the first `bytes` bytes, which belong to one frame, to `writer`.
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

    /// Copies the rest of the pieces to the queue.
    pub fn keep(&mut self, pool: &mut ChunkPool, buffer: &[u8]) {
        for piece in &self.pieces {
            self.queue.push(pool, &buffer[piece.at..piece.at + piece.length]);
        }
        self.pieces.clear();
        self.pieces_bytes = 0;
    }

    /// Drops the rest of the pieces, which consists of whole frames: the message log holds these
    /// frames.
    pub fn drop_pieces(&mut self) {
        self.pieces.clear();
        let mut left = core::mem::take(&mut self.pieces_bytes);
        while left > 0 {
            // Each frame of the pieces has an entry in `queued_frames`.
            left -= self.queued_frames.pop_back().expect("a frame has a note").length as usize;
        }
    }

    /// Records the loss of a frame or report on its way to the other side. Its source, or the
    /// target of the report, is notified once the other side is reconnected. Returns false if too
    /// many losses are pending.
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

    /// Adds a report for `to` about `about` to the reports to be sent here. Returns false if too
    /// many are pending.
    pub fn add_report(&mut self, to: Address, about: Address, kind: Kind) -> bool {
        let has_room = self.pending_reports.len() < PENDING_REPORTS_MAX
            || self.pending_reports.contains_key(&(to, about));
        if has_room {
            self.pending_reports.insert((to, about), kind);
        }
        has_room
    }

    /// Drops all waiting frames and records them as lost: their sources are notified when the other
    /// side is reconnected.
    pub fn lose_all(&mut self, pool: &mut ChunkPool) {
        let owed = core::mem::take(&mut self.pending_reports);
        let entries: Vec<ChannelKey> = self.queued_frames.iter().map(|frame| frame.entry).collect();
        self.lossy_channels = self.discard(pool);
        self.pending_reports = owed;
        for entry in entries.into_iter().filter(|entry| entry.channel().is_none()) {
            self.record_loss(entry);
        }
    }

    /// Drops everything that waits; returns the channels that have lost frames here.
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

    /// The channel of a forwarded frame. Reports have none.
    pub fn channel(self) -> Option<(Address, Address)> {
        (self.class == FrameClass::Forwarded).then_some((self.source, self.target))
    }
}

/// Entries of `queued_frames` for which an idle port keeps memory: a few, since most ports are
/// idle.
const QUEUED_FRAMES_IDLE_MAX: usize = 64;
