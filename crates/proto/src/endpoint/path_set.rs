//! The paths of one channel, and which of them send.
//!
//! What enters: paths that open, change, break and are suspected. What leaves: for each path,
//! whether frames are sent by it, and which path is the best one for the next piece.
//!
//! What may never happen: no path sends although one is up.

use alloc::vec::Vec;
use core::ops::{Deref, DerefMut};

use super::operation::SentPiece;
use super::path_state::{PathProperties, PathState};
use crate::channel::PathId;

/// The paths of one channel, indexed by path number.
pub(super) struct PathSet {
    states: Vec<PathState>,
    /// The properties of the path that opened or changed last or, once a path has been closed, of
    /// the first path that is up. They decide how this endpoint asks for the rest of a message.
    pub properties: PathProperties,
    /// The number of paths by which frames are sent.
    senders: usize,
    /// The only sending path, if exactly one path sends and it is neither spare nor suspected.
    sole_sender: Option<PathId>,
    /// The suspected paths that send because no other path is up, as a bit mask by path number.
    suspected_senders: u8,
    /// Whether the transfer time of frames matters: see [`Self::is_measured`].
    is_measured: bool,
    /// Whether frames may overtake each other: see [`Self::may_reorder`].
    may_reorder: bool,
    /// Some path takes every frame at once: see [`PathProperties::unbounded`].
    has_unbounded: bool,
    /// The path by which this endpoint last received something from the peer: it works.
    pub last_heard_by: PathId,
    /// Some path that is up can lose frames without reporting the loss.
    pub has_silent_loss: bool,
    /// Some path that is up carries datagrams.
    pub has_datagrams: bool,
}

impl Default for PathSet {
    fn default() -> Self {
        Self {
            states: Vec::new(),
            properties: PathProperties::RELAY,
            senders: 0,
            sole_sender: None,
            suspected_senders: 0,
            is_measured: false,
            may_reorder: false,
            has_unbounded: false,
            last_heard_by: PathId(0),
            has_silent_loss: false,
            has_datagrams: false,
        }
    }
}

/// All paths, also those that are down.
impl Deref for PathSet {
    type Target = [PathState];

    fn deref(&self) -> &[PathState] {
        &self.states
    }
}

impl DerefMut for PathSet {
    fn deref_mut(&mut self) -> &mut [PathState] {
        &mut self.states
    }
}

impl PathSet {
    /// Replaces path `number` by a new one with the given properties. Returns whether no path was
    /// up before. [`Self::count_senders`] must follow.
    pub fn open(&mut self, number: PathId, path: PathProperties) -> bool {
        let was_cut_off = !self.states.iter().any(|state| state.is_up);
        let down = || PathState { is_up: false, ..PathState::new(path) };
        let paths = self.states.len().max(number.0 as usize + 1);
        self.states.resize_with(paths, down);
        self.states[number.0 as usize] = PathState::new(path);
        self.properties = path;
        was_cut_off
    }

    /// The state of path `path`, if the path is up.
    #[inline]
    pub fn path_state(&self, path: PathId) -> Option<&PathState> {
        self.states.get(path.0 as usize).filter(|state| state.is_up)
    }

    /// The paths by which frames are sent: of the paths that are up, those of the lowest rank. A
    /// spare path sends only if no other path is up, and a suspected path ranks below a spare path.
    fn sending(&self) -> impl Iterator<Item = &PathState> {
        let up = || self.states.iter().filter(|state| state.is_up);
        let lowest = up().map(PathState::rank).min();
        up().filter(move |state| Some(state.rank()) == lowest)
    }

    /// Whether frames are sent by several paths, so that each frame can choose a path.
    #[inline]
    pub fn has_choice(&self) -> bool {
        self.senders > 1
    }

    /// Whether transfer times matter: frames can choose between paths or are sent as datagrams.
    #[inline]
    pub fn is_measured(&self) -> bool {
        self.is_measured
    }

    /// Whether a frame that is sent later may arrive earlier, by another path or by the same path.
    /// If so, this endpoint sends no more than the peer's reorder window takes.
    #[inline]
    pub fn may_reorder(&self) -> bool {
        self.may_reorder
    }

    /// Whether some path takes every frame at once.
    #[inline]
    pub fn has_unbounded(&self) -> bool {
        self.has_unbounded
    }

