//! Who the others are, and the way to each.
//!
//! A peer is known by the name in the address vector or by the address in its frames, whichever comes first. The
//! way to it is chosen when something is first sent: shared memory on the same node, TCP inside the
//! cluster, the cluster's relay otherwise; a way that fails makes room for the next. A connection
//! that the peer makes meanwhile is as good as our own.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};

use landbridge_drive::link::shm::Mapper;
use landbridge_proto::endpoint::{Path, Peer};
use landbridge_proto::id::Address;
use landbridge_proto::limit;
use landbridge_proto::wire::hello::{Introduction, Role};
use landbridge_proto::wire::name::{NAME_BYTES, Name};

use super::Engine;
use super::handshake::{Carrier, Handshake, Up};
use super::identity::{Identity, RelayWay, hash, random};
use super::links::{self, Link};
use crate::abi::{Errno, FiAddr};
use crate::arena;
use crate::log;

pub type NameBytes = [u8; NAME_BYTES];

/// Strangers whose hello is under way; more wait in the listening queue.
const HELLOS_MAX: usize = 256;
/// How often a peer that answers the call and hangs up is called again.
const DIAL_RETRIES: u8 = 5;
/// How long opening an endpoint waits for the relay, so that peers which speak first find us attached.
const ATTACH_TIME_MAX: Duration = Duration::from_secs(5);
/// Connections that may wait to be accepted: a whole large node connecting at once.
const BACKLOG: i32 = 1024;

/// This endpoint, as others see it.
pub struct Own {
    pub address: Address,
    pub name: NameBytes,
    pub own_format: bool,
    tcp: Option<OwnedFd>,
    unix: Option<OwnedFd>,
    introduction: Introduction,
    /// Peers try to read this to find out whether they may.
    _cookie: Box<u64>,
}

/// A peer, as this endpoint sees it.
pub struct Neighbour {
    pub name: Option<NameBytes>,
    pub out: Out,
    /// A link that both sides should use instead, once all that was sent on the other has been taken in.
    pub better: Option<usize>,
    /// How often all ways may be tried again.
    retries: u8,
    /// Unlike that of any other endpoint which has had its name.
    instance: Option<u64>,
    /// Ways not yet tried, the best last.
    ways: Option<Vec<Way>>,
    /// Its process id, if its memory may be read.
    pub readable: Option<i32>,
    /// Its number in the address vector, once looked up.
    pub number: Option<FiAddr>,
}

/// The state of the way to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Out {
    Unknown,
    /// A connection is being made.
    Dialling,
    /// Waits for the relay's connection.
    AwaitRelay,
    Up(usize),
    /// It said goodbye, or broke off.
    Gone,
}

#[derive(Clone, Debug)]
enum Way {
    Loop,
    Shm(String),
    Tcp(SocketAddr),
    Relay,
}

/// The connection to this cluster's relay.
#[derive(Default)]
pub struct Relay {
    state: RelayState,
    tried: usize,
}

#[derive(Default, PartialEq, Eq)]
enum RelayState {
    #[default]
    Unknown,
    Dialling,
    Up(usize),
    Gone,
}

impl Relay {
    /// Whether it is in use.
    pub fn is_up(&self) -> bool {
        matches!(self.state, RelayState::Up(_))
    }
}

/// A hello under way, and what it is for.
pub struct Hello {
    pub handshake: Handshake,
    purpose: Purpose,
}

#[derive(Clone, Copy)]
enum Purpose {
    Peer(Peer),
    Relay,
    Stranger,
}

/// What epoll tells an event by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    Listener,
    UnixListener,
    Hello(usize),
    Link(usize),
}

impl Token {
    pub fn number(self) -> u64 {
        match self {
            Token::Listener => 0,
            Token::UnixListener => 1,
            Token::Hello(id) => 2 << 32 | id as u64,
            Token::Link(id) => 3 << 32 | id as u64,
        }
    }

    pub fn of(number: u64) -> Token {
        let id = number as u32 as usize;
        match number >> 32 {
            0 if id == 0 => Token::Listener,
            0 => Token::UnixListener,
            2 => Token::Hello(id),
            _ => Token::Link(id),
        }
    }
}

