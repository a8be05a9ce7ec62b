//! A peer that sends whatever it likes: random frames, and honest ones with something changed.
//!
//! One endpoint lives with an honest peer and with liars. What may never happen: it panics; a payload would be
//! placed outside the memory that was posted; its unexpected bytes exceed the credit it gave; the honest
//! peer's messages suffer.

use std::collections::BTreeMap;

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{
    Action, AtomicRequest, Config, Endpoint, Level, Look, Memory, Message, Path, Peer, Place,
    Posting, Remote, Ticket,
};
use landbridge_proto::id::Address;
use landbridge_proto::limit::{FRAME_BODY_BYTES_MAX, HEAD_BYTES_MAX};
use landbridge_proto::path::time::Time;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind, flag};
use landbridge_proto::wire::head::{Door, Head, Long};

use super::datagrams::{random_kind, with_datagrams};
use super::node::random_path;
use super::random::Random;
use super::{Tally, Violation, require};

/// Steps of a run.
const STEPS: u64 = 300;
/// Eager credit of every peer.
const WINDOW: u32 = 1_000;
/// The honest peer.
const FRIEND: usize = 0;
/// All peers.
const PEERS: usize = 3;
/// The only path of each.
const PATH: PathId = PathId(0);

/// Memory that only has a size.
#[derive(Clone, Debug)]
struct Room(u64);

impl Memory for Room {
    fn size(&self) -> u64 {
        self.0
    }

    fn address(&self) -> u64 {
        if self.0 & 1 == 0 { 0x10_0000 } else { 0 }
    }
}

/// What the victim knows of a peer, as the liar would.
struct Victim {
    endpoint: Endpoint<Room>,
    peers: [Peer; PEERS],
    /// Number of the next byte from each peer, and of the next to it.
    sequence: [u64; PEERS],
    sent: [u64; PEERS],
    stores: BTreeMap<u32, (usize, u64)>,
    /// Numbers that frames to a liar have named.
    heard: [Heard; PEERS],
    /// Pulls begun and not done.
    pulls: Vec<u32>,
    /// Contexts of the honest peer's receives that are not done.
    friendly: usize,
    now: Time,
    random: Random,
    tally: Tally,
    trace: bool,
}

pub fn run(seed: u64, trace: bool) -> Result<Tally, Violation> {
    let mut victim = Victim::new(seed, trace);
    for _ in 0..STEPS {
        if victim.random.percent(40) {
            victim.command();
        } else {
            let liar = victim.random.within(1..=PEERS as u64 - 1) as usize;
            let (header, head) = victim.lie(liar);
            victim.frame(liar, header, &head)?;
        }
        victim.drain()?;
        if victim.random.percent(30) {
            victim.transmit()?;
        }
        victim.pass_time();
    }
    victim.serve_friend()?;
    victim.check_friend()?;
    Ok(victim.tally)
}

impl Victim {
    fn new(seed: u64, trace: bool) -> Self {
        let mut random = Random::new(seed);
        let mut endpoint = Endpoint::new(Config {
            address: Address::new(100, 0),
            eager_window: WINDOW,
            min_multi_recv: 10,
            operations_max: 50,
        });
        let peers = [0, 1, 2].map(|index| endpoint.peer(Address::new(index, 0)));
        for peer in peers {
            endpoint.open_path(peer, PATH, any_path(&mut random));
        }
        Self {
            endpoint,
            peers,
            sequence: [0; PEERS],
            sent: [0; PEERS],
            stores: BTreeMap::new(),
            heard: Default::default(),
            pulls: Vec::new(),
            friendly: 0,
            now: Time(0),
            random,
            tally: Tally::default(),
            trace,
        }
    }

    fn ticket(&mut self) -> Ticket {
        Ticket { context: 1_000 + self.random.index(20), notify: true }
    }

