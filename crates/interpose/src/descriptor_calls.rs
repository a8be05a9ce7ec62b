//! Calls that open files, duplicate their descriptors, and close them.
//!
//! In: arguments of such a call. Out: its result, noted in the record or taken from the record, and
//! the changed descriptor table.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use landbridge_proto::nondeterminism::{FileCall, PRECONDITION_WORDS};
use libc::{c_int, c_long};

use crate::change_times::{UNSURE, mark_at};
use crate::descriptor_table::DESCRIPTORS;
use crate::file_identity::{FileIdentity, FileKind, PATH_BYTES, bytes_of, identity_from};
use crate::file_metadata::{self, identity_of, is_exempt, is_exempt_name, is_virtual, path_of};
use crate::held_files;
use crate::kernel_calls::{descriptor_limits, error, kernel, text};
use crate::messages::Path;
use crate::open_file::OpenFile;
use crate::process_calls;
use crate::restart_refusals::abort_replay;
use crate::session::{CallDescription, EffectOutcome, Session, call_of};

/// True if this process has tried to execute another program.
static HAS_EXECUTED: AtomicBool = AtomicBool::new(false);

/// Bytes of a recorded open file before its path.
const HEADER_BYTES: usize = 1 + 2 + size_of::<FileIdentity>();

/// Result of a successful `open`.
struct OpenedFile {
    kind: FileKind,
    identity: FileIdentity,
    length: usize,
    path: [u8; PATH_BYTES],
}

impl Session {
    /// Handles an open. `None`: the call is let through.
    ///
    /// # Safety
    /// The arguments are those of an open.
    pub unsafe fn open(
        &mut self,
        number: c_long,
        directory: u64,
        path: u64,
        flags: u64,
        mode: u64,
    ) -> Option<i64> {
        // SAFETY: a path of the program's.
        let name = unsafe { text(path) };
        if is_exempt_name(name) {
            return None;
        }
        let flags = flags as c_int;
        // A call that creates no file leaves an arbitrary value in the register of the mode.
        let creates = flags & (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) != 0;
        let mode = if creates { mode } else { 0 };
        let call = call_of(number, [directory, flags as u64, mode, 0, 0], name);
        let about = CallDescription::Path("open", name);
        if self.is_live() {
            let arguments = [directory, path, flags as u64, mode, 0, 0];
            // SAFETY: the caller's promise.
            let perform = || unsafe { process_calls::perform(libc::SYS_openat, arguments) };
            let precondition = |_| announced((directory, path));
            let outcome = |before| outcome_of((directory, path), flags, before);
            let changes = creates || flags & libc::O_TRUNC != 0;
            let result = match changes {
                true => self.effect(call, about, precondition, outcome, perform),
                false => perform(),
            };
            let opened = OpenedFile::of(result);
            let header = opened.header();
            self.note(call, result, &[&header[..], opened.path()]);
            if result >= 0 {
                if opened.kind == FileKind::Other && file_metadata::passes_on(result as u64) {
                    self.forbid_restart(format_args!(
                        "it opens {}, which keeps nothing",
                        Path(name)
                    ));
                }
                self.register(result, flags, &opened, true);
                self.hold_if(denies_reopening(flags, mode), result);
            }
            return Some(result);
        }
        let mut header = [0; HEADER_BYTES];
        let mut opened = OpenedFile::none();
        let into = &mut [&mut header[..], &mut opened.path[..]];
        let result = self.replay(call, about, into);
        opened.take_header(&header);
        if result >= 0 {
            self.replay_open(directory, path, flags, result, &opened);
            if denies_reopening(flags, mode)
                && let Some(index) = self.table.index(result as u64)
            {
                self.hold_again(index);
            }
        }
        Some(result)
    }

