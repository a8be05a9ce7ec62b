//! Records determinants of message delivery, and replays them after a restart of this process.
//!
//! All frames for this process arrive through its relay, in one order. The engine delivers frames
//! only at *polls*: calls of the program that look for messages. Two things are nondeterministic:
//! how many frames each poll delivers, and which time the protocol sees at that poll. The engine
//! sends both to the relay as a determinant ([`Kind::Determinant`]), before any frame that may
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
//! **Time.** The protocol sees a clock of this process ([`ProtocolClock`]). The clock stands still,
//! except at polls that deliver frames and at polls at which a protocol timer is due by the real
//! clock: at these polls the clock catches up with the real clock. Polls without events therefore
//! need no record, and a status request that a timer causes happens again at the same poll.
//!
//! What may never happen: a frame is delivered, or the protocol clock advances, outside of a poll;
//! whether a frame is sent depends on how full a ring is.

use std::io;
use std::time::{Duration, Instant};

use landbridge_drive::link::recorded::RecordedLink;
use landbridge_drive::link::shm::ShmLink;
use landbridge_proto::id::{Address, EXIT_UNRECOVERABLE};
use landbridge_proto::path::time::{MICROSECOND, Time};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};
use landbridge_proto::wire::hello::LogPosition;

use super::Engine;
use super::handshake::Carrier;
use super::sent_nondeterminism::SentNondeterminism;
use crate::{host, interposer, log};

/// Longest time that the relay may take to begin sending the log for replay.
pub(super) const REPLAY_TIME_MAX: Duration = Duration::from_secs(30);

/// Number of latest frames whose sending poll is remembered. The number exceeds what a ring holds,
/// so the sending poll is known for every frame that the relay may refuse.
const SENT_POLLS_KEPT: usize = 4096;

/// The link that carries frames to and from the relay.
pub(super) enum RecordedCarrier<'a> {
    Ring(&'a mut ShmLink),
    Stream(&'a mut RecordedLink),
}

impl RecordedCarrier<'_> {
    fn peek(&mut self) -> io::Result<Option<&[u8]>> {
        match self {
            RecordedCarrier::Ring(ring) => ring.peek(),
            RecordedCarrier::Stream(stream) => stream.peek(),
        }
    }

    fn consume(&mut self) {
        match self {
            RecordedCarrier::Ring(ring) => ring.consume(),
            RecordedCarrier::Stream(stream) => stream.consume(),
        }
    }

    /// Whether the relay has not closed the connection. A stream always returns true: reading the
    /// stream reports its end.
    fn is_open(&mut self) -> bool {
        match self {
            RecordedCarrier::Ring(ring) => ring.drain_doorbell(),
            RecordedCarrier::Stream(_) => true,
        }
    }
}

/// State of recording and replay for one endpoint; the module head describes the protocol.
#[derive(Default)]
pub struct Replay {
    now: ProtocolClock,
    /// Determinants recorded or replayed so far.
    determinants: u64,
    /// Bytes of the frames that these determinants have delivered.
    pub(super) taken: u64,
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
    pub(super) is_closing: bool,
    /// Frames delivered during replay.
    replayed_frames: u64,
    /// Replayed polls that delivered nothing and only advanced the clock.
    timer_polls: u64,
}

/// The `polls`-th poll since the previous determinant delivered `frames` frames, after the protocol
/// clock had advanced by `micros` microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Determinant {
    polls: u64,
    frames: u32,
    micros: u64,
}

/// The action of a poll.
#[derive(Debug, PartialEq, Eq)]
enum PollAction {
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
    pub(super) fn standing(&self, kept: u64) -> LogPosition {
        LogPosition { determinants: self.determinants, taken: self.taken, sent: self.sent, kept }
    }

    /// Continues the clock from here after a restore: this process was a checkpoint image until
    /// now.
    pub(super) fn resume_clock(&mut self, real: Time) {
        self.now.real = real.0 / MICROSECOND;
    }

    /// Lets the real clock appear to have advanced by `micros` microseconds more.
    #[cfg(test)]
    pub(super) fn pass_time(&mut self, micros: u64) {
        self.now.real -= micros;
    }

