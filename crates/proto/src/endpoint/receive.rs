//! Receives frames: where their payload belongs, and what is complete once the payload is there.
//!
//! A frame is delivered when all frames before it have been delivered. Then its payload moves from
//! the path on which it arrives straight to its destination. A frame that arrives early goes into a
//! reorder buffer. If a payload does not arrive whole (its path breaks, its checksum does not
//! match), its retransmission goes to the same destination, by whatever path it comes.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::channel::{Channel, QUEUE_MAX};
use super::incoming::AnnouncedPieces;
use super::{Action, Endpoint, Fault, Memory, Op, OpKind, PayloadDestination, Peer};
use crate::channel::{ArrivalOrder, BufferedFrame, PathId};
use crate::wire::Malformed;
use crate::wire::frame::{Header, Kind, flag};
use crate::wire::kind_header::KindHeader;

/// The frame whose turn it is and whose payload is arriving.
#[derive(Clone, Copy)]
pub(super) struct ArrivingFrame {
    frame: Frame,
    place: PayloadDestination,
    /// The path by which the payload arrives; `None` if the payload has to be retransmitted.
    path: Option<PathId>,
}

/// A frame or fragment that arrives early and is being written into a reorder buffer.
#[derive(Clone, Copy)]
pub(super) struct OutOfOrderArrival {
    pub path: PathId,
    /// The number of the frame's first byte.
    pub frame: u64,
    start: u64,
    end: u64,
}

/// What is arriving from one peer and is not complete.
#[derive(Default)]
pub(super) struct Arrivals {
    /// The frame whose turn it is and whose payload is arriving.
    pub current: Option<ArrivingFrame>,
    /// Early frames and fragments that are written into reorder buffers, at most one per path.
    pub out_of_order: Vec<OutOfOrderArrival>,
    /// Messages of which announced pieces are still to come, by the sender's operation number. Each
    /// holds credit for at least one byte, so the credit bounds their number.
    pub announced: BTreeMap<u32, AnnouncedPieces>,
}

/// The parts of a frame that its delivery needs.
#[derive(Clone, Copy)]
struct Frame {
    kind: Kind,
    flags: u8,
    head: KindHeader,
    start: u64,
    /// The bytes of head and payload.
    whole: u64,
    payload: u64,
}

/// The path number of frames that come out of a reorder buffer: see
/// [`Endpoint::handle_reassembled`].
pub const REASSEMBLED: PathId = PathId(u8::MAX);

/// The flags that belong to one transmission of a frame, not to the frame.
const PER_TRANSMISSION_FLAGS: u8 = flag::CHECKED | flag::WANT_ACK;

/// The most corrupt ranges that may wait for retransmission. A path that corrupts more would
/// deliver little.
const CORRUPT_RANGES_MAX: usize = 64;

impl OutOfOrderArrival {
    pub fn range(&self) -> (u64, u64) {
        (self.start, self.end)
    }
}

impl ArrivingFrame {
    /// Records that the driver has refused `op`: if the arriving frame is a write of `op`, its
    /// payload counts as discarded, and no completion is reported.
    pub fn handle_refused(&mut self, op: u32) {
        if matches!(self.frame.head, KindHeader::Write { op: mine, .. } if mine == op) {
            self.place = PayloadDestination::Discard;
        }
    }

    /// Records that nothing more arrives by `path`. Returns the byte range of this frame if it was
    /// arriving by `path`.
    pub fn handle_break(&mut self, path: PathId) -> Option<(u64, u64)> {
        self.path.take_if(|mine| *mine == path)?;
        Some((self.frame.start, self.frame.start + self.frame.whole))
    }

    /// Where the payload belongs when it is retransmitted.
    fn destination_again(&self) -> PayloadDestination {
        match self.place {
            PayloadDestination::NewUnexpected { size: 0, .. } => PayloadDestination::Discard,
            PayloadDestination::NewUnexpected { store, .. } => {
                PayloadDestination::Unexpected { store, at: 0 }
            }
            place => place,
        }
    }
}

