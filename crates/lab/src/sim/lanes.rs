//! Frames between simulated processes, by one or several pipes, which break, come back and spoil what they carry.
//!
//! A pipe that is not lossless breaks at any moment, in the middle of a frame as well; each side may still read what
//! had arrived. What is spoilt is what a checksum would show: a payload in its place, or one that never gets there.

use landbridge_proto::channel::{PathId, SPAN_BYTES_MAX, SPAN_FRAMES_MAX};
use landbridge_proto::endpoint::{Flying, KEPT, Memory, Passing, Path, Peer, Place};
use landbridge_proto::limit::FRAME_BODY_BYTES_MAX;
use landbridge_proto::wire::Malformed;
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};
use landbridge_proto::wire::head::Head;

use super::bounds::check_window;
use super::datagrams::{random_kind, with_datagrams};
use super::link::{Link, Reading, Target, Written};
use super::memory::Piece;
use super::node::{Early, Node, Store, random_link, random_path};
use super::random::Random;
use super::remote::REFUSED;
use super::world::World;
use super::{Violation, require};

/// Paths between two processes.
pub const LANES_MAX: usize = 3;

/// A pipe for every path of every two processes; both ends of a path are of one kind.
pub fn random_lanes(nodes: &mut [Node], random: &mut Random, largest: u64) -> Vec<Vec<Vec<Link>>> {
    let count = nodes.len();
    let mut links: Vec<Vec<Vec<Link>>> =
        (0..count).map(|_| (0..count).map(|_| Vec::new()).collect()).collect();
    for a in 0..count {
        for b in a..count {
            let lanes = if a == b { 1 } else { random.pick(&[1, 1, 1, 2, 3]) };
            for _ in 0..lanes {
                let lossless = a == b || random.percent(30);
                let silent = !lossless && random.percent(30);
                let datagram = if a == b { None } else { random_kind(random) };
                for (from, to) in [(a, b), (b, a)] {
                    if from == a || a != b {
                        let path = random_path(random, largest);
                        let path = with_datagrams(Path { lossless, silent, ..path }, datagram);
                        nodes[from].paths[to].push(path);
                        links[from][to].push(random_link(&path, random));
                    }
                    if a == b {
                        break;
                    }
                }
            }
        }
    }
    links
}

fn violation(bad: Malformed) -> Violation {
    Violation(bad.0.into())
}

impl World {
    pub fn write(&mut self, from: usize, to: usize, lane: usize) -> Result<bool, Violation> {
        let Some(link) = self.links[from][to].get_mut(lane) else {
            return Ok(false);
        };
        let path = PathId(lane as u8);
        let node = &mut self.nodes[from];
        if link.may_resume() {
            let is_whole = link.resume(&self.arena)?;
            if let (true, Some(peer)) = (is_whole, node.peers[to]) {
                node.endpoint.handle_flushed(peer, path);
                node.endpoint.mark_busy(peer);
                self.drain(from)?;
            }
            return Ok(true);
        }
        if link.rest.is_some() || !node.ready.contains(&(to, lane)) {
            return Ok(false);
        }
        let Some(peer) = node.peers[to] else {
            return Ok(false);
        };
        self.allow_copies(from, peer)?;
        let before = self.flying(from, peer, lane);
        let node = &mut self.nodes[from];
        let Some(frame) = node.endpoint.poll_transmit(peer, path) else {
            node.ready.remove(&(to, lane));
            return Ok(true);
        };
        let front = frame.front().to_vec();
        let header = Header::parse(&front).map_err(violation)?;
        let payload = frame.payload.map(|(piece, at, length)| (*piece, at, length));
        let (wants_copy, must_let_go) = (frame.wants_copy, frame.must_let_go);
        let sent = front.len() + payload.map_or(0, |(_, _, length)| length as usize);
        require!(sent == HEADER_BYTES + header.length as usize, "{header:?} has another length");
        let written = self.enter((from, to, lane), &front, payload)?;
        if written == Written::Busy {
            self.tally.count("pipes that were busy");
            self.nodes[from].ready.remove(&(to, lane));
            return Ok(true);
        }
        let mut copy = None;
        if let (true, Some((piece, at, length))) = (wants_copy, payload) {
            let is_answer = matches!(header.kind, Kind::ReadData | Kind::AtomicReply);
            self.check_copy(from, is_answer, length)?;
            let bytes = self.arena.read(piece, at, length)?.to_vec();
            copy = Some(self.keep_copy(from, bytes));
        }
        self.say(|| format!("{from} -> {to} by {lane} {written:?} {header:?}"));
        self.spend(from, to, &front)?;
        if written == Written::Part {
            self.tally.count("frames in parts");
        }
        if must_let_go {
            self.links[from][to][lane].own_rest(&mut self.arena)?;
        }
        let is_flushed = written == Written::Whole || must_let_go;
        self.nodes[from].endpoint.transmitted(peer, path, is_flushed, copy);
        if let (Some(before), Some(after)) = (before, self.flying(from, peer, lane)) {
            check_window(&before, &after)?;
        }
        self.drain(from)?;
        Ok(true)
    }

