//! A channel through relays that distribute its frames over several streams: a frame that is sent
//! later may arrive much sooner.

use std::collections::{BTreeMap, VecDeque};

use landbridge_proto::channel::{PathId, REORDER_WINDOW_BYTES_MAX, REORDER_WINDOW_FRAMES_MAX};
use landbridge_proto::endpoint::{
    Action, CompletionLevel, Config, Endpoint, Memory, Message, PathProperties, PayloadDestination,
    Peer, Posting, REASSEMBLED, Ticket,
};
use landbridge_proto::id::Address;
use landbridge_proto::limit::{EAGER_WINDOW_BYTES_MAX, FRAME_BODY_BYTES_MAX};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header};

#[test]
fn a_stream_that_stands_still_for_long_stops_no_message() {
    all_messages_arrive(Fate::Late);
}

#[test]
fn a_stream_that_breaks_after_standing_still_for_long_stops_no_message() {
    all_messages_arrive(Fate::Lost);
}

/// One frame of every `held_every` takes a stream that stands still until nothing else moves.
fn all_messages_arrive(fate: Fate) {
    for (bytes, messages) in [(1 << 20, 64), (8, 2 * REORDER_WINDOW_FRAMES_MAX)] {
        for held_every in [1, 7, 100, 1_000] {
            let mut world = World::new(fate, held_every);
            world.ends.iter_mut().for_each(|end| {
                end.endpoint.channel_mut(PEER).open_path(PATH, PathProperties::RELAY)
            });
            for _ in 0..messages {
                world.ends[1].endpoint.messages_mut().recv(posting(bytes));
                world.ends[0].endpoint.send(message(bytes)).unwrap();
            }
            world.settle();
            let done: Vec<usize> = world.ends.iter().map(|end| end.done).collect();
            assert_eq!(done, [messages, messages], "{bytes} bytes, every {held_every}");
            let (most_bytes, most_frames) = world.ends[1].most_early;
            assert!(most_bytes <= REORDER_WINDOW_BYTES_MAX as usize + FRAME_BODY_BYTES_MAX);
            assert!(most_frames <= REORDER_WINDOW_FRAMES_MAX);
        }
    }
}

#[derive(Clone, Debug)]
struct Room(u64);

impl Memory for Room {
    fn size(&self) -> u64 {
        self.0
    }

    fn address(&self) -> u64 {
        0
    }
}

/// Two endpoints and the streams between them.
struct World {
    ends: [End; 2],
    fate: Fate,
    held_every: usize,
    sent: usize,
}

/// The fate of frames on a stream that stands still.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Late,
    /// The stream breaks, and the relays report this to the sender.
    Lost,
}

struct End {
    endpoint: Endpoint<Room>,
    /// The endpoint has named its peer as busy.
    is_ready: bool,
    coming: VecDeque<Frame>,
    /// The frames on a stream that stands still.
    held: VecDeque<Frame>,
    /// The heads and lengths of the frames that arrived early.
    early: BTreeMap<u64, (Vec<u8>, u32)>,
    early_bytes: usize,
    most_early: (usize, usize),
    done: usize,
}

/// A frame without its payload.
struct Frame {
    header: Header,
    head: Vec<u8>,
}

impl World {
    fn new(fate: Fate, held_every: usize) -> Self {
        Self { ends: [0, 1].map(End::new), fate, held_every, sent: 0 }
    }

    /// Moves everything that can move; only then the frames on streams that stand still meet their
    /// fate.
    fn settle(&mut self) {
        while self.step() || self.release() {}
    }

    fn release(&mut self) -> bool {
        for to in [0, 1] {
            let held = std::mem::take(&mut self.ends[to].held);
            if held.is_empty() {
                continue;
            }
            match self.fate {
                Fate::Late => self.ends[to].coming = held,
                Fate::Lost => {
                    // The next stream stands still later.
                    self.held_every *= 2;
                    self.ends[1 - to].endpoint.channel_mut(PEER).presume_path_lost(PATH);
                }
            }
            self.ends[to].deliver_all();
            return true;
        }
        false
    }

