//! One relay, as a state machine: frames come in on links and go out on links.
//!
//! What enters: the bytes of attached endpoints and peer relays ([`Relay::handle_input`]), links
//! that come and go, and the time. What leaves: for each link, the bytes to write
//! ([`Relay::slices`]), and the inputs that may go on ([`Relay::poll_resume`]).
//!
//! **Forwarding.** An input hands over a buffer with whatever it has read. Every whole frame in it
//! is assigned to an output as a *piece* of that buffer; nothing is copied. The driver then writes
//! each touched output once, straight from the buffer, and what the output does not take is copied
//! into its queue ([`Relay::keep`]), or taken from where it is kept. A frame is forwarded only when it is whole, so an input that
//! dies in the middle of one breaks no output.
//!
//! **Streams.** A peer relay is one output with one queue and any number of streams (*streams*), each
//! of which takes whole frames from the front of that queue as it has room. A stream is a link of its
//! own as an input, and as what writes ([`Relay::writer`]). Frames of one channel may overtake each
//! other on different streams; endpoints put them in order.
//!
//! **Back-pressure.** An output whose queue has reached its bound takes no more: the input whose
//! next frame is for it stops there, and waits in the output's line. When half of the bound is
//! free, the line moves: one input at a time, each for at most one buffer, then to the end of the
//! line. Newcomers never pass the line. Nobody waits for an output that is away: frames that its
//! queue has no room for are dropped.
//!
//! **Breaks.** Endpoints keep every frame until its target has confirmed it, so a relay may lose
//! frames, if only it says so. A link that breaks may come back ([`Relay::suspend`],
//! [`Relay::disconnect`]): frames wait for it, and of what was under way to it or had to be dropped,
//! each source hears [`Kind::Lost`] as soon as frames can pass again. What does not come back in
//! time, or has left for good ([`Relay::detach`]), turns frames into [`Kind::Unreachable`] for their
//! sources. Lanes exchange *signs of life*, each an empty [`Kind::Ack`] from nobody to nobody whose
//! `delivered` is the number of bytes taken in on this stream; so a stream that breaks after a while of
//! rest has lost nothing. Endpoints send no such signs, hence everything that was written to them
//! lately counts as lost.
//!
//! **Processes that come back** ([`Relay::enable_recovery`]). The relay then keeps what it gives to each endpoint, and swallows
//! what a new start of one sends again: see `message_log`. What waits for an endpoint has no bound but that of what is kept, and waits
//! there; what a new start is told goes into its queue piece by piece ([`Relay::replay_next`]): see `replay`. What is more than the memory
//! for it goes to a disk: see `log_storage`.
//!
//! What may never happen: a frame is taken from its source and neither delivered nor told of, too
//! many notices ([`Counters::reports_dropped`]) apart; memory beyond the bounds below; an input that
//! waits for ever while its output moves.
//!
//! **Drain rule.** After [`Relay::handle_input`], drain [`Relay::poll_flush`] (write, `handle_sent`,
//! `keep`) before the buffer is touched again or another input is handled.

mod byte_log;
mod checkpoint_position;
mod determinant_log;
mod divergence;
mod links;
mod log_status;
mod log_storage;
mod message_log;
mod nondeterminism_copies;
mod port;
mod recent_channels;
mod replay;
mod segmented_log;
#[cfg(test)]
mod tests;
mod undeliverable;
mod writing;

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::id::{Address, ClusterId};
use crate::limit::{
    EAGER_TOTAL_BYTES, HOPS_MAX, KIND_HEADER_BYTES_MAX, RELAY_PAYLOAD_BYTES_MAX, RELAY_WINDOW_BYTES,
};
use crate::route::byte_queue::ChunkPool;
use crate::route::routing_table::{ClusterRange, LinkId, Route, RoutingTable};
use crate::wire::Malformed;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use crate::wire::hello::LogPosition;
use crate::wire::kind_header::KindHeader;
use checkpoint_position::CheckpointPosition;
pub use divergence::{Divergence, FrameDifference, FrameVersion};
pub use log_status::{DeterminantStatus, LogExcerpt, LogStatus};
pub use log_storage::{DiskRequest, LogEvent, LogLimits, SEGMENT_BYTES, SegmentId};
pub use message_log::MESSAGE_LOGS_BYTES_MAX;
use message_log::{MessageLog, MessageLogs};
pub use nondeterminism_copies::KeptNondeterminism;
use port::{Piece, Port, PortKind, PortState};
use recent_channels::ChannelKey;
use replay::ReplayState;
pub use segmented_log::ShownFrame;

