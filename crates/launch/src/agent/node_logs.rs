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
//! | `held` | who looks at the logs |
//! | `moves` | ranks that may move to another node |
//! | `unit` | ranks that begin again together |
//!
//! What may never happen: the file ends before the agent; something is released that an incarnation
//! from a kept image may need; an older contact replaces a newer one.

mod held;
mod moves;
pub mod unit;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use anyhow::{Context, Result, bail};
use landbridge_proto::log::contact::{CONTACT_BYTES, Contact, agent_bell};
use landbridge_proto::log::counts::LogCounts;
use landbridge_proto::log::layout::{
    AGENT_BELL_AT, BELL_AT, CONTACTS_CHANGED_AT, COUNTS_AT, CUT_AT, CUT_IS_OVER, DELIVERIES_BYTES,
    DELIVERIES_DISCARDED_AT, DELIVERIES_END_AT, DELIVERIES_PUNCHED_AT, DELIVERIES_RELEASED_AT,
    DISK_MAX_AT, FILE_BYTES, HUGE_PAGES_AT, IMAGES_WANTED_AT, IN_UNIT, IS_CUTTING, IS_LOCAL,
    LOCAL_AT, LOGGED_PROCESSES_MAX, MEMORY_MAX_AT, NO_IMAGES_AT, NOTHING_WAITS, RELEASE_BYTES,
    REPORT_BYTES, REPORT_WORDS, STABLE_ASKED_AT, STABLE_AT, STABLE_WANTED_AT, contact_at,
    control_at, deliveries_at, report_at,
};
use landbridge_proto::log::release::{LogPositions, LogReleases};
use landbridge_proto::log::unit::UnitCursors;
use landbridge_proto::setting::RECOVER_MEMORY;
use rustix::fs::FallocateFlags;
use rustix::io::{pread, pwrite};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, recv,
    sendto, socket_with,
};

use super::image_logs::LogsToCopy;
use super::log_file;
use super::log_region::{LogFiles, disk_file};
use crate::checkpoint::CheckpointConfig;
use crate::control::rank_state::RecordingUpdate;
use crate::control::{Job, Node};
use crate::memory_limit::memory_limit;
use crate::{mpi, sys};
pub use held::HeldLogs;
use moves::MoveState;
use unit::UnitLogs;

