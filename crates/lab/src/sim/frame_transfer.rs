//! Frames between simulated processes, over one or several pipes, which break, are reopened, and
//! corrupt frames.
//!
//! A pipe that is not lossless can break at any moment, even in the middle of a frame; each side
//! may still read bytes that had arrived. A corruption stands for a checksum mismatch: it affects a
//! payload at its destination, or a payload that never gets there.

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{
    InFlightUsage, InjectMessage, PayloadDestination, Peer, REASSEMBLED,
};
use landbridge_proto::limit::{CHECKSUM_BYTES, KIND_HEADER_BYTES_MAX};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};
use landbridge_proto::wire::kind_header::KindHeader;
use landbridge_testbed::endpoint::{ByteStore, Frame, IncomingFrame};

use super::bounds::check_window;
use super::datagrams::BATCH_MAX;
use super::memory::Piece;
use super::node::Node;
use super::pipe::WriteOutcome;
use super::world::World;
use super::{Violation, require};

impl World {
    pub fn write(&mut self, from: usize, to: usize, path_id: usize) -> Result<bool, Violation> {
        let Some(pipe) = self.pipes[from][to].get_mut(path_id) else {
            return Ok(false);
        };
        let path = PathId(path_id as u8);
        let node = &mut self.nodes[from];
        if pipe.may_resume() {
            let is_whole = pipe.resume(&self.arena)?;
            if let (true, Some(peer)) = (is_whole, node.peers[to]) {
                node.endpoint.handle_flushed(peer, path);
                node.endpoint.channel_mut(peer).mark_busy();
                self.drain(from)?;
            }
            return Ok(true);
        }
        if pipe.pending_write.is_some() || !node.ready.contains(&(to, path_id)) {
            return Ok(false);
        }
        let Some(peer) = node.peers[to] else {
            return Ok(false);
        };
        self.allow_copies(from, peer)?;
        let before = self.flying(from, peer, path_id);
        let node = &mut self.nodes[from];
        let Some(outgoing) = node.endpoint.poll_transmit(peer, path) else {
            node.ready.remove(&(to, path_id));
            return Ok(true);
        };
        let front = outgoing.front().to_vec();
        let frame = Frame::new(&front);
        let header = frame.header;
        let payload = outgoing.payload.map(|(piece, at, length)| (*piece, at, length));
        let (wants_copy, must_release_memory) = (outgoing.wants_copy, outgoing.must_release_memory);
        let sent = front.len() + payload.map_or(0, |(_, _, length)| length as usize);
        require!(sent == HEADER_BYTES + header.length as usize, "{header:?} has another length");
        let written = self.enter((from, to, path_id), &front, payload)?;
        if written == WriteOutcome::Busy {
            self.counts.count("pipes that were busy");
            self.nodes[from].ready.remove(&(to, path_id));
            return Ok(true);
        }
        let mut copy = None;
        if let (true, Some((piece, at, length))) = (wants_copy, payload) {
            let is_answer = matches!(header.kind, Kind::ReadData | Kind::AtomicReply);
            self.nodes[from].check_copy(from, is_answer, length)?;
            copy = Some(self.nodes[from].keep_copy(self.arena.copy(&piece, at, length)?));
        }
        self.log_step(|| format!("{from} -> {to} by {path_id} {written:?} {header:?}"));
        let sender = &self.nodes[from];
        self.channels[from][to].spend((from, to), &frame, sender, &mut self.counts)?;
        if written == WriteOutcome::Part {
            self.counts.count("frames in parts");
        }
        if must_release_memory {
            self.pipes[from][to][path_id].own_pending_write(&mut self.arena)?;
        }
        let is_flushed = written == WriteOutcome::Whole || must_release_memory;
        self.nodes[from].endpoint.transmitted(peer, path, is_flushed, copy);
        if let (Some(before), Some(after)) = (before, self.flying(from, peer, path_id)) {
            check_window(&before, &after)?;
        }
        self.drain(from)?;
        Ok(true)
    }

    /// Sets whether the sender may make further copies, as a driver does before it asks for a
    /// frame.
    fn allow_copies(&mut self, from: usize, peer: Peer) -> Result<(), Violation> {
        let is_full = |node: &Node| node.copied_bytes() >= node.copies_max;
        if is_full(&self.nodes[from]) {
            self.nodes[from].reap(&mut self.arena)?;
        }
        let node = &mut self.nodes[from];
        let has_room = !is_full(node);
        node.endpoint.channel_mut(peer).set_copying(has_room);
        if !has_room && self.random.percent(10) {
            node.endpoint.channel_mut(peer).solicit_ack();
            self.counts.count("times without room for copies");
        }
        Ok(())
    }