impl<M: Memory> Endpoint<M> {
    /// Processes a frame's header and head (at least [`KindHeader::size`] bytes), and returns where
    /// its payload belongs. Once the payload is there, the driver must call
    /// [`Self::handle_payload`], and before this call it must not pass in another frame of the same
    /// path.
    ///
    /// # Errors
    /// [`Fault`] if the frame breaks the protocol: the driver must close the link and call
    /// [`Self::fail`].
    #[inline(always)]
    pub fn handle_frame(
        &mut self,
        peer: Peer,
        path: PathId,
        header: &Header,
        head: &[u8],
    ) -> Result<PayloadDestination, Fault> {
        let head_size = KindHeader::size(header.kind, header.flags);
        let (payload, _) = header.payload(head_size).map_err(fault)?;
        let head = KindHeader::parse(header.kind, header.flags, head).map_err(fault)?;
        let channel = &mut self.channels[peer.0 as usize];
        if channel.end.failed.is_some() {
            return Err(Fault("a peer that was given up still sends"));
        }
        channel.credit.handle_released(header.credit);
        if channel.note_heard_by(path) {
            self.mark_busy(peer);
        }
        let channel = &mut self.channels[peer.0 as usize];
        if header.delivered > channel.out.next() {
            return Err(Fault("a peer confirms bytes that were never sent"));
        }
        if !header.kind.is_numbered() {
            self.handle_delivered(peer, header.delivered, header.sequence);
            self.handle_control(peer, path, header, &head)?;
            return Ok(PayloadDestination::Discard);
        }
        let whole = head_size as u64 + payload;
        let frame = Frame {
            kind: header.kind,
            flags: header.flags & !flag::CHECKED,
            head,
            start: header.sequence,
            whole,
            payload,
        };
        if let KindHeader::Fragment { .. } = head {
            self.handle_delivered(peer, header.delivered, header.sequence);
            return self.place_fragment(peer, path, &frame);
        }
        match self.arrival_order(peer, frame.start, whole)? {
            ArrivalOrder::InOrder => {
                if let KindHeader::Refused { op, error } = head {
                    // The refusal precedes the header's `delivered`, which may count the refused
                    // bytes as delivered.
                    self.end_refused(peer, op, error);
                }
                self.handle_delivered(peer, header.delivered, header.sequence);
                self.deliver_frame(peer, path, frame)
            }
            ArrivalOrder::Duplicate => {
                self.handle_delivered(peer, header.delivered, header.sequence);
                self.note_duplicate(peer, frame.start, frame.start + whole);
                Ok(PayloadDestination::Discard)
            }
            ArrivalOrder::OutOfOrder => {
                self.handle_delivered(peer, header.delivered, header.sequence);
                let flags = frame.flags & !PER_TRANSMISSION_FLAGS;
                let buffered = BufferedFrame::new(frame.kind, flags, whole as u32);
                let (start, bytes) = (frame.start, frame.start..frame.start + whole);
                self.buffer_frame(peer, path, start, buffered, bytes, head_size as u32)
            }
        }
    }

    #[inline(always)]
    fn arrival_order(&self, peer: Peer, start: u64, bytes: u64) -> Result<ArrivalOrder, Fault> {
        let end = start.checked_add(bytes).ok_or(Fault("a channel beyond its end"))?;
        self.channels[peer.0 as usize].into.arrival_order(&(start..end)).map_err(fault)
    }

    /// Starts the delivery of the frame whose turn it is: the frame gets its destination, or the
    /// destination of its first transmission if this did not arrive whole.
    #[inline(always)]
    fn deliver_frame(
        &mut self,
        peer: Peer,
        path: PathId,
        frame: Frame,
    ) -> Result<PayloadDestination, Fault> {
        let Some(mut arriving) = self.channels[peer.0 as usize].arrivals.current.take() else {
            let place = self.place(peer, &frame)?;
            let arriving = ArrivingFrame { frame, place, path: Some(path) };
            self.channels[peer.0 as usize].arrivals.current = Some(arriving);
            return Ok(place);
        };
        let was = &arriving.frame;
        let known = (was.kind, was.head, was.whole);
        if known != (frame.kind, frame.head, frame.whole) {
            return Err(Fault("a frame comes again as another"));
        }
        if let Some(other) = arriving.path.filter(|&other| other != path) {
            self.push_action(Action::DiscardPayload { peer, path: other });
        }
        arriving.path = Some(path);
        let place = arriving.destination_again();
        self.channels[peer.0 as usize].arrivals.current = Some(arriving);
        Ok(place)
    }

