//! What is under way by one path of datagrams, in the order in which it was sent, and what of it is lost.
//!
//! Enters: every datagram that may not get lost, as it leaves; which of them have arrived. Leaves: those that have not and
//! will not, because others that were sent later have (RFC 9002, section 6.1): as many later as datagrams overtake each
//! other by, or so much later as an answer can be late. Both grow when something given up for lost turns out to have
//! been late only.
//!
//! What may never happen: something is lost while nothing sent after it has arrived; bytes count as under way that are
//! neither.

use alloc::collections::VecDeque;

use crate::path::rtt::GRANULARITY_NANOS;
use crate::path::time::Time;

/// A datagram may be overtaken by fewer than this (RFC 9002: kPacketThreshold).
const PACKET_THRESHOLD_MIN: u64 = 3;
/// And by no more than this, however the path mixes them up: beyond it only time tells.
const PACKET_THRESHOLD_MAX: u64 = 1 << 10;
/// An answer may be late by so many eighths of a round trip (RFC 9002: kTimeThreshold is nine of eight).
const TIME_THRESHOLD_EIGHTHS_MIN: u64 = 1;
/// By a whole round trip, and no more.
const TIME_THRESHOLD_EIGHTHS_MAX: u64 = 8;

/// See the module head.
#[derive(Debug)]
pub struct Flight {
    /// Order of the first of `sent_datagrams`; the first of all has 1.
    base: u64,
    /// The first is still under way.
    sent_datagrams: VecDeque<SentDatagram>,
    /// Under way.
    bytes: u64,
    /// Order of the latest that is known to have arrived, or 0.
    largest_acked: u64,
    packet_threshold: u64,
    time_threshold_eighths: u64,
}

/// A datagram as it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentDatagram {
    /// Number of its first byte in the channel.
    pub start: u64,
    /// Its size; 0 if nothing need be sent again when it is lost.
    pub bytes: u64,
    /// When.
    pub sent_at: Time,
    /// What the path had delivered by then.
    pub delivered: u64,
    /// Some of it had been sent before: what is confirmed may be that.
    pub is_retransmission: bool,
    /// There was nothing more to send, though more was allowed.
    pub is_app_limited: bool,
    /// It has arrived, or is lost.
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
    /// Bytes under way.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.sent_datagrams.is_empty()
    }

    /// Datagrams that are noted, those that are over behind one that is not included.
    pub fn tracked_datagrams(&self) -> usize {
        self.sent_datagrams.len()
    }

    /// The order that the next will have.
    pub fn next_order(&self) -> u64 {
        self.base + self.sent_datagrams.len() as u64
    }

    /// A datagram has left. Says its order.
    pub fn send(&mut self, datagram: SentDatagram) -> u64 {
        let order = self.next_order();
        self.bytes += datagram.bytes;
        self.sent_datagrams.push_back(datagram);
        order
    }

    /// From `first` on there was nothing more to send.
    pub fn mark_app_limited(&mut self, first: u64) {
        let from = (first.saturating_sub(self.base) as usize).min(self.sent_datagrams.len());
        self.sent_datagrams.range_mut(from..).for_each(|datagram| datagram.is_app_limited = true);
    }

    /// The datagram of that `order` has arrived, unless it is over already. `shortest`: no answer comes sooner, so one that
    /// does is for an earlier datagram, and says nothing of what was sent before this one.
    pub fn acknowledge(&mut self, order: u64, now: Time, shortest: u64) -> Option<SentDatagram> {
        let datagram = self.resolve(order)?;
        if !datagram.is_retransmission || now.nanos_since(datagram.sent_at) >= shortest {
            self.largest_acked = self.largest_acked.max(order);
        }
        self.trim();
        Some(datagram)
    }

    /// The datagram of that `order` is of no use.
    pub fn forget(&mut self, order: u64) {
        self.resolve(order);
        self.trim();
    }

    /// The oldest that is lost by now, if a round trip takes `round_trip`.
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

    /// When the oldest will be lost, if something sent later has arrived and it does not.
    pub fn loss_time(&self, round_trip: u64) -> Option<Time> {
        let first = self.sent_datagrams.front().filter(|_| self.largest_acked > self.base)?;
        let late = round_trip / 8 * self.time_threshold_eighths;
        Some(first.sent_at.after(round_trip.saturating_add(late.max(GRANULARITY_NANOS))))
    }

    /// Something given up for lost has arrived all the same.
    pub fn handle_spurious_loss(&mut self) {
        self.packet_threshold = (self.packet_threshold * 2).min(PACKET_THRESHOLD_MAX);
        self.time_threshold_eighths =
            (self.time_threshold_eighths * 2).min(TIME_THRESHOLD_EIGHTHS_MAX);
    }

    /// All that is under way is lost: the oldest, as long as there is one.
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
