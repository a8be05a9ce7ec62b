//! The statistics pages of this host's ranks ([`landbridge_proto::statistics_page`]): memory in
//! which each rank reports the state of its paths.
//!
//! In: a query of the launcher, and the texts that ranks write. Out: one message with the paths of
//! all ranks. The agent writes a query number into every page, and the query ends when every rank
//! has answered or after [`ANSWER_WAIT_MAX`], because ranks that compute do not answer.
//!
//! What may never happen: the content of a page, which its rank has written, is trusted.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use landbridge_proto::statistics_page::{
    IN_USE_AT, LENGTH_AT, MAGIC, REPLY_AT, REQUEST_AT, SLOTS, STATISTICS_PAGE_BYTES, TEXT_AT,
    TEXT_BYTES_MAX, VERSION_AT, slot_at,
};
use rustix::fs::MemfdFlags;
use rustix::io::{pread, pwrite};

use super::rank::LocalRank;
use crate::control::Message;
use crate::ps::paths::Paths;
use crate::sys;

/// Longest wait for answers. Ranks inside MPI read their page about every millisecond; the machine
/// may be busy.
const ANSWER_WAIT_MAX: Duration = Duration::from_millis(400);
/// Pause between two checks of pages that are not answered.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Attempts to read a text that its rank changes during the read.
const READ_ATTEMPTS_MAX: u32 = 8;

/// The statistics page of one rank, for all its incarnations.
pub struct StatisticsPage(OwnedFd);

/// The text of one endpoint of a rank, and the number of the query that it answers.
struct EndpointStatistics {
    answered: u64,
    text: String,
}

/// A query in progress.
pub struct PathQuery {
    serial: u32,
    rows_max: usize,
    until: Instant,
}

impl StatisticsPage {
    pub fn new() -> Result<StatisticsPage> {
        let file = rustix::fs::memfd_create("landbridge-statistics", MemfdFlags::CLOEXEC);
        let file = file.context("no memory file for a statistics page")?;
        rustix::fs::ftruncate(&file, STATISTICS_PAGE_BYTES as u64)?;
        pwrite(&file, &MAGIC, 0)?;
        Ok(StatisticsPage(sys::out_of_the_way(file)))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn ask(&self, number: u64) {
        let _ = pwrite(&self.0, &number.to_ne_bytes(), REQUEST_AT as u64);
    }

    pub(super) fn word(&self, at: usize) -> u64 {
        let mut word = [0; 8];
        match pread(&self.0, &mut word[..], at as u64) {
            Ok(8) => u64::from_ne_bytes(word),
            _ => 0,
        }
    }

    fn is_taken(slot: &usize, statistics_page: &StatisticsPage) -> bool {
        statistics_page.word(slot + IN_USE_AT) != 0
    }

    /// The texts of the rank's endpoints. The rank has written them itself, so nothing in them is
    /// trusted.
    fn statistics(&self) -> Vec<EndpointStatistics> {
        let taken = (0..SLOTS).map(slot_at).filter(|at| StatisticsPage::is_taken(at, self));
        taken.filter_map(|at| self.endpoint_statistics(at)).collect()
    }

    fn endpoint_statistics(&self, at: usize) -> Option<EndpointStatistics> {
        for _ in 0..READ_ATTEMPTS_MAX {
            let version = self.word(at + VERSION_AT);
            let answered = self.word(at + REPLY_AT);
            let length = (self.word(at + LENGTH_AT) as usize).min(TEXT_BYTES_MAX);
            let mut bytes = vec![0; length];
            let read = pread(&self.0, &mut bytes[..], (at + TEXT_AT) as u64);
            let is_whole = read == Ok(length) && version.is_multiple_of(2);
            if is_whole && version == self.word(at + VERSION_AT) {
                let text = String::from_utf8_lossy(&bytes).into_owned();
                return Some(EndpointStatistics { answered, text });
            }
        }
        None
    }
}

impl PathQuery {
    /// Queries the ranks of this host.
    pub fn begin(serial: u32, rows_max: u32, ranks: &[LocalRank]) -> PathQuery {
        for rank in ranks.iter().filter(|rank| rank.ending.is_none()) {
            rank.statistics_page
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

#[cfg(test)]
mod tests {
    use super::*;

    fn write(statistics_page: &StatisticsPage, at: usize, word: u64) {
        pwrite(&statistics_page.0, &word.to_ne_bytes(), at as u64).unwrap();
    }

    #[test]
    fn a_statistics_page_is_read_as_a_rank_has_written_it() {
        let statistics_page = StatisticsPage::new().unwrap();
        assert!(statistics_page.statistics().is_empty());
        statistics_page.ask(3);
        assert_eq!(statistics_page.word(REQUEST_AT), 3);
        let at = slot_at(2);
        write(&statistics_page, at + IN_USE_AT, 1);
        write(&statistics_page, at + REPLY_AT, 3);
        write(&statistics_page, at + LENGTH_AT, 4);
        pwrite(&statistics_page.0, b"text", (at + TEXT_AT) as u64).unwrap();
        let statistics = statistics_page.statistics();
        assert_eq!((statistics[0].answered, statistics[0].text.as_str()), (3, "text"));
        // An odd version: the text is being written, for ever.
        write(&statistics_page, at + VERSION_AT, 7);
        assert!(statistics_page.statistics().is_empty());
        // A rank may write any length.
        write(&statistics_page, at + VERSION_AT, 8);
        write(&statistics_page, at + LENGTH_AT, u64::MAX);
        assert_eq!(statistics_page.statistics()[0].text.len(), TEXT_BYTES_MAX);
    }
}
