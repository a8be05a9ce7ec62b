//! CUBIC (RFC 9438), in bytes.
//!
//! The window grows until something is lost. Slow start doubles the window every round trip, until
//! the round trip becomes longer (HyStart++, RFC 9406) or bytes are lost. Afterwards the window
//! follows a cubic curve in time. The curve rises steeply towards the window at which the last loss
//! occurred, is flat there, and then rises again. If Reno's window would be larger, the window
//! follows Reno, so that CUBIC is no worse than Reno on short round trips.
//!
//! A round trip with losses reduces the window once by three tenths, however much was lost: bytes
//! sent before the last reduction say nothing about the window since. If nothing arrives of what
//! was sent over a span of several timeouts, the window restarts from its minimum (persistent
//! congestion, RFC 9002).
//!
//! Acknowledgements of bytes that were sent while the application had no more to send do not let
//! the window grow: they do not show what a larger window would do.

use super::rtt::RttEstimator;
use super::time::{MILLISECOND, SECOND, Time, percent_of, rate_of};
use super::window::{Acked, WINDOW_BYTES_MAX, initial_window, minimum_window};

/// The steepness of the curve, in datagrams per cubed second.
const STEEPNESS: f64 = 0.4;

/// The part of the window that remains after a loss.
const DECREASE: f64 = 0.7;

/// Datagrams per round trip by which Reno's window would have to grow to be as large on average as
/// a window that falls to [`DECREASE`] instead of a half: `3 (1 - b) / (1 + b)`.
const RENO_INCREASE: f64 = 3.0 * (1.0 - DECREASE) / (1.0 + DECREASE);

/// The largest growth of the window in one round trip along the curve, as a factor.
const GROWTH_MAX: f64 = 1.5;

/// The pacing rate, in hundredths of a window per round trip. The rate exceeds the rate of
/// acknowledgements, so that the window remains the bound. In slow start the window doubles each
/// round trip.
const PACE_PERCENT: u64 = 125;
const PACE_PERCENT_START: u64 = 200;

/// The number of timeouts without an arrival that make congestion persistent.
const PERSISTENT_TIMEOUTS: u64 = 3;

/// The CUBIC window of one path.
#[derive(Clone, Debug)]
pub struct Cubic {
    mtu: f64,
    /// The window in bytes. The fraction is kept, because growth comes in small steps.
    window: f64,
    /// The window is in slow start while it is below this threshold, in bytes.
    threshold: f64,
    /// The window before the last reduction, in bytes; less if the window had not reached the
    /// previous peak.
    peak: f64,
    /// The window before the last reduction in any case, in bytes.
    prior: f64,
    slow_start: SlowStart,
    curve: Option<Curve>,
    /// The time of the last reduction. Losses of bytes sent before it do not reduce the window
    /// again.
    reduced_at: Option<Time>,
    rtt: RttEstimator,
    persistent_congestion: PersistentCongestion,
    before_timeout: Option<BeforeTimeout>,
    delivered: u64,
    acked_at: Time,
}

/// The state that is restored after a spurious timeout.
#[derive(Clone, Copy, Debug)]
struct BeforeTimeout {
    at: Time,
    window: f64,
    threshold: f64,
    peak: f64,
    prior: f64,
    curve: Option<Curve>,
}

impl Cubic {
    /// The window of a new path with datagrams of `mtu_bytes` bytes.
    pub fn new(mtu_bytes: u64) -> Cubic {
        let mtu_bytes = mtu_bytes.max(1);
        Cubic {
            mtu: mtu_bytes as f64,
            window: initial_window(mtu_bytes) as f64,
            threshold: f64::INFINITY,
            peak: 0.0,
            prior: 0.0,
            slow_start: SlowStart::default(),
            curve: None,
            reduced_at: None,
            rtt: RttEstimator::new(),
            persistent_congestion: PersistentCongestion::default(),
            before_timeout: None,
            delivered: 0,
            acked_at: Time(0),
        }
    }

