//! The receives of the application: posted, matched with a message, complete.
//!
//! What enters: postings, the starts of messages, and the payload that arrives for a receive. What
//! leaves: grants to senders, pulls from the memory of senders, completions.
//!
//! What may never happen: a receive completes before all its bytes are in place; a sender is
//! granted bytes that do not fit; the memory of a multi-receive is released while a part of it is
//! in use.

use alloc::vec::Vec;

use super::action_queue::ActionQueue;
use super::arrivals::EagerDestination;
use super::channel::Channel;
use super::channel_mut::ChannelMut;
use super::driver_interface::{
    Action, CompletionKind, Failure, Fault, Memory, OperationCompletion, PayloadDestination, Peer,
    Posting, Ticket,
};
use super::operation::Item;
use crate::matching::{ANY, MatchCriteria, PostedQueue};
use crate::slab::Slab;
use crate::wire::frame::{Kind, flag};
use crate::wire::kind_header::{KindHeader, Long};

/// The receives of one endpoint.
pub(super) struct ReceiveTable<M> {
    receives: Slab<Receive<M>>,
    posted_queue: ByClass<PostedQueue>,
    /// The bytes below which the remaining memory of a multi-receive is released.
    pub min_multi_recv: u64,
}

/// One value for tagged and one for untagged messages, which never match each other.
#[derive(Default)]
pub(super) struct ByClass<T> {
    pub tagged: T,
    pub untagged: T,
}

impl<T> ByClass<T> {
    #[inline]
    pub fn of(&mut self, tagged: bool) -> &mut T {
        if tagged { &mut self.tagged } else { &mut self.untagged }
    }
}

/// A receive, posted or matched.
struct Receive<M> {
    ticket: Ticket,
    memory: M,
    /// The offset in `memory` of a part of a multi-receive; otherwise 0.
    base: u64,
    capacity: u64,
    tagged: bool,
    /// The multi-receive of which this receive is a part.
    parent: Option<u32>,
    /// The state of a multi-receive, if this is one.
    multi: Option<MultiReceive>,
    posted_source: Option<Peer>,
    from: Option<MatchedMessage>,
}

/// What a multi-receive has given to its parts.
struct MultiReceive {
    used: u64,
    parts: u32,
    closed: bool,
}

/// The message that a receive has matched.
struct MatchedMessage {
    peer: Peer,
    tag: u64,
    data: Option<u64>,
    /// The bytes that are to arrive: all of the message, or as many as fit.
    expected: u64,
    /// The bytes that do not fit.
    excess: u64,
    got: u64,
    granted: u64,
    /// The sender's operation number, while the sender has more to send.
    send: Option<u32>,
    /// The end of the bytes that arrive without a grant.
    ahead: u64,
}

/// The contents of a message's first frame.
#[derive(Clone, Copy)]
pub(super) struct MessageStart {
    pub peer: Peer,
    pub tagged: bool,
    pub tag: u64,
    pub data: Option<u64>,
    pub long: Option<Long>,
    pub total: u64,
    /// The bytes that arrive without a grant: in the first frame, or announced by it.
    pub eager_bytes: u64,
}

impl MessageStart {
    /// The start of a message with the envelope `(peer, tagged, tag)`, whose first frame carries
    /// `payload` bytes.
    #[inline]
    pub fn new(
        (peer, tagged, tag): (Peer, bool, u64),
        data: Option<u64>,
        long: Option<Long>,
        payload: u64,
    ) -> Self {
        let total = long.map_or(payload, |long| long.total);
        let eager_bytes = payload + long.map_or(0, |long| long.ahead as u64);
        Self { peer, tagged, tag, data, long, total, eager_bytes }
    }
}

impl<M: Memory> Receive<M> {
    fn new(posting: Posting<M>) -> Self {
        let multi = posting.multi.then_some(MultiReceive { used: 0, parts: 0, closed: false });
        Self {
            ticket: posting.ticket,
            capacity: posting.memory.size(),
            memory: posting.memory,
            base: 0,
            tagged: posting.tag.is_some(),
            parent: None,
            multi,
            posted_source: posting.source,
            from: None,
        }
    }

    fn is_from(&self, peer: Peer) -> bool {
        self.from.as_ref().is_some_and(|from| from.peer == peer) || self.posted_source == Some(peer)
    }

    /// Whether the receive has matched a message.
    fn is_taken(&self) -> bool {
        self.from.is_some()
    }

    fn completion_kind(&self) -> CompletionKind {
        if self.tagged { CompletionKind::TaggedRecv } else { CompletionKind::Recv }
    }
}

