//! Threads beside the recorded one, handlers of signals, and programs that a rank has started: what they do to files cannot be
//! replayed.
//!
//! In: their system calls, which are dispatched as those of the recorded thread are. Out: nothing but a word, once, that the rank
//! cannot be restarted, at the first call that changes a file, or that reads one which somebody changes while the job runs. The
//! calls themselves are let through.
//!
//! Programs in which nothing would be seen are noticed when they begin (`child_programs`).
//!
//! What may never happen: an effect of theirs is done again by a later incarnation.

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::*};

use landbridge_proto::nondeterminism::{RECORD_HEAD_BYTES, RecordHead};
use libc::{c_long, pthread_attr_t, pthread_t};

use crate::content;
use crate::descriptor_table::{FileIdentity, FileKind, PATH_BYTES};
use crate::file_metadata::{self, identity_of, is_exempt, is_virtual, path_of};
use crate::path_changes::PathChange;
use crate::session::{Path, Session, kernel, text};
use crate::syscalls::HERE;
use crate::{
    caller, child_programs, real_libc, recording, side_channels, syscalls, trampoline, trap,
};

/// In a program that a rank has started: the head of that rank's record.
static OBSERVED: AtomicPtr<RecordHead> = AtomicPtr::new(null_mut());

type StartRoutine = extern "C" fn(*mut c_void) -> *mut c_void;

/// Threads that have been asked for and have not begun.
const THREAD_STARTS_MAX: usize = 256;
static THREAD_STARTS: [ThreadStart; THREAD_STARTS_MAX] =
    [const { ThreadStart::free() }; THREAD_STARTS_MAX];

struct ThreadStart {
    is_taken: AtomicBool,
    what: UnsafeCell<Option<(StartRoutine, *mut c_void)>>,
}

// SAFETY: whoever has taken it hands it to one thread.
unsafe impl Sync for ThreadStart {}

impl ThreadStart {
    const fn free() -> Self {
        Self { is_taken: AtomicBool::new(false), what: UnsafeCell::new(None) }
    }
}

