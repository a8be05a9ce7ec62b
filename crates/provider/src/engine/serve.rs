//! Executes the protocol's actions: reports completions, moves bytes, accesses registered memory.

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{
    Action, AtomicRequest, CompletionKind, Failure, OperationCompletion, Peer,
};

use super::Engine;
use super::memory::{Bytes, read_process};
use super::request::{Completion, OperationKind};
use crate::abi::{self, Errno};
use crate::atomic;
use landbridge_drive::link::stream::Piece;

impl Engine {
    /// Executes all pending actions of the protocol.
    #[inline]
    pub(super) fn drain_actions(&mut self) {
        while let Some(action) = self.core.poll_action() {
            match action {
                Action::Complete(done) => self.complete(&done),
                Action::CopyUnexpected { store, memory, at, length } => {
                    if let Some(bytes) = self.buffers.take_store(store) {
                        // SAFETY: the memory belongs to the receive, whose completion comes later.
                        unsafe { memory.fill(at, &bytes[..length as usize]) };
                    }
                }
                Action::DropUnexpected { store } => drop(self.buffers.take_store(store)),
                Action::Pull { peer, recv, address, memory, at, length } => {
                    let pulled = self.pull(peer, address, &memory, at, length);
                    self.core.messages_mut().handle_pulled(recv, pulled);
                }
                Action::Serve { peer, op, key, offset, length } => {
                    self.serve(peer, op, key, offset, length);
                }
                Action::Atomic { peer, request } => self.perform(peer, &request),
                Action::DiscardPayload { peer, path } => self.discard_rest(peer, path),
                Action::AddressAdvertisement { peer, address } => {
                    self.handle_advertisement(peer, &address)
                }
                Action::Release { peer, frame } => drop(self.buffers.early.remove(&(peer, frame))),
            }
        }
    }

    /// Discards the rest of a payload that is arriving by `path`, because it has arrived by another
    /// path.
    #[cold]
    fn discard_rest(&mut self, peer: Peer, path: PathId) {
        let open_paths = &self.peers[peer].open_paths;
        let Some(open_path) = open_paths.iter().find(|open_path| open_path.path == path) else {
            return;
        };
        // The link that is being read is not in `links`. That link needs no change here: its
        // arriving payload has ended.
        if let Some(link) = self.links[open_path.link].as_mut()
            && link.inside.is_some_and(|(from, _)| from == peer)
        {
            link.discard_rest();
        }
    }

    #[inline]
    fn complete(&mut self, done: &OperationCompletion) {
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
            self.application.one_sided -= 1;
        }
        let source = match done.source {
            Some(peer) if self.application.source_wanted => self.peers.number_of(peer),
            _ => None,
        };
        self.application.sink.complete(Completion {
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

    fn pull(
        &self,
        peer: Peer,
        address: u64,
        memory: &Bytes,
        at: u64,
        length: u64,
    ) -> Result<(), ()> {
        let pid = self.readable(peer).ok_or(())?;
        // SAFETY: the memory belongs to the receive, whose completion comes later.
        unsafe { read_process(pid, address, memory.range(at, length).as_slice()) }.map_err(|_| ())
    }

    fn readable(&self, peer: Peer) -> Option<i32> {
        self.peers[peer].readable
    }

    fn serve(&mut self, peer: Peer, op: u32, key: u64, offset: u64, length: u64) {
        match self.application.mr.resolve(key, offset, length as usize, abi::REMOTE_READ) {
            Ok(base) => {
                self.core
                    .channel_mut(peer)
                    .serve(op, Bytes::One(Piece { base, len: length as usize }));
            }
            Err(errno) => self.core.channel_mut(peer).refuse(op, errno.0),
        }
    }

    /// Executes a peer's atomic operation; its operands are in `scratch`.
    fn perform(&mut self, peer: Peer, request: &AtomicRequest) {
        match self.apply(request) {
            Ok(old) if request.fetch => {
                self.core.channel_mut(peer).answer(request.op, Bytes::own(old))
            }
            Ok(_) => (),
            Err(errno) => self.core.channel_mut(peer).refuse(request.op, errno.0),
        }
    }

    fn apply(&mut self, request: &AtomicRequest) -> Result<Vec<u8>, Errno> {
        let length = request.length as usize;
        let access = match (request.fetch, self.buffers.scratch.is_empty()) {
            (true, true) => abi::REMOTE_READ,
            (true, false) => abi::REMOTE_READ | abi::REMOTE_WRITE,
            (false, _) => abi::REMOTE_WRITE,
        };
        let target = self.application.mr.resolve(request.key, request.offset, length, access)?;
        // The operand may be missing (FI_ATOMIC_READ); the compare bytes then come first.
        let halves = if request.compare { 2 } else { 1 };
        let operand_bytes = self.buffers.scratch.len() / halves;
        let (operand, compare) = self.buffers.scratch.split_at(operand_bytes);
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
