//! Observation of effects on files that replay cannot repeat: effects of other threads than the
//! recorded one, of signal handlers, and of programs that a rank has started.
//!
//! In: system calls of these threads, handlers and programs, dispatched like the calls of the
//! recorded thread. Out: one report that the rank cannot be restarted, at the first call that
//! changes a file, or that reads a file which changes while the job runs. The calls themselves are
//! let through.
//!
//! `child_programs` reports programs whose calls this library would not see, when such a program
//! starts.
//!
//! What may never happen: a later incarnation repeats an effect of another thread, a handler or a
//! child.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use libc::c_long;

use crate::changed_names::{Asked, NameChange};
use crate::file_identity::{FileKind, PATH_BYTES};
use crate::file_metadata::{self, identity_of, path_of};
use crate::file_status::status;
use crate::kernel_calls::{HERE, is_too_recent, text};
use crate::new_processes::{clone3, fork};
use crate::path_changes::PathChange;
use crate::session::Session;
use crate::watched::{
    self, CHANGED, CHANGED_COMPONENT, EXECUTES_BY_DESCRIPTOR, change_for, change_of,
    forbid_restart, forbid_restart_of, is_foreign, is_foreign_at, is_opened_for_writing,
    is_replaying, observed, with_file,
};
use crate::{
    child_programs, content, mapping_calls, process_calls, side_channels, system_values,
    used_descriptors,
};

/// What follows the name of a file of proc(5) in a report.
const ABOUT_ANOTHER: &str = ", which is about another process";

/// Observes a system call. `Some`: the result of the call; `None`: the call is let through.
///
/// # Safety
/// The arguments are those of a system call that this thread makes.
pub unsafe fn handle(number: c_long, arguments: [u64; 6]) -> Option<i64> {
    let files = watched::head().map(|head| &head.files)?;
    if number == libc::SYS_mmap {
        mapping_calls::show_stores_by(arguments);
    }
    if files.is_restart_forbidden() {
        return None;
    }
    let [a, b, c, ..] = arguments;
    side_channels::check(number, arguments);
    process_calls::check(number, arguments);
    for descriptor in used_descriptors::used_descriptors(number, arguments).into_iter().flatten() {
        placeholder(descriptor);
    }
    // SAFETY: paths of the program's.
    unsafe {
        match number {
            // The rights of a directory change with its times.
            libc::SYS_stat | libc::SYS_access | libc::SYS_getxattr | libc::SYS_listxattr => {
                looks("looks at", HERE, a, Asked::Attributes);
            }
            libc::SYS_lstat | libc::SYS_readlink | libc::SYS_lgetxattr | libc::SYS_llistxattr => {
                looks("looks at", HERE, a, Asked::Itself)
            }
            libc::SYS_newfstatat if text(b).is_empty() => examines(a, Asked::Attributes),
            libc::SYS_statx if text(b).is_empty() => examines(a, asked_of(arguments[3], 0)),
            libc::SYS_newfstatat => {
                let mask = libc::STATX_BASIC_STATS.into();
                looks("looks at", a, b, asked_of(mask, arguments[3]));
            }
            libc::SYS_faccessat | libc::SYS_faccessat2 => {
                looks("looks at", a, b, Asked::Attributes);
            }
            libc::SYS_statx => looks("looks at", a, b, asked_of(arguments[3], arguments[2])),
            libc::SYS_readlinkat => looks("looks at", a, b, Asked::Itself),
            libc::SYS_statfs if file_metadata::identity_behind((HERE, a)).is_none() => {
                looks("looks at", HERE, a, Asked::Name);
            }
            libc::SYS_statfs if !is_foreign_at(HERE, a) => {
                forbid_restart("asks for the file system of", text(a), "");
            }
            libc::SYS_chdir => looks("enters", HERE, a, Asked::Name),
            libc::SYS_getdents | libc::SYS_getdents64 => lists(a),
            libc::SYS_execveat => forbid_restart_of(EXECUTES_BY_DESCRIPTOR),
            libc::SYS_open => open(HERE, a, b),
            libc::SYS_creat => open(HERE, a, libc::O_WRONLY as u64),
            libc::SYS_openat => open(a, b, c),
            // `struct open_how` begins with the flags.
            libc::SYS_openat2 => open(a, b, (c as *const u64).read_unaligned()),
            libc::SYS_uname => return system_values::system_name(a),
            libc::SYS_io_uring_setup | libc::SYS_io_setup => {
                return Some(-i64::from(libc::ENOSYS));
            }
            _ if is_too_recent(number) => return Some(-i64::from(libc::ENOSYS)),
            libc::SYS_execve => {
                child_programs::check_exec(a as *const c_char, c as *const *mut c_char);
                looks("executes", HERE, a, Asked::Name);
            }
            libc::SYS_fork | libc::SYS_vfork => return fork(libc::SYS_fork, [0; 6], 0, 0),
            libc::SYS_clone => return fork(number, arguments, a, b),
            libc::SYS_clone3 => return clone3(arguments),
            _ => {
                use_descriptors(number, arguments);
                names(number, arguments);
            }
        }
    }
    None
}

