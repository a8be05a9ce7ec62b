//! Dials of peers, and the outcome of the hellos on new connections.
//!
//! The engine chooses a candidate when the first frame for a peer is to be sent: shared memory on
//! the same node, TCP inside the cluster, the cluster's relay otherwise. A candidate that fails is
//! followed by the next one. A connection that the peer dials meanwhile is equally good. Every
//! connection begins with a hello; when the hello has succeeded, the link is up, and waiting frames
//! are sent.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Instant;

use landbridge_drive::sys::now_millis;
use landbridge_proto::endpoint::Peer;
use landbridge_proto::id::Address;
use landbridge_proto::path::time::Time;
use landbridge_proto::wire::hello::{Introduction, Role};

use super::candidates::PathCandidate;
use super::carrier::Carrier;
use super::connections::Connections;
use super::connector::{EndedHello, HelloPurpose};
use super::handshake::EstablishedLink;
use super::links::Link;
use super::local_endpoint::{dial_tcp, dial_unix};
use super::memory::ReadableProcess;
use super::peer_state::SendState;
use crate::log;

impl Connections {
    /// Dials the next candidate for `peer`.
    #[cold]
    pub(super) fn dial(&mut self, peer: Peer) {
        let candidates = match self.data.peers[peer].candidates.take() {
            Some(candidates) => candidates,
            None => self.data.paths().candidates(peer),
        };
        let peer_state = &mut self.data.peers[peer];
        peer_state.candidates = Some(candidates);
        peer_state.is_dialling = true;
        loop {
            let peer_state = &mut self.data.peers[peer];
            let Some(candidate) = peer_state.candidates.as_mut().and_then(Vec::pop) else {
                peer_state.is_dialling = false;
                if peer_state.reconnect.is_some() {
                    return self.reconnect_later(peer);
                }
                if !peer_state.open_paths.is_empty() {
                    // The peer has connected to this process meanwhile.
                    return;
                }
                let (address, ip) = (self.data.core.address(peer), self.data.identity.ip);
                log!(Warn, "no path to {address} is left (this process is at {ip})");
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
                    log!(Info, "{}: {candidate:?}: {error}", self.data.core.address(peer));
                    self.data.peers.note_attempt(peer, &error);
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
                self.data.peers[peer].is_dialling = false;
                return Ok(());
            }
            _ if !self.connector.may_dial() => {
                self.data.peers[peer].queue_dial(candidate.clone());
                self.connector.queue_dial(peer);
                return Ok(());
            }
            PathCandidate::Shm(name) => dial_unix(name)?,
            PathCandidate::Tcp(address) | PathCandidate::Further(address) => dial_tcp(*address)?,
        };
        self.data.peers[peer].set_send_state(SendState::Dialling);
        self.start_handshake(
            socket,
            matches!(candidate, PathCandidate::Shm(_)),
            HelloPurpose::Peer(peer),
        )
    }

    /// Dials queued peers while few enough dials are under way. Some of these peers have connected
    /// to this process meanwhile.
    fn dial_waiting(&mut self) {
        // A dial may end within the call and enter this function again; the queue is then empty.
        let mut waiting = self.connector.take_queue();
        while self.connector.may_dial()
            && let Some(peer) = waiting.pop_front()
        {
            if self.data.peers[peer].is_dialling {
                self.dial(peer);
            }
        }
        self.connector.restore_queue(waiting);
    }

    pub(super) fn start_handshake(
        &mut self,
        socket: OwnedFd,
        is_unix: bool,
        purpose: HelloPurpose,
    ) -> io::Result<()> {
        let connect_time = match purpose {
            HelloPurpose::Rail(peer, address) => Some(self.data.peers.rails.pause(peer, address)),
            HelloPurpose::Peer(peer) => self.data.peers[peer].pause_after_dial(),
            HelloPurpose::Relay | HelloPurpose::Accepted => None,
        };
        let id = self.connector.start(&self.data.own, socket, is_unix, purpose, connect_time)?;
        self.handle_hello(id);
        Ok(())
    }

