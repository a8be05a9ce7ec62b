//! Several interfaces of a node as several paths to a peer.
//!
//! Once two endpoints have a direct connection, each tells the other at which further addresses it takes connections;
//! the one with the smaller name tries them. When such a connection is lost, each side tries, for the other may not have
//! noticed: it may have nothing to send, and who only listens hears no difference. Which local interface leads there is the kernel's business, and whether
//! it does is found out by trying: an address that nobody reaches costs attempts with growing pauses, and nothing else.
//! A connection between the same two addresses as one that stands already is kept for what the peer sends by it.
//!
//! | state of an address | it is told | its time has come | the attempt fails | connection `id` stands | connection `id` is lost |
//! |---|---|---|---|---|---|
//! | (none) | Waiting, or Theirs | | | | |
//! | Theirs: the peer tries ours | | | | Up | Waiting, at once |
//! | Waiting | | Dialling | | Up | |
//! | Dialling | | | Waiting, for the pause | Up | |
//! | Up, over its connection | | | | Up, over that one | Waiting, at once, if it was the one |
//!
//! What may never happen: a job waits for an interface that leads nowhere.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use landbridge_proto::endpoint::{Path, Peer};
use landbridge_proto::wire::head::Door;

use super::Engine;
use super::doors::dial_tcp;
use super::handshake::Carrier;
use super::links::RELAY_PATH;
use super::neighbours::{Out, Route};
use super::peers::Purpose;
use crate::log;

/// Further addresses of one peer that are tried.
const RAILS_MAX: usize = 6;
/// First pause between two attempts; doubled each time.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// While there are several rails, what is sent by one at a time: at 1 Gb/s half a millisecond, so that they end together.
const PIECE_BYTES: u32 = 64 << 10;
/// And what a socket may hold that has not left: more would be promised to a slow rail while a quick one is idle.
const UNSENT_BYTES: u32 = 128 << 10;

/// A further address of a peer, and the attempts to reach it.
pub struct Rail {
    peer: Peer,
    address: SocketAddr,
    state: State,
    next: Instant,
    pause: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The peer tries ours.
    Theirs,
    /// To be tried when it is time.
    Waiting,
    Dialling,
    /// Over this link.
    Up(usize),
}

/// What happens to a further address: see the table in the module head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// Time has passed. The longest pause between attempts.
    Look(Duration),
    Failed,
    Stands(usize),
    Lost(usize),
}

impl Rail {
    fn new(peer: Peer, address: SocketAddr, is_ours: bool, now: Instant) -> Self {
        let state = if is_ours { State::Waiting } else { State::Theirs };
        Self { peer, address, state, next: now, pause: PAUSE_MIN }
    }

    /// Goes on as the table says. True if the address is to be tried now.
    fn handle(&mut self, event: Event, now: Instant) -> bool {
        match (self.state, event) {
            (State::Waiting, Event::Look(pause_max)) if now >= self.next => {
                (self.state, self.next) = (State::Dialling, now + self.pause);
                self.pause = (self.pause * 2).min(pause_max);
                return true;
            }
            // Otherwise the peer has come to us meanwhile.
            (State::Dialling, Event::Failed) => self.state = State::Waiting,
            (_, Event::Stands(id)) => self.state = State::Up(id),
            (State::Theirs, Event::Lost(_)) => self.try_at_once(now),
            (State::Up(own), Event::Lost(id)) if own == id => self.try_at_once(now),
            _ => (),
        }
        false
    }

    fn try_at_once(&mut self, now: Instant) {
        (self.state, self.next, self.pause) = (State::Waiting, now, PAUSE_MIN);
    }
}

/// The two addresses that a connection joins: ours and the peer's.
pub fn ends_of(socket: BorrowedFd<'_>) -> Option<(IpAddr, IpAddr)> {
    let ip = |address: rustix::net::SocketAddrAny| {
        SocketAddr::try_from(address).ok().map(|address| address.ip().to_canonical())
    };
    let own = rustix::net::getsockname(socket).ok().and_then(ip)?;
    let peers = rustix::net::getpeername(socket).ok().flatten().and_then(ip)?;
    Some((own, peers))
}

