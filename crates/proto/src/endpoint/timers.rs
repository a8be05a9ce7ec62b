//! What the endpoint does because time has passed: it asks after what has been silent for too long.
//!
//! Enters: the time ([`Endpoint::handle_time`]). Leaves: when it matters next ([`Endpoint::next_wake`]), and peers with
//! something to send. Each channel notes at most one time; it may be too early by then, which costs a look, so nothing is
//! noted anew for every frame.
//!
//! What may never happen: something unconfirmed on a path that loses in silence waits for ever; anything but a question
//! is sent again because of the time alone; a channel without such a path, or with nothing under way, wakes anybody.

use super::channel::Channel;
use super::{Endpoint, Memory, Peer};
use crate::channel::PathId;
use crate::channel::probe::{Probe, WAIT_NANOS_FIRST};
use crate::path::time::Time;

/// What a channel watches.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// When the endpoint looks at it; never later than what it waits for.
    wake: Option<Time>,
    /// All that is unconfirmed, as long as some of it may be lost in silence.
    safety: Probe,
    /// What had been delivered when `safety` began to wait.
    delivered: u64,
}

impl<M: Memory> Channel<M> {
    /// Something may have been sent.
    fn note_unconfirmed(&mut self, now: Time) {
        if self.out.unconfirmed() == 0 || !self.is_silent() {
            self.watch.safety.stop();
        } else if self.watch.safety == Probe::default() {
            self.watch.delivered = self.out.delivered();
            self.watch.safety.start(now);
        }
    }

    /// Asks the peer if nothing that was unconfirmed has been confirmed for long.
    fn check_safety(&mut self, now: Time) {
        self.note_unconfirmed(now);
        let due = self.watch.safety.due(WAIT_NANOS_FIRST);
        if due.is_none_or(|due| due > now) {
            return;
        }
        let delivered = self.out.delivered();
        if delivered > self.watch.delivered {
            self.watch.delivered = delivered;
            self.watch.safety.handle_sign(now);
        } else {
            self.watch.safety.handle_timeout(now);
            self.owe_probe(None);
        }
    }

    /// When it should be looked at.
    fn due(&self) -> Option<Time> {
        self.watch.safety.due(WAIT_NANOS_FIRST)
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
            channel.watch.wake = None;
            if channel.failed.is_some() || !channel.has_senders() {
                continue;
            }
            channel.check_safety(self.now);
            let is_calm = channel.is_calm();
            self.arm(peer);
            if !is_calm {
                self.mark_busy(peer);
            }
        }
    }

    /// The driver has handed in all that one receiving call has brought from `peer` by `path`: what is to be confirmed of
    /// it is confirmed now.
    pub fn end_batch(&mut self, peer: Peer, _path: PathId) {
        self.settle_ack(peer);
    }

    /// Something has been given to a path that takes time to be confirmed, or may lose it in silence.
    #[cold]
    pub(super) fn watch(&mut self, peer: Peer) {
        self.channels[peer.0 as usize].note_unconfirmed(self.now);
        self.arm(peer);
    }

    /// Sees to it that `peer` is looked at in time.
    pub(super) fn arm(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        let Some(due) = channel.due() else { return };
        // At once is soon enough for what is overdue.
        let due = due.max(self.now.after(1));
        if let Some(wake) = channel.watch.wake {
            if wake <= due {
                return;
            }
            self.wakes.remove(&(wake, peer));
        }
        channel.watch.wake = Some(due);
        self.wakes.insert((due, peer));
    }
}
