//! A simulated node: the memory file of its processes' logs, and what its agent does with it.
//!
//! What enters: images of processes, contacts, and tickets for frames that are to leave the node.
//! What leaves: releases and contacts, in the file; for another node, how far the processes have
//! come; for images, what they hold of the logs.
//! What may never happen: a release goes beyond the oldest kept images, unless that fault is
//! planted.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use landbridge_proto::log::contact::{CONTACT_BYTES, Contact};
use landbridge_proto::log::image_logs::{ImageLogs, LogStarts, NodeFile, lay_frames};
use landbridge_proto::log::layout::{
    AGENT_BELL_AT, BELL_AT, CONTACTS_CHANGED_AT, DELIVERIES_END_AT, DELIVERIES_RELEASED_AT,
    FILE_BYTES, IMAGES_WANTED_AT, IN_UNIT, IS_LOCAL, LOCAL_AT, MOVED_AT, NO_IMAGES_AT,
    NOTHING_WAITS, RELEASE_BYTES, REPORT_WORDS, ROLLBACKS_AT, STABLE_AT, STABLE_WANTED_AT,
    UNIT_KEEPS_AT, begins_at, contact_at, control_at, deliveries_at, discarded_at, log_at,
    release_at, report_at,
};
use landbridge_proto::log::release::{LogPositions, LogReleases, PairPositions};
use landbridge_proto::log::segment::LogCursor;
use landbridge_proto::log::unit::{UnitCursors, emptied_log};
use landbridge_proto::log::walk::ReadLog;
use rustix::io::{pread, pwrite};

/// Doorbells that a process has on one node: more than it opens.
const BELLS_PER_NODE: u64 = 1 << 32;

pub struct SimulatedNode {
    file: OwnedFd,
    /// The name of the job, which the doorbells of the processes bear.
    pub job: String,
    /// By process and number of the image.
    images: BTreeMap<(usize, u64), LogPositions>,
    /// By process, also of other nodes: what the newest image covers that the keeper knows.
    newest: BTreeMap<usize, (u64, LogPositions)>,
    starts: LogStarts,
    /// By process: the number of the image with which it has begun here, taken on another node.
    from_elsewhere: BTreeMap<usize, u64>,
    releases: LogReleases,
    /// Number of contacts that were written into the file.
    noted: u64,
    /// The last ticket that was read.
    ticket: u64,
}

/// How far a process has come, for another node.
pub struct ProcessCut {
    pub process: usize,
    /// What it has delivered, from the beginning on.
    pub deliveries: Vec<u8>,
    pub polls: u64,
}

impl SimulatedNode {
    /// `waits`: frames leave the node once [`Self::answer_ticket`] lets them. `moving`: the
    /// processes of all nodes that may move to another one.
    pub fn new(
        job: String,
        (local, moving): (&[usize], &[usize]),
        waits: bool,
    ) -> io::Result<SimulatedNode> {
        let file = rustix::fs::memfd_create("logs", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, FILE_BYTES)?;
        let number = sum_of(job.as_bytes());
        pwrite(&file, &number.to_ne_bytes(), AGENT_BELL_AT)?;
        let mut releases = LogReleases::default();
        moving.iter().for_each(|process| releases.add(*process));
        for process in local {
            pwrite(&file, &IS_LOCAL.to_ne_bytes(), control_at(*process) + LOCAL_AT as u64)?;
            releases.add(*process);
        }
        let images = BTreeMap::new();
        let (newest, from_elsewhere) = (BTreeMap::new(), BTreeMap::new());
        let starts = LogStarts::default();
        let node = SimulatedNode {
            file,
            job,
            images,
            newest,
            starts,
            from_elsewhere,
            releases,
            noted: 0,
            ticket: 0,
        };
        node.answer_ticket(if waits { 0 } else { NOTHING_WAITS })?;
        Ok(node)
    }

    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Notes how far the logs of a process have come that was closed for its image `number`.
    pub fn note_image(&mut self, process: usize, number: u64) -> io::Result<()> {
        let word = |place: usize| self.word(report_at(process) + 8 * place as u64);
        let positions = LogPositions::from_words(|place| word(place).unwrap_or(u64::MAX));
        let positions = positions.ok_or(io::ErrorKind::InvalidData)?;
        self.images.insert((process, number), positions);
        Ok(())
    }

