//! The recorded nondeterminism (clocks, random numbers, file calls) of a rank that may be
//! restarted: a memory file that outlives the rank's processes. The interposer
//! (`crates/interpose`), which is loaded in front of the rank's own libraries, writes the file and
//! replays from the file.
//!
//! In: what the interposer and the provider write into the file. Out: if the rank may move to
//! another node, [`RankRecording::updates`] gives the agent above what is new in the file, ahead of
//! what the rank has printed or asked since. On the other node [`RankRecording::apply`] writes
//! these updates into the file of the rank's next incarnation.
//!
//! What may never happen: an update holds a part that is older than the part before it, or a batch
//! of updates ends within an entry of the record.

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use hmac::{Hmac, Mac};
use landbridge_proto::nondeterminism::{
    ABSENCES_AT, BASE_AT, CHECKPOINT_REQUESTS_AT, DURABLE_EFFECTS_AT, FILES_AT, FILES_WORDS,
    FULL_AT, HELD_AT, IMAGE_MASK_AT, INCARNATION_AT, LAST_WRITTEN_AT, NO_RESTART_AT,
    NO_RESTART_BYTES, NONDETERMINISM_BYTES, POLLS_AT, PROGRAM_RANDOM_AT, RECORD_HEAD_BYTES,
    RECORDED_AT, REDELIVERED_AT, UNKNOWN_WRITTEN, UNSAVED_AT,
};
use landbridge_proto::recent_determinants::{
    DETERMINANT_COUNT_AT, RECENT_DETERMINANTS_MAX, RECORD_ENTRIES_BYTES, determinant_at,
};
use landbridge_proto::setting::{RECOVER_CLOCKS, RECOVER_FILES, Setting, Value};
use rustix::fs::{FallocateFlags, MemfdFlags};
use sha2::Sha256;

use super::held_files::HeldFiles;
use super::pmi_replay::PollCounts;
use crate::control::Job;
use crate::control::rank_state::RecordingUpdate;
use crate::mpi::{self, Environment};
use crate::sibling;
use crate::sys;

/// File name of the interposer library, as cargo builds it.
const INTERPOSER: &str = "liblandbridge_interpose.so";

/// Most bytes of a record in one [`RecordingUpdate`].
pub const PIECE_BYTES: u64 = 1 << 20;

/// The record of one rank, for all incarnations of the rank.
pub struct RankRecording {
    memory: OwnedFd,
    library: PathBuf,
    /// Whether the record holds the rank's file calls as well.
    with_files: bool,
    /// Open files that outlive the rank's processes; `None` if file calls are not recorded.
    held_files: Option<HeldFiles>,
    replicated: Cell<ReplicatedExtent>,
    /// The part of the record's head about files, as the last update has sent it.
    replicated_files: RefCell<Vec<u8>>,
}

/// How much of a record the agent above has received.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct ReplicatedExtent {
    reads: u64,
    determinants: u64,
    /// Bytes of what it has delivered from logs of senders.
    deliveries: u64,
    /// Deliveries before this byte are not needed any more.
    deliveries_base: u64,
    polls: u64,
    is_full: bool,
    /// Record entries before this position are not needed any more.
    base: u64,
}

