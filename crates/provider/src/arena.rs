//! All memory of the provider: one range of addresses, reserved when the library is loaded.
//!
//! A replayed rank must see the same addresses, and network events must not change them. So no
//! memory of the provider comes from the program's heap or from a new mapping in its address space:
//! the first half of the range is the provider's heap, the second half holds shared mappings
//! (rings). Pages become usable in steps inside the range, which changes no address of the program.
//!
//! ```text
//! |<------------------- heap ------------------>|<------------- shared mappings ------------->|
//! | usable so far | reserved, no access         | slot | slot | reserved, no access           |
//! ```

use std::alloc::{GlobalAlloc, Layout};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use talc::TalcLock;
use talc::base::Talc;
use talc::base::binning::Binning;
use talc::lock_api;
use talc::source::Source;

use crate::abi::Errno;
use crate::sync::RawSpinLock;

/// Sizes tried for the whole range, largest first. Address space costs nothing; under a limit
/// (`ulimit -v`) a smaller size leaves address space for the rest of the process.
const RESERVATION_SIZES: [usize; 6] = [64 << 30, 16 << 30, 4 << 30, 1 << 30, 256 << 20, 64 << 20];
/// The provider reserves at most this part of a limited address space: libraries and the program
/// need the rest.
const LIMIT_SHARE: usize = 4;
/// The heap grows by at least this number of bytes: few system calls, little unused memory.
const GROWTH: usize = 4 << 20;
/// Pages of a freed block of at least this size are returned to the system at once.
const GIVE_BACK: usize = 4 << 20;
/// The page size of every supported machine divides this size.
const PAGE: usize = 64 << 10;

#[global_allocator]
static HEAP: Heap = Heap(TalcLock::new(Grow { end: None }));

/// Reserves the range. The library calls this when it is loaded, so that the address depends on
/// nothing that happens later; an earlier allocation reserves the range in the same way.
pub fn reserve() {
    reservation();
}

/// Maps the first `len` bytes of a file, shared and writable, into the range.
pub fn map_fd(fd: BorrowedFd<'_>, len: usize) -> Result<NonNull<u8>, Errno> {
    let place = SLOTS.lock().take(len)?;
    // SAFETY: the addresses lie inside the reservation and belong to this slot alone.
    let mapped = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        libc::mmap(
            ptr::with_exposed_provenance_mut(place),
            len,
            protection,
            flags,
            fd.as_raw_fd(),
            0,
        )
    };
    if mapped == libc::MAP_FAILED {
        let errno = Errno::last();
        SLOTS.lock().release(place);
        return Err(errno);
    }
    NonNull::new(mapped.cast()).ok_or(Errno::ENOMEM)
}

/// Replaces a mapping of `map_fd` by the first bytes of `file`, shared and writable, or by private
/// memory of this process without a file. False: no memory is available, and nothing has changed.
///
/// # Safety
/// `start` was returned by `map_fd` for this length, and was not unmapped since; no code needs the
/// old content.
pub unsafe fn replace(start: NonNull<u8>, len: usize, file: Option<BorrowedFd<'_>>) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let (flags, fd) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
    };
    let place = start.as_ptr().cast();
    // SAFETY: the caller guarantees that the addresses belong to this slot alone.
    unsafe { libc::mmap(place, len, protection, flags | libc::MAP_FIXED, fd, 0) == place }
}

/// Ends a mapping made by `map_fd`. The addresses stay reserved.
///
/// # Safety
/// `start` was returned by `map_fd`, was not unmapped since, and no reference to the mapping is
/// left.
pub unsafe fn unmap(start: NonNull<u8>) {
    let place = start.as_ptr().expose_provenance();
    let Some(len) = SLOTS.lock().len_of(place) else { return };
    // SAFETY: the range is exactly the slot, which the caller does not use any more.
    unsafe { map_nothing(place, len) };
    SLOTS.lock().release(place);
}

