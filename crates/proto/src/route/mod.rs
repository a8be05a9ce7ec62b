//! Where a relay sends a frame next, and where the frame waits until its output accepts it.

pub mod byte_queue;
pub mod routing_table;
