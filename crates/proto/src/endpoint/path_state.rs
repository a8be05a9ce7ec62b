//! One path to a peer as its channel knows it: what it can do, what it has done, and how much may be under way on it.

use alloc::boxed::Box;

use super::channel::SentPiece;
use super::datagram_flow::DatagramFlow;
use crate::channel::{RetainedFrame, RetainedState};
use crate::limit;
use crate::path::congestion;
use crate::path::rate::DeliveryRate;
use crate::path::rtt::RttEstimator;
use crate::path::time::Time;

/// What the path to a peer can do. Chosen when it opens, never per message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathProperties {
    /// Payload of one frame.
    pub payload_max: u32,
    /// A message up to this size goes out whole, credit permitting.
    pub eager_max: u32,
    /// First piece of a longer one: enough to cover the time until the grant arrives.
    pub first_piece: u32,
    /// The receiver may read the sender's memory: messages longer than `eager_max` send no first piece.
    pub pull: bool,
    /// Bytes of a long message granted ahead of those taken in.
    pub window: u64,
    /// A longer message goes on behind its first piece without waiting for the grant, as far as credit reaches. For paths
    /// on which waiting costs more than a copy of what comes before its receive.
    pub ahead: bool,
    /// It keeps every frame for as long as both processes live (shared memory): nothing need be kept for sending it again.
    pub lossless: bool,
    /// Frames carry checks.
    pub checked: bool,
    /// Payload up to this is copied for sending it again, so that its operation is done when the path has it. Larger
    /// payload stays with the application until the peer has it.
    pub copy_max: u32,
    /// Frames go out by it only when no other path is up.
    pub spare: bool,
    /// What is sent by it later may arrive sooner: relays share frames out over several streams, and datagrams are free.
    pub reorders: bool,
    /// It can lose frames without a word about it: what is not confirmed by it is asked for after a while.
    pub silent_loss: bool,
    /// Every frame is one datagram, which may be lost, doubled, reordered or late without a word; how many may be under way
    /// is decided in this manner. `payload_max` is what fits into one beside header, head and check.
    pub datagram: Option<congestion::CongestionAlgorithm>,
}

impl PathProperties {
    /// For peers behind relays, and until a path is known.
    pub const RELAY: PathProperties = PathProperties {
        payload_max: limit::RELAY_PAYLOAD_BYTES_MAX as u32,
        eager_max: limit::RELAY_PAYLOAD_BYTES_MAX as u32,
        first_piece: limit::RELAY_PAYLOAD_BYTES_MAX as u32,
        pull: false,
        window: limit::RELAY_WINDOW_BYTES,
        ahead: true,
        lossless: false,
        checked: false,
        copy_max: limit::RELAY_PAYLOAD_BYTES_MAX as u32,
        spare: false,
        reorders: true,
        silent_loss: true,
        datagram: None,
    };

    /// The same path without sizes that frames cannot have, or with which nothing would move.
    pub(super) fn within_limits(self) -> PathProperties {
        let payload_max = self.payload_max.clamp(1, PAYLOAD_BYTES_MAX);
        PathProperties {
            payload_max,
            eager_max: self.eager_max.min(payload_max),
            first_piece: self.first_piece.min(payload_max),
            window: self.window.max(1),
            lossless: self.lossless && self.datagram.is_none(),
            silent_loss: self.silent_loss || self.datagram.is_some(),
            ..self
        }
    }
}

/// What a path has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStatistics {
    /// Bytes of the channel that it was given.
    pub bytes: u64,
    /// Of those, the bytes that had been sent before, by this path or another.
    pub retransmitted_bytes: u64,
    /// Frames go out by it only when no other path is up.
    pub is_spare: bool,
    /// What it delivers, if that was measured.
    pub bytes_per_second: Option<u64>,
    /// From a frame to its confirmation, if that was measured.
    pub round_trip_nanos: Option<u64>,
    /// Datagrams larger than what every network carries that were lost since one of them arrived: after some
    /// ([`crate::path::mtu::BLACK_HOLE_LOSSES`]) they do not pass any more.
    pub large_lost: u32,
}

/// Payload of one frame, whatever its head.
const PAYLOAD_BYTES_MAX: u32 = (limit::FRAME_BODY_BYTES_MAX - limit::KIND_HEADER_BYTES_MAX) as u32;

/// A path as the channel knows it.
pub(super) struct PathState {
    pub path: PathProperties,
    pub is_up: bool,
    /// See [`Endpoint::suspect_path`](super::Endpoint::suspect_path).
    pub is_suspected: bool,
    /// The frame that it holds but has not quite sent.
    pub held: Option<SentPiece>,
    /// Bytes of the channel that it was given; not counted while nothing is kept for it.
    pub carried: u64,
    /// Of those, the ones that had been sent before.
    pub retransmitted: u64,
    /// What it delivers, and how long that takes. Kept only while frames may choose between paths.
    pub rate: DeliveryRate,
    pub round_trip: RttEstimator,
    /// What is under way by datagrams, and how much may be.
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

    /// Frames go out by those with the lowest rank.
    pub fn rank(&self) -> (bool, bool) {
        (self.is_suspected, self.path.spare)
    }

    /// When `bytes` more would be there, from now on.
    pub fn finish_nanos(&self, bytes: u64) -> u64 {
        let round_trip = self.round_trip.smoothed_nanos().unwrap_or(0);
        self.rate.finish_nanos(self.rate.outstanding_bytes(), bytes, round_trip)
    }

    /// It can do something else from now on. True: what is under way by it is not watched any more.
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

    /// Whether new bytes, or such as go again, may leave by it now.
    pub fn is_open(&self) -> bool {
        self.flow.as_ref().is_none_or(|flow| flow.is_open())
    }

    /// A frame of it is confirmed.
    pub fn handle_confirmed<M>(&mut self, now: Time, frame: &RetainedFrame<M>) {
        match &mut self.flow {
            Some(flow) if frame.state == RetainedState::InFlight => {
                flow.handle_confirmed(now, frame.order, &self.round_trip);
            }
            Some(flow) => flow.handle_spurious_loss(),
            None if frame.sent_at != RetainedFrame::<M>::UNKNOWN => {
                self.round_trip.handle_sample(now, now.nanos_since(frame.sent_at));
            }
            None => (),
        }
        self.rate.handle_delivered(now, frame.length as u64);
    }

    /// A frame of it will not arrive, for reasons that say nothing about how much may be under way.
    pub fn handle_lost<M>(&mut self, frame: &RetainedFrame<M>) {
        self.rate.handle_lost(frame.length as u64);
        if let Some(flow) = &mut self.flow {
            flow.forget(frame.order);
        }
    }

    /// Takes in what has been confirmed of it. False: nothing has, or it is not watched.
    pub fn process_acks(&mut self, now: Time) -> bool {
        let round_trip = &mut self.round_trip;
        self.flow.as_mut().is_some_and(|flow| flow.process_acks(now, round_trip))
    }

    /// See [`DatagramFlow::next_lost`].
    pub fn next_lost(&mut self, now: Time) -> Option<(u64, Option<u64>)> {
        self.flow.as_mut()?.next_lost(now, &self.round_trip)
    }

    /// See [`DatagramFlow::due`].
    pub fn due(&self) -> Option<Time> {
        self.flow.as_ref().filter(|_| self.is_up)?.due(&self.round_trip)
    }
}

fn new_datagram_flow(path: &PathProperties) -> Option<Box<DatagramFlow>> {
    path.datagram.map(|kind| Box::new(DatagramFlow::new(kind, path.payload_max)))
}