impl<M: Memory> ReceiveTable<M> {
    pub fn new(min_multi_recv: u64) -> Self {
        Self { receives: Slab::default(), posted_queue: ByClass::default(), min_multi_recv }
    }

    pub fn is_empty(&self) -> bool {
        self.receives.is_empty()
    }

    /// Adds a receive, which no message finds before [`Self::post`]. Returns its number.
    #[inline]
    pub fn insert(&mut self, posting: Posting<M>) -> u32 {
        self.receives.insert(Receive::new(posting))
    }

    /// Lets the messages that arrive from now on find a receive.
    #[inline]
    pub fn post(&mut self, tagged: bool, criteria: MatchCriteria) {
        self.posted_queue.of(tagged).push(criteria);
    }

    /// Cancels the oldest waiting receive of `context`. Returns false if no receive of `context`
    /// waits.
    pub fn cancel(&mut self, actions: &mut ActionQueue<M>, context: usize) -> bool {
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
        self.finish(actions, id, Some(Failure::Cancelled));
        true
    }

    /// The senders of which posted receives accept messages, once for each receive that accepts
    /// only one sender.
    pub fn awaited_sources(&self) -> impl Iterator<Item = Peer> {
        let wanted = self.posted_queue.tagged.iter().chain(self.posted_queue.untagged.iter());
        wanted.map(|want| want.source).filter(|source| *source != ANY).map(Peer)
    }

    /// Whether receives wait for `peer`. A receive that only a peer that has left could satisfy
    /// waits for nobody.
    pub fn has_work_for(&self, peer: Peer, has_left: bool) -> bool {
        let waits = |r: &Receive<M>| r.is_from(peer) && (r.is_taken() || !has_left);
        self.receives.ids().any(|id| self.receives.at(id).is_some_and(waits))
    }

    /// The memory of receive `recv`, and the offset there of the message's byte `at`.
    #[inline]
    pub fn memory(&self, recv: u32, at: u64) -> Option<(&M, u64)> {
        let receive = self.receives.at(recv)?;
        Some((&receive.memory, receive.base + at))
    }

    /// The peer whose message receive `recv` has matched.
    pub fn sender(&self, recv: u32) -> Option<Peer> {
        self.receives.at(recv)?.from.as_ref().map(|from| from.peer)
    }

    /// Gives a message that begins to the posted receive that accepts it, if there is one. Returns
    /// the number of the receive and the bytes that fit.
    #[inline]
    pub fn match_posted(&mut self, start: MessageStart) -> Option<(u32, u64)> {
        let MessageStart { peer, tagged, tag, .. } = start;
        let posted_queue = self.posted_queue.of(tagged);
        let found = posted_queue.find(tag, peer.0)?;
        let posted = posted_queue.id(found);
        let recv = if self.receives.at(posted).is_some_and(|receive| receive.multi.is_some()) {
            let part = self.split_multi(posted);
            self.bind(part, start);
            if !self.has_room(posted) {
                self.posted_queue.of(tagged).take(found);
            }
            part
        } else {
            posted_queue.take(found);
            self.bind(posted, start);
            posted
        };
        let expected =
            self.receives.at(recv).and_then(|r| r.from.as_ref()).map_or(0, |f| f.expected);
        Some((recv, expected))
    }

    /// Makes receive `id` the receiver of a message.
    #[inline]
    pub fn bind(&mut self, id: u32, start: MessageStart) {
        let MessageStart { peer, tag, data, long, total, eager_bytes: ahead, .. } = start;
        let Some(receive) = self.receives.at_mut(id) else {
            return;
        };
        let expected = total.min(receive.capacity);
        receive.capacity = expected;
        let send = long.map(|long| long.send);
        let excess = total - expected;
        let from =
            MatchedMessage { peer, tag, data, expected, excess, got: 0, granted: 0, send, ahead };
        receive.from = Some(from);
        if let Some(parent) = receive.parent {
            self.use_multi(parent, expected);
        }
    }

    /// Records that the first piece has arrived, and grants the bytes after the announced pieces.
    pub fn handle_first_piece(&mut self, on: &mut ChannelMut<'_, M>, recv: u32, take: u64) {
        let Some(from) = self.receives.at_mut(recv).and_then(|receive| receive.from.as_mut())
        else {
            return;
        };
        from.got += take;
        if from.expected > from.ahead {
            self.grant(on, recv);
        }
    }

