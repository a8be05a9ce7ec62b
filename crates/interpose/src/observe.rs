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

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::*};

use landbridge_proto::nondeterminism::{RECORD_HEAD_BYTES, RecordHead};
use libc::{c_long, pthread_attr_t, pthread_t};

use crate::changed_names::NameChange;
use crate::content;
use crate::descriptor_table::{FileKind, PATH_BYTES};
use crate::file_metadata::{self, identity_of, is_exempt, is_virtual, path_of};
use crate::path_changes::PathChange;
use crate::session::{Path, Session, kernel, text};
use crate::syscalls::HERE;
use crate::{
    caller, changed_names, child_programs, mapped_files, process_calls, real_libc, recording,
    restart_refusals, side_channels, syscalls, trampoline, trap,
};

/// In a program that a rank has started: the head of that rank's record.
static OBSERVED: AtomicPtr<RecordHead> = AtomicPtr::new(null_mut());

type StartRoutine = extern "C" fn(*mut c_void) -> *mut c_void;

/// Largest number of threads that the program has requested and that have not begun.
const THREAD_STARTS_MAX: usize = 256;
static THREAD_STARTS: [ThreadStart; THREAD_STARTS_MAX] =
    [const { ThreadStart::free() }; THREAD_STARTS_MAX];

struct ThreadStart {
    is_taken: AtomicBool,
    what: UnsafeCell<Option<(StartRoutine, *mut c_void)>>,
}

// SAFETY: the thread that sets `is_taken` passes the slot to exactly one new thread.
unsafe impl Sync for ThreadStart {}

impl ThreadStart {
    const fn free() -> Self {
        Self { is_taken: AtomicBool::new(false), what: UnsafeCell::new(None) }
    }
}

/// Replaces the C library's `pthread_create` and observes the new thread. `from` is the address of
/// the call.
///
/// # Safety
/// The arguments are valid for the C library's `pthread_create`.
pub unsafe extern "C" fn pthread_create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    begin: StartRoutine,
    argument: *mut c_void,
    from: usize,
) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        if !trap::is_installed() || !caller::is_program(from) {
            return create(thread, attributes, begin, argument);
        }
        let free = THREAD_STARTS.iter().find(|one| !one.is_taken.swap(true, Acquire));
        let Some(free) = free else {
            restart_refusals::forbid_restart(format_args!(
                "it begins more threads at once than can be looked after"
            ));
            return create(thread, attributes, begin, argument);
        };
        *free.what.get() = Some((begin, argument));
        let slot = (&raw const *free).cast_mut().cast();
        let outcome = create(thread, attributes, begin_thread, slot);
        if outcome != 0 {
            free.is_taken.store(false, Release);
        }
        outcome
    }
}

/// Number of calls of the C library's `pthread_create` in progress.
static CREATING: AtomicUsize = AtomicUsize::new(0);

unsafe fn create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    begin: StartRoutine,
    argument: *mut c_void,
) -> c_int {
    CREATING.fetch_add(1, Relaxed);
    // SAFETY: the caller's promise.
    let outcome = unsafe { real_libc::pthread_create(thread, attributes, begin, argument) };
    CREATING.fetch_sub(1, Relaxed);
    outcome
}

extern "C" fn begin_thread(slot: *mut c_void) -> *mut c_void {
    // SAFETY: the slot was taken for this thread.
    let slot = unsafe { &*slot.cast::<ThreadStart>() };
    // SAFETY: the slot was taken for this thread.
    let what = unsafe { (*slot.what.get()).take() };
    slot.is_taken.store(false, Release);
    trap::observe_this_thread();
    match what {
        Some((begin, argument)) => begin(argument),
        None => null_mut(),
    }
}

