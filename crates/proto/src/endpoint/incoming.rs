//! Messages that arrive at this endpoint: first piece, announced pieces (an
//! [`AnnouncedPieces`](super::arrivals::AnnouncedPieces)), then granted pieces or one pull. A
//! message without a receive waits as an [`UnexpectedMessage`].
//!
//! What enters: pieces of messages, postings and peeks. What leaves: where payload belongs, and
//! stored messages that the driver must copy or drop.
//!
//! What may never happen: messages of one sender match receives in another order than that in which
//! they were sent; unexpected payload exceeds the granted credit.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::action_queue::ActionQueue;
use super::arrivals::{AnnouncedPieces, EagerDestination};
use super::channel::Channel;
use super::channel_mut::ChannelMut;
use super::channel_table::ChannelTable;
use super::driver_interface::{
    Action, CompletionKind, Failure, Fault, Memory, OperationCompletion, PayloadDestination, Peek,
    Peer, Posting, Ticket,
};
use super::operation::Item;
use super::receive_table::{ByClass, MessageStart, ReceiveTable};
use crate::matching::{ANY, Envelope, MatchCriteria, UnexpectedQueue};
use crate::slab::Slab;
use crate::wire::frame::Kind;
use crate::wire::kind_header::{KindHeader, Long};

/// The most messages that may wait for a receive, over all peers. Empty messages need no credit, so
/// without a bound a peer could take all memory. 2^20 headers are 100 MB, more than sane use.
const UNEXPECTED_MESSAGES_MAX: usize = 1 << 20;

/// The messages that arrive, the messages that wait for a receive, and the receives.
pub(super) struct IncomingMessages<M> {
    pub receives: ReceiveTable<M>,
    unexpected_messages: Slab<UnexpectedMessage>,
    unexpected_queue: ByClass<UnexpectedQueue>,
    /// The messages that a peek claimed, by context, or the reason why such a message never
    /// completes.
    claimed: BTreeMap<usize, Result<u32, Failure>>,
}

/// A message that arrived before its receive was posted.
struct UnexpectedMessage {
    peer: Peer,
    tag: u64,
    data: Option<u64>,
    tagged: bool,
    total: u64,
    /// The number of bytes that the store holds once it is filled.
    stored: u64,
    /// All bytes of the store have arrived.
    is_filled: bool,
    long: Option<Long>,
    /// The receive that matched the message before the store was filled.
    matched_receive: Option<u32>,
    /// The message is not wanted: it is dropped when the store is filled.
    is_dropped: bool,
}

impl UnexpectedMessage {
    /// Adds the sender, the size, the tag and the data of the message to `done`.
    fn describe(&self, done: OperationCompletion) -> OperationCompletion {
        OperationCompletion {
            length: self.total,
            tag: self.tag,
            data: self.data,
            source: Some(self.peer),
            ..done
        }
    }
}

impl<M: Memory> IncomingMessages<M> {
    pub fn new(min_multi_recv: u64) -> Self {
        Self {
            receives: ReceiveTable::new(min_multi_recv),
            unexpected_messages: Slab::default(),
            unexpected_queue: ByClass::default(),
            claimed: BTreeMap::new(),
        }
    }

    /// Whether no receive and no unexpected message is held.
    pub fn is_empty(&self) -> bool {
        self.receives.is_empty() && self.unexpected_messages.is_empty()
    }

    /// Where the first piece of a message belongs: in the receive that it matches, or in the store.
    #[inline]
    pub fn place_message(
        &mut self,
        channel: &mut Channel<M>,
        start: MessageStart,
        payload: u64,
    ) -> Result<PayloadDestination, Fault> {
        let MessageStart { long, total, eager_bytes, .. } = start;
        if total < eager_bytes {
            return Err(Fault("a message is shorter than its first piece"));
        }
        if !channel.granted_credit.take(eager_bytes) {
            return Err(Fault("eager bytes without credit"));
        }
        let long_ahead = long.filter(|long| long.ahead > 0);
        let announced = &channel.arrivals.announced;
        if long_ahead.is_some_and(|long| announced.contains_key(&long.send)) {
            return Err(Fault("two messages under one number"));
        }
        let place = self.match_message(start, payload)?;
        if let Some(long) = long_ahead {
            let pieces = AnnouncedPieces::new(payload, eager_bytes, long, place);
            channel.arrivals.announced.insert(long.send, pieces);
        }
        Ok(place)
    }

