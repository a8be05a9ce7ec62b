//! The laboratory: code that tests and measures Landbridge and is never part of a user's job.
//!
//! `net` builds clusters of network namespaces on one machine and connects them by emulated links.
//! `soak` runs MPI programs in such a lab while its network fails. `sim` simulates endpoints and
//! relays without a network.

pub mod net;
pub mod sim;
pub mod soak;
