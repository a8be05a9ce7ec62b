//! The sender's side of a channel: which frames have been sent and not acknowledged, and which of
//! them must be retransmitted.
//!
//! What enters: every frame that leaves ([`RetransmitBuffer::retain`]), acknowledgements, reports
//! of arrived ranges, broken paths. What leaves: the piece that must be retransmitted next, cut for
//! the path that takes the piece.
//!
//! What may never happen: the buffer forgets a byte that the peer has not acknowledged; it
//! retransmits a byte that the peer has acknowledged; after a break, it retransmits before the peer
//! has reported what has arrived.

use alloc::collections::VecDeque;

use super::{PathId, REORDER_WINDOW_BYTES_MAX, REORDER_WINDOW_FRAMES_MAX};
use crate::path::time::Time;
use crate::wire::frame::Kind;
use crate::wire::kind_header::{KindHeader, SACK_RANGES};

/// The retransmit buffer of one channel: see the module documentation.
#[derive(Debug)]
pub struct RetransmitBuffer<M> {
    /// The number of the next new byte.
    next: u64,
    /// The peer has delivered all bytes below this number.
    delivered: u64,
    /// The unacknowledged frames, in ascending order of their first byte.
    retained: VecDeque<RetainedFrame<M>>,
    /// The number of retained frames that must be retransmitted.
    lost: usize,
    /// The number of status requests made so far.
    status_requests: u64,
    /// The ranges that the peer has reported as arrived, the latest first. Frames within them need
    /// no second look.
    reported: [(u64, u64); SACK_RANGES],
    /// No retained frame that starts below this number is lost.
    first_lost_at: u64,
    /// The number of the status request whose answer must arrive before anything is retransmitted,
    /// and whether the request has left. The answer to any later status request serves as well.
    awaited_status: Option<(u64, bool)>,
}

/// The size of the pieces in which bytes that arrived corrupt are retransmitted. A path that
/// damages one of a hundred packets damages half of all pieces of 100 kB, and hardly ever lets a
/// megabyte pass.
const CORRUPT_PIECE_BYTES: u32 = 16 << 10;

/// A frame, or a range of a frame's bytes, that the peer has not acknowledged.
#[derive(Clone, Debug)]
pub struct RetainedFrame<M> {
    /// The number of the first byte.
    pub start: u64,
    /// The length of the range in bytes.
    pub length: u32,
    /// The offset of the range in the frame, in bytes.
    pub offset: u32,
    /// The bytes of the whole frame, head included.
    pub whole: u32,
    /// The frame's kind.
    pub kind: Kind,
    /// The frame's flags.
    pub flags: u8,
    /// The frame's head.
    pub head: KindHeader,
    /// The memory that holds the frame's payload, from byte `at` on.
    pub memory: Option<M>,
    /// The offset of the payload in `memory`, in bytes.
    pub at: u64,
    /// The path by which the range was sent last.
    pub path: PathId,
    /// The time of sending. [`RetainedFrame::UNKNOWN`] if nobody read the time, or if the range was
    /// sent more than once, so that an acknowledgement may be for either transmission.
    pub sent_at: Time,
    /// On a path of datagrams: the position in the order of sending. On another path with silent
    /// loss: the number of the first status request that was sent behind the range, or 0.
    pub order: u64,
    /// The range has arrived corrupt. It is retransmitted in smaller pieces, of which fewer are
    /// corrupt.
    pub was_corrupt: bool,
    /// Whether the range is in flight, lost or reported as arrived.
    pub state: RetainedState,
}

impl<M> RetainedFrame<M> {
    /// The value of [`RetainedFrame::sent_at`] if no round trip can be measured.
    pub const UNKNOWN: Time = Time(u64::MAX);
}

/// The state of a retained range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetainedState {
    /// The range is in flight.
    InFlight,
    /// The range must be retransmitted.
    Lost,
    /// The peer has the range, but not yet all bytes before it.
    Sacked,
}

