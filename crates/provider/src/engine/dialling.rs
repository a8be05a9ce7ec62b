//! Path candidates of each peer, and the hellos on new connections.
//!
//! The engine chooses a candidate when the first frame for a peer is to be sent: shared memory on
//! the same node, TCP inside the cluster, the cluster's relay otherwise. A candidate that fails is
//! followed by the next one. A connection that the peer dials meanwhile is equally good. Every
//! connection begins with a hello; when the hello has succeeded, the link is up, and waiting frames
//! are sent.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll;

use landbridge_drive::checksum::Checksum;
use landbridge_drive::link::shm::Mapper;
use landbridge_drive::refusals::Refusals;
use landbridge_drive::sys::now_millis;
use landbridge_proto::channel::{PATHS_MAX, PathId};
use landbridge_proto::endpoint::{PathProperties, Peer};
use landbridge_proto::id::Address;
use landbridge_proto::limit;
use landbridge_proto::wire::hello::{Introduction, Role};
use landbridge_proto::wire::name::Name;

use super::Engine;
use super::handshake::{Carrier, EstablishedLink, Handshake};
use super::links::{self, Link};
use super::local_endpoint::{NameBytes, dial_tcp, dial_unix, sockaddr_parts, unix_name};
use super::memory::may_read;
use super::peer_state::{OpenPath, SendState};
use super::rails;
use super::reconnect::Reconnect;
use crate::arena;
use crate::log;

/// Maximum number of dials under way; further peers wait for their turn. A peer's listener has
/// slots for twice as many pending connections, so that two dialling processes find free slots.
const DIALS_MAX: usize = 128;

/// A candidate path to a peer.
#[derive(Clone, Debug)]
pub enum PathCandidate {
    Loopback,
    Shm(String),
    Tcp(SocketAddr),
    /// A further address, for the case that the first TCP address does not answer.
    Further(SocketAddr),
    Relay,
}

/// The addresses of an endpoint without a relay, according to the endpoint's name.
struct DirectAddresses {
    address: SocketAddr,
    further: Vec<SocketAddr>,
    unix: String,
    /// Whether the endpoint is on this node.
    is_on_this_node: bool,
}

/// A hello under way, and its purpose.
pub struct Hello {
    pub handshake: Handshake,
    pub(super) purpose: HelloPurpose,
}

/// All hellos under way.
#[derive(Default)]
pub struct Hellos {
    /// Number of hellos under way and paused listeners, which need regular checks.
    pub(super) open: usize,
    pub(super) slots: Vec<Option<Hello>>,
    pub(super) pending: usize,
    /// Number of hellos that this process has dialled, including dials to the relay.
    dials: usize,
    /// Peers to be dialled when another dial has ended.
    waiting: VecDeque<Peer>,
    /// Whether the TCP listener and the Unix listener are paused.
    pub(super) paused_listeners: [bool; 2],
    /// A log line has reported that a listener is paused for want of descriptors.
    pub(super) has_warned: bool,
    /// Refused connections of other processes, for the log.
    pub(super) refusals: Refusals,
}

impl Hellos {
    /// A number that no hello has.
    fn free_slot(&mut self) -> usize {
        self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        })
    }

    fn count(&mut self, purpose: HelloPurpose) -> &mut usize {
        match purpose {
            HelloPurpose::Accepted => &mut self.pending,
            HelloPurpose::Peer(_) | HelloPurpose::Rail(..) | HelloPurpose::Relay => &mut self.dials,
        }
    }
}

#[derive(Clone, Copy)]
pub enum HelloPurpose {
    Peer(Peer),
    /// A further address of a peer that has a link already.
    Rail(Peer, SocketAddr),
    Relay,
    Accepted,
}

/// The token that epoll returns with an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventToken {
    Listener,
    UnixListener,
    Hello(usize),
    Link(usize),
    /// A UDP socket.
    Datagrams(usize),
}

impl EventToken {
    pub fn number(self) -> u64 {
        match self {
            EventToken::Listener => 0,
            EventToken::UnixListener => 1,
            EventToken::Hello(id) => 2 << 32 | id as u64,
            EventToken::Link(id) => 3 << 32 | id as u64,
            EventToken::Datagrams(socket) => 4 << 32 | socket as u64,
        }
    }

