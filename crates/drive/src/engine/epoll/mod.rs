//! The single-threaded engine: one epoll set, edge-triggered, and one buffer at a time.
//!
//! A round of the loop: (1) wait, or only poll if something is left to do; (2) process the events;
//! (3) serve each ready link once: one read, all its frames forwarded, each touched output written
//! once; (4) resume inputs whose outputs have capacity again; (5) replay one more piece of the log
//! to restarted processes, and hand the disk what exceeds the memory; (6) close what has broken,
//! for which others may wait; (7) read the clock. So a single message costs one wait, one read and
//! one write.
//!
//! Memory: no link owns a buffer; one read at a time uses the one buffer. A link keeps only what it
//! has read and cannot forward yet: the beginning of a frame, or, while its input is paused, the
//! frames that it had read. Once all links together keep [`UNPARSED_BYTES_MAX`], each link reads no
//! more at once than it needs to go on.

mod listeners;
mod liveness;
mod log_storage;
mod pending_connection;
mod protocol_violations;
mod teardown;
mod transport;
mod udp_backoff;
mod udp_hubs;
mod udp_upgrade;
mod waiting;

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use landbridge_proto::id::{Address, ClusterId};
use landbridge_proto::relay::{FRAME_BYTES_MAX, Relay, STREAMS_MAX, Stop};
use landbridge_proto::route::routing_table::LinkId;
use landbridge_proto::wire::hello::{Introduction, LogPosition, Role};
use landbridge_proto::wire::name::NAME_BYTES;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::{ControlAction, Engine, EngineHost, EngineReport, LinkState, Setup};
use crate::link::tls::Identity;
use crate::refusals::Refusals;
use crate::sys;
use listeners::{Dial, Listeners};
use liveness::LivenessMonitor;
use log_storage::LogStorage;
use pending_connection::{HelloCredentials, Origin, PendingConnection};
use protocol_violations::ProtocolViolations;
use teardown::text;
use transport::Transport;
use udp_hubs::UdpHubs;
use udp_upgrade::TAKES_OVER;
use waiting::Waiter;

/// The bytes read at once: as much as a socket's buffer commonly holds, and at least four frames,
/// so that little of what is read is the beginning of a frame that must be moved.
const READ_BYTES: usize = 256 << 10;
/// The unparsed bytes of all links above which links read in steps of [`READ_STEP_BYTES`].
const UNPARSED_BYTES_MAX: usize = 64 << 20;
/// The bytes of a small read, which completes any frame, also the longest in a ring.
const READ_STEP_BYTES: usize = 2 * FRAME_BYTES_MAX;
/// The most connections in their hello. Beyond this, the relay closes the one that waited longest.
pub const PENDING_MAX: usize = 1024;
/// The most events taken from the kernel at once.
const EVENTS_MAX: usize = 256;
/// The interval of the clock in milliseconds.
const TICK_MILLIS: u64 = 100;
/// The interval of the clock in milliseconds while nothing needs the shorter one.
const IDLE_TICK_MILLIS: u64 = 1_000;

/// The reason when the other side has closed, because its process ended or was killed.
const CLOSED: &str = "it has closed the connection, as when its process ends";

const _: () = assert!(READ_BYTES >= 2 * READ_STEP_BYTES);

/// The single-threaded engine: see the module documentation.
pub struct Epoll;

impl Engine for Epoll {
    fn run(setup: Setup, host: &mut dyn EngineHost) -> io::Result<EngineReport> {
        EventLoop::new(setup, host)?.run()
    }
}