impl Engine {
    /// A direct connection to `peer` is up: it is told where else we are.
    pub(super) fn tell_doors(&mut self, peer: Peer, link: usize) {
        let Some(port) = self.own.port().filter(|_| self.own.own_format) else {
            return;
        };
        let known = self.links[link].as_ref().and_then(|link| link.ends).map(|(own, _)| own);
        for ip in &self.identity.rails {
            if Some(*ip) == known || *ip == self.identity.ip || self.identity.ip.is_loopback() {
                continue;
            }
            self.core.tell_door(peer, door_at(*ip, port, 0));
        }
    }

    /// `peer` takes connections at a further address.
    pub(super) fn handle_door_told(&mut self, peer: Peer, door: &Door) {
        if door.token != 0 {
            return self.handle_datagram_door(peer, door);
        }
        let is_ours = Some(self.own.name) < self.neighbours[peer.0 as usize].name;
        let address = address_of(door);
        let ip = address.ip();
        let theirs = || self.rails.iter().filter(|rail| rail.peer == peer);
        let is_allowed = self.identity.rail_networks.iter().any(|network| network.contains(ip));
        // An address that both nodes have leads to ourselves: containers hang on bridges that are alike everywhere.
        let is_elsewhere = Some(self.identity.node) != self.node_of(peer);
        if !is_allowed
            || (is_elsewhere && self.identity.rails.contains(&ip))
            || theirs().any(|rail| rail.address == address)
            || theirs().count() >= RAILS_MAX
        {
            return;
        }
        self.rails.push(Rail::new(peer, address, is_ours, Instant::now()));
        self.check_rails();
    }

    /// Whether `peer` has told of this address over a connection: it is tried for itself.
    pub(super) fn is_rail_told(&self, peer: Peer, address: SocketAddr) -> bool {
        self.rails.iter().any(|rail| (rail.peer, rail.address) == (peer, address))
    }

    /// Tries the addresses for which it is time. To be called every few milliseconds while there are any to be tried.
    #[cold]
    pub(super) fn check_rails(&mut self) {
        let now = Instant::now();
        let neighbours = &self.neighbours;
        self.rails.retain(|rail| neighbours[rail.peer.0 as usize].out != Out::Gone);
        for index in 0..self.rails.len() {
            let rail = &mut self.rails[index];
            if !rail.handle(Event::Look(self.identity.redial_max), now) {
                continue;
            }
            let (peer, address) = (rail.peer, rail.address);
            let greeted = dial_tcp(address)
                .and_then(|socket| self.greet(socket, false, Purpose::Rail(peer, address)));
            if let Err(error) = greeted {
                self.rail_failed(peer, address, &error);
            }
        }
    }

    /// The pause after the attempt that is under way to a further address.
    pub(super) fn rail_pause(&self, peer: Peer, address: SocketAddr) -> Duration {
        let found = self.rails.iter().find(|rail| (rail.peer, rail.address) == (peer, address));
        found.map_or(PAUSE_MIN, |rail| rail.pause)
    }

    /// Whether some address is still to be tried.
    pub(super) fn has_rails_to_try(&self) -> bool {
        self.rails.iter().any(|rail| rail.state == State::Waiting)
    }

    fn tell_rail(&mut self, peer: Peer, address: SocketAddr, event: Event) {
        let found = self.rails.iter_mut().find(|rail| (rail.peer, rail.address) == (peer, address));
        if let Some(rail) = found {
            rail.handle(event, Instant::now());
        }
    }

    pub(super) fn rail_failed(&mut self, peer: Peer, address: SocketAddr, error: &io::Error) {
        log!(Debug, "{} at {address}: {error}", self.core.address(peer));
        self.tell_rail(peer, address, Event::Failed);
    }