    /// Opens the recorded descriptor during replay: on the same file if that file still exists,
    /// else on a placeholder.
    fn replay_open(
        &mut self,
        directory: u64,
        path: u64,
        flags: c_int,
        number: i64,
        opened: &OpenedFile,
    ) {
        let not = libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC;
        let harmless = (flags & !not) as u64;
        let closes = flags & libc::O_CLOEXEC;
        if opened.kind == FileKind::Other {
            let found = kernel(libc::SYS_openat, [directory, path, harmless, 0, 0, 0]);
            // SAFETY: the program's path.
            let name = unsafe { text(path) };
            if found < 0 || !is_same_device(found as u64, opened) {
                let name = Path(name);
                abort_replay(format_args!(
                    "{name}, which it had open, cannot be opened again ({found}), or is another \
                     device or link by now"
                ));
            }
            move_descriptor(found, number, closes);
            return;
        }
        let placeholder = (libc::O_RDWR | libc::O_CLOEXEC) as u64;
        let null = c"/dev/null".as_ptr().addr() as u64;
        let found =
            kernel(libc::SYS_openat, [crate::kernel_calls::HERE, null, placeholder, 0, 0, 0]);
        move_descriptor(found, number, closes);
        self.register(number, flags, opened, false);
        self.table
            .index(number as u64)
            .into_iter()
            .for_each(|index| self.table.reopen_to_share(index));
    }

    fn register(&mut self, number: i64, flags: c_int, opened: &OpenedFile, is_real: bool) {
        if opened.kind == FileKind::Other {
            self.table.remove(number as u64);
            return;
        }
        let since = self.guard.since();
        let append_end = self.table.end_of(&opened.identity);
        let Some(open) = self.table.insert(number) else {
            self.forbid_restart(format_args!("it has more files open than the interposer tracks"));
            return;
        };
        (open.kind, open.flags, open.identity) = (opened.kind, flags, opened.identity);
        open.append_end = append_end;
        open.is_real = is_real;
        open.rename(opened.path());
        let is_changed = open.kind == FileKind::File && open.may_write();
        open.is_recorded = open.kind == FileKind::Virtual
            || open.may_write()
            || opened.identity.modified.max(opened.identity.changed) >= since;
        if flags & libc::O_TMPFILE == libc::O_TMPFILE {
            open.is_removed = true;
            self.hold_if(true, number);
        } else if is_changed {
            self.table.changed_files.note(&opened.identity, opened.path());
        }
    }

    fn hold_if(&mut self, is_held: bool, descriptor: i64) {
        let index = self.table.index(descriptor as u64).filter(|_| is_held);
        index.into_iter().for_each(|index| self.hold(index));
    }

    pub fn close(&mut self, descriptor: u64) -> Option<i64> {
        self.table.get(descriptor)?;
        if self.is_lock_holder(descriptor) {
            return Some(error(libc::EBADF));
        }
        let call = call_of(libc::SYS_close, [descriptor, 0, 0, 0, 0], &[]);
        let perform = || kernel(libc::SYS_close, [descriptor, 0, 0, 0, 0, 0]);
        Some(self.close_by(call, "close", descriptor, perform))
    }

    /// Handles a call that closes an open descriptor. The agent releases what it holds of the file
    /// once the call is recorded: a kill before that leaves a process that still had the file.
    fn close_by(
        &mut self,
        call: FileCall,
        what: &'static str,
        descriptor: u64,
        perform: impl FnOnce() -> i64,
    ) -> i64 {
        let holder = self.drop_range_locks(descriptor);
        let held = self.unlock_held(descriptor);
        let was_live = self.was_live();
        let is_live = self.is_live_except_files();
        let recorded = (!is_live).then(|| self.replay_on(call, what, descriptor, &mut []));
        // A file that is closed here need not be restored when the process goes live.
        self.table.remove(descriptor);
        if is_live && !was_live {
            self.restore_files();
        }
        let result = perform();
        if is_live {
            self.note(call, result, &[]);
        }
        [holder, held].into_iter().flatten().for_each(held_files::release);
        recorded.unwrap_or(result)
    }

