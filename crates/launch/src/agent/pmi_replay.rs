//! What a rank that is restarted has already said and heard: its questions to its process manager with their answers,
//! and what it has printed.
//!
//! A new start asks the same questions in the same order and gets the same answers; what it prints again is compared with what
//! was printed before, and not shown. What our own libraries and libfabric say in it (`tagged`) differs from start to start, and
//! is always shown.
//! Every start is remembered: whether there is another one is decided by that (`restart`).

use std::time::{Duration, Instant};

use super::tagged_output::{Part, TaggedOutput};
use crate::control::rank_state::{Exchange, TransferredRank};
use crate::control::{Ending, Stream};
use crate::output_log::{Divergence, OutputReplay, Position, Replayed};
use crate::pmi::server::Stage;
use crate::restart::{self, IncarnationRecord, ProgressPoint};

/// How often a process has looked for messages, if anybody counts that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PollCounts {
    /// Whichever start came furthest.
    pub furthest: u64,
    /// The present one.
    pub present: u64,
    /// Frames that were taken in again, by all starts: at one look there may be many.
    pub taken: u64,
}

/// A rank is never started so often on one node that is lost and does not know it.
pub const INCARNATIONS_PER_NODE: u32 = 10_000;

/// What a rank has asked its process manager, with the answers, is kept up to here. A job cannot spawn so much; names it can publish
/// and look up without end.
pub const EXCHANGED_BYTES_MAX: usize = 64 << 20;

/// See the module head.
#[derive(Debug)]
pub struct PmiReplay {
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
    last_stderr: (u64, u64),
    /// Its looks for messages before this start.
    polls_before: u64,
    /// Standard error.
    tagged: TaggedOutput,
    /// How far this start has come with its process manager.
    stage: Stage,
    /// It has said that it cannot go on.
    has_fatal_notice: bool,
    /// How often it has been restarted,
    pub restarts: u32,
    /// and how often on another node.
    moves: u32,
    /// It has been, and was not seen to be where it was yet.
    is_replaying: bool,
    /// How far the present one was when it was last looked at and had come further, and when.
    last_progress: (ProgressPoint, u64, Instant),
    /// When its first start began, and this one.
    began: [Instant; 2],
    /// Its starts that have ended.
    incarnations: Vec<IncarnationRecord>,
    /// It has called MPI_Abort.
    pub has_aborted: bool,
}

/// What to do about a question.
#[derive(Debug, PartialEq, Eq)]
pub enum RequestReplay {
    /// Nobody has asked it before.
    New,
    /// It was answered so.
    Answered(String),
    /// It was asked before, and is answered yet.
    Pending,
    /// Another one was asked in its place before.
    Diverged { before: String },
}

/// What comes of something that was printed.
#[derive(Debug, PartialEq, Eq)]
pub enum PrintOutcome {
    /// The program has not printed it before.
    New(Vec<u8>),
    /// As well, in the place of so many bytes, from this one on: last words of an earlier start, which do not come again.
    ReplacesLastWords { new: Vec<u8>, from: u64, gone: u64 },
    /// Our libraries have said it.
    OfLibrary(Vec<u8>),
    /// It is not what was printed before; this is for the user.
    Diverged(String),
}

impl PmiReplay {
    /// Its first start begins.
    pub fn new(now: Instant) -> PmiReplay {
        PmiReplay {
            exchanges: Vec::new(),
            asked: 0,
            exchanged_bytes: 0,
            outputs: Default::default(),
            has_diverged: false,
            is_output_known: true,
            last_stderr: (0, 0),
            polls_before: 0,
            tagged: TaggedOutput::default(),
            stage: Stage::Silent,
            has_fatal_notice: false,
            restarts: 0,
            moves: 0,
            is_replaying: false,
            last_progress: (ProgressPoint::default(), 0, now),
            began: [now; 2],
            incarnations: Vec::new(),
            has_aborted: false,
        }
    }

    /// It comes from a node that is lost, and its first start here begins.
    pub fn adopted(from: &TransferredRank, polls: Option<PollCounts>, now: Instant) -> PmiReplay {
        PmiReplay {
            // Since this node was started, at the most.
            began: [now.checked_sub(from.age).unwrap_or(now), now],
            incarnations: from.incarnations.clone(),
            polls_before: polls.map_or(0, |polls| polls.furthest),
            exchanged_bytes: from.exchanges.iter().map(Exchange::bytes).sum(),
            exchanges: from.exchanges.clone(),
            outputs: from.outputs.clone().map(OutputReplay::adopted),
            is_output_known: false,
            restarts: from.restarts,
            moves: from.moves,
            is_replaying: true,
            ..PmiReplay::new(now)
        }
    }

