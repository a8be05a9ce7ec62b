//! The receiver's side of a channel: which bytes have arrived, and which frame may be taken in next.
//!
//! What enters: frames and fragments as they arrive. What leaves: for each, whether it is next, known already or to be
//! kept for later; the kept frame whose turn has come; the ranges of a report.
//!
//! What may never happen: a frame is taken in twice, or before the one in front of it; more is kept than
//! [`SPAN_BYTES_MAX`] of bytes and [`FRAMES_MAX`] frames; bytes are reported that are not here intact.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range;

use super::{SPAN_BYTES_MAX, SPAN_FRAMES_MAX};
use crate::limit::FRAME_BODY_BYTES_MAX;
use crate::range::RangeSet;
use crate::wire::Malformed;
use crate::wire::frame::Kind;
use crate::wire::head::REPORT_RANGES;

/// Ranges that may stand apart: one for every other frame that may have overtaken.
const RANGES_MAX: usize = FRAMES_MAX / 2;

/// Frames that may be kept.
const FRAMES_MAX: usize = SPAN_FRAMES_MAX;

/// See the module head.
#[derive(Debug, Default)]
pub struct Inflow {
    /// All bytes below have been taken in.
    taken: u64,
    /// Those that are here: taken in, or kept.
    arrived: RangeSet<RANGES_MAX>,
    /// Ranges that came early, the latest first, and whether they have been reported.
    recent: Vec<Recent>,
    /// Where there are others that have not been reported and found no room there.
    forgotten: Option<Range<u64>>,
    kept: BTreeMap<u64, Kept>,
    kept_bytes: u64,
}

#[derive(Clone, Debug)]
struct Recent {
    range: Range<u64>,
    is_told: bool,
}

/// Ranges that are remembered for reports at a time: as many as one call of the driver may well bring, if every other
/// datagram is missing. With more the reports take turns.
const RECENT_MAX: usize = 32;

/// A frame that came early, whole or in fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// What it is.
    pub kind: Kind,
    /// Its flags.
    pub flags: u8,
    /// Its bytes, head included.
    pub whole: u32,
    got: u32,
}

/// How a frame that arrives stands to those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// All before it has been taken in.
    Next,
    /// It is here already.
    Known,
    /// Something before it is missing.
    Early,
}

impl Kept {
    /// A frame of which nothing has arrived.
    pub fn new(kind: Kind, flags: u8, whole: u32) -> Self {
        Self { kind, flags, whole, got: 0 }
    }
}

impl Inflow {
    /// All bytes below have been taken in.
    #[inline]
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// How the frame with bytes `range` stands.
    ///
    /// # Errors
    /// If there can be no frame with these bytes.
    #[inline]
    pub fn standing(&self, range: &Range<u64>) -> Result<Standing, Malformed> {
        if range.start == self.taken && !self.has_early() {
            return Ok(Standing::Next);
        }
        if self.arrived.contains(range) {
            return Ok(Standing::Known);
        }
        match range.start.cmp(&self.taken) {
            core::cmp::Ordering::Less => Err(Malformed("bytes of a channel under two frames")),
            core::cmp::Ordering::Equal => Ok(Standing::Next),
            core::cmp::Ordering::Greater => Ok(Standing::Early),
        }
    }

    /// The frame at [`Self::taken`], of `bytes`, is in its place.
    #[inline]
    pub fn take_in(&mut self, bytes: u64) {
        let start = self.taken;
        self.taken += bytes;
        // It touches what is whole, so there is room.
        let _ = self.arrived.insert(start..self.taken);
    }

    /// The kept frame that has just been taken in by another way, or as a whole: it is kept no more.
    pub fn release(&mut self, frame: u64) -> Option<Kept> {
        let kept = self.kept.remove(&frame)?;
        self.kept_bytes -= kept.whole as u64;
        Some(kept)
    }

    /// Makes room for the frame that begins at byte `frame`; false if there is none: it must be dropped.
    ///
    /// # Errors
    /// If another frame begins there.
    pub fn keep(&mut self, frame: u64, as_of: Kept) -> Result<bool, Malformed> {
        if let Some(kept) = self.kept.get(&frame) {
            let is_same = Kept { got: 0, ..*kept } == as_of;
            return is_same.then_some(true).ok_or(Malformed("two frames with the same number"));
        }
        let bytes = self.kept_bytes + as_of.whole as u64;
        let is_near = frame - self.taken <= SPAN_BYTES_MAX;
        let has_room = bytes <= SPAN_BYTES_MAX + FRAME_BODY_BYTES_MAX as u64;
        if !is_near || !has_room || self.kept.len() >= FRAMES_MAX {
            return Ok(false);
        }
        self.kept.insert(frame, as_of);
        self.kept_bytes = bytes;
        Ok(true)
    }

    /// Bytes `range` of the frame kept from byte `frame` on have arrived.
    pub fn handle_kept(&mut self, frame: u64, range: Range<u64>) {
        let Some(kept) = self.kept.get_mut(&frame) else {
            return;
        };
        let Ok(new) = self.arrived.insert(range.clone()) else {
            return;
        };
        kept.got += new as u32;
        self.note_recent(range.start);
    }

