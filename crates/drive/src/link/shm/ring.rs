//! The two ends of a ring of frames, apart from the memory in which the ring lies.
//!
//! In: frames to be announced, frames that have been read, sides that are about to sleep. Out:
//! offsets of frames, and whether the other side's doorbell must be rung. `tests/ring_model.rs`
//! checks every interleaving of two ends in a small memory.
//!
//! What may never happen: a frame is seen before it is whole; a writer overtakes the reader; a side
//! sleeps while a frame or space waits for it; a word that the other side could have written is
//! used before it was checked.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use landbridge_proto::wire::frame::HEADER_BYTES;

/// Frames start at multiples of this many bytes: a cache line.
pub const SLOT: usize = 64;

/// The first word at the offset where a ring wraps before its end.
const WRAP: u64 = u64::MAX;

/// A word that both sides access.
pub trait SharedWord {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn swap(&self, value: u64, order: Ordering) -> u64;
}

/// The memory of one ring: its bytes, and its control words.
pub trait RingMemory {
    type Word: SharedWord;
    type Flag: SharedWord;

    /// Size of the ring in bytes: a power of two.
    const RING_BYTES: usize;
    /// Longest frame in bytes, header included: a multiple of [`SLOT`].
    const FRAME_BYTES_MAX: usize;
    /// A writer that finds the ring empty wraps after this many bytes.
    const SHORT_LAP_BYTES: usize;
    /// A reader looks for a writer that waits for space each time that it has freed this many
    /// bytes.
    const ROOM_BYTES: usize;

    /// The word at this offset, a multiple of 8 within the ring.
    fn word(&self, at: usize) -> &Self::Word;
    /// Bytes that the reader has freed so far.
    fn freed(&self) -> &Self::Word;
    /// Not 0: the reader sleeps, or is about to.
    fn parked(&self) -> &Self::Flag;
    /// Not 0: the writer found the ring full and sleeps, or is about to.
    fn wants_room(&self) -> &Self::Flag;
    /// A sequentially consistent fence.
    fn fence(&self);
}

/// The other side has written an impossible value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingFault {
    /// The other side announces a frame longer than the ring takes.
    FrameTooLong,
    /// The other side claims to have read what was never written.
    FreedTooMuch,
}

/// The end of a ring that writes.
pub struct RingWriter<M> {
    pub memory: M,
    /// Bytes ever written and, as far as known, freed by the other side.
    written: u64,
    freed: u64,
    /// Bytes that the last frame without space needed; 0 if there was space.
    needed_bytes: usize,
    is_broken: bool,
}

impl<M: RingMemory> RingWriter<M> {
    pub fn new(memory: M) -> Self {
        RingWriter { memory, written: 0, freed: 0, needed_bytes: 0, is_broken: false }
    }

    /// Bytes ever written.
    #[inline]
    pub fn written(&self) -> u64 {
        self.written
    }

    /// The offset for a frame of `span` bytes, a multiple of [`SLOT`], if the ring has space for
    /// the frame and the zero slot behind it.
    #[inline]
    pub fn reserve(&mut self, span: usize) -> Option<usize> {
        let at = self.written as usize & (M::RING_BYTES - 1);
        let to_end = M::RING_BYTES - at;
        // An early wrap needs a frame that fits before `at`: the reader will never free more than
        // the whole ring.
        let is_early = at >= M::SHORT_LAP_BYTES.max(span + SLOT);
        let starts_over = span > to_end || (is_early && self.is_all_read());
        let skip = if starts_over { to_end } else { 0 };
        let needed = skip + span + SLOT;
        if !self.has_room(needed) {
            self.needed_bytes = needed;
            return None;
        }
        self.needed_bytes = 0;
        if skip == 0 {
            return Some(at);
        }
        // The rest of the ring and its first slot are free, as the check above found.
        self.memory.word(0).store(0, Ordering::Relaxed);
        self.memory.word(at).store(WRAP, Ordering::Release);
        self.written += skip as u64;
        Some(0)
    }

    /// Announces the frame of `span` bytes at an offset from [`Self::reserve`], whose bytes after
    /// the first eight are in place. `announcement` is its first word, which is not 0.
    #[inline]
    pub fn announce(&mut self, at: usize, span: usize, announcement: u64) {
        let next = (at + span) & (M::RING_BYTES - 1);
        self.memory.word(next).store(0, Ordering::Relaxed);
        self.memory.word(at).store(announcement, Ordering::Release);
        self.written += span as u64;
    }

    /// Whether the reader sleeps: its doorbell must be rung.
    #[inline]
    pub fn must_wake_reader(&self) -> bool {
        must_ring(&self.memory, self.memory.parked())
    }

    /// The fault of the other side, if one is known.
    #[inline]
    pub fn fault(&self) -> Option<RingFault> {
        self.is_broken.then_some(RingFault::FreedTooMuch)
    }

    /// Whether the reader has freed everything.
    #[inline]
    fn is_all_read(&mut self) -> bool {
        self.refresh_freed();
        self.freed == self.written
    }

    #[inline]
    fn has_room(&mut self, bytes: usize) -> bool {
        if self.unread() + bytes <= M::RING_BYTES {
            return true;
        }
        self.refresh_freed();
        self.unread() + bytes <= M::RING_BYTES && !self.is_broken
    }