    /// Closes the descriptors of a range that the recorded thread has opened, each as by `close`,
    /// and then all others. `None`: the call is let through.
    pub fn close_range(&mut self, first: u64, last: u64, flags: u64) -> Option<i64> {
        const UNSHARE: u64 = 2;
        let (first, last) = (first as u32 as u64, last as u32 as u64);
        // With another flag the call closes nothing, or fails.
        if flags & !UNSHARE != 0 || first > last {
            return None;
        }
        if flags == UNSHARE {
            let result = kernel(libc::SYS_unshare, [libc::CLONE_FILES as u64, 0, 0, 0, 0, 0]);
            if result < 0 {
                return Some(result);
            }
        }
        let mut rest = first;
        for descriptor in first..=last.min(DESCRIPTORS as u64 - 1) {
            if !self.is_lock_holder(descriptor) {
                self.close(descriptor);
                continue;
            }
            if rest < descriptor {
                kernel(libc::SYS_close_range, [rest, descriptor - 1, 0, 0, 0, 0]);
            }
            rest = descriptor + 1;
        }
        if rest <= last {
            return Some(kernel(libc::SYS_close_range, [rest, last, 0, 0, 0, 0]));
        }
        Some(0)
    }

    /// Handles a duplication whose new descriptor the kernel chooses.
    pub fn duplicate(&mut self, number: c_long, arguments: [u64; 6]) -> Option<i64> {
        let [from, command, ..] = arguments;
        self.table.get(from)?;
        let call = call_of(number, [from, command, 0, 0, 0], &[]);
        let closes = command == libc::F_DUPFD_CLOEXEC as u64 && number == libc::SYS_fcntl;
        let result = if self.is_live() {
            self.observe(call, || kernel(number, arguments), |_| [&[], &[]])
        } else {
            let result = { self.replay_on(call, "dup", from, &mut []) };
            if result >= 0 {
                let flag = if closes { libc::O_CLOEXEC } else { 0 };
                move_descriptor(kernel(number, arguments), result, flag);
            }
            result
        };
        if result >= 0 && !self.table.duplicate(from, result) {
            self.forbid_restart(format_args!("it has more descriptors than the interposer tracks"));
        }
        Some(result)
    }

    /// Handles a duplication whose new descriptor the program chooses. `None`: the call is let
    /// through.
    pub fn duplicate_to(&mut self, number: c_long, arguments: [u64; 6]) -> Option<i64> {
        let (from, to) = (arguments[0], arguments[1] as u32 as u64);
        let is_valid = number == libc::SYS_dup2 || arguments[2] & !(libc::O_CLOEXEC as u64) == 0;
        let is_open = kernel(libc::SYS_fcntl, [from, libc::F_GETFD as u64, 0, 0, 0, 0]) >= 0;
        if !is_valid || !is_open || from as u32 as u64 == to || to >= descriptor_limits()[0] {
            // The call fails, or changes nothing.
            return None;
        }
        if self.is_lock_holder(to) {
            self.move_holder(to);
        }
        let has_to = self.table.index(to);
        self.table.index(from).or(has_to)?;
        let result = match has_to {
            Some(_) => {
                let flags = if number == libc::SYS_dup2 { 0 } else { arguments[2] };
                let call = call_of(libc::SYS_dup2, [from, to, flags, 0, 0], &[]);
                self.close_by(call, "dup", to, || kernel(number, arguments))
            }
            None => kernel(number, arguments),
        };
        if result >= 0 && !self.table.duplicate(from, to as i64) {
            self.forbid_restart(format_args!("it has more descriptors than the interposer tracks"));
        }
        Some(result)
    }

    /// Handles `fcntl`. `None`: the call is let through.
    ///
    /// # Safety
    /// The arguments are those of `fcntl`.
    pub unsafe fn control(&mut self, arguments: [u64; 6]) -> Option<i64> {
        let [descriptor, command, ..] = arguments;
        self.table.get(descriptor)?;
        let call = call_of(libc::SYS_fcntl, [descriptor, command, 0, 0, 0], &[]);
        match command as c_int {
            libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => self.duplicate(libc::SYS_fcntl, arguments),
            libc::F_GETFL if self.is_live() => {
                Some(self.observe(call, || kernel(libc::SYS_fcntl, arguments), |_| [&[], &[]]))
            }
            libc::F_GETFL => Some(self.replay_on(call, "fcntl", descriptor, &mut [])),
            libc::F_SETFL => self.set_flags(arguments),
            // SAFETY: the caller's promise.
            libc::F_SETLK | libc::F_SETLKW | libc::F_OFD_SETLK | libc::F_OFD_SETLKW => unsafe {
                self.lock_range(arguments)
            },
            // SAFETY: the caller's promise.
            libc::F_GETLK | libc::F_OFD_GETLK => unsafe { self.ask_for_lock(arguments) },
            _ => None,
        }
    }

