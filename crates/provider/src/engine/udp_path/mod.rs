//! One end of a UDP path: where its datagrams go, and what its monitor knows.
//!
//! What enters: probes, answers and silence ([`path_monitor`]). What leaves: whether the path is
//! open or suspected, and its properties for the protocol. What may never happen: a frame is larger
//! than a datagram that the path has carried.

pub mod path_monitor;

use std::net::SocketAddr;

use landbridge_drive::link::datagram::DestinationError;
use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::PathProperties;
use landbridge_proto::limit::{CHECKSUM_BYTES, KIND_HEADER_BYTES_MAX};
use landbridge_proto::path::congestion;
use landbridge_proto::path::time::Time;
use landbridge_proto::wire::datagram::TOKEN_BYTES;
use landbridge_proto::wire::frame::HEADER_BYTES;

use self::path_monitor::{PathChange, PathMonitor};

/// Path number for frames that arrive by a UDP path before the path is open on this side; no open
/// path has this number.
pub const UNOPENED: PathId = PathId(u8::MAX - 1);

/// Bytes of an IPv4 and a UDP header in a packet.
const PACKET_BYTES: usize = 28;
/// Number of consecutive losses of large datagrams after which the engine checks whether their size
/// still passes.
const BLACK_HOLE_LOSSES: u32 = 3;

/// One end of a UDP path.
pub struct UdpPath {
    pub(super) socket: usize,
    pub(super) to: SocketAddr,
    /// The peer's token for this endpoint.
    pub(super) token: u64,
    /// This endpoint's token for the peer.
    pub(super) own_token: u64,
    pub(super) congestion: congestion::CongestionAlgorithm,
    /// The path has been open.
    pub(super) has_worked: bool,
    pub(super) monitor: PathMonitor,
}

/// Address, socket number and token of a UDP path.
#[derive(Clone, Copy)]
pub struct DatagramTarget {
    pub socket: usize,
    pub to: SocketAddr,
    pub token: u64,
}

impl UdpPath {
    /// Checks the datagram size of the path if several of its largest datagrams in a row were lost.
    pub fn detect_black_hole(&mut self, large_lost: u32) {
        if large_lost >= BLACK_HOLE_LOSSES {
            self.monitor.recheck_size();
        }
    }

    /// Handles an ICMP notice about the path's destination.
    pub fn handle_notice(&mut self, now: Time, error: DestinationError) -> PathChange {
        match error {
            DestinationError::TooLarge { size: 0, mtu } => {
                let fits = mtu.unwrap_or(0) as usize;
                let size = self.monitor.size();
                if fits < size + PACKET_BYTES {
                    self.monitor.handle_too_large(now, size)
                } else {
                    PathChange::Nothing
                }
            }
            DestinationError::TooLarge { size, .. } => self.monitor.handle_too_large(now, size),
            DestinationError::Unreachable { .. } | DestinationError::QueueFull => {
                PathChange::Nothing
            }
        }
    }

    pub fn is_open(&self) -> bool {
        self.monitor.is_open()
    }

    /// Whether the path has been open.
    pub fn has_worked(&self) -> bool {
        self.has_worked
    }

    /// Sends a probe soon, since no connection shows whether the peer is alive.
    pub fn expect_answer(&mut self, now: Time) {
        self.monitor.expect_answer(now);
    }

    /// Ends the validity of the path, as if the path had failed.
    #[cfg(test)]
    pub fn close_for_tests(&mut self) {
        self.monitor.close(Time(0));
    }

    pub fn socket(&self) -> usize {
        self.socket
    }

    pub fn is_suspected(&self) -> bool {
        self.monitor.is_suspected()
    }

    pub fn target(&self) -> DatagramTarget {
        DatagramTarget { socket: self.socket, to: self.to, token: self.token }
    }

    /// The properties of the path. Messages that fit into one datagram are copied; pieces of longer
    /// messages stay in the application's memory.
    pub fn traits(&self, copy_max: u32) -> PathProperties {
        let payload_max = self.payload_max();
        PathProperties {
            payload_max,
            eager_max: payload_max,
            first_piece: payload_max,
            pull: false,
            window: u64::MAX,
            ahead: true,
            lossless: false,
            unbounded: false,
            checked: true,
            copy_max: copy_max.min(payload_max - 1),
            spare: false,
            reorders: true,
            silent_loss: true,
            datagram: Some(self.congestion),
        }
    }

    /// Payload bytes that fit into every datagram, whatever the kind header of the frame.
    fn payload_max(&self) -> u32 {
        (self.monitor.size() - TOKEN_BYTES - HEADER_BYTES - KIND_HEADER_BYTES_MAX - CHECKSUM_BYTES)
            as u32
    }
}