    /// Matches a message that begins with a posted receive, or lets the message wait.
    #[inline]
    fn match_message(
        &mut self,
        start: MessageStart,
        payload: u64,
    ) -> Result<PayloadDestination, Fault> {
        if let Some((recv, expected)) = self.receives.match_posted(start) {
            return Ok(PayloadDestination::Receive { recv, at: 0, take: payload.min(expected) });
        }
        let MessageStart { peer, tagged, tag, data, long, total, eager_bytes } = start;
        if self.unexpected_messages.len() >= UNEXPECTED_MESSAGES_MAX {
            return Err(Fault("too many messages wait for a receive"));
        }
        let unexpected = UnexpectedMessage {
            peer,
            tag,
            data,
            tagged,
            total,
            stored: eager_bytes,
            is_filled: false,
            long,
            matched_receive: None,
            is_dropped: false,
        };
        let store = self.unexpected_messages.insert(unexpected);
        let envelope = Envelope { tag, source: peer.0, id: store };
        self.unexpected_queue.of(tagged).push(envelope);
        Ok(PayloadDestination::NewUnexpected { store, size: eager_bytes })
    }

    /// Records that the payload of a first piece is in place.
    #[inline]
    pub fn end_message(
        &mut self,
        on: &mut ChannelMut<'_, M>,
        place: PayloadDestination,
        payload: u64,
        long: Option<Long>,
    ) {
        match place {
            PayloadDestination::Receive { recv, take, .. } => {
                on.channel.granted_credit.release(payload as u32);
                match long.filter(|long| long.ahead > 0) {
                    None => self.receives.handle_eager_done(on, recv, take, long),
                    Some(_) => self.receives.handle_first_piece(on, recv, take),
                }
            }
            PayloadDestination::NewUnexpected { store, .. }
                if long.is_none_or(|long| long.ahead == 0) =>
            {
                self.end_store(on, store);
            }
            _ => (),
        }
    }

    /// Records that the payload of an announced piece is in place.
    pub fn end_ahead(
        &mut self,
        on: &mut ChannelMut<'_, M>,
        send: u32,
        place: PayloadDestination,
        payload: u64,
    ) {
        let channel = &mut *on.channel;
        let Some(announced) = channel.arrivals.announced.get_mut(&send) else {
            return;
        };
        announced.next += payload;
        let announced = *announced;
        let is_last = announced.next == announced.end;
        if is_last {
            channel.arrivals.announced.remove(&send);
        }
        match announced.into {
            EagerDestination::Receive(recv) => {
                channel.granted_credit.release(payload as u32);
                let take =
                    if let PayloadDestination::Receive { take, .. } = place { take } else { 0 };
                if is_last {
                    self.receives.handle_eager_done(on, recv, take, Some(announced.long));
                } else {
                    self.receives.handle_piece(recv, take);
                }
            }
            EagerDestination::Store(store) if is_last => self.end_store(on, store),
            EagerDestination::Store(_) => (),
        }
    }

    fn finish_unexpected(&mut self, on: &mut ChannelMut<'_, M>, id: u32, recv: u32) {
        let Some(unexpected) = self.unexpected_messages.remove(id) else {
            return;
        };
        on.return_credit(unexpected.stored);
        let Some(take) = self.receives.room_for(recv, unexpected.stored) else {
            return;
        };
        let memory = self.receives.memory(recv, 0).filter(|_| unexpected.stored > 0);
        if let Some((memory, at)) = memory {
            let memory = memory.clone();
            on.actions.push(Action::CopyUnexpected { store: id, memory, at, length: take });
        }
        self.receives.handle_eager_done(on, recv, take, unexpected.long);
    }

    fn end_store(&mut self, on: &mut ChannelMut<'_, M>, id: u32) {
        let Some(unexpected) = self.unexpected_messages.at_mut(id) else {
            return;
        };
        unexpected.is_filled = true;
        if unexpected.is_dropped {
            self.discard(on, id);
        } else if let Some(recv) = unexpected.matched_receive {
            self.finish_unexpected(on, id, recv);
        }
    }

