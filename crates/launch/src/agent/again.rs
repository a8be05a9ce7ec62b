//! What a rank that is started anew has already said and heard: its questions to its process manager with their answers,
//! and what it has printed.
//!
//! A new start asks the same questions in the same order and gets the same answers; what it prints again is compared with what
//! was printed before, and not shown. What our own libraries and libfabric say in it (`marked`) differs from start to start, and
//! is always shown.
//! Every start is remembered: whether there is another one is decided by that (`restart`).

use std::time::{Duration, Instant};

use super::marked::{Marked, Part};
use crate::control::moved::{Exchange, Moving};
use crate::control::{Ending, Stream};
use crate::output_log::{Divergence, OutputReplay, Position, Replayed};
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
    /// Standard output and error: what any start has printed, and where the present one is.
    outputs: [OutputReplay; 2],
    /// The present start has printed something else than those before it. Nothing of its output is shown from then on.
    has_diverged: bool,
    /// All that was printed before the furthest look for messages is known. It is not where a node was lost, until the rank has
    /// looked for messages as often again.
    is_output_known: bool,
    /// How often the present start had looked for messages as it last printed on standard error, and the length of that stream
    /// when that number was new: what came since may be last words.
    quiet: (u64, u64),
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

/// What comes of something that was printed.
#[derive(Debug, PartialEq, Eq)]
pub enum Print {
    /// The program has not printed it before.
    New(Vec<u8>),
    /// As well, in the place of so many bytes, from this one on: last words of an earlier start, which do not come again.
    Other { new: Vec<u8>, from: u64, gone: u64 },
    /// Our libraries have said it.
    Own(Vec<u8>),
    /// It is not what was printed before; this is for the user.
    Diverged(String),
}