impl RankRecording {
    /// Makes the record of a rank of this job; `None` if the setting `recover_clocks` is off.
    ///
    /// `waits_for_replica`: the rank may move to another node, so effects on files wait until
    /// another node has the record.
    pub fn new(job: &Job, rank: u32, waits_for_replica: bool) -> Result<Option<RankRecording>> {
        let is_off = |setting: &Setting| {
            let variable = setting.variable();
            let said = job.environment.iter().find(|(name, _)| *name == variable);
            said.is_some_and(|(_, text)| setting.parse(text) == Ok(Value::Switch(false)))
        };
        if is_off(&RECOVER_CLOCKS) {
            return Ok(None);
        }
        let with_files = !is_off(&RECOVER_FILES);
        let library = sibling::path(INTERPOSER)?;
        if library.as_os_str().as_encoded_bytes().iter().any(|byte| b" \t:".contains(byte)) {
            bail!(
                "{} cannot be loaded in front of a program: there is a blank or a colon in its \
                 path (without it: --set recover_clocks=off)",
                library.display()
            );
        }
        let memory = new_memory_file().context("no memory file")?;
        let held_files = if with_files { Some(HeldFiles::new()?) } else { None };
        let (replicated, replicated_files) = (Cell::default(), RefCell::default());
        let recording =
            RankRecording { memory, library, with_files, held_files, replicated, replicated_files };
        recording
            .write(DURABLE_EFFECTS_AT, &u64::from(waits_for_replica).to_ne_bytes())
            .context("no memory file")?;
        let bits = recording.held_files().map_or([0; 2], HeldFiles::bits).map(u64::to_ne_bytes);
        recording.write(HELD_AT, bits.as_flattened()).context("no memory file")?;
        recording.write(PROGRAM_RANDOM_AT, &program_random(job, rank)).context("no memory file")?;
        Ok(Some(recording))
    }

    /// A record that no rank has written yet.
    #[cfg(test)]
    pub fn for_test(held_files: Option<HeldFiles>) -> rustix::io::Result<RankRecording> {
        let (memory, library) = (new_memory_file()?, "/opt/clocks.so".into());
        let (replicated, replicated_files) = (Cell::default(), RefCell::default());
        Ok(RankRecording {
            memory,
            library,
            with_files: true,
            held_files,
            replicated,
            replicated_files,
        })
    }

