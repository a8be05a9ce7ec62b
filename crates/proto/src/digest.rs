//! A digest of bytes, which distinguishes sent frames, and recorded reads, from others. The digest
//! is fast without special processor instructions. It is no cryptographic hash: an attacker can
//! find collisions.

/// The digest of `bytes` and their number. Four independent accumulators keep each
/// multiplication from waiting for the previous one.
pub fn digest(bytes: &[u8]) -> u64 {
    const ACCUMULATORS: usize = 4;
    let mut accumulators = [
        0x9e37_79b9_7f4a_7c15_u64,
        0x8573_4ab1_6d2f_9e03,
        0xc2b2_ae3d_27d4_eb4f,
        0x1656_67b1_9e37_79f9,
    ];
    let mut rows = bytes.chunks_exact(8 * ACCUMULATORS);
    for row in &mut rows {
        for (accumulator, word) in accumulators.iter_mut().zip(row.chunks_exact(8)) {
            // A chunk of eight bytes has eight bytes.
            *accumulator =
                mix(*accumulator, u64::from_le_bytes(word.try_into().expect("eight bytes")));
        }
    }
    let mut state = accumulators.into_iter().fold(bytes.len() as u64, mix);
    for rest in rows.remainder().chunks(8) {
        let mut word = [0; 8];
        word[..rest.len()].copy_from_slice(rest);
        state = mix(state, u64::from_le_bytes(word));
    }
    // The upper bits of the last product depend on all input; the rotation moves them.
    state.rotate_right(ROTATION)
}

const ROTATION: u32 = 29;

#[inline]
fn mix(state: u64, word: u64) -> u64 {
    (state ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(ROTATION)
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;

    #[test]
    fn other_bytes_and_other_numbers_of_them_have_other_digests() {
        for length in [0, 1, 7, 8, 31, 32, 33, 100] {
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
