//! Polls of a recorded process: live ones, which are recorded, and replayed ones.
//!
//! What enters: polls of the program, frames of logs or of the relay, and the real clock. What
//! leaves: delivered frames and timers, and a determinant for each poll that had an effect
//! (`recorded_uplink`). What may never happen: a frame is delivered, or the protocol clock
//! advances, outside of a poll.

use landbridge_proto::path::time::{MILLISECOND, Time};
use landbridge_proto::replay::PollAction;

use super::Engine;
use super::carrier::Carrier;
use super::data_path::DataPath;
use super::link_table::FRAMES_PER_TURN;
use super::recorded_uplink::RecordedUplink;
use super::recording::Recording;
use crate::interposer;

/// How often a replay looks for a frame before it sleeps until somebody sends it.
const LOOKS_BEFORE_SLEEP: u32 = 16;
/// The longest such sleep, in nanoseconds: frames of other nodes come by the transport.
const FRAME_SLEEP: u64 = MILLISECOND;

impl Engine {
    /// Whether deliveries of this process are recorded.
    #[inline]
    pub fn is_recorded(&self) -> bool {
        self.connections.data.recording.is_some()
    }

    /// Executes a poll of the program: delivers the frames that replay prescribes, or the frames
    /// that have arrived, and runs timers that are due. Returns the number of frames.
    pub(super) fn poll_recorded(&mut self) -> usize {
        if interposer::is_checkpoint_wanted() {
            self.quiesce_for_checkpoint();
        }
        self.connections.data.core.flush_deferred_acks();
        self.other_nodes.progress(&mut self.connections);
        let real = self.poll_state.time();
        if self.poll_state.is_epoll_overdue(self.poll_state.clock.now()) {
            // Events wake up a process that sleeps, or report the end of the connection to the
            // relay, which ends this process.
            self.poll_epoll(0);
        }
        if self.connections.data.is_recording(|recording| recording.needs_determinant()) {
            self.connections
                .recorded_uplink()
                .iter_mut()
                .for_each(RecordedUplink::await_determinant);
        }
        let Some(poll) = self.connections.data.recording.as_mut().map(Recording::poll) else {
            return 0;
        };
        let Some(id) = self.connections.uplink.link() else { return 0 };
        let frames = match poll {
            PollAction::Nothing => 0,
            PollAction::Replay(determinant) => {
                let now = self.connections.data.advance_time(determinant.micros, real);
                let frames = self.replay_frames(id, determinant.frames);
                if self.connections.data.is_recording(|recording| recording.has_outrun_relay())
                    && let Some(mut recorded) = self.connections.recorded_uplink()
                {
                    recorded.send_determinant(determinant);
                }
                self.connections.data.do_what_is_due(now);
                frames
            }
            PollAction::Live
                if self.connections.data.has_cause(id, real) || self.spin_for_frame(id) =>
            {
                let real = self.poll_state.time();
                let micros =
                    self.connections.data.recording.as_ref().map_or(0, |replay| replay.lag(real));
                let now = self.connections.data.advance_time(micros, real);
                let frames = self.connections.poll_ring(id);
                if let Some(mut recorded) = self.connections.recorded_uplink() {
                    recorded.record_determinant(frames as u32, micros);
                }
                self.connections.data.do_what_is_due(now);
                frames
            }
            PollAction::Live => 0,
        };
        self.other_nodes.flush(&mut self.connections);
        frames
    }

    fn replay_frames(&mut self, id: usize, wanted: u32) -> usize {
        let (mut left, mut looks) = (wanted as usize, 0);
        while left > 0 {
            self.connections.data.links.frames_per_turn = left;
            match self.connections.poll_ring(id) {
                0 => {
                    // A process that has moved to another node, or begins again with others, gets
                    // its frames once more.
                    self.other_nodes.progress(&mut self.connections);
                    looks += 1;
                    wait_for_frame(self, id, looks);
                }
                frames => {
                    (left, looks) = (left - frames, 0);
                    interposer::note_replayed(frames as u64);
                }
            }
        }
        self.connections.data.links.frames_per_turn = FRAMES_PER_TURN;
        if let Some(replay) = &self.connections.data.recording {
            replay.log_if_complete();
        }
        wanted as usize
    }
}

/// Waits for a frame that the replay needs next, after so many `looks` without result.
#[cold]
fn wait_for_frame(engine: &mut Engine, id: usize, looks: u32) {
    let link = engine.connections.data.links[id].as_ref();
    let has_logs = link.is_some_and(|link| matches!(link.carrier, Carrier::Logs(_)));
    if !has_logs || looks < LOOKS_BEFORE_SLEEP {
        let mut recorded = engine.connections.recorded_uplink();
        return recorded.iter_mut().for_each(RecordedUplink::wait_for_relay);
    }
    // Who has to send it again may need this processor.
    if engine.prepare_park() {
        engine.poll_epoll(FRAME_SLEEP);
    }
    engine.unpark();
}

impl DataPath {
    /// Whether a frame has arrived, or a timer is due by the real clock.
    #[inline]
    fn has_cause(&mut self, id: usize, real: Time) -> bool {
        let is_due = |it: &Recording| it.is_due(real, || self.core.schedule().next_wake());
        self.is_recording(is_due) || self.links.has_frame(id)
    }

    /// Whether this process is recorded, and this holds of its recording.
    #[inline]
    fn is_recording(&self, holds: impl FnOnce(&Recording) -> bool) -> bool {
        self.recording.as_ref().is_some_and(holds)
    }

    /// Advances the protocol clock by `micros` microseconds, and passes the new time to the
    /// protocol.
    fn advance_time(&mut self, micros: u64, real: Time) -> Time {
        let Some(replay) = &mut self.recording else { return real };
        let now = replay.advance(micros, real);
        self.core.set_time(now);
        now
    }
}
