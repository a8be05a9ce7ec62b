//! A query for the state of the paths of this host's ranks.
//!
//! In: a query of the launcher, and the statistics pages of the ranks. Out: one message with the
//! paths of all ranks. The agent writes a query number into every page, and the query ends when
//! every rank has answered or after [`ANSWER_WAIT_MAX`], because ranks that compute do not answer.
//!
//! What may never happen: a query waits for a rank for ever.

use std::time::{Duration, Instant};

use super::rank::LocalRank;
use crate::control::Message;
use crate::ps::paths::Paths;

/// Longest wait for answers. Ranks inside MPI read their page about every millisecond; the machine
/// may be busy.
const ANSWER_WAIT_MAX: Duration = Duration::from_millis(400);
/// Pause between two checks of pages that are not answered.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A query in progress.
pub struct PathQuery {
    serial: u32,
    rows_max: usize,
    until: Instant,
}

impl PathQuery {
    /// Queries the ranks of this host.
    pub fn begin(serial: u32, rows_max: u32, ranks: &[LocalRank]) -> PathQuery {
        for rank in ranks.iter().filter(|rank| rank.ending.is_none()) {
            rank.shared
                .statistics_page
                .iter()
                .for_each(|statistics_page| statistics_page.ask(u64::from(serial)));
        }
        let until = Instant::now() + ANSWER_WAIT_MAX;
        PathQuery { serial, rows_max: rows_max as usize, until }
    }

    /// The message with the paths, once all ranks have answered or the time is over.
    pub fn poll(&self, ranks: &[LocalRank]) -> Option<Message> {
        let serial = u64::from(self.serial);
        let mut paths = Paths::default();
        for rank in ranks.iter().filter(|rank| rank.ending.is_none()) {
            let statistics = rank
                .shared
                .statistics_page
                .as_ref()
                .map(|statistics_page| statistics_page.statistics())
                .unwrap_or_default();
            let has_answered =
                statistics.iter().all(|endpoint_statistics| endpoint_statistics.answered == serial);
            match has_answered && !statistics.is_empty() {
                true => paths.ranks += 1,
                false => paths.add_unanswered(rank.rank),
            }
            for endpoint_statistics in &statistics {
                paths.add_statistics(
                    rank.rank,
                    &endpoint_statistics.text,
                    endpoint_statistics.answered != serial,
                );
            }
        }
        if paths.unanswered_count > 0 && Instant::now() < self.until {
            return None;
        }
        paths.cut(self.rows_max);
        Some(Message::Paths { serial: self.serial, paths: Box::new(paths) })
    }

    /// When to check the pages again.
    pub fn next_time(&self) -> Instant {
        self.until.min(Instant::now() + POLL_INTERVAL)
    }
}
