//! Operations that this endpoint started towards peers, and the items in which their frames wait in
//! the queue of a channel.
//!
//! What enters: the application's commands. What leaves: nothing by itself; [`Item::rest`] says how
//! much may be sent now. What may never happen: more bytes of an operation are sent than its
//! `limit` or `ahead` allows.

use super::driver_interface::{AtomicRequest, CompletionKind, CompletionLevel, Memory, Message};
use super::driver_interface::{Peer, Ticket};
use crate::slab::Slab;
use crate::wire::frame::Kind;
use crate::wire::kind_header::KindHeader;

/// An operation that this endpoint started towards a peer.
pub(super) struct Op<M> {
    pub peer: Peer,
    pub ticket: Ticket,
    pub level: CompletionLevel,
    /// The bytes to send, for messages, writes and atomic operations.
    pub memory: M,
    /// A path has taken the operation's first frame.
    pub is_begun: bool,
    /// Bytes that paths have taken.
    pub sent: u64,
    /// Bytes that paths may take: beyond the bytes sent ahead, only what the receiver has granted.
    pub limit: u64,
    /// The end of the bytes that are sent ahead of any grant.
    pub ahead: u64,
    pub total: u64,
    /// Some of the operation's bytes may have to be retransmitted from the operation's memory.
    pub is_borrowed: bool,
    /// The errno with which the peer has refused the operation.
    pub refused: Option<i32>,
    pub kind: OpKind<M>,
}

pub(super) enum OpKind<M> {
    Message { tag: Option<u64>, data: Option<u64>, recv: u32 },
    Write { key: u64, offset: u64, data: Option<u64> },
    Read { key: u64, offset: u64, got: u64 },
    Atomic { request: AtomicRequest, result: Option<M> },
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
    /// The answer to the peer's operation `op`: all of `memory`.
    pub fn reply(kind: Kind, op: u32, memory: M) -> Self {
        let total = memory.size();
        Item::Reply { kind, op, memory, sent: 0, total }
    }

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

impl<M: Memory> Op<M> {
    /// The operation that sends `message`.
    #[inline]
    pub fn message(message: Message<M>) -> Self {
        let total = message.memory.size();
        let kind = OpKind::Message { tag: message.tag, data: message.data, recv: 0 };
        Self {
            level: message.level,
            limit: 0,
            ..Self::new(message.peer, message.ticket, message.memory, total, kind)
        }
    }
}

impl<M> Op<M> {
    #[inline]
    pub fn new(peer: Peer, ticket: Ticket, memory: M, total: u64, kind: OpKind<M>) -> Self {
        Self {
            peer,
            ticket,
            level: CompletionLevel::DeliveryComplete,
            memory,
            is_begun: false,
            sent: 0,
            limit: total,
            ahead: 0,
            total,
            is_borrowed: false,
            refused: None,
            kind,
        }
    }

    /// The memory for the peer's answer.
    pub fn reply_memory(&self) -> &M {
        match &self.kind {
            OpKind::Atomic { result: Some(result), .. } => result,
            _ => &self.memory,
        }
    }
}

impl<M> OpKind<M> {
    pub fn completion_kind(&self) -> CompletionKind {
        match self {
            OpKind::Message { tag: Some(_), .. } => CompletionKind::TaggedSend,
            OpKind::Message { tag: None, .. } => CompletionKind::Send,
            OpKind::Write { .. } => CompletionKind::Write,
            OpKind::Read { .. } => CompletionKind::Read,
            OpKind::Atomic { request, .. } if request.fetch => CompletionKind::FetchAtomic,
            OpKind::Atomic { .. } => CompletionKind::Atomic,
        }
    }
}
