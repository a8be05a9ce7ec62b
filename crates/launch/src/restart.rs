//! What happens when a process of a rank has ended that may come back: another start, or the end. Pure.
//!
//! In: how it ended, how far it was in talking to its process manager, what became of the starts before it, and the
//! limits. Out: a [`Decision`]; for people, the history of a rank that is given up ([`give_up_text`]).
//!
//! | how it ended | what follows |
//! |---|---|
//! | exit code, MPI_Finalize done, or never an MPI program | the end: it has left as it wanted |
//! | exit code 0 without MPI_Finalize | the end; the job's too, unless the others end as well (`watch`) |
//! | the provider's own word that it cannot go on | the end: another start would do the same |
//! | its word that it is cut off from its relay | another start, unless one of these holds |
//! | any signal; another exit code without MPI_Finalize | another start, unless one of these holds |
//! | … at the same place, in the same way, [`SAME_POINT_MAX`] times running | the end: the program's own fault |
//! | … [`RestartLimits::restarts_max`] restarts within [`RestartLimits::within`] | the end |
//!
//! The *place* is what a process has asked its process manager, printed, and how often it has looked for messages. A program
//! that computes without any of this is everywhere at the same one, so a signal from outside (SIGKILL and its like) says
//! nothing about it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::control::Ending;
use crate::pmi::server::Stage;
use crate::ps::rank_table::words;

/// A process with this exit code whose last word says so has been ended by our libraries, which have said why: what it does
/// cannot be recorded, or is not what an earlier start did.
pub use landbridge_proto::id::{EXIT_UNRECOVERABLE, EXIT_UPLINK_LOST};

/// Who ends so often at one place would do so for ever.
pub const SAME_POINT_MAX: usize = 3;
/// Starts that are told of a rank that is given up, the last ones.
const LISTED_MAX: usize = 20;

/// A new start that does nothing for so long, and for twice as long as all starts before it have lived, hangs.
pub const HANG_MIN: Duration = Duration::from_secs(60);

/// Whether a new start hangs that has not come further for this long. `lived`: how long all starts before it have lived; it has to do
/// no more than they did, and gets through that faster.
pub fn hangs(still: Duration, lived: Duration) -> bool {
    still > HANG_MIN.max(lived.saturating_mul(2))
}

/// What the user allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartLimits {
    /// New starts of a rank
    pub restarts_max: u32,
    /// in this many seconds.
    pub within_s: u64,
}

impl Default for RestartLimits {
    /// A rank that lives for half a minute on average gets on with its work; one that does not, hardly.
    fn default() -> RestartLimits {
        RestartLimits { restarts_max: 20, within_s: 600 }
    }
}

/// How far a process has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgressPoint {
    /// Questions to its process manager.
    pub asked: usize,
    /// Bytes on standard output and error.
    pub printed: u64,
    /// Looks for messages; 0 where nobody counts them.
    pub polls: u64,
}

/// One process that a rank has had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncarnationRecord {
    /// Since the first one began.
    pub began: Duration,
    pub lasted: Duration,
    pub ending: Ending,
    pub stage: Stage,
    /// It has said that it cannot go on.
    pub has_fatal_notice: bool,
    pub point: ProgressPoint,
}

