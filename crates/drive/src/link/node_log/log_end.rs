//! The two ends of a log: the end at which this process appends frames, and the end at which it
//! reads them.
//!
//! What may never happen: a frame is seen before it is whole; a frame that was announced changes as
//! long as somebody may read it.

use std::io::{self, IoSlice};
use std::sync::atomic::Ordering;

use landbridge_proto::digest::digest;
use landbridge_proto::log::frames_digest::FramesDigest;
use landbridge_proto::log::layout::REGION_BYTES;
use landbridge_proto::log::next_segment::Releases;
use landbridge_proto::log::segment::{
    Announcement, DIGEST_PLACE, LogCursor, LogSegment, MalformedLog, SegmentChain,
};
use landbridge_proto::wire::frame::HEADER_BYTES;

use super::disk_part::{self, DiskPart};
use super::pair_releases::PairReleases;
use super::window::{Mapped, foreign};

/// The longest frame, header included, in bytes.
pub const FRAME_BYTES_MAX: usize = 64 << 10;

/// A frame is another one than an earlier incarnation has sent: the content of the [`io::Error`].
#[derive(Debug)]
pub struct OtherFrame {
    /// The frame in the log, with its header; nothing, if there is none.
    pub was: Vec<u8>,
    /// The frame that was to be appended.
    pub is: Vec<u8>,
}

impl std::fmt::Display for OtherFrame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("its frame is not what it sent there before")
    }
}

impl std::error::Error for OtherFrame {}

/// The end of a log that this process writes.
pub(super) struct LogWriter {
    log: Mapped,
    disk: Option<DiskPart>,
    pub chain: SegmentChain,
}

impl LogWriter {
    /// `log`: the region of the log, and its part of the disk file.
    pub fn new((mut log, disk): (Mapped, Option<DiskPart>), chain: SegmentChain) -> LogWriter {
        log.begin_preparing(chain.cursor().at());
        LogWriter { log, disk, chain }
    }

