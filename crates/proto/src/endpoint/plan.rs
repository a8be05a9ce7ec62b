//! Which frame is next for a path of a peer, and what its bytes are.
//!
//! First come signals, which are no bytes of the channel; then what must go again; then what is new. Nothing here changes
//! what matters, so that a driver whose path is full forgets the plan and asks again; [`Plan::count`] makes it count.

use super::channel::{Channel, Errand, Item};
use super::way::Path;
use super::{Level, Memory, Op, OpKind, Peer};
use crate::channel::{Origin, PathId, Retained, State};
use crate::id::Address;
use crate::limit::{CHECK_BYTES, HEAD_BYTES_MAX};
use crate::path::time::Time;
use crate::slab::Slab;
use crate::wire::frame::{HEADER_BYTES, Header, Kind, flag};
use crate::wire::head::{Head, Long};

/// A frame to hand to a path of its peer.
pub struct Outgoing<'a, M> {
    pub(super) front: Front,
    /// Payload: where it lies, its offset there, its bytes.
    pub payload: Option<(&'a M, u64, u64)>,
    /// The payload is to be copied: see [`Endpoint::transmitted`].
    pub wants_copy: bool,
    /// Its memory may be given back at any moment, for it has been sent before, or the path is doubted and another may
    /// bring it sooner: a path that does not take all of it at once keeps a copy of the rest, and counts as having taken all.
    pub must_let_go: bool,
}

impl<M> Outgoing<'_, M> {
    /// Everything before the payload that lies in memory.
    #[inline(always)]
    pub fn front(&self) -> &[u8] {
        &self.front.bytes[..self.front.length]
    }

    /// The same, for a driver that fills in checks.
    pub fn front_mut(&mut self) -> &mut [u8] {
        &mut self.front.bytes[..self.front.length]
    }

    /// Where in the front the check of the payload belongs, if the frame carries one. What follows it in the front is
    /// payload already.
    pub fn check_at(&self) -> Option<usize> {
        self.front.check_at
    }
}

/// What stands before the payload that lies in memory: header, head, and the place of the payload's check.
pub(super) struct Front {
    bytes: [u8; FRONT_BYTES_MAX],
    length: usize,
    check_at: Option<usize>,
}

/// A frame as decided, before its bytes are written.
pub(super) struct Plan {
    pub origin: Origin,
    pub sequence: u64,
    pub kind: Kind,
    pub flags: u8,
    pub head: Head,
    /// Where the payload starts in its memory.
    pub at: u64,
    pub payload: u64,
    /// Bytes of the head of a frame that is sent in fragments: from where, how many. They come before the payload.
    pub lead: (u32, u32),
}

/// Bytes that may go out without the peer being asked to confirm them, and frames: what is kept for them is bounded, and
/// a confirmation costs little beside so much.
const UNASKED_BYTES_MAX: u64 = 512 << 10;
/// See [`UNASKED_BYTES_MAX`].
const UNASKED_FRAMES: usize = 64;

impl Plan {
    fn new(kind: Kind, flags: u8, head: Head, at: u64, payload: u64) -> Self {
        Self { origin: Origin::New, sequence: 0, kind, flags, head, at, payload, lead: (0, 0) }
    }

    fn bare(kind: Kind, flags: u8, head: Head) -> Self {
        Self::new(kind, flags, head, 0, 0)
    }

    fn signal<M: Clone>(kind: Kind, head: Head, channel: &Channel<M>) -> Self {
        let sequence = channel.out.next();
        Self { origin: Origin::Signal, sequence, ..Self::bare(kind, 0, head) }
    }

