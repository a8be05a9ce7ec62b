//! Taking in what the network brings so that it can be done again: by a new start of this process, should it be killed.
//!
//! All that this process gets comes through its relay, in one order, and enters at *polls*: calls of the program that look
//! for it. How many frames each poll has taken in, and how late it is then, is all that chance decides; the relay hears it
//! before anything that follows from it ([`Kind::Determinant`]). A new start is told all of it, each determinant and then the frames it
//! took in, and takes in the same frames at the same polls and the same times; then it is live. It reads on as it needs to, so
//! what it has not come to yet is the relay's.
//!
//! **A relay on another node** hears it over TCP, and the end of that is lost with this process. So what it may not have heard
//! of is kept on this node as well ([`landbridge_proto::recent_determinants`]): a new start here does that again after what the relay tells,
//! and tells the relay. If the connection breaks, nothing more can be recorded: this start ends, and the next one goes on.
//!
//! **Time.** The protocol sees a time of this process's own ([`ProtocolClock`]). It stands still, but for polls that take something in
//! and polls at which something is due by the real clock: there it catches up. So polls at which nothing comes to pass
//! need no record, and what is asked after because of the time alone is asked after again at the same poll.
//!
//! What may never happen: a frame is taken in anywhere else, or the time goes on; whether a frame goes out depends on how
//! full a ring is.

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

/// How long the relay may take to begin with telling what was.
pub(super) const REPLAY_TIME_MAX: Duration = Duration::from_secs(30);

/// Frames of which is known when they were sent: more than a ring holds, so that it is known of any that the relay refuses.
const SENT_POLLS_KEPT: usize = 4096;

/// What leads to the relay.
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

    /// Whether the relay has not closed it. (A stream says so itself when it is looked at.)
    fn is_open(&mut self) -> bool {
        match self {
            RecordedCarrier::Ring(ring) => ring.drain_doorbell(),
            RecordedCarrier::Stream(_) => true,
        }
    }
}

/// See the module head.
#[derive(Default)]
pub struct Replay {
    now: ProtocolClock,
    /// Determinants, those that were done again too, and the bytes of their frames.
    determinants: u64,
    pub(super) taken: u64,
    /// Polls since the last one.
    polls: u64,
    /// What is to be done again next,
    next: Option<Determinant>,
    /// and how many more of them the relay is to tell,
    awaited_count: u64,
    /// and how many there are on this node, with those that the relay may not have heard of.
    local_count: u64,
    /// Determinants that the relay has on record.
    relay_count: u64,
    /// Frames that this process has sent, and an earlier start of it.
    sent: u64,
    sent_before: u64,
    /// Polls since the process began,
    polls_total: u64,
    /// and how many it were when each of the last frames was sent.
    sent_at_poll: Box<[u64]>,
    /// Of what the program has read of clocks the relay knows this, if it keeps that.
    nondeterminism_sent: Option<SentNondeterminism>,
    /// It has begun to take its leave: a relay takes the end of its connection for its own end.
    pub(super) is_closing: bool,
    /// Frames taken in again, and polls at which time alone went on.
    replayed_frames: u64,
    timer_polls: u64,
}

/// At the poll of this number since the one before: so many frames, after so much time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Determinant {
    polls: u64,
    frames: u32,
    micros: u64,
}

/// What a poll has to do.
#[derive(Debug, PartialEq, Eq)]
enum PollAction {
    /// Nothing, as before.
    Nothing,
    /// What was done at this poll before.
    Replay(Determinant),
    /// What there is.
    Live,
}

/// The time as the protocol sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ProtocolClock {
    micros: u64,
    /// What the real clock showed when it was set last. (That of an earlier start may have been another clock's.)
    real: u64,
}

impl ProtocolClock {
    /// By how much it has fallen behind the real clock.
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
    /// Before the first poll.
    pub fn new(real: Time) -> Self {
        let now = ProtocolClock { micros: 0, real: real.0 / MICROSECOND };
        let sent_at_poll = vec![0; SENT_POLLS_KEPT].into_boxed_slice();
        Self { now, sent_at_poll, ..Self::default() }
    }

    /// Where it is in what its relay has on record.
    pub(super) fn standing(&self, kept: u64) -> LogPosition {
        LogPosition { determinants: self.determinants, taken: self.taken, sent: self.sent, kept }
    }

    /// The time goes on from here: this process was an image until now.
    pub(super) fn resume_clock(&mut self, real: Time) {
        self.now.real = real.0 / MICROSECOND;
    }