/// Observes a call that uses an open file.
fn use_descriptors(number: c_long, arguments: [u64; 6]) {
    let [a, b, c, ..] = arguments;
    match number {
        libc::SYS_write
        | libc::SYS_pwrite64
        | libc::SYS_writev
        | libc::SYS_pwritev
        | libc::SYS_pwritev2
        | libc::SYS_ftruncate
        | libc::SYS_fallocate
        | libc::SYS_fchmod
        | libc::SYS_fchown
        | libc::SYS_fsetxattr
        | libc::SYS_fremovexattr => changes(a),
        libc::SYS_sendfile => {
            changes(a);
            moves(b);
        }
        libc::SYS_ioctl if content::shares_blocks(b) => changes(a),
        libc::SYS_ioctl if b == libc::FIONREAD => uses("looks at", a),
        libc::SYS_copy_file_range | libc::SYS_splice => {
            changes(c);
            moves(a);
        }
        libc::SYS_close => closes(a),
        libc::SYS_flock => locks(a),
        libc::SYS_fcntl if is_lock(b) => locks(a),
        libc::SYS_dup2 | libc::SYS_dup3 => {
            closes(b);
            forget_own_files();
        }
        libc::SYS_dup | libc::SYS_fcntl => forget_own_files(),
        libc::SYS_read | libc::SYS_readv | libc::SYS_lseek => moves(a),
        libc::SYS_pread64 | libc::SYS_preadv | libc::SYS_preadv2 => reads(a),
        libc::SYS_fstatfs => {
            with_file(a, |_, path| forbid_restart("asks for the file system of", path, ""));
        }
        libc::SYS_fstat => examines(a, Asked::Attributes),
        libc::SYS_fgetxattr | libc::SYS_flistxattr => uses("looks at", a),
        libc::SYS_mmap if arguments[3] as c_int & libc::MAP_ANONYMOUS == 0 => {
            let is_shared = arguments[3] as c_int & libc::MAP_TYPE != libc::MAP_PRIVATE;
            let writes = is_shared && c as c_int & libc::PROT_WRITE != 0;
            if writes { changes(arguments[4]) } else { maps(arguments[4]) }
        }
        _ => (),
    }
}

/// # Safety
/// The path is a C string.
unsafe fn open(directory: u64, path: u64, flags: u64) {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path) };
    // SAFETY: the caller's promise.
    let is_about_another = || unsafe { process_calls::is_about_another_process(directory, path) };
    // SAFETY: the caller's promise.
    if unsafe { is_opened_for_writing(directory, path, flags as c_int) } {
        forbid_restart("opens", name, " for writing");
    } else if file_metadata::passes_on_at((directory, path)) {
        forbid_restart("opens", name, ", which keeps nothing");
    } else if is_about_another() {
        forbid_restart("opens", name, ABOUT_ANOTHER);
    } else {
        // SAFETY: the caller's promise.
        let change = unsafe { change_of(directory, path) };
        // The content of the file is compared when it is read (`reads`). But a program may open a
        // file only to learn whether it is there.
        let change = change.filter(|change| *change != NameChange::Target);
        report_change("opens", name, change);
    }
}

