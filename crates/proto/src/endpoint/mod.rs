//! One endpoint of one process: messages, matching and remote memory over channels to its peers.
//!
//! What enters: the application's commands ([`Endpoint::send`], [`Endpoint::recv`], …), frames
//! ([`Endpoint::handle_frame`], then [`Endpoint::handle_payload`]), and the driver's reports on
//! frames that it was given to send. What leaves: frames ([`Endpoint::poll_transmit`]) and actions
//! ([`Endpoint::poll_action`]), which are bytes to move, memory of the application to access, and
//! completed operations.
//!
//! The endpoint never sees a payload byte. It names where bytes lie and where they belong, in terms
//! of the caller's own [`Memory`]; the driver moves the bytes, once.
//!
//! A message travels as follows. Its first frame carries as much as the path and the receiver's
//! credit allow: all of a small message, nothing of a large message when the credit is used up. If
//! a rest remains, the receiver learns where the rest belongs when the message is matched. Then the
//! receiver either reads the rest out of the sender's memory ([`Action::Pull`], answered by
//! `Pulled`) or grants it, and the rest follows in `Data` frames. Where a round trip is expensive
//! ([`PathProperties::ahead`]), the first frame announces how many bytes follow on credit in
//! `Ahead` frames.
//!
//! What may never happen: a receive completes before all its bytes are in place; a completion is
//! lost or reported twice; unexpected payload exceeds the granted credit; a frame of one peer stops
//! the frames of another peer.
//!
//! Rule for drivers: after any call that takes `&mut self`, drain [`Endpoint::poll_action`] until
//! it returns `None` before the next such call.

mod acknowledgements;
mod channel;
mod channel_usage;
mod control_frame;
mod datagram_flow;
mod driver_interface;
mod incoming;
#[cfg(test)]
mod path_selection;
mod path_set;
mod path_state;
mod path_suspicion;
mod paths;
mod plan;
mod receive;
mod remote;
mod timers;
mod transmit;

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::id::Address;
use crate::matching::{ANY, MatchCriteria, PostedQueue, UnexpectedQueue};
use crate::path::time::Time;
use crate::slab::Slab;

use channel::{Channel, Item};
pub use channel_usage::{ChannelUsage, InFlightUsage};
pub use driver_interface::{
    Action, AtomicRequest, CompletionKind, CompletionLevel, Config, Failure, Fault, Full, Memory,
    Message, OperationCompletion, PayloadDestination, Peek, Peer, Posting, Ticket,
};
use incoming::{Receive, UnexpectedMessage};
pub use path_state::{PathProperties, PathStatistics};
pub use plan::{InjectMessage, OutgoingFrame};
pub use receive::REASSEMBLED;
pub use remote::Remote;

/// One endpoint: see the module documentation.
pub struct Endpoint<M> {
    config: Config,
    channels: Vec<Channel<M>>,
    by_address: BTreeMap<Address, Peer>,
    ops: Slab<Op<M>>,
    receives: Slab<Receive<M>>,
    unexpected_messages: Slab<UnexpectedMessage>,
    posted_queue: ByClass<PostedQueue>,
    unexpected_queue: ByClass<UnexpectedQueue>,
    /// The messages that a peek claimed, by context, or the reason why such a message never
    /// completes.
    claimed: BTreeMap<usize, Result<u32, Failure>>,
    actions: VecDeque<Action<M>>,
    now: Time,
    busy: VecDeque<Peer>,
    /// The peers whose acknowledgement waits for an answer of the application.
    deferred: Vec<Peer>,
    /// The time at which each channel must be handled: the time that the channel recorded, or an
    /// earlier one.
    wakes: BTreeSet<(Time, Peer)>,
    /// The number of channels that need the time.
    timed: usize,
}

/// An operation that this endpoint started towards a peer.
struct Op<M> {
    peer: Peer,
    ticket: Ticket,
    level: CompletionLevel,
    /// The bytes to send, for messages, writes and atomic operations.
    memory: M,
    /// A path has taken the operation's first frame.
    is_begun: bool,
    /// Bytes that paths have taken.
    sent: u64,
    /// Bytes that paths may take: beyond the bytes sent ahead, only what the receiver has granted.
    limit: u64,
    /// The end of the bytes that are sent ahead of any grant.
    ahead: u64,
    total: u64,
    /// Some of the operation's bytes may have to be retransmitted from the operation's memory.
    is_borrowed: bool,
    /// The errno with which the peer has refused the operation.
    refused: Option<i32>,
    kind: OpKind<M>,
}

