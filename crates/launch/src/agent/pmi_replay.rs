//! PMI replay of a rank that may be restarted: the rank's PMI requests with their answers, and what
//! the rank has printed.
//!
//! In: requests and output of the present incarnation. Out: recorded answers to repeated requests,
//! and only such output as no earlier incarnation has printed. A new incarnation sends the same
//! requests in the same order and receives the same answers. The replay compares repeated output
//! with the recorded output and drops it. Output of the project's own libraries and of libfabric
//! (`tagged_output`) differs between incarnations, and is always shown. The replay records how each
//! incarnation has ended, because this decides whether another one follows (`restart`).
//!
//! What may never happen: the user sees output twice; an incarnation that diverges goes on
//! unnoticed.

use std::time::{Duration, Instant};

use landbridge_proto::id::INCARNATIONS_PER_NODE;

use super::tagged_output::{Part, TaggedOutput};
use crate::control::Stream;
use crate::control::rank_state::{Exchange, TransferredRank};
use crate::ending::Ending;
use crate::output_log::{Divergence, OutputReplay, Position, Replayed};
use crate::pmi::server::Stage;
use crate::restart::{self, IncarnationRecord, ProgressPoint};

/// How often a rank has polled for messages, where the polls are counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PollCounts {
    /// Polls of the incarnation that came furthest.
    pub furthest: u64,
    /// Polls of the present incarnation.
    pub present: u64,
    /// Frames delivered during replay, by all incarnations; one poll may deliver many.
    pub taken: u64,
}

/// Most bytes of a rank's PMI requests and answers that are kept. Spawns of a job cannot exceed
/// this bound; a job may publish and look up names without end.
pub const EXCHANGED_BYTES_MAX: usize = 64 << 20;

/// The PMI replay of one rank; the module head has the rules.
#[derive(Debug)]
pub struct PmiReplay {
    requests: Requests,
    output: PrintedOutput,
    /// Furthest poll count of the incarnations before the present one.
    polls_before: u64,
    /// PMI stage of the present incarnation.
    stage: Stage,
    /// The present incarnation has printed that it cannot continue.
    has_fatal_notice: bool,
    /// How often the rank has been restarted.
    pub restarts: u32,
    /// How often the rank has been restarted on another node.
    moves: u32,
    /// The rank was restarted and is not live yet.
    is_replaying: bool,
    /// Progress point and redelivered frames of the present incarnation at its last progress, with
    /// the time.
    last_progress: (ProgressPoint, u64, Instant),
    /// When the first incarnation began, and when the present one began.
    began: [Instant; 2],
    /// Incarnations that have ended.
    incarnations: Vec<IncarnationRecord>,
    /// The rank has called MPI_Abort.
    pub has_aborted: bool,
}

/// The requests of all incarnations, and the answers.
#[derive(Debug, Default)]
struct Requests {
    exchanges: Vec<Exchange>,
    /// How many of `exchanges` the present incarnation has reached.
    asked: usize,
    /// Bytes of all exchanges. Beyond [`EXCHANGED_BYTES_MAX`] no exchanges are kept.
    exchanged_bytes: usize,
}

/// What incarnations have printed.
#[derive(Debug, Default)]
struct PrintedOutput {
    /// Standard output and standard error: what any incarnation has printed, and the position of
    /// the present one.
    streams: [OutputReplay; 2],
    /// The present incarnation has printed something else than earlier ones. The rest of its output
    /// is dropped.
    has_diverged: bool,
    /// All output before the furthest poll is known. Not so after the loss of a node, until the
    /// rank has polled as often again.
    is_known: bool,
    /// Polls of the present incarnation when it last printed on standard error, and the length of
    /// that stream when the poll count changed: what came after that length may be last words.
    last_stderr: (u64, u64),
    /// Separates the libraries' lines from the program's on standard error.
    tagged: TaggedOutput,
}

/// How the replay answers a PMI request.
#[derive(Debug, PartialEq, Eq)]
pub enum RequestReplay {
    /// No earlier incarnation has sent this request.
    New,
    /// The recorded answer.
    Answered(String),
    /// An earlier incarnation has sent this request, and the answer is still open.
    Pending,
    /// An earlier incarnation has sent another request at this point.
    Diverged { before: String },
}

