//! Frames without bytes of the channel, which wait for a path beside the messages.

use crate::channel::PathId;
use crate::wire::frame::Kind;
use crate::wire::kind_header::AdvertisedAddress;

/// Something to be said that is no byte of the channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControlFrame {
    /// What has come early, as the answer to status request `.0` of the peer (0: to none), by this path, if any, as long as that
    /// takes frames: the asker measures it.
    Sack(u64, Option<PathId>),
    /// Asks the peer what has come: by this path, if any.
    StatusRequest(Option<PathId>),
    /// An address of ours at which connections are taken.
    AddressAdvertisement(AdvertisedAddress),
}

impl ControlFrame {
    /// The kind of the frame that carries it.
    pub fn kind(self) -> Kind {
        match self {
            ControlFrame::Sack(..) => Kind::Sack,
            ControlFrame::StatusRequest(_) => Kind::StatusRequest,
            ControlFrame::AddressAdvertisement(..) => Kind::AddressAdvertisement,
        }
    }

    /// The path by which it must go, if any.
    pub fn path(self) -> Option<PathId> {
        match self {
            ControlFrame::Sack(_, path) | ControlFrame::StatusRequest(path) => path,
            ControlFrame::AddressAdvertisement(..) => None,
        }
    }
}
