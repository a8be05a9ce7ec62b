//! Two relays, their ranks and the streams between them, which break under a random seed.

use std::collections::BTreeMap;

use landbridge_proto::limit::RELAY_WINDOW_BYTES;
use landbridge_proto::route::byte_queue::CHUNK_BYTES;
use landbridge_testbed::relay::RelayPair;

use super::*;

const RANKS: usize = RANKS_PER_CLUSTER as usize;

pub type Channel = (Address, Address);

pub struct World {
    pub chance: Chance,
    pub pair: RelayPair,
    next: BTreeMap<Channel, u64>,
    pub sent: BTreeMap<Channel, u64>,
    /// Frames that a relay has accepted from their sources, by number, with the time.
    pub accepted: BTreeMap<Channel, BTreeMap<u64, u64>>,
    pub arrived: BTreeMap<Channel, BTreeSet<u64>>,
    /// Time at which the source of a channel last received a loss report.
    pub reported_losses: BTreeMap<Channel, u64>,
    pub unreachable: Vec<Channel>,
    now: u64,
    is_stalled: bool,
}

impl World {
    pub fn new(seed: u64) -> Self {
        Self::with_streams(seed, 1)
    }

    pub fn with_streams(seed: u64, streams: usize) -> Self {
        let mut relays = [relay(0), relay(1)];
        relays.iter_mut().for_each(|relay| relay.set_endpoint_queue_bytes_max(SMALL_BOUND));
        let mut world = Self {
            chance: Chance(seed),
            pair: RelayPair::new(relays, RANKS, streams),
            next: BTreeMap::new(),
            sent: BTreeMap::new(),
            accepted: BTreeMap::new(),
            arrived: BTreeMap::new(),
            reported_losses: BTreeMap::new(),
            unreachable: Vec::new(),
            now: 0,
            is_stalled: false,
        };
        world.mend_all();
        world
    }

    pub fn counts(&self) -> BTreeMap<Channel, u64> {
        self.arrived.iter().map(|(channel, arrived)| (*channel, arrived.len() as u64)).collect()
    }

    /// Whether the ranks stop reading.
    pub fn stall(&mut self, is_stalled: bool) {
        self.is_stalled = is_stalled;
        for end in self.pair.ends.iter_mut().flat_map(|ends| &mut ends[..RANKS]) {
            end.is_stalled = is_stalled;
        }
    }

    pub fn send_something(&mut self) {
        let (from, to) = (self.chance.below(2 * RANKS), self.chance.below(2 * RANKS));
        let (side, port) = (from / RANKS, from % RANKS);
        if self.pair.ends[side][port].input.len() > BUFFER_BYTES {
            return;
        }
        let one_in = if self.is_stalled { 2 } else { 12 };
        let limit = if self.chance.below(one_in) == 0 { RELAY_PAYLOAD_BYTES_MAX } else { 200 };
        let length = 1 + self.chance.below(limit - 1);
        let channel = (rank(from as u32), rank(to as u32));
        let sequence = self.next.entry(channel).or_default();
        let bytes = frame(channel.0, channel.1, *sequence, length);
        *sequence += length as u64;
        *self.sent.entry(channel).or_default() += 1;
        self.pair.ends[side][port].input.extend(bytes);
    }

    fn any_port(&mut self) -> (usize, usize) {
        (self.chance.below(2), self.chance.below(self.pair.ports()))
    }

    pub fn step(&mut self) {
        self.now += 1;
        let (side, port) = self.any_port();
        let part = 1 + self.chance.below(BUFFER_BYTES);
        self.read(side, port, part);
        let (side, port) = self.any_port();
        let room = self.chance.below(200_000);
        self.pair.write_part(side, port, room, 4 * BUFFER_BYTES);
        let (side, port) = (self.chance.below(2), self.chance.below(RANKS));
        self.receive(side, port);
        for side in 0..2 {
            self.pair.flush(side, &[]);
            while let Some(port) = self.pair.poll_resume(side) {
                self.read(side, port, BUFFER_BYTES);
            }
            let bound = RANKS * SMALL_BOUND
                + RELAY_WINDOW_BYTES as usize
                + 2 * self.pair.ports() * (FRAME_BYTES_MAX + CHUNK_BYTES);
            assert!(self.pair.relays[side].queued_bytes() <= bound);
        }
    }

