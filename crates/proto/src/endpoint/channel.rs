//! The two directions between this endpoint and one peer: paths, queue, buffers and credit.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use super::control_frame::ControlFrame;
use super::incoming::AnnouncedPieces;
use super::path_state::{PathProperties, PathState};
use super::receive::{ArrivingFrame, OutOfOrderArrival};
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
    /// The properties of the path that opened or changed last or, once a path has been closed, of
    /// the first path that is up. They decide how this endpoint asks for the rest of a message.
    pub path: PathProperties,
    /// All paths, indexed by path number.
    pub paths: Vec<PathState>,
    /// The number of paths by which frames are sent.
    senders: usize,
    /// The only sending path, if exactly one path sends and it is neither spare nor suspected.
    sole_sender: Option<PathId>,
    /// The suspected paths that send because no other path is up, as a bit mask by path number.
    suspected_senders: u8,
    /// Whether the transfer time of frames matters: see [`Self::is_measured`].
    is_measured: bool,
    /// Whether frames may overtake each other: see [`Self::may_reorder`].
    may_reorder: bool,
    /// The path by which this endpoint last received something from the peer: it works.
    pub last_heard_by: PathId,
    /// Some path that is up can lose frames without reporting the loss.
    pub has_silent_loss: bool,
    /// Some path that is up carries datagrams.
    pub has_datagrams: bool,
    pub timers: ChannelTimers,
    /// The items that wait to be handed to a path, in sending order.
    pub queue: VecDeque<Item<M>>,
    pub out: RetransmitBuffer<M>,
    /// Whether payload for retransmission may be copied: see [`Endpoint::set_copying`].
    pub may_copy: bool,
    pub into: ReassemblyBuffer,
    /// All bytes below this number have been delivered, as this endpoint last reported to the peer.
    pub acknowledged: u64,
    /// The peer waits for an acknowledgement.
    pub ack_wanted: bool,
    /// The peer waits for an acknowledgement of all bytes below this number; 0: of none.
    pub ack_when_delivered: u64,
    /// This endpoint waits for an acknowledgement, and no frame that it has sent asks for one.
    pub solicits_ack: bool,
    /// [`Endpoint::solicit_ack`] has asked for an acknowledgement of all bytes below this number.
    pub solicited: u64,
    /// Acknowledgements in a row that travelled at once with an answer of the application.
    pub piggybacked_acks: u8,
    /// The control frames that wait to be sent. They carry no bytes of the channel.
    pub control_frames: Vec<ControlFrame>,
    /// The last status request answered. The answer may be lost with a path that the peer closed.
    pub answered_request: Option<u64>,
    /// Corrupt ranges (start, end) not yet received again, and whether the peer knows of each.
    pub corrupt: Vec<(u64, u64, bool)>,
    /// The bytes from the first to the end of early frames that were dropped because they exceeded
    /// the reorder window. This endpoint asks for them when their turn comes.
    pub dropped_out_of_order: Option<(u64, u64)>,
    /// The number of refusals that wait to be sent.
    pub refusals: u32,
    /// The peer has delivered all bytes of this endpoint below this number, and this endpoint has
    /// delivered all that the peer sent before the acknowledgement, refusals included. Operations
    /// wait for this position.
    pub confirmed: u64,
    /// An acknowledgement (`.1`) that overtook bytes of the peer. It holds once this endpoint has
    /// delivered all bytes below `.0`.
    pub early_ack: (u64, u64),
    /// Operations (`.1`) that complete when the peer has all bytes below `.0`, in ascending order.
    pub awaiting: VecDeque<(u64, u32)>,
    pub credit: Credit,
    pub granted_credit: GrantedCredit,
    pub eager_window: u32,
    /// The frame whose turn it is and whose payload is arriving.
    pub arriving: Option<ArrivingFrame>,
    /// Early frames and fragments that are written into reorder buffers, at most one per path.
    pub out_of_order: Vec<OutOfOrderArrival>,
    /// Messages of which announced pieces are still to come, by the sender's operation number. Each
    /// holds credit for at least one byte, so the credit bounds their number.
    pub announced: BTreeMap<u32, AnnouncedPieces>,
    /// Bytes of frames sent since a frame last asked for an acknowledgement.
    pub bytes_since_ack_request: u64,
    pub failed: Option<i32>,
    /// The peer has sent Goodbye, so it delivers nothing new.
    pub has_left: bool,
    /// This endpoint has sent Goodbye to the peer.
    pub has_said_goodbye: bool,
    /// The peer is in the endpoint's queue of busy peers.
    pub is_busy: bool,
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
            path: PathProperties::RELAY,
            paths: Vec::new(),
            senders: 0,
            sole_sender: None,
            suspected_senders: 0,
            is_measured: false,
            may_reorder: false,
            last_heard_by: PathId(0),
            has_silent_loss: false,
            has_datagrams: false,
            timers: ChannelTimers::default(),
            queue: VecDeque::new(),
            out: RetransmitBuffer::default(),
            may_copy: true,
            into: ReassemblyBuffer::default(),
            acknowledged: 0,
            ack_wanted: false,
            ack_when_delivered: 0,
            solicits_ack: false,
            solicited: 0,
            piggybacked_acks: 0,
            control_frames: Vec::new(),
            answered_request: None,
            corrupt: Vec::new(),
            dropped_out_of_order: None,
            refusals: 0,
            confirmed: 0,
            early_ack: (0, 0),
            awaiting: VecDeque::new(),
            credit: Credit::new(eager_window),
            granted_credit: GrantedCredit::default(),
            eager_window,
            arriving: None,
            out_of_order: Vec::new(),
            announced: BTreeMap::new(),
            bytes_since_ack_request: 0,
            failed: None,
            has_left: false,
            has_said_goodbye: false,
            is_busy: false,
        }
    }

    pub fn fail(&mut self, errno: i32) {
        self.failed = Some(errno);
        self.queue.clear();
        self.awaiting.clear();
        self.arriving = None;
        self.out_of_order.clear();
        self.announced.clear();
        self.control_frames.clear();
        self.out.clear();
        self.into.clear();
        self.paths.iter_mut().for_each(|state| state.held = None);
    }

    /// The state of path `path`, if the path is up.
    #[inline]
    pub fn path_state(&self, path: PathId) -> Option<&PathState> {
        self.paths.get(path.0 as usize).filter(|state| state.is_up)
    }

    /// The paths by which frames are sent: of the paths that are up, those of the lowest rank. A
    /// spare path sends only if no other path is up, and a suspected path ranks below a spare path.
    fn sending(&self) -> impl Iterator<Item = &PathState> {
        let up = || self.paths.iter().filter(|state| state.is_up);
        let lowest = up().map(PathState::rank).min();
        up().filter(move |state| Some(state.rank()) == lowest)
    }

    /// Whether frames are sent by several paths, so that each frame can choose a path.
    #[inline]
    pub fn has_choice(&self) -> bool {
        self.senders > 1
    }

    /// Whether transfer times matter: frames can choose between paths or are sent as datagrams.
    #[inline]
    pub fn is_measured(&self) -> bool {
        self.is_measured
    }

    /// Whether a frame that is sent later may arrive earlier, by another path or by the same path.
    /// If so, this endpoint sends no more than the peer's reorder window takes.
    #[inline]
    pub fn may_reorder(&self) -> bool {
        self.may_reorder
    }

    /// Computes which paths send. The endpoint must call this function whenever paths have changed.
    /// Returns, as a bit mask by path number, the suspected paths that sent because no other path
    /// was up, and that now send no more.
    pub fn count_senders(&mut self) -> u8 {
        self.senders = self.sending().count();
        self.sole_sender = self.find_sole_sender();
        let are_suspected = self.sending().any(|state| state.is_suspected);
        let suspected =
            self.paths.iter().enumerate().filter(|(_, state)| state.is_up && state.is_suspected);
        let suspected = suspected.fold(0, |all, (number, _)| all | 1 << number);
        let now = if are_suspected { suspected } else { 0 };
        let left = core::mem::replace(&mut self.suspected_senders, now) & suspected & !now;
        let has_datagrams = self.sending().any(|state| state.path.datagram.is_some());
        self.is_measured = self.has_choice() || has_datagrams;
        // Frames that a suspected path carries may still arrive.
        let several =
            self.paths.iter().filter(|state| state.is_up && !state.path.spare).count() > 1;
        self.may_reorder =
            several || self.is_measured || self.sending().any(|state| state.path.reorders);
        // Frames that a path carried before it became spare may still be lost.
        let mut up = self.paths.iter().filter(|state| state.is_up);
        self.has_datagrams = up.clone().any(|state| state.flow.is_some());
        self.has_silent_loss = up.any(|state| state.path.silent_loss);
        left
    }

    fn find_sole_sender(&self) -> Option<PathId> {
        let is_sole = |state: &PathState| state.is_up && !state.path.spare && !state.is_suspected;
        let place = self.paths.iter().position(is_sole).filter(|_| self.senders == 1)?;
        Some(PathId(place as u8))
    }

    /// Whether the channel needs the time.
    pub fn is_timed(&self) -> bool {
        self.is_measured || self.has_silent_loss
    }

    /// Whether any path sends frames.
    pub fn has_senders(&self) -> bool {
        self.senders > 0
    }

    /// Whether path `path` sends frames.
    #[inline]
    pub fn sends_by(&self, path: PathId) -> bool {
        self.sole_sender == Some(path)
            || self
                .path_state(path)
                .is_some_and(|state| self.sending().any(|it| core::ptr::eq(it, state)))
    }

    /// Whether the next piece, of `bytes` bytes, is best sent by `path`: no other sending path
    /// would finish all `rest` bytes that are left sooner. So a slow path never delays a message,
    /// and a short message takes the quickest path.
    pub fn prefers(&self, path: PathId, bytes: u64, rest: u64) -> bool {
        let Some(mine) = self.path_state(path) else {
            return false;
        };
        let finish = mine.finish_nanos(bytes);
        self.sending().all(|other| core::ptr::eq(other, mine) || finish <= other.finish_nanos(rest))
    }

    /// Whether nothing is lost, nothing is corrupt and no control frame waits.
    #[inline]
    pub fn has_nothing_to_repair(&self) -> bool {
        let owes = !self.control_frames.is_empty() || self.unreported_corrupt().is_some();
        !owes && !self.out.is_awaiting_status() && !self.out.has_lost()
    }

    /// Queues a report to the peer of the ranges that arrived early: see [`ControlFrame::Sack`].
    pub fn owe_sack(&mut self, number: u64, path: Option<PathId>) {
        let is_same = |control_frame: &&mut ControlFrame| match control_frame {
            ControlFrame::Sack(_, other) => number == 0 || *other == path,
            _ => false,
        };
        match self.control_frames.iter_mut().find(is_same) {
            Some(ControlFrame::Sack(other, _)) => *other = number.max(*other),
            _ => self.control_frames.push(ControlFrame::Sack(number, path)),
        }
    }

    /// Queues a status request to the peer, unless the same one waits.
    pub fn owe_status_request(&mut self, path: Option<PathId>) {
        if !self.control_frames.contains(&ControlFrame::StatusRequest(path)) {
            self.control_frames.push(ControlFrame::StatusRequest(path));
        }
    }

    /// The index of the control frame that `path` must send next, of kind `kind` if given.
    pub fn control_frame_for(&self, path: PathId, kind: Option<Kind>) -> Option<usize> {
        let may_go = |control_frame: &ControlFrame| match control_frame.path() {
            _ if kind.is_some_and(|kind| kind != control_frame.kind()) => false,
            _ if control_frame.kind() == Kind::AddressAdvertisement => self.may_advertise_by(path),
            Some(wanted) if self.path_state(wanted).is_some_and(|state| !state.is_suspected) => {
                wanted == path
            }
            // A peer that sends a status request by a suspected path may be heard by that path and
            // may hear nothing from it. So the answer takes the paths that remain.
            Some(_) => self.sends_by(path),
            None => self.sends_by(path) && self.sends_control_by(path),
        };
        self.control_frames.iter().position(may_go)
    }

    /// Whether address advertisements may be sent by `path`. Their arrival should be certain, and
    /// not every listener on the network should read them, so no datagram carries them as long as
    /// there is a path without datagrams.
    pub fn may_advertise_by(&self, path: PathId) -> bool {
        let is_sure = |state: &PathState| state.is_up && state.flow.is_none();
        let is_needed = || !self.paths.iter().any(is_sure);
        self.path_state(path).is_some_and(|state| is_sure(state) || is_needed())
    }

    /// Processes the answer to status request `number`, whose ranges have been processed.
    pub fn handle_status_reply(&mut self, now: Time, number: u64) {
        self.out.handle_status_reply(number);
        let Self { out, paths, .. } = self;
        let silent_loss = silent_loss_paths(paths);
        let each = |frame: &RetainedFrame<M>| {
            if let Some(state) = paths.get_mut(frame.path.0 as usize) {
                state.handle_lost(frame);
            }
        };
        out.handle_silent_loss(number, |path| silent_loss.contains(&path), each);
        for PathState { flow, round_trip, .. } in paths {
            if let Some(flow) = flow {
                flow.handle_status_reply(now, number, round_trip);
            }
        }
    }

    /// Records that status request `number` left by `path` at time `now`.
    pub fn handle_status_request_sent(&mut self, (path, now): (PathId, Time), number: u64) {
        self.out.handle_status_request_sent(number);
        let silent_loss = silent_loss_paths(&self.paths);
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
            self.owe_status_request(Some(path));
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

    /// The index of the first corrupt range that has not been reported to the peer.
    pub fn unreported_corrupt(&self) -> Option<usize> {
        self.corrupt.iter().position(|&(_, _, is_reported)| !is_reported)
    }

    /// Queues everything again that the peer may not have heard: acknowledgements, corrupt ranges,
    /// the answer to the last status request, and a new status request.
    pub fn repeat_control_frames(&mut self) {
        self.ack_wanted |= self.into.delivered() > 0;
        self.solicits_ack |= !self.awaiting.is_empty();
        self.corrupt.iter_mut().for_each(|(_, _, is_reported)| *is_reported = false);
        if let Some(answered_request) = self.answered_request {
            self.owe_sack(answered_request, None);
        }
        self.out.request_status();
    }

    /// Whether a frame must be sent to the peer even if nothing else waits to be sent.
    #[inline]
    pub fn owes_ack(&self) -> bool {
        // While a refusal waits, nothing new can be confirmed. A frame would change nothing, and
        // another one would be owed at once.
        (self.ack_wanted && self.refusals == 0)
            || self.granted_credit.unadvertised() >= (self.eager_window / 2).max(1)
    }

    /// Whether a path has sent only a part of a frame with bytes of operation `id`.
    pub fn holds(&self, id: u32) -> bool {
        self.holder(id).is_some()
    }

    fn holder(&self, id: u32) -> Option<usize> {
        self.paths.iter().position(|state| state.held.and_then(SentPiece::op) == Some(id))
    }

    /// Records `sent` for when the path that holds a frame of operation `id` has sent it.
    pub fn after_flush(&mut self, id: u32, sent: SentPiece) {
        if let Some(state) = self.holder(id) {
            self.paths[state].held = Some(sent);
        }
    }

    /// Records that operation `id` is done when the peer has all bytes below `end`.
    pub fn await_delivery(&mut self, end: u64, id: u32) {
        let place = self.awaiting.partition_point(|&(other, _)| other <= end);
        self.awaiting.insert(place, (end, id));
    }

    /// Records that the header of a frame that has left confirms all bytes below `acknowledged` and
    /// advertises the granted credit. `is_answer` says that the frame carries new bytes, with which
    /// the application may have answered.
    #[inline]
    pub fn handle_ack_sent(&mut self, acknowledged: u64, is_answer: bool) {
        self.acknowledged = acknowledged;
        let is_confirmed = acknowledged >= self.into.delivered();
        if self.ack_wanted && is_confirmed && is_answer {
            self.piggybacked_acks = self.piggybacked_acks.saturating_add(1);
        }
        self.ack_wanted &= !is_confirmed;
        self.granted_credit.advertise();
    }

    /// The position that a header may confirm: nothing new while a refusal waits to be sent.
    #[inline]
    pub fn confirmed_now(&self) -> u64 {
        if self.refusals > 0 { self.acknowledged } else { self.into.delivered() }
    }

    /// Removes operation `id` from all queues, so that no later operation is mistaken for it.
    pub fn remove_operation(&mut self, id: u32) {
        let is_of = |item: &Item<M>| match *item {
            Item::First(of) | Item::Rest(of) | Item::Remote(of) => of == id,
            Item::Control(..) | Item::Reply { .. } => false,
        };
        self.queue.retain(|item| !is_of(item));
        self.awaiting.retain(|&(_, of)| of != id);
    }

    /// Whether an owed acknowledgement may wait for the application's answer, as the last ones did.
    #[inline]
    pub fn may_defer_ack(&self) -> bool {
        self.piggybacked_acks >= PIGGYBACKED_ACKS_MIN
            && self.granted_credit.unadvertised() < self.eager_window / 2
    }

    /// Whether new bytes may be sent without exceeding the peer's reorder window.
    #[inline]
    pub fn is_within_reorder_window(&self) -> bool {
        let (frames, bytes) = (self.out.retained(), self.out.unconfirmed());
        let is_near = bytes < REORDER_WINDOW_BYTES_MAX && frames < REORDER_WINDOW_FRAMES_MAX;
        is_near || frames == 0 || !self.may_reorder()
    }

    pub fn is_flushed(&self) -> bool {
        let is_held = |state: &PathState| state.held.is_some();
        let waits = !self.queue.is_empty() || self.out.has_lost() || self.paths.iter().any(is_held);
        self.failed.is_some() || !waits
    }

    /// Whether nothing is in flight on a path with silent loss, except Goodbye frames. A Goodbye is
    /// worth no more than a short wait: the peer may compute for long, and learns of the departure
    /// from others if the frame is lost.
    pub fn is_safe(&self) -> bool {
        self.failed.is_some()
            || (self.is_flushed() && !self.is_at_risk(|kind| kind != Kind::Goodbye))
    }

    /// Whether [`Self::is_safe`] holds, and the peer has received Goodbye or has left itself.
    pub fn is_goodbye_acknowledged(&self) -> bool {
        let has_heard = self.has_left || !self.is_at_risk(|kind| kind == Kind::Goodbye);
        self.failed.is_some() || (self.is_safe() && has_heard)
    }

    /// Whether a frame of a kind that `is_meant` accepts is in flight on a path with silent loss.
    fn is_at_risk(&self, is_meant: impl Fn(Kind) -> bool) -> bool {
        let has_silent_loss =
            |path| self.path_state(path).is_none_or(|state| state.path.silent_loss);
        self.out.is_under_way(|kind, path| is_meant(kind) && has_silent_loss(path))
    }

    pub fn is_drained(&self) -> bool {
        self.failed.is_some() || (self.is_flushed() && self.out.unconfirmed() == 0)
    }
}

