//! The contents of an endpoint's frames about its record of clocks and random numbers: bytes of the
//! record (Nondeterminism), or the position from which on it is needed (NondeterminismTrim).
//!
//! A checksum of their own precedes the bytes, whatever checks the endpoints of the job use for
//! their messages: a record with one changed bit would be replayed to the next incarnation, and
//! nobody would notice before. (The numbers of the header have a checksum as well, see
//! [`frame`](super::frame).)
//!
//! A process that has read much sends the record in pieces, which may end within an entry of the
//! record. Every piece but the last of a batch says that more of the batch follows. A batch ends
//! where an entry ends, and only whole batches may be replayed to the next incarnation.

use super::frame::{Header, Kind};
use super::{Malformed, u32_at};
use crate::digest::digest;
use crate::id::Address;
use crate::limit::CHECKSUM_BYTES;

/// A bit of a Nondeterminism frame's `credit`: the record has reached its maximum size.
const FULL: u32 = 1;
/// A bit of a Nondeterminism frame's `credit`: more of the same batch follows.
const HAS_MORE: u32 = 2;

/// The largest valid position in a record, in bytes.
const POSITION_MAX: u64 = 1 << 62;

/// The contents of a frame about a record: see the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NondeterminismFrame<'a> {
    /// Bytes of the record from position `from` on.
    Append {
        /// The position of the first byte in the record.
        from: u64,
        /// The bytes of the record.
        bytes: &'a [u8],
        /// The record has reached its maximum size, so later entries are missing. Only the last
        /// piece of a batch says this.
        is_full: bool,
        /// More of the same batch follows: the last of these bytes may lie within an entry.
        has_more: bool,
    },
    /// The record before this position is no longer needed.
    Trim(u64),
}

/// The header of a frame with this content, from a program that has polled for messages `polls`
/// times; and the checksum that precedes the bytes, if there are any.
pub fn emit(
    content: NondeterminismFrame<'_>,
    polls: u64,
    source: Address,
) -> (Header, Option<[u8; CHECKSUM_BYTES]>) {
    let (kind, sequence, bytes, credit) = match content {
        NondeterminismFrame::Append { from, bytes, is_full, has_more } => {
            let full = if is_full { FULL } else { 0 };
            let more = if has_more { HAS_MORE } else { 0 };
            (Kind::Nondeterminism, from, bytes, full | more)
        }
        NondeterminismFrame::Trim(place) => (Kind::NondeterminismTrim, place, &[][..], 0),
    };
    let check = (!bytes.is_empty()).then(|| check(bytes).to_le_bytes());
    let header = Header {
        length: (bytes.len() + check.map_or(0, |check| check.len())) as u32,
        kind,
        flags: 0,
        hops: 0,
        source,
        target: Address::ANONYMOUS,
        sequence,
        delivered: polls,
        credit,
    };
    (header, check)
}

/// The content of an endpoint's frame with this header. `body` is all that follows the header.
///
/// # Errors
/// [`Malformed`] if the checksum does not match, or if the content is invalid.
pub fn parse<'a>(header: &Header, body: &'a [u8]) -> Result<NondeterminismFrame<'a>, Malformed> {
    if header.sequence > POSITION_MAX {
        return Err(Malformed("a nondeterminism record longer than records may be"));
    }
    let (is_full, has_more) = (header.credit == FULL, header.credit == HAS_MORE);
    let read =
        |bytes| NondeterminismFrame::Append { from: header.sequence, bytes, is_full, has_more };
    match (header.kind, header.credit, body.is_empty()) {
        (Kind::NondeterminismTrim, 0, true) => Ok(NondeterminismFrame::Trim(header.sequence)),
        (Kind::Nondeterminism, 0 | FULL, true) => Ok(read(&[])),
        (Kind::Nondeterminism, 0 | FULL | HAS_MORE, false) if body.len() > CHECKSUM_BYTES => {
            let bytes = &body[CHECKSUM_BYTES..];
            if u32_at(body, 0) != check(bytes) {
                return Err(Malformed("a part of a nondeterminism record arrived corrupt"));
            }
            Ok(read(bytes))
        }
        _ => Err(Malformed("a nondeterminism frame of an unknown form")),
    }
}

fn check(bytes: &[u8]) -> u32 {
    // The upper 32 bits of the digest depend on all bytes.
    (digest(bytes) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    fn read(from: u64, bytes: &[u8], is_full: bool) -> NondeterminismFrame<'_> {
        NondeterminismFrame::Append { from, bytes, is_full, has_more: false }
    }

    fn body(content: NondeterminismFrame<'_>) -> (Header, Vec<u8>) {
        let (header, check) = emit(content, 9, Address::new(1, 0));
        let mut body: Vec<u8> = check.into_iter().flatten().collect();
        if let NondeterminismFrame::Append { bytes, .. } = content {
            body.extend_from_slice(bytes);
        }
        assert_eq!(header.length as usize, body.len());
        (header, body)
    }

    #[test]
    fn what_is_said_is_understood() {
        let piece =
            NondeterminismFrame::Append { from: 6, bytes: b"de", is_full: false, has_more: true };
        for content in
            [read(1 << 40, b"abc", true), read(5, b"", false), piece, NondeterminismFrame::Trim(77)]
        {
            let (header, body) = body(content);
            assert_eq!((parse(&header, &body), header.delivered), (Ok(content), 9));
        }
    }

    #[test]
    fn places_in_a_record_can_be_added_to() {
        for (place, is_good) in [(POSITION_MAX, true), (POSITION_MAX + 1, false), (u64::MAX, false)]
        {
            for content in [read(place, b"a", false), NondeterminismFrame::Trim(place)] {
                let (header, body) = body(content);
                assert_eq!(parse(&header, &body).is_ok(), is_good, "{content:?}");
            }
        }
    }

    #[test]
    fn bytes_of_which_one_was_changed_are_none() {
        let (header, body) = body(read(3, &[0x5a; 100], false));
        for bit in 0..8 * body.len() {
            let mut changed = body.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(parse(&header, &changed).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn what_nobody_may_say_is_refused() {
        let (header, body) = body(read(3, b"abc", false));
        for credit in [FULL | HAS_MORE, 4, 8, u32::MAX] {
            assert!(parse(&Header { credit, ..header }, &body).is_err(), "{credit}");
        }
        for kind in Kind::ALL.into_iter().filter(|&kind| kind != Kind::Nondeterminism) {
            assert!(parse(&Header { kind, ..header }, &body).is_err(), "{kind:?}");
        }
        for length in 1..=CHECKSUM_BYTES {
            assert!(parse(&header, &body[..length]).is_err(), "{length}");
        }
        for credit in [HAS_MORE, FULL | HAS_MORE, 4] {
            assert!(parse(&Header { credit, ..header }, &[]).is_err(), "{credit}");
        }
        let trim = Header { kind: Kind::NondeterminismTrim, ..header };
        for credit in [FULL, HAS_MORE, 4] {
            assert!(parse(&Header { credit, ..trim }, &[]).is_err(), "{credit}");
        }
    }
}
