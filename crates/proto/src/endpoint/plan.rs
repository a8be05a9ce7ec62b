//! Chooses the next frame for a path of a peer, and writes what precedes the frame's payload.
//!
//! Control frames come first, which carry no bytes of the channel; then retransmissions; then new
//! frames. Planning changes nothing that matters, so a driver whose path is full drops the plan and
//! asks again. [`Plan::commit`] makes the plan effective.

use super::channel::Channel;
use super::control_frame::ControlFrame;
use super::driver_interface::{CompletionLevel, Memory, Peer};
use super::operation::{Item, Op, OpKind};
use super::path_state::PathProperties;
use crate::channel::{Origin, PathId, RetainedFrame, RetainedState};
use crate::id::Address;
use crate::limit::{CHECKSUM_BYTES, KIND_HEADER_BYTES_MAX};
use crate::path::time::Time;
use crate::slab::Slab;
use crate::wire::frame::{HEADER_BYTES, Header, Kind, flag};
use crate::wire::kind_header::{KindHeader, Long};

/// A frame to hand to a path of its peer.
pub struct OutgoingFrame<'a, M> {
    pub(super) front: Front,
    /// The payload: its memory, its offset there, its length in bytes.
    pub payload: Option<(&'a M, u64, u64)>,
    /// The driver must copy the payload: see
    /// [`Endpoint::transmitted`](super::Endpoint::transmitted).
    pub wants_copy: bool,
    /// The endpoint may give back the payload's memory at any moment, because the payload has been
    /// sent before, or because the path is suspected and another path may deliver the payload
    /// sooner. So a link that does not take the whole frame at once keeps a copy of the rest, and
    /// the frame counts as taken completely.
    pub must_release_memory: bool,
}

impl<M> OutgoingFrame<'_, M> {
    /// Everything before the payload that lies in memory.
    #[inline(always)]
    pub fn front(&self) -> &[u8] {
        &self.front.bytes[..self.front.length]
    }

    /// Everything before the payload that lies in memory, for a driver that fills in checksums.
    pub fn front_mut(&mut self) -> &mut [u8] {
        &mut self.front.bytes[..self.front.length]
    }

    /// The offset of the payload's checksum in the front, if the frame carries one. What follows
    /// the checksum in the front is payload already.
    pub fn checksum_at(&self) -> Option<usize> {
        self.front.checksum_at
    }
}

/// What precedes the payload that lies in memory: header, head, and space for the payload's
/// checksum.
pub(super) struct Front {
    bytes: [u8; FRONT_BYTES_MAX],
    length: usize,
    checksum_at: Option<usize>,
}

/// A frame that has been chosen and whose bytes are not yet written.
pub(super) struct Plan {
    pub origin: Origin,
    pub sequence: u64,
    pub kind: Kind,
    pub flags: u8,
    pub head: KindHeader,
    /// The offset of the payload in its memory.
    pub at: u64,
    pub payload: u64,
    /// The part of a fragmented frame's head that this fragment carries before the payload: its
    /// offset and its length in bytes.
    pub lead: (u32, u32),
}

/// The most bytes that may be sent without asking the peer for an acknowledgement. This bounds what
/// the retransmit buffer holds, and one acknowledgement costs little compared to this many bytes.
const ACK_INTERVAL_BYTES_MAX: u64 = 512 << 10;
/// The most frames that may be sent without asking the peer for an acknowledgement.
const ACK_INTERVAL_FRAMES: usize = 64;

impl Plan {
    fn new(kind: Kind, flags: u8, head: KindHeader, at: u64, payload: u64) -> Self {
        Self { origin: Origin::New, sequence: 0, kind, flags, head, at, payload, lead: (0, 0) }
    }

    fn bare(kind: Kind, flags: u8, head: KindHeader) -> Self {
        Self::new(kind, flags, head, 0, 0)
    }

    fn control<M: Clone>(kind: Kind, head: KindHeader, channel: &Channel<M>) -> Self {
        let sequence = channel.out.next();
        Self { origin: Origin::Control, sequence, ..Self::bare(kind, 0, head) }
    }

