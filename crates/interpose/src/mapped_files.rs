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
//! ([`show_stores`]), and a file that has changed since the job began, and that somebody may still
//! write ([`has_no_writer`]), is not mapped by a process that may be restarted.
//!
//! Shared libraries of installed programs are not compared after they are mapped
//! ([`file_metadata::is_installed_library`]).
//!
//! What may never happen: a process goes live with a mapping of a file that has changed.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use landbridge_proto::nondeterminism::FileCall;
use libc::c_int;

use crate::descriptor_calls::{bytes_of, identity_from};
use crate::descriptor_table::{FileIdentity, FileKind, PATH_BYTES};
use crate::file_metadata::{self, identity_at, identity_of, is_installed_library};
use crate::session::{CallDescription, Path, Session, abort_replay, call_of, kernel};
use crate::syscalls::HERE;
use crate::{observe, restart_refusals};

/// Largest number of files that are mapped at the same time.
const FILES: usize = 512;
/// Largest number of mappings of these files.
const RANGES: usize = 4096;
const PAGE_BYTES: u64 = 4096;
/// `f_type` of an overlay file system (statfs(2)).
const OVERLAY: libc::__fsword_t = 0x794c_7630;
/// Command of fcntl(2): the signal that the kernel sends for this open file.
const F_SETSIG: c_int = 10;

