//! The two directions between this endpoint and one peer.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use super::incoming::Announced;
use super::receive::{Arriving, Keeping};
use super::{Action, Endpoint, Memory, Op, OpKind, Peer};
use crate::channel::{
    Inflow, Outflow, PATHS_MAX, PathId, Retained, SPAN_BYTES_MAX, SPAN_FRAMES_MAX,
};
use crate::credit::{Credit, Lent};
use crate::id::Address;
use crate::limit;
use crate::path::rate::DeliveryRate;
use crate::path::rtt::RoundTrip;
use crate::path::time::Time;
use crate::slab::Slab;
use crate::wire::frame::Kind;
use crate::wire::head::Head;

/// What the path to a peer can do. Chosen when it opens, never per message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Payload of one frame.
    pub payload_max: u32,
    /// A message up to this size goes out whole, credit permitting.
    pub eager_max: u32,
    /// First piece of a longer one: enough to cover the time until the grant arrives.
    pub first_piece: u32,
    /// The receiver may read the sender's memory: messages longer than `eager_max` send no first piece.
    pub pull: bool,
    /// Bytes of a long message granted ahead of those taken in.
    pub window: u64,
    /// A longer message goes on behind its first piece without waiting for the grant, as far as credit reaches. For paths
    /// on which waiting costs more than a copy of what comes before its receive.
    pub ahead: bool,
    /// It keeps every frame for as long as both processes live (shared memory): nothing need be kept for sending it again.
    pub lossless: bool,
    /// Frames carry checks.
    pub checked: bool,
    /// Payload up to this is copied for sending it again, so that its operation is done when the path has it. Larger
    /// payload stays with the application until the peer has it.
    pub copy_max: u32,
    /// Frames go out by it only when no other path is up.
    pub spare: bool,
    /// What is sent by it later may arrive sooner: relays share frames out over several streams.
    pub overtakes: bool,
}

impl Path {
    /// For peers behind relays, and until a path is known.
    pub const RELAY: Path = Path {
        payload_max: limit::RELAY_PAYLOAD_BYTES_MAX as u32,
        eager_max: limit::RELAY_PAYLOAD_BYTES_MAX as u32,
        first_piece: limit::RELAY_PAYLOAD_BYTES_MAX as u32,
        pull: false,
        window: limit::RELAY_WINDOW_BYTES,
        ahead: true,
        lossless: false,
        checked: false,
        copy_max: limit::RELAY_PAYLOAD_BYTES_MAX as u32,
        spare: false,
        overtakes: true,
    };

    /// The same path without sizes that frames cannot have, or with which nothing would move.
    fn within_limits(self) -> Path {
        let payload_max = self.payload_max.clamp(1, PAYLOAD_BYTES_MAX);
        Path {
            payload_max,
            eager_max: self.eager_max.min(payload_max),
            first_piece: self.first_piece.min(payload_max),
            window: self.window.max(1),
            ..self
        }
    }
}

/// What a path has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathUse {
    /// Bytes of the channel that it was given.
    pub bytes: u64,
    /// What it delivers, if that was measured.
    pub bytes_per_second: Option<u64>,
    /// From a frame to its confirmation, if that was measured.
    pub round_trip_nanos: Option<u64>,
}

/// Items that may wait for a peer when it asks for one more answer. Without a bound a peer that asks and never reads could
/// take all memory; an honest one has a quarter of this in flight, and we as much towards it.
pub(super) const QUEUE_MAX: usize = 1 << 18;

/// Payload of one frame, whatever its head.
const PAYLOAD_BYTES_MAX: u32 = (limit::FRAME_BODY_BYTES_MAX - limit::HEAD_BYTES_MAX) as u32;

