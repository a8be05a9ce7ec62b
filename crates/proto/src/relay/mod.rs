//! One relay, as a state machine: frames come in on links and go out on links.
//!
//! What enters: the bytes of attached endpoints and peer relays ([`Relay::handle_input`]), links
//! that come and go, and the time. What leaves: for each link, the bytes to write
//! ([`Relay::slices`]), and the inputs that may go on ([`Relay::poll_resume`]).
//!
//! **Forwarding.** An input hands over a buffer with whatever it has read. Every whole frame in it
//! is assigned to an output as a *piece* of that buffer; nothing is copied. The driver then writes
//! each touched output once, straight from the buffer, and what the output does not take is copied
//! into its queue ([`Relay::keep`]). A frame is forwarded only when it is whole, so an input that
//! dies in the middle of one breaks no output.
//!
//! **Back-pressure.** An output whose queue has reached its bound takes no more: the input whose
//! next frame is for it stops there, and waits in the output's line. When half of the bound is
//! free, the line moves: one input at a time, each for at most one buffer, then to the end of the
//! line. Newcomers never pass the line.
//!
//! **Breaks.** An endpoint that leaves, or a peer relay that stays away too long, turns the frames
//! that wait for it into [`Kind::Unreachable`] frames to their sources. A peer relay that comes back
//! says how many bytes it has taken in; if that is all that was sent, the stream goes on and nobody
//! notices; else every channel with a hole is reported to its source.
//!
//! What may never happen: a byte is lost, doubled or overtaken within a channel without its source
//! being told; memory beyond the bounds below; an input that waits for ever while its output moves.
//!
//! **Drain rule.** After [`Relay::handle_input`], drain [`Relay::poll_flush`] (write, `handle_sent`,
//! `keep`) before the buffer is touched again or another input is handled.

mod port;
#[cfg(test)]
mod tests;

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::id::{Address, ClusterId};
use crate::limit::{
    EAGER_TOTAL_BYTES, HEAD_BYTES_MAX, HOPS_MAX, RELAY_PAYLOAD_BYTES_MAX, RELAY_WINDOW_BYTES,
};
use crate::route::queue::Pool;
use crate::route::table::{LinkId, Range, Route, Table};
use crate::wire::Malformed;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use port::{Party, Piece, Port, State};

/// Most bytes of a frame that a relay takes.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + HEAD_BYTES_MAX + RELAY_PAYLOAD_BYTES_MAX;

/// Queue towards an endpoint. An endpoint that computes for a while must not hold up the link that it
/// shares with others, so there is room for all that may come to it unasked, and four windows of long
/// messages that it has asked for.
pub const ENDPOINT_QUEUE_BYTES_MAX: usize = (EAGER_TOTAL_BYTES + 4 * RELAY_WINDOW_BYTES) as usize;

/// Queue towards a peer relay. Small, since whoever wants to send waits fairly outside, while what
/// is inside delays everybody: eight frames, so that the output never runs dry.
pub const PEER_QUEUE_BYTES_MAX: usize = 8 * FRAME_BYTES_MAX;

/// All queues together; as it fills up, each queue's bound shrinks to what is left.
pub const TOTAL_QUEUE_BYTES: usize = 1 << 30;

/// What a queue may hold however full the relay is, so that everything keeps moving.
pub const QUEUE_BYTES_MIN: usize = 2 * FRAME_BYTES_MAX;

/// How long frames wait for an endpoint that has not attached yet. Ranks of a job start within
/// seconds of each other; a rank that never comes must not stall its senders for ever.
pub const ATTACH_MILLIS_MAX: u64 = 30_000;

/// How long frames wait for a peer relay. Long enough for it to be restarted or rerouted.
pub const PEER_AWAY_MILLIS_MAX: u64 = 60_000;

/// Unreachable frames may exceed a queue's bound by this much; beyond, they are dropped and
/// counted (the source hears again with its next frame). Otherwise two relays whose queues are full
/// of them could wait for each other.
const NOTICE_BYTES_RESERVE: usize = 64 << 10;

