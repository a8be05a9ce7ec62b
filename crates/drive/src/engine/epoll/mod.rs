//! The single-threaded engine: one epoll set, edge-triggered, and one buffer at a time.
//!
//! A round of the loop: (1) wait, or only look if something is left to do; (2) take in what the
//! events say; (3) serve each link that may have something, once: one read, all its frames
//! forwarded, each touched output written once; (4) let inputs go on whose outputs have room again;
//! (5) tell processes that were started anew one more piece of what was, and hand the disk what there is no memory for; (6) close what has broken, for which others may wait;
//! (7) look at the clock. A single message therefore costs one wait, one read and one write.
//!
//! Memory: no link owns a buffer; one read at a time uses one. A link keeps what it has read and cannot
//! forward yet, and no more: the beginning of a frame, or, while it is paused, what it had read. Once
//! all links together keep [`KEPT_BYTES_MAX`], each reads no more at once than it needs to go on.

mod back;
mod doors;
mod ends;
mod offences;
mod record;
mod silence;
mod stranger;
mod transport;
mod trust;
mod waiting;
mod wan;

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use landbridge_proto::id::{Address, ClusterId};
use landbridge_proto::relay::{FRAME_BYTES_MAX, LANES_MAX, Relay, Stop};
use landbridge_proto::route::table::LinkId;
use landbridge_proto::wire::hello::{Introduction, Role, Standing};
use landbridge_proto::wire::name::NAME_BYTES;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::{Engine, LinkState, Next, Report, Setup, Watch};
use crate::link::tls::Identity;
use crate::refusals::Refusals;
use crate::sys;
use back::TAKES_OVER;
use doors::{Dial, Doors};
use ends::text;
use offences::Offences;
use record::Record;
use silence::Silences;
use stranger::{Door, Own, Stranger};
use transport::Transport;
use waiting::Waiter;
use wan::Wan;

/// Bytes read at once: as much as a socket's buffer commonly holds, and four frames at least, so
/// that little of what is read is the beginning of a frame that must be moved.
const READ_BYTES: usize = 256 << 10;
/// What links keep of what they have read; beyond, they read in steps of [`STEP_BYTES`].
const KEPT_BYTES_MAX: usize = 64 << 20;
/// A frame whose beginning has been read gets whole with so much more, also the longest in a ring.
const STEP_BYTES: usize = 2 * FRAME_BYTES_MAX;
/// Connections in their hello. Beyond, the one that has waited longest must go.
pub const STRANGERS_MAX: usize = 1024;
/// Events taken from the kernel at once.
const EVENTS_MAX: usize = 256;
/// How often the clock matters,
const TICK_MILLIS: u64 = 100;
/// and how often if all is well.
const CALM_TICK_MILLIS: u64 = 1_000;

/// Why a link ends that the other side has closed: so does whoever ends, in good order or killed.
const CLOSED: &str = "it has closed the connection, as when its process ends";

const _: () = assert!(READ_BYTES >= 2 * STEP_BYTES);

/// See the module head.
pub struct Epoll;

impl Engine for Epoll {
    fn run(setup: Setup, watch: &mut dyn Watch) -> io::Result<Report> {
        Loop::new(setup, watch)?.run()
    }
}

struct Loop<'w> {
    watch: &'w mut dyn Watch,
    own: Own,
    own_cluster: ClusterId,
    clusters: usize,
    identity: Option<Identity>,
    relay: Relay,
    epoll: OwnedFd,
    doors: Doors,
    controls: Vec<OwnedFd>,
    connections: Vec<Connection>,
    free: Vec<usize>,
    /// Link of the relay to connection.
    slots: Vec<Option<usize>>,
    strangers: VecDeque<Key>,
    strangers_count: usize,
    refusals: Refusals,
    offences: Offences,
    dials: Vec<Dial>,
    wan: Wan,
    record: Record,
    /// Connections to serve.
    ready: VecDeque<usize>,
    /// Connections to close, and why.
    doomed: Vec<(Key, String)>,
    /// Where the link at hand reads to.
    buffer: Box<[u8]>,
    /// Bytes that links keep.
    kept_bytes: usize,
    waiter: Waiter,
    silences: Silences,
    /// Streams that another has taken the place of.
    retired: Vec<Key>,
    next_tick_millis: u64,
    report: Report,
}

