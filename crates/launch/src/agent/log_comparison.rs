//! Whether what a moved rank sends again is what it sent before it moved: the agents of its
//! receivers have that, its own agent what it sends again.
//!
//! In: the file with the logs of this node's ranks, digests that another agent has made. Out:
//! digests, and errors that end the job. What may never happen: something that is not known to be
//! the same counts as the same.

use std::sync::atomic::{Ordering, fence};

use anyhow::{Result, bail};
use landbridge_proto::log::agent_transfer::ArrivedDigest;
use landbridge_proto::log::frames_digest::digest_of_part;
use landbridge_proto::log::layout::{confirmed_at, discarded_at};

use super::node_logs::NodeLogs;
use crate::control::LogDigest;

/// Whether a rank has not moved, or has compared what it has sent again to another rank.
pub fn is_compared(logs: &NodeLogs, from: u32, to: u32) -> bool {
    // It notes the segment once it has.
    !logs.has_moved(from) || logs.word(confirmed_at(from as usize, to as usize) + 16) != 0
}

/// The digest of a part of a log in the file of this node. `None`: the part is not there, or not
/// kept.
pub fn digest_of(logs: &NodeLogs, (from, to): (u32, u32), part: (u64, u64)) -> Option<u64> {
    let pair = (from as usize, to as usize);
    let start = logs.start(pair)?;
    let region = logs.files().region(pair);
    let digest = digest_of_part(&region, start, part);
    // What was discarded may have been written over before it was read.
    fence(Ordering::SeqCst);
    if logs.word(discarded_at(pair.0, pair.1)) > start.position() {
        return None;
    }
    logs.files().note_read(&region);
    digest
}

/// The digest in an answer, if there is one.
pub fn arrived_digest(digest: &LogDigest) -> Option<ArrivedDigest> {
    digest.digest.map(|value| ArrivedDigest { from: digest.from, digest: value })
}

/// Handles an answer that has not shown that a moved rank which has ended has sent the same again.
///
/// # Errors
/// It is about this part of the log, so the rank has not, or that cannot be known.
pub fn refuse_unless_other_part(
    logs: &NodeLogs,
    (from, to): (u32, u32),
    part: (u64, u64),
    digest: Option<&LogDigest>,
) -> Result<()> {
    let Some(LogDigest { digest, .. }) = digest.filter(|digest| digest.from == part.0) else {
        return Ok(());
    };
    if digest.is_some() && logs.keeps((from, to), part.0) {
        bail!(sends_otherwise(from, to));
    }
    bail!(
        "what rank {from} sends to rank {to} cannot be compared with what it sent before it moved, \
         because that is not all kept"
    )
}

pub fn sends_otherwise(from: u32, to: u32) -> String {
    format!("what rank {from} sends to rank {to} is not what it sent before it moved")
}
