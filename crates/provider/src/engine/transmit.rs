//! Outgoing frames: the engine sends the protocol's frames for a peer on the peer's link until the
//! link is full; then the peer waits in the link's queue.

use std::io::{self, IoSlice};

use rustix::event::epoll::EventFlags;

use landbridge_drive::checksum::Checksum;
use landbridge_drive::link::shm;
use landbridge_drive::link::stream::{PIECES_MAX, Piece, Sent};
use landbridge_proto::channel::{PATHS_MAX, PathId};
use landbridge_proto::endpoint::{InjectMessage, Memory, OutgoingFrame, Peer};
use landbridge_proto::path::time::Time;

use super::carrier::Carrier;
use super::connections::Connections;
use super::data_path::DataPath;
use super::integrity;
use super::links::Link;
use super::memory::{Bytes, copied_bytes};
use super::peer_state::SendState;
use super::recorded_uplink::end_at_logs;
use super::request::SendRequest;
use crate::completion::{Completion, OperationKind};

impl Connections {
    /// Executes the protocol's actions, and sends its frames.
    #[inline]
    pub(super) fn run_actions(&mut self) {
        self.data.drain_actions();
        self.flush();
    }

    /// Sends all frames that can be sent, or one piece of them ([`LogPieces`]).
    ///
    /// [`LogPieces`]: super::log_pieces::LogPieces
    #[inline]
    pub(super) fn flush(&mut self) {
        let data = &mut self.data;
        let mut next = data.pieces.take_next().or_else(|| data.core.next_busy());
        while let Some(peer) = next {
            self.transmit(peer);
            if self.data.pieces.is_paused() {
                return;
            }
            next = self.data.core.next_busy();
        }
    }

    #[inline]
    fn transmit(&mut self, peer: Peer) {
        let id = match self.data.peers[peer].send_state {
            SendState::Up(id) => id,
            SendState::Unknown => return self.dial(peer),
            SendState::Dialling
            | SendState::DialQueued
            | SendState::AwaitRelay
            | SendState::Reconnecting => return,
            SendState::Closed => return self.fail_peer(peer, libc::ECONNRESET),
        };
        if self.data.peers[peer].open_paths.len() > 1 {
            return self.transmit_by_all(peer);
        }
        self.transmit_by(id, peer);
    }

    /// Offers the peer's frames to each of its paths; the protocol chooses the frames for a path.
    #[cold]
    fn transmit_by_all(&mut self, peer: Peer) {
        self.data.core.set_time(Time(self.data.clock.nanos()));
        for path in 0..PATHS_MAX as u8 {
            let open_paths = &self.data.peers[peer].open_paths;
            if let Some(open_path) = open_paths.iter().find(|open_path| open_path.path.0 == path) {
                self.transmit_by(open_path.link, peer);
            }
        }
    }

    #[inline]
    fn transmit_by(&mut self, id: usize, peer: Peer) {
        let Some(mut link) = self.data.links[id].take() else {
            return;
        };
        let outcome = self.data.transmit_on(&mut link, id, peer);
        let socket = link.socket();
        self.data.links[id] = Some(link);
        if let Some(socket) = socket {
            self.data.handle_notices(socket);
        }
        self.data.drain_actions();
        if let Err(error) = outcome {
            // The peer's last frames are still readable, for example its Goodbye.
            while self.read_stream(id) > 0 {}
            self.link_down(id, &error);
        }
    }

    /// Whether small frames wait for the next poll.
    #[inline]
    pub(super) fn has_gathered(&self) -> bool {
        self.data.bursts.has_waiting()
    }

    /// Sends the small frames that wait.
    #[inline]
    pub(super) fn send_gathered(&mut self) {
        while let Some(id) = self.data.bursts.take_waiting() {
            self.send_gathered_on(id);
        }
    }

    fn send_gathered_on(&mut self, id: usize) {
        let Some(link) = self.data.links.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        let Carrier::Stream(stream) = &mut link.carrier else {
            return;
        };
        match stream.send_gathered() {
            Ok(true) => (),
            Ok(false) => {
                let interest = EventFlags::IN | EventFlags::OUT;
                if let Err(error) = link.set_interest(&self.data.own.epoll, id, interest) {
                    self.link_down(id, &error);
                }
            }
            Err(error) => {
                // The peer's last frames are still readable, for example its Goodbye.
                while self.read_stream(id) > 0 {}
                self.link_down(id, &error);
            }
        }
    }

