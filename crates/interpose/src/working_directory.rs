//! Working directory of the process, to which relative names refer (chdir(2)).
//!
//! In: `chdir` and `fchdir`, performed and recorded. Out: a later incarnation changes its directory
//! too, for programs that it starts. If the change fails during replay, the incarnation starts no
//! thread and no program. When it becomes live, the incarnation is in the recorded directory, under
//! the directory's present name. While a checkpoint is taken the process is in the root directory:
//! CRIU enters the directory of an image by its name, which may have gone or changed meanwhile.
//!
//! What may never happen: a relative name refers to another file than in the earlier incarnation.

use crate::file_identity::FileIdentity;
use crate::file_metadata::identity_at;
use crate::held_files;
use crate::kernel_calls::{HERE, kernel};
use crate::messages::Path;
use crate::open_file::OpenFile;
use crate::restart_refusals::abort_replay;

/// The name of the working directory.
pub const THIS: &std::ffi::CStr = c".";
const ROOT: &std::ffi::CStr = c"/";

/// Working directory of the process. Of `open` only name and identity are used; an empty name means
/// that the program has not changed the directory.
pub struct WorkingDirectory {
    pub open: OpenFile,
    /// True during replay if a change to the recorded directory has failed.
    pub is_elsewhere: bool,
    /// True while the process is in the root directory for a checkpoint.
    pub has_left: bool,
}

impl WorkingDirectory {
    /// Leaves the directory for a checkpoint; the agent holds it under `number`. A directory that
    /// the program has not chosen stays. False: the agent cannot hold it, and nothing has changed.
    pub fn leave(&mut self, number: u64) -> bool {
        self.has_left = false;
        if self.open.path().is_empty() {
            return true;
        }
        let flags = (libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC) as u64;
        let here = kernel(libc::SYS_openat, [HERE, THIS.as_ptr().addr() as u64, flags, 0, 0, 0]);
        let Ok(here) = u64::try_from(here) else { return false };
        self.has_left = held_files::keep(here, number) && enter(ROOT.as_ptr().addr());
        kernel(libc::SYS_close, [here, 0, 0, 0, 0, 0]);
        self.has_left
    }

    /// Returns to the directory after a checkpoint, in the same incarnation.
    pub fn come_back(&mut self, number: u64) {
        if !std::mem::take(&mut self.has_left) {
            return;
        }
        let held = held_files::get(number);
        let is_back = held.is_some_and(|held| {
            let is_entered = kernel(libc::SYS_fchdir, [held, 0, 0, 0, 0, 0]) == 0;
            kernel(libc::SYS_close, [held, 0, 0, 0, 0, 0]);
            is_entered
        });
        held_files::release(number);
        if !is_back {
            self.restore();
        }
    }

    /// Enters the directory that a process restored from a checkpoint has left, for programs that
    /// it starts in its replay.
    pub fn enter_in_replay(&mut self) {
        if std::mem::take(&mut self.has_left) {
            let wanted = self.open.identity;
            self.is_elsewhere = !(enter(self.open.path_pointer().addr()) && is_here(&wanted));
        }
    }

    /// Ends the process if its directory is not the recorded one, before a thread or a program can
    /// use the directory.
    pub fn check(&self) {
        if self.is_elsewhere {
            let path = Path(self.open.path());
            abort_replay(format_args!(
                "its working directory {path} is another one by now, and it starts a thread or a \
                 program there"
            ));
        }
    }

    /// Changes to the recorded directory, when the process becomes live.
    pub fn restore(&mut self) {
        if self.open.path().is_empty() {
            return;
        }
        let is_there = enter(self.open.path_pointer().addr());
        if !is_there || !is_here(&self.open.identity) || self.open.is_removed {
            let path = Path(self.open.path());
            abort_replay(format_args!(
                "its working directory {path} is gone, or is another one by now"
            ));
        }
    }
}

/// Identity of the present working directory.
pub fn here() -> Option<FileIdentity> {
    identity_at((HERE, THIS.as_ptr().addr() as u64)).map(|(_, identity)| identity)
}

/// Whether the present working directory is this one.
pub fn is_here(wanted: &FileIdentity) -> bool {
    here().is_some_and(|now| now.is_same_file(wanted))
}

/// Changes to the directory with the name at this address. False: that has failed.
fn enter(name: usize) -> bool {
    kernel(libc::SYS_chdir, [name as u64, 0, 0, 0, 0, 0]) == 0
}