pub(super) struct Channel<M> {
    pub address: Address,
    /// What decides how messages are asked for: that of the path that has opened last.
    pub path: Path,
    /// By their numbers.
    pub ways: Vec<Way>,
    /// Ways by which frames go out.
    senders: usize,
    /// See [`Self::may_overtake`].
    may_overtake: bool,
    /// The way by which the peer was heard last: it is alive.
    pub heard_by: PathId,
    /// What waits to be handed to a path, in order.
    pub queue: VecDeque<Item<M>>,
    pub out: Outflow<M>,
    pub into: Inflow,
    /// All bytes below have been taken in here, as the peer last heard it.
    pub told: u64,
    /// The peer waits to hear of it.
    pub ack_wanted: bool,
    /// The peer waits to hear when all below has been taken in; 0: for nothing.
    pub confirm_at: u64,
    /// We wait to hear what the peer has taken in, and nothing that is sent asks for it.
    pub solicits: bool,
    /// How often in a row an answer of the application took that along at once.
    pub prompt_answers: u8,
    /// The peer must hear what has come early, as the answer to its ask of this number (0: to none).
    pub report: Option<u64>,
    /// The path of that ask.
    pub asked_by: PathId,
    /// The last ask that has been answered: its answer may be lost with a path that the peer has given up already.
    pub answered: Option<u64>,
    /// Ranges that have arrived spoilt and have not come again, and whether the peer has been told.
    pub spoilt: Vec<(u64, u64, bool)>,
    /// Refusals that wait to be sent.
    pub refusals: u32,
    /// The peer has taken in all our bytes below, and we have taken in all that it sent before it said so: a refusal, for
    /// one. That is what operations wait for.
    pub confirmed: u64,
    /// A confirmation (`.1`) that has overtaken bytes: it holds when all below `.0` have been taken in.
    pub early_news: (u64, u64),
    /// Operations that complete when the peer has all bytes below the number. Ascending.
    pub awaiting: VecDeque<(u64, u32)>,
    pub credit: Credit,
    pub lent: Lent,
    pub eager_window: u32,
    /// The frame that is being taken in.
    pub arriving: Option<Arriving>,
    /// Frames and fragments that are on their way into what is kept for later, one for each path at most.
    pub keeping: Vec<Keeping>,
    /// Messages of which announced pieces are still to come, by the sender's operation. Each has credit for at least one
    /// byte, so the credit bounds them.
    pub announced: BTreeMap<u32, Announced>,
    /// Addresses of ours that the peer is to be told.
    pub doors: Vec<([u8; 16], u16)>,
    /// Bytes that may have been sent without asking to hear of them.
    pub unasked: u64,
    pub failed: Option<i32>,
    /// The peer has said goodbye: it takes in nothing new.
    pub has_left: bool,
    /// Stands in the endpoint's queue of busy peers.
    pub is_busy: bool,
}

/// A path as the channel knows it.
pub(super) struct Way {
    pub path: Path,
    pub is_up: bool,
    /// See [`Endpoint::doubt_path`].
    pub is_doubted: bool,
    /// The frame that it holds but has not quite sent.
    pub held: Option<Sent>,
    /// Bytes of the channel that it was given.
    pub carried: u64,
    /// What it delivers, and how long that takes. Kept only while frames may choose between paths.
    pub rate: DeliveryRate,
    pub round_trip: RoundTrip,
}

impl Way {
    fn new(path: Path) -> Self {
        Self {
            path,
            is_up: true,
            is_doubted: false,
            held: None,
            carried: 0,
            rate: DeliveryRate::new(),
            round_trip: RoundTrip::new(),
        }
    }

    /// Frames go out by those with the lowest rank.
    fn rank(&self) -> (bool, bool) {
        (self.is_doubted, self.path.spare)
    }

    /// When `bytes` more would be there, from now on.
    fn finish_nanos(&self, bytes: u64) -> u64 {
        let round_trip = self.round_trip.smoothed_nanos().unwrap_or(0);
        self.rate.finish_nanos(self.rate.outstanding_bytes(), bytes, round_trip)
    }

    /// A frame of it is confirmed.
    pub fn handle_confirmed<M>(&mut self, now: Time, frame: &Retained<M>) {
        if frame.sent_at != Retained::<M>::UNKNOWN {
            self.round_trip.handle_sample(now, now.nanos_since(frame.sent_at));
        }
        self.rate.handle_delivered(now, frame.length as u64);
    }
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
    Control(Kind, u8, Head),
    /// Bytes a peer asked for.
    Reply { kind: Kind, op: u32, memory: M, sent: u64, total: u64 },
}

/// What becomes true when a frame has left for good.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sent {
    Nothing,
    /// Something of operation `.0`, but not the end.
    PieceOf(u32),
    /// The last byte of operation `.0` has left; its frame ends at sequence `.1`.
    LastOf(u32, u64),
}

