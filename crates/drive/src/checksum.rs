//! Checksums of bytes in memory, computed in the same pass as a copy where there is one.
//!
//! What enters: the bytes of a payload, in any number of pieces. What leaves: 32 bits, the same for
//! every split of the same bytes. What may never happen: the bytes of a copy differ from the bytes
//! that were summed. So [`RunningChecksum::copy`] sums the copy, not the source: if another thread
//! changes the source meanwhile, the copy has old or new bytes, but always their own checksum.

use crc_fast::{CrcAlgorithm, Digest};

/// The algorithm of checksums. Both sides of a channel use the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Checksum {
    /// CRC-32C (RFC 3720): detects every burst of up to 32 bits, and every change of up to three
    /// bits in a datagram.
    #[default]
    Crc32c,
    /// The sum of the little-endian 32-bit words, modulo 2^32, the last word filled up with zeroes.
    /// Cheaper than the CRC, and blind to reordered words and to inserted or removed zeroes.
    Additive,
    /// No checksum; the result is always 0.
    Off,
}

impl Checksum {
    /// The algorithm for the value `word` of the setting `integrity`. `recovers` says that
    /// processes of the job may be restarted: replay compares what they send by these checksums, so
    /// a checksum must depend on the order of words.
    #[must_use]
    pub fn of_job(word: &str, recovers: bool) -> Self {
        match word {
            "off" => Self::Off,
            "sum" if !recovers => Self::Additive,
            _ => Self::Crc32c,
        }
    }

    /// The checksum as a plain function; `None` if there is none.
    #[must_use]
    pub fn function(self) -> Option<fn(&[u8]) -> u32> {
        match self {
            Self::Crc32c => Some(|bytes| Self::Crc32c.of(bytes)),
            Self::Additive => Some(|bytes| Self::Additive.of(bytes)),
            Self::Off => None,
        }
    }

    /// The checksum of `bytes`.
    #[inline]
    #[must_use]
    pub fn of(self, bytes: &[u8]) -> u32 {
        match self {
            Self::Crc32c => crc_update(CRC_START, bytes) ^ CRC_START,
            Self::Additive => add(0, 0, bytes),
            Self::Off => 0,
        }
    }

    /// A running checksum of no bytes.
    #[inline]
    #[must_use]
    pub fn start(self) -> RunningChecksum {
        let value = if self == Self::Crc32c { CRC_START } else { 0 };
        RunningChecksum { sum: self, value, phase: 0 }
    }
}

/// The initial register of a CRC-32C, and the value with which its result is XORed.
const CRC_START: u32 = u32::MAX;

/// A checksum that is being computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningChecksum {
    sum: Checksum,
    /// The register of the CRC, or the additive sum so far.
    value: u32,
    /// The number of bytes so far, modulo 4: the position of the next byte in its word. Used for
    /// the additive sum only.
    phase: u32,
}

/// The bytes that are copied, then summed while they are still in the first-level cache. From cold
/// memory, this costs a few per cent more than the copy alone; a pass of its own costs a fifth
/// more.
const BLOCK_BYTES: usize = 8 << 10;
/// The most bytes that form one block: starting another block costs more than the cache saves.
const ONE_BLOCK_BYTES_MAX: usize = 16 << 10;

