//! The timers of one channel: the probe timeout after silence, and the delayed acknowledgement.
//!
//! What enters: the time, and the position up to which the peer has acknowledged. What leaves:
//! whether a status request or an acknowledgement is due, and when to look next.
//!
//! What may never happen: something unacknowledged on a path with silent loss waits for ever; the
//! time alone causes anything but a status request to be sent; a channel without such a path, or
//! with nothing in flight, has a timer.

use super::datagram_flow::ACK_DELAY_NANOS_MAX;
use crate::channel::probe_timeout::{FIRST_PROBE_TIMEOUT_NANOS_MAX, ProbeTimeout};
use crate::path::time::Time;

/// The timers of one channel.
#[derive(Debug, Default)]
pub(super) struct ChannelTimers {
    /// The probe timeout of all that is unacknowledged, as long as silent loss may affect some of
    /// it.
    probe_timeout: ProbeTimeout,
    /// The delivered position when `probe_timeout` began to wait.
    delivered: u64,
    /// The time at which datagrams that have arrived are acknowledged, if no other frame has
    /// carried the acknowledgement by then.
    delayed_ack_at: Option<Time>,
}

impl ChannelTimers {
    /// Whether the probe timeout runs.
    pub fn is_probing(&self) -> bool {
        self.probe_timeout != ProbeTimeout::default()
    }

    /// Starts the probe timeout, unless it runs, if the bytes from `at_risk` on are unacknowledged
    /// and may be lost silently, and stops it if there is no such position.
    pub fn note_unacknowledged(&mut self, now: Time, at_risk: Option<u64>) {
        match at_risk {
            None => self.probe_timeout.stop(),
            Some(delivered) if !self.is_probing() => {
                self.delivered = delivered;
                self.probe_timeout.start(now);
            }
            Some(_) => (),
        }
    }

    /// Whether a status request is due, because nothing has been acknowledged for the probe
    /// timeout. The peer has acknowledged all bytes below `delivered`.
    pub fn check_probe_timeout(&mut self, now: Time, delivered: u64) -> bool {
        let due = self.probe_timeout.due(FIRST_PROBE_TIMEOUT_NANOS_MAX);
        if due.is_none_or(|due| due > now) {
            return false;
        }
        let is_silent = delivered <= self.delivered;
        if is_silent {
            self.probe_timeout.handle_timeout(now);
        } else {
            self.delivered = delivered;
            self.probe_timeout.handle_progress(now);
        }
        is_silent
    }

    /// Lets an acknowledgement wait for another frame, at most [`ACK_DELAY_NANOS_MAX`]. Returns
    /// false if one waits already.
    pub fn delay_ack(&mut self, now: Time) -> bool {
        let is_first = self.delayed_ack_at.is_none();
        if is_first {
            self.delayed_ack_at = Some(now.after(ACK_DELAY_NANOS_MAX));
        }
        is_first
    }

    /// Whether an acknowledgement has waited long enough. It waits no longer then.
    pub fn take_delayed_ack(&mut self, now: Time) -> bool {
        self.delayed_ack_at.take_if(|at| *at <= now).is_some()
    }

    /// The time of the next timer.
    pub fn due(&self) -> Option<Time> {
        let probe = self.probe_timeout.due(FIRST_PROBE_TIMEOUT_NANOS_MAX);
        [probe, self.delayed_ack_at].into_iter().flatten().min()
    }
}
