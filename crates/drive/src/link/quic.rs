//! QUIC between two relays, each of which checks the other's certificate: one connection with one
//! stream for each link.
//!
//! What enters: slices of frames, copied into the connection's buffer; datagrams from the network.
//! What leaves: the bytes of frames, in order; datagrams; the events of each link, for the engine.
//! The state machine is that of quinn-proto. A [`QuicHub`] owns a socket and all connections
//! through it; a [`QuicLink`] is the engine's handle of one connection, with the interface of a
//! [`TlsLink`](super::tls::TlsLink). A connection outlives its link for the short time in which the
//! other side may still ask for its state.
//!
//! Everything happens in three calls of the hub, in this order: [`QuicHub::receive`],
//! [`QuicHub::collect`] before links are served, [`QuicHub::transmit`] after that. Between the
//! latter two, links are read and written, which sends nothing yet.
//!
//! What may never happen: plaintext on the wire; a byte of a stream from a peer without a
//! certificate of the job's authority; more than [`CONNECTIONS_MAX`] connections, or more bytes
//! kept of them than [`window_share`] allows.
//!
//! | module | does |
//! |---|---|
//! | `window_share` | windows of all connections |
//! | `config` | configuration of connections |
//! | `socket` | the UDP socket |
//! | `connection` | one connection and its stream |
//! | `ending` | how connections end |

mod config;
mod connection;
mod ending;
mod socket;
#[cfg(test)]
mod tests;
mod window_share;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::time::Instant;

use landbridge_proto::id::ClusterId;
use quinn_proto::{
    ClientConfig, Connection, ConnectionHandle, DatagramEvent, Endpoint, Incoming, Transmit,
};
use rustls::pki_types::CertificateDer;

use super::socket::{SocketRead, SocketWrite};
use super::tls::{Identity, certified_cluster, relay_name};
pub use config::Congestion;
use config::QuicConfig;
use connection::QuicConnection;
use socket::QuicSocket;
pub use window_share::WindowPool;

/// The most connections through one socket, ending ones included. Beyond this, new peers get no
/// answer.
pub const CONNECTIONS_MAX: usize = 2048;
/// From this many connections on, a new peer must first prove its address (Retry), and a connection
/// without a checked certificate that ends leaves nothing behind.
const CONNECTIONS_UNVALIDATED_MAX: usize = 64;
/// The most receiving calls before other work has its turn.
const RECEIVES_MAX: usize = 4;
/// The most runs of datagrams that one connection sends before others have their turn.
const RUNS_MAX: usize = 32;

/// A socket and the connections through it: see the module documentation.
#[derive(Clone)]
pub struct QuicHub(Rc<RefCell<Hub>>);

/// What has happened to a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuicEvents {
    /// There is something to read, or the handshake has advanced.
    pub is_readable: bool,
    /// The link takes more.
    pub is_writable: bool,
    /// The connection has ended: reading returns the reason.
    pub is_over: bool,
}

struct Hub {
    socket: QuicSocket,
    endpoint: Endpoint,
    client: ClientConfig,
    pool: WindowPool,
    /// The connections, indexed by handle.
    connections: Vec<Option<Box<QuicConnection>>>,
    connections_count: usize,
    /// The indices of connections that may have events, or something to send.
    touched: Vec<usize>,
    timers: BTreeSet<(Instant, usize)>,
    /// The indices of connections with events for their links.
    with_events: Vec<usize>,
    accepted: Vec<usize>,
    outgoing: Vec<u8>,
}

impl QuicHub {
    /// Creates a hub at `local`, with port 0 for any port; it accepts connections if it `listens`.
    /// Its connections share `pool`.
    ///
    /// # Errors
    /// If the address cannot be bound, or the identity is invalid.
    pub fn bind(
        local: SocketAddr,
        identity: &Identity,
        congestion: Congestion,
        listens: bool,
        pool: &WindowPool,
    ) -> io::Result<Self> {
        let config = QuicConfig::new(identity, congestion).map_err(io::Error::other)?;
        let socket = QuicSocket::bind(local)?;
        let server = listens.then_some(config.server);
        let endpoint = Endpoint::new(config.endpoint, server, socket.finds_mtu(), None);
        Ok(Self(Rc::new(RefCell::new(Hub {
            socket,
            endpoint,
            client: config.client,
            pool: pool.clone(),
            connections: Vec::new(),
            connections_count: 0,
            touched: Vec::new(),
            timers: BTreeSet::new(),
            with_events: Vec::new(),
            accepted: Vec::new(),
            outgoing: Vec::new(),
        }))))
    }

