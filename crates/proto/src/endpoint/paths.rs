//! Opening, changing, breaking and closing the paths to a peer.
//!
//! What enters: the driver's reports on its paths, by path number. What leaves: retransmissions, by
//! other paths, of what a path may have lost, once the peer has reported what has arrived.
//!
//! What may never happen: anything is retransmitted before the peer has answered; memory is
//! accessed for a closed path.

use alloc::vec::Vec;

use super::channel_mut::ChannelMut;
use super::control_frame::ControlFrame;
use super::driver_interface::Memory;
use super::operation::SentPiece;
use super::path_state::PathProperties;
use crate::channel::{PATHS_MAX, PathId};
use crate::path::rate::DeliveryRate;
use crate::wire::kind_header::AdvertisedAddress;

// `PathSet::count_senders` uses one bit of a `u8` for each path.
const _: () = assert!(PATHS_MAX <= 8);

impl<M: Memory> ChannelMut<'_, M> {
    /// Opens a path to the peer under the driver's number `number`. Sizes that no frame can have
    /// are reduced to allowed ones. If an earlier path was lost, the peer is first asked what has
    /// arrived.
    ///
    /// # Panics
    /// If the number is not below [`PATHS_MAX`].
    pub fn open_path(&mut self, number: PathId, path: PathProperties) {
        assert!((number.0 as usize) < PATHS_MAX, "more paths than a channel can have");
        let channel = &mut *self.channel;
        let path = path.within_limits();
        let was_cut_off = channel.paths.open(number, path);
        self.count_senders();
        let channel = &mut *self.channel;
        if was_cut_off {
            channel.repeat_control_frames();
        }
        self.mark_busy();
    }

    /// Sets the properties of path `number`, if the path is up.
    pub fn set_path(&mut self, number: PathId, path: PathProperties) {
        let channel = &mut *self.channel;
        let state = channel.paths.get_mut(number.0 as usize);
        if let Some(state) = state.filter(|state| state.is_up) {
            let is_other = state.set_path(path.within_limits());
            channel.paths.properties = state.path;
            let ends = channel.paths.sends_by(number);
            self.count_senders();
            let channel = &mut *self.channel;
            if is_other {
                self.presume_path_lost(number);
            } else if ends && channel.paths.has_datagrams && !channel.paths.sends_by(number) {
                // Control frames that this path carried may not have arrived.
                channel.repeat_control_frames();
            }
            // A path that had nothing to carry may be the best one for the items that wait, and the
            // other paths leave them to it.
            self.mark_busy();
        }
    }

    /// Recomputes which paths send, after the paths have changed.
    fn count_senders(&mut self) {
        let channel = &mut *self.channel;
        let left = channel.paths.count_senders();
        self.schedule.set_timed(&mut channel.entry, channel.paths.is_timed());
        if channel.paths.has_silent_loss {
            self.arm_probe_timeout();
        }
        // Frames that these paths carried since they were suspected may be lost too.
        for number in (0..PATHS_MAX as u8).filter(|number| left & 1 << number != 0) {
            self.presume_path_lost(PathId(number));
        }
    }

    /// Closes the broken path `number`: see [`Endpoint::close_path`](super::Endpoint::close_path).
    /// Returns what it means for an operation that the path holds no part of a frame any more.
    pub(super) fn close_path(&mut self, number: PathId) -> SentPiece {
        let channel = &mut *self.channel;
        let Some(state) = channel.paths.get_mut(number.0 as usize).filter(|state| state.is_up)
        else {
            return SentPiece::Nothing;
        };
        state.is_up = false;
        let held = state.held.take();
        self.count_senders();
        let channel = &mut *self.channel;
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
        for (start, end) in cut {
            self.must_request_retransmission(start, end);
        }
        self.mark_busy();
        held.unwrap_or(SentPiece::Nothing)
    }

    /// Treats everything in flight on `path` as possibly lost, although the path is still up.
    pub fn presume_path_lost(&mut self, path: PathId) {
        let channel = &mut *self.channel;
        if channel.end.failed.is_none() {
            channel.lose_in_flight(path, self.schedule.now());
            channel.repeat_control_frames();
            self.mark_busy();
        }
    }

    /// Advertises to the peer another address at which this endpoint can be reached. The driver
    /// must repeat the advertisement on a new path if a path was lost.
    pub fn advertise_address(&mut self, address: AdvertisedAddress) {
        let channel = &mut *self.channel;
        let address = ControlFrame::AddressAdvertisement(address);
        if channel.end.failed.is_none() && !channel.repairs.control_frames.contains(&address) {
            channel.repairs.control_frames.push(address);
            self.mark_busy();
        }
    }

    /// Sets whether `path` is suspected. The driver suspects a path on which nothing is
    /// acknowledged although other paths go on. What a suspected path carried may be lost, and
    /// nothing is sent by it while there is another path, until the driver reports that it works
    /// again (`is_suspected` is false).
    pub fn suspect_path(&mut self, path: PathId, is_suspected: bool) {
        let channel = &mut *self.channel;
        let state = channel.paths.get_mut(path.0 as usize);
        let Some(state) = state.filter(|state| state.is_up && state.is_suspected != is_suspected)
        else {
            return;
        };
        state.is_suspected = is_suspected;
        // Earlier measurements of the rate no longer hold, and what was in flight on this path is
        // sent by others.
        state.rate = DeliveryRate::new();
        self.count_senders();
        if is_suspected {
            self.presume_path_lost(path);
        }
        self.mark_busy();
    }
}
