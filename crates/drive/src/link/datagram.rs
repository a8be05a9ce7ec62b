//! Frames in datagrams: one UDP socket of a process, for all its peers.
//!
//! What enters: datagrams in pieces, gathered in one buffer, which is the only copy before the
//! kernel's and the place where a payload's checksum is computed; datagrams from the network, many
//! with one call. What leaves: runs of equal datagrams to one destination, each with one call
//! (segmentation offload); every datagram that arrived, one by one; notices about destinations.
//! Datagrams may be lost, duplicated and reordered in transit: the channel handles this, and it
//! decides how fast datagrams may leave.
//!
//! What may never happen: an error of one destination ends the socket or is attributed to another
//! destination; a datagram is fragmented in transit; anything is lost because the kernel has no
//! space at the moment. Notices are not trusted: they come from ICMP messages, which anybody can
//! forge, so they are a reason to probe, not a verdict.
//!
//! | module | does |
//! |---|---|
//! | `destination_notice` | the kernel's reports about destinations |
//! | `batch` | datagrams that wait to be sent |

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

/// The largest datagram in bytes: the IPv4 limit.
pub const DATAGRAM_BYTES_MAX: usize = 65_507;

/// The socket buffer size that is requested in each direction, in bytes: 30 ms at 1 Gbit/s, for a
/// process that computes instead of reading.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// The bytes of one slot of a receiving call: no packet is larger.
const SLOT_BYTES: usize = 64 << 10;
/// The slots of one receiving call. All of them stay in a second-level cache.
const SLOTS: usize = 8;
/// The most receiving calls before other work has its turn: at most 2 MiB, a millisecond's work.
const CALLS_MAX: usize = 4;

/// The lowest descriptor number of a socket, if such a number is free.
const LOWEST_FD: i32 = 512;

/// One side of all paths that begin at one local address. The socket uses IPv4 or IPv6, not both.
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

/// Whether many datagrams leave with one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Offload {
    On,
    /// A run was refused. The next datagram, sent alone, shows whether offload is the reason.
    Suspected,
    Off,
}

/// The result of [`DatagramLink::receive`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// The number of datagrams passed on.
    pub datagrams: usize,
    /// The socket had no more: its readiness will be announced again. Otherwise there may be more,
    /// which nothing announces, so the caller must receive again.
    pub drained: bool,
}

impl DatagramLink {
    /// Creates a socket at `local`, with port 0 for any port. The socket takes part in path MTU
    /// discovery: nothing is ever fragmented.
    ///
    /// # Errors
    /// If there is no such local address or no descriptor available.
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

    /// The address to which the socket is bound.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The size of the kernel's receive buffer, its own bookkeeping included: about twice the bytes
    /// that fit in.
    pub fn receive_buffer_bytes(&self) -> usize {
        self.receive_buffer_bytes
    }

    /// Whether many datagrams leave with one call. This may end when a network card turns out not
    /// to support it.
    pub fn has_offload(&self) -> bool {
        self.offload == Offload::On
    }

    /// Disables sending and receiving of many datagrams as one for good, for networks that do not
    /// support it.
    ///
    /// # Errors
    /// The errors of setsockopt(2).
    pub fn forbid_offload(&mut self) -> io::Result<()> {
        self.offload = Offload::Off;
        destination_notice::set_option(&self.socket, libc::SOL_UDP, libc::UDP_GRO, 0)
    }

    /// The datagrams of `size` bytes that leave with one call. As many are worth being pushed
    /// before [`Self::flush`].
    pub fn max_batch(&self, size: usize) -> usize {
        if self.has_offload() { batch::run_datagrams_max(size) } else { 1 }
    }

    /// Starts a run of datagrams to `to`, each of at most `size_max` bytes. Returns false if the
    /// buffer has no space for even one of them: the caller must call [`Self::flush`] first.
    ///
    /// # Panics
    /// If `size_max` exceeds [`DATAGRAM_BYTES_MAX`].
    pub fn begin(&mut self, to: SocketAddr, size_max: usize) -> bool {
        assert!(size_max <= DATAGRAM_BYTES_MAX, "no datagram has {size_max} bytes");
        self.batch.begin(to, size_max)
    }

