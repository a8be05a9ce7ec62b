//! Sends frames: what the driver polls for, and what becomes true once a frame has left.
//!
//! Sending takes two steps. [`Endpoint::poll_transmit`] changes nothing that matters, so a driver
//! whose path is full drops the frame and polls again later. [`Endpoint::transmitted`] makes the
//! frame count as sent.

use super::channel::{Channel, Item, SentPiece};
use super::plan::{
    InjectMessage, OutgoingFrame, Plan, item_memory, numbered, plan, plan_too_long, planned_memory,
};
use super::{Action, CompletionLevel, Endpoint, Failure, Memory, Op, OpKind, PathProperties, Peer};
use crate::channel::{Origin, PathId};
use crate::slab::Slab;
use crate::wire::frame::{Kind, flag};
use crate::wire::kind_header::KindHeader;

impl<M: Memory> Endpoint<M> {
    /// The next frame for `path` of `peer`, if there is one.
    #[inline]
    pub fn poll_transmit(&mut self, peer: Peer, path: PathId) -> Option<OutgoingFrame<'_, M>> {
        let channel = &self.channels[peer.0 as usize];
        if channel.paths.has_silent_loss {
            self.prepare(peer, path);
        }
        let channel = &mut self.channels[peer.0 as usize];
        let Some(plan) = plan(channel, &self.ops, path) else {
            if channel.paths.has_silent_loss {
                channel.handle_app_limited(path);
            }
            return None;
        };
        let state = channel.paths.path_state(path)?;
        let PathProperties { checked, lossless, copy_max, .. } = state.path;
        let must_release_memory = plan.origin == Origin::Retransmission || state.is_suspected;
        let front = plan.front(self.config.address, channel, checked);
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

    /// Sets whether payload to `peer` that may have to be retransmitted may be copied. If not, the
    /// payload stays with the application until the peer has it, and only then is its operation
    /// done. (The answers to remote reads are copied in any case, because no operation holds their
    /// memory.) The driver must call this function before [`Self::poll_transmit`] and
    /// [`Self::inject`].
    #[inline]
    pub fn set_copying(&mut self, peer: Peer, may_copy: bool) {
        self.channels[peer.0 as usize].may_copy = may_copy;
    }

    /// Whether the retransmit buffer of `peer` holds anything.
    #[inline]
    pub fn retains_for(&self, peer: Peer) -> bool {
        self.channels[peer.0 as usize].out.retained() > 0
    }

    /// Asks `peer` to confirm what its retransmit buffer holds, once for each byte. The driver
    /// calls this function when memory is short and no other frame may ever ask for an
    /// acknowledgement.
    pub fn solicit_ack(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        let sent = channel.out.next();
        if channel.out.retained() > 0 && channel.confirmations.solicited_end < sent {
            (channel.confirmations.solicited_end, channel.confirmations.is_solicited) =
                (sent, true);
            self.mark_busy(peer);
        }
    }

