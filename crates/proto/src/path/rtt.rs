//! How long a round trip takes, and when an answer is late (RFC 6298).
//!
//! What enters: the round trips that the owner has measured. What leaves: the smoothed round trip,
//! its variation, the shortest recent round trip, and the time to wait for an answer. The owner
//! must observe two rules. A round trip may be measured only on bytes that were sent once, or whose
//! acknowledgement names the transmission (Karn's algorithm): an acknowledgement of the first
//! transmission that is taken for one of the second seems far too quick. And if the peer reports
//! how long it delayed the answer, the owner must subtract this delay first.
//!
//! The time to wait doubles each time that it passes without an answer, up to a bound. The next
//! measured round trip ends this back-off.

use super::time::{MILLISECOND, SECOND, Time};

/// The time to wait before a round trip was measured, in nanoseconds. RFC 6298 asks for a second,
/// because it assumes nothing about the path. The paths here begin with a hello that has just been
/// answered, and this is about the round trip between the two farthest places on Earth.
pub const TIMEOUT_NANOS_INITIAL: u64 = 200 * MILLISECOND;

/// The shortest time to wait, in nanoseconds. RFC 6298 has a second, because of coarse clocks and
/// delayed acknowledgements. Both ends here are processes, which may lose the processor for some
/// milliseconds. An early timeout costs a probe, not the payload, and a path that died should be
/// detected soon.
pub const TIMEOUT_NANOS_MIN: u64 = 2 * MILLISECOND;

/// The longest time to wait, in nanoseconds. RFC 6298 allows no less than a minute. A silent path
/// gets probes of a few bytes, so one every two seconds is no load, and a path that works again is
/// detected within this time.
pub const TIMEOUT_NANOS_MAX: u64 = 2 * SECOND;

/// The longest valid round trip, in nanoseconds. No path takes this long: a later answer shows that
/// one of the two sides was computing or stopped. If an answer after ten minutes counted as a round
/// trip, the pace of everything that follows would slow down, and the detection of every later loss
/// or silence would take minutes.
pub const SAMPLE_NANOS_MAX: u64 = TIMEOUT_NANOS_MAX;

/// The smallest allowance for variation, in nanoseconds: below this value, the scheduling of
/// processes hides what the network does.
pub const GRANULARITY_NANOS: u64 = MILLISECOND;

/// The shortest round trip is the minimum over the last one to two spans of this length, in
/// nanoseconds. The span is long enough for a queue that this flow builds to have been empty once,
/// and short enough to notice another route.
pub const MIN_RTT_WINDOW_NANOS: u64 = 5 * SECOND;

/// The most doublings: 2^11 times the shortest wait exceeds the longest.
const DOUBLINGS_MAX: u32 = 11;

/// The estimates of one path's round trip.
#[derive(Clone, Debug, Default)]
pub struct RttEstimator {
    estimate: Option<RttEstimate>,
    shortest: MinRttWindow,
    doublings: u32,
}

#[derive(Clone, Copy, Debug)]
struct RttEstimate {
    latest: u64,
    smoothed: u64,
    variation: u64,
}

impl RttEstimator {
    /// Estimates without a measurement.
    pub fn new() -> RttEstimator {
        RttEstimator::default()
    }

    /// Records a measured round trip, which ends the back-off.
    pub fn handle_sample(&mut self, now: Time, rtt_nanos: u64) {
        let sample = rtt_nanos.clamp(1, SAMPLE_NANOS_MAX);
        self.estimate = Some(match self.estimate {
            None => RttEstimate { latest: sample, smoothed: sample, variation: sample / 2 },
            Some(before) => before.moved_by(sample),
        });
        self.shortest.insert(now, sample);
        self.doublings = 0;
    }

    /// Records that the wait passed without an answer: the next wait is twice as long.
    pub fn handle_timeout(&mut self) {
        self.doublings = (self.doublings + 1).min(DOUBLINGS_MAX);
    }

    /// The time to wait for an answer now, back-off included, in nanoseconds.
    pub fn timeout_nanos(&self) -> u64 {
        let doubled = self.base_timeout_nanos().saturating_mul(1 << self.doublings);
        doubled.min(TIMEOUT_NANOS_MAX)
    }

