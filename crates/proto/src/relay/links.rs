//! Links of a relay attach, connect and disconnect, and the time passes.

use super::*;
use port::PENDING_REPORTS_MAX;

impl Relay {
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
        if self.cluster_of(address) != Some(self.table.own()) {
            return Err("its process belongs to another cluster");
        }
        let mut link = None;
        // An endpoint that has never been attached has delivered nothing.
        let is_from_checkpoint = standing != LogPosition::default();
        let mut may_restart_log = incarnation == 0 && !is_from_checkpoint;
        if let Route::Link(known) = self.table.route(address) {
            let port = self.port(known);
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
        let (mut position, mut is_log_restarted) = (CheckpointPosition::default(), false);
        if let Some(logs) = &mut self.logs {
            is_log_restarted = may_restart_log && logs.restart_log(address, standing);
            let unrecoverable_reason = logs
                .unrecoverable_reason(address)
                .filter(|_| incarnation > 0 || is_from_checkpoint);
            if let Some(why) = unrecoverable_reason {
                return Err(why);
            }
            position = logs.checkpoint_position(address, standing)?;
            logs.trim(address, standing.kept);
        }
        let since = self.now_millis;
        let link = link.unwrap_or_else(|| {
            self.open_port(PortKind::Endpoint(address), PortState::Disconnected { since })
        });
        self.table.set_endpoint(address, Some(link));
        self.port_mut(link).incarnation = Some(incarnation);
        self.start_replay(link, position, is_log_restarted);
        self.mark_reconnected(link);
        Ok(link)
    }

    /// Whether an endpoint whose link has ended may attach again: it has sent no Goodbye.
    pub fn may_reconnect(&self, link: LinkId) -> bool {
        !self.port(link).has_said_goodbye
    }

    /// Suspends an endpoint whose link has broken: frames wait until the endpoint attaches again.
    pub fn suspend(&mut self, link: LinkId) {
        self.dequeue_input(link);
        self.stop_replay(link);
        let since = self.now_millis;
        self.set_state(link, PortState::Disconnected { since });
        let Self { ports, pool, .. } = self;
        let Some(port) = &mut ports[link.0 as usize] else { return };
        port.writer.rest.pop(pool, port.writer.rest.len());
        let mut open = core::mem::take(&mut port.writer.recent_channels).unconfirmed();
        port.is_draining = false;
        if self.is_recorded(link) {
            // The next incarnation receives all these frames and reports again; sources are
            // notified only if no incarnation attaches.
            open.retain(|entry| entry.channel().is_some());
        }
        self.record_loss(link, open);
        self.release_waiting_inputs(link);
    }

    /// Whether the relay logs all frames for the endpoint at `link`, for its next incarnation.
    fn is_recorded(&self, link: LinkId) -> bool {
        let PortKind::Endpoint(address) = self.port(link).kind else { return false };
        self.logs.as_ref().is_some_and(|all| all.unrecoverable_reason(address).is_none())
    }

    /// Detaches an endpoint for good: the sources of all waiting frames receive Unreachable. So do
    /// the sources of recently written frames, unless the endpoint has sent Goodbye.
    pub fn detach(&mut self, link: LinkId) {
        let PortKind::Endpoint(address) = self.port(link).kind else { return };
        self.dequeue_input(link);
        self.stop_replay(link);
        self.set_state(link, PortState::Abandoned);
        if self.may_reconnect(link) {
            let open =
                core::mem::take(&mut self.port_mut(link).writer.recent_channels).unconfirmed();
            self.record_loss(link, open);
        }
        self.abandon_queue(link);
        self.table.set_endpoint(address, None);
        self.release_waiting_inputs(link);
        self.ports[link.0 as usize] = None;
        self.free.push(link);
    }

    // ---- peer relays connect and disconnect ----------------------------------------------

