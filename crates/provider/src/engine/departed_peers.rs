//! Warns about receives that wait for a peer which has left.
//!
//! Such a receive is no error: the program may intend to cancel the receive, and an earlier message
//! of the peer may still be under way. But a program that waits for this receive alone waits for
//! ever. So a log line warns once for each peer, after the receive has waited for [`WARN_AFTER`].

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use landbridge_proto::endpoint::{Endpoint, Peer};
use landbridge_proto::id::Address;

use super::memory::Bytes;
use crate::log;

/// Time between two checks.
const CHECK_GAP: Duration = Duration::from_secs(1);
/// Longer than a message in flight takes, and shorter than a user's patience.
const WARN_AFTER: Duration = Duration::from_secs(5);

/// The peers that have left and are still awaited.
pub struct DepartedPeers {
    next: Instant,
    /// Time since when a receive waits for the peer; `None` after the warning.
    since: BTreeMap<Peer, Option<Instant>>,
}

impl DepartedPeers {
    pub fn new() -> Self {
        Self { next: Instant::now() + CHECK_GAP, since: BTreeMap::new() }
    }

    /// Warns when it is time. The engine calls this every few milliseconds.
    pub fn check(&mut self, core: &Endpoint<Bytes>, own: Address) {
        let now = Instant::now();
        if now < self.next {
            return;
        }
        self.next = now + CHECK_GAP;
        let awaited: Vec<Peer> = core.awaited_departed_peers().collect();
        for peer in self.due(&awaited, now) {
            let other = core.address(peer);
            log!(Warn, "{own} waits for a message of {other}, which has left");
        }
    }

    /// The peers for which a warning is due. `awaited`: peers that receives wait for now.
    fn due(&mut self, awaited: &[Peer], now: Instant) -> Vec<Peer> {
        self.since.retain(|peer, since| since.is_none() || awaited.contains(peer));
        for &peer in awaited {
            self.since.entry(peer).or_insert(Some(now));
        }
        let is_due = |since: &mut Instant| now.saturating_duration_since(*since) >= WARN_AFTER;
        let waits = self.since.iter_mut();
        waits.filter_map(|(peer, since)| since.take_if(is_due).map(|_| *peer)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_once_when_somebody_has_waited_for_long() {
        let start = Instant::now();
        let mut departed_peers = DepartedPeers::new();
        let mut due = |awaited: &[u32], seconds| {
            let awaited: Vec<Peer> = awaited.iter().copied().map(Peer).collect();
            let due = departed_peers.due(&awaited, start + Duration::from_secs(seconds));
            due.into_iter().map(|peer| peer.0).collect::<Vec<_>>()
        };
        assert_eq!(due(&[4, 4, 7], 0), []);
        assert_eq!(due(&[4], 4), [], "7 is waited for no more");
        assert_eq!(due(&[4, 7], 6), [4]);
        assert_eq!(due(&[4, 7], 10), []);
        assert_eq!(due(&[4, 7], 11), [7]);
        assert_eq!(due(&[], 12), []);
        assert_eq!(due(&[4, 7], 99), [], "it has been said");
    }
}
