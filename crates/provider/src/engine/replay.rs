//! Taking in what the network brings so that it can be done again: by a new start of this process, should it be killed.
//!
//! All that this process gets comes through its relay, in one order, and enters at *polls*: calls of the program that look
//! for it. How many frames each poll has taken in, and how late it is then, is all that chance decides; the relay hears it
//! before anything that follows from it ([`Kind::Intake`]). A new start is told all of it, each intake and then the frames it
//! took in, and takes in the same frames at the same polls and the same times; then it is live. It reads on as it needs to, so
//! what it has not come to yet is the relay's.
//!
//! **A relay on another node** hears it over TCP, and the end of that is lost with this process. So what it may not have heard
//! of is kept on this node as well ([`landbridge_proto::recent`]): a new start here does that again after what the relay tells,
//! and tells the relay. If the connection breaks, nothing more can be recorded: this start ends, and the next one goes on.
//!
//! **Time.** The protocol sees a time of this process's own ([`Now`]). It stands still, but for polls that take something in
//! and polls at which something is due by the real clock: there it catches up. So polls at which nothing comes to pass
//! need no record, and what is asked after because of the time alone is asked after again at the same poll.
//!
//! What may never happen: a frame is taken in anywhere else, or the time goes on; whether a frame goes out depends on how
//! full a ring is.

use std::io;
use std::time::{Duration, Instant};

use landbridge_drive::link::shm::ShmLink;
use landbridge_drive::link::whole::WholeLink;
use landbridge_proto::id::{Address, EXIT_CANNOT_GO_ON};
use landbridge_proto::path::time::{MICROSECOND, Time};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};
use landbridge_proto::wire::hello::Standing;

use super::Engine;
use super::handshake::Carrier;
use super::reads::ReadsTold;
use crate::{clocks, host, log};

/// How long the relay may take to begin with telling what was.
pub(super) const RECORD_TIME_MAX: Duration = Duration::from_secs(30);

/// Frames of which is known when they were sent: more than a ring holds, so that it is known of any that the relay refuses.
const SENT_REMEMBERED: usize = 4096;

/// What leads to the relay.
pub(super) enum Record<'a> {
    Ring(&'a mut ShmLink),
    Stream(&'a mut WholeLink),
}

impl Record<'_> {
    fn peek(&mut self) -> io::Result<Option<&[u8]>> {
        match self {
            Record::Ring(ring) => ring.peek(),
            Record::Stream(stream) => stream.peek(),
        }
    }

    fn consume(&mut self) {
        match self {
            Record::Ring(ring) => ring.consume(),
            Record::Stream(stream) => stream.consume(),
        }
    }

    /// Whether the relay has not closed it. (A stream says so itself when it is looked at.)
    fn is_open(&mut self) -> bool {
        match self {
            Record::Ring(ring) => ring.drain_doorbell(),
            Record::Stream(_) => true,
        }
    }
}

/// See the module head.
#[derive(Default)]
pub struct Replay {
    now: Now,
    /// Intakes, those that were done again too, and the bytes of their frames.
    intakes: u64,
    pub(super) taken: u64,
    /// Polls since the last one.
    polls: u64,
    /// What is to be done again next,
    next: Option<Intake>,
    /// and how many more of them the relay is to tell,
    untold: u64,
    /// and how many there are on this node, with those that the relay may not have heard of.
    noted: u64,
    /// Intakes that the relay has on record.
    heard: u64,
    /// Frames that this process has sent, and an earlier start of it.
    sent: u64,
    sent_before: u64,
    /// Polls since the process began,
    polls_ever: u64,
    /// and how many it were when each of the last frames was sent.
    sent_at: Box<[u64]>,
    /// Of what the program has read of clocks the relay knows this, if it keeps that.
    reads_told: Option<ReadsTold>,
    /// It has begun to take its leave: a relay takes the end of its connection for its own end.
    pub(super) is_leaving: bool,
    /// Frames taken in again, and polls at which time alone went on.
    repeated: u64,
    waited: u64,
}

/// At the poll of this number since the one before: so many frames, after so much time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Intake {
    polls: u64,
    frames: u32,
    micros: u64,
}