    /// A connection to a further address is up as link `id`.
    pub(super) fn rail_up(&mut self, peer: Peer, address: SocketAddr, id: usize) {
        self.tell_rail(peer, address, Event::Stands(id));
    }

    /// The peer has connected to us, between the addresses `ends`, as link `id`: there is no need to try the other way round.
    pub(super) fn rail_met(&mut self, peer: Peer, ends: Option<(IpAddr, IpAddr)>, id: usize) {
        if let Some(rail) = self.rail_between(peer, ends) {
            rail.handle(Event::Stands(id), Instant::now());
        }
    }

    /// Link `id` of `peer`, which joined the addresses `ends`, is lost: if it was to a further address, that is tried again.
    pub(super) fn rail_lost(
        &mut self,
        peer: Peer,
        ends: Option<(IpAddr, IpAddr)>,
        id: usize,
    ) -> bool {
        let is_up = self.rails.iter().position(|rail| rail.state == State::Up(id));
        let rail = match is_up {
            Some(place) => Some(&mut self.rails[place]),
            None => self.rail_between(peer, ends),
        };
        let Some(rail) = rail else {
            return false;
        };
        rail.handle(Event::Lost(id), Instant::now());
        true
    }

    /// Whether a connection between `ends` leads to a further address: of the peer, or of ours if it `is_theirs`.
    pub(super) fn is_rail(
        &mut self,
        peer: Peer,
        ends: Option<(IpAddr, IpAddr)>,
        is_theirs: bool,
    ) -> bool {
        let (main, further) = (self.identity.ip, &self.identity.rails);
        let is_ours = ends.is_some_and(|(own, _)| own != main && further.contains(&own));
        (is_theirs && is_ours) || self.rail_between(peer, ends).is_some()
    }

    #[cfg(test)]
    pub(super) fn expect_rail_for_tests(&mut self, peer: Peer, address: SocketAddr) {
        self.rails.push(Rail::new(peer, address, false, Instant::now()));
    }

    fn rail_between(&mut self, peer: Peer, ends: Option<(IpAddr, IpAddr)>) -> Option<&mut Rail> {
        let (_, ip) = ends?;
        self.rails.iter_mut().find(|rail| rail.peer == peer && rail.address.ip() == ip)
    }

    /// Whether a direct path of `peer` joins the same two addresses as `ends`, and over which link.
    pub(super) fn twin(&self, peer: Peer, ends: Option<(IpAddr, IpAddr)>) -> Option<usize> {
        let ends = ends?;
        let links = self.neighbours[peer.0 as usize].routes.iter().map(|route| route.link);
        links.into_iter().find(|&id| {
            self.links[id].as_ref().is_some_and(|link| link.is_stream() && link.ends == Some(ends))
        })
    }

    /// The direct paths of `peer` have changed: several share the work in small pieces, a single one takes all.
    pub(super) fn share_work(&mut self, peer: Peer) {
        let neighbour = &mut self.neighbours[peer.0 as usize];
        let may_pull = neighbour.readable.is_some();
        let through_relay = neighbour.routes.iter().find(|route| route.path == RELAY_PATH);
        let direct = neighbour.routes.iter().rfind(|route| route.path != RELAY_PATH);
        if let (Some(relay), Some(direct), Out::Up(link)) = (through_relay, direct, neighbour.out)
            && relay.link == link
        {
            neighbour.out = Out::Up(direct.link);
        }
        let mut seen = Vec::new();
        let mut several = false;
        for route in &neighbour.routes {
            let ends = self.links[route.link].as_ref().and_then(|link| link.ends);
            several |= route.path != RELAY_PATH && !seen.is_empty() && !seen.contains(&ends);
            if route.path != RELAY_PATH {
                seen.push(ends);
            }
        }
        let routes = self.neighbours[peer.0 as usize].routes.clone();
        let is_direct = |route: &Route| route.path != RELAY_PATH && self.may_carry(route.link);
        let has_direct = routes.iter().any(is_direct);
        self.has_several |= several;
        for route in routes {
            let Some(link) = self.links[route.link].as_ref() else {
                continue;
            };
            let whole = link.traits(may_pull, self.identity.copy_max);
            let is_primary = neighbour_sends(&self.neighbours[peer.0 as usize].out, route.link);
            let is_twin = several && self.twin(peer, link.ends).is_some_and(|id| id != route.link);
            let spare = match (route.path, &link.carrier) {
                (RELAY_PATH, _) => has_direct,
                (_, Carrier::Datagram(line)) => line.is_doubted(),
                _ => self.is_covered(peer, link.ends) || (!is_primary && (!several || is_twin)),
            };
            let path = if several && link.is_stream() && route.path != RELAY_PATH {
                if let Carrier::Stream(stream) = &link.carrier {
                    stream.set_unsent_max(UNSENT_BYTES);
                }
                Path {
                    payload_max: PIECE_BYTES,
                    eager_max: PIECE_BYTES,
                    first_piece: PIECE_BYTES,
                    ahead: true,
                    spare,
                    ..whole
                }
            } else {
                Path { spare, ..whole }
            };
            self.core.set_path(peer, route.path, path);
        }
        self.core.mark_busy(peer);
    }
}

