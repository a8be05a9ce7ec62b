//! What an endpoint holds for each peer, for whoever compares that with its bounds.
//!
//! Enters: nothing; all here only looks, and counts what stands in the channel, however long that takes. Leaves: numbers. The
//! table of bounds in `docs/ARCHITECTURE.md` says what they may be; the simulator asks all the time.

use super::path_state::PathState;
use super::{Endpoint, Memory, Peer};
use crate::channel::{PathId, RetainedFrame, RetainedState};
use crate::wire::frame::{HEADER_BYTES, Kind};
use crate::wire::kind_header::KindHeader;

/// What is held for one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelUsage {
    /// Number of the next new byte to it.
    pub sent: u64,
    /// Bytes of the channel that were sent and are not confirmed.
    pub unconfirmed: u64,
    /// Frames, or pieces of frames, that are kept for sending them again.
    pub kept: usize,
    /// Of those, how many are known to be lost.
    pub lost: usize,
    /// Operations and answers that wait for their turn.
    pub queue: usize,
    /// Operations that are done when the peer has confirmed them.
    pub awaiting: usize,
    /// Questions, answers and addresses that are to be said.
    pub control_frames: usize,
    /// Ranges that are to come again.
    pub corrupt: usize,
    /// Frames that come early and are on their way into what is kept of them.
    pub out_of_order: usize,
    /// Messages of which announced bytes are still to come.
    pub announced: usize,
    /// How much more may be under way beside each other than one after the other: see [`crate::channel::REORDER_WINDOW_BYTES_MAX`].
    pub may_reorder: bool,
}

/// What is under way by one path of datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InFlightUsage {
    /// Bytes that its congestion control counts.
    pub counted: u64,
    /// Bytes of what is kept and flies by it.
    pub kept: u64,
    /// Datagrams of whose fate it keeps a note.
    pub tracked_datagrams: usize,
    /// Status requests of it that are not answered.
    pub status_requests: usize,
    /// Bytes that may be under way.
    pub window: u64,
    /// Bytes of its largest datagram.
    pub datagram: u64,
}

impl<M: Memory> Endpoint<M> {
    /// What is held for `peer`. Nothing is for one that has failed.
    pub fn channel_usage(&self, peer: Peer) -> ChannelUsage {
        let channel = &self.channels[peer.0 as usize];
        if channel.failed.is_some() {
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
            awaiting: channel.awaiting.len(),
            control_frames: channel.control_frames.len(),
            corrupt: channel.corrupt.len(),
            out_of_order: channel.out_of_order.len(),
            announced: channel.announced.len(),
            may_reorder: channel.may_reorder(),
        }
    }

    /// Each memory out of which something may have to be sent to `peer` again, as often as there are pieces of it.
    pub fn retained_memory(&self, peer: Peer) -> impl Iterator<Item = &M> {
        let channel = &self.channels[peer.0 as usize];
        channel.out.retained_frames().filter_map(|frame| frame.memory.as_ref())
    }

    /// What is under way by `path` of `peer`, if it is up and carries datagrams.
    pub fn in_flight_usage(&self, peer: Peer, path: PathId) -> Option<InFlightUsage> {
        let channel = &self.channels[peer.0 as usize];
        let flow = channel.path_state(path).and_then(|state: &PathState| state.flow.as_ref())?;
        let is_there = |frame: &&RetainedFrame<M>| {
            frame.path == path && frame.state == RetainedState::InFlight
        };
        let kept = channel.out.retained_frames().filter(is_there).map(datagram_bytes).sum();
        Some(InFlightUsage { kept, ..flow.in_flight_usage() })
    }

    /// How often this endpoint wants to be woken: once for each peer at most.
    pub fn armed_timers(&self) -> usize {
        self.wakes.len()
    }
}

/// Bytes of the datagram that carries this.
fn datagram_bytes<M>(frame: &RetainedFrame<M>) -> u64 {
    let is_piece = frame.length != frame.whole;
    let head = if is_piece { KindHeader::size(Kind::Fragment, 0) } else { 0 };
    (HEADER_BYTES + head) as u64 + frame.length as u64
}