/// What to do with printed bytes.
#[derive(Debug, PartialEq, Eq)]
pub enum PrintOutcome {
    /// No earlier incarnation has printed these bytes.
    New(Vec<u8>),
    /// New bytes that replace `gone` bytes from position `from` on: the last words of an earlier
    /// incarnation, which are not repeated.
    ReplacesLastWords { new: Vec<u8>, from: u64, gone: u64 },
    /// The bytes come from a library of the project or from libfabric.
    OfLibrary(Vec<u8>),
    /// The bytes differ from what was printed before; the text is for the user.
    Diverged(String),
}

impl PmiReplay {
    /// The replay of a rank whose first incarnation begins.
    pub fn new(now: Instant) -> PmiReplay {
        PmiReplay {
            requests: Requests::default(),
            output: PrintedOutput { is_known: true, ..PrintedOutput::default() },
            polls_before: 0,
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

    /// The replay of a rank that comes from a lost node, and whose first incarnation here begins.
    pub fn adopted(from: &TransferredRank, polls: Option<PollCounts>, now: Instant) -> PmiReplay {
        PmiReplay {
            // An `Instant` cannot lie before the start of this host, so the age is cut there.
            began: [now.checked_sub(from.age).unwrap_or(now), now],
            incarnations: from.incarnations.clone(),
            polls_before: polls.map_or(0, |polls| polls.furthest),
            requests: Requests {
                exchanged_bytes: from.exchanges.iter().map(Exchange::bytes).sum(),
                exchanges: from.exchanges.clone(),
                asked: 0,
            },
            output: PrintedOutput::adopted(from),
            restarts: from.restarts,
            moves: from.moves,
            is_replaying: true,
            ..PmiReplay::new(now)
        }
    }

    /// The number of the present incarnation, for its relay: higher than any number on an earlier
    /// node of the rank, whatever that node still starts.
    pub fn incarnation(&self) -> u32 {
        self.moves * INCARNATIONS_PER_NODE + self.restarts
    }

    /// Notes that the rank has called MPI_Abort.
    pub fn abort(&mut self) {
        self.has_aborted = true;
    }

    /// Records the end of the present process; returns the records of all processes of the rank,
    /// this one last.
    pub fn end(
        &mut self,
        ending: Ending,
        polls: Option<PollCounts>,
        now: Instant,
    ) -> &[IncarnationRecord] {
        self.detect_last_words(ending, polls);
        let [first, present] = self.began;
        self.incarnations.push(IncarnationRecord {
            began: present - first,
            lasted: now - present,
            ending,
            stage: self.stage,
            has_fatal_notice: self.has_fatal_notice,
            has_gone_back: false,
            point: self.point(polls),
        });
        &self.incarnations
    }

    /// Records that the present process was ended because another one of its recovery unit is to
    /// begin again.
    pub fn go_back(&mut self, ending: Ending, polls: Option<PollCounts>, now: Instant) {
        self.end(ending, polls, now);
        self.incarnations.iter_mut().last().into_iter().for_each(|last| last.has_gone_back = true);
    }

    /// How far the present process is.
    fn point(&self, polls: Option<PollCounts>) -> ProgressPoint {
        let polls = polls.map_or(0, |polls| polls.present);
        let printed = self.output.streams.iter().map(|output| output.at().bytes).sum();
        ProgressPoint { asked: self.requests.asked, printed, polls }
    }

    /// Finds the last words of a process that has ended by an error of its own: text on standard
    /// error that the next incarnation does not repeat. A process that ends by SIGKILL or the like
    /// prints no last words.
    fn detect_last_words(&mut self, ending: Ending, polls: Option<PollCounts>) {
        let has_words = ending != Ending::Exited(0) && restart::is_program_fault(ending);
        let error = &mut self.output.streams[1];
        let (last_polls, from) = self.output.last_stderr;
        let is_last = polls.is_some_and(|polls| polls.present > 0 && polls.present == last_polls);
        if has_words && is_last && !error.is_behind() {
            error.set_last_words(from);
        }
    }

    /// Byte of standard error from which on it may hold last words of an ended process.
    pub fn last_words(&self) -> Option<u64> {
        self.output.streams[1].last_words()
    }

    /// How long the replay has made no progress, if that is too long. A rank that computes or waits
    /// for others still polls, and a rank that waits for the relay's disk still receives frames.
    /// Where polls are not counted, a hang cannot be detected.
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
            // The report is repeated if the process does not end after it.
            self.last_progress.2 = now;
        }
        is_too_long.then_some(still)
    }

