//! A process that may be killed: a program, its endpoint, and the driver that delivers frames at
//! polls and replays them.
//!
//! The driver is a minimal model of the provider's (`engine/recorded_polls.rs`), with the same
//! state machine for what is replayed: one ring in each direction, and one path to every peer.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{
    Action, CompletionLevel, Config, Memory, Message, PathProperties, Peer, Posting, Ticket,
};
use landbridge_proto::id::Address;
use landbridge_proto::path::time::{MICROSECOND, Time};
use landbridge_proto::replay::{Determinant, PollAction, ReplayCursor};
use landbridge_proto::wire::frame::{Header, Kind};
use landbridge_proto::wire::hello::LogPosition;
use landbridge_testbed::endpoint::{ByteStore, DrivenEndpoint, Frame};
use landbridge_testbed::relay::{FarEnd, determinant, emit, empty, frames, rank};

use super::super::random::Random;
use super::super::{Violation, require};

const PATH: PathId = PathId(0);
/// Receives that a program has posted at most.
const POSTED_MAX: u32 = 4;

/// A memory buffer of a program.
#[derive(Clone, Debug)]
pub struct ProgramMemory(Rc<RefCell<Vec<u8>>>);

impl ProgramMemory {
    fn new(bytes: Vec<u8>) -> Self {
        Self(Rc::new(RefCell::new(bytes)))
    }
}

impl Memory for ProgramMemory {
    fn size(&self) -> u64 {
        self.0.borrow().len() as u64
    }

    fn address(&self) -> u64 {
        0
    }
}

/// The bytes that [`ProgramMemory`] holds itself.
struct ProgramBytes;

impl ByteStore<ProgramMemory> for ProgramBytes {
    fn read(&self, memory: &ProgramMemory, at: u64, length: u64) -> Result<Vec<u8>, Violation> {
        Ok(memory.0.borrow()[at as usize..(at + length) as usize].to_vec())
    }

    fn write(&mut self, memory: &ProgramMemory, at: u64, bytes: &[u8]) -> Result<(), Violation> {
        memory.0.borrow_mut()[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn copy(
        &mut self,
        it: &ProgramMemory,
        at: u64,
        length: u64,
    ) -> Result<ProgramMemory, Violation> {
        self.read(it, at, length).map(ProgramMemory::new)
    }
}

/// An event that a program has seen: a message was received, or a send was completed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProgramEvent {
    Received { from: u32, number: u32, bytes: usize },
    Sent { context: usize },
}

/// A fault that the program of a simulated process makes on purpose, so that a test can show that
/// the checks of delivered messages find the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests plant faults"))]
pub enum PlantedFault {
    /// Message 1 is sent twice and message 2 never: as many messages arrive as should.
    DuplicatedAndLost,
    /// Messages 1 and 2 are sent in the wrong order.
    Swapped,
}

impl PlantedFault {
    /// The number that the message of this number bears.
    fn number_sent(self, number: u32) -> u32 {
        match (self, number) {
            (PlantedFault::DuplicatedAndLost, 2) => 1,
            (PlantedFault::Swapped, 1) => 2,
            (PlantedFault::Swapped, 2) => 1,
            _ => number,
        }
    }
}

/// The process that runs, and the work that it has to do.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    pub index: u32,
    pub count: u32,
    /// Number of messages to each other process.
    pub each: u32,
    pub bytes_max: u64,
    /// Seed of all decisions of the program.
    pub seed: u64,
    pub window: u32,
    pub planted: Option<PlantedFault>,
}

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepResult {
    Progress,
    /// The process needs further frames from its relay.
    NeedsRelay,
}

/// A checkpoint of a process. The checkpoint holds all inputs of the process instead of its memory:
/// a process with the same inputs reaches the same state.
#[derive(Clone)]
pub struct CheckpointImage {
    pub log_position: LogPosition,
    polls: u64,
    log: Vec<u8>,
}

