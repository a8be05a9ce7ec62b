//! The state of recording and replay: what is recorded of message delivery, and what a restart of
//! this process repeats.
//!
//! All frames for this process arrive through its relay, in one order. The engine delivers frames
//! only at *polls*: calls of the program that look for messages. Two things are nondeterministic:
//! how many frames each poll delivers, and which time the protocol sees at that poll. The engine
//! sends both to the relay as a determinant (`Kind::Determinant`), before any frame that may
//! depend on them. After a restart the relay sends each logged determinant, followed by the frames
//! that the determinant covers. The new incarnation delivers the same frames at the same polls and
//! at the same protocol times. When no determinant is left, the process is live. The process reads
//! the log only as replay proceeds; frames beyond the replay position stay with the relay.
//!
//! **A relay on another node** receives determinants over TCP, and the last ones are lost with this
//! process. Therefore this node also keeps the determinants that the relay may lack
//! ([`landbridge_proto::recent_determinants`]). An incarnation on this node replays these
//! determinants after the relay's, and sends them to the relay. If the connection breaks, nothing
//! more can be recorded: this incarnation ends, and the next incarnation continues.
//!
//! **Logs of the senders** (`recover_log=sender`) hold frames and determinants on this node, with
//! the process from which each frame came, and no relay takes part
//! ([`landbridge_drive::link::node_log`]).
//!
//! **Time.** The protocol sees a clock of this process ([`ProtocolClock`]). The clock stands still,
//! except at polls that deliver frames and at polls at which a protocol timer is due by the real
//! clock: at these polls the clock catches up with the real clock. Polls without events therefore
//! need no record, and a status request that a timer causes happens again at the same poll.
//!
//! What may never happen: a frame is delivered, or the protocol clock advances, outside of a poll;
//! whether a frame is sent depends on how full a ring is.

use std::io;

use landbridge_drive::link::recorded::RecordedLink;
use landbridge_proto::id::Address;
use landbridge_proto::path::time::{MICROSECOND, Time};
use landbridge_proto::wire::frame::Header;
use landbridge_proto::wire::hello::LogPosition;

use super::sent_nondeterminism::SentNondeterminism;
use crate::{interposer, log};

/// Number of latest frames whose sending poll is remembered. The number exceeds what a ring holds,
/// so the sending poll is known for every frame that the relay may refuse.
const SENT_POLLS_KEPT: usize = 4096;

/// State of recording and replay for one endpoint; the module head describes the protocol.
#[derive(Default)]
pub struct Replay {
    now: ProtocolClock,
    /// Determinants recorded or replayed so far.
    determinants: u64,
    /// Bytes of the frames that these determinants have delivered.
    pub taken: u64,
    /// Polls since the last determinant.
    polls: u64,
    /// The determinant that replay executes next.
    next: Option<Determinant>,
    /// Determinants that the relay has still to send.
    awaited_count: u64,
    /// Determinants recorded on this node, including determinants that the relay may lack.
    local_count: u64,
    /// Determinants in the relay's message log.
    relay_count: u64,
    /// Frames that this incarnation has sent.
    sent: u64,
    /// Frames that earlier incarnations have sent, according to the relay.
    sent_before: u64,
    /// Polls since the process began.
    polls_total: u64,
    /// The value of `polls_total` at which each of the last [`SENT_POLLS_KEPT`] frames was sent.
    sent_at_poll: Box<[u64]>,
    /// The part of the nondeterminism record (clocks and random numbers) that the relay has; `None`
    /// if the relay does not store this record.
    nondeterminism_sent: Option<SentNondeterminism>,
    /// Closing has begun. No checkpoint is taken from here on: a relay takes the end of the
    /// connection for the end of the process.
    pub is_closing: bool,
    counts: ReplayCounts,
}

/// What this incarnation has replayed.
#[derive(Clone, Copy, Default)]
struct ReplayCounts {
    /// Frames delivered during replay.
    frames: u64,
    /// Replayed polls that delivered nothing and only advanced the clock.
    timer_polls: u64,
}