impl Own {
    /// Opens the doors of a new endpoint, and the epoll that watches them.
    pub fn open(
        identity: &Identity,
        own_format: bool,
        bound: Option<SocketAddrV4>,
    ) -> io::Result<(Own, OwnedFd)> {
        let epoll = high_fd(epoll::create(epoll::CreateFlags::CLOEXEC)?)?;
        let (address, unique) = identity.next_endpoint();
        let (tcp, ip, port) = open_tcp(identity, own_format, bound)?;
        let name = if own_format {
            let ip = match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            let (cluster, node) = (identity.cluster, identity.node);
            Name { address, unique, cluster, node, ip: ip.octets(), port }.emit()
        } else {
            sockaddr_name(ip, port)
        };
        let unix = if identity.paths.shm {
            Some(open_unix(&unix_name(identity, own_format, unique, port))?)
        } else {
            None
        };
        if let Some(tcp) = &tcp {
            watch(&epoll, tcp, Token::Listener, epoll::EventFlags::IN)?;
        }
        if let Some(unix) = &unix {
            watch(&epoll, unix, Token::UnixListener, epoll::EventFlags::IN)?;
        }
        let cookie = Box::new(u64::from_le_bytes(random()));
        let introduction = Introduction {
            role: Role::Endpoint,
            address,
            incarnation: 0,
            cluster: identity.cluster,
            pid: std::process::id(),
            eager_window: identity.eager_window(),
            cookie_address: (&raw const *cookie).expose_provenance() as u64,
            cookie: *cookie,
            name,
        };
        Ok((Own { address, name, own_format, tcp, unix, introduction, _cookie: cookie }, epoll))
    }

    /// What it says of itself in a hello.
    pub fn introduction(&self) -> Introduction {
        self.introduction
    }

    pub fn name(&self) -> &[u8] {
        let size = if self.own_format { NAME_BYTES } else { size_of::<libc::sockaddr_in>() };
        &self.name[..size]
    }
}

impl Neighbour {
    fn new(name: Option<NameBytes>) -> Self {
        Self {
            name,
            out: Out::Unknown,
            better: None,
            retries: DIAL_RETRIES,
            instance: None,
            ways: None,
            readable: None,
            number: None,
        }
    }
}

impl Engine {
    /// The peer with address-vector number `number`.
    #[inline]
    pub(super) fn peer_of(&mut self, number: FiAddr) -> Result<Peer, Errno> {
        match self.by_number.get(number as usize) {
            Some(&known) if known != u32::MAX => Ok(Peer(known)),
            _ => self.look_up(number),
        }
    }

    #[cold]
    fn look_up(&mut self, number: FiAddr) -> Result<Peer, Errno> {
        let name = self.av.name_of(number).ok_or(Errno::EINVAL)?;
        let peer = self.peer_named(&name).ok_or(Errno::EINVAL)?;
        let index = number as usize;
        if self.by_number.len() <= index {
            self.by_number.resize(index + 1, u32::MAX);
        }
        self.by_number[index] = peer.0;
        Ok(peer)
    }

    /// The peer with this name; `None` if it is no name.
    fn peer_named(&mut self, name: &NameBytes) -> Option<Peer> {
        let address =
            if self.own.own_format { Name::parse(name).ok()?.address } else { Address::ANONYMOUS };
        let peer = if address == Address::ANONYMOUS {
            let core = &mut self.core;
            *self.by_name.entry(*name).or_insert_with(|| core.peer(address))
        } else {
            self.core.peer(address)
        };
        self.neighbour(peer).name.get_or_insert(*name);
        Some(peer)
    }

    /// The peer whose frames carry this address.
    #[inline]
    pub(super) fn peer_addressed(&mut self, address: Address) -> Peer {
        let peer = self.core.peer(address);
        self.neighbour(peer);
        peer
    }

    #[inline]
    fn neighbour(&mut self, peer: Peer) -> &mut Neighbour {
        let index = peer.0 as usize;
        while self.neighbours.len() <= index {
            self.neighbours.push(Neighbour::new(None));
        }
        &mut self.neighbours[index]
    }

