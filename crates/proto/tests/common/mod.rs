//! Code that the tests of endpoints share.

use landbridge_proto::endpoint::Memory;

/// Memory that has a size and no bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Room(pub u64);

impl Memory for Room {
    fn size(&self) -> u64 {
        self.0
    }

    fn address(&self) -> u64 {
        0
    }
}
