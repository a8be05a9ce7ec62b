//! Time as paths know it: nanoseconds since an arbitrary start, and the conversion of bytes, rates
//! and spans.
//!
//! A span is a plain `u64` named `…_nanos`, a rate is in bytes per second. All sums saturate: a
//! clock that jumps back makes spans of zero, a clock that jumps far ahead makes long spans, and
//! neither ends the process.

/// A point in time: nanoseconds since an arbitrary start, which is the same for all times that one
/// owner passes in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// The nanoseconds from `earlier` to this time; zero if `earlier` is later.
    pub const fn nanos_since(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The time `nanos` nanoseconds later, or the last representable time.
    pub const fn after(self, nanos: u64) -> Time {
        Time(self.0.saturating_add(nanos))
    }
}

/// Nanoseconds in a microsecond.
pub const MICROSECOND: u64 = 1_000;
/// Nanoseconds in a millisecond.
pub const MILLISECOND: u64 = 1_000_000;
/// Nanoseconds in a second.
pub const SECOND: u64 = 1_000_000_000;

/// The rate in bytes per second, if `bytes` bytes took `nanos` nanoseconds. Zero nanoseconds count
/// as one.
pub fn rate_of(bytes: u64, nanos: u64) -> u64 {
    clamp(u128::from(bytes) * u128::from(SECOND) / u128::from(nanos.max(1)))
}

/// The nanoseconds that `bytes` bytes take at a rate in bytes per second, rounded up. A rate of
/// zero counts as one byte per second.
pub fn nanos_for(bytes: u64, rate: u64) -> u64 {
    clamp((u128::from(bytes) * u128::from(SECOND)).div_ceil(u128::from(rate.max(1))))
}

/// The whole bytes that a rate in bytes per second carries in `nanos` nanoseconds.
pub fn bytes_in(nanos: u64, rate: u64) -> u64 {
    clamp(u128::from(nanos) * u128::from(rate) / u128::from(SECOND))
}

/// `percent` hundredths of a value, rounded down.
pub fn percent_of(value: u64, percent: u64) -> u64 {
    clamp(u128::from(value) * u128::from(percent) / 100)
}

fn clamp(value: u128) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_saturate_at_both_ends() {
        assert_eq!(Time(7).nanos_since(Time(5)), 2);
        assert_eq!(Time(5).nanos_since(Time(7)), 0);
        assert_eq!(Time(u64::MAX).nanos_since(Time(0)), u64::MAX);
        assert_eq!(Time(u64::MAX - 1).after(5), Time(u64::MAX));
    }

    #[test]
    fn bytes_rates_and_spans_agree() {
        let gigabit = 125_000_000;
        assert_eq!(nanos_for(1_250_000, gigabit), 10 * MILLISECOND);
        assert_eq!(bytes_in(10 * MILLISECOND, gigabit), 1_250_000);
        assert_eq!(rate_of(1_250_000, 10 * MILLISECOND), gigabit);
        assert_eq!(nanos_for(1, 3), 333_333_334);
    }

    #[test]
    fn nothing_overflows() {
        assert_eq!(rate_of(u64::MAX, 0), u64::MAX);
        assert_eq!(nanos_for(u64::MAX, 0), u64::MAX);
        assert_eq!(bytes_in(u64::MAX, u64::MAX), u64::MAX);
        assert_eq!(percent_of(u64::MAX, 289), u64::MAX);
    }
}
