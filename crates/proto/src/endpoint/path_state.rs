//! One path to a peer as its channel knows it: what the path can do, what it has carried, and how
//! much may be in flight on it.

use alloc::boxed::Box;

use super::datagram_flow::DatagramFlow;
use super::operation::SentPiece;
use crate::channel::{RetainedFrame, RetainedState};
use crate::limit;
use crate::path::congestion;
use crate::path::rate::DeliveryRate;
use crate::path::rtt::RttEstimator;
use crate::path::time::Time;

/// What a path to a peer can do. The driver chooses these properties when the path opens, never per
/// message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathProperties {
    /// The most payload bytes of one frame.
    pub payload_max: u32,
    /// A message up to this many bytes is sent whole, credit permitting.
    pub eager_max: u32,
    /// The bytes of the first piece of a longer message: enough to cover the time until the grant
    /// arrives.
    pub first_piece: u32,
    /// The receiver may read the sender's memory, so messages longer than `eager_max` send no
    /// payload in their first frame.
    pub pull: bool,
    /// Bytes of a long message that the receiver grants beyond those that have arrived.
    pub window: u64,
    /// A longer message goes on behind its first piece without waiting for the grant, as far as
    /// credit reaches. This suits paths on which waiting costs more than a copy of the payload that
    /// arrives before its receive is posted.
    pub ahead: bool,
    /// The path keeps every frame for as long as both processes live (shared memory), so nothing
    /// need be retained for retransmission.
    pub lossless: bool,
    /// The path takes every frame at once, however many there are (a message log): only what the
    /// peer has acknowledged bounds how much is under way, to [`REORDER_WINDOW_BYTES_MAX`]. Such a
    /// path is lossless.
    pub unbounded: bool,
    /// Frames carry checksums.
    pub checked: bool,
    /// Payload of up to this many bytes is copied for retransmission, so that its operation is done
    /// when the path has taken it. Larger payload stays with the application until the peer has it.
    pub copy_max: u32,
    /// Frames are sent by this path only when no other path is up.
    pub spare: bool,
    /// A frame that is sent later may arrive earlier: relays distribute frames over several
    /// streams, and datagrams are unordered.
    pub reorders: bool,
    /// The path can lose frames without reporting the loss. If a frame is not acknowledged for a
    /// while, a status request follows.
    pub silent_loss: bool,
    /// Every frame is one datagram, which may be lost, duplicated, reordered or late without a
    /// report. The value is the congestion control algorithm that decides how much may be in
    /// flight. `payload_max` is what fits into a datagram together with header, head and checksum.
    pub datagram: Option<congestion::CongestionAlgorithm>,
}

impl PathProperties {
    /// The properties for peers behind relays, and for every peer until a path is known.
    pub const RELAY: PathProperties = PathProperties {
        payload_max: limit::RELAY_PAYLOAD_BYTES_MAX as u32,
        eager_max: limit::RELAY_PAYLOAD_BYTES_MAX as u32,
        first_piece: limit::RELAY_PAYLOAD_BYTES_MAX as u32,
        pull: false,
        window: limit::RELAY_WINDOW_BYTES,
        ahead: true,
        lossless: false,
        unbounded: false,
        checked: false,
        copy_max: limit::RELAY_PAYLOAD_BYTES_MAX as u32,
        spare: false,
        reorders: true,
        silent_loss: true,
        datagram: None,
    };

    /// Whether what is under way on this path must be acknowledged now and then.
    #[inline]
    pub(super) fn is_acknowledged(&self) -> bool {
        !self.lossless || self.unbounded
    }

    /// Replaces sizes that no frame can have, and sizes that would stop all traffic, by allowed
    /// sizes.
    pub(super) fn within_limits(self) -> PathProperties {
        let payload_max = self.payload_max.clamp(1, PAYLOAD_BYTES_MAX);
        PathProperties {
            payload_max,
            eager_max: self.eager_max.min(payload_max),
            first_piece: self.first_piece.min(payload_max),
            window: self.window.max(1),
            lossless: self.lossless && self.datagram.is_none(),
            unbounded: self.unbounded && self.lossless && self.datagram.is_none(),
            silent_loss: self.silent_loss || self.datagram.is_some(),
            ..self
        }
    }
}

/// What a path has carried, and what is known of its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStatistics {
    /// Bytes of the channel that the path was given.
    pub bytes: u64,
    /// Of the bytes that the path was given, those that had been sent before, by this path or
    /// another.
    pub retransmitted_bytes: u64,
    /// Frames are sent by this path only when no other path is up.
    pub is_spare: bool,
    /// The measured rate, if there is one.
    pub bytes_per_second: Option<u64>,
    /// The measured time from a frame to its acknowledgement, if there is one.
    pub round_trip_nanos: Option<u64>,
    /// The number of datagrams larger than what every network carries that were lost since one of
    /// them arrived. From [`crate::path::mtu::BLACK_HOLE_LOSSES`] on, such datagrams are taken not
    /// to pass any more.
    pub large_lost: u32,
}

