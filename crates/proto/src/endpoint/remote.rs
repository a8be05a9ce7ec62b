//! Remote memory: reads, writes and atomic operations, on both sides.
//!
//! A write needs no answer of its own: the write is complete when the channel's `delivered` has
//! passed its last frame, and the refusal of a bad write travels before this acknowledgement. What
//! may never happen: memory outside a registered region is accessed (the driver checks the region
//! for every frame), or a refused operation is reported as done.

use super::channel::Item;
use super::{
    Action, AtomicRequest, CompletionKind, CompletionLevel, Endpoint, Fault, Full, Memory, Op,
    OpKind, OperationCompletion, PayloadDestination, Peer, Ticket,
};
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

impl<M: Memory> Endpoint<M> {
    /// Writes `memory` to a peer's region. With `data`, the peer's application gets a completion
    /// that carries the data.
    ///
    /// # Errors
    /// [`Full`] if too many operations are in flight: make progress and try again.
    pub fn write(
        &mut self,
        remote: Remote,
        memory: M,
        data: Option<u64>,
        ticket: Ticket,
    ) -> Result<u32, Full> {
        let total = memory.size();
        let kind = OpKind::Write { key: remote.key, offset: remote.offset, data };
        self.start(Op::new(remote.peer, ticket, memory, total, kind))
    }

    /// Reads a peer's region into `memory`.
    ///
    /// # Errors
    /// [`Full`] if too many operations are in flight: make progress and try again.
    pub fn read(&mut self, remote: Remote, memory: M, ticket: Ticket) -> Result<u32, Full> {
        let total = memory.size();
        let kind = OpKind::Read { key: remote.key, offset: remote.offset, got: 0 };
        self.start(Op::new(remote.peer, ticket, memory, total, kind))
    }

    /// Performs an atomic operation on a peer's region. `operands` holds the operand bytes, then
    /// the bytes to compare with.
    ///
    /// # Errors
    /// [`Full`] if too many operations are in flight: make progress and try again.
    pub fn atomic(
        &mut self,
        peer: Peer,
        request: AtomicRequest,
        operands: M,
        result: Option<M>,
        ticket: Ticket,
    ) -> Result<u32, Full> {
        let total = operands.size();
        let kind = OpKind::Atomic { request, result };
        self.start(Op::new(peer, ticket, operands, total, kind))
    }

    /// Answers [`Action::Serve`] with the bytes of `memory`.
    pub fn serve(&mut self, peer: Peer, op: u32, memory: M) {
        self.reply(peer, Kind::ReadData, op, memory);
    }

    /// Answers [`Action::Atomic`] with the old values.
    pub fn answer(&mut self, peer: Peer, op: u32, memory: M) {
        self.reply(peer, Kind::AtomicReply, op, memory);
    }

    fn reply(&mut self, peer: Peer, kind: Kind, op: u32, memory: M) {
        let total = memory.size();
        self.enqueue(peer, Item::Reply { kind, op, memory, sent: 0, total });
    }

    /// Refuses a peer's operation on remote memory with an errno.
    pub fn refuse(&mut self, peer: Peer, op: u32, errno: i32) {
        if let Some(arriving) = &mut self.channels[peer.0 as usize].arrivals.current {
            arriving.handle_refused(op);
        }
        let head = KindHeader::Refused { op, error: errno.unsigned_abs() };
        if self.failed(peer).is_some() {
            return;
        }
        let channel = &mut self.channels[peer.0 as usize];
        // The pieces of a long write keep arriving until its sender receives the first refusal. One
        // waiting refusal serves for all of them.
        let is_it = |item: &Item<M>| matches!(item, Item::Control(_, _, KindHeader::Refused { op: other, .. }) if *other == op);
        if channel.queue.iter().take(channel.repairs.refusals as usize).any(is_it) {
            return;
        }
        channel.repairs.refusals += 1;
        // The refusal goes to the front of the queue: no frame may confirm the refused bytes before
        // the sender knows of the refusal.
        self.enqueue_front(peer, Item::Control(Kind::Refused, 0, head));
    }