    /// What goes again: a whole frame, or a range of its bytes.
    fn again<M>(range: &Retained<M>) -> Self {
        let head_bytes = Head::size(range.kind, range.flags) as u32;
        let sequence = range.start;
        let again = |plan: Self| Self { origin: Origin::Again, sequence, ..plan };
        if range.length == range.whole {
            let payload = (range.length - head_bytes) as u64;
            let flags = range.flags | flag::WANT_ACK;
            return again(Self::new(range.kind, flags, range.head, range.at, payload));
        }
        let Retained { kind, flags, offset, whole, length, .. } = *range;
        let head = Head::Fragment { kind, flags, offset, whole };
        let lead = head_bytes.saturating_sub(offset).min(length);
        let at = range.at + offset.saturating_sub(head_bytes) as u64;
        let plan = Self::new(Kind::Fragment, flag::WANT_ACK, head, at, (length - lead) as u64);
        again(Self { lead: (offset, lead), ..plan })
    }

    /// What the frame tells the peer has been taken in. While a refusal waits to be sent that is nothing new, nor with the
    /// refusal itself, for others may wait behind it: their operations would pass for done. Nor with what goes again, whose
    /// number is from before a refusal that may be under way.
    #[inline]
    fn confirms<M: Clone>(&self, channel: &Channel<M>) -> u64 {
        if self.origin == Origin::Again { 0 } else { channel.confirmed_now() }
    }

    /// Whether its payload is of remote memory, which no operation holds: it is copied in any case.
    pub fn is_answer(&self) -> bool {
        matches!(self.kind, Kind::ReadData | Kind::AtomicReply)
    }

    /// Bytes that this first piece announces.
    pub fn ahead(&self) -> u64 {
        match self.head {
            Head::Message { long: Some(long), .. } => long.ahead as u64,
            _ => 0,
        }
    }

    /// Bytes of the channel.
    fn body(&self) -> u64 {
        Head::size(self.kind, self.flags) as u64 + self.payload
    }

    /// Everything before the payload.
    #[inline]
    pub fn front<M: Clone>(&self, source: Address, channel: &Channel<M>, checked: bool) -> Front {
        let payload = self.lead.1 as u64 + self.payload;
        let check = if checked && payload > 0 { CHECK_BYTES } else { 0 };
        let head_bytes = Head::size(self.kind, self.flags);
        let header = Header {
            length: (head_bytes + check) as u32 + payload as u32,
            kind: self.kind,
            flags: self.flags | if checked { flag::CHECKED } else { 0 },
            hops: 0,
            source,
            target: channel.address,
            sequence: self.sequence,
            delivered: self.confirms(channel),
            credit: { channel.lent }.tell(),
        };
        let mut front = Front {
            bytes: [0; FRONT_BYTES_MAX],
            length: HEADER_BYTES + head_bytes + check,
            check_at: (check > 0).then_some(HEADER_BYTES + head_bytes),
        };
        header.emit(&mut front.bytes);
        self.head.emit(&mut front.bytes[HEADER_BYTES..]);
        if self.lead.1 > 0 {
            front.length += self.emit_lead(&mut front.bytes[front.length..], channel);
        }
        front
    }

    /// Bytes of the head of the frame that goes again in fragments.
    #[cold]
    fn emit_lead<M: Clone>(&self, bytes: &mut [u8], channel: &Channel<M>) -> usize {
        let (from, count) = (self.lead.0 as usize, self.lead.1 as usize);
        let mut head = [0; HEAD_BYTES_MAX];
        if let Some(range) = channel.out.first_lost() {
            range.head.emit(&mut head);
        }
        bytes[..count].copy_from_slice(&head[from..from + count]);
        count
    }

    /// The frame is with `path`: its bytes are numbered, and what its header confirms is told.
    #[inline]
    pub fn count<M: Clone>(
        &self,
        channel: &mut Channel<M>,
        (path, now): (PathId, Time),
        memory: Option<(M, u64)>,
    ) {
        match self.origin {
            Origin::New => self.count_new(channel, (path, now), memory),
            Origin::Again => {
                // What it confirmed when it was first sent was lost with it.
                channel.ack_wanted |= channel.told > 0;
                if let Some(way) = channel.ways.get_mut(path.0 as usize) {
                    way.carried += self.payload;
                    way.again += self.payload;
                    way.rate.handle_sent(self.payload + self.lead.1 as u64);
                }
                let order = self.count_datagram(channel, (path, now));
                return channel.out.sent_again(path, order);
            }
            Origin::Signal => self.count_signal(channel, (path, now)),
        }
        let is_new = self.origin == Origin::New;
        let confirms = self.confirms(channel);
        channel.refusals -= (self.kind == Kind::Refused && is_new) as u32;
        channel.handle_told(confirms, is_new);
    }

