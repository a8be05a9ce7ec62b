//! Memory of the simulated processes: pieces that can be checked, moved and freed.
//!
//! What may never happen: a piece is accessed outside of its bounds or after its owner has freed
//! it. Both are [`Violation`]s, so an operation that completes too early is detected by the next
//! byte that moves.

use landbridge_proto::endpoint::Memory;
use landbridge_testbed::endpoint::ByteStore;

use super::Violation;

/// The value of bytes that no process has written yet.
pub const BLANK: u8 = 0xa5;

/// A range of one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    slot: u32,
    length: u64,
    /// Address at which other processes may read the piece; 0 if other processes may not read it.
    address: u64,
}

/// Every allocation of a simulation.
#[derive(Default)]
pub struct Arena {
    slots: Vec<Option<Vec<u8>>>,
}

const SLOT_SHIFT: u32 = 32;

impl Memory for Piece {
    fn size(&self) -> u64 {
        self.length
    }

    fn address(&self) -> u64 {
        self.address
    }
}

impl Piece {
    /// Number of the piece's allocation.
    pub fn slot(&self) -> u32 {
        self.slot
    }
}

impl Arena {
    /// Allocates a piece with `bytes`. With `visible`, the piece has an address.
    pub fn keep(&mut self, bytes: Vec<u8>, visible: bool) -> Piece {
        let slot = self.slots.len() as u32;
        let length = bytes.len() as u64;
        self.slots.push(Some(bytes));
        let address = if visible { (slot as u64 + 1) << SLOT_SHIFT } else { 0 };
        Piece { slot, length, address }
    }

    /// The bytes `at..at + length` of `piece`.
    pub fn read(&self, piece: Piece, at: u64, length: u64) -> Result<&[u8], Violation> {
        let bytes = self.slot(piece.slot)?;
        range(bytes.len(), at, length)
            .map(|range| &bytes[range])
            .ok_or_else(|| Violation(format!("read of {at}+{length} outside {piece:?}")))
    }

    /// The `length` bytes at an address of a [`Piece`].
    pub fn read_address(&self, address: u64, length: u64) -> Result<&[u8], Violation> {
        let slot = (address >> SLOT_SHIFT)
            .checked_sub(1)
            .ok_or_else(|| Violation(format!("a pull from address {address:#x}")))?;
        let bytes = self.slot(slot as u32)?;
        range(bytes.len(), address & ((1 << SLOT_SHIFT) - 1), length)
            .map(|range| &bytes[range])
            .ok_or_else(|| Violation(format!("a pull of {length} bytes outside slot {slot}")))
    }

    /// Frees `piece` and returns its bytes.
    pub fn free(&mut self, piece: Piece) -> Result<Vec<u8>, Violation> {
        self.slots
            .get_mut(piece.slot as usize)
            .and_then(|slot| slot.take())
            .ok_or_else(|| Violation(format!("{piece:?} is given back twice")))
    }

    fn slot(&self, slot: u32) -> Result<&Vec<u8>, Violation> {
        self.slots
            .get(slot as usize)
            .and_then(|slot| slot.as_ref())
            .ok_or_else(|| Violation(format!("slot {slot} is read after it was given back")))
    }
}

impl ByteStore<Piece> for Arena {
    fn read(&self, piece: &Piece, at: u64, length: u64) -> Result<Vec<u8>, Violation> {
        Ok(self.read(*piece, at, length)?.to_vec())
    }

    fn write(&mut self, piece: &Piece, at: u64, bytes: &[u8]) -> Result<(), Violation> {
        let target = self
            .slots
            .get_mut(piece.slot as usize)
            .and_then(|slot| slot.as_mut())
            .ok_or_else(|| Violation(format!("write to {piece:?} after it was given back")))?;
        let range = range(target.len(), at, bytes.len() as u64)
            .ok_or_else(|| Violation(format!("write at {at}+{} outside {piece:?}", bytes.len())))?;
        target[range].copy_from_slice(bytes);
        Ok(())
    }

    fn copy(&mut self, piece: &Piece, at: u64, length: u64) -> Result<Piece, Violation> {
        let bytes = self.read(*piece, at, length)?.to_vec();
        Ok(self.keep(bytes, false))
    }
}

/// The byte pattern of number `id`: every message and region has a pattern of its own.
pub fn content(id: usize, length: u64) -> Vec<u8> {
    let salt = (id as u8).wrapping_mul(167) ^ ((id >> 8) as u8).wrapping_mul(59);
    let byte = |at: u64| {
        salt.wrapping_add((at as u8).wrapping_mul(31)) ^ ((at >> 8) as u8).wrapping_mul(13)
    };
    (0..length).map(byte).collect()
}

fn range(size: usize, at: u64, length: u64) -> Option<std::ops::Range<usize>> {
    let end = at.checked_add(length).filter(|&end| end <= size as u64)?;
    Some(at as usize..end as usize)
}
