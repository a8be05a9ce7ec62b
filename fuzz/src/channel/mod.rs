//! Two endpoints and up to three paths between them, driven by a list of operations.
//!
//! The first bytes of the input choose the paths, every three that follow an operation: something the application
//! wants, or some bytes of some path that move, change places, are corrupt, or are lost with it. At last every path is
//! mended, and everything moves until nothing is left to move.
//!
//! What may never happen, and panics: a message comes twice, never, cut, damaged or before an earlier one of its tag; an
//! operation ends before its bytes are where they belong, or touches memory that was given back; an end blames the
//! other; more is kept than the bounds allow; anything is kept at the end.

mod driver;
mod memory;

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{
    AtomicRequest, Config, OperationCompletion, Failure, CompletionLevel, Memory, Message, InjectMessage, PathProperties, Posting,
    Remote, Ticket, CompletionKind,
};
use landbridge_proto::id::Address;
use landbridge_proto::path::time::{MILLISECOND, Time};
use landbridge_testbed::endpoint::{DrivenEndpoint, Frame, REFUSED};

use driver::{KEY, PathQueue, PEER, Side, traits};
use memory::{Arena, Piece, content};

const TAGS: usize = 3;
/// More operations make a run slow and show little more.
const OPERATIONS_MAX: usize = 300;
/// Steps after the last operation: more than any run takes that comes to rest.
const STEPS_MAX: usize = 400_000;
/// Bytes of each region. Those at its front are only read, the others are used once.
const REGION_BYTES: u64 = 64 << 10;
const CONSTANT_BYTES: u64 = 16 << 10;

/// Everything there is.
pub struct World {
    sides: [Side; 2],
    /// By sender and path.
    queues: [Vec<PathQueue>; 2],
    traits: Vec<PathProperties>,
    /// One end of this path has closed, the other has yet to.
    stale: Vec<bool>,
    arena: Arena,
    /// Acknowledgements that each side has sent since it has heard anything.
    acks: [usize; 2],
    sizes: [u64; 8],
    operations: Vec<PendingOperation>,
    /// Messages by sender and tag, receives by receiver and tag.
    sent: [[Vec<usize>; TAGS]; 2],
    received: [[Vec<usize>; TAGS]; 2],
    /// Next byte of the region of each side that nobody has used.
    fresh: [u64; 2],
    now: Time,
}

/// What the application wants; its number is the context, and that of its bytes.
struct PendingOperation {
    side: usize,
    what: OperationKind,
    piece: Piece,
    result: Option<Piece>,
    /// Its key is wrong.
    is_refused: bool,
    is_done: bool,
    /// Times that the target was notified.
    notifications: u32,
}

#[derive(Clone, Copy)]
enum OperationKind {
    Send { size: u64, data: Option<u64> },
    Recv { tag: usize, nth: usize },
    Write { at: u64, data: Option<u64> },
    Read { at: u64 },
    Atomic { at: u64 },
}

/// Runs one list of operations.
pub fn run(bytes: &[u8]) {
    let (Some(setup), Some(operations)) = (bytes.get(..8), bytes.get(8..)) else { return };
    let mut world = World::new(setup);
    for operation in operations.chunks_exact(3).take(OPERATIONS_MAX) {
        world.operate(operation[0], operation[1], operation[2]);
    }
    world.restore_paths();
    world.run_until_idle();
    world.check_done();
    world.say_goodbye();
    world.check_idle();
}

impl World {
    fn new(setup: &[u8]) -> Self {
        let largest = [60, 500, 3_000, 9_000][setup[0] as usize >> 2 & 3];
        let eager_window = [16, 100, 1_000, 60_000][setup[0] as usize >> 4 & 3];
        let path_count = 1 + setup[0] as usize % 3;
        let least = (largest / 40) as u32;
        let traits: Vec<PathProperties> = (0..path_count)
            .map(|path_id| traits(setup[1 + 2 * path_id], setup[2 + 2 * path_id], least))
            .collect();
        let mut arena = Arena::default();
        let sides = [0, 1].map(|index: u32| {
            let config = Config {
                address: Address::new(index, 0),
                eager_window,
                min_multi_recv: 1,
                operations_max: 1_000,
            };
            let mut endpoint = DrivenEndpoint::new(config);
            assert_eq!(endpoint.peer(Address::new(1 - index, 0)), PEER);
            let mut region = content(9_000 + index as usize, CONSTANT_BYTES);
            region.resize(REGION_BYTES as usize, 0);
            Side::new(endpoint, arena.keep(region), path_count)
        });
        let empty = || (0..path_count).map(|_| PathQueue::default()).collect();
        let mut world = Self {
            sides,
            queues: [empty(), empty()],
            traits,
            stale: vec![false; path_count],
            arena,
            acks: [0; 2],
            sizes: [0, 1, 7, 40, 60, largest / 9, largest / 2, largest],
            operations: Vec::new(),
            sent: Default::default(),
            received: Default::default(),
            fresh: [CONSTANT_BYTES; 2],
            now: Time(0),
        };
        let opened = if setup[7] & 1 == 0 { 1 } else { path_count };
        for path_id in 0..opened {
            world.open(0, path_id);
            world.open(1, path_id);
        }
        world
    }

