//! Goes through a log in the file of a node, for agents: they read the file, and do not map it.
//!
//! What enters: a place of the log, and what lies there. What leaves: frame after frame. What may
//! never happen: a word that is being written is taken for another one; so who reads up to the end
//! of a log whose writer runs reads twice. Frames are copied that the disk has given back other
//! than they were written; so who copies has the digest of each segment on disk checked first.

use alloc::vec;
use alloc::vec::Vec;

use super::segment::{Announcement, DIGEST_PLACE, LogCursor, LogSegment};
use crate::digest::digest;

/// Bytes that are read of a log at once to find frames.
const CHUNK_BYTES: usize = 4096;

/// Reads bytes of a log's region from a place on; `None`: they cannot be read.
pub trait ReadLog {
    /// Fills `bytes`.
    fn read(&self, at: usize, bytes: &mut [u8]) -> Option<()>;

    /// Notes that a segment on disk is not what was written, unless its writer has used it again
    /// meanwhile.
    fn note_corrupt(&self) {}
}

/// Goes through a log, of which it reads a chunk at once.
pub(super) struct Walk<'a, L> {
    pub log: &'a L,
    region: usize,
    chunk: Vec<u8>,
    /// Where the chunk begins that was read last.
    start: Option<usize>,
    /// Segments on disk are checked before their frames are passed.
    checks: bool,
    /// The segment that was checked last.
    checked: Option<LogSegment>,
}

impl<L: ReadLog> Walk<'_, L> {
    /// Begins to read a log whose region has this many bytes.
    pub fn new(log: &L, region: usize) -> Walk<'_, L> {
        let chunk = vec![0; CHUNK_BYTES];
        Walk { log, region, chunk, start: None, checks: false, checked: None }
    }

    /// Checks segments on disk from here on, because frames are copied.
    pub fn check_segments(&mut self) {
        self.checks = true;
    }

    /// Goes to the end of the frames before `position`. `None`: no frame ends there.
    pub fn pass_to(&mut self, cursor: &mut LogCursor, position: u64) -> Option<()> {
        while cursor.position() < position {
            self.pass(cursor)??;
        }
        (cursor.position() == position).then_some(())
    }

    /// Passes the next frame, and returns where it lies; inside, `None`: there is none.
    pub fn pass(&mut self, cursor: &mut LogCursor) -> Option<Option<usize>> {
        loop {
            match cursor.read(self.word(cursor.at())?, self.region).ok()? {
                Announcement::Nothing => return Some(None),
                Announcement::Jump(to) => cursor.jump(to),
                Announcement::Frame(bytes) => {
                    if self.checks && cursor.segment().is_on_disk(self.region) {
                        self.check(cursor.segment())?;
                    }
                    let at = cursor.at();
                    cursor.pass(bytes);
                    return Some(Some(at));
                }
            }
        }
    }

    /// Checks a segment on disk, once. `None`: it is not what was written. A segment that is still
    /// being written has no digest yet.
    fn check(&mut self, segment: LogSegment) -> Option<()> {
        if self.checked == Some(segment) {
            return Some(());
        }
        let mut bytes = vec![0; segment.end() - segment.start()];
        // A word may be written while it is read.
        for _ in 0..2 {
            self.log.read(segment.start(), &mut bytes)?;
            if is_intact(&bytes, segment, self.region) != Some(false) {
                self.checked = Some(segment);
                return Some(());
            }
        }
        self.log.note_corrupt();
        None
    }

    fn word(&mut self, at: usize) -> Option<u64> {
        let start = at / CHUNK_BYTES * CHUNK_BYTES;
        if self.start != Some(start) {
            self.start = None;
            self.log.read(start, &mut self.chunk)?;
            self.start = Some(start);
        }
        let bytes = self.chunk.get(at - start..)?.first_chunk()?;
        Some(u64::from_le_bytes(*bytes))
    }
}