    /// The peer's number in the address vector, if it has one.
    pub(super) fn number_of(&mut self, peer: Peer) -> Option<FiAddr> {
        let neighbour = &mut self.neighbours[peer.0 as usize];
        if neighbour.number.is_none() {
            neighbour.number = self.av.addr_of(neighbour.name.as_ref()?);
        }
        neighbour.number
    }

    /// Peers to which there is a link, or soon will be.
    pub(super) fn peers_in_touch(&self) -> Vec<Peer> {
        let all = self.neighbours.iter().enumerate();
        all.filter(|(_, neighbour)| !matches!(neighbour.out, Out::Unknown | Out::Gone))
            .map(|(index, _)| Peer(index as u32))
            .collect()
    }

    /// Tries the next way to `peer`.
    #[cold]
    pub(super) fn dial(&mut self, peer: Peer) {
        let ways = match self.neighbours[peer.0 as usize].ways.take() {
            Some(ways) => ways,
            None => self.ways_to(peer),
        };
        self.neighbours[peer.0 as usize].ways = Some(ways);
        loop {
            let ways = self.neighbours[peer.0 as usize].ways.as_mut();
            let Some(way) = ways.and_then(Vec::pop) else {
                log!(Warn, "no way to peer {:?} is left", self.core.address(peer));
                self.neighbours[peer.0 as usize].out = Out::Gone;
                self.core.fail(peer, libc::EHOSTUNREACH);
                return self.drain_actions();
            };
            match self.try_way(peer, &way) {
                Ok(()) => return,
                Err(error) => log!(Info, "peer {:?}: {way:?}: {error}", self.core.address(peer)),
            }
        }
    }

    fn try_way(&mut self, peer: Peer, way: &Way) -> io::Result<()> {
        let socket = match way {
            Way::Loop => {
                self.link_up(Some(peer), Carrier::Loop, 0, false)?;
                return Ok(());
            }
            Way::Relay => return self.await_relay(peer),
            Way::Shm(name) => dial_unix(name)?,
            Way::Tcp(address) => dial_tcp(*address)?,
        };
        self.neighbours[peer.0 as usize].out = Out::Dialling;
        self.greet(socket, matches!(way, Way::Shm(_)), Purpose::Peer(peer))
    }

    /// The ways to a peer, the best last.
    fn ways_to(&self, peer: Peer) -> Vec<Way> {
        let identity = self.identity;
        let paths = identity.paths;
        let mut ways = Vec::new();
        let is_addressed = self.core.address(peer) != Address::ANONYMOUS;
        if paths.relay && !identity.relays.is_empty() && is_addressed {
            ways.push(Way::Relay);
        }
        let Some(bytes) = self.neighbours[peer.0 as usize].name else {
            return ways;
        };
        if bytes == self.own.name {
            return vec![Way::Loop];
        }
        let Some((address, unix, is_near)) = self.direct_ways(&bytes) else {
            return ways;
        };
        if paths.tcp && address.port() != 0 {
            ways.push(Way::Tcp(address));
        }
        if paths.shm && is_near {
            ways.push(Way::Shm(unix));
        }
        ways
    }

    /// Where a name says its endpoint can be reached without a relay, and whether that is on this node.
    fn direct_ways(&self, bytes: &NameBytes) -> Option<(SocketAddr, String, bool)> {
        let identity = self.identity;
        if !self.own.own_format {
            let (ip, port) = sockaddr_parts(bytes);
            let is_near = ip.is_loopback() || IpAddr::V4(ip) == identity.ip;
            let address = SocketAddr::from((ip, port));
            return Some((address, unix_name(identity, false, 0, port), is_near));
        }
        let name = Name::parse(bytes).ok()?;
        if name.cluster != identity.cluster {
            return None;
        }
        let ip = Ipv6Addr::from(name.ip);
        let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
        let unix = unix_name(identity, true, name.unique, 0);
        Some((SocketAddr::new(ip, name.port), unix, name.node == identity.node))
    }