    /// The frame has left as a datagram: says its order there, or 0 if the path is of another kind.
    #[cold]
    fn count_datagram<M: Clone>(
        &self,
        channel: &mut Channel<M>,
        (path, now): (PathId, Time),
    ) -> u64 {
        let flow = channel.ways.get_mut(path.0 as usize).and_then(|way| way.flow.as_mut());
        let is_again = self.origin == Origin::Again;
        let bytes = self.body() + self.lead.1 as u64;
        flow.map_or(0, |flow| flow.handle_sent(now, self.sequence, bytes, is_again))
    }

    #[inline]
    fn count_new<M: Clone>(
        &self,
        channel: &mut Channel<M>,
        (path, now): (PathId, Time),
        memory: Option<(M, u64)>,
    ) {
        let body = self.body();
        if channel.way(path).is_some_and(|way| way.path.lossless) {
            channel.out.pass(body);
            return;
        }
        // With a single path nobody tells the time.
        let (order, sent_at) = match channel.is_measured() {
            true => (self.count_datagram(channel, (path, now)), now),
            false => (0, Retained::<M>::UNKNOWN),
        };
        channel.out.retain(self.retained(path, (order, sent_at), memory));
        if let Some(way) = channel.ways.get_mut(path.0 as usize) {
            way.carried += body;
            way.rate.handle_sent(body);
        }
        let asks = self.flags & flag::WANT_ACK != 0;
        channel.unasked = if asks { 0 } else { channel.unasked + body };
    }

    #[inline]
    fn retained<M>(
        &self,
        path: PathId,
        (order, sent_at): (u64, Time),
        memory: Option<(M, u64)>,
    ) -> Retained<M> {
        let (memory, at) = memory.map_or((None, 0), |(memory, at)| (Some(memory), at));
        Retained {
            start: self.sequence,
            length: self.body() as u32,
            offset: 0,
            whole: self.body() as u32,
            kind: self.kind,
            flags: self.flags,
            head: self.head,
            memory,
            at,
            path,
            sent_at,
            order,
            was_spoilt: false,
            state: State::Flying,
        }
    }

    /// The frame is numbered, but has not left.
    pub fn count_lost<M: Clone>(
        &self,
        channel: &mut Channel<M>,
        path: PathId,
        memory: Option<(M, u64)>,
    ) {
        channel.out.retain_lost(self.retained(path, (0, Retained::<M>::UNKNOWN), memory));
        channel.unasked += self.body();
    }

