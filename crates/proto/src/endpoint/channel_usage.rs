//! What an endpoint holds for each peer, for comparison with the bounds.
//!
//! What enters: nothing; the functions here only read, and count what the channel holds, however
//! long the counting takes. What leaves: numbers. The bounds in `docs/LIMITS.md` say
//! which values are allowed; the simulator checks them continually.

use super::channel::Channel;
use super::datagram_flow::InFlightUsage;
use super::driver_interface::Memory;
use super::path_state::PathState;
use crate::channel::{PathId, RetainedFrame, RetainedState};
use crate::wire::frame::{HEADER_BYTES, Kind};
use crate::wire::kind_header::KindHeader;

/// What the endpoint holds for one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelUsage {
    /// The number of the next new byte to the peer.
    pub sent: u64,
    /// Bytes of the channel that were sent and are not acknowledged.
    pub unacknowledged: u64,
    /// Frames, or pieces of frames, in the retransmit buffer.
    pub kept: usize,
    /// Of the frames and pieces in the retransmit buffer, the number that is known to be lost.
    pub lost: usize,
    /// Operations and answers in the transmit queue.
    pub queue: usize,
    /// Operations that complete when the peer has acknowledged their bytes.
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

impl<M: Memory> Channel<M> {
    /// What the endpoint holds for `peer`; nothing for a failed peer.
    pub fn usage(&self) -> ChannelUsage {
        if self.end.failed.is_some() {
            return ChannelUsage::default();
        }
        ChannelUsage {
            sent: self.out.next(),
            unacknowledged: self.out.unacknowledged(),
            kept: self.out.retained(),
            lost: self
                .out
                .retained_frames()
                .filter(|frame| frame.state == RetainedState::Lost)
                .count(),
            queue: self.queue.len(),
            awaiting: self.acknowledgements.awaiting.len(),
            control_frames: self.repairs.control_frames.len(),
            corrupt: self.repairs.corrupt.len(),
            out_of_order: self.arrivals.out_of_order.len(),
            announced: self.arrivals.announced.len(),
            may_reorder: self.paths.may_reorder(),
        }
    }

    /// The memory of each retained frame or piece from which a retransmission to `peer` may be
    /// sent.
    pub fn retained_memory(&self) -> impl Iterator<Item = &M> {
        self.out.retained_frames().filter_map(|frame| frame.memory.as_ref())
    }

    /// What is in flight on `path` of `peer`, if the path is up and carries datagrams.
    pub fn in_flight_usage(&self, path: PathId) -> Option<InFlightUsage> {
        let flow = self.paths.path_state(path).and_then(|state: &PathState| state.flow.as_ref())?;
        let is_there = |frame: &&RetainedFrame<M>| {
            frame.path == path && frame.state == RetainedState::InFlight
        };
        let kept = self.out.retained_frames().filter(is_there).map(datagram_bytes).sum();
        Some(InFlightUsage { kept, ..flow.in_flight_usage() })
    }
}

/// The size in bytes of the datagram that carries the frame or piece.
fn datagram_bytes<M>(frame: &RetainedFrame<M>) -> u64 {
    let is_piece = frame.length != frame.whole;
    let head = if is_piece { KindHeader::size(Kind::Fragment, 0) } else { 0 };
    (HEADER_BYTES + head) as u64 + frame.length as u64
}
