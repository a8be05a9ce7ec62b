//! A simulated process that may be killed: a program, its logs, and where its replay stands.
//!
//! The program is deterministic but for what its polls deliver and at which time. It sends each
//! other process the same number of messages. Which message it sends at a poll, if any, depends on
//! all that was delivered before, and on the number of the poll. So an incarnation that sees
//! anything else sends other messages.
//!
//! What enters: logs with what other processes and earlier incarnations have done. What leaves:
//! frames, deliveries, and the events that the program has seen. What may never happen: a message
//! is not the next one of its source, or not as it was sent.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use landbridge_drive::link::node_log::{self, ClosedLogs, NodeLogs};
use landbridge_proto::path::time::Time;
use landbridge_proto::replay::{Determinant, PollAction, ReplayCursor};
use landbridge_proto::wire::frame::HEADER_BYTES;

use super::super::random::Random;
use super::super::{Violation, require};
use super::LogFault;
use super::torn::{LastAppend, TornAppend};

/// Bytes of a message before its filler: its source, its number, and the state of its sender.
const MESSAGE_HEAD_BYTES: usize = 24;
/// One in so many deliveries is not noted, if that fault is planted.
const UNNOTED_EACH: u64 = 5;

/// What a process has to do in this run.
#[derive(Clone, Copy)]
pub struct LoggedTask {
    pub index: usize,
    /// Number of processes.
    pub count: usize,
    /// Messages to each other process.
    pub each: u64,
    /// Bytes of a filler at most.
    pub bytes_max: u64,
    pub seed: u64,
    pub planted: Option<LogFault>,
}

/// A message that the program has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedMessage {
    source: usize,
    number: u64,
    /// The state of the program after it.
    state: u64,
}

/// The state of the program, which an image holds.
#[derive(Clone)]
struct LoggedProgram {
    task: LoggedTask,
    state: u64,
    polls: u64,
    /// By process.
    sent: Vec<u64>,
    received: Vec<u64>,
    events: Vec<ReceivedMessage>,
}

impl LoggedProgram {
    fn new(task: LoggedTask) -> LoggedProgram {
        let zeros = vec![0; task.count];
        let state = mix(task.seed, task.index as u64);
        LoggedProgram {
            task,
            state,
            polls: 0,
            sent: zeros.clone(),
            received: zeros,
            events: Vec::new(),
        }
    }

    fn is_done(&self) -> bool {
        let LoggedTask { index, each, .. } = self.task;
        let is_all = |numbers: &[u64]| {
            numbers.iter().enumerate().all(|(process, number)| process == index || *number == each)
        };
        is_all(&self.sent) && is_all(&self.received)
    }

    /// Handles a message.
    fn receive(&mut self, payload: &[u8]) -> Result<(), Violation> {
        let index = self.task.index;
        require!(payload.len() >= MESSAGE_HEAD_BYTES, "{index} gets {} bytes", payload.len());
        let word = |place: usize| {
            let bytes = payload[8 * place..8 * place + 8].try_into();
            u64::from_le_bytes(bytes.unwrap_or_default())
        };
        let [source, number, state] = [word(0), word(1), word(2)];
        let source = source as usize;
        require!(source < self.task.count && source != index, "{index} gets from {source}");
        let expected = self.received[source];
        require!(number == expected, "{index} gets message {number} of {source} for {expected}");
        let filler = &payload[MESSAGE_HEAD_BYTES..];
        require!(
            filler.iter().all(|byte| *byte == filler_byte(source, number)),
            "message {number} of {source} to {index} was changed"
        );
        self.received[source] += 1;
        self.state = mix(self.state ^ source as u64, state ^ number);
        self.events.push(ReceivedMessage { source, number, state: self.state });
        Ok(())
    }

    /// The messages that the program sends at this poll: target and payload.
    fn messages(&self) -> Vec<(usize, Vec<u8>)> {
        let LoggedTask { index, count, each, bytes_max, .. } = self.task;
        let mut draw = Random::new(mix(self.state, self.polls));
        let mut sent = self.sent.clone();
        let mut messages = Vec::new();
        for _ in 0..draw.pick(&[0, 0, 1, 1, 3]) {
            let open: Vec<usize> =
                (0..count).filter(|to| *to != index && sent[*to] < each).collect();
            if open.is_empty() {
                break;
            }
            let to = draw.pick(&open);
            let head = [index as u64, sent[to], self.state];
            let mut payload = head.map(u64::to_le_bytes).concat();
            let filler = draw.size(bytes_max) as usize;
            payload.resize(MESSAGE_HEAD_BYTES + filler, filler_byte(index, sent[to]));
            messages.push((to, payload));
            sent[to] += 1;
        }
        messages
    }
}

/// What an image of a process holds.
#[derive(Clone)]
pub struct ProcessImage {
    pub number: u64,
    program: LoggedProgram,
    logs: ClosedLogs,
    replay: ReplayCursor,
}