/// What a frame that leaves carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The frame carries new bytes of the channel.
    New,
    /// The frame carries what [`RetransmitBuffer::next_lost`] returned.
    Retransmission,
    /// The frame carries no bytes of the channel.
    Control,
}

impl<M> Default for RetransmitBuffer<M> {
    fn default() -> Self {
        Self {
            next: 0,
            delivered: 0,
            retained: VecDeque::new(),
            lost: 0,
            status_requests: 0,
            reported: [(0, 0); SACK_RANGES],
            first_lost_at: 0,
            awaited_status: None,
        }
    }
}

impl<M: Clone> RetransmitBuffer<M> {
    /// The number of the next new byte.
    #[inline]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The peer has delivered all bytes below this number.
    #[inline]
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Bytes that have been sent and not acknowledged.
    #[inline]
    pub fn unacknowledged(&self) -> u64 {
        self.next - self.delivered
    }

    /// The number of frames and ranges that are retained until the peer acknowledges them.
    pub fn retained(&self) -> usize {
        self.retained.len()
    }

    /// The retained frames and ranges, in ascending order of their first byte.
    pub fn retained_frames(&self) -> impl Iterator<Item = &RetainedFrame<M>> {
        self.retained.iter()
    }

    /// Records that `bytes` new bytes have left on a lossless path. They are not retained.
    #[inline]
    pub fn advance_lossless(&mut self, bytes: u64) {
        self.next += bytes;
    }

    /// Retains new bytes that have left and may have to be retransmitted.
    #[inline]
    pub fn retain(&mut self, frame: RetainedFrame<M>) {
        self.next = frame.start + frame.length as u64;
        self.retained.push_back(frame);
    }

    /// Records that the peer has delivered all bytes below `delivered`. Returns false if this is
    /// not new. Calls `each` for every acknowledged range that was not known to have arrived.
    #[inline]
    pub fn handle_delivered(
        &mut self,
        delivered: u64,
        mut each: impl FnMut(&RetainedFrame<M>),
    ) -> bool {
        if delivered <= self.delivered {
            return false;
        }
        self.delivered = delivered;
        while let Some(first) = self.retained.front()
            && first.start + first.length as u64 <= delivered
        {
            self.lost -= (first.state == RetainedState::Lost) as usize;
            if first.state != RetainedState::Sacked {
                each(first);
            }
            self.retained.pop_front();
        }
        if self.retained.is_empty() {
            // No retained frame is left that an answer could report on, and the answer may never
            // come.
            self.awaited_status = None;
        }
        true
    }

    /// Records that bytes `start..end` have arrived at the peer. Calls `each` for every range that
    /// was not known to have arrived.
    pub fn handle_arrived(
        &mut self,
        start: u64,
        end: u64,
        mut each: impl FnMut(&RetainedFrame<M>),
    ) {
        let known = self.reported.iter().position(|other| other.0 == start && other.1 <= end);
        let place = known.unwrap_or(SACK_RANGES - 1);
        // A frame of which only a part was known to have arrived is checked again.
        let fresh = known.map_or(start, |known| self.reported[known].1);
        self.reported[..=place].rotate_right(1);
        self.reported[0] = (start, end);
        let first = self.retained.partition_point(|frame| {
            frame.start < start || frame.start + (frame.length as u64) <= fresh
        });
        for frame in self.retained.range_mut(first..) {
            if frame.start + frame.length as u64 > end {
                break;
            }
            self.lost -= (frame.state == RetainedState::Lost) as usize;
            if frame.state != RetainedState::Sacked {
                each(frame);
            }
            frame.state = RetainedState::Sacked;
        }
    }

    /// Records that bytes `start..end` have arrived corrupt. Calls `each` for every range that is
    /// lost by this.
    pub fn handle_corrupt(&mut self, start: u64, end: u64, each: impl FnMut(&RetainedFrame<M>)) {
        let is_hit = |frame: &RetainedFrame<M>| {
            frame.start < end && start < frame.start + frame.length as u64
        };
        self.retained.iter_mut().filter(|it| is_hit(it)).for_each(|it| it.was_corrupt = true);
        self.lose(is_hit, each);
    }

