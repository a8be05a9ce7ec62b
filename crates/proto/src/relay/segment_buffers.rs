//! Names of log segments on the disk, and empty buffers for segments in memory.

use alloc::vec::Vec;

/// Name of a segment that is on the disk or being written there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SegmentId(pub u64);

/// Empty buffers of the size of a full segment.
#[derive(Debug)]
pub(super) struct BufferPool {
    buffers: Vec<Vec<u8>>,
    segment_bytes: usize,
}

impl BufferPool {
    pub fn new(segment_bytes: usize) -> Self {
        Self { buffers: Vec::new(), segment_bytes }
    }

    /// Number of empty buffers of full size.
    #[inline]
    pub fn len(&self) -> usize {
        self.buffers.len()
    }

    pub fn pop(&mut self) -> Option<Vec<u8>> {
        self.buffers.pop()
    }

    pub fn segment_bytes(&self) -> usize {
        self.segment_bytes
    }

    /// An empty buffer of `size` bytes.
    pub fn take(&mut self, size: usize) -> Vec<u8> {
        let buffer_pool = if size == self.segment_bytes { self.buffers.pop() } else { None };
        buffer_pool.unwrap_or_else(|| Vec::with_capacity(size))
    }

    pub fn give_back(&mut self, mut buffer: Vec<u8>) {
        if buffer.capacity() >= self.segment_bytes {
            buffer.clear();
            self.buffers.push(buffer);
        }
    }
}
