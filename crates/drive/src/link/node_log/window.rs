//! Memory of the agent's file in this process, at addresses that stay the same for its life.
//!
//! What enters: parts of the file. What leaves: words and bytes of them. What may never happen: the
//! addresses of the program depend on when the file is mapped.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use landbridge_proto::log::layout::{DELIVERIES_BYTES, HUGE_PAGE, LOG_BYTES, deliveries_at};

/// Pages of a part that are prepared at once at least, in bytes.
const PREPARED_BYTES: usize = 1 << 20;

/// Addresses for the logs of one process, reserved for the life of the process. In this order: the
/// head of the file, the process's deliveries, its logs to each process, its logs
/// from each, and again its logs from each, to append what arrives from other nodes.
#[derive(Clone, Copy)]
pub(super) struct Window {
    start: NonNull<u8>,
    processes: usize,
}

// SAFETY: the addresses are reserved for good, and what is mapped there has one owner.
unsafe impl Send for Window {}

impl Window {
    /// Reserves addresses on a node of this many processes.
    ///
    /// # Errors
    /// The process may not have so much address space.
    pub fn reserve(processes: usize) -> io::Result<Window> {
        let bytes = head_bytes(processes) + DELIVERIES_BYTES + 3 * processes * LOG_BYTES;
        // SAFETY: a new mapping replaces no memory.
        let reserved = unsafe { map_nothing(None, bytes + HUGE_PAGE)? };
        // SAFETY: fewer bytes than the reservation has beyond the parts.
        let start = unsafe { reserved.add(reserved.align_offset(HUGE_PAGE)) };
        Ok(Window { start, processes })
    }

    /// The words that the agent uses as well.
    pub fn head(self, file: BorrowedFd<'_>) -> io::Result<Mapped> {
        self.map(file, 0, 0, head_bytes(self.processes))
    }

    pub fn deliveries(self, file: BorrowedFd<'_>, process: usize) -> io::Result<Mapped> {
        let at = deliveries_at(self.processes, process);
        self.map(file, at, head_bytes(self.processes), DELIVERIES_BYTES)
    }

    /// Log number `place` of this process (in the order above), which lies at `at` in the file.
    /// `has_huge_pages`: the file can have pages of 2 MiB.
    pub fn log(
        self,
        file: BorrowedFd<'_>,
        has_huge_pages: bool,
        place: usize,
        at: u64,
    ) -> io::Result<Mapped> {
        let logs = head_bytes(self.processes) + DELIVERIES_BYTES;
        let mut log = self.map(file, at, logs + place * LOG_BYTES, LOG_BYTES)?;
        if has_huge_pages {
            log.expect_huge_pages();
        }
        Ok(log)
    }

    fn map(self, file: BorrowedFd<'_>, at: u64, place: usize, bytes: usize) -> io::Result<Mapped> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: the addresses lie in the window, and each part has its own.
        let memory = unsafe {
            let place = self.start.add(place).as_ptr().cast();
            libc::mmap(place, bytes, protection, flags, file.as_raw_fd(), at as libc::off_t)
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let memory = NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapped { memory, bytes, prepared: 0, has_huge_pages: false })
    }
}

/// Bytes of the file's head: all parts that are not one process's alone.
fn head_bytes(processes: usize) -> usize {
    deliveries_at(processes, 0) as usize
}

/// Reserves addresses without memory, at `place` if there is one.
///
/// # Safety
/// Nothing uses what is mapped there.
unsafe fn map_nothing(place: Option<NonNull<u8>>, bytes: usize) -> io::Result<NonNull<u8>> {
    let fixed = if place.is_some() { libc::MAP_FIXED } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    let place = place.map_or(std::ptr::null_mut(), NonNull::as_ptr);
    // SAFETY: the caller guarantees that nothing uses the addresses.
    let memory = unsafe { libc::mmap(place.cast(), bytes, libc::PROT_NONE, flags, -1, 0) };
    match memory == libc::MAP_FAILED {
        true => Err(io::Error::last_os_error()),
        false => NonNull::new(memory.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into()),
    }
}

/// A part of the file in the memory of this process.
pub(super) struct Mapped {
    memory: NonNull<u8>,
    bytes: usize,
    /// The pages before this position are prepared.
    prepared: usize,
    /// From the second huge page on, pages are as large.
    has_huge_pages: bool,
}

// SAFETY: the pointers lead to memory shared by design; all access goes through `&mut self`.
unsafe impl Send for Mapped {}

impl Mapped {
    /// Asks for huge pages behind the place of the first one. There the first store makes the
    /// kernel prepare 2 MiB, which takes a tenth of the time of as many small pages; to have them
    /// prepared before takes longer.
    fn expect_huge_pages(&mut self) {
        // SAFETY: a part of this mapping.
        let advised = unsafe {
            let place = self.memory.add(HUGE_PAGE).as_ptr().cast();
            libc::madvise(place, self.bytes - HUGE_PAGE, libc::MADV_HUGEPAGE)
        };
        self.has_huge_pages = advised == 0;
    }

    /// Lets the kernel map the pages before `end`, and more behind them, many at once: each page
    /// that is first touched by a store costs more.
    #[inline]
    pub fn prepare(&mut self, end: usize) {
        let end = if self.has_huge_pages { end.min(HUGE_PAGE) } else { end };
        if end > self.prepared {
            self.prepare_more(end);
        }
    }

    #[cold]
    fn prepare_more(&mut self, end: usize) {
        let bytes = (end - self.prepared).min(self.bytes - self.prepared);
        // SAFETY: a part of this mapping. If the kernel cannot prepare it, stores map each page.
        unsafe {
            let place = self.memory.add(self.prepared).as_ptr().cast();
            libc::madvise(place, bytes, libc::MADV_POPULATE_WRITE);
        }
        self.prepared += bytes;
    }

    /// As [`Self::prepare`], in steps of a part that is written from its start to its end.
    #[inline]
    pub fn prepare_ahead(&mut self, end: usize) {
        if end > self.prepared {
            self.prepare_more(end + PREPARED_BYTES);
        }
    }

    #[inline]
    pub fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.bytes);
        // SAFETY: an aligned word inside the mapping.
        unsafe { self.memory.add(at).cast::<AtomicU64>().as_ref() }
    }

    /// The position of the release at `at`, or `known` while the agent is writing it.
    pub fn release(&self, at: usize, known: u64) -> u64 {
        let second = self.word(at + 8).load(Ordering::Acquire);
        let first = self.word(at).load(Ordering::Acquire);
        if first == second { first } else { known }
    }

    /// Bytes that were announced, which nobody changes as long as they may be read.
    #[inline]
    pub fn announced(&self, at: usize, bytes: usize) -> &[u8] {
        assert!(at + bytes <= self.bytes);
        // SAFETY: inside the mapping, and unchanged from their announcement on.
        unsafe { std::slice::from_raw_parts(self.memory.add(at).as_ptr(), bytes) }
    }

    /// Writes bytes that no one reads before they are announced.
    #[inline]
    pub fn write<'a>(&mut self, at: usize, pieces: impl Iterator<Item = &'a [u8]>) {
        let mut at = at;
        for piece in pieces {
            assert!(at + piece.len() <= self.bytes);
            // SAFETY: inside the mapping; only this process writes there, and nobody reads yet.
            unsafe {
                self.memory
                    .add(at)
                    .copy_from_nonoverlapping(NonNull::from(piece).cast(), piece.len());
            }
            at += piece.len();
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this object is the only user of the mapping. The addresses stay reserved.
        let _ = unsafe { map_nothing(Some(self.memory), self.bytes) };
    }
}
