//! Memory of both processes: slots of bytes that are taken away when their operation is done, and copies that live as
//! long as somebody holds them.
//!
//! What may never happen, and panics: memory is touched outside its bounds or after its owner had it back. The last
//! holder of a copy drops it, as in a real driver, so that a copy that an endpoint forgets is found at the end; the
//! simulator's memory cannot show this.

use std::ops::Range;
use std::rc::{Rc, Weak};

use landbridge_proto::endpoint::Memory;
use landbridge_testbed::Violation;
use landbridge_testbed::endpoint::ByteStore;

/// A piece of memory.
#[derive(Clone, Debug)]
pub enum Piece {
    /// The application's.
    Slot { slot: usize, length: u64 },
    /// The driver's.
    Copy(Rc<Vec<u8>>),
}

/// Everything that pieces stand for.
#[derive(Default)]
pub struct Arena {
    slots: Vec<Option<Vec<u8>>>,
    copies: Vec<Weak<Vec<u8>>>,
}

impl Memory for Piece {
    fn size(&self) -> u64 {
        match self {
            Piece::Slot { length, .. } => *length,
            Piece::Copy(bytes) => bytes.len() as u64,
        }
    }

    fn address(&self) -> u64 {
        0
    }
}

impl Arena {
    /// Memory of the application that holds `bytes`.
    pub fn keep(&mut self, bytes: Vec<u8>) -> Piece {
        let (slot, length) = (self.slots.len(), bytes.len() as u64);
        self.slots.push(Some(bytes));
        Piece::Slot { slot, length }
    }

    /// A copy that the driver makes.
    pub fn copy(&mut self, bytes: &[u8]) -> Piece {
        let bytes = Rc::new(bytes.to_vec());
        self.copies.push(Rc::downgrade(&bytes));
        Piece::Copy(bytes)
    }

    pub fn read<'a>(&'a self, piece: &'a Piece, at: u64, length: u64) -> &'a [u8] {
        let bytes = match piece {
            Piece::Slot { slot, .. } => {
                self.slots[*slot].as_ref().expect("memory is read after it was given back")
            }
            Piece::Copy(bytes) => bytes,
        };
        &bytes[range(at, length)]
    }

    pub fn write(&mut self, piece: &Piece, at: u64, bytes: &[u8]) {
        let Piece::Slot { slot, .. } = piece else { panic!("a copy is written to") };
        let slot = self.slots[*slot].as_mut().expect("memory is written after it was given back");
        slot[range(at, bytes.len() as u64)].copy_from_slice(bytes);
    }

    /// The application has its memory back.
    pub fn free(&mut self, piece: &Piece) -> Vec<u8> {
        let Piece::Slot { slot, .. } = piece else { panic!("a copy is given back") };
        self.slots[*slot].take().expect("memory is given back twice")
    }

    /// Copies that somebody still holds.
    pub fn copies(&self) -> usize {
        self.copies.iter().filter(|copy| copy.strong_count() > 0).count()
    }
}

impl ByteStore<Piece> for Arena {
    fn read(&self, memory: &Piece, at: u64, length: u64) -> Result<Vec<u8>, Violation> {
        Ok(self.read(memory, at, length).to_vec())
    }

    fn write(&mut self, memory: &Piece, at: u64, bytes: &[u8]) -> Result<(), Violation> {
        self.write(memory, at, bytes);
        Ok(())
    }

    fn copy(&mut self, memory: &Piece, at: u64, length: u64) -> Result<Piece, Violation> {
        let bytes = self.read(memory, at, length).to_vec();
        Ok(self.copy(&bytes))
    }
}

/// The bytes that belong to number `id`.
pub fn content(id: usize, length: u64) -> Vec<u8> {
    let salt = (id as u8).wrapping_mul(167) ^ ((id >> 8) as u8).wrapping_mul(59);
    let byte = |at: u64| salt.wrapping_add(at as u8 ^ ((at >> 8) as u8).wrapping_mul(13));
    (0..length).map(byte).collect()
}

fn range(at: u64, length: u64) -> Range<usize> {
    at as usize..(at + length) as usize
}
