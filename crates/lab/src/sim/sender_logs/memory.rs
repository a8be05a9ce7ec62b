//! Memory of the logs of simulated processes that have little of it.
//!
//! In: where writers and readers of the logs are, and what the logs of a process take. What may
//! never happen: logs take more than a multiple of their memory and of what was not read, however
//! much is sent, and whichever process is killed meanwhile.

use std::collections::BTreeMap;

use landbridge_drive::link::node_log;
use landbridge_proto::log::counts::LogCount;
use landbridge_proto::log::layout::{arrived_at, confirmed_at, consumed_at, control_at};

use super::super::{Violation, require};
use super::{LOG_MEMORY, LogWorld, failed};

/// Logs take at most so many times the memory that is theirs and what was not read. A new segment
/// is as large as all before it together, readers say where they are at its end only, and a log
/// with less than its part may take more in full memory (`may_become_fair`): one seed of 6,000
/// needs more than 3 times. The bound for users is wider: two segments of 2 MiB beyond the memory.
const MULTIPLE: u64 = 4;
/// The first segments of a log, which it has whatever the others take.
const FIRST_BYTES: u64 = 8 << 10;

/// Bytes of logs (from, to) that a process writes and their readers do not have.
pub type UnreadBytes = BTreeMap<(usize, usize), u64>;

/// Checks what the logs of a process take. Nothing where there is enough memory.
pub fn check_memory(world: &mut LogWorld, rank: usize) -> Result<(), Violation> {
    let bytes_max = world.bytes_max;
    if bytes_max == LOG_MEMORY {
        return Ok(());
    }
    let unread = unread_bytes(world, rank)?;
    let node = &world.nodes[world.ranks[rank].node];
    let at = control_at(rank) + LogCount::LogBytes.at() as u64;
    let taken = node.word(at).map_err(|error| failed(&error))?;
    let it = &mut world.ranks[rank];
    for (pair, bytes) in unread {
        let most = it.most_unread.entry(pair).or_default();
        *most = bytes.max(*most);
    }
    let logs = 2 * (it.task.count as u64 - 1);
    let frame = it.task.bytes_max.next_multiple_of(4096) + 4096;
    let unread: u64 = it.most_unread.values().sum();
    require!(
        taken <= MULTIPLE * (bytes_max + unread) + logs * (FIRST_BYTES + frame),
        "the logs of {rank} take {taken} bytes: {bytes_max} are theirs, {unread} were not read"
    );
    Ok(())
}

/// How many bytes of each log that a process writes its reader does not have.
fn unread_bytes(world: &LogWorld, rank: usize) -> Result<UnreadBytes, Violation> {
    let it = &world.ranks[rank];
    let Some((process, _)) = &it.running else { return Ok(UnreadBytes::new()) };
    let word = |at| world.nodes[it.node].word(at).map_err(|error| failed(&error));
    let mut unread = UnreadBytes::new();
    for other in (0..world.ranks.len()).filter(|other| *other != rank) {
        let is_here = world.ranks[other].node == it.node;
        let read = word(if is_here { consumed_at } else { confirmed_at }(rank, other))?;
        let end = node_log::end_of_log(&process.logs, other).map_or(0, |end| end.position());
        unread.insert((rank, other), end.saturating_sub(read));
        if !is_here {
            let read = word(consumed_at(other, rank))?;
            unread.insert((other, rank), word(arrived_at(other, rank))?.saturating_sub(read));
        }
    }
    Ok(unread)
}
