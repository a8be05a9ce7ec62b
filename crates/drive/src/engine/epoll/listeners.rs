//! How connections begin: listeners that accept, and relays that are dialled.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use landbridge_proto::id::ClusterId;
use landbridge_proto::relay::{NewStream, Relay};
use landbridge_proto::route::routing_table::LinkId;
use landbridge_proto::wire::hello::{Introduction, Role};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto};

use super::connection::{Connection, InputState, Phase, RelayStream, Remote};
use super::dials::{DIAL_MILLIS_MIN, Dial};
use super::pending_connection::{HelloProgress, Origin, PendingConnection};
use super::transport::Transport;
use super::{EventLoop, LocalRelay, PENDING_MAX};
use crate::engine::LinkState;
use crate::link::socket::Socket;
use crate::link::tls::TlsLink;
use crate::sys;

/// The first epoll token of listeners.
pub const LISTENER_BASE: u64 = u64::MAX - 1_000;
/// The first epoll token of controls.
pub const CONTROL_BASE: u64 = u64::MAX - 500;

/// The most connections accepted before other events have their turn.
const ACCEPTS_MAX: usize = 64;
/// How long the listeners pause when there are no more descriptors.
const ACCEPT_PAUSE_MILLIS: u64 = 100;
enum ListeningSocket {
    Tcp(TcpListener, Origin),
    Unix(UnixListener),
}

/// The listening sockets, and a descriptor in reserve for when there are no more.
pub struct Listeners {
    sockets: Vec<ListeningSocket>,
    reserve: Option<OwnedFd>,
    paused_until: Option<u64>,
}

impl Listeners {
    pub fn open(
        epoll: &OwnedFd,
        ranks: TcpListener,
        unix: Option<UnixListener>,
        relays: Option<TcpListener>,
    ) -> io::Result<Self> {
        let mut sockets = vec![ListeningSocket::Tcp(ranks, Origin::Ranks)];
        sockets.extend(relays.map(|listener| ListeningSocket::Tcp(listener, Origin::Relays)));
        sockets.extend(unix.map(ListeningSocket::Unix));
        for (index, listener) in sockets.iter().enumerate() {
            rustix::io::ioctl_fionbio(listener, true)?;
            let data = EventData::new_u64(LISTENER_BASE + index as u64);
            epoll::add(epoll, listener, data, EventFlags::IN)?;
        }
        Ok(Self { sockets, reserve: open_reserve(), paused_until: None })
    }

    pub fn is_paused(&self) -> bool {
        self.paused_until.is_some()
    }

    fn pause(&mut self, epoll: &OwnedFd) {
        self.paused_until = Some(sys::now_millis() + ACCEPT_PAUSE_MILLIS);
        for listener in &self.sockets {
            let _ = epoll::delete(epoll, listener);
        }
    }

    pub fn resume(&mut self, epoll: &OwnedFd, now_millis: u64) {
        if self.reserve.is_none() {
            self.reserve = open_reserve();
        }
        if self.paused_until.is_none_or(|until| until > now_millis) {
            return;
        }
        self.paused_until = None;
        for (index, listener) in self.sockets.iter().enumerate() {
            let data = EventData::new_u64(LISTENER_BASE + index as u64);
            let _ = epoll::add(epoll, listener, data, EventFlags::IN);
        }
    }
}

impl AsFd for ListeningSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            ListeningSocket::Tcp(listener, _) => listener.as_fd(),
            ListeningSocket::Unix(listener) => listener.as_fd(),
        }
    }
}

fn open_reserve() -> Option<OwnedFd> {
    std::fs::File::open("/dev/null").ok().map(OwnedFd::from)
}

impl ListeningSocket {
    fn accept(&self) -> io::Result<(OwnedFd, Remote, Origin)> {
        match self {
            ListeningSocket::Tcp(listener, origin) => {
                let (stream, address) = listener.accept()?;
                Ok((stream.into(), Remote::Ip(address), *origin))
            }
            ListeningSocket::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                let pid = sys::peer_pid(&stream);
                Ok((stream.into(), Remote::Process(pid), Origin::Unix))
            }
        }
    }
}

