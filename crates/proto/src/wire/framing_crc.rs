//! A check of the few bytes of a header that say how long its frame is.
//!
//! Who reads a stream waits for the rest of a frame as long as its header says. A length, a kind or a flag that was changed
//! on the way would make it wait for bytes that nobody sends, and what has arrived would never be looked at: the check of
//! the whole header comes too late. So these bytes have one of their own, CRC-8 with the polynomial 0x2F (AUTOSAR, CRC8H2F),
//! which finds every change of up to three bits of them.

/// Bytes that are guarded: length, kind and flags. (`hops`, which relays change, is not.)
pub const FRAMING_BYTES: usize = 6;

const POLYNOMIAL: u8 = 0x2f;

/// What byte `b` at place `at` does to the check is `TABLES[at][b]`: the check is linear, so places are looked up side by side.
static TABLES: [[u8; 256]; FRAMING_BYTES] = tables();

/// The CRC of what the first [`FRAMING_BYTES`] of `header` hold. Never that of zeroes for anything near them, nor
/// zero for them: a zeroed header is no header.
#[inline]
pub fn framing_crc(header: &[u8]) -> u8 {
    let bytes = &header[..FRAMING_BYTES];
    let mut check = 0xff;
    for (table, &byte) in TABLES.iter().zip(bytes) {
        check ^= table[byte as usize];
    }
    check
}

const fn tables() -> [[u8; 256]; FRAMING_BYTES] {
    let mut tables = [[0; 256]; FRAMING_BYTES];
    let mut byte = 0;
    while byte < 256 {
        let mut check = byte as u8;
        let mut at = FRAMING_BYTES;
        while at > 0 {
            at -= 1;
            check = shifted(check);
            tables[at][byte] = check;
        }
        byte += 1;
    }
    tables
}

/// The remainder after eight more zero bits.
const fn shifted(mut check: u8) -> u8 {
    let mut bit = 0;
    while bit < 8 {
        check = if check & 0x80 != 0 { (check << 1) ^ POLYNOMIAL } else { check << 1 };
        bit += 1;
    }
    check
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_remainder_bit_by_bit() {
        for bytes in [[1, 2, 3, 4, 5, 6], [0xff; 6], [0x10, 0, 0, 0, 19, 16]] {
            let remainder = bytes.iter().fold(0, |check: u8, byte| shifted(check ^ byte));
            assert_eq!(framing_crc(&bytes), remainder ^ 0xff);
        }
    }

    #[test]
    fn every_change_of_up_to_three_bits_is_found() {
        let right: [u8; 8] = [0x10, 0, 0, 0, 19, 16, 0, 0];
        let whole = u64::from_le_bytes(right) | (framing_crc(&right) as u64) << 56;
        let places: [u32; 56] =
            core::array::from_fn(|bit| if bit < 48 { bit } else { bit + 8 } as u32);
        let is_found = |changes: u64| {
            let bytes = (whole ^ changes).to_le_bytes();
            framing_crc(&bytes) != bytes[7]
        };
        for (n, a) in places.iter().enumerate() {
            assert!(is_found(1 << a));
            for (m, b) in places.iter().enumerate().take(n) {
                assert!(is_found(1 << a | 1 << b));
                assert!(places.iter().take(m).all(|c| is_found(1 << a | 1 << b | 1 << c)));
            }
        }
    }
}
