//! Decides what a thread of the program does after polls without result.
//!
//! What enters: each poll of any endpoint by this thread, whether the poll brought something, and
//! the time. What leaves: advice to go on, to yield the processor, or to park until something
//! arrives. This module neither sleeps nor touches the network.
//!
//! MPI libraries poll in a loop until a message arrives. While a message may arrive soon, a poll
//! returns at once. When a loop has run without result for longer than a message takes, the
//! processor is better used by the process that sends the message.
//!
//! A waiting loop belongs to a thread, not to an endpoint. A library with several endpoints polls
//! the endpoints in turn, and an event of any endpoint ends the waiting of the thread.
//!
//! What may never happen: a program that computes between polls sleeps. Only polls that follow each
//! other without a gap form a streak, and only a long streak parks. A gap of at most 200
//! microseconds after 800 of polls counts as an interruption and not as computing: the timer of a
//! virtual machine may take 50 microseconds a millisecond. The time that a poll itself takes is no
//! gap: the first poll after a sleep takes 20 microseconds where memory is slow to come back. Where
//! the MPI library carries messages inside a node, no streak parks: the message that ends the
//! waiting may be one that the provider never sees.

use std::cell::RefCell;
use std::os::fd::RawFd;

use crate::cpu_placement::CpuPlacement;
use crate::streak::{GAP_MICROS, Streak};
use crate::tick_clock::Clock;

/// Time that a loop with a processor of its own spins before its polls park: longer than most
/// messages take, and too short to be noticed by a user.
const SPIN_MICROS: u64 = 2_000;
/// Time of pure spinning. After this time every poll yields the processor, since more processes may
/// run on this node than the launcher counted.
const PURE_SPIN_MICROS: u64 = 10;
/// Time that a loop on a shared processor yields before its polls park, while yielding is cheap.
const YIELD_MICROS: u64 = 2_000;
/// A yield that takes longer than this gave the processor to a computing thread for a scheduler
/// slice: yielding is not cheap. Threads that only wait return the processor within microseconds.
const SLICE_MICROS: u64 = 1000;
/// While yielding is considered expensive, one of this many streaks yields all the same, to find
/// out whether yielding has become cheap.
const STREAKS_PER_TRIAL: u32 = 32;
/// Polls of a loop on a shared processor before the loop yields or parks for the first time: a few
/// microseconds.
const POLLS_MIN: u32 = 16;
/// Number of the poll in a streak from which on the thread's processor time is measured.
const POLLS_UNSAMPLED: u32 = 8;
/// Time during which polls neither park nor yield after another thread has wanted the endpoint: the
/// other thread will soon want the endpoint again.
const CONTENDED_MICROS: u64 = 1_000;

/// Advice to a thread after a poll without result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// The poll returns at once.
    GoOn,
    /// The thread yields the processor, then returns.
    Yield,
    /// The thread sleeps until something arrives.
    Park,
}

/// Load on the processors at the time of a poll without result.
#[derive(Clone, Copy)]
pub struct PollContext {
    /// No other thread wants this processor, as far as is known.
    pub has_own_processor: bool,
    /// A relay of this node must run before anything can arrive.
    pub waits_for_relay: bool,
    /// The awaited message may be one that the MPI library carries, which ends no streak here.
    pub library_carries_local: bool,
    /// The program has done something other than polling since its last poll.
    pub has_posted: bool,
    /// Time that this poll has taken, in ticks of the clock; 0 where nobody has measured it, which
    /// counts the poll as part of the gap before it.
    pub poll_ticks: u64,
}

/// The waiting loop of one thread.
pub struct PollPolicy {
    clock: Clock,
    /// The current run of consecutive polls without result.
    streak: Option<Streak>,
    last_poll: u64,
    /// Time until which this thread does not sleep, because another thread wanted an endpoint in
    /// which this thread slept.
    contended_until: u64,
    /// Descriptor of the endpoint that brought the last event.
    most_recent: Option<RawFd>,
    non_waiting: NonWaitingPolls,
    yielding: YieldPolicy,
    placement: CpuPlacement,
}

/// Polls without result of a program that acts between its polls.
#[derive(Default)]
struct NonWaitingPolls {
    polls: u32,
    /// Time of the last yield, in ticks of the clock.
    last_yield: u64,
}