    pub fn of(number: u64) -> EventToken {
        let id = number as u32 as usize;
        match number >> 32 {
            0 if id == 0 => EventToken::Listener,
            0 => EventToken::UnixListener,
            2 => EventToken::Hello(id),
            4 => EventToken::Datagrams(id),
            _ => EventToken::Link(id),
        }
    }
}

impl Engine {
    /// Dials the next candidate for `peer`.
    #[cold]
    pub(super) fn dial(&mut self, peer: Peer) {
        let candidates = match self.peers[peer].candidates.take() {
            Some(candidates) => candidates,
            None => self.candidates_for(peer),
        };
        let peer_state = &mut self.peers[peer];
        peer_state.candidates = Some(candidates);
        peer_state.is_dialling = true;
        loop {
            let peer_state = &mut self.peers[peer];
            let Some(candidate) = peer_state.candidates.as_mut().and_then(Vec::pop) else {
                peer_state.is_dialling = false;
                if peer_state.reconnect.is_some() {
                    return self.reconnect_later(peer);
                }
                if !peer_state.open_paths.is_empty() {
                    // The peer has connected to this process meanwhile.
                    return;
                }
                let (address, ip) = (self.core.address(peer), self.identity.ip);
                log!(Warn, "no way to {address} is left (this process is at {ip})");
                return self.fail_peer(peer, libc::EHOSTUNREACH);
            };
            if matches!(candidate, PathCandidate::Further(_)) && !peer_state.open_paths.is_empty() {
                // The peer has connected to this process meanwhile, and advertises its further
                // addresses itself.
                continue;
            }
            peer_state.is_further_address = matches!(candidate, PathCandidate::Further(_));
            match self.try_candidate(peer, &candidate) {
                Ok(()) => return,
                Err(error) => {
                    log!(Info, "{}: {candidate:?}: {error}", self.core.address(peer));
                    self.note_attempt(peer, &error);
                }
            }
        }
    }

    fn try_candidate(&mut self, peer: Peer, candidate: &PathCandidate) -> io::Result<()> {
        let socket = match candidate {
            PathCandidate::Loopback => {
                self.link_up(Some(peer), Carrier::Loopback, 0, false)?;
                return Ok(());
            }
            PathCandidate::Relay => {
                self.await_relay(peer)?;
                self.peers[peer].is_dialling = false;
                return Ok(());
            }
            _ if self.hellos.dials >= DIALS_MAX => {
                self.queue_dial(peer, candidate);
                return Ok(());
            }
            PathCandidate::Shm(name) => dial_unix(name)?,
            PathCandidate::Tcp(address) | PathCandidate::Further(address) => dial_tcp(*address)?,
        };
        self.set_send_state(peer, SendState::Dialling);
        self.start_handshake(
            socket,
            matches!(candidate, PathCandidate::Shm(_)),
            HelloPurpose::Peer(peer),
        )
    }

    /// Sets the state of frames for `peer`, unless an open path sends them.
    pub(super) fn set_send_state(&mut self, peer: Peer, out: SendState) {
        let peer_state = &mut self.peers[peer];
        if !matches!(peer_state.send_state, SendState::Up(_)) {
            peer_state.send_state = out;
        }
    }

    /// Queues `peer` for a dial when another dial has ended, because too many dials are under way.
    fn queue_dial(&mut self, peer: Peer, candidate: &PathCandidate) {
        self.set_send_state(peer, SendState::DialQueued);
        let peer_state = &mut self.peers[peer];
        peer_state.candidates.get_or_insert_default().push(candidate.clone());
        self.hellos.waiting.push_back(peer);
    }

    /// Dials queued peers while fewer than [`DIALS_MAX`] dials are under way. Some of these peers
    /// have connected to this process meanwhile.
    fn dial_waiting(&mut self) {
        // A dial may end within the call and enter this function again; the queue is then empty.
        let mut waiting = std::mem::take(&mut self.hellos.waiting);
        while self.hellos.dials < DIALS_MAX
            && let Some(peer) = waiting.pop_front()
        {
            if self.peers[peer].is_dialling {
                self.dial(peer);
            }
        }
        waiting.append(&mut self.hellos.waiting);
        self.hellos.waiting = waiting;
    }