    /// Drops message `id` of the peer of `on`, now or when its store is filled.
    fn discard(&mut self, on: &mut ChannelMut<'_, M>, id: u32) {
        let Some(unexpected) = self.unexpected_messages.at_mut(id) else {
            return;
        };
        unexpected.is_dropped = true;
        if !unexpected.is_filled {
            return;
        }
        let (stored, long) = (unexpected.stored, unexpected.long);
        self.unexpected_messages.remove(id);
        on.return_credit(stored);
        if stored > 0 {
            on.actions.push(Action::DropUnexpected { store: id });
        }
        let waiting = long.filter(|long| long.total > stored);
        if let (Some(long), None) = (waiting, on.channel.end.failed) {
            on.enqueue(Item::Control(Kind::Pulled, 0, KindHeader::Pulled { send: long.send }));
        }
    }

    /// Ends what can no longer arrive from the peer of `on`.
    pub fn fail(&mut self, on: &mut ChannelMut<'_, M>, failure: Failure) {
        let (peer, has_left) = (on.peer(), on.channel.end.has_left);
        let cut: Vec<u32> = self
            .unexpected_messages
            .ids()
            .filter(|&id| {
                self.unexpected_messages.at(id).is_some_and(|a| a.peer == peer && !a.is_filled)
            })
            .collect();
        for id in cut {
            self.forget_unfilled(on.actions, id, failure);
        }
        self.receives.fail(on.actions, (peer, has_left), failure);
    }

    fn forget_unfilled(&mut self, actions: &mut ActionQueue<M>, id: u32, failure: Failure) {
        let Some(unexpected) = self.unexpected_messages.remove(id) else {
            return;
        };
        self.unexpected_queue.of(unexpected.tagged).remove(id);
        let claims = self.claimed.values_mut().filter(|claim| **claim == Ok(id));
        claims.for_each(|claim| *claim = Err(failure));
        if unexpected.stored > 0 {
            actions.push(Action::DropUnexpected { store: id });
        }
    }
}

/// The messages of one endpoint, borrowed with the channels to their senders: see
/// [`Endpoint::messages_mut`](super::Endpoint::messages_mut).
pub struct MessagesMut<'a, M> {
    pub(super) messages: &'a mut IncomingMessages<M>,
    pub(super) channels: &'a mut ChannelTable<M>,
    pub(super) actions: &'a mut ActionQueue<M>,
}

