//! How long a thread of the program has polled in vain, and what its next poll should do about it.
//!
//! What enters: each poll of any endpoint by this thread, whether it brought something, and the time. What leaves:
//! advice: go on, yield the processor, or park until something arrives. Nothing here sleeps or touches the network.
//!
//! Libraries poll in a loop until something comes. As long as that may be soon, polling is answered at once; when
//! a loop has gone on without result for longer than a message takes, the processor is better given to whoever
//! will send it.
//!
//! A loop belongs to a thread, not to an endpoint: a library with several endpoints polls them in turn, and what one of
//! them brings ends the waiting for all.
//!
//! A program that computes between polls must never be put to sleep: only polls that follow each other without a gap
//! make a streak, and only a long streak parks.

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::cpu_placement::CpuPlacement;

/// Polls further apart than this do not belong to one waiting loop.
const GAP_MICROS: u64 = 20;
/// How long a loop with a processor for itself spins before its polls park: longer than most messages take, shorter than
/// anybody notices.
const SPIN_MICROS: u64 = 2_000;
/// After so long a spin, the processor is offered to others at every poll: more may run here than anybody has counted.
const PURE_SPIN_MICROS: u64 = 10;
/// How long a loop that shares its processor yields before its polls park, while yielding is cheap.
const YIELD_MICROS: u64 = 2_000;
/// Who gets the processor back so late has given it to somebody who computes, for a slice of the scheduler's: yielding is
/// not cheap. Others that wait too give it back within microseconds.
const SLICE_MICROS: u64 = 1000;
/// Of the streaks without trust, one in so many yields all the same, to see whether it pays by now.
const STREAKS_PER_TRIAL: u32 = 32;
/// Polls of a loop, where processors are shared, before one of them yields or parks: a few microseconds.
const POLLS_MIN: u32 = 16;
/// Of these, the one from which on the thread's processor time is watched.
const POLLS_UNSAMPLED: u32 = 8;
/// How long polls neither park nor yield after another thread has wanted the endpoint: it will want it again soon.
const CONTENDED_MICROS: u64 = 1_000;

/// What a poll in vain should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Return at once.
    GoOn,
    /// Offer the processor to others, then return.
    Yield,
    /// Sleep until something arrives.
    Park,
}

/// What is known about the processors when a poll was in vain.
#[derive(Clone, Copy)]
pub struct PollContext {
    /// Nobody else wants this processor.
    pub has_own_processor: bool,
    /// A process of this node must work before anything can come.
    pub waits_for_relay: bool,
    /// The program has done something else than wait since its last poll.
    pub has_posted: bool,
}

/// The waiting loop of one thread.
pub struct PollPolicy {
    clock: Clock,
    /// Polls in vain, one after the other.
    streak: Option<Streak>,
    last_poll: u64,
    /// Other threads wanted what this one slept in: it does not sleep again until then.
    contended_until: u64,
    /// Which endpoint brought something last, by its descriptor.
    most_recent: Option<RawFd>,
    non_waiting: NonWaitingPolls,
    yielding: YieldPolicy,
    placement: CpuPlacement,
}

/// Polls in vain of a program that does not wait.
#[derive(Default)]
struct NonWaitingPolls {
    polls: u32,
    /// When others were given the processor last, in the clock's ticks.
    last_yield: u64,
}

/// A waiting loop since its last message. Times are in the clock's ticks.
struct Streak {
    since: u64,
    polls: u32,
    watch: Option<ProcessorTimeSample>,
}

thread_local! {
    static MINE: RefCell<Option<PollPolicy>> = const { RefCell::new(None) };
}

impl PollPolicy {
    /// Hands out what belongs to this thread. `None` where it is being ended, or while it is handed out already.
    #[inline]
    pub fn of_this_thread<R>(body: impl FnOnce(&mut PollPolicy) -> R) -> Option<R> {
        let take = |mine: &RefCell<Option<PollPolicy>>| {
            let mut mine = mine.try_borrow_mut().ok()?;
            Some(body(mine.get_or_insert_with(|| PollPolicy::new(Clock::get()))))
        };
        MINE.try_with(take).ok().flatten()
    }

    fn new(clock: Clock) -> Self {
        Self {
            clock,
            streak: None,
            last_poll: 0,
            contended_until: 0,
            most_recent: None,
            non_waiting: NonWaitingPolls::default(),
            yielding: YieldPolicy {
                is_effective: true,
                streaks: 0,
                is_on: false,
                has_yielded: false,
            },
            placement: CpuPlacement::new(clock.ticks_per_micro),
        }
    }