/// The most payload bytes of one frame, for a head of the maximum length.
const PAYLOAD_BYTES_MAX: u32 = (limit::FRAME_BODY_BYTES_MAX - limit::KIND_HEADER_BYTES_MAX) as u32;

/// A path as its channel knows it.
pub(super) struct PathState {
    pub path: PathProperties,
    pub is_up: bool,
    /// The driver suspects that the path has died: see
    /// [`ChannelMut::suspect_path`](super::ChannelMut::suspect_path).
    pub is_suspected: bool,
    /// The frame of which the path has taken a part and still holds the rest.
    pub held: Option<SentPiece>,
    /// Bytes of the channel that the path was given; not counted for a lossless path.
    pub carried: u64,
    /// Of the bytes that the path was given, those that had been sent before.
    pub retransmitted: u64,
    /// The rate of the path. Measured only while frames may choose between paths.
    pub rate: DeliveryRate,
    pub round_trip: RttEstimator,
    /// What is in flight as datagrams, and how much may be.
    pub flow: Option<Box<DatagramFlow>>,
}

impl PathState {
    pub fn new(path: PathProperties) -> Self {
        Self {
            path,
            is_up: true,
            is_suspected: false,
            held: None,
            carried: 0,
            retransmitted: 0,
            rate: DeliveryRate::new(),
            round_trip: RttEstimator::new(),
            flow: new_datagram_flow(&path),
        }
    }

    /// The rank of the path: frames are sent by the paths of the lowest rank.
    pub fn rank(&self) -> (bool, bool) {
        (self.is_suspected, self.path.spare)
    }

    /// The time from now until `bytes` more bytes would have arrived, in nanoseconds.
    pub fn finish_nanos(&self, bytes: u64) -> u64 {
        let round_trip = self.round_trip.smoothed_nanos().unwrap_or(0);
        self.rate.finish_nanos(self.rate.outstanding_bytes(), bytes, round_trip)
    }

    /// Sets the properties of the path. Returns true if the datagrams in flight are no longer
    /// tracked.
    pub fn set_path(&mut self, path: PathProperties) -> bool {
        self.path = path;
        match &mut self.flow {
            Some(flow) if path.datagram == Some(flow.kind) => {
                flow.set_payload_max(path.payload_max);
                false
            }
            None if path.datagram.is_none() => false,
            flow => {
                *flow = new_datagram_flow(&path);
                true
            }
        }
    }

    /// Whether new bytes and retransmissions may be sent by the path now.
    pub fn is_open(&self) -> bool {
        self.flow.as_ref().is_none_or(|flow| flow.is_open())
    }

    /// Records that a frame of the path is acknowledged.
    pub fn handle_acknowledged<M>(&mut self, now: Time, frame: &RetainedFrame<M>) {
        match &mut self.flow {
            Some(flow) if frame.state == RetainedState::InFlight => {
                flow.handle_acknowledged(now, frame.order, &self.round_trip);
            }
            Some(flow) => flow.handle_spurious_loss(),
            None if frame.sent_at != RetainedFrame::<M>::UNKNOWN => {
                self.round_trip.handle_sample(now, now.nanos_since(frame.sent_at));
            }
            None => (),
        }
        self.rate.handle_delivered(now, frame.length as u64);
    }

    /// Records that a frame of the path will not arrive, for reasons that say nothing about the
    /// congestion window.
    pub fn handle_lost<M>(&mut self, frame: &RetainedFrame<M>) {
        self.rate.handle_lost(frame.length as u64);
        if let Some(flow) = &mut self.flow {
            flow.forget(frame.order);
        }
    }

    /// Processes the path's acknowledgements. Returns false if they acknowledge nothing new, or if
    /// the path carries no datagrams.
    pub fn process_acks(&mut self, now: Time) -> bool {
        let round_trip = &mut self.round_trip;
        self.flow.as_mut().is_some_and(|flow| flow.process_acks(now, round_trip))
    }

    /// The next lost datagram: see [`DatagramFlow::next_lost`].
    pub fn next_lost(&mut self, now: Time) -> Option<(u64, Option<u64>)> {
        self.flow.as_mut()?.next_lost(now, &self.round_trip)
    }

    /// The time of the path's next action: see [`DatagramFlow::due`].
    pub fn due(&self) -> Option<Time> {
        self.flow.as_ref().filter(|_| self.is_up)?.due(&self.round_trip)
    }
}

fn new_datagram_flow(path: &PathProperties) -> Option<Box<DatagramFlow>> {
    path.datagram.map(|kind| Box::new(DatagramFlow::new(kind, path.payload_max)))
}
