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
//! stream is a link of its own as an input, and as a writer ([`Ports::writer`]). Frames of one
//! channel may overtake each other on different streams; endpoints restore the order.
//!
//! **Back-pressure.** An output whose queue has reached its bound accepts no more frames: an input
//! whose next frame is for this output stops there, and waits in the list of waiting inputs of the
//! output. When half of the bound is free, waiting inputs resume: one at a time, each for at most
//! one buffer, and then at the end of the list again. A new input never passes a waiting input. No
//! input waits for an output that is disconnected: the relay drops frames beyond the bound of its
//! queue.
//!
//! **Breaks.** Endpoints keep every frame until its target has acknowledged the frame, so a relay
//! may lose frames if it reports the loss. A broken link may be reconnected ([`Relay::suspend`],
//! [`Relay::disconnect`]): frames wait for the link, and each source of a frame that was in flight
//! or dropped receives [`Kind::Lost`] as soon as frames pass again. If a link is not reconnected in
//! time, or has left for good ([`Relay::detach`]), the sources receive [`Kind::Unreachable`]
//! instead. Streams exchange [`Kind::Keepalive`] frames from [`Address::ANONYMOUS`]
//! to [`Address::ANONYMOUS`] whose `delivered` is the number of bytes received on this stream. So a
//! stream that breaks after an idle period has lost nothing. Endpoints send no keepalives, hence
//! all frames that were written to an endpoint recently count as lost.
//!
//! **Restarted processes** ([`Relay::enable_recovery_within`]). The relay then logs every frame for
//! each endpoint, and drops the frames that a restarted incarnation sends again: see
//! `message_logs`. The frames that wait for an endpoint are in the log, whose bound replaces the
//! bound of the queue. Replay to a restarted incarnation goes through the queue piece by piece
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
//!
//! The modules, each of which uses only modules before it:
//!
//! | module | holds |
//! |---|---|
//! | `bounds` | every bound of a relay |
//! | `counters` | counters of a relay |
//! | `empty_frame` | frames without a body that the relay makes |
//! | `link_queue` | list of links that take turns |
//! | `recent_channels` | channels whose frames a link has carried recently |
//! | `writer` | frame that a link has begun to write |
//! | `output_queue` | frames that wait for one output |
//! | `loss_record` | losses and reports of one port |
//! | `byte_log` | bytes in order, in blocks |
//! | `segment_buffers` | names and buffers of log segments |
//! | `segmented_log` | frames in order, in segments, in memory and on the disk |
//! | `determinant_log` | determinants of one endpoint |
//! | `divergence` | digests of sent frames, and the report about another frame |
//! | `nondeterminism_copies` | copy of the recorded nondeterminism of one endpoint |
//! | `checkpoint_position` | positions in the logs of one endpoint |
//! | `log_storage` | memory and disk of all logs |
//! | `replay_state` | how a replay goes on |
//! | `replay` | one replay |
//! | `message_log` | the log of one endpoint |
//! | `message_logs` | the logs of all endpoints |
//! | `log_status` | sizes and excerpts of logs |
//! | `stream_receipts` | what a stream has received and acknowledged |
//! | `stream_set` | streams of one peer relay |
//! | `port_state` | life of a port |
//! | `port` | one link |
//! | `ports` | all links |
//! | `queue_memory` | memory and bound of the queues |
//! | `input_turns` | inputs that wait |
//! | `switch` | frames from inputs to outputs, losses, reports |
//! | `replays` | all replays |
//! | `recovery` | logs and replays, if recovery is enabled |
//! | `admission` | frames that a link may send |

mod admission;
mod bounds;
mod byte_log;
mod checkpoint_position;
mod counters;
mod determinant_log;
mod divergence;
mod empty_frame;
mod input_turns;
mod link_queue;
mod log_status;
mod log_storage;
mod loss_record;
mod message_log;
mod message_logs;
mod nondeterminism_copies;
mod output_queue;
mod port;
mod port_state;
mod ports;
mod queue_memory;
mod recent_channels;
mod recovery;
mod replay;
mod replay_state;
mod replays;
mod segment_buffers;
mod segmented_log;
mod stream_receipts;
mod stream_set;
mod switch;
mod writer;

use alloc::vec::Vec;

