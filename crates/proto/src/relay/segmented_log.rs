//! Log of the frames for one endpoint, in order, in *segments*: in memory, being written to the
//! disk, on the disk, or read back.
//!
//! A frame lies whole in one segment. Segments never move in memory, and at most one segment is
//! allocated ahead; segments grow with the log, so that the log of a few frames takes little
//! memory. A segment of full size that takes no more frames may go to the disk:
//!
//! ```text
//! InMemory ─begin_write→ Writing ─finish_write→ OnDisk ─begin_read→ Reading ─finish_read→ Cached
//!    ↑                      │                     ↑                                         │
//!    └─ finish_write(failed)┘                     └────────────────── evict ────────────────┘
//! ```
//!
//! What enters: frames, and the results of disk requests. What leaves: frames in order, as far as
//! they are in memory. What may never happen: a reader misses a frame, or receives a frame that has
//! changed.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::replace;
use core::ops::Range;

use super::segment_buffers::{BufferPool, SegmentId};
use crate::wire::frame::{HEADER_BYTES, Header};

/// Size of the first segment in bytes; each further segment is as large as all segments before it
/// together, up to the full size.
const SEGMENT_BYTES_MIN: usize = 4 << 10;

/// Log of the frames for one endpoint: see the module head.
#[derive(Debug, Default)]
pub(super) struct SegmentedLog {
    segments: VecDeque<Segment>,
    /// Number of the first kept segment: so many segments have been dropped.
    first: usize,
    bytes: u64,
    /// Bytes of all dropped segments.
    dropped: u64,
    /// Number of frames in each kept segment.
    frames: VecDeque<u32>,
    /// Number of frames in all dropped segments.
    dropped_frames: u64,
}

/// An entry of an excerpt of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShownFrame {
    /// Number and header of a frame in memory.
    Frame(u64, Header),
    /// Numbers of adjacent frames that are on the disk.
    OnDisk(Range<u64>),
}

#[derive(Debug)]
enum Segment {
    /// In memory; the last segment takes further frames.
    InMemory(Vec<u8>),
    /// In memory, and being written to the disk.
    Writing(SegmentId, Arc<Vec<u8>>),
    /// On the disk, with its length in bytes.
    OnDisk(SegmentId, usize),
    /// On the disk, with its length in bytes, and being read into memory.
    Reading(SegmentId, usize),
    /// On the disk, and in memory for a replay that reads the segment.
    Cached(SegmentId, Vec<u8>),
}

/// Position of a reader in the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SegmentPosition {
    pub segment: usize,
    at: usize,
}

impl SegmentPosition {
    /// Advances the position past a frame of `bytes` bytes.
    pub fn advance(&mut self, bytes: usize) {
        self.at += bytes;
    }
}

/// Result of looking up the frame at a position.
#[derive(Debug)]
pub(super) enum FrameLookup<'a> {
    Frame(Header, &'a [u8]),
    /// The segment of the frame is on the disk and not in memory.
    OnDisk,
    End,
    /// The bytes at this position are no frame.
    Corrupt,
}

/// Bytes and segments that were freed by dropping segments.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FreedSegments {
    pub bytes: u64,
    /// Freed bytes that were on the disk and counted as evicted from memory.
    pub evicted_bytes: u64,
    /// Freed bytes that were on the disk or being written there.
    pub disk_bytes: u64,
    pub deleted: Vec<SegmentId>,
}

impl Segment {
    fn in_memory(&self) -> Option<&[u8]> {
        match self {
            Self::InMemory(bytes) | Self::Cached(_, bytes) => Some(bytes),
            Self::Writing(_, bytes) => Some(bytes),
            Self::OnDisk(..) | Self::Reading(..) => None,
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::OnDisk(_, length) | Self::Reading(_, length) => *length,
            _ => self.in_memory().map_or(0, <[u8]>::len),
        }
    }

    fn id(&self) -> Option<SegmentId> {
        match self {
            Self::InMemory(_) => None,
            Self::Writing(id, _)
            | Self::OnDisk(id, _)
            | Self::Reading(id, _)
            | Self::Cached(id, _) => Some(*id),
        }
    }
}

impl SegmentedLog {
    /// An empty log, before which `dropped` bytes were dropped.
    pub fn starting_at(dropped: u64) -> Self {
        Self { dropped, ..Self::default() }
    }

    /// Bytes of the kept frames, in memory and on the disk.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Bytes of all frames ever appended, dropped ones included.
    pub fn total(&self) -> u64 {
        self.dropped + self.bytes
    }