    /// Accepts all connections that wait at a listener.
    pub(super) fn accept_pending(&mut self, is_unix: bool) {
        while self.connector.may_accept() || self.evict_pending() {
            let Some(socket) = self.connector.accept(&self.data.own, is_unix) else {
                return;
            };
            if let Err(error) = self.start_handshake(socket, is_unix, HelloPurpose::Accepted) {
                self.connector.refuse(None, &error);
            }
        }
        self.connector.pause_listener(&self.data.own, is_unix);
    }

    /// Closes the first pending connection whose hello takes longer than it should, to free its
    /// slot. Returns false if there is none.
    fn evict_pending(&mut self) -> bool {
        let Some(id) = self.connector.slow_pending() else {
            return false;
        };
        // The expected bytes may have arrived, unread.
        self.handle_hello(id);
        self.connector.evict(&self.data.own, id);
        true
    }

    /// Continues hello `id` after an event on its socket.
    pub(super) fn handle_hello(&mut self, id: usize) {
        let Some(EndedHello { purpose, remote, outcome }) =
            self.connector.advance(&self.data.own, id)
        else {
            return;
        };
        let outcome = outcome.and_then(|established| self.hello_ended(purpose, established));
        if let Err(error) = outcome {
            self.hello_failed(purpose, remote, &error);
        }
        self.dial_waiting();
    }

    /// Resumes paused listeners, and ends hellos that take too long.
    pub(super) fn check_hellos(&mut self) {
        self.connector.resume_listeners(&self.data.own);
        self.connector.log_refusals(now_millis());
        for id in 0..self.connector.slots() {
            if self.connector.is_overdue(id) {
                self.handle_hello(id);
            }
        }
    }

    /// The peer that has introduced itself on an accepted connection; `None` if the peer has no
    /// valid name.
    pub(super) fn peer_introduced(&mut self, introduction: &Introduction) -> Option<Peer> {
        if introduction.address == Address::ANONYMOUS {
            let peer = self.data.peers.named(&mut self.data.core, &introduction.name)?;
            let is_another = self.data.peers[peer].is_another(introduction);
            if is_another || self.data.core.channel(peer).failed().is_some() {
                // The endpoint with this name has ended (an IP address and port can be reused).
                // From now on the name means the new endpoint.
                self.fail_peer(peer, libc::ECONNRESET);
                self.data.peers.forget_name(peer, &introduction.name);
            }
            return self.data.peers.named(&mut self.data.core, &introduction.name);
        }
        let peer = self.data.peers.addressed(&mut self.data.core, introduction.address);
        self.data.peers[peer].name.get_or_insert(introduction.name);
        Some(peer)
    }

