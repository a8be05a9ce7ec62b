//! UDP paths: one UDP socket for each local address, shared by all peers.
//!
//! Over an authenticated TCP connection each endpoint advertises its UDP port at the connection's
//! local address, with a token that only this peer knows ([`AdvertisedAddress`]). From then on a
//! *UDP path* joins the same two addresses: a link like others, but frames use the path only after
//! path validation, and the engine validates the path again when it stops working
//! ([`path_monitor`]). While the UDP path works, the TCP connection between the same addresses is
//! spare.
//!
//! | file | does |
//! |---|---|
//! | `path_monitor` | state of one UDP path: validated, suspected, datagram size |
//! | `carry` | outgoing and incoming frames |
//! | this file | sockets, tokens, opening and closing of UDP paths |
//!
//! What may never happen: the engine parses a datagram with an unknown token; a full socket, or an
//! ICMP notice that an attacker can forge, ends a path.

mod carry;
mod path_monitor;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rustix::event::epoll::EventFlags;

use landbridge_drive::link::datagram::{
    DATAGRAM_BYTES_MAX, DatagramLink, DestinationError, DestinationNotice,
};
use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{PathProperties, Peer};
use landbridge_proto::limit::{CHECKSUM_BYTES, KIND_HEADER_BYTES_MAX};
use landbridge_proto::path::congestion;
use landbridge_proto::path::time::{MILLISECOND, SECOND, Time};
use landbridge_proto::wire::datagram::{PathProbe, TOKEN_BYTES};
use landbridge_proto::wire::frame::HEADER_BYTES;
use landbridge_proto::wire::kind_header::AdvertisedAddress;

use self::path_monitor::{PathChange, PathHealth, PathMonitor};
use super::Engine;
use super::dialling::{EventToken, watch};
use super::handshake::Carrier;
use super::identity::random;
use super::links::Link;
use super::peer_state::SendState;
use super::rails::{advertised_address, advertisement_of};
use crate::log;

/// Path number for frames that arrive by a UDP path before the path is open on this side; no open
/// path has this number.
const UNOPENED: PathId = PathId(u8::MAX - 1);

/// First pause before an advertisement is repeated; each further pause is twice as long.
const ADVERTISE_NANOS_MIN: u64 = 50 * MILLISECOND;
/// Longest pause before an advertisement is repeated: a peer that does not answer after a minute
/// does not use UDP.
const ADVERTISE_NANOS_MAX: u64 = 32 * SECOND;
/// Number of consecutive losses of large datagrams after which the engine checks whether their size
/// still passes.
const BLACK_HOLE_LOSSES: u32 = 3;
/// Time without a poll after which silence of a peer is not counted.
const POLL_GAP_MIN: Duration = Duration::from_millis(50);
/// Lead of the TCP connection's last reception over the UDP path's, in nanoseconds, that shows that
/// the peer does not use the UDP path.
const BYPASS_NANOS: u64 = 30 * MILLISECOND;

/// Bytes of an IPv4 and a UDP header in a packet.
const PACKET_BYTES: usize = 28;

/// All UDP paths of an engine.
pub struct Datagrams {
    congestion: congestion::CongestionAlgorithm,
    sockets: Vec<Socket>,
    /// Tokens that peers put in front of their datagrams for this endpoint.
    tokens: BTreeMap<u64, AdvertisedToken>,
    /// Addresses that peers have advertised, and that the engine has still to try.
    advertisements: Vec<(Peer, AdvertisedAddress)>,
    /// UDP paths that received something in the current receiving call, and whether more than
    /// probes arrived.
    touched: Vec<(usize, bool)>,
    /// Answers to probes of the current receiving call.
    answers: Vec<(usize, PathProbe)>,
    /// Token, sender and UDP path of the last datagram.
    last: Option<(u64, SocketAddr, usize)>,
    /// Dropped datagrams that belong to no UDP path.
    unknown: u64,
    /// Dropped datagrams that arrived corrupt.
    corrupt: u64,
}

/// A UDP socket. `link` is `None` while the socket is in use.
struct Socket {
    ip: IpAddr,
    port: u16,
    link: Option<DatagramLink>,
    /// Peers with frames for which the socket had no free space.
    blocked: Vec<Peer>,
}

/// The peer that has received a token, and the socket of the token.
struct AdvertisedToken {
    peer: Peer,
    socket: usize,
    udp_paths: Vec<usize>,
    /// A datagram with the token has arrived, so the peer knows the token.
    is_known: bool,
    /// Time of the next repetition, while the peer may not know the token: an advertisement may be
    /// lost, and may arrive before its connection is up.
    next_advertisement: Time,
    pause: u64,
}

