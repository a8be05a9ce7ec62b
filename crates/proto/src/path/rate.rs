//! The delivery rate of a path of any kind, for dividing work between paths.
//!
//! The owner reports what it hands to the path and what the peer has acknowledged. Packets are not
//! needed, so the estimate serves TCP, shared memory and relays too. The rate is taken from the
//! spacing of acknowledgements while bytes are in flight. The first acknowledgement after idleness
//! only starts the measurement, so neither the delay of the path nor the pauses of the application
//! count as slowness. A path that was given little to do cannot show its rate: such a measurement
//! may raise the estimate, never lower it. A path without any measurement is assumed to have a
//! common rate, so that it gets frames.

use super::time::{MICROSECOND, Time, nanos_for, rate_of};

/// The assumed rate of a path without measurement, in bytes per second: 1 Gbit/s.
pub const RATE_UNKNOWN: u64 = 125_000_000;

/// The shortest span that is measured, in nanoseconds. Acknowledgements come in bunches, and a
/// process receives several at once; on a shorter span, the bunching would be measured.
pub const SPAN_NANOS_MIN: u64 = 100 * MICROSECOND;

/// The fewest bytes that are measured: some datagrams. With fewer bytes a path would seem as fast
/// as memory.
pub const SPAN_BYTES_MIN: u64 = 16 << 10;

/// With fewer bytes in flight than this, a path has too little to do to show its rate: one batch.
pub const LOAD_BYTES_MIN: u64 = 64 << 10;

/// The inverse of the weight with which a measurement enters the estimate.
const SMOOTHING: u64 = 4;

/// The delivery rate of one path.
#[derive(Clone, Debug, Default)]
pub struct DeliveryRate {
    /// The estimated rate in bytes per second.
    estimate: Option<u64>,
    outstanding: u64,
    span: Option<Span>,
}

/// A measurement that has begun and not ended.
#[derive(Clone, Copy, Debug)]
struct Span {
    since: Time,
    bytes: u64,
    /// The fewest bytes that were in flight during the measurement.
    load: u64,
}

impl DeliveryRate {
    /// A rate without measurement.
    pub fn new() -> DeliveryRate {
        DeliveryRate::default()
    }

    /// Records that `bytes` bytes were handed to the path.
    pub fn handle_sent(&mut self, bytes: u64) {
        self.outstanding = self.outstanding.saturating_add(bytes);
    }

    /// Records that `bytes` bytes will not be acknowledged, because they were lost or moved to
    /// another path.
    pub fn handle_lost(&mut self, bytes: u64) {
        self.leave(bytes);
    }

    /// Records that the peer acknowledged `bytes` bytes.
    pub fn handle_delivered(&mut self, now: Time, bytes: u64) {
        let load = self.outstanding;
        self.outstanding = load.saturating_sub(bytes);
        let Some(span) = &mut self.span else {
            self.span = self.watch(now);
            return;
        };
        span.bytes = span.bytes.saturating_add(bytes);
        // The load is what was in flight before this acknowledgement. The last acknowledgement of a
        // message does not show that the path had nothing to do while it delivered the message.
        span.load = span.load.min(load);
        let span = *span;
        let nanos = now.nanos_since(span.since);
        if now < span.since {
            self.span = self.watch(now);
        } else if nanos >= SPAN_NANOS_MIN && span.bytes >= SPAN_BYTES_MIN {
            self.learn(rate_of(span.bytes, nanos), span.load >= LOAD_BYTES_MIN);
            self.span = self.watch(now);
        } else if self.outstanding == 0 {
            self.span = None;
        }
    }

    /// The bytes handed to the path and not yet acknowledged.
    pub fn outstanding_bytes(&self) -> u64 {
        self.outstanding
    }

    /// The measured rate in bytes per second, if there is one.
    pub fn measured(&self) -> Option<u64> {
        self.estimate
    }

    /// The measured rate or, without one, [`RATE_UNKNOWN`], in bytes per second.
    pub fn bytes_per_second(&self) -> u64 {
        self.estimate.unwrap_or(RATE_UNKNOWN)
    }

    /// The time from now until `more_bytes`, handed over behind `outstanding_bytes`, would be with
    /// the peer, in nanoseconds: half a round trip and the transfer time of all these bytes.
    pub fn finish_nanos(&self, outstanding_bytes: u64, more_bytes: u64, rtt_nanos: u64) -> u64 {
        let bytes = outstanding_bytes.saturating_add(more_bytes);
        nanos_for(bytes, self.bytes_per_second()).saturating_add(rtt_nanos / 2)
    }

    fn watch(&self, now: Time) -> Option<Span> {
        let busy = self.outstanding > 0;
        busy.then_some(Span { since: now, bytes: 0, load: self.outstanding })
    }

    fn leave(&mut self, bytes: u64) {
        self.outstanding = self.outstanding.saturating_sub(bytes);
        if self.outstanding == 0 {
            self.span = None;
        }
    }

