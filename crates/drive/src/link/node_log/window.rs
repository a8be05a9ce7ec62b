//! Memory of the agent's file in this process, at addresses that stay the same for its life.
//!
//! What enters: parts of the file. What leaves: words and bytes of them. What may never happen: the
//! addresses of the program depend on when the file is mapped.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use landbridge_proto::log::layout::{
    DELIVERIES_BYTES, FILE_BYTES, HEAD_BYTES, HUGE_PAGE, HUGE_PAGES_AT, LOG_BYTES,
    LOGGED_PROCESSES_MAX, REGION_BYTES, deliveries_at, log_at,
};

/// Pages of a part that are prepared at once, in bytes: as many as are used, within these bounds.
const PREPARED_BYTES_MIN: usize = 32 << 10;
const PREPARED_BYTES_MAX: usize = 1 << 20;
/// Bytes of a page.
const PAGE_BYTES: usize = 4096;
/// Descriptors from here on do not change the numbers that the program sees.
const LOWEST_FD: i32 = 512;
/// Position of the deliveries in the window, and of the logs.
const DELIVERIES_PLACE: usize = HEAD_BYTES;
const LOGS_PLACE: usize = HEAD_BYTES + DELIVERIES_BYTES;

/// The addresses of a window that is closed. Nothing holds them meanwhile: CRIU looks at every page
/// of what is reserved.
#[derive(Clone, Copy)]
pub(super) struct WindowAddress {
    start: NonNull<u8>,
    logs: usize,
}

// SAFETY: an address; what lies there is used through an open window.
unsafe impl Send for WindowAddress {}

impl WindowAddress {
    fn bytes(self) -> usize {
        LOGS_PLACE + self.logs * REGION_BYTES
    }

    /// Takes the addresses again, before anybody else does.
    ///
    /// # Errors
    /// Something lies there.
    pub fn take(self) -> io::Result<()> {
        let taken = map_nothing(Some(self.start), self.bytes());
        taken.map(drop).map_err(|error| no_addresses(self, error))
    }
}

/// The agent's files with the logs of a node.
#[derive(Clone, Copy)]
pub struct LogFiles<'a> {
    /// In memory.
    pub memory: BorrowedFd<'a>,
    /// On disk, where logs go on when memory is full, if they may.
    pub disk: Option<BorrowedFd<'a>>,
}

impl<'a> LogFiles<'a> {
    /// The files among these: that in memory, which its length tells, and what follows it.
    ///
    /// # Errors
    /// None of them is the one in memory.
    pub fn find(files: &'a [OwnedFd]) -> io::Result<LogFiles<'a>> {
        let is_memory = |file: &OwnedFd| {
            rustix::fs::fstat(file).is_ok_and(|about| about.st_size as u64 == FILE_BYTES)
        };
        let place = files.iter().position(is_memory).ok_or_else(foreign)?;
        let disk = files.get(place + 1).map(AsFd::as_fd);
        Ok(LogFiles { memory: files[place].as_fd(), disk })
    }
}

impl<'a> From<BorrowedFd<'a>> for LogFiles<'a> {
    fn from(memory: BorrowedFd<'a>) -> LogFiles<'a> {
        LogFiles { memory, disk: None }
    }
}

/// The agent's files in this process, at addresses that are the same for the life of the process.
/// In this order: the head of the file, the process's deliveries, and logs in the order in which
/// they are opened.
pub(super) struct Window {
    address: WindowAddress,
    file: OwnedFd,
    /// The disk file, and the number of its parts.
    disk: Option<(Arc<OwnedFd>, u64)>,
    has_huge_pages: bool,
    /// Logs that are mapped.
    opened: usize,
}

impl Window {
    /// Opens the agent's files for so many logs.
    ///
    /// # Errors
    /// The file is another one, or the process may not have so many addresses.
    pub fn new(files: LogFiles<'_>, logs: usize) -> io::Result<Window> {
        let mut address = WindowAddress { start: NonNull::dangling(), logs };
        address.start =
            map_aligned(address.bytes()).map_err(|error| no_addresses(address, error))?;
        Window::at(address, files)
    }

