//! The two directions between this endpoint and one peer.

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

/// Items that may wait for a peer when it asks for one more answer. Without a bound a peer that asks and never reads could
/// take all memory; an honest one has a quarter of this in flight, and we as much towards it.
pub(super) const QUEUE_MAX: usize = 1 << 18;

pub(super) struct Channel<M> {
    pub address: Address,
    /// What decides how messages are asked for: that of the path that has opened last.
    pub path: PathProperties,
    /// By their numbers.
    pub paths: Vec<PathState>,
    /// Paths by which frames go out.
    senders: usize,
    /// The only one, if it is neither spare nor suspected.
    sole_sender: Option<PathId>,
    /// Of those, the suspected ones, a bit for each: there is no other.
    suspected_senders: u8,
    /// See [`Self::is_measured`].
    is_measured: bool,
    /// See [`Self::may_reorder`].
    may_reorder: bool,
    /// The path by which the peer was heard last: it is alive.
    pub last_heard_by: PathId,
    /// Something may be lost without a word.
    pub has_silent_loss: bool,
    /// Some path carries datagrams.
    pub has_datagrams: bool,
    pub timers: ChannelTimers,
    /// What waits to be handed to a path, in order.
    pub queue: VecDeque<Item<M>>,
    pub out: RetransmitBuffer<M>,
    /// What leaves and may have to go again may be copied: see [`Endpoint::set_copying`].
    pub may_copy: bool,
    pub into: ReassemblyBuffer,
    /// All bytes below have been taken in here, as the peer last heard it.
    pub acknowledged: u64,
    /// The peer waits to hear of it.
    pub ack_wanted: bool,
    /// The peer waits to hear when all below has been taken in; 0: for nothing.
    pub ack_when_delivered: u64,
    /// We wait to hear what the peer has taken in, and nothing that is sent asks for it.
    pub solicits_ack: bool,
    /// All below has been asked about by [`Endpoint::solicit_ack`].
    pub solicited: u64,
    /// How often in a row an answer of the application took that along at once.
    pub piggybacked_acks: u8,
    /// What is to be said that is no byte of the channel.
    pub control_frames: Vec<ControlFrame>,
    /// The last status request that has been answered: its answer may be lost with a path that the peer has given up already.
    pub answered_request: Option<u64>,
    /// Ranges that have arrived corrupt and have not come again, and whether the peer has been told.
    pub corrupt: Vec<(u64, u64, bool)>,
    /// What came early and found no room, from its first byte to its end: it is asked for when its turn comes.
    pub dropped_out_of_order: Option<(u64, u64)>,
    /// Refusals that wait to be sent.
    pub refusals: u32,
    /// The peer has taken in all our bytes below, and we have taken in all that it sent before it said so: a refusal, for
    /// one. That is what operations wait for.
    pub confirmed: u64,
    /// A confirmation (`.1`) that has overtaken bytes: it holds when all below `.0` have been taken in.
    pub early_ack: (u64, u64),
    /// Operations that complete when the peer has all bytes below the number. Ascending.
    pub awaiting: VecDeque<(u64, u32)>,
    pub credit: Credit,
    pub granted_credit: GrantedCredit,
    pub eager_window: u32,
    /// The frame that is being taken in.
    pub arriving: Option<ArrivingFrame>,
    /// Frames and fragments that are on their way into what is kept for later, one for each path at most.
    pub out_of_order: Vec<OutOfOrderArrival>,
    /// Messages of which announced pieces are still to come, by the sender's operation. Each has credit for at least one
    /// byte, so the credit bounds them.
    pub announced: BTreeMap<u32, AnnouncedPieces>,
    /// Bytes that may have been sent without asking to hear of them.
    pub bytes_since_ack_request: u64,
    pub failed: Option<i32>,
    /// The peer has said goodbye: it takes in nothing new.
    pub has_left: bool,
    /// And we to it.
    pub has_said_goodbye: bool,
    /// Stands in the endpoint's queue of busy peers.
    pub is_busy: bool,
}

/// Something that waits to be handed to the path.
pub(super) enum Item<M> {
    /// The first piece of a message.
    First(u32),
    /// Further pieces of a message.
    Rest(u32),
    /// Pieces of a write, or a read or atomic request.
    Remote(u32),
    /// A frame without payload.
    Control(Kind, u8, KindHeader),
    /// Bytes a peer asked for.
    Reply { kind: Kind, op: u32, memory: M, sent: u64, total: u64 },
}

