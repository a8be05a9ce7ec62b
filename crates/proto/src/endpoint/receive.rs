//! Frames in: where their payload belongs, and what is complete once it is there.
//!
//! A frame is taken in when all before it has been. Then its payload goes straight to its place, from the path on which it
//! comes; what comes early is kept. A payload that does not end well (its path breaks, its check fails) finds the same place
//! again when it comes again, by whatever path.

use alloc::vec::Vec;

use super::channel::{Channel, QUEUE_MAX};
use super::{Action, Endpoint, Fault, Memory, Op, OpKind, PayloadDestination, Peer};
use crate::channel::{ArrivalOrder, BufferedFrame, PathId};
use crate::wire::Malformed;
use crate::wire::frame::{Header, Kind, flag};
use crate::wire::kind_header::KindHeader;

/// The frame that is being taken in.
#[derive(Clone, Copy)]
pub(super) struct ArrivingFrame {
    frame: Frame,
    place: PayloadDestination,
    /// By which its payload comes; none: it has to come again.
    path: Option<PathId>,
}

/// A frame or fragment that is on its way into what is kept.
#[derive(Clone, Copy)]
pub(super) struct OutOfOrderArrival {
    pub path: PathId,
    /// First byte of the frame.
    pub frame: u64,
    start: u64,
    end: u64,
}

/// What matters of a frame that is taken in.
#[derive(Clone, Copy)]
struct Frame {
    kind: Kind,
    flags: u8,
    head: KindHeader,
    start: u64,
    /// Bytes of head and payload.
    whole: u64,
    payload: u64,
}

/// The path of frames that were kept: see [`Endpoint::handle_reassembled`].
pub const REASSEMBLED: PathId = PathId(u8::MAX);

/// Flags of one sending of a frame, not of the frame.
const PER_TRANSMISSION_FLAGS: u8 = flag::CHECKED | flag::WANT_ACK;

/// Ranges that may stand corrupt at once: on a path that spoils more, little would come through.
const CORRUPT_RANGES_MAX: usize = 64;

impl OutOfOrderArrival {
    pub fn range(&self) -> (u64, u64) {
        (self.start, self.end)
    }
}

impl ArrivingFrame {
    /// The driver has refused `op`: if that is what arrives, nobody is told of it.
    pub fn handle_refused(&mut self, op: u32) {
        if matches!(self.frame.head, KindHeader::Write { op: mine, .. } if mine == op) {
            self.place = PayloadDestination::Discard;
        }
    }

    /// Nothing more comes by `path`: the bytes that will not come, if these came by it.
    pub fn handle_break(&mut self, path: PathId) -> Option<(u64, u64)> {
        self.path.take_if(|mine| *mine == path)?;
        Some((self.frame.start, self.frame.start + self.frame.whole))
    }

