//! System calls of this library, and memory of the program that system calls refer to.
//!
//! In: numbers and arguments of calls, addresses. Out: results as the kernel gives them (an error
//! is a negative number). What may never happen: a call of this library is dispatched as one of the
//! program's.

use libc::{c_int, c_long};

use crate::trampoline;

/// `AT_FDCWD` as an argument.
pub const HERE: u64 = libc::AT_FDCWD as u32 as u64;

/// Makes a system call through the trampoline, with arguments of this crate.
pub fn kernel(number: c_long, arguments: [u64; 6]) -> i64 {
    // SAFETY: descriptors, and memory that callers in this crate own.
    unsafe { trampoline::call(number, arguments) }
}

/// Makes a system call, also before the trampoline is open.
pub fn kernel_or_libc(number: c_long, arguments: [u64; 6]) -> i64 {
    if trampoline::range().0 != 0 {
        return kernel(number, arguments);
    }
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: descriptors, and memory that callers in this crate own.
    unsafe { libc::syscall(number, a, b, c, d, e, f) }
}

pub fn error(number: c_int) -> i64 {
    -i64::from(number)
}

/// Numbers that new descriptors of this process are below: the soft and the hard limit
/// (getrlimit(2), `RLIMIT_NOFILE`).
pub fn descriptor_limits() -> [u64; 2] {
    let mut limits = [0; 2];
    let room = (&raw mut limits).addr() as u64;
    kernel(libc::SYS_getrlimit, [libc::RLIMIT_NOFILE as u64, room, 0, 0, 0, 0]);
    limits
}

/// Sets the limits of [`descriptor_limits`].
pub fn set_descriptor_limits(limits: [u64; 2]) {
    let room = limits.as_ptr().addr() as u64;
    kernel(libc::SYS_setrlimit, [libc::RLIMIT_NOFILE as u64, room, 0, 0, 0, 0]);
}

/// A C string in the program's memory; empty for null.
///
/// # Safety
/// The pointer is null or that of a C string.
pub unsafe fn text<'a>(pointer: u64) -> &'a [u8] {
    if pointer == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::ffi::CStr::from_ptr(pointer as *const std::ffi::c_char) }.to_bytes()
}

/// Whether a system call is one of recent Linux versions that changes or reads attributes of files
/// by other numbers than the older ones: fchmodat2(2), setxattrat(2) and its kin,
/// `open_tree_attr`, `file_getattr` and `file_setattr`. Such a call fails with ENOSYS under
/// `--recover`, and programs then make the older one.
pub fn is_too_recent(number: c_long) -> bool {
    matches!(number, 452 | 463..=469)
}

/// Memory of the program; empty for null.
///
/// # Safety
/// The pointer is null or that of `length` bytes.
pub unsafe fn bytes<'a>(pointer: u64, length: usize) -> &'a mut [u8] {
    if pointer == 0 || length == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(pointer as *mut u8, length) }
}