    /// A poll of the endpoint with this descriptor brought something.
    #[inline]
    pub fn note_event(&mut self, now: u64, endpoint: RawFd) {
        self.most_recent = Some(endpoint);
        self.note_gap(now);
        if self.streak.take().is_some() {
            self.yielding.note_success();
        }
        self.last_poll = now;
    }

    /// Whether no other endpoint of the thread's has brought something since this one did.
    #[inline]
    pub fn is_most_recent(&self, endpoint: RawFd) -> bool {
        self.most_recent.is_none_or(|most_recent| most_recent == endpoint)
    }

    /// A poll brought nothing.
    #[inline]
    pub fn note_nothing(&mut self, now: u64, around: PollContext) -> Advice {
        let gap = self.clock.micros(now.wrapping_sub(self.last_poll));
        self.note_gap(now);
        self.last_poll = now;
        if around.has_posted {
            return self.note_posted(now, around);
        }
        // Where processors are shared, a gap may have gone to others: that is found out when it matters.
        let Some(streak) =
            self.streak.as_mut().filter(|_| gap <= GAP_MICROS || !around.has_own_processor)
        else {
            self.begin(now);
            return Advice::GoOn;
        };
        streak.polls = streak.polls.saturating_add(1);
        streak.note_gap(gap);
        if gap > GAP_MICROS && streak.polls < POLLS_UNSAMPLED {
            // Perhaps the program computed before it began to wait.
            streak.since = now;
        }
        if now < self.contended_until {
            return Advice::GoOn;
        }
        let waited = self.clock.micros(now.wrapping_sub(streak.since));
        match around.has_own_processor {
            true => Self::advise_exclusive(waited, around.waits_for_relay),
            false => self.advise_oversubscribed(now, waited, gap),
        }
    }

    /// Whoever does something between polls does not wait, and never sleeps: what it does may be of its own, such as
    /// operations on its own window, of which a library tells the provider nothing. Others get the processor now and then,
    /// for a program may also do something until another process has changed its memory: at every few polls where yielding
    /// is cheap, elsewhere as often as a loop that waits would park for the first time.
    fn note_posted(&mut self, now: u64, around: PollContext) -> Advice {
        self.streak = None;
        self.non_waiting.polls = self.non_waiting.polls.wrapping_add(1);
        let is_cheap = if around.has_own_processor {
            around.waits_for_relay
        } else {
            self.yielding.is_effective
        };
        let waited = self.clock.micros(now.wrapping_sub(self.non_waiting.last_yield));
        let yields_now = match is_cheap {
            true => self.non_waiting.polls.is_multiple_of(POLLS_MIN),
            false => !around.has_own_processor && waited >= YIELD_MICROS,
        };
        if yields_now { Advice::Yield } else { Advice::GoOn }
    }

    fn begin(&mut self, now: u64) {
        self.streak = Some(Streak { since: now, polls: 0, watch: None });
        self.yielding.begin();
    }

    #[inline]
    fn advise_exclusive(waited: u64, waits_for_relay: bool) -> Advice {
        if waited >= SPIN_MICROS {
            Advice::Park
        } else if waits_for_relay || waited > PURE_SPIN_MICROS {
            // Whoever waits for a relay of this node must let it work.
            Advice::Yield
        } else {
            Advice::GoOn
        }
    }

    fn advise_oversubscribed(&mut self, now: u64, waited: u64, gap: u64) -> Advice {
        let Some(streak) = &mut self.streak else { return Advice::GoOn };
        if streak.polls == POLLS_UNSAMPLED {
            streak.watch = Some(ProcessorTimeSample::begin(now));
        }
        if streak.polls < POLLS_MIN {
            // A few looks that the program takes on its way are no waiting.
            return Advice::GoOn;
        }
        if gap > SLICE_MICROS {
            self.yielding.note_failure();
        }
        let yields = self.yielding.is_on && waited < YIELD_MICROS;
        // Before a loop gives the processor away for the first time, and before each sleep.
        if (streak.polls == POLLS_MIN || !yields) && streak.has_computed(now, self.clock) {
            self.begin(now);
            return Advice::GoOn;
        }
        if yields {
            self.yielding.note_yield();
            return Advice::Yield;
        }
        Advice::Park
    }

