//! Sends the nondeterminism record (clocks and random numbers) of a process to a relay on another
//! node. If this node is lost, an incarnation on a third node replays the record from the relay.
//!
//! In: the record. Out: the entries that the relay lacks, in front of the next frame; and the
//! position before which the relay may trim the record, since checkpoints of the process cover it.
//!
//! A large record travels in several pieces, which may cut entries; each piece says whether another
//! piece follows. The end of the record, and thereby the last piece, is the end of an entry.
//!
//! What may never happen: a frame reaches the relay before the entries on which the frame may
//! depend; bytes are sent that lie where entries are being written; a piece that is not the last
//! one is marked as the last one.

use std::io;

use landbridge_drive::link::recorded::RecordedLink;
use landbridge_proto::id::Address;
use landbridge_proto::wire::frame::HEADER_BYTES;
use landbridge_proto::wire::nondeterminism_frame::{self, NondeterminismFrame};

use crate::interposer::{self, Extent};

/// Maximum number of bytes in one piece.
const READS_BYTES_MAX: u64 = 16 << 10;

/// The part of the record that the relay has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SentNondeterminism(Extent);

impl SentNondeterminism {
    /// The relay has the bytes before position `end`, which may be more than this incarnation has
    /// replayed.
    pub fn before(end: u64) -> Self {
        Self(Extent { end, ..Extent::default() })
    }

    #[inline]
    pub fn is_behind(&self) -> bool {
        self.0 != interposer::extent()
    }

    /// Sends all entries that the relay lacks, in front of the next frame.
    #[cold]
    pub fn catch_up(&mut self, own: Address, stream: &mut RecordedLink) -> io::Result<()> {
        let now = interposer::extent();
        if self.0.base < now.base {
            put(NondeterminismFrame::Trim(now.base), own, stream)?;
            self.0.base = now.base;
        }
        // During replay this incarnation is behind the relay, and sends nothing until it has caught
        // up.
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

/// A piece of the record that begins at `from`; `now` is the extent of the whole record.
fn piece<'a>(from: u64, bytes: &'a [u8], now: &Extent) -> NondeterminismFrame<'a> {
    let has_more = from + (bytes.len() as u64) < now.end;
    // The state in `now` applies only from the last byte of the record on.
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
            // The buffer may end before a piece is complete.
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
        // The program has read nothing more, and the record had no space for the next entry.
        let said = piece(now.end, &[], &now);
        assert!(
            matches!(said, NondeterminismFrame::Append { is_full: true, has_more: false, .. }),
            "{said:?}"
        );
        // During replay the position of this incarnation differs from the position of the relay.
        let said = piece(now.end + 9, &[], &now);
        assert!(
            matches!(said, NondeterminismFrame::Append { is_full: true, has_more: false, .. }),
            "{said:?}"
        );
    }
}