    /// Lets a relay handle a part of a port's input.
    fn read(&mut self, side: usize, port: usize, part: usize) {
        let Some((bytes, stop)) = self.pair.read(side, port, part) else { return };
        assert!(!matches!(stop, Stop::Broken(_)), "{stop:?}");
        for (header, _) in frames(&bytes).filter(|_| port < RANKS) {
            let accepted = self.accepted.entry((header.source, header.target)).or_default();
            accepted.insert(header.sequence, self.now);
        }
    }

    /// Lets a rank read the whole frames that have arrived.
    fn receive(&mut self, side: usize, port: usize) {
        let mut bytes = std::mem::take(&mut self.pair.ends[side][port].output);
        let mut length = 0;
        for (header, frame) in frames(&bytes) {
            self.check(&header, &frame[HEADER_BYTES..]);
            length += frame.len();
        }
        let next = bytes.get(length..length + HEADER_BYTES);
        assert!(next.is_none_or(|next| Header::parse(next).is_ok()));
        bytes.drain(..length);
        self.pair.ends[side][port].output = bytes;
    }

    fn check(&mut self, header: &Header, body: &[u8]) {
        match header.kind {
            Kind::Unreachable => self.unreachable.push((header.target, header.source)),
            Kind::Lost => {
                self.reported_losses.insert((header.target, header.source), self.now);
            }
            _ => {
                let channel = (header.source, header.target);
                let arrived = self.arrived.entry(channel).or_default();
                let is_in_order = arrived.last().is_none_or(|last| *last < header.sequence);
                let side_of = |address: Address| address.index() / RANKS_PER_CLUSTER;
                let across = side_of(header.source) != side_of(header.target);
                let may_overtake = across && self.pair.ports() > RANKS + 1;
                assert!(is_in_order || may_overtake, "{channel:?} went back");
                assert!(arrived.insert(header.sequence), "{channel:?} twice");
                assert!(body.iter().zip(header.sequence..).all(|(byte, n)| *byte == n as u8));
                assert_eq!(header.hops, 1 + across as u8);
            }
        }
    }

    /// Breaks a random stream between the relays, with all frames in flight.
    pub fn break_stream(&mut self) {
        let is_up = |port: &usize| self.pair.ends[0][*port].link.is_some();
        let up: Vec<usize> = (RANKS..self.pair.ports()).filter(is_up).collect();
        if !up.is_empty() {
            let port = up[self.chance.below(up.len())];
            self.pair.disconnect(port);
        }
    }

    /// Breaks the connection of a random rank. The rank knows that frames are lost which it has not
    /// handed over.
    pub fn break_endpoint(&mut self) {
        let port = (self.chance.below(2), self.chance.below(RANKS));
        self.pair.suspend(port);
    }

    pub fn mend_something(&mut self) {
        let (side, port) = self.any_port();
        self.mend(side, port);
    }

    pub fn mend_all(&mut self) {
        for place in 0..2 * self.pair.ports() {
            self.mend(place % 2, place / 2);
        }
    }

    fn mend(&mut self, side: usize, port: usize) {
        if self.pair.ends[side][port].link.is_some() {
            return;
        }
        let is_mended = if port < RANKS {
            let address = rank((side * RANKS + port) as u32);
            self.pair.attach((side, port), address, 0, LogPosition::default())
        } else {
            assert!(port - RANKS < STREAMS_MAX);
            self.pair.connect(port)
        };
        is_mended.unwrap();
    }

    pub fn pass_time(&mut self, millis: u64) {
        self.pair.handle_time(millis);
        (0..2).for_each(|side| self.pair.flush(side, &[]));
    }

    /// Lets everybody read until nothing moves.
    pub fn settle(&mut self) {
        for _ in 0..400_000 {
            self.step();
            if self.pair.is_idle() {
                return;
            }
        }
        panic!("the world does not come to rest");
    }
}