    /// Sets the size of datagrams from now on.
    pub fn set_mtu(&mut self, mtu_bytes: u64) {
        self.mtu = mtu_bytes.max(1) as f64;
        self.window = self.window.max(self.least());
    }

    /// Records that bytes have arrived.
    pub fn handle_acked(&mut self, now: Time, acked: Acked) {
        self.forget_future(now);
        self.delivered = self.delivered.saturating_add(acked.bytes);
        if let Some(rtt_nanos) = acked.rtt_nanos {
            self.rtt.handle_sample(now, rtt_nanos);
        }
        self.persistent_congestion.handle_acked(acked.sent_at);
        self.end_timeout(acked.sent_at);
        if acked.is_app_limited {
            self.pause_curve(now);
        } else if !self.is_recovering(acked.sent_at) {
            self.grow(now, acked);
        }
        self.acked_at = now;
    }

    /// Records that bytes sent at `sent_at` are lost.
    pub fn handle_lost(&mut self, now: Time, bytes: u64, sent_at: Time) {
        if bytes == 0 {
            return;
        }
        self.forget_future(now);
        let silent_nanos = self.persistent_congestion.handle_lost(sent_at);
        // The timeout has already reduced the window for what is lost while nothing arrives.
        if !self.is_recovering(sent_at) && self.before_timeout.is_none() {
            self.reduce(now);
        }
        let patience = self.rtt.base_timeout_nanos().saturating_mul(PERSISTENT_TIMEOUTS);
        if self.rtt.smoothed_nanos().is_some() && silent_nanos >= patience {
            self.persistent_congestion = PersistentCongestion::default();
            self.collapse(now);
        }
    }

    /// Records that no acknowledgement came within the timeout.
    pub fn handle_timeout(&mut self, now: Time) {
        self.reduced_at = Some(now);
        if self.before_timeout.is_some() {
            return;
        }
        self.before_timeout = Some(BeforeTimeout {
            at: now,
            window: self.window,
            threshold: self.threshold,
            peak: self.peak,
            prior: self.prior,
            curve: self.curve,
        });
        self.prior = self.window;
        self.threshold = (self.window * DECREASE).max(self.least());
        self.collapse(now);
    }

    /// The window: bytes that may be in flight.
    pub fn window_bytes(&self) -> u64 {
        self.window as u64
    }

    /// The rate at which bytes may leave; `None` until a round trip has been measured.
    pub fn rate_bytes_per_second(&self) -> Option<u64> {
        let percent = if self.window < self.threshold { PACE_PERCENT_START } else { PACE_PERCENT };
        let window_per_rtt = rate_of(self.window_bytes(), self.rtt.smoothed_nanos()?);
        Some(percent_of(window_per_rtt, percent).max(1))
    }

    /// All bytes acknowledged so far.
    pub fn delivered_bytes(&self) -> u64 {
        self.delivered
    }

    fn grow(&mut self, now: Time, acked: Acked) {
        let bytes = acked.bytes as f64;
        if self.window < self.threshold {
            let growth = bytes / self.slow_start.handle_acked(now, &acked);
            self.window += growth;
            if self.slow_start.is_over() {
                self.threshold = self.window;
            }
        } else {
            self.grow_along_curve(now, bytes);
        }
        self.window = self.window.min(WINDOW_BYTES_MAX as f64);
    }

    fn grow_along_curve(&mut self, now: Time, bytes: f64) {
        let (mtu, window, peak) = (self.mtu, self.window, self.peak);
        let curve = self.curve.get_or_insert_with(|| Curve::new(now, window, peak, mtu));
        // Once the Reno estimate has regained the window before the loss, it grows as Reno does.
        let increase = if curve.reno >= self.prior { 1.0 } else { RENO_INCREASE };
        curve.reno += increase * mtu * bytes / window;
        let rtt = self.rtt.smoothed_nanos().unwrap_or(0);
        let ahead = seconds(now.nanos_since(curve.start).saturating_add(rtt));
        let target = curve.at(ahead, mtu).clamp(window, window * GROWTH_MAX);
        let cubic = window + (target - window) * (bytes / window).min(1.0);
        self.window = cubic.max(curve.reno.min(window + bytes));
    }