impl AdvertisedToken {
    fn new(peer: Peer, socket: usize) -> Self {
        let (udp_paths, is_known, next_advertisement) = (Vec::new(), false, Time(0));
        Self { peer, socket, udp_paths, is_known, next_advertisement, pause: ADVERTISE_NANOS_MIN }
    }

    /// Whether the token is to be advertised now; the token then counts as advertised.
    fn is_due(&mut self, now: Time) -> bool {
        let is_due =
            !self.is_known && now >= self.next_advertisement && self.pause <= ADVERTISE_NANOS_MAX;
        if is_due {
            (self.next_advertisement, self.pause) = (now.after(self.pause), self.pause * 2);
        }
        is_due
    }
}

/// One end of a UDP path.
pub struct UdpPath {
    socket: usize,
    to: SocketAddr,
    /// The peer's token for this endpoint.
    token: u64,
    /// This endpoint's token for the peer.
    own_token: u64,
    congestion: congestion::CongestionAlgorithm,
    /// The path has been open.
    has_worked: bool,
    monitor: PathMonitor,
}

impl Datagrams {
    pub fn new(congestion: congestion::CongestionAlgorithm) -> Self {
        Self {
            congestion,
            sockets: Vec::new(),
            tokens: BTreeMap::new(),
            advertisements: Vec::new(),
            touched: Vec::new(),
            answers: Vec::new(),
            last: None,
            unknown: 0,
            corrupt: 0,
        }
    }

    /// Number of dropped datagrams: those of no UDP path, and corrupt datagrams.
    pub fn dropped(&self) -> (u64, u64) {
        (self.unknown, self.corrupt)
    }

    /// The token of this endpoint for `peer` at a socket; a new token if there is none.
    fn token_for(&mut self, peer: Peer, socket: usize) -> u64 {
        let mut all = self.tokens.iter();
        if let Some((&token, _)) =
            all.find(|(_, advertised)| (advertised.peer, advertised.socket) == (peer, socket))
        {
            return token;
        }
        loop {
            let token = u64::from_le_bytes(random());
            if token != 0 && !self.tokens.contains_key(&token) {
                self.tokens.insert(token, AdvertisedToken::new(peer, socket));
                return token;
            }
        }
    }
}

impl UdpPath {
    pub fn is_open(&self) -> bool {
        self.monitor.is_open()
    }

    pub fn socket(&self) -> usize {
        self.socket
    }

    pub fn is_suspected(&self) -> bool {
        self.monitor.is_suspected()
    }

    /// The properties of the path. Messages that fit into one datagram are copied; pieces of longer
    /// messages stay in the application's memory.
    pub fn traits(&self, copy_max: u32) -> PathProperties {
        let payload_max = self.payload_max();
        PathProperties {
            payload_max,
            eager_max: payload_max,
            first_piece: payload_max,
            pull: false,
            window: u64::MAX,
            ahead: true,
            lossless: false,
            checked: true,
            copy_max: copy_max.min(payload_max - 1),
            spare: false,
            reorders: true,
            silent_loss: true,
            datagram: Some(self.congestion),
        }
    }

    /// Payload bytes that fit into every datagram, whatever the kind header of the frame.
    fn payload_max(&self) -> u32 {
        (self.monitor.size() - TOKEN_BYTES - HEADER_BYTES - KIND_HEADER_BYTES_MAX - CHECKSUM_BYTES)
            as u32
    }
}

impl Engine {
    fn datagrams(&mut self) -> &mut Datagrams {
        // UDP paths exist only while `datagrams` is set.
        self.datagrams.as_mut().expect("datagrams are in use")
    }

    fn udp_path(&mut self, id: usize) -> Option<(Peer, &mut UdpPath)> {
        let link = self.links.get_mut(id)?.as_mut()?;
        let peer = link.peer?;
        match &mut link.carrier {
            Carrier::Datagram(udp_path) => Some((peer, udp_path)),
            _ => None,
        }
    }

    /// The links of a peer's UDP paths.
    fn udp_paths_of(&self, peer: Peer) -> Vec<usize> {
        let is_udp_path =
            |link: &Link| link.peer == Some(peer) && matches!(link.carrier, Carrier::Datagram(_));
        let links = self.links.iter().enumerate();
        links
            .filter(|(_, link)| link.as_deref().is_some_and(is_udp_path))
            .map(|(id, _)| id)
            .collect()
    }

