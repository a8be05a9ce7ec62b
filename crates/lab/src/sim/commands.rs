//! Commands of the simulated applications: random commands first, then commands that complete all
//! operations.
//!
//! What enters: a seed. What leaves: counts of events, or a [`Violation`]. What may never happen:
//! an
//! operation does not complete, or a command is accepted or refused against its bound.

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{
    AtomicRequest, CompletionLevel, Message, PathProperties, Peek, Posting, Remote, Ticket,
};
use landbridge_proto::limit::ATOMIC_BYTES_MAX;

use super::datagrams::with_datagrams;
use super::memory::{BLANK, Piece, content};
use super::model::{self, PendingOperation, ReceiveMatch};
use super::node::{PATHS_MAX, random_path};
use super::remote::{
    CONSTANT_BYTES, READ, REGION_BASE, REGION_BYTES, RemoteKind, RemoteOperation, SUM,
    SWAP_IF_EQUAL, WRITE_BYTES_MAX, WriteWithData,
};
use super::schedule::Schedule;
use super::world::World;
use super::{EventCounts, Violation, require};

/// Number of tags; it is small, so that tags of messages and receives often match.
const TAGS: u64 = 4;
/// Steps after which a message is not waited for any more, because other traffic may delay the
/// message.
const VOLLEY_STEPS: usize = 40;
/// The upper half of a tag, which some receives ignore.
const TAG_HIGH: u64 = 0xffff_ffff_0000_0000;

/// The simulated applications, which give commands to the endpoints of their world.
pub struct Applications {
    world: World,
    schedule: Schedule,
    /// Number of contexts given out.
    contexts: usize,
}

impl Applications {
    /// The applications of a world of this seed. With `trace`, every step is printed.
    pub fn new(seed: u64, trace: bool) -> Self {
        let world = World::new(seed, trace);
        Self { world, schedule: Schedule::default(), contexts: 0 }
    }

    /// Runs the world from its seed to its end.
    pub fn run(mut self) -> Result<EventCounts, Violation> {
        let commands = self.world.random.pick(&[5, 10, 20, 40, 100]);
        let eagerness = self.world.random.within(5..=80);
        let (losses, largest) =
            (self.world.random.pick(&[0, 0, 0, 1, 3]), self.world.rates.largest);
        let mut left = commands;
        while left > 0 {
            if self.world.random.percent(eagerness) || !self.schedule.step(&mut self.world)? {
                left -= 1;
                self.command(losses, largest)?;
                if self.world.random.percent(self.world.rates.single_path_percent) {
                    self.schedule.outages.begin_single_path(&mut self.world)?;
                    self.schedule.run_until_idle(&mut self.world)?;
                    self.schedule.outages.end_single_path(&mut self.world)?;
                }
            }
        }
        self.finish_all()?;
        Ok(self.world.counts)
    }

    fn command(&mut self, losses: u64, largest: u64) -> Result<(), Violation> {
        let node = self.world.random.index(self.world.nodes.len());
        match self.world.random.below(100) {
            0..35 => self.send(node, largest),
            35..65 => self.receive(node, largest),
            65..70 => self.receive_many(node, largest),
            70..75 => self.cancel(node),
            75..80 => self.look(node),
            80..84 => self.claim(node, largest),
            84..95 => self.remote(node),
            95 => self.volley(node),
            96 => self.change_path(node),
            _ if self.world.random.percent(losses * 20) => self.break_connection(node),
            _ => Ok(()),
        }
    }

    fn other(&mut self) -> usize {
        self.world.random.index(self.world.nodes.len())
    }

    fn ticket(&mut self) -> Ticket {
        Ticket { context: self.next_context(), notify: self.world.random.percent(80) }
    }

