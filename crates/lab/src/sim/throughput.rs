//! Measures the throughput of one path of datagrams: messages from one endpoint to another over a
//! simulated link of 1 Gb/s.
//!
//! The link has a queue that overflows, a delay, and losses that depend on a seed. Both ends get
//! the time and datagrams as from a driver, a little late. The result is a table: for each delay,
//! loss rate and congestion control, the rate of the first message and of later messages, and the
//! number of spurious retransmissions.
//!
//! The link is the simulation's own, because no other harness has a link with a rate.

use std::collections::{BTreeMap, VecDeque};

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{
    Action, CompletionLevel, Config, Message, PathProperties, PayloadDestination, Posting, Ticket,
};
use landbridge_proto::id::Address;
use landbridge_proto::path::congestion::CongestionAlgorithm;
use landbridge_proto::path::time::{MICROSECOND, MILLISECOND, SECOND, Time, nanos_for};
use landbridge_proto::wire::frame::HEADER_BYTES;
use landbridge_testbed::endpoint::{DrivenEndpoint, Frame, NoBytes, PEER, SizedMemory};

use super::random::Random;

/// Rate of the link in bytes per second: 1 Gb/s.
const RATE: u64 = 125_000_000;
/// Bytes that Ethernet, IPv4, UDP and the token add to a frame: 38 bytes of gap, preamble, header
/// and check, and 20, 8 and 8 bytes.
const OVERHEAD: u64 = 38 + 28 + 8;
/// Payload bytes of a frame in one Ethernet packet.
const PAYLOAD_MAX: u32 = 1500 - 28 - 8 - 40 - 48 - 4;
/// Longest delay, in nanoseconds, until a process reads or wakes.
const LATE_MAX: u64 = 50 * MICROSECOND;
/// Number of messages after the first.
const MORE: usize = 8;
/// Time slice, in nanoseconds, that a busy machine gives to a process.
const SLICE: u64 = 3 * MILLISECOND;
/// Longest run in nanoseconds; a longer run never delivers the message.
const LONGEST: u64 = 200 * SECOND;

/// Round trips of ping-pong before the measurement, and measured round trips.
const PING_PONGS: [usize; 2] = [4, 30];

/// Contexts of operations: a completed send, and (`RECEIVED`) a completed receive.
const SENT: usize = 0;
const RECEIVED: usize = 1;

const PATH: PathId = PathId(0);

/// The parameters of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct ThroughputCase {
    /// Round trip without queueing, in nanoseconds.
    pub round_trip: u64,
    /// Datagrams that are lost, per ten thousand.
    pub lost: u64,
    pub kind: CongestionAlgorithm,
    /// Bytes of a message.
    pub size: u64,
    /// Time slice in nanoseconds on a busy machine: each end runs for one slice, waits for one
    /// slice, and so on; 0 for ends that always run.
    pub slice: u64,
}

/// The result of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct ThroughputResult {
    /// Nanoseconds until the first message was delivered. `later` is the average for later
    /// messages.
    pub first: u64,
    pub later: u64,
    /// Datagrams with payload that were sent. `spurious` counts those whose payload had already
    /// arrived.
    pub sent: u64,
    pub spurious: u64,
}

struct SimulatedEnd {
    endpoint: DrivenEndpoint<SizedMemory>,
    arrived: VecDeque<Frame>,
    /// Time from which the link of this end is free.
    free_at: Time,
    reads_at: Option<Time>,
    wakes_at: Option<Time>,
    /// This end's messages whose delivery has been acknowledged. `received` counts the messages
    /// that this end has received.
    done: usize,
    received: usize,
}

enum EndEvent {
    Arrive(Frame),
    Read,
    Wake,
}

struct LinkModel {
    case: ThroughputCase,
    now: Time,
    random: Random,
    ends: [SimulatedEnd; 2],
    /// The events to come, by their time and number, and the ends that they concern.
    events: BTreeMap<(Time, u64), (usize, EndEvent)>,
    count: u64,
    sent: u64,
    spurious: u64,
}