    fn operate(&mut self, what: u8, first: u8, second: u8) {
        let side = what as usize >> 7;
        let path_id = first as usize % self.traits.len();
        let most = if second < 200 { second as u64 + 1 } else { u64::MAX };
        match what & 31 {
            0..=3 => self.send(side, first, second),
            4..=7 => self.recv(side, first as usize % TAGS, self.sizes[second as usize & 7]),
            8 => self.write(side, first, second),
            9 => self.read(side, first, second),
            10 => self.atomic(side, first, second),
            11 => self.pass(side, path_id, first, second),
            12..=15 => _ = self.transmit(side, path_id, most),
            16 => _ = self.resume(side, path_id, most),
            17..=20 => _ = self.deliver(side, path_id, most),
            21 => self.corrupt(side, path_id),
            22 => self.reorder(side, path_id, second as usize),
            23 | 24 => self.close(side, path_id),
            25 => (0..2).for_each(|end| self.close(end, path_id)),
            26 => self.open(side, path_id),
            27 => (0..2).for_each(|end| self.open(end, path_id)),
            28 => self.flush_deferred_acks(side),
            29 => self.send_all(side, path_id, second as usize),
            30 => self.deliver_all(side, path_id, second as usize),
            _ if second & 16 == 0 => self.steps(second & 15),
            _ => match second >> 5 & 3 {
                0 => self.lose(side, path_id, second as usize & 15),
                1 => self.duplicate(side, path_id, second as usize & 15),
                2 => self.pass_time(second & 15),
                _ => _ = self.sleep(),
            },
        }
    }

    fn start_operation(&mut self, side: usize, what: OperationKind, piece: Piece) -> Ticket {
        let context = self.operations.len();
        self.operations.push(PendingOperation {
            side,
            what,
            piece,
            result: None,
            is_refused: false,
            is_done: false,
            notifications: 0,
        });
        Ticket { context, notify: true }
    }

    fn send(&mut self, side: usize, first: u8, second: u8) {
        let (tag, size) = (first as usize % TAGS, self.sizes[second as usize & 7]);
        let level = if second & 8 == 0 { CompletionLevel::TransmitComplete } else { CompletionLevel::DeliveryComplete };
        let data = (second & 16 != 0).then_some(self.operations.len() as u64);
        let memory = self.arena.keep(content(self.operations.len(), size));
        let ticket = self.start_operation(side, OperationKind::Send { size, data }, memory.clone());
        self.sent[side][tag].push(ticket.context);
        let message = Message { peer: PEER, memory, tag: Some(tag as u64), data, ticket, level };
        self.sides[side].endpoint.send(message).expect("few operations");
        self.drain(side);
    }

    /// Sends a message the short way, if nothing is in its way.
    fn pass(&mut self, side: usize, path_id: usize, first: u8, second: u8) {
        let queue = &self.queues[side][path_id];
        let (tag, size) = (first as usize / 3 % TAGS, self.sizes[second as usize & 7]);
        let passing = InjectMessage { peer: PEER, tag: Some(tag as u64), data: None, size };
        let path = PathId(path_id as u8);
        let Some(frame) = self.sides[side].endpoint.inject(&passing, path) else { return };
        if queue.is_held() {
            return;
        }
        let bytes = content(self.operations.len(), size);
        let copy = frame.wants_copy.then(|| self.arena.copy(&bytes));
        let mut flying = Frame::new(frame.front());
        flying.payload.extend_from_slice(&bytes);
        self.push(side, path_id, flying);
        let memory = self.arena.keep(Vec::new());
        let ticket = self.start_operation(side, OperationKind::Send { size, data: None }, memory);
        self.operations[ticket.context].is_done = true;
        self.sent[side][tag].push(ticket.context);
        self.sides[side].endpoint.injected(&passing, path, copy);
        self.drain(side);
    }