    /// The candidates for a peer, in reverse order: the best is the last.
    fn candidates_for(&self, peer: Peer) -> Vec<PathCandidate> {
        let identity = self.identity;
        let paths = identity.paths;
        let mut candidates = Vec::new();
        let is_addressed = self.core.address(peer) != Address::ANONYMOUS;
        // The relay is a candidate only for a peer without any other usable path, and is needed
        // once.
        let open_paths = &self.peers[peer].open_paths;
        let has_path = open_paths.iter().any(|open_path| self.may_carry(open_path.link));
        if paths.relay && !identity.relays.is_empty() && is_addressed && !has_path {
            candidates.push(PathCandidate::Relay);
        }
        let Some(bytes) = self.peers[peer].name else {
            return candidates;
        };
        if bytes == self.own.name {
            return vec![PathCandidate::Loopback];
        }
        if identity.recovers {
            return candidates;
        }
        let Some(direct) = self.direct_candidates(&bytes) else {
            return candidates;
        };
        if paths.tcp && direct.address.port() != 0 {
            if open_paths.is_empty() && !direct.is_on_this_node {
                let further =
                    direct.further.iter().rev().filter(|to| self.is_worth_dialling(peer, to));
                candidates.extend(further.map(|&address| PathCandidate::Further(address)));
            }
            candidates.push(PathCandidate::Tcp(direct.address));
        }
        if paths.shm && direct.is_on_this_node {
            candidates.push(PathCandidate::Shm(direct.unix));
        }
        candidates
    }

    /// Whether a further address of `peer`, a peer on another node without a path, is worth
    /// dialling. The address must be allowed, must not be an address of this node as well (bridges
    /// of containers), and must not be tried as an advertised rail already.
    pub(super) fn is_worth_dialling(&self, peer: Peer, address: &SocketAddr) -> bool {
        let (identity, ip) = (self.identity, address.ip());
        identity.rail_networks.iter().any(|network| network.contains(ip))
            && ip != identity.ip
            && !identity.rails.contains(&ip)
            && !self.is_rail_advertised(peer, *address)
    }

    fn direct_candidates(&self, bytes: &NameBytes) -> Option<DirectAddresses> {
        let identity = self.identity;
        if !self.own.own_format {
            let (ip, port) = sockaddr_parts(bytes);
            let is_on_this_node = ip.is_loopback() || IpAddr::V4(ip) == identity.ip;
            let address = SocketAddr::from((ip, port));
            let unix = unix_name(identity, false, 0, port);
            return Some(DirectAddresses { address, further: Vec::new(), unix, is_on_this_node });
        }
        let name = Name::parse(bytes).ok()?;
        if name.cluster != identity.cluster {
            return None;
        }
        let ip = Ipv6Addr::from(name.ip);
        let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
        let unix = unix_name(identity, true, name.unique, 0);
        let known = name.further.into_iter().filter(|further| *further != [0; 4]);
        let further = known.map(|further| SocketAddr::from((further, name.port))).collect();
        let (address, is_on_this_node) =
            (SocketAddr::new(ip, name.port), name.node == identity.node);
        Some(DirectAddresses { address, further, unix, is_on_this_node })
    }

    pub(super) fn start_handshake(
        &mut self,
        socket: OwnedFd,
        is_unix: bool,
        purpose: HelloPurpose,
    ) -> io::Result<()> {
        let own = self.own.introduction;
        let handshake = match purpose {
            HelloPurpose::Accepted => Handshake::accept(socket, is_unix, own),
            HelloPurpose::Peer(_) | HelloPurpose::Rail(..) => {
                let dialled = Handshake::dial(socket, is_unix, self.identity, own);
                match self.pause_after(purpose) {
                    Some(pause) => dialled.with_connect_time(pause),
                    None => dialled,
                }
            }
            HelloPurpose::Relay => Handshake::dial_relay(socket, is_unix, self.identity, own),
        };
        let id = self.hellos.free_slot();
        let mut interest = epoll::EventFlags::IN;
        if handshake.wants_write() {
            interest |= epoll::EventFlags::OUT;
        }
        watch(&self.own.epoll, handshake.fd(), EventToken::Hello(id), interest)?;
        self.hellos.slots[id] = Some(Hello { handshake, purpose });
        self.hellos.open += 1;
        *self.hellos.count(purpose) += 1;
        self.handle_hello(id);
        Ok(())
    }

