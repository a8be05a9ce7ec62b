//! The two ends of a log: the end at which this process appends frames, and the end at which it
//! reads them.
//!
//! What may never happen: a frame is seen before it is whole; a frame that was announced changes as
//! long as somebody may read it.

use std::io::{self, IoSlice};
use std::sync::atomic::Ordering;

use landbridge_proto::log::layout::LOG_BYTES;
use landbridge_proto::log::segment::{Announcement, LogCursor, MalformedLog, SegmentChain};
use landbridge_proto::wire::frame::HEADER_BYTES;

use super::window::Mapped;

/// The longest frame, header included, in bytes.
pub const FRAME_BYTES_MAX: usize = 64 << 10;

/// The end of a log that this process writes.
pub(super) struct LogWriter {
    log: Mapped,
    pub chain: SegmentChain,
}

impl LogWriter {
    pub fn new(log: Mapped, chain: SegmentChain) -> LogWriter {
        LogWriter { log, chain }
    }

    /// Appends a frame, or compares it with the frame that an earlier incarnation has appended.
    /// `released`: the position before which the log is released.
    ///
    /// # Errors
    /// The frame differs from the earlier one, or the log is full.
    #[inline]
    pub fn append(
        &mut self,
        front: &[u8],
        payload: &[IoSlice<'_>],
        released: impl Fn() -> u64,
    ) -> io::Result<()> {
        let bytes = front.len() + payload.iter().map(|piece| piece.len()).sum::<usize>();
        assert!(bytes <= FRAME_BYTES_MAX && front.len() >= HEADER_BYTES);
        loop {
            let cursor = *self.chain.cursor();
            let word = self.log.word(cursor.at()).load(Ordering::Acquire);
            match cursor.read(word, LOG_BYTES).map_err(impossible)? {
                Announcement::Nothing if cursor.has_room(bytes) => {
                    self.write(&cursor, bytes, front, payload);
                    break;
                }
                Announcement::Nothing => self.begin_segment(&cursor, bytes, released())?,
                Announcement::Jump(to) => self.chain.jump(to),
                Announcement::Frame(before) => {
                    self.compare(&cursor, front, payload, before == bytes)?;
                    break;
                }
            }
        }
        self.chain.pass(bytes);
        Ok(())
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
    fn begin_segment(&mut self, cursor: &LogCursor, bytes: usize, released: u64) -> io::Result<()> {
        let to = self
            .chain
            .next_segment(bytes, released)
            .ok_or_else(|| full("a log of its messages"))?;
        self.log.prepare(to.end());
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
        is_same_length: bool,
    ) -> io::Result<()> {
        let mut at = cursor.at();
        let mut matches = |piece: &[u8]| {
            at += piece.len();
            self.log.announced(at - piece.len(), piece.len()) == piece
        };
        if is_same_length && matches(front) && payload.iter().all(|piece| matches(piece)) {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "its frame {} to a process of its node is not what it sent there before",
                cursor.frames()
            ),
        ))
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

    /// Passes frames that lie one behind the other, of at most `bytes_max` bytes together; returns
    /// them, each with its padding.
    pub fn pass_run(&self, cursor: &mut LogCursor, bytes_max: usize) -> io::Result<&[u8]> {
        self.follow_jumps(cursor)?;
        let start = cursor.at();
        while let Announcement::Frame(bytes) = self.next(cursor)?
            && cursor.behind(bytes) - start <= bytes_max
        {
            cursor.pass(bytes);
        }
        Ok(self.log.announced(start, cursor.at() - start))
    }

    fn follow_jumps(&self, cursor: &mut LogCursor) -> io::Result<()> {
        while let Announcement::Jump(to) = self.next(cursor)? {
            cursor.jump(to);
        }
        Ok(())
    }

    fn next(&self, cursor: &LogCursor) -> io::Result<Announcement> {
        let word = self.log.word(cursor.at()).load(Ordering::Acquire);
        cursor.read(word, LOG_BYTES).map_err(impossible)
    }
}

/// The end of a log that this process reads.
pub(super) struct LogReader {
    log: Mapped,
    pub cursor: LogCursor,
}

impl LogReader {
    pub fn new(log: Mapped, cursor: LogCursor) -> LogReader {
        LogReader { log, cursor }
    }

    /// Bytes of the next frame; 0: there is none.
    #[inline]
    pub fn next(&mut self) -> io::Result<usize> {
        loop {
            let word = self.log.word(self.cursor.at()).load(Ordering::Acquire);
            match self.cursor.read(word, LOG_BYTES).map_err(impossible)? {
                Announcement::Nothing => return Ok(0),
                Announcement::Frame(bytes) => return Ok(bytes),
                Announcement::Jump(to) => {
                    self.log.prepare(to.end());
                    self.cursor.jump(to);
                }
            }
        }
    }

    /// The next frame, of which [`Self::next`] has returned the bytes.
    #[inline]
    pub fn frame(&self, bytes: usize) -> &[u8] {
        self.log.announced(self.cursor.at(), bytes)
    }

    #[inline]
    pub fn consume(&mut self, bytes: usize) {
        self.cursor.pass(bytes);
    }
}

fn impossible(_: MalformedLog) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a log announces what cannot be there")
}

pub(super) fn full(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::StorageFull, format!("{what} is full"))
}
