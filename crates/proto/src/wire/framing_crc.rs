//! A CRC of the few header bytes that decide how long a frame is.
//!
//! The reader of a stream waits for the rest of a frame as long as the frame's header says. With a
//! length, kind or flag that was changed in transit, the reader would wait for bytes that nobody
//! sends, and would never check what has arrived: the checksum of the whole header comes too late.
//! So these bytes have a CRC of their own: 8 bits, polynomial 0x2F, initial value 0, result XOR
//! 0xFF. (CRC-8/AUTOSAR has the same polynomial and another initial value.) The CRC detects every
//! change of up to three bits of these bytes and the CRC.

/// The number of protected bytes: length, kind and flags. (`hops`, which relays change, is not
/// protected.)
pub const FRAMING_BYTES: usize = 6;

const POLYNOMIAL: u8 = 0x2f;

/// `TABLES[at][b]` is what byte `b` at offset `at` contributes to the CRC. The CRC is linear, so
/// the offsets are looked up independently.
static TABLES: [[u8; 256]; FRAMING_BYTES] = tables();

/// The CRC of the first [`FRAMING_BYTES`] of `header`. The XOR with 0xFF makes the CRC of zeroed
/// bytes nonzero, so a zeroed header is no valid header.
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