    fn send(&mut self, node: usize, largest: u64) -> Result<(), Violation> {
        let (to, length) = (self.other(), self.world.random.size(largest));
        let tagged = self.world.random.percent(70);
        let high = if self.world.random.percent(20) { 1 << 40 } else { 0 };
        let tag = tagged.then(|| self.world.random.below(TAGS) | high);
        let data = self.world.random.percent(40).then(|| self.world.random.next());
        let level = if self.world.random.percent(50) {
            CompletionLevel::TransmitComplete
        } else {
            CompletionLevel::DeliveryComplete
        };
        self.send_one(node, to, length, (tag, data), level)
    }

    /// Messages between two processes in turn, as a program sends that waits for answers.
    fn volley(&mut self, node: usize) -> Result<(), Violation> {
        let (mut from, mut to) = (node, self.other());
        for _ in 0..self.world.random.within(10..=60) {
            let tag = self.world.random.below(TAGS);
            self.post(to, ReceiveMatch { source: Some(from), tag: Some((tag, 0)) }, 8)?;
            self.send_one(from, to, 8, (Some(tag), None), CompletionLevel::DeliveryComplete)?;
            for _ in 0..VOLLEY_STEPS {
                let is_under_way = !self.world.model.flight[from][to].is_empty();
                if !is_under_way || !self.schedule.step(&mut self.world)? {
                    break;
                }
            }
            (from, to) = (to, from);
        }
        Ok(())
    }

    fn send_one(
        &mut self,
        node: usize,
        to: usize,
        length: u64,
        (tag, data): (Option<u64>, Option<u64>),
        level: CompletionLevel,
    ) -> Result<(), Violation> {
        let next = self.world.model.messages.len();
        if self.world.random.percent(25)
            && self.world.pass(node, to, (tag, data), &content(next, length))?
        {
            self.note_message(node, to, length, (tag, data));
            return Ok(());
        }
        let visible = self.world.random.percent(60);
        let (peer, ticket, message) =
            (self.world.peer(node, to), self.ticket(), self.world.model.messages.len());
        let piece = self.world.arena.keep(content(message, length), visible);
        let sent = self.world.nodes[node].endpoint.send(Message {
            peer,
            memory: piece,
            tag,
            data,
            ticket,
            level,
        });
        if !self.check_accepted(node, sent.is_ok())? {
            return self.world.arena.free(piece).map(drop);
        }
        self.world.log_step(|| {
            format!(
                "{node}: message {message} to {to}: {length} bytes, {tag:x?} {data:x?} {level:?}"
            )
        });
        self.note_message(node, to, length, (tag, data));
        let operation = PendingOperation::Send { node, message, piece, level };
        self.world.model.operations.insert(ticket.context, operation);
        self.world.drain(node)?;
        if let (Ok(op), false) = (sent, visible) {
            self.copy_as_inject(node, op, ticket.context, piece)?;
        }
        Ok(())
    }

    /// Adds a message that has been sent to the model.
    fn note_message(
        &mut self,
        from: usize,
        to: usize,
        length: u64,
        (tag, data): (Option<u64>, Option<u64>),
    ) {
        let message = self.world.model.messages.len();
        self.world.model.messages.push(model::Message {
            from,
            to,
            tag,
            data,
            length,
            is_delivered: false,
            is_whole: false,
            is_received: false,
        });
        if !self.world.model.failed[from][to] {
            self.world.model.flight[from][to].push_back(message);
        }
    }

    /// Replaces the bytes of a message by a copy, as an inject does.
    fn copy_as_inject(
        &mut self,
        node: usize,
        op: u32,
        context: usize,
        old: Piece,
    ) -> Result<(), Violation> {
        let copies = self.world.random.percent(20);
        let Some(memory) = self.world.nodes[node].endpoint.memory_mut(op).filter(|_| copies) else {
            return Ok(());
        };
        let bytes = self.world.arena.free(old)?;
        let copy = self.world.arena.keep(bytes, false);
        *memory = copy;
        if let Some(PendingOperation::Send { piece, .. }) =
            self.world.model.operations.get_mut(&context)
        {
            *piece = copy;
        }
        self.world.counts.count("memory replaced by copies");
        Ok(())
    }

