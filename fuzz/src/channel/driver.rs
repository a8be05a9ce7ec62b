//! The driver of two endpoints: paths in memory, which lose what they hold when an end closes, and the places that payloads
//! go to.

use std::collections::{BTreeMap, VecDeque};

use landbridge_proto::channel::{PathId, REORDER_WINDOW_BYTES_MAX, REORDER_WINDOW_FRAMES_MAX};
use landbridge_proto::endpoint::{
    Action, AtomicRequest, Endpoint, REASSEMBLED, Memory, PathProperties, Peer, PayloadDestination,
};
use landbridge_proto::limit::FRAME_BODY_BYTES_MAX;
use landbridge_proto::path::congestion;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};
use landbridge_proto::wire::kind_header::KindHeader;

use super::World;
use super::memory::Piece;

/// Each endpoint has one peer.
pub const PEER: Peer = Peer(0);
/// The errno of a refusal.
pub const REFUSED: i32 = 13;
/// The key of both regions.
pub const KEY: u64 = 0x5000;

/// Acknowledgements that a side may send one after the other, without having heard anything.
const ACKS_MAX: usize = 16;

/// A process.
pub struct Side {
    pub endpoint: Endpoint<Piece>,
    pub stores: BTreeMap<u32, Vec<u8>>,
    /// Frames that came early, by first byte.
    pub early: BTreeMap<u64, Vec<u8>>,
    pub region: Piece,
    scratch: Vec<u8>,
    /// Which paths are up here.
    pub up: Vec<bool>,
    /// Which paths may take frames.
    pub ready: Vec<bool>,
}

/// A path in one direction.
#[derive(Default)]
pub struct PathQueue {
    pub frames: VecDeque<FrameInFlight>,
    /// What the last frame still has in its sender's memory: where, from which byte on, how much.
    rest: Option<(Piece, u64, u64)>,
    incoming: Option<IncomingFrame>,
}

/// A frame on its way.
#[derive(Clone)]
pub struct FrameInFlight {
    header: Header,
    head: Vec<u8>,
    /// As far as it has left.
    payload: Vec<u8>,
    size: u64,
}

/// A frame whose payload is on its way into its place.
struct IncomingFrame {
    target: PayloadTarget,
    done: u64,
}

enum PayloadTarget {
    Piece { piece: Piece, at: u64, take: u64 },
    Store { store: u32, at: u64 },
    Early { frame: u64, at: u64 },
    Scratch(Vec<u8>),
    Skip,
}

