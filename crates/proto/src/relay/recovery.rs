//! Recovery: what a relay keeps so that killed endpoints can be restarted, if it is enabled.
//!
//! What enters: every frame for or from an endpoint of this relay, before the switch sees it; the
//! results of disk requests. What leaves: whether the frame goes on ([`Filtered`]), replays, disk
//! requests, and events for the user. What may never happen: an endpoint that may be restarted
//! receives a frame that its log does not hold.

use alloc::vec::Vec;

use super::checkpoint_position::CheckpointPosition;
use super::determinant_log::bytes_of;
use super::divergence::{SENT_DIGEST_BYTES, SentDigest};
use super::log_status::{LogExcerpt, LogStatus};
use super::log_storage::{DiskRequest, LogEvent, LogLimits};
use super::message_log::{MessageLog, SendComparison};
use super::message_logs::MessageLogs;
use super::nondeterminism_copies::{KeptNondeterminism, NondeterminismCopy};
use super::output_queue::Piece;
use super::port::Port;
use super::port_state::PortState;
use super::recent_channels::ChannelKey;
use super::replay::push_empty;
use super::replay_state::{ReplayEvent, ReplayState};
use super::replays::Replays;
use super::segment_buffers::SegmentId;
use super::switch::{HOPS_AT, Switch};
use super::writer::Writer;
use crate::id::Address;
use crate::replay::Determinant;
use crate::route::routing_table::LinkId;
use crate::wire::Malformed;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use crate::wire::hello::LogPosition;
use crate::wire::nondeterminism_frame;

/// What a relay keeps for restarts: see the module head. While recovery is not enabled, nothing is
/// kept, and all questions are answered accordingly.
#[derive(Debug, Default)]
pub struct Recovery {
    /// Message logs of the endpoints, if recovery is enabled.
    pub(super) logs: Option<MessageLogs>,
    pub(super) replays: Replays,
}

/// What happens with a frame of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filtered {
    /// The frame goes on. If its sender is recorded, this digest is to be logged.
    Forward(Option<SentDigest>),
    /// The frame ends here: the endpoint repeats a frame of the previous incarnation, or the frame
    /// carries a determinant or recorded nondeterminism for the relay.
    Ends,
}

impl Recovery {
    pub(super) fn enable(&mut self, room: LogLimits) {
        self.logs = Some(MessageLogs::new(room));
    }

    /// Whether endpoints may be restarted.
    #[inline]
    pub fn is_enabled(&self) -> bool {
        self.logs.is_some()
    }

    /// Whether the relay logs all frames for the endpoint of `port`, for its next incarnation.
    pub(super) fn is_recorded(&self, port: &Port) -> bool {
        let (Some(address), Some(logs)) = (port.endpoint(), &self.logs) else { return false };
        logs.unrecoverable_reason(address).is_none()
    }

    /// The log of the endpoint at `link`, with `bytes` more bytes accounted, if the endpoint may be
    /// restarted.
    #[inline]
    fn log_of(&mut self, switch: &Switch, link: LinkId, bytes: usize) -> Option<&mut MessageLog> {
        let logs = self.logs.as_mut()?;
        let address = switch.ports.find(link)?.endpoint()?;
        logs.log_mut(address, bytes).map(|(log, _)| log)
    }

    // ---- frames of endpoints ---------------------------------------------------------------

    /// Filters a frame of `from`.
    ///
    /// # Errors
    /// If the frame is malformed, or differs from the frame that the previous incarnation sent.
    #[inline]
    pub(super) fn filter(
        &mut self,
        switch: &mut Switch,
        from: LinkId,
        header: &Header,
        frame: &[u8],
    ) -> Result<Filtered, Malformed> {
        if !header.kind.is_forwarded() {
            self.handle_log_frame(switch, from, header, &frame[HEADER_BYTES..])?;
            return Ok(Filtered::Ends);
        }
        let Some(log) = self.log_of(switch, from, 0) else { return Ok(Filtered::Forward(None)) };
        match log.compare(header, frame) {
            SendComparison::New(sent) => Ok(Filtered::Forward(Some(sent))),
            SendComparison::Repeated => Ok(Filtered::Ends),
            SendComparison::Diverged(before) => {
                self.note_divergence(switch, from, before, frame);
                Err(Malformed("its replay differs from what it did before"))
            }
        }
    }

