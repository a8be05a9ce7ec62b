//! Digests of the frames that a process has sent, and the report about a restarted incarnation that
//! sends another frame.
//!
//! What enters: frames. What leaves: a few bytes for each frame ([`SentDigest`]), which distinguish
//! this frame from others; and, if a restarted incarnation sends another frame, everything known of
//! both frames ([`Divergence`]). Of the original frame that is its digest; if the receiver is
//! attached to this relay, the log of the receiver may hold the frame itself, with its tag.
//!
//! What may never happen: two frames count as equal whose receiver would see the difference.
//! (Frames that differ in kind, length or target never count as equal, other frames once in 2^43,
//! and payloads that are compared only by their checksum once in 2^32.)

use alloc::vec::Vec;
use core::{array, fmt};

use super::bounds::FRAME_BYTES_MAX;
use crate::digest::digest;
use crate::id::Address;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use crate::wire::kind_header::KindHeader;

/// Bytes logged for a sent frame.
pub(super) const SENT_DIGEST_BYTES: usize = 12;

/// Bytes shown of two payloads that differ.
const SHOWN_BYTES: usize = 8;

const KIND_BITS: u32 = 5;
const LENGTH_BITS: u32 = 16;
/// Bits of kind and length in [`SentDigest`]'s word; the other bits are the digest.
const SHORT_BITS: u32 = KIND_BITS + LENGTH_BITS;
/// Offset of the hop count in a frame: the hop count is in no digest, because relays change it.
const HOPS_AT: usize = 6;

const _: () = {
    assert!(Kind::ALL.len() < 1 << KIND_BITS);
    assert!(FRAME_BYTES_MAX < 1 << LENGTH_BITS);
};

/// Digest of a sent frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SentDigest {
    target: Address,
    /// Kind, length and digest of the bytes.
    word: u64,
}

impl SentDigest {
    #[inline]
    pub fn of(header: &Header, frame: &[u8]) -> Self {
        let short = u64::from(header.length) << KIND_BITS | header.kind as u64;
        let word = digest(digest_input(header, frame)) >> SHORT_BITS << SHORT_BITS | short;
        Self { target: header.target, word }
    }

    #[inline]
    pub fn bytes(self) -> [u8; SENT_DIGEST_BYTES] {
        let mut bytes = [0; SENT_DIGEST_BYTES];
        bytes[..8].copy_from_slice(&self.word.to_le_bytes());
        bytes[8..].copy_from_slice(&self.target.0.to_le_bytes());
        bytes
    }

    #[inline]
    pub fn from_bytes(bytes: [u8; SENT_DIGEST_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, target @ ..] = bytes;
        let word = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        Self { target: Address(u32::from_le_bytes(target)), word }
    }

    /// Receiver of the frame.
    pub fn target(self) -> Address {
        self.target
    }

    /// The frame of `source` with this digest, among the frames of the log of its receiver.
    pub fn find_in<'a>(
        self,
        source: Address,
        mut frames: impl Iterator<Item = (Header, &'a [u8])>,
    ) -> Option<(Header, Vec<u8>)> {
        let known = self.version();
        let may_be = |header: &Header| {
            header.source == source
                && Some(header.kind) == known.kind
                && header.length == known.length
        };
        frames.find_map(|(header, frame)| {
            if !may_be(&header) {
                return None;
            }
            let mut bytes = frame.to_vec();
            bytes[HOPS_AT] = 0;
            (Self::of(&header, &bytes) == self).then_some((header, bytes))
        })
    }

    /// The description of the frame for a report.
    fn version(self) -> FrameVersion {
        let number = self.word as u8 & ((1 << KIND_BITS) - 1);
        FrameVersion {
            kind: Kind::ALL.into_iter().find(|kind| *kind as u8 == number),
            target: self.target,
            length: (self.word >> KIND_BITS) as u32 & ((1 << LENGTH_BITS) - 1),
            tag: None,
            digest: self.word >> SHORT_BITS,
        }
    }
}

