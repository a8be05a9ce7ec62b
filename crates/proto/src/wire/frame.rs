//! The frame: a range of a channel's bytes behind a fixed header.
//!
//! ```text
//!  0  u32 length     bytes after the header: head, checksum of the payload, payload
//!  4  u8  kind       the kind of the head; never 0, so a zeroed word is "no frame"
//!  5  u8  flags
//!  6  u8  hops       relays passed so far
//!  7  u8  framing CRC of length, kind and flags: see [`framing_crc`](mod@super::framing_crc)
//!  8  u32 source     endpoint that sends
//! 12  u32 target     endpoint that receives
//! 16  u64 sequence   number of the frame's first byte in its channel, or of the next byte for
//!                    kinds without numbered bytes
//! 24  u64 delivered  all bytes of the opposite channel below this number have been delivered
//! 32  u32 credit     eager bytes of the opposite channel released so far, modulo 2^32
//! 36  u32 check      checksum of header and head, with 0 for `hops` and for the checksum; 0
//!                    without [`flag::CHECKED`]. Frames of kinds that are
//!                    [`Kind::is_about_log`] always have a checksum of their numbers here
//! ```
//!
//! **Numbers.** The bytes of a channel are those of the heads and payloads of its frames, in the
//! order in which the frames are first sent. A retransmitted frame keeps its numbers. A frame that
//! is cut for another path becomes [`Kind::Fragment`]s, whose payload is a range of the bytes of
//! the frame. Checksums, and frames of kinds that are not [`Kind::is_numbered`], are no bytes of
//! the channel.

use super::framing_crc::framing_crc;
use super::{Malformed, u32_at, u64_at};
use crate::id::Address;
use crate::limit::{CHECKSUM_BYTES, FRAME_BODY_BYTES_MAX, HOPS_MAX, KIND_HEADER_BYTES_MAX};

/// The length of a header in bytes.
pub const HEADER_BYTES: usize = 40;

/// The offset in a header of the number of relays passed.
pub const HOPS_AT: usize = 6;
/// The offset in a header of the checksum of header and head.
pub const CHECKSUM_AT: usize = 36;

/// What a frame carries. Retired numbers are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// The first piece of an untagged message.
    Message = 1,
    /// The first piece of a tagged message.
    Tagged = 2,
    /// The receiver grants more of a long message.
    Grant = 3,
    /// A further, granted piece of a long message.
    Data = 4,
    /// The receiver has read a long message out of the sender's memory.
    Pulled = 5,
    /// An acknowledgement: only the header's `delivered` and `credit`.
    Ack = 6,
    /// Bytes to write to registered memory.
    Write = 7,
    /// A request for bytes of registered memory.
    Read = 8,
    /// Bytes of registered memory that were requested.
    ReadData = 9,
    /// An atomic operation on registered memory.
    Atomic = 10,
    /// The old values that an atomic operation found.
    AtomicReply = 11,
    /// The refusal of a remote memory operation.
    Refused = 12,
    /// The sender delivers nothing new from now on. Frames of operations that the sender started
    /// before may still follow.
    Goodbye = 13,
    /// From a relay: the target of a frame is unreachable.
    Unreachable = 14,
    /// A further piece of a long message that the first piece has announced: it needs no grant.
    Ahead = 15,
    /// A range of the bytes of a frame.
    Fragment = 16,
    /// The ranges of the opposite channel that have arrived (a selective acknowledgement).
    Sack = 17,
    /// A request for a [`Kind::StatusReply`].
    StatusRequest = 18,
    /// Bytes of the opposite channel have arrived corrupt.
    Nack = 19,
    /// From a relay: bytes of the channel to the source of this frame were lost on the way.
    Lost = 20,
    /// Another address at which the sender accepts TCP connections.
    AddressAdvertisement = 21,
    /// One determinant of an endpoint: `sequence` polls after the previous determinant the endpoint
    /// delivered `credit` frames, and its clock had advanced by `delivered` microseconds. From the
    /// endpoint to its home relay, and from the relay in the replay.
    Determinant = 22,
    /// From an endpoint to its home relay: the recorded nondeterminism (clocks and random numbers
    /// that the program has read) from byte `sequence` of the record on. `delivered` is the number
    /// of polls for messages so far; [`nondeterminism_frame`](super::nondeterminism_frame) explains
    /// the code in `credit`.
    Nondeterminism = 23,
    /// From the home relay, once on each connection and before any Determinant: `credit`
    /// determinants follow; earlier incarnations have sent `delivered` frames.
    ReplayStart = 24,
    /// From the home relay, before it ends the connection: the frame with number `delivered`
    /// differs from the frame that an earlier incarnation sent.
    Divergence = 25,
    /// From an endpoint to its home relay: the record of nondeterminism before byte `sequence` is
    /// no longer needed.
    NondeterminismTrim = 26,
    /// From the home relay, before its ReplayStart: the relay keeps a copy of the record of
    /// nondeterminism, and has the bytes before `sequence`.
    NondeterminismState = 27,
    /// Between two relays, on each stream: the sender has received `delivered` bytes.
    Keepalive = 28,
    /// An address at which the sender receives datagrams of the receiver.
    UdpAdvertisement = 29,
    /// The answer to a [`Kind::StatusRequest`]: the ranges of the opposite channel that have
    /// arrived.
    StatusReply = 30,
}