    /// The plan of a retransmission: a whole frame, or a range of a frame's bytes.
    fn retransmission<M>(range: &RetainedFrame<M>) -> Self {
        let head_bytes = KindHeader::size(range.kind, range.flags) as u32;
        let sequence = range.start;
        let retransmission = |plan: Self| Self { origin: Origin::Retransmission, sequence, ..plan };
        if range.length == range.whole {
            let payload = (range.length - head_bytes) as u64;
            let flags = range.flags | flag::WANT_ACK;
            return retransmission(Self::new(range.kind, flags, range.head, range.at, payload));
        }
        let RetainedFrame { kind, flags, offset, whole, length, .. } = *range;
        let head = KindHeader::Fragment { kind, flags, offset, whole };
        let lead = head_bytes.saturating_sub(offset).min(length);
        let at = range.at + offset.saturating_sub(head_bytes) as u64;
        let plan = Self::new(Kind::Fragment, flag::WANT_ACK, head, at, (length - lead) as u64);
        retransmission(Self { lead: (offset, lead), ..plan })
    }

    /// The delivered position that the frame's header reports to the peer. While a refusal waits to
    /// be sent, the position is an old one, and so it is in the refusal's own frame, because
    /// further refusals may wait behind it: their operations would count as done. A retransmission
    /// reports 0, because its sequence number is from before a refusal that may be in flight.
    #[inline]
    fn acknowledges<M: Clone>(&self, channel: &Channel<M>) -> u64 {
        if self.origin == Origin::Retransmission { 0 } else { channel.acknowledged_now() }
    }

    /// Whether the payload is remote memory that a peer asked for. No operation holds this memory,
    /// so the payload is copied in any case.
    pub fn is_answer(&self) -> bool {
        matches!(self.kind, Kind::ReadData | Kind::AtomicReply)
    }

    /// The number of bytes that this first piece announces.
    pub fn ahead(&self) -> u64 {
        match self.head {
            KindHeader::Message { long: Some(long), .. } => long.ahead as u64,
            _ => 0,
        }
    }

    /// The number of bytes that the frame takes up in the channel.
    fn body(&self) -> u64 {
        KindHeader::size(self.kind, self.flags) as u64 + self.payload
    }

    /// The bytes before the payload.
    #[inline]
    pub fn front<M: Clone>(&self, source: Address, channel: &Channel<M>, checked: bool) -> Front {
        let payload = self.lead.1 as u64 + self.payload;
        let check = if checked && payload > 0 { CHECKSUM_BYTES } else { 0 };
        let head_bytes = KindHeader::size(self.kind, self.flags);
        let header = Header {
            length: (head_bytes + check) as u32 + payload as u32,
            kind: self.kind,
            flags: self.flags | if checked { flag::CHECKED } else { 0 },
            hops: 0,
            source,
            target: channel.address,
            sequence: self.sequence,
            delivered: self.acknowledges(channel),
            credit: { channel.granted_credit }.advertise(),
        };
        let mut front = Front {
            bytes: [0; FRONT_BYTES_MAX],
            length: HEADER_BYTES + head_bytes + check,
            checksum_at: (check > 0).then_some(HEADER_BYTES + head_bytes),
        };
        header.emit(&mut front.bytes);
        self.head.emit(&mut front.bytes[HEADER_BYTES..]);
        if self.lead.1 > 0 {
            front.length += self.emit_lead(&mut front.bytes[front.length..], channel);
        }
        front
    }

    /// Writes the part of the head that a fragment carries. Returns the number of bytes written.
    #[cold]
    fn emit_lead<M: Clone>(&self, bytes: &mut [u8], channel: &Channel<M>) -> usize {
        let (from, count) = (self.lead.0 as usize, self.lead.1 as usize);
        let mut head = [0; KIND_HEADER_BYTES_MAX];
        if let Some(range) = channel.out.first_lost() {
            range.head.emit(&mut head);
        }
        bytes[..count].copy_from_slice(&head[from..from + count]);
        count
    }

    /// Records that `path` has taken the frame: the frame's bytes are numbered, and the position
    /// that its header acknowledges counts as reported.
    #[inline]
    pub fn commit<M: Clone>(
        &self,
        channel: &mut Channel<M>,
        (path, now): (PathId, Time),
        memory: Option<(M, u64)>,
    ) {
        match self.origin {
            Origin::New => self.commit_new(channel, (path, now), memory),
            Origin::Retransmission => {
                // The acknowledgement in the frame's first transmission was lost with it.
                channel.owed_ack.is_wanted |= channel.owed_ack.acknowledged > 0;
                if let Some(state) = channel.paths.get_mut(path.0 as usize) {
                    state.carried += self.payload;
                    state.retransmitted += self.payload;
                    state.rate.handle_sent(self.payload + self.lead.1 as u64);
                }
                let order = self.commit_datagram(channel, (path, now));
                return channel.out.mark_retransmitted(path, order);
            }
            Origin::Control => self.commit_control(channel, (path, now)),
        }
        let is_new = self.origin == Origin::New;
        let acknowledges = self.acknowledges(channel);
        channel.repairs.refusals -= (self.kind == Kind::Refused && is_new) as u32;
        channel.handle_ack_sent(acknowledges, is_new);
    }

