//! Identities of jobs, processes, endpoints and clusters. An id never contains where a process
//! runs.

use core::fmt;

/// Id of one run of a job: random, never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobId(pub [u8; 16]);

/// Secret key of a job. A process that proves the key belongs to the job. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct JobKey(pub [u8; 32]);

/// More incarnations of a process than one node ever starts, even a node that counts as lost and
/// does not know so: a process that has moved goes on with the next multiple.
pub const INCARNATIONS_PER_NODE: u32 = 10_000;

/// Exit code of a recorded process that the provider ends because the process has diverged from its
/// previous incarnation, or because its actions can no longer be recorded. A restart would not
/// help. Users see 1.
pub const EXIT_UNRECOVERABLE: i32 = 183;

/// Exit code of a recorded process that the provider ends because the connection to its relay, on
/// another node, is broken: nothing more can be recorded. The next incarnation continues from the
/// relay's log.
pub const EXIT_UPLINK_LOST: i32 = 184;

/// First bytes of each line that the Landbridge libraries write to standard error in a process that
/// may be restarted; the name after the first byte is part of the line. The launcher always shows
/// such lines. Of the other lines of a restarted incarnation the launcher shows only those beyond
/// the output of earlier incarnations. Programs do not print the first byte themselves.
pub const LINE_TAG: &str = "\x1elandbridge";

/// Text after [`LINE_TAG`] of the last line of a process that ends with [`EXIT_UNRECOVERABLE`] or
/// [`EXIT_UPLINK_LOST`]. The launcher does not show this line. The line is necessary because
/// programs may end with any exit code.
pub const EXIT_LINE: &str = " cannot go on";

/// Address of an endpoint of a process of the job: 24 bits of process index, 8 bits of endpoint
/// number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u32);

/// A cluster of the job, numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterId(pub u16);

impl Address {
    /// Address of a process that was not started by the launcher: it has no index, and relays
    /// cannot reach it.
    pub const ANONYMOUS: Address = Address(u32::MAX);
    /// Largest process index in a job.
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

/// Shows the address as users know it: `rank 3`, or `rank 3 (endpoint 1)` for a further endpoint of
/// a rank.
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
    /// The 32 hexadecimal digits of the id.
    pub fn to_hex(self) -> [u8; 32] {
        let digit = |at: usize| self.0[at / 2] >> (4 * (1 - at % 2)) & 15;
        core::array::from_fn(|at| b"0123456789abcdef"[usize::from(digit(at))])
    }

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