    /// Prepares a message for immediate sending: the path takes the message's bytes during this
    /// call, and nobody waits for its completion. Returns the message's frame without its payload
    /// of `size` bytes. `None` means that the message must take the queue ([`Self::send`]).
    /// [`Self::injected`] makes the frame count as sent.
    #[inline(always)]
    pub fn inject(
        &mut self,
        passing: &InjectMessage,
        path: PathId,
    ) -> Option<OutgoingFrame<'static, M>> {
        let channel = &mut self.channels[passing.peer.0 as usize];
        let state = channel.paths.path_state(path)?;
        let is_clear = channel.queue.is_empty()
            && state.held.is_none()
            && channel.has_nothing_to_repair()
            && !channel.paths.is_measured()
            && channel.is_within_reorder_window()
            && channel.paths.sends_by(path);
        let room = channel.credit.available().min(state.path.eager_max) as u64;
        if !is_clear || channel.end.failed.is_some() || passing.size > room {
            return None;
        }
        let (checked, lossless) = (state.path.checked, state.path.lossless);
        if !lossless && !channel.may_copy {
            return None;
        }
        let plan = numbered(passing.plan(), channel, lossless);
        let front = plan.front(self.config.address, channel, checked);
        let wants_copy = !lossless;
        Some(OutgoingFrame { front, payload: None, wants_copy, must_release_memory: false })
    }

    /// Records that the path has taken the message whose frame [`Self::inject`] returned. `copy` is
    /// a copy of the message's bytes, if one was wanted.
    #[inline(always)]
    pub fn injected(&mut self, passing: &InjectMessage, path: PathId, copy: Option<M>) {
        let channel = &mut self.channels[passing.peer.0 as usize];
        channel.credit.spend(passing.size as u32);
        if channel.paths.path_state(path).is_some_and(|state| state.path.lossless) {
            channel.out.advance_lossless(passing.body());
            channel.handle_ack_sent(channel.confirmed_now(), true);
        } else {
            let plan = numbered(passing.plan(), channel, false);
            plan.commit(channel, (path, self.now), copy.map(|copy| (copy, 0)));
        }
        if channel.paths.has_silent_loss {
            self.arm_probe_timeout(passing.peer);
        }
    }

    /// Records that `path` has taken the frame that [`Self::poll_transmit`] returned last for this
    /// path. `flushed` says that the frame's bytes have left the caller's memory; otherwise the
    /// driver reports this later with [`Self::handle_flushed`]. `copy` is a copy of the payload, if
    /// one was wanted and memory for it was available. Without a copy, the payload stays with the
    /// application until the peer has it.
    #[inline]
    pub fn transmitted(&mut self, peer: Peer, path: PathId, flushed: bool, copy: Option<M>) {
        let channel = &mut self.channels[peer.0 as usize];
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
            plan.commit(channel, (path, self.now), memory);
            sent = advance(channel, &mut self.ops, &plan);
            if let (true, Some(op)) = (is_borrowed, sent.op().and_then(|id| self.ops.at_mut(id))) {
                op.is_borrowed = true;
            }
        } else {
            plan.commit(channel, (path, self.now), None);
        }
        // The items that this path leaves to another path may suit a path that was polled before
        // and declined.
        let leaves_rest = channel.paths.has_choice() && !channel.queue.is_empty();
        if channel.paths.has_silent_loss {
            self.arm_probe_timeout(peer);
        }
        if leaves_rest {
            self.mark_busy(peer);
        }
        if flushed {
            self.apply(peer, sent);
        } else if let Some(state) = self.channels[peer.0 as usize].paths.get_mut(path.0 as usize) {
            state.held = Some(sent);
        }
    }

    /// Numbers the next frame for `path` and queues it in pieces, if the frame is new and longer
    /// than any datagram of the path. Returns false otherwise.
    pub(super) fn cut_up(&mut self, peer: Peer, path: PathId) -> bool {
        let channel = &mut self.channels[peer.0 as usize];
        let Some(plan) = plan_too_long(channel, &self.ops, path) else { return false };
        let memory = item_memory(channel, &self.ops).map(|memory| (memory.clone(), plan.at));
        plan.commit_lost(channel, path, memory);
        let sent = advance(channel, &mut self.ops, &plan);
        if let Some(op) = sent.op().and_then(|id| self.ops.at_mut(id)) {
            op.is_borrowed = true;
        }
        self.apply(peer, sent);
        true
    }

    /// Records that the frame that `path` of `peer` held has left completely.
    pub fn handle_flushed(&mut self, peer: Peer, path: PathId) {
        let state = self.channels[peer.0 as usize].paths.get_mut(path.0 as usize);
        if let Some(sent) = state.and_then(|state| state.held.take()) {
            self.apply(peer, sent);
        }
    }

    /// Sends Goodbye to `peer`: this endpoint delivers nothing new, and asks the peer to confirm
    /// everything. Operations that were started before are still sent behind the Goodbye. Only the
    /// first call has an effect.
    pub fn goodbye(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        let is_new = !core::mem::replace(&mut channel.end.has_said_goodbye, true);
        if is_new && channel.end.failed.is_none() {
            self.enqueue(peer, Item::Control(Kind::Goodbye, flag::WANT_ACK, KindHeader::Empty));
        }
    }

    #[inline]
    pub(super) fn apply(&mut self, peer: Peer, sent: SentPiece) {
        let (id, end) = match sent {
            SentPiece::Nothing | SentPiece::PieceOf(_) => return,
            SentPiece::LastOf(id, end) => (id, end),
        };
        let channel = &mut self.channels[peer.0 as usize];
        let Some(op) = self.ops.at(id) else {
            return;
        };
        let awaits = op.level == CompletionLevel::DeliveryComplete || op.is_borrowed;
        if awaits && channel.confirmations.confirmed < end {
            // An operation that was refused while a path held its frame waits for delivery already.
            if op.refused.is_none() {
                channel.confirmations.await_delivery(end, id);
            }
        } else {
            // Another path may still hold a piece of the operation.
            self.complete_flushed(peer, id);
        }
    }

    #[inline]
    pub(super) fn complete_op(&mut self, id: u32) {
        if let Some(op) = self.ops.remove(id) {
            let failure = op.refused.map(Failure::Errno);
            self.finish_op(op, failure);
        }
    }

    /// Completes operation `id`, or, if a path still reads the operation's memory, completes it
    /// when the path has sent its frame.
    #[inline]
    pub(super) fn complete_flushed(&mut self, peer: Peer, id: u32) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.paths.holds(id) {
            channel.paths.after_flush(id, SentPiece::LastOf(id, 0));
        } else {
            self.complete_op(id);
        }
    }

    /// Processes the `delivered` field of a frame that was sent when the number of the peer's next
    /// byte was `sequence`: the peer has delivered all bytes below `delivered`.
    #[inline(always)]
    pub(super) fn handle_delivered(&mut self, peer: Peer, delivered: u64, sequence: u64) {
        let (channel, now) = (&mut self.channels[peer.0 as usize], self.now);
        let may_wait = channel.paths.may_reorder();
        let Channel { out, paths, .. } = channel;
        let is_new = out.handle_delivered(delivered, |frame| {
            if let Some(state) = paths.get_mut(frame.path.0 as usize) {
                state.handle_confirmed(now, frame);
            }
        });
        if is_new && may_wait {
            self.process_flow_acks(peer);
            let channel = &self.channels[peer.0 as usize];
            if !channel.queue.is_empty() || channel.out.has_lost() {
                // The peer's frames may have waited for the reorder window, or for a better path.
                self.mark_busy(peer);
            }
        }
        let channel = &mut self.channels[peer.0 as usize];
        if delivered <= channel.confirmations.confirmed {
            return;
        }
        if sequence > channel.into.delivered() {
            channel.confirmations.early = channel.confirmations.early.max((sequence, delivered));
            return;
        }
        channel.confirmations.confirmed = delivered;
        loop {
            let channel = &mut self.channels[peer.0 as usize];
            match channel.confirmations.awaiting.front() {
                Some(&(end, id)) if end <= delivered => {
                    channel.confirmations.awaiting.pop_front();
                    self.complete_flushed(peer, id);
                }
                _ => return,
            }
        }
    }

    /// Applies an early acknowledgement, if the bytes that it overtook have been delivered.
    #[inline]
    pub(super) fn handle_early_ack(&mut self, peer: Peer) {
        let channel = &self.channels[peer.0 as usize];
        let (sequence, delivered) = channel.confirmations.early;
        if delivered > channel.confirmations.confirmed && sequence <= channel.into.delivered() {
            self.handle_delivered(peer, delivered, sequence);
        }
    }

    /// Lets message `id` go on up to byte `limit`. `cut` says that the message ends there.
    pub(super) fn handle_grant(&mut self, peer: Peer, id: u32, recv: u32, limit: u64, cut: bool) {
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
            self.enqueue(peer, Item::Rest(id));
        }
    }

    pub(super) fn push_action(&mut self, action: Action<M>) {
        self.actions.push_back(action);
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
