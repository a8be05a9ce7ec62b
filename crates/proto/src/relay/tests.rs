//! Two relays, their ranks and the link between them, run under a seed.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::id::Address;

const RANKS_PER_CLUSTER: u32 = 4;
const BUFFER_BYTES: usize = 256 << 10;

#[test]
fn every_frame_arrives_once_and_in_order() {
    for seed in 1..=6 {
        let mut world = World::new(seed);
        for _ in 0..3_000 {
            world.send_something();
            world.step();
        }
        world.settle();
        let sent: u64 = world.sent.values().sum();
        assert_eq!(sent, world.arrived.values().sum::<u64>(), "seed {seed}");
        assert!(sent > 1_000 && world.unreachable.is_empty());
    }
}

/// Of queues towards endpoints, where a test fills them.
const SMALL_BOUND: usize = 8 << 20;

#[test]
fn memory_stays_bounded_when_nobody_reads_and_all_arrives_when_they_do() {
    for seed in 1..=2 {
        let mut world = World::new(seed);
        world.stalled = true;
        for _ in 0..15_000 {
            world.send_something();
            world.step();
        }
        assert!(world.relays.iter().all(|relay| relay.counters().pauses > 0), "seed {seed}");
        world.stalled = false;
        world.settle();
        assert_eq!(world.sent, world.arrived, "seed {seed}");
    }
}

#[test]
fn a_broken_link_between_relays_loses_nothing_silently() {
    let (mut silent, mut told) = (0, 0);
    for seed in 1..=12 {
        let mut world = World::new(seed);
        for round in 0..2_000 {
            world.send_something();
            world.step();
            if round % 400 == 399 {
                world.break_link();
            }
        }
        world.settle();
        for (channel, sent) in &world.sent {
            let arrived = world.arrived.get(channel).copied().unwrap_or(0);
            let notified = world.unreachable.contains(channel);
            assert!(arrived == *sent || notified, "seed {seed}: {channel:?} has a silent hole");
            assert!(!world.gaps.contains(channel) || notified, "seed {seed}: {channel:?}");
            silent += (!notified) as u32;
            told += notified as u32;
        }
    }
    assert!(silent > 0 && told > 0, "both outcomes must occur: {silent} {told}");
}

#[test]
fn an_idle_link_may_break_without_anybody_noticing() {
    let mut world = World::new(5);
    for _ in 0..5 {
        (0..200).for_each(|_| world.send_something());
        world.settle();
        world.break_link();
    }
    world.settle();
    assert_eq!(world.sent, world.arrived);
    assert!(world.unreachable.is_empty());
}

#[test]
fn no_input_is_starved_at_a_busy_output() {
    let mut relay = home();
    let inputs: Vec<LinkId> = (1..4).map(|n| relay.attach(rank(n), 0).unwrap()).collect();
    let output = relay.attach(rank(0), 0).unwrap();
    let mut shares = [0usize; 3];
    let mut rests: Vec<Vec<u8>> = vec![Vec::new(); 3];
    let mut paused = [false; 3];
    let mut sequence = 0;
    while sequence < 3_000 {
        // A greedy driver that always serves the first input first.
        for n in 0..3 {
            if !paused[n] {
                for _ in 0..8 {
                    rests[n].extend(frame(rank(n as u32 + 1), rank(0), sequence, 30_000));
                    sequence += 1;
                }
                paused[n] = hand_over(&mut relay, inputs[n], &mut rests[n], &mut shares[n]);
            }
        }
        while relay.slices(output, &[]).map(<[u8]>::len).sum::<usize>() > 100_000 {
            relay.handle_sent(output, 50_000);
        }
        while let Some(input) = relay.poll_resume() {
            let n = inputs.iter().position(|link| *link == input).unwrap();
            paused[n] = hand_over(&mut relay, input, &mut rests[n], &mut shares[n]);
        }
    }
    let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
    assert!(*most < 2 * least, "{shares:?}");

    fn hand_over(relay: &mut Relay, from: LinkId, rest: &mut Vec<u8>, share: &mut usize) -> bool {
        let taken = relay.handle_input(from, rest);
        while let Some(link) = relay.poll_flush() {
            relay.keep(link, rest);
        }
        rest.drain(..taken.bytes);
        *share += taken.bytes;
        taken.stop == Stop::Full
    }
}