/// What becomes true when a frame has left for good.
#[derive(Clone, Copy, Debug)]
pub(super) enum SentPiece {
    Nothing,
    /// Something of operation `.0`, but not the end.
    PieceOf(u32),
    /// The last byte of operation `.0` has left; its frame ends at sequence `.1`.
    LastOf(u32, u64),
}

impl SentPiece {
    /// The operation whose bytes the frame has.
    pub fn op(self) -> Option<u32> {
        match self {
            SentPiece::Nothing => None,
            SentPiece::PieceOf(id) | SentPiece::LastOf(id, _) => Some(id),
        }
    }
}

impl<M: Memory> Item<M> {
    /// Bytes that could be sent of it now.
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

    /// The path with this number, if it is up.
    #[inline]
    pub fn path_state(&self, path: PathId) -> Option<&PathState> {
        self.paths.get(path.0 as usize).filter(|state| state.is_up)
    }

    /// The paths by which frames go out: those that are up, but spare ones, and still less those that are suspected, only when
    /// there is no other.
    fn sending(&self) -> impl Iterator<Item = &PathState> {
        let up = || self.paths.iter().filter(|state| state.is_up);
        let lowest = up().map(PathState::rank).min();
        up().filter(move |state| Some(state.rank()) == lowest)
    }

    /// Frames go out by several paths, and may choose between them.
    #[inline]
    pub fn has_choice(&self) -> bool {
        self.senders > 1
    }

    /// Frames may choose between paths, or go out as datagrams: how long each takes matters.
    #[inline]
    pub fn is_measured(&self) -> bool {
        self.is_measured
    }

    /// What is sent later may arrive sooner, by another path or by the same: no more goes out than the peer keeps.
    #[inline]
    pub fn may_reorder(&self) -> bool {
        self.may_reorder
    }

    /// To be called when paths have changed. Says, with a bit for each, by which suspected paths frames have gone out, for want of
    /// others, and do no more.
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
        // What a suspected path carries may yet arrive.
        let several =
            self.paths.iter().filter(|state| state.is_up && !state.path.spare).count() > 1;
        self.may_reorder =
            several || self.is_measured || self.sending().any(|state| state.path.reorders);
        // What a path carried before it became a spare one may still be lost.
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

    /// Whether time matters.
    pub fn is_timed(&self) -> bool {
        self.is_measured || self.has_silent_loss
    }

    /// Whether frames go out at all.
    pub fn has_senders(&self) -> bool {
        self.senders > 0
    }

    /// Whether frames go out by this path at all.
    #[inline]
    pub fn sends_by(&self, path: PathId) -> bool {
        self.sole_sender == Some(path)
            || self
                .path_state(path)
                .is_some_and(|state| self.sending().any(|it| core::ptr::eq(it, state)))
    }

    /// Whether the next piece, of `bytes`, is best sent by `path`: no other would have all that is left, `rest`, there
    /// sooner. So a slow path never makes a message later than it would be without it, and a short one takes the quickest.
    pub fn prefers(&self, path: PathId, bytes: u64, rest: u64) -> bool {
        let Some(mine) = self.path_state(path) else {
            return false;
        };
        let finish = mine.finish_nanos(bytes);
        self.sending().all(|other| core::ptr::eq(other, mine) || finish <= other.finish_nanos(rest))
    }

    /// Nothing is lost or asked for.
    #[inline]
    pub fn has_nothing_to_repair(&self) -> bool {
        let owes = !self.control_frames.is_empty() || self.unreported_corrupt().is_some();
        !owes && !self.out.is_awaiting_status() && !self.out.has_lost()
    }

    /// The peer is to hear what has come early: see [`ControlFrame::Sack`].
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

    /// The peer is to be asked what has come.
    pub fn owe_status_request(&mut self, path: Option<PathId>) {
        if !self.control_frames.contains(&ControlFrame::StatusRequest(path)) {
            self.control_frames.push(ControlFrame::StatusRequest(path));
        }
    }

    /// The place of the errand that `path` is to do next, of one kind if that is said.
    pub fn control_frame_for(&self, path: PathId, kind: Option<Kind>) -> Option<usize> {
        let may_go = |control_frame: &ControlFrame| match control_frame.path() {
            _ if kind.is_some_and(|kind| kind != control_frame.kind()) => false,
            _ if control_frame.kind() == Kind::AddressAdvertisement => self.may_advertise_by(path),
            Some(wanted) if self.path_state(wanted).is_some_and(|state| !state.is_suspected) => {
                wanted == path
            }
            // Who asks by a path that is suspected may be heard by it and hear nothing: the answer goes by what is left.
            Some(_) => self.sends_by(path),
            None => self.sends_by(path) && self.sends_control_by(path),
        };
        self.control_frames.iter().position(may_go)
    }

