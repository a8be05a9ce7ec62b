//! Frames out: which one is next for a peer, and what becomes true once it has left.
//!
//! Reserve, then commit: [`Endpoint::poll_transmit`] changes nothing that matters, so a driver whose path is full
//! forgets the frame and asks again later; [`Endpoint::transmitted`] makes it count.

use super::channel::{Channel, Item, Path, Sent};
use super::{Action, Endpoint, Failure, Level, Memory, Op, OpKind, Peer};
use crate::id::Address;
use crate::limit::HEAD_BYTES_MAX;
use crate::slab::Slab;
use crate::wire::frame::{HEADER_BYTES, Header, Kind, flag};
use crate::wire::head::{Head, Long};

/// A frame to hand to the path of its peer.
pub struct Outgoing<'a, M> {
    bytes: Front,
    length: usize,
    /// Payload: where it lies, its offset there, its bytes.
    pub payload: Option<(&'a M, u64, u64)>,
}

impl<M> Outgoing<'_, M> {
    /// Header and head.
    #[inline]
    pub fn front(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// A frame as decided, before its bytes are written.
struct Plan {
    kind: Kind,
    flags: u8,
    head: Head,
    /// Where the payload starts in the item's memory.
    at: u64,
    payload: u64,
}

impl Plan {
    fn bare(kind: Kind, flags: u8, head: Head) -> Self {
        Self { kind, flags, head, at: 0, payload: 0 }
    }

    /// What the frame tells the peer has been taken in. A refusal confirms nothing new: others may wait behind it, whose
    /// operations would pass for done.
    fn confirms<M>(&self, channel: &Channel<M>) -> u64 {
        if self.kind == Kind::Refused { channel.told } else { channel.received }
    }

    /// Bytes that this first piece announces.
    fn ahead(&self) -> u64 {
        match self.head {
            Head::Message { long: Some(long), .. } => long.ahead as u64,
            _ => 0,
        }
    }

    fn body(&self) -> u64 {
        Head::size(self.kind, self.flags) as u64 + self.payload
    }

    /// Header and head, and how long they are together.
    #[inline]
    fn front<M>(&self, source: Address, channel: &Channel<M>) -> (Front, usize) {
        let header = Header {
            length: self.body() as u32,
            kind: self.kind,
            flags: self.flags,
            hops: 0,
            source,
            target: channel.address,
            sequence: channel.sequence,
            delivered: self.confirms(channel),
            credit: { channel.lent }.tell(),
        };
        let mut bytes = [0; HEADER_BYTES + HEAD_BYTES_MAX];
        header.emit(&mut bytes);
        let head = self.head.emit(&mut bytes[HEADER_BYTES..]);
        (bytes, HEADER_BYTES + head)
    }

    /// The frame is with the path: its bytes are numbered, and what its header confirms is told.
    #[inline]
    fn count<M>(&self, channel: &mut Channel<M>) {
        channel.sequence += self.body();
        channel.told = self.confirms(channel);
        let is_confirmed = channel.told >= channel.received;
        if channel.ack_wanted && is_confirmed && self.kind != Kind::Ack {
            channel.prompt_answers = channel.prompt_answers.saturating_add(1);
        }
        channel.ack_wanted &= !is_confirmed;
        channel.lent.tell();
    }
}

/// A message for [`Endpoint::pass`].
#[derive(Clone, Copy, Debug)]
pub struct Passing {
    /// To whom.
    pub peer: Peer,
    /// `None`: untagged.
    pub tag: Option<u64>,
    /// Remote completion data.
    pub data: Option<u64>,
    /// Bytes.
    pub size: u64,
}

impl Passing {
    #[inline]
    fn plan(&self) -> Plan {
        let flags = if self.data.is_some() { flag::CQ_DATA } else { 0 };
        let head =
            Head::Message { tag: self.tag.unwrap_or(0), data: self.data.unwrap_or(0), long: None };
        let kind = if self.tag.is_some() { Kind::Tagged } else { Kind::Message };
        Plan { kind, flags, head, at: 0, payload: self.size }
    }
}

type Front = [u8; HEADER_BYTES + HEAD_BYTES_MAX];

impl<M: Memory> Endpoint<M> {
    /// The next frame for `peer`, if there is one.
    #[inline]
    pub fn poll_transmit(&mut self, peer: Peer) -> Option<Outgoing<'_, M>> {
        let channel = &mut self.channels[peer.0 as usize];
        let plan = plan(channel, &self.ops)?;
        let (bytes, length) = plan.front(self.config.address, channel);
        let payload = if plan.payload == 0 {
            None
        } else {
            item_memory(channel, &self.ops).map(|memory| (memory, plan.at, plan.payload))
        };
        Some(Outgoing { bytes, length, payload })
    }

    /// The short way for a message whose bytes the path takes during this call and whose completion nobody waits for: its
    /// frame, without its payload of `size` bytes. `None`: something is in the way, take the long way ([`Self::send`]).
    /// [`Self::passed`] makes it count.
    #[inline]
    pub fn pass(&mut self, passing: &Passing) -> Option<Outgoing<'static, M>> {
        let channel = &mut self.channels[passing.peer.0 as usize];
        let is_clear = channel.queue.is_empty() && channel.held.is_none();
        let room = channel.credit.available().min(channel.path.eager_max) as u64;
        if !is_clear || channel.failed.is_some() || passing.size > room {
            return None;
        }
        let (bytes, length) = passing.plan().front(self.config.address, channel);
        Some(Outgoing { bytes, length, payload: None })
    }

    /// The message that [`Self::pass`] gave the frame of is with the path.
    #[inline]
    pub fn passed(&mut self, passing: &Passing) {
        let channel = &mut self.channels[passing.peer.0 as usize];
        channel.credit.spend(passing.size as u32);
        passing.plan().count(channel);
    }

    /// The frame that [`Self::poll_transmit`] gave last for `peer` is with the path now. `flushed`: its bytes have
    /// left the caller's memory; otherwise [`Self::handle_flushed`] tells when they have.
    #[inline]
    pub fn transmitted(&mut self, peer: Peer, flushed: bool) {
        let channel = &mut self.channels[peer.0 as usize];
        let Some(plan) = plan(channel, &self.ops) else {
            return;
        };
        plan.count(channel);
        let sent = advance(channel, &mut self.ops, &plan);
        if flushed {
            self.apply(peer, sent);
        } else {
            self.channels[peer.0 as usize].held = Some(sent);
        }
    }

    /// The frame that the path of `peer` held has left.
    pub fn handle_flushed(&mut self, peer: Peer) {
        if let Some(sent) = self.channels[peer.0 as usize].held.take() {
            self.apply(peer, sent);
        }
    }

    /// Tells `peer` that this endpoint takes in nothing new, and asks it to confirm everything. What was started before
    /// still goes out behind it.
    pub fn goodbye(&mut self, peer: Peer) {
        if self.channels[peer.0 as usize].failed.is_none() {
            self.enqueue(peer, Item::Control(Kind::Goodbye, flag::WANT_ACK, Head::Empty));
        }
    }

    #[inline]
    fn apply(&mut self, peer: Peer, sent: Sent) {
        let (id, end) = match sent {
            Sent::Nothing | Sent::PieceOf(_) => return,
            Sent::RefusedOf(id, errno) => return self.end_with(id, Failure::Errno(errno)),
            Sent::LastOf(id, end) => (id, end),
        };
        let channel = &mut self.channels[peer.0 as usize];
        let Some(op) = self.ops.at(id) else {
            return;
        };
        if op.level == Level::Delivered && channel.delivered < end {
            channel.awaiting.push_back((end, id));
        } else {
            self.complete_op(id);
        }
    }

    #[inline]
    pub(super) fn complete_op(&mut self, id: u32) {
        if let Some(op) = self.ops.remove(id) {
            self.finish_op(op, None);
        }
    }

    /// Completes operation `id`, though not while the path still reads its memory.
    pub(super) fn complete_flushed(&mut self, peer: Peer, id: u32) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.holds(id) {
            channel.held = Some(Sent::LastOf(id, channel.delivered));
        } else {
            self.complete_op(id);
        }
    }

    pub(super) fn end_with(&mut self, id: u32, failure: Failure) {
        if let Some(op) = self.ops.remove(id) {
            self.finish_op(op, Some(failure));
        }
    }

    /// The peer has taken in all bytes below `delivered`.
    #[inline]
    pub(super) fn handle_delivered(&mut self, peer: Peer, delivered: u64) {
        let channel = &mut self.channels[peer.0 as usize];
        if delivered <= channel.delivered {
            return;
        }
        channel.delivered = delivered;
        loop {
            let channel = &mut self.channels[peer.0 as usize];
            match channel.awaiting.front() {
                Some(&(end, id)) if end <= delivered => {
                    channel.awaiting.pop_front();
                    self.complete_op(id);
                }
                _ => return,
            }
        }
    }

    /// Message `id` may go on up to byte `limit`; `cut`: and ends there.
    pub(super) fn handle_grant(&mut self, peer: Peer, id: u32, recv: u32, limit: u64, cut: bool) {
        let Some(op) = self.ops.at_mut(id).filter(|op| op.peer == peer) else {
            return;
        };
        let OpKind::Message { recv: number, .. } = &mut op.kind else {
            return;
        };
        *number = recv;
        let was_resting = op.sent >= op.limit;
        if cut {
            op.total = limit.clamp(op.limit, op.total);
        }
        op.limit = limit.clamp(op.limit, op.total);
        if was_resting && op.sent < op.limit {
            self.enqueue(peer, Item::Rest(id));
        }
    }

    pub(super) fn push_action(&mut self, action: Action<M>) {
        self.actions.push_back(action);
    }
}

