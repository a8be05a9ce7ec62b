//! Acknowledgements of one channel, in both directions.
//!
//! [`OwedAck`]: what this endpoint has to acknowledge, and when. [`Acknowledgements`]: what the
//! peer has acknowledged, which operations wait for an acknowledgement, and when this endpoint asks
//! for one.

use alloc::collections::VecDeque;

use crate::wire::frame::flag;

/// The acknowledgement that this endpoint owes the peer.
#[derive(Default)]
pub(super) struct OwedAck {
    /// All bytes below this number have been delivered, as this endpoint last reported to the peer.
    pub acknowledged: u64,
    /// The peer waits for an acknowledgement.
    pub is_wanted: bool,
    /// The peer waits for an acknowledgement of all bytes below this number; 0: of none.
    pub wanted_at: u64,
    /// Acknowledgements in a row that travelled at once with an answer of the application.
    pub piggybacked: u8,
}

/// After this many prompt answers in a row, the next acknowledgement waits for an answer to travel
/// with. This resembles the delayed acknowledgements of TCP in an interactive session, but a single
/// missing answer ends the waiting, because the peer's application may wait.
const PIGGYBACKED_ACKS_MIN: u8 = 16;

impl OwedAck {
    /// Records that the header of a frame that has left acknowledges all bytes below
    /// `acknowledged`, when all below `delivered` have been delivered. `is_answer` says that the
    /// frame carries new bytes, with which the application may have answered.
    #[inline]
    pub fn handle_sent(&mut self, acknowledged: u64, delivered: u64, is_answer: bool) {
        self.acknowledged = acknowledged;
        let is_acknowledged = acknowledged >= delivered;
        if self.is_wanted && is_acknowledged && is_answer {
            self.piggybacked = self.piggybacked.saturating_add(1);
        }
        self.is_wanted &= !is_acknowledged;
    }

    /// Records that all bytes below `delivered` have been delivered.
    #[inline]
    pub fn handle_delivered(&mut self, delivered: u64) {
        if self.wanted_at != 0 && delivered >= self.wanted_at {
            (self.is_wanted, self.wanted_at) = (true, 0);
        }
    }

    /// Whether the application has answered so promptly that the acknowledgement may wait for its
    /// answer.
    #[inline]
    pub fn may_wait_for_answer(&self) -> bool {
        self.piggybacked >= PIGGYBACKED_ACKS_MIN
    }
}

/// What the peer has acknowledged, and what waits for it.
#[derive(Default)]
pub(super) struct Acknowledgements {
    /// The peer has delivered all bytes of this endpoint below this number, and this endpoint has
    /// delivered all that the peer sent before the acknowledgement, refusals included. Operations
    /// wait for this position.
    pub acknowledged: u64,
    /// An acknowledgement (`.1`) that overtook bytes of the peer. It holds once this endpoint has
    /// delivered all bytes below `.0`.
    pub early: (u64, u64),
    /// Operations (`.1`) that complete when the peer has all bytes below `.0`, in ascending order.
    pub awaiting: VecDeque<(u64, u32)>,
    /// This endpoint waits for an acknowledgement, and no frame that it has sent asks for one.
    pub is_solicited: bool,
    /// [`ChannelMut::solicit_ack`](super::ChannelMut::solicit_ack) has asked for an acknowledgement
    /// of all bytes below this number.
    pub solicited_end: u64,
    /// Bytes of frames sent since a frame last asked for an acknowledgement.
    pub bytes_since_request: u64,
}

impl Acknowledgements {
    /// Records that operation `id` is done when the peer has all bytes below `end`.
    pub fn await_delivery(&mut self, end: u64, id: u32) {
        let place = self.awaiting.partition_point(|&(other, _)| other <= end);
        self.awaiting.insert(place, (end, id));
    }

    /// Counts the bytes of a frame with these flags that has left.
    #[inline]
    pub fn note_sent(&mut self, bytes: u64, flags: u8) {
        let before = self.bytes_since_request;
        self.bytes_since_request = if flags & flag::WANT_ACK != 0 { 0 } else { before + bytes };
    }
}