/// What is left to chance in a step.
pub struct Chance<'a> {
    /// Frames that a live poll delivers at most.
    pub frames_max: u64,
    /// Microseconds by which the clock has advanced, which a live poll may see.
    pub micros: u64,
    /// The process is killed after so many of its actions.
    pub dies_after: Option<u64>,
    /// If that is an append to a log in this file: which of its stores are missing.
    pub torn: Option<(BorrowedFd<'a>, TornAppend)>,
}

/// How a step has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepEnd {
    Alive,
    /// Killed. The delivery of the step, if there was one, was noted, or not.
    Killed {
        is_noted: bool,
    },
}

pub struct LoggedProcess {
    program: LoggedProgram,
    pub logs: NodeLogs,
    replay: ReplayCursor,
    /// Frames of the delivery that is replayed which have not arrived on this node yet.
    awaited: u32,
    /// The process has begun on another node, or with others of its unit: what it receives again
    /// comes once more.
    awaits_frames: bool,
    pub replayed: u64,
    /// The kill has torn an append.
    pub has_torn_append: bool,
}

impl LoggedProcess {
    /// The first incarnation, or one that begins from the start.
    pub fn begin(
        task: LoggedTask,
        job: &str,
        bytes_max: u64,
        file: BorrowedFd<'_>,
    ) -> io::Result<LoggedProcess> {
        let logs = ClosedLogs::new(task.index, job.as_bytes(), bytes_max, task.count)?;
        LoggedProcess::open(LoggedProgram::new(task), logs, ReplayCursor::new(Time(0)), file)
    }

    /// An incarnation that begins from an image.
    pub fn restore(image: &ProcessImage, file: BorrowedFd<'_>) -> io::Result<LoggedProcess> {
        let logs = image.logs.clone().elsewhere();
        LoggedProcess::open(image.program.clone(), logs, image.replay.clone(), file)
    }

    fn open(
        program: LoggedProgram,
        logs: ClosedLogs,
        mut replay: ReplayCursor,
        file: BorrowedFd<'_>,
    ) -> io::Result<LoggedProcess> {
        let logs = logs.open(file)?;
        let earlier = logs.earlier();
        replay.begin_from_logs(earlier.deliveries, earlier.sent);
        Ok(LoggedProcess {
            program,
            logs,
            replay,
            awaited: 0,
            awaits_frames: false,
            replayed: 0,
            has_torn_append: false,
        })
    }

    /// The process has begun on another node, or with others of its unit.
    pub fn awaits_frames(&mut self) {
        self.awaits_frames = true;
    }

    /// Takes an image, and goes on.
    ///
    /// # Errors
    /// The logs cannot be opened again.
    pub fn take_image(
        self,
        number: u64,
        file: BorrowedFd<'_>,
    ) -> io::Result<(LoggedProcess, ProcessImage)> {
        let LoggedProcess { program, logs, replay, replayed, .. } = self;
        let image = ProcessImage { number, program, logs: logs.close(), replay };
        let process = LoggedProcess::restore(&image, file)?;
        Ok((LoggedProcess { replayed, ..process }, image))
    }

    pub fn events(&self) -> &[ReceivedMessage] {
        &self.program.events
    }

    pub fn polls(&self) -> u64 {
        self.program.polls
    }

    pub fn is_done(&self) -> bool {
        self.program.is_done()
    }

    /// Whether the process repeats what earlier incarnations have done. `polls_before`: how many
    /// polls they have made.
    pub fn is_replaying(&self, polls_before: u64) -> bool {
        self.awaited > 0 || self.replay.is_replaying(self.program.polls < polls_before)
    }

    /// How far the process is, for the developer.
    pub fn state(&self, polls_before: u64) -> String {
        let LoggedProgram { sent, received, polls, .. } = &self.program;
        let (deliveries, earlier) = (self.replay.next_number(), self.logs.earlier());
        format!(
            "sent {sent:?}, received {received:?}, poll {polls} of {polls_before}, {deliveries} \
             deliveries, earlier {earlier:?}"
        )
    }

    /// Lets the program poll once, and send what follows.
    ///
    /// # Errors
    /// The program sees, or does, what an earlier incarnation did not.
    pub fn step(&mut self, chance: &Chance<'_>, polls_before: u64) -> Result<StepEnd, Violation> {
        let mut left = chance.dies_after;
        if self.awaited > 0 {
            return self.go_on_replaying(chance, &mut left);
        }
        self.program.polls += 1;
        if self.replay.needs_determinant() {
            let next = self.logs.next_delivery().map_err(|error| self.failed(&error))?;
            let Some([polls, frames, micros]) = next else {
                let index = self.program.task.index;
                return Err(Violation(format!("a delivery of {index} is missing")));
            };
            let frames = frames as u32;
            self.replay.take_local_determinant(Determinant { polls, frames, micros });
        }
        match self.replay.poll(self.program.polls <= polls_before) {
            PollAction::Nothing => (),
            PollAction::Replay(Determinant { frames, micros, .. }) => {
                self.program.state = mix(self.program.state, micros);
                self.awaited = frames;
                if frames > 0 {
                    return self.go_on_replaying(chance, &mut left);
                }
                self.replayed += 1;
            }
            PollAction::Live => {
                if self.deliver(chance, &mut left)? {
                    return Ok(StepEnd::Killed { is_noted: false });
                }
            }
        }
        self.end_step(chance, &mut left)
    }