impl RunningChecksum {
    /// Adds `bytes`.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        match self.sum {
            Checksum::Crc32c => self.value = crc_update(self.value, bytes),
            Checksum::Additive => {
                self.value = add(self.value, self.phase, bytes);
                self.phase = (self.phase + bytes.len() as u32) % 4;
            }
            Checksum::Off => (),
        }
    }

    /// Copies `from` to `to` and adds the bytes of the copy.
    ///
    /// # Panics
    /// If the two differ in length.
    #[inline]
    pub fn copy(&mut self, from: &[u8], to: &mut [u8]) {
        assert_eq!(from.len(), to.len());
        // SAFETY: two slices of one length, of which one is exclusive.
        unsafe { self.copy_raw(from.as_ptr(), to.as_mut_ptr(), from.len()) }
    }

    /// Copies and sums like [`Self::copy`], from memory that another thread may write meanwhile.
    ///
    /// # Safety
    /// `from` and `to` are valid for `len` bytes and do not overlap; nobody else uses `to`.
    #[inline]
    pub unsafe fn copy_raw(&mut self, from: *const u8, to: *mut u8, len: usize) {
        let block_bytes = if len > ONE_BLOCK_BYTES_MAX { BLOCK_BYTES } else { len.max(1) };
        // SAFETY: the caller's promise.
        unsafe {
            match self.sum {
                Checksum::Off => to.copy_from_nonoverlapping(from, len),
                Checksum::Crc32c if len > block_bytes => {
                    let mut digest = digest(self.value);
                    copy_blocks(from, to, len, block_bytes, |block| digest.update(block));
                    self.value = digest.get_state() as u32;
                }
                _ => copy_blocks(from, to, len, block_bytes, |block| self.update(block)),
            }
        }
    }

    /// The checksum of everything so far.
    #[inline]
    #[must_use]
    pub fn value(&self) -> u32 {
        match self.sum {
            Checksum::Crc32c => self.value ^ CRC_START,
            Checksum::Additive | Checksum::Off => self.value,
        }
    }
}

/// The most bytes that are summed with the processor's own instruction, 8 bytes at a time. For more
/// bytes the library is faster, but it takes 15 to 20 ns to begin: five times what a header takes
/// here.
const SHORT_BYTES_MAX: usize = 256;

/// The register of a CRC-32C after `bytes`.
#[inline]
fn crc_update(register: u32, bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() <= SHORT_BYTES_MAX && std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has the instruction.
        return unsafe { crc_short(register, bytes) };
    }
    crc_long(register, bytes)
}

/// The register of a CRC-32C after `bytes`, computed with the processor's instruction.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn crc_short(register: u32, bytes: &[u8]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u64};
    let (words, rest) = bytes.as_chunks::<8>();
    let words = words.iter().map(|word| u64::from_le_bytes(*word));
    let register = words.fold(u64::from(register), |crc, word| _mm_crc32_u64(crc, word)) as u32;
    rest.iter().fold(register, |crc, &byte| _mm_crc32_u8(crc, byte))
}

/// The register of a CRC-32C after `bytes`, computed by the library.
fn crc_long(register: u32, bytes: &[u8]) -> u32 {
    if register == CRC_START {
        // Most checksums have one piece, for which the library has a faster function.
        return crc_fast::crc32_iscsi(bytes) ^ CRC_START;
    }
    let mut digest = digest(register);
    digest.update(bytes);
    digest.get_state() as u32
}

#[inline]
fn digest(register: u32) -> Digest {
    Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(register))
}

/// Copies block by block; `each` gets every block of the copy.
///
/// # Safety
/// `from` and `to` are valid for `len` bytes and do not overlap; nobody else uses `to`.
#[inline]
unsafe fn copy_blocks(
    from: *const u8,
    to: *mut u8,
    len: usize,
    block_bytes: usize,
    mut each: impl FnMut(&[u8]),
) {
    let mut done = 0;
    while done < len {
        let size = block_bytes.min(len - done);
        // SAFETY: the caller's promise; `done + size` is at most `len`.
        each(unsafe {
            to.add(done).copy_from_nonoverlapping(from.add(done), size);
            std::slice::from_raw_parts(to.add(done), size)
        });
        done += size;
    }
}

/// The additive sum after `bytes`, from the sum `value` with `phase` bytes in its last word.
#[inline]
fn add(value: u32, phase: u32, bytes: &[u8]) -> u32 {
    let first = ((4 - phase as usize) % 4).min(bytes.len());
    let (first, rest) = bytes.split_at(first);
    let (words, last) = rest.as_chunks::<4>();
    let mut value = value.wrapping_add(part_of_word(first) << (8 * phase));
    for word in words {
        value = value.wrapping_add(u32::from_le_bytes(*word));
    }
    value.wrapping_add(part_of_word(last))
}

