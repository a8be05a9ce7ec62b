//! A channel: the two directions between this endpoint and one peer. The channel has a queue of
//! items to send, buffers and credit here, and joins parts from other files: paths (`path_set`),
//! acknowledgements (`acknowledgements`), control frames and repairs (`control_frame`), arriving
//! frames (`receive`) and timers (`timers`).

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::acknowledgements::{Confirmations, OwedAck};
use super::control_frame::{ControlFrame, PendingRepairs};
use super::path_set::PathSet;
use super::path_state::{PathProperties, PathState};
use super::receive::{Arrivals, OutOfOrderArrival};
use super::timers::ChannelTimers;
use super::{Action, Endpoint, Memory, Op, OpKind, Peer};
use crate::channel::{
    PathId, REORDER_WINDOW_BYTES_MAX, REORDER_WINDOW_FRAMES_MAX, ReassemblyBuffer, RetainedFrame,
    RetransmitBuffer,
};
use crate::credit::{Credit, GrantedCredit};
use crate::id::Address;
use crate::matching::ANY;
use crate::path::time::Time;
use crate::slab::Slab;
use crate::wire::frame::Kind;
use crate::wire::kind_header::KindHeader;

/// Items that may wait in the queue of a peer when the peer asks for one more answer. Without this
/// bound, a peer that sends requests and never reads could take all memory of this process. An
/// honest peer and this endpoint each have at most a quarter of this number in flight.
pub(super) const QUEUE_MAX: usize = 1 << 18;

pub(super) struct Channel<M> {
    pub address: Address,
    pub paths: PathSet,
    pub timers: ChannelTimers,
    /// The items that wait to be handed to a path, in sending order.
    pub queue: VecDeque<Item<M>>,
    pub out: RetransmitBuffer<M>,
    /// Whether payload for retransmission may be copied: see [`Endpoint::set_copying`].
    pub may_copy: bool,
    pub into: ReassemblyBuffer,
    pub owed_ack: OwedAck,
    pub confirmations: Confirmations,
    pub repairs: PendingRepairs,
    pub arrivals: Arrivals,
    pub credit: Credit,
    pub granted_credit: GrantedCredit,
    pub end: ChannelEnd,
    /// The peer is in the endpoint's queue of busy peers.
    pub is_busy: bool,
}

/// Whether and how the channel has ended.
#[derive(Default)]
pub(super) struct ChannelEnd {
    /// The errno with which the operations of the peer fail.
    pub failed: Option<i32>,
    /// The peer has sent Goodbye, so it delivers nothing new.
    pub has_left: bool,
    /// This endpoint has sent Goodbye to the peer.
    pub has_said_goodbye: bool,
}

/// Something that waits to be handed to a path.
pub(super) enum Item<M> {
    /// The first piece of a message.
    First(u32),
    /// Further pieces of a message.
    Rest(u32),
    /// Pieces of a write, or a read or atomic request.
    Remote(u32),
    /// A control frame: its kind, flags and head. It has no payload.
    Control(Kind, u8, KindHeader),
    /// Bytes of this process that the peer asked for.
    Reply { kind: Kind, op: u32, memory: M, sent: u64, total: u64 },
}

/// What a frame means for its operation once a path has taken the whole frame.
#[derive(Clone, Copy, Debug)]
pub(super) enum SentPiece {
    Nothing,
    /// The frame carries bytes of operation `.0`, but not the last ones.
    PieceOf(u32),
    /// The frame carries the last byte of operation `.0`, and ends at sequence number `.1`.
    LastOf(u32, u64),
}

impl SentPiece {
    /// The operation whose bytes the frame carries.
    pub fn op(self) -> Option<u32> {
        match self {
            SentPiece::Nothing => None,
            SentPiece::PieceOf(id) | SentPiece::LastOf(id, _) => Some(id),
        }
    }
}

impl<M: Memory> Item<M> {
    /// Bytes of the item that may be sent now.
    pub fn rest(&self, ops: &Slab<Op<M>>) -> u64 {
        match self {
            Item::First(id) | Item::Remote(id) => ops.at(*id).map_or(0, |op| op.total - op.sent),
            Item::Rest(id) => ops.at(*id).map_or(0, |op| op.limit.max(op.ahead) - op.sent),
            Item::Control(..) => 0,
            Item::Reply { sent, total, .. } => total - sent,
        }
    }
}

impl<M> Item<M> {
    pub fn first(kind: &OpKind<M>) -> fn(u32) -> Item<M> {
        match kind {
            OpKind::Message { .. } => Item::First,
            OpKind::Write { .. } | OpKind::Read { .. } | OpKind::Atomic { .. } => Item::Remote,
        }
    }
}

