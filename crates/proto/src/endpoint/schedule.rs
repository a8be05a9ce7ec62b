//! When the driver must look at which peer: the peers with frames to send, the peers whose
//! acknowledgement waits for an answer of the application, and the times at which channels must be
//! handled.
//!
//! What enters: the current time, and the [`ScheduleEntry`] of a channel that changes. What leaves:
//! the next peer with frames to send, the peers whose time has come, and the time at which the
//! driver must wake up.
//!
//! What may never happen: a peer is in the queue of busy peers twice, or a channel has two wake-up
//! times.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::driver_interface::Peer;
use crate::path::time::Time;

/// The queues and times of all channels of one endpoint: see the module documentation.
pub struct PeerSchedule {
    now: Time,
    busy: VecDeque<Peer>,
    /// The peers whose acknowledgement waits for an answer of the application.
    deferred: Vec<Peer>,
    /// The time at which each channel must be handled: the time that the channel recorded, or an
    /// earlier one.
    wakes: BTreeSet<(Time, Peer)>,
    /// The number of channels that need the time.
    timed: usize,
}

/// What the schedule records about one channel. The channel holds its entry.
pub(super) struct ScheduleEntry {
    pub(super) peer: Peer,
    /// The peer is in the queue of busy peers.
    is_busy: bool,
    /// The time at which the endpoint handles the channel; never later than the earliest timer.
    wake: Option<Time>,
    /// The channel needs the time.
    is_timed: bool,
}

impl ScheduleEntry {
    /// The entry of a channel that has nothing to do.
    pub(super) fn new(peer: Peer) -> Self {
        Self { peer, is_busy: false, wake: None, is_timed: false }
    }

    /// Whether a time is recorded at which the channel is handled.
    pub(super) fn is_armed(&self) -> bool {
        self.wake.is_some()
    }

    /// Records that [`PeerSchedule::next_busy`] has returned the peer.
    #[inline]
    pub(super) fn handle_taken(&mut self) {
        self.is_busy = false;
    }

    /// Records that [`PeerSchedule::take_due`] has returned the peer.
    pub(super) fn handle_wake(&mut self) {
        self.wake = None;
    }
}

impl PeerSchedule {
    pub(super) fn new() -> Self {
        Self {
            now: Time(0),
            busy: VecDeque::new(),
            deferred: Vec::new(),
            wakes: BTreeSet::new(),
            timed: 0,
        }
    }

    #[inline]
    pub(super) fn now(&self) -> Time {
        self.now
    }

    #[inline]
    pub(super) fn set_time(&mut self, now: Time) {
        self.now = now;
    }

    /// Puts the peer into the queue of busy peers, unless it is there.
    #[inline]
    pub(super) fn mark_busy(&mut self, entry: &mut ScheduleEntry) {
        if !entry.is_busy {
            entry.is_busy = true;
            self.busy.push_back(entry.peer);
        }
    }

    /// The next peer of the queue of busy peers. [`ScheduleEntry::handle_taken`] must follow.
    #[inline]
    pub(super) fn next_busy(&mut self) -> Option<Peer> {
        self.busy.pop_front()
    }

    /// Lets the acknowledgement to `peer` wait for an answer of the application.
    #[inline]
    pub(super) fn defer_ack(&mut self, peer: Peer) {
        self.deferred.push(peer);
    }

    /// The next peer whose acknowledgement waits no longer.
    #[inline]
    pub(super) fn next_deferred(&mut self) -> Option<Peer> {
        self.deferred.pop()
    }

    /// Records whether the channel needs the time.
    pub(super) fn set_timed(&mut self, entry: &mut ScheduleEntry, is_timed: bool) {
        self.timed -= entry.is_timed as usize;
        self.timed += is_timed as usize;
        entry.is_timed = is_timed;
    }

    /// Whether the endpoint needs the time. If so, the driver must call
    /// [`Endpoint::set_time`](super::Endpoint::set_time) before it passes in or polls anything, and
    /// must not sleep beyond [`Self::next_wake`].
    pub fn needs_time(&self) -> bool {
        self.timed > 0
    }

    /// The time at which [`Endpoint::handle_time`](super::Endpoint::handle_time) has something to
    /// do, if there is one.
    #[inline]
    pub fn next_wake(&self) -> Option<Time> {
        self.wakes.first().map(|&(time, _)| time)
    }

    /// The number of wake-ups that are scheduled: at most one for each peer.
    pub fn armed_timers(&self) -> usize {
        self.wakes.len()
    }

    /// Removes and returns the peers whose time has come. [`ScheduleEntry::handle_wake`] must
    /// follow for each peer.
    pub(super) fn take_due(&mut self) -> impl Iterator<Item = Peer> + use<> {
        let later = self.wakes.split_off(&(self.now.after(1), Peer(0)));
        core::mem::replace(&mut self.wakes, later).into_iter().map(|(_, peer)| peer)
    }

    /// Records that the channel's next action is at time `due`.
    pub(super) fn arm(&mut self, entry: &mut ScheduleEntry, due: Time) {
        // Overdue actions happen in the next nanosecond.
        let due = due.max(self.now.after(1));
        if let Some(wake) = entry.wake {
            if wake <= due {
                return;
            }
            self.wakes.remove(&(wake, entry.peer));
        }
        entry.wake = Some(due);
        self.wakes.insert((due, entry.peer));
    }
}
