//! A peer that sends arbitrary frames: random frames, and valid frames with changes.
//!
//! One endpoint, the victim, has an honest peer and attackers. What may never happen: the victim
//! panics; a payload would be placed outside of posted memory; the victim's unexpected bytes exceed
//! the credit that it gave; messages of the honest peer are affected.

use std::num::NonZeroU64;

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{
    Action, AtomicRequest, CompletionLevel, Config, Memory, Message, PathProperties,
    PayloadDestination, Peek, Peer, Posting, Remote, Ticket,
};
use landbridge_proto::id::Address;
use landbridge_proto::limit::{FRAME_BODY_BYTES_MAX, KIND_HEADER_BYTES_MAX};
use landbridge_proto::path::time::Time;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind, flag};
use landbridge_proto::wire::kind_header::{AdvertisedAddress, KindHeader, Long};
use landbridge_testbed::endpoint::{DrivenEndpoint, Frame, NoBytes, REFUSED};

use super::datagrams::{random_kind, with_datagrams};
use super::node::random_path;
use super::random::Random;
use super::{EventCounts, Violation, require};

/// Steps of a run.
const STEPS: u64 = 300;
/// Eager credit of every peer in bytes.
const WINDOW: u32 = 1_000;
/// Index of the honest peer.
const HONEST: usize = 0;
/// Number of peers.
const PEERS: usize = 3;
/// The only path of each peer.
const PATH: PathId = PathId(0);

/// Memory that has a size and no bytes; that of even size has an address.
#[derive(Clone, Debug)]
struct FakeMemory(u64);

impl Memory for FakeMemory {
    fn size(&self) -> u64 {
        self.0
    }

    fn address(&self) -> u64 {
        if self.0 & 1 == 0 { 0x10_0000 } else { 0 }
    }
}

impl From<u64> for FakeMemory {
    fn from(bytes: u64) -> Self {
        Self(bytes)
    }
}

/// The victim, and the knowledge of its peers that an attacker has.
struct Victim {
    endpoint: DrivenEndpoint<FakeMemory>,
    peers: [Peer; PEERS],
    /// Number of the next byte from each peer. `sent` holds the number of the next byte to each
    /// peer.
    sequence: [u64; PEERS],
    sent: [u64; PEERS],
    /// Operation numbers in frames that were sent to each attacker.
    known: [KnownNumbers; PEERS],
    /// Pulls that have begun and are not done.
    pulls: Vec<u32>,
    /// Receives for the honest peer that are not done.
    honest_pending: usize,
    now: Time,
    random: Random,
    counts: EventCounts,
    trace: bool,
}

pub fn run(seed: u64, trace: bool) -> Result<EventCounts, Violation> {
    let mut victim = Victim::new(seed, trace);
    for _ in 0..STEPS {
        if victim.random.percent(40) {
            victim.command();
        } else {
            let attacker = victim.random.within(1..=PEERS as u64 - 1) as usize;
            let (header, head) = victim.forge_frame(attacker);
            victim.frame(attacker, header, &head)?;
        }
        victim.drain()?;
        if victim.random.percent(30) {
            victim.transmit()?;
        }
        victim.pass_time();
    }
    victim.serve_honest_peer()?;
    victim.check_honest_peer()?;
    Ok(victim.counts)
}

impl Victim {
    fn new(seed: u64, trace: bool) -> Self {
        let mut random = Random::new(seed);
        let mut endpoint = DrivenEndpoint::new(Config {
            address: Address::new(100, 0),
            eager_window: WINDOW,
            min_multi_recv: 10,
            operations_max: 50,
        });
        let peers = [0, 1, 2].map(|index| endpoint.peer(Address::new(index, 0)));
        for peer in peers {
            endpoint.channel_mut(peer).open_path(PATH, random_datagram_path(&mut random));
        }
        Self {
            endpoint,
            peers,
            sequence: [0; PEERS],
            sent: [0; PEERS],
            known: Default::default(),
            pulls: Vec::new(),
            honest_pending: 0,
            now: Time(0),
            random,
            counts: EventCounts::default(),
            trace,
        }
    }

    fn ticket(&mut self) -> Ticket {
        Ticket { context: 1_000 + self.random.index(20), notify: true }
    }