struct EventLoop<'w> {
    host: &'w mut dyn EngineHost,
    own: HelloCredentials,
    own_cluster: ClusterId,
    clusters: usize,
    identity: Option<Identity>,
    relay: Relay,
    epoll: OwnedFd,
    listeners: Listeners,
    controls: Vec<OwnedFd>,
    connections: Vec<Connection>,
    free: Vec<usize>,
    /// The slot of each link's connection, by the relay's link number.
    slots: Vec<Option<usize>>,
    pending: VecDeque<ConnectionKey>,
    pending_count: usize,
    refusals: Refusals,
    violations: ProtocolViolations,
    dials: Vec<Dial>,
    udp: UdpHubs,
    log_storage: LogStorage,
    /// The slots of the connections to serve.
    ready: VecDeque<usize>,
    /// The connections to close, each with the reason.
    closing: Vec<(ConnectionKey, String)>,
    /// The buffer into which the link that is being served reads.
    buffer: Box<[u8]>,
    /// The unparsed bytes that all links keep.
    unparsed_bytes: usize,
    waiter: Waiter,
    liveness: LivenessMonitor,
    /// The streams that another stream has replaced.
    retired: Vec<ConnectionKey>,
    next_tick_millis: u64,
    report: EngineReport,
}

/// The key of a connection, which differs from those of later connections in the same slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ConnectionKey {
    slot: usize,
    generation: u32,
}

struct Connection {
    generation: u32,
    transport: Option<Transport>,
    phase: Phase,
    remote: Remote,
    /// The beginning of a frame, or frames that wait for capacity of their outputs.
    unparsed: Box<[u8]>,
    is_queued: bool,
    is_writable: bool,
    is_paused: bool,
    /// The other side has closed the connection: no event will report the end of the stream again.
    is_ending: bool,
    /// The connection has been read to the end that the other side has made.
    has_ended: bool,
    /// The connection was written to, so it is monitored until the other side has confirmed this.
    is_watched: bool,
    /// Since when each check saw something in flight; kept for streams to other relays.
    unacked_since_millis: Option<u64>,
    /// The time at which another stream replaced this stream to another relay.
    retired_millis: Option<u64>,
}

enum Phase {
    Free,
    Pending(Box<PendingConnection>),
    Endpoint { link: LinkId, address: Address },
    Peer { link: LinkId, cluster: ClusterId, stream: RelayStream },
    Doctor,
}

/// One of the streams to a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RelayStream {
    /// The number of the stream, as the dialler numbers it.
    number: u32,
    is_dialled: bool,
}

enum Remote {
    Ip(SocketAddr),
    Udp(SocketAddr),
    Process(i32),
}

impl<'w> EventLoop<'w> {
    fn new(setup: Setup, host: &'w mut dyn EngineHost) -> io::Result<Self> {
        let now = sys::now_millis();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let udp = UdpHubs::open(&epoll, &setup, host);
        let dials = setup.peers.iter().flat_map(|peer| Dial::all(peer, &setup, now)).collect();
        let clusters = setup.clusters.len();
        let mut relay = Relay::new(setup.own, setup.clusters, now)
            .map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        if let Some(sum) = setup.integrity.function() {
            relay.set_check(sum);
        }
        let log_storage = LogStorage::new(&epoll, &mut relay, setup.recover)?;
        relay.set_reconnect_timeout(setup.peer_timeout.as_millis() as u64);
        let incarnation = u32::from_le_bytes(sys::random()?);
        let introduction = Introduction {
            role: Role::Relay,
            address: Address::ANONYMOUS,
            incarnation,
            cluster: setup.own,
            pid: std::process::id(),
            eager_window: 0,
            cookie_address: 0,
            cookie: 0,
            name: [0; NAME_BYTES],
            log_position: LogPosition::default(),
        };
        for (index, control) in setup.controls.iter().enumerate() {
            let data = EventData::new_u64(listeners::CONTROL_BASE + index as u64);
            match epoll::add(&epoll, control, data, EventFlags::IN) {
                // A file or /dev/null in the place of a lifeline never ends.
                Ok(()) | Err(rustix::io::Errno::PERM) => (),
                Err(error) => return Err(error.into()),
            }
        }
        let listeners = Listeners::open(&epoll, setup.ranks, setup.unix, setup.relays)?;
        Ok(Self {
            host,
            own: HelloCredentials { job: setup.job, key: setup.key, introduction },
            own_cluster: setup.own,
            clusters,
            identity: setup.identity,
            relay,
            epoll,
            listeners,
            controls: setup.controls,
            connections: Vec::new(),
            free: Vec::new(),
            slots: Vec::new(),
            pending: VecDeque::new(),
            pending_count: 0,
            refusals: Refusals::default(),
            violations: ProtocolViolations::default(),
            dials,
            udp,
            log_storage,
            ready: VecDeque::new(),
            closing: Vec::new(),
            buffer: vec![0; READ_BYTES].into_boxed_slice(),
            unparsed_bytes: 0,
            waiter: Waiter::new(setup.spin),
            liveness: LivenessMonitor::default(),
            retired: Vec::new(),
            next_tick_millis: now,
            report: EngineReport::default(),
        })
    }