/// What a poll has to do.
#[derive(Debug, PartialEq, Eq)]
enum Poll {
    /// Nothing, as before.
    Nothing,
    /// What was done at this poll before.
    Again(Intake),
    /// What there is.
    Live,
}

/// The time as the protocol sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Now {
    micros: u64,
    /// What the real clock showed when it was set last. (That of an earlier start may have been another clock's.)
    real: u64,
}

impl Now {
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
        let now = Now { micros: 0, real: real.0 / MICROSECOND };
        let sent_at = vec![0; SENT_REMEMBERED].into_boxed_slice();
        Self { now, sent_at, ..Self::default() }
    }

    /// Where it is in what its relay has on record.
    pub(super) fn standing(&self, kept: u64) -> Standing {
        Standing { intakes: self.intakes, taken: self.taken, sent: self.sent, kept }
    }

    /// The time goes on from here: this process was an image until now.
    pub(super) fn wake(&mut self, real: Time) {
        self.now.real = real.0 / MICROSECOND;
    }

    /// As if so much more had passed by the real clock.
    #[cfg(test)]
    pub(super) fn pass_time(&mut self, micros: u64) {
        self.now.real -= micros;
    }

    /// Another poll.
    fn poll(&mut self) -> Poll {
        self.polls += 1;
        self.polls_ever += 1;
        let has_looked_before = clocks::count_poll();
        match self.next {
            Some(next) if next.polls > self.polls => Poll::Nothing,
            Some(next) => {
                self.next = None;
                self.polls = 0;
                self.intakes += 1;
                self.repeated += next.frames as u64;
                self.waited += (next.frames == 0) as u64;
                Poll::Again(next)
            }
            // What was sent or looked for after the last intake was so by who had taken in nothing more.
            None if has_looked_before || self.sent < self.sent_before => Poll::Nothing,
            None => Poll::Live,
        }
    }

    /// A frame has gone to the relay.
    #[inline]
    fn note_sent(&mut self) {
        if let Some(poll) = self.sent_at.get_mut(self.sent as usize % SENT_REMEMBERED) {
            *poll = self.polls_ever;
        }
        self.sent += 1;
    }

    /// What ends it, and where it is.
    pub(super) fn place(&self, why: &str) -> String {
        format!("{why}, at poll {}, after {} frames", self.polls_ever, self.sent)
    }

    /// What is to be said when the relay says that this frame is not what an earlier start has sent.
    fn divergence(&self, frame: u64) -> String {
        let is_remembered = frame < self.sent && self.sent - frame <= SENT_REMEMBERED as u64;
        let poll = self.sent_at.get(frame as usize % SENT_REMEMBERED).filter(|_| is_remembered);
        let when = match poll {
            Some(poll) => format!("at poll {poll}"),
            None => format!("before poll {}", self.polls_ever),
        };
        format!("its frame {frame}, sent {when}, is not what it sent there before")
    }

    /// What the program has read of clocks since the last time goes to the relay in front of what may follow from it.
    #[inline]
    pub(super) fn tell_reads(&mut self, own: Address, stream: &mut WholeLink) -> io::Result<()> {
        match &mut self.reads_told {
            Some(told) if told.is_behind() => told.catch_up(own, stream),
            _ => Ok(()),
        }
    }

    /// Whether the relay must be heard before it is known what the next poll has to do.
    fn needs_word(&self) -> bool {
        self.next.is_none() && (self.untold > 0 || self.intakes < self.noted)
    }

    /// Whether nothing is left that was taken in before.
    fn has_done_all(&self) -> bool {
        self.next.is_none() && self.untold == 0 && self.intakes >= self.noted
    }
}

/// Whether the relay says, with a frame's number as `delivered`, that an earlier start has sent another one. Polls are counted
/// from 1, and the opening comes before everything else.
pub(super) fn is_refusal(header: &Header) -> bool {
    header.kind == Kind::Intake && header.sequence == 0
}

impl Engine {
    /// Whether what is taken in is recorded.
    #[inline]
    pub fn is_recorded(&self) -> bool {
        self.replay.is_some()
    }

    /// Whether it does again what was done before.
    pub(super) fn is_repeating(&self) -> bool {
        let is_behind =
            |replay: &Replay| !replay.has_done_all() || replay.sent < replay.sent_before;
        self.replay.as_ref().is_some_and(is_behind) || clocks::is_behind()
    }