use crate::id::{Address, ClusterId};
use crate::limit::HOPS_MAX;
use crate::route::routing_table::{ClusterRange, LinkId, Route, RoutingTable};
use crate::wire::Malformed;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use crate::wire::hello::LogPosition;
use admission::Admission;
pub use bounds::{
    ATTACH_MILLIS_MAX, ENDPOINT_QUEUE_BYTES_MAX, ENDPOINT_RECONNECT_MILLIS_MAX, FRAME_BYTES_MAX,
    KEEPALIVE_BYTES, KEEPALIVE_MILLIS, PEER_QUEUE_BYTES_MAX, PEER_RECONNECT_MILLIS_MAX,
    QUEUE_BYTES_MIN, RESTART_MILLIS_MAX, STREAMS_MAX, TOTAL_QUEUE_BYTES,
};
pub use counters::Counters;
pub use divergence::{Divergence, FrameDifference, FrameVersion};
pub use log_status::{DeterminantStatus, LogExcerpt, LogStatus};
pub use log_storage::{DiskRequest, LogEvent, LogLimits, SEGMENT_BYTES};
pub use message_logs::MESSAGE_LOGS_BYTES_MAX;
pub use nondeterminism_copies::KeptNondeterminism;
use port::{Port, PortKind};
use port_state::{PortEvent, PortState};
pub use ports::Ports;
use recovery::Filtered;
pub use recovery::Recovery;
pub use replay::REPLAY_BYTES_MAX;
use replay_state::ReplayState;
pub use segment_buffers::SegmentId;
pub use segmented_log::ShownFrame;
pub use switch::NewStream;
use switch::Switch;

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

