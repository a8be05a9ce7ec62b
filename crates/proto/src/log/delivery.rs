//! Encoding of what a poll has delivered, with which a later incarnation delivers the same frames
//! at the same poll.
//!
//! A delivery is a row of numbers in LEB128 (seven bits a byte, the lowest first; the highest bit
//! says that more follow): polls since the last delivery, microseconds by which the clock of the
//! protocol advanced, number of runs, and for each run the process that has sent its frames and how
//! many they are. The frames of a run were delivered one after another. A delivery of one frame
//! takes 5 bytes, unless it comes more than 127 polls or microseconds after the last one.
//!
//! What enters: deliveries, or bytes. What leaves: bytes, or deliveries. What may never happen: an
//! incomplete delivery is taken for a delivery.

use alloc::vec::Vec;

/// Most bytes of one number in LEB128.
const NUMBER_BYTES_MAX: usize = 10;

/// Frames of one process that a poll has delivered one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The process that has sent the frames, by its number on the node.
    pub source: u32,
    /// The number of frames.
    pub frames: u32,
}

/// What a poll has delivered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    /// Polls since the last delivery, this one included.
    pub polls: u64,
    /// Microseconds by which the protocol's clock advanced.
    pub micros: u64,
    /// The frames, in order.
    pub runs: Vec<Run>,
}

/// The bytes are no delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MalformedDelivery;

impl Delivery {
    /// The number of frames.
    pub fn frames(&self) -> u32 {
        self.runs.iter().map(|run| run.frames).sum()
    }

    /// Adds a frame of this process.
    #[inline]
    pub fn add(&mut self, source: u32) {
        match self.runs.last_mut() {
            Some(run) if run.source == source => run.frames += 1,
            _ => self.runs.push(Run { source, frames: 1 }),
        }
    }

    /// Appends the encoded delivery to `bytes`.
    #[inline]
    pub fn emit(&self, bytes: &mut Vec<u8>) {
        put(bytes, self.polls);
        put(bytes, self.micros);
        put(bytes, self.runs.len() as u64);
        for run in &self.runs {
            put(bytes, run.source.into());
            put(bytes, run.frames.into());
        }
    }

    /// Reads the delivery of which `next` returns the bytes.
    ///
    /// # Errors
    /// The bytes end within the delivery, or a number is too large.
    pub fn parse(mut next: impl FnMut() -> Option<u8>) -> Result<Delivery, MalformedDelivery> {
        let (polls, micros) = (take(&mut next)?, take(&mut next)?);
        let mut runs = Vec::new();
        for _ in 0..take(&mut next)? {
            let [source, frames] = [take(&mut next)?, take(&mut next)?];
            let small = |number| u32::try_from(number).map_err(|_| MalformedDelivery);
            runs.push(Run { source: small(source)?, frames: small(frames)? });
        }
        Ok(Delivery { polls, micros, runs })
    }
}

#[inline]
fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take(next: &mut impl FnMut() -> Option<u8>) -> Result<u64, MalformedDelivery> {
    let mut number = 0_u64;
    for place in 0..NUMBER_BYTES_MAX as u32 {
        let byte = next().ok_or(MalformedDelivery)?;
        let bits = u64::from(byte & 0x7f);
        if bits << (7 * place) >> (7 * place) != bits {
            return Err(MalformedDelivery);
        }
        number |= bits << (7 * place);
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(MalformedDelivery)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delivery(polls: u64, micros: u64, sources: &[u32]) -> Delivery {
        let mut delivery = Delivery { polls, micros, runs: Vec::new() };
        sources.iter().for_each(|source| delivery.add(*source));
        delivery
    }

    #[test]
    fn what_was_written_is_read() {
        let all = [
            delivery(1, 0, &[3]),
            delivery(300, 5_000_000, &[0, 0, 0, 63, 0, 2, 2]),
            delivery(u64::MAX, u64::MAX, &[u32::MAX]),
            delivery(7, 1, &[]),
        ];
        let mut bytes = Vec::new();
        all.iter().for_each(|delivery| delivery.emit(&mut bytes));
        let mut left = bytes.iter().copied();
        for delivery in &all {
            assert_eq!(Delivery::parse(|| left.next()).as_ref(), Ok(delivery));
        }
        assert_eq!(left.next(), None);
        assert_eq!([all[0].frames(), all[1].frames(), all[3].frames()], [1, 7, 0]);
    }

    #[test]
    fn a_usual_delivery_takes_five_bytes() {
        let mut bytes = Vec::new();
        delivery(9, 40, &[1, 1]).emit(&mut bytes);
        assert_eq!(bytes.len(), 5);
    }

    #[test]
    fn a_part_or_a_number_that_is_too_large_is_refused() {
        let mut bytes = Vec::new();
        delivery(300, 200, &[1, 2]).emit(&mut bytes);
        for length in 0..bytes.len() {
            let mut part = bytes[..length].iter().copied();
            assert_eq!(Delivery::parse(|| part.next()), Err(MalformedDelivery), "{length}");
        }
        for bytes in [&[0xff; 11][..], &[1, 1, 1, 0xff, 0xff, 0xff, 0xff, 0x7f, 1]] {
            let mut bytes = bytes.iter().copied();
            assert_eq!(Delivery::parse(|| bytes.next()), Err(MalformedDelivery));
        }
    }
}