    /// Hears from the relay how much an earlier start of this process has taken in and sent.
    pub(super) fn learn_record(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + RECORD_TIME_MAX;
        let other = io::Error::other;
        const CLOSED: &str = "it has closed the connection at once; its log (--relay-log) says why";
        let mut reads_told = None;
        let header = loop {
            match self.hear_intake() {
                Ok(Some(header)) if header.kind == Kind::Clocks => {
                    reads_told = Some(ReadsTold::up_to(header.sequence));
                    continue;
                }
                Ok(Some(header)) => break header,
                Ok(None) => (),
                Err(end) if end.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(other(CLOSED));
                }
                Err(error) => return Err(error),
            }
            if !self.relay_record().is_some_and(|mut record| record.is_open()) {
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
        let is_here = matches!(self.relay_record(), Some(Record::Ring(_)));
        if let Some(replay) = &mut self.replay {
            replay.reads_told = reads_told;
            replay.untold = header.credit.into();
            replay.heard = replay.intakes + replay.untold;
            replay.sent_before = replay.sent + header.delivered;
            (replay.repeated, replay.waited) = (0, 0);
            replay.noted = if is_here { 0 } else { clocks::intakes() };
            if replay.noted > replay.heard && clocks::intake(replay.heard).is_none() {
                return Err(other("too much of what it did has not arrived there"));
            }
            let repeated = replay.untold.max(replay.noted.saturating_sub(replay.intakes));
            if repeated > 0 {
                log!(Info, "started anew: {repeated} polls are done again");
            }
        }
        Ok(())
    }

    /// What the relay says next of what was taken in, if it is there.
    fn hear_intake(&mut self) -> io::Result<Option<Header>> {
        let Some(mut record) = self.relay_record() else { return Ok(None) };
        let Some(frame) = record.peek()? else { return Ok(None) };
        // That may have come to it on the way.
        let bad = |why| io::Error::new(io::ErrorKind::InvalidData, why);
        let header = Header::parse(frame).map_err(|malformed| bad(malformed.0))?;
        if !matches!(header.kind, Kind::Intake | Kind::Clocks) {
            return Err(bad("the relay says something else than what was before"));
        }
        record.consume();
        Ok(Some(header))
    }

    /// The connection to the relay is of no use any more. If that is because a frame of this process was another one before,
    /// the relay has said so last: this process ends.
    #[cold]
    pub(super) fn hear_last_word(&mut self) {
        if let Some(Record::Ring(ring)) = self.relay_record()
            && let Some(frame) = ring.word_left()
        {
            self.end_refused(frame);
        }
        while let Some(mut record) = self.relay_record() {
            let Ok(Some(frame)) = record.peek() else { return };
            let Ok(header) = Header::parse(frame) else { return };
            if is_refusal(&header) {
                self.end_refused(header.delivered);
            }
            record.consume();
        }
    }

    #[cold]
    pub(super) fn end_refused(&self, frame: u64) -> ! {
        let why = self.replay.as_ref().map(|replay| replay.divergence(frame));
        self.end_process(&why.unwrap_or_default())
    }

    /// Waits until it is known what the next poll has to do.
    #[cold]
    fn hear_next(&mut self) {
        if let Some(replay) = self.replay.as_mut().filter(|replay| replay.untold == 0) {
            let intake = clocks::intake(replay.intakes);
            // It was there when this start began, and nothing is noted while what was is repeated.
            replay.next = intake.map(|[polls, frames, micros]| Intake {
                polls,
                frames: frames as u32,
                micros,
            });
            return;
        }
        let header = loop {
            match self.hear_intake() {
                Ok(Some(header)) if is_refusal(&header) => self.end_refused(header.delivered),
                Ok(Some(header)) => break header,
                Ok(None) => self.wait_for_relay(),
                Err(error) => self.end_cut_off(&error.to_string()),
            }
        };
        if let Some(replay) = &mut self.replay {
            let Header { sequence: polls, credit: frames, delivered: micros, .. } = header;
            replay.next = Some(Intake { polls, frames, micros });
            replay.untold -= 1;
        }
    }

    pub(super) fn relay_record(&mut self) -> Option<Record<'_>> {
        let id = self.relay.link()?;
        match &mut self.links[id].as_mut()?.carrier {
            Carrier::Shm(ring) => Some(Record::Ring(ring)),
            Carrier::Whole(stream) => Some(Record::Stream(stream)),
            _ => None,
        }
    }

