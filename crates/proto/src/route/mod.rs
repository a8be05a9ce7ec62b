//! Where a frame goes next, and where it waits until it can.

pub mod queue;
pub mod table;
