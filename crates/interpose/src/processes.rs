//! Descent of processes: whether a process is this one or its descendant, and the parent of a
//! process.

use std::ffi::c_int;
use std::fmt::Write;

/// Whether a process is this one or its descendant, up to eight generations.
pub fn is_own_process(process: c_int) -> bool {
    const BELOW_MAX: usize = 8;
    // The call goes through the trampoline, because the handler of system calls uses this function.
    let own = crate::session::kernel(libc::SYS_getpid, [0; 6]) as u32;
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
    let own = crate::session::kernel(libc::SYS_getpid, [0; 6]) as u64;
    crate::session::kernel(libc::SYS_tgkill, [own, thread.into(), 0, 0, 0, 0]) == 0
}

/// Parent of a process; 0 if the process has none. (proc(5): the fourth word of `stat`, after a
/// name in brackets.)
pub fn parent_of(process: u32) -> u32 {
    let mut path = crate::libc_wrappers::MessageBuffer::new();
    let _ = write!(path, "/proc/{process}/stat\0");
    let mut text = [0_u8; 512];
    let place = path.bytes().as_ptr().addr() as u64;
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let kernel = crate::session::kernel_or_libc;
    let file = kernel(libc::SYS_openat, [crate::syscalls::HERE, place, flags, 0, 0, 0]) as u64;
    let room = text.as_mut_ptr().addr() as u64;
    let length = kernel(libc::SYS_read, [file, room, text.len() as u64, 0, 0, 0]);
    kernel(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
    let length = usize::try_from(length).unwrap_or(0);
    let text = &text[..length];
    let name_end = text.iter().rposition(|byte| *byte == b')').unwrap_or(0);
    let word = text[name_end..].split(|byte| *byte == b' ').nth(2);
    word.and_then(|word| std::str::from_utf8(word).ok()?.parse().ok()).unwrap_or(0)
}