    /// Appends a frame, or compares it with the frame that an earlier incarnation has appended.
    /// `releases`: up to where segments may be used again. Returns whether the frame is new.
    ///
    /// # Errors
    /// The frame differs from the earlier one, or the log is full.
    #[inline]
    pub fn append(
        &mut self,
        front: &[u8],
        payload: &[IoSlice<'_>],
        releases: &PairReleases<'_>,
    ) -> io::Result<bool> {
        let bytes = front.len() + payload.iter().map(|piece| piece.len()).sum::<usize>();
        assert!(bytes <= FRAME_BYTES_MAX && front.len() >= HEADER_BYTES);
        let is_new = loop {
            let cursor = *self.chain.cursor();
            let word = self.log.word(cursor.at()).load(Ordering::Acquire);
            match cursor.read(word, REGION_BYTES).map_err(impossible)? {
                Announcement::Nothing if cursor.has_room(bytes) => {
                    self.write(&cursor, bytes, front, payload);
                    break true;
                }
                Announcement::Nothing => self.begin_segment(&cursor, bytes, releases)?,
                Announcement::Jump(to) => self.chain.jump(to),
                Announcement::Frame(before) => {
                    self.compare(&cursor, front, payload, (before, bytes))?;
                    break false;
                }
            }
        };
        self.chain.pass(bytes);
        Ok(is_new)
    }

    #[inline]
    fn write(&mut self, cursor: &LogCursor, bytes: usize, front: &[u8], payload: &[IoSlice<'_>]) {
        let rest = std::iter::once(&front[8..]).chain(payload.iter().map(|piece| &piece[..]));
        self.log.write(cursor.at() + 8, rest);
        // Something older, or a part of a longer frame, may lie behind the frame.
        self.log.word(cursor.behind(bytes)).store(0, Ordering::Relaxed);
        let announcement = u64::from_le_bytes(front[..8].try_into().unwrap_or_default());
        self.log.word(cursor.at()).store(announcement, Ordering::Release);
    }

    #[cold]
    fn begin_segment(
        &mut self,
        cursor: &LogCursor,
        bytes: usize,
        releases: &PairReleases<'_>,
    ) -> io::Result<()> {
        let demand = releases.demand(bytes, self.disk.is_some());
        let take_disk = |segment| match &self.disk {
            Some(disk) => disk.take(releases.words.head, segment),
            None => false,
        };
        let to = self.chain.next_segment(&demand, releases, take_disk);
        let to = to.ok_or_else(|| full("a log of its messages"))?;
        match to.is_on_disk(REGION_BYTES) {
            true => self.log.prepare_on_disk(to.start(), to.end()),
            false => self.log.prepare(to.start(), to.end()),
        }
        if cursor.segment().is_on_disk(REGION_BYTES) {
            let digest = digest_of_segment(&self.log, cursor.segment(), cursor.at());
            self.log.word(cursor.at() + DIGEST_PLACE).store(digest, Ordering::Relaxed);
        }
        self.log.word(to.start()).store(0, Ordering::Relaxed);
        self.log.word(cursor.at()).store(to.announcement(), Ordering::Release);
        self.chain.jump(to);
        Ok(())
    }

    #[cold]
    fn compare(
        &self,
        cursor: &LogCursor,
        front: &[u8],
        payload: &[IoSlice<'_>],
        (before, bytes): (usize, usize),
    ) -> io::Result<()> {
        let mut at = cursor.at();
        let mut matches = |piece: &[u8]| {
            at += piece.len();
            self.log.announced(at - piece.len(), piece.len()) == piece
        };
        if before == bytes && matches(front) && payload.iter().all(|piece| matches(piece)) {
            return Ok(());
        }
        let pieces = payload.iter().map(|piece| &piece[..]);
        let other = OtherFrame {
            was: self.log.announced(cursor.at(), before).to_vec(),
            is: std::iter::once(front).chain(pieces).collect::<Vec<_>>().concat(),
        };
        Err(io::Error::new(io::ErrorKind::InvalidData, other))
    }

    /// Gives back `wanted` bytes of memory of released segments, if there are so many; returns how
    /// many. `released`: the position before which nothing is needed any more. Nothing is given
    /// back before this writer has come to the end of the log: an earlier incarnation may have used
    /// these segments again.
    pub fn give_back(&mut self, head: &Mapped, released: u64, wanted: usize) -> usize {
        if !self.is_behind_all() {
            return 0;
        }
        let taken = self.chain.taken();
        for segment in self.chain.give_back(released, wanted) {
            match &self.disk {
                Some(disk) if segment.is_on_disk(REGION_BYTES) => disk.give_back(head, segment),
                _ => self.log.give_back(segment.start(), segment.end()),
            }
        }
        taken - self.chain.taken()
    }

    /// Discards what the reader has of the oldest segments, about `wanted` bytes of memory; returns
    /// up to where the log was discarded.
    pub fn discard_oldest(&self, releases: &PairReleases<'_>, wanted: usize) -> u64 {
        match self.is_behind_all() {
            true => releases.discard(self.chain.frees_memory(wanted, releases.read())),
            false => 0,
        }
    }

    /// Whether the log has a part of the disk file.
    pub fn has_disk(&self) -> bool {
        self.disk.is_some()
    }

    /// Whether the log can go on on disk. `head`: that of the file.
    pub fn has_room_on_disk(&self, head: &Mapped) -> bool {
        self.has_disk() && disk_part::has_room(head)
    }

    /// Whether no earlier incarnation has appended anything at the cursor, or behind it.
    fn is_behind_all(&self) -> bool {
        matches!(self.next(self.chain.cursor()), Ok(Announcement::Nothing))
    }

    /// Frames from the beginning of the log to the last one that an earlier incarnation has
    /// appended.
    pub fn frames(&self) -> io::Result<u64> {
        Ok(self.end(*self.chain.cursor())?.frames())
    }

    /// Goes to the end of what earlier incarnations have appended.
    pub fn skip_to_end(&mut self) -> io::Result<()> {
        loop {
            match self.next(self.chain.cursor())? {
                Announcement::Nothing => return Ok(()),
                Announcement::Jump(to) => self.chain.jump(to),
                Announcement::Frame(bytes) => self.chain.pass(bytes),
            }
        }
    }

    /// Goes to this position. False: no frame ends there.
    pub fn skip_to(&mut self, position: u64) -> io::Result<bool> {
        while self.chain.cursor().position() < position {
            match self.next(self.chain.cursor())? {
                Announcement::Nothing => return Ok(false),
                Announcement::Jump(to) => self.chain.jump(to),
                Announcement::Frame(bytes) => self.chain.pass(bytes),
            }
        }
        Ok(self.chain.cursor().position() == position)
    }

    /// Whether no earlier incarnation has appended more than this one.
    pub fn is_at_end(&self) -> io::Result<bool> {
        let mut cursor = *self.chain.cursor();
        self.follow_jumps(&mut cursor)?;
        Ok(matches!(self.next(&cursor)?, Announcement::Nothing))
    }

    /// The end of the log, found from `cursor` on.
    pub fn end(&self, mut cursor: LogCursor) -> io::Result<LogCursor> {
        while self.pass(&mut cursor)? > 0 {}
        Ok(cursor)
    }

    /// Passes the next frame; returns its bytes with their padding, or 0 if there is none.
    pub fn pass(&self, cursor: &mut LogCursor) -> io::Result<usize> {
        self.follow_jumps(cursor)?;
        let Announcement::Frame(bytes) = self.next(cursor)? else { return Ok(0) };
        let before = cursor.position();
        cursor.pass(bytes);
        Ok((cursor.position() - before) as usize)
    }

    /// Passes frames that lie one behind the other, of at most `bytes_max` bytes together and
    /// before the position `end`; returns them, each with its padding.
    pub fn pass_run(
        &self,
        cursor: &mut LogCursor,
        (bytes_max, end): (usize, u64),
    ) -> io::Result<&[u8]> {
        self.follow_jumps(cursor)?;
        let start = cursor.at();
        while cursor.position() < end
            && let Announcement::Frame(bytes) = self.next(cursor)?
            && cursor.behind(bytes) - start <= bytes_max
        {
            cursor.pass(bytes);
        }
        Ok(self.log.announced(start, cursor.at() - start))
    }

    /// The place of the log at this position. `None`: no segment is known there.
    ///
    /// # Errors
    /// No frame ends there.
    pub fn cursor_at(&self, position: u64) -> io::Result<Option<LogCursor>> {
        let present = *self.chain.cursor();
        let before = match position >= present.position() {
            true => Some(present),
            false => self.chain.cursor_before(position),
        };
        let Some(mut cursor) = before else { return Ok(None) };
        while cursor.position() < position {
            if self.pass(&mut cursor)? == 0 {
                return Err(foreign());
            }
        }
        if cursor.position() == position { Ok(Some(cursor)) } else { Err(foreign()) }
    }

    /// A digest of the frames of the log from `cursor` on, up to `position`; never 0.
    ///
    /// # Errors
    /// No frame ends there.
    pub fn digest(&self, mut cursor: LogCursor, position: u64) -> io::Result<u64> {
        let mut digest = FramesDigest::new(position);
        while cursor.position() < position {
            self.follow_jumps(&mut cursor)?;
            let Announcement::Frame(bytes) = self.next(&cursor)? else { return Err(foreign()) };
            digest.add(self.log.announced(cursor.at(), bytes));
            cursor.pass(bytes);
        }
        if cursor.position() == position { Ok(digest.value()) } else { Err(foreign()) }
    }

    fn follow_jumps(&self, cursor: &mut LogCursor) -> io::Result<()> {
        while let Announcement::Jump(to) = self.next(cursor)? {
            cursor.jump(to);
            if to.is_on_disk(REGION_BYTES) {
                check_on_disk(&self.log, *cursor)?;
            }
        }
        Ok(())
    }

    fn next(&self, cursor: &LogCursor) -> io::Result<Announcement> {
        let word = self.log.word(cursor.at()).load(Ordering::Acquire);
        cursor.read(word, REGION_BYTES).map_err(impossible)
    }
}

/// The end of a log that this process reads.
pub(super) struct LogReader {
    log: Mapped,
    pub cursor: LogCursor,
    /// The cursor has come to another segment since this was asked.
    has_jumped: bool,
    /// The cursor has come to a segment on disk before that was written to its end.
    is_unchecked: bool,
}

impl LogReader {
    pub fn new(mut log: Mapped, cursor: LogCursor) -> LogReader {
        log.begin_preparing(cursor.at());
        // An image may have been taken within a segment on disk.
        let is_unchecked = cursor.segment().is_on_disk(REGION_BYTES);
        LogReader { log, cursor, has_jumped: false, is_unchecked }
    }

    /// Bytes of the next frame; 0: there is none.
    ///
    /// # Errors
    /// The log holds what cannot be there, or is corrupt: then each further call fails as well.
    #[inline]
    pub fn next(&mut self) -> io::Result<usize> {
        loop {
            let word = self.log.word(self.cursor.at()).load(Ordering::Acquire);
            match self.cursor.read(word, REGION_BYTES).map_err(impossible)? {
                Announcement::Nothing => return Ok(0),
                Announcement::Frame(bytes) => return Ok(bytes),
                Announcement::Jump(to) => self.jump(to)?,
            }
        }
    }

    /// Goes on in another segment. The cursor stays where it is until all is checked, so that a
    /// caller that asks again does not come to what is corrupt.
    #[cold]
    fn jump(&mut self, to: LogSegment) -> io::Result<()> {
        if self.is_unchecked {
            compare_digest(&self.log, self.cursor.segment(), self.cursor.at())?;
            self.is_unchecked = false;
        }
        let mut next = self.cursor;
        next.jump(to);
        match to.is_on_disk(REGION_BYTES) {
            true => self.is_unchecked = !check_on_disk(&self.log, next)?,
            false => self.log.prepare(to.start(), to.end()),
        }
        self.cursor = next;
        self.has_jumped = true;
        Ok(())
    }

    /// The next frame, of which [`Self::next`] has returned the bytes.
    #[inline]
    pub fn frame(&self, bytes: usize) -> &[u8] {
        self.log.announced(self.cursor.at(), bytes)
    }

    /// Passes a frame; returns whether it was the first one of a segment.
    #[inline]
    pub fn consume(&mut self, bytes: usize) -> bool {
        self.cursor.pass(bytes);
        std::mem::take(&mut self.has_jumped)
    }
}

/// Checks a segment on disk before anything of it is used: the disk may give back something else
/// than was written. `cursor`: at its beginning. Returns false if the segment is still being
/// written: then it has no digest yet.
#[cold]
fn check_on_disk(log: &Mapped, mut cursor: LogCursor) -> io::Result<bool> {
    let segment = cursor.segment();
    loop {
        let word = log.word(cursor.at()).load(Ordering::Acquire);
        match cursor.read(word, REGION_BYTES).map_err(|_| corrupt())? {
            Announcement::Nothing => return Ok(false),
            Announcement::Frame(bytes) => cursor.pass(bytes),
            Announcement::Jump(_) => break,
        }
    }
    compare_digest(log, segment, cursor.at()).map(|()| true)
}

/// Compares the frames of a segment on disk, which end at `end`, with the digest behind them.
fn compare_digest(log: &Mapped, segment: LogSegment, end: usize) -> io::Result<()> {
    let digest = log.word(end + DIGEST_PLACE).load(Ordering::Relaxed);
    if digest_of_segment(log, segment, end) == digest { Ok(()) } else { Err(corrupt()) }
}

/// The digest of the frames of a segment, which end at `end`.
fn digest_of_segment(log: &Mapped, segment: LogSegment, end: usize) -> u64 {
    digest(log.announced(segment.start(), end - segment.start()))
}

fn corrupt() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "its message log came back corrupt from the disk")
}

fn impossible(_: MalformedLog) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a log announces what cannot be there")
}

pub(super) fn full(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::StorageFull, format!("{what} is full"))
}