    /// Opens the agent's files at addresses that are taken.
    ///
    /// # Errors
    /// The file is another one.
    pub fn at(address: WindowAddress, files: LogFiles<'_>) -> io::Result<Window> {
        let LogFiles { memory, disk } = files;
        if rustix::fs::fstat(memory)?.st_size as u64 != FILE_BYTES {
            return Err(foreign());
        }
        let file = out_of_the_way(memory)?;
        let disk = disk.map(|disk| -> io::Result<(Arc<OwnedFd>, u64)> {
            let parts = rustix::fs::fstat(disk)?.st_size as u64 / LOG_BYTES as u64;
            Ok((Arc::new(out_of_the_way(disk)?), parts))
        });
        let disk = disk.transpose()?;
        Ok(Window { address, file, disk, has_huge_pages: false, opened: 0 })
    }

    /// Where the window is opened again.
    pub fn address(&self) -> WindowAddress {
        self.address
    }

    /// The words that the agent uses as well.
    pub fn head(&mut self) -> io::Result<Mapped> {
        let head = self.map(&self.file, (0, HEAD_BYTES), 0)?;
        self.has_huge_pages = head.word(HUGE_PAGES_AT as usize).load(Ordering::Relaxed) != 0;
        Ok(head)
    }

    pub fn deliveries(&self, process: usize) -> io::Result<Mapped> {
        self.map(&self.file, (deliveries_at(process), DELIVERIES_BYTES), DELIVERIES_PLACE)
    }

    /// The part of a log in memory, until the next log is opened or looked at.
    pub fn look_at(&self, (from, to): (usize, usize)) -> io::Result<Mapped> {
        let place = self.opened.min(self.address.logs.saturating_sub(1));
        let part = (log_at(from, to), LOG_BYTES);
        self.map(&self.file, part, LOGS_PLACE + place * REGION_BYTES)
    }

    /// The part of the log of one process to another that lies in memory.
    ///
    /// # Errors
    /// More logs are open than there are addresses for, or memory is short.
    pub fn log(&mut self, (from, to): (usize, usize)) -> io::Result<Mapped> {
        if self.opened == self.address.logs {
            return Err(io::Error::other("it exchanges messages with too many processes"));
        }
        let place = LOGS_PLACE + self.opened * REGION_BYTES;
        let mut log = self.map(&self.file, (log_at(from, to), LOG_BYTES), place)?;
        self.opened += 1;
        if self.has_huge_pages {
            log.expect_huge_pages();
        }
        Ok(log)
    }

    /// The disk file, and the number of its parts.
    pub fn disk(&self) -> Option<(&Arc<OwnedFd>, u64)> {
        self.disk.as_ref().map(|(file, parts)| (file, *parts))
    }

    /// Maps the part of the disk file that begins at `start` behind the log that was opened last.
    pub fn map_disk(&self, log: &mut Mapped, file: &OwnedFd, start: u64) -> io::Result<()> {
        let place = LOGS_PLACE + (self.opened - 1) * REGION_BYTES + LOG_BYTES;
        self.map(file, (start, LOG_BYTES), place)?;
        log.bytes = REGION_BYTES;
        Ok(())
    }

    /// Maps a part of a file, given by its position and its bytes.
    fn map(&self, file: &OwnedFd, (at, bytes): (u64, usize), place: usize) -> io::Result<Mapped> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: the addresses lie in the window, and each part has its own.
        let memory = unsafe {
            let place = self.address.start.add(place).as_ptr().cast();
            let file = file.as_raw_fd();
            libc::mmap(place, bytes, protection, flags, file, at as libc::off_t)
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A core file would have all of the region, and touch what was never written.
        // SAFETY: the mapping was made above.
        unsafe { libc::madvise(memory, bytes, libc::MADV_DONTDUMP) };
        let memory = NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapped { memory, bytes, prepared: 0, has_huge_pages: false })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the parts live no longer than the window, which nobody uses any more.
        unsafe { libc::munmap(self.address.start.as_ptr().cast(), self.address.bytes()) };
    }
}

/// A descriptor of the same file that does not change the numbers that the program sees.
fn out_of_the_way(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let found = rustix::io::fcntl_dupfd_cloexec(file, LOWEST_FD);
    Ok(found.or_else(|_| rustix::io::fcntl_dupfd_cloexec(file, 0))?)
}

