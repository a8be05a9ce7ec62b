//! QUIC between two relays, each of which checks the other's certificate: one connection with one stream for each link.
//!
//! What enters: slices of frames, copied into the connection's buffer; datagrams from the network. What leaves: the
//! bytes of frames, in order; datagrams; and for whoever drives the engine, whom something has happened to. The state
//! machine is quinn-proto's. A [`QuicHub`] owns a socket and all connections through it; a [`QuicLink`] is the engine's
//! hold of one of them, with the face of a [`TlsLink`](super::tls::TlsLink). A connection outlives its link by the
//! moments in which the other side may still ask what has become of it.
//!
//! Everything happens in three calls of the hub, in this order: [`QuicHub::receive`], [`QuicHub::collect`] before links
//! are served, [`QuicHub::transmit`] after that. In between links are read and written, which sends nothing yet.
//!
//! What may never happen: plaintext on the wire; a byte of a stream from whom the job's authority has made no certificate;
//! more than [`LINES_MAX`] connections, or more kept of them than [`share`] allows.

mod ending;
mod line;
mod share;
mod socket;
mod terms;
#[cfg(test)]
mod tests;

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

use super::socket::{Read, Written};
use super::tls::{Identity, certified_cluster, relay_name};
use line::Line;
pub use share::Pool;
use socket::QuicSocket;
pub use terms::Congestion;
use terms::Terms;

/// Connections through one socket, those that are ending included. Beyond, strangers get no answer.
pub const LINES_MAX: usize = 2048;
/// With so many connections, who comes must show first that it is where it says it is, and a stranger that goes leaves
/// nothing behind.
const LINES_CALM_MAX: usize = 64;
/// Receiving calls before others have their turn.
const RECEIVES_MAX: usize = 4;
/// Runs of datagrams that one connection sends before others have their turn.
const RUNS_MAX: usize = 32;

/// A socket and the connections through it. See the module head.
#[derive(Clone)]
pub struct QuicHub(Rc<RefCell<Hub>>);

/// What has happened to a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct News {
    /// There is something to read, or a handshake has moved on.
    pub is_readable: bool,
    /// It takes more.
    pub is_writable: bool,
    /// It has ended: reading tells why.
    pub is_over: bool,
}

struct Hub {
    socket: QuicSocket,
    endpoint: Endpoint,
    client: ClientConfig,
    pool: Pool,
    /// By handle.
    lines: Vec<Option<Box<Line>>>,
    lines_count: usize,
    /// Lines that may have something to tell or to send.
    touched: Vec<usize>,
    timers: BTreeSet<(Instant, usize)>,
    /// Lines with news.
    told: Vec<usize>,
    arrived: Vec<usize>,
    outgoing: Vec<u8>,
}

impl QuicHub {
    /// A hub at `local`, port 0 for any; it answers strangers if it `listens`. Its connections share `pool`.
    ///
    /// # Errors
    /// If the address cannot be had, or the identity is of no use.
    pub fn bind(
        local: SocketAddr,
        identity: &Identity,
        congestion: Congestion,
        listens: bool,
        pool: &Pool,
    ) -> io::Result<Self> {
        let terms = Terms::new(identity, congestion).map_err(io::Error::other)?;
        let socket = QuicSocket::bind(local)?;
        let server = listens.then_some(terms.server);
        let endpoint = Endpoint::new(terms.endpoint, server, socket.finds_mtu(), None);
        Ok(Self(Rc::new(RefCell::new(Hub {
            socket,
            endpoint,
            client: terms.client,
            pool: pool.clone(),
            lines: Vec::new(),
            lines_count: 0,
            touched: Vec::new(),
            timers: BTreeSet::new(),
            told: Vec::new(),
            arrived: Vec::new(),
            outgoing: Vec::new(),
        }))))
    }

    /// The socket to wait on, level-triggered. It stays open as long as the hub.
    pub fn fd(&self) -> RawFd {
        self.0.borrow().socket.fd().as_raw_fd()
    }