/// True while mappings of an earlier incarnation exist, or may have existed, in a process that is
/// not known to be live.
static IS_UNCONFIRMED: AtomicBool = AtomicBool::new(false);

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
    fn insert(&mut self, start: u64, length: u64, identity: FileIdentity, path: &[u8]) -> bool {
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
    fn remove(&mut self, start: u64, end: u64) {
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
    fn pin(&mut self, start: u64, end: u64) {
        let ranges = self.ranges[..self.count].iter_mut();
        for range in ranges.filter(|range| range.start < end && range.end > start) {
            (range.start, range.end) = (0, u64::MAX);
        }
    }

    /// Path of a mapped file, among those with mappings between two addresses, that has changed
    /// since it was mapped, or whose path is that of another file by now.
    fn changed(&self, start: u64, end: u64) -> Option<&[u8]> {
        let ranges = self.ranges[..self.count].iter();
        let within = ranges.filter(|range| range.start < end && range.end > start);
        within.map(|range| &self.files[usize::from(range.file)]).find_map(|file| {
            let now = identity_at((HERE, file.path.as_ptr().addr() as u64));
            let is_same = now.is_some_and(|(_, now)| now.is_same_state(&file.identity));
            (!is_same).then_some(&file.path[..file.length.into()])
        })
    }
}

impl Session {
    /// Handles a mapping of a file. Stores into a mapping make no system call and are not recorded.
    pub fn map(&mut self, arguments: [u64; 6]) -> Option<i64> {
        let [start, length, _, flags, descriptor, offset] = arguments;
        let (flags, descriptor) = (flags as c_int, descriptor as u32 as u64);
        if flags & libc::MAP_FIXED != 0 {
            self.unmap(start, length);
        }
        if flags & libc::MAP_ANONYMOUS != 0 {
            return None;
        }
        let open = self.table.by_index(self.table.index(descriptor)?);
        let is_shared = flags & libc::MAP_TYPE != libc::MAP_PRIVATE;
        if is_shared && open.may_write() {
            let path = Path(open.path());
            restart_refusals::forbid_restart(format_args!("it maps {path} shared and writable"));
            show_stores(descriptor);
            return None;
        }
        let is_file = open.kind == FileKind::File;
        let call = call_of(libc::SYS_mmap, [descriptor, length, offset, 0, 0], &[]);
        let identity = match self.is_live() {
            true => self.note_map(call, descriptor)?,
            false => self.replay_map(call, descriptor),
        };
        let result = kernel(libc::SYS_mmap, arguments);
        let path = self.table.path_of(descriptor);
        let since = self.guard.since();
        if result >= 0 && is_file && !is_installed_library(descriptor, path, &identity, since) {
            let table = &mut self.table.mapped_files;
            if !table.insert(result as u64, length, identity, path) {
                self.forbid_restart(format_args!("it maps more files than are looked after"));
            }
        }
        Some(result)
    }

    /// Notes a mapping that the live process is about to make. `None`: others may change what is
    /// mapped without a trace, and a restart is forbidden.
    fn note_map(&mut self, call: FileCall, descriptor: u64) -> Option<FileIdentity> {
        let now = identity_of(descriptor).map(|(_, now)| now).unwrap_or_default();
        let since = self.guard.since();
        let open = self.table.get(descriptor)?;
        let is_watched = open.kind == FileKind::File
            && !is_installed_library(descriptor, open.path(), &now, since);
        let has_changed = now.modified.max(now.changed) >= since;
        if is_watched && has_changed && !has_no_writer(descriptor) {
            let path = Path(open.path());
            restart_refusals::forbid_restart(format_args!(
                "it maps {path}, which is changed while the job runs"
            ));
            return None;
        }
        self.note(call, 0, &[&bytes_of(&now)]);
        Some(now)
    }

    /// Compares a file that is about to be mapped again with the file that an earlier incarnation
    /// has mapped. The process ends if the file has changed.
    fn replay_map(&mut self, call: FileCall, descriptor: u64) -> FileIdentity {
        let path = self.table.path_of(descriptor);
        let mut before = [0; size_of::<FileIdentity>()];
        self.replay(call, CallDescription::Path("mapping", path), &mut [&mut before]);
        self.table.index(descriptor).into_iter().for_each(|index| self.table.reopen_file(index));
        let before = identity_from(&before);
        if identity_of(descriptor).is_none_or(|(_, now)| !now.is_same_state(&before)) {
            end_for(path);
        }
        IS_UNCONFIRMED.store(true, Relaxed);
        before
    }

    /// Handles the removal of mappings.
    pub fn unmap(&mut self, start: u64, length: u64) -> Option<i64> {
        let end = start.saturating_add(length.checked_next_multiple_of(PAGE_BYTES)?);
        self.check_mapped(start, end);
        self.table.mapped_files.remove(start, end);
        None
    }

    /// Handles `mremap`, which may move a mapping.
    pub fn remap(&mut self, start: u64, length: u64) -> Option<i64> {
        self.table.mapped_files.pin(start, start.saturating_add(length.max(1)));
        None
    }

    /// Compares the mapped files of a process that may replay. The process ends if one has changed.
    pub fn check_mapped_files(&mut self) {
        self.check_mapped(0, u64::MAX);
    }

    fn check_mapped(&mut self, start: u64, end: u64) {
        if !IS_UNCONFIRMED.load(Relaxed) {
            return;
        }
        if let Some(path) = self.table.mapped_files.changed(start, end) {
            end_for(path);
        }
    }

    /// Confirms that the process has repeated every poll of earlier incarnations: the program reads
    /// mapped files as they are from now on. False: recorded calls are left to be replayed.
    pub fn confirm_live(&mut self) -> bool {
        let is_live = self.guard.record().is_live();
        if is_live {
            self.check_mapped_files();
            IS_UNCONFIRMED.store(false, Relaxed);
        }
        is_live
    }

    /// Compares the mapped files of a process that is now restored from a checkpoint image.
    pub fn check_restored_maps(&mut self) {
        IS_UNCONFIRMED.store(true, Relaxed);
        self.check_mapped_files();
    }

    /// Forbids a restart before a checkpoint image is taken, if a mapped file has changed since it
    /// was mapped: the image would get its pages from another file.
    pub fn check_maps_for_image(&mut self) {
        self.check_mapped_files();
        if let Some(path) = self.table.mapped_files.changed(0, u64::MAX) {
            let path = Path(path);
            restart_refusals::forbid_restart(format_args!(
                "it has mapped {path}, which has changed since"
            ));
        }
    }
}

/// Ends this process, whose mapping of a file has another content than in an earlier incarnation.
fn end_for(path: &[u8]) -> ! {
    abort_replay(format_args!("{}, which it had mapped, has changed since", Path(path)));
}

/// Calls [`show_stores`] for a shared mapping of a file that is open for writing, made by another
/// thread, a child, or a rank whose calls are no longer recorded.
pub fn show_stores_by(arguments: [u64; 6]) {
    let (flags, descriptor) = (arguments[3] as c_int, arguments[4] as u32 as u64);
    let is_shared = flags & libc::MAP_TYPE != libc::MAP_PRIVATE;
    if flags & libc::MAP_ANONYMOUS != 0 || !is_shared {
        return;
    }
    let mode = kernel(libc::SYS_fcntl, [descriptor, libc::F_GETFL as u64, 0, 0, 0, 0]);
    if mode >= 0 && mode as c_int & libc::O_ACCMODE != libc::O_RDONLY {
        observe::with_file(descriptor, |_, _| show_stores(descriptor));
    }
}

/// Makes other processes see that this file may change from now on: stores by a shared mapping may
/// leave the file's times as they are. A change of the owner to nobody in particular changes only
/// the time of status change (chown(2)).
pub fn show_stores(descriptor: u64) {
    let same = u64::from(u32::MAX);
    kernel(libc::SYS_fchown, [descriptor, same, same, 0, 0, 0]);
}

/// Whether no process on this node has the file open for writing, or mapped for stores: only then
/// the kernel grants a lease for reading (fcntl(2), `F_SETLEASE`). False if the kernel cannot tell:
/// for files of other users, and on many file systems.
fn has_no_writer(descriptor: u64) -> bool {
    // Of an overlay the kernel forgets who has mapped a file once the descriptor is closed.
    let mut about = MaybeUninit::<libc::statfs>::zeroed();
    let room = about.as_mut_ptr().addr() as u64;
    let is_known = kernel(libc::SYS_fstatfs, [descriptor, room, 0, 0, 0, 0]) == 0;
    // SAFETY: all zeros are a value, and the kernel has written another.
    if !is_known || unsafe { about.assume_init() }.f_type == OVERLAY {
        return false;
    }
    let Some(file) = file_metadata::open_to_read(descriptor) else { return false };
    let control = |command: c_int, argument: c_int| {
        kernel(libc::SYS_fcntl, [file, command as u64, argument as u64, 0, 0, 0])
    };
    // A process that opens the file within these calls has this signal sent, which is ignored
    // unless the program has a handler.
    control(F_SETSIG, libc::SIGURG);
    let is_granted = control(libc::F_SETLEASE, libc::F_RDLCK) == 0;
    control(libc::F_SETLEASE, libc::F_UNLCK);
    kernel(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
    is_granted
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStrExt;
    use std::path::PathBuf;

    use super::*;

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

    /// Stores into a file in memory change no time of the file, and a mapping outlives the
    /// descriptor.
    #[test]
    fn who_may_store_by_a_mapping_is_seen() {
        for folder in ["/tmp", "/dev/shm"] {
            let file = TestFile::new(folder, "stored");
            let reader = fs::File::open(&file.0).unwrap();
            let is_unwritten = || has_no_writer(reader.as_raw_fd() as u64);
            // An overlay as /tmp, or a file system without leases, never can tell.
            let can_tell = is_unwritten();
            let before = file.identity();
            let writer = fs::File::options().read(true).write(true).open(&file.0).unwrap();
            assert!(!is_unwritten(), "{folder}");
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let descriptor = writer.as_raw_fd();
            // SAFETY: the kernel chooses free addresses.
            let memory = unsafe {
                libc::mmap(std::ptr::null_mut(), 1, protection, libc::MAP_SHARED, descriptor, 0)
            };
            assert_ne!(memory, libc::MAP_FAILED);
            show_stores(descriptor as u64);
            let shown = file.identity();
            assert!(shown.changed > before.changed && shown.modified == before.modified);
            drop(writer);
            assert!(!is_unwritten(), "{folder}: the mapping is there");
            // SAFETY: this test has made the mapping.
            unsafe { libc::munmap(memory, 1) };
            assert_eq!(is_unwritten(), can_tell, "{folder}");
        }
    }
}
