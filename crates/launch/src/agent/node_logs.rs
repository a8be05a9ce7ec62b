//! The memory file with the message logs of this node's ranks ([`landbridge_proto::log`]), and
//! what is released of it.
//!
//! In: a job whose senders keep messages (`recover_log=sender`); images of its ranks. Out: one file
//! for all ranks of the node and all their incarnations, in which the ranks read up to where their
//! logs are needed no more. What may never happen: the file ends before the agent; something is
//! released that an incarnation from a kept image may need.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use anyhow::{Context, Result};
use landbridge_proto::log::layout::{
    DELIVERIES_BYTES, DELIVERIES_RELEASED_AT, RELEASE_BYTES, control_at, deliveries_at, file_bytes,
    release_at, report_at,
};
use landbridge_proto::log::release::{LogPositions, LogReleases};
use landbridge_proto::setting::{RECOVER_LOG, Value};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::{pread, pwrite};

use crate::control::Job;
use crate::sys;

/// The message logs of one node.
pub struct NodeLogs {
    file: OwnedFd,
    processes: usize,
    state: RefCell<ReleaseState>,
}

/// What the images of the ranks cover.
struct ReleaseState {
    /// By rank and number of the image.
    images: BTreeMap<(u32, u64), LogPositions>,
    releases: LogReleases,
    /// Up to where the deliveries of each rank are released.
    deliveries: BTreeMap<u32, u64>,
}

impl NodeLogs {
    /// The logs of this node; `None` if relays keep the messages of this job.
    pub fn new(job: &Job) -> Result<Option<Rc<NodeLogs>>> {
        let variable = RECOVER_LOG.variable();
        let stated = job.environment.iter().find(|(name, _)| *name == variable);
        let is_wanted =
            stated.is_some_and(|(_, text)| RECOVER_LOG.parse(text) == Ok(Value::Word("sender")));
        if !is_wanted {
            return Ok(None);
        }
        NodeLogs::of(job.size as usize).map(Rc::new).map(Some)
    }

    fn of(processes: usize) -> Result<NodeLogs> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("landbridge-logs", flags)?;
        rustix::fs::ftruncate(&file, file_bytes(processes))
            .context("no memory file for message logs")?;
        // A rank that shrinks the file would kill others with SIGBUS.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let (images, deliveries) = (BTreeMap::new(), BTreeMap::new());
        let releases = LogReleases::new(processes);
        let state = RefCell::new(ReleaseState { images, releases, deliveries });
        Ok(NodeLogs { file: sys::out_of_the_way(file), processes, state })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Notes how far the logs of a rank have come that has quiesced for its image `number`.
    pub fn note_image(&self, rank: u32, number: u64) -> Result<()> {
        let at = report_at(self.processes, rank as usize);
        let mut report = vec![0; (2 * self.processes + 1) * 8];
        let read = pread(&self.file, &mut report, at)?;
        anyhow::ensure!(read == report.len(), "its logs are cut off");
        let word = |place: usize| {
            let bytes = report[8 * place..8 * place + 8].try_into();
            u64::from_ne_bytes(bytes.unwrap_or_default())
        };
        let positions = LogPositions::from_words(self.processes, word);
        self.state.borrow_mut().images.insert((rank, number), positions);
        Ok(())
    }

    /// Releases what no incarnation of a rank needs whose oldest kept image is `number`.
    pub fn release(&self, rank: u32, number: u64) -> Result<()> {
        let mut state = self.state.borrow_mut();
        state.images.retain(|(of, image), _| *of != rank || *image >= number);
        let Some(positions) = state.images.get(&(rank, number)).cloned() else { return Ok(()) };
        let deliveries = positions.deliveries;
        for release in state.releases.advance(rank as usize, positions) {
            let at = release_at(self.processes, release.from, release.to);
            self.write_release(at, release.position)?;
        }
        let before = state.deliveries.insert(rank, deliveries).unwrap_or(0);
        if deliveries > before {
            self.discard_deliveries(rank, before, deliveries)?;
        }
        Ok(())
    }

