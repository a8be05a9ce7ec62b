//! Harnesses that drive the state machines of `landbridge-proto` in place of a real driver, for its
//! tests, the simulator and the fuzzer. No part of a job.
//!
//! | module | does |
//! |---|---|
//! | `violation` | events that must not happen, as values |
//! | `endpoint` | one harness for endpoints |
//! | `relay` | one harness for relays |

pub mod endpoint;
pub mod relay;
mod violation;

pub use violation::Violation;