    /// The number of its present start, for its relay: higher than any on a node that it was on before, whatever is still
    /// started there.
    pub fn incarnation(&self) -> u32 {
        self.moves * INCARNATIONS_PER_NODE + self.restarts
    }

    /// It wants the job to end.
    pub fn abort(&mut self) {
        self.has_aborted = true;
    }

    /// Its present process has ended; all that it has had, this one last.
    pub fn end(
        &mut self,
        ending: Ending,
        polls: Option<PollCounts>,
        now: Instant,
    ) -> &[IncarnationRecord] {
        self.detect_last_words(ending, polls);
        let [first, present] = self.began;
        let point = self.point(polls);
        let (began, lasted) = (present - first, now - present);
        let (stage, has_fatal_notice) = (self.stage, self.has_fatal_notice);
        self.incarnations.push(IncarnationRecord {
            began,
            lasted,
            ending,
            stage,
            has_fatal_notice,
            point,
        });
        &self.incarnations
    }

    /// How far its present process is.
    fn point(&self, polls: Option<PollCounts>) -> ProgressPoint {
        let polls = polls.map_or(0, |polls| polls.present);
        let printed = self.outputs.iter().map(|output| output.at().bytes).sum();
        ProgressPoint { asked: self.asked, printed, polls }
    }

    /// A process that has ended by an error of its own may have said so on standard error, which the next start does not repeat.
    /// SIGKILL and its like leave no time for words.
    fn detect_last_words(&mut self, ending: Ending, polls: Option<PollCounts>) {
        let has_words = ending != Ending::Exited(0) && restart::is_program_fault(ending);
        let error = &mut self.outputs[1];
        let (last_polls, from) = self.last_stderr;
        let is_last = polls.is_some_and(|polls| polls.present > 0 && polls.present == last_polls);
        if has_words && is_last && !error.is_behind() {
            error.set_last_words(from);
        }
    }

    /// How long it has not come further on its way back, if that is too long. Who computes, or waits for others, is seen to look for
    /// messages, and who waits for the relay's disk to take in frames; where nobody counts that nobody can say.
    pub fn hangs(&mut self, polls: Option<PollCounts>, now: Instant) -> Option<Duration> {
        let point = self.point(polls);
        let taken = polls.map_or(0, |polls| polls.taken);
        if !self.is_replaying
            || polls.is_none()
            || (point, taken) != (self.last_progress.0, self.last_progress.1)
        {
            self.last_progress = (point, taken, now);
            return None;
        }
        let still = now - self.last_progress.2;
        let lived = self.incarnations.iter().map(|incarnation| incarnation.lasted).sum();
        let is_too_long = restart::hangs(still, lived);
        if is_too_long {
            // Said again if it does not end by that.
            self.last_progress.2 = now;
        }
        is_too_long.then_some(still)
    }

    /// Whether its last process has ended because the connection to its relay was broken.
    pub fn has_lost_relay(&self) -> bool {
        self.incarnations.last().is_some_and(IncarnationRecord::has_lost_relay)
    }

    /// The process is restarted.
    pub fn begin(&mut self, polls: Option<PollCounts>, now: Instant) {
        self.began[1] = now;
        self.last_progress = (ProgressPoint::default(), 0, now);
        self.asked = 0;
        self.outputs.iter_mut().for_each(|output| output.begin_at(Position::default()));
        self.tagged = TaggedOutput::default();
        self.last_stderr = (0, 0);
        self.polls_before = polls.map_or(0, |polls| polls.furthest);
        (self.stage, self.has_fatal_notice) = (Stage::Silent, false);
        self.restarts += 1;
        self.is_replaying = true;
    }

    /// The present start has come to nothing. Another one has another number: what is left of this one has the record, if it
    /// has come so far.
    pub fn next_incarnation(&mut self) {
        self.restarts += 1;
    }

    /// The present start did not begin with the program, but where it stood like this.
    pub fn begin_at(&mut self, asked: usize, stage: Stage, printed: [Position; 2]) {
        (self.asked, self.stage) = (asked, stage);
        self.outputs.iter_mut().zip(printed).for_each(|(output, at)| output.begin_at(at));
        self.tagged = TaggedOutput::new(self.outputs[1].is_line_start());
    }

