//! A channel: the two directions between this endpoint and one peer. The channel has a queue of
//! items to send, buffers and credit here, and joins parts from other files: paths (`path_set`),
//! acknowledgements (`acknowledgements`), control frames and repairs (`control_frame`), arriving
//! frames (`arrivals`) and timers (`timers`).
//!
//! What enters: items to send, what the peer acknowledges or reports, the time. What leaves:
//! whether an acknowledgement is owed, what must be retransmitted, when to act next, and for the
//! driver what is known of the peer. The methods here change the channel alone;
//! [`ChannelMut`](super::ChannelMut) holds those that also change what the endpoint has to do.
//!
//! What may never happen: payload is retransmitted because the peer is silent; bytes are
//! acknowledged whose refusal waits to be sent.

use alloc::collections::VecDeque;

use super::acknowledgements::{Acknowledgements, OwedAck};
use super::arrivals::Arrivals;
use super::control_frame::{ControlFrame, PendingRepairs};
use super::driver_interface::{Memory, Peer};
use super::operation::Item;
use super::path_set::PathSet;
use super::path_state::{PathProperties, PathState, PathStatistics};
use super::schedule::ScheduleEntry;
use super::timers::ChannelTimers;
use crate::channel::{
    PathId, REORDER_WINDOW_BYTES_MAX, REORDER_WINDOW_FRAMES_MAX, ReassemblyBuffer, RetainedFrame,
    RetransmitBuffer,
};
use crate::credit::{Credit, GrantedCredit};
use crate::id::Address;
use crate::path::time::Time;
use crate::wire::frame::Kind;

/// Items that may wait in the queue of a peer when the peer asks for one more answer. Without this
/// bound, a peer that sends requests and never reads could take all memory of this process. An
/// honest peer and this endpoint each have at most a quarter of this number in flight.
pub(super) const QUEUE_MAX: usize = 1 << 18;

/// The channel to one peer: see the module documentation.
pub struct Channel<M> {
    pub(super) address: Address,
    pub(super) entry: ScheduleEntry,
    pub(super) paths: PathSet,
    pub(super) timers: ChannelTimers,
    /// The items that wait to be handed to a path, in sending order.
    pub(super) queue: VecDeque<Item<M>>,
    pub(super) out: RetransmitBuffer<M>,
    /// Whether payload for retransmission may be copied: see
    /// [`ChannelMut::set_copying`](super::ChannelMut::set_copying).
    pub(super) may_copy: bool,
    pub(super) into: ReassemblyBuffer,
    pub(super) owed_ack: OwedAck,
    pub(super) acknowledgements: Acknowledgements,
    pub(super) repairs: PendingRepairs,
    pub(super) arrivals: Arrivals,
    pub(super) credit: Credit,
    pub(super) granted_credit: GrantedCredit,
    pub(super) end: ChannelEnd,
}

/// Whether and how the channel has ended.
#[derive(Default)]
pub(super) struct ChannelEnd {
    /// The errno with which the operations of the peer fail.
    pub failed: Option<i32>,
    /// The peer has sent Goodbye, so it delivers nothing new.
    pub has_left: bool,
    /// This endpoint has sent Goodbye to the peer.
    pub has_said_goodbye: bool,
}

impl<M: Clone> Channel<M> {
    pub(super) fn new(peer: Peer, address: Address, eager_window: u32) -> Self {
        Self {
            address,
            entry: ScheduleEntry::new(peer),
            paths: PathSet::default(),
            timers: ChannelTimers::default(),
            queue: VecDeque::new(),
            out: RetransmitBuffer::default(),
            may_copy: true,
            into: ReassemblyBuffer::default(),
            owed_ack: OwedAck::default(),
            acknowledgements: Acknowledgements::default(),
            repairs: PendingRepairs::default(),
            arrivals: Arrivals::default(),
            credit: Credit::new(eager_window),
            granted_credit: GrantedCredit::new(eager_window),
            end: ChannelEnd::default(),
        }
    }

    pub(super) fn fail(&mut self, errno: i32) {
        self.end.failed = Some(errno);
        self.queue.clear();
        self.acknowledgements.awaiting.clear();
        self.arrivals = Arrivals::default();
        self.repairs.control_frames.clear();
        self.out.clear();
        self.into.clear();
        self.paths.iter_mut().for_each(|state| state.held = None);
    }

    /// Whether nothing is lost, nothing is corrupt and no control frame waits.
    #[inline]
    pub(super) fn has_nothing_to_repair(&self) -> bool {
        let owes =
            !self.repairs.control_frames.is_empty() || self.repairs.unreported_corrupt().is_some();
        !owes && !self.out.is_awaiting_status() && !self.out.has_lost()
    }

