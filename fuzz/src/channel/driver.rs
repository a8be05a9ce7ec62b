//! Paths in memory between two endpoints. A path loses what it holds when an end closes.
//!
//! The paths are the fuzzer's own, because each operation of its input moves, swaps, drops or
//! corrupts a frame that is on its way, even a frame that has left only in part.

use std::collections::VecDeque;

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{
    Action, AtomicRequest, PathProperties, PayloadDestination, Peer, REASSEMBLED,
};
use landbridge_proto::path::congestion::CongestionAlgorithm;
use landbridge_proto::wire::frame::Kind;
use landbridge_testbed::endpoint::{DrivenEndpoint, Frame, REFUSED};

use super::World;
use super::memory::Piece;

/// Each endpoint has one peer.
pub const PEER: Peer = Peer(0);
/// The key of both regions.
pub const KEY: u64 = 0x5000;

/// Acknowledgements that a side may send one after the other, without having heard anything.
const ACKS_MAX: usize = 16;

/// A process.
pub struct Side {
    pub endpoint: DrivenEndpoint<Piece>,
    pub region: Piece,
    /// Which paths are up here.
    pub up: Vec<bool>,
    /// Which paths may take frames.
    pub ready: Vec<bool>,
}

/// A path in one direction.
#[derive(Default)]
pub struct PathQueue {
    pub frames: VecDeque<Frame>,
    /// What the last frame still has in its sender's memory: where, from which byte on, how much.
    rest: Option<(Piece, u64, u64)>,
}

impl Side {
    pub fn new(endpoint: DrivenEndpoint<Piece>, region: Piece, path_count: usize) -> Self {
        Self {
            endpoint,
            region,
            up: vec![false; path_count],
            ready: vec![false; path_count],
        }
    }
}

impl World {
    /// Does what the endpoint of `at` wants done.
    pub fn drain(&mut self, at: usize) {
        let mut asked = Vec::new();
        while let Some(action) = self.sides[at].endpoint.poll_action() {
            self.sides[at].endpoint.perform(&action, &mut self.arena).unwrap();
            match action {
                Action::Complete(done) => self.finish(at, &done),
                Action::AddressAdvertisement { .. } => panic!("nobody has advertised an address"),
                Action::Pull { .. } => panic!("a pull of memory without an address"),
                Action::Serve { .. } | Action::Atomic { .. } => asked.push(action),
                _ => (),
            }
        }
        for action in asked {
            match action {
                Action::Serve { op, key, offset, length, .. } => {
                    self.serve(at, op, key, offset, length);
                }
                Action::Atomic { request, .. } => self.perform(at, &request),
                _ => unreachable!("only requests are put off"),
            }
            self.drain(at);
        }
        while self.sides[at].endpoint.next_busy().is_some() {
            self.sides[at].ready.fill(true);
        }
    }

    fn serve(&mut self, at: usize, op: u32, key: u64, offset: u64, length: u64) {
        let side = &mut self.sides[at];
        if key != KEY {
            return side.endpoint.channel_mut(PEER).refuse(op, REFUSED);
        }
        let bytes = self.arena.read(&side.region, offset, length).to_vec();
        side.endpoint.channel_mut(PEER).serve(op, self.arena.copy(&bytes));
    }

    /// Adds to one 64-bit number.
    fn perform(&mut self, at: usize, request: &AtomicRequest) {
        let side = &mut self.sides[at];
        let operands = side.endpoint.take_operands(PEER);
        if request.key != KEY {
            return side.endpoint.channel_mut(PEER).refuse(request.op, REFUSED);
        }
        let old = self.arena.read(&side.region, request.offset, 8).to_vec();
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let sum = number(&old).wrapping_add(number(&operands));
        self.arena.write(&side.region, request.offset, &sum.to_le_bytes());
        if request.fetch {
            side.endpoint.channel_mut(PEER).answer(request.op, self.arena.copy(&old));
        }
    }

    /// One end of a path opens, unless the other has still to find out that the last one is gone.
    pub fn open(&mut self, at: usize, path_id: usize) {
        if self.stale[path_id] || self.sides[at].up[path_id] {
            return;
        }
        self.sides[at].up[path_id] = true;
        self.sides[at].endpoint.channel_mut(PEER).open_path(PathId(path_id as u8), self.traits[path_id]);
        self.drain(at);
    }

    /// One end of a path closes. What the other end has sent is lost, and what it will send; it may still read.
    pub fn close(&mut self, at: usize, path_id: usize) {
        if self.traits[path_id].lossless || !self.sides[at].up[path_id] {
            return;
        }
        self.sides[at].up[path_id] = false;
        self.queues[at][path_id].rest = None;
        self.queues[1 - at][path_id].frames.clear();
        self.stale[path_id] = self.sides[1 - at].up[path_id];
        if !self.stale[path_id] {
            self.queues[at][path_id] = PathQueue::default();
            self.queues[1 - at][path_id] = PathQueue::default();
        }
        self.sides[at].endpoint.close_path(PEER, PathId(path_id as u8));
        self.drain(at);
    }