    /// What the present start has asked, how far it has come by that, and where in its output it is.
    pub fn position(&self) -> (usize, Stage, [Position; 2]) {
        (self.asked, self.stage, self.outputs.each_ref().map(OutputReplay::at))
    }

    /// How far its present process has come with its process manager.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Whether it has been restarted, and was not seen to be where it was.
    pub fn is_replaying(&self) -> bool {
        self.is_replaying
    }

    /// Whether it has asked, printed and looked for again all that was before; said once for each start.
    pub fn take_replayed(&mut self, polls: Option<PollCounts>) -> bool {
        let is_behind_in_polls = polls.is_some_and(|polls| polls.present < self.polls_before);
        let is_behind = self.asked < self.exchanges.len()
            || self.outputs.iter().any(OutputReplay::is_behind)
            || is_behind_in_polls;
        self.is_output_known |= polls.is_some() && !is_behind_in_polls;
        let was_replaying = self.is_replaying;
        self.is_replaying &= is_behind;
        was_replaying && !is_behind
    }

    /// How much of what was before it has done again, in percent; `None` before it has begun with that, or where nobody
    /// can say.
    pub fn percent(&self, polls: Option<PollCounts>) -> Option<u8> {
        let present = polls.map_or(0, |polls| polls.present);
        let share = u128::from(present) * 100 / u128::from(self.polls_before.max(1));
        (self.is_replaying && present > 0 && self.polls_before > 0).then(|| share.min(100) as u8)
    }

    pub fn ask(&mut self, question: &str) -> RequestReplay {
        self.stage = self.stage.after(question);
        let number = self.asked;
        self.asked += 1;
        match self.exchanges.get(number) {
            None => {
                if self.has_room(question.len()) {
                    self.exchanges.push(Exchange { question: question.to_string(), answer: None });
                }
                RequestReplay::New
            }
            Some(known) if known.question != question => {
                RequestReplay::Diverged { before: known.question.clone() }
            }
            Some(Exchange { answer: Some(answer), .. }) => RequestReplay::Answered(answer.clone()),
            Some(_) => RequestReplay::Pending,
        }
    }