    /// Checks the result [`Full`](landbridge_proto::endpoint::Full) of a command against the bound.
    fn check_accepted(&mut self, node: usize, is_accepted: bool) -> Result<bool, Violation> {
        let operations = self.world.model.operations.values();
        let flying = operations.filter(|t| t.node() == node && t.is_operation()).count();
        let is_full = flying >= self.world.nodes[node].config.operations_max;
        require!(is_full != is_accepted, "{node}: {flying} in flight, accepted: {is_accepted}");
        if !is_accepted {
            self.world.counts.count("commands refused as too many");
        }
        Ok(is_accepted)
    }

    fn wanted(&mut self, tagged: bool) -> ReceiveMatch {
        let source = self.world.random.percent(50).then(|| self.other());
        let tag = tagged.then(|| {
            let ignore = self.world.random.pick(&[0, 0, 1, TAG_HIGH, u64::MAX]);
            (self.world.random.below(TAGS), ignore)
        });
        ReceiveMatch { source, tag }
    }

    fn blank(&mut self, length: u64) -> Piece {
        let visible = self.world.random.percent(70);
        self.world.arena.keep(vec![BLANK; length as usize], visible)
    }

    fn receive(&mut self, node: usize, largest: u64) -> Result<(), Violation> {
        let tagged = self.world.random.percent(70);
        let wanted = self.wanted(tagged);
        let length =
            if self.world.random.percent(70) { largest } else { self.world.random.size(largest) };
        self.post(node, wanted, length)
    }

    fn post(&mut self, node: usize, wanted: ReceiveMatch, length: u64) -> Result<(), Violation> {
        let (ticket, memory) = (self.ticket(), self.blank(length));
        self.world.log_step(|| {
            format!("{node}: receive {} of {length} bytes: {wanted:x?}", ticket.context)
        });
        self.world
            .model
            .operations
            .insert(ticket.context, PendingOperation::recv(node, wanted, memory));
        self.world.model.post(node, wanted, ticket.context);
        let source = wanted.source.map(|other| self.world.peer(node, other));
        let posting = Posting { source, memory, tag: wanted.tag, ticket, multi: false };
        self.world.nodes[node].endpoint.messages_mut().recv(posting);
        self.world.drain(node)
    }

    fn receive_many(&mut self, node: usize, largest: u64) -> Result<(), Violation> {
        let (ticket, mut wanted) = (self.ticket(), self.wanted(false));
        wanted.source = wanted.source.filter(|_| self.world.random.percent(30));
        let length = self.world.random.size(largest * 3).max(1);
        let memory = self.blank(length);
        self.world
            .log_step(|| format!("{node}: multi-receive {} of {length} bytes", ticket.context));
        let least = self.world.nodes[node].config.min_multi_recv;
        self.world
            .model
            .operations
            .insert(ticket.context, PendingOperation::multi(node, wanted.source, memory, least));
        self.world.model.post(node, wanted, ticket.context);
        let source = wanted.source.map(|other| self.world.peer(node, other));
        let posting = Posting { source, memory, tag: None, ticket, multi: true };
        self.world.nodes[node].endpoint.messages_mut().recv(posting);
        self.world.drain(node)
    }

    fn cancel(&mut self, node: usize) -> Result<(), Violation> {
        let is_recv = |t: &PendingOperation| {
            matches!(t, PendingOperation::Recv(_) | PendingOperation::Multi(_))
        };
        let mine: Vec<usize> = self
            .world
            .model
            .operations
            .iter()
            .filter(|(_, ticket)| ticket.node() == node && is_recv(ticket))
            .map(|(context, _)| *context)
            .collect();
        if mine.is_empty() {
            return Ok(());
        }
        let context = self.world.random.pick(&mine);
        self.cancel_one(node, context)
    }

    fn cancel_one(&mut self, node: usize, context: usize) -> Result<(), Violation> {
        self.world.log_step(|| format!("{node}: cancel {context}"));
        let waits = self.world.model.cancel(node, context);
        let cancelled = self.world.nodes[node].endpoint.messages_mut().cancel(context);
        require!(waits == cancelled, "cancel of {context}: {cancelled} instead of {waits}");
        self.world.drain(node)
    }

