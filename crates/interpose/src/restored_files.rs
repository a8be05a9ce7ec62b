//! Open files of a process that begins to be live, stands still for a checkpoint, or is restored
//! from one.
//!
//! In: the table of open files. Out: descriptors that are open on the same files as in the earlier
//! incarnation, at the same positions; or placeholders, while an image is taken and in a replay.
//!
//! What may never happen: a process continues with another file than it had.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use libc::c_long;

use crate::changed_files::FILE_SYSTEMS;
use crate::descriptor_calls::survives_exec;
use crate::descriptor_table::{DescriptorTable, OPENS};
use crate::file_identity::FileKind;
use crate::kernel_calls::{HERE, kernel};
use crate::messages::Path;
use crate::open_file::OpenFile;
use crate::restart_refusals::{self, abort_replay};
use crate::session::Session;
use crate::{change_times, file_metadata, held_files, origin, range_locks};

/// First number of files that the agent holds only while a checkpoint is taken.
const QUIESCED: u64 = 1 << 63;
/// The working directory's number among them.
const QUIESCED_DIRECTORY: u64 = QUIESCED + OPENS as u64;
const NULL: &std::ffi::CStr = c"/dev/null";
/// True if a thread or a child began while this process replayed.
static HAS_OTHERS: AtomicBool = AtomicBool::new(false);

