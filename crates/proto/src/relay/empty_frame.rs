//! Frames without a body that a relay makes itself: reports, keepalives, and what a replay says of
//! itself.

use crate::id::Address;
use crate::wire::frame::{Header, Kind, pair_check};

/// A header of a frame without a body.
pub(super) fn empty(kind: Kind, source: Address, target: Address) -> Header {
    let sequence = if kind.reports_undeliverable() { pair_check(source, target) } else { 0 };
    Header { length: 0, kind, flags: 0, hops: 0, source, target, sequence, delivered: 0, credit: 0 }
}