    /// Says whether there is room for copies, as a driver does before it asks for a frame.
    fn allow_copies(&mut self, from: usize, peer: Peer) -> Result<(), Violation> {
        let is_full = |node: &Node| node.copied_bytes() >= node.copies_max;
        if is_full(&self.nodes[from]) {
            self.reap(from)?;
        }
        let node = &mut self.nodes[from];
        let has_room = !is_full(node);
        node.endpoint.set_copying(peer, has_room);
        if !has_room && self.random.percent(10) {
            node.endpoint.solicit(peer);
            self.tally.count("times without room for copies");
        }
        Ok(())
    }

    /// What is under way by a path of datagrams, if this is one, and it is looked at now.
    fn flying(&self, from: usize, peer: Peer, lane: usize) -> Option<Flying> {
        let is_time = self.steps.is_multiple_of(4);
        is_time.then(|| self.nodes[from].endpoint.flying(peer, PathId(lane as u8)))?
    }

    /// A copy of what may have to go again.
    fn keep_copy(&mut self, from: usize, bytes: Vec<u8>) -> Piece {
        let copy = self.arena.keep(bytes, false);
        self.nodes[from].copies.insert(copy.slot(), copy);
        copy
    }

    /// A frame enters a path, as far as there is room.
    fn enter(
        &mut self,
        (from, to, lane): (usize, usize, usize),
        front: &[u8],
        payload: Option<(Piece, u64, u64)>,
    ) -> Result<Written, Violation> {
        if self.has_datagrams(from, to, lane) {
            let bytes = match payload {
                Some((piece, at, length)) => self.arena.read(piece, at, length)?,
                None => &[],
            };
            self.send_datagram((from, to, lane), [front, bytes].concat())?;
            return Ok(Written::Whole);
        }
        let is_dead = self.dead[from][to][lane];
        let is_silent = self.nodes[from].paths[to][lane].silent;
        if is_silent && (is_dead || self.random.below(1_000) < self.vanishes) {
            self.tally.count("frames that vanished");
            self.has_swallowed = true;
            self.say(|| format!("what goes from {from} to {to} by {lane} vanishes:"));
            return Ok(Written::Whole);
        }
        self.links[from][to][lane].begin(front, payload, &self.arena)
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
        self.allow_copies(from, peer)?;
        let lane = self.random.index(self.links[from][to].len());
        let path = PathId(lane as u8);
        let Some(frame) = self.nodes[from].endpoint.pass(&passing, path) else {
            return Ok(false);
        };
        let wants_copy = frame.wants_copy;
        let frame = [frame.front(), bytes].concat();
        if !self.links[from][to][lane].fits(frame.len()) {
            return Ok(false);
        }
        let header = Header::parse(&frame).map_err(violation)?;
        if !(self.dead[from][to][lane] && self.nodes[from].paths[to][lane].silent) {
            self.links[from][to][lane].begin(&frame, None, &self.arena)?;
        }
        let copy = wants_copy.then(|| self.keep_copy(from, bytes.to_vec()));
        self.nodes[from].endpoint.passed(&passing, path, copy);
        self.tally.count("messages passed the short way");
        self.say(|| format!("{from} -> {to} passes by {lane} {header:?}"));
        self.spend(from, to, &frame)?;
        self.drain(from)?;
        Ok(true)
    }

