//! Frames in: where their payload belongs, and what is complete once it is there.

use super::channel::QUEUE_MAX;
use super::{Action, Endpoint, Fault, Memory, Op, OpKind, Peer, Place};
use crate::wire::frame::{Header, Kind, flag};
use crate::wire::head::Head;

/// The frame whose payload is being placed.
#[derive(Clone, Copy)]
pub(super) struct Arriving {
    header: Header,
    head: Head,
    place: Place,
}

impl Arriving {
    /// The driver has refused `op`: if that is what arrives, nobody is told of it.
    pub fn handle_refused(&mut self, op: u32) {
        if matches!(self.head, Head::Write { op: mine, .. } if mine == op) {
            self.place = Place::Nowhere;
        }
    }
}

impl<M: Memory> Endpoint<M> {
    /// Takes in a frame's header and head (at least [`Head::size`] bytes), says where its payload belongs. When the
    /// payload is there, call [`Self::handle_payload`]; before that, no other frame of this peer.
    ///
    /// # Errors
    /// If the frame breaks the protocol: close the link, call [`Self::fail`].
    #[inline]
    pub fn handle_frame(
        &mut self,
        peer: Peer,
        header: Header,
        head: &[u8],
    ) -> Result<Place, Fault> {
        let head_size = Head::size(header.kind, header.flags);
        let payload = (header.length as usize)
            .checked_sub(head_size)
            .ok_or(Fault("a frame is shorter than its head"))? as u64;
        let head = Head::parse(header.kind, header.flags, head).map_err(|bad| Fault(bad.0))?;
        let channel = &mut self.channels[peer.0 as usize];
        if channel.failed.is_some() {
            return Err(Fault("a peer that was given up still sends"));
        }
        // A frame without bytes may come late, by a path that has been left since.
        channel.is_late_news = header.length == 0 && header.sequence < channel.expected;
        if header.sequence != channel.expected && !channel.is_late_news {
            return Err(Fault("bytes of a channel are missing"));
        }
        channel.expected += header.length as u64;
        channel.credit.handle_released(header.credit);
        if header.delivered > channel.sequence {
            return Err(Fault("a peer confirms bytes that were never sent"));
        }
        if let Head::Refused { op, error } = head {
            // Before `delivered`, which counts the refused bytes as taken in.
            self.end_refused(peer, op, error);
        }
        self.handle_delivered(peer, header.delivered);
        if self.channels[peer.0 as usize].is_late_news {
            self.note_flags(peer, &header);
            return Ok(Place::Nowhere);
        }
        let place = self.place(peer, &header, &head, payload)?;
        self.channels[peer.0 as usize].arriving = Some(Arriving { header, head, place });
        Ok(place)
    }

    fn place(
        &mut self,
        peer: Peer,
        header: &Header,
        head: &Head,
        payload: u64,
    ) -> Result<Place, Fault> {
        let is_request =
            matches!(head, Head::Write { .. } | Head::Read { .. } | Head::Atomic { .. });
        if is_request && self.channels[peer.0 as usize].queue.len() >= QUEUE_MAX {
            return Err(Fault("more requests than anybody has in flight"));
        }
        Ok(match *head {
            Head::Message { tag, data, long } => {
                let data = (header.flags & flag::CQ_DATA != 0).then_some(data);
                self.place_message(peer, header.kind == Kind::Tagged, tag, data, long, payload)?
            }
            Head::Data { recv, offset } => self.place_data(peer, recv, offset, payload)?,
            Head::Ahead { send, offset } => self.place_ahead(peer, send, offset, payload)?,
            Head::Write { op, key, offset, .. } => Place::Region { op, key, offset },
            Head::ReadData { op, offset } => self.place_answer(peer, op, offset, payload)?,
            Head::AtomicReply { op } => self.place_answer(peer, op, 0, payload)?,
            Head::Atomic { wants, length, .. } => {
                let parts = if wants & 2 != 0 { 2 } else { 1 };
                if payload != 0 && payload != parts * length as u64 {
                    return Err(Fault("an atomic operation has the wrong number of operands"));
                }
                Place::Scratch
            }
            Head::Grant { send, limit, .. } if payload == 0 => {
                let op = self.waiting_message(peer, send)?;
                if limit <= op.limit || limit > op.total {
                    return Err(Fault("a grant that grants nothing, or too much"));
                }
                Place::Nowhere
            }
            Head::Pulled { send } if payload == 0 => {
                let op = self.waiting_message(peer, send)?;
                if op.sent < op.limit {
                    return Err(Fault("a message is pulled and granted at once"));
                }
                Place::Nowhere
            }
            _ if payload > 0 => return Err(Fault("a control frame has a payload")),
            _ => Place::Nowhere,
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

    /// The payload of the peer's last frame is in its place.
    #[inline]
    pub fn handle_payload(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        if core::mem::take(&mut channel.is_late_news) {
            // Another frame's payload may still be arriving by the path that was taken instead.
            return self.settle_ack(peer);
        }
        let Some(Arriving { header, head, place }) = channel.arriving.take() else {
            return;
        };
        channel.received += header.length as u64;
        // Not before: a frame sent while the payload was arriving could not confirm it.
        self.note_flags(peer, &header);
        let payload = header.length as u64 - Head::size(header.kind, header.flags) as u64;
        match head {
            Head::Message { long, .. } => self.end_message(peer, place, payload, long),
            Head::Data { recv, .. } => self.end_data(recv, place),
            Head::Ahead { send, .. } => self.end_ahead(peer, send, place, payload),
            Head::Grant { send, recv, limit } => {
                self.handle_grant(peer, send, recv, limit, header.flags & flag::CUT != 0);
            }
            Head::Pulled { send } => self.complete_flushed(peer, send),
            Head::Write { .. } if place == Place::Nowhere => (),
            Head::Write { data, total, .. } => self.end_write(peer, &header, data, total),
            Head::Read { op, key, offset, length } => {
                self.push_action(Action::Serve { peer, op, key, offset, length });
            }
            Head::ReadData { op, .. } => self.end_answer(peer, op, payload),
            Head::AtomicReply { op } => self.end_answer(peer, op, payload),
            Head::Atomic { .. } => self.end_atomic(peer, &head),
            Head::Refused { .. } | Head::Empty => (),
        }
        self.settle_ack(peer);
    }

    #[inline]
    fn note_flags(&mut self, peer: Peer, header: &Header) {
        let channel = &mut self.channels[peer.0 as usize];
        channel.ack_wanted |= header.flags & flag::WANT_ACK != 0;
        channel.has_left |= header.kind == Kind::Goodbye;
    }
}
