//! Memory that a system call of the program passes to the kernel, and that this library reads as
//! well: paths, names and values of attributes, times, locks, lists of buffers, bytes to write.
//!
//! In: a system call. Out: what is to be done with a call whose memory cannot be read: the kernel
//! gives it the error EFAULT, and this library would end the program by SIGSEGV.
//!
//! Of memory of many pages the first and the last byte are checked, and that all of it is mapped.
//! What may never happen: a check reads the memory itself before the kernel has read some of that
//! page.

use libc::{c_int, c_long};

use crate::descriptor_table::DESCRIPTORS;
use crate::io_vectors::IO_VECTORS_MAX;
use crate::kernel_calls::{error, kernel};
use crate::session::Session;

const PAGE_BYTES: u64 = 4096;
/// Bytes that rt_sigprocmask(2) reads.
const PROBED: u64 = 8;

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readable {
    All,
    /// The kernel finds the error before the call has any effect.
    NotForKernel,
    /// The call fails here: its file may be a placeholder, to which every write succeeds.
    Not,
    /// The kernel writes as much as can be read: so many bytes, or buffers of a list.
    First(u64),
}

/// Whether this library can read what it reads of a call's memory.
pub fn check(number: c_long, arguments: [u64; 6]) -> Readable {
    let is_text = |address: u64| address == 0 || has_text(address);
    let may_be_null = !needs_memory(number, arguments[1]);
    let is_piece = |(address, bytes): (u64, u64)| {
        address == 0 && may_be_null || bytes == 0 || has_bytes(address, bytes)
    };
    let pieces = pieces(number, arguments);
    if !texts(number, arguments).into_iter().all(is_text)
        || !pieces.into_iter().all(is_piece)
        // SAFETY: the list can be read.
        || !unsafe { has_lengths(number, arguments) }
    {
        return Readable::NotForKernel;
    }
    if !Session::has_open(arguments[0]) {
        return Readable::All;
    }
    // SAFETY: the list can be read.
    match unsafe { writable(number, arguments) } {
        None => Readable::All,
        Some(0) => Readable::Not,
        Some(first) => Readable::First(first),
    }
}

/// Addresses of C strings; 0: none.
fn texts(number: c_long, [a, b, c, d, ..]: [u64; 6]) -> [u64; 2] {
    match number {
        libc::SYS_open
        | libc::SYS_creat
        | libc::SYS_stat
        | libc::SYS_lstat
        | libc::SYS_access
        | libc::SYS_readlink
        | libc::SYS_chdir
        | libc::SYS_statfs
        | libc::SYS_truncate
        | libc::SYS_chmod
        | libc::SYS_chown
        | libc::SYS_lchown
        | libc::SYS_utime
        | libc::SYS_utimes
        | libc::SYS_mkdir
        | libc::SYS_mknod
        | libc::SYS_unlink
        | libc::SYS_rmdir
        | libc::SYS_listxattr
        | libc::SYS_llistxattr => [a, 0],
        libc::SYS_rename
        | libc::SYS_link
        | libc::SYS_symlink
        | libc::SYS_getxattr
        | libc::SYS_lgetxattr
        | libc::SYS_setxattr
        | libc::SYS_lsetxattr
        | libc::SYS_removexattr
        | libc::SYS_lremovexattr => [a, b],
        libc::SYS_openat
        | libc::SYS_openat2
        | libc::SYS_newfstatat
        | libc::SYS_statx
        | libc::SYS_faccessat
        | libc::SYS_faccessat2
        | libc::SYS_readlinkat
        | libc::SYS_unlinkat
        | libc::SYS_mkdirat
        | libc::SYS_mknodat
        | libc::SYS_fchmodat
        | libc::SYS_fchownat
        | libc::SYS_futimesat
        | libc::SYS_utimensat
        | libc::SYS_fgetxattr
        | libc::SYS_fsetxattr
        | libc::SYS_fremovexattr => [b, 0],
        libc::SYS_renameat | libc::SYS_renameat2 | libc::SYS_linkat => [b, d],
        libc::SYS_symlinkat => [a, c],
        _ => [0, 0],
    }
}

