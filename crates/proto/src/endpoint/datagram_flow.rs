//! The transmission state of one path of datagrams: how much may be in flight, how fast datagrams
//! may leave, which of them are lost, and when to send a status request.
//!
//! What enters: what leaves by the path, what of it is acknowledged, the time. What leaves: whether
//! more may be sent now, what is lost, when to act next. The parts are independent: [`Flight`]
//! knows what is in flight, [`Congestion`] how much may be in flight, [`Pacer`] how fast it may
//! leave, [`ProbeTimeout`] how long to wait for an answer.
//!
//! What may never happen: nothing is in flight and nothing may ever be sent; payload is
//! retransmitted because the peer is silent.

use alloc::collections::VecDeque;

use crate::channel::flight::{Flight, SentDatagram};
use crate::channel::probe_timeout::ProbeTimeout;
use crate::limit::{CHECKSUM_BYTES, KIND_HEADER_BYTES_MAX};
use crate::path::congestion::{Congestion, CongestionAlgorithm};
use crate::path::mtu::BASE_BYTES;
use crate::path::pacer::{BATCH_BYTES_MAX, Pacer};
use crate::path::rtt::RttEstimator;
use crate::path::time::{MILLISECOND, Time};
use crate::path::window::Acked;
use crate::wire::frame::HEADER_BYTES;

/// An acknowledgement leaves at most this long after a datagram has arrived, in nanoseconds.
pub(super) const ACK_DELAY_NANOS_MAX: u64 = MILLISECOND;

/// The most status requests without an answer. Each waits twice as long as the one before, so this
/// many last for hours.
const STATUS_REQUESTS_MAX: usize = 16;

/// The transmission state of one path of datagrams: see the module documentation.
#[derive(Debug)]
pub(super) struct DatagramFlow {
    pub kind: CongestionAlgorithm,
    /// The size of the largest datagram in bytes.
    datagram: u64,
    flight: Flight,
    congestion: Congestion,
    pacer: Pacer,
    probe_timeout: ProbeTimeout,
    /// The status requests that have left and are not answered: number, and position in the order
    /// of sending.
    status_requests: VecDeque<(u64, u64)>,
    /// The latest datagram that was acknowledged since [`DatagramFlow::process_acks`] ran.
    newest_acked: Option<(u64, SentDatagram)>,
    /// No datagram from this position in the order of sending on has been limited by the window or
    /// the pacer.
    app_limited_from: u64,
    /// More may be sent now.
    is_open: bool,
    /// The time at which the pacer lets more be sent.
    open_at: Option<Time>,
    /// The next datagram could have been sent earlier, but the window or the pacer held it back.
    was_blocked: bool,
    /// The driver did not poll while more could have been sent, so the next datagram says less than
    /// the path can do.
    is_behind: bool,
    /// The number of large datagrams lost since one arrived.
    large_lost: u32,
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

impl DatagramFlow {
    pub fn new(kind: CongestionAlgorithm, payload_max: u32) -> Self {
        let datagram = datagram_bytes(payload_max);
        Self {
            kind,
            datagram,
            flight: Flight::default(),
            congestion: Congestion::new(kind, datagram),
            pacer: Pacer::new(BATCH_BYTES_MAX),
            probe_timeout: ProbeTimeout::default(),
            status_requests: VecDeque::new(),
            newest_acked: None,
            app_limited_from: 1,
            is_open: true,
            open_at: None,
            was_blocked: false,
            is_behind: false,
            large_lost: 0,
        }
    }

    /// The number of large datagrams lost since one arrived: see
    /// [`super::PathStatistics::large_lost`].
    pub fn large_lost(&self) -> u32 {
        self.large_lost
    }

    /// What is in flight, as far as this flow knows.
    pub fn in_flight_usage(&self) -> InFlightUsage {
        InFlightUsage {
            counted: self.flight.bytes(),
            kept: 0,
            tracked_datagrams: self.flight.tracked_datagrams(),
            status_requests: self.status_requests.len(),
            window: self.congestion.window_bytes(),
            datagram: self.datagram,
        }
    }

    /// Sets the size of the datagrams from now on.
    pub fn set_payload_max(&mut self, payload_max: u32) {
        let datagram = datagram_bytes(payload_max);
        if datagram != self.datagram {
            self.datagram = datagram;
            self.congestion.set_mtu(datagram);
        }
    }