    /// # Errors
    /// As getsockname(2).
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.borrow().socket.local_addr()
    }

    /// Starts a connection to the relay of `cluster`.
    ///
    /// # Errors
    /// If there is no way to it from here.
    pub fn dial(
        &self,
        cluster: ClusterId,
        to: SocketAddr,
        now: Instant,
    ) -> Result<QuicLink, String> {
        let hub = &mut *self.0.borrow_mut();
        if hub.lines_count >= LINES_MAX {
            return Err("too many connections over UDP".into());
        }
        let (handle, connection) = hub
            .endpoint
            .connect(now, hub.client.clone(), to, &relay_name(cluster))
            .map_err(|error| error.to_string())?;
        hub.insert(handle, connection);
        Ok(QuicLink { hub: self.clone(), index: handle.0 })
    }

    /// Takes in datagrams. False: there was nothing more.
    pub fn receive(&self, now: Instant) -> bool {
        self.0.borrow_mut().receive(now)
    }

    /// Looks at what has come and at the clock. Afterwards [`Self::take_arrivals`] and [`Self::take_news`] say what has
    /// happened.
    pub fn collect(&self, now: Instant) {
        self.0.borrow_mut().collect(now);
    }

    /// Links that strangers have opened, and where they are.
    pub fn take_arrivals(&self) -> Vec<(QuicLink, SocketAddr)> {
        let mut hub = self.0.borrow_mut();
        let arrived = std::mem::take(&mut hub.arrived);
        let remote = |index: usize| Some(hub.line(index)?.connection.remote_address());
        let known = arrived.into_iter().filter_map(|index| Some((index, remote(index)?)));
        known.map(|(index, at)| (QuicLink { hub: self.clone(), index }, at)).collect()
    }

    /// What has happened, and to whom: the tokens are those of [`QuicLink::set_token`].
    pub fn take_news(&self) -> Vec<(u64, News)> {
        self.0.borrow_mut().take_news()
    }

    /// Whether there is something for [`Self::take_news`].
    pub fn has_news(&self) -> bool {
        !self.0.borrow().told.is_empty()
    }

    /// Sends what may leave now. Whether the socket must be waited for: it takes no more.
    pub fn transmit(&self, now: Instant) -> bool {
        self.0.borrow_mut().transmit(now)
    }

    /// When [`Self::collect`] is due at the latest; `Some(now)` or earlier: at once.
    pub fn next_wake(&self) -> Option<Instant> {
        let hub = self.0.borrow();
        hub.timers.first().map(|(at, _)| *at)
    }

    /// Whether somebody has still more to send than one turn allows.
    pub fn is_busy(&self) -> bool {
        self.0.borrow().is_busy()
    }
}

impl Hub {
    fn line(&self, index: usize) -> Option<&Line> {
        self.lines.get(index)?.as_deref()
    }

    /// A link is going to hold it.
    fn insert(&mut self, handle: ConnectionHandle, connection: Connection) {
        if self.lines.len() <= handle.0 {
            self.lines.resize_with(handle.0 + 1, || None);
        }
        self.lines[handle.0] = Some(Box::new(Line::new(connection)));
        self.lines_count += 1;
        self.touch(handle.0);
    }

    /// It may have something to tell or to send.
    fn touch(&mut self, index: usize) {
        if let Some(line) = self.lines.get_mut(index).and_then(Option::as_mut)
            && !line.is_touched
        {
            line.is_touched = true;
            self.touched.push(index);
        }
    }

    // ---- datagrams in ------------------------------------------------------------------