    /// The socket to wait on, level-triggered. It stays open as long as the hub.
    pub fn fd(&self) -> RawFd {
        self.0.borrow().socket.fd().as_raw_fd()
    }

    /// The local address of the socket.
    ///
    /// # Errors
    /// The errors of getsockname(2).
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.borrow().socket.local_addr()
    }

    /// Starts a connection to the relay of `cluster`.
    ///
    /// # Errors
    /// If the socket cannot send to the address, or there are too many connections.
    pub fn dial(
        &self,
        cluster: ClusterId,
        to: SocketAddr,
        now: Instant,
    ) -> Result<QuicLink, String> {
        let hub = &mut *self.0.borrow_mut();
        if hub.connections_count >= CONNECTIONS_MAX {
            return Err("too many connections over UDP".into());
        }
        let (handle, connection) = hub
            .endpoint
            .connect(now, hub.client.clone(), to, &relay_name(cluster))
            .map_err(|error| error.to_string())?;
        hub.insert(handle, connection);
        Ok(QuicLink { hub: self.clone(), index: handle.0 })
    }

    /// Receives datagrams. Returns false if there was nothing more.
    pub fn receive(&self, now: Instant) -> bool {
        self.0.borrow_mut().receive(now)
    }

    /// Processes what has arrived, and the time. Afterwards [`Self::take_accepted`] and
    /// [`Self::take_events`] return what has happened.
    pub fn collect(&self, now: Instant) {
        self.0.borrow_mut().collect(now);
    }

    /// The links that other relays have opened, and their addresses.
    pub fn take_accepted(&self) -> Vec<(QuicLink, SocketAddr)> {
        let mut hub = self.0.borrow_mut();
        let accepted = std::mem::take(&mut hub.accepted);
        let remote = |index: usize| Some(hub.connection(index)?.connection.remote_address());
        let known = accepted.into_iter().filter_map(|index| Some((index, remote(index)?)));
        known.map(|(index, at)| (QuicLink { hub: self.clone(), index }, at)).collect()
    }

    /// The events of all links since the last call, by the tokens of [`QuicLink::set_token`].
    pub fn take_events(&self) -> Vec<(u64, QuicEvents)> {
        self.0.borrow_mut().take_events()
    }

    /// Whether [`Self::take_events`] has something to return.
    pub fn has_events(&self) -> bool {
        !self.0.borrow().with_events.is_empty()
    }

    /// Sends what may leave now. Returns true if the socket takes no more, so that the caller must
    /// wait for it.
    pub fn transmit(&self, now: Instant) -> bool {
        self.0.borrow_mut().transmit(now)
    }

    /// The latest time at which [`Self::collect`] is due; `Some(now)` or earlier means at once.
    pub fn next_wake(&self) -> Option<Instant> {
        let hub = self.0.borrow();
        hub.timers.first().map(|(at, _)| *at)
    }

    /// Whether a connection has more to send than one turn allows.
    pub fn is_busy(&self) -> bool {
        self.0.borrow().is_busy()
    }
}

impl Hub {
    fn connection(&self, index: usize) -> Option<&QuicConnection> {
        self.connections.get(index)?.as_deref()
    }

    /// Adds a connection, for which a link is about to be made.
    fn insert(&mut self, handle: ConnectionHandle, connection: Connection) {
        if self.connections.len() <= handle.0 {
            self.connections.resize_with(handle.0 + 1, || None);
        }
        self.connections[handle.0] = Some(Box::new(QuicConnection::new(connection)));
        self.connections_count += 1;
        self.touch(handle.0);
    }

    /// Queues a connection that may have events, or something to send.
    fn touch(&mut self, index: usize) {
        if let Some(quic) = self.connections.get_mut(index).and_then(Option::as_mut)
            && !quic.is_touched
        {
            quic.is_touched = true;
            self.touched.push(index);
        }
    }

