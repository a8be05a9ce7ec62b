//! The expected behaviour of messages, in the simplest form and without code of the implementation.
//!
//! Enters: every command, the delivery of a message's first frame, every failure, every completion.
//! Leaves: a [`Violation`] if a completion is not what MPI allows: wrong receive, bytes, length,
//! tag, data or source; too early; twice.
//!
//! The model implements the definition of matching: arrivals and receives stand in lists, and the
//! oldest match counts. The model demands that the first frames of one sender arrive in the order
//! of its sends; it never derives this order from frames.

use std::collections::{BTreeMap, VecDeque};

use landbridge_proto::endpoint::{
    CompletionKind, CompletionLevel, Failure, Memory, OperationCompletion,
};

use super::memory::{Arena, BLANK, Piece, content};
use super::remote::{RemoteOperation, WriteWithData};
use super::{EventCounts, Violation, require};

/// A message, from its send on.
pub struct Message {
    pub from: usize,
    pub to: usize,
    pub tag: Option<u64>,
    pub data: Option<u64>,
    pub length: u64,
    /// The message's first fragment has been delivered.
    pub is_delivered: bool,
    /// The first fragment was the whole message.
    pub is_whole: bool,
    /// The receiver has received all bytes that it accepts.
    pub is_received: bool,
}

/// An unfinished operation, with the data for the check of its completion.
pub enum PendingOperation {
    Send { node: usize, message: usize, piece: Piece, level: CompletionLevel },
    Recv(Recv),
    Multi(Multi),
    Look { node: usize, found: Option<usize> },
    Discard { node: usize, message: usize, is_lost: bool },
    Remote(RemoteOperation),
}

/// A receive.
pub struct Recv {
    pub node: usize,
    pub source: Option<usize>,
    pub piece: Piece,
    pub tagged: bool,
    pub message: Option<usize>,
    pub is_cancelled: bool,
    /// The message that the receive claimed had lost its sender.
    pub is_lost: bool,
}

/// A multi-receive.
pub struct Multi {
    pub node: usize,
    pub source: Option<usize>,
    pub piece: Piece,
    least: u64,
    used: u64,
    is_closed: bool,
    is_cancelled: bool,
    /// The only source of the receive was lost before the receive was posted, so the receive ends
    /// after the messages that had arrived.
    has_lost_source: bool,
    /// Start and number of each unfinished message in the buffer.
    parts: Vec<(u64, usize)>,
}

/// A posted receive without a message.
pub struct PostedReceive {
    pub context: usize,
    source: Option<usize>,
    tag: u64,
    ignore: u64,
}

/// The messages that a receive or a probe accepts.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveMatch {
    pub source: Option<usize>,
    /// Tag and ignored bits; `None` for untagged messages.
    pub tag: Option<(u64, u64)>,
}

/// Posted receives and unexpected messages of one process and class.
#[derive(Default)]
pub struct MatchQueues {
    pub posted: Vec<PostedReceive>,
    pub unexpected: Vec<usize>,
}

/// The state of the model.
pub struct Model {
    pub messages: Vec<Message>,
    /// Messages that were sent and have not arrived: `[from][to]`.
    pub flight: Vec<Vec<VecDeque<usize>>>,
    pub match_queues: Vec<[MatchQueues; 2]>,
    /// Claimed messages, by context; true if the sender was lost before the message was complete.
    pub claimed: Vec<BTreeMap<usize, (usize, bool)>>,
    pub operations: BTreeMap<usize, PendingOperation>,
    /// Writes that notify their target, by their completion data.
    pub writes_with_data: Vec<WriteWithData>,
    /// Whether a process has given a peer up: `[at][peer]`.
    pub failed: Vec<Vec<bool>>,
}

/// The errno of a lost peer.
pub const LOST: i32 = 103;

impl ReceiveMatch {
    fn accepts(&self, message: &Message) -> bool {
        let (tag, ignore) = self.tag.unwrap_or((0, 0));
        self.tag.is_some() == message.tag.is_some()
            && (message.tag.unwrap_or(0) ^ tag) & !ignore == 0
            && self.source.is_none_or(|source| source == message.from)
    }

