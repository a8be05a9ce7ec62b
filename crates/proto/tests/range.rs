//! Compares a set of ranges with the plain set of its numbers.

use std::collections::BTreeSet;
use std::ops::Range;

use landbridge_proto::range::{RangeSet, RangeSetFull};
use proptest::prelude::*;

/// The capacity of the set: few ranges, so that the set is full often.
const RANGES_MAX: usize = 4;
/// The numbers in use, beyond the contiguous end of the set.
const NUMBERS: u64 = 60;

proptest! {
    #[test]
    fn a_set_of_ranges_is_the_set_of_its_numbers(
        contiguous_end in prop_oneof![Just(0), 1..20_u64, Just(u64::MAX - NUMBERS)],
        ranges in prop::collection::vec((0..NUMBERS, 0..12_u64), 0..40),
    ) {
        let mut set = RangeSet::<RANGES_MAX>::below(contiguous_end);
        // The model holds only numbers that are not below `contiguous_end`: a set of all numbers
        // below would be large.
        let mut model = BTreeSet::new();
        for (start, length) in ranges {
            // Some ranges begin below.
            let start = (contiguous_end + start).saturating_sub(8);
            let range = start..start.saturating_add(length);
            let before = set.clone();
            match set.insert(range.clone()) {
                Ok(new) => prop_assert_eq!(new, put(&mut model, &range, contiguous_end)),
                Err(RangeSetFull) => {
                    prop_assert_eq!(&set, &before);
                    prop_assert!(is_alone(&model, &range) && set.above().len() == RANGES_MAX);
                }
            }
            check(&set, &model, contiguous_end)?;
        }
    }
}

fn put(model: &mut BTreeSet<u64>, range: &Range<u64>, contiguous_end: u64) -> u64 {
    range.clone().filter(|&number| number >= contiguous_end && model.insert(number)).count() as u64
}

/// Whether the range and its neighbours are not in the set.
fn is_alone(model: &BTreeSet<u64>, range: &Range<u64>) -> bool {
    model.range(range.start.saturating_sub(1)..=range.end).next().is_none()
}

fn check(
    set: &RangeSet<RANGES_MAX>,
    model: &BTreeSet<u64>,
    contiguous_end: u64,
) -> Result<(), TestCaseError> {
    let is_in = |number: u64| number < contiguous_end || model.contains(&number);
    let first_missing =
        (contiguous_end..=u64::MAX).find(|&number| !is_in(number)).unwrap_or(u64::MAX);
    prop_assert_eq!(set.contiguous_end(), first_missing);
    prop_assert_eq!(set.end(), model.last().map_or(contiguous_end, |last| last + 1));
    let above = set.above();
    prop_assert!(above.len() <= RANGES_MAX);
    let starts_apart = above.first().is_none_or(|first| first.start > set.contiguous_end());
    prop_assert!(starts_apart && above.windows(2).all(|pair| pair[0].end < pair[1].start));
    let end = contiguous_end.saturating_add(NUMBERS);
    for start in contiguous_end.saturating_sub(3)..end {
        for length in [0, 1, 2, 5, 13] {
            let range = start..start.saturating_add(length);
            let expected = range.clone().all(is_in);
            prop_assert_eq!(set.contains(&range), expected, "{:?}", range);
        }
    }
    for end in [contiguous_end, set.end(), end] {
        let missing: Vec<u64> = set.missing(end).flatten().collect();
        let expected: Vec<u64> = (contiguous_end..end).filter(|&number| !is_in(number)).collect();
        prop_assert_eq!(missing, expected);
    }
    Ok(())
}