/// Addresses of other memory, with its bytes; 0: none.
fn pieces(number: c_long, [a, b, c, d, ..]: [u64; 6]) -> [(u64, u64); 2] {
    const LOCK: u64 = size_of::<libc::flock>() as u64;
    const WORD: u64 = size_of::<u64>() as u64;
    let one = match number {
        libc::SYS_utime => (b, 2 * WORD),
        libc::SYS_utimes => (b, 4 * WORD),
        libc::SYS_futimesat | libc::SYS_utimensat => (c, 4 * WORD),
        libc::SYS_setxattr | libc::SYS_lsetxattr | libc::SYS_fsetxattr => (c, d),
        libc::SYS_openat2 | libc::SYS_sendfile => (c, WORD),
        libc::SYS_clone3 => (a, 8 * WORD),
        libc::SYS_fcntl if passes_lock(b) => (c, LOCK),
        libc::SYS_copy_file_range => return [(b, WORD), (d, WORD)],
        libc::SYS_poll | libc::SYS_ppoll => (a, b.min(DESCRIPTORS as u64) * WORD),
        libc::SYS_select | libc::SYS_pselect6 => {
            let bytes = a.min(DESCRIPTORS as u64).div_ceil(64) * WORD;
            return [(b, bytes), (c, bytes)];
        }
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => (b, WORD),
        libc::SYS_uname => (a, size_of::<libc::utsname>() as u64),
        libc::SYS_getrandom => (a, b),
        libc::SYS_wait4 => (b, WORD / 2),
        libc::SYS_waitid => (c, size_of::<libc::siginfo_t>() as u64),
        _ if has_list(number) => (b, c.min(IO_VECTORS_MAX as u64) * 2 * WORD),
        _ => (0, 0),
    };
    [one, (0, 0)]
}

fn passes_lock(command: u64) -> bool {
    matches!(
        command as c_int,
        libc::F_SETLK
            | libc::F_SETLKW
            | libc::F_GETLK
            | libc::F_OFD_SETLK
            | libc::F_OFD_SETLKW
            | libc::F_OFD_GETLK
    )
}

fn has_list(number: c_long) -> bool {
    let reads = matches!(number, libc::SYS_readv | libc::SYS_preadv | libc::SYS_preadv2);
    reads || writes_list(number)
}

fn writes_list(number: c_long) -> bool {
    matches!(number, libc::SYS_writev | libc::SYS_pwritev | libc::SYS_pwritev2)
}

/// Whether the call fails if the address of its memory is null. `command`: of fcntl(2).
fn needs_memory(number: c_long, command: u64) -> bool {
    match number {
        libc::SYS_clone3 | libc::SYS_uname | libc::SYS_getrandom | libc::SYS_openat2 => true,
        libc::SYS_fcntl => passes_lock(command),
        _ => has_list(number),
    }
}

/// Whether the kernel takes the number of bytes that a call reads or writes, or of its list.
///
/// # Safety
/// The list of a call with a list can be read.
unsafe fn has_lengths(number: c_long, [_, b, c, ..]: [u64; 6]) -> bool {
    let is_length = |bytes: u64| i64::try_from(bytes).is_ok();
    match number {
        libc::SYS_read | libc::SYS_pread64 | libc::SYS_write | libc::SYS_pwrite64 => is_length(c),
        // SAFETY: the caller's promise.
        _ if has_list(number) => unsafe {
            c <= IO_VECTORS_MAX as u64 && (0..c as usize).all(|at| is_length(piece_of(b, at).1))
        },
        _ => true,
    }
}

/// Address and length of a buffer of a list.
///
/// # Safety
/// The list can be read and has this buffer.
unsafe fn piece_of(list: u64, at: usize) -> (u64, u64) {
    // SAFETY: the caller's promise.
    let piece = unsafe { (list as *const libc::iovec).add(at).read_unaligned() };
    (piece.iov_base.addr() as u64, piece.iov_len as u64)
}

/// How much of a write can be read, in bytes, or in buffers of its list. `None`: all of it, or the
/// call writes nothing.
///
/// # Safety
/// The list of a call with a list can be read.
unsafe fn writable(number: c_long, [_, b, c, ..]: [u64; 6]) -> Option<u64> {
    match number {
        libc::SYS_write | libc::SYS_pwrite64 if !has_bytes(b, c) => Some(readable_bytes(b, c)),
        _ if writes_list(number) => (0..c).find(|at| {
            // SAFETY: the caller's promise.
            let (address, bytes) = unsafe { piece_of(b, *at as usize) };
            !has_bytes(address, bytes)
        }),
        _ => None,
    }
}

/// Whether the first and the last of these bytes can be read, and all pages between are mapped.
pub fn has_bytes(address: u64, bytes: u64) -> bool {
    let last = address.saturating_add(bytes.saturating_sub(1));
    let (first_page, last_page) = (address / PAGE_BYTES, last / PAGE_BYTES);
    let is_mapped = || {
        let between = (last_page - first_page - 1) * PAGE_BYTES;
        let start = (first_page + 1) * PAGE_BYTES;
        // It only looks at the mappings (msync(2), ENOMEM).
        let look = [start, between, libc::MS_ASYNC as u64, 0, 0, 0];
        between == 0 || kernel(libc::SYS_msync, look) == 0
    };
    bytes == 0 || can_read(address) && (first_page == last_page || can_read(last) && is_mapped())
}

