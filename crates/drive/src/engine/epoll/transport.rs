//! What an engine's connection runs over. The choice is made when the link is made.

use std::io;
use std::os::fd::BorrowedFd;

use landbridge_proto::id::ClusterId;

use crate::link::near::Near;
use crate::link::quic::QuicLink;
use crate::link::socket::{Read, Socket, Written};
use crate::link::tls::TlsLink;

/// See the module head.
pub enum Transport {
    Plain(Socket),
    Tls(Box<TlsLink>),
    Quic(QuicLink),
    Near(Box<Near>),
}

impl Transport {
    /// The descriptor to wait on, if it is this connection's alone.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Transport::Plain(socket) => Some(socket.fd()),
            Transport::Tls(link) => Some(link.fd()),
            Transport::Quic(_) => None,
            Transport::Near(near) => Some(near.fd()),
        }
    }

    /// Moves the handshake on, if there is one below the hello. False: it is not over yet.
    ///
    /// # Errors
    /// If the peer breaks it off, or its certificate is refused.
    pub fn shake_hands(&mut self) -> io::Result<bool> {
        match self {
            Transport::Tls(link) => link.advance().map(|()| link.is_ready()),
            Transport::Quic(link) => link.advance().map(|()| link.is_ready()),
            Transport::Plain(_) | Transport::Near(_) => Ok(true),
        }
    }

    /// Which of `clusters` clusters the certificate is made for that the peer has shown.
    pub fn peer_cluster(&self, clusters: usize) -> Option<ClusterId> {
        match self {
            Transport::Tls(link) => link.peer_cluster(clusters),
            Transport::Quic(link) => link.peer_cluster(clusters),
            Transport::Plain(_) | Transport::Near(_) => None,
        }
    }

    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<Read> {
        match self {
            Transport::Plain(socket) => socket.read(buffer),
            Transport::Tls(link) => link.read(buffer),
            Transport::Quic(link) => link.read(buffer),
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
            Transport::Quic(link) => link.write(slices),
            Transport::Near(near) => near.write(slices, lengths),
        }
    }
}
