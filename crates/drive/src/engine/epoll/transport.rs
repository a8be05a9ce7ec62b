//! The transport of an engine's connection, chosen when the connection is made.

use std::io;
use std::os::fd::BorrowedFd;

use landbridge_proto::id::ClusterId;

use crate::link::quic::QuicLink;
use crate::link::relay_shm::RelayShmLink;
use crate::link::socket::{Socket, SocketRead, SocketWrite};
use crate::link::tls::TlsLink;

/// The transport of a connection: see the module documentation.
pub enum Transport {
    Plain(Socket),
    Tls(Box<TlsLink>),
    Quic(QuicLink),
    Shm(Box<RelayShmLink>),
}

impl Transport {
    /// The descriptor to wait on, if only this connection uses it.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Transport::Plain(socket) => Some(socket.fd()),
            Transport::Tls(link) => Some(link.fd()),
            Transport::Quic(_) => None,
            Transport::Shm(shm) => Some(shm.fd()),
        }
    }

    /// Advances the handshake, if there is one below the hello. Returns false if the handshake is
    /// not complete.
    ///
    /// # Errors
    /// If the peer ends the handshake, or if its certificate is refused.
    pub fn advance_handshake(&mut self) -> io::Result<bool> {
        match self {
            Transport::Tls(link) => link.advance().map(|()| link.is_ready()),
            Transport::Quic(link) => link.advance().map(|()| link.is_ready()),
            Transport::Plain(_) | Transport::Shm(_) => Ok(true),
        }
    }

    /// The cluster for which the peer's certificate was made, of `clusters` clusters.
    pub fn peer_cluster(&self, clusters: usize) -> Option<ClusterId> {
        match self {
            Transport::Tls(link) => link.peer_cluster(clusters),
            Transport::Quic(link) => link.peer_cluster(clusters),
            Transport::Plain(_) | Transport::Shm(_) => None,
        }
    }

    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<SocketRead> {
        match self {
            Transport::Plain(socket) => socket.read(buffer),
            Transport::Tls(link) => link.read(buffer),
            Transport::Quic(link) => link.read(buffer),
            Transport::Shm(shm) => shm.read(buffer),
        }
    }

    /// Writes what the transport has space for. `lengths` are the lengths of the frames in
    /// `slices`.
    pub fn write<'a>(
        &mut self,
        slices: impl Iterator<Item = &'a [u8]>,
        lengths: impl Iterator<Item = usize>,
    ) -> io::Result<SocketWrite> {
        match self {
            Transport::Plain(socket) => socket.write(slices),
            Transport::Tls(link) => link.write(slices),
            Transport::Quic(link) => link.write(slices),
            Transport::Shm(shm) => shm.write(slices, lengths),
        }
    }
}
