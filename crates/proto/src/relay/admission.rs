//! Which frames a relay accepts from a link.
//!
//! What enters: the bytes of one frame, and what is known of its link. What leaves: its header, or
//! why the link violates the protocol. What may never happen: a frame is accepted that its receiver
//! cannot parse, or that claims to come from somebody else.

use super::bounds::FRAME_BYTES_MAX;
use super::port::PortKind;
use crate::id::Address;
use crate::route::routing_table::RoutingTable;
use crate::wire::Malformed;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use crate::wire::kind_header::KindHeader;

/// Which frames a relay accepts: see the module head.
#[derive(Debug, Default)]
pub(super) struct Admission {
    /// Checksum function for frames of endpoints: see [`super::Relay::set_check`].
    pub check: Option<fn(&[u8]) -> u32>,
}

impl Admission {
    /// Parses a header, and checks that this link may send such a frame.
    #[inline]
    pub fn admit(
        &self,
        table: &RoutingTable,
        kind: PortKind,
        bytes: &[u8],
    ) -> Result<Header, Malformed> {
        let header = Header::parse(bytes)?;
        if HEADER_BYTES + header.length as usize > FRAME_BYTES_MAX {
            return Err(Malformed("a frame is longer than relays take"));
        }
        match kind {
            PortKind::Endpoint(address) => {
                if header.source != address {
                    return Err(Malformed("a frame does not come from the endpoint of its link"));
                }
                // No checksum covers the hops: a corrupt count would look like a frame in a routing
                // loop.
                if header.hops != 0 {
                    return Err(Malformed("an endpoint's frame has passed relays already"));
                }
                if !header.kind.may_come_from_endpoint() {
                    return Err(Malformed("a frame of a kind that only relays send"));
                }
            }
            PortKind::Stream { .. } if header.kind == Kind::Keepalive => {
                let nobody = Address::ANONYMOUS;
                if (header.source, header.target, header.length) != (nobody, nobody, 0) {
                    return Err(Malformed("a keepalive with addresses or a payload"));
                }
            }
            PortKind::Stream { cluster, .. } | PortKind::Peer(cluster) => {
                if table.cluster_of(header.source) != Some(cluster) {
                    return Err(Malformed("a frame does not come from the cluster of its link"));
                }
                if table.cluster_of(header.target) != Some(table.own()) {
                    return Err(Malformed("a frame from another relay is not for this cluster"));
                }
            }
        }
        Ok(header)
    }

    /// Checks that the receiver of a whole frame of an endpoint can parse the frame. A malformed
    /// frame ends the connection of its sender; the receiver could only end its own connection,
    /// without knowing which peer is to blame. Frames from other relays have been checked there.
    #[inline]
    pub fn validate(&self, kind: PortKind, header: &Header, frame: &[u8]) -> Result<(), Malformed> {
        if !matches!(kind, PortKind::Endpoint(_)) {
            return Ok(());
        }
        let head = KindHeader::size(header.kind, header.flags);
        header.payload(head)?;
        KindHeader::parse(header.kind, header.flags, &frame[HEADER_BYTES..])?;
        match self.check {
            // Frames about a message log are for the relay itself, and have checksums of their own.
            Some(_) if header.kind.is_about_log() => Ok(()),
            Some(sum) => header.verify(&frame[..HEADER_BYTES + head], sum),
            None => Ok(()),
        }
    }
}