impl DescriptorTable {
    /// Path of the file at a descriptor, for messages.
    pub fn path_of(&mut self, descriptor: u64) -> &'static [u8] {
        let path = self.get(descriptor).map_or(&[][..], |open| open.path());
        // SAFETY: the table is a static, and only this session changes it; the caller does not
        // change it while it uses the path.
        unsafe { std::slice::from_raw_parts(path.as_ptr(), path.len()) }
    }

    /// Passes every open file and the working directory to the agent before a checkpoint, and
    /// leaves only placeholders in the process. A restore of the checkpoint image then does not
    /// depend on what happens to the files meanwhile. False: the agent cannot hold a file, and
    /// nothing has changed.
    pub fn quiesce(&mut self) -> bool {
        if !self.working_directory.leave(QUIESCED_DIRECTORY) {
            return false;
        }
        for index in 0..OPENS {
            let open = self.by_index(index);
            // A placeholder of an earlier checkpoint stays a placeholder.
            open.is_quiesced = false;
            if !open.is_real || self.uses(index) == 0 {
                continue;
            }
            let descriptor = self.descriptors(index).next();
            let is_kept = descriptor.is_none_or(|it| held_files::keep(it, QUIESCED + index as u64));
            let placeholder =
                kernel(libc::SYS_openat, [HERE, NULL.as_ptr().addr() as u64, 2, 0, 0, 0]);
            if !is_kept || placeholder < 0 {
                self.resume();
                return false;
            }
            let open = self.by_index(index);
            (open.is_real, open.is_quiesced) = (false, true);
            self.replace_descriptors(index, placeholder as u64);
        }
        true
    }

    /// Takes the open files and the working directory back after a checkpoint, in the same
    /// incarnation.
    pub fn resume(&mut self) {
        self.working_directory.come_back(QUIESCED_DIRECTORY);
        for index in 0..OPENS {
            let is_quiesced = std::mem::take(&mut self.by_index(index).is_quiesced);
            if self.uses(index) == 0 || !is_quiesced {
                continue;
            }
            let number = QUIESCED + index as u64;
            match held_files::get(number) {
                Some(found) => {
                    self.by_index(index).is_real = true;
                    self.replace_descriptors(index, found);
                }
                None => self.restore(index),
            }
            held_files::release(number);
        }
    }

    /// Makes all descriptors of an open file refer to `found`, and closes `found` if it is none of
    /// them.
    fn replace_descriptors(&mut self, index: usize, found: u64) {
        for descriptor in self.descriptors(index).filter(|descriptor| *descriptor != found) {
            let closes = kernel(libc::SYS_fcntl, [descriptor, libc::F_GETFD as u64, 0, 0, 0, 0]);
            let flag = if closes & 1 == 1 { libc::O_CLOEXEC } else { 0 };
            kernel(libc::SYS_dup3, [found, descriptor, flag as u64, 0, 0, 0]);
        }
        if self.descriptors(index).all(|descriptor| descriptor != found) {
            kernel(libc::SYS_close, [found, 0, 0, 0, 0, 0]);
        }
    }

    /// Reopens every open file for a thread or a child that begins during replay.
    pub fn share(&mut self) {
        HAS_OTHERS.store(true, Relaxed);
        self.working_directory.check();
        for index in 0..OPENS {
            if self.uses(index) > 0 {
                self.reopen_to_share(index);
            }
        }
    }

    /// Reopens a file that the program opens during replay, if a thread or a child may use its
    /// descriptor.
    pub fn reopen_to_share(&mut self, index: usize) {
        if HAS_OTHERS.load(Relaxed) && self.try_reopen_file(index) {
            let open = self.by_index(index);
            if open.is_returned && open.appends() {
                return;
            }
            let offset = open.offset as u64;
            if let Some(descriptor) = self.descriptors(index).next() {
                kernel(libc::SYS_lseek, [descriptor, offset, libc::SEEK_SET as u64, 0, 0, 0]);
            }
        }
    }

    /// Restores those open files for which `is_wanted` is true.
    pub fn restore_those(&mut self, is_wanted: impl Fn(&OpenFile) -> bool) {
        for index in 0..OPENS {
            if self.uses(index) > 0 && is_wanted(self.by_index(index)) {
                self.restore(index);
            }
        }
    }

    /// Reopens one open file at its position. The process ends if the file was locked and the lock
    /// is lost.
    pub fn restore(&mut self, index: usize) {
        let open = self.by_index(index);
        if open.is_locked() && !open.is_real && !is_held(open.held) {
            let path = Path(open.path());
            abort_replay(format_args!(
                "it was killed while it held a lock on {path}, which others may have had since"
            ));
        }
        self.reopen_file(index);
        let open = self.by_index(index);
        let offset = open.offset as u64;
        let has_position =
            matches!(open.kind, FileKind::File | FileKind::Directory | FileKind::Virtual)
                && open.flags & libc::O_PATH == 0;
        let (held, is_returned) = (open.held, open.is_returned);
        let first = self.descriptors(index).next();
        if let Some(descriptor) = first.filter(|_| held != 0 && !is_returned) {
            held_files::keep(descriptor, held);
        }
        let is_kept = is_returned && self.kept_offset == Some(index);
        if let Some(descriptor) = first.filter(|_| has_position && !is_kept) {
            kernel(libc::SYS_lseek, [descriptor, offset, libc::SEEK_SET as u64, 0, 0, 0]);
            self.check_listing(index, descriptor);
        }
    }

    /// Ends the process within the listing of a directory that has changed since it was opened, if
    /// its positions count names: after a name is removed, the position is that of another name.
    fn check_listing(&mut self, index: usize, descriptor: u64) {
        let open = self.by_index(index);
        if open.kind == FileKind::Directory
            && open.offset > 0
            && !open.has_listed_all
            && counts_names(descriptor)
            && !is_unchanged(open, descriptor)
        {
            let path = Path(open.path());
            abort_replay(format_args!(
                "it was listing {path}, and may get other names now: its file system has no \
                 lasting positions"
            ));
        }
    }

    /// Makes a file that was reopened during replay ([`Session::share`]) the open file that the
    /// agent holds, if the agent holds one: the locks of the earlier incarnation belong to that
    /// open file, and would conflict with locks of another one.
    pub fn take_held(&mut self, index: usize) {
        let open = self.by_index(index);
        if !open.is_real {
            return;
        }
        if let Some(found) = held_file(open) {
            open.is_returned = true;
            self.replace_descriptors(index, found);
        }
    }

    /// Reopens a file whose descriptors are placeholders. The process ends if the file has been
    /// removed or replaced.
    pub fn reopen_file(&mut self, index: usize) {
        if !self.try_reopen_file(index) {
            let path = Path(self.by_index(index).path());
            abort_replay(format_args!(
                "{path}, which it has open, is not there any more, or is another file by now"
            ));
        }
    }

    /// Reopens a file whose descriptors are placeholders. False: the file has been removed or
    /// replaced.
    pub fn try_reopen_file(&mut self, index: usize) -> bool {
        let open = self.by_index(index);
        if open.is_real {
            return true;
        }
        let Some(found) = reopen(open) else { return self.reopen_in_place(index) };
        open.is_real = true;
        self.replace_descriptors(index, found as u64);
        true
    }

    /// Reopens a file under the number of its first placeholder: the process may have as many
    /// descriptors as it is allowed. False: that was not the reason.
    fn reopen_in_place(&mut self, index: usize) -> bool {
        let Some(first) = self.descriptors(index).next() else { return false };
        let flags = kernel(libc::SYS_fcntl, [first, libc::F_GETFD as u64, 0, 0, 0, 0]) as u64;
        kernel(libc::SYS_close, [first, 0, 0, 0, 0, 0]);
        let found = reopen(self.by_index(index));
        let null = [HERE, NULL.as_ptr().addr() as u64, 2, 0, 0, 0];
        let number = found.unwrap_or_else(|| kernel(libc::SYS_openat, null)) as u64;
        if number != first {
            kernel(libc::SYS_dup3, [number, first, 0, 0, 0, 0]);
            kernel(libc::SYS_close, [number, 0, 0, 0, 0, 0]);
        }
        kernel(libc::SYS_fcntl, [first, libc::F_SETFD as u64, flags, 0, 0, 0]);
        self.by_index(index).is_real = found.is_some();
        if found.is_some() {
            self.replace_descriptors(index, first);
        }
        found.is_some()
    }
}

