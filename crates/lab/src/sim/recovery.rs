//! Processes that crash, and are brought back from their relay's record, under a seed.
//!
//! Two clusters, each with a relay that records; a stream between them that breaks; programs ([`process`]) that send each
//! other messages of all sizes and take what comes, in an order that chance decides. Any of them may be killed, also in the
//! middle of what it says, several at once, and while it comes back.
//!
//! Images are taken of them now and then; a new start then begins with the newest, or the one before, and what led to the older is
//! dropped by the relay.
//!
//! Some relays have so little memory that they give processes up. Such a one is not killed until its next image is there, from
//! which it can come back; if there was too much while it was away, the job has ended.
//!
//! What may never happen: a new start sees something else, or in another order, than the one before; a message is lost,
//! doubled or changed; somebody hears that another one is gone; a relay stops one for doing something else than before.

mod disk;
mod process;

use landbridge_proto::id::{Address, ClusterId};
use landbridge_proto::relay::{FRAME_BYTES_MAX, Relay, Remark, Stop};
use landbridge_proto::route::table::{LinkId, Range};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header};
use landbridge_proto::wire::hello::Standing;

use super::random::Random;
use super::{Tally, Violation, require};
use disk::Disk;
use process::{Event, Image, Need, Process, Task};

/// More steps than any run takes.
const STEPS_MAX: usize = 3_000_000;
/// Microseconds that a step takes at most, and that one may take in which everybody sleeps.
const STEP_MICROS: u64 = 400;
const SLEEP_MICROS: u64 = 2_000_000;
/// Images of a process that are kept.
const IMAGES: usize = 2;

/// One process, whichever start of it there is.
struct Rank {
    task: Task,
    process: Option<Process>,
    incarnation: u32,
    link: Option<LinkId>,
    /// What a killed start has left in its ring.
    last_words: Vec<u8>,
    polls: u64,
    /// What the start that came furthest has seen.
    events: Vec<Event>,
    is_paused: bool,
    /// Something for it has found no room in its ring.
    is_full: bool,
    is_done: bool,
    /// The newest ones, oldest first.
    images: Vec<Image>,
    /// It will never stand before so many intakes any more.
    kept: u64,
    /// It can come back no longer.
    is_given_up: bool,
}

/// One side: its relay and the stream to the other.
struct Side {
    relay: Relay,
    disk: Disk,
    lane: Option<LinkId>,
    /// Bytes from the other side.
    wire: Vec<u8>,
    is_paused: bool,
    /// What its relay keeps may be too much.
    is_tight: bool,
}

struct World {
    random: Random,
    sides: [Side; 2],
    ranks: Vec<Rank>,
    per_side: usize,
    ring_bytes: usize,
    micros: u64,
    /// Of a thousand steps, in how many somebody is killed, the stream breaks, or an image is taken.
    kills: u64,
    breaks: u64,
    images: u64,
    kills_left: u32,
    /// Somebody who was killed cannot come back.
    has_ended: bool,
    tally: Tally,
    trace: bool,
}

/// Runs one seed.
pub fn run(seed: u64, trace: bool) -> Result<Tally, Violation> {
    let mut world = World::new(seed, trace)?;
    for _ in 0..STEPS_MAX {
        if world.has_ended {
            world.tally.count("jobs ended by too little memory");
            return Ok(world.tally);
        }
        if world.ranks.iter().all(|rank| rank.is_done && rank.process.is_some()) {
            return Ok(world.tally);
        }
        world.step()?;
    }
    Err(Violation("the programs never end".into()))
}

