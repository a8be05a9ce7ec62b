//! What one connection has begun to write: the rest of a frame, and the channels of the frames that
//! went before.
//!
//! A frame that a link has begun to write belongs to this link alone. What may never happen: the
//! rest of a begun frame leaves by another link.

use super::recent_channels::RecentChannels;
use crate::route::byte_queue::ByteQueue;

/// The frame that one connection has begun to write, and the channels of the frames that it has
/// written.
#[derive(Debug, Default)]
pub(super) struct Writer {
    /// The rest of a frame whose first bytes have been written, and keepalives after it.
    pub rest: ByteQueue,
    pub recent_channels: RecentChannels,
}
