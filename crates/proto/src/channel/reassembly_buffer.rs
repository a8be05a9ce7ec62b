//! The receiver's side of a channel: which bytes have arrived, and which frame may be delivered
//! next.
//!
//! What enters: frames and fragments as they arrive. What leaves: for each frame, whether its turn
//! has come, it is a duplicate, or it must be buffered; the buffered frame whose turn has come; the
//! ranges of a report.
//!
//! What may never happen: a frame is delivered twice, or before the frame in front of it; the
//! buffered frames exceed [`REORDER_WINDOW_BYTES_MAX`] by more than one frame, or their number
//! exceeds [`FRAMES_MAX`]; bytes are reported that have not arrived intact.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range;

use super::{REORDER_WINDOW_BYTES_MAX, REORDER_WINDOW_FRAMES_MAX};
use crate::limit::FRAME_BODY_BYTES_MAX;
use crate::range::RangeSet;
use crate::wire::Malformed;
use crate::wire::frame::Kind;
use crate::wire::kind_header::SACK_RANGES;

/// The most separate ranges: one for every second frame that may have overtaken others.
const RANGES_MAX: usize = REORDER_WINDOW_FRAMES_MAX / 2;

/// The most frames that may be buffered.
const FRAMES_MAX: usize = REORDER_WINDOW_FRAMES_MAX;

/// The reassembly buffer of one channel: see the module documentation.
#[derive(Debug, Default)]
pub struct ReassemblyBuffer {
    /// All bytes below this number have been delivered.
    delivered: u64,
    /// The bytes that have arrived: delivered or buffered.
    arrived: RangeSet<RANGES_MAX>,
    /// The ranges that arrived early, the latest first, each with a flag: the range has been
    /// reported.
    recent: Vec<RecentRange>,
    /// The bytes from the first to the end of further ranges that have not been reported and for
    /// which `recent` has no capacity.
    evicted: Option<Range<u64>>,
    buffered: BTreeMap<u64, BufferedFrame>,
    buffered_bytes: u64,
}

#[derive(Clone, Debug)]
struct RecentRange {
    range: Range<u64>,
    is_reported: bool,
}

/// The most ranges that are remembered for reports at a time: as many as one call of the driver may
/// bring if every other datagram is missing. If there are more, the reports cover them in turns.
const RECENT_RANGES_MAX: usize = 32;

/// A frame that arrived early, whole or in fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferedFrame {
    /// The frame's kind.
    pub kind: Kind,
    /// The frame's flags.
    pub flags: u8,
    /// The frame's bytes, head included.
    pub whole: u32,
    got: u32,
}

/// The position of an arriving frame relative to the frames before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrivalOrder {
    /// All frames before the arriving frame have been delivered.
    InOrder,
    /// The arriving frame has arrived before.
    Duplicate,
    /// Bytes before the arriving frame are missing.
    OutOfOrder,
}

impl BufferedFrame {
    /// A frame of which nothing has arrived.
    pub fn new(kind: Kind, flags: u8, whole: u32) -> Self {
        Self { kind, flags, whole, got: 0 }
    }
}

impl ReassemblyBuffer {
    /// All bytes below this number have been delivered.
    #[inline]
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// The position of the frame with bytes `range`.
    ///
    /// # Errors
    /// [`Malformed`] if there can be no frame with these bytes.
    #[inline]
    pub fn arrival_order(&self, range: &Range<u64>) -> Result<ArrivalOrder, Malformed> {
        if range.start == self.delivered && !self.has_out_of_order() {
            return Ok(ArrivalOrder::InOrder);
        }
        if self.arrived.contains(range) {
            return Ok(ArrivalOrder::Duplicate);
        }
        match range.start.cmp(&self.delivered) {
            core::cmp::Ordering::Less => Err(Malformed("bytes of a channel under two frames")),
            core::cmp::Ordering::Equal => Ok(ArrivalOrder::InOrder),
            core::cmp::Ordering::Greater => Ok(ArrivalOrder::OutOfOrder),
        }
    }

    /// Records that the frame at [`Self::delivered`], of `bytes` bytes, has been delivered.
    #[inline]
    pub fn deliver(&mut self, bytes: u64) {
        let start = self.delivered;
        self.delivered += bytes;
        // The new range touches the delivered bytes, so the set has capacity.
        let _ = self.arrived.insert(start..self.delivered);
    }