    /// The oldest open question is answered. Whether the present start has asked it.
    pub fn answer(&mut self, answer: &str) -> bool {
        let Some(number) = self.exchanges.iter().position(|known| known.answer.is_none()) else {
            return true;
        };
        if self.has_room(answer.len()) {
            self.exchanges[number].answer = Some(answer.to_string());
        }
        number < self.asked
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
    pub fn print(
        &mut self,
        stream: Stream,
        bytes: &[u8],
        polls: Option<PollCounts>,
    ) -> Vec<PrintOutcome> {
        if stream == Stream::Stdout {
            return Vec::from_iter(self.compare(stream, bytes, polls));
        }
        let parts = self.tagged.split(bytes);
        parts.into_iter().filter_map(|part| self.compare_part(part, polls)).collect()
    }

    /// The present process has ended or stands still, so no line of a library is under way: what comes of the rest.
    pub fn end_print(&mut self, polls: Option<PollCounts>) -> Option<PrintOutcome> {
        self.tagged.end().and_then(|part| self.compare_part(part, polls))
    }

    fn compare_part(&mut self, part: Part, polls: Option<PollCounts>) -> Option<PrintOutcome> {
        match part {
            Part::Program(bytes) => self.compare(Stream::Stderr, &bytes, polls),
            Part::OfLibrary(line) => Some(PrintOutcome::OfLibrary(line)),
            Part::FatalNotice => {
                self.has_fatal_notice = true;
                None
            }
        }
    }

    /// The program has printed this.
    fn compare(
        &mut self,
        stream: Stream,
        bytes: &[u8],
        polls: Option<PollCounts>,
    ) -> Option<PrintOutcome> {
        if self.has_diverged || bytes.is_empty() {
            return None;
        }
        let output = &mut self.outputs[usize::from(stream == Stream::Stderr)];
        let present = polls.map_or(0, |polls| polls.present);
        if stream == Stream::Stderr && present != self.last_stderr.0 {
            self.last_stderr = (present, output.log().end().bytes);
        }
        // It is read later than it was printed, so the number of looks is not too small.
        let is_early = self.is_output_known && polls.is_some() && present < self.polls_before;
        let outcome = output.print(bytes);
        let divergence = match outcome {
            Ok(Replayed { new, .. }) if new.is_empty() => return None,
            Ok(Replayed { new, cut: Some((from, end)) }) => {
                return Some(PrintOutcome::ReplacesLastWords { new, from, gone: end - from });
            }
            Ok(Replayed { new, .. }) if is_early => output.more(&new),
            Ok(Replayed { new, .. }) => return Some(PrintOutcome::New(new)),
            Err(divergence) => divergence,
        };
        self.has_diverged = true;
        Some(PrintOutcome::Diverged(self.divergence_text(stream, &divergence)))
    }

    /// Its process has ended as it wanted. What the user reads if it has not printed all that was printed before.
    pub fn missing_output(&self) -> Option<String> {
        let streams = [Stream::Stdout, Stream::Stderr].into_iter().zip(&self.outputs);
        let mut divergences =
            streams.filter_map(|(stream, output)| Some((stream, output.end().err()?)));
        divergences
            .next()
            .filter(|_| !self.has_diverged)
            .map(|(stream, it)| self.divergence_text(stream, &it))
    }

    fn divergence_text(&self, stream: Stream, divergence: &Divergence) -> String {
        let name = ["standard output", "standard error"][usize::from(stream == Stream::Stderr)];
        format!(
            "does not repeat in incarnation {} what was printed before: on {name} {divergence}",
            self.restarts
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INIT: &str = "cmd=init pmi_version=1 pmi_subversion=1\n";

    fn polls(furthest: u64, present: u64) -> Option<PollCounts> {
        Some(PollCounts { furthest, present, taken: 0 })
    }

    #[test]
    fn the_same_questions_get_the_same_answers() {
        let mut replay = PmiReplay::new(Instant::now());
        assert_eq!(replay.ask("a"), RequestReplay::New);
        assert!(replay.answer("1"));
        assert_eq!(replay.ask("b"), RequestReplay::New);
        replay.begin(None, Instant::now());
        assert_eq!(replay.ask("a"), RequestReplay::Answered("1".into()));
        assert!(!replay.answer("2"), "it has not come so far");
        assert_eq!(replay.ask("b"), RequestReplay::Answered("2".into()));
        assert_eq!(replay.ask("c"), RequestReplay::New);
        replay.begin(None, Instant::now());
        assert_eq!(replay.ask("x"), RequestReplay::Diverged { before: "a".into() });
    }

    #[test]
    fn what_is_asked_without_end_is_not_kept() {
        let mut replay = PmiReplay::new(Instant::now());
        let long = "x".repeat(EXCHANGED_BYTES_MAX / 2);
        assert_eq!(replay.ask(&long), RequestReplay::New);
        assert!(replay.answer(&long) && !replay.has_asked_too_much());
        let ranks =
            TransferredRank { exchanges: replay.exchanges.clone(), ..TransferredRank::default() };
        assert_eq!(replay.ask("a"), RequestReplay::New);
        assert!(replay.answer("1") && replay.has_asked_too_much());
        assert_eq!((replay.exchanges.len(), replay.asked), (0, 2));
        let mut adopted = PmiReplay::adopted(&ranks, None, Instant::now());
        assert_eq!(adopted.ask(&long), RequestReplay::Answered(long));
        adopted.ask("a");
        assert!(adopted.has_asked_too_much(), "counted on all nodes");
    }

    #[test]
    fn replay_ends_when_all_is_asked_printed_and_polled_again() {
        let mut replay = PmiReplay::new(Instant::now());
        assert!(!replay.take_replayed(polls(9, 9)), "it has never been away");
        replay.ask("a");
        replay.print(Stream::Stdout, b"abc", polls(9, 9));
        replay.print(Stream::Stderr, b"x", polls(9, 9));
        assert_eq!(replay.percent(polls(9, 9)), None);
        replay.begin(polls(200, 200), Instant::now());
        assert_eq!(replay.percent(polls(200, 0)), None, "it has not begun");
        replay.print(Stream::Stdout, b"abc", polls(200, 50));
        replay.ask("a");
        assert!(!replay.take_replayed(polls(200, 86)));
        assert_eq!((replay.percent(polls(200, 86)), replay.percent(None)), (Some(43), None));
        replay.print(Stream::Stderr, b"x", polls(200, 86));
        assert!(!replay.take_replayed(polls(200, 199)) && replay.is_replaying());
        assert!(replay.take_replayed(polls(200, 200)) && !replay.take_replayed(polls(200, 200)));
        assert_eq!(replay.percent(polls(201, 201)), None);
        replay.begin(None, Instant::now());
        replay.ask("a");
        replay.print(Stream::Stdout, b"abc", None);
        assert!(!replay.take_replayed(None));
        replay.print(Stream::Stderr, b"x", None);
        assert!(replay.take_replayed(None), "where nobody counts looks");
    }

    #[test]
    fn every_incarnation_is_recorded_with_its_progress() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut replay = PmiReplay::new(now);
        replay.ask(INIT);
        replay.print(Stream::Stdout, b"abc", None);
        let killed = Ending::Killed(9);
        assert_eq!(replay.end(killed, polls(5, 5), later(2)).len(), 1);
        replay.begin(polls(5, 5), later(3));
        replay.print(Stream::Stderr, b"x\x1elandbridge cannot go on\n", polls(5, 5));
        let incarnations = replay.end(Ending::Exited(3), polls(5, 4), later(7));
        let point = |asked, printed, polls| ProgressPoint { asked, printed, polls };
        assert_eq!(incarnations[0].point, point(1, 3, 5));
        let [began, lasted] = [3, 4].map(Duration::from_secs);
        let (ending, point) = (Ending::Exited(3), point(0, 1, 4));
        let (stage, has_fatal_notice) = (Stage::Silent, true);
        assert_eq!(
            incarnations[1],
            IncarnationRecord { began, lasted, ending, stage, has_fatal_notice, point }
        );
    }

    #[test]
    fn a_replay_without_progress_hangs_and_one_that_polls_does_not() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut replay = PmiReplay::new(now);
        assert_eq!(replay.hangs(polls(5, 5), later(1_000)), None, "it has never been away");
        replay.end(Ending::Killed(9), polls(5, 5), later(10));
        replay.begin(polls(5, 5), later(10));
        assert_eq!(replay.hangs(polls(5, 0), later(70)), None);
        assert_eq!(replay.hangs(polls(5, 1), later(75)), None);
        assert_eq!(replay.hangs(polls(5, 1), later(135)), None);
        assert_eq!(replay.hangs(polls(5, 1), later(136)), Some(Duration::from_secs(61)));
        assert_eq!(replay.hangs(None, later(300)), None, "nobody knows");
    }

    #[test]
    fn a_slow_replay_does_not_hang() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut replay = PmiReplay::new(now);
        replay.begin(polls(9, 9), now);
        // At one look; the relay reads it from a slow disk.
        for step in 1..100 {
            let polls = Some(PollCounts { furthest: 9, present: 4, taken: step });
            assert_eq!(replay.hangs(polls, later(50 * step)), None);
        }
        let polls = Some(PollCounts { furthest: 9, present: 4, taken: 99 });
        assert_eq!(replay.hangs(polls, later(5_010)), None);
        assert!(replay.hangs(polls, later(5_011)).is_some(), "nothing has come for long");
    }

