//! Names of temporary files, made from recorded random numbers: the C library makes such names from
//! the clock, without a call that this library sees. The functions are those of mkstemp(3) and
//! mkdtemp(3).

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::{libc_wrappers, real_libc, record_head};

/// Number of letters at the end of a template that are replaced.
const REPLACED: usize = 6;
const LETTERS: &[u8; 62] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
/// Number of names that are tried: about as many as a C library tries.
const ATTEMPTS: usize = 1 << 16;

pub unsafe extern "C" fn mkstemp(template: *mut c_char, caller: usize) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        if !record_head::is_owner() {
            return real_libc::mkstemp(template);
        }
        make(template, 0, caller, |path| open(path, 0))
    }
}

pub unsafe extern "C" fn mkostemp(template: *mut c_char, flags: c_int, caller: usize) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        if !record_head::is_owner() {
            return real_libc::mkostemp(template, flags);
        }
        make(template, 0, caller, |path| open(path, flags))
    }
}

pub unsafe extern "C" fn mkstemps(template: *mut c_char, suffix: c_int, caller: usize) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        if !record_head::is_owner() {
            return real_libc::mkstemps(template, suffix);
        }
        make(template, suffix, caller, |path| open(path, 0))
    }
}

pub unsafe extern "C" fn mkostemps(
    template: *mut c_char,
    suffix: c_int,
    flags: c_int,
    caller: usize,
) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        if !record_head::is_owner() {
            return real_libc::mkostemps(template, suffix, flags);
        }
        make(template, suffix, caller, |path| open(path, flags))
    }
}

pub unsafe extern "C" fn mkdtemp(template: *mut c_char, caller: usize) -> *mut c_char {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        if !record_head::is_owner() {
            return real_libc::mkdtemp(template);
        }
        match make(template, 0, caller, |path| libc::mkdir(path, 0o700)) {
            0.. => template,
            _ => std::ptr::null_mut(),
        }
    }
}

/// # Safety
/// The path is a C string.
unsafe fn open(path: *const c_char, flags: c_int) -> c_int {
    let flags = flags & !libc::O_ACCMODE | libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    // SAFETY: the caller's promise.
    unsafe { libc::open(path, flags, 0o600 as c_uint) }
}

/// Replaces the end of the template until `attempt` finds no file of that name.
///
/// # Safety
/// The template is a C string that may be changed.
unsafe fn make(
    template: *mut c_char,
    suffix: c_int,
    caller: usize,
    attempt: impl Fn(*const c_char) -> c_int,
) -> c_int {
    // SAFETY: the caller's promise; errno is this thread's own.
    unsafe {
        let length = CStr::from_ptr(template).to_bytes().len();
        let end = usize::try_from(suffix).ok().and_then(|suffix| length.checked_sub(suffix));
        let start = end.and_then(|end| end.checked_sub(REPLACED));
        let place =
            start.map(|start| std::slice::from_raw_parts_mut(template.add(start).cast(), REPLACED));
        let Some(place) = place.filter(|place: &&mut [u8]| place.iter().all(|it| *it == b'X'))
        else {
            *libc::__errno_location() = libc::EINVAL;
            return -1;
        };
        for _ in 0..ATTEMPTS {
            let mut chance = [0_u8; REPLACED];
            libc_wrappers::getrandom(chance.as_mut_ptr().cast::<c_void>(), REPLACED, 0, caller);
            for (letter, number) in place.iter_mut().zip(chance) {
                *letter = LETTERS[usize::from(number) % LETTERS.len()];
            }
            let found = attempt(template);
            if found >= 0 || *libc::__errno_location() != libc::EEXIST {
                return found;
            }
        }
        *libc::__errno_location() = libc::EEXIST;
        -1
    }
}