    fn recv(&mut self, side: usize, tag: usize, size: u64) {
        let memory = self.arena.keep(vec![0xa5; size as usize]);
        let nth = self.received[side][tag].len();
        let ticket = self.start_operation(side, OperationKind::Recv { tag, nth }, memory.clone());
        self.received[side][tag].push(ticket.context);
        let tag = Some((tag as u64, 0));
        let posting = Posting { source: Some(PEER), memory, tag, ticket, multi: false };
        self.sides[side].endpoint.messages_mut().recv(posting);
        self.drain(side);
    }

    /// A place in the region of the other side that nobody else writes.
    fn reserve(&mut self, side: usize, size: u64) -> Option<u64> {
        let at = self.fresh[1 - side];
        (at + size <= REGION_BYTES).then(|| {
            self.fresh[1 - side] += size;
            at
        })
    }

    fn remote(&mut self, context: usize, is_right: bool, offset: u64) -> Remote {
        self.operations[context].is_refused = !is_right;
        Remote { peer: PEER, key: if is_right { KEY } else { KEY + 1 }, offset }
    }

    fn write(&mut self, side: usize, first: u8, second: u8) {
        let size = self.sizes[second as usize & 7];
        let Some(at) = self.reserve(side, size) else { return };
        let data = (first & 1 != 0).then_some(self.operations.len() as u64);
        let memory = self.arena.keep(content(self.operations.len(), size));
        let ticket = self.start_operation(side, OperationKind::Write { at, data }, memory.clone());
        let remote = self.remote(ticket.context, first & 6 != 0, at);
        let endpoint = &mut self.sides[side].endpoint;
        endpoint.write(remote, memory, data, ticket).expect("few operations");
        self.drain(side);
    }

    fn read(&mut self, side: usize, first: u8, second: u8) {
        let (at, size) = (first as u64, self.sizes[second as usize & 7]);
        let memory = self.arena.keep(vec![0; size as usize]);
        let ticket = self.start_operation(side, OperationKind::Read { at }, memory.clone());
        let remote = self.remote(ticket.context, second & 24 != 0, at);
        self.sides[side].endpoint.read(remote, memory, ticket).expect("few operations");
        self.drain(side);
    }

    fn atomic(&mut self, side: usize, first: u8, second: u8) {
        let Some(offset) = self.reserve(side, 8) else { return };
        let operands = self.arena.keep(content(self.operations.len(), 8));
        let fetch = first & 1 != 0;
        let result = fetch.then(|| self.arena.keep(vec![1; 8]));
        let ticket = self.start_operation(side, OperationKind::Atomic { at: offset }, operands.clone());
        self.operations[ticket.context].result = result.clone();
        let Remote { key, .. } = self.remote(ticket.context, second & 3 != 0, offset);
        let request = AtomicRequest {
            op: 0,
            operation: 2,
            datatype: 7,
            fetch,
            compare: false,
            length: 8,
            key,
            offset,
        };
        let endpoint = &mut self.sides[side].endpoint;
        endpoint.atomic(PEER, request, operands, result, ticket).expect("few operations");
        self.drain(side);
    }

    /// Something is done, as the endpoint of `side` says.
    fn finish(&mut self, side: usize, done: &OperationCompletion) {
        if done.kind == CompletionKind::RemoteWrite {
            let context = done.data.expect("data of a write") as usize;
            let operation = &mut self.operations[context];
            operation.notifications += 1;
            assert!(operation.notifications == 1 && operation.side != side && !operation.is_refused, "{done:?}");
            return;
        }
        let context = done.ticket.context;
        let operation = &mut self.operations[context];
        assert!(operation.side == side && !operation.is_done, "{done:?} is not due");
        operation.is_done = true;
        let (what, notifications) = (operation.what, operation.notifications);
        let (memory, result) = (operation.piece.clone(), operation.result.clone());
        let bytes = self.arena.free(&memory);
        let result = result.map(|result| self.arena.free(&result));
        let expected = expected_failure(operation);
        let there = self.sides[1 - side].region.clone();
        match what {
            OperationKind::Recv { tag, nth } => return self.check_message(side, tag, nth, done, &bytes),
            _ if expected.is_some() => (),
            OperationKind::Send { .. } => (),
            OperationKind::Write { at, data } => {
                assert!(self.arena.read(&there, at, memory.size()) == bytes, "{done:?} too early");
                assert!(data.is_none() || notifications == 1, "{done:?}: its target was not notified");
            }
            OperationKind::Read { at } => {
                assert!(bytes == self.arena.read(&there, at, memory.size()), "{done:?}: wrong");
            }
            OperationKind::Atomic { at } => {
                assert!(self.arena.read(&there, at, 8) == bytes, "{done:?}: not once");
                assert!(result.is_none_or(|old| old == [0; 8]), "{done:?}: not once");
            }
        }
        assert_eq!(done.error, expected, "{done:?}");
    }