    /// Records that `path` is broken: every range in flight on it may be lost, and will never
    /// arrive by it.
    pub fn handle_break(&mut self, path: PathId) {
        self.lose(|frame| frame.path == path, |_| ());
    }

    /// Records that status request `number` has left behind the ranges in flight on paths with
    /// silent loss.
    pub fn mark_status_requested(&mut self, number: u64, has_silent_loss: impl Fn(PathId) -> bool) {
        let flying =
            self.retained.iter_mut().filter(|frame| frame.state == RetainedState::InFlight);
        flying
            .filter(|frame| frame.order == 0 && has_silent_loss(frame.path))
            .for_each(|frame| frame.order = number);
    }

    /// Processes the answer to status request `number`, once the ranges that the answer reports
    /// have been processed. A range that was sent before the status request by a path with silent
    /// loss, and that is not reported, is lost.
    pub fn handle_silent_loss(
        &mut self,
        number: u64,
        has_silent_loss: impl Fn(PathId) -> bool,
        each: impl FnMut(&RetainedFrame<M>),
    ) {
        let was_covered = |frame: &RetainedFrame<M>| frame.order > 0 && frame.order <= number;
        self.lose(|frame| was_covered(frame) && has_silent_loss(frame.path), each);
    }

    /// Records that the range that begins with byte `start` and left by `path` as number `order` is
    /// lost, if it is still in flight.
    pub fn handle_lost(
        &mut self,
        (path, order): (PathId, u64),
        start: u64,
        each: impl FnOnce(&RetainedFrame<M>),
    ) {
        let place = self.retained.partition_point(|frame| frame.start < start);
        let Some(frame) = self.retained.get_mut(place) else { return };
        let is_it = (frame.start, frame.path, frame.order) == (start, path, order);
        if is_it && frame.state == RetainedState::InFlight {
            frame.state = RetainedState::Lost;
            self.lost += 1;
            self.first_lost_at = self.first_lost_at.min(start);
            each(frame);
        }
    }

    fn lose(
        &mut self,
        is_lost: impl Fn(&RetainedFrame<M>) -> bool,
        mut each: impl FnMut(&RetainedFrame<M>),
    ) {
        for frame in &mut self.retained {
            if frame.state == RetainedState::InFlight && is_lost(frame) {
                frame.state = RetainedState::Lost;
                self.lost += 1;
                self.first_lost_at = self.first_lost_at.min(frame.start);
                each(frame);
            }
        }
    }

    /// Requests the peer's status: until the peer has reported what has arrived, nothing is sent,
    /// neither lost nor new bytes. With nothing unacknowledged there is nothing to wait for, and
    /// nobody would notice the loss of the status request.
    pub fn request_status(&mut self) {
        if self.retained.is_empty() {
            return;
        }
        self.status_requests += 1;
        self.awaited_status = Some((self.status_requests, false));
    }

    /// The number of the status request that must be sent.
    #[inline]
    pub fn due_status_request(&self) -> Option<u64> {
        self.awaited_status.filter(|(_, has_left)| !has_left).map(|(number, _)| number)
    }

    /// The number for a further status request, for whose answer nothing waits.
    #[inline]
    pub fn next_status_request(&self) -> u64 {
        self.status_requests + 1
    }

    /// Records that status request `number` has left.
    pub fn handle_status_request_sent(&mut self, number: u64) {
        self.status_requests = self.status_requests.max(number);
        if self.due_status_request() == Some(number) {
            self.mark_status_request_sent();
        }
    }

    /// Records that the awaited status request has left.
    pub fn mark_status_request_sent(&mut self) {
        if let Some((_, has_left)) = &mut self.awaited_status {
            *has_left = true;
        }
    }

    /// Processes the answer to status request `number`, once its ranges have been processed. The
    /// answer to a later status request than the awaited one ends the waiting too.
    pub fn handle_status_reply(&mut self, number: u64) {
        if self.awaited_status.is_some_and(|(awaited_status, _)| awaited_status <= number) {
            self.awaited_status = None;
        }
    }

