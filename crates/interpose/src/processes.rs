//! Descent of processes: whether a process is this one or its descendant, and the parent of a
//! process; readers of the files of proc(5).

use std::ffi::{CStr, c_int};
use std::fmt::Write;

use landbridge_proto::nondeterminism::RecordHead;

use crate::kernel_calls::kernel;
use crate::record_head;

/// Whether a process is this one or its descendant, up to eight generations.
pub fn is_own_process(process: c_int) -> bool {
    const BELOW_MAX: usize = 8;
    // The call goes through the trampoline, because the handler of system calls uses this function.
    let own = crate::kernel_calls::kernel(libc::SYS_getpid, [0; 6]) as u32;
    let mut at = u32::try_from(process).unwrap_or(0);
    for _ in 0..BELOW_MAX {
        if at <= 1 {
            return false;
        }
        if at == own || is_own_thread(at) {
            return true;
        }
        at = parent_of(at);
    }
    false
}

fn is_own_thread(thread: u32) -> bool {
    let own = crate::kernel_calls::kernel(libc::SYS_getpid, [0; 6]) as u64;
    crate::kernel_calls::kernel(libc::SYS_tgkill, [own, thread.into(), 0, 0, 0, 0]) == 0
}

/// Parent of a process; 0 if the process has none.
pub fn parent_of(process: u32) -> u32 {
    with_status(process.into(), |[_, parent, ..]| number(parent)).unwrap_or(0)
}

/// Whether a process has ended; its parent may not have waited for it. A process whose first thread
/// has ended before others has not.
pub fn has_ended(process: u64) -> bool {
    const THREADS: usize = 17;
    let ended = with_status(process, |words| {
        matches!(words[0], b"Z" | b"X") && number(words[THREADS]) <= 1
    });
    let is_there = || kernel(libc::SYS_kill, [process, 0, 0, 0, 0, 0]) != -i64::from(libc::ESRCH);
    ended.unwrap_or_else(|| !is_there())
}

