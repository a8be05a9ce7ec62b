//! Where the frames of a log lie: in segments of the log's region, one after another.
//!
//! A frame begins at a multiple of [`SLOT_BYTES`]. Its first word (eight bytes, never 0)
//! *announces* it: the length of what follows the header, the kind, and flags. Where a segment
//! ends, the word announces a *jump*: the segment in which the log goes on. The word behind the
//! last frame is 0.
//!
//! The writer takes the segment that was released last, because its memory is most likely in the
//! processor's caches, and otherwise a new one from the untouched part of the region. New segments
//! are as large as all before them together, from [`SEGMENT_BYTES_MIN`] to [`SEGMENT_BYTES_MAX`],
//! and begin at a multiple of their size: the log of a silent pair of processes takes a page.
//!
//! ```text
//! region: | segment 0 | segment 1 | segment 2             | untouched
//! log:      frames, jump to 2       frames, jump to 1 … (released in between)
//! ```
//!
//! The first half of the region lies in memory, the second half on disk, if there is a disk
//! (`recover_dir`). Where memory is full, the log goes on in segments on disk, all of them of
//! [`SEGMENT_BYTES_MAX`].
//!
//! A *position* in a log counts the bytes of all frames before it, each with its padding, over the
//! life of the log; jumps do not count. [`LogCursor`] is a position together with the place in the
//! region. The next incarnation of a writer begins with the state that its image holds (or an empty
//! one) and follows the jumps of the earlier incarnation, so that both know the same segments.
//!
//! What enters: lengths of frames, announcing words, up to which position the log is released. What
//! leaves: where to write or read. What may never happen: a frame or a jump is written where a
//! reader, or a later incarnation of either side, may still read something else.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::layout::HUGE_PAGE;
use crate::wire::frame::HEADER_BYTES;

/// Frames begin at multiples of this many bytes: a cache line.
pub const SLOT_BYTES: usize = 64;
/// The smallest segment, in bytes: a page.
pub const SEGMENT_BYTES_MIN: usize = 4096;
/// The largest segment, in bytes: one huge page, which no other segment shares.
pub const SEGMENT_BYTES_MAX: usize = HUGE_PAGE;

/// Where the digest of the frames of a segment on disk lies behind the word that announces the jump
/// out of it.
pub const DIGEST_PLACE: usize = 8;

/// Bits of an announcing word: the kind of a jump, which is that of no frame.
const JUMP: u64 = 0xff << KIND_BITS;
const KIND_BITS: u32 = 32;
const SIZE_BITS: u32 = 40;

/// A part of a log's region, in bytes from the region's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSegment {
    start: usize,
    bytes: usize,
}

impl LogSegment {
    /// The segment in which each log begins.
    const FIRST: LogSegment = LogSegment { start: 0, bytes: SEGMENT_BYTES_MIN };

    /// Where the first frame of the segment lies.
    pub fn start(self) -> usize {
        self.start
    }

    /// Where the segment ends.
    pub fn end(self) -> usize {
        self.start + self.bytes
    }

    /// Whether the segment lies on disk. `region`: bytes of the log's region.
    pub fn is_on_disk(self, region: usize) -> bool {
        self.start >= region / 2
    }

    /// The word that announces a jump to this segment.
    pub fn announcement(self) -> u64 {
        let page = (self.start / SEGMENT_BYTES_MIN) as u64;
        JUMP | page | u64::from(self.bytes.trailing_zeros()) << SIZE_BITS
    }

    fn parse(word: u64, region: usize) -> Option<LogSegment> {
        let size = (word >> SIZE_BITS) as u32;
        let start = word as u32 as usize * SEGMENT_BYTES_MIN;
        let bytes = 1_usize.checked_shl(size).filter(|bytes| *bytes <= SEGMENT_BYTES_MAX)?;
        let is_inside = bytes >= SEGMENT_BYTES_MIN && start + bytes <= region;
        is_inside.then_some(LogSegment { start, bytes })
    }
}

/// What a word of a log announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announcement {
    /// Nothing follows yet.
    Nothing,
    /// A frame of this many bytes, header included.
    Frame(usize),
    /// The log goes on in this segment.
    Jump(LogSegment),
}

/// A word announces what cannot be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MalformedLog;

/// How far a log was written or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogCursor {
    segment: LogSegment,
    at: usize,
    position: u64,
    frames: u64,
}

