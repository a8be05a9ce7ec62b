//! The operations that this endpoint has started, until they are done.
//!
//! What enters: operations, acknowledgements of the peer, its grants, answers and refusals. What
//! leaves: completions.
//!
//! What may never happen: an operation completes while a path still reads its memory, or before the
//! acknowledgement that its level or its borrowed memory demands; a refused operation succeeds; a
//! completion is lost or reported twice.

use alloc::vec::Vec;

use super::action_queue::ActionQueue;
use super::channel::Channel;
use super::channel_mut::ChannelMut;
use super::driver_interface::{CompletionLevel, Failure, Fault, Full, Memory, OperationCompletion};
use super::driver_interface::{PayloadDestination, Peer};
use super::operation::{Item, Op, OpKind, SentPiece};
use crate::slab::Slab;

/// The operations in flight, over all peers.
pub(super) struct OperationTable<M> {
    pub(super) ops: Slab<Op<M>>,
    operations_max: usize,
}

impl<M: Memory> OperationTable<M> {
    pub fn new(operations_max: usize) -> Self {
        Self { ops: Slab::default(), operations_max }
    }

    /// Starts an operation towards the peer of `on`. An operation towards a failed peer fails at
    /// once, and its number is never used.
    pub fn start(&mut self, on: &mut ChannelMut<'_, M>, op: Op<M>) -> Result<u32, Full> {
        if self.ops.len() >= self.operations_max {
            return Err(Full);
        }
        if let Some(errno) = on.channel.end.failed {
            end_unreachable(on, op, errno);
            return Ok(u32::MAX);
        }
        let first = Item::first(&op.kind);
        let id = self.ops.insert(op);
        on.enqueue(first(id));
        Ok(id)
    }

    /// The memory of operation `id`, if some of its bytes have not been sent.
    pub fn memory_mut(&mut self, id: u32) -> Option<&mut M> {
        let op = self.ops.at_mut(id)?;
        let unsent = op.sent < op.total && !matches!(op.kind, OpKind::Read { .. });
        unsent.then_some(&mut op.memory)
    }

    /// The memory for the answer to operation `id`.
    pub fn reply_memory(&self, id: u32) -> Option<&M> {
        self.ops.at(id).map(Op::reply_memory)
    }

    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// Ends every operation that waits for the peer of `on`, which has failed.
    pub fn fail(&mut self, on: &mut ChannelMut<'_, M>, errno: i32) {
        let ops: Vec<u32> = self.ids_for(on.peer()).collect();
        for id in ops {
            if let Some(op) = self.ops.remove(id) {
                end_unreachable(on, op, errno);
            }
        }
    }

    /// The numbers of the operations that wait for `peer`.
    fn ids_for(&self, peer: Peer) -> impl Iterator<Item = u32> {
        self.ops.ids().filter(move |&id| self.ops.at(id).is_some_and(|op| op.peer == peer))
    }

    /// Whether operations wait for `peer`.
    pub fn has_work_for(&self, peer: Peer) -> bool {
        self.ids_for(peer).next().is_some()
    }

    /// Whether no part of a message waits for a grant. Messages to peers that `has_left` accepts
    /// do not count.
    pub fn has_no_rest(&self, has_left: impl Fn(Peer) -> bool) -> bool {
        let rests = |op: &Op<M>| {
            let is_message = matches!(op.kind, OpKind::Message { .. });
            is_message && op.sent < op.total && !has_left(op.peer)
        };
        !self.ops.ids().filter_map(|id| self.ops.at(id)).any(rests)
    }

