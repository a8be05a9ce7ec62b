//! What a rank that is started anew has already said and heard: its questions to its process manager with their answers,
//! and how much it has printed.
//!
//! A new start asks the same questions in the same order and gets the same answers; what it prints again is swallowed. What our
//! own libraries say in it (`marked`) differs from start to start, and is always shown.
//! Every start is remembered: whether there is another one is decided by that (`restart`).

use std::time::{Duration, Instant};

use super::marked::{Marked, Part};
use crate::control::moved::{Exchange, Moving};
use crate::control::{Ending, Stream};
use crate::pmi::server::Stage;
use crate::restart::{self, Life, Place};

/// How often a process has looked for messages, if anybody counts that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Looks {
    /// Whichever start came furthest.
    pub furthest: u64,
    /// The present one.
    pub present: u64,
    /// Frames that were taken in again, by all starts: at one look there may be many.
    pub taken: u64,
}

/// A rank is never started so often on one node that is lost and does not know it.
pub const STARTS_PER_NODE: u32 = 10_000;

/// What a rank has asked its process manager, with the answers, is kept up to here. A job cannot spawn so much; names it can publish
/// and look up without end.
pub const EXCHANGED_BYTES_MAX: usize = 64 << 20;

/// See the module head.
#[derive(Debug)]
pub struct Again {
    exchanges: Vec<Exchange>,
    /// Of these, how many the present start has come to.
    asked: usize,
    /// Bytes of all exchanges. Beyond the bound nothing is kept.
    exchanged_bytes: usize,
    /// Bytes printed on standard output and error, by any start;
    printed: [u64; 2],
    /// and by this one.
    repeated: [u64; 2],
    /// Its looks for messages before this start.
    looks_before: u64,
    /// Standard error.
    marked: Marked,
    /// How far this start has come with its process manager.
    stage: Stage,
    /// It has said that it cannot go on.
    has_last_word: bool,
    /// How often it has been started anew,
    pub starts: u32,
    /// and how often on another node.
    moves: u32,
    /// It has been, and was not seen to be where it was yet.
    is_away: bool,
    /// How far the present one was when it was last looked at and had come further, and when.
    further: (Place, u64, Instant),
    /// When its first start began, and this one.
    began: [Instant; 2],
    /// Its starts that have ended.
    lives: Vec<Life>,
    /// It has called MPI_Abort.
    pub has_aborted: bool,
}

/// What to do about a question.
#[derive(Debug, PartialEq, Eq)]
pub enum Asked {
    /// Nobody has asked it before.
    New,
    /// It was answered so.
    Known(String),
    /// It was asked before, and is answered yet.
    Awaited,
    /// Another one was asked in its place before.
    Other { before: String },
}

impl Again {
    /// Its first start begins.
    pub fn new(now: Instant) -> Again {
        Again {
            exchanges: Vec::new(),
            asked: 0,
            exchanged_bytes: 0,
            printed: [0, 0],
            repeated: [0, 0],
            looks_before: 0,
            marked: Marked::default(),
            stage: Stage::Silent,
            has_last_word: false,
            starts: 0,
            moves: 0,
            is_away: false,
            further: (Place::default(), 0, now),
            began: [now; 2],
            lives: Vec::new(),
            has_aborted: false,
        }
    }

    /// It comes from a node that is lost, and its first start here begins.
    pub fn adopted(from: &Moving, looks: Option<Looks>, now: Instant) -> Again {
        Again {
            // Since this node was started, at the most.
            began: [now.checked_sub(from.age).unwrap_or(now), now],
            lives: from.lives.clone(),
            looks_before: looks.map_or(0, |looks| looks.furthest),
            exchanged_bytes: from.exchanges.iter().map(Exchange::bytes).sum(),
            exchanges: from.exchanges.clone(),
            printed: from.printed,
            starts: from.starts,
            moves: from.moves,
            is_away: true,
            ..Again::new(now)
        }
    }

    /// The number of its present start, for its relay: higher than any on a node that it was on before, whatever is still
    /// started there.
    pub fn incarnation(&self) -> u32 {
        self.moves * STARTS_PER_NODE + self.starts
    }

    /// Bytes printed by any start, on both streams.
    pub fn printed(&self) -> u64 {
        self.printed.iter().sum()
    }

    /// It wants the job to end.
    pub fn abort(&mut self) {
        self.has_aborted = true;
    }

    /// Its present process has ended; all that it has had, this one last.
    pub fn end(&mut self, ending: Ending, looks: Option<Looks>, now: Instant) -> &[Life] {
        let [first, present] = self.began;
        let place = self.place(looks);
        let (began, lasted) = (present - first, now - present);
        let (stage, has_last_word) = (self.stage, self.has_last_word);
        self.lives.push(Life { began, lasted, ending, stage, has_last_word, place });
        &self.lives
    }

