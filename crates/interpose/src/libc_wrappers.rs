//! Bodies of the functions that replace those of the C library. `caller` is the address from which
//! a function was called.

use std::ffi::{c_int, c_uint, c_void};

use landbridge_proto::nondeterminism::{Clock, RandomSource, RecordError};
use libc::{clock_t, clockid_t, size_t, ssize_t, time_t, timespec, timeval};

use crate::kernel_calls::{kernel, kernel_or_libc};
use crate::real_libc::{self, now};
use crate::record_lock::{RecordGuard, report_error};
use crate::{deadlines, recording};

const SECOND: i64 = 1_000_000_000;

pub unsafe extern "C" fn clock_gettime(id: clockid_t, time: *mut timespec, caller: usize) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        let known = if id < 0 { own_cpu_clock(id) } else { id };
        let Some((clock, mut guard)) = Clock::of(known).zip(recording::lock(caller)) else {
            return real_libc::clock_gettime(id, time);
        };
        let mut asked = None;
        let answer = guard.record().clock(clock, || *asked.insert(now(id)));
        deadlines::note_read(clock, asked, &answer, || now(id));
        *time = timespec_of(value(answer, guard));
    }
    0
}

/// The fixed number of a clock of processor time that this process or this thread has by its id
/// (clock_getcpuclockid(3)): `~id << 3`, and 2 for a process or 6 for a thread.
fn own_cpu_clock(id: clockid_t) -> clockid_t {
    let own = |number| kernel(number, [0; 6]) == i64::from(!(id >> 3));
    match id & 7 {
        2 if own(libc::SYS_getpid) => libc::CLOCK_PROCESS_CPUTIME_ID,
        6 if own(libc::SYS_gettid) => libc::CLOCK_THREAD_CPUTIME_ID,
        _ => id,
    }
}

pub unsafe extern "C" fn gettimeofday(
    time: *mut timeval,
    zone: *mut c_void,
    caller: usize,
) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    // The time zone is constant and need not be recorded.
    unsafe {
        let Some(mut guard) = recording::lock(caller).filter(|_| !time.is_null()) else {
            return real_libc::gettimeofday(time, zone);
        };
        if !zone.is_null() {
            real_libc::gettimeofday(time, zone);
        }
        let micros = || {
            let mut time = std::mem::zeroed::<timeval>();
            real_libc::gettimeofday(&mut time, std::ptr::null_mut());
            time.tv_sec * 1_000_000 + time.tv_usec
        };
        let mut asked = None;
        let answer = guard.record().clock(Clock::TIME_OF_DAY, || *asked.insert(micros()));
        deadlines::note_read(Clock::TIME_OF_DAY, asked, &answer, micros);
        let micros = value(answer, guard);
        *time =
            timeval { tv_sec: micros.div_euclid(1_000_000), tv_usec: micros.rem_euclid(1_000_000) };
    }
    0
}

pub unsafe extern "C" fn timespec_get(time: *mut timespec, base: c_int, caller: usize) -> c_int {
    const TIME_UTC: c_int = 1;
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        let Some(mut guard) = recording::lock(caller).filter(|_| base == TIME_UTC) else {
            return real_libc::timespec_get(time, base);
        };
        let (mut asked, ask) = (None, || now(libc::CLOCK_REALTIME));
        let answer = guard.record().clock(Clock::TIMESPEC, || *asked.insert(ask()));
        deadlines::note_read(Clock::TIMESPEC, asked, &answer, ask);
        *time = timespec_of(value(answer, guard));
    }
    base
}

pub unsafe extern "C" fn time(time: *mut time_t, caller: usize) -> time_t {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        let Some(mut guard) = recording::lock(caller) else { return real_libc::time(time) };
        let (mut asked, ask) = (None, || real_libc::time(std::ptr::null_mut()));
        let answer = guard.record().clock(Clock::TIME, || *asked.insert(ask()));
        deadlines::note_read(Clock::TIME, asked, &answer, ask);
        let seconds = value(answer, guard);
        if let Some(time) = time.as_mut() {
            *time = seconds;
        }
        seconds
    }
}

pub unsafe extern "C" fn clock(caller: usize) -> clock_t {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        let Some(mut guard) = recording::lock(caller) else { return real_libc::clock() };
        let answer = guard.record().clock(Clock::CLOCK, || real_libc::clock());
        value(answer, guard)
    }
}

pub unsafe extern "C" fn getrandom(
    buffer: *mut c_void,
    length: size_t,
    flags: c_uint,
    caller: usize,
) -> ssize_t {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        let Some(guard) = recording::lock(caller).filter(|_| !buffer.is_null()) else {
            return real_libc::getrandom(buffer, length, flags);
        };
        let draw = |into: &mut [u8]| drawn(into, flags);
        match bytes(guard, RandomSource::Random, buffer, length, draw) {
            given @ 0.. => given as ssize_t,
            error => set_errno(error) as ssize_t,
        }
    }
}

/// Returns a number of `std::random_device` from the system's generator, whatever source the
/// program has requested.
pub unsafe extern "C" fn random_device(_: *const c_void, caller: usize) -> c_uint {
    let mut number = [0_u8; size_of::<c_uint>()];
    let mut filled = 0;
    while filled < number.len() {
        let rest = &mut number[filled..];
        // SAFETY: the call writes the rest of a number.
        let given = unsafe { getrandom(rest.as_mut_ptr().cast(), rest.len(), 0, caller) };
        filled += usize::try_from(given).unwrap_or(0);
    }
    c_uint::from_ne_bytes(number)
}

