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
//!
//! | module | does |
//! |---|---|
//! | `slow_disk` | the disk of a message log |
//! | `process` | a process that may be killed |

mod process;
mod slow_disk;

use landbridge_proto::relay::{FRAME_BYTES_MAX, LogEvent, Stop};
use landbridge_proto::wire::hello::LogPosition;
use landbridge_testbed::relay::{LOGS_IN_MEMORY, RelayPair, frames, rank as address, relay};

use super::random::Random;
use super::{EventCounts, Violation, require};
use process::{CheckpointImage, PlantedFault, Process, ProgramEvent, StepResult, Task};
use slow_disk::SlowDisk;

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
    polls: u64,
    /// Events that the furthest incarnation has seen.
    events: Vec<ProgramEvent>,
    is_done: bool,
    /// The newest checkpoints, oldest first.
    checkpoints: Vec<CheckpointImage>,
    /// Number of determinants that the relay has released, so no later incarnation begins before
    /// this number.
    released: u64,
    /// The relay's log begins at the oldest checkpoint, also if no determinant lies before it.
    needs_checkpoint: bool,
    /// The rank cannot be restarted any more.
    is_unrecoverable: bool,
}

/// What belongs to the relay of one cluster.
struct Side {
    disk: SlowDisk,
    /// The message logs may exceed the relay's memory.
    has_tight_memory: bool,
}