/// The message logs of one node.
pub struct NodeLogs {
    files: LogFiles,
    /// The processes of this node.
    local: RefCell<BTreeSet<u32>>,
    /// Becomes readable when a rank of this node has written its contact, or wants images.
    bell: OwnedFd,
    state: RefCell<ReleaseState>,
    /// The generations of the contacts that other nodes know, by process of this node.
    announced: RefCell<BTreeMap<u32, u32>>,
    /// Number of contacts that were written into the file.
    noted: Cell<u64>,
    job: String,
    /// The last ticket for frames to other nodes that was read, and the last one that was answered.
    tickets: Cell<(u64, u64)>,
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
    /// Up to where the deliveries of each rank are released, and what it had done by then.
    deliveries: BTreeMap<u32, (u64, LogCounts)>,
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
            false => logs.write_release(STABLE_AT, NOTHING_WAITS)?,
        }
        Ok(Some(Rc::new(logs)))
    }

    /// `disk`: the disk file, and how many bytes logs may take there.
    fn of(job: &str, disk: Option<(OwnedFd, u64)>) -> Result<NodeLogs> {
        let (file, has_huge_pages) = log_file::create(FILE_BYTES)?;
        let (disk, disk_max) = disk.map_or((None, 0), |(file, bytes_max)| (Some(file), bytes_max));
        pwrite(&file, &disk_max.to_ne_bytes(), DISK_MAX_AT)?;
        pwrite(&file, &u64::from(has_huge_pages).to_ne_bytes(), HUGE_PAGES_AT)?;
        let number = u64::from_str_radix(&sys::random_hex(16)?, 16)?;
        pwrite(&file, &number.to_ne_bytes(), AGENT_BELL_AT)?;
        let bell = open_bell(&agent_bell(job.as_bytes(), number))
            .context("no socket by which ranks say where they can be reached")?;
        Ok(NodeLogs {
            files: LogFiles::new(sys::out_of_the_way(file), disk),
            local: RefCell::default(),
            bell: sys::out_of_the_way(bell),
            state: RefCell::default(),
            announced: RefCell::default(),
            noted: Cell::default(),
            job: job.to_owned(),
            tickets: Cell::default(),
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

    /// The socket that becomes readable when a rank has written its contact, or wants images.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// The contacts of ranks of this node that other nodes do not know yet.
    pub fn take_contacts(&self) -> Vec<(u32, Vec<u8>)> {
        while recv(&self.bell, &mut [0; 8][..], RecvFlags::DONTWAIT).is_ok() {}
        let mut announced = self.announced.borrow_mut();
        let mut take = |rank: u32| {
            let contact = self.contact(rank)?;
            let before = announced.insert(rank, contact.generation);
            (before != Some(contact.generation)).then(|| (rank, contact.emit().to_vec()))
        };
        self.local.borrow().iter().filter_map(|process| take(*process)).collect()
    }

    /// The ranks of which images are wanted, so that logs can be released that have become long.
    pub fn take_image_wishes(&self) -> BTreeSet<u32> {
        let mut ranks = BTreeSet::new();
        for rank in self.local.borrow().iter() {
            let at = control_at(*rank as usize) + IMAGES_WANTED_AT as u64;
            let mut word = [0; 8];
            let is_read = pread(&self.files.memory, &mut word, at).is_ok();
            let wanted = u64::from_ne_bytes(word);
            if is_read && wanted > 0 && pwrite(&self.files.memory, &[0; 8], at).is_ok() {
                ranks.insert(*rank);
                ranks.extend(wanted.checked_sub(2).and_then(|peer| u32::try_from(peer).ok()));
            }
        }
        ranks
    }

    /// Notes the contact of a rank, which may be one of this node.
    pub fn note_contact(&self, rank: u32, contact: &[u8]) -> Result<()> {
        let contact = contact.try_into().ok().and_then(Contact::parse);
        let contact = contact.context("it is damaged")?;
        anyhow::ensure!((rank as usize) < LOGGED_PROCESSES_MAX, "there is no such rank");
        let known = self.contact(rank).map_or(0, |known| known.generation);
        if self.local.borrow().contains(&rank) || contact.generation <= known {
            return Ok(());
        }
        pwrite(&self.files.memory, &contact.emit(), contact_at(rank as usize))?;
        self.note_change()
    }

    /// Lets ranks look at contacts and mailboxes.
    pub fn note_change(&self) -> Result<()> {
        self.noted.set(self.noted.get() + 1);
        pwrite(&self.files.memory, &self.noted.get().to_ne_bytes(), CONTACTS_CHANGED_AT)?;
        Ok(())
    }

    /// Whether ranks of other nodes are known.
    pub fn knows_other_nodes(&self) -> bool {
        self.noted.get() > 0
    }

    /// The processes of this node.
    pub fn local(&self) -> Vec<u32> {
        self.local.borrow().iter().copied().collect()
    }

    pub fn is_local(&self, process: u32) -> bool {
        self.local.borrow().contains(&process)
    }

    /// Where a process can be reached, if it is known.
    pub fn contact(&self, rank: u32) -> Option<Contact> {
        let mut bytes = [0; CONTACT_BYTES];
        let read = pread(&self.files.memory, &mut bytes, contact_at(rank as usize)).ok()?;
        Contact::parse(&bytes).filter(|_| read == CONTACT_BYTES)
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.files.memory.as_fd()
    }

    /// The files with the logs.
    pub fn files(&self) -> &LogFiles {
        &self.files
    }

    // --- what ranks depend on that may move to another node

    /// The newest ticket of ranks whose frames wait until another node knows what they depend on,
    /// if there is a new one.
    pub fn take_ticket(&self) -> Option<u64> {
        let (read, answered) = self.tickets.get();
        let wanted = self.word(STABLE_WANTED_AT);
        self.tickets.set((wanted.max(read), answered));
        (wanted > read).then_some(wanted)
    }

    /// Lets the frames leave this node for which tickets up to this one were drawn, and wakes the
    /// ranks that wait for that.
    pub fn answer_ticket(&self, ticket: u64) -> Result<()> {
        let (read, answered) = self.tickets.get();
        self.write_release(STABLE_AT, ticket)?;
        self.tickets.set((read, ticket));
        for rank in self.local.borrow().iter() {
            let control = control_at(*rank as usize);
            let asked = self.word(control + STABLE_ASKED_AT as u64);
            if asked > answered && asked <= ticket {
                self.ring(*rank)?;
            }
        }
        Ok(())
    }

    /// Wakes a rank, if it sleeps.
    pub fn ring(&self, rank: u32) -> Result<()> {
        let number = self.word(control_at(rank as usize) + BELL_AT as u64);
        let bell = format!("landbridge-{}-{rank}-{number}", self.job);
        let bell = SocketAddrUnix::new_abstract_name(bell.as_bytes())?;
        // A full socket means that the bell was rung; no socket, that nobody waits.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = sendto(&self.bell, b"!", flags, &bell);
        Ok(())
    }

    /// Reads how far all ranks of this node have come, none of which delivers anything meanwhile.
    pub fn cut<T>(&self, read: impl FnOnce() -> T) -> Result<T> {
        pwrite(&self.files.memory, &IS_CUTTING.to_ne_bytes(), CUT_AT)?;
        fence(Ordering::SeqCst);
        let result = read();
        pwrite(&self.files.memory, &CUT_IS_OVER.to_ne_bytes(), CUT_AT)?;
        Ok(result)
    }

    /// Bytes of the deliveries of a rank from `from` on, as far as they are written.
    pub fn deliveries(&self, rank: u32, from: u64) -> Vec<u8> {
        let end = self.word(control_at(rank as usize) + DELIVERIES_END_AT as u64);
        let mut reader = DeliveriesReader::new(self, rank, from..end.max(from));
        std::iter::from_fn(|| reader.byte()).collect()
    }

    /// Writes deliveries of a rank that is to be started here.
    ///
    /// # Errors
    /// There are more than a rank can replay, or memory is short.
    pub fn write_deliveries(&self, update: &RecordingUpdate) -> Result<()> {
        let (rank, from, bytes) = (update.rank, update.deliveries_from, &update.deliveries[..]);
        let control = control_at(rank as usize);
        let base = update.deliveries_base;
        if base > 0 {
            self.write_release(control + DELIVERIES_RELEASED_AT as u64, base)?;
            let state = &mut self.state.borrow_mut().deliveries;
            state.insert(rank, (base, LogCounts::default()));
        }
        let released = self.word(control + DELIVERIES_RELEASED_AT as u64);
        if (from + bytes.len() as u64).saturating_sub(released) > DELIVERIES_BYTES as u64 {
            bail!("rank {rank} has delivered more than a spare node can replay");
        }
        let mut at = from % DELIVERIES_BYTES as u64;
        let mut left = bytes;
        while !left.is_empty() {
            let count = left.len().min(DELIVERIES_BYTES - at as usize);
            let written =
                pwrite(&self.files.memory, &left[..count], deliveries_at(rank as usize) + at)?;
            left = &left[written..];
            at = (at + written as u64) % DELIVERIES_BYTES as u64;
        }
        let end = (from + bytes.len() as u64).max(base);
        let at = control + DELIVERIES_END_AT as u64;
        pwrite(&self.files.memory, &end.max(self.word(at)).to_ne_bytes(), at)?;
        Ok(())
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
        let before = state.deliveries.insert(rank, (deliveries, counts));
        let before = before.map_or(0, |(deliveries, _)| deliveries);
        if deliveries > before {
            self.discard_deliveries(rank, before, deliveries)?;
        }
        Ok(())
    }

    /// What a rank has sent and delivered.
    pub fn counts(&self, rank: u32) -> LogCounts {
        let at = control_at(rank as usize) + COUNTS_AT as u64;
        LogCounts::from_words(std::array::from_fn(|place| self.word(at + 8 * place as u64)))
    }

    /// A word of the file, which is there.
    pub fn word(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        let _ = pread(&self.files.memory, &mut word, at);
        u64::from_ne_bytes(word)
    }

    /// Writes a position twice ([`RELEASE_BYTES`]).
    pub fn write_release(&self, at: u64, position: u64) -> Result<()> {
        for at in [at, at + RELEASE_BYTES as u64 / 2] {
            pwrite(&self.files.memory, &position.to_ne_bytes(), at)?;
        }
        Ok(())
    }

    /// Gives back the pages of deliveries, then lets the rank use their places again. The pages
    /// before what the rank has discarded it has given back itself, and may be using again. It uses
    /// no place of what is behind that: such a place is free once this has returned.
    fn discard_deliveries(&self, rank: u32, from: u64, to: u64) -> Result<()> {
        let control = control_at(rank as usize);
        let punched = |is: u64| {
            pwrite(&self.files.memory, &is.to_ne_bytes(), control + DELIVERIES_PUNCHED_AT as u64)
        };
        punched(1)?;
        fence(Ordering::SeqCst);
        let mut discarded = [0; 8];
        let at = control + DELIVERIES_DISCARDED_AT as u64;
        let outcome = match pread(&self.files.memory, &mut discarded, at) {
            Ok(_) => self.punch_deliveries(rank, from.max(u64::from_ne_bytes(discarded)), to),
            Err(error) => Err(error.into()),
        };
        punched(0)?;
        outcome?;
        self.write_release(control + DELIVERIES_RELEASED_AT as u64, to)
    }

    fn punch_deliveries(&self, rank: u32, from: u64, to: u64) -> Result<()> {
        let ring = DELIVERIES_BYTES as u64;
        let start = deliveries_at(rank as usize);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Places that are used again lie at the same distance from the start of the ring.
        let end_of_lap = (from / ring + 1) * ring;
        for (from, to) in [(from, to.min(end_of_lap)), (end_of_lap, to)] {
            let (first, last) = (from.next_multiple_of(4096), to / 4096 * 4096);
            if first < last {
                rustix::fs::fallocate(
                    &self.files.memory,
                    flags,
                    start + first % ring,
                    last - first,
                )?;
            }
        }
        Ok(())
    }
}

/// Reads the deliveries of a rank, of which it may write more meanwhile.
pub struct DeliveriesReader<'a> {
    logs: &'a NodeLogs,
    rank: u32,
    left: Range<u64>,
    /// Bytes that were read ahead, the next one last.
    ahead: Vec<u8>,
}

impl DeliveriesReader<'_> {
    /// Bytes that are read ahead at once.
    const AHEAD_BYTES: u64 = 64 << 10;

    /// Reads these bytes of all that were ever written.
    pub fn new(logs: &NodeLogs, rank: u32, bytes: Range<u64>) -> DeliveriesReader<'_> {
        DeliveriesReader { logs, rank, left: bytes, ahead: Vec::new() }
    }

    /// The next byte, if there is one.
    pub fn byte(&mut self) -> Option<u8> {
        if self.ahead.is_empty() && !self.left.is_empty() {
            let at = self.left.start % DELIVERIES_BYTES as u64;
            let in_lap = DELIVERIES_BYTES as u64 - at;
            let bytes =
                DeliveriesReader::AHEAD_BYTES.min(in_lap).min(self.left.end - self.left.start);
            self.ahead = vec![0; bytes as usize];
            let place = deliveries_at(self.rank as usize) + at;
            let read = pread(&self.logs.files.memory, &mut self.ahead[..], place).unwrap_or(0);
            self.ahead.truncate(read);
            self.ahead.reverse();
            self.left.start += bytes;
        }
        self.ahead.pop()
    }
}

