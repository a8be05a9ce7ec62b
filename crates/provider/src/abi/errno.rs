//! Error numbers: numbers of the system, and numbers of libfabric from 256 on.

use std::fmt;

/// A positive error number. libfabric's calls return the negative number.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

impl Errno {
    pub const ENOENT: Errno = Errno(libc::ENOENT);
    pub const EINTR: Errno = Errno(libc::EINTR);
    pub const EIO: Errno = Errno(libc::EIO);
    pub const EAGAIN: Errno = Errno(libc::EAGAIN);
    pub const ENOMEM: Errno = Errno(libc::ENOMEM);
    pub const EACCES: Errno = Errno(libc::EACCES);
    pub const EBUSY: Errno = Errno(libc::EBUSY);
    pub const EINVAL: Errno = Errno(libc::EINVAL);
    pub const ENOSYS: Errno = Errno(libc::ENOSYS);
    pub const ENOMSG: Errno = Errno(libc::ENOMSG);
    pub const ENODATA: Errno = Errno(libc::ENODATA);
    pub const EMSGSIZE: Errno = Errno(libc::EMSGSIZE);
    pub const ENOPROTOOPT: Errno = Errno(libc::ENOPROTOOPT);
    pub const EOPNOTSUPP: Errno = Errno(libc::EOPNOTSUPP);
    pub const EADDRINUSE: Errno = Errno(libc::EADDRINUSE);
    pub const EADDRNOTAVAIL: Errno = Errno(libc::EADDRNOTAVAIL);
    pub const ECONNRESET: Errno = Errno(libc::ECONNRESET);
    pub const ECONNREFUSED: Errno = Errno(libc::ECONNREFUSED);
    pub const EHOSTUNREACH: Errno = Errno(libc::EHOSTUNREACH);
    pub const ESHUTDOWN: Errno = Errno(libc::ESHUTDOWN);
    pub const ETIMEDOUT: Errno = Errno(libc::ETIMEDOUT);
    pub const ECANCELED: Errno = Errno(libc::ECANCELED);

    pub const EOTHER: Errno = Errno(256);
    pub const ETOOSMALL: Errno = Errno(257);
    pub const EOPBADSTATE: Errno = Errno(258);
    pub const EAVAIL: Errno = Errno(259);
    pub const EBADFLAGS: Errno = Errno(260);
    pub const ENOEQ: Errno = Errno(261);
    pub const EDOMAIN: Errno = Errno(262);
    pub const ENOCQ: Errno = Errno(263);
    pub const ETRUNC: Errno = Errno(265);
    pub const ENOKEY: Errno = Errno(266);
    pub const ENOAV: Errno = Errno(267);

    /// The value that a C call returns for the error.
    pub const fn negative(self) -> i32 {
        -self.0
    }

    /// The calling thread's `errno`.
    pub fn last() -> Errno {
        Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }

    /// A sentence for `strerror`.
    pub fn text(self) -> &'static str {
        match self {
            Errno::EOTHER => "unspecified error",
            Errno::ETOOSMALL => "provided buffer is too small",
            Errno::EOPBADSTATE => "operation not permitted in the current state",
            Errno::EAVAIL => "error available",
            Errno::EBADFLAGS => "flags not supported",
            Errno::ENOEQ => "missing event queue",
            Errno::EDOMAIN => "invalid domain",
            Errno::ENOCQ => "missing completion queue",
            Errno::ETRUNC => "message longer than the receive buffer",
            Errno::ENOKEY => "key not available",
            Errno::ENOAV => "missing address vector",
            Errno::ECANCELED => "operation canceled",
            Errno::ENOMSG => "no matching message",
            Errno::EIO => "the peer is gone (I/O error)",
            Errno::ECONNRESET => "the peer closed its connection",
            Errno::ECONNREFUSED => "the peer refused the connection",
            Errno::EHOSTUNREACH => "no path to the peer",
            Errno::EACCES => "access to the memory region not permitted",
            Errno::EINVAL => "invalid argument",
            _ => "see errno(3)",
        }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({}: {})", self.0, self.text())
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (error {})", self.text(), self.0)
    }
}
