//! What is in flight on one path of datagrams, in the order of sending, and which datagrams are
//! lost.
//!
//! What enters: every datagram whose loss matters, as it leaves; the datagrams that have arrived.
//! What leaves: the datagrams that are lost, because datagrams sent later have arrived (RFC 9002,
//! section 6.1): as many later datagrams as the packet threshold, or one that was sent as much
//! later as the time threshold. Both thresholds grow when a datagram that was declared lost turns
//! out to have been only late.
//!
//! What may never happen: a datagram is declared lost while nothing sent after it has arrived;
//! bytes count as in flight that have arrived or are lost.

use alloc::collections::VecDeque;

use crate::path::rtt::GRANULARITY_NANOS;
use crate::path::time::Time;

/// The initial packet threshold: a datagram is lost if one this many positions later has arrived
/// (RFC 9002: kPacketThreshold).
const PACKET_THRESHOLD_MIN: u64 = 3;
/// The largest packet threshold, however the path reorders datagrams. Beyond it, only time shows a
/// loss.
const PACKET_THRESHOLD_MAX: u64 = 1 << 10;
/// The initial time threshold, in eighths of a round trip beyond one round trip (RFC 9002:
/// kTimeThreshold is nine eighths).
const TIME_THRESHOLD_EIGHTHS_MIN: u64 = 1;
/// The largest time threshold beyond one round trip: another whole round trip.
const TIME_THRESHOLD_EIGHTHS_MAX: u64 = 8;

/// The datagrams in flight on one path: see the module documentation.
#[derive(Debug)]
pub struct Flight {
    /// The position in the order of sending of the first entry of `sent_datagrams`. The first
    /// datagram of all has position 1.
    base: u64,
    /// The tracked datagrams. The first one is still in flight.
    sent_datagrams: VecDeque<SentDatagram>,
    /// The bytes in flight.
    bytes: u64,
    /// The position of the latest datagram that is known to have arrived, or 0.
    largest_acked: u64,
    packet_threshold: u64,
    time_threshold_eighths: u64,
}

/// A datagram as it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentDatagram {
    /// The number of the datagram's first byte in the channel.
    pub start: u64,
    /// The datagram's size in bytes; 0 if nothing need be retransmitted when the datagram is lost.
    pub bytes: u64,
    /// The time of sending.
    pub sent_at: Time,
    /// The bytes that the path had delivered at the time of sending.
    pub delivered: u64,
    /// Some bytes of the datagram had been sent before, so an acknowledgement may be for the
    /// earlier transmission.
    pub is_retransmission: bool,
    /// There was nothing more to send, though more was allowed.
    pub is_app_limited: bool,
    /// The datagram has arrived, or is lost.
    pub is_resolved: bool,
}

impl Default for Flight {
    fn default() -> Self {
        Self {
            base: 1,
            sent_datagrams: VecDeque::new(),
            bytes: 0,
            largest_acked: 0,
            packet_threshold: PACKET_THRESHOLD_MIN,
            time_threshold_eighths: TIME_THRESHOLD_EIGHTHS_MIN,
        }
    }
}

