//! The UDP socket under QUIC: runs of datagrams out with one call, many in with one call.
//!
//! What enters: runs of equal datagrams, with their addresses. What leaves: datagrams as they
//! arrived, with their local address, so that an answer leaves from this address. A datagram that
//! cannot be sent is dropped: QUIC retransmits its contents, or finds that the path does not work.
//! What may never happen: an error of one peer ends the socket, or a datagram is fragmented in
//! transit.

use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use quinn_proto::{EcnCodepoint, Transmit};
use quinn_udp::{RecvMeta, UdpSockRef, UdpSocketState};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};

/// The socket buffer size that is requested in each direction, in bytes: what 1 Gbit/s brings while
/// a relay is busy for 60 ms. What does not fit is lost and retransmitted.
const SOCKET_BUFFER_BYTES: usize = 8 << 20;
/// The bytes of one slot of a receiving call: no packet is larger.
const SLOT_BYTES: usize = 64 << 10;
/// The most bytes of a run: datagrams that leave with one call are one packet to the kernel.
const RUN_BYTES_MAX: usize = 65_000;
/// After the kernel has refused to cut a run, each datagram leaves alone for this long.
const ALONE_MIN: Duration = Duration::from_secs(1);
/// The time without runs doubles with each refusal, up to this.
const ALONE_MAX: Duration = Duration::from_secs(64);
/// The slots of one receiving call.
const SLOTS: usize = 8;

/// The UDP socket under QUIC: see the module documentation.
pub struct QuicSocket {
    socket: UdpSocket,
    state: UdpSocketState,
    offload: OffloadBackoff,
    slots: Box<[u8]>,
    /// The run for which the kernel had no space.
    waiting: Option<(Transmit, Vec<u8>)>,
}

/// When segmentation offload is tried again after the kernel has refused to cut a run. The reason
/// may have been one path, or a moment, and `quinn_udp` does not try again by itself.
struct OffloadBackoff {
    /// Offload is available here at all.
    is_had: bool,
    /// The pause after the next refusal.
    pause: Duration,
    due: Option<Instant>,
    asked: Option<Instant>,
}

/// Datagrams that arrived together from one peer.
pub struct ReceivedBatch<'a> {
    pub from: SocketAddr,
    /// The local address to which they were sent.
    pub to: Option<IpAddr>,
    pub ecn: Option<EcnCodepoint>,
    pub bytes: &'a [u8],
    /// The length of each datagram in bytes; the last may be shorter.
    pub stride: usize,
}

