//! System calls that name another process: they signal it, examine it, change it, or access its
//! memory and files.
//!
//! In: a system call of any observed or recorded thread. Out: one report that the rank cannot be
//! restarted, because a replay would act on the other process once more, or find it in another
//! state. Calls that access the memory or the descriptors of another process fail with EPERM
//! instead: a restart of the other process would lose the shared data too, and this process cannot
//! forbid that restart. A call that finds no process waits while a rank of this node is restarted:
//! locks that hold a process id would count as left over.
//!
//! What may never happen: a call on this process, its threads or its descendants is reported; a
//! killed rank that is being restarted counts as gone.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed};

use libc::c_long;

use crate::file_identity::PATH_BYTES;
use crate::file_metadata::{self, path_of_name};
use crate::kernel_calls::{HERE, kernel, text};
use crate::messages::{Path, warn};
use crate::processes::is_own_process;
use crate::watched;

/// How often a process is looked for, about a millisecond apart, while a rank is being restarted.
const ABSENCE_LOOKS_MAX: u32 = 600_000;

/// Reports a call on another process.
pub fn check(number: c_long, arguments: [u64; 6]) {
    let [first, second, third, ..] = arguments;
    let (process, signal) = match number {
        libc::SYS_kill | libc::SYS_tkill | libc::SYS_rt_sigqueueinfo => (first, second),
        libc::SYS_tgkill | libc::SYS_rt_tgsigqueueinfo => (first, third),
        libc::SYS_pidfd_send_signal => (0, second),
        _ => return check_state(number, arguments),
    };
    if is_own_process(process as c_int) {
        return;
    }
    match signal as c_int {
        0 => watched::forbid_restart_of(format_args!(
            "it asks whether another process runs (kill), which is not recorded"
        )),
        _ => watched::forbid_restart_of(format_args!(
            "it sends a signal to another process, which would get it once more"
        )),
    }
}

/// Reports a call that examines or changes limits, priority or processors of another process, or
/// that shows whether the process runs.
fn check_state(number: c_long, arguments: [u64; 6]) {
    let [first, second, ..] = arguments;
    let is_other = |process: u64| process as c_int != 0 && !is_own_process(process as c_int);
    let shows_another = match number {
        libc::SYS_getpgid
        | libc::SYS_getsid
        | libc::SYS_setpgid
        | libc::SYS_pidfd_open
        | libc::SYS_get_robust_list
        | libc::SYS_sched_rr_get_interval => is_other(first),
        libc::SYS_kcmp => is_other(first) || is_other(second),
        _ => false,
    };
    if shows_another {
        return watched::forbid_restart_of(format_args!(
            "it asks about another process (getpgid), which is not recorded"
        ));
    }
    // Of the three kinds of `who`, 0 is a process (getpriority(2)), and 1 (ioprio_get(2)).
    let is_other = match number {
        libc::SYS_prlimit64
        | libc::SYS_sched_setaffinity
        | libc::SYS_sched_getaffinity
        | libc::SYS_sched_setscheduler
        | libc::SYS_sched_getscheduler
        | libc::SYS_sched_setparam
        | libc::SYS_sched_getparam
        | libc::SYS_sched_setattr
        | libc::SYS_sched_getattr
        | libc::SYS_migrate_pages
        | libc::SYS_move_pages => is_other(first),
        libc::SYS_setpriority | libc::SYS_getpriority => first != 0 || is_other(second),
        libc::SYS_ioprio_set | libc::SYS_ioprio_get => first != 1 || is_other(second),
        _ => false,
    };
    if is_other {
        watched::forbid_restart_of(format_args!(
            "it examines or changes limits, priority or processors of another process"
        ));
    }
}

/// Whether a call asks for another process, so that its answer depends on whether that one exists.
///
/// # Safety
/// The arguments are those of a system call that this thread makes.
pub unsafe fn asks_for_process(number: c_long, arguments: [u64; 6]) -> bool {
    let [first, second, ..] = arguments;
    let path = match number {
        libc::SYS_kill
        | libc::SYS_tkill
        | libc::SYS_tgkill
        | libc::SYS_rt_sigqueueinfo
        | libc::SYS_rt_tgsigqueueinfo
        | libc::SYS_pidfd_open
        | libc::SYS_getpgid
        | libc::SYS_getsid => return !is_own_process(first as c_int),
        libc::SYS_open
        | libc::SYS_stat
        | libc::SYS_lstat
        | libc::SYS_access
        | libc::SYS_readlink
        | libc::SYS_chdir => first,
        libc::SYS_openat
        | libc::SYS_newfstatat
        | libc::SYS_statx
        | libc::SYS_faccessat
        | libc::SYS_faccessat2
        | libc::SYS_readlinkat => second,
        _ => return false,
    };
    // SAFETY: the caller's promise.
    let rest = unsafe { text(path) }.strip_prefix(b"/proc/");
    rest.and_then(<[u8]>::first).is_some_and(u8::is_ascii_digit)
}

