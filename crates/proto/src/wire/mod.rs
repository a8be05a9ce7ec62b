//! Bytes and their meaning. Everything is little endian and the same on the wire, in shared memory
//! and in a log. Parsing never panics: malformed input is a [`Malformed`], and every length is
//! bounded before anyone takes memory for it.

pub mod datagram;
pub mod frame;
pub mod framing_crc;
pub mod hello;
pub mod kind_header;
pub mod name;
pub mod nondeterminism_frame;

/// Input that is not what it claims to be. Says which rule it broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl core::fmt::Display for Malformed {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.0)
    }
}

#[inline]
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

#[inline]
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[inline]
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u32_at(bytes, at) as u64 | (u32_at(bytes, at + 4) as u64) << 32
}
