//! Opening, changing, breaking and closing the paths to a peer.
//!
//! What enters: the driver's reports on its paths, by path number. What leaves: retransmissions, by
//! other paths, of what a path may have lost, once the peer has reported what has arrived.
//!
//! What may never happen: anything is retransmitted before the peer has answered; memory is
//! accessed for a closed path.

use alloc::vec::Vec;

use super::control_frame::ControlFrame;
use super::path_state::{PathProperties, PathStatistics};
use super::{Endpoint, Memory, Peer};
use crate::channel::{PATHS_MAX, PathId};
use crate::wire::kind_header::AdvertisedAddress;

// `PathSet::count_senders` uses one bit of a `u8` for each path.
const _: () = assert!(PATHS_MAX <= 8);

impl<M: Memory> Endpoint<M> {
    /// Opens a path to `peer` under the driver's number `number`. Sizes that no frame can have are
    /// reduced to allowed ones. If an earlier path was lost, the peer is first asked what has
    /// arrived.
    ///
    /// # Panics
    /// If the number is not below [`PATHS_MAX`].
    pub fn open_path(&mut self, peer: Peer, number: PathId, path: PathProperties) {
        assert!((number.0 as usize) < PATHS_MAX, "more paths than a channel can have");
        let channel = &mut self.channels[peer.0 as usize];
        let path = path.within_limits();
        let was_cut_off = channel.paths.open(number, path);
        self.count_senders(peer);
        let channel = &mut self.channels[peer.0 as usize];
        if was_cut_off {
            channel.repeat_control_frames();
        }
        self.mark_busy(peer);
    }

    /// The statistics of path `number` to `peer`, if the path is up.
    pub fn path_statistics(&self, peer: Peer, number: PathId) -> Option<PathStatistics> {
        let channel = &self.channels[peer.0 as usize];
        let state = channel.paths.path_state(number)?;
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

    /// Sets the properties of path `number` to `peer`, if the path is up.
    pub fn set_path(&mut self, peer: Peer, number: PathId, path: PathProperties) {
        let channel = &mut self.channels[peer.0 as usize];
        let state = channel.paths.get_mut(number.0 as usize);
        if let Some(state) = state.filter(|state| state.is_up) {
            let is_other = state.set_path(path.within_limits());
            channel.paths.properties = state.path;
            let ends = channel.paths.sends_by(number);
            self.count_senders(peer);
            let channel = &mut self.channels[peer.0 as usize];
            if is_other {
                self.presume_path_lost(peer, number);
            } else if ends && channel.paths.has_datagrams && !channel.paths.sends_by(number) {
                // Control frames that this path carried may not have arrived.
                channel.repeat_control_frames();
            }
            // A path that had nothing to carry may be the best one for the items that wait, and the
            // other paths leave them to it.
            self.mark_busy(peer);
        }
    }

    /// Recomputes which paths send, after the paths to `peer` have changed.
    pub(super) fn count_senders(&mut self, peer: Peer) {
        let channel = &mut self.channels[peer.0 as usize];
        let was_timed = channel.paths.is_timed();
        let left = channel.paths.count_senders();
        self.timed -= was_timed as usize;
        self.timed += channel.paths.is_timed() as usize;
        if channel.paths.has_silent_loss {
            self.arm_probe_timeout(peer);
        }
        // Frames that these paths carried since they were suspected may be lost too.
        for number in (0..PATHS_MAX as u8).filter(|number| left & 1 << number != 0) {
            self.presume_path_lost(peer, PathId(number));
        }
    }

    /// Closes the broken path `number` to `peer`. What the path may have lost is sent by another
    /// path, if there is one, or by the next path that opens. The driver accesses no memory for the
    /// closed path any more.
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
        // The sender may believe that these bytes arrived by another path, whose payload was
        // discarded for the sake of this path.
        let mut cut: Vec<(u64, u64)> = channel
            .arrivals
            .out_of_order
            .extract_if(.., |out_of_order| out_of_order.path == number)
            .map(|out_of_order| out_of_order.range())
            .collect();
        if let Some(arriving) = &mut channel.arrivals.current {
            cut.extend(arriving.handle_break(number));
        }
        if let Some(state) = channel.paths.iter().find(|state| state.is_up) {
            channel.paths.properties = state.path;
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

    /// Treats everything in flight on `path` as possibly lost, although the path is still up.
    pub fn presume_path_lost(&mut self, peer: Peer, path: PathId) {
        let channel = &mut self.channels[peer.0 as usize];
        if channel.end.failed.is_none() {
            channel.lose_in_flight(path, self.now);
            channel.repeat_control_frames();
            self.mark_busy(peer);
        }
    }

    /// Advertises to `peer` another address at which this endpoint can be reached. The driver must
    /// repeat the advertisement on a new path if a path was lost.
    pub fn advertise_address(&mut self, peer: Peer, address: AdvertisedAddress) {
        let channel = &mut self.channels[peer.0 as usize];
        let address = ControlFrame::AddressAdvertisement(address);
        if channel.end.failed.is_none() && !channel.repairs.control_frames.contains(&address) {
            channel.repairs.control_frames.push(address);
            self.mark_busy(peer);
        }
    }

    /// Whether any path to `peer` is up.
    pub fn has_path(&self, peer: Peer) -> bool {
        self.channels[peer.0 as usize].paths.iter().any(|state| state.is_up)
    }
}
