//! The memory file with the message logs of this node's ranks ([`landbridge_proto::log`]), and
//! what is released of it.
//!
//! In: a job whose senders keep messages (`recover_log=sender`); images of its ranks; where ranks
//! of other nodes can be reached. Out: one file for all ranks of the node and all their
//! incarnations, in which the ranks read up to where their logs are needed no more; where the ranks
//! of this node can be reached.
//!
//! | module | has what is needed by |
//! |---|---|
//! | `contacts` | processes that are to be reached or woken |
//! | `deliveries` | ranks that replay |
//! | `frame_tickets` | ranks whose frames wait for a copy on another node |
//! | `held` | who looks at the logs |
//! | `image_wishes` | ranks whose logs are long |
//! | `moves` | ranks that may move to another node |
//! | `unit` | ranks that begin again together |
//!
//! What may never happen: the file ends before the agent; something is released that an incarnation
//! from a kept image may need; an older contact replaces a newer one.

mod contacts;
mod deliveries;
mod frame_tickets;
mod held;
mod image_wishes;
mod moves;
pub mod unit;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use anyhow::{Context, Result, bail};
use landbridge_proto::log::counts::LogCounts;
use landbridge_proto::log::layout::{
    COUNTS_AT, CUT_AT, CUT_IS_OVER, DISK_MAX_AT, FILE_BYTES, HUGE_PAGES_AT, IN_UNIT, IS_LOCAL,
    LOCAL_AT, LOGGED_PROCESSES_MAX, MEMORY_MAX_AT, NO_IMAGES_AT, NOTHING_WAITS, REPORT_BYTES,
    REPORT_WORDS, STABLE_AT, TARGETS_AT, control_at, discarded_at, report_at,
};
use landbridge_proto::log::release::{LogPositions, LogReleases};
use landbridge_proto::log::unit::UnitCursors;
use landbridge_proto::setting::RECOVER_MEMORY;
use rustix::io::{pread, pwrite};

use super::image_logs::LogsToCopy;
use super::log_file;
use super::log_region::{LogFiles, disk_file};
use crate::checkpoint::CheckpointConfig;
use crate::control::{Job, Node};
use crate::memory_limit::memory_limit;
use crate::{mpi, sys};
use contacts::NodeContacts;
use deliveries::NodeDeliveries;
use frame_tickets::FrameTickets;
pub use held::HeldLogs;
use moves::MoveState;
use unit::UnitLogs;

/// The message logs of one node.
pub struct NodeLogs {
    files: Rc<LogFiles>,
    /// The processes of this node.
    local: RefCell<BTreeSet<u32>>,
    pub contacts: NodeContacts,
    pub deliveries: NodeDeliveries,
    pub tickets: FrameTickets,
    state: RefCell<ReleaseState>,
    /// If ranks may move to another node.
    for_moves: Option<RefCell<MoveState>>,
    /// If the ranks of this node begin again together.
    unit: Option<UnitLogs>,
}

/// What the images of the ranks cover.
#[derive(Default)]
struct ReleaseState {
    /// By rank and number of the image.
    images: BTreeMap<(u32, u64), (LogPositions, LogCounts)>,
    releases: LogReleases,
}

/// What ranks of this node have written for the agent.
#[derive(Default)]
pub struct LogNews {
    /// The ranks of which images are wanted, and the bytes that an image of each would release.
    pub wishes: BTreeMap<u32, u64>,
    /// The contacts of ranks that other nodes do not know yet.
    pub contacts: Vec<(u32, Vec<u8>)>,
}