    fn write_release(&self, at: u64, position: u64) -> Result<()> {
        for at in [at, at + RELEASE_BYTES as u64 / 2] {
            pwrite(&self.file, &position.to_ne_bytes(), at)?;
        }
        Ok(())
    }

    /// Gives back the pages of deliveries, then lets the rank use their places again.
    fn discard_deliveries(&self, rank: u32, from: u64, to: u64) -> Result<()> {
        let ring = DELIVERIES_BYTES as u64;
        let start = deliveries_at(self.processes, rank as usize);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Places that are used again lie at the same distance from the start of the ring.
        let end_of_lap = (from / ring + 1) * ring;
        for (from, to) in [(from, to.min(end_of_lap)), (end_of_lap, to)] {
            let (first, last) = (from.next_multiple_of(4096), to / 4096 * 4096);
            if first < last {
                rustix::fs::fallocate(&self.file, flags, start + first % ring, last - first)?;
            }
        }
        let at = control_at(rank as usize) + DELIVERIES_RELEASED_AT as u64;
        self.write_release(at, to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(logs: &NodeLogs, at: u64) -> u64 {
        let mut bytes = [0; 8];
        pread(&logs.file, &mut bytes, at).unwrap();
        u64::from_ne_bytes(bytes)
    }

    fn report(logs: &NodeLogs, rank: u32, sent: [u64; 2], received: [u64; 2], deliveries: u64) {
        let positions =
            LogPositions { sent: sent.to_vec(), received: received.to_vec(), deliveries };
        let at = report_at(2, rank as usize);
        for (place, word) in positions.words().enumerate() {
            pwrite(&logs.file, &word.to_ne_bytes(), at + 8 * place as u64).unwrap();
        }
    }

    #[test]
    fn a_log_is_released_once_the_oldest_images_of_both_ranks_cover_it() {
        let logs = NodeLogs::of(2).unwrap();
        let released = |from, to| {
            let at = release_at(2, from, to);
            assert_eq!(word(&logs, at), word(&logs, at + 8));
            word(&logs, at)
        };
        report(&logs, 0, [0, 500], [0, 80], 900);
        logs.note_image(0, 1).unwrap();
        report(&logs, 0, [0, 700], [0, 90], 20_000);
        logs.note_image(0, 2).unwrap();
        report(&logs, 1, [100, 0], [600, 0], 50);
        logs.note_image(1, 1).unwrap();
        logs.release(0, 1).unwrap();
        assert_eq!((released(0, 1), released(1, 0)), (0, 0), "rank 1 may begin again");
        logs.release(1, 1).unwrap();
        assert_eq!((released(0, 1), released(1, 0)), (500, 80));
        logs.release(0, 2).unwrap();
        assert_eq!((released(0, 1), released(1, 0)), (600, 90));
        assert_eq!(word(&logs, control_at(0) + DELIVERIES_RELEASED_AT as u64), 20_000);
    }

    #[test]
    fn released_deliveries_take_no_memory_and_others_stay() {
        let logs = NodeLogs::of(1).unwrap();
        let ring = DELIVERIES_BYTES as u64;
        let blocks = || rustix::fs::fstat(&logs.file).unwrap().st_blocks;
        let at = |position: u64| deliveries_at(1, 0) + position % ring;
        for position in [0, 4096, ring - 4096] {
            pwrite(&logs.file, &[7; 4096], at(position)).unwrap();
        }
        // The page of the release itself.
        logs.discard_deliveries(0, 0, 100).unwrap();
        let before = blocks();
        logs.discard_deliveries(0, 100, 8000).unwrap();
        assert_eq!(blocks(), before, "no whole page");
        logs.discard_deliveries(0, ring - 4096, ring + 4100).unwrap();
        assert_eq!(before - blocks(), 16, "two pages of 512-byte blocks");
        assert_eq!([word(&logs, at(0)), word(&logs, at(4096)) & 0xff], [0, 7]);
    }
}