    fn learn(&mut self, sample: u64, is_loaded: bool) {
        let sample = sample.max(1);
        let Some(before) = self.estimate else {
            self.estimate = (is_loaded || sample > RATE_UNKNOWN).then_some(sample);
            return;
        };
        if is_loaded || sample > before {
            let kept = before - before / SMOOTHING;
            self.estimate = Some(kept.saturating_add(sample / SMOOTHING).max(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::time::{MILLISECOND, SECOND};
    use super::*;

    /// Sends `bytes` at once and acknowledges them in packets at `rate`, after `delay`.
    fn message(path: &mut DeliveryRate, start: Time, bytes: u64, rate: u64, delay: u64) -> Time {
        path.handle_sent(bytes);
        let mut now = start.after(delay);
        let mut left = bytes;
        while left > 0 {
            let packet = left.min(1472);
            now = now.after(nanos_for(packet, rate));
            path.handle_delivered(now, packet);
            left -= packet;
        }
        now
    }

    fn is_near(measured: u64, expected: u64) -> bool {
        measured.abs_diff(expected) <= expected / 20
    }

    #[test]
    fn the_rate_of_messages_is_found_in_spite_of_delay_and_pauses() {
        let mut path = DeliveryRate::new();
        assert_eq!((path.measured(), path.bytes_per_second()), (None, RATE_UNKNOWN));
        let mut now = Time(0);
        for _ in 0..20 {
            now = message(&mut path, now, 1 << 20, 12_500_000, 50 * MILLISECOND);
            now = now.after(SECOND);
            assert_eq!(path.outstanding_bytes(), 0);
        }
        assert!(is_near(path.bytes_per_second(), 12_500_000), "{path:?}");
    }

    #[test]
    fn small_messages_do_not_make_a_path_slow() {
        let mut path = DeliveryRate::new();
        let mut now = message(&mut path, Time(0), 8 << 20, 125_000_000, MILLISECOND);
        for _ in 0..1000 {
            now = message(&mut path, now, 1024, 125_000_000, 10 * MILLISECOND);
        }
        // The messages follow each other, and the path is never idle.
        path.handle_sent(1024);
        for _ in 0..1000 {
            path.handle_sent(1024);
            now = now.after(MILLISECOND);
            path.handle_delivered(now, 1024);
        }
        assert!(is_near(path.bytes_per_second(), 125_000_000), "{path:?}");
    }

    #[test]
    fn a_new_path_with_little_to_do_stays_unknown() {
        let mut path = DeliveryRate::new();
        path.handle_sent(1024);
        for millis in 0..1000 {
            path.handle_sent(1024);
            path.handle_delivered(Time(millis * MILLISECOND), 1024);
        }
        assert_eq!((path.measured(), path.bytes_per_second()), (None, RATE_UNKNOWN));
    }

    #[test]
    fn a_path_that_becomes_slow_is_found_out_within_a_message() {
        let mut path = DeliveryRate::new();
        let now = message(&mut path, Time(0), 8 << 20, 125_000_000, MILLISECOND);
        message(&mut path, now, 4 << 20, 12_500_000, MILLISECOND);
        assert!(is_near(path.bytes_per_second(), 12_500_000), "{path:?}");
    }

    #[test]
    fn the_finish_counts_what_is_before_and_half_the_way() {
        let path = DeliveryRate { estimate: Some(1_000_000), ..DeliveryRate::new() };
        let finish = path.finish_nanos(3_000, 1_000, 10 * MILLISECOND);
        assert_eq!(finish, 4 * MILLISECOND + 5 * MILLISECOND);
        assert_eq!(path.finish_nanos(u64::MAX, u64::MAX, u64::MAX), u64::MAX);
    }

    #[test]
    fn what_is_lost_is_no_longer_under_way() {
        let mut path = DeliveryRate::new();
        path.handle_sent(100);
        path.handle_lost(40);
        assert_eq!(path.outstanding_bytes(), 60);
        path.handle_lost(u64::MAX);
        assert_eq!(path.outstanding_bytes(), 0);
    }

    #[test]
    fn jumping_clocks_are_survived() {
        let mut path = DeliveryRate::new();
        path.handle_sent(u64::MAX);
        path.handle_sent(u64::MAX);
        for now in [u64::MAX, 0, 0, u64::MAX, 1, u64::MAX] {
            path.handle_delivered(Time(now), 1 << 20);
            assert!(path.bytes_per_second() > 0);
        }
        path.handle_delivered(Time(0), u64::MAX);
        assert_eq!(path.outstanding_bytes(), 0);
        let mut now = Time(0);
        for _ in 0..20 {
            now = message(&mut path, now, 4 << 20, 125_000_000, 0);
        }
        assert!(is_near(path.bytes_per_second(), 125_000_000), "{path:?}");
    }
}