/// How many of these bytes can be read from the first one on.
fn readable_bytes(address: u64, bytes: u64) -> u64 {
    let end = address.saturating_add(bytes);
    let mut at = address;
    while at < end && can_read(at) {
        at = (at / PAGE_BYTES + 1) * PAGE_BYTES;
    }
    at.min(end) - address
}

fn has_text(mut address: u64) -> bool {
    while can_read(address) {
        let left = PAGE_BYTES - address % PAGE_BYTES;
        // SAFETY: the rest of a page that can be read.
        let text = unsafe { std::slice::from_raw_parts(address as *const u8, left as usize) };
        if text.contains(&0) {
            return true;
        }
        address = address.saturating_add(left);
    }
    false
}

/// Whether the page of an address can be read: rt_sigprocmask(2) reads a mask before it looks at
/// its first argument, and does nothing if that is not valid.
fn can_read(address: u64) -> bool {
    const INVALID: u64 = u32::MAX as u64;
    let place = address - address % PROBED;
    let result = kernel(libc::SYS_rt_sigprocmask, [INVALID, place, 0, PROBED, 0, 0]);
    // Of the null pointer the kernel reads nothing.
    place != 0 && result != error(libc::EFAULT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_cannot_be_read_is_found() {
        let pages = 2 * PAGE_BYTES as usize;
        let (flags, none) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, libc::PROT_NONE);
        // SAFETY: new memory, whose second page cannot be read.
        let start = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let found = libc::mmap(std::ptr::null_mut(), pages, protection, flags, -1, 0);
            assert_ne!(found, libc::MAP_FAILED);
            found.cast::<u8>().write_bytes(b'a', PAGE_BYTES as usize);
            assert_eq!(libc::mprotect(found.byte_add(PAGE_BYTES as usize), 1, none), 0);
            found.addr() as u64
        };
        let end = start + PAGE_BYTES;
        assert!(has_bytes(start, PAGE_BYTES) && !has_bytes(start, PAGE_BYTES + 1));
        assert!(has_bytes(0, 0) && !has_bytes(8, 1) && !has_bytes(0, 1) && !has_bytes(!0, 2));
        assert!(!has_text(start) && !has_text(8) && !has_text(end));
        let text = c"/tmp".as_ptr().addr() as u64;
        assert!(has_text(text));
        let call = |number, [a, b, c, d]: [u64; 4]| check(number, [a, b, c, d, 0, 0]);
        for (number, arguments) in [
            (libc::SYS_open, [8, 0, 0, 0]),
            (libc::SYS_openat, [0, end, 0, 0]),
            (libc::SYS_rename, [text, start, 0, 0]),
            (libc::SYS_utimensat, [0, text, end, 0]),
            (libc::SYS_setxattr, [text, text, end - 1, 2]),
            (libc::SYS_fcntl, [0, libc::F_SETLK as u64, 8, 0]),
            (libc::SYS_fcntl, [0, libc::F_SETLK as u64, 0, 0]),
            (libc::SYS_readv, [0, end - 16, 2, 0]),
            (libc::SYS_readv, [0, start, IO_VECTORS_MAX as u64 + 1, 0]),
            (libc::SYS_read, [0, start, u64::MAX, 0]),
            (libc::SYS_getrandom, [0, 4, 0, 0]),
            (libc::SYS_clone3, [0, 88, 0, 0]),
        ] {
            assert_eq!(call(number, arguments), Readable::NotForKernel, "{number}");
        }
        assert_eq!(call(libc::SYS_open, [text, 0, 0, 0]), Readable::All);
        assert_eq!(call(libc::SYS_fcntl, [0, libc::F_SETFL as u64, 8, 0]), Readable::All);
        let list = [[start, 1], [end, 1]];
        let list = (&raw const list).addr() as u64;
        // SAFETY: the list is on this stack.
        unsafe {
            let writes = |number, b, c| writable(number, [0, b, c, 0, 0, 0]);
            assert_eq!(
                (writes(libc::SYS_writev, list, 1), writes(libc::SYS_writev, list, 2)),
                (None, Some(1))
            );
            assert_eq!(
                (writes(libc::SYS_write, start, 1), writes(libc::SYS_write, end, 1)),
                (None, Some(0))
            );
            assert_eq!(writes(libc::SYS_pwrite64, start + 96, PAGE_BYTES), Some(PAGE_BYTES - 96));
            libc::munmap(start as *mut libc::c_void, pages);
        }
    }
}