    fn receive(&mut self, now: Instant) -> bool {
        for _ in 0..RECEIVES_MAX {
            let (mut events, mut responses) = (Vec::new(), Vec::new());
            let (endpoint, outgoing) = (&mut self.endpoint, &mut self.outgoing);
            let more = self.socket.receive(|batch| {
                // Nobody can be answered there, and the kernel's refusal would end the cutting of runs for all.
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
                if let Some(line) = self.lines.get_mut(handle.0).and_then(Option::as_mut) {
                    line.connection.handle_event(event);
                    self.touch(handle.0);
                }
            }
            DatagramEvent::NewConnection(incoming) => self.answer(incoming, now),
            DatagramEvent::Response(_) => (),
        }
    }

    /// Somebody has knocked.
    fn answer(&mut self, incoming: Incoming, now: Instant) {
        if self.lines_count >= LINES_MAX {
            self.endpoint.ignore(incoming);
            return;
        }
        let mut bytes = Vec::new();
        if self.lines_count >= LINES_CALM_MAX && !incoming.remote_address_validated() {
            match self.endpoint.retry(incoming, &mut bytes) {
                Ok(transmit) => self.respond(&transmit, &bytes),
                Err(error) => self.endpoint.ignore(error.into_incoming()),
            }
            return;
        }
        match self.endpoint.accept(incoming, now, &mut bytes, None) {
            Ok((handle, connection)) => {
                self.insert(handle, connection);
                self.arrived.push(handle.0);
            }
            Err(error) => {
                if let Some(transmit) = error.response {
                    self.respond(&transmit, &bytes);
                }
            }
        }
    }

    /// To somebody with whom there is no connection. While the socket has no room nobody gets an answer.
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
            if let Some(line) = &mut self.lines[index] {
                line.timer = None;
                line.connection.handle_timeout(now);
                self.touch(index);
            }
        }
        for place in 0..self.touched.len() {
            self.look(self.touched[place]);
        }
    }

    /// What a connection has to tell, to its endpoint and to its link.
    fn look(&mut self, index: usize) {
        let Some(line) = &mut self.lines[index] else { return };
        while let Some(event) = line.connection.poll_endpoint_events() {
            if event.is_drained() {
                // Its number is free for another one only when nobody holds this one.
                line.is_drained = true;
            } else if let Some(event) = self.endpoint.handle_event(ConnectionHandle(index), event) {
                line.connection.handle_event(event);
            }
        }
        line.tune();
        while let Some(event) = line.connection.poll() {
            line.handle(event, &self.pool);
        }
        if line.news != News::default() && line.token.is_some() {
            self.told.push(index);
        }
    }

    fn take_news(&mut self) -> Vec<(u64, News)> {
        let mut all = Vec::new();
        for index in std::mem::take(&mut self.told) {
            let Some(line) = &mut self.lines[index] else { continue };
            let news = std::mem::take(&mut line.news);
            if let Some(token) = line.token.filter(|_| news != News::default()) {
                all.push((token, news));
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
            let Some(line) = &mut self.lines[index] else { continue };
            line.is_touched = false;
            let mut is_done = false;
            for _ in 0..RUNS_MAX {
                if self.socket.is_blocked() {
                    break;
                }
                self.outgoing.clear();
                let run_max = self.socket.run_max(line.connection.current_mtu().into(), now);
                match line.connection.poll_transmit(now, run_max, &mut self.outgoing) {
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
        let Some(line) = &mut self.lines[index] else { return };
        let timer = line.connection.poll_timeout();
        if timer == line.timer {
            return;
        }
        if let Some(old) = line.timer {
            self.timers.remove(&(old, index));
        }
        self.timers.extend(timer.map(|at| (at, index)));
        line.timer = timer;
    }
}

/// One connection of a hub. Dropped, it is closed.
pub struct QuicLink {
    hub: QuicHub,
    index: usize,
}

impl QuicLink {
    /// Lets `f` work on the line. There is one as long as there is a link.
    fn with<T>(&self, f: impl FnOnce(&mut Line) -> T) -> T {
        let mut hub = self.hub.0.borrow_mut();
        f(hub.lines[self.index].as_mut().expect("a line that is held stays"))
    }

    fn touch(&self) {
        self.hub.0.borrow_mut().touch(self.index);
    }

    /// Whom [`QuicHub::take_news`] is to name from now on. What has happened before is news once more.
    pub fn set_token(&self, token: u64) {
        self.with(|line| line.token = Some(token));
        self.hub.0.borrow_mut().told.push(self.index);
    }

    /// Whether the handshake is over: the peer's certificate is good.
    pub fn is_ready(&self) -> bool {
        self.with(|line| line.is_connected && line.stream.is_some())
    }

    /// Which of `clusters` clusters the peer's certificate is made for.
    pub fn peer_cluster(&self, clusters: usize) -> Option<ClusterId> {
        let identity = self.with(|line| line.connection.crypto_session().peer_identity())?;
        let chain = identity.downcast::<Vec<CertificateDer<'static>>>().ok()?;
        certified_cluster(chain.first()?, clusters)
    }

    /// Says whether the handshake has failed; it goes on by itself.
    ///
    /// # Errors
    /// If the peer breaks it off, is not heard, or its certificate is refused.
    pub fn advance(&self) -> io::Result<()> {
        self.with(|line| line.end().map_or(Ok(()), Err))
    }

    /// Reads what has come, as much as there is room for.
    ///
    /// # Errors
    /// `WouldBlock` if nothing is there, else the link is broken.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<Read> {
        let (result, credit) = self.with(|line| line.read(buffer));
        if credit {
            self.touch();
        }
        result
    }

    /// Takes as many of `slices` as there is room for.
    ///
    /// # Errors
    /// If the link is broken.
    pub fn write<'a>(&self, slices: impl Iterator<Item = &'a [u8]>) -> io::Result<Written> {
        let written = self.with(|line| line.write(slices));
        self.touch();
        written
    }
}

impl Drop for QuicLink {
    fn drop(&mut self) {
        self.hub.0.borrow_mut().release(self.index, Instant::now());
    }
}
