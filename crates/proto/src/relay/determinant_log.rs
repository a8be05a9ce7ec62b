//! Determinants of one endpoint: at which polls the endpoint delivered frames or advanced its
//! clock. A restarted incarnation needs this log to repeat the previous one.
//!
//! The log takes few bytes: each number is counted from the previous determinant, and written with
//! seven bits to a byte.

use super::byte_log::{ByteLog, Cursor};
use crate::replay::Determinant;

fn numbers(determinant: Determinant) -> [u64; 3] {
    [determinant.polls, determinant.frames.into(), determinant.micros]
}

/// Bytes that a determinant takes in the log.
pub(super) fn bytes_of(determinant: Determinant) -> usize {
    numbers(determinant).into_iter().map(|number| number_bytes(number) as usize).sum()
}

/// Position of a determinant in the log, with the sums over all determinants before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DeterminantPosition {
    pub number: u64,
    pub polls: u64,
    pub micros: u64,
    pub frames: u64,
    pub cursor: Cursor,
}

impl DeterminantPosition {
    /// Adds one determinant. The sums saturate, because an endpoint may send any numbers.
    fn add(&mut self, determinant: Determinant) {
        self.number += 1;
        self.polls = self.polls.saturating_add(determinant.polls);
        self.micros = self.micros.saturating_add(determinant.micros);
        self.frames = self.frames.saturating_add(determinant.frames as u64);
    }
}

/// Determinants of one endpoint: see the module head.
#[derive(Debug, Default)]
pub(super) struct DeterminantLog {
    store: ByteLog,
    /// Position of the first kept determinant.
    start: DeterminantPosition,
    /// Sums over all determinants; the cursor of this position is meaningless.
    all: DeterminantPosition,
}

impl DeterminantLog {
    /// An empty log, before which `number` determinants were dropped; the log knows no sums of
    /// these.
    pub fn starting_at(number: u64) -> Self {
        let start = DeterminantPosition { number, ..DeterminantPosition::default() };
        Self { store: ByteLog::default(), start, all: start }
    }

    /// Bytes of the kept determinants.
    pub fn bytes(&self) -> u64 {
        self.store.len()
    }

    /// Position of the first kept determinant.
    pub fn start(&self) -> DeterminantPosition {
        self.start
    }

    /// Position after the last determinant.
    pub fn end(&self) -> DeterminantPosition {
        DeterminantPosition { cursor: self.store.end(), ..self.all }
    }

    /// Position after the first `number` determinants, counted onwards from `from`. `None`: the log
    /// has fewer determinants.
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

    /// Drops the determinants before this position, as far as whole blocks become free.
    pub fn trim(&mut self, position: DeterminantPosition) {
        self.store.trim(position.cursor);
        self.start = position;
    }

    /// Number of determinants ever appended.
    pub fn count(&self) -> u64 {
        self.all.number
    }

    pub fn push(&mut self, determinant: Determinant) {
        let mut list = [0; 3 * NUMBER_BYTES_MAX];
        let mut length = 0;
        for mut number in numbers(determinant) {
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

    /// Polls up to the last determinant.
    pub fn polls(&self) -> u64 {
        self.all.polls
    }

    /// Number of frames delivered by all determinants.
    pub fn frames(&self) -> u64 {
        self.all.frames
    }

    /// The determinant after the cursor, which advances.
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

/// Bytes of a 64-bit number, with seven bits to a byte.
const NUMBER_BYTES_MAX: usize = 10;

fn number_bytes(number: u64) -> u32 {
    (u64::BITS - number.leading_zeros()).max(1).div_ceil(7)
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;

    #[test]
    fn what_is_listed_is_emitted_again_in_as_many_bytes_as_were_said() {
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
            assert_eq!(list.bytes() - before, bytes_of(*determinant) as u64, "{determinant:?}");
        }
        let mut cursor = Cursor::default();
        assert!(core::iter::from_fn(|| list.read(&mut cursor)).eq(all.iter().copied()));
        assert_eq!(list.count(), all.len() as u64);
        assert_eq!(bytes_of(determinant(100, 1, 15_000)), 4, "the usual one");
    }

    #[test]
    fn the_position_after_any_determinant_is_known_without_reading_all() {
        let mut list = DeterminantLog::default();
        let mut positions = vec![list.end()];
        for number in 1..2_000_u64 {
            list.push(Determinant { polls: number, frames: 1 + number as u32 % 3, micros: number });
            positions.push(list.end());
        }
        let sums = |position: DeterminantPosition| {
            (position.number, position.polls, position.frames, position.micros)
        };
        for (number, position) in positions.iter().enumerate() {
            let counted = list.position_after(positions[0], number as u64).unwrap();
            assert_eq!(sums(counted), sums(*position), "{number}");
            let (mut one, mut other) = (counted.cursor, position.cursor);
            assert_eq!(list.read(&mut one), list.read(&mut other));
        }
        assert!(list.position_after(positions[0], 2_000).is_none());
    }
}
