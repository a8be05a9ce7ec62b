//! UDP paths: one UDP socket for each local address, shared by all peers.
//!
//! Over an authenticated TCP connection each endpoint advertises its UDP port at the connection's
//! local address, with a token that only this peer knows ([`AdvertisedAddress`]). From then on a
//! *UDP path* joins the same two addresses: a link like others, but frames use the path only after
//! path validation, and the engine validates the path again when it stops working
//! ([`PathMonitor`]). While the UDP path works, the TCP connection between the same addresses is
//! spare.
//!
//! This module holds sockets and tokens, and opens UDP paths; `datagram_transfer` moves frames.
//!
//! What may never happen: the engine parses a datagram with an unknown token; a full socket, or an
//! ICMP notice that an attacker can forge, ends a path.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;

use rustix::event::epoll::EventFlags;

use landbridge_drive::checksum::Checksum;
use landbridge_drive::link::datagram::{DATAGRAM_BYTES_MAX, DatagramLink};
use landbridge_drive::link::stream::{Piece, Sent};
use landbridge_proto::endpoint::{Endpoint, Peer};
use landbridge_proto::path::congestion;
use landbridge_proto::path::time::{MILLISECOND, SECOND, Time};
use landbridge_proto::wire::datagram::{self, PROBE_BYTES, PathProbe};
use landbridge_proto::wire::kind_header::AdvertisedAddress;

use super::carrier::Carrier;
use super::event_token::{EventToken, watch};
use super::identity::random;
use super::link_table::LinkTable;
use super::links::Link;
use super::memory::Bytes;
use super::rails::advertisement_of;
use super::udp_path::path_monitor::PathMonitor;
use super::udp_path::{DatagramTarget, UNOPENED, UdpPath};
use crate::log;

/// First pause before an advertisement is repeated; each further pause is twice as long.
const ADVERTISE_NANOS_MIN: u64 = 50 * MILLISECOND;
/// Longest pause before an advertisement is repeated: a peer that does not answer after a minute
/// does not use UDP.
const ADVERTISE_NANOS_MAX: u64 = 32 * SECOND;

/// All UDP paths of an engine.
pub struct Datagrams {
    congestion: congestion::CongestionAlgorithm,
    /// The checksum of frames in datagrams.
    sum: Checksum,
    pub(super) sockets: Vec<Socket>,
    /// Tokens that peers put in front of their datagrams for this endpoint.
    tokens: BTreeMap<u64, AdvertisedToken>,
    /// Addresses that peers have advertised, and that the engine has still to try.
    pub(super) advertisements: Vec<(Peer, AdvertisedAddress)>,
    /// UDP paths that received something in the current receiving call, and whether more than
    /// probes arrived.
    pub(super) touched: Vec<(usize, bool)>,
    /// Answers to probes of the current receiving call.
    pub(super) answers: Vec<(usize, PathProbe)>,
    /// Token, sender and UDP path of the last datagram.
    last: Option<(u64, SocketAddr, usize)>,
    /// Dropped datagrams that belong to no UDP path.
    pub(super) unknown: u64,
    /// Dropped datagrams that arrived corrupt.
    pub(super) corrupt: u64,
}

