//! The laboratory: everything that tests and measures Landbridge and is never shipped inside a
//! user's job.
//!
//! `net` builds clusters out of network namespaces on one machine and joins them with emulated
//! links. `soak` runs MPI programs in such a lab while its network fails. `sim` needs no network.

pub mod net;
pub mod sim;
pub mod soak;
