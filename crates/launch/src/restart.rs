//! Decides what happens when a process of a rank that may be restarted has ended: another
//! incarnation, or the end of the rank. The module is pure.
//!
//! In: how the process ended, how far the process had come with its process manager, the records of
//! earlier incarnations, and the limits. Out: a [`Decision`]; and, for the user, the history of a
//! rank that is given up ([`give_up_text`]).
//!
//! | how the process ended | what follows |
//! |---|---|
//! | exit code, after MPI_Finalize or without any use of MPI | the end: the program's own choice |
//! | exit code 0 without MPI_Finalize | the end; see `watch` for what follows for the job |
//! | the provider's notice that it cannot go on | the end: every incarnation would do the same |
//! | the provider's notice that its relay is lost | a restart, unless a row below holds |
//! | signal, or other exit code without MPI_Finalize | a restart, unless a row below holds |
//! | … [`SAME_POINT_MAX`] times running at the same point, in the same way | the end |
//! | … [`RestartLimits::restarts_max`] restarts within [`RestartLimits::within_s`] | the end |
//!
//! The *point* is the number of requests to the process manager, of bytes printed, and of polls for
//! messages. A program that computes without requests, output and polls stays at the same point, so
//! a signal from outside (SIGKILL and similar signals) says nothing about the point.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ending::Ending;
use crate::pmi::server::Stage;
use crate::ps::rank_table::words;

/// Exit codes with which our libraries end a process; the last line that the process prints says
/// why. EXIT_UNRECOVERABLE: the process does something that cannot be recorded, or something else
/// than an earlier incarnation did. EXIT_UPLINK_LOST: the connection to the relay is lost.
pub use landbridge_proto::id::{EXIT_UNRECOVERABLE, EXIT_UPLINK_LOST};

/// Number of ends at the same point, in the same way and in a row, after which the rank is given
/// up, because every further incarnation would end there as well.
pub const SAME_POINT_MAX: usize = 3;
/// Incarnations that [`give_up_text`] lists at most, the last ones.
const LISTED_MAX: usize = 20;

/// Minimum time without progress after which a new incarnation hangs.
pub const HANG_MIN: Duration = Duration::from_secs(60);

/// Whether a new incarnation hangs after it has made no progress for `still`: longer than
/// [`HANG_MIN`] and than twice `lived`. `lived` is the time that all earlier incarnations have
/// lived. A new incarnation has to repeat no more than the earlier incarnations did, and is faster.
pub fn hangs(still: Duration, lived: Duration) -> bool {
    still > HANG_MIN.max(lived.saturating_mul(2))
}

/// Limits on restarts that the user has set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartLimits {
    /// Restarts of a rank within [`RestartLimits::within_s`] at most.
    pub restarts_max: u32,
    /// Period in seconds in which restarts count.
    pub within_s: u64,
}

impl Default for RestartLimits {
    /// 20 restarts within 600 s: a rank that lives for half a minute on average makes progress; a
    /// rank that lives shorter hardly does.
    fn default() -> RestartLimits {
        RestartLimits { restarts_max: 20, within_s: 600 }
    }
}

/// How far a process has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgressPoint {
    /// Requests to the process manager.
    pub asked: usize,
    /// Bytes printed on standard output and standard error.
    pub printed: u64,
    /// Polls for messages; 0 where polls are not counted.
    pub polls: u64,
}

/// One process (incarnation) of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncarnationRecord {
    /// Time of the start, counted from the start of the first incarnation.
    pub began: Duration,
    pub lasted: Duration,
    pub ending: Ending,
    pub stage: Stage,
    /// The process has reported that it cannot go on.
    pub has_fatal_notice: bool,
    /// The process was ended because another one of its recovery unit was to begin again.
    pub has_gone_back: bool,
    pub point: ProgressPoint,
}

