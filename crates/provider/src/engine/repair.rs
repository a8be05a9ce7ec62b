//! Executes the repair of broken paths: closes them, dials them again, and gives peers up.
//!
//! What enters: paths that are lost or silent, and the time. What leaves: rounds of dials, and
//! peers that are given up, as [`Reconnect`](super::reconnect::Reconnect) decides. What may never
//! happen: a reconnect is under way that no check continues.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use landbridge_proto::endpoint::Peer;
use landbridge_proto::path::time::Time;

use super::connections::Connections;
use super::links::{Link, RELAY_PATH};
use super::peer_state::{OpenPath, SendState};
use crate::log;

/// Age from which on an open connection is not the result of a simultaneous dial. A newer
/// connection between the same two addresses then shows that the older connection is broken.
const DUPLICATE_AGE_MAX: Duration = Duration::from_secs(2);

impl Connections {
    /// Closes the path of `peer` over link `id`, which joined the addresses `ends`, after an error
    /// that need not be final. The engine dials the path again, unless another connection joins the
    /// same addresses.
    #[cold]
    pub(super) fn lose_path(
        &mut self,
        peer: Peer,
        id: usize,
        ends: Option<(IpAddr, IpAddr)>,
        error: &io::Error,
    ) {
        if !self.data.paths().remove_path(peer, id, error) {
            return;
        }
        self.data.drain_actions();
        let is_rail = self.data.peers.rails.handle_lost(peer, ends, id);
        let paths = self.data.paths();
        let is_needed = paths.duplicate_link(peer, ends).is_none() && !is_rail;
        // UDP paths alone do not show that a peer has ended.
        if is_needed || !paths.has_connection(peer) {
            self.begin_reconnect(peer, true);
        }
    }

    /// Closes the path of `peer` through the relay, which cannot reach `peer` at the moment.
    pub(super) fn drop_relay_path(&mut self, peer: Peer) {
        let open_paths = &self.data.peers[peer].open_paths;
        let through_relay = open_paths.iter().find(|open_path| open_path.path == RELAY_PATH);
        if let Some(OpenPath { link, path }) = through_relay.copied() {
            self.data.paths().leave_relay_link(peer, link, path);
            let why =
                io::Error::new(io::ErrorKind::NetworkUnreachable, "the relay cannot reach it");
            self.lose_path(peer, link, None, &why);
        }
    }

    pub(super) fn begin_reconnect(&mut self, peer: Peer, has_lost: bool) {
        if self.data.peers.begin_reconnect(peer, has_lost) {
            self.redial(peer);
        }
    }

    fn redial(&mut self, peer: Peer) {
        let peer_state = &mut self.data.peers[peer];
        peer_state.candidates = None;
        if let Some(reconnect) = &mut peer_state.reconnect {
            reconnect.begin_round();
        }
        if self.data.datagrams.is_some() {
            self.data.links.probe_udp_paths(peer, Time(self.data.clock.nanos()));
        }
        self.dial(peer);
    }

    /// Ends a round in which no candidate reached `peer`, and schedules the next round.
    pub(super) fn reconnect_later(&mut self, peer: Peer) {
        let (address, redial_max) =
            (self.data.core.address(peer), self.data.identity.settings.redial_max);
        self.data.paths().unreachable_since(peer);
        let peer_state = &mut self.data.peers[peer];
        let Some(reconnect) = &mut peer_state.reconnect else {
            return;
        };
        if reconnect.end_round(redial_max, Instant::now()) {
            log!(Warn, "the connection to {address} is lost, and nobody answers there");
            return self.fail_peer(peer, libc::ECONNRESET);
        }
        peer_state.set_send_state(SendState::Reconnecting);
    }

    /// Continues all reconnects. The engine calls this every few milliseconds while there are any.
    #[cold]
    pub(super) fn check_reconnects(&mut self) {
        let now = Instant::now();
        for peer in std::mem::take(&mut self.data.peers.reconnects) {
            let unreachable_since = self.data.paths().unreachable_since(peer);
            let peer_state = &self.data.peers[peer];
            let Some(reconnect) = &peer_state.reconnect else {
                continue;
            };
            let (address, peer_timeout) =
                (self.data.core.address(peer), self.data.identity.settings.peer_timeout);
            if unreachable_since.is_some() && self.data.core.channel(peer).has_left() {
                // The peer's Goodbye arrived after the end of its connection.
                log!(Debug, "{address} has left");
                self.fail_peer(peer, libc::ECONNRESET);
                continue;
            }
            if unreachable_since.is_some_and(|since| since.elapsed() > peer_timeout) {
                log!(
                    Warn,
                    "{address} could not be reached for {peer_timeout:?}: it counts as lost"
                );
                self.fail_peer(peer, libc::ETIMEDOUT);
                continue;
            }
            let is_due = !peer_state.is_dialling && reconnect.is_due(now);
            self.data.peers.reconnects.push(peer);
            if is_due {
                self.redial(peer);
            }
        }
    }

    /// Closes older connections between the same addresses as the new connection `new` of `peer`.
    /// An older connection is broken, though this side may not have noticed, in three cases: the
    /// same side has dialled both connections (a side dials again only after a loss), the older
    /// connection has been open for [`DUPLICATE_AGE_MAX`], or the older connection is unresponsive.
    /// Returns whether an older connection remains.
    pub(super) fn drop_broken_duplicates(&mut self, peer: Peer, new: usize) -> bool {
        let Some(link) = self.data.links[new].as_ref() else {
            return false;
        };
        let (ends, is_accepted) = (link.ends, link.is_accepted);
        let open_paths = self.data.peers[peer].open_paths.clone();
        let mut has_duplicate = false;
        for old in
            open_paths.into_iter().map(|open_path| open_path.link).filter(|&link| link != new)
        {
            let is_duplicate = |link: &&Link| link.ends == ends && link.socket().is_none();
            let Some(link) = self.data.links[old].as_deref().filter(is_duplicate) else {
                continue;
            };
            let is_old = is_accepted && link.since.elapsed() >= DUPLICATE_AGE_MAX;
            if ends.is_none()
                || !(link.is_accepted == is_accepted || link.health.is_unresponsive || is_old)
            {
                has_duplicate |= ends.is_some();
                continue;
            }
            let why = io::Error::new(io::ErrorKind::ConnectionReset, "another has been made");
            if let Some(link) = self.data.close_link(old) {
                self.data.paths().finish_statistics(peer, link.path, &link, true);
            }
            self.lose_path(peer, old, ends, &why);
        }
        has_duplicate
    }
}