/// Whether an address lies in the provider's range.
#[cfg(test)]
fn contains(address: *const u8) -> bool {
    let Reservation { start, len, .. } = *reservation();
    (start..start + len).contains(&address.addr())
}

struct Reservation {
    start: usize,
    len: usize,
}

impl Reservation {
    fn heap_len(&self) -> usize {
        self.len / 2
    }

    fn slots(&self) -> std::ops::Range<usize> {
        self.start + self.heap_len()..self.start + self.len
    }
}

fn reservation() -> &'static Reservation {
    static RESERVATION: OnceLock<Reservation> = OnceLock::new();
    RESERVATION.get_or_init(|| {
        let mut sizes = sizes(address_space());
        let largest = sizes.find_map(|len| Some((try_reserve(len)?, len)));
        // With nothing reserved every allocation fails, and reports that in the usual way.
        let (start, len) = largest.unwrap_or((PAGE, 0));
        Reservation { start, len }
    })
}

/// The sizes that may be reserved under a limit of address space, largest first.
fn sizes(limit: Option<usize>) -> impl Iterator<Item = usize> {
    let most = limit.map_or(usize::MAX, |limit| limit / LIMIT_SHARE);
    let smallest = RESERVATION_SIZES[RESERVATION_SIZES.len() - 1];
    RESERVATION_SIZES.into_iter().filter(move |&len| len <= most.max(smallest))
}

/// The limit of address space of this process, if there is one.
fn address_space() -> Option<usize> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current?;
    usize::try_from(limit).ok()
}

/// Reports that no memory is available for this library. Most allocations cannot fail, so the
/// process is about to end. This function allocates nothing.
#[cold]
fn report_out_of_memory() {
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    if IS_REPORTED.swap(true, Ordering::Relaxed) {
        return;
    }
    let mut line = FixedText { bytes: [0; 256], length: 0 };
    let _ = match address_space() {
        Some(limit) => writeln!(
            line,
            "landbridge: no memory for the provider: this process may have {} MiB of address space \
             (ulimit -v): raise that limit",
            limit >> 20
        ),
        None => writeln!(line, "landbridge: no memory for the provider: this machine has no more"),
    };
    // SAFETY: the call writes initialised bytes.
    unsafe { libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.length) };
}

/// A line of text that needs no heap memory. Text beyond 256 bytes is cut off.
struct FixedText {
    bytes: [u8; 256],
    length: usize,
}

impl Write for FixedText {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = &mut self.bytes[self.length..];
        let count = text.len().min(room.len());
        room[..count].copy_from_slice(&text.as_bytes()[..count]);
        self.length += count;
        Ok(())
    }
}

fn try_reserve(len: usize) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // One additional page allows the start to be rounded up.
    let start = unsafe { libc::mmap(ptr::null_mut(), len + PAGE, libc::PROT_NONE, flags, -1, 0) };
    (start != libc::MAP_FAILED).then(|| start.expose_provenance().next_multiple_of(PAGE))
}

/// # Safety
/// The range is inside the reservation and unused.
unsafe fn map_nothing(place: usize, len: usize) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the caller guarantees an unused range. A failure leaves the old mapping, which is
    // unused.
    unsafe {
        libc::mmap(ptr::with_exposed_provenance_mut(place), len, libc::PROT_NONE, flags, -1, 0)
    };
}

/// The shared mappings: start and length, every length a multiple of [`PAGE`].
static SLOTS: crate::sync::SpinLock<Slots> =
    crate::sync::SpinLock::new(Slots { used: BTreeMap::new() });

struct Slots {
    used: BTreeMap<usize, usize>,
}

impl Slots {
    /// Takes the first gap that is wide enough.
    fn take(&mut self, len: usize) -> Result<usize, Errno> {
        let len = len.max(1).checked_next_multiple_of(PAGE).ok_or(Errno::EINVAL)?;
        let room = reservation().slots();
        let mut place = room.start;
        for (&start, &used) in &self.used {
            if start - place >= len {
                break;
            }
            place = start + used;
        }
        if room.end - place < len {
            return Err(Errno::ENOMEM);
        }
        self.used.insert(place, len);
        Ok(place)
    }

