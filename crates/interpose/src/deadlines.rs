//! Absolute deadlines of waits and timers, in a process that replays.
//!
//! A program computes a deadline from a clock that it has read, and a replayed clock has an old
//! value, at which the kernel's clock has arrived long ago: the wait would end at once. So the
//! kernel gets a deadline that is later by the *lag* of the clock: the time by which the value that
//! the program has read last is behind the kernel's clock at that read. A wait then ends as long
//! after that read as in the first incarnation, unless something else ends the wait earlier.
//!
//! In: each clock read of the recorded thread ([`note_read`]), and its system calls that take an
//! absolute time. Out: the same call with another deadline. Calls of an incarnation that has
//! replayed nothing are let through.
//!
//! What may never happen: a deadline is changed twice, or the program's own memory is.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};

use landbridge_proto::nondeterminism::{Clock, RecordError};
use libc::{c_int, c_long, clockid_t, timespec};

use crate::kernel_calls::kernel;
use crate::real_libc::now;
use crate::restart_refusals::abort_replay;
use crate::session::Session;
use crate::signal_mask::interruptible;
use crate::{processes, user_memory};

const SECOND: i64 = 1_000_000_000;

/// Clocks by which a wait or a timer can end. The other clocks show the same time as one of these.
const CLOCKS: [clockid_t; 6] = [
    libc::CLOCK_REALTIME,
    libc::CLOCK_MONOTONIC,
    libc::CLOCK_BOOTTIME,
    libc::CLOCK_TAI,
    libc::CLOCK_PROCESS_CPUTIME_ID,
    libc::CLOCK_THREAD_CPUTIME_ID,
];

/// Nanoseconds by which the program's last value of each clock is behind the kernel's clock.
static LAGS: [AtomicI64; CLOCKS.len()] = [const { AtomicI64::new(0) }; CLOCKS.len()];
/// Whether a lag may differ from 0.
static HAS_LAGS: AtomicBool = AtomicBool::new(false);
/// Values of the clocks when the last checkpoint image was taken.
static AT_IMAGE: [AtomicI64; CLOCKS.len()] = [const { AtomicI64::new(0) }; CLOCKS.len()];

/// System calls of Linux 5.16 and 6.7: waits for a futex until an absolute time.
const FUTEX_WAITV: c_long = 449;
const FUTEX_WAIT: c_long = 455;

/// An absolute time among the arguments of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Deadline {
    /// Index in [`CLOCKS`].
    clock: usize,
    /// Index of the argument that points to the time.
    argument: usize,
    /// Whether the time is the second of a `struct itimerspec`.
    is_timer: bool,
}

/// Notes a read of `clock` by the program. `asked`: the value of the kernel's clock, if the system
/// has answered. `ask` reads the clock of the system, in the same unit.
#[inline]
pub fn note_read(
    clock: Clock,
    asked: Option<i64>,
    answer: &Result<i64, RecordError>,
    ask: impl FnOnce() -> i64,
) {
    if asked.is_none() || HAS_LAGS.load(Relaxed) {
        note_lag(clock, asked, answer, ask);
    }
}

#[cold]
fn note_lag(
    clock: Clock,
    asked: Option<i64>,
    answer: &Result<i64, RecordError>,
    ask: impl FnOnce() -> i64,
) {
    let (id, unit) = match clock {
        Clock::TIME_OF_DAY => (libc::CLOCK_REALTIME, 1000),
        Clock::TIME => (libc::CLOCK_REALTIME, SECOND),
        Clock::TIMESPEC => (libc::CLOCK_REALTIME, 1),
        Clock::CLOCK => return,
        other => (other.id(), 1),
    };
    if let (Some(at), Ok(answer)) = (position(id), answer) {
        let lag = asked.unwrap_or_else(ask).wrapping_sub(*answer);
        LAGS[at].store(lag.saturating_mul(unit), Relaxed);
        HAS_LAGS.store(true, Relaxed);
    }
}

/// Index in [`CLOCKS`] of the clock that shows the same time as `id`.
fn position(id: clockid_t) -> Option<usize> {
    let same = match id {
        libc::CLOCK_REALTIME_COARSE | libc::CLOCK_REALTIME_ALARM => libc::CLOCK_REALTIME,
        libc::CLOCK_MONOTONIC_COARSE => libc::CLOCK_MONOTONIC,
        libc::CLOCK_BOOTTIME_ALARM => libc::CLOCK_BOOTTIME,
        other => other,
    };
    CLOCKS.iter().position(|clock| *clock == same)
}

/// Notes the time at which a checkpoint image of this process is taken.
pub fn note_image() {
    CLOCKS.iter().zip(&AT_IMAGE).for_each(|(id, at)| at.store(now(*id), Relaxed));
}

