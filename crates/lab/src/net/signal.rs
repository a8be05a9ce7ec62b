//! Signals as things to read instead of interruptions.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Signals that the calling thread, and threads it starts later, no longer get any other way.
pub struct Signals {
    fd: OwnedFd,
}

/// A signal that has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReceivedSignal {
    pub number: i32,
    /// Sent by a terminal to its whole foreground process group, not by a process to this one.
    pub from_terminal: bool,
}

impl Signals {
    pub fn take(numbers: &[i32]) -> io::Result<Signals> {
        let set = set_of(numbers);
        // SAFETY: the set is initialised and alive during both calls; a new descriptor belongs to
        // nobody else.
        unsafe {
            if libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
            let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Signals { fd: OwnedFd::from_raw_fd(fd) })
        }
    }

    /// The next signal that has come; None when there is none now.
    pub fn poll_signal(&self) -> Option<ReceivedSignal> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the buffer is `size` bytes, and is only taken as initialised when the kernel has
        // filled all of it.
        let info = unsafe {
            let read = libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), size);
            if read != size as isize {
                return None;
            }
            info.assume_init()
        };
        let from_terminal = info.ssi_code == libc::SI_KERNEL;
        Some(ReceivedSignal { number: info.ssi_signo as i32, from_terminal })
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Gives a program about to be executed all signals back. Safe between fork and exec.
pub fn restore_in_child() -> io::Result<()> {
    let none = set_of(&[]);
    // SAFETY: the set is initialised and alive during the call.
    if unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) }
        != 0
    {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn set_of(numbers: &[i32]) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set before anything reads it.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for &number in numbers {
            libc::sigaddset(set.as_mut_ptr(), number);
        }
        set.assume_init()
    }
}