impl Flight {
    /// The bytes in flight.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.sent_datagrams.is_empty()
    }

    /// The number of tracked datagrams. A resolved datagram is tracked until all datagrams before
    /// it are resolved.
    pub fn tracked_datagrams(&self) -> usize {
        self.sent_datagrams.len()
    }

    /// The position that the next datagram will have.
    pub fn next_order(&self) -> u64 {
        self.base + self.sent_datagrams.len() as u64
    }

    /// Records that a datagram has left. Returns its position in the order of sending.
    pub fn send(&mut self, datagram: SentDatagram) -> u64 {
        let order = self.next_order();
        self.bytes += datagram.bytes;
        self.sent_datagrams.push_back(datagram);
        order
    }

    /// Records that from position `first` on there was nothing more to send.
    pub fn mark_app_limited(&mut self, first: u64) {
        let from = (first.saturating_sub(self.base) as usize).min(self.sent_datagrams.len());
        self.sent_datagrams.range_mut(from..).for_each(|datagram| datagram.is_app_limited = true);
    }

    /// Records that the datagram at position `order` has arrived, unless it is resolved already.
    /// `shortest` is the shortest possible round trip in nanoseconds. An acknowledgement of a
    /// retransmission that comes sooner is for the earlier transmission, and says nothing of the
    /// datagrams sent before this one.
    pub fn acknowledge(&mut self, order: u64, now: Time, shortest: u64) -> Option<SentDatagram> {
        let datagram = self.resolve(order)?;
        if !datagram.is_retransmission || now.nanos_since(datagram.sent_at) >= shortest {
            self.largest_acked = self.largest_acked.max(order);
        }
        self.trim();
        Some(datagram)
    }

    /// Records that the fate of the datagram at position `order` no longer matters.
    pub fn forget(&mut self, order: u64) {
        self.resolve(order);
        self.trim();
    }

    /// The oldest datagram that is lost at time `now`, if a round trip takes `round_trip`
    /// nanoseconds.
    pub fn next_lost(&mut self, now: Time, round_trip: u64) -> Option<(u64, SentDatagram)> {
        let (order, first) = (self.base, *self.sent_datagrams.front()?);
        let is_past_packet_threshold =
            self.largest_acked >= order.saturating_add(self.packet_threshold);
        let is_past_time_threshold = self.loss_time(round_trip).is_some_and(|late| late <= now);
        if !is_past_packet_threshold && !is_past_time_threshold {
            return None;
        }
        self.forget(order);
        Some((order, first))
    }

    /// The time at which the oldest datagram counts as lost unless it arrives, if a datagram sent
    /// later has arrived.
    pub fn loss_time(&self, round_trip: u64) -> Option<Time> {
        let first = self.sent_datagrams.front().filter(|_| self.largest_acked > self.base)?;
        let late = round_trip / 8 * self.time_threshold_eighths;
        Some(first.sent_at.after(round_trip.saturating_add(late.max(GRANULARITY_NANOS))))
    }

    /// Doubles both thresholds, up to their maxima, because a datagram that was declared lost has
    /// arrived.
    pub fn handle_spurious_loss(&mut self) {
        self.packet_threshold = (self.packet_threshold * 2).min(PACKET_THRESHOLD_MAX);
        self.time_threshold_eighths =
            (self.time_threshold_eighths * 2).min(TIME_THRESHOLD_EIGHTHS_MAX);
    }

    /// Removes the oldest datagram as lost, when all datagrams in flight are lost.
    pub fn pop_lost(&mut self) -> Option<(u64, SentDatagram)> {
        let (order, first) = (self.base, *self.sent_datagrams.front()?);
        self.forget(order);
        Some((order, first))
    }

    fn resolve(&mut self, order: u64) -> Option<SentDatagram> {
        let place = order.checked_sub(self.base)?;
        let datagram =
            self.sent_datagrams.get_mut(place as usize).filter(|datagram| !datagram.is_resolved)?;
        datagram.is_resolved = true;
        self.bytes -= datagram.bytes;
        Some(*datagram)
    }

    fn trim(&mut self) {
        while self.sent_datagrams.front().is_some_and(|datagram| datagram.is_resolved) {
            self.sent_datagrams.pop_front();
            self.base += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::time::MILLISECOND;
    use std::vec::Vec;

    const ROUND_TRIP: u64 = 80 * MILLISECOND;

    #[test]
    fn three_that_came_later_show_a_loss_and_two_do_not() {
        let mut flight = sent(6);
        flight.acknowledge(3, at(1), 0).unwrap();
        assert_eq!(lost(&mut flight, at(1)), []);
        flight.acknowledge(4, at(1), 0).unwrap();
        assert_eq!(lost(&mut flight, at(1)), [1]);
        flight.acknowledge(5, at(1), 0).unwrap();
        assert_eq!(lost(&mut flight, at(1)), [2]);
        assert_eq!((flight.bytes(), flight.next_order()), (100, 7));
    }

    #[test]
    fn nothing_is_lost_while_nothing_later_has_come() {
        let mut flight = sent(3);
        assert_eq!((flight.loss_time(ROUND_TRIP), lost(&mut flight, at(10_000)).len()), (None, 0));
        flight.acknowledge(1, at(1), 0).unwrap();
        assert_eq!((flight.loss_time(ROUND_TRIP), lost(&mut flight, at(10_000)).len()), (None, 0));
    }

    #[test]
    fn one_that_came_later_shows_a_loss_after_nine_eighths_of_a_round_trip() {
        let mut flight = sent(2);
        flight.acknowledge(2, at(80), 0).unwrap();
        assert_eq!(flight.loss_time(ROUND_TRIP), Some(at(90)));
        assert_eq!(lost(&mut flight, at(89)), []);
        assert_eq!(lost(&mut flight, at(90)), [1]);
        assert!(flight.is_empty());
    }

    #[test]
    fn who_was_wrong_is_more_patient() {
        let mut flight = sent(8);
        flight.handle_spurious_loss();
        flight.acknowledge(6, at(80), 0).unwrap();
        assert_eq!(flight.loss_time(ROUND_TRIP), Some(at(100)));
        assert_eq!(lost(&mut flight, at(80)), []);
        flight.acknowledge(7, at(80), 0).unwrap();
        assert_eq!(lost(&mut flight, at(80)), [1]);
        (0..100).for_each(|_| flight.handle_spurious_loss());
        assert_eq!(flight.loss_time(ROUND_TRIP), Some(at(160)));
    }

    #[test]
    fn an_answer_too_quick_for_the_second_sending_shows_no_loss() {
        for (now, expected) in [(9, 0), (10, 1)] {
            let mut flight = sent(4);
            flight.sent_datagrams[3].is_retransmission = true;
            assert!(flight.acknowledge(4, at(now), 10 * MILLISECOND).is_some());
            assert_eq!(lost(&mut flight, at(now)).len(), expected);
        }
    }

    #[test]
    fn what_is_over_stays_so() {
        let mut flight = sent(3);
        assert!(flight.acknowledge(2, at(1), 0).is_some());
        assert!(flight.acknowledge(2, at(1), 0).is_none());
        flight.forget(2);
        flight.forget(9);
        assert!(
            flight.acknowledge(0, at(1), 0).is_none() && flight.acknowledge(4, at(1), 0).is_none()
        );
        assert_eq!(flight.bytes(), 200);
        let all: Vec<u64> = std::iter::from_fn(|| flight.pop_lost().map(|it| it.0)).collect();
        assert_eq!((all, flight.bytes(), flight.next_order()), ([1, 3].to_vec(), 0, 4));
    }

    #[test]
    fn those_at_whose_end_there_was_nothing_more_are_marked() {
        let mut flight = sent(3);
        flight.mark_app_limited(2);
        flight.mark_app_limited(7);
        let limited =
            [1, 2, 3].map(|order| flight.acknowledge(order, at(1), 0).unwrap().is_app_limited);
        assert_eq!(limited, [false, true, true]);
    }

    fn sent(count: u64) -> Flight {
        let mut flight = Flight::default();
        for number in 0..count {
            let datagram = SentDatagram {
                start: number,
                bytes: 100,
                sent_at: at(0),
                delivered: 0,
                is_retransmission: false,
                is_app_limited: false,
                is_resolved: false,
            };
            assert_eq!(flight.send(datagram), number + 1);
        }
        flight
    }

    fn lost(flight: &mut Flight, now: Time) -> Vec<u64> {
        std::iter::from_fn(|| flight.next_lost(now, ROUND_TRIP).map(|it| it.0)).collect()
    }

    fn at(millis: u64) -> Time {
        Time(millis * MILLISECOND)
    }
}
