//! A channel through relays that distribute its frames over several streams: a frame that is sent
//! later may arrive much sooner.

use std::collections::VecDeque;

use landbridge_proto::channel::{PathId, REORDER_WINDOW_FRAMES_MAX};
use landbridge_proto::endpoint::{Action, CompletionLevel, PathProperties};
use landbridge_proto::limit::EAGER_WINDOW_BYTES_MAX;
use landbridge_testbed::endpoint::{Frame, PEER, PairEnd, message, pair, posting};

#[test]
fn a_stream_that_stands_still_for_long_stops_no_message() {
    all_messages_arrive(Fate::Late);
}

#[test]
fn a_stream_that_breaks_after_standing_still_for_long_stops_no_message() {
    all_messages_arrive(Fate::Lost);
}

/// One frame of every `held_every` takes a stream that stands still until nothing else moves. The
/// harness checks what the receiver keeps meanwhile.
fn all_messages_arrive(fate: Fate) {
    for (bytes, messages) in [(1 << 20, 64), (8, 2 * REORDER_WINDOW_FRAMES_MAX)] {
        for held_every in [1, 7, 100, 1_000] {
            let mut world = World::new(fate, held_every);
            for _ in 0..messages {
                world.ends[1].it.messages_mut().recv(posting(bytes));
                world.ends[0].it.send(message(bytes, CompletionLevel::DeliveryComplete)).unwrap();
            }
            world.settle();
            let done: Vec<usize> = world.ends.iter().map(|end| end.done).collect();
            assert_eq!(done, [messages, messages], "{bytes} bytes, every {held_every}");
        }
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
    it: PairEnd,
    /// The endpoint has named its peer as busy.
    is_ready: bool,
    coming: VecDeque<Frame>,
    /// The frames on a stream that stands still.
    held: VecDeque<Frame>,
    done: usize,
}

impl World {
    fn new(fate: Fate, held_every: usize) -> Self {
        let bounds = (EAGER_WINDOW_BYTES_MAX, 1 << 20);
        let ends: [PairEnd; 2] = pair(bounds, &[(PATH, PathProperties::RELAY)]).into();
        let end = |it| End {
            it,
            is_ready: false,
            coming: VecDeque::new(),
            held: VecDeque::new(),
            done: 0,
        };
        Self { ends: ends.map(end), fate, held_every, sent: 0 }
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
                    self.ends[1 - to].it.channel_mut(PEER).presume_path_lost(PATH);
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
    /// The next frame, polled as drivers do: only after the endpoint has named the peer as busy.
    fn next(&mut self) -> Option<Frame> {
        self.is_ready |= self.it.next_busy().is_some();
        if !self.is_ready {
            return None;
        }
        let frame = self.it.next(PATH);
        self.is_ready = frame.is_some();
        self.act();
        frame
    }

    fn deliver_all(&mut self) {
        while let Some(frame) = self.coming.pop_front() {
            self.it.deliver(PATH, &frame);
            self.act();
        }
    }

    fn act(&mut self) {
        for action in self.it.actions() {
            match action {
                Action::Complete(done) => {
                    assert_eq!(done.error, None);
                    self.done += 1;
                }
                Action::CopyUnexpected { .. } => panic!("every message has a receive"),
                _ => (),
            }
        }
    }
}

const PATH: PathId = PathId(0);
