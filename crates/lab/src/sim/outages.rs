//! Paths that let nothing through and tell nobody, both ways or one way only; and sieges: times in which every two processes
//! have one path left that works.
//!
//! A path that keeps order holds what has entered until its outage ends, for kernels send it again; one that loses in silence,
//! or carries datagrams, loses what enters meanwhile. A driver notices what is not confirmed, each side for itself and some
//! time later, and doubts the path (of datagrams it may make a spare one instead). In a siege every other path is broken, silent,
//! or half open, nothing is mended, and nothing else goes wrong.
//!
//! What may never happen: something that one process has for another does not arrive although a path between them works; it
//! takes longer than the longest wait between two questions ([`WAIT_MAX`]) before it goes on.

use landbridge_proto::channel::PathId;
use landbridge_proto::channel::probe::WAIT_NANOS_MAX;
use landbridge_proto::endpoint::Path;
use landbridge_proto::path::time::{MILLISECOND, SECOND, Time};

use super::lanes::LANES_MAX;
use super::world::{STEPS_MAX, World};
use super::{Violation, require};

/// Nothing arrives by a path in some direction.
pub struct Outage {
    /// Between whom, and which of their paths.
    ends: [usize; 2],
    lane: usize,
    /// None: as long as the siege.
    until: Option<Time>,
    /// When each side notices, if it does.
    noticed: [Option<Time>; 2],
    /// Whoever notices makes it a spare path; so it was before.
    was_spare: Option<[bool; 2]>,
}

/// Every two processes have one path left.
pub struct Siege {
    /// Which: `[from][to]`.
    last: Vec<Vec<usize>>,
    /// What the world did to frames before.
    spoils: u64,
    vanishes: u64,
    /// Those paths lose nothing.
    is_clean: bool,
}

/// What has been achieved so far: bytes taken in, and commands that wait for their end.
type Progress = (u64, usize);

/// The longest time for which nothing arrives.
const SPAN_MAX: u64 = 100 * SECOND;

/// A driver notices at the latest so long after a path has fallen silent: `suspect_after`, some round trips, and what a
/// busy machine adds.
const NOTICE_MAX: u64 = 300 * MILLISECOND;

/// Nothing goes on for so long at most while a path works, if that loses nothing: the longest wait between two questions, for
/// the last may have been asked just before, a first one of its own, and the notice.
const WAIT_MAX: u64 = 2 * WAIT_NANOS_MAX;

/// A question or its answer may be lost so often in a row: at a fifth, once in many millions.
const LOSSES_MAX: u64 = 12;

impl World {
    /// Nothing arrives by some path for a while, in one direction or both, and nobody is told.
    pub fn fall_silent(&mut self) {
        let count = self.nodes.len();
        let (a, b) = (self.random.index(count), self.random.index(count));
        let lane = self.random.index(LANES_MAX);
        let span = self.random.pick(&[MILLISECOND, 100 * MILLISECOND, 3 * SECOND, SPAN_MAX]);
        if a == b || !self.may_fall_silent(a, b, lane) {
            return;
        }
        let is_dead = self.random.pick(&[[true, false], [true, true]]);
        let until = Some(self.now.after(span));
        let noticed = [0, 1].map(|_| self.random.percent(50).then(|| self.notice()));
        let is_spare_made = self.random.percent(50);
        self.begin_outage([a, b], lane, is_dead, until, noticed, is_spare_made);
    }

    fn may_fall_silent(&self, a: usize, b: usize, lane: usize) -> bool {
        let is_there = self.nodes[a].paths[b].get(lane).is_some_and(|path| !path.lossless);
        let is_out = |outage: &Outage| {
            outage.lane == lane && (outage.ends == [a, b] || outage.ends == [b, a])
        };
        is_there && !self.outages.iter().any(is_out)
    }

    fn notice(&mut self) -> Time {
        self.now.after(self.random.below(NOTICE_MAX))
    }

    fn begin_outage(
        &mut self,
        ends: [usize; 2],
        lane: usize,
        is_dead: [bool; 2],
        until: Option<Time>,
        noticed: [Option<Time>; 2],
        makes_spare: bool,
    ) {
        let [a, b] = ends;
        self.tally.count(if is_dead == [true; 2] { "silences" } else { "half-open paths" });
        self.say(|| format!("path {lane} between {a} and {b} falls silent: {is_dead:?}"));
        self.dead[a][b][lane] = is_dead[0];
        self.dead[b][a][lane] = is_dead[1];
        let spare = [self.nodes[a].paths[b][lane].spare, self.nodes[b].paths[a][lane].spare];
        let was_spare = (makes_spare && self.has_datagrams(a, b, lane)).then_some(spare);
        self.outages.push(Outage { ends, lane, until, noticed, was_spare });
    }