    /// The time that an answer may take while nothing is lost, without back-off, in nanoseconds.
    pub fn base_timeout_nanos(&self) -> u64 {
        let Some(estimate) = self.estimate else { return TIMEOUT_NANOS_INITIAL };
        let allowance = estimate.variation.saturating_mul(4).max(GRANULARITY_NANOS);
        let wait = estimate.smoothed.saturating_add(allowance);
        wait.clamp(TIMEOUT_NANOS_MIN, TIMEOUT_NANOS_MAX)
    }

    /// The number of waits in a row that passed without an answer, at most `DOUBLINGS_MAX`.
    pub fn doublings(&self) -> u32 {
        self.doublings
    }

    /// The smoothed round trip in nanoseconds.
    pub fn smoothed_nanos(&self) -> Option<u64> {
        self.estimate.map(|estimate| estimate.smoothed)
    }

    /// The mean deviation from the smoothed round trip, in nanoseconds.
    pub fn variation_nanos(&self) -> Option<u64> {
        self.estimate.map(|estimate| estimate.variation)
    }

    /// The latest measured round trip in nanoseconds.
    pub fn latest_nanos(&self) -> Option<u64> {
        self.estimate.map(|estimate| estimate.latest)
    }

    /// The shortest round trip of the last [`MIN_RTT_WINDOW_NANOS`] or up to twice this time, in
    /// nanoseconds: the path without its queues.
    pub fn minimum_nanos(&self) -> Option<u64> {
        self.shortest.value()
    }
}

impl RttEstimate {
    /// The estimate after another sample. A quarter of the deviation and an eighth of the sample
    /// enter, in this order: the deviation is that from the old estimate.
    fn moved_by(self, sample: u64) -> RttEstimate {
        let deviation = self.smoothed.abs_diff(sample);
        RttEstimate {
            latest: sample,
            smoothed: mean(self.smoothed, 7, sample, 8),
            variation: mean(self.variation, 3, deviation, 4),
        }
    }
}

/// The shortest round trip of two spans of time, the current one and the one before.
#[derive(Clone, Debug, Default)]
struct MinRttWindow {
    since: Time,
    current: Option<u64>,
    before: Option<u64>,
}

impl MinRttWindow {
    fn insert(&mut self, now: Time, sample: u64) {
        if now < self.since {
            // The clock jumped back: the span begins again, or it would never end.
            self.since = now;
        }
        let age = now.nanos_since(self.since);
        if self.current.is_none() {
            self.since = now;
        } else if age >= MIN_RTT_WINDOW_NANOS {
            let is_recent = age < 2 * MIN_RTT_WINDOW_NANOS;
            self.before = self.current.take().filter(|_| is_recent);
            self.since = now;
        }
        self.current = Some(self.current.map_or(sample, |least| least.min(sample)));
    }

    fn value(&self) -> Option<u64> {
        match (self.current, self.before) {
            (Some(current), Some(before)) => Some(current.min(before)),
            (current, before) => current.or(before),
        }
    }
}

/// The weighted mean `(a * weight + b * (whole - weight)) / whole`.
fn mean(a: u64, weight: u64, b: u64, whole: u64) -> u64 {
    let sum = u128::from(a) * u128::from(weight) + u128::from(b) * u128::from(whole - weight);
    // A mean is no larger than the larger of the two values.
    (sum / u128::from(whole)) as u64
}