    fn look(&mut self, node: usize) -> Result<(), Violation> {
        let (wanted, context) = (self.wanted(true), self.next_context());
        let (claim, discard) =
            self.world.random.pick(&[(false, false), (true, false), (false, true)]);
        let found = self.world.model.look(node, &wanted);
        self.world.log_step(|| format!("{node}: look {context} {wanted:x?} finds {found:?}"));
        self.world.counts.count("looks");
        if let (Some(message), true) = (found, claim || discard) {
            self.world.model.remove_unexpected(node, message);
            if claim {
                self.world.model.claimed[node].insert(context, (message, false));
            } else {
                self.world.model.messages[message].is_received = true;
            }
        }
        self.world.model.operations.insert(context, PendingOperation::Look { node, found });
        let source = wanted.source.map(|other| self.world.peer(node, other));
        let (tag, ignore) = wanted.tag.unwrap_or((0, 0));
        let look = Peek { source, tag, ignore, context, claim, discard };
        self.world.nodes[node].endpoint.messages_mut().peek(look);
        self.world.drain(node)?;
        require!(
            !self.world.model.operations.contains_key(&context),
            "look {context} is not answered"
        );
        Ok(())
    }

    fn claim(&mut self, node: usize, largest: u64) -> Result<(), Violation> {
        let Some((context, (message, is_lost))) = self.world.model.claimed[node].pop_first() else {
            return Ok(());
        };
        self.world.counts.count("claims");
        self.world.log_step(|| format!("{node}: claim {context}, message {message}"));
        let ticket = Ticket { context, notify: true };
        if self.world.random.percent(30) {
            self.world
                .model
                .operations
                .insert(context, PendingOperation::Discard { node, message, is_lost });
            let was_there = self.world.nodes[node].endpoint.messages_mut().claim_discard(ticket);
            require!(was_there, "claim {context} finds nothing");
            return self.world.drain(node);
        }
        let length = self.world.random.size(largest);
        let memory = self.blank(length);
        let wanted = ReceiveMatch {
            source: Some(self.world.model.messages[message].from),
            tag: Some((0, 0)),
        };
        let mut operation = PendingOperation::recv(node, wanted, memory);
        if let PendingOperation::Recv(recv) = &mut operation {
            recv.message = Some(message);
            recv.is_lost = is_lost;
        }
        self.world.model.operations.insert(context, operation);
        let posting = Posting { source: None, memory, tag: Some((0, 0)), ticket, multi: false };
        let was_there = self.world.nodes[node].endpoint.messages_mut().claim(posting);
        require!(was_there, "claim {context} finds nothing");
        self.world.drain(node)
    }

    fn change_path(&mut self, node: usize) -> Result<(), Violation> {
        let other = self.other();
        let (peer, path_id) = (self.world.peer(node, other), self.world.random.index(PATHS_MAX));
        let path = random_path(&mut self.world.random, self.world.rates.largest);
        if let Some(known) = self.world.nodes[node].paths[other].get_mut(path_id) {
            let path =
                PathProperties { lossless: known.lossless, silent_loss: known.silent_loss, ..path };
            let path = with_datagrams(path, known.datagram);
            *known = path;
            self.world.nodes[node].endpoint.channel_mut(peer).set_path(PathId(path_id as u8), path);
        }
        Ok(())
    }

    /// Breaks the connection to another process. Each side gets notified of the loss, one side
    /// perhaps later.
    fn break_connection(&mut self, node: usize) -> Result<(), Violation> {
        let other = self.other();
        if other == node || self.world.model.failed[node][other] {
            return Ok(());
        }
        self.world.lose_peer(node, other)?;
        for _ in 0..self.world.random.below(30) {
            self.schedule.step(&mut self.world)?;
        }
        self.world.lose_peer(other, node)
    }

