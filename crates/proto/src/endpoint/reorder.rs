//! Frames of one channel that arrive early, twice or in fragments, and the reorder buffers that
//! hold them until their turn.
//!
//! What enters: headers whose turn has not come, and reports that a payload is in its buffer. What
//! leaves: buffers to release, and reports to the peer of the ranges that arrived.
//!
//! What may never happen: two paths write the same bytes of a reorder buffer; bytes that a path
//! does not bring are taken for arrived.

use alloc::vec::Vec;

use super::arrivals::{Frame, OutOfOrderArrival};
use super::channel_mut::ChannelMut;
use super::driver_interface::{Action, Fault, Memory, PayloadDestination};
use crate::channel::{ArrivalOrder, BufferedFrame, PathId};
use crate::wire::Malformed;
use crate::wire::frame::{Kind, flag};
use crate::wire::kind_header::KindHeader;

/// The flags that belong to one transmission of a frame, not to the frame.
pub(super) const PER_TRANSMISSION_FLAGS: u8 = flag::CHECKED | flag::WANT_ACK;

impl<M: Memory> ChannelMut<'_, M> {
    /// Releases the reorder buffer of `frame`: the driver drops the frame's bytes.
    pub(super) fn release_buffered(&mut self, frame: u64) {
        let peer = self.peer();
        let channel = &mut *self.channel;
        if channel.into.release(frame).is_none() {
            return;
        }
        let (discarded, rest) =
            channel.arrivals.out_of_order.drain(..).partition(|kept| kept.frame == frame);
        channel.arrivals.out_of_order = rest;
        let discarded: Vec<OutOfOrderArrival> = discarded;
        for OutOfOrderArrival { path, .. } in discarded {
            self.actions.push(Action::DiscardPayload { peer, path });
        }
        self.actions.push(Action::Release { peer, frame });
    }

    /// Whether bytes from `start` on arrive in their turn, early or again.
    #[inline(always)]
    pub(super) fn arrival_order(&self, start: u64, bytes: u64) -> Result<ArrivalOrder, Fault> {
        let end = start.checked_add(bytes).ok_or(Fault("a channel beyond its end"))?;
        self.channel.into.arrival_order(&(start..end)).map_err(fault)
    }

    /// Where the payload of a fragment belongs.
    pub(super) fn place_fragment(
        &mut self,
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
        if self.arrival_order(fragment.start, fragment.payload)? == ArrivalOrder::Duplicate {
            self.note_duplicate(fragment.start, fragment.start + fragment.payload);
            return Ok(PayloadDestination::Discard);
        }
        if first < self.channel.into.delivered() {
            return Err(Fault("a fragment of what has been taken in"));
        }
        let range = fragment.start..fragment.start + fragment.payload;
        self.buffer_frame(
            path,
            first,
            BufferedFrame::new(kind, flags & !PER_TRANSMISSION_FLAGS, whole),
            range,
            offset,
        )
    }

    /// Records that bytes arrived a second time. The peer would not have retransmitted them if it
    /// knew that they had arrived, so an acknowledgement or a report of ranges is queued.
    pub(super) fn note_duplicate(&mut self, start: u64, end: u64) {
        let channel = &mut *self.channel;
        if channel.into.handle_duplicate(&(start..end)) {
            channel.repairs.owe_sack(0, None);
            self.mark_busy();
        } else {
            channel.owed_ack.is_wanted = true;
        }
    }

    /// Directs bytes `range` of the frame that begins at byte `frame` into a reorder buffer, if the
    /// reorder window has capacity.
    pub(super) fn buffer_frame(
        &mut self,
        path: PathId,
        frame: u64,
        buffered: BufferedFrame,
        range: core::ops::Range<u64>,
        at: u32,
    ) -> Result<PayloadDestination, Fault> {
        let peer = self.peer();
        let channel = &mut *self.channel;
        // A part of this range has arrived. The rest comes as the sender has cut it since, so these
        // bytes are an older copy and must not overwrite what has arrived.
        if channel.into.has_some(&range) {
            if channel.into.handle_duplicate(&range) {
                channel.repairs.owe_sack(0, None);
                self.mark_busy();
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
            self.actions.push(Action::DiscardPayload { peer, path });
            let is_brought = range.start <= start && end <= range.end;
            if !is_brought {
                self.must_request_retransmission(start, end);
            }
        }
        Ok(PayloadDestination::OutOfOrder { frame, whole: buffered.whole, at })
    }

    /// Records that the frame whose turn it is has arrived whole, so that it counts as delivered.
    #[inline(always)]
    pub(super) fn handle_arrived(&mut self, frame: &Frame) {
        let channel = &mut *self.channel;
        channel.into.deliver(frame.whole);
        // Only now may the acknowledgement be sent: a frame sent while the payload was arriving
        // could not acknowledge it.
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
            self.must_request_retransmission(start, end);
        }
        if self.channel.into.has_out_of_order() {
            // The frame may have arrived on this path while a part of it was in a reorder buffer.
            self.release_buffered(frame.start);
        }
    }

    /// Records that what arrived early by `path` is in its buffer. Returns false if nothing was
    /// arriving early by `path`.
    pub(super) fn end_out_of_order(&mut self, path: PathId) -> bool {
        let channel = &mut *self.channel;
        let Some(place) =
            channel.arrivals.out_of_order.iter().position(|out_of_order| out_of_order.path == path)
        else {
            return false;
        };
        let OutOfOrderArrival { frame, start, end, .. } =
            channel.arrivals.out_of_order.swap_remove(place);
        channel.into.handle_buffered(frame, start..end);
        channel.repairs.owe_sack(0, None);
        self.mark_busy();
        true
    }
}

pub(super) fn fault(bad: Malformed) -> Fault {
    Fault(bad.0)
}