    /// Sends what the program sends at this poll.
    fn end_step(
        &mut self,
        chance: &Chance<'_>,
        left: &mut Option<u64>,
    ) -> Result<StepEnd, Violation> {
        match self.send(chance, left)? {
            true => Ok(StepEnd::Killed { is_noted: true }),
            false => Ok(StepEnd::Alive),
        }
    }

    /// Repeats a delivery, as far as its frames are there.
    fn go_on_replaying(
        &mut self,
        chance: &Chance<'_>,
        left: &mut Option<u64>,
    ) -> Result<StepEnd, Violation> {
        while self.awaited > 0 {
            if !self.receive()? {
                let index = self.program.task.index;
                require!(self.awaits_frames, "a frame of a delivery of {index} is missing");
                return Ok(StepEnd::Alive);
            }
            self.awaited -= 1;
            if is_killed(left) {
                return Ok(StepEnd::Killed { is_noted: true });
            }
        }
        self.replayed += 1;
        self.end_step(chance, left)
    }

    /// Delivers what has arrived, and notes it; returns whether the process is killed before that.
    fn deliver(&mut self, chance: &Chance<'_>, left: &mut Option<u64>) -> Result<bool, Violation> {
        let mut frames = 0;
        let before = self.program.state;
        self.program.state = mix(before, chance.micros);
        while u64::from(frames) < chance.frames_max && self.receive()? {
            frames += 1;
            if is_killed(left) {
                return Ok(true);
            }
        }
        if frames == 0 && chance.micros == 0 {
            self.program.state = before;
            return Ok(false);
        }
        let (number, Determinant { polls, micros, .. }) =
            self.replay.note_determinant(frames, chance.micros);
        let is_unnoted = self.program.task.planted == Some(LogFault::UnnotedDelivery)
            && number % UNNOTED_EACH == UNNOTED_EACH - 1;
        if !is_unnoted {
            self.logs.note_delivery(polls, micros);
        }
        Ok(false)
    }

    /// Handles the next frame; returns whether there was one.
    fn receive(&mut self) -> Result<bool, Violation> {
        let index = self.program.task.index;
        let frame = match self.logs.peek() {
            Ok(Some(frame)) => frame.to_vec(),
            Ok(None) => return Ok(false),
            Err(error) => return Err(Violation(format!("the logs of {index}: {error}"))),
        };
        self.logs.consume();
        self.program.receive(&frame[HEADER_BYTES..])?;
        Ok(true)
    }

    /// Sends what the program sends at this poll; returns whether the process is killed meanwhile.
    fn send(&mut self, chance: &Chance<'_>, left: &mut Option<u64>) -> Result<bool, Violation> {
        for (to, payload) in self.program.messages() {
            let torn = chance.torn.filter(|_| *left == Some(1));
            let append = match torn {
                Some((file, torn)) => self.last_append(file, to)?.map(|append| (append, torn)),
                None => None,
            };
            let mut front = [7; HEADER_BYTES];
            front[..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
            let sent = self.logs.send(to, &front, &[IoSlice::new(&payload)]);
            sent.map_err(|error| self.failed(&error))?;
            self.program.sent[to] += 1;
            self.replay.note_sent();
            if is_killed(left) {
                if let Some((append, torn)) = append {
                    self.tear(&append, torn, (to, HEADER_BYTES + payload.len()))?;
                }
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The log to a process before a frame is appended to it. `None`: an earlier incarnation has
    /// appended it.
    fn last_append<'a>(
        &self,
        file: BorrowedFd<'a>,
        to: usize,
    ) -> Result<Option<LastAppend<'a>>, Violation> {
        let end = node_log::end_of_log(&self.logs, to);
        let append = LastAppend::begin(file, (self.program.task.index, to), end);
        append.map_err(|error| self.failed(&error))
    }

    /// Undoes the last stores of an append of so many bytes to the log to a process.
    fn tear(
        &mut self,
        append: &LastAppend<'_>,
        torn: TornAppend,
        (to, bytes): (usize, usize),
    ) -> Result<(), Violation> {
        let Some(behind) = node_log::end_of_log(&self.logs, to) else { return Ok(()) };
        append.tear(torn, &behind, bytes).map_err(|error| self.failed(&error))?;
        self.has_torn_append = true;
        Ok(())
    }

    fn failed(&self, error: &io::Error) -> Violation {
        Violation(format!("process {} at poll {}: {error}", self.program.task.index, self.polls()))
    }
}

/// Counts an action; returns whether the process is killed behind it.
fn is_killed(left: &mut Option<u64>) -> bool {
    let Some(left) = left else { return false };
    *left = left.saturating_sub(1);
    *left == 0
}

fn filler_byte(source: usize, number: u64) -> u8 {
    (source as u64 * 31 + number * 7 + 1) as u8
}

/// A number that depends on all bits of both.
fn mix(one: u64, other: u64) -> u64 {
    Random::new(one.rotate_left(29) ^ other.wrapping_mul(0x9e37_79b9_7f4a_7c15)).next()
}