/// One incarnation of a process.
pub struct Process {
    task: Task,
    endpoint: DrivenEndpoint<ProgramMemory>,
    /// Bytes for the relay.
    up: Vec<u8>,
    /// Bytes from the relay.
    down: Vec<u8>,
    pub program: SimulatedProgram,
    pub cursor: ReplayProgress,
    /// The protocol's time.
    now: Time,
    /// All determinants in the relay's format, with their frames.
    record: Vec<u8>,
}

/// The program of the process.
pub struct SimulatedProgram {
    /// All events that the program has seen.
    pub events: Vec<ProgramEvent>,
    /// The program's own random numbers.
    random: Random,
    left: Vec<u32>,
    received: u32,
    deliveries: Deliveries,
    acknowledged: u32,
    posted: BTreeMap<usize, ProgramMemory>,
    contexts: usize,
}

/// How far the incarnation has replayed the earlier ones.
pub struct ReplayProgress {
    is_opened: bool,
    replay: ReplayCursor,
    /// Polls of this incarnation. `polls_before` counts the polls of the furthest earlier
    /// incarnation.
    pub polls: u64,
    polls_before: u64,
    /// Frames that have not been delivered of the determinant that is being replayed.
    replaying: Option<u32>,
    pub replayed_determinants: u64,
}

impl Process {
    /// Makes an incarnation. `polls_before` is the number of polls of the furthest earlier
    /// incarnation; `real` is the clock in microseconds.
    pub fn new(task: Task, polls_before: u64, real: u64) -> Self {
        let address = Address::new(task.index, 0);
        let config =
            Config { address, eager_window: task.window, min_multi_recv: 0, operations_max: 1_000 };
        let mut left = vec![task.each; task.count as usize];
        left[task.index as usize] = 0;
        Self {
            endpoint: DrivenEndpoint::new(config),
            up: Vec::new(),
            down: Vec::new(),
            program: SimulatedProgram {
                events: Vec::new(),
                random: Random::new(task.seed ^ (u64::from(task.index) << 40)),
                left,
                received: 0,
                deliveries: Deliveries::default(),
                acknowledged: 0,
                posted: BTreeMap::new(),
                contexts: 0,
            },
            cursor: ReplayProgress {
                is_opened: false,
                replay: ReplayCursor::new(Time(real * MICROSECOND)),
                polls: 0,
                polls_before,
                replaying: None,
                replayed_determinants: 0,
            },
            now: Time(0),
            record: Vec::new(),
            task,
        }
    }

    /// Restores an incarnation from a checkpoint. `polls_before` is the number of polls of the
    /// furthest earlier incarnation; `real` is the clock in microseconds.
    pub fn restore(
        task: Task,
        image: &CheckpointImage,
        polls_before: u64,
        real: u64,
    ) -> Result<Self, Violation> {
        let mut it = Self::new(task, image.polls, real);
        let LogPosition { determinants, sent, .. } = image.log_position;
        let (nobody, credit) = (Address::ANONYMOUS, determinants as u32);
        let start = empty(Kind::ReplayStart, nobody, nobody);
        it.down.extend(emit(Header { delivered: sent, credit, ..start }, &[]));
        it.down.extend(&image.log);
        while it.cursor.polls < image.polls || it.cursor.replaying.is_some() {
            require!(it.step(real)? == StepResult::Progress, "an image is not whole");
        }
        require!(
            it.log_position() == image.log_position,
            "{} is not what its image was",
            task.index
        );
        it.up.clear();
        (it.cursor.is_opened, it.cursor.polls_before, it.cursor.replayed_determinants) =
            (false, polls_before, 0);
        Ok(it)
    }

    /// Whether a checkpoint can be taken: the process does not replay.
    pub fn may_quiesce(&self) -> bool {
        let ReplayProgress { is_opened, replay, polls, polls_before, replaying, .. } = &self.cursor;
        *is_opened && replaying.is_none() && !replay.is_replaying(polls < polls_before)
    }

    /// Takes a checkpoint. The rings of the process are dropped next, so the relay has to send
    /// undelivered frames again.
    pub fn quiesce(&mut self) -> CheckpointImage {
        self.cursor.is_opened = false;
        CheckpointImage {
            log_position: self.log_position(),
            polls: self.cursor.polls,
            log: self.record.clone(),
        }
    }