impl Kind {
    /// Every kind, for tables and tests.
    pub const ALL: [Kind; 30] = [
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
        Kind::Fragment,
        Kind::Sack,
        Kind::StatusRequest,
        Kind::Nack,
        Kind::Lost,
        Kind::AddressAdvertisement,
        Kind::Determinant,
        Kind::Nondeterminism,
        Kind::ReplayStart,
        Kind::Divergence,
        Kind::NondeterminismTrim,
        Kind::NondeterminismState,
        Kind::Keepalive,
        Kind::UdpAdvertisement,
        Kind::StatusReply,
    ];

    /// Whether frames of this kind are bytes of the channel, which are retained until they are
    /// confirmed and delivered in order.
    #[inline]
    pub fn is_numbered(self) -> bool {
        // The kinds are listed, here and below, so that one test of a bit decides for each frame.
        matches!(
            self,
            Kind::Message
                | Kind::Tagged
                | Kind::Grant
                | Kind::Data
                | Kind::Pulled
                | Kind::Write
                | Kind::Read
                | Kind::ReadData
                | Kind::Atomic
                | Kind::AtomicReply
                | Kind::Refused
                | Kind::Goodbye
                | Kind::Ahead
                | Kind::Fragment
        )
    }

    /// Whether endpoints send this kind to each other. All other kinds begin or end at a relay.
    #[inline]
    pub fn is_between_endpoints(self) -> bool {
        self.is_forwarded() && !self.reports_undeliverable()
    }

    /// Whether only relays send this kind, to the source of frames that they could not deliver.
    #[inline]
    pub fn reports_undeliverable(self) -> bool {
        matches!(self, Kind::Unreachable | Kind::Lost)
    }

    /// Whether a relay passes frames of this kind on. Frames of all other kinds end where the link
    /// ends.
    #[inline]
    pub fn is_forwarded(self) -> bool {
        !self.is_about_log() && self != Kind::Keepalive
    }

    /// Whether an endpoint and its home relay speak about the endpoint's message log.
    #[inline]
    pub fn is_about_log(self) -> bool {
        matches!(
            self,
            Kind::Determinant
                | Kind::Nondeterminism
                | Kind::ReplayStart
                | Kind::Divergence
                | Kind::NondeterminismTrim
                | Kind::NondeterminismState
        )
    }

    /// Whether an endpoint may send this kind to its home relay.
    #[inline]
    pub fn may_come_from_endpoint(self) -> bool {
        !matches!(
            self,
            Kind::Unreachable
                | Kind::Lost
                | Kind::ReplayStart
                | Kind::Divergence
                | Kind::NondeterminismState
                | Kind::Keepalive
        )
    }

    pub(super) fn from_number(number: u8) -> Option<Kind> {
        Self::ALL.get((number as usize).wrapping_sub(1)).copied()
    }
}

/// The bits of the header's `flags`.
pub mod flag {
    /// The message carries remote completion data.
    pub const CQ_DATA: u8 = 1;
    /// The message is longer than this piece; the head is the long one.
    pub const LONG: u8 = 2;
    /// The sender waits for `delivered` to pass this frame.
    pub const WANT_ACK: u8 = 4;
    /// For Grant: the receiver accepts no more than the limit, and the message ends there.
    pub const TRUNCATED: u8 = 8;
    /// The header's `check` field is valid, and [`CHECKSUM_BYTES`](crate::limit::CHECKSUM_BYTES)
    /// bytes of the payload's checksum precede the payload, if there is one.
    pub const CHECKED: u8 = 16;
    /// Every defined bit.
    pub const ALL: u8 = CQ_DATA | LONG | WANT_ACK | TRUNCATED | CHECKED;
}