/// The `polls`-th poll since the previous determinant delivered `frames` frames, after the protocol
/// clock had advanced by `micros` microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Determinant {
    pub polls: u64,
    pub frames: u32,
    pub micros: u64,
}

/// The action of a poll.
#[derive(Debug, PartialEq, Eq)]
pub enum PollAction {
    /// The poll delivers nothing, as in the earlier incarnation.
    Nothing,
    /// The poll repeats this determinant.
    Replay(Determinant),
    /// The poll delivers the frames that have arrived, and records them.
    Live,
}

/// The time as the protocol sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ProtocolClock {
    micros: u64,
    /// Reading of the real clock, in microseconds, when `micros` was set last. After a restart this
    /// may be the reading of another clock.
    real: u64,
}

impl ProtocolClock {
    /// Microseconds by which this clock is behind the real clock.
    fn lag(self, real: Time) -> u64 {
        (real.0 / MICROSECOND).saturating_sub(self.real)
    }

    fn advance(&mut self, micros: u64, real: Time) {
        self.micros = self.micros.saturating_add(micros);
        self.real = real.0 / MICROSECOND;
    }

    fn time(self) -> Time {
        Time(self.micros.saturating_mul(MICROSECOND))
    }
}

impl Replay {
    /// The state before the first poll.
    pub fn new(real: Time) -> Self {
        let now = ProtocolClock { micros: 0, real: real.0 / MICROSECOND };
        let sent_at_poll = vec![0; SENT_POLLS_KEPT].into_boxed_slice();
        Self { now, sent_at_poll, ..Self::default() }
    }

    /// The position of this process in its message log, for the hello to the relay.
    pub fn standing(&self, kept: u64) -> LogPosition {
        LogPosition { determinants: self.determinants, taken: self.taken, sent: self.sent, kept }
    }

    /// Continues the clock from here after a restore: this process was a checkpoint image until
    /// now.
    pub fn resume_clock(&mut self, real: Time) {
        self.now.real = real.0 / MICROSECOND;
    }

    /// Lets the real clock appear to have advanced by `micros` microseconds more.
    #[cfg(test)]
    pub fn pass_time(&mut self, micros: u64) {
        self.now.real -= micros;
    }

    /// Counts a poll, and returns what the poll has to do.
    pub fn poll(&mut self) -> PollAction {
        self.polls += 1;
        self.polls_total += 1;
        let has_polled_before = interposer::count_poll();
        match self.next {
            Some(next) if next.polls > self.polls => PollAction::Nothing,
            Some(next) => {
                self.next = None;
                self.polls = 0;
                self.determinants += 1;
                self.counts.frames += next.frames as u64;
                self.counts.timer_polls += (next.frames == 0) as u64;
                PollAction::Replay(next)
            }
            // The earlier incarnation made this poll, or sent this frame, after its last
            // determinant: it delivered nothing at this poll.
            None if has_polled_before || self.sent < self.sent_before => PollAction::Nothing,
            None => {
                interposer::confirm_live();
                PollAction::Live
            }
        }
    }

    /// Counts a frame that was sent to the relay.
    #[inline]
    pub fn note_sent(&mut self) {
        if let Some(poll) = self.sent_at_poll.get_mut(self.sent as usize % SENT_POLLS_KEPT) {
            *poll = self.polls_total;
        }
        self.sent += 1;
    }

    /// The text `why` with the current poll and the number of sent frames.
    pub fn at_position(&self, why: &str) -> String {
        format!("{why}, at poll {}, after {} frames", self.polls_total, self.sent)
    }

