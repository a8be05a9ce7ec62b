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
//! frames that it had read. Once all links together keep `UNPARSED_BYTES_MAX`, each link reads no
//! more at once than it needs to go on.
//!
//! The modules in order; each uses only those before it:
//!
//! | module | holds |
//! |---|---|
//! | `transport` | the transport of a connection |
//! | `udp_upgrade` | how a stream over TCP returns to UDP |
//! | `pending_connection` | a connection until the end of its hello |
//! | `connection` | slots of all connections |
//! | `udp_backoff` | whether a stream is dialled over UDP |
//! | `dials` | streams that this relay dials: when, and at which address |
//! | `protocol_violations` | endpoints that break the protocol |
//! | `teardown` | how connections end |
//! | `waiting` | when to spin, when to sleep |
//! | `forwarder` | bytes between links and the state machine |
//! | `listeners` | how connections begin |
//! | `liveness` | connections on which nothing has been heard for too long |
//! | `log_storage` | message logs on the disk |
//! | `udp_hubs` | links over UDP, with their sockets |

mod connection;
mod dials;
mod forwarder;
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
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use landbridge_proto::id::{Address, ClusterId};
use landbridge_proto::relay::Relay;
use landbridge_proto::route::routing_table::LinkId;
use landbridge_proto::wire::hello::{Introduction, LogPosition, Role};
use landbridge_proto::wire::name::NAME_BYTES;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::{ControlAction, Engine, EngineHost, EngineReport, LinkState, Setup};
use crate::link::tls::Identity;
use crate::refusals::Refusals;
use crate::sys;
use connection::{ConnectionKey, ConnectionTable, InputState, Phase, Remote};
use dials::{Dial, Dials};
use forwarder::Forwarder;
use listeners::Listeners;
use liveness::LivenessMonitor;
use log_storage::LogStorage;
use pending_connection::{HelloCredentials, Origin, PendingConnection};
use transport::Transport;
use udp_hubs::UdpHubs;
use waiting::Waiter;

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

/// The single-threaded engine: see the module documentation.
pub struct Epoll;

impl Engine for Epoll {
    fn run(setup: Setup, host: &mut dyn EngineHost) -> io::Result<EngineReport> {
        EventLoop::new(setup, host)?.run()
    }
}

struct EventLoop<'w> {
    host: &'w mut dyn EngineHost,
    own: LocalRelay,
    epoll: OwnedFd,
    listeners: Listeners,
    controls: Vec<OwnedFd>,
    forwarder: Forwarder,
    pending: PendingConnections,
    refusals: Refusals,
    dials: Dials,
    udp: UdpHubs,
    log_storage: LogStorage,
    liveness: LivenessMonitor,
    next_tick_millis: u64,
    /// How long the last wait could be, at most. `None`: until something happened.
    wait_millis_max: Option<u64>,
    report: EngineReport,
}

/// What this relay is and shows to others.
struct LocalRelay {
    credentials: HelloCredentials,
    cluster: ClusterId,
    /// Number of clusters of the job.
    clusters: usize,
    identity: Option<Identity>,
}

/// The connections whose hello is still to come, the oldest first.
#[derive(Default)]
struct PendingConnections {
    keys: VecDeque<ConnectionKey>,
    count: usize,
}

impl PendingConnections {
    /// Closes the connections whose hello has taken too long.
    fn close_late(&mut self, connections: &mut ConnectionTable, now_millis: u64) {
        while let Some(key) = self.keys.front().copied() {
            match pending_connection(connections, key) {
                None => drop(self.keys.pop_front()),
                Some(pending) if pending.deadline_millis <= now_millis => {
                    let why = pending.timeout_reason();
                    self.keys.pop_front();
                    connections.schedule_close(key.slot, why);
                }
                Some(_) => return,
            }
        }
    }

    /// The slot of the connection that has waited for its hello for the longest time.
    fn take_oldest(&mut self, connections: &mut ConnectionTable) -> Option<usize> {
        while let Some(key) = self.keys.pop_front() {
            if pending_connection(connections, key).is_some() {
                return Some(key.slot);
            }
        }
        None
    }
}