/// # Safety
/// As the C library's function.
pub unsafe extern "C" fn pthread_create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    begin: StartRoutine,
    argument: *mut c_void,
    from: usize,
) -> c_int {
    // SAFETY: of the C library's function, by its caller.
    unsafe {
        if !trap::is_installed() || !caller::is_program(from) {
            return create(thread, attributes, begin, argument);
        }
        let free = THREAD_STARTS.iter().find(|one| !one.is_taken.swap(true, Acquire));
        let Some(free) = free else {
            recording::forbid_restart(format_args!(
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

/// How many calls of the C library's function are under way.
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
    // SAFETY: it was taken for this thread.
    let slot = unsafe { &*slot.cast::<ThreadStart>() };
    // SAFETY: as above.
    let what = unsafe { (*slot.what.get()).take() };
    slot.is_taken.store(false, Release);
    trap::observe_this_thread();
    match what {
        Some((begin, argument)) => begin(argument),
        None => null_mut(),
    }
}

/// A thread or process begins. One that shares no memory with its parent begins within the call, and is observed from then on.
/// `vfork` comes here as `fork`: vfork(2) allows that, and a child that shares its parent's memory cannot be observed.
pub fn fork(number: c_long, arguments: [u64; 6], flags: u64, stack: u64) -> Option<i64> {
    let has = |flag: c_int| flags & flag as u64 != 0;
    if has(libc::CLONE_VM) {
        // `posix_spawn`: the child executes a program at once, and that is looked at (`child_programs`), as are the files that it opens.
        if has(libc::CLONE_THREAD) && CREATING.load(Relaxed) == 0 {
            forbid_restart_of(format_args!("it begins a thread otherwise than by pthread_create"));
        } else if !has(libc::CLONE_THREAD) && has(libc::CLONE_PIDFD) {
            // Its environment is not looked at, as that of `posix_spawn` is.
            forbid_restart_of(format_args!("it starts a program by pidfd_spawn"));
        } else if !has(libc::CLONE_THREAD) && !has(libc::CLONE_VFORK) {
            forbid_restart_of(format_args!("it begins a process that shares its memory"));
        } else if !has(libc::CLONE_THREAD) && !child_programs::own_environment_loads_interposer() {
            // `system` and `popen` hand on the process's own environment.
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
        // A child of a child has the head of the record already.
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

/// The same by `clone3`, whose arguments lie in memory (`struct clone_args`): the flags are the first of them.
///
/// # Safety
/// The arguments are those of the call.
pub unsafe fn clone3(arguments: [u64; 6]) -> Option<i64> {
    const STACK: usize = 5;
    // SAFETY: the caller's promise; programs that leave out the stack do not exist.
    let (flags, stack) = unsafe {
        let words = arguments[0] as *const u64;
        (words.read_unaligned(), words.add(STACK).read_unaligned())
    };
    fork(libc::SYS_clone3, arguments, flags, stack)
}

/// This process was started by a recorded one, whose record is open there. False: it is not observed.
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

/// # Safety
/// The arguments are those of a system call that this thread makes.
pub unsafe fn handle(number: c_long, arguments: [u64; 6]) -> Option<i64> {
    let files = recording::head().or_else(observed).map(|head| &head.files)?;
    if files.is_restart_forbidden() {
        return None;
    }
    let [a, b, c, ..] = arguments;
    side_channels::check(number, arguments);
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
            | libc::SYS_llistxattr => looks(HERE, a),
            libc::SYS_newfstatat
            | libc::SYS_statx
            | libc::SYS_faccessat
            | libc::SYS_faccessat2
            | libc::SYS_readlinkat => looks(a, b),
            libc::SYS_getdents | libc::SYS_getdents64 => lists(a),
            libc::SYS_execveat => forbid_restart_of(format_args!(
                "it executes a program by its descriptor, which nobody can look after"
            )),
            libc::SYS_open => open(HERE, a, b),
            libc::SYS_creat => open(HERE, a, libc::O_WRONLY as u64),
            libc::SYS_openat => open(a, b, c),
            // `struct open_how` begins with the flags.
            libc::SYS_openat2 => open(a, b, (c as *const u64).read_unaligned()),
            libc::SYS_io_uring_setup | libc::SYS_io_setup => {
                return Some(-i64::from(libc::ENOSYS));
            }
            libc::SYS_execve => {
                child_programs::check_exec(a as *const c_char, c as *const *mut c_char)
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

/// Calls on files that are open already.
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
        libc::SYS_flock => locks(a),
        libc::SYS_fcntl if is_lock(b) => locks(a),
        libc::SYS_dup | libc::SYS_dup2 | libc::SYS_dup3 | libc::SYS_fcntl => forget_own_files(),
        libc::SYS_read | libc::SYS_readv | libc::SYS_lseek => moves(a),
        libc::SYS_pread64 | libc::SYS_preadv | libc::SYS_preadv2 => reads(a),
        libc::SYS_mmap if arguments[3] as c_int & libc::MAP_ANONYMOUS == 0 => {
            let is_shared = arguments[3] as c_int & libc::MAP_TYPE != libc::MAP_PRIVATE;
            let writes = is_shared && c as c_int & libc::PROT_WRITE != 0;
            if writes { changes(arguments[4]) } else { reads(arguments[4]) }
        }
        _ => (),
    }
}

/// Whether what this process does, or what it starts, matters to a record.
pub fn is_watched() -> bool {
    recording::head().or_else(observed).is_some_and(|head| !head.files.is_restart_forbidden())
}

/// Whether this process was started by a recorded one.
pub fn is_child() -> bool {
    observed().is_some()
}

fn observed() -> Option<&'static RecordHead> {
    // SAFETY: null, or the head of a record, which stays mapped.
    unsafe { OBSERVED.load(Acquire).as_ref() }
}

/// A program that this process starts will open this file as it begins.
///
/// # Safety
/// The path is a string.
pub unsafe fn before_open(path: *const c_char, flags: c_int) {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path.addr() as u64) };
    if is_opened_for_writing(HERE, path.addr() as u64, name, flags) {
        let path = Path(name);
        forbid_restart_of(format_args!("a program that it starts opens {path} for writing"));
    }
}

/// # Safety
/// The path is a string.
unsafe fn open(directory: u64, path: u64, flags: u64) {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path) };
    if is_opened_for_writing(directory, path, name, flags as c_int) {
        forbid_restart("opens", name, " for writing");
    } else if file_metadata::passes_on_at((directory, path)) {
        forbid_restart("opens", name, ", which keeps nothing");
    } else if file_metadata::identity_at((directory, path)).is_none() {
        // SAFETY: the caller's promise.
        unsafe { looks(directory, path) };
    }
}

/// A descriptor of the recorded thread that is not open on its file, because that thread has not come so far yet.
fn placeholder(descriptor: u64) {
    if Session::is_placeholder(descriptor) && is_replaying() {
        forbid_restart("uses", b"a file", " that is open in it, before that is opened again");
    }
}

fn is_replaying() -> bool {
    recording::head().or_else(observed).is_some_and(RecordHead::is_replaying)
}

/// A look at a name: what is seen there may be something else the next time, if it has changed since the job began.
///
/// # Safety
/// The path is a string, or null.
unsafe fn looks(directory: u64, path: u64) {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path) };
    let Some(head) = recording::head().or_else(observed) else { return };
    if name.is_empty() || is_foreign(name) {
        return;
    }
    let since = head.files.since.load(Relaxed) as i64;
    let changed = |identity: &FileIdentity| identity.modified.max(identity.changed) >= since;
    match file_metadata::identity_at((directory, path)) {
        // Of a directory it is its content that changes (`lists`).
        Some((FileKind::Directory, _)) => (),
        Some((_, identity)) if changed(&identity) => {
            forbid_restart("looks at", name, ", which is changed while the job runs");
        }
        Some(_) => (),
        None => {
            // SAFETY: as above.
            let above = unsafe { file_metadata::directory_of((directory, path)) };
            if above.is_some_and(|identity| changed(&identity)) {
                forbid_restart("looks for", name, " in a directory that changes");
            }
        }
    }
}

