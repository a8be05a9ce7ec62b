//! Storage of the message logs: in memory up to a bound, and beyond this bound on a disk, which
//! another thread reads and writes.
//!
//! What enters: full segments, and the results of disk requests ([`super::Relay::handle_written`],
//! [`super::Relay::handle_read`]). What leaves: requests to write, read and delete segments
//! ([`super::Recovery::poll_disk_request`]), and events for the user
//! ([`super::Recovery::poll_log_event`]).
//!
//! The relay starts to write segments before the memory is full, the oldest first, a few at a time.
//! If the memory fills up all the same, because the disk is slower than the arriving frames, inputs
//! whose next frame has to be logged wait until a segment has been written. Only the disk can hold
//! up this write, so such a wait cannot be part of a deadlock. If there is no disk, or if the disk
//! has failed or is full, an endpoint whose log exceeds the bound cannot be restarted any more, and
//! continues to run.
//!
//! What may never happen: the logs take more memory than the bound, except for segments being
//! written or read; an endpoint receives frames that differ from the written ones; an input waits
//! for a disk that has no request in progress.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::divergence::Divergence;
use super::segment_buffers::{BufferPool, SegmentId};
use super::segmented_log::FreedSegments;
use crate::id::Address;
use crate::route::routing_table::LinkId;

/// Size of a full segment in bytes: a disk transfers so much in one request at full speed.
pub const SEGMENT_BYTES: usize = 1 << 20;

/// Most segments that are written at a time: enough to keep a disk busy.
const WRITES_MAX: usize = 16;

/// Segments that are read ahead for a replay.
pub(super) const READ_AHEAD: usize = 4;

/// Memory that each endpoint has in any case, in segments, if there is a disk: segments that are
/// not full cannot be written, and when the disk begins to write there must be memory for more than
/// one segment.
const SEGMENTS_EACH: u64 = 8;

/// Empty segment buffers that the relay keeps for new segments: their pages are mapped, and cost no
/// page faults again. The driver takes buffers beyond this number
/// ([`super::Recovery::poll_surplus_buffer`]).
const BUFFER_POOL_MAX: usize = 2 * WRITES_MAX;

/// Empty segment buffers that the relay should have in any case while the logs grow.
const BUFFER_POOL_MIN: usize = 8;

/// Reason for a discarded log that could not be read back from the disk.
pub(super) const UNREADABLE: &str = "its message log came back corrupt from the disk: it cannot \
                                     be restarted";

/// Bounds for all message logs together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogLimits {
    /// Bytes of memory that all logs may take.
    pub memory: u64,
    /// Bytes that all logs may take on the disk, if there is a disk.
    pub disk: Option<u64>,
    /// Size of a full segment: [`SEGMENT_BYTES`], less in tests, and [`super::FRAME_BYTES_MAX`] at
    /// least.
    pub segment: usize,
}

/// Request to the disk. Requests must be served in order; reads may overtake other requests.
#[derive(Debug)]
pub enum DiskRequest {
    /// Write these bytes, drop the reference, and then call [`super::Relay::handle_written`].
    Write(SegmentId, Arc<Vec<u8>>),
    /// Read so many bytes of this segment into the empty buffer, and call
    /// [`super::Relay::handle_read`].
    /// The write of the segment has ended.
    Read(SegmentId, usize, Vec<u8>),
    /// Delete this segment.
    Delete(SegmentId),
}

/// Event in the message logs that the user should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogEvent {
    /// The endpoint cannot be restarted any more, for this reason.
    Unrecoverable(Address, &'static str),
    /// A restarted incarnation of an endpoint has sent another frame than the previous incarnation.
    /// [`LogEvent::Unrecoverable`] for the endpoint follows.
    Diverged(Divergence),
    /// The endpoint, whose log exceeded the bound or could not be read, can be restarted again.
    Recoverable(Address),
    /// The log of the endpoint has grown so much since its last checkpoint that another checkpoint
    /// is due: see [`super::Recovery::set_checkpoint_log_bytes`].
    CheckpointDue(Address),
    /// The disk has reached its bound: further frames stay in memory.
    DiskFull,
}

/// A segment that is being written or read: its endpoint, number and length.
#[derive(Clone, Copy, Debug)]
pub(super) struct SegmentIo {
    pub address: Address,
    pub number: usize,
    pub bytes: u64,
    is_written: bool,
}