    /// Counts a poll, and returns what the poll has to do.
    fn poll(&mut self) -> PollAction {
        self.polls += 1;
        self.polls_total += 1;
        let has_polled_before = interposer::count_poll();
        match self.next {
            Some(next) if next.polls > self.polls => PollAction::Nothing,
            Some(next) => {
                self.next = None;
                self.polls = 0;
                self.determinants += 1;
                self.replayed_frames += next.frames as u64;
                self.timer_polls += (next.frames == 0) as u64;
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
    fn note_sent(&mut self) {
        if let Some(poll) = self.sent_at_poll.get_mut(self.sent as usize % SENT_POLLS_KEPT) {
            *poll = self.polls_total;
        }
        self.sent += 1;
    }

    /// The text `why` with the current poll and the number of sent frames.
    pub(super) fn at_position(&self, why: &str) -> String {
        format!("{why}, at poll {}, after {} frames", self.polls_total, self.sent)
    }

    /// The error text for a frame that differs from the frame which an earlier incarnation sent at
    /// the same position.
    fn divergence(&self, frame: u64) -> String {
        let is_known = frame < self.sent && self.sent - frame <= SENT_POLLS_KEPT as u64;
        let poll = self.sent_at_poll.get(frame as usize % SENT_POLLS_KEPT).filter(|_| is_known);
        let when = match poll {
            Some(poll) => format!("at poll {poll}"),
            None => format!("before poll {}", self.polls_total),
        };
        format!("its frame {frame}, sent {when}, is not what it sent there before")
    }

    /// Sends new entries of the nondeterminism record to the relay, in front of the next frame,
    /// which may depend on these entries.
    #[inline]
    pub(super) fn send_nondeterminism(
        &mut self,
        own: Address,
        stream: &mut RecordedLink,
    ) -> io::Result<()> {
        match &mut self.nondeterminism_sent {
            Some(known) if known.is_behind() => known.catch_up(own, stream),
            _ => Ok(()),
        }
    }

    /// Whether the next poll needs a determinant that has not been read yet.
    fn needs_determinant(&self) -> bool {
        self.next.is_none() && (self.awaited_count > 0 || self.determinants < self.local_count)
    }

    /// Whether nothing is left to replay.
    fn is_complete(&self) -> bool {
        self.next.is_none() && self.awaited_count == 0 && self.determinants >= self.local_count
    }
}

/// Whether the relay reports that a frame differs from the frame of an earlier incarnation.
/// `delivered` holds the number of the frame. `sequence` is 0, which no determinant has: polls are
/// counted from 1, and the opening frame of the log comes before all others.
pub(super) fn is_divergence_report(header: &Header) -> bool {
    header.kind == Kind::Determinant && header.sequence == 0
}

impl Engine {
    /// Whether deliveries of this process are recorded.
    #[inline]
    pub fn is_recorded(&self) -> bool {
        self.replay.is_some()
    }

    /// Whether this process still replays.
    pub(super) fn is_replaying(&self) -> bool {
        let is_behind = |replay: &Replay| !replay.is_complete() || replay.sent < replay.sent_before;
        self.replay.as_ref().is_some_and(is_behind) || interposer::has_earlier_polls()
    }

    /// Receives from the relay how many determinants and sent frames of earlier incarnations the
    /// log holds.
    pub(super) fn begin_replay(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + REPLAY_TIME_MAX;
        let other = io::Error::other;
        const CLOSED: &str = "it has closed the connection at once; its log (--relay-log) says why";
        let mut nondeterminism_sent = None;
        let header = loop {
            match self.receive_determinant() {
                Ok(Some(header)) if header.kind == Kind::Nondeterminism => {
                    nondeterminism_sent = Some(SentNondeterminism::before(header.sequence));
                    continue;
                }
                Ok(Some(header)) => break header,
                Ok(None) => (),
                Err(end) if end.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(other(CLOSED));
                }
                Err(error) => return Err(error),
            }
            if !self.recorded_carrier().is_some_and(|mut record| record.is_open()) {
                return Err(other(CLOSED));
            }
            if Instant::now() > deadline {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "it does not say what was before",
                ));
            }
            std::thread::yield_now();
        };
        if header.sequence != 0 {
            let why = "it does not begin with how much there was before";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let is_local = matches!(self.recorded_carrier(), Some(RecordedCarrier::Ring(_)));
        if let Some(replay) = &mut self.replay {
            replay.nondeterminism_sent = nondeterminism_sent;
            replay.awaited_count = header.credit.into();
            replay.relay_count = replay.determinants + replay.awaited_count;
            replay.sent_before = replay.sent + header.delivered;
            (replay.replayed_frames, replay.timer_polls) = (0, 0);
            replay.local_count = if is_local { 0 } else { interposer::determinant_count() };
            if replay.local_count > replay.relay_count
                && interposer::determinant(replay.relay_count).is_none()
            {
                return Err(other("too much of what it did has not arrived there"));
            }
            let replayed_polls =
                replay.awaited_count.max(replay.local_count.saturating_sub(replay.determinants));
            if replayed_polls > 0 {
                log!(Info, "restarted: {replayed_polls} polls are replayed");
            }
        }
        Ok(())
    }

    /// Reads the next frame of the log from the relay, if the frame has arrived.
    fn receive_determinant(&mut self) -> io::Result<Option<Header>> {
        let Some(mut record) = self.recorded_carrier() else { return Ok(None) };
        let Some(frame) = record.peek()? else { return Ok(None) };
        // The frame may have been corrupted on the network.
        let bad = |why| io::Error::new(io::ErrorKind::InvalidData, why);
        let header = Header::parse(frame).map_err(|malformed| bad(malformed.0))?;
        if !matches!(header.kind, Kind::Determinant | Kind::Nondeterminism) {
            return Err(bad("the relay says something else than what was before"));
        }
        record.consume();
        Ok(Some(header))
    }

    /// Ends the process if the relay has closed the connection because a sent frame differs from
    /// the frame of an earlier incarnation. The relay's report is then the last frame on the
    /// connection.
    #[cold]
    pub(super) fn end_if_refused(&mut self) {
        if let Some(RecordedCarrier::Ring(ring)) = self.recorded_carrier()
            && let Some(frame) = ring.close_code()
        {
            self.end_diverged(frame);
        }
        while let Some(mut record) = self.recorded_carrier() {
            let Ok(Some(frame)) = record.peek() else { return };
            let Ok(header) = Header::parse(frame) else { return };
            if is_divergence_report(&header) {
                self.end_diverged(header.delivered);
            }
            record.consume();
        }
    }

    #[cold]
    pub(super) fn end_diverged(&self, frame: u64) -> ! {
        let why = self.replay.as_ref().map(|replay| replay.divergence(frame));
        self.end_process(&why.unwrap_or_default())
    }

    /// Waits until the determinant of the next poll is known.
    #[cold]
    fn await_determinant(&mut self) {
        if let Some(replay) = self.replay.as_mut().filter(|replay| replay.awaited_count == 0) {
            let determinant = interposer::determinant(replay.determinants);
            // The determinant existed when this incarnation began, and replay records no
            // determinants on this node.
            replay.next = determinant.map(|[polls, frames, micros]| Determinant {
                polls,
                frames: frames as u32,
                micros,
            });
            return;
        }
        let header = loop {
            match self.receive_determinant() {
                Ok(Some(header)) if is_divergence_report(&header) => {
                    self.end_diverged(header.delivered)
                }
                Ok(Some(header)) => break header,
                Ok(None) => self.wait_for_relay(),
                Err(error) => self.end_relay_lost(&error.to_string()),
            }
        };
        if let Some(replay) = &mut self.replay {
            let Header { sequence: polls, credit: frames, delivered: micros, .. } = header;
            replay.next = Some(Determinant { polls, frames, micros });
            replay.awaited_count -= 1;
        }
    }

    pub(super) fn recorded_carrier(&mut self) -> Option<RecordedCarrier<'_>> {
        let id = self.uplink.link()?;
        match &mut self.links[id].as_mut()?.carrier {
            Carrier::Shm(ring) => Some(RecordedCarrier::Ring(ring)),
            Carrier::Recorded(stream) => Some(RecordedCarrier::Stream(stream)),
            _ => None,
        }
    }