    /// The usage of a path of datagrams; `None` for other paths, and in three of four steps.
    fn flying(&self, from: usize, peer: Peer, path_id: usize) -> Option<InFlightUsage> {
        let is_time = self.steps.is_multiple_of(4);
        is_time.then(|| {
            self.nodes[from].endpoint.channel(peer).in_flight_usage(PathId(path_id as u8))
        })?
    }

    /// Writes a frame to a path, as far as the pipe has capacity.
    fn enter(
        &mut self,
        (from, to, path_id): (usize, usize, usize),
        front: &[u8],
        payload: Option<(Piece, u64, u64)>,
    ) -> Result<WriteOutcome, Violation> {
        if self.has_datagrams(from, to, path_id) {
            let bytes = match payload {
                Some((piece, at, length)) => self.arena.read(piece, at, length)?,
                None => &[],
            };
            self.send_datagram((from, to, path_id), [front, bytes].concat())?;
            return Ok(WriteOutcome::Whole);
        }
        let is_blackholed = self.blackholed[from][to][path_id];
        let is_silent = self.nodes[from].paths[to][path_id].silent_loss;
        if is_silent
            && (is_blackholed || self.random.below(1_000) < self.rates.silent_loss_permille)
        {
            self.counts.count("frames lost silently");
            self.has_silent_loss = true;
            self.log_step(|| format!("what goes from {from} to {to} by {path_id} is lost:"));
            return Ok(WriteOutcome::Whole);
        }
        self.pipes[from][to][path_id].begin(front, payload, &self.arena)
    }

    /// Sends a message by the inject path; returns false if the message has to be queued.
    pub fn pass(
        &mut self,
        from: usize,
        to: usize,
        (tag, data): (Option<u64>, Option<u64>),
        bytes: &[u8],
    ) -> Result<bool, Violation> {
        let peer = self.peer(from, to);
        let passing = InjectMessage { peer, tag, data, size: bytes.len() as u64 };
        self.allow_copies(from, peer)?;
        let path_id = self.random.index(self.pipes[from][to].len());
        let path = PathId(path_id as u8);
        let Some(outgoing) = self.nodes[from].endpoint.inject(&passing, path) else {
            return Ok(false);
        };
        let (frame, wants_copy) = (Frame::new(outgoing.front()), outgoing.wants_copy);
        let sent = [outgoing.front(), bytes].concat();
        if !self.pipes[from][to][path_id].fits(sent.len()) {
            return Ok(false);
        }
        if !(self.blackholed[from][to][path_id] && self.nodes[from].paths[to][path_id].silent_loss)
        {
            self.pipes[from][to][path_id].begin(&sent, None, &self.arena)?;
        }
        let node = &mut self.nodes[from];
        let copy = wants_copy.then(|| node.keep_copy(self.arena.keep(bytes.to_vec(), false)));
        self.nodes[from].endpoint.injected(&passing, path, copy);
        self.counts.count("messages passed the short way");
        self.log_step(|| format!("{from} -> {to} passes by {path_id} {:?}", frame.header));
        let sender = &self.nodes[from];
        self.channels[from][to].spend((from, to), &frame, sender, &mut self.counts)?;
        self.drain(from)?;
        Ok(true)
    }

    pub fn read(&mut self, from: usize, to: usize, path_id: usize) -> Result<bool, Violation> {
        if self.model.failed[to][from] || path_id >= self.pipes[from][to].len() {
            return Ok(false);
        }
        if self.has_datagrams(from, to, path_id) {
            return self.receive_datagrams(from, to, path_id);
        }
        let had = self.pipes[from][to][path_id].bytes.len();
        let is_blackholed = self.blackholed[from][to][path_id];
        let is_silent = self.nodes[from].paths[to][path_id].silent_loss;
        if had == 0 || (is_blackholed && !is_silent) {
            // The frame is still under way.
            return Ok(false);
        }
        let moved = self.read_some(from, to, path_id)?;
        let is_emptier = self.pipes[from][to][path_id].bytes.len() < had;
        if let (true, Some(peer)) = (is_emptier, self.nodes[from].peers[to]) {
            self.nodes[from].endpoint.channel_mut(peer).mark_busy();
            self.drain(from)?;
        }
        Ok(moved)
    }

