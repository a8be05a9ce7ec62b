//! Paths of datagrams: each frame is one, and may be lost, doubled, late or overtaken without a word, by itself or with all
//! others for a while ([`super::outages`]).
//!
//! What arrives is read through the pipe of its lane, a whole datagram at a time, some of them before the endpoint is told
//! that the batch is over.

use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::Path;
use landbridge_proto::limit::{CHECK_BYTES, HEAD_BYTES_MAX};
use landbridge_proto::path::congestion::Kind;
use landbridge_proto::path::time::{MICROSECOND, MILLISECOND, SECOND, Time};
use landbridge_proto::wire::frame::HEADER_BYTES;

use super::random::Random;
use super::world::World;
use super::{Violation, require};

/// What is under way in one direction, and what may happen to it.
pub struct Air {
    /// When it arrives; in no order.
    packets: Vec<(Time, Vec<u8>)>,
    /// Of a thousand datagrams.
    lost: u64,
    doubled: u64,
    overtaken: u64,
    delay: u64,
    /// When the last that was not overtaken arrives.
    last: Time,
}

/// Datagrams under way at most; more overflow, as in any queue.
const PACKETS_MAX: usize = 300;

/// What is to arrive so much later was sent before the clock jumped back.
const DELAY_MAX: u64 = 100 * SECOND;

/// Datagrams that one receiving call brings at most.
const BATCH_MAX: u64 = 4;

impl Air {
    pub fn random(random: &mut Random) -> Self {
        Self {
            packets: Vec::new(),
            lost: random.pick(&[0, 0, 5, 20, 100]),
            doubled: random.pick(&[0, 0, 10, 100]),
            overtaken: random.pick(&[0, 0, 10, 300]),
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
        if random.below(1_000) < self.doubled {
            let at = self.arrival(now, random);
            self.packets.push((at, bytes.clone()));
            self.packets.push((now.after(self.delay + random.below(self.delay * 3 + 1)), bytes));
            return Some("datagrams doubled");
        }
        let at = self.arrival(now, random);
        self.packets.push((at, bytes));
        None
    }

    fn arrival(&mut self, now: Time, random: &mut Random) -> Time {
        let at = now.after(self.delay + random.below(self.delay / 8 + 1));
        if random.below(1_000) < self.overtaken {
            return at.after(random.below(4 * self.delay + MILLISECOND));
        }
        // A clock that jumps takes nothing with it.
        self.last = if self.last.nanos_since(at) > SECOND { at } else { self.last.max(at) };
        self.last
    }

    /// Nothing is lost from now on, but what overflows.
    pub fn lose_nothing(&mut self) {
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

/// A path of datagrams, for both directions of a lane; most lanes are none.
pub fn random_kind(random: &mut Random) -> Option<Kind> {
    random.pick(&[None, None, Some(Kind::Cubic), Some(Kind::Bbr)])
}

/// The traits with which frames go as datagrams.
pub fn with_datagrams(path: Path, datagram: Option<Kind>) -> Path {
    match datagram {
        None => path,
        Some(_) => Path { datagram, lossless: false, silent: true, ..path },
    }
}

impl World {
    pub fn has_datagrams(&self, from: usize, to: usize, lane: usize) -> bool {
        self.links[from][to][lane].air.is_some()
    }

    /// A frame leaves as a datagram.
    pub fn send_datagram(
        &mut self,
        (from, to, lane): (usize, usize, usize),
        bytes: Vec<u8>,
    ) -> Result<(), Violation> {
        let most = self.nodes[from].paths[to][lane].payload_max as usize;
        let most = most.max(1) + HEADER_BYTES + HEAD_BYTES_MAX + CHECK_BYTES;
        require!(bytes.len() <= most, "a datagram of {} bytes where {most} fit", bytes.len());
        let link = &mut self.links[from][to][lane];
        let Some(air) = link.air.as_mut().filter(|_| !link.is_cut) else {
            return Ok(());
        };
        if self.dead[from][to][lane] {
            self.tally.count("datagrams lost");
            self.has_swallowed = true;
            return Ok(());
        }
        if let Some(event) = air.send(self.now, bytes, &mut self.random) {
            self.tally.count(event);
            self.say(|| format!("from {from} to {to} by {lane}: {event}:"));
        }
        Ok(())
    }

    /// Reads what one receiving call brings; false if that is nothing.
    pub fn receive_datagrams(
        &mut self,
        from: usize,
        to: usize,
        lane: usize,
    ) -> Result<bool, Violation> {
        let mut moved = false;
        for _ in 0..self.random.within(1..=BATCH_MAX) {
            let link = &mut self.links[from][to][lane];
            let Some(bytes) = link.air.as_mut().and_then(|air| air.receive(self.now)) else {
                break;
            };
            moved = true;
            link.pipe.extend(bytes);
            self.read_datagram(from, to, lane)?;
        }
        if moved && self.links[from][to][lane].air.is_some() {
            let peer = self.peer(to, from);
            self.nodes[to].endpoint.end_batch(peer, PathId(lane as u8));
            self.drain(to)?;
        }
        Ok(moved)
    }

    /// Takes one datagram out of the pipe.
    fn read_datagram(&mut self, from: usize, to: usize, lane: usize) -> Result<(), Violation> {
        loop {
            // A path that is found too bad in between is broken, and its pipe is empty.
            let is_reading = self.links[from][to][lane].reading.is_some();
            if self.links[from][to][lane].pipe.is_empty() && !is_reading {
                return Ok(());
            }
            let moved = match is_reading {
                true => self.read_payload(from, to, lane)?,
                false => self.read_front(from, to, lane)?,
            };
            require!(moved, "a datagram of {from} to {to} is cut off");
        }
    }
}