    /// Releases what no incarnation of a process needs whose oldest kept image is `number`; returns
    /// for how many logs. `is_too_far`: also what the images of the other processes need.
    pub fn release(&mut self, process: usize, number: u64, is_too_far: bool) -> io::Result<usize> {
        self.images.retain(|(of, image), _| *of != process || *image >= number);
        let Some(positions) = self.images.get(&(process, number)).cloned() else { return Ok(0) };
        self.write_release(
            control_at(process) + DELIVERIES_RELEASED_AT as u64,
            positions.deliveries,
        )?;
        if is_too_far {
            for (other, pair) in &positions.pairs {
                self.write_release(release_at(process, *other), pair.sent)?;
            }
        }
        match self.from_elsewhere.get(&process) == Some(&number) {
            true => Ok(0),
            false => self.release_logs(process, positions),
        }
    }

    /// Releases what the oldest kept image of a process covers, which may be of another node;
    /// returns for how many logs.
    fn release_logs(&mut self, process: usize, positions: LogPositions) -> io::Result<usize> {
        let released = self.releases.advance(process, positions);
        for release in &released {
            let pair = (release.from, release.to);
            let log = self.region(pair);
            let discarded = self.word(discarded_at(release.from, release.to))?;
            self.starts.advance(&log, pair, release.position, || discarded);
            self.write_release(release_at(release.from, release.to), release.position)?;
        }
        Ok(released.len())
    }

    // --- images of processes that may move to another node

    /// What an image holds of the logs of a process that was closed for it, and the frames.
    /// `whole_bytes_max`: see [`ImageLogs::measure`].
    pub fn image_logs(
        &self,
        process: usize,
        number: u64,
        whole_bytes_max: u64,
    ) -> io::Result<(ImageLogs, Vec<u8>)> {
        let positions = self.images.get(&(process, number)).cloned().unwrap_or_default();
        let newest = |peer: usize| {
            let newest = self.newest.get(&peer).and_then(|(_, it)| it.pairs.get(&process));
            newest.copied().unwrap_or_default()
        };
        let measured = ImageLogs::measure(process, positions, self, newest, whole_bytes_max);
        let (image, cursors) = measured.ok_or(io::ErrorKind::InvalidData)?;
        let mut frames = Vec::new();
        let copied = image.copy(&cursors, self, |bytes| {
            frames.extend_from_slice(bytes);
            Some(())
        });
        copied.ok_or(io::ErrorKind::InvalidData)?;
        Ok((image, frames))
    }

    /// Notes the newest image of a process that its keeper knows, and what the oldest kept one
    /// covers.
    pub fn note_kept_images(
        &mut self,
        process: usize,
        (number, newest): (u64, LogPositions),
        oldest: Option<LogPositions>,
    ) -> io::Result<()> {
        if self.newest.get(&process).is_some_and(|(known, _)| *known == number) {
            return Ok(());
        }
        self.newest.insert(process, (number, newest));
        oldest.map_or(Ok(()), |oldest| self.release_logs(process, oldest).map(drop))
    }

    /// Notes an image of a process that is to begin here, and was taken on another node.
    pub fn add_image(&mut self, process: usize, number: u64, positions: LogPositions) {
        self.images.insert((process, number), positions.clone());
        self.newest.insert(process, (number, positions));
    }

    /// The process begins here with this image, which was taken on another node.
    pub fn note_from_elsewhere(&mut self, process: usize, number: u64) {
        self.from_elsewhere.insert(process, number);
    }

    /// Up to where a process had sent its log to another one in the image of another node with
    /// which it has begun here.
    pub fn sent_before(&self, process: usize, to: usize) -> io::Result<u64> {
        let number = self.from_elsewhere.get(&process);
        let image = number.and_then(|number| self.images.get(&(process, *number)));
        let pair = image.and_then(|image| image.pairs.get(&to));
        pair.map_or_else(|| self.word(begins_at(process, to)), |pair| Ok(pair.sent))
    }

    /// Whether a process was on another node before.
    pub fn has_moved(&self, process: usize) -> io::Result<bool> {
        Ok(self.word(control_at(process) + MOVED_AT as u64)? != 0)
    }

    /// Notes that a process was on another node before, and so often. One machine has the doorbells
    /// of all simulated nodes, so their numbers differ.
    pub fn note_move(&self, process: usize, moves: u32) -> io::Result<()> {
        pwrite(&self.file, &1_u64.to_ne_bytes(), control_at(process) + MOVED_AT as u64)?;
        let bells = u64::from(moves) * BELLS_PER_NODE;
        pwrite(&self.file, &bells.to_ne_bytes(), control_at(process) + BELL_AT as u64)?;
        Ok(())
    }

