//! Two endpoints whose frames a test hands over by itself. Their memory has no bytes.

use std::ops::{Deref, DerefMut};

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{
    Action, CompletionLevel, Config, Failure, Message, OperationCompletion, PathProperties,
    PayloadDestination, Peer, Posting, Remote, Ticket,
};
use landbridge_proto::id::Address;
use landbridge_proto::wire::frame::Kind;

use super::driven_endpoint::{DrivenEndpoint, REFUSED};
use super::frame::Frame;
use super::memory::{NoBytes, SizedMemory};

/// The only peer of each end.
pub const PEER: Peer = Peer(0);
/// The ticket of every operation.
pub const TICKET: Ticket = Ticket { context: 7, notify: true };
/// A region of the peer.
pub const REMOTE: Remote = Remote { peer: PEER, key: 1, offset: 0 };

/// Rounds after which two ends have come to rest, or never do.
const ROUNDS_MAX: usize = 100;

/// One of two endpoints: see the module documentation.
///
/// # Panics
/// Every method panics at a violation.
pub struct PairEnd(DrivenEndpoint<SizedMemory>);

/// Two endpoints that know each other, and the paths between them.
pub fn pair(
    (eager_window, operations_max): (u32, usize),
    paths: &[(PathId, PathProperties)],
) -> (PairEnd, PairEnd) {
    let end = |index: u32| {
        let address = Address::new(index, 0);
        let config = Config { address, eager_window, min_multi_recv: 10, operations_max };
        let mut endpoint = DrivenEndpoint::new(config);
        assert_eq!(endpoint.peer(Address::new(1 - index, 0)), PEER);
        for (path, properties) in paths {
            endpoint.channel_mut(PEER).open_path(*path, *properties);
        }
        PairEnd(endpoint)
    };
    (end(0), end(1))
}

/// A message to the other end.
pub fn message(bytes: u64, level: CompletionLevel) -> Message<SizedMemory> {
    let (memory, tag, ticket) = (SizedMemory(bytes), Some(1), TICKET);
    Message { peer: PEER, memory, tag, data: None, ticket, level }
}

/// A receive that accepts every [`message`].
pub fn posting(bytes: u64) -> Posting<SizedMemory> {
    let (memory, tag) = (SizedMemory(bytes), Some((1, 0)));
    Posting { source: None, memory, tag, ticket: TICKET, multi: false }
}

/// Exchanges frames by `paths` until there are no more.
pub fn settle(a: &mut PairEnd, b: &mut PairEnd, paths: &[PathId]) {
    for _ in 0..ROUNDS_MAX {
        let mut has_moved = false;
        for &path in paths {
            let (there, back) = (a.next(path), b.next(path));
            has_moved |= there.is_some() || back.is_some();
            there.iter().for_each(|frame| _ = b.deliver(path, frame));
            back.iter().for_each(|frame| _ = a.deliver(path, frame));
        }
        if !has_moved {
            return;
        }
    }
    panic!("they never come to rest");
}

impl Deref for PairEnd {
    type Target = DrivenEndpoint<SizedMemory>;

    fn deref(&self) -> &DrivenEndpoint<SizedMemory> {
        &self.0
    }
}

impl DerefMut for PairEnd {
    fn deref_mut(&mut self) -> &mut DrivenEndpoint<SizedMemory> {
        &mut self.0
    }
}

impl PairEnd {
    /// The next frame for a path, which takes the whole frame at once.
    pub fn next(&mut self, path: PathId) -> Option<Frame> {
        self.0.transmit((PEER, path), &mut NoBytes).unwrap()
    }

    /// All frames that may leave by a path.
    pub fn next_all(&mut self, path: PathId) -> Vec<Frame> {
        std::iter::from_fn(|| self.next(path)).collect()
    }

    /// A frame arrives by a path, and with it the turn of early frames may come.
    pub fn deliver(&mut self, path: PathId, frame: &Frame) -> PayloadDestination {
        self.0.deliver((PEER, path), frame, &mut NoBytes).unwrap()
    }

    /// A frame arrives by a path. Its payload is still to come: see [`Self::end_frame`].
    pub fn begin_frame(&mut self, path: PathId, frame: &Frame) -> PayloadDestination {
        let place = self.0.place(PEER, path, frame).unwrap();
        self.0.keep_actions(&mut NoBytes).unwrap();
        self.0.begin((PEER, path), frame, place, None).unwrap();
        place
    }

    /// The payload arrives whose frame has begun. Early frames keep waiting.
    pub fn end_frame(&mut self, path: PathId) {
        self.0.end((PEER, path)).unwrap();
    }

    /// A write arrives by a path, and there is no such region.
    pub fn refuse_write(&mut self, path: PathId, frame: &Frame) {
        let place = self.begin_frame(path, frame);
        assert_eq!(frame.kind(), Kind::Write);
        let PayloadDestination::Region { op, .. } = place else { panic!("{place:?}") };
        self.channel_mut(PEER).refuse(op, REFUSED);
        self.end_frame(path);
    }

    /// The payload whose frame has begun turns out to be corrupt, which the endpoint can bear.
    pub fn corrupt_frame(&mut self, path: PathId) {
        assert!(self.0.corrupt((PEER, path), &mut NoBytes).unwrap());
    }

    /// The oldest action.
    pub fn next_action(&mut self) -> Option<Action<SizedMemory>> {
        self.0.next_action(&mut NoBytes).unwrap()
    }

    /// The actions since the last call.
    pub fn actions(&mut self) -> Vec<Action<SizedMemory>> {
        std::iter::from_fn(|| self.next_action()).collect()
    }

    /// The completions since the last call. Other actions are dropped.
    pub fn done(&mut self) -> Vec<OperationCompletion> {
        let done = self.actions().into_iter().filter_map(|action| match action {
            Action::Complete(done) => Some(done),
            _ => None,
        });
        done.collect()
    }

    /// The outcomes of the operations that completed since the last call.
    pub fn errors(&mut self) -> Vec<Option<Failure>> {
        self.done().iter().map(|done| done.error).collect()
    }
}
