//! Memory that the logs of a process take.
//!
//! What enters: the logs that the process writes. What leaves: their bytes, and the wish for images
//! that let logs be released. What may never happen: memory is given back that somebody may read.

use std::sync::atomic::Ordering;

use landbridge_proto::log::layout::{
    CUT_AT, DELIVERIES_BYTES, IMAGES_WANTED_AT, LOG_BYTES, NO_CUTS, NO_IMAGES_AT,
};
use landbridge_proto::log::memory_share::MemoryShare;
use landbridge_proto::log::next_segment::Releases;

use super::deliveries::KEPT_BYTES;
use super::disk_part;
use super::log_end::LogWriter;
use super::pair_releases::{FileWords, PairReleases, released};
use super::window::Mapped;
use super::{COUNTED_BYTES, NodeLogs};

/// Memory of the logs that a process writes, in bytes.
#[derive(Default)]
pub(super) struct LogMemory {
    /// How many logs it writes.
    pub logs: usize,
    pub taken: u64,
    /// What is not released, in memory and on disk.
    pub needed: u64,
    /// The part of the longest log that is not released.
    pub longest: u64,
}

/// Gives memory of released segments back until the logs take at most `bytes_max`, if there is so
/// much. Returns what they take. What is given back beyond that would be taken again at once, page
/// by page.
pub(super) fn bound_memory(logs: &mut NodeLogs, bytes_max: u64) -> LogMemory {
    let memory = log_memory(logs);
    let excess = memory.taken.saturating_sub(bytes_max);
    if excess == 0 {
        return memory;
    }
    let mut wanted = excess as usize;
    for_each_written(logs, |head, log, releases| {
        wanted = wanted.saturating_sub(log.give_back(head, releases.released(), wanted));
    });
    let memory = log_memory(logs);
    let share = MemoryShare::of(memory.taken, bytes_max, memory.logs);
    if share.may_become_fair {
        return memory;
    }
    shorten_longest(logs, share);
    log_memory(logs)
}

/// Gives up the oldest deliveries once they take three quarters of the memory: without disk, logs
/// are given up as well then, whose frames take far more. As long as all logs go on on disk, the
/// ring of the deliveries is the bound; and where nodes may be lost, since the agent reads
/// deliveries at any time.
pub(super) fn bound_deliveries(logs: &mut NodeLogs) {
    let go_on_on_disk = disk_part::has_room(&logs.open.head) && have_disk(logs);
    let is_read = logs.open.head.word(CUT_AT as usize).load(Ordering::Acquire) != NO_CUTS;
    let bytes_max = match is_read || go_on_on_disk {
        true => u64::MAX,
        false => logs.open.owner.bytes_max,
    };
    let in_ring = DELIVERIES_BYTES as u64 - 2 * COUNTED_BYTES;
    if logs.deliveries.bytes() <= in_ring.min(bytes_max / 4 * 3) {
        return;
    }
    logs.deliveries.shorten(KEPT_BYTES.min(bytes_max / 2), &logs.open.delivery_words());
    // What is said of a log that was discarded is also said of this process.
    if logs.notice.get().is_none() {
        logs.notice.set(Some(logs.open.owner.process));
    }
}

/// Gives up what was read of the longest log, but for its part of the memory, unless the disk has
/// room for it. A log shortens itself when it goes on, and this one may never go on; without its
/// memory, logs that begin late would have none.
fn shorten_longest(logs: &mut NodeLogs, share: MemoryShare) {
    let mut longest = 0;
    for_each_written(logs, |_, log, _| longest = longest.max(log.chain.taken()));
    let more_than_fair = longest.saturating_sub(share.fair_bytes);
    let mut wanted = share.excess.min(more_than_fair);
    for_each_written(logs, |head, log, releases| {
        if wanted > 0 && log.chain.taken() == longest && !log.has_room_on_disk(head) {
            let discarded = log.discard_oldest(&releases, wanted);
            let given_back = log.give_back(head, releases.released().max(discarded), wanted);
            wanted = wanted.saturating_sub(given_back);
        }
    });
}