    /// Records that the frame has left as a datagram. Returns its position in the order of sending,
    /// or 0 if the path carries no datagrams.
    #[cold]
    fn commit_datagram<M: Clone>(
        &self,
        channel: &mut Channel<M>,
        (path, now): (PathId, Time),
    ) -> u64 {
        let flow = channel.paths.get_mut(path.0 as usize).and_then(|state| state.flow.as_mut());
        let is_retransmission = self.origin == Origin::Retransmission;
        let bytes = self.body() + self.lead.1 as u64;
        flow.map_or(0, |flow| flow.handle_sent(now, self.sequence, bytes, is_retransmission))
    }

    #[inline]
    fn commit_new<M: Clone>(
        &self,
        channel: &mut Channel<M>,
        (path, now): (PathId, Time),
        memory: Option<(M, u64)>,
    ) {
        let body = self.body();
        let state = channel.paths.path_state(path);
        if let Some(PathProperties { lossless: true, unbounded, .. }) = state.map(|it| it.path) {
            return self.commit_lossless(channel, unbounded);
        }
        // On a single path without datagrams, the driver does not set the time.
        let (order, sent_at) = match channel.paths.is_measured() {
            true => (self.commit_datagram(channel, (path, now)), now),
            false => (0, RetainedFrame::<M>::UNKNOWN),
        };
        channel.out.retain(self.retained(path, (order, sent_at), memory));
        if let Some(state) = channel.paths.get_mut(path.0 as usize) {
            state.carried += body;
            state.rate.handle_sent(body);
        }
        channel.acknowledgements.note_sent(body, self.flags);
    }

    /// Records that the frame has left by a lossless path. `unbounded`: one that takes everything.
    #[inline]
    pub fn commit_lossless<M: Clone>(&self, channel: &mut Channel<M>, unbounded: bool) {
        channel.out.advance_lossless(self.body());
        if unbounded {
            channel.acknowledgements.note_sent(self.body(), self.flags);
        }
    }

    #[inline]
    fn retained<M>(
        &self,
        path: PathId,
        (order, sent_at): (u64, Time),
        memory: Option<(M, u64)>,
    ) -> RetainedFrame<M> {
        let (memory, at) = memory.map_or((None, 0), |(memory, at)| (Some(memory), at));
        RetainedFrame {
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
            was_corrupt: false,
            state: RetainedState::InFlight,
        }
    }

    /// Numbers the bytes of a frame that has not left, and marks them lost.
    pub fn commit_lost<M: Clone>(
        &self,
        channel: &mut Channel<M>,
        path: PathId,
        memory: Option<(M, u64)>,
    ) {
        channel.out.retain_as_lost(self.retained(path, (0, RetainedFrame::<M>::UNKNOWN), memory));
        channel.acknowledgements.bytes_since_request += self.body();
    }

    fn commit_control<M: Clone>(&self, channel: &mut Channel<M>, (path, now): (PathId, Time)) {
        let control_frame = match self.head {
            // No control frame is queued for the status request that is due in any case.
            KindHeader::StatusRequest { number }
                if channel.out.due_status_request() == Some(number) =>
            {
                None
            }
            _ => channel.control_frame_for(path, Some(self.kind)),
        };
        let control_frame = control_frame.map(|place| channel.repairs.control_frames.remove(place));
        match self.head {
            KindHeader::StatusRequest { number } => {
                channel.handle_status_request_sent((path, now), number)
            }
            KindHeader::Sack { .. } | KindHeader::StatusReply { .. } => {
                if let Some(ControlFrame::Sack(number @ 1.., _)) = control_frame {
                    channel.repairs.answered_request =
                        channel.repairs.answered_request.max(Some(number));
                }
                if channel.into.handle_sack_sent() {
                    channel.repairs.owe_sack(0, None);
                }
            }
            KindHeader::Nack { .. } => {
                if let Some(place) = channel.repairs.unreported_corrupt() {
                    channel.repairs.corrupt[place].2 = true;
                }
            }
            KindHeader::Empty => channel.acknowledgements.is_solicited = false,
            _ => (),
        }
    }
}

