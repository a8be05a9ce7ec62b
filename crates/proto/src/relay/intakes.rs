//! When an endpoint has taken something in, or has let its time go on: what a new start of it must be told to do the same.
//!
//! A list of them takes few bytes: numbers are counted from the intake before, and written seven bits to a byte.

use super::store::{Cursor, Store};
use crate::wire::frame::Header;
use crate::wire::{Malformed, frame::Kind};

/// What has come to pass at one poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Intake {
    /// Polls since the intake before.
    pub polls: u64,
    /// Frames taken in. None: time has gone on, and something was due.
    pub frames: u32,
    /// By so much time has gone on since the intake before.
    pub micros: u64,
}

impl Intake {
    /// What an endpoint says.
    pub fn of(header: &Header) -> Result<Self, Malformed> {
        let &Header { kind, length, sequence: polls, credit: frames, delivered: micros, .. } =
            header;
        debug_assert_eq!(kind, Kind::Intake);
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

/// The place of an intake, and the sums of those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Spot {
    pub number: u64,
    pub polls: u64,
    pub micros: u64,
    pub frames: u64,
    pub cursor: Cursor,
}

impl Spot {
    /// One intake on. An endpoint says what it likes.
    fn add(&mut self, intake: Intake) {
        self.number += 1;
        self.polls = self.polls.saturating_add(intake.polls);
        self.micros = self.micros.saturating_add(intake.micros);
        self.frames = self.frames.saturating_add(intake.frames as u64);
    }
}

/// See the module head.
#[derive(Debug, Default)]
pub(super) struct Intakes {
    store: Store,
    /// Where what is kept begins.
    start: Spot,
    /// The sums of all; its cursor says nothing.
    all: Spot,
}

impl Intakes {
    /// So many have been before any was kept; of their sums nothing is known.
    pub fn behind(number: u64) -> Self {
        let start = Spot { number, ..Spot::default() };
        Self { store: Store::default(), start, all: start }
    }

    /// Bytes that they take.
    pub fn bytes(&self) -> u64 {
        self.store.len()
    }

    /// Where what is kept begins.
    pub fn start(&self) -> Spot {
        self.start
    }

    /// Behind all that there have been.
    pub fn end(&self) -> Spot {
        Spot { cursor: self.store.end(), ..self.all }
    }

    /// Behind the first `number`, which are counted from a spot before. `None`: there have been fewer.
    pub fn spot(&self, mut from: Spot, number: u64) -> Option<Spot> {
        if number == self.count() {
            return Some(self.end());
        }
        while from.number < number {
            let intake = self.read(&mut from.cursor)?;
            from.add(intake);
        }
        Some(from)
    }

    /// Drops what lies before this spot, as far as that frees something.
    pub fn trim(&mut self, spot: Spot) {
        self.store.trim(spot.cursor);
        self.start = spot;
    }

    /// How many there have been.
    pub fn count(&self) -> u64 {
        self.all.number
    }

    pub fn push(&mut self, intake: Intake) {
        let mut list = [0; 3 * NUMBER_BYTES_MAX];
        let mut length = 0;
        for mut number in intake.numbers() {
            while number >= 1 << 7 {
                list[length] = number as u8 | 1 << 7;
                length += 1;
                number >>= 7;
            }
            list[length] = number as u8;
            length += 1;
        }
        self.store.push(&list[..length]);
        self.all.add(intake);
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
    pub fn read(&self, cursor: &mut Cursor) -> Option<Intake> {
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
        Some(Intake { polls: number()?, frames: number()? as u32, micros: number()? })
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
        let intake = |polls, frames, micros| Intake { polls, frames, micros };
        let mut all = vec![intake(1, 1, 0), intake(1, u32::MAX, u64::MAX)];
        for polls in numbers {
            all.extend(numbers.map(|micros| intake(polls, polls as u32, micros)));
        }
        let mut list = Intakes::default();
        for intake in &all {
            let before = list.bytes();
            list.push(*intake);
            assert_eq!(list.bytes() - before, intake.bytes() as u64, "{intake:?}");
        }
        let mut cursor = Cursor::default();
        assert!(core::iter::from_fn(|| list.read(&mut cursor)).eq(all.iter().copied()));
        assert_eq!(list.count(), all.len() as u64);
        assert_eq!(intake(100, 1, 15_000).bytes(), 4, "the usual one");
    }
}
