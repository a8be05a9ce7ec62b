//! Polling, spinning, parking.
//!
//! Libraries poll in a loop until something comes. As long as that may be soon, polling is answered at once; when
//! a loop has gone on without result for longer than a message takes, the processor is better given to whoever
//! will send it. Then a poll *parks*: it sleeps in the kernel, for a bounded time, until a frame,
//! a bell (for a frame, or for room in a ring that was full) or a connection arrives.
//!
//! A parked poll holds the endpoint's lock. Another thread that wants it rings a bell of the process, and for a
//! moment nobody parks.
//!
//! A program that computes between polls must never be put to sleep: only polls that follow each other without a gap
//! make a streak, and only a long streak parks.

use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};

use crate::sync::Sleep;

use super::Engine;
use super::handshake::Carrier;
use super::peers::Token;

/// Polls further apart than this do not belong to one waiting loop.
const GAP_MICROS: u64 = 20;
/// Polls no further apart than this come from a loop that does nothing else. MPICH yields the processor between them,
/// a system call that takes longer than many looks at a ring.
const TIGHT_GAP_MICROS: u64 = 2;
/// How long one poll in such a loop keeps looking.
const LOOK_ON_MICROS: u64 = 2;
/// A look that took longer was interrupted: somebody else wants the processor.
const PREEMPTED_MICROS: u64 = 200;
/// How long others are then given way before spinning is tried again.
const CROWDED_MICROS: u64 = 50_000;
/// How long a loop with a processor for itself spins before its polls park: longer than most messages take, shorter than
/// anybody notices.
const SPIN_MICROS: u64 = 2_000;
/// After so long a spin, the processor is offered to others at every poll: more may run here than anybody has counted.
const PURE_SPIN_MICROS: u64 = 10;
/// How long a loop that shares its processor yields before its polls park, while yielding pays.
const YIELD_MICROS: u64 = 50;
/// What yielding is trusted with at most: so many streaks in vain until polls park at once.
const TRUST_MAX: u32 = 4;
/// How long polls neither park nor yield after another thread has wanted the endpoint: it will want it again soon.
const THREADS_MICROS: u64 = 1_000;
/// Of the streaks without trust, one in so many yields all the same, to see whether it pays by now.
const STREAKS_PER_TRIAL: u32 = 32;
/// Polls of a loop, where processors are shared, before one of them yields or parks: a few microseconds.
const POLLS_MIN: u32 = 16;
/// How long a poll may sleep: other work of the MPI library's own loop is delayed at most so long.
const PARK_MILLIS: i32 = 1;
/// Looks at the kernel's events happen every so many polls while only rings are in use,
const POLLS_PER_LOOK: u32 = 256;
/// and whenever the last one is longer ago: somebody may be at the door of a program that polls rarely.
const LOOK_GAP_MICROS: u64 = 1_000;
/// And while one stream is read directly.
const POLLS_PER_LOOK_HOT: u32 = 16;
/// So many reads in a row from one stream make it the one that is read directly.
const HOT_READS: u32 = 16;
/// Events taken from the kernel at once.
const EVENTS: usize = 64;
/// The bell of waiting threads among the events: nothing is to be done but to be awake.
const NO_LINK: usize = u32::MAX as usize;

/// How a waiting loop is treated.
pub struct Idle {
    clock: Clock,
    /// As far as is known, every process of the node has a processor of its own.
    has_room: bool,
    /// But others wanted this one: they are given way until then, in the clock's ticks.
    crowded_until: u64,
    /// Other threads wanted the endpoint: nobody sleeps in it until then, in the clock's ticks.
    threads_until: u64,
    /// Epoll watches the bell of waiting threads.
    is_bell_watched: bool,
    /// Since when polls have been in vain, in the clock's ticks.
    streak_since: Option<u64>,
    /// Polls of it.
    streak_polls: u32,
    last_poll: u64,
    /// When the kernel's events were looked at last, in the clock's ticks.
    last_look: u64,
    yielding: Yielding,
    /// Processor time of this thread at the last poll, where processors are shared.
    processor_time: Duration,
    polls: u32,
    /// The stream that brought something last, and how often in a row.
    busiest: (usize, u32),
    hellos_checked: Instant,
}

