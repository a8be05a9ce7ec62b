//! What the harness asks of memory: bytes are read, written and copied.
//!
//! What may never happen, and is a violation: memory is accessed outside its bounds.

use landbridge_proto::endpoint::Memory;

use crate::{Violation, require};

/// The bytes that pieces of memory `M` stand for.
pub trait ByteStore<M> {
    /// The bytes `at..at + length` of `memory`; fewer if the memory has no bytes.
    ///
    /// # Errors
    /// A violation if the memory cannot be read there.
    fn read(&self, memory: &M, at: u64, length: u64) -> Result<Vec<u8>, Violation>;

    /// Writes `bytes` at offset `at` of `memory`.
    ///
    /// # Errors
    /// A violation if the memory cannot be written there.
    fn write(&mut self, memory: &M, at: u64, bytes: &[u8]) -> Result<(), Violation>;

    /// A copy of the bytes `at..at + length` of `memory`, which may be sent again.
    ///
    /// # Errors
    /// A violation if the memory cannot be read there.
    fn copy(&mut self, memory: &M, at: u64, length: u64) -> Result<M, Violation>;
}

/// The store of memory without bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoBytes;

/// Memory that has a size and no bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SizedMemory(pub u64);

impl Memory for SizedMemory {
    fn size(&self) -> u64 {
        self.0
    }

    fn address(&self) -> u64 {
        0
    }
}

impl From<u64> for SizedMemory {
    fn from(bytes: u64) -> Self {
        Self(bytes)
    }
}

impl<M: Memory + From<u64>> ByteStore<M> for NoBytes {
    fn read(&self, memory: &M, at: u64, length: u64) -> Result<Vec<u8>, Violation> {
        check_bounds(memory, at, length)?;
        Ok(Vec::new())
    }

    fn write(&mut self, memory: &M, at: u64, bytes: &[u8]) -> Result<(), Violation> {
        check_bounds(memory, at, bytes.len() as u64)
    }

    fn copy(&mut self, memory: &M, at: u64, length: u64) -> Result<M, Violation> {
        check_bounds(memory, at, length)?;
        Ok(M::from(length))
    }
}

fn check_bounds<M: Memory>(memory: &M, at: u64, length: u64) -> Result<(), Violation> {
    let (end, size) = (at.checked_add(length), memory.size());
    require!(end.is_some_and(|end| end <= size), "{at}+{length} is outside {size} bytes");
    Ok(())
}
