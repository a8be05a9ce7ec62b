//! Receives that wait for a peer which has left.
//!
//! Such a receive is no error: it may be meant to be cancelled, and a message that was sent before may be on its way. But whoever
//! waits for nothing else waits for ever. So it is said, once for each peer, when it has waited for a while.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use landbridge_proto::endpoint::Peer;

use super::Engine;
use crate::log;

/// Between two looks.
const CHECK_GAP: Duration = Duration::from_secs(1);
/// More than what is on its way takes, and less than a user's patience.
const WARN_AFTER: Duration = Duration::from_secs(5);

/// See the module head.
pub struct DepartedPeers {
    next: Instant,
    /// Since when somebody is waited for in vain; `None`: that was said.
    since: BTreeMap<Peer, Option<Instant>>,
}

impl DepartedPeers {
    pub fn new() -> Self {
        Self { next: Instant::now() + CHECK_GAP, since: BTreeMap::new() }
    }

    /// The peers of which it is time to say so. `awaited`: those that are waited for now.
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

impl Engine {
    /// To be called every few milliseconds.
    pub(super) fn check_departed_peers(&mut self) {
        let now = Instant::now();
        if now < self.departed_peers.next {
            return;
        }
        self.departed_peers.next = now + CHECK_GAP;
        let awaited: Vec<Peer> = self.core.awaited_departed_peers().collect();
        for peer in self.departed_peers.due(&awaited, now) {
            let (own, other) = (self.own.address, self.core.address(peer));
            log!(Warn, "{own} waits for a message of {other}, which has left");
        }
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
