//! The simulated world: processes, links between them, and the driver that moves bytes and does what endpoints want.

use std::collections::BTreeMap;

use landbridge_proto::endpoint::{Action, AtomicRequest, Done, Memory, Passing, Peer, Place, Work};
use landbridge_proto::id::Address;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};
use landbridge_proto::wire::head::Head;

use super::link::{Link, Reading, Target, Written};
use super::memory::{Arena, Piece};
use super::model::{LOST, Model, Ticket};
use super::node::{Node, Pull, Serve, Store, random_config, random_link, random_path};
use super::random::Random;
use super::remote::{self, Announced, REFUSED, Region, Scene};
use super::{Tally, Violation, require};

/// See the module head.
pub struct World {
    pub random: Random,
    pub nodes: Vec<Node>,
    /// `[from][to]`.
    pub links: Vec<Vec<Link>>,
    pub arena: Arena,
    pub model: Model,
    pub announced: Vec<Announced>,
    pub tally: Tally,
    /// Eager bytes under way or stored, by what the frames say: `[from][to]` sent, and heard back.
    eager: Vec<Vec<(u32, u32)>>,
    /// Messages of which announced bytes are still to come, and up to where: by sender, receiver and number.
    ahead: BTreeMap<(usize, usize, u32), (usize, u64)>,
    pulls_fail: u64,
    /// The largest message.
    pub largest: u64,
    /// Contexts given out.
    pub contexts: usize,
    trace: bool,
}

/// More steps than any honest run takes: beyond them somebody talks for ever.
const STEPS_MAX: usize = 2_000_000;

/// The largest message of a run. Large ones are rare: they cost time and find little more.
const SIZES: [u64; 9] = [10, 200, 200, 2_000, 2_000, 2_000, 20_000, 20_000, 300_000];

impl World {
    pub fn new(seed: u64, trace: bool) -> Self {
        let mut random = Random::new(seed);
        let count = random.pick(&[2, 2, 2, 3, 3, 4, 5, 6]);
        let mut arena = Arena::default();
        let window = random.pick(&[2, 16, 100, 1_000, 5_000, 60_000]);
        let largest = random.pick(&SIZES);
        let has_anonymous = random.percent(10);
        let nodes: Vec<Node> = (0..count)
            .map(|index| {
                let anonymous = has_anonymous && index == 0;
                let address =
                    if anonymous { Address::ANONYMOUS } else { Address::new(index as u32 * 7, 0) };
                let paths = (0..count).map(|_| random_path(&mut random, largest)).collect();
                Node::new(
                    random_config(address, window, &mut random),
                    paths,
                    Region::new(index, &mut arena),
                )
            })
            .collect();
        let links =
            (0..count).map(|_| (0..count).map(|_| random_link(&mut random)).collect()).collect();
        let pulls_fail = random.pick(&[0, 0, 20, 100]);
        Self {
            random,
            nodes,
            links,
            arena,
            model: Model::new(count),
            announced: Vec::new(),
            tally: Tally::default(),
            eager: vec![vec![(0, 0); count]; count],
            ahead: BTreeMap::new(),
            pulls_fail,
            largest,
            contexts: 0,
            trace,
        }
    }