/// The memory of all logs that a process writes.
fn log_memory(logs: &mut NodeLogs) -> LogMemory {
    let mut memory = LogMemory::default();
    for_each_written(logs, |_, log, releases| {
        let needed = log.chain.needed(releases.released()) as u64;
        memory.logs += 1;
        memory.taken += log.chain.taken() as u64;
        memory.needed += needed;
        memory.longest = memory.longest.max(needed);
    });
    memory
}

/// Does this with the head of the file, each log that the process writes, and up to where it may be
/// used again.
fn for_each_written(
    logs: &mut NodeLogs,
    mut act: impl FnMut(&Mapped, &mut LogWriter, PairReleases<'_>),
) {
    let own = logs.open.owner.process;
    let (head, memory, notice) = (&logs.open.head, logs.memory, &logs.notice);
    for (to, target) in logs.open.writers.iter_mut() {
        let confirmed = logs.remote.get(to).map(|remote| remote.confirmed.position());
        let confirmed = confirmed.filter(|_| target.is_remote);
        let words = FileWords { head, from: own, to, confirmed };
        let is_in_unit = target.is_in_unit;
        let releases = PairReleases { words, is_in_unit, memory, notice, own };
        act(head, &mut target.log, releases);
    }
    for (from, remote) in logs.remote.iter_mut() {
        let words = FileWords { head, from, to: own, confirmed: None };
        let releases = PairReleases { words, is_in_unit: false, memory, notice, own };
        act(head, &mut remote.arrivals, releases);
    }
}

/// Whether each log that the process writes has a part of the disk file, which has no more parts
/// than its file system allows bytes of a file.
fn have_disk(logs: &mut NodeLogs) -> bool {
    let mut all = true;
    for_each_written(logs, |_, log, _| all &= log.has_disk());
    all
}

/// Asks the agent for images once logs and deliveries, which take this much, are long. As long as
/// logs can go on on disk, images that would shorten them come in their turn; deliveries stay in
/// memory.
pub(super) fn ask_if_long(logs: &mut NodeLogs, memory: &LogMemory, deliveries: u64) {
    let half = logs.open.owner.bytes_max / 2;
    let are_long = memory.needed + deliveries > half || memory.longest > LOG_BYTES as u64 / 2;
    let go_on_on_disk = disk_part::has_much_room(&logs.open.head) && have_disk(logs);
    if are_long && !go_on_on_disk {
        let longest = most_needed(logs);
        ask_for_images(logs, longest);
    } else if deliveries > half {
        ask_for_images(logs, None);
    }
}

/// The process of this node whose log from here has most that is not released, if one has any.
fn most_needed(logs: &mut NodeLogs) -> Option<usize> {
    let (head, own) = (&logs.open.head, logs.open.owner.process);
    let local = logs.open.writers.iter_mut().filter(|(_, target)| !target.is_remote);
    let needed = local.map(|(to, target)| {
        let released = released(head, (own, to), target.is_in_unit);
        (target.log.chain.needed(released), to)
    });
    needed.filter(|(bytes, _)| *bytes > 0).max().map(|(_, to)| to)
}

/// Asks the agent for images of this process, and of the one that reads this log: a log is released
/// up to what both cover. The agent clears the word before it acts, so it is awake as long as the
/// word holds an earlier wish.
fn ask_for_images(logs: &NodeLogs, reader: Option<usize>) {
    let head = &logs.open.head;
    if head.word(NO_IMAGES_AT as usize).load(Ordering::Relaxed) != 0 {
        return;
    }
    let wanted = reader.map_or(1, |to| to as u64 + 2);
    let at = logs.open.owner.control() + IMAGES_WANTED_AT;
    if head.word(at).swap(wanted, Ordering::AcqRel) == 0 {
        logs.ring_agent();
    }
}
