//! Paths that let nothing through without a notification, in both directions or in one; and
//! single-path periods, in which every two processes have one working path left.
//!
//! A path that keeps order holds all bytes that entered until the end of its outage, because
//! kernels retransmit; a path with silent loss or with datagrams loses everything that enters
//! during the outage. A driver detects missing acknowledgements, each side for itself and some time
//! later, and suspects the path (a path of datagrams may become a spare path instead). In a
//! single-path period every other path is broken, silent, or half open, no path is repaired, and no
//! other fault is injected.
//!
//! What may never happen: data of one process for another does not arrive although a path between
//! the processes works; progress takes longer than the longest wait between two status requests
//! ([`super::schedule`]).

use landbridge_proto::channel::PathId;
use landbridge_proto::path::time::{MILLISECOND, SECOND, Time};

use super::Violation;
use super::node::{PATHS_MAX, random_pipe};
use super::world::World;

/// An outage: nothing arrives by a path in at least one direction.
struct Outage {
    /// The two processes, and the number of their path.
    ends: [usize; 2],
    path_id: usize,
    /// End of the outage; `None` stands for the end of the single-path period.
    until: Option<Time>,
    /// Time at which each side detects the outage, if it does.
    detected_at: [Option<Time>; 2],
    /// If the side that detects the outage makes the path a spare path: whether the path was spare
    /// before, for each side.
    was_spare: Option<[bool; 2]>,
}

/// A single-path period: every two processes have one working path left.
struct SinglePathPeriod {
    /// The number of the working path: `[from][to]`.
    last: Vec<Vec<usize>>,
    /// Percentage of corrupt payloads before the period. `silent_loss_permille` is the rate of
    /// silent loss before the period.
    corrupt_percent: u64,
    silent_loss_permille: u64,
    /// Whether the working paths lose nothing.
    is_clean: bool,
}

/// All outages, and the single-path period, if there is one. [`World`] holds by direction and path
/// which paths let nothing through.
#[derive(Default)]
pub struct Outages {
    all: Vec<Outage>,
    single_path: Option<SinglePathPeriod>,
}

/// Longest outage in nanoseconds.
const SPAN_MAX: u64 = 100 * SECOND;

/// Longest time from an outage to its detection by a driver, in nanoseconds: `suspect_after`, some
/// round trips, and the delay of a busy machine.
const DETECTION_MAX: u64 = 300 * MILLISECOND;

impl Outages {
    /// Begins an outage of a random path, in one direction or both.
    pub fn begin_random(&mut self, world: &mut World) {
        let count = world.nodes.len();
        let (a, b) = (world.random.index(count), world.random.index(count));
        let path_id = world.random.index(PATHS_MAX);
        let span = world.random.pick(&[MILLISECOND, 100 * MILLISECOND, 3 * SECOND, SPAN_MAX]);
        if a == b || !self.may_begin(world, a, b, path_id) {
            return;
        }
        let is_blackholed = world.random.pick(&[[true, false], [true, true]]);
        let until = Some(world.now.after(span));
        let detected_at =
            [0, 1].map(|_| world.random.percent(50).then(|| Self::detection_time(world)));
        let is_spare_made = world.random.percent(50);
        let outage = Outage { ends: [a, b], path_id, until, detected_at, was_spare: None };
        self.begin(world, outage, is_blackholed, is_spare_made);
    }

    fn may_begin(&self, world: &World, a: usize, b: usize, path_id: usize) -> bool {
        let is_there = world.nodes[a].paths[b].get(path_id).is_some_and(|path| !path.lossless);
        let is_out = |outage: &Outage| {
            outage.path_id == path_id && (outage.ends == [a, b] || outage.ends == [b, a])
        };
        is_there && !self.all.iter().any(is_out)
    }

    fn detection_time(world: &mut World) -> Time {
        world.now.after(world.random.below(DETECTION_MAX))
    }

    fn begin(
        &mut self,
        world: &mut World,
        outage: Outage,
        is_blackholed: [bool; 2],
        makes_spare: bool,
    ) {
        let Outage { ends: [a, b], path_id, .. } = outage;
        world.counts.count(if is_blackholed == [true; 2] {
            "outages in both directions"
        } else {
            "outages in one direction"
        });
        world.log_step(|| {
            format!("path {path_id} between {a} and {b} falls silent: {is_blackholed:?}")
        });
        world.blackholed[a][b][path_id] = is_blackholed[0];
        world.blackholed[b][a][path_id] = is_blackholed[1];
        let spare =
            [world.nodes[a].paths[b][path_id].spare, world.nodes[b].paths[a][path_id].spare];
        let was_spare = (makes_spare && world.has_datagrams(a, b, path_id)).then_some(spare);
        self.all.push(Outage { was_spare, ..outage });
    }

