//! Several interfaces of a node as several paths to a peer.
//!
//! Once two endpoints have a direct connection, each advertises its further addresses to the other;
//! the side with the smaller name dials them. When such a connection is lost, each side dials,
//! because the other side may not have noticed the loss: a side with nothing to send sees no
//! difference. The kernel chooses the local interface. Whether an address can be reached shows when
//! it is dialled: an address that does not answer costs attempts with growing pauses, and nothing
//! else. A second connection between the same two addresses is kept for what the peer sends over
//! it.
//!
//! | state of an address | advertised | attempt due | attempt fails | connected | connection lost |
//! |---|---|---|---|---|---|
//! | (none) | Waiting or PeerDials | | | | |
//! | PeerDials: the peer dials our address | | | | Up | Waiting, due at once |
//! | Waiting | | Dialling | | Up | |
//! | Dialling | | | Waiting, for the pause | Up | |
//! | Up, over a link | | | | Up, over the new link | Waiting, at once, if it was this link |
//!
//! What may never happen: a job waits for an interface that leads nowhere.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use landbridge_proto::endpoint::{PathProperties, Peer};
use landbridge_proto::wire::kind_header::AdvertisedAddress;

use super::Engine;
use super::dialling::HelloPurpose;
use super::handshake::Carrier;
use super::links::RELAY_PATH;
use super::local_endpoint::dial_tcp;
use super::peer_state::{OpenPath, SendState};
use crate::log;

/// Maximum number of further addresses of one peer that are tried.
const RAILS_MAX: usize = 6;
/// First pause between two attempts; each further pause is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Size of a piece while there are several rails: half a millisecond at 1 Gbit/s, so that all rails
/// finish at about the same time.
const PIECE_BYTES: u32 = 64 << 10;
/// Maximum number of unsent bytes in a socket while there are several rails: a larger bound would
/// bind bytes to a slow rail while a fast rail is idle.
const UNSENT_BYTES: u32 = 128 << 10;

/// A further address of a peer, and the attempts to reach it.
pub struct Rail {
    pub(super) peer: Peer,
    address: SocketAddr,
    state: CandidateState,
    next: Instant,
    pause: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CandidateState {
    /// The peer dials the address of this side.
    PeerDials,
    /// The address is dialled when the next attempt is due.
    Waiting,
    Dialling,
    /// A connection to the address is open, over this link.
    Up(usize),
}

/// An event for a further address; the table in the module head gives the transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CandidateEvent {
    /// Time has passed; the argument is the longest pause between attempts.
    Tick(Duration),
    Failed,
    Connected(usize),
    Lost(usize),
}

impl Rail {
    fn new(peer: Peer, address: SocketAddr, is_ours: bool, now: Instant) -> Self {
        let state = if is_ours { CandidateState::Waiting } else { CandidateState::PeerDials };
        Self { peer, address, state, next: now, pause: PAUSE_MIN }
    }

    /// Handles an event by the table. Returns true if the address is to be dialled now.
    fn handle(&mut self, event: CandidateEvent, now: Instant) -> bool {
        match (self.state, event) {
            (CandidateState::Waiting, CandidateEvent::Tick(pause_max)) if now >= self.next => {
                (self.state, self.next) = (CandidateState::Dialling, now + self.pause);
                self.pause = (self.pause * 2).min(pause_max);
                return true;
            }
            // In any other state the peer has connected to this side meanwhile.
            (CandidateState::Dialling, CandidateEvent::Failed) => {
                self.state = CandidateState::Waiting
            }
            (_, CandidateEvent::Connected(id)) => self.state = CandidateState::Up(id),
            (CandidateState::PeerDials, CandidateEvent::Lost(_)) => self.try_at_once(now),
            (CandidateState::Up(own), CandidateEvent::Lost(id)) if own == id => {
                self.try_at_once(now)
            }
            _ => (),
        }
        false
    }

    fn try_at_once(&mut self, now: Instant) {
        (self.state, self.next, self.pause) = (CandidateState::Waiting, now, PAUSE_MIN);
    }
}

/// The two addresses that a connection joins: the local address and the peer's.
pub fn ends_of(socket: BorrowedFd<'_>) -> Option<(IpAddr, IpAddr)> {
    let ip = |address: rustix::net::SocketAddrAny| {
        SocketAddr::try_from(address).ok().map(|address| address.ip().to_canonical())
    };
    let own = rustix::net::getsockname(socket).ok().and_then(ip)?;
    let peers = rustix::net::getpeername(socket).ok().flatten().and_then(ip)?;
    Some((own, peers))
}