impl IncarnationRecord {
    /// The connection to its relay, on another node, has broken.
    pub fn has_lost_relay(&self) -> bool {
        self.has_fatal_notice && self.ending == Ending::Exited(EXIT_UPLINK_LOST)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    Restart,
    /// It has ended as it wanted, or it is nobody's business here.
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

/// `incarnations`: all processes that the rank has had, the last of which has just ended.
pub fn decide(incarnations: &[IncarnationRecord], limits: RestartLimits) -> Decision {
    let Some(last) = incarnations.last() else { return Decision::Ended };
    match (last.ending, last.stage) {
        (Ending::Exited(EXIT_UNRECOVERABLE), _) if last.has_fatal_notice => {
            return Decision::GiveUp(GiveUpReason::Unrecoverable);
        }
        _ if last.has_lost_relay() => {}
        (Ending::Exited(0), _) => return Decision::Ended,
        (Ending::Exited(_), Stage::Silent | Stage::Finalized) => return Decision::Ended,
        (Ending::Exited(_), Stage::Joined) | (Ending::Killed(_), _) => {}
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
    // Each of these has been followed by another start, but for the last one.
    let end = |incarnation: &IncarnationRecord| incarnation.began + incarnation.lasted;
    let since = end(last).saturating_sub(Duration::from_secs(limits.within_s));
    let recent = incarnations[..incarnations.len() - 1]
        .iter()
        .rev()
        .take_while(|incarnation| end(incarnation) >= since);
    if recent.count() >= limits.restarts_max as usize {
        return Decision::GiveUp(GiveUpReason::TooManyRestarts);
    }
    Decision::Restart
}

fn is_same_point(one: &IncarnationRecord, other: &IncarnationRecord) -> bool {
    is_program_fault(one.ending) && (one.ending, one.point) == (other.ending, other.point)
}

/// Whether a process ends so by what it does, and not by what is done to it.
pub fn is_program_fault(ending: Ending) -> bool {
    let own =
        [libc::SIGSEGV, libc::SIGBUS, libc::SIGABRT, libc::SIGFPE, libc::SIGILL, libc::SIGSYS];
    match ending {
        Ending::Exited(_) => true,
        Ending::Killed(signal) => own.contains(&signal) || signal == libc::SIGTRAP,
    }
}

/// What the user reads about a rank that is given up: why, and every start of it.
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
            format!("rank {rank} cannot be restarted: it has said above why")
        }
        GiveUpReason::SamePoint => format!(
            "rank {rank} is not restarted: it has ended at the same place {SAME_POINT_MAX} times \
             ({how}, {}), which is a fault of the program",
            point(&last.point)
        ),
        GiveUpReason::RelayLost => format!(
            "rank {rank} is not restarted: it has lost the connection to its relay {SAME_POINT_MAX} times at \
             the same place ({})",
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
    format!("{printed} bytes printed, {asked} questions asked{polls_text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RestartLimits = RestartLimits { restarts_max: 4, within_s: 60 };
    const SEGV: Ending = Ending::Killed(libc::SIGSEGV);
    const KILL: Ending = Ending::Killed(libc::SIGKILL);

    /// It began after so many seconds, and lived for one.
    fn incarnation(began: u64, ending: Ending, printed: u64) -> IncarnationRecord {
        IncarnationRecord {
            began: Duration::from_secs(began),
            lasted: Duration::from_secs(1),
            ending,
            stage: Stage::Joined,
            has_fatal_notice: false,
            point: ProgressPoint { asked: 3, printed, polls: 7 },
        }
    }

    #[test]
    fn what_follows_from_the_way_in_which_it_ended() {
        let over = Decision::Ended;
        let anew = Decision::Restart;
        let rows = [
            (Ending::Exited(0), Stage::Finalized, &over),
            (Ending::Exited(0), Stage::Joined, &over),
            (Ending::Exited(0), Stage::Silent, &over),
            (Ending::Exited(3), Stage::Finalized, &over),
            (Ending::Exited(3), Stage::Silent, &over),
            (Ending::Exited(3), Stage::Joined, &anew),
            (KILL, Stage::Silent, &anew),
            (KILL, Stage::Joined, &anew),
            (KILL, Stage::Finalized, &anew),
            (Ending::Killed(libc::SIGTERM), Stage::Joined, &anew),
            (SEGV, Stage::Joined, &anew),
        ];
        for (ending, stage, expected) in rows {
            let one = IncarnationRecord { stage, ..incarnation(0, ending, 0) };
            assert_eq!(decide(&[one], LIMITS), *expected, "{ending:?} {stage:?}");
        }
        // Of its own a program may end with any code.
        let own = incarnation(0, Ending::Exited(EXIT_UNRECOVERABLE), 0);
        assert_eq!(decide(&[own], LIMITS), anew);
        assert_eq!(decide(&[IncarnationRecord { stage: Stage::Finalized, ..own }], LIMITS), over);
        let cannot = IncarnationRecord { has_fatal_notice: true, ..own };
        assert_eq!(decide(&[cannot], LIMITS), Decision::GiveUp(GiveUpReason::Unrecoverable));
        assert_eq!(decide(&[], LIMITS), over);
        let cut = incarnation(0, Ending::Exited(EXIT_UPLINK_LOST), 0);
        assert_eq!(
            decide(&[IncarnationRecord { stage: Stage::Silent, ..cut }], LIMITS),
            over,
            "its own code"
        );
        let cut = IncarnationRecord { has_fatal_notice: true, stage: Stage::Silent, ..cut };
        assert_eq!(decide(&[cut; 2], LIMITS), anew);
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
            // Somebody has killed it in between: the count begins again.
            (&[(SEGV, 5), (SEGV, 5), (KILL, 2), (SEGV, 5)], Decision::Restart),
            (
                &[(KILL, 2), (SEGV, 5), (SEGV, 5), (SEGV, 5)],
                Decision::GiveUp(GiveUpReason::SamePoint),
            ),
            (&[(Ending::Exited(3), 5); 3], Decision::GiveUp(GiveUpReason::SamePoint)),
            // In silence every place looks alike.
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
                        (--max-restarts, --max-restarts-within)\n  \
                        incarnation 0: after 0.0 s, for 1.0 s: SIGKILL, 0 bytes printed, 3 questions asked, \
                        7 polls\n  \
                        incarnation 1: after 2.0 s, for 1.0 s: SIGSEGV, 5 bytes printed, 3 questions asked, \
                        7 polls";
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
