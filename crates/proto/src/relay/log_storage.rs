//! Where what is kept of endpoints lies: in memory, up to a bound, and beyond it on a disk, written and read by somebody else.
//!
//! What enters: segments that are full, and what has become of those under way ([`Relay::handle_written`],
//! [`Relay::handle_read`]). What leaves: what is to be written, read and deleted ([`Relay::poll_disk_request`]), and what the user
//! should know ([`Relay::poll_log_event`]).
//!
//! Segments begin to be written before the memory is full, the oldest first, a few at a time. If it fills up all the same,
//! because the disk is slower than what comes, inputs whose next frame would have to be kept wait until a segment has been
//! written: nothing else can hold that up, so they wait for nobody. Without a disk, with one that has failed, or is full,
//! whoever needs more can come back no longer, and goes on.
//!
//! What may never happen: more memory than the bound, but for what is under way; somebody is given what was not read as it was
//! written; an input waits for a disk at which nothing is under way.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::message_log::MessageLogs;
use super::port::PENDING_REPORTS_MAX;
use super::segmented_log::FreedSegments;
use super::*;

/// A full segment of a record: what a disk takes at once at its full speed.
pub const SEGMENT_BYTES: usize = 1 << 20;

/// Segments that are being written at a time: enough for a disk never to wait for us.
const WRITES_MAX: usize = 16;

/// Segments that are read ahead for one that is told what was.
pub(super) const READ_AHEAD: usize = 4;

/// Memory for each endpoint in any case, in segments: what is not full yet cannot be written, and when the disk begins to write
/// there must be room for more than a segment.
const SEGMENTS_EACH: u64 = 8;

/// Segments without content that are kept for the next: their memory has been touched, and costs no page faults again. More
/// are for whoever stocks them ([`Relay::poll_surplus_buffer`]).
const BUFFER_POOL_MAX: usize = 2 * WRITES_MAX;

/// Of these, how many there should be in any case while more and more is kept.
const BUFFER_POOL_MIN: usize = 8;

/// Why a record that cannot be read back is given up.
pub(super) const UNREADABLE: &str = "what is kept of it could not be read back from the disk as it was written: it cannot come back";

/// What records may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogLimits {
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes on the disk, if there is one.
    pub disk: Option<u64>,
    /// Of a full segment: [`SEGMENT_BYTES`], less in tests, and [`FRAME_BYTES_MAX`] at least.
    pub segment: usize,
}

/// A segment on the disk, or on its way there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SegmentId(pub u64);

/// What whoever has the disk is to do, in this order but for reads, which may be done before everything else.
#[derive(Debug)]
pub enum DiskRequest {
    /// Write this, let go of it, and then say [`Relay::handle_written`].
    Write(SegmentId, Arc<Vec<u8>>),
    /// Read this back into an empty buffer, so many bytes, and say [`Relay::handle_read`]. It has been written.
    Read(SegmentId, usize, Vec<u8>),
    /// It is not needed any more.
    Delete(SegmentId),
}

/// What the user should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogEvent {
    /// An endpoint can come back no longer, for this reason.
    Unrecoverable(Address, &'static str),
    /// A new start of one has sent something else than was sent before. That it is given up follows.
    Diverged(Divergence),
    /// One of which there was too much to be kept can come back again.
    Recoverable(Address),
    /// So much was given to one since its last image that another would be good: see [`Relay::set_checkpoint_log_bytes`].
    CheckpointDue(Address),
    /// The disk holds as much as it may: what comes now stays in memory.
    DiskFull,
}

/// Buffers of full segments.
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

    /// An empty buffer for `size` bytes.
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

/// A segment that is being written or read: whose it is, which of them, and its length.
#[derive(Clone, Copy, Debug)]
struct SegmentIo {
    address: Address,
    number: usize,
    bytes: u64,
    is_written: bool,
}

/// See the module head.
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
    /// Of segments that are being written: how many there are, and their bytes.
    writes: usize,
    writing_bytes: u64,
    /// Bytes on the disk or on the way there,
    pub disk_bytes: u64,
    /// and of what is kept those that are not in memory.
    pub evicted_bytes: u64,
    is_full_reported: bool,
    /// A segment of full size has been filled, so there will be others.
    has_filled: bool,
    /// See [`Relay::set_checkpoint_log_bytes`].
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

    /// Whether what is kept, `held` bytes of so many endpoints, is more than there is memory for.
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

    /// Whether memory will become free by itself.
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
        // Its segments are numbered from the start should it be recorded again.
        self.sealed.retain(|(whose, _)| *whose != address);
    }

    pub fn note_diverged(&mut self, divergence: Divergence) {
        self.events.push_back(LogEvent::Diverged(divergence));
    }

    /// To an endpoint so much has been given since its last image. Whether that is more than it should be, which is said.
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

    /// Segments have been dropped.
    pub fn account_freed(&mut self, freed: &FreedSegments) {
        self.evicted_bytes -= freed.evicted_bytes;
        self.disk_bytes -= freed.disk_bytes;
        self.requests.extend(freed.deleted.iter().map(|id| DiskRequest::Delete(*id)));
        self.is_full_reported &= freed.deleted.is_empty();
    }

    /// Whether one more segment is to be written now, as `held` bytes are kept of so many endpoints.
    fn may_write(&mut self, held: u64, endpoints: usize) -> bool {
        let Some(disk) = self.room.disk else { return false };
        // Of what is being written some may not be kept any more.
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

    /// Asks for a segment of `address` that is on the disk.
    pub fn fetch(&mut self, address: Address, number: usize, id: SegmentId, length: usize) {
        let io = SegmentIo { address, number, bytes: length as u64, is_written: false };
        self.begin_io(id, io);
        let buffer = self.buffer_pool.take(self.room.segment);
        self.requests.push_back(DiskRequest::Read(id, length, buffer));
    }
}