    /// A poll of the program: takes in what it did before, or what there is, and does what is due. The number of frames.
    pub(super) fn poll_recorded(&mut self) -> usize {
        if clocks::is_image_wanted() {
            self.make_way_for_image();
        }
        self.core.end_deferral();
        let real = self.idle.time();
        if self.idle.has_not_looked(self.idle.clock.now()) {
            // It brings nothing but the end of the relay, after which nothing goes on.
            self.look(0);
        }
        if self.replay.as_ref().is_some_and(Replay::needs_word) {
            self.hear_next();
        }
        let Some(poll) = self.replay.as_mut().map(Replay::poll) else { return 0 };
        let Some(id) = self.relay.link() else { return 0 };
        let frames = match poll {
            Poll::Nothing => 0,
            Poll::Again(intake) => {
                let now = self.advance_time(intake.micros, real);
                let frames = self.take_in_again(id, intake.frames);
                if self.replay.as_ref().is_some_and(|replay| replay.intakes > replay.heard) {
                    self.tell_intake(intake);
                }
                self.do_what_is_due(now);
                frames
            }
            Poll::Live if self.has_cause(id, real) => {
                let micros = self.replay.as_ref().map_or(0, |replay| replay.now.lag(real));
                let now = self.advance_time(micros, real);
                let frames = self.poll_ring(id);
                self.record_intake(frames as u32, micros);
                self.do_what_is_due(now);
                frames
            }
            Poll::Live => 0,
        };
        self.flush();
        frames
    }

    /// Whether something has come, or is due by the real clock.
    #[inline]
    fn has_cause(&mut self, id: usize, real: Time) -> bool {
        let is_due = |replay: &Replay| {
            let lag = replay.now.lag(real);
            let then = Now { micros: replay.now.micros + lag, ..replay.now };
            lag > 0 && self.core.next_wake().is_some_and(|wake| wake <= then.time())
        };
        self.replay.as_ref().is_some_and(is_due) || self.has_frame(id)
    }