/// Whether positions of a directory are numbers of names: of ramfs, hugetlbfs, of an overlay of two
/// directories, and of tmpfs before Linux 6.6.
fn counts_names(directory: u64) -> bool {
    const RAMFS: c_long = 0x8584_58f6;
    const STABLE_SINCE: (u32, u32) = (6, 6);
    match change_times::kind_of(directory) {
        Some(RAMFS | libc::HUGETLBFS_MAGIC | libc::OVERLAYFS_SUPER_MAGIC) => true,
        Some(libc::TMPFS_MAGIC) => change_times::kernel_version() < STABLE_SINCE,
        _ => false,
    }
}

/// Whether the agent holds an open file under this number.
fn is_held(number: u64) -> bool {
    let found = if number == 0 { None } else { held_files::get(number) };
    found.iter().for_each(|found| _ = kernel(libc::SYS_close, [*found, 0, 0, 0, 0, 0]));
    found.is_some()
}

/// A descriptor of the open file that the agent holds, or of the file under its present name if
/// that is the same file.
fn reopen(open: &mut OpenFile) -> Option<i64> {
    let held = if open.held == 0 { None } else { held_file(open) };
    open.is_returned = held.is_some();
    if let Some(found) = held {
        return Some(found as i64);
    }
    if open.path().is_empty() || open.is_removed {
        return None;
    }
    let not = libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC;
    let flags = (open.flags & !not | libc::O_CLOEXEC) as u64;
    let path = open.path_pointer().addr() as u64;
    let found = kernel(libc::SYS_openat, [HERE, path, flags, 0, 0, 0]);
    if found < 0 {
        return None;
    }
    if open.kind != FileKind::Virtual && !is_of(open, found as u64) {
        kernel(libc::SYS_close, [found as u64, 0, 0, 0, 0, 0]);
        return None;
    }
    Some(found)
}

/// Whether the directory at the descriptor has the names that it had when it was opened.
fn is_unchanged(open: &OpenFile, descriptor: u64) -> bool {
    file_metadata::identity_of(descriptor).is_some_and(|(_, now)| {
        (now.modified, now.changed) == (open.identity.modified, open.identity.changed)
    })
}

/// A descriptor of the open file that the agent holds for this one. The process ends if the agent
/// holds another file under its number.
fn held_file(open: &OpenFile) -> Option<u64> {
    let found = held_files::get(open.held)?;
    if !is_of(open, found) {
        let path = Path(open.path());
        abort_replay(format_args!(
            "{path}, which it has open, is not there any more, or is another file by now"
        ));
    }
    Some(found)
}

/// Whether the descriptor is that of this file.
fn is_of(open: &OpenFile, descriptor: u64) -> bool {
    file_metadata::identity_of(descriptor)
        .is_some_and(|(_, identity)| identity.is_same_file(&open.identity))
}

impl Session {
    /// Passes an open file to the agent, so that its locks and its content outlive this process.
    pub fn hold(&mut self, index: usize) {
        let open = self.table.by_index(index);
        if open.held != 0 {
            return;
        }
        open.held = held_files::next_number();
        let number = open.held;
        // An earlier incarnation that was killed within this call may have passed the file to the
        // agent already.
        if !self.is_live() {
            return self.table.take_held(index);
        }
        if !self.table.try_reopen_file(index) {
            return;
        }
        let descriptor = self.table.descriptors(index).next();
        if descriptor.is_some_and(|descriptor| !held_files::keep(descriptor, number)) {
            let path = Path(self.table.by_index(index).path());
            restart_refusals::forbid_restart(format_args!("nobody holds {path} for it"));
        }
    }