pub unsafe extern "C" fn getentropy(buffer: *mut c_void, length: size_t, caller: usize) -> c_int {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        let Some(guard) = recording::lock(caller).filter(|_| !buffer.is_null()) else {
            return real_libc::getentropy(buffer, length);
        };
        let draw = |into: &mut [u8]| match into.len() {
            ..=ENTROPY_BYTES => drawn(into, 0),
            _ => -i64::from(libc::EIO),
        };
        match bytes(guard, RandomSource::Entropy, buffer, length, draw) {
            0.. => 0,
            error => set_errno(error),
        }
    }
}

pub unsafe extern "C" fn arc4random(caller: usize) -> u32 {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        let Some(guard) = recording::lock(caller) else { return real_libc::arc4random() };
        random_u32(guard, drawn_u32)
    }
}

pub unsafe extern "C" fn arc4random_uniform(bound: u32, caller: usize) -> u32 {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        let Some(guard) = recording::lock(caller) else {
            return real_libc::arc4random_uniform(bound);
        };
        random_u32(guard, || real_libc::arc4random_uniform(bound))
    }
}

pub unsafe extern "C" fn arc4random_buf(buffer: *mut c_void, length: size_t, caller: usize) {
    // SAFETY: the arguments are valid for the C library's function, by the caller's promise.
    unsafe {
        let Some(guard) = recording::lock(caller).filter(|_| !buffer.is_null()) else {
            return real_libc::arc4random_buf(buffer, length);
        };
        let draw = |into: &mut [u8]| {
            let mut filled = 0;
            while filled < into.len() {
                match drawn(&mut into[filled..], 0) {
                    given @ 1.. => filled += given as usize,
                    // The system forbids the call: the C library knows other ways.
                    _ => break,
                }
            }
            let rest = &mut into[filled..];
            if !rest.is_empty() {
                real_libc::arc4random_buf(rest.as_mut_ptr().cast(), rest.len());
            }
            into.len() as i64
        };
        bytes(guard, RandomSource::Arc4, buffer, length, draw);
    }
}

/// The most bytes that one call of getentropy(3) gives.
const ENTROPY_BYTES: usize = 256;

/// Random bytes of the system: their number, or an error below 0. Not by the C library, which may
/// map memory at its first call (glibc 2.41): a replay makes no such call.
fn drawn(into: &mut [u8], flags: c_uint) -> i64 {
    let (start, length) = (into.as_mut_ptr().addr() as u64, into.len() as u64);
    match kernel_or_libc(libc::SYS_getrandom, [start, length, flags.into(), 0, 0, 0]) {
        // SAFETY: `errno` belongs to this thread.
        -1 => -i64::from(unsafe { *libc::__errno_location() }),
        given => given,
    }
}

fn drawn_u32() -> u32 {
    let mut number = [0; 4];
    match drawn(&mut number, 0) {
        4 => u32::from_ne_bytes(number),
        // SAFETY: a call without arguments.
        _ => unsafe { real_libc::arc4random() },
    }
}

fn random_u32(guard: RecordGuard, draw: impl FnOnce() -> u32) -> u32 {
    let mut number = [0; 4];
    let draw = |into: &mut [u8]| {
        into.copy_from_slice(&draw().to_ne_bytes());
        4
    };
    // SAFETY: the buffer has four bytes.
    unsafe { bytes(guard, RandomSource::Arc4, number.as_mut_ptr().cast(), 4, draw) };
    u32::from_ne_bytes(number)
}

/// Fills a buffer with recorded random bytes.
///
/// # Safety
/// `buffer` has `length` bytes.
unsafe fn bytes(
    mut guard: RecordGuard,
    source: RandomSource,
    buffer: *mut c_void,
    length: size_t,
    draw: impl FnOnce(&mut [u8]) -> i64,
) -> i64 {
    // SAFETY: the caller's promise; the program does not read the buffer before it has the answer.
    let into = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), length) };
    let answer = guard.record().bytes(source, into, draw);
    value(answer, guard)
}

/// The value of an answer; ends the process if there is none.
#[inline]
fn value(answer: Result<i64, RecordError>, guard: RecordGuard) -> i64 {
    let value = answer.unwrap_or_else(|problem| report_error(&problem));
    drop(guard);
    value
}

fn set_errno(error: i64) -> c_int {
    // SAFETY: `errno` belongs to this thread.
    unsafe { *libc::__errno_location() = error.unsigned_abs() as c_int };
    -1
}

#[inline]
fn timespec_of(nanos: i64) -> timespec {
    timespec { tv_sec: nanos.div_euclid(SECOND), tv_nsec: nanos.rem_euclid(SECOND) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_by_the_own_id_is_that_of_the_process_or_thread() {
        let numbers = (std::process::id() as i32, kernel(libc::SYS_gettid, [0; 6]) as i32);
        let (of_process, of_thread) = (!numbers.0 << 3 | 2, !numbers.1 << 3 | 6);
        assert_eq!(own_cpu_clock(of_process), libc::CLOCK_PROCESS_CPUTIME_ID);
        assert_eq!(own_cpu_clock(of_thread), libc::CLOCK_THREAD_CPUTIME_ID);
        let of_other = !1 << 3 | 2;
        assert_eq!(own_cpu_clock(of_other), of_other);
    }
}