    /// Handles `fcntl` with `F_SETFL`. A file that the agent holds keeps the flags that it had when
    /// the last incarnation was killed.
    fn set_flags(&mut self, arguments: [u64; 6]) -> Option<i64> {
        const CHANGED: c_int =
            libc::O_APPEND | libc::O_DIRECT | libc::O_NOATIME | libc::O_NONBLOCK | libc::O_ASYNC;
        let [descriptor, command, wanted, ..] = arguments;
        let wanted = wanted as c_int & CHANGED;
        let call = call_of(libc::SYS_fcntl, [descriptor, command, wanted as u64, 0, 0], &[]);
        let perform = || kernel(libc::SYS_fcntl, arguments);
        let result = if self.is_live() {
            self.observe(call, perform, |_| [&[], &[]])
        } else {
            let result = { self.replay_on(call, "change of flags", descriptor, &mut []) };
            // A thread or a child may use the file; a placeholder gets the flags once it is live.
            if result == 0 && self.table.get(descriptor)?.is_real {
                perform();
            }
            result
        };
        let open = self.table.get(descriptor).filter(|_| result == 0);
        if let Some(open) = open {
            open.flags = open.flags & !CHANGED | wanted;
        }
        Some(result)
    }

    /// Adds the files that are open when the program begins or has executed another program.
    pub fn adopt(&mut self) {
        for descriptor in 0..DESCRIPTORS as u64 {
            let opened = OpenedFile::of(descriptor as i64);
            if opened.kind == FileKind::Other {
                continue;
            }
            let flags =
                kernel(libc::SYS_fcntl, [descriptor, libc::F_GETFL as u64, 0, 0, 0, 0]) as c_int;
            self.register(descriptor as i64, flags, &opened, true);
            let current = [descriptor, 0, libc::SEEK_CUR as u64, 0, 0, 0];
            let offset = kernel(libc::SYS_lseek, current);
            if let Some(open) = self.table.get(descriptor) {
                open.offset = offset.max(0);
            }
        }
    }

    /// Notes at the next call that the process goes on after it has tried to execute a program.
    #[inline]
    pub fn look_for_failed_exec(&mut self) {
        if HAS_EXECUTED.load(Relaxed) {
            HAS_EXECUTED.store(false, Relaxed);
            self.hold_after_failed_exec();
        }
    }

    /// Prepares the files for another program that this process executes: the program finds its
    /// files as the kernel has them.
    pub fn before_exec(&mut self) {
        if self.is_live_for_unrecorded() {
            self.look_for_kept_by_program();
            // This program goes on only if the call fails.
            HAS_EXECUTED.store(true, Relaxed);
            return self.release_all_held();
        }
        self.table.working_directory.check();
        for index in 0..crate::descriptor_table::OPENS {
            let Some(descriptor) = self.table.descriptors(index).next() else { continue };
            if self.table.try_reopen_file(index) {
                let offset = self.table.by_index(index).offset as u64;
                kernel(libc::SYS_lseek, [descriptor, offset, 0, 0, 0, 0]);
            } else if self.table.descriptors(index).any(survives_exec) {
                self.table.reopen_file(index);
            }
        }
    }
}

/// Whether a descriptor stays open in the program that this process executes.
pub fn survives_exec(descriptor: u64) -> bool {
    let flags = kernel(libc::SYS_fcntl, [descriptor, libc::F_GETFD as u64, 0, 0, 0, 0]);
    flags >= 0 && flags & i64::from(libc::FD_CLOEXEC) == 0
}

/// State of a path before it is opened: inode (0: nothing has that name), device, size, times of
/// the last modification and of the last status change; then the time of the last status change of
/// the directory.
fn state_of(place: (u64, u64)) -> [u64; PRECONDITION_WORDS] {
    state_with(place, |_, _, file| file.changed as u64)
}

