//! Sends frames: what the driver polls for, and what becomes true once a frame has left.
//!
//! Sending takes two steps. [`OperationTable::poll_transmit`] changes nothing that matters, so a
//! driver whose path is full drops the frame and polls again later. [`OperationTable::transmitted`]
//! makes the frame count as sent. What may never happen: a frame counts as sent that no path has
//! taken, or the memory of an operation is given back while a path reads it.

use super::channel::Channel;
use super::channel_mut::ChannelMut;
use super::driver_interface::Memory;
use super::operation::{Item, Op, OpKind, SentPiece};
use super::operation_table::OperationTable;
use super::path_state::PathProperties;
use super::plan::{
    InjectMessage, OutgoingFrame, Plan, item_memory, numbered, plan, plan_too_long, planned_memory,
};
use crate::channel::{Origin, PathId};
use crate::id::Address;
use crate::slab::Slab;

impl<M: Memory> OperationTable<M> {
    /// The next frame for `path` of the channel, from the endpoint `source`, if there is one.
    #[inline]
    pub fn poll_transmit<'a>(
        &'a mut self,
        mut on: ChannelMut<'a, M>,
        path: PathId,
        source: Address,
    ) -> Option<OutgoingFrame<'a, M>> {
        if on.channel.paths.has_silent_loss {
            self.prepare(&mut on, path);
        }
        let channel = on.channel;
        let Some(plan) = plan(channel, &self.ops, path) else {
            if channel.paths.has_silent_loss {
                channel.handle_app_limited(path);
            }
            return None;
        };
        let state = channel.paths.path_state(path)?;
        let PathProperties { checked, lossless, copy_max, .. } = state.path;
        let must_release_memory = plan.origin == Origin::Retransmission || state.is_suspected;
        let front = plan.front(source, channel, checked);
        let payload = if plan.payload == 0 {
            None
        } else {
            planned_memory(channel, &self.ops, &plan).map(|memory| (memory, plan.at, plan.payload))
        };
        let is_small = plan.payload > 0 && plan.payload <= copy_max as u64;
        let may_copy = channel.may_copy || plan.is_answer();
        let wants_copy = plan.origin == Origin::New && !lossless && is_small && may_copy;
        Some(OutgoingFrame { front, payload, wants_copy, must_release_memory })
    }

    /// Records that `path` has taken the frame that [`Self::poll_transmit`] returned last for this
    /// path: see [`Endpoint::transmitted`](super::Endpoint::transmitted).
    #[inline]
    pub fn transmitted(
        &mut self,
        on: &mut ChannelMut<'_, M>,
        path: PathId,
        flushed: bool,
        copy: Option<M>,
    ) {
        let channel = &mut *on.channel;
        let Some(plan) = plan(channel, &self.ops, path) else {
            return;
        };
        let mut sent = SentPiece::Nothing;
        if plan.origin == Origin::New {
            let lossless = channel.paths.path_state(path).is_some_and(|state| state.path.lossless);
            let is_borrowed = !lossless && plan.payload > 0 && copy.is_none();
            let memory = match copy {
                _ if lossless => None,
                Some(copy) => Some((copy, 0)),
                None => item_memory(channel, &self.ops).map(|memory| (memory.clone(), plan.at)),
            };
            plan.commit(channel, (path, on.schedule.now()), memory);
            sent = advance(channel, &mut self.ops, &plan);
            if let (true, Some(op)) = (is_borrowed, sent.op().and_then(|id| self.ops.at_mut(id))) {
                op.is_borrowed = true;
            }
        } else {
            plan.commit(channel, (path, on.schedule.now()), None);
        }
        // The items that this path leaves to another path may suit a path that was polled before
        // and declined.
        let leaves_rest = channel.paths.has_choice() && !channel.queue.is_empty();
        if channel.paths.has_silent_loss {
            on.arm_probe_timeout();
        }
        if leaves_rest {
            on.mark_busy();
        }
        if flushed {
            self.apply(on, sent);
        } else if let Some(state) = on.channel.paths.get_mut(path.0 as usize) {
            state.held = Some(sent);
        }
    }

    /// Computes, before `path` is polled for a frame, whether its datagrams may be sent now.
    #[cold]
    fn prepare(&mut self, on: &mut ChannelMut<'_, M>, path: PathId) {
        let now = on.schedule.now();
        let channel = &mut *on.channel;
        let wants = !channel.queue.is_empty() || channel.out.has_lost();
        let flow = channel.paths.get_mut(path.0 as usize).and_then(|state| state.flow.as_mut());
        let Some(flow) = flow else { return };
        flow.update_openness(now, wants);
        if flow.is_open() {
            // No overlong frame may be left when the next frame is chosen.
            while self.cut_up(on, path) {}
        } else {
            on.arm();
        }
    }

    /// Numbers the next frame for `path` and queues it in pieces, if the frame is new and longer
    /// than any datagram of the path. Returns false otherwise.
    fn cut_up(&mut self, on: &mut ChannelMut<'_, M>, path: PathId) -> bool {
        let channel = &mut *on.channel;
        let Some(plan) = plan_too_long(channel, &self.ops, path) else { return false };
        let memory = item_memory(channel, &self.ops).map(|memory| (memory.clone(), plan.at));
        plan.commit_lost(channel, path, memory);
        let sent = advance(channel, &mut self.ops, &plan);
        if let Some(op) = sent.op().and_then(|id| self.ops.at_mut(id)) {
            op.is_borrowed = true;
        }
        self.apply(on, sent);
        true
    }

    /// Records that the frame that `path` of `peer` held has left completely.
    pub fn handle_flushed(&mut self, on: &mut ChannelMut<'_, M>, path: PathId) {
        let state = on.channel.paths.get_mut(path.0 as usize);
        if let Some(sent) = state.and_then(|state| state.held.take()) {
            self.apply(on, sent);
        }
    }
}