/// Handles the system call that begins a thread or a process. A child that shares no memory with
/// its parent begins within this function, and is observed from then on. The caller passes `vfork`
/// as `fork`: vfork(2) allows that, and a child that shares its parent's memory cannot be observed.
pub fn fork(number: c_long, arguments: [u64; 6], flags: u64, stack: u64) -> Option<i64> {
    let has = |flag: c_int| flags & flag as u64 != 0;
    if has(libc::CLONE_VM) {
        // `posix_spawn`: the child executes a program at once. `child_programs` examines that
        // program and the files that the child opens.
        if has(libc::CLONE_THREAD) && CREATING.load(Relaxed) == 0 {
            forbid_restart_of(format_args!("it begins a thread otherwise than by pthread_create"));
        } else if !has(libc::CLONE_THREAD) && has(libc::CLONE_PIDFD) {
            // `child_programs` does not examine the environment of `pidfd_spawn`.
            forbid_restart_of(format_args!("it starts a program by pidfd_spawn"));
        } else if !has(libc::CLONE_THREAD) && !has(libc::CLONE_VFORK) {
            forbid_restart_of(format_args!("it begins a process that shares its memory"));
        } else if !has(libc::CLONE_THREAD) && !child_programs::own_environment_loads_interposer() {
            // `system` and `popen` pass on the environment of this process.
            forbid_restart_of(format_args!(
                "it starts a program without LD_PRELOAD, which nobody can look after"
            ));
        }
        return None;
    }
    if stack != 0 {
        forbid_restart_of(format_args!("it begins a process on a stack of its own"));
        return None;
    }
    if observed().is_none() && !recording::is_record(recording::descriptor()) {
        forbid_restart_of(format_args!("it has closed the record's descriptor, and forks"));
        return None;
    }
    let result = kernel(number, arguments);
    if result == 0 {
        let is_own = trampoline::make_own();
        // A child of a child has already mapped the head of the record.
        let is_observed = match observed() {
            Some(_) => trap::observe_this_thread(),
            None => begin_child(recording::descriptor()),
        };
        if !is_own || !is_observed {
            forbid_restart_of(format_args!("there is no memory for what looks after its children"));
        }
    }
    Some(result)
}

/// Handles `clone3`, whose arguments lie in memory (`struct clone_args`); the flags are the first
/// word.
///
/// # Safety
/// The arguments are valid for `clone3`.
pub unsafe fn clone3(arguments: [u64; 6]) -> Option<i64> {
    const STACK: usize = 5;
    // SAFETY: the caller's promise; every program passes a structure that includes the stack.
    let (flags, stack) = unsafe {
        let words = arguments[0] as *const u64;
        (words.read_unaligned(), words.add(STACK).read_unaligned())
    };
    fork(libc::SYS_clone3, arguments, flags, stack)
}

/// Begins observation of this process, which a recorded process has started. `descriptor` is that
/// of the record. False: this process is not observed.
pub fn begin_child(descriptor: c_int) -> bool {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let (bytes, shared) = (RECORD_HEAD_BYTES as u64, libc::MAP_SHARED as u64);
    let found = kernel(libc::SYS_mmap, [0, bytes, protection, shared, descriptor as u64, 0]);
    if found <= 0 {
        return false;
    }
    OBSERVED.store(found as *mut RecordHead, Release);
    trap::observe_this_thread()
}