/// Storage of the message logs: see the module head.
#[derive(Debug)]
pub(super) struct LogStorage {
    room: LogLimits,
    pub buffer_pool: BufferPool,
    requests: VecDeque<DiskRequest>,
    events: VecDeque<LogEvent>,
    pending_io: BTreeMap<SegmentId, SegmentIo>,
    /// Full segments in memory, in the order in which they became full.
    sealed: VecDeque<(Address, usize)>,
    ids: u64,
    /// Number of segments that are being written; `writing_bytes` counts their bytes.
    writes: usize,
    writing_bytes: u64,
    /// Bytes on the disk or being written there.
    pub disk_bytes: u64,
    /// Bytes of kept segments that are on the disk and no longer count as memory.
    pub evicted_bytes: u64,
    is_full_reported: bool,
    /// Whether a segment of full size has been filled: more full segments will follow.
    has_filled: bool,
    /// Bytes: see [`super::Recovery::set_checkpoint_log_bytes`].
    checkpoint_log_bytes: u64,
    /// Inputs that wait for the disk.
    waiting_inputs: Vec<LinkId>,
}

impl LogStorage {
    pub fn new(room: LogLimits) -> Self {
        Self {
            room,
            buffer_pool: BufferPool::new(room.segment),
            requests: VecDeque::new(),
            events: VecDeque::new(),
            pending_io: BTreeMap::new(),
            sealed: VecDeque::new(),
            ids: 0,
            writes: 0,
            writing_bytes: 0,
            disk_bytes: 0,
            evicted_bytes: 0,
            is_full_reported: false,
            has_filled: false,
            checkpoint_log_bytes: u64::MAX,
            waiting_inputs: Vec::new(),
        }
    }

    pub fn set_memory(&mut self, memory: u64) {
        self.room.memory = memory;
    }

    /// Whether logs of `held` bytes, of so many endpoints, exceed the memory bound.
    #[inline]
    pub fn is_over(&self, held: u64, endpoints: usize) -> bool {
        held - self.evicted_bytes > self.memory(endpoints)
    }

    #[inline]
    fn memory(&self, endpoints: usize) -> u64 {
        let least = match self.room.disk {
            Some(_) => endpoints as u64 * SEGMENTS_EACH * self.room.segment as u64,
            None => 0,
        };
        self.room.memory.max(least)
    }

    /// Whether a write is in progress, which will free memory.
    #[inline]
    pub fn is_writing(&self) -> bool {
        self.writes > 0
    }

    pub fn note_sealed(&mut self, address: Address, number: usize) {
        self.has_filled = true;
        if self.room.disk.is_some() {
            self.sealed.push_back((address, number));
        }
    }

    pub fn note_unrecoverable(&mut self, address: Address, why: &'static str) {
        self.events.push_back(LogEvent::Unrecoverable(address, why));
        // The segments are numbered from 0 again if logging restarts.
        self.sealed.retain(|(whose, _)| *whose != address);
    }

    pub fn note_diverged(&mut self, divergence: Divergence) {
        self.events.push_back(LogEvent::Diverged(divergence));
    }

    /// Notes that the log of an endpoint has grown by `bytes` since its last checkpoint. Returns
    /// whether a checkpoint is due, and reports this to the user.
    pub fn note_growth(&mut self, address: Address, bytes: u64) -> bool {
        let is_growth_reported = bytes >= self.checkpoint_log_bytes;
        if is_growth_reported {
            self.events.push_back(LogEvent::CheckpointDue(address));
        }
        is_growth_reported
    }

    pub fn note_recoverable(&mut self, address: Address) {
        self.events.push_back(LogEvent::Recoverable(address));
    }

    /// Accounts for dropped segments, and deletes them from the disk.
    pub fn account_freed(&mut self, freed: &FreedSegments) {
        self.evicted_bytes -= freed.evicted_bytes;
        self.disk_bytes -= freed.disk_bytes;
        self.requests.extend(freed.deleted.iter().map(|id| DiskRequest::Delete(*id)));
        self.is_full_reported &= freed.deleted.is_empty();
    }

    /// Whether the relay should write one more segment now, with logs of `held` bytes of so many
    /// endpoints.
    pub fn may_write(&mut self, held: u64, endpoints: usize) -> bool {
        let Some(disk) = self.room.disk else { return false };
        // Some of the segments being written may have been dropped from the logs.
        let staying = (held - self.evicted_bytes).saturating_sub(self.writing_bytes);
        let is_due = staying > self.memory(endpoints) / 4 * 3 && self.writes < WRITES_MAX;
        let has_room = self.disk_bytes + self.room.segment as u64 <= disk;
        if is_due && !has_room && !self.is_full_reported && !self.sealed.is_empty() {
            self.is_full_reported = true;
            self.events.push_back(LogEvent::DiskFull);
        }
        is_due && has_room
    }

