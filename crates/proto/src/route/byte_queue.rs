//! Bytes that wait for an output: a byte queue made of chunks from a pool that all queues of a
//! relay share.
//!
//! An empty queue owns no memory. What may never happen: bytes leave in another order than they
//! came, or a queue keeps a chunk that holds no bytes.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// The size of a chunk in bytes: one TLS record, so that a full chunk becomes one record.
pub const CHUNK_BYTES: usize = 16 << 10;

/// The most unused chunks in the pool. Further ones are freed: 2 MiB covers a burst.
const SPARE_CHUNKS_MAX: usize = 128;

/// The chunks that queues share.
#[derive(Debug, Default)]
pub struct ChunkPool {
    spare: Vec<Box<[u8]>>,
    used: usize,
}

impl ChunkPool {
    /// Bytes of memory in queues.
    pub fn used_bytes(&self) -> usize {
        self.used * CHUNK_BYTES
    }

    fn take(&mut self) -> Box<[u8]> {
        self.used += 1;
        self.spare.pop().unwrap_or_else(|| alloc::vec![0; CHUNK_BYTES].into_boxed_slice())
    }

    fn give_back(&mut self, chunk: Box<[u8]>) {
        self.used -= 1;
        if self.spare.len() < SPARE_CHUNKS_MAX {
            self.spare.push(chunk);
        }
    }
}

/// A byte queue: see the module documentation.
#[derive(Debug, Default)]
pub struct ByteQueue {
    chunks: VecDeque<Box<[u8]>>,
    /// The bytes of the first chunk that have left.
    start: usize,
    length: usize,
}

impl ByteQueue {
    /// The number of bytes that wait.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Adds `bytes` at the end.
    pub fn push(&mut self, pool: &mut ChunkPool, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let end = self.start + self.length;
            if end == self.chunks.len() * CHUNK_BYTES {
                self.chunks.push_back(pool.take());
            }
            let at = end % CHUNK_BYTES;
            let size = bytes.len().min(CHUNK_BYTES - at);
            let (now, later) = bytes.split_at(size);
            self.chunks[end / CHUNK_BYTES][at..at + size].copy_from_slice(now);
            self.length += size;
            bytes = later;
        }
    }

    /// Removes `count` bytes from the front.
    ///
    /// # Panics
    /// If fewer than `count` bytes wait.
    pub fn pop(&mut self, pool: &mut ChunkPool, count: usize) {
        assert!(count <= self.length, "{count} bytes taken of {}", self.length);
        self.length -= count;
        self.start += count;
        while self.start >= CHUNK_BYTES || (self.length == 0 && !self.chunks.is_empty()) {
            if let Some(chunk) = self.chunks.pop_front() {
                pool.give_back(chunk);
            }
            self.start = self.start.saturating_sub(CHUNK_BYTES);
        }
        if self.length == 0 {
            *self = Self::default();
        }
    }

    /// The bytes that wait, in order.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let end = self.start + self.length;
        self.chunks.iter().enumerate().map(move |(number, chunk)| {
            let base = number * CHUNK_BYTES;
            &chunk[self.start.saturating_sub(base)..(end - base).min(CHUNK_BYTES)]
        })
    }

    /// Copies bytes from offset `at` on into `out`.
    ///
    /// # Panics
    /// If fewer than `at` + `out.len()` bytes wait.
    pub fn copy_out(&self, at: usize, out: &mut [u8]) {
        assert!(at + out.len() <= self.length, "bytes are read that do not wait");
        let mut place = self.start + at;
        let mut done = 0;
        while done < out.len() {
            let offset = place % CHUNK_BYTES;
            let size = (out.len() - done).min(CHUNK_BYTES - offset);
            let chunk = &self.chunks[place / CHUNK_BYTES];
            out[done..done + size].copy_from_slice(&chunk[offset..offset + size]);
            done += size;
            place += size;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_leave_as_they_came_and_memory_follows_them() {
        let mut pool = ChunkPool::default();
        let mut queue = ByteQueue::default();
        let (mut pushed, mut popped, mut random) = (0u64, 0u64, 7u64);
        for _ in 0..2_000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let size = (random >> 40) as usize % 40_000;
            if random >> 63 == 0 {
                let bytes: Vec<u8> = (pushed..pushed + size as u64).map(|n| n as u8).collect();
                queue.push(&mut pool, &bytes);
                pushed += size as u64;
            } else {
                let size = size.min(queue.len());
                let mut out = alloc::vec![0; size];
                queue.copy_out(0, &mut out);
                assert!(out.iter().enumerate().all(|(n, byte)| *byte == (popped + n as u64) as u8));
                queue.pop(&mut pool, size);
                popped += size as u64;
            }
            let whole: usize = queue.slices().map(<[u8]>::len).sum();
            assert_eq!((whole, queue.len()), ((pushed - popped) as usize, whole));
            assert!(queue.slices().all(|slice| !slice.is_empty()));
            assert!(pool.used_bytes() <= queue.len().next_multiple_of(CHUNK_BYTES) + CHUNK_BYTES);
        }
        queue.pop(&mut pool, queue.len());
        assert_eq!(pool.used_bytes(), 0);
    }
}