    /// Advertises the UDP socket at the local address of a new direct connection to `peer`.
    pub(super) fn advertise_udp(&mut self, peer: Peer, link: usize) {
        if self.datagrams.is_none() {
            return;
        }
        let Some((own, _)) = self.links[link].as_ref().and_then(|link| link.ends) else {
            return;
        };
        match self.socket_at(own) {
            Ok(socket) => {
                let datagrams = self.datagrams();
                let token = datagrams.token_for(peer, socket);
                if let Some(advertised) = datagrams.tokens.get_mut(&token) {
                    (advertised.is_known, advertised.next_advertisement, advertised.pause) =
                        (false, Time(0), ADVERTISE_NANOS_MIN);
                }
                self.readvertise_udp();
            }
            Err(error) => log!(Warn, "no UDP at {own}: {error}"),
        }
    }

    /// Advertises all tokens again that peers may not know, as far as a repetition is due.
    fn readvertise_udp(&mut self) {
        let now = self.poll_state.time();
        let datagrams = self.datagrams.as_mut().expect("datagrams are in use");
        for (&token, advertised) in &mut datagrams.tokens {
            if advertised.is_due(now) {
                let Socket { ip, port, .. } = datagrams.sockets[advertised.socket];
                let advertisement = advertisement_of(ip, port, token);
                self.core.channel_mut(advertised.peer).advertise_address(advertisement);
            }
        }
    }

    /// The number of the socket at a local address; opens a socket if there is none.
    fn socket_at(&mut self, ip: IpAddr) -> io::Result<usize> {
        let datagrams = self.datagrams();
        if let Some(known) = datagrams.sockets.iter().position(|socket| socket.ip == ip) {
            return Ok(known);
        }
        let link = DatagramLink::bind(SocketAddr::new(ip, 0))?;
        let index = datagrams.sockets.len();
        let port = link.local_addr().port();
        watch(&self.own.epoll, link.fd(), EventToken::Datagrams(index), EventFlags::IN)?;
        let socket = Socket { ip, port, link: Some(link), blocked: Vec::new() };
        self.datagrams().sockets.push(socket);
        Ok(index)
    }