    #[test]
    fn a_new_incarnation_begins_at_the_first_pmi_request() {
        let mut replay = PmiReplay::new(Instant::now());
        replay.ask(INIT);
        assert_eq!(replay.stage(), Stage::Joined);
        replay.ask("cmd=finalize\n");
        assert_eq!(replay.stage(), Stage::Finalized);
        replay.begin(None, Instant::now());
        assert_eq!(replay.stage(), Stage::Silent);
        replay.ask(INIT);
        replay.ask("cmd=get key=finalize\n");
        assert_eq!(replay.stage(), Stage::Joined);
    }

    fn new(bytes: &[u8]) -> Vec<PrintOutcome> {
        vec![PrintOutcome::New(bytes.to_vec())]
    }

    #[test]
    fn nothing_is_printed_twice() {
        let mut replay = PmiReplay::new(Instant::now());
        assert_eq!(replay.print(Stream::Stdout, b"abc", None), new(b"abc"));
        replay.begin(None, Instant::now());
        assert_eq!(replay.print(Stream::Stdout, b"ab", None), []);
        assert_eq!(replay.print(Stream::Stdout, b"cde", None), new(b"de"));
        assert_eq!(replay.print(Stream::Stderr, b"f", None), new(b"f"));
    }

    /// The one line for the user.
    fn diverged(prints: &[PrintOutcome]) -> &str {
        let [PrintOutcome::Diverged(text)] = prints else { panic!("{prints:?}") };
        text
    }

