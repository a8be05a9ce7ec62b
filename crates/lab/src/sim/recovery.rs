//! Simulated processes that crash and replay from the message log of their relay, under a seed.
//!
//! There are two clusters, each with a relay that records, and a stream between the relays that
//! breaks; programs ([`process`]) send each other messages of all sizes and receive messages in a
//! random order. Any process may be killed, even in the middle of a write, together with other
//! processes, and while it replays.
//!
//! Checkpoints of processes are taken at random times. A new incarnation then begins with the
//! newest checkpoint or the one before, and the relay releases the log segments before the older
//! checkpoint.
//!
//! Some relays have so little memory that they give up the logs of processes. Such a process is not
//! killed until its next checkpoint exists, from which it can restart; if the log overflows while
//! the process is down, the job has ended.
//!
//! What may never happen: a new incarnation sees other events, or the same events in another order,
//! than the one before; a message is lost, duplicated, changed or overtaken by a later message
//! of its source; a process is notified that another process is unreachable; a relay refuses a
//! process for divergence.

mod disk;
mod process;

use landbridge_proto::id::{Address, ClusterId};
use landbridge_proto::relay::{FRAME_BYTES_MAX, LogEvent, Relay, Stop};
use landbridge_proto::route::routing_table::{ClusterRange, LinkId};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header};
use landbridge_proto::wire::hello::LogPosition;
use landbridge_testbed::relay::LOGS_IN_MEMORY;

use super::random::Random;
use super::{EventCounts, Violation, require};
use disk::Disk;
use process::{CheckpointImage, PlantedFault, Process, ProgramEvent, StepResult, Task};

/// Steps of a run at most.
const STEPS_MAX: usize = 3_000_000;
/// Longest time of a step, in microseconds. `SLEEP_MICROS` is the longest jump of the clock while
/// all processes sleep.
const STEP_MICROS: u64 = 400;
const SLEEP_MICROS: u64 = 2_000_000;
/// Checkpoints of a process that are kept at most.
const CHECKPOINTS_MAX: usize = 2;

/// One rank, over all of its incarnations.
struct SimulatedRank {
    task: Task,
    process: Option<Process>,
    incarnation: u32,
    link: Option<LinkId>,
    /// Bytes in the ring of a killed incarnation that the relay has not read.
    unread_output: Vec<u8>,
    polls: u64,
    /// Events that the furthest incarnation has seen.
    events: Vec<ProgramEvent>,
    is_paused: bool,
    /// The ring of the rank is full, and a frame waits for it.
    is_full: bool,
    is_done: bool,
    /// The newest checkpoints, oldest first.
    checkpoints: Vec<CheckpointImage>,
    /// Number of determinants that the relay has released, so no later incarnation begins before
    /// this number.
    released: u64,
    /// The rank cannot be restarted any more.
    is_unrecoverable: bool,
}

/// One cluster: its relay, and the stream to the other relay.
struct Side {
    relay: Relay,
    disk: Disk,
    stream: Option<LinkId>,
    /// Bytes received from the other side.
    wire: Vec<u8>,
    is_paused: bool,
    /// The message logs may exceed the relay's memory.
    has_tight_memory: bool,
}

struct RecoveryWorld {
    random: Random,
    sides: [Side; 2],
    ranks: Vec<SimulatedRank>,
    per_side: usize,
    ring_bytes: usize,
    micros: u64,
    /// Steps per thousand in which a process is killed. `break_permille` and `checkpoint_permille`
    /// do the same for breaks of the stream and for checkpoints.
    kill_permille: u64,
    break_permille: u64,
    checkpoint_permille: u64,
    kills_left: u32,
    /// A killed process cannot be restarted, so the job has ended.
    has_ended: bool,
    counts: EventCounts,
    trace: bool,
}

/// Runs one seed.
pub fn run(seed: u64, trace: bool) -> Result<EventCounts, Violation> {
    run_with(seed, trace, None)
}

