//! Storage of the message logs: in memory up to a bound, and beyond this bound on a disk, which
//! another thread reads and writes.
//!
//! What enters: full segments, and the results of disk requests ([`Relay::handle_written`],
//! [`Relay::handle_read`]). What leaves: requests to write, read and delete segments
//! ([`Relay::poll_disk_request`]), and events for the user ([`Relay::poll_log_event`]).
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

use super::message_log::MessageLogs;
use super::port::PENDING_REPORTS_MAX;
use super::segmented_log::FreedSegments;
use super::*;

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
/// page faults again. The driver takes buffers beyond this number ([`Relay::poll_surplus_buffer`]).
const BUFFER_POOL_MAX: usize = 2 * WRITES_MAX;

/// Empty segment buffers that the relay should have in any case while the logs grow.
const BUFFER_POOL_MIN: usize = 8;

/// Reason for a discarded log that could not be read back from the disk.
pub(super) const UNREADABLE: &str = "what is kept of it could not be read back from the disk as it was written: it cannot come back";

/// Bounds for all message logs together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogLimits {
    /// Bytes of memory that all logs may take.
    pub memory: u64,
    /// Bytes that all logs may take on the disk, if there is a disk.
    pub disk: Option<u64>,
    /// Size of a full segment: [`SEGMENT_BYTES`], less in tests, and [`FRAME_BYTES_MAX`] at least.
    pub segment: usize,
}

/// Name of a segment that is on the disk or being written there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SegmentId(pub u64);

/// Request to the disk. Requests must be served in order; reads may overtake other requests.
#[derive(Debug)]
pub enum DiskRequest {
    /// Write these bytes, drop the reference, and then call [`Relay::handle_written`].
    Write(SegmentId, Arc<Vec<u8>>),
    /// Read so many bytes of this segment into the empty buffer, and call [`Relay::handle_read`].
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
    /// is due: see [`Relay::set_checkpoint_log_bytes`].
    CheckpointDue(Address),
    /// The disk has reached its bound: further frames stay in memory.
    DiskFull,
}

/// Empty buffers of the size of a full segment.
#[derive(Debug)]
pub(super) struct BufferPool {
    buffers: Vec<Vec<u8>>,
    segment_bytes: usize,
}

impl BufferPool {
    pub fn new(segment_bytes: usize) -> Self {
        Self { buffers: Vec::new(), segment_bytes }
    }

    pub fn segment_bytes(&self) -> usize {
        self.segment_bytes
    }

    /// An empty buffer of `size` bytes.
    pub fn take(&mut self, size: usize) -> Vec<u8> {
        let buffer_pool = if size == self.segment_bytes { self.buffers.pop() } else { None };
        buffer_pool.unwrap_or_else(|| Vec::with_capacity(size))
    }

    pub fn give_back(&mut self, mut buffer: Vec<u8>) {
        if buffer.capacity() >= self.segment_bytes {
            buffer.clear();
            self.buffers.push(buffer);
        }
    }
}

/// A segment that is being written or read: its endpoint, number and length.
#[derive(Clone, Copy, Debug)]
struct SegmentIo {
    address: Address,
    number: usize,
    bytes: u64,
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
    /// Bytes: see [`Relay::set_checkpoint_log_bytes`].
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

    #[cfg(test)]
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
    fn may_write(&mut self, held: u64, endpoints: usize) -> bool {
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
}

impl MessageLogs {
    /// Requests writes of full segments until enough memory will be free.
    pub fn write_out(&mut self) {
        while self.storage.may_write(self.bytes, self.all.len()) {
            let Some((address, number)) = self.storage.sealed.pop_front() else { break };
            let id = SegmentId(self.storage.ids);
            let log = self.all.get_mut(&address);
            let Some(bytes) = log.and_then(|it| it.inbound.begin_write(number, id)) else {
                continue;
            };
            self.storage.ids += 1;
            let io = SegmentIo { address, number, bytes: bytes.len() as u64, is_written: true };
            self.storage.begin_io(id, io);
            self.storage.requests.push_back(DiskRequest::Write(id, bytes));
        }
    }

