//! Receives frames: where their payload belongs, and what is complete once the payload is there.
//!
//! A frame is delivered when all frames before it have been delivered. Then its payload moves from
//! the path on which it arrives straight to its destination. A frame that arrives early goes into a
//! reorder buffer. If a payload does not arrive whole (its path breaks, its checksum does not
//! match), its retransmission goes to the same destination, by whatever path it comes.

use super::Endpoint;
use super::arrivals::{ArrivingFrame, Frame};
use super::channel::{Channel, QUEUE_MAX};
use super::channel_mut::ChannelMut;
use super::driver_interface::{Action, Fault, Memory, PayloadDestination, Peer};
use super::incoming::IncomingMessages;
use super::operation_table::OperationTable;
use super::receive_table::MessageStart;
use super::reorder::{PER_TRANSMISSION_FLAGS, fault};
use crate::channel::{ArrivalOrder, BufferedFrame, PathId};
use crate::wire::frame::{Header, Kind, flag};
use crate::wire::kind_header::KindHeader;

/// The path number of frames that come out of a reorder buffer: see
/// [`Endpoint::handle_reassembled`].
pub const REASSEMBLED: PathId = PathId(u8::MAX);

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
        let operations = &mut self.operations;
        let mut on = self.channels.on(peer, &mut self.actions);
        if on.channel.end.failed.is_some() {
            return Err(Fault("a peer that counts as lost still sends"));
        }
        on.channel.credit.handle_released(header.credit);
        if on.channel.note_heard_by(path) {
            on.mark_busy();
        }
        if header.delivered > on.channel.out.next() {
            return Err(Fault("a peer acknowledges bytes that were never sent"));
        }
        if !header.kind.is_numbered() {
            operations.handle_delivered(&mut on, header.delivered, header.sequence);
            on.handle_control(path, header, &head)?;
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
            operations.handle_delivered(&mut on, header.delivered, header.sequence);
            return on.place_fragment(path, &frame);
        }
        match on.arrival_order(frame.start, whole)? {
            ArrivalOrder::InOrder => {
                if let KindHeader::Refused { op, error } = head {
                    // The refusal precedes the header's `delivered`, which may count the refused
                    // bytes as delivered.
                    operations.end_refused(&mut on, op, error);
                }
                operations.handle_delivered(&mut on, header.delivered, header.sequence);
                deliver_frame(&mut on, operations, &mut self.messages, path, frame)
            }
            ArrivalOrder::Duplicate => {
                operations.handle_delivered(&mut on, header.delivered, header.sequence);
                on.note_duplicate(frame.start, frame.start + whole);
                Ok(PayloadDestination::Discard)
            }
            ArrivalOrder::OutOfOrder => {
                operations.handle_delivered(&mut on, header.delivered, header.sequence);
                let flags = frame.flags & !PER_TRANSMISSION_FLAGS;
                let buffered = BufferedFrame::new(frame.kind, flags, whole as u32);
                let (start, bytes) = (frame.start, frame.start..frame.start + whole);
                on.buffer_frame(path, start, buffered, bytes, head_size as u32)
            }
        }
    }

    /// Records that the payload of the last frame by `path` is at its destination.
    #[inline(always)]
    pub fn handle_payload(&mut self, peer: Peer, path: PathId) {
        let mut on = self.channels.on(peer, &mut self.actions);
        if !on.channel.arrivals.out_of_order.is_empty() && on.end_out_of_order(path) {
            return;
        }
        // In all other cases, the frame was a control frame, or a duplicate, or another path has
        // delivered it meanwhile.
        if let Some(ArrivingFrame { frame, place, path: Some(by) }) = on.channel.arrivals.current
            && by == path
        {
            on.channel.arrivals.current = None;
            on.handle_arrived(&frame);
            end_frame(&mut on, &mut self.operations, &mut self.messages, frame, place);
        }
        on.schedule_ack();
    }

    /// Processes the frame that [`Channel::next_reassembled`](super::Channel::next_reassembled)
    /// named; `body` holds its head and payload. Returns where the payload belongs, and the length
    /// of the head in bytes. Then the driver must call [`Self::handle_payload`], as for every
    /// frame, with the path [`REASSEMBLED`].
    ///
    /// # Errors
    /// [`Fault`] if the frame breaks the protocol: the driver must close the link and call
    /// [`Self::fail`].
    pub fn handle_reassembled(
        &mut self,
        peer: Peer,
        body: &[u8],
    ) -> Result<(PayloadDestination, usize), Fault> {
        let mut on = self.channels.on(peer, &mut self.actions);
        let (start, BufferedFrame { kind, flags, whole, .. }) =
            on.channel.into.next_reassembled().ok_or(Fault("no frame is buffered"))?;
        // The sender waits for the acknowledgement that closes the gap.
        on.channel.owed_ack.is_wanted = true;
        on.release_buffered(start);
        let head_size = KindHeader::size(kind, flags);
        let head = KindHeader::parse(kind, flags, body).map_err(fault)?;
        let payload = (whole as u64).checked_sub(head_size as u64);
        let payload = payload.ok_or(Fault("a frame is shorter than its head"))?;
        if let KindHeader::Refused { op, error } = head {
            self.operations.end_refused(&mut on, op, error);
        }
        let frame = Frame { kind, flags, head, start, whole: whole as u64, payload };
        let (operations, messages) = (&self.operations, &mut self.messages);
        let place = deliver_frame(&mut on, operations, messages, REASSEMBLED, frame)?;
        Ok((place, head_size))
    }
}