    /// Where the payload belongs when it comes again.
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
    /// Takes in a frame's header and head (at least [`KindHeader::size`] bytes), says where its payload belongs. When the
    /// payload is there, call [`Self::handle_payload`]; before that, no other frame by this path.
    ///
    /// # Errors
    /// If the frame breaks the protocol: close the link, call [`Self::fail`].
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
        if channel.failed.is_some() {
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
                    // Before `delivered`, which may count the refused bytes as taken in.
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

    /// The frame whose turn it is: it gets its place, or the one it had when it did not end well.
    #[inline(always)]
    fn deliver_frame(
        &mut self,
        peer: Peer,
        path: PathId,
        frame: Frame,
    ) -> Result<PayloadDestination, Fault> {
        let Some(mut arriving) = self.channels[peer.0 as usize].arriving.take() else {
            let place = self.place(peer, &frame)?;
            let arriving = ArrivingFrame { frame, place, path: Some(path) };
            self.channels[peer.0 as usize].arriving = Some(arriving);
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
        self.channels[peer.0 as usize].arriving = Some(arriving);
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

    /// Bytes that are here have come once more: the peer would not send them again if it knew.
    fn note_duplicate(&mut self, peer: Peer, start: u64, end: u64) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.into.handle_duplicate(&(start..end)) {
            channel.owe_sack(0, None);
            self.mark_busy(peer);
        } else {
            channel.ack_wanted = true;
        }
    }

    /// Bytes `range` of the frame that begins at byte `frame` are kept for later, if there is room.
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
        // The rest of what is here in part comes as the sender has cut it since: this is an old copy, and must not spoil it.
        if channel.into.has_some(&range) {
            if channel.into.handle_duplicate(&range) {
                channel.owe_sack(0, None);
                self.mark_busy(peer);
            }
            return Ok(PayloadDestination::Discard);
        }
        if !channel.into.reserve(frame, buffered).map_err(fault)? {
            let (start, end) = channel.dropped_out_of_order.unwrap_or((range.start, range.end));
            channel.dropped_out_of_order = Some((start.min(range.start), end.max(range.end)));
            return Ok(PayloadDestination::Discard);
        }
        // Whatever of it is on its way by another path must not spoil what this one brings. What this one does not bring of it
        // has to come again: the sender takes it for sent.
        let is_same =
            |other: &mut OutOfOrderArrival| other.start < range.end && range.start < other.end;
        let older: Vec<OutOfOrderArrival> = channel.out_of_order.extract_if(.., is_same).collect();
        channel.out_of_order.push(OutOfOrderArrival {
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

    /// What is no part of the channel.
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
            // An older status request may come later, by a slower path.
            KindHeader::StatusRequest { number } => {
                // The asker measures datagrams, and of several paths that one lives.
                channel.owe_sack(number, Some(path));
                // Who asks may not have heard of what was corrupt either.
                channel.corrupt.iter_mut().for_each(|(_, _, is_reported)| *is_reported = false);
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
                    // It may have overtaken what it is about.
                    channel.ack_when_delivered = channel.ack_when_delivered.max(header.sequence);
                    channel.ack_wanted |= channel.into.delivered() >= header.sequence;
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
            KindHeader::Goodbye if self.channels[peer.0 as usize].has_left => {
                return Err(Fault("a peer says goodbye twice"));
            }
            _ if payload > 0 => return Err(Fault("a control frame has a payload")),
            _ => PayloadDestination::Discard,
        })
    }

    /// A peer may only speak of messages that it can have heard of.
    fn waiting_message(&self, peer: Peer, send: u32) -> Result<&Op<M>, Fault> {
        let op = self.ops.at(send).filter(|op| op.peer == peer);
        let waits = |op: &&Op<M>| {
            matches!(op.kind, OpKind::Message { .. }) && op.is_begun && op.sent < op.total
        };
        op.filter(waits).ok_or(Fault("an answer to no message that waits for one"))
    }

    /// The payload of the last frame by `path` is in its place.
    #[inline(always)]
    pub fn handle_payload(&mut self, peer: Peer, path: PathId) {
        let channel = &mut self.channels[peer.0 as usize];
        if !channel.out_of_order.is_empty() && self.end_out_of_order(peer, path) {
            return;
        }
        let channel = &mut self.channels[peer.0 as usize];
        // Otherwise it was a signal, or known already, or it has come by another path meanwhile.
        if let Some(ArrivingFrame { frame, place, path: Some(by) }) = channel.arriving
            && by == path
        {
            channel.arriving = None;
            self.end_frame(peer, frame, place);
        }
        self.schedule_ack(peer);
    }

    #[inline(always)]
    fn end_frame(&mut self, peer: Peer, frame: Frame, place: PayloadDestination) {
        let channel = &mut self.channels[peer.0 as usize];
        channel.into.deliver(frame.whole);
        // Not before: a frame sent while the payload was arriving could not confirm it.
        channel.ack_wanted |= frame.flags & flag::WANT_ACK != 0;
        if channel.ack_when_delivered != 0 && channel.into.delivered() >= channel.ack_when_delivered
        {
            (channel.ack_wanted, channel.ack_when_delivered) = (true, 0);
        }
        channel.has_left |= frame.kind == Kind::Goodbye;
        let taken = channel.into.delivered();
        if let Some((start, end)) = channel
            .dropped_out_of_order
            .take_if(|dropped_out_of_order| dropped_out_of_order.0 <= taken)
        {
            // The sender takes it for sent, and by a path that loses nothing it would never ask.
            self.must_request_retransmission(peer, start, end);
        }
        let channel = &mut self.channels[peer.0 as usize];
        if channel.into.has_out_of_order() {
            // It may have come this way while a part of it was kept.
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

    /// What came early by `path` is in its buffer; false if nothing was under way there.
    fn end_out_of_order(&mut self, peer: Peer, path: PathId) -> bool {
        let channel = &mut self.channels[peer.0 as usize];
        let Some(place) =
            channel.out_of_order.iter().position(|out_of_order| out_of_order.path == path)
        else {
            return false;
        };
        let OutOfOrderArrival { frame, start, end, .. } = channel.out_of_order.swap_remove(place);
        channel.into.handle_buffered(frame, start..end);
        channel.owe_sack(0, None);
        self.mark_busy(peer);
        true
    }

    /// The kept frame whose turn has come, by the number of its first byte: its buffer is to be given to
    /// [`Self::handle_reassembled`]. To be called after every [`Self::handle_payload`], until there is none.
    #[inline]
    pub fn next_reassembled(&self, peer: Peer) -> Option<u64> {
        let channel = &self.channels[peer.0 as usize];
        channel.into.next_reassembled().map(|(frame, _)| frame).filter(|_| channel.failed.is_none())
    }

    /// Takes in the frame that [`Self::next_reassembled`] named, of which `body` is head and payload. Says where the payload belongs
    /// and how long the head is. Then, as for every frame, [`Self::handle_payload`], with the path [`REASSEMBLED`].
    ///
    /// # Errors
    /// As [`Self::handle_frame`].
    pub fn handle_reassembled(
        &mut self,
        peer: Peer,
        body: &[u8],
    ) -> Result<(PayloadDestination, usize), Fault> {
        let channel = &mut self.channels[peer.0 as usize];
        let (start, BufferedFrame { kind, flags, whole, .. }) =
            channel.into.next_reassembled().ok_or(Fault("no frame is buffered"))?;
        // The sender waits to hear that the gap is closed.
        channel.ack_wanted = true;
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

    /// The payload that was arriving by `path` is corrupt: it is asked for again. False: there is too much of that, the path
    /// is better closed.
    pub fn handle_corrupt(&mut self, peer: Peer, path: PathId) -> bool {
        let channel = &mut self.channels[peer.0 as usize];
        let mut range = None;
        if let Some(place) =
            channel.out_of_order.iter().position(|out_of_order| out_of_order.path == path)
        {
            let out_of_order = channel.out_of_order.swap_remove(place);
            range = Some((out_of_order.start, out_of_order.end));
        } else if let Some(arriving) = &mut channel.arriving
            && arriving.path == Some(path)
        {
            arriving.path = None;
            range = Some((arriving.frame.start, arriving.frame.start + arriving.frame.whole));
        }
        range.is_none_or(|(start, end)| self.request_retransmission(peer, start, end))
    }

    /// A frame whose header is intact has arrived with a payload that is not, and has not been shown to
    /// [`Self::handle_frame`]: as [`Self::handle_corrupt`].
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

    /// As [`Self::request_retransmission`]; if there is no place for another range, the last one is asked for with all up to this one.
    #[cold]
    pub(super) fn must_request_retransmission(&mut self, peer: Peer, start: u64, end: u64) {
        if self.request_retransmission(peer, start, end) {
            return;
        }
        if let Some(last) = self.channels[peer.0 as usize].corrupt.last_mut() {
            *last = (last.0.min(start), last.1.max(end), false);
        }
        self.mark_busy(peer);
    }

    fn request_retransmission(&mut self, peer: Peer, start: u64, end: u64) -> bool {
        let Channel { corrupt, into, .. } = &mut self.channels[peer.0 as usize];
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