    fn await_relay(&mut self, peer: Peer) -> io::Result<()> {
        // Before anything is dialled: the relay may answer at once.
        self.neighbours[peer.0 as usize].out = Out::AwaitRelay;
        match self.relay.state {
            RelayState::Up(id) => self.use_link(peer, id),
            RelayState::Gone => return Err(io::Error::other("the relay is gone")),
            RelayState::Unknown => self.dial_relay()?,
            RelayState::Dialling => (),
        }
        Ok(())
    }

    /// Attaches to the relay before anybody sends through it: peers in other clusters may speak first.
    pub(super) fn attach(&mut self) {
        let identity = self.identity;
        let is_wanted = identity.paths.relay && !identity.relays.is_empty();
        if !is_wanted || self.own.address == Address::ANONYMOUS {
            return;
        }
        if let Err(error) = self.dial_relay() {
            return log!(Warn, "relay: {error}");
        }
        let deadline = Instant::now() + ATTACH_TIME_MAX;
        while self.relay.state == RelayState::Dialling && Instant::now() < deadline {
            self.look(10);
        }
    }

    fn dial_relay(&mut self) -> io::Result<()> {
        let identity = self.identity;
        while let Some(way) = identity.relays.get(self.relay.tried) {
            self.relay.tried += 1;
            let (socket, is_unix) = match way {
                RelayWay::Unix(_) if !identity.paths.shm => continue,
                RelayWay::Unix(name) => (dial_unix(name), true),
                RelayWay::Tcp(address) => (dial_tcp(*address), false),
            };
            // Before the hello: it may end within the call.
            self.relay.state = RelayState::Dialling;
            let greeted = socket.and_then(|socket| self.greet(socket, is_unix, Purpose::Relay));
            match greeted {
                Ok(()) => return Ok(()),
                Err(error) => log!(Info, "relay {way:?}: {error}"),
            }
        }
        self.relay.state = RelayState::Gone;
        Err(io::Error::other("no relay answers"))
    }

    fn greet(&mut self, socket: OwnedFd, is_unix: bool, purpose: Purpose) -> io::Result<()> {
        let own = self.own.introduction();
        let handshake = match purpose {
            Purpose::Stranger => Handshake::accept(socket, is_unix, own),
            _ => Handshake::dial(socket, is_unix, self.identity, own),
        };
        let id = free_slot(&mut self.hellos);
        let mut interest = epoll::EventFlags::IN;
        if handshake.wants_write() {
            interest |= epoll::EventFlags::OUT;
        }
        watch(&self.epoll, handshake.fd(), Token::Hello(id), interest)?;
        self.hellos[id] = Some(Hello { handshake, purpose });
        self.hellos_open += 1;
        self.handle_hello(id);
        Ok(())
    }

    /// Accepts whoever waits at a door.
    pub(super) fn handle_door(&mut self, is_unix: bool) {
        while self.hellos_open < HELLOS_MAX || self.evict_stranger() {
            let door = if is_unix { &self.own.unix } else { &self.own.tcp };
            let Some(door) = door else {
                return;
            };
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let Ok(socket) = accept_with(door, flags).map_err(io::Error::from).and_then(high_fd)
            else {
                return;
            };
            if !is_unix {
                let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
            }
            if let Err(error) = self.greet(socket, is_unix, Purpose::Stranger) {
                log!(Info, "a connection was dropped: {error}");
            }
        }
    }

    /// Drops a stranger whose hello has taken long, to make room for another; false if there is none.
    fn evict_stranger(&mut self) -> bool {
        let is_idle =
            |hello: &Hello| matches!(hello.purpose, Purpose::Stranger) && hello.handshake.is_old();
        let Some(slot) = self.hellos.iter_mut().find(|slot| slot.as_ref().is_some_and(is_idle))
        else {
            return false;
        };
        *slot = None;
        self.hellos_open -= 1;
        log!(Warn, "a connection was refused: too many others wait for their hello");
        true
    }

