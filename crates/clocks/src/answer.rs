//! What each function that stands in front of the C library's does. `caller`: where it was called from.

use std::ffi::{c_int, c_uint, c_void};
use std::fmt::{self, Write};
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering::Relaxed;

use landbridge_proto::clocks::{Clock, Problem, Source};
use landbridge_proto::id::{EXIT_CANNOT_GO_ON, LAST_WORD, LINE_MARK};
use libc::{clock_t, clockid_t, size_t, ssize_t, time_t, timespec, timeval};

use crate::own::{self, Turn};
use crate::session::kernel;
use crate::system;

const SECOND: i64 = 1_000_000_000;

/// More than an answer takes of the stack.
const LEFT_BYTES: usize = 512;

pub unsafe extern "C" fn clock_gettime(id: clockid_t, time: *mut timespec, caller: usize) -> c_int {
    // SAFETY: of the C library's function, by its caller.
    unsafe {
        let Some((clock, mut turn)) = Clock::of(id).zip(own::turn(caller)) else {
            return system::clock_gettime(id, time);
        };
        let told = turn.record().clock(clock, || now(id));
        *time = timespec_of(value(told, turn));
    }
    0
}

pub unsafe extern "C" fn gettimeofday(
    time: *mut timeval,
    zone: *mut c_void,
    caller: usize,
) -> c_int {
    // SAFETY: as above. The zone is a constant.
    unsafe {
        let Some(mut turn) = own::turn(caller).filter(|_| !time.is_null()) else {
            return system::gettimeofday(time, zone);
        };
        if !zone.is_null() {
            system::gettimeofday(time, zone);
        }
        let micros = || {
            let mut time = std::mem::zeroed::<timeval>();
            system::gettimeofday(&mut time, std::ptr::null_mut());
            time.tv_sec * 1_000_000 + time.tv_usec
        };
        let told = turn.record().clock(Clock::TIME_OF_DAY, micros);
        let micros = value(told, turn);
        *time =
            timeval { tv_sec: micros.div_euclid(1_000_000), tv_usec: micros.rem_euclid(1_000_000) };
    }
    0
}

pub unsafe extern "C" fn timespec_get(time: *mut timespec, base: c_int, caller: usize) -> c_int {
    const TIME_UTC: c_int = 1;
    // SAFETY: as above.
    unsafe {
        let Some(mut turn) = own::turn(caller).filter(|_| base == TIME_UTC) else {
            return system::timespec_get(time, base);
        };
        let told = turn.record().clock(Clock::TIMESPEC, || now(libc::CLOCK_REALTIME));
        *time = timespec_of(value(told, turn));
    }
    base
}

pub unsafe extern "C" fn time(time: *mut time_t, caller: usize) -> time_t {
    // SAFETY: as above.
    unsafe {
        let Some(mut turn) = own::turn(caller) else { return system::time(time) };
        let told = turn.record().clock(Clock::TIME, || system::time(std::ptr::null_mut()));
        let seconds = value(told, turn);
        if let Some(time) = time.as_mut() {
            *time = seconds;
        }
        seconds
    }
}

pub unsafe extern "C" fn clock(caller: usize) -> clock_t {
    // SAFETY: as above.
    unsafe {
        let Some(mut turn) = own::turn(caller) else { return system::clock() };
        let told = turn.record().clock(Clock::CLOCK, || system::clock());
        value(told, turn)
    }
}

pub unsafe extern "C" fn getrandom(
    buffer: *mut c_void,
    length: size_t,
    flags: c_uint,
    caller: usize,
) -> ssize_t {
    // SAFETY: as above.
    unsafe {
        let Some(turn) = own::turn(caller).filter(|_| !buffer.is_null()) else {
            return system::getrandom(buffer, length, flags);
        };
        let draw = |into: &mut [u8]| {
            let given = system::getrandom(into.as_mut_ptr().cast(), into.len(), flags);
            if given < 0 { -i64::from(*libc::__errno_location()) } else { given as i64 }
        };
        match bytes(turn, Source::Random, buffer, length, draw) {
            given @ 0.. => given as ssize_t,
            error => fail(error) as ssize_t,
        }
    }
}

/// A number of `std::random_device`, whatever source the program has asked it for. The system's source is as good as any.
pub unsafe extern "C" fn random_device(_: *const c_void, caller: usize) -> c_uint {
    let mut number = [0_u8; size_of::<c_uint>()];
    let mut filled = 0;
    while filled < number.len() {
        let rest = &mut number[filled..];
        // SAFETY: writes the rest of a number.
        let given = unsafe { getrandom(rest.as_mut_ptr().cast(), rest.len(), 0, caller) };
        filled += usize::try_from(given).unwrap_or(0);
    }
    c_uint::from_ne_bytes(number)
}

pub unsafe extern "C" fn getentropy(buffer: *mut c_void, length: size_t, caller: usize) -> c_int {
    // SAFETY: as above.
    unsafe {
        let Some(turn) = own::turn(caller).filter(|_| !buffer.is_null()) else {
            return system::getentropy(buffer, length);
        };
        let draw = |into: &mut [u8]| match system::getentropy(into.as_mut_ptr().cast(), into.len())
        {
            0 => into.len() as i64,
            _ => -i64::from(*libc::__errno_location()),
        };
        match bytes(turn, Source::Entropy, buffer, length, draw) {
            0.. => 0,
            error => fail(error),
        }
    }
}

pub unsafe extern "C" fn arc4random(caller: usize) -> u32 {
    // SAFETY: as above.
    unsafe {
        let Some(turn) = own::turn(caller) else { return system::arc4random() };
        four(turn, || system::arc4random())
    }
}