    /// Ends outages, and lets drivers detect outages, as time passes.
    pub fn update(&mut self, world: &mut World) -> Result<(), Violation> {
        let now = world.now;
        while let Some(place) =
            self.all.iter().position(|outage| outage.until.is_some_and(|until| until <= now))
        {
            let outage = self.all.swap_remove(place);
            Self::end(world, &outage)?;
        }
        for place in 0..self.all.len() {
            for side in 0..2 {
                let outage = &mut self.all[place];
                if outage.detected_at[side].take_if(|at| *at <= now).is_some() {
                    let (ends, path_id) = (outage.ends, outage.path_id);
                    let makes_spare = outage.was_spare.is_some();
                    let (from, to) = (ends[side], ends[1 - side]);
                    Self::suspect(world, from, to, path_id, makes_spare)?;
                }
            }
        }
        Ok(())
    }

    fn suspect(
        world: &mut World,
        from: usize,
        to: usize,
        path_id: usize,
        makes_spare: bool,
    ) -> Result<(), Violation> {
        if world.model.failed[from][to] {
            return Ok(());
        }
        if !makes_spare {
            return world.set_suspected(from, to, path_id, true);
        }
        world.counts.count("unresponsive paths made spare");
        world.set_spare(from, to, path_id, true)
    }

    fn end(world: &mut World, outage: &Outage) -> Result<(), Violation> {
        let Outage { ends: [a, b], path_id, was_spare, .. } = *outage;
        world.log_step(|| format!("path {path_id} between {a} and {b} lets things through again"));
        world.blackholed[a][b][path_id] = false;
        world.blackholed[b][a][path_id] = false;
        for (side, (from, to)) in [(a, b), (b, a)].into_iter().enumerate() {
            if world.model.failed[from][to] {
                continue;
            }
            match was_spare {
                Some(was) => world.set_spare(from, to, path_id, was[side])?,
                None => world.set_suspected(from, to, path_id, false)?,
            }
        }
        Ok(())
    }

    /// Reopens a broken path; returns false if no path may be reopened.
    pub fn reopen_path(&mut self, world: &mut World) -> Result<bool, Violation> {
        if world.broken.is_empty() {
            return Ok(false);
        }
        let first = world.random.index(world.broken.len());
        let mut places = (first..world.broken.len()).chain(0..first);
        let may_come = |&place: &usize| {
            let (a, b, path_id) = world.broken[place];
            self.may_reopen(world, a, b, path_id)
        };
        let Some(place) = places.find(may_come) else {
            return Ok(false);
        };
        let (a, b, path_id) = world.broken.swap_remove(place);
        world.log_step(|| format!("path {path_id} between {a} and {b} is back"));
        for (from, to) in [(a, b), (b, a)] {
            if !world.model.failed[from][to] && !world.model.failed[to][from] {
                let path = world.nodes[from].paths[to][path_id];
                world.pipes[from][to][path_id] = random_pipe(&path, &mut world.random);
            }
        }
        for (node, other) in [(a, b), (b, a)] {
            if world.model.failed[node][other] {
                continue;
            }
            let peer = world.peer(node, other);
            let path = world.nodes[node].paths[other][path_id];
            world.nodes[node].endpoint.channel_mut(peer).open_path(PathId(path_id as u8), path);
            world.drain(node)?;
        }
        Ok(true)
    }

    /// The next time at which an outage ends or is detected.
    pub fn next_change(&self) -> Option<Time> {
        let times = |outage: &Outage| [outage.until, outage.detected_at[0], outage.detected_at[1]];
        self.all.iter().flat_map(times).flatten().min()
    }

    /// Whether a broken path may be reopened now.
    fn may_reopen(&self, world: &World, a: usize, b: usize, path_id: usize) -> bool {
        let is_blackholed = world.blackholed[a][b][path_id] || world.blackholed[b][a][path_id];
        !is_blackholed
            && self.single_path.as_ref().is_none_or(|single_path| single_path.last[a][b] == path_id)
    }