/// Most bytes of a frame that a relay takes.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + KIND_HEADER_BYTES_MAX + RELAY_PAYLOAD_BYTES_MAX;

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

/// How long frames wait for an endpoint whose link has broken, unless the user says otherwise
/// (`peer_timeout`).
pub const ENDPOINT_RECONNECT_MILLIS_MAX: u64 = 60_000;

/// How long frames wait for an endpoint that may be restarted, or longer if the user says so. Whoever starts it ends the
/// job if it does not come; until it does, it may be busy with what it does before it attaches.
pub const RESTART_MILLIS_MAX: u64 = 600_000;

/// How long frames wait for a peer relay, or as long as for an endpoint if that is longer. Long
/// enough for it to be restarted or rerouted.
pub const PEER_RECONNECT_MILLIS_MAX: u64 = 60_000;

/// Most streams to one peer relay: what `wan_streams` allows.
pub const STREAMS_MAX: usize = 64;

/// How often a stream says how much it has taken in: soon enough for the other side to see that the
/// way is alive,
pub const KEEPALIVE_MILLIS: u64 = 1_000;

/// or whenever it has taken in so much more: a break is then told to few who have lost nothing.
pub const KEEPALIVE_BYTES: u64 = 1 << 20;

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
    /// Times a source was told that its target cannot be reached.
    pub unreachable: u64,
    /// Times a source was told that frames of it have been lost.
    pub lost: u64,
    /// Notices that found no room.
    pub reports_dropped: u64,
    /// Links closed because of what they sent.
    pub malformed: u64,
    /// How often an input had to wait for an output.
    pub pauses: u64,
    /// Bytes under way to peer relays when a stream broke: they may have been lost.
    pub lost_bytes: u64,
    /// Frames that endpoints have taken in which may come back,
    pub delivered_frames: u64,
    /// and bytes that are kept of when they have.
    pub determinant_bytes: u64,
    /// and bytes that are kept of what they have read of clocks and chance.
    pub nondeterminism_bytes: u64,
    /// Bytes of what is kept that were read back from the disk.
    pub read_back_bytes: u64,
    /// How often an input had to wait for the disk.
    pub disk_waits: u64,
}

/// What became of an input's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Consumed {
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

/// What a new stream to a peer relay means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewStream {
    /// The new stream.
    pub stream: LinkId,
    /// Whether it is the only one: the peer relay was away.
    pub is_first: bool,
    /// Channels whose sources are told that frames have been lost meanwhile.
    pub lossy_channels: usize,
}

/// See the module head.
#[derive(Debug)]
pub struct Relay {
    table: RoutingTable,
    ports: Vec<Option<Port>>,
    free: Vec<LinkId>,
    pool: ChunkPool,
    flush: VecDeque<LinkId>,
    resume: VecDeque<LinkId>,
    /// Inputs that need not wait any longer, since their output is gone.
    released: VecDeque<LinkId>,
    /// The input whose turn it is, and the output that gave it.
    turn: Option<(LinkId, LinkId)>,
    /// Notices that are due: to whom, and about whom.
    reports: BTreeMap<(Address, Address), Kind>,
    /// Ports that may have room for what is owed there.
    ports_with_reports: VecDeque<LinkId>,
    /// Endpoints that are to be told more of what was.
    replaying: VecDeque<LinkId>,
    /// Endpoints that cannot be told more of what was, and why.
    failed_replays: VecDeque<(LinkId, &'static str)>,
    now_millis: u64,
    disconnected_ports: usize,
    streams: usize,
    /// See [`Relay::set_reconnect_timeout`].
    endpoint_reconnect_millis: u64,
    counters: Counters,
    /// Of each endpoint, if they may come back.
    logs: Option<MessageLogs>,
    /// [`ENDPOINT_QUEUE_BYTES_MAX`]; less in tests that fill it.
    endpoint_bound: usize,
    /// See [`Relay::set_check`].
    check: Option<fn(&[u8]) -> u32>,
}

impl Relay {
    /// The relay of cluster `own`; `clusters[n]` says which processes are in cluster `n`. All peer
    /// relays are away.
    ///
    /// # Errors
    /// If the map contradicts itself.
    pub fn new(
        own: ClusterId,
        clusters: Vec<ClusterRange>,
        now_millis: u64,
    ) -> Result<Self, &'static str> {
        let mut relay = Self {
            table: RoutingTable::new(own, clusters)?,
            ports: Vec::new(),
            free: Vec::new(),
            pool: ChunkPool::default(),
            flush: VecDeque::new(),
            resume: VecDeque::new(),
            released: VecDeque::new(),
            turn: None,
            reports: BTreeMap::new(),
            ports_with_reports: VecDeque::new(),
            replaying: VecDeque::new(),
            failed_replays: VecDeque::new(),
            now_millis,
            disconnected_ports: 0,
            streams: 0,
            endpoint_reconnect_millis: ENDPOINT_RECONNECT_MILLIS_MAX,
            counters: Counters::default(),
            logs: None,
            endpoint_bound: ENDPOINT_QUEUE_BYTES_MAX,
            check: None,
        };
        for number in 0..relay.table.cluster_count() {
            let cluster = ClusterId(number as u16);
            if cluster != own {
                let link = relay.open_port(
                    PortKind::Peer(cluster),
                    PortState::Disconnected { since: now_millis },
                );
                relay.table.set_peer(cluster, link);
            }
        }
        Ok(relay)
    }