    fn begin_io(&mut self, id: SegmentId, io: SegmentIo) {
        if io.is_written {
            self.writes += 1;
            self.writing_bytes += io.bytes;
            self.disk_bytes += io.bytes;
        }
        self.pending_io.insert(id, io);
    }

    /// Requests a segment of `address` from the disk.
    pub fn fetch(&mut self, address: Address, number: usize, id: SegmentId, length: usize) {
        let io = SegmentIo { address, number, bytes: length as u64, is_written: false };
        self.begin_io(id, io);
        let buffer = self.buffer_pool.take(self.room.segment);
        self.requests.push_back(DiskRequest::Read(id, length, buffer));
    }

    /// The oldest full segment in memory: its endpoint and number.
    pub fn pop_sealed(&mut self) -> Option<(Address, usize)> {
        self.sealed.pop_front()
    }

    /// Name of the segment that is written next.
    pub fn next_id(&self) -> SegmentId {
        SegmentId(self.ids)
    }

    /// Requests to write a segment of `address`, under the name [`LogStorage::next_id`].
    pub fn write(&mut self, address: Address, number: usize, bytes: Arc<Vec<u8>>) {
        let id = self.next_id();
        self.ids += 1;
        let io = SegmentIo { address, number, bytes: bytes.len() as u64, is_written: true };
        self.begin_io(id, io);
        self.requests.push_back(DiskRequest::Write(id, bytes));
    }

    /// Ends a write, which has succeeded or failed. After a failed write nothing more is written.
    pub fn end_write(&mut self, id: SegmentId, is_written: bool) -> Option<SegmentIo> {
        let io = self.pending_io.remove(&id)?;
        self.writes -= 1;
        self.writing_bytes -= io.bytes;
        if !is_written {
            // Segments that are on the disk already can still be read.
            self.room.disk = None;
            self.sealed.clear();
        }
        Some(io)
    }

    /// Ends a read.
    pub fn end_read(&mut self, id: SegmentId) -> Option<SegmentIo> {
        self.pending_io.remove(&id)
    }

    pub fn set_checkpoint_log_bytes(&mut self, bytes: u64) {
        self.checkpoint_log_bytes = bytes;
    }

    pub fn poll_request(&mut self) -> Option<DiskRequest> {
        self.requests.pop_front()
    }

    pub fn poll_event(&mut self) -> Option<LogEvent> {
        self.events.pop_front()
    }

    /// Number of empty segment buffers that are needed soon, with logs of `held` bytes of so many
    /// endpoints, as far as the memory bound allows.
    #[inline]
    pub fn wanted_buffers(&self, held: u64, endpoints: usize) -> usize {
        if !self.has_filled {
            return 0;
        }
        let next = held + ((self.buffer_pool.len() + 1) * self.room.segment) as u64;
        match self.is_over(next, endpoints) {
            true => 0,
            false => BUFFER_POOL_MIN.saturating_sub(self.buffer_pool.len()),
        }
    }

    pub fn poll_surplus_buffer(&mut self) -> Option<Vec<u8>> {
        if self.buffer_pool.len() > BUFFER_POOL_MAX { self.buffer_pool.pop() } else { None }
    }

    /// Bytes within the memory bound that neither the logs, of `held` bytes, nor empty buffers take
    /// now.
    pub fn unused_bytes(&self, held: u64) -> u64 {
        let buffers = (self.buffer_pool.len() * self.room.segment) as u64;
        self.room.memory.saturating_sub(held - self.evicted_bytes + buffers)
    }

    // ---- inputs that wait for the disk ---------------------------------------------------

    pub fn has_waiting_inputs(&self) -> bool {
        !self.waiting_inputs.is_empty()
    }

    pub fn add_waiting_input(&mut self, link: LinkId) {
        self.waiting_inputs.push(link);
    }

    pub fn remove_waiting_input(&mut self, link: LinkId) {
        self.waiting_inputs.retain(|waiter| *waiter != link);
    }

    pub fn take_waiting_inputs(&mut self) -> impl Iterator<Item = LinkId> {
        self.waiting_inputs.drain(..)
    }
}