    /// Issues a random command that attackers may interfere with. No such command concerns the
    /// honest peer.
    fn command(&mut self) {
        let (ticket, size) = (self.ticket(), self.random.size(5_000));
        let attacker = self.random.within(1..=PEERS as u64 - 1) as usize;
        let (peer, tag) = (self.peers[attacker], self.random.below(3));
        let remote = Remote { peer, key: 1, offset: 0 };
        let random = &mut self.random;
        let endpoint = &mut self.endpoint;
        match random.below(9) {
            0 | 1 => {
                let tag = random.percent(70).then_some(tag);
                let level = random
                    .pick(&[CompletionLevel::TransmitComplete, CompletionLevel::DeliveryComplete]);
                let memory = FakeMemory(size);
                let _ = endpoint.send(Message { peer, memory, tag, data: None, ticket, level });
            }
            2..=4 => {
                let multi = random.percent(20);
                let tag = (!multi && random.percent(70)).then_some((tag, 0));
                // The source is not a wildcard, because attackers must not match the receives for
                // the honest peer.
                endpoint.messages_mut().recv(Posting {
                    source: Some(peer),
                    memory: FakeMemory(size),
                    tag,
                    ticket,
                    multi,
                });
            }
            5 => drop(endpoint.write(remote, FakeMemory(size), Some(5), ticket)),
            6 => drop(endpoint.read(remote, FakeMemory(size), ticket)),
            7 => drop(endpoint.atomic(
                peer,
                sample_atomic(size),
                FakeMemory(size % 64),
                Some(FakeMemory(size % 64)),
                ticket,
            )),
            _ => {
                let (claim, discard) = random.pick(&[(true, false), (false, true), (false, false)]);
                let context = ticket.context + 1_000_000 + random.next() as usize % 1_000_000_000;
                endpoint.messages_mut().peek(Peek {
                    source: Some(peer),
                    tag,
                    ignore: 0,
                    context,
                    claim,
                    discard,
                });
            }
        }
    }

    /// Forges a frame of `attacker` that may resemble a valid frame.
    fn forge_frame(&mut self, attacker: usize) -> (Header, Vec<u8>) {
        let random = &mut self.random;
        let mut kind = random.pick(&Kind::ALL);
        // A frame that no endpoint may send ends the peer, and with it what else could be found.
        if !kind.is_between_endpoints() && random.percent(80) {
            kind = Kind::Ack;
        }
        let needs_number = KnownNumbers::needs_number(kind);
        if needs_number && self.known[attacker].pool(kind).is_empty() && random.percent(90) {
            kind = random.pick(&[Kind::Message, Kind::Tagged]);
        }
        let mut flags = random.below(32) as u8;
        let head = random_head(kind, &mut flags, &self.known[attacker], random);
        let mut front = [0; KIND_HEADER_BYTES_MAX];
        let size = head.emit(&mut front);
        let payload = match kind {
            Kind::Message
            | Kind::Tagged
            | Kind::Data
            | Kind::ReadData
            | Kind::Write
            | Kind::Fragment => random.size(WINDOW as u64 + 100),
            Kind::AtomicReply => random.size(70),
            Kind::Atomic if random.percent(90) => operand_bytes(&head),
            Kind::Atomic => random.size(130),
            _ if random.percent(1) => random.size(10),
            _ => 0,
        };
        let delivered = match random.below(60) {
            0 => random.next(),
            1..30 => self.sent[attacker],
            _ => random.below(self.sent[attacker] + 1),
        };
        let header = Header {
            length: size as u32 + payload as u32,
            kind,
            flags,
            hops: 0,
            source: Address::new(attacker as u32, 0),
            target: Address::new(100, 0),
            sequence: self.sequence[attacker] + random.pick(&[0, 0, 0, 0, 0, 0, 0, 16, 100]),
            delivered,
            credit: if random.percent(10) { random.next() as u32 } else { 0 },
        };
        self.mutate(header, &front[..size])
    }

    /// Changes bytes until the changed frame parses; if no attempt parses, the frame stays
    /// unchanged.
    fn mutate(&mut self, header: Header, head: &[u8]) -> (Header, Vec<u8>) {
        let mut bytes = vec![0; HEADER_BYTES];
        header.emit(&mut bytes);
        bytes.extend_from_slice(head);
        if self.random.percent(8) {
            for _ in 0..self.random.within(1..=3) {
                let at = self.random.index(bytes.len());
                bytes[at] ^= 1 << self.random.below(8);
            }
        }
        match Header::parse(&bytes) {
            Ok(header) => (header, bytes.split_off(HEADER_BYTES)),
            Err(_) => (header, head.to_vec()),
        }
    }

