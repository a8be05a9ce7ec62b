//! Where a relay sends a frame next, and where the frame waits until its output accepts it.
//!
//! | module | does |
//! |---|---|
//! | `byte_queue` | bytes that wait for an output |
//! | `routing_table` | process to cluster to link |

pub mod byte_queue;
pub mod routing_table;