    /// Something happened on the socket of hello `id`.
    pub(super) fn handle_hello(&mut self, id: usize) {
        let Some(mut hello) = self.hellos.get_mut(id).and_then(Option::take) else {
            return;
        };
        match hello.handshake.advance(self.identity, MAPPER) {
            Ok(None) if !hello.handshake.is_overdue() => {
                if !hello.handshake.wants_write() {
                    let flags = epoll::EventFlags::IN;
                    let data = epoll::EventData::new_u64(Token::Hello(id).number());
                    let _ = epoll::modify(&self.epoll, hello.handshake.fd(), data, flags);
                }
                self.hellos[id] = Some(hello);
            }
            Ok(None) => {
                self.hellos_open -= 1;
                let late = io::Error::new(io::ErrorKind::TimedOut, "the hello takes too long");
                self.hello_failed(hello.purpose, &late);
            }
            Ok(Some(up)) => {
                self.hellos_open -= 1;
                let outcome = self.hello_ended(hello.purpose, up);
                if let Err(error) = outcome {
                    self.hello_failed(hello.purpose, &error);
                }
            }
            Err(error) => {
                self.hellos_open -= 1;
                self.hello_failed(hello.purpose, &error);
            }
        }
    }

    /// Gives up hellos that take too long.
    pub(super) fn check_hellos(&mut self) {
        for id in 0..self.hellos.len() {
            if self.hellos[id].as_ref().is_some_and(|hello| hello.handshake.is_overdue()) {
                self.handle_hello(id);
            }
        }
    }

    fn hello_ended(&mut self, purpose: Purpose, up: Up) -> io::Result<()> {
        let Up { introduction, mut carrier } = up;
        let senseless = |why| Err(io::Error::new(io::ErrorKind::InvalidData, why));
        let peer = match (purpose, introduction.role) {
            (Purpose::Relay, Role::Relay) => None,
            (Purpose::Peer(peer), Role::Endpoint) => {
                let expected = self.core.address(peer);
                if introduction.address != expected {
                    return senseless("somebody else answers at the peer's address");
                }
                Some(peer)
            }
            (Purpose::Stranger, Role::Endpoint) => match self.peer_introduced(&introduction) {
                Some(peer) => Some(peer),
                None => return senseless("a peer without a name"),
            },
            _ => return senseless("it plays another role than expected"),
        };
        if let Some(peer) = peer {
            self.recognise(peer, &introduction)?;
        }
        if let Carrier::Shm(link) = &mut carrier
            && let Some(peer) = peer
            && let Ok(pid) = link.peer_pid()
            && links::may_read(pid, &introduction)
        {
            self.neighbours[peer.0 as usize].readable = Some(pid);
        }
        self.link_up(peer, carrier, introduction.pid, matches!(purpose, Purpose::Stranger))?;
        Ok(())
    }