/// Bytes that the logs of each rank may take at most, unless the user has set
/// [`RECOVER_MEMORY`]: together a quarter of what processes of this host may use.
fn memory_share(settings: &[(String, String)], ranks: u32, limit: Option<u64>) -> Option<u64> {
    let is_set = settings.iter().any(|(name, _)| *name == RECOVER_MEMORY.variable());
    limit.filter(|_| !is_set).map(|limit| limit / 4 / u64::from(ranks.max(1)))
}

fn open_bell(name: &[u8]) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let bell = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    bind(&bell, &SocketAddrUnix::new_abstract_name(name)?)?;
    Ok(bell)
}

#[cfg(test)]
mod tests {
    use landbridge_proto::log::layout::release_at;
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

    fn logs(local: Range<u32>) -> NodeLogs {
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
    fn contacts_of_this_node_are_announced_once_and_those_of_others_noted() {
        let logs = logs(0..2);
        let contact = |generation| Contact { generation, name: [generation as u8; 48] };
        pwrite(&logs.files.memory, &contact(1).emit(), contact_at(1)).unwrap();
        assert_eq!(logs.take_contacts(), [(1, contact(1).emit().to_vec())]);
        assert_eq!(logs.take_contacts(), []);
        pwrite(&logs.files.memory, &contact(2).emit(), contact_at(1)).unwrap();
        assert_eq!(logs.take_contacts(), [(1, contact(2).emit().to_vec())]);
        logs.note_contact(2, &contact(5).emit()).unwrap();
        logs.note_contact(2, &contact(4).emit()).unwrap();
        logs.note_contact(1, &contact(9).emit()).unwrap();
        assert_eq!((logs.contact(2), logs.contact(1)), (Some(contact(5)), Some(contact(2))));
        assert_eq!(word(&logs, CONTACTS_CHANGED_AT), 1);
        let beyond = LOGGED_PROCESSES_MAX as u32;
        assert!(logs.note_contact(beyond, &contact(1).emit()).is_err());
        assert!(logs.add(beyond..beyond + 1).is_err());
        assert!(logs.note_contact(2, &[7; 64]).is_err());
    }

    #[test]
    fn a_rank_whose_logs_are_long_wants_images_of_itself_and_of_another_one() {
        let logs = logs(0..4);
        let want = |rank: usize, word: u64| {
            let at = control_at(rank) + IMAGES_WANTED_AT as u64;
            pwrite(&logs.files.memory, &word.to_ne_bytes(), at).unwrap();
        };
        want(1, 1);
        want(2, 2 + 3);
        assert_eq!(logs.take_image_wishes(), [1, 2, 3].into());
        assert_eq!(logs.take_image_wishes(), [].into());
        // A rank with a disk has reasons of its own.
        want(1, 1);
        pwrite(&logs.files.memory, &1000_u64.to_ne_bytes(), DISK_MAX_AT).unwrap();
        assert_eq!(logs.take_image_wishes(), [1].into());
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
        let mut reader = DeliveriesReader::new(&logs, 0, held.released_bytes..held.end);
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

    #[test]
    fn released_deliveries_take_no_memory_and_others_stay() {
        let logs = logs(0..1);
        let ring = DELIVERIES_BYTES as u64;
        let blocks = || rustix::fs::fstat(&logs.files.memory).unwrap().st_blocks;
        let at = |position: u64| deliveries_at(0) + position % ring;
        for position in [0, 4096, ring - 4096] {
            pwrite(&logs.files.memory, &[7; 4096], at(position)).unwrap();
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

    /// Places of what a rank has discarded may hold newer deliveries, and what is behind the ring
    /// is of others.
    #[test]
    fn pages_stay_that_a_rank_may_be_using_again() {
        let logs = logs(0..2);
        let ring = DELIVERIES_BYTES as u64;
        let blocks = || rustix::fs::fstat(&logs.files.memory).unwrap().st_blocks;
        for page in 0..4 {
            pwrite(&logs.files.memory, &[7; 4096], deliveries_at(0) + 4096 * page).unwrap();
        }
        pwrite(&logs.files.memory, &[9; 4096], deliveries_at(1)).unwrap();
        let discard = |position: u64| {
            let at = control_at(0) + DELIVERIES_DISCARDED_AT as u64;
            pwrite(&logs.files.memory, &position.to_ne_bytes(), at).unwrap();
        };
        discard(ring + 4096);
        let before = blocks();
        logs.discard_deliveries(0, 0, ring + 4096).unwrap();
        assert_eq!(blocks(), before, "all of it was discarded");
        logs.discard_deliveries(0, ring + 4096, ring + 8192).unwrap();
        assert_eq!(before - blocks(), 8, "a page of 512-byte blocks");
        discard(ring + 12288);
        logs.discard_deliveries(0, ring + 8192, 2 * ring + 4096).unwrap();
        assert_eq!(before - blocks(), 24, "a page of each lap more");
        let is_there = |page: u64| word(&logs, deliveries_at(0) + 4096 * page) != 0;
        assert_eq!([0, 1, 2, 3].map(is_there), [false, false, true, false]);
        assert_eq!(word(&logs, deliveries_at(1)), u64::from_ne_bytes([9; 8]));
        assert_eq!(word(&logs, control_at(0) + DELIVERIES_RELEASED_AT as u64), 2 * ring + 4096);
        assert_eq!(word(&logs, control_at(0) + DELIVERIES_PUNCHED_AT as u64), 0);
    }
}
