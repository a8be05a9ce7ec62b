//! Destination of an endpoint's finished operations: its two completion queues and its counters.
//!
//! The engine calls `complete` with its lock held; the sink never calls an engine.

use std::sync::Arc;

use crate::abi::{self, CqErrEntry, CqTaggedEntry};
use crate::completion::{Completion, OperationKind};
use crate::counter::Counter;
use crate::queue::Queue;

/// The queues and counters bound to an endpoint. Without a queue or counter the operation is not
/// reported there.
#[derive(Clone, Default)]
pub struct Sink {
    pub transmit: Option<Arc<Queue>>,
    pub receive: Option<Arc<Queue>>,
    pub counters: Counters,
}

/// Counters by what they count (`fi_ep_bind` flags).
#[derive(Clone, Default)]
pub struct Counters {
    pub send: Option<Arc<Counter>>,
    pub recv: Option<Arc<Counter>>,
    pub read: Option<Arc<Counter>>,
    pub write: Option<Arc<Counter>>,
    pub remote_write: Option<Arc<Counter>>,
}

impl Sink {
    /// Updates counter and queue. An atomic operation that returns a result carries `abi::READ` in
    /// its flags, and then counts as a read, otherwise as a write.
    #[inline]
    pub fn complete(&self, completion: Completion) {
        let flags = base_flags(completion.kind, completion.flags) | completion.flags;
        if let Some(counter) = self.counter(completion.kind, flags) {
            match completion.error {
                None => counter.add(1),
                Some(_) => counter.add_errors(1),
            }
        }
        match completion.error {
            None if !completion.notify => {}
            None => self.write(&completion, flags),
            Some((errno, excess)) => self.write_error(&completion, flags, errno, excess),
        }
    }

    #[inline]
    fn write(&self, completion: &Completion, flags: u64) {
        let Some(queue) = self.queue(completion.kind) else { return };
        let entry = CqTaggedEntry {
            op_context: completion.context,
            flags,
            len: completion.len,
            buf: completion.buf,
            data: completion.data,
            tag: completion.tag,
        };
        queue.push(entry, completion.source);
    }

    #[cold]
    fn write_error(&self, completion: &Completion, flags: u64, errno: i32, excess: usize) {
        let Some(queue) = self.queue(completion.kind) else { return };
        queue.push_error(CqErrEntry {
            op_context: completion.context,
            flags,
            len: completion.len,
            buf: completion.buf,
            data: completion.data,
            tag: completion.tag,
            olen: excess,
            err: errno,
            prov_errno: errno,
            err_data: std::ptr::null_mut(),
            err_data_size: 0,
            src_addr: completion.source,
        });
    }

    #[inline]
    fn queue(&self, kind: OperationKind) -> Option<&Queue> {
        match kind {
            OperationKind::Recv | OperationKind::TaggedRecv | OperationKind::RemoteWrite => {
                self.receive.as_deref()
            }
            OperationKind::Send
            | OperationKind::TaggedSend
            | OperationKind::Read
            | OperationKind::Write
            | OperationKind::Atomic => self.transmit.as_deref(),
        }
    }

    #[inline]
    fn counter(&self, kind: OperationKind, flags: u64) -> Option<&Counter> {
        let counters = &self.counters;
        let counter = match kind {
            OperationKind::Send | OperationKind::TaggedSend => &counters.send,
            OperationKind::Recv | OperationKind::TaggedRecv => &counters.recv,
            OperationKind::Read => &counters.read,
            OperationKind::Write => &counters.write,
            OperationKind::Atomic if flags & abi::READ != 0 => &counters.read,
            OperationKind::Atomic => &counters.write,
            OperationKind::RemoteWrite => &counters.remote_write,
        };
        counter.as_deref()
    }
}