thread_local! {
    static MINE: RefCell<Option<PollPolicy>> = const { RefCell::new(None) };
}

impl PollPolicy {
    /// Calls `body` with the policy of this thread. Returns `None` while the thread is being
    /// destroyed, and for a nested call.
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

    /// Records that a poll of the endpoint with this descriptor brought something.
    #[inline]
    pub fn note_event(&mut self, now: u64, endpoint: RawFd) {
        self.most_recent = Some(endpoint);
        self.note_gap(now);
        if self.streak.take().is_some() {
            self.yielding.note_success();
        }
        self.last_poll = now;
    }

    /// Whether no other endpoint of this thread has brought something since this endpoint did.
    #[inline]
    pub fn is_most_recent(&self, endpoint: RawFd) -> bool {
        self.most_recent.is_none_or(|most_recent| most_recent == endpoint)
    }

    /// Records a poll without result, and returns the advice for the thread.
    #[inline]
    pub fn note_nothing(&mut self, now: u64, around: PollContext) -> Advice {
        let since_last = now.wrapping_sub(self.last_poll);
        let gap = self.clock.micros(since_last.saturating_sub(around.poll_ticks));
        self.note_gap(now);
        self.last_poll = now;
        if around.has_posted {
            return self.note_posted(now, around);
        }
        // On a shared processor, another thread may have caused the gap. The processor time of this
        // thread decides later.
        let goes_on = self.streak.as_ref().is_some_and(|streak| {
            gap <= GAP_MICROS
                || !around.has_own_processor
                || streak.is_interruption(gap, now, self.clock)
        });
        let Some(streak) = self.streak.as_mut().filter(|_| goes_on) else {
            self.begin(now);
            return Advice::GoOn;
        };
        streak.polls = streak.polls.saturating_add(1);
        streak.note_gap(gap, now);
        if gap > GAP_MICROS && streak.polls < POLLS_UNSAMPLED {
            // The program may have computed before it began to wait.
            streak.since = now;
        }
        if now < self.contended_until {
            return Advice::GoOn;
        }
        let waited = self.clock.micros(now.wrapping_sub(streak.since));
        if around.library_carries_local {
            return Self::advise_beside_library(streak.polls, waited, around.has_own_processor);
        }
        match around.has_own_processor {
            true => Self::advise_exclusive(waited, around.waits_for_relay),
            false => self.advise_oversubscribed(now, waited, gap),
        }
    }

