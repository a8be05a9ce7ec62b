//! Memory of a program that keeps much and touches it once: large blocks come in huge pages.
//!
//! What a relay keeps of its processes lies in segments that are filled from front to back. In pages of 4 KiB the system
//! stops it 512 times for every 2 MiB to find and clear one, which costs more than the copy that fills it. Blocks of
//! [`HUGE_BYTES`] and more therefore are mappings of their own, at a multiple of that, for which huge pages are asked for
//! (madvise(2), `MADV_HUGEPAGE`); where there are none, they are pages like others. All else is the system's allocator.
//!
//! What may never happen: a block is given to the allocator that did not make it. Its size alone says which one that was.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// A huge page, where there are such (x86-64, aarch64 with pages of 4 KiB).
pub const HUGE_BYTES: usize = 2 << 20;

/// See the module head.
pub struct Roomy;

// SAFETY: a block is a mapping of its own if and only if `is_large` says so of its layout, which callers give again when they
// free it; all others are the system's.
unsafe impl GlobalAlloc for Roomy {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match is_large(layout) {
            true => map(layout.size()).map_or(ptr::null_mut(), NonNull::as_ptr),
            // SAFETY: as our caller promises.
            false => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match is_large(layout) {
            // New pages are zeros.
            true => map(layout.size()).map_or(ptr::null_mut(), NonNull::as_ptr),
            // SAFETY: as our caller promises.
            false => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match is_large(layout) {
            // SAFETY: it is a mapping of this length that nobody uses any more. It fails only for what is none.
            true => unsafe {
                let _ = munmap(block.cast(), rounded(layout.size()));
            },
            // SAFETY: as our caller promises.
            false => unsafe { System.dealloc(block, layout) },
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: callers promise that the size, rounded up to the alignment, does not overflow.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if !is_large(layout) && !is_large(new) {
            // SAFETY: as our caller promises.
            return unsafe { System.realloc(block, layout, size) };
        }
        // SAFETY: the old block is as long as its layout says, and the new one is another; as our caller promises.
        unsafe {
            let moved = self.alloc(new);
            if !moved.is_null() {
                ptr::copy_nonoverlapping(block, moved, layout.size().min(size));
                self.dealloc(block, layout);
            }
            moved
        }
    }
}

fn is_large(layout: Layout) -> bool {
    layout.size() >= HUGE_BYTES && layout.align() <= HUGE_BYTES
}

fn rounded(size: usize) -> usize {
    size.next_multiple_of(HUGE_BYTES)
}

/// A mapping that begins at a huge page.
fn map(size: usize) -> Option<NonNull<u8>> {
    let wanted = size.checked_next_multiple_of(HUGE_BYTES)?;
    let taken = wanted.checked_add(HUGE_BYTES)?;
    let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping wherever the system likes.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), taken, access, kind) }.ok()?;
    let before = start.cast::<u8>().align_offset(HUGE_BYTES);
    let start = start.cast::<u8>();
    // SAFETY: what lies before and behind is part of the mapping, and nobody has seen it.
    unsafe {
        if before > 0 {
            let _ = munmap(start.cast(), before);
        }
        let behind = taken - before - wanted;
        if behind > 0 {
            let _ = munmap(start.add(before + wanted).cast(), behind);
        }
        let block = start.add(before);
        // Where there are no huge pages, it does without.
        let _ = madvise(block.cast(), wanted, Advice::LinuxHugepage);
        NonNull::new(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_all_sizes_keep_what_is_written_as_they_grow_and_shrink() {
        let sizes =
            [1, 100, HUGE_BYTES - 1, HUGE_BYTES, HUGE_BYTES + 1, 3 * HUGE_BYTES, HUGE_BYTES, 9];
        let mut layout = Layout::from_size_align(16, 8).unwrap();
        // SAFETY: the layout has a size.
        let mut block = unsafe { Roomy.alloc(layout) };
        for (round, size) in sizes.into_iter().enumerate() {
            // SAFETY: the block has this layout, and `size` bytes after that.
            unsafe {
                block = Roomy.realloc(block, layout, size);
                assert!(!block.is_null());
                let is_kept = round == 0 || *block == round as u8;
                assert!(is_kept, "{round}: {}", *block);
                block.write_bytes(round as u8 + 1, size);
            }
            layout = Layout::from_size_align(size, 8).unwrap();
            assert!(size < HUGE_BYTES || block.align_offset(HUGE_BYTES) == 0);
        }
        // SAFETY: it has this layout.
        unsafe { Roomy.dealloc(block, layout) };
        let layout = Layout::from_size_align(HUGE_BYTES + 5, 1).unwrap();
        // SAFETY: the layout has a size; the block is that long.
        unsafe {
            let block = Roomy.alloc_zeroed(layout);
            assert!(std::slice::from_raw_parts(block, layout.size()).iter().all(|byte| *byte == 0));
            Roomy.dealloc(block, layout);
        }
    }

    #[test]
    fn what_there_cannot_be_is_refused() {
        let layout = Layout::from_size_align(isize::MAX as usize - 7, 8).unwrap();
        // SAFETY: the layout has a size.
        assert!(unsafe { Roomy.alloc(layout) }.is_null());
    }
}