impl<M: Clone> Channel<M> {
    pub fn new(address: Address, eager_window: u32) -> Self {
        Self {
            address,
            paths: PathSet::default(),
            timers: ChannelTimers::default(),
            queue: VecDeque::new(),
            out: RetransmitBuffer::default(),
            may_copy: true,
            into: ReassemblyBuffer::default(),
            owed_ack: OwedAck::default(),
            confirmations: Confirmations::default(),
            repairs: PendingRepairs::default(),
            arrivals: Arrivals::default(),
            credit: Credit::new(eager_window),
            granted_credit: GrantedCredit::new(eager_window),
            end: ChannelEnd::default(),
            is_busy: false,
        }
    }

    pub fn fail(&mut self, errno: i32) {
        self.end.failed = Some(errno);
        self.queue.clear();
        self.confirmations.awaiting.clear();
        self.arrivals = Arrivals::default();
        self.repairs.control_frames.clear();
        self.out.clear();
        self.into.clear();
        self.paths.iter_mut().for_each(|state| state.held = None);
    }

    /// Whether nothing is lost, nothing is corrupt and no control frame waits.
    #[inline]
    pub fn has_nothing_to_repair(&self) -> bool {
        let owes =
            !self.repairs.control_frames.is_empty() || self.repairs.unreported_corrupt().is_some();
        !owes && !self.out.is_awaiting_status() && !self.out.has_lost()
    }

    /// The index of the control frame that `path` must send next, of kind `kind` if given.
    pub fn control_frame_for(&self, path: PathId, kind: Option<Kind>) -> Option<usize> {
        let may_go = |control_frame: &ControlFrame| match control_frame.path() {
            _ if kind.is_some_and(|kind| kind != control_frame.kind()) => false,
            _ if control_frame.kind() == Kind::AddressAdvertisement => {
                self.paths.may_advertise_by(path)
            }
            Some(wanted)
                if self.paths.path_state(wanted).is_some_and(|state| !state.is_suspected) =>
            {
                wanted == path
            }
            // A peer that sends a status request by a suspected path may be heard by that path and
            // may hear nothing from it. So the answer takes the paths that remain.
            Some(_) => self.paths.sends_by(path),
            None => self.paths.sends_by(path) && self.sends_control_by(path),
        };
        self.repairs.control_frames.iter().position(may_go)
    }

    /// Processes the answer to status request `number`, whose ranges have been processed.
    pub fn handle_status_reply(&mut self, now: Time, number: u64) {
        self.out.handle_status_reply(number);
        let Self { out, paths, .. } = self;
        let silent_loss = paths.with_silent_loss();
        let each = |frame: &RetainedFrame<M>| {
            if let Some(state) = paths.get_mut(frame.path.0 as usize) {
                state.handle_lost(frame);
            }
        };
        out.handle_silent_loss(number, |path| silent_loss.contains(&path), each);
        for PathState { flow, round_trip, .. } in paths.iter_mut() {
            if let Some(flow) = flow {
                flow.handle_status_reply(now, number, round_trip);
            }
        }
    }

    /// Records that status request `number` left by `path` at time `now`.
    pub fn handle_status_request_sent(&mut self, (path, now): (PathId, Time), number: u64) {
        self.out.handle_status_request_sent(number);
        let silent_loss = self.paths.with_silent_loss();
        self.out.mark_status_requested(number, |path| silent_loss.contains(&path));
        let flow = self.paths.get_mut(path.0 as usize).and_then(|state| state.flow.as_mut());
        if let Some(flow) = flow {
            flow.handle_status_request_sent(now, number);
        }
    }

    /// Processes what has been confirmed, for every path, and detects the losses which this shows.
    pub fn process_acks(&mut self, now: Time) {
        for number in 0..self.paths.len() {
            if self.paths[number].process_acks(now) {
                self.detect_losses(PathId(number as u8), now);
            }
        }
    }

    /// Marks for retransmission the frames of `path` that are lost at time `now`.
    pub fn detect_losses(&mut self, path: PathId, now: Time) {
        let Self { out, paths, .. } = self;
        let state = &mut paths[path.0 as usize];
        let mut lost_request = false;
        while let Some((order, start)) = state.next_lost(now) {
            let each = |frame: &RetainedFrame<M>| state.rate.handle_lost(frame.length as u64);
            match start {
                Some(start) => out.handle_lost((path, order), start, each),
                None => lost_request = true,
            }
        }
        if lost_request && out.is_awaiting_status() {
            self.repairs.owe_status_request(Some(path));
        }
    }

