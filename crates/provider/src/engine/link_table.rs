//! The links of an engine by number, and which links are polled: rings, full rings, and the stream
//! that polls read directly.
//!
//! What enters: established links, links that have ended, and streams that bring data. What leaves:
//! the links by number, and what is known of all links of a peer. A link that is being read or
//! written is not in its place meanwhile. What may never happen: a poll looks at a link that is
//! closed.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;

use landbridge_drive::link::node_log;
use landbridge_proto::endpoint::{Endpoint, Peer};
use landbridge_proto::path::time::Time;
use rustix::event::epoll;

use super::carrier::Carrier;
use super::links::Link;
use super::memory::Bytes;
use super::udp_path::UdpPath;
use crate::statistics_page::StatisticsSlot;

/// Frames of one ring before other rings get their turn.
pub const FRAMES_PER_TURN: usize = 32;
/// Number of consecutive reads from one stream after which polls read this stream directly.
const HOT_READS: u32 = 16;

pub struct LinkTable {
    links: Vec<Option<Box<Link>>>,
    /// Numbers of links that have ended. The place of a link that is being read or written is
    /// empty, too, but the number of such a link is not vacant.
    vacant: BTreeSet<usize>,
    /// Links through shared memory, polled in turn.
    pub rings: Vec<usize>,
    /// Rings that were full when a frame was to be sent.
    pub full_rings: Vec<usize>,
    pub streams: usize,
    /// The stream that polls read directly; epoll does not watch this stream.
    pub hot_stream: Option<usize>,
    /// The stream of the last read through epoll, and how often in a row.
    busiest: (usize, u32),
    /// Frames received from one ring before the other rings get their turn.
    pub frames_per_turn: usize,
    /// Slot of the statistics page for this endpoint's paths.
    pub statistics_slot: Option<StatisticsSlot>,
}

impl LinkTable {
    pub fn new(statistics_slot: Option<StatisticsSlot>) -> LinkTable {
        LinkTable {
            links: Vec::new(),
            vacant: BTreeSet::new(),
            rings: Vec::new(),
            full_rings: Vec::new(),
            streams: 0,
            hot_stream: None,
            busiest: (0, 0),
            frames_per_turn: FRAMES_PER_TURN,
            statistics_slot,
        }
    }

    /// Puts an established link into the table, and lets epoll watch it; returns its number.
    ///
    /// # Errors
    /// Epoll cannot watch the link.
    pub fn insert(&mut self, epoll: &OwnedFd, link: Link) -> io::Result<usize> {
        link.watch(epoll, self.next_number())?;
        match link.carrier {
            Carrier::Shm(_) | Carrier::Recorded(_) | Carrier::Logs(_) => {
                self.rings.push(self.next_number())
            }
            Carrier::Stream(_) => self.streams += 1,
            Carrier::Datagram(_) | Carrier::Loopback => (),
        }
        Ok(self.add(link))
    }

    /// Puts a link into the table that the engine watches itself; returns its number.
    pub fn add(&mut self, link: Link) -> usize {
        let id = self.next_number();
        if !self.vacant.remove(&id) {
            self.links.push(None);
        }
        self.links[id] = Some(Box::new(link));
        id
    }

    /// The lowest number that no link has.
    fn next_number(&self) -> usize {
        self.vacant.first().copied().unwrap_or(self.links.len())
    }

    /// Takes link `id` out of the table.
    pub fn remove(&mut self, id: usize) -> Option<Box<Link>> {
        let link = self.links[id].take()?;
        self.vacant.insert(id);
        self.rings.retain(|&ring| ring != id);
        self.full_rings.retain(|&ring| ring != id);
        if link.is_stream() {
            self.streams -= 1;
            self.hot_stream = self.hot_stream.filter(|&hot| hot != id);
        }
        Some(link)
    }

    /// Bytes written so far to all rings.
    pub fn written_to_rings(&self) -> u64 {
        let written = |id: &usize| match &self.links[*id].as_ref()?.carrier {
            Carrier::Shm(ring) => Some(ring.written()),
            _ => None,
        };
        self.rings.iter().filter_map(written).sum()
    }