    /// Computes whether one more datagram may be sent now, for [`DatagramFlow::is_open`]. `wants`
    /// says that a datagram waits.
    pub fn update_openness(&mut self, now: Time, wants: bool) {
        let under_way = self.flight.bytes();
        let has_room =
            under_way == 0 || under_way + self.datagram <= self.congestion.window_bytes();
        self.pacer.handle_time(now);
        self.is_behind |= self.pacer.is_behind(now);
        // Cubic's rate is more than its window needs, and Cubic would lose what it sends at once.
        let awaits = wants && has_room && self.kind == CongestionAlgorithm::Bbr;
        self.pacer.set_awaited(now, awaits);
        let is_paced = self.pacer.delay_nanos(now, self.datagram) > 0;
        self.is_open = has_room && !is_paced;
        self.was_blocked = wants && (self.was_blocked || !self.is_open);
        self.open_at = None;
        if wants && !self.is_open {
            self.app_limited_from = self.flight.next_order();
            if has_room {
                // The wait is for half a burst, so that a driver that sleeps meanwhile wakes up for
                // more than one datagram.
                let bytes = (self.pacer.capacity() / 2).max(self.datagram);
                self.open_at = Some(now.after(self.pacer.delay_nanos(now, bytes).max(1)));
            }
        }
    }

    /// Whether one more datagram may be sent now: see [`DatagramFlow::update_openness`].
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Records that the application has nothing to send although more could be sent.
    pub fn handle_app_limited(&mut self) {
        if self.is_open {
            self.flight.mark_app_limited(self.app_limited_from);
            self.app_limited_from = self.flight.next_order();
        }
    }

    /// Records that a frame of `payload` bytes, from byte `start` of the channel on, has left.
    /// Returns its position in the order of sending.
    pub fn handle_sent(
        &mut self,
        now: Time,
        start: u64,
        payload: u64,
        is_retransmission: bool,
    ) -> u64 {
        let bytes = payload + HEADER_BYTES as u64;
        let order = self.flight.send(SentDatagram {
            start,
            bytes,
            sent_at: now,
            delivered: self.congestion.delivered_bytes(),
            is_retransmission,
            is_app_limited: core::mem::take(&mut self.is_behind),
            is_resolved: false,
        });
        let was_held = core::mem::take(&mut self.was_blocked);
        self.congestion.handle_sent(now, bytes, self.flight.bytes(), was_held);
        self.pacer.handle_sent(now, bytes);
        self.probe_timeout.start(now);
        order
    }

    /// Records that status request `number` has left.
    pub fn handle_status_request_sent(&mut self, now: Time, number: u64) {
        let order = self.flight.send(SentDatagram {
            start: 0,
            bytes: 0,
            sent_at: now,
            delivered: self.congestion.delivered_bytes(),
            is_retransmission: false,
            is_app_limited: true,
            is_resolved: false,
        });
        if self.status_requests.len() == STATUS_REQUESTS_MAX {
            self.status_requests.pop_front();
        }
        self.status_requests.push_back((number, order));
        self.probe_timeout.start(now);
    }

    /// Records that the datagram at position `order` has arrived. `shortest` is an argument of
    /// [`Flight::acknowledge`].
    pub fn handle_acknowledged(&mut self, now: Time, order: u64, round_trip: &RttEstimator) {
        let shortest = round_trip.minimum_nanos().unwrap_or(0);
        let Some(datagram_sent) = self.flight.acknowledge(order, now, shortest) else { return };
        if datagram_sent.is_retransmission && now.nanos_since(datagram_sent.sent_at) < shortest {
            self.flight.handle_spurious_loss();
        }
        let older = match self.newest_acked {
            Some((latest, _)) if latest > order => Some(datagram_sent),
            _ => self
                .newest_acked
                .replace((order, datagram_sent))
                .map(|(_, datagram_sent)| datagram_sent),
        };
        if let Some(datagram_sent) = older {
            self.acknowledge(now, &datagram_sent, None);
        }
    }

    /// Records that a datagram that was declared lost has arrived.
    pub fn handle_spurious_loss(&mut self) {
        self.flight.handle_spurious_loss();
    }

    /// Records that status request `number` is answered.
    pub fn handle_status_reply(&mut self, now: Time, number: u64, round_trip: &RttEstimator) {
        if let Some(place) = self.status_requests.iter().position(|&(ask, _)| ask == number) {
            let order = self.status_requests[place].1;
            self.status_requests.drain(..=place);
            self.handle_acknowledged(now, order, round_trip);
            self.probe_timeout.handle_progress(now);
        }
    }