    /// Appends a frame. Returns the number of the segment that takes no more frames because of this
    /// frame, if that segment has the full size.
    pub fn push(&mut self, frame: &[u8], buffer_pool: &mut BufferPool) -> Option<usize> {
        self.bytes += frame.len() as u64;
        if let Some(Segment::InMemory(bytes)) = self.segments.back_mut()
            && bytes.capacity() - bytes.len() >= frame.len()
        {
            bytes.extend_from_slice(frame);
            // Each segment has an entry in `frames`.
            *self.frames.back_mut().expect("a count") += 1;
            return None;
        }
        let full = buffer_pool.segment_bytes();
        let size = (self.bytes as usize).clamp(SEGMENT_BYTES_MIN.min(full), full).max(frame.len());
        let is_movable = match self.segments.back() {
            Some(Segment::InMemory(bytes)) => bytes.capacity() >= full,
            _ => false,
        };
        let mut bytes = buffer_pool.take(size);
        bytes.extend_from_slice(frame);
        self.segments.push_back(Segment::InMemory(bytes));
        self.frames.push_back(1);
        is_movable.then(|| self.first + self.segments.len() - 2)
    }

    /// Looks up the frame at `place`, after moving `place` to the segment that holds this frame.
    pub fn find(&self, place: &mut SegmentPosition) -> FrameLookup<'_> {
        loop {
            let Some(segment) = self.get(place.segment) else { return FrameLookup::End };
            if place.at < segment.len() {
                break;
            }
            if place.segment + 1 == self.first + self.segments.len() {
                return FrameLookup::End;
            }
            *place = SegmentPosition { segment: place.segment + 1, at: 0 };
        }
        let Some(bytes) = self.get(place.segment).and_then(Segment::in_memory) else {
            return FrameLookup::OnDisk;
        };
        let rest = &bytes[place.at..];
        let Ok(header) = Header::parse(rest) else { return FrameLookup::Corrupt };
        match rest.get(..HEADER_BYTES + header.length as usize) {
            Some(frame) => FrameLookup::Frame(header, frame),
            None => FrameLookup::Corrupt,
        }
    }

    fn get(&self, number: usize) -> Option<&Segment> {
        self.segments.get(number.checked_sub(self.first)?)
    }

    fn get_mut(&mut self, number: usize) -> Option<&mut Segment> {
        self.segments.get_mut(number.checked_sub(self.first)?)
    }

    /// Starts writing a segment to the disk. Returns its bytes, or `None` if the segment is not in
    /// memory or being written already.
    pub fn begin_write(&mut self, number: usize, id: SegmentId) -> Option<Arc<Vec<u8>>> {
        let segment = self.get_mut(number)?;
        let Segment::InMemory(bytes) = segment else { return None };
        let bytes = Arc::new(core::mem::take(bytes));
        *segment = Segment::Writing(id, bytes.clone());
        Some(bytes)
    }

    /// Ends the write of a segment, which has succeeded or failed. `is_read`: a replay needs the
    /// segment soon. Returns the length of the segment if the segment is still kept and its write
    /// has succeeded.
    pub fn finish_write(
        &mut self,
        number: usize,
        id: SegmentId,
        is_written: bool,
        is_read: bool,
        buffer_pool: &mut BufferPool,
    ) -> Option<usize> {
        let segment = self.get_mut(number).filter(|segment| segment.id() == Some(id))?;
        let length = segment.len();
        let Segment::Writing(_, bytes) = replace(segment, Segment::OnDisk(id, length)) else {
            debug_assert!(false, "it was not on its way");
            return None;
        };
        // The disk thread has dropped its reference; a copy is correct if it has not.
        let bytes = Arc::try_unwrap(bytes).unwrap_or_else(|bytes| (*bytes).clone());
        match (is_written, is_read) {
            (false, _) => {
                *segment = Segment::InMemory(bytes);
                return None;
            }
            (true, true) => *segment = Segment::Cached(id, bytes),
            (true, false) => buffer_pool.give_back(bytes),
        }
        Some(length)
    }

    /// Whether the log still keeps segment `number` under the name `id`.
    pub fn holds(&self, number: usize, id: SegmentId) -> bool {
        self.get(number).is_some_and(|segment| segment.id() == Some(id))
    }

    /// Starts reading a segment from the disk. Returns its name and length, or `None` if no read is
    /// necessary.
    pub fn begin_read(&mut self, number: usize) -> Option<(SegmentId, usize)> {
        let segment = self.get_mut(number)?;
        let Segment::OnDisk(id, length) = *segment else { return None };
        *segment = Segment::Reading(id, length);
        Some((id, length))
    }

    /// Ends the read of a segment. Returns false if its length differs from the written length.
    /// `is_wanted`: a replay still needs the segment.
    pub fn finish_read(
        &mut self,
        number: usize,
        id: SegmentId,
        bytes: Vec<u8>,
        is_wanted: bool,
        buffer_pool: &mut BufferPool,
    ) -> bool {
        let segment = self.get_mut(number).filter(|segment| segment.id() == Some(id));
        let Some(segment) = segment else { return true };
        let is_same = bytes.len() == segment.len();
        *segment = match is_wanted && is_same {
            true => Segment::Cached(id, bytes),
            false => {
                buffer_pool.give_back(bytes);
                Segment::OnDisk(id, segment.len())
            }
        };
        is_same
    }

    /// Drops the memory of these segments if they are also on the disk.
    pub fn evict(&mut self, numbers: Range<usize>, buffer_pool: &mut BufferPool) {
        for number in numbers {
            let Some(segment) = self.get_mut(number) else { continue };
            if let Segment::Cached(id, bytes) = segment {
                let (id, bytes) = (*id, core::mem::take(bytes));
                *segment = Segment::OnDisk(id, bytes.len());
                buffer_pool.give_back(bytes);
            }
        }
    }

    /// Position after the first `bytes` bytes ever appended, if the frames that follow are still
    /// kept.
    pub fn at(&self, bytes: u64) -> Option<SegmentPosition> {
        let mut left = bytes.checked_sub(self.dropped)?;
        for (index, segment) in self.segments.iter().enumerate() {
            let length = segment.len() as u64;
            // The last segment takes further frames.
            if left < length || (left == length && index + 1 == self.segments.len()) {
                return Some(SegmentPosition { segment: self.first + index, at: left as usize });
            }
            left -= length;
        }
        (left == 0).then_some(SegmentPosition { segment: self.first, at: 0 })
    }

    /// Number of frames ever appended, dropped ones included.
    pub fn frame_count(&self) -> u64 {
        self.dropped_frames + self.frames.iter().map(|count| *count as u64).sum::<u64>()
    }

    /// Bytes of kept segments that are on the disk, whether or not a replay caches them in memory.
    pub fn evicted_bytes(&self) -> u64 {
        let is_away = |segment: &&Segment| {
            matches!(segment, Segment::OnDisk(..) | Segment::Reading(..) | Segment::Cached(..))
        };
        self.segments.iter().filter(is_away).map(|segment| segment.len() as u64).sum()
    }

    /// The frames with these numbers, as far as they are still kept.
    pub fn show_frames(&self, wanted: Range<u64>) -> Vec<ShownFrame> {
        let mut shown = Vec::new();
        let mut first = self.dropped_frames;
        for (segment, count) in self.segments.iter().zip(&self.frames) {
            let end = first + *count as u64;
            let range = wanted.start.max(first)..wanted.end.min(end);
            match segment.in_memory() {
                _ if range.is_empty() => (),
                None => shown.push(ShownFrame::OnDisk(range)),
                Some(bytes) => {
                    let mut rest = bytes;
                    for number in first..range.end {
                        let Ok(header) = Header::parse(rest) else { break };
                        rest = rest.get(HEADER_BYTES + header.length as usize..).unwrap_or(&[]);
                        if number >= range.start {
                            shown.push(ShownFrame::Frame(number, header));
                        }
                    }
                }
            }
            first = end;
        }
        shown
    }

    /// All frames in memory, in order.
    pub fn in_memory(&self) -> impl Iterator<Item = (Header, &[u8])> {
        self.segments.iter().filter_map(Segment::in_memory).flat_map(|mut rest| {
            core::iter::from_fn(move || {
                let header = Header::parse(rest).ok()?;
                let (frame, after) =
                    rest.split_at_checked(HEADER_BYTES + header.length as usize)?;
                rest = after;
                Some((header, frame))
            })
        })
    }

    /// Position of the last frames, of `bytes` bytes together.
    pub fn last(&self, bytes: usize) -> SegmentPosition {
        let mut left = bytes;
        for (index, segment) in self.segments.iter().enumerate().rev() {
            if let Some(at) = segment.len().checked_sub(left) {
                return SegmentPosition { segment: self.first + index, at };
            }
            left -= segment.len();
        }
        SegmentPosition { segment: self.first, at: 0 }
    }

    /// Position of the next segment to be appended.
    pub fn end(&self) -> SegmentPosition {
        SegmentPosition { segment: self.first + self.segments.len(), at: 0 }
    }

    /// Drops all segments that lie wholly before `place`.
    pub fn trim(&mut self, place: SegmentPosition, buffer_pool: &mut BufferPool) -> FreedSegments {
        let mut freed = FreedSegments::default();
        while self.first < place.segment {
            let Some(segment) = self.segments.pop_front() else { break };
            self.first += 1;
            self.dropped_frames += self.frames.pop_front().unwrap_or(0) as u64;
            let length = segment.len() as u64;
            freed.bytes += length;
            if let Some(id) = segment.id() {
                freed.deleted.push(id);
                freed.disk_bytes += length;
                freed.evicted_bytes += if let Segment::Writing(..) = segment { 0 } else { length };
            }
            if let Segment::InMemory(bytes) | Segment::Cached(_, bytes) = segment {
                buffer_pool.give_back(bytes);
            }
        }
        self.bytes -= freed.bytes;
        self.dropped += freed.bytes;
        freed
    }
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;
    use crate::id::Address;
    use crate::wire::frame::Kind;

    const FULL: usize = 64 << 10;

    /// A frame with number `n`, whose length depends on `n`.
    fn frame(n: usize) -> Vec<u8> {
        let length = n * 977 % 9_000;
        let (source, target) = (Address::new(1, 0), Address::new(0, 0));
        let header = super::super::empty_frame::empty(Kind::Message, source, target);
        let header = Header { length: length as u32, sequence: n as u64, ..header };
        let mut bytes = vec![n as u8; HEADER_BYTES + length];
        header.emit(&mut bytes);
        bytes
    }

    fn filled(count: usize, buffer_pool: &mut BufferPool) -> (SegmentedLog, Vec<usize>) {
        let mut log = SegmentedLog::default();
        let sealed = (0..count).filter_map(|n| log.push(&frame(n), buffer_pool)).collect();
        (log, sealed)
    }

    /// Reads from `place` as far as the log is in memory; returns the number of the next frame.
    fn read(log: &SegmentedLog, place: &mut SegmentPosition, mut next: usize) -> (usize, bool) {
        loop {
            match log.find(place) {
                FrameLookup::Frame(_, bytes) => {
                    assert_eq!(bytes, frame(next), "{next}");
                    place.advance(bytes.len());
                    next += 1;
                }
                FrameLookup::OnDisk => return (next, false),
                FrameLookup::End => return (next, true),
                FrameLookup::Corrupt => panic!("{next} is damaged"),
            }
        }
    }

    #[test]
    fn what_is_kept_is_read_again_in_order_and_grows_from_little() {
        let mut buffer_pool = BufferPool::new(FULL);
        let (mut log, sealed) = filled(400, &mut buffer_pool);
        let mut place = SegmentPosition::default();
        assert_eq!(read(&log, &mut place, 0), (400, true));
        log.push(&frame(400), &mut buffer_pool);
        assert_eq!(read(&log, &mut place, 400), (401, true));
        let bytes: usize = (0..401).map(|n| frame(n).len()).sum();
        assert_eq!(log.len(), bytes as u64);
        let is_full = |number: &usize| log.get(*number).unwrap().len() > FULL - 9_100;
        assert!(sealed.iter().all(is_full) && sealed.len() > 20, "{sealed:?}");
        assert!(sealed[0] > 2, "the first ones are small");
        let (little, _) = filled(1, &mut buffer_pool);
        let Segment::InMemory(first) = &little.segments[0] else { panic!("it is in memory") };
        assert_eq!(first.capacity(), SEGMENT_BYTES_MIN);
    }

    /// Each state of a segment, with the effect of each event: see the diagram in the module head.
    #[test]
    fn segments_go_to_the_disk_and_come_back() {
        let mut buffer_pool = BufferPool::new(FULL);
        let (mut log, sealed) = filled(400, &mut buffer_pool);
        let (one, id) = (sealed[3], SegmentId(7));
        let length = log.get(one).unwrap().len();
        // The segment is in memory.
        assert_eq!(log.begin_read(one), None);
        let bytes = log.begin_write(one, id).unwrap();
        // The segment is being written: it can be read, and is not written a second time.
        assert!(log.begin_write(one, SegmentId(8)).is_none() && log.begin_read(one).is_none());
        assert_eq!(read(&log, &mut SegmentPosition::default(), 0), (400, true));
        let disk = (*bytes).clone();
        drop(bytes);
        assert_eq!(
            log.finish_write(one, SegmentId(9), true, false, &mut buffer_pool),
            None,
            "another one"
        );
        assert_eq!(log.finish_write(one, id, true, false, &mut buffer_pool), Some(length));
        // The segment is on the disk.
        let mut place = SegmentPosition::default();
        let (next, is_end) = read(&log, &mut place, 0);
        assert!(!is_end && place.segment == one);
        assert_eq!(log.begin_read(one), Some((id, length)));
        assert_eq!(log.begin_read(one), None, "it is on its way already");
        assert_eq!(read(&log, &mut place, next), (next, false));
        // The read ends when no replay needs the segment any more.
        assert!(log.finish_read(one, id, disk.clone(), false, &mut buffer_pool));
        assert_eq!(read(&log, &mut place, next), (next, false));
        // The read returns too few bytes.
        log.begin_read(one);
        assert!(!log.finish_read(one, id, disk[1..].to_vec(), true, &mut buffer_pool));
        assert_eq!(read(&log, &mut place, next), (next, false));
        // The read returns the written bytes.
        log.begin_read(one);
        assert!(log.finish_read(one, id, disk.clone(), true, &mut buffer_pool));
        assert_eq!(read(&log, &mut place, next), (400, true));
        log.evict(0..one + 1, &mut buffer_pool);
        assert_eq!(log.begin_read(one), Some((id, length)));
        // The write of a segment fails.
        let other = sealed[4];
        drop(log.begin_write(other, SegmentId(8)));
        assert_eq!(log.finish_write(other, SegmentId(8), false, false, &mut buffer_pool), None);
        assert!(log.finish_read(one, id, disk, true, &mut buffer_pool));
        assert_eq!(read(&log, &mut SegmentPosition::default(), 0), (400, true));
        // The write of a segment ends while a replay reads this segment.
        drop(log.begin_write(other, SegmentId(10)));
        assert!(log.finish_write(other, SegmentId(10), true, true, &mut buffer_pool).is_some());
        assert_eq!(read(&log, &mut SegmentPosition::default(), 0), (400, true));
    }

    #[test]
    fn what_lies_before_a_place_is_dropped_wherever_it_is() {
        let mut buffer_pool = BufferPool::new(FULL);
        let (mut log, sealed) = filled(400, &mut buffer_pool);
        let all = log.len();
        let length = |log: &SegmentedLog, number| log.get(number).unwrap().len() as u64;
        let (written, moving) = (sealed[0], sealed[1]);
        let lengths = [written, moving].map(|number| length(&log, number));
        drop(log.begin_write(written, SegmentId(1)));
        log.finish_write(written, SegmentId(1), true, false, &mut buffer_pool);
        let held = log.begin_write(moving, SegmentId(2));
        let mut place = SegmentPosition { segment: sealed[5], at: 0 };
        let FrameLookup::Frame(header, _) = log.find(&mut place) else { panic!("it is there") };
        let before: usize = (0..header.sequence as usize).map(|n| frame(n).len()).sum();
        let freed = log.trim(place, &mut buffer_pool);
        let expected = FreedSegments {
            bytes: before as u64,
            evicted_bytes: lengths[0],
            disk_bytes: lengths[0] + lengths[1],
            deleted: vec![SegmentId(1), SegmentId(2)],
        };
        assert_eq!((freed, log.len()), (expected, all - before as u64));
        // Results of requests for dropped segments have no effect.
        drop(held);
        assert_eq!(log.finish_write(moving, SegmentId(2), true, false, &mut buffer_pool), None);
        assert!(log.finish_read(written, SegmentId(1), vec![1], true, &mut buffer_pool));
        assert_eq!(read(&log, &mut place, header.sequence as usize), (400, true));
        log.push(&frame(400), &mut buffer_pool);
        assert_eq!(read(&log, &mut place, 400), (401, true));
        let mut place = log.end();
        log.trim(place, &mut buffer_pool);
        assert_eq!(log.len(), 0);
        log.push(&frame(401), &mut buffer_pool);
        assert_eq!(read(&log, &mut place, 401), (402, true));
    }

    #[test]
    fn what_is_no_frame_is_reported_and_never_given() {
        let mut buffer_pool = BufferPool::new(FULL);
        let (mut log, _) = filled(3, &mut buffer_pool);
        let Segment::InMemory(bytes) = &mut log.segments[0] else { panic!("it is in memory") };
        bytes[frame(0).len() + 2] ^= 0xff;
        let mut place = SegmentPosition::default();
        let FrameLookup::Frame(_, first) = log.find(&mut place) else {
            panic!("the first is whole")
        };
        place.advance(first.len());
        assert!(matches!(log.find(&mut place), FrameLookup::Corrupt));
    }
}
