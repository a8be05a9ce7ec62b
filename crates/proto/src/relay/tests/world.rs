//! Two relays, their ranks and the streams between them, which break under a random seed.

use super::*;

pub type Channel = (Address, Address);

pub struct World {
    random: u64,
    pub relays: [Relay; 2],
    /// Links of each relay: its ranks, then its streams. `None`: the link is broken.
    links: [Vec<Option<LinkId>>; 2],
    /// Bytes that each link has still to hand over, and whether the link is paused.
    inputs: [Vec<(Vec<u8>, bool)>; 2],
    /// Bytes that have been written to each rank and that the rank has not read.
    unread: [Vec<Vec<u8>>; 2],
    next: BTreeMap<Channel, u64>,
    pub sent: BTreeMap<Channel, u64>,
    /// Frames that a relay has accepted from their sources, by number, with the time.
    pub taken: BTreeMap<Channel, BTreeMap<u64, u64>>,
    pub arrived: BTreeMap<Channel, BTreeSet<u64>>,
    /// Time at which the source of a channel last received a loss report.
    pub reported_losses: BTreeMap<Channel, u64>,
    pub unreachable: Vec<Channel>,
    now: u64,
    pub stalled: bool,
}

impl World {
    pub fn new(seed: u64) -> Self {
        Self::with_streams(seed, 1)
    }

    pub fn with_streams(seed: u64, streams: usize) -> Self {
        let relay = |own| Relay::new(ClusterId(own), clusters(), 0).unwrap();
        let mut relays = [relay(0), relay(1)];
        relays.iter_mut().for_each(|relay| relay.switch.memory.endpoint_bound = SMALL_BOUND);
        let ports = RANKS_PER_CLUSTER as usize + streams;
        let empty = vec![(Vec::new(), false); ports];
        let mut world = Self {
            random: seed,
            relays,
            links: [vec![None; ports], vec![None; ports]],
            inputs: [empty.clone(), empty],
            unread: [vec![Vec::new(); ports], vec![Vec::new(); ports]],
            next: BTreeMap::new(),
            sent: BTreeMap::new(),
            taken: BTreeMap::new(),
            arrived: BTreeMap::new(),
            reported_losses: BTreeMap::new(),
            unreachable: Vec::new(),
            now: 0,
            stalled: false,
        };
        world.mend_all();
        world
    }

    pub fn ports(&self) -> usize {
        self.links[0].len()
    }

    pub fn counts(&self) -> BTreeMap<Channel, u64> {
        self.arrived.iter().map(|(channel, arrived)| (*channel, arrived.len() as u64)).collect()
    }

