//! A relay as a state machine: frames enter on links and leave on links.
//!
//! What enters: the bytes of attached endpoints and peer relays ([`Relay::handle_input`]), links
//! that connect and disconnect, and the time. What leaves: for each link, the bytes to write
//! ([`Relay::slices`]), and the inputs that may resume ([`Relay::poll_resume`]).
//!
//! **Forwarding.** An input hands over a buffer with the bytes that it has read. The relay assigns
//! every whole frame in the buffer to an output as a *piece* of that buffer, without a copy. The
//! driver then writes each touched output once, straight from the buffer. Bytes that the output
//! does not take are copied into its queue ([`Relay::keep`]), or sent later from the message log if
//! the log holds them. The relay forwards only whole frames, so an input that breaks in the middle
//! of a frame corrupts no output.
//!
//! **Streams.** A peer relay is one output with one queue and at most [`STREAMS_MAX`] *streams*,
//! each of which takes whole frames from the front of that queue as its connection has capacity. A
//! stream is a link of its own as an input, and as a writer ([`Relay::writer`]). Frames of one
//! channel may overtake each other on different streams; endpoints restore the order.
//!
//! **Back-pressure.** An output whose queue has reached its bound accepts no more frames: an input
//! whose next frame is for this output stops there, and waits in the list of waiting inputs of the
//! output. When half of the bound is free, waiting inputs resume: one at a time, each for at most
//! one buffer, and then at the end of the list again. A new input never passes a waiting input. No
//! input waits for an output that is disconnected: the relay drops frames beyond the bound of its
//! queue.
//!
//! **Breaks.** Endpoints keep every frame until its target has confirmed the frame, so a relay may
//! lose frames if it reports the loss. A broken link may be reconnected ([`Relay::suspend`],
//! [`Relay::disconnect`]): frames wait for the link, and each source of a frame that was in flight
//! or dropped receives [`Kind::Lost`] as soon as frames pass again. If a link is not reconnected in
//! time, or has left for good ([`Relay::detach`]), the sources receive [`Kind::Unreachable`]
//! instead. Streams exchange *keepalives*: empty [`Kind::Ack`] frames from [`Address::ANONYMOUS`]
//! to [`Address::ANONYMOUS`] whose `delivered` is the number of bytes received on this stream. So a
//! stream that breaks after an idle period has lost nothing. Endpoints send no keepalives, hence
//! all frames that were written to an endpoint recently count as lost.
//!
//! **Restarted processes** ([`Relay::enable_recovery`]). The relay then logs every frame for each
//! endpoint, and drops the frames that a restarted incarnation sends again: see `message_log`. The
//! frames that wait for an endpoint are in the log, whose bound replaces the bound of the queue.
//! Replay to a restarted incarnation goes through the queue piece by piece
//! ([`Relay::replay_next`]): see `replay`. Log segments beyond the memory bound go to a disk: see
//! `log_storage`.
//!
//! What may never happen: a frame is accepted from its source and neither delivered nor reported as
//! lost or unreachable (except for reports beyond their bound: [`Counters::reports_dropped`]); the
//! relay takes memory beyond the bounds below; an input waits forever while its output makes
//! progress.
//!
//! **Drain rule.** After [`Relay::handle_input`], drain [`Relay::poll_flush`] (write,
//! `handle_sent`, `keep`) before the buffer is touched again or another input is handled.

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

/// Largest frame that a relay accepts, in bytes.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + KIND_HEADER_BYTES_MAX + RELAY_PAYLOAD_BYTES_MAX;

/// Bound of the queue towards an endpoint, in bytes. An endpoint that computes for a while must not
/// hold up the link that it shares with others, so the queue holds all that may come to the
/// endpoint without a grant, and four windows of long messages that the endpoint has requested.
pub const ENDPOINT_QUEUE_BYTES_MAX: usize = (EAGER_TOTAL_BYTES + 4 * RELAY_WINDOW_BYTES) as usize;

