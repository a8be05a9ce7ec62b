//! The probe timeout: when a path with bytes in flight has been silent for too long. The wait
//! doubles each time that it passes without an answer.
//!
//! Nobody reports a silent loss, so after a wait a status request is sent to the peer. The peer may
//! be computing, and answer when it is done. Until then each further status request comes after
//! twice the time, and costs a few bytes.
//!
//! | state | bytes are in flight | progress | the wait has passed | nothing is in flight |
//! |---|---|---|---|---|
//! | idle | waits from now on | | | |
//! | waits | | waits again, the first time | waits again, twice as long | idle |

use crate::path::time::{SECOND, Time};

/// The longest wait, in nanoseconds.
pub const PROBE_TIMEOUT_NANOS_MAX: u64 = 64 * SECOND;

/// The longest first wait, and the first wait of paths of which nothing is known, in nanoseconds.
/// The value exceeds any round trip and any normal standstill of a relay.
pub const FIRST_PROBE_TIMEOUT_NANOS_MAX: u64 = 4 * SECOND;

/// The most doublings; more would not make the wait longer.
const DOUBLINGS_MAX: u32 = 36;

/// The probe timeout of a path or channel: see the module documentation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeTimeout {
    since: Option<Time>,
    doublings: u32,
}

impl ProbeTimeout {
    /// Starts the wait, because bytes are in flight, unless it has started.
    pub fn start(&mut self, now: Time) {
        self.since.get_or_insert(now);
    }

    /// Restarts the wait, because the peer has reported something about the bytes in flight.
    pub fn handle_progress(&mut self, now: Time) {
        if self.since.is_some() {
            *self = Self { since: Some(now), doublings: 0 };
        }
    }

    /// Restarts the wait with twice the time, because it has passed.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.since.is_some() {
            *self = Self { since: Some(now), doublings: (self.doublings + 1).min(DOUBLINGS_MAX) };
        }
    }

    /// Stops the wait, because nothing is in flight.
    pub fn stop(&mut self) {
        *self = Self::default();
    }

    /// The time at which the wait ends, if the first wait takes `first` nanoseconds.
    pub fn due(&self, first: u64) -> Option<Time> {
        let first = first.clamp(1, FIRST_PROBE_TIMEOUT_NANOS_MAX);
        let wait = first.saturating_mul(1 << self.doublings).min(PROBE_TIMEOUT_NANOS_MAX);
        self.since.map(|since| since.after(wait))
    }

    /// The number of waits in a row that passed without an answer.
    pub fn doublings(&self) -> u32 {
        self.doublings
    }
}

// Even the shortest first wait reaches the longest wait.
const _: () = assert!(1 << DOUBLINGS_MAX >= PROBE_TIMEOUT_NANOS_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_under_every_event() {
        type Happen = fn(&mut ProbeTimeout);
        let idle = ProbeTimeout::default();
        let waits = |since, doublings| ProbeTimeout { since: Some(Time(since)), doublings };
        let rows: [(&str, Happen, [ProbeTimeout; 3]); 4] = [
            (
                "something under way",
                |it| it.start(Time(9)),
                [waits(9, 0), waits(3, 0), waits(3, 2)],
            ),
            ("a sign", |it| it.handle_progress(Time(9)), [idle, waits(9, 0), waits(9, 0)]),
            ("in vain", |it| it.handle_timeout(Time(9)), [idle, waits(9, 1), waits(9, 3)]),
            ("nothing under way", ProbeTimeout::stop, [idle; 3]),
        ];
        for (what, happen, expected) in rows {
            for (mut state, expected) in [idle, waits(3, 0), waits(3, 2)].into_iter().zip(expected)
            {
                let before = state;
                happen(&mut state);
                assert_eq!(state, expected, "{before:?} under {what}");
            }
        }
    }

    #[test]
    fn the_wait_doubles_from_the_first_to_the_longest() {
        let mut probe = ProbeTimeout::default();
        assert_eq!(probe.due(SECOND), None);
        probe.start(Time(0));
        let mut now = 0;
        for expected in [4, 8, 16, 32, 64, 64, 64] {
            let due = probe.due(u64::MAX).unwrap();
            assert_eq!(due.0 - now, expected * SECOND);
            now = due.0;
            probe.handle_timeout(due);
        }
        for _ in 0..100 {
            probe.handle_timeout(Time(now));
        }
        assert_eq!(probe.due(0), Some(Time(now + PROBE_TIMEOUT_NANOS_MAX)));
    }
}