    /// Notes an address at which `peer` receives datagrams. The engine opens the UDP path later,
    /// because the connection with the advertisement is being read now.
    pub(super) fn handle_udp_advertisement(
        &mut self,
        peer: Peer,
        advertisement: &AdvertisedAddress,
    ) {
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.advertisements.push((peer, *advertisement));
        }
    }

    /// Opens UDP paths to the addresses that peers have advertised.
    #[inline]
    pub(super) fn open_udp_paths(&mut self) {
        if self.datagrams.as_ref().is_some_and(|datagrams| !datagrams.advertisements.is_empty()) {
            for (peer, advertisement) in std::mem::take(&mut self.datagrams().advertisements) {
                self.open_udp_paths_to(peer, &advertisement);
            }
        }
    }

    /// Opens a UDP path to an advertised address from every local address that has a connection to
    /// it.
    #[cold]
    fn open_udp_paths_to(&mut self, peer: Peer, advertisement: &AdvertisedAddress) {
        let to = advertised_address(advertisement);
        let open_paths = self.peers[peer].open_paths.clone();
        let ends =
            open_paths.iter().filter_map(|open_path| self.links[open_path.link].as_ref()?.ends);
        let mut locals: Vec<IpAddr> =
            ends.filter(|&(_, theirs)| theirs == to.ip()).map(|(own, _)| own).collect();
        locals.sort_unstable();
        locals.dedup();
        for own in locals {
            if let Err(error) = self.open_udp_path(peer, own, to, advertisement.token) {
                log!(Info, "{}: udp from {own} to {to}: {error}", self.core.address(peer));
            }
        }
    }

    fn open_udp_path(
        &mut self,
        peer: Peer,
        own: IpAddr,
        to: SocketAddr,
        token: u64,
    ) -> io::Result<()> {
        let socket = self.socket_at(own)?;
        let now = self.poll_state.time();
        for id in self.udp_paths_of(peer) {
            if let Some((_, udp_path)) = self.udp_path(id)
                && (udp_path.socket, udp_path.to.ip()) == (socket, to.ip())
            {
                (udp_path.to, udp_path.token) = (to, token);
                udp_path.monitor.probe_now(now);
                self.send_probes(id);
                return Ok(());
            }
        }
        let own_token = self.datagrams().token_for(peer, socket);
        let monitor = PathMonitor::new(now, DATAGRAM_BYTES_MAX);
        let congestion = self.datagrams().congestion;
        let has_worked = false;
        let udp_path = UdpPath { socket, to, token, own_token, congestion, has_worked, monitor };
        let mut link = Link::new(Carrier::Datagram(Box::new(udp_path)), Some(peer));
        (link.sum, link.ends, link.path) =
            (self.identity.integrity, Some((own, to.ip())), UNOPENED);
        let id = self.links.free_slot();
        self.links[id] = Some(Box::new(link));
        if let Some(advertised) = self.datagrams().tokens.get_mut(&own_token) {
            advertised.udp_paths.push(id);
        }
        self.send_probes(id);
        Ok(())
    }

    /// Whether link `id` may carry frames although delivery is not certain. A suspected UDP path
    /// may not: another path may be better.
    pub(super) fn may_carry(&self, id: usize) -> bool {
        let link = self.links[id].as_ref();
        link.is_none_or(|link| link.socket().is_none() || link.works())
    }

    /// Probes the UDP paths of `peer`, since no connection shows whether the peer is alive.
    pub(super) fn probe_udp_paths(&mut self, peer: Peer) {
        if self.datagrams.is_none() {
            return;
        }
        let now = self.poll_state.time();
        for id in self.udp_paths_of(peer) {
            if let Some((_, udp_path)) = self.udp_path(id) {
                udp_path.monitor.expect_answer(now);
            }
        }
    }

    /// Forgets UDP path `id`, whose peer is given up.
    pub(super) fn forget_udp_path(&mut self, id: usize, udp_path: &UdpPath) {
        let own_token = udp_path.own_token;
        let datagrams = self.datagrams();
        datagrams.last = None;
        datagrams.touched.retain(|(touched, _)| *touched != id);
        datagrams.answers.retain(|&(udp_path, _)| udp_path != id);
        if let Some(advertised) = datagrams.tokens.get_mut(&own_token) {
            advertised.udp_paths.retain(|&udp_path| udp_path != id);
        }
    }

    /// Forgets the tokens of `peer`, which is given up: its datagrams are dropped from now on.
    pub(super) fn forget_tokens(&mut self, peer: Peer) {
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.tokens.retain(|_, advertised| advertised.peer != peer);
        }
    }

    /// Whether frames between these addresses use UDP. This is the case if the addresses have a UDP
    /// path that has worked, and some UDP path of the peer works now. A failure of a UDP path
    /// probably affects the connection between the same addresses, too, where the failure takes
    /// longer to be noticed.
    pub(super) fn is_covered(&self, peer: Peer, ends: Option<(IpAddr, IpAddr)>) -> bool {
        if self.datagrams.is_none() {
            return false;
        }
        let theirs = self.links.iter().flatten().filter(|link| link.peer == Some(peer));
        let udp_paths = theirs.filter_map(|link| match &link.carrier {
            Carrier::Datagram(udp_path) => Some((udp_path, link.ends)),
            _ => None,
        });
        let (mut has_tcp_beside, mut some_work) = (false, false);
        for (udp_path, between) in udp_paths {
            has_tcp_beside |= between == ends && udp_path.has_worked;
            some_work |= udp_path.is_open() && !udp_path.is_suspected();
        }
        has_tcp_beside && some_work
    }

    /// Runs protocol timers that are due.
    #[inline]
    pub(super) fn handle_time(&mut self) {
        let now = self.poll_state.time();
        self.core.set_time(now);
        self.do_what_is_due(now);
    }

    /// Runs protocol timers that are due at `now`.
    #[inline]
    pub(super) fn do_what_is_due(&mut self, now: Time) {
        if self.core.schedule().next_wake().is_some_and(|at| at <= now) {
            self.core.handle_time(now);
            self.drain_actions();
        }
    }

    /// Sends the probes of UDP path `id` that are due.
    fn send_probes(&mut self, id: usize) {
        let (now, pause_max) = (self.poll_state.time(), self.identity.redial_max.as_nanos() as u64);
        while let Some((_, udp_path)) = self.udp_path(id) {
            let (socket, to, token) = (udp_path.socket, udp_path.to, udp_path.token);
            let Some(probe) = udp_path.monitor.due_probe(now, pause_max) else {
                return;
            };
            self.send_probe(socket, to, probe, token, false);
        }
    }

    fn send_probe(
        &mut self,
        socket: usize,
        to: SocketAddr,
        probe: PathProbe,
        token: u64,
        is_answer: bool,
    ) {
        let front = probe.emit(token, is_answer);
        let size = if is_answer { front.len() } else { probe.size as usize };
        let Some(mut link) = self.datagrams().sockets[socket].link.take() else {
            return;
        };
        carry::push_probe(&mut link, to, &front, size);
        self.datagrams().sockets[socket].link = Some(link);
        self.handle_notices(socket);
    }

    /// Applies a change of UDP path `id` that an answer or a timeout has caused.
    fn handle_change(&mut self, id: usize, change: PathChange) {
        let Some((peer, udp_path)) = self.udp_path(id) else {
            return;
        };
        let (to, size) = (udp_path.to, udp_path.monitor.size());
        match change {
            PathChange::Nothing => return,
            PathChange::Opened => {
                if !self.add_path(peer, id) {
                    if let Some((_, udp_path)) = self.udp_path(id) {
                        udp_path.monitor.close(Time(u64::MAX));
                    }
                    return;
                }
                if let Some((_, udp_path)) = self.udp_path(id) {
                    udp_path.has_worked = true;
                }
                log!(Info, "{}: udp to {to}", self.core.address(peer));
                if self.peers[peer].send_state != SendState::Closed {
                    // A dial under way continues: a UDP path does not replace a connection.
                    self.set_send_state(peer, SendState::Up(id));
                }
            }
            PathChange::Resized => {
                log!(Info, "{}: udp to {to}: datagrams of {size} bytes", self.core.address(peer));
            }
        }
        self.restripe(peer);
        self.drain_actions();
    }

    /// Closes UDP path `id`, which has failed: other paths retransmit what the path carried, and
    /// path validation begins again.
    fn close_udp_path(&mut self, id: usize, why: &'static str) {
        let Some((peer, _)) = self.udp_path(id) else {
            return;
        };
        let ends = self.links[id].as_ref().and_then(|link| link.ends);
        let why = io::Error::new(io::ErrorKind::TimedOut, why);
        self.lose_path(peer, id, ends, &why);
        if let Some(link) = self.links[id].as_mut() {
            link.path = UNOPENED;
        }
    }

    /// Checks all UDP paths: due probes, silence, black holes. The engine calls this every few
    /// milliseconds.
    #[cold]
    pub(super) fn check_datagrams(&mut self, gap: Duration) {
        self.open_udp_paths();
        self.readvertise_udp();
        let (now, suspect_after) =
            (self.poll_state.time(), self.identity.suspect_after.as_nanos() as u64);
        for id in 0..self.links.len() {
            let Some((peer, udp_path)) = self.udp_path(id) else {
                continue;
            };
            if gap > POLL_GAP_MIN {
                udp_path.monitor.handle_poll_gap(now);
            }
            let change = udp_path.monitor.expire(now);
            self.handle_change(id, change);
            self.detect_black_hole(peer, id);
            let elsewhere = self.last_received_elsewhere(peer, id);
            let is_bypassed = self.is_bypassed(peer, id, now);
            let Some((_, udp_path)) = self.udp_path(id) else {
                continue;
            };
            if is_bypassed && udp_path.monitor.suspect(now) {
                self.restripe(peer);
            }
            let Some((_, udp_path)) = self.udp_path(id) else {
                continue;
            };
            match udp_path.monitor.assess(now, suspect_after, elsewhere) {
                PathHealth::Alive => (),
                PathHealth::Suspected => {
                    log!(Debug, "{}: udp is silent", self.core.address(peer));
                    self.restripe(peer);
                }
                PathHealth::Lost => self.close_udp_path(id, "nothing is heard any more"),
            }
            self.send_probes(id);
        }
    }

    /// Checks the datagram size of a UDP path if several of its largest datagrams in a row were
    /// lost.
    fn detect_black_hole(&mut self, peer: Peer, id: usize) {
        let Some(path) = self.links[id].as_ref().map(|link| link.path) else {
            return;
        };
        let lost = self.core.channel(peer).path_statistics(path).map_or(0, |done| done.large_lost);
        if let Some((_, udp_path)) = self.udp_path(id).filter(|_| lost >= BLACK_HOLE_LOSSES) {
            udp_path.monitor.recheck_size();
        }
    }

    /// Whether the peer recently sent over the connection between the same addresses, but not by
    /// UDP path `id`: the peer suspects the UDP path.
    fn is_bypassed(&self, peer: Peer, id: usize, now: Time) -> bool {
        let Some(link) = self.links[id].as_ref() else {
            return false;
        };
        let has_tcp_beside =
            |it: &&Link| (it.peer, it.ends) == (Some(peer), link.ends) && it.is_stream();
        let links = self.links.iter().filter_map(Option::as_deref);
        let last_over_tcp = links.filter(has_tcp_beside).map(|link| link.last_received).max();
        last_over_tcp.is_some_and(|heard| {
            let is_recent = now.nanos_since(heard) < 2 * BYPASS_NANOS;
            is_recent && heard.nanos_since(link.last_received) > BYPASS_NANOS
        })
    }

    /// Time of the last reception from `peer` by another link than `id`.
    fn last_received_elsewhere(&self, peer: Peer, id: usize) -> Time {
        let links = self.links.iter().enumerate().filter(|&(other, _)| other != id);
        let theirs = links.filter_map(|(_, link)| link.as_ref()).filter(|l| l.peer == Some(peer));
        theirs.map(|link| link.last_received).max().unwrap_or(Time(0))
    }

    /// Handles ICMP notices about destinations. An attacker can forge a notice, so a notice only
    /// makes the engine try a smaller size.
    pub(super) fn handle_notices(&mut self, socket: usize) {
        let Some(link) = &mut self.datagrams().sockets[socket].link else {
            return;
        };
        let notices: Vec<DestinationNotice> = link.take_notices().collect();
        let now = self.poll_state.time();
        for notice in notices {
            for id in 0..self.links.len() {
                let Some((_, udp_path)) = self.udp_path(id) else {
                    continue;
                };
                if (udp_path.socket, udp_path.to) != (socket, notice.to) {
                    continue;
                }
                let change = match notice.error {
                    DestinationError::TooLarge { size: 0, mtu } => {
                        let fits = mtu.unwrap_or(0) as usize;
                        let size = udp_path.monitor.size();
                        if fits < size + PACKET_BYTES {
                            udp_path.monitor.handle_too_large(now, size)
                        } else {
                            PathChange::Nothing
                        }
                    }
                    DestinationError::TooLarge { size, .. } => {
                        udp_path.monitor.handle_too_large(now, size)
                    }
                    DestinationError::Unreachable { .. } | DestinationError::QueueFull => {
                        PathChange::Nothing
                    }
                };
                self.handle_change(id, change);
            }
        }
    }

    /// Whether datagrams of this endpoint may be lost without retransmission when the endpoint
    /// ends.
    pub(super) fn has_udp_paths(&self) -> bool {
        let is_open = |link: &Link| matches!(&link.carrier, Carrier::Datagram(l) if l.is_open());
        self.links.iter().flatten().any(|link| is_open(link))
    }
}