impl MessageLogs {
    /// Writes what there is no memory for.
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

    /// Whether `bytes` more are too much as long as the disk is busy.
    fn must_wait(&self, bytes: usize) -> bool {
        self.storage.is_writing() && self.storage.is_over(self.bytes + bytes as u64, self.all.len())
    }

    fn handle_written(&mut self, id: SegmentId, is_written: bool) {
        let Some(io) = self.storage.pending_io.remove(&id) else { return };
        let storage = &mut self.storage;
        storage.writes -= 1;
        storage.writing_bytes -= io.bytes;
        if !is_written {
            // What is on it already can still be read.
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

    /// Whose segment has been read, and whether it is as it was written.
    fn handle_read(&mut self, id: SegmentId, bytes: Option<Vec<u8>>) -> Option<(Address, bool)> {
        let io = self.storage.pending_io.remove(&id)?;
        let log = self.all.get_mut(&io.address)?;
        if !log.inbound.holds(io.number, id) {
            return None;
        }
        let is_wanted = log.is_reading(io.number);
        // Nothing is as long as this.
        let bytes = bytes.unwrap_or_default();
        let buffer_pool = &mut self.storage.buffer_pool;
        let is_good = log.inbound.finish_read(io.number, id, bytes, is_wanted, buffer_pool);
        Some((io.address, is_good))
    }
}

impl Relay {
    /// How much may be given to an endpoint before its next image is due, whatever the time. It is looked at with each full
    /// segment.
    pub fn set_checkpoint_log_bytes(&mut self, bytes: u64) {
        if let Some(logs) = &mut self.logs {
            logs.storage.checkpoint_log_bytes = bytes;
        }
    }

    /// What is to be done with the disk next.
    pub fn poll_disk_request(&mut self) -> Option<DiskRequest> {
        self.logs.as_mut()?.storage.requests.pop_front()
    }

    /// How many segments without content would be of use soon ([`Relay::add_segment_buffer`]), as far as there is memory for them.
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

    /// A segment without content that is not needed soon, for whoever stocks some. Its memory has been touched.
    pub fn poll_surplus_buffer(&mut self) -> Option<Vec<u8>> {
        let buffer_pool = &mut self.logs.as_mut()?.storage.buffer_pool;
        if buffer_pool.buffers.len() > BUFFER_POOL_MAX { buffer_pool.buffers.pop() } else { None }
    }

    /// Bytes of the memory for what is kept that nothing takes now.
    pub fn unused_bytes(&self) -> u64 {
        let Some(MessageLogs { storage, bytes, .. }) = &self.logs else { return 0 };
        let buffer_pool = (storage.buffer_pool.buffers.len() * storage.room.segment) as u64;
        storage.room.memory.saturating_sub(bytes - storage.evicted_bytes + buffer_pool)
    }

    /// Here is a segment without content, whose memory has been touched.
    pub fn add_segment_buffer(&mut self, segment: Vec<u8>) {
        if let Some(logs) = &mut self.logs {
            logs.storage.buffer_pool.give_back(segment);
        }
    }

    /// Something that the user should know.
    pub fn poll_log_event(&mut self) -> Option<LogEvent> {
        self.logs.as_mut()?.storage.events.pop_front()
    }

    /// An endpoint whose connection is to be closed, and why: it cannot be told what was.
    pub fn poll_failed_replay(&mut self) -> Option<(LinkId, &'static str)> {
        self.failed_replays.pop_front()
    }

    /// Bytes kept for endpoints that may come back: in memory, and on the disk.
    pub fn kept_bytes(&self) -> (u64, u64) {
        let Some(logs) = &self.logs else { return (0, 0) };
        (logs.bytes - logs.storage.evicted_bytes, logs.storage.disk_bytes)
    }

    /// Whether inputs wait for the disk.
    pub fn waits_for_disk(&self) -> bool {
        self.logs.as_ref().is_some_and(|logs| !logs.storage.waiting_inputs.is_empty())
    }

    /// What has become of [`DiskRequest::Write`]. One that has failed is the last one.
    pub fn handle_written(&mut self, id: SegmentId, is_written: bool) {
        let Some(logs) = &mut self.logs else { return };
        logs.handle_written(id, is_written);
        if !logs.must_wait(0) {
            self.released.extend(logs.storage.waiting_inputs.drain(..));
        }
    }

    /// What has become of [`DiskRequest::Read`]. `None`: it could not be read, or is not what was written.
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

    /// What is kept of it is of no use. A start that has not come to where the one before was can go no further. One that is
    /// only behind goes on: what it should have been told is lost on the way, as over any network, and who has sent it has it yet.
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
        // Whose it was cannot be read either. Who has sent it nothing has nothing to ask after.
        let sources = self.table.processes().map(|index| Address::new(index, 0));
        let channels = sources.filter(|source| *source != address).map(|source| (source, address));
        let lost: BTreeSet<_> = channels.take(PENDING_REPORTS_MAX).collect();
        self.port_mut(link).lossy_channels.extend(lost);
        self.report_losses(link);
    }

    /// Whether a frame for `to` has to wait until the disk has taken something. Its input then waits.
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

    /// `link` waits for the disk no longer.
    pub(super) fn stop_waiting_for_disk(&mut self, link: LinkId) {
        if let Some(logs) = &mut self.logs {
            logs.storage.waiting_inputs.retain(|waiter| *waiter != link);
        }
    }
}
