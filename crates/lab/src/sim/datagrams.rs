//! Paths of datagrams: each frame is one datagram, which may be lost, duplicated, delayed or
//! reordered without a notification, alone or together with all other datagrams of an outage.
//!
//! Datagrams that arrive are read through the pipe of their path, one whole datagram at a time.
//! Several datagrams may be read before the endpoint is notified of the end of the batch.

use landbridge_proto::endpoint::PathProperties;
use landbridge_proto::path::congestion::CongestionAlgorithm;
use landbridge_proto::path::time::{MICROSECOND, MILLISECOND, SECOND, Time};

use super::random::Random;

/// The datagrams under way in one direction, and the rates of their faults.
pub struct LossyNetwork {
    /// Time of arrival and bytes of each datagram, in no order.
    packets: Vec<(Time, Vec<u8>)>,
    /// Datagrams that are lost, per thousand. `duplicated` and `reordered` are per thousand as
    /// well.
    lost: u64,
    duplicated: u64,
    reordered: u64,
    delay: u64,
    /// Time of arrival of the last datagram that was not reordered.
    last: Time,
}

/// Datagrams under way at most; further datagrams overflow, as in any queue.
const PACKETS_MAX: usize = 300;

/// Longest plausible delay in nanoseconds: a datagram with a later arrival was sent before the
/// clock jumped back.
const DELAY_MAX: u64 = 100 * SECOND;

/// Datagrams that one receiving call returns at most.
pub const BATCH_MAX: u64 = 4;

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

    /// Sends a datagram; returns the name of the counter if the datagram had a fault.
    pub fn send(&mut self, now: Time, bytes: Vec<u8>, random: &mut Random) -> Option<&'static str> {
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
        // A jump of the clock does not delay later datagrams.
        self.last = if self.last.nanos_since(at) > SECOND { at } else { self.last.max(at) };
        self.last
    }

    /// Stops random losses; overflow still loses datagrams.
    pub fn stop_losses(&mut self) {
        self.lost = 0;
    }

    /// Time of arrival of the next datagram.
    pub fn next(&self) -> Option<Time> {
        self.packets.iter().map(|&(at, _)| at).min()
    }

    pub fn receive(&mut self, now: Time) -> Option<Vec<u8>> {
        // Datagrams that were sent before the clock jumped back are due at once.
        let is_due = |at: Time| at <= now || at.nanos_since(now) > DELAY_MAX;
        let due = self.packets.iter().enumerate().filter(|(_, packet)| is_due(packet.0));
        let place = due.min_by_key(|(place, packet)| (packet.0, *place))?.0;
        Some(self.packets.remove(place).1)
    }
}

/// The congestion control of a path of datagrams, for both directions of the path; `None`, the most
/// frequent case, for a path without datagrams.
pub fn random_kind(random: &mut Random) -> Option<CongestionAlgorithm> {
    random.pick(&[None, None, Some(CongestionAlgorithm::Cubic), Some(CongestionAlgorithm::Bbr)])
}

/// The path properties of a path, changed so that frames are sent as datagrams if `datagram` is
/// some algorithm.
pub fn with_datagrams(
    path: PathProperties,
    datagram: Option<CongestionAlgorithm>,
) -> PathProperties {
    match datagram {
        None => path,
        Some(_) => PathProperties { datagram, lossless: false, silent_loss: true, ..path },
    }
}
