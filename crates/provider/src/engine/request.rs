//! What the libfabric face (`ffi`) asks of the engine, and what it gets back.
//!
//! The face translates C structures into these; the engine never sees a `fid`. Addresses are plain
//! pointers because the memory is the MPI library's: it stays valid from the post until the
//! completion (libfabric's contract), or only during the call where `inject` is set.

use crate::abi::FiAddr;

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

/// When an operation may report success (fi_cq(3), "completion semantics").
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CompletionLevel {
    /// The buffer may be reused.
    Inject,
    /// The bytes left this process for good.
    Transmit,
    /// The peer's provider has taken them in (messages), or they are visible there (RMA).
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
    /// The payload is taken before the call returns.
    pub inject: bool,
    /// Whether success is written to the completion queue. Errors always are.
    pub notify: bool,
    pub level: CompletionLevel,
}

pub struct RecvRequest<'a> {
    /// `FI_ADDR_UNSPEC`: from anyone.
    pub source: FiAddr,
    pub payload: &'a [Iov],
    /// `(tag, ignore)`; `None`: an untagged receive.
    pub tag: Option<(u64, u64)>,
    pub context: usize,
    pub notify: bool,
    /// FI_MULTI_RECV: untagged, one iov, consumed by several messages.
    pub multi: bool,
}

/// FI_PEEK: look at the queue of unexpected tagged messages. Answered by exactly one completion (a match, or an error
/// entry FI_ENOMSG), unless the call returns `EAGAIN`.
pub struct PeekRequest {
    pub source: FiAddr,
    pub tag: u64,
    pub ignore: u64,
    pub context: usize,
    /// FI_CLAIM: the message found is set aside for `context`.
    pub claim: bool,
    /// FI_DISCARD: the message found is dropped.
    pub discard: bool,
    /// The caller asks for a message of any source, and makes progress before it repeats a call that returns `EAGAIN`.
    pub repeats: bool,
}

/// FI_CLAIM without FI_PEEK: receive the message set aside for `context`. Only the context counts.
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

/// Complete when the peer has done it, whatever level was asked for.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicKind {
    /// `fi_atomic`: nothing comes back.
    Update,
    /// `fi_fetch_atomic`
    Fetch,
    /// `fi_compare_atomic`
    Compare,
}

/// Complete when the peer has done it. Operands are taken before the call returns, with or without inject.
pub struct AtomicRequest<'a> {
    pub kind: AtomicKind,
    pub target: FiAddr,
    /// `enum fi_op`
    pub op: u32,
    /// `enum fi_datatype`
    pub datatype: u32,
    /// Operands, lengths in bytes (empty for FI_ATOMIC_READ).
    pub operand: &'a [Iov],
    pub compare: &'a [Iov],
    pub result: &'a [Iov],
    pub remote: RemoteIov,
    pub context: usize,
    /// The program may never call again: taken only when there is a way to the peer.
    pub inject: bool,
    pub notify: bool,
}

/// What an operation was, for the choice of queue, counter and completion flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationKind {
    Send,
    TaggedSend,
    Recv,
    TaggedRecv,
    Read,
    Write,
    Atomic,
    /// The target of an `fi_writedata`.
    RemoteWrite,
}

/// One finished operation, on its way to a completion queue and the counters.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    pub kind: OperationKind,
    /// False: only counters are told (unless `error` is set).
    pub notify: bool,
    pub context: usize,
    /// FI_REMOTE_CQ_DATA, FI_MULTI_RECV and the like, to be or-ed to the flags of `kind`.
    pub flags: u64,
    /// Bytes received (receives, peeks).
    pub len: usize,
    /// Where the message lies (multi-receive).
    pub buf: *mut u8,
    pub data: u64,
    pub tag: u64,
    /// The sender as the address vector knows it, or `FI_ADDR_NOTAVAIL`.
    pub source: FiAddr,
    /// `Some((errno, olen))`: an error entry; errno positive, `olen` the bytes that did not fit.
    pub error: Option<(i32, usize)>,
}

impl Completion {
    /// Success that only counters are told.
    #[inline]
    pub fn quiet(kind: OperationKind, context: usize) -> Self {
        Completion {
            kind,
            notify: false,
            context,
            flags: 0,
            len: 0,
            buf: std::ptr::null_mut(),
            data: 0,
            tag: 0,
            source: crate::abi::ADDR_NOTAVAIL,
            error: None,
        }
    }
}
