//! What is arriving from one peer and is not complete: the frame whose turn it is, early frames,
//! and messages of which announced pieces are still to come.
//!
//! What enters: frames as their headers arrive, and paths that break. What leaves: where a payload
//! belongs that must be retransmitted. What may never happen: the payload of one frame arrives by
//! two paths.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::driver_interface::PayloadDestination;
use crate::channel::PathId;
use crate::wire::frame::Kind;
use crate::wire::kind_header::{KindHeader, Long};

/// The frame whose turn it is and whose payload is arriving.
#[derive(Clone, Copy)]
pub(super) struct ArrivingFrame {
    pub frame: Frame,
    pub place: PayloadDestination,
    /// The path by which the payload arrives; `None` if the payload has to be retransmitted.
    pub path: Option<PathId>,
}

/// A frame or fragment that arrives early and is being written into a reorder buffer.
#[derive(Clone, Copy)]
pub(super) struct OutOfOrderArrival {
    pub path: PathId,
    /// The number of the frame's first byte.
    pub frame: u64,
    pub start: u64,
    pub end: u64,
}

/// What is arriving from one peer and is not complete.
#[derive(Default)]
pub(super) struct Arrivals {
    /// The frame whose turn it is and whose payload is arriving.
    pub current: Option<ArrivingFrame>,
    /// Early frames and fragments that are written into reorder buffers, at most one per path.
    pub out_of_order: Vec<OutOfOrderArrival>,
    /// Messages of which announced pieces are still to come, by the sender's operation number. Each
    /// holds credit for at least one byte, so the credit bounds their number.
    pub announced: BTreeMap<u32, AnnouncedPieces>,
}

/// The parts of a frame that its delivery needs.
#[derive(Clone, Copy)]
pub(super) struct Frame {
    pub kind: Kind,
    pub flags: u8,
    pub head: KindHeader,
    pub start: u64,
    /// The bytes of head and payload.
    pub whole: u64,
    pub payload: u64,
}

/// The announced pieces of a message: which have arrived, and which will arrive.
#[derive(Clone, Copy)]
pub(super) struct AnnouncedPieces {
    /// The offset in the message of the next byte.
    pub next: u64,
    /// The end of the announced bytes.
    pub end: u64,
    pub long: Long,
    pub into: EagerDestination,
}

/// The destination of announced pieces.
#[derive(Clone, Copy)]
pub(super) enum EagerDestination {
    Receive(u32),
    Store(u32),
}

impl OutOfOrderArrival {
    pub fn range(&self) -> (u64, u64) {
        (self.start, self.end)
    }
}

impl ArrivingFrame {
    /// Records that the driver has refused `op`: if the arriving frame is a write of `op`, its
    /// payload counts as discarded, and no completion is reported.
    pub fn handle_refused(&mut self, op: u32) {
        if matches!(self.frame.head, KindHeader::Write { op: mine, .. } if mine == op) {
            self.place = PayloadDestination::Discard;
        }
    }

    /// Records that nothing more arrives by `path`. Returns the byte range of this frame if it was
    /// arriving by `path`.
    pub fn handle_break(&mut self, path: PathId) -> Option<(u64, u64)> {
        self.path.take_if(|mine| *mine == path)?;
        Some((self.frame.start, self.frame.start + self.frame.whole))
    }

    /// Where the payload belongs when it is retransmitted.
    pub fn destination_again(&self) -> PayloadDestination {
        match self.place {
            PayloadDestination::NewUnexpected { size: 0, .. } => PayloadDestination::Discard,
            PayloadDestination::NewUnexpected { store, .. } => {
                PayloadDestination::Unexpected { store, at: 0 }
            }
            place => place,
        }
    }
}

impl AnnouncedPieces {
    /// The announced pieces of a message whose first piece of `payload` bytes went to `place`.
    pub fn new(payload: u64, end: u64, long: Long, place: PayloadDestination) -> Self {
        let into = match place {
            PayloadDestination::NewUnexpected { store, .. } => EagerDestination::Store(store),
            PayloadDestination::Receive { recv, .. } => EagerDestination::Receive(recv),
            _ => unreachable!("messages go to receives and stores"),
        };
        Self { next: payload, end, long, into }
    }
}