    pub(super) fn place_reply(
        &mut self,
        peer: Peer,
        id: u32,
        offset: u64,
        payload: u64,
    ) -> Result<PayloadDestination, Fault> {
        let op =
            self.ops.at(id).filter(|op| op.peer == peer).ok_or(Fault("an answer to nothing"))?;
        if !op.is_begun {
            return Err(Fault("an answer before the question"));
        }
        let (got, room) = match &op.kind {
            OpKind::Read { got, .. } => (*got, op.total),
            OpKind::Atomic { request, result: Some(_) } => (0, request.length as u64),
            _ => return Err(Fault("an answer to an operation that wants none")),
        };
        if offset != got || payload > room - got {
            return Err(Fault("an answer of another size than asked for"));
        }
        Ok(PayloadDestination::Reply { op: id, at: offset })
    }

    pub(super) fn end_reply(&mut self, peer: Peer, id: u32, payload: u64) {
        let Some(op) = self.ops.at_mut(id) else {
            return;
        };
        if let OpKind::Read { got, .. } = &mut op.kind {
            *got += payload;
            if *got < op.total {
                return;
            }
        }
        self.complete_replied(peer, id);
    }

    /// Records that operation `id` is answered. The operation is done once none of its bytes may
    /// have to be retransmitted from memory that belongs to the caller after completion. (The
    /// answer may have come in pieces that confirm nothing, or behind a refusal.)
    fn complete_replied(&mut self, peer: Peer, id: u32) {
        let is_borrowed = self.ops.at(id).is_some_and(|op| op.is_borrowed);
        let channel = &mut self.channels[peer.0 as usize];
        let sent = channel.out.next();
        if is_borrowed && channel.confirmations.confirmed < sent {
            channel.confirmations.is_solicited = true;
            channel.confirmations.await_delivery(sent, id);
            self.mark_busy(peer);
        } else {
            self.complete_flushed(peer, id);
        }
    }

    pub(super) fn end_write(&mut self, peer: Peer, flags: u8, data: u64, total: u32) {
        if flags & flag::CQ_DATA == 0 {
            return;
        }
        let ticket = Ticket { context: 0, notify: true };
        let done = OperationCompletion::new(CompletionKind::RemoteWrite, ticket);
        let length = total as u64;
        let done = OperationCompletion { data: Some(data), source: Some(peer), length, ..done };
        self.push_action(Action::Complete(done));
    }

    pub(super) fn end_atomic(&mut self, peer: Peer, head: KindHeader) {
        if let KindHeader::Atomic { op, operation, datatype, wants, length, key, offset } = head {
            let (fetch, compare) = (wants & 1 != 0, wants & 2 != 0);
            let request =
                AtomicRequest { op, operation, datatype, fetch, compare, length, key, offset };
            self.push_action(Action::Atomic { peer, request });
        }
    }

    pub(super) fn end_refused(&mut self, peer: Peer, id: u32, error: u32) {
        let is_message = |op: &Op<M>| matches!(op.kind, OpKind::Message { .. });
        if self.ops.at(id).is_none_or(|op| op.peer != peer || !op.is_begun || is_message(op)) {
            return;
        }
        if let Some(op) = self.ops.at_mut(id) {
            op.refused = Some(error as i32);
        }
        self.channels[peer.0 as usize].remove_operation(id);
        self.complete_replied(peer, id);
    }
}

impl<M> Op<M> {
    fn new(peer: Peer, ticket: Ticket, memory: M, total: u64, kind: OpKind<M>) -> Self {
        Self {
            peer,
            ticket,
            level: CompletionLevel::DeliveryComplete,
            memory,
            is_begun: false,
            sent: 0,
            limit: total,
            ahead: 0,
            total,
            is_borrowed: false,
            refused: None,
            kind,
        }
    }

    /// The memory for the peer's answer.
    pub(super) fn reply_memory(&self) -> &M {
        match &self.kind {
            OpKind::Atomic { result: Some(result), .. } => result,
            _ => &self.memory,
        }
    }
}