/// Decides the next frame of a channel. Pure but for dropping items whose operation is gone.
#[inline]
fn plan<M: Memory>(channel: &mut Channel<M>, ops: &Slab<Op<M>>) -> Option<Plan> {
    if channel.held.is_some() || channel.failed.is_some() {
        return None;
    }
    loop {
        let Some(item) = channel.queue.front() else {
            return channel.owes_ack().then(|| Plan::bare(Kind::Ack, 0, Head::Empty));
        };
        let planned = match *item {
            Item::First(id) => ops.at(id).map(|op| plan_first(channel, id, op)),
            Item::Rest(id) => ops.at(id).map(|op| plan_rest(channel, id, op)),
            Item::Remote(id) => ops.at(id).map(|op| plan_remote(channel, id, op)),
            Item::Control(kind, flags, head) => Some(Plan::bare(kind, flags, head)),
            Item::Reply { kind, op, sent, total, .. } => {
                Some(plan_reply(channel, kind, op, sent, total))
            }
        };
        if planned.is_some() {
            return planned;
        }
        channel.queue.pop_front();
    }
}

#[inline]
fn plan_first<M: Memory>(channel: &Channel<M>, id: u32, op: &Op<M>) -> Plan {
    let OpKind::Message { tag, data, .. } = op.kind else {
        unreachable!("only messages have a first piece")
    };
    let path = &channel.path;
    let credit = channel.credit.available() as u64;
    let memory = if path.pull { op.memory.address() } else { 0 };
    let payload = if op.total <= (path.eager_max as u64).min(credit) {
        op.total
    } else if memory != 0 {
        0
    } else {
        (path.first_piece as u64).min(credit).min(op.total)
    };
    let is_long = payload < op.total;
    let ahead = if memory == 0 { ahead(path, credit - payload, op.total - payload) } else { 0 };
    let mut flags = 0;
    if data.is_some() {
        flags |= flag::CQ_DATA;
    }
    if is_long {
        flags |= flag::LONG;
    } else if op.level == Level::Delivered {
        flags |= flag::WANT_ACK;
    }
    let long = is_long.then_some(Long { total: op.total, send: id, memory, ahead });
    let head = Head::Message { tag: tag.unwrap_or(0), data: data.unwrap_or(0), long };
    let kind = if tag.is_some() { Kind::Tagged } else { Kind::Message };
    Plan { kind, flags, head, at: 0, payload }
}