    /// Once a peer has introduced itself, nobody else is taken for it.
    ///
    /// # Errors
    /// Another endpoint goes by its address. What was sent and received so far was with the first one, so this one
    /// cannot go on with it.
    pub(super) fn recognise(&mut self, peer: Peer, introduction: &Introduction) -> io::Result<()> {
        let neighbour = &mut self.neighbours[peer.0 as usize];
        if *neighbour.instance.get_or_insert(introduction.cookie) == introduction.cookie {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::AddrInUse, "another endpoint goes by the peer's address"))
    }

    pub(super) fn peer_introduced(&mut self, introduction: &Introduction) -> Option<Peer> {
        if introduction.address == Address::ANONYMOUS {
            let peer = self.peer_named(&introduction.name)?;
            let known = self.neighbours[peer.0 as usize].instance;
            let is_another = known.is_some_and(|known| known != introduction.cookie);
            if is_another || self.core.failed(peer).is_some() {
                self.forget_name(peer, &introduction.name);
            }
            return self.peer_named(&introduction.name);
        }
        let peer = self.peer_addressed(introduction.address);
        self.neighbour(peer).name.get_or_insert(introduction.name);
        Some(peer)
    }

    /// The endpoint that had this name is gone and another has it now (an address of IP and port can be used again):
    /// from now on the name means the new one.
    fn forget_name(&mut self, peer: Peer, name: &NameBytes) {
        self.neighbours[peer.0 as usize].out = Out::Gone;
        self.core.fail(peer, libc::ECONNRESET);
        self.drain_actions();
        self.by_name.remove(name);
        for number in &mut self.by_number {
            if *number == peer.0 {
                *number = u32::MAX;
            }
        }
    }

    fn hello_failed(&mut self, purpose: Purpose, error: &io::Error) {
        match purpose {
            Purpose::Stranger => log!(Warn, "a connection was refused: {error}"),
            Purpose::Peer(peer) => {
                log!(Info, "peer {:?}: hello: {error}", self.core.address(peer));
                let neighbour = &mut self.neighbours[peer.0 as usize];
                if neighbour.out == Out::Dialling {
                    if error.kind() == io::ErrorKind::UnexpectedEof && neighbour.retries > 0 {
                        // It was there and let go of us, perhaps because too many came at once.
                        neighbour.retries -= 1;
                        neighbour.ways = None;
                    }
                    self.dial(peer);
                }
            }
            Purpose::Relay => {
                log!(Warn, "relay: {error}");
                if self.dial_relay().is_err() {
                    self.relay_gone();
                }
            }
        }
    }

    /// A link is ready: peers that wait for it go on.
    fn link_up(
        &mut self,
        peer: Option<Peer>,
        carrier: Carrier,
        pid: u32,
        is_dialled_by_peer: bool,
    ) -> io::Result<usize> {
        let id = free_slot(&mut self.links);
        let link = Link::new(carrier, peer);
        link.watch(&self.epoll, id)?;
        match link.carrier {
            Carrier::Shm(_) => self.rings.push(id),
            Carrier::Stream(_) => self.streams += 1,
            Carrier::Loop => (),
        }
        let what = link.describe();
        self.links[id] = Some(Box::new(link));
        let Some(peer) = peer else {
            log!(Info, "relay: {what}");
            self.relay.state = RelayState::Up(id);
            for index in 0..self.neighbours.len() {
                if self.neighbours[index].out == Out::AwaitRelay {
                    self.use_link(Peer(index as u32), id);
                }
            }
            return Ok(id);
        };
        log!(Info, "peer {:?} (process {pid}): {what}", self.core.address(peer));
        let neighbour = &mut self.neighbours[peer.0 as usize];
        // If both sides dialled, one connection serves both directions better (confirmations travel with data): the one
        // whose dialler has the smaller name.
        let is_smaller = Some(self.own.name) < neighbour.name;
        if !matches!(neighbour.out, Out::Up(_)) {
            self.use_link(peer, id);
        } else if is_smaller != is_dialled_by_peer {
            neighbour.better = Some(id);
        }
        Ok(id)
    }

    /// Sends to `peer` over link `id` from now on.
    pub(super) fn use_link(&mut self, peer: Peer, id: usize) {
        let Some(link) = self.links[id].as_ref() else {
            return;
        };
        let may_pull = self.neighbours[peer.0 as usize].readable.is_some();
        self.core.set_path(peer, link.path(may_pull));
        self.neighbours[peer.0 as usize].out = Out::Up(id);
        self.neighbours[peer.0 as usize].better = None;
        self.core.mark_busy(peer);
    }

    /// Nothing more comes from or goes to the relay.
    pub(super) fn relay_gone(&mut self) {
        let was = std::mem::replace(&mut self.relay.state, RelayState::Gone);
        for index in 0..self.neighbours.len() {
            let out = self.neighbours[index].out;
            let lost = out == Out::AwaitRelay
                || matches!((&was, out), (RelayState::Up(relay), Out::Up(id)) if *relay == id);
            if lost {
                self.neighbours[index].out = Out::Gone;
                self.core.fail(Peer(index as u32), libc::EHOSTUNREACH);
            }
        }
        self.drain_actions();
    }
}

/// The index of an empty place.
fn free_slot<T>(slots: &mut Vec<Option<T>>) -> usize {
    slots.iter().position(Option::is_none).unwrap_or_else(|| {
        slots.push(None);
        slots.len() - 1
    })
}