    /// How far its present process is.
    fn place(&self, looks: Option<Looks>) -> Place {
        let looked = looks.map_or(0, |looks| looks.present);
        Place { asked: self.asked, printed: self.repeated.iter().sum(), looked }
    }

    /// How long it has not come further on its way back, if that is too long. Who computes, or waits for others, is seen to look for
    /// messages, and who waits for the relay's disk to take in frames; where nobody counts that nobody can say.
    pub fn hangs(&mut self, looks: Option<Looks>, now: Instant) -> Option<Duration> {
        let place = self.place(looks);
        let taken = looks.map_or(0, |looks| looks.taken);
        if !self.is_away || looks.is_none() || (place, taken) != (self.further.0, self.further.1) {
            self.further = (place, taken, now);
            return None;
        }
        let still = now - self.further.2;
        let lived = self.lives.iter().map(|life| life.lasted).sum();
        let is_too_long = restart::hangs(still, lived);
        if is_too_long {
            // Said again if it does not end by that.
            self.further.2 = now;
        }
        is_too_long.then_some(still)
    }

    /// Whether its last process has ended because the connection to its relay was broken.
    pub fn was_cut_off(&self) -> bool {
        self.lives.last().is_some_and(Life::is_cut_off)
    }

    /// The process is started anew.
    pub fn begin(&mut self, looks: Option<Looks>, now: Instant) {
        self.began[1] = now;
        self.further = (Place::default(), 0, now);
        (self.asked, self.repeated) = (0, [0, 0]);
        self.looks_before = looks.map_or(0, |looks| looks.furthest);
        (self.stage, self.has_last_word) = (Stage::Silent, false);
        self.starts += 1;
        self.is_away = true;
    }

    /// The present start has come to nothing. Another one has another number: what is left of this one has the record, if it
    /// has come so far.
    pub fn try_anew(&mut self) {
        self.starts += 1;
    }

    /// The present start did not begin with the program, but where it stood like this.
    pub fn begin_at(&mut self, asked: usize, stage: Stage, printed: [u64; 2]) {
        (self.asked, self.stage, self.repeated) = (asked, stage, printed);
    }

    /// What the present start has asked, how far it has come by that, and how much it has printed.
    pub fn standing(&self) -> (usize, Stage, [u64; 2]) {
        (self.asked, self.stage, self.repeated)
    }

    /// How far its present process has come with its process manager.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Whether it has been started anew, and was not seen to be where it was.
    pub fn is_away(&self) -> bool {
        self.is_away
    }

    /// Whether it has asked, printed and looked for again all that was before; said once for each start.
    pub fn returns(&mut self, looks: Option<Looks>) -> bool {
        let mut streams = self.repeated.iter().zip(&self.printed);
        let is_behind = self.asked < self.exchanges.len()
            || streams.any(|(is, was)| is < was)
            || looks.is_some_and(|looks| looks.present < self.looks_before);
        let was_away = self.is_away;
        self.is_away &= is_behind;
        was_away && !is_behind
    }

    /// How much of what was before it has done again, in percent; `None` before it has begun with that, or where nobody
    /// can say.
    pub fn percent(&self, looks: Option<Looks>) -> Option<u8> {
        let present = looks.map_or(0, |looks| looks.present);
        let share = u128::from(present) * 100 / u128::from(self.looks_before.max(1));
        (self.is_away && present > 0 && self.looks_before > 0).then(|| share.min(100) as u8)
    }

    pub fn ask(&mut self, question: &str) -> Asked {
        self.stage = self.stage.after(question);
        let place = self.asked;
        self.asked += 1;
        match self.exchanges.get(place) {
            None => {
                if self.has_room(question.len()) {
                    self.exchanges.push(Exchange { question: question.to_string(), answer: None });
                }
                Asked::New
            }
            Some(known) if known.question != question => {
                Asked::Other { before: known.question.clone() }
            }
            Some(Exchange { answer: Some(answer), .. }) => Asked::Known(answer.clone()),
            Some(_) => Asked::Awaited,
        }
    }

    /// The oldest open question is answered. Whether the present start has asked it.
    pub fn answer(&mut self, answer: &str) -> bool {
        let Some(place) = self.exchanges.iter().position(|known| known.answer.is_none()) else {
            return true;
        };
        if self.has_room(answer.len()) {
            self.exchanges[place].answer = Some(answer.to_string());
        }
        place < self.asked
    }

