//! A simulated node: the memory file of its processes' logs, and what its agent does with it.
//!
//! What enters: images of processes, and contacts. What leaves: releases and contacts, in the file.
//! What may never happen: a release goes beyond the oldest kept images, unless that fault is
//! planted.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use landbridge_proto::log::contact::{CONTACT_BYTES, Contact};
use landbridge_proto::log::layout::{
    CONTACTS_CHANGED_AT, DELIVERIES_RELEASED_AT, FILE_BYTES, IMAGES_WANTED_AT, LOCAL_AT,
    RELEASE_BYTES, contact_at, control_at, release_at, report_at,
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
}

impl SimulatedNode {
    pub fn new(job: String, local: &[usize]) -> io::Result<SimulatedNode> {
        let file = rustix::fs::memfd_create("logs", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, FILE_BYTES)?;
        let mut releases = LogReleases::default();
        for process in local {
            pwrite(&file, &1_u64.to_ne_bytes(), control_at(*process) + LOCAL_AT as u64)?;
            releases.add(*process);
        }
        Ok(SimulatedNode { file, job, images: BTreeMap::new(), releases, noted: 0 })
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
            self.noted += 1;
            pwrite(&self.file, &self.noted.to_ne_bytes(), CONTACTS_CHANGED_AT)?;
        }
        Ok(())
    }

    fn write_release(&self, at: u64, position: u64) -> io::Result<()> {
        for at in [at, at + RELEASE_BYTES as u64 / 2] {
            pwrite(&self.file, &position.to_ne_bytes(), at)?;
        }
        Ok(())
    }

    fn word(&self, at: u64) -> io::Result<u64> {
        let mut word = [0; 8];
        pread(&self.file, &mut word, at)?;
        Ok(u64::from_ne_bytes(word))
    }
}