/// Runs one seed with programs that make this fault.
fn run_with(
    seed: u64,
    trace: bool,
    planted: Option<PlantedFault>,
) -> Result<EventCounts, Violation> {
    let mut world = RecoveryWorld::new(seed, trace, planted)?;
    for _ in 0..STEPS_MAX {
        if world.has_ended {
            world.counts.count("jobs ended by too little memory");
            return Ok(world.counts);
        }
        if world.ranks.iter().all(|rank| rank.is_done && rank.process.is_some()) {
            for process in world.ranks.iter().filter_map(|rank| rank.process.as_ref()) {
                process.check_deliveries()?;
            }
            return Ok(world.counts);
        }
        world.step()?;
    }
    Err(Violation("the programs never end".into()))
}

impl RecoveryWorld {
    fn new(seed: u64, trace: bool, planted: Option<PlantedFault>) -> Result<Self, Violation> {
        let mut random = Random::new(seed);
        let per_side = random.pick(&[1, 1, 2]);
        let count = 2 * per_side as u32;
        let bytes_max = random.pick(&[10, 500, 5_000, 60_000, 200_000]);
        let each = random.pick(&[3, 20, 60]).min(4_000_000 / bytes_max.max(1) as u32);
        let window = random.pick(&[100, 5_000, 100_000]);
        let task = |index| Task { index, count, each, bytes_max, seed, window, planted };
        let rank = |index| SimulatedRank {
            task: task(index),
            process: None,
            incarnation: 0,
            link: None,
            unread_output: Vec::new(),
            polls: 0,
            events: Vec::new(),
            is_paused: false,
            is_full: false,
            is_done: false,
            checkpoints: Vec::new(),
            released: 0,
            is_unrecoverable: false,
        };
        let per = per_side as u32;
        let range = |first| ClusterRange { first: first * per, count: per, spawned: 0 };
        let micros = random.below(1 << 40);
        let side = |own, random: &mut Random| {
            let relay = Relay::new(ClusterId(own), vec![range(0), range(1)], micros / 1_000);
            let mut relay = relay.map_err(|why| Violation(why.into()))?;
            let (disk, room) = Disk::new(random);
            let has_tight_memory = room.is_none() && seed.is_multiple_of(3);
            match room {
                Some(room) => relay.enable_recovery_within(room),
                None if has_tight_memory => relay.enable_recovery_within(Disk::tight_room(seed)),
                None => relay.enable_recovery_within(LOGS_IN_MEMORY),
            }
            Ok(Side {
                relay,
                disk,
                stream: None,
                wire: Vec::new(),
                is_paused: false,
                has_tight_memory,
            })
        };
        let ring_bytes = random.pick(&[FRAME_BYTES_MAX, 2 * FRAME_BYTES_MAX, 256 << 10]);
        let (kill_permille, break_permille) =
            (random.pick(&[1, 5, 20, 100]), random.pick(&[0, 0, 1, 10]));
        let kills_left = random.pick(&[1, 3, 10, 30]);
        let checkpoint_permille = random.pick(&[0, 0, 1, 10, 100]);
        let sides = [side(0, &mut random)?, side(1, &mut random)?];
        let mut world = Self {
            sides,
            ranks: (0..count).map(rank).collect(),
            per_side,
            ring_bytes,
            micros,
            kill_permille,
            break_permille,
            checkpoint_permille,
            kills_left,
            has_ended: false,
            random,
            counts: EventCounts::default(),
            trace,
        };
        world.connect_relays()?;
        Ok(world)
    }