    /// Whether `bytes` more bytes exceed the memory bound while the disk is writing.
    fn must_wait(&self, bytes: usize) -> bool {
        self.storage.is_writing() && self.storage.is_over(self.bytes + bytes as u64, self.all.len())
    }

    fn handle_written(&mut self, id: SegmentId, is_written: bool) {
        let Some(io) = self.storage.pending_io.remove(&id) else { return };
        let storage = &mut self.storage;
        storage.writes -= 1;
        storage.writing_bytes -= io.bytes;
        if !is_written {
            // Segments that are on the disk already can still be read.
            storage.room.disk = None;
            storage.sealed.clear();
        }
        if let Some(log) = self.all.get_mut(&io.address) {
            let is_read = log.is_reading(io.number);
            let buffer_pool = &mut storage.buffer_pool;
            let is_there = log.inbound.holds(io.number, id);
            let away = log.inbound.finish_write(io.number, id, is_written, is_read, buffer_pool);
            storage.evicted_bytes += away.unwrap_or(0) as u64;
            if is_there && !is_written {
                storage.disk_bytes -= io.bytes;
            }
        }
        self.write_out();
    }

    /// The endpoint of the segment that was read, and whether the read succeeded.
    fn handle_read(&mut self, id: SegmentId, bytes: Option<Vec<u8>>) -> Option<(Address, bool)> {
        let io = self.storage.pending_io.remove(&id)?;
        let log = self.all.get_mut(&io.address)?;
        if !log.inbound.holds(io.number, id) {
            return None;
        }
        let is_wanted = log.is_reading(io.number);
        // No segment is empty, so a failed read fails the length check.
        let bytes = bytes.unwrap_or_default();
        let buffer_pool = &mut self.storage.buffer_pool;
        let is_good = log.inbound.finish_read(io.number, id, bytes, is_wanted, buffer_pool);
        Some((io.address, is_good))
    }
}

impl Relay {
    /// Sets how many bytes the log of an endpoint may grow before the next checkpoint is due,
    /// whatever the time. The relay checks the growth with each full segment.
    pub fn set_checkpoint_log_bytes(&mut self, bytes: u64) {
        if let Some(logs) = &mut self.logs {
            logs.storage.checkpoint_log_bytes = bytes;
        }
    }

    /// The next disk request that the driver should serve.
    pub fn poll_disk_request(&mut self) -> Option<DiskRequest> {
        self.logs.as_mut()?.storage.requests.pop_front()
    }

    /// Number of empty segment buffers that the relay needs soon ([`Relay::add_segment_buffer`]),
    /// as far as the memory bound allows.
    #[inline]
    pub fn wanted_segment_buffers(&self) -> usize {
        let Some(logs) = self.logs.as_ref().filter(|it| it.storage.has_filled) else {
            return 0;
        };
        let LogStorage { buffer_pool, room, .. } = &logs.storage;
        let next = logs.bytes + ((buffer_pool.buffers.len() + 1) * room.segment) as u64;
        match logs.storage.is_over(next, logs.all.len()) {
            true => 0,
            false => BUFFER_POOL_MIN.saturating_sub(buffer_pool.buffers.len()),
        }
    }

    /// An empty segment buffer that the relay does not need soon, for the driver's pool. Its pages
    /// are mapped.
    pub fn poll_surplus_buffer(&mut self) -> Option<Vec<u8>> {
        let buffer_pool = &mut self.logs.as_mut()?.storage.buffer_pool;
        if buffer_pool.buffers.len() > BUFFER_POOL_MAX { buffer_pool.buffers.pop() } else { None }
    }

    /// Bytes within the memory bound that neither the logs nor empty buffers take now.
    pub fn unused_bytes(&self) -> u64 {
        let Some(MessageLogs { storage, bytes, .. }) = &self.logs else { return 0 };
        let buffer_pool = (storage.buffer_pool.buffers.len() * storage.room.segment) as u64;
        storage.room.memory.saturating_sub(bytes - storage.evicted_bytes + buffer_pool)
    }

    /// Adds an empty segment buffer, whose pages are mapped.
    pub fn add_segment_buffer(&mut self, segment: Vec<u8>) {
        if let Some(logs) = &mut self.logs {
            logs.storage.buffer_pool.give_back(segment);
        }
    }

