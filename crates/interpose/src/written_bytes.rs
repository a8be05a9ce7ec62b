//! How many bytes this thread has written.
//!
//! The kernel counts what the system calls of a thread have written to files, pipes and sockets,
//! also of a call during which the thread was killed. The node agent reads the count of a process
//! that has ended (`launch/src/agent/exits.rs`); the difference to the count before a write is
//! what that write has done. In: the kernel's counters. Out: a mark for an announcement.

use crate::kernel_calls::{HERE, kernel};

const COUNTERS: &std::ffi::CStr = c"/proc/thread-self/io";
/// More than the length of all seven lines.
const ROOM: usize = 256;

/// One more than the bytes that this thread has written; 0: the kernel does not tell.
pub fn written_mark() -> u64 {
    let path = COUNTERS.as_ptr().addr() as u64;
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let file = kernel(libc::SYS_openat, [HERE, path, flags, 0, 0, 0]);
    let Ok(file) = u64::try_from(file) else { return 0 };
    let mut text = [0; ROOM];
    let room = text.as_mut_ptr().addr() as u64;
    let length = kernel(libc::SYS_read, [file, room, ROOM as u64, 0, 0, 0]);
    kernel(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
    let text = usize::try_from(length).ok().and_then(|length| text.get(..length));
    text.and_then(written_in).map_or(0, |bytes| bytes + 1)
}

/// Bytes that an interrupted call has written. `mark`: [`written_mark`] before the call; `at_end`:
/// what the thread had written in all. `None`: not known.
pub fn written_between(mark: u64, at_end: Option<u64>) -> Option<u64> {
    at_end?.checked_sub(mark.checked_sub(1)?)
}

/// The number after `wchar:` (`proc_pid_io(5)`).
fn written_in(text: &[u8]) -> Option<u64> {
    let line = text.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"wchar: "))?;
    line.iter().try_fold(0_u64, |all, digit| {
        let digit = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        all.checked_mul(10)?.checked_add(digit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found_among_the_counters() {
        assert_eq!(written_in(b"rchar: 3980\nwchar: 13345\nsyscr: 7\n"), Some(13_345));
        assert_eq!(written_in(b"wchar: 1x\n"), None);
        assert_eq!(written_in(b"rchar: 1\n"), None);
        let now = written_mark();
        assert!(now == 0 || written_mark() >= now);
    }

    #[test]
    fn what_a_call_has_written_needs_both_counts() {
        assert_eq!(written_between(1, Some(4)), Some(4));
        assert_eq!(written_between(6, Some(5)), Some(0));
        assert_eq!(written_between(0, Some(5)), None);
        assert_eq!(written_between(6, None), None);
    }
}