    pub fn class(&self) -> usize {
        self.tag.is_some() as usize
    }
}

impl PostedReceive {
    fn wanted(&self, tagged: bool) -> ReceiveMatch {
        ReceiveMatch { source: self.source, tag: tagged.then_some((self.tag, self.ignore)) }
    }
}

impl PendingOperation {
    pub fn recv(node: usize, wanted: ReceiveMatch, piece: Piece) -> Self {
        PendingOperation::Recv(Recv {
            node,
            source: wanted.source,
            piece,
            tagged: wanted.tag.is_some(),
            message: None,
            is_cancelled: false,
            is_lost: false,
        })
    }

    pub fn multi(node: usize, source: Option<usize>, piece: Piece, least: u64) -> Self {
        PendingOperation::Multi(Multi {
            node,
            source,
            piece,
            least: least.max(1),
            used: 0,
            is_closed: false,
            is_cancelled: false,
            has_lost_source: false,
            parts: Vec::new(),
        })
    }

    pub fn describe(&self) -> String {
        match self {
            PendingOperation::Send { message, level, .. } => {
                format!("message {message}, {level:?}")
            }
            PendingOperation::Recv(recv) => format!("receive of {:?}", recv.message),
            PendingOperation::Multi(_) => "multi-receive".into(),
            PendingOperation::Look { .. } | PendingOperation::Discard { .. } => "look".into(),
            PendingOperation::Remote(remote) => format!("remote memory of {}", remote.to),
        }
    }

    pub fn node(&self) -> usize {
        match self {
            PendingOperation::Send { node, .. } | PendingOperation::Look { node, .. } => *node,
            PendingOperation::Discard { node, .. } => *node,
            PendingOperation::Recv(recv) => recv.node,
            PendingOperation::Multi(multi) => multi.node,
            PendingOperation::Remote(remote) => remote.node,
        }
    }

    /// Whether the operation counts against the bound on operations in flight.
    pub fn is_operation(&self) -> bool {
        matches!(self, PendingOperation::Send { .. } | PendingOperation::Remote(_))
    }
}

impl Model {
    pub fn new(nodes: usize) -> Self {
        Self {
            messages: Vec::new(),
            flight: (0..nodes).map(|_| vec![VecDeque::new(); nodes]).collect(),
            match_queues: (0..nodes).map(|_| Default::default()).collect(),
            claimed: vec![BTreeMap::new(); nodes],
            operations: BTreeMap::new(),
            writes_with_data: Vec::new(),
            failed: vec![vec![false; nodes]; nodes],
        }
    }

    /// Posts a receive under `context`, which is already in `operations`.
    pub fn post(&mut self, node: usize, wanted: ReceiveMatch, context: usize) {
        while let Some(at) = self.find_unexpected(node, &wanted) {
            let message = self.match_queues[node][wanted.class()].unexpected.remove(at);
            if !self.bind(context, message) {
                return;
            }
        }
        if wanted.source.is_some_and(|source| self.failed[node][source]) {
            self.close(context);
            return;
        }
        let (tag, ignore) = wanted.tag.unwrap_or((0, 0));
        let posted = PostedReceive { context, source: wanted.source, tag, ignore };
        self.match_queues[node][wanted.class()].posted.push(posted);
    }

    fn find_unexpected(&self, node: usize, wanted: &ReceiveMatch) -> Option<usize> {
        let unexpected = &self.match_queues[node][wanted.class()].unexpected;
        unexpected.iter().position(|&message| wanted.accepts(&self.messages[message]))
    }

    /// Gives a message to the receive of `context`; returns true if the receive accepts further
    /// messages.
    fn bind(&mut self, context: usize, message: usize) -> bool {
        let length = self.messages[message].length;
        match self.operations.get_mut(&context) {
            Some(PendingOperation::Recv(recv)) => {
                recv.message = Some(message);
                false
            }
            Some(PendingOperation::Multi(multi)) => {
                multi.parts.push((multi.used, message));
                multi.used += length.min(multi.piece.size() - multi.used);
                multi.is_closed |= multi.piece.size() - multi.used < multi.least;
                !multi.is_closed
            }
            _ => unreachable!("the model posts receives only"),
        }
    }

