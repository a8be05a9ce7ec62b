//! Paths to a peer open, change, break and close.
//!
//! Enters: what the driver knows of its paths, under its numbers. Leaves: what a path may have lost goes again by another,
//! once the peer has said what it has.
//!
//! What may never happen: anything goes again before the peer has answered; memory is touched for a closed path.

use alloc::vec::Vec;

use super::channel::Errand;
use super::way::{Path, PathUse, Way};
use super::{Endpoint, Memory, Peer};
use crate::channel::{PATHS_MAX, PathId};
use crate::wire::head::Door;

// The bits of `Channel::count_senders`.
const _: () = assert!(PATHS_MAX <= 8);

impl<M: Memory> Endpoint<M> {
    /// There is a path to `peer`, under a number of the driver's. Sizes that no frame can have are cut to those it can.
    /// Once there has been another, the peer is asked first what it has.
    ///
    /// # Panics
    /// If the number is not below [`PATHS_MAX`].
    pub fn open_path(&mut self, peer: Peer, number: PathId, path: Path) {
        assert!((number.0 as usize) < PATHS_MAX, "more paths than a channel can have");
        let channel = &mut self.channels[peer.0 as usize];
        let path = path.within_limits();
        let way = || Way { is_up: false, ..Way::new(path) };
        let ways = channel.ways.len().max(number.0 as usize + 1);
        channel.ways.resize_with(ways, way);
        let was_cut_off = !channel.ways.iter().any(|way| way.is_up);
        channel.ways[number.0 as usize] = Way::new(path);
        channel.path = path;
        self.count_senders(peer);
        let channel = &mut self.channels[peer.0 as usize];
        if was_cut_off {
            channel.repeat();
        }
        self.mark_busy(peer);
    }

    /// What path `number` to `peer` has carried, and what is known of it.
    pub fn path_use(&self, peer: Peer, number: PathId) -> Option<PathUse> {
        let channel = &self.channels[peer.0 as usize];
        let way = channel.way(number)?;
        let by_others = || channel.ways.iter().map(|way| way.carried - way.again).sum();
        Some(PathUse {
            bytes: match way.path.lossless {
                true => channel.out.next().saturating_sub(by_others()),
                false => way.carried,
            },
            bytes_again: way.again,
            is_spare: way.path.spare,
            bytes_per_second: way.rate.measured(),
            round_trip_nanos: way.round_trip.smoothed_nanos(),
            large_lost: way.flow.as_ref().map_or(0, |flow| flow.large_lost()),
        })
    }

    /// Path `number` to `peer`, if it is up, can do something else from now on.
    pub fn set_path(&mut self, peer: Peer, number: PathId, path: Path) {
        let channel = &mut self.channels[peer.0 as usize];
        let way = channel.ways.get_mut(number.0 as usize);
        if let Some(way) = way.filter(|way| way.is_up) {
            let is_other = way.set_path(path.within_limits());
            channel.path = way.path;
            let ends = channel.sends_by(number);
            self.count_senders(peer);
            let channel = &mut self.channels[peer.0 as usize];
            if is_other {
                self.shake_path(peer, number);
            } else if ends && channel.has_datagrams && !channel.sends_by(number) {
                // What was said by it may never have arrived.
                channel.repeat();
            }
            // A path that had nothing to carry may be the one for what waits now, and the others leave it to that one.
            self.mark_busy(peer);
        }
    }

    /// Paths to `peer` have changed.
    pub(super) fn count_senders(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        let was_timed = channel.is_timed();
        let left = channel.count_senders();
        self.timed -= was_timed as usize;
        self.timed += channel.is_timed() as usize;
        if channel.is_silent {
            self.watch(peer);
        }
        // What has gone by them since they were doubted may be lost, too.
        for number in (0..PATHS_MAX as u8).filter(|number| left & 1 << number != 0) {
            self.shake_path(peer, PathId(number));
        }
    }

    /// Path `number` to `peer` is broken. What it may have lost goes by another, if there is one, or by the next that opens.
    /// The driver touches no memory for it any more.
    pub fn close_path(&mut self, peer: Peer, number: PathId) {
        let channel = &mut self.channels[peer.0 as usize];
        let Some(way) = channel.ways.get_mut(number.0 as usize).filter(|way| way.is_up) else {
            return;
        };
        way.is_up = false;
        let held = way.held.take();
        self.count_senders(peer);
        let channel = &mut self.channels[peer.0 as usize];
        channel.out.handle_break(number);
        // The sender may believe that it has come by another path, from which it was diverted.
        let mut cut: Vec<(u64, u64)> = channel
            .keeping
            .extract_if(.., |keeping| keeping.path == number)
            .map(|keeping| keeping.range())
            .collect();
        if let Some(arriving) = &mut channel.arriving {
            cut.extend(arriving.handle_break(number));
        }
        if let Some(way) = channel.ways.iter().find(|way| way.is_up) {
            channel.path = way.path;
            channel.repeat();
        }
        if let Some(sent) = held {
            self.apply(peer, sent);
        }
        for (start, end) in cut {
            self.must_ask_again(peer, start, end);
        }
        self.mark_busy(peer);
    }

    /// Whatever `path` carried may be lost, though it is still up.
    pub fn shake_path(&mut self, peer: Peer, path: PathId) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.failed.is_none() {
            channel.give_up(path, self.now);
            channel.repeat();
            self.mark_busy(peer);
        }
    }

    /// Tells `peer` of another address at which we can be reached. To be repeated on a new path if one was lost.
    pub fn tell_door(&mut self, peer: Peer, door: Door) {
        let channel = &mut self.channels[peer.0 as usize];
        let door = Errand::Door(door);
        if channel.failed.is_none() && !channel.errands.contains(&door) {
            channel.errands.push(door);
            self.mark_busy(peer);
        }
    }

    /// Whether any path to `peer` is up.
    pub fn has_path(&self, peer: Peer) -> bool {
        self.channels[peer.0 as usize].ways.iter().any(|way| way.is_up)
    }
}
