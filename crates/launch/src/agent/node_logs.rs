//! The memory file with the message logs of this node's ranks ([`landbridge_proto::log`]), and
//! what is released of it.
//!
//! In: a job whose senders keep messages (`recover_log=sender`); images of its ranks; where ranks
//! of other nodes can be reached. Out: one file for all ranks of the node and all their
//! incarnations, in which the ranks read up to where their logs are needed no more; where the ranks
//! of this node can be reached.
//!
//! What may never happen: the file ends before the agent; something is released that an incarnation
//! from a kept image may need; an older contact replaces a newer one.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use anyhow::{Context, Result};
use landbridge_proto::log::contact::{CONTACT_BYTES, Contact, agent_bell};
use landbridge_proto::log::layout::{
    CONTACTS_CHANGED_AT, DELIVERIES_BYTES, DELIVERIES_RELEASED_AT, HUGE_PAGES_AT, LOCAL_AT,
    RELEASE_BYTES, contact_at, control_at, deliveries_at, file_bytes, release_at, report_at,
};
use landbridge_proto::log::release::{LogPositions, LogReleases};
use landbridge_proto::setting::{RECOVER_LOG, Value};
use rustix::fs::FallocateFlags;
use rustix::io::{pread, pwrite};
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, bind, recv, socket_with,
};

use super::log_file;
use crate::control::{Job, Node};
use crate::sys;

/// The message logs of one node.
pub struct NodeLogs {
    file: OwnedFd,
    processes: usize,
    /// The ranks of this node.
    local: Range<u32>,
    /// Becomes readable when a rank of this node has written its contact.
    bell: OwnedFd,
    state: RefCell<ReleaseState>,
    /// The generations of the contacts that other nodes know, by rank of this node.
    announced: RefCell<BTreeMap<u32, u32>>,
    /// Number of contacts that were written into the file.
    noted: Cell<u64>,
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
    pub fn new(job: &Job, node: &Node) -> Result<Option<Rc<NodeLogs>>> {
        let variable = RECOVER_LOG.variable();
        let stated = job.environment.iter().find(|(name, _)| *name == variable);
        let is_wanted =
            stated.is_some_and(|(_, text)| RECOVER_LOG.parse(text) == Ok(Value::Word("sender")));
        if !is_wanted {
            return Ok(None);
        }
        let local = node.first_rank..node.first_rank + node.rank_count;
        NodeLogs::of(job.size as usize, local, &job.id).map(Rc::new).map(Some)
    }

    fn of(processes: usize, local: Range<u32>, job: &str) -> Result<NodeLogs> {
        let (file, has_huge_pages) = log_file::create(file_bytes(processes))?;
        pwrite(&file, &u64::from(has_huge_pages).to_ne_bytes(), HUGE_PAGES_AT)?;
        for rank in local.clone() {
            let at = control_at(rank as usize) + LOCAL_AT as u64;
            pwrite(&file, &1_u64.to_ne_bytes(), at)?;
        }
        let (images, deliveries) = (BTreeMap::new(), BTreeMap::new());
        let releases = LogReleases::new(processes, |process| local.contains(&(process as u32)));
        let bell = open_bell(&agent_bell(job.as_bytes(), local.start as usize))
            .context("no socket by which ranks say where they can be reached")?;
        Ok(NodeLogs {
            file: sys::out_of_the_way(file),
            processes,
            local,
            bell: sys::out_of_the_way(bell),
            state: RefCell::new(ReleaseState { images, releases, deliveries }),
            announced: RefCell::default(),
            noted: Cell::default(),
        })
    }

    /// The socket that becomes readable when a rank has written its contact.
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
        self.local.clone().filter_map(&mut take).collect()
    }

    /// Notes the contact of a rank, which may be one of this node.
    pub fn note_contact(&self, rank: u32, contact: &[u8]) -> Result<()> {
        let contact = contact.try_into().ok().and_then(Contact::parse);
        let contact = contact.context("it is damaged")?;
        anyhow::ensure!((rank as usize) < self.processes, "there is no such rank");
        let known = self.contact(rank).map_or(0, |known| known.generation);
        if self.local.contains(&rank) || contact.generation <= known {
            return Ok(());
        }
        pwrite(&self.file, &contact.emit(), contact_at(rank as usize))?;
        self.noted.set(self.noted.get() + 1);
        pwrite(&self.file, &self.noted.get().to_ne_bytes(), CONTACTS_CHANGED_AT)?;
        Ok(())
    }

    fn contact(&self, rank: u32) -> Option<Contact> {
        let mut bytes = [0; CONTACT_BYTES];
        let read = pread(&self.file, &mut bytes, contact_at(rank as usize)).ok()?;
        Contact::parse(&bytes).filter(|_| read == CONTACT_BYTES)
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

fn open_bell(name: &[u8]) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let bell = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    bind(&bell, &SocketAddrUnix::new_abstract_name(name)?)?;
    Ok(bell)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logs(processes: usize, local: Range<u32>, name: &str) -> NodeLogs {
        NodeLogs::of(processes, local, &format!("{name}-{}", std::process::id())).unwrap()
    }

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
        let logs = logs(2, 0..2, "covered");
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
    fn contacts_of_this_node_are_announced_once_and_those_of_others_noted() {
        let logs = logs(3, 0..2, "contacts");
        let contact = |generation| Contact { generation, name: [generation as u8; 48] };
        pwrite(&logs.file, &contact(1).emit(), contact_at(1)).unwrap();
        assert_eq!(logs.take_contacts(), [(1, contact(1).emit().to_vec())]);
        assert_eq!(logs.take_contacts(), []);
        pwrite(&logs.file, &contact(2).emit(), contact_at(1)).unwrap();
        assert_eq!(logs.take_contacts(), [(1, contact(2).emit().to_vec())]);
        logs.note_contact(2, &contact(5).emit()).unwrap();
        logs.note_contact(2, &contact(4).emit()).unwrap();
        logs.note_contact(1, &contact(9).emit()).unwrap();
        assert_eq!((logs.contact(2), logs.contact(1)), (Some(contact(5)), Some(contact(2))));
        assert_eq!(word(&logs, CONTACTS_CHANGED_AT), 1);
        assert!(logs.note_contact(3, &contact(1).emit()).is_err());
        assert!(logs.note_contact(2, &[7; 64]).is_err());
    }

    #[test]
    fn released_deliveries_take_no_memory_and_others_stay() {
        let logs = logs(1, 0..1, "discarded");
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