    /// The index of the control frame that `path` must send next, of kind `kind` if given.
    pub(super) fn control_frame_for(&self, path: PathId, kind: Option<Kind>) -> Option<usize> {
        let may_go = |control_frame: &ControlFrame| match control_frame.path() {
            _ if kind.is_some_and(|kind| kind != control_frame.kind()) => false,
            _ if control_frame.is_advertisement() => self.paths.may_advertise_by(path),
            Some(wanted)
                if self.paths.path_state(wanted).is_some_and(|state| !state.is_suspected) =>
            {
                wanted == path
            }
            // A peer that sends a status request by a suspected path may be heard by that path and
            // may hear nothing from it. So the answer takes the paths that remain.
            Some(_) => self.paths.sends_by(path),
            None => self.paths.sends_by(path) && self.sends_control_by(path),
        };
        self.repairs.control_frames.iter().position(may_go)
    }

    /// Processes the answer to status request `number`, whose ranges have been processed.
    pub(super) fn handle_status_reply(&mut self, now: Time, number: u64) {
        self.out.handle_status_reply(number);
        let Self { out, paths, .. } = self;
        let silent_loss = paths.with_silent_loss();
        let each = |frame: &RetainedFrame<M>| {
            if let Some(state) = paths.get_mut(frame.path.0 as usize) {
                state.handle_lost(frame);
            }
        };
        out.handle_silent_loss(number, |path| silent_loss.contains(&path), each);
        for PathState { flow, round_trip, .. } in paths.iter_mut() {
            if let Some(flow) = flow {
                flow.handle_status_reply(now, number, round_trip);
            }
        }
    }

    /// Records that status request `number` left by `path` at time `now`.
    pub(super) fn handle_status_request_sent(&mut self, (path, now): (PathId, Time), number: u64) {
        self.out.handle_status_request_sent(number);
        let silent_loss = self.paths.with_silent_loss();
        self.out.mark_status_requested(number, |path| silent_loss.contains(&path));
        let flow = self.paths.get_mut(path.0 as usize).and_then(|state| state.flow.as_mut());
        if let Some(flow) = flow {
            flow.handle_status_request_sent(now, number);
        }
    }

    /// Processes what has been acknowledged, for every path, and detects the losses which this
    /// shows.
    pub(super) fn process_acks(&mut self, now: Time) {
        for number in 0..self.paths.len() {
            if self.paths[number].process_acks(now) {
                self.detect_losses(PathId(number as u8), now);
            }
        }
    }

    /// Marks for retransmission the frames of `path` that are lost at time `now`.
    pub(super) fn detect_losses(&mut self, path: PathId, now: Time) {
        let Self { out, paths, .. } = self;
        let state = &mut paths[path.0 as usize];
        let mut lost_request = false;
        while let Some((order, start)) = state.next_lost(now) {
            let each = |frame: &RetainedFrame<M>| state.rate.handle_lost(frame.length as u64);
            match start {
                Some(start) => out.handle_lost((path, order), start, each),
                None => lost_request = true,
            }
        }
        if lost_request && out.is_awaiting_status() {
            self.repairs.owe_status_request(Some(path));
        }
    }

    /// Marks all frames in flight on `path` lost: the path lost them or can no longer be observed.
    pub(super) fn lose_in_flight(&mut self, path: PathId, now: Time) {
        let flow = self.paths.get_mut(path.0 as usize).and_then(|state| state.flow.as_mut());
        if let Some(flow) = flow {
            flow.lose_in_flight(now);
        }
        self.out.handle_break(path);
    }

    /// Queues everything again that the peer may not have heard: acknowledgements, corrupt ranges,
    /// the answer to the last status request, and a new status request.
    pub(super) fn repeat_control_frames(&mut self) {
        self.owed_ack.is_wanted |= self.into.delivered() > 0;
        self.acknowledgements.is_solicited |= !self.acknowledgements.awaiting.is_empty();
        self.repairs.repeat_corrupt();
        if let Some(answered_request) = self.repairs.answered_request {
            self.repairs.owe_sack(answered_request, None);
        }
        self.out.request_status();
    }

    /// Whether a frame must be sent to the peer even if nothing else waits to be sent.
    #[inline]
    pub(super) fn owes_ack(&self) -> bool {
        // While a refusal waits, nothing new can be acknowledged. A frame would change nothing, and
        // another one would be owed at once.
        (self.owed_ack.is_wanted && self.repairs.refusals == 0)
            || self.granted_credit.is_half_unadvertised()
    }