    /// Moves the start of the curve, because time without data to send does not count.
    fn pause_curve(&mut self, now: Time) {
        if let Some(curve) = &mut self.curve {
            curve.start = curve.start.after(now.nanos_since(self.acked_at));
        }
    }

    /// Limits all recorded times to `now`, so that after a clock has jumped back nothing waits for
    /// the clock to catch up.
    fn forget_future(&mut self, now: Time) {
        self.reduced_at = self.reduced_at.map(|at| at.min(now));
        self.slow_start.round.start = self.slow_start.round.start.min(now.after(1));
        if let Some(curve) = &mut self.curve {
            curve.start = curve.start.min(now);
        }
    }

    fn reduce(&mut self, now: Time) {
        self.peak = self.next_peak();
        self.prior = self.window;
        self.window = (self.window * DECREASE).max(self.least());
        self.threshold = self.window;
        self.slow_start = SlowStart::default();
        self.curve = None;
        self.reduced_at = Some(now);
    }

    /// Restarts with the minimum window: slow start up to the threshold, then a curve that is flat
    /// where slow start ends.
    fn collapse(&mut self, now: Time) {
        self.window = self.least();
        self.peak = 0.0;
        self.slow_start = SlowStart::default();
        self.curve = None;
        self.reduced_at = Some(now);
    }

    /// Ends a timeout. The first acknowledgement after it shows whether the timeout was spurious.
    fn end_timeout(&mut self, sent_at: Time) {
        let Some(before) = self.before_timeout.take() else { return };
        if sent_at > before.at {
            return;
        }
        // Bytes sent before the timeout have arrived: there was silence, but no loss.
        self.window = self.window.max(before.window);
        self.threshold = before.threshold;
        self.peak = before.peak;
        self.prior = before.prior;
        self.curve = before.curve;
        self.reduced_at = None;
    }

    /// The peak for the next curve. If the window did not reach the previous peak, the next peak is
    /// lower, which leaves capacity to other flows (fast convergence).
    fn next_peak(&self) -> f64 {
        let is_lower = self.window < self.peak;
        self.window * if is_lower { (1.0 + DECREASE) / 2.0 } else { 1.0 }
    }

    fn is_recovering(&self, sent_at: Time) -> bool {
        self.reduced_at.is_some_and(|reduced_at| sent_at <= reduced_at)
    }

    fn least(&self) -> f64 {
        minimum_window(self.mtu as u64) as f64
    }
}

/// The cubic curve since the last reduction.
#[derive(Clone, Copy, Debug)]
struct Curve {
    start: Time,
    /// The window at which the curve is flat, in bytes.
    plateau: f64,
    /// The seconds from the start of the curve until it is flat.
    until_plateau: f64,
    /// Reno's window at the same time, in bytes.
    reno: f64,
}

impl Curve {
    /// A curve that starts now at `window` and is flat at `peak`. Without a higher peak, the curve
    /// is flat where it starts.
    fn new(start: Time, window: f64, peak: f64, mtu: f64) -> Curve {
        let plateau = peak.max(window);
        let until_plateau = cube_root((plateau - window) / mtu / STEEPNESS);
        Curve { start, plateau, until_plateau, reno: window }
    }

    /// The window `seconds` after the start of the curve, in bytes.
    fn at(&self, seconds: f64, mtu: f64) -> f64 {
        let time = seconds - self.until_plateau;
        self.plateau + STEEPNESS * time * time * time * mtu
    }
}

/// HyStart++ (RFC 9406): slow start, and conservative slow start once round trips become longer.
#[derive(Clone, Debug, Default)]
struct SlowStart {
    round: HyStartRound,
    last_round_min_rtt: Option<u64>,
    conservative: Option<ConservativeSlowStart>,
}

