//! Checks of what goes over a network: filled in when a frame leaves, looked at when it arrives.
//!
//! The header's check stands for header and head, with zeroes for what relays change and for itself; a payload's stands
//! before it. A frame whose header does not pass is not understood any further: in a stream even its length is in
//! doubt, so the stream is given up and made anew. A corrupt payload is asked for again.

use std::io;

use landbridge_drive::checksum::{Checksum, RunningChecksum};
use landbridge_drive::link::stream::Piece;
use landbridge_proto::endpoint::OutgoingFrame;
use landbridge_proto::limit::CHECKSUM_BYTES;
use landbridge_proto::wire::Malformed;
use landbridge_proto::wire::frame::{CHECKSUM_AT, HEADER_BYTES, Header};
use landbridge_proto::wire::kind_header::KindHeader;

use super::links::Link;
use super::memory::Bytes;

/// A payload that is arriving in pieces.
pub struct IncomingChecksum {
    expected: u32,
    running: RunningChecksum,
    /// Where it arrives.
    pieces: Vec<Piece>,
    /// Bytes of it that have been summed.
    done: usize,
    /// Room for what fits nowhere else, so that it can be summed.
    _excess: Vec<u8>,
}

// SAFETY: the pieces are memory of operations in flight, whatever thread drives the engine.
unsafe impl Send for IncomingChecksum {}

/// Fills in the checks of a frame with `payload`: which memory, from where, how many bytes. Gives the copy of it that the
/// frame wants, made in the same pass.
///
/// # Safety
/// The payload's memory is valid.
#[inline]
pub unsafe fn fill_in(
    sum: Checksum,
    frame: &mut OutgoingFrame<'_, Bytes>,
    payload: Option<(&Bytes, u64, u64)>,
) -> Option<Bytes> {
    if sum == Checksum::Off && !frame.wants_copy {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { fill_in_all(sum, frame, payload) }
}

/// As [`fill_in`].
unsafe fn fill_in_all(
    sum: Checksum,
    frame: &mut OutgoingFrame<'_, Bytes>,
    payload: Option<(&Bytes, u64, u64)>,
) -> Option<Bytes> {
    let (checksum_at, wants_copy) = (frame.checksum_at(), frame.wants_copy);
    let front = frame.front_mut();
    let mut running = sum.start();
    if let Some(at) = checksum_at {
        running.update(&front[at + CHECKSUM_BYTES..]);
    }
    // SAFETY: the caller's promise.
    let copy = payload.and_then(|(memory, at, len)| unsafe {
        if wants_copy {
            return Some(memory.keep(at, len, &mut running));
        }
        if checksum_at.is_some() {
            memory.sum(at, len, &mut running);
        }
        None
    });
    if let Some(at) = checksum_at {
        front[at..at + CHECKSUM_BYTES].copy_from_slice(&running.value().to_le_bytes());
    }
    if sum != Checksum::Off {
        let check = sum.of(&front[..checksum_at.unwrap_or(front.len())]);
        front[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&check.to_le_bytes());
    }
    copy
}

/// Fills in the check of header and head alone: the payload's comes with its copy.
#[inline]
pub fn fill_in_front<M>(sum: Checksum, frame: &mut OutgoingFrame<'_, M>) {
    if sum == Checksum::Off {
        return;
    }
    let checksum_at = frame.checksum_at();
    let front = frame.front_mut();
    let check = sum.of(&front[..checksum_at.unwrap_or(front.len())]);
    front[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&check.to_le_bytes());
}

/// Reads a header.
///
/// # Errors
/// If it is none: whoever sent it breaks the protocol, unless it can have been corrupted on the way.
#[inline(always)]
pub fn parse(sum: Checksum, frame: &[u8]) -> io::Result<Header> {
    Header::parse(frame).map_err(|bad| malformed(sum, bad))
}

/// What cannot be, in a header that has not been verified.
#[cold]
pub fn malformed(sum: Checksum, bad: Malformed) -> io::Error {
    match sum {
        Checksum::Off => io::Error::new(io::ErrorKind::InvalidData, bad.0),
        _ => corrupt(bad.0),
    }
}

/// Whether header and head, at the front of `frame`, are what was sent.
///
/// # Errors
/// If not.
#[inline]
pub fn verify_front(sum: Checksum, header: &Header, frame: &[u8]) -> io::Result<()> {
    let size = HEADER_BYTES + KindHeader::size(header.kind, header.flags);
    header.verify(&frame[..size], |bytes| sum.of(bytes)).map_err(|bad| corrupt(bad.0))
}

/// The check of the payload, behind a head of `head` bytes.
#[inline]
pub fn check_in(body: &[u8], head: usize) -> u32 {
    u32::from_le_bytes(body[head..head + CHECKSUM_BYTES].try_into().unwrap_or_default())
}

/// What arrives by a path is not what was sent: the path is better made anew.
#[cold]
pub fn corrupt(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, CorruptFrame(why))
}

/// Whether an error is one of [`corrupt`].
pub fn was_corrupt(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<CorruptFrame>())
}

/// The reason of such an error.
#[derive(Debug)]
struct CorruptFrame(&'static str);

impl std::fmt::Display for CorruptFrame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for CorruptFrame {}

impl IncomingChecksum {
    /// Whether the whole payload is what was sent.
    pub fn is_valid(&self) -> bool {
        self.running.value() == self.expected
    }
}

impl Link {
    /// A payload begins to arrive in `pieces`, which are lengthened by what would go nowhere.
    pub fn begin_sum(&mut self, expected: u32, pieces: &mut Vec<Piece>, skip: &mut usize) {
        let mut excess = vec![0; std::mem::take(skip)];
        if !excess.is_empty() {
            pieces.push(Piece { base: excess.as_mut_ptr(), len: excess.len() });
        }
        let (running, pieces) = (self.sum.start(), pieces.clone());
        self.summing =
            Some(IncomingChecksum { expected, running, pieces, done: 0, _excess: excess });
    }

    /// Sums what has arrived since, while it is in the caches.
    #[inline]
    pub fn sum_arrived(&mut self) {
        let Some(summing) = &mut self.summing else {
            return;
        };
        let super::handshake::Carrier::Stream(stream) = &self.carrier else {
            return;
        };
        let whole: usize = summing.pieces.iter().map(|piece| piece.len).sum();
        let arrived = whole - stream.payload_left().min(whole);
        let mut at = 0;
        for piece in &summing.pieces {
            let (from, to) = (summing.done.max(at), arrived.min(at + piece.len));
            if from < to {
                // SAFETY: the stream has written these bytes of memory that is ours until the payload is complete.
                let bytes =
                    unsafe { std::slice::from_raw_parts(piece.base.add(from - at), to - from) };
                summing.running.update(bytes);
            }
            at += piece.len;
        }
        summing.done = arrived;
    }

    /// What is arriving goes nowhere from now on.
    pub fn discard_rest(&mut self) {
        self.summing = None;
        if let super::handshake::Carrier::Stream(stream) = &mut self.carrier {
            stream.discard_rest();
        }
    }
}