    /// Passes a frame of `from` to the endpoint as a driver would.
    fn frame(&mut self, from: usize, header: Header, head: &[u8]) -> Result<(), Violation> {
        let peer = self.peers[from];
        let mut head = head.to_vec();
        // A driver has read as many bytes as the header demands.
        head.resize(KindHeader::size(header.kind, header.flags).max(head.len()), 0);
        if self.trace {
            eprintln!(
                "{from}: {header:?} {:?}",
                KindHeader::parse(header.kind, header.flags, &head)
            );
        }
        let place = match self.endpoint.handle_frame(peer, PATH, &header, &head) {
            Ok(place) => place,
            Err(fault) => return self.handle_fault(from, fault.0),
        };
        self.counts.count("frames taken in");
        let head_size = KindHeader::size(header.kind, header.flags);
        let payload = header.payload(head_size).map_or(0, |(payload, _)| payload);
        let is_next = header.kind.is_numbered() && header.sequence == self.sequence[from];
        if is_next && header.kind != Kind::Fragment {
            self.sequence[from] += head_size as u64 + payload;
        }
        self.drain()?;
        require!(payload <= FRAME_BODY_BYTES_MAX as u64, "a payload of {payload} bytes");
        let frame = Frame { header, head, payload: Vec::new(), size: payload };
        self.endpoint.begin((peer, PATH), &frame, place, None)?;
        if let PayloadDestination::Region { op, .. } = place
            && self.random.percent(50)
        {
            self.endpoint.channel_mut(peer).refuse(op, REFUSED);
        }
        match self.random.below(20) {
            // A command may be issued before the payload arrives.
            0 => self.command(),
            1 => return self.replace_peer(from),
            _ => (),
        }
        self.drain()?;
        self.endpoint.end((peer, PATH))?;
        self.drain()
    }

    /// Advances the clock by a random time, which may be long; rarely the clock jumps back.
    fn pass_time(&mut self) {
        let jump = self.random.pick(&[0, 1 << 20, 1 << 20, 1 << 33, 1 << 40]);
        let back = if self.random.percent(1) { self.now.0 } else { 0 };
        self.now = Time(self.now.0 + self.random.below(jump + 1) - self.random.below(back + 1));
        self.endpoint.handle_time(self.now);
        if let Some(wake) = self.endpoint.schedule().next_wake().filter(|_| self.random.percent(30))
        {
            self.now = self.now.max(wake);
            self.endpoint.handle_time(self.now);
        }
        let peer = self.peers[self.random.index(PEERS)];
        self.endpoint.channel_mut(peer).end_batch(PATH);
    }

    fn handle_fault(&mut self, from: usize, why: &'static str) -> Result<(), Violation> {
        require!(from != HONEST, "the honest peer is blamed: {why}");
        self.counts.count("faults");
        self.counts.count(why);
        self.replace_peer(from)
    }

    /// Closes the connection to `from` and opens it again under a new peer number.
    fn replace_peer(&mut self, from: usize) -> Result<(), Violation> {
        self.endpoint.fail(self.peers[from], 103);
        require!(!self.endpoint.has_work_for(self.peers[from]), "work for {from}, which is lost");
        self.drain()?;
        self.peers[from] = self.endpoint.peer(Address::ANONYMOUS);
        let path = random_datagram_path(&mut self.random);
        self.endpoint.channel_mut(self.peers[from]).open_path(PATH, path);
        self.known[from] = KnownNumbers::default();
        (self.sequence[from], self.sent[from]) = (0, 0);
        Ok(())
    }

    fn drain(&mut self) -> Result<(), Violation> {
        let mut deferred = Vec::new();
        while let Some(action) = self.endpoint.poll_action() {
            self.endpoint.perform(&action, &mut NoBytes)?;
            match action {
                Action::Complete(done) => {
                    if done.ticket.context < 1_000
                        && done.error.is_none()
                        && done.source == Some(self.peers[HONEST])
                    {
                        self.honest_pending -= 1;
                    }
                }
                Action::Pull { recv, memory, at, length, .. } => {
                    require!(
                        at.checked_add(length).is_some_and(|end| end <= memory.0),
                        "pull outside"
                    );
                    self.pulls.push(recv);
                }
                other => deferred.push(other),
            }
        }
        for deferred_action in deferred {
            match deferred_action {
                Action::Serve { peer, op, length, .. } if length <= 10_000 => {
                    self.endpoint.channel_mut(peer).serve(op, FakeMemory(length))
                }
                Action::Serve { peer, op, .. } => {
                    self.endpoint.channel_mut(peer).refuse(op, REFUSED)
                }
                Action::Atomic { peer, request } if request.fetch => {
                    self.endpoint
                        .channel_mut(peer)
                        .answer(request.op, FakeMemory(request.length as u64));
                }
                _ => (),
            }
        }
        if self.random.percent(20)
            && let Some(recv) = self.pulls.pop()
        {
            let outcome = if self.random.percent(50) { Ok(()) } else { Err(()) };
            self.endpoint.messages_mut().handle_pulled(recv, outcome);
            return self.drain();
        }
        Ok(())
    }