/// Where a door is.
pub fn address_of(door: &Door) -> SocketAddr {
    let ip = Ipv6Addr::from(door.ip);
    SocketAddr::new(ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4), door.port)
}

/// The door at an address of ours.
pub fn door_at(ip: IpAddr, port: u16, token: u64) -> Door {
    let ip = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    Door { ip: ip.octets(), port, token }
}

fn neighbour_sends(out: &Out, link: usize) -> bool {
    *out == Out::Up(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE_MAX: Duration = Duration::from_millis(350);
    const MILLI: Duration = Duration::from_millis(1);

    #[test]
    fn a_further_address_in_every_state_under_every_event() {
        use State::{Dialling, Theirs, Up, Waiting};
        let look = Event::Look(PAUSE_MAX);
        let states = [Theirs, Waiting, Dialling, Up(7)];
        let rows = [
            (look, true, [Theirs, Dialling, Dialling, Up(7)]),
            // Its time has not come.
            (look, false, [Theirs, Waiting, Dialling, Up(7)]),
            (Event::Failed, true, [Theirs, Waiting, Waiting, Up(7)]),
            (Event::Stands(7), true, [Up(7); 4]),
            (Event::Stands(8), true, [Up(8); 4]),
            (Event::Lost(7), true, [Waiting, Waiting, Dialling, Waiting]),
            // Another connection between the same two addresses.
            (Event::Lost(8), true, [Waiting, Waiting, Dialling, Up(7)]),
        ];
        let start = Instant::now();
        for (event, is_time, expected) in rows {
            for (state, expected) in states.into_iter().zip(expected) {
                let next = if is_time { start } else { start + MILLI };
                let mut rail = Rail { state, next, pause: 2 * PAUSE_MIN, ..some_rail(start) };
                let dials = rail.handle(event, start);
                assert_eq!(rail.state, expected, "{state:?} under {event:?}");
                assert_eq!(dials, (state, expected) == (Waiting, Dialling), "{event:?}");
                let is_fresh = expected == Waiting && matches!(state, Theirs | Up(_));
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
        assert!(!theirs.handle(Event::Look(PAUSE_MAX), start + PAUSE_MAX));
        let mut ours = Rail::new(Peer(0), theirs.address, true, start);
        let mut tried = Vec::new();
        for millis in 0..1_500 {
            if ours.handle(Event::Look(PAUSE_MAX), start + millis * MILLI) {
                tried.push(millis);
                ours.handle(Event::Failed, start + millis * MILLI);
            }
        }
        assert_eq!(tried, [0, 100, 300, 650, 1_000, 1_350]);
    }

    fn some_rail(now: Instant) -> Rail {
        Rail::new(Peer(0), "10.0.0.1:5".parse().unwrap(), true, now)
    }
}