    /// The bytes in the ring: at most its size, since `freed` has been checked.
    #[inline]
    fn unread(&self) -> usize {
        (self.written - self.freed) as usize
    }

    /// Reads what the reader has freed: never less than before, never more than was written. Any
    /// other value marks the ring broken.
    #[inline]
    fn refresh_freed(&mut self) {
        let freed = self.memory.freed().load(Ordering::Acquire);
        if (self.freed..=self.written).contains(&freed) {
            self.freed = freed;
        } else {
            self.is_broken = true;
        }
    }
}

/// The end of a ring that reads.
pub struct RingReader<M> {
    pub memory: M,
    /// Bytes ever read, and their number when this side last looked for a waiting writer.
    read: u64,
    room_reported: u64,
    /// Size of the frame that [`Self::peek`] returned.
    shown: usize,
}

impl<M: RingMemory> RingReader<M> {
    pub fn new(memory: M) -> Self {
        RingReader { memory, read: 0, room_reported: 0, shown: 0 }
    }

    /// Offset and size in bytes of the next frame, whole and contiguous, if one has arrived. The
    /// frame stays until [`Self::consume`].
    ///
    /// # Errors
    /// If the other side announces an impossible frame.
    #[inline]
    pub fn peek(&mut self) -> Result<Option<(usize, usize)>, RingFault> {
        let mut at = self.read as usize & (M::RING_BYTES - 1);
        let mut first = self.memory.word(at).load(Ordering::Acquire);
        if first == WRAP {
            self.read += (M::RING_BYTES - at) as u64;
            at = 0;
            first = self.memory.word(0).load(Ordering::Acquire);
        }
        if first == 0 {
            return Ok(None);
        }
        let size = HEADER_BYTES + (first as u32) as usize;
        if size > M::FRAME_BYTES_MAX || at + size > M::RING_BYTES {
            return Err(RingFault::FrameTooLong);
        }
        self.shown = size;
        Ok(Some((at, size)))
    }

    /// Returns the space of the frame that [`Self::peek`] returned to the writer. True: the writer
    /// sleeps until there is space, and its doorbell must be rung.
    #[inline]
    pub fn consume(&mut self) -> bool {
        self.read += self.shown.next_multiple_of(SLOT) as u64;
        self.shown = 0;
        self.memory.freed().store(self.read, Ordering::Release);
        self.read - self.room_reported >= M::ROOM_BYTES as u64 && self.must_wake_writer()
    }

    #[cold]
    fn must_wake_writer(&mut self) -> bool {
        self.room_reported = self.read;
        must_ring(&self.memory, self.memory.wants_room())
    }
}

/// Whether the other side sleeps, as one of its flags says, and has not been woken yet.
#[inline]
fn must_ring<M: RingMemory>(memory: &M, sleeps: &M::Flag) -> bool {
    // The fence pairs with the fence in `prepare_wait_for_room`: either this side sees that the
    // other one sleeps, or the other side sees what this side did.
    memory.fence();
    sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::Relaxed) != 0
}

/// Announces that this side will sleep until a frame arrives, or until there is space for the frame
/// that found none. Returns false if this has happened already: the caller must not sleep.
pub fn prepare_park<M: RingMemory>(into: &mut RingReader<M>, out: &mut RingWriter<M>) -> bool {
    into.memory.parked().store(1, Ordering::Relaxed);
    let may_sleep = prepare_wait_for_room(into, out)
        && out.fault().is_none()
        && matches!(into.peek(), Ok(None));
    if !may_sleep {
        unpark(into, out);
    }
    may_sleep
}

/// Announces that this side will sleep until there is space for the frame that found none, for a
/// side that reads no frames for now. Returns false if there is space already: the caller must not
/// sleep.
pub fn prepare_wait_for_room<M: RingMemory>(
    into: &mut RingReader<M>,
    out: &mut RingWriter<M>,
) -> bool {
    if out.needed_bytes > 0 {
        out.memory.wants_room().store(1, Ordering::Relaxed);
    }
    // The fence pairs with the fence in `must_ring`.
    out.memory.fence();
    if out.needed_bytes > 0 && out.has_room(out.needed_bytes) {
        // The space is reported once: the frame may not be wanted any more.
        out.needed_bytes = 0;
        unpark(into, out);
        return false;
    }
    true
}

/// Records that this side is awake.
pub fn unpark<M: RingMemory>(into: &mut RingReader<M>, out: &mut RingWriter<M>) {
    into.memory.parked().store(0, Ordering::Relaxed);
    if out.memory.wants_room().load(Ordering::Relaxed) != 0 {
        out.memory.wants_room().store(0, Ordering::Relaxed);
    }
}

impl SharedWord for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        AtomicU64::load(self, order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        AtomicU64::store(self, value, order);
    }

    #[inline]
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        AtomicU64::swap(self, value, order)
    }
}

impl SharedWord for AtomicU32 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        AtomicU32::load(self, order).into()
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        AtomicU32::store(self, value as u32, order);
    }

    #[inline]
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        AtomicU32::swap(self, value as u32, order).into()
    }
}
