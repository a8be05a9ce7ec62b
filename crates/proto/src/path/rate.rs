//! How fast a path of any kind delivers, for dividing work between paths.
//!
//! The owner says what it hands to the path and what the peer has confirmed; there need be no
//! packets, so it serves TCP, shared memory and relays too. The rate is taken from the spacing of
//! confirmations while something is under way: the first one after idleness only starts the watch,
//! so neither the delay of the path nor the pauses of the program count as slowness. A path that was
//! given little to do cannot show what it can: such a measurement may raise the estimate, never
//! lower it. Without any measurement a path is taken for a common one, so that it gets its chance.

use super::time::{MICROSECOND, Time, nanos_for, rate_of};

/// What a path that has shown nothing is taken for, in bytes per second: 1 Gbit/s.
pub const RATE_UNKNOWN: u64 = 125_000_000;

/// Shortest span that is measured. Confirmations come in bunches, a process is told of several at
/// once; below this it is the bunching that would be measured.
pub const SPAN_NANOS_MIN: u64 = 100 * MICROSECOND;

/// Fewest bytes that are measured: some datagrams, or a path seems as fast as memory.
pub const SPAN_BYTES_MIN: u64 = 16 << 10;

/// Bytes under way below which a path has too little to do to show its rate: one batch.
pub const LOAD_BYTES_MIN: u64 = 64 << 10;

/// One in so many parts of a new measurement enters the estimate.
const SMOOTHING: u64 = 4;

/// What one path delivers.
#[derive(Clone, Debug, Default)]
pub struct DeliveryRate {
    /// Bytes per second.
    estimate: Option<u64>,
    outstanding: u64,
    span: Option<Span>,
}

/// A measurement under way.
#[derive(Clone, Copy, Debug)]
struct Span {
    since: Time,
    bytes: u64,
    /// Least bytes that were under way during it.
    load: u64,
}

impl DeliveryRate {
    /// Nothing measured yet.
    pub fn new() -> DeliveryRate {
        DeliveryRate::default()
    }

    /// So many bytes were handed to the path.
    pub fn handle_sent(&mut self, bytes: u64) {
        self.outstanding = self.outstanding.saturating_add(bytes);
    }

    /// So many bytes will not be confirmed: lost, or moved to another path.
    pub fn handle_lost(&mut self, bytes: u64) {
        self.leave(bytes);
    }

    /// The peer confirmed so many bytes.
    pub fn handle_delivered(&mut self, now: Time, bytes: u64) {
        let load = self.outstanding;
        self.outstanding = load.saturating_sub(bytes);
        let Some(span) = &mut self.span else {
            self.span = self.watch(now);
            return;
        };
        span.bytes = span.bytes.saturating_add(bytes);
        // What was under way before this confirmation came: the last of a message is no sign that
        // the path had nothing to do while it delivered.
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

    /// Bytes handed over and not yet confirmed.
    pub fn outstanding_bytes(&self) -> u64 {
        self.outstanding
    }

    /// Bytes per second, if it was ever measured.
    pub fn measured(&self) -> Option<u64> {
        self.estimate
    }

    /// Bytes per second to reckon with.
    pub fn bytes_per_second(&self) -> u64 {
        self.estimate.unwrap_or(RATE_UNKNOWN)
    }

    /// How long from now until `more_bytes`, handed over behind `outstanding_bytes`, would be with
    /// the peer: half a round trip and the time all of them take.
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

    /// Sends `bytes` at once and has them confirmed in packets at `rate`, after `delay`.
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
        // One message after the other, never idle.
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