    fn log_position(&self) -> LogPosition {
        self.cursor.replay.standing(0)
    }

    fn log_determinant(&mut self, Determinant { polls, frames, micros }: Determinant) {
        self.record.extend(determinant(Address::ANONYMOUS, polls, frames, micros));
    }

    /// Whether the program has seen all events that it is to see.
    pub fn is_done(&self) -> bool {
        let all = self.task.each * (self.task.count - 1);
        self.program.received == all && self.program.acknowledged == all
    }

    /// Checks that every message of every other process was delivered; the error names the first
    /// message that was not.
    pub fn check_deliveries(&self) -> Result<(), Violation> {
        let others = (0..self.task.count).filter(|other| *other != self.task.index);
        self.program.deliveries.check_complete(others, self.task.each)
    }

    /// Exchanges the rings of the process and those that the relay reads and writes.
    pub fn exchange_rings(&mut self, end: &mut FarEnd) {
        std::mem::swap(&mut self.up, &mut end.input);
        std::mem::swap(&mut self.down, &mut end.output);
    }

    /// Runs the program a little and polls for messages. `real` is the clock in microseconds.
    pub fn step(&mut self, real: u64) -> Result<StepResult, Violation> {
        if self.cursor.replaying.is_none() && !self.ready()? {
            return Ok(StepResult::NeedsRelay);
        }
        if self.cursor.replaying.is_none() {
            self.act()?;
        }
        self.poll(real)
    }

    /// Whether the next poll's work is known.
    fn ready(&mut self) -> Result<bool, Violation> {
        if self.cursor.is_opened && !self.cursor.replay.needs_determinant() {
            return Ok(true);
        }
        let Some(frame) = self.take_frame() else { return Ok(false) };
        let header = Header::parse(&frame)?;
        let expected = match self.cursor.is_opened {
            true => Kind::Determinant,
            false => Kind::ReplayStart,
        };
        require!(header.kind == expected, "{} gets {header:?}", self.task.index);
        let (polls, frames, micros) = (header.sequence, header.credit, header.delivered);
        if self.cursor.is_opened {
            self.cursor.replay.take_determinant(Determinant { polls, frames, micros });
            return Ok(true);
        }
        self.cursor.is_opened = true;
        self.cursor.replay.begin(header.credit.into(), header.delivered, 0);
        self.ready()
    }

    /// Does what the program does between two polls.
    fn act(&mut self) -> Result<(), Violation> {
        let others: Vec<u32> =
            (0..self.task.count).filter(|other| self.program.left[*other as usize] > 0).collect();
        if self.program.random.percent(30) && !others.is_empty() {
            let to = self.program.random.pick(&others);
            let number = self.task.each - self.program.left[to as usize];
            let number = self.task.planted.map_or(number, |fault| fault.number_sent(number));
            self.program.left[to as usize] -= 1;
            let size = 8 + self.program.random.size(self.task.bytes_max);
            let memory = ProgramMemory::new(content(self.task.index, number, size as usize));
            let level = self
                .program
                .random
                .pick(&[CompletionLevel::TransmitComplete, CompletionLevel::DeliveryComplete]);
            let ticket = self.ticket();
            let peer = self.peer(to);
            let (tag, data) = (Some(1), None);
            let message = Message { peer, memory, tag, data, ticket, level };
            require!(self.endpoint.send(message).is_ok(), "too many operations");
        }
        if self.program.random.percent(40) && self.program.posted.len() < POSTED_MAX as usize {
            let memory = ProgramMemory::new(vec![0; 8 + self.task.bytes_max as usize]);
            let ticket = self.ticket();
            self.program.posted.insert(ticket.context, memory.clone());
            let tag = Some((1, 0));
            self.endpoint.messages_mut().recv(Posting {
                source: None,
                memory,
                tag,
                ticket,
                multi: false,
            });
        }
        self.drain()
    }

    fn ticket(&mut self) -> Ticket {
        self.program.contexts += 1;
        Ticket { context: self.program.contexts, notify: true }
    }

