//! Goes through a log in the file of a node, for agents: they read the file, and do not map it.
//!
//! What enters: a place of the log, and what lies there. What leaves: frame after frame. What may
//! never happen: a word that is being written is taken for another one; so who reads up to the end
//! of a log whose writer runs reads twice.

use alloc::vec;
use alloc::vec::Vec;

use super::segment::{Announcement, LogCursor};

/// Bytes that are read of a log at once to find frames.
const CHUNK_BYTES: usize = 4096;

/// Reads bytes of a log's region from a place on; `None`: they cannot be read.
pub trait ReadLog {
    /// Fills `bytes`.
    fn read(&self, at: usize, bytes: &mut [u8]) -> Option<()>;
}

/// Goes through a log, of which it reads a chunk at once.
pub(super) struct Walk<'a, L> {
    pub log: &'a L,
    region: usize,
    chunk: Vec<u8>,
    /// Where the chunk begins that was read last.
    start: Option<usize>,
}

impl<L: ReadLog> Walk<'_, L> {
    /// Begins to read a log whose region has this many bytes.
    pub fn new(log: &L, region: usize) -> Walk<'_, L> {
        Walk { log, region, chunk: vec![0; CHUNK_BYTES], start: None }
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
                    let at = cursor.at();
                    cursor.pass(bytes);
                    return Some(Some(at));
                }
            }
        }
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
