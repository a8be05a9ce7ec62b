//! Frames that were given to an endpoint, in order, in *segments*: in memory, on their way to the disk, on it, or read back.
//!
//! A frame lies whole in one segment. Segments never move in memory, and nothing is allocated beyond the next one; they grow
//! with the archive, so that one of a few frames takes little. One of full size that takes no more frames may go to the disk:
//!
//! ```text
//! Here ──share──> Moving ──settle(written)──> Away ──call──> Coming ──arrive──> Back ──leave──> Away
//!   ^                │
//!   └──settle(not)───┘
//! ```
//!
//! What enters: frames, and what has become of segments. What leaves: frames in order, as far as they are in memory. What may
//! never happen: a frame is left out, or somebody is given one that has changed.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::replace;
use core::ops::Range;

use super::shelf::{SegmentId, Spare};
use crate::wire::frame::{HEADER_BYTES, Header};

/// The first segment; each further one is as large as all before, up to full size.
const SEGMENT_BYTES_MIN: usize = 4 << 10;

/// See the module head.
#[derive(Debug, Default)]
pub(super) struct Archive {
    segments: VecDeque<Segment>,
    /// The number of the first of them: so many have been dropped.
    first: usize,
    bytes: u64,
    /// And so many bytes.
    dropped: u64,
    /// How many frames lie in each segment,
    frames: VecDeque<u32>,
    /// and in those that have been dropped.
    dropped_frames: u64,
}

/// What can be shown of frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shown {
    /// This one.
    Frame(u64, Header),
    /// These lie on the disk.
    Away(Range<u64>),
}

#[derive(Debug)]
enum Segment {
    /// In memory; the last one takes further frames.
    Here(Vec<u8>),
    /// In memory, and being written.
    Moving(SegmentId, Arc<Vec<u8>>),
    /// On the disk, with its length.
    Away(SegmentId, usize),
    /// The same, and somebody has asked for it.
    Coming(SegmentId, usize),
    /// On the disk, and in memory for whoever reads it.
    Back(SegmentId, Vec<u8>),
}

/// How far somebody has read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub segment: usize,
    at: usize,
}

impl Place {
    /// A frame of so many bytes has been read.
    pub fn advance(&mut self, bytes: usize) {
        self.at += bytes;
    }
}

/// What is at a place.
#[derive(Debug)]
pub(super) enum Found<'a> {
    Frame(Header, &'a [u8]),
    /// It is on the disk.
    Elsewhere,
    End,
    /// No frame.
    Damaged,
}

/// What dropping segments has freed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Freed {
    pub bytes: u64,
    /// Of these, on the disk alone.
    pub away_bytes: u64,
    /// Of these, on the disk or on the way there.
    pub disk_bytes: u64,
    pub forgotten: Vec<SegmentId>,
}

impl Segment {
    fn in_memory(&self) -> Option<&[u8]> {
        match self {
            Self::Here(bytes) | Self::Back(_, bytes) => Some(bytes),
            Self::Moving(_, bytes) => Some(bytes),
            Self::Away(..) | Self::Coming(..) => None,
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Away(_, length) | Self::Coming(_, length) => *length,
            _ => self.in_memory().map_or(0, <[u8]>::len),
        }
    }

    fn id(&self) -> Option<SegmentId> {
        match self {
            Self::Here(_) => None,
            Self::Moving(id, _) | Self::Away(id, _) | Self::Coming(id, _) | Self::Back(id, _) => {
                Some(*id)
            }
        }
    }
}

impl Archive {
    /// Of which so many bytes were dropped before any was kept.
    pub fn behind(dropped: u64) -> Self {
        Self { dropped, ..Self::default() }
    }

    /// Bytes kept, wherever.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// And those that have been dropped.
    pub fn total(&self) -> u64 {
        self.dropped + self.bytes
    }