    /// Something for the liars to interfere with. Nothing of it concerns the friend.
    fn command(&mut self) {
        let (ticket, size) = (self.ticket(), self.random.size(5_000));
        let liar = self.random.within(1..=PEERS as u64 - 1) as usize;
        let (peer, tag) = (self.peers[liar], self.random.below(3));
        let remote = Remote { peer, key: 1, offset: 0 };
        let random = &mut self.random;
        let endpoint = &mut self.endpoint;
        match random.below(9) {
            0 | 1 => {
                let tag = random.percent(70).then_some(tag);
                let level = random.pick(&[Level::Handed, Level::Delivered]);
                let memory = Room(size);
                let _ = endpoint.send(Message { peer, memory, tag, data: None, ticket, level });
            }
            2..=4 => {
                let multi = random.percent(20);
                let tag = (!multi && random.percent(70)).then_some((tag, 0));
                // Not from anyone: the liars may not take what the friend's receives are for.
                endpoint.recv(Posting {
                    source: Some(peer),
                    memory: Room(size),
                    tag,
                    ticket,
                    multi,
                });
            }
            5 => drop(endpoint.write(remote, Room(size), Some(5), ticket)),
            6 => drop(endpoint.read(remote, Room(size), ticket)),
            7 => drop(endpoint.atomic(
                peer,
                an_atomic(size),
                Room(size % 64),
                Some(Room(size % 64)),
                ticket,
            )),
            _ => {
                let (claim, discard) = random.pick(&[(true, false), (false, true), (false, false)]);
                let context = ticket.context + 1_000_000 + random.next() as usize % 1_000_000_000;
                endpoint.look(Look { source: Some(peer), tag, ignore: 0, context, claim, discard });
            }
        }
    }

