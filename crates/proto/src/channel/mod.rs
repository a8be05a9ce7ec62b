//! A channel below its messages: the numbered bytes from one process to another, over paths that come and go.
//!
//! [`Outflow`] is the sender's side: what has been sent and not confirmed, on which path, and what of it must go again.
//! [`Inflow`] is the receiver's: what has arrived, in whatever order, and which frame may be taken in next. Neither
//! sees a payload byte. Who decides what is *new* on the channel is the endpoint.
//!
//! **Repair.** There is one exchange for everything that can be lost: the sender asks ([`Kind::Ask`]), the receiver
//! answers with the ranges it has ([`Kind::Report`]), the sender sends what is missing, by any path.
//!
//! [`Kind::Ask`]: crate::wire::frame::Kind::Ask
//! [`Kind::Report`]: crate::wire::frame::Kind::Report

pub mod flight;
mod inflow;
mod outflow;
pub mod probe;

pub use inflow::{Inflow, Kept, Standing};
pub use outflow::{Origin, Outflow, Retained, State};

/// One of the paths of a channel, numbered by its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u8);

/// Paths of one channel: every pair of interfaces that is worth having, and the relay.
pub const PATHS_MAX: usize = 8;

/// Bytes between the last one confirmed and the last one sent, once they may overtake each other. The receiver keeps
/// what comes early, so it is its bound as well. 1 Gb/s times 128 ms.
pub const SPAN_BYTES_MAX: u64 = 16 << 20;

/// Frames among them.
pub const SPAN_FRAMES_MAX: usize = 1 << 13;
