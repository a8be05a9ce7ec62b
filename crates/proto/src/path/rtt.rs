//! How long a round trip takes, and when an answer is late (RFC 6298).
//!
//! In come round trips as the owner measured them; out go a smoothed one, its variation, the
//! shortest of late, and the time to wait before anything is sent again. Two things are the owner's
//! to see to. A round trip may be measured only on bytes that were sent once, or whose answer says
//! which sending it means (Karn's rule): an answer to the first sending taken for one to the second
//! looks far too quick. And time the peer itself waited before it answered, if it says so, is to be
//! taken off first.
//!
//! The time to wait doubles each time it passes in vain, up to a bound, and is what it was as soon
//! as a new round trip is measured.

use super::time::{MILLISECOND, SECOND, Time};

/// The wait before anything was measured. RFC 6298 asks for a second because it may not know
/// anything of the path; ours begin with a hello that has just been answered, and the farthest two
/// places on Earth are about this far apart.
pub const TIMEOUT_NANOS_INITIAL: u64 = 200 * MILLISECOND;

/// The shortest wait. RFC 6298 has a second for coarse clocks and delayed acknowledgements. Both
/// ends here are processes, which may lose the processor for some milliseconds; what an early
/// time-out costs is a probe, not the payload, and a path that died should be known soon.
pub const TIMEOUT_NANOS_MIN: u64 = 2 * MILLISECOND;

/// The longest wait. RFC 6298 allows no less than a minute. A silent path is sent probes of a few
/// bytes, so one every other second is no load, and one that heals is back within that time.
pub const TIMEOUT_NANOS_MAX: u64 = 2 * SECOND;

/// The longest round trip that is believed. No path takes so long: an answer that does shows that one of the two sides was
/// away, computing or stopped. Taken for the path's, the ten minutes of one such answer would slow the pace of what follows,
/// and have every later loss or silence wait, for minutes.
pub const SAMPLE_NANOS_MAX: u64 = TIMEOUT_NANOS_MAX;

/// Least allowance for variation: below this the scheduling of processes hides what the network
/// does.
pub const GRANULARITY_NANOS: u64 = MILLISECOND;

/// The shortest round trip is that of the last one to two of these: long enough that a queue of our
/// own making has been empty in between, short enough to notice another route.
pub const MIN_RTT_WINDOW_NANOS: u64 = 5 * SECOND;

/// 2^11 times the shortest wait exceeds the longest.
const DOUBLINGS_MAX: u32 = 11;

/// Estimates of one path's round trip.
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
    /// Nothing is known yet.
    pub fn new() -> RttEstimator {
        RttEstimator::default()
    }

    /// A round trip was measured. Ends the back-off.
    pub fn handle_sample(&mut self, now: Time, rtt_nanos: u64) {
        let sample = rtt_nanos.clamp(1, SAMPLE_NANOS_MAX);
        self.estimate = Some(match self.estimate {
            None => RttEstimate { latest: sample, smoothed: sample, variation: sample / 2 },
            Some(before) => before.moved_by(sample),
        });
        self.shortest.insert(now, sample);
        self.doublings = 0;
    }

    /// The wait passed without an answer: the next is twice as long.
    pub fn handle_timeout(&mut self) {
        self.doublings = (self.doublings + 1).min(DOUBLINGS_MAX);
    }

    /// How long to wait for an answer now, back-off included.
    pub fn timeout_nanos(&self) -> u64 {
        let doubled = self.base_timeout_nanos().saturating_mul(1 << self.doublings);
        doubled.min(TIMEOUT_NANOS_MAX)
    }

    /// How long an answer may take while nothing is wrong: the wait without back-off.
    pub fn base_timeout_nanos(&self) -> u64 {
        let Some(estimate) = self.estimate else { return TIMEOUT_NANOS_INITIAL };
        let allowance = estimate.variation.saturating_mul(4).max(GRANULARITY_NANOS);
        let wait = estimate.smoothed.saturating_add(allowance);
        wait.clamp(TIMEOUT_NANOS_MIN, TIMEOUT_NANOS_MAX)
    }

    /// How often in a row the wait passed in vain, as far as it matters.
    pub fn doublings(&self) -> u32 {
        self.doublings
    }

    /// The smoothed round trip.
    pub fn smoothed_nanos(&self) -> Option<u64> {
        self.estimate.map(|estimate| estimate.smoothed)
    }

    /// The mean deviation from it.
    pub fn variation_nanos(&self) -> Option<u64> {
        self.estimate.map(|estimate| estimate.variation)
    }

    /// The last one measured.
    pub fn latest_nanos(&self) -> Option<u64> {
        self.estimate.map(|estimate| estimate.latest)
    }

    /// The shortest of the last [`MIN_RTT_WINDOW_NANOS`] or up to twice that: the path without its queues.
    pub fn minimum_nanos(&self) -> Option<u64> {
        self.shortest.value()
    }
}

impl RttEstimate {
    /// A quarter of the deviation and an eighth of the sample enter, in this order: the deviation
    /// is from the estimate before it moves.
    fn moved_by(self, sample: u64) -> RttEstimate {
        let deviation = self.smoothed.abs_diff(sample);
        RttEstimate {
            latest: sample,
            smoothed: mean(self.smoothed, 7, sample, 8),
            variation: mean(self.variation, 3, deviation, 4),
        }
    }
}

/// The shortest of two spans of time, the one under way and the one before.
#[derive(Clone, Debug, Default)]
struct MinRttWindow {
    since: Time,
    current: Option<u64>,
    before: Option<u64>,
}

impl MinRttWindow {
    fn insert(&mut self, now: Time, sample: u64) {
        if now < self.since {
            // The clock jumped back: the span begins anew, or it would never end.
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

/// `(a * weight + b) / whole`.
fn mean(a: u64, weight: u64, b: u64, whole: u64) -> u64 {
    let sum = u128::from(a) * u128::from(weight) + u128::from(b) * u128::from(whole - weight);
    // A mean is no larger than the larger of the two.
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
        // 2.3: RTTVAR = 3/4 * 40 + 1/4 * |80 - 120|, SRTT = 7/8 * 80 + 1/8 * 120.
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
        // After long silence nothing of before counts.
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
        // Nor does the first answer of all.
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
        // The minimum of before a jump back goes on to age.
        rtt.handle_sample(at(6_000), 70);
        rtt.handle_sample(at(12_000), 80);
        rtt.handle_sample(at(18_000), 80);
        assert_eq!(rtt.minimum_nanos(), Some(80));
    }
}