    /// Whether addresses may be told by `path`: they are worth being sure that they arrive, and are not for every ear, so no
    /// datagram has them as long as there is another path.
    pub fn may_advertise_by(&self, path: PathId) -> bool {
        let is_sure = |state: &PathState| state.is_up && state.flow.is_none();
        let is_needed = || !self.paths.iter().any(is_sure);
        self.path_state(path).is_some_and(|state| is_sure(state) || is_needed())
    }

    /// Status request `number` is answered, and what is said to have arrived is known.
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

    /// Status request `number` has left by `path`.
    pub fn handle_status_request_sent(&mut self, (path, now): (PathId, Time), number: u64) {
        self.out.handle_status_request_sent(number);
        let silent_loss = silent_loss_paths(&self.paths);
        self.out.mark_status_requested(number, |path| silent_loss.contains(&path));
        let flow = self.paths.get_mut(path.0 as usize).and_then(|state| state.flow.as_mut());
        if let Some(flow) = flow {
            flow.handle_status_request_sent(now, number);
        }
    }

    /// Takes in what has been confirmed, by whatever path, and finds out what that shows to be lost.
    pub fn process_acks(&mut self, now: Time) {
        for number in 0..self.paths.len() {
            if self.paths[number].process_acks(now) {
                self.detect_losses(PathId(number as u8), now);
            }
        }
    }

    /// What is lost of what `path` carries, by now, goes again.
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

    /// All that `path` carries is lost, or cannot be watched any more: it goes again.
    pub fn lose_in_flight(&mut self, path: PathId, now: Time) {
        let flow = self.paths.get_mut(path.0 as usize).and_then(|state| state.flow.as_mut());
        if let Some(flow) = flow {
            flow.lose_in_flight(now);
        }
        self.out.handle_break(path);
    }

    /// A corrupt range that the peer has not been told of.
    pub fn unreported_corrupt(&self) -> Option<usize> {
        self.corrupt.iter().position(|&(_, _, is_reported)| !is_reported)
    }

    /// What was said may not have been heard: it is said again.
    pub fn repeat_control_frames(&mut self) {
        self.ack_wanted |= self.into.delivered() > 0;
        self.solicits_ack |= !self.awaiting.is_empty();
        self.corrupt.iter_mut().for_each(|(_, _, is_reported)| *is_reported = false);
        if let Some(answered_request) = self.answered_request {
            self.owe_sack(answered_request, None);
        }
        self.out.request_status();
    }

    /// Whether a frame must go out although nothing else wants to.
    #[inline]
    pub fn owes_ack(&self) -> bool {
        // While a refusal waits, nothing new can be confirmed: a frame would change nothing, and be owed again.
        (self.ack_wanted && self.refusals == 0)
            || self.granted_credit.unadvertised() >= (self.eager_window / 2).max(1)
    }

    /// Whether a path still holds a frame with bytes of operation `id`.
    pub fn holds(&self, id: u32) -> bool {
        self.holder(id).is_some()
    }

    fn holder(&self, id: u32) -> Option<usize> {
        self.paths.iter().position(|state| state.held.and_then(SentPiece::op) == Some(id))
    }

    /// When the path that holds a frame of operation `id` has sent it, `sent` is true.
    pub fn after_flush(&mut self, id: u32, sent: SentPiece) {
        if let Some(state) = self.holder(id) {
            self.paths[state].held = Some(sent);
        }
    }

    /// Operation `id` is done when the peer has all bytes below `end`.
    pub fn await_delivery(&mut self, end: u64, id: u32) {
        let place = self.awaiting.partition_point(|&(other, _)| other <= end);
        self.awaiting.insert(place, (end, id));
    }

    /// The header of a frame that has left confirms all bytes below `acknowledged`, and gives back the credit. `is_answer`: the
    /// frame is new, so the application may have answered.
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

    /// What may be confirmed: while a refusal waits to be sent, nothing new.
    #[inline]
    pub fn confirmed_now(&self) -> u64 {
        if self.refusals > 0 { self.acknowledged } else { self.into.delivered() }
    }

    /// Takes operation `id` off everything that waits, so that no later operation is mistaken for it.
    pub fn remove_operation(&mut self, id: u32) {
        let is_of = |item: &Item<M>| match *item {
            Item::First(of) | Item::Rest(of) | Item::Remote(of) => of == id,
            Item::Control(..) | Item::Reply { .. } => false,
        };
        self.queue.retain(|item| !is_of(item));
        self.awaiting.retain(|&(_, of)| of != id);
    }

