//! The switch of a relay: how frames get from an input to an output, wait there, leave, or are
//! reported as lost.
//!
//! What enters: whole frames of open links, links that connect and disconnect, and the time. What
//! leaves: outputs that have something to write ([`Switch::pop_flush`]), and reports to sources.
//! The switch knows no message log: [`super::Relay`] asks [`super::Recovery`] first.
//!
//! What may never happen: a frame that was accepted disappears without a report, unless too many
//! reports are pending ([`Counters::reports_dropped`]).

use alloc::collections::{BTreeMap, BTreeSet};

use super::bounds::{FRAME_BYTES_MAX, STREAMS_MAX};
use super::counters::Counters;
use super::empty_frame::empty;
use super::input_turns::InputTurns;
use super::link_queue::LinkQueue;
use super::output_queue::Piece;
use super::port::{Port, PortKind};
use super::port_state::{PortEvent, PortState};
use super::ports::Ports;
use super::queue_memory::QueueMemory;
use super::recent_channels::{ChannelKey, FrameClass};
use super::stream_receipts::StreamReceipts;
use super::writer::Writer;
use crate::id::Address;
use crate::route::routing_table::{LinkId, Route, RoutingTable};
use crate::wire::Malformed;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};

/// Offset of the hop count in a frame.
pub(super) const HOPS_AT: usize = 6;

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

/// The switch of a relay: see the module head.
#[derive(Debug)]
pub(super) struct Switch {
    pub table: RoutingTable,
    pub ports: Ports,
    pub memory: QueueMemory,
    pub turns: InputTurns,
    /// Outputs that have something new to write.
    flush: LinkQueue,
    /// Reports that have no port yet: target of the report, and endpoint that the report is about.
    reports: BTreeMap<(Address, Address), Kind>,
    /// Ports that may have capacity for their pending reports.
    ports_with_reports: LinkQueue,
    pub counters: Counters,
    pub now_millis: u64,
}

impl Switch {
    pub fn new(table: RoutingTable, now_millis: u64) -> Self {
        Self {
            table,
            ports: Ports::default(),
            memory: QueueMemory::default(),
            turns: InputTurns::default(),
            flush: LinkQueue::default(),
            reports: BTreeMap::new(),
            ports_with_reports: LinkQueue::default(),
            counters: Counters::default(),
            now_millis,
        }
    }

    // ---- ports -------------------------------------------------------------------------

    /// Opens a disconnected port.
    pub fn open_disconnected(&mut self, kind: PortKind) -> LinkId {
        self.ports.open(kind, PortState::Disconnected { since: self.now_millis })
    }

    /// Opens a port for an endpoint that is not attached, and routes frames there.
    pub fn open_endpoint(&mut self, address: Address) -> LinkId {
        let link = self.open_disconnected(PortKind::Endpoint(address));
        self.table.set_endpoint(address, Some(link));
        link
    }

    fn close(&mut self, link: LinkId) -> Option<Port> {
        self.flush.handle_closed(link);
        self.ports_with_reports.handle_closed(link);
        self.turns.handle_closed(link);
        self.ports.close(link)
    }

    /// Marks the other side of `link` as connected again: it receives the waiting frames, and the
    /// sources of lost frames are notified.
    pub fn mark_reconnected(&mut self, link: LinkId) {
        self.ports.handle_event(link, PortEvent::Connect);
        self.report_losses(link);
        self.touch(link);
        self.release_waiting_inputs(link);
    }

    /// Lets the inputs that wait for `link` resume, if its state allows.
    pub fn release_waiting_inputs(&mut self, link: LinkId) {
        self.turns.release(&mut self.ports, link);
    }

    /// Suspends an endpoint whose link has broken: frames wait until the endpoint attaches again.
    /// `is_recorded`: the next incarnation receives all frames again from the message log, and
    /// reports are made again; sources are notified only if no incarnation attaches.
    pub fn suspend(&mut self, link: LinkId, is_recorded: bool) {
        self.ports.handle_event(link, PortEvent::Disconnect(self.now_millis));
        let pool = &mut self.memory.pool;
        let Some(port) = self.ports.find_mut(link) else { return };
        port.writer.rest.pop(pool, port.writer.rest.len());
        let mut open = core::mem::take(&mut port.writer.recent_channels).unacknowledged();
        if is_recorded {
            open.retain(|entry| entry.channel().is_some());
        }
        self.record_loss(link, open);
        self.release_waiting_inputs(link);
    }

