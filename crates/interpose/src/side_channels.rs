//! Channels besides MPI and files by which a rank can communicate: sockets, System V and POSIX
//! message queues, semaphores and shared memory, signals, the system's log. Data in these channels
//! is not recorded, and an incarnation that replays would send the data a second time.
//!
//! In: calls of the C library's functions by the program (not by the libraries of the network,
//! which have sockets of their own), and system calls that send signals, watch files or mount file
//! systems. System calls on sockets that no function of the C library makes come from
//! `raw_channels`. Out: one report that the rank cannot be restarted. The calls themselves are let
//! through.
//!
//! Calls that access the memory or the descriptors of another process fail with EPERM instead: a
//! restart of the other process would lose the shared data too, and this process cannot forbid that
//! restart.
//!
//! What may never happen: a process outside the job gets data twice without a log line that says
//! so.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use landbridge_proto::nondeterminism::RecordHead;
use libc::{c_long, mmsghdr, msghdr, sockaddr, socklen_t};

use crate::libc_wrappers::warn;
use crate::session::{Path, kernel, text};
use crate::{caller, file_metadata, observe, processes, real_libc, recording, trap};

/// A channel, as the report names it.
pub const CONNECTS: &str = "it connects a socket";
pub const BINDS: &str = "it binds a socket";
pub const LISTENS: &str = "it listens on a socket";
pub const SENDS: &str = "it sends by a socket";
pub const SHARES_MEMORY: &str = "it attaches shared memory (shmat)";
pub const SEMAPHORES: &str = "it uses semaphores (semget)";
pub const MESSAGE_QUEUE: &str = "it uses a message queue (msgget)";
pub const NAMED_QUEUE: &str = "it uses a message queue (mq_open)";

/// Forbids a restart if the call at address `caller` is one of the program's.
fn forbid_restart(caller: usize, what: &str) {
    let matters = trap::is_installed() && observe::is_watched();
    if matters && !caller::is_known_network_call(caller) {
        if caller::belongs_to_mpi_or_transport(caller) {
            return caller::remember_network_call(caller);
        }
        report(what);
    }
}

/// Forbids a restart, for a channel that the program uses.
pub fn report(what: &str) {
    observe::forbid_restart_of(format_args!("{what}, which is not recorded"));
}

/// Whether an address is that of another process: sockets of these few families communicate with
/// the kernel.
///
/// # Safety
/// The pointer is null, or that of an address.
pub unsafe fn is_of_others(address: *const sockaddr) -> bool {
    // SAFETY: null, or an address, which begins with its family.
    let family = unsafe { address.cast::<libc::sa_family_t>().as_ref() };
    let family = family.map_or(libc::AF_UNSPEC, |family| c_int::from(*family));
    !matches!(family, libc::AF_UNSPEC | libc::AF_NETLINK | libc::AF_ALG)
}

/// Whether a message names another process as its receiver. Messages without an address go to a
/// socket that was connected before, or made by `socketpair`.
///
/// # Safety
/// The pointer is null, or that of a message.
pub unsafe fn is_for_others(message: *const msghdr) -> bool {
    // SAFETY: the caller's promise.
    unsafe { message.as_ref().is_some_and(|message| is_of_others(message.msg_name.cast())) }
}

/// Whether one of the messages names another process as its receiver.
///
/// # Safety
/// `messages` points to `count` messages.
pub unsafe fn any_is_for_others(messages: *const mmsghdr, count: c_uint) -> bool {
    // SAFETY: the caller's promise.
    unsafe { (0..count as usize).any(|at| is_for_others(&raw const (*messages.add(at)).msg_hdr)) }
}

/// Reports a connection that the C library's function has made or begun.
///
/// # Safety
/// The arguments are valid for the C library's `connect`.
pub unsafe extern "C" fn connect(
    socket: c_int,
    address: *const sockaddr,
    length: socklen_t,
    from: usize,
) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        let outcome = real_libc::connect(socket, address, length);
        // A library may look for an absent service (libuuid for its daemon); a refused connection
        // has sent nothing.
        let error = libc::__errno_location();
        let is_connected = outcome == 0 || *error == libc::EINPROGRESS;
        if is_connected && is_of_others(address) {
            let before = *error;
            forbid_restart(from, CONNECTS);
            *error = before;
        }
        outcome
    }
}

/// Reports a socket to which other processes can send.
///
/// # Safety
/// The arguments are valid for the C library's `bind`.
pub unsafe extern "C" fn bind(
    socket: c_int,
    address: *const sockaddr,
    length: socklen_t,
    from: usize,
) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        let outcome = real_libc::bind(socket, address, length);
        if outcome == 0 && is_of_others(address) {
            forbid_restart(from, BINDS);
        }
        outcome
    }
}

/// Defines replacements of the C library's functions by `name(arguments) -> result, channel`. Each
/// replacement forbids a restart for this channel and then calls the C library's function. With `if
/// condition`, only a call that satisfies the condition forbids a restart.
macro_rules! report_and_call {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty,
        $channel:ident $(if $condition:expr)?;)*) => {$(
        /// # Safety
        /// The arguments are valid for the C library's function.
        pub unsafe extern "C" fn $name($($argument: $type,)* from: usize) -> $result {
            // SAFETY: the arguments are valid for the C library's function, by the caller's
            // promise. Arguments that are absent are passed on unread.
            unsafe {
                $(if $condition)? {
                    forbid_restart(from, $channel);
                }
                real_libc::$name($($argument),*)
            }
        }
    )*};
}

