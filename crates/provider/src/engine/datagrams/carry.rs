//! Sends and receives frames in datagrams.
//!
//! Sending: the engine collects as many frames as the protocol has in one buffer, and computes the
//! checksum of each payload while copying the payload there. One system call sends each run of
//! datagrams of equal size. Receiving: a datagram holds a whole frame, which is delivered at once.
//! What may never happen: the engine reads memory of an operation after the operation's frame was
//! handed over.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use landbridge_drive::checksum::Checksum;
use landbridge_drive::link::datagram::DatagramLink;
use landbridge_drive::link::stream::{Piece, Sent};
use landbridge_proto::endpoint::{Endpoint, OutgoingFrame, Peer};
use landbridge_proto::path::time::Time;
use landbridge_proto::wire::datagram::{self, DatagramBody, PROBE_BYTES, TOKEN_BYTES};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header};

use rustix::event::epoll::EventFlags;

use super::super::carrier::Carrier;
use super::super::data_path::DataPath;
use super::super::event_token::{EventToken, watch};
use super::super::integrity;
use super::super::link_table::LinkTable;
use super::super::links::Link;
use super::super::memory::Bytes;
use super::super::udp_path::DatagramTarget;
use super::Datagrams;
use crate::log;

/// Buffer size for everything in front of a frame's payload.
const FRONT_BYTES_MAX: usize = 256;

/// Maximum number of payload pieces, including the part of a payload in the frame's front.
const PIECES_MAX: usize = 9;

impl Datagrams {
    /// Queues `peer` until the socket has free space.
    #[cold]
    fn await_room(&mut self, epoll: &OwnedFd, socket: usize, peer: Peer) -> io::Result<()> {
        let entry = &mut self.sockets[socket];
        if !entry.blocked.contains(&peer) {
            entry.blocked.push(peer);
        }
        self.watch_socket(epoll, socket, EventFlags::IN | EventFlags::OUT)
    }

    fn watch_socket(&self, epoll: &OwnedFd, socket: usize, interest: EventFlags) -> io::Result<()> {
        let link = self.sockets.get(socket).and_then(|entry| entry.link.as_ref());
        link.map_or(Ok(()), |link| watch(epoll, link.fd(), EventToken::Datagrams(socket), interest))
    }

    /// Sends queued datagrams of a socket that has free space again, and marks the peers busy that
    /// have waited for the space. Returns false if datagrams are still queued.
    #[cold]
    fn handle_room(&mut self, core: &mut Endpoint<Bytes>, epoll: &OwnedFd, socket: usize) -> bool {
        let Some(entry) = self.sockets.get_mut(socket) else {
            return false;
        };
        let Some(link) = &mut entry.link else {
            return false;
        };
        match link.flush() {
            Ok(Sent::All) => (),
            Ok(_) => return false,
            Err(error) => {
                log!(Warn, "a UDP socket fails: {error}");
                return false;
            }
        }
        for peer in std::mem::take(&mut entry.blocked) {
            core.channel_mut(peer).mark_busy();
        }
        // If epoll cannot change the interest, it reports the free space again.
        let _ = self.watch_socket(epoll, socket, EventFlags::IN);
        true
    }

    /// The UDP path by which a datagram has arrived.
    #[inline]
    fn udp_path_from(
        &mut self,
        links: &LinkTable,
        socket: usize,
        from: SocketAddr,
        bytes: &[u8],
    ) -> Option<usize> {
        let token = datagram::token(bytes)?;
        if let Some((known, at, id)) = self.last
            && (known, at) == (token, from)
        {
            return Some(id);
        }
        let mut advertised =
            self.tokens.get_mut(&token).filter(|advertised| advertised.socket == socket);
        if let Some(advertised) = &mut advertised {
            advertised.is_known = true;
        }
        let is_it = |id: &&usize| match links.get(**id).and_then(Option::as_ref) {
            Some(link) => {
                matches!(&link.carrier, Carrier::Datagram(udp_path) if udp_path.to == from)
            }
            None => false,
        };
        let found =
            advertised.and_then(|advertised| advertised.udp_paths.iter().find(is_it).copied());
        match found {
            Some(id) => self.last = Some((token, from, id)),
            None => self.unknown += 1,
        }
        found
    }
}

impl DataPath {
    /// Sends queued datagrams of a socket that has free space again. Returns false if datagrams are
    /// still queued.
    pub(in super::super) fn handle_socket_room(&mut self, socket: usize) -> bool {
        let Some(datagrams) = &mut self.datagrams else {
            return false;
        };
        let has_room = datagrams.handle_room(&mut self.core, &self.own.epoll, socket);
        if has_room {
            self.handle_notices(socket);
        }
        has_room
    }

