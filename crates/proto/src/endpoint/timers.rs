//! The timers of the endpoint: status requests after silence, loss detection by time, delayed
//! acknowledgements, paced paths.
//!
//! What enters: the time ([`Endpoint::handle_time`]). What leaves: the time of the next action
//! ([`Endpoint::next_wake`]), and peers with something to send. Each channel records at most one
//! time. The recorded time may be too early, which costs one look, so no frame changes it.
//!
//! What may never happen: something unconfirmed on a path with silent loss waits for ever; the time
//! alone causes anything but a status request to be sent; a channel without such a path, or with
//! nothing in flight, wakes the driver.

use super::channel::Channel;
use super::datagram_flow::ACK_DELAY_NANOS_MAX;
use super::path_state::PathProperties;
use super::{Endpoint, Memory, Peer};
use crate::channel::PathId;
use crate::channel::probe_timeout::{FIRST_PROBE_TIMEOUT_NANOS_MAX, ProbeTimeout};
use crate::path::time::Time;

/// The timers of one channel.
#[derive(Debug, Default)]
pub(super) struct ChannelTimers {
    /// The time at which the endpoint handles the channel; never later than the earliest timer.
    wake: Option<Time>,
    /// The probe timeout of all that is unconfirmed, as long as silent loss may affect some of it.
    probe_timeout: ProbeTimeout,
    /// The delivered position when `probe_timeout` began to wait.
    delivered: u64,
    /// The time at which datagrams that have arrived are confirmed, if no other frame has carried
    /// the acknowledgement by then.
    delayed_ack_at: Option<Time>,
}

impl<M: Memory> Channel<M> {
    /// Starts the channel's probe timeout if something is unconfirmed and may be lost silently, and
    /// stops it otherwise.
    fn note_unconfirmed(&mut self, now: Time) {
        if self.out.unconfirmed() == 0 || !self.paths.has_silent_loss {
            self.timers.probe_timeout.stop();
        } else if self.timers.probe_timeout == ProbeTimeout::default() {
            self.timers.delivered = self.out.delivered();
            self.timers.probe_timeout.start(now);
        }
    }

    /// Queues a status request if nothing has been confirmed for the probe timeout.
    fn check_probe_timeout(&mut self, now: Time) {
        self.note_unconfirmed(now);
        let due = self.timers.probe_timeout.due(FIRST_PROBE_TIMEOUT_NANOS_MAX);
        if due.is_none_or(|due| due > now) {
            return;
        }
        let delivered = self.out.delivered();
        if delivered > self.timers.delivered {
            self.timers.delivered = delivered;
            self.timers.probe_timeout.handle_progress(now);
        } else {
            self.timers.probe_timeout.handle_timeout(now);
            self.repairs.owe_status_request(None);
        }
    }

    /// Requests the acknowledgement that has been delayed long enough.
    fn check_delayed_ack(&mut self, now: Time) {
        if self.timers.delayed_ack_at.take_if(|at| *at <= now).is_some() {
            self.owed_ack.is_wanted |= self.owed_ack.acknowledged < self.into.delivered();
        }
    }

    /// Declares late datagrams lost, and queues status requests on silent paths of datagrams.
    fn check_flows(&mut self, now: Time) {
        for number in 0..self.paths.len() {
            let path = PathId(number as u8);
            self.detect_losses(path, now);
            let state = &mut self.paths[number];
            let Some(flow) = state.flow.as_mut().filter(|_| state.is_up) else { continue };
            if !flow.handle_time(now, &state.round_trip) {
                continue;
            }
            if self.paths.sends_by(path) {
                self.repairs.owe_status_request(Some(path));
            } else {
                // No status request is sent by this path, so no answer would report on it.
                self.lose_in_flight(path, now);
                self.out.request_status();
            }
        }
    }

    /// The time of the channel's next action.
    fn due(&self) -> Option<Time> {
        let flows = self.paths.iter().filter_map(|state| state.due()).min();
        let times = [
            self.timers.probe_timeout.due(FIRST_PROBE_TIMEOUT_NANOS_MAX),
            self.timers.delayed_ack_at,
            flows,
        ];
        times.into_iter().flatten().min()
    }

    /// Records that `path` could take more while nothing waits to be sent.
    #[cold]
    pub fn handle_app_limited(&mut self, path: PathId) {
        let is_empty = self.queue.is_empty() && !self.out.has_lost();
        let flow = self.paths.get_mut(path.0 as usize).and_then(|state| state.flow.as_mut());
        if let Some(flow) = flow.filter(|_| is_empty) {
            flow.handle_app_limited();
        }
    }
}

