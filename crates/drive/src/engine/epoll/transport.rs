//! What an engine's connection runs over. The choice is made when the link is made.

use std::io;
use std::os::fd::BorrowedFd;

use crate::link::near::Near;
use crate::link::socket::{Read, Socket, Written};
use crate::link::tls::TlsLink;

/// See the module head.
pub enum Transport {
    Plain(Socket),
    Tls(Box<TlsLink>),
    Near(Box<Near>),
}

impl Transport {
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Transport::Plain(socket) => socket.fd(),
            Transport::Tls(link) => link.fd(),
            Transport::Near(near) => near.fd(),
        }
    }

    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<Read> {
        match self {
            Transport::Plain(socket) => socket.read(buffer),
            Transport::Tls(link) => link.read(buffer),
            Transport::Near(near) => near.read(buffer),
        }
    }

    /// Writes what there is room for. `lengths` are those of the frames in `slices`.
    pub fn write<'a>(
        &mut self,
        slices: impl Iterator<Item = &'a [u8]>,
        lengths: impl Iterator<Item = usize>,
    ) -> io::Result<Written> {
        match self {
            Transport::Plain(socket) => socket.write(slices),
            Transport::Tls(link) => link.write(slices),
            Transport::Near(near) => near.write(slices, lengths),
        }
    }
}
