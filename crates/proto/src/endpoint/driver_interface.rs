//! The types that a driver and an endpoint exchange: commands, completions, actions, payload
//! destinations.

use crate::channel::PathId;
use crate::id::Address;
use crate::matching::{ANY, MatchCriteria};
use crate::wire::kind_header::AdvertisedAddress;

/// A piece of the application's memory, opaque to the protocol.
pub trait Memory: Clone {
    /// The size in bytes.
    fn size(&self) -> u64;
    /// The start address, if the memory is one contiguous piece that other processes of the node
    /// may be able to read; otherwise 0.
    fn address(&self) -> u64;
}

/// The number of a peer, assigned by this endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Peer(pub u32);

/// The point at which an operation may report success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CompletionLevel {
    /// The operation succeeds when a path has taken its bytes.
    TransmitComplete,
    /// The operation succeeds when the peer has delivered its bytes.
    DeliveryComplete,
}

/// The kind of operation that completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionKind {
    /// An untagged message was sent.
    Send,
    /// A tagged message was sent.
    TaggedSend,
    /// An untagged message was received.
    Recv,
    /// A tagged message was received or peeked at.
    TaggedRecv,
    /// Remote memory was read.
    Read,
    /// Remote memory was written.
    Write,
    /// An atomic operation changed remote memory.
    Atomic,
    /// An atomic operation on remote memory returned the old values.
    FetchAtomic,
    /// A peer wrote to memory of this process and sent completion data.
    RemoteWrite,
}

/// What the caller wants back with the completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The caller's own value for the operation.
    pub context: usize,
    /// Whether success is reported. An error is always reported.
    pub notify: bool,
}

/// A message to send.
pub struct Message<M> {
    /// The receiver.
    pub peer: Peer,
    /// The payload.
    pub memory: M,
    /// The tag; `None` for an untagged message.
    pub tag: Option<u64>,
    /// The remote completion data.
    pub data: Option<u64>,
    /// The ticket for the completion.
    pub ticket: Ticket,
    /// The point at which the send may complete.
    pub level: CompletionLevel,
}

/// A receive to post.
pub struct Posting<M> {
    /// The accepted sender; `None` accepts every sender.
    pub source: Option<Peer>,
    /// The memory for the payload.
    pub memory: M,
    /// The tag, and a mask of the tag bits to ignore; `None` for an untagged receive.
    pub tag: Option<(u64, u64)>,
    /// The ticket for the completion.
    pub ticket: Ticket,
    /// Untagged receives only: the receive accepts messages back to back, until fewer than
    /// `min_multi_recv` bytes are left.
    pub multi: bool,
}

/// A peek at the tagged messages that wait for a receive.
#[derive(Clone, Copy, Debug)]
pub struct Peek {
    /// The accepted sender; `None` accepts every sender.
    pub source: Option<Peer>,
    /// The tag.
    pub tag: u64,
    /// A mask of the tag bits to ignore.
    pub ignore: u64,
    /// The caller's own value for the peek.
    pub context: usize,
    /// Whether a found message is claimed for `context`.
    pub claim: bool,
    /// Whether a found message is dropped.
    pub discard: bool,
}

impl Peek {
    /// The criteria that a message must meet to be found.
    pub(super) fn criteria(&self) -> MatchCriteria {
        let source = self.source.map_or(ANY, |peer| peer.0);
        MatchCriteria { tag: self.tag, ignore: self.ignore, source, id: 0 }
    }

    /// The completion of the peek if no message is found.
    pub(super) fn found_nothing(&self) -> OperationCompletion {
        let ticket = Ticket { context: self.context, notify: true };
        OperationCompletion::new(CompletionKind::TaggedRecv, ticket).failed(Failure::NoMessage)
    }
}

/// The completion of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationCompletion {
    /// The kind of operation.
    pub kind: CompletionKind,
    /// The context of the operation.
    pub ticket: Ticket,
    /// Bytes received.
    pub length: u64,
    /// The address of the received message in the caller's memory for a multi-receive, otherwise 0.
    pub buffer_address: u64,
    /// The message's tag.
    pub tag: u64,
    /// The message's completion data, if it carried some.
    pub data: Option<u64>,
    /// The peer that sent the message.
    pub source: Option<Peer>,
    /// Whether the memory of a multi-receive belongs to the caller again.
    pub released: bool,
    /// The failure; `None` for success.
    pub error: Option<Failure>,
}

impl OperationCompletion {
    pub(super) fn new(kind: CompletionKind, ticket: Ticket) -> Self {
        Self {
            kind,
            ticket,
            length: 0,
            buffer_address: 0,
            tag: 0,
            data: None,
            source: None,
            released: false,
            error: None,
        }
    }

    pub(super) fn failed(self, failure: Failure) -> Self {
        Self { error: Some(failure), ..self }
    }
}

/// Why an operation did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The message was longer than the receive's memory, by this many bytes.
    Truncated(u64),
    /// The operation was cancelled.
    Cancelled,
    /// A peek found no message.
    NoMessage,
    /// The peer is unreachable or refused the operation: an errno.
    Errno(i32),
}