    fn count_signal<M: Clone>(&self, channel: &mut Channel<M>, (path, now): (PathId, Time)) {
        let errand = match self.head {
            // Nobody sent for the one that is due in any case.
            Head::Ask { number } if channel.out.due_ask() == Some(number) => None,
            _ => channel.errand_for(path, Some(self.kind)),
        };
        let errand = errand.map(|place| channel.errands.remove(place));
        match self.head {
            Head::Ask { number } => channel.handle_asked((path, now), number),
            Head::Report { .. } => {
                if let Some(Errand::Report(number @ 1.., _)) = errand {
                    channel.answered = channel.answered.max(Some(number));
                }
                if channel.into.handle_told() {
                    channel.owe_report(0, None);
                }
            }
            Head::Again { .. } => {
                if let Some(place) = channel.untold_spoilt() {
                    channel.spoilt[place].2 = true;
                }
            }
            Head::Empty => channel.solicits = false,
            _ => (),
        }
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
    /// Bytes of the channel.
    #[inline]
    pub(super) fn body(&self) -> u64 {
        Head::size(Kind::Message, 0) as u64 + self.size
    }

    #[inline]
    pub(super) fn plan(&self) -> Plan {
        let flags = if self.data.is_some() { flag::CQ_DATA } else { 0 };
        let head =
            Head::Message { tag: self.tag.unwrap_or(0), data: self.data.unwrap_or(0), long: None };
        let kind = if self.tag.is_some() { Kind::Tagged } else { Kind::Message };
        Plan::new(kind, flags, head, 0, self.size)
    }
}

/// A header, a head, a check, and the head of a frame of which this is a fragment (whose own head is short).
const FRONT_BYTES_MAX: usize = HEADER_BYTES + HEAD_BYTES_MAX + CHECK_BYTES + 16;

/// Decides the next frame of a channel for a path. Pure but for dropping items whose operation is gone, and for cutting
/// what goes again.
#[inline]
pub(super) fn plan<M: Memory>(
    channel: &mut Channel<M>,
    ops: &Slab<Op<M>>,
    path: PathId,
) -> Option<Plan> {
    let way = channel.way(path)?;
    if way.held.is_some() || channel.failed.is_some() {
        return None;
    }
    if !channel.sends_by(path) {
        return plan_aside(channel, path);
    }
    if !channel.is_calm()
        && let Some(plan) = plan_repair(channel, path)
    {
        return Some(plan);
    }
    let planned = if channel.out.is_hushed() || !channel.has_span() {
        None
    } else {
        plan_new(channel, ops, path)
    };
    planned.or_else(|| {
        if !channel.speaks_by(path) {
            return None;
        }
        let plan = || Plan::signal(Kind::Ack, Head::Empty, channel);
        if channel.solicits {
            return Some(Plan { flags: flag::WANT_ACK, ..plan() });
        }
        channel.owes_ack().then(plan)
    })
}

/// What there is to send because something was lost, or may have been.
#[cold]
fn plan_repair<M: Memory>(channel: &mut Channel<M>, path: PathId) -> Option<Plan> {
    if let Some(signal) = plan_signal(channel, path) {
        return Some(signal);
    }
    let is_far = channel.may_overtake() && !channel.out.is_lost_near();
    if channel.out.is_hushed() || is_far || !channel.way(path)?.is_open() {
        return None;
    }
    let payload_max = channel.way(path)?.path.payload_max;
    channel.out.next_lost(payload_max).map(Plan::again)
}

fn plan_signal<M: Clone>(channel: &Channel<M>, path: PathId) -> Option<Plan> {
    let speaks = channel.speaks_by(path);
    if let Some(number) = channel.out.due_ask().filter(|_| speaks) {
        return Some(Plan::signal(Kind::Ask, Head::Ask { number }, channel));
    }
    if let Some(place) = channel.errand_for(path, None) {
        return Some(plan_errand(channel, channel.errands[place]));
    }
    let spoilt = channel.untold_spoilt().filter(|_| speaks);
    let (start, end, _) = channel.spoilt[spoilt?];
    Some(Plan::signal(Kind::Again, Head::Again { start, end }, channel))
}

/// What goes by a path by which nothing else does: the answer to a question that came by it, and an address that no
/// datagram may have.
#[cold]
fn plan_aside<M: Clone>(channel: &Channel<M>, path: PathId) -> Option<Plan> {
    if channel.errands.is_empty() {
        return None;
    }
    let tells = channel.has_datagrams && channel.may_tell_door(path);
    let door = || channel.errand_for(path, Some(Kind::Door)).filter(|_| tells);
    let place = channel.errand_for(path, Some(Kind::Report)).or_else(door)?;
    Some(plan_errand(channel, channel.errands[place]))
}

fn plan_errand<M: Clone>(channel: &Channel<M>, errand: Errand) -> Plan {
    let head = match errand {
        Errand::Report(answers, _) => {
            let confirmed = channel.confirmed_now();
            Head::Report { answers, ranges: channel.into.ranges(confirmed) }
        }
        Errand::Probe(_) => Head::Ask { number: channel.out.next_ask() },
        Errand::Door(door) => Head::Door(door),
    };
    Plan::signal(errand.kind(), head, channel)
}

/// What is new.
#[inline]
fn plan_new<M: Memory>(
    channel: &mut Channel<M>,
    ops: &Slab<Op<M>>,
    number: PathId,
) -> Option<Plan> {
    loop {
        let item = channel.queue.front()?;
        let mut path = &channel.way(number)?.path;
        let uncopied;
        if !channel.may_copy {
            uncopied = Path { copy_max: 0, ..*path };
            path = &uncopied;
        }
        let planned = match *item {
            Item::First(id) => ops.at(id).map(|op| plan_first(channel, path, id, op)),
            Item::Rest(id) => ops.at(id).map(|op| plan_rest(path, id, op)),
            Item::Remote(id) => ops.at(id).map(|op| plan_remote(path, id, op)),
            Item::Control(kind, flags, head) => Some(Plan::bare(kind, flags, head)),
            Item::Reply { kind, op, sent, total, .. } => {
                Some(plan_reply(path, kind, op, sent, total))
            }
        };
        if let Some(plan) = planned {
            let (lossless, rest) = (path.lossless, item.rest(ops));
            if channel.is_measured() {
                return choose(plan, channel, (number, rest));
            }
            return Some(numbered(plan, channel, lossless));
        }
        channel.queue.pop_front();
    }
}

/// The next frame, if it is new, may go by `path` now, and does not fit there.
pub(super) fn plan_too_long<M: Memory>(
    channel: &mut Channel<M>,
    ops: &Slab<Op<M>>,
    path: PathId,
) -> Option<Plan> {
    let may_go = !channel.out.is_hushed() && channel.has_span() && channel.failed.is_none();
    if !may_go || channel.way(path)?.held.is_some() || !channel.sends_by(path) {
        return None;
    }
    let plan = plan_new(channel, ops, path)?;
    (plan.payload > channel.way(path)?.path.payload_max as u64).then_some(plan)
}

/// The plan, if no other path should rather take it.
#[cold]
fn choose<M: Clone>(plan: Plan, channel: &Channel<M>, (path, rest): (PathId, u64)) -> Option<Plan> {
    let way = channel.way(path)?;
    if !way.is_open() || !channel.prefers(path, plan.body(), rest.max(plan.body())) {
        return None;
    }
    let lossless = way.path.lossless;
    let mut plan = numbered(plan, channel, lossless);
    if plan.payload >= WEIGHTY_BYTES {
        // What has arrived by which path is known only from confirmations.
        plan.flags |= flag::WANT_ACK;
    }
    Some(plan)
}

/// Payload that is confirmed at once while there are several paths.
const WEIGHTY_BYTES: u64 = 8 << 10;

/// The plan with the number of its first byte; and with the wish for a confirmation if there has been none for long.
#[inline]
pub(super) fn numbered<M: Clone>(mut plan: Plan, channel: &Channel<M>, lossless: bool) -> Plan {
    plan.sequence = channel.out.next();
    if !lossless {
        let many = channel.out.retained() % UNASKED_FRAMES == UNASKED_FRAMES - 1;
        if many || channel.unasked + plan.body() >= UNASKED_BYTES_MAX {
            plan.flags |= flag::WANT_ACK;
        }
    }
    plan
}

/// Whether a frame that ends an operation asks for the confirmation without which it is not done.
#[inline]
fn ends_with_ack<M>(op: &Op<M>, path: &Path, payload: u64) -> bool {
    let is_borrowed = op.is_borrowed || (!path.lossless && payload > path.copy_max as u64);
    op.level == Level::Delivered || is_borrowed
}

#[inline]
fn plan_first<M: Memory>(channel: &Channel<M>, path: &Path, id: u32, op: &Op<M>) -> Plan {
    let OpKind::Message { tag, data, .. } = op.kind else {
        unreachable!("only messages have a first piece")
    };
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
    } else if ends_with_ack(op, path, payload) {
        flags |= flag::WANT_ACK;
    }
    let long = is_long.then_some(Long { total: op.total, send: id, memory, ahead });
    let head = Head::Message { tag: tag.unwrap_or(0), data: data.unwrap_or(0), long };
    let kind = if tag.is_some() { Kind::Tagged } else { Kind::Message };
    Plan::new(kind, flags, head, 0, payload)
}