    /// Advises a program that acts between its polls. Such a program never sleeps: its operations
    /// may be local, such as operations on its own window, which the library does not pass to the
    /// provider. The program yields now and then, because it may wait in this way until another
    /// process has changed its memory. Where yielding is cheap, every [`POLLS_MIN`] polls yield
    /// once. On a shared processor where yielding is expensive, the program yields once in
    /// [`YIELD_MICROS`], the time after which a waiting loop parks for the first time.
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
        self.streak = Some(Streak::begin(now));
        self.yielding.begin();
    }

    #[inline]
    fn advise_exclusive(waited: u64, waits_for_relay: bool) -> Advice {
        if waited >= SPIN_MICROS {
            Advice::Park
        } else if waits_for_relay || waited > PURE_SPIN_MICROS {
            // A relay of this node needs a processor to deliver what this thread waits for.
            Advice::Yield
        } else {
            Advice::GoOn
        }
    }

    /// Advises a loop whose message the library may carry. On a shared processor every poll yields,
    /// because the sender may need the processor. Otherwise one poll of [`POLLS_MIN`] yields, for
    /// processes that the launcher did not count, such as relays.
    #[inline]
    fn advise_beside_library(polls: u32, waited: u64, has_own_processor: bool) -> Advice {
        let is_due = !has_own_processor || polls.is_multiple_of(POLLS_MIN);
        if is_due && waited > PURE_SPIN_MICROS { Advice::Yield } else { Advice::GoOn }
    }

    fn advise_oversubscribed(&mut self, now: u64, waited: u64, gap: u64) -> Advice {
        let Some(streak) = &mut self.streak else { return Advice::GoOn };
        if streak.polls == POLLS_UNSAMPLED {
            streak.begin_sample(now);
        }
        if streak.polls < POLLS_MIN {
            // A few polls between other work are not a waiting loop.
            return Advice::GoOn;
        }
        if gap > SLICE_MICROS {
            self.yielding.note_failure();
        }
        let yields = self.yielding.is_on && waited < YIELD_MICROS;
        // This check runs before the first yield of a loop, and before each sleep.
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

    /// Records that the thread has followed the advice at time `now`. The time that the advice took
    /// is not a gap between polls.
    #[inline]
    pub fn note_advice_taken(&mut self, advice: Advice, now: u64) {
        let took = self.clock.micros(now.wrapping_sub(self.last_poll));
        if let Some(streak) = &mut self.streak {
            streak.note_rest(took);
            if advice == Advice::Park {
                streak.note_sleep(now);
            }
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

    /// Whether the thread should move to another processor; see [`CpuPlacement`]. Returns true once
    /// for each recommended move.
    #[inline]
    pub fn should_move(&mut self) -> bool {
        self.placement.should_move()
    }

    /// Reports the time between two polls without result to the placement: the library may have
    /// yielded the processor between the polls.
    #[inline]
    fn note_gap(&mut self, now: u64) {
        if self.streak.is_some() {
            self.placement.note_gap(now.wrapping_sub(self.last_poll), now);
        }
    }

    /// Forgets the closed endpoint with this descriptor.
    pub fn forget(&mut self, endpoint: RawFd) {
        self.most_recent = self.most_recent.filter(|&most_recent| most_recent != endpoint);
    }

    /// Identifies this thread among the threads of the process; never 0.
    pub fn token(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Records that another thread wants an endpoint in which this thread slept.
    pub fn note_contended(&mut self) {
        self.contended_until = self.clock.now() + CONTENDED_MICROS * self.clock.ticks_per_micro;
    }
}

/// Whether yielding brings the awaited message, or only passes the processor around among waiting
/// processes. In the second case each of them pays for a scheduler slice, a thousand times the cost
/// of parking.
struct YieldPolicy {
    is_effective: bool,
    streaks: u32,
    /// The current streak may yield.
    is_on: bool,
    /// The current streak has yielded.
    has_yielded: bool,
}

impl YieldPolicy {
    /// Begins a streak.
    fn begin(&mut self) {
        self.streaks = self.streaks.wrapping_add(1);
        self.is_on = self.is_effective || self.streaks.is_multiple_of(STREAKS_PER_TRIAL);
        self.has_yielded = false;
    }

    fn note_yield(&mut self) {
        self.has_yielded = true;
    }

    /// The awaited event came while the streak yielded.
    fn note_success(&mut self) {
        self.is_effective |= std::mem::take(&mut self.is_on) && self.has_yielded;
    }

    /// A yield took a scheduler slice. One such yield costs as much as a hundred cheap yields can
    /// save.
    fn note_failure(&mut self) {
        if std::mem::take(&mut self.is_on) {
            self.is_effective = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    const CLOCK: Clock = Clock { ticks_per_micro: 1 };
    const ALONE: PollContext = PollContext {
        has_own_processor: true,
        waits_for_relay: false,
        library_carries_local: false,
        has_posted: false,
        poll_ticks: 0,
    };
    const CROWD: PollContext = PollContext { has_own_processor: false, ..ALONE };

    /// Advice for `count` polls without result, one per microsecond, from microsecond `from` on.
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
    fn a_loop_that_may_wait_for_the_library_never_parks() {
        let with_library = PollContext { library_carries_local: true, ..ALONE };
        let with_relay = PollContext { waits_for_relay: true, ..with_library };
        let shared = PollContext { has_own_processor: false, ..with_library };
        let count = 3 * SPIN_MICROS;
        for (around, one_in) in [(with_library, POLLS_MIN), (with_relay, POLLS_MIN), (shared, 1)] {
            let advice = poll(&mut PollPolicy::new(CLOCK), 100, count, around);
            assert!(!advice.contains(&Advice::Park), "one in {one_in}");
            let yields = advice.iter().filter(|&&a| a == Advice::Yield).count() as u64;
            let wanted = (count - PURE_SPIN_MICROS) / u64::from(one_in);
            assert!(yields.abs_diff(wanted) <= 2, "{yields} yields, wanted {wanted}");
        }
    }

    #[test]
    fn a_program_that_acts_between_polls_never_parks() {
        for around in [ALONE, CROWD, PollContext { waits_for_relay: true, ..ALONE }] {
            let mut policy = PollPolicy::new(CLOCK);
            // Each turn is an operation and more than one poll, and the turns last longer than any
            // loop spins or yields.
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
    fn a_slow_poll_after_a_sleep_is_not_taken_for_computing_and_computing_after_a_sleep_is() {
        let slow = 3 * GAP_MICROS;
        for (poll_ticks, wanted) in [(slow - 1, Advice::Park), (1, Advice::GoOn)] {
            let mut policy = PollPolicy::new(CLOCK);
            let mut now = 100 + SPIN_MICROS;
            assert_eq!(poll(&mut policy, 100, SPIN_MICROS + 1, ALONE).pop(), Some(Advice::Park));
            for _ in 0..5 {
                now += 1_000;
                policy.note_advice_taken(Advice::Park, now);
                now += slow;
                let advice = policy.note_nothing(now, PollContext { poll_ticks, ..ALONE });
                assert_eq!(advice, wanted);
            }
        }
    }

    #[test]
    fn an_interruption_after_a_long_yield_does_not_end_the_waiting() {
        let mut policy = PollPolicy::new(CLOCK);
        poll(&mut policy, 100, 1_000, ALONE);
        policy.note_advice_taken(Advice::Yield, 1_150);
        assert_eq!(policy.note_nothing(1_200, ALONE), Advice::Yield);
        assert_eq!(poll(&mut policy, 1_201, 900, ALONE).pop(), Some(Advice::Park));
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

    /// Advice for polls each microsecond that are interrupted for `gap` after each `polled`
    /// microseconds. An interruption during a sleep, of a millisecond, is not seen.
    fn interrupted(polled: u64, gap: u64) -> Vec<Advice> {
        let mut policy = PollPolicy::new(CLOCK);
        let (mut now, mut interruption, mut advice) = (100, 100 + polled, Vec::new());
        for _ in 0..20 * SPIN_MICROS {
            now += 1;
            if now >= interruption {
                now += gap;
                interruption = now + polled;
            }
            let given = policy.note_nothing(now, ALONE);
            if given == Advice::Park {
                now += 1_000;
                interruption = interruption.max(now + 2);
            }
            policy.note_advice_taken(given, now);
            advice.push(given);
        }
        advice
    }

    #[test]
    fn a_waiting_loop_that_a_timer_interrupts_parks_as_soon_as_without() {
        let advice = interrupted(950, 50);
        let first = advice.iter().position(|&a| a == Advice::Park).unwrap() as u64;
        assert!(first <= SPIN_MICROS, "after {first} polls");
    }

    #[test]
    fn a_loop_that_has_slept_for_long_sleeps_again_after_interruptions_and_not_after_many() {
        for (sleeps, tolerated) in [(0, 0), (7, 0), (8, 1), (16, 2), (24, 3), (100, 3)] {
            let mut policy = PollPolicy::new(CLOCK);
            let mut now = 100 + SPIN_MICROS;
            assert_eq!(poll(&mut policy, 100, SPIN_MICROS + 1, ALONE).pop(), Some(Advice::Park));
            let mut after_sleep = |gap| {
                now += 1_000;
                policy.note_advice_taken(Advice::Park, now);
                now += gap;
                policy.note_nothing(now, ALONE)
            };
            assert!((1..sleeps).all(|_| after_sleep(1) == Advice::Park));
            let interrupted: Vec<_> = (0..5).map(|_| after_sleep(50)).collect();
            let first = interrupted.iter().position(|&advice| advice == Advice::GoOn);
            assert_eq!(first, Some(tolerated), "after {sleeps} sleeps: {interrupted:?}");
        }
    }

    #[test]
    fn a_program_that_polls_for_longer_than_it_computes_does_not_park() {
        for (polled, gap) in [(100, 25), (300, 30), (500, 100), (1_000, 210), (1_900, 1_000)] {
            let advice = interrupted(polled, gap);
            assert!(!advice.contains(&Advice::Park), "{gap} us after {polled} us of polls");
        }
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
        // Returns the number of polls before the first park, and the number of yields among these
        // polls.
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
        // A single successful trial makes yielding effective again.
        while !trial(&mut yielding, true) {}
        assert!(trial(&mut yielding, true));
    }
}
