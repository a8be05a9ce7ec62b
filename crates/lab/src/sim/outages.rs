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
//! ([`WAIT_MAX`]).

use landbridge_proto::channel::PathId;
use landbridge_proto::channel::probe_timeout::PROBE_TIMEOUT_NANOS_MAX;
use landbridge_proto::endpoint::PathProperties;
use landbridge_proto::path::time::{MILLISECOND, SECOND, Time};

use super::frame_transfer::PATHS_MAX;
use super::world::{STEPS_MAX, World};
use super::{Violation, require};

/// An outage: nothing arrives by a path in at least one direction.
pub struct Outage {
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
pub struct SinglePathPeriod {
    /// The number of the working path: `[from][to]`.
    last: Vec<Vec<usize>>,
    /// Percentage of corrupt payloads before the period. `silent_loss_permille` is the rate of
    /// silent loss before the period.
    corrupt_percent: u64,
    silent_loss_permille: u64,
    /// Whether the working paths lose nothing.
    is_clean: bool,
}

/// Progress so far: delivered bytes, and pending operations.
type Progress = (u64, usize);

/// Longest outage in nanoseconds.
const SPAN_MAX: u64 = 100 * SECOND;

/// Longest time from an outage to its detection by a driver, in nanoseconds: `suspect_after`, some
/// round trips, and the delay of a busy machine.
const DETECTION_MAX: u64 = 300 * MILLISECOND;

/// Longest time without progress while a path without losses works. Bound: two of the longest waits
/// between status requests, because the last request may precede the period and the first request
/// of the period has a wait of its own.
const WAIT_MAX: u64 = 2 * PROBE_TIMEOUT_NANOS_MAX;

/// Status requests or answers that are lost in a row at most: with a loss of a fifth, more losses
/// in a row happen once in many millions of cases.
const LOSSES_MAX: u64 = 12;

impl World {
    /// Begins an outage of a random path, in one direction or both.
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

    /// Ends outages, and lets drivers detect outages, as time passes.
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

    /// The next time at which an outage ends or is detected.
    pub fn next_outage_change(&self) -> Option<Time> {
        let times = |outage: &Outage| [outage.until, outage.detected_at[0], outage.detected_at[1]];
        self.outages.iter().flat_map(times).flatten().min()
    }

    /// Whether a broken path may be reopened now.
    pub fn may_reopen(&self, a: usize, b: usize, path_id: usize) -> bool {
        let is_blackholed = self.blackholed[a][b][path_id] || self.blackholed[b][a][path_id];
        !is_blackholed
            && self.single_path.as_ref().is_none_or(|single_path| single_path.last[a][b] == path_id)
    }

    /// Begins a single-path period: every two processes have one working path until
    /// [`World::end_single_path`].
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

    /// Leaves one working path between two processes.
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
            // The driver reopens the path as soon as possible.
            self.break_path(a, b, last)?;
        }
        for path_id in (0..path_count).filter(|&path_id| path_id != last) {
            self.disable_path(a, b, path_id, makes_spare)?;
        }
        Ok(())
    }

    /// Disables a path, at least in one direction.
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
        // Acknowledgements and answers return by the same path, so the sender detects the outage.
        // Only relays acknowledge to each side what that side has given to them: there, a side
        // whose own frames arrive may not detect the outage.
        let is_relayed =
            !self.has_datagrams(a, b, path_id) && self.nodes[a].paths[b][path_id].silent_loss;
        let detected_at = is_blackholed.map(|blackholed| {
            let notices = blackholed || !is_relayed || self.random.percent(50);
            notices.then(|| self.detection_time())
        });
        self.begin_outage([a, b], path_id, is_blackholed, None, detected_at, makes_spare);
        Ok(())
    }

    /// Ends the single-path period; paths can be reopened from now on.
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

    /// Runs a single-path period until all data between all processes has arrived.
    pub fn run_single_path(&mut self) -> Result<(), Violation> {
        let is_clean = self.single_path.as_ref().is_some_and(|single_path| single_path.is_clean);
        let most = if is_clean { WAIT_MAX } else { LOSSES_MAX * WAIT_MAX };
        // A clock that has jumped back makes waits longer than any bound, so waits count from the
        // latest time.
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

    /// Whether all sent data has been delivered, and every sender has the acknowledgements that it
    /// waits for.
    pub fn is_all_delivered(&self) -> bool {
        self.stuck().is_none()
    }

    /// Two processes with data under way, if there are any.
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