report_and_call! {
    listen(socket: c_int, backlog: c_int) -> c_int, LISTENS;
    sendto(
        socket: c_int,
        bytes: *const c_void,
        length: usize,
        flags: c_int,
        address: *const sockaddr,
        address_length: socklen_t
    ) -> isize, SENDS if is_of_others(address);
    sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> isize,
        SENDS if is_for_others(message);
    sendmmsg(socket: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int,
        SENDS if any_is_for_others(messages, count);
    shmat(id: c_int, address: *const c_void, flags: c_int) -> *mut c_void, SHARES_MEMORY;
    semget(key: libc::key_t, count: c_int, flags: c_int) -> c_int, SEMAPHORES;
    msgget(key: libc::key_t, flags: c_int) -> c_int, MESSAGE_QUEUE;
    // The third and the fourth argument may be absent.
    mq_open(
        name: *const c_char,
        flags: c_int,
        mode: libc::mode_t,
        attributes: *mut c_void
    ) -> c_int, NAMED_QUEUE;
}

/// Reports a line for the system's log (syslog(3)); `from` is the address of the call. Returns the
/// C library's function, which then receives all arguments of the call.
pub extern "C" fn syslog(from: usize) -> usize {
    log_line(from, &real_libc::SYSLOG)
}

/// The same for `vsyslog`.
pub extern "C" fn vsyslog(from: usize) -> usize {
    log_line(from, &real_libc::VSYSLOG)
}

/// The same for `__syslog_chk`, which compilers call instead of `syslog`.
pub extern "C" fn checked_syslog(from: usize) -> usize {
    log_line(from, &real_libc::CHECKED_SYSLOG)
}

/// The same for `__vsyslog_chk`.
pub extern "C" fn checked_vsyslog(from: usize) -> usize {
    log_line(from, &real_libc::CHECKED_VSYSLOG)
}

fn log_line(from: usize, function: &'static real_libc::NextSymbol) -> usize {
    forbid_restart(from, "it writes to the system's log (syslog)");
    function.address()
}

/// Reports a system call of any observed or recorded thread that another process notices, or by
/// which this process notices others.
pub fn check(number: c_long, arguments: [u64; 6]) {
    let [first, second, third, ..] = arguments;
    let (process, signal) = match number {
        libc::SYS_eventfd2 => {
            let is_semaphore = second as c_int & libc::EFD_SEMAPHORE != 0;
            let head = recording::head().filter(|_| is_semaphore);
            return head.into_iter().for_each(RecordHead::note_semaphore);
        }
        libc::SYS_kill | libc::SYS_tkill | libc::SYS_rt_sigqueueinfo => (first, second),
        libc::SYS_tgkill | libc::SYS_rt_tgsigqueueinfo => (first, third),
        libc::SYS_pidfd_send_signal => (0, second),
        libc::SYS_inotify_init | libc::SYS_inotify_init1 | libc::SYS_fanotify_init => {
            return observe::forbid_restart_of(format_args!(
                "it watches files for changes (inotify), which are not made again"
            ));
        }
        libc::SYS_mount | libc::SYS_umount2 | libc::SYS_move_mount => {
            return observe::forbid_restart_of(format_args!("it mounts file systems"));
        }
        _ => return,
    };
    let is_question = signal as c_int == 0;
    if !is_question && !processes::is_own_process(process as c_int) {
        observe::forbid_restart_of(format_args!(
            "it sends a signal to another process, which would get it once more"
        ));
    }
}

/// The error of a call that accesses another process: process_vm_readv(2), process_vm_writev(2),
/// pidfd_getfd(2), and opens of `/proc/PID/mem` and `/proc/PID/fd/N` (proc(5)). `None`: the call
/// does not access another process.
///
/// # Safety
/// The arguments are those of a system call that this thread makes.
pub unsafe fn refuse(number: c_long, arguments: [u64; 6]) -> Option<i64> {
    let [first, second, ..] = arguments;
    let path = match number {
        libc::SYS_process_vm_readv | libc::SYS_process_vm_writev => {
            let is_own = first == kernel(libc::SYS_getpid, [0; 6]) as u64;
            return (!is_own).then(|| refused(format_args!("the memory of another process")));
        }
        libc::SYS_pidfd_getfd => {
            return Some(refused(format_args!("a file that another process has open")));
        }
        libc::SYS_open | libc::SYS_creat => first,
        libc::SYS_openat | libc::SYS_openat2 => second,
        _ => return None,
    };
    // SAFETY: the caller's promise.
    let path = unsafe { text(path) };
    is_of_another_process(path).then(|| refused(format_args!("{}", Path(path))))
}

#[cold]
fn refused(what: std::fmt::Arguments<'_>) -> i64 {
    static IS_SAID: AtomicBool = AtomicBool::new(false);
    if !IS_SAID.swap(true, Relaxed) {
        warn(format_args!(
            "this process may not use {what} (EPERM): processes that share memory in this way cannot be \
             restarted one by one; without --recover they can share it"
        ));
    }
    -i64::from(libc::EPERM)
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
    fn memory_of_another_process_is_refused_and_ones_own_is_not() {
        let own = u64::from(std::process::id());
        // SAFETY: no path is among the arguments.
        unsafe {
            let call = libc::SYS_process_vm_writev;
            assert_eq!(refuse(call, [own, 0, 0, 0, 0, 0]), None);
            assert_eq!(refuse(call, [1, 0, 0, 0, 0, 0]), Some(-i64::from(libc::EPERM)));
            assert_eq!(refuse(libc::SYS_read, [0; 6]), None);
        }
    }
}