    /// The thread has done as advised, which is no gap between polls.
    #[inline]
    pub fn note_advice_taken(&mut self, advice: Advice, now: u64) {
        let took = self.clock.micros(now.wrapping_sub(self.last_poll));
        if let Some(streak) = &mut self.streak {
            streak.note_gap(took);
        }
        if advice == Advice::Yield && took > SLICE_MICROS {
            self.yielding.note_failure();
        }
        if advice == Advice::Yield && self.streak.is_none() {
            self.non_waiting.last_yield = now;
            self.yielding.is_effective &= took <= SLICE_MICROS;
        }
        if advice == Advice::Yield {
            self.placement.note_gap(now.wrapping_sub(self.last_poll), now);
        }
        self.last_poll = now;
    }

    /// Whether the thread should go to a processor of its own, where there is one: see [`CpuPlacement`]. Said once.
    #[inline]
    pub fn should_move(&mut self) -> bool {
        self.placement.should_move()
    }

    /// The thread polls again after a poll in vain: the library may have offered the processor in between.
    #[inline]
    fn note_gap(&mut self, now: u64) {
        if self.streak.is_some() {
            self.placement.note_gap(now.wrapping_sub(self.last_poll), now);
        }
    }

    /// The endpoint with this descriptor is closed.
    pub fn forget(&mut self, endpoint: RawFd) {
        self.most_recent = self.most_recent.filter(|&most_recent| most_recent != endpoint);
    }

    /// Tells this thread from others; never 0.
    pub fn token(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Another thread wants what this one slept in.
    pub fn note_contended(&mut self) {
        self.contended_until = self.clock.now() + CONTENDED_MICROS * self.clock.ticks_per_micro;
    }
}

/// Whether offering the processor brings the awaited message, or only hands it around among processes that wait too.
/// The second costs a slice of the scheduler's for each of them, a thousand times what parking costs.
struct YieldPolicy {
    is_effective: bool,
    streaks: u32,
    /// The streak at hand may yield.
    is_on: bool,
    /// And has.
    has_yielded: bool,
}

impl YieldPolicy {
    /// A streak begins.
    fn begin(&mut self) {
        self.streaks = self.streaks.wrapping_add(1);
        self.is_on = self.is_effective || self.streaks.is_multiple_of(STREAKS_PER_TRIAL);
        self.has_yielded = false;
    }

    fn note_yield(&mut self) {
        self.has_yielded = true;
    }

    /// What was waited for came while yielding.
    fn note_success(&mut self) {
        self.is_effective |= std::mem::take(&mut self.is_on) && self.has_yielded;
    }

    /// It took a slice. (One of those costs as much as a hundred yields can save.)
    fn note_failure(&mut self) {
        if std::mem::take(&mut self.is_on) {
            self.is_effective = false;
        }
    }
}

impl Streak {
    #[inline]
    fn note_gap(&mut self, micros: u64) {
        if micros > GAP_MICROS
            && let Some(watch) = &mut self.watch
        {
            watch.gaps += 1;
            watch.gap_micros += micros;
        }
    }

    /// Whether the thread has computed between polls since the last time this was asked.
    #[cold]
    fn has_computed(&mut self, now: u64, clock: Clock) -> bool {
        let next = ProcessorTimeSample::begin(now);
        self.watch.replace(next).is_none_or(|watch| watch.has_seen_computing(&next, clock))
    }
}

/// Tells a loop that waits, and whose processor others have between its polls, from one that computes there.
/// (Reading a thread's processor time is a system call: so it is done now and then, not at every gap.)
#[derive(Clone, Copy)]
struct ProcessorTimeSample {
    since: u64,
    processor_time: Duration,
    /// Gaps between polls since then, and how long they were together.
    gaps: u32,
    gap_micros: u64,
}

impl ProcessorTimeSample {
    #[cold]
    fn begin(now: u64) -> Self {
        Self { since: now, processor_time: processor_time(), gaps: 0, gap_micros: 0 }
    }

