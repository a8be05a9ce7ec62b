//! Checks all connections for silence, and does what follows.
//!
//! What enters: the time, and the confirmations of the kernel. What leaves: paths that are
//! suspected, closed or dialled again, as [`LivenessVerdict`] says.

use std::io;

use super::connections::Connections;
use super::links::Link;
use super::liveness::LivenessVerdict;

impl Connections {
    /// Checks the connections when a check is due. The engine calls this often.
    #[inline]
    pub(super) fn check_liveness(&mut self) {
        if (self.data.links.streams > 0 || self.data.datagrams.is_some()) && self.liveness.is_due()
        {
            self.update_liveness();
        }
    }

    #[cold]
    fn update_liveness(&mut self) {
        let since_last = self.liveness.begin();
        if self.data.datagrams.is_some() {
            self.check_datagrams(since_last);
        }
        let update = |link: &mut Option<Box<Link>>| link.as_mut()?.update_health();
        let found: Vec<_> = self.data.links.iter_mut().map(update).collect();
        for (id, round_trip) in found.into_iter().enumerate() {
            let Some(link) = self.data.links[id].as_ref() else {
                continue;
            };
            if self.liveness.is_silent(link.health.unacked_for) {
                let verdict = self.data.paths().judge(id, round_trip);
                self.apply_verdict(id, verdict);
            } else if link.health.is_suspected || link.health.is_unresponsive {
                self.data.paths().clear_suspicion(id);
            }
        }
    }

    fn apply_verdict(&mut self, id: usize, verdict: LivenessVerdict) {
        let Some(link) = self.data.links[id].as_ref() else {
            return;
        };
        let (peer, ends) = (link.peer, link.ends);
        let late = || io::Error::new(io::ErrorKind::TimedOut, "acknowledgements have stopped");
        match verdict {
            LivenessVerdict::Nothing => (),
            LivenessVerdict::Close => {
                self.link_down(id, &late());
                // Another connection between the same two addresses fails for the same reason.
                if let Some(peer) = peer
                    && let Some(duplicate) = self.data.paths().duplicate_link(peer, ends)
                {
                    self.link_down(duplicate, &late());
                }
            }
            LivenessVerdict::Suspect => {
                self.data.paths().suspect(id);
                self.data.drain_actions();
            }
            LivenessVerdict::DialBeside(peer) => self.begin_reconnect(peer, false),
        }
    }
}
