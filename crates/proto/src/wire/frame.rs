//! The frame: a range of a channel's bytes behind a fixed header.
//!
//! ```text
//!  0  u32 length     bytes after the header: head and payload
//!  4  u8  kind       what the head is; never 0, so a zeroed word is "no frame"
//!  5  u8  flags
//!  6  u8  hops       relays passed so far
//!  7  u8  reserved   0
//!  8  u32 source     endpoint that sends
//! 12  u32 target     endpoint that receives
//! 16  u64 sequence   number of the first byte after the header in its channel
//! 24  u64 delivered  all bytes of the opposite channel below this have been taken in
//! 32  u32 credit     eager bytes of the opposite channel released so far, modulo 2^32
//! 36  u32 check      0 (integrity comes with the next protocol version)
//! ```

use super::{Malformed, u32_at, u64_at};
use crate::id::Address;
use crate::limit::{FRAME_BODY_BYTES_MAX, HOPS_MAX};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 40;

/// What a frame carries. Retired numbers are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// First piece of an untagged message.
    Message = 1,
    /// First piece of a tagged message.
    Tagged = 2,
    /// The receiver lets more of a long message come.
    Grant = 3,
    /// A further piece of a long message.
    Data = 4,
    /// The receiver has read a long message out of the sender's memory.
    Pulled = 5,
    /// Nothing but the header's `delivered` and `credit`.
    Ack = 6,
    /// Bytes for registered memory.
    Write = 7,
    /// Asks for bytes of registered memory.
    Read = 8,
    /// Bytes that were asked for.
    ReadData = 9,
    /// An atomic operation on registered memory.
    Atomic = 10,
    /// What an atomic operation found.
    AtomicReply = 11,
    /// A remote memory operation that was refused.
    Refused = 12,
    /// The sender will send nothing more.
    Goodbye = 13,
    /// From a relay: the target of a frame cannot be reached.
    Unreachable = 14,
    /// A further piece of a long message that its first piece has announced: it needs no grant.
    Ahead = 15,
}

impl Kind {
    /// Every kind, for tables and tests.
    pub const ALL: [Kind; 15] = [
        Kind::Message,
        Kind::Tagged,
        Kind::Grant,
        Kind::Data,
        Kind::Pulled,
        Kind::Ack,
        Kind::Write,
        Kind::Read,
        Kind::ReadData,
        Kind::Atomic,
        Kind::AtomicReply,
        Kind::Refused,
        Kind::Goodbye,
        Kind::Unreachable,
        Kind::Ahead,
    ];

    fn from_number(number: u8) -> Option<Kind> {
        Self::ALL.get((number as usize).wrapping_sub(1)).copied()
    }
}

/// Bits of the header's `flags`.
pub mod flag {
    /// The message carries remote completion data.
    pub const CQ_DATA: u8 = 1;
    /// The message is longer than this piece; the head is the long one.
    pub const LONG: u8 = 2;
    /// The sender waits for `delivered` to pass this frame.
    pub const WANT_ACK: u8 = 4;
    /// Grant: the receiver takes no more than the limit; the message ends there.
    pub const CUT: u8 = 8;
    /// Every bit that means something.
    pub const ALL: u8 = CQ_DATA | LONG | WANT_ACK | CUT;
}

/// The meaning of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes after the header, at most [`FRAME_BODY_BYTES_MAX`].
    pub length: u32,
    /// What the head is.
    pub kind: Kind,
    /// Bits of [`flag`].
    pub flags: u8,
    /// Relays passed, at most [`HOPS_MAX`].
    pub hops: u8,
    /// Endpoint that sends.
    pub source: Address,
    /// Endpoint that receives.
    pub target: Address,
    /// Number of the first byte after the header.
    pub sequence: u64,
    /// See the module head.
    pub delivered: u64,
    /// See the module head.
    pub credit: u32,
}

impl Header {
    /// Writes the header to the front of `bytes`.
    ///
    /// # Panics
    /// If `bytes` is shorter than [`HEADER_BYTES`].
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) {
        let bytes = &mut bytes[..HEADER_BYTES];
        bytes[0..4].copy_from_slice(&self.length.to_le_bytes());
        bytes[4..8].copy_from_slice(&[self.kind as u8, self.flags, self.hops, 0]);
        bytes[8..12].copy_from_slice(&self.source.0.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.target.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.delivered.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.credit.to_le_bytes());
        bytes[36..40].fill(0);
    }

    /// Reads and checks a header.
    ///
    /// # Errors
    /// If it is short, of an unknown kind or flag, or longer than any frame may be.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Header, Malformed> {
        if bytes.len() < HEADER_BYTES {
            return Err(Malformed("a frame header is cut off"));
        }
        let header = Header {
            length: u32_at(bytes, 0),
            kind: Kind::from_number(bytes[4]).ok_or(Malformed("a frame is of an unknown kind"))?,
            flags: bytes[5],
            hops: bytes[6],
            source: Address(u32_at(bytes, 8)),
            target: Address(u32_at(bytes, 12)),
            sequence: u64_at(bytes, 16),
            delivered: u64_at(bytes, 24),
            credit: u32_at(bytes, 32),
        };
        header.check(bytes[7], u32_at(bytes, 36))?;
        Ok(header)
    }

    fn check(&self, reserved: u8, check: u32) -> Result<(), Malformed> {
        if self.length as usize > FRAME_BODY_BYTES_MAX {
            return Err(Malformed("a frame is longer than frames may be"));
        }
        if self.flags & !flag::ALL != 0 || reserved != 0 || check != 0 {
            return Err(Malformed("a frame header has unknown bits set"));
        }
        if self.hops > HOPS_MAX {
            return Err(Malformed("a frame has passed too many relays"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_emitted_is_parsed_for_every_kind() {
        for kind in Kind::ALL {
            let mut bytes = [0xaa; HEADER_BYTES];
            let header = sample(kind);
            header.emit(&mut bytes);
            assert_eq!(Header::parse(&bytes), Ok(header));
            assert_eq!(Kind::from_number(kind as u8), Some(kind));
        }
    }

    #[test]
    fn zeroes_are_no_frame() {
        assert!(Header::parse(&[0; HEADER_BYTES]).is_err());
    }

    #[test]
    fn absurd_lengths_flags_and_hops_are_refused() {
        let mut bytes = [0; HEADER_BYTES];
        sample(Kind::Data).emit(&mut bytes);
        for (at, value) in [(2, 0x11), (3, 0xff), (4, 16), (5, 0x80), (6, 17), (7, 1), (39, 1)] {
            let mut broken = bytes;
            broken[at] = value;
            assert!(Header::parse(&broken).is_err(), "byte {at}");
        }
        assert!(Header::parse(&bytes[..39]).is_err());
    }

    fn sample(kind: Kind) -> Header {
        Header {
            length: 77,
            kind,
            flags: flag::LONG,
            hops: 3,
            source: Address::new(7, 1),
            target: Address::new(9, 0),
            sequence: u64::MAX - 1,
            delivered: 1 << 40,
            credit: 5,
        }
    }
}