    /// A frame by `liar`, more or less likely to pass for honest.
    fn lie(&mut self, liar: usize) -> (Header, Vec<u8>) {
        let random = &mut self.random;
        let mut kind = random.pick(&Kind::ALL);
        let needs_number = Heard::needs_number(kind);
        if needs_number && self.heard[liar].pool(kind).is_empty() && random.percent(90) {
            kind = random.pick(&[Kind::Message, Kind::Tagged]);
        }
        let mut flags = random.below(32) as u8;
        let head = a_head(kind, &mut flags, &self.heard[liar], random);
        let mut front = [0; HEAD_BYTES_MAX];
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
            1..30 => self.sent[liar],
            _ => random.below(self.sent[liar] + 1),
        };
        let header = Header {
            length: size as u32 + payload as u32,
            kind,
            flags,
            hops: 0,
            source: Address::new(liar as u32, 0),
            target: Address::new(100, 0),
            sequence: self.sequence[liar] + random.pick(&[0, 0, 0, 0, 0, 0, 0, 16, 100]),
            delivered,
            credit: if random.percent(10) { random.next() as u32 } else { 0 },
        };
        self.mutate(header, &front[..size])
    }

    /// Changes bytes until the frame parses, or gives up and leaves it as it is.
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

    /// Hands a frame of `from` to the endpoint as a driver would.
    fn frame(&mut self, from: usize, header: Header, head: &[u8]) -> Result<(), Violation> {
        let peer = self.peers[from];
        let mut head = head.to_vec();
        // The driver has read as many bytes as the header asks for.
        head.resize(Head::size(header.kind, header.flags).max(head.len()), 0);
        if self.trace {
            eprintln!("{from}: {header:?} {:?}", Head::parse(header.kind, header.flags, &head));
        }
        let place = match self.endpoint.handle_frame(peer, PATH, &header, &head) {
            Ok(place) => place,
            Err(fault) => return self.blame(from, fault.0),
        };
        self.tally.count("frames taken in");
        let head_size = Head::size(header.kind, header.flags);
        let payload = header.payload(head_size).map_or(0, |(payload, _)| payload);
        let is_next = header.kind.is_numbered() && header.sequence == self.sequence[from];
        if is_next && header.kind != Kind::Fragment {
            self.sequence[from] += head_size as u64 + payload;
        }
        self.drain()?;
        self.check_place(from, place, payload)?;
        match self.random.below(20) {
            // Meanwhile …
            0 => self.command(),
            1 => return self.give_up(from),
            _ => (),
        }
        self.drain()?;
        self.endpoint.handle_payload(peer, PATH);
        self.drain()
    }

    /// Time goes on, sometimes by much, or back.
    fn pass_time(&mut self) {
        let jump = self.random.pick(&[0, 1 << 20, 1 << 20, 1 << 33, 1 << 40]);
        let back = if self.random.percent(1) { self.now.0 } else { 0 };
        self.now = Time(self.now.0 + self.random.below(jump + 1) - self.random.below(back + 1));
        self.endpoint.handle_time(self.now);
        if let Some(wake) = self.endpoint.next_wake().filter(|_| self.random.percent(30)) {
            self.now = self.now.max(wake);
            self.endpoint.handle_time(self.now);
        }
        let peer = self.peers[self.random.index(PEERS)];
        self.endpoint.end_batch(peer, PATH);
    }

    fn check_place(&mut self, from: usize, place: Place, payload: u64) -> Result<(), Violation> {
        require!(payload <= FRAME_BODY_BYTES_MAX as u64, "a payload of {payload} bytes");
        match place {
            Place::Receive { .. } | Place::Answer { .. } => {
                let memory = self.endpoint.place_memory(place);
                let Some((room, at, take)) = memory else {
                    return Err(Violation(format!("{place:?} has no memory")));
                };
                let end = at.checked_add(take.min(payload));
                require!(end.is_some_and(|end| end <= room.0), "{place:?} is outside {room:?}");
            }
            Place::Store { store, size } if size > 0 => {
                require!(payload <= size, "{payload} bytes into a store of {size}");
                let before = self.stores.insert(store, (from, size));
                require!(before.is_none(), "store {store} is in use");
                let stored: u64 =
                    self.stores.values().filter(|(of, _)| *of == from).map(|(_, size)| size).sum();
                require!(stored <= WINDOW as u64, "{from} makes us store {stored} bytes");
            }
            Place::Stored { store, at } => {
                let size = self.stores.get(&store).map(|&(_, size)| size);
                let fits = size.is_some_and(|size| at + payload <= size);
                require!(fits, "{payload} bytes at {at} of store {store} of {size:?}");
            }
            Place::Region { op, .. } if self.random.percent(50) => {
                self.endpoint.refuse(self.peers[from], op, 13);
            }
            _ => (),
        }
        Ok(())
    }

    fn blame(&mut self, from: usize, why: &'static str) -> Result<(), Violation> {
        require!(from != FRIEND, "the honest peer is blamed: {why}");
        self.tally.count("faults");
        self.tally.count(why);
        self.give_up(from)
    }

    /// Closes the link to `from`, and lets it come back under a new number.
    fn give_up(&mut self, from: usize) -> Result<(), Violation> {
        self.endpoint.fail(self.peers[from], 103);
        require!(!self.endpoint.has_work_for(self.peers[from]), "work for {from}, which is lost");
        self.drain()?;
        self.peers[from] = self.endpoint.peer(Address::ANONYMOUS);
        let path = any_path(&mut self.random);
        self.endpoint.open_path(self.peers[from], PATH, path);
        self.heard[from] = Heard::default();
        (self.sequence[from], self.sent[from]) = (0, 0);
        for (of, _) in self.stores.values_mut().filter(|(of, _)| *of == from) {
            // What the old number left behind has credit of its own.
            *of = PEERS;
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), Violation> {
        let mut chores = Vec::new();
        while let Some(action) = self.endpoint.poll_action() {
            match action {
                Action::Done(done) => {
                    if done.ticket.context < 1_000
                        && done.error.is_none()
                        && done.source == Some(self.peers[FRIEND])
                    {
                        self.friendly -= 1;
                    }
                }
                Action::Fill { store, memory, at, length } => {
                    let kept = self.stores.remove(&store);
                    require!(
                        kept.is_some_and(|(_, size)| length <= size),
                        "fill out of store {store}"
                    );
                    require!(
                        at.checked_add(length).is_some_and(|end| end <= memory.0),
                        "fill outside"
                    );
                }
                Action::Forget { store } => {
                    require!(self.stores.remove(&store).is_some(), "store {store} forgotten twice");
                }
                Action::Pull { recv, memory, at, length, .. } => {
                    require!(
                        at.checked_add(length).is_some_and(|end| end <= memory.0),
                        "pull outside"
                    );
                    self.pulls.push(recv);
                }
                other => chores.push(other),
            }
        }
        for chore in chores {
            match chore {
                Action::Serve { peer, op, length, .. } if length <= 10_000 => {
                    self.endpoint.serve(peer, op, Room(length))
                }
                Action::Serve { peer, op, .. } => self.endpoint.refuse(peer, op, 13),
                Action::Atomic { peer, request } if request.fetch => {
                    self.endpoint.answer(peer, request.op, Room(request.length as u64));
                }
                _ => (),
            }
        }
        if self.random.percent(20)
            && let Some(recv) = self.pulls.pop()
        {
            let outcome = if self.random.percent(50) { Ok(()) } else { Err(()) };
            self.endpoint.handle_pulled(recv, outcome);
            return self.drain();
        }
        Ok(())
    }

    /// Sends what is to be sent to a liar; sometimes only half of it.
    fn transmit(&mut self) -> Result<(), Violation> {
        for index in 1..PEERS {
            let peer = self.peers[index];
            self.endpoint.handle_flushed(peer, PATH);
            self.drain()?;
            for _ in 0..self.random.below(5) {
                let Some(frame) = self.endpoint.poll_transmit(peer, PATH) else { break };
                let bytes = frame.front();
                let header = Header::parse(bytes).map_err(|bad| Violation(bad.0.into()))?;
                if let Some((room, at, length)) = frame.payload {
                    require!(at + length <= room.0, "{header:?} reads outside {room:?}");
                }
                self.heard[index].learn(&header, &bytes[HEADER_BYTES..]);
                if header.kind.is_numbered() {
                    let head_size = Head::size(header.kind, header.flags);
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

    /// The friend sends messages into receives that only it can match.
    fn serve_friend(&mut self) -> Result<(), Violation> {
        for tag in 0..5 {
            let ticket = Ticket { context: tag as usize, notify: true };
            let source = Some(self.peers[FRIEND]);
            let posting =
                Posting { source, memory: Room(100), tag: Some((tag, 0)), ticket, multi: false };
            self.endpoint.recv(posting);
            self.friendly += 1;
            self.drain()?;
            let head = Head::Message { tag, data: 0, long: None };
            let mut front = [0; HEAD_BYTES_MAX];
            let size = head.emit(&mut front);
            let header = Header {
                length: size as u32 + 50,
                kind: Kind::Tagged,
                flags: 0,
                hops: 0,
                source: Address::new(FRIEND as u32, 0),
                target: Address::new(100, 0),
                sequence: self.sequence[FRIEND],
                delivered: 0,
                credit: 0,
            };
            let peer = self.peers[FRIEND];
            let place = self.endpoint.handle_frame(peer, PATH, &header, &front[..size]);
            let place =
                place.map_err(|fault| Violation(format!("a friend's fault: {}", fault.0)))?;
            require!(matches!(place, Place::Receive { take: 50, .. }), "a friend's {place:?}");
            self.sequence[FRIEND] += header.length as u64;
            self.drain()?;
            self.endpoint.handle_payload(peer, PATH);
            self.drain()?;
        }
        Ok(())
    }

    fn check_friend(&self) -> Result<(), Violation> {
        require!(self.friendly == 0, "{} messages of the friend are lost", self.friendly);
        let friend = self.peers[FRIEND];
        require!(self.endpoint.failed(friend).is_none(), "the friend is given up");
        Ok(())
    }
}

/// Numbers that a liar remembers.
const HEARD: usize = 3;

/// Numbers a liar has heard, by what they are good for.
#[derive(Default)]
struct Heard {
    messages: Vec<u32>,
    receives: Vec<u32>,
    questions: Vec<u32>,
}

impl Heard {
    /// Notes the numbers that a frame gives its receiver.
    fn learn(&mut self, header: &Header, head: &[u8]) {
        let Ok(head) = Head::parse(header.kind, header.flags, head) else {
            return;
        };
        let (pool, number) = match head {
            Head::Message { long: Some(long), .. } => (&mut self.messages, long.send),
            Head::Grant { recv, .. } => (&mut self.receives, recv),
            Head::Write { op, .. } | Head::Read { op, .. } | Head::Atomic { op, .. } => {
                (&mut self.questions, op)
            }
            _ => return,
        };
        pool.push(number);
        let old = pool.len().saturating_sub(HEARD);
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
            Kind::ReadData | Kind::AtomicReply | Kind::Refused => &self.questions,
            _ => &[],
        }
    }
}

fn any_path(random: &mut Random) -> Path {
    let path = random_path(random, 0);
    with_datagrams(path, random_kind(random))
}

fn operand_bytes(head: &Head) -> u64 {
    match *head {
        Head::Atomic { wants, length, .. } if wants & 2 != 0 => 2 * length as u64,
        Head::Atomic { length, .. } => length as u64,
        _ => 0,
    }
}

fn an_atomic(size: u64) -> AtomicRequest {
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

/// A head of `kind` that names numbers as they are likely to be in use.
fn a_head(kind: Kind, flags: &mut u8, heard: &Heard, random: &mut Random) -> Head {
    let guess = random.below(6) as u32 | (random.pick(&[0, 0, 0, 1, 2]) << 24);
    let other = random.below(6) as u32 | (random.pick(&[0, 0, 0, 1, 2]) << 24);
    let pool = heard.pool(kind);
    let op = if !pool.is_empty() && random.percent(85) { random.pick(pool) } else { guess };
    let number = random.pick(&[0, 1, 10, 100, 1_000, 10_000, u64::MAX, u64::MAX / 2]);
    let offset = if random.percent(50) { 0 } else { random.size(5_000) };
    match kind {
        Kind::Message | Kind::Tagged => {
            if random.percent(50) {
                *flags &= !flag::LONG;
            }
            let memory = random.pick(&[0, 1 << 40, u64::MAX]);
            let total = if random.percent(70) { random.size(6_000) } else { number };
            let long = (*flags & flag::LONG != 0).then_some(Long {
                total,
                send: random.below(4) as u32,
                memory,
                ahead: random.pick(&[0, 0, 1, 100, 3_000, u32::MAX]),
            });
            Head::Message { tag: random.below(3), data: number, long }
        }
        Kind::Grant => {
            let limit = if random.percent(70) { random.size(6_000) } else { number };
            Head::Grant { send: op, recv: other, limit }
        }
        Kind::Data => Head::Data { recv: op, offset },
        Kind::Ahead => {
            let offset = if random.percent(50) { random.pick(&[0, 100, 200]) } else { offset };
            Head::Ahead { send: random.below(4) as u32, offset }
        }
        Kind::Pulled => Head::Pulled { send: op },
        Kind::Ack | Kind::Unreachable | Kind::Lost | Kind::Intake | Kind::Clocks => Head::Empty,
        Kind::Door => Head::Door(Door { ip: [7; 16], port: 7, token: 7 }),
        Kind::Goodbye => Head::Goodbye,
        Kind::Fragment => Head::Fragment {
            kind: random.pick(&[Kind::Tagged, Kind::Write, Kind::Grant, Kind::Data]),
            flags: random.below(16) as u8,
            offset: random.below(20) as u32,
            whole: random.within(1..=5_000) as u32,
        },
        Kind::Report => Head::Report {
            answers: random.below(3),
            ranges: [(offset, random.below(200) as u32), (number, 9), (0, 0)],
        },
        Kind::Ask => Head::Ask { number },
        Kind::Again => Head::Again { start: offset, end: number },
        Kind::Write => Head::Write { op, total: 7, key: 1, offset: number, data: 7 },
        Kind::Read => Head::Read { op, key: 1, offset: number, length: number },
        Kind::ReadData => Head::ReadData { op, offset },
        Kind::Atomic => Head::Atomic {
            op,
            operation: 2,
            datatype: 1,
            wants: random.below(4) as u8,
            length: random.below(100) as u32,
            key: 1,
            offset: number,
        },
        Kind::AtomicReply => Head::AtomicReply { op },
        Kind::Refused => Head::Refused { op, error: number as u32 },
    }
}
