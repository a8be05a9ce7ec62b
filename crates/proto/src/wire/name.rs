//! The name of an endpoint: what MPI libraries exchange and hand back as an address.
//!
//! A name says who the endpoint is (`address`, `unique`) and where it may be reached at present
//! (cluster, node, IP addresses, port). Only the first part is identity. The dialler must find out
//! which of the addresses leads to the endpoint: a host may have addresses that no other host
//! reaches, and interface names do not show which.

use super::{Malformed, u16_at, u32_at, u64_at};
use crate::id::{Address, ClusterId};

/// The length of a name in bytes: MPICH allows 64 and compresses runs of equal bytes.
pub const NAME_BYTES: usize = 48;

const MAGIC: u16 = 0x1b1d;
const VERSION: u8 = 2;
/// The form of the address field: one IPv6 address, or IPv4 addresses, of which a zero one means
/// none.
const FORM_IPV6: u8 = 0;
const FORM_IPV4: u8 = 1;

/// The number of further IPv4 addresses in a name, in addition to the first IPv4 address.
pub const FURTHER_MAX: usize = 4;

/// The decoded fields of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    /// Identity: process index and endpoint, or [`Address::ANONYMOUS`].
    pub address: Address,
    /// Identity of an anonymous process: a number that no other endpoint has.
    pub unique: u64,
    /// Location: the cluster.
    pub cluster: ClusterId,
    /// Location: the node; equal for processes that can share memory.
    pub node: u64,
    /// Location: the IPv6 or IPv4-mapped address for direct TCP.
    pub ip: [u8; 16],
    /// Location: further IPv4 addresses to try if the first does not answer, zero for none. With an
    /// IPv6 address there is no space for them.
    pub further: [[u8; 4]; FURTHER_MAX],
    /// Location: the TCP port; 0 if the endpoint accepts no direct connections.
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
        let Some(ip) = mapped(&self.ip) else {
            bytes[3] = FORM_IPV6;
            bytes[28..44].copy_from_slice(&self.ip);
            return bytes;
        };
        bytes[3] = FORM_IPV4;
        bytes[28..32].copy_from_slice(&ip);
        bytes[32..48].copy_from_slice(self.further.as_flattened());
        bytes
    }

    /// Reads a name.
    ///
    /// # Errors
    /// [`Malformed`] if the bytes are no name of this version.
    pub fn parse(bytes: &[u8]) -> Result<Name, Malformed> {
        if bytes.len() < NAME_BYTES || u16_at(bytes, 0) != MAGIC || bytes[2] != VERSION {
            return Err(Malformed("an address is not a landbridge name of this version"));
        }
        let (mut ip, mut further) = ([0; 16], [[0; 4]; FURTHER_MAX]);
        match bytes[3] {
            FORM_IPV6 => ip.copy_from_slice(&bytes[28..44]),
            FORM_IPV4 => {
                ip[..12].copy_from_slice(&MAPPED);
                ip[12..].copy_from_slice(&bytes[28..32]);
                further.as_flattened_mut().copy_from_slice(&bytes[32..48]);
            }
            _ => return Err(Malformed("a landbridge name with addresses of an unknown form")),
        }
        Ok(Name {
            address: Address(u32_at(bytes, 4)),
            cluster: ClusterId(u16_at(bytes, 8)),
            port: u16_at(bytes, 10),
            unique: u64_at(bytes, 12),
            node: u64_at(bytes, 20),
            ip,
            further,
        })
    }
}

/// The prefix of an IPv4-mapped IPv6 address.
const MAPPED: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

/// The IPv4 address that is mapped into an IPv6 address, if there is one.
fn mapped(ip: &[u8; 16]) -> Option<[u8; 4]> {
    let (start, end) = ip.split_at(MAPPED.len());
    if start == MAPPED { end.try_into().ok() } else { None }
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
            further: [[0; 4]; FURTHER_MAX],
            port: 7711,
        };
        let mut ip = name.ip;
        ip[..12].copy_from_slice(&MAPPED);
        let further = [[10, 8, 0, 1], [172, 17, 0, 1], [0; 4], [0; 4]];
        let of_several = Name { ip, further, ..name };
        assert_eq!(Name::parse(&of_several.emit()), Ok(of_several));
        let mut unknown = of_several.emit();
        unknown[3] = 2;
        assert!(Name::parse(&unknown).is_err());
        let bytes = name.emit();
        assert_eq!(Name::parse(&bytes), Ok(name));
        assert!(Name::parse(&bytes[..47]).is_err());
        assert!(Name::parse(&[0; NAME_BYTES]).is_err());
    }
}
