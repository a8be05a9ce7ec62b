//! What an endpoint holds for each peer, for comparison with the bounds.
//!
//! What enters: nothing; the functions here only read, and count what the channel holds, however
//! long the counting takes. What leaves: numbers. The bounds in `docs/LIMITS.md` say
//! which values are allowed; the simulator checks them continually.

use super::path_state::PathState;
use super::{Endpoint, Memory, Peer};
use crate::channel::{PathId, RetainedFrame, RetainedState};
use crate::wire::frame::{HEADER_BYTES, Kind};
use crate::wire::kind_header::KindHeader;

/// What the endpoint holds for one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelUsage {
    /// The number of the next new byte to the peer.
    pub sent: u64,
    /// Bytes of the channel that were sent and are not confirmed.
    pub unconfirmed: u64,
    /// Frames, or pieces of frames, in the retransmit buffer.
    pub kept: usize,
    /// Of the frames and pieces in the retransmit buffer, the number that is known to be lost.
    pub lost: usize,
    /// Operations and answers in the transmit queue.
    pub queue: usize,
    /// Operations that complete when the peer has confirmed their bytes.
    pub awaiting: usize,
    /// Control frames that wait to be sent.
    pub control_frames: usize,
    /// Corrupt ranges that must be retransmitted by the peer.
    pub corrupt: usize,
    /// Frames that arrive early and are being written into reorder buffers.
    pub out_of_order: usize,
    /// Messages of which announced bytes are still to come.
    pub announced: usize,
    /// Frames may overtake each other, so [`crate::channel::REORDER_WINDOW_BYTES_MAX`] bounds what
    /// is in flight.
    pub may_reorder: bool,
}

/// What is in flight on one path of datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InFlightUsage {
    /// Bytes in flight by the count of the congestion control.
    pub counted: u64,
    /// Bytes in flight by the count of the retransmit buffer.
    pub kept: u64,
    /// Datagrams that the flow tracks.
    pub tracked_datagrams: usize,
    /// Status requests of the flow that are not answered.
    pub status_requests: usize,
    /// The congestion window in bytes.
    pub window: u64,
    /// The size of the path's largest datagram in bytes.
    pub datagram: u64,
}

impl<M: Memory> Endpoint<M> {
    /// What the endpoint holds for `peer`; nothing for a failed peer.
    pub fn channel_usage(&self, peer: Peer) -> ChannelUsage {
        let channel = &self.channels[peer.0 as usize];
        if channel.end.failed.is_some() {
            return ChannelUsage::default();
        }
        ChannelUsage {
            sent: channel.out.next(),
            unconfirmed: channel.out.unconfirmed(),
            kept: channel.out.retained(),
            lost: channel
                .out
                .retained_frames()
                .filter(|frame| frame.state == RetainedState::Lost)
                .count(),
            queue: channel.queue.len(),
            awaiting: channel.confirmations.awaiting.len(),
            control_frames: channel.repairs.control_frames.len(),
            corrupt: channel.repairs.corrupt.len(),
            out_of_order: channel.arrivals.out_of_order.len(),
            announced: channel.arrivals.announced.len(),
            may_reorder: channel.paths.may_reorder(),
        }
    }

    /// The memory of each retained frame or piece from which a retransmission to `peer` may be
    /// sent.
    pub fn retained_memory(&self, peer: Peer) -> impl Iterator<Item = &M> {
        let channel = &self.channels[peer.0 as usize];
        channel.out.retained_frames().filter_map(|frame| frame.memory.as_ref())
    }

    /// What is in flight on `path` of `peer`, if the path is up and carries datagrams.
    pub fn in_flight_usage(&self, peer: Peer, path: PathId) -> Option<InFlightUsage> {
        let channel = &self.channels[peer.0 as usize];
        let flow =
            channel.paths.path_state(path).and_then(|state: &PathState| state.flow.as_ref())?;
        let is_there = |frame: &&RetainedFrame<M>| {
            frame.path == path && frame.state == RetainedState::InFlight
        };
        let kept = channel.out.retained_frames().filter(is_there).map(datagram_bytes).sum();
        Some(InFlightUsage { kept, ..flow.in_flight_usage() })
    }

    /// The number of wake-ups that are scheduled: at most one for each peer.
    pub fn armed_timers(&self) -> usize {
        self.wakes.len()
    }
}

/// The size in bytes of the datagram that carries the frame or piece.
fn datagram_bytes<M>(frame: &RetainedFrame<M>) -> u64 {
    let is_piece = frame.length != frame.whole;
    let head = if is_piece { KindHeader::size(Kind::Fragment, 0) } else { 0 };
    (HEADER_BYTES + head) as u64 + frame.length as u64
}