/// What a call of statx(2) with this mask and these flags asks. A call like stat(2) asks for
/// everything, whatever the program wants to know.
fn asked_of(mask: u64, flags: u64) -> Asked {
    const TIMES: u32 = libc::STATX_MTIME | libc::STATX_CTIME | libc::STATX_NLINK;
    const SIZES: u32 = libc::STATX_SIZE | libc::STATX_BLOCKS;
    let asks = |what: u32| mask & u64::from(what) != 0;
    let is_like_stat = mask & u64::from(libc::STATX_BASIC_STATS) == libc::STATX_BASIC_STATS.into();
    let is_itself = flags & libc::AT_SYMLINK_NOFOLLOW as u64 != 0;
    match is_like_stat {
        true if is_itself => Asked::Itself,
        true => Asked::Attributes,
        false if asks(libc::STATX_ATIME) => Asked::AccessTime,
        false if asks(TIMES) => Asked::Times,
        false if asks(SIZES | libc::STATX_MODE | libc::STATX_UID | libc::STATX_GID) => {
            Asked::Attributes
        }
        false => Asked::Name,
    }
}

/// Reports the use of a descriptor that the recorded thread has, and that is not yet open on its
/// file because the recorded thread still replays.
fn placeholder(descriptor: u64) {
    if Session::is_placeholder(descriptor) && is_replaying() {
        forbid_restart("uses", b"a file", " that is open in it, before that is opened again");
    }
}

/// Reports a use of a name whose result may differ in a later incarnation, because the file or what
/// leads to it has changed since the job began.
///
/// # Safety
/// The path is a C string, or null.
unsafe fn looks(what: &str, directory: u64, path: u64, asked: Asked) {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path) };
    // SAFETY: the caller's promise.
    if unsafe { process_calls::is_about_another_process(directory, path) } {
        return forbid_restart(what, name, ABOUT_ANOTHER);
    }
    // SAFETY: the caller's promise.
    report_change(what, name, unsafe { change_for(directory, path, asked) });
}

fn report_change(what: &str, name: &[u8], change: Option<NameChange>) {
    match change {
        Some(NameChange::Target | NameChange::Appeared) => forbid_restart(what, name, CHANGED),
        Some(NameChange::Component) => forbid_restart(what, name, CHANGED_COMPONENT),
        Some(NameChange::Absent) => {
            forbid_restart("looks for", name, " in a directory that changes");
        }
        None => (),
    }
}

/// Reports a listing of a directory that has changed since the job began.
fn lists(descriptor: u64) {
    let Some(head) = watched::head() else { return };
    let since = head.files.since.load(Relaxed) as i64;
    let Some((FileKind::Directory, identity)) = identity_of(descriptor as u32 as u64) else {
        return;
    };
    let mut path = [0; PATH_BYTES];
    let length = path_of(descriptor as u32 as u64, &mut path);
    if path[..length] == *b"/proc" {
        return forbid_restart("lists", &path[..length], ABOUT_ANOTHER);
    }
    if identity.modified.max(identity.changed) >= since && !is_foreign(&path[..length]) {
        forbid_restart("lists", &path[..length], ", which is changed while the job runs");
    }
}

/// Reports a system call that changes a name.
///
/// # Safety
/// The arguments are those of a system call.
unsafe fn names(number: c_long, arguments: [u64; 6]) {
    let Some(path_change) = PathChange::of(number, arguments) else { return };
    let makes_directory = matches!(number, libc::SYS_mkdir | libc::SYS_mkdirat);
    if let Some((directory, path)) = path_change.second.filter(|_| makes_directory) {
        // As of `mkdir -p`: the call fails, and only looks.
        if status((directory, path), libc::AT_SYMLINK_NOFOLLOW).is_some() {
            // SAFETY: the caller's promise.
            return unsafe { looks("looks at", directory, path, Asked::Name) };
        }
    }
    for (directory, path) in [path_change.first, path_change.second].into_iter().flatten() {
        // SAFETY: the caller's promise.
        let (name, is_foreign) = unsafe { (text(path), is_foreign_at(directory, path)) };
        if !is_foreign {
            return forbid_restart("changes", name, "");
        }
    }
}

/// Whether this command of fcntl(2) acquires, releases or examines a lock.
fn is_lock(command: u64) -> bool {
    let is_of_process = matches!(command as c_int, libc::F_SETLK | libc::F_SETLKW | libc::F_GETLK);
    let of_file = [libc::F_OFD_SETLK, libc::F_OFD_SETLKW, libc::F_OFD_GETLK];
    is_of_process || of_file.contains(&(command as c_int))
}