/// Performs a system call. If it asks for a process and there is none while a rank of this node is
/// being restarted, the call is performed again when all ranks have a process.
///
/// # Safety
/// The arguments are those of a system call that this thread makes.
pub unsafe fn perform(number: c_long, arguments: [u64; 6]) -> i64 {
    let absences = || watched::head().map_or(0, |head| head.absences.load(Acquire));
    let gone = [libc::ESRCH, libc::ENOENT, libc::ENOTDIR].map(|error| -i64::from(error));
    for _ in 0..ABSENCE_LOOKS_MAX {
        let before = absences();
        let result = kernel(number, arguments);
        // The agent changes the number before the process id of a killed rank disappears.
        if !gone.contains(&result)
            || before % 2 == 0 && absences() == before
            // SAFETY: the caller's promise.
            || !unsafe { asks_for_process(number, arguments) }
        {
            return result;
        }
        let pause = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        kernel(libc::SYS_nanosleep, [(&raw const pause).addr() as u64, 0, 0, 0, 0, 0]);
    }
    kernel(number, arguments)
}

/// The error of a call that accesses another process: process_vm_readv(2), process_vm_writev(2),
/// ptrace(2), pidfd_getfd(2), and opens of `/proc/PID/mem` and `/proc/PID/fd/N` (proc(5)). `None`:
/// the call does not access another process.
///
/// # Safety
/// The arguments are those of a system call that this thread makes.
pub unsafe fn refuse(number: c_long, arguments: [u64; 6]) -> Option<i64> {
    let [first, second, ..] = arguments;
    let (directory, path) = match number {
        libc::SYS_ptrace => {
            let is_of_other =
                first != libc::PTRACE_TRACEME.into() && !is_own_process(second as c_int);
            return is_of_other.then(|| refused(format_args!("another process by ptrace")));
        }
        libc::SYS_process_vm_readv | libc::SYS_process_vm_writev => {
            let is_own = first == kernel(libc::SYS_getpid, [0; 6]) as u64;
            return (!is_own).then(|| refused(format_args!("the memory of another process")));
        }
        libc::SYS_pidfd_getfd => {
            return Some(refused(format_args!("a file that another process has open")));
        }
        libc::SYS_open | libc::SYS_creat => (HERE, first),
        libc::SYS_openat | libc::SYS_openat2 => (first, second),
        _ => return None,
    };
    // SAFETY: the caller's promise.
    let (name, is_of_other) = unsafe { (text(path), leads_to_another_process(directory, path)) };
    is_of_other.then(|| refused(format_args!("{}", Path(name))))
}

#[cold]
fn refused(what: std::fmt::Arguments<'_>) -> i64 {
    static IS_SAID: AtomicBool = AtomicBool::new(false);
    if !IS_SAID.swap(true, Relaxed) {
        warn(format_args!(
            "this process may not use {what} (EPERM): processes that share memory in this way \
             cannot be restarted one by one; without --recover they can share it"
        ));
    }
    -i64::from(libc::EPERM)
}

/// Whether a name leads to the memory or to an open file of another process (proc(5)).
///
/// # Safety
/// The path is a C string.
unsafe fn leads_to_another_process(directory: u64, path: u64) -> bool {
    // SAFETY: the caller's promise.
    let name = unsafe { text(path) };
    if is_of_another_process(name) {
        return true;
    }
    let last = name.rsplit(|byte| *byte == b'/').next().unwrap_or(name);
    let may_lead = last == b"mem" || last.iter().all(u8::is_ascii_digit);
    let mut whole = [0; PATH_BYTES];
    // SAFETY: the caller's promise.
    let length = if may_lead { unsafe { path_of_name((directory, path), &mut whole) } } else { 0 };
    is_of_another_process(&whole[..length])
}

/// Whether a path of proc(5) leads to the memory or to an open file of another process.
fn is_of_another_process(path: &[u8]) -> bool {
    let mut parts = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty());
    if !path.starts_with(b"/") || parts.next() != Some(b"proc") {
        return false;
    }
    let is_process = parts.next().is_some_and(|part| part.iter().all(u8::is_ascii_digit));
    let is_shared = match parts.find(|part| matches!(*part, b"mem" | b"fd")) {
        // The directory itself only lists numbers.
        Some(b"fd") => parts.next().is_some(),
        found => found.is_some(),
    };
    is_process && is_shared && file_metadata::in_own_proc_directory(path).is_none()
}

/// Whether a name leads to the directory of another process in proc(5), to something in it, or to
/// what the kernel lists there of all processes. The rank that has started this process does not
/// count.
///
/// # Safety
/// The path is a C string, or null.
pub unsafe fn is_about_another_process(directory: u64, path: u64) -> bool {
    // SAFETY: the caller's promise.
    if is_in_directory_of_another(unsafe { text(path) }) {
        return true;
    }
    // Most names are elsewhere, and a descriptor could take the number that the recorded thread is
    // about to use.
    let behind = file_metadata::identity_behind((directory, path));
    if behind.is_none_or(|(_, identity)| identity.device != proc_device()) {
        return false;
    }
    let mut whole = [0; PATH_BYTES];
    let length = file_metadata::path_behind((directory, path), &mut whole);
    is_in_directory_of_another(&whole[..length])
}