/// Bound of the queue towards a peer relay, in bytes. The queue is small, since inputs wait fairly
/// outside the queue, while queued frames delay everybody: eight frames, so that the output never
/// runs dry.
pub const PEER_QUEUE_BYTES_MAX: usize = 8 * FRAME_BYTES_MAX;

/// Bound of all queues together, in bytes; as the queues fill up, the bound of each queue shrinks
/// to the remaining memory.
pub const TOTAL_QUEUE_BYTES: usize = 1 << 30;

/// Bytes that a queue may hold however full the relay is, so that every link makes progress.
pub const QUEUE_BYTES_MIN: usize = 2 * FRAME_BYTES_MAX;

/// Milliseconds that frames wait for an endpoint that has not attached yet. Ranks of a job start
/// within seconds of each other; a rank that never attaches must not stall its senders for ever.
pub const ATTACH_MILLIS_MAX: u64 = 30_000;

/// Milliseconds that frames wait for an endpoint whose link has broken, unless the user sets
/// another time (`peer_timeout`).
pub const ENDPOINT_RECONNECT_MILLIS_MAX: u64 = 60_000;

/// Milliseconds that frames wait for an endpoint that may be restarted, unless the user sets a
/// longer time (`peer_timeout`). The launcher ends the job if it cannot restart the endpoint;
/// before the endpoint attaches, its program may compute.
pub const RESTART_MILLIS_MAX: u64 = 600_000;

/// Milliseconds that frames wait for a peer relay, unless the time for an endpoint is longer. The
/// time is long enough for the peer relay to be restarted or rerouted.
pub const PEER_RECONNECT_MILLIS_MAX: u64 = 60_000;

/// Most streams to one peer relay: the maximum of `wan_streams`.
pub const STREAMS_MAX: usize = 64;

/// Milliseconds after which a stream sends a keepalive with the number of received bytes: soon
/// enough for the peer relay to see that the stream is alive.
pub const KEEPALIVE_MILLIS: u64 = 1_000;

/// Received bytes after which a stream sends a keepalive without waiting for [`KEEPALIVE_MILLIS`]:
/// when a stream breaks, few sources that have lost nothing are notified.
pub const KEEPALIVE_BYTES: u64 = 1 << 20;

const _: () = {
    assert!(QUEUE_BYTES_MIN <= PEER_QUEUE_BYTES_MAX);
    assert!(PEER_QUEUE_BYTES_MAX <= ENDPOINT_QUEUE_BYTES_MAX);
};

/// Counters of a relay since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames given to an output.
    pub frames: u64,
    /// Bytes of the frames given to an output, headers included.
    pub bytes: u64,
    /// Unreachable reports to sources: the target of a frame cannot be reached.
    pub unreachable: u64,
    /// Lost reports to sources: frames of the source have been lost.
    pub lost: u64,
    /// Reports dropped because too many were pending.
    pub reports_dropped: u64,
    /// Links closed because of a malformed frame.
    pub malformed: u64,
    /// How often an input had to wait for an output.
    pub pauses: u64,
    /// Bytes in flight to peer relays when a stream broke: these bytes may have been lost.
    pub lost_bytes: u64,
    /// Frames delivered by endpoints that may be restarted, as their determinants report.
    pub delivered_frames: u64,
    /// Bytes of the determinants that the relay has logged.
    pub determinant_bytes: u64,
    /// Bytes of recorded nondeterminism that the relay keeps copies of.
    pub nondeterminism_bytes: u64,
    /// Bytes of message logs that were read back from the disk.
    pub read_back_bytes: u64,
    /// How often an input had to wait for the disk.
    pub disk_waits: u64,
}

/// Result of handling an input's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Consumed {
    /// Bytes from the front of the buffer that the relay has handled.
    pub bytes: usize,
    /// Why the relay stopped there.
    pub stop: Stop,
}

/// Why the relay stopped handling an input's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The rest is empty or the beginning of a frame: read more.
    Partial,
    /// The output of the next frame is full: keep the rest, and read nothing until
    /// [`Relay::poll_resume`] names this link.
    Full,
    /// The next frame violates the protocol: close the link.
    Broken(Malformed),
}

