//! When the next batch may leave: a token bucket that fills at the rate of the path and never holds
//! more than a burst.
//!
//! The sender asks how long to wait, sends, and reports what it sent. So over any span, at most one
//! burst more than the rate allows leaves. A batch larger than the bucket may leave when the bucket
//! is full, and delays what follows. Tokens that arrive at a full bucket while nothing is to be
//! sent are lost. While something waits for the bucket, the bucket holds more: a process that
//! shares its processor with others asks a few milliseconds late, and would otherwise never reach
//! its rate.

use super::time::{MILLISECOND, SECOND, Time, bytes_in};

/// The most bytes that the kernel cuts into datagrams in one system call: the largest IP packet.
pub const BATCH_BYTES_MAX: u64 = 64 << 10;

/// The smallest burst, in bytes: two packets, however slow the path. A larger burst would be easier
/// on senders that ask seldom, but a burst into a queue that others keep full is lost. With ten
/// packets, the slower of two flows never got its share.
pub const BURST_BYTES_MIN: u64 = 2 * 1472;

/// A burst is at most what the rate carries in this time, in nanoseconds, so that a slow link does
/// not get a batch as large as a fast link. The value is also how late a poll may come without loss
/// of rate.
pub const BURST_NANOS: u64 = 2 * MILLISECOND;

/// A sender that is at most this late makes up for it, in nanoseconds: the time slice of another
/// process, where processors are shared.
pub const LATE_NANOS: u64 = 4 * MILLISECOND;

/// The smallest rate in bytes per second: that of a link of 128 kbit/s. An estimate can be wrong by
/// any factor (few bytes were acknowledged long after they had been sent), and a sender that waits
/// minutes for its turn cannot correct the estimate. The window bounds what is in flight in any
/// case.
pub const RATE_MIN: u64 = 16_000;

/// A token bucket that lets bytes leave at a rate.
#[derive(Clone, Debug)]
pub struct Pacer {
    /// Bytes per second; `None` holds nothing back.
    rate: Option<u64>,
    burst_bytes: u64,
    /// Something waits for the bucket.
    is_awaited: bool,
    /// Bytes that may leave, times [`SECOND`], so that a call after any short time counts. The
    /// value is negative after a batch larger than the tokens in the bucket.
    tokens: i128,
    filled_at: Time,
}

impl Pacer {
    /// A full bucket of at most `burst_bytes` bytes without a rate, so that everything may leave.
    /// [`BATCH_BYTES_MAX`] is the usual size; senders that can ask only seldom need more.
    pub fn new(burst_bytes: u64) -> Pacer {
        let burst_bytes = burst_bytes.max(BURST_BYTES_MIN);
        let tokens = scaled(burst_bytes);
        Pacer { rate: None, burst_bytes, is_awaited: false, tokens, filled_at: Time(0) }
    }

    /// Sets the rate in bytes per second; [`RATE_MIN`] is the minimum. The tokens remain, as far as
    /// the bucket for the new rate holds them.
    pub fn set_rate(&mut self, now: Time, rate: Option<u64>) {
        if self.rate == rate {
            return;
        }
        self.fill(now);
        self.rate = rate.map(|rate| rate.max(RATE_MIN));
        self.tokens = self.tokens.min(self.full());
    }

    /// Sets whether something waits for the time only.
    pub fn set_awaited(&mut self, now: Time, is_awaited: bool) {
        if self.is_awaited != is_awaited {
            self.fill(now);
            self.is_awaited = is_awaited;
        }
    }

    /// Whether something has waited for so long that tokens were lost.
    pub fn is_behind(&self, now: Time) -> bool {
        self.is_awaited && self.rate.is_some() && self.tokens_at(now) >= self.full()
    }

    /// Adjusts the bucket to the time. The sender must call this function before it waits:
    /// otherwise, after a clock has jumped back, the wait would be as long as the jump.
    pub fn handle_time(&mut self, now: Time) {
        if now < self.filled_at {
            self.fill(now);
        }
    }