fn pending_connection(
    connections: &mut ConnectionTable,
    key: ConnectionKey,
) -> Option<&mut PendingConnection> {
    match &mut connections.find(key)?.phase {
        Phase::Pending(pending) => Some(pending),
        _ => None,
    }
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
        let credentials = HelloCredentials { job: setup.job, key: setup.key, introduction };
        Ok(Self {
            host,
            own: LocalRelay { credentials, cluster: setup.own, clusters, identity: setup.identity },
            epoll,
            listeners,
            controls: setup.controls,
            forwarder: Forwarder::new(relay, Waiter::new(setup.spin)),
            pending: PendingConnections::default(),
            refusals: Refusals::default(),
            dials: Dials(dials),
            udp,
            log_storage,
            liveness: LivenessMonitor::default(),
            next_tick_millis: now,
            wait_millis_max: None,
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
                    self.handle_forwarded();
                    self.udp.shut_down();
                    return Ok(self.report());
                }
            }
            self.receive_udp();
            self.forwarder.retry_blocked();
            self.forwarder.waiter.collect_shm(&mut self.forwarder.connections);
            self.serve_ready();
            self.forwarder.resume();
            self.forwarder.send_replay();
            self.close_scheduled();
            self.tick();
            self.log_storage.service(&mut self.forwarder, self.host);
            self.udp.transmit(&self.epoll);
        }
    }

    fn wait(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        self.handle_forwarded();
        let may_sleep = self.forwarder.connections.is_idle()
            && !self.udp.is_busy()
            && !self.forwarder.relay.recovery().has_replay_work();
        let is_calm = !self.needs_clock();
        let needs_idle_clock =
            self.forwarder.relay.ports().has_streams() || self.liveness.needs_clock();
        self.wait_millis_max = match is_calm {
            true => needs_idle_clock.then_some(IDLE_TICK_MILLIS),
            false => Some(TICK_MILLIS),
        };
        let sleep = self.wait_millis_max.map(Duration::from_millis);
        self.forwarder.waiter.wait(
            &self.epoll,
            events,
            &mut self.forwarder.connections,
            may_sleep,
            self.udp.sleep_max(sleep),
            &mut self.report.waits,
        )
    }

    /// Handles what forwarding has shown: connections to monitor, and endpoints that have broken
    /// the protocol.
    fn handle_forwarded(&mut self) {
        for key in self.forwarder.watched.drain(..) {
            self.liveness.watch(key);
        }
        if std::mem::take(&mut self.forwarder.wrote_to_relay) {
            self.liveness.note_in_flight();
        }
        for (address, malformed) in self.forwarder.refused.drain(..) {
            self.host.warn(format_args!(
                "{address} breaks the protocol, and is refused from now on: {malformed}"
            ));
        }
    }

    fn needs_clock(&self) -> bool {
        self.pending.count > 0
            || self.forwarder.relay.ports().needs_time()
            || self.dials.0.iter().any(Dial::is_scheduled)
            || self.listeners.is_paused()
            || self.refusals.needs_clock()
            || self.liveness.has_in_flight()
            || self.forwarder.relay.recovery().waits_for_disk()
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
            self.log_storage.handle_disk(&mut self.forwarder.relay, self.host);
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
        let Some(connection) = self.forwarder.connections.find(key) else {
            return ControlAction::Continue;
        };
        let ends = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
        if flags.intersects(ends) {
            connection.note_input(InputState::Ending);
        }
        let was_writable = connection.is_writable;
        connection.is_writable |= flags.contains(EventFlags::OUT);
        let link = connection.link();
        if let Some(Transport::Shm(shm)) = &mut connection.transport {
            shm.0.unpark();
            // A read would consume the doorbell. Nobody reads a paused link, and a doorbell that is
            // not consumed does not ring again.
            if connection.is_paused && !shm.0.drain_doorbell() {
                connection.note_input(InputState::Ending);
            }
            self.forwarder.waiter.note_awake(key.slot);
        }
        if let (Some(link), false, true) = (link, was_writable, flags.contains(EventFlags::OUT)) {
            self.forwarder.flush(link, &[]);
            // The link may have capacity for control frames again.
            self.forwarder.drain(&[]);
        }
        if flags.intersects(ends | EventFlags::IN) || link.is_none() {
            self.forwarder.connections.enqueue(key.slot);
        }
        ControlAction::Continue
    }

    fn report(&self) -> EngineReport {
        let (log_bytes, disk_bytes) = self.forwarder.relay.recovery().kept_bytes();
        let (links, streams) = self.forwarder.connections.counts();
        EngineReport {
            log_bytes,
            disk_bytes,
            relay: self.forwarder.relay.counters(),
            links,
            streams,
            pending: self.pending.count,
            queued_bytes: self.forwarder.queued_bytes(),
            reads: self.forwarder.counts.reads,
            writes: self.forwarder.counts.writes,
            ..self.report
        }
    }

    // ---- serving links -----------------------------------------------------------------

    /// Serves everything that is ready now. What becomes ready meanwhile waits for the next round.
    fn serve_ready(&mut self) {
        for _ in 0..self.forwarder.connections.ready_count() {
            let Some(slot) = self.forwarder.connections.next_ready() else { break };
            let connection = &self.forwarder.connections[slot];
            match connection.phase {
                Phase::Free => (),
                Phase::Pending(_) => self.serve_pending(slot),
                Phase::Endpoint { link, .. } | Phase::Peer { link, .. } => {
                    if !connection.is_paused {
                        self.forwarder.serve_link(slot, link);
                    }
                }
                Phase::Doctor => {
                    self.forwarder.connections.schedule_close(slot, "the check is over".into())
                }
            }
        }
    }

    // ---- connections come and go --------------------------------------------------------

    /// Registers a new connection, whose hello is still to come.
    fn open(
        &mut self,
        transport: Transport,
        pending: PendingConnection,
        remote: Remote,
    ) -> io::Result<usize> {
        let slot = self.forwarder.connections.take_free();
        let connection = &mut self.forwarder.connections[slot];
        let token = (connection.generation as u64) << 32 | slot as u64;
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        if let Transport::Quic(link) = &transport {
            link.set_token(token);
        }
        let data = EventData::new_u64(token);
        if let Some(fd) = transport.fd()
            && let Err(error) = epoll::add(&self.epoll, fd, data, flags)
        {
            self.forwarder.connections.release(slot);
            return Err(error.into());
        }
        connection.transport = Some(transport);
        connection.phase = Phase::Pending(Box::new(pending));
        connection.remote = remote;
        self.pending.keys.push_back(self.forwarder.connections.key(slot));
        self.pending.count += 1;
        Ok(slot)
    }

    fn bind(&mut self, link: LinkId, slot: usize) {
        self.forwarder.connections.bind(link, slot);
        self.pending.count -= 1;
        self.report.attached += 1;
    }

    fn tick(&mut self) {
        let now = sys::now_millis();
        if now < self.next_tick_millis {
            return;
        }
        self.liveness.note_tick(now, self.next_tick_millis, self.wait_millis_max);
        self.next_tick_millis = now + TICK_MILLIS;
        self.forwarder.relay.handle_time(now);
        self.forwarder.drain(&[]);
        self.forwarder.resume();
        if !self.liveness.is_after_stall(now) {
            self.pending.close_late(&mut self.forwarder.connections, now);
        }
        self.liveness.close_unresponsive(&mut self.forwarder, now);
        self.log_storage.check_disk(&self.forwarder.relay, self.host, now);
        self.dial_due(now);
        self.upgrade_to_udp(now);
        self.forwarder.close_retired(now);
        self.listeners.resume(&self.epoll, now);
        self.close_scheduled();
        self.report_refusals(now);
    }
}