    /// As if so much more had passed by the real clock.
    #[cfg(test)]
    pub(super) fn pass_time(&mut self, micros: u64) {
        self.now.real -= micros;
    }

    /// Another poll.
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
            // What was sent or looked for after the last determinant was so by who had taken in nothing more.
            None if has_polled_before || self.sent < self.sent_before => PollAction::Nothing,
            None => PollAction::Live,
        }
    }

    /// A frame has gone to the relay.
    #[inline]
    fn note_sent(&mut self) {
        if let Some(poll) = self.sent_at_poll.get_mut(self.sent as usize % SENT_POLLS_KEPT) {
            *poll = self.polls_total;
        }
        self.sent += 1;
    }

    /// What ends it, and where it is.
    pub(super) fn at_position(&self, why: &str) -> String {
        format!("{why}, at poll {}, after {} frames", self.polls_total, self.sent)
    }

    /// What is to be said when the relay says that this frame is not what an earlier start has sent.
    fn divergence(&self, frame: u64) -> String {
        let is_known = frame < self.sent && self.sent - frame <= SENT_POLLS_KEPT as u64;
        let poll = self.sent_at_poll.get(frame as usize % SENT_POLLS_KEPT).filter(|_| is_known);
        let when = match poll {
            Some(poll) => format!("at poll {poll}"),
            None => format!("before poll {}", self.polls_total),
        };
        format!("its frame {frame}, sent {when}, is not what it sent there before")
    }

    /// What the program has read of clocks since the last time goes to the relay in front of what may follow from it.
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

    /// Whether the relay must be heard before it is known what the next poll has to do.
    fn needs_determinant(&self) -> bool {
        self.next.is_none() && (self.awaited_count > 0 || self.determinants < self.local_count)
    }

    /// Whether nothing is left that was taken in before.
    fn is_complete(&self) -> bool {
        self.next.is_none() && self.awaited_count == 0 && self.determinants >= self.local_count
    }
}

/// Whether the relay says, with a frame's number as `delivered`, that an earlier start has sent another one. Polls are counted
/// from 1, and the opening comes before everything else.
pub(super) fn is_divergence_report(header: &Header) -> bool {
    header.kind == Kind::Determinant && header.sequence == 0
}

impl Engine {
    /// Whether what is taken in is recorded.
    #[inline]
    pub fn is_recorded(&self) -> bool {
        self.replay.is_some()
    }

    /// Whether it does again what was done before.
    pub(super) fn is_replaying(&self) -> bool {
        let is_behind = |replay: &Replay| !replay.is_complete() || replay.sent < replay.sent_before;
        self.replay.as_ref().is_some_and(is_behind) || interposer::has_earlier_polls()
    }

    /// Hears from the relay how much an earlier start of this process has taken in and sent.
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

    /// What the relay says next of what was taken in, if it is there.
    fn receive_determinant(&mut self) -> io::Result<Option<Header>> {
        let Some(mut record) = self.recorded_carrier() else { return Ok(None) };
        let Some(frame) = record.peek()? else { return Ok(None) };
        // That may have come to it on the way.
        let bad = |why| io::Error::new(io::ErrorKind::InvalidData, why);
        let header = Header::parse(frame).map_err(|malformed| bad(malformed.0))?;
        if !matches!(header.kind, Kind::Determinant | Kind::Nondeterminism) {
            return Err(bad("the relay says something else than what was before"));
        }
        record.consume();
        Ok(Some(header))
    }

    /// The connection to the relay is of no use any more. If that is because a frame of this process was another one before,
    /// the relay has said so last: this process ends.
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