impl<M: Memory> MessagesMut<'_, M> {
    /// Matches a receive with the oldest message that it accepts, or queues the receive.
    #[inline]
    pub fn recv(&mut self, posting: Posting<M>) {
        let tagged = posting.tag.is_some();
        let (tag, ignore) = posting.tag.unwrap_or((0, 0));
        let source = posting.source.map_or(ANY, |peer| peer.0);
        let sender = posting.source.map(|peer| &self.channels[peer]);
        let failed =
            sender.filter(|channel| !channel.end.has_left).and_then(|channel| channel.end.failed);
        let multi = posting.multi;
        let id = self.messages.receives.insert(posting);
        let want = MatchCriteria { tag, ignore, source, id };
        while let Some(unexpected) = self.messages.unexpected_queue.of(tagged).take(&want) {
            let matched_receive = if multi { self.messages.receives.split_multi(id) } else { id };
            self.match_unexpected(unexpected, matched_receive);
            if !multi || !self.messages.receives.has_room(id) {
                return;
            }
        }
        match failed {
            Some(errno) => {
                self.messages.receives.finish(self.actions, id, Some(Failure::Errno(errno)))
            }
            _ => self.messages.receives.post(tagged, want),
        }
    }

    /// Whether [`Self::peek`] would find a message.
    pub fn would_match(&self, peek: &Peek) -> bool {
        self.messages.unexpected_queue.tagged.find(&peek.criteria()).is_some()
    }

    /// Whether a peek has claimed a message for `context`, and no claim has received the message.
    pub fn is_claimed(&self, context: usize) -> bool {
        self.messages.claimed.contains_key(&context)
    }

    /// Completes a peek with "no message", whatever has arrived.
    pub fn complete_empty_peek(&mut self, peek: &Peek) {
        self.actions.complete(peek.found_nothing());
    }

    /// Looks for a tagged message without receiving it. Every peek is answered by one
    /// [`OperationCompletion`].
    pub fn peek(&mut self, peek: Peek) {
        let ticket = Ticket { context: peek.context, notify: true };
        let Some(id) = self.messages.unexpected_queue.tagged.find(&peek.criteria()) else {
            return self.complete_empty_peek(&peek);
        };
        // `find` returns only numbers of messages that are in the slab.
        let unexpected = self.messages.unexpected_messages.at(id).expect("a queued message");
        let done =
            unexpected.describe(OperationCompletion::new(CompletionKind::TaggedRecv, ticket));
        if peek.claim || peek.discard {
            self.messages.unexpected_queue.tagged.remove(id);
        }
        if peek.claim {
            self.messages.claimed.insert(peek.context, Ok(id));
        } else if peek.discard {
            self.drop_message(id);
        }
        self.actions.complete(done);
    }

    /// Receives the message that a peek claimed for `posting.ticket.context`. Returns false if
    /// there is none.
    pub fn claim(&mut self, posting: Posting<M>) -> bool {
        let Some(claimed) = self.messages.claimed.remove(&posting.ticket.context) else {
            return false;
        };
        let id = self.messages.receives.insert(posting);
        match claimed {
            Ok(unexpected) => self.match_unexpected(unexpected, id),
            Err(failure) => self.messages.receives.finish(self.actions, id, Some(failure)),
        }
        true
    }

    /// Drops the message that a peek claimed for `ticket.context`. Returns false if there is none.
    pub fn claim_discard(&mut self, ticket: Ticket) -> bool {
        let Some(claimed) = self.messages.claimed.remove(&ticket.context) else {
            return false;
        };
        let done = OperationCompletion::new(CompletionKind::TaggedRecv, ticket);
        let (done, id) = match claimed {
            Ok(id) => (
                self.messages
                    .unexpected_messages
                    .at(id)
                    .map_or(done, |unexpected| unexpected.describe(done)),
                Some(id),
            ),
            Err(failure) => (done.failed(failure), None),
        };
        self.actions.complete(OperationCompletion { length: 0, ..done });
        if let Some(id) = id {
            self.drop_message(id);
        }
        true
    }

    /// Cancels the oldest waiting receive of `context`. Returns false if no receive of `context`
    /// waits.
    pub fn cancel(&mut self, context: usize) -> bool {
        self.messages.receives.cancel(self.actions, context)
    }

    /// Records that the bytes of an [`Action::Pull`] are in place (`Ok`), or grants them (`Err`).
    pub fn handle_pulled(&mut self, recv: u32, pulled: Result<(), ()>) {
        if let Some(peer) = self.messages.receives.sender(recv) {
            let mut on = self.channels.on(peer, self.actions);
            self.messages.receives.handle_pulled(&mut on, recv, pulled);
        }
    }

    /// Gives the unexpected message `id` to receive `recv`.
    fn match_unexpected(&mut self, id: u32, recv: u32) {
        let Some(&UnexpectedMessage {
            peer,
            tag,
            data,
            tagged,
            total,
            stored,
            is_filled,
            long,
            ..
        }) = self.messages.unexpected_messages.at(id)
        else {
            return;
        };
        self.messages
            .receives
            .bind(recv, MessageStart { peer, tagged, tag, data, long, total, eager_bytes: stored });
        if is_filled {
            self.messages.finish_unexpected(&mut self.channels.on(peer, self.actions), id, recv);
        } else if let Some(unexpected) = self.messages.unexpected_messages.at_mut(id) {
            unexpected.matched_receive = Some(recv);
        }
    }

    /// Drops message `id`, now or when its store is filled.
    fn drop_message(&mut self, id: u32) {
        if let Some(unexpected) = self.messages.unexpected_messages.at(id) {
            self.messages.discard(&mut self.channels.on(unexpected.peer, self.actions), id);
        }
    }
}