    /// Whether a single-path period is running.
    pub fn is_single_path(&self) -> bool {
        self.single_path.is_some()
    }

    /// Whether a single-path period is running whose paths lose nothing.
    pub fn is_clean(&self) -> bool {
        self.single_path.as_ref().is_some_and(|single_path| single_path.is_clean)
    }

    /// Begins a single-path period: every two processes have one working path until
    /// [`Outages::end_single_path`].
    pub fn begin_single_path(&mut self, world: &mut World) -> Result<(), Violation> {
        world.log_step(|| "one path is left between any two".into());
        world.counts.count("single-path periods");
        for outage in std::mem::take(&mut self.all) {
            Self::end(world, &outage)?;
        }
        let count = world.nodes.len();
        let is_clean = world.random.percent(50);
        let (corrupt_percent, silent_loss_permille) =
            (world.rates.corrupt_percent, world.rates.silent_loss_permille);
        if is_clean {
            (world.rates.corrupt_percent, world.rates.silent_loss_permille) = (0, 0);
        }
        let last = vec![vec![0; count]; count];
        self.single_path =
            Some(SinglePathPeriod { last, corrupt_percent, silent_loss_permille, is_clean });
        for a in 0..count {
            for b in a + 1..count {
                if !world.model.failed[a][b] && !world.model.failed[b][a] {
                    self.leave_one_path(world, a, b, is_clean)?;
                }
            }
        }
        Ok(())
    }

    /// Leaves one working path between two processes.
    fn leave_one_path(
        &mut self,
        world: &mut World,
        a: usize,
        b: usize,
        is_clean: bool,
    ) -> Result<(), Violation> {
        let path_count = world.pipes[a][b].len();
        // Shared memory does not fail.
        let lossless = world.nodes[a].paths[b].iter().position(|path| path.lossless);
        let last = lossless.unwrap_or_else(|| world.random.index(path_count));
        if let Some(single_path) = &mut self.single_path {
            (single_path.last[a][b], single_path.last[b][a]) = (last, last);
        }
        let makes_spare = world.random.percent(50);
        for (from, to) in [(a, b), (b, a)] {
            world.set_suspected(from, to, last, false)?;
            if makes_spare {
                world.set_spare(from, to, last, false)?;
            }
            if let (true, Some(network)) = (is_clean, &mut world.pipes[from][to][last].network) {
                network.stop_losses();
            }
        }
        if lossless.is_none() && world.random.percent(30) {
            // The driver reopens the path as soon as possible.
            world.break_path(a, b, last)?;
        }
        for path_id in (0..path_count).filter(|&path_id| path_id != last) {
            self.disable_path(world, a, b, path_id, makes_spare)?;
        }
        Ok(())
    }

    /// Disables a path, at least in one direction.
    fn disable_path(
        &mut self,
        world: &mut World,
        a: usize,
        b: usize,
        path_id: usize,
        makes_spare: bool,
    ) -> Result<(), Violation> {
        if !self.may_begin(world, a, b, path_id) {
            return Ok(());
        }
        let is_blackholed = match world.random.below(4) {
            0 => return world.break_path(a, b, path_id),
            1 => [true, true],
            2 => [true, false],
            _ => [false, true],
        };
        // Acknowledgements and answers return by the same path, so the sender detects the outage.
        // Only relays acknowledge to each side what that side has given to them: there, a side
        // whose own frames arrive may not detect the outage.
        let is_relayed =
            !world.has_datagrams(a, b, path_id) && world.nodes[a].paths[b][path_id].silent_loss;
        let detected_at = is_blackholed.map(|blackholed| {
            let notices = blackholed || !is_relayed || world.random.percent(50);
            notices.then(|| Self::detection_time(world))
        });
        let outage = Outage { ends: [a, b], path_id, until: None, detected_at, was_spare: None };
        self.begin(world, outage, is_blackholed, makes_spare);
        Ok(())
    }

    /// Ends the single-path period; paths can be reopened from now on.
    pub fn end_single_path(&mut self, world: &mut World) -> Result<(), Violation> {
        let Some(single_path) = self.single_path.take() else {
            return Ok(());
        };
        world.log_step(|| "paths come back".into());
        (world.rates.corrupt_percent, world.rates.silent_loss_permille) =
            (single_path.corrupt_percent, single_path.silent_loss_permille);
        for outage in std::mem::take(&mut self.all) {
            Self::end(world, &outage)?;
        }
        Ok(())
    }
}
