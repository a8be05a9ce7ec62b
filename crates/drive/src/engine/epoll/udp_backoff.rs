//! Whether a stream to another relay should be dialled over UDP.
//!
//! Some networks let UDP through only for a short time, because of a middlebox that forgets it, or
//! because of a limit. Dials over UDP succeed there again and again, but no link lasts. What
//! enters: when links came up, and when they broke. What leaves: whether the next link should use
//! UDP. What may never happen: UDP is given up for good, or a working link is closed.

/// A link over UDP that breaks sooner than this counts as short. The detection of the break takes
/// some four seconds of this time.
const SHORT_MILLIS: u64 = 30_000;
/// After this many short links in a row, TCP is used.
const SHORT_MAX: u32 = 3;
/// The first time for which UDP is avoided. It doubles each time that UDP has again been no better.
const AVOIDED_MILLIS_MIN: u64 = 60_000;
/// The longest time for which UDP is avoided.
const AVOIDED_MILLIS_MAX: u64 = 3_600_000;

/// The backoff of UDP for one stream: see the module documentation.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct UdpBackoff {
    /// The time at which the present link over UDP came up, if there is one.
    up_since_millis: Option<u64>,
    /// The number of short links in a row.
    short_count: u32,
    avoided_millis: u64,
    avoided_until_millis: u64,
}

impl UdpBackoff {
    pub fn allows_udp(&self, now_millis: u64) -> bool {
        now_millis >= self.avoided_until_millis
    }

    pub fn note_up(&mut self, is_udp: bool, now_millis: u64) {
        self.up_since_millis = is_udp.then_some(now_millis);
    }

    /// Records that the link has broken: because the other side ended it in good order
    /// (`was_said`), or by itself. Returns the milliseconds for which UDP is avoided, if this
    /// begins now.
    pub fn note_break(&mut self, was_said: bool, now_millis: u64) -> Option<u64> {
        let up_millis = now_millis.saturating_sub(self.up_since_millis.take()?);
        if up_millis >= SHORT_MILLIS {
            *self = Self::default();
            return None;
        }
        if was_said {
            return None;
        }
        self.short_count = self.short_count.saturating_add(1);
        if self.short_count < SHORT_MAX {
            return None;
        }
        self.avoided_millis =
            (2 * self.avoided_millis).clamp(AVOIDED_MILLIS_MIN, AVOIDED_MILLIS_MAX);
        self.avoided_until_millis = now_millis + self.avoided_millis;
        Some(self.avoided_millis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000;

    /// One link over UDP that is up for `up_millis`. Returns the time of its break, and the result
    /// of [`UdpBackoff::note_break`].
    fn link(backoff: &mut UdpBackoff, from: u64, up_millis: u64) -> (u64, Option<u64>) {
        backoff.note_up(true, from);
        (from + up_millis, backoff.note_break(false, from + up_millis))
    }

    #[test]
    fn links_that_break_soon_leave_the_field_to_tcp_for_longer_and_longer() {
        let (mut backoff, mut now) = (UdpBackoff::default(), 5);
        for _ in 1..SHORT_MAX {
            let why;
            (now, why) = link(&mut backoff, now, 5 * SECOND);
            assert_eq!(why, None);
            assert!(backoff.allows_udp(now));
        }
        let mut expected = AVOIDED_MILLIS_MIN;
        for _ in 0..10 {
            let avoided;
            (now, avoided) = link(&mut backoff, now, 5 * SECOND);
            assert_eq!(avoided, Some(expected));
            assert!(!backoff.allows_udp(now + expected - 1));
            now += expected;
            assert!(backoff.allows_udp(now));
            expected = (2 * expected).min(AVOIDED_MILLIS_MAX);
        }
        assert_eq!(expected, AVOIDED_MILLIS_MAX);
    }

    #[test]
    fn a_link_that_has_held_makes_up_for_all_before_it() {
        let (mut backoff, mut now) = (UdpBackoff::default(), 5);
        for _ in 0..SHORT_MAX {
            (now, _) = link(&mut backoff, now, 5 * SECOND);
        }
        (now, _) = link(&mut backoff, now + AVOIDED_MILLIS_MIN, SHORT_MILLIS);
        assert_eq!(backoff, UdpBackoff::default());
        assert!(backoff.allows_udp(now));
    }

    #[test]
    fn tcp_and_relays_that_say_that_they_end_are_no_sign() {
        let mut backoff = UdpBackoff::default();
        for now in 0..20 {
            backoff.note_up(now % 2 == 0, now);
            assert_eq!(backoff.note_break(now % 2 == 0, now), None);
            assert_eq!(backoff.note_break(false, now), None, "there was no link");
        }
        assert_eq!(backoff, UdpBackoff::default());
    }
}