    fn log_step(&self, what: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{}", what());
        }
    }

    fn side_of(&self, rank: usize) -> usize {
        rank / self.per_side
    }

    fn step(&mut self) -> Result<(), Violation> {
        self.micros += self.random.below(STEP_MICROS);
        let rank = self.random.index(self.ranks.len());
        match self.ranks[rank].process.is_some() {
            false if self.random.percent(20) => self.start(rank)?,
            false => (),
            true => self.work(rank)?,
        }
        if self.random.below(1_000) < self.break_permille {
            self.break_stream()?;
        }
        if self.sides[0].stream.is_none() && self.random.percent(2) {
            self.connect_relays()?;
        }
        for side in 0..2 {
            if self.random.percent(50) {
                self.run_relay(side)?;
            }
        }
        // The clock jumps now and then, so that timers expire.
        if self.random.below(3_000) == 0 {
            self.micros += self.random.below(SLEEP_MICROS);
            for side in &mut self.sides {
                side.relay.handle_time(self.micros / 1_000);
            }
        }
        Ok(())
    }

    // --- processes

    fn start(&mut self, rank: usize) -> Result<(), Violation> {
        let side = self.side_of(rank);
        let micros = self.micros;
        self.read_unread_output(rank)?;
        self.handle_remarks(side)?;
        if self.has_ended {
            return Ok(());
        }
        let image = self.newest_checkpoint(rank);
        let SimulatedRank { task, incarnation, polls, .. } = self.ranks[rank];
        let process = match &image {
            Some(image) => Process::restore(task, image, polls, micros)?,
            None => Process::new(task, polls, micros),
        };
        let log_position = image.map_or(LogPosition::default(), |image| image.log_position);
        self.log_step(|| format!("{rank} begins for the {incarnation}th time: {log_position:?}"));
        let it = &mut self.ranks[rank];
        it.incarnation += 1;
        it.process = Some(process);
        self.attach(rank, log_position)?;
        self.drain(side, &[])
    }

    /// Attaches the present incarnation of a rank to its relay, at its position in the log.
    fn attach(&mut self, rank: usize, log_position: LogPosition) -> Result<(), Violation> {
        let side = self.side_of(rank);
        let it = &mut self.ranks[rank];
        let log_position = LogPosition { kept: it.released, ..log_position };
        let (address, start) = (Address::new(it.task.index, 0), it.incarnation - 1);
        let link = self.sides[side].relay.attach_at(address, start, log_position);
        let link = link.map_err(|why| Violation(format!("{rank} cannot come back: {why}")))?;
        self.ranks[rank].link = Some(link);
        Ok(())
    }

    /// The checkpoint with which the next incarnation begins: the newest, or the one before if the
    /// newest is torn; `None` for a start without a checkpoint.
    fn newest_checkpoint(&mut self, rank: usize) -> Option<CheckpointImage> {
        let it = &mut self.ranks[rank];
        if it.released == 0 && self.random.percent(10) {
            return None;
        }
        if it.checkpoints.len() == CHECKPOINTS_MAX && self.random.percent(20) {
            it.checkpoints.pop();
            self.counts.count("checkpoints torn");
        }
        let image = it.checkpoints.last()?;
        self.counts.count("restores from a checkpoint");
        Some(image.clone())
    }

    fn take_checkpoint(&mut self, rank: usize) -> Result<(), Violation> {
        let side = self.side_of(rank);
        let it = &mut self.ranks[rank];
        let Some(process) = it.process.as_mut().filter(|it| it.may_quiesce()) else {
            return Ok(());
        };
        let image = process.quiesce();
        it.unread_output = std::mem::take(&mut process.up);
        if it.checkpoints.len() == CHECKPOINTS_MAX {
            it.released = it.released.max(it.checkpoints[0].log_position.determinants);
            it.checkpoints.remove(0);
        }
        let log_position = image.log_position;
        it.checkpoints.push(image);
        self.counts.count("checkpoints taken");
        self.log_step(|| format!("an image of {rank}: {log_position:?}"));
        self.read_unread_output(rank)?;
        self.attach(rank, log_position)?;
        self.drain(side, &[])?;
        self.handle_remarks(side)
    }

    /// Handles the relay's reports of processes whose log has become too large to be kept, or can
    /// be kept again.
    fn handle_remarks(&mut self, side: usize) -> Result<(), Violation> {
        let Side { relay, has_tight_memory, .. } = &mut self.sides[side];
        while let Some(remark) = Disk::poll_log_event(relay, *has_tight_memory)? {
            let (LogEvent::Unrecoverable(who, _) | LogEvent::Recoverable(who)) = remark else {
                return Err(Violation(format!("{remark:?}")));
            };
            let rank = &mut self.ranks[who.index() as usize];
            rank.is_unrecoverable = matches!(remark, LogEvent::Unrecoverable(..));
            if rank.is_unrecoverable {
                self.counts.count("processes that became unrecoverable");
                self.has_ended |= rank.process.is_none();
                continue;
            }
            self.counts.count("recordings restarted");
            // Earlier checkpoints are of no use, because the log before the newest one is
            // incomplete.
            rank.checkpoints.drain(..rank.checkpoints.len() - 1);
            rank.released = rank.checkpoints[0].log_position.determinants;
        }
        Ok(())
    }

    /// Lets the relay read the ring of a killed incarnation to its end.
    fn read_unread_output(&mut self, rank: usize) -> Result<(), Violation> {
        let side = self.side_of(rank);
        let Some(link) = self.ranks[rank].link.take() else { return Ok(()) };
        let mut bytes = std::mem::take(&mut self.ranks[rank].unread_output);
        self.ranks[rank].is_paused = false;
        let relay = &mut self.sides[side].relay;
        relay.begin_drain(link);
        let taken = relay.handle_input(link, &mut bytes);
        require!(taken.stop == Stop::Partial, "the last words of {rank}: {:?}", taken.stop);
        self.drain(side, &bytes)?;
        self.sides[side].relay.suspend(link);
        Ok(())
    }

    fn work(&mut self, rank: usize) -> Result<(), Violation> {
        let micros = self.micros;
        self.handle_remarks(self.side_of(rank))?;
        let is_killed = self.kills_left > 0 && self.random.below(1_000) < self.kill_permille;
        let is_killed = is_killed && !self.ranks[rank].is_unrecoverable;
        let it = &mut self.ranks[rank];
        let Some(process) = &mut it.process else { return Ok(()) };
        let (said, seen) = (process.up.len(), it.events.len());
        if process.step(micros)? == StepResult::NeedsRelay {
            self.counts.count("waits for the relay");
        }
        it.polls = it.polls.max(process.cursor.polls);
        let known = it.events.len().min(process.program.events.len());
        require!(
            it.events[..known] == process.program.events[..known],
            "{rank} sees something else"
        );
        it.events.extend_from_slice(&process.program.events[known..]);
        it.is_done |= process.is_done();
        if is_killed {
            it.events.truncate(seen.max(known));
            self.kill(rank, said);
        } else if self.random.below(1_000) < self.checkpoint_permille {
            self.take_checkpoint(rank)?;
        }
        Ok(())
    }

    /// Kills a process whose ring held `said` bytes before this step: of the frames behind `said`,
    /// the ring keeps a random number.
    fn kill(&mut self, rank: usize, said: usize) {
        self.kills_left -= 1;
        let it = &mut self.ranks[rank];
        let Some(process) = it.process.take() else { return };
        let mut ends = vec![said];
        let mut at = said;
        while let Ok(header) = Header::parse(&process.up[at..]) {
            at += HEADER_BYTES + header.length as usize;
            ends.push(at);
        }
        let end = self.random.pick(&ends);
        let is_again = process.cursor.replayed_determinants > 0;
        it.unread_output = process.up[..end].to_vec();
        it.is_done = false;
        self.counts.count("processes killed");
        self.counts.add_some("determinants replayed", process.cursor.replayed_determinants);
        if is_again && process.cursor.polls < it.polls {
            self.counts.count("processes killed during replay");
        }
        if end < at {
            self.counts.count("processes killed in the middle of a write");
        }
        self.log_step(|| format!("{rank} is killed"));
    }

    // --- relays

    fn run_relay(&mut self, side: usize) -> Result<(), Violation> {
        for rank in side * self.per_side..(side + 1) * self.per_side {
            self.read_rank_output(rank)?;
        }
        self.read_stream(side)?;
        // Full outputs may have capacity again; other outputs are written when the relay requests
        // it.
        for rank in side * self.per_side..(side + 1) * self.per_side {
            let it = &self.ranks[rank];
            if let (Some(link), true) = (it.link, it.process.is_some() && it.is_full) {
                self.write(side, link, &[])?;
            }
        }
        if let Some(stream) = self.sides[side].stream {
            self.write(side, stream, &[])?;
        }
        self.drain(side, &[])?;
        while let Some(link) = self.sides[side].relay.poll_resume() {
            // Both relays number their links from 0.
            let mut own = side * self.per_side..(side + 1) * self.per_side;
            match own.find(|rank| self.ranks[*rank].link == Some(link)) {
                Some(rank) => {
                    self.ranks[rank].is_paused = false;
                    self.read_rank_output(rank)?;
                }
                None => {
                    self.sides[side].is_paused = false;
                    self.read_stream(side)?;
                }
            }
        }
        if self.sides[side].relay.recovery().has_replay_work() {
            self.counts.count("replay pieces sent");
            self.sides[side].relay.replay_next();
            self.drain(side, &[])?;
        }
        let Side { relay, disk, .. } = &mut self.sides[side];
        disk.work(relay, &mut self.random, &mut self.counts)?;
        Ok(())
    }

    /// Lets the relay read a random part of the bytes that a process has written.
    fn read_rank_output(&mut self, rank: usize) -> Result<(), Violation> {
        let side = self.side_of(rank);
        let it = &mut self.ranks[rank];
        let (Some(link), Some(process), false) = (it.link, &mut it.process, it.is_paused) else {
            return Ok(());
        };
        let part = self.random.below(process.up.len() as u64 + 1) as usize;
        let mut bytes: Vec<u8> = process.up[..part].to_vec();
        let taken = self.sides[side].relay.handle_input(link, &mut bytes);
        self.drain(side, &bytes)?;
        let it = &mut self.ranks[rank];
        if let Some(process) = &mut it.process {
            process.up.drain(..taken.bytes);
        }
        it.is_paused = taken.stop == Stop::Full;
        require!(!matches!(taken.stop, Stop::Broken(_)), "{rank} is stopped: {:?}", taken.stop);
        Ok(())
    }

    fn read_stream(&mut self, side: usize) -> Result<(), Violation> {
        let (Some(stream), false) = (self.sides[side].stream, self.sides[side].is_paused) else {
            return Ok(());
        };
        let mut bytes = self.sides[side].wire.clone();
        let taken = self.sides[side].relay.handle_input(stream, &mut bytes);
        self.drain(side, &bytes)?;
        self.sides[side].wire.drain(..taken.bytes);
        self.sides[side].is_paused = taken.stop == Stop::Full;
        require!(!matches!(taken.stop, Stop::Broken(_)), "relays: {:?}", taken.stop);
        Ok(())
    }

    fn drain(&mut self, side: usize, buffer: &[u8]) -> Result<(), Violation> {
        while let Some(output) = self.sides[side].relay.poll_flush() {
            for number in 0..self.sides[side].relay.ports().writer_count(output) {
                if let Some(writer) = self.sides[side].relay.ports().writer(output, number) {
                    self.write(side, writer, buffer)?;
                }
            }
            self.sides[side].relay.keep(output, buffer);
        }
        Ok(())
    }

    /// Writes queued bytes of a link to its receiver, as far as the receiver has capacity.
    fn write(&mut self, side: usize, link: LinkId, buffer: &[u8]) -> Result<(), Violation> {
        let [one, other] = &mut self.sides;
        let (own, far) = if side == 0 { (one, other) } else { (other, one) };
        let first = side * self.per_side;
        let ranks = &mut self.ranks[first..first + self.per_side];
        if own.stream == Some(link) {
            write_queued(&mut own.relay, link, buffer, &mut far.wire, 4 * FRAME_BYTES_MAX);
        } else if let Some(rank) = ranks.iter_mut().find(|rank| rank.link == Some(link))
            && let Some(process) = &mut rank.process
        {
            rank.is_full =
                write_queued(&mut own.relay, link, buffer, &mut process.down, self.ring_bytes);
        }
        Ok(())
    }

    // --- the stream between them

    fn break_stream(&mut self) -> Result<(), Violation> {
        let [one, other] = &mut self.sides;
        for side in [one, other] {
            if let Some(stream) = side.stream.take() {
                side.relay.disconnect(stream);
            }
            side.wire.clear();
            side.is_paused = false;
        }
        self.counts.count("streams broken");
        self.drain(0, &[])?;
        self.drain(1, &[])
    }

    fn connect_relays(&mut self) -> Result<(), Violation> {
        for side in 0..2 {
            let relay = &mut self.sides[side].relay;
            let peer = relay.peer(ClusterId(1 - side as u16));
            let Some(peer) = peer else { return Err(Violation("there is no other relay".into())) };
            let new_stream = relay.connect(peer, 1).map_err(|why| Violation(why.into()))?;
            self.sides[side].stream = Some(new_stream.stream);
        }
        self.drain(0, &[])?;
        self.drain(1, &[])
    }
}