    /// Continues sending on a stream that accepts bytes again.
    pub(super) fn handle_writable(&mut self, id: usize) {
        let Some(link) = self.data.links.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        let Carrier::Stream(stream) = &mut link.carrier else {
            return;
        };
        // What was held leaves now, perhaps long after the last call that sent something.
        link.health.has_sent = true;
        match stream.flush() {
            Ok(false) => return,
            Ok(true) => (),
            Err(error) => return self.link_down(id, &error),
        }
        let path = link.path;
        if let Some(peer) = link.holding.take() {
            self.data.core.handle_flushed(peer, path);
            self.data.core.channel_mut(peer).mark_busy();
        }
        for peer in std::mem::take(&mut link.blocked) {
            self.data.core.channel_mut(peer).mark_busy();
        }
        if let Err(error) = link.set_interest(&self.data.own.epoll, id, EventFlags::IN) {
            return self.link_down(id, &error);
        }
        self.run_actions();
    }
}

impl DataPath {
    /// Sends an injected message directly on the link, if nothing prevents that. False: the caller
    /// must use the general path.
    #[inline]
    pub(super) fn inject_fast(&mut self, peer: Peer, request: &SendRequest) -> bool {
        let SendState::Up(id) = self.peers[peer].send_state else {
            return false;
        };
        let Some(link) = self.links[id].as_mut() else {
            return false;
        };
        let memory = Bytes::borrow(request.payload);
        let size = memory.size();
        let passing = InjectMessage { peer, tag: request.tag, data: request.data, size };
        let path = link.path;
        let target = self.core.address(peer).index() as usize;
        self.core.channel_mut(peer).set_copying(copied_bytes() < self.buffers.retain);
        let Some(mut frame) = self.core.inject(&passing, path) else {
            return false;
        };
        let pieces = memory.range(0, size);
        // SAFETY: the memory is valid during this call.
        let copy = unsafe { integrity::fill_in(link.sum, &mut frame, Some((&memory, 0, size))) };
        let sent = match &mut link.carrier {
            Carrier::Shm(_) if self.recording.is_some() => return false,
            Carrier::Shm(ring) => send_to_ring(ring, frame.front(), pieces.as_slice()),
            Carrier::Stream(stream)
                if self.bursts.may_wait(link.last_round)
                    && stream.can_gather(frame.front().len() + size as usize) =>
            {
                // SAFETY: the memory is valid during this call.
                unsafe { stream.gather(frame.front(), pieces.as_slice()) };
                self.bursts.note_waiting(id);
                Sent::All
            }
            // SAFETY: the memory is valid during this call; bytes that the stream holds are copied
            // below.
            Carrier::Stream(stream) => {
                match unsafe { stream.send(frame.front(), pieces.as_slice()) } {
                    Ok(sent) => sent,
                    // The general path meets the same error and handles it.
                    Err(_) => return false,
                }
            }
            Carrier::Logs(logs) => {
                logs.send(
                    target,
                    frame.front(),
                    &slices_of(pieces.as_slice())[..pieces.as_slice().len()],
                )
                .unwrap_or_else(|error| end_at_logs(&self.recording, &self.own, error));
                self.recording.iter_mut().for_each(|recording| recording.note_sent());
                Sent::All
            }
            Carrier::Recorded(_) | Carrier::Datagram(_) | Carrier::Loopback => return false,
        };
        if sent == Sent::Busy {
            return false;
        }
        (link.health.has_sent, link.last_round) = (true, self.bursts.round());
        if sent == Sent::Held {
            if let Carrier::Stream(stream) = &mut link.carrier {
                stream.copy_held();
            }
            link.holding = Some(peer);
            // If epoll cannot change the interest, the next attempt to send finds the free space.
            let _ = link.set_interest(&self.own.epoll, id, EventFlags::IN | EventFlags::OUT);
        }
        self.core.injected(&passing, path, copy);
        let kind =
            if request.tag.is_some() { OperationKind::TaggedSend } else { OperationKind::Send };
        self.application.sink.complete(Completion::quiet(kind, request.context));
        true
    }

