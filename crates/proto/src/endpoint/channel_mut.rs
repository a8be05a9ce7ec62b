//! One channel together with what its changes lead to: frames to send, times to wake up, actions of
//! the driver.
//!
//! What enters: changes of one channel that the rest of the endpoint must learn of. What leaves:
//! the peer's place in the [`PeerSchedule`], and actions. What may never happen: a channel has
//! something to send and its peer is not in the queue of busy peers, although a path may take a
//! frame.

use super::action_queue::ActionQueue;
use super::channel::Channel;
use super::driver_interface::{Memory, Peer};
use super::operation::Item;
use super::schedule::PeerSchedule;

/// One channel, borrowed with the queues in which its changes appear: see
/// [`Endpoint::channel_mut`](super::Endpoint::channel_mut).
pub struct ChannelMut<'a, M> {
    pub(super) channel: &'a mut Channel<M>,
    pub(super) schedule: &'a mut PeerSchedule,
    pub(super) actions: &'a mut ActionQueue<M>,
}

impl<M: Memory> ChannelMut<'_, M> {
    #[inline]
    pub(super) fn peer(&self) -> Peer {
        self.channel.entry.peer
    }

    /// Puts the peer into the queue of
    /// [`Endpoint::next_busy`](super::Endpoint::next_busy), unless it is there.
    #[inline]
    pub fn mark_busy(&mut self) {
        self.schedule.mark_busy(&mut self.channel.entry);
    }

    /// Schedules an acknowledgement to the peer, if one is owed.
    #[inline(always)]
    pub(super) fn schedule_ack(&mut self) {
        if !self.channel.owes_ack() {
            return;
        }
        if self.channel.may_defer_ack() {
            self.schedule.defer_ack(self.channel.entry.peer);
        } else {
            self.mark_busy();
        }
    }

    /// Queues an item in front of all others, unless the peer has failed.
    pub(super) fn enqueue_front(&mut self, item: Item<M>) {
        if self.channel.end.failed.is_some() {
            return;
        }
        self.channel.queue.push_front(item);
        self.mark_busy();
    }

    /// Queues an item behind all others, unless the peer has failed.
    #[inline]
    pub(super) fn enqueue(&mut self, item: Item<M>) {
        if self.channel.end.failed.is_some() {
            return;
        }
        self.channel.queue.push_back(item);
        self.mark_busy();
    }

    /// Records the time of the channel's next action with the schedule.
    pub(super) fn arm(&mut self) {
        if let Some(due) = self.channel.due() {
            self.schedule.arm(&mut self.channel.entry, due);
        }
    }

    /// Starts the timers after something was sent by a path that loses silently or carries
    /// datagrams.
    #[cold]
    pub(super) fn arm_probe_timeout(&mut self) {
        let is_watched = self.channel.entry.is_armed() && self.channel.timers.is_probing();
        if !is_watched || self.channel.paths.has_datagrams {
            self.channel.note_unacknowledged(self.schedule.now());
            self.arm();
        }
    }

    /// Processes acknowledgements of datagrams, if the channel has any.
    #[cold]
    pub(super) fn process_flow_acks(&mut self) {
        if self.channel.paths.has_datagrams {
            self.channel.process_acks(self.schedule.now());
            self.arm();
        }
    }

    /// Returns the credit of `bytes` bytes that the driver stores no more.
    pub(super) fn return_credit(&mut self, bytes: u64) {
        self.channel.granted_credit.release(bytes as u32);
        if self.channel.owes_ack() && self.channel.end.failed.is_none() {
            self.mark_busy();
        }
    }
}
