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
const OVERTAKEN_MIN: u64 = 3;
/// And by no more than this, however the path mixes them up: beyond it only time tells.
const OVERTAKEN_MAX: u64 = 1 << 10;
/// An answer may be late by so many eighths of a round trip (RFC 9002: kTimeThreshold is nine of eight).
const LATE_EIGHTHS_MIN: u64 = 1;
/// By a whole round trip, and no more.
const LATE_EIGHTHS_MAX: u64 = 8;

/// See the module head.
#[derive(Debug)]
pub struct Flight {
    /// Order of the first of `sendings`; the first of all has 1.
    base: u64,
    /// The first is still under way.
    sendings: VecDeque<Sending>,
    /// Under way.
    bytes: u64,
    /// Order of the latest that is known to have arrived, or 0.
    latest: u64,
    overtaken: u64,
    late_eighths: u64,
}

/// A datagram as it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sending {
    /// Number of its first byte in the channel.
    pub start: u64,
    /// Its size; 0 if nothing need be sent again when it is lost.
    pub bytes: u64,
    /// When.
    pub sent_at: Time,
    /// What the path had delivered by then.
    pub delivered: u64,
    /// Some of it had been sent before: what is confirmed may be that.
    pub is_again: bool,
    /// There was nothing more to send, though more was allowed.
    pub is_limited: bool,
    /// It has arrived, or is lost.
    pub is_over: bool,
}