impl LogCursor {
    /// The beginning of a log.
    pub const START: LogCursor =
        LogCursor { segment: LogSegment::FIRST, at: 0, position: 0, frames: 0 };

    /// The beginning of a log of which the frames before this position lie in no file any more.
    pub fn beginning(position: u64) -> LogCursor {
        LogCursor { position, ..LogCursor::START }
    }

    /// The beginning of a segment, of whose position nothing is known.
    pub fn at_start_of(segment: LogSegment) -> LogCursor {
        LogCursor { segment, at: segment.start, ..LogCursor::START }
    }

    /// A cursor at this place, with this number of frames before it.
    pub fn with_frames(self, frames: u64) -> LogCursor {
        LogCursor { frames, ..self }
    }

    /// The cursor of which [`Self::words`] has returned the words; `None`: it is none. `region`:
    /// bytes of the log's region. The number of frames before is not known, and counts from 0.
    pub fn from_words([position, at, segment]: [u64; 3], region: usize) -> Option<LogCursor> {
        if segment == 0 {
            return (position == 0 && at == 0).then_some(LogCursor::START);
        }
        let segment = LogSegment::parse(segment, region).filter(|_| segment & JUMP == JUMP)?;
        let at = usize::try_from(at).ok()?;
        let is_inside = (segment.start..segment.end()).contains(&at);
        is_inside.then_some(LogCursor { segment, at, position, frames: 0 })
    }

    /// Position, place, and announcement of the segment.
    pub fn words(&self) -> [u64; 3] {
        [self.position, self.at as u64, self.segment.announcement()]
    }

    /// Where the next announcing word lies in the region.
    #[inline]
    pub fn at(&self) -> usize {
        self.at
    }

    /// The bytes of all frames before, with their padding.
    #[inline]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The number of frames before.
    #[inline]
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// The segment of the next announcing word.
    pub fn segment(&self) -> LogSegment {
        self.segment
    }

    /// What `word`, which lies at [`Self::at`], announces. `region`: bytes of the log's region.
    ///
    /// # Errors
    /// The frame would not end in this segment, or the segment lies outside of the region.
    #[inline]
    pub fn read(&self, word: u64, region: usize) -> Result<Announcement, MalformedLog> {
        if word == 0 {
            return Ok(Announcement::Nothing);
        }
        if word & JUMP == JUMP {
            return LogSegment::parse(word, region).map(Announcement::Jump).ok_or(MalformedLog);
        }
        let bytes = HEADER_BYTES + word as u32 as usize;
        if self.has_room(bytes) { Ok(Announcement::Frame(bytes)) } else { Err(MalformedLog) }
    }

    /// Whether a frame of this many bytes and a word behind it end in this segment.
    #[inline]
    pub fn has_room(&self, bytes: usize) -> bool {
        self.at + with_padding(bytes) + SLOT_BYTES <= self.segment.end()
    }

    /// Where the word behind a frame of this many bytes lies.
    #[inline]
    pub fn behind(&self, bytes: usize) -> usize {
        self.at + with_padding(bytes)
    }

    /// Passes a frame of this many bytes, for which there is room.
    #[inline]
    pub fn pass(&mut self, bytes: usize) {
        self.at += with_padding(bytes);
        self.position += with_padding(bytes) as u64;
        self.frames += 1;
    }

    /// Goes on in another segment.
    pub fn jump(&mut self, to: LogSegment) {
        (self.segment, self.at) = (to, to.start);
    }
}

/// The bytes of a frame with its padding.
#[inline]
fn with_padding(bytes: usize) -> usize {
    bytes.next_multiple_of(SLOT_BYTES)
}

/// The bytes that a segment must have for a frame of this many bytes.
fn needed(bytes: usize) -> usize {
    with_padding(bytes) + SLOT_BYTES
}

/// A segment that was written to its end.
#[derive(Clone, Copy, Debug)]
struct UsedSegment {
    segment: LogSegment,
    /// The positions at its beginning and at its end.
    begins: u64,
    ends: u64,
}