#[test]
fn who_waits_for_an_endpoint_that_never_comes_is_told() {
    let mut relay = home();
    let link = relay.attach(rank(1), 0).unwrap();
    feed(&mut relay, link, frame(rank(1), rank(2), 0, 10));
    feed(&mut relay, link, frame(rank(1), rank(2), 10, 10));
    assert_eq!(output(&mut relay, link), []);
    relay.handle_time(ATTACH_MILLIS_MAX + 1);
    assert_eq!(output(&mut relay, link), [(Kind::Unreachable, rank(2))]);
    assert_eq!(relay.queued_bytes(), 0);

    // It comes after all.
    let late = relay.attach(rank(2), 0).unwrap();
    feed(&mut relay, link, frame(rank(1), rank(2), 20, 10));
    assert_eq!(output(&mut relay, late), [(Kind::Message, rank(1))]);
}

#[test]
fn who_waits_for_an_endpoint_that_leaves_is_told_and_goes_on() {
    let mut relay = home();
    let (one, two) = (relay.attach(rank(1), 0).unwrap(), relay.attach(rank(2), 0).unwrap());
    relay.endpoint_bound = SMALL_BOUND;
    let mut rest = Vec::new();
    while rest.len() < 2 * SMALL_BOUND {
        rest.extend(frame(rank(1), rank(2), 0, 30_000));
    }
    let taken = relay.handle_input(one, &mut rest);
    assert_eq!(taken.stop, Stop::Full);
    while let Some(link) = relay.poll_flush() {
        relay.keep(link, &rest);
    }
    assert_eq!(relay.poll_resume(), None);
    relay.detach(two);
    assert_eq!(relay.poll_resume(), Some(one));
    assert_eq!(relay.queued_bytes(), 0);
    assert_eq!(output(&mut relay, one), [(Kind::Unreachable, rank(2))]);
    assert_eq!(feed(&mut relay, one, frame(rank(1), rank(2), 0, 9)).stop, Stop::Partial);
    assert_eq!(output(&mut relay, one), [(Kind::Unreachable, rank(2))]);
}

#[test]
fn a_peer_that_stays_away_is_given_up_and_taken_back() {
    let mut relay = home();
    let one = relay.attach(rank(1), 0).unwrap();
    feed(&mut relay, one, frame(rank(1), rank(5), 0, 10));
    relay.handle_time(PEER_AWAY_MILLIS_MAX + 1);
    assert_eq!(output(&mut relay, one), [(Kind::Unreachable, rank(5))]);
    feed(&mut relay, one, frame(rank(1), rank(5), 10, 10));
    assert_eq!(output(&mut relay, one), [(Kind::Unreachable, rank(5))]);
    let peer = relay.peer(ClusterId(1)).unwrap();
    assert_eq!(relay.connect_peer(peer, 7, 0), Reunion { lost_bytes: 0, channels: 0 });
    feed(&mut relay, one, frame(rank(1), rank(5), 20, 10));
    assert_eq!(output(&mut relay, peer), [(Kind::Message, rank(1))]);
}