    /// The next event that the user should know.
    pub fn poll_log_event(&mut self) -> Option<LogEvent> {
        self.logs.as_mut()?.storage.events.pop_front()
    }

    /// An endpoint whose connection the driver must close, and why: its log cannot be read, so the
    /// replay has failed.
    pub fn poll_failed_replay(&mut self) -> Option<(LinkId, &'static str)> {
        self.failed_replays.pop_front()
    }

    /// Bytes of all message logs: in memory, and on the disk.
    pub fn kept_bytes(&self) -> (u64, u64) {
        let Some(logs) = &self.logs else { return (0, 0) };
        (logs.bytes - logs.storage.evicted_bytes, logs.storage.disk_bytes)
    }

    /// Whether inputs wait for the disk.
    pub fn waits_for_disk(&self) -> bool {
        self.logs.as_ref().is_some_and(|logs| !logs.storage.waiting_inputs.is_empty())
    }

    /// Result of [`DiskRequest::Write`]. After a failed write the relay requests no further writes.
    pub fn handle_written(&mut self, id: SegmentId, is_written: bool) {
        let Some(logs) = &mut self.logs else { return };
        logs.handle_written(id, is_written);
        if !logs.must_wait(0) {
            self.released.extend(logs.storage.waiting_inputs.drain(..));
        }
    }

    /// Result of [`DiskRequest::Read`]. `None`: the read failed, or the bytes differ from the
    /// written ones.
    pub fn handle_read(&mut self, id: SegmentId, bytes: Option<Vec<u8>>) {
        let Some(logs) = &mut self.logs else { return };
        self.counters.read_back_bytes += bytes.as_ref().map_or(0, Vec::len) as u64;
        let Some((address, is_good)) = logs.handle_read(id, bytes) else { return };
        let Route::Link(link) = self.table.route(address) else { return };
        match is_good {
            true => self.resume_replay(link),
            false => self.fail_replay(link, address),
        }
    }

    /// Discards a log that cannot be read. An incarnation that is still replaying cannot continue.
    /// An endpoint with a mere backlog continues: its missing frames count as lost in the network,
    /// and their sources still hold them for retransmission.
    pub(super) fn fail_replay(&mut self, link: LinkId, address: Address) {
        let Some(logs) = &mut self.logs else { return };
        let has_only_backlog = logs.has_only_backlog(address);
        logs.discard(address, UNREADABLE);
        let port = self.port_mut(link);
        let was_replaying = port.is_replaying;
        port.set_replay_state(ReplayState::Complete);
        if !was_replaying || !port.is_up() {
            return;
        }
        if !has_only_backlog {
            self.failed_replays.push_back((link, UNREADABLE));
            return;
        }
        // The sources of the missing frames cannot be read either, so every process of the job
        // receives Lost. A source that has sent nothing has nothing to request.
        let sources = self.table.processes().map(|index| Address::new(index, 0));
        let channels = sources.filter(|source| *source != address).map(|source| (source, address));
        let lost: BTreeSet<_> = channels.take(PENDING_REPORTS_MAX).collect();
        self.port_mut(link).lossy_channels.extend(lost);
        self.report_losses(link);
    }

    /// Whether a frame for `to` has to wait until the disk has written a segment. Its input then
    /// waits.
    #[inline]
    pub(super) fn must_wait_for_disk(&mut self, from: LinkId, to: LinkId, bytes: usize) -> bool {
        let Some(logs) = &mut self.logs else { return false };
        if !logs.must_wait(bytes) {
            return false;
        }
        let (Some(input), Some(output)) =
            (&self.ports[from.0 as usize], &self.ports[to.0 as usize])
        else {
            return false;
        };
        let PortKind::Endpoint(address) = output.kind else { return false };
        if input.is_draining || logs.unrecoverable_reason(address).is_some() {
            return false;
        }
        logs.storage.waiting_inputs.push(from);
        self.counters.disk_waits += 1;
        true
    }

    /// Removes `link` from the inputs that wait for the disk.
    pub(super) fn stop_waiting_for_disk(&mut self, link: LinkId) {
        if let Some(logs) = &mut self.logs {
            logs.storage.waiting_inputs.retain(|waiter| *waiter != link);
        }
    }
}
