//! A message at its receiver: from the first piece, by way of a store or straight to its receive, to the completion.
//!
//! What comes of it, in this order: a first piece; pieces that the first has announced (an [`Announced`]); pieces that were
//! granted, or a pull. A message that finds no receive waits as an [`Arrival`].

use alloc::vec::Vec;

use super::channel::Item;
use super::{Action, Done, Endpoint, Failure, Fault, Memory, Peer, Place, Posting, Ticket, Work};
use crate::tag;
use crate::wire::frame::{Kind, flag};
use crate::wire::head::{Head, Long};

/// Messages that may wait for a receive, over all peers. Empty ones need no credit, so without a bound a peer
/// could take all memory with them; 2^20 headers are 100 MB, far more than a sane program leaves waiting.
const ARRIVALS_MAX: usize = 1 << 20;

/// A receive, posted or under way.
pub(super) struct Receive<M> {
    pub ticket: Ticket,
    memory: M,
    /// Where in `memory` the message starts (multi-receive), else 0.
    base: u64,
    capacity: u64,
    tagged: bool,
    /// The multi-receive this one is a part of.
    parent: Option<u32>,
    /// This is a multi-receive itself.
    multi: Option<Multi>,
    wanted_from: Option<Peer>,
    from: Option<From>,
}

/// What a multi-receive has given out.
struct Multi {
    used: u64,
    parts: u32,
    closed: bool,
}

/// The message a receive has taken.
struct From {
    peer: Peer,
    tag: u64,
    data: Option<u64>,
    /// Bytes that are to arrive: the message's, or as many as fit.
    expected: u64,
    /// Bytes that do not fit.
    excess: u64,
    got: u64,
    granted: u64,
    /// The sender's operation, while it has more to send.
    send: Option<u32>,
    /// End of what comes unasked.
    ahead: u64,
}

/// A message that came before its receive.
pub(super) struct Arrival {
    peer: Peer,
    tag: u64,
    data: Option<u64>,
    tagged: bool,
    total: u64,
    /// Bytes in the store, once it is filled.
    stored: u64,
    /// They are all there.
    is_filled: bool,
    long: Option<Long>,
    /// The receive that took it before it was filled.
    taker: Option<u32>,
    /// Nobody wants it; forget it when it is filled.
    is_dropped: bool,
}

/// What the first frame of a message says.
#[derive(Clone, Copy)]
struct Opening {
    peer: Peer,
    tagged: bool,
    tag: u64,
    data: Option<u64>,
    long: Option<Long>,
    total: u64,
    /// Bytes that come without being asked for: with the first frame, and announced by it.
    unasked: u64,
}

/// The announced pieces of a message: what has come and what will.
#[derive(Clone, Copy)]
pub(super) struct Announced {
    /// Byte of the message that comes next.
    next: u64,
    /// End of what was announced.
    end: u64,
    long: Long,
    into: Into,
}

/// Where an [`Announced`] goes.
#[derive(Clone, Copy)]
enum Into {
    Receive(u32),
    Store(u32),
}

impl<M: Memory> Receive<M> {
    pub fn new(posting: Posting<M>) -> Self {
        let multi = posting.multi.then_some(Multi { used: 0, parts: 0, closed: false });
        Self {
            ticket: posting.ticket,
            capacity: posting.memory.size(),
            memory: posting.memory,
            base: 0,
            tagged: posting.tag.is_some(),
            parent: None,
            multi,
            wanted_from: posting.source,
            from: None,
        }
    }

    pub fn is_from(&self, peer: Peer) -> bool {
        self.from.as_ref().is_some_and(|from| from.peer == peer) || self.wanted_from == Some(peer)
    }

    /// Whether a message fills it.
    pub fn is_taken(&self) -> bool {
        self.from.is_some()
    }

    fn work(&self) -> Work {
        if self.tagged { Work::TaggedRecv } else { Work::Recv }
    }
}

impl Announced {
    /// Of a message whose first piece of `payload` bytes went to `place`.
    fn new(payload: u64, end: u64, long: Long, place: Place) -> Self {
        let into = match place {
            Place::Store { store, .. } => Into::Store(store),
            Place::Receive { recv, .. } => Into::Receive(recv),
            _ => unreachable!("messages go to receives and stores"),
        };
        Self { next: payload, end, long, into }
    }
}

impl Arrival {
    /// Adds what is known of the message to `done`.
    pub fn describe(&self, done: Done) -> Done {
        Done { length: self.total, tag: self.tag, data: self.data, source: Some(self.peer), ..done }
    }
}

