//! What happens when a process of a rank has ended that may come back: another start, or the end. Pure.
//!
//! In: how it ended, how far it was in talking to its process manager, what became of the starts before it, and the
//! limits. Out: a [`Decision`]; for people, the history of a rank that is given up ([`told`]).
//!
//! | how it ended | what follows |
//! |---|---|
//! | exit code, MPI_Finalize done, or never an MPI program | the end: it has left as it wanted |
//! | exit code 0 without MPI_Finalize | the end; the job's too, unless the others end as well (`watch`) |
//! | the provider's own word that it cannot go on | the end: another start would do the same |
//! | its word that it is cut off from its relay | another start, unless one of these holds |
//! | any signal; another exit code without MPI_Finalize | another start, unless one of these holds |
//! | … at the same place, in the same way, [`SAME_PLACE_MAX`] times running | the end: the program's own fault |
//! | … [`Limits::restarts_max`] new starts within [`Limits::within`] | the end |
//!
//! The *place* is what a process has asked its process manager, printed, and how often it has looked for messages. A program
//! that computes without any of this is everywhere at the same one, so a signal from outside (SIGKILL and its like) says
//! nothing about it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::control::Ending;
use crate::pmi::server::Stage;
use crate::ps::roll::words;

/// A process with this exit code whose last word says so has been ended by our libraries, which have said why: what it does
/// cannot be recorded, or is not what an earlier start did.
pub use landbridge_proto::id::{EXIT_CANNOT_GO_ON, EXIT_CUT_OFF};

/// Who ends so often at one place would do so for ever.
pub const SAME_PLACE_MAX: usize = 3;
/// Starts that are told of a rank that is given up, the last ones.
const TOLD_MAX: usize = 20;

/// A new start that does nothing for so long, and for twice as long as all starts before it have lived, hangs.
pub const STILL_MAX: Duration = Duration::from_secs(60);

/// Whether a new start hangs that has not come further for this long. `lived`: how long all starts before it have lived; it has to do
/// no more than they did, and gets through that faster.
pub fn hangs(still: Duration, lived: Duration) -> bool {
    still > STILL_MAX.max(lived.saturating_mul(2))
}

/// What the user allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// New starts of a rank
    pub restarts_max: u32,
    /// in this many seconds.
    pub within_s: u64,
}

impl Default for Limits {
    /// A rank that lives for half a minute on average gets on with its work; one that does not, hardly.
    fn default() -> Limits {
        Limits { restarts_max: 20, within_s: 600 }
    }
}

/// How far a process has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Questions to its process manager.
    pub asked: usize,
    /// Bytes on standard output and error.
    pub printed: u64,
    /// Looks for messages; 0 where nobody counts them.
    pub looked: u64,
}

/// One process that a rank has had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// Since the first one began.
    pub began: Duration,
    pub lasted: Duration,
    pub ending: Ending,
    pub stage: Stage,
    /// It has said that it cannot go on.
    pub has_last_word: bool,
    pub place: Place,
}