    fn close(&mut self, context: usize) {
        if let Some(PendingOperation::Multi(multi)) = self.operations.get_mut(&context) {
            multi.is_closed = true;
            multi.has_lost_source = true;
        }
    }

    /// The oldest unexpected message that a probe finds.
    pub fn look(&self, node: usize, wanted: &ReceiveMatch) -> Option<usize> {
        self.find_unexpected(node, wanted)
            .map(|at| self.match_queues[node][wanted.class()].unexpected[at])
    }

    /// Removes a message from the unexpected messages, so that no receive finds it.
    pub fn remove_unexpected(&mut self, node: usize, message: usize) {
        self.match_queues[node][1].unexpected.retain(|&other| other != message);
    }

    /// Records the arrival of the first frame of the next message from `from`; returns true if a
    /// receive waits for the message.
    pub fn arrive(
        &mut self,
        node: usize,
        from: usize,
        tagged: bool,
        unasked: u64,
        is_long: bool,
    ) -> Result<(usize, bool), Violation> {
        let Some(id) = self.flight[from][node].pop_front() else {
            return Err(Violation(format!("{node} hears of a message that {from} never sent")));
        };
        let message = &mut self.messages[id];
        require!(message.tag.is_some() == tagged, "message {id} arrives out of order");
        require!(unasked <= message.length, "message {id} grows");
        message.is_whole = unasked == message.length;
        require!(message.is_whole || is_long, "message {id} has the wrong head");
        let queues = &self.match_queues[node][tagged as usize];
        let at = queues
            .posted
            .iter()
            .position(|posted| posted.wanted(tagged).accepts(&self.messages[id]));
        let Some(at) = at else {
            self.match_queues[node][tagged as usize].unexpected.push(id);
            return Ok((id, false));
        };
        if !self.bind(queues.posted[at].context, id) {
            self.match_queues[node][tagged as usize].posted.remove(at);
        }
        Ok((id, true))
    }

    /// Cancels a receive; returns whether the cancellation must succeed.
    pub fn cancel(&mut self, node: usize, context: usize) -> bool {
        let waits = self.match_queues[node].iter_mut().any(|queues| {
            let at = queues.posted.iter().position(|posted| posted.context == context);
            at.map(|at| queues.posted.remove(at)).is_some()
        });
        match self.operations.get_mut(&context) {
            Some(PendingOperation::Recv(recv)) if waits => recv.is_cancelled = true,
            Some(PendingOperation::Multi(multi)) if waits => {
                multi.is_closed = true;
                multi.is_cancelled = true;
            }
            _ => (),
        }
        waits
    }

    /// Records that `node` gives `peer` up while the first frames of the messages `unfinished` are
    /// being delivered.
    pub fn fail(&mut self, node: usize, peer: usize, unfinished: &[usize]) {
        self.failed[node][peer] = true;
        for queues in &mut self.match_queues[node] {
            queues.unexpected.retain(|message| !unfinished.contains(message));
            for posted in queues.posted.iter().filter(|posted| posted.source == Some(peer)) {
                if let Some(PendingOperation::Multi(multi)) =
                    self.operations.get_mut(&posted.context)
                {
                    multi.is_closed = true;
                }
            }
            queues.posted.retain(|posted| posted.source != Some(peer));
        }
        for (message, is_lost) in self.claimed[node].values_mut() {
            *is_lost |= unfinished.contains(message);
        }
    }

    /// Checks that no operation of `node` waits for `peer` any more.
    pub fn check_failed(&self, node: usize, peer: usize) -> Result<(), Violation> {
        for (context, ticket) in self.operations.iter().filter(|(_, t)| t.node() == node) {
            let from = |message: &usize| self.messages[*message].from == peer;
            let waits = match ticket {
                PendingOperation::Send { message, .. } => self.messages[*message].to == peer,
                PendingOperation::Remote(remote) => remote.to == peer,
                PendingOperation::Recv(recv) => {
                    recv.message.as_ref().map_or(recv.source == Some(peer), from)
                }
                PendingOperation::Multi(multi) => {
                    multi.source == Some(peer) || multi.parts.iter().any(|(_, m)| from(m))
                }
                PendingOperation::Look { .. } | PendingOperation::Discard { .. } => true,
            };
            require!(!waits, "operation {context} of {node} still waits for {peer}, which is lost");
        }
        Ok(())
    }

