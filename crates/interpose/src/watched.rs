//! Threads, signal handlers and programs whose effects on files are observed: whose restart they
//! forbid, and what counts.
//!
//! In: a reason, or a file. Out: the report that the rank cannot be restarted, made once, in the
//! process's own record or in that of the rank that has started this program. What may never
//! happen: a report concerns a file that is not recorded.

use std::ffi::c_int;
use std::fmt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use landbridge_proto::nondeterminism::RecordHead;

use crate::changed_names::{self, Asked, NameChange};
use crate::file_identity::{FileKind, PATH_BYTES};
use crate::file_metadata::{self, identity_of, is_exempt, is_virtual, path_of};
use crate::kernel_calls::{HERE, text};
use crate::messages::{self, Path};
use crate::{handler_frames, processes, record_head, record_lock, restart_refusals};

/// In a program that a rank has started: the head of that rank's record.
static OBSERVED: AtomicPtr<RecordHead> = AtomicPtr::new(null_mut());

/// Whether effects of this process, or of programs that this process starts, can still forbid a
/// restart.
pub fn is_watched() -> bool {
    head().is_some_and(|head| !head.files.is_restart_forbidden())
}

/// Makes this process one that a recorded process has started.
pub fn set_observed(head: *mut RecordHead) {
    OBSERVED.store(head, Release);
    if let Some(head) = observed() {
        messages::write_lines_of(head.owner.load(Relaxed));
    }
}

/// The head of the record to which this process belongs, as the recorded one or as its child.
pub fn head() -> Option<&'static RecordHead> {
    record_head::head().or_else(observed)
}

/// Whether a recorded process has started this process.
pub fn is_child() -> bool {
    observed().is_some()
}

/// The head of the record of the rank that has started this program.
pub fn observed() -> Option<&'static RecordHead> {
    // SAFETY: null, or the head of a record, which stays mapped.
    unsafe { OBSERVED.load(Acquire).as_ref() }
}

/// Whether that process replays, or this thread began while it did.
pub fn is_replaying() -> bool {
    head().is_some_and(processes::replays)
}

/// What follows the name of a file in a report.
pub const CHANGED: &str = ", which is changed while the job runs";
pub const CHANGED_COMPONENT: &str = " by a link or directory that is changed while the job runs";

/// What has changed since the job began, of that to which a name leads; its times do not count.
///
/// # Safety
/// The path is a C string, or null.
pub unsafe fn change_of(directory: u64, path: u64) -> Option<NameChange> {
    // SAFETY: the caller's promise.
    unsafe { change_for(directory, path, Asked::Name) }
}

/// What has changed since the job began, of what a call asks of that to which a name leads.
///
/// # Safety
/// The path is a C string, or null.
pub unsafe fn change_for(directory: u64, path: u64, asked: Asked) -> Option<NameChange> {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path) };
    let head = head()?;
    // SAFETY: the caller's promise.
    if name.is_empty() || unsafe { is_foreign_at(directory, path) } {
        return None;
    }
    let (since, is_replay) = (head.files.since.load(Relaxed) as i64, processes::replays(head));
    if !is_foreign(name) {
        // SAFETY: the caller's promise.
        return unsafe { changed_names::change_of((directory, path), since, asked, is_replay) };
    }
    // The name leads out of /proc or /dev, whose links are no files.
    let mut whole = [0; PATH_BYTES];
    match file_metadata::path_behind((directory, path), &mut whole) {
        0 => ends_among_recorded_files(directory, name).then_some(NameChange::Absent),
        _ => {
            let whole = whole.as_ptr().addr() as u64;
            // SAFETY: a path of at most `PATH_BYTES` bytes ends with a zero.
            unsafe { changed_names::change_of((HERE, whole), since, asked, is_replay) }
        }
    }
}

/// Whether a name that leads to nothing ends outside `/proc`, `/sys` and `/dev`: the deepest
/// directory of the name that exists is not there.
fn ends_among_recorded_files(directory: u64, name: &[u8]) -> bool {
    let (mut above, mut whole) = ([0; PATH_BYTES], [0; PATH_BYTES]);
    let mut rest = &name[..name.len().min(PATH_BYTES - 1)];
    while let Some(slash) = rest.iter().rposition(|byte| *byte == b'/') {
        rest = &rest[..slash];
        above[..slash].copy_from_slice(rest);
        above[slash..].fill(0);
        let place = (directory, above.as_ptr().addr() as u64);
        let length = file_metadata::path_behind(place, &mut whole);
        if length > 0 {
            whole[length] = b'/';
            return !is_foreign(&whole[..=length]);
        }
    }
    true
}

