//! In which pieces long messages are appended to logs: each piece leaves for another node while the
//! next one is appended.
//!
//! What enters: bytes that were appended to logs. What leaves: where sending pauses, and with which
//! peer it goes on. What may never happen: frames are in another order than without pauses, since a
//! later incarnation is compared frame by frame.

use landbridge_drive::link::node_log::TRANSFER_BYTES_MAX;
use landbridge_proto::endpoint::Peer;

/// Bytes of the first piece, so that the receiver begins early. Each piece has twice the bytes of
/// the one before it, because a piece costs a message between the transports.
const FIRST_BYTES: usize = 16 << 10;

/// The pieces of what is sent in one call of the program.
#[derive(Default)]
pub struct LogPieces {
    /// Bytes of the present piece; 0: sending does not pause.
    bytes: usize,
    appended: usize,
    /// The peer whose frames are next, while sending pauses.
    next: Option<Peer>,
}

impl LogPieces {
    /// Lets sending pause from now on, until [`Self::continues`] returns false.
    #[inline]
    pub fn begin(&mut self) {
        (self.bytes, self.appended) = (FIRST_BYTES, 0);
    }

    /// Notes bytes that were appended to the log to a peer.
    #[inline]
    pub fn note_appended(&mut self, peer: Peer, bytes: usize) {
        self.appended += bytes;
        if self.bytes > 0 && self.appended >= self.bytes {
            self.next = Some(peer);
        }
    }

    /// Whether sending pauses.
    #[inline]
    pub fn is_paused(&self) -> bool {
        self.next.is_some()
    }

    /// The peer with which sending goes on after a pause.
    #[inline]
    pub fn take_next(&mut self) -> Option<Peer> {
        self.next.take()
    }

    /// Whether sending has paused, and now goes on with the next piece.
    #[inline]
    pub fn continues(&mut self) -> bool {
        let continues = self.is_paused();
        self.bytes = if continues { (2 * self.bytes).min(TRANSFER_BYTES_MAX) } else { 0 };
        self.appended = 0;
        continues
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::Bytes;
    use super::*;
    use landbridge_proto::endpoint::{Config, Endpoint};
    use landbridge_proto::id::Address;

    #[test]
    fn pieces_grow_and_sending_goes_on_with_the_same_peer() {
        let config = Config {
            address: Address::new(0, 1),
            eager_window: 1 << 20,
            min_multi_recv: 64,
            operations_max: 16,
        };
        let peer = Endpoint::<Bytes>::new(config).peer(Address::new(1, 1));
        let mut pieces = LogPieces::default();
        let pauses = |pieces: &mut LogPieces, bytes| {
            pieces.note_appended(peer, bytes);
            pieces.is_paused()
        };
        assert!(!pauses(&mut pieces, 1 << 30), "nobody waits for the first piece");
        pieces.begin();
        for bytes in [16 << 10, 32 << 10, 64 << 10, 128 << 10, 128 << 10] {
            assert!(!pauses(&mut pieces, bytes - 1) && pauses(&mut pieces, 1));
            assert!(pieces.continues());
            assert_eq!(pieces.take_next(), Some(peer));
        }
        assert!(!pauses(&mut pieces, 100) && !pieces.continues());
        assert!(!pauses(&mut pieces, 1 << 30), "until the next call");
    }
}