    fn peer(&mut self, index: u32) -> Peer {
        let address = Address::new(index, 0);
        let is_known = self.endpoint.is_known(address);
        let peer = self.endpoint.peer(address);
        if !is_known {
            self.endpoint.channel_mut(peer).open_path(PATH, PathProperties::RELAY);
        }
        peer
    }

    fn poll(&mut self, real: u64) -> Result<StepResult, Violation> {
        if let Some(left) = self.cursor.replaying.take() {
            return self.replay_determinant(left);
        }
        self.endpoint.flush_deferred_acks();
        self.cursor.polls += 1;
        let real = Time(real * MICROSECOND);
        match self.cursor.replay.poll(self.cursor.polls <= self.cursor.polls_before) {
            PollAction::Nothing => (),
            PollAction::Replay(next) => {
                self.log_determinant(next);
                self.advance(next.micros, real);
                self.cursor.replayed_determinants += 1;
                return self.replay_determinant(next.frames);
            }
            PollAction::Live => self.poll_live(real)?,
        }
        self.drain()?;
        Ok(StepResult::Progress)
    }

    fn advance(&mut self, micros: u64, real: Time) {
        self.now = self.cursor.replay.advance(micros, real);
        self.endpoint.set_time(self.now);
    }

    /// Delivers so many frames of a determinant, as far as they have arrived.
    fn replay_determinant(&mut self, mut left: u32) -> Result<StepResult, Violation> {
        while left > 0 {
            let Some(frame) = self.take_frame() else {
                self.cursor.replaying = Some(left);
                return Ok(StepResult::NeedsRelay);
            };
            self.deliver_frame(&frame)?;
            left -= 1;
        }
        self.finish_poll()?;
        Ok(StepResult::Progress)
    }

    fn poll_live(&mut self, real: Time) -> Result<(), Violation> {
        let lag = self.cursor.replay.lag(real);
        let is_due = self.cursor.replay.is_due(real, || self.endpoint.schedule().next_wake());
        let mut waiting = Vec::new();
        // A poll delivers 32 frames at most.
        while waiting.len() < 32
            && let Some(frame) = self.take_frame()
        {
            waiting.push(frame);
        }
        if !is_due && waiting.is_empty() {
            return Ok(());
        }
        self.advance(lag, real);
        let frames = waiting.len() as u32;
        let (_, noted) = self.cursor.replay.note_determinant(frames, lag);
        self.log_determinant(noted);
        for frame in &waiting {
            self.deliver_frame(frame)?;
        }
        // The determinant precedes all frames that follow from it.
        self.up.extend(determinant(rank(self.task.index), noted.polls, frames, lag));
        self.finish_poll()
    }

    fn finish_poll(&mut self) -> Result<(), Violation> {
        if self.endpoint.schedule().next_wake().is_some_and(|wake| wake <= self.now) {
            self.endpoint.handle_time(self.now);
        }
        self.drain()
    }

    /// The next complete frame of the ring, if there is one.
    fn take_frame(&mut self) -> Option<Vec<u8>> {
        let (_, frame) = frames(&self.down).next()?;
        let length = frame.len();
        Some(self.down.drain(..length).collect())
    }

    fn deliver_frame(&mut self, frame: &[u8]) -> Result<(), Violation> {
        let header = Header::parse(frame)?;
        self.record.extend(frame);
        self.cursor.replay.note_taken(frame.len() as u64);
        let peer = self.peer(header.source.index());
        match header.kind {
            Kind::Lost => {
                self.endpoint.channel_mut(peer).presume_path_lost(PATH);
                return Ok(());
            }
            // No program here accesses remote memory.
            Kind::Unreachable | Kind::Write | Kind::ReadData | Kind::Atomic | Kind::AtomicReply => {
                return Err(Violation(format!("{header:?}")));
            }
            _ => (),
        }
        self.endpoint.deliver((peer, PATH), &Frame::new(frame), &mut ProgramBytes)?;
        self.handle_actions()
    }

