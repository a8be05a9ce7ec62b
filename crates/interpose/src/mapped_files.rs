//! Files that the recorded thread has mapped.
//!
//! Reads of mapped memory make no system call, so they are not recorded: a later incarnation reads
//! the file itself, and a process restored from a checkpoint image gets the pages from the file.
//! Both are right only while the file is as it was when it was mapped. So this module keeps the
//! identity of each mapped file ([`FileIdentity`]), and compares it with the present one
//!
//! - when the mapping is made again in a replay,
//! - when the mapping is removed, or the program ends, while the process replays,
//! - when the process goes live, and when it is restored from a checkpoint image,
//! - before a checkpoint image is taken.
//!
//! Stores by a shared mapping of another process may leave the times of a file as they are. So a
//! process that maps a file shared and writable changes the file's time of status change first
//! ([`crate::mapping_calls::show_stores`]), and a file that has changed since the job began, and
//! that somebody may still write ([`crate::mapping_calls::has_no_writer`]), is not mapped by a
//! process that may be restarted.
//!
//! Shared libraries of installed programs are not compared after they are mapped
//! ([`crate::file_metadata::is_installed_library`]).
//!
//! What may never happen: a process goes live with a mapping of a file that has changed.

use crate::file_identity::{FileIdentity, PATH_BYTES};
use crate::file_metadata::identity_at;
use crate::kernel_calls::HERE;

/// Largest number of files that are mapped at the same time.
const FILES: usize = 512;
/// Largest number of mappings of these files.
const RANGES: usize = 4096;
pub const PAGE_BYTES: u64 = 4096;

/// The mapped files of the recorded thread. All zeros are an empty table.
pub struct MappedFiles {
    files: [MappedFile; FILES],
    ranges: [MappedRange; RANGES],
    count: usize,
}

/// A mapped file, with its identity when it was mapped.
struct MappedFile {
    ranges: u32,
    identity: FileIdentity,
    length: u16,
    path: [u8; PATH_BYTES],
}

/// Addresses of one mapping, and the index of its file.
#[derive(Clone, Copy)]
struct MappedRange {
    start: u64,
    end: u64,
    file: u16,
}

impl MappedFiles {
    pub const EMPTY: MappedFiles = MappedFiles {
        files: [const {
            let identity = FileIdentity::NONE;
            MappedFile { ranges: 0, identity, length: 0, path: [0; PATH_BYTES] }
        }; FILES],
        ranges: [MappedRange { start: 0, end: 0, file: 0 }; RANGES],
        count: 0,
    };

    /// Adds a mapping. False: the table is full, or the file has no path.
    pub fn insert(&mut self, start: u64, length: u64, identity: FileIdentity, path: &[u8]) -> bool {
        let is_same = |one: &MappedFile| {
            one.ranges > 0 && one.identity == identity && one.path[..one.length.into()] == *path
        };
        let known = self.files.iter().position(is_same);
        let free = || self.files.iter().position(|one| one.ranges == 0);
        let has_path = !path.is_empty() && path.len() < PATH_BYTES;
        let Some(at) = known.or_else(free).filter(|_| has_path && self.count < RANGES) else {
            return false;
        };
        let file = &mut self.files[at];
        if file.ranges == 0 {
            (file.identity, file.length) = (identity, path.len() as u16);
            file.path[..path.len()].copy_from_slice(path);
            file.path[path.len()] = 0;
        }
        file.ranges += 1;
        let end = start.saturating_add(length.next_multiple_of(PAGE_BYTES));
        self.ranges[self.count] = MappedRange { start, end, file: at as u16 };
        self.count += 1;
        true
    }

    /// Removes what is mapped between two addresses. A mapping of which only the middle is removed
    /// is kept as it is.
    pub fn remove(&mut self, start: u64, end: u64) {
        let mut at = 0;
        while at < self.count {
            let range = &mut self.ranges[at];
            let (before, after) = (range.start < start, range.end > end);
            if range.end <= start || range.start >= end || before && after {
                at += 1;
            } else if before {
                range.end = start;
            } else if after {
                range.start = end;
            } else {
                self.files[usize::from(range.file)].ranges -= 1;
                self.count -= 1;
                self.ranges[at] = self.ranges[self.count];
            }
        }
    }

    /// Keeps every mapping of which a part is moved for good: it is not known to where.
    pub fn pin(&mut self, start: u64, end: u64) {
        let ranges = self.ranges[..self.count].iter_mut();
        for range in ranges.filter(|range| range.start < end && range.end > start) {
            (range.start, range.end) = (0, u64::MAX);
        }
    }