    /// Handles a divergence: the endpoint at `from` sends `frame`, and the previous incarnation
    /// sent another frame at this position. The endpoint cannot know why its connection ends, and
    /// its next incarnation would diverge again. So the relay reports the frame number to the
    /// endpoint, and both frames to the user.
    #[cold]
    fn note_divergence(
        &mut self,
        switch: &mut Switch,
        from: LinkId,
        before: Option<SentDigest>,
        frame: &[u8],
    ) {
        let pool = &mut switch.memory.pool;
        let (Some(logs), Some(port)) = (&mut self.logs, switch.ports.find_mut(from)) else {
            return;
        };
        let Some(address) = port.endpoint() else { return };
        let which = (address, port.incarnation.unwrap_or(0));
        let number = logs.note_divergence(which, before, frame);
        // The endpoint must be able to read the rest of the frame that it has begun to read.
        let rest = core::mem::take(&mut port.writer.rest);
        port.lose_all(pool);
        port.writer.rest = rest;
        push_empty(Kind::Divergence, address, [0, number], 0, &mut port.output, pool);
        port.diverged_frame = Some(number);
        switch.touch(from);
    }

    /// Logs the digest `sent` of a frame that the relay has forwarded for `from`.
    #[inline]
    pub(super) fn log_sent(&mut self, switch: &Switch, from: LinkId, sent: Option<SentDigest>) {
        if let Some(sent) = sent
            && let Some(log) = self.log_of(switch, from, SENT_DIGEST_BYTES)
        {
            log.append_sent(sent);
        }
    }

    /// Handles a frame for the message log of the endpoint at `from`.
    ///
    /// # Errors
    /// If the frame is malformed, or if this relay keeps no message log of `from`.
    fn handle_log_frame(
        &mut self,
        switch: &mut Switch,
        from: LinkId,
        header: &Header,
        body: &[u8],
    ) -> Result<(), Malformed> {
        const NO_LOG: Malformed =
            Malformed("a frame for a message log that this relay does not keep");
        let address = switch.ports.find(from).and_then(Port::endpoint);
        let (Some(logs), Some(address)) = (&mut self.logs, address) else { return Err(NO_LOG) };
        if header.kind == Kind::Determinant {
            let determinant = Determinant::of(header)?;
            if let Some((log, _)) = logs.log_mut(address, bytes_of(determinant)) {
                log.determinants.push(determinant);
                switch.counters.determinant_bytes += bytes_of(determinant) as u64;
                switch.counters.delivered_frames += determinant.frames as u64;
            }
            return Ok(());
        }
        let said = nondeterminism_frame::parse(header, body)?;
        let added = logs.handle_nondeterminism(address, header.delivered, said)?;
        switch.counters.nondeterminism_bytes += added as u64;
        Ok(())
    }

    // ---- frames for endpoints ----------------------------------------------------------------

    /// Appends a frame to the log of an endpoint that may be restarted, and sends it if the
    /// endpoint is connected. A disconnected endpoint receives the frame after its restart, or the
    /// source receives Unreachable. The queue has no bound here, because a recorded endpoint must
    /// never make an input wait: frames that find no capacity at once are sent from the log
    /// ([`Recovery::begin_backlog`]). Returns false if the endpoint cannot be restarted, and then
    /// does nothing.
    pub(super) fn forward(
        &mut self,
        switch: &mut Switch,
        to: LinkId,
        bytes: &mut [u8],
        at: usize,
        header: &Header,
    ) -> bool {
        let length = HEADER_BYTES + header.length as usize;
        let pool = &mut switch.memory.pool;
        let (Some(logs), Some(port)) = (&mut self.logs, switch.ports.find_mut(to)) else {
            return false;
        };
        let Some(address) = port.endpoint() else { return false };
        let mut is_backlog_queued = false;
        if port.replay().is_incomplete()
            && let Some(state) = logs.queue_backlog(address, length, &mut port.output, pool, bytes)
        {
            port.handle_replay(ReplayEvent::Continue(state));
            is_backlog_queued = true;
        }
        bytes[at + HOPS_AT] += 1;
        let Some(is_replaying) = logs.append(address, &bytes[at..at + length]) else {
            bytes[at + HOPS_AT] -= 1;
            return false;
        };
        switch.counters.frames += 1;
        switch.counters.bytes += length as u64;
        if is_backlog_queued {
            switch.touch(to);
        }
        let port = switch.ports.get_mut(to);
        if is_replaying {
            // The replay sends this frame after the frames that already wait.
        } else if port.is_up() {
            port.output.take(Piece { at, length }, header);
            switch.touch(to);
        } else {
            switch.record_loss(to, [ChannelKey::of(header)].into());
        }
        true
    }