    /// Executes a poll of the program: delivers the frames that replay prescribes, or the frames
    /// that have arrived, and runs timers that are due. Returns the number of frames.
    pub(super) fn poll_recorded(&mut self) -> usize {
        if interposer::is_checkpoint_wanted() {
            self.quiesce_for_checkpoint();
        }
        self.core.flush_deferred_acks();
        let real = self.poll_state.time();
        if self.poll_state.is_epoll_overdue(self.poll_state.clock.now()) {
            // Events can only report the end of the relay connection, which ends this process.
            self.poll_epoll(0);
        }
        if self.replay.as_ref().is_some_and(Replay::needs_determinant) {
            self.await_determinant();
        }
        let Some(poll) = self.replay.as_mut().map(Replay::poll) else { return 0 };
        let Some(id) = self.uplink.link() else { return 0 };
        let frames = match poll {
            PollAction::Nothing => 0,
            PollAction::Replay(determinant) => {
                let now = self.advance_time(determinant.micros, real);
                let frames = self.replay_frames(id, determinant.frames);
                if self
                    .replay
                    .as_ref()
                    .is_some_and(|replay| replay.determinants > replay.relay_count)
                {
                    self.send_determinant(determinant);
                }
                self.do_what_is_due(now);
                frames
            }
            PollAction::Live if self.has_cause(id, real) => {
                let micros = self.replay.as_ref().map_or(0, |replay| replay.now.lag(real));
                let now = self.advance_time(micros, real);
                let frames = self.poll_ring(id);
                self.record_determinant(frames as u32, micros);
                self.do_what_is_due(now);
                frames
            }
            PollAction::Live => 0,
        };
        self.flush();
        frames
    }