    /// Whether the frame that is owed may wait for the application's answer, which by experience follows at once.
    #[inline]
    pub fn may_defer_ack(&self) -> bool {
        self.piggybacked_acks >= PIGGYBACKED_ACKS_MIN
            && self.granted_credit.unadvertised() < self.eager_window / 2
    }

    /// Whether new bytes may go out.
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

    /// Whether nothing is under way by a path that loses in silence, or only what tells of our leaving. That is not worth
    /// more than a moment's wait: the peer may compute for long, and hears of it from others if it is lost.
    pub fn is_safe(&self) -> bool {
        self.failed.is_some()
            || (self.is_flushed() && !self.is_at_risk(|kind| kind != Kind::Goodbye))
    }

    /// The same, and the peer has heard of our leaving, or has left itself.
    pub fn is_goodbye_acknowledged(&self) -> bool {
        let has_heard = self.has_left || !self.is_at_risk(|kind| kind == Kind::Goodbye);
        self.failed.is_some() || (self.is_safe() && has_heard)
    }

    /// Whether a frame of such a kind is under way by a path that loses in silence.
    fn is_at_risk(&self, is_meant: impl Fn(Kind) -> bool) -> bool {
        let has_silent_loss =
            |path| self.path_state(path).is_none_or(|state| state.path.silent_loss);
        self.out.is_under_way(|kind, path| is_meant(kind) && has_silent_loss(path))
    }

    pub fn is_drained(&self) -> bool {
        self.failed.is_some() || (self.is_flushed() && self.out.unconfirmed() == 0)
    }
}

/// The paths that lose in silence, but in order: when something comes, all that was sent before has come or is lost.
fn silent_loss_paths(paths: &[PathState]) -> Vec<PathId> {
    let numbered = paths.iter().enumerate().map(|(number, state)| (PathId(number as u8), state));
    numbered
        .filter(|(_, state)| state.is_up && state.path.silent_loss && state.path.datagram.is_none())
        .map(|(path, _)| path)
        .collect()
}

/// So many prompt answers in a row let the next confirmation wait for one. Like TCP's delayed acknowledgements in an
/// interactive session, but one disappointment ends it: the peer's application may be waiting.
const PIGGYBACKED_ACKS_MIN: u8 = 16;

impl<M: Memory> Endpoint<M> {
    /// The driver holds nothing for frames that came early any more.
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

    /// `peer` has said how many eager bytes it takes from us, which need not be what we take from it. To be called before
    /// anything is sent to it; later it has no effect.
    pub fn set_eager_window(&mut self, peer: Peer, bytes: u32) {
        self.channels[peer.0 as usize].credit.set_window(bytes);
    }

    /// The path to `peer`.
    pub fn path(&self, peer: Peer) -> PathProperties {
        self.channels[peer.0 as usize].path
    }

    /// Whether `peer` has said goodbye.
    pub fn has_left(&self, peer: Peer) -> bool {
        self.channels[peer.0 as usize].has_left
    }

    /// `peer` has broken the protocol: that it has said goodbye counts for nothing, and what waits for it fails with it. To be
    /// called before [`Self::fail`].
    pub fn revoke_goodbye(&mut self, peer: Peer) {
        self.channels[peer.0 as usize].has_left = false;
    }

    /// Peers that have said goodbye, for each receive that waits for nobody else.
    pub fn awaited_departed_peers(&self) -> impl Iterator<Item = Peer> {
        let wanted = self.posted_queue.tagged.iter().chain(self.posted_queue.untagged.iter());
        let sources = wanted.map(|want| want.source).filter(|source| *source != ANY).map(Peer);
        sources.filter(|peer| self.has_left(*peer))
    }

    /// Whether `peer` has ever sent anything here.
    pub fn has_been_heard(&self, peer: Peer) -> bool {
        self.channels[peer.0 as usize].into.delivered() > 0
    }

    /// The address of `peer`.
    pub fn address(&self, peer: Peer) -> Address {
        self.channels[peer.0 as usize].address
    }

    /// The application has had its chance to answer: what is still owed goes out now. To be called whenever the
    /// driver is asked for progress, before it looks for frames.
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

    /// Sees to it that the peer hears what it waits for.
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

    /// A peer with frames to send. Each is named once until [`Self::mark_busy`] names it again, so a driver whose
    /// path is full may drop it and call that when the path has room.
    #[inline]
    pub fn next_busy(&mut self) -> Option<Peer> {
        let peer = self.busy.pop_front()?;
        self.channels[peer.0 as usize].is_busy = false;
        Some(peer)
    }

    /// Names `peer` in [`Self::next_busy`] (again).
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