    fn transmit_on(&mut self, link: &mut Link, id: usize, peer: Peer) -> io::Result<()> {
        match link.carrier {
            Carrier::Loopback => return self.transmit_to_self(peer, link.path),
            Carrier::Datagram(_) => return self.transmit_datagrams(link, peer),
            Carrier::Shm(_) | Carrier::Stream(_) | Carrier::Recorded(_) | Carrier::Logs(_) => (),
        }
        if link.is_full() {
            link.await_room(peer);
            return Ok(());
        }
        let path = link.path;
        let is_recorded = self.recording.is_some();
        if let (Some(replay), Carrier::Recorded(stream)) = (&mut self.recording, &mut link.carrier)
        {
            replay.send_nondeterminism(self.own.address, stream)?;
        }
        let target = self.core.address(peer).index() as usize;
        let mut may_wait = self.bursts.may_wait(link.last_round);
        while !self.pieces.is_paused()
            && let Some(mut frame) = self.next_frame(peer, path)
        {
            let payload = frame.payload;
            let pieces = payload.map(|(memory, at, len)| memory.range(at, len));
            let pieces = pieces.as_ref().map_or(&[][..], |pieces| pieces.as_slice());
            let bytes = pieces.iter().map(|piece| piece.len).sum();
            // SAFETY: the memory is valid until the operation completes, which `transmitted` or
            // `handle_flushed` reports.
            let copy = unsafe { integrity::fill_in(link.sum, &mut frame, payload) };
            let must_release_memory = frame.must_release_memory;
            let sent = match &mut link.carrier {
                Carrier::Shm(ring) if is_recorded => send_blocking(ring, frame.front(), pieces)?,
                Carrier::Shm(ring) => send_to_ring(ring, frame.front(), pieces),
                Carrier::Recorded(stream) => {
                    stream.send(frame.front(), &slices_of(pieces)[..pieces.len()])?;
                    Sent::All
                }
                Carrier::Logs(logs) => {
                    let slices = slices_of(pieces);
                    match logs.send(target, frame.front(), &slices[..pieces.len()]) {
                        Ok(()) => Sent::All,
                        Err(error) => end_at_logs(&self.recording, &self.own, error),
                    }
                }
                Carrier::Stream(stream)
                    if may_wait && stream.can_gather(frame.front().len() + bytes) =>
                {
                    // SAFETY: the memory is valid during this call.
                    unsafe { stream.gather(frame.front(), pieces) };
                    self.bursts.note_waiting(id);
                    Sent::All
                }
                // SAFETY: the memory is valid until the operation completes.
                Carrier::Stream(stream) => unsafe { stream.send(frame.front(), pieces) }?,
                Carrier::Datagram(_) | Carrier::Loopback => return Ok(()),
            };
            if sent == Sent::Busy {
                link.await_room(peer);
                if let Carrier::Shm(_) = link.carrier {
                    self.links.full_rings.push(id);
                    return Ok(());
                }
                return link.set_interest(&self.own.epoll, id, EventFlags::IN | EventFlags::OUT);
            }
            (link.health.has_sent, link.last_round) = (true, self.bursts.round());
            may_wait = self.bursts.may_wait(link.last_round);
            if sent == Sent::All {
                self.core.transmitted(peer, path, true, copy);
                if let Some(replay) = &mut self.recording {
                    replay.note_sent();
                    self.pieces.note_appended(peer, bytes);
                }
            } else {
                self.core.transmitted(peer, path, must_release_memory, copy);
                link.hold(peer, must_release_memory);
                return link.set_interest(&self.own.epoll, id, EventFlags::IN | EventFlags::OUT);
            }
            self.drain_actions();
        }
        Ok(())
    }

    /// The next frame for a path of `peer`. The payload is copied only while the retained copies of
    /// the process are below their bound.
    #[inline]
    pub(super) fn next_frame(
        &mut self,
        peer: Peer,
        path: PathId,
    ) -> Option<OutgoingFrame<'_, Bytes>> {
        self.core.channel_mut(peer).set_copying(copied_bytes() < self.buffers.retain);
        self.core.poll_transmit(peer, path)
    }

    fn transmit_to_self(&mut self, peer: Peer, path: PathId) -> io::Result<()> {
        while let Some(frame) = self.core.poll_transmit(peer, path) {
            let front = frame.front().to_vec();
            let payload = frame.payload.map(|(memory, at, len)| (memory.clone(), at, len));
            self.core.transmitted(peer, path, true, None);
            let mut bytes = front;
            if let Some((memory, at, len)) = payload {
                for piece in memory.range(at, len).as_slice() {
                    // SAFETY: the memory belongs to the sender, whose operation has not completed
                    // yet.
                    bytes.extend_from_slice(unsafe {
                        std::slice::from_raw_parts(piece.base, piece.len)
                    });
                }
            }
            self.drain_actions();
            self.take_frame(Some(peer), path, Checksum::Off, &bytes)?;
        }
        Ok(())
    }
}

#[inline(always)]
fn send_to_ring(ring: &mut shm::ShmLink, front: &[u8], pieces: &[Piece]) -> Sent {
    let slices = slices_of(pieces);
    if ring.send(front, &slices[..pieces.len()]) { Sent::All } else { Sent::Busy }
}

#[inline(always)]
fn slices_of(pieces: &[Piece]) -> [IoSlice<'_>; PIECES_MAX] {
    let mut slices = [IoSlice::new(&[]); PIECES_MAX];
    for (slice, piece) in slices.iter_mut().zip(pieces) {
        // SAFETY: the application's memory is valid until the operation completes.
        *slice = IoSlice::new(unsafe { std::slice::from_raw_parts(piece.base, piece.len) });
    }
    slices
}

/// Sends a frame to a ring, and waits for free space. A recorded process waits because the
/// behaviour that its program observes must not depend on the free space of a ring.
#[cold]
fn send_blocking(ring: &mut shm::ShmLink, front: &[u8], pieces: &[Piece]) -> io::Result<Sent> {
    while send_to_ring(ring, front, pieces) == Sent::Busy {
        if !ring.drain_doorbell() || ring.peek().is_err() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        std::thread::yield_now();
    }
    Ok(Sent::All)
}
