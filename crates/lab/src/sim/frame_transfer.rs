//! Frames between simulated processes, over one or several pipes, which break, are reopened, and
//! corrupt frames.
//!
//! A pipe that is not lossless can break at any moment, even in the middle of a frame; each side
//! may still read bytes that had arrived. A corruption stands for a checksum mismatch: it affects a
//! payload at its destination, or a payload that never gets there.

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{
    InFlightUsage, InjectMessage, Memory, PayloadDestination, Peer, REASSEMBLED,
};
use landbridge_proto::limit::{CHECKSUM_BYTES, KIND_HEADER_BYTES_MAX};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};
use landbridge_proto::wire::kind_header::KindHeader;

use super::bounds::check_window;
use super::channel_record::FrameArrival;
use super::datagrams::BATCH_MAX;
use super::memory::Piece;
use super::node::{EarlyFrame, Node};
use super::pipe::{IncomingFrame, Target, WriteOutcome};
use super::remote::REFUSED;
use super::world::World;
use super::{Violation, require, violation};

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
        let Some(frame) = node.endpoint.poll_transmit(peer, path) else {
            node.ready.remove(&(to, path_id));
            return Ok(true);
        };
        let front = frame.front().to_vec();
        let header = Header::parse(&front).map_err(violation)?;
        let payload = frame.payload.map(|(piece, at, length)| (*piece, at, length));
        let (wants_copy, must_release_memory) = (frame.wants_copy, frame.must_release_memory);
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
            let bytes = self.arena.read(piece, at, length)?.to_vec();
            copy = Some(self.nodes[from].keep_copy(bytes, &mut self.arena));
        }
        self.log_step(|| format!("{from} -> {to} by {path_id} {written:?} {header:?}"));
        let sender = &self.nodes[from];
        self.channels[from][to].spend((from, to), &front, sender, &mut self.counts)?;
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
        let Some(frame) = self.nodes[from].endpoint.inject(&passing, path) else {
            return Ok(false);
        };
        let wants_copy = frame.wants_copy;
        let frame = [frame.front(), bytes].concat();
        if !self.pipes[from][to][path_id].fits(frame.len()) {
            return Ok(false);
        }
        let header = Header::parse(&frame).map_err(violation)?;
        if !(self.blackholed[from][to][path_id] && self.nodes[from].paths[to][path_id].silent_loss)
        {
            self.pipes[from][to][path_id].begin(&frame, None, &self.arena)?;
        }
        let node = &mut self.nodes[from];
        let copy = wants_copy.then(|| node.keep_copy(bytes.to_vec(), &mut self.arena));
        self.nodes[from].endpoint.injected(&passing, path, copy);
        self.counts.count("messages passed the short way");
        self.log_step(|| format!("{from} -> {to} passes by {path_id} {header:?}"));
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
        if self.blackholed[from][to][path_id] && !self.nodes[from].paths[to][path_id].silent_loss {
            // The frame is still under way.
            return Ok(false);
        }
        let had = self.pipes[from][to][path_id].bytes.len();
        let moved = if self.pipes[from][to][path_id].incoming.is_some() {
            self.read_payload(from, to, path_id)?
        } else {
            self.read_front(from, to, path_id)?
        };
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
        let header = Header::parse(&pipe.peek(HEADER_BYTES)).map_err(violation)?;
        let head_size = KindHeader::size(header.kind, header.flags);
        let (payload, check) = header.payload(head_size).map_err(violation)?;
        let front_size = HEADER_BYTES + head_size + check;
        if pipe.bytes.len() < front_size {
            return Ok(false);
        }
        let is_whole = pipe.bytes.len() as u64 >= front_size as u64 + payload;
        let is_corrupt = payload > 0 && self.random.percent(self.rates.corrupt_percent);
        let peer = self.peer(to, from);
        let pipe = &mut self.pipes[from][to][path_id];
        let front = pipe.take(front_size);
        if is_corrupt && is_whole && !self.nodes[from].paths[to][path_id].lossless {
            pipe.take(payload as usize);
            self.counts.count("frames corrupted");
            self.log_step(|| format!("{to} <- {from} by {path_id} corrupt {header:?}"));
            let is_bearable =
                self.nodes[to].endpoint.channel_mut(peer).handle_corrupt_frame(&header);
            self.drain(to)?;
            if !is_bearable {
                self.break_path(from, to, path_id)?;
            }
            return Ok(true);
        }
        self.channels[to][from].handle_credit(header.credit);
        let place = self.nodes[to]
            .endpoint
            .handle_frame(peer, PathId(path_id as u8), &header, &front[HEADER_BYTES..])
            .map_err(|fault| Violation(format!("{to} blames {from}: {}: {header:?}", fault.0)))?;
        self.log_step(|| {
            format!("{to} <- {from} by {path_id} {:?} {} {place:?}", header.kind, header.sequence)
        });
        if !matches!(place, PayloadDestination::OutOfOrder { .. }) {
            let head = &front[HEADER_BYTES..];
            let arrival = FrameArrival { header: &header, head, payload, place };
            let (model, counts) = (&mut self.model, &mut self.counts);
            self.channels[from][to].begin_frame((from, to), arrival, model, counts)?;
        }
        self.drain(to)?;
        if let PayloadDestination::OutOfOrder { frame, whole, .. } = place {
            let (key, head) = ((from, frame), &front[HEADER_BYTES..]);
            self.nodes[to].open_early_buffer(key, to, whole, &header, head)?;
        }
        let target = self.target(from, to, place, payload)?;
        if let PayloadDestination::OutOfOrder { frame, at, .. } = place
            && header.kind != Kind::Fragment
            && let Some(early) = self.nodes[to].early.get_mut(&(from, frame))
        {
            early.bytes[..at as usize]
                .copy_from_slice(&front[HEADER_BYTES..HEADER_BYTES + head_size]);
        }
        self.pipes[from][to][path_id].incoming =
            Some(IncomingFrame { header, place, target, payload, done: 0, is_duplicate: false });
        if payload == 0 {
            self.end_frame(from, to, path_id)?;
        }
        Ok(true)
    }

    /// The destination of a payload, in terms of the driver.
    fn target(
        &mut self,
        from: usize,
        to: usize,
        place: PayloadDestination,
        payload: u64,
    ) -> Result<Target, Violation> {
        Ok(match place {
            PayloadDestination::Discard => Target::Skip,
            PayloadDestination::Receive { .. } | PayloadDestination::Reply { .. } => {
                let memory = self.nodes[to].endpoint.place_memory(place);
                let Some((piece, at, take)) = memory else {
                    return Err(Violation(format!("{place:?} has no memory")));
                };
                let take = take.min(payload);
                require!(at + take <= piece.size(), "{place:?} outside {piece:?}");
                Target::Piece { piece: *piece, at, take }
            }
            PayloadDestination::NewUnexpected { store, size } => {
                require!(payload <= size, "store {store} is smaller than what comes first");
                self.nodes[to].open_store(from, to, store, size)?;
                Target::Store { store, at: 0 }
            }
            PayloadDestination::Unexpected { store, at } => {
                let kept = self.nodes[to].stores.get(&store);
                let fits = kept.is_some_and(|store| at + payload <= store.size);
                require!(fits, "store {store} does not hold {at}+{payload}");
                Target::Store { store, at }
            }
            PayloadDestination::Region { op, key, offset } => {
                let region = &self.nodes[to].region;
                match region.resolve(key, offset, payload) {
                    Some(at) => Target::Piece { piece: region.piece, at, take: payload },
                    None => {
                        let peer = self.peer(to, from);
                        self.nodes[to].endpoint.channel_mut(peer).refuse(op, REFUSED);
                        self.drain(to)?;
                        Target::Skip
                    }
                }
            }
            PayloadDestination::Scratch => Target::Scratch(Vec::new()),
            PayloadDestination::OutOfOrder { frame, at, .. } => {
                let early = self.nodes[to].early.get(&(from, frame));
                let bytes = early.map_or(0, |early| early.bytes.len() as u64);
                require!(bytes >= at as u64 + payload, "{place:?} does not hold {payload}");
                self.counts.count("frames that came early");
                Target::Early { frame, at: at as u64 }
            }
        })
    }

    fn read_payload(&mut self, from: usize, to: usize, path_id: usize) -> Result<bool, Violation> {
        let pipe = &mut self.pipes[from][to][path_id];
        let Some(incoming) = &pipe.incoming else {
            return Ok(false);
        };
        let most = (incoming.payload - incoming.done).min(pipe.bytes.len() as u64);
        if most == 0 {
            return Ok(false);
        }
        let now = if self.random.percent(70) { most } else { self.random.within(1..=most) };
        let bytes = pipe.take(now as usize);
        if let Some(incoming) = &mut pipe.incoming {
            self.nodes[to].put((from, to), incoming, &bytes, &mut self.arena)?;
            incoming.done += now;
            if incoming.done == incoming.payload {
                self.end_frame(from, to, path_id)?;
            }
        }
        Ok(true)
    }

    fn end_frame(&mut self, from: usize, to: usize, path_id: usize) -> Result<(), Violation> {
        let Some(mut incoming) = self.pipes[from][to][path_id].incoming.take() else {
            return Ok(());
        };
        let (peer, path) = (self.peer(to, from), PathId(path_id as u8));
        let is_lossless = self.nodes[from].paths[to][path_id].lossless;
        if incoming.payload > 0 && !is_lossless && self.random.percent(self.rates.corrupt_percent) {
            return self.corrupt_payload(from, to, path_id, incoming);
        }
        self.log_step(|| {
            format!("{to} has {:?} of {from} in {:?}", incoming.header.kind, incoming.place)
        });
        let is_diverted = matches!(incoming.target, Target::Skip);
        // A control frame has the number of the next new byte, which may be old when the frame
        // arrives. A fragment never ends a frame: every fragment arrives out of order or is a
        // duplicate.
        let is_placed = incoming.header.kind.is_numbered()
            && incoming.header.kind != Kind::Fragment
            && self.channels[from][to].placed() == Some(incoming.header.sequence);
        let is_early = matches!(incoming.place, PayloadDestination::OutOfOrder { .. });
        if is_placed && !is_early && !(is_diverted && incoming.is_duplicate) {
            self.channels[from][to].finish_placed_frame(&mut self.model);
        }
        if let Target::Scratch(scratch) = &mut incoming.target {
            self.nodes[to].scratch[from] = std::mem::take(scratch);
        }
        self.nodes[to].endpoint.handle_payload(peer, path);
        self.drain(to)?;
        self.deliver_early_frames(from, to)
    }

    /// Handles a payload whose bytes differ from the sent bytes.
    fn corrupt_payload(
        &mut self,
        from: usize,
        to: usize,
        path_id: usize,
        mut incoming: IncomingFrame,
    ) -> Result<(), Violation> {
        self.counts.count("payloads corrupted");
        self.log_step(|| format!("{to} has {:?} of {from} corrupt", incoming.header));
        let junk = vec![0xee; incoming.payload as usize];
        incoming.done = 0;
        self.nodes[to].put((from, to), &mut incoming, &junk, &mut self.arena)?;
        let peer = self.peer(to, from);
        let is_bearable =
            self.nodes[to].endpoint.channel_mut(peer).handle_corrupt(PathId(path_id as u8));
        self.drain(to)?;
        if !is_bearable {
            self.break_path(from, to, path_id)?;
        }
        Ok(())
    }

    /// Delivers frames that arrived out of order and are next now.
    fn deliver_early_frames(&mut self, from: usize, to: usize) -> Result<(), Violation> {
        let peer = self.peer(to, from);
        while let Some(frame) = self.nodes[to].endpoint.channel(peer).next_reassembled() {
            let Some(EarlyFrame { header, bytes: body }) =
                self.nodes[to].early.remove(&(from, frame))
            else {
                return Err(Violation(format!("{to} has let go of frame {frame} of {from}")));
            };
            let kept = self.nodes[to].endpoint.handle_reassembled(peer, &body);
            let (place, head_size) =
                kept.map_err(|fault| Violation(format!("{to} blames {from}: {}", fault.0)))?;
            self.log_step(|| format!("{to} delivers {frame} of {from}: {place:?}"));
            let payload = (body.len() - head_size) as u64;
            let arrival = FrameArrival { header: &header, head: &body, payload, place };
            let (model, counts) = (&mut self.model, &mut self.counts);
            self.channels[from][to].begin_frame((from, to), arrival, model, counts)?;
            self.drain(to)?;
            let target = self.target(from, to, place, payload)?;
            let mut incoming =
                IncomingFrame { header, place, target, payload, done: 0, is_duplicate: false };
            let bytes = &body[head_size..];
            self.nodes[to].put((from, to), &mut incoming, bytes, &mut self.arena)?;
            if let Target::Scratch(scratch) = &mut incoming.target {
                self.nodes[to].scratch[from] = std::mem::take(scratch);
            }
            if self.channels[from][to].placed() == Some(frame) {
                self.channels[from][to].finish_placed_frame(&mut self.model);
            }
            self.nodes[to].endpoint.handle_payload(peer, REASSEMBLED);
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
        loop {
            // A path that breaks in between has an empty pipe.
            let has_incoming = self.pipes[from][to][path_id].incoming.is_some();
            if self.pipes[from][to][path_id].bytes.is_empty() && !has_incoming {
                return Ok(());
            }
            let moved = match has_incoming {
                true => self.read_payload(from, to, path_id)?,
                false => self.read_front(from, to, path_id)?,
            };
            require!(moved, "a datagram of {from} to {to} is cut off");
        }
    }
}