/// The segments of a log, for its writer.
#[derive(Clone, Debug)]
pub struct SegmentChain {
    cursor: LogCursor,
    region: usize,
    /// The position at which the present segment begins.
    begins: u64,
    /// The segments behind the cursor that may still be read, oldest first.
    used: VecDeque<UsedSegment>,
    /// Released segments, the newest last.
    free: Vec<LogSegment>,
    /// Released segments of which the memory, or the disk, was given back, and the bytes of those
    /// in memory, and on disk.
    given_back: Vec<LogSegment>,
    given_back_bytes: [usize; 2],
    /// The part of the region that segments in memory take.
    touched: usize,
    /// The part that segments on disk take.
    touched_on_disk: usize,
}

impl SegmentChain {
    /// An empty log in a region of this many bytes.
    pub fn new(region: usize) -> SegmentChain {
        SegmentChain::beginning(region, LogCursor::START)
    }

    /// A log in a region of this many bytes, which is empty before this cursor in the region's
    /// first segment ([`LogCursor::beginning`]).
    pub fn beginning(region: usize, cursor: LogCursor) -> SegmentChain {
        SegmentChain {
            cursor,
            region,
            begins: cursor.position,
            used: VecDeque::new(),
            free: Vec::new(),
            given_back: Vec::new(),
            given_back_bytes: [0; 2],
            touched: SEGMENT_BYTES_MIN,
            touched_on_disk: 0,
        }
    }

    /// Where the next frame goes.
    #[inline]
    pub fn cursor(&self) -> &LogCursor {
        &self.cursor
    }

    /// The bytes of the region that segments in memory take.
    pub fn touched(&self) -> usize {
        self.touched
    }

    /// The bytes of memory that the segments take.
    #[inline]
    pub fn taken(&self) -> usize {
        self.touched - self.given_back_bytes[0]
    }

    /// The bytes of disk that the segments take.
    #[inline]
    pub fn taken_on_disk(&self) -> usize {
        self.touched_on_disk - self.given_back_bytes[1]
    }

    /// The bytes of segments that are not released, in memory and on disk, the present one among
    /// them. `released`: the position before which nothing is needed any more.
    pub fn needed(&mut self, released: u64) -> usize {
        self.free_before(released);
        let free = self.free.iter().map(|segment| segment.bytes).sum::<usize>();
        self.taken() + self.taken_on_disk() - free
    }

    /// Released segments, of which the caller gives the memory, or the disk, back: all on disk, and
    /// of those in memory the oldest, until they have `wanted` bytes. `released`: the position
    /// before which nothing is needed any more.
    pub fn give_back(&mut self, released: u64, wanted: usize) -> Vec<LogSegment> {
        self.free_before(released);
        let (region, mut bytes) = (self.region, 0);
        let is_given_back = |segment: &mut LogSegment| {
            let is_wanted = segment.is_on_disk(region) || bytes < wanted;
            if is_wanted && !segment.is_on_disk(region) {
                bytes += segment.bytes;
            }
            is_wanted
        };
        let given_back: Vec<LogSegment> = self.free.extract_if(.., is_given_back).collect();
        for segment in &given_back {
            self.given_back_bytes[self.part(*segment)] += segment.bytes;
        }
        self.given_back.extend(&given_back);
        given_back
    }

    /// Notes that a frame of this many bytes was written, or found, at the cursor.
    #[inline]
    pub fn pass(&mut self, bytes: usize) {
        self.cursor.pass(bytes);
    }

    /// Follows a jump: one that this writer announces, or one of an earlier incarnation.
    pub fn jump(&mut self, to: LogSegment) {
        self.free.retain(|segment| *segment != to);
        let part = self.part(to);
        if let Some(place) = self.given_back.iter().position(|segment| *segment == to) {
            self.given_back.remove(place);
            self.given_back_bytes[part] -= to.bytes;
        }
        self.used.retain(|used| used.segment != to);
        match part {
            0 => self.touched = self.touched.max(to.end()),
            _ => self.touched_on_disk = self.touched_on_disk.max(to.end() - self.region / 2),
        }
        let LogCursor { segment, position: ends, .. } = self.cursor;
        self.used.push_back(UsedSegment { segment, begins: self.begins, ends });
        self.begins = ends;
        self.cursor.jump(to);
    }

    /// A place of the log at this position or before it, in the same segment; the number of frames
    /// before it is not known. `None`: no segment is known that holds the position.
    pub fn cursor_before(&self, position: u64) -> Option<LogCursor> {
        let present = UsedSegment {
            segment: self.cursor.segment,
            begins: self.begins,
            ends: self.cursor.position,
        };
        let all = [present].into_iter().chain(self.used.iter().rev().copied());
        let mut newest_first = all.filter(|used| used.begins <= position);
        let UsedSegment { segment, begins, ends } = newest_first.next()?;
        let cursor = LogCursor { segment, at: segment.start, position: begins, frames: 0 };
        (position <= ends).then_some(cursor)
    }