    /// Computes which paths send. The endpoint must call this whenever paths have changed.
    /// Returns, as a bit mask by path number, the suspected paths that sent because no other path
    /// was up, and that now send no more.
    pub fn count_senders(&mut self) -> u8 {
        self.senders = self.sending().count();
        self.sole_sender = self.find_sole_sender();
        let are_suspected = self.sending().any(|state| state.is_suspected);
        let suspected =
            self.states.iter().enumerate().filter(|(_, state)| state.is_up && state.is_suspected);
        let suspected = suspected.fold(0, |all, (number, _)| all | 1 << number);
        let now = if are_suspected { suspected } else { 0 };
        let left = core::mem::replace(&mut self.suspected_senders, now) & suspected & !now;
        let has_datagrams = self.sending().any(|state| state.path.datagram.is_some());
        let has_unbounded = self.sending().any(|state| state.path.unbounded);
        self.has_unbounded = has_unbounded;
        self.is_measured = self.has_choice() || has_datagrams;
        // Frames that a suspected path carries may still arrive.
        let several =
            self.states.iter().filter(|state| state.is_up && !state.path.spare).count() > 1;
        self.may_reorder =
            several || self.is_measured || self.sending().any(|state| state.path.reorders);
        // Frames that a path carried before it became spare may still be lost.
        let mut up = self.states.iter().filter(|state| state.is_up);
        self.has_datagrams = up.clone().any(|state| state.flow.is_some());
        self.has_silent_loss = up.any(|state| state.path.silent_loss);
        left
    }

    fn find_sole_sender(&self) -> Option<PathId> {
        let is_sole = |state: &PathState| state.is_up && !state.path.spare && !state.is_suspected;
        let place = self.states.iter().position(is_sole).filter(|_| self.senders == 1)?;
        Some(PathId(place as u8))
    }

    /// Whether the channel needs the time.
    pub fn is_timed(&self) -> bool {
        self.is_measured || self.has_silent_loss
    }

    /// Whether any path sends frames.
    pub fn has_senders(&self) -> bool {
        self.senders > 0
    }

    /// Whether path `path` sends frames.
    #[inline]
    pub fn sends_by(&self, path: PathId) -> bool {
        self.sole_sender == Some(path)
            || self
                .path_state(path)
                .is_some_and(|state| self.sending().any(|it| core::ptr::eq(it, state)))
    }

    /// Whether the next piece, of `bytes` bytes, is best sent by `path`: no other sending path
    /// would finish all `rest` bytes that are left sooner. So a slow path never delays a message,
    /// and a short message takes the quickest path.
    pub fn prefers(&self, path: PathId, bytes: u64, rest: u64) -> bool {
        let Some(mine) = self.path_state(path) else {
            return false;
        };
        let finish = mine.finish_nanos(bytes);
        self.sending().all(|other| core::ptr::eq(other, mine) || finish <= other.finish_nanos(rest))
    }

    /// Whether address advertisements may be sent by `path`. Their arrival should be certain, and
    /// not every listener on the network should read them, so no datagram carries them as long as
    /// there is a path without datagrams.
    pub fn may_advertise_by(&self, path: PathId) -> bool {
        let is_sure = |state: &PathState| state.is_up && state.flow.is_none();
        let is_needed = || !self.states.iter().any(is_sure);
        self.path_state(path).is_some_and(|state| is_sure(state) || is_needed())
    }

    /// Paths with silent loss that keep order: when a frame arrives, all before it arrived or are
    /// lost.
    pub fn with_silent_loss(&self) -> Vec<PathId> {
        let numbered =
            self.states.iter().enumerate().map(|(number, state)| (PathId(number as u8), state));
        numbered
            .filter(|(_, state)| {
                state.is_up && state.path.silent_loss && state.path.datagram.is_none()
            })
            .map(|(path, _)| path)
            .collect()
    }

    /// Whether a path has sent only a part of a frame with bytes of operation `id`.
    pub fn holds(&self, id: u32) -> bool {
        self.holder(id).is_some()
    }

    fn holder(&self, id: u32) -> Option<usize> {
        self.states.iter().position(|state| state.held.and_then(SentPiece::op) == Some(id))
    }

    /// Records `sent` for when the path that holds a frame of operation `id` has sent it.
    pub fn after_flush(&mut self, id: u32, sent: SentPiece) {
        if let Some(state) = self.holder(id) {
            self.states[state].held = Some(sent);
        }
    }
}
