//! Paths to a peer open, change, break and close.
//!
//! Enters: what the driver knows of its paths, under its numbers. Leaves: what a path may have lost goes again by another,
//! once the peer has said what it has.
//!
//! What may never happen: anything goes again before the peer has answered; memory is touched for a closed path.

use alloc::vec::Vec;

use super::control_frame::ControlFrame;
use super::path_state::{PathProperties, PathState, PathStatistics};
use super::{Endpoint, Memory, Peer};
use crate::channel::{PATHS_MAX, PathId};
use crate::wire::kind_header::AdvertisedAddress;

// The bits of `Channel::count_senders`.
const _: () = assert!(PATHS_MAX <= 8);

impl<M: Memory> Endpoint<M> {
    /// There is a path to `peer`, under a number of the driver's. Sizes that no frame can have are cut to those it can.
    /// Once there has been another, the peer is asked first what it has.
    ///
    /// # Panics
    /// If the number is not below [`PATHS_MAX`].
    pub fn open_path(&mut self, peer: Peer, number: PathId, path: PathProperties) {
        assert!((number.0 as usize) < PATHS_MAX, "more paths than a channel can have");
        let channel = &mut self.channels[peer.0 as usize];
        let path = path.within_limits();
        let state = || PathState { is_up: false, ..PathState::new(path) };
        let paths = channel.paths.len().max(number.0 as usize + 1);
        channel.paths.resize_with(paths, state);
        let was_cut_off = !channel.paths.iter().any(|state| state.is_up);
        channel.paths[number.0 as usize] = PathState::new(path);
        channel.path = path;
        self.count_senders(peer);
        let channel = &mut self.channels[peer.0 as usize];
        if was_cut_off {
            channel.repeat_control_frames();
        }
        self.mark_busy(peer);
    }

    /// What path `number` to `peer` has carried, and what is known of it.
    pub fn path_statistics(&self, peer: Peer, number: PathId) -> Option<PathStatistics> {
        let channel = &self.channels[peer.0 as usize];
        let state = channel.path_state(number)?;
        let by_others =
            || channel.paths.iter().map(|state| state.carried - state.retransmitted).sum();
        Some(PathStatistics {
            bytes: match state.path.lossless {
                true => channel.out.next().saturating_sub(by_others()),
                false => state.carried,
            },
            retransmitted_bytes: state.retransmitted,
            is_spare: state.path.spare,
            bytes_per_second: state.rate.measured(),
            round_trip_nanos: state.round_trip.smoothed_nanos(),
            large_lost: state.flow.as_ref().map_or(0, |flow| flow.large_lost()),
        })
    }

    /// The path `number` to `peer`, if it is up, can do something else from now on.
    pub fn set_path(&mut self, peer: Peer, number: PathId, path: PathProperties) {
        let channel = &mut self.channels[peer.0 as usize];
        let state = channel.paths.get_mut(number.0 as usize);
        if let Some(state) = state.filter(|state| state.is_up) {
            let is_other = state.set_path(path.within_limits());
            channel.path = state.path;
            let ends = channel.sends_by(number);
            self.count_senders(peer);
            let channel = &mut self.channels[peer.0 as usize];
            if is_other {
                self.presume_path_lost(peer, number);
            } else if ends && channel.has_datagrams && !channel.sends_by(number) {
                // What was said by it may never have arrived.
                channel.repeat_control_frames();
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
        if channel.has_silent_loss {
            self.arm_probe_timeout(peer);
        }
        // What has gone by them since they were suspected may be lost, too.
        for number in (0..PATHS_MAX as u8).filter(|number| left & 1 << number != 0) {
            self.presume_path_lost(peer, PathId(number));
        }
    }

    /// The path `number` to `peer` is broken. What it may have lost goes by another, if there is one, or by the next that opens.
    /// The driver touches no memory for it any more.
    pub fn close_path(&mut self, peer: Peer, number: PathId) {
        let channel = &mut self.channels[peer.0 as usize];
        let Some(state) = channel.paths.get_mut(number.0 as usize).filter(|state| state.is_up)
        else {
            return;
        };
        state.is_up = false;
        let held = state.held.take();
        self.count_senders(peer);
        let channel = &mut self.channels[peer.0 as usize];
        channel.out.handle_break(number);
        // The sender may believe that it has come by another path, from which it was diverted.
        let mut cut: Vec<(u64, u64)> = channel
            .out_of_order
            .extract_if(.., |out_of_order| out_of_order.path == number)
            .map(|out_of_order| out_of_order.range())
            .collect();
        if let Some(arriving) = &mut channel.arriving {
            cut.extend(arriving.handle_break(number));
        }
        if let Some(state) = channel.paths.iter().find(|state| state.is_up) {
            channel.path = state.path;
            channel.repeat_control_frames();
        }
        if let Some(sent) = held {
            self.apply(peer, sent);
        }
        for (start, end) in cut {
            self.must_request_retransmission(peer, start, end);
        }
        self.mark_busy(peer);
    }

    /// Whatever `path` carried may be lost, though it is still up.
    pub fn presume_path_lost(&mut self, peer: Peer, path: PathId) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.failed.is_none() {
            channel.lose_in_flight(path, self.now);
            channel.repeat_control_frames();
            self.mark_busy(peer);
        }
    }

    /// Tells `peer` of another address at which we can be reached. To be repeated on a new path if one was lost.
    pub fn advertise_address(&mut self, peer: Peer, address: AdvertisedAddress) {
        let channel = &mut self.channels[peer.0 as usize];
        let address = ControlFrame::AddressAdvertisement(address);
        if channel.failed.is_none() && !channel.control_frames.contains(&address) {
            channel.control_frames.push(address);
            self.mark_busy(peer);
        }
    }

    /// Whether any path to `peer` is up.
    pub fn has_path(&self, peer: Peer) -> bool {
        self.channels[peer.0 as usize].paths.iter().any(|state| state.is_up)
    }
}
