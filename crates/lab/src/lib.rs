//! The laboratory: everything that tests and measures Landbridge and is never shipped inside a
//! user's job.
//!
//! `net` builds clusters out of network namespaces on one machine and joins them with emulated
//! links. Other experiments (simulator, benchmarks, checks of the source tree) get modules of their
//! own beside it.

pub mod net;
pub mod sim;