    /// The receive that was the `nth` of its tag has the message that was the `nth`.
    fn check_message(&self, side: usize, tag: usize, nth: usize, done: &OperationCompletion, bytes: &[u8]) {
        let context = *self.sent[1 - side][tag].get(nth).expect("a message that was sent");
        let OperationKind::Send { size, data } = self.operations[context].what else {
            unreachable!("only messages are sent")
        };
        let take = size.min(bytes.len() as u64);
        let error = (take < size).then_some(Failure::Truncated(size - take));
        assert_eq!((done.length, done.data, done.error), (take, data, error), "{done:?}");
        let (front, back) = bytes.split_at(take as usize);
        assert!(front == content(context, take), "{done:?} is damaged, or another");
        assert!(back.iter().all(|&byte| byte == 0xa5), "{done:?} is longer than said");
    }

    fn flush_deferred_acks(&mut self, side: usize) {
        self.sides[side].endpoint.flush_deferred_acks();
        self.drain(side);
    }

    /// Several frames of a path leave.
    fn send_all(&mut self, from: usize, path_id: usize, frames: usize) {
        for _ in 0..=frames {
            let moved = self.resume(from, path_id, u64::MAX) || self.transmit(from, path_id, u64::MAX);
            if !moved {
                return;
            }
        }
    }

    /// Several frames of a path get to their places.
    fn deliver_all(&mut self, from: usize, path_id: usize, frames: usize) {
        for _ in 0..=2 * frames {
            if !self.deliver(from, path_id, u64::MAX) {
                return;
            }
        }
    }

    fn steps(&mut self, count: u8) {
        for _ in 0..count {
            self.step();
        }
    }

    /// Whatever can move does, once; false if nothing can.
    fn step(&mut self) -> bool {
        let mut moved = false;
        for path_id in 0..self.traits.len() {
            for from in 0..2 {
                moved |= self.resume(from, path_id, u64::MAX);
                moved |= self.transmit(from, path_id, u64::MAX);
                moved |= self.deliver(from, path_id, u64::MAX);
            }
        }
        moved
    }

    /// Time goes on by up to seventeen seconds.
    fn pass_time(&mut self, bits: u8) {
        self.now = self.now.after(MILLISECOND << bits >> 1);
        self.handle_time();
    }

    /// Time goes on until somebody has something to do; false if nobody ever will.
    fn sleep(&mut self) -> bool {
        let wakes = self.sides.iter().filter_map(|side| side.endpoint.schedule().next_wake());
        let Some(wake) = wakes.min() else { return false };
        self.now = self.now.max(wake);
        self.handle_time();
        true
    }

    fn handle_time(&mut self) {
        for side in 0..2 {
            self.sides[side].endpoint.handle_time(self.now);
            self.drain(side);
        }
    }

    /// Mends everything, gives every message a receive and every receive a message.
    fn restore_paths(&mut self) {
        for path_id in 0..self.traits.len() {
            if self.stale[path_id] {
                (0..2).for_each(|end| self.close(end, path_id));
            }
            (0..2).for_each(|end| self.open(end, path_id));
        }
        for side in 0..2 {
            for tag in 0..TAGS {
                while self.received[side][tag].len() < self.sent[1 - side][tag].len() {
                    self.recv(side, tag, self.sizes[7]);
                }
                while self.sent[1 - side][tag].len() < self.received[side][tag].len() {
                    self.send(1 - side, tag as u8, 3);
                }
            }
        }
    }

    /// Lets everything move.
    fn run_until_idle(&mut self) {
        for _ in 0..STEPS_MAX {
            if !self.step() {
                (0..2).for_each(|side| self.flush_deferred_acks(side));
                if !self.step() && !self.sleep() {
                    return;
                }
            }
        }
        panic!("never comes to rest");
    }

    /// Both leave, each when the other has acknowledged everything.
    fn say_goodbye(&mut self) {
        for side in 0..2 {
            self.sides[side].endpoint.channel_mut(PEER).goodbye();
            self.drain(side);
        }
        self.run_until_idle();
    }

    fn check_done(&self) {
        for (context, operation) in self.operations.iter().enumerate() {
            assert!(operation.is_done, "{context} of {} never ends", operation.side);
            let is_notified =
                !operation.is_refused && matches!(operation.what, OperationKind::Write { data: Some(_), .. });
            assert_eq!(operation.notifications, u32::from(is_notified), "{context}: its target was not notified");
        }
    }