    /// The open files that outlive the rank's processes, if file calls are recorded.
    pub fn held_files(&self) -> Option<&HeldFiles> {
        self.held_files.as_ref()
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Whether the record had no space left for something that the rank has read, so that the rank
    /// cannot be restarted. Also true if the record cannot be read.
    pub fn is_full(&self) -> bool {
        self.words(FULL_AT) != Some([0])
    }

    /// Why another incarnation would go wrong, if it would: what the rank did to files cannot be
    /// replayed.
    pub fn refusal(&self) -> Option<String> {
        let [length] = self.words(NO_RESTART_AT)?;
        // An incarnation that was killed as it wrote the reason leaves a length beyond every text.
        let length = usize::try_from(length).ok()?.min(NO_RESTART_BYTES);
        let text = self.bytes(NO_RESTART_AT + size_of::<u64>(), length);
        (length > 0).then(|| String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned())
    }

    /// Forbids every restart of the rank, if its file calls are to be recorded. False: an earlier
    /// reason stands, or file calls are not recorded.
    pub fn forbid_restart(&self, reason: &str) -> bool {
        if !self.with_files || self.refusal().is_some() {
            return false;
        }
        let text = &reason.as_bytes()[..reason.len().min(NO_RESTART_BYTES)];
        // The text counts as soon as its length is written.
        let length = (text.len() as u64).to_ne_bytes();
        let at = NO_RESTART_AT + size_of::<u64>();
        self.write(at, text).and_then(|()| self.write(NO_RESTART_AT, &length)).is_ok()
    }

    /// Whether the interposer has attached to the record in this incarnation of the rank.
    pub fn is_attached(&self, incarnation: u32) -> bool {
        self.words(INCARNATION_AT).is_some_and(|[owner]| owner > u64::from(incarnation))
    }

    /// Bytes that all incarnations together have recorded.
    pub fn recorded(&self) -> u64 {
        self.words(RECORDED_AT).map_or(0, |[recorded]| recorded)
    }

    /// How often the rank has polled for messages.
    pub fn poll_counts(&self) -> PollCounts {
        let [furthest, present] = self.words(POLLS_AT).unwrap_or_default();
        let [taken] = self.words(REDELIVERED_AT).unwrap_or_default();
        PollCounts { furthest, present, taken }
    }

    /// Resets the poll count of the present incarnation to 0, because the rank's process has ended
    /// and no other one runs yet; returns the counts after that.
    pub fn end_incarnation(&self) -> PollCounts {
        self.note_written(None);
        let _ = rustix::io::pwrite(&self.memory, &0_u64.to_ne_bytes(), POLLS_AT as u64 + 8);
        self.poll_counts()
    }

    /// Notes how many bytes the process that has just ended had written to files (`None`: not
    /// known), unless it has announced no effect: the next incarnation judges by this number
    /// whether an interrupted write has happened, and only that of the process that wrote counts.
    pub fn note_written(&self, bytes: Option<u64>) {
        if self.words(LAST_WRITTEN_AT) == Some([0]) {
            let word = bytes.map_or(UNKNOWN_WRITTEN, |bytes| bytes.saturating_add(1));
            let _ = rustix::io::pwrite(&self.memory, &word.to_ne_bytes(), LAST_WRITTEN_AT as u64);
        }
    }

    /// Notes whether a rank of this node has no process ([`ABSENCES_AT`]).
    pub fn note_absence(&self, is_absent: bool) {
        let [absences] = self.words(ABSENCES_AT).unwrap_or_default();
        if (absences % 2 == 1) != is_absent {
            let word = absences.wrapping_add(1).to_ne_bytes();
            let _ = rustix::io::pwrite(&self.memory, &word, ABSENCES_AT as u64);
        }
    }

    /// Whether an incarnation that begins with the program can replay the whole record: nothing of
    /// the record is trimmed.
    pub fn can_replay_from_start(&self) -> bool {
        self.words(BASE_AT) == Some([0])
    }

    /// What the rank uses that no image restores ([`UNSAVED_AT`]).
    pub fn unsaved(&self) -> u64 {
        self.words(UNSAVED_AT).map_or(!0, |[unsaved]| unsaved)
    }

    /// The signals that the program blocks itself, since the rank has quiesced
    /// ([`IMAGE_MASK_AT`]).
    pub fn image_mask(&self) -> u64 {
        self.words(IMAGE_MASK_AT).map_or(0, |[mask]| mask)
    }

    /// Asks the rank to quiesce for its checkpoint image of this number.
    pub fn request_checkpoint(&self, number: u64) {
        let _ =
            rustix::io::pwrite(&self.memory, &number.to_ne_bytes(), CHECKPOINT_REQUESTS_AT as u64);
    }

    /// How many bytes of the record the present incarnation has replayed.
    pub fn replayed(&self) -> u64 {
        let [_, recorded_bytes] = self.words(RECORDED_AT).unwrap_or_default();
        recorded_bytes
    }

    /// Checks whether an incarnation that has replayed this many bytes, here or on another node,
    /// can continue from this record. Fails if the record is trimmed beyond that position or does
    /// not reach it.
    pub fn check_position(&self, replayed: u64) -> Result<()> {
        let [base] = self.words(BASE_AT).unwrap_or([u64::MAX]);
        let [recorded] = self.words(RECORDED_AT).unwrap_or_default();
        if replayed < base {
            bail!("its nondeterminism record after that is released");
        }
        if replayed > recorded {
            bail!("its nondeterminism record up to there is not on this node");
        }
        Ok(())
    }

    /// What is new in the record since the last call, as one batch. The parts are read in the order
    /// that [`RecordingUpdate`] demands, because the rank may run meanwhile and no part may be
    /// older than the part before. The batch ends where an entry of the record ends, because the
    /// rank counts what it has recorded by whole entries.
    ///
    /// `deliveries`: what the rank has delivered from logs of senders from a byte on, if it does,
    /// and from which byte on that is needed.
    pub fn updates(
        &self,
        rank: u32,
        deliveries: impl FnOnce(u64) -> (u64, Vec<u8>),
    ) -> Vec<RecordingUpdate> {
        let replicated = self.replicated.get();
        let number = |at: usize| self.words::<1>(at).map_or(0, |[number]| number);
        // The head is read first: an effect that it announces comes after all that is read below.
        let files = self.files();
        let files = if *self.replicated_files.borrow() == files { Vec::new() } else { files };
        let reads = number(RECORDED_AT);
        let is_full = self.is_full();
        let polls = number(POLLS_AT);
        let determinants = number(DETERMINANT_COUNT_AT);
        let base = number(BASE_AT);
        let (deliveries_base, delivered) = deliveries(replicated.deliveries);
        let delivered_from = replicated.deliveries.max(deliveries_base);
        let deliveries = delivered_from + delivered.len() as u64;
        let now = ReplicatedExtent {
            reads,
            determinants,
            deliveries_base,
            deliveries,
            polls,
            is_full,
            base,
        };
        if now == replicated && files.is_empty() {
            return Vec::new();
        }
        self.replicated.set(now);
        if !files.is_empty() {
            self.replicated_files.replace(files.clone());
        }
        let (first_determinant, determinants) =
            self.determinants(replicated.determinants, determinants);
        let rest = RecordingUpdate {
            rank,
            is_full,
            polls,
            base,
            first_determinant,
            determinants,
            files,
            deliveries_base,
            ..RecordingUpdate::default()
        };
        // Entries that were trimmed since the last update are not sent.
        let from = replicated.reads.max(base);
        self.in_pieces(rest, from..reads, (delivered_from, delivered))
    }

    /// Splits an update into pieces: `reads` of the record, and deliveries from a byte on.
    fn in_pieces(
        &self,
        rest: RecordingUpdate,
        reads: Range<u64>,
        (delivered_from, delivered): (u64, Vec<u8>),
    ) -> Vec<RecordingUpdate> {
        let rank = rest.rank;
        let Range { start: mut from, end: reads } = reads;
        let mut updates = Vec::new();
        let mut pieces = delivered.chunks(PIECE_BYTES as usize).peekable();
        let mut deliveries_from = delivered_from;
        loop {
            let to = reads.min(from + PIECE_BYTES);
            let bytes = self.entries(from, to);
            let deliveries = pieces.next().unwrap_or_default().to_vec();
            // The first piece carries the rest of the update; the rest holds once the last piece
            // has arrived.
            let rest = if updates.is_empty() {
                rest.clone()
            } else {
                RecordingUpdate { rank, ..RecordingUpdate::default() }
            };
            let continues = to < reads || pieces.peek().is_some();
            let more = deliveries.len() as u64;
            let update = RecordingUpdate { from, reads: bytes, continues, ..rest };
            updates.push(RecordingUpdate { deliveries_from, deliveries, ..update });
            (from, deliveries_from) = (to, deliveries_from + more);
            if !continues {
                return updates;
            }
        }
    }

    /// The part of the record's head about files. An effect is in it whole or not at all, because
    /// the interposer writes the position of the effect last and clears the position first.
    fn files(&self) -> Vec<u8> {
        const PLACE: usize = 1;
        let Some(mut words) = self.words::<FILES_WORDS>(FILES_AT) else { return Vec::new() };
        let place = self.words::<1>(FILES_AT + PLACE * size_of::<u64>());
        if place != Some([words[PLACE]]) {
            words[PLACE] = 0;
        }
        let length = usize::try_from(words[FILES_WORDS - 1]).unwrap_or(NO_RESTART_BYTES);
        let text = self.bytes(NO_RESTART_AT + size_of::<u64>(), length.min(NO_RESTART_BYTES));
        let files: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).chain(text).collect();
        // The rank has recorded nothing about files yet.
        if files.iter().all(|byte| *byte == 0) { Vec::new() } else { files }
    }