impl Sent {
    /// The operation whose bytes the frame has.
    pub fn op(self) -> Option<u32> {
        match self {
            Sent::Nothing => None,
            Sent::PieceOf(id) | Sent::LastOf(id, _) => Some(id),
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
            path: Path::RELAY,
            ways: Vec::new(),
            senders: 0,
            may_overtake: false,
            heard_by: PathId(0),
            queue: VecDeque::new(),
            out: Outflow::default(),
            into: Inflow::default(),
            told: 0,
            ack_wanted: false,
            confirm_at: 0,
            solicits: false,
            prompt_answers: 0,
            report: None,
            asked_by: PathId(0),
            answered: None,
            spoilt: Vec::new(),
            refusals: 0,
            confirmed: 0,
            early_news: (0, 0),
            awaiting: VecDeque::new(),
            credit: Credit::new(eager_window),
            lent: Lent::default(),
            eager_window,
            arriving: None,
            keeping: Vec::new(),
            announced: BTreeMap::new(),
            doors: Vec::new(),
            unasked: 0,
            failed: None,
            has_left: false,
            is_busy: false,
        }
    }

    pub fn fail(&mut self, errno: i32) {
        self.failed = Some(errno);
        self.queue.clear();
        self.awaiting.clear();
        self.arriving = None;
        self.keeping.clear();
        self.announced.clear();
        self.doors.clear();
        self.out.clear();
        self.into.clear();
        self.ways.iter_mut().for_each(|way| way.held = None);
    }

    /// The way with this number, if it is up.
    #[inline]
    pub fn way(&self, path: PathId) -> Option<&Way> {
        self.ways.get(path.0 as usize).filter(|way| way.is_up)
    }

    /// The ways by which frames go out: those that are up, but spare ones, and still less those that are doubted, only when
    /// there is no other.
    fn sending(&self) -> impl Iterator<Item = &Way> {
        let up = || self.ways.iter().filter(|way| way.is_up);
        let lowest = up().map(Way::rank).min();
        up().filter(move |way| Some(way.rank()) == lowest)
    }

    /// Frames go out by several ways, and may choose between them.
    #[inline]
    pub fn has_choice(&self) -> bool {
        self.senders > 1
    }

    /// What is sent later may arrive sooner, by another way or by the same: no more goes out than the peer keeps.
    #[inline]
    pub fn may_overtake(&self) -> bool {
        self.may_overtake
    }

    /// To be called when paths have changed.
    pub fn count_senders(&mut self) {
        self.senders = self.sending().count();
        // What a doubted way carries may yet arrive.
        let several = self.ways.iter().filter(|way| way.is_up && !way.path.spare).count() > 1;
        self.may_overtake =
            several || self.has_choice() || self.sending().any(|way| way.path.overtakes);
    }

    /// Whether frames go out by this path at all.
    #[inline]
    pub fn sends_by(&self, path: PathId) -> bool {
        let is_only = self.senders == 1
            && self.way(path).is_some_and(|way| !way.path.spare && !way.is_doubted);
        is_only || self.way(path).is_some_and(|way| self.sending().any(|it| core::ptr::eq(it, way)))
    }

    /// Whether the next piece, of `bytes`, is best sent by `path`: no other would have all that is left, `rest`, there
    /// sooner. So a slow path never makes a message later than it would be without it, and a short one takes the quickest.
    pub fn prefers(&self, path: PathId, bytes: u64, rest: u64) -> bool {
        let Some(mine) = self.way(path) else {
            return false;
        };
        let finish = mine.finish_nanos(bytes);
        self.sending().all(|other| core::ptr::eq(other, mine) || finish <= other.finish_nanos(rest))
    }

    /// Nothing is lost or asked for.
    #[inline]
    pub fn is_calm(&self) -> bool {
        let owes_report =
            self.report.is_some() || self.untold_spoilt().is_some() || !self.doors.is_empty();
        !owes_report && !self.out.is_hushed() && !self.out.has_lost()
    }

    /// A spoilt range that the peer has not been told of.
    pub fn untold_spoilt(&self) -> Option<usize> {
        self.spoilt.iter().position(|&(_, _, is_told)| !is_told)
    }