    /// Performs the actions that the endpoint requests.
    fn handle_actions(&mut self) -> Result<(), Violation> {
        while let Some(action) = self.endpoint.next_action(&mut ProgramBytes)? {
            match action {
                Action::Complete(done) => {
                    require!(done.error.is_none(), "{}: {done:?}", self.task.index);
                    self.finish(done.ticket.context, done.source, done.length as usize)?;
                }
                Action::CopyUnexpected { .. }
                | Action::DropUnexpected { .. }
                | Action::DiscardPayload { .. }
                | Action::Release { .. } => (),
                other => return Err(Violation(format!("nobody does {other:?} here"))),
            }
        }
        Ok(())
    }

    fn finish(
        &mut self,
        context: usize,
        source: Option<Peer>,
        bytes: usize,
    ) -> Result<(), Violation> {
        let event = match (self.program.posted.remove(&context), source) {
            (Some(memory), Some(peer)) => {
                let memory = memory.0.borrow();
                let word = |at: usize| memory[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
                let (from, number) = (word(0), word(4));
                let is_true = memory[..bytes] == content(from, number, bytes);
                let is_from = self.endpoint.address(peer) == Address::new(from, 0);
                require!(is_true && is_from, "a message of {from} is not what it was");
                self.program.received += 1;
                self.program.deliveries.record(from, number, context)?;
                ProgramEvent::Received { from, number, bytes }
            }
            _ => {
                self.program.acknowledged += 1;
                ProgramEvent::Sent { context }
            }
        };
        // The program's next decisions depend on the events that it has seen.
        if let ProgramEvent::Received { from, number, .. } = event {
            let salt = self.program.random.next() ^ u64::from(from) << 32 ^ u64::from(number);
            self.program.random = Random::new(salt);
        }
        self.program.events.push(event);
        Ok(())
    }

    /// Performs the actions that the endpoint requests, and writes all frames of the endpoint to
    /// the ring.
    fn drain(&mut self) -> Result<(), Violation> {
        self.handle_actions()?;
        while let Some(peer) = self.endpoint.next_busy() {
            while let Some(frame) = self.endpoint.transmit((peer, PATH), &mut ProgramBytes)? {
                frame.emit(&mut self.up);
                self.cursor.replay.note_sent();
            }
            self.handle_actions()?;
        }
        Ok(())
    }
}

/// The messages that a process has received: source and number of a message, and the context of the
/// receive that it matched. Contexts number the receives in the order in which they are posted.
///
/// All receives of a process match all messages, so two messages of one source match two receives
/// in the order in which they are sent (MPI 5.0, section 3.5). Receives may complete in another
/// order.
#[derive(Default)]
struct Deliveries(BTreeMap<(u32, u32), usize>);

impl Deliveries {
    fn record(&mut self, from: u32, number: u32, context: usize) -> Result<(), Violation> {
        let before = self.0.range(..(from, number)).next_back();
        let after = self.0.range((from, number)..).next();
        let is_ordered = before.is_none_or(|((other, _), it)| *other != from || *it < context)
            && after.is_none_or(|((other, _), it)| *other != from || *it > context);
        let is_new = self.0.insert((from, number), context).is_none();
        require!(is_new, "message {number} of {from} is delivered twice");
        require!(is_ordered, "message {number} of {from} is delivered out of order");
        Ok(())
    }

    fn check_complete(
        &self,
        sources: impl Iterator<Item = u32>,
        each: u32,
    ) -> Result<(), Violation> {
        for from in sources {
            let lost = (0..each).find(|number| !self.0.contains_key(&(from, *number)));
            require!(lost.is_none(), "message {lost:?} of {from} is not delivered");
        }
        Ok(())
    }
}

/// The bytes of a message: its sender, its number, and a pattern.
fn content(from: u32, number: u32, length: usize) -> Vec<u8> {
    let salt = from.wrapping_mul(167) ^ number.wrapping_mul(59);
    let mut bytes: Vec<u8> =
        (0..length as u32).map(|at| (at.wrapping_mul(31) ^ salt) as u8).collect();
    bytes[..4].copy_from_slice(&from.to_le_bytes());
    bytes[4..8].copy_from_slice(&number.to_le_bytes());
    bytes
}