    /// Whether the peer's answer to a status request is awaited.
    #[inline]
    pub fn is_awaiting_status(&self) -> bool {
        self.awaited_status.is_some()
    }

    /// Whether a frame of a kind and on a path that `is_meant` accepts is in flight.
    pub fn is_under_way(&self, is_meant: impl Fn(Kind, PathId) -> bool) -> bool {
        let mut flying =
            self.retained.iter().filter(|frame| frame.state == RetainedState::InFlight);
        flying.any(|frame| is_meant(frame.kind, frame.path))
    }

    /// Whether something must be retransmitted.
    #[inline]
    pub fn has_lost(&self) -> bool {
        self.lost > 0
    }

    /// Whether the range that must be retransmitted next lies within the peer's reorder window, so
    /// that the peer buffers it even if it overtakes what is before it.
    pub fn is_lost_in_window(&self) -> bool {
        self.lost_index().is_some_and(|index| {
            let range = &self.retained[index];
            let ahead = range.start.saturating_sub(self.delivered);
            // However small the pieces are, the peer waits for those of the frame whose turn is
            // next.
            let is_of_next = range.start - range.offset as u64 <= self.delivered;
            is_of_next || (index < REORDER_WINDOW_FRAMES_MAX && ahead < REORDER_WINDOW_BYTES_MAX)
        })
    }

    /// The range that must be retransmitted next: a whole frame with at most `payload_max` bytes of
    /// payload, or a piece of at most `payload_max` bytes that is cut from a longer frame.
    pub fn next_lost(&mut self, payload_max: u32) -> Option<&RetainedFrame<M>> {
        let index = self.lost_index()?;
        let range = &self.retained[index];
        let payload_max = match range.was_corrupt {
            true => payload_max.min(CORRUPT_PIECE_BYTES),
            false => payload_max,
        };
        let head = KindHeader::size(range.kind, range.flags) as u32;
        let is_whole = range.length == range.whole && range.whole - head <= payload_max;
        if !is_whole && range.length > payload_max {
            self.cut(index, payload_max.max(1));
        }
        self.retained.get(index)
    }

    /// The range that [`Self::next_lost`] returned last.
    pub fn first_lost(&self) -> Option<&RetainedFrame<M>> {
        self.retained.get(self.lost_index()?)
    }

    /// Records that the range that [`Self::next_lost`] returned has left by `path` as number
    /// `order`: see [`RetainedFrame::order`].
    pub fn mark_retransmitted(&mut self, path: PathId, order: u64) {
        if let Some(index) = self.lost_index() {
            let frame = &mut self.retained[index];
            (frame.state, frame.path) = (RetainedState::InFlight, path);
            self.first_lost_at = frame.start;
            (frame.sent_at, frame.order) = (RetainedFrame::<M>::UNKNOWN, order);
            self.lost -= 1;
        }
    }

    fn lost_index(&self) -> Option<usize> {
        if self.lost == 0 {
            return None;
        }
        let from = self.retained.partition_point(|frame| frame.start < self.first_lost_at);
        let place =
            self.retained.range(from..).position(|frame| frame.state == RetainedState::Lost)?;
        Some(from + place)
    }

    fn cut(&mut self, index: usize, bytes_max: u32) {
        let front = &mut self.retained[index];
        let mut rest = front.clone();
        front.length = bytes_max;
        rest.start += bytes_max as u64;
        rest.offset += bytes_max;
        rest.length -= bytes_max;
        self.lost += 1;
        self.retained.insert(index + 1, rest);
    }

    /// Numbers a frame that is too long for the path that has it, and marks it lost, so that it is
    /// sent in pieces.
    pub fn retain_as_lost(&mut self, frame: RetainedFrame<M>) {
        self.lost += 1;
        self.first_lost_at = self.first_lost_at.min(frame.start);
        self.retain(RetainedFrame { state: RetainedState::Lost, ..frame });
    }

