//! The recorded system calls, by number, and the treatment of each.
//!
//! In: a call of the recorded thread. Out: its result; `None`: the call is let through. The table
//! below is the complete list of recorded calls; `docs/RECOVERY-INSIDE.md` describes them in words.
//!
//! What may never happen: a call that changes a file is let through without a record entry and
//! without a report.

use std::ffi::c_char;

use libc::c_long;

use crate::copies::KernelCopy;
use crate::kernel_calls::{HERE, error, is_too_recent};
use crate::path_changes::PathChange;
use crate::recorded_pipes::is_recorded;
use crate::restart_refusals::abort_replay;
use crate::session::Session;
use crate::used_descriptors::{begins_with_descriptor, used_descriptors};
use crate::{
    child_programs, file_size_limit, mapping_calls, new_processes, process_calls, record_lock,
    side_channels, system_values, watched,
};

/// Handles a system call of the recorded thread.
///
/// # Safety
/// The arguments are those of a system call that this thread makes.
pub unsafe fn handle(number: c_long, arguments: [u64; 6]) -> Option<i64> {
    let Some(guard) = record_lock::lock_for_call() else {
        if number == libc::SYS_mmap {
            mapping_calls::show_stores_by(arguments);
        }
        return None;
    };
    let mut session = Session::new(guard);
    // SAFETY: the caller's promise.
    let result = unsafe { session.handle(number, arguments) };
    if result == Some(error(libc::EFBIG)) && !session.was_live() {
        file_size_limit::repeat_signal();
    }
    result
}

impl Session {
    /// Ends the process if the program, which ends with exit code 0, has not repeated everything
    /// that an earlier incarnation did. After an error the rank is restarted, or the job ends.
    fn check_end(&mut self, code: u64) {
        let is_well = code as u8 == 0;
        if let Some(problem) = is_well.then(|| self.guard.record().end().err()).flatten() {
            abort_replay(format_args!("{problem}"));
        }
    }

