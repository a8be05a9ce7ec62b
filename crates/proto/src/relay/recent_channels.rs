//! Channels whose frames a link has carried recently, so that the sources can be notified when the
//! link breaks.
//!
//! What enters: every frame whose first byte was written to the link, and, if the other side
//! confirms, how many bytes the other side has received. What leaves: the channels that may have
//! lost frames. The result may name too many channels, but never too few.

use alloc::collections::{BTreeSet, VecDeque};

use crate::id::Address;
use crate::wire::frame::{Header, Kind};

/// Bytes of frames whose channels are remembered together.
const GENERATION_BYTES: u64 = 4 << 20;

/// Bytes of frames that are remembered on a link whose other side confirms nothing: more than the
/// sockets of both ends can hold.
const UNCONFIRMED_BYTES: u64 = 128 << 20;

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
    confirmed: u64,
    /// Whether the other side confirms the bytes that it has received.
    is_confirmed: bool,
}

impl RecentChannels {
    /// The record of a link whose other side confirms the bytes that it has received.
    pub fn confirmed() -> Self {
        Self { is_confirmed: true, ..Self::default() }
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

    /// Confirms the first `bytes` bytes. Returns false if fewer bytes were ever sent.
    pub fn confirm(&mut self, bytes: u64) -> bool {
        self.confirmed = self.confirmed.max(bytes.min(self.sent));
        bytes <= self.sent
    }

    /// Bytes from the confirmed position to the end of the last frame.
    pub fn unconfirmed_bytes(&self) -> u64 {
        let end = self.generations.back().map_or(0, |last| last.end);
        end.saturating_sub(self.confirmed)
    }

    /// Channels whose frames may not have arrived.
    pub fn unconfirmed(&self) -> BTreeSet<ChannelKey> {
        let open = self.generations.iter().filter(|generation| generation.end > self.confirmed);
        open.flat_map(|generation| generation.entries.iter().copied()).collect()
    }

    /// Channels of the recently sent frames, whether or not these have arrived.
    pub fn recent(&self) -> BTreeSet<ChannelKey> {
        let all = self.generations.iter();
        all.flat_map(|generation| generation.entries.iter().copied()).collect()
    }

    fn forget(&mut self) {
        let is_old = |generation: &Generation| {
            generation.end + UNCONFIRMED_BYTES < self.sent
                && (!self.is_confirmed || generation.end <= self.confirmed)
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
    fn what_is_confirmed_is_not_open() {
        let mut record = RecentChannels::confirmed();
        record.add(100, entry(1));
        record.skip(40);
        assert_eq!(
            (record.unconfirmed(), record.unconfirmed_bytes()),
            (BTreeSet::from([entry(1)]), 100)
        );
        assert!(record.confirm(100));
        assert!(record.unconfirmed().is_empty());
        assert!(record.confirm(140) && !record.confirm(141));
        assert_eq!((record.unconfirmed_bytes(), record.recent()), (0, BTreeSet::from([entry(1)])));
        record.add(10, entry(2));
        record.add(10, entry(3));
        assert!(record.unconfirmed().is_superset(&BTreeSet::from([entry(2), entry(3)])));
    }

    #[test]
    fn never_less_is_remembered_than_a_link_may_hold() {
        const FRAME: u64 = 1 << 16;
        let (mut plain, mut confirmed) = (RecentChannels::default(), RecentChannels::confirmed());
        let frames = 3 * UNCONFIRMED_BYTES / FRAME;
        for n in 0..frames {
            plain.add(FRAME as usize, entry(n as u32));
            confirmed.add(FRAME as usize, entry(n as u32));
        }
        let wanted = frames - UNCONFIRMED_BYTES / FRAME..frames;
        let open = plain.unconfirmed();
        assert!(wanted.clone().all(|n| open.contains(&entry(n as u32))));
        let most = (UNCONFIRMED_BYTES + 2 * GENERATION_BYTES) / FRAME;
        assert!(open.len() as u64 <= most, "{} are remembered", open.len());
        assert_eq!(confirmed.unconfirmed().len() as u64, frames, "nothing has been confirmed");
        confirmed.confirm(frames * FRAME);
        confirmed.add(FRAME as usize, entry(0));
        assert!(confirmed.recent().len() as u64 <= most);
    }
}
