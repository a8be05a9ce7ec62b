//! A message at its receiver: first piece, announced pieces (an [`AnnouncedPieces`]), then granted
//! pieces or one pull, and the completion. Unmatched, it waits as an [`UnexpectedMessage`].

use alloc::vec::Vec;

use super::channel::Item;
use super::{
    Action, CompletionKind, Endpoint, Failure, Fault, Memory, OperationCompletion,
    PayloadDestination, Peer, Posting, Ticket,
};
use crate::matching;
use crate::wire::frame::{Kind, flag};
use crate::wire::kind_header::{KindHeader, Long};

/// The most messages that may wait for a receive, over all peers. Empty messages need no credit, so
/// without a bound a peer could take all memory. 2^20 headers are 100 MB, more than sane use.
const UNEXPECTED_MESSAGES_MAX: usize = 1 << 20;

/// A receive, posted or matched.
pub(super) struct Receive<M> {
    pub ticket: Ticket,
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

/// A message that arrived before its receive was posted.
pub(super) struct UnexpectedMessage {
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

/// The contents of a message's first frame.
#[derive(Clone, Copy)]
struct MessageStart {
    peer: Peer,
    tagged: bool,
    tag: u64,
    data: Option<u64>,
    long: Option<Long>,
    total: u64,
    /// The bytes that arrive without a grant: in the first frame, or announced by it.
    eager_bytes: u64,
}

/// The announced pieces of a message: which have arrived, and which will arrive.
#[derive(Clone, Copy)]
pub(super) struct AnnouncedPieces {
    /// The offset in the message of the next byte.
    next: u64,
    /// The end of the announced bytes.
    end: u64,
    long: Long,
    into: EagerDestination,
}

/// The destination of announced pieces.
#[derive(Clone, Copy)]
enum EagerDestination {
    Receive(u32),
    Store(u32),
}

impl<M: Memory> Receive<M> {
    pub fn new(posting: Posting<M>) -> Self {
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

    pub fn is_from(&self, peer: Peer) -> bool {
        self.from.as_ref().is_some_and(|from| from.peer == peer) || self.posted_source == Some(peer)
    }

    /// Whether the receive has matched a message.
    pub fn is_taken(&self) -> bool {
        self.from.is_some()
    }

    fn completion_kind(&self) -> CompletionKind {
        if self.tagged { CompletionKind::TaggedRecv } else { CompletionKind::Recv }
    }
}

impl AnnouncedPieces {
    /// The announced pieces of a message whose first piece of `payload` bytes went to `place`.
    fn new(payload: u64, end: u64, long: Long, place: PayloadDestination) -> Self {
        let into = match place {
            PayloadDestination::NewUnexpected { store, .. } => EagerDestination::Store(store),
            PayloadDestination::Receive { recv, .. } => EagerDestination::Receive(recv),
            _ => unreachable!("messages go to receives and stores"),
        };
        Self { next: payload, end, long, into }
    }
}

impl UnexpectedMessage {
    /// Adds the sender, the size, the tag and the data of the message to `done`.
    pub fn describe(&self, done: OperationCompletion) -> OperationCompletion {
        OperationCompletion {
            length: self.total,
            tag: self.tag,
            data: self.data,
            source: Some(self.peer),
            ..done
        }
    }
}

impl<M: Memory> Endpoint<M> {
    /// The memory of a payload destination, the offset in it, and the payload bytes that it takes.
    #[inline]
    pub fn place_memory(&self, place: PayloadDestination) -> Option<(&M, u64, u64)> {
        match place {
            PayloadDestination::Receive { recv, at, take } => {
                let receive = self.receives.at(recv)?;
                Some((&receive.memory, receive.base + at, take))
            }
            PayloadDestination::Reply { op, at } => {
                let op = self.ops.at(op)?;
                Some((op.reply_memory(), at, u64::MAX))
            }
            _ => None,
        }
    }

