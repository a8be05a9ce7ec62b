//! What the program has read of clocks, told to a relay on another node: if this node is lost, a start on a third one is told it.
//!
//! In: the record of clocks. Out: what of it the relay does not know, in front of the next frame; and from where on it is needed,
//! since images of the process have been taken.
//!
//! Much goes in several pieces, which cut entries of the record; each says whether more of what is told at once follows. What this start
//! has been told, or has made, ends where an entry ends, and so does the last piece.
//!
//! What may never happen: a frame goes to the relay before what it may follow from; bytes are told that lie where others are
//! written; a piece counts as the last one that is not.

use std::io;

use landbridge_drive::link::recorded::RecordedLink;
use landbridge_proto::id::Address;
use landbridge_proto::wire::frame::HEADER_BYTES;
use landbridge_proto::wire::nondeterminism_frame::{self, NondeterminismFrame};

use crate::interposer::{self, Extent};

/// Most that is told at once.
const READS_BYTES_MAX: u64 = 16 << 10;

/// What the relay knows of the record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SentNondeterminism(Extent);

impl SentNondeterminism {
    /// The bytes before this place, which may be more than this start has been told.
    pub fn before(end: u64) -> Self {
        Self(Extent { end, ..Extent::default() })
    }

    #[inline]
    pub fn is_behind(&self) -> bool {
        self.0 != interposer::extent()
    }

    /// All that the relay lacks goes in front of the next frame.
    #[cold]
    pub fn catch_up(&mut self, own: Address, stream: &mut RecordedLink) -> io::Result<()> {
        let now = interposer::extent();
        if self.0.base < now.base {
            put(NondeterminismFrame::Trim(now.base), own, stream)?;
            self.0.base = now.base;
        }
        // A start that does again what was before comes to where the relay is.
        let mut from = self.0.end.max(now.base);
        while from < now.end || (now.is_full && !self.0.is_full) {
            let bytes = interposer::entries(from, now.end.min(from + READS_BYTES_MAX));
            let said = piece(from, bytes, &now);
            put(said, own, stream)?;
            from += bytes.len() as u64;
            self.0.end = from;
            self.0.is_full |= matches!(said, NondeterminismFrame::Append { is_full: true, .. });
        }
        Ok(())
    }
}

/// The bytes from there on, of a record of which so much is told at once.
fn piece<'a>(from: u64, bytes: &'a [u8], now: &Extent) -> NondeterminismFrame<'a> {
    let has_more = from + (bytes.len() as u64) < now.end;
    // All that came with the bytes holds from the last of them on.
    NondeterminismFrame::Append { from, bytes, is_full: now.is_full && !has_more, has_more }
}

fn put(said: NondeterminismFrame<'_>, own: Address, stream: &mut RecordedLink) -> io::Result<()> {
    let (header, check) = nondeterminism_frame::emit(said, interposer::polls(), own);
    let mut front = [0; HEADER_BYTES + size_of::<u32>()];
    header.emit(&mut front);
    let mut length = HEADER_BYTES;
    if let Some(check) = check {
        front[HEADER_BYTES..].copy_from_slice(&check);
        length = front.len();
    }
    let bytes = match said {
        NondeterminismFrame::Append { bytes, .. } => bytes,
        NondeterminismFrame::Trim(_) => &[],
    };
    stream.prepend(&front[..length], bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pieces_but_the_last_say_that_more_follows() {
        let bytes = vec![7; 3 * READS_BYTES_MAX as usize];
        let now = Extent { base: 5, end: 100 + 2 * READS_BYTES_MAX + 1, is_full: true };
        let (mut from, mut count) = (100, 0);
        while from < now.end {
            // The room may end before a piece does.
            let length = if count == 1 { 9 } else { READS_BYTES_MAX };
            let length = length.min(now.end - from);
            let said = piece(from, &bytes[..length as usize], &now);
            let is_last = from + length == now.end;
            let NondeterminismFrame::Append { from: place, bytes, is_full, has_more } = said else {
                panic!("{said:?}")
            };
            assert_eq!((place, bytes.len() as u64), (from, length));
            assert_eq!((is_full, has_more), (is_last, !is_last), "{from}");
            (from, count) = (from + length, count + 1);
        }
        assert_eq!(count, 3);
        // Nothing was read, and there was no room for what came then.
        let said = piece(now.end, &[], &now);
        assert!(
            matches!(said, NondeterminismFrame::Append { is_full: true, has_more: false, .. }),
            "{said:?}"
        );
        // A start that does again what was before is not where the relay is.
        let said = piece(now.end + 9, &[], &now);
        assert!(
            matches!(said, NondeterminismFrame::Append { is_full: true, has_more: false, .. }),
            "{said:?}"
        );
    }
}