    /// How long frames wait for an endpoint whose link has broken.
    pub fn set_reconnect_timeout(&mut self, endpoint_reconnect_millis: u64) {
        self.endpoint_reconnect_millis = endpoint_reconnect_millis;
    }

    /// See [`Relay::set_reconnect_timeout`].
    pub fn reconnect_timeout_millis(&self) -> u64 {
        self.endpoint_reconnect_millis
    }

    /// From now on each frame of an endpoint must carry the check that `sum` makes of its header and head.
    pub fn set_check(&mut self, sum: fn(&[u8]) -> u32) {
        self.check = Some(sum);
    }

    /// From now on endpoints that were killed may come back, as if nothing had happened.
    pub fn enable_recovery(&mut self) {
        let (memory, segment) = (MESSAGE_LOGS_BYTES_MAX, SEGMENT_BYTES);
        self.enable_recovery_within(LogLimits { memory, disk: None, segment });
    }

    /// The same; what is kept for them takes no more than this.
    ///
    /// # Panics
    /// If a frame does not fit into a segment.
    pub fn enable_recovery_within(&mut self, room: LogLimits) {
        assert!(room.segment >= FRAME_BYTES_MAX, "frames lie whole in a segment");
        self.logs = Some(MessageLogs::new(room));
    }

    /// See [`Relay::enable_recovery`].
    pub fn is_recovery_enabled(&self) -> bool {
        self.logs.is_some()
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
        let port = self.ports.get(link.0 as usize)?.as_ref()?;
        let is_attached = port.is_up() && matches!(port.kind, PortKind::Endpoint(_));
        is_attached.then_some((link, port.incarnation?))
    }

    /// Start of the peer relay that the streams of `link` lead to.
    pub fn peer_incarnation(&self, link: LinkId) -> Option<u32> {
        self.port(link).incarnation
    }

    /// The streams to the peer relay of `link`.
    pub fn streams(&self, link: LinkId) -> &[LinkId] {
        &self.port(link).streams
    }

    // ---- frames ------------------------------------------------------------------------