    fn read_front(&mut self, from: usize, to: usize, path_id: usize) -> Result<bool, Violation> {
        let pipe = &mut self.pipes[from][to][path_id];
        if pipe.bytes.len() < HEADER_BYTES {
            return Ok(false);
        }
        let header = Header::parse(&pipe.peek(HEADER_BYTES))?;
        let (payload, _) = header.payload(KindHeader::size(header.kind, header.flags))?;
        let whole_size = HEADER_BYTES + header.length as usize;
        let front_size = whole_size - payload as usize;
        if pipe.bytes.len() < front_size {
            return Ok(false);
        }
        let is_whole = pipe.bytes.len() >= whole_size;
        let is_corrupt = payload > 0 && self.random.percent(self.rates.corrupt_percent);
        let peer = self.peer(to, from);
        let pipe = &mut self.pipes[from][to][path_id];
        let frame = Frame::new(&pipe.take(front_size));
        if is_corrupt && is_whole && !self.nodes[from].paths[to][path_id].lossless {
            pipe.take(payload as usize);
            self.counts.count("frames corrupted");
            self.log_step(|| format!("{to} <- {from} by {path_id} corrupt {header:?}"));
            let is_bearable =
                self.nodes[to].endpoint.channel_mut(peer).handle_corrupt_frame(&header);
            self.end_corrupt(from, to, path_id, is_bearable)?;
            return Ok(true);
        }
        self.channels[to][from].handle_credit(header.credit);
        let path = PathId(path_id as u8);
        let place = self.nodes[to].endpoint.place(peer, path, &frame)?;
        self.log_step(|| {
            format!("{to} <- {from} by {path_id} {:?} {} {place:?}", header.kind, header.sequence)
        });
        self.begin_payload((from, to), path, &frame, place)?;
        if payload == 0 {
            self.end_frame(from, to, path_id)?;
        }
        Ok(true)
    }

    /// Records that the destination of a frame is known, and prepares the destination.
    fn begin_payload(
        &mut self,
        (from, to): (usize, usize),
        path: PathId,
        frame: &Frame,
        place: PayloadDestination,
    ) -> Result<(), Violation> {
        if matches!(place, PayloadDestination::OutOfOrder { .. }) {
            self.counts.count("frames that came early");
        } else {
            let (model, counts) = (&mut self.model, &mut self.counts);
            self.channels[from][to].begin_frame((from, to), frame, place, model, counts)?;
        }
        self.drain(to)?;
        let peer = self.peer(to, from);
        let Node { endpoint, region, .. } = &mut self.nodes[to];
        let region = endpoint.region(peer, place, |key, offset| {
            region.resolve(key, offset, frame.size).map(|at| (region.piece, at))
        });
        self.drain(to)?;
        self.nodes[to].endpoint.begin((peer, path), frame, place, region)
    }

    /// Reads a part of the payload that is arriving, or else the front of the next frame.
    fn read_some(&mut self, from: usize, to: usize, path_id: usize) -> Result<bool, Violation> {
        let Some(incoming) = self.nodes[to].incoming(from, path_id) else {
            return self.read_front(from, to, path_id);
        };
        let pipe = &mut self.pipes[from][to][path_id];
        let most = (incoming.size - incoming.done).min(pipe.bytes.len() as u64);
        if most == 0 {
            return Ok(false);
        }
        let now = if self.random.percent(70) { most } else { self.random.within(1..=most) };
        let bytes = pipe.take(now as usize);
        let by = (self.peer(to, from), PathId(path_id as u8));
        if self.nodes[to].endpoint.receive(by, &bytes, &mut self.arena)? {
            self.end_frame(from, to, path_id)?;
        }
        Ok(true)
    }

    fn end_frame(&mut self, from: usize, to: usize, path_id: usize) -> Result<(), Violation> {
        let Some(&IncomingFrame { header, place, size, is_discarded, .. }) =
            self.nodes[to].incoming(from, path_id)
        else {
            return Ok(());
        };
        let by = (self.peer(to, from), PathId(path_id as u8));
        let is_lossless = self.nodes[from].paths[to][path_id].lossless;
        if size > 0 && !is_lossless && self.random.percent(self.rates.corrupt_percent) {
            self.counts.count("payloads corrupted");
            self.log_step(|| format!("{to} has {header:?} of {from} corrupt"));
            let is_bearable = self.nodes[to].endpoint.corrupt(by, &mut self.arena)?;
            return self.end_corrupt(from, to, path_id, is_bearable);
        }
        self.log_step(|| format!("{to} has {:?} of {from} in {place:?}", header.kind));
        // A control frame has the number of the next new byte, which may be old when the frame
        // arrives. A fragment never ends a frame: every fragment arrives out of order or is a
        // duplicate.
        let is_placed = header.kind.is_numbered()
            && header.kind != Kind::Fragment
            && self.channels[from][to].placed() == Some(header.sequence);
        let is_early = matches!(place, PayloadDestination::OutOfOrder { .. });
        if is_placed && !is_early && !is_discarded {
            self.channels[from][to].finish_placed_frame(&mut self.model);
        }
        self.nodes[to].endpoint.end(by)?;
        self.drain(to)?;
        self.deliver_early_frames(from, to)
    }

