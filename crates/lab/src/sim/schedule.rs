//! In which order and at which times things happen: the steps of a run, its clock, and the faults
//! between the steps.
//!
//! What enters: the [`World`]. What leaves: the world after one step, or at rest. What may never
//! happen: a run does not come to an end; in a single-path period, nothing goes on for longer than
//! [`WAIT_MAX`] though a path works.

use landbridge_proto::channel::probe_timeout::PROBE_TIMEOUT_NANOS_MAX;
use landbridge_proto::path::time::{MILLISECOND, Time};

use super::node::PATHS_MAX;
use super::outages::Outages;
use super::world::World;
use super::{Violation, require};

/// Steps of a run at most; a run with more steps would never end.
const STEPS_MAX: usize = 2_000_000;

/// Longest time without progress while a path without losses works. Bound: two of the longest waits
/// between status requests, because the last request may precede the period and the first request
/// of the period has a wait of its own.
const WAIT_MAX: u64 = 2 * PROBE_TIMEOUT_NANOS_MAX;

/// Status requests or answers that are lost in a row at most: with a loss of a fifth, more losses
/// in a row happen once in many millions of cases.
const LOSSES_MAX: u64 = 12;

/// The order of steps: see the module head.
#[derive(Default)]
pub struct Schedule {
    pub outages: Outages,
    /// The latest time that the clock has shown.
    latest: Time,
}

impl Schedule {
    /// Moves a random item that can move; returns false if nothing can move.
    pub fn step(&mut self, world: &mut World) -> Result<bool, Violation> {
        self.tick(world)?;
        world.check_bounds()?;
        if world.random.percent(10) {
            let node = world.random.index(world.nodes.len());
            flush_deferred_acks(world, node)?;
        }
        if !self.outages.is_single_path() {
            self.inject_fault(world)?;
        }
        self.outages.update(world)?;
        if !world.broken.is_empty() && world.random.percent(2) {
            self.outages.reopen_path(world)?;
        }
        if move_one(world)? {
            return Ok(true);
        }
        let mut wakes = false;
        for node in 0..world.nodes.len() {
            wakes |= flush_deferred_acks(world, node)?;
        }
        if wakes || self.outages.reopen_path(world)? {
            return Ok(true);
        }
        // In a single-path period, status requests about data that no process misses go on without
        // an end.
        let is_over = self.outages.is_single_path() && world.is_all_delivered();
        Ok(!is_over && self.sleep(world)?)
    }

    /// Injects a fault into a path, at random.
    fn inject_fault(&mut self, world: &mut World) -> Result<(), Violation> {
        if world.random.below(1_000) < world.rates.break_permille {
            world.break_random_path()?;
        }
        if world.random.below(1_000) < world.rates.break_permille {
            self.outages.begin_random(world);
            world.suspect_random_path()?;
        }
        Ok(())
    }

    /// Advances the clock to the next time at which an endpoint or a network has something to do,
    /// when nothing can move; returns false if there is no such time.
    fn sleep(&mut self, world: &mut World) -> Result<bool, Violation> {
        let wakes = world.nodes.iter().filter_map(|node| node.endpoint.schedule().next_wake());
        let networks =
            world.pipes.iter().flatten().flatten().filter_map(|pipe| pipe.network.as_ref());
        let times = wakes.chain(networks.filter_map(|network| network.next()));
        let Some(wake) = times.chain(self.outages.next_change()).min() else {
            return Ok(false);
        };
        world.now = world.now.max(wake);
        self.latest = self.latest.max(world.now);
        world.log_step(|| format!("it is {:?}", world.now));
        world.counts.count("sleeps");
        for node in 0..world.nodes.len() {
            world.nodes[node].endpoint.handle_time(world.now);
            world.drain(node)?;
        }
        Ok(true)
    }

    /// Advances the clock; rarely the clock jumps, forwards or backwards.
    fn tick(&mut self, world: &mut World) -> Result<(), Violation> {
        let now = world.now.0 + world.random.below(200_000);
        let jumps = !self.outages.is_single_path() && world.random.below(2_000) == 0;
        world.now = Time(if jumps { world.random.next() >> 20 } else { now });
        self.latest = self.latest.max(world.now);
        let wakes = world.random.percent(5);
        for node in 0..world.nodes.len() {
            world.nodes[node].endpoint.set_time(world.now);
            if wakes {
                world.nodes[node].endpoint.handle_time(world.now);
                world.drain(node)?;
            }
        }
        Ok(())
    }

    /// Runs until nothing can move.
    pub fn run_until_idle(&mut self, world: &mut World) -> Result<(), Violation> {
        if self.outages.is_single_path() {
            return self.run_single_path(world);
        }
        for _ in 0..STEPS_MAX {
            if !self.step(world)? {
                return Ok(());
            }
        }
        Err(Violation("the processes never come to rest".into()))
    }

    /// Runs a single-path period until all data between all processes has arrived.
    fn run_single_path(&mut self, world: &mut World) -> Result<(), Violation> {
        let is_clean = self.outages.is_clean();
        let most = if is_clean { WAIT_MAX } else { LOSSES_MAX * WAIT_MAX };
        // A clock that has jumped back makes waits longer than any bound, so waits count from the
        // latest time.
        let (mut seen, mut since) = (world.progress(), world.now.max(self.latest));
        for _ in 0..STEPS_MAX {
            let before = world.now;
            if !self.step(world)? {
                require!(
                    world.is_all_delivered(),
                    "something is stuck, though a path works: {:?}",
                    world.stuck()
                );
                return Ok(());
            }
            if world.now.nanos_since(before) < MILLISECOND {
                continue;
            }
            let progress = world.progress();
            if progress != seen {
                (seen, since) = (progress, before.max(since));
            }
            let waited = world.now.nanos_since(since);
            require!(
                waited <= most,
                "nothing goes on for {waited} ns, though a path works: {:?}",
                world.stuck()
            );
        }
        Err(Violation("the processes never come to rest, though a path works".into()))
    }
}

/// Lets the application of `node` ask for progress; returns true if frames result.
fn flush_deferred_acks(world: &mut World, node: usize) -> Result<bool, Violation> {
    let before = world.nodes[node].ready.len();
    world.nodes[node].endpoint.flush_deferred_acks();
    world.drain(node)?;
    let wakes = world.nodes[node].ready.len() > before;
    if wakes {
        world.counts.count("deferred acknowledgements");
    }
    Ok(wakes)
}

fn move_one(world: &mut World) -> Result<bool, Violation> {
    let count = world.nodes.len();
    let places = count * count * 4 * PATHS_MAX;
    let first = world.random.index(places);
    for place in (first..places).chain(0..first) {
        let (path_id, place) = (place % PATHS_MAX, place / PATHS_MAX);
        let (what, from, to) = (place % 4, place / 4 % count, place / 4 / count);
        let moved = match what {
            0 => world.write(from, to, path_id)?,
            1 => world.read(from, to, path_id)?,
            2 => to == 0 && path_id == 0 && world.pull(from)?,
            _ => to == 0 && path_id == 0 && world.serve(from)?,
        };
        if moved {
            return Ok(true);
        }
    }
    Ok(false)
}
