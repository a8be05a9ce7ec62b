//! Frames in datagrams: one UDP socket of a process, for all its peers.
//!
//! What enters: datagrams in pieces, gathered in one buffer, which is the only copy before the kernel's and the place
//! where a payload's check is computed; datagrams from the network, many with one call. What leaves: runs of equal
//! datagrams to one destination, each with one call (segmentation offload); every datagram that arrived, one by one;
//! notices about destinations. Datagrams may be lost, doubled and reordered on the way: that is the channel's matter,
//! as is how fast they may leave.
//!
//! What may never happen: trouble with one destination ends the socket or is blamed on another; a datagram is
//! fragmented on its way; anything is lost because the kernel has no room now. Nothing that arrives is believed:
//! notices come from ICMP messages, which anybody can forge, so they are a reason to look, not a verdict.

mod batch;
mod destination_notice;

use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use rustix::net::sockopt;

use self::batch::{Batch, Run};
use self::destination_notice::DestinationNotices;
pub use self::destination_notice::{DestinationError, DestinationNotice};
use super::stream::{Piece, Sent};
use crate::checksum::Checksum;

/// Largest datagram: what IPv4 has room for.
pub const DATAGRAM_BYTES_MAX: usize = 65_507;

/// Asked for in each direction: 30 ms of 1 Gb/s, for a process that computes instead of reading.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// Room for what one receiving call may bring in one place: no packet is larger.
const SLOT_BYTES: usize = 64 << 10;
/// Places for one receiving call. All of them stay in a second-level cache.
const SLOTS: usize = 8;
/// Receiving calls before others have their turn: at most 2 MiB, a millisecond's work.
const CALLS_MAX: usize = 4;

/// Lowest number of a socket, if there is one.
const LOWEST_FD: i32 = 512;

/// One side of all paths that begin at one local address. It speaks IPv4 or IPv6, not both.
pub struct DatagramLink {
    socket: UdpSocket,
    state: UdpSocketState,
    local: SocketAddr,
    receive_buffer_bytes: usize,
    offload: Offload,
    batch: Batch,
    arrived: Box<[u8]>,
    notices: DestinationNotices,
    #[cfg(test)]
    refused: usize,
}

/// Whether many datagrams go out with one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Offload {
    On,
    /// A run was refused. The next datagram, sent alone, tells whether offload is to blame.
    Suspected,
    Off,
}

/// What [`DatagramLink::receive`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Datagrams handed on.
    pub datagrams: usize,
    /// The socket had no more: its readiness will be announced again. Otherwise there may be more, which nothing
    /// announces: receive again.
    pub drained: bool,
}

impl DatagramLink {
    /// A socket at `local`, port 0 for any. Takes part in path MTU discovery: nothing is ever fragmented.
    ///
    /// # Errors
    /// If there is no such local address or no descriptor to be had.
    pub fn bind(local: SocketAddr) -> io::Result<Self> {
        let socket = bind(local)?;
        let state = tuned(&socket)?;
        ask_for_buffers(&socket);
        let local = socket.local_addr()?;
        let receive_buffer_bytes = sockopt::socket_recv_buffer_size(&socket)?;
        let offload = if state.max_gso_segments() > 1 { Offload::On } else { Offload::Off };
        Ok(Self {
            socket,
            state,
            local,
            receive_buffer_bytes,
            offload,
            batch: Batch::default(),
            arrived: vec![0; SLOTS * SLOT_BYTES].into_boxed_slice(),
            notices: DestinationNotices::default(),
            #[cfg(test)]
            refused: 0,
        })
    }

    /// The socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Where it is bound.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// What the kernel gave for what has arrived and not been read, its own bookkeeping included: about twice the
    /// bytes that fit in.
    pub fn receive_buffer_bytes(&self) -> usize {
        self.receive_buffer_bytes
    }

    /// Whether many datagrams go out with one call. May end when a network card turns out not to be capable of it.
    pub fn has_offload(&self) -> bool {
        self.offload == Offload::On
    }

    /// Never again sends or receives many datagrams as one: for what does not stand it.
    ///
    /// # Errors
    /// As setsockopt(2).
    pub fn forbid_offload(&mut self) -> io::Result<()> {
        self.offload = Offload::Off;
        destination_notice::set_option(&self.socket, libc::SOL_UDP, libc::UDP_GRO, 0)
    }