    /// Counts the eager bytes of a frame that leaves for the first time, and those it announces.
    fn spend(&mut self, from: usize, to: usize, front: &[u8]) -> Result<(), Violation> {
        let header = Header::parse(front).map_err(violation)?;
        if !header.kind.is_numbered() {
            return Ok(());
        }
        let head_size = Head::size(header.kind, header.flags);
        let (payload, _) = header.payload(head_size).map_err(violation)?;
        let may_be_cut_up = self.nodes[from].paths[to].iter().any(|path| path.datagram.is_some());
        let numbered = &mut self.numbered[from][to];
        if header.kind == Kind::Fragment || header.sequence < *numbered {
            self.tally.count("frames sent again");
            if header.kind == Kind::Fragment {
                self.tally.count("fragments");
            }
            return Ok(());
        }
        // What is too long for a datagram is numbered before it leaves, in pieces, and others may leave before it.
        require!(
            header.sequence == *numbered || may_be_cut_up,
            "{from} leaves numbers out towards {to}: {header:?}"
        );
        *numbered = header.sequence + head_size as u64 + payload;
        let head =
            Head::parse(header.kind, header.flags, &front[HEADER_BYTES..]).map_err(violation)?;
        if let Head::Message { long, .. } = head {
            let ahead = long.map_or(0, |long| long.ahead);
            if ahead > 0 {
                self.tally.count("messages sent ahead");
            }
            let (sent, heard) = &mut self.eager[from][to];
            *sent = sent.wrapping_add(payload as u32 + ahead);
            let under_way = sent.wrapping_sub(*heard);
            let window = self.nodes[from].config.eager_window;
            require!(under_way <= window, "{from} sends {under_way} eager bytes to {to}");
        }
        Ok(())
    }

    pub fn read(&mut self, from: usize, to: usize, lane: usize) -> Result<bool, Violation> {
        if self.model.failed[to][from] || lane >= self.links[from][to].len() {
            return Ok(false);
        }
        if self.has_datagrams(from, to, lane) {
            return self.receive_datagrams(from, to, lane);
        }
        if self.dead[from][to][lane] && !self.nodes[from].paths[to][lane].silent {
            // It is still under way.
            return Ok(false);
        }
        let had = self.links[from][to][lane].pipe.len();
        let moved = if self.links[from][to][lane].reading.is_some() {
            self.read_payload(from, to, lane)?
        } else {
            self.read_front(from, to, lane)?
        };
        let is_emptier = self.links[from][to][lane].pipe.len() < had;
        if let (true, Some(peer)) = (is_emptier, self.nodes[from].peers[to]) {
            self.nodes[from].endpoint.mark_busy(peer);
            self.drain(from)?;
        }
        Ok(moved)
    }

    pub fn read_front(&mut self, from: usize, to: usize, lane: usize) -> Result<bool, Violation> {
        let link = &mut self.links[from][to][lane];
        if link.pipe.len() < HEADER_BYTES {
            return Ok(false);
        }
        let header = Header::parse(&link.peek(HEADER_BYTES)).map_err(violation)?;
        let head_size = Head::size(header.kind, header.flags);
        let (payload, check) = header.payload(head_size).map_err(violation)?;
        let front_size = HEADER_BYTES + head_size + check;
        if link.pipe.len() < front_size {
            return Ok(false);
        }
        let is_whole = link.pipe.len() as u64 >= front_size as u64 + payload;
        let is_spoilt = payload > 0 && self.random.percent(self.spoils);
        let peer = self.peer(to, from);
        let link = &mut self.links[from][to][lane];
        let front = link.take(front_size);
        if is_spoilt && is_whole && !self.nodes[from].paths[to][lane].lossless {
            link.take(payload as usize);
            self.tally.count("frames spoilt");
            self.say(|| format!("{to} <- {from} by {lane} spoilt {header:?}"));
            let is_bearable = self.nodes[to].endpoint.handle_spoilt_frame(peer, &header);
            self.drain(to)?;
            if !is_bearable {
                self.break_lane(from, to, lane)?;
            }
            return Ok(true);
        }
        let heard = &mut self.eager[to][from].1;
        if header.credit.wrapping_sub(*heard) < 1 << 31 {
            *heard = header.credit;
        }
        let place = self.nodes[to]
            .endpoint
            .handle_frame(peer, PathId(lane as u8), &header, &front[HEADER_BYTES..])
            .map_err(|fault| Violation(format!("{to} blames {from}: {}: {header:?}", fault.0)))?;
        self.say(|| {
            format!("{to} <- {from} by {lane} {:?} {} {place:?}", header.kind, header.sequence)
        });
        if !matches!(place, Place::Early { .. }) {
            self.begin_frame(from, to, &header, &front[HEADER_BYTES..], payload, place)?;
        }
        self.drain(to)?;
        if let Place::Early { frame, whole, .. } = place {
            self.open_early((from, frame), to, whole, &header, &front[HEADER_BYTES..])?;
        }
        let target = self.target(from, to, place, payload)?;
        if let Place::Early { frame, at, .. } = place
            && header.kind != Kind::Fragment
            && let Some(early) = self.nodes[to].early.get_mut(&(from, frame))
        {
            early.bytes[..at as usize]
                .copy_from_slice(&front[HEADER_BYTES..HEADER_BYTES + head_size]);
        }
        self.links[from][to][lane].reading =
            Some(Reading { header, place, target, payload, done: 0, is_elsewhere: false });
        if payload == 0 {
            self.end_frame(from, to, lane)?;
        }
        Ok(true)
    }

