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
const LOOK_GAP: Duration = Duration::from_millis(20);
/// and when some link has been silent for so long.
const LOOK_GAP_SHORT: Duration = Duration::from_millis(5);
/// How long the only path may be silent before another is tried beside it.
const LONELY_PATIENCE: Duration = Duration::from_secs(2);
/// Round trips beyond that, in which a confirmation may be on its way, lost and repeated.
const ROUND_TRIPS: u32 = 4;
/// The part of `suspect_after` after which a path is doubted: more than the 40 ms that TCP may wait with a confirmation.
const DOUBT_SHARE: u32 = 2;

/// When the connections were looked at last.
pub struct Silence {
    looked: Instant,
    gap: Duration,
}

impl Silence {
    pub fn new() -> Self {
        Self { looked: Instant::now(), gap: LOOK_GAP }
    }
}

impl Link {
    /// Notes for how long the bytes on their way have not been confirmed. `None`: there are none, or it says nothing of the
    /// kind. Otherwise the round trip.
    fn look_for_silence(&mut self) -> Option<Duration> {
        self.silent = Duration::ZERO;
        let Carrier::Stream(stream) = &self.carrier else {
            return None;
        };
        if !self.has_sent && self.waits_since.is_none() {
            return None;
        }
        let state = sys::silence(stream.fd())?;
        if !(state.is_awaited || state.is_stuck) {
            (self.waits_since, self.has_sent) = (None, false);
            return None;
        }
        // What was confirmed last may be long ago, because nothing was sent.
        let waits = self.waits_since.get_or_insert_with(Instant::now).elapsed();
        self.silent = waits.min(Duration::from_millis(state.unconfirmed_millis));
        Some(Duration::from_micros(state.round_trip_micros as u64))
    }
}

impl Engine {
    /// Looks for connections that have fallen silent. To be called often.
    #[inline]
    pub(super) fn check_silence(&mut self) {
        if (self.streams > 0 || self.datagrams.is_some())
            && self.silence.looked.elapsed() >= self.silence.gap
        {
            self.look_for_silence();
        }
    }

    #[cold]
    fn look_for_silence(&mut self) {
        let gap = self.silence.looked.elapsed();
        self.silence.looked = Instant::now();
        if self.datagrams.is_some() {
            self.check_datagrams(gap);
        }
        self.silence.gap = LOOK_GAP;
        let look = |link: &mut Option<Box<Link>>| link.as_mut()?.look_for_silence();
        let found: Vec<_> = self.links.iter_mut().map(look).collect();
        for (id, round_trip) in found.into_iter().enumerate() {
            let Some(link) = self.links[id].as_ref() else {
                continue;
            };
            if link.silent >= LOOK_GAP {
                self.silence.gap = LOOK_GAP_SHORT;
                self.judge_silence(id, round_trip.unwrap_or_default() * ROUND_TRIPS);
            } else if link.is_doubted || link.is_suspect {
                self.trust_again(id);
            }
        }
    }

    /// Link `id` has healed by itself.
    #[cold]
    pub(super) fn trust_again(&mut self, id: usize) {
        let Some(link) = self.links[id].as_mut() else {
            return;
        };
        let was_suspect = std::mem::take(&mut link.is_suspect);
        link.is_doubted = false;
        let (path, Some(peer)) = (link.path, link.peer) else {
            return;
        };
        if was_suspect {
            // Unless another path has been lost meanwhile.
            self.neighbours[peer.0 as usize].repair.take_if(|repair| !repair.has_lost);
        }
        self.core.doubt_path(peer, path, false);
    }

    fn judge_silence(&mut self, id: usize, slack: Duration) {
        let Some(link) = self.links[id].as_ref() else {
            return;
        };
        let (silent, ends) = (link.silent, link.ends);
        let mut others = link.peer.into_iter().flat_map(|peer| {
            let routes = &self.neighbours[peer.0 as usize].routes;
            let links = routes.iter().filter_map(|route| self.links[route.link].as_ref());
            links.filter(|other| other.ends != ends)
        });
        let has_other = others.clone().any(|other| other.works());
        // With all of them silent it is the other node, or this one, that is busy.
        let goes_on = others.any(|other| other.works() && other.silent < LOOK_GAP);
        let suspect_after = self.identity.suspect_after;
        let doubt_after = (suspect_after / DOUBT_SHARE).max(slack);
        let Some(link) = self.links[id].as_mut() else {
            return;
        };
        let late = || io::Error::new(io::ErrorKind::TimedOut, "nothing is confirmed any more");
        match link.peer {
            Some(peer) if has_other && silent > suspect_after + slack => {
                // Another connection between the same two addresses shares its fate.
                self.link_down(id, &late());
                if let Some(twin) = self.twin(peer, ends) {
                    self.link_down(twin, &late());
                }
            }
            Some(_) if goes_on && !link.is_doubted && silent >= doubt_after => self.doubt(id),
            Some(peer) if !has_other && silent > LONELY_PATIENCE + slack && !link.is_suspect => {
                link.is_suspect = true;
                self.begin_repair(peer, false);
            }
            None if silent > LONELY_PATIENCE + slack => self.link_down(id, &late()),
            _ => (),
        }
    }

    /// What link `id` carried goes by another, as far as it has not arrived.
    #[cold]
    fn doubt(&mut self, id: usize) {
        let Some(link) = self.links[id].as_mut() else {
            return;
        };
        let (path, Some(peer)) = (link.path, link.peer) else {
            return;
        };
        link.is_doubted = true;
        log!(Debug, "{}: a path is silent for {:?}", self.core.address(peer), link.silent);
        if let Carrier::Stream(stream) = &mut link.carrier
            && link.holding.take_if(|holder| *holder == peer).is_some()
        {
            // The frame that it holds may arrive by another path, and its memory be given back.
            stream.own_held();
            link.blocked.push_back(peer);
            self.core.handle_flushed(peer, path);
        }
        self.core.doubt_path(peer, path, true);
        self.drain_actions();
    }
}
