//! What earlier incarnations of a process have sent, and this one has to send again.
//!
//! Of the logs to processes outside of the recovery unit the file has all that was sent. Of those
//! inside of it only the number of frames is kept ([`landbridge_proto::log::unit`]), which is
//! counted before a frame is appended: a process that is killed in between comes to that frame
//! again, without a poll before it.
//!
//! What enters: each frame that is sent. What leaves: whether there are more to be sent again. What
//! may never happen: a process that has yet to send something again delivers what is new.

use std::io;
use std::sync::atomic::Ordering;

use landbridge_proto::log::layout::{MOVED_AT, UNIT_SENT_AT};

use super::log_end::LogWriter;
use super::open_logs::OpenLogs;

/// What earlier incarnations have done, from the beginning of the process on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlierCounts {
    /// Frames that were sent.
    pub sent: u64,
    /// Deliveries of the incarnation that got furthest.
    pub deliveries: u64,
}

/// What is to be sent again.
#[derive(Default)]
pub(super) struct SendAgain {
    /// Frames to processes outside of the unit.
    pub outside: u64,
    /// Of these there may be other frames that are not in this file.
    pub has_moved: bool,
    /// Frames inside of the unit that this incarnation has sent, with those before it began.
    pub unit_sent: u64,
    /// As many as the incarnation had sent that got furthest before this one.
    pub unit_earlier: u64,
}

impl SendAgain {
    /// What is to be sent again by a process whose earlier logs are open, and all that was sent.
    /// `may_lack`: some of that may not be in this file, if the process has moved to this node.
    pub fn find(open: &OpenLogs, unit_sent: u64, may_lack: bool) -> io::Result<(SendAgain, u64)> {
        let outside = open.writers.iter().filter(|(_, target)| !target.is_in_unit);
        let (mut sent, mut own) = (0, 0);
        for (_, target) in outside {
            sent += target.log.frames()?;
            own += target.log.chain.cursor().frames();
        }
        let word = |at: usize| open.head.word(open.owner.control() + at).load(Ordering::Relaxed);
        let has_moved = may_lack && word(MOVED_AT) != 0;
        let unit_earlier = word(UNIT_SENT_AT).max(unit_sent);
        let again = SendAgain { outside: sent - own, has_moved, unit_sent, unit_earlier };
        Ok((again, sent + unit_earlier))
    }

    /// Whether something is left to be sent again.
    #[inline]
    pub fn is_behind(&self) -> bool {
        self.outside > 0 || self.unit_sent < self.unit_earlier
    }

    /// Counts a frame inside of the unit that is about to be sent; returns whether no earlier
    /// incarnation has sent it.
    #[inline]
    pub fn note_in_unit(&mut self) -> bool {
        self.unit_sent += 1;
        self.unit_sent > self.unit_earlier
    }

    /// Counts a frame to a process outside of the unit, which is about to be compared with the log
    /// or appended to it. Returns whether earlier incarnations can have sent it there.
    #[inline]
    pub fn note_outside(&mut self, log: &LogWriter) -> io::Result<bool> {
        if self.outside == 0 {
            return Ok(true);
        }
        let is_there = !log.is_at_end()?;
        self.outside -= u64::from(is_there);
        Ok(is_there || self.has_moved)
    }
}
