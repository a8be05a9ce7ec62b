//! The datagram: a token, then one frame or one probe.
//!
//! ```text
//!  0  u64 token      of the receiver, for this sender: what has another one is dropped unread
//!  8  …   a frame
//! ```
//!
//! or, where a frame has its kind, a 0:
//!
//! ```text
//!  8  u32 size       bytes of this datagram, or of the one that is answered
//! 12  u8  0
//! 13  u8  1: probe, 2: answer
//! 14  u16 0
//! 16  u64 number     of the probe; its answer repeats it
//! 24  …   zeroes, up to `size` (probes only)
//! ```
//!
//! A probe shows that a path carries datagrams of its size, in both directions if the answer comes. Probes have no
//! check: one that is corrupt has another number or size than anybody waits for.

use super::{Malformed, u16_at, u32_at, u64_at};

/// Bytes of the token at the front of a datagram.
pub const TOKEN_BYTES: usize = 8;

/// Bytes of a probe's answer, token included, and of the least probe.
pub const PROBE_BYTES: usize = 24;

/// What a datagram carries behind its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatagramBody<'a> {
    /// A frame, which has not been looked at.
    Frame(&'a [u8]),
    /// Wants an answer.
    Probe(PathProbe),
    /// The probe of this size and number has arrived.
    ProbeReply(PathProbe),
}

/// A probe, or the one that is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathProbe {
    /// Bytes of the probe, token included.
    pub size: u32,
    /// Names it in its answer.
    pub number: u64,
}

const PROBE: u8 = 1;
const REPLY: u8 = 2;

/// Where a frame has its kind, counted from the start of the datagram.
const KIND_AT: usize = TOKEN_BYTES + 4;

impl PathProbe {
    /// The front of this probe, or of its answer, to somebody with this token. A probe is filled up with zeroes.
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
/// If it is neither a probe nor long enough for anything else.
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