    /// What was said may not have been heard: it is said again.
    fn repeat(&mut self) {
        self.ack_wanted |= self.into.taken() > 0;
        self.solicits |= !self.awaiting.is_empty();
        self.spoilt.iter_mut().for_each(|(_, _, is_told)| *is_told = false);
        self.report = self.report.max(self.answered);
        if self.out.retained() > 0 {
            self.out.ask();
        }
    }

    /// Whether a frame must go out although nothing else wants to.
    #[inline]
    pub fn owes_ack(&self) -> bool {
        // While a refusal waits, nothing new can be confirmed: a frame would change nothing, and be owed again.
        (self.ack_wanted && self.refusals == 0)
            || self.lent.untold() >= (self.eager_window / 2).max(1)
    }

    /// Whether a path still holds a frame with bytes of operation `id`.
    pub fn holds(&self, id: u32) -> bool {
        self.holder(id).is_some()
    }

    fn holder(&self, id: u32) -> Option<usize> {
        self.ways.iter().position(|way| way.held.and_then(Sent::op) == Some(id))
    }

    /// When the path that holds a frame of operation `id` has sent it, `sent` is true.
    pub fn after_flush(&mut self, id: u32, sent: Sent) {
        if let Some(way) = self.holder(id) {
            self.ways[way].held = Some(sent);
        }
    }

    /// Operation `id` is done when the peer has all bytes below `end`.
    pub fn await_delivery(&mut self, end: u64, id: u32) {
        let place = self.awaiting.partition_point(|&(other, _)| other <= end);
        self.awaiting.insert(place, (end, id));
    }

    /// Takes operation `id` off everything that waits, so that no later operation is mistaken for it.
    pub fn strike(&mut self, id: u32) {
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
        self.prompt_answers >= PROMPT_ANSWERS && self.lent.untold() < self.eager_window / 2
    }

    /// Whether new bytes may go out.
    #[inline]
    pub fn has_span(&self) -> bool {
        let (frames, bytes) = (self.out.retained(), self.out.unconfirmed());
        let is_near = bytes < SPAN_BYTES_MAX && frames < SPAN_FRAMES_MAX;
        is_near || frames == 0 || !self.may_overtake()
    }

    pub fn is_flushed(&self) -> bool {
        let is_held = |way: &Way| way.held.is_some();
        let waits = !self.queue.is_empty() || self.out.has_lost() || self.ways.iter().any(is_held);
        self.failed.is_some() || !waits
    }

    pub fn is_drained(&self) -> bool {
        self.failed.is_some() || (self.is_flushed() && self.out.unconfirmed() == 0)
    }
}

/// So many prompt answers in a row let the next confirmation wait for one. Like TCP's delayed acknowledgements in an
/// interactive session, but one disappointment ends it: the peer's application may be waiting.
const PROMPT_ANSWERS: u8 = 16;

impl<M: Memory> Endpoint<M> {
    /// There is a path to `peer`, under a number of the driver's. Sizes that no frame can have are cut to those it can.
    /// Once there has been another, the peer is asked first what it has.
    ///
    /// # Panics
    /// If the number is not below [`PATHS_MAX`].
    pub fn open_path(&mut self, peer: Peer, number: PathId, path: Path) {
        assert!((number.0 as usize) < PATHS_MAX, "more paths than a channel can have");
        let channel = &mut self.channels[peer.0 as usize];
        let path = path.within_limits();
        while channel.ways.len() <= number.0 as usize {
            channel.ways.push(Way { is_up: false, ..Way::new(path) });
        }
        let was_cut_off = !channel.ways.iter().any(|way| way.is_up);
        channel.ways[number.0 as usize] = Way::new(path);
        channel.path = path;
        channel.count_senders();
        if was_cut_off {
            channel.repeat();
        }
        self.mark_busy(peer);
    }

    /// What path `number` to `peer` has carried, and what is known of it.
    pub fn path_use(&self, peer: Peer, number: PathId) -> Option<PathUse> {
        let way = self.channels[peer.0 as usize].way(number)?;
        Some(PathUse {
            bytes: way.carried,
            bytes_per_second: way.rate.measured(),
            round_trip_nanos: way.round_trip.smoothed_nanos(),
        })
    }

    /// Path `number` to `peer`, if it is up, can do something else from now on.
    pub fn set_path(&mut self, peer: Peer, number: PathId, path: Path) {
        let channel = &mut self.channels[peer.0 as usize];
        let way = channel.ways.get_mut(number.0 as usize);
        if let Some(way) = way.filter(|way| way.is_up) {
            way.path = path.within_limits();
            channel.path = way.path;
            channel.count_senders();
        }
    }