    /// Determinants `from..to`, as far as the ring still holds them, with the number of the first.
    fn determinants(&self, from: u64, to: u64) -> (u64, Vec<[u64; 3]>) {
        let first = from.max(to.saturating_sub(RECENT_DETERMINANTS_MAX as u64));
        let mut bytes = Vec::new();
        let mut number = first;
        while number < to {
            let count = (to - number).min(until_ring_end(number));
            bytes.extend(self.bytes(determinant_at(number), count as usize * DETERMINANT_BYTES));
            number += count;
        }
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
        let determinants: Vec<u64> = words.collect();
        let determinants = determinants.as_chunks::<3>().0;
        // The rank may have overwritten the oldest determinants of the ring meanwhile.
        let last = self.words::<1>(DETERMINANT_COUNT_AT).map_or(0, |[count]| count);
        let valid = (last + 1).saturating_sub(RECENT_DETERMINANTS_MAX as u64).clamp(first, to);
        (valid, determinants.get((valid - first) as usize..).unwrap_or_default().to_vec())
    }

    /// Writes an update into the record, before the rank's first incarnation on this node, which
    /// starts after the last piece. [`RankRecording::updates`] does not send back to the agent
    /// above what this update holds.
    pub fn apply(&self, update: &RecordingUpdate) -> rustix::io::Result<()> {
        let mut replicated = self.replicated.get();
        replicated.reads = replicated.reads.max(update.end());
        replicated.determinants = replicated
            .determinants
            .max(update.first_determinant + update.determinants.len() as u64);
        let delivered = update.deliveries_from + update.deliveries.len() as u64;
        replicated.deliveries = replicated.deliveries.max(delivered);
        replicated.deliveries_base = replicated.deliveries_base.max(update.deliveries_base);
        replicated.polls = replicated.polls.max(update.polls);
        replicated.is_full |= update.is_full;
        replicated.base = replicated.base.max(update.base);
        if replicated.reads.saturating_sub(replicated.base) > RECORD_ENTRIES_BYTES as u64 {
            return Err(rustix::io::Errno::FBIG);
        }
        self.write_entries(update.from, &update.reads)?;
        self.write_determinants(update.first_determinant, &update.determinants)?;
        if !update.files.is_empty() {
            self.write(FILES_AT, &update.files)?;
            // An announcement from another node, whose agent alone could know.
            self.write(LAST_WRITTEN_AT, &UNKNOWN_WRITTEN.to_ne_bytes())?;
            self.replicated_files.replace(update.files.clone());
        }
        let words = [
            (RECORDED_AT, replicated.reads),
            (DETERMINANT_COUNT_AT, replicated.determinants),
            (POLLS_AT, replicated.polls),
            (FULL_AT, u64::from(replicated.is_full)),
            (BASE_AT, replicated.base),
        ];
        for (at, number) in words {
            self.write(at, &number.to_ne_bytes())?;
        }
        self.replicated.set(replicated);
        Ok(())
    }