    /// Processes the acknowledgements of one batch. Returns false if they acknowledge nothing new.
    pub fn process_acks(&mut self, now: Time, round_trip: &mut RttEstimator) -> bool {
        let Some((_, datagram_sent)) = self.newest_acked.take() else { return false };
        let sample = now.nanos_since(datagram_sent.sent_at);
        let sample = (!datagram_sent.is_retransmission).then_some(sample);
        if let Some(sample) = sample {
            round_trip.handle_sample(now, sample);
        }
        self.acknowledge(now, &datagram_sent, sample);
        self.probe_timeout.handle_progress(now);
        self.stop_probe_if_idle();
        true
    }

    fn acknowledge(&mut self, now: Time, datagram_sent: &SentDatagram, rtt_nanos: Option<u64>) {
        let acked = Acked {
            bytes: datagram_sent.bytes,
            sent_at: datagram_sent.sent_at,
            delivered_at_send: datagram_sent.delivered,
            rtt_nanos,
            is_app_limited: datagram_sent.is_app_limited,
        };
        if is_large(datagram_sent) {
            self.large_lost = 0;
        }
        self.congestion.handle_acked(now, acked);
        self.pacer.set_rate(now, self.congestion.rate_bytes_per_second());
    }

    /// The next lost datagram: its position in the order of sending, and its first byte if it
    /// carries anything to retransmit.
    pub fn next_lost(
        &mut self,
        now: Time,
        round_trip: &RttEstimator,
    ) -> Option<(u64, Option<u64>)> {
        let (order, datagram_sent) = self.flight.next_lost(now, loss_delay_rtt(round_trip))?;
        Some((order, self.lose(now, datagram_sent)))
    }

    /// Declares lost everything in flight, status requests included, because no acknowledgement
    /// will come.
    pub fn lose_in_flight(&mut self, now: Time) {
        while let Some((_, datagram_sent)) = self.flight.pop_lost() {
            self.lose(now, datagram_sent);
        }
        self.probe_timeout.stop();
    }

    fn lose(&mut self, now: Time, datagram_sent: SentDatagram) -> Option<u64> {
        self.stop_probe_if_idle();
        if datagram_sent.bytes == 0 {
            return None;
        }
        self.large_lost = self.large_lost.saturating_add(is_large(&datagram_sent) as u32);
        self.congestion.handle_lost(now, datagram_sent.bytes, datagram_sent.sent_at);
        self.pacer.set_rate(now, self.congestion.rate_bytes_per_second());
        Some(datagram_sent.start)
    }

    /// Forgets the datagram at position `order`, whose loss or arrival says nothing about the path.
    pub fn forget(&mut self, order: u64) {
        self.flight.forget(order);
        self.stop_probe_if_idle();
    }

    fn stop_probe_if_idle(&mut self) {
        if self.flight.is_empty() {
            self.probe_timeout.stop();
        }
    }

    /// Processes the time. Returns true if a status request must be sent to the peer.
    pub fn handle_time(&mut self, now: Time, round_trip: &RttEstimator) -> bool {
        self.open_at.take_if(|at| *at <= now);
        let due = self.probe_timeout.due(probe_timeout_nanos(round_trip));
        if due.is_none_or(|due| due > now) {
            return false;
        }
        self.probe_timeout.handle_timeout(now);
        self.congestion.handle_timeout(now);
        self.pacer.set_rate(now, self.congestion.rate_bytes_per_second());
        true
    }

    /// The time of the next action.
    pub fn due(&self, round_trip: &RttEstimator) -> Option<Time> {
        let times = [
            self.probe_timeout.due(probe_timeout_nanos(round_trip)),
            self.flight.loss_time(loss_delay_rtt(round_trip)),
            self.open_at,
        ];
        times.into_iter().flatten().min()
    }
}

/// The size of a datagram in bytes, for a head of the maximum length.
fn datagram_bytes(payload_max: u32) -> u64 {
    payload_max as u64 + (HEADER_BYTES + KIND_HEADER_BYTES_MAX + CHECKSUM_BYTES) as u64
}

fn is_large(datagram_sent: &SentDatagram) -> bool {
    datagram_sent.bytes > BASE_BYTES as u64
}

/// The time that an answer may take while nothing is lost, in nanoseconds.
fn probe_timeout_nanos(round_trip: &RttEstimator) -> u64 {
    round_trip.base_timeout_nanos().saturating_add(ACK_DELAY_NANOS_MAX)
}

/// The round trip from which the time threshold of loss detection is computed (RFC 9002, section
/// 6.1.2), in nanoseconds.
fn loss_delay_rtt(round_trip: &RttEstimator) -> u64 {
    let (smoothed, latest) = (round_trip.smoothed_nanos(), round_trip.latest_nanos());
    smoothed.max(latest).unwrap_or(crate::path::rtt::TIMEOUT_NANOS_INITIAL)
}