    /// Begins a log at this position, with these frames.
    pub fn begin_log(
        &mut self,
        pair: (usize, usize),
        begins: u64,
        frames: &[u8],
    ) -> io::Result<()> {
        pwrite(&self.file, &begins.to_ne_bytes(), begins_at(pair.0, pair.1))?;
        self.starts.begin(pair, begins);
        let start = log_at(pair.0, pair.1);
        let write =
            |at: usize, bytes: &[u8]| pwrite(&self.file, bytes, start + at as u64).ok().map(drop);
        lay_frames(frames, begins, write).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    // --- processes that begin again together

    /// These processes begin again together.
    pub fn set_unit(&self, unit: &[usize]) -> io::Result<()> {
        unit.iter().try_for_each(|process| {
            let at = control_at(*process) + LOCAL_AT as u64;
            pwrite(&self.file, &IN_UNIT.to_ne_bytes(), at).map(drop)
        })?;
        Ok(())
    }

    /// No images are taken of the processes of this node.
    pub fn set_without_images(&self) -> io::Result<()> {
        pwrite(&self.file, &1_u64.to_ne_bytes(), NO_IMAGES_AT)?;
        Ok(())
    }

    /// Whether logs inside of the unit are kept although they were read.
    pub fn set_keeps(&self, keeps: bool) -> io::Result<()> {
        pwrite(&self.file, &u64::from(keeps).to_ne_bytes(), UNIT_KEEPS_AT)?;
        Ok(())
    }

    /// Where a process that was closed for its image is in the logs inside of its unit.
    pub fn unit_cursors(&self, process: usize) -> io::Result<UnitCursors> {
        let word = |place: usize| {
            let at = report_at(process) + 8 * (REPORT_WORDS + place) as u64;
            self.word(at).unwrap_or(u64::MAX)
        };
        UnitCursors::from_words(word).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// What the image of a process that was closed for it holds of the logs inside of its unit, and
    /// the frames. `round`: the cursors of all processes that have stood still in this round. None:
    /// what the image needs was discarded.
    pub fn unit_image_logs(
        &self,
        (process, number): (usize, u64),
        round: &BTreeMap<usize, UnitCursors>,
    ) -> io::Result<Option<(ImageLogs, Vec<u8>)>> {
        let own = round.get(&process).cloned().unwrap_or_default();
        let mut positions = self.images.get(&(process, number)).cloned().unwrap_or_default();
        positions.pairs.retain(|peer, _| own.pairs.contains_key(peer));
        let logs = UnitFile { node: self, starts: own.starts(process, round) };
        let from_start = |_| PairPositions::default();
        let measured = ImageLogs::measure(process, positions, &logs, from_start, u64::MAX);
        let (image, cursors) = measured.ok_or(io::ErrorKind::InvalidData)?;
        let mut frames = Vec::new();
        let copied = image.copy(&cursors, &logs, |bytes| {
            frames.extend_from_slice(bytes);
            Some(())
        });
        copied.ok_or(io::ErrorKind::InvalidData)?;
        Ok(image.missing(&logs.starts).is_none().then_some((image, frames)))
    }

    /// Empties the logs inside of a unit, of which no process runs.
    pub fn begin_unit_again(&self, unit: &[usize]) -> io::Result<()> {
        for from in unit {
            for to in unit.iter().filter(|to| *to != from) {
                for (at, word) in emptied_log((*from, *to), 0) {
                    pwrite(&self.file, &word.to_ne_bytes(), at)?;
                }
            }
        }
        pwrite(&self.file, &(self.word(ROLLBACKS_AT)? + 1).to_ne_bytes(), ROLLBACKS_AT)?;
        Ok(())
    }

    fn region(&self, pair: (usize, usize)) -> LogRegion {
        // The file lives as long as the node.
        LogRegion { file: self.file.try_clone().ok(), start: log_at(pair.0, pair.1) }
    }

    /// The process wants images; returns whether it does, once.
    pub fn take_image_wish(&self, process: usize) -> io::Result<bool> {
        let at = control_at(process) + IMAGES_WANTED_AT as u64;
        let is_wanted = self.word(at)? != 0;
        pwrite(&self.file, &[0; 8], at)?;
        Ok(is_wanted)
    }

    /// The newest ticket of the processes, if there is a new one.
    pub fn take_ticket(&mut self) -> io::Result<Option<u64>> {
        let wanted = self.word(STABLE_WANTED_AT)?;
        let is_new = wanted > self.ticket;
        self.ticket = wanted;
        Ok(is_new.then_some(wanted))
    }

    /// Lets frames leave for which tickets up to this one were drawn.
    pub fn answer_ticket(&self, ticket: u64) -> io::Result<()> {
        self.write_release(STABLE_AT, ticket)
    }

    /// What a process has delivered.
    pub fn deliveries(&self, process: usize) -> io::Result<Vec<u8>> {
        let end = self.word(control_at(process) + DELIVERIES_END_AT as u64)?;
        let mut bytes = vec![0; end as usize];
        pread(&self.file, &mut bytes[..], deliveries_at(process))?;
        Ok(bytes)
    }

    /// Writes what a process has delivered on a node that is lost.
    pub fn write_deliveries(&self, process: usize, bytes: &[u8]) -> io::Result<()> {
        pwrite(&self.file, bytes, deliveries_at(process))?;
        let end = (bytes.len() as u64).to_ne_bytes();
        pwrite(&self.file, &end, control_at(process) + DELIVERIES_END_AT as u64)?;
        Ok(())
    }

    /// The contact that a process has written.
    pub fn contact(&self, process: usize) -> io::Result<Option<Contact>> {
        let mut bytes = [0; CONTACT_BYTES];
        pread(&self.file, &mut bytes, contact_at(process))?;
        Ok(Contact::parse(&bytes))
    }

    /// Notes the contact of a process of another node.
    pub fn note_contact(&mut self, process: usize, contact: &Contact) -> io::Result<()> {
        let known = self.contact(process)?.map_or(0, |known| known.generation);
        if contact.generation > known {
            pwrite(&self.file, &contact.emit(), contact_at(process))?;
            self.note_change()?;
        }
        Ok(())
    }

    /// Lets processes look at contacts and mailboxes.
    pub fn note_change(&mut self) -> io::Result<()> {
        self.noted += 1;
        pwrite(&self.file, &self.noted.to_ne_bytes(), CONTACTS_CHANGED_AT)?;
        Ok(())
    }

    /// Writes a position twice.
    pub fn write_release(&self, at: u64, position: u64) -> io::Result<()> {
        for at in [at, at + RELEASE_BYTES as u64 / 2] {
            pwrite(&self.file, &position.to_ne_bytes(), at)?;
        }
        Ok(())
    }

    /// A word of the file.
    pub fn word(&self, at: u64) -> io::Result<u64> {
        let mut word = [0; 8];
        pread(&self.file, &mut word, at)?;
        Ok(u64::from_ne_bytes(word))
    }
}

impl NodeFile<LogRegion> for SimulatedNode {
    fn log(&self, pair: (usize, usize)) -> LogRegion {
        self.region(pair)
    }

    fn start(&self, pair: (usize, usize)) -> Option<LogCursor> {
        self.starts.start(pair)
    }

    fn is_discarded(&self, (from, to): (usize, usize), position: u64) -> bool {
        self.word(discarded_at(from, to)).is_ok_and(|discarded| discarded > position)
    }
}

/// The file of a node, for an image of a process of its unit.
struct UnitFile<'a> {
    node: &'a SimulatedNode,
    starts: LogStarts,
}

impl NodeFile<LogRegion> for UnitFile<'_> {
    fn log(&self, pair: (usize, usize)) -> LogRegion {
        self.node.region(pair)
    }

    fn start(&self, pair: (usize, usize)) -> Option<LogCursor> {
        self.starts.start(pair)
    }

    fn is_discarded(&self, pair: (usize, usize), position: u64) -> bool {
        self.node.is_discarded(pair, position)
    }
}

/// The region of a log in the file.
pub struct LogRegion {
    file: Option<OwnedFd>,
    start: u64,
}

impl ReadLog for LogRegion {
    fn read(&self, at: usize, bytes: &mut [u8]) -> Option<()> {
        let wanted = bytes.len();
        let read = pread(self.file.as_ref()?, bytes, self.start + at as u64).ok()?;
        (read == wanted).then_some(())
    }
}

fn sum_of(bytes: &[u8]) -> u64 {
    bytes.iter().fold(1, |sum, byte| sum.wrapping_mul(0x100_0000_01b3) ^ u64::from(*byte))
}