fn plan_rest<M: Memory>(channel: &Channel<M>, id: u32, op: &Op<M>) -> Plan {
    let OpKind::Message { recv, .. } = op.kind else {
        unreachable!("only messages have further pieces")
    };
    let offset = op.sent;
    let (kind, head, end) = if offset < op.ahead {
        (Kind::Ahead, Head::Ahead { send: id, offset }, op.ahead)
    } else {
        (Kind::Data, Head::Data { recv, offset }, op.limit)
    };
    let payload = (end - offset).min(channel.path.payload_max as u64);
    let is_last = offset + payload == op.total;
    let flags = if is_last && op.level == Level::Delivered { flag::WANT_ACK } else { 0 };
    Plan { kind, flags, head, at: offset, payload }
}

/// Bytes that follow a first piece unasked, if `left` of the message and `credit` are left behind it. Never more than half
/// of the credit, so that the next message, which may be a short one, finds some too; and none that would not fill
/// a frame.
fn ahead(path: &Path, credit: u64, left: u64) -> u32 {
    let bytes = left.min(credit / 2);
    let is_worth_it = path.ahead && (bytes == left || bytes >= path.payload_max as u64);
    if is_worth_it { bytes as u32 } else { 0 }
}

fn plan_remote<M: Memory>(channel: &Channel<M>, id: u32, op: &Op<M>) -> Plan {
    match &op.kind {
        OpKind::Write { key, offset, data } => {
            let payload = (op.total - op.sent).min(channel.path.payload_max as u64);
            let is_last = op.sent + payload == op.total;
            let data = data.filter(|_| is_last);
            let mut flags = if is_last { flag::WANT_ACK } else { 0 };
            if data.is_some() {
                flags |= flag::CQ_DATA;
            }
            let offset = offset.wrapping_add(op.sent);
            let total = u32::try_from(op.total).unwrap_or(u32::MAX);
            let head = Head::Write { op: id, total, key: *key, offset, data: data.unwrap_or(0) };
            Plan { kind: Kind::Write, flags, head, at: op.sent, payload }
        }
        OpKind::Read { key, offset, .. } => {
            let head = Head::Read { op: id, key: *key, offset: *offset, length: op.total };
            Plan::bare(Kind::Read, 0, head)
        }
        OpKind::Atomic { request, .. } => {
            let wants = request.fetch as u8 | (request.compare as u8) << 1;
            let head = Head::Atomic {
                op: id,
                operation: request.operation,
                datatype: request.datatype,
                wants,
                length: request.length,
                key: request.key,
                offset: request.offset,
            };
            let flags = if request.fetch { 0 } else { flag::WANT_ACK };
            Plan { kind: Kind::Atomic, flags, head, at: 0, payload: op.total }
        }
        OpKind::Message { .. } => unreachable!("messages are not remote memory operations"),
    }
}