/// Runs one case.
///
/// # Panics
/// Panics if a message is not delivered.
pub fn run(case: ThroughputCase, seed: u64) -> ThroughputResult {
    let mut model = LinkModel::new(case, seed);
    let first = model.message();
    let started = model.now;
    for _ in 0..MORE {
        model.message();
    }
    let later = model.now.nanos_since(started) / MORE as u64;
    ThroughputResult { first, later, sent: model.sent, spurious: model.spurious }
}

/// One-way time, in nanoseconds, of messages that the ends send in turn.
///
/// # Panics
/// Panics if a message is not delivered.
pub fn ping_pong(case: ThroughputCase, seed: u64) -> u64 {
    let mut model = LinkModel::new(case, seed);
    let [before, counted] = PING_PONGS;
    (0..before).for_each(|_| _ = model.ping());
    (0..counted).map(|_| model.ping()).sum::<u64>() / (2 * counted as u64)
}

impl LinkModel {
    fn new(case: ThroughputCase, seed: u64) -> Self {
        let end = |index: u32| {
            let mut endpoint = DrivenEndpoint::new(Config {
                address: Address::new(index, 0),
                eager_window: 2 << 20,
                min_multi_recv: 0,
                operations_max: 100,
            });
            endpoint.peer(Address::new(1 - index, 0));
            endpoint.channel_mut(PEER).open_path(PATH, path(case.kind));
            SimulatedEnd {
                endpoint,
                arrived: VecDeque::new(),
                free_at: Time(0),
                reads_at: None,
                wakes_at: None,
                done: 0,
                received: 0,
            }
        };
        Self {
            case,
            now: Time(SECOND),
            random: Random::new(seed),
            ends: [end(0), end(1)],
            events: BTreeMap::new(),
            count: 0,
            sent: 0,
            spurious: 0,
        }
    }

    /// Sends one message; returns the nanoseconds until its sender has the acknowledgement.
    fn message(&mut self) -> u64 {
        let done = self.ends[0].done + 1;
        self.send(0);
        self.run_until(|model| model.ends[0].done >= done)
    }

    /// Sends one message, and one back after its arrival, as PingPong of IMB does; returns the
    /// nanoseconds of both.
    fn ping(&mut self) -> u64 {
        let start = self.now;
        for from in [0, 1] {
            let received = self.ends[1 - from].received + 1;
            self.send(from);
            self.run_until(|model| model.ends[1 - from].received >= received);
        }
        self.now.nanos_since(start)
    }

    fn send(&mut self, from: usize) {
        let ticket = |context| Ticket { context, notify: true };
        let posting = Posting {
            source: None,
            memory: SizedMemory(self.case.size),
            tag: Some((1, 0)),
            ticket: ticket(RECEIVED),
            multi: false,
        };
        self.ends[1 - from].endpoint.messages_mut().recv(posting);
        let message = Message {
            peer: PEER,
            memory: SizedMemory(self.case.size),
            tag: Some(1),
            data: None,
            ticket: ticket(SENT),
            level: CompletionLevel::DeliveryComplete,
        };
        self.ends[from].endpoint.send(message).expect("one operation");
        self.pump(from);
        self.pump(1 - from);
    }

    /// Runs the simulation until `is_over`; returns the nanoseconds that passed.
    fn run_until(&mut self, is_over: impl Fn(&Self) -> bool) -> u64 {
        let start = self.now;
        while !is_over(self) {
            let next = self.events.pop_first().expect("something that happens");
            let ((at, _), (end, event)) = next;
            self.now = self.now.max(at);
            let taken = self.now.nanos_since(start);
            assert!(taken < LONGEST, "{:?}: a message is never there", self.case);
            self.handle(end, event);
        }
        self.now.nanos_since(start)
    }