impl NodeLogs {
    /// The logs of this node; `None` if relays keep the messages of this job.
    pub fn new(job: &Job, node: &Node) -> Result<Option<Rc<NodeLogs>>> {
        if !mpi::senders_keep_logs(&job.environment) {
            return Ok(None);
        }
        let mut logs = NodeLogs::of(&job.id, disk_file(&job.environment)?)?;
        if job.has_spares {
            let state = MoveState::new(node.relay_unix.is_none());
            logs.for_moves = Some(RefCell::new(state));
            let releases = &mut logs.state.borrow_mut().releases;
            (0..job.size).for_each(|rank| releases.add(rank as usize));
        }
        let ranks = node.first_rank..node.first_rank + node.rank_count;
        if mpi::begin_again_together(&job.environment) {
            logs.unit = Some(UnitLogs::new(ranks.clone()));
        }
        logs.add(ranks)?;
        // A spare node may take as many ranks as it has slots.
        let here = if node.rank_count > 0 { node.rank_count } else { node.slots };
        let ranks = here.max(node.machine_ranks);
        let share = memory_share(&job.environment, ranks, memory_limit());
        pwrite(&logs.files.memory, &share.unwrap_or(0).to_ne_bytes(), MEMORY_MAX_AT)?;
        let no_images = CheckpointConfig::find(&job.environment).is_none();
        pwrite(&logs.files.memory, &u64::from(no_images).to_ne_bytes(), NO_IMAGES_AT)?;
        // Another node keeps what ranks depend on that may move to a spare node.
        match job.has_spares && node.relay_unix.is_none() {
            true => pwrite(&logs.files.memory, &CUT_IS_OVER.to_ne_bytes(), CUT_AT).map(drop)?,
            false => logs.files.write_release(STABLE_AT, NOTHING_WAITS)?,
        }
        Ok(Some(Rc::new(logs)))
    }

    /// `disk`: the disk file, and how many bytes logs may take there.
    fn of(job: &str, disk: Option<(OwnedFd, u64)>) -> Result<NodeLogs> {
        let (file, has_huge_pages) = log_file::create(FILE_BYTES)?;
        let (disk, disk_max) = disk.map_or((None, 0), |(file, bytes_max)| (Some(file), bytes_max));
        pwrite(&file, &disk_max.to_ne_bytes(), DISK_MAX_AT)?;
        pwrite(&file, &u64::from(has_huge_pages).to_ne_bytes(), HUGE_PAGES_AT)?;
        let files = Rc::new(LogFiles::new(sys::out_of_the_way(file), disk));
        Ok(NodeLogs {
            local: RefCell::default(),
            contacts: NodeContacts::new(job, files.clone())?,
            deliveries: NodeDeliveries::new(files.clone()),
            tickets: FrameTickets::new(files.clone()),
            files,
            state: RefCell::default(),
            for_moves: None,
            unit: None,
        })
    }

    /// Adds processes of this node, before they start.
    pub fn add(&self, processes: Range<u32>) -> Result<()> {
        for process in processes {
            if process as usize >= LOGGED_PROCESSES_MAX {
                bail!(
                    "recover_log=sender works with at most {LOGGED_PROCESSES_MAX} processes, \
                     spawned ones among them: use recover_log=relay"
                );
            }
            let at = control_at(process as usize) + LOCAL_AT as u64;
            let is_in_unit = self.unit.as_ref().is_some_and(|unit| unit.ranks.contains(&process));
            let word = if is_in_unit { IN_UNIT } else { IS_LOCAL };
            pwrite(&self.files.memory, &word.to_ne_bytes(), at)?;
            self.state.borrow_mut().releases.add(process as usize);
            self.local.borrow_mut().insert(process);
        }
        Ok(())
    }

    /// The processes of this node.
    pub fn local(&self) -> Vec<u32> {
        self.local.borrow().iter().copied().collect()
    }

    pub fn is_local(&self, process: u32) -> bool {
        self.local.borrow().contains(&process)
    }

    /// The ranks to which a rank of this node has sent something.
    pub fn targets(&self, rank: u32) -> Vec<u32> {
        self.files.process_set(control_at(rank as usize) + TARGETS_AT as u64)
    }

    /// Processes of other nodes that have, or had, a transport.
    pub fn known_elsewhere(&self) -> impl Iterator<Item = u32> {
        let others = (0..LOGGED_PROCESSES_MAX as u32).filter(|process| !self.is_local(*process));
        others.filter(|process| self.contacts.contact_of(*process).is_some())
    }

    /// Whether a log of this node is kept from `position` on.
    pub fn keeps(&self, (from, to): (u32, u32), position: u64) -> bool {
        let pair = (from as usize, to as usize);
        let start = self.start(pair).map_or(u64::MAX, |start| start.position());
        start.max(self.word(discarded_at(pair.0, pair.1))) <= position
    }

    /// The files with the logs.
    pub fn files(&self) -> &LogFiles {
        &self.files
    }