impl IncarnationRecord {
    /// Whether the process ended because its connection to a relay on another node broke.
    pub fn has_lost_relay(&self) -> bool {
        self.has_fatal_notice && self.ending == Ending::Exited(EXIT_UPLINK_LOST)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    Restart,
    /// The process has ended by itself, or its end needs no action here.
    Ended,
    GiveUp(GiveUpReason),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GiveUpReason {
    Unrecoverable,
    RelayLost,
    SamePoint,
    TooManyRestarts,
}

/// Decides what follows the end of the last of `incarnations`, which are all processes of the rank
/// in order of their starts.
pub fn decide(incarnations: &[IncarnationRecord], limits: RestartLimits) -> Decision {
    let Some(last) = incarnations.last() else { return Decision::Ended };
    // A program that has worked before and now fails to begin lacks something for a moment.
    let has_joined = incarnations.iter().any(|incarnation| incarnation.stage != Stage::Silent);
    match (last.ending, last.stage) {
        (Ending::Exited(EXIT_UNRECOVERABLE), _) if last.has_fatal_notice => {
            return Decision::GiveUp(GiveUpReason::Unrecoverable);
        }
        _ if last.has_lost_relay() => {}
        (Ending::Exited(0), _) => return Decision::Ended,
        (Ending::Exited(_), Stage::Silent) if !has_joined => return Decision::Ended,
        (Ending::Exited(_), Stage::Finalized) => return Decision::Ended,
        (Ending::Exited(_), Stage::Silent | Stage::Joined) | (Ending::Killed(_), _) => {}
    }
    let alike =
        incarnations.iter().rev().take_while(|incarnation| is_same_point(incarnation, last));
    if alike.count() >= SAME_POINT_MAX {
        return Decision::GiveUp(if last.has_lost_relay() {
            GiveUpReason::RelayLost
        } else {
            GiveUpReason::SamePoint
        });
    }
    // Every incarnation in this slice but the last has been followed by a restart.
    let end = |incarnation: &IncarnationRecord| incarnation.began + incarnation.lasted;
    let since = end(last).saturating_sub(Duration::from_secs(limits.within_s));
    let recent = incarnations[..incarnations.len() - 1]
        .iter()
        .rev()
        .take_while(|incarnation| end(incarnation) >= since)
        .filter(|incarnation| !incarnation.has_gone_back);
    if recent.count() >= limits.restarts_max as usize {
        return Decision::GiveUp(GiveUpReason::TooManyRestarts);
    }
    Decision::Restart
}

fn is_same_point(one: &IncarnationRecord, other: &IncarnationRecord) -> bool {
    is_program_fault(one.ending) && (one.ending, one.point) == (other.ending, other.point)
}

/// Whether the ending is caused by the program itself, and not by a signal from outside.
pub fn is_program_fault(ending: Ending) -> bool {
    let own =
        [libc::SIGSEGV, libc::SIGBUS, libc::SIGABRT, libc::SIGFPE, libc::SIGILL, libc::SIGSYS];
    match ending {
        Ending::Exited(_) => true,
        Ending::Killed(signal) => own.contains(&signal) || signal == libc::SIGTRAP,
    }
}

/// The text that the user reads about a rank that is given up: the reason, and the last
/// incarnations.
pub fn give_up_text(
    rank: u32,
    incarnations: &[IncarnationRecord],
    limits: RestartLimits,
    why: &GiveUpReason,
) -> String {
    let Some(last) = incarnations.last() else { return String::new() };
    let how = words(last.ending);
    let RestartLimits { restarts_max, within_s } = limits;
    let mut text = match why {
        GiveUpReason::Unrecoverable => {
            format!("rank {rank} cannot be restarted: a line above says why")
        }
        GiveUpReason::SamePoint => format!(
            "rank {rank} is not restarted: it has ended at the same place {SAME_POINT_MAX} times \
             ({how}, {}), which is a fault of the program",
            point(&last.point)
        ),
        GiveUpReason::RelayLost => format!(
            "rank {rank} is not restarted: it has lost the connection to its relay \
             {SAME_POINT_MAX} times at the same place ({})",
            point(&last.point)
        ),
        GiveUpReason::TooManyRestarts if restarts_max == 0 => {
            format!("rank {rank} is not restarted ({how}): --max-restarts is 0")
        }
        GiveUpReason::TooManyRestarts => format!(
            "rank {rank} is not restarted ({how}): it has been {restarts_max} times within \
             {within_s} s (--max-restarts, --max-restarts-within)"
        ),
    };
    let first_listed = incarnations.len().saturating_sub(LISTED_MAX);
    if first_listed > 0 {
        text += &format!("\n  {first_listed} earlier incarnations");
    }
    for (number, incarnation) in incarnations.iter().enumerate().skip(first_listed) {
        let [began, lasted] =
            [incarnation.began, incarnation.lasted].map(|time| time.as_secs_f64());
        let (how, point) = (words(incarnation.ending), point(&incarnation.point));
        text += &format!(
            "\n  incarnation {number}: after {began:.1} s, for {lasted:.1} s: {how}, {point}"
        );
    }
    text
}

fn point(point: &ProgressPoint) -> String {
    let ProgressPoint { asked, printed, polls } = point;
    let polls_text = if *polls > 0 { format!(", {polls} polls") } else { String::new() };
    format!("{printed} bytes printed, {asked} PMI requests{polls_text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RestartLimits = RestartLimits { restarts_max: 4, within_s: 60 };
    const SEGV: Ending = Ending::Killed(libc::SIGSEGV);
    const KILL: Ending = Ending::Killed(libc::SIGKILL);

    /// An incarnation that began `began` seconds after the first one and lived for one second.
    fn incarnation(began: u64, ending: Ending, printed: u64) -> IncarnationRecord {
        IncarnationRecord {
            began: Duration::from_secs(began),
            lasted: Duration::from_secs(1),
            ending,
            stage: Stage::Joined,
            has_fatal_notice: false,
            has_gone_back: false,
            point: ProgressPoint { asked: 3, printed, polls: 7 },
        }
    }

    #[test]
    fn what_follows_from_the_way_in_which_it_ended() {
        let over = Decision::Ended;
        let restarted = Decision::Restart;
        let rows = [
            (Ending::Exited(0), Stage::Finalized, &over),
            (Ending::Exited(0), Stage::Joined, &over),
            (Ending::Exited(0), Stage::Silent, &over),
            (Ending::Exited(3), Stage::Finalized, &over),
            (Ending::Exited(3), Stage::Silent, &over),
            (Ending::Exited(3), Stage::Joined, &restarted),
            (KILL, Stage::Silent, &restarted),
            (KILL, Stage::Joined, &restarted),
            (KILL, Stage::Finalized, &restarted),
            (Ending::Killed(libc::SIGTERM), Stage::Joined, &restarted),
            (SEGV, Stage::Joined, &restarted),
        ];
        for (ending, stage, expected) in rows {
            let one = IncarnationRecord { stage, ..incarnation(0, ending, 0) };
            assert_eq!(decide(&[one], LIMITS), *expected, "{ending:?} {stage:?}");
        }
        // A program may end with any code by its own choice.
        let own = incarnation(0, Ending::Exited(EXIT_UNRECOVERABLE), 0);
        assert_eq!(decide(&[own], LIMITS), restarted);
        assert_eq!(decide(&[IncarnationRecord { stage: Stage::Finalized, ..own }], LIMITS), over);
        let cannot = IncarnationRecord { has_fatal_notice: true, ..own };
        assert_eq!(decide(&[cannot], LIMITS), Decision::GiveUp(GiveUpReason::Unrecoverable));
        assert_eq!(decide(&[], LIMITS), over);
        let early =
            IncarnationRecord { stage: Stage::Silent, ..incarnation(9, Ending::Exited(3), 0) };
        assert_eq!(decide(&[incarnation(0, KILL, 5), early], LIMITS), restarted);
        let cut = incarnation(0, Ending::Exited(EXIT_UPLINK_LOST), 0);
        assert_eq!(
            decide(&[IncarnationRecord { stage: Stage::Silent, ..cut }], LIMITS),
            over,
            "its own code"
        );
        let cut = IncarnationRecord { has_fatal_notice: true, stage: Stage::Silent, ..cut };
        assert_eq!(decide(&[cut; 2], LIMITS), restarted);
        assert_eq!(decide(&[cut; 3], LIMITS), Decision::GiveUp(GiveUpReason::RelayLost));
    }

    #[test]
    fn three_ends_at_one_place_are_the_programs_fault() {
        let again = |endings: &[(Ending, u64)]| {
            let incarnations =
                endings.iter().zip(0..).map(|(&(how, printed), at)| incarnation(at, how, printed));
            decide(&incarnations.collect::<Vec<_>>(), LIMITS)
        };
        let rows: [(&[(Ending, u64)], Decision); 9] = [
            (&[(SEGV, 5), (SEGV, 5)], Decision::Restart),
            (&[(SEGV, 5), (SEGV, 5), (SEGV, 5)], Decision::GiveUp(GiveUpReason::SamePoint)),
            (&[(SEGV, 5), (SEGV, 5), (SEGV, 6)], Decision::Restart),
            (&[(SEGV, 5), (Ending::Killed(6), 5), (SEGV, 5)], Decision::Restart),
            // A SIGKILL in between restarts the count.
            (&[(SEGV, 5), (SEGV, 5), (KILL, 2), (SEGV, 5)], Decision::Restart),
            (
                &[(KILL, 2), (SEGV, 5), (SEGV, 5), (SEGV, 5)],
                Decision::GiveUp(GiveUpReason::SamePoint),
            ),
            (&[(Ending::Exited(3), 5); 3], Decision::GiveUp(GiveUpReason::SamePoint)),
            // SIGKILL at the same point says nothing about the program.
            (&[(KILL, 5); 3], Decision::Restart),
            (&[(Ending::Killed(libc::SIGTERM), 5); 3], Decision::Restart),
        ];
        for (endings, expected) in rows {
            assert_eq!(again(endings), expected, "{endings:?}");
        }
    }

    #[test]
    fn polls_distinguish_progress_where_nothing_is_printed() {
        let at = |polls: u64| {
            let one = incarnation(polls, SEGV, 0);
            IncarnationRecord { point: ProgressPoint { polls, ..one.point }, ..one }
        };
        assert_eq!(decide(&[at(1), at(2), at(3)], LIMITS), Decision::Restart);
        assert_eq!(
            decide(&[at(2), at(2), at(2)], LIMITS),
            Decision::GiveUp(GiveUpReason::SamePoint)
        );
    }

    #[test]
    fn so_many_restarts_within_a_time_and_no_more() {
        let at = |times: &[u64]| {
            let incarnations: Vec<IncarnationRecord> =
                times.iter().map(|&began| incarnation(began, KILL, 0)).collect();
            decide(&incarnations, LIMITS)
        };
        assert_eq!(at(&[0, 1, 2, 3]), Decision::Restart);
        assert_eq!(at(&[0, 1, 2, 3, 4]), Decision::GiveUp(GiveUpReason::TooManyRestarts));
        assert_eq!(
            at(&[0, 1, 2, 3, 60]),
            Decision::GiveUp(GiveUpReason::TooManyRestarts),
            "just within"
        );
        assert_eq!(at(&[0, 1, 2, 3, 61]), Decision::Restart, "the first is long ago");
        let none = RestartLimits { restarts_max: 0, ..LIMITS };
        assert_eq!(
            decide(&[incarnation(0, KILL, 0)], none),
            Decision::GiveUp(GiveUpReason::TooManyRestarts)
        );
    }

    #[test]
    fn the_incarnations_of_a_rank_that_is_given_up_are_listed() {
        let incarnations = [incarnation(0, KILL, 0), incarnation(2, SEGV, 5)];
        let text = give_up_text(3, &incarnations, LIMITS, &GiveUpReason::TooManyRestarts);
        let expected = "rank 3 is not restarted (SIGSEGV): it has been 4 times within 60 s \
                        (--max-restarts, --max-restarts-within)\n  incarnation 0: after 0.0 s, for \
                        1.0 s: SIGKILL, 0 bytes printed, 3 PMI requests, 7 polls\n  incarnation \
                        1: after 2.0 s, for 1.0 s: SIGSEGV, 5 bytes printed, 3 PMI requests, 7 \
                        polls";
        assert_eq!(text, expected);
        let many: Vec<IncarnationRecord> =
            (0..30).map(|began| incarnation(began, KILL, 0)).collect();
        let text = give_up_text(3, &many, LIMITS, &GiveUpReason::SamePoint);
        assert!(
            text.contains("a fault of the program") && text.contains("10 earlier incarnations")
        );
        assert_eq!(text.lines().count(), 2 + LISTED_MAX);
    }

    #[test]
    fn who_does_nothing_for_longer_than_it_ever_lived_hangs() {
        let seconds = Duration::from_secs;
        assert!(!hangs(seconds(60), seconds(1)) && hangs(seconds(61), seconds(30)));
        assert!(!hangs(seconds(199), seconds(100)) && hangs(seconds(201), seconds(100)));
        assert!(!hangs(Duration::MAX, Duration::MAX));
    }
}