    fn handle(&mut self, at: usize, event: EndEvent) {
        let now = self.now;
        let late = self.late(at, now);
        let end = &mut self.ends[at];
        match event {
            EndEvent::Arrive(packet) => {
                end.arrived.push_back(packet);
                if end.reads_at.is_none() {
                    end.reads_at = Some(late);
                    self.push(late, at, EndEvent::Read);
                }
                return;
            }
            EndEvent::Read => {
                end.reads_at = None;
                self.read(at);
            }
            EndEvent::Wake if end.wakes_at != Some(now) => return,
            EndEvent::Wake => {
                end.wakes_at = None;
                end.endpoint.handle_time(now);
            }
        }
        self.pump(at);
    }

    fn read(&mut self, at: usize) {
        self.ends[at].endpoint.set_time(self.now);
        while let Some(packet) = self.ends[at].arrived.pop_front() {
            self.handle_datagram(at, &packet);
        }
        self.ends[at].endpoint.channel_mut(PEER).end_batch(PATH);
    }

    fn handle_datagram(&mut self, at: usize, packet: &Frame) {
        let endpoint = &mut self.ends[at].endpoint;
        let place = endpoint.deliver((PEER, PATH), packet, &mut NoBytes).unwrap();
        self.spurious += (packet.size > 0 && place == PayloadDestination::Discard) as u64;
        self.drain(at);
    }