#[test]
fn links_that_lie_are_closed() {
    let mut relay = home();
    let one = relay.attach(rank(1), 0).unwrap();
    let peer = relay.peer(ClusterId(1)).unwrap();
    relay.connect_peer(peer, 1, 0);
    let mut oversize = frame(rank(1), rank(2), 0, 0);
    oversize[..4].copy_from_slice(&(RELAY_PAYLOAD_BYTES_MAX as u32 + 49).to_le_bytes());
    let mut unreachable = frame(rank(1), rank(2), 0, 0);
    unreachable[4] = Kind::Unreachable as u8;
    for (link, bytes) in [
        (one, frame(rank(2), rank(1), 0, 1)),
        (one, frame(Address::new(1, 1), rank(2), 0, 1)),
        (one, vec![0xff; HEADER_BYTES]),
        (one, oversize),
        (one, unreachable),
        (peer, frame(rank(2), rank(1), 0, 1)),
        (peer, frame(rank(5), rank(6), 0, 1)),
    ] {
        assert!(matches!(feed(&mut relay, link, bytes).stop, Stop::Broken(_)));
    }
    assert_eq!(relay.counters().malformed, 7);
    let mut looping = frame(rank(5), rank(1), 0, 1);
    looping[6] = HOPS_MAX;
    feed(&mut relay, peer, looping);
    assert_eq!(output(&mut relay, peer), [(Kind::Unreachable, rank(1))]);
}

#[test]
fn only_members_of_the_cluster_attach_and_only_once() {
    let mut relay = home();
    let link = relay.attach(rank(1), 3).unwrap();
    assert_eq!(relay.incarnation(rank(1)), Some((link, 3)));
    for address in [rank(1), rank(5), rank(8), Address::ANONYMOUS] {
        assert!(relay.attach(address, 4).is_err(), "{address:?}");
    }
    relay.detach(link);
    assert_eq!(relay.incarnation(rank(1)), None);
    assert!(relay.attach(rank(1), 4).is_ok());
}

// ---- helpers -----------------------------------------------------------------------------

type Channel = (Address, Address);

struct World {
    random: u64,
    relays: [Relay; 2],
    /// Each relay's links: its ranks, then its peer.
    links: [Vec<LinkId>; 2],
    /// Bytes that each link has still to hand over, and whether it is paused.
    inputs: [Vec<(Vec<u8>, bool)>; 2],
    /// Bytes that each rank has received and that are no whole frame yet.
    partial: [Vec<Vec<u8>>; 2],
    next: BTreeMap<Channel, u64>,
    sent: BTreeMap<Channel, u64>,
    expected: BTreeMap<Channel, u64>,
    arrived: BTreeMap<Channel, u64>,
    unreachable: Vec<Channel>,
    gaps: Vec<Channel>,
    stalled: bool,
}