    /// Whether until `next` the thread has had the processor during gaps too, for longer than a look at the network
    /// takes it.
    fn has_seen_computing(&self, next: &Self, clock: Clock) -> bool {
        let wall = clock.micros(next.since.wrapping_sub(self.since));
        let polling = wall.saturating_sub(self.gap_micros);
        let used = next.processor_time.saturating_sub(self.processor_time);
        used > Duration::from_micros(polling + (u64::from(self.gaps) + 1) * GAP_MICROS)
    }
}

/// Processor time this thread has used.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A clock that costs a few nanoseconds: the processor's own counter where there is one.
#[derive(Clone, Copy)]
pub struct Clock {
    pub ticks_per_micro: u64,
}

impl Clock {
    /// The first call takes [`CALIBRATION`] to find out how fast the counter runs.
    pub fn get() -> Self {
        const CALIBRATION: Duration = Duration::from_micros(100);
        static TICKS_PER_MICRO: AtomicU64 = AtomicU64::new(0);
        let known = TICKS_PER_MICRO.load(Ordering::Relaxed);
        if known > 0 {
            return Self { ticks_per_micro: known };
        }
        let (start, first) = (Instant::now(), ticks());
        while start.elapsed() < CALIBRATION {
            std::hint::spin_loop();
        }
        let micros = start.elapsed().as_micros().max(1) as u64;
        let found = ((ticks() - first) / micros).max(1);
        TICKS_PER_MICRO.store(found, Ordering::Relaxed);
        Self { ticks_per_micro: found }
    }

    #[inline]
    pub fn now(self) -> u64 {
        ticks()
    }

    /// Nanoseconds since some start, as exact as a microsecond.
    #[inline]
    pub fn nanos(self) -> u64 {
        self.now() / self.ticks_per_micro * 1_000
    }

