//! Where a frame goes next, and where it waits until it can.

pub mod byte_queue;
pub mod routing_table;
