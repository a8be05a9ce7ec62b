//! Calls that change the working directory, or ask for its name.
//!
//! In: `chdir`, `fchdir` and `getcwd`. Out: their results, recorded or replayed. What may never
//! happen: a replay changes to another directory than the recorded one and starts a program there.

use libc::c_long;

use crate::file_identity::{FileIdentity, PATH_BYTES, bytes_of, identity_from};
use crate::file_metadata::path_at;
use crate::kernel_calls::{HERE, bytes, kernel, text};
use crate::session::{CallDescription, Session, call_of};
use crate::working_directory::{THIS, here, is_here};

const HEADER_BYTES: usize = size_of::<FileIdentity>();

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
                self.table.working_directory.is_elsewhere = !is_here(&wanted);
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

    /// Handles `getcwd`.
    ///
    /// # Safety
    /// The arguments are those of `getcwd`.
    pub unsafe fn working_directory_name(&mut self, arguments: [u64; 6]) -> Option<i64> {
        let [into, length, ..] = arguments;
        // SAFETY: the program's buffer.
        let room = unsafe { bytes(into, length as usize) };
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
