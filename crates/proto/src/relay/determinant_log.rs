//! When an endpoint has taken something in, or has let its time go on: what a new start of it must be told to do the same.
//!
//! A list of them takes few bytes: numbers are counted from the determinant before, and written seven bits to a byte.

use super::byte_log::{ByteLog, Cursor};
use crate::wire::frame::Header;
use crate::wire::{Malformed, frame::Kind};

/// What has come to pass at one poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Determinant {
    /// Polls since the determinant before.
    pub polls: u64,
    /// Frames taken in. None: time has gone on, and something was due.
    pub frames: u32,
    /// By so much time has gone on since the determinant before.
    pub micros: u64,
}

impl Determinant {
    /// What an endpoint says.
    pub fn of(header: &Header) -> Result<Self, Malformed> {
        let &Header { kind, length, sequence: polls, credit: frames, delivered: micros, .. } =
            header;
        debug_assert_eq!(kind, Kind::Determinant);
        if length > 0 || polls == 0 || (frames == 0 && micros == 0) {
            return Err(Malformed("it has taken in nothing, and says so"));
        }
        Ok(Self { polls, frames, micros })
    }

    fn numbers(self) -> [u64; 3] {
        [self.polls, self.frames as u64, self.micros]
    }

    /// Bytes that it takes in a list.
    pub fn bytes(self) -> usize {
        self.numbers().into_iter().map(|number| number_bytes(number) as usize).sum()
    }
}

/// The place of a determinant, and the sums of those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DeterminantPosition {
    pub number: u64,
    pub polls: u64,
    pub micros: u64,
    pub frames: u64,
    pub cursor: Cursor,
}

impl DeterminantPosition {
    /// One determinant on. An endpoint says what it likes.
    fn add(&mut self, determinant: Determinant) {
        self.number += 1;
        self.polls = self.polls.saturating_add(determinant.polls);
        self.micros = self.micros.saturating_add(determinant.micros);
        self.frames = self.frames.saturating_add(determinant.frames as u64);
    }
}

/// See the module head.
#[derive(Debug, Default)]
pub(super) struct DeterminantLog {
    store: ByteLog,
    /// Where what is kept begins.
    start: DeterminantPosition,
    /// The sums of all; its cursor says nothing.
    all: DeterminantPosition,
}

impl DeterminantLog {
    /// So many have been before any was kept; of their sums nothing is known.
    pub fn starting_at(number: u64) -> Self {
        let start = DeterminantPosition { number, ..DeterminantPosition::default() };
        Self { store: ByteLog::default(), start, all: start }
    }

    /// Bytes that they take.
    pub fn bytes(&self) -> u64 {
        self.store.len()
    }

    /// Where what is kept begins.
    pub fn start(&self) -> DeterminantPosition {
        self.start
    }

    /// Behind all that there have been.
    pub fn end(&self) -> DeterminantPosition {
        DeterminantPosition { cursor: self.store.end(), ..self.all }
    }

    /// Behind the first `number`, which are counted from a position before. `None`: there have been fewer.
    pub fn position_after(
        &self,
        mut from: DeterminantPosition,
        number: u64,
    ) -> Option<DeterminantPosition> {
        if number == self.count() {
            return Some(self.end());
        }
        while from.number < number {
            let determinant = self.read(&mut from.cursor)?;
            from.add(determinant);
        }
        Some(from)
    }

    /// Drops what lies before this position, as far as that frees something.
    pub fn trim(&mut self, position: DeterminantPosition) {
        self.store.trim(position.cursor);
        self.start = position;
    }

    /// How many there have been.
    pub fn count(&self) -> u64 {
        self.all.number
    }

    pub fn push(&mut self, determinant: Determinant) {
        let mut list = [0; 3 * NUMBER_BYTES_MAX];
        let mut length = 0;
        for mut number in determinant.numbers() {
            while number >= 1 << 7 {
                list[length] = number as u8 | 1 << 7;
                length += 1;
                number >>= 7;
            }
            list[length] = number as u8;
            length += 1;
        }
        self.store.push(&list[..length]);
        self.all.add(determinant);
    }

    /// Polls up to the last one.
    pub fn polls(&self) -> u64 {
        self.all.polls
    }

    /// Frames that they have taken in.
    pub fn frames(&self) -> u64 {
        self.all.frames
    }

    /// The next one behind the cursor.
    pub fn read(&self, cursor: &mut Cursor) -> Option<Determinant> {
        let mut number = || {
            let mut number = 0;
            for place in 0..NUMBER_BYTES_MAX {
                let [byte] = self.store.take(cursor)?;
                number |= ((byte & 0x7f) as u64) << (7 * place);
                if byte < 1 << 7 {
                    break;
                }
            }
            Some(number)
        };
        Some(Determinant { polls: number()?, frames: number()? as u32, micros: number()? })
    }
}

/// Of 64 bits, seven to a byte.
const NUMBER_BYTES_MAX: usize = 10;

fn number_bytes(number: u64) -> u32 {
    (u64::BITS - number.leading_zeros()).max(1).div_ceil(7)
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;

    #[test]
    fn what_is_listed_is_told_again_in_as_many_bytes_as_were_said() {
        let numbers = [0, 1, 127, 128, 16_383, 16_384, u32::MAX as u64, u64::MAX];
        let determinant = |polls, frames, micros| Determinant { polls, frames, micros };
        let mut all = vec![determinant(1, 1, 0), determinant(1, u32::MAX, u64::MAX)];
        for polls in numbers {
            all.extend(numbers.map(|micros| determinant(polls, polls as u32, micros)));
        }
        let mut list = DeterminantLog::default();
        for determinant in &all {
            let before = list.bytes();
            list.push(*determinant);
            assert_eq!(list.bytes() - before, determinant.bytes() as u64, "{determinant:?}");
        }
        let mut cursor = Cursor::default();
        assert!(core::iter::from_fn(|| list.read(&mut cursor)).eq(all.iter().copied()));
        assert_eq!(list.count(), all.len() as u64);
        assert_eq!(determinant(100, 1, 15_000).bytes(), 4, "the usual one");
    }
}
