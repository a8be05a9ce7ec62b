//! Endpoints that break the protocol: the user hears who it is, and whoever does it again and again is not let in any more.
//!
//! In: frames that no receiver could read. Out: a warning, and refusals of further connections. Bytes that a network brings may
//! have been damaged on the way, so such a connection may be made anew, unless [`OFFENCES_MAX`] in a row brought nothing that was
//! right. In shared memory nothing is damaged. What processes may do that come back is up to whoever starts them.
//!
//! What may never happen: an endpoint connects, is cut off and connects again without an end.

use std::collections::BTreeMap;

use landbridge_proto::id::Address;
use landbridge_proto::wire::Malformed;

use super::{Loop, Phase};
use crate::engine::epoll::transport::Transport;

/// Connections of an endpoint in a row that brought a frame that cannot be, and none before it that can.
const OFFENCES_MAX: u32 = 16;

/// How often each endpoint has broken the protocol in a row.
#[derive(Default)]
pub struct Offences(BTreeMap<Address, u32>);

impl Offences {
    /// It has done so. Whether it is not let in from now on.
    fn note(&mut self, address: Address, is_near: bool) -> bool {
        let count = self.0.entry(address).or_default();
        let was_let_in = *count < OFFENCES_MAX;
        *count = if is_near { OFFENCES_MAX } else { *count + 1 };
        was_let_in && *count >= OFFENCES_MAX
    }

    /// A frame of it was right.
    fn forgive(&mut self, address: Address) {
        if self.0.get(&address).is_some_and(|count| *count < OFFENCES_MAX) {
            self.0.remove(&address);
        }
    }

    /// Whether it may attach.
    ///
    /// # Errors
    /// Why not.
    pub fn judge(&self, address: Address) -> Result<(), String> {
        match self.0.get(&address) {
            Some(OFFENCES_MAX..) => {
                Err(format!("{address} has sent what no rank sends, and is not let in any more"))
            }
            _ => Ok(()),
        }
    }
}

impl Loop<'_> {
    /// The connection has brought so many bytes of frames that are right.
    #[inline]
    pub(super) fn note_right(&mut self, slot: usize, bytes: usize) {
        if bytes > 0
            && !self.offences.0.is_empty()
            && let Phase::Endpoint { address, .. } = self.connections[slot].phase
        {
            self.offences.forgive(address);
        }
    }

    /// And then one that is not.
    pub(super) fn note_offence(&mut self, slot: usize, malformed: Malformed) {
        let connection = &self.connections[slot];
        let Phase::Endpoint { address, .. } = connection.phase else { return };
        let is_near = matches!(connection.transport, Some(Transport::Near(_)));
        if !self.relay.is_recovering() && self.offences.note(address, is_near) {
            self.watch.warn(format_args!(
                "{address} sends what no rank sends, and is not let in any more: {malformed}"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_breaks_the_protocol_in_shared_memory_is_not_let_in_again() {
        let (mut offences, address) = (Offences::default(), Address::new(3, 0));
        assert!(offences.judge(address).is_ok());
        assert!(offences.note(address, true) && !offences.note(address, true), "it is said once");
        offences.forgive(address);
        assert!(offences.judge(address).is_err() && offences.judge(Address::new(4, 0)).is_ok());
    }

    #[test]
    fn damage_on_a_network_counts_only_in_a_row() {
        let (mut offences, address) = (Offences::default(), Address::new(3, 0));
        for _ in 0..3 {
            assert!((1..OFFENCES_MAX).all(|_| !offences.note(address, false)));
            assert!(offences.judge(address).is_ok());
            offences.forgive(address);
        }
        assert!((1..OFFENCES_MAX).all(|_| !offences.note(address, false)));
        assert!(offences.note(address, false) && offences.judge(address).is_err());
    }
}
