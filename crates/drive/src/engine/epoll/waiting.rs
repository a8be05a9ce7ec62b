//! When to spin, when to sleep, and how shared memory takes part.
//!
//! Sleeping in the kernel costs a wake-up, some 5 to 50 µs; spinning costs a processor. So the
//! engine spins only where a processor is idle, and only as long as spinning has paid lately.
//!
//! Rings of shared memory announce nothing while their reader is awake. The engine polls the rings
//! of awake links each round. Before it sleeps, it parks these links, so that a writer rings the
//! doorbell when it has written, and a reader rings it when a full ring has space again. What lies
//! in the ring of a link whose input is paused must wait, and wakes nobody.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll;

use super::connection::{Connection, ConnectionTable};
use super::transport::Transport;

/// How long spinning may last where a processor is idle: about what a wake-up costs.
const SPIN: Duration = Duration::from_micros(50);
/// After this many futile spins in a row, the engine sleeps at once, until events come quickly
/// again.
const FUTILE_SPINS_MAX: u32 = 8;
/// Events that come this soon after the engine went to sleep would have been worth a spin.
const SOON: Duration = Duration::from_micros(50);

/// The waiting strategy: see the module documentation.
pub struct Waiter {
    spin: Duration,
    /// The number of ranks of this node up to which the relay may spin; `None` if the user has
    /// decided.
    spin_ranks_max: Option<usize>,
    /// The links over shared memory. At least as many ranks run on this node.
    shm_links: Vec<usize>,
    futile_spins: u32,
    /// The links over shared memory that are not parked.
    awake: Vec<usize>,
    /// The links over shared memory whose ring is full.
    blocked: Vec<usize>,
}

impl Waiter {
    /// `spin` is how long to spin; `None` means [`SPIN`], as long as this node has a processor for
    /// each rank, one for the relay and one for everything else.
    pub fn new(spin: Option<Duration>) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        let default = if processors > 2 { SPIN } else { Duration::ZERO };
        Self {
            spin: spin.unwrap_or(default),
            spin_ranks_max: spin.is_none().then(|| processors.saturating_sub(2)),
            shm_links: Vec::new(),
            futile_spins: 0,
            awake: Vec::new(),
            blocked: Vec::new(),
        }
    }

    /// Adds a link over shared memory, awake at first.
    pub fn note_shm(&mut self, slot: usize) {
        self.shm_links.push(slot);
        self.note_awake(slot);
    }

    pub fn note_awake(&mut self, slot: usize) {
        if !self.awake.contains(&slot) {
            self.awake.push(slot);
        }
    }

    /// Records that a paused input goes on.
    pub fn note_resumed(&mut self, slot: usize, connection: &Connection) {
        if let Some(Transport::Shm(_)) = connection.transport {
            self.note_awake(slot);
        }
    }

    /// Records that an output takes no more. Sockets report when they take more; shared memory
    /// reports this only to a parked side.
    pub fn note_blocked(&mut self, slot: usize, connection: &Connection) {
        let is_shm = matches!(connection.transport, Some(Transport::Shm(_)));
        if is_shm && !self.blocked.contains(&slot) {
            self.blocked.push(slot);
            self.note_awake(slot);
        }
    }

    /// Forgets a slot, which another connection may use from now on.
    pub fn forget(&mut self, slot: usize) {
        self.shm_links.retain(|other| *other != slot);
        self.awake.retain(|other| *other != slot);
        self.blocked.retain(|other| *other != slot);
    }

    /// The outputs over shared memory that were blocked, to be tried again.
    pub fn take_blocked(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.blocked)
    }

    pub fn has_blocked(&self) -> bool {
        !self.blocked.is_empty()
    }

    /// Queues awake links whose rings hold something.
    pub fn collect_shm(&mut self, connections: &mut ConnectionTable) {
        for slot in &self.awake {
            if connections[*slot].has_shm_input() {
                connections.enqueue(*slot);
            }
        }
    }

    /// Waits for events. Returns without events when there is something else to do.
    pub fn wait(
        &mut self,
        epoll: &OwnedFd,
        events: &mut Vec<epoll::Event>,
        connections: &mut ConnectionTable,
        may_sleep: bool,
        sleep: Option<Duration>,
        waits: &mut u64,
    ) -> io::Result<()> {
        let mut look = |timeout: Option<Duration>| {
            *waits += 1;
            wait(epoll, events, timeout)
        };
        if !may_sleep {
            return look(Some(Duration::ZERO)).map(drop);
        }
        let may_spin = self.spin > Duration::ZERO
            && self.spin_ranks_max.is_none_or(|most| self.shm_links.len() <= most);
        let is_worth_it = may_spin && self.futile_spins < FUTILE_SPINS_MAX;
        if is_worth_it {
            let start = Instant::now();
            while start.elapsed() < self.spin {
                let mut has_input = |slot: &usize| connections[*slot].has_shm_input();
                if look(Some(Duration::ZERO))? > 0 || self.awake.iter().any(&mut has_input) {
                    self.futile_spins = 0;
                    return Ok(());
                }
            }
            self.futile_spins += 1;
        }
        if !self.park_all(connections) {
            return look(Some(Duration::ZERO)).map(drop);
        }
        let start = (may_spin && !is_worth_it).then(Instant::now);
        let count = look(sleep)?;
        if count > 0 && start.is_some_and(|start| start.elapsed() < SOON) {
            self.futile_spins = 0;
        }
        Ok(())
    }

    /// Parks every awake link; a paused link becomes awake when it goes on. Returns false if
    /// something has arrived, or if an output has space, so that the engine must not sleep.
    fn park_all(&mut self, connections: &mut ConnectionTable) -> bool {
        while let Some(slot) = self.awake.last() {
            let connection = &mut connections[*slot];
            let is_parked = match &mut connection.transport {
                Some(Transport::Shm(shm)) if connection.is_paused => shm.0.prepare_wait_for_room(),
                Some(Transport::Shm(shm)) => shm.0.prepare_park(),
                _ => true,
            };
            if !is_parked {
                return false;
            }
            self.awake.pop();
        }
        true
    }
}

impl Connection {
    fn has_shm_input(&mut self) -> bool {
        match &mut self.transport {
            Some(Transport::Shm(shm)) => !self.is_paused && shm.has_input(),
            _ => false,
        }
    }
}

fn wait(
    epoll: &OwnedFd,
    events: &mut Vec<epoll::Event>,
    timeout: Option<Duration>,
) -> io::Result<usize> {
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: timeout.subsec_nanos() as i64,
    });
    match epoll::wait(epoll, spare_capacity(events), timeout.as_ref()) {
        Ok(count) => Ok(count),
        Err(rustix::io::Errno::INTR) => Ok(0),
        Err(error) => Err(error.into()),
    }
}