    fn len_of(&self, place: usize) -> Option<usize> {
        self.used.get(&place).copied()
    }

    fn release(&mut self, place: usize) {
        self.used.remove(&place);
    }
}

/// The allocator of this library.
struct Heap(TalcLock<RawSpinLock, Grow>);

// SAFETY: talc's allocator, unchanged; the pages of a large block are emptied before the block is
// returned, while the block still belongs to the caller.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's guarantee, passed on.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's guarantee, passed on.
        unsafe {
            if layout.size() >= GIVE_BACK {
                empty_pages(start, layout.size());
            }
            self.0.dealloc(start, layout)
        }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's guarantee, passed on.
        unsafe { self.0.realloc(start, layout, size) }
    }
}

/// # Safety
/// The block belongs to the caller, who does not need its content any more.
unsafe fn empty_pages(start: *mut u8, len: usize) {
    let first = start.addr().next_multiple_of(PAGE);
    let end = (start.addr() + len) / PAGE * PAGE;
    if first < end {
        // SAFETY: the range consists of whole pages inside the block.
        unsafe {
            libc::madvise(start.with_addr(first).cast(), end - first, libc::MADV_DONTNEED);
        }
    }
}

/// Makes more of the heap usable when talc has no memory left.
#[derive(Debug)]
struct Grow {
    /// The end of the usable part; `None`: nothing is usable yet.
    end: Option<NonNull<u8>>,
}

// SAFETY: the pointer is only used under the allocator's lock.
unsafe impl Send for Grow {}

// SAFETY: no allocation happens here: one `mprotect`, and the reservation's `mmap`.
unsafe impl Source for Grow {
    fn acquire<B: Binning>(talc: &mut Talc<Self, B>, layout: Layout) -> Result<(), ()> {
        let room = reservation();
        let used = talc.source.end.map_or(0, |end| end.as_ptr().addr() - room.start);
        let used = used.next_multiple_of(PAGE);
        let wanted = layout.size().saturating_add(layout.align()).saturating_add(PAGE);
        let grown = wanted.max(GROWTH).min(room.heap_len().saturating_sub(used)) / PAGE * PAGE;
        if grown < wanted.min(GROWTH) || grown < layout.size() {
            report_out_of_memory();
            return Err(());
        }
        let start: *mut u8 = ptr::with_exposed_provenance_mut(room.start + used);
        // SAFETY: the range lies inside the reservation, was not usable before, and belongs to talc
        // from now on.
        unsafe {
            if libc::mprotect(start.cast(), grown, libc::PROT_READ | libc::PROT_WRITE) != 0 {
                report_out_of_memory();
                return Err(());
            }
            let end = match talc.source.end {
                None => talc.claim(start, grown).ok_or(())?,
                Some(end) => talc.extend(end, start.add(grown)),
            };
            talc.source.end = Some(end);
        }
        Ok(())
    }
}

// SAFETY: the spin lock below excludes other threads.
unsafe impl lock_api::RawMutex for RawSpinLock {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: Self = RawSpinLock::new();
    type GuardMarker = lock_api::GuardSend;

    fn lock(&self) {
        RawSpinLock::lock(self);
    }

    fn try_lock(&self) -> bool {
        RawSpinLock::try_lock(self)
    }

