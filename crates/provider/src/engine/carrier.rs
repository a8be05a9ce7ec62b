//! The carrier of a link: what transports the frames.
//!
//! What enters: the transport on which two sides have agreed in a hello, or a UDP path. What
//! leaves: the kind of a link, which `links`, `transmit` and `receive` distinguish. What may never
//! happen: a recorded process has another carrier to its relay than a ring or a recorded link, and
//! beside it none but the logs of its node.

use landbridge_drive::link::node_log::NodeLogs;
use landbridge_drive::link::recorded::RecordedLink;
use landbridge_drive::link::shm::ShmLink;
use landbridge_drive::link::stream::StreamLink;

use super::udp_path::UdpPath;

/// The transport of a link.
pub enum Carrier {
    Shm(Box<ShmLink>),
    Stream(Box<StreamLink>),
    /// A recorded link of this process to a relay on another node.
    Recorded(Box<RecordedLink>),
    /// The logs of the recorded processes of this node, in place of a relay.
    Logs(Box<NodeLogs>),
    /// A UDP path, which joins the same addresses as a stream.
    Datagram(Box<UdpPath>),
    /// A link of the endpoint to itself.
    Loopback,
}
