//! Paths that let nothing through and tell nobody, both ways or one way only; and single-path periods: times in which every two processes
//! have one path left that works.
//!
//! A path that keeps order holds what has entered until its outage ends, for kernels send it again; one that loses in silence,
//! or carries datagrams, loses what enters meanwhile. A driver notices what is not confirmed, each side for itself and some
//! time later, and suspects the path (of datagrams it may make a spare one instead). In a single-path period every other path is broken, silent,
//! or half open, nothing is mended, and nothing else goes wrong.
//!
//! What may never happen: something that one process has for another does not arrive although a path between them works; it
//! takes longer than the longest wait between two questions ([`WAIT_MAX`]) before it goes on.

use landbridge_proto::channel::PathId;
use landbridge_proto::channel::probe_timeout::PROBE_TIMEOUT_NANOS_MAX;
use landbridge_proto::endpoint::PathProperties;
use landbridge_proto::path::time::{MILLISECOND, SECOND, Time};

use super::frame_transfer::PATHS_MAX;
use super::world::{STEPS_MAX, World};
use super::{Violation, require};

/// Nothing arrives by a path in some direction.
pub struct Outage {
    /// Between whom, and which of their paths.
    ends: [usize; 2],
    path_id: usize,
    /// None: as long as the single-path period.
    until: Option<Time>,
    /// When each side notices, if it does.
    detected_at: [Option<Time>; 2],
    /// Whoever notices makes it a spare path; so it was before.
    was_spare: Option<[bool; 2]>,
}

/// Every two processes have one path left.
pub struct SinglePathPeriod {
    /// Which: `[from][to]`.
    last: Vec<Vec<usize>>,
    /// What the world did to frames before.
    corrupt_percent: u64,
    silent_loss_permille: u64,
    /// Those paths lose nothing.
    is_clean: bool,
}

/// What has been achieved so far: bytes taken in, and commands that wait for their end.
type Progress = (u64, usize);

/// The longest time for which nothing arrives.
const SPAN_MAX: u64 = 100 * SECOND;

/// A driver notices at the latest so long after a path has fallen silent: `suspect_after`, some round trips, and what a
/// busy machine adds.
const DETECTION_MAX: u64 = 300 * MILLISECOND;

/// Nothing goes on for so long at most while a path works, if that loses nothing: the longest wait between two questions, for
/// the last may have been asked just before, a first one of its own, and the notice.
const WAIT_MAX: u64 = 2 * PROBE_TIMEOUT_NANOS_MAX;

/// A question or its answer may be lost so often in a row: at a fifth, once in many millions.
const LOSSES_MAX: u64 = 12;

impl World {
    /// Nothing arrives by some path for a while, in one direction or both, and nobody is told.
    pub fn begin_random_outage(&mut self) {
        let count = self.nodes.len();
        let (a, b) = (self.random.index(count), self.random.index(count));
        let path_id = self.random.index(PATHS_MAX);
        let span = self.random.pick(&[MILLISECOND, 100 * MILLISECOND, 3 * SECOND, SPAN_MAX]);
        if a == b || !self.may_begin_outage(a, b, path_id) {
            return;
        }
        let is_blackholed = self.random.pick(&[[true, false], [true, true]]);
        let until = Some(self.now.after(span));
        let detected_at = [0, 1].map(|_| self.random.percent(50).then(|| self.detection_time()));
        let is_spare_made = self.random.percent(50);
        self.begin_outage([a, b], path_id, is_blackholed, until, detected_at, is_spare_made);
    }

    fn may_begin_outage(&self, a: usize, b: usize, path_id: usize) -> bool {
        let is_there = self.nodes[a].paths[b].get(path_id).is_some_and(|path| !path.lossless);
        let is_out = |outage: &Outage| {
            outage.path_id == path_id && (outage.ends == [a, b] || outage.ends == [b, a])
        };
        is_there && !self.outages.iter().any(is_out)
    }

    fn detection_time(&mut self) -> Time {
        self.now.after(self.random.below(DETECTION_MAX))
    }