    /// The error text for a frame that differs from the frame which an earlier incarnation sent at
    /// the same position. `frame`: its number, which may be that of the frame that is sent now.
    pub fn divergence(&self, frame: u64) -> String {
        let is_known = frame < self.sent && self.sent - frame <= SENT_POLLS_KEPT as u64;
        let poll = self.sent_at_poll.get(frame as usize % SENT_POLLS_KEPT).filter(|_| is_known);
        let when = match poll {
            None if frame == self.sent => format!("at poll {}", self.polls_total),
            Some(poll) => format!("at poll {poll}"),
            None => format!("before poll {}", self.polls_total),
        };
        format!("its frame {frame}, sent {when}, is not what it sent there before")
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
    pub fn begin(
        &mut self,
        header: &Header,
        nondeterminism_sent: Option<SentNondeterminism>,
        local_count: u64,
    ) -> io::Result<()> {
        self.nondeterminism_sent = nondeterminism_sent;
        self.awaited_count = header.credit.into();
        self.relay_count = self.determinants + self.awaited_count;
        self.sent_before = self.sent + header.delivered;
        self.counts = ReplayCounts::default();
        self.local_count = local_count;
        if self.local_count > self.relay_count
            && interposer::determinant(self.relay_count).is_none()
        {
            return Err(io::Error::other("too much of its record has not arrived there"));
        }
        let replayed_polls =
            self.awaited_count.max(self.local_count.saturating_sub(self.determinants));
        if replayed_polls > 0 {
            log!(Info, "restarted: {replayed_polls} polls are replayed");
        }
        Ok(())
    }

    /// Whether the relay has the determinant of the next poll.
    pub fn awaits_relay(&self) -> bool {
        self.awaited_count > 0
    }

    /// Begins replay from the logs of this node: `count` determinants, and `sent` frames that
    /// earlier incarnations have sent.
    pub fn begin_from_logs(&mut self, count: u64, sent: u64) {
        (self.local_count, self.relay_count, self.sent_before) = (count, u64::MAX, sent);
        if count > 0 {
            log!(Info, "restarted: {count} polls are replayed");
        }
    }

    /// Number of the next determinant.
    pub fn next_number(&self) -> u64 {
        self.determinants
    }

    /// Takes the determinant of the next poll out of those that this node has recorded.
    pub fn take_local_determinant(&mut self, determinant: Option<[u64; 3]>) {
        // The determinant existed when this incarnation began, and replay records no determinants
        // on this node.
        self.next = determinant.map(|[polls, frames, micros]| Determinant {
            polls,
            frames: frames as u32,
            micros,
        });
    }

    /// Takes the determinant of the next poll from the relay.
    pub fn take_determinant(&mut self, header: &Header) {
        let &Header { sequence: polls, credit: frames, delivered: micros, .. } = header;
        self.next = Some(Determinant { polls, frames, micros });
        self.awaited_count -= 1;
    }

    /// Counts a poll that delivered frames or advanced the clock. Returns the number of its
    /// determinant, and the determinant.
    pub fn note_determinant(&mut self, frames: u32, micros: u64) -> (u64, Determinant) {
        let polls = std::mem::take(&mut self.polls);
        let number = self.determinants;
        self.determinants += 1;
        (number, Determinant { polls, frames, micros })
    }

    /// Whether the relay lacks the determinant of the last poll, which this node has recorded.
    pub fn has_outrun_relay(&self) -> bool {
        self.determinants > self.relay_count
    }

    /// Microseconds by which the protocol clock is behind the real clock.
    pub fn lag(&self, real: Time) -> u64 {
        self.now.lag(real)
    }

    /// Advances the protocol clock by `micros` microseconds; returns the new time.
    pub fn advance(&mut self, micros: u64, real: Time) -> Time {
        self.now.advance(micros, real);
        self.now.time()
    }

    /// The protocol time that a poll would see if the clock caught up with the real clock.
    pub fn caught_up(&self, real: Time) -> Time {
        self.now.time().after(self.now.lag(real).saturating_mul(MICROSECOND))
    }

    /// Whether a timer is due by the real clock. `next_wake`: the time of the next timer.
    #[inline]
    pub fn is_due(&self, real: Time, next_wake: impl FnOnce() -> Option<Time>) -> bool {
        let lag = self.now.lag(real);
        let then = ProtocolClock { micros: self.now.micros + lag, ..self.now };
        lag > 0 && next_wake().is_some_and(|wake| wake <= then.time())
    }

    /// Logs the end of replay, if nothing is left to replay.
    pub fn log_if_complete(&self) {
        if self.is_complete() {
            let ReplayCounts { frames, timer_polls: waits } = self.counts;
            log!(
                Info,
                "the replay is over after {frames} frames; timers had expired at {waits} polls"
            );
        }
    }

    /// Whether this process still replays.
    pub fn is_replaying(&self) -> bool {
        !self.is_complete() || self.sent < self.sent_before || interposer::has_earlier_polls()
    }

    /// Whether the next poll needs a determinant that has not been read yet.
    pub fn needs_determinant(&self) -> bool {
        self.next.is_none() && (self.awaited_count > 0 || self.determinants < self.local_count)
    }

    /// Whether nothing is left to replay.
    fn is_complete(&self) -> bool {
        self.next.is_none() && self.awaited_count == 0 && self.determinants >= self.local_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_a_frame_was_sent_is_known_of_the_last_ones() {
        let mut replay = Replay::new(Time(0));
        for poll in 1..=SENT_POLLS_KEPT as u64 {
            replay.poll();
            assert_eq!(replay.polls_total, poll);
            replay.note_sent();
            replay.note_sent();
        }
        let said = |frame| replay.divergence(frame);
        let last = 2 * SENT_POLLS_KEPT as u64 - 1;
        assert!(said(last).contains(&format!("frame {last}, sent at poll {SENT_POLLS_KEPT},")));
        let half = SENT_POLLS_KEPT as u64;
        assert!(said(half).contains(&format!("sent at poll {},", half / 2 + 1)), "{}", said(half));
        assert!(said(last + 1).contains(&format!("sent at poll {half},")), "it is sent now");
        for frame in [0, half - 1, last + 2] {
            assert!(said(frame).contains(&format!("sent before poll {half},")), "{}", said(frame));
        }
    }

    const fn determinant(polls: u64, frames: u32, micros: u64) -> Determinant {
        Determinant { polls, frames, micros }
    }

    #[test]
    fn the_same_at_the_same_polls_and_nothing_new_before_all_is_sent_again() {
        let next = Some(determinant(2, 5, 70));
        let mut replay =
            Replay { next, awaited_count: 1, sent_before: 3, sent: 2, ..Replay::default() };
        let mut polls = Vec::new();
        for _ in 0..5 {
            if replay.needs_determinant() {
                (replay.next, replay.awaited_count) = (Some(determinant(1, 0, 9)), 0);
            }
            polls.push(replay.poll());
        }
        assert!(replay.is_complete());
        let again = |polls, frames, micros| PollAction::Replay(determinant(polls, frames, micros));
        assert_eq!(
            polls,
            [
                PollAction::Nothing,
                again(2, 5, 70),
                again(1, 0, 9),
                PollAction::Nothing,
                PollAction::Nothing
            ]
        );
        replay.sent = 3;
        assert_eq!(replay.poll(), PollAction::Live);
        assert_eq!(replay.polls, 3, "the next determinant counts from the last");
    }

    #[test]
    fn time_goes_on_where_it_stood_whatever_the_clock_of_the_next_start_shows() {
        let real = |micros| Time(micros * MICROSECOND + 999);
        let mut now = Replay::new(real(5_000)).now;
        assert_eq!(now.time(), Time(0));
        assert_eq!(now.lag(real(5_040)), 40);
        now.advance(40, real(5_040));
        // The clock of the next incarnation shows less.
        let mut again = Replay::new(real(10)).now;
        again.advance(40, real(15));
        assert_eq!(again.time(), now.time());
        assert_eq!((again.lag(real(25)), again.lag(real(3))), (10, 0));
    }
}
