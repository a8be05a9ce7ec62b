//! What a Nondeterminism frame says: bytes of a record of clocks, or from where on that is needed.
//!
//! The bytes stand behind a check of their own, whatever the endpoints of the job have agreed on for their messages: a record of
//! which one bit was changed on the way would be told a new start, and nobody would see it before. (The numbers of the header
//! have one as well, see [`frame`](super::frame).)
//!
//! Who has read much says it in pieces, which may end within an entry of the record. All but the last one say that more of the same
//! batch follows: a batch ends where an entry ends, and only whole ones may be told to a new start.

use super::frame::{Header, Kind};
use super::{Malformed, u32_at};
use crate::digest::digest;
use crate::id::Address;
use crate::limit::CHECKSUM_BYTES;

/// Bits of a Nondeterminism frame's `credit`: there is no more room in the record;
const FULL: u32 = 1;
/// what lies before `sequence` is needed no more;
const TRIM: u32 = 2;
/// more of the same batch follows.
const HAS_MORE: u32 = 4;

/// No record is so long.
const POSITION_MAX: u64 = 1 << 62;

/// See the module head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NondeterminismFrame<'a> {
    /// The bytes of the record from `from` on.
    Append {
        /// The place of the first of them.
        from: u64,
        /// What was read.
        bytes: &'a [u8],
        /// There is no room in the record for what came then. Of a batch, its last piece says so.
        is_full: bool,
        /// More of the same batch follows: the last of these bytes may be in the middle of an entry.
        has_more: bool,
    },
    /// What lies before this place is needed no more.
    Trim(u64),
}

/// The header of a frame that says so, of a program that has looked for messages so often; and the check that goes in front of the
/// bytes, if there are any.
pub fn emit(
    content: NondeterminismFrame<'_>,
    polls: u64,
    source: Address,
) -> (Header, Option<[u8; CHECKSUM_BYTES]>) {
    let (sequence, bytes, credit) = match content {
        NondeterminismFrame::Append { from, bytes, is_full, has_more } => {
            let full = if is_full { FULL } else { 0 };
            (from, bytes, full | if has_more { HAS_MORE } else { 0 })
        }
        NondeterminismFrame::Trim(place) => (place, &[][..], TRIM),
    };
    let check = (!bytes.is_empty()).then(|| check(bytes).to_le_bytes());
    let header = Header {
        length: (bytes.len() + check.map_or(0, |check| check.len())) as u32,
        kind: Kind::Nondeterminism,
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

/// What a frame with this header says, of an endpoint. `body`: all that stands behind the header.
///
/// # Errors
/// If it is not what was sent, or nothing that one may say.
pub fn parse<'a>(header: &Header, body: &'a [u8]) -> Result<NondeterminismFrame<'a>, Malformed> {
    if header.sequence > POSITION_MAX {
        return Err(Malformed("no record of clocks is so long"));
    }
    let (is_full, has_more) = (header.credit == FULL, header.credit == HAS_MORE);
    let read =
        |bytes| NondeterminismFrame::Append { from: header.sequence, bytes, is_full, has_more };
    match (header.credit, body.is_empty()) {
        (TRIM, true) => Ok(NondeterminismFrame::Trim(header.sequence)),
        (0 | FULL, true) => Ok(read(&[])),
        (0 | FULL | HAS_MORE, false) if body.len() > CHECKSUM_BYTES => {
            let bytes = &body[CHECKSUM_BYTES..];
            if u32_at(body, 0) != check(bytes) {
                return Err(Malformed("what it has read of clocks is not what was sent"));
            }
            Ok(read(bytes))
        }
        _ => Err(Malformed("a nondeterminism frame of an unknown form")),
    }
}

fn check(bytes: &[u8]) -> u32 {
    // The upper bits hang upon all of them.
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
        for credit in [TRIM, FULL | TRIM, FULL | HAS_MORE, TRIM | HAS_MORE, 8, u32::MAX] {
            assert!(parse(&Header { credit, ..header }, &body).is_err(), "{credit}");
        }
        for length in 1..=CHECKSUM_BYTES {
            assert!(parse(&header, &body[..length]).is_err(), "{length}");
        }
        for credit in [FULL | TRIM, HAS_MORE, HAS_MORE | TRIM] {
            assert!(parse(&Header { credit, ..header }, &[]).is_err(), "{credit}");
        }
    }
}