    fn run(mut self) -> io::Result<EngineReport> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        self.tick();
        loop {
            events.clear();
            self.wait(&mut events)?;
            for event in events.iter() {
                if self.handle_event(event.data.u64(), event.flags) == ControlAction::Stop {
                    self.udp.shut_down();
                    return Ok(self.report());
                }
            }
            self.receive_udp();
            self.retry_blocked();
            self.waiter.collect_shm(&mut self.connections, &mut self.ready);
            self.serve_ready();
            self.resume();
            self.send_replay();
            self.close_scheduled();
            self.tick();
            self.service_log();
            self.udp.transmit(&self.epoll);
        }
    }

    fn wait(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let may_sleep = self.ready.is_empty()
            && self.closing.is_empty()
            && !self.udp.is_busy()
            && !self.relay.recovery().has_replay_work();
        let is_calm = !self.needs_clock();
        let needs_idle_clock = self.relay.ports().has_streams() || self.liveness.needs_clock();
        let sleep_millis = match is_calm {
            true => needs_idle_clock.then_some(IDLE_TICK_MILLIS),
            false => Some(TICK_MILLIS),
        };
        let sleep = sleep_millis.map(Duration::from_millis);
        self.waiter.wait(
            &self.epoll,
            events,
            &mut self.connections,
            may_sleep,
            self.udp.sleep_max(sleep),
            &mut self.report.waits,
        )
    }

    fn needs_clock(&self) -> bool {
        self.pending_count > 0
            || self.relay.ports().needs_time()
            || self.dials.iter().any(Dial::is_scheduled)
            || self.listeners.is_paused()
            || self.refusals.needs_clock()
            || self.liveness.has_in_flight()
            || self.relay.recovery().waits_for_disk()
    }

    fn handle_event(&mut self, token: u64, flags: EventFlags) -> ControlAction {
        if token >= listeners::CONTROL_BASE {
            let index = (token - listeners::CONTROL_BASE) as usize;
            let report = self.report();
            let next = self.host.handle_control(index, &self.controls[index], &report);
            return self.perform(next);
        }
        if token >= listeners::LISTENER_BASE {
            self.accept_connections((token - listeners::LISTENER_BASE) as usize);
            return ControlAction::Continue;
        }
        if token == log_storage::DISK_TOKEN {
            self.handle_disk();
            return ControlAction::Continue;
        }
        if token >= udp_hubs::HUB_BASE {
            self.udp.note_readable((token - udp_hubs::HUB_BASE) as usize);
            return ControlAction::Continue;
        }
        let key = ConnectionKey {
            slot: (token & 0xffff_ffff) as usize,
            generation: (token >> 32) as u32,
        };
        let Some(connection) = self.find(key) else { return ControlAction::Continue };
        let ends = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
        connection.is_ending |= flags.intersects(ends);
        let was_writable = connection.is_writable;
        connection.is_writable |= flags.contains(EventFlags::OUT);
        let link = connection.link();
        if let Some(Transport::Shm(shm)) = &mut connection.transport {
            shm.0.unpark();
            // A read would consume the doorbell. Nobody reads a paused link, and a doorbell that is
            // not consumed does not ring again.
            connection.is_ending |= connection.is_paused && !shm.0.drain_doorbell();
            self.waiter.note_awake(key.slot);
        }
        if let (Some(link), false, true) = (link, was_writable, flags.contains(EventFlags::OUT)) {
            self.flush(link, &[]);
            // The link may have capacity for control frames again.
            self.drain(&[]);
        }
        if flags.intersects(ends | EventFlags::IN) || link.is_none() {
            self.enqueue(key.slot);
        }
        ControlAction::Continue
    }

    /// Writes again to rings that were full.
    fn retry_blocked(&mut self) {
        if !self.waiter.has_blocked() {
            return;
        }
        for slot in self.waiter.take_blocked() {
            self.connections[slot].is_writable = true;
            if let Some(link) = self.connections[slot].link() {
                self.flush(link, &[]);
            }
        }
        self.drain(&[]);
    }

    fn report(&self) -> EngineReport {
        let (log_bytes, disk_bytes) = self.relay.recovery().kept_bytes();
        EngineReport {
            log_bytes,
            disk_bytes,
            relay: self.relay.counters(),
            links: self.slots.iter().flatten().count(),
            streams: self.connections.iter().filter(|it| it.is_relay_stream()).count(),
            pending: self.pending_count,
            queued_bytes: self.relay.queued_bytes() + self.unparsed_bytes,
            ..self.report
        }
    }

    // ---- serving links -----------------------------------------------------------------

    fn enqueue(&mut self, slot: usize) {
        let connection = &mut self.connections[slot];
        if !connection.is_queued {
            connection.is_queued = true;
            self.ready.push_back(slot);
        }
    }

    /// Serves everything that is ready now. What becomes ready meanwhile waits for the next round.
    fn serve_ready(&mut self) {
        for _ in 0..self.ready.len() {
            let Some(slot) = self.ready.pop_front() else { break };
            let connection = &mut self.connections[slot];
            connection.is_queued = false;
            match connection.phase {
                Phase::Free => (),
                Phase::Pending(_) => self.serve_pending(slot),
                Phase::Endpoint { link, .. } | Phase::Peer { link, .. } => {
                    if !connection.is_paused {
                        self.serve_link(slot, link);
                    }
                }
                Phase::Doctor => self.schedule_close(slot, "the check is over".into()),
            }
        }
    }

    fn serve_link(&mut self, slot: usize, link: LinkId) {
        let kept = self.connections[slot].unparsed.len();
        let room = match self.unparsed_bytes > UNPARSED_BYTES_MAX {
            true => (kept + READ_STEP_BYTES).min(READ_BYTES),
            false => READ_BYTES,
        };
        let mut buffer = std::mem::take(&mut self.buffer);
        let connection = &mut self.connections[slot];
        let Some(transport) = &mut connection.transport else { return };
        self.report.reads += 1;
        match transport.read(&mut buffer[kept..room]) {
            Ok(read) if read.bytes > 0 => {
                let again = read.more || connection.is_ending;
                self.process(slot, link, &mut buffer, kept + read.bytes);
                if again && !self.connections[slot].is_paused {
                    self.enqueue(slot);
                }
            }
            Ok(read) => match read.more {
                true => self.enqueue(slot),
                false => {
                    connection.has_ended = true;
                    self.schedule_close(slot, CLOSED.into());
                }
            },
            // A part of a TLS record has arrived, and the end of the stream follows it.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if connection.is_ending {
                    self.enqueue(slot);
                }
            }
            Err(error) => {
                connection.has_ended = error.kind() == io::ErrorKind::ConnectionReset;
                self.schedule_close(slot, text(&error));
            }
        }
        self.buffer = buffer;
    }

    /// Forwards the frames in `buffer[..filled]`, of which the connection has kept the first bytes,
    /// writes the outputs that they touch, and keeps the rest. Returns false if the frames break
    /// the protocol.
    fn process(&mut self, slot: usize, link: LinkId, buffer: &mut [u8], filled: usize) -> bool {
        let kept = std::mem::take(&mut self.connections[slot].unparsed);
        buffer[..kept.len()].copy_from_slice(&kept);
        self.unparsed_bytes -= kept.len();
        let taken = self.relay.handle_input(link, &mut buffer[..filled]);
        self.drain(buffer);
        self.note_valid(slot, taken.bytes);
        let connection = &mut self.connections[slot];
        connection.is_paused = taken.stop == Stop::Full;
        if let Stop::Broken(malformed) = taken.stop {
            self.post_refused_frame(slot, link);
            self.note_violation(slot, malformed);
            self.schedule_close(slot, malformed.to_string());
            return false;
        }
        connection.unparsed = buffer[taken.bytes..filled].into();
        self.unparsed_bytes += filled - taken.bytes;
        true
    }

    /// Processes all that an ended process has left in its link, whatever the outputs' capacity.
    fn drain_input(&mut self, slot: usize, link: LinkId) {
        self.relay.begin_drain(link);
        // The buffer holds a whole frame behind whatever the connection keeps.
        let mut buffer = vec![0; READ_BYTES + READ_STEP_BYTES];
        loop {
            let kept = self.connections[slot].unparsed.len();
            let Some(transport) = &mut self.connections[slot].transport else { return };
            let read = transport.read(&mut buffer[kept..]);
            let (bytes, more) = read.map_or((0, false), |read| (read.bytes, read.more));
            if !self.process(slot, link, &mut buffer, kept + bytes) || (bytes == 0 && !more) {
                return;
            }
        }
    }

    /// Writes every output that has something new, and keeps what the outputs do not take.
    fn drain(&mut self, buffer: &[u8]) {
        while let Some(output) = self.relay.poll_flush() {
            self.flush(output, buffer);
            self.relay.keep(output, buffer);
        }
    }

    /// Writes what waits for `link`, over as many streams as take something.
    fn flush(&mut self, link: LinkId, buffer: &[u8]) {
        for number in 0..self.relay.ports().writer_count(link) {
            let Some(writer) = self.relay.ports().writer(link, number) else { return };
            self.write(writer, buffer);
            if !self.relay.has_output(link) {
                return;
            }
        }
    }

    fn write(&mut self, link: LinkId, buffer: &[u8]) {
        let Some(slot) = self.slots.get(link.0 as usize).copied().flatten() else { return };
        let connection = &mut self.connections[slot];
        let is_tcp_stream = connection.is_tcp_stream();
        let Some(transport) = &mut connection.transport else { return };
        if !connection.is_watched && !matches!(transport, Transport::Shm(_)) {
            connection.is_watched = true;
            self.liveness.watch(ConnectionKey { slot, generation: connection.generation });
        }
        if connection.unacked_since_millis.is_none() && is_tcp_stream {
            connection.unacked_since_millis = Some(sys::now_millis());
            self.liveness.note_in_flight();
        }
        while connection.is_writable {
            self.report.writes += 1;
            let lengths = self.relay.frame_lengths(link);
            match transport.write(self.relay.slices(link, buffer), lengths) {
                Ok(written) => {
                    self.relay.handle_sent(link, written.bytes, buffer);
                    connection.is_writable = !written.blocked;
                    if written.bytes == 0 || !self.relay.has_output(link) {
                        break;
                    }
                }
                Err(_) => {
                    // The other side has closed, but what it has sent before must still be read.
                    // The end of this input closes the link.
                    (connection.is_writable, connection.is_ending) = (false, true);
                    self.enqueue(slot);
                    return;
                }
            }
        }
        if !connection.is_writable {
            self.waiter.note_blocked(slot, connection);
        }
    }

    /// Resumes inputs whose outputs have capacity again.
    fn resume(&mut self) {
        while let Some(link) = self.relay.poll_resume() {
            let Some(slot) = self.slots.get(link.0 as usize).copied().flatten() else { continue };
            self.connections[slot].is_paused = false;
            let kept = self.connections[slot].unparsed.len();
            if kept > 0 {
                let mut buffer = std::mem::take(&mut self.buffer);
                self.process(slot, link, &mut buffer, kept);
                self.buffer = buffer;
            }
            if !self.connections[slot].is_paused {
                self.enqueue(slot);
                self.waiter.note_resumed(slot, &self.connections[slot]);
            }
        }
    }

    /// Replays the next piece of the log to restarted processes.
    fn send_replay(&mut self) {
        if self.relay.recovery().has_replay_work() && self.relay.replay_next() {
            self.drain(&[]);
        }
    }

    // ---- connections come and go --------------------------------------------------------

    fn find(&mut self, key: ConnectionKey) -> Option<&mut Connection> {
        let connection = self.connections.get_mut(key.slot)?;
        (connection.generation == key.generation).then_some(connection)
    }

    fn key(&self, slot: usize) -> ConnectionKey {
        ConnectionKey { slot, generation: self.connections[slot].generation }
    }

    /// Registers a new connection, whose hello is still to come.
    fn open(
        &mut self,
        transport: Transport,
        pending: PendingConnection,
        remote: Remote,
    ) -> io::Result<usize> {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.connections.push(Connection::free());
            self.connections.len() - 1
        });
        let connection = &mut self.connections[slot];
        let token = (connection.generation as u64) << 32 | slot as u64;
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        if let Transport::Quic(link) = &transport {
            link.set_token(token);
        }
        let data = EventData::new_u64(token);
        if let Some(fd) = transport.fd()
            && let Err(error) = epoll::add(&self.epoll, fd, data, flags)
        {
            self.free.push(slot);
            return Err(error.into());
        }
        connection.transport = Some(transport);
        connection.phase = Phase::Pending(Box::new(pending));
        connection.remote = remote;
        let key = self.key(slot);
        self.pending.push_back(key);
        self.pending_count += 1;
        Ok(slot)
    }

    fn bind(&mut self, link: LinkId, slot: usize) {
        let number = link.0 as usize;
        if self.slots.len() <= number {
            self.slots.resize(number + 1, None);
        }
        self.slots[number] = Some(slot);
        self.pending_count -= 1;
        self.report.attached += 1;
    }

    fn tick(&mut self) {
        let now = sys::now_millis();
        if now < self.next_tick_millis {
            return;
        }
        self.liveness.note_tick(now, now - self.next_tick_millis);
        self.next_tick_millis = now + TICK_MILLIS;
        self.relay.handle_time(now);
        self.drain(&[]);
        self.resume();
        self.close_late_pending(now);
        self.close_unresponsive(now);
        self.check_disk(now);
        self.dial_due(now);
        self.upgrade_to_udp(now);
        self.close_retired(now);
        self.listeners.resume(&self.epoll, now);
        self.close_scheduled();
        self.report_refusals(now);
    }
}