    fn remote(&mut self, node: usize) -> Result<(), Violation> {
        let to = self.other();
        match self.world.random.below(3) {
            0 => self.remote_write(node, to),
            1 => self.remote_read(node, to),
            _ => self.remote_atomic(node, to),
        }
    }

    /// Key and offset of `at`, or a wrong pair that the target must refuse. Returns whether the
    /// pair is wrong.
    fn aim(
        &mut self,
        to: usize,
        at: u64,
        length: u64,
        peer: landbridge_proto::endpoint::Peer,
    ) -> (Remote, bool) {
        let key = self.world.nodes[to].region.key;
        let good = Remote { peer, key, offset: REGION_BASE + at };
        match self.world.random.below(10) {
            0 => (Remote { key: key + 100, ..good }, true),
            // The range ends one byte outside of the region; an empty range would be valid.
            1 if length > 0 => {
                let offset = REGION_BASE + REGION_BYTES + 1 - length;
                (Remote { offset, ..good }, true)
            }
            _ => (good, false),
        }
    }

    fn remote_write(&mut self, node: usize, to: usize) -> Result<(), Violation> {
        let length = self.world.random.size(WRITE_BYTES_MAX);
        let Some(at) = self.world.nodes[to].region.reserve(length) else {
            return Ok(());
        };
        let (peer, ticket) = (self.world.peer(node, to), self.ticket());
        let (remote, is_refused) = self.aim(to, at, length, peer);
        let data = self.world.random.percent(40).then_some(self.world.model.writes_with_data.len());
        let piece = self.world.arena.keep(content(ticket.context, length), false);
        self.world.log_step(|| {
            format!("{node}: write {} of {length} to {to}: {remote:?}", ticket.context)
        });
        let number = data.map(|data| data as u64);
        let begun = self.world.nodes[node].endpoint.write(remote, piece, number, ticket);
        if !self.check_accepted(node, begun.is_ok())? {
            return self.world.arena.free(piece).map(drop);
        }
        if data.is_some() {
            self.world.model.writes_with_data.push(WriteWithData {
                from: node,
                to,
                is_refused,
                times: 0,
            });
        }
        let what = RemoteKind::Write(data);
        let of = RemoteOperation { node, to, piece, result: None, at, is_refused, what };
        self.world.model.operations.insert(ticket.context, PendingOperation::Remote(of));
        self.world.drain(node)
    }

    fn remote_read(&mut self, node: usize, to: usize) -> Result<(), Violation> {
        let length = self.world.random.size(CONSTANT_BYTES);
        let at = self.world.random.within(0..=CONSTANT_BYTES - length);
        let (peer, ticket) = (self.world.peer(node, to), self.ticket());
        let (remote, is_refused) = self.aim(to, at, length, peer);
        let piece = self.blank(length);
        self.world.log_step(|| {
            format!("{node}: read {} of {length} from {to}: {remote:?}", ticket.context)
        });
        let begun = self.world.nodes[node].endpoint.read(remote, piece, ticket);
        if !self.check_accepted(node, begun.is_ok())? {
            return self.world.arena.free(piece).map(drop);
        }
        let of = RemoteOperation {
            node,
            to,
            piece,
            result: None,
            at,
            is_refused,
            what: RemoteKind::Read,
        };
        self.world.model.operations.insert(ticket.context, PendingOperation::Remote(of));
        self.world.drain(node)
    }

