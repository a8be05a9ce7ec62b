//! Threads and processes that the program begins.
//!
//! In: `pthread_create` and the system calls fork, vfork, clone and clone3. Out: threads and
//! processes whose system calls are dispatched from their beginning, or a report that the rank
//! cannot be restarted. What may never happen: a thread or child of the program begins unobserved
//! and unreported.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{
    AtomicBool, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use landbridge_proto::nondeterminism::{RECORD_HEAD_BYTES, RecordHead};
use libc::{c_long, pthread_attr_t, pthread_t};

use crate::kernel_calls::kernel;
use crate::watched::{self, forbid_restart_of, observed};
use crate::{
    caller, child_programs, dispatch, real_libc, record_head, restart_refusals, thread_gate,
    trampoline,
};

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
        if !dispatch::is_installed() || !caller::is_program(from) {
            return create(thread, attributes, begin, argument);
        }
        let free = THREAD_STARTS.iter().find(|one| !one.is_taken.swap(true, Acquire));
        let Some(free) = free else {
            restart_refusals::forbid_restart(format_args!(
                "it begins more threads at once than the interposer tracks"
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
    dispatch::observe_this_thread();
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
                "it starts a program without LD_PRELOAD, which cannot be observed"
            ));
        }
        return None;
    }
    if stack != 0 {
        forbid_restart_of(format_args!("it begins a process on a stack of its own"));
        return None;
    }
    if observed().is_none() && !record_head::is_record(record_head::descriptor()) {
        forbid_restart_of(format_args!("it has closed the record's descriptor, and forks"));
        return None;
    }
    let result = kernel(number, arguments);
    if result == 0 {
        thread_gate::reset();
        let is_own = trampoline::make_own();
        // A child of a child has already mapped the head of the record.
        let is_observed = match observed() {
            Some(_) => dispatch::observe_this_thread(),
            None => begin_child(record_head::descriptor()),
        };
        if !is_own || !is_observed {
            forbid_restart_of(format_args!("there is no memory to watch its children"));
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

/// Begins observation of this process, which a recorded process has started, and which has the
/// handler of dispatched calls. `descriptor` is that of the record. False: this process is not
/// observed.
pub fn begin_child(descriptor: c_int) -> bool {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let (bytes, shared) = (RECORD_HEAD_BYTES as u64, libc::MAP_SHARED as u64);
    let found = kernel(libc::SYS_mmap, [0, bytes, protection, shared, descriptor as u64, 0]);
    if found <= 0 {
        return false;
    }
    watched::set_observed(found as *mut RecordHead);
    dispatch::observe_this_thread()
}