    /// The next frame of a path leaves, at first with no more than `most` bytes of its payload.
    pub fn transmit(&mut self, from: usize, path_id: usize, most: u64) -> bool {
        let side = &mut self.sides[from];
        if !side.up[path_id] || !side.ready[path_id] || self.queues[from][path_id].rest.is_some() {
            return false;
        }
        let path = PathId(path_id as u8);
        let Some(frame) = side.endpoint.poll_transmit(PEER, path) else {
            side.ready[path_id] = false;
            return true;
        };
        let (mut flying, left) = (Frame::new(frame.front()), frame.payload);
        let is_datagram = self.traits[path_id].datagram.is_some();
        let most = if is_datagram { u64::MAX } else { most };
        let fits = flying.size <= self.traits[path_id].payload_max as u64;
        assert!(fits || !is_datagram, "{:?} does not fit", flying.header);
        let is_ack = flying.header.kind == Kind::Ack;
        self.acks[from] = if is_ack { self.acks[from] + 1 } else { 0 };
        assert!(self.acks[from] <= ACKS_MAX, "talks without having anything to say");
        let left = left.map(|(piece, at, length)| (piece.clone(), at, length));
        let (wants_copy, must_release_memory) = (frame.wants_copy, frame.must_release_memory);
        let held = left.as_ref().map_or(0, |(.., length)| *length);
        assert_eq!(flying.payload.len() as u64 + held, flying.size, "{:?}", flying.header);
        let mut copy = None;
        let mut rest = None;
        if let Some((piece, at, length)) = left {
            let bytes = self.arena.read(&piece, at, length).to_vec();
            copy = wants_copy.then(|| self.arena.copy(&bytes));
            let now = length.min(most);
            flying.payload.extend_from_slice(&bytes[..now as usize]);
            let own = must_release_memory.then(|| (self.arena.copy(&bytes[now as usize..]), 0, length - now));
            rest = own.or(Some((piece, at + now, length - now))).filter(|(.., left)| *left > 0);
        }
        let flushed = rest.is_none() || must_release_memory;
        self.queues[from][path_id].rest = rest;
        self.push(from, path_id, flying);
        self.sides[from].endpoint.transmitted(PEER, path, flushed, copy);
        self.drain(from);
        true
    }

    /// A frame enters a path; nowhere if nobody will ever read it.
    pub fn push(&mut self, from: usize, path_id: usize, frame: Frame) {
        if !self.stale[path_id] || self.sides[1 - from].up[path_id] {
            self.queues[from][path_id].frames.push_back(frame);
        }
    }

    /// The frame that has not quite left goes on.
    pub fn resume(&mut self, from: usize, path_id: usize, most: u64) -> bool {
        let queue = &mut self.queues[from][path_id];
        let Some((piece, at, left)) = queue.rest.take() else {
            return false;
        };
        let now = left.min(most);
        let bytes = self.arena.read(&piece, at, now);
        if let Some(last) = queue.frames.back_mut() {
            last.payload.extend_from_slice(bytes);
        }
        if now < left {
            queue.rest = Some((piece, at + now, left - now));
            return true;
        }
        let endpoint = &mut self.sides[from].endpoint;
        endpoint.handle_flushed(PEER, PathId(path_id as u8));
        endpoint.channel_mut(PEER).mark_busy();
        self.drain(from);
        true
    }

    /// The first frame of a path gets its place, or up to `most` bytes of its payload get there.
    pub fn deliver(&mut self, from: usize, path_id: usize, most: u64) -> bool {
        let to = 1 - from;
        let queue = &mut self.queues[from][path_id];
        let Some(frame) = queue.frames.front().filter(|_| self.sides[to].up[path_id]) else {
            return false;
        };
        let size = frame.size;
        let Some(incoming) = self.sides[to].endpoint.incoming(PEER, PathId(path_id as u8)) else {
            self.begin(from, path_id);
            if size == 0 {
                self.end(from, path_id);
            }
            return true;
        };
        let start = incoming.done as usize;
        // A datagram comes whole.
        let most = if self.traits[path_id].datagram.is_some() { u64::MAX } else { most };
        let now = most.min((frame.payload.len() - start) as u64);
        if now == 0 {
            return false;
        }
        let bytes = &frame.payload[start..start + now as usize];
        let by = (PEER, PathId(path_id as u8));
        if self.sides[to].endpoint.receive(by, bytes, &mut self.arena).unwrap() {
            self.end(from, path_id);
        }
        true
    }

    fn begin(&mut self, from: usize, path_id: usize) {
        let to = 1 - from;
        self.acks[to] = 0;
        let frame = self.queues[from][path_id].frames[0].clone();
        let place = self.sides[to].endpoint.place(PEER, PathId(path_id as u8), &frame).unwrap();
        self.drain(to);
        self.begin_payload(to, PathId(path_id as u8), &frame, place);
    }

