//! Completions of operations, which the engine returns to queues and counters.

use crate::abi::{ADDR_NOTAVAIL, FiAddr};

/// The kind of an operation, for the choice of queue, counter and completion flags.
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

/// One finished operation, for a completion queue and the counters.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    pub kind: OperationKind,
    /// False: only counters count the operation, unless `error` is set.
    pub notify: bool,
    pub context: usize,
    /// FI_REMOTE_CQ_DATA, FI_MULTI_RECV and similar flags, to be or-ed to the flags of `kind`.
    pub flags: u64,
    /// Bytes received (receives, peeks).
    pub len: usize,
    /// Address of the message (multi-receive).
    pub buf: *mut u8,
    pub data: u64,
    pub tag: u64,
    /// The sender's address-vector number, or `FI_ADDR_NOTAVAIL`.
    pub source: FiAddr,
    /// `Some((errno, olen))`: an error entry; errno is positive, `olen` is the number of bytes that
    /// did not fit.
    pub error: Option<(i32, usize)>,
}

impl Completion {
    /// A successful completion for counters only.
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
            source: ADDR_NOTAVAIL,
            error: None,
        }
    }
}