    /// Whether anything waits in the ring of link `id`, or it has ended.
    #[inline]
    fn has_frame(&mut self, id: usize) -> bool {
        match self.links[id].as_mut().map(|link| &mut link.carrier) {
            Some(Carrier::Shm(ring)) => !matches!(ring.peek(), Ok(None)),
            Some(Carrier::Whole(stream)) => !matches!(stream.peek(), Ok(None)),
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
        let real = self.idle.time();
        let now = self.replay.as_ref().map_or(real, |replay| {
            replay.now.time().after(replay.now.lag(real).saturating_mul(MICROSECOND))
        });
        Some(wake.nanos_since(now))
    }

    fn take_in_again(&mut self, id: usize, wanted: u32) -> usize {
        let mut left = wanted as usize;
        while left > 0 {
            self.frames_per_turn = left;
            match self.poll_ring(id) {
                0 => self.wait_for_relay(),
                frames => {
                    left -= frames;
                    clocks::note_taken(frames as u64);
                }
            }
        }
        self.frames_per_turn = super::receive::FRAMES_PER_TURN;
        if let Some(replay) = self.replay.as_ref().filter(|replay| replay.has_done_all()) {
            let (frames, waits) = (replay.repeated, replay.waited);
            log!(Info, "live again, after {frames} frames; {waits} times something was due");
        }
        wanted as usize
    }

    /// The relay must do something before anything else can happen; this process ends if it is gone.
    fn wait_for_relay(&mut self) {
        if !self.relay_record().is_some_and(|mut record| record.is_open()) {
            self.end_cut_off("its relay has closed the connection");
        }
        std::thread::yield_now();
    }

    /// Whoever is recorded cannot go on without: what it took in and sent would be in no record, and what it did might be
    /// something else than before. Ends the process, which ends the job.
    #[cold]
    pub(super) fn end_process(&self, why: &str) -> ! {
        self.end_with(EXIT_CANNOT_GO_ON, &format!("this process cannot go on: {why}"))
    }

    #[cold]
    pub(super) fn end_with(&self, code: i32, why: &str) -> ! {
        log!(Warn, "{why}");
        host::say_last_word();
        // SAFETY: ends the process at once; nothing of it may run any more.
        unsafe { libc::_exit(code) }
    }

    /// All that the program has read of clocks goes to a relay on another node, so that an image on any node goes on from there.
    pub(super) fn tell_reads_for_image(&mut self) {
        let link = self.relay.link().and_then(|id| self.links[id].as_mut());
        let (Some(link), Some(replay)) = (link, &mut self.replay) else { return };
        if let Carrier::Whole(stream) = &mut link.carrier
            && let Err(error) = replay.tell_reads(self.own.address, stream)
        {
            self.end_cut_off(&error.to_string());
        }
    }

    /// To the relay, behind what the program has read of clocks. Whether it was sent; a ring may have no room.
    fn send_record(&mut self, bytes: &[u8]) -> io::Result<bool> {
        let Some(link) = self.relay.link().and_then(|id| self.links[id].as_mut()) else {
            return Ok(true);
        };
        match &mut link.carrier {
            Carrier::Shm(ring) => Ok(ring.send(bytes, &[])),
            Carrier::Whole(stream) => {
                if let Some(replay) = &mut self.replay {
                    replay.tell_reads(self.own.address, stream)?;
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
    fn record_intake(&mut self, frames: u32, micros: u64) {
        if frames == 0 && micros == 0 {
            return;
        }
        let Some(replay) = self.replay.as_mut() else { return };
        let polls = std::mem::take(&mut replay.polls);
        let number = replay.intakes;
        replay.intakes += 1;
        if let Some(Record::Stream(_)) = self.relay_record() {
            clocks::note_intake(number, [polls, frames.into(), micros]);
        }
        self.tell_intake(Intake { polls, frames, micros });
    }

    fn tell_intake(&mut self, intake: Intake) {
        let header = Header {
            length: 0,
            kind: Kind::Intake,
            flags: 0,
            hops: 0,
            source: self.own.address,
            target: Address::ANONYMOUS,
            sequence: intake.polls,
            delivered: intake.micros,
            credit: intake.frames,
        };
        let mut bytes = [0; HEADER_BYTES];
        header.emit(&mut bytes);
        loop {
            match self.send_record(&bytes) {
                Ok(true) => return,
                Ok(false) => self.wait_for_relay(),
                Err(error) => self.end_cut_off(&error.to_string()),
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
        for poll in 1..=SENT_REMEMBERED as u64 {
            replay.poll();
            assert_eq!(replay.polls_ever, poll);
            replay.note_sent();
            replay.note_sent();
        }
        let said = |frame| replay.divergence(frame);
        let last = 2 * SENT_REMEMBERED as u64 - 1;
        assert!(said(last).contains(&format!("frame {last}, sent at poll {SENT_REMEMBERED},")));
        let half = SENT_REMEMBERED as u64;
        assert!(said(half).contains(&format!("sent at poll {},", half / 2 + 1)), "{}", said(half));
        for frame in [0, half - 1, last + 1] {
            assert!(said(frame).contains(&format!("sent before poll {half},")), "{}", said(frame));
        }
    }

    const fn intake(polls: u64, frames: u32, micros: u64) -> Intake {
        Intake { polls, frames, micros }
    }

    #[test]
    fn the_same_at_the_same_polls_and_nothing_new_before_all_is_sent_again() {
        let next = Some(intake(2, 5, 70));
        let mut replay = Replay { next, untold: 1, sent_before: 3, sent: 2, ..Replay::default() };
        let mut polls = Vec::new();
        for _ in 0..5 {
            if replay.needs_word() {
                (replay.next, replay.untold) = (Some(intake(1, 0, 9)), 0);
            }
            polls.push(replay.poll());
        }
        assert!(replay.has_done_all());
        let again = |polls, frames, micros| Poll::Again(intake(polls, frames, micros));
        assert_eq!(
            polls,
            [Poll::Nothing, again(2, 5, 70), again(1, 0, 9), Poll::Nothing, Poll::Nothing]
        );
        replay.sent = 3;
        assert_eq!(replay.poll(), Poll::Live);
        assert_eq!(replay.polls, 3, "the next intake counts from the last");
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