    /// Path `number` to `peer` is broken. What it may have lost goes by another, if there is one, or by the next that opens.
    /// The driver touches no memory for it any more.
    pub fn close_path(&mut self, peer: Peer, number: PathId) {
        let channel = &mut self.channels[peer.0 as usize];
        let Some(way) = channel.ways.get_mut(number.0 as usize).filter(|way| way.is_up) else {
            return;
        };
        way.is_up = false;
        let held = way.held.take();
        channel.count_senders();
        channel.out.handle_break(number);
        // The sender may believe that it has come by another path, from which it was diverted.
        let mut cut: Vec<(u64, u64)> = channel
            .keeping
            .extract_if(.., |keeping| keeping.path == number)
            .map(|keeping| keeping.range())
            .collect();
        if let Some(arriving) = &mut channel.arriving {
            cut.extend(arriving.handle_break(number));
        }
        if let Some(way) = channel.ways.iter().find(|way| way.is_up) {
            channel.path = way.path;
            channel.repeat();
        }
        if let Some(sent) = held {
            self.apply(peer, sent);
        }
        for (start, end) in cut {
            self.ask_again(peer, start, end);
        }
        self.mark_busy(peer);
    }

    /// Whatever `path` carried may be lost, though it is still up.
    pub fn shake_path(&mut self, peer: Peer, path: PathId) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.failed.is_none() {
            channel.out.handle_break(path);
            channel.repeat();
            self.mark_busy(peer);
        }
    }

    /// Tells `peer` of another address at which connections are taken. To be repeated on a new path if one was lost.
    pub fn tell_door(&mut self, peer: Peer, ip: [u8; 16], port: u16) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.failed.is_none() && !channel.doors.contains(&(ip, port)) {
            channel.doors.push((ip, port));
            self.mark_busy(peer);
        }
    }

    /// Whether any path to `peer` is up.
    pub fn has_path(&self, peer: Peer) -> bool {
        self.channels[peer.0 as usize].ways.iter().any(|way| way.is_up)
    }

    /// The driver holds nothing for frames that came early any more.
    pub(super) fn release_kept(&mut self, peer: Peer, frame: u64) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.into.release(frame).is_none() {
            return;
        }
        let (diverted, rest) = channel.keeping.drain(..).partition(|kept| kept.frame == frame);
        channel.keeping = rest;
        let diverted: Vec<Keeping> = diverted;
        for Keeping { path, .. } in diverted {
            self.push_action(Action::Divert { peer, path });
        }
        self.push_action(Action::Release { peer, frame });
    }

    /// `peer` has said how many eager bytes it takes from us, which need not be what we take from it. To be called before
    /// anything is sent to it; later it has no effect.
    pub fn set_eager_window(&mut self, peer: Peer, bytes: u32) {
        self.channels[peer.0 as usize].credit.set_window(bytes);
    }

    /// The path to `peer`.
    pub fn path(&self, peer: Peer) -> Path {
        self.channels[peer.0 as usize].path
    }

    /// Whether `peer` has said goodbye.
    pub fn has_left(&self, peer: Peer) -> bool {
        self.channels[peer.0 as usize].has_left
    }

    /// Whether `peer` has ever sent anything here.
    pub fn has_been_heard(&self, peer: Peer) -> bool {
        self.channels[peer.0 as usize].into.taken() > 0
    }

    /// The address of `peer`.
    pub fn address(&self, peer: Peer) -> Address {
        self.channels[peer.0 as usize].address
    }

    /// The application has had its chance to answer: what is still owed goes out now. To be called whenever the
    /// driver is asked for progress, before it looks for frames.
    #[inline]
    pub fn end_deferral(&mut self) {
        while let Some(peer) = self.deferred.pop() {
            let channel = &mut self.channels[peer.0 as usize];
            if channel.ack_wanted && channel.failed.is_none() {
                channel.prompt_answers = 0;
                self.mark_busy(peer);
            }
        }
    }

    /// Sees to it that the peer hears what it waits for.
    #[inline]
    pub(super) fn settle_ack(&mut self, peer: Peer) {
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