impl<M: Memory> Endpoint<M> {
    /// Whether the endpoint needs the time. If so, the driver must call [`Self::set_time`] before
    /// it passes in or polls anything, and must not sleep beyond [`Self::next_wake`].
    pub fn needs_time(&self) -> bool {
        self.timed > 0
    }

    /// The time at which [`Self::handle_time`] has something to do, if there is one.
    #[inline]
    pub fn next_wake(&self) -> Option<Time> {
        self.wakes.first().map(|&(time, _)| time)
    }

    /// Sets the time to `now` and does what is due. Then the driver must drain [`Self::next_busy`]
    /// and [`Self::poll_action`], as after any call.
    #[inline]
    pub fn handle_time(&mut self, now: Time) {
        self.now = now;
        if self.next_wake().is_some_and(|wake| wake <= now) {
            self.handle_wakes();
        }
    }

    #[cold]
    fn handle_wakes(&mut self) {
        let later = self.wakes.split_off(&(self.now.after(1), Peer(0)));
        for (_, peer) in core::mem::replace(&mut self.wakes, later) {
            let channel = &mut self.channels[peer.0 as usize];
            channel.timers.wake = None;
            if channel.end.failed.is_some() || !channel.paths.has_senders() {
                continue;
            }
            channel.check_flows(self.now);
            channel.check_probe_timeout(self.now);
            channel.check_delayed_ack(self.now);
            self.arm(peer);
            // The channel's pacer may let more be sent.
            self.mark_busy(peer);
        }
    }

    /// Records that the driver has passed in all that one receiving call has brought from `peer` by
    /// `path`. The frames are acknowledged now if they fill two datagrams or leave a gap, and
    /// otherwise at most `ACK_DELAY_NANOS_MAX` later.
    pub fn end_batch(&mut self, peer: Peer, path: PathId) {
        let now = self.now;
        let channel = &mut self.channels[peer.0 as usize];
        let full = match channel.paths.path_state(path).map(|state| state.path) {
            Some(PathProperties { datagram: Some(_), payload_max, .. }) => 2 * payload_max as u64,
            Some(_) => return,
            // Only the peer sends by this path, and the driver sets no time on account of the path,
            // so the acknowledgement must not wait.
            None => 0,
        };
        let unacknowledged = channel.into.delivered().saturating_sub(channel.owed_ack.acknowledged);
        if channel.end.failed.is_some() || unacknowledged == 0 {
            return;
        }
        if channel.into.has_out_of_order() {
            channel.repairs.owe_sack(0, None);
            self.mark_busy(peer);
        } else if unacknowledged >= full {
            channel.owed_ack.is_wanted = true;
            self.schedule_ack(peer);
        } else if channel.timers.delayed_ack_at.is_none() {
            channel.timers.delayed_ack_at = Some(now.after(ACK_DELAY_NANOS_MAX));
            self.arm(peer);
        }
    }

    /// Computes, before `path` is polled for a frame, whether its datagrams may be sent now.
    #[cold]
    pub(super) fn prepare(&mut self, peer: Peer, path: PathId) {
        let now = self.now;
        let channel = &mut self.channels[peer.0 as usize];
        let wants = !channel.queue.is_empty() || channel.out.has_lost();
        let flow = channel.paths.get_mut(path.0 as usize).and_then(|state| state.flow.as_mut());
        let Some(flow) = flow else { return };
        flow.update_openness(now, wants);
        if flow.is_open() {
            // No overlong frame may be left when the next frame is chosen.
            while self.cut_up(peer, path) {}
        } else {
            self.arm(peer);
        }
    }

    /// Starts the timers after something was sent by a path that loses silently or carries
    /// datagrams.
    #[cold]
    pub(super) fn arm_probe_timeout(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        let is_watched = channel.timers.wake.is_some()
            && channel.timers.probe_timeout != ProbeTimeout::default();
        if !is_watched || channel.paths.has_datagrams {
            channel.note_unconfirmed(self.now);
            self.arm(peer);
        }
    }

    /// Processes acknowledgements of datagrams, if the channel has any.
    #[cold]
    pub(super) fn process_flow_acks(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.paths.has_datagrams {
            channel.process_acks(self.now);
            self.arm(peer);
        }
    }

    /// Records the time of the channel's next action with the endpoint.
    pub(super) fn arm(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        let Some(due) = channel.due() else { return };
        // Overdue actions happen in the next nanosecond.
        let due = due.max(self.now.after(1));
        if let Some(wake) = channel.timers.wake {
            if wake <= due {
                return;
            }
            self.wakes.remove(&(wake, peer));
        }
        channel.timers.wake = Some(due);
        self.wakes.insert((due, peer));
    }
}