    /// Deals with the frames at the front of what was read from a link. Header bytes that change
    /// on the way (hops) are changed in `bytes`.
    pub fn handle_input(&mut self, from: LinkId, bytes: &mut [u8]) -> Consumed {
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
            // Whatever it has said before, it has not left in good order.
            self.port_mut(from).has_said_goodbye = false;
        }
        let port = self.port_mut(from);
        port.received += at as u64;
        if matches!(port.kind, PortKind::Stream { .. })
            && port.received - port.acknowledged >= KEEPALIVE_BYTES
        {
            self.send_keepalive(from);
        }
        Consumed { bytes: at, stop }
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
        self.validate(from, &header, &rest[..length]).map_err(Stop::Broken)?;
        if header.source == Address::ANONYMOUS {
            self.handle_keepalive(from, &header).map_err(Stop::Broken)?;
            return Ok(length);
        }
        let Some(sending) = self.filter_replayed(from, &header, &rest[..length])? else {
            return Ok(length);
        };
        let taken = self.route_frame(from, bytes, at, &header)?;
        self.log_sent(from, sending);
        Ok(taken)
    }

    /// Gives a frame to its output, or tells its source why not.
    #[inline]
    fn route_frame(
        &mut self,
        from: LinkId,
        bytes: &mut [u8],
        at: usize,
        header: &Header,
    ) -> Result<usize, Stop> {
        let length = HEADER_BYTES + header.length as usize;
        if header.kind == Kind::Goodbye {
            self.port_mut(from).has_said_goodbye = true;
        }
        match self.table.route(header.target) {
            _ if header.hops >= HOPS_MAX => self.report_unreachable(header),
            Route::Link(to) => return self.forward(from, to, bytes, at, header),
            Route::NotAttached => {
                let since = self.now_millis;
                let to = self.open_port(
                    PortKind::Endpoint(header.target),
                    PortState::Disconnected { since },
                );
                self.table.set_endpoint(header.target, Some(to));
                return self.forward(from, to, bytes, at, header);
            }
            Route::Detached | Route::NoRoute => self.report_unreachable(header),
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
        match self.port(from).kind {
            PortKind::Endpoint(address) => {
                if header.source != address {
                    return Err(Malformed("a frame does not come from the endpoint of its link"));
                }
                // Not guarded: damaged, it would look like a frame that goes round in circles.
                if header.hops != 0 {
                    return Err(Malformed("an endpoint's frame has passed relays already"));
                }
                if header.kind.reports_undeliverable() {
                    return Err(Malformed("only relays may say that a target is unreachable"));
                }
            }
            PortKind::Stream { .. } if is_keepalive(&header) => (),
            PortKind::Stream { cluster, .. } | PortKind::Peer(cluster) => {
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

    /// Whether a whole frame of an endpoint is one that its receiver can read. What is not ends the connection of its sender;
    /// the receiver could only end its own, without knowing who is to blame. Frames of other relays have been examined there.
    #[inline]
    fn validate(&self, from: LinkId, header: &Header, frame: &[u8]) -> Result<(), Malformed> {
        if !matches!(self.port(from).kind, PortKind::Endpoint(_)) {
            return Ok(());
        }
        let head = KindHeader::size(header.kind, header.flags);
        header.payload(head)?;
        KindHeader::parse(header.kind, header.flags, &frame[HEADER_BYTES..])?;
        match self.check {
            // These are for the relay itself, and have a check of their own.
            Some(_) if matches!(header.kind, Kind::Determinant | Kind::Nondeterminism) => Ok(()),
            Some(sum) => header.verify(&frame[..HEADER_BYTES + head], sum),
            None => Ok(()),
        }
    }

    /// A stream's other side says how much it has taken in.
    fn handle_keepalive(&mut self, from: LinkId, header: &Header) -> Result<(), Malformed> {
        match self.port_mut(from).writer.recent_channels.confirm(header.delivered) {
            true => Ok(()),
            false => Err(Malformed("a relay has taken in more than it was sent")),
        }
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
        if self.logs.is_some() {
            if self.must_wait_for_disk(from, to, length) {
                return Err(Stop::Full);
            }
            if self.forward_logged(to, bytes, at, header) {
                return Ok(length);
            }
        }
        let is_draining = self.port(from).is_draining;
        let port = self.port_mut(to);
        match port.state {
            PortState::Abandoned => {
                self.report_unreachable(header);
                return Ok(length);
            }
            PortState::Disconnected { .. } if port.waiting_bytes() >= bound => {
                self.record_loss(to, [ChannelKey::of(header)].into());
                return Ok(length);
            }
            PortState::Disconnected { .. } => (),
            PortState::Up if is_draining => (),
            PortState::Up
                if port.waiting_bytes() < bound && (port.waiting_inputs.is_empty() || its_turn) => {
            }
            PortState::Up => {
                self.enqueue_input(from, to);
                return Err(Stop::Full);
            }
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
        let most = match self.port(link).kind {
            PortKind::Endpoint(_) => self.endpoint_bound,
            // What waits for somebody who is away delays nobody.
            _ if matches!(self.port(link).state, PortState::Disconnected { .. }) => {
                RELAY_WINDOW_BYTES as usize
            }
            _ => PEER_QUEUE_BYTES_MAX,
        };
        left.clamp(QUEUE_BYTES_MIN, most)
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

    #[inline]
    fn touch(&mut self, link: LinkId) {
        let port = self.port_mut(link);
        if !port.in_flush {
            port.in_flush = true;
            self.flush.push_back(link);
        }
    }
}

/// Whether a frame is a sign of life between relays.
fn is_keepalive(header: &Header) -> bool {
    header.kind == Kind::Ack
        && header.length == 0
        && (header.source, header.target) == (Address::ANONYMOUS, Address::ANONYMOUS)
}
