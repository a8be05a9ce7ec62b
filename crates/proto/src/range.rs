//! Sets of sequence numbers: which bytes of a channel are somewhere, as few ranges as possible.
//!
//! What enters: ranges of 64-bit numbers, in any order, doubled and overlapping. What leaves: what of them is new,
//! up to where nothing is missing, and what is. A set holds a bounded number of ranges: one that would need more
//! refuses, and whoever sent that range will send it again.
//!
//! What may never happen: a number is said to be in the set that nobody put there; two ranges of a set touch.

use alloc::vec::Vec;
use core::ops::Range;

/// All numbers below [`Self::contiguous_end`], and some ranges above it.
///
/// `RANGES_MAX` bounds the ranges above.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet<const RANGES_MAX: usize> {
    contiguous_end: u64,
    /// Ascending, not empty, not touching each other nor `contiguous_end`.
    above: Vec<Range<u64>>,
}

/// A set has no room for one more range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeSetFull;

impl<const RANGES_MAX: usize> RangeSet<RANGES_MAX> {
    /// All numbers below `contiguous_end`.
    pub const fn below(contiguous_end: u64) -> Self {
        Self { contiguous_end, above: Vec::new() }
    }

    /// Nothing below this number is missing.
    pub fn contiguous_end(&self) -> u64 {
        self.contiguous_end
    }

    /// The ranges above [`Self::contiguous_end`], ascending, with something missing before each.
    pub fn above(&self) -> &[Range<u64>] {
        &self.above
    }

    /// The range above [`Self::contiguous_end`] that has `number`.
    pub fn above_at(&self, number: u64) -> Option<Range<u64>> {
        let place = self.above.partition_point(|range| range.end <= number);
        self.above.get(place).filter(|range| range.start <= number).cloned()
    }

    /// One more than the largest number in the set.
    pub fn end(&self) -> u64 {
        self.above.last().map_or(self.contiguous_end, |last| last.end)
    }

    /// Puts `range` into the set. The numbers of it that were missing are counted.
    ///
    /// # Errors
    /// If it stands alone and there are `RANGES_MAX` ranges already: nothing has changed.
    pub fn insert(&mut self, range: Range<u64>) -> Result<u64, RangeSetFull> {
        let range = range.start.max(self.contiguous_end)..range.end;
        if range.start >= range.end {
            return Ok(0);
        }
        // Those that overlap it or touch it.
        let first = self.above.partition_point(|other| other.end < range.start);
        let last = self.above.partition_point(|other| other.start <= range.end);
        let touched = &self.above[first..last];
        let had: u64 = touched.iter().map(|other| overlap(other, &range)).sum();
        let new = (range.end - range.start) - had;
        let start = touched.first().map_or(range.start, |other| other.start.min(range.start));
        let end = touched.last().map_or(range.end, |other| other.end.max(range.end));
        if start == self.contiguous_end {
            self.contiguous_end = end;
            self.above.drain(..last);
        } else if first < last {
            self.above[first] = start..end;
            self.above.drain(first + 1..last);
        } else if self.above.len() < RANGES_MAX {
            self.above.insert(first, range);
        } else {
            return Err(RangeSetFull);
        }
        Ok(new)
    }

    /// Whether all of `range` is in the set.
    pub fn contains(&self, range: &Range<u64>) -> bool {
        let start = range.start.max(self.contiguous_end);
        range.end <= self.contiguous_end
            || range.is_empty()
            || self.above_at(start).is_some_and(|other| range.end <= other.end)
    }

    /// Whether any of `range` is in the set.
    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        let place = self.above.partition_point(|other| other.end <= range.start);
        let is_hit = |other: &Range<u64>| overlap(other, range) > 0;
        !range.is_empty()
            && (range.start < self.contiguous_end || self.above.get(place).is_some_and(is_hit))
    }

    /// What is missing below `end`, ascending.
    pub fn missing(&self, end: u64) -> impl Iterator<Item = Range<u64>> {
        let starts =
            core::iter::once(self.contiguous_end).chain(self.above.iter().map(|range| range.end));
        let ends = self.above.iter().map(|range| range.start).chain(core::iter::once(u64::MAX));
        starts
            .zip(ends)
            .map(move |(start, stop)| start..stop.min(end))
            .filter(|gap| !gap.is_empty())
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> u64 {
    a.end.min(b.end).saturating_sub(a.start.max(b.start))
}