/// A round of HyStart++: bytes sent from its start on are acknowledged in the next round.
#[derive(Clone, Copy, Debug, Default)]
struct HyStartRound {
    start: Time,
    shortest: Option<u64>,
    samples: u32,
}

#[derive(Clone, Copy, Debug)]
struct ConservativeSlowStart {
    /// The shortest round trip of the round that began conservative slow start, in nanoseconds.
    alarm_nanos: u64,
    rounds: u32,
}

impl SlowStart {
    const RTT_SAMPLES_MIN: u32 = 8;
    const RTT_THRESHOLD_NANOS_MIN: u64 = 4 * MILLISECOND;
    const RTT_THRESHOLD_NANOS_MAX: u64 = 16 * MILLISECOND;
    /// A round trip that is longer by this part (an eighth) begins conservative slow start, within
    /// the two bounds above.
    const MIN_RTT_DIVISOR: u64 = 8;
    const CSS_ROUNDS: u32 = 5;
    const CSS_GROWTH_DIVISOR: f64 = 4.0;

    /// Processes an acknowledgement. Returns the divisor for its bytes before they are added to the
    /// window.
    fn handle_acked(&mut self, now: Time, acked: &Acked) -> f64 {
        if acked.sent_at >= self.round.start {
            self.start_round(now);
        }
        if let Some(rtt) = acked.rtt_nanos {
            self.round.samples = self.round.samples.saturating_add(1);
            self.round.shortest = Some(self.round.shortest.map_or(rtt, |least| least.min(rtt)));
            self.judge();
        }
        if self.conservative.is_some() { Self::CSS_GROWTH_DIVISOR } else { 1.0 }
    }

    fn is_over(&self) -> bool {
        self.conservative.is_some_and(|conservative| conservative.rounds >= Self::CSS_ROUNDS)
    }

    fn start_round(&mut self, now: Time) {
        self.last_round_min_rtt = self.round.shortest;
        // The round starts after everything that has been sent up to now.
        self.round = HyStartRound { start: now.after(1), ..HyStartRound::default() };
        if let Some(conservative) = &mut self.conservative {
            conservative.rounds = conservative.rounds.saturating_add(1);
        }
    }

    fn judge(&mut self) {
        let Some(shortest) = self.round.shortest else { return };
        if self.round.samples < Self::RTT_SAMPLES_MIN {
            return;
        }
        match (self.conservative, self.last_round_min_rtt) {
            // The longer round trips were jitter.
            (Some(conservative), _) if shortest < conservative.alarm_nanos => {
                self.conservative = None
            }
            (None, Some(last)) if shortest >= last.saturating_add(Self::rtt_threshold(last)) => {
                self.conservative =
                    Some(ConservativeSlowStart { alarm_nanos: shortest, rounds: 0 });
            }
            _ => {}
        }
    }

    fn rtt_threshold(rtt_nanos: u64) -> u64 {
        (rtt_nanos / Self::MIN_RTT_DIVISOR)
            .clamp(Self::RTT_THRESHOLD_NANOS_MIN, Self::RTT_THRESHOLD_NANOS_MAX)
    }
}

/// Persistent congestion: the span of losses between two transmissions that arrived one after the
/// other.
#[derive(Clone, Copy, Debug, Default)]
struct PersistentCongestion {
    /// The latest transmission that arrived (`before`), and the latest arrival before the current
    /// gap of losses (`after`).
    after: Option<Time>,
    before: Option<Time>,
    lost: Option<(Time, Time)>,
}

impl PersistentCongestion {
    fn handle_acked(&mut self, sent_at: Time) {
        match self.before {
            Some(before) if sent_at <= before => {
                // An older transmission has arrived. If it lies in the gap, it ends the gap.
                if self.after.is_none_or(|after| sent_at > after) {
                    self.after = Some(sent_at);
                    self.lost = None;
                }
            }
            _ => {
                self.after = self.before;
                self.before = Some(sent_at);
                self.lost = None;
            }
        }
    }