    /// Records that the bytes of an [`Action::Pull`] are in place (`Ok`), or grants them (`Err`).
    pub fn handle_pulled(&mut self, recv: u32, pulled: Result<(), ()>) {
        let Some(receive) = self.receives.at_mut(recv) else {
            return;
        };
        let Some(from) = receive.from.as_mut() else {
            return;
        };
        let (peer, send) = (from.peer, from.send.take());
        let Some(send) = send else {
            return;
        };
        if pulled.is_ok() {
            from.got = from.expected;
            self.enqueue(peer, Item::Control(Kind::Pulled, 0, KindHeader::Pulled { send }));
            self.finish_receive(recv, None);
        } else {
            from.send = Some(send);
            self.grant(recv);
        }
    }

    #[inline]
    pub(super) fn place_message(
        &mut self,
        peer: Peer,
        tagged: bool,
        tag: u64,
        data: Option<u64>,
        long: Option<Long>,
        payload: u64,
    ) -> Result<PayloadDestination, Fault> {
        let total = long.map_or(payload, |long| long.total);
        let eager_bytes = payload + long.map_or(0, |long| long.ahead as u64);
        if total < eager_bytes {
            return Err(Fault("a message is shorter than its first piece"));
        }
        if !self.channels[peer.0 as usize].granted_credit.take(eager_bytes) {
            return Err(Fault("eager bytes without credit"));
        }
        let long_ahead = long.filter(|long| long.ahead > 0);
        let announced = &self.channels[peer.0 as usize].arrivals.announced;
        if long_ahead.is_some_and(|long| announced.contains_key(&long.send)) {
            return Err(Fault("two messages under one number"));
        }
        let start = MessageStart { peer, tagged, tag, data, long, total, eager_bytes };
        let place = self.match_message(start, payload)?;
        if let Some(long) = long_ahead {
            let pieces = AnnouncedPieces::new(payload, eager_bytes, long, place);
            self.channels[peer.0 as usize].arrivals.announced.insert(long.send, pieces);
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
        let MessageStart { peer, tagged, tag, data, long, total, eager_bytes } = start;
        let posted_queue = self.posted_queue.of(tagged);
        let Some(found) = posted_queue.find(tag, peer.0) else {
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
            self.unexpected_queue.of(tagged).push(matching::Envelope {
                tag,
                source: peer.0,
                id: store,
            });
            return Ok(PayloadDestination::NewUnexpected { store, size: eager_bytes });
        };
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
        Ok(PayloadDestination::Receive { recv, at: 0, take: payload.min(expected) })
    }

    /// Makes receive `id` the receiver of a message.
    #[inline]
    fn bind(&mut self, id: u32, start: MessageStart) {
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

    #[inline]
    pub(super) fn end_message(
        &mut self,
        peer: Peer,
        place: PayloadDestination,
        payload: u64,
        long: Option<Long>,
    ) {
        match place {
            PayloadDestination::Receive { recv, take, .. } => {
                self.channels[peer.0 as usize].granted_credit.release(payload as u32);
                match long.filter(|long| long.ahead > 0) {
                    None => self.handle_eager_done(recv, take, long),
                    Some(_) => self.handle_first_piece(recv, take),
                }
            }
            PayloadDestination::NewUnexpected { store, .. }
                if long.is_none_or(|long| long.ahead == 0) =>
            {
                self.end_store(store);
            }
            _ => (),
        }
    }

    /// Records that the first piece has arrived, and grants the bytes after the announced pieces.
    fn handle_first_piece(&mut self, recv: u32, take: u64) {
        let Some(from) = self.receives.at_mut(recv).and_then(|receive| receive.from.as_mut())
        else {
            return;
        };
        from.got += take;
        if from.expected > from.ahead {
            self.grant(recv);
        }
    }

    pub(super) fn place_ahead(
        &mut self,
        peer: Peer,
        send: u32,
        offset: u64,
        payload: u64,
    ) -> Result<PayloadDestination, Fault> {
        let announced = self.channels[peer.0 as usize].arrivals.announced.get(&send).copied();
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

    pub(super) fn end_ahead(
        &mut self,
        peer: Peer,
        send: u32,
        place: PayloadDestination,
        payload: u64,
    ) {
        let channel = &mut self.channels[peer.0 as usize];
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
                    self.handle_eager_done(recv, take, Some(announced.long));
                } else if let Some(from) =
                    self.receives.at_mut(recv).and_then(|receive| receive.from.as_mut())
                {
                    from.got += take;
                }
            }
            EagerDestination::Store(store) if is_last => self.end_store(store),
            EagerDestination::Store(_) => (),
        }
    }

