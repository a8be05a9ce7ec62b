//! One harness for endpoints: an endpoint with the state of its driver, frames, and two endpoints
//! that exchange frames.
//!
//! What enters: frames of a peer, as a whole or in pieces of any size, and the endpoint's actions.
//! What leaves: frames, actions that only the application can perform, and [`Violation`]s. The
//! harness has no clock and no links: its users decide when a frame leaves, arrives, is lost, comes
//! twice or is corrupt, because this is what each of them tests.
//!
//! What may never happen, and is a violation: the endpoint asks for something that its driver
//! cannot do; a payload is placed outside its memory; an action names a stored message or a frame
//! that is not there; a peer makes the endpoint store more unexpected bytes than its credit allows,
//! or more early frames than the reorder window holds.
//!
//! The modules, each of which uses only modules before it:
//!
//! | module | holds |
//! |---|---|
//! | `memory` | what the harness asks of memory, and memory without bytes |
//! | `frame` | a frame on its way |
//! | `driven_endpoint` | an endpoint with the state of its driver |
//! | `pair_end` | one of two endpoints whose frames a test hands over |
//!
//! [`Violation`]: crate::Violation

mod driven_endpoint;
mod frame;
mod memory;
mod pair_end;

pub use driven_endpoint::{DrivenEndpoint, IncomingFrame, REFUSED};
pub use frame::Frame;
pub use memory::{ByteStore, NoBytes, SizedMemory};
pub use pair_end::{PEER, PairEnd, REMOTE, TICKET, message, pair, posting, settle};
