//! Where the bytes of an arriving payload belong.
//!
//! What enters: payloads, with the destination that the protocol has chosen. What leaves: bytes in
//! memory of receives, in registered memory, and in the engine's buffers; refusals of writes to
//! memory that is not registered. [`PayloadPlacement`] borrows the protocol, the buffers and the
//! application's memory for one payload.
//!
//! What may never happen: a byte is written outside of the memory of an operation in flight or of a
//! registered region.

use landbridge_drive::link::stream::Piece;
use landbridge_proto::endpoint::{Endpoint, PayloadDestination, Peer};
use landbridge_proto::wire::frame::Header;

use super::application::Application;
use super::links::Link;
use super::memory::Bytes;
use super::receive_buffers::ReceiveBuffers;

/// The parts of the engine that decide where an arriving payload belongs.
pub struct PayloadPlacement<'a> {
    pub core: &'a mut Endpoint<Bytes>,
    pub buffers: &'a mut ReceiveBuffers,
    pub application: &'a Application,
}

impl PayloadPlacement<'_> {
    /// Copies a whole payload to its destination.
    #[inline(always)]
    pub fn put(&mut self, peer: Peer, place: PayloadDestination, payload: &[u8]) {
        match place {
            PayloadDestination::Discard => (),
            PayloadDestination::Receive { .. } | PayloadDestination::Reply { .. } => {
                if let Some((memory, at, take)) = self.core.place_memory(place) {
                    let take = payload.len().min(take.min(payload.len() as u64) as usize);
                    // SAFETY: the application's memory is valid until the completion, which comes
                    // later.
                    unsafe { memory.fill(at, &payload[..take]) };
                }
            }
            PayloadDestination::NewUnexpected { store, size } if size == payload.len() as u64 => {
                if size > 0 {
                    self.buffers.keep_store(store, payload.into());
                }
            }
            PayloadDestination::NewUnexpected { .. } | PayloadDestination::Unexpected { .. } => {
                let base = self.buffers.store_memory(place);
                // SAFETY: the store has the size that its message announced, and the protocol
                // assigns each byte once.
                unsafe { payload.as_ptr().copy_to_nonoverlapping(base, payload.len()) };
            }
            PayloadDestination::Region { op, key, offset } => {
                if let Some(base) =
                    self.application.region(self.core, peer, op, key, offset, payload.len())
                {
                    // SAFETY: `Application::region` has verified that the range lies inside a
                    // registered region.
                    unsafe { payload.as_ptr().copy_to_nonoverlapping(base, payload.len()) };
                }
            }
            PayloadDestination::Scratch => {
                self.buffers.scratch.clear();
                self.buffers.scratch.extend_from_slice(payload);
            }
            PayloadDestination::OutOfOrder { .. } => unreachable!("kept with its head"),
        }
    }

    /// The destination of a payload of `len` bytes that has not arrived whole: pieces of memory,
    /// and the number of bytes to skip.
    pub fn target(
        &mut self,
        link: &mut Link,
        peer: Peer,
        place: PayloadDestination,
        (header, head): (&Header, &[u8]),
        len: usize,
    ) -> (PayloadTarget, usize) {
        let mut target = PayloadTarget::default();
        let taken = match place {
            PayloadDestination::Discard => 0,
            PayloadDestination::Receive { .. } | PayloadDestination::Reply { .. } => {
                let Some((memory, at, take)) = self.core.place_memory(place) else {
                    return (target, len);
                };
                let take = take.min(len as u64);
                target.extend(memory.range(at, take).as_slice());
                take as usize
            }
            PayloadDestination::NewUnexpected { .. } | PayloadDestination::Unexpected { .. } => {
                let base = self.buffers.store_memory(place);
                target.push(Piece { base, len });
                len
            }
            PayloadDestination::Region { op, key, offset } => {
                match self.application.region(self.core, peer, op, key, offset, len) {
                    Some(base) => {
                        target.push(Piece { base, len });
                        len
                    }
                    None => 0,
                }
            }
            PayloadDestination::Scratch => {
                link.scratch.clear();
                link.scratch.resize(len, 0);
                target.push(Piece { base: link.scratch.as_mut_ptr(), len });
                len
            }
            PayloadDestination::OutOfOrder { frame, whole, at } => {
                let bytes = self.buffers.early_bytes(peer, frame, whole, header, head);
                let base = bytes[at as usize..].as_mut_ptr();
                target.push(Piece { base, len });
                len
            }
        };
        (target, len - taken)
    }
}

/// Pieces of memory for a payload.
#[derive(Default)]
pub struct PayloadTarget {
    pub pieces: Vec<Piece>,
}

impl PayloadTarget {
    fn push(&mut self, piece: Piece) {
        if piece.len > 0 {
            self.pieces.push(piece);
        }
    }

    fn extend(&mut self, pieces: &[Piece]) {
        self.pieces.extend_from_slice(pieces);
    }

    pub fn as_slice(&self) -> &[Piece] {
        &self.pieces
    }
}