    /// Ends the bytes that come without a grant: asks for the rest, or completes the receive.
    #[inline]
    fn handle_eager_done(&mut self, recv: u32, take: u64, long: Option<Long>) {
        let Some(receive) = self.receives.at_mut(recv) else {
            return;
        };
        let Some(from) = receive.from.as_mut() else {
            return;
        };
        from.got += take;
        let (peer, got, left) = (from.peer, from.got, from.expected - from.got);
        let Some(long) = long.filter(|long| long.total > from.ahead) else {
            return self.finish_receive(recv, None);
        };
        let channel = &self.channels[peer.0 as usize];
        if let (Some(errno), true) = (channel.end.failed, left > 0) {
            self.finish_receive(recv, Some(Failure::Errno(errno)));
        } else if left == 0 {
            self.enqueue(
                peer,
                Item::Control(Kind::Pulled, 0, KindHeader::Pulled { send: long.send }),
            );
            self.finish_receive(recv, None);
        } else if channel.paths.properties.pull && long.memory != 0 {
            let (memory, at) = (receive.memory.clone(), receive.base + got);
            let address = long.memory.wrapping_add(got);
            self.push_action(Action::Pull { peer, recv, address, memory, at, length: left });
        } else if from.granted == 0 {
            self.grant(recv);
        }
    }

    /// Grants the sender of `recv`'s message one window beyond what has arrived or was announced.
    fn grant(&mut self, recv: u32) {
        let Some(from) = self.receives.at_mut(recv).and_then(|receive| receive.from.as_mut())
        else {
            return;
        };
        let (peer, Some(send)) = (from.peer, from.send) else {
            return;
        };
        let window = self.channels[peer.0 as usize].paths.properties.window;
        let limit = from.expected.min(from.got.max(from.ahead).saturating_add(window));
        from.granted = limit;
        let is_cut = from.excess > 0 && limit == from.expected;
        let flags = if is_cut { flag::TRUNCATED } else { 0 };
        self.enqueue(
            peer,
            Item::Control(Kind::Grant, flags, KindHeader::Grant { send, recv, limit }),
        );
    }

    pub(super) fn place_data(
        &mut self,
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

    pub(super) fn end_data(&mut self, recv: u32, place: PayloadDestination) {
        let PayloadDestination::Receive { take, .. } = place else {
            return;
        };
        let Some(from) = self.receives.at_mut(recv).and_then(|receive| receive.from.as_mut())
        else {
            return;
        };
        from.got += take;
        let window = self.channels[from.peer.0 as usize].paths.properties.window;
        if from.got == from.expected {
            self.finish_receive(recv, None);
        } else if from.granted < from.expected && from.granted - from.got <= window / 2 {
            self.grant(recv);
        }
    }

    /// Gives the unexpected message `id` to receive `recv`.
    pub(super) fn match_unexpected(&mut self, id: u32, recv: u32) {
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
        }) = self.unexpected_messages.at(id)
        else {
            return;
        };
        self.bind(recv, MessageStart { peer, tagged, tag, data, long, total, eager_bytes: stored });
        if is_filled {
            self.finish_unexpected(id, recv);
        } else if let Some(unexpected) = self.unexpected_messages.at_mut(id) {
            unexpected.matched_receive = Some(recv);
        }
    }