pub unsafe extern "C" fn arc4random_uniform(bound: u32, caller: usize) -> u32 {
    // SAFETY: as above.
    unsafe {
        let Some(turn) = own::turn(caller) else { return system::arc4random_uniform(bound) };
        four(turn, || system::arc4random_uniform(bound))
    }
}

pub unsafe extern "C" fn arc4random_buf(buffer: *mut c_void, length: size_t, caller: usize) {
    // SAFETY: as above.
    unsafe {
        let Some(turn) = own::turn(caller).filter(|_| !buffer.is_null()) else {
            return system::arc4random_buf(buffer, length);
        };
        let draw = |into: &mut [u8]| {
            system::arc4random_buf(into.as_mut_ptr().cast(), into.len());
            into.len() as i64
        };
        bytes(turn, Source::Arc4, buffer, length, draw);
    }
}

fn four(turn: Turn, draw: impl FnOnce() -> u32) -> u32 {
    let mut number = [0; 4];
    let draw = |into: &mut [u8]| {
        into.copy_from_slice(&draw().to_ne_bytes());
        4
    };
    // SAFETY: the buffer has four bytes.
    unsafe { bytes(turn, Source::Arc4, number.as_mut_ptr().cast(), 4, draw) };
    u32::from_ne_bytes(number)
}

/// # Safety
/// `buffer` has `length` bytes.
unsafe fn bytes(
    mut turn: Turn,
    source: Source,
    buffer: *mut c_void,
    length: size_t,
    draw: impl FnOnce(&mut [u8]) -> i64,
) -> i64 {
    // SAFETY: the caller's promise; the program looks at none of it before it has its answer.
    let into = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), length) };
    let told = turn.record().bytes(source, into, draw);
    value(told, turn)
}

/// The answer; ends the process if there can be none.
#[inline]
fn value(told: Result<i64, Problem>, turn: Turn) -> i64 {
    let value = told.unwrap_or_else(|problem| trouble(&problem));
    drop(turn);
    wipe();
    value
}

/// Who asks the system leaves something else on the stack than who finds the answer on record, and programs send what they find
/// there: fields that they have never set.
#[inline(never)]
fn wipe() {
    let mut left = [MaybeUninit::<u8>::zeroed(); LEFT_BYTES];
    black_box(&mut left);
}

#[cold]
fn trouble(problem: &Problem) -> i64 {
    if let Problem::Full(answer) = problem {
        say(format_args!("{problem}: if this process is killed it cannot be started anew"));
        return *answer;
    }
    stop(format_args!("{problem}"))
}

/// Ends the process: this incarnation did not do what an earlier one did, or cannot find out what to do.
#[cold]
pub fn stop(why: fmt::Arguments<'_>) -> ! {
    let polls = own::polls().map_or(0, |polls| polls.present.load(Relaxed));
    say(format_args!("this process cannot go on: {why}, after {polls} polls"));
    write(format_args!("{LINE_MARK}{LAST_WORD}\n"));
    loop {
        // Nothing of the process may run any more.
        kernel(libc::SYS_exit_group, [EXIT_CANNOT_GO_ON as u64, 0, 0, 0, 0, 0]);
    }
}

/// The answer to a system call; ends the process if there can be none.
pub fn outcome_of(told: Result<i64, Problem>) -> i64 {
    told.unwrap_or_else(|problem| trouble(&problem))
}

fn fail(error: i64) -> c_int {
    // SAFETY: this thread's own.
    unsafe { *libc::__errno_location() = error.unsigned_abs() as c_int };
    -1
}

/// A clock that every system has, in nanoseconds.
pub fn now(id: clockid_t) -> i64 {
    let mut time = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one time.
    unsafe { system::clock_gettime(id, &mut time) };
    time.tv_sec * SECOND + time.tv_nsec
}

#[inline]
fn timespec_of(nanos: i64) -> timespec {
    timespec { tv_sec: nanos.div_euclid(SECOND), tv_nsec: nanos.rem_euclid(SECOND) }
}

/// One line on standard error, as the provider writes them.
#[cold]
pub fn say(text: fmt::Arguments<'_>) {
    say_as("Warn", text);
}

/// The same of something that may well be right.
#[cold]
pub fn inform(text: fmt::Arguments<'_>) {
    say_as("Info", text);
}

fn say_as(level: &str, text: fmt::Arguments<'_>) {
    let me = kernel(libc::SYS_getpid, [0; 6]);
    write(format_args!("{LINE_MARK}[{me}]: {level}: {text}\n"));
}

fn write(text: fmt::Arguments<'_>) {
    let mut line = Line::new();
    let _ = line.write_fmt(text);
    let bytes = line.bytes();
    let (start, length) = (bytes.as_ptr().addr() as u64, bytes.len() as u64);
    kernel(libc::SYS_write, [libc::STDERR_FILENO as u64, start, length, 0, 0, 0]);
}

/// A text of bounded length, for which nobody allocates memory; the newline at its end stays.
pub struct Line {
    bytes: [u8; LINE_BYTES],
    length: usize,
}

const LINE_BYTES: usize = 1024;

impl Line {
    pub fn new() -> Self {
        Self { bytes: [0; LINE_BYTES], length: 0 }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = &mut self.bytes[self.length..];
        let length = text.len().min(room.len());
        room[..length].copy_from_slice(&text.as_bytes()[..length]);
        self.length += length;
        if length < text.len() && text.ends_with('\n') {
            self.bytes[LINE_BYTES - 1] = b'\n';
        }
        Ok(())
    }
}