    fn begin_outage(
        &mut self,
        ends: [usize; 2],
        path_id: usize,
        is_blackholed: [bool; 2],
        until: Option<Time>,
        detected_at: [Option<Time>; 2],
        makes_spare: bool,
    ) {
        let [a, b] = ends;
        self.counts.count(if is_blackholed == [true; 2] {
            "outages in both directions"
        } else {
            "outages in one direction"
        });
        self.log_step(|| {
            format!("path {path_id} between {a} and {b} falls silent: {is_blackholed:?}")
        });
        self.blackholed[a][b][path_id] = is_blackholed[0];
        self.blackholed[b][a][path_id] = is_blackholed[1];
        let spare = [self.nodes[a].paths[b][path_id].spare, self.nodes[b].paths[a][path_id].spare];
        let was_spare = (makes_spare && self.has_datagrams(a, b, path_id)).then_some(spare);
        self.outages.push(Outage { ends, path_id, until, detected_at, was_spare });
    }

    /// Outages end, and are detected, as time goes on.
    pub fn update_outages(&mut self) -> Result<(), Violation> {
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
                if outage.detected_at[side].take_if(|at| *at <= now).is_some() {
                    let (ends, path_id) = (outage.ends, outage.path_id);
                    let makes_spare = outage.was_spare.is_some();
                    let (from, to) = (ends[side], ends[1 - side]);
                    self.suspect(from, to, path_id, makes_spare)?;
                }
            }
        }
        Ok(())
    }

    fn suspect(
        &mut self,
        from: usize,
        to: usize,
        path_id: usize,
        makes_spare: bool,
    ) -> Result<(), Violation> {
        if self.model.failed[from][to] {
            return Ok(());
        }
        if !makes_spare {
            return self.set_suspected(from, to, path_id, true);
        }
        self.counts.count("unresponsive paths made spare");
        self.set_spare(from, to, path_id, true)
    }

    fn set_spare(
        &mut self,
        from: usize,
        to: usize,
        path_id: usize,
        spare: bool,
    ) -> Result<(), Violation> {
        self.log_step(|| format!("{from} has path {path_id} to {to} as a spare one: {spare}"));
        let path = &mut self.nodes[from].paths[to][path_id];
        *path = PathProperties { spare, ..*path };
        let path = *path;
        let peer = self.peer(from, to);
        self.nodes[from].endpoint.set_path(peer, PathId(path_id as u8), path);
        self.drain(from)
    }

    fn end_outage(&mut self, outage: &Outage) -> Result<(), Violation> {
        let Outage { ends: [a, b], path_id, was_spare, .. } = *outage;
        self.log_step(|| format!("path {path_id} between {a} and {b} lets things through again"));
        self.blackholed[a][b][path_id] = false;
        self.blackholed[b][a][path_id] = false;
        for (side, (from, to)) in [(a, b), (b, a)].into_iter().enumerate() {
            if self.model.failed[from][to] {
                continue;
            }
            match was_spare {
                Some(was) => self.set_spare(from, to, path_id, was[side])?,
                None => self.set_suspected(from, to, path_id, false)?,
            }
        }
        Ok(())
    }

    /// When the next outage ends, or is detected.
    pub fn next_outage_change(&self) -> Option<Time> {
        let times = |outage: &Outage| [outage.until, outage.detected_at[0], outage.detected_at[1]];
        self.outages.iter().flat_map(times).flatten().min()
    }

    /// Whether a broken path may come back now.
    pub fn may_reopen(&self, a: usize, b: usize, path_id: usize) -> bool {
        let is_blackholed = self.blackholed[a][b][path_id] || self.blackholed[b][a][path_id];
        !is_blackholed
            && self.single_path.as_ref().is_none_or(|single_path| single_path.last[a][b] == path_id)
    }

    /// From now on every two processes have one path that works, until [`World::end_single_path`].
    pub fn begin_single_path(&mut self) -> Result<(), Violation> {
        self.log_step(|| "one path is left between any two".into());
        self.counts.count("single-path periods");
        for outage in std::mem::take(&mut self.outages) {
            self.end_outage(&outage)?;
        }
        let count = self.nodes.len();
        let is_clean = self.random.percent(50);
        let (corrupt_percent, silent_loss_permille) =
            (self.corrupt_percent, self.silent_loss_permille);
        if is_clean {
            (self.corrupt_percent, self.silent_loss_permille) = (0, 0);
        }
        let last = vec![vec![0; count]; count];
        self.single_path =
            Some(SinglePathPeriod { last, corrupt_percent, silent_loss_permille, is_clean });
        for a in 0..count {
            for b in a + 1..count {
                if !self.model.failed[a][b] && !self.model.failed[b][a] {
                    self.leave_one_path(a, b, is_clean)?;
                }
            }
        }
        Ok(())
    }

    /// Leaves one path between two processes.
    fn leave_one_path(&mut self, a: usize, b: usize, is_clean: bool) -> Result<(), Violation> {
        let path_count = self.pipes[a][b].len();
        // Shared memory does not fail.
        let lossless = self.nodes[a].paths[b].iter().position(|path| path.lossless);
        let last = lossless.unwrap_or_else(|| self.random.index(path_count));
        if let Some(single_path) = &mut self.single_path {
            (single_path.last[a][b], single_path.last[b][a]) = (last, last);
        }
        let makes_spare = self.random.percent(50);
        for (from, to) in [(a, b), (b, a)] {
            self.set_suspected(from, to, last, false)?;
            if makes_spare {
                self.set_spare(from, to, last, false)?;
            }
            if let (true, Some(network)) = (is_clean, &mut self.pipes[from][to][last].network) {
                network.stop_losses();
            }
        }
        if lossless.is_none() && self.random.percent(30) {
            // It comes back as soon as it is looked after.
            self.break_path(a, b, last)?;
        }
        for path_id in (0..path_count).filter(|&path_id| path_id != last) {
            self.disable_path(a, b, path_id, makes_spare)?;
        }
        Ok(())
    }

    /// Nothing goes by this path any more, at least in one direction.
    fn disable_path(
        &mut self,
        a: usize,
        b: usize,
        path_id: usize,
        makes_spare: bool,
    ) -> Result<(), Violation> {
        if !self.may_begin_outage(a, b, path_id) {
            return Ok(());
        }
        let is_blackholed = match self.random.below(4) {
            0 => return self.break_path(a, b, path_id),
            1 => [true, true],
            2 => [true, false],
            _ => [false, true],
        };
        // Confirmations and answers take the same path back, so whoever sends by it notices. Only relays confirm to each side
        // what it has given to them: there, who is heard may not notice.
        let is_relayed =
            !self.has_datagrams(a, b, path_id) && self.nodes[a].paths[b][path_id].silent_loss;
        let detected_at = is_blackholed.map(|blackholed| {
            let notices = blackholed || !is_relayed || self.random.percent(50);
            notices.then(|| self.detection_time())
        });
        self.begin_outage([a, b], path_id, is_blackholed, None, detected_at, makes_spare);
        Ok(())
    }

    /// Everything may come back.
    pub fn end_single_path(&mut self) -> Result<(), Violation> {
        let Some(single_path) = self.single_path.take() else {
            return Ok(());
        };
        self.log_step(|| "paths come back".into());
        (self.corrupt_percent, self.silent_loss_permille) =
            (single_path.corrupt_percent, single_path.silent_loss_permille);
        for outage in std::mem::take(&mut self.outages) {
            self.end_outage(&outage)?;
        }
        Ok(())
    }

    /// Runs a single-path period until all that anybody has for anybody else has arrived.
    pub fn run_single_path(&mut self) -> Result<(), Violation> {
        let is_clean = self.single_path.as_ref().is_some_and(|single_path| single_path.is_clean);
        let most = if is_clean { WAIT_MAX } else { LOSSES_MAX * WAIT_MAX };
        // A clock that has jumped back makes waits longer than any: they count from where it was before.
        let (mut seen, mut since) = (self.progress(), self.now.max(self.latest));
        for _ in 0..STEPS_MAX {
            let before = self.now;
            if !self.step()? {
                require!(
                    self.is_all_delivered(),
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
        (self.delivered_up_to.iter().flatten().sum(), self.model.operations.len())
    }

    /// Whether all that was sent has been taken in, and those who wait for a confirmation have it.
    pub fn is_all_delivered(&self) -> bool {
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
            let held = self.nodes[from].endpoint.channel_usage(peer);
            let is_delivered = held.sent == self.delivered_up_to[from][to];
            let is_quiet = held.queue == 0 && held.awaiting == 0;
            !is_delivered || !is_quiet || !self.model.flight[from][to].is_empty()
        })
    }
}