/// Takes addresses that begin at a huge page.
fn map_aligned(bytes: usize) -> io::Result<NonNull<u8>> {
    let found = map_nothing(None, bytes + HUGE_PAGE)?;
    let before = found.align_offset(HUGE_PAGE);
    // SAFETY: the mapping was made above: what lies before the window and behind it is not used.
    unsafe {
        let start = found.add(before);
        libc::munmap(start.add(bytes).as_ptr().cast(), HUGE_PAGE - before);
        if before > 0 {
            libc::munmap(found.as_ptr().cast(), before);
        }
        Ok(start)
    }
}

/// Takes addresses without memory: these, if they are given and free.
fn map_nothing(place: Option<NonNull<u8>>, bytes: usize) -> io::Result<NonNull<u8>> {
    let fixed = if place.is_some() { libc::MAP_FIXED_NOREPLACE } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    let wanted = place.map_or(std::ptr::null_mut(), NonNull::as_ptr);
    // SAFETY: a new mapping replaces no other one.
    let memory = unsafe { libc::mmap(wanted.cast(), bytes, libc::PROT_NONE, flags, -1, 0) };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // A kernel before 4.17 does not know the flag, and chooses others.
    if place.is_some() && memory != wanted.cast() {
        // SAFETY: the mapping was made above, and nobody uses it.
        unsafe { libc::munmap(memory, bytes) };
        return Err(io::ErrorKind::AddrInUse.into());
    }
    NonNull::new(memory.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

pub(super) fn foreign() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "not the logs of this node")
}

fn no_addresses(address: WindowAddress, error: io::Error) -> io::Error {
    let text = format!(
        "there are no {} GiB of addresses for logs ({error}): raise the limit (ulimit -v), or use \
         recover_log=relay",
        address.bytes().div_ceil(1 << 30)
    );
    io::Error::new(error.kind(), text)
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

    /// Lets the kernel map the pages from `start` to `end`, many at once, if none so far behind was
    /// mapped that way: each page that is first touched by a store costs more.
    #[inline]
    pub fn prepare(&mut self, start: usize, end: usize) {
        let end = if self.has_huge_pages { end.min(HUGE_PAGE) } else { end };
        if end > start && end > self.prepared {
            self.prepared = self.prepared.max(start);
            self.prepare_more(end);
        }
    }

    #[cold]
    fn prepare_more(&mut self, end: usize) {
        let end = end.next_multiple_of(PAGE_BYTES);
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
            self.prepare_more(end + end.clamp(PREPARED_BYTES_MIN, PREPARED_BYTES_MAX));
        }
    }

    /// Lets the kernel map the pages of a part that is on disk.
    #[cold]
    pub fn prepare_on_disk(&mut self, start: usize, end: usize) {
        assert!(start <= end && end <= self.bytes);
        // SAFETY: a part of this mapping. If the kernel cannot prepare it, stores map each page.
        unsafe {
            let place = self.memory.add(start).as_ptr().cast();
            libc::madvise(place, end - start, libc::MADV_POPULATE_WRITE);
        }
    }

    /// Gives back the memory of whole pages, which nobody reads any more.
    pub fn give_back(&mut self, start: usize, end: usize) {
        assert!(start <= end && end <= self.bytes);
        // SAFETY: a part of this mapping. If the kernel refuses, the memory stays.
        unsafe {
            let place = self.memory.add(start).as_ptr().cast();
            libc::madvise(place, end - start, libc::MADV_REMOVE);
        }
    }

    /// What lies before this position is not prepared.
    pub fn begin_preparing(&mut self, at: usize) {
        self.prepared = at.min(LOG_BYTES) / PAGE_BYTES * PAGE_BYTES;
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

    /// Adds a process to the set at `at`.
    pub fn add_to_set(&self, at: usize, process: usize) {
        self.word(at + process / 64 * 8).fetch_or(1 << (process % 64), Ordering::AcqRel);
    }

    /// The processes of the set at `at`.
    pub fn set(&self, at: usize) -> Vec<usize> {
        let has = |process: &usize| {
            self.word(at + process / 64 * 8).load(Ordering::Acquire) >> (process % 64) & 1 == 1
        };
        (0..LOGGED_PROCESSES_MAX).filter(has).collect()
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