    /// Notes in a replay that the agent holds an open file, as it did before. Other than by
    /// [`Session::hold`], the process does not go live.
    pub fn hold_again(&mut self, index: usize) {
        let open = self.table.by_index(index);
        if open.held == 0 {
            open.held = held_files::next_number();
            self.table.take_held(index);
        }
    }

    /// Makes the agent hold the files again that it has released for a program that this process
    /// could not execute.
    pub fn hold_after_failed_exec(&mut self) {
        for index in 0..OPENS {
            let open = self.table.by_index(index);
            let held = open.held;
            let is_released = open.uses > 0 && open.is_real && held != 0;
            let descriptor = self.table.descriptors(index).next().filter(|_| is_released);
            if descriptor.is_some_and(|descriptor| !held_files::keep(descriptor, held)) {
                let path = Path(self.table.by_index(index).path());
                restart_refusals::forbid_restart(format_args!("nobody holds {path} for it"));
            }
        }
    }

    /// Releases the locks of an open file whose last descriptor is about to be closed. Returns the
    /// number under which the agent holds the file: the agent may release the file when the close
    /// is recorded, because a kill before that leaves a process that still had the file.
    pub fn unlock_held(&mut self, descriptor: u64) -> Option<u64> {
        let index = self.table.index(descriptor).filter(|at| self.table.uses(*at) == 1)?;
        if self.table.by_index(index).held == 0 || !self.is_live_for_unrecorded() {
            return None;
        }
        let open = self.table.by_index(index);
        if open.is_locked() && range_locks::is_kept_by_child(descriptor) {
            let path = Path(open.path());
            restart_refusals::forbid_restart(format_args!(
                "a program that it has started keeps its lock on {path}"
            ));
        } else {
            kernel(libc::SYS_flock, [descriptor, libc::LOCK_UN as u64, 0, 0, 0, 0]);
            if open.is_locked() {
                range_locks::unlock_all(descriptor);
            }
        }
        Some(open.held)
    }

    /// Reports a file that only the agent could give back, because it has no name or a lock, and
    /// that stays open in the program that this process executes: the program begins without the
    /// agent's copy.
    pub fn look_for_kept_by_program(&mut self) {
        for index in 0..OPENS {
            let is_kept = self.is_kept_by_program(index);
            let open = self.table.by_index(index);
            if is_kept && open.held != 0 && (open.is_removed || open.is_locked()) {
                let path = Path(open.path());
                restart_refusals::forbid_restart(format_args!(
                    "it executes a program that gets {path}, which has a lock or no name"
                ));
            }
        }
    }

    /// Whether an open file stays open in the program that this process executes. Locks of the
    /// process stay as well unless a descriptor of their file is closed, so their holder does.
    fn is_kept_by_program(&mut self, index: usize) -> bool {
        if !self.table.by_index(index).is_lock_holder {
            return self.table.descriptors(index).any(survives_exec);
        }
        let file = self.table.by_index(index).identity;
        let is_kept = (0..OPENS).filter(|other| *other != index).all(|other| {
            !self.table.by_index(other).identity.is_same_file(&file)
                || self.table.descriptors(other).all(survives_exec)
        });
        if is_kept && let Some(descriptor) = self.table.descriptors(index).next() {
            kernel(libc::SYS_fcntl, [descriptor, libc::F_SETFD as u64, 0, 0, 0, 0]);
        }
        is_kept
    }

    /// Makes the agent release all open files: the process executes another program.
    pub fn release_all_held(&mut self) {
        self.check_mapped_files();
        if self.is_live_for_unrecorded() {
            let held = self.table.opens().filter(|(_, open)| open.held != 0);
            held.for_each(|(_, open)| held_files::release(open.held));
        }
    }
}

impl Session {
    /// Ends a process that goes on on another node without what it has written.
    pub fn check_changed_files(&self) {
        if !origin::is_other_node() {
            return;
        }
        let changed = &self.table.changed_files;
        if let Some(path) = changed.left_behind() {
            let path = Path(path);
            abort_replay(format_args!(
                "{path}, which it has changed on another node, is on a file system of that node"
            ));
        }
        if changed.has_more {
            abort_replay(format_args!(
                "it has changed files on more than {FILE_SYSTEMS} file systems of another node"
            ));
        }
    }
}