impl Engine {
    /// Advertises the further addresses of this side to `peer` over a new direct connection.
    pub(super) fn advertise_rails(&mut self, peer: Peer, link: usize) {
        let Some(port) = self.own.port().filter(|_| self.own.own_format) else {
            return;
        };
        let known = self.links[link].as_ref().and_then(|link| link.ends).map(|(own, _)| own);
        for ip in &self.identity.rails {
            if Some(*ip) == known || *ip == self.identity.ip || self.identity.ip.is_loopback() {
                continue;
            }
            self.core.channel_mut(peer).advertise_address(advertisement_of(*ip, port, 0));
        }
    }

    /// Handles the advertisement of a further address of `peer`.
    pub(super) fn handle_advertisement(&mut self, peer: Peer, advertisement: &AdvertisedAddress) {
        if advertisement.token != 0 {
            return self.handle_udp_advertisement(peer, advertisement);
        }
        let is_ours = Some(self.own.name) < self.peers[peer].name;
        let address = advertised_address(advertisement);
        let ip = address.ip();
        let theirs = || self.peers.rails.iter().filter(|rail| rail.peer == peer);
        let is_allowed = self.identity.rail_networks.iter().any(|network| network.contains(ip));
        // An address that both nodes have leads to this node itself: bridges of containers have the
        // same address on every host.
        let is_elsewhere = Some(self.identity.node) != self.node_of(peer);
        if !is_allowed
            || (is_elsewhere && self.identity.rails.contains(&ip))
            || theirs().any(|rail| rail.address == address)
            || theirs().count() >= RAILS_MAX
        {
            return;
        }
        self.peers.rails.push(Rail::new(peer, address, is_ours, Instant::now()));
        self.check_rails();
    }

    /// Whether `peer` has advertised this address over a connection; the address is then tried as a
    /// rail.
    pub(super) fn is_rail_advertised(&self, peer: Peer, address: SocketAddr) -> bool {
        self.peers.rails.iter().any(|rail| (rail.peer, rail.address) == (peer, address))
    }

    /// Dials the addresses whose next attempt is due. The engine calls this every few milliseconds
    /// while an address is to be tried.
    #[cold]
    pub(super) fn check_rails(&mut self) {
        let now = Instant::now();
        self.peers.drop_rails_of_closed();
        for index in 0..self.peers.rails.len() {
            let rail = &mut self.peers.rails[index];
            if !rail.handle(CandidateEvent::Tick(self.identity.redial_max), now) {
                continue;
            }
            let (peer, address) = (rail.peer, rail.address);
            let started = dial_tcp(address).and_then(|socket| {
                self.start_handshake(socket, false, HelloPurpose::Rail(peer, address))
            });
            if let Err(error) = started {
                self.rail_failed(peer, address, &error);
            }
        }
    }

    /// The pause after the current attempt at a further address.
    pub(super) fn rail_pause(&self, peer: Peer, address: SocketAddr) -> Duration {
        let found =
            self.peers.rails.iter().find(|rail| (rail.peer, rail.address) == (peer, address));
        found.map_or(PAUSE_MIN, |rail| rail.pause)
    }

    /// Whether some address is still to be tried.
    pub(super) fn has_rails_to_try(&self) -> bool {
        self.peers.rails.iter().any(|rail| rail.state == CandidateState::Waiting)
    }

    fn handle_rail_event(&mut self, peer: Peer, address: SocketAddr, event: CandidateEvent) {
        let found =
            self.peers.rails.iter_mut().find(|rail| (rail.peer, rail.address) == (peer, address));
        if let Some(rail) = found {
            rail.handle(event, Instant::now());
        }
    }

    pub(super) fn rail_failed(&mut self, peer: Peer, address: SocketAddr, error: &io::Error) {
        log!(Debug, "{} at {address}: {error}", self.core.address(peer));
        self.handle_rail_event(peer, address, CandidateEvent::Failed);
    }

    /// Records that link `id` connects to a further address.
    pub(super) fn rail_up(&mut self, peer: Peer, address: SocketAddr, id: usize) {
        self.handle_rail_event(peer, address, CandidateEvent::Connected(id));
    }

