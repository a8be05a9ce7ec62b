//! The descriptors that system calls use, by number of the call.
//!
//! In: a call. Out: its descriptors. What may never happen: a call that moves a position is left
//! out.

use libc::c_long;

/// The descriptors of files that a call reads, writes, examines, seeks in or maps.
pub fn used_descriptors(number: c_long, arguments: [u64; 6]) -> [Option<u64>; 2] {
    let [first, second, third, fourth, fifth, _] = arguments.map(|it| it as u32 as u64);
    let is_anonymous = fourth as i32 & libc::MAP_ANONYMOUS != 0;
    match number {
        libc::SYS_read
        | libc::SYS_pread64
        | libc::SYS_readv
        | libc::SYS_preadv
        | libc::SYS_preadv2
        | libc::SYS_write
        | libc::SYS_pwrite64
        | libc::SYS_writev
        | libc::SYS_pwritev
        | libc::SYS_pwritev2
        | libc::SYS_lseek
        | libc::SYS_fstat
        | libc::SYS_fstatfs
        | libc::SYS_fgetxattr
        | libc::SYS_flistxattr
        | libc::SYS_getdents
        | libc::SYS_getdents64
        | libc::SYS_fchdir
        | libc::SYS_flock
        | libc::SYS_fchmod
        | libc::SYS_fsetxattr
        | libc::SYS_ftruncate
        | libc::SYS_fallocate => [Some(first), None],
        libc::SYS_sendfile => [Some(first), Some(second)],
        libc::SYS_copy_file_range | libc::SYS_splice => [Some(first), Some(third)],
        libc::SYS_mmap if !is_anonymous => [Some(fifth), None],
        _ => [None, None],
    }
}

/// Whether the first argument of a call is a descriptor.
pub fn begins_with_descriptor(number: c_long) -> bool {
    let is_file = matches!(
        number,
        libc::SYS_read
            | libc::SYS_pread64
            | libc::SYS_readv
            | libc::SYS_preadv
            | libc::SYS_preadv2
            | libc::SYS_write
            | libc::SYS_pwrite64
            | libc::SYS_writev
            | libc::SYS_pwritev
            | libc::SYS_pwritev2
            | libc::SYS_lseek
            | libc::SYS_close
            | libc::SYS_dup
            | libc::SYS_dup2
            | libc::SYS_dup3
            | libc::SYS_fcntl
            | libc::SYS_fstat
            | libc::SYS_fstatfs
            | libc::SYS_getdents
            | libc::SYS_getdents64
            | libc::SYS_ftruncate
            | libc::SYS_fallocate
            | libc::SYS_flock
            | libc::SYS_fsync
            | libc::SYS_fdatasync
            | libc::SYS_sync_file_range
            | libc::SYS_fadvise64
            | libc::SYS_readahead
            | libc::SYS_fchmod
            | libc::SYS_fchown
            | libc::SYS_fsetxattr
            | libc::SYS_fremovexattr
            | libc::SYS_sendfile
            | libc::SYS_copy_file_range
            | libc::SYS_splice
            | libc::SYS_ioctl
    );
    let is_directory = matches!(
        number,
        libc::SYS_openat
            | libc::SYS_newfstatat
            | libc::SYS_statx
            | libc::SYS_faccessat
            | libc::SYS_faccessat2
            | libc::SYS_readlinkat
            | libc::SYS_renameat
            | libc::SYS_renameat2
            | libc::SYS_unlinkat
            | libc::SYS_linkat
            | libc::SYS_mkdirat
            | libc::SYS_mknodat
            | libc::SYS_fchmodat
            | libc::SYS_fchownat
            | libc::SYS_futimesat
            | libc::SYS_utimensat
    );
    is_file || is_directory
}