fn plan_rest<M: Memory>(path: &Path, id: u32, op: &Op<M>) -> Plan {
    let OpKind::Message { recv, .. } = op.kind else {
        unreachable!("only messages have further pieces")
    };
    let offset = op.sent;
    let (kind, head, end) = if offset < op.ahead {
        (Kind::Ahead, Head::Ahead { send: id, offset }, op.ahead)
    } else {
        (Kind::Data, Head::Data { recv, offset }, op.limit)
    };
    let payload = (end - offset).min(path.payload_max as u64);
    let is_last = offset + payload == op.total;
    let flags = if is_last && ends_with_ack(op, path, payload) { flag::WANT_ACK } else { 0 };
    Plan::new(kind, flags, head, offset, payload)
}

/// Bytes that follow a first piece unasked, if `left` of the message and `credit` are left behind it. Never more than half
/// of the credit, so that the next message, which may be a short one, finds some too; and none that would not fill
/// a frame.
fn ahead(path: &Path, credit: u64, left: u64) -> u32 {
    let bytes = left.min(credit / 2);
    let is_worth_it = path.ahead && (bytes == left || bytes >= path.payload_max as u64);
    if is_worth_it { bytes as u32 } else { 0 }
}

fn plan_remote<M: Memory>(path: &Path, id: u32, op: &Op<M>) -> Plan {
    match &op.kind {
        OpKind::Write { key, offset, data } => {
            let payload = (op.total - op.sent).min(path.payload_max as u64);
            let is_last = op.sent + payload == op.total;
            let data = data.filter(|_| is_last);
            let mut flags = if is_last { flag::WANT_ACK } else { 0 };
            if data.is_some() {
                flags |= flag::CQ_DATA;
            }
            let offset = offset.wrapping_add(op.sent);
            let total = u32::try_from(op.total).unwrap_or(u32::MAX);
            let head = Head::Write { op: id, total, key: *key, offset, data: data.unwrap_or(0) };
            Plan::new(Kind::Write, flags, head, op.sent, payload)
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
            Plan::new(Kind::Atomic, flags, head, 0, op.total)
        }
        OpKind::Message { .. } => unreachable!("messages are not remote memory operations"),
    }
}