enum OpKind<M> {
    Message { tag: Option<u64>, data: Option<u64>, recv: u32 },
    Write { key: u64, offset: u64, data: Option<u64> },
    Read { key: u64, offset: u64, got: u64 },
    Atomic { request: AtomicRequest, result: Option<M> },
}

/// One value for tagged and one for untagged messages, which never match each other.
#[derive(Default)]
struct ByClass<T> {
    tagged: T,
    untagged: T,
}

impl<T> ByClass<T> {
    #[inline]
    fn of(&mut self, tagged: bool) -> &mut T {
        if tagged { &mut self.tagged } else { &mut self.untagged }
    }
}

impl<M> OpKind<M> {
    fn completion_kind(&self) -> CompletionKind {
        match self {
            OpKind::Message { tag: Some(_), .. } => CompletionKind::TaggedSend,
            OpKind::Message { tag: None, .. } => CompletionKind::Send,
            OpKind::Write { .. } => CompletionKind::Write,
            OpKind::Read { .. } => CompletionKind::Read,
            OpKind::Atomic { request, .. } if request.fetch => CompletionKind::FetchAtomic,
            OpKind::Atomic { .. } => CompletionKind::Atomic,
        }
    }
}

impl<M: Memory> Endpoint<M> {
    /// Creates an endpoint without peers.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            channels: Vec::new(),
            by_address: BTreeMap::new(),
            ops: Slab::default(),
            receives: Slab::default(),
            unexpected_messages: Slab::default(),
            posted_queue: ByClass::default(),
            unexpected_queue: ByClass::default(),
            claimed: BTreeMap::new(),
            actions: VecDeque::new(),
            now: Time(0),
            busy: VecDeque::new(),
            deferred: Vec::new(),
            wakes: BTreeSet::new(),
            timed: 0,
        }
    }

    /// Sets the current time. The endpoint reads the time only if [`Self::needs_time`] is true, so
    /// the driver need not call this function otherwise.
    #[inline]
    pub fn set_time(&mut self, now: Time) {
        self.now = now;
    }

    /// Sets the bytes below which the remaining memory of a multi-receive is released to the
    /// application.
    pub fn set_min_multi_recv(&mut self, bytes: u64) {
        self.config.min_multi_recv = bytes;
    }

    /// Whether this endpoint has a channel to `address`.
    pub fn is_known(&self, address: Address) -> bool {
        self.by_address.contains_key(&address)
    }

    /// Returns the number of the peer at `address`, and creates its channel if there is none. A
    /// peer with an index is found again by its address. The caller must remember the number of an
    /// anonymous peer.
    pub fn peer(&mut self, address: Address) -> Peer {
        if let Some(&peer) = self.by_address.get(&address) {
            return peer;
        }
        let peer = Peer(self.channels.len() as u32);
        self.channels.push(Channel::new(address, self.config.eager_window));
        if address != Address::ANONYMOUS {
            self.by_address.insert(address, peer);
        }
        peer
    }

    /// The number of peers so far.
    pub fn peers(&self) -> usize {
        self.channels.len()
    }

    /// Sends a message, whose frames [`Self::poll_transmit`] returns. The returned operation number
    /// is an argument of [`Self::memory_mut`].
    ///
    /// # Errors
    /// [`Full`] if too many operations are in flight: make progress and try again.
    #[inline]
    pub fn send(&mut self, message: Message<M>) -> Result<u32, Full> {
        let total = message.memory.size();
        let kind = OpKind::Message { tag: message.tag, data: message.data, recv: 0 };
        self.start(Op {
            peer: message.peer,
            ticket: message.ticket,
            level: message.level,
            memory: message.memory,
            is_begun: false,
            sent: 0,
            limit: 0,
            ahead: 0,
            total,
            is_borrowed: false,
            refused: None,
            kind,
        })
    }

    fn start(&mut self, op: Op<M>) -> Result<u32, Full> {
        if self.ops.len() >= self.config.operations_max {
            return Err(Full);
        }
        let peer = op.peer;
        if let Some(errno) = self.channels[peer.0 as usize].end.failed {
            self.end_unreachable(op, errno);
            return Ok(u32::MAX);
        }
        let first = Item::first(&op.kind);
        let id = self.ops.insert(op);
        self.enqueue(peer, first(id));
        Ok(id)
    }

    /// The memory of operation `op`, if some of its bytes have not been sent. The caller may
    /// replace the memory by a copy, unless the memory has an address and the path has `pull`: the
    /// peer may already have permission to read the memory there. The replacement does not affect a
    /// frame that a path still holds.
    pub fn memory_mut(&mut self, op: u32) -> Option<&mut M> {
        let op = self.ops.at_mut(op)?;
        let unsent = op.sent < op.total && !matches!(op.kind, OpKind::Read { .. });
        unsent.then_some(&mut op.memory)
    }

    /// Whether operation `op` is still in flight.
    pub fn is_in_flight(&self, op: u32) -> bool {
        self.ops.at(op).is_some()
    }

    /// Matches a receive with the oldest message that it accepts, or queues the receive.
    #[inline]
    pub fn recv(&mut self, posting: Posting<M>) {
        let tagged = posting.tag.is_some();
        let (tag, ignore) = posting.tag.unwrap_or((0, 0));
        let source = posting.source.map_or(ANY, |peer| peer.0);
        let sender = posting.source.map(|peer| &self.channels[peer.0 as usize]);
        let failed =
            sender.filter(|channel| !channel.end.has_left).and_then(|channel| channel.end.failed);
        let multi = posting.multi;
        let id = self.receives.insert(Receive::new(posting));
        let want = MatchCriteria { tag, ignore, source, id };
        while let Some(unexpected) = self.unexpected_queue.of(tagged).take(&want) {
            let matched_receive = if multi { self.split_multi(id) } else { id };
            self.match_unexpected(unexpected, matched_receive);
            if !multi || !self.has_room(id) {
                return;
            }
        }
        match failed {
            Some(errno) => self.finish_receive(id, Some(Failure::Errno(errno))),
            _ => self.posted_queue.of(tagged).push(want),
        }
    }

    /// Whether [`Self::peek`] would find a message.
    pub fn would_match(&self, peek: &Peek) -> bool {
        self.unexpected_queue.tagged.find(&peek.criteria()).is_some()
    }

    /// Completes a peek with "no message", whatever has arrived.
    pub fn complete_empty_peek(&mut self, peek: &Peek) {
        let none = OperationCompletion::new(
            CompletionKind::TaggedRecv,
            Ticket { context: peek.context, notify: true },
        );
        self.actions.push_back(Action::Complete(none.failed(Failure::NoMessage)));
    }

    /// Looks for a tagged message without receiving it. Every peek is answered by one
    /// [`OperationCompletion`].
    pub fn peek(&mut self, peek: Peek) {
        let ticket = Ticket { context: peek.context, notify: true };
        let Some(id) = self.unexpected_queue.tagged.find(&peek.criteria()) else {
            return self.complete_empty_peek(&peek);
        };
        // `find` returns only numbers of messages that are in the slab.
        let unexpected = self.unexpected_messages.at(id).expect("a queued message");
        let done =
            unexpected.describe(OperationCompletion::new(CompletionKind::TaggedRecv, ticket));
        if peek.claim || peek.discard {
            self.unexpected_queue.tagged.remove(id);
        }
        if peek.claim {
            self.claimed.insert(peek.context, Ok(id));
        } else if peek.discard {
            self.discard(id);
        }
        self.actions.push_back(Action::Complete(done));
    }

    /// Receives the message that a peek claimed for `posting.ticket.context`. Returns false if
    /// there is none.
    pub fn claim(&mut self, posting: Posting<M>) -> bool {
        let Some(claimed) = self.claimed.remove(&posting.ticket.context) else {
            return false;
        };
        let id = self.receives.insert(Receive::new(posting));
        match claimed {
            Ok(unexpected) => self.match_unexpected(unexpected, id),
            Err(failure) => self.finish_receive(id, Some(failure)),
        }
        true
    }

    /// Drops the message that a peek claimed for `ticket.context`. Returns false if there is none.
    pub fn claim_discard(&mut self, ticket: Ticket) -> bool {
        let Some(claimed) = self.claimed.remove(&ticket.context) else {
            return false;
        };
        let done = OperationCompletion::new(CompletionKind::TaggedRecv, ticket);
        let (done, id) = match claimed {
            Ok(id) => (
                self.unexpected_messages
                    .at(id)
                    .map_or(done, |unexpected| unexpected.describe(done)),
                Some(id),
            ),
            Err(failure) => (done.failed(failure), None),
        };
        self.actions.push_back(Action::Complete(OperationCompletion { length: 0, ..done }));
        if let Some(id) = id {
            self.discard(id);
        }
        true
    }

    /// Cancels the oldest waiting receive of `context`. Returns false if no receive of `context`
    /// waits.
    pub fn cancel(&mut self, context: usize) -> bool {
        let Self { posted_queue, receives, .. } = self;
        let is_it = |id: u32| receives.at(id).is_some_and(|r| r.ticket.context == context);
        let lists = [&mut posted_queue.tagged, &mut posted_queue.untagged];
        let found = lists.into_iter().find_map(|list| {
            let id = list.iter().map(|want| want.id).find(|&id| is_it(id))?;
            list.remove(id).then_some(id)
        });
        let Some(id) = found else {
            return false;
        };
        self.finish_receive(id, Some(Failure::Cancelled));
        true
    }

    /// The oldest action that the driver has not yet performed.
    #[inline]
    pub fn poll_action(&mut self) -> Option<Action<M>> {
        self.actions.pop_front()
    }

    /// Declares `peer` unreachable: every operation that waits for the peer fails with `errno`.
    pub fn fail(&mut self, peer: Peer, errno: i32) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.end.failed.is_some() {
            return;
        }
        channel.fail(errno);
        let ops: Vec<u32> = self.ops.ids().filter(|&id| self.op_is_for(id, peer)).collect();
        for id in ops {
            if let Some(op) = self.ops.remove(id) {
                self.end_unreachable(op, errno);
            }
        }
        self.fail_receives(peer, Some(Failure::Errno(errno)));
    }

    /// Ends an operation that cannot reach its peer. A message to a peer that has sent Goodbye
    /// counts as sent: a moment earlier, the peer would have delivered the message and dropped it.
    fn end_unreachable(&mut self, op: Op<M>, errno: i32) {
        let is_message = matches!(op.kind, OpKind::Message { .. });
        let is_forgotten = is_message && self.channels[op.peer.0 as usize].end.has_left;
        self.finish_op(op, (!is_forgotten).then_some(Failure::Errno(errno)));
    }

    fn op_is_for(&self, id: u32, peer: Peer) -> bool {
        self.ops.at(id).is_some_and(|op| op.peer == peer)
    }

    /// The errno with which `peer` failed, if it failed.
    pub fn failed(&self, peer: Peer) -> Option<i32> {
        self.channels[peer.0 as usize].end.failed
    }

    fn finish_op(&mut self, op: Op<M>, failure: Option<Failure>) {
        let done = OperationCompletion {
            error: failure,
            ..OperationCompletion::new(op.kind.completion_kind(), op.ticket)
        };
        self.actions.push_back(Action::Complete(done));
    }

    /// Whether operations wait for `peer`. A receive that only a peer that has left could satisfy
    /// waits for nobody.
    pub fn has_work_for(&self, peer: Peer) -> bool {
        let has_left = self.channels[peer.0 as usize].end.has_left;
        let waits = |r: &Receive<M>| r.is_from(peer) && (r.is_taken() || !has_left);
        self.ops.ids().any(|id| self.op_is_for(id, peer))
            || self.receives.ids().any(|id| self.receives.at(id).is_some_and(waits))
    }

    /// Whether the endpoint holds no operation, no receive and no unexpected message.
    pub fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.receives.is_empty() && self.unexpected_messages.is_empty()
    }

    /// Whether paths have taken everything. The parts of a message that wait for a grant count too,
    /// unless the receiver has left and will never send the grant.
    pub fn is_flushed(&self) -> bool {
        let rests = |op: &Op<M>| {
            let is_message = matches!(op.kind, OpKind::Message { .. });
            is_message && op.sent < op.total && !self.channels[op.peer.0 as usize].end.has_left
        };
        self.channels.iter().all(Channel::is_flushed)
            && !self.ops.ids().filter_map(|id| self.ops.at(id)).any(rests)
    }

    /// Whether paths have taken everything and whatever silent loss could affect has arrived.
    /// Nobody retransmits after this endpoint has closed. Goodbye frames ([`Self::goodbye`]) do not
    /// count.
    pub fn is_safe(&self) -> bool {
        self.is_flushed() && self.channels.iter().all(Channel::is_safe)
    }

    /// Whether [`Self::is_safe`] holds and the Goodbye frames have arrived at every peer that waits
    /// for one.
    pub fn is_goodbye_acknowledged(&self) -> bool {
        self.is_flushed() && self.channels.iter().all(Channel::is_goodbye_acknowledged)
    }

    /// Whether every peer that still lives has delivered every byte sent to it.
    pub fn is_drained(&self) -> bool {
        self.channels.iter().all(|channel| channel.is_drained())
    }
}

impl OperationCompletion {
    fn new(kind: CompletionKind, ticket: Ticket) -> Self {
        Self {
            kind,
            ticket,
            length: 0,
            buffer_address: 0,
            tag: 0,
            data: None,
            source: None,
            released: false,
            error: None,
        }
    }

    fn failed(self, failure: Failure) -> Self {
        Self { error: Some(failure), ..self }
    }
}