    /// Datagrams of `size` bytes that go out with one call: worth being pushed before [`Self::flush`].
    pub fn max_batch(&self, size: usize) -> usize {
        if self.has_offload() { batch::run_datagrams_max(size) } else { 1 }
    }

    /// The next datagrams go to `to`, each of at most `size_max` bytes. False: there is no room for even one of them;
    /// [`Self::flush`] first.
    ///
    /// # Panics
    /// If `size_max` exceeds [`DATAGRAM_BYTES_MAX`].
    pub fn begin(&mut self, to: SocketAddr, size_max: usize) -> bool {
        assert!(size_max <= DATAGRAM_BYTES_MAX, "no datagram has {size_max} bytes");
        self.batch.begin(to, size_max)
    }

    /// Adds a datagram: `front`, then `payload`. False: there was no room and nothing was done; [`Self::flush`] first.
    /// Datagrams of one size, the last of them perhaps smaller, go out together; it costs a call whenever the
    /// size or the destination changes.
    ///
    /// # Safety
    /// The payload's memory is valid during the call.
    ///
    /// # Panics
    /// If nothing was begun, or the datagram is larger than was said then.
    #[inline]
    pub unsafe fn push(&mut self, front: &[u8], payload: &[Piece]) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.push_summed(Checksum::Off, front, payload) }
    }

    /// As [`Self::push`], with the sum of the payload between both: four bytes, the lowest first; none with
    /// [`Checksum::Off`].
    ///
    /// # Safety
    /// As [`Self::push`].
    ///
    /// # Panics
    /// As [`Self::push`].
    #[inline]
    pub unsafe fn push_summed(&mut self, sum: Checksum, front: &[u8], payload: &[Piece]) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.batch.push(sum, front, payload) }
    }

    /// Whether there is something for [`Self::flush`].
    pub fn is_holding(&self) -> bool {
        self.batch.first().is_some()
    }

    /// Sends what was pushed. [`Sent::Busy`]: the kernel has no room now; the rest is kept for the next call, when the
    /// socket has become writable. What cannot be sent is dropped, with a notice.
    ///
    /// # Errors
    /// If the socket itself is of no use any more.
    pub fn flush(&mut self) -> io::Result<Sent> {
        let mut is_again = false;
        while let Some(run) = self.batch.first() {
            let bytes = if self.has_offload() { run.len() } else { run.size.min(run.len()) };
            match self.transmit(&run, bytes) {
                Ok(()) => {
                    self.batch.advance(bytes);
                    is_again = false;
                    if self.offload == Offload::Suspected {
                        self.offload = Offload::Off;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Sent::Busy),
                Err(error) => is_again = self.handle_failure(&run, bytes, error, is_again)?,
            }
        }
        Ok(Sent::All)
    }

    fn transmit(&mut self, run: &Run, bytes: usize) -> io::Result<()> {
        #[cfg(test)]
        if self.refused > 0 {
            self.refused -= 1;
            return Err(ErrorKind::WouldBlock.into());
        }
        let transmit = Transmit {
            destination: run.to,
            ecn: None,
            contents: self.batch.bytes(run, bytes),
            segment_size: (bytes > run.size).then_some(run.size),
            src_ip: None,
        };
        self.state.try_send(UdpSockRef::from(&self.socket), &transmit)
    }

    /// The first `bytes` of a run were refused. Gives whether the next call is their second trial: the first error may
    /// be that of an ICMP message about another destination, which the kernel tells whoever calls next.
    #[cold]
    fn handle_failure(
        &mut self,
        run: &Run,
        bytes: usize,
        error: io::Error,
        is_again: bool,
    ) -> io::Result<bool> {
        if destination_notice::is_fatal(&error) {
            return Err(error);
        }
        let mtu = self.notices.collect(&self.socket)?;
        let is_halted = self.offload != Offload::Off && self.state.max_gso_segments() <= 1;
        if is_halted && bytes > run.size {
            self.offload = Offload::Suspected;
            return Ok(false);
        }
        if is_halted {
            // A datagram alone fares no better, so it was not offload.
            self.state = tuned(&self.socket)?;
            self.offload = Offload::On;
        } else if !is_again {
            return Ok(true);
        }
        let error = destination_notice::destination_error(&error, run.size.min(bytes), mtu);
        self.notices.add(run.to, error);
        let is_too_large = matches!(error, DestinationError::TooLarge { .. });
        let smaller_end = if is_too_large && bytes > run.size { bytes % run.size } else { 0 };
        let bytes = bytes - smaller_end;
        self.batch.advance(bytes);
        Ok(false)
    }

    /// Hands on what has arrived, in order of arrival, up to a bound. Looks for notices too.
    ///
    /// # Errors
    /// If the socket itself is of no use any more.
    pub fn receive(&mut self, mut each: impl FnMut(SocketAddr, &[u8])) -> io::Result<Received> {
        let mut received = Received::default();
        for _ in 0..CALLS_MAX {
            let mut meta = [RecvMeta::default(); SLOTS];
            let count = match self.receive_once(&mut meta) {
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    received.drained = true;
                    break;
                }
                Err(error) if destination_notice::is_fatal(&error) => return Err(error),
                Err(_) => {
                    self.notices.collect(&self.socket)?;
                    continue;
                }
            };
            for (slot, meta) in self.arrived.chunks(SLOT_BYTES).zip(&meta[..count]) {
                // An empty datagram is no frame of ours, and has no stride.
                for datagram in slot[..meta.len].chunks(meta.stride.max(1)) {
                    each(meta.addr, datagram);
                    received.datagrams += 1;
                }
            }
            // The call ended early because nothing was left, or at an error that came just now and whose
            // announcement is therefore still to come.
            if count < SLOTS {
                received.drained = true;
                break;
            }
        }
        Ok(received)
    }

    fn receive_once(&mut self, meta: &mut [RecvMeta; SLOTS]) -> io::Result<usize> {
        let mut slots = self.arrived.chunks_mut(SLOT_BYTES);
        // As many chunks as there are slots: see `bind`.
        let mut slots: [IoSliceMut<'_>; SLOTS] =
            std::array::from_fn(|_| IoSliceMut::new(slots.next().unwrap_or_default()));
        self.state.recv(UdpSockRef::from(&self.socket), &mut slots, meta)
    }

    /// What was learned about destinations since the last call, the oldest first. New notices come up in
    /// [`Self::flush`] and [`Self::receive`].
    pub fn take_notices(&mut self) -> impl Iterator<Item = DestinationNotice> + '_ {
        self.notices.take()
    }
}

