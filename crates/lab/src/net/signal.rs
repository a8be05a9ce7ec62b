//! Signals that a program reads from a descriptor.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Signals that the calling thread, and threads that it starts later, get only by this descriptor.
pub struct Signals {
    fd: OwnedFd,
}

/// A signal that has arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReceivedSignal {
    pub number: i32,
    /// Whether a terminal sent the signal to its foreground process group, and not a process to
    /// this process.
    pub from_terminal: bool,
}

impl Signals {
    pub fn take(numbers: &[i32]) -> io::Result<Signals> {
        let set = set_of(numbers);
        // SAFETY: the set is initialised and valid during both calls; the new descriptor has no
        // other owner.
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

    /// The next pending signal; `None` if there is none now.
    pub fn poll_signal(&self) -> Option<ReceivedSignal> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the buffer is `size` bytes long, and counts as initialised only if the kernel has
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

/// Unblocks all signals for a program that is about to be executed. The function is safe between
/// fork and exec.
pub fn restore_in_child() -> io::Result<()> {
    let none = set_of(&[]);
    // SAFETY: the set is initialised and valid during the call.
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
