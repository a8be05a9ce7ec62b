//! Paths that have fallen silent.
//!
//! A connection whose bytes the other node's kernel does not confirm is suspected: the cable, the interface or the node is
//! gone, and TCP itself would go on trying for minutes. (A peer that only computes is no reason: its kernel confirms.)
//! While another path of the peer goes on it is first *doubted*: what it carried goes by that one, as far as it has not
//! arrived, and so does everything else, until something is confirmed again. That costs little if the doubt is wrong. A
//! little later it is given up, with another path at hand, and is dialled again until it heals. The only path is kept, and
//! another connection is tried beside it after a while: one that was cut for long sends again much later than a
//! new one would.

use std::io;
use std::time::{Duration, Instant};

use landbridge_drive::sys;

use super::Engine;
use super::handshake::Carrier;
use super::links::Link;
use crate::log;

/// Between two looks,
const CHECK_GAP: Duration = Duration::from_millis(20);
/// and when some link has been silent for so long.
const CHECK_GAP_SHORT: Duration = Duration::from_millis(5);
/// How long the only path may be silent before another is tried beside it.
const SOLE_PATH_TIMEOUT: Duration = Duration::from_secs(2);
/// Round trips beyond that, in which a confirmation may be on its way, lost and repeated.
const ROUND_TRIPS: u32 = 4;
/// The part of `suspect_after` after which a path is doubted: more than the 40 ms that TCP may wait with a confirmation.
const SUSPECT_SHARE: u32 = 2;

/// When the connections were looked at last.
pub struct LivenessCheck {
    last_check: Instant,
    gap: Duration,
}

impl LivenessCheck {
    pub fn new() -> Self {
        Self { last_check: Instant::now(), gap: CHECK_GAP }
    }
}

impl Link {
    /// Notes for how long the bytes on their way have not been confirmed. `None`: there are none, or it says nothing of the
    /// kind. Otherwise the round trip.
    fn update_liveness(&mut self) -> Option<Duration> {
        self.unacked_for = Duration::ZERO;
        let Carrier::Stream(stream) = &self.carrier else {
            return None;
        };
        if !self.has_sent && self.unacked_since.is_none() {
            return None;
        }
        let tcp_info = sys::tcp_info(stream.fd())?;
        if !(tcp_info.has_unacked || tcp_info.has_unsent) {
            (self.unacked_since, self.has_sent) = (None, false);
            return None;
        }
        // What was confirmed last may be long ago, because nothing was sent.
        let waiting = self.unacked_since.get_or_insert_with(Instant::now).elapsed();
        self.unacked_for = waiting.min(Duration::from_millis(tcp_info.unacked_millis));
        Some(Duration::from_micros(tcp_info.round_trip_micros as u64))
    }
}

impl Engine {
    /// Looks for connections that have fallen silent. To be called often.
    #[inline]
    pub(super) fn check_liveness(&mut self) {
        if (self.streams > 0 || self.datagrams.is_some())
            && self.liveness.last_check.elapsed() >= self.liveness.gap
        {
            self.update_liveness();
        }
    }

    #[cold]
    fn update_liveness(&mut self) {
        let gap = self.liveness.last_check.elapsed();
        self.liveness.last_check = Instant::now();
        if self.datagrams.is_some() {
            self.check_datagrams(gap);
        }
        self.liveness.gap = CHECK_GAP;
        let update = |link: &mut Option<Box<Link>>| link.as_mut()?.update_liveness();
        let found: Vec<_> = self.links.iter_mut().map(update).collect();
        for (id, round_trip) in found.into_iter().enumerate() {
            let Some(link) = self.links[id].as_ref() else {
                continue;
            };
            if link.unacked_for >= CHECK_GAP {
                self.liveness.gap = CHECK_GAP_SHORT;
                self.judge_liveness(id, round_trip.unwrap_or_default() * ROUND_TRIPS);
            } else if link.is_suspected || link.is_unresponsive {
                self.clear_suspicion(id);
            }
        }
    }

    /// Link `id` has healed by itself.
    #[cold]
    pub(super) fn clear_suspicion(&mut self, id: usize) {
        let Some(link) = self.links[id].as_mut() else {
            return;
        };
        let was_suspect = std::mem::take(&mut link.is_unresponsive);
        link.is_suspected = false;
        let (path, Some(peer)) = (link.path, link.peer) else {
            return;
        };
        if was_suspect {
            // Unless another path has been lost meanwhile.
            self.peer_states[peer.0 as usize].reconnect.take_if(|reconnect| !reconnect.has_lost);
        }
        self.core.suspect_path(peer, path, false);
    }

    fn judge_liveness(&mut self, id: usize, slack: Duration) {
        let Some(link) = self.links[id].as_ref() else {
            return;
        };
        let (unacked_for, ends) = (link.unacked_for, link.ends);
        let mut others = link.peer.into_iter().flat_map(|peer| {
            let open_paths = &self.peer_states[peer.0 as usize].open_paths;
            let links =
                open_paths.iter().filter_map(|open_path| self.links[open_path.link].as_ref());
            links.filter(|other| other.ends != ends)
        });
        let has_other = others.clone().any(|other| other.works());
        // With all of them silent it is the other node, or this one, that is busy.
        let goes_on = others.any(|other| other.works() && other.unacked_for < CHECK_GAP);
        let suspect_after = self.identity.suspect_after;
        let failover_after = (suspect_after / SUSPECT_SHARE).max(slack);
        let Some(link) = self.links[id].as_mut() else {
            return;
        };
        let late = || io::Error::new(io::ErrorKind::TimedOut, "nothing is confirmed any more");
        match link.peer {
            Some(peer) if has_other && unacked_for > suspect_after + slack => {
                // Another connection between the same two addresses shares its fate.
                self.link_down(id, &late());
                if let Some(duplicate) = self.duplicate_link(peer, ends) {
                    self.link_down(duplicate, &late());
                }
            }
            Some(_) if goes_on && !link.is_suspected && unacked_for >= failover_after => {
                self.suspect(id)
            }
            Some(peer)
                if !has_other
                    && unacked_for > SOLE_PATH_TIMEOUT + slack
                    && !link.is_unresponsive =>
            {
                link.is_unresponsive = true;
                self.begin_reconnect(peer, false);
            }
            None if unacked_for > SOLE_PATH_TIMEOUT + slack => self.link_down(id, &late()),
            _ => (),
        }
    }

    /// What link `id` carried goes by another, as far as it has not arrived.
    #[cold]
    fn suspect(&mut self, id: usize) {
        let Some(link) = self.links[id].as_mut() else {
            return;
        };
        let (path, Some(peer)) = (link.path, link.peer) else {
            return;
        };
        link.is_suspected = true;
        log!(Debug, "{}: a path is silent for {:?}", self.core.address(peer), link.unacked_for);
        if let Carrier::Stream(stream) = &mut link.carrier
            && link.holding.take_if(|holder| *holder == peer).is_some()
        {
            // The frame that it holds may arrive by another path, and its memory be given back.
            stream.copy_held();
            link.blocked.push_back(peer);
            self.core.handle_flushed(peer, path);
        }
        self.core.suspect_path(peer, path, true);
        self.drain_actions();
    }
}