const _: () = {
    assert!(TIMEOUT_NANOS_MIN << DOUBLINGS_MAX >= TIMEOUT_NANOS_MAX);
    assert!(TIMEOUT_NANOS_MIN > GRANULARITY_NANOS);
};

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Time {
        Time(millis * MILLISECOND)
    }

    #[test]
    fn the_first_sample_sets_and_later_ones_move() {
        let mut rtt = RttEstimator::new();
        assert_eq!(rtt.timeout_nanos(), TIMEOUT_NANOS_INITIAL);
        rtt.handle_sample(at(0), 80 * MILLISECOND);
        // RFC 6298, 2.2: SRTT = R, RTTVAR = R / 2, RTO = SRTT + 4 * RTTVAR.
        assert_eq!(rtt.smoothed_nanos(), Some(80 * MILLISECOND));
        assert_eq!(rtt.variation_nanos(), Some(40 * MILLISECOND));
        assert_eq!(rtt.timeout_nanos(), 240 * MILLISECOND);
        rtt.handle_sample(at(1), 120 * MILLISECOND);
        // RFC 6298, 2.3: RTTVAR = 3/4 * 40 + 1/4 * |80 - 120|, SRTT = 7/8 * 80 + 1/8 * 120.
        assert_eq!(rtt.variation_nanos(), Some(40 * MILLISECOND));
        assert_eq!(rtt.smoothed_nanos(), Some(85 * MILLISECOND));
        assert_eq!(rtt.timeout_nanos(), 245 * MILLISECOND);
        assert_eq!(rtt.latest_nanos(), Some(120 * MILLISECOND));
    }

    #[test]
    fn the_wait_doubles_to_its_bound_and_a_sample_ends_that() {
        let mut rtt = RttEstimator::new();
        rtt.handle_sample(at(0), 50_000);
        assert_eq!(rtt.timeout_nanos(), TIMEOUT_NANOS_MIN);
        for exponent in 1..10 {
            rtt.handle_timeout();
            assert_eq!(rtt.timeout_nanos(), (2 << exponent) * MILLISECOND);
            assert_eq!(rtt.base_timeout_nanos(), TIMEOUT_NANOS_MIN);
        }
        for _ in 0..1000 {
            rtt.handle_timeout();
            assert_eq!(rtt.timeout_nanos(), TIMEOUT_NANOS_MAX);
        }
        rtt.handle_sample(at(1), 50_000);
        assert_eq!((rtt.timeout_nanos(), rtt.doublings()), (TIMEOUT_NANOS_MIN, 0));
    }

    #[test]
    fn the_minimum_forgets_what_is_old() {
        let mut rtt = RttEstimator::new();
        rtt.handle_sample(at(0), 10);
        rtt.handle_sample(at(4_000), 30);
        assert_eq!(rtt.minimum_nanos(), Some(10));
        rtt.handle_sample(at(6_000), 30);
        assert_eq!(rtt.minimum_nanos(), Some(10));
        rtt.handle_sample(at(12_000), 40);
        assert_eq!(rtt.minimum_nanos(), Some(30));
        // After long silence, no earlier sample counts.
        rtt.handle_sample(at(100_000), 90);
        assert_eq!(rtt.minimum_nanos(), Some(90));
    }

    #[test]
    fn steady_round_trips_leave_the_least_allowance() {
        let mut rtt = RttEstimator::new();
        for round in 0..200 {
            rtt.handle_sample(at(round * 10), 10 * MILLISECOND);
        }
        assert_eq!(rtt.base_timeout_nanos(), 11 * MILLISECOND);
    }

    #[test]
    fn a_peer_that_was_away_for_long_makes_no_long_round_trip() {
        let mut rtt = RttEstimator::new();
        rtt.handle_sample(at(0), MILLISECOND);
        rtt.handle_sample(at(600_000), 600 * SECOND);
        assert!(rtt.smoothed_nanos().unwrap() <= MILLISECOND + SAMPLE_NANOS_MAX / 8);
        assert_eq!(rtt.latest_nanos(), Some(SAMPLE_NANOS_MAX));
        assert_eq!(rtt.minimum_nanos(), Some(SAMPLE_NANOS_MAX));
        // A first sample that is too long is limited too.
        let mut rtt = RttEstimator::new();
        rtt.handle_sample(at(600_000), 600 * SECOND);
        assert_eq!(rtt.smoothed_nanos(), Some(SAMPLE_NANOS_MAX));
    }

    #[test]
    fn mad_clocks_and_samples_are_survived() {
        let mut rtt = RttEstimator::new();
        for (now, sample) in [(u64::MAX, u64::MAX), (0, 0), (u64::MAX, 1), (3, u64::MAX), (0, 0)] {
            rtt.handle_sample(Time(now), sample);
            rtt.handle_timeout();
            let wait = rtt.timeout_nanos();
            assert!((TIMEOUT_NANOS_MIN..=TIMEOUT_NANOS_MAX).contains(&wait));
        }
        // The minimum from before a jump back of the clock still expires.
        rtt.handle_sample(at(6_000), 70);
        rtt.handle_sample(at(12_000), 80);
        rtt.handle_sample(at(18_000), 80);
        assert_eq!(rtt.minimum_nanos(), Some(80));
    }
}