impl Life {
    /// The connection to its relay, on another node, has broken.
    pub fn is_cut_off(&self) -> bool {
        self.has_last_word && self.ending == Ending::Exited(EXIT_CUT_OFF)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    StartAnew,
    /// It has ended as it wanted, or it is nobody's business here.
    Over,
    GiveUp(Why),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    CannotGoOn,
    CutOff,
    SamePlace,
    TooOften,
}

/// `lives`: all processes that the rank has had, the last of which has just ended.
pub fn decide(lives: &[Life], limits: Limits) -> Decision {
    let Some(last) = lives.last() else { return Decision::Over };
    match (last.ending, last.stage) {
        (Ending::Exited(EXIT_CANNOT_GO_ON), _) if last.has_last_word => {
            return Decision::GiveUp(Why::CannotGoOn);
        }
        _ if last.is_cut_off() => {}
        (Ending::Exited(0), _) => return Decision::Over,
        (Ending::Exited(_), Stage::Silent | Stage::Finalized) => return Decision::Over,
        (Ending::Exited(_), Stage::Joined) | (Ending::Killed(_), _) => {}
    }
    let alike = lives.iter().rev().take_while(|life| is_same_place(life, last));
    if alike.count() >= SAME_PLACE_MAX {
        return Decision::GiveUp(if last.is_cut_off() { Why::CutOff } else { Why::SamePlace });
    }
    // Each of these has been followed by another start, but for the last one.
    let end = |life: &Life| life.began + life.lasted;
    let since = end(last).saturating_sub(Duration::from_secs(limits.within_s));
    let recent = lives[..lives.len() - 1].iter().rev().take_while(|life| end(life) >= since);
    if recent.count() >= limits.restarts_max as usize {
        return Decision::GiveUp(Why::TooOften);
    }
    Decision::StartAnew
}

fn is_same_place(one: &Life, other: &Life) -> bool {
    is_own_doing(one.ending) && (one.ending, one.place) == (other.ending, other.place)
}

/// Whether a process ends so by what it does, and not by what is done to it.
pub fn is_own_doing(ending: Ending) -> bool {
    let own =
        [libc::SIGSEGV, libc::SIGBUS, libc::SIGABRT, libc::SIGFPE, libc::SIGILL, libc::SIGSYS];
    match ending {
        Ending::Exited(_) => true,
        Ending::Killed(signal) => own.contains(&signal) || signal == libc::SIGTRAP,
    }
}

/// What the user reads about a rank that is given up: why, and every start of it.
pub fn told(rank: u32, lives: &[Life], limits: Limits, why: &Why) -> String {
    let Some(last) = lives.last() else { return String::new() };
    let how = words(last.ending);
    let Limits { restarts_max, within_s } = limits;
    let mut text = match why {
        Why::CannotGoOn => format!("rank {rank} cannot be started anew: it has said above why"),
        Why::SamePlace => format!(
            "rank {rank} is not started anew: it has ended at the same place {SAME_PLACE_MAX} times \
             ({how}, {}), which is a fault of the program",
            place(&last.place)
        ),
        Why::CutOff => format!(
            "rank {rank} is not started anew: it has been cut off from its relay {SAME_PLACE_MAX} times at \
             the same place ({})",
            place(&last.place)
        ),
        Why::TooOften if restarts_max == 0 => {
            format!("rank {rank} is not started anew ({how}): --max-restarts is 0")
        }
        Why::TooOften => format!(
            "rank {rank} is not started anew ({how}): it has been {restarts_max} times within \
             {within_s} s (--max-restarts, --max-restarts-within)"
        ),
    };
    let first_told = lives.len().saturating_sub(TOLD_MAX);
    if first_told > 0 {
        text += &format!("\n  {first_told} earlier starts");
    }
    for (number, life) in lives.iter().enumerate().skip(first_told) {
        let [began, lasted] = [life.began, life.lasted].map(|time| time.as_secs_f64());
        let (how, place) = (words(life.ending), place(&life.place));
        text +=
            &format!("\n  start {number}: after {began:.1} s, for {lasted:.1} s: {how}, {place}");
    }
    text
}

fn place(place: &Place) -> String {
    let Place { asked, printed, looked } = place;
    let looks = if *looked > 0 { format!(", {looked} looks for messages") } else { String::new() };
    format!("{printed} bytes printed, {asked} questions asked{looks}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { restarts_max: 4, within_s: 60 };
    const SEGV: Ending = Ending::Killed(libc::SIGSEGV);
    const KILL: Ending = Ending::Killed(libc::SIGKILL);

    /// It began after so many seconds, and lived for one.
    fn life(began: u64, ending: Ending, printed: u64) -> Life {
        Life {
            began: Duration::from_secs(began),
            lasted: Duration::from_secs(1),
            ending,
            stage: Stage::Joined,
            has_last_word: false,
            place: Place { asked: 3, printed, looked: 7 },
        }
    }

    #[test]
    fn what_follows_from_the_way_in_which_it_ended() {
        let over = Decision::Over;
        let anew = Decision::StartAnew;
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
            let one = Life { stage, ..life(0, ending, 0) };
            assert_eq!(decide(&[one], LIMITS), *expected, "{ending:?} {stage:?}");
        }
        // Of its own a program may end with any code.
        let own = life(0, Ending::Exited(EXIT_CANNOT_GO_ON), 0);
        assert_eq!(decide(&[own], LIMITS), anew);
        assert_eq!(decide(&[Life { stage: Stage::Finalized, ..own }], LIMITS), over);
        let cannot = Life { has_last_word: true, ..own };
        assert_eq!(decide(&[cannot], LIMITS), Decision::GiveUp(Why::CannotGoOn));
        assert_eq!(decide(&[], LIMITS), over);
        let cut = life(0, Ending::Exited(EXIT_CUT_OFF), 0);
        assert_eq!(decide(&[Life { stage: Stage::Silent, ..cut }], LIMITS), over, "its own code");
        let cut = Life { has_last_word: true, stage: Stage::Silent, ..cut };
        assert_eq!(decide(&[cut; 2], LIMITS), anew);
        assert_eq!(decide(&[cut; 3], LIMITS), Decision::GiveUp(Why::CutOff));
    }

    #[test]
    fn three_ends_at_one_place_are_the_programs_fault() {
        let again = |endings: &[(Ending, u64)]| {
            let lives = endings.iter().zip(0..).map(|(&(how, printed), at)| life(at, how, printed));
            decide(&lives.collect::<Vec<_>>(), LIMITS)
        };
        let rows: [(&[(Ending, u64)], Decision); 9] = [
            (&[(SEGV, 5), (SEGV, 5)], Decision::StartAnew),
            (&[(SEGV, 5), (SEGV, 5), (SEGV, 5)], Decision::GiveUp(Why::SamePlace)),
            (&[(SEGV, 5), (SEGV, 5), (SEGV, 6)], Decision::StartAnew),
            (&[(SEGV, 5), (Ending::Killed(6), 5), (SEGV, 5)], Decision::StartAnew),
            // Somebody has killed it in between: the count begins again.
            (&[(SEGV, 5), (SEGV, 5), (KILL, 2), (SEGV, 5)], Decision::StartAnew),
            (&[(KILL, 2), (SEGV, 5), (SEGV, 5), (SEGV, 5)], Decision::GiveUp(Why::SamePlace)),
            (&[(Ending::Exited(3), 5); 3], Decision::GiveUp(Why::SamePlace)),
            // In silence every place looks alike.
            (&[(KILL, 5); 3], Decision::StartAnew),
            (&[(Ending::Killed(libc::SIGTERM), 5); 3], Decision::StartAnew),
        ];
        for (endings, expected) in rows {
            assert_eq!(again(endings), expected, "{endings:?}");
        }
    }

    #[test]
    fn looks_for_messages_tell_places_apart_where_nothing_is_printed() {
        let at = |looked: u64| {
            let one = life(looked, SEGV, 0);
            Life { place: Place { looked, ..one.place }, ..one }
        };
        assert_eq!(decide(&[at(1), at(2), at(3)], LIMITS), Decision::StartAnew);
        assert_eq!(decide(&[at(2), at(2), at(2)], LIMITS), Decision::GiveUp(Why::SamePlace));
    }

    #[test]
    fn so_many_new_starts_within_a_time_and_no_more() {
        let at = |times: &[u64]| {
            let lives: Vec<Life> = times.iter().map(|&began| life(began, KILL, 0)).collect();
            decide(&lives, LIMITS)
        };
        assert_eq!(at(&[0, 1, 2, 3]), Decision::StartAnew);
        assert_eq!(at(&[0, 1, 2, 3, 4]), Decision::GiveUp(Why::TooOften));
        assert_eq!(at(&[0, 1, 2, 3, 60]), Decision::GiveUp(Why::TooOften), "just within");
        assert_eq!(at(&[0, 1, 2, 3, 61]), Decision::StartAnew, "the first is long ago");
        let none = Limits { restarts_max: 0, ..LIMITS };
        assert_eq!(decide(&[life(0, KILL, 0)], none), Decision::GiveUp(Why::TooOften));
    }

    #[test]
    fn the_history_of_who_is_given_up_is_told() {
        let lives = [life(0, KILL, 0), life(2, SEGV, 5)];
        let text = told(3, &lives, LIMITS, &Why::TooOften);
        let expected = "rank 3 is not started anew (SIGSEGV): it has been 4 times within 60 s \
                        (--max-restarts, --max-restarts-within)\n  \
                        start 0: after 0.0 s, for 1.0 s: SIGKILL, 0 bytes printed, 3 questions asked, \
                        7 looks for messages\n  \
                        start 1: after 2.0 s, for 1.0 s: SIGSEGV, 5 bytes printed, 3 questions asked, \
                        7 looks for messages";
        assert_eq!(text, expected);
        let many: Vec<Life> = (0..30).map(|began| life(began, KILL, 0)).collect();
        let text = told(3, &many, LIMITS, &Why::SamePlace);
        assert!(text.contains("a fault of the program") && text.contains("10 earlier starts"));
        assert_eq!(text.lines().count(), 2 + TOLD_MAX);
    }

    #[test]
    fn who_does_nothing_for_longer_than_it_ever_lived_hangs() {
        let seconds = Duration::from_secs;
        assert!(!hangs(seconds(60), seconds(1)) && hangs(seconds(61), seconds(30)));
        assert!(!hangs(seconds(199), seconds(100)) && hangs(seconds(201), seconds(100)));
        assert!(!hangs(Duration::MAX, Duration::MAX));
    }
}
