//! What a relay has received on one stream, and what of this it has acknowledged to the peer relay.
//!
//! What enters: received bytes, and the time. What leaves: when a keepalive is due, and the number
//! of bytes that the keepalive carries. What may never happen: a stream that receives frames sends
//! no keepalive for longer than [`KEEPALIVE_MILLIS`] and a tick.

use super::bounds::{KEEPALIVE_BYTES, KEEPALIVE_MILLIS};

/// Received bytes of one stream: see the module head.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StreamReceipts {
    /// Bytes of whole frames received on the stream.
    received: u64,
    /// Bytes that the last keepalive reported to the peer relay.
    acknowledged: u64,
    /// Time of the last keepalive, in milliseconds.
    acknowledged_at: u64,
}

impl StreamReceipts {
    /// The receipts of a stream that connects now.
    pub fn starting_at(now_millis: u64) -> Self {
        Self { acknowledged_at: now_millis, ..Self::default() }
    }

    /// Accounts for whole frames of `bytes` bytes. Returns whether a keepalive is due before its
    /// time.
    #[inline]
    pub fn add(&mut self, bytes: usize) -> bool {
        self.received += bytes as u64;
        self.received - self.acknowledged >= KEEPALIVE_BYTES
    }

    /// Whether the time has come for a keepalive.
    pub fn is_due(&self, now_millis: u64) -> bool {
        now_millis.saturating_sub(self.acknowledged_at) >= KEEPALIVE_MILLIS
    }

    /// Bytes that a keepalive reports now.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Handles that a keepalive has been queued.
    pub fn handle_keepalive(&mut self, now_millis: u64) {
        (self.acknowledged, self.acknowledged_at) = (self.received, now_millis);
    }
}