/// A UDP socket. `link` is `None` while the socket is in use.
pub struct Socket {
    ip: IpAddr,
    port: u16,
    pub(super) link: Option<DatagramLink>,
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

impl Datagrams {
    pub fn new(congestion: congestion::CongestionAlgorithm, sum: Checksum) -> Self {
        Self {
            congestion,
            sum,
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

    /// Notes an address at which `peer` receives datagrams. The engine opens the UDP path later,
    /// because the connection with the advertisement is being read now.
    pub fn note_advertisement(&mut self, peer: Peer, advertisement: &AdvertisedAddress) {
        self.advertisements.push((peer, *advertisement));
    }

    /// Logs how many datagrams were dropped.
    pub fn log_dropped(&self) {
        let (unknown, corrupt) = self.dropped();
        if (unknown, corrupt) != (0, 0) {
            log!(Info, "datagrams dropped: {unknown} of unknown senders, {corrupt} corrupt");
        }
    }

    /// Number of dropped datagrams: those of no UDP path, and corrupt datagrams.
    pub fn dropped(&self) -> (u64, u64) {
        (self.unknown, self.corrupt)
    }

    /// Advertises the UDP socket at the local address `own` of a new direct connection to `peer`.
    pub fn advertise(
        &mut self,
        core: &mut Endpoint<Bytes>,
        epoll: &OwnedFd,
        now: Time,
        (peer, own): (Peer, IpAddr),
    ) {
        match self.socket_at(epoll, own) {
            Ok(socket) => {
                let token = self.token_for(peer, socket);
                if let Some(advertised) = self.tokens.get_mut(&token) {
                    (advertised.is_known, advertised.next_advertisement, advertised.pause) =
                        (false, Time(0), ADVERTISE_NANOS_MIN);
                }
                self.readvertise(core, now);
            }
            Err(error) => log!(Warn, "no UDP at {own}: {error}"),
        }
    }

    /// Advertises all tokens again that peers may not know, as far as a repetition is due.
    pub(super) fn readvertise(&mut self, core: &mut Endpoint<Bytes>, now: Time) {
        for (&token, advertised) in &mut self.tokens {
            if advertised.is_due(now) {
                let Socket { ip, port, .. } = self.sockets[advertised.socket];
                core.channel_mut(advertised.peer).advertise_address(advertisement_of(
                    ip,
                    port,
                    NonZeroU64::new(token),
                ));
            }
        }
    }

    /// The number of the socket at a local address; opens a socket if there is none.
    fn socket_at(&mut self, epoll: &OwnedFd, ip: IpAddr) -> io::Result<usize> {
        if let Some(known) = self.sockets.iter().position(|socket| socket.ip == ip) {
            return Ok(known);
        }
        let link = DatagramLink::bind(SocketAddr::new(ip, 0))?;
        let index = self.sockets.len();
        let port = link.local_addr().port();
        watch(epoll, link.fd(), EventToken::Datagrams(index), EventFlags::IN)?;
        self.sockets.push(Socket { ip, port, link: Some(link), blocked: Vec::new() });
        Ok(index)
    }

    /// Opens a UDP path between the addresses `own` and `to`, or lets an open one go to the port
    /// and the token that the peer uses now. Returns the link of the path, which is to be probed.
    pub(super) fn open_path(
        &mut self,
        links: &mut LinkTable,
        epoll: &OwnedFd,
        now: Time,
        peer: Peer,
        (own, to): (IpAddr, SocketAddr),
        token: u64,
    ) -> io::Result<usize> {
        let socket = self.socket_at(epoll, own)?;
        for id in links.udp_paths_of(peer) {
            if let Some((_, udp_path)) = links.udp_path(id)
                && (udp_path.socket, udp_path.to.ip()) == (socket, to.ip())
            {
                (udp_path.to, udp_path.token) = (to, token);
                udp_path.monitor.probe_now(now);
                return Ok(id);
            }
        }
        let own_token = self.token_for(peer, socket);
        let monitor = PathMonitor::new(now, DATAGRAM_BYTES_MAX);
        let (congestion, has_worked) = (self.congestion, false);
        let udp_path = UdpPath { socket, to, token, own_token, congestion, has_worked, monitor };
        let mut link = Link::new(Carrier::Datagram(Box::new(udp_path)), Some(peer));
        (link.sum, link.ends, link.path) = (self.sum, Some((own, to.ip())), UNOPENED);
        let id = links.add(link);
        if let Some(advertised) = self.tokens.get_mut(&own_token) {
            advertised.udp_paths.push(id);
        }
        Ok(id)
    }

    /// Whether peers have advertised addresses that the engine has still to try.
    #[inline]
    pub(super) fn has_advertisements(&self) -> bool {
        !self.advertisements.is_empty()
    }

    /// Sends a probe, or the answer to a probe, by the socket of a UDP path.
    pub(super) fn send_probe(&mut self, target: DatagramTarget, probe: PathProbe, is_answer: bool) {
        let front = probe.emit(target.token, is_answer);
        let size = if is_answer { front.len() } else { probe.size as usize };
        if let Some(link) = &mut self.sockets[target.socket].link {
            push_probe(link, target.to, &front, size);
        }
    }

    /// Forgets UDP path `id`, whose peer is given up.
    pub fn forget_udp_path(&mut self, id: usize, udp_path: &UdpPath) {
        self.last = None;
        self.touched.retain(|(touched, _)| *touched != id);
        self.answers.retain(|&(udp_path, _)| udp_path != id);
        if let Some(advertised) = self.tokens.get_mut(&udp_path.own_token) {
            advertised.udp_paths.retain(|&udp_path| udp_path != id);
        }
    }

    /// Forgets the tokens of `peer`, which is given up: its datagrams are dropped from now on.
    pub fn forget_tokens(&mut self, peer: Peer) {
        self.tokens.retain(|_, advertised| advertised.peer != peer);
    }

    /// The address of the first socket, and a token advertised for it.
    #[cfg(test)]
    pub fn advertised_for_tests(&self) -> (SocketAddr, u64) {
        let (&token, advertised) = self.tokens.first_key_value().expect("somebody was advertised");
        let socket = &self.sockets[advertised.socket];
        (SocketAddr::new(socket.ip, socket.port), token)
    }

    /// Sends `bytes` behind a valid token by UDP path `udp_path`.
    #[cfg(test)]
    pub fn send_junk_for_tests(&mut self, udp_path: &UdpPath, bytes: &[u8]) -> bool {
        let datagram = [&udp_path.token.to_le_bytes()[..], bytes].concat();
        let link = self.sockets[udp_path.socket].link.as_mut().expect("a socket at rest");
        assert!(link.begin(udp_path.to, datagram.len()));
        // SAFETY: the datagram has no payload pieces.
        unsafe { link.push(&datagram, &[]) && link.flush().is_ok() }
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

    /// Queues `peer` until the socket has free space.
    #[cold]
    pub(super) fn await_room(
        &mut self,
        epoll: &OwnedFd,
        socket: usize,
        peer: Peer,
    ) -> io::Result<()> {
        let entry = &mut self.sockets[socket];
        if !entry.blocked.contains(&peer) {
            entry.blocked.push(peer);
        }
        self.watch_socket(epoll, socket, EventFlags::IN | EventFlags::OUT)
    }

    fn watch_socket(&self, epoll: &OwnedFd, socket: usize, interest: EventFlags) -> io::Result<()> {
        let link = self.sockets.get(socket).and_then(|entry| entry.link.as_ref());
        link.map_or(Ok(()), |link| watch(epoll, link.fd(), EventToken::Datagrams(socket), interest))
    }

    /// Sends queued datagrams of a socket that has free space again, and marks the peers busy that
    /// have waited for the space. Returns false if datagrams are still queued.
    #[cold]
    pub(super) fn handle_room(
        &mut self,
        core: &mut Endpoint<Bytes>,
        epoll: &OwnedFd,
        socket: usize,
    ) -> bool {
        let Some(entry) = self.sockets.get_mut(socket) else {
            return false;
        };
        let Some(link) = &mut entry.link else {
            return false;
        };
        match link.flush() {
            Ok(Sent::All) => (),
            Ok(_) => return false,
            Err(error) => {
                log!(Warn, "a UDP socket fails: {error}");
                return false;
            }
        }
        for peer in std::mem::take(&mut entry.blocked) {
            core.channel_mut(peer).mark_busy();
        }
        // If epoll cannot change the interest, it reports the free space again.
        let _ = self.watch_socket(epoll, socket, EventFlags::IN);
        true
    }

    /// The UDP path by which a datagram has arrived.
    #[inline]
    pub(super) fn udp_path_from(
        &mut self,
        links: &LinkTable,
        socket: usize,
        from: SocketAddr,
        bytes: &[u8],
    ) -> Option<usize> {
        let token = datagram::token(bytes)?;
        if let Some((known, at, id)) = self.last
            && (known, at) == (token, from)
        {
            return Some(id);
        }
        let mut advertised =
            self.tokens.get_mut(&token).filter(|advertised| advertised.socket == socket);
        if let Some(advertised) = &mut advertised {
            advertised.is_known = true;
        }
        let is_it = |id: &&usize| match links.get(**id).and_then(Option::as_ref) {
            Some(link) => {
                matches!(&link.carrier, Carrier::Datagram(udp_path) if udp_path.to == from)
            }
            None => false,
        };
        let found =
            advertised.and_then(|advertised| advertised.udp_paths.iter().find(is_it).copied());
        match found {
            Some(id) => self.last = Some((token, from, id)),
            None => self.unknown += 1,
        }
        found
    }
}

/// Sends a probe or an answer. If the socket is full, the probe counts as lost.
fn push_probe(socket: &mut DatagramLink, to: SocketAddr, front: &[u8; PROBE_BYTES], size: usize) {
    static ZEROES: [u8; 1 << 16] = [0; 1 << 16];
    if !socket.begin(to, size) {
        return;
    }
    let rest = Piece { base: ZEROES.as_ptr().cast_mut(), len: size - PROBE_BYTES };
    // SAFETY: the zeroes are static, and are only read.
    if unsafe { socket.push(front, &[rest]) } {
        // A later notice or the next frame reports an error.
        let _ = socket.flush();
    }
}