    /// Removes a buffered frame that has just been delivered by another path, or from the buffer.
    pub fn release(&mut self, frame: u64) -> Option<BufferedFrame> {
        let buffered = self.buffered.remove(&frame)?;
        self.buffered_bytes -= buffered.whole as u64;
        Some(buffered)
    }

    /// Reserves capacity for the frame that begins at byte `frame`. Returns false if there is none,
    /// so that the frame must be dropped.
    ///
    /// # Errors
    /// [`Malformed`] if another frame begins at the same byte.
    pub fn reserve(&mut self, frame: u64, as_of: BufferedFrame) -> Result<bool, Malformed> {
        if let Some(buffered) = self.buffered.get(&frame) {
            let is_same = BufferedFrame { got: 0, ..*buffered } == as_of;
            return is_same.then_some(true).ok_or(Malformed("two frames with the same number"));
        }
        let bytes = self.buffered_bytes + as_of.whole as u64;
        let is_near = frame - self.delivered <= REORDER_WINDOW_BYTES_MAX;
        let has_room = bytes <= REORDER_WINDOW_BYTES_MAX + FRAME_BODY_BYTES_MAX as u64;
        if !is_near || !has_room || self.buffered.len() >= FRAMES_MAX {
            return Ok(false);
        }
        self.buffered.insert(frame, as_of);
        self.buffered_bytes = bytes;
        Ok(true)
    }

    /// Records that bytes `range` of the buffered frame that begins at byte `frame` have arrived.
    pub fn handle_buffered(&mut self, frame: u64, range: Range<u64>) {
        let Some(buffered) = self.buffered.get_mut(&frame) else {
            return;
        };
        let Ok(new) = self.arrived.insert(range.clone()) else {
            return;
        };
        buffered.got += new as u32;
        self.note_recent(range.start);
    }

    /// Records that bytes `range`, which have arrived before, have arrived again: the sender does
    /// not know of the first arrival, because a report is lost or says too little. The range is
    /// reported again. Returns false if [`Self::delivered`] alone reports it.
    pub fn handle_duplicate(&mut self, range: &Range<u64>) -> bool {
        if range.end <= self.delivered {
            return false;
        }
        // Possibly only a part of the range has arrived before.
        let is_here = |&at: &u64| self.arrived.above_at(at).is_some();
        if let Some(at) = [range.start, range.end - 1].into_iter().find(is_here) {
            self.note_recent(at);
        }
        true
    }

    /// Marks the range around byte `at` for the next report.
    fn note_recent(&mut self, at: u64) {
        let Some(grown) = self.arrived.above_at(at) else { return };
        // Ranges that the grown range includes are removed, which frees capacity for older ones.
        self.recent.retain(|other| other.range.end < grown.start || grown.end < other.range.start);
        if self.recent.len() == RECENT_RANGES_MAX {
            self.evict_one();
        }
        self.recent.insert(0, RecentRange { range: grown, is_reported: false });
    }

    /// Removes the oldest reported range, or the oldest range if none has been reported.
    fn evict_one(&mut self) {
        let reported = self.recent.iter().rposition(|other| other.is_reported);
        let oldest = self.recent.remove(reported.unwrap_or(RECENT_RANGES_MAX - 1));
        if !oldest.is_reported {
            let known = self.evicted.take().unwrap_or(oldest.range.clone());
            self.evicted =
                Some(known.start.min(oldest.range.start)..known.end.max(oldest.range.end));
        }
    }

    /// Restores evicted ranges, the highest first, after all recent ranges have been reported.
    fn restore_evicted(&mut self) {
        let Some(Range { start, end }) = self.evicted.take() else { return };
        let above = self.arrived.above().iter().rev();
        let mut among = above.filter(|range| range.start < end && range.end > start);
        self.recent.clear();
        let unreported =
            |range: &Range<u64>| RecentRange { range: range.clone(), is_reported: false };
        self.recent.extend(among.by_ref().take(RECENT_RANGES_MAX).map(unreported));
        self.evicted = among.next().map(|next| start..next.end);
    }

    /// The number of the first byte of the buffered frame whose turn has come, and the frame, if
    /// all its bytes have arrived.
    #[inline]
    pub fn next_reassembled(&self) -> Option<(u64, BufferedFrame)> {
        if self.buffered.is_empty() {
            return None;
        }
        let buffered = self.buffered.get(&self.delivered)?;
        (buffered.got == buffered.whole).then_some((self.delivered, *buffered))
    }

