//! Connections on which nothing has been heard for too long.
//!
//! The system knows when it has last heard anything of the other end of a TCP connection, and it
//! answers for a process that computes, or is stopped. Streams between relays carry something every
//! second, so silence means that the way is broken. A connection to a rank is silent when nobody says
//! anything, so it is looked at only while something is under way to it.

use super::{Key, Loop, Phase};
use crate::sys;

/// A stream to another relay that is silent for this long is broken: four signs of life, or what
/// answers them.
const LANE_SILENCE_MILLIS_MAX: u64 = 4_000;
/// A rank that confirms nothing for this long is cut off: the kernel has tried some five times.
const RANK_SILENCE_MILLIS_MAX: u64 = 10_000;
/// How often that is looked at.
const LOOK_MILLIS: u64 = 1_000;
/// A clock that has not been looked at for this long: this process has been stopped,
const STALL_MILLIS: u64 = 2_000;
/// and judges nobody before everybody has had this long to be heard again.
const GRACE_MILLIS: u64 = 3_000;

/// See the module head.
#[derive(Default)]
pub struct Silences {
    watched: Vec<Key>,
    next_look_millis: u64,
    grace_until_millis: u64,
}

impl Silences {
    pub fn watch(&mut self, key: Key) {
        self.watched.push(key);
    }

    pub fn needs_clock(&self) -> bool {
        !self.watched.is_empty()
    }

    /// The clock is looked at `late_millis` after it was to be.
    pub fn note_tick(&mut self, now_millis: u64, late_millis: u64) {
        if late_millis > STALL_MILLIS {
            self.grace_until_millis = now_millis + GRACE_MILLIS;
        }
    }
}

impl Loop<'_> {
    pub(super) fn is_after_stall(&self, now_millis: u64) -> bool {
        now_millis < self.silences.grace_until_millis
    }

    pub(super) fn doom_silent(&mut self, now_millis: u64) {
        if now_millis < self.silences.next_look_millis || self.is_after_stall(now_millis) {
            return;
        }
        self.silences.next_look_millis = now_millis + LOOK_MILLIS;
        for key in std::mem::take(&mut self.silences.watched) {
            if self.is_worth_watching(key) {
                self.silences.watch(key);
            }
        }
    }

    /// Looks at a connection. False: not any more.
    fn is_worth_watching(&mut self, key: Key) -> bool {
        let Some(connection) = self.find(key) else { return false };
        let Some(transport) = &connection.transport else { return false };
        // QUIC notices for itself, after the same time.
        let Some(fd) = transport.fd() else { return false };
        let Some(silence) = sys::silence(fd) else { return false };
        let millis_max = match connection.phase {
            // While this side takes nothing in, the other side may be unable to say anything.
            Phase::Peer { .. } if connection.is_paused => return true,
            Phase::Peer { .. } => LANE_SILENCE_MILLIS_MAX,
            _ if !silence.is_awaited => {
                connection.is_watched = false;
                return false;
            }
            _ => RANK_SILENCE_MILLIS_MAX,
        };
        if silence.millis <= millis_max {
            return true;
        }
        self.doom(
            key.slot,
            format!("nothing has been heard of it for {} s", silence.millis / 1_000),
        );
        false
    }
}