    unsafe fn handle(&mut self, number: c_long, mut arguments: [u64; 6]) -> Option<i64> {
        if begins_with_descriptor(number) {
            // The kernel ignores the upper half of a descriptor's register.
            arguments[0] = arguments[0] as u32 as u64;
        }
        let [a, b, c, d, e, _] = arguments;
        side_channels::check(number, arguments);
        process_calls::check(number, arguments);
        self.look_for_failed_exec();
        for descriptor in used_descriptors(number, arguments).into_iter().flatten() {
            self.look_for_passed(descriptor);
        }
        // SAFETY: of the system call, by its caller.
        unsafe {
            match number {
                libc::SYS_read
                | libc::SYS_pread64
                | libc::SYS_readv
                | libc::SYS_preadv
                | libc::SYS_preadv2 => match self.read(number, arguments) {
                    None => self.read_pipe(number, arguments),
                    result => result,
                },
                libc::SYS_recvfrom | libc::SYS_recvmsg | libc::SYS_recvmmsg => {
                    self.read_pipe(number, arguments)
                }
                libc::SYS_pipe | libc::SYS_pipe2 | libc::SYS_socketpair => {
                    self.make_pipe(number, arguments)
                }
                libc::SYS_poll
                | libc::SYS_ppoll
                | libc::SYS_select
                | libc::SYS_pselect6
                | libc::SYS_epoll_wait
                | libc::SYS_epoll_pwait => self.wait_until_ready(number, arguments),
                libc::SYS_epoll_ctl => self.note_epoll(arguments),
                libc::SYS_wait4 => self.wait_for_end(arguments),
                libc::SYS_waitid => self.wait_for_change(arguments),
                libc::SYS_write
                | libc::SYS_pwrite64
                | libc::SYS_writev
                | libc::SYS_pwritev
                | libc::SYS_pwritev2 => self.write(number, arguments),
                libc::SYS_lseek => self.seek(arguments),
                libc::SYS_open => self.open(number, HERE, a, b, c),
                libc::SYS_creat => {
                    let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
                    self.open(number, HERE, a, flags as u64, b)
                }
                libc::SYS_openat => self.open(number, a, b, c, d),
                libc::SYS_openat2 => Some(-i64::from(libc::ENOSYS)),
                _ if is_too_recent(number) => Some(-i64::from(libc::ENOSYS)),
                libc::SYS_getcwd => self.working_directory_name(arguments),
                libc::SYS_chdir | libc::SYS_fchdir => self.change_directory(number, arguments),
                libc::SYS_chroot | libc::SYS_pivot_root => {
                    self.forbid_restart(format_args!("it changes its root directory"));
                    None
                }
                libc::SYS_close => self.close(a),
                libc::SYS_close_range => self.close_range(a, b, c),
                libc::SYS_dup => self.duplicate(number, arguments),
                libc::SYS_dup2 | libc::SYS_dup3 => self.duplicate_to(number, arguments),
                libc::SYS_fcntl => self.control(arguments),
                libc::SYS_stat | libc::SYS_lstat => {
                    self.stat_path(number, HERE, a, b, STAT, arguments)
                }
                libc::SYS_newfstatat => self.stat_path(number, a, b, c, STAT, arguments),
                libc::SYS_statx => self.stat_path(number, a, b, e, STATX, arguments),
                libc::SYS_statfs => self.stat_path(number, HERE, a, b, STATFS, arguments),
                libc::SYS_fstat => self.stat_open(number, a, b, STAT, arguments),
                libc::SYS_fstatfs => self.stat_open(number, a, b, STATFS, arguments),
                libc::SYS_access => self.stat_path(number, HERE, a, 0, 0, arguments),
                libc::SYS_faccessat | libc::SYS_faccessat2 => {
                    self.stat_path(number, a, b, 0, 0, arguments)
                }
                libc::SYS_readlink => self.read_link(number, HERE, a, b, arguments),
                libc::SYS_readlinkat => self.read_link(number, a, b, c, arguments),
                libc::SYS_listxattr | libc::SYS_llistxattr => {
                    self.read_attribute(number, a, 0, b, c, arguments)
                }
                libc::SYS_getxattr | libc::SYS_lgetxattr => {
                    self.read_attribute(number, a, b, c, d, arguments)
                }
                libc::SYS_flistxattr => self.read_open_attribute(number, a, 0, b, c, arguments),
                libc::SYS_fgetxattr => self.read_open_attribute(number, a, b, c, d, arguments),
                libc::SYS_getdents | libc::SYS_getdents64 => self.list(number, a, b, arguments),
                libc::SYS_ftruncate | libc::SYS_fallocate => self.resize(number, a, arguments),
                libc::SYS_mmap => self.map(arguments),
                libc::SYS_munmap => self.unmap(a, b),
                libc::SYS_mremap => self.remap(a, b),
                libc::SYS_flock => self.lock(a, b),
                libc::SYS_fsync
                | libc::SYS_fdatasync
                | libc::SYS_sync_file_range
                | libc::SYS_fadvise64
                | libc::SYS_readahead => self.synchronize(number, a, arguments),
                libc::SYS_fchmod
                | libc::SYS_fchown
                | libc::SYS_fsetxattr
                | libc::SYS_fremovexattr => self.resize(number, a, arguments),
                libc::SYS_sendfile | libc::SYS_copy_file_range => {
                    self.copy(KernelCopy::of(number, arguments))
                }
                libc::SYS_splice => self.splice(a, c as u32 as u64),
                libc::SYS_ioctl if b == libc::FIONREAD && is_recorded(a) => {
                    self.count_waiting(arguments)
                }
                libc::SYS_ioctl => self.device_control(a, b),
                libc::SYS_getrandom => self.random(a, b, c),
                libc::SYS_uname => system_values::system_name(a),
                libc::SYS_io_uring_setup | libc::SYS_io_setup => self.no_rings(),
                libc::SYS_exit_group | libc::SYS_exit => {
                    self.check_end(a);
                    self.check_mapped_files();
                    if number == libc::SYS_exit_group {
                        self.drop_all_range_locks();
                    }
                    // The agent releases what it holds when the process has ended: if the process
                    // is killed before, the next incarnation comes here again.
                    None
                }
                libc::SYS_execve | libc::SYS_execveat => {
                    if number == libc::SYS_execve {
                        child_programs::check_exec(a as *const c_char, c as *const *mut c_char);
                    } else {
                        watched::forbid_restart_of(watched::EXECUTES_BY_DESCRIPTOR);
                    }
                    self.before_exec();
                    None
                }
                libc::SYS_fork | libc::SYS_vfork => {
                    self.share();
                    new_processes::fork(libc::SYS_fork, [0; 6], 0, 0)
                }
                libc::SYS_clone => {
                    self.share();
                    new_processes::fork(number, arguments, a, b)
                }
                libc::SYS_clone3 => {
                    self.share();
                    new_processes::clone3(arguments)
                }
                _ if let Some(result) = self.wait_until(number, arguments) => Some(result),
                _ => PathChange::of(number, arguments)
                    .and_then(|path_change| self.change(&path_change, arguments)),
            }
        }
    }
}

/// Bytes that the kernel writes for each of these structures.
const STAT: usize = size_of::<libc::stat>();
const STATX: usize = 256;
const STATFS: usize = size_of::<libc::statfs>();