/// Observes a system call. `Some`: the result of the call; `None`: the call is let through.
///
/// # Safety
/// The arguments are those of a system call that this thread makes.
pub unsafe fn handle(number: c_long, arguments: [u64; 6]) -> Option<i64> {
    let files = recording::head().or_else(observed).map(|head| &head.files)?;
    if number == libc::SYS_mmap {
        mapped_files::show_stores_by(arguments);
    }
    if files.is_restart_forbidden() {
        return None;
    }
    let [a, b, c, ..] = arguments;
    side_channels::check(number, arguments);
    process_calls::check(number, arguments);
    for descriptor in syscalls::used_descriptors(number, arguments).into_iter().flatten() {
        placeholder(descriptor);
    }
    // SAFETY: paths of the program's.
    unsafe {
        match number {
            libc::SYS_stat
            | libc::SYS_lstat
            | libc::SYS_access
            | libc::SYS_readlink
            | libc::SYS_getxattr
            | libc::SYS_lgetxattr
            | libc::SYS_listxattr
            | libc::SYS_llistxattr => looks("looks at", HERE, a),
            libc::SYS_newfstatat | libc::SYS_statx if text(b).is_empty() => examines(a),
            libc::SYS_newfstatat
            | libc::SYS_statx
            | libc::SYS_faccessat
            | libc::SYS_faccessat2
            | libc::SYS_readlinkat => looks("looks at", a, b),
            libc::SYS_chdir => looks("enters", HERE, a),
            libc::SYS_getdents | libc::SYS_getdents64 => lists(a),
            libc::SYS_execveat => forbid_restart_of(EXECUTES_BY_DESCRIPTOR),
            libc::SYS_open => open(HERE, a, b),
            libc::SYS_creat => open(HERE, a, libc::O_WRONLY as u64),
            libc::SYS_openat => open(a, b, c),
            // `struct open_how` begins with the flags.
            libc::SYS_openat2 => open(a, b, (c as *const u64).read_unaligned()),
            libc::SYS_io_uring_setup | libc::SYS_io_setup => {
                return Some(-i64::from(libc::ENOSYS));
            }
            libc::SYS_execve => {
                child_programs::check_exec(a as *const c_char, c as *const *mut c_char);
                looks("executes", HERE, a);
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
        libc::SYS_fstat | libc::SYS_fgetxattr | libc::SYS_flistxattr => examines(a),
        libc::SYS_mmap if arguments[3] as c_int & libc::MAP_ANONYMOUS == 0 => {
            let is_shared = arguments[3] as c_int & libc::MAP_TYPE != libc::MAP_PRIVATE;
            let writes = is_shared && c as c_int & libc::PROT_WRITE != 0;
            if writes { changes(arguments[4]) } else { reads(arguments[4]) }
        }
        _ => (),
    }
}

/// Whether effects of this process, or of programs that this process starts, can still forbid a
/// restart.
pub fn is_watched() -> bool {
    recording::head().or_else(observed).is_some_and(|head| !head.files.is_restart_forbidden())
}

/// Whether a recorded process has started this process.
pub fn is_child() -> bool {
    observed().is_some()
}

fn observed() -> Option<&'static RecordHead> {
    // SAFETY: null, or the head of a record, which stays mapped.
    unsafe { OBSERVED.load(Acquire).as_ref() }
}

/// Reports a file that a program started by this process opens for writing when the program begins.
///
/// # Safety
/// The path is a C string.
pub unsafe fn before_open(path: *const c_char, flags: c_int) {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path.addr() as u64) };
    if is_opened_for_writing(HERE, path.addr() as u64, name, flags) {
        let path = Path(name);
        forbid_restart_of(format_args!("a program that it starts opens {path} for writing"));
        return;
    }
    // SAFETY: the caller's promise.
    let change = unsafe { change_of(HERE, path.addr() as u64) };
    // The content of the file is compared when it is read (`reads`).
    let is_way = change.is_some_and(|change| change != NameChange::Target);
    if is_way {
        let path = Path(name);
        forbid_restart_of(format_args!("a program that it starts opens {path}{CHANGED_WAY}"));
    }
}

/// Reports a program that this process starts, and that a later incarnation may find changed.
///
/// # Safety
/// The path is a C string.
pub unsafe fn before_start(path: *const c_char) {
    // SAFETY: the caller's promise.
    let (name, change) = unsafe {
        let place = path.addr() as u64;
        (Path(text(place)), change_of(HERE, place))
    };
    if let Some(change) = change {
        let more = if change == NameChange::Way { CHANGED_WAY } else { CHANGED };
        forbid_restart_of(format_args!("it starts {name}{more}"));
    }
}

pub const EXECUTES_BY_DESCRIPTOR: fmt::Arguments<'static> =
    format_args!("it executes a program by its descriptor, which nobody can look after");

/// What follows the name of a file in a report.
const CHANGED: &str = ", which is changed while the job runs";
const CHANGED_WAY: &str = " by a link or directory that is changed while the job runs";

/// # Safety
/// The path is a C string.
unsafe fn open(directory: u64, path: u64, flags: u64) {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path) };
    if is_opened_for_writing(directory, path, name, flags as c_int) {
        forbid_restart("opens", name, " for writing");
    } else if file_metadata::passes_on_at((directory, path)) {
        forbid_restart("opens", name, ", which keeps nothing");
    } else {
        // SAFETY: the caller's promise.
        let change = unsafe { change_of(directory, path) };
        // The content of the file is compared when it is read (`reads`).
        let change = change.filter(|change| *change != NameChange::Target);
        report_change("opens", name, change);
    }
}

