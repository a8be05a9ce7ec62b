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

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use landbridge_proto::endpoint::Peer;
use landbridge_proto::wire::kind_header::AdvertisedAddress;

/// Maximum number of further addresses of one peer that are tried.
const RAILS_MAX: usize = 6;
/// First pause between two attempts; each further pause is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(100);

/// A further address of a peer, and the attempts to reach it.
struct Rail {
    peer: Peer,
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

    fn leads_to(&self, peer: Peer, ip: IpAddr) -> bool {
        self.peer == peer && self.address.ip() == ip
    }

    fn try_at_once(&mut self, now: Instant) {
        (self.state, self.next, self.pause) = (CandidateState::Waiting, now, PAUSE_MIN);
    }
}

/// The further addresses of all peers.
#[derive(Default)]
pub struct RailTable {
    rails: Vec<Rail>,
}

impl RailTable {
    /// Adds a further address of `peer`, unless the address is known, or the peer has as many
    /// addresses as are tried. `is_ours`: this side dials the address at first. Returns false if
    /// the address was not added.
    pub fn add(&mut self, peer: Peer, address: SocketAddr, is_ours: bool, now: Instant) -> bool {
        let theirs = || self.rails.iter().filter(|rail| rail.peer == peer);
        if theirs().any(|rail| rail.address == address) || theirs().count() >= RAILS_MAX {
            return false;
        }
        self.rails.push(Rail::new(peer, address, is_ours, now));
        true
    }

    /// Whether `peer` has advertised this address over a connection; the address is then tried as a
    /// rail.
    pub fn is_advertised(&self, peer: Peer, address: SocketAddr) -> bool {
        self.rails.iter().any(|rail| (rail.peer, rail.address) == (peer, address))
    }

    /// Whether some address is still to be tried.
    pub fn has_waiting(&self) -> bool {
        self.rails.iter().any(|rail| rail.state == CandidateState::Waiting)
    }

    /// Number of addresses, of which [`Self::take_due`] examines one.
    pub fn count(&self) -> usize {
        self.rails.len()
    }

    /// The peer and the address at `index`, if the address is to be dialled now; the address then
    /// counts as dialled.
    pub fn take_due(
        &mut self,
        index: usize,
        pause_max: Duration,
        now: Instant,
    ) -> Option<(Peer, SocketAddr)> {
        let rail = self.rails.get_mut(index)?;
        rail.handle(CandidateEvent::Tick(pause_max), now).then_some((rail.peer, rail.address))
    }

    /// The pause after the current attempt at an address.
    pub fn pause(&self, peer: Peer, address: SocketAddr) -> Duration {
        let found = self.rails.iter().find(|rail| (rail.peer, rail.address) == (peer, address));
        found.map_or(PAUSE_MIN, |rail| rail.pause)
    }

    /// Records that an attempt at an address has failed.
    pub fn note_failed(&mut self, peer: Peer, address: SocketAddr) {
        self.handle(peer, address, CandidateEvent::Failed);
    }

    /// Records that link `id` connects to an address.
    pub fn note_up(&mut self, peer: Peer, address: SocketAddr, id: usize) {
        self.handle(peer, address, CandidateEvent::Connected(id));
    }

    /// Records that the peer has connected to this side, between the addresses `ends`, as link
    /// `id`. The attempt in the other direction is unnecessary.
    pub fn note_accepted(&mut self, peer: Peer, ends: Option<(IpAddr, IpAddr)>, id: usize) {
        if let Some(rail) = self.between(peer, ends) {
            rail.handle(CandidateEvent::Connected(id), Instant::now());
        }
    }

    /// Handles the loss of link `id` of `peer`, which joined the addresses `ends`. Returns true if
    /// the link led to a further address, which is then dialled again.
    pub fn handle_lost(&mut self, peer: Peer, ends: Option<(IpAddr, IpAddr)>, id: usize) -> bool {
        let is_up = self.rails.iter().position(|rail| rail.state == CandidateState::Up(id));
        let rail = match is_up {
            Some(place) => Some(&mut self.rails[place]),
            None => self.between(peer, ends),
        };
        let Some(rail) = rail else {
            return false;
        };
        rail.handle(CandidateEvent::Lost(id), Instant::now());
        true
    }

    /// Whether a connection between `ends` leads to a further address of the peer.
    pub fn joins(&self, peer: Peer, ends: Option<(IpAddr, IpAddr)>) -> bool {
        ends.is_some_and(|(_, ip)| self.rails.iter().any(|rail| rail.leads_to(peer, ip)))
    }

    /// Forgets the addresses of all peers but those that `is_kept` accepts.
    pub fn retain(&mut self, is_kept: impl Fn(Peer) -> bool) {
        self.rails.retain(|rail| is_kept(rail.peer));
    }

    fn between(&mut self, peer: Peer, ends: Option<(IpAddr, IpAddr)>) -> Option<&mut Rail> {
        let (_, ip) = ends?;
        self.rails.iter_mut().find(|rail| rail.leads_to(peer, ip))
    }

    fn handle(&mut self, peer: Peer, address: SocketAddr, event: CandidateEvent) {
        let found = self.rails.iter_mut().find(|rail| (rail.peer, rail.address) == (peer, address));
        if let Some(rail) = found {
            rail.handle(event, Instant::now());
        }
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

/// The socket address of an address advertisement.
pub fn advertised_address(advertisement: &AdvertisedAddress) -> SocketAddr {
    let ip = Ipv6Addr::from(advertisement.ip);
    SocketAddr::new(ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4), advertisement.port)
}

/// The advertisement of an address of this side.
pub fn advertisement_of(ip: IpAddr, port: u16, token: Option<NonZeroU64>) -> AdvertisedAddress {
    let ip = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    AdvertisedAddress { ip: ip.octets(), port, token }
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
