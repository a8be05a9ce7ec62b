//! What a recorded process repeats after a restart: the cursor over its determinants, its own
//! clock, and when it is live.
//!
//! A recorded process delivers frames only at *polls*: calls of the program that look for messages.
//! Two things are nondeterministic: which frames each poll delivers, and which time the protocol
//! sees at that poll. Both are recorded as a determinant before anything can follow from them. The
//! next incarnation delivers the same frames at the same polls and at the same protocol times. When
//! no determinant is left, and it has polled and sent as often as earlier incarnations, it is live.
//! Nothing else of the network is recorded: paths, losses, acknowledgements and credit may differ.
//!
//! Determinants may come from a relay, which holds them with the frames, and from this node: all of
//! them with logs of the senders ([`crate::log`]), and otherwise the last ones, which a relay on
//! another node may lack ([`crate::recent_determinants`]). An incarnation replays the relay's
//! determinants first, and sends the relay those that only this node has.
//!
//! **Time.** The protocol sees a clock of the process. The clock stands still, except at polls that
//! deliver frames and at polls at which a protocol timer is due by the real clock: there it catches
//! up with the real clock. Polls without events therefore need no record, and what a timer causes
//! happens again at the same poll.
//!
//! What enters: polls, determinants, frames that were sent, the real clock. What leaves: what each
//! poll has to do, determinants to be recorded, the protocol's time. What may never happen: the
//! clock advances outside of a poll; a poll delivers something new before everything was repeated.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec;

use crate::path::time::{MICROSECOND, Time};
use crate::wire::Malformed;
use crate::wire::frame::{Header, Kind};
use crate::wire::hello::LogPosition;

/// Number of latest frames whose sending poll is remembered. The number exceeds what a ring holds,
/// so the sending poll is known for every frame that a relay may refuse.
const SENT_POLLS_KEPT: usize = 4096;

/// The `polls`-th poll since the previous determinant delivered `frames` frames, after the protocol
/// clock had advanced by `micros` microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Determinant {
    /// Polls since the previous determinant.
    pub polls: u64,
    /// Frames that the poll has delivered.
    pub frames: u32,
    /// Microseconds by which the clock has advanced.
    pub micros: u64,
}

impl Determinant {
    /// Reads a determinant from the header of a [`Kind::Determinant`] frame.
    ///
    /// # Errors
    /// It delivers nothing, and advances no clock.
    pub fn of(header: &Header) -> Result<Determinant, Malformed> {
        let &Header { kind, length, sequence: polls, credit: frames, delivered: micros, .. } =
            header;
        debug_assert_eq!(kind, Kind::Determinant);
        if length > 0 || polls == 0 || (frames == 0 && micros == 0) {
            return Err(Malformed("a determinant delivers nothing"));
        }
        Ok(Determinant { polls, frames, micros })
    }
}

/// The action of a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollAction {
    /// The poll delivers nothing, as in the earlier incarnation.
    Nothing,
    /// The poll repeats this determinant.
    Replay(Determinant),
    /// The poll delivers the frames that have arrived, and records them.
    Live,
}

/// What an incarnation has replayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayCounts {
    /// Frames delivered during replay.
    pub frames: u64,
    /// Replayed polls that delivered nothing and only advanced the clock.
    pub timer_polls: u64,
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

/// Where the recording, or the replay, of one process stands.
#[derive(Clone, Debug, Default)]
pub struct ReplayCursor {
    clock: ProtocolClock,
    /// Determinants recorded or replayed so far.
    determinants: u64,
    /// Bytes of the frames that these determinants have delivered.
    taken: u64,
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
    /// Frames that earlier incarnations have sent.
    sent_before: u64,
    /// Polls since the process began.
    polls_total: u64,
    /// The value of `polls_total` at which each of the last [`SENT_POLLS_KEPT`] frames was sent.
    sent_at_poll: Box<[u64]>,
    counts: ReplayCounts,
}

impl ReplayCursor {
    /// The state before the first poll. `real`: the real clock.
    pub fn new(real: Time) -> ReplayCursor {
        let clock = ProtocolClock { micros: 0, real: real.0 / MICROSECOND };
        ReplayCursor {
            clock,
            sent_at_poll: vec![0; SENT_POLLS_KEPT].into(),
            ..ReplayCursor::default()
        }
    }

