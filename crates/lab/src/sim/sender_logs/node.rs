//! A simulated node: the memory file of its processes' logs, and what its agent does with it.
//!
//! What enters: images of processes, contacts, and tickets for frames that are to leave the node.
//! What leaves: releases and contacts, in the file; and for another node, how far the processes
//! have come.
//! What may never happen: a release goes beyond the oldest kept images, unless that fault is
//! planted.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use landbridge_proto::log::contact::{CONTACT_BYTES, Contact};
use landbridge_proto::log::layout::{
    CONTACTS_CHANGED_AT, DELIVERIES_END_AT, DELIVERIES_RELEASED_AT, FILE_BYTES, IMAGES_WANTED_AT,
    LOCAL_AT, NOTHING_WAITS, RELEASE_BYTES, STABLE_AT, STABLE_WANTED_AT, contact_at, control_at,
    deliveries_at, release_at, report_at,
};
use landbridge_proto::log::release::{LogPositions, LogReleases};
use rustix::io::{pread, pwrite};

pub struct SimulatedNode {
    file: OwnedFd,
    /// The name of the job, which the doorbells of the processes bear.
    pub job: String,
    /// By process and number of the image.
    images: BTreeMap<(usize, u64), LogPositions>,
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
    /// `waits`: frames leave the node once [`Self::answer_ticket`] lets them.
    pub fn new(job: String, local: &[usize], waits: bool) -> io::Result<SimulatedNode> {
        let file = rustix::fs::memfd_create("logs", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, FILE_BYTES)?;
        let mut releases = LogReleases::default();
        for process in local {
            pwrite(&file, &1_u64.to_ne_bytes(), control_at(*process) + LOCAL_AT as u64)?;
            releases.add(*process);
        }
        let images = BTreeMap::new();
        let node = SimulatedNode { file, job, images, releases, noted: 0, ticket: 0 };
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
        let released = self.releases.advance(process, positions);
        for release in &released {
            self.write_release(release_at(release.from, release.to), release.position)?;
        }
        Ok(released.len())
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