    /// What ranks of this node have written since the last time. The bell is silenced before the
    /// file is read, so that a rank that writes later wakes the agent again. `has_images`: whether
    /// images of a process are taken.
    pub fn take_news(&self, has_images: impl Fn(u32) -> bool) -> LogNews {
        self.contacts.silence_bell();
        let wishes = self.take_image_wishes(has_images);
        LogNews { wishes, contacts: self.take_contacts() }
    }

    /// The contacts of ranks of this node that other nodes do not know yet.
    fn take_contacts(&self) -> Vec<(u32, Vec<u8>)> {
        self.contacts.take_unannounced(&self.local.borrow())
    }

    /// Notes the contact of a rank. Ranks of this node have written theirs themselves.
    pub fn note_contact(&self, rank: u32, contact: &[u8]) -> Result<()> {
        if self.is_local(rank) { Ok(()) } else { self.contacts.note_contact(rank, contact) }
    }

    /// Lets the frames leave this node for which tickets up to this one were drawn, and wakes the
    /// ranks that wait for that.
    pub fn answer_ticket(&self, ticket: u64) -> Result<()> {
        let waiting = self.tickets.answer(ticket, &self.local.borrow())?;
        waiting.into_iter().try_for_each(|rank| self.contacts.ring(rank))
    }

    /// A word of the memory file, which is there.
    pub fn word(&self, at: u64) -> u64 {
        self.files.word(at)
    }

    /// Notes how far the logs of a rank have come that has quiesced for its image `number`; returns
    /// what the image is to hold of them, if the rank may move to another node.
    pub fn note_image(&self, rank: u32, number: u64) -> Result<Option<LogsToCopy>> {
        let mut report = vec![0; REPORT_BYTES];
        let read = pread(&self.files.memory, &mut report, report_at(rank as usize))?;
        anyhow::ensure!(read == report.len(), "its logs are cut off");
        let word = |place: usize| {
            let bytes = report[8 * place..8 * place + 8].try_into();
            u64::from_ne_bytes(bytes.unwrap_or_default())
        };
        let positions = LogPositions::from_words(word).context("its logs are not as they were")?;
        let covered = (positions.clone(), self.counts(rank));
        self.state.borrow_mut().images.insert((rank, number), covered);
        match &self.unit {
            Some(unit) => {
                let cursors = UnitCursors::from_words(|place| word(REPORT_WORDS + place));
                let cursors = cursors.context("its logs are not as they were")?;
                let files = self.files.try_clone()?;
                Ok(Some(unit.logs_to_copy(files, rank, (positions, cursors))))
            }
            None => self.logs_to_copy(rank, positions),
        }
    }

    /// Releases what no incarnation of a rank needs whose oldest kept image is `number`.
    pub fn release(&self, rank: u32, number: u64) -> Result<()> {
        let mut state = self.state.borrow_mut();
        state.images.retain(|(of, image), _| *of != rank || *image >= number);
        let covered = state.images.get(&(rank, number)).cloned();
        let Some((positions, counts)) = covered else { return Ok(()) };
        let deliveries = positions.deliveries;
        if !self.is_from_elsewhere(rank, number) {
            let released = state.releases.advance(rank as usize, positions);
            self.release_logs(released)?;
        }
        self.deliveries.release(rank, deliveries, counts)
    }

    /// What a rank has sent and delivered.
    pub fn counts(&self, rank: u32) -> LogCounts {
        let at = control_at(rank as usize) + COUNTS_AT as u64;
        LogCounts::from_words(std::array::from_fn(|place| self.word(at + 8 * place as u64)))
    }
}

/// Bytes that the logs of each rank may take at most, unless the user has set
/// [`RECOVER_MEMORY`]: together a quarter of what processes of this host may use.
fn memory_share(settings: &[(String, String)], ranks: u32, limit: Option<u64>) -> Option<u64> {
    let is_set = settings.iter().any(|(name, _)| *name == RECOVER_MEMORY.variable());
    limit.filter(|_| !is_set).map(|limit| limit / 4 / u64::from(ranks.max(1)))
}

#[cfg(test)]
pub(super) mod tests {
    use landbridge_proto::log::layout::{
        DELIVERIES_DISCARDED_AT, DELIVERIES_END_AT, DELIVERIES_RELEASED_AT, deliveries_at,
        release_at,
    };
    use landbridge_proto::log::release::PairPositions;

    use super::*;