    /// Receives what has arrived at a socket; returns the number of datagrams.
    pub(in super::super) fn read_datagrams(&mut self, socket: usize) -> usize {
        let Some(entry) = self.datagrams.as_mut().and_then(|all| all.sockets.get_mut(socket))
        else {
            return 0;
        };
        let Some(mut link) = entry.link.take() else {
            return 0;
        };
        self.core.set_time(Time(self.clock.nanos()));
        let received = link.receive(|from, bytes| self.take_datagram(socket, from, bytes));
        self.datagrams().sockets[socket].link = Some(link);
        for (id, has_sign) in std::mem::take(&mut self.datagrams().touched) {
            self.end_batch(id, has_sign);
        }
        for (id, probe) in std::mem::take(&mut self.datagrams().answers) {
            if let Some((_, udp_path)) = self.links.udp_path(id) {
                let target = udp_path.target();
                self.datagrams().send_probe(target, probe, true);
                self.handle_notices(target.socket);
            }
        }
        self.handle_notices(socket);
        match received {
            Ok(received) => received.datagrams,
            Err(error) => {
                log!(Warn, "a UDP socket fails: {error}");
                0
            }
        }
    }

    /// Sends the frames for `peer` by the UDP path of this link.
    pub(in super::super) fn transmit_datagrams(
        &mut self,
        link: &mut Link,
        peer: Peer,
    ) -> io::Result<()> {
        let Carrier::Datagram(udp_path) = &mut link.carrier else {
            return Ok(());
        };
        if !udp_path.is_open() {
            return Ok(());
        }
        let target = udp_path.target();
        let Some(mut socket) = self.datagrams().sockets[target.socket].link.take() else {
            return Ok(());
        };
        let now = Time(self.clock.nanos());
        self.core.set_time(now);
        let outcome = self.gather(&mut socket, target, link, peer);
        self.datagrams().sockets[target.socket].link = Some(socket);
        if let (true, Carrier::Datagram(udp_path)) = (link.health.has_sent, &mut link.carrier) {
            udp_path.monitor.note_sent(now);
            link.health.has_sent = false;
        }
        // The engine handles notices when the link is back in `links`, since a notice may concern
        // it.
        match outcome? {
            Sent::All => Ok(()),
            _ => {
                let datagrams = self.datagrams.as_mut().expect("datagrams are in use");
                datagrams.await_room(&self.own.epoll, target.socket, peer)
            }
        }
    }

    /// Moves frames into the socket until no frames are left, or the socket is full.
    fn gather(
        &mut self,
        socket: &mut DatagramLink,
        DatagramTarget { to, token, .. }: DatagramTarget,
        link: &mut Link,
        peer: Peer,
    ) -> io::Result<Sent> {
        let path = link.path;
        while let Some(mut frame) = self.next_frame(peer, path) {
            let pieces = frame.payload.map(|(memory, at, len)| memory.range(at, len));
            let pieces = pieces.as_ref().map_or(&[][..], |pieces| pieces.as_slice());
            // SAFETY: the memory is valid until `transmitted` reports that the frame has left.
            if !unsafe { push_frame(socket, to, token, link.sum, &mut frame, pieces) } {
                if socket.flush()? != Sent::All {
                    return Ok(Sent::Busy);
                }
                continue;
            }
            // Confirmations count as sent, too: a peer that only confirms would otherwise never
            // notice that its UDP path has failed.
            link.health.has_sent = true;
            let copy = match frame.payload {
                // SAFETY: the memory is valid until `transmitted` reports that the frame has left.
                Some((memory, at, len)) if frame.wants_copy => {
                    Some(unsafe { memory.keep(at, len, &mut Checksum::Off.start()) })
                }
                _ => None,
            };
            self.core.transmitted(peer, path, true, copy);
            self.drain_actions();
        }
        socket.flush()
    }

    /// Ends the processing of one receiving call for UDP path `id`. `has_sign`: more arrived than
    /// the peer's own probes, which the peer sends whether or not it receives anything.
    fn end_batch(&mut self, id: usize, has_sign: bool) {
        let now = Time(self.clock.nanos());
        let Some(link) = self.links.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        link.last_received = now;
        let (Some(peer), path) = (link.peer, link.path) else {
            return;
        };
        let Carrier::Datagram(udp_path) = &mut link.carrier else {
            return;
        };
        let ends_doubt = has_sign && udp_path.monitor.handle_received();
        self.core.channel_mut(peer).end_batch(path);
        if ends_doubt {
            self.paths().restripe(peer);
        }
        self.drain_actions();
        self.send_probes(id);
    }