impl<M: Memory> Channel<M> {
    /// Prepares a message for immediate sending: see
    /// [`Endpoint::inject`](super::Endpoint::inject).
    #[inline(always)]
    pub(super) fn inject(
        &self,
        passing: &InjectMessage,
        path: PathId,
        source: Address,
    ) -> Option<OutgoingFrame<'static, M>> {
        let state = self.paths.path_state(path)?;
        let is_clear = self.queue.is_empty()
            && state.held.is_none()
            && self.has_nothing_to_repair()
            && !self.paths.is_measured()
            && self.is_within_reorder_window()
            && self.paths.sends_by(path);
        let room = self.credit.available().min(state.path.eager_max) as u64;
        if !is_clear || self.end.failed.is_some() || passing.size > room {
            return None;
        }
        let PathProperties { checked, lossless, .. } = state.path;
        if !lossless && !self.may_copy {
            return None;
        }
        let plan = numbered(passing.plan(), self, state.path.is_acknowledged());
        let front = plan.front(source, self, checked);
        let wants_copy = !lossless;
        Some(OutgoingFrame { front, payload: None, wants_copy, must_release_memory: false })
    }
}

impl<M: Memory> ChannelMut<'_, M> {
    /// Records that the path has taken the message whose frame [`Channel::inject`] returned: see
    /// [`Endpoint::injected`](super::Endpoint::injected).
    #[inline(always)]
    pub(super) fn injected(&mut self, passing: &InjectMessage, path: PathId, copy: Option<M>) {
        let channel = &mut *self.channel;
        channel.credit.spend(passing.size as u32);
        let state = channel.paths.path_state(path);
        if let Some(PathProperties { lossless: true, unbounded, .. }) = state.map(|it| it.path) {
            match unbounded {
                true => numbered(passing.plan(), channel, true).commit_lossless(channel, true),
                false => channel.out.advance_lossless(passing.body()),
            }
            channel.handle_ack_sent(channel.acknowledged_now(), true);
        } else {
            let plan = numbered(passing.plan(), channel, true);
            plan.commit(channel, (path, self.schedule.now()), copy.map(|copy| (copy, 0)));
        }
        if channel.paths.has_silent_loss {
            self.arm_probe_timeout();
        }
    }
}

/// Removes the planned frame from the queue.
#[inline]
fn advance<M: Clone>(channel: &mut Channel<M>, ops: &mut Slab<Op<M>>, plan: &Plan) -> SentPiece {
    let end = channel.out.next();
    match channel.queue.pop_front() {
        Some(Item::First(id)) => {
            let ahead = plan.ahead();
            channel.credit.spend((plan.payload + ahead) as u32);
            let Some(op) = ops.at_mut(id) else {
                return SentPiece::Nothing;
            };
            op.is_begun = true;
            op.sent = plan.payload;
            op.ahead = plan.payload + ahead;
            op.limit = op.ahead;
            if ahead > 0 {
                // The rest waits behind the other items, because long messages share the path with
                // short ones.
                channel.queue.push_back(Item::Rest(id));
            }
            if op.sent == op.total { SentPiece::LastOf(id, end) } else { SentPiece::PieceOf(id) }
        }
        Some(Item::Rest(id)) => advance_pieces(channel, ops, plan, id, Item::Rest, end),
        Some(Item::Remote(id)) => {
            let Some(op) = ops.at_mut(id) else {
                return SentPiece::Nothing;
            };
            op.is_begun = true;
            match &op.kind {
                OpKind::Write { .. } => advance_pieces(channel, ops, plan, id, Item::Remote, end),
                OpKind::Atomic { request, .. } if !request.fetch => SentPiece::LastOf(id, end),
                _ => SentPiece::PieceOf(id),
            }
        }
        Some(Item::Reply { kind, op, memory, sent, total }) => {
            let sent = sent + plan.payload;
            if sent < total {
                channel.queue.push_back(Item::Reply { kind, op, memory, sent, total });
            }
            SentPiece::Nothing
        }
        Some(Item::Control(..)) | None => SentPiece::Nothing,
    }
}

fn advance_pieces<M>(
    channel: &mut Channel<M>,
    ops: &mut Slab<Op<M>>,
    plan: &Plan,
    id: u32,
    again: fn(u32) -> Item<M>,
    end: u64,
) -> SentPiece {
    let Some(op) = ops.at_mut(id) else {
        return SentPiece::Nothing;
    };
    op.sent += plan.payload;
    if op.sent == op.total {
        return SentPiece::LastOf(id, end);
    }
    let is_write = matches!(op.kind, OpKind::Write { .. });
    if is_write || op.sent < op.limit {
        // The rest waits behind the other items, because long messages share the path with short
        // ones.
        channel.queue.push_back(again(id));
    }
    SentPiece::PieceOf(id)
}
