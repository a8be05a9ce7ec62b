//! How far the logs of a process have come before an image of it.
//!
//! What enters: logs between two polls. What leaves: words in the file, for the agent. What may
//! never happen: an image covers what another node has not confirmed.

use std::sync::atomic::Ordering;

use landbridge_proto::log::layout::{REPORT_WORDS, report_at};
use landbridge_proto::log::release::{LogPositions, PairPositions};
use landbridge_proto::log::unit::UnitCursors;

use super::NodeLogs;

/// Reports to the agent how far the logs have come, before an image.
pub(super) fn report_for_image(logs: &NodeLogs) {
    let report = report_at(logs.open.owner.process) as usize;
    let write = |place: usize, word| {
        logs.open.head.word(report + 8 * place).store(word, Ordering::Release);
    };
    covered_by_image(logs).words().enumerate().for_each(|(place, word)| write(place, word));
    let cursors = unit_cursors(logs);
    let words = cursors.words().enumerate();
    words.for_each(|(place, word)| write(REPORT_WORDS + place, word));
}

/// Where this process is in the logs inside of its recovery unit.
fn unit_cursors(logs: &NodeLogs) -> UnitCursors {
    let mut cursors = UnitCursors::default();
    for (to, target) in logs.open.writers.iter().filter(|(_, target)| target.is_in_unit) {
        cursors.pairs.entry(to).or_default().sent = *target.log.chain.cursor();
    }
    for (from, reader) in logs.open.readers.iter().filter(|(from, _)| logs.open.is_in_unit(*from)) {
        cursors.pairs.entry(from).or_default().received = reader.cursor;
    }
    cursors
}

/// What an image of this process covers.
fn covered_by_image(logs: &NodeLogs) -> LogPositions {
    let mut positions =
        LogPositions { deliveries: logs.deliveries.cursor.position, ..LogPositions::default() };
    let mut pair = |process, set: &dyn Fn(&mut PairPositions)| {
        set(positions.pairs.entry(process).or_default());
    };
    for (to, target) in logs.open.writers.iter() {
        // A later incarnation may have to send to another node what that node has not
        // confirmed.
        let confirmed = logs.remote.get(to).map(|remote| remote.confirmed.position());
        let sent = confirmed.unwrap_or_else(|| target.log.chain.cursor().position());
        pair(to, &|pair| pair.sent = sent);
    }
    for (from, reader) in logs.open.readers.iter() {
        pair(from, &|pair| pair.received = reader.cursor.position());
    }
    positions
}