    fn hello_ended(&mut self, purpose: HelloPurpose, up: EstablishedLink) -> io::Result<()> {
        let EstablishedLink { introduction, mut carrier } = up;
        let senseless = |why| Err(io::Error::new(io::ErrorKind::InvalidData, why));
        let peer = match (purpose, introduction.role) {
            (HelloPurpose::Relay, Role::Relay) => None,
            (HelloPurpose::Peer(peer) | HelloPurpose::Rail(peer, _), Role::Endpoint) => {
                let address = self.data.core.address(peer);
                if !self.data.peers.is_expected(peer, address, &introduction) {
                    return senseless("another process answers at the peer's address");
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
            self.data.peers[peer].recognise(&introduction)?;
            // Jobs that connect later may differ in size, and so in the eager credit that they
            // give.
            self.data.core.channel_mut(peer).set_eager_window(introduction.eager_window);
        }
        if let Carrier::Shm(link) = &mut carrier
            && let Some(peer) = peer
        {
            link.set_notice(self.data.application.regions_notice());
            if let Ok(pid) = link.peer_pid() {
                self.data.peers[peer].readable = ReadableProcess::find(pid, &introduction);
            }
        }
        let is_accepted = matches!(purpose, HelloPurpose::Accepted);
        // The dial has ended, at whichever address the peer answered.
        let dialled = match purpose {
            HelloPurpose::Peer(peer) => Some(peer),
            _ => None,
        };
        if let Some(peer) = dialled {
            self.data.peers[peer].is_dialling = false;
        }
        let id = match self.link_up(peer, carrier, introduction.pid, is_accepted) {
            Ok(id) => id,
            Err(error) => {
                if let Some(peer) = dialled {
                    self.data.peers[peer].is_dialling = true;
                }
                return Err(error);
            }
        };
        match (purpose, peer) {
            (HelloPurpose::Rail(peer, address), _) => {
                self.data.peers.rails.note_up(peer, address, id)
            }
            (HelloPurpose::Accepted, Some(peer)) => {
                let ends = self.data.links[id].as_ref().and_then(|link| link.ends);
                self.data.peers.rails.note_accepted(peer, ends, id);
            }
            _ => (),
        }
        Ok(())
    }

    /// Dials the further addresses whose next attempt is due. The engine calls this every few
    /// milliseconds while an address is to be tried.
    #[cold]
    pub(super) fn check_rails(&mut self) {
        let now = Instant::now();
        self.data.peers.drop_rails_of_closed();
        for index in 0..self.data.peers.rails.count() {
            let due =
                self.data.peers.rails.take_due(index, self.data.identity.settings.redial_max, now);
            let Some((peer, address)) = due else {
                continue;
            };
            let purpose = HelloPurpose::Rail(peer, address);
            let started =
                dial_tcp(address).and_then(|socket| self.start_handshake(socket, false, purpose));
            if let Err(error) = started {
                self.hello_failed(purpose, None, &error);
            }
        }
    }

    fn hello_failed(
        &mut self,
        purpose: HelloPurpose,
        remote: Option<SocketAddr>,
        error: &io::Error,
    ) {
        match purpose {
            HelloPurpose::Accepted => self.connector.refuse(remote, error),
            HelloPurpose::Peer(peer) => {
                log!(Info, "{}: hello: {error}", self.data.core.address(peer));
                self.data.peers.note_attempt(peer, error);
                let peer_state = &mut self.data.peers[peer];
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
            HelloPurpose::Rail(peer, address) => {
                log!(Debug, "{} at {address}: {error}", self.data.core.address(peer));
                self.data.peers.rails.note_failed(peer, address);
            }
            HelloPurpose::Relay => {
                log!(Warn, "relay: {error}");
                if self.dial_relay().is_err() && !self.uplink.goes_on_after(error) {
                    self.give_up_relay();
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
        let link = Link::established(carrier, peer, is_dialled_by_peer, self.data.identity);
        let (ends, what) = (link.ends, link.describe());
        let id = self.data.links.insert(&self.data.own.epoll, link)?;
        let Some(peer) = peer else {
            log!(Info, "relay: {what}");
            self.relay_up(id);
            return Ok(id);
        };
        log!(Info, "{} (process {pid}): {what}", self.data.core.address(peer));
        if !self.data.paths().add_path(peer, id) {
            self.data.close_link(id);
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, "enough paths lead there"));
        }
        // The engine redials the peer's first address. A connection to a further address does not
        // replace it.
        if !self.data.paths().is_rail(peer, ends, is_dialled_by_peer) {
            let peer_state = &mut self.data.peers[peer];
            peer_state.is_dialling &= is_dialled_by_peer;
            peer_state.reconnect = None;
        }
        // If both sides have dialled, a single connection serves both directions better, because
        // confirmations travel with data: the connection whose dialler has the smaller name.
        let is_smaller = Some(self.data.own.name) < self.data.peers[peer].name;
        let has_duplicate = self.drop_broken_duplicates(peer, id);
        let is_up = matches!(self.data.peers[peer].send_state, SendState::Up(_));
        if !(is_up && has_duplicate && is_smaller == is_dialled_by_peer) {
            self.data.paths().use_link(peer, id);
        }
        self.data.paths().restripe(peer);
        self.data.paths().advertise_rails(peer, id);
        if let Some(datagrams) = &mut self.data.datagrams
            && let Some((own, _)) = self.data.links[id].as_ref().and_then(|link| link.ends)
        {
            datagrams.advertise(
                &mut self.data.core,
                &self.data.own.epoll,
                Time(self.data.clock.nanos()),
                (peer, own),
            );
        }
        Ok(id)
    }
}
