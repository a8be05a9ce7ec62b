//! A channel below its messages: the numbered bytes from one process to another, over paths that
//! come and go.
//!
//! [`RetransmitBuffer`] is the sender's side: which frames have been sent and not acknowledged, on
//! which path, and which of them must be retransmitted. [`ReassemblyBuffer`] is the receiver's
//! side: which frames have arrived, in any order, and which frame may be delivered next. Neither
//! sees a payload byte. The endpoint decides what is *new* on the channel.
//!
//! **Repair.** One exchange repairs every loss: the sender asks ([`Kind::StatusRequest`]), the
//! receiver answers with the ranges that it has ([`Kind::StatusReply`]), and the sender retransmits
//! what is missing, by any path.
//!
//! [`Kind::StatusRequest`]: crate::wire::frame::Kind::StatusRequest
//! [`Kind::StatusReply`]: crate::wire::frame::Kind::StatusReply
//!
//! | module | does |
//! |---|---|
//! | `probe_timeout` | when a path has been silent for too long |
//! | `flight` | datagrams in flight on one path |
//! | `retransmit_buffer` | the sender's side of a channel |
//! | `reassembly_buffer` | the receiver's side of a channel |

pub mod flight;
pub mod probe_timeout;
mod reassembly_buffer;
mod retransmit_buffer;

pub use reassembly_buffer::{ArrivalOrder, BufferedFrame, ReassemblyBuffer};
pub use retransmit_buffer::{Origin, RetainedFrame, RetainedState, RetransmitBuffer};

/// The number of a path of a channel, which the driver assigns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u8);

/// The most paths of one channel: every pair of interfaces that is worth having, and the relay.
pub const PATHS_MAX: usize = 8;

/// The reorder window: the most bytes between the last acknowledged byte and the last sent byte
/// while frames may overtake each other. The receiver buffers frames that arrive early, so this
/// value bounds the receiver's reorder buffers too. 1 Gbit/s times 128 ms.
pub const REORDER_WINDOW_BYTES_MAX: u64 = 16 << 20;

/// The most unacknowledged frames while frames may overtake each other.
pub const REORDER_WINDOW_FRAMES_MAX: usize = 1 << 13;