/// Adds the time since the checkpoint image to each lag, in a process that was restored from the
/// image: the next clock reads are those that followed the image.
pub fn note_restore() {
    for ((id, at), lag) in CLOCKS.iter().zip(&AT_IMAGE).zip(&LAGS) {
        let since = now(*id).wrapping_sub(at.load(Relaxed));
        lag.store(lag.load(Relaxed).saturating_add(since), Relaxed);
    }
    HAS_LAGS.store(true, Relaxed);
}

/// The absolute time among the arguments of a system call, if the call has one.
fn deadline_of(number: c_long, arguments: [u64; 6]) -> Option<Deadline> {
    let [first, second, third, fourth, fifth, sixth] = arguments;
    let is_absolute = second as c_int & libc::TIMER_ABSTIME != 0;
    let (clock, argument) = match number {
        libc::SYS_futex => (clock_of_futex(second as c_int)?, 3),
        FUTEX_WAITV if fourth != 0 => (fifth as clockid_t, 3),
        FUTEX_WAIT if fifth != 0 => (sixth as clockid_t, 4),
        libc::SYS_clock_nanosleep if is_absolute => (first as clockid_t, 2),
        libc::SYS_timerfd_settime if is_absolute && third != 0 => (clock_of_file(first)?, 2),
        libc::SYS_timer_settime if is_absolute && third != 0 => (clock_of_timer(first)?, 2),
        _ => return None,
    };
    let is_timer = matches!(number, libc::SYS_timerfd_settime | libc::SYS_timer_settime);
    position(clock).map(|clock| Deadline { clock, argument, is_timer })
}

/// The clock of a futex operation with an absolute time (futex(2)).
fn clock_of_futex(operation: c_int) -> Option<clockid_t> {
    const LOCK_PI2: c_int = 13;
    let command = operation & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);
    let is_realtime = operation & libc::FUTEX_CLOCK_REALTIME != 0;
    match command {
        libc::FUTEX_LOCK_PI => Some(libc::CLOCK_REALTIME),
        libc::FUTEX_WAIT_BITSET | libc::FUTEX_WAIT_REQUEUE_PI | LOCK_PI2 if is_realtime => {
            Some(libc::CLOCK_REALTIME)
        }
        libc::FUTEX_WAIT_BITSET | libc::FUTEX_WAIT_REQUEUE_PI | LOCK_PI2 => {
            Some(libc::CLOCK_MONOTONIC)
        }
        _ => None,
    }
}

/// `time` later by `lag` nanoseconds. `None`: the call gets the program's own time, because that is
/// no valid time, or stops a timer.
fn later(time: timespec, lag: i64, is_timer: bool) -> Option<timespec> {
    let is_valid = time.tv_sec >= 0 && (0..SECOND).contains(&time.tv_nsec);
    if !is_valid || lag == 0 || is_timer && (time.tv_sec, time.tv_nsec) == (0, 0) {
        return None;
    }
    let nanos = time.tv_nsec + lag.rem_euclid(SECOND);
    let seconds = time.tv_sec.saturating_add(lag.div_euclid(SECOND)).saturating_add(nanos / SECOND);
    // A time before that of the clock's origin has passed.
    let passed = timespec { tv_sec: 0, tv_nsec: 1 };
    Some(if seconds < 0 { passed } else { timespec { tv_sec: seconds, tv_nsec: nanos % SECOND } })
}

impl Session {
    /// Makes a system call with the deadline that the program means. `None`: the call is let
    /// through.
    ///
    /// # Safety
    /// The arguments are those of a system call that this thread makes.
    pub unsafe fn wait_until(&mut self, number: c_long, mut arguments: [u64; 6]) -> Option<i64> {
        if !HAS_LAGS.load(Relaxed) {
            return None;
        }
        let deadline = deadline_of(number, arguments)?;
        let place = arguments[deadline.argument] as *const timespec;
        let bytes =
            if deadline.is_timer { size_of::<[timespec; 2]>() } else { size_of::<timespec>() };
        if !user_memory::has_bytes(place.addr() as u64, bytes as u64) {
            return None;
        }
        // SAFETY: a time of the program's, or the interval and then the time of a timer.
        let mut times = unsafe {
            match deadline.is_timer {
                true => place.cast::<[timespec; 2]>().read_unaligned(),
                false => [place.read_unaligned(); 2],
            }
        };
        let lag = LAGS[deadline.clock].load(Relaxed);
        times[1] = later(times[1], lag, deadline.is_timer)?;
        let first = usize::from(!deadline.is_timer);
        arguments[deadline.argument] = (&raw const times[first]).addr() as u64;
        Some(self.guard.while_released(|| interruptible(|| kernel(number, arguments))))
    }
}

/// The clock of the timer behind a descriptor (timerfd_create(2)). `None`: it is no timer.
fn clock_of_file(descriptor: u64) -> Option<clockid_t> {
    let path = crate::file_metadata::information_path(descriptor);
    let mut clock = None;
    // A system without proc(5) is refused before the program starts.
    processes::each_line(path.text(), |line| clock = clock.or(number_after(line, b"clockid: ")));
    clock
}

