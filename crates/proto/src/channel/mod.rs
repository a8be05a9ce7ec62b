//! A channel below its messages: the numbered bytes from one process to another, over paths that come and go.
//!
//! [`RetransmitBuffer`] is the sender's side: what has been sent and not confirmed, on which path, and what of it must go again.
//! [`ReassemblyBuffer`] is the receiver's: what has arrived, in whatever order, and which frame may be taken in next. Neither
//! sees a payload byte. Who decides what is *new* on the channel is the endpoint.
//!
//! **Repair.** There is one exchange for everything that can be lost: the sender asks ([`Kind::StatusRequest`]), the receiver
//! answers with the ranges it has ([`Kind::Sack`]), the sender sends what is missing, by any path.
//!
//! [`Kind::StatusRequest`]: crate::wire::frame::Kind::StatusRequest
//! [`Kind::Sack`]: crate::wire::frame::Kind::Sack

pub mod flight;
pub mod probe_timeout;
mod reassembly_buffer;
mod retransmit_buffer;

pub use reassembly_buffer::{ArrivalOrder, BufferedFrame, ReassemblyBuffer};
pub use retransmit_buffer::{Origin, RetainedFrame, RetainedState, RetransmitBuffer};

/// One of the paths of a channel, numbered by its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u8);

/// Paths of one channel: every pair of interfaces that is worth having, and the relay.
pub const PATHS_MAX: usize = 8;

/// Bytes between the last one confirmed and the last one sent, once they may overtake each other. The receiver keeps
/// what comes early, so it is its bound as well. 1 Gb/s times 128 ms.
pub const REORDER_WINDOW_BYTES_MAX: u64 = 16 << 20;

/// Frames among them.
pub const REORDER_WINDOW_FRAMES_MAX: usize = 1 << 13;
