//! Control frames: frames without bytes of the channel, which wait for a path separately from the
//! messages.

use crate::channel::PathId;
use crate::wire::frame::Kind;
use crate::wire::kind_header::AdvertisedAddress;

/// A control frame that waits to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControlFrame {
    /// A report of the ranges that arrived early, as the answer to status request `.0` of the peer
    /// (0: to none). It takes the path `.1`, if given and as long as this path takes frames,
    /// because the peer measures the path by the answer.
    Sack(u64, Option<PathId>),
    /// A request that the peer report what has arrived, by the given path, if any.
    StatusRequest(Option<PathId>),
    /// An address at which this endpoint accepts connections.
    AddressAdvertisement(AdvertisedAddress),
}

impl ControlFrame {
    /// The kind of the frame.
    pub fn kind(self) -> Kind {
        match self {
            ControlFrame::Sack(..) => Kind::Sack,
            ControlFrame::StatusRequest(_) => Kind::StatusRequest,
            ControlFrame::AddressAdvertisement(..) => Kind::AddressAdvertisement,
        }
    }

    /// The path by which the frame must be sent, if it must take a certain one.
    pub fn path(self) -> Option<PathId> {
        match self {
            ControlFrame::Sack(_, path) | ControlFrame::StatusRequest(path) => path,
            ControlFrame::AddressAdvertisement(..) => None,
        }
    }
}