    /// Waits until it is known what the next poll has to do.
    #[cold]
    fn await_determinant(&mut self) {
        if let Some(replay) = self.replay.as_mut().filter(|replay| replay.awaited_count == 0) {
            let determinant = interposer::determinant(replay.determinants);
            // It was there when this start began, and nothing is noted while what was is repeated.
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

    /// A poll of the program: takes in what it did before, or what there is, and does what is due. The number of frames.
    pub(super) fn poll_recorded(&mut self) -> usize {
        if interposer::is_checkpoint_wanted() {
            self.quiesce_for_checkpoint();
        }
        self.core.flush_deferred_acks();
        let real = self.poll_state.time();
        if self.poll_state.is_epoll_overdue(self.poll_state.clock.now()) {
            // It brings nothing but the end of the relay, after which nothing goes on.
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

    /// Whether something has come, or is due by the real clock.
    #[inline]
    fn has_cause(&mut self, id: usize, real: Time) -> bool {
        let is_due = |replay: &Replay| {
            let lag = replay.now.lag(real);
            let then = ProtocolClock { micros: replay.now.micros + lag, ..replay.now };
            lag > 0 && self.core.next_wake().is_some_and(|wake| wake <= then.time())
        };
        self.replay.as_ref().is_some_and(is_due) || self.has_frame(id)
    }

    /// Whether anything waits in the ring of link `id`, or it has ended.
    #[inline]
    fn has_frame(&mut self, id: usize) -> bool {
        match self.links[id].as_mut().map(|link| &mut link.carrier) {
            Some(Carrier::Shm(ring)) => !matches!(ring.peek(), Ok(None)),
            Some(Carrier::Recorded(stream)) => !matches!(stream.peek(), Ok(None)),
            _ => false,
        }
    }

    /// The protocol's time goes on.
    fn advance_time(&mut self, micros: u64, real: Time) -> Time {
        let Some(replay) = &mut self.replay else { return real };
        replay.now.advance(micros, real);
        let now = replay.now.time();
        self.core.set_time(now);
        now
    }

    /// How long until something is due of which no frame tells, if ever.
    pub(super) fn nanos_to_wake(&self) -> Option<u64> {
        let wake = self.core.next_wake()?;
        let real = self.poll_state.time();
        let now = self.replay.as_ref().map_or(real, |replay| {
            replay.now.time().after(replay.now.lag(real).saturating_mul(MICROSECOND))
        });
        Some(wake.nanos_since(now))
    }

    fn replay_frames(&mut self, id: usize, wanted: u32) -> usize {
        let mut left = wanted as usize;
        while left > 0 {
            self.frames_per_turn = left;
            match self.poll_ring(id) {
                0 => self.wait_for_relay(),
                frames => {
                    left -= frames;
                    interposer::note_replayed(frames as u64);
                }
            }
        }
        self.frames_per_turn = super::receive::FRAMES_PER_TURN;
        if let Some(replay) = self.replay.as_ref().filter(|replay| replay.is_complete()) {
            let (frames, waits) = (replay.replayed_frames, replay.timer_polls);
            log!(Info, "live again, after {frames} frames; {waits} times something was due");
        }
        wanted as usize
    }

    /// The relay must do something before anything else can happen; this process ends if it is gone.
    fn wait_for_relay(&mut self) {
        if !self.recorded_carrier().is_some_and(|mut record| record.is_open()) {
            self.end_relay_lost("its relay has closed the connection");
        }
        std::thread::yield_now();
    }

    /// Whoever is recorded cannot go on without: what it took in and sent would be in no record, and what it did might be
    /// something else than before. Ends the process, which ends the job.
    #[cold]
    pub(super) fn end_process(&self, why: &str) -> ! {
        self.end_with(EXIT_UNRECOVERABLE, &format!("this process cannot go on: {why}"))
    }

    #[cold]
    pub(super) fn end_with(&self, code: i32, why: &str) -> ! {
        log!(Warn, "{why}");
        host::report_forced_exit();
        // SAFETY: ends the process at once; nothing of it may run any more.
        unsafe { libc::_exit(code) }
    }

    /// All that the program has read of clocks goes to a relay on another node, so that an image on any node goes on from there.
    pub(super) fn send_nondeterminism_for_checkpoint(&mut self) {
        let link = self.uplink.link().and_then(|id| self.links[id].as_mut());
        let (Some(link), Some(replay)) = (link, &mut self.replay) else { return };
        if let Carrier::Recorded(stream) = &mut link.carrier
            && let Err(error) = replay.send_nondeterminism(self.own.address, stream)
        {
            self.end_relay_lost(&error.to_string());
        }
    }

    /// To the relay, behind what the program has read of clocks. Whether it was sent; a ring may have no room.
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

    /// A frame has gone to the relay.
    #[inline]
    pub(super) fn note_sent(&mut self) {
        if let Some(replay) = &mut self.replay {
            replay.note_sent();
        }
    }

    /// Tells the relay, before anything follows from it.
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
        // Another start, whose clock shows less.
        let mut again = Replay::new(real(10)).now;
        again.advance(40, real(15));
        assert_eq!(again.time(), now.time());
        assert_eq!((again.lag(real(25)), again.lag(real(3))), (10, 0));
    }
}