/// The clock of a timer of this process (timer_create(2)). `None`: there is no such timer.
fn clock_of_timer(timer: u64) -> Option<clockid_t> {
    let (mut is_it, mut clock) = (false, None);
    let is_listed = processes::each_line(c"/proc/self/timers", |line| {
        if let Some(id) = number_after(line, b"ID: ") {
            is_it = id == timer as c_int;
        }
        if is_it && clock.is_none() {
            clock = number_after(line, b"ClockID: ");
        }
    });
    if !is_listed {
        abort_replay(format_args!("it sets a timer, and this system does not say by which clock"))
    }
    clock
}

/// The decimal number that is the rest of a line after `name`.
fn number_after(line: &[u8], name: &[u8]) -> Option<c_int> {
    std::str::from_utf8(line.strip_prefix(name)?).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: i64, nanos: i64) -> timespec {
        timespec { tv_sec: seconds, tv_nsec: nanos }
    }

    fn shifted(time: timespec, lag: i64) -> (i64, i64) {
        let time = later(time, lag, false).expect("a deadline");
        (time.tv_sec, time.tv_nsec)
    }

    #[test]
    fn a_deadline_is_later_by_the_lag_of_its_clock() {
        assert_eq!(shifted(at(10, 700_000_000), 2_500_000_000), (13, 200_000_000));
        assert_eq!(shifted(at(10, 200_000_000), -2_500_000_000), (7, 700_000_000));
        assert_eq!(shifted(at(1, 0), -2 * SECOND), (0, 1), "it has passed");
        assert_eq!(shifted(at(i64::MAX, 5), SECOND), (i64::MAX, 5));
        for (time, lag) in [(at(-1, 0), 1), (at(1, SECOND), 1), (at(1, -1), 1), (at(1, 1), 0)] {
            assert!(later(time, lag, false).is_none());
        }
        assert!(later(at(0, 0), SECOND, true).is_none(), "a timer that is stopped");
        assert!(later(at(0, 0), SECOND, false).is_some());
    }

    #[test]
    fn every_call_with_an_absolute_time_is_known() {
        let clock = |number, arguments| deadline_of(number, arguments).map(|it| CLOCKS[it.clock]);
        let (bits, realtime) = (libc::FUTEX_WAIT_BITSET as u64, libc::FUTEX_CLOCK_REALTIME as u64);
        let (monotonic, wall) = (Some(libc::CLOCK_MONOTONIC), Some(libc::CLOCK_REALTIME));
        let futex = |operation| clock(libc::SYS_futex, [0, operation, 0, 1, 0, 0]);
        assert_eq!(futex(bits), monotonic);
        assert_eq!(futex(bits | 128), monotonic);
        assert_eq!(futex(bits | 128 | realtime), wall);
        assert_eq!(futex(libc::FUTEX_LOCK_PI as u64 | 128), wall);
        assert_eq!(futex(libc::FUTEX_WAIT as u64 | 128), None, "its time is relative");
        assert_eq!(futex(libc::FUTEX_WAKE as u64), None);
        assert_eq!(clock(FUTEX_WAIT, [0, 0, 0, 0, 8, 1]), monotonic);
        assert_eq!(clock(FUTEX_WAITV, [0, 0, 0, 8, 0, 0]), wall);
        assert_eq!(clock(FUTEX_WAITV, [0; 6]), None);
        assert_eq!(clock(libc::SYS_clock_nanosleep, [1, 1, 8, 0, 0, 0]), monotonic);
        assert_eq!(clock(libc::SYS_clock_nanosleep, [1, 0, 8, 0, 0, 0]), None);
        assert_eq!(position(libc::CLOCK_MONOTONIC_RAW), None);
    }

    #[test]
    fn the_clock_of_a_timer_is_found() {
        // SAFETY: this test creates the timers, and removes them.
        unsafe {
            let file = libc::timerfd_create(libc::CLOCK_BOOTTIME, libc::TFD_CLOEXEC);
            assert!(file >= 0);
            assert_eq!(clock_of_file(file as u64), Some(libc::CLOCK_BOOTTIME));
            libc::close(file);
            assert_eq!(clock_of_file(file as u64), None);
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_NONE;
            let [mut first, mut second] = [0_i32; 2];
            let new = |clock: clockid_t, id: &mut i32| {
                libc::syscall(libc::SYS_timer_create, clock, &raw const event, &raw mut *id)
            };
            assert_eq!(new(libc::CLOCK_MONOTONIC, &mut first), 0);
            assert_eq!(new(libc::CLOCK_REALTIME, &mut second), 0);
            assert_eq!(clock_of_timer(first as u64), Some(libc::CLOCK_MONOTONIC));
            assert_eq!(clock_of_timer(second as u64), Some(libc::CLOCK_REALTIME));
            assert_eq!(clock_of_timer(12_345), None);
            for id in [first, second] {
                libc::syscall(libc::SYS_timer_delete, id);
            }
        }
    }
}
