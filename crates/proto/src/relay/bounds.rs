//! Bounds of a relay: bytes of frames and queues, and the times that frames wait.

use crate::limit::{
    EAGER_TOTAL_BYTES, KIND_HEADER_BYTES_MAX, RELAY_PAYLOAD_BYTES_MAX, RELAY_WINDOW_BYTES,
};
use crate::wire::frame::HEADER_BYTES;

/// Largest frame that a relay accepts, in bytes.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + KIND_HEADER_BYTES_MAX + RELAY_PAYLOAD_BYTES_MAX;

/// Bound of the queue towards an endpoint, in bytes. An endpoint that computes for a while must not
/// hold up the link that it shares with others, so the queue holds all that may come to the
/// endpoint without a grant, and four windows of long messages that the endpoint has requested.
pub const ENDPOINT_QUEUE_BYTES_MAX: usize = (EAGER_TOTAL_BYTES + 4 * RELAY_WINDOW_BYTES) as usize;

/// Bound of the queue towards a peer relay, in bytes. The queue is small, since inputs wait fairly
/// outside the queue, while queued frames delay everybody: eight frames, so that the output never
/// runs dry.
pub const PEER_QUEUE_BYTES_MAX: usize = 8 * FRAME_BYTES_MAX;

/// Bound of all queues together, in bytes; as the queues fill up, the bound of each queue shrinks
/// to the remaining memory.
pub const TOTAL_QUEUE_BYTES: usize = 1 << 30;

/// Bytes that a queue may hold however full the relay is, so that every link makes progress.
pub const QUEUE_BYTES_MIN: usize = 2 * FRAME_BYTES_MAX;

/// Milliseconds that frames wait for an endpoint that has not attached yet. Ranks of a job start
/// within seconds of each other; a rank that never attaches must not stall its senders for ever.
pub const ATTACH_MILLIS_MAX: u64 = 30_000;

/// Milliseconds that frames wait for an endpoint whose link has broken, unless the user sets
/// another time (`peer_timeout`).
pub const ENDPOINT_RECONNECT_MILLIS_MAX: u64 = 60_000;

/// Milliseconds that frames wait for an endpoint that may be restarted, unless the user sets a
/// longer time (`peer_timeout`). The launcher ends the job if it cannot restart the endpoint;
/// before the endpoint attaches, its program may compute.
pub const RESTART_MILLIS_MAX: u64 = 600_000;

/// Milliseconds that frames wait for a peer relay, unless the time for an endpoint is longer. The
/// time is long enough for the peer relay to be restarted or rerouted.
pub const PEER_RECONNECT_MILLIS_MAX: u64 = 60_000;

/// Most streams to one peer relay: the maximum of `wan_streams`.
pub const STREAMS_MAX: usize = 64;

/// Milliseconds after which a stream sends a keepalive with the number of received bytes: soon
/// enough for the peer relay to see that the stream is alive.
pub const KEEPALIVE_MILLIS: u64 = 1_000;

/// Received bytes after which a stream sends a keepalive without waiting for [`KEEPALIVE_MILLIS`]:
/// when a stream breaks, few sources that have lost nothing are notified.
pub const KEEPALIVE_BYTES: u64 = 1 << 20;

const _: () = {
    assert!(QUEUE_BYTES_MIN <= PEER_QUEUE_BYTES_MAX);
    assert!(PEER_QUEUE_BYTES_MAX <= ENDPOINT_QUEUE_BYTES_MAX);
};
