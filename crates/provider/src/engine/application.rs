//! What the application has given to the endpoint: registered memory and completion queues.
//!
//! What enters: completions of the protocol, and accesses of peers to registered memory. What
//! leaves: completions to the [`Sink`], bytes of registered memory, and refusals. What may never
//! happen: an access outside of a registered region, or one that the region's registration does not
//! allow.

use std::sync::Arc;

use landbridge_drive::link::stream::Piece;
use landbridge_proto::endpoint::{
    AtomicRequest, CompletionKind, Endpoint, Failure, OperationCompletion, Peer,
};

use super::memory::Bytes;
use super::peer_table::PeerTable;
use crate::abi::{self, Errno};
use crate::atomic;
use crate::completion::{Completion, OperationKind};
use crate::mr::MrTable;
use crate::sink::Sink;

pub struct Application {
    pub mr: Arc<MrTable>,
    pub sink: Sink,
    /// FI_SOURCE: completions of receives carry the sender's address-vector number.
    pub source_wanted: bool,
    /// One-sided operations of this process that are in flight.
    pub one_sided: usize,
}

/// Tells peers of the node that they must not access the registered memory without this process.
pub const NO_DIRECT_ACCESS: u64 = u64::MAX;

impl Application {
    /// What peers of the node are told of the registered memory: how many regions were removed, or
    /// that they must send a message for each access, because this process counts accesses.
    pub fn regions_notice(&self) -> u64 {
        match self.sink.counters.remote_write {
            Some(_) => NO_DIRECT_ACCESS,
            None => self.mr.published().removals(),
        }
    }

    /// Reports the completion of an operation.
    #[inline]
    pub fn complete(&mut self, peers: &mut PeerTable, done: &OperationCompletion) {
        let mut flags = 0;
        if done.released {
            flags |= abi::MULTI_RECV;
        }
        if done.data.is_some() {
            flags |= abi::REMOTE_CQ_DATA;
        }
        if done.kind == CompletionKind::FetchAtomic {
            flags |= abi::READ;
        }
        if let CompletionKind::Read
        | CompletionKind::Write
        | CompletionKind::Atomic
        | CompletionKind::FetchAtomic = done.kind
        {
            self.one_sided -= 1;
        }
        let source = match done.source {
            Some(peer) if self.source_wanted => peers.number_of(peer),
            _ => None,
        };
        self.sink.complete(Completion {
            kind: kind(done.kind),
            notify: done.ticket.notify,
            context: done.ticket.context,
            flags,
            len: done.length as usize,
            buf: std::ptr::with_exposed_provenance_mut(done.buffer_address as usize),
            data: done.data.unwrap_or(0),
            tag: done.tag,
            source: source.unwrap_or(abi::ADDR_NOTAVAIL),
            error: done.error.map(errno),
        });
    }

    /// The registered memory for a peer's write; without such memory the write is refused.
    pub fn region(
        &self,
        core: &mut Endpoint<Bytes>,
        peer: Peer,
        op: u32,
        key: u64,
        offset: u64,
        len: usize,
    ) -> Option<*mut u8> {
        match self.mr.resolve(key, offset, len, abi::REMOTE_WRITE) {
            Ok(base) => Some(base),
            Err(errno) => {
                core.channel_mut(peer).refuse(op, errno.0);
                None
            }
        }
    }

    /// Lets a peer read registered memory, or refuses.
    pub fn serve(
        &self,
        core: &mut Endpoint<Bytes>,
        peer: Peer,
        op: u32,
        key: u64,
        offset: u64,
        length: u64,
    ) {
        match self.mr.resolve(key, offset, length as usize, abi::REMOTE_READ) {
            Ok(base) => {
                core.channel_mut(peer).serve(op, Bytes::One(Piece { base, len: length as usize }));
            }
            Err(errno) => core.channel_mut(peer).refuse(op, errno.0),
        }
    }

    /// Executes a peer's atomic operation with `operands`, and answers it or refuses it.
    pub fn perform(
        &self,
        core: &mut Endpoint<Bytes>,
        operands: &[u8],
        peer: Peer,
        request: &AtomicRequest,
    ) {
        match self.apply(operands, request) {
            Ok(old) if request.fetch => core.channel_mut(peer).answer(request.op, Bytes::own(old)),
            Ok(_) => (),
            Err(errno) => core.channel_mut(peer).refuse(request.op, errno.0),
        }
    }

    fn apply(&self, operands: &[u8], request: &AtomicRequest) -> Result<Vec<u8>, Errno> {
        let length = request.length as usize;
        let access = match (request.fetch, operands.is_empty()) {
            (true, true) => abi::REMOTE_READ,
            (true, false) => abi::REMOTE_READ | abi::REMOTE_WRITE,
            (false, _) => abi::REMOTE_WRITE,
        };
        let target = self.mr.resolve(request.key, request.offset, length, access)?;
        // The operand may be missing (FI_ATOMIC_READ); the compare bytes then come first.
        let halves = if request.compare { 2 } else { 1 };
        let operand_bytes = operands.len() / halves;
        let (operand, compare) = operands.split_at(operand_bytes);
        let mut old = vec![0; if request.fetch { length } else { 0 }];
        let (op, datatype) = (u32::from(request.operation), u32::from(request.datatype));
        let count = length / atomic::element_bytes(datatype).ok_or(Errno::EOPNOTSUPP)?;
        // SAFETY: `resolve` has verified that the target lies inside a registered region.
        unsafe { atomic::apply(op, datatype, target, operand, compare, &mut old, count) }?;
        Ok(old)
    }
}

#[inline]
fn kind(work: CompletionKind) -> OperationKind {
    match work {
        CompletionKind::Send => OperationKind::Send,
        CompletionKind::TaggedSend => OperationKind::TaggedSend,
        CompletionKind::Recv => OperationKind::Recv,
        CompletionKind::TaggedRecv => OperationKind::TaggedRecv,
        CompletionKind::Read => OperationKind::Read,
        CompletionKind::Write => OperationKind::Write,
        CompletionKind::Atomic | CompletionKind::FetchAtomic => OperationKind::Atomic,
        CompletionKind::RemoteWrite => OperationKind::RemoteWrite,
    }
}

fn errno(failure: Failure) -> (i32, usize) {
    match failure {
        Failure::Truncated(excess) => (Errno::ETRUNC.0, excess as usize),
        Failure::Cancelled => (Errno::ECANCELED.0, 0),
        Failure::NoMessage => (Errno::ENOMSG.0, 0),
        Failure::Errno(errno) => (errno, 0),
    }
}