    /// Whether a frame has arrived, or a timer is due by the real clock.
    #[inline]
    fn has_cause(&mut self, id: usize, real: Time) -> bool {
        let is_due = |replay: &Replay| {
            let lag = replay.now.lag(real);
            let then = ProtocolClock { micros: replay.now.micros + lag, ..replay.now };
            lag > 0 && self.core.schedule().next_wake().is_some_and(|wake| wake <= then.time())
        };
        self.replay.as_ref().is_some_and(is_due) || self.has_frame(id)
    }

    /// Whether the ring or stream of link `id` holds a frame, or has ended.
    #[inline]
    fn has_frame(&mut self, id: usize) -> bool {
        match self.links[id].as_mut().map(|link| &mut link.carrier) {
            Some(Carrier::Shm(ring)) => !matches!(ring.peek(), Ok(None)),
            Some(Carrier::Recorded(stream)) => !matches!(stream.peek(), Ok(None)),
            _ => false,
        }
    }

    /// Advances the protocol clock by `micros` microseconds, and passes the new time to the
    /// protocol.
    fn advance_time(&mut self, micros: u64, real: Time) -> Time {
        let Some(replay) = &mut self.replay else { return real };
        replay.now.advance(micros, real);
        let now = replay.now.time();
        self.core.set_time(now);
        now
    }

    /// Nanoseconds until the next protocol timer is due; `None` without a timer.
    pub(super) fn nanos_to_wake(&self) -> Option<u64> {
        let wake = self.core.schedule().next_wake()?;
        let real = self.poll_state.time();
        let now = self.replay.as_ref().map_or(real, |replay| {
            replay.now.time().after(replay.now.lag(real).saturating_mul(MICROSECOND))
        });
        Some(wake.nanos_since(now))
    }

    fn replay_frames(&mut self, id: usize, wanted: u32) -> usize {
        let mut left = wanted as usize;
        while left > 0 {
            self.links.frames_per_turn = left;
            match self.poll_ring(id) {
                0 => self.wait_for_relay(),
                frames => {
                    left -= frames;
                    interposer::note_replayed(frames as u64);
                }
            }
        }
        self.links.frames_per_turn = super::receive::FRAMES_PER_TURN;
        if let Some(replay) = self.replay.as_ref().filter(|replay| replay.is_complete()) {
            let (frames, waits) = (replay.replayed_frames, replay.timer_polls);
            log!(Info, "live again, after {frames} frames; {waits} times something was due");
        }
        wanted as usize
    }

