//! The end of links and of peers.
//!
//! What enters: links that have ended or failed, and peers that are given up. What leaves: paths to
//! be repaired, operations that fail, and memory that belongs to the application again. What may
//! never happen: a link touches memory of an operation that has ended.

use std::io;

use landbridge_proto::endpoint::Peer;

use super::carrier::Carrier;
use super::connections::Connections;
use super::data_path::DataPath;
use super::integrity;
use super::links::Link;
use super::peer_state::SendState;
use crate::log;

impl Connections {
    /// Does what had to wait while a link was being read: dials further addresses of peers, and
    /// gives up the peers whose failure was found.
    #[cold]
    pub(super) fn handle_pending(&mut self) {
        if std::mem::take(&mut self.data.pending.has_new_rails) {
            self.check_rails();
        }
        for peer in self.data.pending.take_dropped() {
            self.drop_relay_path(peer);
        }
        for (peer, errno) in self.data.pending.take_failed() {
            self.fail_peer(peer, errno);
        }
    }

    /// Gives up `peer`: its operations end, and their memory belongs to the application again, so
    /// no link may touch this memory any more. Links to the peer alone are closed. The relay's
    /// link, which other peers use too, copies the rest of a frame that it has begun to send. If a
    /// payload from the peer is arriving on the relay's link, the operations end only after the
    /// rest of this payload.
    #[cold]
    pub(super) fn fail_peer(&mut self, peer: Peer, errno: i32) {
        self.data.paths().finish_all_statistics(peer);
        let peer_state = &mut self.data.peers[peer];
        (peer_state.send_state, peer_state.reconnect) = (SendState::Closed, None);
        peer_state.open_paths.clear();
        let mut is_payload_arriving = false;
        for id in 0..self.data.links.len() {
            let Some(link) = self.data.links[id].as_mut() else {
                continue;
            };
            if link.peer == Some(peer) {
                self.data.close_link(id);
                continue;
            }
            if let Carrier::Stream(stream) = &mut link.carrier
                && link.holding == Some(peer)
            {
                stream.copy_held();
            }
            if link.inside.is_some_and(|(from, _)| from == peer) {
                link.fail_after_payload = Some(errno);
                is_payload_arriving = true;
            }
        }
        if let Some(datagrams) = &mut self.data.datagrams {
            datagrams.forget_tokens(peer);
        }
        if is_payload_arriving {
            return;
        }
        self.data.core.fail(peer, errno);
        self.data.buffers.early.retain(|&(of, _), _| of != peer);
        self.data.drain_actions();
    }

    /// Handles the end or failure of link `id`.
    #[cold]
    pub(super) fn link_down(&mut self, id: usize, error: &io::Error) {
        if self.uplink.link() == Some(id)
            && let Some(mut recorded) = self.recorded_uplink()
        {
            recorded.end_if_refused();
        }
        let Some(mut link) = self.data.close_link(id) else {
            return;
        };
        let Some(peer) = link.peer else {
            log!(Warn, "the connection to the relay is lost: {error}");
            let (fail_after_payload, inside) = (link.fail_after_payload.take(), link.inside.take());
            if let (Some(errno), Some((peer, _))) = (fail_after_payload, inside) {
                self.fail_peer(peer, errno);
            }
            return self.relay_lost(id, &link, integrity::was_corrupt(error));
        };
        // The end of a shared-memory link is the end of a process, and a peer that has broken the
        // protocol would break it again.
        let is_final = matches!(link.carrier, Carrier::Shm(_) | Carrier::Loopback)
            || error.kind() == io::ErrorKind::InvalidData;
        let ends = link.ends;
        if integrity::was_corrupt(error) {
            self.data.peers[peer].count_corrupt(link.path);
        }
        let is_lost = !self.data.core.channel(peer).has_left();
        self.data.paths().finish_statistics(peer, link.path, &link, is_lost);
        drop(link);
        let address = self.data.core.address(peer);
        if error.kind() == io::ErrorKind::InvalidData {
            self.data.core.channel_mut(peer).revoke_goodbye();
        }
        if !is_final && !self.data.core.channel(peer).has_left() {
            return self.lose_path(peer, id, ends, error);
        }
        self.drain_links_of(peer);
        if self.data.core.channel(peer).has_left() {
            log!(Debug, "{address} has left");
        } else {
            log!(Warn, "the connection to {address} is lost: {error}");
        }
        self.fail_peer(peer, libc::ECONNRESET);
    }

    /// Receives what the other links of `peer` have brought. When both sides have dialled there are
    /// two links, and the peer's frames on one of them may answer frames on the other.
    fn drain_links_of(&mut self, peer: Peer) {
        for id in 0..self.data.links.len() {
            if self.data.links[id].as_ref().is_some_and(|link| link.peer == Some(peer)) {
                while self.read_ring(id) > 0 {}
                while self.read_stream(id) > 0 {}
            }
        }
    }
}

impl DataPath {
    /// Takes link `id` out of use.
    pub(super) fn close_link(&mut self, id: usize) -> Option<Box<Link>> {
        let link = self.links.remove(id)?;
        if let Carrier::Datagram(udp_path) = &link.carrier {
            self.datagrams.iter_mut().for_each(|all| all.forget_udp_path(id, udp_path));
        }
        Some(link)
    }
}