    #[inline]
    pub fn micros(self, ticks: u64) -> u64 {
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

    const CLOCK: Clock = Clock { ticks_per_micro: 1 };
    const ALONE: PollContext =
        PollContext { has_own_processor: true, waits_for_relay: false, has_posted: false };
    const CROWD: PollContext = PollContext { has_own_processor: false, ..ALONE };

    /// What polls in vain are told, one a microsecond, from microsecond `from` on.
    fn poll(policy: &mut PollPolicy, from: u64, count: u64, around: PollContext) -> Vec<Advice> {
        (from..from + count).map(|now| policy.note_nothing(now, around)).collect()
    }

    #[test]
    fn a_loop_with_a_processor_for_itself_spins_then_yields_then_parks() {
        let mut policy = PollPolicy::new(CLOCK);
        let advice = poll(&mut policy, 100, SPIN_MICROS + 1, ALONE);
        let last = advice.len() - 1;
        let pure = PURE_SPIN_MICROS as usize;
        assert!(advice[..=pure].iter().all(|&a| a == Advice::GoOn));
        assert!(advice[pure + 1..last].iter().all(|&a| a == Advice::Yield));
        assert_eq!(advice[last], Advice::Park);
    }

    #[test]
    fn a_program_that_acts_between_polls_never_parks() {
        for around in [ALONE, CROWD, PollContext { waits_for_relay: true, ..ALONE }] {
            let mut policy = PollPolicy::new(CLOCK);
            // An operation, and then more polls than one, for longer than any loop spins or yields.
            for turn in 0..3 * SPIN_MICROS {
                let now = 100 + 4 * turn;
                let acted = PollContext { has_posted: true, ..around };
                let advice = policy.note_nothing(now, acted);
                policy.note_advice_taken(advice, now);
                assert_ne!(advice, Advice::Park, "turn {turn}");
                let advice = poll(&mut policy, now + 1, 3, around);
                assert!(!advice.contains(&Advice::Park), "turn {turn}: {advice:?}");
            }
            let advice = poll(&mut policy, 100 + 12 * SPIN_MICROS, 3 * SPIN_MICROS, around);
            assert!(advice.contains(&Advice::Park), "a loop that only waits");
        }
    }

    #[test]
    fn in_a_crowd_a_program_that_acts_gives_way_seldom_where_yielding_costs_slices() {
        let mut policy = PollPolicy::new(CLOCK);
        let acted = PollContext { has_posted: true, ..CROWD };
        let (mut now, mut yields) = (100, 0);
        for _ in 0..10 * YIELD_MICROS {
            now += 1;
            let advice = policy.note_nothing(now, acted);
            now += if advice == Advice::Yield { SLICE_MICROS + 1 } else { 0 };
            policy.note_advice_taken(advice, now);
            yields += u64::from(advice == Advice::Yield);
        }
        assert!((2..=11).contains(&yields), "{yields}");
    }

    #[test]
    fn what_one_endpoint_brings_ends_the_waiting_for_all() {
        let mut policy = PollPolicy::new(CLOCK);
        poll(&mut policy, 100, SPIN_MICROS, ALONE);
        policy.note_event(100 + SPIN_MICROS, 1);
        let advice = poll(&mut policy, 101 + SPIN_MICROS, PURE_SPIN_MICROS, ALONE);
        assert!(advice.iter().all(|&a| a == Advice::GoOn), "{advice:?}");
    }

    #[test]
    fn no_closed_endpoint_stands_before_the_others() {
        let mut policy = PollPolicy::new(CLOCK);
        policy.note_event(100, 1);
        assert!(policy.is_most_recent(1) && !policy.is_most_recent(2));
        policy.forget(1);
        assert!(policy.is_most_recent(2));
    }

    #[test]
    fn a_loop_that_has_slept_sleeps_again_at_once() {
        let mut policy = PollPolicy::new(CLOCK);
        let mut now = 100 + SPIN_MICROS + 1;
        assert_eq!(poll(&mut policy, 100, SPIN_MICROS + 1, ALONE).pop(), Some(Advice::Park));
        for _ in 0..10 {
            now += 1_000;
            policy.note_advice_taken(Advice::Park, now);
            now += 1;
            assert_eq!(policy.note_nothing(now, ALONE), Advice::Park);
        }
    }

    #[test]
    fn in_a_crowd_computing_before_the_wait_is_no_reason_against_yielding() {
        let mut policy = PollPolicy::new(CLOCK);
        policy.note_nothing(100, CROWD);
        let advice = poll(&mut policy, 100 + 10 * YIELD_MICROS, 2 * u64::from(POLLS_MIN), CROWD);
        assert!(advice.contains(&Advice::Yield) && !advice.contains(&Advice::Park), "{advice:?}");
    }

    #[test]
    fn polls_with_computing_between_them_never_rest() {
        let mut policy = PollPolicy::new(CLOCK);
        let mut advice = (0..10_000).map(|i| policy.note_nothing(i * (GAP_MICROS + 1), ALONE));
        assert!(advice.all(|a| a == Advice::GoOn));
    }

    #[test]
    fn in_a_crowd_too_a_program_that_computes_between_polls_never_parks() {
        let mut policy = PollPolicy::new(Clock::get());
        let computed = || {
            let start = Instant::now();
            while start.elapsed() < Duration::from_micros(200) {
                std::hint::spin_loop();
            }
        };
        let mut advice = (0..200).map(|_| {
            computed();
            let advice = policy.note_nothing(policy.clock.now(), CROWD);
            policy.note_advice_taken(advice, policy.clock.now());
            advice
        });
        assert!(advice.all(|a| a != Advice::Park));
    }

    #[test]
    fn a_thread_that_others_wait_for_neither_parks_nor_yields() {
        let mut policy = PollPolicy::new(Clock { ticks_per_micro: Clock::get().ticks_per_micro });
        let start = policy.clock.now();
        policy.note_contended();
        let advice = poll(&mut policy, start, 1_000, CROWD);
        assert!(advice.iter().all(|&a| a == Advice::GoOn));
    }

    #[test]
    fn in_a_crowd_polls_park_early_where_yielding_costs_slices() {
        let mut policy = PollPolicy::new(CLOCK);
        let mut now = 100;
        // Polls until the first park, and yields among them.
        let mut streak = |policy: &mut PollPolicy| {
            policy.note_event(now, 1);
            let mut yields = 0;
            for polls in 0.. {
                now += 1;
                let advice = policy.note_nothing(now, CROWD);
                yields += u32::from(advice == Advice::Yield);
                now += if advice == Advice::Yield { SLICE_MICROS + 1 } else { 0 };
                if advice == Advice::Park {
                    return (polls, yields);
                }
                policy.note_advice_taken(advice, now);
            }
            unreachable!();
        };
        assert_eq!(streak(&mut policy).1, 1, "it costs too much");
        assert_eq!(streak(&mut policy), (POLLS_MIN, 0));
    }

    fn trial(yielding: &mut YieldPolicy, pays: bool) -> bool {
        yielding.begin();
        let was_on = yielding.is_on;
        yielding.note_yield();
        if pays {
            yielding.note_success()
        } else {
            yielding.note_failure()
        }
        was_on
    }

    #[test]
    fn yields_while_it_pays_and_tries_again_later() {
        let mut yielding =
            YieldPolicy { is_effective: true, streaks: 0, is_on: false, has_yielded: false };
        assert!((0..100).all(|_| trial(&mut yielding, true)));
        trial(&mut yielding, false);
        let tried = (0..10 * STREAKS_PER_TRIAL).filter(|_| trial(&mut yielding, false)).count();
        assert_eq!(tried, 10, "only trials yield now");
        // One trial that pays brings the trust back.
        while !trial(&mut yielding, true) {}
        assert!(trial(&mut yielding, true));
    }
}
