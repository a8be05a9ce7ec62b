//! Encoding and decoding of everything that is sent. All numbers are little endian, and the
//! encoding is the same on the wire, in shared memory and in a message log. Parsing never panics:
//! malformed input is a [`Malformed`], and every length is bounded before memory is allocated for
//! it.

pub mod datagram;
pub mod frame;
pub mod framing_crc;
pub mod hello;
pub mod kind_header;
pub mod name;
pub mod nondeterminism_frame;

/// Malformed input. The text names the rule that the input breaks.
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
