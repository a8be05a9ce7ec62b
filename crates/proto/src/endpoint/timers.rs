//! What the endpoint does because time has passed: it asks after what has been silent for too long, gives up what is late,
//! confirms what nothing has taken along, lets a paced path go on.
//!
//! Enters: the time ([`Endpoint::handle_time`]). Leaves: when it matters next ([`Endpoint::next_wake`]), and peers with
//! something to send. Each channel notes at most one time; it may be too early by then, which costs a look, so nothing is
//! noted anew for every frame.
//!
//! What may never happen: something unconfirmed on a path that loses in silence waits for ever; anything but a question
//! is sent again because of the time alone; a channel without such a path, or with nothing under way, wakes anybody.

use super::channel::Channel;
use super::datagram_flow::ACK_DELAY_NANOS_MAX;
use super::path_state::PathProperties;
use super::{Endpoint, Memory, Peer};
use crate::channel::PathId;
use crate::channel::probe_timeout::{FIRST_PROBE_TIMEOUT_NANOS_MAX, ProbeTimeout};
use crate::path::time::Time;

/// What a channel watches.
#[derive(Debug, Default)]
pub(super) struct ChannelTimers {
    /// When the endpoint looks at it; never later than what it waits for.
    wake: Option<Time>,
    /// All that is unconfirmed, as long as some of it may be lost in silence.
    probe_timeout: ProbeTimeout,
    /// What had been delivered when `probe_timeout` began to wait.
    delivered: u64,
    /// What has come as datagrams is confirmed then, if nothing has taken that along.
    delayed_ack_at: Option<Time>,
}

impl<M: Memory> Channel<M> {
    /// Something may have been sent.
    fn note_unconfirmed(&mut self, now: Time) {
        if self.out.unconfirmed() == 0 || !self.has_silent_loss {
            self.timers.probe_timeout.stop();
        } else if self.timers.probe_timeout == ProbeTimeout::default() {
            self.timers.delivered = self.out.delivered();
            self.timers.probe_timeout.start(now);
        }
    }

    /// Asks the peer if nothing that was unconfirmed has been confirmed for long.
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
            self.owe_status_request(None);
        }
    }

    /// Confirms what has waited for long enough.
    fn check_delayed_ack(&mut self, now: Time) {
        if self.timers.delayed_ack_at.take_if(|at| *at <= now).is_some() {
            self.ack_wanted |= self.acknowledged < self.into.delivered();
        }
    }

    /// Gives up what is late on datagram paths, and asks after what is silent.
    fn check_flows(&mut self, now: Time) {
        for number in 0..self.paths.len() {
            let path = PathId(number as u8);
            self.detect_losses(path, now);
            let state = &mut self.paths[number];
            let Some(flow) = state.flow.as_mut().filter(|_| state.is_up) else { continue };
            if !flow.handle_time(now, &state.round_trip) {
                continue;
            }
            if self.sends_by(path) {
                self.owe_status_request(Some(path));
            } else {
                // No question goes by it, so no answer would say anything.
                self.lose_in_flight(path, now);
                self.out.request_status();
            }
        }
    }

    /// When it should be looked at.
    fn due(&self) -> Option<Time> {
        let flows = self.paths.iter().filter_map(|state| state.due()).min();
        let times = [
            self.timers.probe_timeout.due(FIRST_PROBE_TIMEOUT_NANOS_MAX),
            self.timers.delayed_ack_at,
            flows,
        ];
        times.into_iter().flatten().min()
    }

    /// `path` might take more, but there is nothing.
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
    /// Whether the time matters: then [`Self::set_time`] is to be called before anything is handled or polled, and
    /// [`Self::next_wake`] bounds the driver's sleep.
    pub fn needs_time(&self) -> bool {
        self.timed > 0
    }

    /// When [`Self::handle_time`] has something to do, if ever.
    #[inline]
    pub fn next_wake(&self) -> Option<Time> {
        self.wakes.first().map(|&(time, _)| time)
    }

    /// It is `now`: does what is due. Then [`Self::next_busy`] and [`Self::poll_action`] as after any call.
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
            if channel.failed.is_some() || !channel.has_senders() {
                continue;
            }
            channel.check_flows(self.now);
            channel.check_probe_timeout(self.now);
            channel.check_delayed_ack(self.now);
            self.arm(peer);
            // Perhaps its pacer lets it go on.
            self.mark_busy(peer);
        }
    }

    /// The driver has handed in all that one receiving call has brought from `peer` by `path`: what is to be confirmed of
    /// it is confirmed now, if it is as much as two datagrams or shows a gap, or else soon.
    pub fn end_batch(&mut self, peer: Peer, path: PathId) {
        let now = self.now;
        let channel = &mut self.channels[peer.0 as usize];
        let full = match channel.path_state(path).map(|state| state.path) {
            Some(PathProperties { datagram: Some(_), payload_max, .. }) => 2 * payload_max as u64,
            Some(_) => return,
            // Only the peer sends by it, and nobody tells the time here for its sake: nothing may wait.
            None => 0,
        };
        let unacknowledged = channel.into.delivered().saturating_sub(channel.acknowledged);
        if channel.failed.is_some() || unacknowledged == 0 {
            return;
        }
        if channel.into.has_out_of_order() {
            channel.owe_sack(0, None);
            self.mark_busy(peer);
        } else if unacknowledged >= full {
            channel.ack_wanted = true;
            self.schedule_ack(peer);
        } else if channel.timers.delayed_ack_at.is_none() {
            channel.timers.delayed_ack_at = Some(now.after(ACK_DELAY_NANOS_MAX));
            self.arm(peer);
        }
    }

    /// Before `path` is asked for a frame: whether its datagrams may leave now.
    #[cold]
    pub(super) fn prepare(&mut self, peer: Peer, path: PathId) {
        let now = self.now;
        let channel = &mut self.channels[peer.0 as usize];
        let wants = !channel.queue.is_empty() || channel.out.has_lost();
        let flow = channel.paths.get_mut(path.0 as usize).and_then(|state| state.flow.as_mut());
        let Some(flow) = flow else { return };
        flow.update_openness(now, wants);
        if flow.is_open() {
            // None may be left when the next frame is chosen.
            while self.cut_up(peer, path) {}
        } else {
            self.arm(peer);
        }
    }

    /// Something has been given to a path that takes time to be confirmed, or may lose it in silence.
    #[cold]
    pub(super) fn arm_probe_timeout(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        let is_watched = channel.timers.wake.is_some()
            && channel.timers.probe_timeout != ProbeTimeout::default();
        if !is_watched || channel.has_datagrams {
            channel.note_unconfirmed(self.now);
            self.arm(peer);
        }
    }

    /// Something may have been confirmed.
    #[cold]
    pub(super) fn process_flow_acks(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.has_datagrams {
            channel.process_acks(self.now);
            self.arm(peer);
        }
    }

    /// Sees to it that `peer` is looked at in time.
    pub(super) fn arm(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        let Some(due) = channel.due() else { return };
        // At once is soon enough for what is overdue.
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
