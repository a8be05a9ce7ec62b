//! The laboratory: code that tests and measures Landbridge and is never part of a user's job.
//!
//! | module | does |
//! |---|---|
//! | `sim` | simulates endpoints and relays without a network |
//! | `net` | clusters of network namespaces on one machine, connected by emulated links |
//! | `soak` | runs MPI programs in such a lab while its network fails |

pub mod net;
pub mod sim;
pub mod soak;
