//! Channels besides MPI and files by which a rank can communicate: sockets, System V and POSIX
//! message queues, semaphores and shared memory, keys, the system's log. Data in these channels
//! is not recorded, and an incarnation that replays would send the data a second time.
//!
//! In: calls of the C library's functions by the program (not by the libraries of the network,
//! which have sockets of their own), and system calls that watch files, mount file systems or use
//! objects of the system. System calls on sockets that no function of the C library makes come from
//! `raw_channels`. Out: one report that the rank cannot be restarted. The calls themselves are let
//! through.
//!
//! What may never happen: a process outside the job gets data twice without a log line that says
//! so.

use landbridge_proto::nondeterminism::{UNSAVED_KEYS, UNSAVED_RESTRICTIONS, UNSAVED_SEMAPHORE};
use libc::{c_long, mmsghdr, msghdr, sockaddr, socklen_t};
use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::{caller, dispatch, real_libc, record_head, watched};

/// A channel, as the report names it.
pub const CONNECTS: &str = "it connects a socket";
pub const BINDS: &str = "it binds a socket";
pub const LISTENS: &str = "it listens on a socket";
pub const SENDS: &str = "it sends by a socket";
pub const SHARES_MEMORY: &str = "it attaches shared memory (shmat)";
pub const SHARED_MEMORY: &str = "it uses shared memory (shmget)";
pub const SEMAPHORES: &str = "it uses semaphores (semget)";
pub const SEMAPHORE: &str = "it uses semaphores (semop)";
pub const MESSAGE_QUEUE: &str = "it uses a message queue (msgget)";
pub const MESSAGE: &str = "it uses a message queue (msgsnd)";
pub const NAMED_QUEUE: &str = "it uses a message queue (mq_open)";

/// Forbids a restart if the call at address `caller` is one of the program's.
pub fn forbid_restart(caller: usize, what: &str) {
    let matters = dispatch::is_installed() && watched::is_watched();
    if matters && is_of_program(caller) {
        report(what);
    }
}

/// Whether the call at this address is one of the program's, and none of the MPI library, a library
/// of the network, or a module by which the C library looks up names.
pub fn is_of_program(caller: usize) -> bool {
    if caller::is_known_network_call(caller) {
        return false;
    }
    let is_network =
        caller::belongs_to_mpi_or_transport(caller) || caller::belongs_to_c_library(caller);
    if is_network {
        caller::remember_network_call(caller);
    }
    !is_network
}

/// Forbids a restart, for a channel that the program uses.
pub fn report(what: &str) {
    watched::forbid_restart_of(format_args!("{what}, which is not recorded"));
}

/// Whether an address is that of another process: sockets of these few families communicate with
/// the kernel.
///
/// # Safety
/// The pointer is null, or that of an address.
pub unsafe fn is_of_others(address: *const sockaddr) -> bool {
    // SAFETY: null, or an address, which begins with its family.
    let family = unsafe { address.cast::<libc::sa_family_t>().as_ref() };
    // The kernel takes the family 0 for that of the socket.
    family.is_some_and(|family| !matches!(c_int::from(*family), libc::AF_NETLINK | libc::AF_ALG))
}

/// Whether what is sent to an address reaches another process: netlink(7) reaches the kernel, or
/// the process with the number in the address.
///
/// # Safety
/// The pointer is null, or that of an address.
pub unsafe fn reaches_others(address: *const sockaddr) -> bool {
    // SAFETY: null, or an address, which begins with its family; one of netlink(7) is longer.
    unsafe {
        address.as_ref().is_some_and(|common| match c_int::from(common.sa_family) {
            libc::AF_NETLINK => (*address.cast::<libc::sockaddr_nl>()).nl_pid != 0,
            _ => is_of_others(address),
        })
    }
}

/// Whether `connect` with this address ends a connection.
///
/// # Safety
/// The pointer is null, or that of an address.
pub unsafe fn is_end(address: *const sockaddr) -> bool {
    // SAFETY: null, or an address, which begins with its family.
    let family = unsafe { address.cast::<libc::sa_family_t>().as_ref() };
    family.is_some_and(|family| c_int::from(*family) == libc::AF_UNSPEC)
}

/// Whether a message names another process as its receiver. Messages without an address go to a
/// socket that was connected before, or made by `socketpair`.
///
/// # Safety
/// The pointer is null, or that of a message.
pub unsafe fn is_for_others(message: *const msghdr) -> bool {
    // SAFETY: the caller's promise.
    unsafe { message.as_ref().is_some_and(|message| reaches_others(message.msg_name.cast())) }
}

