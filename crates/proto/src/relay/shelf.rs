//! Where what is kept of endpoints lies: in memory, up to a bound, and beyond it on a disk, written and read by somebody else.
//!
//! What enters: segments that are full, and what has become of those under way ([`Relay::handle_written`],
//! [`Relay::handle_read`]). What leaves: what is to be written, read and forgotten ([`Relay::poll_order`]), and what the user
//! should know ([`Relay::poll_remark`]).
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

use super::archive::Freed;
use super::history::Histories;
use super::port::OWED_MAX;
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
/// are for whoever stocks them ([`Relay::poll_surplus`]).
const SPARE_MAX: usize = 2 * WRITES_MAX;

/// Of these, how many there should be in any case while more and more is kept.
const STOCK: usize = 8;

/// Why a record that cannot be read back is given up.
pub(super) const UNREADABLE: &str = "what is kept of it could not be read back from the disk as it was written: it cannot come back";

/// What records may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
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
pub enum Order {
    /// Write this, let go of it, and then say [`Relay::handle_written`].
    Write(SegmentId, Arc<Vec<u8>>),
    /// Read this back into an empty buffer, so many bytes, and say [`Relay::handle_read`]. It has been written.
    Read(SegmentId, usize, Vec<u8>),
    /// It is not needed any more.
    Forget(SegmentId),
}

/// What the user should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remark {
    /// An endpoint can come back no longer, for this reason.
    GivenUp(Address, &'static str),
    /// A new start of one has sent something else than was sent before. That it is given up follows.
    Diverged(Divergence),
    /// One of which there was too much to be kept can come back again.
    BegunAnew(Address),
    /// So much was given to one since its last image that another would be good: see [`Relay::set_image_bytes`].
    Grown(Address),
    /// The disk holds as much as it may: what comes now stays in memory.
    DiskFull,
}

/// Buffers of full segments.
#[derive(Debug)]
pub(super) struct Spare {
    buffers: Vec<Vec<u8>>,
    segment_bytes: usize,
}

impl Spare {
    pub fn new(segment_bytes: usize) -> Self {
        Self { buffers: Vec::new(), segment_bytes }
    }

    pub fn segment_bytes(&self) -> usize {
        self.segment_bytes
    }