/// Result of connecting a new stream to a peer relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewStream {
    /// Link of the new stream.
    pub stream: LinkId,
    /// Whether the new stream is the only one: the peer relay was disconnected.
    pub is_first: bool,
    /// Number of channels whose sources are notified that frames have been lost meanwhile.
    pub lossy_channels: usize,
}

/// A relay: see the module head.
#[derive(Debug)]
pub struct Relay {
    table: RoutingTable,
    ports: Vec<Option<Port>>,
    free: Vec<LinkId>,
    pool: ChunkPool,
    flush: VecDeque<LinkId>,
    resume: VecDeque<LinkId>,
    /// Inputs that need not wait any longer, since their output has disconnected.
    released: VecDeque<LinkId>,
    /// The input that resumes now, and the output that it waited for.
    turn: Option<(LinkId, LinkId)>,
    /// Pending reports: target of the report, and endpoint that the report is about.
    reports: BTreeMap<(Address, Address), Kind>,
    /// Ports that may have capacity for their pending reports.
    ports_with_reports: VecDeque<LinkId>,
    /// Endpoints that are to receive the next piece of their replay.
    replaying: VecDeque<LinkId>,
    /// Endpoints whose replay failed, and why.
    failed_replays: VecDeque<(LinkId, &'static str)>,
    now_millis: u64,
    disconnected_ports: usize,
    streams: usize,
    /// Milliseconds: see [`Relay::set_reconnect_timeout`].
    endpoint_reconnect_millis: u64,
    counters: Counters,
    /// Message logs of the endpoints, if recovery is enabled.
    logs: Option<MessageLogs>,
    /// [`ENDPOINT_QUEUE_BYTES_MAX`]; less in tests that fill the queue.
    endpoint_bound: usize,
    /// Checksum function for frames of endpoints: see [`Relay::set_check`].
    check: Option<fn(&[u8]) -> u32>,
}

impl Relay {
    /// The relay of cluster `own`; `clusters[n]` is the range of processes of cluster `n`. All peer
    /// relays are disconnected.
    ///
    /// # Errors
    /// If `clusters` contradicts itself.
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

    /// Sets how many milliseconds frames wait for an endpoint whose link has broken.
    pub fn set_reconnect_timeout(&mut self, endpoint_reconnect_millis: u64) {
        self.endpoint_reconnect_millis = endpoint_reconnect_millis;
    }

    /// Milliseconds that frames wait for an endpoint whose link has broken.
    pub fn reconnect_timeout_millis(&self) -> u64 {
        self.endpoint_reconnect_millis
    }

    /// Requires from now on that each frame of an endpoint carries the checksum `sum` of its header
    /// and kind header.
    pub fn set_check(&mut self, sum: fn(&[u8]) -> u32) {
        self.check = Some(sum);
    }

    /// Enables recovery: endpoints that are killed from now on may be restarted, and their peers
    /// notice nothing. The message logs take at most [`MESSAGE_LOGS_BYTES_MAX`] bytes of memory,
    /// and no disk.
    pub fn enable_recovery(&mut self) {
        let (memory, segment) = (MESSAGE_LOGS_BYTES_MAX, SEGMENT_BYTES);
        self.enable_recovery_within(LogLimits { memory, disk: None, segment });
    }

    /// Enables recovery as [`Relay::enable_recovery`] does, with the bounds `room` for all message
    /// logs.
    ///
    /// # Panics
    /// If a frame does not fit into a segment.
    pub fn enable_recovery_within(&mut self, room: LogLimits) {
        assert!(room.segment >= FRAME_BYTES_MAX, "frames lie whole in a segment");
        self.logs = Some(MessageLogs::new(room));
    }

    /// Whether [`Relay::enable_recovery`] or [`Relay::enable_recovery_within`] has been called.
    pub fn is_recovery_enabled(&self) -> bool {
        self.logs.is_some()
    }