/// Whether one of the messages names another process as its receiver.
///
/// # Safety
/// `messages` points to `count` messages.
pub unsafe fn any_is_for_others(messages: *const mmsghdr, count: c_uint) -> bool {
    // SAFETY: the caller's promise.
    unsafe { (0..count as usize).any(|at| is_for_others(&raw const (*messages.add(at)).msg_hdr)) }
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
    ) -> isize, SENDS if reaches_others(address);
    sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> isize,
        SENDS if is_for_others(message);
    sendmmsg(socket: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int,
        SENDS if any_is_for_others(messages, count);
    shmat(id: c_int, address: *const c_void, flags: c_int) -> *mut c_void, SHARES_MEMORY;
    semget(key: libc::key_t, count: c_int, flags: c_int) -> c_int, SEMAPHORES;
    msgget(key: libc::key_t, flags: c_int) -> c_int, MESSAGE_QUEUE;
    // The numbers of these objects may have come from the process that made them.
    shmget(key: libc::key_t, bytes: usize, flags: c_int) -> c_int, SHARED_MEMORY;
    shmctl(id: c_int, command: c_int, about: *mut c_void) -> c_int, SHARED_MEMORY;
    semop(id: c_int, operations: *mut c_void, count: usize) -> c_int, SEMAPHORE;
    semtimedop(
        id: c_int,
        operations: *mut c_void,
        count: usize,
        time: *const c_void
    ) -> c_int, SEMAPHORE;
    // The last argument may be absent.
    semctl(id: c_int, number: c_int, command: c_int, about: *mut c_void) -> c_int, SEMAPHORE;
    msgsnd(id: c_int, message: *const c_void, bytes: usize, flags: c_int) -> c_int, MESSAGE;
    msgrcv(
        id: c_int,
        message: *mut c_void,
        bytes: usize,
        kind: c_long,
        flags: c_int
    ) -> isize, MESSAGE;
    msgctl(id: c_int, command: c_int, about: *mut c_void) -> c_int, MESSAGE;
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

/// Reports a line for the system's log, as [`syslog`] does, and returns `vsyslog`.
pub extern "C" fn vsyslog(from: usize) -> usize {
    log_line(from, &real_libc::VSYSLOG)
}

/// Reports a line for the system's log, as [`syslog`] does, and returns `__syslog_chk`, which
/// compilers call instead of `syslog`.
pub extern "C" fn checked_syslog(from: usize) -> usize {
    log_line(from, &real_libc::CHECKED_SYSLOG)
}

/// Reports a line for the system's log, as [`syslog`] does, and returns `__vsyslog_chk`.
pub extern "C" fn checked_vsyslog(from: usize) -> usize {
    log_line(from, &real_libc::CHECKED_VSYSLOG)
}

fn log_line(from: usize, function: &'static real_libc::NextSymbol) -> usize {
    forbid_restart(from, "it writes to the system's log (syslog)");
    function.address()
}

fn note_restricted() {
    record_head::head().into_iter().for_each(|head| head.note_unsaved(UNSAVED_RESTRICTIONS));
}

/// Reports a system call of any observed or recorded thread that another process notices, or by
/// which this process notices others.
pub fn check(number: c_long, arguments: [u64; 6]) {
    let [first, second, ..] = arguments;
    match number {
        libc::SYS_pkey_alloc | libc::SYS_pkey_mprotect => {
            record_head::head().into_iter().for_each(|head| head.note_unsaved(UNSAVED_KEYS));
        }
        libc::SYS_landlock_restrict_self => note_restricted(),
        libc::SYS_prctl if first as c_int == libc::PR_SET_MDWE => note_restricted(),
        libc::SYS_eventfd2 => {
            let is_semaphore = second as c_int & libc::EFD_SEMAPHORE != 0;
            let head = record_head::head().filter(|_| is_semaphore);
            head.into_iter().for_each(|head| head.note_unsaved(UNSAVED_SEMAPHORE));
        }
        libc::SYS_inotify_init | libc::SYS_inotify_init1 | libc::SYS_fanotify_init => {
            watched::forbid_restart_of(format_args!(
                "it watches files for changes (inotify), which are not made again"
            ));
        }
        libc::SYS_fcntl if matches!(second as c_int, libc::F_NOTIFY | libc::F_SETLEASE) => {
            watched::forbid_restart_of(format_args!(
                "it watches files for changes (fcntl), which are not made again"
            ));
        }
        libc::SYS_mount
        | libc::SYS_umount2
        | libc::SYS_move_mount
        | libc::SYS_open_tree
        | libc::SYS_fsopen
        | libc::SYS_fsmount
        | libc::SYS_fspick
        | libc::SYS_mount_setattr => {
            watched::forbid_restart_of(format_args!("it mounts file systems"));
        }
        // No MPI library makes these calls.
        libc::SYS_mq_unlink
        | libc::SYS_mq_timedsend
        | libc::SYS_mq_timedreceive
        | libc::SYS_mq_notify
        | libc::SYS_mq_getsetattr => report("it uses a message queue (mq_send)"),
        libc::SYS_name_to_handle_at | libc::SYS_open_by_handle_at => {
            report("it uses handles of files (name_to_handle_at)");
        }
        libc::SYS_adjtimex | libc::SYS_clock_adjtime => {
            report("it reads or sets the clock of the system (adjtimex)");
        }
        libc::SYS_prctl if first == dispatch::PR_SET_SYSCALL_USER_DISPATCH => {
            report("it changes the dispatch of its system calls (prctl)");
        }
        libc::SYS_add_key | libc::SYS_request_key | libc::SYS_keyctl => {
            report("it uses keys of the kernel (keyctl)");
        }
        _ => (),
    }
}