/// A relay: see the module head. What may be asked about links is answered by [`Relay::ports`],
/// what may be asked about message logs by [`Relay::recovery`]. The type has more than 40 methods,
/// one for each event and output of a driver: most only choose which part handles the event.
#[derive(Debug)]
pub struct Relay {
    switch: Switch,
    recovery: Recovery,
    admission: Admission,
    /// Milliseconds: see [`Relay::set_reconnect_timeout`].
    endpoint_reconnect_millis: u64,
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
        let mut switch = Switch::new(RoutingTable::new(own, clusters)?, now_millis);
        for number in 0..switch.table.cluster_count() {
            let cluster = ClusterId(number as u16);
            if cluster != own {
                let link = switch.open_disconnected(PortKind::Peer(cluster));
                switch.table.set_peer(cluster, link);
            }
        }
        Ok(Self {
            switch,
            recovery: Recovery::default(),
            admission: Admission::default(),
            endpoint_reconnect_millis: ENDPOINT_RECONNECT_MILLIS_MAX,
        })
    }

    /// The links of the relay.
    #[inline]
    pub fn ports(&self) -> &Ports {
        &self.switch.ports
    }

    /// What the relay keeps for restarts.
    #[inline]
    pub fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// What the relay keeps for restarts.
    #[inline]
    pub fn recovery_mut(&mut self) -> &mut Recovery {
        &mut self.recovery
    }

    /// Sets the bound of the queue towards each endpoint, in bytes: [`ENDPOINT_QUEUE_BYTES_MAX`],
    /// less in tests that fill the queue.
    pub fn set_endpoint_queue_bytes_max(&mut self, bytes: usize) {
        self.switch.memory.endpoint_bound = bytes;
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
        self.admission.check = Some(sum);
    }

    /// Enables recovery: endpoints that are killed from now on may be restarted, and their peers
    /// notice nothing. All message logs together obey the bounds `room`.
    ///
    /// # Panics
    /// If a frame does not fit into a segment.
    pub fn enable_recovery_within(&mut self, room: LogLimits) {
        assert!(room.segment >= FRAME_BYTES_MAX, "frames lie whole in a segment");
        self.recovery.enable(room);
    }

    /// Whether [`Relay::enable_recovery_within`] has been called.
    pub fn is_recovery_enabled(&self) -> bool {
        self.recovery.is_enabled()
    }

    /// The counters of the relay since its creation.
    pub fn counters(&self) -> Counters {
        self.switch.counters
    }

    /// Bytes of memory that all queues take.
    pub fn queued_bytes(&self) -> usize {
        self.switch.memory.pool.used_bytes()
    }

    /// The cluster of the process of `address`; `None` if the job has no such process.
    pub fn cluster_of(&self, address: Address) -> Option<ClusterId> {
        self.switch.table.cluster_of(address)
    }

    /// The port of the peer relay of `cluster`, connected or not.
    pub fn peer(&self, cluster: ClusterId) -> Option<LinkId> {
        self.switch.table.peer(cluster)
    }

    /// The port of an endpoint of this relay's cluster, attached or awaited.
    pub fn endpoint(&self, address: Address) -> Option<LinkId> {
        let Route::Link(link) = self.switch.table.route(address) else { return None };
        self.ports().find(link)?.endpoint().map(|_| link)
    }

    /// The link and the incarnation of `address` if the endpoint is attached.
    pub fn incarnation(&self, address: Address) -> Option<(LinkId, u32)> {
        let link = self.endpoint(address)?;
        let port = self.ports().get(link);
        port.is_up().then_some((link, port.incarnation?))
    }

    // ---- endpoints attach and detach -----------------------------------------------------

    /// Attaches an endpoint of this relay's cluster, for the first time or again. Frames that
    /// waited for the endpoint are in its queue.
    ///
    /// # Errors
    /// If the endpoint does not belong to this cluster, is attached already ([`Relay::suspend`] or
    /// [`Relay::detach`] the older link first), or a later incarnation of it has been attached.
    pub fn attach(&mut self, address: Address, incarnation: u32) -> Result<LinkId, &'static str> {
        self.attach_at(address, incarnation, LogPosition::default())
    }

    /// Attaches an endpoint as [`Relay::attach`] does, at log position `standing`. If the relay has
    /// discarded the log of the endpoint, and the same incarnation attaches again, logging restarts
    /// at this position.
    ///
    /// # Errors
    /// As [`Relay::attach`], and if the log of the endpoint does not hold `standing`.
    pub fn attach_at(
        &mut self,
        address: Address,
        incarnation: u32,
        standing: LogPosition,
    ) -> Result<LinkId, &'static str> {
        if address == Address::ANONYMOUS || self.cluster_of(address).is_none() {
            return Err("no process of the job has its address");
        }
        if self.cluster_of(address) != Some(self.switch.table.own()) {
            return Err("its process belongs to another cluster");
        }
        let mut link = None;
        // An endpoint that has never been attached has delivered nothing.
        let mut may_restart_log = incarnation == 0 && standing == LogPosition::default();
        if let Route::Link(known) = self.switch.table.route(address) {
            let port = self.switch.ports.get(known);
            match port.incarnation {
                _ if port.is_up() => return Err("its address is attached already"),
                Some(last) if last > incarnation => return Err("it has been restarted since"),
                // The frames that wait are for an earlier incarnation.
                Some(last) if last < incarnation && !self.is_recovery_enabled() => {
                    self.detach(known)
                }
                last => {
                    link = Some(known);
                    may_restart_log &= last.is_none();
                    // The same incarnation attaches again only after a checkpoint, whose position
                    // may be the beginning.
                    may_restart_log |= last == Some(incarnation);
                }
            }
        }
        let Self { switch, recovery, .. } = self;
        let (position, is_log_restarted) =
            recovery.locate(address, incarnation, standing, may_restart_log)?;
        let link = link.unwrap_or_else(|| switch.open_endpoint(address));
        switch.table.set_endpoint(address, Some(link));
        let port = switch.ports.get_mut(link);
        if port.incarnation.replace(incarnation) != Some(incarnation) {
            // These belong to the incarnation that has ended.
            (port.has_said_goodbye, port.diverged_frame) = (false, None);
        }
        recovery.start_replay(switch, link, position, is_log_restarted);
        switch.mark_reconnected(link);
        Ok(link)
    }

    /// Starts draining the link of a killed process whose next incarnation has connected: the relay
    /// accepts all remaining frames at once, even if outputs are full, because other processes may
    /// already know what follows from these frames. The driver hands in the rest of the input and
    /// then calls [`Relay::suspend`].
    pub fn begin_drain(&mut self, link: LinkId) {
        self.dequeue_input(link);
        self.switch.ports.handle_event(link, PortEvent::BeginDrain);
    }

    /// Suspends an endpoint whose link has broken: frames wait until the endpoint attaches again.
    pub fn suspend(&mut self, link: LinkId) {
        self.dequeue_input(link);
        self.recovery.stop_replay(&mut self.switch, link);
        let is_recorded = self.recovery.is_recorded(self.switch.ports.get(link));
        self.switch.suspend(link, is_recorded);
    }

    /// Detaches an endpoint for good: the sources of all waiting frames receive Unreachable. So do
    /// the sources of recently written frames, unless the endpoint has sent Goodbye.
    pub fn detach(&mut self, link: LinkId) {
        let Some(address) = self.switch.ports.get(link).endpoint() else { return };
        self.dequeue_input(link);
        self.recovery.stop_replay(&mut self.switch, link);
        self.switch.detach(link, address);
        self.recovery.replays.handle_closed(link);
    }

    /// Fences an endpoint: from now on the relay refuses incarnations of it before `incarnation`,
    /// none of which is attached. An incomplete batch is dropped, unless a newer incarnation is
    /// attached.
    pub fn fence(&mut self, address: Address, incarnation: u32) {
        if self.cluster_of(address) != Some(self.switch.table.own()) {
            return;
        }
        // The record of the next incarnation ends with the last whole batch, here or on the node
        // that holds a longer copy: the incarnation may continue with other bytes after this
        // position.
        if self.incarnation(address).is_none() {
            self.recovery.drop_incomplete_batch(address);
        }
        let link = match self.switch.table.route(address) {
            Route::Link(link) => link,
            _ => self.switch.open_endpoint(address),
        };
        let last = &mut self.switch.ports.get_mut(link).incarnation;
        *last = (*last).max(Some(incarnation));
    }

    /// Removes `link` from all lists of waiting inputs.
    fn dequeue_input(&mut self, link: LinkId) {
        self.recovery.stop_waiting_for_disk(link);
        self.switch.turns.dequeue(&mut self.switch.ports, link);
    }

    // ---- peer relays connect and disconnect ----------------------------------------------

    /// Connects a stream to the peer relay of `peer`. `incarnation` differs for each incarnation of
    /// the peer relay.
    ///
    /// # Errors
    /// If there are [`STREAMS_MAX`] streams, or streams to another incarnation
    /// ([`Relay::disconnect`] these first).
    pub fn connect(&mut self, peer: LinkId, incarnation: u32) -> Result<NewStream, &'static str> {
        self.switch.connect(peer, incarnation)
    }

    /// Retires `stream`, which works but which another stream replaces: it finishes the frame that
    /// it has begun, and takes no further frame. Frames in flight to this relay still arrive on the
    /// retired stream.
    pub fn retire(&mut self, stream: LinkId) {
        self.switch.retire(stream);
    }

    /// Disconnects a stream to a peer relay. The frames in flight on the stream are lost; the
    /// waiting frames go by the other streams, or wait for a new stream.
    pub fn disconnect(&mut self, stream: LinkId) {
        let PortKind::Stream { peer, .. } = self.switch.ports.get(stream).kind else { return };
        self.dequeue_input(stream);
        self.switch.disconnect(stream, peer);
    }

    // ---- time --------------------------------------------------------------------------

    /// Sets the time, in milliseconds from any fixed start, sends due keepalives, and gives up
    /// frames that have waited too long.
    pub fn handle_time(&mut self, now_millis: u64) {
        self.switch.now_millis = now_millis;
        if !self.ports().needs_time() && !self.ports().has_streams() {
            return;
        }
        for link in self.ports().numbers() {
            let Some(port) = self.ports().find(link) else { continue };
            if self.is_timed_out(port) {
                self.abandon(link);
            } else if matches!(port.kind, PortKind::Stream { .. })
                && port.receipts.is_due(now_millis)
            {
                self.switch.send_keepalive(link);
            }
        }
    }

    fn is_timed_out(&self, port: &Port) -> bool {
        let PortState::Disconnected { since } = port.state() else { return false };
        let patience = match port.kind {
            PortKind::Endpoint(_) if self.is_recovery_enabled() => {
                self.endpoint_reconnect_millis.max(RESTART_MILLIS_MAX)
            }
            PortKind::Endpoint(_) if port.incarnation.is_none() => ATTACH_MILLIS_MAX,
            PortKind::Endpoint(_) => self.endpoint_reconnect_millis,
            _ => self.endpoint_reconnect_millis.max(PEER_RECONNECT_MILLIS_MAX),
        };
        self.switch.now_millis.saturating_sub(since) > patience
    }

    fn abandon(&mut self, link: LinkId) {
        let port = self.switch.ports.get(link);
        let Some(address) = port.endpoint() else { return self.switch.abandon_peer(link) };
        if port.incarnation.is_some() {
            self.recovery.give_up(address);
        }
        self.detach(link);
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
            self.switch.counters.malformed += 1;
            // The sender may have sent Goodbye, but a link that violates the protocol has not left
            // in good order.
            self.switch.ports.get_mut(from).has_said_goodbye = false;
        }
        self.switch.handle_received(from, at);
        Consumed { bytes: at, stop }
    }

    /// Handles the frame at offset `at`; returns the length of the frame, or 0 if the frame is
    /// incomplete.
    #[inline]
    fn handle_frame(&mut self, from: LinkId, bytes: &mut [u8], at: usize) -> Result<usize, Stop> {
        let Self { switch, recovery, admission, .. } = self;
        let rest = &bytes[at..];
        if rest.len() < HEADER_BYTES {
            return Ok(0);
        }
        let kind = switch.ports.get(from).kind;
        let header = admission.admit(&switch.table, kind, rest).map_err(Stop::Broken)?;
        let length = HEADER_BYTES + header.length as usize;
        if rest.len() < length {
            return Ok(0);
        }
        let frame = &rest[..length];
        admission.validate(kind, &header, frame).map_err(Stop::Broken)?;
        if header.kind == Kind::Keepalive {
            switch.handle_keepalive(from, &header).map_err(Stop::Broken)?;
            return Ok(length);
        }
        let filtered = recovery.filter(switch, from, &header, frame).map_err(Stop::Broken)?;
        let Filtered::Forward(sent) = filtered else { return Ok(length) };
        if !self.route_frame(from, bytes, at, &header) {
            return Err(Stop::Full);
        }
        self.recovery.log_sent(&self.switch, from, sent);
        Ok(length)
    }

    /// Gives a frame to its output, or reports the target of the frame as unreachable to its
    /// source. Returns false if the frame must wait.
    #[inline]
    fn route_frame(&mut self, from: LinkId, bytes: &mut [u8], at: usize, header: &Header) -> bool {
        let switch = &mut self.switch;
        if header.kind == Kind::Goodbye {
            switch.ports.get_mut(from).has_said_goodbye = true;
        }
        let to = match switch.table.route(header.target) {
            Route::Link(to) if header.hops < HOPS_MAX => to,
            Route::NotAttached if header.hops < HOPS_MAX => switch.open_endpoint(header.target),
            _ => {
                switch.report_unreachable(header);
                return true;
            }
        };
        self.forward((from, to), bytes, at, header)
    }

    #[inline]
    fn forward(
        &mut self,
        link: (LinkId, LinkId),
        bytes: &mut [u8],
        at: usize,
        header: &Header,
    ) -> bool {
        let Self { switch, recovery, .. } = self;
        let (_, to) = link;
        let bound = switch.bound(to);
        if recovery.is_enabled() {
            let length = HEADER_BYTES + header.length as usize;
            if recovery.must_wait_for_disk(switch, link, length) {
                return false;
            }
            if recovery.forward(switch, to, bytes, at, header) {
                return true;
            }
        }
        switch.forward(link, bound, bytes, at, header)
    }

    /// The next input that may resume: hand the rest of its buffer to `handle_input` again, or read
    /// more if there is no rest.
    pub fn poll_resume(&mut self) -> Option<LinkId> {
        self.switch.turns.poll_resume(&mut self.switch.ports, &self.switch.memory)
    }

    // ---- writing -----------------------------------------------------------------------

    /// The next output that has something new to write. `None`: all outputs have been returned.
    pub fn poll_flush(&mut self) -> Option<LinkId> {
        loop {
            if !self.switch.has_flush() {
                self.queue_reports();
            }
            let link = self.switch.pop_flush()?;
            if self.ports().find(link).is_some() {
                return Some(link);
            }
        }
    }

    /// Puts pending reports into the queues of their outputs, as far as these have capacity, and
    /// into the message logs.
    fn queue_reports(&mut self) {
        let Self { switch, recovery, .. } = self;
        switch.assign_reports();
        while let Some(link) = switch.next_report_port() {
            let bound = switch.bound(link);
            while let Some(report) = switch.queue_report(link, bound) {
                recovery.append_report(switch, link, &report);
            }
            switch.touch(link);
        }
    }

    /// Whether anything waits that `link` can write.
    pub fn has_output(&self, link: LinkId) -> bool {
        let ports = self.ports();
        let port = ports.get(ports.output_of(link));
        let waits = port.output.waiting_bytes() > 0 || port.replay() == ReplayState::Direct;
        waits || !ports.get(link).writer.rest.is_empty()
    }

    /// The bytes that `link` is to write, in order: the rest of a begun frame, then the queue, then
    /// the pieces of `buffer` (the buffer last given to `handle_input`; empty if its pieces have
    /// been kept), then the frames of direct replay, which may be far more than the link has
    /// capacity for.
    pub fn slices<'a>(&'a self, link: LinkId, buffer: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let ports = self.ports();
        let port = ports.get(ports.output_of(link));
        let direct = self.recovery.direct(port).map(|(_, frame)| frame);
        ports.get(link).writer.rest.slices().chain(port.output.slices(buffer)).chain(direct)
    }

    /// Lengths of the frames in [`Relay::slices`]; the first length is that of the rest of a begun
    /// frame.
    pub fn frame_lengths(&self, link: LinkId) -> impl Iterator<Item = usize> {
        let ports = self.ports();
        let rest = Some(ports.get(link).writer.rest.len()).filter(|length| *length > 0);
        let port = ports.get(ports.output_of(link));
        let direct = self.recovery.direct(port).map(|(_, frame)| frame.len());
        rest.into_iter().chain(port.output.frame_lengths()).chain(direct)
    }

    /// Accounts for the `bytes` bytes that `link` has written from the front of [`Relay::slices`].
    pub fn handle_sent(&mut self, link: LinkId, bytes: usize, buffer: &[u8]) {
        let Self { switch, recovery, .. } = self;
        let output = switch.ports.output_of(link);
        let bound = switch.bound(output);
        let mut writer = core::mem::take(&mut switch.ports.get_mut(link).writer);
        let direct = switch.send(output, bytes, buffer, &mut writer);
        let mut unreadable = None;
        if direct > 0 {
            unreadable = recovery.consume_direct(switch, output, direct, &mut writer);
        }
        switch.handle_sent(output, bound);
        recovery.replays.schedule(switch, output);
        switch.ports.get_mut(link).writer = writer;
        switch.ports.get_mut(output).streams.advance(link);
        if let Some(address) = unreadable {
            recovery.fail_replay(switch, output, address);
        }
    }

    /// Keeps what the output has not taken of `buffer`, so that the buffer may be used again: the
    /// frames are sent from the message log if the log holds them, and are copied into the queue
    /// otherwise.
    pub fn keep(&mut self, link: LinkId, buffer: &[u8]) {
        let Some(port) = self.switch.ports.find_mut(link) else { return };
        if port.output.has_pieces() && !self.recovery.begin_backlog(port) {
            port.output.keep(&mut self.switch.memory.pool, buffer);
        }
    }

    // ---- replay and disk -----------------------------------------------------------------

    /// Pushes the next piece of each pending replay whose endpoint has taken most of the previous
    /// piece. The driver calls this once a round, between the turns of other links. Returns whether
    /// there is anything to write.
    pub fn replay_next(&mut self) -> bool {
        self.recovery.replay_next(&mut self.switch)
    }

    /// Result of [`DiskRequest::Write`]. After a failed write the relay requests no further writes.
    pub fn handle_written(&mut self, id: SegmentId, is_written: bool) {
        self.recovery.handle_written(&mut self.switch, id, is_written);
    }

    /// Result of [`DiskRequest::Read`]. `None`: the read failed, or the bytes differ from the
    /// written ones.
    pub fn handle_read(&mut self, id: SegmentId, bytes: Option<Vec<u8>>) {
        self.recovery.handle_read(&mut self.switch, id, bytes);
    }
}