    /// Marks all frames in flight on `path` lost: the path lost them or can no longer be observed.
    pub fn lose_in_flight(&mut self, path: PathId, now: Time) {
        let flow = self.paths.get_mut(path.0 as usize).and_then(|state| state.flow.as_mut());
        if let Some(flow) = flow {
            flow.lose_in_flight(now);
        }
        self.out.handle_break(path);
    }

    /// Queues everything again that the peer may not have heard: acknowledgements, corrupt ranges,
    /// the answer to the last status request, and a new status request.
    pub fn repeat_control_frames(&mut self) {
        self.owed_ack.is_wanted |= self.into.delivered() > 0;
        self.confirmations.is_solicited |= !self.confirmations.awaiting.is_empty();
        self.repairs.repeat_corrupt();
        if let Some(answered_request) = self.repairs.answered_request {
            self.repairs.owe_sack(answered_request, None);
        }
        self.out.request_status();
    }

    /// Whether a frame must be sent to the peer even if nothing else waits to be sent.
    #[inline]
    pub fn owes_ack(&self) -> bool {
        // While a refusal waits, nothing new can be confirmed. A frame would change nothing, and
        // another one would be owed at once.
        (self.owed_ack.is_wanted && self.repairs.refusals == 0)
            || self.granted_credit.is_half_unadvertised()
    }

    /// Records that the header of a frame that has left confirms all bytes below `acknowledged` and
    /// advertises the granted credit. `is_answer` says that the frame carries new bytes, with which
    /// the application may have answered.
    #[inline]
    pub fn handle_ack_sent(&mut self, acknowledged: u64, is_answer: bool) {
        self.owed_ack.handle_sent(acknowledged, self.into.delivered(), is_answer);
        self.granted_credit.advertise();
    }

    /// The position that a header may confirm: nothing new while a refusal waits to be sent.
    #[inline]
    pub fn confirmed_now(&self) -> u64 {
        if self.repairs.refusals > 0 { self.owed_ack.acknowledged } else { self.into.delivered() }
    }

    /// Removes operation `id` from all queues, so that no later operation is mistaken for it.
    pub fn remove_operation(&mut self, id: u32) {
        let is_of = |item: &Item<M>| match *item {
            Item::First(of) | Item::Rest(of) | Item::Remote(of) => of == id,
            Item::Control(..) | Item::Reply { .. } => false,
        };
        self.queue.retain(|item| !is_of(item));
        self.confirmations.awaiting.retain(|&(_, of)| of != id);
    }

    /// Whether an owed acknowledgement may wait for the application's answer, as the last ones did.
    #[inline]
    pub fn may_defer_ack(&self) -> bool {
        self.owed_ack.may_wait_for_answer() && !self.granted_credit.is_half_unadvertised()
    }

    /// Whether new bytes may be sent without exceeding the peer's reorder window.
    #[inline]
    pub fn is_within_reorder_window(&self) -> bool {
        let (frames, bytes) = (self.out.retained(), self.out.unconfirmed());
        let is_near = bytes < REORDER_WINDOW_BYTES_MAX && frames < REORDER_WINDOW_FRAMES_MAX;
        is_near || frames == 0 || !self.paths.may_reorder()
    }

    pub fn is_flushed(&self) -> bool {
        let is_held = |state: &PathState| state.held.is_some();
        let waits = !self.queue.is_empty() || self.out.has_lost() || self.paths.iter().any(is_held);
        self.end.failed.is_some() || !waits
    }

    /// Whether nothing is in flight on a path with silent loss, except Goodbye frames. A Goodbye is
    /// worth no more than a short wait: the peer may compute for long, and learns of the departure
    /// from others if the frame is lost.
    pub fn is_safe(&self) -> bool {
        self.end.failed.is_some()
            || (self.is_flushed() && !self.is_at_risk(|kind| kind != Kind::Goodbye))
    }

    /// Whether [`Self::is_safe`] holds, and the peer has received Goodbye or has left itself.
    pub fn is_goodbye_acknowledged(&self) -> bool {
        let has_heard = self.end.has_left || !self.is_at_risk(|kind| kind == Kind::Goodbye);
        self.end.failed.is_some() || (self.is_safe() && has_heard)
    }

    /// Whether a frame of a kind that `is_meant` accepts is in flight on a path with silent loss.
    fn is_at_risk(&self, is_meant: impl Fn(Kind) -> bool) -> bool {
        let has_silent_loss =
            |path| self.paths.path_state(path).is_none_or(|state| state.path.silent_loss);
        self.out.is_under_way(|kind, path| is_meant(kind) && has_silent_loss(path))
    }

    pub fn is_drained(&self) -> bool {
        self.end.failed.is_some() || (self.is_flushed() && self.out.unconfirmed() == 0)
    }
}