/// A message for [`Endpoint::inject`](super::Endpoint::inject).
#[derive(Clone, Copy, Debug)]
pub struct InjectMessage {
    /// The receiver.
    pub peer: Peer,
    /// The tag; `None` for an untagged message.
    pub tag: Option<u64>,
    /// The remote completion data.
    pub data: Option<u64>,
    /// The size of the payload in bytes.
    pub size: u64,
}

impl InjectMessage {
    /// The number of bytes that the message's frame takes up in the channel.
    #[inline]
    pub(super) fn body(&self) -> u64 {
        KindHeader::size(Kind::Message, 0) as u64 + self.size
    }

    #[inline]
    pub(super) fn plan(&self) -> Plan {
        let flags = if self.data.is_some() { flag::CQ_DATA } else { 0 };
        let head = KindHeader::Message {
            tag: self.tag.unwrap_or(0),
            data: self.data.unwrap_or(0),
            long: None,
        };
        let kind = if self.tag.is_some() { Kind::Tagged } else { Kind::Message };
        Plan::new(kind, flags, head, 0, self.size)
    }
}

/// Space for a header, a head, a checksum, and the head of a frame of which the frame is a fragment
/// (a fragment's own head is short).
const FRONT_BYTES_MAX: usize = HEADER_BYTES + KIND_HEADER_BYTES_MAX + CHECKSUM_BYTES + 16;

/// Chooses the next frame of a channel for a path. The only side effects are that items whose
/// operation has ended are dropped and that a retransmission is cut to the size of the path.
#[inline]
pub(super) fn plan<M: Memory>(
    channel: &mut Channel<M>,
    ops: &Slab<Op<M>>,
    path: PathId,
) -> Option<Plan> {
    let state = channel.paths.path_state(path)?;
    if state.held.is_some() || channel.end.failed.is_some() {
        return None;
    }
    if !channel.paths.sends_by(path) {
        return plan_inactive_path(channel, path);
    }
    if !channel.has_nothing_to_repair()
        && let Some(plan) = plan_loss_recovery(channel, path)
    {
        return Some(plan);
    }
    let planned = if channel.out.is_awaiting_status() || !channel.is_within_reorder_window() {
        None
    } else {
        plan_new(channel, ops, path)
    };
    planned.or_else(|| {
        if !channel.sends_control_by(path) {
            return None;
        }
        let plan = || Plan::control(Kind::Ack, KindHeader::Empty, channel);
        if channel.acknowledgements.is_solicited {
            return Some(Plan { flags: flag::WANT_ACK, ..plan() });
        }
        channel.owes_ack().then(plan)
    })
}

/// The next control frame or retransmission, when something was lost or may be lost.
#[cold]
fn plan_loss_recovery<M: Memory>(channel: &mut Channel<M>, path: PathId) -> Option<Plan> {
    if let Some(control) = plan_control(channel, path) {
        return Some(control);
    }
    let is_far = channel.paths.may_reorder() && !channel.out.is_lost_in_window();
    if channel.out.is_awaiting_status() || is_far || !channel.paths.path_state(path)?.is_open() {
        return None;
    }
    let payload_max = channel.paths.path_state(path)?.path.payload_max;
    channel.out.next_lost(payload_max).map(Plan::retransmission)
}

fn plan_control<M: Clone>(channel: &Channel<M>, path: PathId) -> Option<Plan> {
    let sends_control = channel.sends_control_by(path);
    if let Some(number) = channel.out.due_status_request().filter(|_| sends_control) {
        return Some(Plan::control(
            Kind::StatusRequest,
            KindHeader::StatusRequest { number },
            channel,
        ));
    }
    if let Some(place) = channel.control_frame_for(path, None) {
        return Some(plan_control_frame(channel, channel.repairs.control_frames[place]));
    }
    let corrupt = channel.repairs.unreported_corrupt().filter(|_| sends_control);
    let (start, end, _) = channel.repairs.corrupt[corrupt?];
    Some(Plan::control(Kind::Nack, KindHeader::Nack { start, end }, channel))
}

