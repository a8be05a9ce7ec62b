//! Frames out: what the driver asks for, and what becomes true once a frame has left.
//!
//! Reserve, then commit: [`Endpoint::poll_transmit`] changes nothing that matters, so a driver whose path is full
//! forgets the frame and asks again later; [`Endpoint::transmitted`] makes it count.

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
        if channel.has_silent_loss {
            self.prepare(peer, path);
        }
        let channel = &mut self.channels[peer.0 as usize];
        let Some(plan) = plan(channel, &self.ops, path) else {
            if channel.has_silent_loss {
                channel.handle_app_limited(path);
            }
            return None;
        };
        let state = channel.path_state(path)?;
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

    /// Whether there is room for copies of what goes to `peer` and may have to go again. Without it payload stays with the
    /// application until the peer has it, and its operation is done only then. (What others read here is copied in any
    /// case: no operation holds that memory.) To be called before [`Self::poll_transmit`] and [`Self::inject`].
    #[inline]
    pub fn set_copying(&mut self, peer: Peer, may_copy: bool) {
        self.channels[peer.0 as usize].may_copy = may_copy;
    }

    /// Whether something that went to `peer` is kept, lest it has to go again.
    #[inline]
    pub fn retains_for(&self, peer: Peer) -> bool {
        self.channels[peer.0 as usize].out.retained() > 0
    }

    /// Asks `peer` to confirm what is kept for it, once for each byte: memory is wanted back, and nothing else may ever ask.
    pub fn solicit_ack(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        let sent = channel.out.next();
        if channel.out.retained() > 0 && channel.solicited < sent {
            (channel.solicited, channel.solicits_ack) = (sent, true);
            self.mark_busy(peer);
        }
    }

    /// The short way for a message whose bytes the path takes during this call and whose completion nobody waits for: its
    /// frame, without its payload of `size` bytes. `None`: something is in the way, take the long way ([`Self::send`]).
    /// [`Self::injected`] makes it count.
    #[inline(always)]
    pub fn inject(
        &mut self,
        passing: &InjectMessage,
        path: PathId,
    ) -> Option<OutgoingFrame<'static, M>> {
        let channel = &mut self.channels[passing.peer.0 as usize];
        let state = channel.path_state(path)?;
        let is_clear = channel.queue.is_empty()
            && state.held.is_none()
            && channel.has_nothing_to_repair()
            && !channel.is_measured()
            && channel.is_within_reorder_window()
            && channel.sends_by(path);
        let room = channel.credit.available().min(state.path.eager_max) as u64;
        if !is_clear || channel.failed.is_some() || passing.size > room {
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

    /// The message that [`Self::inject`] gave the frame of is with the path. `copy`: of its bytes, if that was wanted.
    #[inline(always)]
    pub fn injected(&mut self, passing: &InjectMessage, path: PathId, copy: Option<M>) {
        let channel = &mut self.channels[passing.peer.0 as usize];
        channel.credit.spend(passing.size as u32);
        if channel.path_state(path).is_some_and(|state| state.path.lossless) {
            channel.out.advance_lossless(passing.body());
            channel.handle_ack_sent(channel.confirmed_now(), true);
        } else {
            let plan = numbered(passing.plan(), channel, false);
            plan.commit(channel, (path, self.now), copy.map(|copy| (copy, 0)));
        }
        if channel.has_silent_loss {
            self.arm_probe_timeout(passing.peer);
        }
    }

    /// The frame that [`Self::poll_transmit`] gave last for `path` is with it now. `flushed`: its bytes have left the
    /// caller's memory; otherwise [`Self::handle_flushed`] tells when they have. `copy`: of its payload, if that was wanted
    /// and can be had; without one the payload stays with the application until the peer has it.
    #[inline]
    pub fn transmitted(&mut self, peer: Peer, path: PathId, flushed: bool, copy: Option<M>) {
        let channel = &mut self.channels[peer.0 as usize];
        let Some(plan) = plan(channel, &self.ops, path) else {
            return;
        };
        let mut sent = SentPiece::Nothing;
        if plan.origin == Origin::New {
            let lossless = channel.path_state(path).is_some_and(|state| state.path.lossless);
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
        // What this path leaves to another may be for one that has been offered it before, and declined.
        let leaves_rest = channel.has_choice() && !channel.queue.is_empty();
        if channel.has_silent_loss {
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

    /// What is next for `path`, and new, may be longer than any of its datagrams: then it is numbered now, and goes in pieces.
    /// False: it is not.
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

    /// The frame that `path` of `peer` held has left.
    pub fn handle_flushed(&mut self, peer: Peer, path: PathId) {
        let state = self.channels[peer.0 as usize].paths.get_mut(path.0 as usize);
        if let Some(sent) = state.and_then(|state| state.held.take()) {
            self.apply(peer, sent);
        }
    }

    /// Tells `peer` that this endpoint takes in nothing new, and asks it to confirm everything. What was started before
    /// still goes out behind it. It is said once, however often this is called.
    pub fn goodbye(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        let is_new = !core::mem::replace(&mut channel.has_said_goodbye, true);
        if is_new && channel.failed.is_none() {
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
        if awaits && channel.confirmed < end {
            // What was refused while the path held it waits already.
            if op.refused.is_none() {
                channel.await_delivery(end, id);
            }
        } else {
            // Another path may still have a piece.
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

    /// Completes operation `id`, though not while a path still reads its memory.
    #[inline]
    pub(super) fn complete_flushed(&mut self, peer: Peer, id: u32) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.holds(id) {
            channel.after_flush(id, SentPiece::LastOf(id, 0));
        } else {
            self.complete_op(id);
        }
    }

    /// The peer has taken in all bytes below `delivered`, says a frame that was sent when `sequence` was the number of its
    /// next byte.
    #[inline(always)]
    pub(super) fn handle_delivered(&mut self, peer: Peer, delivered: u64, sequence: u64) {
        let (channel, now) = (&mut self.channels[peer.0 as usize], self.now);
        let may_wait = channel.may_reorder();
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
                // It may have waited for room, or for a better path.
                self.mark_busy(peer);
            }
        }
        let channel = &mut self.channels[peer.0 as usize];
        if delivered <= channel.confirmed {
            return;
        }
        if sequence > channel.into.delivered() {
            channel.early_ack = channel.early_ack.max((sequence, delivered));
            return;
        }
        channel.confirmed = delivered;
        loop {
            let channel = &mut self.channels[peer.0 as usize];
            match channel.awaiting.front() {
                Some(&(end, id)) if end <= delivered => {
                    channel.awaiting.pop_front();
                    self.complete_flushed(peer, id);
                }
                _ => return,
            }
        }
    }

    /// Bytes have been taken in: a confirmation that has overtaken them may hold now.
    #[inline]
    pub(super) fn handle_early_ack(&mut self, peer: Peer) {
        let channel = &self.channels[peer.0 as usize];
        let (sequence, delivered) = channel.early_ack;
        if delivered > channel.confirmed && sequence <= channel.into.delivered() {
            self.handle_delivered(peer, delivered, sequence);
        }
    }

    /// Message `id` may go on up to byte `limit`; `cut`: and ends there.
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

/// Takes the planned frame off the queue.
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
                // Behind the others: long messages share the path with short ones.
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
        // Behind the others: long messages share the path with short ones.
        channel.queue.push_back(again(id));
    }
    SentPiece::PieceOf(id)
}
