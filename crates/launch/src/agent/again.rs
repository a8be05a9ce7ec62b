//! What a rank that is started anew has already said and heard: its questions to its process manager with their answers,
//! and how much it has printed.
//!
//! A new start asks the same questions in the same order and gets the same answers; what it prints again is swallowed.
//! Every start is remembered: whether there is another one is decided by that (`restart`).

use std::time::Instant;

use crate::control::{Ending, Stream};
use crate::pmi::server::Stage;
use crate::restart::{Life, Place};

/// See the module head.
#[derive(Debug)]
pub struct Again {
    exchanges: Vec<Exchange>,
    /// Of these, how many the present start has come to.
    asked: usize,
    /// Bytes printed on standard output and error, by any start;
    printed: [u64; 2],
    /// and by this one.
    repeated: [u64; 2],
    /// How often it has been started anew.
    pub starts: u32,
    /// It has been, and was not seen to be where it was yet.
    is_away: bool,
    /// When its first start began, and this one.
    began: [Instant; 2],
    /// Its starts that have ended.
    lives: Vec<Life>,
    /// It has called MPI_Abort.
    pub has_aborted: bool,
}

#[derive(Debug)]
struct Exchange {
    question: String,
    answer: Option<String>,
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
            printed: [0, 0],
            repeated: [0, 0],
            starts: 0,
            is_away: false,
            began: [now; 2],
            lives: Vec::new(),
            has_aborted: false,
        }
    }

    /// It wants the job to end.
    pub fn abort(&mut self) {
        self.has_aborted = true;
    }

    /// Its present process has ended; all that it has had, this one last.
    pub fn end(&mut self, ending: Ending, stage: Stage, now: Instant) -> &[Life] {
        let [first, present] = self.began;
        let printed = self.repeated.iter().sum();
        let place = Place { asked: self.asked, printed };
        let (began, lasted) = (present - first, now - present);
        self.lives.push(Life { began, lasted, ending, stage, place });
        &self.lives
    }

    /// The process is started anew.
    pub fn begin(&mut self, now: Instant) {
        self.began[1] = now;
        (self.asked, self.repeated) = (0, [0, 0]);
        self.starts += 1;
        self.is_away = true;
    }

    /// Whether it has asked and printed again all that was asked and printed before; said once for each start.
    pub fn returns(&mut self) -> bool {
        let mut streams = self.repeated.iter().zip(&self.printed);
        let is_behind = self.asked < self.exchanges.len() || streams.any(|(is, was)| is < was);
        let was_away = self.is_away;
        self.is_away &= is_behind;
        was_away && !is_behind
    }

    pub fn ask(&mut self, question: &str) -> Asked {
        let place = self.asked;
        self.asked += 1;
        match self.exchanges.get(place) {
            None => {
                self.exchanges.push(Exchange { question: question.to_string(), answer: None });
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
        self.exchanges[place].answer = Some(answer.to_string());
        place < self.asked
    }

    /// What of these bytes has not been printed before.
    pub fn print(&mut self, stream: Stream, bytes: Vec<u8>) -> Vec<u8> {
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
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_same_questions_get_the_same_answers() {
        let mut again = Again::new(Instant::now());
        assert_eq!(again.ask("a"), Asked::New);
        assert!(again.answer("1"));
        assert_eq!(again.ask("b"), Asked::New);
        again.begin(Instant::now());
        assert_eq!(again.ask("a"), Asked::Known("1".into()));
        assert!(!again.answer("2"), "it has not come so far");
        assert_eq!(again.ask("b"), Asked::Known("2".into()));
        assert_eq!(again.ask("c"), Asked::New);
        again.begin(Instant::now());
        assert_eq!(again.ask("x"), Asked::Other { before: "a".into() });
    }

    #[test]
    fn it_is_back_when_all_is_asked_and_printed_again() {
        let mut again = Again::new(Instant::now());
        assert!(!again.returns(), "it has never been away");
        again.ask("a");
        again.print(Stream::Stdout, b"abc".to_vec());
        again.print(Stream::Stderr, b"x".to_vec());
        again.begin(Instant::now());
        again.print(Stream::Stdout, b"abcd".to_vec());
        again.ask("a");
        assert!(!again.returns());
        again.print(Stream::Stderr, b"x".to_vec());
        assert!(again.returns() && !again.returns());
    }

    #[test]
    fn every_start_is_remembered_with_its_place() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut again = Again::new(now);
        again.ask("a");
        again.print(Stream::Stdout, b"abc".to_vec());
        let killed = Ending::Killed(9);
        assert_eq!(again.end(killed, Stage::Joined, later(2)).len(), 1);
        again.begin(later(3));
        again.print(Stream::Stderr, b"x".to_vec());
        let lives = again.end(Ending::Exited(3), Stage::Joined, later(7));
        let place = |asked, printed| Place { asked, printed };
        assert_eq!(lives[0].place, place(1, 3));
        let [began, lasted] = [3, 4].map(Duration::from_secs);
        let (ending, stage) = (Ending::Exited(3), Stage::Joined);
        assert_eq!(lives[1], Life { began, lasted, ending, stage, place: place(0, 1) });
    }

    #[test]
    fn nothing_is_printed_twice() {
        let mut again = Again::new(Instant::now());
        assert_eq!(again.print(Stream::Stdout, b"abc".to_vec()), b"abc");
        again.begin(Instant::now());
        assert_eq!(again.print(Stream::Stdout, b"ab".to_vec()), b"");
        assert_eq!(again.print(Stream::Stdout, b"cde".to_vec()), b"de");
        assert_eq!(again.print(Stream::Stderr, b"f".to_vec()), b"f");
    }
}