/// The next frame for a path that sends nothing else: the answer to a status request that came by
/// this path, and an address advertisement that no datagram may carry.
#[cold]
fn plan_inactive_path<M: Clone>(channel: &Channel<M>, path: PathId) -> Option<Plan> {
    if channel.repairs.control_frames.is_empty() {
        return None;
    }
    let tells = channel.paths.has_datagrams && channel.paths.may_advertise_by(path);
    let of_kind = |kind| channel.control_frame_for(path, Some(kind));
    let advertisement = || {
        let found = of_kind(Kind::AddressAdvertisement);
        found.or_else(|| of_kind(Kind::UdpAdvertisement)).filter(|_| tells)
    };
    let answer = of_kind(Kind::StatusReply).or_else(|| of_kind(Kind::Sack));
    let place = answer.or_else(advertisement)?;
    Some(plan_control_frame(channel, channel.repairs.control_frames[place]))
}

fn plan_control_frame<M: Clone>(channel: &Channel<M>, control_frame: ControlFrame) -> Plan {
    let head = match control_frame {
        ControlFrame::Sack(number, _) => {
            let ranges = channel.into.ranges(channel.acknowledged_now());
            match number {
                0 => KindHeader::Sack { ranges },
                _ => KindHeader::StatusReply { number, ranges },
            }
        }
        ControlFrame::StatusRequest(_) => {
            KindHeader::StatusRequest { number: channel.out.next_status_request() }
        }
        ControlFrame::AddressAdvertisement(address) => KindHeader::AddressAdvertisement(address),
    };
    Plan::control(control_frame.kind(), head, channel)
}

/// The next new frame.
#[inline]
fn plan_new<M: Memory>(
    channel: &mut Channel<M>,
    ops: &Slab<Op<M>>,
    number: PathId,
) -> Option<Plan> {
    loop {
        let item = channel.queue.front()?;
        let mut path = &channel.paths.path_state(number)?.path;
        let uncopied;
        if !channel.may_copy {
            uncopied = PathProperties { copy_max: 0, ..*path };
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
            let (is_acked, rest) = (path.is_acknowledged(), item.rest(ops));
            if channel.paths.is_measured() {
                return choose(plan, channel, (number, rest));
            }
            return Some(numbered(plan, channel, is_acked));
        }
        channel.queue.pop_front();
    }
}

/// The next frame, if it is new, may be sent by `path` now, and is too long for the path.
pub(super) fn plan_too_long<M: Memory>(
    channel: &mut Channel<M>,
    ops: &Slab<Op<M>>,
    path: PathId,
) -> Option<Plan> {
    let may_go = !channel.out.is_awaiting_status()
        && channel.is_within_reorder_window()
        && channel.end.failed.is_none();
    if !may_go || channel.paths.path_state(path)?.held.is_some() || !channel.paths.sends_by(path) {
        return None;
    }
    let plan = plan_new(channel, ops, path)?;
    (plan.payload > channel.paths.path_state(path)?.path.payload_max as u64).then_some(plan)
}

/// The plan, unless another path should rather take the frame.
#[cold]
fn choose<M: Clone>(plan: Plan, channel: &Channel<M>, (path, rest): (PathId, u64)) -> Option<Plan> {
    let state = channel.paths.path_state(path)?;
    if !state.is_open() || !channel.paths.prefers(path, plan.body(), rest.max(plan.body())) {
        return None;
    }
    let mut plan = numbered(plan, channel, state.path.is_acknowledged());
    if plan.payload >= IMMEDIATE_ACK_BYTES {
        // Only acknowledgements show which frames have arrived by which path.
        plan.flags |= flag::WANT_ACK;
    }
    Some(plan)
}

/// Payload from which on a frame asks for an acknowledgement while there are several paths, in
/// bytes.
const IMMEDIATE_ACK_BYTES: u64 = 8 << 10;

/// The plan with the number of its first byte. Unless the path needs no acknowledgements
/// (`is_acked`), the plan asks for one once [`ACK_INTERVAL_BYTES_MAX`] bytes have been sent since
/// the last request, and at every [`ACK_INTERVAL_FRAMES`]th retained frame.
#[inline]
pub(super) fn numbered<M: Clone>(mut plan: Plan, channel: &Channel<M>, is_acked: bool) -> Plan {
    plan.sequence = channel.out.next();
    if is_acked {
        let many = channel.out.retained() % ACK_INTERVAL_FRAMES == ACK_INTERVAL_FRAMES - 1;
        if many
            || channel.acknowledgements.bytes_since_request + plan.body() >= ACK_INTERVAL_BYTES_MAX
        {
            plan.flags |= flag::WANT_ACK;
        }
    }
    plan
}