    unsafe fn unlock(&self) {
        // SAFETY: the caller's guarantee, passed on.
        unsafe { RawSpinLock::unlock(self) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};

    #[test]
    fn everything_allocated_is_inside() {
        let small = Box::new(7u64);
        let large = vec![1u8; 3 * GROWTH];
        assert!(contains(ptr::from_ref(&*small).cast()));
        assert!(contains(large.as_ptr()) && contains(large.as_ptr().wrapping_add(large.len() - 1)));
        assert!(!contains(ptr::from_ref(&small).cast()), "the stack is elsewhere");
    }

    #[test]
    fn under_a_limit_others_have_room_as_well() {
        let largest = |limit| sizes(limit).next();
        assert_eq!(largest(None), Some(RESERVATION_SIZES[0]));
        assert_eq!([300 << 20, 1].map(|limit| largest(Some(limit))), [Some(64 << 20); 2]);
        assert_eq!(largest(Some(5 << 30)), Some(1 << 30));
    }

    /// Runs in a process of its own, which needs memory of this library before it can do anything.
    #[test]
    fn where_there_is_no_room_at_all_it_says_so() {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "ulimit -v 60000; exec \"$0\" --list"]);
        let output = command.arg(std::env::current_exe().unwrap()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && text.contains("(ulimit -v): raise that limit"),
            "{text}"
        );
        assert_eq!(text.matches("no memory for the provider").count(), 1, "{text}");
    }

    #[test]
    fn libc_memory_is_elsewhere() {
        // SAFETY: the block is allocated and freed at once.
        unsafe {
            let block = libc::malloc(100);
            assert!(!contains(block.cast()));
            libc::free(block);
        }
    }

    #[test]
    fn blocks_keep_their_content_through_growth_and_threads() {
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                scope.spawn(move || {
                    let blocks: Vec<Vec<u8>> =
                        (1..400).map(|i| vec![thread ^ i as u8; i * 37]).collect();
                    for (i, block) in (1..400usize).zip(&blocks) {
                        assert!(block.iter().all(|&byte| byte == thread ^ i as u8));
                    }
                });
            }
        });
    }

    #[test]
    fn a_large_block_that_was_freed_holds_no_memory() {
        let mut block = vec![1u8; 16 * GIVE_BACK];
        let middle = block.as_mut_ptr().wrapping_add(8 * GIVE_BACK);
        let page = middle.with_addr(middle.addr() / PAGE * PAGE);
        assert!(is_resident(page));
        drop(block);
        assert!(!is_resident(page));
    }

    #[test]
    fn a_shared_file_is_mapped_inside_and_its_place_reused() {
        let file = memory_file(2 * PAGE);
        let first = map_fd(file.as_fd(), 2 * PAGE).unwrap();
        let second = map_fd(file.as_fd(), 100).unwrap();
        assert!(contains(first.as_ptr()) && contains(second.as_ptr()));
        // SAFETY: both are mappings of the same file, of at least 100 bytes.
        unsafe {
            first.as_ptr().add(99).write_volatile(42);
            assert_eq!(second.as_ptr().add(99).read_volatile(), 42);
            unmap(first);
            unmap(second);
        }
        assert_eq!(map_fd(file.as_fd(), usize::MAX), Err(Errno::EINVAL));
        assert_eq!(map_fd(file.as_fd(), 1 << 46), Err(Errno::ENOMEM));
    }

    #[test]
    fn gaps_are_filled_first() {
        let mut slots = Slots { used: BTreeMap::new() };
        let places: Vec<usize> = (0..3).map(|_| slots.take(PAGE).unwrap()).collect();
        slots.release(places[1]);
        assert_eq!(slots.take(2 * PAGE).unwrap(), places[2] + PAGE);
        assert_eq!(slots.take(1).unwrap(), places[1]);
    }

    fn memory_file(len: usize) -> OwnedFd {
        // SAFETY: the descriptor is new, and has no other owner.
        unsafe {
            let fd = libc::memfd_create(c"arena-test".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0 && libc::ftruncate(fd, len as i64) == 0);
            OwnedFd::from_raw_fd(fd)
        }
    }

    fn is_resident(page: *mut u8) -> bool {
        let mut state = 0u8;
        // SAFETY: the call queries one page of this process, and writes one byte.
        unsafe { assert_eq!(libc::mincore(page.cast(), 4096, &mut state), 0) };
        state & 1 != 0
    }
}