    fn finish_unexpected(&mut self, id: u32, recv: u32) {
        let Some(unexpected) = self.unexpected_messages.remove(id) else {
            return;
        };
        self.return_credit(unexpected.peer, unexpected.stored);
        let Some(receive) = self.receives.at(recv) else {
            return;
        };
        let take = unexpected.stored.min(receive.capacity);
        if unexpected.stored > 0 {
            let (memory, at) = (receive.memory.clone(), receive.base);
            self.push_action(Action::CopyUnexpected { store: id, memory, at, length: take });
        }
        self.handle_eager_done(recv, take, unexpected.long);
    }

    fn end_store(&mut self, id: u32) {
        let Some(unexpected) = self.unexpected_messages.at_mut(id) else {
            return;
        };
        unexpected.is_filled = true;
        if unexpected.is_dropped {
            self.discard(id);
        } else if let Some(recv) = unexpected.matched_receive {
            self.finish_unexpected(id, recv);
        }
    }

    /// Drops message `id`, now or when its store is filled.
    pub(super) fn discard(&mut self, id: u32) {
        let Some(unexpected) = self.unexpected_messages.at_mut(id) else {
            return;
        };
        unexpected.is_dropped = true;
        if !unexpected.is_filled {
            return;
        }
        let (peer, stored, long) = (unexpected.peer, unexpected.stored, unexpected.long);
        self.unexpected_messages.remove(id);
        self.return_credit(peer, stored);
        if stored > 0 {
            self.push_action(Action::DropUnexpected { store: id });
        }
        let waiting = long.filter(|long| long.total > stored);
        if let (Some(long), None) = (waiting, self.failed(peer)) {
            self.enqueue(
                peer,
                Item::Control(Kind::Pulled, 0, KindHeader::Pulled { send: long.send }),
            );
        }
    }

    fn return_credit(&mut self, peer: Peer, bytes: u64) {
        let channel = &mut self.channels[peer.0 as usize];
        channel.granted_credit.release(bytes as u32);
        if channel.owes_ack() && channel.end.failed.is_none() {
            self.mark_busy(peer);
        }
    }

    /// Creates a receive for the next message of multi-receive `id`.
    pub(super) fn split_multi(&mut self, id: u32) -> u32 {
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
        let least = self.config.min_multi_recv.max(1);
        let Some(Receive { capacity, multi: Some(multi), .. }) = self.receives.at_mut(id) else {
            return;
        };
        multi.used += bytes;
        multi.parts += 1;
        multi.closed |= *capacity - multi.used < least;
    }

    /// Whether multi-receive `id` accepts more messages.
    pub(super) fn has_room(&self, id: u32) -> bool {
        let multi = self.receives.at(id).and_then(|receive| receive.multi.as_ref());
        multi.is_some_and(|multi| !multi.closed)
    }

    /// Ends a receive and reports its completion.
    #[inline]
    pub(super) fn finish_receive(&mut self, id: u32, failure: Option<Failure>) {
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
        self.push_action(Action::Complete(done));
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

    /// Ends what can no longer arrive from `peer`. After a Goodbye, unmatched receives of its
    /// messages wait on, as those of any silent peer: the application may mean to cancel them.
    pub(super) fn fail_receives(&mut self, peer: Peer, failure: Option<Failure>) {
        let has_left = self.channels[peer.0 as usize].end.has_left;
        let cut: Vec<u32> = self
            .unexpected_messages
            .ids()
            .filter(|&id| {
                self.unexpected_messages.at(id).is_some_and(|a| a.peer == peer && !a.is_filled)
            })
            .collect();
        for id in cut {
            self.forget_unfilled(id, failure);
        }
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
            self.finish_receive(id, failure);
        }
    }

    fn forget_unfilled(&mut self, id: u32, failure: Option<Failure>) {
        let Some(unexpected) = self.unexpected_messages.remove(id) else {
            return;
        };
        self.unexpected_queue.of(unexpected.tagged).remove(id);
        if let Some(failure) = failure {
            let claims = self.claimed.values_mut().filter(|claim| **claim == Ok(id));
            claims.for_each(|claim| *claim = Err(failure));
        }
        if unexpected.stored > 0 {
            self.push_action(Action::DropUnexpected { store: id });
        }
    }
}
