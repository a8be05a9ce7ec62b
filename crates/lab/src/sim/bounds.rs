//! Compares the resources that endpoints hold with their bounds, throughout a run.
//!
//! What may never happen: a copy is kept for a frame that no channel holds; a path of datagrams
//! counts frames as under way that are not; any resource grows with time, or with faults of paths,
//! beyond what the operations in flight account for.

use landbridge_proto::channel::{PathId, REORDER_WINDOW_BYTES_MAX, REORDER_WINDOW_FRAMES_MAX};
use landbridge_proto::endpoint::{ChannelUsage, InFlightUsage};
use landbridge_proto::limit::FRAME_BODY_BYTES_MAX;

use super::channel_record::ChannelRecord;
use super::world::World;
use super::{Violation, require};

/// Status requests of one path that are remembered at most (`STATUS_REQUESTS_MAX` of the endpoint's
/// flows).
const STATUS_REQUESTS_MAX: usize = 16;
/// Corrupt ranges at once at most (`CORRUPT_RANGES_MAX` of the endpoint).
const CORRUPT_RANGES_MAX: usize = 64;
/// Datagrams that may overtake a datagram before it counts as lost (`PACKET_THRESHOLD_MAX` of
/// `Flight`).
const OVERTAKEN_MAX: usize = 1 << 10;
/// Answers that one operation of the peer may have queued: a grant or a refusal, and the requested
/// bytes; and the same for the operation before, which the peer may believe to be over while
/// fragments of it are still under way.
const ANSWERS_MAX: usize = 4;
/// Steps between two checks; each check looks at one process, in turn.
const STEPS: usize = 8;

impl World {
    /// Checks one process, in every eighth step.
    pub fn check_bounds(&mut self) -> Result<(), Violation> {
        self.steps += 1;
        if !self.steps.is_multiple_of(STEPS) {
            return Ok(());
        }
        let node = self.steps / STEPS % self.nodes.len();
        self.check_bounds_of(node)
    }

    fn check_bounds_of(&mut self, node: usize) -> Result<(), Violation> {
        self.nodes[node].reap(&mut self.arena)?;
        let endpoint = &self.nodes[node].endpoint;
        require!(
            endpoint.schedule().armed_timers() <= endpoint.peers(),
            "{node} wants to be woken too often"
        );
        for other in 0..self.nodes.len() {
            let Some(peer) = self.nodes[node].peers[other] else { continue };
            if self.model.failed[node][other] || self.model.failed[other][node] {
                continue;
            }
            self.check_held(node, other, &self.nodes[node].endpoint.channel(peer).usage())?;
            for path_id in 0..self.pipes[node][other].len() {
                let flying =
                    self.nodes[node].endpoint.channel(peer).in_flight_usage(PathId(path_id as u8));
                flying.map_or(Ok(()), |flying| check_in_flight((node, other, path_id), &flying))?;
            }
        }
        Ok(())
    }

    /// Checks at the end that no endpoint holds data, work or credit.
    pub fn check_idle(&mut self) -> Result<(), Violation> {
        for node in 0..self.nodes.len() {
            self.check_bounds_of(node)?;
        }
        for (index, node) in self.nodes.iter().enumerate() {
            node.endpoint.check_empty()?;
            require!(node.endpoint.is_drained(), "{index} is not drained");
            require!(node.endpoint.is_idle(), "{index} holds operations");
            require!(node.copies.is_empty(), "{index} keeps {} copies", node.copies.len());
            for (other, peer) in node.peers.iter().enumerate() {
                let Some(peer) = *peer else { continue };
                require!(!node.endpoint.has_work_for(peer), "{index} has work for {other}");
                let ChannelRecord { eager_sent, eager_returned, .. } = self.channels[index][other];
                let is_live = !self.model.failed[index][other];
                // The last frame that returns credit may vanish if no further frame is necessary.
                let is_silent = node.paths[other].iter().any(|path| path.silent_loss);
                let has_credit =
                    eager_sent == eager_returned || (is_silent && self.has_silent_loss);
                require!(!is_live || has_credit, "{index} has lost credit with {other}");
            }
        }
        Ok(())
    }