    /// Outages end, and are noticed, as time goes on.
    pub fn tend_outages(&mut self) -> Result<(), Violation> {
        let now = self.now;
        while let Some(place) =
            self.outages.iter().position(|outage| outage.until.is_some_and(|until| until <= now))
        {
            let outage = self.outages.swap_remove(place);
            self.end_outage(&outage)?;
        }
        for place in 0..self.outages.len() {
            for side in 0..2 {
                let outage = &mut self.outages[place];
                if outage.noticed[side].take_if(|at| *at <= now).is_some() {
                    let (ends, lane) = (outage.ends, outage.lane);
                    let makes_spare = outage.was_spare.is_some();
                    let (from, to) = (ends[side], ends[1 - side]);
                    self.suspect(from, to, lane, makes_spare)?;
                }
            }
        }
        Ok(())
    }

    fn suspect(
        &mut self,
        from: usize,
        to: usize,
        lane: usize,
        makes_spare: bool,
    ) -> Result<(), Violation> {
        if self.model.failed[from][to] {
            return Ok(());
        }
        if !makes_spare {
            return self.doubt(from, to, lane, true);
        }
        self.tally.count("silent paths made spare");
        self.set_spare(from, to, lane, true)
    }

    fn set_spare(
        &mut self,
        from: usize,
        to: usize,
        lane: usize,
        spare: bool,
    ) -> Result<(), Violation> {
        self.say(|| format!("{from} has path {lane} to {to} as a spare one: {spare}"));
        let path = &mut self.nodes[from].paths[to][lane];
        *path = Path { spare, ..*path };
        let path = *path;
        let peer = self.peer(from, to);
        self.nodes[from].endpoint.set_path(peer, PathId(lane as u8), path);
        self.drain(from)
    }

    fn end_outage(&mut self, outage: &Outage) -> Result<(), Violation> {
        let Outage { ends: [a, b], lane, was_spare, .. } = *outage;
        self.say(|| format!("path {lane} between {a} and {b} lets things through again"));
        self.dead[a][b][lane] = false;
        self.dead[b][a][lane] = false;
        for (side, (from, to)) in [(a, b), (b, a)].into_iter().enumerate() {
            if self.model.failed[from][to] {
                continue;
            }
            match was_spare {
                Some(was) => self.set_spare(from, to, lane, was[side])?,
                None => self.doubt(from, to, lane, false)?,
            }
        }
        Ok(())
    }

    /// When the next outage ends, or is noticed.
    pub fn next_outage_event(&self) -> Option<Time> {
        let times = |outage: &Outage| [outage.until, outage.noticed[0], outage.noticed[1]];
        self.outages.iter().flat_map(times).flatten().min()
    }

    /// Whether a broken path may come back now.
    pub fn may_mend(&self, a: usize, b: usize, lane: usize) -> bool {
        let is_dead = self.dead[a][b][lane] || self.dead[b][a][lane];
        !is_dead && self.siege.as_ref().is_none_or(|siege| siege.last[a][b] == lane)
    }

    /// From now on every two processes have one path that works, until [`World::lift_siege`].
    pub fn besiege(&mut self) -> Result<(), Violation> {
        self.say(|| "one path is left between any two".into());
        self.tally.count("sieges");
        for outage in std::mem::take(&mut self.outages) {
            self.end_outage(&outage)?;
        }
        let count = self.nodes.len();
        let is_clean = self.random.percent(50);
        let (spoils, vanishes) = (self.spoils, self.vanishes);
        if is_clean {
            (self.spoils, self.vanishes) = (0, 0);
        }
        let last = vec![vec![0; count]; count];
        self.siege = Some(Siege { last, spoils, vanishes, is_clean });
        for a in 0..count {
            for b in a + 1..count {
                if !self.model.failed[a][b] && !self.model.failed[b][a] {
                    self.leave_one(a, b, is_clean)?;
                }
            }
        }
        Ok(())
    }