    /// Records that the peer has connected to this side, between the addresses `ends`, as link
    /// `id`. The attempt in the other direction is unnecessary.
    pub(super) fn rail_accepted(&mut self, peer: Peer, ends: Option<(IpAddr, IpAddr)>, id: usize) {
        if let Some(rail) = self.rail_between(peer, ends) {
            rail.handle(CandidateEvent::Connected(id), Instant::now());
        }
    }

    /// Handles the loss of link `id` of `peer`, which joined the addresses `ends`. Returns true if
    /// the link led to a further address, which is then dialled again.
    pub(super) fn rail_lost(
        &mut self,
        peer: Peer,
        ends: Option<(IpAddr, IpAddr)>,
        id: usize,
    ) -> bool {
        let is_up = self.peers.rails.iter().position(|rail| rail.state == CandidateState::Up(id));
        let rail = match is_up {
            Some(place) => Some(&mut self.peers.rails[place]),
            None => self.rail_between(peer, ends),
        };
        let Some(rail) = rail else {
            return false;
        };
        rail.handle(CandidateEvent::Lost(id), Instant::now());
        true
    }

    /// Whether a connection between `ends` leads to a further address of the peer, or to a further
    /// address of this side if `is_accepted`.
    pub(super) fn is_rail(
        &mut self,
        peer: Peer,
        ends: Option<(IpAddr, IpAddr)>,
        is_accepted: bool,
    ) -> bool {
        let (main, further) = (self.identity.ip, &self.identity.rails);
        let is_ours = ends.is_some_and(|(own, _)| own != main && further.contains(&own));
        (is_accepted && is_ours) || self.rail_between(peer, ends).is_some()
    }

    #[cfg(test)]
    pub(super) fn expect_rail_for_tests(&mut self, peer: Peer, address: SocketAddr) {
        self.peers.rails.push(Rail::new(peer, address, false, Instant::now()));
    }

    fn rail_between(&mut self, peer: Peer, ends: Option<(IpAddr, IpAddr)>) -> Option<&mut Rail> {
        let (_, ip) = ends?;
        self.peers.rails.iter_mut().find(|rail| rail.peer == peer && rail.address.ip() == ip)
    }

    /// The link of another direct path of `peer` between the same two addresses `ends`, if there is
    /// one.
    pub(super) fn duplicate_link(
        &self,
        peer: Peer,
        ends: Option<(IpAddr, IpAddr)>,
    ) -> Option<usize> {
        let ends = ends?;
        let links = self.peers[peer].open_paths.iter().map(|open_path| open_path.link);
        links.into_iter().find(|&id| {
            self.links[id].as_ref().is_some_and(|link| link.is_stream() && link.ends == Some(ends))
        })
    }

    /// Adapts the paths of `peer` after a change of its direct paths: several paths share messages
    /// in small pieces, a single path takes whole messages.
    pub(super) fn restripe(&mut self, peer: Peer) {
        let peer_state = &mut self.peers[peer];
        let may_pull = peer_state.readable.is_some();
        let through_relay =
            peer_state.open_paths.iter().find(|open_path| open_path.path == RELAY_PATH);
        let direct = peer_state.open_paths.iter().rfind(|open_path| open_path.path != RELAY_PATH);
        if let (Some(relay), Some(direct), SendState::Up(link)) =
            (through_relay, direct, peer_state.send_state)
            && relay.link == link
        {
            peer_state.send_state = SendState::Up(direct.link);
        }
        let mut seen = Vec::new();
        let mut several = false;
        for open_path in &peer_state.open_paths {
            let ends = self.links[open_path.link].as_ref().and_then(|link| link.ends);
            several |= open_path.path != RELAY_PATH && !seen.is_empty() && !seen.contains(&ends);
            if open_path.path != RELAY_PATH {
                seen.push(ends);
            }
        }
        let open_paths = self.peers[peer].open_paths.clone();
        let is_direct =
            |open_path: &OpenPath| open_path.path != RELAY_PATH && self.may_carry(open_path.link);
        let has_direct = open_paths.iter().any(is_direct);
        self.peers.has_several |= several;
        for open_path in open_paths {
            let Some(link) = self.links[open_path.link].as_ref() else {
                continue;
            };
            let traits = link.traits(may_pull, self.identity.copy_max);
            let is_primary = is_sending_link(&self.peers[peer].send_state, open_path.link);
            let is_duplicate = several
                && self.duplicate_link(peer, link.ends).is_some_and(|id| id != open_path.link);
            let spare = match (open_path.path, &link.carrier) {
                (RELAY_PATH, _) => has_direct,
                (_, Carrier::Datagram(udp_path)) => udp_path.is_suspected(),
                _ => {
                    self.is_covered(peer, link.ends) || (!is_primary && (!several || is_duplicate))
                }
            };
            let path = if several && link.is_stream() && open_path.path != RELAY_PATH {
                if let Carrier::Stream(stream) = &link.carrier {
                    stream.set_unsent_max(UNSENT_BYTES);
                }
                PathProperties {
                    payload_max: PIECE_BYTES,
                    eager_max: PIECE_BYTES,
                    first_piece: PIECE_BYTES,
                    ahead: true,
                    spare,
                    ..traits
                }
            } else {
                PathProperties { spare, ..traits }
            };
            self.core.channel_mut(peer).set_path(open_path.path, path);
        }
        self.core.channel_mut(peer).mark_busy();
    }
}

