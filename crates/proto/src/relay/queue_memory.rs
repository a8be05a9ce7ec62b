//! The memory of all queues of a relay, and the bound of each queue.
//!
//! What enters: nothing but the use of the pool. What leaves: how many bytes the queue of a port
//! may hold now. What may never happen: a link has no room at all, so that it makes no progress.

use super::bounds::{
    ENDPOINT_QUEUE_BYTES_MAX, PEER_QUEUE_BYTES_MAX, QUEUE_BYTES_MIN, TOTAL_QUEUE_BYTES,
};
use super::port::{Port, PortKind};
use crate::limit::RELAY_WINDOW_BYTES;
use crate::route::byte_queue::ChunkPool;

/// The memory of all queues: see the module head.
#[derive(Debug)]
pub(super) struct QueueMemory {
    pub pool: ChunkPool,
    /// Bytes: see [`super::Relay::set_endpoint_queue_bytes_max`].
    pub endpoint_bound: usize,
}

impl Default for QueueMemory {
    fn default() -> Self {
        Self { pool: ChunkPool::default(), endpoint_bound: ENDPOINT_QUEUE_BYTES_MAX }
    }
}

impl QueueMemory {
    /// The bound of the queue of `port` in bytes, given how full the relay is.
    #[inline]
    pub fn bound(&self, port: &Port) -> usize {
        let left = TOTAL_QUEUE_BYTES.saturating_sub(self.pool.used_bytes());
        let most = match port.kind {
            PortKind::Endpoint(_) => self.endpoint_bound,
            // Frames that wait for a disconnected peer relay delay no other frames.
            _ if port.state().is_disconnected() => RELAY_WINDOW_BYTES as usize,
            _ => PEER_QUEUE_BYTES_MAX,
        };
        left.clamp(QUEUE_BYTES_MIN, most)
    }
}
