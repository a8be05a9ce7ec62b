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

use std::time::{Duration, Instant};

use landbridge_proto::endpoint::Peer;

use super::path_manager::PathManager;

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

    #[inline]
    pub fn is_due(&self) -> bool {
        self.last_check.elapsed() >= self.gap
    }

    /// Begins a check; returns the time since the last one.
    pub fn begin(&mut self) -> Duration {
        let since_last = self.last_check.elapsed();
        (self.last_check, self.gap) = (Instant::now(), CHECK_GAP);
        since_last
    }

    /// Whether a link is to be judged whose bytes have not been confirmed for this time. The next
    /// check then follows sooner.
    pub fn is_silent(&mut self, unacked_for: Duration) -> bool {
        let is_silent = unacked_for >= CHECK_GAP;
        if is_silent {
            self.gap = CHECK_GAP_SHORT;
        }
        is_silent
    }
}

/// What follows from the silence of a link.
pub enum LivenessVerdict {
    Nothing,
    /// The link is closed, and with it another connection of the peer between the same addresses.
    Close,
    /// The link is suspected, and other paths are used.
    Suspect,
    /// Another connection to the peer is dialled in addition.
    DialBeside(Peer),
}

impl PathManager<'_> {
    /// Judges link `id`, whose bytes have not been confirmed for some time. Each limit is longer by
    /// some round trips.
    pub fn judge(&mut self, id: usize, round_trip: Option<Duration>) -> LivenessVerdict {
        let slack = round_trip.unwrap_or_default() * ROUND_TRIPS;
        let Some(link) = self.links[id].as_ref() else {
            return LivenessVerdict::Nothing;
        };
        let (unacked_for, ends) = (link.health.unacked_for, link.ends);
        let mut others = link.peer.into_iter().flat_map(|peer| {
            let open_paths = &self.peers[peer].open_paths;
            let links =
                open_paths.iter().filter_map(|open_path| self.links[open_path.link].as_ref());
            links.filter(|other| other.ends != ends)
        });
        let has_other = others.clone().any(|other| other.works());
        // If all paths are silent, the other node or this node is busy.
        let goes_on = others.any(|other| other.works() && other.health.unacked_for < CHECK_GAP);
        let suspect_after = self.identity.settings.suspect_after;
        let failover_after = (suspect_after / SUSPECT_SHARE).max(slack);
        let Some(link) = self.links[id].as_mut() else {
            return LivenessVerdict::Nothing;
        };
        match link.peer {
            Some(_) if has_other && unacked_for > suspect_after + slack => LivenessVerdict::Close,
            Some(_) if goes_on && !link.health.is_suspected && unacked_for >= failover_after => {
                LivenessVerdict::Suspect
            }
            Some(peer)
                if !has_other
                    && unacked_for > SOLE_PATH_TIMEOUT + slack
                    && !link.health.is_unresponsive =>
            {
                link.health.is_unresponsive = true;
                LivenessVerdict::DialBeside(peer)
            }
            None if unacked_for > SOLE_PATH_TIMEOUT + slack => LivenessVerdict::Close,
            _ => LivenessVerdict::Nothing,
        }
    }
}