/// Reports the use of a descriptor that the recorded thread has, and that is not yet open on its
/// file because the recorded thread still replays.
fn placeholder(descriptor: u64) {
    if Session::is_placeholder(descriptor) && is_replaying() {
        forbid_restart("uses", b"a file", " that is open in it, before that is opened again");
    }
}

fn is_replaying() -> bool {
    recording::head().or_else(observed).is_some_and(RecordHead::is_replaying)
}

/// Reports a use of a name whose result may differ in a later incarnation, because the file or what
/// leads to it has changed since the job began.
///
/// # Safety
/// The path is a C string, or null.
unsafe fn looks(what: &str, directory: u64, path: u64) {
    // SAFETY: the caller's promise.
    let (name, change) = unsafe { (text(path), change_of(directory, path)) };
    report_change(what, name, change);
}

/// What has changed since the job began, of that to which a name leads.
///
/// # Safety
/// The path is a C string, or null.
unsafe fn change_of(directory: u64, path: u64) -> Option<NameChange> {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path) };
    let head = recording::head().or_else(observed)?;
    if name.is_empty() || is_foreign(name) {
        return None;
    }
    let since = head.files.since.load(Relaxed) as i64;
    // SAFETY: the caller's promise.
    unsafe { changed_names::change_of((directory, path), since) }
}

fn report_change(what: &str, name: &[u8], change: Option<NameChange>) {
    match change {
        Some(NameChange::Target) => forbid_restart(what, name, CHANGED),
        Some(NameChange::Way) => forbid_restart(what, name, CHANGED_WAY),
        Some(NameChange::Absent) => {
            forbid_restart("looks for", name, " in a directory that changes");
        }
        None => (),
    }
}

/// Reports a listing of a directory that has changed since the job began.
fn lists(descriptor: u64) {
    let Some(head) = recording::head().or_else(observed) else { return };
    let since = head.files.since.load(Relaxed) as i64;
    let Some((FileKind::Directory, identity)) = identity_of(descriptor as u32 as u64) else {
        return;
    };
    let mut path = [0; PATH_BYTES];
    let length = path_of(descriptor as u32 as u64, &mut path);
    if identity.modified.max(identity.changed) >= since && !is_foreign(&path[..length]) {
        forbid_restart("lists", &path[..length], ", which is changed while the job runs");
    }
}

/// Whether a call opens a file for writing, creates a file or truncates a file, and a process may
/// read the file later.
fn is_opened_for_writing(directory: u64, path: u64, name: &[u8], flags: c_int) -> bool {
    let writes =
        flags & libc::O_ACCMODE != libc::O_RDONLY || flags & (libc::O_CREAT | libc::O_TRUNC) != 0;
    // Nothing reads back what a process writes to a device.
    let is_device = || {
        file_metadata::identity_at((directory, path))
            .is_some_and(|(kind, _)| matches!(kind, FileKind::Other | FileKind::Random))
            && !file_metadata::passes_on_at((directory, path))
    };
    writes && !is_foreign(name) && !is_device()
}

/// Reports a system call that changes a name.
///
/// # Safety
/// The arguments are those of a system call.
unsafe fn names(number: c_long, arguments: [u64; 6]) {
    let Some(path_change) = PathChange::of(number, arguments) else { return };
    for (_, path) in [path_change.first, path_change.second].into_iter().flatten() {
        // SAFETY: the caller's promise.
        let name = unsafe { text(path) };
        if !is_foreign(name) {
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

/// Reports a look at an open file that may change.
fn examines(descriptor: u64) {
    uses("looks at", descriptor);
}

fn uses(what: &str, descriptor: u64) {
    let Some(head) = recording::head().or_else(observed) else { return };
    let since = head.files.since.load(Relaxed) as i64;
    with_file(descriptor, |changed, path| {
        if changed >= since {
            forbid_restart(what, path, CHANGED);
        }
    });
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
fn is_foreign(path: &[u8]) -> bool {
    is_exempt(path)
        || is_virtual(path)
        || path.starts_with(b"/dev/") && !path.starts_with(b"/dev/shm/")
}

fn forbid_restart(what: &str, path: &[u8], more: &str) {
    struct Who;
    impl fmt::Display for Who {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(match observed() {
                Some(_) => "a program that it has started",
                None if trap::is_in_handler(trap::stack_pointer()) => "a handler of a signal",
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
