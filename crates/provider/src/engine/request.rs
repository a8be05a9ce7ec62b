//! Requests of the libfabric functions (`ffi`) to the engine.
//!
//! The functions in `ffi` translate C structures into these requests; the engine never sees a
//! `fid`. Addresses are plain pointers because the memory belongs to the MPI library: it stays
//! valid from the post until the completion (libfabric's contract), or only during the call where
//! `inject` is set.

use crate::abi::FiAddr;
use crate::atomic::AtomicKind;

/// A piece of the caller's memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Iov {
    pub base: *mut u8,
    pub len: usize,
}

/// A piece of a peer's registered memory: `offset` is relative to the region's start (`mr_mode` 0).
#[derive(Clone, Copy, Debug)]
pub struct RemoteIov {
    pub offset: u64,
    pub len: usize,
    pub key: u64,
}

/// The moment at which an operation may report success (fi_cq(3), "completion semantics").
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CompletionLevel {
    /// The buffer may be reused.
    Inject,
    /// The bytes have left this process for good.
    Transmit,
    /// The peer's provider has received the message, or an RMA operation is visible at the peer.
    Delivery,
}

pub struct SendRequest<'a> {
    pub target: FiAddr,
    pub payload: &'a [Iov],
    /// `None`: an untagged message (`fi_send`).
    pub tag: Option<u64>,
    /// Remote CQ data.
    pub data: Option<u64>,
    pub context: usize,
    /// The payload is copied or sent before the call returns.
    pub inject: bool,
    /// Whether success is written to the completion queue. Errors always are.
    pub notify: bool,
    pub level: CompletionLevel,
}

pub struct RecvRequest<'a> {
    /// `FI_ADDR_UNSPEC`: messages from any peer match.
    pub source: FiAddr,
    pub payload: &'a [Iov],
    /// `(tag, ignore)`; `None`: an untagged receive.
    pub tag: Option<(u64, u64)>,
    pub context: usize,
    pub notify: bool,
    /// FI_MULTI_RECV: an untagged receive with one iov that several messages consume.
    pub multi: bool,
}

/// FI_PEEK: a look at the queue of unexpected tagged messages. Exactly one completion answers the
/// request (a match, or an error entry FI_ENOMSG), unless the call returns `EAGAIN`.
pub struct PeekRequest {
    pub source: FiAddr,
    pub tag: u64,
    pub ignore: u64,
    pub context: usize,
    /// FI_CLAIM: the matching message is reserved for `context`.
    pub claim: bool,
    /// FI_DISCARD: the matching message is dropped.
    pub discard: bool,
    /// The caller peeks for a message of any source, and makes progress before it repeats a call
    /// that returned `EAGAIN`.
    pub repeats: bool,
}

/// FI_CLAIM without FI_PEEK: a receive of the message that is reserved for `context`. Only the
/// context matters.
pub struct ClaimRequest<'a> {
    pub payload: &'a [Iov],
    pub context: usize,
    pub notify: bool,
    pub discard: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RmaKind {
    Read,
    Write,
}

/// A remote read or write. The request is complete when the peer has executed it, whatever
/// completion level was requested.
pub struct RmaRequest<'a> {
    pub kind: RmaKind,
    pub target: FiAddr,
    pub local: &'a [Iov],
    pub remote: RemoteIov,
    /// Remote CQ data (`fi_writedata`): the target gets a completion.
    pub data: Option<u64>,
    pub context: usize,
    pub inject: bool,
    pub notify: bool,
}

/// An atomic operation. The request is complete when the peer has executed it. Operands are copied
/// before the call returns, with or without inject.
pub struct AtomicRequest<'a> {
    pub kind: AtomicKind,
    pub target: FiAddr,
    /// `enum fi_op`
    pub op: u32,
    /// `enum fi_datatype`
    pub datatype: u32,
    /// Operands, with lengths in bytes; empty for FI_ATOMIC_READ.
    pub operand: &'a [Iov],
    pub compare: &'a [Iov],
    pub result: &'a [Iov],
    pub remote: RemoteIov,
    pub context: usize,
    /// The program may never call again, so the request is accepted only when a path to the peer is
    /// open.
    pub inject: bool,
    pub notify: bool,
}