#[cfg(test)]
impl Engine {
    /// The address of the first socket, and a token advertised for it.
    pub(super) fn advertised_for_tests(&mut self) -> (SocketAddr, u64) {
        let datagrams = self.datagrams();
        let (&token, advertised) =
            datagrams.tokens.first_key_value().expect("somebody was advertised");
        let socket = &datagrams.sockets[advertised.socket];
        (SocketAddr::new(socket.ip, socket.port), token)
    }

    /// Closes the first open UDP path, as if the path had failed.
    pub(super) fn close_udp_path_for_tests(&mut self) {
        let is_open = |link: &Link| matches!(&link.carrier, Carrier::Datagram(l) if l.is_open());
        let links = self.links.iter();
        let first = links.map(Option::as_deref).position(|link| link.is_some_and(is_open));
        let id = first.expect("a UDP path");
        if let Some((_, udp_path)) = self.udp_path(id) {
            let now = Time(0);
            udp_path.monitor.close(now);
        }
        self.close_udp_path(id, "a test");
    }

    /// Sends `bytes` behind a valid token by the first UDP path; false if there is no UDP path.
    pub(super) fn send_junk_for_tests(&mut self, bytes: &[u8]) -> bool {
        let udp_paths = self.links.iter().filter_map(|link| match &link.as_ref()?.carrier {
            Carrier::Datagram(udp_path) => Some((udp_path.socket, udp_path.to, udp_path.token)),
            _ => None,
        });
        let Some((socket, to, token)) = udp_paths.into_iter().next() else {
            return false;
        };
        let datagram = [&token.to_le_bytes()[..], bytes].concat();
        let link = self.datagrams().sockets[socket].link.as_mut().expect("a socket at rest");
        assert!(link.begin(to, datagram.len()));
        // SAFETY: the datagram has no payload pieces.
        unsafe { link.push(&datagram, &[]) && link.flush().is_ok() }
    }
}
