//! The words in which a driver and an endpoint speak: commands, completions, actions, places.

use crate::channel::PathId;
use crate::id::Address;
use crate::matching::{ANY, MatchCriteria};
use crate::wire::kind_header::AdvertisedAddress;

/// A piece of the application's memory, opaque to the protocol.
pub trait Memory: Clone {
    /// Bytes.
    fn size(&self) -> u64;
    /// Where it starts, if it lies in one piece that other processes of the node may be able to read; else 0.
    fn address(&self) -> u64;
}

/// A peer, numbered by this endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Peer(pub u32);

/// When an operation may report success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CompletionLevel {
    /// Its bytes have been handed to the path.
    TransmitComplete,
    /// The peer has taken them in.
    DeliveryComplete,
}

/// What an operation was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionKind {
    /// An untagged message out.
    Send,
    /// A tagged message out.
    TaggedSend,
    /// An untagged message in.
    Recv,
    /// A tagged message in (or looked at).
    TaggedRecv,
    /// Remote memory read.
    Read,
    /// Remote memory written.
    Write,
    /// Atomic operation on remote memory.
    Atomic,
    /// Atomic operation that brought old values back.
    FetchAtomic,
    /// A peer wrote to our memory and left completion data.
    RemoteWrite,
}

/// What the caller wants back with the completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The caller's own number for the operation.
    pub context: usize,
    /// Whether success is announced (errors always are).
    pub notify: bool,
}

/// A message to send.
pub struct Message<M> {
    /// To whom.
    pub peer: Peer,
    /// Its bytes.
    pub memory: M,
    /// `None`: untagged.
    pub tag: Option<u64>,
    /// Remote completion data.
    pub data: Option<u64>,
    /// For the completion.
    pub ticket: Ticket,
    /// When it may complete.
    pub level: CompletionLevel,
}

/// A receive to post.
pub struct Posting<M> {
    /// From whom; `None`: anyone.
    pub source: Option<Peer>,
    /// Where the bytes belong.
    pub memory: M,
    /// Tag and the bits of it that do not matter; `None`: untagged.
    pub tag: Option<(u64, u64)>,
    /// For the completion.
    pub ticket: Ticket,
    /// Untagged only: takes messages, back to back, until fewer than `min_multi_recv` bytes are left.
    pub multi: bool,
}

/// A look at the tagged messages that wait for a receive.
#[derive(Clone, Copy, Debug)]
pub struct Peek {
    /// From whom; `None`: anyone.
    pub source: Option<Peer>,
    /// The tag.
    pub tag: u64,
    /// Bits of it that do not matter.
    pub ignore: u64,
    /// The caller's own number.
    pub context: usize,
    /// Set the message aside for `context`.
    pub claim: bool,
    /// Drop the message.
    pub discard: bool,
}

impl Peek {
    /// What a message must carry to be found.
    pub(super) fn criteria(&self) -> MatchCriteria {
        let source = self.source.map_or(ANY, |peer| peer.0);
        MatchCriteria { tag: self.tag, ignore: self.ignore, source, id: 0 }
    }
}

/// Something that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationCompletion {
    /// What it was.
    pub kind: CompletionKind,
    /// Whose it was.
    pub ticket: Ticket,
    /// Bytes received.
    pub length: u64,
    /// Address of the received message in the caller's memory (multi-receive), else 0.
    pub buffer_address: u64,
    /// The message's tag.
    pub tag: u64,
    /// Its completion data, if it carried some.
    pub data: Option<u64>,
    /// The peer it came from.
    pub source: Option<Peer>,
    /// A multi-receive's memory is the caller's again.
    pub released: bool,
    /// What went wrong.
    pub error: Option<Failure>,
}

/// Why an operation did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The message was longer than the memory for it, by so many bytes.
    Truncated(u64),
    /// It was cancelled.
    Cancelled,
    /// A look found nothing.
    NoMessage,
    /// The peer is gone, or refused: an errno.
    Errno(i32),
}

