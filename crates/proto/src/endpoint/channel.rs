//! The two directions between this endpoint and one peer.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use super::incoming::Announced;
use super::receive::{Arriving, Keeping};
use super::timers::Watch;
use super::way::{Path, Way};
use super::{Action, Endpoint, Memory, Op, OpKind, Peer};
use crate::channel::{Inflow, Outflow, PathId, Retained, SPAN_BYTES_MAX, SPAN_FRAMES_MAX};
use crate::credit::{Credit, Lent};
use crate::id::Address;
use crate::path::time::Time;
use crate::slab::Slab;
use crate::tag::ANY;
use crate::wire::frame::Kind;
use crate::wire::head::{Door, Head};

/// Items that may wait for a peer when it asks for one more answer. Without a bound a peer that asks and never reads could
/// take all memory; an honest one has a quarter of this in flight, and we as much towards it.
pub(super) const QUEUE_MAX: usize = 1 << 18;

pub(super) struct Channel<M> {
    pub address: Address,
    /// What decides how messages are asked for: that of the path that has opened last.
    pub path: Path,
    /// By their numbers.
    pub ways: Vec<Way>,
    /// Ways by which frames go out.
    senders: usize,
    /// The only one, if it is neither spare nor doubted.
    sole_sender: Option<PathId>,
    /// Of those, the doubted ones, a bit for each: there is no other.
    doubted_senders: u8,
    /// See [`Self::is_measured`].
    is_measured: bool,
    /// See [`Self::may_overtake`].
    may_overtake: bool,
    /// The way by which the peer was heard last: it is alive.
    pub heard_by: PathId,
    /// Something may be lost without a word.
    pub is_silent: bool,
    /// Some path carries datagrams.
    pub has_datagrams: bool,
    pub watch: Watch,
    /// What waits to be handed to a path, in order.
    pub queue: VecDeque<Item<M>>,
    pub out: Outflow<M>,
    /// What leaves and may have to go again may be copied: see [`Endpoint::set_copying`].
    pub may_copy: bool,
    pub into: Inflow,
    /// All bytes below have been taken in here, as the peer last heard it.
    pub told: u64,
    /// The peer waits to hear of it.
    pub ack_wanted: bool,
    /// The peer waits to hear when all below has been taken in; 0: for nothing.
    pub confirm_at: u64,
    /// We wait to hear what the peer has taken in, and nothing that is sent asks for it.
    pub solicits: bool,
    /// All below has been asked about by [`Endpoint::solicit`].
    pub solicited: u64,
    /// How often in a row an answer of the application took that along at once.
    pub prompt_answers: u8,
    /// What is to be said that is no byte of the channel.
    pub errands: Vec<Errand>,
    /// The last ask that has been answered: its answer may be lost with a path that the peer has given up already.
    pub answered: Option<u64>,
    /// Ranges that have arrived spoilt and have not come again, and whether the peer has been told.
    pub spoilt: Vec<(u64, u64, bool)>,
    /// What came early and found no room, from its first byte to its end: it is asked for when its turn comes.
    pub missed: Option<(u64, u64)>,
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
    /// Bytes that may have been sent without asking to hear of them.
    pub unasked: u64,
    pub failed: Option<i32>,
    /// The peer has said goodbye: it takes in nothing new.
    pub has_left: bool,
    /// And we to it.
    pub has_said_goodbye: bool,
    /// Stands in the endpoint's queue of busy peers.
    pub is_busy: bool,
}

/// Something to be said that is no byte of the channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Errand {
    /// What has come early, as the answer to ask `.0` of the peer (0: to none), by this path, if any, as long as that
    /// takes frames: the asker measures it.
    Report(u64, Option<PathId>),
    /// Asks the peer what has come: by this path, if any.
    Probe(Option<PathId>),
    /// An address of ours at which connections are taken.
    Door(Door),
}