const _: () = {
    assert!(QUEUE_BYTES_MIN <= PEER_QUEUE_BYTES_MAX);
    assert!(PEER_QUEUE_BYTES_MAX <= ENDPOINT_QUEUE_BYTES_MAX);
};

/// What the relay has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames given to an output.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Frames whose source was told that the target cannot be reached.
    pub unreachable: u64,
    /// Unreachable frames that found no room.
    pub notices_dropped: u64,
    /// Links closed because of what they sent.
    pub malformed: u64,
    /// How often an input had to wait for an output.
    pub pauses: u64,
    /// Bytes lost when the link to a peer relay broke.
    pub lost_bytes: u64,
}

/// What became of an input's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Bytes that are dealt with.
    pub bytes: usize,
    /// Why the rest is not.
    pub stop: Stop,
}

/// Why an input's buffer was not taken further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The rest is nothing or the beginning of a frame: read on.
    Partial,
    /// The next frame's output is full: keep the rest, read nothing, until
    /// [`Relay::poll_resume`] names this link.
    Full,
    /// The next frame breaks the protocol: close the link.
    Broken(Malformed),
}

/// What a peer relay's return has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reunion {
    /// Bytes that were sent to it before and have not arrived.
    pub lost_bytes: u64,
    /// Channels whose sources were told so.
    pub channels: usize,
}

/// See the module head.
#[derive(Debug)]
pub struct Relay {
    table: Table,
    ports: Vec<Option<Port>>,
    free: Vec<LinkId>,
    pool: Pool,
    flush: VecDeque<LinkId>,
    resume: VecDeque<LinkId>,
    /// Inputs that need not wait any longer, since their output is gone.
    released: VecDeque<LinkId>,
    /// The input whose turn it is, and the output that gave it.
    turn: Option<(LinkId, LinkId)>,
    notices: Vec<Header>,
    now_millis: u64,
    away: usize,
    counters: Counters,
    /// [`ENDPOINT_QUEUE_BYTES_MAX`]; less in tests that fill it.
    endpoint_bound: usize,
}