/// A connection, told from later ones in the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    slot: usize,
    generation: u32,
}

struct Connection {
    generation: u32,
    transport: Option<Transport>,
    phase: Phase,
    remote: Remote,
    /// The beginning of a frame, or frames that wait for room.
    rest: Box<[u8]>,
    is_queued: bool,
    is_writable: bool,
    is_paused: bool,
    /// The other side has closed: nothing will announce the end of the stream again.
    is_ending: bool,
    /// It has been read to its end, which the other side has made.
    has_ended: bool,
    /// Written to, and therefore looked at until the other side has confirmed that.
    is_watched: bool,
    /// Since when something was under way at each look; kept for streams to other relays.
    awaits_since_millis: Option<u64>,
    /// A stream to another relay that another has taken the place of, since then.
    retired_millis: Option<u64>,
}

enum Phase {
    Free,
    Stranger(Box<Stranger>),
    Endpoint { link: LinkId, address: Address },
    Peer { link: LinkId, cluster: ClusterId, stream: Stream },
    Doctor,
}

/// Which of the streams to a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stream {
    /// As whoever has dialled numbers them.
    number: u32,
    is_dialled: bool,
}

enum Remote {
    Ip(SocketAddr),
    Udp(SocketAddr),
    Process(i32),
}

impl<'w> Loop<'w> {
    fn new(setup: Setup, watch: &'w mut dyn Watch) -> io::Result<Self> {
        let now = sys::now_millis();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wan = Wan::open(&epoll, &setup, watch);
        let dials = setup.peers.iter().flat_map(|peer| Dial::all(peer, &setup, now)).collect();
        let clusters = setup.clusters.len();
        let mut relay = Relay::new(setup.own, setup.clusters, now)
            .map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        if let Some(sum) = setup.integrity.function() {
            relay.set_check(sum);
        }
        let record = Record::new(&epoll, &mut relay, setup.recover)?;
        relay.set_patience(setup.peer_timeout.as_millis() as u64);
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
            standing: Standing::default(),
        };
        for (index, control) in setup.controls.iter().enumerate() {
            let data = EventData::new_u64(doors::CONTROL_BASE + index as u64);
            match epoll::add(&epoll, control, data, EventFlags::IN) {
                // A file or /dev/null in the place of a lifeline: it will not end.
                Ok(()) | Err(rustix::io::Errno::PERM) => (),
                Err(error) => return Err(error.into()),
            }
        }
        let doors = Doors::open(&epoll, setup.ranks, setup.unix, setup.relays)?;
        Ok(Self {
            watch,
            own: Own { job: setup.job, key: setup.key, introduction },
            own_cluster: setup.own,
            clusters,
            identity: setup.identity,
            relay,
            epoll,
            doors,
            controls: setup.controls,
            connections: Vec::new(),
            free: Vec::new(),
            slots: Vec::new(),
            strangers: VecDeque::new(),
            strangers_count: 0,
            refusals: Refusals::default(),
            offences: Offences::default(),
            dials,
            wan,
            record,
            ready: VecDeque::new(),
            doomed: Vec::new(),
            buffer: vec![0; READ_BYTES].into_boxed_slice(),
            kept_bytes: 0,
            waiter: Waiter::new(setup.spin),
            silences: Silences::default(),
            retired: Vec::new(),
            next_tick_millis: now,
            report: Report::default(),
        })
    }

    fn run(mut self) -> io::Result<Report> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        self.tick();
        loop {
            events.clear();
            self.wait(&mut events)?;
            for event in events.iter() {
                if self.handle_event(event.data.u64(), event.flags) == Next::Stop {
                    self.wan.wind_up();
                    return Ok(self.report());
                }
            }
            self.take_in_wan();
            self.look_at_blocked();
            self.waiter.collect_near(&mut self.connections, &mut self.ready);
            self.serve_ready();
            self.resume();
            self.tell();
            self.close_doomed();
            self.tick();
            self.keep_record();
            self.wan.transmit(&self.epoll);
        }
    }

    fn wait(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let may_sleep = self.ready.is_empty()
            && self.doomed.is_empty()
            && !self.wan.is_busy()
            && !self.relay.has_to_tell();
        let is_calm = !self.needs_clock();
        let needs_calm_clock = self.relay.has_lanes() || self.silences.needs_clock();
        let sleep_millis = match is_calm {
            true => needs_calm_clock.then_some(CALM_TICK_MILLIS),
            false => Some(TICK_MILLIS),
        };
        let sleep = sleep_millis.map(Duration::from_millis);
        self.waiter.wait(
            &self.epoll,
            events,
            &mut self.connections,
            may_sleep,
            self.wan.sleep_max(sleep),
            &mut self.report.waits,
        )
    }

    fn needs_clock(&self) -> bool {
        self.strangers_count > 0
            || self.relay.needs_time()
            || self.dials.iter().any(Dial::is_due_ever)
            || self.doors.is_closed()
            || self.refusals.needs_clock()
            || self.silences.is_pressed()
            || self.relay.waits_for_disk()
    }

    fn handle_event(&mut self, token: u64, flags: EventFlags) -> Next {
        if token >= doors::CONTROL_BASE {
            let index = (token - doors::CONTROL_BASE) as usize;
            let report = self.report();
            let next = self.watch.handle_control(index, &self.controls[index], &report);
            return self.show(next);
        }
        if token >= doors::DOOR_BASE {
            self.answer_door((token - doors::DOOR_BASE) as usize);
            return Next::GoOn;
        }
        if token == record::BELL {
            self.handle_disk();
            return Next::GoOn;
        }
        if token >= wan::HUB_BASE {
            self.wan.note_readable((token - wan::HUB_BASE) as usize);
            return Next::GoOn;
        }
        let key = Key { slot: (token & 0xffff_ffff) as usize, generation: (token >> 32) as u32 };
        let Some(connection) = self.find(key) else { return Next::GoOn };
        let ends = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
        connection.is_ending |= flags.intersects(ends);
        let was_writable = connection.is_writable;
        connection.is_writable |= flags.contains(EventFlags::OUT);
        let link = connection.link();
        if let Some(Transport::Near(near)) = &mut connection.transport {
            near.0.unpark();
            // Whoever reads takes in the bell; nobody reads a paused link, and a bell that is left there for
            // long rings no more.
            connection.is_ending |= connection.is_paused && !near.0.drain_doorbell();
            self.waiter.note_awake(key.slot);
        }
        if let (Some(link), false, true) = (link, was_writable, flags.contains(EventFlags::OUT)) {
            self.flush(link, &[]);
            // There may be room for notices.
            self.drain(&[]);
        }
        if flags.intersects(ends | EventFlags::IN) || link.is_none() {
            self.enqueue(key.slot);
        }
        Next::GoOn
    }

    /// Full rings may have room again.
    fn look_at_blocked(&mut self) {
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

    fn report(&self) -> Report {
        let (kept_bytes, disk_bytes) = self.relay.kept_bytes();
        Report {
            kept_bytes,
            disk_bytes,
            relay: self.relay.counters(),
            links: self.slots.iter().flatten().count(),
            lanes: self.connections.iter().filter(|it| it.is_lane()).count(),
            strangers: self.strangers_count,
            queued_bytes: self.relay.queued_bytes() + self.kept_bytes,
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

    /// Serves everything that is ready now; what gets ready meanwhile has its turn in the next round.
    fn serve_ready(&mut self) {
        for _ in 0..self.ready.len() {
            let Some(slot) = self.ready.pop_front() else { break };
            let connection = &mut self.connections[slot];
            connection.is_queued = false;
            match connection.phase {
                Phase::Free => (),
                Phase::Stranger(_) => self.serve_stranger(slot),
                Phase::Endpoint { link, .. } | Phase::Peer { link, .. } => {
                    if !connection.is_paused {
                        self.serve_link(slot, link);
                    }
                }
                Phase::Doctor => self.doom(slot, "the check is over".into()),
            }
        }
    }

    fn serve_link(&mut self, slot: usize, link: LinkId) {
        let kept = self.connections[slot].rest.len();
        let room = match self.kept_bytes > KEPT_BYTES_MAX {
            true => (kept + STEP_BYTES).min(READ_BYTES),
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
                    self.doom(slot, CLOSED.into());
                }
            },
            // Part of a TLS record is there, and the end behind it.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if connection.is_ending {
                    self.enqueue(slot);
                }
            }
            Err(error) => {
                connection.has_ended = error.kind() == io::ErrorKind::ConnectionReset;
                self.doom(slot, text(&error));
            }
        }
        self.buffer = buffer;
    }

    /// Forwards the frames in `buffer[..filled]`, of which the connection has kept the first bytes; writes what
    /// they touch, and keeps the rest. False: they break the protocol.
    fn process(&mut self, slot: usize, link: LinkId, buffer: &mut [u8], filled: usize) -> bool {
        let kept = std::mem::take(&mut self.connections[slot].rest);
        buffer[..kept.len()].copy_from_slice(&kept);
        self.kept_bytes -= kept.len();
        let taken = self.relay.handle_input(link, &mut buffer[..filled]);
        self.drain(buffer);
        self.note_right(slot, taken.bytes);
        let connection = &mut self.connections[slot];
        connection.is_paused = taken.stop == Stop::Full;
        if let Stop::Broken(malformed) = taken.stop {
            self.leave_word(slot, link);
            self.note_offence(slot, malformed);
            self.doom(slot, malformed.to_string());
            return false;
        }
        connection.rest = buffer[taken.bytes..filled].into();
        self.kept_bytes += filled - taken.bytes;
        true
    }

    /// Takes in all that a process that has ended has left, whether there is room for it or not.
    fn hear_out(&mut self, slot: usize, link: LinkId) {
        self.relay.hear_out(link);
        // Behind whatever it keeps there is room for a whole frame.
        let mut buffer = vec![0; READ_BYTES + STEP_BYTES];
        loop {
            let kept = self.connections[slot].rest.len();
            let Some(transport) = &mut self.connections[slot].transport else { return };
            let read = transport.read(&mut buffer[kept..]);
            let (bytes, more) = read.map_or((0, false), |read| (read.bytes, read.more));
            if !self.process(slot, link, &mut buffer, kept + bytes) || (bytes == 0 && !more) {
                return;
            }
        }
    }

    /// Writes every output that has something new, and keeps what they do not take.
    fn drain(&mut self, buffer: &[u8]) {
        while let Some(output) = self.relay.poll_flush() {
            self.flush(output, buffer);
            self.relay.keep(output, buffer);
        }
    }

    /// Writes what waits for `link`, over as many streams as it takes.
    fn flush(&mut self, link: LinkId, buffer: &[u8]) {
        for number in 0..self.relay.writer_count(link) {
            let Some(writer) = self.relay.writer(link, number) else { return };
            self.write(writer, buffer);
            if !self.relay.has_output(link) {
                return;
            }
        }
    }

    fn write(&mut self, link: LinkId, buffer: &[u8]) {
        let Some(slot) = self.slots.get(link.0 as usize).copied().flatten() else { return };
        let connection = &mut self.connections[slot];
        let is_tcp_lane = connection.is_tcp_lane();
        let Some(transport) = &mut connection.transport else { return };
        if !connection.is_watched && !matches!(transport, Transport::Near(_)) {
            connection.is_watched = true;
            self.silences.watch(Key { slot, generation: connection.generation });
        }
        if connection.awaits_since_millis.is_none() && is_tcp_lane {
            connection.awaits_since_millis = Some(sys::now_millis());
            self.silences.press();
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
                    // The other side is gone, but what it has sent before is still to be read; the
                    // end of that closes the link.
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

    /// Inputs whose outputs have room again go on.
    fn resume(&mut self) {
        while let Some(link) = self.relay.poll_resume() {
            let Some(slot) = self.slots.get(link.0 as usize).copied().flatten() else { continue };
            self.connections[slot].is_paused = false;
            let kept = self.connections[slot].rest.len();
            if kept > 0 {
                let mut buffer = std::mem::take(&mut self.buffer);
                self.process(slot, link, &mut buffer, kept);
                self.buffer = buffer;
            }
            if !self.connections[slot].is_paused {
                self.enqueue(slot);
                self.waiter.note_going(slot, &self.connections[slot]);
            }
        }
    }

    /// Processes that were started anew hear the next piece of what was before.
    fn tell(&mut self) {
        if self.relay.has_to_tell() && self.relay.tell() {
            self.drain(&[]);
        }
    }

    // ---- connections come and go --------------------------------------------------------

    fn find(&mut self, key: Key) -> Option<&mut Connection> {
        let connection = self.connections.get_mut(key.slot)?;
        (connection.generation == key.generation).then_some(connection)
    }

    fn key(&self, slot: usize) -> Key {
        Key { slot, generation: self.connections[slot].generation }
    }

    /// A new connection, a stranger yet.
    fn open(
        &mut self,
        transport: Transport,
        stranger: Stranger,
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
        connection.phase = Phase::Stranger(Box::new(stranger));
        connection.remote = remote;
        let key = self.key(slot);
        self.strangers.push_back(key);
        self.strangers_count += 1;
        Ok(slot)
    }

    fn bind(&mut self, link: LinkId, slot: usize) {
        let number = link.0 as usize;
        if self.slots.len() <= number {
            self.slots.resize(number + 1, None);
        }
        self.slots[number] = Some(slot);
        self.strangers_count -= 1;
        self.report.attached += 1;
    }

    fn tick(&mut self) {
        let now = sys::now_millis();
        if now < self.next_tick_millis {
            return;
        }
        self.silences.note_tick(now, now - self.next_tick_millis);
        self.next_tick_millis = now + TICK_MILLIS;
        self.relay.handle_time(now);
        self.drain(&[]);
        self.resume();
        self.dismiss_late_strangers(now);
        self.doom_silent(now);
        self.look_at_disk(now);
        self.dial_due(now);
        self.go_back_to_udp(now);
        self.close_retired(now);
        self.doors.reopen(&self.epoll, now);
        self.close_doomed();
        self.tell_of_refusals(now);
    }
}

impl Connection {
    fn free() -> Self {
        Self {
            generation: 0,
            transport: None,
            phase: Phase::Free,
            remote: Remote::Process(0),
            rest: Box::default(),
            is_queued: false,
            is_writable: true,
            is_paused: false,
            is_ending: false,
            has_ended: false,
            is_watched: false,
            awaits_since_millis: None,
            retired_millis: None,
        }
    }

    fn link(&self) -> Option<LinkId> {
        match self.phase {
            Phase::Endpoint { link, .. } | Phase::Peer { link, .. } => Some(link),
            _ => None,
        }
    }

    /// Whether it is a stream to another relay of which the system says how long it has been silent.
    fn is_tcp_lane(&self) -> bool {
        self.is_lane() && matches!(self.transport, Some(Transport::Tls(_)))
    }

    fn is_lane(&self) -> bool {
        matches!(self.phase, Phase::Peer { .. })
    }
}

impl Stream {
    /// One that another relay has dialled, and whether it takes over from an older one.
    fn parse(cookie: u64) -> Result<(Self, bool), String> {
        let number = cookie & !TAKES_OVER;
        match number < LANES_MAX as u64 {
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