    /// An empty buffer for `size` bytes.
    pub fn take(&mut self, size: usize) -> Vec<u8> {
        let spare = if size == self.segment_bytes { self.buffers.pop() } else { None };
        spare.unwrap_or_else(|| Vec::with_capacity(size))
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
struct Trip {
    address: Address,
    number: usize,
    bytes: u64,
    is_written: bool,
}

/// See the module head.
#[derive(Debug)]
pub(super) struct Shelf {
    room: Room,
    pub spare: Spare,
    orders: VecDeque<Order>,
    remarks: VecDeque<Remark>,
    trips: BTreeMap<SegmentId, Trip>,
    /// Full segments in memory, in the order in which they became full.
    sealed: VecDeque<(Address, usize)>,
    ids: u64,
    /// Of segments that are being written: how many there are, and their bytes.
    writes: usize,
    moving_bytes: u64,
    /// Bytes on the disk or on the way there,
    pub disk_bytes: u64,
    /// and of what is kept those that are not in memory.
    pub away_bytes: u64,
    is_told_full: bool,
    /// A segment of full size has been filled, so there will be others.
    has_filled: bool,
    /// See [`Relay::set_image_bytes`].
    image_bytes: u64,
    /// Inputs that wait for the disk.
    line: Vec<LinkId>,
}

impl Shelf {
    pub fn new(room: Room) -> Self {
        Self {
            room,
            spare: Spare::new(room.segment),
            orders: VecDeque::new(),
            remarks: VecDeque::new(),
            trips: BTreeMap::new(),
            sealed: VecDeque::new(),
            ids: 0,
            writes: 0,
            moving_bytes: 0,
            disk_bytes: 0,
            away_bytes: 0,
            is_told_full: false,
            has_filled: false,
            image_bytes: u64::MAX,
            line: Vec::new(),
        }
    }

    #[cfg(test)]
    pub fn set_memory(&mut self, memory: u64) {
        self.room.memory = memory;
    }

    /// Whether what is kept, `held` bytes of so many endpoints, is more than there is memory for.
    #[inline]
    pub fn is_over(&self, held: u64, endpoints: usize) -> bool {
        held - self.away_bytes > self.memory(endpoints)
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

    pub fn note_given_up(&mut self, address: Address, why: &'static str) {
        self.remarks.push_back(Remark::GivenUp(address, why));
        // Its segments are numbered from the start should it be recorded again.
        self.sealed.retain(|(whose, _)| *whose != address);
    }

    pub fn note_diverged(&mut self, apart: Divergence) {
        self.remarks.push_back(Remark::Diverged(apart));
    }

    /// To an endpoint so much has been given since its last image. Whether that is more than it should be, which is said.
    pub fn note_growth(&mut self, address: Address, bytes: u64) -> bool {
        let is_grown = bytes >= self.image_bytes;
        if is_grown {
            self.remarks.push_back(Remark::Grown(address));
        }
        is_grown
    }

    pub fn note_begun_anew(&mut self, address: Address) {
        self.remarks.push_back(Remark::BegunAnew(address));
    }

    /// Segments have been dropped.
    pub fn take_back(&mut self, freed: &Freed) {
        self.away_bytes -= freed.away_bytes;
        self.disk_bytes -= freed.disk_bytes;
        self.orders.extend(freed.forgotten.iter().map(|id| Order::Forget(*id)));
        self.is_told_full &= freed.forgotten.is_empty();
    }

    /// Whether one more segment is to be written now, as `held` bytes are kept of so many endpoints.
    fn may_write(&mut self, held: u64, endpoints: usize) -> bool {
        let Some(disk) = self.room.disk else { return false };
        // Of what is being written some may not be kept any more.
        let staying = (held - self.away_bytes).saturating_sub(self.moving_bytes);
        let is_due = staying > self.memory(endpoints) / 4 * 3 && self.writes < WRITES_MAX;
        let has_room = self.disk_bytes + self.room.segment as u64 <= disk;
        if is_due && !has_room && !self.is_told_full && !self.sealed.is_empty() {
            self.is_told_full = true;
            self.remarks.push_back(Remark::DiskFull);
        }
        is_due && has_room
    }

    fn begin(&mut self, id: SegmentId, trip: Trip) {
        if trip.is_written {
            self.writes += 1;
            self.moving_bytes += trip.bytes;
            self.disk_bytes += trip.bytes;
        }
        self.trips.insert(id, trip);
    }

    /// Asks for a segment of `address` that is on the disk.
    pub fn fetch(&mut self, address: Address, number: usize, id: SegmentId, length: usize) {
        let trip = Trip { address, number, bytes: length as u64, is_written: false };
        self.begin(id, trip);
        let buffer = self.spare.take(self.room.segment);
        self.orders.push_back(Order::Read(id, length, buffer));
    }
}

impl Histories {
    /// Writes what there is no memory for.
    pub fn move_out(&mut self) {
        while self.shelf.may_write(self.bytes, self.all.len()) {
            let Some((address, number)) = self.shelf.sealed.pop_front() else { break };
            let id = SegmentId(self.shelf.ids);
            let history = self.all.get_mut(&address);
            let Some(bytes) = history.and_then(|it| it.given.share(number, id)) else { continue };
            self.shelf.ids += 1;
            let trip = Trip { address, number, bytes: bytes.len() as u64, is_written: true };
            self.shelf.begin(id, trip);
            self.shelf.orders.push_back(Order::Write(id, bytes));
        }
    }

    /// Whether `bytes` more are too much as long as the disk is busy.
    fn must_wait(&self, bytes: usize) -> bool {
        self.shelf.is_writing() && self.shelf.is_over(self.bytes + bytes as u64, self.all.len())
    }

    fn handle_written(&mut self, id: SegmentId, is_written: bool) {
        let Some(trip) = self.shelf.trips.remove(&id) else { return };
        let shelf = &mut self.shelf;
        shelf.writes -= 1;
        shelf.moving_bytes -= trip.bytes;
        if !is_written {
            // What is on it already can still be read.
            shelf.room.disk = None;
            shelf.sealed.clear();
        }
        if let Some(history) = self.all.get_mut(&trip.address) {
            let is_read = history.is_reading(trip.number);
            let spare = &mut shelf.spare;
            let is_there = history.given.holds(trip.number, id);
            let away = history.given.settle(trip.number, id, is_written, is_read, spare);
            shelf.away_bytes += away.unwrap_or(0) as u64;
            if is_there && !is_written {
                shelf.disk_bytes -= trip.bytes;
            }
        }
        self.move_out();
    }

    /// Whose segment has been read, and whether it is as it was written.
    fn handle_read(&mut self, id: SegmentId, bytes: Option<Vec<u8>>) -> Option<(Address, bool)> {
        let trip = self.shelf.trips.remove(&id)?;
        let history = self.all.get_mut(&trip.address)?;
        if !history.given.holds(trip.number, id) {
            return None;
        }
        let is_wanted = history.is_reading(trip.number);
        // Nothing is as long as this.
        let bytes = bytes.unwrap_or_default();
        let spare = &mut self.shelf.spare;
        let is_good = history.given.arrive(trip.number, id, bytes, is_wanted, spare);
        Some((trip.address, is_good))
    }
}

impl Relay {
    /// How much may be given to an endpoint before its next image is due, whatever the time. It is looked at with each full
    /// segment.
    pub fn set_image_bytes(&mut self, bytes: u64) {
        if let Some(histories) = &mut self.histories {
            histories.shelf.image_bytes = bytes;
        }
    }

    /// What is to be done with the disk next.
    pub fn poll_order(&mut self) -> Option<Order> {
        self.histories.as_mut()?.shelf.orders.pop_front()
    }

    /// How many segments without content would be of use soon ([`Relay::stock`]), as far as there is memory for them.
    #[inline]
    pub fn wanted_segments(&self) -> usize {
        let Some(histories) = self.histories.as_ref().filter(|it| it.shelf.has_filled) else {
            return 0;
        };
        let Shelf { spare, room, .. } = &histories.shelf;
        let next = histories.bytes + ((spare.buffers.len() + 1) * room.segment) as u64;
        match histories.shelf.is_over(next, histories.all.len()) {
            true => 0,
            false => STOCK.saturating_sub(spare.buffers.len()),
        }
    }

    /// A segment without content that is not needed soon, for whoever stocks some. Its memory has been touched.
    pub fn poll_surplus(&mut self) -> Option<Vec<u8>> {
        let spare = &mut self.histories.as_mut()?.shelf.spare;
        if spare.buffers.len() > SPARE_MAX { spare.buffers.pop() } else { None }
    }

    /// Bytes of the memory for what is kept that nothing takes now.
    pub fn unused_bytes(&self) -> u64 {
        let Some(Histories { shelf, bytes, .. }) = &self.histories else { return 0 };
        let spare = (shelf.spare.buffers.len() * shelf.room.segment) as u64;
        shelf.room.memory.saturating_sub(bytes - shelf.away_bytes + spare)
    }

    /// Here is a segment without content, whose memory has been touched.
    pub fn stock(&mut self, segment: Vec<u8>) {
        if let Some(histories) = &mut self.histories {
            histories.shelf.spare.give_back(segment);
        }
    }

    /// Something that the user should know.
    pub fn poll_remark(&mut self) -> Option<Remark> {
        self.histories.as_mut()?.shelf.remarks.pop_front()
    }

    /// An endpoint whose connection is to be closed, and why: it cannot be told what was.
    pub fn poll_stranded(&mut self) -> Option<(LinkId, &'static str)> {
        self.stranded.pop_front()
    }

    /// Bytes kept for endpoints that may come back: in memory, and on the disk.
    pub fn kept_bytes(&self) -> (u64, u64) {
        let Some(histories) = &self.histories else { return (0, 0) };
        (histories.bytes - histories.shelf.away_bytes, histories.shelf.disk_bytes)
    }

    /// Whether inputs wait for the disk.
    pub fn waits_for_disk(&self) -> bool {
        self.histories.as_ref().is_some_and(|histories| !histories.shelf.line.is_empty())
    }

    /// What has become of [`Order::Write`]. One that has failed is the last one.
    pub fn handle_written(&mut self, id: SegmentId, is_written: bool) {
        let Some(histories) = &mut self.histories else { return };
        histories.handle_written(id, is_written);
        if !histories.must_wait(0) {
            self.released.extend(histories.shelf.line.drain(..));
        }
    }

    /// What has become of [`Order::Read`]. `None`: it could not be read, or is not what was written.
    pub fn handle_read(&mut self, id: SegmentId, bytes: Option<Vec<u8>>) {
        let Some(histories) = &mut self.histories else { return };
        self.counters.read_back_bytes += bytes.as_ref().map_or(0, Vec::len) as u64;
        let Some((address, is_good)) = histories.handle_read(id, bytes) else { return };
        let Route::Link(link) = self.table.route(address) else { return };
        match is_good {
            true => self.note_telling(link),
            false => self.strand(link, address),
        }
    }

    /// What is kept of it is of no use. A start that has not come to where the one before was can go no further. One that is
    /// only behind goes on: what it should have been told is lost on the way, as over any network, and who has sent it has it yet.
    pub(super) fn strand(&mut self, link: LinkId, address: Address) {
        let Some(histories) = &mut self.histories else { return };
        let is_only_behind = histories.is_only_behind(address);
        histories.give_up(address, UNREADABLE);
        let port = self.port_mut(link);
        let was_told = port.is_told;
        port.note_told(Told::All);
        if !was_told || !port.is_up() {
            return;
        }
        if !is_only_behind {
            self.stranded.push_back((link, UNREADABLE));
            return;
        }
        // Whose it was cannot be read either. Who has sent it nothing has nothing to ask after.
        let sources = self.table.processes().map(|index| Address::new(index, 0));
        let channels = sources.filter(|source| *source != address).map(|source| (source, address));
        let lost: BTreeSet<_> = channels.take(OWED_MAX).collect();
        self.port_mut(link).lost.extend(lost);
        self.tell_losses(link);
    }

    /// Whether a frame for `to` has to wait until the disk has taken something. Its input then waits.
    #[inline]
    pub(super) fn is_held_up(&mut self, from: LinkId, to: LinkId, bytes: usize) -> bool {
        let Some(histories) = &mut self.histories else { return false };
        if !histories.must_wait(bytes) {
            return false;
        }
        let (Some(input), Some(output)) =
            (&self.ports[from.0 as usize], &self.ports[to.0 as usize])
        else {
            return false;
        };
        let Party::Endpoint(address) = output.party else { return false };
        if input.is_heard_out || histories.refusal(address).is_some() {
            return false;
        }
        histories.shelf.line.push(from);
        self.counters.disk_waits += 1;
        true
    }

    /// `link` waits for the disk no longer.
    pub(super) fn leave_disk(&mut self, link: LinkId) {
        if let Some(histories) = &mut self.histories {
            histories.shelf.line.retain(|waiter| *waiter != link);
        }
    }
}
