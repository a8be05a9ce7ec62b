//! Detects paths without confirmations.
//!
//! A connection whose bytes the other node's kernel does not confirm may have lost its cable, its
//! interface or its other node; TCP itself would retry for minutes. A peer that only computes is
//! not affected: its kernel confirms. While another path of the peer works, the silent path is
//! first *suspected*: the bytes that it carried are retransmitted over the other path, as far as
//! they have not arrived, and all new frames use the other path, until the silent path confirms
//! something. A wrong suspicion costs little. A little later the silent path is closed, if another
//! path works, and is dialled until it recovers. The only path of a peer is kept, and after
//! [`SOLE_PATH_TIMEOUT`] another connection is dialled in addition: a connection that was
//! interrupted for long retransmits much later than a new connection would.

use std::io;
use std::time::{Duration, Instant};

use landbridge_drive::sys;

use super::Engine;
use super::handshake::Carrier;
use super::links::Link;
use crate::log;

/// Usual time between two checks.
const CHECK_GAP: Duration = Duration::from_millis(20);
/// Time between two checks while some link has no confirmations.
const CHECK_GAP_SHORT: Duration = Duration::from_millis(5);
/// Time without confirmation after which another connection is dialled in addition to the only
/// path.
const SOLE_PATH_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of round trips added to each limit, in which a confirmation may be lost and repeated.
const ROUND_TRIPS: u32 = 4;
/// Divisor of `suspect_after`: a path is suspected after this part of the time. The default leaves
/// more than the 40 ms for which TCP may delay a confirmation.
const SUSPECT_SHARE: u32 = 2;

/// State of the regular check of connections.
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
    /// Updates the time for which bytes in flight have not been confirmed. Returns the round trip
    /// time, or `None` if no bytes are in flight or the link is not a stream.
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
        // The last confirmation may be long ago because nothing was sent.
        let waiting = self.unacked_since.get_or_insert_with(Instant::now).elapsed();
        self.unacked_for = waiting.min(Duration::from_millis(tcp_info.unacked_millis));
        Some(Duration::from_micros(tcp_info.round_trip_micros as u64))
    }
}

impl Engine {
    /// Checks the connections when a check is due. The engine calls this often.
    #[inline]
    pub(super) fn check_liveness(&mut self) {
        if (self.links.streams > 0 || self.datagrams.is_some())
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

    /// Ends the suspicion of link `id`, which works again.
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
            // The reconnect continues if another path has been lost meanwhile.
            self.peers[peer].reconnect.take_if(|reconnect| !reconnect.has_lost);
        }
        self.core.channel_mut(peer).suspect_path(path, false);
    }

    fn judge_liveness(&mut self, id: usize, slack: Duration) {
        let Some(link) = self.links[id].as_ref() else {
            return;
        };
        let (unacked_for, ends) = (link.unacked_for, link.ends);
        let mut others = link.peer.into_iter().flat_map(|peer| {
            let open_paths = &self.peers[peer].open_paths;
            let links =
                open_paths.iter().filter_map(|open_path| self.links[open_path.link].as_ref());
            links.filter(|other| other.ends != ends)
        });
        let has_other = others.clone().any(|other| other.works());
        // If all paths are silent, the other node or this node is busy.
        let goes_on = others.any(|other| other.works() && other.unacked_for < CHECK_GAP);
        let suspect_after = self.identity.suspect_after;
        let failover_after = (suspect_after / SUSPECT_SHARE).max(slack);
        let Some(link) = self.links[id].as_mut() else {
            return;
        };
        let late = || io::Error::new(io::ErrorKind::TimedOut, "nothing is confirmed any more");
        match link.peer {
            Some(peer) if has_other && unacked_for > suspect_after + slack => {
                // Another connection between the same two addresses fails for the same reason.
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

    /// Suspects link `id`: the bytes that the link carried are retransmitted over another path, as
    /// far as they have not arrived.
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
            // The held frame may arrive over another path, and its memory may then be released.
            stream.copy_held();
            link.blocked.push_back(peer);
            self.core.handle_flushed(peer, path);
        }
        self.core.channel_mut(peer).suspect_path(path, true);
        self.drain_actions();
    }
}
