//! The two directions between this endpoint and one peer.

use alloc::collections::{BTreeMap, VecDeque};

use super::{Endpoint, Memory, OpKind, Peer};
use crate::credit::{Credit, Lent};
use crate::id::Address;
use crate::limit;
use crate::wire::frame::Kind;
use crate::wire::head::Head;

use super::incoming::Inflow;
use super::receive::Arriving;

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
    };

    /// The same path without sizes that frames cannot have, or with which nothing would move.
    fn within_limits(self) -> Path {
        let payload_max = self.payload_max.clamp(1, PAYLOAD_BYTES_MAX);
        Path {
            payload_max,
            eager_max: self.eager_max.min(payload_max),
            first_piece: self.first_piece.min(payload_max),
            pull: self.pull,
            window: self.window.max(1),
            ahead: self.ahead,
        }
    }
}

/// Items that may wait for a peer when it asks for one more answer. Without a bound a peer that asks and never reads could
/// take all memory; an honest one has a quarter of this in flight, and we as much towards it.
pub(super) const QUEUE_MAX: usize = 1 << 18;

/// Payload of one frame, whatever its head.
const PAYLOAD_BYTES_MAX: u32 = (limit::FRAME_BODY_BYTES_MAX - limit::HEAD_BYTES_MAX) as u32;

pub(super) struct Channel<M> {
    pub address: Address,
    pub path: Path,
    /// What waits to be handed to the path, in order.
    pub queue: VecDeque<Item<M>>,
    /// Number of the next byte to send.
    pub sequence: u64,
    /// Number of the next byte to arrive.
    pub expected: u64,
    /// All bytes below have been taken in here.
    pub received: u64,
    /// `received` as the peer last heard it.
    pub told: u64,
    /// All bytes below have been taken in by the peer.
    pub delivered: u64,
    /// The peer waits to hear `received`.
    pub ack_wanted: bool,
    /// How often in a row an answer of the application took that along at once.
    pub prompt_answers: u8,
    /// Operations that complete when `delivered` reaches the number.
    pub awaiting: VecDeque<(u64, u32)>,
    pub credit: Credit,
    pub lent: Lent,
    pub eager_window: u32,
    /// The frame whose payload is being placed.
    pub arriving: Option<Arriving>,
    /// The frame at hand has come late and has no payload: see [`Endpoint::handle_frame`].
    pub is_late_news: bool,
    /// Messages of which announced pieces are still to come, by the sender's operation. Each has credit for at least one
    /// byte, so the credit bounds them.
    pub inflows: BTreeMap<u32, Inflow>,
    /// The frame that the path holds but has not quite sent.
    pub held: Option<Sent>,
    pub failed: Option<i32>,
    /// The peer has said goodbye: it takes in nothing new.
    pub has_left: bool,
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
    /// Something of operation `.0`, which the peer has refused meanwhile with errno `.1`.
    RefusedOf(u32, i32),
    /// The last byte of operation `.0` has left; its frame ends at sequence `.1`.
    LastOf(u32, u64),
}

impl<M> Item<M> {
    pub fn first(kind: &OpKind<M>) -> fn(u32) -> Item<M> {
        match kind {
            OpKind::Message { .. } => Item::First,
            OpKind::Write { .. } | OpKind::Read { .. } | OpKind::Atomic { .. } => Item::Remote,
        }
    }
}

impl<M> Channel<M> {
    pub fn new(address: Address, eager_window: u32) -> Self {
        Self {
            address,
            path: Path::RELAY,
            queue: VecDeque::new(),
            sequence: 0,
            expected: 0,
            received: 0,
            told: 0,
            delivered: 0,
            ack_wanted: false,
            prompt_answers: 0,
            awaiting: VecDeque::new(),
            credit: Credit::new(eager_window),
            lent: Lent::default(),
            eager_window,
            arriving: None,
            is_late_news: false,
            inflows: BTreeMap::new(),
            held: None,
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
        self.inflows.clear();
        self.held = None;
    }

    /// Whether a frame must go out although nothing else wants to.
    #[inline]
    pub fn owes_ack(&self) -> bool {
        self.ack_wanted || self.lent.untold() >= (self.eager_window / 2).max(1)
    }

    /// Whether the path still holds a frame with bytes of operation `id`.
    pub fn holds(&self, id: u32) -> bool {
        match self.held {
            None | Some(Sent::Nothing) => false,
            Some(Sent::PieceOf(of) | Sent::RefusedOf(of, _) | Sent::LastOf(of, _)) => of == id,
        }
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

    pub fn is_flushed(&self) -> bool {
        self.failed.is_some() || (self.queue.is_empty() && self.held.is_none())
    }

    pub fn is_drained(&self) -> bool {
        self.failed.is_some() || (self.is_flushed() && self.delivered >= self.sequence)
    }
}

/// So many prompt answers in a row let the next confirmation wait for one. Like TCP's delayed acknowledgements in an
/// interactive session, but one disappointment ends it: the peer's application may be waiting.
const PROMPT_ANSWERS: u8 = 16;

impl<M: Memory> Endpoint<M> {
    /// The path to `peer` from now on. Sizes that no frame can have are cut to those it can.
    pub fn set_path(&mut self, peer: Peer, path: Path) {
        self.channels[peer.0 as usize].path = path.within_limits();
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
        self.channels[peer.0 as usize].expected > 0
    }

    /// The address of `peer`.
    pub fn address(&self, peer: Peer) -> Address {
        self.channels[peer.0 as usize].address
    }

    /// Whether `peer` has taken in everything that was sent: then another path may take over without overtaking.
    #[inline]
    pub fn is_settled(&self, peer: Peer) -> bool {
        let channel = &self.channels[peer.0 as usize];
        channel.held.is_none() && channel.delivered == channel.sequence
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
