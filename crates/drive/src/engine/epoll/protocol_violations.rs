//! Endpoints that break the protocol: the user learns which endpoint it is, and an endpoint that
//! breaks the protocol again and again is refused.
//!
//! What enters: frames that no receiver could read. What leaves: a warning, and refusals of further
//! connections. Bytes that come over a network may have been damaged in transit, so the endpoint
//! may connect again, unless [`VIOLATIONS_MAX`] connections in a row brought no valid frame. Bytes
//! in shared memory are not damaged. With recovery, the launcher decides about processes that fail,
//! and no endpoint is refused here.
//!
//! What may never happen: an endpoint connects, is disconnected and connects again without an end.

use std::collections::BTreeMap;

use landbridge_proto::id::Address;

/// The number of connections of an endpoint in a row that brought an invalid frame, and no valid
/// frame before it, after which the endpoint is refused.
const VIOLATIONS_MAX: u32 = 16;

/// How often each endpoint has broken the protocol in a row.
#[derive(Default)]
pub struct ProtocolViolations(BTreeMap<Address, u32>);

impl ProtocolViolations {
    /// Records a violation. Returns whether the endpoint is refused from now on.
    pub fn note(&mut self, address: Address, is_shm: bool) -> bool {
        let count = self.0.entry(address).or_default();
        let was_let_in = *count < VIOLATIONS_MAX;
        *count = if is_shm { VIOLATIONS_MAX } else { *count + 1 };
        was_let_in && *count >= VIOLATIONS_MAX
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records that a frame of the endpoint was valid.
    pub fn reset(&mut self, address: Address) {
        if self.0.get(&address).is_some_and(|count| *count < VIOLATIONS_MAX) {
            self.0.remove(&address);
        }
    }

    /// Checks whether the endpoint may attach.
    ///
    /// # Errors
    /// The reason why the endpoint may not attach.
    pub fn check(&self, address: Address) -> Result<(), String> {
        match self.0.get(&address) {
            Some(VIOLATIONS_MAX..) => {
                Err(format!("{address} has broken the protocol, and is refused from now on"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_breaks_the_protocol_in_shared_memory_is_not_let_in_again() {
        let (mut violations, address) = (ProtocolViolations::default(), Address::new(3, 0));
        assert!(violations.check(address).is_ok());
        assert!(
            violations.note(address, true) && !violations.note(address, true),
            "it is said once"
        );
        violations.reset(address);
        assert!(violations.check(address).is_err() && violations.check(Address::new(4, 0)).is_ok());
    }

    #[test]
    fn damage_on_a_network_counts_only_in_a_row() {
        let (mut violations, address) = (ProtocolViolations::default(), Address::new(3, 0));
        for _ in 0..3 {
            assert!((1..VIOLATIONS_MAX).all(|_| !violations.note(address, false)));
            assert!(violations.check(address).is_ok());
            violations.reset(address);
        }
        assert!((1..VIOLATIONS_MAX).all(|_| !violations.note(address, false)));
        assert!(violations.note(address, false) && violations.check(address).is_err());
    }
}
