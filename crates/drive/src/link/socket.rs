//! A relay's end of a stream socket (TCP or Unix): bytes in, many frames out with one call.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The most slices in one call: enough for 1 MiB of queue chunks, and cheap to set up.
const SLICES_MAX: usize = 64;

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketRead {
    /// The bytes read; 0 at the end of the stream.
    pub bytes: usize,
    /// There may be more, which nothing will announce, so the caller must read again.
    pub more: bool,
}

/// The result of a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketWrite {
    /// The bytes taken.
    pub bytes: usize,
    /// The socket takes no more for now; it will become writable.
    pub blocked: bool,
}

/// A relay's end of a stream socket: see the module documentation. The socket is non-blocking.
#[derive(Debug)]
pub struct Socket(pub OwnedFd);

impl Socket {
    /// The descriptor to wait on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Reads once.
    ///
    /// # Errors
    /// `WouldBlock` if nothing has arrived; otherwise the link is broken.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<SocketRead> {
        loop {
            match rustix::io::read(&self.0, &mut *buffer) {
                Ok(bytes) => return Ok(SocketRead { bytes, more: bytes == buffer.len() }),
                Err(rustix::io::Errno::INTR) => (),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Writes as many of `slices` as one call takes, and as the socket has space for.
    ///
    /// # Errors
    /// If the link is broken.
    pub fn write<'a>(&self, slices: impl Iterator<Item = &'a [u8]>) -> io::Result<SocketWrite> {
        let mut vector = [IoSlice::new(&[]); SLICES_MAX];
        let (mut count, mut bytes) = (0, 0);
        for (place, slice) in vector.iter_mut().zip(slices) {
            *place = IoSlice::new(slice);
            count += 1;
            bytes += slice.len();
        }
        let taken = loop {
            let result = match count {
                0 => Ok(0),
                1 => rustix::io::write(&self.0, &vector[0]),
                _ => rustix::io::writev(&self.0, &vector[..count]),
            };
            match result {
                Ok(taken) => break taken,
                Err(rustix::io::Errno::INTR) => (),
                Err(rustix::io::Errno::AGAIN) => break 0,
                Err(error) => return Err(error.into()),
            }
        };
        Ok(SocketWrite { bytes: taken, blocked: taken < bytes })
    }
}
