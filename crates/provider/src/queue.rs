//! A completion queue's ring: the engine adds finished operations, and the program reads entries in
//! its format.
//!
//! Successes and errors share one order. A read returns `EAVAIL` at an error when all earlier
//! entries have been read, and returns later entries only after `read_error` has taken the error.
//! MPICH keeps active messages to its own process in a queue of its own, and reads that queue after
//! this one while it waits for one-sided operations (`MPIDI_progress_test_vci`). So an active
//! message that a peer sent as a consequence of a later message would overtake an own one. The
//! first [`HOLD_READS`] reads after a send therefore return no entry of an untagged receive, which
//! is what carries MPICH's active messages: after each of these reads MPICH takes one message from
//! its own queue. No entry waits for more than [`HOLD_READS`] reads, whatever the program sends
//! meanwhile.
//!
//! The ring gets its size when the queue is opened and grows when it must. The ring never refuses
//! an entry, because every accepted operation owes exactly one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::abi::{CqErrEntry, CqTaggedEntry, Errno, FiAddr, MSG, RECV};
use crate::sync::SpinLock;

/// Initial capacity in entries: enough for what a polling MPI library leaves unread, so that the
/// fast path never allocates.
const CAPACITY_MIN: usize = 1024;
/// Largest requested capacity in entries that is allocated at once (3.5 MiB); beyond it the ring
/// grows on demand.
const CAPACITY_MAX: usize = 65_536;

/// Reads that an active message waits for at most: MPICH takes as many messages of its own queue
/// first.
const HOLD_READS: u32 = 1;

/// Flag of a ring entry that stands for the first waiting error. Bit 63 belongs to the provider
/// (libfabric reserves bits 60 to 63 for providers).
const ERROR_MARK: u64 = 1 << 63;

/// Layout of entries for the caller, given by the number of leading bytes of `CqTaggedEntry`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryFormat {
    Context,
    Message,
    Data,
    Tagged,
}

impl EntryFormat {
    pub fn bytes(self) -> usize {
        match self {
            EntryFormat::Context => 8,
            EntryFormat::Message => 24,
            EntryFormat::Data => 40,
            EntryFormat::Tagged => size_of::<CqTaggedEntry>(),
        }
    }
}

pub struct Queue {
    format: EntryFormat,
    /// Number of entries in the ring, readable without the lock: an idle poll touches nothing else.
    waiting: AtomicUsize,
    /// Number of calls of the program that have read this queue, with or without result.
    reads: AtomicU64,
    /// The MPI library delivers active messages to its own process itself.
    has_library_queue: AtomicBool,
    /// Number of reads since the program has sent, at most [`HOLD_READS`].
    reads_since_send: AtomicU32,
    ring: SpinLock<Ring>,
    /// Set by `fi_cq_signal`: the next blocking read returns.
    signaled: AtomicBool,
}

struct Ring {
    entries: VecDeque<RingEntry>,
    /// Number of reads for which the first entry, an active message, has waited.
    held: u32,
    errors: VecDeque<CqErrEntry>,
}

#[derive(Clone, Copy)]
struct RingEntry {
    entry: CqTaggedEntry,
    source: FiAddr,
}

// SAFETY: the queue passes the pointers in the entries from one caller to another, and never
// dereferences them.
unsafe impl Send for Ring {}

impl Queue {
    pub fn new(format: EntryFormat, size: usize) -> Queue {
        let capacity = size.clamp(CAPACITY_MIN, CAPACITY_MAX);
        Queue {
            format,
            waiting: AtomicUsize::new(0),
            reads: AtomicU64::new(0),
            has_library_queue: AtomicBool::new(false),
            reads_since_send: AtomicU32::new(HOLD_READS),
            ring: SpinLock::new(Ring {
                entries: VecDeque::with_capacity(capacity),
                held: 0,
                errors: VecDeque::new(),
            }),
            signaled: AtomicBool::new(false),
        }
    }

    #[inline]
    pub fn push(&self, entry: CqTaggedEntry, source: FiAddr) {
        let mut ring = self.ring.lock();
        ring.entries.push_back(RingEntry { entry, source });
        self.waiting.store(ring.entries.len(), Ordering::Release);
    }

    #[cold]
    pub fn push_error(&self, error: CqErrEntry) {
        let mark = CqTaggedEntry {
            op_context: error.op_context,
            flags: ERROR_MARK,
            len: 0,
            buf: std::ptr::null_mut(),
            data: 0,
            tag: 0,
        };
        let mut ring = self.ring.lock();
        ring.errors.push_back(error);
        ring.entries.push_back(RingEntry { entry: mark, source: error.src_addr });
        self.waiting.store(ring.entries.len(), Ordering::Release);
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }

    /// Counts a read of this queue by the program. Two simultaneous reads may count as one: the
    /// number only has to change.
    #[inline]
    pub fn note_read(&self) {
        self.reads.store(self.reads.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// From now on active messages wait for [`HOLD_READS`] reads after a send: the MPI library
    /// delivers active messages to its own process itself.
    pub fn let_library_go_first(&self) {
        self.has_library_queue.store(true, Ordering::Relaxed);
    }

    /// The program sends a message.
    #[inline]
    pub fn note_sent(&self) {
        self.reads_since_send.store(0, Ordering::Relaxed);
    }

    /// Counts a read since the last send; whether active messages must wait.
    #[inline]
    fn must_hold_active_messages(&self) -> bool {
        let reads = self.reads_since_send.load(Ordering::Relaxed);
        if reads >= HOLD_READS {
            return false;
        }
        self.reads_since_send.store(reads + 1, Ordering::Relaxed);
        self.has_library_queue.load(Ordering::Relaxed)
    }

    /// A number that changes with every read of this queue by the program.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Moves up to `count` entries to `target`, and their senders to `sources` unless `sources` is
    /// null. Returns `EAGAIN` if the queue is empty or its first entry must wait for the next read
    /// (see [`Self::let_library_go_first`]), and `EAVAIL` if an error is next.
    ///
    /// # Safety
    /// `target` has space for `count` entries of the queue's format, `sources` for `count`
    /// addresses.
    #[inline]
    pub unsafe fn read(
        &self,
        target: *mut u8,
        count: usize,
        sources: *mut FiAddr,
    ) -> Result<usize, Errno> {
        let holds = self.must_hold_active_messages();
        if self.is_empty() {
            return Err(Errno::EAGAIN);
        }
        let mut ring = self.ring.lock();
        let (mut taken, mut is_held) = (0, false);
        while taken < count {
            let Some(slot) = ring.entries.front() else { break };
            if slot.entry.flags & ERROR_MARK != 0 {
                break;
            }
            if holds && slot.entry.flags & (RECV | MSG) == RECV | MSG && ring.held < HOLD_READS {
                ring.held += 1;
                is_held = true;
                break;
            }
            // SAFETY: `taken < count`, and the caller's buffer holds `count` entries.
            unsafe {
                copy_entry(&slot.entry, target, taken, self.format);
                if !sources.is_null() {
                    *sources.add(taken) = slot.source;
                }
            }
            ring.entries.pop_front();
            ring.held = 0;
            taken += 1;
        }
        self.waiting.store(ring.entries.len(), Ordering::Release);
        match (taken, ring.entries.front()) {
            (0, Some(slot)) if slot.entry.flags & ERROR_MARK != 0 => Err(Errno::EAVAIL),
            (0, Some(_)) if is_held => Err(Errno::EAGAIN),
            (0, None) => Err(Errno::EAGAIN),
            (taken, _) => Ok(taken),
        }
    }

    /// Takes the next entry if it is an error.
    pub fn read_error(&self) -> Option<CqErrEntry> {
        let mut ring = self.ring.lock();
        if ring.entries.front()?.entry.flags & ERROR_MARK == 0 {
            return None;
        }
        ring.entries.pop_front();
        self.waiting.store(ring.entries.len(), Ordering::Release);
        ring.errors.pop_front()
    }

    /// Takes the next entry, for a reader in this library.
    pub fn take(&self) -> Option<Result<CqTaggedEntry, CqErrEntry>> {
        if self.is_empty() {
            return None;
        }
        let mut ring = self.ring.lock();
        let slot = ring.entries.pop_front()?;
        self.waiting.store(ring.entries.len(), Ordering::Release);
        match slot.entry.flags & ERROR_MARK != 0 {
            true => ring.errors.pop_front().map(Err),
            false => Some(Ok(slot.entry)),
        }
    }

    /// Makes a blocking read return, now or at its next check.
    pub fn signal(&self) {
        self.signaled.store(true, Ordering::Release);
    }

    pub fn take_signal(&self) -> bool {
        self.signaled.load(Ordering::Relaxed) && self.signaled.swap(false, Ordering::Acquire)
    }
}

/// # Safety
/// `target` has space for `index + 1` entries of `format`.
#[inline]
unsafe fn copy_entry(entry: &CqTaggedEntry, target: *mut u8, index: usize, format: EntryFormat) {
    let from = std::ptr::from_ref(entry).cast::<u8>();
    // SAFETY: every format is a prefix of the tagged entry. Constant lengths make each arm a few
    // moves.
    unsafe {
        match format {
            EntryFormat::Tagged => target.add(index * 48).copy_from_nonoverlapping(from, 48),
            EntryFormat::Data => target.add(index * 40).copy_from_nonoverlapping(from, 40),
            EntryFormat::Message => target.add(index * 24).copy_from_nonoverlapping(from, 24),
            EntryFormat::Context => target.add(index * 8).copy_from_nonoverlapping(from, 8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::TAGGED;

    #[test]
    fn entries_come_out_in_order_with_their_senders() {
        let queue = Queue::new(EntryFormat::Tagged, 0);
        (0..5).for_each(|i| queue.push(entry(i), i as u64 + 100));
        let (taken, sources) = read(&queue, 3);
        assert_eq!(contexts(&taken.unwrap()), [0, 1, 2]);
        assert_eq!(sources[..3], [100, 101, 102]);
        assert_eq!(contexts(&read(&queue, 8).0.unwrap()), [3, 4]);
        assert_eq!(read(&queue, 8).0.unwrap_err(), Errno::EAGAIN);
    }

    #[test]
    fn an_error_holds_back_what_follows_until_it_is_taken() {
        let queue = Queue::new(EntryFormat::Tagged, 0);
        queue.push(entry(1), 0);
        queue.push_error(error(2));
        queue.push(entry(3), 0);
        assert!(queue.read_error().is_none(), "a success is next");
        assert_eq!(contexts(&read(&queue, 8).0.unwrap()), [1]);
        assert_eq!(read(&queue, 8).0.unwrap_err(), Errno::EAVAIL);
        assert_eq!(queue.read_error().unwrap().op_context, 2);
        assert_eq!(contexts(&read(&queue, 8).0.unwrap()), [3]);
    }

    #[test]
    fn it_grows_past_its_first_size() {
        let queue = Queue::new(EntryFormat::Tagged, 0);
        let many = 3 * CAPACITY_MIN;
        (0..many).for_each(|i| queue.push(entry(i), 0));
        let mut seen = Vec::new();
        while let (Ok(entries), _) = read(&queue, 8) {
            seen.extend(contexts(&entries));
        }
        assert!(seen.into_iter().eq(0..many));
    }

    #[test]
    fn a_shorter_format_is_a_prefix() {
        let queue = Queue::new(EntryFormat::Message, 0);
        queue.push(entry(7), 0);
        queue.push(entry(8), 0);
        let mut words = [0u64; 6];
        // SAFETY: six words are two entries of 24 bytes.
        let taken = unsafe { queue.read(words.as_mut_ptr().cast(), 2, std::ptr::null_mut()) };
        assert_eq!(taken, Ok(2));
        assert_eq!(words, [7, 1024, 14, 8, 1024, 16]);
    }

    #[test]
    fn a_signal_is_seen_once() {
        let queue = Queue::new(EntryFormat::Context, 0);
        queue.signal();
        assert!(queue.take_signal());
        assert!(!queue.take_signal());
    }

    fn entry(context: usize) -> CqTaggedEntry {
        CqTaggedEntry {
            op_context: context,
            flags: 1024,
            len: 2 * context,
            buf: std::ptr::null_mut(),
            data: 0,
            tag: 0,
        }
    }

    fn error(context: usize) -> CqErrEntry {
        CqErrEntry {
            op_context: context,
            flags: 0,
            len: 0,
            buf: std::ptr::null_mut(),
            data: 0,
            tag: 0,
            olen: 0,
            err: 1,
            prov_errno: 1,
            err_data: std::ptr::null_mut(),
            err_data_size: 0,
            src_addr: 0,
        }
    }

    #[test]
    fn active_messages_wait_for_some_reads_after_a_send() {
        let queue = Queue::new(EntryFormat::Tagged, 0);
        let arrival = |i, kind| CqTaggedEntry { flags: RECV | kind, ..entry(i) };
        let next = || read(&queue, 8).0.map(|entries| contexts(&entries));
        queue.push(arrival(0, MSG), 0);
        queue.note_sent();
        assert_eq!(next().unwrap(), [0], "no library delivers own messages");
        queue.let_library_go_first();
        for (i, kind) in [(1, TAGGED), (2, MSG), (3, TAGGED)] {
            queue.push(arrival(i, kind), 0);
        }
        queue.note_sent();
        assert_eq!(next().unwrap(), [1]);
        (1..HOLD_READS).for_each(|_| assert_eq!(next(), Err(Errno::EAGAIN)));
        assert_eq!(next().unwrap(), [2, 3]);
        // Reads of the empty queue count as well.
        queue.note_sent();
        (0..HOLD_READS).for_each(|_| assert_eq!(next(), Err(Errno::EAGAIN)));
        queue.push(arrival(4, MSG), 0);
        assert_eq!(next().unwrap(), [4]);
        // A program that sends before each read gets the entry nevertheless.
        queue.push(arrival(5, MSG), 0);
        for _ in 0..HOLD_READS {
            queue.note_sent();
            assert_eq!(next(), Err(Errno::EAGAIN));
        }
        queue.note_sent();
        assert_eq!(next().unwrap(), [5]);
    }

    fn read(queue: &Queue, count: usize) -> (Result<Vec<CqTaggedEntry>, Errno>, [FiAddr; 8]) {
        let mut entries = vec![entry(0); 8];
        let mut sources = [0; 8];
        // SAFETY: both buffers hold eight entries, and no test asks for more.
        let taken = unsafe { queue.read(entries.as_mut_ptr().cast(), count, sources.as_mut_ptr()) };
        (taken.map(|n| entries[..n].to_vec()), sources)
    }

    fn contexts(entries: &[CqTaggedEntry]) -> Vec<usize> {
        entries.iter().map(|e| e.op_context).collect()
    }
}
