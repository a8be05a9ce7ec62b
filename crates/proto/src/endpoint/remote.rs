//! Remote memory: reads, writes and atomic operations, on both sides.
//!
//! A write needs no answer of its own: the write is complete when the channel's `delivered` has
//! passed its last frame, and the refusal of a bad write travels before this acknowledgement. What
//! may never happen: memory outside a registered region is accessed (the driver checks the region
//! for every frame), or a refused operation is reported as done.

use super::channel_mut::ChannelMut;
use super::driver_interface::{Action, AtomicRequest, CompletionKind, Memory, OperationCompletion};
use super::driver_interface::{Peer, Ticket};
use super::operation::{Item, Op, OpKind};
use crate::wire::frame::{Kind, flag};
use crate::wire::kind_header::KindHeader;

/// A part of a peer's registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The peer that owns the region.
    pub peer: Peer,
    /// The key of the region.
    pub key: u64,
    /// The offset in the region.
    pub offset: u64,
}

impl<M: Memory> Op<M> {
    /// The operation that writes `memory` to `remote`.
    pub(super) fn write(remote: Remote, memory: M, data: Option<u64>, ticket: Ticket) -> Self {
        let total = memory.size();
        let kind = OpKind::Write { key: remote.key, offset: remote.offset, data };
        Self::new(remote.peer, ticket, memory, total, kind)
    }

    /// The operation that reads `remote` into `memory`.
    pub(super) fn read(remote: Remote, memory: M, ticket: Ticket) -> Self {
        let total = memory.size();
        let kind = OpKind::Read { key: remote.key, offset: remote.offset, got: 0 };
        Self::new(remote.peer, ticket, memory, total, kind)
    }

    /// The atomic operation `request`.
    pub(super) fn atomic(
        (peer, request): (Peer, AtomicRequest),
        operands: M,
        result: Option<M>,
        ticket: Ticket,
    ) -> Self {
        let total = operands.size();
        let kind = OpKind::Atomic { request, result };
        Self::new(peer, ticket, operands, total, kind)
    }
}

impl<M: Memory> ChannelMut<'_, M> {
    /// Answers [`Action::Serve`] with the bytes of `memory`.
    pub fn serve(&mut self, op: u32, memory: M) {
        self.enqueue(Item::reply(Kind::ReadData, op, memory));
    }

    /// Answers [`Action::Atomic`] with the old values.
    pub fn answer(&mut self, op: u32, memory: M) {
        self.enqueue(Item::reply(Kind::AtomicReply, op, memory));
    }

    /// Refuses a peer's operation on remote memory with an errno.
    pub fn refuse(&mut self, op: u32, errno: i32) {
        if let Some(arriving) = &mut self.channel.arrivals.current {
            arriving.handle_refused(op);
        }
        let head = KindHeader::Refused { op, error: errno.unsigned_abs() };
        let channel = &mut *self.channel;
        if channel.end.failed.is_some() {
            return;
        }
        // The pieces of a long write keep arriving until its sender receives the first refusal. One
        // waiting refusal serves for all of them.
        let is_it = |item: &Item<M>| match item {
            Item::Control(_, _, KindHeader::Refused { op: other, .. }) => *other == op,
            _ => false,
        };
        if channel.queue.iter().take(channel.repairs.refusals as usize).any(is_it) {
            return;
        }
        channel.repairs.refusals += 1;
        // The refusal goes to the front of the queue: no frame may acknowledge the refused bytes
        // before the sender knows of the refusal.
        self.enqueue_front(Item::Control(Kind::Refused, 0, head));
    }

    /// Records that a part of a peer's write is in place, and reports the write if this part
    /// carries completion data.
    pub(super) fn end_write(&mut self, flags: u8, data: u64, total: u32) {
        if flags & flag::CQ_DATA == 0 {
            return;
        }
        let ticket = Ticket { context: 0, notify: true };
        let done = OperationCompletion::new(CompletionKind::RemoteWrite, ticket);
        let length = total as u64;
        let done =
            OperationCompletion { data: Some(data), source: Some(self.peer()), length, ..done };
        self.actions.complete(done);
    }

    /// Lets the driver perform the peer's atomic operation, whose operands are in place.
    pub(super) fn end_atomic(&mut self, head: KindHeader) {
        if let KindHeader::Atomic { op, operation, datatype, wants, length, key, offset } = head {
            let (fetch, compare) = (wants & 1 != 0, wants & 2 != 0);
            let request =
                AtomicRequest { op, operation, datatype, fetch, compare, length, key, offset };
            self.actions.push(Action::Atomic { peer: self.peer(), request });
        }
    }
}
