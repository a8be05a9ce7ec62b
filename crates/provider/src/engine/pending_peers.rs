//! Peers for which something is to be done once the link that is being read is back in its table.
//!
//! What enters: failures of peers, and further addresses of peers, that are found while a link is
//! being read. What leaves: the peers to be given up, the peers whose relay paths are to be closed,
//! and whether addresses are to be dialled. What may never happen: a link is closed or dialled
//! while a link is being read.

use landbridge_proto::endpoint::{Endpoint, Peer};

use super::memory::Bytes;
use super::peer_table::PeerTable;
use crate::log;

#[derive(Default)]
pub struct PendingPeers {
    /// Peers to be failed, with the errno.
    failed: Vec<(Peer, i32)>,
    /// Peers that the relay cannot reach any more; their relay paths are closed.
    dropped: Vec<Peer>,
    /// Peers have advertised further addresses that are to be dialled.
    pub has_new_rails: bool,
}

impl PendingPeers {
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.failed.is_empty() && self.dropped.is_empty() && !self.has_new_rails
    }

    /// Notes that `peer` is to be given up.
    pub fn fail(&mut self, peer: Peer, errno: i32) {
        self.failed.push((peer, errno));
    }

    /// Takes the peers to be given up, with the errno.
    pub fn take_failed(&mut self) -> Vec<(Peer, i32)> {
        std::mem::take(&mut self.failed)
    }

    /// Takes the peers whose relay paths are to be closed.
    pub fn take_dropped(&mut self) -> Vec<Peer> {
        std::mem::take(&mut self.dropped)
    }

    /// Handles the relay's report that a frame could not be delivered. For a peer that has left in
    /// good order the frame was the last confirmation, which no process needs any more.
    #[cold]
    pub fn handle_unreachable(&mut self, core: &Endpoint<Bytes>, peers: &PeerTable, peer: Peer) {
        let peer_state = &peers[peer];
        let has_hope = peer_state.reconnect.is_some() || peer_state.open_paths.len() > 1;
        if has_hope && !core.channel(peer).has_left() {
            // The peer may have lost its relay, or this process; direct paths are being dialled.
            log!(Info, "the relay cannot reach {}", core.address(peer));
            return self.dropped.push(peer);
        }
        if !core.channel(peer).has_left() {
            log!(Warn, "the relay cannot reach {}", core.address(peer));
        }
        self.failed.push((peer, libc::EHOSTUNREACH));
    }
}