impl Again {
    /// Its first start begins.
    pub fn new(now: Instant) -> Again {
        Again {
            exchanges: Vec::new(),
            asked: 0,
            exchanged_bytes: 0,
            outputs: Default::default(),
            has_diverged: false,
            is_output_known: true,
            quiet: (0, 0),
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
            outputs: from.outputs.clone().map(OutputReplay::adopted),
            is_output_known: false,
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

    /// It wants the job to end.
    pub fn abort(&mut self) {
        self.has_aborted = true;
    }

    /// Its present process has ended; all that it has had, this one last.
    pub fn end(&mut self, ending: Ending, looks: Option<Looks>, now: Instant) -> &[Life] {
        self.note_last_words(ending, looks);
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
        let printed = self.outputs.iter().map(|output| output.at().bytes).sum();
        Place { asked: self.asked, printed, looked }
    }

    /// A process that has ended by an error of its own may have said so on standard error, which the next start does not repeat.
    /// SIGKILL and its like leave no time for words.
    fn note_last_words(&mut self, ending: Ending, looks: Option<Looks>) {
        let has_words = ending != Ending::Exited(0) && restart::is_own_doing(ending);
        let error = &mut self.outputs[1];
        let (looked, from) = self.quiet;
        let is_last = looks.is_some_and(|looks| looks.present > 0 && looks.present == looked);
        if has_words && is_last && !error.is_behind() {
            error.set_last_words(from);
        }
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
        self.asked = 0;
        self.outputs.iter_mut().for_each(|output| output.begin_at(Position::default()));
        self.marked = Marked::default();
        self.quiet = (0, 0);
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
    pub fn begin_at(&mut self, asked: usize, stage: Stage, printed: [Position; 2]) {
        (self.asked, self.stage) = (asked, stage);
        self.outputs.iter_mut().zip(printed).for_each(|(output, at)| output.begin_at(at));
        self.marked = Marked::new(self.outputs[1].is_line_start());
    }

    /// What the present start has asked, how far it has come by that, and where in its output it is.
    pub fn standing(&self) -> (usize, Stage, [Position; 2]) {
        (self.asked, self.stage, self.outputs.each_ref().map(OutputReplay::at))
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
        let looks_less = looks.is_some_and(|looks| looks.present < self.looks_before);
        let is_behind = self.asked < self.exchanges.len()
            || self.outputs.iter().any(OutputReplay::is_behind)
            || looks_less;
        self.is_output_known |= looks.is_some() && !looks_less;
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

    /// What comes of these bytes, which the present start has printed after so many looks for messages.
    pub fn print(&mut self, stream: Stream, bytes: &[u8], looks: Option<Looks>) -> Vec<Print> {
        if stream == Stream::Stdout {
            return Vec::from_iter(self.compare(stream, bytes, looks));
        }
        let parts = self.marked.split(bytes);
        parts.into_iter().filter_map(|part| self.print_part(part, looks)).collect()
    }

    /// The present process has ended or stands still, so no line of a library is under way: what comes of the rest.
    pub fn end_of_print(&mut self, looks: Option<Looks>) -> Option<Print> {
        self.marked.end().and_then(|part| self.print_part(part, looks))
    }

    fn print_part(&mut self, part: Part, looks: Option<Looks>) -> Option<Print> {
        match part {
            Part::Program(bytes) => self.compare(Stream::Stderr, &bytes, looks),
            Part::Own(line) => Some(Print::Own(line)),
            Part::LastWord => {
                self.has_last_word = true;
                None
            }
        }
    }

    /// The program has printed this.
    fn compare(&mut self, stream: Stream, bytes: &[u8], looks: Option<Looks>) -> Option<Print> {
        if self.has_diverged || bytes.is_empty() {
            return None;
        }
        let output = &mut self.outputs[usize::from(stream == Stream::Stderr)];
        let present = looks.map_or(0, |looks| looks.present);
        if stream == Stream::Stderr && present != self.quiet.0 {
            self.quiet = (present, output.log().end().bytes);
        }
        // It is read later than it was printed, so the number of looks is not too small.
        let is_early = self.is_output_known && looks.is_some() && present < self.looks_before;
        let outcome = output.print(bytes);
        let divergence = match outcome {
            Ok(Replayed { new, .. }) if new.is_empty() => return None,
            Ok(Replayed { new, cut: Some((from, end)) }) => {
                return Some(Print::Other { new, from, gone: end - from });
            }
            Ok(Replayed { new, .. }) if is_early => output.more(&new),
            Ok(Replayed { new, .. }) => return Some(Print::New(new)),
            Err(divergence) => divergence,
        };
        self.has_diverged = true;
        Some(Print::Diverged(self.told(stream, &divergence)))
    }

    /// Its process has ended as it wanted. What the user reads if it has not printed all that was printed before.
    pub fn left_out(&self) -> Option<String> {
        let streams = [Stream::Stdout, Stream::Stderr].into_iter().zip(&self.outputs);
        let mut divergences =
            streams.filter_map(|(stream, output)| Some((stream, output.end().err()?)));
        divergences.next().filter(|_| !self.has_diverged).map(|(stream, it)| self.told(stream, &it))
    }

    fn told(&self, stream: Stream, divergence: &Divergence) -> String {
        let name = ["standard output", "standard error"][usize::from(stream == Stream::Stderr)];
        format!(
            "does not repeat in incarnation {} what was printed before: on {name} {divergence}",
            self.starts
        )
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
        again.print(Stream::Stdout, b"abc", looks(9, 9));
        again.print(Stream::Stderr, b"x", looks(9, 9));
        assert_eq!(again.percent(looks(9, 9)), None);
        again.begin(looks(200, 200), Instant::now());
        assert_eq!(again.percent(looks(200, 0)), None, "it has not begun");
        again.print(Stream::Stdout, b"abc", looks(200, 50));
        again.ask("a");
        assert!(!again.returns(looks(200, 86)));
        assert_eq!((again.percent(looks(200, 86)), again.percent(None)), (Some(43), None));
        again.print(Stream::Stderr, b"x", looks(200, 86));
        assert!(!again.returns(looks(200, 199)) && again.is_away());
        assert!(again.returns(looks(200, 200)) && !again.returns(looks(200, 200)));
        assert_eq!(again.percent(looks(201, 201)), None);
        again.begin(None, Instant::now());
        again.ask("a");
        again.print(Stream::Stdout, b"abc", None);
        assert!(!again.returns(None));
        again.print(Stream::Stderr, b"x", None);
        assert!(again.returns(None), "where nobody counts looks");
    }

    #[test]
    fn every_start_is_remembered_with_its_place() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut again = Again::new(now);
        again.ask(INIT);
        again.print(Stream::Stdout, b"abc", None);
        let killed = Ending::Killed(9);
        assert_eq!(again.end(killed, looks(5, 5), later(2)).len(), 1);
        again.begin(looks(5, 5), later(3));
        again.print(Stream::Stderr, b"x\x1elandbridge cannot go on\n", looks(5, 5));
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

    fn new(bytes: &[u8]) -> Vec<Print> {
        vec![Print::New(bytes.to_vec())]
    }

    #[test]
    fn nothing_is_printed_twice() {
        let mut again = Again::new(Instant::now());
        assert_eq!(again.print(Stream::Stdout, b"abc", None), new(b"abc"));
        again.begin(None, Instant::now());
        assert_eq!(again.print(Stream::Stdout, b"ab", None), []);
        assert_eq!(again.print(Stream::Stdout, b"cde", None), new(b"de"));
        assert_eq!(again.print(Stream::Stderr, b"f", None), new(b"f"));
    }

    /// The one line for the user.
    fn diverged(prints: &[Print]) -> &str {
        let [Print::Diverged(text)] = prints else { panic!("{prints:?}") };
        text
    }

    #[test]
    fn another_line_ends_it_and_nothing_more_is_shown() {
        let mut again = Again::new(Instant::now());
        again.print(Stream::Stdout, b"one\nx = 1\n", looks(5, 5));
        again.begin(looks(5, 5), Instant::now());
        let prints = again.print(Stream::Stdout, b"one\nx = 2\nthree\n", looks(5, 3));
        let expected = "does not repeat in incarnation 1 what was printed before: on standard output line 2 is \
                        \"x = 2\", and was \"x = 1\"";
        assert_eq!(diverged(&prints), expected);
        assert_eq!(again.print(Stream::Stdout, b"four\n", looks(9, 9)), []);
        let own = again.print(Stream::Stderr, b"x\n\x1elandbridge[1]: x\n", looks(9, 9));
        assert_eq!(own, [Print::Own(b"landbridge[1]: x\n".to_vec())]);
    }

    #[test]
    fn a_line_too_many_or_too_few_ends_it_as_well() {
        let mut again = Again::new(Instant::now());
        again.print(Stream::Stdout, b"one\n", looks(5, 5));
        again.begin(looks(5, 5), Instant::now());
        assert!(again.left_out().unwrap().contains("on standard output it ended after 0 bytes"));
        assert_eq!(again.print(Stream::Stdout, b"one\n", looks(5, 2)), []);
        assert_eq!(again.left_out(), None);
        let prints = again.print(Stream::Stdout, b"two\n", looks(5, 4));
        assert!(
            diverged(&prints).contains("line 2 is \"two\", and there was nothing"),
            "{prints:?}"
        );
        // What a lost node has not told may come.
        let ranks = Moving { starts: 1, ..Moving::default() };
        let mut adopted = Again::adopted(&ranks, looks(5, 5), Instant::now());
        assert_eq!(adopted.print(Stream::Stdout, b"one\n", looks(5, 2)), new(b"one\n"));
        adopted.returns(looks(5, 5));
        adopted.begin(looks(5, 5), Instant::now());
        assert_eq!(adopted.print(Stream::Stdout, b"one\n", looks(5, 2)), []);
        diverged(&adopted.print(Stream::Stdout, b"two\n", looks(5, 2)));
    }

    #[test]
    fn what_an_error_says_last_need_not_come_again() {
        let say = |ending, after| {
            let mut again = Again::new(Instant::now());
            again.print(Stream::Stderr, b"one\n", looks(3, 3));
            again.print(Stream::Stderr, b"Traceback\n", looks(5, 5));
            again.end(ending, looks(5, after), Instant::now());
            again.begin(looks(5, 0), Instant::now());
            again.print(Stream::Stderr, b"one\ntwo\n", looks(6, 5))
        };
        let other = || vec![Print::Other { new: b"two\n".to_vec(), from: 4, gone: 10 }];
        assert_eq!(say(Ending::Exited(1), 5), other());
        assert_eq!(say(Ending::Killed(libc::SIGSEGV), 5), other());
        // It has looked for messages since, or had no time for words.
        for (ending, after) in [(Ending::Exited(1), 6), (Ending::Killed(libc::SIGKILL), 5)] {
            diverged(&say(ending, after));
        }
    }

    #[test]
    fn what_our_libraries_say_is_always_shown_and_shifts_nothing() {
        let mut again = Again::new(Instant::now());
        let said = |again: &mut Again, bytes: &[u8]| {
            let prints = again.print(Stream::Stderr, bytes, None);
            let bytes = prints.into_iter().map(|print| match print {
                Print::New(bytes) | Print::Own(bytes) => bytes,
                other => panic!("{other:?}"),
            });
            bytes.collect::<Vec<_>>().concat()
        };
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
        assert_eq!(again.end_of_print(None), new(b"\x1e").pop());
    }
}
