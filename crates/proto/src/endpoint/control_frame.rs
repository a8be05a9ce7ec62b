//! Control frames: frames without bytes of the channel, which wait for a path separately from the
//! messages, and all else that an endpoint owes a peer for the repair of losses.

use alloc::vec::Vec;

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
            ControlFrame::Sack(0, _) => Kind::Sack,
            ControlFrame::Sack(..) => Kind::StatusReply,
            ControlFrame::StatusRequest(_) => Kind::StatusRequest,
            ControlFrame::AddressAdvertisement(address) => address.kind(),
        }
    }

    /// Whether the frame is an advertisement.
    pub fn is_advertisement(self) -> bool {
        matches!(self, ControlFrame::AddressAdvertisement(_))
    }

    /// The path by which the frame must be sent, if it must take a certain one.
    pub fn path(self) -> Option<PathId> {
        match self {
            ControlFrame::Sack(_, path) | ControlFrame::StatusRequest(path) => path,
            ControlFrame::AddressAdvertisement(..) => None,
        }
    }
}

/// What an endpoint owes one peer so that lost and corrupt bytes are retransmitted.
#[derive(Default)]
pub(super) struct PendingRepairs {
    /// The control frames that wait to be sent. They carry no bytes of the channel.
    pub control_frames: Vec<ControlFrame>,
    /// The last status request answered. The answer may be lost with a path that the peer closed.
    pub answered_request: Option<u64>,
    /// Corrupt ranges (start, end) not yet received again, and whether the peer knows of each.
    pub corrupt: Vec<(u64, u64, bool)>,
    /// The bytes from the first to the end of early frames that were dropped because they exceeded
    /// the reorder window. This endpoint asks for them when their turn comes.
    pub dropped_out_of_order: Option<(u64, u64)>,
    /// The number of refusals that wait to be sent.
    pub refusals: u32,
}

impl PendingRepairs {
    /// Queues a report to the peer of the ranges that arrived early: see [`ControlFrame::Sack`].
    pub fn owe_sack(&mut self, number: u64, path: Option<PathId>) {
        let is_same = |control_frame: &&mut ControlFrame| match control_frame {
            ControlFrame::Sack(_, other) => number == 0 || *other == path,
            _ => false,
        };
        match self.control_frames.iter_mut().find(is_same) {
            Some(ControlFrame::Sack(other, _)) => *other = number.max(*other),
            _ => self.control_frames.push(ControlFrame::Sack(number, path)),
        }
    }

    /// Queues a status request to the peer, unless the same one waits.
    pub fn owe_status_request(&mut self, path: Option<PathId>) {
        if !self.control_frames.contains(&ControlFrame::StatusRequest(path)) {
            self.control_frames.push(ControlFrame::StatusRequest(path));
        }
    }

    /// The index of the first corrupt range that has not been reported to the peer.
    pub fn unreported_corrupt(&self) -> Option<usize> {
        self.corrupt.iter().position(|&(_, _, is_reported)| !is_reported)
    }

    /// Lets every corrupt range be reported again: the peer may not have received the reports.
    pub fn repeat_corrupt(&mut self) {
        self.corrupt.iter_mut().for_each(|(_, _, is_reported)| *is_reported = false);
    }
}
