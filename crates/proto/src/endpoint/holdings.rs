//! What an endpoint holds for each peer, for whoever compares that with its bounds.
//!
//! Enters: nothing; all here only looks, and counts what stands in the channel, however long that takes. Leaves: numbers. The
//! table of bounds in `docs/ARCHITECTURE.md` says what they may be; the simulator asks all the time.

use super::way::Way;
use super::{Endpoint, Memory, Peer};
use crate::channel::{PathId, Retained, State};
use crate::wire::frame::{HEADER_BYTES, Kind};
use crate::wire::head::Head;

/// What is held for one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Number of the next new byte to it.
    pub sent: u64,
    /// Bytes of the channel that were sent and are not confirmed.
    pub unconfirmed: u64,
    /// Frames, or pieces of frames, that are kept for sending them again.
    pub kept: usize,
    /// Of those, how many are known to be lost.
    pub lost: usize,
    /// Operations and answers that wait for their turn.
    pub queue: usize,
    /// Operations that are done when the peer has confirmed them.
    pub awaiting: usize,
    /// Questions, answers and addresses that are to be said.
    pub errands: usize,
    /// Ranges that are to come again.
    pub spoilt: usize,
    /// Frames that come early and are on their way into what is kept of them.
    pub keeping: usize,
    /// Messages of which announced bytes are still to come.
    pub announced: usize,
    /// How much more may be under way beside each other than one after the other: see [`crate::channel::SPAN_BYTES_MAX`].
    pub may_overtake: bool,
}

/// What is under way by one path of datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flying {
    /// Bytes that its congestion control counts.
    pub counted: u64,
    /// Bytes of what is kept and flies by it.
    pub kept: u64,
    /// Datagrams of whose fate it keeps a note.
    pub notes: usize,
    /// Asks of it that are not answered.
    pub asks: usize,
    /// Bytes that may be under way.
    pub window: u64,
    /// Bytes of its largest datagram.
    pub datagram: u64,
}

impl<M: Memory> Endpoint<M> {
    /// What is held for `peer`. Nothing is for one that has failed.
    pub fn holdings(&self, peer: Peer) -> Holdings {
        let channel = &self.channels[peer.0 as usize];
        if channel.failed.is_some() {
            return Holdings::default();
        }
        Holdings {
            sent: channel.out.next(),
            unconfirmed: channel.out.unconfirmed(),
            kept: channel.out.retained(),
            lost: channel.out.kept().filter(|frame| frame.state == State::Lost).count(),
            queue: channel.queue.len(),
            awaiting: channel.awaiting.len(),
            errands: channel.errands.len(),
            spoilt: channel.spoilt.len(),
            keeping: channel.keeping.len(),
            announced: channel.announced.len(),
            may_overtake: channel.may_overtake(),
        }
    }

    /// Each memory out of which something may have to be sent to `peer` again, as often as there are pieces of it.
    pub fn kept_memory(&self, peer: Peer) -> impl Iterator<Item = &M> {
        let channel = &self.channels[peer.0 as usize];
        channel.out.kept().filter_map(|frame| frame.memory.as_ref())
    }

    /// What is under way by `path` of `peer`, if it is up and carries datagrams.
    pub fn flying(&self, peer: Peer, path: PathId) -> Option<Flying> {
        let channel = &self.channels[peer.0 as usize];
        let flow = channel.way(path).and_then(|way: &Way| way.flow.as_ref())?;
        let is_there = |frame: &&Retained<M>| frame.path == path && frame.state == State::Flying;
        let kept = channel.out.kept().filter(is_there).map(datagram_bytes).sum();
        Some(Flying { kept, ..flow.flying() })
    }

    /// How often this endpoint wants to be woken: once for each peer at most.
    pub fn alarms(&self) -> usize {
        self.wakes.len()
    }
}

/// Bytes of the datagram that carries this.
fn datagram_bytes<M>(frame: &Retained<M>) -> u64 {
    let is_piece = frame.length != frame.whole;
    let head = if is_piece { Head::size(Kind::Fragment, 0) } else { 0 };
    (HEADER_BYTES + head) as u64 + frame.length as u64
}