/// Starts the delivery of the frame whose turn it is: the frame gets its destination, or the
/// destination of its first transmission if this did not arrive whole.
#[inline(always)]
fn deliver_frame<M: Memory>(
    on: &mut ChannelMut<'_, M>,
    operations: &OperationTable<M>,
    messages: &mut IncomingMessages<M>,
    path: PathId,
    frame: Frame,
) -> Result<PayloadDestination, Fault> {
    let Some(mut arriving) = on.channel.arrivals.current.take() else {
        let place = place(on.channel, operations, messages, &frame)?;
        on.channel.arrivals.current = Some(ArrivingFrame { frame, place, path: Some(path) });
        return Ok(place);
    };
    let was = &arriving.frame;
    let known = (was.kind, was.head, was.whole);
    if known != (frame.kind, frame.head, frame.whole) {
        return Err(Fault("a frame comes again as another"));
    }
    if let Some(other) = arriving.path.filter(|&other| other != path) {
        on.actions.push(Action::DiscardPayload { peer: on.peer(), path: other });
    }
    arriving.path = Some(path);
    let place = arriving.destination_again();
    on.channel.arrivals.current = Some(arriving);
    Ok(place)
}

/// Where the payload of a frame whose turn it is belongs: in the memory of an operation of this
/// endpoint, in that of a message to this endpoint, or in registered memory.
fn place<M: Memory>(
    channel: &mut Channel<M>,
    operations: &OperationTable<M>,
    messages: &mut IncomingMessages<M>,
    frame: &Frame,
) -> Result<PayloadDestination, Fault> {
    let (peer, head, payload) = (channel.entry.peer, &frame.head, frame.payload);
    let is_request = matches!(
        head,
        KindHeader::Write { .. } | KindHeader::Read { .. } | KindHeader::Atomic { .. }
    );
    if is_request && channel.queue.len() >= QUEUE_MAX {
        return Err(Fault("more requests than anybody has in flight"));
    }
    Ok(match *head {
        KindHeader::Message { tag, data, long } => {
            let data = (frame.flags & flag::CQ_DATA != 0).then_some(data);
            let tagged = frame.kind == Kind::Tagged;
            let start = MessageStart::new((peer, tagged, tag), data, long, payload);
            messages.place_message(channel, start, payload)?
        }
        KindHeader::Data { recv, offset } => {
            messages.receives.place_data(peer, recv, offset, payload)?
        }
        KindHeader::Ahead { send, offset } => {
            messages.receives.place_ahead(channel, send, offset, payload)?
        }
        KindHeader::Write { op, key, offset, .. } => PayloadDestination::Region { op, key, offset },
        KindHeader::ReadData { op, offset } => {
            operations.place_reply(peer, op, Some(offset), payload)?
        }
        KindHeader::AtomicReply { op } => operations.place_reply(peer, op, None, payload)?,
        KindHeader::Atomic { wants, length, .. } => {
            let parts = if wants & 2 != 0 { 2 } else { 1 };
            if payload != 0 && payload != parts * length as u64 {
                return Err(Fault("an atomic operation has the wrong number of operands"));
            }
            PayloadDestination::Scratch
        }
        KindHeader::Grant { send, limit, .. } if payload == 0 => {
            let op = operations.waiting_message(peer, send)?;
            if limit <= op.limit || limit > op.total {
                return Err(Fault("a grant that grants nothing, or too much"));
            }
            PayloadDestination::Discard
        }
        KindHeader::Pulled { send } if payload == 0 => {
            let op = operations.waiting_message(peer, send)?;
            if op.sent < op.limit {
                return Err(Fault("a message is pulled and granted at once"));
            }
            PayloadDestination::Discard
        }
        KindHeader::Goodbye if channel.end.has_left => {
            return Err(Fault("a peer says goodbye twice"));
        }
        _ if payload > 0 => return Err(Fault("a control frame has a payload")),
        _ => PayloadDestination::Discard,
    })
}

/// Does what follows from a delivered frame whose payload is at `place`: the frame concerns an
/// operation of this endpoint, a message to this endpoint, or memory of this process.
#[inline(always)]
fn end_frame<M: Memory>(
    on: &mut ChannelMut<'_, M>,
    operations: &mut OperationTable<M>,
    messages: &mut IncomingMessages<M>,
    frame: Frame,
    place: PayloadDestination,
) {
    let (peer, payload) = (on.peer(), frame.payload);
    match frame.head {
        KindHeader::Message { long, .. } => messages.end_message(on, place, payload, long),
        KindHeader::Data { recv, .. } => messages.receives.end_data(on, recv, place),
        KindHeader::Ahead { send, .. } => messages.end_ahead(on, send, place, payload),
        KindHeader::Grant { send, recv, limit } => {
            operations.handle_grant(on, send, recv, limit, frame.flags & flag::TRUNCATED != 0);
        }
        KindHeader::Pulled { send } => operations.complete_flushed(on, send),
        KindHeader::Write { .. } if place == PayloadDestination::Discard => (),
        KindHeader::Write { data, total, .. } => on.end_write(frame.flags, data, total),
        KindHeader::Read { op, key, offset, length } => {
            on.actions.push(Action::Serve { peer, op, key, offset, length });
        }
        KindHeader::ReadData { op, .. } => operations.end_reply(on, op, payload),
        KindHeader::AtomicReply { op } => operations.end_reply(on, op, payload),
        KindHeader::Atomic { .. } => on.end_atomic(frame.head),
        _ => (),
    }
    operations.handle_early_ack(on);
}