impl Idle {
    /// For a node on which `processes` share the processors.
    pub fn new(processes: u32) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
        let clock = Clock::new();
        Self {
            clock,
            has_room: processes <= processors,
            crowded_until: clock.now(),
            threads_until: 0,
            is_bell_watched: false,
            streak_since: None,
            streak_polls: 0,
            last_poll: 0,
            last_look: 0,
            yielding: Yielding { trust: TRUST_MAX, streaks: 0, is_on: false },
            processor_time: Duration::ZERO,
            polls: 0,
            busiest: (0, 0),
            hellos_checked: Instant::now(),
        }
    }
}

/// Whether offering the processor brings the awaited message, or only hands it around among processes that wait too.
/// The second costs a slice of the scheduler's for each of them, a thousand times what parking costs.
struct Yielding {
    trust: u32,
    streaks: u32,
    /// The streak at hand yields.
    is_on: bool,
}

impl Yielding {
    /// A streak begins.
    fn begin(&mut self) {
        self.streaks = self.streaks.wrapping_add(1);
        self.is_on = self.trust > 0 || self.streaks.is_multiple_of(STREAKS_PER_TRIAL);
    }

    /// What was waited for came while yielding.
    fn note_success(&mut self) {
        if std::mem::take(&mut self.is_on) {
            self.trust = (self.trust + 1).min(TRUST_MAX);
        }
    }

    /// It has not come in time.
    fn note_failure(&mut self) {
        if std::mem::take(&mut self.is_on) {
            self.trust = self.trust.saturating_sub(1);
        }
    }
}

impl Idle {
    /// Whether nobody else wants this processor.
    #[inline]
    fn is_alone(&self) -> bool {
        self.has_room && self.clock.now() >= self.crowded_until
    }

    /// Whether the last look at the kernel's events is too long ago.
    #[inline]
    fn has_not_looked(&self, now: u64) -> bool {
        now > self.last_look + LOOK_GAP_MICROS * self.clock.ticks_per_micro
    }

    /// Another process had the processor in the middle of a spin.
    #[cold]
    fn note_crowd(&mut self) {
        self.crowded_until = self.clock.now() + CROWDED_MICROS * self.clock.ticks_per_micro;
    }

    /// Whether the time since the last poll went to other processes, not into computing.
    fn has_only_waited(&self) -> bool {
        let used = processor_time().saturating_sub(self.processor_time);
        !self.is_alone() && used < Duration::from_micros(GAP_MICROS)
    }
}

impl Engine {
    /// Does what can be done; the number of events handled. Sleeps briefly in a loop that waits for long.
    #[inline]
    pub fn progress(&mut self) -> usize {
        self.core.end_deferral();
        let mut events = self.poll_once();
        if events == 0 && self.idle.is_alone() {
            events = self.look_on();
        }
        let now = self.idle.clock.now();
        events += self.look_if_late(now);
        if events > 0 {
            if self.idle.streak_since.take().is_some() {
                self.idle.yielding.note_success();
            }
            self.idle.last_poll = now;
        } else {
            self.rest(now);
        }
        events
    }

    /// In a tight loop of a program that has a processor for itself: a little more patience before it is told "nothing".
    #[inline]
    fn look_on(&mut self) -> usize {
        let clock = self.idle.clock;
        let start = clock.now();
        if clock.micros(start.wrapping_sub(self.idle.last_poll)) > TIGHT_GAP_MICROS
            || self.relay.is_up()
        {
            return 0;
        }
        loop {
            for _ in 0..4 {
                std::hint::spin_loop();
                let events = self.poll_once();
                if events > 0 {
                    return events;
                }
            }
            let looked = clock.micros(clock.now().wrapping_sub(start));
            if looked >= LOOK_ON_MICROS {
                if looked > PREEMPTED_MICROS {
                    self.idle.note_crowd();
                }
                return 0;
            }
        }
    }

    /// Parks until something arrives, at most `deadline_ms`.
    pub fn wait(&mut self, deadline_ms: i32) {
        self.core.end_deferral();
        if self.poll_once() == 0 {
            self.park(deadline_ms);
        }
    }

    /// Takes in what there is, without rest.
    pub(super) fn poll(&mut self) -> usize {
        self.poll_once() + self.look_if_late(self.idle.clock.now())
    }

    /// The look at the kernel's events that polls by their number would have made too late.
    #[inline]
    fn look_if_late(&mut self, now: u64) -> usize {
        if !self.idle.has_not_looked(now) {
            return 0;
        }
        let events = self.look(0);
        self.flush();
        events
    }

