//! What the logs of the senders hold of the ranks of this node, for `landbridge log`.
//!
//! In: the memory file of the node's logs, and a query as relays get it. Out: lines of JSON, as
//! relays write them ([`crate::ps::log_status`]).
//!
//! What may never happen: a query keeps the agent from its other work for long.

use landbridge_proto::log::delivery::Delivery;
use serde::Serialize;

use super::node_logs::{HeldLogs, NodeLogs};
use super::pmi_replay::PmiReplay;
use super::rank::LocalRank;
use crate::ps::log_status::{Determinant, LoggedFrame, ProcessLogStatus};

/// Deliveries in one answer.
const DELIVERIES_SHOWN_MAX: u64 = 100;
/// Deliveries that are read for one answer: some 20 MB.
const DELIVERIES_READ_MAX: u64 = 1 << 22;

/// The answer to a query. A query that cannot be read comes from another version, and has no
/// answer.
pub fn answer(logs: &NodeLogs, ranks: &[LocalRank], query: &str) -> String {
    let mut lines = String::new();
    match query.split(' ').collect::<Vec<_>>()[..] {
        ["all", _] => ranks.iter().for_each(|rank| add(&mut lines, &status(logs, rank))),
        ["one", rank, from, count] => {
            let rank = ranks.iter().find(|local| rank.parse() == Ok(local.rank));
            if let (Some(rank), Ok(from), Ok(count)) = (rank, from.parse(), count.parse()) {
                add_deliveries(&mut lines, logs, rank, (from, count));
            }
        }
        _ => (),
    }
    lines
}

fn add(lines: &mut String, line: &impl Serialize) {
    // Numbers and short texts can always be written.
    if let Ok(line) = serde_json::to_string(line) {
        lines.push_str(&line);
        lines.push('\n');
    }
}

/// What the logs hold of a rank.
fn held(logs: &NodeLogs, rank: &LocalRank) -> HeldLogs {
    let newest = rank.scheduler.as_ref().and_then(|scheduler| scheduler.images.rounds().pop_last());
    logs.held(rank.rank, newest)
}

fn status(logs: &NodeLogs, rank: &LocalRank) -> ProcessLogStatus {
    let HeldLogs { counts, released, released_bytes, end, is_discarded } = held(logs, rank);
    let problem = if is_discarded { DISCARDED } else { "" };
    let frames = counts.delivered_frames.saturating_sub(released.delivered_frames);
    ProcessLogStatus {
        process: rank.rank,
        endpoint: 0,
        frames,
        bytes: counts.log_bytes,
        disk_bytes: 0,
        sent: counts.sent_frames,
        sent_bytes: 0,
        nondeterminism_bytes: 0,
        determinants: counts.deliveries.saturating_sub(released.deliveries),
        determinant_bytes: end.saturating_sub(released_bytes),
        delivered_frames: frames,
        polls: counts.polls,
        is_replaying: rank.replay.as_ref().is_some_and(PmiReplay::is_replaying),
        problem: problem.to_string(),
    }
}

/// What is said of a rank that has given up deliveries which each incarnation needs.
const DISCARDED: &str = "memory for its deliveries was full: it cannot be restarted";

/// Adds `count` deliveries from number `from` on, each with the processes that have sent its
/// frames.
fn add_deliveries(
    lines: &mut String,
    logs: &NodeLogs,
    rank: &LocalRank,
    (from, count): (u64, u64),
) {
    let HeldLogs { released, released_bytes, end, is_discarded, .. } = held(logs, rank);
    if is_discarded {
        // Nobody knows where a delivery begins.
        return;
    }
    let mut reader = logs.deliveries.reader(rank.rank, released_bytes..end);
    let (mut polls, mut micros) = (released.polls, released.micros);
    let (first, mut frame) = (released.deliveries, released.delivered_frames);
    let behind = from.saturating_add(count.min(DELIVERIES_SHOWN_MAX));
    for number in first..behind.min(first + DELIVERIES_READ_MAX) {
        let Ok(delivery) = Delivery::parse(|| reader.byte()) else { return };
        polls += delivery.polls;
        micros += delivery.micros;
        let count = delivery.frames().into();
        if number >= from {
            let shown =
                Determinant { determinant: number, polls, micros, count, first_frame: frame };
            add(lines, &shown);
            let mut next = frame;
            for run in &delivery.runs {
                let (source, frames) = (run.source, run.frames.into());
                add(lines, &LoggedFrame::OfSender { frame: next, source, frames });
                next += frames;
            }
        }
        frame += count;
    }
}