/// Device of the files of proc(5); `u64::MAX` where there are none.
fn proc_device() -> u64 {
    static DEVICE: AtomicU64 = AtomicU64::new(0);
    match DEVICE.load(Relaxed) {
        0 => {
            let found = file_metadata::identity_at((HERE, c"/proc".as_ptr().addr() as u64));
            let device = found.map_or(u64::MAX, |(_, identity)| identity.device);
            DEVICE.store(device, Relaxed);
            device
        }
        known => known,
    }
}

fn is_in_directory_of_another(path: &[u8]) -> bool {
    let mut parts = path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b"."));
    if !path.starts_with(b"/") || parts.next() != Some(b"proc") {
        return false;
    }
    let word = parts.next().unwrap_or_default();
    // Lists of the locks, sockets and queues of all processes, which change with what they do.
    if matches!(word, b"locks" | b"sysvipc") || path.ends_with(b"/net/unix") {
        return true;
    }
    let number = std::str::from_utf8(word).ok().and_then(|word| word.parse::<c_int>().ok());
    let is_rank = |number: c_int| {
        watched::observed().is_some_and(|head| head.owner.load(Relaxed) == number as u64)
    };
    number.is_some_and(|number| !is_rank(number) && !is_own_process(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_open_files_of_other_processes_are_recognized() {
        for path in
            [&b"/proc/1/mem"[..], b"/proc/1/fd/7", b"/proc/1/task/1/fd/7", b"//proc//1/fd/7"]
        {
            assert!(is_of_another_process(path), "{}", path.escape_ascii());
        }
        let own = format!("/proc/{}/mem", std::process::id());
        let others =
            [&b"/proc/self/fd/3"[..], b"/proc/1/fd", b"/proc/1/stat", b"/proc/meminfo", b"fd/1"];
        for path in others.into_iter().chain([own.as_bytes()]) {
            assert!(!is_of_another_process(path), "{}", path.escape_ascii());
        }
    }

    #[test]
    fn names_of_what_the_kernel_says_of_other_processes_are_recognized() {
        let about = |name: &std::ffi::CStr| {
            // SAFETY: a C string.
            unsafe { is_about_another_process(HERE, name.as_ptr().addr() as u64) }
        };
        for name in [
            c"/proc/1/comm",
            c"/proc/1",
            c"//proc/self/../1/stat",
            c"/proc/999999999/x",
            c"//proc/./1/exe",
            c"/proc/locks",
            c"/proc/sysvipc/shm",
            c"/proc/net/unix",
            c"/proc/self/net/unix",
        ] {
            assert!(about(name), "{name:?}");
        }
        let own = std::ffi::CString::new(format!("/proc/{}/comm", std::process::id())).unwrap();
        let general = [c"/proc/meminfo", c"/proc/net/route", c"/proc", c"/tmp/locks"];
        for name in general.into_iter().chain([c"/proc/self/comm", c"/tmp/1", c"1", &own]) {
            assert!(!about(name), "{name:?}");
        }
    }

    #[test]
    fn memory_of_another_process_is_refused_and_ones_own_is_not() {
        let own = u64::from(std::process::id());
        // SAFETY: no path is among the arguments.
        unsafe {
            let call = libc::SYS_process_vm_writev;
            assert_eq!(refuse(call, [own, 0, 0, 0, 0, 0]), None);
            assert_eq!(refuse(call, [1, 0, 0, 0, 0, 0]), Some(-i64::from(libc::EPERM)));
            let of_ptrace = |request: u32, process| {
                refuse(libc::SYS_ptrace, [request.into(), process, 0, 0, 0, 0])
            };
            assert_eq!(of_ptrace(libc::PTRACE_TRACEME, 0), None);
            assert_eq!(of_ptrace(libc::PTRACE_PEEKDATA, own), None);
            assert_eq!(of_ptrace(libc::PTRACE_PEEKDATA, 1), Some(-i64::from(libc::EPERM)));
            assert_eq!(refuse(libc::SYS_read, [0; 6]), None);
        }
    }

    #[test]
    fn names_that_lead_to_another_process_by_detours_are_recognized() {
        let leads = |name: &std::ffi::CStr| {
            // SAFETY: a C string.
            unsafe { leads_to_another_process(HERE, name.as_ptr().addr() as u64) }
        };
        assert!(leads(c"/proc/self/../1/fd/7") && leads(c"/proc/self/../1/mem"));
        assert!(!leads(c"/proc/self/fd/../fd/0") && !leads(c"7") && !leads(c"/tmp/7"));
    }
}