    /// The position of this process in its message log. `kept`: determinants before the oldest
    /// checkpoint that is kept.
    pub fn standing(&self, kept: u64) -> LogPosition {
        LogPosition { determinants: self.determinants, taken: self.taken, sent: self.sent, kept }
    }

    // --- what earlier incarnations have done

    /// Begins to replay what a relay has recorded from this position on: so many determinants, and
    /// frames sent. `local_count`: determinants recorded on this node, from the first one on.
    /// Returns the number of polls to be replayed.
    pub fn begin(&mut self, determinants: u64, sent: u64, local_count: u64) -> u64 {
        self.awaited_count = determinants;
        self.relay_count = self.determinants + determinants;
        self.sent_before = self.sent + sent;
        self.local_count = local_count;
        self.counts = ReplayCounts::default();
        determinants.max(local_count.saturating_sub(self.determinants))
    }

    /// Begins to replay from logs on this node, which have so many determinants, and frames sent,
    /// from the beginning of the process on.
    pub fn begin_from_logs(&mut self, determinants: u64, sent: u64) {
        (self.local_count, self.relay_count) = (determinants, u64::MAX);
        self.sent_before = sent;
    }

    /// The number of the first determinant that only this node has, if there are any.
    pub fn first_local(&self) -> Option<u64> {
        (self.local_count > self.relay_count).then_some(self.relay_count)
    }

    /// Whether the next poll needs a determinant that has not been taken yet.
    pub fn needs_determinant(&self) -> bool {
        self.next.is_none() && (self.awaited_count > 0 || self.determinants < self.local_count)
    }

    /// Whether the relay has the determinant of the next poll.
    pub fn awaits_relay(&self) -> bool {
        self.awaited_count > 0
    }

    /// Number of the next determinant.
    pub fn next_number(&self) -> u64 {
        self.determinants
    }

    /// Takes the determinant of the next poll from the relay.
    pub fn take_determinant(&mut self, determinant: Determinant) {
        self.next = Some(determinant);
        self.awaited_count -= 1;
    }

    /// Takes the determinant of the next poll, which this node has recorded.
    pub fn take_local_determinant(&mut self, determinant: Determinant) {
        self.next = Some(determinant);
    }

    /// Whether the relay lacks the determinant of the last poll, which this node has recorded.
    pub fn has_outrun_relay(&self) -> bool {
        self.determinants > self.relay_count
    }

    /// Whether this process still replays. `has_earlier_polls`: an earlier incarnation has polled
    /// more often than this one has so far.
    pub fn is_replaying(&self, has_earlier_polls: bool) -> bool {
        self.replayed().is_none() || self.sent < self.sent_before || has_earlier_polls
    }

    /// What was replayed, if no determinant is left.
    pub fn replayed(&self) -> Option<ReplayCounts> {
        let is_left = self.awaited_count > 0 || self.determinants < self.local_count;
        (self.next.is_none() && !is_left).then_some(self.counts)
    }

    // --- polls

    /// Counts a poll, and returns what the poll has to do. `has_polled_before`: an earlier
    /// incarnation has made this poll.
    pub fn poll(&mut self, has_polled_before: bool) -> PollAction {
        self.polls += 1;
        self.polls_total += 1;
        match self.next {
            Some(next) if next.polls > self.polls => PollAction::Nothing,
            Some(next) => {
                assert!(
                    next.polls == self.polls,
                    "{}",
                    self.at_position("replay has passed a poll that delivered")
                );
                self.next = None;
                self.polls = 0;
                self.determinants += 1;
                self.counts.frames += u64::from(next.frames);
                self.counts.timer_polls += u64::from(next.frames == 0);
                PollAction::Replay(next)
            }
            // The earlier incarnation made this poll, or sent this frame, after its last
            // determinant: it delivered nothing at this poll.
            None if has_polled_before || self.sent < self.sent_before => PollAction::Nothing,
            None => PollAction::Live,
        }
    }

    /// Counts a live poll that delivered frames or advanced the clock. Returns the number of its
    /// determinant, and the determinant.
    pub fn note_determinant(&mut self, frames: u32, micros: u64) -> (u64, Determinant) {
        let polls = core::mem::take(&mut self.polls);
        let number = self.determinants;
        self.determinants += 1;
        (number, Determinant { polls, frames, micros })
    }

    /// Counts bytes of frames that were delivered.
    #[inline]
    pub fn note_taken(&mut self, bytes: u64) {
        self.taken += bytes;
    }