    fn drain(&mut self, at: usize) {
        while let Some(action) = self.ends[at].endpoint.next_action(&mut NoBytes).unwrap() {
            match action {
                Action::Complete(done) => {
                    assert_eq!(done.error, None);
                    let end = &mut self.ends[at];
                    *if done.ticket.context == SENT { &mut end.done } else { &mut end.received } +=
                        1;
                }
                Action::Release { .. }
                | Action::CopyUnexpected { .. }
                | Action::DropUnexpected { .. } => (),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Sends all frames that may leave now, and schedules the next wake-up of the process.
    fn pump(&mut self, at: usize) {
        self.ends[at].endpoint.set_time(self.now);
        self.drain(at);
        self.ends[at].endpoint.flush_deferred_acks();
        while self.ends[at].endpoint.next_busy().is_some() {
            while self.transmit(at) {}
        }
        let Some(wake) = self.ends[at].endpoint.schedule().next_wake() else { return };
        let wake = self.late(at, wake.max(self.now));
        if self.ends[at].wakes_at.is_none_or(|other| wake < other || other < self.now) {
            self.ends[at].wakes_at = Some(wake);
            self.push(wake, at, EndEvent::Wake);
        }
    }

    fn transmit(&mut self, at: usize) -> bool {
        let endpoint = &mut self.ends[at].endpoint;
        let Some(frame) = endpoint.transmit((PEER, PATH), &mut NoBytes).unwrap() else {
            return false;
        };
        self.drain(at);
        self.sent += (frame.size > 0) as u64;
        let bytes = HEADER_BYTES as u64 + frame.header.length as u64;
        let nanos = nanos_for(bytes + OVERHEAD, RATE);
        let waiting = self.ends[at].free_at.nanos_since(self.now);
        if waiting + nanos > nanos_for(self.queue_bytes(), RATE) {
            return true;
        }
        let free_at = self.now.after(waiting + nanos);
        self.ends[at].free_at = free_at;
        if self.random.below(10_000) >= self.case.lost {
            self.push(free_at.after(self.case.round_trip / 2), 1 - at, EndEvent::Arrive(frame));
        }
        true
    }

    /// Bytes that the queue holds: as much as the link carries in a round trip, and at least 256
    /// KiB, as a small switch has per port.
    fn queue_bytes(&self) -> u64 {
        (RATE / SECOND.div_ceil(self.case.round_trip)).max(256 << 10)
    }

    /// Time at which the process at `end` detects an event at time `then`.
    fn late(&mut self, end: usize, then: Time) -> Time {
        let noticed = then.after(self.random.below(LATE_MAX));
        let slice = self.case.slice;
        if slice == 0 {
            return noticed;
        }
        // The slices of the two ends are shifted against each other.
        let into = (noticed.0 + end as u64 * slice * 2 / 3) % (2 * slice);
        if into < slice { noticed } else { noticed.after(2 * slice - into) }
    }

    fn push(&mut self, at: Time, end: usize, event: EndEvent) {
        self.count += 1;
        self.events.insert((at, self.count), (end, event));
    }
}

fn path(kind: CongestionAlgorithm) -> PathProperties {
    PathProperties {
        payload_max: PAYLOAD_MAX,
        eager_max: PAYLOAD_MAX,
        first_piece: PAYLOAD_MAX,
        pull: false,
        window: u64::MAX,
        ahead: true,
        lossless: false,
        unbounded: false,
        checked: true,
        copy_max: PAYLOAD_MAX,
        spare: false,
        reorders: true,
        silent_loss: true,
        datagram: Some(kind),
    }
}

/// Prints the tables.
pub fn print() {
    println!("Mb/s of payload over 1 Gb/s, one way: the first message, and the eight after it");
    println!("| size | round trip | lost | Cubic | Bbr | Cubic: spurious retransmissions | Bbr |");
    println!("|---|---|---|---|---|---|---|");
    for (name, case) in cases() {
        let of = |kind| run(ThroughputCase { kind, ..case }, 7);
        let [cubic, bbr] = [of(CongestionAlgorithm::Cubic), of(CongestionAlgorithm::Bbr)];
        let spurious_percent = |it: ThroughputResult| 100.0 * it.spurious as f64 / it.sent as f64;
        println!(
            "{name} {}, {} | {}, {} | {:.3} % | {:.3} % |",
            rate(case, cubic.first),
            rate(case, cubic.later),
            rate(case, bbr.first),
            rate(case, bbr.later),
            spurious_percent(cubic),
            spurious_percent(bbr)
        );
    }
    println!(
        "\nThe same there and back in turn, behind {} turns; \"bound\": half a round trip,",
        PING_PONGS[0]
    );
    println!(
        "and the time that the link takes for a message that is sent at once and not lost. Second \
         numbers: ends that"
    );
    println!("have a processor for {} ms, then none for as long.", SLICE / MILLISECOND);
    println!("| size | round trip | lost | Cubic | Bbr | bound |");
    println!("|---|---|---|---|---|---|");
    for (name, case) in cases() {
        let of = |kind, slice| rate(case, ping_pong(ThroughputCase { kind, slice, ..case }, 7));
        let [cubic, bbr] = [CongestionAlgorithm::Cubic, CongestionAlgorithm::Bbr]
            .map(|kind| [of(kind, 0), of(kind, SLICE)]);
        let bound = rate(case, bound(case));
        println!("{name} {}, {} | {}, {} | {bound} |", cubic[0], cubic[1], bbr[0], bbr[1]);
    }
}

/// Every combination of size, delay and loss, each with the beginning of its table row.
fn cases() -> impl Iterator<Item = (String, ThroughputCase)> {
    let sizes = [1u64, 4, 16].into_iter();
    let trips = sizes.flat_map(|size| [1, 10, 50].map(|millis| (size, millis)));
    trips.flat_map(|(size, millis)| [0, 10, 100, 500].map(|lost| (size, millis, lost))).map(
        |(size, millis, lost)| {
            let percent = lost as f64 / 100.0;
            let name = format!("| {size} MiB | {millis} ms | {percent} % |");
            let round_trip = millis * MILLISECOND;
            (
                name,
                ThroughputCase {
                    round_trip,
                    lost,
                    kind: CongestionAlgorithm::Bbr,
                    size: size << 20,
                    slice: 0,
                },
            )
        },
    )
}

/// The rate in Mb/s of a message that takes `nanos` nanoseconds.
fn rate(case: ThroughputCase, nanos: u64) -> u64 {
    case.size * 8 * 1_000 / nanos.max(1)
}

fn bound(case: ThroughputCase) -> u64 {
    let datagrams = case.size.div_ceil(PAYLOAD_MAX as u64);
    case.round_trip / 2
        + nanos_for(case.size + datagrams * (HEADER_BYTES as u64 + 20 + OVERHEAD), RATE)
}