    /// Yields while the relay has to act before this process can continue. Ends this process if the
    /// relay has closed the connection.
    fn wait_for_relay(&mut self) {
        if !self.recorded_carrier().is_some_and(|mut record| record.is_open()) {
            self.end_relay_lost("its relay has closed the connection");
        }
        std::thread::yield_now();
    }

    /// Ends this process, and thereby the job. A recorded process cannot continue without
    /// recording: its deliveries and sends would be missing in the log, and a restart might
    /// diverge.
    #[cold]
    pub(super) fn end_process(&self, why: &str) -> ! {
        self.end_with(EXIT_UNRECOVERABLE, &format!("this process cannot go on: {why}"))
    }

    #[cold]
    pub(super) fn end_with(&self, code: i32, why: &str) -> ! {
        log!(Warn, "{why}");
        host::report_forced_exit();
        // SAFETY: ends the process at once; no code of the process runs afterwards.
        unsafe { libc::_exit(code) }
    }

    /// Sends all new entries of the nondeterminism record to a relay on another node, so that the
    /// checkpoint can be restored on any node.
    pub(super) fn send_nondeterminism_for_checkpoint(&mut self) {
        let link = self.uplink.link().and_then(|id| self.links[id].as_mut());
        let (Some(link), Some(replay)) = (link, &mut self.replay) else { return };
        if let Carrier::Recorded(stream) = &mut link.carrier
            && let Err(error) = replay.send_nondeterminism(self.own.address, stream)
        {
            self.end_relay_lost(&error.to_string());
        }
    }

    /// Sends `bytes` to the relay, behind new entries of the nondeterminism record. Returns false
    /// if the ring is full.
    fn send_recorded(&mut self, bytes: &[u8]) -> io::Result<bool> {
        let Some(link) = self.uplink.link().and_then(|id| self.links[id].as_mut()) else {
            return Ok(true);
        };
        match &mut link.carrier {
            Carrier::Shm(ring) => Ok(ring.send(bytes, &[])),
            Carrier::Recorded(stream) => {
                if let Some(replay) = &mut self.replay {
                    replay.send_nondeterminism(self.own.address, stream)?;
                }
                stream.send(bytes, &[]).map(|()| true)
            }
            _ => Ok(true),
        }
    }

    /// Counts a frame that was sent to the relay.
    #[inline]
    pub(super) fn note_sent(&mut self) {
        if let Some(replay) = &mut self.replay {
            replay.note_sent();
        }
    }

    /// Records a poll that delivered frames or advanced the clock, and sends the determinant to the
    /// relay before any frame that may depend on the poll.
    fn record_determinant(&mut self, frames: u32, micros: u64) {
        if frames == 0 && micros == 0 {
            return;
        }
        let Some(replay) = self.replay.as_mut() else { return };
        let polls = std::mem::take(&mut replay.polls);
        let number = replay.determinants;
        replay.determinants += 1;
        if let Some(RecordedCarrier::Stream(_)) = self.recorded_carrier() {
            interposer::note_determinant(number, [polls, frames.into(), micros]);
        }
        self.send_determinant(Determinant { polls, frames, micros });
    }

    fn send_determinant(&mut self, determinant: Determinant) {
        let header = Header {
            length: 0,
            kind: Kind::Determinant,
            flags: 0,
            hops: 0,
            source: self.own.address,
            target: Address::ANONYMOUS,
            sequence: determinant.polls,
            delivered: determinant.micros,
            credit: determinant.frames,
        };
        let mut bytes = [0; HEADER_BYTES];
        header.emit(&mut bytes);
        loop {
            match self.send_recorded(&bytes) {
                Ok(true) => return,
                Ok(false) => self.wait_for_relay(),
                Err(error) => self.end_relay_lost(&error.to_string()),
            }
        }
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
        for frame in [0, half - 1, last + 1] {
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
