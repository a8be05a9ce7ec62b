//! The deliveries of this node's ranks: which frames each of their polls has delivered. The file
//! has a ring for each rank ([`landbridge_proto::log::delivery`]).
//!
//! In: what ranks write, and what comes with ranks from other nodes; what images cover. Out: the
//! deliveries that are not released. What may never happen: a delivery is written over that an
//! incarnation from a kept image may need, or one is written while a copy of all ranks is made.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use anyhow::{Result, bail};
use landbridge_proto::log::counts::LogCounts;
use landbridge_proto::log::layout::{
    CUT_AT, CUT_IS_OVER, DELIVERIES_BYTES, DELIVERIES_DISCARDED_AT, DELIVERIES_END_AT,
    DELIVERIES_PUNCHED_AT, DELIVERIES_RELEASED_AT, IS_CUTTING, control_at, deliveries_at,
};
use rustix::fs::FallocateFlags;
use rustix::io::{pread, pwrite};

use crate::agent::log_region::LogFiles;
use crate::control::rank_state::RecordingUpdate;

/// The deliveries of the ranks of this node.
pub struct NodeDeliveries {
    files: Rc<LogFiles>,
    /// Up to where the deliveries of each rank are released, and what it had done by then.
    released: RefCell<BTreeMap<u32, (u64, LogCounts)>>,
}

impl NodeDeliveries {
    /// Nothing is released.
    pub fn new(files: Rc<LogFiles>) -> NodeDeliveries {
        NodeDeliveries { files, released: RefCell::default() }
    }

    /// Up to where the deliveries of a rank are released, and what it had done by then.
    pub fn released(&self, rank: u32) -> (u64, LogCounts) {
        self.released.borrow().get(&rank).copied().unwrap_or_default()
    }

    /// Releases the deliveries of a rank up to a position. `counts`: what it had done by then.
    pub fn release(&self, rank: u32, deliveries: u64, counts: LogCounts) -> Result<()> {
        let before = self.released.borrow_mut().insert(rank, (deliveries, counts));
        let before = before.map_or(0, |(deliveries, _)| deliveries);
        if deliveries > before {
            self.discard_deliveries(rank, before, deliveries)?;
        }
        Ok(())
    }

    /// Bytes of the deliveries of a rank from `from` on, as far as they are written.
    pub fn written_since(&self, rank: u32, from: u64) -> Vec<u8> {
        let end = self.files.word(control_at(rank as usize) + DELIVERIES_END_AT as u64);
        let mut reader = self.reader(rank, from..end.max(from));
        std::iter::from_fn(|| reader.byte()).collect()
    }

    /// Reads these bytes of all deliveries that a rank has ever written.
    pub fn reader(&self, rank: u32, bytes: Range<u64>) -> DeliveriesReader<'_> {
        DeliveriesReader { files: &self.files, rank, left: bytes, ahead: Vec::new() }
    }

    /// Writes deliveries of a rank that is to be started here.
    ///
    /// # Errors
    /// There are more than a rank can replay, or memory is short.
    pub fn write_moved(&self, update: &RecordingUpdate) -> Result<()> {
        let (rank, from, bytes) = (update.rank, update.deliveries_from, &update.deliveries[..]);
        let control = control_at(rank as usize);
        let base = update.deliveries_base;
        if base > 0 {
            self.files.write_release(control + DELIVERIES_RELEASED_AT as u64, base)?;
            self.released.borrow_mut().insert(rank, (base, LogCounts::default()));
        }
        let released = self.files.word(control + DELIVERIES_RELEASED_AT as u64);
        if (from + bytes.len() as u64).saturating_sub(released) > DELIVERIES_BYTES as u64 {
            bail!("rank {rank} has delivered more than a spare node can replay");
        }
        let mut at = from % DELIVERIES_BYTES as u64;
        let mut left = bytes;
        while !left.is_empty() {
            let count = left.len().min(DELIVERIES_BYTES - at as usize);
            let written =
                pwrite(&self.files.memory, &left[..count], deliveries_at(rank as usize) + at)?;
            left = &left[written..];
            at = (at + written as u64) % DELIVERIES_BYTES as u64;
        }
        let end = (from + bytes.len() as u64).max(base);
        let at = control + DELIVERIES_END_AT as u64;
        pwrite(&self.files.memory, &end.max(self.files.word(at)).to_ne_bytes(), at)?;
        Ok(())
    }

    /// Reads how far all ranks of this node have come, none of which delivers anything meanwhile.
    pub fn cut<T>(&self, read: impl FnOnce() -> T) -> Result<T> {
        pwrite(&self.files.memory, &IS_CUTTING.to_ne_bytes(), CUT_AT)?;
        fence(Ordering::SeqCst);
        let result = read();
        pwrite(&self.files.memory, &CUT_IS_OVER.to_ne_bytes(), CUT_AT)?;
        Ok(result)
    }

    /// Gives back the pages of deliveries, then lets the rank use their places again. The pages
    /// before what the rank has discarded it has given back itself, and may be using again. It uses
    /// no place of what is behind that: such a place is free once this has returned.
    fn discard_deliveries(&self, rank: u32, from: u64, to: u64) -> Result<()> {
        let control = control_at(rank as usize);
        let punched = |is: u64| {
            pwrite(&self.files.memory, &is.to_ne_bytes(), control + DELIVERIES_PUNCHED_AT as u64)
        };
        punched(1)?;
        fence(Ordering::SeqCst);
        let mut discarded = [0; 8];
        let at = control + DELIVERIES_DISCARDED_AT as u64;
        let outcome = match pread(&self.files.memory, &mut discarded, at) {
            Ok(_) => self.punch_deliveries(rank, from.max(u64::from_ne_bytes(discarded)), to),
            Err(error) => Err(error.into()),
        };
        punched(0)?;
        outcome?;
        self.files.write_release(control + DELIVERIES_RELEASED_AT as u64, to)
    }

    fn punch_deliveries(&self, rank: u32, from: u64, to: u64) -> Result<()> {
        let ring = DELIVERIES_BYTES as u64;
        let start = deliveries_at(rank as usize);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Places that are used again lie at the same distance from the start of the ring.
        let end_of_lap = (from / ring + 1) * ring;
        for (from, to) in [(from, to.min(end_of_lap)), (end_of_lap, to)] {
            let (first, last) = (from.next_multiple_of(4096), to / 4096 * 4096);
            if first < last {
                rustix::fs::fallocate(
                    &self.files.memory,
                    flags,
                    start + first % ring,
                    last - first,
                )?;
            }
        }
        Ok(())
    }
}