    pub fn draw(&mut self, below: usize) -> usize {
        self.random =
            self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.random >> 33) as usize % below
    }

    pub fn send_something(&mut self) {
        let ranks = 2 * RANKS_PER_CLUSTER as usize;
        let (from, to) = (self.draw(ranks), self.draw(ranks));
        let (side, port) = (from / RANKS_PER_CLUSTER as usize, from % RANKS_PER_CLUSTER as usize);
        if self.inputs[side][port].0.len() > BUFFER_BYTES {
            return;
        }
        let one_in = if self.stalled { 2 } else { 12 };
        let limit = if self.draw(one_in) == 0 { RELAY_PAYLOAD_BYTES_MAX } else { 200 };
        let length = 1 + self.draw(limit - 1);
        let channel = (rank(from as u32), rank(to as u32));
        let sequence = self.next.entry(channel).or_default();
        let bytes = frame(channel.0, channel.1, *sequence, length);
        *sequence += length as u64;
        *self.sent.entry(channel).or_default() += 1;
        self.inputs[side][port].0.extend(bytes);
    }

    pub fn step(&mut self) {
        self.now += 1;
        let (side, port) = (self.draw(2), self.draw(self.ports()));
        if !self.inputs[side][port].1 {
            let part = 1 + self.draw(BUFFER_BYTES);
            self.hand_over(side, port, part);
        }
        let (side, port) = (self.draw(2), self.draw(self.ports()));
        let room = self.draw(200_000);
        self.write(side, port, &[], room);
        let (side, port) = (self.draw(2), self.draw(RANKS_PER_CLUSTER as usize));
        self.receive(side, port);
        for side in 0..2 {
            self.drain(side, &[]);
            while let Some(link) = self.relays[side].poll_resume() {
                let Some(port) = self.port_of(side, link) else { continue };
                self.hand_over(side, port, BUFFER_BYTES);
            }
            let bound = (RANKS_PER_CLUSTER as usize * SMALL_BOUND)
                + RELAY_WINDOW_BYTES as usize
                + 2 * self.ports() * (FRAME_BYTES_MAX + crate::route::byte_queue::CHUNK_BYTES);
            assert!(self.relays[side].queued_bytes() <= bound);
        }
    }

    pub fn port_of(&self, side: usize, link: LinkId) -> Option<usize> {
        self.links[side].iter().position(|other| *other == Some(link))
    }

    /// Hands bytes to the relay, as a driver does with a readable link.
    pub fn hand_over(&mut self, side: usize, port: usize, part: usize) {
        let Some(link) = self.links[side][port] else { return };
        let mut bytes = core::mem::take(&mut self.inputs[side][port].0);
        let part = part.min(bytes.len());
        let taken = self.relays[side].handle_input(link, &mut bytes[..part]);
        self.drain(side, &bytes);
        assert!(!matches!(taken.stop, Stop::Broken(_)), "{:?}", taken.stop);
        if port < RANKS_PER_CLUSTER as usize {
            self.note_taken(&bytes[..taken.bytes]);
        }
        bytes.drain(..taken.bytes);
        self.inputs[side][port] = (bytes, taken.stop == Stop::Full);
    }

    pub fn note_taken(&mut self, mut bytes: &[u8]) {
        while let Ok(header) = Header::parse(bytes) {
            let taken = self.taken.entry((header.source, header.target)).or_default();
            taken.insert(header.sequence, self.now);
            bytes = &bytes[HEADER_BYTES + header.length as usize..];
        }
    }

    pub fn drain(&mut self, side: usize, buffer: &[u8]) {
        while let Some(link) = self.relays[side].poll_flush() {
            for number in 0..self.relays[side].ports().writer_count(link) {
                let Some(writer) = self.relays[side].ports().writer(link, number) else { break };
                let Some(port) = self.port_of(side, writer) else { continue };
                let room = self.draw(100_000);
                self.write(side, port, buffer, room);
            }
            self.relays[side].keep(link, buffer);
        }
    }

    pub fn write(&mut self, side: usize, port: usize, buffer: &[u8], room: usize) {
        let is_rank = port < RANKS_PER_CLUSTER as usize;
        let Some(link) = self.links[side][port] else { return };
        if self.stalled && is_rank {
            return;
        }
        let mut taken: Vec<u8> = Vec::new();
        for slice in self.relays[side].slices(link, buffer) {
            let size = slice.len().min(room - taken.len());
            taken.extend(&slice[..size]);
        }
        let pipe = match is_rank {
            true => &mut self.unread[side][port],
            false => &mut self.inputs[1 - side][port].0,
        };
        taken.truncate((4 * BUFFER_BYTES).saturating_sub(pipe.len()));
        pipe.extend(&taken);
        self.relays[side].handle_sent(link, taken.len(), buffer);
    }

    pub fn receive(&mut self, side: usize, port: usize) {
        let bytes = core::mem::take(&mut self.unread[side][port]);
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
        self.unread[side][port] = rest.to_vec();
    }

    pub fn check(&mut self, header: &Header, body: &[u8]) {
        match header.kind {
            Kind::Unreachable => self.unreachable.push((header.target, header.source)),
            Kind::Lost => {
                self.reported_losses.insert((header.target, header.source), self.now);
            }
            _ => {
                let channel = (header.source, header.target);
                let arrived = self.arrived.entry(channel).or_default();
                let is_in_order = arrived.last().is_none_or(|last| *last < header.sequence);
                let across = rank_side(header.source) != rank_side(header.target);
                let may_overtake = across && self.links[0].len() > RANKS_PER_CLUSTER as usize + 1;
                assert!(is_in_order || may_overtake, "{channel:?} went back");
                assert!(arrived.insert(header.sequence), "{channel:?} twice");
                assert!(body.iter().zip(header.sequence..).all(|(byte, n)| *byte == n as u8));
                assert_eq!(header.hops, 1 + across as u8);
            }
        }
    }

    /// Breaks a random stream between the relays, with all frames in flight.
    pub fn break_stream(&mut self) {
        let first = RANKS_PER_CLUSTER as usize;
        let up = (first..self.ports()).filter(|port| self.links[0][*port].is_some());
        let up: Vec<usize> = up.collect();
        if up.is_empty() {
            return;
        }
        let port = up[self.draw(up.len())];
        for side in 0..2 {
            let stream = self.links[side][port].take().unwrap();
            self.relays[side].disconnect(stream);
            self.inputs[side][port] = (Vec::new(), false);
            self.drain(side, &[]);
        }
    }

    /// Breaks the connection of a random rank.
    pub fn break_endpoint(&mut self) {
        let (side, port) = (self.draw(2), self.draw(RANKS_PER_CLUSTER as usize));
        let Some(link) = self.links[side][port].take() else { return };
        self.relays[side].suspend(link);
        // The rank knows that frames are lost which it has not handed over.
        self.inputs[side][port] = (Vec::new(), false);
        self.unread[side][port].clear();
        self.drain(side, &[]);
    }

    pub fn mend_something(&mut self) {
        let (side, port) = (self.draw(2), self.draw(self.ports()));
        self.mend(side, port);
    }

    pub fn mend_all(&mut self) {
        for place in 0..2 * self.ports() {
            self.mend(place % 2, place / 2);
        }
    }

    pub fn mend(&mut self, side: usize, port: usize) {
        if self.links[side][port].is_some() {
            return;
        }
        let Some(index) = (port as u32).checked_sub(RANKS_PER_CLUSTER) else {
            let address = rank(side as u32 * RANKS_PER_CLUSTER + port as u32);
            self.links[side][port] = Some(self.relays[side].attach(address, 0).unwrap());
            return self.drain(side, &[]);
        };
        assert!((index as usize) < STREAMS_MAX);
        for side in 0..2 {
            let peer = self.relays[side].peer(ClusterId(1 - side as u16)).unwrap();
            self.links[side][port] = Some(self.relays[side].connect(peer, 1).unwrap().stream);
            self.drain(side, &[]);
        }
    }

    pub fn pass_time(&mut self, millis: u64) {
        for side in 0..2 {
            self.relays[side].handle_time(millis);
            self.drain(side, &[]);
        }
    }

    /// Lets everybody read until nothing moves.
    pub fn settle(&mut self) {
        for _ in 0..400_000 {
            self.step();
            let idle = self.inputs.iter().flatten().all(|(bytes, _)| bytes.is_empty());
            let idle = idle && self.unread.iter().flatten().all(Vec::is_empty);
            if idle && self.relays.iter().all(|relay| relay.queued_bytes() == 0) {
                return;
            }
        }
        panic!("the world does not come to rest");
    }
}
