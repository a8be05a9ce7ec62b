//! The digest that distinguishes sent frames, and recorded reads, from others.
//!
//! XXH3 is fast without special processor instructions, for a few bytes too. It is no cryptographic
//! hash: an attacker can find collisions.

use xxhash_rust::xxh3::xxh3_64;

/// The digest of `bytes` and their number: XXH3 with 64 bits and seed 0.
#[inline]
pub fn digest(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;

    /// docs/WIRE.md, "The digest of recorded nondeterminism": relays and processes of one job must
    /// agree on it.
    #[test]
    fn the_digest_is_that_of_the_document() {
        assert_eq!((digest(b""), digest(b"abc")), (0x2d06_8005_38d3_94c2, 0x78af_5f94_892f_3950));
    }

    /// Some places compare the upper 32 bits alone.
    #[test]
    fn other_bytes_and_other_numbers_of_them_have_other_digests() {
        for length in [0, 1, 7, 8, 31, 32, 33, 100, 300] {
            let mut bytes = vec![0x5a; length];
            let one = digest(&bytes);
            for bit in 0..8 * length {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(digest(&bytes) >> 32, one >> 32, "{length} {bit}");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            bytes.push(0);
            assert_ne!(digest(&bytes) >> 32, one >> 32, "{length}");
        }
    }
}