    /// Appends a report for the endpoint at `link` to its log. An endpoint that cannot be restarted
    /// has received the report all the same, from its queue.
    pub(super) fn append_report(&mut self, switch: &Switch, link: LinkId, report: &[u8]) {
        let address = switch.ports.find(link).and_then(Port::endpoint);
        if let (Some(logs), Some(address)) = (&mut self.logs, address) {
            let _ = logs.append(address, report);
        }
    }

    /// Whether a frame for `to` has to wait until the disk has written a segment. Its input then
    /// waits.
    #[inline]
    pub(super) fn must_wait_for_disk(
        &mut self,
        switch: &mut Switch,
        (from, to): (LinkId, LinkId),
        bytes: usize,
    ) -> bool {
        let Some(logs) = self.logs.as_mut().filter(|logs| logs.must_wait(bytes)) else {
            return false;
        };
        let Some(input) = switch.ports.find(from) else { return false };
        let output = switch.ports.find(to).and_then(Port::endpoint);
        let Some(address) = output else { return false };
        if input.state() == PortState::Draining || logs.unrecoverable_reason(address).is_some() {
            return false;
        }
        logs.storage.add_waiting_input(from);
        switch.counters.disk_waits += 1;
        true
    }

    /// Removes `link` from the inputs that wait for the disk.
    pub(super) fn stop_waiting_for_disk(&mut self, link: LinkId) {
        if let Some(logs) = &mut self.logs {
            logs.storage.remove_waiting_input(link);
        }
    }

    // ---- endpoints attach and disconnect -----------------------------------------------------