impl World {
    fn new(seed: u64) -> Self {
        let relay = |own| Relay::new(ClusterId(own), clusters(), 0).unwrap();
        let mut relays = [relay(0), relay(1)];
        relays.iter_mut().for_each(|relay| relay.endpoint_bound = SMALL_BOUND);
        let links = [0, 1].map(|side: usize| {
            let first = side as u32 * RANKS_PER_CLUSTER;
            let own = &mut relays[side];
            let mut links: Vec<LinkId> = (first..first + RANKS_PER_CLUSTER)
                .map(|n| own.attach(rank(n), 0).unwrap())
                .collect();
            let peer = own.peer(ClusterId(1 - side as u16)).unwrap();
            own.connect_peer(peer, 1, 0);
            links.push(peer);
            links
        });
        let ports = RANKS_PER_CLUSTER as usize + 1;
        Self {
            random: seed,
            relays,
            links,
            inputs: [vec![(Vec::new(), false); ports], vec![(Vec::new(), false); ports]],
            partial: [vec![Vec::new(); ports], vec![Vec::new(); ports]],
            next: BTreeMap::new(),
            sent: BTreeMap::new(),
            expected: BTreeMap::new(),
            arrived: BTreeMap::new(),
            unreachable: Vec::new(),
            gaps: Vec::new(),
            stalled: false,
        }
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random =
            self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.random >> 33) as usize % below
    }

    fn send_something(&mut self) {
        let ranks = 2 * RANKS_PER_CLUSTER as usize;
        let (from, to) = (self.draw(ranks), self.draw(ranks));
        let (side, port) = (from / RANKS_PER_CLUSTER as usize, from % RANKS_PER_CLUSTER as usize);
        if self.inputs[side][port].0.len() > BUFFER_BYTES {
            return;
        }
        let one_in = if self.stalled { 2 } else { 12 };
        let limit = if self.draw(one_in) == 0 { RELAY_PAYLOAD_BYTES_MAX } else { 200 };
        let length = self.draw(limit);
        let channel = (rank(from as u32), rank(to as u32));
        let sequence = self.next.entry(channel).or_default();
        let bytes = frame(channel.0, channel.1, *sequence, length);
        *sequence += length as u64;
        *self.sent.entry(channel).or_default() += 1;
        self.inputs[side][port].0.extend(bytes);
    }

    fn step(&mut self) {
        let side = self.draw(2);
        let port = self.draw(RANKS_PER_CLUSTER as usize + 1);
        if !self.inputs[side][port].1 {
            let part = 1 + self.draw(BUFFER_BYTES);
            self.hand_over(side, port, part);
        }
        let (side, port) = (self.draw(2), self.draw(RANKS_PER_CLUSTER as usize + 1));
        let room = self.draw(200_000);
        self.write(side, port, &[], room);
        for side in 0..2 {
            while let Some(link) = self.relays[side].poll_resume() {
                let port = self.links[side].iter().position(|other| *other == link).unwrap();
                self.hand_over(side, port, BUFFER_BYTES);
            }
            let bound = (RANKS_PER_CLUSTER as usize * SMALL_BOUND)
                + PEER_QUEUE_BYTES_MAX
                + self.links[side].len() * (FRAME_BYTES_MAX + crate::route::queue::CHUNK_BYTES);
            assert!(self.relays[side].queued_bytes() <= bound);
        }
    }

    /// What a driver does with a readable link.
    fn hand_over(&mut self, side: usize, port: usize, part: usize) {
        let mut bytes = core::mem::take(&mut self.inputs[side][port].0);
        let part = part.min(bytes.len());
        let taken = self.relays[side].handle_input(self.links[side][port], &mut bytes[..part]);
        while let Some(link) = self.relays[side].poll_flush() {
            let to = self.links[side].iter().position(|other| *other == link).unwrap();
            let room = self.draw(100_000);
            self.write(side, to, &bytes, room);
            self.relays[side].keep(link, &bytes);
        }
        assert!(!matches!(taken.stop, Stop::Broken(_)), "{:?}", taken.stop);
        bytes.drain(..taken.bytes);
        self.inputs[side][port] = (bytes, taken.stop == Stop::Full);
    }

    fn write(&mut self, side: usize, port: usize, buffer: &[u8], room: usize) {
        if self.stalled && port < RANKS_PER_CLUSTER as usize {
            return;
        }
        let link = self.links[side][port];
        if !self.relays[side].is_up(link) {
            return;
        }
        let mut taken: Vec<u8> = Vec::new();
        for slice in self.relays[side].slices(link, buffer) {
            let size = slice.len().min(room - taken.len());
            taken.extend(&slice[..size]);
        }
        if port == RANKS_PER_CLUSTER as usize {
            let pipe = &self.inputs[1 - side][port].0;
            taken.truncate((4 * BUFFER_BYTES).saturating_sub(pipe.len()));
        }
        self.relays[side].handle_sent(link, taken.len());
        if port == RANKS_PER_CLUSTER as usize {
            self.inputs[1 - side][port].0.extend(taken);
        } else {
            self.partial[side][port].extend(taken);
            self.receive(side, port);
        }
    }

    fn receive(&mut self, side: usize, port: usize) {
        let bytes = core::mem::take(&mut self.partial[side][port]);
        let mut rest = &bytes[..];
        while rest.len() >= HEADER_BYTES {
            let header = Header::parse(rest).unwrap();
            let length = HEADER_BYTES + header.length as usize;
            if rest.len() < length {
                break;
            }
            self.check(&header, &rest[HEADER_BYTES..length]);
            rest = &rest[length..];
        }
        self.partial[side][port] = rest.to_vec();
    }

    fn check(&mut self, header: &Header, body: &[u8]) {
        if header.kind == Kind::Unreachable {
            self.unreachable.push((header.target, header.source));
            return;
        }
        let channel = (header.source, header.target);
        let expected = self.expected.entry(channel).or_default();
        assert!(header.sequence >= *expected, "{channel:?} went back");
        if header.sequence > *expected {
            self.gaps.push(channel);
        }
        *expected = header.sequence + body.len() as u64;
        assert!(body.iter().zip(header.sequence..).all(|(byte, n)| *byte == n as u8));
        *self.arrived.entry(channel).or_default() += 1;
        let across = rank_side(header.source) != rank_side(header.target);
        assert_eq!(header.hops, 1 + across as u8);
    }

    /// The connection between the relays is lost with all that is under way, and made again.
    fn break_link(&mut self) {
        let port = RANKS_PER_CLUSTER as usize;
        for side in 0..2 {
            self.relays[side].disconnect_peer(self.links[side][port]);
            self.inputs[side][port] = (Vec::new(), false);
        }
        let received = [0, 1].map(|side| self.relays[side].received(self.links[side][port]));
        for side in 0..2 {
            self.relays[side].connect_peer(self.links[side][port], 1, received[1 - side]);
            self.drain_notices(side);
        }
    }

    fn drain_notices(&mut self, side: usize) {
        while let Some(link) = self.relays[side].poll_flush() {
            self.relays[side].keep(link, &[]);
        }
    }

    /// Everybody reads until nothing moves.
    fn settle(&mut self) {
        for _ in 0..400_000 {
            self.step();
            let idle = self.inputs.iter().flatten().all(|(bytes, _)| bytes.is_empty());
            if idle && self.relays.iter().all(|relay| relay.queued_bytes() == 0) {
                return;
            }
        }
        panic!("the world does not come to rest");
    }
}

