//! Checksums of frames that cross a network: filled in when a frame is sent, verified when it
//! arrives.
//!
//! The header's checksum covers header and kind header, with zeroes in place of the fields that
//! relays change and of the checksum itself. The payload's checksum lies in front of the payload. A
//! frame with a corrupt header is not processed any further: on a stream even its length is
//! unreliable, so the stream is closed and dialled again. A corrupt payload is retransmitted.

use std::io;

use landbridge_drive::checksum::{Checksum, RunningChecksum};
use landbridge_drive::link::stream::Piece;
use landbridge_proto::endpoint::OutgoingFrame;
use landbridge_proto::limit::CHECKSUM_BYTES;
use landbridge_proto::wire::Malformed;
use landbridge_proto::wire::frame::{CHECKSUM_AT, HEADER_BYTES, Header};
use landbridge_proto::wire::kind_header::KindHeader;

use super::memory::Bytes;

/// The checksum of a payload that arrives in pieces.
pub struct IncomingChecksum {
    expected: u32,
    running: RunningChecksum,
    /// Destination of the payload.
    pieces: Vec<Piece>,
    /// Bytes that have been summed.
    done: usize,
    /// Memory for the part of the payload without a destination, so that this part can be summed.
    _excess: Vec<u8>,
}

// SAFETY: the pieces are memory of operations in flight, whatever thread drives the engine.
unsafe impl Send for IncomingChecksum {}

/// Fills in the checksums of a frame with `payload`: memory, offset and length in bytes. Returns
/// the copy of the payload that the frame wants, made in the same pass.
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
    // SAFETY: the caller guarantees valid memory.
    unsafe { fill_in_all(sum, frame, payload) }
}

/// Fills in the checksums, and makes the copy.
///
/// # Safety
/// The payload's memory is valid.
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
    // SAFETY: the caller guarantees valid memory.
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

/// Fills in the checksum of header and kind header only: the payload's checksum is computed when
/// the payload is copied.
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

/// Parses a header.
///
/// # Errors
/// The bytes are no valid header: the sender breaks the protocol, unless the bytes may have been
/// corrupted on the network.
#[inline(always)]
pub fn parse(sum: Checksum, frame: &[u8]) -> io::Result<Header> {
    Header::parse(frame).map_err(|bad| malformed(sum, bad))
}

/// The error for an invalid header that has not been verified.
#[cold]
pub fn malformed(sum: Checksum, bad: Malformed) -> io::Error {
    match sum {
        Checksum::Off => io::Error::new(io::ErrorKind::InvalidData, bad.0),
        _ => corrupt(bad.0),
    }
}

/// Verifies the checksum of header and kind header at the front of `frame`.
///
/// # Errors
/// The checksum does not match.
#[inline]
pub fn verify_front(sum: Checksum, header: &Header, frame: &[u8]) -> io::Result<()> {
    let size = HEADER_BYTES + KindHeader::size(header.kind, header.flags);
    header.verify(&frame[..size], |bytes| sum.of(bytes)).map_err(|bad| corrupt(bad.0))
}

/// The payload's checksum, behind a kind header of `head` bytes.
#[inline]
pub fn check_in(body: &[u8], head: usize) -> u32 {
    u32::from_le_bytes(body[head..head + CHECKSUM_BYTES].try_into().unwrap_or_default())
}

/// The error for corrupt bytes on a path, which should be closed and dialled again.
#[cold]
pub fn corrupt(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, CorruptFrame(why))
}

/// Whether an error was made by [`corrupt`].
pub fn was_corrupt(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<CorruptFrame>())
}

/// The reason of a [`corrupt`] error.
#[derive(Debug)]
struct CorruptFrame(&'static str);

impl std::fmt::Display for CorruptFrame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for CorruptFrame {}

impl IncomingChecksum {
    /// Begins the checksum of a payload that arrives in `pieces`. The `skip` bytes without a
    /// destination get a piece of their own.
    pub fn new(sum: Checksum, expected: u32, pieces: &mut Vec<Piece>, skip: &mut usize) -> Self {
        let mut excess = vec![0; std::mem::take(skip)];
        if !excess.is_empty() {
            pieces.push(Piece { base: excess.as_mut_ptr(), len: excess.len() });
        }
        let (running, pieces) = (sum.start(), pieces.clone());
        Self { expected, running, pieces, done: 0, _excess: excess }
    }

    /// Sums the bytes that have arrived since the last call, while they are in the caches. `left`:
    /// bytes that have not arrived.
    ///
    /// # Safety
    /// All other bytes were written, in memory that belongs to the engine until the payload is
    /// complete.
    #[inline]
    pub unsafe fn update(&mut self, left: usize) {
        let whole: usize = self.pieces.iter().map(|piece| piece.len).sum();
        let arrived = whole - left.min(whole);
        let mut at = 0;
        for piece in &self.pieces {
            let (from, to) = (self.done.max(at), arrived.min(at + piece.len));
            if from < to {
                // SAFETY: the caller guarantees that these bytes were written, and valid memory.
                let bytes =
                    unsafe { std::slice::from_raw_parts(piece.base.add(from - at), to - from) };
                self.running.update(bytes);
            }
            at += piece.len;
        }
        self.done = arrived;
    }

    /// Whether the checksum of the whole payload matches.
    pub fn is_valid(&self) -> bool {
        self.running.value() == self.expected
    }
}