    /// The length in nanoseconds of the span of losses without an arrival, this loss included.
    fn handle_lost(&mut self, sent_at: Time) -> u64 {
        let is_in_gap = self.after.is_some_and(|after| sent_at > after)
            && self.before.is_some_and(|before| sent_at < before);
        if !is_in_gap {
            return 0;
        }
        let (first, last) = self.lost.unwrap_or((sent_at, sent_at));
        let (first, last) = (first.min(sent_at), last.max(sent_at));
        self.lost = Some((first, last));
        last.nanos_since(first)
    }
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / SECOND as f64
}

/// The cube root by Newton's method, from above, because `core` has none. The result is exact to a
/// millionth, which is far below the resolution of the clock.
fn cube_root(value: f64) -> f64 {
    if value <= 0.0 {
        return 0.0;
    }
    let mut root = value.max(1.0);
    for _ in 0..ROOT_STEPS_MAX {
        let next = (2.0 * root + value / (root * root)) / 3.0;
        let is_near = root - next <= next * 1e-9;
        root = next;
        if is_near {
            break;
        }
    }
    root
}

/// The most Newton steps. Each step removes at least a third. Windows are below 2^30 bytes, which
/// is 2^32 in cubed seconds.
const ROOT_STEPS_MAX: u32 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    const MTU: u64 = 1000;
    const RTT: u64 = 100 * MILLISECOND;

    fn acked(now: Time, bytes: u64) -> Acked {
        let sent_at = Time(now.0.saturating_sub(RTT));
        let rtt_nanos = Some(RTT);
        Acked { bytes, sent_at, delivered_at_send: 0, rtt_nanos, is_app_limited: false }
    }

    /// A flow in congestion avoidance with this window, after a loss at time 0.
    fn reduced_from(window: u64) -> Cubic {
        let mut cubic = Cubic::new(MTU);
        cubic.window = window as f64;
        cubic.rtt.handle_sample(Time(0), RTT);
        cubic.handle_lost(Time(0), MTU, Time(0));
        cubic
    }

    /// Acknowledges one window per round trip. Returns the window after the last round.
    fn rounds(cubic: &mut Cubic, from: u64, to: u64) -> u64 {
        for round in from..to {
            let window = cubic.window_bytes();
            for part in 1..=10 {
                let now = Time(round * RTT + part * (RTT / 10) + RTT);
                cubic.handle_acked(now, acked(now, window / 10));
            }
        }
        cubic.window_bytes()
    }

    #[test]
    fn a_new_path_starts_with_ten_datagrams_or_their_bytes() {
        assert_eq!(Cubic::new(1000).window_bytes(), 10_000);
        assert_eq!(Cubic::new(1472).window_bytes(), 14_720);
        assert_eq!(Cubic::new(8972).window_bytes(), 17_944);
        assert_eq!(Cubic::new(8972).rate_bytes_per_second(), None);
    }

    #[test]
    fn slow_start_doubles_each_round_trip() {
        let mut cubic = Cubic::new(MTU);
        for round in 1..8 {
            rounds(&mut cubic, round, round + 1);
            assert_eq!(cubic.window_bytes(), 10_000 << round);
        }
        let rate = 2 * (10_000 << 7) * SECOND / RTT;
        assert_eq!(cubic.rate_bytes_per_second(), Some(rate));
    }

    #[test]
    fn a_loss_leaves_seven_tenths_once_per_round_trip() {
        let mut cubic = reduced_from(1_000_000);
        assert_eq!(cubic.window_bytes(), 700_000);
        cubic.handle_lost(Time(5), MTU, Time(0));
        assert_eq!(cubic.window_bytes(), 700_000);
        cubic.handle_lost(Time(RTT), MTU, Time(1));
        assert!(cubic.window_bytes().abs_diff(490_000) <= 1);
    }

    #[test]
    fn the_curve_is_flat_at_the_peak_after_the_time_of_the_rfc() {
        let cubic = reduced_from(1_000_000);
        let curve = Curve::new(Time(0), cubic.window, cubic.peak, MTU as f64);
        // RFC 9438, figure 2: K = cbrt((W_max - cwnd_epoch) / C), here cbrt(300 / 0.4) seconds.
        assert!((curve.until_plateau - 9.0856).abs() < 1e-3);
        assert!((curve.at(0.0, MTU as f64) - 700_000.0).abs() < 1.0);
        assert!((curve.at(curve.until_plateau, MTU as f64) - 1_000_000.0).abs() < 1e-6);
        assert!((RENO_INCREASE - 9.0 / 17.0).abs() < 1e-12);
    }

    #[test]
    fn the_window_follows_the_curve() {
        let mut cubic = reduced_from(10_000_000);
        let curve = Curve::new(Time(2 * RTT), 7_000_000.0, 10_000_000.0, MTU as f64);
        for (from, to) in [(1, 50), (50, 100), (100, 200), (200, 300)] {
            let window = rounds(&mut cubic, from, to) as f64;
            let expected = curve.at((to as f64) / 10.0, MTU as f64);
            assert!((window - expected).abs() < expected / 50.0, "{window} {expected}");
        }
    }

    #[test]
    fn short_round_trips_grow_as_reno_does() {
        let mut cubic = reduced_from(20_000);
        let reno = 14_000.0 + 10.0 * RENO_INCREASE * MTU as f64;
        let window = rounds(&mut cubic, 1, 11) as f64;
        assert!((window - reno).abs() < 500.0, "{window} {reno}");
    }

    #[test]
    fn a_window_that_did_not_regain_its_peak_leaves_room() {
        let mut cubic = reduced_from(1_000_000);
        assert_eq!(cubic.peak, 1_000_000.0);
        cubic.handle_lost(Time(RTT), MTU, Time(1));
        assert!((cubic.peak - 700_000.0 * 0.85).abs() < 1.0);
    }

    #[test]
    fn longer_round_trips_end_slow_start_without_loss() {
        let mut cubic = Cubic::new(MTU);
        let mut round_trips = [RTT; 4].into_iter().chain([RTT * 5 / 4; 8]);
        let mut now = Time(RTT);
        let mut windows = std::vec::Vec::new();
        for rtt in &mut round_trips {
            let (sent_at, part) = (now, cubic.window_bytes() / 10);
            now = now.after(rtt);
            for _ in 0..10 {
                let acked = Acked { sent_at, rtt_nanos: Some(rtt), ..acked(now, part) };
                cubic.handle_acked(now, acked);
            }
            now = now.after(2);
            windows.push(cubic.window_bytes());
        }
        assert_eq!(windows[3], 160_000);
        assert!(cubic.threshold.is_finite(), "{windows:?}");
        assert!(cubic.window_bytes() < 160_000 * 6, "{windows:?}");
    }

    #[test]
    fn jitter_does_not_end_slow_start() {
        let mut slow_start = SlowStart::default();
        let mut now = Time(0);
        for rtt in [RTT, RTT, RTT * 2, RTT, RTT] {
            let sent_at = now.after(1);
            now = sent_at.after(rtt);
            for _ in 0..8 {
                slow_start
                    .handle_acked(now, &Acked { sent_at, rtt_nanos: Some(rtt), ..acked(now, 1) });
            }
        }
        assert!(slow_start.conservative.is_none());
    }

    #[test]
    fn silence_over_three_timeouts_collapses_the_window() {
        let mut cubic = reduced_from(1_000_000);
        let span = PERSISTENT_TIMEOUTS * cubic.rtt.base_timeout_nanos();
        let (first, last) = (Time(SECOND), Time(SECOND + span));
        let ack_at = |sent_at| Acked { sent_at, rtt_nanos: None, ..acked(sent_at, MTU) };
        for (gap_end, lost, collapses) in [
            (None, [first, last], true),
            (None, [last, first], true),
            (None, [first, Time(last.0 - 1)], false),
            (Some(Time(first.0 + 5)), [first, last], false),
        ] {
            let mut cubic = cubic.clone();
            cubic.handle_acked(Time(first.0), ack_at(Time(first.0 - 1)));
            cubic.handle_acked(Time(last.0 + 2), ack_at(Time(last.0 + 1)));
            if let Some(between) = gap_end {
                cubic.handle_acked(Time(last.0 + 2), ack_at(between));
            }
            for sent_at in lost {
                cubic.handle_lost(Time(last.0 + 3), MTU, sent_at);
            }
            assert_eq!(cubic.window_bytes() == 2 * MTU, collapses, "{lost:?}");
        }
        // Idle time does not count as silence.
        cubic.handle_acked(Time(3600 * SECOND), ack_at(Time(3600 * SECOND)));
        cubic.handle_lost(Time(3600 * SECOND), MTU, first);
        assert!(cubic.window_bytes() > 2 * MTU);
    }

    #[test]
    fn a_timeout_stops_and_an_answer_tells_why() {
        let now = Time(10 * SECOND);
        for (sent_at, window) in [(now, 700_000), (now.after(1), 3_000)] {
            let mut cubic = reduced_from(1_000_000);
            cubic.handle_timeout(now);
            cubic.handle_timeout(now.after(5));
            assert_eq!(cubic.window_bytes(), 2 * MTU);
            let later = now.after(SECOND);
            let answer = Acked { sent_at, rtt_nanos: None, ..acked(later, MTU) };
            cubic.handle_acked(later, Acked { is_app_limited: sent_at == now, ..answer });
            let late = Acked { sent_at: now.after(6), rtt_nanos: None, ..answer };
            cubic.handle_acked(later, Acked { is_app_limited: sent_at == now, ..late });
            assert_eq!(cubic.window_bytes(), window);
        }
    }

    #[test]
    fn a_program_with_little_to_send_keeps_its_window() {
        let mut cubic = Cubic::new(MTU);
        for round in 1..100 {
            let now = Time(round * RTT);
            cubic.handle_acked(now, Acked { is_app_limited: true, ..acked(now, 10_000) });
        }
        assert_eq!(cubic.window_bytes(), 10_000);
        // A pause of an hour does not count on the curve.
        let mut cubic = reduced_from(1_000_000);
        rounds(&mut cubic, 1, 10);
        let before = cubic.window_bytes();
        let now = Time(3600 * SECOND);
        cubic.handle_acked(now, Acked { is_app_limited: true, ..acked(now, MTU) });
        let now = now.after(RTT);
        cubic.handle_acked(now, acked(now, MTU));
        assert!(cubic.window_bytes() < before + 10 * MTU);
    }

    #[test]
    fn a_clock_that_jumps_back_does_not_stop_growth() {
        let mut cubic = reduced_from(1_000_000);
        cubic.handle_lost(Time(3600 * SECOND), MTU, Time(3600 * SECOND));
        let before = cubic.window_bytes();
        assert!(before.abs_diff(490_000) <= 1);
        // Bytes sent before the jump still count as sent before the reduction.
        cubic.handle_acked(Time(RTT), acked(Time(RTT), MTU));
        assert_eq!(cubic.window_bytes(), before);
        assert!(rounds(&mut cubic, 2, 40) > before + 10 * MTU);
    }

    #[test]
    fn roots_are_right() {
        for value in [1e-12, 0.001, 0.5, 1.0, 8.0, 750.0, 1e6, 4.3e9, 1e18] {
            let root = cube_root(value);
            assert!((root * root * root / value - 1.0).abs() < 1e-5, "{value} {root}");
        }
        assert_eq!(cube_root(0.0), 0.0);
        assert_eq!(cube_root(-1.0), 0.0);
    }
}
