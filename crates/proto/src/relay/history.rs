//! What brings a process that was killed back to where it was: all that its relay has given it, when it took that in,
//! and what it has sent since.
//!
//! A process is deterministic but for what it takes in, and when. So a new start of it that is given the same frames,
//! in the same order, at the same polls ([`Kind::Intake`]), does the same and sends the same. What the earlier start has
//! sent already is compared and goes nowhere: nobody else notices.
//!
//! What may never happen: a new start sends something else than the earlier one, and anybody is given it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::id::Address;
use crate::route::queue::Pool;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};

use super::notice::empty;
use super::port::Port;

/// See the module head.
#[derive(Debug, Default)]
pub(super) struct History {
    /// Frames that were given to it, in order.
    given: Vec<u8>,
    /// After how many polls it has taken in how many of them.
    intakes: Vec<(u64, u32)>,
    /// A digest of each frame that it has sent.
    sent: Vec<u64>,
    /// Of these, how many its present start has sent.
    repeated: usize,
}

/// A frame that an endpoint sends, compared with what its earlier start has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sending {
    /// The earlier one had not come so far.
    New(u64),
    /// The same.
    Repeated,
    /// Something else.
    Other,
}

impl History {
    pub fn give(&mut self, frame: &[u8]) {
        self.given.extend_from_slice(frame);
    }

    pub fn take_in(&mut self, polls: u64, frames: u32) {
        self.intakes.push((polls, frames));
    }

    pub fn compare(&mut self, frame: &[u8]) -> Sending {
        let digest = digest(frame);
        match self.sent.get(self.repeated) {
            None => Sending::New(digest),
            Some(before) if *before == digest => {
                self.repeated += 1;
                Sending::Repeated
            }
            Some(_) => Sending::Other,
        }
    }

    /// It has been passed on.
    pub fn note_sent(&mut self, digest: u64) {
        self.sent.push(digest);
        self.repeated += 1;
    }

    /// A new start of `address` begins: it is told everything once more.
    pub fn replay(&mut self, address: Address, port: &mut Port, pool: &mut Pool) {
        self.repeated = 0;
        let intakes: VecDeque<(u64, u32)> = self.intakes.iter().copied().chain([(0, 0)]).collect();
        for (polls, frames) in intakes {
            let intake = empty(Kind::Intake, Address::ANONYMOUS, address);
            let intake = Header { sequence: polls, credit: frames, ..intake };
            let mut bytes = [0; HEADER_BYTES];
            intake.emit(&mut bytes);
            port.push_notice(pool, &bytes, &intake);
        }
        let mut rest = &self.given[..];
        while let Ok(header) = Header::parse(rest) {
            let (frame, others) = rest.split_at(HEADER_BYTES + header.length as usize);
            port.push_notice(pool, frame, &header);
            rest = others;
        }
    }

    /// Frames given and sent, and bytes kept.
    pub fn size(&self) -> (usize, usize, usize) {
        (self.intakes.len(), self.sent.len(), self.given.len())
    }
}

/// Of all bytes of a frame.
fn digest(frame: &[u8]) -> u64 {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut words = frame.chunks_exact(8);
    for word in &mut words {
        // Chunks of eight bytes have eight bytes.
        let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
        state = (state ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29);
    }
    for byte in words.remainder() {
        state = (state ^ *byte as u64).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29);
    }
    state
}