/// Reports a lock: the lock orders this process and others, and a later incarnation would ask for
/// it at another time.
fn locks(descriptor: u64) {
    with_file(descriptor, |_, path| forbid_restart("locks", path, ""));
}

/// Reports that another thread or a handler closes a descriptor of the recorded thread, which would
/// take whatever gets the number next for its file.
fn closes(descriptor: u64) {
    if observed().is_none() && Session::has_open(descriptor as u32 as u64) {
        forbid_restart("closes", b"a file", " that the rank has open");
    }
}

fn changes(descriptor: u64) {
    with_file(descriptor, |_, path| forbid_restart("writes", path, ""));
}

/// Reports a read that moves a file position on which the recorded thread may rely, or that reads a
/// file which may change.
fn moves(descriptor: u64) {
    let is_shared = |_: i64, path: &[u8]| match observed() {
        None if Session::has_open(descriptor) => {
            forbid_restart("reads", path, ", which the rank has open, and moves its position");
        }
        Some(head) if is_position_shared(descriptor, head.owner.load(Relaxed)) => {
            forbid_restart("reads", path, " by the rank's own descriptor, whose position it moves");
        }
        _ => (),
    };
    with_file(descriptor, is_shared);
    reads(descriptor);
}

/// Whether a child's descriptor is an open file of the rank. A read by such a descriptor moves the
/// position of both processes (open(2)).
///
/// The answer costs one comparison with every descriptor of the rank. So [`OWN_FILES`] remembers
/// the last eight files that are the child's own, until a descriptor is duplicated
/// ([`forget_own_files`]).
fn is_position_shared(descriptor: u64, rank: u64) -> bool {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let Some((_, identity)) = identity_of(descriptor) else { return false };
    let words = [descriptor, identity.device, identity.inode];
    let known = words
        .iter()
        .fold(1, |sum: u64, word| (sum.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    if OWN_FILES.iter().any(|one| one.load(Relaxed) == known) {
        return false;
    }
    let is_shared = file_metadata::shares_open_file(descriptor, rank);
    if !is_shared {
        OWN_FILES[NEXT.fetch_add(1, Relaxed) % OWN_FILES.len()].store(known, Relaxed);
    }
    is_shared
}

/// Digests of a descriptor and its file for which [`is_position_shared`] has found that the rank
/// does not have the file open.
static OWN_FILES: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];

/// Clears [`OWN_FILES`] when a descriptor is duplicated: the new descriptor may be the rank's, on
/// the same file as before.
fn forget_own_files() {
    OWN_FILES.iter().for_each(|one| one.store(0, Relaxed));
}

fn reads(descriptor: u64) {
    uses("reads", descriptor);
}

/// Reports a mapping by another thread or a handler of the rank: the recorded thread may read the
/// file there, and no later incarnation compares the file. A child has memory of its own.
fn maps(descriptor: u64) {
    reads(descriptor);
    let Some(head) = watched::head().filter(|_| observed().is_none()) else { return };
    let since = head.files.since.load(Relaxed) as i64;
    let descriptor = descriptor as u32 as u64;
    let Some((_, identity)) = identity_of(descriptor) else { return };
    with_file(descriptor, |_, path| {
        if !file_metadata::is_installed(descriptor, path, &identity, since) {
            forbid_restart("maps", path, "");
        }
    });
}

/// Reports a look at an open file or directory that may change.
fn examines(descriptor: u64, asked: Asked) {
    placeholder(descriptor as u32 as u64);
    match identity_of(descriptor as u32 as u64) {
        Some((FileKind::Directory, _)) => (),
        Some((FileKind::File, _)) if asked == Asked::AccessTime => (),
        _ => return uses("looks at", descriptor),
    }
    let mut path = [0; PATH_BYTES];
    let length = path_of(descriptor as u32 as u64, &mut path);
    let place = path.as_ptr().addr() as u64;
    // SAFETY: a path of at most `PATH_BYTES` - 1 bytes ends with a zero.
    let change = unsafe { change_for(HERE, place, asked) };
    report_change("looks at", &path[..length], change);
}

fn uses(what: &str, descriptor: u64) {
    let Some(head) = watched::head() else { return };
    let since = head.files.since.load(Relaxed) as i64;
    with_file(descriptor, |changed, path| {
        if changed >= since {
            forbid_restart(what, path, CHANGED);
        }
    });
}