impl LocalRelay {
    /// The transport of a new connection.
    fn transport_of(
        &self,
        relay: &Relay,
        socket: OwnedFd,
        origin: Origin,
    ) -> Result<Transport, String> {
        match (origin, &self.identity) {
            (Origin::Ranks, _) if relay.is_recovery_enabled() => {
                let peer_timeout = Duration::from_millis(relay.reconnect_timeout_millis());
                sys::tune_recorded_link(&socket, peer_timeout);
            }
            (Origin::Ranks, _) => sys::tune_link(&socket),
            (Origin::Unix, _) => (),
            (Origin::Relays | Origin::Dialled(..), _) => sys::tune_shared_link(&socket),
        }
        let link = match (origin, &self.identity) {
            (Origin::Ranks | Origin::Unix, _) => return Ok(Transport::Plain(Socket(socket))),
            (Origin::Relays, Some(identity)) => TlsLink::accept(identity, socket),
            (Origin::Dialled(cluster, _), Some(identity)) => {
                TlsLink::dial(identity, cluster, socket)
            }
            (_, None) => return Err("this relay has no certificate".into()),
        };
        link.map(|link| Transport::Tls(Box::new(link))).map_err(|error| format!("TLS: {error}"))
    }

    /// The cluster of the relay whose certificate a connection has shown.
    fn certified_cluster(&self, connection: &Connection) -> Result<ClusterId, String> {
        let transport = connection.transport.as_ref();
        transport
            .and_then(|transport| transport.peer_cluster(self.clusters))
            .ok_or_else(|| "its certificate is that of no relay of this job".into())
    }
}