    pub fn say(&self, what: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{}", what());
        }
    }

    /// The number that `node` has for `other`.
    pub fn peer(&mut self, node: usize, other: usize) -> Peer {
        if let Some(peer) = self.nodes[node].peers[other] {
            return peer;
        }
        let address = self.nodes[other].config.address;
        let node = &mut self.nodes[node];
        let peer = node.endpoint.peer(address);
        node.peers[other] = Some(peer);
        if self.random.percent(80) {
            node.endpoint.set_path(peer, node.paths[other]);
        }
        peer
    }

    /// Does what the endpoint of `node` wants done, as the drain rule says.
    pub fn drain(&mut self, node: usize) -> Result<(), Violation> {
        let mut atomics = Vec::new();
        while let Some(action) = self.nodes[node].endpoint.poll_action() {
            self.act(node, action, &mut atomics)?;
        }
        for (from, request) in atomics {
            self.perform_atomic(node, from, request)?;
        }
        while let Some(peer) = self.nodes[node].endpoint.next_busy() {
            let other = self.nodes[node].index_of(peer);
            self.nodes[node].ready.insert(other);
        }
        Ok(())
    }

    fn act(
        &mut self,
        index: usize,
        action: Action<Piece>,
        atomics: &mut Vec<(usize, AtomicRequest)>,
    ) -> Result<(), Violation> {
        self.say(|| format!("  {index}: {action:?}"));
        let node = &mut self.nodes[index];
        match action {
            Action::Done(done) => return self.finish(index, done),
            Action::Fill { store, memory, at, length } => {
                let bytes = node.take_store(store)?;
                require!(length <= bytes.len() as u64, "fill of {length} out of store {store}");
                self.arena.write(memory, at, &bytes[..length as usize])?;
            }
            Action::Forget { store } => {
                let forgotten = node.stores.remove(&store);
                require!(forgotten.is_some(), "store {store} is forgotten twice");
            }
            Action::Pull { peer, recv, address, memory, at, length } => {
                let from = node.index_of(peer);
                node.pulls.push_back(Pull { from, recv, address, memory, at, length });
            }
            Action::Serve { peer, op, key, offset, length } => {
                let to = node.index_of(peer);
                node.serves.push_back(Serve { to, op, key, offset, length });
            }
            Action::Atomic { peer, request } => atomics.push((node.index_of(peer), request)),
        }
        Ok(())
    }

    fn finish(&mut self, node: usize, done: Done) -> Result<(), Violation> {
        let source = done.source.map(|peer| self.nodes[node].index_of(peer));
        if done.work == Work::RemoteWrite {
            return self.hear_of_write(node, source, &done);
        }
        let context = done.ticket.context;
        let ticket = self.model.tickets.get(&context);
        require!(ticket.is_none_or(|ticket| ticket.node() == node), "{done:?} of another process");
        let Some(Ticket::Remote(ticket)) = ticket else {
            return self.model.finish(&done, source, &mut self.arena, &mut self.tally);
        };
        let scene = Scene {
            target: self.nodes[ticket.to].region.piece,
            is_lost: self.model.failed[node][ticket.to],
            announced: &self.announced,
            arena: &self.arena,
        };
        ticket.finish(&done, context, &scene, &mut self.tally)?;
        self.arena.free(ticket.piece)?;
        if let Some(result) = ticket.result {
            self.arena.free(result)?;
        }
        self.model.tickets.remove(&context);
        Ok(())
    }

    fn hear_of_write(
        &mut self,
        node: usize,
        source: Option<usize>,
        done: &Done,
    ) -> Result<(), Violation> {
        let write = done.data.and_then(|data| self.announced.get_mut(data as usize));
        let Some(write) = write else {
            return Err(Violation(format!("{done:?} without a write")));
        };
        write.times += 1;
        require!(write.times == 1, "{done:?} twice");
        require!(!write.is_refused, "{done:?} of a write that was refused");
        require!(write.to == node && Some(write.from) == source, "{done:?} from elsewhere");
        Ok(())
    }

    fn perform_atomic(
        &mut self,
        index: usize,
        from: usize,
        request: AtomicRequest,
    ) -> Result<(), Violation> {
        let peer = self.peer(index, from);
        let node = &mut self.nodes[index];
        let operands = std::mem::take(&mut node.scratch[from]);
        match node.region.resolve(request.key, request.offset, request.length as u64) {
            None => node.endpoint.refuse(peer, request.op, REFUSED),
            Some(at) => {
                let piece = node.region.piece;
                let old = remote::perform(&request, &operands, piece, at, &mut self.arena)?;
                if request.fetch {
                    let memory = self.arena.keep(old, false);
                    node.endpoint.answer(peer, request.op, memory);
                }
            }
        }
        self.drain(index)
    }

    /// Answers the oldest read request at `node`; false if there is none.
    fn serve(&mut self, index: usize) -> Result<bool, Violation> {
        let Some(Serve { to, op, key, offset, length }) = self.nodes[index].serves.pop_front()
        else {
            return Ok(false);
        };
        let peer = self.peer(index, to);
        let region = &self.nodes[index].region;
        match region.resolve(key, offset, length) {
            None => self.nodes[index].endpoint.refuse(peer, op, REFUSED),
            Some(at) => {
                let bytes = self.arena.read(region.piece, at, length)?.to_vec();
                let memory = self.arena.keep(bytes, false);
                self.nodes[index].endpoint.serve(peer, op, memory);
            }
        }
        self.drain(index)?;
        Ok(true)
    }

    /// Does the oldest pull at `node`; false if there is none.
    fn pull(&mut self, index: usize) -> Result<bool, Violation> {
        let Some(pull) = self.nodes[index].pulls.pop_front() else {
            return Ok(false);
        };
        // Who has given us up has its memory back: the driver must not find it any more.
        let is_gone = self.model.failed[pull.from][index];
        let outcome = if is_gone || self.random.percent(self.pulls_fail) {
            self.tally.count("pulls that failed");
            Err(())
        } else {
            self.tally.count("pulls");
            let bytes = self.arena.read_address(pull.address, pull.length)?.to_vec();
            self.arena.write(pull.memory, pull.at, &bytes)?;
            Ok(())
        };
        self.nodes[index].endpoint.handle_pulled(pull.recv, outcome);
        self.drain(index)?;
        Ok(true)
    }

    /// Moves something that can move; false if nothing can.
    pub fn step(&mut self) -> Result<bool, Violation> {
        if self.random.percent(10) {
            let node = self.random.index(self.nodes.len());
            self.end_deferral(node)?;
        }
        if self.move_one()? {
            return Ok(true);
        }
        let mut wakes = false;
        for node in 0..self.nodes.len() {
            wakes |= self.end_deferral(node)?;
        }
        Ok(wakes)
    }

    /// The application of `node` asks for progress; true if that brings frames about.
    fn end_deferral(&mut self, node: usize) -> Result<bool, Violation> {
        let before = self.nodes[node].ready.len();
        self.nodes[node].endpoint.end_deferral();
        self.drain(node)?;
        let wakes = self.nodes[node].ready.len() > before;
        if wakes {
            self.tally.count("deferred confirmations");
        }
        Ok(wakes)
    }

    fn move_one(&mut self) -> Result<bool, Violation> {
        let count = self.nodes.len();
        let places = count * count * 4;
        let first = self.random.index(places);
        for place in (first..places).chain(0..first) {
            let (what, from, to) = (place % 4, place / 4 % count, place / 4 / count);
            let moved = match what {
                0 => self.write(from, to)?,
                1 => self.read(from, to)?,
                2 => to == 0 && self.pull(from)?,
                _ => to == 0 && self.serve(from)?,
            };
            if moved {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Runs until nothing moves.
    pub fn settle(&mut self) -> Result<(), Violation> {
        for _ in 0..STEPS_MAX {
            if !self.step()? {
                return Ok(());
            }
        }
        Err(Violation("the processes never come to rest".into()))
    }

    fn write(&mut self, from: usize, to: usize) -> Result<bool, Violation> {
        let link = &mut self.links[from][to];
        let node = &mut self.nodes[from];
        if link.may_resume() {
            let is_whole = link.resume(&self.arena)?;
            if let (true, Some(peer)) = (is_whole, node.peers[to]) {
                node.endpoint.handle_flushed(peer);
                node.endpoint.mark_busy(peer);
                self.drain(from)?;
            }
            return Ok(true);
        }
        if link.rest.is_some() || !node.ready.contains(&to) {
            return Ok(false);
        }
        let Some(peer) = node.peers[to] else {
            return Ok(false);
        };
        let Some(frame) = node.endpoint.poll_transmit(peer) else {
            node.ready.remove(&to);
            return Ok(true);
        };
        let front = frame.front().to_vec();
        let header = Header::parse(&front).map_err(|bad| Violation(bad.0.into()))?;
        let payload = frame.payload.map(|(piece, at, length)| (*piece, at, length));
        let sent = front.len() + payload.map_or(0, |(_, _, length)| length as usize);
        require!(sent == HEADER_BYTES + header.length as usize, "{header:?} has another length");
        let written = link.begin(&front, payload, &self.arena)?;
        if written == Written::Busy {
            self.tally.count("pipes that were busy");
            node.ready.remove(&to);
            return Ok(true);
        }
        self.sent(from, to, &front, written)?;
        Ok(true)
    }

    /// Sends a message the short way; false if something is in its way.
    pub fn pass(
        &mut self,
        from: usize,
        to: usize,
        (tag, data): (Option<u64>, Option<u64>),
        bytes: &[u8],
    ) -> Result<bool, Violation> {
        let peer = self.peer(from, to);
        let passing = Passing { peer, tag, data, size: bytes.len() as u64 };
        let Some(frame) = self.nodes[from].endpoint.pass(&passing) else {
            return Ok(false);
        };
        let frame = [frame.front(), bytes].concat();
        if !self.links[from][to].fits(frame.len()) {
            return Ok(false);
        }
        let header = Header::parse(&frame).map_err(|bad| Violation(bad.0.into()))?;
        self.links[from][to].begin(&frame, None, &self.arena)?;
        self.nodes[from].endpoint.passed(&passing);
        self.tally.count("messages passed the short way");
        self.say(|| format!("{from} -> {to} passes {header:?}"));
        self.spend(from, to, &frame)?;
        self.drain(from)?;
        Ok(true)
    }

    /// Counts the eager bytes of a frame that leaves, and those it announces.
    fn spend(&mut self, from: usize, to: usize, front: &[u8]) -> Result<(), Violation> {
        let bad = |bad: landbridge_proto::wire::Malformed| Violation(bad.0.into());
        let header = Header::parse(front).map_err(bad)?;
        let head = Head::parse(header.kind, header.flags, &front[HEADER_BYTES..]).map_err(bad)?;
        if let Head::Message { long, .. } = head {
            let payload = header.length - Head::size(header.kind, header.flags) as u32;
            let ahead = long.map_or(0, |long| long.ahead);
            if ahead > 0 {
                self.tally.count("messages sent ahead");
            }
            let (sent, heard) = &mut self.eager[from][to];
            *sent = sent.wrapping_add(payload + ahead);
            let under_way = sent.wrapping_sub(*heard);
            let window = self.nodes[from].config.eager_window;
            require!(under_way <= window, "{from} sends {under_way} eager bytes to {to}");
        }
        Ok(())
    }

    fn sent(
        &mut self,
        from: usize,
        to: usize,
        front: &[u8],
        written: Written,
    ) -> Result<(), Violation> {
        self.say(|| format!("{from} -> {to} {written:?} {:?}", Header::parse(front)));
        self.spend(from, to, front)?;
        if written == Written::Part {
            self.tally.count("frames in parts");
        }
        // The caller has just sent to it.
        let peer = self.peer(from, to);
        self.nodes[from].endpoint.transmitted(peer, written == Written::Whole);
        self.drain(from)
    }

    fn read(&mut self, from: usize, to: usize) -> Result<bool, Violation> {
        if self.model.failed[to][from] {
            return Ok(false);
        }
        let had = self.links[from][to].pipe.len();
        let moved = if self.links[from][to].reading.is_some() {
            self.read_payload(from, to)?
        } else {
            self.read_front(from, to)?
        };
        let is_emptier = self.links[from][to].pipe.len() < had;
        if let (true, Some(peer)) = (is_emptier, self.nodes[from].peers[to]) {
            self.nodes[from].endpoint.mark_busy(peer);
            self.drain(from)?;
        }
        Ok(moved)
    }

    fn read_front(&mut self, from: usize, to: usize) -> Result<bool, Violation> {
        let link = &mut self.links[from][to];
        if link.pipe.len() < HEADER_BYTES {
            return Ok(false);
        }
        let header =
            Header::parse(&link.peek(HEADER_BYTES)).map_err(|bad| Violation(bad.0.into()))?;
        let head_size = Head::size(header.kind, header.flags);
        if link.pipe.len() < HEADER_BYTES + head_size {
            return Ok(false);
        }
        let front = link.take(HEADER_BYTES + head_size);
        self.eager[to][from].1 = header.credit;
        let peer = self.peer(to, from);
        let payload = header.length as u64 - head_size as u64;
        let place = self.nodes[to]
            .endpoint
            .handle_frame(peer, header, &front[HEADER_BYTES..])
            .map_err(|fault| Violation(format!("{to} blames {from}: {}: {header:?}", fault.0)))?;
        self.say(|| format!("{to} <- {from} {:?} {place:?}", header.kind));
        let head = Head::parse(header.kind, header.flags, &front[HEADER_BYTES..])
            .map_err(|bad| Violation(bad.0.into()))?;
        let message = self.begin_message(from, to, &header, &head, payload, place)?;
        self.drain(to)?;
        let target = self.target(from, to, place, payload)?;
        self.links[from][to].reading =
            Some(Reading { header, place, target, payload, done: 0, message });
        if payload == 0 {
            self.end_frame(from, to)?;
        }
        Ok(true)
    }

    fn begin_message(
        &mut self,
        from: usize,
        to: usize,
        header: &Header,
        head: &Head,
        payload: u64,
        place: Place,
    ) -> Result<Option<usize>, Violation> {
        let long = match *head {
            Head::Message { long, .. } => long,
            Head::Ahead { send, offset } => {
                return Ok(self.go_on((from, to, send), offset + payload));
            }
            _ => return Ok(None),
        };
        let (tagged, is_long) = (header.kind == Kind::Tagged, long.is_some());
        let ahead = long.map_or(0, |long| long.ahead as u64);
        let (message, is_wanted) = self.model.arrive(to, from, tagged, payload + ahead, is_long)?;
        let is_right = match place {
            Place::Receive { .. } => is_wanted,
            Place::Store { .. } => !is_wanted,
            _ => false,
        };
        require!(is_right, "message {message} goes to {place:?}, wanted: {is_wanted}");
        if let Some(long) = long.filter(|long| long.ahead > 0) {
            self.ahead.insert((from, to, long.send), (message, payload + ahead));
            return Ok(None);
        }
        Ok(Some(message))
    }

    /// An announced piece up to byte `end` has begun to arrive: the message, if it is the last.
    fn go_on(&mut self, key: (usize, usize, u32), end: u64) -> Option<usize> {
        let &(message, whole) = self.ahead.get(&key)?;
        let is_last = end == whole;
        if is_last {
            self.ahead.remove(&key);
        }
        is_last.then_some(message)
    }

    /// Where a payload goes, in terms of the driver.
    fn target(
        &mut self,
        from: usize,
        to: usize,
        place: Place,
        payload: u64,
    ) -> Result<Target, Violation> {
        Ok(match place {
            Place::Nowhere => Target::Skip,
            Place::Receive { .. } | Place::Answer { .. } => {
                let memory = self.nodes[to].endpoint.place_memory(place);
                let Some((piece, at, take)) = memory else {
                    return Err(Violation(format!("{place:?} has no memory")));
                };
                let take = take.min(payload);
                require!(at + take <= piece.size(), "{place:?} outside {piece:?}");
                Target::Piece { piece: *piece, at, take }
            }
            Place::Store { store, size } => {
                require!(payload <= size, "store {store} is smaller than what comes first");
                self.open_store(from, to, store, size)?;
                Target::Store(store)
            }
            Place::Stored { store, at } => {
                let bytes = self.nodes[to].stores.get(&store).map(|store| store.bytes.len() as u64);
                require!(bytes == Some(at), "store {store} holds {bytes:?} bytes, not {at}");
                Target::Store(store)
            }
            Place::Region { op, key, offset } => {
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
            Place::Scratch => {
                self.nodes[to].scratch[from].clear();
                Target::Scratch
            }
        })
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
        let before = stores.insert(store, Store { from, size, bytes: Vec::new() });
        require!(before.is_none(), "store {store} is in use");
        let stored: u64 = stores.values().filter(|s| s.from == from).map(|s| s.size).sum();
        let window = self.nodes[to].config.eager_window as u64;
        require!(stored <= window, "{to} stores {stored} bytes of {from}");
        Ok(())
    }

    fn read_payload(&mut self, from: usize, to: usize) -> Result<bool, Violation> {
        let link = &mut self.links[from][to];
        let Some(reading) = &link.reading else {
            return Ok(false);
        };
        let most = (reading.payload - reading.done).min(link.pipe.len() as u64);
        if most == 0 {
            return Ok(false);
        }
        let now = if self.random.percent(70) { most } else { self.random.within(1..=most) };
        let bytes = link.take(now as usize);
        self.put(from, to, &bytes)?;
        let link = &mut self.links[from][to];
        if let Some(reading) = &mut link.reading {
            reading.done += now;
            if reading.done == reading.payload {
                self.end_frame(from, to)?;
            }
        }
        Ok(true)
    }

    fn put(&mut self, from: usize, to: usize, bytes: &[u8]) -> Result<(), Violation> {
        let Some(Reading { target, done, .. }) = &self.links[from][to].reading else {
            return Ok(());
        };
        match *target {
            Target::Piece { piece, at, take } => {
                let left = take.saturating_sub(*done).min(bytes.len() as u64);
                if left > 0 {
                    self.arena.write(piece, at + done, &bytes[..left as usize])?;
                }
            }
            Target::Store(store) => {
                if let Some(store) = self.nodes[to].stores.get_mut(&store) {
                    store.bytes.extend_from_slice(bytes);
                }
            }
            Target::Scratch => self.nodes[to].scratch[from].extend_from_slice(bytes),
            Target::Skip => (),
        }
        Ok(())
    }

    fn end_frame(&mut self, from: usize, to: usize) -> Result<(), Violation> {
        let Some(reading) = self.links[from][to].reading.take() else {
            return Ok(());
        };
        self.say(|| format!("{to} has {:?} of {from} in {:?}", reading.header.kind, reading.place));
        if let Some(message) = reading.message {
            self.model.messages[message].is_taken = true;
        }
        let peer = self.peer(to, from);
        self.nodes[to].endpoint.handle_payload(peer);
        self.drain(to)
    }

    /// `node` learns that `other` is lost.
    pub fn lose(&mut self, node: usize, other: usize) -> Result<(), Violation> {
        self.say(|| format!("{node} loses {other}"));
        let peer = self.peer(node, other);
        self.links[node][other].cut();
        let reading = self.links[other][node].reading.take().and_then(|r| r.message);
        let is_theirs = |&(from, to, _): &(usize, usize, u32)| (from, to) == (other, node);
        let (cut, ahead) =
            std::mem::take(&mut self.ahead).into_iter().partition(|(k, _)| is_theirs(k));
        self.ahead = ahead;
        let cut: BTreeMap<_, (usize, u64)> = cut;
        let unfinished: Vec<usize> = reading.into_iter().chain(cut.values().map(|c| c.0)).collect();
        self.links[other][node].pipe.clear();
        self.links[other][node].cut();
        self.model.fail(node, other, &unfinished);
        let state = &mut self.nodes[node];
        state.pulls.retain(|pull| pull.from != other);
        // Requests are answered all the same: the endpoint must not mind.
        state.endpoint.fail(peer, LOST);
        self.tally.count("peers lost");
        self.drain(node)?;
        self.model.check_failed(node, other)
    }

    /// At the end: nothing is held, nothing is owed.
    pub fn check_rest(&self) -> Result<(), Violation> {
        for (index, node) in self.nodes.iter().enumerate() {
            require!(node.stores.is_empty(), "{index} still stores {} messages", node.stores.len());
            require!(node.endpoint.is_drained(), "{index} is not drained");
            require!(node.endpoint.is_idle(), "{index} holds operations");
            for (other, peer) in node.peers.iter().enumerate() {
                let Some(peer) = *peer else { continue };
                require!(!node.endpoint.has_work_for(peer), "{index} has work for {other}");
                let (sent, heard) = self.eager[index][other];
                let is_live = !self.model.failed[index][other];
                require!(!is_live || sent == heard, "{index} has lost credit with {other}");
            }
        }
        Ok(())
    }
}
