//! Datagrams that wait to be sent, in one buffer, in the order in which they were pushed.
//!
//! The buffer consists of *runs*: datagrams to one destination, all of one size except the last,
//! which may be smaller. One system call can take one run. What may never happen: a run is longer
//! than the kernel takes; bytes of a run move.

use std::collections::VecDeque;
use std::net::SocketAddr;

use super::super::stream::Piece;
use super::DATAGRAM_BYTES_MAX;
use crate::checksum::Checksum;

/// The most bytes of one run: the kernel makes one packet of a run before it cuts the run.
const RUN_BYTES_MAX: usize = DATAGRAM_BYTES_MAX;
/// The most datagrams of one run, on every kernel.
const RUN_DATAGRAMS_MAX: usize = 64;
/// The size of the buffer in bytes: several runs, enough to go on gathering while the kernel has no
/// space.
const BUFFER_BYTES: usize = 256 << 10;
/// The most runs: they are small when datagrams differ in size or destination, so their number
/// needs a bound too.
const RUNS_MAX: usize = 256;
/// The bytes of a payload's checksum, between front and payload.
const SUM_BYTES: usize = 4;

/// The datagrams of `size` bytes in a full run.
pub(super) fn run_datagrams_max(size: usize) -> usize {
    (RUN_BYTES_MAX / size.max(1)).clamp(1, RUN_DATAGRAMS_MAX)
}

/// The datagrams that wait to be sent: see the module documentation.
pub(super) struct Batch {
    buffer: Box<[u8]>,
    filled: usize,
    runs: VecDeque<Run>,
    /// The destination of the next datagrams, and their largest size.
    to: Option<SocketAddr>,
    size_max: usize,
}

/// The datagrams at `start..end`, each of `size` bytes, except that the last may be smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) to: SocketAddr,
    pub(super) size: usize,
    start: usize,
    end: usize,
}

impl Run {
    pub(super) fn len(&self) -> usize {
        self.end - self.start
    }

    fn takes(&self, to: SocketAddr, size: usize) -> bool {
        let len = self.len();
        let is_even = len.is_multiple_of(self.size);
        let has_room = len + size <= RUN_BYTES_MAX && len / self.size < RUN_DATAGRAMS_MAX;
        is_even && has_room && size <= self.size && to == self.to
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self {
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            filled: 0,
            runs: VecDeque::with_capacity(RUNS_MAX),
            to: None,
            size_max: 0,
        }
    }
}

impl Batch {
    /// Sets the destination and the largest size of the next datagrams. Returns false if there is
    /// no space for one.
    pub(super) fn begin(&mut self, to: SocketAddr, size_max: usize) -> bool {
        self.to = Some(to);
        self.size_max = size_max;
        self.filled + size_max <= self.buffer.len() && self.runs.len() < RUNS_MAX
    }

    /// Adds a datagram. Returns false if there is no space.
    ///
    /// # Safety
    /// The payload's memory is valid.
    #[inline]
    pub(super) unsafe fn push(&mut self, sum: Checksum, front: &[u8], payload: &[Piece]) -> bool {
        let to = self.to.expect("begin() names the destination first");
        let sum_bytes = if sum == Checksum::Off { 0 } else { SUM_BYTES };
        let payload_bytes = payload.iter().map(|piece| piece.len).sum::<usize>();
        let size = front.len() + sum_bytes + payload_bytes;
        assert!(size > 0 && size <= self.size_max, "a datagram of {size} bytes was not announced");
        if self.filled + size > self.buffer.len() || !self.make_room(to, size) {
            return false;
        }
        let place = &mut self.buffer[self.filled..self.filled + size];
        let (front_place, rest) = place.split_at_mut(front.len());
        let (sum_place, payload_place) = rest.split_at_mut(sum_bytes);
        front_place.copy_from_slice(front);
        let mut running = sum.start();
        let mut at = 0;
        for piece in payload {
            let to = payload_place[at..at + piece.len].as_mut_ptr();
            // SAFETY: the caller's promise; the destination belongs to this buffer, and is as long
            // as the piece.
            unsafe { running.copy_raw(piece.base, to, piece.len) };
            at += piece.len;
        }
        sum_place.copy_from_slice(&running.value().to_le_bytes()[..sum_bytes]);
        self.filled += size;
        true
    }

    /// Extends the last run, or starts another one, by `size` bytes.
    #[inline]
    fn make_room(&mut self, to: SocketAddr, size: usize) -> bool {
        let end = self.filled + size;
        if let Some(run) = self.runs.back_mut().filter(|run| run.takes(to, size)) {
            run.end = end;
            return true;
        }
        if self.runs.len() == RUNS_MAX {
            return false;
        }
        self.runs.push_back(Run { to, size, start: self.filled, end });
        true
    }

    /// The run that must be sent next.
    #[inline]
    pub(super) fn first(&self) -> Option<Run> {
        self.runs.front().copied()
    }

    /// The first `bytes` bytes of the first run.
    #[inline]
    pub(super) fn bytes(&self, run: &Run, bytes: usize) -> &[u8] {
        &self.buffer[run.start..run.start + bytes]
    }

    /// Removes the first `bytes` bytes of the first run.
    #[inline]
    pub(super) fn advance(&mut self, bytes: usize) {
        let Some(run) = self.runs.front_mut() else {
            return;
        };
        run.start += bytes;
        if run.start >= run.end {
            self.runs.pop_front();
        }
        if self.runs.is_empty() {
            self.filled = 0;
        }
    }
}