    /// Where the payload of an announced piece belongs.
    pub fn place_ahead(
        &self,
        channel: &Channel<M>,
        send: u32,
        offset: u64,
        payload: u64,
    ) -> Result<PayloadDestination, Fault> {
        let announced = channel.arrivals.announced.get(&send).copied();
        let announced = announced.ok_or(Fault("a piece of no message"))?;
        if payload == 0 || offset != announced.next || payload > announced.end - offset {
            return Err(Fault("a piece that was not announced"));
        }
        Ok(match announced.into {
            EagerDestination::Store(store) => PayloadDestination::Unexpected { store, at: offset },
            EagerDestination::Receive(recv) => {
                let from = self.receives.at(recv).and_then(|receive| receive.from.as_ref());
                let room = from.map_or(0, |from| from.expected.saturating_sub(offset));
                match payload.min(room) {
                    0 => PayloadDestination::Discard,
                    take => PayloadDestination::Receive { recv, at: offset, take },
                }
            }
        })
    }

    /// Records that `take` bytes of an announced piece, which is not the last, are in place.
    pub fn handle_piece(&mut self, recv: u32, take: u64) {
        if let Some(from) = self.receives.at_mut(recv).and_then(|receive| receive.from.as_mut()) {
            from.got += take;
        }
    }

    /// How many of the `stored` bytes of a message fit into receive `recv`.
    pub fn room_for(&self, recv: u32, stored: u64) -> Option<u64> {
        Some(stored.min(self.receives.at(recv)?.capacity))
    }

    /// Ends the bytes that come without a grant: asks for the rest, or completes the receive.
    #[inline]
    pub fn handle_eager_done(
        &mut self,
        on: &mut ChannelMut<'_, M>,
        recv: u32,
        take: u64,
        long: Option<Long>,
    ) {
        let Some(receive) = self.receives.at_mut(recv) else {
            return;
        };
        let Some(from) = receive.from.as_mut() else {
            return;
        };
        from.got += take;
        let (got, left) = (from.got, from.expected - from.got);
        let Some(long) = long.filter(|long| long.total > from.ahead) else {
            return self.finish(on.actions, recv, None);
        };
        let channel = &*on.channel;
        if let (Some(errno), true) = (channel.end.failed, left > 0) {
            self.finish(on.actions, recv, Some(Failure::Errno(errno)));
        } else if left == 0 {
            on.enqueue(Item::Control(Kind::Pulled, 0, KindHeader::Pulled { send: long.send }));
            self.finish(on.actions, recv, None);
        } else if channel.paths.properties.pull && long.memory != 0 {
            let (memory, at) = (receive.memory.clone(), receive.base + got);
            let address = long.memory.wrapping_add(got);
            let peer = on.peer();
            on.actions.push(Action::Pull { peer, recv, address, memory, at, length: left });
        } else if from.granted == 0 {
            self.grant(on, recv);
        }
    }

    /// Grants the sender of `recv`'s message one window beyond what has arrived or was announced.
    fn grant(&mut self, on: &mut ChannelMut<'_, M>, recv: u32) {
        let Some(from) = self.receives.at_mut(recv).and_then(|receive| receive.from.as_mut())
        else {
            return;
        };
        let Some(send) = from.send else {
            return;
        };
        let window = on.channel.paths.properties.window;
        let limit = from.expected.min(from.got.max(from.ahead).saturating_add(window));
        from.granted = limit;
        let is_cut = from.excess > 0 && limit == from.expected;
        let flags = if is_cut { flag::TRUNCATED } else { 0 };
        let head = KindHeader::Grant { send, recv, limit };
        on.enqueue(Item::Control(Kind::Grant, flags, head));
    }

    /// Where the payload of a granted piece belongs.
    pub fn place_data(
        &self,
        peer: Peer,
        recv: u32,
        offset: u64,
        payload: u64,
    ) -> Result<PayloadDestination, Fault> {
        let from = self.receives.at(recv).and_then(|receive| receive.from.as_ref());
        let from = from.filter(|from| from.peer == peer).ok_or(Fault("data for no receive"))?;
        let end = offset.checked_add(payload).ok_or(Fault("data beyond all bounds"))?;
        let was_asked = offset >= from.ahead && end <= from.granted;
        if payload == 0 || offset != from.got || !was_asked {
            return Err(Fault("data that was not granted"));
        }
        Ok(PayloadDestination::Receive { recv, at: offset, take: payload })
    }

    /// Records that a granted piece is in place: grants more, or completes the receive.
    pub fn end_data(&mut self, on: &mut ChannelMut<'_, M>, recv: u32, place: PayloadDestination) {
        let PayloadDestination::Receive { take, .. } = place else {
            return;
        };
        let Some(from) = self.receives.at_mut(recv).and_then(|receive| receive.from.as_mut())
        else {
            return;
        };
        from.got += take;
        let window = on.channel.paths.properties.window;
        if from.got == from.expected {
            self.finish(on.actions, recv, None);
        } else if from.granted < from.expected && from.granted - from.got <= window / 2 {
            self.grant(on, recv);
        }
    }