struct RecoveryWorld {
    random: Random,
    /// The relays, the rings of the ranks, and one stream.
    pair: RelayPair,
    sides: [Side; 2],
    ranks: Vec<SimulatedRank>,
    per_side: usize,
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
            polls: 0,
            events: Vec::new(),
            is_done: false,
            checkpoints: Vec::new(),
            released: 0,
            needs_checkpoint: false,
            is_unrecoverable: false,
        };
        let micros = random.below(1 << 40);
        let mut relays = [0, 1].map(|own| relay(own, per_side as u32, micros / 1_000));
        let mut side = |own: usize, random: &mut Random| {
            let (disk, room) = SlowDisk::new(random);
            let has_tight_memory = room.is_none() && seed.is_multiple_of(3);
            let room = room.unwrap_or(match has_tight_memory {
                true => SlowDisk::tight_room(seed),
                false => LOGS_IN_MEMORY,
            });
            relays[own].enable_recovery_within(room);
            Side { disk, has_tight_memory }
        };
        let ring_bytes = random.pick(&[FRAME_BYTES_MAX, 2 * FRAME_BYTES_MAX, 256 << 10]);
        let (kill_permille, break_permille) =
            (random.pick(&[1, 5, 20, 100]), random.pick(&[0, 0, 1, 10]));
        let kills_left = random.pick(&[1, 3, 10, 30]);
        let checkpoint_permille = random.pick(&[0, 0, 1, 10, 100]);
        let sides = [side(0, &mut random), side(1, &mut random)];
        let mut pair = RelayPair::new(relays, per_side, 1);
        for ends in &mut pair.ends {
            ends.iter_mut().for_each(|end| end.capacity = ring_bytes);
            ends[per_side].capacity = 4 * FRAME_BYTES_MAX;
        }
        let mut world = Self {
            pair,
            sides,
            ranks: (0..count).map(rank).collect(),
            per_side,
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

    /// Side and port of a rank.
    fn port_of(&self, rank: usize) -> (usize, usize) {
        (self.side_of(rank), rank % self.per_side)
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
            self.break_stream();
        }
        if self.pair.ends[0][self.per_side].link.is_none() && self.random.percent(2) {
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
            self.pair.handle_time(self.micros / 1_000);
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
        let process = it.process.insert(process);
        let end = &mut self.pair.ends[side][rank % self.per_side];
        process.exchange_rings(end);
        end.is_stalled = false;
        self.attach(rank, log_position)
    }

    /// Attaches the present incarnation of a rank to its relay, at its position in the log.
    fn attach(&mut self, rank: usize, log_position: LogPosition) -> Result<(), Violation> {
        let it = &self.ranks[rank];
        let log_position = LogPosition { kept: it.released, ..log_position };
        let (address, start) = (address(it.task.index), it.incarnation - 1);
        let attached = self.pair.attach(self.port_of(rank), address, start, log_position);
        attached.map_err(|why| Violation(format!("{rank} cannot come back: {why}")))
    }

    /// The checkpoint with which the next incarnation begins: the newest, or the one before if the
    /// newest is torn; `None` for a start without a checkpoint.
    fn newest_checkpoint(&mut self, rank: usize) -> Option<CheckpointImage> {
        let it = &mut self.ranks[rank];
        if it.released == 0 && !it.needs_checkpoint && self.random.percent(10) {
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
        self.handle_remarks(side)
    }

    /// Handles the relay's reports of processes whose log has become too large to be kept, or can
    /// be kept again.
    fn handle_remarks(&mut self, side: usize) -> Result<(), Violation> {
        let has_tight_memory = self.sides[side].has_tight_memory;
        let relay = &mut self.pair.relays[side];
        while let Some(remark) = SlowDisk::poll_log_event(relay, has_tight_memory)? {
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
            rank.needs_checkpoint = true;
        }
        Ok(())
    }

    /// Lets the relay read the ring of a killed incarnation to its end.
    fn read_unread_output(&mut self, rank: usize) -> Result<(), Violation> {
        let stop = self.pair.drain(self.port_of(rank));
        require!(stop == Stop::Partial, "the last words of {rank}: {stop:?}");
        Ok(())
    }

    fn work(&mut self, rank: usize) -> Result<(), Violation> {
        let micros = self.micros;
        self.handle_remarks(self.side_of(rank))?;
        let is_killed = self.kills_left > 0 && self.random.below(1_000) < self.kill_permille;
        let is_killed = is_killed && !self.ranks[rank].is_unrecoverable;
        let (side, port) = self.port_of(rank);
        let end = &mut self.pair.ends[side][port];
        let it = &mut self.ranks[rank];
        let Some(process) = &mut it.process else { return Ok(()) };
        let (said, seen) = (end.input.len(), it.events.len());
        process.exchange_rings(end);
        let result = process.step(micros)?;
        process.exchange_rings(end);
        if result == StepResult::NeedsRelay {
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
        let (side, port) = self.port_of(rank);
        let it = &mut self.ranks[rank];
        let Some(process) = it.process.take() else { return };
        let input = &mut self.pair.ends[side][port].input;
        let mut ends = vec![said];
        ends.extend(frames(&input[said..]).scan(said, |at, (_, frame)| {
            *at += frame.len();
            Some(*at)
        }));
        let (end, at) = (self.random.pick(&ends), input.len());
        input.truncate(end);
        self.pair.ends[side][port].is_stalled = true;
        let is_again = process.cursor.replayed_determinants > 0;
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
        for port in 0..=self.per_side {
            self.read_port(side, port)?;
        }
        // Full outputs may have capacity again; other outputs are written when the relay requests
        // it.
        for port in 0..self.per_side {
            if self.pair.ends[side][port].is_full {
                self.pair.write(side, port);
            }
        }
        self.pair.write(side, self.per_side);
        self.pair.flush(side, &[]);
        while let Some(port) = self.pair.poll_resume(side) {
            self.read_port(side, port)?;
        }
        let relay = &mut self.pair.relays[side];
        if relay.recovery().has_replay_work() {
            self.counts.count("replay pieces sent");
            relay.replay_next();
            self.pair.flush(side, &[]);
        }
        let (relay, disk) = (&mut self.pair.relays[side], &mut self.sides[side].disk);
        disk.work(relay, &mut self.random, &mut self.counts)
    }

    /// Lets the relay read a random part of the bytes that a process has written, or all bytes of
    /// the stream.
    fn read_port(&mut self, side: usize, port: usize) -> Result<(), Violation> {
        let end = &self.pair.ends[side][port];
        if !end.may_be_read() || end.is_stalled {
            return Ok(());
        }
        let part = match port < self.per_side {
            true => self.random.below(end.input.len() as u64 + 1) as usize,
            false => usize::MAX,
        };
        let Some((_, stop)) = self.pair.read(side, port, part) else { return Ok(()) };
        require!(!matches!(stop, Stop::Broken(_)), "port {port} of side {side} ends: {stop:?}");
        Ok(())
    }

    // --- the stream between them

    fn break_stream(&mut self) {
        self.pair.disconnect(self.per_side);
        self.counts.count("streams broken");
    }

    fn connect_relays(&mut self) -> Result<(), Violation> {
        self.pair.connect(self.per_side).map_err(|why| Violation(why.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Mode;
    use super::super::tests::find_nothing;
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
        let events = [
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
        ];
        find_nothing(0..SEEDS, Mode::Recovery, &events);
    }
}
