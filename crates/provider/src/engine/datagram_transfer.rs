//! Sends and receives frames in datagrams.
//!
//! Sending: the engine collects as many frames as the protocol has in one buffer, and computes the
//! checksum of each payload while copying the payload there. One system call sends each run of
//! datagrams of equal size. Receiving: a datagram holds a whole frame, which is delivered at once.
//! What may never happen: the engine reads memory of an operation after the operation's frame was
//! handed over.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;

use landbridge_drive::checksum::Checksum;
use landbridge_drive::link::datagram::{DatagramLink, DestinationNotice};
use landbridge_drive::link::stream::{Piece, Sent};
use landbridge_proto::endpoint::{OutgoingFrame, Peer};
use landbridge_proto::path::time::Time;
use landbridge_proto::wire::datagram::{self, DatagramBody, TOKEN_BYTES};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header};
use landbridge_proto::wire::kind_header::AdvertisedAddress;

use super::carrier::Carrier;
use super::data_path::DataPath;
use super::datagrams::Datagrams;
use super::integrity;
use super::links::Link;
use super::memory::Bytes;
use super::peer_state::SendState;
use super::rails::advertised_address;
use super::udp_path::DatagramTarget;
use super::udp_path::path_monitor::PathChange;
use crate::log;

/// Buffer size for everything in front of a frame's payload.
const FRONT_BYTES_MAX: usize = 256;

/// Maximum number of payload pieces, including the part of a payload in the frame's front.
const PIECES_MAX: usize = 9;

impl DataPath {
    fn datagrams(&mut self) -> &mut Datagrams {
        // UDP paths exist only while `datagrams` is set.
        self.datagrams.as_mut().expect("datagrams are in use")
    }

    /// Opens UDP paths to the addresses that peers have advertised.
    #[inline]
    pub(super) fn open_udp_paths(&mut self) {
        if self.datagrams.as_ref().is_some_and(|datagrams| datagrams.has_advertisements()) {
            for (peer, advertisement) in std::mem::take(&mut self.datagrams().advertisements) {
                self.open_udp_paths_to(peer, &advertisement);
            }
        }
    }

    /// Opens a UDP path to an advertised address from every local address that has a connection to
    /// it.
    #[cold]
    fn open_udp_paths_to(&mut self, peer: Peer, advertisement: &AdvertisedAddress) {
        let Some(token) = advertisement.token.map(NonZeroU64::get) else { return };
        let to = advertised_address(advertisement);
        let open_paths = &self.peers[peer].open_paths;
        let ends =
            open_paths.iter().filter_map(|open_path| self.links[open_path.link].as_ref()?.ends);
        let mut locals: Vec<IpAddr> =
            ends.filter(|&(_, theirs)| theirs == to.ip()).map(|(own, _)| own).collect();
        locals.sort_unstable();
        locals.dedup();
        for own in locals {
            let (links, epoll, now) = (&mut self.links, &self.own.epoll, Time(self.clock.nanos()));
            let datagrams = self.datagrams.as_mut().expect("datagrams are in use");
            match datagrams.open_path(links, epoll, now, peer, (own, to), token) {
                Ok(id) => self.send_probes(id),
                Err(error) => {
                    log!(Info, "{}: udp from {own} to {to}: {error}", self.core.address(peer));
                }
            }
        }
    }

    /// Sends the probes of UDP path `id` that are due.
    pub(super) fn send_probes(&mut self, id: usize) {
        let (now, pause_max) =
            (Time(self.clock.nanos()), self.identity.settings.redial_max.as_nanos() as u64);
        while let Some((_, udp_path)) = self.links.udp_path(id) {
            let target = udp_path.target();
            let Some(probe) = udp_path.monitor.due_probe(now, pause_max) else {
                return;
            };
            self.datagrams().send_probe(target, probe, false);
            self.handle_notices(target.socket);
        }
    }

    /// Applies a change of UDP path `id` that an answer or a timeout has caused.
    pub(super) fn handle_change(&mut self, id: usize, change: PathChange) {
        let Some((peer, udp_path)) = self.links.udp_path(id) else {
            return;
        };
        let (to, size) = (udp_path.to, udp_path.monitor.size());
        match change {
            PathChange::Nothing => return,
            PathChange::Opened => {
                if !self.paths().add_path(peer, id) {
                    if let Some((_, udp_path)) = self.links.udp_path(id) {
                        udp_path.monitor.close(Time(u64::MAX));
                    }
                    return;
                }
                if let Some((_, udp_path)) = self.links.udp_path(id) {
                    udp_path.has_worked = true;
                }
                log!(Info, "{}: udp to {to}", self.core.address(peer));
                if self.peers[peer].send_state != SendState::Closed {
                    // A dial under way continues: a UDP path does not replace a connection.
                    self.peers[peer].set_send_state(SendState::Up(id));
                }
            }
            PathChange::Resized => {
                log!(Info, "{}: udp to {to}: datagrams of {size} bytes", self.core.address(peer));
            }
        }
        self.paths().restripe(peer);
        self.drain_actions();
    }

    /// Handles ICMP notices about destinations. An attacker can forge a notice, so a notice only
    /// makes the engine try a smaller size.
    pub(super) fn handle_notices(&mut self, socket: usize) {
        let Some(link) = &mut self.datagrams().sockets[socket].link else {
            return;
        };
        let notices: Vec<DestinationNotice> = link.take_notices().collect();
        let now = Time(self.clock.nanos());
        for notice in notices {
            for id in 0..self.links.len() {
                let Some((_, udp_path)) = self.links.udp_path(id) else {
                    continue;
                };
                if (udp_path.socket, udp_path.to) != (socket, notice.to) {
                    continue;
                }
                let change = udp_path.handle_notice(now, notice.error);
                self.handle_change(id, change);
            }
        }
    }

    /// Sends queued datagrams of a socket that has free space again. Returns false if datagrams are
    /// still queued.
    pub(super) fn handle_socket_room(&mut self, socket: usize) -> bool {
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
    pub(super) fn read_datagrams(&mut self, socket: usize) -> usize {
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
    pub(super) fn transmit_datagrams(&mut self, link: &mut Link, peer: Peer) -> io::Result<()> {
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
        let ends_suspicion = has_sign && udp_path.monitor.handle_received();
        self.core.channel_mut(peer).end_batch(path);
        if ends_suspicion {
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