    /// Moves frames once. Returns false if nothing moves.
    fn step(&mut self) -> bool {
        let mut has_moved = false;
        for (from, to) in [(0, 1), (1, 0)] {
            while let Some(frame) = self.ends[from].next() {
                self.sent += 1;
                let is_held = self.sent.is_multiple_of(self.held_every);
                let end = &mut self.ends[to];
                if is_held { &mut end.held } else { &mut end.coming }.push_back(frame);
                has_moved = true;
            }
            self.ends[to].deliver_all();
        }
        has_moved
    }
}

impl End {
    fn new(index: u32) -> Self {
        let mut endpoint = Endpoint::new(Config {
            address: Address::new(index, 0),
            eager_window: EAGER_WINDOW_BYTES_MAX,
            min_multi_recv: 10,
            operations_max: 1 << 20,
        });
        assert_eq!(endpoint.peer(Address::new(1 - index, 0)), PEER);
        Self {
            endpoint,
            is_ready: false,
            coming: VecDeque::new(),
            held: VecDeque::new(),
            early: BTreeMap::new(),
            early_bytes: 0,
            most_early: (0, 0),
            done: 0,
        }
    }

    /// The next frame, polled as drivers do: only after the endpoint has named the peer as busy.
    fn next(&mut self) -> Option<Frame> {
        self.is_ready |= self.endpoint.next_busy().is_some();
        if !self.is_ready {
            return None;
        }
        let Some(frame) = self.endpoint.poll_transmit(PEER, PATH) else {
            self.is_ready = false;
            return None;
        };
        let front = frame.front().to_vec();
        let copy = frame.payload.filter(|_| frame.wants_copy).map(|(.., length)| Room(length));
        self.endpoint.transmitted(PEER, PATH, true, copy);
        self.act();
        let header = Header::parse(&front).unwrap();
        Some(Frame { header, head: front[HEADER_BYTES..].to_vec() })
    }

    fn deliver_all(&mut self) {
        while let Some(Frame { header, head }) = self.coming.pop_front() {
            let place = self.endpoint.handle_frame(PEER, PATH, &header, &head).unwrap();
            if let PayloadDestination::OutOfOrder { frame, whole, .. } = place {
                let before = self.early.insert(frame, (head, whole));
                self.early_bytes += if before.is_none() { whole as usize } else { 0 };
            }
            self.endpoint.handle_payload(PEER, PATH);
            self.act();
            while let Some(frame) = self.endpoint.channel(PEER).next_reassembled() {
                let (head, _) = self.early[&frame].clone();
                // Only the head is read.
                self.endpoint.handle_reassembled(PEER, &head).unwrap();
                self.act();
                self.endpoint.handle_payload(PEER, REASSEMBLED);
                self.act();
            }
            self.most_early.0 = self.most_early.0.max(self.early_bytes);
            self.most_early.1 = self.most_early.1.max(self.early.len());
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.endpoint.poll_action() {
            match action {
                Action::Complete(done) => {
                    assert_eq!(done.error, None);
                    self.done += 1;
                }
                Action::Release { frame, .. } => {
                    let released = self.early.remove(&frame);
                    self.early_bytes -= released.map_or(0, |(_, whole)| whole as usize);
                }
                Action::CopyUnexpected { .. } => panic!("every message has a receive"),
                _ => (),
            }
        }
    }
}

fn message(bytes: u64) -> Message<Room> {
    let (ticket, level) = (TICKET, CompletionLevel::DeliveryComplete);
    Message { peer: PEER, memory: Room(bytes), tag: Some(1), data: None, ticket, level }
}

fn posting(bytes: u64) -> Posting<Room> {
    Posting { source: None, memory: Room(bytes), tag: Some((1, 0)), ticket: TICKET, multi: false }
}

const PEER: Peer = Peer(0);
const PATH: PathId = PathId(0);
const TICKET: Ticket = Ticket { context: 7, notify: true };
