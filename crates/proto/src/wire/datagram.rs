//! The datagram: a token, then one frame or one probe.
//!
//! ```text
//!  0  u64 token      of the receiver, for this sender: a datagram with another token is dropped
//!  8  …   a frame
//! ```
//!
//! A probe has a 0 where a frame has its kind:
//!
//! ```text
//!  8  u32 size       bytes of this probe, or of the probe that is answered
//! 12  u8  0
//! 13  u8  1: probe, 2: answer
//! 14  u16 0
//! 16  u64 number     of the probe; the answer repeats the number
//! 24  …   zeroes, up to `size` (probes only)
//! ```
//!
//! A probe shows that a path carries datagrams of the probe's size, in both directions if the
//! answer arrives. Probes have no checksum: a corrupt probe has a number or size for which nobody
//! waits.

use super::{Malformed, u16_at, u32_at, u64_at};

/// The length of the token at the front of a datagram, in bytes.
pub const TOKEN_BYTES: usize = 8;

/// The length of a probe's answer, token included, and of the smallest probe, in bytes.
pub const PROBE_BYTES: usize = 24;

/// What a datagram carries behind its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatagramBody<'a> {
    /// A frame, which has not been parsed.
    Frame(&'a [u8]),
    /// A probe, which wants an answer.
    Probe(PathProbe),
    /// An answer: the probe of this size and number has arrived.
    ProbeReply(PathProbe),
}

/// A probe, or the probe that is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathProbe {
    /// The length of the probe in bytes, token included.
    pub size: u32,
    /// The number of the probe, which its answer repeats.
    pub number: u64,
}

const PROBE: u8 = 1;
const REPLY: u8 = 2;

/// The offset of a frame's kind, counted from the start of the datagram.
const KIND_AT: usize = TOKEN_BYTES + 4;

impl PathProbe {
    /// The front of this probe, or of its answer, for a receiver with this token. The sender fills
    /// a probe up with zeroes.
    pub fn emit(&self, token: u64, is_reply: bool) -> [u8; PROBE_BYTES] {
        let mut bytes = [0; PROBE_BYTES];
        bytes[0..8].copy_from_slice(&token.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.size.to_le_bytes());
        bytes[13] = if is_reply { REPLY } else { PROBE };
        bytes[16..24].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }
}

/// The token at the front of a datagram.
#[inline]
pub fn token(datagram: &[u8]) -> Option<u64> {
    (datagram.len() >= TOKEN_BYTES).then(|| u64_at(datagram, 0))
}

/// What follows the token of a datagram.
///
/// # Errors
/// [`Malformed`] if the datagram is shorter than a probe, or a malformed probe.
#[inline]
pub fn parse(datagram: &[u8]) -> Result<DatagramBody<'_>, Malformed> {
    if datagram.len() < PROBE_BYTES {
        return Err(Malformed("a datagram is shorter than any"));
    }
    if datagram[KIND_AT] != 0 {
        return Ok(DatagramBody::Frame(&datagram[TOKEN_BYTES..]));
    }
    let probe = PathProbe { size: u32_at(datagram, 8), number: u64_at(datagram, 16) };
    match (datagram[13], u16_at(datagram, 14)) {
        (PROBE, 0) if probe.size as usize == datagram.len() => Ok(DatagramBody::Probe(probe)),
        (REPLY, 0) if datagram.len() == PROBE_BYTES => Ok(DatagramBody::ProbeReply(probe)),
        _ => Err(Malformed("a datagram that is neither frame nor probe")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Address;
    use crate::wire::frame::{HEADER_BYTES, Header, Kind};

    #[test]
    fn what_is_emitted_is_parsed() {
        let probe = PathProbe { size: 1200, number: u64::MAX - 1 };
        let mut bytes = [0; 1200];
        bytes[..PROBE_BYTES].copy_from_slice(&probe.emit(7, false));
        assert_eq!((token(&bytes), parse(&bytes)), (Some(7), Ok(DatagramBody::Probe(probe))));
        assert!(parse(&bytes[..1199]).is_err());
        let answer = probe.emit(8, true);
        assert_eq!(
            (token(&answer), parse(&answer)),
            (Some(8), Ok(DatagramBody::ProbeReply(probe)))
        );
        for (at, value) in [(13, 3), (14, 1)] {
            let mut broken = answer;
            broken[at] = value;
            assert!(parse(&broken).is_err(), "byte {at}");
        }
        assert!(parse(&answer[..PROBE_BYTES - 1]).is_err() && token(&answer[..7]).is_none());
    }

    #[test]
    fn no_frame_is_taken_for_a_probe() {
        for kind in Kind::ALL {
            let mut bytes = [0; TOKEN_BYTES + HEADER_BYTES];
            let header = Header {
                length: 0,
                kind,
                flags: 0,
                hops: 0,
                source: Address(0),
                target: Address(0),
                sequence: 0,
                delivered: 0,
                credit: 0,
            };
            header.emit(&mut bytes[TOKEN_BYTES..]);
            assert_eq!(parse(&bytes), Ok(DatagramBody::Frame(&bytes[TOKEN_BYTES..])));
        }
    }
}
