//! Paths that may have died, though nobody has said so, and those that are known to live.
//!
//! What enters: by which path each frame comes, and what the driver hears, or does not, from those by which it sends. What
//! leaves: by which path questions, answers and confirmations go.
//!
//! What may never happen: with every path in doubt nothing goes out.

use super::channel::Channel;
use super::{Endpoint, Memory, Peer};
use crate::channel::PathId;
use crate::path::rate::DeliveryRate;

impl<M: Clone> Channel<M> {
    /// A frame comes by this path. Whether what waits to be said may go out now and could not before.
    #[inline]
    pub fn note_heard_by(&mut self, path: PathId) -> bool {
        let is_new = self.last_heard_by != path;
        self.last_heard_by = path;
        is_new && self.has_choice() && (self.owes_ack() || !self.has_nothing_to_repair())
    }

    /// Whether signals go out by this path: the one by which the peer was heard last, if frames go out by it. So no
    /// confirmation takes a path that may have died. (An answer takes the path of its question.)
    #[inline]
    pub fn sends_control_by(&self, path: PathId) -> bool {
        !self.has_choice() || self.last_heard_by == path || !self.sends_by(self.last_heard_by)
    }
}

impl<M: Memory> Endpoint<M> {
    /// Nothing that `path` carries is confirmed although other paths go on: what it carried may be lost, and nothing goes out
    /// by it while there is another, until it is heard that it has healed (`is_suspected` is false).
    pub fn suspect_path(&mut self, peer: Peer, path: PathId, is_suspected: bool) {
        let channel = &mut self.channels[peer.0 as usize];
        let state = channel.paths.get_mut(path.0 as usize);
        let Some(state) = state.filter(|state| state.is_up && state.is_suspected != is_suspected)
        else {
            return;
        };
        state.is_suspected = is_suspected;
        // What was measured before says nothing, and what it had under way goes by others.
        state.rate = DeliveryRate::new();
        self.count_senders(peer);
        if is_suspected {
            self.presume_path_lost(peer, path);
        }
        self.mark_busy(peer);
    }
}
