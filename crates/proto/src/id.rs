//! Who is who. An id never says where something runs: that is the directory's business.

use core::fmt;

/// One run of one program: random, never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobId(pub [u8; 16]);

/// The secret of a job. Whoever proves it belongs to the job. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct JobKey(pub [u8; 32]);

/// Exit code of a recorded process that our provider ends: what it does is not what an earlier start of it did, or can be
/// in no record. Another start would not help. Users see 1.
pub const EXIT_UNRECOVERABLE: i32 = 183;

/// Exit code of a recorded process that our provider ends because the connection to its relay, on another node, is broken:
/// nothing more of what it does can be recorded. Another start takes up what the relay has.
pub const EXIT_UPLINK_LOST: i32 = 184;

/// Begins each line that our libraries write to standard error in a process that may be restarted; the name that
/// follows is part of the line. Whoever started the process shows such lines always, and all else that a new start of it
/// prints only beyond what was printed before. Programs do not print this byte by themselves.
pub const LINE_TAG: &str = "\x1elandbridge";

/// After [`LINE_TAG`], the whole line of a process that is about to end with [`EXIT_UNRECOVERABLE`] or [`EXIT_UPLINK_LOST`]; people
/// are not shown it.
/// Programs may end with any code.
pub const EXIT_LINE: &str = " cannot go on";

/// An endpoint of a process of the job: 24 bits of process index, 8 bits of endpoint number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u32);

/// A cluster of the job, numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterId(pub u16);

impl Address {
    /// A process that was not started by the launcher has no index; relays cannot reach it.
    pub const ANONYMOUS: Address = Address(u32::MAX);
    /// Processes in a job.
    pub const INDEX_MAX: u32 = 0x00ff_fffe;

    /// Endpoint `endpoint` of process `index`.
    ///
    /// # Panics
    /// If `index` exceeds [`Self::INDEX_MAX`].
    pub fn new(index: u32, endpoint: u8) -> Self {
        assert!(index <= Self::INDEX_MAX, "process index {index} is out of range");
        Self(index << 8 | endpoint as u32)
    }

    /// The process index.
    pub fn index(self) -> u32 {
        self.0 >> 8
    }

    /// The endpoint number inside its process.
    pub fn endpoint(self) -> u8 {
        self.0 as u8
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::ANONYMOUS {
            return f.write_str("anonymous");
        }
        write!(f, "{}.{}", self.index(), self.endpoint())
    }
}

/// As users know it: `rank 3`, or `rank 3 (endpoint 1)` for a further endpoint of its.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (*self, self.endpoint()) {
            (Self::ANONYMOUS, _) => f.write_str("a process without a rank"),
            (_, 0) => write!(f, "rank {}", self.index()),
            (_, endpoint) => write!(f, "rank {} (endpoint {endpoint})", self.index()),
        }
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(secret)")
    }
}

impl JobId {
    /// Parses 32 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        bytes_from_hex(text).map(Self)
    }
}

impl JobKey {
    /// Parses 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        bytes_from_hex(text).map(Self)
    }
}

fn bytes_from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let high = (pair[0] as char).to_digit(16)?;
        let low = (pair[1] as char).to_digit(16)?;
        *byte = (high << 4 | low) as u8;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_keeps_its_parts() {
        let address = Address::new(Address::INDEX_MAX, 255);
        assert_eq!((address.index(), address.endpoint()), (Address::INDEX_MAX, 255));
        assert_ne!(address, Address::ANONYMOUS);
    }

    #[test]
    fn hexadecimal_of_the_wrong_length_or_alphabet_is_refused() {
        assert!(JobId::from_hex("00").is_none());
        assert!(JobId::from_hex(&"zz".repeat(16)).is_none());
        assert_eq!(JobId::from_hex(&"0f".repeat(16)), Some(JobId([15; 16])));
    }
}