    /// Transmits the frames for attackers; sometimes only some of these frames.
    fn transmit(&mut self) -> Result<(), Violation> {
        for index in 1..PEERS {
            let peer = self.peers[index];
            self.endpoint.handle_flushed(peer, PATH);
            self.drain()?;
            for _ in 0..self.random.below(5) {
                let Some(frame) = self.endpoint.poll_transmit(peer, PATH) else { break };
                let bytes = frame.front();
                let header = Header::parse(bytes)?;
                if let Some((memory, at, length)) = frame.payload {
                    require!(at + length <= memory.0, "{header:?} reads outside {memory:?}");
                }
                self.known[index].learn(&header, &bytes[HEADER_BYTES..]);
                if header.kind.is_numbered() {
                    let head_size = KindHeader::size(header.kind, header.flags);
                    let payload = header.payload(head_size).map_or(0, |(payload, _)| payload);
                    self.sent[index] = header.sequence + head_size as u64 + payload;
                }
                let flushed = self.random.percent(80);
                self.endpoint.transmitted(peer, PATH, flushed, None);
                self.drain()?;
            }
        }
        Ok(())
    }

    /// Lets the honest peer send messages to receives that only this peer can match.
    fn serve_honest_peer(&mut self) -> Result<(), Violation> {
        for tag in 0..5 {
            let ticket = Ticket { context: tag as usize, notify: true };
            let source = Some(self.peers[HONEST]);
            let posting = Posting {
                source,
                memory: FakeMemory(100),
                tag: Some((tag, 0)),
                ticket,
                multi: false,
            };
            self.endpoint.messages_mut().recv(posting);
            self.honest_pending += 1;
            self.drain()?;
            let head = KindHeader::Message { tag, data: 0, long: None };
            let mut front = [0; KIND_HEADER_BYTES_MAX];
            let size = head.emit(&mut front);
            let header = Header {
                length: size as u32 + 50,
                kind: Kind::Tagged,
                flags: 0,
                hops: 0,
                source: Address::new(HONEST as u32, 0),
                target: Address::new(100, 0),
                sequence: self.sequence[HONEST],
                delivered: 0,
                credit: 0,
            };
            let peer = self.peers[HONEST];
            let place = self.endpoint.handle_frame(peer, PATH, &header, &front[..size]);
            let place = place
                .map_err(|fault| Violation(format!("the honest peer's fault: {}", fault.0)))?;
            require!(
                matches!(place, PayloadDestination::Receive { take: 50, .. }),
                "the honest peer's {place:?}"
            );
            self.sequence[HONEST] += header.length as u64;
            self.drain()?;
            self.endpoint.handle_payload(peer, PATH);
            self.drain()?;
        }
        Ok(())
    }

    fn check_honest_peer(&self) -> Result<(), Violation> {
        require!(
            self.honest_pending == 0,
            "{} messages of the honest peer are lost",
            self.honest_pending
        );
        let honest = self.peers[HONEST];
        require!(self.endpoint.channel(honest).failed().is_none(), "the honest peer is given up");
        Ok(())
    }
}

/// Numbers of each kind that an attacker remembers at most.
const KNOWN_NUMBERS_MAX: usize = 3;

/// Operation numbers that an attacker knows, by kind.
#[derive(Default)]
struct KnownNumbers {
    messages: Vec<u32>,
    receives: Vec<u32>,
    requests: Vec<u32>,
}

impl KnownNumbers {
    /// Records the numbers that a frame gives to its receiver.
    fn learn(&mut self, header: &Header, head: &[u8]) {
        let Ok(head) = KindHeader::parse(header.kind, header.flags, head) else {
            return;
        };
        let (pool, number) = match head {
            KindHeader::Message { long: Some(long), .. } => (&mut self.messages, long.send),
            KindHeader::Grant { recv, .. } => (&mut self.receives, recv),
            KindHeader::Write { op, .. }
            | KindHeader::Read { op, .. }
            | KindHeader::Atomic { op, .. } => (&mut self.requests, op),
            _ => return,
        };
        pool.push(number);
        let old = pool.len().saturating_sub(KNOWN_NUMBERS_MAX);
        pool.drain(..old);
    }

    fn needs_number(kind: Kind) -> bool {
        use Kind::{AtomicReply, Data, Grant, Pulled, ReadData, Refused};
        matches!(kind, Grant | Pulled | Data | ReadData | AtomicReply | Refused)
    }