    /// The time to wait before `bytes` bytes may leave together, in nanoseconds; 0 means now.
    pub fn delay_nanos(&self, now: Time, bytes: u64) -> u64 {
        let Some(rate) = self.rate else { return 0 };
        let wanted = scaled(bytes.min(self.capacity()));
        let missing = wanted - self.tokens_at(now);
        if missing <= 0 {
            return 0;
        }
        let nanos = missing.unsigned_abs().div_ceil(u128::from(rate));
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }

    /// Records that `bytes` bytes have left, whether allowed or not.
    pub fn handle_sent(&mut self, now: Time, bytes: u64) {
        self.fill(now);
        if self.rate.is_some() {
            self.tokens = self.tokens.saturating_sub(scaled(bytes));
        }
    }

    /// The most bytes that the bucket holds, at its present rate, while nothing waits.
    pub fn capacity(&self) -> u64 {
        let Some(rate) = self.rate else { return self.burst_bytes };
        bytes_in(BURST_NANOS, rate).clamp(BURST_BYTES_MIN, self.burst_bytes)
    }

    fn full(&self) -> i128 {
        let late = match (self.rate, self.is_awaited) {
            (Some(rate), true) => bytes_in(LATE_NANOS, rate),
            _ => 0,
        };
        scaled(self.capacity().saturating_add(late))
    }

    fn fill(&mut self, now: Time) {
        self.tokens = self.tokens_at(now);
        self.filled_at = now;
    }

    fn tokens_at(&self, now: Time) -> i128 {
        let full = self.full();
        let Some(rate) = self.rate else { return full };
        let gained = i128::from(now.nanos_since(self.filled_at)) * i128::from(rate);
        self.tokens.saturating_add(gained).min(full)
    }
}

fn scaled(bytes: u64) -> i128 {
    i128::from(bytes) * i128::from(SECOND)
}