    /// Counts a frame that was sent.
    #[inline]
    pub fn note_sent(&mut self) {
        if let Some(poll) = self.sent_at_poll.get_mut(self.sent as usize % SENT_POLLS_KEPT) {
            *poll = self.polls_total;
        }
        self.sent += 1;
    }

    // --- time

    /// Continues the clock from here after a restore: this process was a checkpoint image until
    /// now.
    pub fn resume_clock(&mut self, real: Time) {
        self.clock.real = real.0 / MICROSECOND;
    }

    /// Microseconds by which the protocol clock is behind the real clock.
    pub fn lag(&self, real: Time) -> u64 {
        self.clock.lag(real)
    }

    /// Advances the protocol clock by `micros` microseconds; returns the new time.
    pub fn advance(&mut self, micros: u64, real: Time) -> Time {
        self.clock.advance(micros, real);
        self.clock.time()
    }

    /// The protocol time that a poll would see if the clock caught up with the real clock.
    pub fn caught_up(&self, real: Time) -> Time {
        self.clock.time().after(self.clock.lag(real).saturating_mul(MICROSECOND))
    }

    /// Whether a timer is due by the real clock. `next_wake`: the time of the next timer.
    #[inline]
    pub fn is_due(&self, real: Time, next_wake: impl FnOnce() -> Option<Time>) -> bool {
        let lag = self.clock.lag(real);
        let then = ProtocolClock { micros: self.clock.micros.saturating_add(lag), ..self.clock };
        lag > 0 && next_wake().is_some_and(|wake| wake <= then.time())
    }

    // --- errors

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
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn when_a_frame_was_sent_is_known_of_the_last_ones() {
        let mut replay = ReplayCursor::new(Time(0));
        for poll in 1..=SENT_POLLS_KEPT as u64 {
            replay.poll(false);
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
        let mut replay = ReplayCursor::new(Time(0));
        replay.note_sent();
        replay.note_sent();
        assert_eq!(replay.begin(2, 1, 0), 2);
        let mut left = [determinant(2, 5, 70), determinant(1, 0, 9)].into_iter();
        let mut polls = Vec::new();
        for _ in 0..5 {
            if replay.needs_determinant() {
                assert!(replay.awaits_relay());
                left.next().into_iter().for_each(|next| replay.take_determinant(next));
            }
            polls.push(replay.poll(false));
        }
        assert_eq!(replay.replayed(), Some(ReplayCounts { frames: 5, timer_polls: 1 }));
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
        assert!(replay.is_replaying(false), "a frame was not sent again");
        replay.note_sent();
        assert_eq!(replay.poll(true), PollAction::Nothing, "that poll was made before");
        assert_eq!(replay.poll(false), PollAction::Live);
        assert_eq!(replay.note_determinant(1, 3), (2, determinant(4, 1, 3)));
    }

    #[test]
    fn what_only_this_node_has_is_replayed_after_what_the_relay_has() {
        let mut replay = ReplayCursor::new(Time(0));
        assert_eq!(replay.begin(1, 0, 3), 3);
        assert_eq!(replay.first_local(), Some(1));
        for number in 0..3 {
            assert!(replay.needs_determinant() && replay.next_number() == number);
            match replay.awaits_relay() {
                true => replay.take_determinant(determinant(1, 1, 0)),
                false => replay.take_local_determinant(determinant(1, 1, 0)),
            }
            assert_eq!(replay.poll(false), PollAction::Replay(determinant(1, 1, 0)));
            assert_eq!(replay.has_outrun_relay(), number > 0, "the relay gets the others");
        }
        assert_eq!(replay.poll(false), PollAction::Live);
    }

    #[test]
    fn time_goes_on_where_it_stood_whatever_the_clock_of_the_next_start_shows() {
        let real = |micros| Time(micros * MICROSECOND + 999);
        let mut now = ReplayCursor::new(real(5_000)).clock;
        assert_eq!(now.time(), Time(0));
        assert_eq!(now.lag(real(5_040)), 40);
        now.advance(40, real(5_040));
        // The clock of the next incarnation shows less.
        let mut again = ReplayCursor::new(real(10)).clock;
        again.advance(40, real(15));
        assert_eq!(again.time(), now.time());
        assert_eq!((again.lag(real(25)), again.lag(real(3))), (10, 0));
    }
}