    /// Checks the completion of a message operation.
    pub fn finish(
        &mut self,
        done: &OperationCompletion,
        source: Option<usize>,
        arena: &mut Arena,
        counts: &mut EventCounts,
    ) -> Result<(), Violation> {
        let context = done.ticket.context;
        let ticket = self.operations.remove(&context);
        match ticket {
            Some(PendingOperation::Send { node, message, piece, level }) => {
                self.finish_send(done, node, message, level, counts)?;
                arena.free(piece).map(drop)
            }
            Some(PendingOperation::Recv(recv)) => {
                self.finish_recv(done, source, recv, arena, counts)
            }
            Some(PendingOperation::Multi(multi)) => {
                self.finish_multi(done, source, multi, context, arena, counts)
            }
            Some(PendingOperation::Look { node: _, found }) => {
                self.finish_look(done, source, found)
            }
            Some(PendingOperation::Discard { node, message, is_lost }) => {
                if is_lost {
                    return self.expect_lost(done, node, self.messages[message].from);
                }
                self.messages[message].is_received = true;
                self.check_completion(done, source, message, 0)
            }
            _ => Err(Violation(format!("{done:?} is of no operation in flight"))),
        }
    }

    fn finish_send(
        &self,
        done: &OperationCompletion,
        node: usize,
        id: usize,
        level: CompletionLevel,
        counts: &mut EventCounts,
    ) -> Result<(), Violation> {
        let message = &self.messages[id];
        let work =
            if message.tag.is_some() { CompletionKind::TaggedSend } else { CompletionKind::Send };
        require!(done.kind == work, "{done:?} is not of kind {work:?}");
        if done.error.is_some() {
            counts.count("sends failed");
            return self.expect_lost(done, node, message.to);
        }
        counts.count("sends done");
        let is_in = message.is_received || (message.is_delivered && message.is_whole);
        require!(
            level == CompletionLevel::TransmitComplete || is_in,
            "message {id} is not delivered: {done:?}"
        );
        Ok(())
    }

    fn expect_lost(
        &self,
        done: &OperationCompletion,
        node: usize,
        peer: usize,
    ) -> Result<(), Violation> {
        require!(done.error == Some(Failure::Errno(LOST)), "{done:?} hides a lost peer");
        require!(self.failed[node][peer], "{done:?} although {peer} lives");
        Ok(())
    }

    fn finish_recv(
        &mut self,
        done: &OperationCompletion,
        source: Option<usize>,
        recv: Recv,
        arena: &mut Arena,
        counts: &mut EventCounts,
    ) -> Result<(), Violation> {
        let bytes = arena.free(recv.piece)?;
        let work = if recv.tagged { CompletionKind::TaggedRecv } else { CompletionKind::Recv };
        require!(done.kind == work, "{done:?} is not of kind {work:?}");
        require!(!done.released, "{done:?} gives a plain receive's memory back");
        if recv.is_cancelled {
            counts.count("receives cancelled");
            require!(done.error == Some(Failure::Cancelled), "{done:?} was cancelled");
            return Ok(());
        }
        let from = recv.message.map(|id| self.messages[id].from).or(recv.source);
        if let (Some(Failure::Errno(_)), Some(from)) = (done.error, from) {
            counts.count("receives failed");
            return self.expect_lost(done, recv.node, from);
        }
        require!(!recv.is_lost, "{done:?} of a message whose sender was lost");
        let Some(id) = recv.message else {
            return Err(Violation(format!("{done:?} without a message")));
        };
        require!(done.buffer_address == recv.piece.address(), "{done:?} is elsewhere");
        let room = recv.piece.size();
        self.check_received(done, source, id, room, counts)?;
        check_bytes(&bytes, id, done.length)
    }