    #[test]
    fn another_line_ends_it_and_nothing_more_is_shown() {
        let mut replay = PmiReplay::new(Instant::now());
        replay.print(Stream::Stdout, b"one\nx = 1\n", polls(5, 5));
        replay.begin(polls(5, 5), Instant::now());
        let prints = replay.print(Stream::Stdout, b"one\nx = 2\nthree\n", polls(5, 3));
        let expected = "does not repeat in incarnation 1 what was printed before: on standard output line 2 is \
                        \"x = 2\", and was \"x = 1\"";
        assert_eq!(diverged(&prints), expected);
        assert_eq!(replay.print(Stream::Stdout, b"four\n", polls(9, 9)), []);
        let own = replay.print(Stream::Stderr, b"x\n\x1elandbridge[1]: x\n", polls(9, 9));
        assert_eq!(own, [PrintOutcome::OfLibrary(b"landbridge[1]: x\n".to_vec())]);
    }

    #[test]
    fn a_line_too_many_or_too_few_ends_it_as_well() {
        let mut replay = PmiReplay::new(Instant::now());
        replay.print(Stream::Stdout, b"one\n", polls(5, 5));
        replay.begin(polls(5, 5), Instant::now());
        assert!(
            replay.missing_output().unwrap().contains("on standard output it ended after 0 bytes")
        );
        assert_eq!(replay.print(Stream::Stdout, b"one\n", polls(5, 2)), []);
        assert_eq!(replay.missing_output(), None);
        let prints = replay.print(Stream::Stdout, b"two\n", polls(5, 4));
        assert!(
            diverged(&prints).contains("line 2 is \"two\", and there was nothing"),
            "{prints:?}"
        );
        // What a lost node has not told may come.
        let ranks = TransferredRank { restarts: 1, ..TransferredRank::default() };
        let mut adopted = PmiReplay::adopted(&ranks, polls(5, 5), Instant::now());
        assert_eq!(adopted.print(Stream::Stdout, b"one\n", polls(5, 2)), new(b"one\n"));
        adopted.take_replayed(polls(5, 5));
        adopted.begin(polls(5, 5), Instant::now());
        assert_eq!(adopted.print(Stream::Stdout, b"one\n", polls(5, 2)), []);
        diverged(&adopted.print(Stream::Stdout, b"two\n", polls(5, 2)));
    }

    #[test]
    fn what_an_error_says_last_need_not_come_again() {
        let say = |ending, after| {
            let mut replay = PmiReplay::new(Instant::now());
            replay.print(Stream::Stderr, b"one\n", polls(3, 3));
            replay.print(Stream::Stderr, b"Traceback\n", polls(5, 5));
            replay.end(ending, polls(5, after), Instant::now());
            replay.begin(polls(5, 0), Instant::now());
            replay.print(Stream::Stderr, b"one\ntwo\n", polls(6, 5))
        };
        let other =
            || vec![PrintOutcome::ReplacesLastWords { new: b"two\n".to_vec(), from: 4, gone: 10 }];
        assert_eq!(say(Ending::Exited(1), 5), other());
        assert_eq!(say(Ending::Killed(libc::SIGSEGV), 5), other());
        // It has looked for messages since, or had no time for words.
        for (ending, after) in [(Ending::Exited(1), 6), (Ending::Killed(libc::SIGKILL), 5)] {
            diverged(&say(ending, after));
        }
    }

    #[test]
    fn what_our_libraries_say_is_always_shown_and_shifts_nothing() {
        let mut replay = PmiReplay::new(Instant::now());
        let said = |replay: &mut PmiReplay, bytes: &[u8]| {
            let prints = replay.print(Stream::Stderr, bytes, None);
            let bytes = prints.into_iter().map(|print| match print {
                PrintOutcome::New(bytes) | PrintOutcome::OfLibrary(bytes) => bytes,
                other => panic!("{other:?}"),
            });
            bytes.collect::<Vec<_>>().concat()
        };
        let line = |pid: &str| format!("landbridge[{pid}]: Info: x\n").into_bytes();
        let tagged = |pid: &str| [b"\x1e", &line(pid)[..]].concat();
        assert_eq!(
            said(&mut replay, &[b"one\n", &tagged("1")[..]].concat()),
            [b"one\n", &line("1")[..]].concat()
        );
        replay.begin(None, Instant::now());
        assert_eq!(said(&mut replay, &tagged("23")), line("23"));
        assert_eq!(said(&mut replay, &tagged("23")), line("23"), "one more than before");
        assert_eq!(said(&mut replay, b"one\ntwo\n"), b"two\n");
        assert_eq!(said(&mut replay, b"three\x1e"), b"three");
        assert_eq!(replay.end_print(None), new(b"\x1e").pop());
    }
}