    /// The pause until the next attempt, if this hello is one of several attempts.
    fn pause_after(&self, purpose: HelloPurpose) -> Option<Duration> {
        match purpose {
            HelloPurpose::Rail(peer, address) => Some(self.rail_pause(peer, address)),
            HelloPurpose::Peer(peer) => {
                let peer_state = &self.peers[peer];
                let is_further =
                    |candidate: &PathCandidate| matches!(candidate, PathCandidate::Further(_));
                let has_further = peer_state.candidates.iter().flatten().any(is_further);
                let is_one_of_several = has_further || peer_state.is_further_address;
                let alone = is_one_of_several.then_some(Duration::ZERO);
                peer_state.reconnect.as_ref().map(Reconnect::pause).or(alone)
            }
            _ => None,
        }
    }

    /// Continues hello `id` after an event on its socket.
    pub(super) fn handle_hello(&mut self, id: usize) {
        let Some(mut hello) = self.hellos.slots.get_mut(id).and_then(Option::take) else {
            return;
        };
        let outcome = hello.handshake.advance(self.identity, MAPPER);
        if let Ok(None) = outcome
            && !hello.handshake.is_overdue()
        {
            if !hello.handshake.wants_write() {
                let flags = epoll::EventFlags::IN;
                let data = epoll::EventData::new_u64(EventToken::Hello(id).number());
                let _ = epoll::modify(&self.own.epoll, hello.handshake.fd(), data, flags);
            }
            self.hellos.slots[id] = Some(hello);
            return;
        }
        let purpose = hello.purpose;
        let remote = hello.handshake.remote();
        // The hello's socket must be closed before another hello takes its slot.
        drop(hello);
        self.hello_closed(purpose);
        let outcome = match outcome {
            Ok(Some(up)) => self.hello_ended(purpose, up),
            Ok(None) => Err(io::Error::new(io::ErrorKind::TimedOut, "the hello takes too long")),
            Err(error) => Err(error),
        };
        if let Err(error) = outcome {
            self.hello_failed(purpose, remote, &error);
        }
        self.dial_waiting();
    }

    pub(super) fn hello_closed(&mut self, purpose: HelloPurpose) {
        self.hellos.open -= 1;
        *self.hellos.count(purpose) -= 1;
        self.resume_listeners();
    }

    /// Resumes paused listeners, and ends hellos that take too long.
    pub(super) fn check_hellos(&mut self) {
        self.resume_listeners();
        self.log_refusals(now_millis());
        for id in 0..self.hellos.slots.len() {
            let slot = self.hellos.slots[id].as_ref();
            if slot.is_some_and(|hello| hello.handshake.is_overdue()) {
                self.handle_hello(id);
            }
        }
    }

    fn hello_ended(&mut self, purpose: HelloPurpose, up: EstablishedLink) -> io::Result<()> {
        let EstablishedLink { introduction, mut carrier } = up;
        let senseless = |why| Err(io::Error::new(io::ErrorKind::InvalidData, why));
        let peer = match (purpose, introduction.role) {
            (HelloPurpose::Relay, Role::Relay) => None,
            (HelloPurpose::Peer(peer) | HelloPurpose::Rail(peer, _), Role::Endpoint) => {
                if !self.is_expected_peer(peer, &introduction) {
                    return senseless("somebody else answers at the peer's address");
                }
                Some(peer)
            }
            (HelloPurpose::Accepted, Role::Endpoint) => match self.peer_introduced(&introduction) {
                Some(peer) => Some(peer),
                None => return senseless("a peer without a name"),
            },
            _ => return senseless("it plays another role than expected"),
        };
        if let Some(peer) = peer {
            self.recognise(peer, &introduction)?;
            // Jobs that connect later may differ in size, and so in the eager credit that they
            // give.
            self.core.channel_mut(peer).set_eager_window(introduction.eager_window);
        }
        if let Carrier::Shm(link) = &mut carrier
            && let Some(peer) = peer
            && let Ok(pid) = link.peer_pid()
            && may_read(pid, &introduction)
        {
            self.peers[peer].readable = Some(pid);
        }
        let is_accepted = matches!(purpose, HelloPurpose::Accepted);
        // The dial has ended, at whichever address the peer answered.
        self.set_dialling(purpose, false);
        let id = match self.link_up(peer, carrier, introduction.pid, is_accepted) {
            Ok(id) => id,
            Err(error) => {
                self.set_dialling(purpose, true);
                return Err(error);
            }
        };
        match (purpose, peer) {
            (HelloPurpose::Rail(peer, address), _) => self.rail_up(peer, address, id),
            (HelloPurpose::Accepted, Some(peer)) => {
                let ends = self.links[id].as_ref().and_then(|link| link.ends);
                self.rail_accepted(peer, ends, id);
            }
            _ => (),
        }
        Ok(())
    }

