//! Working directory of the process, to which relative names refer (chdir(2)).
//!
//! In: `chdir` and `fchdir`, performed and recorded. Out: a later incarnation changes its directory
//! too, for programs that it starts. If the change fails during replay, the incarnation starts no
//! thread and no program. When it becomes live, the incarnation is in the recorded directory, under
//! the directory's present name.
//!
//! What may never happen: a relative name refers to another file than in the earlier incarnation.

use libc::c_long;

use crate::descriptor_calls::{bytes_of, identity_from};
use crate::descriptor_table::{FileIdentity, OpenFile, PATH_BYTES};
use crate::file_metadata::{identity_at, path_at};
use crate::session::{CallDescription, Path, Session, abort_replay, call_of, kernel, text};
use crate::syscalls::HERE;

const HEADER_BYTES: usize = size_of::<FileIdentity>();
const THIS: &std::ffi::CStr = c".";

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
                "its working directory {path} is another one by now, and it starts a thread or a program there"
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

impl Session {
    /// Handles a change of the directory.
    ///
    /// # Safety
    /// The arguments are those of `chdir` or, with a descriptor, of `fchdir`.
    pub unsafe fn change_directory(&mut self, number: c_long, arguments: [u64; 6]) -> Option<i64> {
        let is_name = number == libc::SYS_chdir;
        let descriptor = arguments[0] as u32 as u64;
        // SAFETY: a path of the program's.
        let name = if is_name { unsafe { text(arguments[0]) } } else { &[] };
        let words = [if is_name { 0 } else { descriptor }, 0, 0, 0, 0];
        let call = call_of(number, words, name);
        let (mut header, mut path) = ([0; HEADER_BYTES], [0; PATH_BYTES]);
        let result = if self.is_live() {
            let result = kernel(number, arguments);
            let place = (HERE, THIS.as_ptr().addr() as u64);
            let length = if result == 0 { path_at(place, &mut path) } else { 0 };
            header = bytes_of(&here().unwrap_or_default());
            self.note(call, result, &[&header, &path[..length]]);
            result
        } else {
            let about = CallDescription::Path("change of its working directory", name);
            let result = self.replay(call, about, &mut [&mut header, &mut path]);
            if result == 0 {
                let wanted = identity_from(&header);
                kernel(libc::SYS_chdir, [path.as_ptr().addr() as u64, 0, 0, 0, 0, 0]);
                let is_there = here().is_some_and(|it| it.is_same_file(&wanted));
                self.table.working_directory.is_elsewhere = !is_there;
            }
            result
        };
        if result == 0 {
            let length = path.iter().position(|byte| *byte == 0).unwrap_or(0);
            let open = &mut self.table.working_directory.open;
            open.rename(&path[..length]);
            (open.identity, open.is_removed) = (identity_from(&header), false);
        }
        Some(result)
    }
}

impl Session {
    /// Handles `getcwd`.
    ///
    /// # Safety
    /// The arguments are those of `getcwd`.
    pub unsafe fn working_directory_name(&mut self, arguments: [u64; 6]) -> Option<i64> {
        let [into, length, ..] = arguments;
        // SAFETY: the program's buffer.
        let room = unsafe { crate::session::bytes(into, length as usize) };
        let call = call_of(libc::SYS_getcwd, [length, 0, 0, 0, 0], &[]);
        if !self.is_live() {
            let about = CallDescription::Path("look at its working directory", &[]);
            return Some(self.replay(call, about, &mut [room]));
        }
        let result = kernel(libc::SYS_getcwd, arguments);
        self.note(call, result, &[&room[..result.max(0) as usize]]);
        Some(result)
    }
}

fn here() -> Option<FileIdentity> {
    identity_at((HERE, THIS.as_ptr().addr() as u64)).map(|(_, identity)| identity)
}