/// The socket address of an address advertisement.
pub fn advertised_address(advertisement: &AdvertisedAddress) -> SocketAddr {
    let ip = Ipv6Addr::from(advertisement.ip);
    SocketAddr::new(ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4), advertisement.port)
}

/// The advertisement of an address of this side.
pub fn advertisement_of(ip: IpAddr, port: u16, token: u64) -> AdvertisedAddress {
    let ip = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    AdvertisedAddress { ip: ip.octets(), port, token }
}

fn is_sending_link(out: &SendState, link: usize) -> bool {
    *out == SendState::Up(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE_MAX: Duration = Duration::from_millis(350);
    const MILLI: Duration = Duration::from_millis(1);

    #[test]
    fn a_further_address_in_every_state_under_every_event() {
        use CandidateState::{Dialling, PeerDials, Up, Waiting};
        let look = CandidateEvent::Tick(PAUSE_MAX);
        let states = [PeerDials, Waiting, Dialling, Up(7)];
        let rows = [
            (look, true, [PeerDials, Dialling, Dialling, Up(7)]),
            // The next attempt is not due yet.
            (look, false, [PeerDials, Waiting, Dialling, Up(7)]),
            (CandidateEvent::Failed, true, [PeerDials, Waiting, Waiting, Up(7)]),
            (CandidateEvent::Connected(7), true, [Up(7); 4]),
            (CandidateEvent::Connected(8), true, [Up(8); 4]),
            (CandidateEvent::Lost(7), true, [Waiting, Waiting, Dialling, Waiting]),
            // The lost link is another connection between the same two addresses.
            (CandidateEvent::Lost(8), true, [Waiting, Waiting, Dialling, Up(7)]),
        ];
        let start = Instant::now();
        for (event, is_time, expected) in rows {
            for (state, expected) in states.into_iter().zip(expected) {
                let next = if is_time { start } else { start + MILLI };
                let mut rail = Rail { state, next, pause: 2 * PAUSE_MIN, ..some_rail(start) };
                let dials = rail.handle(event, start);
                assert_eq!(rail.state, expected, "{state:?} under {event:?}");
                assert_eq!(dials, (state, expected) == (Waiting, Dialling), "{event:?}");
                let is_fresh = expected == Waiting && matches!(state, PeerDials | Up(_));
                let wait = match (dials, is_fresh) {
                    (true, _) => (start + 2 * PAUSE_MIN, PAUSE_MAX),
                    (_, true) => (start, PAUSE_MIN),
                    _ => (next, 2 * PAUSE_MIN),
                };
                assert_eq!((rail.next, rail.pause), wait, "{state:?} under {event:?}");
            }
        }
    }

    #[test]
    fn an_address_is_tried_by_the_side_whose_turn_it_is_with_growing_pauses() {
        let start = Instant::now();
        let mut theirs = Rail::new(Peer(0), "10.0.0.1:5".parse().unwrap(), false, start);
        assert!(!theirs.handle(CandidateEvent::Tick(PAUSE_MAX), start + PAUSE_MAX));
        let mut ours = Rail::new(Peer(0), theirs.address, true, start);
        let mut tried = Vec::new();
        for millis in 0..1_500 {
            if ours.handle(CandidateEvent::Tick(PAUSE_MAX), start + millis * MILLI) {
                tried.push(millis);
                ours.handle(CandidateEvent::Failed, start + millis * MILLI);
            }
        }
        assert_eq!(tried, [0, 100, 300, 650, 1_000, 1_350]);
    }

    fn some_rail(now: Instant) -> Rail {
        Rail::new(Peer(0), "10.0.0.1:5".parse().unwrap(), true, now)
    }
}