impl Relay {
    /// The relay of cluster `own`; `clusters[n]` says which processes are in cluster `n`. All peer
    /// relays are away.
    ///
    /// # Errors
    /// If the map contradicts itself.
    pub fn new(
        own: ClusterId,
        clusters: Vec<Range>,
        now_millis: u64,
    ) -> Result<Self, &'static str> {
        let mut relay = Self {
            table: Table::new(own, clusters)?,
            ports: Vec::new(),
            free: Vec::new(),
            pool: Pool::default(),
            flush: VecDeque::new(),
            resume: VecDeque::new(),
            released: VecDeque::new(),
            turn: None,
            notices: Vec::new(),
            now_millis,
            away: 0,
            counters: Counters::default(),
            endpoint_bound: ENDPOINT_QUEUE_BYTES_MAX,
        };
        for number in 0..relay.table.cluster_count() {
            let cluster = ClusterId(number as u16);
            if cluster != own {
                let link = relay.open_port(Party::Peer(cluster));
                relay.table.set_peer(cluster, link);
            }
        }
        Ok(relay)
    }

    /// What the relay has done so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Bytes of memory in queues.
    pub fn queued_bytes(&self) -> usize {
        self.pool.used_bytes()
    }

    /// The cluster of a process of the job.
    pub fn cluster_of(&self, address: Address) -> Option<ClusterId> {
        self.table.cluster_of(address)
    }

    /// The port of the peer relay of `cluster`, connected or not.
    pub fn peer(&self, cluster: ClusterId) -> Option<LinkId> {
        self.table.peer(cluster)
    }

    /// Whether `address` is attached, and by which incarnation.
    pub fn incarnation(&self, address: Address) -> Option<(LinkId, u32)> {
        let Route::Link(link) = self.table.route(address) else { return None };
        match self.ports.get(link.0 as usize)?.as_ref()? {
            Port { party: Party::Endpoint(_), state: State::Up { incarnation }, .. } => {
                Some((link, *incarnation))
            }
            _ => None,
        }
    }

    // ---- links come and go -------------------------------------------------------------

    /// An endpoint of the own cluster has attached. Frames that waited for it are in its queue.
    ///
    /// # Errors
    /// If it does not belong here, or is attached already ([`Relay::detach`] the older first).
    pub fn attach(&mut self, address: Address, incarnation: u32) -> Result<LinkId, &'static str> {
        if address == Address::ANONYMOUS || self.cluster_of(address).is_none() {
            return Err("no process of the job has its address");
        }
        if self.cluster_of(address) != Some(self.table.own()) {
            return Err("its process belongs to another cluster");
        }
        let link = match self.table.route(address) {
            Route::Link(link) if self.port(link).is_up() => {
                return Err("its address is attached already");
            }
            Route::Link(link) => link,
            _ => self.open_port(Party::Endpoint(address)),
        };
        self.table.set_endpoint(address, Some(link));
        self.set_state(link, State::Up { incarnation });
        self.touch(link);
        Ok(link)
    }

    /// An endpoint's link is gone: what waits for it becomes unreachable.
    pub fn detach(&mut self, link: LinkId) {
        let Party::Endpoint(address) = self.port(link).party else { return };
        self.leave_line(link);
        self.set_state(link, State::Lost);
        self.give_up_queue(link);
        self.table.set_endpoint(address, None);
        self.release_line(link);
        self.ports[link.0 as usize] = None;
        self.free.push(link);
    }

    /// Bytes taken in from the peer relay of `link` so far, in whole frames: what it must be told
    /// when the link is made again.
    pub fn received(&self, link: LinkId) -> u64 {
        self.port(link).received
    }

    /// The link to a peer relay is up. `incarnation` differs for each start of the peer, and
    /// `received` is what it says it has taken in from this relay.
    pub fn connect_peer(&mut self, link: LinkId, incarnation: u32, received: u64) -> Reunion {
        let port = self.port(link);
        // It may have taken in more than this relay has sent: from an earlier start of it.
        let lost_bytes = port.sent().saturating_sub(received);
        if port.incarnation != incarnation {
            self.port_mut(link).received = 0;
        }
        self.port_mut(link).incarnation = incarnation;
        self.set_state(link, State::Up { incarnation });
        let holes = self.port(link).holes(lost_bytes);
        let channels = holes.len();
        for (source, target) in holes {
            self.notify(source, target);
        }
        self.counters.lost_bytes += lost_bytes;
        self.port_mut(link).restart_stream(received);
        self.touch(link);
        self.release_line(link);
        Reunion { lost_bytes, channels }
    }

    /// The link to a peer relay is down. What waits for it goes on waiting, for a while.
    pub fn disconnect_peer(&mut self, link: LinkId) {
        self.leave_line(link);
        let now = self.now_millis;
        self.set_state(link, State::Away { since: now });
        let Self { ports, pool, .. } = self;
        if let Some(port) = &mut ports[link.0 as usize] {
            port.drop_begun_frame(pool);
        }
    }

    // ---- frames ------------------------------------------------------------------------

    /// Deals with the frames at the front of what was read from a link. Header bytes that change
    /// on the way (hops) are changed in `bytes`.
    pub fn handle_input(&mut self, from: LinkId, bytes: &mut [u8]) -> Taken {
        let mut at = 0;
        let stop = loop {
            match self.handle_frame(from, bytes, at) {
                Ok(0) => break Stop::Partial,
                Ok(length) => at += length,
                Err(stop) => break stop,
            }
        };
        if let Stop::Broken(_) = stop {
            self.counters.malformed += 1;
        }
        self.port_mut(from).received += at as u64;
        Taken { bytes: at, stop }
    }

    /// Deals with the frame at `at`; gives its length, or 0 if it is not whole.
    #[inline]
    fn handle_frame(&mut self, from: LinkId, bytes: &mut [u8], at: usize) -> Result<usize, Stop> {
        let rest = &bytes[at..];
        if rest.len() < HEADER_BYTES {
            return Ok(0);
        }
        let header = self.admit(from, rest).map_err(Stop::Broken)?;
        let length = HEADER_BYTES + header.length as usize;
        if rest.len() < length {
            return Ok(0);
        }
        match self.table.route(header.target) {
            _ if header.hops >= HOPS_MAX => self.turn_back(&header),
            Route::Link(to) => return self.forward(from, to, bytes, at, &header),
            Route::Awaited => {
                let to = self.open_port(Party::Endpoint(header.target));
                self.table.set_endpoint(header.target, Some(to));
                return self.forward(from, to, bytes, at, &header);
            }
            Route::Left | Route::Nowhere => self.turn_back(&header),
        }
        Ok(length)
    }

    /// Reads a header, and checks that this link may send such a frame.
    #[inline]
    fn admit(&self, from: LinkId, bytes: &[u8]) -> Result<Header, Malformed> {
        let header = Header::parse(bytes)?;
        if HEADER_BYTES + header.length as usize > FRAME_BYTES_MAX {
            return Err(Malformed("a frame is longer than relays take"));
        }
        match self.port(from).party {
            Party::Endpoint(address) => {
                if header.source != address {
                    return Err(Malformed("a frame does not come from the endpoint of its link"));
                }
                if header.kind == Kind::Unreachable {
                    return Err(Malformed("only relays may say that a target is unreachable"));
                }
            }
            Party::Peer(cluster) => {
                if self.table.cluster_of(header.source) != Some(cluster) {
                    return Err(Malformed("a frame does not come from the cluster of its link"));
                }
                if self.table.cluster_of(header.target) != Some(self.table.own()) {
                    return Err(Malformed("a frame from another relay is not for this cluster"));
                }
            }
        }
        Ok(header)
    }

    #[inline]
    fn forward(
        &mut self,
        from: LinkId,
        to: LinkId,
        bytes: &mut [u8],
        at: usize,
        header: &Header,
    ) -> Result<usize, Stop> {
        let length = HEADER_BYTES + header.length as usize;
        let bound = self.bound(to);
        let its_turn = self.turn == Some((from, to));
        let port = self.port_mut(to);
        if let State::Lost = port.state {
            self.turn_back(header);
            return Ok(length);
        }
        if port.waiting_bytes() >= bound || (!port.line.is_empty() && !its_turn) {
            self.join_line(from, to);
            return Err(Stop::Full);
        }
        bytes[at + 6] += 1;
        port.take(Piece { at, length }, header);
        self.counters.frames += 1;
        self.counters.bytes += length as u64;
        self.touch(to);
        Ok(length)
    }

    /// The bound of a queue, given how full the relay is.
    #[inline]
    fn bound(&self, link: LinkId) -> usize {
        let left = TOTAL_QUEUE_BYTES.saturating_sub(self.pool.used_bytes());
        let most = match self.port(link).party {
            Party::Endpoint(_) => self.endpoint_bound,
            Party::Peer(_) => PEER_QUEUE_BYTES_MAX,
        };
        left.clamp(QUEUE_BYTES_MIN, most)
    }

    // ---- writing -----------------------------------------------------------------------

    /// The next output that has something new to write. Ends with `None` when all are dealt with.
    pub fn poll_flush(&mut self) -> Option<LinkId> {
        loop {
            if self.flush.is_empty() && !self.notices.is_empty() {
                self.queue_notices();
            }
            let link = self.flush.pop_front()?;
            if let Some(port) = &mut self.ports[link.0 as usize] {
                port.in_flush = false;
                return Some(link);
            }
        }
    }

    /// Whether the output may write: it is connected.
    pub fn is_up(&self, link: LinkId) -> bool {
        self.ports.get(link.0 as usize).and_then(Option::as_ref).is_some_and(Port::is_up)
    }

    /// Whether something waits for the output.
    pub fn has_output(&self, link: LinkId) -> bool {
        self.port(link).waiting_bytes() > 0
    }

    /// Whether frames are waiting whose time limit must be watched: call
    /// [`Relay::handle_time`] every second or so.
    pub fn needs_time(&self) -> bool {
        self.away > 0
    }

    /// What the output is to write, in order: its queue, then its pieces of `buffer` (the one last
    /// given to `handle_input`; empty if its pieces have been kept).
    pub fn slices<'a>(&'a self, link: LinkId, buffer: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let port = self.port(link);
        let pieces = port.pieces.iter().map(|piece| &buffer[piece.at..piece.at + piece.length]);
        port.queue.slices().chain(pieces)
    }

    /// Lengths of the frames that wait for the output, in order; of the first one, what is left.
    pub fn frame_lengths(&self, link: LinkId) -> impl Iterator<Item = usize> {
        self.port(link).frame_lengths()
    }

    /// The output has taken `bytes` bytes from the front of what it was to write.
    pub fn handle_sent(&mut self, link: LinkId, bytes: usize) {
        let bound = self.bound(link);
        let Self { ports, pool, resume, .. } = self;
        let Some(port) = &mut ports[link.0 as usize] else { return };
        port.sent_bytes(pool, bytes);
        if !port.line.is_empty() && !port.in_resume && port.waiting_bytes() <= bound / 2 {
            port.in_resume = true;
            resume.push_back(link);
        }
    }

    /// Copies what the output has not taken out of `buffer`, which may be used again afterwards.
    pub fn keep(&mut self, link: LinkId, buffer: &[u8]) {
        let Self { ports, pool, .. } = self;
        if let Some(port) = &mut ports[link.0 as usize] {
            port.keep(pool, buffer);
        }
    }

    /// The next input whose turn it is: hand its rest to `handle_input` again, or read on if there
    /// is none.
    pub fn poll_resume(&mut self) -> Option<LinkId> {
        self.turn = None;
        while let Some(input) = self.released.pop_front() {
            // It may have left, or wait for another output by now.
            let port = self.ports[input.0 as usize].as_ref();
            if port.is_some_and(|port| port.waits_for.is_none()) {
                return Some(input);
            }
        }
        while let Some(output) = self.resume.front().copied() {
            let bound = self.bound(output);
            let next = match &mut self.ports[output.0 as usize] {
                Some(port) if port.waiting_bytes() < bound => port.line.pop_front(),
                _ => None,
            };
            match next {
                Some(input) => {
                    // Outputs take turns too.
                    self.resume.rotate_left(1);
                    self.turn = Some((input, output));
                    self.port_mut(input).waits_for = None;
                    return Some(input);
                }
                None => {
                    self.resume.pop_front();
                    if let Some(port) = &mut self.ports[output.0 as usize] {
                        port.in_resume = false;
                    }
                }
            }
        }
        None
    }

    // ---- time --------------------------------------------------------------------------

    /// Tells the time, in milliseconds from any fixed start, and gives up what has waited too long.
    pub fn handle_time(&mut self, now_millis: u64) {
        self.now_millis = now_millis;
        if self.away == 0 {
            return;
        }
        for number in 0..self.ports.len() {
            let link = LinkId(number as u32);
            let late = self.ports[number].as_ref().is_some_and(|port| port.is_late(now_millis));
            if late {
                self.give_up(link);
            }
        }
    }

    fn give_up(&mut self, link: LinkId) {
        match self.port(link).party {
            Party::Endpoint(_) => self.detach(link),
            Party::Peer(_) => {
                self.set_state(link, State::Lost);
                self.give_up_queue(link);
                self.release_line(link);
            }
        }
    }

    // ---- helpers -----------------------------------------------------------------------

    #[inline]
    fn port(&self, link: LinkId) -> &Port {
        // A driver that names a link it has closed has lost track of who is who.
        self.ports[link.0 as usize].as_ref().expect("the link is open")
    }

    #[inline]
    fn port_mut(&mut self, link: LinkId) -> &mut Port {
        // See `port`.
        self.ports[link.0 as usize].as_mut().expect("the link is open")
    }

    /// A new port, away until something connects it.
    fn open_port(&mut self, party: Party) -> LinkId {
        let port = Port::new(party, State::Away { since: self.now_millis });
        self.away += 1;
        if let Some(link) = self.free.pop() {
            self.ports[link.0 as usize] = Some(port);
            return link;
        }
        self.ports.push(Some(port));
        LinkId(self.ports.len() as u32 - 1)
    }

    fn set_state(&mut self, link: LinkId, state: State) {
        let before = core::mem::replace(&mut self.port_mut(link).state, state);
        self.away -= matches!(before, State::Away { .. }) as usize;
        self.away += matches!(state, State::Away { .. }) as usize;
    }

    #[inline]
    fn touch(&mut self, link: LinkId) {
        let port = self.port_mut(link);
        if !port.in_flush {
            port.in_flush = true;
            self.flush.push_back(link);
        }
    }

    fn join_line(&mut self, from: LinkId, to: LinkId) {
        self.counters.pauses += 1;
        self.port_mut(from).waits_for = Some(to);
        self.port_mut(to).line.push_back(from);
        // The output may be idle already: then nobody else would move its line.
        let bound = self.bound(to);
        let port = self.port_mut(to);
        if !port.in_resume && port.waiting_bytes() < bound {
            port.in_resume = true;
            self.resume.push_back(to);
        }
    }

    /// `link` waits no longer.
    fn leave_line(&mut self, link: LinkId) {
        if let Some(output) = self.port_mut(link).waits_for.take() {
            self.port_mut(output).line.retain(|waiter| *waiter != link);
        }
    }

    /// Whoever waits for `link` finds out what has become of it.
    fn release_line(&mut self, link: LinkId) {
        let port = self.port_mut(link);
        if port.is_up() {
            if !port.line.is_empty() && !port.in_resume {
                port.in_resume = true;
                self.resume.push_back(link);
            }
            return;
        }
        // Each one's next frame will be turned back; a port without queue lets them all pass.
        for waiter in core::mem::take(&mut port.line) {
            self.port_mut(waiter).waits_for = None;
            self.released.push_back(waiter);
        }
    }

    /// Everything that waits for `link` becomes unreachable.
    fn give_up_queue(&mut self, link: LinkId) {
        let Self { ports, pool, .. } = self;
        let Some(port) = &mut ports[link.0 as usize] else { return };
        for (source, target) in port.discard(pool) {
            self.notify(source, target);
        }
    }

    /// Tells the source of a frame that its target cannot be reached.
    fn turn_back(&mut self, header: &Header) {
        // Nobody is told about what relays and leaving endpoints say of themselves.
        if header.kind != Kind::Unreachable {
            self.notify(header.source, header.target);
        }
    }

    fn notify(&mut self, source: Address, target: Address) {
        self.counters.unreachable += 1;
        self.notices.push(Header {
            length: 0,
            kind: Kind::Unreachable,
            flags: 0,
            hops: 0,
            source: target,
            target: source,
            sequence: 0,
            delivered: 0,
            credit: 0,
        });
    }

    fn queue_notices(&mut self) {
        for header in core::mem::take(&mut self.notices) {
            let Route::Link(to) = self.table.route(header.target) else { continue };
            let bound = self.bound(to) + NOTICE_BYTES_RESERVE;
            let Self { ports, pool, counters, .. } = self;
            let Some(port) = &mut ports[to.0 as usize] else { continue };
            if matches!(port.state, State::Lost) || port.waiting_bytes() > bound {
                counters.notices_dropped += 1;
                continue;
            }
            let mut bytes = [0; HEADER_BYTES];
            header.emit(&mut bytes);
            port.push_notice(pool, &bytes, &header);
            self.touch(to);
        }
    }
}