    fn set_dialling(&mut self, purpose: HelloPurpose, is_dialling: bool) {
        if let HelloPurpose::Peer(peer) = purpose {
            self.peers[peer].is_dialling = is_dialling;
        }
    }

    /// Whether the process that answered is the dialled peer. Addresses are reused: an IP address
    /// and port after the end of a process; and processes without the Landbridge launcher may all
    /// belong to one job.
    fn is_expected_peer(&self, peer: Peer, introduction: &Introduction) -> bool {
        let name = self.peers[peer].name;
        // A socket address says less than a name, and the same endpoint may have several.
        let is_named = !self.own.own_format || name.is_none_or(|name| name == introduction.name);
        introduction.address == self.core.address(peer) && is_named
    }

    fn hello_failed(
        &mut self,
        purpose: HelloPurpose,
        remote: Option<SocketAddr>,
        error: &io::Error,
    ) {
        match purpose {
            HelloPurpose::Accepted => self.refuse_connection(remote, error),
            HelloPurpose::Peer(peer) => {
                log!(Info, "{}: hello: {error}", self.core.address(peer));
                self.note_attempt(peer, error);
                let peer_state = &mut self.peers[peer];
                if peer_state.is_dialling {
                    if error.kind() == io::ErrorKind::UnexpectedEof && peer_state.retries > 0 {
                        // The listener closed the connection, perhaps because too many connections
                        // arrived at once.
                        peer_state.retries -= 1;
                        peer_state.candidates = None;
                    }
                    self.dial(peer);
                }
            }
            HelloPurpose::Rail(peer, address) => self.rail_failed(peer, address, error),
            HelloPurpose::Relay => {
                log!(Warn, "relay: {error}");
                if self.dial_relay().is_err() {
                    self.relay_refused(error);
                }
            }
        }
    }

