//! The times of the launcher: when the job, a relay or the wait after a fault ends, and when agents
//! are pinged. The module reads no clock.

use std::time::{Duration, Instant};

use crate::control::PING_INTERVAL;

pub(super) struct Deadlines {
    /// End of the job, if the user has set one.
    pub job: Option<Instant>,
    /// Deadline of the relay that the launcher waits for, or of the links between all relays.
    pub relay: Option<Instant>,
    /// Time at which the cause of the job's end is settled: until then further reports may show
    /// another one.
    pub settled: Option<Instant>,
    pinged_at: Instant,
}

impl Deadlines {
    pub fn new(timeout: Option<Duration>, now: Instant) -> Deadlines {
        let job = timeout.map(|timeout| now + timeout);
        Deadlines { job, relay: None, settled: None, pinged_at: now }
    }

    /// Whether agents are to be pinged now.
    pub fn is_ping_due(&mut self, now: Instant) -> bool {
        let is_due = now >= self.pinged_at + PING_INTERVAL;
        if is_due {
            self.pinged_at = now;
        }
        is_due
    }

    pub fn next_time(&self) -> Option<Instant> {
        let ping = Some(self.pinged_at + PING_INTERVAL);
        [self.job, self.relay, self.settled, ping].into_iter().flatten().min()
    }
}