    /// Whether the ring or stream of link `id` holds a frame, or has ended.
    #[inline]
    pub fn has_frame(&mut self, id: usize) -> bool {
        match self.links[id].as_mut().map(|link| &mut link.carrier) {
            Some(Carrier::Shm(ring)) => !matches!(ring.peek(), Ok(None)),
            Some(Carrier::Recorded(stream)) => !matches!(stream.peek(), Ok(None)),
            Some(Carrier::Logs(logs)) => !matches!(logs.peek(), Ok(None)),
            _ => false,
        }
    }

    /// Whether the last frame of the logs of link `id` came from another node.
    #[inline]
    pub fn awaits_other_node(&self, id: usize) -> bool {
        match self.links[id].as_ref().map(|link| &link.carrier) {
            Some(Carrier::Logs(logs)) => node_log::awaits_other_node(logs),
            _ => false,
        }
    }

    /// Lets epoll watch stream `id` or not; returns false if that is impossible.
    fn set_watched(&self, epoll: &OwnedFd, id: usize, watched: bool) -> bool {
        let Some(link) = self.links.get(id).and_then(Option::as_ref) else {
            return false;
        };
        let Carrier::Stream(stream) = &link.carrier else {
            return false;
        };
        if stream.is_holding() || !link.blocked.is_empty() {
            return watched;
        }
        let changed = if watched {
            link.watch(epoll, id)
        } else {
            epoll::delete(epoll, stream.fd()).map_err(io::Error::from)
        };
        changed.is_ok()
    }

    /// Stream `id` has brought data through epoll. If the same stream has brought the last
    /// [`HOT_READS`] reads, polls read it directly: this saves a system call for each message, and
    /// saves the sender the wake-up of an epoll set in which no thread sleeps. `may_be_hot`: the
    /// thread has a processor of its own.
    pub fn note_read(&mut self, epoll: &OwnedFd, id: usize, may_be_hot: impl FnOnce() -> bool) {
        if self.hot_stream.is_some() {
            self.clear_hot_stream(epoll);
        }
        let (busiest, reads) = &mut self.busiest;
        *reads = if *busiest == id { *reads + 1 } else { 0 };
        *busiest = id;
        if *reads >= HOT_READS && may_be_hot() && self.set_watched(epoll, id, false) {
            self.hot_stream = Some(id);
        }
    }

    /// Returns the directly read stream, if any, to epoll.
    pub fn clear_hot_stream(&mut self, epoll: &OwnedFd) {
        if let Some(id) = self.hot_stream.take() {
            self.set_watched(epoll, id, true);
        }
        self.busiest.1 = 0;
    }

    /// Marks the peers busy that wait for full rings, which may have free space again.
    #[inline]
    pub fn retry_full_rings(&mut self, core: &mut Endpoint<Bytes>) {
        for id in std::mem::take(&mut self.full_rings) {
            let Some(link) = self.links[id].as_mut() else {
                continue;
            };
            for peer in std::mem::take(&mut link.blocked) {
                core.channel_mut(peer).mark_busy();
            }
        }
    }

    /// The peer and the state of UDP path `id`.
    pub fn udp_path(&mut self, id: usize) -> Option<(Peer, &mut UdpPath)> {
        let link = self.links.get_mut(id)?.as_mut()?;
        let peer = link.peer?;
        match &mut link.carrier {
            Carrier::Datagram(udp_path) => Some((peer, udp_path)),
            _ => None,
        }
    }

    /// The links of a peer's UDP paths.
    pub fn udp_paths_of(&self, peer: Peer) -> Vec<usize> {
        let is_udp_path =
            |link: &Link| link.peer == Some(peer) && matches!(link.carrier, Carrier::Datagram(_));
        let links = self.links.iter().enumerate();
        links
            .filter(|(_, link)| link.as_deref().is_some_and(is_udp_path))
            .map(|(id, _)| id)
            .collect()
    }

    /// Probes the UDP paths of `peer`, since no connection shows whether the peer is alive.
    pub fn probe_udp_paths(&mut self, peer: Peer, now: Time) {
        for id in self.udp_paths_of(peer) {
            if let Some((_, udp_path)) = self.udp_path(id) {
                udp_path.expect_answer(now);
            }
        }
    }

