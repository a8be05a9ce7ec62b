//! Range locks of the process (fcntl(2), `F_SETLK`), which end when the process closes any
//! descriptor of the file, and locks that a child keeps.
//!
//! A lock of the process is taken as a lock of an open file, because the agent then can keep the
//! lock for the next incarnation. Locks of an open file end with its last descriptor, in whichever
//! process. So this module releases the locks of the process when the kernel would do that.
//!
//! In: a descriptor that is about to be closed. Out: released locks.
//!
//! What may never happen: the process has a lock that the kernel would have released; a lock that a
//! child still has is released.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::descriptor_table::OPENS;
use crate::file_identity::FileIdentity;
use crate::file_metadata::shares_open_file;
use crate::kernel_calls::{error, kernel};
use crate::open_file::LOCKS;
use crate::processes::{each_number_in, is_own_process};
use crate::session::Session;

/// True once the process has taken a range lock. Most programs never do, and a search for the
/// holder of such a lock reads the whole table.
static IS_IN_USE: AtomicBool = AtomicBool::new(false);

/// Notes that the process takes a range lock.
pub fn note_lock() {
    IS_IN_USE.store(true, Relaxed);
}

impl Session {
    /// Releases the range locks of the process on the file at a descriptor, before that descriptor
    /// is closed.
    pub fn drop_range_locks(&mut self, descriptor: u64) {
        if !IS_IN_USE.load(Relaxed) {
            return;
        }
        if let Some(file) = self.table.get(descriptor).map(|open| open.identity) {
            self.drop_range_locks_of(Some(file));
        }
    }

    /// Releases all range locks of the process, which ends.
    pub fn drop_all_range_locks(&mut self) {
        if IS_IN_USE.load(Relaxed) {
            self.drop_range_locks_of(None);
        }
    }

    /// `file`: only the locks on this file.
    fn drop_range_locks_of(&mut self, file: Option<FileIdentity>) {
        for index in 0..OPENS {
            let open = self.table.by_index(index);
            let is_it =
                open.has_process_locks && file.is_none_or(|it| it.is_same_file(&open.identity));
            if !is_it || self.table.uses(index) == 0 {
                continue;
            }
            if self.is_live_for_unrecorded() {
                self.table.descriptors(index).next().into_iter().for_each(unlock_all);
            }
            let open = self.table.by_index(index);
            (open.ranges, open.has_process_locks) = ([None; LOCKS], false);
        }
    }
}

/// Releases the locks on every range of an open file.
pub fn unlock_all(descriptor: u64) {
    // SAFETY: all zeros describe the whole file.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = libc::F_UNLCK as i16;
    let range = (&raw const range).addr() as u64;
    kernel(libc::SYS_fcntl, [descriptor, libc::F_OFD_SETLK as u64, range, 0, 0, 0]);
}

/// Whether a program that this process has started has the same open file, and so keeps its locks.
pub fn is_kept_by_child(descriptor: u64) -> bool {
    if !has_children() {
        return false;
    }
    let own = kernel(libc::SYS_getpid, [0; 6]) as u64;
    let mut is_kept = false;
    each_number_in(c"/proc", |process| {
        is_kept |= process != own
            && !is_kept
            && is_own_process(process as libc::c_int)
            && shares_open_file(descriptor, process);
    });
    is_kept
}

/// Whether this process has a child, also one that has ended and was not waited for.
fn has_children() -> bool {
    let how = (libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL) as u64;
    kernel(libc::SYS_waitid, [u64::from(libc::P_ALL), 0, 0, how, 0, 0]) != error(libc::ECHILD)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_child_keeps_an_open_file_until_it_ends() {
        let path = std::env::temp_dir().join(format!("lb-kept-{}", std::process::id()));
        let file = std::fs::File::create(&path).unwrap();
        let (kept, other) = (file.try_clone().unwrap(), std::fs::File::open(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
        let descriptor = file.as_raw_fd() as u64;
        assert!(!is_kept_by_child(descriptor));
        let mut child = std::process::Command::new("sleep").arg("9").stdout(kept).spawn().unwrap();
        assert!(is_kept_by_child(descriptor));
        assert!(!is_kept_by_child(other.as_raw_fd() as u64), "the file, but opened on its own");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_kept_by_child(descriptor));
    }
}
