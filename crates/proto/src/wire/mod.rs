//! Encoding and decoding of everything that is sent. All numbers are little endian, and the
//! encoding is the same on the wire, in shared memory and in a message log. Parsing never panics:
//! malformed input is a [`Malformed`], and every length is bounded before memory is allocated for
//! it.
//!
//! The modules in order; each uses only those before it:
//!
//! | module | holds |
//! |---|---|
//! | `datagram` | the datagram: a token, then one frame or one probe |
//! | `framing_crc` | the CRC of the header bytes that decide how long a frame is |
//! | `frame` | the frame: a range of a channel behind a fixed header |
//! | `name` | the name of an endpoint |
//! | `hello` | the hello |
//! | `kind_header` | what follows the header, fixed for each kind |
//! | `nondeterminism_frame` | frames about the record of clocks and random numbers |

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