    /// The counters of the relay since its creation.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Bytes of memory that all queues take.
    pub fn queued_bytes(&self) -> usize {
        self.pool.used_bytes()
    }

    /// The cluster of the process of `address`; `None` if the job has no such process.
    pub fn cluster_of(&self, address: Address) -> Option<ClusterId> {
        self.table.cluster_of(address)
    }

    /// The port of the peer relay of `cluster`, connected or not.
    pub fn peer(&self, cluster: ClusterId) -> Option<LinkId> {
        self.table.peer(cluster)
    }

    /// The link and the incarnation of `address` if the endpoint is attached.
    pub fn incarnation(&self, address: Address) -> Option<(LinkId, u32)> {
        let Route::Link(link) = self.table.route(address) else { return None };
        let port = self.ports.get(link.0 as usize)?.as_ref()?;
        let is_attached = port.is_up() && matches!(port.kind, PortKind::Endpoint(_));
        is_attached.then_some((link, port.incarnation?))
    }

    /// Incarnation of the peer relay that the streams of `link` lead to, if a stream was ever
    /// connected.
    pub fn peer_incarnation(&self, link: LinkId) -> Option<u32> {
        self.port(link).incarnation
    }

    /// Links of the streams to the peer relay of `link`.
    pub fn streams(&self, link: LinkId) -> &[LinkId] {
        &self.port(link).streams
    }

    // ---- frames ------------------------------------------------------------------------

    /// Handles the whole frames at the front of the bytes that were read from a link. Header bytes
    /// that a relay changes (hops) are changed in `bytes`.
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
            // The sender may have sent Goodbye, but a link that violates the protocol has not left
            // in good order.
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

    /// Handles the frame at offset `at`; returns the length of the frame, or 0 if the frame is
    /// incomplete.
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

    /// Gives a frame to its output, or reports the target of the frame as unreachable to its
    /// source.
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

    /// Parses a header, and checks that this link may send such a frame.
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
                // No checksum covers the hops: a corrupt count would look like a frame in a routing
                // loop.
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

    /// Checks that the receiver of a whole frame of an endpoint can parse the frame. A malformed
    /// frame ends the connection of its sender; the receiver could only end its own connection,
    /// without knowing which peer is to blame. Frames from other relays have been checked there.
    #[inline]
    fn validate(&self, from: LinkId, header: &Header, frame: &[u8]) -> Result<(), Malformed> {
        if !matches!(self.port(from).kind, PortKind::Endpoint(_)) {
            return Ok(());
        }
        let head = KindHeader::size(header.kind, header.flags);
        header.payload(head)?;
        KindHeader::parse(header.kind, header.flags, &frame[HEADER_BYTES..])?;
        match self.check {
            // Determinant and Nondeterminism frames are for the relay itself, and have checksums of
            // their own.
            Some(_) if matches!(header.kind, Kind::Determinant | Kind::Nondeterminism) => Ok(()),
            Some(sum) => header.verify(&frame[..HEADER_BYTES + head], sum),
            None => Ok(()),
        }
    }

    /// Handles a keepalive: the peer relay reports how many bytes of the stream it has received.
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

    /// The bound of a queue in bytes, given how full the relay is.
    #[inline]
    fn bound(&self, link: LinkId) -> usize {
        let left = TOTAL_QUEUE_BYTES.saturating_sub(self.pool.used_bytes());
        let most = match self.port(link).kind {
            PortKind::Endpoint(_) => self.endpoint_bound,
            // Frames that wait for a disconnected peer relay delay no other frames.
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
        // A driver that names a closed link has lost track of its links.
        self.ports[link.0 as usize].as_ref().expect("the link is open")
    }

    #[inline]
    fn port_mut(&mut self, link: LinkId) -> &mut Port {
        // As in `port`: a driver that names a closed link has lost track of its links.
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

/// Whether a frame is a keepalive between relays.
fn is_keepalive(header: &Header) -> bool {
    header.kind == Kind::Ack
        && header.length == 0
        && (header.source, header.target) == (Address::ANONYMOUS, Address::ANONYMOUS)
}
