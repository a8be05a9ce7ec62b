//! Connections to peers and to the relay: how they begin, fail, and are made again.
//!
//! What enters: frames and ends of links, outcomes of hellos, and the time. What leaves: dials,
//! hellos, frames, and the failure of peers that no path reaches any more.
//!
//! What may never happen: a method of [`Connections`] waits for the network, or polls. Only
//! [`Engine`](super::Engine), which owns the connections, does that.

use super::connector::Connector;
use super::data_path::DataPath;
use super::liveness::LivenessCheck;
use super::uplink::Uplink;

/// The state that changes when a link begins or ends.
///
/// The type has more than 40 methods, because they call each other in circles: a frame that cannot
/// be sent ends a link, the end of a link gives up a peer or dials the peer again, a dial that ends
/// at once opens a link, and frames that are read from a link end other links. One type holds the
/// state that changes in such a circle, and executes the decisions in one order.
pub struct Connections {
    pub(super) data: DataPath,
    pub(super) uplink: Uplink,
    pub(super) connector: Connector,
    pub(super) liveness: LivenessCheck,
}