    fn write_entries(&self, mut at: u64, mut left: &[u8]) -> rustix::io::Result<()> {
        while !left.is_empty() {
            let offset = at as usize % RECORD_ENTRIES_BYTES;
            let (now, later) = left.split_at(left.len().min(RECORD_ENTRIES_BYTES - offset));
            self.write(RECORD_HEAD_BYTES + offset, now)?;
            (at, left) = (at + now.len() as u64, later);
        }
        Ok(())
    }

    fn write_determinants(&self, mut number: u64, mut left: &[[u64; 3]]) -> rustix::io::Result<()> {
        while !left.is_empty() {
            let (now, later) = left.split_at(left.len().min(until_ring_end(number) as usize));
            let words = now.as_flattened().iter();
            let bytes: Vec<u8> = words.flat_map(|word| word.to_ne_bytes()).collect();
            self.write(determinant_at(number), &bytes)?;
            (number, left) = (number + now.len() as u64, later);
        }
        Ok(())
    }

    fn write(&self, at: usize, mut bytes: &[u8]) -> rustix::io::Result<()> {
        let end = at + bytes.len();
        while !bytes.is_empty() {
            let written = rustix::io::pwrite(&self.memory, bytes, (end - bytes.len()) as u64)?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Frees the record up to `position` for new entries, because no incarnation of the rank will
    /// replay from before `position` any more. The caller has stopped the rank.
    pub fn trim(&self, position: u64) {
        let [base] = self.words(BASE_AT).unwrap_or([u64::MAX]);
        let [recorded] = self.words(RECORDED_AT).unwrap_or_default();
        if position <= base || position > recorded {
            return;
        }
        // The pages are released first; the word at `BASE_AT`, written after that, lets the rank
        // write there.
        self.release_pages(base, position, recorded);
        let _ = self.write(BASE_AT, &position.to_ne_bytes());
    }

    /// Gives the memory of whole pages between two positions of the record back to the system.
    fn release_pages(&self, from: u64, to: u64, recorded: u64) {
        const PAGE: u64 = RECORD_HEAD_BYTES as u64;
        const ALL: u64 = RECORD_ENTRIES_BYTES as u64;
        let page = from / PAGE * PAGE;
        // The first page is released as well, unless the newest entries of the ring lie at its
        // beginning.
        let mut from = if recorded <= page + ALL { page } else { page + PAGE };
        let to = to / PAGE * PAGE;
        while from < to {
            let offset = from % ALL;
            let count = (to - from).min(ALL - offset);
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(&self.memory, flags, PAGE + offset, count);
            from += count;
        }
    }

    /// Bytes `from..to` of the record.
    fn entries(&self, mut from: u64, to: u64) -> Vec<u8> {
        let mut all = Vec::new();
        while from < to {
            let offset = from as usize % RECORD_ENTRIES_BYTES;
            let count = ((to - from) as usize).min(RECORD_ENTRIES_BYTES - offset);
            all.extend(self.bytes(RECORD_HEAD_BYTES + offset, count));
            from += count as u64;
        }
        all
    }

    fn bytes(&self, at: usize, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        let mut filled = 0;
        while filled < count {
            match rustix::io::pread(&self.memory, &mut bytes[filled..], (at + filled) as u64) {
                Ok(read) if read > 0 => filled += read,
                _ => break,
            }
        }
        bytes.truncate(filled);
        bytes
    }

    fn words<const N: usize>(&self, at: usize) -> Option<[u64; N]> {
        let mut bytes = [[0; 8]; N];
        let room = bytes.as_flattened_mut();
        let wanted = room.len();
        let read = rustix::io::pread(&self.memory, room, at as u64);
        (read == Ok(wanted)).then(|| bytes.map(u64::from_ne_bytes))
    }

    /// The environment variables with which the rank finds its record. `environment`: all other
    /// variables of the rank.
    pub fn variables(&self, environment: &Environment) -> [(&'static str, std::ffi::OsString); 3] {
        let mut libraries = self.library.clone().into_os_string();
        let others = mpi::variable(environment, "LD_PRELOAD");
        if !others.is_empty() {
            libraries.push(":");
            libraries.push(others);
        }
        let memory = same_length(sys::raw(&self.memory));
        let files = if self.with_files { "1" } else { "0" };
        [
            ("LD_PRELOAD", libraries),
            ("LANDBRIDGE_RECORD", memory.into()),
            ("LANDBRIDGE_RECORD_FILES", files.into()),
        ]
    }
}

/// The random bytes of a rank's program (`AT_RANDOM`), which nobody can guess who does not know the
/// job's key: the same on each node to which the rank may move.
fn program_random(job: &Job, rank: u32) -> [u8; 16] {
    let mut mac = Hmac::<Sha256>::new_from_slice(job.key.as_bytes()).expect("HMAC takes any key");
    mac.update(b"AT_RANDOM");
    mac.update(&rank.to_le_bytes());
    let bytes: [u8; 32] = mac.finalize().into_bytes().into();
    std::array::from_fn(|place| bytes[place])
}

/// Bytes of a determinant in the record.
const DETERMINANT_BYTES: usize = 3 * size_of::<u64>();

/// How many determinants from this number on lie contiguously in the ring.
fn until_ring_end(number: u64) -> u64 {
    RECENT_DETERMINANTS_MAX as u64 - number % RECENT_DETERMINANTS_MAX as u64
}

/// A memory file of zeros; only pages that are written take memory.
fn new_memory_file() -> rustix::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("landbridge-recording", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, NONDETERMINISM_BYTES as u64)?;
    Ok(sys::out_of_the_way(file))
}

/// A number as text, padded to nine digits.
pub fn same_length(number: impl Display) -> String {
    format!("{number:09}")
}

#[cfg(test)]
mod tests;