/// The decoded fields of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The number of bytes after the header, at most [`FRAME_BODY_BYTES_MAX`].
    pub length: u32,
    /// The kind of the head.
    pub kind: Kind,
    /// The bits of [`flag`].
    pub flags: u8,
    /// The number of relays passed, at most [`HOPS_MAX`].
    pub hops: u8,
    /// The endpoint that sends.
    pub source: Address,
    /// The endpoint that receives.
    pub target: Address,
    /// The number of the first byte after the header; in a frame that a relay makes, the
    /// [`pair_check`].
    pub sequence: u64,
    /// The delivered position: see the module documentation.
    pub delivered: u64,
    /// The released credit: see the module documentation.
    pub credit: u32,
}

impl Header {
    /// Writes the header to the front of `bytes`.
    ///
    /// # Panics
    /// If `bytes` is shorter than [`HEADER_BYTES`].
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) {
        let what = [self.kind as u8, self.flags, self.hops, 0];
        let first = pair(self.length, u32::from_le_bytes(what));
        let framing_crc = framing_crc(&first.to_le_bytes());
        let ends = pair(self.source.0, self.target.0);
        let words = [
            first | u64::from(framing_crc) << 56,
            ends,
            self.sequence,
            self.delivered,
            pair(self.credit, self.numbers_checksum()),
        ];
        // The header is written in whole words, because it is copied at once: a load of a word that
        // was just written in smaller pieces must wait until these have reached the first-level
        // cache.
        for (bytes, word) in bytes[..HEADER_BYTES].chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Reads and checks a header.
    ///
    /// # Errors
    /// [`Malformed`] if the header is cut off, if its framing CRC does not match, if its kind or a
    /// flag is unknown, or if the frame is longer than any frame may be.
    #[inline(always)]
    pub fn parse(bytes: &[u8]) -> Result<Header, Malformed> {
        if bytes.len() < HEADER_BYTES {
            return Err(Malformed("a frame header is cut off"));
        }
        if bytes[7] != framing_crc(bytes) {
            return Err(Malformed("length, kind or flags of a frame arrived corrupt"));
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
        header.check()?;
        if header.kind.is_about_log() && u32_at(bytes, 36) != header.numbers_checksum() {
            return Err(Malformed("the numbers of a record arrived corrupt"));
        }
        Ok(header)
    }

    /// Checks header and head, which are all of `front`, against the header's checksum; `sum`
    /// computes checksums.
    ///
    /// # Errors
    /// [`Malformed`] if the checksum does not match, or if the frame has none.
    #[inline]
    pub fn verify(&self, front: &[u8], sum: impl Fn(&[u8]) -> u32) -> Result<(), Malformed> {
        if self.flags & flag::CHECKED == 0 {
            return Err(Malformed(
                "a frame without a check: is `integrity` the same for all processes?",
            ));
        }
        let mut summed = [0; HEADER_BYTES + KIND_HEADER_BYTES_MAX];
        let summed = &mut summed[..front.len()];
        summed.copy_from_slice(front);
        summed[HOPS_AT] = 0;
        summed[CHECKSUM_AT..HEADER_BYTES].fill(0);
        match sum(summed) == u32_at(front, CHECKSUM_AT) {
            true => Ok(()),
            false => Err(Malformed("a frame's header arrived corrupt")),
        }
    }

    /// The checksum of numbers about a message log, or 0 for frames of other kinds. With a number
    /// that was changed in transit, replay would fail, and nobody would notice before the replay.
    #[inline]
    fn numbers_checksum(&self) -> u32 {
        if !self.kind.is_about_log() {
            return 0;
        }
        let words =
            [self.sequence, self.delivered, pair(self.credit, self.source.0 ^ self.target.0)];
        let mix = |state: u64, word: u64| {
            (state ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29)
        };
        (words.into_iter().fold(0x9e37_79b9_7f4a_7c15, mix) >> 16) as u32
    }

    /// The length of the payload behind a head of `head` bytes, and of the checksum before the
    /// payload.
    ///
    /// # Errors
    /// [`Malformed`] if the frame is shorter than head and checksum.
    #[inline]
    pub fn payload(&self, head: usize) -> Result<(u64, usize), Malformed> {
        let after = (self.length as usize).checked_sub(head);
        let after = after.ok_or(Malformed("a frame is shorter than its head"))?;
        if after == 0 || self.flags & flag::CHECKED == 0 {
            return Ok((after as u64, 0));
        }
        match after.checked_sub(CHECKSUM_BYTES) {
            None | Some(0) => Err(Malformed("a check without a payload")),
            Some(payload) => Ok((payload as u64, CHECKSUM_BYTES)),
        }
    }

    #[inline]
    fn check(self) -> Result<(), Malformed> {
        if self.length as usize > FRAME_BODY_BYTES_MAX {
            return Err(Malformed("a frame is longer than frames may be"));
        }
        if self.flags & !flag::ALL != 0 {
            return Err(Malformed("a frame header has unknown bits set"));
        }
        if self.hops > HOPS_MAX {
            return Err(Malformed("a frame has passed too many relays"));
        }
        if self.kind.reports_undeliverable()
            && self.sequence != pair_check(self.source, self.target)
        {
            return Err(Malformed("the subject of a notice arrived corrupt"));
        }
        Ok(())
    }
}

#[inline]
fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// The `sequence` of a frame that a relay makes. Relays make frames without [`flag::CHECKED`], and
/// an endpoint that believed a corrupt one would declare the wrong peer unreachable.
pub fn pair_check(source: Address, target: Address) -> u64 {
    !pair(source.0, target.0)
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

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
    fn what_is_no_part_of_a_channel_has_no_numbers() {
        let signals =
            [Kind::Ack, Kind::Sack, Kind::StatusRequest, Kind::Nack, Kind::AddressAdvertisement];
        let about_log: Vec<_> = (22..=27).filter_map(Kind::from_number).collect();
        let further = [Kind::Keepalive, Kind::UdpAdvertisement, Kind::StatusReply];
        let signals = [&signals[..], &about_log, &further].concat();
        for kind in Kind::ALL {
            assert_eq!(kind.reports_undeliverable(), matches!(kind as u8, 14 | 20), "{kind:?}");
            let is_control = signals.contains(&kind) || kind.reports_undeliverable();
            assert_eq!(kind.is_numbered(), !is_control, "{kind:?}");
        }
    }

    #[test]
    fn each_kind_has_its_senders_and_receivers() {
        for kind in Kind::ALL {
            let number = kind as u8;
            let is_about_log = (22..=27).contains(&number);
            assert_eq!(kind.is_about_log(), is_about_log, "{kind:?}");
            assert_eq!(kind.is_forwarded(), !is_about_log && number != 28, "{kind:?}");
            let from_relay = matches!(number, 14 | 20 | 24 | 25 | 27 | 28);
            assert_eq!(kind.may_come_from_endpoint(), !from_relay, "{kind:?}");
            let is_end_to_end = !from_relay && !is_about_log;
            assert_eq!(kind.is_between_endpoints(), is_end_to_end, "{kind:?}");
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
        for (at, value) in
            [(2, 0x11), (3, 0xff), (4, Kind::ALL.len() as u8 + 1), (5, 0x80), (6, 17)]
        {
            let mut broken = bytes;
            broken[at] = value;
            broken[7] = framing_crc(&broken);
            assert!(Header::parse(&broken).is_err(), "byte {at}");
        }
        assert!(Header::parse(&bytes[..39]).is_err());
    }

    #[test]
    fn a_length_kind_or_flag_that_was_changed_is_no_header() {
        let mut bytes = [0; HEADER_BYTES];
        sample(Kind::Data).emit(&mut bytes);
        for bit in (0..48).chain(56..64) {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::parse(&changed).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn what_goes_into_a_record_is_none_of_which_a_number_was_changed() {
        for kind in Kind::ALL.into_iter().filter(|kind| kind.is_about_log()) {
            let mut bytes = [0; HEADER_BYTES];
            sample(kind).emit(&mut bytes);
            for bit in 128..320 {
                let mut changed = bytes;
                changed[bit / 8] ^= 1 << (bit % 8);
                assert!(Header::parse(&changed).is_err(), "bit {bit}");
            }
        }
    }

    #[test]
    fn a_notice_whose_addresses_were_changed_is_none() {
        for kind in [Kind::Unreachable, Kind::Lost] {
            let mut bytes = [0; HEADER_BYTES];
            sample(kind).emit(&mut bytes);
            for bit in 64..192 {
                let mut changed = bytes;
                changed[bit / 8] ^= 1 << (bit % 8);
                assert!(Header::parse(&changed).is_err(), "bit {bit}");
            }
        }
    }

    fn sample(kind: Kind) -> Header {
        let (source, target) = (Address::new(7, 1), Address::new(9, 0));
        Header {
            length: 77,
            kind,
            flags: flag::LONG,
            hops: 3,
            source,
            target,
            sequence: if kind.reports_undeliverable() {
                pair_check(source, target)
            } else {
                u64::MAX - 1
            },
            delivered: 1 << 40,
            credit: 5,
        }
    }
}
