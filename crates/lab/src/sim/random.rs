//! The only source of randomness of a simulation: a seed always gives the same numbers.

use std::ops::RangeInclusive;

/// A SplitMix64 generator, which is small, fast and good enough to choose events.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator of `seed`.
    pub fn new(seed: u64) -> Self {
        let mut random = Self(seed ^ 0x6c62_272e_07bb_0142);
        random.next();
        random
    }

    /// 64 random bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A random number below `end` (0 if `end` is 0).
    pub fn below(&mut self, end: u64) -> u64 {
        if end == 0 { 0 } else { self.next() % end }
    }

    /// A random index below `end`.
    pub fn index(&mut self, end: usize) -> usize {
        self.below(end as u64) as usize
    }

    /// A random number of `range`.
    pub fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.below(range.end() - range.start() + 1)
    }

    /// True with a probability of `percent` in a hundred.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// A random element of `choices`.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }

    /// A random size up to `most`; small sizes, large sizes and the limits are about equally
    /// likely.
    pub fn size(&mut self, most: u64) -> u64 {
        match self.below(8) {
            0 => 0,
            1 => most,
            2 => most.min(1),
            3 => self.below(most + 1),
            _ => {
                let bits = 64 - most.leading_zeros() as u64;
                let bound = 1_u64 << self.below(bits + 1).min(62);
                self.below(bound.min(most + 1))
            }
        }
    }
}