impl World {
    fn new(seed: u64, trace: bool) -> Result<Self, Violation> {
        let mut random = Random::new(seed);
        let per_side = random.pick(&[1, 1, 2]);
        let count = 2 * per_side as u32;
        let bytes_max = random.pick(&[10, 500, 5_000, 60_000, 200_000]);
        let each = random.pick(&[3, 20, 60]).min(4_000_000 / bytes_max.max(1) as u32);
        let window = random.pick(&[100, 5_000, 100_000]);
        let task = |index| Task { index, count, each, bytes_max, seed, window };
        let rank = |index| Rank {
            task: task(index),
            process: None,
            incarnation: 0,
            link: None,
            last_words: Vec::new(),
            polls: 0,
            events: Vec::new(),
            is_paused: false,
            is_full: false,
            is_done: false,
            images: Vec::new(),
            kept: 0,
            is_given_up: false,
        };
        let range =
            |first| Range { first: first * per_side as u32, count: per_side as u32, spawned: 0 };
        let micros = random.below(1 << 40);
        let side = |own, random: &mut Random| {
            let relay = Relay::new(ClusterId(own), vec![range(0), range(1)], micros / 1_000);
            let mut relay = relay.map_err(|why| Violation(why.into()))?;
            let (disk, room) = Disk::new(random);
            let is_tight = room.is_none() && seed.is_multiple_of(3);
            match room {
                Some(room) => relay.set_recovering_within(room),
                None if is_tight => relay.set_recovering_within(Disk::tight(seed)),
                None => relay.set_recovering(),
            }
            Ok(Side { relay, disk, lane: None, wire: Vec::new(), is_paused: false, is_tight })
        };
        let ring_bytes = random.pick(&[FRAME_BYTES_MAX, 2 * FRAME_BYTES_MAX, 256 << 10]);
        let (kills, breaks) = (random.pick(&[1, 5, 20, 100]), random.pick(&[0, 0, 1, 10]));
        let kills_left = random.pick(&[1, 3, 10, 30]);
        let images = random.pick(&[0, 0, 1, 10, 100]);
        let sides = [side(0, &mut random)?, side(1, &mut random)?];
        let mut world = Self {
            sides,
            ranks: (0..count).map(rank).collect(),
            per_side,
            ring_bytes,
            micros,
            kills,
            breaks,
            images,
            kills_left,
            has_ended: false,
            random,
            tally: Tally::default(),
            trace,
        };
        world.join()?;
        Ok(world)
    }

    fn say(&self, what: impl FnOnce() -> String) {
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
        if self.random.below(1_000) < self.breaks {
            self.part()?;
        }
        if self.sides[0].lane.is_none() && self.random.percent(2) {
            self.join()?;
        }
        for side in 0..2 {
            if self.random.percent(50) {
                self.serve(side)?;
            }
        }
        // A jump now and then, so that somebody asks because of the time.
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
        self.hear_out(rank)?;
        self.hear_remarks(side)?;
        if self.has_ended {
            return Ok(());
        }
        let image = self.newest_image(rank);
        let Rank { task, incarnation, polls, .. } = self.ranks[rank];
        let process = match &image {
            Some(image) => Process::of_image(task, image, polls, micros)?,
            None => Process::new(task, polls, micros),
        };
        let standing = image.map_or(Standing::default(), |image| image.standing);
        self.say(|| format!("{rank} begins for the {incarnation}th time: {standing:?}"));
        let it = &mut self.ranks[rank];
        it.incarnation += 1;
        it.process = Some(process);
        self.attach(rank, standing)?;
        self.drain(side, &[])
    }

    /// The present start of a process is there, and stands there in what is on record.
    fn attach(&mut self, rank: usize, standing: Standing) -> Result<(), Violation> {
        let side = self.side_of(rank);
        let it = &mut self.ranks[rank];
        let standing = Standing { kept: it.kept, ..standing };
        let (address, start) = (Address::new(it.task.index, 0), it.incarnation - 1);
        let link = self.sides[side].relay.attach_at(address, start, standing);
        let link = link.map_err(|why| Violation(format!("{rank} cannot come back: {why}")))?;
        self.ranks[rank].link = Some(link);
        Ok(())
    }

    /// The image with which the next start begins: the newest, unless that is torn; or none.
    fn newest_image(&mut self, rank: usize) -> Option<Image> {
        let it = &mut self.ranks[rank];
        if it.kept == 0 && self.random.percent(10) {
            return None;
        }
        if it.images.len() == IMAGES && self.random.percent(20) {
            it.images.pop();
            self.tally.count("images torn");
        }
        let image = it.images.last()?;
        self.tally.count("starts from an image");
        Some(image.clone())
    }

    fn take_image(&mut self, rank: usize) -> Result<(), Violation> {
        let side = self.side_of(rank);
        let it = &mut self.ranks[rank];
        let Some(process) = it.process.as_mut().filter(|it| it.may_stand_aside()) else {
            return Ok(());
        };
        let image = process.stand_aside();
        it.last_words = std::mem::take(&mut process.up);
        if it.images.len() == IMAGES {
            it.kept = it.kept.max(it.images[0].standing.intakes);
            it.images.remove(0);
        }
        let standing = image.standing;
        it.images.push(image);
        self.tally.count("images taken");
        self.say(|| format!("an image of {rank}: {standing:?}"));
        self.hear_out(rank)?;
        self.attach(rank, standing)?;
        self.drain(side, &[])?;
        self.hear_remarks(side)
    }