    #[inline]
    fn poll_once(&mut self) -> usize {
        let mut events = 0;
        for index in 0..self.rings.len() {
            if let Some(&id) = self.rings.get(index) {
                events += self.poll_ring(id);
            }
        }
        self.idle.polls = self.idle.polls.wrapping_add(1);
        if let Some(id) = self.hot_stream {
            events += self.read_stream(id);
        }
        let every = match (self.streams, self.hot_stream) {
            (0, _) => POLLS_PER_LOOK,
            (_, Some(_)) => POLLS_PER_LOOK_HOT,
            _ => 1,
        };
        if self.hellos_open > 0 || self.idle.polls.is_multiple_of(every) {
            events += self.look(0);
        }
        if self.full_rings.is_empty() {
            self.flush();
            return events;
        }
        let written = self.written_to_rings();
        self.retry_full_rings();
        self.flush();
        // A frame that goes out is as good a reason to go on as one that comes in.
        events + usize::from(self.written_to_rings() != written)
    }

    /// Bytes ever written to the rings there are.
    fn written_to_rings(&self) -> u64 {
        let written = |id: &usize| match &self.links[*id].as_ref()?.carrier {
            Carrier::Shm(ring) => Some(ring.written()),
            _ => None,
        };
        self.rings.iter().filter_map(written).sum()
    }

    /// Takes what the kernel has to tell; waits for it up to `millis`.
    pub(super) fn look(&mut self, millis: i64) -> usize {
        let timeout =
            rustix::event::Timespec { tv_sec: millis / 1000, tv_nsec: (millis % 1000) * 1_000_000 };
        let empty = epoll::Event { flags: EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut buffer = [empty; EVENTS];
        let result = epoll::wait(&self.epoll, &mut buffer[..], Some(&timeout));
        self.idle.last_look = self.idle.clock.now();
        let Ok(count) = result else { return 0 };
        for event in &buffer[..count] {
            let (flags, data) = (event.flags, event.data);
            self.handle_event(Token::of(data.u64()), flags);
        }
        if self.hellos_open > 0 && self.idle.hellos_checked.elapsed() > Duration::from_secs(1) {
            self.idle.hellos_checked = Instant::now();
            self.check_hellos();
        }
        count
    }

    fn handle_event(&mut self, token: Token, flags: EventFlags) {
        match token {
            Token::Listener => self.handle_door(false),
            Token::UnixListener => self.handle_door(true),
            Token::Hello(id) => self.handle_hello(id),
            Token::Link(id) => self.handle_link_event(id, flags),
        }
    }

    fn handle_link_event(&mut self, id: usize, flags: EventFlags) {
        let Some(link) = self.links.get_mut(id).and_then(Option::as_mut) else {
            return;
        };
        if let Carrier::Shm(ring) = &mut link.carrier {
            if !ring.drain_doorbell() {
                while self.poll_ring(id) > 0 {}
                self.link_down(id, &std::io::ErrorKind::UnexpectedEof.into());
            }
            return;
        }
        if flags.contains(EventFlags::OUT) {
            self.handle_writable(id);
        }
        if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR)
            && self.read_stream(id) > 0
        {
            self.heat(id);
        }
    }

    /// Stream `id` has brought something by way of epoll. While only one does, it is read directly: that saves a system call
    /// for each message, and the sender the wake-up of an epoll nobody sleeps in.
    fn heat(&mut self, id: usize) {
        if self.hot_stream.is_some() {
            self.cool();
        }
        let (busiest, reads) = &mut self.idle.busiest;
        *reads = if *busiest == id { *reads + 1 } else { 0 };
        *busiest = id;
        if *reads >= HOT_READS && self.idle.is_alone() && self.set_watched(id, false) {
            self.hot_stream = Some(id);
        }
    }

    /// No stream is read directly any more.
    fn cool(&mut self) {
        if let Some(id) = self.hot_stream.take() {
            self.set_watched(id, true);
        }
        self.idle.busiest.1 = 0;
    }

