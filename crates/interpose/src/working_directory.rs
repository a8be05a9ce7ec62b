//! Working directory of the process, to which relative names refer (chdir(2)).
//!
//! In: `chdir` and `fchdir`, performed and recorded. Out: a later incarnation changes its directory
//! too, for programs that it starts. If the change fails during replay, the incarnation starts no
//! thread and no program. When it becomes live, the incarnation is in the recorded directory, under
//! the directory's present name.
//!
//! What may never happen: a relative name refers to another file than in the earlier incarnation.

use crate::file_identity::FileIdentity;
use crate::file_metadata::identity_at;
use crate::kernel_calls::{HERE, kernel};
use crate::messages::Path;
use crate::open_file::OpenFile;
use crate::restart_refusals::abort_replay;

/// The name of the working directory.
pub const THIS: &std::ffi::CStr = c".";

/// Working directory of the process. Of `open` only name and identity are used; an empty name means
/// that the program has not changed the directory.
pub struct WorkingDirectory {
    pub open: OpenFile,
    /// True during replay if a change to the recorded directory has failed.
    pub is_elsewhere: bool,
}

impl WorkingDirectory {
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
        let place = self.open.path_pointer().addr() as u64;
        let is_there = kernel(libc::SYS_chdir, [place, 0, 0, 0, 0, 0]) == 0;
        let is_it = here().is_some_and(|now| now.is_same_file(&self.open.identity));
        if !is_there || !is_it || self.open.is_removed {
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