impl Errand {
    pub fn kind(self) -> Kind {
        match self {
            Errand::Report(..) => Kind::Report,
            Errand::Probe(_) => Kind::Ask,
            Errand::Door(..) => Kind::Door,
        }
    }

    fn path(self) -> Option<PathId> {
        match self {
            Errand::Report(_, path) | Errand::Probe(path) => path,
            Errand::Door(..) => None,
        }
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
            sole_sender: None,
            doubted_senders: 0,
            is_measured: false,
            may_overtake: false,
            heard_by: PathId(0),
            is_silent: false,
            has_datagrams: false,
            watch: Watch::default(),
            queue: VecDeque::new(),
            out: Outflow::default(),
            may_copy: true,
            into: Inflow::default(),
            told: 0,
            ack_wanted: false,
            confirm_at: 0,
            solicits: false,
            solicited: 0,
            prompt_answers: 0,
            errands: Vec::new(),
            answered: None,
            spoilt: Vec::new(),
            missed: None,
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
            unasked: 0,
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
        self.keeping.clear();
        self.announced.clear();
        self.errands.clear();
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

    /// Frames may choose between ways, or go out as datagrams: how long each takes matters.
    #[inline]
    pub fn is_measured(&self) -> bool {
        self.is_measured
    }

    /// What is sent later may arrive sooner, by another way or by the same: no more goes out than the peer keeps.
    #[inline]
    pub fn may_overtake(&self) -> bool {
        self.may_overtake
    }

    /// To be called when paths have changed. Says, with a bit for each, by which doubted ways frames have gone out, for want of
    /// others, and do no more.
    pub fn count_senders(&mut self) -> u8 {
        self.senders = self.sending().count();
        self.sole_sender = self.find_sole_sender();
        let are_doubted = self.sending().any(|way| way.is_doubted);
        let doubted = self.ways.iter().enumerate().filter(|(_, way)| way.is_up && way.is_doubted);
        let doubted = doubted.fold(0, |all, (number, _)| all | 1 << number);
        let now = if are_doubted { doubted } else { 0 };
        let left = core::mem::replace(&mut self.doubted_senders, now) & doubted & !now;
        let has_datagrams = self.sending().any(|way| way.path.datagram.is_some());
        self.is_measured = self.has_choice() || has_datagrams;
        // What a doubted way carries may yet arrive.
        let several = self.ways.iter().filter(|way| way.is_up && !way.path.spare).count() > 1;
        self.may_overtake =
            several || self.is_measured || self.sending().any(|way| way.path.overtakes);
        // What a path carried before it became a spare one may still be lost.
        let mut up = self.ways.iter().filter(|way| way.is_up);
        self.has_datagrams = up.clone().any(|way| way.flow.is_some());
        self.is_silent = up.any(|way| way.path.silent);
        left
    }

    fn find_sole_sender(&self) -> Option<PathId> {
        let is_sole = |way: &Way| way.is_up && !way.path.spare && !way.is_doubted;
        let place = self.ways.iter().position(is_sole).filter(|_| self.senders == 1)?;
        Some(PathId(place as u8))
    }

    /// Whether time matters.
    pub fn is_timed(&self) -> bool {
        self.is_measured || self.is_silent
    }

    /// Whether frames go out at all.
    pub fn has_senders(&self) -> bool {
        self.senders > 0
    }

    /// Whether frames go out by this path at all.
    #[inline]
    pub fn sends_by(&self, path: PathId) -> bool {
        self.sole_sender == Some(path)
            || self.way(path).is_some_and(|way| self.sending().any(|it| core::ptr::eq(it, way)))
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
        let owes = !self.errands.is_empty() || self.untold_spoilt().is_some();
        !owes && !self.out.is_hushed() && !self.out.has_lost()
    }

    /// The peer is to hear what has come early: see [`Errand::Report`].
    pub fn owe_report(&mut self, number: u64, path: Option<PathId>) {
        let is_same = |errand: &&mut Errand| match errand {
            Errand::Report(_, other) => number == 0 || *other == path,
            _ => false,
        };
        match self.errands.iter_mut().find(is_same) {
            Some(Errand::Report(other, _)) => *other = number.max(*other),
            _ => self.errands.push(Errand::Report(number, path)),
        }
    }

    /// The peer is to be asked what has come.
    pub fn owe_probe(&mut self, path: Option<PathId>) {
        if !self.errands.contains(&Errand::Probe(path)) {
            self.errands.push(Errand::Probe(path));
        }
    }

    /// The place of the errand that `path` is to do next, of one kind if that is said.
    pub fn errand_for(&self, path: PathId, kind: Option<Kind>) -> Option<usize> {
        let may_go = |errand: &Errand| match errand.path() {
            _ if kind.is_some_and(|kind| kind != errand.kind()) => false,
            _ if errand.kind() == Kind::Door => self.may_tell_door(path),
            Some(wanted) if self.way(wanted).is_some_and(|way| !way.is_doubted) => wanted == path,
            // Who asks by a path that is doubted may be heard by it and hear nothing: the answer goes by what is left.
            Some(_) => self.sends_by(path),
            None => self.sends_by(path) && self.speaks_by(path),
        };
        self.errands.iter().position(may_go)
    }

    /// Whether addresses may be told by `path`: they are worth being sure that they arrive, and are not for every ear, so no
    /// datagram has them as long as there is another path.
    pub fn may_tell_door(&self, path: PathId) -> bool {
        let is_sure = |way: &Way| way.is_up && way.flow.is_none();
        let is_needed = || !self.ways.iter().any(is_sure);
        self.way(path).is_some_and(|way| is_sure(way) || is_needed())
    }

    /// Ask `number` is answered, and what is said to have arrived is known.
    pub fn handle_answer(&mut self, now: Time, number: u64) {
        self.out.handle_answer(number);
        let Self { out, ways, .. } = self;
        let silent = silent_paths(ways);
        let each = |frame: &Retained<M>| {
            if let Some(way) = ways.get_mut(frame.path.0 as usize) {
                way.handle_lost(frame);
            }
        };
        out.handle_silence(number, |path| silent.contains(&path), each);
        for Way { flow, round_trip, .. } in ways {
            if let Some(flow) = flow {
                flow.handle_answer(now, number, round_trip);
            }
        }
    }

    /// Ask `number` has left by `path`.
    pub fn handle_asked(&mut self, (path, now): (PathId, Time), number: u64) {
        self.out.handle_asked(number);
        let silent = silent_paths(&self.ways);
        self.out.mark_asked(number, |path| silent.contains(&path));
        let flow = self.ways.get_mut(path.0 as usize).and_then(|way| way.flow.as_mut());
        if let Some(flow) = flow {
            flow.handle_asked(now, number);
        }
    }

    /// Takes in what has been confirmed, by whatever path, and finds out what that shows to be lost.
    pub fn settle(&mut self, now: Time) {
        for number in 0..self.ways.len() {
            if self.ways[number].settle(now) {
                self.lose_late(PathId(number as u8), now);
            }
        }
    }

    /// What is lost of what `path` carries, by now, goes again.
    pub fn lose_late(&mut self, path: PathId, now: Time) {
        let Self { out, ways, .. } = self;
        let way = &mut ways[path.0 as usize];
        let mut lost_ask = false;
        while let Some((order, start)) = way.next_lost(now) {
            let each = |frame: &Retained<M>| way.rate.handle_lost(frame.length as u64);
            match start {
                Some(start) => out.handle_lost((path, order), start, each),
                None => lost_ask = true,
            }
        }
        if lost_ask && out.is_hushed() {
            self.owe_probe(Some(path));
        }
    }

    /// All that `path` carries is lost, or cannot be watched any more: it goes again.
    pub fn give_up(&mut self, path: PathId, now: Time) {
        let flow = self.ways.get_mut(path.0 as usize).and_then(|way| way.flow.as_mut());
        if let Some(flow) = flow {
            flow.give_up(now);
        }
        self.out.handle_break(path);
    }

    /// A spoilt range that the peer has not been told of.
    pub fn untold_spoilt(&self) -> Option<usize> {
        self.spoilt.iter().position(|&(_, _, is_told)| !is_told)
    }

    /// What was said may not have been heard: it is said again.
    pub fn repeat(&mut self) {
        self.ack_wanted |= self.into.taken() > 0;
        self.solicits |= !self.awaiting.is_empty();
        self.spoilt.iter_mut().for_each(|(_, _, is_told)| *is_told = false);
        if let Some(answered) = self.answered {
            self.owe_report(answered, None);
        }
        self.out.ask();
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

    /// The header of a frame that has left confirms all bytes below `told`, and gives back what was lent. `is_answer`: the
    /// frame is new, so the application may have answered.
    #[inline]
    pub fn handle_told(&mut self, told: u64, is_answer: bool) {
        self.told = told;
        let is_confirmed = told >= self.into.taken();
        if self.ack_wanted && is_confirmed && is_answer {
            self.prompt_answers = self.prompt_answers.saturating_add(1);
        }
        self.ack_wanted &= !is_confirmed;
        self.lent.tell();
    }

    /// What may be confirmed: while a refusal waits to be sent, nothing new.
    #[inline]
    pub fn confirmed_now(&self) -> u64 {
        if self.refusals > 0 { self.told } else { self.into.taken() }
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

    /// Whether nothing is under way by a path that loses in silence, or only what tells of our leaving. That is not worth
    /// more than a moment's wait: the peer may compute for long, and hears of it from others if it is lost.
    pub fn is_safe(&self) -> bool {
        self.failed.is_some()
            || (self.is_flushed() && !self.is_at_risk(|kind| kind != Kind::Goodbye))
    }

    /// The same, and the peer has heard of our leaving, or has left itself.
    pub fn is_parted(&self) -> bool {
        let has_heard = self.has_left || !self.is_at_risk(|kind| kind == Kind::Goodbye);
        self.failed.is_some() || (self.is_safe() && has_heard)
    }

    /// Whether a frame of such a kind is under way by a path that loses in silence.
    fn is_at_risk(&self, is_meant: impl Fn(Kind) -> bool) -> bool {
        let is_silent = |path| self.way(path).is_none_or(|way| way.path.silent);
        self.out.is_under_way(|kind, path| is_meant(kind) && is_silent(path))
    }

    pub fn is_drained(&self) -> bool {
        self.failed.is_some() || (self.is_flushed() && self.out.unconfirmed() == 0)
    }
}

/// The paths that lose in silence, but in order: when something comes, all that was sent before has come or is lost.
fn silent_paths(ways: &[Way]) -> Vec<PathId> {
    let numbered = ways.iter().enumerate().map(|(number, way)| (PathId(number as u8), way));
    numbered
        .filter(|(_, way)| way.is_up && way.path.silent && way.path.datagram.is_none())
        .map(|(path, _)| path)
        .collect()
}

/// So many prompt answers in a row let the next confirmation wait for one. Like TCP's delayed acknowledgements in an
/// interactive session, but one disappointment ends it: the peer's application may be waiting.
const PROMPT_ANSWERS: u8 = 16;

impl<M: Memory> Endpoint<M> {
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

    /// `peer` has broken the protocol: that it has said goodbye counts for nothing, and what waits for it fails with it. To be
    /// called before [`Self::fail`].
    pub fn revoke_goodbye(&mut self, peer: Peer) {
        self.channels[peer.0 as usize].has_left = false;
    }

    /// Peers that have said goodbye, for each receive that waits for nobody else.
    pub fn awaited_in_vain(&self) -> impl Iterator<Item = Peer> {
        let wanted = self.wanted.tagged.iter().chain(self.wanted.untagged.iter());
        let sources = wanted.map(|want| want.source).filter(|source| *source != ANY).map(Peer);
        sources.filter(|peer| self.has_left(*peer))
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
    #[inline(always)]
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