fn plan_reply<M>(channel: &Channel<M>, kind: Kind, op: u32, sent: u64, total: u64) -> Plan {
    if kind == Kind::AtomicReply {
        // Always whole: its head has no place for an offset, and operations are short.
        return Plan { kind, flags: 0, head: Head::AtomicReply { op }, at: 0, payload: total };
    }
    let payload = (total - sent).min(channel.path.payload_max as u64);
    let head = Head::ReadData { op, offset: sent };
    Plan { kind, flags: 0, head, at: sent, payload }
}

/// The memory that the front item of the queue sends from.
#[inline]
fn item_memory<'a, M>(channel: &'a Channel<M>, ops: &'a Slab<Op<M>>) -> Option<&'a M> {
    match channel.queue.front()? {
        Item::First(id) | Item::Rest(id) | Item::Remote(id) => ops.at(*id).map(|op| &op.memory),
        Item::Reply { memory, .. } => Some(memory),
        Item::Control(..) => None,
    }
}

/// Takes the planned frame off the queue.
#[inline]
fn advance<M>(channel: &mut Channel<M>, ops: &mut Slab<Op<M>>, plan: &Plan) -> Sent {
    let end = channel.sequence;
    match channel.queue.pop_front() {
        Some(Item::First(id)) => {
            let ahead = plan.ahead();
            channel.credit.spend((plan.payload + ahead) as u32);
            let Some(op) = ops.at_mut(id) else {
                return Sent::Nothing;
            };
            op.is_begun = true;
            op.sent = plan.payload;
            op.ahead = plan.payload + ahead;
            op.limit = op.ahead;
            if ahead > 0 {
                // Behind the others: long messages share the path with short ones.
                channel.queue.push_back(Item::Rest(id));
            }
            if op.sent == op.total { Sent::LastOf(id, end) } else { Sent::PieceOf(id) }
        }
        Some(Item::Rest(id)) => advance_pieces(channel, ops, plan, id, Item::Rest, end),
        Some(Item::Remote(id)) => {
            let Some(op) = ops.at_mut(id) else {
                return Sent::Nothing;
            };
            op.is_begun = true;
            match &op.kind {
                OpKind::Write { .. } => advance_pieces(channel, ops, plan, id, Item::Remote, end),
                OpKind::Atomic { request, .. } if !request.fetch => Sent::LastOf(id, end),
                _ => Sent::PieceOf(id),
            }
        }
        Some(Item::Reply { kind, op, memory, sent, total }) => {
            let sent = sent + plan.payload;
            if sent < total {
                channel.queue.push_back(Item::Reply { kind, op, memory, sent, total });
            }
            Sent::Nothing
        }
        Some(Item::Control(..)) | None => Sent::Nothing,
    }
}

fn advance_pieces<M>(
    channel: &mut Channel<M>,
    ops: &mut Slab<Op<M>>,
    plan: &Plan,
    id: u32,
    again: fn(u32) -> Item<M>,
    end: u64,
) -> Sent {
    let Some(op) = ops.at_mut(id) else {
        return Sent::Nothing;
    };
    op.sent += plan.payload;
    if op.sent == op.total {
        return Sent::LastOf(id, end);
    }
    let is_write = matches!(op.kind, OpKind::Write { .. });
    if is_write || op.sent < op.limit {
        // Behind the others: long messages share the path with short ones.
        channel.queue.push_back(again(id));
    }
    Sent::PieceOf(id)
}