impl<M: Memory> Endpoint<M> {
    /// The memory behind a place: it, the offset in it, and how many of the payload's bytes it takes.
    #[inline]
    pub fn place_memory(&self, place: Place) -> Option<(&M, u64, u64)> {
        match place {
            Place::Receive { recv, at, take } => {
                let receive = self.receives.at(recv)?;
                Some((&receive.memory, receive.base + at, take))
            }
            Place::Answer { op, at } => {
                let op = self.ops.at(op)?;
                Some((op.answer_memory(), at, u64::MAX))
            }
            _ => None,
        }
    }

    /// The bytes that [`Action::Pull`] named are in place (`Ok`), or cannot be read (`Err`): then they are asked for.
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
            self.enqueue(peer, Item::Control(Kind::Pulled, 0, Head::Pulled { send }));
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
    ) -> Result<Place, Fault> {
        let total = long.map_or(payload, |long| long.total);
        let unasked = payload + long.map_or(0, |long| long.ahead as u64);
        if total < unasked {
            return Err(Fault("a message is shorter than its first piece"));
        }
        let window = self.config.eager_window;
        if !self.channels[peer.0 as usize].lent.take(unasked, window) {
            return Err(Fault("eager bytes without credit"));
        }
        let long_ahead = long.filter(|long| long.ahead > 0);
        let announced = &self.channels[peer.0 as usize].announced;
        if long_ahead.is_some_and(|long| announced.contains_key(&long.send)) {
            return Err(Fault("two messages under one number"));
        }
        let opening = Opening { peer, tagged, tag, data, long, total, unasked };
        let place = self.match_message(opening, payload)?;
        if let Some(long) = long_ahead {
            let pieces = Announced::new(payload, unasked, long, place);
            self.channels[peer.0 as usize].announced.insert(long.send, pieces);
        }
        Ok(place)
    }

    /// Gives a message that begins to the receive that waits for it, or else lets it wait.
    #[inline]
    fn match_message(&mut self, opening: Opening, payload: u64) -> Result<Place, Fault> {
        let Opening { peer, tagged, tag, data, long, total, unasked } = opening;
        let wanted = self.wanted.of(tagged);
        let Some(found) = wanted.find(tag, peer.0) else {
            if self.arrivals.len() >= ARRIVALS_MAX {
                return Err(Fault("too many messages wait for a receive"));
            }
            let arrival = Arrival {
                peer,
                tag,
                data,
                tagged,
                total,
                stored: unasked,
                is_filled: false,
                long,
                taker: None,
                is_dropped: false,
            };
            let store = self.arrivals.insert(arrival);
            self.arrived.of(tagged).push(tag::Arrival { tag, source: peer.0, id: store });
            return Ok(Place::Store { store, size: unasked });
        };
        let posted = wanted.id(found);
        let recv = if self.receives.at(posted).is_some_and(|receive| receive.multi.is_some()) {
            let part = self.split_multi(posted);
            self.bind(part, opening);
            if !self.has_room(posted) {
                self.wanted.of(tagged).take(found);
            }
            part
        } else {
            wanted.take(found);
            self.bind(posted, opening);
            posted
        };
        let expected =
            self.receives.at(recv).and_then(|r| r.from.as_ref()).map_or(0, |f| f.expected);
        Ok(Place::Receive { recv, at: 0, take: payload.min(expected) })
    }

    /// Makes receive `id` the receiver of a message.
    #[inline]
    fn bind(&mut self, id: u32, opening: Opening) {
        let Opening { peer, tag, data, long, total, unasked: ahead, .. } = opening;
        let Some(receive) = self.receives.at_mut(id) else {
            return;
        };
        let expected = total.min(receive.capacity);
        receive.capacity = expected;
        let send = long.map(|long| long.send);
        let excess = total - expected;
        let from = From { peer, tag, data, expected, excess, got: 0, granted: 0, send, ahead };
        receive.from = Some(from);
        if let Some(parent) = receive.parent {
            self.use_multi(parent, expected);
        }
    }

    #[inline]
    pub(super) fn end_message(
        &mut self,
        peer: Peer,
        place: Place,
        payload: u64,
        long: Option<Long>,
    ) {
        match place {
            Place::Receive { recv, take, .. } => {
                self.channels[peer.0 as usize].lent.release(payload as u32);
                match long.filter(|long| long.ahead > 0) {
                    None => self.got_unasked(recv, take, long),
                    Some(_) => self.got_some(recv, take),
                }
            }
            Place::Store { store, .. } if long.is_none_or(|long| long.ahead == 0) => {
                self.end_store(store);
            }
            _ => (),
        }
    }

    /// The first piece is there, and more follows unasked: what comes after that is asked for already now.
    fn got_some(&mut self, recv: u32, take: u64) {
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
    ) -> Result<Place, Fault> {
        let announced = self.channels[peer.0 as usize].announced.get(&send).copied();
        let announced = announced.ok_or(Fault("a piece of no message"))?;
        if payload == 0 || offset != announced.next || payload > announced.end - offset {
            return Err(Fault("a piece that was not announced"));
        }
        Ok(match announced.into {
            Into::Store(store) => Place::Stored { store, at: offset },
            Into::Receive(recv) => {
                let from = self.receives.at(recv).and_then(|receive| receive.from.as_ref());
                let room = from.map_or(0, |from| from.expected.saturating_sub(offset));
                match payload.min(room) {
                    0 => Place::Nowhere,
                    take => Place::Receive { recv, at: offset, take },
                }
            }
        })
    }

    pub(super) fn end_ahead(&mut self, peer: Peer, send: u32, place: Place, payload: u64) {
        let channel = &mut self.channels[peer.0 as usize];
        let Some(announced) = channel.announced.get_mut(&send) else {
            return;
        };
        announced.next += payload;
        let announced = *announced;
        let is_last = announced.next == announced.end;
        if is_last {
            channel.announced.remove(&send);
        }
        match announced.into {
            Into::Receive(recv) => {
                channel.lent.release(payload as u32);
                let take = if let Place::Receive { take, .. } = place { take } else { 0 };
                if is_last {
                    self.got_unasked(recv, take, Some(announced.long));
                } else if let Some(from) =
                    self.receives.at_mut(recv).and_then(|receive| receive.from.as_mut())
                {
                    from.got += take;
                }
            }
            Into::Store(store) if is_last => self.end_store(store),
            Into::Store(_) => (),
        }
    }

    /// All that comes unasked is in its receive's memory: ask for the rest, or be done.
    #[inline]
    fn got_unasked(&mut self, recv: u32, take: u64, long: Option<Long>) {
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
        if let (Some(errno), true) = (channel.failed, left > 0) {
            self.finish_receive(recv, Some(Failure::Errno(errno)));
        } else if left == 0 {
            self.enqueue(peer, Item::Control(Kind::Pulled, 0, Head::Pulled { send: long.send }));
            self.finish_receive(recv, None);
        } else if channel.path.pull && long.memory != 0 {
            let (memory, at) = (receive.memory.clone(), receive.base + got);
            let address = long.memory.wrapping_add(got);
            self.push_action(Action::Pull { peer, recv, address, memory, at, length: left });
        } else if from.granted == 0 {
            self.grant(recv);
        }
    }

    /// Lets the sender of `recv`'s message go on, one window ahead of what has arrived.
    fn grant(&mut self, recv: u32) {
        let Some(from) = self.receives.at_mut(recv).and_then(|receive| receive.from.as_mut())
        else {
            return;
        };
        let (peer, Some(send)) = (from.peer, from.send) else {
            return;
        };
        let window = self.channels[peer.0 as usize].path.window;
        let limit = from.expected.min(from.got.max(from.ahead).saturating_add(window));
        from.granted = limit;
        let is_cut = from.excess > 0 && limit == from.expected;
        let flags = if is_cut { flag::CUT } else { 0 };
        self.enqueue(peer, Item::Control(Kind::Grant, flags, Head::Grant { send, recv, limit }));
    }

    pub(super) fn place_data(
        &mut self,
        peer: Peer,
        recv: u32,
        offset: u64,
        payload: u64,
    ) -> Result<Place, Fault> {
        let from = self.receives.at(recv).and_then(|receive| receive.from.as_ref());
        let from = from.filter(|from| from.peer == peer).ok_or(Fault("data for no receive"))?;
        let end = offset.checked_add(payload).ok_or(Fault("data beyond all bounds"))?;
        let was_asked = offset >= from.ahead && end <= from.granted;
        if payload == 0 || offset != from.got || !was_asked {
            return Err(Fault("data that was not granted"));
        }
        Ok(Place::Receive { recv, at: offset, take: payload })
    }

    pub(super) fn end_data(&mut self, recv: u32, place: Place) {
        let Place::Receive { take, .. } = place else {
            return;
        };
        let Some(from) = self.receives.at_mut(recv).and_then(|receive| receive.from.as_mut())
        else {
            return;
        };
        from.got += take;
        let window = self.channels[from.peer.0 as usize].path.window;
        if from.got == from.expected {
            self.finish_receive(recv, None);
        } else if from.granted < from.expected && from.granted - from.got <= window / 2 {
            self.grant(recv);
        }
    }

    /// Gives the waiting message `id` to `recv`.
    pub(super) fn adopt(&mut self, id: u32, recv: u32) {
        let Some(&Arrival { peer, tag, data, tagged, total, stored, is_filled, long, .. }) =
            self.arrivals.at(id)
        else {
            return;
        };
        self.bind(recv, Opening { peer, tagged, tag, data, long, total, unasked: stored });
        if is_filled {
            self.finish_adopt(id, recv);
        } else if let Some(arrival) = self.arrivals.at_mut(id) {
            arrival.taker = Some(recv);
        }
    }

    fn finish_adopt(&mut self, id: u32, recv: u32) {
        let Some(arrival) = self.arrivals.remove(id) else {
            return;
        };
        self.return_credit(arrival.peer, arrival.stored);
        let Some(receive) = self.receives.at(recv) else {
            return;
        };
        let take = arrival.stored.min(receive.capacity);
        if arrival.stored > 0 {
            let (memory, at) = (receive.memory.clone(), receive.base);
            self.push_action(Action::Fill { store: id, memory, at, length: take });
        }
        self.got_unasked(recv, take, arrival.long);
    }

    fn end_store(&mut self, id: u32) {
        let Some(arrival) = self.arrivals.at_mut(id) else {
            return;
        };
        arrival.is_filled = true;
        if arrival.is_dropped {
            self.discard(id);
        } else if let Some(recv) = arrival.taker {
            self.finish_adopt(id, recv);
        }
    }

    /// Forgets message `id`, at the latest when its first piece is there.
    pub(super) fn discard(&mut self, id: u32) {
        let Some(arrival) = self.arrivals.at_mut(id) else {
            return;
        };
        arrival.is_dropped = true;
        if !arrival.is_filled {
            return;
        }
        let (peer, stored, long) = (arrival.peer, arrival.stored, arrival.long);
        self.arrivals.remove(id);
        self.return_credit(peer, stored);
        if stored > 0 {
            self.push_action(Action::Forget { store: id });
        }
        let waiting = long.filter(|long| long.total > stored);
        if let (Some(long), None) = (waiting, self.failed(peer)) {
            self.enqueue(peer, Item::Control(Kind::Pulled, 0, Head::Pulled { send: long.send }));
        }
    }

    fn return_credit(&mut self, peer: Peer, bytes: u64) {
        let channel = &mut self.channels[peer.0 as usize];
        channel.lent.release(bytes as u32);
        if channel.owes_ack() && channel.failed.is_none() {
            self.mark_busy(peer);
        }
    }

    /// A receive for the next message of multi-receive `id`.
    pub(super) fn split_multi(&mut self, id: u32) -> u32 {
        let Some(Receive { ticket, memory, capacity, multi: Some(multi), wanted_from, .. }) =
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
            wanted_from: *wanted_from,
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

    /// Whether multi-receive `id` takes more messages.
    pub(super) fn has_room(&self, id: u32) -> bool {
        let multi = self.receives.at(id).and_then(|receive| receive.multi.as_ref());
        multi.is_some_and(|multi| !multi.closed)
    }

    /// Ends a receive and announces it.
    #[inline]
    pub(super) fn finish_receive(&mut self, id: u32, failure: Option<Failure>) {
        if let Some(Multi { parts, closed, .. }) =
            self.receives.at_mut(id).and_then(|receive| receive.multi.as_mut())
            && *parts > 0
        {
            // Its last part gives the memory back.
            *closed = true;
            return;
        }
        let Some(receive) = self.receives.at(id) else {
            return;
        };
        let mut done = Done::new(receive.work(), receive.ticket);
        done.place = receive.memory.address().wrapping_add(receive.base);
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
        self.push_action(Action::Done(done));
    }

    /// One part of multi-receive `id` is done; true if that was the last, and its memory is the caller's again.
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

    /// Ends what can no longer come from `peer`. Receives of nothing but its messages wait on if it has left of its own will,
    /// as those of anybody who sends nothing: whoever posted them may mean to cancel them.
    pub(super) fn fail_receives(&mut self, peer: Peer, failure: Option<Failure>) {
        let has_left = self.channels[peer.0 as usize].has_left;
        let cut: Vec<u32> = self
            .arrivals
            .ids()
            .filter(|&id| self.arrivals.at(id).is_some_and(|a| a.peer == peer && !a.is_filled))
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
        // Multi-receives first, so that their last part gives the memory back.
        hit.sort_by_key(|&id| self.receives.at(id).is_some_and(|r| r.multi.is_none()));
        for id in hit {
            self.wanted.tagged.remove(id);
            self.wanted.untagged.remove(id);
            self.finish_receive(id, failure);
        }
    }

    fn forget_unfilled(&mut self, id: u32, failure: Option<Failure>) {
        let Some(arrival) = self.arrivals.remove(id) else {
            return;
        };
        self.arrived.of(arrival.tagged).remove(id);
        if let Some(failure) = failure {
            let claims = self.claimed.values_mut().filter(|claim| **claim == Ok(id));
            claims.for_each(|claim| *claim = Err(failure));
        }
        if arrival.stored > 0 {
            self.push_action(Action::Forget { store: id });
        }
    }
}