    /// 0: memory; 1: disk.
    fn part(&self, segment: LogSegment) -> usize {
        usize::from(segment.is_on_disk(self.region))
    }

    /// A segment in memory that was used before, for a frame of this many bytes, for which the
    /// present segment has no room. `released`: the position before which nothing is needed any
    /// more. `None`: there is none.
    ///
    /// A side that has read or written just to the end of a segment has yet to read the jump
    /// there: a segment is released once its end lies before `released`, not at it.
    pub fn released_segment(&mut self, bytes: usize, released: u64) -> Option<LogSegment> {
        self.free_before(released);
        let mut all = self.free.iter().rev().chain(&self.given_back).copied();
        all.find(|segment| segment.bytes >= needed(bytes) && self.part(*segment) == 0)
    }

    /// As [`Self::released_segment`], the smallest of those whose memory was not given back: a log
    /// that goes to and fro between small segments stays in the processor's caches.
    pub fn smallest_segment(&mut self, bytes: usize, released: u64) -> Option<LogSegment> {
        self.free_before(released);
        let all = self.free.iter().copied();
        let large =
            all.filter(|segment| segment.bytes >= needed(bytes) && self.part(*segment) == 0);
        large.min_by_key(|segment| segment.bytes)
    }

    /// A segment on disk for a frame of this many bytes, and whether it was released: one that was
    /// used before, which takes disk unless a later incarnation has given that back, or a new one.
    /// `None`: the region has no room. `released`: as in [`Self::released_segment`].
    pub fn segment_on_disk(&mut self, bytes: usize, released: u64) -> Option<(LogSegment, bool)> {
        self.free_before(released);
        let is_on_disk = |segment: &LogSegment| segment.is_on_disk(self.region);
        let free = self.free.iter().rev().copied().find(is_on_disk).map(|segment| (segment, true));
        let given_back = || self.given_back.iter().copied().find(is_on_disk);
        let start = self.region / 2 + self.touched_on_disk;
        let new = LogSegment { start, bytes: SEGMENT_BYTES_MAX };
        let new = || (new.end() <= self.region).then_some(new);
        let found = free.or_else(|| Some((given_back().or_else(new)?, false)));
        found.filter(|_| needed(bytes) <= SEGMENT_BYTES_MAX)
    }

    /// The lowest position that frees a segment for a frame of this many bytes, if nothing before
    /// it is needed any more. `None`: no segment that may still be read is as large.
    pub fn frees_segment(&self, bytes: usize) -> Option<u64> {
        let is_enough = |used: &&UsedSegment| used.segment.bytes >= needed(bytes);
        self.used.iter().find(is_enough).map(|used| used.ends + 1)
    }

    /// The lowest position that frees so many bytes of memory, of segments that lie before the
    /// position `read`; 0: there are none.
    pub fn frees_memory(&self, wanted: usize, read: u64) -> u64 {
        let (mut bytes, mut position) = (0, 0);
        for used in self.used.iter().take_while(|used| used.ends < read) {
            if bytes >= wanted {
                break;
            }
            if self.part(used.segment) == 0 {
                bytes += used.segment.bytes;
                position = used.ends + 1;
            }
        }
        position
    }

    fn free_before(&mut self, released: u64) {
        while let Some(used) = self.used.front().copied()
            && used.ends < released
        {
            self.used.pop_front();
            self.free.push(used.segment);
        }
    }

    /// A segment in memory that was never used, for a frame of this many bytes. `None`: the region
    /// has no room.
    pub fn new_segment(&self, bytes: usize) -> Option<LogSegment> {
        let needed = needed(bytes);
        let as_before = 1 << self.touched.ilog2();
        let bytes =
            needed.next_power_of_two().max(SEGMENT_BYTES_MIN).max(as_before).min(SEGMENT_BYTES_MAX);
        let segment = LogSegment { start: self.touched.next_multiple_of(bytes), bytes };
        (bytes >= needed && segment.end() <= self.region / 2).then_some(segment)
    }
}

#[cfg(test)]
mod tests;
