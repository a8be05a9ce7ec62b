//! Sets of sequence numbers, for instance of the bytes of a channel, with as few ranges as
//! possible.
//!
//! What enters: ranges of 64-bit numbers, in any order, repeated and overlapping. What leaves: how
//! many numbers of a range are new, the end of the contiguous numbers, and the missing ranges. A
//! set holds a bounded number of ranges: a set refuses a range that would exceed the bound, and the
//! sender of that range retransmits it.
//!
//! What may never happen: a set contains a number that was never inserted; two ranges of a set
//! touch.

use alloc::vec::Vec;
use core::ops::Range;

/// A set of numbers: all numbers below [`Self::contiguous_end`], and at most `RANGES_MAX` ranges
/// above it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet<const RANGES_MAX: usize> {
    contiguous_end: u64,
    /// Ranges in ascending order, which are not empty and touch neither each other nor
    /// `contiguous_end`.
    above: Vec<Range<u64>>,
}

/// Error: the set has `RANGES_MAX` ranges already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeSetFull;

impl<const RANGES_MAX: usize> RangeSet<RANGES_MAX> {
    /// The set of all numbers below `contiguous_end`.
    pub const fn below(contiguous_end: u64) -> Self {
        Self { contiguous_end, above: Vec::new() }
    }

    /// The lowest number that is missing.
    pub fn contiguous_end(&self) -> u64 {
        self.contiguous_end
    }

    /// The ranges above [`Self::contiguous_end`], ascending, with missing numbers before each
    /// range.
    pub fn above(&self) -> &[Range<u64>] {
        &self.above
    }

    /// The range above [`Self::contiguous_end`] that contains `number`.
    pub fn above_at(&self, number: u64) -> Option<Range<u64>> {
        let place = self.above.partition_point(|range| range.end <= number);
        self.above.get(place).filter(|range| range.start <= number).cloned()
    }

    /// The largest number in the set, plus one.
    pub fn end(&self) -> u64 {
        self.above.last().map_or(self.contiguous_end, |last| last.end)
    }

    /// Inserts `range` into the set. Returns how many numbers of the range were missing.
    ///
    /// # Errors
    /// If `range` touches no other range and the set has `RANGES_MAX` ranges already; the set stays
    /// unchanged.
    pub fn insert(&mut self, range: Range<u64>) -> Result<u64, RangeSetFull> {
        let range = range.start.max(self.contiguous_end)..range.end;
        if range.start >= range.end {
            return Ok(0);
        }
        // The ranges that overlap or touch `range`.
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

    /// Whether the set contains all numbers of `range`.
    pub fn contains(&self, range: &Range<u64>) -> bool {
        let start = range.start.max(self.contiguous_end);
        range.end <= self.contiguous_end
            || range.is_empty()
            || self.above_at(start).is_some_and(|other| range.end <= other.end)
    }

    /// Whether the set contains any number of `range`.
    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        let place = self.above.partition_point(|other| other.end <= range.start);
        let is_hit = |other: &Range<u64>| overlap(other, range) > 0;
        !range.is_empty()
            && (range.start < self.contiguous_end || self.above.get(place).is_some_and(is_hit))
    }

    /// The missing ranges below `end`, ascending.
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
