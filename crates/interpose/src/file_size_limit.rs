//! The signal of calls that fail because a file would become larger than the process may make files
//! (SIGXFSZ; setrlimit(2), `RLIMIT_FSIZE`).
//!
//! In: replayed calls that failed with EFBIG. Out: the signal, to the calling thread, as the kernel
//! has sent the signal when the call was performed.
//!
//! The kernel sends the signal if such a limit is set. An error without a limit concerns the
//! largest file of the file system. The program sets its own limit again in a replay; the limit of
//! a user's shell may be another one on another node.
//!
//! What may never happen: a replay goes on without a signal that the program's handler has counted.

use std::mem::MaybeUninit;

use crate::kernel_calls::kernel;
use crate::origin;
use crate::restart_refusals::abort_replay;

/// Sends the signal for a replayed call that failed with EFBIG.
#[cold]
pub fn repeat_signal() {
    if limit() != libc::RLIM_INFINITY {
        return send_signal();
    }
    if origin::is_other_node() {
        abort_replay(format_args!(
            "a file would have become larger than it may make files (EFBIG), and this node sets no \
             such limit"
        ));
    }
}

fn limit() -> libc::rlim_t {
    let mut found = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    let room = (&raw mut found).addr() as u64;
    kernel(libc::SYS_prlimit64, [0, u64::from(libc::RLIMIT_FSIZE), 0, room, 0, 0]);
    found.rlim_cur
}

/// Sends the signal with the words that the kernel fills in for its own.
fn send_signal() {
    let [process, thread, user] = [libc::SYS_getpid, libc::SYS_gettid, libc::SYS_getuid]
        .map(|number| kernel(number, [0; 6]) as u64);
    // The fields of `siginfo_t`: signal, error, code (SI_USER is 0), unused, process and user.
    let mut words = [0_u32; size_of::<libc::siginfo_t>() / 4];
    words[0] = libc::SIGXFSZ as u32;
    (words[4], words[5]) = (process as u32, user as u32);
    let about = MaybeUninit::new(words);
    let about = about.as_ptr().addr() as u64;
    kernel(libc::SYS_rt_tgsigqueueinfo, [process, thread, libc::SIGXFSZ as u64, about, 0, 0]);
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use super::*;

    /// Thread of the handler, and sender and code of the signal.
    static SEEN: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];

    extern "C" fn note(_: libc::c_int, info: *const libc::siginfo_t) {
        // SAFETY: the kernel's structure.
        let (code, sender) = unsafe { ((*info).si_code, (*info).si_pid()) };
        let thread = kernel(libc::SYS_gettid, [0; 6]) as u64;
        let seen = [thread, sender as u64, code as u32 as u64];
        SEEN.iter().zip(seen).for_each(|(place, word)| place.store(word, Relaxed));
    }

    #[test]
    fn a_repeated_signal_is_like_the_first() {
        const LIMIT: u64 = 1 << 40;
        let seen = || [0, 1, 2].map(|at: usize| SEEN[at].swap(77, Relaxed));
        // SAFETY: structures for which all zeros are a valid value, and a handler.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            (action.sa_sigaction, action.sa_flags) = (note as *const () as usize, libc::SA_SIGINFO);
            assert_eq!(libc::sigaction(libc::SIGXFSZ, &action, std::ptr::null_mut()), 0);
            let mut limit: libc::rlimit = std::mem::zeroed();
            assert_eq!(libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit), 0);
            seen();
            if limit.rlim_cur == libc::RLIM_INFINITY {
                repeat_signal();
                assert_eq!(seen()[0], 77, "no limit, no signal");
            }
            limit.rlim_cur = LIMIT.min(limit.rlim_max);
            assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
        }
        let path = std::env::temp_dir().join(format!("lb-limit-{}", std::process::id()));
        let file = std::fs::File::create(&path).unwrap();
        let failed = file.write_at(b"x", LIMIT).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(failed.raw_os_error(), Some(libc::EFBIG));
        let first = seen();
        assert_eq!(first[1], u64::from(std::process::id()));
        repeat_signal();
        assert_eq!(seen(), first);
    }
}