    /// Nothing has come: spins, yields or parks, depending on how long that has been so.
    fn rest(&mut self, now: u64) {
        let clock = self.idle.clock;
        let gap = clock.micros(now.wrapping_sub(self.idle.last_poll));
        self.idle.last_poll = now;
        let since = match self.idle.streak_since {
            Some(since) if gap <= GAP_MICROS || self.idle.has_only_waited() => since,
            _ => {
                self.idle.streak_since = Some(now);
                self.idle.streak_polls = 0;
                self.idle.processor_time = processor_time();
                self.idle.yielding.begin();
                return;
            }
        };
        self.idle.streak_polls = self.idle.streak_polls.saturating_add(1);
        let streak = clock.micros(now.wrapping_sub(since));
        let is_alone = self.idle.is_alone();
        // Whoever waits for a relay of this node must let it work.
        let waits_for_relay = self.relay.is_up();
        if now < self.idle.threads_until {
            return;
        }
        let patience = match is_alone {
            true => SPIN_MICROS,
            false if self.idle.yielding.is_on => YIELD_MICROS,
            false => 0,
        };
        if !is_alone && self.idle.streak_polls < POLLS_MIN {
            // A few looks that the program takes on its way are no waiting.
        } else if streak >= patience {
            if !is_alone {
                self.idle.yielding.note_failure();
            }
            self.park(PARK_MILLIS);
        } else if !is_alone || waits_for_relay || streak > PURE_SPIN_MICROS {
            std::thread::yield_now();
        }
        self.idle.last_poll = clock.now();
        if !is_alone {
            self.idle.processor_time = processor_time();
        }
    }

    /// Sleeps until something arrives or a full ring has room, at most `millis`.
    fn park(&mut self, millis: i32) {
        self.cool();
        let mut parked = 0;
        let mut may_sleep = true;
        for &id in &self.rings {
            let Some(Carrier::Shm(ring)) = self.links[id].as_mut().map(|link| &mut link.carrier)
            else {
                continue;
            };
            parked += 1;
            if !ring.prepare_park() {
                may_sleep = false;
                break;
            }
        }
        if may_sleep {
            self.sleep(millis);
        }
        for &id in self.rings.iter().take(parked) {
            if let Some(Carrier::Shm(ring)) = self.links[id].as_mut().map(|link| &mut link.carrier)
            {
                ring.unpark();
            }
        }
    }
}

impl Engine {
    /// Sleeps, unless or until another thread wants the endpoint.
    fn sleep(&mut self, millis: i32) {
        if !self.idle.is_bell_watched
            && let Some(bell) = Sleep::bell()
        {
            let data = epoll::EventData::new_u64(Token::Link(NO_LINK).number());
            let flags = EventFlags::IN | EventFlags::ET;
            self.idle.is_bell_watched = epoll::add(&self.epoll, bell, data, flags).is_ok();
        }
        if let Some(_sleep) = Sleep::begin() {
            self.look(millis as i64);
        }
        if Sleep::is_unwelcome() {
            let clock = self.idle.clock;
            self.idle.threads_until = clock.now() + THREADS_MICROS * clock.ticks_per_micro;
        }
    }
}

/// Processor time this thread has used.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A clock that costs a few nanoseconds: the processor's own counter where there is one.
#[derive(Clone, Copy)]
struct Clock {
    ticks_per_micro: u64,
}

impl Clock {
    /// Takes [`CALIBRATION`] to find out how fast the counter runs.
    fn new() -> Self {
        const CALIBRATION: Duration = Duration::from_micros(100);
        let (start, ticks) = (Instant::now(), ticks());
        while start.elapsed() < CALIBRATION {
            std::hint::spin_loop();
        }
        let micros = start.elapsed().as_micros().max(1) as u64;
        Self { ticks_per_micro: ((self::ticks() - ticks) / micros).max(1) }
    }

    #[inline]
    fn now(self) -> u64 {
        ticks()
    }

    #[inline]
    fn micros(self, ticks: u64) -> u64 {
        // Counters of two processors may differ by a little: never negative.
        if ticks > u64::MAX / 2 { 0 } else { ticks / self.ticks_per_micro }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streak(yielding: &mut Yielding, pays: bool) -> bool {
        yielding.begin();
        let was_on = yielding.is_on;
        if pays {
            yielding.note_success()
        } else {
            yielding.note_failure()
        }
        was_on
    }

    #[test]
    fn yields_while_it_pays_and_tries_again_later() {
        let mut yielding = Yielding { trust: TRUST_MAX, streaks: 0, is_on: false };
        assert!((0..100).all(|_| streak(&mut yielding, true)));
        for _ in 0..TRUST_MAX {
            streak(&mut yielding, false);
        }
        let tried = (0..10 * STREAKS_PER_TRIAL).filter(|_| streak(&mut yielding, false)).count();
        assert_eq!(tried, 10, "only trials yield now");
        // One trial that pays brings the trust back.
        while !streak(&mut yielding, true) {}
        assert!(streak(&mut yielding, true));
    }
}