/// The names in a directory.
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

/// Whether a file that somebody may read later is opened for writing, created or emptied.
fn is_opened_for_writing(directory: u64, path: u64, name: &[u8], flags: c_int) -> bool {
    let writes =
        flags & libc::O_ACCMODE != libc::O_RDONLY || flags & (libc::O_CREAT | libc::O_TRUNC) != 0;
    // A device is no file that anybody reads later.
    let is_device = || {
        file_metadata::identity_at((directory, path))
            .is_some_and(|(kind, _)| matches!(kind, FileKind::Other | FileKind::Random))
            && !file_metadata::passes_on_at((directory, path))
    };
    writes && !is_foreign(name) && !is_device()
}

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

/// Whether this command of fcntl(2) takes or gives back a lock.
fn is_lock(command: u64) -> bool {
    matches!(
        command as c_int,
        libc::F_SETLK | libc::F_SETLKW | libc::F_OFD_SETLK | libc::F_OFD_SETLKW
    )
}

/// A lock that orders this process and others, which a later incarnation would ask for at another time.
fn locks(descriptor: u64) {
    with_file(descriptor, |_, path| forbid_restart("locks", path, ""));
}

fn changes(descriptor: u64) {
    with_file(descriptor, |_, path| forbid_restart("writes", path, ""));
}

/// A read that moves the position which the recorded thread may rely on, or that reads what may change.
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

/// Whether a child's descriptor is one of the rank's: what is read by it moves the position of both (open(2)).
///
/// The answer costs a look at every descriptor of the rank, so the last few files that are the child's own are remembered, until
/// a descriptor is duplicated ([`forget_own_files`]).
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

/// Digests of a descriptor and its file, of which [`is_position_shared`] has found that the rank does not have it open.
static OWN_FILES: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];

/// A descriptor becomes another's copy: it may be the rank's from now on, and of the same file as before.
fn forget_own_files() {
    OWN_FILES.iter().for_each(|one| one.store(0, Relaxed));
}

fn reads(descriptor: u64) {
    let Some(head) = recording::head().or_else(observed) else { return };
    let since = head.files.since.load(Relaxed) as i64;
    with_file(descriptor, |changed, path| {
        if changed >= since {
            forbid_restart("reads", path, ", which is changed while the job runs");
        }
    });
}

/// If there is a file behind the descriptor: when it was changed last, and its path.
pub fn with_file(descriptor: u64, work: impl FnOnce(i64, &[u8])) {
    let Some((FileKind::File, identity)) = identity_of(descriptor as u32 as u64) else { return };
    let mut path = [0; PATH_BYTES];
    let length = path_of(descriptor as u32 as u64, &mut path);
    if !is_foreign(&path[..length]) {
        work(identity.modified.max(identity.changed), &path[..length]);
    }
}

/// Whether it is none of the files that are recorded.
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

/// The rank whose record this is cannot be restarted, for this reason.
pub fn forbid_restart_of(reason: fmt::Arguments<'_>) {
    match observed() {
        Some(head) => recording::forbid_restart_in(head, reason),
        None => recording::forbid_restart(reason),
    }
}