/// The bytes of a frame that its digest covers: all bytes, or everything before the payload if the
/// sender's checksum of the payload is part of the frame, so that the relay reads no long payload
/// twice.
#[inline]
fn digest_input<'a>(header: &Header, frame: &'a [u8]) -> &'a [u8] {
    let head = KindHeader::size(header.kind, header.flags);
    match header.payload(head) {
        Ok((_, check @ 1..)) => &frame[..HEADER_BYTES + head + check],
        _ => frame,
    }
}

/// Description of one of the two frames of a divergence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameVersion {
    /// Kind of the frame, if the number is known.
    pub kind: Option<Kind>,
    /// Receiver of the frame.
    pub target: Address,
    /// Bytes after the header of the frame.
    pub length: u32,
    /// Tag of the message that the frame begins, as far as it is known.
    pub tag: Option<u64>,
    /// Digest of the bytes of the frame, or of everything before its payload, with the checksum of
    /// the payload.
    pub digest: u64,
}

/// Shows a frame as in `Tagged to rank 3, 72 bytes, tag 0x1f, digest 12ab`.
impl fmt::Display for FrameVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Some(kind) => write!(f, "{kind:?}")?,
            None => f.write_str("a frame")?,
        }
        write!(f, " to {}, {} bytes", self.target, self.length)?;
        if let Some(tag) = self.tag {
            write!(f, ", tag {tag:#x}")?;
        }
        write!(f, ", digest {:x}", self.digest)
    }
}

/// A divergence: a restarted incarnation of an endpoint has sent another frame than the previous
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// The endpoint that has diverged.
    pub who: Address,
    /// The restarted incarnation of that endpoint.
    pub incarnation: u32,
    /// Number of the frame among all frames that the endpoint sends, from 0.
    pub frame: u64,
    /// The frame that the previous incarnation sent.
    pub was: FrameVersion,
    /// The frame that the restarted incarnation sends.
    pub is: FrameVersion,
    /// First difference of the frames, if the relay holds the original frame in memory.
    pub difference: Option<FrameDifference>,
}

/// First difference of two frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameDifference {
    /// The payloads differ from byte `at` on. Missing bytes are shown as zeros.
    Payload {
        /// Offset of the first byte that differs, in the payload.
        at: usize,
        /// Bytes that are sent now, from `at` on.
        is: [u8; SHOWN_BYTES],
        /// Bytes that were sent originally, from `at` on.
        was: [u8; SHOWN_BYTES],
    },
    /// The frames differ before the payload: in the message that they belong to, or in counters of
    /// sent and received bytes.
    Front,
}

impl FrameDifference {
    /// Compares the original frame `one` with the frame `other` that is sent now.
    fn find(header: &Header, one: &[u8], other: &[u8]) -> Self {
        let head = KindHeader::size(header.kind, header.flags);
        // The checksum of a payload differs if the payload differs, so it is skipped.
        let check = header.payload(head).map_or(0, |(_, check)| check);
        let start = HEADER_BYTES + head + check;
        let was = one.get(start..).unwrap_or_default();
        let is = other.get(start..).unwrap_or_default();
        match is.iter().zip(was).position(|(is, was)| is != was) {
            Some(at) => Self::Payload { at, is: shown(&is[at..]), was: shown(&was[at..]) },
            None => Self::Front,
        }
    }
}

fn shown(bytes: &[u8]) -> [u8; SHOWN_BYTES] {
    array::from_fn(|at| bytes.get(at).copied().unwrap_or_default())
}

impl Divergence {
    /// The divergence of `who`, which sends `frame` instead of the original frame with the digest
    /// `was`. `original` is that frame itself, if the relay holds it in memory.
    pub(super) fn of(
        (who, incarnation, number): (Address, u32, u64),
        was: SentDigest,
        original: Option<(Header, Vec<u8>)>,
        frame: &[u8],
    ) -> Option<Self> {
        let header = Header::parse(frame).ok()?;
        let mut is = SentDigest::of(&header, frame).version();
        is.tag = tag(&header, frame);
        let was = was.version();
        let mut divergence = Self { who, incarnation, frame: number, was, is, difference: None };
        if let Some((before, bytes)) = original {
            divergence.was.tag = tag(&before, &bytes);
            divergence.difference = Some(FrameDifference::find(&before, &bytes, frame));
        }
        Some(divergence)
    }