    fn pool(&self, kind: Kind) -> &[u32] {
        match kind {
            Kind::Grant | Kind::Pulled => &self.messages,
            Kind::Data => &self.receives,
            Kind::ReadData | Kind::AtomicReply | Kind::Refused => &self.requests,
            _ => &[],
        }
    }
}

fn random_datagram_path(random: &mut Random) -> PathProperties {
    let path = random_path(random, 0);
    with_datagrams(path, random_kind(random))
}

fn operand_bytes(head: &KindHeader) -> u64 {
    match *head {
        KindHeader::Atomic { wants, length, .. } if wants & 2 != 0 => 2 * length as u64,
        KindHeader::Atomic { length, .. } => length as u64,
        _ => 0,
    }
}

fn sample_atomic(size: u64) -> AtomicRequest {
    AtomicRequest {
        op: 0,
        operation: 2,
        datatype: 1,
        fetch: true,
        compare: false,
        length: (size % 64) as u32,
        key: 1,
        offset: 0,
    }
}

/// A random head of `kind` whose operation numbers are probably in use.
fn random_head(
    kind: Kind,
    flags: &mut u8,
    known: &KnownNumbers,
    random: &mut Random,
) -> KindHeader {
    let guess = random.below(6) as u32 | (random.pick(&[0, 0, 0, 1, 2]) << 24);
    let other = random.below(6) as u32 | (random.pick(&[0, 0, 0, 1, 2]) << 24);
    let pool = known.pool(kind);
    let op = if !pool.is_empty() && random.percent(85) { random.pick(pool) } else { guess };
    let number = random.pick(&[0, 1, 10, 100, 1_000, 10_000, u64::MAX, u64::MAX / 2]);
    let offset = if random.percent(50) { 0 } else { random.size(5_000) };
    let ranges = [(offset, random.below(200) as u32), (number, 9), (0, 0)];
    match kind {
        Kind::Message | Kind::Tagged => {
            if random.percent(50) {
                *flags &= !flag::LONG;
            }
            let memory = random.pick(&[0, 1 << 40, u64::MAX]);
            let total = if random.percent(70) { random.size(6_000) } else { number };
            let (send, ahead) =
                (random.below(4) as u32, random.pick(&[0, 0, 1, 100, 3_000, u32::MAX]));
            let long = (*flags & flag::LONG != 0).then_some(Long { total, send, memory, ahead });
            KindHeader::Message { tag: random.below(3), data: number, long }
        }
        Kind::Grant => {
            let limit = if random.percent(70) { random.size(6_000) } else { number };
            KindHeader::Grant { send: op, recv: other, limit }
        }
        Kind::Data => KindHeader::Data { recv: op, offset },
        Kind::Ahead => {
            let offset = if random.percent(50) { random.pick(&[0, 100, 200]) } else { offset };
            KindHeader::Ahead { send: random.below(4) as u32, offset }
        }
        Kind::Pulled => KindHeader::Pulled { send: op },
        Kind::AddressAdvertisement | Kind::UdpAdvertisement => {
            let token = NonZeroU64::new(7).filter(|_| kind == Kind::UdpAdvertisement);
            KindHeader::AddressAdvertisement(AdvertisedAddress { ip: [7; 16], port: 7, token })
        }
        Kind::Goodbye => KindHeader::Goodbye,
        Kind::Fragment => KindHeader::Fragment {
            kind: random.pick(&[Kind::Tagged, Kind::Write, Kind::Grant, Kind::Data]),
            flags: random.below(16) as u8,
            offset: random.below(20) as u32,
            whole: random.within(1..=5_000) as u32,
        },
        Kind::Sack => KindHeader::Sack { ranges },
        Kind::StatusRequest => KindHeader::StatusRequest { number },
        Kind::Nack => KindHeader::Nack { start: offset, end: number },
        Kind::Write => KindHeader::Write { op, total: 7, key: 1, offset: number, data: 7 },
        Kind::Read => KindHeader::Read { op, key: 1, offset: number, length: number },
        Kind::ReadData => KindHeader::ReadData { op, offset },
        Kind::Atomic => KindHeader::Atomic {
            op,
            operation: 2,
            datatype: 1,
            wants: random.below(4) as u8,
            length: random.below(100) as u32,
            key: 1,
            offset: number,
        },
        Kind::AtomicReply => KindHeader::AtomicReply { op },
        Kind::Refused => KindHeader::Refused { op, error: number as u32 },
        Kind::StatusReply => KindHeader::StatusReply { number: 1 + random.below(2), ranges },
        _ => {
            assert_eq!(KindHeader::size(kind, 0), 0, "{kind:?} has a head");
            KindHeader::Empty
        }
    }
}
