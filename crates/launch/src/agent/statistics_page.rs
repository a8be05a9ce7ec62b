//! The statistics pages of this host's ranks ([`landbridge_proto::statistics_page`]): memory in
//! which each rank reports the state of its paths.
//!
//! In: the number of a query. Out: the texts that the rank has written, with the number of the
//! query that each text answers.
//!
//! What may never happen: the content of a page, which its rank has written, is trusted.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use anyhow::{Context, Result};
use landbridge_proto::statistics_page::{
    IN_USE_AT, LENGTH_AT, MAGIC, OPENED_AT, REPLY_AT, REQUEST_AT, SLOTS, STATISTICS_PAGE_BYTES,
    TEXT_AT, TEXT_BYTES_MAX, VERSION_AT, slot_at,
};
use rustix::fs::MemfdFlags;
use rustix::io::{pread, pwrite};

use crate::sys;

/// Attempts to read a text that its rank changes during the read.
const READ_ATTEMPTS_MAX: u32 = 8;

/// The statistics page of one rank, for all its incarnations.
pub struct StatisticsPage(OwnedFd);

/// The text of one endpoint of a rank, and the number of the query that it answers.
pub struct EndpointStatistics {
    pub answered: u64,
    pub text: String,
}

impl StatisticsPage {
    pub fn new() -> Result<StatisticsPage> {
        let file = rustix::fs::memfd_create("landbridge-statistics", MemfdFlags::CLOEXEC);
        let file = file.context("no memory file for a statistics page")?;
        rustix::fs::ftruncate(&file, STATISTICS_PAGE_BYTES as u64)?;
        pwrite(&file, &MAGIC, 0)?;
        Ok(StatisticsPage(sys::out_of_the_way(file)))
    }

    /// A page for all incarnations of a rank; `None` on error, because a rank can run without its
    /// statistics page.
    pub fn shared() -> Option<Rc<StatisticsPage>> {
        StatisticsPage::new().ok().map(Rc::new)
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Whether the process has ever opened an endpoint of the provider.
    pub fn is_opened(&self) -> bool {
        self.word(OPENED_AT) != 0
    }

    pub fn ask(&self, number: u64) {
        let _ = pwrite(&self.0, &number.to_ne_bytes(), REQUEST_AT as u64);
    }

    fn word(&self, at: usize) -> u64 {
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
    pub fn statistics(&self) -> Vec<EndpointStatistics> {
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
