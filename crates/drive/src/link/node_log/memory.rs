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

/// The memory of all logs that a process writes.
pub(super) fn log_memory(logs: &mut NodeLogs) -> LogMemory {
    let mut memory = LogMemory::default();
    for_each_written(logs, |_, log, released| {
        let needed = log.chain.needed(released) as u64;
        memory.taken += log.chain.taken() as u64;
        memory.needed += needed;
        memory.longest = memory.longest.max(needed);
    });
    memory
}

/// Gives back so many bytes of memory of released segments, if there are so many. More would be
/// taken again at once, page by page.
pub(super) fn give_back(logs: &mut NodeLogs, mut wanted: usize) {
    for_each_written(logs, |head, log, released| {
        wanted = wanted.saturating_sub(log.give_back(head, released, wanted));
    });
}

/// Does this with the head of the file, each log that the process writes, and the position before
/// which nothing of the log is needed any more.
fn for_each_written(logs: &mut NodeLogs, mut act: impl FnMut(&Mapped, &mut LogWriter, u64)) {
    let own = logs.open.owner.process;
    let head = &logs.open.head;
    for (to, target) in logs.open.writers.iter_mut() {
        act(head, &mut target.log, released(head, (own, to), target.is_in_unit));
    }
    for (from, remote) in logs.remote.iter_mut() {
        act(head, &mut remote.arrivals, released(head, (from, own), false));
    }
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
