//! The process manager interface (PMI-1), as MPICH and Intel MPI use it.
//!
//! A rank exchanges text lines with the node agent that has started it, over a socket pair. No
//! module here does I/O, so a whole tree of agents runs in a test.
//!
//! | module | does |
//! |---|---|
//! | `wire` | parses and writes lines |
//! | `kvs` | the keys of a process group |
//! | `spawn` | parses a rank's spawn of processes |
//! | `server` | the state of one agent: its own ranks and the agents below it |

pub mod kvs;
pub mod server;
pub mod spawn;
pub mod wire;