/// Paths with silent loss that keep order: when a frame arrives, all before it arrived or are lost.
fn silent_loss_paths(paths: &[PathState]) -> Vec<PathId> {
    let numbered = paths.iter().enumerate().map(|(number, state)| (PathId(number as u8), state));
    numbered
        .filter(|(_, state)| state.is_up && state.path.silent_loss && state.path.datagram.is_none())
        .map(|(path, _)| path)
        .collect()
}

/// After this many prompt answers in a row, the next acknowledgement waits for an answer to travel
/// with. This resembles the delayed acknowledgements of TCP in an interactive session, but a single
/// missing answer ends the waiting, because the peer's application may wait.
const PIGGYBACKED_ACKS_MIN: u8 = 16;

impl<M: Memory> Endpoint<M> {
    /// Releases the reorder buffer of `frame`: the driver drops the frame's bytes.
    pub(super) fn release_buffered(&mut self, peer: Peer, frame: u64) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.into.release(frame).is_none() {
            return;
        }
        let (discarded, rest) =
            channel.out_of_order.drain(..).partition(|kept| kept.frame == frame);
        channel.out_of_order = rest;
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
        self.channels[peer.0 as usize].path
    }

    /// Whether `peer` has sent Goodbye.
    pub fn has_left(&self, peer: Peer) -> bool {
        self.channels[peer.0 as usize].has_left
    }

    /// Records that `peer` has broken the protocol: its Goodbye counts for nothing, and its
    /// operations fail with it. The driver must call this function before [`Self::fail`].
    pub fn revoke_goodbye(&mut self, peer: Peer) {
        self.channels[peer.0 as usize].has_left = false;
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
            if channel.ack_wanted && channel.failed.is_none() {
                channel.piggybacked_acks = 0;
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
