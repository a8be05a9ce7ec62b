//! Paths that have fallen silent.
//!
//! A connection whose bytes the other node's kernel does not confirm is suspected: the cable, the interface or the node is
//! gone, and TCP itself would go on trying for minutes. (A peer that only computes is no reason: its kernel confirms.)
//! With another path at hand it is given up at once, which moves what it carried to that one, and is dialled again until it
//! heals. The only path is kept, and another connection is tried beside it after a while: one that was cut for long
//! sends again much later than a new one would.

use std::io;
use std::time::{Duration, Instant};

use landbridge_drive::sys;

use super::Engine;
use super::handshake::Carrier;

/// Between two looks.
const LOOK_GAP: Duration = Duration::from_millis(20);
/// How long the only path may be silent before another is tried beside it.
const LONELY_PATIENCE: Duration = Duration::from_secs(2);
/// Round trips beyond that, in which a confirmation may be on its way, lost and repeated.
const ROUND_TRIPS: u32 = 4;

/// When the connections were looked at last.
pub struct Silence {
    looked: Instant,
}

impl Silence {
    pub fn new() -> Self {
        Self { looked: Instant::now() }
    }
}

impl Engine {
    /// Looks for connections that have fallen silent. To be called often.
    #[inline]
    pub(super) fn check_silence(&mut self) {
        if (self.streams > 0 || self.datagrams.is_some())
            && self.silence.looked.elapsed() >= LOOK_GAP
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
        for id in 0..self.links.len() {
            if let Some(silent) = self.silence_of(id, gap) {
                self.judge_silence(id, silent);
            }
        }
    }

    /// For how long the bytes on their way by link `id` have not been confirmed, and its round trip.
    fn silence_of(&mut self, id: usize, gap: Duration) -> Option<(Duration, Duration)> {
        let link = self.links[id].as_mut()?;
        let Carrier::Stream(stream) = &link.carrier else {
            return None;
        };
        if !link.has_sent && link.silent_since.is_none() {
            return None;
        }
        let state = sys::silence(stream.fd())?;
        let is_waiting = state.is_awaited || state.is_stuck;
        if !is_waiting || Duration::from_millis(state.unconfirmed_millis) <= gap {
            (link.silent_since, link.has_sent) = (None, is_waiting);
            if let (true, Some(peer)) = (std::mem::take(&mut link.is_suspect), link.peer) {
                // It has healed by itself.
                self.neighbours[peer.0 as usize].repair = None;
            }
            return None;
        }
        let since = link.silent_since.get_or_insert_with(Instant::now);
        Some((since.elapsed(), Duration::from_micros(state.round_trip_micros as u64)))
    }

    fn judge_silence(&mut self, id: usize, (silent, round_trip): (Duration, Duration)) {
        let Some(link) = self.links[id].as_ref() else {
            return;
        };
        let ends = link.ends;
        let has_other = link.peer.is_some_and(|peer| {
            let routes = &self.neighbours[peer.0 as usize].routes;
            let is_other = |id: usize| self.links[id].as_ref().is_some_and(|l| l.ends != ends);
            routes.iter().any(|route| is_other(route.link))
        });
        let Some(link) = self.links[id].as_mut() else {
            return;
        };
        let slack = round_trip * ROUND_TRIPS;
        let late = || io::Error::new(io::ErrorKind::TimedOut, "nothing is confirmed any more");
        match link.peer {
            Some(peer) if has_other && silent > self.identity.suspect_after + slack => {
                // Another connection between the same two addresses shares its fate.
                self.link_down(id, &late());
                if let Some(twin) = self.twin(peer, ends) {
                    self.link_down(twin, &late());
                }
            }
            Some(peer) if !has_other && silent > LONELY_PATIENCE + slack && !link.is_suspect => {
                link.is_suspect = true;
                self.begin_repair(peer);
            }
            None if silent > LONELY_PATIENCE + slack => self.link_down(id, &late()),
            _ => (),
        }
    }
}