    /// Detaches the endpoint `address` for good: the sources of all waiting frames receive
    /// Unreachable. So do the sources of recently written frames, unless the endpoint has sent
    /// Goodbye.
    pub fn detach(&mut self, link: LinkId, address: Address) {
        self.ports.handle_event(link, PortEvent::GiveUp);
        if self.ports.may_reconnect(link) {
            let recent = &mut self.ports.get_mut(link).writer.recent_channels;
            let open = core::mem::take(recent).unacknowledged();
            self.record_loss(link, open);
        }
        self.abandon_queue(link);
        self.table.set_endpoint(address, None);
        self.release_waiting_inputs(link);
        self.close(link);
    }

    /// Gives up a peer relay that was disconnected for too long.
    pub fn abandon_peer(&mut self, link: LinkId) {
        self.ports.handle_event(link, PortEvent::GiveUp);
        self.abandon_queue(link);
        self.release_waiting_inputs(link);
    }

    // ---- peer relays connect and disconnect ----------------------------------------------

    /// Connects a stream to the peer relay of `peer`: see [`super::Relay::connect`].
    pub fn connect(&mut self, peer: LinkId, incarnation: u32) -> Result<NewStream, &'static str> {
        let port = self.ports.get(peer);
        let PortKind::Peer(cluster) = port.kind else { return Err("it is no relay") };
        let is_known = port.incarnation == Some(incarnation);
        if port.streams.links().len() >= STREAMS_MAX {
            return Err("there are too many streams to it");
        }
        if port.is_up() && !is_known {
            return Err("there are streams to another incarnation of it");
        }
        let stream = self.ports.open(PortKind::Stream { peer, cluster }, PortState::Up);
        self.ports.get_mut(stream).receipts = StreamReceipts::starting_at(self.now_millis);
        let port = self.ports.get_mut(peer);
        port.streams.push(stream);
        port.incarnation = Some(incarnation);
        let is_first = !port.is_up();
        let mut lossy_channels = 0;
        if is_first {
            // The frames that an earlier incarnation of the peer relay received may be lost with
            // it.
            if !is_known {
                port.losses.lose_past();
            }
            lossy_channels = port.losses.lossy_count();
            self.mark_reconnected(peer);
        }
        self.touch(peer);
        Ok(NewStream { stream, is_first, lossy_channels })
    }

    /// Retires `stream`: see [`super::Relay::retire`].
    pub fn retire(&mut self, stream: LinkId) {
        let PortKind::Stream { peer, .. } = self.ports.get(stream).kind else { return };
        self.ports.handle_event(stream, PortEvent::Retire);
        self.ports.get_mut(peer).streams.remove(stream);
    }

    /// Disconnects a stream to the peer relay of `peer`: see [`super::Relay::disconnect`].
    pub fn disconnect(&mut self, stream: LinkId, peer: LinkId) {
        let Some(mut gone) = self.close(stream) else { return };
        gone.writer.rest.pop(&mut self.memory.pool, gone.writer.rest.len());
        self.counters.lost_bytes += gone.writer.recent_channels.unacknowledged_bytes();
        let recent = gone.writer.recent_channels.recent();
        let port = self.ports.get_mut(peer);
        port.streams.remove(stream);
        port.losses.remember_past(recent.into_iter().filter_map(ChannelKey::channel));
        let is_last = port.streams.links().is_empty();
        self.record_loss(peer, gone.writer.recent_channels.unacknowledged());
        if is_last {
            self.ports.handle_event(peer, PortEvent::Disconnect(self.now_millis));
            self.release_waiting_inputs(peer);
        } else {
            self.report_losses(peer);
        }
    }

    // ---- keepalives ----------------------------------------------------------------------

    /// Accounts for whole frames of `bytes` bytes from `from`. A stream acknowledges them at once
    /// if they are many.
    #[inline]
    pub fn handle_received(&mut self, from: LinkId, bytes: usize) {
        let port = self.ports.get_mut(from);
        let is_due = port.receipts.add(bytes);
        if is_due && matches!(port.kind, PortKind::Stream { .. }) {
            self.send_keepalive(from);
        }
    }

    /// Handles a keepalive: the peer relay reports how many bytes of the stream it has received.
    pub fn handle_keepalive(&mut self, from: LinkId, header: &Header) -> Result<(), Malformed> {
        match self.ports.get_mut(from).writer.recent_channels.acknowledge(header.delivered) {
            true => Ok(()),
            false => Err(Malformed("a relay acknowledges more than it was sent")),
        }
    }

    /// Sends a keepalive with the number of received bytes on a stream, unless more than a frame
    /// still waits there.
    pub fn send_keepalive(&mut self, stream: LinkId) {
        let pool = &mut self.memory.pool;
        let Some(port) = self.ports.find_mut(stream) else { return };
        if port.writer.rest.len() > FRAME_BYTES_MAX {
            return;
        }
        let (source, target) = (Address::ANONYMOUS, Address::ANONYMOUS);
        let delivered = port.receipts.received();
        let keepalive = Header { delivered, ..empty(Kind::Keepalive, source, target) };
        let mut bytes = [0; HEADER_BYTES];
        keepalive.emit(&mut bytes);
        port.writer.rest.push(pool, &bytes);
        port.writer.recent_channels.skip(HEADER_BYTES);
        port.receipts.handle_keepalive(self.now_millis);
        self.touch(stream);
    }

    // ---- frames --------------------------------------------------------------------------

    /// Gives the frame at offset `at` of `bytes` to the output `to`, whose bound is `bound`.
    /// Returns false if the frame must wait: its input then waits for the output.
    #[inline]
    pub fn forward(
        &mut self,
        (from, to): (LinkId, LinkId),
        bound: usize,
        bytes: &mut [u8],
        at: usize,
        header: &Header,
    ) -> bool {
        let length = HEADER_BYTES + header.length as usize;
        let is_draining = self.ports.get(from).state() == PortState::Draining;
        let port = self.ports.get_mut(to);
        match port.state() {
            PortState::Abandoned => {
                self.report_unreachable(header);
                return true;
            }
            PortState::Disconnected { .. } if port.output.waiting_bytes() >= bound => {
                self.record_loss(to, [ChannelKey::of(header)].into());
                return true;
            }
            PortState::Disconnected { .. } => (),
            PortState::Up | PortState::Draining | PortState::Retired => {
                let has_room = port.output.waiting_bytes() < bound
                    && (port.waiting_inputs.is_empty() || self.turns.is_turn(from, to));
                if !is_draining && !has_room {
                    self.counters.pauses += 1;
                    self.turns.enqueue(&mut self.ports, &self.memory, from, to);
                    return false;
                }
            }
        }
        bytes[at + HOPS_AT] += 1;
        port.output.take(Piece { at, length }, header);
        self.counters.frames += 1;
        self.counters.bytes += length as u64;
        self.touch(to);
        true
    }

    /// The bound of a queue in bytes, given how full the relay is.
    #[inline]
    pub fn bound(&self, link: LinkId) -> usize {
        self.memory.bound(self.ports.get(link))
    }

    // ---- writing -------------------------------------------------------------------------

    /// Puts an output into the list of those that have something new to write.
    #[inline]
    pub fn touch(&mut self, link: LinkId) {
        self.flush.push(link);
    }

    #[inline]
    pub fn has_flush(&self) -> bool {
        !self.flush.is_empty()
    }

    /// Removes the first output of the list, which may have been closed since.
    #[inline]
    pub fn pop_flush(&mut self) -> Option<LinkId> {
        self.flush.pop()
    }

    /// Accounts for `bytes` bytes that `writer` has written: from the rest of its begun frame, then
    /// from the queue and the pieces of `output`. Returns how many more bytes it has written, which
    /// are those of direct replay.
    #[inline]
    pub fn send(
        &mut self,
        output: LinkId,
        bytes: usize,
        buffer: &[u8],
        writer: &mut Writer,
    ) -> usize {
        let begun = bytes.min(writer.rest.len());
        let pool = &mut self.memory.pool;
        writer.rest.pop(pool, begun);
        let output = &mut self.ports.get_mut(output).output;
        let own = (bytes - begun).min(output.own_bytes());
        output.send(pool, buffer, own, writer);
        bytes - begun - own
    }

    /// Handles that `output`, whose bound was `bound`, has written: waiting inputs and pending
    /// reports may find capacity.
    #[inline]
    pub fn handle_sent(&mut self, output: LinkId, bound: usize) {
        self.turns.handle_sent(&self.ports, output, bound);
        let port = self.ports.get(output);
        if port.losses.has_reports() && port.output.waiting_bytes() <= bound {
            self.ports_with_reports.push(output);
        }
    }

    // ---- losses and reports ----------------------------------------------------------------

    /// Records losses on the way to the other side of `link`. The sources are notified when the
    /// other side is reconnected ([`Switch::report_losses`]), or given up
    /// ([`Switch::abandon_queue`]).
    pub fn record_loss(&mut self, link: LinkId, entries: BTreeSet<ChannelKey>) {
        let losses = &mut self.ports.get_mut(link).losses;
        let missed = entries.into_iter().filter(|entry| !losses.record(*entry)).count();
        self.counters.reports_dropped += missed as u64;
    }

    /// Notifies the sources of lost frames, because frames pass again: the sources request the
    /// receiver's status. Reports that were lost are sent again.
    pub fn report_losses(&mut self, link: LinkId) {
        for (source, target) in self.ports.get_mut(link).losses.take_lossy() {
            self.notify(source, target, Kind::Lost);
        }
        self.schedule_reports(link);
    }

    /// Gives up everything that waits for `link` or was lost there: the sources receive
    /// Unreachable.
    fn abandon_queue(&mut self, link: LinkId) {
        let Some(port) = self.ports.find_mut(link) else { return };
        for (source, target) in port.discard(&mut self.memory.pool) {
            self.notify(source, target, Kind::Unreachable);
        }
    }

    /// Reports to the source of a frame that its target cannot be reached.
    pub fn report_unreachable(&mut self, header: &Header) {
        // No report is made about the loss of a report.
        if FrameClass::of(header.kind) == FrameClass::Forwarded {
            self.notify(header.source, header.target, Kind::Unreachable);
        }
    }

    fn notify(&mut self, source: Address, target: Address, kind: Kind) {
        match kind {
            Kind::Lost => self.counters.lost += 1,
            _ => self.counters.unreachable += 1,
        }
        self.reports.insert((source, target), kind);
    }

    /// Assigns all reports to the ports of their targets.
    pub fn assign_reports(&mut self) {
        for ((to, about), kind) in core::mem::take(&mut self.reports) {
            let Route::Link(link) = self.table.route(to) else { continue };
            let port = self.ports.get_mut(link);
            if port.state() == PortState::Abandoned || !port.losses.add_report(to, about, kind) {
                self.counters.reports_dropped += 1;
                continue;
            }
            self.schedule_reports(link);
        }
    }

    fn schedule_reports(&mut self, link: LinkId) {
        if self.ports.get(link).losses.has_reports() {
            self.ports_with_reports.push(link);
        }
    }

    /// The next port whose pending reports may be queued. Reports for a disconnected link stay
    /// pending.
    pub fn next_report_port(&mut self) -> Option<LinkId> {
        loop {
            let link = self.ports_with_reports.pop()?;
            let port = self.ports.find(link);
            if port.is_some_and(|port| port.is_up() && port.losses.has_reports()) {
                return Some(link);
            }
        }
    }

    /// Puts the next report that is pending at `link` into its queue, as far as the queue has
    /// capacity with the bound `bound`. Returns the report, which belongs into the message log too.
    /// An endpoint under replay receives the report from its log, in its turn.
    pub fn queue_report(&mut self, link: LinkId, bound: usize) -> Option<[u8; HEADER_BYTES]> {
        let port = self.ports.find_mut(link)?;
        if port.output.waiting_bytes() > bound {
            return None;
        }
        let (to, about, kind) = port.losses.pop_report()?;
        let header = empty(kind, about, to);
        let mut bytes = [0; HEADER_BYTES];
        header.emit(&mut bytes);
        if !port.replay().is_incomplete() {
            port.output.push_frame(&mut self.memory.pool, &bytes, &header);
        }
        Some(bytes)
    }
}