fn rank_side(address: Address) -> u32 {
    address.index() / RANKS_PER_CLUSTER
}

fn clusters() -> Vec<Range> {
    let range = |first| Range { first, count: RANKS_PER_CLUSTER, spawned: 0 };
    vec![range(0), range(RANKS_PER_CLUSTER)]
}

fn home() -> Relay {
    Relay::new(ClusterId(0), clusters(), 0).unwrap()
}

fn rank(index: u32) -> Address {
    Address::new(index, 0)
}

fn frame(source: Address, target: Address, sequence: u64, length: usize) -> Vec<u8> {
    let header = Header {
        length: length as u32,
        kind: Kind::Message,
        flags: 0,
        hops: 0,
        source,
        target,
        sequence,
        delivered: 0,
        credit: 0,
    };
    let mut bytes = vec![0; HEADER_BYTES];
    header.emit(&mut bytes);
    bytes.extend((sequence..sequence + length as u64).map(|n| n as u8));
    bytes
}

fn feed(relay: &mut Relay, link: LinkId, mut bytes: Vec<u8>) -> Taken {
    let taken = relay.handle_input(link, &mut bytes);
    while let Some(to) = relay.poll_flush() {
        relay.keep(to, &bytes);
    }
    taken
}

/// Takes all that waits for a link: (kind, source) of each frame.
fn output(relay: &mut Relay, link: LinkId) -> Vec<(Kind, Address)> {
    while let Some(to) = relay.poll_flush() {
        relay.keep(to, &[]);
    }
    let bytes: Vec<u8> = relay.slices(link, &[]).flatten().copied().collect();
    relay.handle_sent(link, bytes.len());
    let mut frames = Vec::new();
    let mut rest = &bytes[..];
    while let Ok(header) = Header::parse(rest) {
        frames.push((header.kind, header.source));
        rest = &rest[HEADER_BYTES + header.length as usize..];
    }
    frames
}
