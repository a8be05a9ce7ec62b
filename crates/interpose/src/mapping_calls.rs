//! Calls that map files (`mmap`, `munmap`, `mremap`), and the comparison of what is mapped.
//!
//! In: the calls of the recorded thread; the moments at which mapped files are compared
//! ([`crate::mapped_files`] says when). Out: results, and reports of mappings by which others may
//! store. What may never happen: a process goes live with a mapping of a file that has changed.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use landbridge_proto::nondeterminism::FileCall;
use libc::c_int;

use crate::change_times::settled;
use crate::file_identity::{FileIdentity, FileKind, bytes_of, identity_from};
use crate::file_metadata::{self, identity_of, is_installed_library};
use crate::kernel_calls::kernel;
use crate::mapped_files::PAGE_BYTES;
use crate::messages::Path;
use crate::restart_refusals::{self, abort_replay};
use crate::session::{CallDescription, Session, call_of};
use crate::watched;

/// `f_type` of an overlay file system (statfs(2)).
const OVERLAY: libc::__fsword_t = 0x794c_7630;
/// Command of fcntl(2): the signal that the kernel sends for this open file.
const F_SETSIG: c_int = 10;

/// True while mappings of an earlier incarnation exist, or may have existed, in a process that is
/// not known to be live.
static IS_UNCONFIRMED: AtomicBool = AtomicBool::new(false);

/// Attempts to find that nobody has a file open for writing, a millisecond apart.
const LEASE_TRIES: u32 = 10;

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
            // sem_open(3), which maps the semaphore under a name of its own.
            let kind = match open.path().starts_with(b"/dev/shm/sem.") {
                true => " (a named semaphore, as multiprocessing, tqdm and joblib of Python make)",
                false => "",
            };
            restart_refusals::forbid_restart(format_args!(
                "it maps {path} shared and writable{kind}"
            ));
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
                self.forbid_restart(format_args!("it maps more files than the interposer tracks"));
            }
        }
        Some(result)
    }

    /// Notes a mapping that the live process is about to make. `None`: others may change what is
    /// mapped without a trace, and a restart is forbidden.
    fn note_map(&mut self, call: FileCall, descriptor: u64) -> Option<FileIdentity> {
        let look = || identity_of(descriptor).map(|(_, now)| now).unwrap_or_default();
        let now = settled(descriptor, look);
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
        watched::with_file(descriptor, |_, _| show_stores(descriptor));
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
pub fn has_no_writer(descriptor: u64) -> bool {
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
    // The agent may still have a file that the program has closed, for a moment.
    let is_granted = (0..LEASE_TRIES).any(|attempt| {
        let wait = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 * i64::from(attempt > 0) };
        kernel(libc::SYS_nanosleep, [(&raw const wait).addr() as u64, 0, 0, 0, 0, 0]);
        control(libc::F_SETLEASE, libc::F_RDLCK) == 0
    });
    control(libc::F_SETLEASE, libc::F_UNLCK);
    kernel(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
    is_granted
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd;

    use super::*;

    /// Stores into a file in memory change no time of the file, and a mapping outlives the
    /// descriptor.
    #[test]
    fn who_may_store_by_a_mapping_is_seen() {
        for folder in ["/tmp", "/dev/shm"] {
            let path = format!("{folder}/landbridge-stored-{}", std::process::id());
            fs::write(&path, [7; 2 * PAGE_BYTES as usize]).unwrap();
            let reader = fs::File::open(&path).unwrap();
            let identity = || identity_of(reader.as_raw_fd() as u64).unwrap().1;
            let is_unwritten = || has_no_writer(reader.as_raw_fd() as u64);
            // An overlay as /tmp, or a file system without leases, never can tell.
            let can_tell = is_unwritten();
            let before = identity();
            let writer = fs::File::options().read(true).write(true).open(&path).unwrap();
            assert!(!is_unwritten(), "{folder}");
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let descriptor = writer.as_raw_fd();
            // SAFETY: the kernel chooses free addresses.
            let memory = unsafe {
                libc::mmap(std::ptr::null_mut(), 1, protection, libc::MAP_SHARED, descriptor, 0)
            };
            assert_ne!(memory, libc::MAP_FAILED);
            show_stores(descriptor as u64);
            let shown = identity();
            assert!(shown.changed > before.changed && shown.modified == before.modified);
            drop(writer);
            assert!(!is_unwritten(), "{folder}: the mapping is there");
            // SAFETY: this test has made the mapping.
            unsafe { libc::munmap(memory, 1) };
            assert_eq!(is_unwritten(), can_tell, "{folder}");
            fs::remove_file(&path).unwrap();
        }
    }
}