impl EventLoop<'_> {
    pub(super) fn accept_connections(&mut self, index: usize) {
        for _ in 0..ACCEPTS_MAX {
            match self.listeners.sockets[index].accept() {
                Ok((socket, remote, origin)) => self.handle_accepted(socket, remote, origin),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                        self.refuse_without_descriptors(index, &error);
                        return;
                    }
                    // The connection was closed before it could be accepted.
                    _ => continue,
                },
            }
        }
    }

    /// Uses the reserve descriptor to accept and close a connection, and pauses the listeners.
    fn refuse_without_descriptors(&mut self, index: usize, error: &io::Error) {
        drop(self.listeners.reserve.take());
        if let Ok((_, remote, _)) = self.listeners.sockets[index].accept() {
            self.report.accepted += 1;
            let why = format!("{error}; raise the limit of open files (ulimit -n)");
            self.refuse(&remote, &why);
        }
        self.listeners.reserve = open_reserve();
        self.listeners.pause(&self.epoll);
    }

    fn handle_accepted(&mut self, socket: OwnedFd, remote: Remote, origin: Origin) {
        let transport = rustix::io::ioctl_fionbio(&socket, true)
            .map_err(|error| error.to_string())
            .and_then(|()| self.own.transport_of(&self.forwarder.relay, socket, origin));
        self.add_pending(transport, remote, origin);
    }

    pub(super) fn add_pending(
        &mut self,
        transport: Result<Transport, String>,
        remote: Remote,
        origin: Origin,
    ) {
        self.report.accepted += 1;
        if self.pending.count >= PENDING_MAX {
            let oldest = self.pending.take_oldest(&mut self.forwarder.connections);
            if let Some(slot) = oldest {
                self.close(slot, "its hello was slow while many other connections waited");
            }
        }
        let pending = PendingConnection::new(origin, sys::now_millis());
        match transport {
            Ok(transport) => match self.open(transport, pending, remote) {
                Ok(slot) => self.forwarder.connections.enqueue(slot),
                Err(error) => self.host.log(format_args!("cannot watch a connection: {error}")),
            },
            Err(why) => self.refuse(&remote, &why),
        }
    }

    // ---- pending connections ------------------------------------------------------------

    pub(super) fn serve_pending(&mut self, slot: usize) {
        if self.dials.prefer_udp(&self.forwarder.connections[slot]) {
            self.forwarder.connections.schedule_close(slot, "UDP is tried once more".into());
            return;
        }
        let connection = &mut self.forwarder.connections[slot];
        let (Phase::Pending(pending), Some(transport)) =
            (&mut connection.phase, &mut connection.transport)
        else {
            return;
        };
        match pending.advance(transport, &self.own.credentials) {
            Ok(HelloProgress::Waits) => {
                if connection.input != InputState::Open {
                    self.forwarder.connections.schedule_close(
                        slot,
                        "it closed the connection before the end of the hello".into(),
                    );
                }
            }
            Ok(HelloProgress::Certified) => match self.certify(slot) {
                Ok(()) => self.serve_pending(slot),
                Err(why) => self.forwarder.connections.schedule_close(slot, why),
            },
            Ok(HelloProgress::Known(introduction, memory)) => {
                let origin = pending.origin;
                let result = match origin {
                    Origin::Ranks | Origin::Unix => {
                        self.admit_endpoint(slot, &introduction, memory)
                    }
                    Origin::Relays | Origin::Dialled(..) => self.admit_relay(slot, &introduction),
                };
                match result {
                    // No event will report what arrived directly behind the hello.
                    Ok(()) => self.forwarder.connections.enqueue(slot),
                    Err(why) => self.forwarder.connections.schedule_close(slot, why),
                }
            }
            Err(why) => self.forwarder.connections.schedule_close(slot, why),
        }
    }

    /// Checks the certificate that a relay has shown.
    fn certify(&mut self, slot: usize) -> Result<(), String> {
        let cluster = self.own.certified_cluster(&self.forwarder.connections[slot])?;
        self.forwarder.relay.peer(cluster).ok_or("its certificate is that of no other cluster")?;
        if let Phase::Pending(pending) = &mut self.forwarder.connections[slot].phase {
            pending.set_certified();
        }
        Ok(())
    }

    fn admit_endpoint(
        &mut self,
        slot: usize,
        introduction: &Introduction,
        memory: Option<OwnedFd>,
    ) -> Result<(), String> {
        match introduction.role {
            Role::Endpoint => (),
            Role::Relay => return Err("a relay connected to the listener of the ranks".into()),
            Role::Doctor => {
                self.pending.count -= 1;
                self.report.attached += 1;
                self.forwarder.connections[slot].phase = Phase::Doctor;
                return Ok(());
            }
        }
        if introduction.cluster != self.own.cluster {
            return Err(format!(
                "it belongs to cluster {}, this relay to cluster {}",
                introduction.cluster.0, self.own.cluster.0
            ));
        }
        if let Some(memory) = memory {
            self.forwarder.connections[slot].share_memory(memory)?;
            self.forwarder.waiter.note_shm(slot);
        }
        let (address, incarnation) = (introduction.address, introduction.incarnation);
        self.forwarder.violations.check(address)?;
        if let Some((link, older)) = self.forwarder.relay.incarnation(address) {
            if incarnation < older {
                return Err(format!("a later incarnation of {address} is attached already"));
            }
            let why = match incarnation == older {
                true => "it reconnects",
                false => "it has been restarted",
            };
            if let Some(old) = self.forwarder.connections.slot_of(link) {
                if self.forwarder.relay.is_recovery_enabled() {
                    self.forwarder.drain_input(old, link);
                }
                self.suspend(old, why);
            }
        }
        let is_shm = matches!(self.forwarder.connections[slot].transport, Some(Transport::Shm(_)));
        if self.log_storage.keeps_nondeterminism() && !is_shm {
            self.forwarder.relay.recovery_mut().keep_nondeterminism_of(address);
        }
        let link =
            self.forwarder.relay.attach_at(address, incarnation, introduction.log_position)?;
        self.forwarder.connections[slot].phase = Phase::Endpoint { link, address };
        self.bind(link, slot);
        self.forwarder.drain(&[]);
        Ok(())
    }

    fn admit_relay(&mut self, slot: usize, introduction: &Introduction) -> Result<(), String> {
        let cluster = self.own.certified_cluster(&self.forwarder.connections[slot])?;
        if introduction.role != Role::Relay {
            return Err("a rank connected to the listener of the relays".into());
        }
        if introduction.cluster != cluster {
            return Err(format!(
                "it says it is the relay of cluster {}, but its certificate is for cluster {}",
                introduction.cluster.0, cluster.0
            ));
        }
        let peer = self.forwarder.relay.peer(cluster).ok_or("this job has no such relay")?;
        let (stream, takes_over) = match &self.forwarder.connections[slot].phase {
            Phase::Pending(pending) => match pending.origin {
                Origin::Dialled(_, number) => {
                    (RelayStream { number, is_dialled: true }, pending.takes_over)
                }
                _ => RelayStream::parse(introduction.cookie)?,
            },
            _ => return Err("it has introduced itself already".into()),
        };
        let older = self.replace_streams(peer, stream, introduction.incarnation, takes_over);
        self.forwarder.retire(older);
        let new_stream = self.forwarder.relay.connect(peer, introduction.incarnation)?;
        self.forwarder.connections[slot].phase =
            Phase::Peer { link: new_stream.stream, cluster, stream };
        self.bind(new_stream.stream, slot);
        if let Some(Transport::Tls(tls)) = &mut self.forwarder.connections[slot].transport {
            tls.grow();
        }
        self.report_stream(slot, cluster, stream, &new_stream);
        if takes_over && !new_stream.is_first {
            self.host.handle_link(cluster, &self.forwarder.connections[slot].remote, LinkState::Up);
        }
        let is_it = |dial: &&mut Dial| dial.peer.cluster == cluster && dial.stream == stream.number;
        if let Some(dial) = self.dials.0.iter_mut().find(is_it).filter(|_| stream.is_dialled) {
            dial.due_millis = None;
            dial.pause_millis = DIAL_MILLIS_MIN;
            dial.reported.clear();
            (dial.udp_failed_millis, dial.is_udp_retry) = (None, false);
            let (over_tcp, now) = match self.forwarder.connections[slot].remote {
                Remote::Ip(at) => (Some(at).filter(|_| self.udp.is_wanted()), sys::now_millis()),
                _ => (None, sys::now_millis()),
            };
            dial.udp_backoff
                .note_up(matches!(self.forwarder.connections[slot].remote, Remote::Udp(_)), now);
            dial.udp_upgrade.note_up(over_tcp, now);
        }
        self.forwarder.drain(&[]);
        Ok(())
    }

    /// Closes the streams that this one replaces: all to an earlier incarnation of the relay, or
    /// the same stream. With `takes_over`, it returns the working stream, to be retired.
    fn replace_streams(
        &mut self,
        peer: LinkId,
        stream: RelayStream,
        incarnation: u32,
        takes_over: bool,
    ) -> Vec<LinkId> {
        let is_new = self.forwarder.relay.ports().peer_incarnation(peer) != Some(incarnation);
        let mut retiring = Vec::new();
        for id in self.forwarder.relay.ports().streams(peer).to_vec() {
            let Some(old) = self.forwarder.connections.slot_of(id) else { continue };
            let is_same = self.forwarder.connections[old].relay_stream() == Some(stream);
            if is_new {
                self.close(old, "the relay there has been restarted");
            } else if is_same && takes_over {
                retiring.push(id);
            } else if is_same {
                self.close(old, "the relay there reconnects");
            }
        }
        retiring
    }

    fn report_stream(
        &mut self,
        slot: usize,
        cluster: ClusterId,
        stream: RelayStream,
        new_stream: &NewStream,
    ) {
        let (remote, number, n) =
            (&self.forwarder.connections[slot].remote, cluster.0, stream.number);
        if !new_stream.is_first {
            self.host
                .log(format_args!("stream {n} to the relay of cluster {number} at {remote} is up"));
            return;
        }
        match new_stream.lossy_channels {
            0 => self.host.log(format_args!("linked to the relay of cluster {number} at {remote}")),
            channels => self.host.log(format_args!(
                "linked to the relay of cluster {number} at {remote} again; frames of {channels} \
                 channels may have been lost in the break, their senders have been notified"
            )),
        }
        self.host.handle_link(cluster, remote, LinkState::Up);
    }

    /// Dials the streams that are due. While a relay has no stream, only the first one is dialled.
    pub(super) fn dial_due(&mut self, now_millis: u64) {
        for index in 0..self.dials.0.len() {
            let dial = &mut self.dials.0[index];
            let (cluster, stream) = (dial.peer.cluster, dial.stream);
            let is_up = self
                .forwarder
                .relay
                .peer(cluster)
                .is_some_and(|peer| self.forwarder.relay.ports().is_up(peer));
            if dial.due_millis.is_none_or(|due| due > now_millis) || (stream > 0 && !is_up) {
                continue;
            }
            dial.due_millis = None;
            let fallback = dial.fallback.take();
            let Some(address) = fallback.or_else(|| dial.next_address()) else { continue };
            let may_use_udp = fallback.is_none() && dial.udp_backoff.allows_udp(now_millis);
            if may_use_udp && self.dial_over_udp((cluster, stream), address, now_millis, false) {
                continue;
            }
            if let Err(why) = self.dial(cluster, stream, address, now_millis) {
                self.handle_dial_failure(cluster, stream, &Remote::Ip(address), &why);
            }
        }
    }

    /// Schedules the next dial to a relay, without a limit. The log contains each reason once.
    pub(super) fn handle_dial_failure(
        &mut self,
        cluster: ClusterId,
        stream: u32,
        remote: &Remote,
        why: &str,
    ) {
        let is_up = self
            .forwarder
            .relay
            .peer(cluster)
            .is_some_and(|peer| self.forwarder.relay.ports().is_up(peer));
        let mut dial = self.dials.find(cluster, stream);
        if let Some(dial) = &mut dial
            && std::mem::take(&mut dial.is_dropped_for_udp)
        {
            dial.due_millis = Some(sys::now_millis());
            return;
        }
        if !is_up && dial.is_some_and(|dial| dial.is_new_reason(remote.to_string(), why)) {
            self.host.log(format_args!(
                "cannot reach the relay of cluster {} at {remote}: {why}; it is tried again and \
                 again",
                cluster.0
            ));
            self.host.handle_link(cluster, remote, LinkState::Unreachable(why));
        }
        self.dials.schedule(cluster, stream);
    }

    /// Dials TCP after UDP failed, unless the stream is up over TCP. UDP is tried again later.
    pub(super) fn handle_udp_failure(
        &mut self,
        cluster: ClusterId,
        stream: u32,
        address: SocketAddr,
        why: &str,
    ) {
        let now = sys::now_millis();
        let Some(dial) = self.dials.find(cluster, stream) else { return };
        if dial.udp_upgrade.note_failure(now) {
            return;
        }
        (dial.fallback, dial.due_millis) = (Some(address), Some(now));
        dial.udp_failed_millis = (!std::mem::take(&mut dial.is_udp_retry)).then_some(now);
        let relay = &self.forwarder.relay;
        self.dials.report_udp_failure((cluster, stream), address, why, relay, self.host);
    }

    fn dial(
        &mut self,
        cluster: ClusterId,
        stream: u32,
        address: SocketAddr,
        now_millis: u64,
    ) -> Result<(), String> {
        let socket = connect(address).map_err(|error| error.to_string())?;
        let origin = Origin::Dialled(cluster, stream);
        let transport = self.own.transport_of(&self.forwarder.relay, socket, origin)?;
        let slot = self
            .open(transport, PendingConnection::new(origin, now_millis), Remote::Ip(address))
            .map_err(|error| error.to_string())?;
        // The first event reports that the connection is established, or why it failed.
        self.forwarder.connections[slot].is_writable = false;
        Ok(())
    }
}

/// Starts a TCP connection.
fn connect(address: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}