/// Calls `read` with words of the `stat` of a process (proc(5)), from the state on, which follows a
/// name in brackets. `None`: the file cannot be read.
fn with_status<R>(process: u64, read: impl FnOnce([&[u8]; 18]) -> R) -> Option<R> {
    let mut path = crate::messages::MessageBuffer::new();
    let _ = write!(path, "/proc/{process}/stat\0");
    let mut text = [0_u8; 512];
    let place = path.bytes().as_ptr().addr() as u64;
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let kernel = crate::kernel_calls::kernel_or_libc;
    let file = kernel(libc::SYS_openat, [crate::kernel_calls::HERE, place, flags, 0, 0, 0]);
    let file = u64::try_from(file).ok()?;
    let room = text.as_mut_ptr().addr() as u64;
    let length = kernel(libc::SYS_read, [file, room, text.len() as u64, 0, 0, 0]);
    kernel(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
    let text = text.get(..usize::try_from(length).ok()?)?;
    let name_end = text.iter().rposition(|byte| *byte == b')')?;
    let mut words = text[name_end..].split(|byte| *byte == b' ').skip(1);
    Some(read(std::array::from_fn(|_| words.next().unwrap_or_default())))
}

fn number(word: &[u8]) -> u32 {
    std::str::from_utf8(word).ok().and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// Whether this thread repeats, or may repeat, what one of an earlier incarnation did: the recorded
/// process replays, or this is another thread or process, which began while it did so.
pub fn replays(head: &RecordHead) -> bool {
    head.is_replaying() || !record_head::is_owner() && head.replayed_at(begin_of_thread())
}

/// Time at which this thread began, in nanoseconds since the boot, in steps of 10 ms; 0: not known.
/// (proc(5): the 22nd word of `stat`.)
fn begin_of_thread() -> u64 {
    const TICK_NANOS: u64 = 10_000_000;
    const WORDS_AFTER_NAME: usize = 20;
    let mut began = 0;
    each_line(c"/proc/thread-self/stat", |line| {
        let name_end = line.iter().rposition(|byte| *byte == b')').unwrap_or(0);
        let word = line[name_end..].split(|byte| *byte == b' ').nth(WORDS_AFTER_NAME);
        let ticks: Option<u64> = word.and_then(|word| std::str::from_utf8(word).ok()?.parse().ok());
        began = ticks.map_or(0, |ticks| ticks.saturating_mul(TICK_NANOS));
    });
    began
}

/// Calls `work` with the process id and thread id of each thread of this process except the calling
/// one.
pub fn each_other_thread(mut work: impl FnMut(u64, u64)) -> bool {
    let (process, own) = (kernel(libc::SYS_getpid, [0; 6]), kernel(libc::SYS_gettid, [0; 6]));
    each_number_in(c"/proc/self/task", |number| {
        if number > 0 && number != own as u64 {
            work(process as u64, number);
        }
    })
}

/// Calls `work` for each entry of a proc(5) directory whose name is a number. False: the directory
/// cannot be read.
pub fn each_number_in(folder: &CStr, mut work: impl FnMut(u64)) -> bool {
    const ENTRIES_BYTES: usize = 4096;
    let folder = folder.as_ptr().addr() as u64;
    let flags = (libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC) as u64;
    let found = kernel(libc::SYS_openat, [crate::kernel_calls::HERE, folder, flags, 0, 0, 0]);
    let Ok(descriptor) = u64::try_from(found) else { return false };
    let mut room = [0_u8; ENTRIES_BYTES];
    let is_whole = loop {
        let into = room.as_mut_ptr().addr() as u64;
        let listed = [descriptor, into, ENTRIES_BYTES as u64, 0, 0, 0];
        let length = kernel(libc::SYS_getdents64, listed);
        let Some(mut rest) = usize::try_from(length).ok().and_then(|length| room.get(..length))
        else {
            break false;
        };
        if rest.is_empty() {
            break true;
        }
        // Fields of struct linux_dirent64: inode, offset, length, kind, name.
        while let Some(bytes) = rest.get(16..18) {
            let length = usize::from(u16::from_le_bytes([bytes[0], bytes[1]])).max(19);
            let name = rest.get(19..length).unwrap_or_default();
            let digits = name.iter().take_while(|byte| byte.is_ascii_digit());
            if name.first().is_some_and(u8::is_ascii_digit) {
                work(digits.fold(0, |sum: u64, digit| 10 * sum + u64::from(digit - b'0')));
            }
            rest = rest.get(length..).unwrap_or_default();
        }
    };
    kernel(libc::SYS_close, [descriptor, 0, 0, 0, 0, 0]);
    is_whole
}

/// Calls `work` with each line of a file of proc(5); a line longer than the room is cut off. False:
/// the file cannot be read.
pub fn each_line(path: &CStr, mut work: impl FnMut(&[u8])) -> bool {
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let place = path.as_ptr().addr() as u64;
    let Ok(file) =
        u64::try_from(kernel(libc::SYS_openat, [crate::kernel_calls::HERE, place, flags, 0, 0, 0]))
    else {
        return false;
    };
    let (mut room, mut line, mut length) = ([0_u8; 4096], [0_u8; 128], 0);
    let is_whole = loop {
        let into = room.as_mut_ptr().addr() as u64;
        let given = kernel(libc::SYS_read, [file, into, room.len() as u64, 0, 0, 0]);
        let Some(bytes) = usize::try_from(given).ok().and_then(|given| room.get(..given)) else {
            break false;
        };
        if bytes.is_empty() {
            break true;
        }
        for byte in bytes {
            if *byte == b'\n' {
                work(&line[..length]);
                length = 0;
            } else if length < line.len() {
                line[length] = *byte;
                length += 1;
            }
        }
    };
    kernel(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
    is_whole
}