    /// A frame has its place. It may have had it before.
    fn begin_frame(
        &mut self,
        from: usize,
        to: usize,
        header: &Header,
        head: &[u8],
        payload: u64,
        place: Place,
    ) -> Result<(), Violation> {
        let is_first = header.sequence == self.taken[from][to];
        if !header.kind.is_numbered() || header.kind == Kind::Fragment || !is_first {
            return Ok(());
        }
        if let Some((sequence, _)) = self.opened[from][to] {
            require!(header.sequence == sequence, "two frames of {from} have a place at {to}");
            self.tally.count("places found again");
            return Ok(());
        }
        let head_size = Head::size(header.kind, header.flags) as u64;
        let head = Head::parse(header.kind, header.flags, head).map_err(violation)?;
        let message = self.begin_message(from, to, header, &head, payload, place)?;
        self.opened[from][to] = Some((header.sequence, message));
        self.ends[from][to] = header.sequence + head_size + payload;
        Ok(())
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
                return Ok(self.go_on((from, to, send), offset, offset + payload));
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

    /// An announced piece has begun to arrive: the message, if it is the last.
    fn go_on(&mut self, key: (usize, usize, u32), _start: u64, end: u64) -> Option<usize> {
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
                Target::Store { store, at: 0 }
            }
            Place::Stored { store, at } => {
                let kept = self.nodes[to].stores.get(&store);
                let fits = kept.is_some_and(|store| at + payload <= store.size);
                require!(fits, "store {store} does not hold {at}+{payload}");
                Target::Store { store, at }
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
            Place::Scratch => Target::Scratch(Vec::new()),
            Place::Early { frame, at, .. } => {
                let early = self.nodes[to].early.get(&(from, frame));
                let bytes = early.map_or(0, |early| early.bytes.len() as u64);
                require!(bytes >= at as u64 + payload, "{place:?} does not hold {payload}");
                self.tally.count("frames that came early");
                Target::Early { frame, at: at as u64 }
            }
        })
    }

    /// A buffer for a frame that has come early, if there is none.
    fn open_early(
        &mut self,
        key: (usize, u64),
        to: usize,
        whole: u32,
        header: &Header,
        head: &[u8],
    ) -> Result<(), Violation> {
        let head = Head::parse(header.kind, header.flags, head).map_err(violation)?;
        let header = match head {
            Head::Fragment { kind, flags, .. } => {
                Header { kind, flags, length: whole, sequence: key.1, ..*header }
            }
            _ => *header,
        };
        let bytes = vec![0; whole as usize];
        let early = &mut self.nodes[to].early;
        early.entry(key).or_insert(Early { header, bytes });
        let mine = || early.iter().filter(|((from, _), _)| *from == key.0);
        let bytes: usize = mine().map(|(_, early)| early.bytes.len()).sum();
        let most = SPAN_BYTES_MAX as usize + FRAME_BODY_BYTES_MAX;
        require!(bytes <= most && mine().count() <= SPAN_FRAMES_MAX, "{to} keeps {bytes} bytes");
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
        let before = stores.insert(store, Store { from, size, bytes: vec![0; size as usize] });
        require!(before.is_none(), "store {store} is in use");
        let stored: u64 = stores.values().filter(|s| s.from == from).map(|s| s.size).sum();
        let window = self.nodes[to].config.eager_window as u64;
        require!(stored <= window, "{to} stores {stored} bytes of {from}");
        Ok(())
    }

    pub fn read_payload(&mut self, from: usize, to: usize, lane: usize) -> Result<bool, Violation> {
        let link = &mut self.links[from][to][lane];
        let Some(reading) = &link.reading else {
            return Ok(false);
        };
        let most = (reading.payload - reading.done).min(link.pipe.len() as u64);
        if most == 0 {
            return Ok(false);
        }
        let now = if self.random.percent(70) { most } else { self.random.within(1..=most) };
        let bytes = link.take(now as usize);
        self.put(from, to, lane, &bytes)?;
        let link = &mut self.links[from][to][lane];
        if let Some(reading) = &mut link.reading {
            reading.done += now;
            if reading.done == reading.payload {
                self.end_frame(from, to, lane)?;
            }
        }
        Ok(true)
    }

    fn put(&mut self, from: usize, to: usize, lane: usize, bytes: &[u8]) -> Result<(), Violation> {
        let Some(Reading { target, done, .. }) = &mut self.links[from][to][lane].reading else {
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

    fn end_frame(&mut self, from: usize, to: usize, lane: usize) -> Result<(), Violation> {
        let Some(mut reading) = self.links[from][to][lane].reading.take() else {
            return Ok(());
        };
        let (peer, path) = (self.peer(to, from), PathId(lane as u8));
        let is_lossless = self.nodes[from].paths[to][lane].lossless;
        if reading.payload > 0 && !is_lossless && self.random.percent(self.spoils) {
            return self.spoil(from, to, lane, reading);
        }
        self.say(|| format!("{to} has {:?} of {from} in {:?}", reading.header.kind, reading.place));
        let is_diverted = matches!(reading.target, Target::Skip);
        // A signal has the number of the next new byte, which need not be new any more when it comes.
        // A fragment never ends a frame: all of it come early, or are known.
        let is_opened = reading.header.kind.is_numbered()
            && reading.header.kind != Kind::Fragment
            && self.opened[from][to].map(|(first, _)| first) == Some(reading.header.sequence);
        let is_early = matches!(reading.place, Place::Early { .. });
        if is_opened && !is_early && !(is_diverted && reading.is_elsewhere) {
            self.end_opened(from, to);
        }
        if let Target::Scratch(scratch) = &mut reading.target {
            self.nodes[to].scratch[from] = std::mem::take(scratch);
        }
        self.nodes[to].endpoint.handle_payload(peer, path);
        self.drain(to)?;
        self.take_kept(from, to)
    }

    fn end_opened(&mut self, from: usize, to: usize) {
        self.taken[from][to] = self.ends[from][to];
        if let Some((_, Some(message))) = self.opened[from][to].take() {
            self.model.messages[message].is_taken = true;
        }
    }

    /// The payload that has arrived is not what was sent.
    fn spoil(
        &mut self,
        from: usize,
        to: usize,
        lane: usize,
        mut reading: Reading,
    ) -> Result<(), Violation> {
        self.tally.count("payloads spoilt");
        self.say(|| format!("{to} has {:?} of {from} spoilt", reading.header));
        let junk = vec![0xee; reading.payload as usize];
        reading.done = 0;
        self.links[from][to][lane].reading = Some(reading);
        self.put(from, to, lane, &junk)?;
        self.links[from][to][lane].reading = None;
        let peer = self.peer(to, from);
        let is_bearable = self.nodes[to].endpoint.handle_spoilt(peer, PathId(lane as u8));
        self.drain(to)?;
        if !is_bearable {
            self.break_lane(from, to, lane)?;
        }
        Ok(())
    }

    /// Takes in the frames that came early and are next now.
    fn take_kept(&mut self, from: usize, to: usize) -> Result<(), Violation> {
        let peer = self.peer(to, from);
        while let Some(frame) = self.nodes[to].endpoint.next_kept(peer) {
            let Some(Early { header, bytes: body }) = self.nodes[to].early.remove(&(from, frame))
            else {
                return Err(Violation(format!("{to} has let go of frame {frame} of {from}")));
            };
            let kept = self.nodes[to].endpoint.handle_kept(peer, &body);
            let (place, head_size) =
                kept.map_err(|fault| Violation(format!("{to} blames {from}: {}", fault.0)))?;
            self.say(|| format!("{to} takes in {frame} of {from}: {place:?}"));
            let payload = (body.len() - head_size) as u64;
            self.begin_frame(from, to, &header, &body, payload, place)?;
            self.drain(to)?;
            let target = self.target(from, to, place, payload)?;
            let busy = self.links[from][to][0].reading.take();
            self.links[from][to][0].reading =
                Some(Reading { header, place, target, payload, done: 0, is_elsewhere: false });
            self.put(from, to, 0, &body[head_size..])?;
            let mut reading = std::mem::replace(&mut self.links[from][to][0].reading, busy);
            if let Some(Reading { target: Target::Scratch(scratch), .. }) = &mut reading {
                self.nodes[to].scratch[from] = std::mem::take(scratch);
            }
            if self.opened[from][to].map(|(first, _)| first) == Some(frame) {
                self.end_opened(from, to);
            }
            self.nodes[to].endpoint.handle_payload(peer, KEPT);
            self.drain(to)?;
        }
        Ok(())
    }
}
