//! What parts of files hold, to judge whether an interrupted effect has happened.
//!
//! In: an open file, a position and a length, and what a call was to write. Out: digests, and
//! whether the bytes are there. What may never happen: a file that cannot be read counts as
//! compared.

use std::ops::Range;

use landbridge_proto::digest::digest;

use crate::file_metadata;
use crate::io_vectors::IoVectors;
use crate::kernel_calls::{error, kernel};

/// Size of a page on x86-64, in bytes.
pub const PAGE_BYTES: i64 = 4096;

/// Bytes of a file that are compared at once.
const COMPARED: usize = 4096;

/// Number of bytes at a position of a file, at most `length`, and a digest of them. `None`: this
/// process may not read the file.
pub fn content_of(descriptor: u64, at: u64, length: usize) -> Option<(u64, u64)> {
    let (mut found, mut count, mut all) = ([0; COMPARED], 0, [0; 16]);
    let mut is_read = false;
    read_by_another(descriptor, |file| {
        is_read = true;
        while count < length {
            let wanted = COMPARED.min(length - count) as u64;
            let room = found.as_mut_ptr().addr() as u64;
            let read = kernel(libc::SYS_pread64, [file, room, wanted, at + count as u64, 0, 0]);
            is_read &= read >= 0;
            let Some(read) = usize::try_from(read).ok().filter(|read| *read > 0) else { break };
            let before = digest(&all);
            all[..8].copy_from_slice(&before.to_le_bytes());
            all[8..].copy_from_slice(&digest(&found[..read]).to_le_bytes());
            count += read;
        }
    });
    is_read.then(|| (count as u64, digest(&all)))
}

/// Whether the file has the first `length` bytes of `pieces` at this position.
///
/// # Safety
/// The memory of `pieces` is valid.
pub unsafe fn is_there(
    descriptor: u64,
    mut at: u64,
    pieces: &IoVectors<'_>,
    length: usize,
) -> bool {
    let (mut found, mut is_there) = ([0; COMPARED], false);
    read_by_another(descriptor, |file| {
        // SAFETY: the caller's promise.
        is_there = unsafe { pieces.first(length) }.all(|piece| {
            piece.chunks(COMPARED).all(|part| {
                let room = found.as_mut_ptr().addr() as u64;
                let read = [file, room, part.len() as u64, at, 0, 0];
                at += part.len() as u64;
                kernel(libc::SYS_pread64, read) == part.len() as i64 && found[..part.len()] == *part
            })
        });
    });
    is_there
}

/// Whether the bytes lie within one page of a file: a write of these happens whole or not at all.
pub fn is_within_page(at: u64, length: u64) -> bool {
    let page = PAGE_BYTES as u64;
    at / page == at.saturating_add(length.saturating_sub(1)) / page
}

/// Whether nobody has ever written these bytes of a file of this size: they lie beyond its end, or
/// in a hole (lseek(2), SEEK_DATA). Where a file system does not tell holes, only the first counts.
pub fn is_unwritten(descriptor: u64, size: u64, bytes: Range<u64>) -> bool {
    let mut is_unwritten = bytes.start >= size;
    if !is_unwritten {
        read_by_another(descriptor, |file| {
            let data = [file, bytes.start, libc::SEEK_DATA as u64, 0, 0, 0];
            let found = kernel(libc::SYS_lseek, data);
            is_unwritten = found == error(libc::ENXIO) || found >= bytes.end as i64;
        });
    }
    is_unwritten
}

/// Calls `work` with a readable descriptor of the same file: the program's may be write-only.
fn read_by_another(descriptor: u64, work: impl FnOnce(u64)) {
    let Some(file) = file_metadata::open_to_read(descriptor) else { return };
    work(file);
    kernel(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn holes_and_what_lies_beyond_the_end_are_unwritten() {
        let path = std::env::temp_dir().join(format!("lb-holes-{}", std::process::id()));
        let file = std::fs::File::create(&path).unwrap();
        let is_free = |size, bytes| is_unwritten(file.as_raw_fd() as u64, size, bytes);
        let page = PAGE_BYTES as u64;
        file.write_all_at(b"first", 0).unwrap();
        assert!(!is_free(5, 0..5) && is_free(5, 5..page));
        file.write_all_at(b"last", 100 * page).unwrap();
        let size = 100 * page + 4;
        assert!(is_free(size, page..100 * page), "a hole");
        assert!(!is_free(size, page..100 * page + 1) && !is_free(size, 0..100));
        file.write_all_at(&[0], 50 * page).unwrap();
        assert!(!is_free(size, page..100 * page), "zeros that somebody wrote are no hole");
        std::fs::remove_file(path).unwrap();
    }
}