impl ReceivedBatch<'_> {
    /// The datagrams one by one. They share one allocation, except those of handshakes (RFC 9000,
    /// section 17.2): the datagram of an unauthenticated peer may be kept for a while, and must not
    /// keep the memory of others allocated.
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
    /// Creates a socket at `local`, with port 0 for any port. An IPv6 socket serves IPv4 too where
    /// the system allows it, as the listening socket for TCP does.
    ///
    /// # Errors
    /// If the address is in use or does not exist.
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
        let offload = OffloadBackoff::new(&state);
        Ok(Self { socket, state, offload, slots, waiting: None })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The local address of the socket.
    ///
    /// # Errors
    /// The errors of getsockname(2).
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Whether datagrams are never fragmented, so that path MTU discovery works.
    pub fn finds_mtu(&self) -> bool {
        !self.state.may_fragment()
    }

    /// The datagrams of `size` bytes that may leave with one call.
    pub fn run_max(&mut self, size: usize, now: Instant) -> usize {
        if self.offload.is_to_be_asked_for(&self.state, now)
            && let Ok(state) = UdpSocketState::new(UdpSockRef::from(&self.socket))
        {
            self.state = state;
        }
        self.state.max_gso_segments().min(RUN_BYTES_MAX / size.max(1)).max(1)
    }

    /// Whether the kernel has no space: nothing more may be sent before [`Self::resume`] returns
    /// true.
    pub fn is_blocked(&self) -> bool {
        self.waiting.is_some()
    }

    /// Sends the waiting run, if any. Returns false if the kernel still has no space.
    pub fn resume(&mut self) -> bool {
        if let Some((transmit, bytes)) = self.waiting.take() {
            self.send(&transmit, &bytes);
        }
        !self.is_blocked()
    }

    /// Sends one run of datagrams. If the kernel has no space, the run waits.
    ///
    /// # Panics
    /// If another run waits already.
    pub fn send(&mut self, transmit: &Transmit, bytes: &[u8]) {
        assert!(self.waiting.is_none(), "datagrams overtake those that wait");
        match self.try_send(transmit, bytes, transmit.segment_size) {
            Ok(()) => (),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.waiting = Some((clone(transmit), bytes.into()));
            }
            // A network card or a kernel cannot cut runs: each datagram leaves alone, for a while
            // (see `OffloadBackoff`).
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

    /// Receives once. Returns false if there was nothing more.
    pub fn receive(&mut self, mut each: impl FnMut(ReceivedBatch<'_>)) -> bool {
        let mut meta = [RecvMeta::default(); SLOTS];
        let mut slots = self.slots.chunks_mut(SLOT_BYTES);
        // There are as many chunks as slots: see `bind`.
        let mut slots: [IoSliceMut<'_>; SLOTS] =
            std::array::from_fn(|_| IoSliceMut::new(slots.next().unwrap_or_default()));
        let Ok(count) = self.state.recv(UdpSockRef::from(&self.socket), &mut slots, &mut meta)
        else {
            return false;
        };
        for (slot, meta) in self.slots.chunks(SLOT_BYTES).zip(&meta[..count]) {
            each(ReceivedBatch {
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

impl OffloadBackoff {
    fn new(state: &UdpSocketState) -> Self {
        let is_had = state.max_gso_segments() > 1;
        Self { is_had, pause: ALONE_MIN, due: None, asked: None }
    }

    fn is_to_be_asked_for(&mut self, state: &UdpSocketState, now: Instant) -> bool {
        if !self.is_had || state.max_gso_segments() > 1 {
            return false;
        }
        let Some(due) = self.due else {
            let has_worked = |asked: Instant| now.saturating_duration_since(asked) > ALONE_MAX;
            if self.asked.is_some_and(has_worked) {
                self.pause = ALONE_MIN;
            }
            self.due = Some(now + self.pause);
            self.pause = (2 * self.pause).min(ALONE_MAX);
            return false;
        };
        let is_due = now >= due;
        if is_due {
            (self.due, self.asked) = (None, Some(now));
        }
        is_due
    }
}

fn clone(transmit: &Transmit) -> Transmit {
    Transmit { ..*transmit }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More datagrams than the kernel cuts one run into.
    const TOO_MANY: usize = 2_000;

    /// The number of datagrams that have arrived, and of the kernel's packets that carried them.
    fn arrivals(socket: &mut QuicSocket) -> (usize, usize) {
        let (mut datagrams, mut batches) = (0, 0);
        let start = Instant::now();
        while batches == 0 && start.elapsed() < Duration::from_secs(10) {
            while socket.receive(|batch| {
                datagrams += batch.datagrams().count();
                batches += 1;
            }) {}
        }
        (datagrams, batches)
    }

    #[test]
    fn one_refusal_of_the_kernel_costs_runs_for_a_while_only() {
        let any = "127.0.0.1:0".parse().unwrap();
        let (mut near, mut far) = (QuicSocket::bind(any).unwrap(), QuicSocket::bind(any).unwrap());
        let mut now = Instant::now();
        let run_max = near.run_max(100, now);
        if run_max == 1 {
            println!("skipped: this kernel cuts no runs");
            return;
        }
        let destination = far.local_addr().unwrap();
        let transmit = |size, segment| Transmit {
            destination,
            ecn: None,
            size,
            segment_size: Some(segment),
            src_ip: None,
        };
        let mut pause = ALONE_MIN;
        for _ in 0..10 {
            near.send(&transmit(TOO_MANY, 1), &[1; TOO_MANY]);
            assert!(arrivals(&mut far).0 > 0, "each has gone alone");
            while arrivals_now(&mut far) {}
            assert_eq!(near.run_max(100, now), 1);
            assert_eq!(near.run_max(100, now + pause - Duration::from_millis(1)), 1);
            now += pause;
            assert_eq!(near.run_max(100, now), run_max, "after {pause:?}");
            pause = (2 * pause).min(ALONE_MAX);
        }
        near.send(&transmit(1_000, 100), &[2; 1_000]);
        let (datagrams, batches) = arrivals(&mut far);
        assert_eq!((datagrams, batches), (10, 1), "as one run");

        // The pause starts from its minimum after offload has worked for long.
        now += ALONE_MAX + Duration::from_secs(1);
        near.send(&transmit(TOO_MANY, 1), &[1; TOO_MANY]);
        assert_eq!(near.run_max(100, now), 1);
        assert_eq!(near.run_max(100, now + ALONE_MIN), run_max);
    }

    fn arrivals_now(socket: &mut QuicSocket) -> bool {
        let mut is_any = false;
        while socket.receive(|_| is_any = true) {}
        is_any
    }
}