    /// Bytes `range`, which are here, have come once more: the sender does not know, for a report is lost or says too little.
    /// They are reported again; false if [`Self::taken`] alone says it.
    pub fn handle_known(&mut self, range: &Range<u64>) -> bool {
        if range.end <= self.taken {
            return false;
        }
        // Perhaps only a part of them is here.
        let is_here = |&at: &u64| self.arrived.above_at(at).is_some();
        if let Some(at) = [range.start, range.end - 1].into_iter().find(is_here) {
            self.note_recent(at);
        }
        true
    }

    /// The range with byte `at` is to be reported.
    fn note_recent(&mut self, at: u64) {
        let Some(grown) = self.arrived.above_at(at) else { return };
        // Those that it has swallowed make room for older ones.
        self.recent.retain(|other| other.range.end < grown.start || grown.end < other.range.start);
        if self.recent.len() == RECENT_MAX {
            self.forget_one();
        }
        self.recent.insert(0, Recent { range: grown, is_told: false });
    }

    /// Makes room: what has been reported goes first.
    fn forget_one(&mut self) {
        let told = self.recent.iter().rposition(|other| other.is_told);
        let oldest = self.recent.remove(told.unwrap_or(RECENT_MAX - 1));
        if !oldest.is_told {
            let known = self.forgotten.take().unwrap_or(oldest.range.clone());
            self.forgotten =
                Some(known.start.min(oldest.range.start)..known.end.max(oldest.range.end));
        }
    }

    /// All that is remembered has been reported: what was forgotten has its turn, the highest first.
    fn remember(&mut self) {
        let Some(Range { start, end }) = self.forgotten.take() else { return };
        let above = self.arrived.above().iter().rev();
        let mut among = above.filter(|range| range.start < end && range.end > start);
        self.recent.clear();
        let untold = |range: &Range<u64>| Recent { range: range.clone(), is_told: false };
        self.recent.extend(among.by_ref().take(RECENT_MAX).map(untold));
        self.forgotten = among.next().map(|next| start..next.end);
    }

    /// The kept frame whose turn has come, by its first byte.
    #[inline]
    pub fn next_kept(&self) -> Option<(u64, Kept)> {
        if self.kept.is_empty() {
            return None;
        }
        let kept = self.kept.get(&self.taken)?;
        (kept.got == kept.whole).then_some((self.taken, *kept))
    }

    /// Whether all of `range` is here.
    pub fn has(&self, range: &Range<u64>) -> bool {
        self.arrived.contains(range)
    }

    /// Whether some of `range` is here.
    pub fn has_some(&self, range: &Range<u64>) -> bool {
        self.arrived.overlaps(range)
    }

    /// Whether bytes have arrived behind a gap.
    #[inline]
    pub fn has_early(&self) -> bool {
        !self.kept.is_empty()
    }

    /// What a report says besides `confirmed`, which may be less than [`Self::taken`]: first bytes, and how many. Of what is
    /// kept no more than fits.
    pub fn ranges(&self, confirmed: u64) -> [(u64, u32); REPORT_RANGES] {
        let mut chosen = self.chosen().map(|place| self.recent[place].range.clone());
        let mut ranges = core::array::from_fn(|_| {
            let range = chosen.next().unwrap_or(0..0);
            let start = range.start.max(self.taken);
            (start, range.end.saturating_sub(start) as u32)
        });
        // Kept frames up to the first gap are here as well, but what is confirmed is only what is in its place, and while a
        // refusal waits not even that. Who repeats it all for ever has no room for what the peer waits for.
        let whole = self.arrived.whole();
        if confirmed < whole {
            let bytes = u32::try_from(whole - confirmed).unwrap_or(u32::MAX);
            ranges[REPORT_RANGES - 1] = (confirmed, bytes);
        }
        ranges
    }

    /// Places of those that a report names: such as no report has named first, then the latest, lest a report is lost.
    fn chosen(&self) -> impl Iterator<Item = usize> {
        let of = |is_told| {
            let places = self.recent.iter().enumerate();
            places.filter(move |(_, it)| it.is_told == is_told).map(|(place, _)| place)
        };
        of(false).chain(of(true)).take(REPORT_RANGES)
    }

    /// What [`Self::ranges`] gave has been reported. True: there is more.
    pub fn handle_told(&mut self) -> bool {
        let mut chosen = [None; REPORT_RANGES];
        self.chosen().zip(&mut chosen).for_each(|(place, chosen)| *chosen = Some(place));
        for place in chosen.into_iter().flatten() {
            self.recent[place].is_told = true;
        }
        let taken = self.taken;
        self.recent.retain(|other| other.range.end > taken);
        if self.recent.iter().all(|other| other.is_told) {
            self.remember();
        }
        self.recent.iter().any(|other| !other.is_told)
    }