    /// Records that the header of a frame that has left acknowledges all bytes below `acknowledged`
    /// and advertises the granted credit. `is_answer` says that the frame carries new bytes, with
    /// which the application may have answered.
    #[inline]
    pub(super) fn handle_ack_sent(&mut self, acknowledged: u64, is_answer: bool) {
        self.owed_ack.handle_sent(acknowledged, self.into.delivered(), is_answer);
        self.granted_credit.advertise();
    }

    /// The position that a header may acknowledge: nothing new while a refusal waits to be sent.
    #[inline]
    pub(super) fn acknowledged_now(&self) -> u64 {
        if self.repairs.refusals > 0 { self.owed_ack.acknowledged } else { self.into.delivered() }
    }

    /// Removes operation `id` from all queues, so that no later operation is mistaken for it.
    pub(super) fn remove_operation(&mut self, id: u32) {
        let is_of = |item: &Item<M>| match *item {
            Item::First(of) | Item::Rest(of) | Item::Remote(of) => of == id,
            Item::Control(..) | Item::Reply { .. } => false,
        };
        self.queue.retain(|item| !is_of(item));
        self.acknowledgements.awaiting.retain(|&(_, of)| of != id);
    }

    /// Whether an owed acknowledgement may wait for the application's answer, as the last ones did.
    #[inline]
    pub(super) fn may_defer_ack(&self) -> bool {
        self.owed_ack.may_wait_for_answer() && !self.granted_credit.is_half_unadvertised()
    }

    /// Whether new bytes may be sent without exceeding the peer's reorder window, which also bounds
    /// what a path takes that takes everything.
    #[inline]
    pub(super) fn is_within_reorder_window(&self) -> bool {
        let (frames, bytes) = (self.out.retained(), self.out.unacknowledged());
        let is_near = bytes < REORDER_WINDOW_BYTES_MAX && frames < REORDER_WINDOW_FRAMES_MAX;
        let is_reordered = frames > 0 && self.paths.may_reorder();
        is_near || !(is_reordered || self.paths.has_unbounded())
    }

    pub(super) fn is_flushed(&self) -> bool {
        let is_held = |state: &PathState| state.held.is_some();
        let waits = !self.queue.is_empty() || self.out.has_lost() || self.paths.iter().any(is_held);
        self.end.failed.is_some() || !waits
    }

    /// Whether nothing is in flight on a path with silent loss, except Goodbye frames. A Goodbye is
    /// worth no more than a short wait: the peer may compute for long, and learns of the departure
    /// from others if the frame is lost.
    pub(super) fn is_safe(&self) -> bool {
        self.end.failed.is_some()
            || (self.is_flushed() && !self.is_at_risk(|kind| kind != Kind::Goodbye))
    }

    /// Whether [`Self::is_safe`] holds, and the peer has received Goodbye or has left itself.
    pub(super) fn is_goodbye_acknowledged(&self) -> bool {
        let has_heard = self.end.has_left || !self.is_at_risk(|kind| kind == Kind::Goodbye);
        self.end.failed.is_some() || (self.is_safe() && has_heard)
    }

    /// Whether a frame of a kind that `is_meant` accepts is in flight on a path with silent loss.
    fn is_at_risk(&self, is_meant: impl Fn(Kind) -> bool) -> bool {
        let has_silent_loss =
            |path| self.paths.path_state(path).is_none_or(|state| state.path.silent_loss);
        self.out.is_under_way(|kind, path| is_meant(kind) && has_silent_loss(path))
    }

    pub(super) fn is_drained(&self) -> bool {
        self.end.failed.is_some() || (self.is_flushed() && self.out.unacknowledged() == 0)
    }

    /// Records that a frame arrives by `path`. Returns whether a waiting control frame or
    /// acknowledgement may be sent now and could not be sent before.
    #[inline]
    pub(super) fn note_heard_by(&mut self, path: PathId) -> bool {
        let is_new = self.paths.last_heard_by != path;
        self.paths.last_heard_by = path;
        is_new && self.paths.has_choice() && (self.owes_ack() || !self.has_nothing_to_repair())
    }

    /// Whether control frames and acknowledgements are sent by this path: the path by which the
    /// peer was heard last, if frames are sent by that path. So no acknowledgement takes a path
    /// that may have died. (An answer takes the path of its status request.)
    #[inline]
    pub(super) fn sends_control_by(&self, path: PathId) -> bool {
        !self.paths.has_choice()
            || self.paths.last_heard_by == path
            || !self.paths.sends_by(self.paths.last_heard_by)
    }

