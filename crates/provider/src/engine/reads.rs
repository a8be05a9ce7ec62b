//! What the program has read of clocks, told to a relay on another node: if this node is lost, a start on a third one is told it.
//!
//! In: the record of clocks. Out: what of it the relay does not know, in front of the next frame; and from where on it is needed,
//! since images of the process have been taken.
//!
//! What may never happen: a frame goes to the relay before what it may follow from; bytes are told that lie where others are
//! written.

use std::io;

use landbridge_drive::link::whole::WholeLink;
use landbridge_proto::id::Address;
use landbridge_proto::wire::frame::HEADER_BYTES;
use landbridge_proto::wire::reads::{self, Said};

use crate::clocks::{self, Extent};

/// Most that is told at once.
const READS_BYTES_MAX: u64 = 16 << 10;

/// What the relay knows of the record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReadsTold(Extent);

impl ReadsTold {
    /// The bytes before this place, which may be more than this start has been told.
    pub fn up_to(end: u64) -> Self {
        Self(Extent { end, ..Extent::default() })
    }

    #[inline]
    pub fn is_behind(&self) -> bool {
        self.0 != clocks::extent()
    }

    /// All that the relay lacks goes in front of the next frame.
    #[cold]
    pub fn catch_up(&mut self, own: Address, stream: &mut WholeLink) -> io::Result<()> {
        let now = clocks::extent();
        if self.0.base < now.base {
            put(Said::Cut(now.base), own, stream)?;
            self.0.base = now.base;
        }
        // A start that does again what was before comes to where the relay is.
        let mut from = self.0.end.max(now.base);
        while from < now.end || (now.is_full && !self.0.is_full) {
            let bytes = clocks::entries(from, now.end.min(from + READS_BYTES_MAX));
            put(Said::Read { from, bytes, is_full: now.is_full }, own, stream)?;
            from += bytes.len() as u64;
            (self.0.end, self.0.is_full) = (from, now.is_full);
        }
        Ok(())
    }
}

fn put(said: Said<'_>, own: Address, stream: &mut WholeLink) -> io::Result<()> {
    let (header, check) = reads::emit(said, clocks::polls(), own);
    let mut front = [0; HEADER_BYTES + size_of::<u32>()];
    header.emit(&mut front);
    let mut length = HEADER_BYTES;
    if let Some(check) = check {
        front[HEADER_BYTES..].copy_from_slice(&check);
        length = front.len();
    }
    let bytes = match said {
        Said::Read { bytes, .. } => bytes,
        Said::Cut(_) => &[],
    };
    stream.put_ahead(&front[..length], bytes)
}