    /// The divergence of `who`, which sends the frame `is` where it has sent `was`. `None`: one of
    /// both is no frame.
    pub fn between(
        (who, incarnation, number): (Address, u32, u64),
        was: &[u8],
        is: &[u8],
    ) -> Option<Self> {
        let header = Header::parse(was).ok()?;
        let digest = SentDigest::of(&header, was);
        Self::of((who, incarnation, number), digest, Some((header, was.to_vec())), is)
    }
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { who, incarnation, frame, was, is, .. } = self;
        write!(
            f,
            "incarnation {incarnation} of {who} sends as its frame {frame}: {is}; it was: {was}"
        )?;
        match self.difference {
            Some(FrameDifference::Payload { at, is, was }) => {
                write!(
                    f,
                    "; their content differs from byte {at} on: {is:02x?}, and was {was:02x?}"
                )
            }
            Some(FrameDifference::Front) => f.write_str("; they differ in their headers"),
            None => Ok(()),
        }
    }
}

/// Tag of the message that a frame begins.
fn tag(header: &Header, frame: &[u8]) -> Option<u64> {
    if header.kind != Kind::Tagged {
        return None;
    }
    match KindHeader::parse(header.kind, header.flags, frame.get(HEADER_BYTES..)?) {
        Ok(KindHeader::Message { tag, .. }) => Some(tag),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::CHECKSUM_BYTES;
    use crate::wire::frame::flag;

    fn frame(target: Address, kind: Kind, length: u32, byte: u8) -> (Header, Vec<u8>) {
        let header = super::super::empty_frame::empty(kind, Address::new(1, 0), target);
        let header = Header { length, ..header };
        let mut bytes = alloc::vec![byte; HEADER_BYTES + length as usize];
        header.emit(&mut bytes);
        (header, bytes)
    }

    #[test]
    fn what_is_kept_of_a_frame_tells_another_one_and_says_what_it_was() {
        let longest = (FRAME_BYTES_MAX - HEADER_BYTES) as u32;
        let one = |target, kind, length, byte| {
            let (header, bytes) = frame(target, kind, length, byte);
            SentDigest::of(&header, &bytes)
        };
        let target = Address::new(Address::INDEX_MAX, 200);
        let sent = one(target, Kind::Determinant, longest, 7);
        assert_eq!(SentDigest::from_bytes(sent.bytes()), sent);
        let version = sent.version();
        assert_eq!((version.kind, version.length), (Some(Kind::Determinant), longest));
        assert_eq!(version.target, target);
        let others = [
            one(Address::new(3, 0), Kind::Determinant, longest, 7),
            one(target, Kind::AddressAdvertisement, longest, 7),
            one(target, Kind::Determinant, longest - 1, 7),
            one(target, Kind::Determinant, longest, 8),
        ];
        assert!(others.iter().all(|other| *other != sent));
    }

    #[test]
    fn payloads_with_a_check_are_distinguished_by_that() {
        let target = Address::new(3, 0);
        let sent = |check: u8, flags: u8, payload: usize| {
            let (header, mut bytes) = frame(target, Kind::Data, 0, 0);
            let at = HEADER_BYTES + KindHeader::size(Kind::Data, flags);
            bytes.resize(at + CHECKSUM_BYTES + payload, check);
            let header = Header { flags, length: (bytes.len() - HEADER_BYTES) as u32, ..header };
            header.emit(&mut bytes);
            bytes[at..at + CHECKSUM_BYTES].fill(check);
            (header, bytes)
        };
        for payload in [1, 2, 1_000] {
            let of = |(header, bytes): (Header, Vec<u8>)| SentDigest::of(&header, &bytes);
            assert_ne!(of(sent(1, flag::CHECKED, payload)), of(sent(2, flag::CHECKED, payload)));
            // Without a checksum every byte of the payload counts.
            let (header, mut bytes) = sent(1, 0, payload);
            let before = SentDigest::of(&header, &bytes);
            *bytes.last_mut().unwrap() ^= 1;
            assert_ne!(before, SentDigest::of(&header, &bytes));
        }
    }
}