    #[test]
    fn logs_take_no_more_than_a_quarter_of_what_there_is() {
        let set = [(RECOVER_MEMORY.variable().to_string(), "8GiB".to_string())];
        assert_eq!(memory_share(&[], 4, Some(16 << 30)), Some(1 << 30));
        assert_eq!(
            memory_share(&[], 0, Some(16 << 30)),
            Some(4 << 30),
            "all processes are spawned"
        );
        assert_eq!(memory_share(&set, 4, Some(16 << 30)), None);
        assert_eq!(memory_share(&[], 4, None), None);
    }

    pub(in crate::agent) fn logs(local: Range<u32>) -> NodeLogs {
        let logs = NodeLogs::of("test", None).unwrap();
        logs.add(local).unwrap();
        logs
    }

    fn word(logs: &NodeLogs, at: u64) -> u64 {
        logs.word(at)
    }

    /// `sent` and `received`: of the logs between ranks 0 and 1.
    fn report(logs: &NodeLogs, rank: u32, sent: u64, received: u64, deliveries: u64) {
        let pairs = [(1 - rank as usize, PairPositions { sent, received })].into();
        let positions = LogPositions { pairs, deliveries };
        let at = report_at(rank as usize);
        for (place, word) in positions.words().enumerate() {
            pwrite(&logs.files.memory, &word.to_ne_bytes(), at + 8 * place as u64).unwrap();
        }
    }

    #[test]
    fn a_log_is_released_once_the_oldest_images_of_both_ranks_cover_it() {
        let logs = logs(0..2);
        let released = |from, to| {
            let at = release_at(from, to);
            assert_eq!(word(&logs, at), word(&logs, at + 8));
            word(&logs, at)
        };
        report(&logs, 0, 500, 80, 900);
        logs.note_image(0, 1).unwrap();
        report(&logs, 0, 700, 90, 20_000);
        logs.note_image(0, 2).unwrap();
        report(&logs, 1, 100, 600, 50);
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
    fn there_are_logs_of_a_bounded_number_of_processes() {
        let beyond = LOGGED_PROCESSES_MAX as u32;
        assert!(logs(0..1).add(beyond..beyond + 1).is_err());
    }

    #[test]
    fn what_is_held_lies_behind_what_is_released() {
        let logs = logs(0..2);
        let control = control_at(0);
        let write = |at: u64, bytes: &[u8]| pwrite(&logs.files.memory, bytes, at).unwrap();
        let count = |words: [u64; LogCounts::WORDS]| {
            for (place, word) in words.iter().enumerate() {
                write(control + (COUNTS_AT + 8 * place) as u64, &word.to_ne_bytes());
            }
        };
        let deliveries: Vec<u8> = (0..100_000).map(|number| number as u8).collect();
        write(deliveries_at(0), &deliveries);
        write(control + DELIVERIES_END_AT as u64, &100_000_u64.to_ne_bytes());
        report(&logs, 0, 500, 80, 70_000);
        count([10, 12, 300, 7000, 4, 4096]);
        logs.note_image(0, 1).unwrap();
        count([25, 30, 900, 9000, 8, 8192]);
        let held = logs.held(0, None);
        assert_eq!(
            (held.released, held.released_bytes, held.end),
            (LogCounts::default(), 0, 100_000)
        );
        logs.release(0, 1).unwrap();
        let held = logs.held(0, None);
        assert_eq!((held.counts.deliveries, held.counts.log_bytes), (25, 8192));
        assert_eq!((held.released.deliveries, held.released.micros), (10, 7000));
        let mut reader = logs.deliveries.reader(0, held.released_bytes..held.end);
        for byte in &deliveries[70_000..] {
            assert_eq!(reader.byte(), Some(*byte));
        }
        assert_eq!(reader.byte(), None);
        // A newer image may cover what was discarded since the oldest one.
        report(&logs, 0, 500, 80, 90_000);
        logs.note_image(0, 2).unwrap();
        for (discarded, newest, begin) in [
            (70_000, Some(2), Some(70_000)),
            (80_000, Some(2), Some(90_000)),
            (80_000, Some(1), None),
            (80_000, None, None),
            (90_001, Some(2), None),
        ] {
            write(control + DELIVERIES_DISCARDED_AT as u64, &u64::to_ne_bytes(discarded));
            let held = logs.held(0, newest);
            let found = (!held.is_discarded).then_some(held.released_bytes);
            assert_eq!(found, begin, "{discarded} discarded, newest image {newest:?}");
        }
    }
}