    fn begin_payload(&mut self, to: usize, path: PathId, frame: &Frame, place: PayloadDestination) {
        let Side { endpoint, region, .. } = &mut self.sides[to];
        let region = endpoint.region(PEER, place, |key, offset| (key == KEY).then(|| (region.clone(), offset)));
        endpoint.begin((PEER, path), frame, place, region).unwrap();
        self.drain(to);
    }

    fn end(&mut self, from: usize, path_id: usize) {
        let (to, path) = (1 - from, PathId(path_id as u8));
        self.queues[from][path_id].frames.pop_front();
        self.sides[to].endpoint.end((PEER, path)).unwrap();
        if self.traits[path_id].datagram.is_some() && self.sides[to].up[path_id] {
            self.sides[to].endpoint.channel_mut(PEER).end_batch(path);
        }
        self.drain(to);
        while let Some((frame, place)) = self.sides[to].endpoint.next_early(PEER).unwrap() {
            self.drain(to);
            self.begin_payload(to, REASSEMBLED, &frame, place);
            let endpoint = &mut self.sides[to].endpoint;
            endpoint.receive((PEER, REASSEMBLED), &frame.payload, &mut self.arena).unwrap();
            endpoint.end((PEER, REASSEMBLED)).unwrap();
            self.drain(to);
        }
    }

    /// The first payload of a path turns out to be corrupt: before it has a place, or when it is there.
    pub fn corrupt(&mut self, from: usize, path_id: usize) {
        let to = 1 - from;
        let queue = &mut self.queues[from][path_id];
        let Some(frame) = queue.frames.front() else { return };
        let is_whole = frame.payload.len() as u64 == frame.size && frame.size > 0;
        if !is_whole || !self.sides[to].up[path_id] || self.traits[path_id].lossless {
            return;
        }
        let (header, path) = (frame.header, PathId(path_id as u8));
        let endpoint = &mut self.sides[to].endpoint;
        let is_bearable = match endpoint.incoming(PEER, path) {
            Some(_) => endpoint.corrupt((PEER, path), &mut self.arena).unwrap(),
            None => endpoint.channel_mut(PEER).handle_corrupt_frame(&header),
        };
        queue.frames.pop_front();
        self.drain(to);
        if !is_bearable {
            self.close(to, path_id);
        }
    }

    /// Frames of a path that nobody reads yet, and that have quite left.
    fn movable(&self, from: usize, path_id: usize) -> std::ops::Range<usize> {
        let queue = &self.queues[from][path_id];
        let incoming = self.sides[1 - from].endpoint.incoming(PEER, PathId(path_id as u8));
        let first = usize::from(incoming.is_some());
        first..queue.frames.len() - usize::from(queue.rest.is_some() && !queue.frames.is_empty())
    }

    /// A frame of a path that loses in silence is lost.
    pub fn lose(&mut self, from: usize, path_id: usize, which: usize) {
        let movable = self.movable(from, path_id);
        if self.traits[path_id].silent_loss && !movable.is_empty() {
            let at = movable.start + which % movable.len();
            self.queues[from][path_id].frames.remove(at);
        }
    }

    /// A datagram arrives twice.
    pub fn duplicate(&mut self, from: usize, path_id: usize, which: usize) {
        let movable = self.movable(from, path_id);
        if self.traits[path_id].datagram.is_some() && !movable.is_empty() {
            let frames = &mut self.queues[from][path_id].frames;
            let twin = frames[movable.start + which % movable.len()].clone();
            frames.push_back(twin);
        }
    }

    /// Two frames of one path change places.
    pub fn reorder(&mut self, from: usize, path_id: usize, which: usize) {
        let movable = self.movable(from, path_id);
        if !self.traits[path_id].lossless && movable.len() >= 2 {
            let at = movable.start + which % (movable.len() - 1);
            self.queues[from][path_id].frames.swap(at, at + 1);
        }
    }
}

impl PathQueue {
    /// Its last frame has not quite left.
    pub fn is_held(&self) -> bool {
        self.rest.is_some()
    }
}

/// Traits of a path out of one byte and the least sizes.
pub fn traits(byte: u8, more: u8, least: u32) -> PathProperties {
    let pick = |choices: [u32; 4], shift: u32| choices[(byte >> shift) as usize & 3];
    let datagram =
        [None, None, Some(CongestionAlgorithm::Cubic), Some(CongestionAlgorithm::Bbr)][more as usize >> 6];
    PathProperties {
        payload_max: pick([5, 64, 500, 8_192], 0).max(least),
        eager_max: pick([0, 50, 500, 8_192], 2),
        first_piece: pick([0, 30, 400, 8_192], 4),
        pull: false,
        window: pick([2, 100, 2_000, 1 << 20], 6).max(least) as u64,
        ahead: more & 1 != 0,
        lossless: more & 6 == 6 && more >> 6 == 0,
        unbounded: byte >> 6 == 3,
        spare: false,
        silent_loss: more >> 6 != 0,
        datagram,
        reorders: more & 1 == 0,
        checked: more & 8 != 0,
        copy_max: [0, 10, 1_000, 1 << 20][(more >> 4) as usize & 3],
    }
}