#[inline]
fn base_flags(kind: OperationKind, given: u64) -> u64 {
    match kind {
        OperationKind::Send => abi::SEND | abi::MSG,
        OperationKind::TaggedSend => abi::SEND | abi::TAGGED,
        OperationKind::Recv => abi::RECV | abi::MSG,
        OperationKind::TaggedRecv => abi::RECV | abi::TAGGED,
        OperationKind::Read => abi::READ | abi::RMA,
        OperationKind::Write => abi::WRITE | abi::RMA,
        OperationKind::Atomic if given & abi::READ != 0 => abi::ATOMIC,
        OperationKind::Atomic => abi::WRITE | abi::ATOMIC,
        OperationKind::RemoteWrite => abi::REMOTE_WRITE | abi::RMA,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Errno;
    use crate::queue::EntryFormat;

    #[test]
    fn flags_are_those_mpi_libraries_expect() {
        let sink = both_queues();
        sink.complete(Completion { flags: abi::REMOTE_CQ_DATA, ..of(OperationKind::TaggedRecv) });
        assert_eq!(next(&sink.receive).unwrap().flags, 0x20408);
        sink.complete(of(OperationKind::TaggedSend));
        assert_eq!(next(&sink.transmit).unwrap().flags, 0x808);
        sink.complete(of(OperationKind::Recv));
        assert_eq!(next(&sink.receive).unwrap().flags, 0x402);
    }

    #[test]
    fn a_quiet_success_is_only_counted() {
        let counter = Arc::new(Counter::default());
        let mut sink = both_queues();
        sink.counters.write = Some(Arc::clone(&counter));
        sink.complete(Completion { notify: false, ..of(OperationKind::Write) });
        assert_eq!((counter.value(), counter.errors()), (1, 0));
        assert_eq!(next(&sink.transmit).unwrap_err(), Errno::EAGAIN);
    }

    #[test]
    fn an_error_is_reported_even_when_quiet() {
        let sink = both_queues();
        let error = Some((Errno::ETRUNC.0, 12));
        sink.complete(Completion { notify: false, error, len: 4, ..of(OperationKind::TaggedRecv) });
        assert_eq!(next(&sink.receive).unwrap_err(), Errno::EAVAIL);
        let entry = sink.receive.unwrap().read_error().unwrap();
        assert_eq!((entry.err, entry.len, entry.olen), (265, 4, 12));
    }

    #[test]
    fn a_fetching_atomic_counts_as_a_read() {
        let (reads, writes) = (Arc::new(Counter::default()), Arc::new(Counter::default()));
        let mut sink = both_queues();
        sink.counters.read = Some(Arc::clone(&reads));
        sink.counters.write = Some(Arc::clone(&writes));
        sink.complete(Completion { flags: abi::READ, ..of(OperationKind::Atomic) });
        sink.complete(of(OperationKind::Atomic));
        assert_eq!((reads.value(), writes.value()), (1, 1));
        assert_eq!(next(&sink.transmit).unwrap().flags, abi::READ | abi::ATOMIC);
        assert_eq!(next(&sink.transmit).unwrap().flags, abi::WRITE | abi::ATOMIC);
    }

    fn both_queues() -> Sink {
        Sink {
            transmit: Some(Arc::new(Queue::new(EntryFormat::Tagged, 0))),
            receive: Some(Arc::new(Queue::new(EntryFormat::Tagged, 0))),
            counters: Counters::default(),
        }
    }

    fn of(kind: OperationKind) -> Completion {
        Completion {
            kind,
            notify: true,
            context: 1,
            flags: 0,
            len: 0,
            buf: std::ptr::null_mut(),
            data: 0,
            tag: 0,
            source: abi::ADDR_NOTAVAIL,
            error: None,
        }
    }

    fn next(queue: &Option<Arc<Queue>>) -> Result<CqTaggedEntry, Errno> {
        let mut entry = std::mem::MaybeUninit::<CqTaggedEntry>::uninit();
        let queue = queue.as_ref().unwrap();
        // SAFETY: the buffer holds the one requested entry.
        unsafe {
            queue.read(entry.as_mut_ptr().cast(), 1, std::ptr::null_mut())?;
            Ok(entry.assume_init())
        }
    }
}
