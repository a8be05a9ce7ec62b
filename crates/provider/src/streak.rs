//! Whether polls without result of one thread form a waiting loop.
//!
//! What enters: the gaps between polls and the sleeps of a thread, with the time of each. What
//! leaves: whether a gap is an interruption of the loop, and whether the thread has computed
//! between its polls.
//! What may never happen: a program that computes between its polls counts as waiting.

use std::time::Duration;

use crate::tick_clock::Clock;

/// Polls that are further apart than this do not belong to the same waiting loop.
pub const GAP_MICROS: u64 = 20;
/// A gap is an interruption of a waiting loop if the loop has polled for this many times as long
/// since the previous gap or sleep, or has slept this many times for each gap; and if the gap is no
/// longer than [`INTERRUPTION_MICROS_MAX`].
const WAITING_PER_INTERRUPTION: u64 = 8;
/// Largest number of sleeps that count: a program that begins to compute after a long waiting loop
/// sleeps three times at most before it counts as computing.
const COUNTED_SLEEPS: u64 = 3 * WAITING_PER_INTERRUPTION;
/// Shortest such polling: a program that does something else more often is no waiting loop.
const WAITING_MICROS_MIN: u64 = 800;
/// Longest gap that counts as an interruption.
const INTERRUPTION_MICROS_MAX: u64 = 200;

/// A waiting loop since its last event. Times are in ticks of the clock.
pub struct Streak {
    pub since: u64,
    /// End of the last gap or sleep.
    undisturbed_since: u64,
    /// Sleeps that no gap has used up.
    sleeps: u64,
    pub polls: u32,
    watch: Option<ProcessorTimeSample>,
}

impl Streak {
    /// A streak that begins now.
    pub fn begin(now: u64) -> Self {
        Self { since: now, undisturbed_since: now, sleeps: 0, polls: 0, watch: None }
    }

    /// Records so many microseconds between two polls, which end now.
    #[inline]
    pub fn note_gap(&mut self, micros: u64, now: u64) {
        if micros > GAP_MICROS {
            self.undisturbed_since = now;
            self.sleeps = self.sleeps.saturating_sub(WAITING_PER_INTERRUPTION);
            self.note_in_sample(micros);
        }
    }

    /// Records a sleep that ends now. A sleep is no polling.
    #[inline]
    pub fn note_sleep(&mut self, now: u64) {
        self.sleeps = COUNTED_SLEEPS.min(self.sleeps + 1);
        self.undisturbed_since = now;
    }

    /// Records that a sleep or yield took so many microseconds. A yield, however long, is no sign
    /// that the program computes.
    #[inline]
    pub fn note_rest(&mut self, micros: u64) {
        if micros > GAP_MICROS {
            self.note_in_sample(micros);
        }
    }

    /// Takes a sample of the processor time, with which [`Self::has_computed`] compares.
    pub fn begin_sample(&mut self, now: u64) {
        self.watch = Some(ProcessorTimeSample::begin(now));
    }

    fn note_in_sample(&mut self, micros: u64) {
        if let Some(watch) = &mut self.watch {
            watch.gaps += 1;
            watch.gap_micros += micros;
        }
    }

    /// Whether this gap, which ends now, is an interruption of the loop: neither long nor frequent.
    pub fn is_interruption(&self, micros: u64, now: u64, clock: Clock) -> bool {
        let polled = clock.micros(now.wrapping_sub(self.undisturbed_since)).saturating_sub(micros);
        let has_waited = polled >= WAITING_MICROS_MIN.max(WAITING_PER_INTERRUPTION * micros)
            || self.sleeps >= WAITING_PER_INTERRUPTION;
        micros <= INTERRUPTION_MICROS_MAX && has_waited
    }

    /// Whether the thread has computed between polls since the previous call of this function.
    #[cold]
    pub fn has_computed(&mut self, now: u64, clock: Clock) -> bool {
        let next = ProcessorTimeSample::begin(now);
        self.watch.replace(next).is_none_or(|watch| watch.has_seen_computing(&next, clock))
    }
}

/// A sample of a thread's processor time. Two samples distinguish a loop that waits while other
/// threads use its processor from a program that computes between its polls. Reading the processor
/// time is a system call, so the policy takes a sample now and then, not at every gap.
#[derive(Clone, Copy)]
struct ProcessorTimeSample {
    since: u64,
    processor_time: Duration,
    /// Number of gaps between polls since the sample.
    gaps: u32,
    /// Total length of these gaps, in microseconds.
    gap_micros: u64,
}

impl ProcessorTimeSample {
    #[cold]
    fn begin(now: u64) -> Self {
        Self { since: now, processor_time: processor_time(), gaps: 0, gap_micros: 0 }
    }

    /// Whether the thread has used the processor during gaps before `next`, for longer than looking
    /// at the network takes.
    fn has_seen_computing(&self, next: &Self, clock: Clock) -> bool {
        let wall = clock.micros(next.since.wrapping_sub(self.since));
        let polling = wall.saturating_sub(self.gap_micros);
        let used = next.processor_time.saturating_sub(self.processor_time);
        used > Duration::from_micros(polling + (u64::from(self.gaps) + 1) * GAP_MICROS)
    }
}

/// Processor time that this thread has used.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