    /// Starts the channel's probe timeout if something is unacknowledged and may be lost silently,
    /// and stops it otherwise.
    pub(super) fn note_unacknowledged(&mut self, now: Time) {
        let is_at_risk = self.out.unacknowledged() > 0 && self.paths.has_silent_loss;
        self.timers.note_unacknowledged(now, is_at_risk.then(|| self.out.delivered()));
    }

    /// Does what is due at time `now`: declares datagrams lost, and queues status requests and
    /// acknowledgements.
    pub(super) fn handle_time(&mut self, now: Time) {
        self.check_flows(now);
        self.note_unacknowledged(now);
        if self.timers.check_probe_timeout(now, self.out.delivered()) {
            self.repairs.owe_status_request(None);
        }
        if self.timers.take_delayed_ack(now) {
            self.owed_ack.is_wanted |= self.owed_ack.acknowledged < self.into.delivered();
        }
    }

    /// Declares late datagrams lost, and queues status requests on silent paths of datagrams.
    fn check_flows(&mut self, now: Time) {
        for number in 0..self.paths.len() {
            let path = PathId(number as u8);
            self.detect_losses(path, now);
            let state = &mut self.paths[number];
            let Some(flow) = state.flow.as_mut().filter(|_| state.is_up) else { continue };
            if !flow.handle_time(now, &state.round_trip) {
                continue;
            }
            if self.paths.sends_by(path) {
                self.repairs.owe_status_request(Some(path));
            } else {
                // No status request is sent by this path, so no answer would report on it.
                self.lose_in_flight(path, now);
                self.out.request_status();
            }
        }
    }

    /// The time of the channel's next action.
    pub(super) fn due(&self) -> Option<Time> {
        let flows = self.paths.iter().filter_map(|state| state.due()).min();
        [self.timers.due(), flows].into_iter().flatten().min()
    }

    /// Records that `path` could take more while nothing waits to be sent.
    #[cold]
    pub(super) fn handle_app_limited(&mut self, path: PathId) {
        let is_empty = self.queue.is_empty() && !self.out.has_lost();
        let flow = self.paths.get_mut(path.0 as usize).and_then(|state| state.flow.as_mut());
        if let Some(flow) = flow.filter(|_| is_empty) {
            flow.handle_app_limited();
        }
    }
}

/// What the driver may know about a channel.
impl<M: Memory> Channel<M> {
    /// The errno with which the peer failed, if it failed.
    pub fn failed(&self) -> Option<i32> {
        self.end.failed
    }

    /// The properties of the path to the peer that opened or changed last or, after a path was
    /// closed, of the first path that is up.
    pub fn path(&self) -> PathProperties {
        self.paths.properties
    }

    /// Whether the peer has sent Goodbye.
    pub fn has_left(&self) -> bool {
        self.end.has_left
    }

    /// Whether this endpoint has ever delivered a frame of the peer.
    pub fn has_been_heard(&self) -> bool {
        self.into.delivered() > 0
    }

    /// Whether the retransmit buffer of the channel holds anything.
    #[inline]
    pub fn retains(&self) -> bool {
        self.out.retained() > 0
    }

    /// Whether the path is up and keeps every frame for as long as both processes live.
    pub fn is_lossless(&self, number: PathId) -> bool {
        self.paths.path_state(number).is_some_and(|state| state.path.lossless)
    }

    /// The statistics of path `number`, if the path is up.
    pub fn path_statistics(&self, number: PathId) -> Option<PathStatistics> {
        let state = self.paths.path_state(number)?;
        let by_others = || self.paths.iter().map(|state| state.carried - state.retransmitted).sum();
        Some(PathStatistics {
            bytes: match state.path.lossless {
                true => self.out.next().saturating_sub(by_others()),
                false => state.carried,
            },
            retransmitted_bytes: state.retransmitted,
            is_spare: state.path.spare,
            bytes_per_second: state.rate.measured(),
            round_trip_nanos: state.round_trip.smoothed_nanos(),
            large_lost: state.flow.as_ref().map_or(0, |flow| flow.large_lost()),
        })
    }

    /// The number of the first byte of the reassembled frame whose turn has come. The driver must
    /// pass the frame's buffer to
    /// [`Endpoint::handle_reassembled`](super::Endpoint::handle_reassembled). The driver must call
    /// this function after every [`Endpoint::handle_payload`](super::Endpoint::handle_payload),
    /// until it returns `None`.
    #[inline]
    pub fn next_reassembled(&self) -> Option<u64> {
        let next = self.into.next_reassembled().map(|(frame, _)| frame);
        next.filter(|_| self.end.failed.is_none())
    }
}