    fn place_fragment(
        &mut self,
        peer: Peer,
        path: PathId,
        fragment: &Frame,
    ) -> Result<PayloadDestination, Fault> {
        let KindHeader::Fragment { kind, flags, offset, whole } = fragment.head else {
            unreachable!("only fragments are placed as such")
        };
        let first = fragment.start.checked_sub(offset as u64);
        let first = first.ok_or(Fault("a fragment from before the beginning"))?;
        let is_inside = fragment.payload > 0 && fragment.payload <= (whole - offset) as u64;
        if !is_inside {
            return Err(Fault("a fragment longer than its frame"));
        }
        if self.arrival_order(peer, fragment.start, fragment.payload)? == ArrivalOrder::Duplicate {
            self.note_duplicate(peer, fragment.start, fragment.start + fragment.payload);
            return Ok(PayloadDestination::Discard);
        }
        if first < self.channels[peer.0 as usize].into.delivered() {
            return Err(Fault("a fragment of what has been taken in"));
        }
        let range = fragment.start..fragment.start + fragment.payload;
        self.buffer_frame(
            peer,
            path,
            first,
            BufferedFrame::new(kind, flags & !PER_TRANSMISSION_FLAGS, whole),
            range,
            offset,
        )
    }

    /// Records that bytes arrived a second time. The peer would not have retransmitted them if it
    /// knew that they had arrived, so an acknowledgement or a report of ranges is queued.
    fn note_duplicate(&mut self, peer: Peer, start: u64, end: u64) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.into.handle_duplicate(&(start..end)) {
            channel.repairs.owe_sack(0, None);
            self.mark_busy(peer);
        } else {
            channel.owed_ack.is_wanted = true;
        }
    }

    /// Directs bytes `range` of the frame that begins at byte `frame` into a reorder buffer, if the
    /// reorder window has capacity.
    fn buffer_frame(
        &mut self,
        peer: Peer,
        path: PathId,
        frame: u64,
        buffered: BufferedFrame,
        range: core::ops::Range<u64>,
        at: u32,
    ) -> Result<PayloadDestination, Fault> {
        let channel = &mut self.channels[peer.0 as usize];
        // A part of this range has arrived. The rest comes as the sender has cut it since, so these
        // bytes are an older copy and must not overwrite what has arrived.
        if channel.into.has_some(&range) {
            if channel.into.handle_duplicate(&range) {
                channel.repairs.owe_sack(0, None);
                self.mark_busy(peer);
            }
            return Ok(PayloadDestination::Discard);
        }
        if !channel.into.reserve(frame, buffered).map_err(fault)? {
            let (start, end) =
                channel.repairs.dropped_out_of_order.unwrap_or((range.start, range.end));
            channel.repairs.dropped_out_of_order =
                Some((start.min(range.start), end.max(range.end)));
            return Ok(PayloadDestination::Discard);
        }
        // If bytes of this range are also arriving by another path, these must not overwrite what
        // this path brings. Bytes that this path does not bring must be retransmitted, because the
        // sender takes them for sent.
        let is_same =
            |other: &mut OutOfOrderArrival| other.start < range.end && range.start < other.end;
        let older: Vec<OutOfOrderArrival> =
            channel.arrivals.out_of_order.extract_if(.., is_same).collect();
        channel.arrivals.out_of_order.push(OutOfOrderArrival {
            path,
            frame,
            start: range.start,
            end: range.end,
        });
        for OutOfOrderArrival { path, start, end, .. } in older {
            self.push_action(Action::DiscardPayload { peer, path });
            let is_brought = range.start <= start && end <= range.end;
            if !is_brought {
                self.must_request_retransmission(peer, start, end);
            }
        }
        Ok(PayloadDestination::OutOfOrder { frame, whole: buffered.whole, at })
    }

    /// Processes a control frame.
    fn handle_control(
        &mut self,
        peer: Peer,
        path: PathId,
        header: &Header,
        head: &KindHeader,
    ) -> Result<(), Fault> {
        let (channel, now) = (&mut self.channels[peer.0 as usize], self.now);
        let sent = channel.out.next();
        let is_sane = |start: u64, end: u64| start < end && end <= sent;
        match *head {
            KindHeader::AddressAdvertisement(address) => {
                self.push_action(Action::AddressAdvertisement { peer, address });
                return Ok(());
            }
            // An older status request may arrive later, by a slower path.
            KindHeader::StatusRequest { number } => {
                // The answer takes the path of the request: a peer measures paths of datagrams by
                // the answer, and with several paths the answer shows that the path works.
                channel.repairs.owe_sack(number, Some(path));
                // The peer may not have received the reports of corrupt ranges either.
                channel.repairs.repeat_corrupt();
            }
            KindHeader::Sack { answers, ranges } => {
                for (start, bytes) in ranges {
                    let end = start.saturating_add(bytes as u64);
                    let Channel { out, paths, .. } = &mut *channel;
                    if is_sane(start, end) {
                        out.handle_arrived(start, end, |frame| {
                            if let Some(state) = paths.get_mut(frame.path.0 as usize) {
                                state.handle_confirmed(now, frame);
                            }
                        });
                    }
                }
                channel.handle_status_reply(now, answers);
                self.process_flow_acks(peer);
            }
            KindHeader::Nack { start, end } if is_sane(start, end) => {
                let Channel { out, paths, .. } = &mut *channel;
                out.handle_corrupt(start, end, |frame| {
                    if let Some(state) = paths.get_mut(frame.path.0 as usize) {
                        state.handle_lost(frame);
                    }
                });
            }
            KindHeader::Empty => {
                if header.flags & flag::WANT_ACK != 0 {
                    // The request for an acknowledgement may have overtaken the bytes that it is
                    // about.
                    channel.owed_ack.wanted_at = channel.owed_ack.wanted_at.max(header.sequence);
                    channel.owed_ack.is_wanted |= channel.into.delivered() >= header.sequence;
                }
                self.schedule_ack(peer);
                return Ok(());
            }
            _ => return Err(Fault("a control frame about bytes that were never sent")),
        }
        self.mark_busy(peer);
        Ok(())
    }

    fn place(&mut self, peer: Peer, frame: &Frame) -> Result<PayloadDestination, Fault> {
        let (head, payload) = (&frame.head, frame.payload);
        let is_request = matches!(
            head,
            KindHeader::Write { .. } | KindHeader::Read { .. } | KindHeader::Atomic { .. }
        );
        if is_request && self.channels[peer.0 as usize].queue.len() >= QUEUE_MAX {
            return Err(Fault("more requests than anybody has in flight"));
        }
        Ok(match *head {
            KindHeader::Message { tag, data, long } => {
                let data = (frame.flags & flag::CQ_DATA != 0).then_some(data);
                self.place_message(peer, frame.kind == Kind::Tagged, tag, data, long, payload)?
            }
            KindHeader::Data { recv, offset } => self.place_data(peer, recv, offset, payload)?,
            KindHeader::Ahead { send, offset } => self.place_ahead(peer, send, offset, payload)?,
            KindHeader::Write { op, key, offset, .. } => {
                PayloadDestination::Region { op, key, offset }
            }
            KindHeader::ReadData { op, offset } => self.place_reply(peer, op, offset, payload)?,
            KindHeader::AtomicReply { op } => self.place_reply(peer, op, 0, payload)?,
            KindHeader::Atomic { wants, length, .. } => {
                let parts = if wants & 2 != 0 { 2 } else { 1 };
                if payload != 0 && payload != parts * length as u64 {
                    return Err(Fault("an atomic operation has the wrong number of operands"));
                }
                PayloadDestination::Scratch
            }
            KindHeader::Grant { send, limit, .. } if payload == 0 => {
                let op = self.waiting_message(peer, send)?;
                if limit <= op.limit || limit > op.total {
                    return Err(Fault("a grant that grants nothing, or too much"));
                }
                PayloadDestination::Discard
            }
            KindHeader::Pulled { send } if payload == 0 => {
                let op = self.waiting_message(peer, send)?;
                if op.sent < op.limit {
                    return Err(Fault("a message is pulled and granted at once"));
                }
                PayloadDestination::Discard
            }
            KindHeader::Goodbye if self.channels[peer.0 as usize].end.has_left => {
                return Err(Fault("a peer says goodbye twice"));
            }
            _ if payload > 0 => return Err(Fault("a control frame has a payload")),
            _ => PayloadDestination::Discard,
        })
    }

    /// The operation of message `send`, if a frame of `peer` may refer to it: the peer must have
    /// received its first frame, and the message must have bytes left to send.
    fn waiting_message(&self, peer: Peer, send: u32) -> Result<&Op<M>, Fault> {
        let op = self.ops.at(send).filter(|op| op.peer == peer);
        let waits = |op: &&Op<M>| {
            matches!(op.kind, OpKind::Message { .. }) && op.is_begun && op.sent < op.total
        };
        op.filter(waits).ok_or(Fault("an answer to no message that waits for one"))
    }

    /// Records that the payload of the last frame by `path` is at its destination.
    #[inline(always)]
    pub fn handle_payload(&mut self, peer: Peer, path: PathId) {
        let channel = &mut self.channels[peer.0 as usize];
        if !channel.arrivals.out_of_order.is_empty() && self.end_out_of_order(peer, path) {
            return;
        }
        let channel = &mut self.channels[peer.0 as usize];
        // In all other cases, the frame was a control frame, or a duplicate, or another path has
        // delivered it meanwhile.
        if let Some(ArrivingFrame { frame, place, path: Some(by) }) = channel.arrivals.current
            && by == path
        {
            channel.arrivals.current = None;
            self.end_frame(peer, frame, place);
        }
        self.schedule_ack(peer);
    }

    #[inline(always)]
    fn end_frame(&mut self, peer: Peer, frame: Frame, place: PayloadDestination) {
        let channel = &mut self.channels[peer.0 as usize];
        channel.into.deliver(frame.whole);
        // Only now may the acknowledgement be sent: a frame sent while the payload was arriving
        // could not confirm it.
        channel.owed_ack.is_wanted |= frame.flags & flag::WANT_ACK != 0;
        channel.owed_ack.handle_delivered(channel.into.delivered());
        channel.end.has_left |= frame.kind == Kind::Goodbye;
        let taken = channel.into.delivered();
        if let Some((start, end)) = channel
            .repairs
            .dropped_out_of_order
            .take_if(|dropped_out_of_order| dropped_out_of_order.0 <= taken)
        {
            // The sender takes the dropped bytes for sent, and would never ask after them on a
            // lossless path.
            self.must_request_retransmission(peer, start, end);
        }
        let channel = &mut self.channels[peer.0 as usize];
        if channel.into.has_out_of_order() {
            // The frame may have arrived on this path while a part of it was in a reorder buffer.
            self.release_buffered(peer, frame.start);
        }
        let payload = frame.payload;
        match frame.head {
            KindHeader::Message { long, .. } => self.end_message(peer, place, payload, long),
            KindHeader::Data { recv, .. } => self.end_data(recv, place),
            KindHeader::Ahead { send, .. } => self.end_ahead(peer, send, place, payload),
            KindHeader::Grant { send, recv, limit } => {
                self.handle_grant(peer, send, recv, limit, frame.flags & flag::TRUNCATED != 0);
            }
            KindHeader::Pulled { send } => self.complete_flushed(peer, send),
            KindHeader::Write { .. } if place == PayloadDestination::Discard => (),
            KindHeader::Write { data, total, .. } => self.end_write(peer, frame.flags, data, total),
            KindHeader::Read { op, key, offset, length } => {
                self.push_action(Action::Serve { peer, op, key, offset, length });
            }
            KindHeader::ReadData { op, .. } => self.end_reply(peer, op, payload),
            KindHeader::AtomicReply { op } => self.end_reply(peer, op, payload),
            KindHeader::Atomic { .. } => self.end_atomic(peer, frame.head),
            _ => (),
        }
        self.handle_early_ack(peer);
    }

    /// Records that what arrived early by `path` is in its buffer. Returns false if nothing was
    /// arriving early by `path`.
    fn end_out_of_order(&mut self, peer: Peer, path: PathId) -> bool {
        let channel = &mut self.channels[peer.0 as usize];
        let Some(place) =
            channel.arrivals.out_of_order.iter().position(|out_of_order| out_of_order.path == path)
        else {
            return false;
        };
        let OutOfOrderArrival { frame, start, end, .. } =
            channel.arrivals.out_of_order.swap_remove(place);
        channel.into.handle_buffered(frame, start..end);
        channel.repairs.owe_sack(0, None);
        self.mark_busy(peer);
        true
    }

    /// The number of the first byte of the reassembled frame whose turn has come. The driver must
    /// pass the frame's buffer to [`Self::handle_reassembled`]. The driver must call this function
    /// after every [`Self::handle_payload`], until it returns `None`.
    #[inline]
    pub fn next_reassembled(&self, peer: Peer) -> Option<u64> {
        let channel = &self.channels[peer.0 as usize];
        channel
            .into
            .next_reassembled()
            .map(|(frame, _)| frame)
            .filter(|_| channel.end.failed.is_none())
    }

    /// Processes the frame that [`Self::next_reassembled`] named; `body` holds its head and
    /// payload. Returns where the payload belongs, and the length of the head in bytes. Then the
    /// driver must call [`Self::handle_payload`], as for every frame, with the path
    /// [`REASSEMBLED`].
    ///
    /// # Errors
    /// [`Fault`] if the frame breaks the protocol: the driver must close the link and call
    /// [`Self::fail`].
    pub fn handle_reassembled(
        &mut self,
        peer: Peer,
        body: &[u8],
    ) -> Result<(PayloadDestination, usize), Fault> {
        let channel = &mut self.channels[peer.0 as usize];
        let (start, BufferedFrame { kind, flags, whole, .. }) =
            channel.into.next_reassembled().ok_or(Fault("no frame is buffered"))?;
        // The sender waits for the acknowledgement that closes the gap.
        channel.owed_ack.is_wanted = true;
        self.release_buffered(peer, start);
        let head_size = KindHeader::size(kind, flags);
        let head = KindHeader::parse(kind, flags, body).map_err(fault)?;
        let payload = (whole as u64).checked_sub(head_size as u64);
        let payload = payload.ok_or(Fault("a frame is shorter than its head"))?;
        if let KindHeader::Refused { op, error } = head {
            self.end_refused(peer, op, error);
        }
        let frame = Frame { kind, flags, head, start, whole: whole as u64, payload };
        Ok((self.deliver_frame(peer, REASSEMBLED, frame)?, head_size))
    }

    /// Records that the payload that was arriving by `path` is corrupt, and requests its
    /// retransmission. Returns false if too many ranges are corrupt: the driver should close the
    /// path.
    pub fn handle_corrupt(&mut self, peer: Peer, path: PathId) -> bool {
        let channel = &mut self.channels[peer.0 as usize];
        let mut range = None;
        if let Some(place) =
            channel.arrivals.out_of_order.iter().position(|out_of_order| out_of_order.path == path)
        {
            let out_of_order = channel.arrivals.out_of_order.swap_remove(place);
            range = Some((out_of_order.start, out_of_order.end));
        } else if let Some(arriving) = &mut channel.arrivals.current
            && arriving.path == Some(path)
        {
            arriving.path = None;
            range = Some((arriving.frame.start, arriving.frame.start + arriving.frame.whole));
        }
        range.is_none_or(|(start, end)| self.request_retransmission(peer, start, end))
    }

    /// Records that a frame has arrived whose header is intact and whose payload is corrupt, and
    /// requests its retransmission. The driver has not passed the frame to [`Self::handle_frame`].
    /// Returns false if too many ranges are corrupt: the driver should close the path.
    pub fn handle_corrupt_frame(&mut self, peer: Peer, header: &Header) -> bool {
        let head_size = KindHeader::size(header.kind, header.flags);
        let numbered_head = if header.kind == Kind::Fragment { 0 } else { head_size as u64 };
        match header.payload(head_size) {
            Ok((payload, _)) if header.kind.is_numbered() => {
                let end = header.sequence.saturating_add(numbered_head + payload);
                self.request_retransmission(peer, header.sequence, end)
            }
            _ => true,
        }
    }

    /// Requests the retransmission of bytes `start..end`. If [`CORRUPT_RANGES_MAX`] ranges wait
    /// already, the last of them is extended to include these bytes.
    #[cold]
    pub(super) fn must_request_retransmission(&mut self, peer: Peer, start: u64, end: u64) {
        if self.request_retransmission(peer, start, end) {
            return;
        }
        if let Some(last) = self.channels[peer.0 as usize].repairs.corrupt.last_mut() {
            *last = (last.0.min(start), last.1.max(end), false);
        }
        self.mark_busy(peer);
    }

    fn request_retransmission(&mut self, peer: Peer, start: u64, end: u64) -> bool {
        let Channel { repairs, into, .. } = &mut self.channels[peer.0 as usize];
        let corrupt = &mut repairs.corrupt;
        corrupt.retain(|&(start, end, _)| !into.has(&(start..end)));
        if into.has(&(start..end)) {
            return true;
        }
        if corrupt.len() >= CORRUPT_RANGES_MAX {
            return false;
        }
        corrupt.retain(|&(other, _, _)| other != start);
        corrupt.push((start, end, false));
        self.mark_busy(peer);
        true
    }
}

fn fault(bad: Malformed) -> Fault {
    Fault(bad.0)
}
