//! Places the waiting thread of each process of a node on a processor of its own.
//!
//! Schedulers place a thread that wakes up near the thread that woke it, and leave two threads that
//! yield to each other on one processor although another processor is idle. Messages between such
//! threads take two to four times as long, for seconds. The processes of a job have numbers, so
//! each process can move to a processor of its own without negotiation.
//!
//! What enters: the time between the polls of a waiting thread. What leaves: nothing; the thread
//! continues on the processor of its number, and its affinity stays as it was. What may never
//! happen: a thread is bound to a processor, or is moved over and over to a processor that it has
//! to share: every move that did not last makes the pause before the next move longer.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// A longer time between two polls, in microseconds, went to other threads or to the program.
const AWAY_MICROS: u64 = 3;
/// Waiting time that is evaluated together.
const WINDOW_MICROS: u64 = 2_000;
/// First pause between two moves.
const PAUSE_MICROS: u64 = 10_000;
/// Longest pause between two moves.
const PAUSE_MICROS_MAX: u64 = 10_000_000;

/// What a thread knows about having a processor of its own. Times are in microseconds, except the
/// times of polls, which are in ticks of the clock.
pub struct CpuPlacement {
    ticks_per_micro: u64,
    /// Waiting time during which the thread had the processor, in ticks.
    polled: u64,
    /// Waiting time during which the thread did not have the processor, in ticks.
    away: u64,
    should_move: bool,
    /// Time before which the thread does not move, in microseconds.
    not_before: u64,
    pause: u64,
}

impl CpuPlacement {
    pub const fn new(ticks_per_micro: u64) -> Self {
        Self {
            ticks_per_micro,
            polled: 0,
            away: 0,
            should_move: false,
            not_before: 0,
            pause: PAUSE_MICROS,
        }
    }

    /// Records a poll without result: the thread had its processor back `ticks` later.
    #[inline]
    pub fn note_gap(&mut self, ticks: u64, now: u64) {
        if ticks < AWAY_MICROS * self.ticks_per_micro {
            self.polled += ticks;
        } else {
            self.away += ticks;
        }
        if self.polled + self.away > WINDOW_MICROS * self.ticks_per_micro {
            let is_shared = self.away > self.polled;
            (self.polled, self.away) = (0, 0);
            if is_shared {
                self.note_sharing(now / self.ticks_per_micro);
            }
        }
    }

    /// Whether the thread should move now. Returns true once for each recommended move.
    #[inline]
    pub fn should_move(&mut self) -> bool {
        std::mem::take(&mut self.should_move)
    }

    #[cold]
    fn note_sharing(&mut self, now: u64) {
        if now < self.not_before {
            return;
        }
        let has_lasted = now - self.not_before > 10 * self.pause;
        self.pause = if has_lasted { PAUSE_MICROS } else { (self.pause * 2).min(PAUSE_MICROS_MAX) };
        self.not_before = now + self.pause;
        self.should_move = true;
    }
}

/// Moves this thread to the processor of process `index`, among the processors of its affinity.
/// Returns false if the thread was there already, or stays where it is.
#[cold]
pub fn move_thread_to(index: u32) -> bool {
    let Ok(allowed) = sched_getaffinity(None) else { return false };
    let count = allowed.count() as usize;
    let mut places = (0..CpuSet::MAX_CPU).filter(|&place| allowed.is_set(place));
    let Some(home) = places.nth(index as usize % count.max(1)) else { return false };
    if count < 2 || sched_getcpu() == home {
        return false;
    }
    let mut only = CpuSet::new();
    only.set(home);
    sched_setaffinity(None, &only).is_ok() && sched_setaffinity(None, &allowed).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICKS: u64 = 1_000;

    fn gap(home: &mut CpuPlacement, micros: u64, now: u64) -> bool {
        home.note_gap(micros * TICKS, now * TICKS);
        home.should_move()
    }

    #[test]
    fn one_that_has_the_processor_for_most_of_the_time_keeps_it() {
        let mut home = CpuPlacement::new(TICKS);
        assert!(!(0..10_000).any(|now| gap(&mut home, AWAY_MICROS - 1, now)));
        let mut gaps = (0..10_000).map(|number| if number % 40 == 0 { 50 } else { 2 });
        assert!(!gaps.any(|micros| gap(&mut home, micros, PAUSE_MICROS)));
    }

    #[test]
    fn one_that_is_away_for_most_of_the_time_shares_it() {
        let mut home = CpuPlacement::new(TICKS);
        let mut gaps = (0..1_000).map(|number| if number % 10 == 0 { 50 } else { 2 });
        assert!(gaps.any(|micros| gap(&mut home, micros, PAUSE_MICROS)));
    }

    #[test]
    fn moves_that_do_not_last_become_rare_and_those_that_did_are_forgotten() {
        let mut home = CpuPlacement::new(TICKS);
        // One minute during which other threads always have the processor.
        let minute = 60_000_000;
        let moves = (0..minute).step_by(100).filter(|&now| gap(&mut home, 50, now)).count();
        assert!((10..20).contains(&moves), "{moves}");
        let mut moves_at = |now| (0..100).any(|_| gap(&mut home, 50, now));
        let later = minute + 20 * PAUSE_MICROS_MAX;
        assert!(moves_at(later) && !moves_at(later + 1) && moves_at(later + PAUSE_MICROS));
    }

    #[test]
    fn a_thread_goes_to_its_place_and_stays_free() {
        let before = sched_getaffinity(None).unwrap();
        let places: Vec<_> = (0..CpuSet::MAX_CPU).filter(|&place| before.is_set(place)).collect();
        for index in 0..2 * places.len() as u32 {
            let is_there = (0..100).any(|_| {
                move_thread_to(index);
                sched_getcpu() == places[index as usize % places.len()]
            });
            assert!(is_there, "{index}");
            assert_eq!(sched_getaffinity(None).unwrap(), before);
        }
    }
}
