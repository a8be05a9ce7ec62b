//! Attributes of this process that CRIU does not save in a checkpoint image: memory that is empty
//! in children (madvise(2), `MADV_WIPEONFORK`), and the slack of the timers (prctl(2)).
//!
//! In: calls of madvise; the moment before an image is taken, and the moment after a process was
//! restored from it. Out: the same attributes as before. What may never happen: a restored process
//! whose attributes are known to be others goes on without a report.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use libc::c_long;

use crate::kernel_calls::kernel;
use crate::{processes, watched};

/// Largest number of ranges that are marked again.
const RANGES_MAX: usize = 64;

/// Whether the program has marked memory.
static HAS_MARKED: AtomicBool = AtomicBool::new(false);
/// The first and the last address of each marked range when the last image was taken.
static RANGES: [[AtomicU64; 2]; RANGES_MAX] =
    [const { [const { AtomicU64::new(0) }; 2] }; RANGES_MAX];
static RANGE_COUNT: AtomicUsize = AtomicUsize::new(0);
/// Slack of the timers in nanoseconds when the last image was taken.
static TIMER_SLACK: AtomicU64 = AtomicU64::new(0);

/// Notes a system call that marks memory.
pub fn note(number: c_long, arguments: [u64; 6]) {
    if number == libc::SYS_madvise && arguments[2] == libc::MADV_WIPEONFORK as u64 {
        HAS_MARKED.store(true, Relaxed);
    }
}

/// Remembers the attributes before an image of this process is taken.
pub fn remember() {
    let slack = kernel(libc::SYS_prctl, [libc::PR_GET_TIMERSLACK as u64, 0, 0, 0, 0, 0]);
    TIMER_SLACK.store(u64::try_from(slack).unwrap_or(0), Relaxed);
    if HAS_MARKED.load(Relaxed) && !remember_ranges() {
        watched::forbid_restart_of(format_args!(
            "it has marked more memory (MADV_WIPEONFORK) than a checkpoint records"
        ));
    }
}

/// False: there are too many ranges, or the kernel does not name them.
fn remember_ranges() -> bool {
    let (mut present, mut count) = (None, 0);
    let is_read = processes::each_line(c"/proc/self/smaps", |line| {
        if let Some(range) = range_of(line) {
            present = Some(range);
        } else if is_marked(line) {
            let room = RANGES.get(count).zip(present);
            for (place, address) in
                room.into_iter().flat_map(|(room, range)| room.iter().zip(range))
            {
                place.store(address, Relaxed);
            }
            count += 1;
        }
    });
    RANGE_COUNT.store(count.min(RANGES_MAX), Relaxed);
    is_read && count <= RANGES_MAX
}

/// The addresses at the beginning of a line of smaps (proc(5)) that describes a mapping.
fn range_of(line: &[u8]) -> Option<[u64; 2]> {
    let word = std::str::from_utf8(line.split(|byte| *byte == b' ').next()?).ok()?;
    let (start, end) = word.split_once('-')?;
    Some([u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?])
}

/// Whether a line of smaps has the flags of a mapping that is marked.
fn is_marked(line: &[u8]) -> bool {
    let flags = line.strip_prefix(b"VmFlags:").unwrap_or_default();
    flags.split(|byte| *byte == b' ').any(|flag| flag == b"wf")
}

/// Gives the attributes to a process that was restored from the image.
pub fn restore() {
    for [start, end] in &RANGES[..RANGE_COUNT.load(Relaxed)] {
        let (start, end) = (start.load(Relaxed), end.load(Relaxed));
        let advice = libc::MADV_WIPEONFORK as u64;
        let result = kernel(libc::SYS_madvise, [start, end - start, advice, 0, 0, 0]);
        if result != 0 {
            watched::forbid_restart_of(format_args!(
                "its memory (MADV_WIPEONFORK) cannot be marked again"
            ));
        }
    }
    let slack = TIMER_SLACK.load(Relaxed);
    if slack != 0 {
        kernel(libc::SYS_prctl, [libc::PR_SET_TIMERSLACK as u64, slack, 0, 0, 0, 0]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::raw;
    use crate::trampoline;

    /// The test takes the attributes away, as CRIU does.
    #[test]
    fn marked_memory_and_timer_slack_come_back() {
        const BYTES: u64 = 8192;
        assert!(trampoline::open().is_some());
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        let call = |number, arguments| {
            // SAFETY: memory of this test, and an attribute of this thread.
            unsafe { raw(number, arguments) }
        };
        let memory = call(libc::SYS_mmap, [0, BYTES, 3, flags, !0, 0]) as u64;
        let marked = || {
            let (mut present, mut found) = ([0; 2], false);
            processes::each_line(c"/proc/self/smaps", |line| {
                present = range_of(line).unwrap_or(present);
                found |= is_marked(line) && (present[0]..present[1]).contains(&memory);
            });
            found
        };
        let advise = |advice: i32| {
            let arguments = [memory, BYTES, advice as u64, 0, 0, 0];
            note(libc::SYS_madvise, arguments);
            assert_eq!(call(libc::SYS_madvise, arguments), 0);
        };
        let slack =
            |operation: i32, value| call(libc::SYS_prctl, [operation as u64, value, 0, 0, 0, 0]);
        advise(libc::MADV_WIPEONFORK);
        slack(libc::PR_SET_TIMERSLACK, 77_000);
        remember();
        advise(libc::MADV_KEEPONFORK);
        slack(libc::PR_SET_TIMERSLACK, 50_000);
        assert!(!marked());
        restore();
        assert!(marked());
        assert_eq!(slack(libc::PR_GET_TIMERSLACK, 0), 77_000);
        call(libc::SYS_munmap, [memory, BYTES, 0, 0, 0, 0]);
    }
}