    /// Checks that `incarnation` of the endpoint `address` can attach at log position `standing`.
    /// Returns the position in its logs, and whether logging restarts here, which happens only if
    /// `may_restart_log`.
    ///
    /// # Errors
    /// If the log of the endpoint does not hold `standing`, or has been discarded.
    pub(super) fn locate(
        &mut self,
        address: Address,
        incarnation: u32,
        standing: LogPosition,
        may_restart_log: bool,
    ) -> Result<(CheckpointPosition, bool), &'static str> {
        let Some(logs) = &mut self.logs else { return Ok((CheckpointPosition::default(), false)) };
        let is_log_restarted = may_restart_log && logs.restart_log(address, standing);
        let needs_log = incarnation > 0 || standing != LogPosition::default();
        if let Some(why) = logs.unrecoverable_reason(address).filter(|_| needs_log) {
            return Err(why);
        }
        let position = logs.checkpoint_position(address, standing)?;
        logs.trim(address, standing.kept);
        Ok((position, is_log_restarted))
    }

    /// Starts the replay to the endpoint at `link`: see [`Replays::start`].
    pub(super) fn start_replay(
        &mut self,
        switch: &mut Switch,
        link: LinkId,
        position: CheckpointPosition,
        is_log_restarted: bool,
    ) {
        if let Some(logs) = &mut self.logs {
            self.replays.start(logs, switch, link, position, is_log_restarted);
        }
    }

    /// Stops the replay to the incarnation at `link`, which has disconnected.
    pub(super) fn stop_replay(&mut self, switch: &mut Switch, link: LinkId) {
        Replays::stop(self.logs.as_mut(), switch, link);
    }

    /// Discards the log of an endpoint that was away for too long.
    pub(super) fn give_up(&mut self, address: Address) {
        if let Some(logs) = &mut self.logs {
            logs.discard(address, "it was unreachable for too long, and counts as lost");
        }
    }

    /// Drops the incomplete batch of an endpoint whose earlier incarnations are fenced.
    pub(super) fn drop_incomplete_batch(&mut self, address: Address) {
        if let Some(logs) = &mut self.logs {
            logs.drop_incomplete_batch(address);
        }
    }

    // ---- replay --------------------------------------------------------------------------

    /// Pushes the next piece of each pending replay: see [`Replays::push_next`].
    pub(super) fn replay_next(&mut self, switch: &mut Switch) -> bool {
        let Self { logs, replays } = self;
        logs.as_mut().is_some_and(|logs| replays.push_next(logs, switch))
    }

    /// Whether [`super::Relay::replay_next`] has a replay to continue.
    pub fn has_replay_work(&self) -> bool {
        self.replays.has_work()
    }

    /// Keeps in the message log what the output of `port` has not taken, if the log holds it: the
    /// frames of the pieces. Returns false if the endpoint has no log.
    pub(super) fn begin_backlog(&mut self, port: &mut Port) -> bool {
        let (Some(logs), Some(address)) = (&mut self.logs, port.endpoint()) else { return false };
        if !logs.begin_backlog(address, port.output.pieces_bytes()) {
            return false;
        }
        port.output.drop_pieces();
        port.handle_replay(ReplayEvent::Continue(ReplayState::Direct));
        true
    }

    /// Frames of direct replay, which the link writes straight out of the message log.
    pub(super) fn direct(&self, output: &Port) -> impl Iterator<Item = (Header, &[u8])> {
        let is_direct = output.replay() == ReplayState::Direct;
        let logs = self.logs.as_ref().filter(|_| is_direct);
        let log = output.endpoint().and_then(|address| logs?.all.get(&address));
        log.into_iter().flat_map(MessageLog::direct)
    }

    /// Advances the direct replay at `output` by the `bytes` bytes that `writer` has written.
    /// Returns the endpoint if the rest of its log cannot be read.
    pub(super) fn consume_direct(
        &mut self,
        switch: &mut Switch,
        output: LinkId,
        bytes: usize,
        writer: &mut Writer,
    ) -> Option<Address> {
        Replays::consume_direct(self.logs.as_mut()?, switch, output, bytes, writer)
    }

    /// Ends a replay that cannot be read: see [`Replays::fail`].
    pub(super) fn fail_replay(&mut self, switch: &mut Switch, link: LinkId, address: Address) {
        if let Some(logs) = &mut self.logs {
            self.replays.fail(logs, switch, link, address);
        }
    }

    /// An endpoint whose connection the driver must close, and why: its log cannot be read, so the
    /// replay has failed.
    pub fn poll_failed_replay(&mut self) -> Option<(LinkId, &'static str)> {
        self.replays.poll_failed()
    }

    // ---- disk ----------------------------------------------------------------------------

    /// Result of [`DiskRequest::Write`].
    pub(super) fn handle_written(&mut self, switch: &mut Switch, id: SegmentId, is_written: bool) {
        let Some(logs) = &mut self.logs else { return };
        logs.handle_written(id, is_written);
        if !logs.must_wait(0) {
            switch.turns.resume_all(logs.storage.take_waiting_inputs());
        }
    }

    /// Result of [`DiskRequest::Read`].
    pub(super) fn handle_read(
        &mut self,
        switch: &mut Switch,
        id: SegmentId,
        bytes: Option<Vec<u8>>,
    ) {
        let Some(logs) = &mut self.logs else { return };
        switch.counters.read_back_bytes += bytes.as_ref().map_or(0, Vec::len) as u64;
        let Some((address, is_good)) = logs.handle_read(id, bytes) else { return };
        self.replays.handle_read(logs, switch, address, is_good);
    }

    /// Sets [`LogLimits::memory`]. The logs that exceed this bound notice with their next frame.
    pub fn set_memory(&mut self, bytes: u64) {
        if let Some(logs) = &mut self.logs {
            logs.storage.set_memory(bytes);
        }
    }

    /// Sets how many bytes the log of an endpoint may grow before the next checkpoint is due,
    /// whatever the time. The relay checks the growth with each full segment.
    pub fn set_checkpoint_log_bytes(&mut self, bytes: u64) {
        if let Some(logs) = &mut self.logs {
            logs.storage.set_checkpoint_log_bytes(bytes);
        }
    }

    /// The next disk request that the driver should serve.
    pub fn poll_disk_request(&mut self) -> Option<DiskRequest> {
        self.logs.as_mut()?.storage.poll_request()
    }

    /// Number of empty segment buffers that the relay needs soon
    /// ([`Recovery::add_segment_buffer`]), as far as the memory bound allows.
    #[inline]
    pub fn wanted_segment_buffers(&self) -> usize {
        let Some(logs) = &self.logs else { return 0 };
        logs.storage.wanted_buffers(logs.bytes, logs.all.len())
    }

    /// An empty segment buffer that the relay does not need soon, for the driver's pool. Its pages
    /// are mapped.
    pub fn poll_surplus_buffer(&mut self) -> Option<Vec<u8>> {
        self.logs.as_mut()?.storage.poll_surplus_buffer()
    }

    /// Bytes within the memory bound that neither the logs nor empty buffers take now.
    pub fn unused_bytes(&self) -> u64 {
        self.logs.as_ref().map_or(0, |logs| logs.storage.unused_bytes(logs.bytes))
    }

    /// Adds an empty segment buffer, whose pages are mapped.
    pub fn add_segment_buffer(&mut self, segment: Vec<u8>) {
        if let Some(logs) = &mut self.logs {
            logs.storage.buffer_pool.give_back(segment);
        }
    }

    /// Bytes of all message logs: in memory, and on the disk.
    pub fn kept_bytes(&self) -> (u64, u64) {
        let Some(logs) = &self.logs else { return (0, 0) };
        (logs.bytes - logs.storage.evicted_bytes, logs.storage.disk_bytes)
    }

    /// Whether inputs wait for the disk.
    pub fn waits_for_disk(&self) -> bool {
        self.logs.as_ref().is_some_and(|logs| logs.storage.has_waiting_inputs())
    }

    // ---- the user and the launcher -----------------------------------------------------------

    /// The next event that the user should know.
    pub fn poll_log_event(&mut self) -> Option<LogEvent> {
        self.logs.as_mut()?.storage.poll_event()
    }

    /// The status of each message log, in order of address, from `first` on.
    pub fn log_statuses(&self, first: Address) -> impl Iterator<Item = LogStatus> {
        let logs = self.logs.iter();
        logs.flat_map(move |it| it.all.range(first..)).map(|(who, it)| LogStatus::of(*who, it))
    }

    /// An excerpt of `count` determinants of an endpoint, beginning with number `from`, and their
    /// frames: see [`LogExcerpt`]. `None`: the endpoint has no log, or too many determinants
    /// precede `from`.
    pub fn log_excerpt(&self, address: Address, from: u64, count: u64) -> Option<LogExcerpt> {
        LogExcerpt::of(self.logs.as_ref()?.all.get(&address)?, from, count)
    }

    /// Starts a copy of the recorded nondeterminism of this endpoint. Call this before the endpoint
    /// attaches.
    pub fn keep_nondeterminism_of(&mut self, address: Address) {
        if let Some(logs) = &mut self.logs {
            logs.keep_nondeterminism(address);
        }
    }

    /// The copy of an endpoint's recorded nondeterminism, whole batches only. `None`: there is no
    /// copy.
    pub fn nondeterminism_of(&self, address: Address) -> Option<KeptNondeterminism> {
        let log = self.logs.as_ref()?.all.get(&address)?;
        log.nondeterminism.as_ref().map(NondeterminismCopy::kept)
    }
}