    fn has_room(&mut self, bytes: usize) -> bool {
        self.exchanged_bytes += bytes;
        if self.has_asked_too_much() {
            self.exchanges = Vec::new();
        }
        !self.has_asked_too_much()
    }

    /// Whether that is more than is kept, so that it cannot come back.
    pub fn has_asked_too_much(&self) -> bool {
        self.exchanged_bytes > EXCHANGED_BYTES_MAX
    }

    /// What of these bytes is to be shown: what has not been printed before, and what our own libraries say.
    pub fn print(&mut self, stream: Stream, bytes: Vec<u8>) -> Vec<u8> {
        if stream == Stream::Stdout {
            return self.show(stream, &bytes);
        }
        let parts = self.marked.split(&bytes);
        parts.into_iter().flat_map(|part| self.show_part(part)).collect()
    }

    /// Nothing more comes from the present process: what is still to be shown on standard error.
    pub fn end_of_print(&mut self) -> Vec<u8> {
        self.marked.end().map_or(Vec::new(), |part| self.show_part(part))
    }

    fn show_part(&mut self, part: Part) -> Vec<u8> {
        match part {
            Part::Program(bytes) => self.show(Stream::Stderr, &bytes),
            Part::Own(line) => line,
            Part::LastWord => {
                self.has_last_word = true;
                Vec::new()
            }
        }
    }

    /// What of these bytes has not been printed before.
    fn show(&mut self, stream: Stream, bytes: &[u8]) -> Vec<u8> {
        let place = usize::from(stream == Stream::Stderr);
        let start = self.repeated[place];
        self.repeated[place] += bytes.len() as u64;
        let known = self.printed[place].saturating_sub(start).min(bytes.len() as u64);
        self.printed[place] = self.printed[place].max(self.repeated[place]);
        bytes[known as usize..].to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INIT: &str = "cmd=init pmi_version=1 pmi_subversion=1\n";

    fn looks(furthest: u64, present: u64) -> Option<Looks> {
        Some(Looks { furthest, present, taken: 0 })
    }

    #[test]
    fn the_same_questions_get_the_same_answers() {
        let mut again = Again::new(Instant::now());
        assert_eq!(again.ask("a"), Asked::New);
        assert!(again.answer("1"));
        assert_eq!(again.ask("b"), Asked::New);
        again.begin(None, Instant::now());
        assert_eq!(again.ask("a"), Asked::Known("1".into()));
        assert!(!again.answer("2"), "it has not come so far");
        assert_eq!(again.ask("b"), Asked::Known("2".into()));
        assert_eq!(again.ask("c"), Asked::New);
        again.begin(None, Instant::now());
        assert_eq!(again.ask("x"), Asked::Other { before: "a".into() });
    }

    #[test]
    fn what_is_asked_without_end_is_not_kept() {
        let mut again = Again::new(Instant::now());
        let long = "x".repeat(EXCHANGED_BYTES_MAX / 2);
        assert_eq!(again.ask(&long), Asked::New);
        assert!(again.answer(&long) && !again.has_asked_too_much());
        let ranks = Moving { exchanges: again.exchanges.clone(), ..Moving::default() };
        assert_eq!(again.ask("a"), Asked::New);
        assert!(again.answer("1") && again.has_asked_too_much());
        assert_eq!((again.exchanges.len(), again.asked), (0, 2));
        let mut adopted = Again::adopted(&ranks, None, Instant::now());
        assert_eq!(adopted.ask(&long), Asked::Known(long));
        adopted.ask("a");
        assert!(adopted.has_asked_too_much(), "counted on all nodes");
    }

    #[test]
    fn it_is_back_when_all_is_asked_printed_and_looked_for_again() {
        let mut again = Again::new(Instant::now());
        assert!(!again.returns(looks(9, 9)), "it has never been away");
        again.ask("a");
        again.print(Stream::Stdout, b"abc".to_vec());
        again.print(Stream::Stderr, b"x".to_vec());
        assert_eq!(again.percent(looks(9, 9)), None);
        again.begin(looks(200, 200), Instant::now());
        assert_eq!(again.percent(looks(200, 0)), None, "it has not begun");
        again.print(Stream::Stdout, b"abcd".to_vec());
        again.ask("a");
        assert!(!again.returns(looks(200, 86)));
        assert_eq!((again.percent(looks(200, 86)), again.percent(None)), (Some(43), None));
        again.print(Stream::Stderr, b"x".to_vec());
        assert!(!again.returns(looks(200, 199)) && again.is_away());
        assert!(again.returns(looks(200, 200)) && !again.returns(looks(200, 200)));
        assert_eq!(again.percent(looks(201, 201)), None);
        again.begin(None, Instant::now());
        again.ask("a");
        again.print(Stream::Stdout, b"abcd".to_vec());
        assert!(!again.returns(None));
        again.print(Stream::Stderr, b"x".to_vec());
        assert!(again.returns(None), "where nobody counts looks");
    }

    #[test]
    fn every_start_is_remembered_with_its_place() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut again = Again::new(now);
        again.ask(INIT);
        again.print(Stream::Stdout, b"abc".to_vec());
        let killed = Ending::Killed(9);
        assert_eq!(again.end(killed, looks(5, 5), later(2)).len(), 1);
        again.begin(looks(5, 5), later(3));
        again.print(Stream::Stderr, b"x\x1elandbridge cannot go on\n".to_vec());
        let lives = again.end(Ending::Exited(3), looks(5, 4), later(7));
        let place = |asked, printed, looked| Place { asked, printed, looked };
        assert_eq!(lives[0].place, place(1, 3, 5));
        let [began, lasted] = [3, 4].map(Duration::from_secs);
        let (ending, place) = (Ending::Exited(3), place(0, 1, 4));
        let (stage, has_last_word) = (Stage::Silent, true);
        assert_eq!(lives[1], Life { began, lasted, ending, stage, has_last_word, place });
    }

