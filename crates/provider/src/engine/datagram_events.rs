//! Events of UDP sockets, and the regular check of UDP paths.
//!
//! What enters: events of sockets, and the time. What leaves: frames, probes, and UDP paths that
//! have failed. What may never happen: a UDP path that fails ends a peer while a connection to the
//! peer is open.

use std::io;
use std::time::Duration;

use landbridge_proto::path::time::{MILLISECOND, Time};
use rustix::event::epoll::EventFlags;

use super::connections::Connections;
use super::udp_path::UNOPENED;
use super::udp_path::path_monitor::PathHealth;
use crate::log;

/// Time without a poll after which silence of a peer is not counted.
const POLL_GAP_MIN: Duration = Duration::from_millis(50);
/// Lead of the TCP connection's last reception over the UDP path's, in nanoseconds, that shows that
/// the peer does not use the UDP path.
const BYPASS_NANOS: u64 = 30 * MILLISECOND;

impl Connections {
    /// Handles an event at a socket; returns the number of received datagrams.
    pub(super) fn handle_datagram_event(&mut self, socket: usize, flags: EventFlags) -> usize {
        if flags.contains(EventFlags::OUT) && self.data.handle_socket_room(socket) {
            self.flush();
        }
        if !flags.intersects(EventFlags::IN | EventFlags::ERR | EventFlags::HUP) {
            return 0;
        }
        let datagrams = self.data.read_datagrams(socket);
        if !self.data.pending.is_empty() {
            self.handle_pending();
        }
        datagrams
    }

    /// Closes UDP path `id`, which has failed: other paths retransmit what the path carried, and
    /// path validation begins again.
    pub(super) fn close_udp_path(&mut self, id: usize, why: &'static str) {
        let Some((peer, _)) = self.data.links.udp_path(id) else {
            return;
        };
        let ends = self.data.links[id].as_ref().and_then(|link| link.ends);
        let why = io::Error::new(io::ErrorKind::TimedOut, why);
        self.lose_path(peer, id, ends, &why);
        if let Some(link) = self.data.links[id].as_mut() {
            link.path = UNOPENED;
        }
    }

    /// Checks all UDP paths: due probes, silence, black holes. The engine calls this every few
    /// milliseconds.
    #[cold]
    pub(super) fn check_datagrams(&mut self, gap: Duration) {
        self.data.open_udp_paths();
        let datagrams = self.data.datagrams.as_mut().expect("datagrams are in use");
        datagrams.readvertise(&mut self.data.core, Time(self.data.clock.nanos()));
        let (now, suspect_after) = (
            Time(self.data.clock.nanos()),
            self.data.identity.settings.suspect_after.as_nanos() as u64,
        );
        for id in 0..self.data.links.len() {
            let Some((peer, udp_path)) = self.data.links.udp_path(id) else {
                continue;
            };
            if gap > POLL_GAP_MIN {
                udp_path.monitor.handle_poll_gap(now);
            }
            let change = udp_path.monitor.expire(now);
            self.data.handle_change(id, change);
            if let Some(path) = self.data.links[id].as_ref().map(|link| link.path) {
                let statistics = self.data.core.channel(peer).path_statistics(path);
                let large_lost = statistics.map_or(0, |done| done.large_lost);
                if let Some((_, udp_path)) = self.data.links.udp_path(id) {
                    udp_path.detect_black_hole(large_lost);
                }
            }
            let elsewhere = self.data.links.last_received_elsewhere(peer, id);
            let beside = self.data.links.last_received_beside(peer, id);
            let Some((_, udp_path)) = self.data.links.udp_path(id) else {
                continue;
            };
            if is_bypassed(beside, now) && udp_path.monitor.suspect(now) {
                self.data.paths().restripe(peer);
            }
            let Some((_, udp_path)) = self.data.links.udp_path(id) else {
                continue;
            };
            match udp_path.monitor.assess(now, suspect_after, elsewhere) {
                PathHealth::Alive => (),
                PathHealth::Suspected => {
                    log!(Debug, "{}: udp is silent", self.data.core.address(peer));
                    self.data.paths().restripe(peer);
                }
                PathHealth::Lost => self.close_udp_path(id, "nothing arrives any more"),
            }
            self.data.send_probes(id);
        }
    }
}

/// Whether the peer recently sent over the connection between the same addresses, but not by the
/// UDP path: the peer suspects the UDP path. `beside`: times of the last reception over the
/// connection, and by the UDP path.
fn is_bypassed(beside: Option<(Time, Time)>, now: Time) -> bool {
    beside.is_some_and(|(over_tcp, by_udp)| {
        let is_recent = now.nanos_since(over_tcp) < 2 * BYPASS_NANOS;
        is_recent && over_tcp.nanos_since(by_udp) > BYPASS_NANOS
    })
}