/// Something the driver must do, in this order.
#[derive(Debug)]
pub enum Action<M> {
    /// Tell the application.
    Complete(OperationCompletion),
    /// Copy the first `length` bytes of stored message `store` to `memory` at `at`, then forget it.
    CopyUnexpected {
        /// Number of the stored message.
        store: u32,
        /// Where its bytes belong.
        memory: M,
        /// Offset in it.
        at: u64,
        /// Bytes that fit.
        length: u64,
    },
    /// Forget stored message `store`.
    DropUnexpected {
        /// Number of the stored message.
        store: u32,
    },
    /// Read `length` bytes at `address` of the peer's process into `memory` at `at`; then call
    /// [`Endpoint::handle_pulled`].
    Pull {
        /// Whose memory.
        peer: Peer,
        /// The receive, for [`Endpoint::handle_pulled`].
        recv: u32,
        /// Address in the peer's process.
        address: u64,
        /// Where the bytes belong.
        memory: M,
        /// Offset in it.
        at: u64,
        /// Bytes.
        length: u64,
    },
    /// A peer wants to read registered memory: [`Endpoint::serve`] or [`Endpoint::refuse`].
    Serve {
        /// Who asks.
        peer: Peer,
        /// Its operation.
        op: u32,
        /// Region.
        key: u64,
        /// Offset in it.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// The payload that is arriving by `path` is no longer wanted: the memory for it is somebody else's from now on.
    DiscardPayload {
        /// From whom.
        peer: Peer,
        /// The path.
        path: PathId,
    },
    /// The peer can also be reached at this address.
    AddressAdvertisement {
        /// Whose.
        peer: Peer,
        /// Where.
        address: AdvertisedAddress,
    },
    /// Forget what is kept of the frame that begins at byte `frame`, if anything is: see [`PayloadDestination::OutOfOrder`].
    Release {
        /// Whose.
        peer: Peer,
        /// Number of its first byte.
        frame: u64,
    },
    /// A peer's atomic operation, whose payload has just been placed in the scratch memory:
    /// [`Endpoint::answer`], [`Endpoint::refuse`] or nothing if it wants none.
    Atomic {
        /// Who asks.
        peer: Peer,
        /// What, as in [`crate::wire::kind_header::KindHeader::Atomic`].
        request: AtomicRequest,
    },
}

/// See [`Action::Atomic`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicRequest {
    /// The peer's operation.
    pub op: u32,
    /// `enum fi_op`.
    pub operation: u8,
    /// `enum fi_datatype`.
    pub datatype: u8,
    /// The old values are wanted.
    pub fetch: bool,
    /// The second half of the payload is to compare with.
    pub compare: bool,
    /// Bytes of the target.
    pub length: u32,
    /// Region.
    pub key: u64,
    /// Offset in it.
    pub offset: u64,
}

/// Where the payload of a frame belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadDestination {
    /// Nowhere: skip it.
    Discard,
    /// The memory of receive `recv` at `at`; only the first `take` bytes, the rest is skipped.
    Receive {
        /// Number of the receive.
        recv: u32,
        /// Offset in its memory.
        at: u64,
        /// Bytes that fit.
        take: u64,
    },
    /// The front of a new store; none if its size is 0, for nothing will name it again.
    NewUnexpected {
        /// Its number, until [`Action::CopyUnexpected`] or [`Action::DropUnexpected`] names it.
        store: u32,
        /// Bytes it must hold: the payload's, and what follows it unasked.
        size: u64,
    },
    /// A store that was opened before, at `at`.
    Unexpected {
        /// Its number.
        store: u32,
        /// Offset in it.
        at: u64,
    },
    /// Registered memory. If it cannot be had: [`Endpoint::refuse`], and skip the payload.
    Region {
        /// The peer's operation.
        op: u32,
        /// Region.
        key: u64,
        /// Offset in it.
        offset: u64,
    },
    /// The memory for the answer to our operation `op`, at `at`.
    Reply {
        /// Number of the operation.
        op: u32,
        /// Offset.
        at: u64,
    },
    /// Scratch memory of the driver.
    Scratch,
    /// Something before it is missing. A buffer of `whole` bytes, one for each peer and `frame`; its bytes before `at`, where
    /// the payload belongs, are the head if the frame is no fragment. See [`Endpoint::next_reassembled`].
    OutOfOrder {
        /// Number of the frame's first byte.
        frame: u64,
        /// Bytes of head and payload.
        whole: u32,
        /// Where the payload belongs.
        at: u32,
    },
}

/// The peer broke the protocol: its link must be closed and [`Endpoint::fail`] called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault(pub &'static str);

/// Bounds and sizes of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Its own address.
    pub address: Address,
    /// Eager credit each peer has with it, and it with each peer.
    pub eager_window: u32,
    /// A multi-receive with less room than this is given back.
    pub min_multi_recv: u64,
    /// Operations in flight, over all peers; beyond it commands say [`Full`].
    pub operations_max: usize,
}

/// Too many operations are in flight: make progress and try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;
