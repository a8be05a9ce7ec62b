//! Frames between simulated processes, over one or several pipes, which break, are reopened, and
//! corrupt frames.
//!
//! A pipe that is not lossless can break at any moment, even in the middle of a frame; each side
//! may still read bytes that had arrived. A corruption stands for a checksum mismatch: it affects a
//! payload at its destination, or a payload that never gets there.

use landbridge_proto::channel::{PathId, REORDER_WINDOW_BYTES_MAX, REORDER_WINDOW_FRAMES_MAX};
use landbridge_proto::endpoint::{
    InFlightUsage, InjectMessage, Memory, PathProperties, PayloadDestination, Peer, REASSEMBLED,
};
use landbridge_proto::limit::FRAME_BODY_BYTES_MAX;
use landbridge_proto::wire::Malformed;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};
use landbridge_proto::wire::kind_header::KindHeader;

use super::bounds::check_window;
use super::datagrams::{random_kind, with_datagrams};
use super::memory::Piece;
use super::node::{EarlyFrame, Node, UnexpectedPayload, random_path, random_pipe};
use super::pipe::{IncomingFrame, Pipe, Target, WriteOutcome};
use super::random::Random;
use super::remote::REFUSED;
use super::world::World;
use super::{Violation, require};

/// Paths between two processes at most.
pub const PATHS_MAX: usize = 3;

/// Makes a pipe for each path between every two processes; both ends of a path are of one kind.
pub fn random_pipes(nodes: &mut [Node], random: &mut Random, largest: u64) -> Vec<Vec<Vec<Pipe>>> {
    let count = nodes.len();
    let mut pipes: Vec<Vec<Vec<Pipe>>> =
        (0..count).map(|_| (0..count).map(|_| Vec::new()).collect()).collect();
    for a in 0..count {
        for b in a..count {
            let path_count = if a == b { 1 } else { random.pick(&[1, 1, 1, 2, 3]) };
            for _ in 0..path_count {
                let lossless = a == b || random.percent(30);
                let silent_loss = !lossless && random.percent(30);
                let datagram = if a == b { None } else { random_kind(random) };
                for (from, to) in [(a, b), (b, a)] {
                    if from == a || a != b {
                        let path = random_path(random, largest);
                        let path = with_datagrams(
                            PathProperties { lossless, silent_loss, ..path },
                            datagram,
                        );
                        nodes[from].paths[to].push(path);
                        pipes[from][to].push(random_pipe(&path, random));
                    }
                    if a == b {
                        break;
                    }
                }
            }
        }
    }
    pipes
}