/// Something that the driver must do, in the order in which the endpoint returns the actions.
#[derive(Debug)]
pub enum Action<M> {
    /// Report a completion to the application.
    Complete(OperationCompletion),
    /// Copy the first `length` bytes of stored message `store` to `memory` at offset `at`, then
    /// drop the stored message.
    CopyUnexpected {
        /// The number of the stored message.
        store: u32,
        /// The memory for the bytes.
        memory: M,
        /// The offset in `memory`.
        at: u64,
        /// The number of bytes that fit.
        length: u64,
    },
    /// Drop stored message `store`.
    DropUnexpected {
        /// The number of the stored message.
        store: u32,
    },
    /// Read `length` bytes at `address` of the peer's process into `memory` at offset `at`, then
    /// call [`MessagesMut::handle_pulled`](super::MessagesMut::handle_pulled).
    Pull {
        /// The peer whose memory is read.
        peer: Peer,
        /// The number of the receive, an argument of
        /// [`MessagesMut::handle_pulled`](super::MessagesMut::handle_pulled).
        recv: u32,
        /// The address in the peer's process.
        address: u64,
        /// The memory for the bytes.
        memory: M,
        /// The offset in `memory`.
        at: u64,
        /// The number of bytes.
        length: u64,
    },
    /// A peer wants to read registered memory. Answer with
    /// [`ChannelMut::serve`](super::ChannelMut::serve) or
    /// [`ChannelMut::refuse`](super::ChannelMut::refuse).
    Serve {
        /// The peer that reads.
        peer: Peer,
        /// The peer's operation number.
        op: u32,
        /// The key of the region.
        key: u64,
        /// The offset in the region.
        offset: u64,
        /// The number of bytes.
        length: u64,
    },
    /// Discard the payload that is arriving by `path`: its memory belongs to somebody else from now
    /// on.
    DiscardPayload {
        /// The peer that sends the payload.
        peer: Peer,
        /// The path by which the payload arrives.
        path: PathId,
    },
    /// The peer advertised a further address at which it can be reached.
    AddressAdvertisement {
        /// The peer.
        peer: Peer,
        /// The advertised address.
        address: AdvertisedAddress,
    },
    /// Drop the reorder buffer of the frame that begins at byte `frame`, if there is one: see
    /// [`PayloadDestination::OutOfOrder`].
    Release {
        /// The peer that sent the frame.
        peer: Peer,
        /// The number of the frame's first byte.
        frame: u64,
    },
    /// Perform a peer's atomic operation, whose operands have just been placed in the scratch
    /// memory. Then call [`ChannelMut::answer`](super::ChannelMut::answer) or
    /// [`ChannelMut::refuse`](super::ChannelMut::refuse), or neither if the peer wants no answer.
    Atomic {
        /// The peer that asks.
        peer: Peer,
        /// The request, as in [`crate::wire::kind_header::KindHeader::Atomic`].
        request: AtomicRequest,
    },
}

/// A peer's atomic operation: see [`Action::Atomic`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicRequest {
    /// The peer's operation number.
    pub op: u32,
    /// The operation: a value of libfabric's `enum fi_op`.
    pub operation: u8,
    /// The type of the operands: a value of libfabric's `enum fi_datatype`.
    pub datatype: u8,
    /// Whether the peer wants the old values.
    pub fetch: bool,
    /// Whether the second half of the payload holds the values to compare with.
    pub compare: bool,
    /// The number of bytes of the target.
    pub length: u32,
    /// The key of the region.
    pub key: u64,
    /// The offset in the region.
    pub offset: u64,
}

/// Where the payload of a frame belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadDestination {
    /// The driver skips the payload.
    Discard,
    /// The memory of receive `recv` at offset `at`. Only the first `take` bytes are placed; the
    /// driver skips the rest.
    Receive {
        /// The number of the receive.
        recv: u32,
        /// The offset in the receive's memory.
        at: u64,
        /// The number of bytes that fit.
        take: u64,
    },
    /// The start of a new stored message. If its size is 0, the driver creates none, because no
    /// action will name it.
    NewUnexpected {
        /// The number of the stored message, until [`Action::CopyUnexpected`] or
        /// [`Action::DropUnexpected`] names it.
        store: u32,
        /// The bytes that the stored message must hold: the payload and what follows without a
        /// grant.
        size: u64,
    },
    /// An existing stored message, at offset `at`.
    Unexpected {
        /// The number of the stored message.
        store: u32,
        /// The offset in the stored message.
        at: u64,
    },
    /// Registered memory. If the driver cannot write there, it calls
    /// [`ChannelMut::refuse`](super::ChannelMut::refuse) and skips the payload.
    Region {
        /// The peer's operation number.
        op: u32,
        /// The key of the region.
        key: u64,
        /// The offset in the region.
        offset: u64,
    },
    /// The memory for the answer to this endpoint's operation `op`, at offset `at`.
    Reply {
        /// The number of the operation.
        op: u32,
        /// The offset in the operation's memory.
        at: u64,
    },
    /// Scratch memory of the driver.
    Scratch,
    /// A reorder buffer of `whole` bytes, one for each peer and `frame`, because bytes before the
    /// frame are missing. The payload belongs at `at`. The buffer's bytes before `at` are the head,
    /// if the frame is no fragment. See
    /// [`Channel::next_reassembled`](super::Channel::next_reassembled).
    OutOfOrder {
        /// The number of the frame's first byte.
        frame: u64,
        /// The bytes of head and payload.
        whole: u32,
        /// The offset of the payload in the buffer.
        at: u32,
    },
}

/// The peer broke the protocol: the driver must close the peer's link and call
/// [`Endpoint::fail`](super::Endpoint::fail).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault(pub &'static str);

/// The bounds and sizes of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The endpoint's own address.
    pub address: Address,
    /// The eager credit in bytes that each peer has with this endpoint, and this endpoint with each
    /// peer.
    pub eager_window: u32,
    /// The bytes below which the remaining memory of a multi-receive is released.
    pub min_multi_recv: u64,
    /// The most operations in flight, over all peers. Beyond this number, commands return [`Full`].
    pub operations_max: usize,
}

/// Too many operations are in flight: make progress and try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;
