//! The libfabric provider `landbridge`: the face the MPI libraries see, and the engine behind it.
//!
//! `ffi` translates libfabric's calls into `engine` requests and is the only place with raw object
//! pointers; `engine` knows no `fid`. Between them lie the small shared parts: `av` (names by
//! number), `mr` (memory by key), `queue` and `counter` (finished operations), `sink` (which of
//! them an endpoint uses), `port` (an engine behind its lock).

pub mod abi;
pub mod av;
pub mod counter;
pub mod engine;
pub mod mr;
pub mod port;
pub mod queue;
pub mod sink;
pub mod sync;