    /// Adds a datagram: `front`, then `payload`. Returns false if the buffer had no space and
    /// nothing was done: the caller must call [`Self::flush`] first. Datagrams of one size, the
    /// last of them perhaps smaller, leave together; every change of size or destination costs
    /// another call.
    ///
    /// # Safety
    /// The payload's memory is valid during the call.
    ///
    /// # Panics
    /// If no run was started, or the datagram is larger than the run's `size_max`.
    #[inline]
    pub unsafe fn push(&mut self, front: &[u8], payload: &[Piece]) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.push_summed(Checksum::Off, front, payload) }
    }

    /// Adds a datagram like [`Self::push`], with the checksum of the payload between `front` and
    /// `payload`: four bytes, the lowest first; none with [`Checksum::Off`].
    ///
    /// # Safety
    /// The payload's memory is valid during the call.
    ///
    /// # Panics
    /// If no run was started, or the datagram is larger than the run's `size_max`.
    #[inline]
    pub unsafe fn push_summed(&mut self, sum: Checksum, front: &[u8], payload: &[Piece]) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.batch.push(sum, front, payload) }
    }

    /// Whether [`Self::flush`] has something to send.
    pub fn is_holding(&self) -> bool {
        self.batch.first().is_some()
    }

    /// Sends what was pushed. [`Sent::Busy`] means that the kernel has no space now; the rest is
    /// kept for the next call, when the socket has become writable. What cannot be sent is dropped,
    /// with a notice.
    ///
    /// # Errors
    /// If the socket itself cannot be used any more.
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

    /// Handles the refusal of the first `bytes` bytes of a run. Returns whether the next call is
    /// their second trial: the first error may stem from an ICMP message about another destination,
    /// which the kernel reports to the next caller.
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
            // A datagram alone was refused too, so offload was not the reason.
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

    /// Passes on what has arrived, in order of arrival, up to a bound. Reads notices too.
    ///
    /// # Errors
    /// If the socket itself cannot be used any more.
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
                // An empty datagram is no frame, and has no stride.
                for datagram in slot[..meta.len].chunks(meta.stride.max(1)) {
                    each(meta.addr, datagram);
                    received.datagrams += 1;
                }
            }
            // The call ended early because nothing was left, or at an error that came just now and
            // whose announcement is therefore still to come.
            if count < SLOTS {
                received.drained = true;
                break;
            }
        }
        Ok(received)
    }

    fn receive_once(&mut self, meta: &mut [RecvMeta; SLOTS]) -> io::Result<usize> {
        let mut slots = self.arrived.chunks_mut(SLOT_BYTES);
        // There are as many chunks as slots: see `bind`.
        let mut slots: [IoSliceMut<'_>; SLOTS] =
            std::array::from_fn(|_| IoSliceMut::new(slots.next().unwrap_or_default()));
        self.state.recv(UdpSockRef::from(&self.socket), &mut slots, meta)
    }

    /// The notices about destinations since the last call, the oldest first. [`Self::flush`] and
    /// [`Self::receive`] collect new notices.
    pub fn take_notices(&mut self) -> impl Iterator<Item = DestinationNotice> + '_ {
        self.notices.take()
    }
}

fn bind(local: SocketAddr) -> io::Result<UdpSocket> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::DGRAM, flags, None)?;
    // The time of the opening depends on the network, and a program sees which low descriptor
    // numbers are taken.
    let socket = rustix::io::fcntl_dupfd_cloexec(&socket, LOWEST_FD).unwrap_or(socket);
    if local.is_ipv6() {
        // Without this option, a peer would have two addresses.
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    rustix::net::bind(&socket, &local)?;
    Ok(socket.into())
}

/// Enables offloads, don't-fragment and notices, and disables options that nothing here uses.
fn tuned(socket: &UdpSocket) -> io::Result<UdpSocketState> {
    let state = UdpSocketState::new(UdpSockRef::from(socket))?;
    state.enable_transport_errors(UdpSockRef::from(socket))?;
    // The quinn-udp crate enables these options, which cost time for every datagram. Where an
    // option is unknown, there is nothing to disable.
    let _ = destination_notice::set_option(socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 0);
    let _ = destination_notice::set_option(socket, libc::IPPROTO_IP, libc::IP_PKTINFO, 0);
    let _ = destination_notice::set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 0);
    Ok(state)
}

/// Requests the buffer sizes. The kernel grants more than the system's limit only with privileges.
fn ask_for_buffers(socket: &UdpSocket) {
    if sockopt::set_socket_recv_buffer_size_force(socket, SOCKET_BUFFER_BYTES).is_err() {
        let _ = sockopt::set_socket_recv_buffer_size(socket, SOCKET_BUFFER_BYTES);
    }
    let _ = sockopt::set_socket_send_buffer_size(socket, SOCKET_BUFFER_BYTES);
}

#[cfg(test)]
mod tests;
