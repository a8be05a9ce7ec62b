//! The name of an endpoint: what MPI libraries exchange and hand back as an address.
//!
//! It is an *introduction*: who the endpoint is (`address`, `unique`), and where it may be reached
//! today (cluster, node, IP address, port). Only the first part is identity.

use super::{Malformed, u16_at, u32_at, u64_at};
use crate::id::{Address, ClusterId};

/// Bytes of a name: MPICH allows 64 and compresses runs of equal bytes.
pub const NAME_BYTES: usize = 48;

const MAGIC: u16 = 0x1b1d;
const VERSION: u8 = 1;

/// The meaning of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    /// Who: process index and endpoint, or [`Address::ANONYMOUS`].
    pub address: Address,
    /// Who, for anonymous processes: unlike that of any other endpoint.
    pub unique: u64,
    /// Where: the cluster.
    pub cluster: ClusterId,
    /// Where: equal for processes that can share memory.
    pub node: u64,
    /// Where: IPv6 or IPv4-mapped address for direct TCP.
    pub ip: [u8; 16],
    /// Where: TCP port, 0 if it accepts no direct connections.
    pub port: u16,
}

impl Name {
    /// The bytes of the name.
    pub fn emit(&self) -> [u8; NAME_BYTES] {
        let mut bytes = [0; NAME_BYTES];
        bytes[0..2].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[2] = VERSION;
        bytes[4..8].copy_from_slice(&self.address.0.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.cluster.0.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.port.to_le_bytes());
        bytes[12..20].copy_from_slice(&self.unique.to_le_bytes());
        bytes[20..28].copy_from_slice(&self.node.to_le_bytes());
        bytes[28..44].copy_from_slice(&self.ip);
        bytes
    }

    /// Reads a name.
    ///
    /// # Errors
    /// If it is not one of this version.
    pub fn parse(bytes: &[u8]) -> Result<Name, Malformed> {
        if bytes.len() < NAME_BYTES || u16_at(bytes, 0) != MAGIC || bytes[2] != VERSION {
            return Err(Malformed("an address is not a landbridge name of this version"));
        }
        let mut ip = [0; 16];
        ip.copy_from_slice(&bytes[28..44]);
        Ok(Name {
            address: Address(u32_at(bytes, 4)),
            cluster: ClusterId(u16_at(bytes, 8)),
            port: u16_at(bytes, 10),
            unique: u64_at(bytes, 12),
            node: u64_at(bytes, 20),
            ip,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_emitted_is_parsed() {
        let name = Name {
            address: Address::new(5, 1),
            unique: 77,
            cluster: ClusterId(3),
            node: u64::MAX,
            ip: [9; 16],
            port: 7711,
        };
        let bytes = name.emit();
        assert_eq!(Name::parse(&bytes), Ok(name));
        assert!(Name::parse(&bytes[..47]).is_err());
        assert!(Name::parse(&[0; NAME_BYTES]).is_err());
    }
}