/// Reads the deliveries of a rank, of which it may write more meanwhile.
pub struct DeliveriesReader<'a> {
    files: &'a LogFiles,
    rank: u32,
    left: Range<u64>,
    /// Bytes that were read ahead, the next one last.
    ahead: Vec<u8>,
}

impl DeliveriesReader<'_> {
    /// Bytes that are read ahead at once.
    const AHEAD_BYTES: u64 = 64 << 10;

    /// The next byte, if there is one.
    pub fn byte(&mut self) -> Option<u8> {
        if self.ahead.is_empty() && !self.left.is_empty() {
            let at = self.left.start % DELIVERIES_BYTES as u64;
            let in_lap = DELIVERIES_BYTES as u64 - at;
            let bytes =
                DeliveriesReader::AHEAD_BYTES.min(in_lap).min(self.left.end - self.left.start);
            self.ahead = vec![0; bytes as usize];
            let place = deliveries_at(self.rank as usize) + at;
            let read = pread(&self.files.memory, &mut self.ahead[..], place).unwrap_or(0);
            self.ahead.truncate(read);
            self.ahead.reverse();
            self.left.start += bytes;
        }
        self.ahead.pop()
    }
}

#[cfg(test)]
mod tests {
    use landbridge_proto::log::layout::FILE_BYTES;

    use super::*;
    use crate::agent::log_file;

    fn no_deliveries() -> NodeDeliveries {
        let (file, _) = log_file::create(FILE_BYTES).unwrap();
        NodeDeliveries::new(Rc::new(LogFiles::new(file, None)))
    }

    #[test]
    fn released_deliveries_take_no_memory_and_others_stay() {
        let deliveries = no_deliveries();
        let ring = DELIVERIES_BYTES as u64;
        let blocks = || rustix::fs::fstat(&deliveries.files.memory).unwrap().st_blocks;
        let at = |position: u64| deliveries_at(0) + position % ring;
        for position in [0, 4096, ring - 4096] {
            pwrite(&deliveries.files.memory, &[7; 4096], at(position)).unwrap();
        }
        // The page of the release itself.
        deliveries.discard_deliveries(0, 0, 100).unwrap();
        let before = blocks();
        deliveries.discard_deliveries(0, 100, 8000).unwrap();
        assert_eq!(blocks(), before, "no whole page");
        deliveries.discard_deliveries(0, ring - 4096, ring + 4100).unwrap();
        assert_eq!(before - blocks(), 16, "two pages of 512-byte blocks");
        assert_eq!([deliveries.files.word(at(0)), deliveries.files.word(at(4096)) & 0xff], [0, 7]);
    }

    /// Places of what a rank has discarded may hold newer deliveries, and what is behind the ring
    /// is of others.
    #[test]
    fn pages_stay_that_a_rank_may_be_using_again() {
        let deliveries = no_deliveries();
        let ring = DELIVERIES_BYTES as u64;
        let blocks = || rustix::fs::fstat(&deliveries.files.memory).unwrap().st_blocks;
        for page in 0..4 {
            pwrite(&deliveries.files.memory, &[7; 4096], deliveries_at(0) + 4096 * page).unwrap();
        }
        pwrite(&deliveries.files.memory, &[9; 4096], deliveries_at(1)).unwrap();
        let discard = |position: u64| {
            let at = control_at(0) + DELIVERIES_DISCARDED_AT as u64;
            pwrite(&deliveries.files.memory, &position.to_ne_bytes(), at).unwrap();
        };
        discard(ring + 4096);
        let before = blocks();
        deliveries.discard_deliveries(0, 0, ring + 4096).unwrap();
        assert_eq!(blocks(), before, "all of it was discarded");
        deliveries.discard_deliveries(0, ring + 4096, ring + 8192).unwrap();
        assert_eq!(before - blocks(), 8, "a page of 512-byte blocks");
        discard(ring + 12288);
        deliveries.discard_deliveries(0, ring + 8192, 2 * ring + 4096).unwrap();
        assert_eq!(before - blocks(), 24, "a page of each lap more");
        let is_there = |page: u64| deliveries.files.word(deliveries_at(0) + 4096 * page) != 0;
        assert_eq!([0, 1, 2, 3].map(is_there), [false, false, true, false]);
        assert_eq!(deliveries.files.word(deliveries_at(1)), u64::from_ne_bytes([9; 8]));
        assert_eq!(
            deliveries.files.word(control_at(0) + DELIVERIES_RELEASED_AT as u64),
            2 * ring + 4096
        );
        assert_eq!(deliveries.files.word(control_at(0) + DELIVERIES_PUNCHED_AT as u64), 0);
    }
}
