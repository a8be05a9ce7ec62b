//! The replays in progress: which endpoints receive the next piece of their message log, and when.
//!
//! What enters: endpoints that attach and disconnect, bytes that their links have written, and
//! segments that the disk has read. What leaves: pieces of the replay in the queues of ports, and
//! the links whose replay has failed. What may never happen: the state of a port says that a replay
//! is complete while its message log does not, or the reverse.

use alloc::collections::{BTreeSet, VecDeque};

use super::checkpoint_position::CheckpointPosition;
use super::link_queue::LinkQueue;
use super::log_storage::UNREADABLE;
use super::loss_record::PENDING_REPORTS_MAX;
use super::message_logs::MessageLogs;
use super::replay_state::{ReplayEvent, ReplayState};
use super::switch::Switch;
use super::writer::Writer;
use crate::id::Address;
use crate::route::routing_table::{LinkId, Route};

/// The replays in progress: see the module head.
#[derive(Debug, Default)]
pub(super) struct Replays {
    /// Endpoints that are to receive the next piece of their replay.
    queue: LinkQueue,
    /// Endpoints whose replay failed, and why.
    failed: VecDeque<(LinkId, &'static str)>,
}

impl Replays {
    /// Starts the replay to the endpoint at `link`, which has attached at log position `position`:
    /// the endpoint receives again all frames after this position. `is_log_restarted`: logging
    /// starts here, and the log holds none of the frames that the endpoint has received.
    pub fn start(
        &mut self,
        logs: &mut MessageLogs,
        switch: &mut Switch,
        link: LinkId,
        position: CheckpointPosition,
        is_log_restarted: bool,
    ) {
        let pool = &mut switch.memory.pool;
        let Some(port) = switch.ports.find_mut(link) else { return };
        let Some(address) = port.endpoint() else { return };
        logs.drop_incomplete_batch(address);
        if logs.unrecoverable_reason(address).is_some() {
            return;
        }
        match is_log_restarted {
            // The sources send these frames again.
            true => port.lose_all(pool),
            // No incarnation has received the pending reports.
            false => port.discard_frames(pool),
        }
        let state = logs.begin_replay(address, position, &mut port.output, pool);
        self.apply(logs, switch, (link, address), state);
    }

    /// Applies the next state of a replay to the port, and ends a replay that cannot be read.
    fn apply(
        &mut self,
        logs: &mut MessageLogs,
        switch: &mut Switch,
        (link, address): (LinkId, Address),
        state: ReplayState,
    ) {
        switch.ports.get_mut(link).handle_replay(ReplayEvent::Continue(state));
        if state == ReplayState::Unreadable {
            self.fail(logs, switch, link, address);
        }
    }

    /// Pushes the next piece of each pending replay whose endpoint has taken most of the previous
    /// piece. Returns whether there is anything to write.
    pub fn push_next(&mut self, logs: &mut MessageLogs, switch: &mut Switch) -> bool {
        let mut has_replayed = false;
        for _ in 0..self.queue.len() {
            let Some(link) = self.queue.pop() else { break };
            let pool = &mut switch.memory.pool;
            let Some(port) = switch.ports.find_mut(link) else { continue };
            let Some(address) = port.endpoint() else { continue };
            if !port.replay().is_incomplete() || !port.is_up() {
                continue;
            }
            let Some(state) = logs.replay_next(address, &mut port.output, pool) else { continue };
            self.apply(logs, switch, (link, address), state);
            has_replayed = true;
            switch.touch(link);
        }
        has_replayed
    }

    /// Puts the endpoint at `link` into the list of those that receive their next piece, if its
    /// queue has capacity for that.
    #[inline]
    pub fn schedule(&mut self, switch: &Switch, link: LinkId) {
        if switch.ports.find(link).is_some_and(|port| port.needs_replay()) {
            self.queue.push(link);
        }
    }

    #[inline]
    pub fn has_work(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Advances the direct replay at `output` by the `bytes` bytes that `writer` has written.
    /// Returns the endpoint if the rest of its log cannot be read.
    pub fn consume_direct(
        logs: &mut MessageLogs,
        switch: &mut Switch,
        output: LinkId,
        bytes: usize,
        writer: &mut Writer,
    ) -> Option<Address> {
        let port = switch.ports.get_mut(output);
        let address = port.endpoint()?;
        let state = logs.consume_direct(address, bytes, (writer, &mut switch.memory.pool));
        port.handle_replay(ReplayEvent::Continue(state));
        (state == ReplayState::Unreadable).then_some(address)
    }

    /// Stops the replay to the incarnation at `link`, which has disconnected.
    pub fn stop(logs: Option<&mut MessageLogs>, switch: &mut Switch, link: LinkId) {
        let port = switch.ports.get_mut(link);
        port.handle_replay(ReplayEvent::Stop);
        if let (Some(address), Some(logs)) = (port.endpoint(), logs) {
            let undelivered = logs.stop_replay(address);
            switch.record_loss(link, undelivered);
        }
    }

    /// Handles that the disk has read a segment of the log of `address`, or has failed to.
    pub fn handle_read(
        &mut self,
        logs: &mut MessageLogs,
        switch: &mut Switch,
        address: Address,
        is_good: bool,
    ) {
        let Route::Link(link) = switch.table.route(address) else { return };
        if !is_good {
            self.fail(logs, switch, link, address);
        } else if let Some(port) = switch.ports.find_mut(link) {
            port.handle_replay(ReplayEvent::SegmentRead);
            self.schedule(switch, link);
        }
    }

    /// Discards a log that cannot be read. An incarnation that is still replaying cannot continue.
    /// An endpoint with a mere backlog continues: its missing frames count as lost in the network,
    /// and their sources still hold them for retransmission.
    pub fn fail(
        &mut self,
        logs: &mut MessageLogs,
        switch: &mut Switch,
        link: LinkId,
        address: Address,
    ) {
        let has_only_backlog = logs.has_only_backlog(address);
        logs.discard(address, UNREADABLE);
        let port = switch.ports.get_mut(link);
        let was_replaying = port.replay().is_incomplete();
        port.handle_replay(ReplayEvent::Stop);
        if !was_replaying || !port.is_up() {
            return;
        }
        if !has_only_backlog {
            self.failed.push_back((link, UNREADABLE));
            return;
        }
        // The sources of the missing frames cannot be read either, so every process of the job
        // receives Lost. A source that has sent nothing has nothing to request.
        let sources = switch.table.processes().map(|index| Address::new(index, 0));
        let channels = sources.filter(|source| *source != address).map(|source| (source, address));
        let lost: BTreeSet<_> = channels.take(PENDING_REPORTS_MAX).collect();
        switch.ports.get_mut(link).losses.add_lossy(lost);
        switch.report_losses(link);
    }

    /// An endpoint whose connection the driver must close, and why.
    pub fn poll_failed(&mut self) -> Option<(LinkId, &'static str)> {
        self.failed.pop_front()
    }

    pub fn handle_closed(&mut self, link: LinkId) {
        self.queue.handle_closed(link);
    }
}