    /// Forgets all retained frames, because nothing can be sent any more.
    pub fn clear(&mut self) {
        self.retained.clear();
        self.lost = 0;
        self.awaited_status = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: PathId = PathId(0);
    const B: PathId = PathId(1);

    #[test]
    fn what_a_broken_path_carried_goes_again_unless_it_has_arrived() {
        let mut out = sent(&[A, B, A, A]);
        out.handle_delivered(10, |_| ());
        out.handle_arrived(20, 30, |_| ());
        out.handle_break(A);
        assert_eq!(out.next_lost(100).map(|frame| frame.start), Some(30));
        out.mark_retransmitted(B, 0);
        assert!(!out.has_lost());
        out.handle_break(B);
        let again: Vec<u64> = std::iter::from_fn(|| {
            let start = out.next_lost(100)?.start;
            out.mark_retransmitted(A, 0);
            Some(start)
        })
        .collect();
        assert_eq!(again, [10, 30]);
        assert!(out.handle_delivered(40, |_| ()) && out.retained() == 0);
    }

    #[test]
    fn a_long_one_is_cut_for_the_path_that_takes_it() {
        let mut out = sent(&[A]);
        out.handle_corrupt(3, 4, |_| ());
        let mut pieces = Vec::new();
        while let Some(piece) = out.next_lost(4) {
            pieces.push((piece.start, piece.offset, piece.length, piece.whole));
            out.mark_retransmitted(B, 0);
        }
        assert_eq!(pieces, [(0, 0, 4, 10), (4, 4, 4, 10), (8, 8, 2, 10)]);
        out.handle_arrived(4, 8, |_| ());
        out.handle_break(B);
        assert_eq!(out.next_lost(100).map(|piece| piece.start), Some(0));
        assert!(out.handle_delivered(8, |_| ()) && out.has_lost());
    }

    #[test]
    fn the_next_frame_is_near_in_however_many_pieces() {
        let mut out = RetransmitBuffer::default();
        let whole = REORDER_WINDOW_FRAMES_MAX as u32 + 10;
        for start in [0, whole as u64] {
            let [mut frame] = [sent(&[A]).retained.remove(0).unwrap()];
            (frame.start, frame.length, frame.whole) = (start, whole, whole);
            out.retain(frame);
        }
        out.handle_break(A);
        let mut pieces = 0;
        while out.is_lost_in_window() && out.next_lost(1).is_some() {
            out.mark_retransmitted(B, 0);
            pieces += 1;
        }
        assert_eq!(pieces, whole, "all of the first, none of the second");
    }

    #[test]
    fn a_break_waits_for_the_answer_to_the_last_ask() {
        let mut out = sent(&[A]);
        out.request_status();
        out.mark_status_request_sent();
        out.request_status();
        assert_eq!(out.due_status_request(), Some(2));
        out.mark_status_request_sent();
        out.handle_status_reply(1);
        assert!(out.is_awaiting_status() && out.due_status_request().is_none());
        out.handle_status_reply(2);
        assert!(!out.is_awaiting_status());
    }

    #[test]
    fn nobody_is_asked_about_nothing() {
        let mut out = sent(&[A]);
        assert!(out.handle_delivered(10, |_| ()));
        out.request_status();
        assert!(!out.is_awaiting_status() && out.due_status_request().is_none());
    }

    fn sent(paths: &[PathId]) -> RetransmitBuffer<()> {
        let mut out = RetransmitBuffer::default();
        for (number, &path) in paths.iter().enumerate() {
            out.retain(RetainedFrame {
                start: number as u64 * 10,
                length: 10,
                offset: 0,
                whole: 10,
                // The frames have no head, so that byte numbers are those of the payload.
                kind: Kind::Ack,
                flags: 0,
                head: KindHeader::Empty,
                memory: None,
                at: 0,
                path,
                sent_at: Time(0),
                order: 0,
                was_corrupt: false,
                state: RetainedState::InFlight,
            });
        }
        out
    }

    use std::vec::Vec;
}