/// Whether the frames of a segment have the digest that stands behind them. `None`: the segment is
/// still being written.
fn is_intact(bytes: &[u8], segment: LogSegment, region: usize) -> Option<bool> {
    let word = |at: usize| {
        let bytes = bytes.get(at..).and_then(<[u8]>::first_chunk);
        bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    };
    let mut cursor = LogCursor::at_start_of(segment);
    loop {
        let at = cursor.at() - segment.start();
        match cursor.read(word(at), region) {
            Ok(Announcement::Nothing) => return None,
            Ok(Announcement::Frame(bytes)) => cursor.pass(bytes),
            Ok(Announcement::Jump(_)) => {
                return Some(digest(&bytes[..at]) == word(at + DIGEST_PLACE));
            }
            Err(_) => return Some(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use core::cell::{Cell, RefCell};

    use super::super::segment::SegmentChain;
    use super::*;
    use crate::wire::frame::HEADER_BYTES;

    const REGION: usize = 16 << 20;
    const PAYLOAD: usize = 60_000;

    /// A log that goes on on disk after its first page.
    struct Log {
        bytes: RefCell<Vec<u8>>,
        is_corrupt: Cell<bool>,
        /// Segments that were read whole.
        segments_read: Cell<usize>,
    }

    impl ReadLog for Log {
        fn read(&self, at: usize, bytes: &mut [u8]) -> Option<()> {
            let is_segment = bytes.len() > CHUNK_BYTES;
            self.segments_read.set(self.segments_read.get() + usize::from(is_segment));
            bytes.copy_from_slice(self.bytes.borrow().get(at..at + bytes.len())?);
            Some(())
        }

        fn note_corrupt(&self) {
            self.is_corrupt.set(true);
        }
    }

    impl Log {
        fn of_frames(count: usize) -> Log {
            let log = Log {
                bytes: RefCell::new(vec![0; REGION]),
                is_corrupt: Cell::new(false),
                segments_read: Cell::new(0),
            };
            let mut chain = SegmentChain::new(REGION);
            for number in 0..count {
                if !chain.cursor().has_room(HEADER_BYTES + PAYLOAD) {
                    log.leave_segment(&mut chain);
                }
                let mut frame = vec![number as u8; HEADER_BYTES + PAYLOAD];
                frame[..8].copy_from_slice(&(PAYLOAD as u64 | 1 << 32).to_le_bytes());
                log.write(chain.cursor().at(), &frame);
                chain.pass(frame.len());
            }
            log
        }

        fn leave_segment(&self, chain: &mut SegmentChain) {
            let (to, _) = chain.segment_on_disk(HEADER_BYTES + PAYLOAD, 0).unwrap();
            let (start, at) = (chain.cursor().segment().start(), chain.cursor().at());
            let digest = digest(&self.bytes.borrow()[start..at]);
            self.write(at + DIGEST_PLACE, &digest.to_le_bytes());
            self.write(at, &to.announcement().to_le_bytes());
            chain.jump(to);
        }

        fn write(&self, at: usize, bytes: &[u8]) {
            self.bytes.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
        }

        /// Frames that can be passed, with or without a check of segments.
        fn frames(&self, checks: bool) -> usize {
            let mut walk = Walk::new(self, REGION);
            if checks {
                walk.check_segments();
            }
            let mut cursor = LogCursor::START;
            let mut frames = 0;
            while let Some(Some(_)) = walk.pass(&mut cursor) {
                frames += 1;
            }
            frames
        }
    }

    #[test]
    fn no_frame_of_a_segment_is_passed_that_came_back_corrupt_from_the_disk() {
        const COUNT: usize = 80;
        let log = Log::of_frames(COUNT);
        assert_eq!((log.frames(true), log.is_corrupt.get()), (COUNT, false));
        assert_eq!(log.segments_read.get(), 3, "each once");
        // In the second of three segments.
        let at = REGION / 2 + 3_000_000;
        log.bytes.borrow_mut()[at] ^= 4;
        assert_eq!((log.frames(false), log.is_corrupt.get()), (COUNT, false));
        let passed = log.frames(true);
        assert!(log.is_corrupt.get() && passed > 0 && passed < COUNT / 2, "{passed}");
        log.bytes.borrow_mut()[at] ^= 4;
        log.is_corrupt.set(false);
        // The third one is still being written, and has no digest.
        log.bytes.borrow_mut()[REGION / 2 + (4 << 20) + 100] ^= 4;
        assert_eq!((log.frames(true), log.is_corrupt.get()), (COUNT, false));
    }
}
