//! The links of an engine by number, and which links are polled: rings, full rings, and the stream
//! that polls read directly.

use std::ops::{Deref, DerefMut};

use landbridge_drive::link::shm::ShmLink;

use super::handshake::Carrier;
use super::links::Link;
use super::receive::FRAMES_PER_TURN;
use crate::statistics_page::StatisticsSlot;

pub struct LinkTable {
    links: Vec<Option<Box<Link>>>,
    /// Links through shared memory, polled in turn.
    pub rings: Vec<usize>,
    /// Rings that were full when a frame was to be sent.
    pub full_rings: Vec<usize>,
    pub streams: usize,
    /// The stream that polls read directly; epoll does not watch this stream.
    pub hot_stream: Option<usize>,
    /// Frames received from one ring before the other rings get their turn.
    pub frames_per_turn: usize,
    /// Slot of the statistics page for this endpoint's paths.
    pub statistics_slot: Option<StatisticsSlot>,
}

impl LinkTable {
    pub fn new(statistics_slot: Option<StatisticsSlot>) -> LinkTable {
        LinkTable {
            links: Vec::new(),
            rings: Vec::new(),
            full_rings: Vec::new(),
            streams: 0,
            hot_stream: None,
            frames_per_turn: FRAMES_PER_TURN,
            statistics_slot,
        }
    }

    /// A number that no link has.
    pub fn free_slot(&mut self) -> usize {
        self.links.iter().position(Option::is_none).unwrap_or_else(|| {
            self.links.push(None);
            self.links.len() - 1
        })
    }

    /// Takes link `id` out of the table.
    pub fn remove(&mut self, id: usize) -> Option<Box<Link>> {
        let link = self.links[id].take()?;
        self.rings.retain(|&ring| ring != id);
        self.full_rings.retain(|&ring| ring != id);
        if link.is_stream() {
            self.streams -= 1;
            self.hot_stream = self.hot_stream.filter(|&hot| hot != id);
        }
        Some(link)
    }

    /// Calls `what` for each ring until a call returns false. Returns whether all calls returned
    /// true.
    pub fn every_ring(&mut self, what: fn(&mut ShmLink) -> bool) -> bool {
        let links = &mut self.links;
        self.rings.iter().all(|&id| match links[id].as_mut().map(|link| &mut link.carrier) {
            Some(Carrier::Shm(ring)) => what(ring),
            // Epoll reports bytes in the socket, but not bytes that were read from the socket
            // already.
            Some(Carrier::Recorded(stream)) => !stream.has_frame(),
            _ => true,
        })
    }
}

impl Deref for LinkTable {
    type Target = Vec<Option<Box<Link>>>;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.links
    }
}

impl DerefMut for LinkTable {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.links
    }
}
