//! Who carries messages between ranks of one node. `local` chooses.

use serde::{Deserialize, Serialize};

/// The transport between ranks of a node, for the whole job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LocalTransport {
    /// Our provider carries all messages.
    #[default]
    Own,
    /// The MPI library carries messages inside a node, provided that the library gets the ranks of
    /// the node from our process manager; several clusters are on one machine.
    LibraryByPlan,
    /// The MPI library carries messages inside a node, even a library that identifies the node by
    /// the host name.
    Library,
}