    /// Path of a mapped file, among those with mappings between two addresses, that has changed
    /// since it was mapped, or whose path is that of another file by now.
    pub fn changed(&self, start: u64, end: u64) -> Option<&[u8]> {
        let ranges = self.ranges[..self.count].iter();
        let within = ranges.filter(|range| range.start < end && range.end > start);
        within.map(|range| &self.files[usize::from(range.file)]).find_map(|file| {
            let now = identity_at((HERE, file.path.as_ptr().addr() as u64));
            let is_same = now.is_some_and(|(_, now)| now.is_same_state(&file.identity));
            (!is_same).then_some(&file.path[..file.length.into()])
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStrExt;
    use std::path::PathBuf;

    use super::*;
    use crate::file_metadata::identity_of;

    /// A table on the heap, because it is too large for a test's stack.
    fn table() -> Box<MappedFiles> {
        // SAFETY: all zeros are an empty table.
        unsafe { Box::<MappedFiles>::new_zeroed().assume_init() }
    }

    /// A file of this test in this folder, removed in the end.
    struct TestFile(PathBuf);

    impl TestFile {
        fn new(folder: &str, name: &str) -> Self {
            let path = format!("{folder}/landbridge-mapped-{}-{name}", std::process::id());
            fs::write(&path, [7; 2 * PAGE_BYTES as usize]).unwrap();
            Self(path.into())
        }

        fn identity(&self) -> FileIdentity {
            let file = fs::File::open(&self.0).unwrap();
            identity_of(file.as_raw_fd() as u64).unwrap().1
        }

        fn map(&self, table: &mut MappedFiles, start: u64, length: u64) -> bool {
            table.insert(start, length, self.identity(), self.0.as_os_str().as_bytes())
        }
    }

    impl Drop for TestFile {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    const ALL: (u64, u64) = (0, u64::MAX);

    fn has_changed(table: &MappedFiles, (start, end): (u64, u64)) -> bool {
        table.changed(start, end).is_some()
    }

    #[test]
    fn a_mapping_counts_until_its_last_page_is_removed() {
        let (file, mut table) = (TestFile::new("/tmp", "counts"), table());
        assert!(file.map(&mut table, 0x10000, 0x2001) && file.map(&mut table, 0x20000, 0x1000));
        assert!(!has_changed(&table, ALL));
        fs::write(&file.0, "other").unwrap();
        assert!(has_changed(&table, ALL) && has_changed(&table, (0x12000, 0x13000)));
        assert!(!has_changed(&table, (0x13000, 0x20000)), "nothing is mapped there");
        table.remove(0x11000, 0x12000);
        assert!(has_changed(&table, (0x11000, 0x12000)), "of a hole in the middle nothing is kept");
        table.remove(0, 0x11000);
        table.remove(0x12000, 0x20000);
        assert!(has_changed(&table, (0x11000, 0x12000)) && table.count == 2);
        table.remove(0x11000, 0x12000);
        assert!(!has_changed(&table, (0, 0x20000)) && has_changed(&table, ALL));
        table.remove(0x20000, 0x21000);
        assert!(!has_changed(&table, ALL) && table.count == 0);
        assert!(table.files.iter().all(|file| file.ranges == 0));
    }

    #[test]
    fn a_moved_mapping_counts_for_good() {
        let (file, mut table) = (TestFile::new("/tmp", "moved"), table());
        assert!(file.map(&mut table, 0x10000, 0x1000));
        table.pin(0x10000, 0x11000);
        table.remove(0x10000, 0x11000);
        fs::remove_file(&file.0).unwrap();
        assert!(has_changed(&table, (0x50000, 0x51000)), "it may be anywhere");
    }

    #[test]
    fn a_file_with_another_content_under_the_same_path_has_changed() {
        let (file, other) = (TestFile::new("/tmp", "replaced"), TestFile::new("/tmp", "new"));
        let mut table = table();
        assert!(file.map(&mut table, 0x10000, 0x1000));
        fs::rename(&other.0, &file.0).unwrap();
        assert!(has_changed(&table, ALL));
    }

    #[test]
    fn the_table_has_a_bound() {
        let (file, mut table) = (TestFile::new("/tmp", "bound"), table());
        let identity = file.identity();
        assert!(!table.insert(0x1000, 1, identity, b""), "such a file cannot be found again");
        (0..FILES as u64).for_each(|at| {
            assert!(table.insert(
                at * PAGE_BYTES,
                1,
                FileIdentity { inode: at, ..identity },
                b"/a"
            ));
        });
        assert!(!table.insert(0, 1, identity, b"/b"));
        (FILES..RANGES).for_each(|_| {
            assert!(table.insert(0, 1, FileIdentity { inode: 1, ..identity }, b"/a"))
        });
        assert!(!table.insert(0, 1, FileIdentity { inode: 1, ..identity }, b"/a"));
        table.remove(0, u64::MAX);
        assert!(table.insert(0, 1, identity, b"/b"));
    }
}