impl Default for Flight {
    fn default() -> Self {
        Self {
            base: 1,
            sendings: VecDeque::new(),
            bytes: 0,
            latest: 0,
            overtaken: OVERTAKEN_MIN,
            late_eighths: LATE_EIGHTHS_MIN,
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
        self.sendings.is_empty()
    }

    /// Datagrams that are noted, those that are over behind one that is not included.
    pub fn notes(&self) -> usize {
        self.sendings.len()
    }

    /// The order that the next will have.
    pub fn next(&self) -> u64 {
        self.base + self.sendings.len() as u64
    }

    /// A datagram has left. Says its order.
    pub fn send(&mut self, sending: Sending) -> u64 {
        let order = self.next();
        self.bytes += sending.bytes;
        self.sendings.push_back(sending);
        order
    }

    /// From `first` on there was nothing more to send.
    pub fn mark_limited(&mut self, first: u64) {
        let from = (first.saturating_sub(self.base) as usize).min(self.sendings.len());
        self.sendings.range_mut(from..).for_each(|sending| sending.is_limited = true);
    }

    /// The datagram of that `order` has arrived, unless it is over already. `shortest`: no answer comes sooner, so one that
    /// does is for an earlier sending, and says nothing of what was sent before this one.
    pub fn confirm(&mut self, order: u64, now: Time, shortest: u64) -> Option<Sending> {
        let sending = self.end(order)?;
        if !sending.is_again || now.nanos_since(sending.sent_at) >= shortest {
            self.latest = self.latest.max(order);
        }
        self.trim();
        Some(sending)
    }

    /// The datagram of that `order` is of no use.
    pub fn forget(&mut self, order: u64) {
        self.end(order);
        self.trim();
    }

    /// The oldest that is lost by now, if a round trip takes `round_trip`.
    pub fn next_lost(&mut self, now: Time, round_trip: u64) -> Option<(u64, Sending)> {
        let (order, first) = (self.base, *self.sendings.front()?);
        let is_overtaken = self.latest >= order.saturating_add(self.overtaken);
        let is_late = self.late_at(round_trip).is_some_and(|late| late <= now);
        if !is_overtaken && !is_late {
            return None;
        }
        self.forget(order);
        Some((order, first))
    }

    /// When the oldest will be lost, if something sent later has arrived and it does not.
    pub fn late_at(&self, round_trip: u64) -> Option<Time> {
        let first = self.sendings.front().filter(|_| self.latest > self.base)?;
        let late = round_trip / 8 * self.late_eighths;
        Some(first.sent_at.after(round_trip.saturating_add(late.max(GRANULARITY_NANOS))))
    }

    /// Something given up for lost has arrived all the same.
    pub fn handle_spurious(&mut self) {
        self.overtaken = (self.overtaken * 2).min(OVERTAKEN_MAX);
        self.late_eighths = (self.late_eighths * 2).min(LATE_EIGHTHS_MAX);
    }

    /// All that is under way is lost: the oldest, as long as there is one.
    pub fn give_up(&mut self) -> Option<(u64, Sending)> {
        let (order, first) = (self.base, *self.sendings.front()?);
        self.forget(order);
        Some((order, first))
    }

    fn end(&mut self, order: u64) -> Option<Sending> {
        let place = order.checked_sub(self.base)?;
        let sending = self.sendings.get_mut(place as usize).filter(|sending| !sending.is_over)?;
        sending.is_over = true;
        self.bytes -= sending.bytes;
        Some(*sending)
    }

    fn trim(&mut self) {
        while self.sendings.front().is_some_and(|sending| sending.is_over) {
            self.sendings.pop_front();
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
        flight.confirm(3, at(1), 0).unwrap();
        assert_eq!(lost(&mut flight, at(1)), []);
        flight.confirm(4, at(1), 0).unwrap();
        assert_eq!(lost(&mut flight, at(1)), [1]);
        flight.confirm(5, at(1), 0).unwrap();
        assert_eq!(lost(&mut flight, at(1)), [2]);
        assert_eq!((flight.bytes(), flight.next()), (100, 7));
    }

    #[test]
    fn nothing_is_lost_while_nothing_later_has_come() {
        let mut flight = sent(3);
        assert_eq!((flight.late_at(ROUND_TRIP), lost(&mut flight, at(10_000)).len()), (None, 0));
        flight.confirm(1, at(1), 0).unwrap();
        assert_eq!((flight.late_at(ROUND_TRIP), lost(&mut flight, at(10_000)).len()), (None, 0));
    }

    #[test]
    fn one_that_came_later_shows_a_loss_after_nine_eighths_of_a_round_trip() {
        let mut flight = sent(2);
        flight.confirm(2, at(80), 0).unwrap();
        assert_eq!(flight.late_at(ROUND_TRIP), Some(at(90)));
        assert_eq!(lost(&mut flight, at(89)), []);
        assert_eq!(lost(&mut flight, at(90)), [1]);
        assert!(flight.is_empty());
    }

    #[test]
    fn who_was_wrong_is_more_patient() {
        let mut flight = sent(8);
        flight.handle_spurious();
        flight.confirm(6, at(80), 0).unwrap();
        assert_eq!(flight.late_at(ROUND_TRIP), Some(at(100)));
        assert_eq!(lost(&mut flight, at(80)), []);
        flight.confirm(7, at(80), 0).unwrap();
        assert_eq!(lost(&mut flight, at(80)), [1]);
        (0..100).for_each(|_| flight.handle_spurious());
        assert_eq!(flight.late_at(ROUND_TRIP), Some(at(160)));
    }

    #[test]
    fn an_answer_too_quick_for_the_second_sending_shows_no_loss() {
        for (now, expected) in [(9, 0), (10, 1)] {
            let mut flight = sent(4);
            flight.sendings[3].is_again = true;
            assert!(flight.confirm(4, at(now), 10 * MILLISECOND).is_some());
            assert_eq!(lost(&mut flight, at(now)).len(), expected);
        }
    }

    #[test]
    fn what_is_over_stays_so() {
        let mut flight = sent(3);
        assert!(flight.confirm(2, at(1), 0).is_some());
        assert!(flight.confirm(2, at(1), 0).is_none());
        flight.forget(2);
        flight.forget(9);
        assert!(flight.confirm(0, at(1), 0).is_none() && flight.confirm(4, at(1), 0).is_none());
        assert_eq!(flight.bytes(), 200);
        let all: Vec<u64> = std::iter::from_fn(|| flight.give_up().map(|it| it.0)).collect();
        assert_eq!((all, flight.bytes(), flight.next()), ([1, 3].to_vec(), 0, 4));
    }

    #[test]
    fn those_at_whose_end_there_was_nothing_more_are_marked() {
        let mut flight = sent(3);
        flight.mark_limited(2);
        flight.mark_limited(7);
        let limited = [1, 2, 3].map(|order| flight.confirm(order, at(1), 0).unwrap().is_limited);
        assert_eq!(limited, [false, true, true]);
    }

    fn sent(count: u64) -> Flight {
        let mut flight = Flight::default();
        for number in 0..count {
            let sending = Sending {
                start: number,
                bytes: 100,
                sent_at: at(0),
                delivered: 0,
                is_again: false,
                is_limited: false,
                is_over: false,
            };
            assert_eq!(flight.send(sending), number + 1);
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