    /// Whether all of `range` has arrived.
    pub fn has(&self, range: &Range<u64>) -> bool {
        self.arrived.contains(range)
    }

    /// Whether some of `range` has arrived.
    pub fn has_some(&self, range: &Range<u64>) -> bool {
        self.arrived.overlaps(range)
    }

    /// Whether bytes have arrived behind a gap.
    #[inline]
    pub fn has_out_of_order(&self) -> bool {
        !self.buffered.is_empty()
    }

    /// The ranges of a report beyond `acknowledged`, which may be less than [`Self::delivered`]:
    /// the first byte and the number of bytes of each. The report names at most [`SACK_RANGES`]
    /// ranges.
    pub fn ranges(&self, acknowledged: u64) -> [(u64, u32); SACK_RANGES] {
        let mut chosen = self.chosen().map(|place| self.recent[place].range.clone());
        let mut ranges = core::array::from_fn(|_| {
            let range = chosen.next().unwrap_or(0..0);
            let start = range.start.max(self.delivered);
            (start, range.end.saturating_sub(start) as u32)
        });
        // Buffered frames before the first gap have arrived as well. But `acknowledged` covers only
        // delivered frames, and while a refusal waits not all of them. A sender that kept
        // retransmitting these bytes would have no credit for the bytes that the peer waits for.
        let whole = self.arrived.contiguous_end();
        if acknowledged < whole {
            let bytes = u32::try_from(whole - acknowledged).unwrap_or(u32::MAX);
            ranges[SACK_RANGES - 1] = (acknowledged, bytes);
        }
        ranges
    }

    /// The indices of the ranges that the next report names: unreported ranges first, then the
    /// latest reported ones, in case a report was lost.
    fn chosen(&self) -> impl Iterator<Item = usize> {
        let of = |is_reported| {
            let places = self.recent.iter().enumerate();
            places.filter(move |(_, it)| it.is_reported == is_reported).map(|(place, _)| place)
        };
        of(false).chain(of(true)).take(SACK_RANGES)
    }

    /// Records that the ranges of [`Self::ranges`] have been reported. Returns true if there are
    /// unreported ranges.
    pub fn handle_sack_sent(&mut self) -> bool {
        let mut chosen = [None; SACK_RANGES];
        self.chosen().zip(&mut chosen).for_each(|(place, chosen)| *chosen = Some(place));
        for place in chosen.into_iter().flatten() {
            self.recent[place].is_reported = true;
        }
        let delivered = self.delivered;
        self.recent.retain(|other| other.range.end > delivered);
        if self.recent.iter().all(|other| other.is_reported) {
            self.restore_evicted();
        }
        self.recent.iter().any(|other| !other.is_reported)
    }

