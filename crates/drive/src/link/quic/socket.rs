//! The UDP socket under QUIC: runs of datagrams out with one call, many in with one call.
//!
//! What enters: runs of equal datagrams, and from where to where; what leaves: datagrams as they came, with the local
//! address they came to, so that an answer leaves from there. A datagram that cannot be sent is dropped: QUIC sends
//! what it carried again, or finds that the way is of no use. What may never happen: trouble with one peer ends the
//! socket, or a datagram is fragmented on its way.

use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

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
/// After the kernel has refused to cut a run, each datagram goes alone for so long;
const ALONE_MIN: Duration = Duration::from_secs(1);
/// doubled while it refuses, up to this.
const ALONE_MAX: Duration = Duration::from_secs(64);
/// Places for one receiving call.
const SLOTS: usize = 8;

/// See the module head.
pub struct QuicSocket {
    socket: UdpSocket,
    state: UdpSocketState,
    offload: OffloadBackoff,
    slots: Box<[u8]>,
    /// What the kernel had no room for.
    waiting: Option<(Transmit, Vec<u8>)>,
}

/// When the kernel is asked again to cut runs, after it has refused one: that may have been the matter of one way, or of
/// one moment, and `quinn_udp` does not ask again by itself.
struct OffloadBackoff {
    /// It does at all, here.
    is_had: bool,
    /// How long after the next refusal.
    pause: Duration,
    due: Option<Instant>,
    asked: Option<Instant>,
}

/// Datagrams that came together, from one peer.
pub struct ReceivedBatch<'a> {
    pub from: SocketAddr,
    /// The local address they were sent to.
    pub to: Option<IpAddr>,
    pub ecn: Option<EcnCodepoint>,
    pub bytes: &'a [u8],
    /// Length of each of them; the last may be shorter.
    pub stride: usize,
}

impl ReceivedBatch<'_> {
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
        let offload = OffloadBackoff::new(&state);
        Ok(Self { socket, state, offload, slots, waiting: None })
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
    pub fn run_max(&mut self, size: usize, now: Instant) -> usize {
        if self.offload.is_to_be_asked_for(&self.state, now)
            && let Ok(state) = UdpSocketState::new(UdpSockRef::from(&self.socket))
        {
            self.state = state;
        }
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
            // A card or a kernel that cannot cut runs: each alone, for a while (see `OffloadBackoff`).
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
    pub fn receive(&mut self, mut each: impl FnMut(ReceivedBatch<'_>)) -> bool {
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

    /// More than the kernel cuts one run into.
    const TOO_MANY: usize = 2_000;

    /// How many datagrams have come, and by how many kernel's packets.
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

        // What has worked for long is judged afresh.
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