    fn check_held(&self, node: usize, other: usize, held: &ChannelUsage) -> Result<(), Violation> {
        let say = |what: &str| format!("{node} has too much for {other}: {what}: {held:?}");
        let path_count = self.pipes[node][other].len();
        let operations = |node: usize| self.nodes[node].config.operations_max;
        let answers = ANSWERS_MAX * operations(other);
        // One Goodbye may be queued as well.
        require!(held.queue <= operations(node) + answers + 1, "{}", say("queue"));
        require!(held.awaiting <= operations(node), "{}", say("awaiting"));
        // Reports and status requests can be pending for each path, and without a path.
        require!(held.control_frames <= 2 * (path_count + 1), "{}", say("control_frames"));
        require!(held.corrupt <= CORRUPT_RANGES_MAX, "{}", say("corrupt"));
        require!(held.out_of_order <= path_count, "{}", say("out_of_order"));
        let window = self.nodes[node].config.eager_window as usize;
        require!(held.announced <= window, "{}", say("announced"));
        require!(held.lost <= held.kept, "{}", say("lost"));
        let span = REORDER_WINDOW_BYTES_MAX + FRAME_BODY_BYTES_MAX as u64;
        require!(!held.may_reorder || held.unacknowledged <= span, "{}", say("unacknowledged"));
        // Frames without a copy need no entry in the retransmit buffer: all of their bytes are
        // acknowledged.
        require!(held.unacknowledged > 0 || held.kept == 0, "{}", say("kept"));
        Ok(())
    }

    /// Delivered bytes, and pending operations.
    pub fn progress(&self) -> (u64, usize) {
        (
            self.channels.iter().flatten().map(|channel| channel.delivered_up_to).sum(),
            self.model.operations.len(),
        )
    }

    /// Whether all sent data has been delivered, and every sender has the acknowledgements that it
    /// waits for.
    pub fn is_all_delivered(&self) -> bool {
        self.stuck().is_none()
    }

    /// Two processes with data under way, if there are any.
    pub fn stuck(&self) -> Option<(usize, usize)> {
        let count = self.nodes.len();
        let mut pairs = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        pairs.find(|&(from, to)| {
            let Some(peer) = self.nodes[from].peers[to] else { return false };
            if self.model.failed[from][to] || self.model.failed[to][from] {
                return false;
            }
            let held = self.nodes[from].endpoint.channel(peer).usage();
            let is_delivered = held.sent == self.channels[from][to].delivered_up_to;
            let is_quiet = held.queue == 0 && held.awaiting == 0;
            !is_delivered || !is_quiet || !self.model.flight[from][to].is_empty()
        })
    }
}

fn check_in_flight(
    (from, to, path_id): (usize, usize, usize),
    flying: &InFlightUsage,
) -> Result<(), Violation> {
    let say = |what: &str| format!("from {from} to {to} by {path_id}: {what}: {flying:?}");
    require!(flying.counted == flying.kept, "{}", say("under way and kept differ"));
    require!(flying.status_requests <= STATUS_REQUESTS_MAX, "{}", say("status_requests"));
    // Datagrams behind the oldest datagram whose fate is unknown; the oldest is lost when enough
    // later datagrams have arrived.
    let tracked_datagrams = REORDER_WINDOW_FRAMES_MAX + OVERTAKEN_MAX + STATUS_REQUESTS_MAX;
    require!(flying.tracked_datagrams <= tracked_datagrams, "{}", say("tracked_datagrams"));
    Ok(())
}

/// Checks that a frame that has just left by a path of datagrams fits the window.
pub fn check_window(before: &InFlightUsage, after: &InFlightUsage) -> Result<(), Violation> {
    let grows = after.counted > before.counted;
    let most = before.window.max(after.window).max(before.datagram);
    require!(
        !grows || after.counted <= most,
        "more is under way than may be: {before:?} {after:?}"
    );
    Ok(())
}
