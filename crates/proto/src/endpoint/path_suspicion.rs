//! Paths that may have died without a report, and paths that are known to work.
//!
//! What enters: the path by which each frame arrives, and the driver's judgement of the paths by
//! which it sends. What leaves: the path that status requests, answers and acknowledgements take.
//!
//! What may never happen: nothing is sent because every path is suspected.

use super::channel::Channel;
use super::{Endpoint, Memory, Peer};
use crate::channel::PathId;
use crate::path::rate::DeliveryRate;

impl<M: Clone> Channel<M> {
    /// Records that a frame arrives by `path`. Returns whether a waiting control frame or
    /// acknowledgement may be sent now and could not be sent before.
    #[inline]
    pub fn note_heard_by(&mut self, path: PathId) -> bool {
        let is_new = self.paths.last_heard_by != path;
        self.paths.last_heard_by = path;
        is_new && self.paths.has_choice() && (self.owes_ack() || !self.has_nothing_to_repair())
    }

    /// Whether control frames and acknowledgements are sent by this path: the path by which the
    /// peer was heard last, if frames are sent by that path. So no acknowledgement takes a path
    /// that may have died. (An answer takes the path of its status request.)
    #[inline]
    pub fn sends_control_by(&self, path: PathId) -> bool {
        !self.paths.has_choice()
            || self.paths.last_heard_by == path
            || !self.paths.sends_by(self.paths.last_heard_by)
    }
}

impl<M: Memory> Endpoint<M> {
    /// Sets whether `path` is suspected. The driver suspects a path on which nothing is confirmed
    /// although other paths go on. What a suspected path carried may be lost, and nothing is sent
    /// by it while there is another path, until the driver reports that it works again
    /// (`is_suspected` is false).
    pub fn suspect_path(&mut self, peer: Peer, path: PathId, is_suspected: bool) {
        let channel = &mut self.channels[peer.0 as usize];
        let state = channel.paths.get_mut(path.0 as usize);
        let Some(state) = state.filter(|state| state.is_up && state.is_suspected != is_suspected)
        else {
            return;
        };
        state.is_suspected = is_suspected;
        // Earlier measurements of the rate no longer hold, and what was in flight on this path is
        // sent by others.
        state.rate = DeliveryRate::new();
        self.count_senders(peer);
        if is_suspected {
            self.presume_path_lost(peer, path);
        }
        self.mark_busy(peer);
    }
}
