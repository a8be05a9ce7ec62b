//! The recording of this process: its replay ([`landbridge_proto::replay`]), beside what the
//! interposer and a relay on another node have of its nondeterminism.
//!
//! All frames for this process arrive through its relay, in one order, or lie in the logs of its
//! node with the process from which each came. The engine delivers them only at polls, and records
//! a determinant (`Kind::Determinant`) of each poll before any frame that may depend on it leaves.
//! After a restart the relay sends each logged determinant, followed by the frames that the
//! determinant covers. The process reads the log only as replay proceeds; frames beyond the replay
//! position stay with the relay.
//!
//! **A relay on another node** receives determinants over TCP, and the last ones are lost with this
//! process. Therefore this node also keeps the determinants that the relay may lack
//! ([`landbridge_proto::recent_determinants`]). If the connection breaks, nothing more can be
//! recorded: this incarnation ends, and the next incarnation continues.
//!
//! What enters: polls, frames sent and delivered. What leaves: what each poll has to do. What may
//! never happen: a frame is delivered, or the protocol clock advances, outside of a poll; whether a
//! frame is sent depends on how full a ring is.

use std::io;
use std::ops::{Deref, DerefMut};

use landbridge_drive::link::recorded::RecordedLink;
use landbridge_proto::id::Address;
use landbridge_proto::path::time::Time;
use landbridge_proto::replay::{PollAction, ReplayCounts, ReplayCursor};
use landbridge_proto::wire::frame::Header;

use super::sent_nondeterminism::SentNondeterminism;
use crate::{interposer, log};

/// State of recording and replay for one endpoint.
pub struct Recording {
    replay: ReplayCursor,
    /// The part of the nondeterminism record (clocks and random numbers) that the relay has; `None`
    /// if the relay does not store this record.
    nondeterminism_sent: Option<SentNondeterminism>,
    /// Closing has begun. No checkpoint is taken from here on: a relay takes the end of the
    /// connection for the end of the process.
    pub is_closing: bool,
}

impl Recording {
    /// The state before the first poll.
    pub fn new(real: Time) -> Recording {
        Recording { replay: ReplayCursor::new(real), nondeterminism_sent: None, is_closing: false }
    }

    /// Counts a poll, and returns what the poll has to do.
    pub fn poll(&mut self) -> PollAction {
        let action = self.replay.poll(interposer::count_poll());
        if action == PollAction::Live {
            interposer::confirm_live();
        }
        action
    }

    /// Whether this process still replays.
    pub fn is_replaying(&self) -> bool {
        self.replay.is_replaying(interposer::has_earlier_polls())
    }

    /// Sends new entries of the nondeterminism record to the relay, in front of the next frame,
    /// which may depend on these entries.
    #[inline]
    pub fn send_nondeterminism(
        &mut self,
        own: Address,
        stream: &mut RecordedLink,
    ) -> io::Result<()> {
        match &mut self.nondeterminism_sent {
            Some(known) if known.is_behind() => known.catch_up(own, stream),
            _ => Ok(()),
        }
    }

    /// Begins replay with the opening frame of the relay's log. `local_count`: determinants
    /// recorded on this node.
    ///
    /// # Errors
    /// Neither the relay nor this node has all determinants.
    pub fn begin_from_relay(
        &mut self,
        header: &Header,
        nondeterminism_sent: Option<SentNondeterminism>,
        local_count: u64,
    ) -> io::Result<()> {
        self.nondeterminism_sent = nondeterminism_sent;
        let polls = self.replay.begin(header.credit.into(), header.delivered, local_count);
        let first_local = self.replay.first_local();
        if first_local.is_some_and(|number| interposer::determinant(number).is_none()) {
            return Err(io::Error::other("too much of its record has not arrived there"));
        }
        log_begin(polls);
        Ok(())
    }

    /// Begins replay from the logs of this node: `determinants`, and `sent` frames that earlier
    /// incarnations have sent.
    pub fn begin_from_logs(&mut self, determinants: u64, sent: u64) {
        self.replay.begin_from_logs(determinants, sent);
        log_begin(determinants);
    }

    /// Logs the end of replay, if nothing is left to replay.
    pub fn log_if_complete(&self) {
        if let Some(ReplayCounts { frames, timer_polls }) = self.replay.replayed() {
            log!(
                Info,
                "the replay is over after {frames} frames; timers had expired at {timer_polls} \
                 polls"
            );
        }
    }
}

impl Deref for Recording {
    type Target = ReplayCursor;

    fn deref(&self) -> &ReplayCursor {
        &self.replay
    }
}

impl DerefMut for Recording {
    fn deref_mut(&mut self) -> &mut ReplayCursor {
        &mut self.replay
    }
}

fn log_begin(polls: u64) {
    if polls > 0 {
        log!(Info, "restarted: {polls} polls are replayed");
    }
}