/// Whether a call opens a file for writing, creates a file or truncates a file, and a process may
/// read the file later.
///
/// # Safety
/// The path is a C string.
pub unsafe fn is_opened_for_writing(directory: u64, path: u64, flags: c_int) -> bool {
    let writes =
        flags & libc::O_ACCMODE != libc::O_RDONLY || flags & (libc::O_CREAT | libc::O_TRUNC) != 0;
    // Nothing reads back what a process writes to a device.
    let is_device = || {
        file_metadata::identity_behind((directory, path))
            .is_some_and(|(kind, _)| matches!(kind, FileKind::Other | FileKind::Random))
            && !file_metadata::passes_on_at((directory, path))
    };
    // SAFETY: the caller's name is that at `path`.
    writes && !unsafe { is_foreign_at(directory, path) } && !is_device()
}

/// Calls `work` with the time of the last change and the path, if the descriptor is that of a
/// recorded file.
pub fn with_file(descriptor: u64, work: impl FnOnce(i64, &[u8])) {
    let Some((FileKind::File, identity)) = identity_of(descriptor as u32 as u64) else { return };
    let mut path = [0; PATH_BYTES];
    let length = path_of(descriptor as u32 as u64, &mut path);
    if !is_foreign(&path[..length]) {
        work(identity.modified.max(identity.changed), &path[..length]);
    }
}

/// Whether a path is outside the set of recorded files.
pub fn is_foreign(path: &[u8]) -> bool {
    is_exempt(path)
        || is_virtual(path)
        || path.starts_with(b"/dev/") && !path.starts_with(b"/dev/shm/")
}

/// Whether a name is that of something outside the set of recorded files, and leads to nothing
/// inside: `/proc/self/cwd/x` and `/dev/fd/3` may be recorded files.
///
/// # Safety
/// The path is a C string, or null.
pub unsafe fn is_foreign_at(directory: u64, path: u64) -> bool {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path) };
    if !is_foreign(name) || !file_metadata::may_lead_out(name) {
        return is_foreign(name);
    }
    let mut whole = [0; PATH_BYTES];
    let length = file_metadata::path_behind((directory, path), &mut whole);
    // A pipe or a socket has a description in place of a path.
    if length > 0 && whole[0] == b'/' && !is_foreign(&whole[..length]) {
        return false;
    }
    // SAFETY: the caller's promise.
    let length = unsafe { file_metadata::path_of_name((directory, path), &mut whole) };
    length > 0 && is_foreign(&whole[..length])
}

/// Forbids a restart because of what this thread, handler or program does with a file.
pub fn forbid_restart(what: &str, path: &[u8], more: &str) {
    struct Who;
    impl fmt::Display for Who {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(match observed() {
                Some(_) => "a program that it has started",
                None if record_lock::is_in_handler(handler_frames::stack_pointer()) => {
                    "a handler of a signal"
                }
                None => "another thread than the first",
            })
        }
    }
    forbid_restart_of(format_args!("{Who} {what} {}{more}", Path(path)));
}

/// Forbids a restart of the rank to whose record this process belongs, for this reason.
pub fn forbid_restart_of(reason: fmt::Arguments<'_>) {
    match observed() {
        Some(head) => restart_refusals::forbid_restart_in(head, reason),
        None => restart_refusals::forbid_restart(reason),
    }
}

pub const EXECUTES_BY_DESCRIPTOR: fmt::Arguments<'static> =
    format_args!("it executes a program by its descriptor, which cannot be observed");

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs::{self, File};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;

    use super::*;

    fn opens_for_writing(name: &str) -> bool {
        let name = CString::new(name).unwrap();
        // SAFETY: a C string.
        unsafe { is_opened_for_writing(HERE, name.as_ptr().addr() as u64, libc::O_WRONLY) }
    }

    #[test]
    fn a_missing_name_of_the_kernel_says_nothing_about_files() {
        for name in ["/sys/no/such/..", "/proc/self/no/..", "/proc/no/../x", "/dev/no/such/../x"] {
            assert!(!ends_among_recorded_files(HERE, name.as_bytes()), "{name}");
        }
        for name in ["/proc/self/cwd/no/such", "/proc/self/root/tmp/no/../x", "/dev/../no/such"] {
            assert!(ends_among_recorded_files(HERE, name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn a_file_is_written_by_whatever_name_leads_to_it() {
        let folder = std::env::temp_dir().join(format!("lb-watched-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = File::create(folder.join("file")).unwrap();
        symlink("file", folder.join("link")).unwrap();
        symlink("/dev/null", folder.join("nothing")).unwrap();
        let descriptor = file.as_raw_fd();
        let there = folder.display();
        for name in [
            format!("{there}/file"),
            format!("{there}/link"),
            format!("{there}/new"),
            format!("/dev/fd/{descriptor}"),
            format!("/proc/self/fd/{descriptor}"),
            format!("/proc/self/root{there}/file"),
            format!("/dev/..{there}/file"),
            format!("/proc/self/root{there}/new"),
        ] {
            assert!(opens_for_writing(&name), "{name}");
        }
        for name in ["/dev/null", "/proc/self/comm", "/dev/shm/mpich-x", "/proc/self/root/dev/null"]
        {
            assert!(!opens_for_writing(name), "{name}");
        }
        assert!(!opens_for_writing(&format!("{there}/nothing")));
        fs::remove_dir_all(&folder).unwrap();
    }
}