impl Side {
    pub fn new(endpoint: Endpoint<Piece>, region: Piece, path_count: usize) -> Self {
        Self {
            endpoint,
            stores: BTreeMap::new(),
            early: BTreeMap::new(),
            region,
            scratch: Vec::new(),
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
            match action {
                Action::Complete(done) => self.finish(at, &done),
                Action::CopyUnexpected { store, memory, at: start, length } => {
                    let bytes = self.sides[at].stores.remove(&store).expect("a store");
                    self.arena.write(&memory, start, &bytes[..length as usize]);
                }
                Action::DropUnexpected { store } => {
                    assert!(self.sides[at].stores.remove(&store).is_some(), "no store {store}");
                }
                Action::DiscardPayload { path, .. } => {
                    let incoming = self.queues[1 - at][path.0 as usize].incoming.as_mut();
                    incoming.expect("nothing to divert").target = PayloadTarget::Skip;
                }
                Action::Release { frame, .. } => drop(self.sides[at].early.remove(&frame)),
                Action::AddressAdvertisement { .. } => panic!("nobody has advertised an address"),
                Action::Pull { .. } => panic!("a pull of memory without an address"),
                Action::Serve { .. } | Action::Atomic { .. } => asked.push(action),
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
        self.check_bounds(at);
    }

    fn check_bounds(&self, at: usize) {
        let side = &self.sides[at];
        let stored: usize = side.stores.values().map(Vec::len).sum();
        assert!(stored <= self.eager_window as usize, "{stored} unexpected bytes are stored");
        let early: usize = side.early.values().map(Vec::len).sum();
        assert!(early <= REORDER_WINDOW_BYTES_MAX as usize + FRAME_BODY_BYTES_MAX, "{early} early bytes");
        assert!(side.early.len() <= REORDER_WINDOW_FRAMES_MAX, "{} early frames", side.early.len());
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
        let operands = std::mem::take(&mut side.scratch);
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
        let coming = &mut self.queues[1 - at][path_id];
        (coming.incoming, coming.frames) = (None, VecDeque::new());
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
        let (mut flying, left) = (FrameInFlight::new(frame.front()), frame.payload);
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
    pub fn push(&mut self, from: usize, path_id: usize, frame: FrameInFlight) {
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
        let Some(incoming) = &mut queue.incoming else {
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
        incoming.done += now;
        let is_whole = incoming.done == size;
        let bytes = frame.payload[start..start + now as usize].to_vec();
        self.put(from, path_id, start as u64, &bytes);
        if is_whole {
            self.end(from, path_id);
        }
        true
    }

    fn begin(&mut self, from: usize, path_id: usize) {
        let to = 1 - from;
        self.acks[to] = 0;
        let FrameInFlight { header, head, size, .. } = &self.queues[from][path_id].frames[0];
        let (header, head, size) = (*header, head.clone(), *size);
        let endpoint = &mut self.sides[to].endpoint;
        let place = endpoint.handle_frame(PEER, PathId(path_id as u8), &header, &head);
        let place = place.unwrap_or_else(|fault| panic!("{}: {header:?}", fault.0));
        self.drain(to);
        if let PayloadDestination::OutOfOrder { frame, whole, at } = place {
            let early = &mut self.sides[to].early;
            let buffer = early.entry(frame).or_insert_with(|| vec![0; whole as usize]);
            if header.kind != Kind::Fragment {
                buffer[..at as usize].copy_from_slice(&head);
            }
        }
        let target = self.target(to, place, size);
        self.queues[from][path_id].incoming = Some(IncomingFrame { target, done: 0 });
    }

    fn target(&mut self, to: usize, place: PayloadDestination, size: u64) -> PayloadTarget {
        let side = &mut self.sides[to];
        match place {
            PayloadDestination::Discard => PayloadTarget::Skip,
            PayloadDestination::Receive { .. } | PayloadDestination::Reply { .. } => {
                let (piece, at, take) = side.endpoint.place_memory(place).expect("memory");
                let take = take.min(size);
                assert!(at + take <= piece.size(), "{place:?} outside {piece:?}");
                PayloadTarget::Piece { piece: piece.clone(), at, take }
            }
            PayloadDestination::NewUnexpected { store, size } => {
                if size > 0 {
                    let before = side.stores.insert(store, vec![0; size as usize]);
                    assert!(before.is_none(), "store {store} is in use");
                }
                PayloadTarget::Store { store, at: 0 }
            }
            PayloadDestination::Unexpected { store, at } => PayloadTarget::Store { store, at },
            PayloadDestination::Region { op, key, offset } => {
                if key == KEY {
                    return PayloadTarget::Piece { piece: side.region.clone(), at: offset, take: size };
                }
                side.endpoint.channel_mut(PEER).refuse(op, REFUSED);
                self.drain(to);
                PayloadTarget::Skip
            }
            PayloadDestination::Scratch => PayloadTarget::Scratch(Vec::new()),
            PayloadDestination::OutOfOrder { frame, at, .. } => PayloadTarget::Early { frame, at: at as u64 },
        }
    }

    fn put(&mut self, from: usize, path_id: usize, start: u64, bytes: &[u8]) {
        if let Some(mut incoming) = self.queues[from][path_id].incoming.take() {
            self.put_to(1 - from, &mut incoming.target, start, bytes);
            self.queues[from][path_id].incoming = Some(incoming);
        }
    }

    /// The bytes from `start` on of a payload get to their place.
    fn put_to(&mut self, to: usize, target: &mut PayloadTarget, start: u64, bytes: &[u8]) {
        let side = &mut self.sides[to];
        let into = |buffer: &mut Vec<u8>, at: u64| {
            let at = (at + start) as usize;
            buffer[at..at + bytes.len()].copy_from_slice(bytes);
        };
        match target {
            PayloadTarget::Piece { piece, at, take } => {
                let left = take.saturating_sub(start).min(bytes.len() as u64);
                if left > 0 {
                    self.arena.write(piece, *at + start, &bytes[..left as usize]);
                }
            }
            PayloadTarget::Store { store, at } if !bytes.is_empty() => {
                into(side.stores.get_mut(store).expect("a store"), *at);
            }
            PayloadTarget::Early { frame, at } => {
                into(side.early.get_mut(frame).expect("what is kept"), *at);
            }
            PayloadTarget::Scratch(scratch) => scratch.extend_from_slice(bytes),
            PayloadTarget::Store { .. } | PayloadTarget::Skip => (),
        }
    }

    fn end(&mut self, from: usize, path_id: usize) {
        let to = 1 - from;
        let queue = &mut self.queues[from][path_id];
        queue.frames.pop_front();
        if let Some(IncomingFrame { target: PayloadTarget::Scratch(scratch), .. }) = queue.incoming.take() {
            self.sides[to].scratch = scratch;
        }
        self.sides[to].endpoint.handle_payload(PEER, PathId(path_id as u8));
        if self.traits[path_id].datagram.is_some() && self.sides[to].up[path_id] {
            self.sides[to].endpoint.channel_mut(PEER).end_batch(PathId(path_id as u8));
        }
        self.drain(to);
        while let Some(frame) = self.sides[to].endpoint.channel(PEER).next_reassembled() {
            self.deliver_early_frame(to, frame);
        }
    }

    fn deliver_early_frame(&mut self, to: usize, frame: u64) {
        let side = &mut self.sides[to];
        let body = side.early.remove(&frame).expect("the frame whose turn has come");
        let kept = side.endpoint.handle_reassembled(PEER, &body);
        let (place, head) = kept.unwrap_or_else(|fault| panic!("a kept frame: {}", fault.0));
        self.drain(to);
        let mut target = self.target(to, place, (body.len() - head) as u64);
        self.put_to(to, &mut target, 0, &body[head..]);
        if let PayloadTarget::Scratch(scratch) = target {
            self.sides[to].scratch = scratch;
        }
        self.sides[to].endpoint.handle_payload(PEER, REASSEMBLED);
        self.drain(to);
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
        let (header, size) = (frame.header, frame.size);
        let is_bearable = if let Some(incoming) = &mut queue.incoming {
            incoming.done = 0;
            if let PayloadTarget::Scratch(scratch) = &mut incoming.target {
                scratch.clear();
            }
            self.put(from, path_id, 0, &vec![0xee; size as usize]);
            self.sides[to].endpoint.channel_mut(PEER).handle_corrupt(PathId(path_id as u8))
        } else {
            self.sides[to].endpoint.channel_mut(PEER).handle_corrupt_frame(&header)
        };
        let queue = &mut self.queues[from][path_id];
        queue.incoming = None;
        queue.frames.pop_front();
        self.drain(to);
        if !is_bearable {
            self.close(to, path_id);
        }
    }

    /// Frames of a path that nobody reads yet, and that have quite left.
    fn movable(&self, from: usize, path_id: usize) -> std::ops::Range<usize> {
        let queue = &self.queues[from][path_id];
        let first = usize::from(queue.incoming.is_some());
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

impl FrameInFlight {
    /// A frame without those bytes of its payload that lie in memory.
    pub fn new(front: &[u8]) -> Self {
        let header = Header::parse(front).expect("a header");
        let head = KindHeader::size(header.kind, header.flags);
        let (size, check) = header.payload(head).expect("a payload");
        let (head, payload) = front[HEADER_BYTES..].split_at(head);
        Self { header, head: head.to_vec(), payload: payload[check..].to_vec(), size }
    }

    /// The same with its payload.
    pub fn with(mut self, payload: &[u8]) -> Self {
        self.payload.extend_from_slice(payload);
        self
    }
}

/// Traits of a path out of one byte and the least sizes.
pub fn traits(byte: u8, more: u8, least: u32) -> PathProperties {
    let pick = |choices: [u32; 4], shift: u32| choices[(byte >> shift) as usize & 3];
    let datagram = [None, None, Some(congestion::CongestionAlgorithm::Cubic), Some(congestion::CongestionAlgorithm::Bbr)]
        [more as usize >> 6];
    PathProperties {
        payload_max: pick([5, 64, 500, 8_192], 0).max(least),
        eager_max: pick([0, 50, 500, 8_192], 2),
        first_piece: pick([0, 30, 400, 8_192], 4),
        pull: false,
        window: pick([2, 100, 2_000, 1 << 20], 6).max(least) as u64,
        ahead: more & 1 != 0,
        lossless: more & 6 == 6 && more >> 6 == 0,
        spare: false,
        silent_loss: more >> 6 != 0,
        datagram,
        reorders: more & 1 == 0,
        checked: more & 8 != 0,
        copy_max: [0, 10, 1_000, 1 << 20][(more >> 4) as usize & 3],
    }
}
