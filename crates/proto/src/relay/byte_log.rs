//! Bytes that are kept in order and can be read from the beginning any number of times.
//!
//! The bytes lie in blocks that never move: appending copies no earlier bytes, and allocates at
//! most the next block. Blocks grow with the log, so that a log of a few bytes takes little memory.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Size of the first block, in bytes.
const BLOCK_BYTES_MIN: usize = 4 << 10;
/// Size of the largest block, in bytes.
const BLOCK_BYTES_MAX: usize = 1 << 20;

/// A log of bytes: see the module head.
#[derive(Debug, Default)]
pub(super) struct ByteLog {
    blocks: VecDeque<Vec<u8>>,
    /// Number of the first kept block: so many blocks have been dropped.
    first: usize,
    /// Bytes of all dropped blocks.
    dropped: u64,
    bytes: u64,
}

/// Position of a reader in the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cursor {
    block: usize,
    at: usize,
}

impl ByteLog {
    /// An empty log, before which `dropped` bytes were dropped.
    pub fn starting_at(dropped: u64) -> Self {
        Self { dropped, ..Self::default() }
    }

    /// Number of kept bytes.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Number of dropped bytes, which is the position of the first kept byte.
    pub fn first(&self) -> u64 {
        self.dropped
    }

    pub fn push(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            let last = self.blocks.back_mut();
            let Some(block) = last.filter(|block| block.len() < block.capacity()) else {
                let kept = self.bytes as usize;
                let size = kept.clamp(BLOCK_BYTES_MIN, BLOCK_BYTES_MAX);
                self.blocks.push_back(Vec::with_capacity(size));
                continue;
            };
            let room = block.capacity() - block.len();
            let (now, later) = bytes.split_at(bytes.len().min(room));
            block.extend_from_slice(now);
            bytes = later;
        }
    }

    /// Cursor after the first `bytes` bytes ever appended, if the bytes that follow are still kept.
    pub fn at(&self, bytes: u64) -> Option<Cursor> {
        let mut left = bytes.checked_sub(self.dropped)?;
        for (index, held) in self.blocks.iter().enumerate() {
            let length = held.len() as u64;
            // The last block takes further bytes.
            if left < length || (left == length && index + 1 == self.blocks.len()) {
                return Some(Cursor { block: self.first + index, at: left as usize });
            }
            left -= length;
        }
        (left == 0).then_some(Cursor { block: self.first, at: 0 })
    }

    /// Cursor after the last byte.
    pub fn end(&self) -> Cursor {
        match self.blocks.back() {
            Some(last) => Cursor { block: self.first + self.blocks.len() - 1, at: last.len() },
            None => Cursor { block: self.first, at: 0 },
        }
    }

    /// Drops the blocks that lie wholly before the cursor.
    pub fn trim(&mut self, cursor: Cursor) {
        while self.first < cursor.block {
            let Some(block) = self.blocks.pop_front() else { return };
            self.first += 1;
            self.dropped += block.len() as u64;
            self.bytes -= block.len() as u64;
        }
    }

    /// Drops all bytes from position `end` on, counted as in [`ByteLog::at`]. No reader may have
    /// passed `end`. If `end` lies before the first kept byte, all bytes are dropped.
    pub fn truncate(&mut self, end: u64) {
        let mut excess = self.bytes - end.saturating_sub(self.dropped).min(self.bytes);
        self.bytes -= excess;
        while let Some(block) = self.blocks.back_mut().filter(|_| excess > 0) {
            let rest = block.len().saturating_sub(excess as usize);
            excess -= (block.len() - rest) as u64;
            block.truncate(rest);
            if rest == 0 {
                self.blocks.pop_back();
            }
        }
    }

    fn block(&self, number: usize) -> Option<&Vec<u8>> {
        self.blocks.get(number.checked_sub(self.first)?)
    }

    /// The next bytes, at most `most`, and fewer only where a block ends. Empty: all bytes have
    /// been read.
    pub fn read(&self, cursor: &mut Cursor, most: usize) -> &[u8] {
        while let Some(block) = self.block(cursor.block) {
            let size = (block.len() - cursor.at).min(most);
            let is_last = cursor.block + 1 == self.first + self.blocks.len();
            if size > 0 || is_last {
                let start = cursor.at;
                cursor.at += size;
                return &block[start..start + size];
            }
            *cursor = Cursor { block: cursor.block + 1, at: 0 };
        }
        &[]
    }

    /// The next `N` bytes, if there are so many.
    pub fn take<const N: usize>(&self, cursor: &mut Cursor) -> Option<[u8; N]> {
        let mut taken = [0; N];
        let mut filled = 0;
        while filled < N {
            let bytes = self.read(cursor, N - filled);
            if bytes.is_empty() {
                return None;
            }
            taken[filled..filled + bytes.len()].copy_from_slice(bytes);
            filled += bytes.len();
        }
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_read_again_and_nothing_moves() {
        let mut store = ByteLog::default();
        let mut cursor = Cursor::default();
        assert!(store.read(&mut cursor, 9).is_empty());
        let byte = |at: u64| (at * 7 % 251) as u8;
        let mut first: *const u8 = core::ptr::null();
        let mut read = 0;
        for size in (0..3_000).map(|n: usize| n * 37 % 4_000) {
            let bytes: Vec<u8> = (store.len()..).take(size).map(byte).collect();
            store.push(&bytes);
            if let Some(block) = store.blocks.front() {
                assert!(first.is_null() || first == block.as_ptr());
                first = block.as_ptr();
            }
            // A reader follows while the log grows, and does not always read to the end.
            for _ in 0..size % 5 {
                let piece = store.read(&mut cursor, 1_500);
                assert!(piece.iter().zip(read..).all(|(is, at)| *is == byte(at)));
                read += piece.len() as u64;
            }
        }
        assert!(store.len() > 5 << 20);
        let taken: u64 = store.blocks.iter().map(|block| block.capacity() as u64).sum();
        assert!(taken < store.len() + BLOCK_BYTES_MAX as u64 + 1, "{taken}");
        let mut again = Cursor::default();
        let words = store.len() / 8;
        for word in 0..words {
            let expected: Vec<u8> = (8 * word..8 * word + 8).map(byte).collect();
            assert_eq!(store.take::<8>(&mut again), expected.try_into().ok());
        }
        assert_eq!(store.take::<8>(&mut again), None);
        for at in (0..store.len()).step_by(12_345) {
            let mut there = store.at(at).unwrap();
            assert_eq!(store.take::<1>(&mut there), Some([byte(at)]), "{at}");
        }
        let mut end = store.at(store.len()).unwrap();
        assert_eq!(end, store.end());
        assert!(store.read(&mut end, 1).is_empty() && store.at(store.len() + 1).is_none());
        assert!(ByteLog::default().at(0).is_some() && ByteLog::default().at(1).is_none());
        let (middle, all) = (store.len() / 2 + 77, store.len());
        store.trim(store.at(middle).unwrap());
        assert!(store.len() <= all - middle + BLOCK_BYTES_MAX as u64 && store.at(0).is_none());
        let mut there = store.at(middle).unwrap();
        assert_eq!(store.take::<1>(&mut there), Some([byte(middle)]));
        store.push(&[9]);
        assert_eq!(store.take::<1>(&mut store.at(all).unwrap()), Some([9]));
        assert!(store.read(&mut Cursor::default(), 1).is_empty());
    }

    #[test]
    fn what_is_added_goes_on_where_the_rest_was_dropped() {
        let byte = |at: u64| (at * 7 % 251) as u8;
        let bytes = |from: u64, to: u64| (from..to).map(byte).collect::<Vec<u8>>();
        const ALL: u64 = 100_000;
        for end in [0, 1, 4_095, 4_096, 4_097, 5_000, 50_000, ALL - 1, ALL, ALL + 9] {
            let mut store = ByteLog::starting_at(10);
            bytes(10, ALL).chunks(999).for_each(|piece| store.push(piece));
            store.trim(store.at(6_000).unwrap());
            let first = store.first();
            assert!((11..=6_000).contains(&first), "{first}");
            store.truncate(end);
            let kept = end.clamp(first, ALL);
            assert_eq!((store.first(), store.len()), (first, kept - first), "{end}");
            store.push(&bytes(kept, 2 * ALL));
            let (mut cursor, mut read) = (store.at(first).unwrap(), Vec::new());
            while read.len() < store.len() as usize {
                read.extend_from_slice(store.read(&mut cursor, usize::MAX));
            }
            assert!(read == bytes(first, 2 * ALL), "{end}");
        }
    }

    #[test]
    fn little_takes_little() {
        let mut store = ByteLog::default();
        store.push(&[1; 40]);
        assert_eq!(store.blocks[0].capacity(), BLOCK_BYTES_MIN);
    }
}