    /// Breaks the path of a corrupt frame or payload that the receiver cannot bear.
    fn end_corrupt(
        &mut self,
        from: usize,
        to: usize,
        path_id: usize,
        is_bearable: bool,
    ) -> Result<(), Violation> {
        self.drain(to)?;
        match is_bearable {
            true => Ok(()),
            false => self.break_path(from, to, path_id),
        }
    }

    /// Delivers frames that arrived out of order and are next now.
    fn deliver_early_frames(&mut self, from: usize, to: usize) -> Result<(), Violation> {
        let peer = self.peer(to, from);
        while let Some((frame, place)) = self.nodes[to].endpoint.next_early(peer)? {
            let first = frame.header.sequence;
            self.log_step(|| format!("{to} delivers {first} of {from}: {place:?}"));
            self.begin_payload((from, to), REASSEMBLED, &frame, place)?;
            let endpoint = &mut self.nodes[to].endpoint;
            endpoint.receive((peer, REASSEMBLED), &frame.payload, &mut self.arena)?;
            if self.channels[from][to].placed() == Some(first) {
                self.channels[from][to].finish_placed_frame(&mut self.model);
            }
            endpoint.end((peer, REASSEMBLED))?;
            self.drain(to)?;
        }
        Ok(())
    }

    pub fn has_datagrams(&self, from: usize, to: usize, path_id: usize) -> bool {
        self.pipes[from][to][path_id].network.is_some()
    }

    /// Sends a frame as a datagram.
    fn send_datagram(
        &mut self,
        (from, to, path_id): (usize, usize, usize),
        bytes: Vec<u8>,
    ) -> Result<(), Violation> {
        let most = self.nodes[from].paths[to][path_id].payload_max as usize;
        let most = most.max(1) + HEADER_BYTES + KIND_HEADER_BYTES_MAX + CHECKSUM_BYTES;
        require!(bytes.len() <= most, "a datagram of {} bytes where {most} fit", bytes.len());
        let pipe = &mut self.pipes[from][to][path_id];
        let Some(network) = pipe.network.as_mut().filter(|_| !pipe.is_cut) else {
            return Ok(());
        };
        if self.blackholed[from][to][path_id] {
            self.counts.count("datagrams lost");
            self.has_silent_loss = true;
            return Ok(());
        }
        if let Some(event) = network.send(self.now, bytes, &mut self.random) {
            self.counts.count(event);
            self.log_step(|| format!("from {from} to {to} by {path_id}: {event}:"));
        }
        Ok(())
    }

    /// Reads the datagrams of one receiving call; returns false if there are none.
    fn receive_datagrams(
        &mut self,
        from: usize,
        to: usize,
        path_id: usize,
    ) -> Result<bool, Violation> {
        let mut moved = false;
        for _ in 0..self.random.within(1..=BATCH_MAX) {
            let pipe = &mut self.pipes[from][to][path_id];
            let Some(bytes) = pipe.network.as_mut().and_then(|network| network.receive(self.now))
            else {
                break;
            };
            moved = true;
            pipe.bytes.extend(bytes);
            self.read_datagram(from, to, path_id)?;
        }
        if moved && self.pipes[from][to][path_id].network.is_some() {
            let peer = self.peer(to, from);
            self.nodes[to].endpoint.channel_mut(peer).end_batch(PathId(path_id as u8));
            self.drain(to)?;
        }
        Ok(moved)
    }

    /// Reads one datagram out of the pipe.
    fn read_datagram(&mut self, from: usize, to: usize, path_id: usize) -> Result<(), Violation> {
        // A path that breaks in between has an empty pipe.
        while !self.pipes[from][to][path_id].bytes.is_empty()
            || self.nodes[to].incoming(from, path_id).is_some()
        {
            let moved = self.read_some(from, to, path_id)?;
            require!(moved, "a datagram of {from} to {to} is cut off");
        }
        Ok(())
    }
}