    /// Drops all buffered frames.
    pub fn clear(&mut self) {
        self.buffered.clear();
        self.buffered_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_taken_in_in_order_whatever_comes_first() {
        let mut buffer = ReassemblyBuffer::default();
        assert_eq!(buffer.arrival_order(&(10..30)), Ok(ArrivalOrder::OutOfOrder));
        assert_eq!(buffer.reserve(10, frame(20)), Ok(true));
        buffer.handle_buffered(10, 10..30);
        assert_eq!(
            (buffer.next_reassembled(), buffer.ranges(buffer.delivered())[0]),
            (None, (10, 20))
        );
        assert_eq!(buffer.arrival_order(&(10..30)), Ok(ArrivalOrder::Duplicate));
        assert_eq!(buffer.arrival_order(&(0..10)), Ok(ArrivalOrder::InOrder));
        buffer.deliver(10);
        assert_eq!(buffer.arrival_order(&(0..10)), Ok(ArrivalOrder::Duplicate));
        let (first, buffered) = buffer.next_reassembled().unwrap();
        assert_eq!((first, buffered.whole), (10, 20));
        buffer.release(10);
        buffer.deliver(20);
        assert_eq!((buffer.delivered(), buffer.next_reassembled()), (30, None));
        assert!(buffer.arrival_order(&(29..31)).is_err());
    }

    #[test]
    fn a_frame_is_whole_when_every_fragment_is_there_once() {
        let mut buffer = ReassemblyBuffer::default();
        for fragment in [20..30, 0..10, 20..30, 5..10] {
            assert_eq!(buffer.reserve(0, frame(30)), Ok(true));
            buffer.handle_buffered(0, fragment);
            assert_eq!(buffer.next_reassembled(), None);
        }
        buffer.handle_buffered(0, 10..20);
        assert_eq!(buffer.next_reassembled().map(|(first, _)| first), Some(0));
        assert!(buffer.reserve(0, frame(31)).is_err());
    }

    #[test]
    fn the_latest_ranges_are_reported_first() {
        let mut buffer = ReassemblyBuffer::default();
        for start in [10, 30, 50, 70] {
            buffer.reserve(start, frame(5)).unwrap();
            buffer.handle_buffered(start, start..start + 5);
        }
        assert_eq!(buffer.ranges(buffer.delivered()), [(70, 5), (50, 5), (30, 5)]);
    }

    #[test]
    fn what_no_report_has_named_is_named_first() {
        let mut buffer = ReassemblyBuffer::default();
        for start in (10..=90).step_by(20) {
            buffer.reserve(start, frame(5)).unwrap();
            buffer.handle_buffered(start, start..start + 5);
        }
        assert_eq!(buffer.ranges(buffer.delivered()), [(90, 5), (70, 5), (50, 5)]);
        assert!(buffer.handle_sack_sent());
        assert_eq!(buffer.ranges(buffer.delivered()), [(30, 5), (10, 5), (90, 5)]);
        assert!(!buffer.handle_sack_sent());
        assert_eq!(buffer.ranges(buffer.delivered()), [(90, 5), (70, 5), (50, 5)]);
        buffer.reserve(35, frame(5)).unwrap();
        buffer.handle_buffered(35, 35..40);
        assert_eq!(buffer.ranges(buffer.delivered()), [(30, 10), (90, 5), (70, 5)]);
    }

    #[test]
    fn all_that_came_early_is_named_however_much_there_is() {
        const MANY: usize = 5 * RECENT_RANGES_MAX + 7;
        let mut buffer = ReassemblyBuffer::default();
        let starts: Vec<u64> = (1..=MANY as u64).map(|place| place * 10).collect();
        for &start in &starts {
            buffer.reserve(start, frame(5)).unwrap();
            buffer.handle_buffered(start, start..start + 5);
        }
        assert_eq!(all_named(&mut buffer), starts);
        assert_eq!(named(&buffer).len(), SACK_RANGES, "the latest are named again");
        assert!(!buffer.handle_sack_sent());
    }

    #[test]
    fn what_comes_once_more_is_named_again() {
        let mut buffer = ReassemblyBuffer::default();
        for start in (10..=90).step_by(10) {
            buffer.reserve(start, frame(5)).unwrap();
            buffer.handle_buffered(start, start..start + 5);
        }
        while buffer.handle_sack_sent() {}
        assert!(buffer.handle_duplicate(&(20..25)));
        assert_eq!(buffer.ranges(buffer.delivered())[0], (20, 5));
        buffer.deliver(10);
        assert!(!buffer.handle_duplicate(&(0..10)), "`delivered` says it");
    }

    /// The first bytes of all ranges that reports name, until no report has anything new to name.
    fn all_named(buffer: &mut ReassemblyBuffer) -> Vec<u64> {
        let mut all = named(buffer);
        while buffer.handle_sack_sent() {
            all.extend(named(buffer));
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    fn named(buffer: &ReassemblyBuffer) -> Vec<u64> {
        let ranges = buffer.ranges(buffer.delivered());
        ranges.iter().filter(|&&(_, bytes)| bytes > 0).map(|&(start, _)| start).collect()
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut buffer = ReassemblyBuffer::default();
        assert_eq!(buffer.reserve(REORDER_WINDOW_BYTES_MAX + 1, frame(1)), Ok(false));
        let mut buffered = 0;
        while buffer.reserve(1 + buffered, frame(1 << 20)) == Ok(true) {
            buffered += 1;
        }
        assert_eq!(buffered, (REORDER_WINDOW_BYTES_MAX >> 20) + 1);
        buffer.release(1);
        assert_eq!(buffer.reserve(1, frame(1 << 20)), Ok(true));
    }

    fn frame(whole: u32) -> BufferedFrame {
        BufferedFrame::new(Kind::Data, 0, whole)
    }
}
