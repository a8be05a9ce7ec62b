//! POSIX's asynchronous I/O (aio(7)). The C library performs requests in threads of its own, which
//! this library does not record. So the recorded thread reads and writes at once, and every request
//! is complete when the call returns, as POSIX allows.

use std::ffi::c_int;
use std::mem::offset_of;

use libc::{aiocb, sigevent};

use crate::{real_libc, record_head, restart_refusals};

/// Offsets at which the C library (glibc) looks for the outcome of a request: the error, and the
/// value of the call.
const ERROR_AT: usize = offset_of!(aiocb, aio_offset) - 16;
const RESULT_AT: usize = offset_of!(aiocb, aio_offset) - 8;
const _: () = assert!(RESULT_AT.is_multiple_of(align_of::<isize>()));

pub unsafe extern "C" fn aio_write(request: *mut aiocb) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        if !is_ours(request) {
            return real_libc::aio_write(request);
        }
        perform(request, libc::LIO_WRITE)
    }
}

pub unsafe extern "C" fn aio_read(request: *mut aiocb) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        if !is_ours(request) {
            return real_libc::aio_read(request);
        }
        perform(request, libc::LIO_READ)
    }
}

pub unsafe extern "C" fn aio_fsync(operation: c_int, request: *mut aiocb) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        if !is_ours(request) {
            return real_libc::aio_fsync(operation, request);
        }
        note(request, libc::fsync((*request).aio_fildes) as isize);
    }
    0
}

pub unsafe extern "C" fn lio_listio(
    mode: c_int,
    list: *const *mut aiocb,
    count: c_int,
    event: *mut sigevent,
) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        if !record_head::is_owner() || mode == libc::LIO_NOWAIT && notifies(event) {
            restart_refusals::forbid_restart(format_args!(
                "it asks to be notified of asynchronous I/O"
            ));
            return real_libc::lio_listio(mode, list, count, event);
        }
        for at in 0..usize::try_from(count).unwrap_or(0) {
            let request = *list.add(at);
            if !request.is_null() {
                perform(request, (*request).aio_lio_opcode);
            }
        }
    }
    0
}

/// Whether this library performs the request: the recorded thread makes the call, and the request
/// asks for no notification.
///
/// # Safety
/// `request` is valid.
unsafe fn is_ours(request: *mut aiocb) -> bool {
    if !record_head::is_owner() {
        return false;
    }
    // SAFETY: the caller's promise.
    let notifies = unsafe { notifies(&raw mut (*request).aio_sigevent) };
    if notifies {
        restart_refusals::forbid_restart(format_args!(
            "it asks to be notified of asynchronous I/O"
        ));
    }
    !notifies
}

/// # Safety
/// `event` is null or valid.
unsafe fn notifies(event: *mut sigevent) -> bool {
    // SAFETY: the caller's promise.
    unsafe { event.as_ref() }.is_some_and(|event| match event.sigev_notify {
        libc::SIGEV_NONE => false,
        libc::SIGEV_SIGNAL => event.sigev_signo != 0,
        _ => true,
    })
}

/// # Safety
/// `request` is valid.
unsafe fn perform(request: *mut aiocb, operation: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let aiocb { aio_fildes, aio_buf, aio_nbytes, aio_offset, .. } = *request;
        let result = match operation {
            libc::LIO_WRITE => libc::pwrite(aio_fildes, aio_buf, aio_nbytes, aio_offset),
            libc::LIO_READ => libc::pread(aio_fildes, aio_buf, aio_nbytes, aio_offset),
            _ => return 0,
        };
        note(request, result);
    }
    0
}

/// Stores the outcome of a request; a negative `result` has its error in `errno`.
///
/// # Safety
/// `request` is valid, and `errno` belongs to this result.
unsafe fn note(request: *mut aiocb, result: isize) {
    // SAFETY: the caller's promise.
    unsafe {
        let error = if result < 0 { *libc::__errno_location() } else { 0 };
        request.byte_add(RESULT_AT).cast::<isize>().write(result);
        request.byte_add(ERROR_AT).cast::<c_int>().write(error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_library_finds_the_outcome() {
        // SAFETY: all zeros are a valid request; the C library only reads it.
        unsafe {
            let mut request: aiocb = std::mem::zeroed();
            note(&raw mut request, 17);
            assert_eq!((libc::aio_error(&request), libc::aio_return(&mut request)), (0, 17));
            *libc::__errno_location() = libc::EIO;
            note(&raw mut request, -1);
            let outcome = (libc::aio_error(&request), libc::aio_return(&mut request));
            assert_eq!(outcome, (libc::EIO, -1));
        }
    }
}