    /// Leaves one path between two processes.
    fn leave_one(&mut self, a: usize, b: usize, is_clean: bool) -> Result<(), Violation> {
        let lanes = self.links[a][b].len();
        // Shared memory does not fail.
        let lossless = self.nodes[a].paths[b].iter().position(|path| path.lossless);
        let last = lossless.unwrap_or_else(|| self.random.index(lanes));
        if let Some(siege) = &mut self.siege {
            (siege.last[a][b], siege.last[b][a]) = (last, last);
        }
        let makes_spare = self.random.percent(50);
        for (from, to) in [(a, b), (b, a)] {
            self.doubt(from, to, last, false)?;
            if makes_spare {
                self.set_spare(from, to, last, false)?;
            }
            if let (true, Some(air)) = (is_clean, &mut self.links[from][to][last].air) {
                air.lose_nothing();
            }
        }
        if lossless.is_none() && self.random.percent(30) {
            // It comes back as soon as it is looked after.
            self.break_lane(a, b, last)?;
        }
        for lane in (0..lanes).filter(|&lane| lane != last) {
            self.ruin(a, b, lane, makes_spare)?;
        }
        Ok(())
    }

    /// Nothing goes by this path any more, at least in one direction.
    fn ruin(
        &mut self,
        a: usize,
        b: usize,
        lane: usize,
        makes_spare: bool,
    ) -> Result<(), Violation> {
        if !self.may_fall_silent(a, b, lane) {
            return Ok(());
        }
        let is_dead = match self.random.below(4) {
            0 => return self.break_lane(a, b, lane),
            1 => [true, true],
            2 => [true, false],
            _ => [false, true],
        };
        // Confirmations and answers take the same path back, so whoever sends by it notices. Only relays confirm to each side
        // what it has given to them: there, who is heard may not notice.
        let is_relayed = !self.has_datagrams(a, b, lane) && self.nodes[a].paths[b][lane].silent;
        let noticed = is_dead.map(|dead| {
            let notices = dead || !is_relayed || self.random.percent(50);
            notices.then(|| self.notice())
        });
        self.begin_outage([a, b], lane, is_dead, None, noticed, makes_spare);
        Ok(())
    }

    /// Everything may come back.
    pub fn lift_siege(&mut self) -> Result<(), Violation> {
        let Some(siege) = self.siege.take() else {
            return Ok(());
        };
        self.say(|| "paths come back".into());
        (self.spoils, self.vanishes) = (siege.spoils, siege.vanishes);
        for outage in std::mem::take(&mut self.outages) {
            self.end_outage(&outage)?;
        }
        Ok(())
    }

    /// Runs a siege until all that anybody has for anybody else has arrived.
    pub fn endure(&mut self) -> Result<(), Violation> {
        let is_clean = self.siege.as_ref().is_some_and(|siege| siege.is_clean);
        let most = if is_clean { WAIT_MAX } else { LOSSES_MAX * WAIT_MAX };
        // A clock that has jumped back makes waits longer than any: they count from where it was before.
        let (mut seen, mut since) = (self.progress(), self.now.max(self.latest));
        for _ in 0..STEPS_MAX {
            let before = self.now;
            if !self.step()? {
                require!(
                    self.is_through(),
                    "something is stuck, though a path works: {:?}",
                    self.stuck()
                );
                return Ok(());
            }
            if self.now.nanos_since(before) < MILLISECOND {
                continue;
            }
            let progress = self.progress();
            if progress != seen {
                (seen, since) = (progress, before.max(since));
            }
            let waited = self.now.nanos_since(since);
            require!(
                waited <= most,
                "nothing goes on for {waited} ns, though a path works: {:?}",
                self.stuck()
            );
        }
        Err(Violation("the processes never come to rest, though a path works".into()))
    }

    fn progress(&self) -> Progress {
        (self.taken.iter().flatten().sum(), self.model.tickets.len())
    }

    /// Whether all that was sent has been taken in, and those who wait for a confirmation have it.
    pub fn is_through(&self) -> bool {
        self.stuck().is_none()
    }

    /// Between whom something is under way.
    fn stuck(&self) -> Option<(usize, usize)> {
        let count = self.nodes.len();
        let mut pairs = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        pairs.find(|&(from, to)| {
            let Some(peer) = self.nodes[from].peers[to] else { return false };
            if self.model.failed[from][to] || self.model.failed[to][from] {
                return false;
            }
            let held = self.nodes[from].endpoint.holdings(peer);
            let is_taken = held.sent == self.taken[from][to];
            let is_quiet = held.queue == 0 && held.awaiting == 0;
            !is_taken || !is_quiet || !self.model.flight[from][to].is_empty()
        })
    }
}