    /// Records that the bytes of an [`Action::Pull`] are in place (`Ok`), or grants them (`Err`).
    pub fn handle_pulled(&mut self, on: &mut ChannelMut<'_, M>, recv: u32, pulled: Result<(), ()>) {
        let Some(receive) = self.receives.at_mut(recv) else {
            return;
        };
        let Some(from) = receive.from.as_mut() else {
            return;
        };
        let Some(send) = from.send.take() else {
            return;
        };
        if pulled.is_ok() {
            from.got = from.expected;
            on.enqueue(Item::Control(Kind::Pulled, 0, KindHeader::Pulled { send }));
            self.finish(on.actions, recv, None);
        } else {
            from.send = Some(send);
            self.grant(on, recv);
        }
    }

    /// Creates a receive for the next message of multi-receive `id`.
    pub fn split_multi(&mut self, id: u32) -> u32 {
        let Some(Receive { ticket, memory, capacity, multi: Some(multi), posted_source, .. }) =
            self.receives.at(id)
        else {
            unreachable!("only multi-receives are split")
        };
        let part = Receive {
            ticket: *ticket,
            memory: memory.clone(),
            base: multi.used,
            capacity: capacity - multi.used,
            tagged: false,
            parent: Some(id),
            multi: None,
            posted_source: *posted_source,
            from: None,
        };
        self.receives.insert(part)
    }

    fn use_multi(&mut self, id: u32, bytes: u64) {
        let least = self.min_multi_recv.max(1);
        let Some(Receive { capacity, multi: Some(multi), .. }) = self.receives.at_mut(id) else {
            return;
        };
        multi.used += bytes;
        multi.parts += 1;
        multi.closed |= *capacity - multi.used < least;
    }

    /// Whether multi-receive `id` accepts more messages.
    pub fn has_room(&self, id: u32) -> bool {
        let multi = self.receives.at(id).and_then(|receive| receive.multi.as_ref());
        multi.is_some_and(|multi| !multi.closed)
    }

    /// Ends a receive and reports its completion.
    #[inline]
    pub fn finish(&mut self, actions: &mut ActionQueue<M>, id: u32, failure: Option<Failure>) {
        if let Some(MultiReceive { parts, closed, .. }) =
            self.receives.at_mut(id).and_then(|receive| receive.multi.as_mut())
            && *parts > 0
        {
            // The last part of the multi-receive releases the memory.
            *closed = true;
            return;
        }
        let Some(receive) = self.receives.at(id) else {
            return;
        };
        let mut done = OperationCompletion::new(receive.completion_kind(), receive.ticket);
        done.buffer_address = receive.memory.address().wrapping_add(receive.base);
        done.error = failure;
        done.released = receive.multi.is_some();
        if let Some(from) = &receive.from {
            done.length = from.got;
            done.tag = from.tag;
            done.data = from.data;
            done.source = Some(from.peer);
            if done.error.is_none() && from.excess > 0 {
                done.error = Some(Failure::Truncated(from.excess));
            }
        }
        let parent = receive.parent;
        self.receives.discard(id);
        if let Some(parent) = parent {
            done.released = self.end_part(parent);
        }
        actions.complete(done);
    }

    /// Ends one part of multi-receive `id`. Returns true if the caller owns the memory again.
    fn end_part(&mut self, id: u32) -> bool {
        let Some(Receive { multi: Some(multi), .. }) = self.receives.at_mut(id) else {
            return false;
        };
        multi.parts -= 1;
        let is_last = multi.closed && multi.parts == 0;
        if is_last {
            self.receives.discard(id);
        }
        is_last
    }

    /// Ends the receives that only `peer` could satisfy. If the peer `has_left`, unmatched receives
    /// of its messages wait on, as those of any silent peer: the application may mean to cancel
    /// them.
    pub fn fail(
        &mut self,
        actions: &mut ActionQueue<M>,
        (peer, has_left): (Peer, bool),
        failure: Failure,
    ) {
        let mut hit: Vec<u32> = self
            .receives
            .ids()
            .filter(|&id| self.receives.at(id).is_some_and(|r| r.is_from(peer)))
            .filter(|&id| !has_left || self.receives.at(id).is_some_and(Receive::is_taken))
            .collect();
        // The multi-receives come first, so that their last part releases the memory.
        hit.sort_by_key(|&id| self.receives.at(id).is_some_and(|r| r.multi.is_none()));
        for id in hit {
            self.posted_queue.tagged.remove(id);
            self.posted_queue.untagged.remove(id);
            self.finish(actions, id, Some(failure));
        }
    }
}
