//! Harnesses that drive the state machines of `landbridge-proto` in place of a real driver, for its
//! tests, the simulator and the fuzzer. No part of a job.

pub mod endpoint;
pub mod relay;
mod violation;

pub use violation::Violation;
