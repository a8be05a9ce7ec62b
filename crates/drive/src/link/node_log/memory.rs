//! Memory that the logs of a process take.
//!
//! What enters: the logs that the process writes. What leaves: their bytes, and the wish for images
//! that let logs be released. What may never happen: memory is given back that somebody may read.

use std::sync::atomic::Ordering;

use landbridge_proto::log::layout::IMAGES_WANTED_AT;

use super::NodeLogs;
use super::log_end::LogWriter;
use super::pair_releases::released;
use super::window::Mapped;

/// Memory of the logs that a process writes, in bytes.
#[derive(Default)]
pub(super) struct LogMemory {
    pub taken: u64,
    /// What is not released, in memory and on disk.
    pub needed: u64,
    /// The part of the longest log that is not released.
    pub longest: u64,
}

impl LogMemory {
    fn add(&mut self, head: &Mapped, log: &mut LogWriter, (released, gives_back): (u64, bool)) {
        if gives_back {
            log.give_back(head, released);
        }
        let needed = log.chain.needed(released) as u64;
        self.taken += log.chain.taken() as u64;
        self.needed += needed;
        self.longest = self.longest.max(needed);
    }
}

/// The memory of all logs that a process writes. `gives_back`: that of released segments is given
/// back first.
pub(super) fn log_memory(logs: &mut NodeLogs, gives_back: bool) -> LogMemory {
    let own = logs.open.owner.process;
    let head = &logs.open.head;
    let mut memory = LogMemory::default();
    for (to, target) in logs.open.writers.iter_mut() {
        let released = released(head, (own, to), target.is_in_unit);
        memory.add(head, &mut target.log, (released, gives_back));
    }
    for (from, remote) in logs.remote.iter_mut() {
        let released = released(head, (from, own), false);
        memory.add(head, &mut remote.arrivals, (released, gives_back));
    }
    memory
}

/// Asks the agent for images of this process, and of that of this node whose log from here is
/// the longest: a log is released up to what both cover.
pub(super) fn ask_for_images(logs: &NodeLogs) {
    let local = logs.open.writers.iter().filter(|(_, target)| !target.is_remote);
    let longest = local.max_by_key(|(_, target)| target.log.chain.touched());
    let wanted = longest.map_or(1, |(to, _)| to as u64 + 2);
    let at = logs.open.owner.control() + IMAGES_WANTED_AT;
    logs.open.head.word(at).store(wanted, Ordering::Release);
    logs.ring_agent();
}