    /// Puts an established link into use: peers that wait for the link continue.
    pub(super) fn link_up(
        &mut self,
        peer: Option<Peer>,
        carrier: Carrier,
        pid: u32,
        is_dialled_by_peer: bool,
    ) -> io::Result<usize> {
        let mut link = Link::new(carrier, peer);
        link.sum = match &link.carrier {
            // Frames to the relay continue over networks.
            Carrier::Shm(_) if peer.is_some() => self.identity.integrity_shm,
            Carrier::Shm(_) => self.identity.integrity,
            Carrier::Stream(_) | Carrier::Recorded(_) | Carrier::Datagram(_) => {
                self.identity.integrity
            }
            Carrier::Loopback => Checksum::Off,
        };
        if let (Carrier::Stream(stream), Some(_)) = (&link.carrier, peer) {
            link.ends = rails::ends_of(stream.fd());
        }
        link.is_accepted = is_dialled_by_peer;
        let ends = link.ends;
        let id = self.links.free_slot();
        link.watch(&self.own.epoll, id)?;
        match link.carrier {
            Carrier::Shm(_) | Carrier::Recorded(_) => self.links.rings.push(id),
            Carrier::Stream(_) => self.links.streams += 1,
            Carrier::Datagram(_) | Carrier::Loopback => (),
        }
        let what = link.describe();
        self.links[id] = Some(Box::new(link));
        let Some(peer) = peer else {
            log!(Info, "relay: {what}");
            self.relay_up(id);
            return Ok(id);
        };
        log!(Info, "{} (process {pid}): {what}", self.core.address(peer));
        if !self.add_path(peer, id) {
            self.close_link(id);
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, "enough paths lead there"));
        }
        // The engine redials the peer's first address. A connection to a further address does not
        // replace it.
        if !self.is_rail(peer, ends, is_dialled_by_peer) {
            let peer_state = &mut self.peers[peer];
            peer_state.is_dialling &= is_dialled_by_peer;
            peer_state.reconnect = None;
        }
        // If both sides have dialled, a single connection serves both directions better, because
        // confirmations travel with data: the connection whose dialler has the smaller name.
        let is_smaller = Some(self.own.name) < self.peers[peer].name;
        let has_duplicate = self.drop_broken_duplicates(peer, id);
        let is_up = matches!(self.peers[peer].send_state, SendState::Up(_));
        if !(is_up && has_duplicate && is_smaller == is_dialled_by_peer) {
            self.use_link(peer, id);
        }
        self.restripe(peer);
        self.advertise_rails(peer, id);
        self.advertise_udp(peer, id);
        Ok(id)
    }

    /// Makes link `id` the sending path of `peer`.
    pub(super) fn use_link(&mut self, peer: Peer, id: usize) {
        if self.add_path(peer, id) {
            self.peers[peer].send_state = SendState::Up(id);
            self.core.channel_mut(peer).mark_busy();
        }
    }

    /// Adds link `id` to the peer's paths; returns false if the link is closed, or the peer has too
    /// many paths.
    pub(super) fn add_path(&mut self, peer: Peer, id: usize) -> bool {
        let peer_state = &mut self.peers[peer];
        if peer_state.open_paths.iter().any(|open_path| open_path.link == id) {
            return true;
        }
        let Some(link) = self.links[id].as_mut() else {
            return false;
        };
        if link.peer.is_some() {
            let is_free = |number: &u8| {
                peer_state.open_paths.iter().all(|open_path| open_path.path.0 != *number)
            };
            let direct = links::RELAY_PATH.0 + 1..PATHS_MAX as u8;
            let Some(number) = direct.clone().find(is_free) else {
                return false;
            };
            link.path = PathId(number);
        }
        let path = link.path;
        let traits = link.traits(peer_state.readable.is_some(), self.identity.copy_max);
        peer_state.open_paths.push(OpenPath { path, link: id });
        self.core.channel_mut(peer).open_path(path, traits);
        true
    }
}

/// The index of an empty slot.
/// Watches `fd` for `interest`; replaces an earlier registration of `fd`.
pub fn watch(
    epoll: &OwnedFd,
    fd: impl AsFd,
    token: EventToken,
    interest: epoll::EventFlags,
) -> io::Result<()> {
    let data = epoll::EventData::new_u64(token.number());
    match epoll::add(epoll, fd.as_fd(), data, interest) {
        Err(rustix::io::Errno::EXIST) => epoll::modify(epoll, fd, data, interest)?,
        other => other?,
    }
    Ok(())
}

/// The properties of a path through shared memory.
pub fn ring_path(may_pull: bool) -> PathProperties {
    let payload_max = (links::RING_PAYLOAD_MAX) as u32;
    let eager_max = if may_pull { links::RING_EAGER_MAX } else { payload_max };
    PathProperties {
        payload_max,
        eager_max,
        first_piece: payload_max,
        pull: may_pull,
        window: u64::MAX,
        ahead: false,
        lossless: true,
        checked: false,
        copy_max: 0,
        spare: false,
        silent_loss: false,
        datagram: None,
        reorders: false,
    }
}

const _: () = assert!(links::RING_PAYLOAD_MAX >= limit::RELAY_PAYLOAD_BYTES_MAX);

/// Maps rings into the provider's range of addresses (decision 5 in docs/ARCHITECTURE.md).
const MAPPER: Mapper = Mapper {
    map: |file, size| {
        arena::map_fd(file, size).map_err(|errno| io::Error::from_raw_os_error(errno.0))
    },
    // SAFETY: the link that has mapped the ring calls this once, when the link is dropped.
    unmap: |start, _| unsafe { arena::unmap(start) },
};
