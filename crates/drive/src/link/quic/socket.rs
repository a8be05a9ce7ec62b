//! The UDP socket under QUIC: runs of datagrams out with one call, many in with one call.
//!
//! What enters: runs of equal datagrams, and from where to where; what leaves: datagrams as they came, with the local
//! address they came to, so that an answer leaves from there. A datagram that cannot be sent is dropped: QUIC sends
//! what it carried again, or finds that the way is of no use. What may never happen: trouble with one peer ends the
//! socket, or a datagram is fragmented on its way.

use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use bytes::BytesMut;
use quinn_proto::{EcnCodepoint, Transmit};
use quinn_udp::{RecvMeta, UdpSockRef, UdpSocketState};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};

/// Asked for in each direction: what 1 Gb/s brings while a relay is busy for 60 ms. What does not fit is sent again.
const SOCKET_BUFFER_BYTES: usize = 8 << 20;
/// Room for what one receiving call may bring in one place: no packet is larger.
const SLOT_BYTES: usize = 64 << 10;
/// Datagrams that go out with one call are one packet to the kernel.
const RUN_BYTES_MAX: usize = 65_000;
/// Places for one receiving call.
const SLOTS: usize = 8;

/// See the module head.
pub struct QuicSocket {
    socket: UdpSocket,
    state: UdpSocketState,
    slots: Box<[u8]>,
    /// What the kernel had no room for.
    waiting: Option<(Transmit, Vec<u8>)>,
}

/// Datagrams that came together, from one peer.
pub struct Batch<'a> {
    pub from: SocketAddr,
    /// The local address they were sent to.
    pub to: Option<IpAddr>,
    pub ecn: Option<EcnCodepoint>,
    pub bytes: &'a [u8],
    /// Length of each of them; the last may be shorter.
    pub stride: usize,
}

impl Batch<'_> {
    /// Each datagram by itself. They share one allocation, but those of handshakes (RFC 9000, 17.2): what a stranger sends
    /// may be kept for a while, and must not keep more than itself.
    pub fn datagrams(&self) -> impl Iterator<Item = BytesMut> + use<> {
        let mut rest = BytesMut::from(self.bytes);
        let stride = self.stride.max(1);
        std::iter::from_fn(move || match rest.len() {
            0 => None,
            left => {
                let part = rest.split_to(stride.min(left));
                let is_handshake = part[0] & 0x80 != 0;
                Some(if is_handshake { BytesMut::from(&part[..]) } else { part })
            }
        })
    }
}

impl QuicSocket {
    /// A socket at `local`, port 0 for any. One for IPv6 speaks IPv4 too, where the system allows it: as the
    /// listening socket for TCP does.
    ///
    /// # Errors
    /// If the address is taken, or there is no such.
    pub fn bind(local: SocketAddr) -> io::Result<Self> {
        let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::DGRAM, flags, None)?;
        rustix::net::bind(&socket, &local)?;
        if sockopt::set_socket_recv_buffer_size_force(&socket, SOCKET_BUFFER_BYTES).is_err() {
            let _ = sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BUFFER_BYTES);
        }
        let _ = sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER_BYTES);
        let socket = UdpSocket::from(socket);
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        let slots = vec![0; SLOTS * SLOT_BYTES].into_boxed_slice();
        Ok(Self { socket, state, slots, waiting: None })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// # Errors
    /// As getsockname(2).
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Whether datagrams are never fragmented, so that their size may be searched for.
    pub fn finds_mtu(&self) -> bool {
        !self.state.may_fragment()
    }

    /// Datagrams of `size` bytes that may go out with one call.
    pub fn run_max(&self, size: usize) -> usize {
        self.state.max_gso_segments().min(RUN_BYTES_MAX / size.max(1)).max(1)
    }

    /// Whether the kernel has no room: nothing more may be sent before [`Self::resume`] says so.
    pub fn is_blocked(&self) -> bool {
        self.waiting.is_some()
    }

    /// Sends what waits, if anything. False: there is still no room.
    pub fn resume(&mut self) -> bool {
        if let Some((transmit, bytes)) = self.waiting.take() {
            self.send(&transmit, &bytes);
        }
        !self.is_blocked()
    }

    /// Sends one run of datagrams. If the kernel has no room they wait.
    ///
    /// # Panics
    /// If others wait already.
    pub fn send(&mut self, transmit: &Transmit, bytes: &[u8]) {
        assert!(self.waiting.is_none(), "datagrams overtake those that wait");
        match self.try_send(transmit, bytes, transmit.segment_size) {
            Ok(()) => (),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.waiting = Some((clone(transmit), bytes.into()));
            }
            // A card or a kernel that cannot cut runs: each alone, from now on (see `run_max`).
            Err(_) => {
                let size = transmit.segment_size.unwrap_or(bytes.len());
                for datagram in bytes.chunks(size.max(1)).filter(|_| size < bytes.len()) {
                    let _ = self.try_send(transmit, datagram, None);
                }
            }
        }
    }

    fn try_send(
        &self,
        transmit: &Transmit,
        bytes: &[u8],
        segment_size: Option<usize>,
    ) -> io::Result<()> {
        let transmit = quinn_udp::Transmit {
            destination: transmit.destination,
            ecn: transmit.ecn.and_then(|ecn| quinn_udp::EcnCodepoint::from_bits(ecn as u8)),
            contents: bytes,
            segment_size,
            src_ip: transmit.src_ip,
        };
        self.state.try_send(UdpSockRef::from(&self.socket), &transmit)
    }

    /// One receiving call. False: there was nothing more.
    pub fn receive(&mut self, mut each: impl FnMut(Batch<'_>)) -> bool {
        let mut meta = [RecvMeta::default(); SLOTS];
        let mut slots = self.slots.chunks_mut(SLOT_BYTES);
        // As many chunks as there are slots: see `bind`.
        let mut slots: [IoSliceMut<'_>; SLOTS] =
            std::array::from_fn(|_| IoSliceMut::new(slots.next().unwrap_or_default()));
        let Ok(count) = self.state.recv(UdpSockRef::from(&self.socket), &mut slots, &mut meta)
        else {
            return false;
        };
        for (slot, meta) in self.slots.chunks(SLOT_BYTES).zip(&meta[..count]) {
            each(Batch {
                from: meta.addr,
                to: meta.dst_ip,
                ecn: meta.ecn.and_then(|ecn| EcnCodepoint::from_bits(ecn as u8)),
                bytes: &slot[..meta.len],
                stride: meta.stride,
            });
        }
        count == SLOTS
    }
}

fn clone(transmit: &Transmit) -> Transmit {
    Transmit { ..*transmit }
}