/// Whether the last frame of an operation asks for the acknowledgement without which the operation
/// is not done.
#[inline]
fn ends_with_ack<M>(op: &Op<M>, path: &PathProperties, payload: u64) -> bool {
    let is_borrowed = op.is_borrowed || (!path.lossless && payload > path.copy_max as u64);
    op.level == CompletionLevel::DeliveryComplete || is_borrowed
}

#[inline]
fn plan_first<M: Memory>(channel: &Channel<M>, path: &PathProperties, id: u32, op: &Op<M>) -> Plan {
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
    let head = KindHeader::Message { tag: tag.unwrap_or(0), data: data.unwrap_or(0), long };
    let kind = if tag.is_some() { Kind::Tagged } else { Kind::Message };
    Plan::new(kind, flags, head, 0, payload)
}

fn plan_rest<M: Memory>(path: &PathProperties, id: u32, op: &Op<M>) -> Plan {
    let OpKind::Message { recv, .. } = op.kind else {
        unreachable!("only messages have further pieces")
    };
    let offset = op.sent;
    let (kind, head, end) = if offset < op.ahead {
        (Kind::Ahead, KindHeader::Ahead { send: id, offset }, op.ahead)
    } else {
        (Kind::Data, KindHeader::Data { recv, offset }, op.limit)
    };
    let payload = (end - offset).min(path.payload_max as u64);
    let is_last = offset + payload == op.total;
    let flags = if is_last && ends_with_ack(op, path, payload) { flag::WANT_ACK } else { 0 };
    Plan::new(kind, flags, head, offset, payload)
}

/// Bytes that follow a first piece without a grant, if `left` bytes of the message and `credit`
/// remain after it. The result is at most half of the credit, so that the next message, which may
/// be short, finds credit too. It is 0 if it would not fill a frame, unless it covers all that is
/// left.
fn ahead(path: &PathProperties, credit: u64, left: u64) -> u32 {
    let bytes = left.min(credit / 2);
    let is_worth_it = path.ahead && (bytes == left || bytes >= path.payload_max as u64);
    if is_worth_it { bytes as u32 } else { 0 }
}

fn plan_remote<M: Memory>(path: &PathProperties, id: u32, op: &Op<M>) -> Plan {
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
            let head =
                KindHeader::Write { op: id, total, key: *key, offset, data: data.unwrap_or(0) };
            Plan::new(Kind::Write, flags, head, op.sent, payload)
        }
        OpKind::Read { key, offset, .. } => {
            let head = KindHeader::Read { op: id, key: *key, offset: *offset, length: op.total };
            Plan::bare(Kind::Read, 0, head)
        }
        OpKind::Atomic { request, .. } => {
            let wants = request.fetch as u8 | (request.compare as u8) << 1;
            let head = KindHeader::Atomic {
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

fn plan_reply(path: &PathProperties, kind: Kind, op: u32, sent: u64, total: u64) -> Plan {
    if kind == Kind::AtomicReply {
        // An atomic reply is never split: its head has no offset field, and the results of atomic
        // operations are short.
        return Plan::new(kind, 0, KindHeader::AtomicReply { op }, 0, total);
    }
    let payload = (total - sent).min(path.payload_max as u64);
    Plan::new(kind, 0, KindHeader::ReadData { op, offset: sent }, sent, payload)
}

/// The memory that holds the payload of a planned frame.
#[inline]
pub(super) fn planned_memory<'a, M: Clone>(
    channel: &'a Channel<M>,
    ops: &'a Slab<Op<M>>,
    plan: &Plan,
) -> Option<&'a M> {
    match plan.origin {
        Origin::New => item_memory(channel, ops),
        Origin::Retransmission => channel.out.first_lost()?.memory.as_ref(),
        Origin::Control => None,
    }
}

/// The memory that holds the payload of the front item of the queue.
#[inline]
pub(super) fn item_memory<'a, M>(channel: &'a Channel<M>, ops: &'a Slab<Op<M>>) -> Option<&'a M> {
    match channel.queue.front()? {
        Item::First(id) | Item::Rest(id) | Item::Remote(id) => ops.at(*id).map(|op| &op.memory),
        Item::Reply { memory, .. } => Some(memory),
        Item::Control(..) => None,
    }
}