fn violation(bad: Malformed) -> Violation {
    Violation(bad.0.into())
}

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
                node.endpoint.mark_busy(peer);
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
            self.check_copy(from, is_answer, length)?;
            let bytes = self.arena.read(piece, at, length)?.to_vec();
            copy = Some(self.keep_copy(from, bytes));
        }
        self.log_step(|| format!("{from} -> {to} by {path_id} {written:?} {header:?}"));
        self.spend(from, to, &front)?;
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
            self.reap(from)?;
        }
        let node = &mut self.nodes[from];
        let has_room = !is_full(node);
        node.endpoint.set_copying(peer, has_room);
        if !has_room && self.random.percent(10) {
            node.endpoint.solicit_ack(peer);
            self.counts.count("times without room for copies");
        }
        Ok(())
    }

    /// The usage of a path of datagrams; `None` for other paths, and in three of four steps.
    fn flying(&self, from: usize, peer: Peer, path_id: usize) -> Option<InFlightUsage> {
        let is_time = self.steps.is_multiple_of(4);
        is_time.then(|| self.nodes[from].endpoint.in_flight_usage(peer, PathId(path_id as u8)))?
    }

    /// Keeps a copy of bytes that may be retransmitted.
    fn keep_copy(&mut self, from: usize, bytes: Vec<u8>) -> Piece {
        let copy = self.arena.keep(bytes, false);
        self.nodes[from].copies.insert(copy.slot(), copy);
        copy
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
        if is_silent && (is_blackholed || self.random.below(1_000) < self.silent_loss_permille) {
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
        let copy = wants_copy.then(|| self.keep_copy(from, bytes.to_vec()));
        self.nodes[from].endpoint.injected(&passing, path, copy);
        self.counts.count("messages passed the short way");
        self.log_step(|| format!("{from} -> {to} passes by {path_id} {header:?}"));
        self.spend(from, to, &frame)?;
        self.drain(from)?;
        Ok(true)
    }

    /// Counts the eager bytes of a frame that is sent for the first time, and the bytes that it
    /// announces.
    fn spend(&mut self, from: usize, to: usize, front: &[u8]) -> Result<(), Violation> {
        let header = Header::parse(front).map_err(violation)?;
        if !header.kind.is_numbered() {
            return Ok(());
        }
        let head_size = KindHeader::size(header.kind, header.flags);
        let (payload, _) = header.payload(head_size).map_err(violation)?;
        let may_be_cut_up = self.nodes[from].paths[to].iter().any(|path| path.datagram.is_some());
        let next_sequence = &mut self.next_sequence[from][to];
        if header.kind == Kind::Fragment || header.sequence < *next_sequence {
            self.counts.count("frames retransmitted");
            if header.kind == Kind::Fragment {
                self.counts.count("fragments");
            }
            return Ok(());
        }
        // A frame that is too long for a datagram is numbered before it leaves in fragments, and
        // later frames may leave before it.
        require!(
            header.sequence == *next_sequence || may_be_cut_up,
            "{from} leaves numbers out towards {to}: {header:?}"
        );
        *next_sequence = header.sequence + head_size as u64 + payload;
        let head = KindHeader::parse(header.kind, header.flags, &front[HEADER_BYTES..])
            .map_err(violation)?;
        if let KindHeader::Message { long, .. } = head {
            let ahead = long.map_or(0, |long| long.ahead);
            if ahead > 0 {
                self.counts.count("messages sent ahead");
            }
            let (sent, heard) = &mut self.eager[from][to];
            *sent = sent.wrapping_add(payload as u32 + ahead);
            let under_way = sent.wrapping_sub(*heard);
            let window = self.nodes[from].config.eager_window;
            require!(under_way <= window, "{from} sends {under_way} eager bytes to {to}");
        }
        Ok(())
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
            self.nodes[from].endpoint.mark_busy(peer);
            self.drain(from)?;
        }
        Ok(moved)
    }

    pub fn read_front(
        &mut self,
        from: usize,
        to: usize,
        path_id: usize,
    ) -> Result<bool, Violation> {
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
        let is_corrupt = payload > 0 && self.random.percent(self.corrupt_percent);
        let peer = self.peer(to, from);
        let pipe = &mut self.pipes[from][to][path_id];
        let front = pipe.take(front_size);
        if is_corrupt && is_whole && !self.nodes[from].paths[to][path_id].lossless {
            pipe.take(payload as usize);
            self.counts.count("frames corrupted");
            self.log_step(|| format!("{to} <- {from} by {path_id} corrupt {header:?}"));
            let is_bearable = self.nodes[to].endpoint.handle_corrupt_frame(peer, &header);
            self.drain(to)?;
            if !is_bearable {
                self.break_path(from, to, path_id)?;
            }
            return Ok(true);
        }
        let heard = &mut self.eager[to][from].1;
        if header.credit.wrapping_sub(*heard) < 1 << 31 {
            *heard = header.credit;
        }
        let place = self.nodes[to]
            .endpoint
            .handle_frame(peer, PathId(path_id as u8), &header, &front[HEADER_BYTES..])
            .map_err(|fault| Violation(format!("{to} blames {from}: {}: {header:?}", fault.0)))?;
        self.log_step(|| {
            format!("{to} <- {from} by {path_id} {:?} {} {place:?}", header.kind, header.sequence)
        });
        if !matches!(place, PayloadDestination::OutOfOrder { .. }) {
            self.begin_frame(from, to, &header, &front[HEADER_BYTES..], payload, place)?;
        }
        self.drain(to)?;
        if let PayloadDestination::OutOfOrder { frame, whole, .. } = place {
            self.open_early_buffer((from, frame), to, whole, &header, &front[HEADER_BYTES..])?;
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

    /// Records that the destination of a frame is known. The destination may have been known
    /// before.
    fn begin_frame(
        &mut self,
        from: usize,
        to: usize,
        header: &Header,
        head: &[u8],
        payload: u64,
        place: PayloadDestination,
    ) -> Result<(), Violation> {
        let is_first = header.sequence == self.delivered_up_to[from][to];
        if !header.kind.is_numbered() || header.kind == Kind::Fragment || !is_first {
            return Ok(());
        }
        if let Some((sequence, _)) = self.placed_frame[from][to] {
            require!(header.sequence == sequence, "two frames of {from} have a place at {to}");
            self.counts.count("places found twice");
            return Ok(());
        }
        let head_size = KindHeader::size(header.kind, header.flags) as u64;
        let head = KindHeader::parse(header.kind, header.flags, head).map_err(violation)?;
        let message = self.begin_message(from, to, header, &head, payload, place)?;
        self.placed_frame[from][to] = Some((header.sequence, message));
        self.frame_ends[from][to] = header.sequence + head_size + payload;
        Ok(())
    }

    fn begin_message(
        &mut self,
        from: usize,
        to: usize,
        header: &Header,
        head: &KindHeader,
        payload: u64,
        place: PayloadDestination,
    ) -> Result<Option<usize>, Violation> {
        let long = match *head {
            KindHeader::Message { long, .. } => long,
            KindHeader::Ahead { send, offset } => {
                return Ok(self.go_on((from, to, send), offset, offset + payload));
            }
            _ => return Ok(None),
        };
        let (tagged, is_long) = (header.kind == Kind::Tagged, long.is_some());
        let ahead = long.map_or(0, |long| long.ahead as u64);
        let (message, is_wanted) = self.model.arrive(to, from, tagged, payload + ahead, is_long)?;
        let is_right = match place {
            PayloadDestination::Receive { .. } => is_wanted,
            PayloadDestination::NewUnexpected { .. } => !is_wanted,
            _ => false,
        };
        require!(is_right, "message {message} goes to {place:?}, wanted: {is_wanted}");
        if let Some(long) = long.filter(|long| long.ahead > 0) {
            self.ahead.insert((from, to, long.send), (message, payload + ahead));
            return Ok(None);
        }
        Ok(Some(message))
    }

    /// Records that an announced fragment has begun to arrive; returns the message if the fragment
    /// is the last.
    fn go_on(&mut self, key: (usize, usize, u32), _start: u64, end: u64) -> Option<usize> {
        let &(message, whole) = self.ahead.get(&key)?;
        let is_last = end == whole;
        if is_last {
            self.ahead.remove(&key);
        }
        is_last.then_some(message)
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
                self.open_store(from, to, store, size)?;
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
                        self.nodes[to].endpoint.refuse(peer, op, REFUSED);
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

    /// Opens a buffer for a frame that arrived out of order, if the frame has no buffer.
    fn open_early_buffer(
        &mut self,
        key: (usize, u64),
        to: usize,
        whole: u32,
        header: &Header,
        head: &[u8],
    ) -> Result<(), Violation> {
        let head = KindHeader::parse(header.kind, header.flags, head).map_err(violation)?;
        let header = match head {
            KindHeader::Fragment { kind, flags, .. } => {
                Header { kind, flags, length: whole, sequence: key.1, ..*header }
            }
            _ => *header,
        };
        let bytes = vec![0; whole as usize];
        let early = &mut self.nodes[to].early;
        early.entry(key).or_insert(EarlyFrame { header, bytes });
        let mine = || early.iter().filter(|((from, _), _)| *from == key.0);
        let bytes: usize = mine().map(|(_, early)| early.bytes.len()).sum();
        let most = REORDER_WINDOW_BYTES_MAX as usize + FRAME_BODY_BYTES_MAX;
        require!(
            bytes <= most && mine().count() <= REORDER_WINDOW_FRAMES_MAX,
            "{to} keeps {bytes} bytes"
        );
        Ok(())
    }

    fn open_store(
        &mut self,
        from: usize,
        to: usize,
        store: u32,
        size: u64,
    ) -> Result<(), Violation> {
        if size == 0 {
            return Ok(());
        }
        let stores = &mut self.nodes[to].stores;
        let before =
            stores.insert(store, UnexpectedPayload { from, size, bytes: vec![0; size as usize] });
        require!(before.is_none(), "store {store} is in use");
        let stored: u64 = stores.values().filter(|s| s.from == from).map(|s| s.size).sum();
        let window = self.nodes[to].config.eager_window as u64;
        require!(stored <= window, "{to} stores {stored} bytes of {from}");
        Ok(())
    }

    pub fn read_payload(
        &mut self,
        from: usize,
        to: usize,
        path_id: usize,
    ) -> Result<bool, Violation> {
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
        self.put(from, to, path_id, &bytes)?;
        let pipe = &mut self.pipes[from][to][path_id];
        if let Some(incoming) = &mut pipe.incoming {
            incoming.done += now;
            if incoming.done == incoming.payload {
                self.end_frame(from, to, path_id)?;
            }
        }
        Ok(true)
    }

    fn put(
        &mut self,
        from: usize,
        to: usize,
        path_id: usize,
        bytes: &[u8],
    ) -> Result<(), Violation> {
        let Some(IncomingFrame { target, done, .. }) = &mut self.pipes[from][to][path_id].incoming
        else {
            return Ok(());
        };
        match target {
            Target::Piece { piece, at, take } => {
                let left = take.saturating_sub(*done).min(bytes.len() as u64);
                if left > 0 {
                    self.arena.write(*piece, *at + *done, &bytes[..left as usize])?;
                }
            }
            Target::Store { store, at } => {
                if let Some(store) = self.nodes[to].stores.get_mut(store) {
                    let start = (*at + *done) as usize;
                    store.bytes[start..start + bytes.len()].copy_from_slice(bytes);
                }
            }
            Target::Early { frame, at } => {
                let Some(early) = self.nodes[to].early.get_mut(&(from, *frame)) else {
                    return Err(Violation(format!("{to} writes to frame {frame} it has let go")));
                };
                let start = (*at + *done) as usize;
                early.bytes[start..start + bytes.len()].copy_from_slice(bytes);
            }
            Target::Scratch(scratch) => scratch.extend_from_slice(bytes),
            Target::Skip => (),
        }
        Ok(())
    }

    fn end_frame(&mut self, from: usize, to: usize, path_id: usize) -> Result<(), Violation> {
        let Some(mut incoming) = self.pipes[from][to][path_id].incoming.take() else {
            return Ok(());
        };
        let (peer, path) = (self.peer(to, from), PathId(path_id as u8));
        let is_lossless = self.nodes[from].paths[to][path_id].lossless;
        if incoming.payload > 0 && !is_lossless && self.random.percent(self.corrupt_percent) {
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
            && self.placed_frame[from][to].map(|(first, _)| first)
                == Some(incoming.header.sequence);
        let is_early = matches!(incoming.place, PayloadDestination::OutOfOrder { .. });
        if is_placed && !is_early && !(is_diverted && incoming.is_duplicate) {
            self.finish_placed_frame(from, to);
        }
        if let Target::Scratch(scratch) = &mut incoming.target {
            self.nodes[to].scratch[from] = std::mem::take(scratch);
        }
        self.nodes[to].endpoint.handle_payload(peer, path);
        self.drain(to)?;
        self.deliver_early_frames(from, to)
    }

    fn finish_placed_frame(&mut self, from: usize, to: usize) {
        self.delivered_up_to[from][to] = self.frame_ends[from][to];
        if let Some((_, Some(message))) = self.placed_frame[from][to].take() {
            self.model.messages[message].is_delivered = true;
        }
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
        self.pipes[from][to][path_id].incoming = Some(incoming);
        self.put(from, to, path_id, &junk)?;
        self.pipes[from][to][path_id].incoming = None;
        let peer = self.peer(to, from);
        let is_bearable = self.nodes[to].endpoint.handle_corrupt(peer, PathId(path_id as u8));
        self.drain(to)?;
        if !is_bearable {
            self.break_path(from, to, path_id)?;
        }
        Ok(())
    }

    /// Delivers frames that arrived out of order and are next now.
    fn deliver_early_frames(&mut self, from: usize, to: usize) -> Result<(), Violation> {
        let peer = self.peer(to, from);
        while let Some(frame) = self.nodes[to].endpoint.next_reassembled(peer) {
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
            self.begin_frame(from, to, &header, &body, payload, place)?;
            self.drain(to)?;
            let target = self.target(from, to, place, payload)?;
            let busy = self.pipes[from][to][0].incoming.take();
            self.pipes[from][to][0].incoming = Some(IncomingFrame {
                header,
                place,
                target,
                payload,
                done: 0,
                is_duplicate: false,
            });
            self.put(from, to, 0, &body[head_size..])?;
            let mut incoming = std::mem::replace(&mut self.pipes[from][to][0].incoming, busy);
            if let Some(IncomingFrame { target: Target::Scratch(scratch), .. }) = &mut incoming {
                self.nodes[to].scratch[from] = std::mem::take(scratch);
            }
            if self.placed_frame[from][to].map(|(first, _)| first) == Some(frame) {
                self.finish_placed_frame(from, to);
            }
            self.nodes[to].endpoint.handle_payload(peer, REASSEMBLED);
            self.drain(to)?;
        }
        Ok(())
    }
}