    /// Of whom there is too much to be kept, and of whom no longer.
    fn hear_remarks(&mut self, side: usize) -> Result<(), Violation> {
        let Side { relay, is_tight, .. } = &mut self.sides[side];
        while let Some(remark) = Disk::hear(relay, *is_tight)? {
            let (Remark::GivenUp(who, _) | Remark::BegunAnew(who)) = remark else {
                return Err(Violation(format!("{remark:?}")));
            };
            let rank = &mut self.ranks[who.index() as usize];
            rank.is_given_up = matches!(remark, Remark::GivenUp(..));
            if rank.is_given_up {
                self.tally.count("processes given up");
                self.has_ended |= rank.process.is_none();
                continue;
            }
            self.tally.count("processes recorded anew");
            // Those before are of no use.
            rank.images.drain(..rank.images.len() - 1);
            rank.kept = rank.images[0].standing.intakes;
        }
        Ok(())
    }

    /// The ring of a start that was killed is read to its end.
    fn hear_out(&mut self, rank: usize) -> Result<(), Violation> {
        let side = self.side_of(rank);
        let Some(link) = self.ranks[rank].link.take() else { return Ok(()) };
        let mut bytes = std::mem::take(&mut self.ranks[rank].last_words);
        self.ranks[rank].is_paused = false;
        let relay = &mut self.sides[side].relay;
        relay.hear_out(link);
        let taken = relay.handle_input(link, &mut bytes);
        require!(taken.stop == Stop::Partial, "the last words of {rank}: {:?}", taken.stop);
        self.drain(side, &bytes)?;
        self.sides[side].relay.suspend(link);
        Ok(())
    }

    fn work(&mut self, rank: usize) -> Result<(), Violation> {
        let micros = self.micros;
        self.hear_remarks(self.side_of(rank))?;
        let is_killed = self.kills_left > 0 && self.random.below(1_000) < self.kills;
        let is_killed = is_killed && !self.ranks[rank].is_given_up;
        let it = &mut self.ranks[rank];
        let Some(process) = &mut it.process else { return Ok(()) };
        let (said, seen) = (process.up.len(), it.events.len());
        if process.step(micros)? == Need::Relay {
            self.tally.count("waits for the relay");
        }
        it.polls = it.polls.max(process.polls);
        let known = it.events.len().min(process.events.len());
        require!(it.events[..known] == process.events[..known], "{rank} sees something else");
        it.events.extend_from_slice(&process.events[known..]);
        it.is_done |= process.is_done();
        if is_killed {
            it.events.truncate(seen.max(known));
            self.kill(rank, said);
        } else if self.random.below(1_000) < self.images {
            self.take_image(rank)?;
        }
        Ok(())
    }