    #[inline]
    fn take_datagram(&mut self, socket: usize, from: SocketAddr, bytes: &[u8]) {
        let Some(datagrams) = &mut self.datagrams else {
            return;
        };
        let Some(id) = datagrams.udp_path_from(&self.links, socket, from, bytes) else {
            return;
        };
        let inside = datagram::parse(bytes);
        let is_sign = !matches!(inside, Ok(DatagramBody::Probe(_)));
        match datagrams.touched.iter_mut().rfind(|(touched, _)| *touched == id) {
            Some((_, has_sign)) => *has_sign |= is_sign,
            None => datagrams.touched.push((id, is_sign)),
        }
        match inside {
            Ok(DatagramBody::Frame(frame)) => self.take_framed(id, frame),
            Ok(DatagramBody::Probe(probe)) => {
                datagrams.answers.push((id, probe));
                let now = Time(self.clock.nanos());
                if let Some((_, udp_path)) = self.links.udp_path(id) {
                    udp_path.monitor.handle_peer_probe(now);
                }
            }
            Ok(DatagramBody::ProbeReply(probe)) => {
                let now = Time(self.clock.nanos());
                if let Some((_, udp_path)) = self.links.udp_path(id) {
                    let change = udp_path.monitor.handle_answer(now, probe);
                    self.handle_change(id, change);
                }
            }
            Err(_) => datagrams.unknown += 1,
        }
    }

    /// Delivers a frame that has arrived by UDP path `id`. A corrupt frame counts as lost.
    #[inline]
    fn take_framed(&mut self, id: usize, frame: &[u8]) {
        let Some(link) = self.links[id].as_ref() else {
            return;
        };
        let (peer, path, sum) = (link.peer, link.path, link.sum);
        let is_whole = |header: Header| HEADER_BYTES + header.length as usize == frame.len();
        let taken = match Header::parse(frame) {
            Ok(header) if is_whole(header) => self.take_frame(peer, path, sum, frame),
            _ => Err(integrity::corrupt("a datagram that is no frame")),
        };
        let Err(error) = taken else {
            return;
        };
        if error.kind() != io::ErrorKind::InvalidData {
            self.datagrams().corrupt += 1;
            return peer.into_iter().for_each(|peer| self.peers[peer].count_corrupt(path));
        }
        if let Some(peer) = peer {
            log!(Warn, "{}: {error}", self.core.address(peer));
            self.pending.fail(peer, libc::ECONNRESET);
        }
    }
}

/// Adds a frame to what `socket` will send, and fills in its checksums. Returns false if the socket
/// is full.
///
/// # Safety
/// The payload's memory is valid.
#[inline]
unsafe fn push_frame(
    socket: &mut DatagramLink,
    to: SocketAddr,
    token: u64,
    sum: Checksum,
    frame: &mut OutgoingFrame<'_, Bytes>,
    payload: &[Piece],
) -> bool {
    let payload_bytes: usize = payload.iter().map(|piece| piece.len).sum();
    if !socket.begin(to, TOKEN_BYTES + frame.front().len() + payload_bytes) {
        return false;
    }
    let mut front = [0; FRONT_BYTES_MAX];
    front[..TOKEN_BYTES].copy_from_slice(&token.to_le_bytes());
    let checksum_at = frame.checksum_at().filter(|_| sum != Checksum::Off);
    integrity::fill_in_front(sum, frame);
    let whole = frame.front();
    let Some(at) = checksum_at else {
        let end = TOKEN_BYTES + whole.len();
        front[TOKEN_BYTES..end].copy_from_slice(whole);
        // SAFETY: the caller guarantees valid memory.
        return unsafe { socket.push(&front[..end], payload) };
    };
    let end = TOKEN_BYTES + at;
    front[TOKEN_BYTES..end].copy_from_slice(&whole[..at]);
    let lead = &whole[at + landbridge_proto::limit::CHECKSUM_BYTES..];
    if lead.is_empty() {
        // SAFETY: the caller guarantees valid memory.
        return unsafe { socket.push_summed(sum, &front[..end], payload) };
    }
    let mut pieces = [Piece { base: std::ptr::null_mut(), len: 0 }; PIECES_MAX];
    pieces[0] = Piece { base: lead.as_ptr().cast_mut(), len: lead.len() };
    pieces[1..=payload.len()].copy_from_slice(payload);
    // SAFETY: the caller guarantees valid memory, `lead` lives as long as the call, and nothing is
    // written.
    unsafe { socket.push_summed(sum, &front[..end], &pieces[..=payload.len()]) }
}

/// Sends a probe or an answer. If the socket is full, the probe counts as lost.
pub(super) fn push_probe(
    socket: &mut DatagramLink,
    to: SocketAddr,
    front: &[u8; PROBE_BYTES],
    size: usize,
) {
    static ZEROES: [u8; 1 << 16] = [0; 1 << 16];
    if !socket.begin(to, size) {
        return;
    }
    let rest = Piece { base: ZEROES.as_ptr().cast_mut(), len: size - PROBE_BYTES };
    // SAFETY: the zeroes are static, and are only read.
    if unsafe { socket.push(front, &[rest]) } {
        // A later notice or the next frame reports an error.
        let _ = socket.flush();
    }
}
