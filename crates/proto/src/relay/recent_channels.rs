//! Channels whose frames a link has carried recently, so that the sources can be notified when the
//! link breaks.
//!
//! What enters: every frame whose first byte was written to the link, and, if the other side
//! acknowledges, how many bytes the other side has received. What leaves: the channels that may
//! have lost frames. The result may name too many channels, but never too few.

use alloc::collections::{BTreeSet, VecDeque};

use crate::id::Address;
use crate::wire::frame::{Header, Kind};

/// Bytes of frames whose channels are remembered together.
const GENERATION_BYTES: u64 = 4 << 20;

/// Bytes of frames that are remembered on a link whose other side acknowledges nothing: more than
/// the sockets of both ends can hold.
const UNACKNOWLEDGED_BYTES: u64 = 128 << 20;

/// Source, target and class of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChannelKey {
    pub source: Address,
    pub target: Address,
    pub class: FrameClass,
}

/// Class of a frame by its loss: a source can retransmit frames, and only relays can repeat
/// reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FrameClass {
    Forwarded,
    LossReport,
    UnreachableReport,
}

impl ChannelKey {
    #[inline]
    pub fn of(header: &Header) -> Self {
        let class = FrameClass::of(header.kind);
        Self { source: header.source, target: header.target, class }
    }

    /// The channel of a forwarded frame. Reports have none.
    pub fn channel(self) -> Option<(Address, Address)> {
        (self.class == FrameClass::Forwarded).then_some((self.source, self.target))
    }
}

impl FrameClass {
    #[inline]
    pub fn of(kind: Kind) -> Self {
        match kind {
            Kind::Lost => FrameClass::LossReport,
            Kind::Unreachable => FrameClass::UnreachableReport,
            _ => FrameClass::Forwarded,
        }
    }
}

#[derive(Debug)]
struct Generation {
    start: u64,
    /// Bytes sent on the link up to the end of the last frame of this generation.
    end: u64,
    last: ChannelKey,
    entries: BTreeSet<ChannelKey>,
}

/// Recent channels of one link: see the module head.
#[derive(Debug, Default)]
pub(super) struct RecentChannels {
    generations: VecDeque<Generation>,
    sent: u64,
    acknowledged: u64,
    /// Whether the other side acknowledges the bytes that it has received.
    is_acknowledged: bool,
}

impl RecentChannels {
    /// The record of a link whose other side acknowledges the bytes that it has received.
    pub fn acknowledged() -> Self {
        Self { is_acknowledged: true, ..Self::default() }
    }

    /// Adds a frame of `length` bytes that is being sent.
    #[inline]
    pub fn add(&mut self, length: usize, entry: ChannelKey) {
        let start = self.sent;
        self.skip(length);
        match self.generations.back_mut() {
            Some(last) if start - last.start < GENERATION_BYTES => {
                last.end = self.sent;
                if last.last != entry {
                    last.last = entry;
                    last.entries.insert(entry);
                }
            }
            _ => {
                let (end, entries) = (self.sent, BTreeSet::from([entry]));
                self.generations.push_back(Generation { start, end, last: entry, entries });
                self.forget();
            }
        }
    }

    /// Accounts for `length` sent bytes that belong to no channel.
    #[inline]
    pub fn skip(&mut self, length: usize) {
        self.sent += length as u64;
    }

    /// Acknowledges the first `bytes` bytes. Returns false if fewer bytes were ever sent.
    pub fn acknowledge(&mut self, bytes: u64) -> bool {
        self.acknowledged = self.acknowledged.max(bytes.min(self.sent));
        bytes <= self.sent
    }

    /// Bytes from the acknowledged position to the end of the last frame.
    pub fn unacknowledged_bytes(&self) -> u64 {
        let end = self.generations.back().map_or(0, |last| last.end);
        end.saturating_sub(self.acknowledged)
    }

    /// Channels whose frames may not have arrived.
    pub fn unacknowledged(&self) -> BTreeSet<ChannelKey> {
        let open = self.generations.iter().filter(|generation| generation.end > self.acknowledged);
        open.flat_map(|generation| generation.entries.iter().copied()).collect()
    }

    /// Channels of the recently sent frames, whether or not these have arrived.
    pub fn recent(&self) -> BTreeSet<ChannelKey> {
        let all = self.generations.iter();
        all.flat_map(|generation| generation.entries.iter().copied()).collect()
    }

    fn forget(&mut self) {
        let is_old = |generation: &Generation| {
            generation.end + UNACKNOWLEDGED_BYTES < self.sent
                && (!self.is_acknowledged || generation.end <= self.acknowledged)
        };
        while self.generations.front().is_some_and(is_old) {
            self.generations.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(source: u32) -> ChannelKey {
        let target = Address::new(9, 0);
        ChannelKey { source: Address::new(source, 0), target, class: FrameClass::Forwarded }
    }

    #[test]
    fn what_is_acknowledged_is_not_open() {
        let mut record = RecentChannels::acknowledged();
        record.add(100, entry(1));
        record.skip(40);
        assert_eq!(
            (record.unacknowledged(), record.unacknowledged_bytes()),
            (BTreeSet::from([entry(1)]), 100)
        );
        assert!(record.acknowledge(100));
        assert!(record.unacknowledged().is_empty());
        assert!(record.acknowledge(140) && !record.acknowledge(141));
        assert_eq!(
            (record.unacknowledged_bytes(), record.recent()),
            (0, BTreeSet::from([entry(1)]))
        );
        record.add(10, entry(2));
        record.add(10, entry(3));
        assert!(record.unacknowledged().is_superset(&BTreeSet::from([entry(2), entry(3)])));
    }

    #[test]
    fn never_less_is_remembered_than_a_link_may_hold() {
        const FRAME: u64 = 1 << 16;
        let (mut plain, mut acknowledged) =
            (RecentChannels::default(), RecentChannels::acknowledged());
        let frames = 3 * UNACKNOWLEDGED_BYTES / FRAME;
        for n in 0..frames {
            plain.add(FRAME as usize, entry(n as u32));
            acknowledged.add(FRAME as usize, entry(n as u32));
        }
        let wanted = frames - UNACKNOWLEDGED_BYTES / FRAME..frames;
        let open = plain.unacknowledged();
        assert!(wanted.clone().all(|n| open.contains(&entry(n as u32))));
        let most = (UNACKNOWLEDGED_BYTES + 2 * GENERATION_BYTES) / FRAME;
        assert!(open.len() as u64 <= most, "{} are remembered", open.len());
        assert_eq!(
            acknowledged.unacknowledged().len() as u64,
            frames,
            "nothing has been acknowledged"
        );
        acknowledged.acknowledge(frames * FRAME);
        acknowledged.add(FRAME as usize, entry(0));
        assert!(acknowledged.recent().len() as u64 <= most);
    }
}