    /// It is killed while it said what lies behind `said` in its ring: some of that has been.
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
        let is_again = process.intakes_again > 0;
        it.last_words = process.up[..end].to_vec();
        it.is_done = false;
        self.tally.count("processes killed");
        self.tally.add_some("intakes done again", process.intakes_again);
        if is_again && process.polls < it.polls {
            self.tally.count("processes killed while they come back");
        }
        if end < at {
            self.tally.count("processes killed in the middle of what they say");
        }
        self.say(|| format!("{rank} is killed"));
    }

    // --- relays

    fn serve(&mut self, side: usize) -> Result<(), Violation> {
        for rank in side * self.per_side..(side + 1) * self.per_side {
            self.hand_over(rank)?;
        }
        self.hand_over_wire(side)?;
        // Full outputs may have room again; others are written when the relay says so.
        for rank in side * self.per_side..(side + 1) * self.per_side {
            let it = &self.ranks[rank];
            if let (Some(link), true) = (it.link, it.process.is_some() && it.is_full) {
                self.write(side, link, &[])?;
            }
        }
        if let Some(lane) = self.sides[side].lane {
            self.write(side, lane, &[])?;
        }
        self.drain(side, &[])?;
        while let Some(link) = self.sides[side].relay.poll_resume() {
            // Both relays number their links from the beginning.
            let mut own = side * self.per_side..(side + 1) * self.per_side;
            match own.find(|rank| self.ranks[*rank].link == Some(link)) {
                Some(rank) => {
                    self.ranks[rank].is_paused = false;
                    self.hand_over(rank)?;
                }
                None => {
                    self.sides[side].is_paused = false;
                    self.hand_over_wire(side)?;
                }
            }
        }
        if self.sides[side].relay.has_to_tell() {
            self.tally.count("pieces told");
            self.sides[side].relay.tell();
            self.drain(side, &[])?;
        }
        let Side { relay, disk, .. } = &mut self.sides[side];
        disk.work(relay, &mut self.random, &mut self.tally)?;
        Ok(())
    }

    /// The relay reads some of what a process has said.
    fn hand_over(&mut self, rank: usize) -> Result<(), Violation> {
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

    fn hand_over_wire(&mut self, side: usize) -> Result<(), Violation> {
        let (Some(lane), false) = (self.sides[side].lane, self.sides[side].is_paused) else {
            return Ok(());
        };
        let mut bytes = self.sides[side].wire.clone();
        let taken = self.sides[side].relay.handle_input(lane, &mut bytes);
        self.drain(side, &bytes)?;
        self.sides[side].wire.drain(..taken.bytes);
        self.sides[side].is_paused = taken.stop == Stop::Full;
        require!(!matches!(taken.stop, Stop::Broken(_)), "relays: {:?}", taken.stop);
        Ok(())
    }

    fn drain(&mut self, side: usize, buffer: &[u8]) -> Result<(), Violation> {
        while let Some(output) = self.sides[side].relay.poll_flush() {
            for number in 0..self.sides[side].relay.writer_count(output) {
                if let Some(writer) = self.sides[side].relay.writer(output, number) {
                    self.write(side, writer, buffer)?;
                }
            }
            self.sides[side].relay.keep(output, buffer);
        }
        Ok(())
    }

    /// Hands to whoever is at the other end of a link what it has room for.
    fn write(&mut self, side: usize, link: LinkId, buffer: &[u8]) -> Result<(), Violation> {
        let [one, other] = &mut self.sides;
        let (own, far) = if side == 0 { (one, other) } else { (other, one) };
        let first = side * self.per_side;
        let ranks = &mut self.ranks[first..first + self.per_side];
        if own.lane == Some(link) {
            fill(&mut own.relay, link, buffer, &mut far.wire, 4 * FRAME_BYTES_MAX);
        } else if let Some(rank) = ranks.iter_mut().find(|rank| rank.link == Some(link))
            && let Some(process) = &mut rank.process
        {
            rank.is_full = fill(&mut own.relay, link, buffer, &mut process.down, self.ring_bytes);
        }
        Ok(())
    }

    // --- the stream between them

    fn part(&mut self) -> Result<(), Violation> {
        let [one, other] = &mut self.sides;
        for side in [one, other] {
            if let Some(lane) = side.lane.take() {
                side.relay.disconnect(lane);
            }
            side.wire.clear();
            side.is_paused = false;
        }
        self.tally.count("streams broken");
        self.drain(0, &[])?;
        self.drain(1, &[])
    }

    fn join(&mut self) -> Result<(), Violation> {
        for side in 0..2 {
            let relay = &mut self.sides[side].relay;
            let peer = relay.peer(ClusterId(1 - side as u16));
            let Some(peer) = peer else { return Err(Violation("there is no other relay".into())) };
            let reunion = relay.connect(peer, 1).map_err(|why| Violation(why.into()))?;
            self.sides[side].lane = Some(reunion.lane);
        }
        self.drain(0, &[])?;
        self.drain(1, &[])
    }
}

/// Writes what waits for a link, as a driver does. Whether there was more than room for it.
fn fill(relay: &mut Relay, link: LinkId, buffer: &[u8], to: &mut Vec<u8>, capacity: usize) -> bool {
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
    fn whoever_crashes_comes_back_to_where_it_was() {
        let mut all = Tally::default();
        for seed in 0..SEEDS {
            match run(seed, false) {
                Ok(tally) => all.add(&tally),
                Err(violation) => panic!("seed {seed}: {}", violation.0),
            }
        }
        for event in [
            "processes killed",
            "processes killed while they come back",
            "processes killed in the middle of what they say",
            "intakes done again",
            "pieces told",
            "segments written",
            "segments read back",
            "waits for the relay",
            "streams broken",
            "images taken",
            "images torn",
            "starts from an image",
            "processes given up",
            "processes recorded anew",
        ] {
            assert!(all.of(event) > 0, "{event}: never happened\n{all}");
        }
    }
}