    // ---- datagrams in ------------------------------------------------------------------

    fn receive(&mut self, now: Instant) -> bool {
        for _ in 0..RECEIVES_MAX {
            let (mut events, mut responses) = (Vec::new(), Vec::new());
            let (endpoint, outgoing) = (&mut self.endpoint, &mut self.outgoing);
            let more = self.socket.receive(|batch| {
                // No peer can be answered at such an address, and the kernel's refusal would end
                // segmentation offload for all peers.
                if batch.from.port() == 0 || batch.from.ip().is_unspecified() {
                    return;
                }
                for datagram in batch.datagrams() {
                    outgoing.clear();
                    match endpoint.handle(now, batch.from, batch.to, batch.ecn, datagram, outgoing)
                    {
                        None => (),
                        Some(DatagramEvent::Response(transmit)) => {
                            responses.push((transmit, outgoing.clone()));
                        }
                        Some(event) => events.push(event),
                    }
                }
            });
            for (transmit, bytes) in responses {
                self.respond(&transmit, &bytes);
            }
            for event in events {
                self.handle(event, now);
            }
            if !more {
                return false;
            }
        }
        true
    }

    fn handle(&mut self, event: DatagramEvent, now: Instant) {
        match event {
            DatagramEvent::ConnectionEvent(handle, event) => {
                if let Some(quic) = self.connections.get_mut(handle.0).and_then(Option::as_mut) {
                    quic.connection.handle_event(event);
                    self.touch(handle.0);
                }
            }
            DatagramEvent::NewConnection(incoming) => self.handle_incoming(incoming, now),
            DatagramEvent::Response(_) => (),
        }
    }

    /// Accepts, defers (Retry) or ignores a new connection.
    fn handle_incoming(&mut self, incoming: Incoming, now: Instant) {
        if self.connections_count >= CONNECTIONS_MAX {
            self.endpoint.ignore(incoming);
            return;
        }
        let mut bytes = Vec::new();
        if self.connections_count >= CONNECTIONS_UNVALIDATED_MAX
            && !incoming.remote_address_validated()
        {
            match self.endpoint.retry(incoming, &mut bytes) {
                Ok(transmit) => self.respond(&transmit, &bytes),
                Err(error) => self.endpoint.ignore(error.into_incoming()),
            }
            return;
        }
        match self.endpoint.accept(incoming, now, &mut bytes, None) {
            Ok((handle, connection)) => {
                self.insert(handle, connection);
                self.accepted.push(handle.0);
            }
            Err(error) => {
                if let Some(transmit) = error.response {
                    self.respond(&transmit, &bytes);
                }
            }
        }
    }

    /// Answers a peer without a connection. While the socket is blocked, no such peer gets an
    /// answer.
    fn respond(&mut self, transmit: &Transmit, bytes: &[u8]) {
        if !self.socket.is_blocked() {
            self.socket.send(transmit, &bytes[..transmit.size]);
        }
    }

    // ---- what has happened -------------------------------------------------------------