/// The state of a path for an announcement, with marks for the times of status changes. Through a
/// symbolic link to nothing the call makes a file in another directory, whose changes would not
/// show.
fn announced(place: (u64, u64)) -> [u64; PRECONDITION_WORDS] {
    let mut state = state_with(place, mark_at);
    let is_link = || {
        file_metadata::mode_and_identity_at(place)
            .is_some_and(|(mode, _)| mode & libc::S_IFMT == libc::S_IFLNK)
    };
    if state[0] == 0 && is_link() {
        state[5] = UNSURE;
    }
    state
}

fn state_with(
    place: (u64, u64),
    changed: impl Fn((u64, u64), c_int, &FileIdentity) -> u64,
) -> [u64; PRECONDITION_WORDS] {
    let found = file_metadata::identity_behind(place).map(|(_, found)| found);
    let look = |place, found: &FileIdentity| changed(place, 0, found);
    // SAFETY: the program's path.
    let above = unsafe { file_metadata::directory_changed(place, look) };
    let changed = found.as_ref().map_or(0, |found| changed(place, 0, found));
    let now = found.unwrap_or_default();
    [now.inode, now.device, now.size as u64, now.modified as u64, changed, above, 0, 0]
}

/// Whether an interrupted `open` that creates or truncates a file has happened.
///
/// Another process may have removed again what the call had made, or may have put another file in
/// its place. So a file that was absent proves something only if the directory is as it was; one
/// that was there, only if it is the same.
fn outcome_of(place: (u64, u64), flags: c_int, before: [u64; PRECONDITION_WORDS]) -> EffectOutcome {
    let mut now = state_of(place);
    if crate::origin::is_other_kernel() && now[0] != 0 {
        // Device numbers of two kernels cannot be compared.
        now[1] = before[1];
    }
    let was_absent = before[0] == 0;
    let is_same = !was_absent && now[..2] == before[..2];
    let truncates = flags & libc::O_TRUNC != 0;
    let happened_not = match () {
        () if was_absent => now[0] == 0 && (flags & libc::O_CREAT == 0 || now[5] == before[5]),
        // To open a file that is there changes nothing, and to truncate an empty one neither. A
        // file with content is that of before, or another process has written to it since.
        () => is_same && (!truncates || now[2] == 0 || now[..5] == before[..5]),
    };
    match happened_not {
        true => EffectOutcome::NotPerformed,
        false => EffectOutcome::Unknown,
    }
}

/// Whether a device, or a symbolic link that is open itself (O_PATH), is the one of before. Other
/// things that are not recorded, such as the MPI library's memory, are made again.
fn is_same_device(found: u64, opened: &OpenedFile) -> bool {
    let now = file_metadata::mode_of(found);
    let is_kept = now.is_some_and(|mode| {
        matches!(mode & libc::S_IFMT, libc::S_IFCHR | libc::S_IFLNK | libc::S_IFBLK)
    });
    !is_kept
        || crate::origin::is_other_node()
        || opened.length > 0
        || identity_of(found).is_some_and(|(_, now)| now.is_same_file(&opened.identity))
}

/// Moves the open file `found` to the descriptor `wanted`. The process ends if `wanted` is in use.
fn move_descriptor(found: i64, wanted: i64, closes: c_int) {
    let (found, wanted) = (found as u64, wanted as u64);
    if found == wanted {
        let flags = if closes & libc::O_CLOEXEC != 0 { libc::FD_CLOEXEC } else { 0 };
        kernel(libc::SYS_fcntl, [wanted, libc::F_SETFD as u64, flags as u64, 0, 0, 0]);
        return;
    }
    let taken = kernel(libc::SYS_fcntl, [wanted, libc::F_GETFD as u64, 0, 0, 0, 0]);
    if taken != error(libc::EBADF) {
        let mut path = [0; PATH_BYTES];
        let length = path_of(wanted, &mut path);
        let by = Path(&path[..length]);
        abort_replay(format_args!(
            "descriptor {wanted}, which it had for a file, is taken by {by}"
        ));
    }
    kernel(libc::SYS_dup3, [found, wanted, closes as u64, 0, 0, 0]);
    kernel(libc::SYS_close, [found, 0, 0, 0, 0, 0]);
}

