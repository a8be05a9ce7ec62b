//! The process manager interface (PMI-1) as MPICH and Intel MPI speak it.
//!
//! A rank talks text lines over a socket pair to the node agent that started it. [`wire`] reads
//! and writes these lines, [`kvs`] holds the keys, [`server`] is the state of one agent: its own
//! ranks and the agents below it. None of them does I/O, so a whole tree of agents runs in a test.

pub mod kvs;
pub mod server;
pub mod spawn;
pub mod wire;