    fn remote_atomic(&mut self, node: usize, to: usize) -> Result<(), Violation> {
        let most = if self.world.random.percent(10) { ATOMIC_BYTES_MAX as u64 } else { 64 };
        let length = self.world.random.within(1..=most);
        let Some(at) = self.world.nodes[to].region.reserve(length) else {
            return Ok(());
        };
        let (peer, ticket) = (self.world.peer(node, to), self.ticket());
        let (remote, is_refused) = self.aim(to, at, length, peer);
        let (operation, fetch, parts) = self.world.random.pick(&[
            (SUM, false, 1),
            (SUM, true, 1),
            (SWAP_IF_EQUAL, true, 2),
            (READ, true, 0),
        ]);
        let operands = self.operands(to, at, length, parts, ticket.context);
        let piece = self.world.arena.keep(operands.clone(), false);
        let result = fetch.then(|| self.blank(length));
        let request = AtomicRequest {
            op: 0,
            operation,
            datatype: 1,
            fetch,
            compare: parts == 2,
            length: length as u32,
            key: remote.key,
            offset: remote.offset,
        };
        self.world.log_step(|| format!("{node}: atomic {} at {to}: {request:?}", ticket.context));
        let begun = self.world.nodes[node].endpoint.atomic(peer, request, piece, result, ticket);
        if !self.check_accepted(node, begun.is_ok())? {
            result.map_or(Ok(Vec::new()), |result| self.world.arena.free(result))?;
            return self.world.arena.free(piece).map(drop);
        }
        let what = RemoteKind::Atomic { request, operands };
        let of = RemoteOperation { node, to, piece, result, at, is_refused, what };
        self.world.model.operations.insert(ticket.context, PendingOperation::Remote(of));
        self.world.drain(node)
    }

    fn operands(&mut self, to: usize, at: u64, length: u64, parts: u64, id: usize) -> Vec<u8> {
        let mut operands = content(id, length * parts);
        if parts == 2 && self.world.random.percent(50) {
            // The comparison succeeds.
            let old = content(super::remote::pattern(to), REGION_BYTES);
            operands[length as usize..].copy_from_slice(&old[at as usize..][..length as usize]);
        }
        operands
    }

    /// Completes all operations, and checks that all of them complete.
    fn finish_all(&mut self) -> Result<(), Violation> {
        self.world.log_step(|| "the end".into());
        if self.world.random.percent(40) {
            self.schedule.outages.begin_single_path(&mut self.world)?;
        }
        self.schedule.run_until_idle(&mut self.world)?;
        while self.receive_what_waits()? {
            self.schedule.run_until_idle(&mut self.world)?;
        }
        self.cancel_what_waits()?;
        if let Some((context, ticket)) = self.world.model.operations.first_key_value() {
            let (node, what) = (ticket.node(), ticket.describe());
            return Err(Violation(format!("operation {context} of {node} is stuck: {what}")));
        }
        for node in 0..self.world.nodes.len() {
            for other in 0..self.world.nodes.len() {
                if let Some(peer) = self.world.nodes[node].peers[other] {
                    self.world.nodes[node].endpoint.channel_mut(peer).goodbye();
                    self.world.drain(node)?;
                }
            }
        }
        self.schedule.run_until_idle(&mut self.world)?;
        self.schedule.outages.end_single_path(&mut self.world)?;
        self.schedule.run_until_idle(&mut self.world)?;
        self.world.check_idle()
    }

    /// Receives, claims or drops every waiting message; returns false if no message waits.
    fn receive_what_waits(&mut self) -> Result<bool, Violation> {
        let mut found = false;
        for node in 0..self.world.nodes.len() {
            while !self.world.model.claimed[node].is_empty() {
                self.claim(node, 100)?;
                found = true;
            }
            for class in 0..2 {
                while let Some(&id) = self.world.model.match_queues[node][class].unexpected.first()
                {
                    let message = &self.world.model.messages[id];
                    let tag = message.tag.map(|tag| (tag, 0));
                    let wanted = ReceiveMatch { source: Some(message.from), tag };
                    let length = message.length;
                    self.post(node, wanted, length)?;
                    found = true;
                }
            }
        }
        Ok(found)
    }

    fn cancel_what_waits(&mut self) -> Result<(), Violation> {
        for node in 0..self.world.nodes.len() {
            for class in 0..2 {
                while let Some(posted) = self.world.model.match_queues[node][class].posted.first() {
                    let context = posted.context;
                    self.cancel_one(node, context)?;
                }
            }
        }
        Ok(())
    }

    fn next_context(&mut self) -> usize {
        self.contexts += 1;
        self.contexts
    }
}