impl Connection {
    fn free() -> Self {
        Self {
            generation: 0,
            transport: None,
            phase: Phase::Free,
            remote: Remote::Process(0),
            unparsed: Box::default(),
            is_queued: false,
            is_writable: true,
            is_paused: false,
            is_ending: false,
            has_ended: false,
            is_watched: false,
            unacked_since_millis: None,
            retired_millis: None,
        }
    }

    fn link(&self) -> Option<LinkId> {
        match self.phase {
            Phase::Endpoint { link, .. } | Phase::Peer { link, .. } => Some(link),
            _ => None,
        }
    }

    /// Whether this is a stream to another relay of which the kernel knows the silent time.
    fn is_tcp_stream(&self) -> bool {
        self.is_relay_stream() && matches!(self.transport, Some(Transport::Tls(_)))
    }

    fn is_relay_stream(&self) -> bool {
        matches!(self.phase, Phase::Peer { .. })
    }
}

impl RelayStream {
    /// The stream of another relay's dial, and whether it replaces an older one, from the cookie.
    fn parse(cookie: u64) -> Result<(Self, bool), String> {
        let number = cookie & !TAKES_OVER;
        match number < STREAMS_MAX as u64 {
            true => Ok((Self { number: number as u32, is_dialled: false }, number != cookie)),
            false => Err(format!("it opens a stream of number {number}")),
        }
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remote::Ip(address) => address.fmt(f),
            Remote::Udp(address) => write!(f, "{address}/udp"),
            Remote::Process(0) => write!(f, "a process of this node"),
            Remote::Process(pid) => write!(f, "process {pid} of this node"),
        }
    }
}