    /// Whether the last process has ended because its connection to the relay was lost.
    pub fn has_lost_relay(&self) -> bool {
        self.incarnations.last().is_some_and(IncarnationRecord::has_lost_relay)
    }

    /// Begins another incarnation from the start of the program.
    pub fn begin(&mut self, polls: Option<PollCounts>, now: Instant) {
        self.began[1] = now;
        self.last_progress = (ProgressPoint::default(), 0, now);
        self.requests.asked = 0;
        self.output.streams.iter_mut().for_each(|output| output.begin_at(Position::default()));
        self.output.tagged = TaggedOutput::default();
        self.output.last_stderr = (0, 0);
        self.polls_before = polls.map_or(0, |polls| polls.furthest);
        (self.stage, self.has_fatal_notice) = (Stage::Silent, false);
        self.restarts += 1;
        self.is_replaying = true;
    }

    /// Takes another incarnation number after a failed start, because what is left of the failed
    /// incarnation may have attached to the record.
    pub fn next_incarnation(&mut self) {
        self.restarts += 1;
    }

    /// Sets where the present incarnation begins: not at the start of the program, but at these
    /// positions of an image.
    pub fn begin_at(&mut self, asked: usize, stage: Stage, printed: [Position; 2]) {
        (self.requests.asked, self.stage) = (asked, stage);
        self.output.streams.iter_mut().zip(printed).for_each(|(output, at)| output.begin_at(at));
        self.output.tagged = TaggedOutput::new(self.output.streams[1].is_line_start());
    }

    /// Requests that the present incarnation has sent, its PMI stage, and its positions in the
    /// output streams.
    pub fn position(&self) -> (usize, Stage, [Position; 2]) {
        (self.requests.asked, self.stage, self.output.streams.each_ref().map(OutputReplay::at))
    }

    /// PMI stage of the present incarnation.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Whether the present incarnation has printed anything.
    pub fn has_printed(&self) -> bool {
        self.output.streams.iter().any(OutputReplay::has_printed)
    }

    /// Whether the rank was restarted and is not live yet.
    pub fn is_replaying(&self) -> bool {
        self.is_replaying
    }

    /// Whether the rank has just become live: it has repeated all requests, output and polls. True
    /// once for each incarnation.
    pub fn take_replayed(&mut self, polls: Option<PollCounts>) -> bool {
        let is_behind_in_polls = polls.is_some_and(|polls| polls.present < self.polls_before);
        let is_behind = self.requests.asked < self.requests.exchanges.len()
            || self.output.streams.iter().any(OutputReplay::is_behind)
            || is_behind_in_polls;
        self.output.is_known |= polls.is_some() && !is_behind_in_polls;
        let was_replaying = self.is_replaying;
        self.is_replaying &= is_behind;
        was_replaying && !is_behind
    }

    /// Replayed share of the polls before this incarnation, in percent; `None` if the rank is live,
    /// has not polled yet, or its polls are not counted.
    pub fn percent(&self, polls: Option<PollCounts>) -> Option<u8> {
        let present = polls.map_or(0, |polls| polls.present);
        let share = u128::from(present) * 100 / u128::from(self.polls_before.max(1));
        (self.is_replaying && present > 0 && self.polls_before > 0).then(|| share.min(100) as u8)
    }