/// Writes the queued bytes of a link, as a driver does. Returns whether bytes remained because `to`
/// was full.
fn write_queued(
    relay: &mut Relay,
    link: LinkId,
    buffer: &[u8],
    to: &mut Vec<u8>,
    capacity: usize,
) -> bool {
    loop {
        let before = to.len();
        let mut is_full = false;
        for slice in relay.slices(link, buffer) {
            let left = capacity.saturating_sub(to.len());
            to.extend(&slice[..slice.len().min(left)]);
            is_full = slice.len() > left;
            if is_full {
                break;
            }
        }
        let written = to.len() - before;
        relay.handle_sent(link, written, buffer);
        if is_full || written == 0 || !relay.has_output(link) {
            return is_full;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEEDS: u64 = if cfg!(debug_assertions) { 60 } else { 600 };

    #[test]
    fn duplicated_lost_and_reordered_messages_are_found() {
        for (planted, found) in [
            (PlantedFault::DuplicatedAndLost, "message 1 of"),
            (PlantedFault::Swapped, "is delivered out of order"),
        ] {
            let mut violations = 0;
            for seed in 0..20 {
                match run_with(seed, false, Some(planted)) {
                    Err(violation) if violation.0.contains(found) => violations += 1,
                    // A job that ends early may not have come so far.
                    Ok(counts) if counts.of("jobs ended by too little memory") > 0 => (),
                    other => panic!("{planted:?}, seed {seed}: {other:?}"),
                }
            }
            assert!(violations > 10, "{planted:?}: {violations} of 20 seeds");
        }
    }

    #[test]
    fn killed_processes_recover_their_state() {
        let mut all = EventCounts::default();
        for seed in 0..SEEDS {
            match run(seed, false) {
                Ok(counts) => all.add(&counts),
                Err(violation) => panic!("seed {seed}: {}", violation.0),
            }
        }
        for event in [
            "processes killed",
            "processes killed during replay",
            "processes killed in the middle of a write",
            "determinants replayed",
            "replay pieces sent",
            "segments written",
            "segments read back",
            "waits for the relay",
            "streams broken",
            "checkpoints taken",
            "checkpoints torn",
            "restores from a checkpoint",
            "processes that became unrecoverable",
            "recordings restarted",
        ] {
            assert!(all.of(event) > 0, "{event}: never happened\n{all}");
        }
    }
}