const _: () = assert!(BURST_BYTES_MIN <= BATCH_BYTES_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    const GIGABIT: u64 = 125_000_000;

    /// Sends packets as soon as allowed, asking every `step_nanos`. Returns the bytes sent in a
    /// second.
    fn sent_in_a_second(pacer: &mut Pacer, step_nanos: u64) -> u64 {
        let mut sent = 0;
        for step in 0..SECOND / step_nanos {
            let now = Time(step * step_nanos);
            while pacer.delay_nanos(now, 1472) == 0 {
                pacer.handle_sent(now, 1472);
                sent += 1472;
            }
        }
        sent
    }

    #[test]
    fn a_clock_that_jumps_back_does_not_stop_a_path() {
        let mut pacer = Pacer::new(BATCH_BYTES_MAX);
        pacer.set_rate(Time(0), Some(GIGABIT));
        pacer.handle_sent(Time(3600 * SECOND), 2 * BATCH_BYTES_MAX);
        pacer.handle_time(Time(SECOND));
        let wait = pacer.delay_nanos(Time(SECOND), 1472);
        assert!(wait > 0 && wait < MILLISECOND);
        assert_eq!(pacer.delay_nanos(Time(SECOND + wait), 1472), 0);
    }

    #[test]
    fn without_a_rate_nothing_waits_and_nobody_is_behind() {
        let mut pacer = Pacer::new(BATCH_BYTES_MAX);
        pacer.set_awaited(Time(0), true);
        assert!(!pacer.is_behind(Time(SECOND)));
        pacer.handle_sent(Time(0), 1 << 40);
        assert_eq!(pacer.delay_nanos(Time(0), 1 << 40), 0);
    }

    #[test]
    fn the_rate_is_kept_however_often_one_asks() {
        for step in [100, 7_000, 100_000, 500_000] {
            let mut pacer = Pacer::new(BATCH_BYTES_MAX);
            pacer.set_rate(Time(0), Some(GIGABIT));
            let sent = sent_in_a_second(&mut pacer, step);
            assert!(sent <= GIGABIT + BATCH_BYTES_MAX, "{sent} bytes at {step}");
            assert!(sent >= GIGABIT / 1000 * 999, "{sent} bytes at {step}");
        }
    }

    #[test]
    fn the_delay_is_exactly_enough() {
        let mut pacer = Pacer::new(BATCH_BYTES_MAX);
        pacer.set_rate(Time(0), Some(GIGABIT));
        pacer.handle_sent(Time(0), BATCH_BYTES_MAX);
        // 1250 bytes take 10 microseconds at 1 Gbit/s.
        let delay = pacer.delay_nanos(Time(0), 1250);
        assert_eq!(delay, 10_000);
        assert!(pacer.delay_nanos(Time(delay - 1), 1250) > 0);
        assert_eq!(pacer.delay_nanos(Time(delay), 1250), 0);
    }

    #[test]
    fn a_batch_larger_than_the_bucket_leaves_when_it_is_full_and_is_paid_afterwards() {
        let mut pacer = Pacer::new(BATCH_BYTES_MAX);
        pacer.set_rate(Time(0), Some(GIGABIT));
        assert_eq!(pacer.delay_nanos(Time(0), 1 << 20), 0);
        pacer.handle_sent(Time(0), 1 << 20);
        let owed = (1 << 20) - BATCH_BYTES_MAX + 1250;
        assert_eq!(pacer.delay_nanos(Time(0), 1250), owed * 8);
    }

    #[test]
    fn bursts_shrink_with_the_rate() {
        let mut pacer = Pacer::new(BATCH_BYTES_MAX);
        for (rate, capacity) in
            [(1, BURST_BYTES_MIN), (12_500_000, 25_000), (GIGABIT, BATCH_BYTES_MAX)]
        {
            pacer.set_rate(Time(0), Some(rate));
            assert_eq!(pacer.capacity(), capacity);
        }
    }

    #[test]
    fn idle_time_saves_up_one_burst_and_no_more() {
        let mut pacer = Pacer::new(BATCH_BYTES_MAX);
        pacer.set_rate(Time(0), Some(GIGABIT));
        pacer.handle_sent(Time(0), BATCH_BYTES_MAX);
        let later = Time(3600 * SECOND);
        pacer.handle_sent(later, BATCH_BYTES_MAX);
        assert_eq!(pacer.delay_nanos(later, 1250), 10_000);
    }

    #[test]
    fn who_waits_and_is_looked_at_late_loses_nothing_for_a_while() {
        for (late, lost) in [(3 * MILLISECOND, false), (LATE_NANOS * 2, true)] {
            let mut pacer = Pacer::new(BATCH_BYTES_MAX);
            pacer.set_rate(Time(0), Some(GIGABIT));
            pacer.handle_sent(Time(0), BATCH_BYTES_MAX);
            pacer.set_awaited(Time(0), true);
            let now = Time(late);
            assert_eq!(pacer.is_behind(now), lost);
            let due = bytes_in(late.min(LATE_NANOS), GIGABIT);
            pacer.handle_sent(now, due);
            let left = if lost { BATCH_BYTES_MAX } else { 0 };
            assert_eq!(pacer.delay_nanos(now, 1250), if left > 0 { 0 } else { 10_000 });
            // Tokens that were collected by waiting are not kept for later.
            pacer.set_awaited(now, false);
            let later = Time(SECOND);
            pacer.handle_sent(later, BATCH_BYTES_MAX);
            assert_eq!(pacer.delay_nanos(later, 1250), 10_000);
        }
    }

    #[test]
    fn no_estimate_makes_anybody_wait_for_long() {
        for rate in [0, 1, 5, RATE_MIN] {
            let mut pacer = Pacer::new(BATCH_BYTES_MAX);
            pacer.set_rate(Time(0), Some(rate));
            pacer.handle_sent(Time(0), pacer.capacity());
            assert!(pacer.delay_nanos(Time(0), 1472) < 100 * MILLISECOND, "{rate}");
        }
    }

    #[test]
    fn a_clock_that_jumps_costs_at_most_what_is_owed() {
        let mut pacer = Pacer::new(BATCH_BYTES_MAX);
        pacer.set_rate(Time(u64::MAX), Some(GIGABIT));
        pacer.handle_sent(Time(u64::MAX), BATCH_BYTES_MAX);
        assert_eq!(pacer.delay_nanos(Time(5), 1250), 10_000);
        pacer.handle_sent(Time(5), 0);
        assert_eq!(pacer.delay_nanos(Time(10_005), 1250), 0);
        pacer.set_rate(Time(0), Some(0));
        pacer.handle_sent(Time(0), u64::MAX);
        assert_eq!(pacer.delay_nanos(Time(0), u64::MAX), u64::MAX);
    }
}