    /// Does what follows from a frame that a path has taken completely.
    #[inline]
    pub fn apply(&mut self, on: &mut ChannelMut<'_, M>, sent: SentPiece) {
        let (id, end) = match sent {
            SentPiece::Nothing | SentPiece::PieceOf(_) => return,
            SentPiece::LastOf(id, end) => (id, end),
        };
        let channel = &mut *on.channel;
        let Some(op) = self.ops.at(id) else {
            return;
        };
        let awaits = op.level == CompletionLevel::DeliveryComplete || op.is_borrowed;
        if awaits && channel.acknowledgements.acknowledged < end {
            // An operation that was refused while a path held its frame waits for delivery already.
            if op.refused.is_none() {
                channel.acknowledgements.await_delivery(end, id);
            }
        } else {
            // Another path may still hold a piece of the operation.
            self.complete_flushed(on, id);
        }
    }

    #[inline]
    fn complete(&mut self, actions: &mut ActionQueue<M>, id: u32) {
        if let Some(op) = self.ops.remove(id) {
            let failure = op.refused.map(Failure::Errno);
            finish(actions, op, failure);
        }
    }

    /// Completes operation `id`, or, if a path still reads the operation's memory, completes it
    /// when the path has sent its frame.
    #[inline]
    pub fn complete_flushed(&mut self, on: &mut ChannelMut<'_, M>, id: u32) {
        let channel = &mut *on.channel;
        if channel.paths.holds(id) {
            channel.paths.after_flush(id, SentPiece::LastOf(id, 0));
        } else {
            self.complete(on.actions, id);
        }
    }

    /// Processes the `delivered` field of a frame that was sent when the number of the peer's next
    /// byte was `sequence`: the peer has delivered all bytes below `delivered`.
    #[inline(always)]
    pub fn handle_delivered(&mut self, on: &mut ChannelMut<'_, M>, delivered: u64, sequence: u64) {
        let (channel, now) = (&mut on.channel, on.schedule.now());
        let may_wait = channel.paths.may_reorder() || channel.paths.has_unbounded();
        let Channel { out, paths, .. } = channel;
        let is_new = out.handle_delivered(delivered, |frame| {
            if let Some(state) = paths.get_mut(frame.path.0 as usize) {
                state.handle_acknowledged(now, frame);
            }
        });
        if is_new && may_wait {
            on.process_flow_acks();
            let channel = &*on.channel;
            if !channel.queue.is_empty() || channel.out.has_lost() {
                // The peer's frames may have waited for the reorder window, or for a better path.
                on.mark_busy();
            }
        }
        let channel = &mut *on.channel;
        if delivered <= channel.acknowledgements.acknowledged {
            return;
        }
        if sequence > channel.into.delivered() {
            channel.acknowledgements.early =
                channel.acknowledgements.early.max((sequence, delivered));
            return;
        }
        channel.acknowledgements.acknowledged = delivered;
        loop {
            let channel = &mut *on.channel;
            match channel.acknowledgements.awaiting.front() {
                Some(&(end, id)) if end <= delivered => {
                    channel.acknowledgements.awaiting.pop_front();
                    self.complete_flushed(on, id);
                }
                _ => return,
            }
        }
    }

    /// Applies an early acknowledgement, if the bytes that it overtook have been delivered.
    #[inline]
    pub fn handle_early_ack(&mut self, on: &mut ChannelMut<'_, M>) {
        let channel = &*on.channel;
        let (sequence, delivered) = channel.acknowledgements.early;
        if delivered > channel.acknowledgements.acknowledged && sequence <= channel.into.delivered()
        {
            self.handle_delivered(on, delivered, sequence);
        }
    }