impl<M: Memory> Endpoint<M> {
    /// Releases the reorder buffer of `frame`: the driver drops the frame's bytes.
    pub(super) fn release_buffered(&mut self, peer: Peer, frame: u64) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.into.release(frame).is_none() {
            return;
        }
        let (discarded, rest) =
            channel.arrivals.out_of_order.drain(..).partition(|kept| kept.frame == frame);
        channel.arrivals.out_of_order = rest;
        let discarded: Vec<OutOfOrderArrival> = discarded;
        for OutOfOrderArrival { path, .. } in discarded {
            self.push_action(Action::DiscardPayload { peer, path });
        }
        self.push_action(Action::Release { peer, frame });
    }

    /// Sets how many eager bytes `peer` accepts from this endpoint, which may differ from what this
    /// endpoint accepts. The driver must call this before it sends anything to `peer`; later it has
    /// no effect.
    pub fn set_eager_window(&mut self, peer: Peer, bytes: u32) {
        self.channels[peer.0 as usize].credit.set_window(bytes);
    }

    /// The properties of the path to `peer` that opened or changed last or, after a path was
    /// closed, of the first path that is up.
    pub fn path(&self, peer: Peer) -> PathProperties {
        self.channels[peer.0 as usize].paths.properties
    }

    /// Whether `peer` has sent Goodbye.
    pub fn has_left(&self, peer: Peer) -> bool {
        self.channels[peer.0 as usize].end.has_left
    }

    /// Records that `peer` has broken the protocol: its Goodbye counts for nothing, and its
    /// operations fail with it. The driver must call this function before [`Self::fail`].
    pub fn revoke_goodbye(&mut self, peer: Peer) {
        self.channels[peer.0 as usize].end.has_left = false;
    }

    /// Peers that have sent Goodbye, once for each receive that accepts messages of that peer only.
    pub fn awaited_departed_peers(&self) -> impl Iterator<Item = Peer> {
        let wanted = self.posted_queue.tagged.iter().chain(self.posted_queue.untagged.iter());
        let sources = wanted.map(|want| want.source).filter(|source| *source != ANY).map(Peer);
        sources.filter(|peer| self.has_left(*peer))
    }

    /// Whether this endpoint has ever delivered a frame of `peer`.
    pub fn has_been_heard(&self, peer: Peer) -> bool {
        self.channels[peer.0 as usize].into.delivered() > 0
    }

    /// The address of `peer`.
    pub fn address(&self, peer: Peer) -> Address {
        self.channels[peer.0 as usize].address
    }

    /// Schedules the acknowledgements that waited for an answer of the application, which has had
    /// its chance to answer. The driver must call this function whenever it is asked for progress,
    /// before it polls for frames.
    #[inline]
    pub fn flush_deferred_acks(&mut self) {
        while let Some(peer) = self.deferred.pop() {
            let channel = &mut self.channels[peer.0 as usize];
            if channel.owed_ack.is_wanted && channel.end.failed.is_none() {
                channel.owed_ack.piggybacked = 0;
                self.mark_busy(peer);
            }
        }
    }

    /// Schedules an acknowledgement to `peer`, if one is owed.
    #[inline(always)]
    pub(super) fn schedule_ack(&mut self, peer: Peer) {
        let channel = &self.channels[peer.0 as usize];
        if !channel.owes_ack() {
            return;
        }
        if channel.may_defer_ack() {
            self.deferred.push(peer);
        } else {
            self.mark_busy(peer);
        }
    }

    /// The next peer with frames to send. The queue names each peer once until [`Self::mark_busy`]
    /// names the peer again, so a driver whose path is full may drop the peer and call
    /// [`Self::mark_busy`] when the path accepts frames again.
    #[inline]
    pub fn next_busy(&mut self) -> Option<Peer> {
        let peer = self.busy.pop_front()?;
        self.channels[peer.0 as usize].is_busy = false;
        Some(peer)
    }

    /// Puts `peer` into the queue of [`Self::next_busy`], unless it is there.
    #[inline]
    pub fn mark_busy(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        if !channel.is_busy {
            channel.is_busy = true;
            self.busy.push_back(peer);
        }
    }

    pub(super) fn enqueue_front(&mut self, peer: Peer, item: Item<M>) {
        if self.failed(peer).is_some() {
            return;
        }
        self.channels[peer.0 as usize].queue.push_front(item);
        self.mark_busy(peer);
    }

    #[inline]
    pub(super) fn enqueue(&mut self, peer: Peer, item: Item<M>) {
        if self.failed(peer).is_some() {
            return;
        }
        self.channels[peer.0 as usize].queue.push_back(item);
        self.mark_busy(peer);
    }
}
