//! One link of a relay: the peer at its other end, the frames that wait for it, and the inputs that
//! wait to send to it.
//!
//! An endpoint has one port. A peer relay has a port whose queue holds the waiting frames, and one
//! more port for each *stream* to it: streams take whole frames from the front of the queue of the
//! peer relay. A frame that a link has begun to write belongs to this link alone, and the rest of
//! the frame waits in the [`Writer`] of the link.

use alloc::collections::{BTreeSet, VecDeque};

use super::loss_record::LossRecord;
use super::output_queue::OutputQueue;
use super::port_state::{PortEvent, PortState};
use super::recent_channels::{ChannelKey, RecentChannels};
use super::replay::REPLAY_BYTES_MAX;
use super::replay_state::{ReplayEvent, ReplayState};
use super::stream_receipts::StreamReceipts;
use super::stream_set::StreamSet;
use super::writer::Writer;
use crate::id::{Address, ClusterId};
use crate::route::byte_queue::{ByteQueue, ChunkPool};
use crate::route::routing_table::LinkId;

/// What is at the other end of a port.
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

/// One link of a relay: see the module head.
#[derive(Debug)]
pub(super) struct Port {
    pub kind: PortKind,
    state: PortState,
    /// Incarnation of the process that was connected last, if any was.
    pub incarnation: Option<u32>,

    // State of the port as an input.
    /// Whether the endpoint has sent Goodbye to some peer: it will send nothing more to this peer.
    pub has_said_goodbye: bool,
    /// Number of the frame with which this endpoint diverged from its previous incarnation, if it
    /// did.
    pub diverged_frame: Option<u64>,
    pub waits_for: Option<LinkId>,
    /// Bytes received on a stream.
    pub receipts: StreamReceipts,

    // State of the port as an output.
    pub output: OutputQueue,
    /// Inputs that wait for capacity of this output, in order.
    pub waiting_inputs: VecDeque<LinkId>,
    pub losses: LossRecord,
    replay: ReplayState,
    pub writer: Writer,
    /// Streams to this peer relay.
    pub streams: StreamSet,
}

impl Port {
    pub fn new(kind: PortKind, state: PortState) -> Self {
        let recent_channels = match kind {
            PortKind::Stream { .. } => RecentChannels::acknowledged(),
            _ => RecentChannels::default(),
        };
        Self {
            kind,
            state,
            incarnation: None,
            has_said_goodbye: false,
            diverged_frame: None,
            waits_for: None,
            receipts: StreamReceipts::default(),
            output: OutputQueue::default(),
            waiting_inputs: VecDeque::new(),
            losses: LossRecord::default(),
            replay: ReplayState::default(),
            writer: Writer { rest: ByteQueue::default(), recent_channels },
            streams: StreamSet::default(),
        }
    }

    #[inline]
    pub fn state(&self) -> PortState {
        self.state
    }

    #[inline]
    pub fn is_up(&self) -> bool {
        self.state.is_up()
    }

    /// Only [`super::ports::Ports`] may call this, because it counts disconnected ports.
    pub fn handle_event(&mut self, event: PortEvent) {
        self.state = self.state.after(event);
    }

    /// The endpoint at the other end, if there is one.
    #[inline]
    pub fn endpoint(&self) -> Option<Address> {
        match self.kind {
            PortKind::Endpoint(address) => Some(address),
            _ => None,
        }
    }

    #[inline]
    pub fn replay(&self) -> ReplayState {
        self.replay
    }

    pub fn handle_replay(&mut self, event: ReplayEvent) {
        self.replay = self.replay.after(event);
    }

    /// Whether the endpoint has taken most of the last replayed piece, and more is to go into its
    /// queue.
    #[inline]
    pub fn needs_replay(&self) -> bool {
        self.replay.takes_pieces() && self.output.waiting_bytes() <= REPLAY_BYTES_MAX / 2
    }

    /// Drops all waiting frames and records them as lost: their sources are notified when the other
    /// side is reconnected.
    pub fn lose_all(&mut self, pool: &mut ChunkPool) {
        self.writer.rest.pop(pool, self.writer.rest.len());
        self.losses.forget_past();
        let entries = self.output.discard(pool);
        self.losses.add_lossy(entries.iter().filter_map(|entry| entry.channel()));
        for entry in entries.into_iter().filter(|entry| entry.channel().is_none()) {
            self.losses.record(entry);
        }
    }

    /// Drops everything that waits, but for the pending reports.
    pub fn discard_frames(&mut self, pool: &mut ChunkPool) {
        let reports = self.losses.take_reports();
        self.discard(pool);
        self.losses.restore_reports(reports);
    }

    /// Drops everything that waits; returns the channels that have lost frames here.
    pub fn discard(&mut self, pool: &mut ChunkPool) -> BTreeSet<(Address, Address)> {
        self.writer.rest.pop(pool, self.writer.rest.len());
        let entries = self.output.discard(pool);
        let mut lost = core::mem::take(&mut self.losses).take_lossy();
        lost.extend(entries.into_iter().filter_map(ChannelKey::channel));
        lost
    }
}
