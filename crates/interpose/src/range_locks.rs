//! Range locks of the process (fcntl(2), `F_SETLK`), which end when the process closes any
//! descriptor of the file, and locks that a child keeps.
//!
//! A lock of the process is taken as a lock of an open file, because the agent then can keep the
//! lock for the next incarnation. Locks of an open file end with its last descriptor, in whichever
//! process. So this module releases the locks of the process when the kernel would do that.
//!
//! All locks that the process has on one file belong to one open file, their *holder*, so they do
//! not conflict with each other. The holder is opened for these locks alone, to read and write the
//! file, and has a descriptor of its own: an open file of the program's may have locks of its own
//! (`F_OFD_SETLK`), which do conflict. Only if the process may not open the file to read and write,
//! the open file that locks first is the holder.
//!
//! In: a descriptor that is about to lock, or about to be closed. Out: the holder, released locks.
//!
//! What may never happen: the process has a lock that the kernel would have released; a lock that a
//! child still has is released.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::descriptor_table::{DESCRIPTORS, OPENS};
use crate::file_identity::FileIdentity;
use crate::file_metadata::{link_of, shares_open_file};
use crate::held_files;
use crate::kernel_calls::{HERE, descriptor_limits, error, kernel, set_descriptor_limits};
use crate::locked_ranges::LockedRanges;
use crate::open_file::OpenFile;
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
    /// A descriptor of the open file that holds the process's locks on this file. `None`: there is
    /// none yet.
    pub fn known_holder(&mut self, descriptor: u64) -> Option<u64> {
        let own = self.table.get(descriptor)?.identity;
        let holds = |open: &OpenFile| {
            (open.has_process_locks || open.is_lock_holder) && open.identity.is_same_file(&own)
        };
        let found = self.table.opens().find(|(_, open)| holds(open)).map(|(index, _)| index);
        self.table.descriptors(found?).next()
    }

    /// Opens the file once more, for the process's locks alone. `None`: the process may not both
    /// read and write the file.
    pub fn open_holder(&mut self, descriptor: u64) -> Option<u64> {
        let link = link_of(descriptor);
        self.register_holder(descriptor, link.text().as_ptr().addr() as u64)
    }

    /// Registers such an open file during replay; the agent has the file itself.
    pub fn replay_holder(&mut self, descriptor: u64) -> Option<u64> {
        let holder = self.register_holder(descriptor, c"/dev/null".as_ptr().addr() as u64)?;
        let open = self.table.get(holder)?;
        (open.is_real, open.held) = (false, held_files::next_number());
        Some(holder)
    }

    /// Opens a path under a number that the kernel does not give to the program soon, and registers
    /// it there as another open file of the same file as `descriptor`.
    fn register_holder(&mut self, descriptor: u64, path: u64) -> Option<u64> {
        let of = self.table.index(descriptor)?;
        let flags = (libc::O_RDWR | libc::O_CLOEXEC) as u64;
        let found = kernel(libc::SYS_openat, [HERE, path, flags, 0, 0, 0]);
        let found = u64::try_from(found).ok()?;
        let number = under_high_number(found);
        kernel(libc::SYS_close, [found, 0, 0, 0, 0, 0]);
        let path = self.table.path_of(descriptor);
        let like = self.table.by_index(of);
        let (kind, identity, is_removed) = (like.kind, like.identity, like.is_removed);
        let Some(open) = self.table.insert(number) else {
            self.forbid_restart(format_args!("it has more files open than the interposer tracks"));
            return None;
        };
        (open.kind, open.identity, open.is_removed) = (kind, identity, is_removed);
        (open.flags, open.is_lock_holder) = (libc::O_RDWR, true);
        open.rename(path);
        note_lock();
        Some(number as u64)
    }

    /// Gives a holder another descriptor: the program wants this one.
    pub fn move_holder(&mut self, holder: u64) {
        let number = under_high_number(holder);
        if !self.table.duplicate(holder, number) || number < 0 {
            self.forbid_restart(format_args!("it has more descriptors than the interposer tracks"));
        }
        self.table.remove(holder);
    }

    /// Releases the range locks of the process on the file at a descriptor, before that descriptor
    /// is closed. Returns the number under which the agent holds their holder: the agent may
    /// release it when the close is recorded.
    pub fn drop_range_locks(&mut self, descriptor: u64) -> Option<u64> {
        if !IS_IN_USE.load(Relaxed) {
            return None;
        }
        let file = self.table.get(descriptor).map(|open| open.identity)?;
        self.drop_range_locks_of(Some(file))
    }

    /// Releases all range locks of the process, which ends.
    pub fn drop_all_range_locks(&mut self) {
        if IS_IN_USE.load(Relaxed) {
            self.drop_range_locks_of(None);
        }
    }

    /// `file`: only the locks on this file. Returns the number of the last holder that is closed.
    fn drop_range_locks_of(&mut self, file: Option<FileIdentity>) -> Option<u64> {
        let mut held = None;
        for index in 0..OPENS {
            let open = self.table.by_index(index);
            let is_it = (open.has_process_locks || open.is_lock_holder)
                && file.is_none_or(|it| it.is_same_file(&open.identity));
            let Some(descriptor) = self.table.descriptors(index).next().filter(|_| is_it) else {
                continue;
            };
            if self.is_live_for_unrecorded() {
                unlock_all(descriptor);
            }
            let open = self.table.by_index(index);
            (open.ranges, open.has_process_locks) = (LockedRanges::NONE, false);
            if open.is_lock_holder {
                held = Some(open.held).filter(|held| *held != 0);
                self.table.remove(descriptor);
                kernel(libc::SYS_close, [descriptor, 0, 0, 0, 0, 0]);
            }
        }
        held
    }

    /// Whether a descriptor was opened by this library for locks: the program does not know it.
    pub fn is_lock_holder(&mut self, descriptor: u64) -> bool {
        IS_IN_USE.load(Relaxed)
            && self.table.get(descriptor).is_some_and(|open| open.is_lock_holder)
    }
}

/// Duplicates a descriptor under the highest number that is free: if possible one beyond the soft
/// limit, which the program does not get and does not lack.
fn under_high_number(descriptor: u64) -> i64 {
    let [soft, hard] = descriptor_limits();
    let end = hard.min(DESCRIPTORS as u64);
    if soft < end {
        set_descriptor_limits([end, hard]);
    }
    let is_free = |number: &u64| {
        let flags = kernel(libc::SYS_fcntl, [*number, libc::F_GETFD as u64, 0, 0, 0, 0]);
        flags == error(libc::EBADF)
    };
    let highest = (0..end).rev().find(is_free).unwrap_or(0);
    let copy = [descriptor, libc::F_DUPFD_CLOEXEC as u64, highest, 0, 0, 0];
    let number = kernel(libc::SYS_fcntl, copy);
    if soft < end {
        set_descriptor_limits([soft, hard]);
    }
    number
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
