//! For how long bytes of a TCP connection have not been confirmed.
//!
//! What enters: how many bytes the other kernel has confirmed ([`crate::sys::TcpInfo`]), at each
//! check that finds some in flight. What leaves: for how long the same ones have been there. What
//! may never happen: bytes that have just left count as old because others were in flight at the
//! check before. Between two checks the owner may be busy for seconds.

use std::time::{Duration, Instant};

/// Bytes in flight that every check has found unconfirmed.
#[derive(Debug, Default)]
pub struct Unconfirmed {
    oldest: Option<Oldest>,
}

#[derive(Debug)]
struct Oldest {
    /// The check that has found these bytes first.
    since: Instant,
    /// How many bytes were confirmed at that time: with the next ones, these are.
    confirmed_bytes: u64,
}

impl Unconfirmed {
    /// Whether the last check has found bytes in flight.
    pub fn is_any(&self) -> bool {
        self.oldest.is_some()
    }

    /// A check finds bytes in flight, and so many confirmed. Returns for how long the oldest of
    /// those in flight have been there, as far as checks know.
    pub fn note(&mut self, confirmed_bytes: u64, now: Instant) -> Duration {
        let earlier = self.oldest.take().filter(|oldest| oldest.confirmed_bytes == confirmed_bytes);
        let oldest = self.oldest.insert(earlier.unwrap_or(Oldest { since: now, confirmed_bytes }));
        now.saturating_duration_since(oldest.since)
    }

    /// A check finds nothing in flight.
    pub fn clear(&mut self) {
        self.oldest = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_as_old_as_the_first_check_that_has_seen_them() {
        let start = Instant::now();
        let mut unconfirmed = Unconfirmed::default();
        // Milliseconds; how many bytes are confirmed, if some are in flight; the expected age.
        let rows = [
            (0, Some(10), 0),
            (900, Some(10), 900),
            (1_000, Some(11), 0),
            (1_500, Some(11), 500),
            (1_600, None, 0),
            (1_700, Some(11), 0),
        ];
        for (millis, confirmed, expected) in rows {
            let now = start + Duration::from_millis(millis);
            match confirmed {
                Some(bytes) => {
                    let age = unconfirmed.note(bytes, now);
                    assert_eq!(age.as_millis(), expected, "after {millis} ms");
                }
                None => unconfirmed.clear(),
            }
            assert_eq!(unconfirmed.is_any(), confirmed.is_some());
        }
    }
}
