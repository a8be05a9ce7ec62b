//! Which frames may leave this node: those from which nothing follows that dies with the node.
//!
//! If ranks of this node can move to another one, another node must know how far all processes of
//! this node had come when a frame was appended, before the frame leaves ("pessimism at the border
//! of the failure unit"). A process asks its agent for that with a ticket. The agent reads how far
//! all processes have come, none of which delivers anything meanwhile; passes it on; and says up to
//! which ticket frames may leave.
//!
//! What enters: where the logs to other nodes end, and the agent's word. What leaves: tickets, and
//! up to where each log may leave. What may never happen: a frame leaves that was appended after
//! its ticket was drawn.

use std::sync::atomic::{Ordering, fence};

use landbridge_proto::log::layout::{
    CUT_AT, IS_CUTTING, NO_CUTS, NOTHING_WAITS, STABLE_ASKED_AT, STABLE_AT, STABLE_WANTED_AT,
};

use super::NodeLogs;
use super::window::Mapped;

/// The ticket that this process has drawn.
#[derive(Default)]
pub(super) struct Stability {
    asked: Option<u64>,
    /// The agent's word, as it was read last.
    stable: u64,
}

/// Lets frames leave for which another node knows enough, and asks for the others. Returns whether
/// some must wait.
pub fn clear_frames(logs: &mut NodeLogs) -> bool {
    let stable = logs.open.head.release(STABLE_AT as usize, logs.stability.stable);
    logs.stability.stable = stable;
    if stable == NOTHING_WAITS {
        logs.remote.iter_mut().for_each(|(_, remote)| remote.may_leave = u64::MAX);
        return false;
    }
    if logs.stability.asked.is_some_and(|ticket| ticket > stable) {
        return true;
    }
    if logs.stability.asked.take().is_some() {
        logs.remote.iter_mut().for_each(|(_, remote)| remote.may_leave = remote.asked_end);
    }
    draw_ticket(logs)
}

/// Whether frames of this process may leave as soon as they are appended.
pub fn leave_at_once(logs: &NodeLogs) -> bool {
    logs.stability.stable == NOTHING_WAITS
}

/// Draws a ticket for the frames that may not leave yet, if there are any.
fn draw_ticket(logs: &mut NodeLogs) -> bool {
    let mut waits = false;
    for (process, remote) in logs.remote.iter_mut() {
        let target = logs.open.writers.get(process);
        let written = target.map_or(0, |target| target.log.chain.cursor().position());
        remote.asked_end = remote.earlier_end.max(written);
        waits |= remote.asked_end > remote.may_leave;
    }
    if waits {
        let wanted = logs.open.head.word(STABLE_WANTED_AT as usize);
        let ticket = wanted.fetch_add(1, Ordering::AcqRel) + 1;
        let asked = logs.open.head.word(logs.open.owner.control() + STABLE_ASKED_AT);
        asked.store(ticket, Ordering::Release);
        logs.stability.asked = Some(ticket);
        logs.ring_agent();
    }
    waits
}

/// The word by which the agent says that it reads how far all processes of the node have come.
pub trait CutWord {
    /// [`NO_CUTS`], [`IS_CUTTING`] or another value.
    fn load(&self) -> u64;
    /// A sequentially consistent fence.
    fn fence(&self);
    /// Lets the agent work.
    fn pause(&self);
}

/// Waits while the agent reads how far all processes of the node have come, so that what it reads
/// fits together: what this process delivers now follows from frames that may have been sent since.
#[inline]
pub fn await_cut(word: &impl CutWord) {
    if word.load() == NO_CUTS {
        return;
    }
    // Either this process sees the cut, or the agent sees what the senders of the frames that were
    // delivered had noted before.
    word.fence();
    while word.load() == IS_CUTTING {
        word.pause();
    }
}

impl CutWord for Mapped {
    #[inline]
    fn load(&self) -> u64 {
        self.word(CUT_AT as usize).load(Ordering::Acquire)
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    fn pause(&self) {
        std::thread::yield_now();
    }
}