    /// Whether link `id` may carry frames although delivery is not certain. A suspected UDP path
    /// may not: another path may be better.
    pub fn may_carry(&self, id: usize) -> bool {
        let link = self.links[id].as_ref();
        link.is_none_or(|link| link.socket().is_none() || link.works())
    }

    /// Whether frames between these addresses use UDP. This is the case if the addresses have a UDP
    /// path that has worked, and some UDP path of the peer works now. A failure of a UDP path
    /// probably affects the connection between the same addresses, too, where the failure takes
    /// longer to be noticed.
    pub fn is_covered(&self, peer: Peer, ends: Option<(IpAddr, IpAddr)>) -> bool {
        let theirs = self.links.iter().flatten().filter(|link| link.peer == Some(peer));
        let udp_paths = theirs.filter_map(|link| match &link.carrier {
            Carrier::Datagram(udp_path) => Some((udp_path, link.ends)),
            _ => None,
        });
        let (mut has_tcp_beside, mut some_work) = (false, false);
        for (udp_path, between) in udp_paths {
            has_tcp_beside |= between == ends && udp_path.has_worked();
            some_work |= udp_path.is_open() && !udp_path.is_suspected();
        }
        has_tcp_beside && some_work
    }

    /// Time of the last reception from `peer` by another link than `id`.
    pub fn last_received_elsewhere(&self, peer: Peer, id: usize) -> Time {
        let links = self.links.iter().enumerate().filter(|&(other, _)| other != id);
        let theirs = links.filter_map(|(_, link)| link.as_ref()).filter(|l| l.peer == Some(peer));
        theirs.map(|link| link.last_received).max().unwrap_or(Time(0))
    }

    /// Time of the last reception from `peer` over a connection between the same addresses as link
    /// `id`, and by link `id` itself. `None`: there is no such connection.
    pub fn last_received_beside(&self, peer: Peer, id: usize) -> Option<(Time, Time)> {
        let link = self.links[id].as_ref()?;
        let has_tcp_beside =
            |it: &&Link| (it.peer, it.ends) == (Some(peer), link.ends) && it.is_stream();
        let links = self.links.iter().filter_map(Option::as_deref);
        let last_over_tcp = links.filter(has_tcp_beside).map(|link| link.last_received).max()?;
        Some((last_over_tcp, link.last_received))
    }

    /// Whether datagrams of this endpoint may be lost without retransmission when the endpoint
    /// ends.
    pub fn has_udp_paths(&self) -> bool {
        let is_open = |link: &Link| matches!(&link.carrier, Carrier::Datagram(l) if l.is_open());
        self.links.iter().flatten().any(|link| is_open(link))
    }

    /// Announces in each ring that this thread will sleep; returns false if one has work already.
    pub fn prepare_park(&mut self) -> bool {
        let links = &mut self.links;
        self.rings.iter().all(|&id| match links[id].as_mut().map(|link| &mut link.carrier) {
            Some(Carrier::Shm(ring)) => ring.prepare_park(),
            Some(Carrier::Logs(logs)) => logs.prepare_park(),
            // Epoll reports bytes in the socket, but not bytes that were read from the socket
            // already.
            Some(Carrier::Recorded(stream)) => !stream.has_frame(),
            _ => true,
        })
    }

    /// Withdraws what [`Self::prepare_park`] has announced.
    pub fn unpark(&mut self) {
        for &id in &self.rings {
            match self.links[id].as_mut().map(|link| &mut link.carrier) {
                Some(Carrier::Shm(ring)) => ring.unpark(),
                Some(Carrier::Logs(logs)) => logs.unpark(),
                _ => (),
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_is_being_read_keeps_its_number() {
        let mut links = LinkTable::new(None);
        let link = || Link::new(Carrier::Loopback, None);
        let (first, second) = (links.add(link()), links.add(link()));
        let read = links[first].take();
        let third = links.add(link());
        assert_eq!([first, second, third], [0, 1, 2]);
        links[first] = read;
        assert!(links.remove(second).is_some() && links.remove(second).is_none());
        assert_eq!(links.add(link()), second, "a number is used again");
        assert_eq!(links.add(link()), 3);
    }
}