/// Replaces the id of this process in the path of a file of proc(5): the next incarnation may have
/// another id, and another process that one. Returns the length of the path.
fn with_any_id(path: &mut [u8; PATH_BYTES], length: usize) -> usize {
    const OWN: &[u8] = b"/proc/self/";
    let rest = file_metadata::in_own_proc_directory(&path[..length]).map_or(0, <[u8]>::len);
    if rest == 0 || OWN.len() + rest >= PATH_BYTES {
        return length;
    }
    path.copy_within(length - rest..length, OWN.len());
    path[..OWN.len()].copy_from_slice(OWN);
    OWN.len() + rest
}

/// Whether a file that an `open` makes cannot be opened again with the same rights unless the
/// process is root's. Such a file is held by the agent.
fn denies_reopening(flags: c_int, mode: u64) -> bool {
    let needed = match flags & libc::O_ACCMODE {
        libc::O_RDONLY => libc::S_IRUSR,
        libc::O_WRONLY => libc::S_IWUSR,
        _ => libc::S_IRUSR | libc::S_IWUSR,
    };
    flags & libc::O_CREAT != 0 && mode as u32 & needed != needed
}

impl OpenedFile {
    fn none() -> OpenedFile {
        OpenedFile {
            kind: FileKind::Other,
            identity: FileIdentity::default(),
            length: 0,
            path: [0; PATH_BYTES],
        }
    }

    /// Kind, identity and path of what is open at a descriptor.
    fn of(descriptor: i64) -> OpenedFile {
        let mut opened = OpenedFile::none();
        let Some((kind, identity)) = u64::try_from(descriptor).ok().and_then(identity_of) else {
            return opened;
        };
        opened.identity = identity;
        if kind == FileKind::Other {
            return opened;
        }
        opened.length = path_of(descriptor as u64, &mut opened.path);
        opened.kind = match kind {
            _ if is_exempt(opened.path()) => FileKind::Other,
            FileKind::File | FileKind::Directory if is_virtual(opened.path()) => FileKind::Virtual,
            other => other,
        };
        if opened.kind == FileKind::Virtual {
            opened.length = with_any_id(&mut opened.path, opened.length);
        }
        opened
    }

    fn path(&self) -> &[u8] {
        &self.path[..self.length]
    }

    fn header(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[1..3].copy_from_slice(&(self.length as u16).to_le_bytes());
        bytes[3..].copy_from_slice(&bytes_of(&self.identity));
        bytes
    }

    fn take_header(&mut self, bytes: &[u8; HEADER_BYTES]) {
        self.kind = FileKind::of(bytes[0]).unwrap_or(FileKind::Other);
        let length = u16::from_le_bytes([bytes[1], bytes[2]]);
        self.length = usize::from(length).min(PATH_BYTES);
        self.identity = identity_from(&bytes[3..]);
    }
}

impl OpenFile {
    /// Whether reads of the file are recorded as digests and repeated at replay, instead of being
    /// recorded with content.
    pub fn may_be_read_again(&self) -> bool {
        self.kind == FileKind::File && !self.is_recorded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_proc_are_opened_again_as_those_of_the_process_itself() {
        let shown = |path: &str| {
            let mut bytes = [0; PATH_BYTES];
            bytes[..path.len()].copy_from_slice(path.as_bytes());
            let length = with_any_id(&mut bytes, path.len());
            String::from_utf8(bytes[..length].to_vec()).unwrap()
        };
        let own = format!("/proc/{}", std::process::id());
        assert_eq!(shown(&format!("{own}/stat")), "/proc/self/stat");
        assert_eq!(shown("/proc/self/net/dev"), "/proc/self/net/dev");
        for other in [&format!("{own}7/stat"), &own, "/proc/1/stat", "/proc/meminfo", "/sys/1"] {
            assert_eq!(shown(other), *other);
        }
    }

    #[test]
    fn files_that_the_owner_may_not_open_again_are_held() {
        let makes = libc::O_CREAT | libc::O_EXCL;
        assert!(denies_reopening(makes | libc::O_WRONLY, 0o400));
        assert!(denies_reopening(makes | libc::O_RDWR, 0o444));
        assert!(!denies_reopening(makes | libc::O_RDONLY, 0o400));
        assert!(!denies_reopening(makes | libc::O_RDWR, 0o600));
        assert!(!denies_reopening(libc::O_WRONLY, 0));
    }
}
