//! Paths of datagrams: each frame is one, and may be lost, duplicated, late or reordered without a word, by itself or with all
//! others for a while ([`super::outages`]).
//!
//! What arrives is read through the pipe of its path, a whole datagram at a time, some of them before the endpoint is told
//! that the batch is over.

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::PathProperties;
use landbridge_proto::limit::{CHECKSUM_BYTES, KIND_HEADER_BYTES_MAX};
use landbridge_proto::path::congestion::CongestionAlgorithm;
use landbridge_proto::path::time::{MICROSECOND, MILLISECOND, SECOND, Time};
use landbridge_proto::wire::frame::HEADER_BYTES;

use super::random::Random;
use super::world::World;
use super::{Violation, require};

/// What is under way in one direction, and what may happen to it.
pub struct LossyNetwork {
    /// When it arrives; in no order.
    packets: Vec<(Time, Vec<u8>)>,
    /// Of a thousand datagrams.
    lost: u64,
    duplicated: u64,
    reordered: u64,
    delay: u64,
    /// When the last that was not reordered arrives.
    last: Time,
}

/// Datagrams under way at most; more overflow, as in any queue.
const PACKETS_MAX: usize = 300;

/// What is to arrive so much later was sent before the clock jumped back.
const DELAY_MAX: u64 = 100 * SECOND;

/// Datagrams that one receiving call brings at most.
const BATCH_MAX: u64 = 4;

impl LossyNetwork {
    pub fn random(random: &mut Random) -> Self {
        Self {
            packets: Vec::new(),
            lost: random.pick(&[0, 0, 5, 20, 100]),
            duplicated: random.pick(&[0, 0, 10, 100]),
            reordered: random.pick(&[0, 0, 10, 300]),
            delay: random.pick(&[0, 100 * MICROSECOND, MILLISECOND, 30 * MILLISECOND]),
            last: Time(0),
        }
    }

    /// A datagram enters; says what became of it if that is worth telling.
    fn send(&mut self, now: Time, bytes: Vec<u8>, random: &mut Random) -> Option<&'static str> {
        let is_full = self.packets.len() >= PACKETS_MAX;
        if is_full || random.below(1_000) < self.lost {
            return Some("datagrams lost");
        }
        if random.below(1_000) < self.duplicated {
            let at = self.arrival(now, random);
            self.packets.push((at, bytes.clone()));
            self.packets.push((now.after(self.delay + random.below(self.delay * 3 + 1)), bytes));
            return Some("datagrams duplicated");
        }
        let at = self.arrival(now, random);
        self.packets.push((at, bytes));
        None
    }

    fn arrival(&mut self, now: Time, random: &mut Random) -> Time {
        let at = now.after(self.delay + random.below(self.delay / 8 + 1));
        if random.below(1_000) < self.reordered {
            return at.after(random.below(4 * self.delay + MILLISECOND));
        }
        // A clock that jumps takes nothing with it.
        self.last = if self.last.nanos_since(at) > SECOND { at } else { self.last.max(at) };
        self.last
    }

    /// Nothing is lost from now on, but what overflows.
    pub fn stop_losses(&mut self) {
        self.lost = 0;
    }

    /// When the next one arrives.
    pub fn next(&self) -> Option<Time> {
        self.packets.iter().map(|&(at, _)| at).min()
    }

    fn receive(&mut self, now: Time) -> Option<Vec<u8>> {
        // Those of before the clock jumped back have been long under way.
        let is_due = |at: Time| at <= now || at.nanos_since(now) > DELAY_MAX;
        let due = self.packets.iter().enumerate().filter(|(_, packet)| is_due(packet.0));
        let place = due.min_by_key(|(place, packet)| (packet.0, *place))?.0;
        Some(self.packets.remove(place).1)
    }
}

/// A path of datagrams, for both directions of a path; most paths are none.
pub fn random_kind(random: &mut Random) -> Option<CongestionAlgorithm> {
    random.pick(&[None, None, Some(CongestionAlgorithm::Cubic), Some(CongestionAlgorithm::Bbr)])
}

/// The traits with which frames go as datagrams.
pub fn with_datagrams(
    path: PathProperties,
    datagram: Option<CongestionAlgorithm>,
) -> PathProperties {
    match datagram {
        None => path,
        Some(_) => PathProperties { datagram, lossless: false, silent_loss: true, ..path },
    }
}

impl World {
    pub fn has_datagrams(&self, from: usize, to: usize, path_id: usize) -> bool {
        self.pipes[from][to][path_id].network.is_some()
    }

    /// A frame leaves as a datagram.
    pub fn send_datagram(
        &mut self,
        (from, to, path_id): (usize, usize, usize),
        bytes: Vec<u8>,
    ) -> Result<(), Violation> {
        let most = self.nodes[from].paths[to][path_id].payload_max as usize;
        let most = most.max(1) + HEADER_BYTES + KIND_HEADER_BYTES_MAX + CHECKSUM_BYTES;
        require!(bytes.len() <= most, "a datagram of {} bytes where {most} fit", bytes.len());
        let pipe = &mut self.pipes[from][to][path_id];
        let Some(network) = pipe.network.as_mut().filter(|_| !pipe.is_cut) else {
            return Ok(());
        };
        if self.blackholed[from][to][path_id] {
            self.counts.count("datagrams lost");
            self.has_silent_loss = true;
            return Ok(());
        }
        if let Some(event) = network.send(self.now, bytes, &mut self.random) {
            self.counts.count(event);
            self.log_step(|| format!("from {from} to {to} by {path_id}: {event}:"));
        }
        Ok(())
    }

    /// Reads what one receiving call brings; false if that is nothing.
    pub fn receive_datagrams(
        &mut self,
        from: usize,
        to: usize,
        path_id: usize,
    ) -> Result<bool, Violation> {
        let mut moved = false;
        for _ in 0..self.random.within(1..=BATCH_MAX) {
            let pipe = &mut self.pipes[from][to][path_id];
            let Some(bytes) = pipe.network.as_mut().and_then(|network| network.receive(self.now))
            else {
                break;
            };
            moved = true;
            pipe.bytes.extend(bytes);
            self.read_datagram(from, to, path_id)?;
        }
        if moved && self.pipes[from][to][path_id].network.is_some() {
            let peer = self.peer(to, from);
            self.nodes[to].endpoint.end_batch(peer, PathId(path_id as u8));
            self.drain(to)?;
        }
        Ok(moved)
    }

    /// Takes one datagram out of the pipe.
    fn read_datagram(&mut self, from: usize, to: usize, path_id: usize) -> Result<(), Violation> {
        loop {
            // A path that is found too bad in between is broken, and its pipe is empty.
            let has_incoming = self.pipes[from][to][path_id].incoming.is_some();
            if self.pipes[from][to][path_id].bytes.is_empty() && !has_incoming {
                return Ok(());
            }
            let moved = match has_incoming {
                true => self.read_payload(from, to, path_id)?,
                false => self.read_front(from, to, path_id)?,
            };
            require!(moved, "a datagram of {from} to {to} is cut off");
        }
    }
}