    /// Checks the receipt of message `id` into a buffer of `room` bytes.
    fn check_received(
        &mut self,
        done: &OperationCompletion,
        source: Option<usize>,
        id: usize,
        room: u64,
        counts: &mut EventCounts,
    ) -> Result<(), Violation> {
        let message = &mut self.messages[id];
        require!(message.is_delivered, "{done:?} before message {id} is in");
        require!(!message.is_received, "message {id} is received twice");
        message.is_received = true;
        let excess = message.length.saturating_sub(room);
        let error = (excess > 0).then_some(Failure::Truncated(excess));
        require!(done.error == error, "{done:?} should say {error:?}");
        counts.count(if error.is_some() { "receives truncated" } else { "receives done" });
        let length = message.length.min(room);
        let error_free = OperationCompletion { error: None, ..*done };
        self.check_completion(&error_free, source, id, length)
    }

    fn check_completion(
        &self,
        done: &OperationCompletion,
        source: Option<usize>,
        id: usize,
        length: u64,
    ) -> Result<(), Violation> {
        let message = &self.messages[id];
        let seen = (done.error, done.length, done.tag, done.data, source);
        let right = (None, length, message.tag.unwrap_or(0), message.data, Some(message.from));
        require!(seen == right, "message {id} is announced as {seen:?} instead of {right:?}");
        Ok(())
    }

    fn finish_look(
        &self,
        done: &OperationCompletion,
        source: Option<usize>,
        found: Option<usize>,
    ) -> Result<(), Violation> {
        match found {
            Some(id) => self.check_completion(done, source, id, self.messages[id].length),
            None => {
                require!(
                    done.error == Some(Failure::NoMessage),
                    "{done:?} found what is not there"
                );
                Ok(())
            }
        }
    }

    fn finish_multi(
        &mut self,
        done: &OperationCompletion,
        source: Option<usize>,
        mut multi: Multi,
        context: usize,
        arena: &mut Arena,
        counts: &mut EventCounts,
    ) -> Result<(), Violation> {
        require!(done.kind == CompletionKind::Recv, "{done:?} of a multi-receive");
        if multi.parts.is_empty() {
            require!(done.released && multi.is_closed, "{done:?} ends an open multi-receive");
            let is_lost = done.error == Some(Failure::Errno(LOST))
                && multi.source.is_some_and(|source| self.failed[multi.node][source]);
            let is_cancelled = done.error == Some(Failure::Cancelled) && multi.is_cancelled;
            require!(is_lost || is_cancelled, "{done:?} ends an idle multi-receive");
            return arena.free(multi.piece).map(drop);
        }
        let base = done.buffer_address.wrapping_sub(multi.piece.address());
        let room = |at: u64| multi.piece.size() - at;
        let at = multi.parts.iter().position(|&(at, id)| {
            let message = &self.messages[id];
            let fits = matches!(done.error, Some(Failure::Errno(_)))
                || (message.length.min(room(at)) == done.length && message.data == done.data);
            at == base && Some(message.from) == source && fits
        });
        let Some(at) = at else {
            return Err(Violation(format!("{done:?} is no part of its multi-receive")));
        };
        let (base, id) = multi.parts.remove(at);
        let is_last = multi.is_closed && multi.parts.is_empty() && !multi.has_lost_source;
        require!(done.released == is_last, "{done:?}: memory given back: {is_last}");
        counts.count("multi-receive parts");
        if let Some(Failure::Errno(_)) = done.error {
            self.expect_lost(done, multi.node, self.messages[id].from)?;
        } else {
            self.check_received(done, source, id, room(base), counts)?;
            let bytes = arena.read(multi.piece, base, done.length)?;
            require!(bytes == content(id, done.length), "message {id} has wrong bytes");
        }
        if is_last {
            return arena.free(multi.piece).map(drop);
        }
        self.operations.insert(context, PendingOperation::Multi(multi));
        Ok(())
    }
}

fn check_bytes(bytes: &[u8], id: usize, length: u64) -> Result<(), Violation> {
    let (message, rest) = bytes.split_at(length as usize);
    require!(message == content(id, length), "message {id} has wrong bytes");
    require!(rest.iter().all(|&byte| byte == BLANK), "message {id} runs over its end");
    Ok(())
}