    fn check_idle(&mut self) {
        for side in &mut self.sides {
            assert!(side.endpoint.is_idle() && side.endpoint.is_drained(), "something is held");
            side.endpoint.check_empty().unwrap();
            for path_id in 0..self.traits.len() {
                let frame = side.endpoint.poll_transmit(PEER, PathId(path_id as u8));
                assert!(frame.is_none(), "a frame that nobody was notified of");
            }
        }
        assert_eq!(self.arena.copies(), 0, "copies that nobody needs are kept");
    }
}

/// The failure with which an operation on remote memory must end.
fn expected_failure(operation: &PendingOperation) -> Option<Failure> {
    operation.is_refused.then_some(Failure::Errno(REFUSED))
}

/// Good input: a few lists of operations.
pub fn seeds() -> Vec<(String, Vec<u8>)> {
    let mut seeds = Vec::new();
    for (name, setup, operations) in LISTS {
        let bytes = [&setup[..], &operations.concat()].concat();
        seeds.push((name.to_string(), bytes));
    }
    seeds
}

/// The number of an operation at the other side.
const OTHER: u8 = 128;

type List = (&'static str, [u8; 8], &'static [[u8; 3]]);

const LISTS: [List; 7] = [
    (
        "messages",
        [0b10_01_00, 0x55, 0x10, 0, 0, 0, 0, 0],
        &[
            [0, 0, 3],
            [0, 1, 7],
            [OTHER + 4, 0, 3],
            [OTHER, 0, 12],
            [31, 0, 9],
            [OTHER + 4, 1, 7],
            [11, 0, 2],
            [31, 0, 15],
        ],
    ),
    (
        "break",
        [0b10_10_01, 0xaa, 0x20, 0xfa, 0x11, 0, 0, 1],
        &[
            [0, 0, 7],
            [0, 0, 6],
            [29, 0, 9],
            [29, 1, 9],
            [18, 0, 20],
            [25, 0, 0],
            [30, 1, 3],
            [29, 1, 20],
            [OTHER + 4, 0, 7],
            [27, 0, 0],
            [31, 0, 15],
        ],
    ),
    (
        "corrupt",
        [0b11_10_10, 0xaa, 0x38, 0xfa, 0x09, 0xff, 0x30, 1],
        &[
            [8, 3, 6],
            [8, 2, 5],
            [29, 0, 1],
            [29, 1, 1],
            [21, 0, 0],
            [17, 1, 0],
            [21, 1, 0],
            [OTHER + 9, 7, 30],
            [10, 1, 1],
            [31, 0, 6],
            [OTHER + 21, 0, 0],
        ],
    ),
    (
        "refused",
        [0b10_01_01, 0xaa, 0x00, 0xfa, 0x01, 0, 0, 1],
        &[
            [8, 0, 6],
            [8, 2, 5],
            [9, 0, 3],
            [10, 1, 0],
            [10, 0, 0],
            [29, 0, 3],
            [30, 0, 3],
            [OTHER + 29, 1, 3],
            [OTHER + 30, 1, 2],
            [23, 0, 0],
        ],
    ),
    (
        "overtaken",
        [0b11_11_10, 0xaa, 0x20, 0xaa, 0x20, 0xaa, 0x20, 1],
        &[
            [0, 0, 6],
            [0, 1, 4],
            [0, 2, 7],
            [12, 0, 255],
            [12, 1, 255],
            [12, 2, 9],
            [30, 1, 1],
            [16, 2, 255],
            [30, 2, 9],
            [22, 0, 0],
            [25, 0, 0],
            [29, 1, 200],
            [30, 1, 200],
        ],
    ),
    (
        "half",
        [0b10_01_01, 0xaa, 0x21, 0xfb, 0x21, 0, 0, 1],
        &[
            [0, 0, 7],
            [12, 0, 5],
            [23, 0, 0],
            [OTHER, 0, 5],
            [OTHER + 29, 0, 5],
            [18, 0, 255],
            [OTHER + 23, 0, 0],
            [26, 0, 0],
            [29, 0, 9],
            [OTHER + 26, 0, 0],
            [30, 0, 9],
        ],
    ),
    (
        "datagrams",
        [0b11_11_01, 0xaa, 0x80, 0xaa, 0x50, 0, 0, 1],
        &[
            [0, 0, 6],
            [0, 1, 4],
            [10, 1, 1],
            [29, 0, 9],
            [31, 0, 0b001_0010],
            [31, 0, 0b011_0001],
            [22, 0, 1],
            [30, 0, 9],
            [31, 0, 0b101_1000],
            [OTHER, 0, 7],
            [29, 1, 9],
            [31, 1, 0b001_0000],
            [31, 0, 0b111_0000],
            [30, 1, 3],
        ],
    ),
];