    /// Forgets what is kept.
    pub fn clear(&mut self) {
        self.kept.clear();
        self.kept_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_taken_in_in_order_whatever_comes_first() {
        let mut inflow = Inflow::default();
        assert_eq!(inflow.standing(&(10..30)), Ok(Standing::Early));
        assert_eq!(inflow.keep(10, frame(20)), Ok(true));
        inflow.handle_kept(10, 10..30);
        assert_eq!((inflow.next_kept(), inflow.ranges(inflow.taken())[0]), (None, (10, 20)));
        assert_eq!(inflow.standing(&(10..30)), Ok(Standing::Known));
        assert_eq!(inflow.standing(&(0..10)), Ok(Standing::Next));
        inflow.take_in(10);
        assert_eq!(inflow.standing(&(0..10)), Ok(Standing::Known));
        let (first, kept) = inflow.next_kept().unwrap();
        assert_eq!((first, kept.whole), (10, 20));
        inflow.release(10);
        inflow.take_in(20);
        assert_eq!((inflow.taken(), inflow.next_kept()), (30, None));
        assert!(inflow.standing(&(29..31)).is_err());
    }

    #[test]
    fn a_frame_is_whole_when_every_fragment_is_there_once() {
        let mut inflow = Inflow::default();
        for fragment in [20..30, 0..10, 20..30, 5..10] {
            assert_eq!(inflow.keep(0, frame(30)), Ok(true));
            inflow.handle_kept(0, fragment);
            assert_eq!(inflow.next_kept(), None);
        }
        inflow.handle_kept(0, 10..20);
        assert_eq!(inflow.next_kept().map(|(first, _)| first), Some(0));
        assert!(inflow.keep(0, frame(31)).is_err());
    }

    #[test]
    fn the_latest_ranges_are_reported_first() {
        let mut inflow = Inflow::default();
        for start in [10, 30, 50, 70] {
            inflow.keep(start, frame(5)).unwrap();
            inflow.handle_kept(start, start..start + 5);
        }
        assert_eq!(inflow.ranges(inflow.taken()), [(70, 5), (50, 5), (30, 5)]);
    }

    #[test]
    fn what_no_report_has_named_is_named_first() {
        let mut inflow = Inflow::default();
        for start in (10..=90).step_by(20) {
            inflow.keep(start, frame(5)).unwrap();
            inflow.handle_kept(start, start..start + 5);
        }
        assert_eq!(inflow.ranges(inflow.taken()), [(90, 5), (70, 5), (50, 5)]);
        assert!(inflow.handle_told());
        assert_eq!(inflow.ranges(inflow.taken()), [(30, 5), (10, 5), (90, 5)]);
        assert!(!inflow.handle_told());
        assert_eq!(inflow.ranges(inflow.taken()), [(90, 5), (70, 5), (50, 5)]);
        inflow.keep(35, frame(5)).unwrap();
        inflow.handle_kept(35, 35..40);
        assert_eq!(inflow.ranges(inflow.taken()), [(30, 10), (90, 5), (70, 5)]);
    }

    #[test]
    fn all_that_came_early_is_named_however_much_there_is() {
        const MANY: usize = 5 * RECENT_MAX + 7;
        let mut inflow = Inflow::default();
        let starts: Vec<u64> = (1..=MANY as u64).map(|place| place * 10).collect();
        for &start in &starts {
            inflow.keep(start, frame(5)).unwrap();
            inflow.handle_kept(start, start..start + 5);
        }
        assert_eq!(all_named(&mut inflow), starts);
        assert_eq!(named(&inflow).len(), REPORT_RANGES, "the latest are named again");
        assert!(!inflow.handle_told());
    }

    #[test]
    fn what_comes_once_more_is_named_again() {
        let mut inflow = Inflow::default();
        for start in (10..=90).step_by(10) {
            inflow.keep(start, frame(5)).unwrap();
            inflow.handle_kept(start, start..start + 5);
        }
        while inflow.handle_told() {}
        assert!(inflow.handle_known(&(20..25)));
        assert_eq!(inflow.ranges(inflow.taken())[0], (20, 5));
        inflow.take_in(10);
        assert!(!inflow.handle_known(&(0..10)), "`taken` says it");
    }

    /// The first bytes of all ranges that reports name, until none has anything new to say.
    fn all_named(inflow: &mut Inflow) -> Vec<u64> {
        let mut all = named(inflow);
        while inflow.handle_told() {
            all.extend(named(inflow));
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    fn named(inflow: &Inflow) -> Vec<u64> {
        let ranges = inflow.ranges(inflow.taken());
        ranges.iter().filter(|&&(_, bytes)| bytes > 0).map(|&(start, _)| start).collect()
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut inflow = Inflow::default();
        assert_eq!(inflow.keep(SPAN_BYTES_MAX + 1, frame(1)), Ok(false));
        let mut kept = 0;
        while inflow.keep(1 + kept, frame(1 << 20)) == Ok(true) {
            kept += 1;
        }
        assert_eq!(kept, (SPAN_BYTES_MAX >> 20) + 1);
        inflow.release(1);
        assert_eq!(inflow.keep(1, frame(1 << 20)), Ok(true));
    }

    fn frame(whole: u32) -> Kept {
        Kept::new(Kind::Data, 0, whole)
    }
}
