//! The process manager interface (PMI-1), as MPICH and Intel MPI use it.
//!
//! A rank exchanges text lines with the node agent that has started it, over a socket pair.
//! [`wire`] parses and writes these lines, [`kvs`] holds the keys, and [`server`] is the state of
//! one agent: its own ranks and the agents below it. None of these modules does I/O, so a whole
//! tree of agents runs in a test.

pub mod kvs;
pub mod server;
pub mod spawn;
pub mod wire;