fn plan_reply(path: &Path, kind: Kind, op: u32, sent: u64, total: u64) -> Plan {
    if kind == Kind::AtomicReply {
        // Always whole: its head has no place for an offset, and operations are short.
        return Plan::new(kind, 0, Head::AtomicReply { op }, 0, total);
    }
    let payload = (total - sent).min(path.payload_max as u64);
    Plan::new(kind, 0, Head::ReadData { op, offset: sent }, sent, payload)
}

/// The memory that a planned frame sends from.
#[inline]
pub(super) fn planned_memory<'a, M: Clone>(
    channel: &'a Channel<M>,
    ops: &'a Slab<Op<M>>,
    plan: &Plan,
) -> Option<&'a M> {
    match plan.origin {
        Origin::New => item_memory(channel, ops),
        Origin::Again => channel.out.first_lost()?.memory.as_ref(),
        Origin::Signal => None,
    }
}

/// The memory that the front item of the queue sends from.
#[inline]
pub(super) fn item_memory<'a, M>(channel: &'a Channel<M>, ops: &'a Slab<Op<M>>) -> Option<&'a M> {
    match channel.queue.front()? {
        Item::First(id) | Item::Rest(id) | Item::Remote(id) => ops.at(*id).map(|op| &op.memory),
        Item::Reply { memory, .. } => Some(memory),
        Item::Control(..) => None,
    }
}