    fn collect(&mut self, now: Instant) {
        while let Some(&(at, index)) = self.timers.first() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            if let Some(quic) = &mut self.connections[index] {
                quic.timer = None;
                quic.connection.handle_timeout(now);
                self.touch(index);
            }
        }
        for place in 0..self.touched.len() {
            self.poll_events(self.touched[place]);
        }
    }

    /// Passes the events of a connection on to the endpoint and to the link.
    fn poll_events(&mut self, index: usize) {
        let Some(quic) = &mut self.connections[index] else { return };
        while let Some(event) = quic.connection.poll_endpoint_events() {
            if event.is_drained() {
                // The handle is free for another connection only when no link holds this one.
                quic.is_drained = true;
            } else if let Some(event) = self.endpoint.handle_event(ConnectionHandle(index), event) {
                quic.connection.handle_event(event);
            }
        }
        quic.tune();
        while let Some(event) = quic.connection.poll() {
            quic.handle(event, &self.pool);
        }
        if quic.events != QuicEvents::default() && quic.token.is_some() {
            self.with_events.push(index);
        }
    }

    fn take_events(&mut self) -> Vec<(u64, QuicEvents)> {
        let mut all = Vec::new();
        for index in std::mem::take(&mut self.with_events) {
            let Some(quic) = &mut self.connections[index] else { continue };
            let events = std::mem::take(&mut quic.events);
            if let Some(token) = quic.token.filter(|_| events != QuicEvents::default()) {
                all.push((token, events));
            }
        }
        all
    }

    // ---- datagrams out -----------------------------------------------------------------

    fn transmit(&mut self, now: Instant) -> bool {
        if !self.socket.resume() {
            return true;
        }
        for index in std::mem::take(&mut self.touched) {
            let Some(quic) = &mut self.connections[index] else { continue };
            quic.is_touched = false;
            let mut is_done = false;
            for _ in 0..RUNS_MAX {
                if self.socket.is_blocked() {
                    break;
                }
                self.outgoing.clear();
                let run_max = self.socket.run_max(quic.connection.current_mtu().into(), now);
                match quic.connection.poll_transmit(now, run_max, &mut self.outgoing) {
                    Some(transmit) => self.socket.send(&transmit, &self.outgoing[..transmit.size]),
                    None => {
                        is_done = true;
                        break;
                    }
                }
            }
            if !is_done {
                self.touch(index);
            }
            self.set_timer(index);
            self.forget_if_over(index);
        }
        self.socket.is_blocked()
    }

    fn set_timer(&mut self, index: usize) {
        let Some(quic) = &mut self.connections[index] else { return };
        let timer = quic.connection.poll_timeout();
        if timer == quic.timer {
            return;
        }
        if let Some(old) = quic.timer {
            self.timers.remove(&(old, index));
        }
        self.timers.extend(timer.map(|at| (at, index)));
        quic.timer = timer;
    }
}

/// One connection of a hub. Dropping the link closes the connection.
pub struct QuicLink {
    hub: QuicHub,
    index: usize,
}

impl QuicLink {
    /// Runs `f` on the connection. There is a connection as long as there is a link.
    fn with<T>(&self, f: impl FnOnce(&mut QuicConnection) -> T) -> T {
        let mut hub = self.hub.0.borrow_mut();
        f(hub.connections[self.index].as_mut().expect("a connection that is held stays"))
    }

    fn touch(&self) {
        self.hub.0.borrow_mut().touch(self.index);
    }

    /// Sets the token by which [`QuicHub::take_events`] names the link from now on. Earlier events
    /// are reported again.
    pub fn set_token(&self, token: u64) {
        self.with(|quic| quic.token = Some(token));
        self.hub.0.borrow_mut().with_events.push(self.index);
    }

    /// Whether the handshake is complete, so that the peer's certificate is valid.
    pub fn is_ready(&self) -> bool {
        self.with(|quic| quic.is_connected && quic.stream.is_some())
    }

    /// The cluster for which the peer's certificate was made, of `clusters` clusters.
    pub fn peer_cluster(&self, clusters: usize) -> Option<ClusterId> {
        let identity = self.with(|quic| quic.connection.crypto_session().peer_identity())?;
        let chain = identity.downcast::<Vec<CertificateDer<'static>>>().ok()?;
        certified_cluster(chain.first()?, clusters)
    }

    /// Reports whether the handshake has failed; the handshake advances by itself.
    ///
    /// # Errors
    /// If the peer ends the handshake or does not answer, or if its certificate is refused.
    pub fn advance(&self) -> io::Result<()> {
        self.with(|quic| quic.end().map_or(Ok(()), Err))
    }

    /// Reads what has arrived, as much as fits into `buffer`.
    ///
    /// # Errors
    /// `WouldBlock` if nothing has arrived; otherwise the link is broken.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<SocketRead> {
        let (result, credit) = self.with(|quic| quic.read(buffer));
        if credit {
            self.touch();
        }
        result
    }

    /// Takes as many of `slices` as the connection's buffer has space for.
    ///
    /// # Errors
    /// If the link is broken.
    pub fn write<'a>(&self, slices: impl Iterator<Item = &'a [u8]>) -> io::Result<SocketWrite> {
        let written = self.with(|quic| quic.write(slices));
        self.touch();
        written
    }
}

impl Drop for QuicLink {
    fn drop(&mut self) {
        self.hub.0.borrow_mut().release(self.index, Instant::now());
    }
}