    /// Adds a frame. If a segment of full size takes no more because of that, its number.
    pub fn push(&mut self, frame: &[u8], spare: &mut Spare) -> Option<usize> {
        self.bytes += frame.len() as u64;
        if let Some(Segment::Here(bytes)) = self.segments.back_mut()
            && bytes.capacity() - bytes.len() >= frame.len()
        {
            bytes.extend_from_slice(frame);
            // Each segment has its count.
            *self.frames.back_mut().expect("a count") += 1;
            return None;
        }
        let full = spare.segment_bytes();
        let size = (self.bytes as usize).clamp(SEGMENT_BYTES_MIN.min(full), full).max(frame.len());
        let is_movable =
            matches!(self.segments.back(), Some(Segment::Here(bytes)) if bytes.capacity() >= full);
        let mut bytes = spare.take(size);
        bytes.extend_from_slice(frame);
        self.segments.push_back(Segment::Here(bytes));
        self.frames.push_back(1);
        is_movable.then(|| self.first + self.segments.len() - 2)
    }

    /// What is at `place`, which goes to the segment where that is.
    pub fn find(&self, place: &mut Place) -> Found<'_> {
        loop {
            let Some(segment) = self.get(place.segment) else { return Found::End };
            if place.at < segment.len() {
                break;
            }
            if place.segment + 1 == self.first + self.segments.len() {
                return Found::End;
            }
            *place = Place { segment: place.segment + 1, at: 0 };
        }
        let Some(bytes) = self.get(place.segment).and_then(Segment::in_memory) else {
            return Found::Elsewhere;
        };
        let rest = &bytes[place.at..];
        let Ok(header) = Header::parse(rest) else { return Found::Damaged };
        match rest.get(..HEADER_BYTES + header.length as usize) {
            Some(frame) => Found::Frame(header, frame),
            None => Found::Damaged,
        }
    }

    fn get(&self, number: usize) -> Option<&Segment> {
        self.segments.get(number.checked_sub(self.first)?)
    }

    fn get_mut(&mut self, number: usize) -> Option<&mut Segment> {
        self.segments.get_mut(number.checked_sub(self.first)?)
    }

    /// A segment is to be written: its bytes, unless it is not there, or on its way already.
    pub fn share(&mut self, number: usize, id: SegmentId) -> Option<Arc<Vec<u8>>> {
        let segment = self.get_mut(number)?;
        let Segment::Here(bytes) = segment else { return None };
        let bytes = Arc::new(core::mem::take(bytes));
        *segment = Segment::Moving(id, bytes.clone());
        Some(bytes)
    }

    /// It has been written, or could not be. `is_read`: somebody needs it soon. Its length, if it is still there and has now
    /// left the memory.
    pub fn settle(
        &mut self,
        number: usize,
        id: SegmentId,
        is_written: bool,
        is_read: bool,
        spare: &mut Spare,
    ) -> Option<usize> {
        let segment = self.get_mut(number).filter(|segment| segment.id() == Some(id))?;
        let length = segment.len();
        let Segment::Moving(_, bytes) = replace(segment, Segment::Away(id, length)) else {
            debug_assert!(false, "it was not on its way");
            return None;
        };
        // Whoever has written it has let go of it; should that not be so, a copy is right as well.
        let bytes = Arc::try_unwrap(bytes).unwrap_or_else(|bytes| (*bytes).clone());
        match (is_written, is_read) {
            (false, _) => {
                *segment = Segment::Here(bytes);
                return None;
            }
            (true, true) => *segment = Segment::Back(id, bytes),
            (true, false) => spare.give_back(bytes),
        }
        Some(length)
    }

    /// Whether it is still there under this name.
    pub fn holds(&self, number: usize, id: SegmentId) -> bool {
        self.get(number).is_some_and(|segment| segment.id() == Some(id))
    }

    /// Somebody needs a segment: which, and its length, if it must be read for that.
    pub fn call(&mut self, number: usize) -> Option<(SegmentId, usize)> {
        let segment = self.get_mut(number)?;
        let Segment::Away(id, length) = *segment else { return None };
        *segment = Segment::Coming(id, length);
        Some((id, length))
    }

    /// It has been read. False: that is not what was written. `is_wanted`: somebody still needs it.
    pub fn arrive(
        &mut self,
        number: usize,
        id: SegmentId,
        bytes: Vec<u8>,
        is_wanted: bool,
        spare: &mut Spare,
    ) -> bool {
        let segment = self.get_mut(number).filter(|segment| segment.id() == Some(id));
        let Some(segment) = segment else { return true };
        let is_same = bytes.len() == segment.len();
        *segment = match is_wanted && is_same {
            true => Segment::Back(id, bytes),
            false => {
                spare.give_back(bytes);
                Segment::Away(id, segment.len())
            }
        };
        is_same
    }

    /// Nobody needs these segments any more.
    pub fn leave(&mut self, numbers: Range<usize>, spare: &mut Spare) {
        for number in numbers {
            let Some(segment) = self.get_mut(number) else { continue };
            if let Segment::Back(id, bytes) = segment {
                let (id, bytes) = (*id, core::mem::take(bytes));
                *segment = Segment::Away(id, bytes.len());
                spare.give_back(bytes);
            }
        }
    }

    /// Behind so many bytes of all that were ever added, if what follows is still there.
    pub fn at(&self, bytes: u64) -> Option<Place> {
        let mut left = bytes.checked_sub(self.dropped)?;
        for (index, segment) in self.segments.iter().enumerate() {
            let length = segment.len() as u64;
            // The last one takes further frames.
            if left < length || (left == length && index + 1 == self.segments.len()) {
                return Some(Place { segment: self.first + index, at: left as usize });
            }
            left -= length;
        }
        (left == 0).then_some(Place { segment: self.first, at: 0 })
    }

    /// How many frames have been kept, dropped ones included.
    pub fn frame_count(&self) -> u64 {
        self.dropped_frames + self.frames.iter().map(|count| *count as u64).sum::<u64>()
    }

    /// Bytes that are not in memory, but for whoever reads them.
    pub fn away_bytes(&self) -> u64 {
        let is_away = |segment: &&Segment| {
            matches!(segment, Segment::Away(..) | Segment::Coming(..) | Segment::Back(..))
        };
        self.segments.iter().filter(is_away).map(|segment| segment.len() as u64).sum()
    }

    /// Frames with these numbers, as far as they are still kept.
    pub fn show(&self, wanted: Range<u64>) -> Vec<Shown> {
        let mut shown = Vec::new();
        let mut first = self.dropped_frames;
        for (segment, count) in self.segments.iter().zip(&self.frames) {
            let end = first + *count as u64;
            let range = wanted.start.max(first)..wanted.end.min(end);
            match segment.in_memory() {
                _ if range.is_empty() => (),
                None => shown.push(Shown::Away(range)),
                Some(bytes) => {
                    let mut rest = bytes;
                    for number in first..range.end {
                        let Ok(header) = Header::parse(rest) else { break };
                        rest = rest.get(HEADER_BYTES + header.length as usize..).unwrap_or(&[]);
                        if number >= range.start {
                            shown.push(Shown::Frame(number, header));
                        }
                    }
                }
            }
            first = end;
        }
        shown
    }

    /// All frames that are in memory, in order.
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

    /// Where the last frames begin, which have so many bytes together.
    pub fn last(&self, bytes: usize) -> Place {
        let mut left = bytes;
        for (index, segment) in self.segments.iter().enumerate().rev() {
            if let Some(at) = segment.len().checked_sub(left) {
                return Place { segment: self.first + index, at };
            }
            left -= segment.len();
        }
        Place { segment: self.first, at: 0 }
    }

    /// Where the next frame will be.
    pub fn end(&self) -> Place {
        Place { segment: self.first + self.segments.len(), at: 0 }
    }

    /// Drops all segments that lie wholly before `place`: nobody reads them any more.
    pub fn trim(&mut self, place: Place, spare: &mut Spare) -> Freed {
        let mut freed = Freed::default();
        while self.first < place.segment {
            let Some(segment) = self.segments.pop_front() else { break };
            self.first += 1;
            self.dropped_frames += self.frames.pop_front().unwrap_or(0) as u64;
            let length = segment.len() as u64;
            freed.bytes += length;
            if let Some(id) = segment.id() {
                freed.forgotten.push(id);
                freed.disk_bytes += length;
                freed.away_bytes += if let Segment::Moving(..) = segment { 0 } else { length };
            }
            if let Segment::Here(bytes) | Segment::Back(_, bytes) = segment {
                spare.give_back(bytes);
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

    /// A frame with number `n`, of a length of its own.
    fn frame(n: usize) -> Vec<u8> {
        let length = n * 977 % 9_000;
        let (source, target) = (Address::new(1, 0), Address::new(0, 0));
        let header = super::super::notice::empty(Kind::Message, source, target);
        let header = Header { length: length as u32, sequence: n as u64, ..header };
        let mut bytes = vec![n as u8; HEADER_BYTES + length];
        header.emit(&mut bytes);
        bytes
    }

    fn filled(count: usize, spare: &mut Spare) -> (Archive, Vec<usize>) {
        let mut archive = Archive::default();
        let sealed = (0..count).filter_map(|n| archive.push(&frame(n), spare)).collect();
        (archive, sealed)
    }

    /// Reads from `place` as far as it is in memory; gives the number of the next frame.
    fn read(archive: &Archive, place: &mut Place, mut next: usize) -> (usize, bool) {
        loop {
            match archive.find(place) {
                Found::Frame(_, bytes) => {
                    assert_eq!(bytes, frame(next), "{next}");
                    place.advance(bytes.len());
                    next += 1;
                }
                Found::Elsewhere => return (next, false),
                Found::End => return (next, true),
                Found::Damaged => panic!("{next} is damaged"),
            }
        }
    }

    #[test]
    fn what_is_kept_is_read_again_in_order_and_grows_from_little() {
        let mut spare = Spare::new(FULL);
        let (mut archive, sealed) = filled(400, &mut spare);
        let mut place = Place::default();
        assert_eq!(read(&archive, &mut place, 0), (400, true));
        archive.push(&frame(400), &mut spare);
        assert_eq!(read(&archive, &mut place, 400), (401, true));
        let bytes: usize = (0..401).map(|n| frame(n).len()).sum();
        assert_eq!(archive.len(), bytes as u64);
        let is_full = |number: &usize| archive.get(*number).unwrap().len() > FULL - 9_100;
        assert!(sealed.iter().all(is_full) && sealed.len() > 20, "{sealed:?}");
        assert!(sealed[0] > 2, "the first ones are small");
        let (little, _) = filled(1, &mut spare);
        assert!(
            matches!(&little.segments[0], Segment::Here(it) if it.capacity() == SEGMENT_BYTES_MIN)
        );
    }

    /// Every state of a segment, with what it does at each event: see the picture in the module head.
    #[test]
    fn segments_go_to_the_disk_and_come_back() {
        let mut spare = Spare::new(FULL);
        let (mut archive, sealed) = filled(400, &mut spare);
        let (one, id) = (sealed[3], SegmentId(7));
        let length = archive.get(one).unwrap().len();
        // In memory.
        assert_eq!(archive.call(one), None);
        let bytes = archive.share(one, id).unwrap();
        // Being written: it is read all the same, and not written twice.
        assert!(archive.share(one, SegmentId(8)).is_none() && archive.call(one).is_none());
        assert_eq!(read(&archive, &mut Place::default(), 0), (400, true));
        let disk = (*bytes).clone();
        drop(bytes);
        assert_eq!(archive.settle(one, SegmentId(9), true, false, &mut spare), None, "another one");
        assert_eq!(archive.settle(one, id, true, false, &mut spare), Some(length));
        // On the disk.
        let mut place = Place::default();
        let (next, is_end) = read(&archive, &mut place, 0);
        assert!(!is_end && place.segment == one);
        assert_eq!(archive.call(one), Some((id, length)));
        assert_eq!(archive.call(one), None, "it is on its way already");
        assert_eq!(read(&archive, &mut place, next), (next, false));
        // It comes when nobody wants it any more,
        assert!(archive.arrive(one, id, disk.clone(), false, &mut spare));
        assert_eq!(read(&archive, &mut place, next), (next, false));
        // is torn,
        archive.call(one);
        assert!(!archive.arrive(one, id, disk[1..].to_vec(), true, &mut spare));
        assert_eq!(read(&archive, &mut place, next), (next, false));
        // and as it was.
        archive.call(one);
        assert!(archive.arrive(one, id, disk.clone(), true, &mut spare));
        assert_eq!(read(&archive, &mut place, next), (400, true));
        archive.leave(0..one + 1, &mut spare);
        assert_eq!(archive.call(one), Some((id, length)));
        // It could not be written.
        let other = sealed[4];
        drop(archive.share(other, SegmentId(8)));
        assert_eq!(archive.settle(other, SegmentId(8), false, false, &mut spare), None);
        assert!(archive.arrive(one, id, disk, true, &mut spare));
        assert_eq!(read(&archive, &mut Place::default(), 0), (400, true));
        // It is written while somebody reads there.
        drop(archive.share(other, SegmentId(10)));
        assert!(archive.settle(other, SegmentId(10), true, true, &mut spare).is_some());
        assert_eq!(read(&archive, &mut Place::default(), 0), (400, true));
    }

    #[test]
    fn what_lies_before_a_place_is_dropped_wherever_it_is() {
        let mut spare = Spare::new(FULL);
        let (mut archive, sealed) = filled(400, &mut spare);
        let all = archive.len();
        let length = |archive: &Archive, number| archive.get(number).unwrap().len() as u64;
        let (written, moving) = (sealed[0], sealed[1]);
        let lengths = [written, moving].map(|number| length(&archive, number));
        drop(archive.share(written, SegmentId(1)));
        archive.settle(written, SegmentId(1), true, false, &mut spare);
        let held = archive.share(moving, SegmentId(2));
        let mut place = Place { segment: sealed[5], at: 0 };
        let Found::Frame(header, _) = archive.find(&mut place) else { panic!("it is there") };
        let before: usize = (0..header.sequence as usize).map(|n| frame(n).len()).sum();
        let freed = archive.trim(place, &mut spare);
        let expected = Freed {
            bytes: before as u64,
            away_bytes: lengths[0],
            disk_bytes: lengths[0] + lengths[1],
            forgotten: vec![SegmentId(1), SegmentId(2)],
        };
        assert_eq!((freed, archive.len()), (expected, all - before as u64));
        // What comes of those now says nothing.
        drop(held);
        assert_eq!(archive.settle(moving, SegmentId(2), true, false, &mut spare), None);
        assert!(archive.arrive(written, SegmentId(1), vec![1], true, &mut spare));
        assert_eq!(read(&archive, &mut place, header.sequence as usize), (400, true));
        archive.push(&frame(400), &mut spare);
        assert_eq!(read(&archive, &mut place, 400), (401, true));
        let mut place = archive.end();
        archive.trim(place, &mut spare);
        assert_eq!(archive.len(), 0);
        archive.push(&frame(401), &mut spare);
        assert_eq!(read(&archive, &mut place, 401), (402, true));
    }

    #[test]
    fn what_is_no_frame_is_told_of_and_never_given() {
        let mut spare = Spare::new(FULL);
        let (mut archive, _) = filled(3, &mut spare);
        let Segment::Here(bytes) = &mut archive.segments[0] else { panic!("it is in memory") };
        bytes[frame(0).len() + 2] ^= 0xff;
        let mut place = Place::default();
        let Found::Frame(_, first) = archive.find(&mut place) else { panic!("the first is whole") };
        place.advance(first.len());
        assert!(matches!(archive.find(&mut place), Found::Damaged));
    }
}