    #[test]
    fn who_comes_no_further_hangs_and_who_looks_for_messages_does_not() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut again = Again::new(now);
        assert_eq!(again.hangs(looks(5, 5), later(1_000)), None, "it has never been away");
        again.end(Ending::Killed(9), looks(5, 5), later(10));
        again.begin(looks(5, 5), later(10));
        assert_eq!(again.hangs(looks(5, 0), later(70)), None);
        assert_eq!(again.hangs(looks(5, 1), later(75)), None);
        assert_eq!(again.hangs(looks(5, 1), later(135)), None);
        assert_eq!(again.hangs(looks(5, 1), later(136)), Some(Duration::from_secs(61)));
        assert_eq!(again.hangs(None, later(300)), None, "nobody knows");
    }

    #[test]
    fn who_is_told_slowly_what_was_does_not_hang() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut again = Again::new(now);
        again.begin(looks(9, 9), now);
        // At one look; the relay reads it from a slow disk.
        for step in 1..100 {
            let looks = Some(Looks { furthest: 9, present: 4, taken: step });
            assert_eq!(again.hangs(looks, later(50 * step)), None);
        }
        let looks = Some(Looks { furthest: 9, present: 4, taken: 99 });
        assert_eq!(again.hangs(looks, later(5_010)), None);
        assert!(again.hangs(looks, later(5_011)).is_some(), "nothing has come for long");
    }

    #[test]
    fn a_new_start_begins_with_its_process_manager_anew() {
        let mut again = Again::new(Instant::now());
        again.ask(INIT);
        assert_eq!(again.stage(), Stage::Joined);
        again.ask("cmd=finalize\n");
        assert_eq!(again.stage(), Stage::Finalized);
        again.begin(None, Instant::now());
        assert_eq!(again.stage(), Stage::Silent);
        again.ask(INIT);
        again.ask("cmd=get key=finalize\n");
        assert_eq!(again.stage(), Stage::Joined);
    }

    #[test]
    fn nothing_is_printed_twice() {
        let mut again = Again::new(Instant::now());
        assert_eq!(again.print(Stream::Stdout, b"abc".to_vec()), b"abc");
        again.begin(None, Instant::now());
        assert_eq!(again.print(Stream::Stdout, b"ab".to_vec()), b"");
        assert_eq!(again.print(Stream::Stdout, b"cde".to_vec()), b"de");
        assert_eq!(again.print(Stream::Stderr, b"f".to_vec()), b"f");
    }

    #[test]
    fn what_our_libraries_say_is_always_shown_and_shifts_nothing() {
        let mut again = Again::new(Instant::now());
        let said = |again: &mut Again, bytes: &[u8]| again.print(Stream::Stderr, bytes.to_vec());
        let line = |pid: &str| format!("landbridge[{pid}]: Info: x\n").into_bytes();
        let marked = |pid: &str| [b"\x1e", &line(pid)[..]].concat();
        assert_eq!(
            said(&mut again, &[b"one\n", &marked("1")[..]].concat()),
            [b"one\n", &line("1")[..]].concat()
        );
        again.begin(None, Instant::now());
        assert_eq!(said(&mut again, &marked("23")), line("23"));
        assert_eq!(said(&mut again, &marked("23")), line("23"), "one more than before");
        assert_eq!(said(&mut again, b"one\ntwo\n"), b"two\n");
        assert_eq!(said(&mut again, b"three\x1e"), b"three");
        assert_eq!(again.end_of_print(), b"\x1e");
    }
}