    /// Connects a stream to the peer relay of `peer`. `incarnation` differs for each incarnation of
    /// the peer relay.
    ///
    /// # Errors
    /// If there are [`STREAMS_MAX`] streams, or streams to another incarnation
    /// ([`Relay::disconnect`] these first).
    pub fn connect(&mut self, peer: LinkId, incarnation: u32) -> Result<NewStream, &'static str> {
        let port = self.port(peer);
        let PortKind::Peer(cluster) = port.kind else { return Err("it is no relay") };
        let is_known = port.incarnation == Some(incarnation);
        if port.streams.len() >= STREAMS_MAX {
            return Err("there are too many streams to it");
        }
        if port.is_up() && !is_known {
            return Err("there are streams to another start of it");
        }
        let stream = self.open_port(PortKind::Stream { peer, cluster }, PortState::Up);
        self.streams += 1;
        self.port_mut(stream).acknowledged_at = self.now_millis;
        let port = self.port_mut(peer);
        port.streams.push(stream);
        port.incarnation = Some(incarnation);
        let is_first = !port.is_up();
        let mut channels = 0;
        if is_first {
            // The frames that an earlier incarnation of the peer relay received may be lost with
            // it.
            if !is_known {
                port.lossy_channels.append(&mut port.past_channels);
            }
            channels = port.lossy_channels.len();
            self.mark_reconnected(peer);
        }
        self.touch(peer);
        Ok(NewStream { stream, is_first, lossy_channels: channels })
    }

    /// Retires `stream`, which works but which another stream replaces: it finishes the frame that
    /// it has begun, and takes no further frame. Frames in flight to this relay still arrive on the
    /// retired stream.
    pub fn retire(&mut self, stream: LinkId) {
        let PortKind::Stream { peer, .. } = self.port(stream).kind else { return };
        self.port_mut(stream).is_retired = true;
        self.port_mut(peer).streams.retain(|other| *other != stream);
    }

    /// Whether the peer relay has confirmed everything that was written to `stream`.
    pub fn is_acknowledged(&self, stream: LinkId) -> bool {
        let writer = &self.port(stream).writer;
        writer.rest.is_empty() && writer.recent_channels.unconfirmed_bytes() == 0
    }

    /// Disconnects a stream to a peer relay. The frames in flight on the stream are lost; the
    /// waiting frames go by the other streams, or wait for a new stream.
    pub fn disconnect(&mut self, stream: LinkId) {
        let PortKind::Stream { peer, .. } = self.port(stream).kind else { return };
        self.dequeue_input(stream);
        let Some(mut gone) = self.ports[stream.0 as usize].take() else { return };
        gone.writer.rest.pop(&mut self.pool, gone.writer.rest.len());
        self.free.push(stream);
        self.streams -= 1;
        self.counters.lost_bytes += gone.writer.recent_channels.unconfirmed_bytes();
        let recent =
            gone.writer.recent_channels.recent().into_iter().filter_map(ChannelKey::channel);
        let port = self.port_mut(peer);
        port.streams.retain(|other| *other != stream);
        let room = PENDING_REPORTS_MAX.saturating_sub(port.past_channels.len());
        port.past_channels.extend(recent.take(room));
        let is_last = port.streams.is_empty();
        self.record_loss(peer, gone.writer.recent_channels.unconfirmed());
        if is_last {
            let since = self.now_millis;
            self.set_state(peer, PortState::Disconnected { since });
            self.release_waiting_inputs(peer);
        } else {
            self.report_losses(peer);
        }
    }

    // ---- time --------------------------------------------------------------------------

    /// Sets the time, in milliseconds from any fixed start, sends due keepalives, and gives up
    /// frames that have waited too long.
    pub fn handle_time(&mut self, now_millis: u64) {
        self.now_millis = now_millis;
        if !self.needs_time() && !self.has_streams() {
            return;
        }
        for number in 0..self.ports.len() {
            let link = LinkId(number as u32);
            let Some(port) = &self.ports[number] else { continue };
            if self.is_timed_out(port) {
                self.abandon(link);
            } else if matches!(port.kind, PortKind::Stream { .. })
                && now_millis.saturating_sub(port.acknowledged_at) >= KEEPALIVE_MILLIS
            {
                self.send_keepalive(link);
            }
        }
    }

    fn is_timed_out(&self, port: &Port) -> bool {
        let PortState::Disconnected { since } = port.state else { return false };
        let patience = match port.kind {
            PortKind::Endpoint(_) if self.is_recovery_enabled() => {
                self.endpoint_reconnect_millis.max(RESTART_MILLIS_MAX)
            }
            PortKind::Endpoint(_) if port.incarnation.is_none() => ATTACH_MILLIS_MAX,
            PortKind::Endpoint(_) => self.endpoint_reconnect_millis,
            _ => self.endpoint_reconnect_millis.max(PEER_RECONNECT_MILLIS_MAX),
        };
        self.now_millis.saturating_sub(since) > patience
    }

    fn abandon(&mut self, link: LinkId) {
        match self.port(link).kind {
            PortKind::Endpoint(address) => {
                let has_been = self.port(link).incarnation.is_some();
                if let Some(logs) = self.logs.as_mut().filter(|_| has_been) {
                    logs.discard(address, "it was away for too long, and has been given up");
                }
                self.detach(link);
            }
            _ => {
                self.set_state(link, PortState::Abandoned);
                self.abandon_queue(link);
                self.release_waiting_inputs(link);
            }
        }
    }

    // ---- ports -------------------------------------------------------------------------

    pub(super) fn open_port(&mut self, kind: PortKind, state: PortState) -> LinkId {
        let port = Port::new(kind, state);
        self.disconnected_ports += matches!(state, PortState::Disconnected { .. }) as usize;
        if let Some(link) = self.free.pop() {
            self.ports[link.0 as usize] = Some(port);
            return link;
        }
        self.ports.push(Some(port));
        LinkId(self.ports.len() as u32 - 1)
    }

    pub(super) fn set_state(&mut self, link: LinkId, state: PortState) {
        let before = core::mem::replace(&mut self.port_mut(link).state, state);
        self.disconnected_ports -= matches!(before, PortState::Disconnected { .. }) as usize;
        self.disconnected_ports += matches!(state, PortState::Disconnected { .. }) as usize;
    }

    /// Marks the other side of `link` as connected again: it receives the waiting frames, and the
    /// sources of lost frames are notified.
    fn mark_reconnected(&mut self, link: LinkId) {
        self.set_state(link, PortState::Up);
        self.report_losses(link);
        self.touch(link);
        self.release_waiting_inputs(link);
    }
}