    pub fn ask(&mut self, question: &str) -> RequestReplay {
        self.stage = self.stage.after(question);
        let number = self.requests.asked;
        self.requests.asked += 1;
        match self.requests.exchanges.get(number) {
            None => {
                if self.has_room(question.len()) {
                    self.requests
                        .exchanges
                        .push(Exchange { question: question.to_string(), answer: None });
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

    /// Records the answer to the oldest open request; returns whether the present incarnation has
    /// sent that request.
    pub fn answer(&mut self, answer: &str) -> bool {
        let Some(number) = self.requests.exchanges.iter().position(|known| known.answer.is_none())
        else {
            return true;
        };
        if self.has_room(answer.len()) {
            self.requests.exchanges[number].answer = Some(answer.to_string());
        }
        number < self.requests.asked
    }

    fn has_room(&mut self, bytes: usize) -> bool {
        self.requests.exchanged_bytes += bytes;
        if self.has_asked_too_much() {
            self.requests.exchanges = Vec::new();
        }
        !self.has_asked_too_much()
    }

    /// Whether requests and answers exceed [`EXCHANGED_BYTES_MAX`], so that the rank cannot be
    /// restarted.
    pub fn has_asked_too_much(&self) -> bool {
        self.requests.exchanged_bytes > EXCHANGED_BYTES_MAX
    }

    /// What to do with bytes that the present incarnation has printed at these poll counts.
    pub fn print(
        &mut self,
        stream: Stream,
        bytes: &[u8],
        polls: Option<PollCounts>,
    ) -> Vec<PrintOutcome> {
        if stream == Stream::Stdout {
            return Vec::from_iter(self.compare(stream, bytes, polls));
        }
        let parts = self.output.tagged.split(bytes);
        parts.into_iter().filter_map(|part| self.compare_part(part, polls)).collect()
    }

    /// What to do with the rest of standard error, once the process has ended or stands still and
    /// no library line is incomplete any more.
    pub fn end_print(&mut self, polls: Option<PollCounts>) -> Option<PrintOutcome> {
        self.output.tagged.end().and_then(|part| self.compare_part(part, polls))
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

    /// Compares output of the program with the recorded output.
    fn compare(
        &mut self,
        stream: Stream,
        bytes: &[u8],
        polls: Option<PollCounts>,
    ) -> Option<PrintOutcome> {
        if self.output.has_diverged || bytes.is_empty() {
            return None;
        }
        let output = &mut self.output.streams[usize::from(stream == Stream::Stderr)];
        let present = polls.map_or(0, |polls| polls.present);
        if stream == Stream::Stderr && present != self.output.last_stderr.0 {
            self.output.last_stderr = (present, output.log().end().bytes);
        }
        // Output is read later than it was printed, so the poll count is never too low.
        let is_early = self.output.is_known && polls.is_some() && present < self.polls_before;
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
        self.output.has_diverged = true;
        Some(PrintOutcome::Diverged(self.divergence_text(stream, &divergence)))
    }

    /// For a process that has ended regularly: what the user reads if the process has not printed
    /// all that was printed before.
    pub fn missing_output(&self) -> Option<String> {
        let streams = [Stream::Stdout, Stream::Stderr].into_iter().zip(&self.output.streams);
        let mut divergences =
            streams.filter_map(|(stream, output)| Some((stream, output.end().err()?)));
        divergences
            .next()
            .filter(|_| !self.output.has_diverged)
            .map(|(stream, it)| self.divergence_text(stream, &it))
    }

    /// For a process that has ended with exit code 0: what the user reads if the process has not
    /// asked its process manager all that was asked before. Without it, a program that ends before
    /// `MPI_Init` this time would count as one that has done its work.
    pub fn missing_requests(&self) -> Option<String> {
        let (asked, before) = (self.requests.asked, self.requests.exchanges.len());
        (asked < before).then(|| {
            format!(
                "does not repeat in incarnation {} what it did before: it ended after {asked} of \
                 {before} PMI requests",
                self.restarts
            )
        })
    }

    fn divergence_text(&self, stream: Stream, divergence: &Divergence) -> String {
        let name = ["standard output", "standard error"][usize::from(stream == Stream::Stderr)];
        format!(
            "does not repeat in incarnation {} what was printed before: on {name} {divergence}",
            self.restarts
        )
    }
}

impl PrintedOutput {
    fn adopted(from: &TransferredRank) -> PrintedOutput {
        let mut streams = from.outputs.clone().map(OutputReplay::adopted);
        from.last_words.into_iter().for_each(|at| streams[1].set_last_words(at));
        PrintedOutput { streams, ..PrintedOutput::default() }
    }
}

#[cfg(test)]
mod tests;