fn bind(local: SocketAddr) -> io::Result<UdpSocket> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::DGRAM, flags, None)?;
    // When it is opened depends on the network, and a program sees which low numbers are taken.
    let socket = rustix::io::fcntl_dupfd_cloexec(&socket, LOWEST_FD).unwrap_or(socket);
    if local.is_ipv6() {
        // Else a peer would have two addresses.
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    rustix::net::bind(&socket, &local)?;
    Ok(socket.into())
}

/// Offloads, don't-fragment and notices are on; what nobody looks at is off.
fn tuned(socket: &UdpSocket) -> io::Result<UdpSocketState> {
    let state = UdpSocketState::new(UdpSockRef::from(socket))?;
    state.enable_transport_errors(UdpSockRef::from(socket))?;
    // Asked for by the crate, at a price for every datagram. Where an option is unknown there is nothing to turn off.
    let _ = destination_notice::set_option(socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 0);
    let _ = destination_notice::set_option(socket, libc::IPPROTO_IP, libc::IP_PKTINFO, 0);
    let _ = destination_notice::set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 0);
    Ok(state)
}

/// As much as there is to be had: more than the system's limit only with privileges.
fn ask_for_buffers(socket: &UdpSocket) {
    if sockopt::set_socket_recv_buffer_size_force(socket, SOCKET_BUFFER_BYTES).is_err() {
        let _ = sockopt::set_socket_recv_buffer_size(socket, SOCKET_BUFFER_BYTES);
    }
    let _ = sockopt::set_socket_send_buffer_size(socket, SOCKET_BUFFER_BYTES);
}

#[cfg(test)]
mod tests;