    /// Lets message `id` go on up to byte `limit`. `cut` says that the message ends there.
    pub fn handle_grant(
        &mut self,
        on: &mut ChannelMut<'_, M>,
        id: u32,
        recv: u32,
        limit: u64,
        cut: bool,
    ) {
        let peer = on.peer();
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
            on.enqueue(Item::Rest(id));
        }
    }

    /// The operation of message `send`, if a frame of `peer` may refer to it: the peer must have
    /// received its first frame, and the message must have bytes left to send.
    pub fn waiting_message(&self, peer: Peer, send: u32) -> Result<&Op<M>, Fault> {
        let op = self.ops.at(send).filter(|op| op.peer == peer);
        let waits = |op: &&Op<M>| {
            matches!(op.kind, OpKind::Message { .. }) && op.is_begun && op.sent < op.total
        };
        op.filter(waits).ok_or(Fault("an answer to no message that waits for one"))
    }

    /// Where the payload of an answer of `peer` to operation `id` belongs. `offset`: that of data
    /// that was read; `None`: the result of an atomic operation.
    pub fn place_reply(
        &self,
        peer: Peer,
        id: u32,
        offset: Option<u64>,
        payload: u64,
    ) -> Result<PayloadDestination, Fault> {
        let op =
            self.ops.at(id).filter(|op| op.peer == peer).ok_or(Fault("an answer to nothing"))?;
        if !op.is_begun {
            return Err(Fault("an answer before the question"));
        }
        let (at, got, room) = match (&op.kind, offset) {
            (OpKind::Read { got, .. }, Some(offset)) => (offset, *got, op.total),
            (OpKind::Atomic { request, result: Some(_) }, None) => (0, 0, request.length as u64),
            _ => return Err(Fault("an answer to an operation that wants none")),
        };
        if at != got || payload > room - got {
            return Err(Fault("an answer of another size than asked for"));
        }
        Ok(PayloadDestination::Reply { op: id, at })
    }

    /// Records that the payload of an answer to operation `id` is in place.
    pub fn end_reply(&mut self, on: &mut ChannelMut<'_, M>, id: u32, payload: u64) {
        let Some(op) = self.ops.at_mut(id) else {
            return;
        };
        if let OpKind::Read { got, .. } = &mut op.kind {
            *got += payload;
            if *got < op.total {
                return;
            }
        }
        self.complete_replied(on, id);
    }

    /// Records that operation `id` is answered. The operation is done once none of its bytes may
    /// have to be retransmitted from memory that belongs to the caller after completion. (The
    /// answer may have come in pieces that acknowledge nothing, or behind a refusal.)
    fn complete_replied(&mut self, on: &mut ChannelMut<'_, M>, id: u32) {
        let is_borrowed = self.ops.at(id).is_some_and(|op| op.is_borrowed);
        let channel = &mut *on.channel;
        let sent = channel.out.next();
        if is_borrowed && channel.acknowledgements.acknowledged < sent {
            channel.acknowledgements.is_solicited = true;
            channel.acknowledgements.await_delivery(sent, id);
            on.mark_busy();
        } else {
            self.complete_flushed(on, id);
        }
    }

    /// Processes the peer's refusal of operation `id`.
    pub fn end_refused(&mut self, on: &mut ChannelMut<'_, M>, id: u32, error: u32) {
        let peer = on.peer();
        let is_message = |op: &Op<M>| matches!(op.kind, OpKind::Message { .. });
        if self.ops.at(id).is_none_or(|op| op.peer != peer || !op.is_begun || is_message(op)) {
            return;
        }
        if let Some(op) = self.ops.at_mut(id) {
            op.refused = Some(error as i32);
        }
        on.channel.remove_operation(id);
        self.complete_replied(on, id);
    }
}
/// Ends an operation that cannot reach its peer. A message to a peer that has sent Goodbye counts
/// as sent: a moment earlier, the peer would have delivered the message and dropped it.
fn end_unreachable<M: Memory>(on: &mut ChannelMut<'_, M>, op: Op<M>, errno: i32) {
    let is_message = matches!(op.kind, OpKind::Message { .. });
    let is_forgotten = is_message && on.channel.end.has_left;
    finish(on.actions, op, (!is_forgotten).then_some(Failure::Errno(errno)));
}

fn finish<M>(actions: &mut ActionQueue<M>, op: Op<M>, failure: Option<Failure>) {
    actions.complete(OperationCompletion {
        error: failure,
        ..OperationCompletion::new(op.kind.completion_kind(), op.ticket)
    });
}