/// Watches `fd` for `interest`; replaces what was watched on it before.
pub fn watch(
    epoll: &OwnedFd,
    fd: impl AsFd,
    token: Token,
    interest: epoll::EventFlags,
) -> io::Result<()> {
    let data = epoll::EventData::new_u64(token.number());
    match epoll::add(epoll, fd.as_fd(), data, interest) {
        Err(rustix::io::Errno::EXIST) => epoll::modify(epoll, fd, data, interest)?,
        other => other?,
    }
    Ok(())
}

/// Descriptors whose numbers depend on the network stay away from the low numbers, which programs see.
fn high_fd(fd: OwnedFd) -> io::Result<OwnedFd> {
    const LOWEST: i32 = 512;
    match rustix::io::fcntl_dupfd_cloexec(&fd, LOWEST) {
        Ok(high) => Ok(high),
        // The limit of open files is lower than that: keep the number.
        Err(rustix::io::Errno::INVAL) => Ok(fd),
        Err(error) => Err(error.into()),
    }
}

fn open_tcp(
    identity: &Identity,
    own_format: bool,
    bound: Option<SocketAddrV4>,
) -> io::Result<(Option<OwnedFd>, IpAddr, u16)> {
    if !identity.paths.tcp && own_format {
        return Ok((None, identity.ip, 0));
    }
    let at = bound.map_or_else(|| any_address(identity.ip), SocketAddr::V4);
    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = high_fd(socket_with(family, SocketType::STREAM, flags, None)?)?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &at)?;
    listen(&socket, BACKLOG)?;
    let local: SocketAddr = rustix::net::getsockname(&socket)?
        .try_into()
        .map_err(|_| io::Error::other("a socket without an address"))?;
    let ip = if at.ip().is_unspecified() { identity.ip } else { at.ip() };
    Ok((Some(socket), ip, local.port()))
}

fn any_address(like: IpAddr) -> SocketAddr {
    match like {
        IpAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        IpAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    }
}

fn dial_tcp(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = high_fd(socket_with(family, SocketType::STREAM, flags, None)?)?;
    rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
    match connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}

fn open_unix(name: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = high_fd(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn dial_unix(name: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = high_fd(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(socket)
}

/// The abstract Unix socket of an endpoint: found by whoever knows its name.
fn unix_name(identity: &Identity, own_format: bool, unique: u64, port: u16) -> String {
    let job = hash(&[&identity.job.0]);
    if own_format {
        format!("landbridge-{job:016x}-{unique:016x}")
    } else {
        format!("landbridge-{job:016x}-port-{port}")
    }
}

fn sockaddr_name(ip: IpAddr, port: u16) -> NameBytes {
    let mut name = [0; NAME_BYTES];
    let IpAddr::V4(ip) = ip else {
        return name;
    };
    name[0..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    name[2..4].copy_from_slice(&port.to_be_bytes());
    name[4..8].copy_from_slice(&ip.octets());
    name
}

fn sockaddr_parts(name: &NameBytes) -> (Ipv4Addr, u16) {
    let ip = Ipv4Addr::new(name[4], name[5], name[6], name[7]);
    (ip, u16::from_be_bytes([name[2], name[3]]))
}

/// The path of frames through shared memory.
pub fn ring_path(may_pull: bool) -> Path {
    let payload_max = (links::RING_PAYLOAD_MAX) as u32;
    let eager_max = if may_pull { links::RING_EAGER_MAX } else { payload_max };
    Path { payload_max, eager_max, first_piece: payload_max, pull: may_pull, window: u64::MAX }
}

const _: () = assert!(links::RING_PAYLOAD_MAX >= limit::RELAY_PAYLOAD_BYTES_MAX);

/// Rings lie in the provider's own stretch of addresses (decision 8).
const MAPPER: Mapper = Mapper {
    map: |file, size| {
        arena::map_fd(file, size).map_err(|errno| io::Error::from_raw_os_error(errno.0))
    },
    // SAFETY: called once by the link that mapped it, when it is dropped.
    unmap: |start, _| unsafe { arena::unmap(start) },
};