/// Up to three bytes as the low end of a word.
#[inline]
fn part_of_word(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: [Checksum; 3] = [Checksum::Crc32c, Checksum::Additive, Checksum::Off];

    #[test]
    fn one_that_may_come_back_has_checks_that_see_the_order_of_words() {
        let of = |recovers| ["off", "sum", "crc32c"].map(|word| Checksum::of_job(word, recovers));
        assert_eq!(of(false), [Checksum::Off, Checksum::Additive, Checksum::Crc32c]);
        assert_eq!(of(true), [Checksum::Off, Checksum::Crc32c, Checksum::Crc32c]);
    }

    #[test]
    fn crc_of_the_examples_in_rfc_3720() {
        let rising: Vec<u8> = (0..32).collect();
        let falling: Vec<u8> = (0..32).rev().collect();
        let mut read = [0u8; 48];
        for (at, byte) in [(0, 0x01), (1, 0xc0), (16, 0x14), (22, 0x04), (27, 0x14), (31, 0x18)] {
            read[at] = byte;
        }
        (read[32], read[40]) = (0x28, 0x02);
        // The RFC prints the bytes in the order in which they are sent, the lowest first.
        assert_eq!(Checksum::Crc32c.of(&[0; 32]).to_le_bytes(), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(Checksum::Crc32c.of(&[0xff; 32]).to_le_bytes(), [0x43, 0xab, 0xa8, 0x62]);
        assert_eq!(Checksum::Crc32c.of(&rising).to_le_bytes(), [0x4e, 0x79, 0xdd, 0x46]);
        assert_eq!(Checksum::Crc32c.of(&falling).to_le_bytes(), [0x5c, 0xdb, 0x3f, 0x11]);
        assert_eq!(Checksum::Crc32c.of(&read).to_le_bytes(), [0x56, 0x3a, 0x96, 0xd9]);
        assert_eq!(Checksum::Crc32c.of(b""), 0);
    }

    #[test]
    fn crc_of_every_length_is_the_one_taken_bit_by_bit() {
        let bytes = noise(3000);
        let mut register = u32::MAX;
        for len in 0..bytes.len() {
            assert_eq!(Checksum::Crc32c.of(&bytes[..len]), !register, "{len} bytes");
            assert_eq!(crc_long(CRC_START, &bytes[..len]), register, "{len} bytes");
            // The bytes come in two pieces, of which one is short.
            let (front, back) = bytes[..len].split_at(len.min(len % 300));
            assert_eq!(crc_update(crc_update(CRC_START, front), back), register);
            register ^= u32::from(bytes[len]);
            for _ in 0..8 {
                let low = register & 1;
                register = register >> 1 ^ low.wrapping_neg() & 0x82f6_3b78;
            }
        }
    }

    #[test]
    fn additive_sum_is_of_little_endian_words_filled_up_with_zeroes() {
        assert_eq!(Checksum::Additive.of(&[1, 0, 0, 0, 2, 1, 0, 0]), 0x103);
        assert_eq!(Checksum::Additive.of(&[0xff; 8]), 0xffff_fffe);
        assert_eq!(Checksum::Additive.of(&[0, 0, 0, 0, 1, 2, 3]), 0x0003_0201);
        assert_eq!(Checksum::Additive.of(b""), 0);
    }

    #[test]
    fn nothing_is_summed_when_off() {
        assert_eq!(Checksum::Off.of(b"abc"), 0);
        let mut to = [0; 3];
        let mut running = Checksum::Off.start();
        running.copy(b"abc", &mut to);
        assert_eq!((running.value(), &to), (0, b"abc"));
    }

    #[test]
    fn a_register_that_looks_unused_in_the_middle_goes_on_as_well() {
        // These four bytes bring the register back to its initial value.
        let mut running = Checksum::Crc32c.start();
        running.update(&[0xff, 0xff, 0xff, 0xff]);
        let back = !running.value();
        let four = (back ^ unwound(u32::MAX)).to_le_bytes();
        running.update(&four);
        assert_eq!(running.value(), 0);
        running.update(b"more");
        assert_eq!(
            running.value(),
            Checksum::Crc32c.of(&[&[0xff; 4], &four[..], b"more"].concat())
        );
    }

    /// The register from which four zero bytes lead to `register`.
    fn unwound(mut register: u32) -> u32 {
        for _ in 0..32 {
            let low = register >> 31;
            register = (register ^ low.wrapping_neg() & 0x82f6_3b78) << 1 | low;
        }
        register
    }

    proptest! {
        #[test]
        fn a_sum_does_not_depend_on_the_split(
            bytes in prop::collection::vec(any::<u8>(), 0..60_000),
            cuts in prop::collection::vec(prop_oneof![0usize..50, 0usize..20_000], 0..40),
        ) {
            for sum in ALL {
                let mut pieces = sum.start();
                let mut copied = sum.start();
                let mut to = vec![0; bytes.len()];
                let mut at = 0;
                for cut in cuts.iter().copied().chain([usize::MAX]) {
                    let end = at + cut.min(bytes.len() - at);
                    pieces.update(&bytes[at..end]);
                    copied.copy(&bytes[at..end], &mut to[at..end]);
                    at = end;
                }
                prop_assert_eq!(pieces.value(), sum.of(&bytes));
                prop_assert_eq!(copied.value(), sum.of(&bytes));
                prop_assert_eq!(&to, &bytes);
            }
        }

        #[test]
        fn one_flipped_bit_is_seen(
            mut bytes in prop::collection::vec(any::<u8>(), 1..3000),
            at in any::<prop::sample::Index>(),
            bit in 0..8,
        ) {
            let before = ALL.map(|sum| sum.of(&bytes));
            let at = at.index(bytes.len());
            bytes[at] ^= 1u8 << bit;
            prop_assert_ne!(Checksum::Crc32c.of(&bytes), before[0]);
            prop_assert_ne!(Checksum::Additive.of(&bytes), before[1]);
        }
    }

    fn noise(len: usize) -> Vec<u8> {
        let mut state = 1u32;
        let step = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..len).map(step).collect()
    }

    /// Run with `cargo test --release -p landbridge-drive checksum::tests::measure -- --ignored
    /// --nocapture`
    #[test]
    #[ignore = "a measurement"]
    fn measure() {
        for size in [40, 64, 90, 1 << 10, 1472, 8972, 64 << 10, 1 << 20] {
            let from = noise(size);
            let mut to = vec![0; size];
            println!("{size} bytes");
            report("copy alone", size, || {
                to.copy_from_slice(std::hint::black_box(&from));
                std::hint::black_box(&mut to);
            });
            for sum in [Checksum::Crc32c, Checksum::Additive] {
                report(&format!("{sum:?} of"), size, || {
                    std::hint::black_box(sum.of(std::hint::black_box(&from)));
                });
                report(&format!("{sum:?} copy"), size, || {
                    let mut running = sum.start();
                    running.copy(std::hint::black_box(&from), &mut to);
                    std::hint::black_box(running.value());
                });
                report(&format!("{sum:?} copy, then of"), size, || {
                    to.copy_from_slice(std::hint::black_box(&from));
                    std::hint::black_box(sum.of(std::hint::black_box(&to)));
                });
            }
        }
    }

    fn report(name: &str, size: usize, mut work: impl FnMut()) {
        // Many short rounds, some of which run undisturbed.
        let rounds = 2_000_000 / (size + 100) + 1;
        let mut best = f64::MAX;
        for _ in 0..300 {
            let begun = std::time::Instant::now();
            (0..rounds).for_each(|_| work());
            best = best.min(begun.elapsed().as_nanos() as f64 / rounds as f64);
        }
        println!("  {name:24} {best:10.1} ns {:6.1} GB/s", size as f64 / best);
    }
}
