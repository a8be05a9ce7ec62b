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

use super::log_end::LogWriter;

/// What earlier incarnations have done, from the beginning of the process on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlierCounts {
    /// Frames that were sent.
    pub sent: u64,
    /// Deliveries of the incarnation that got furthest.
    pub deliveries: u64,
}

/// What is to be sent again.
pub(super) struct SendAgain {
    /// Frames to processes outside of the unit.
    pub outside: u64,
    /// Of these there may be other frames that are not in this file.
    pub has_moved: bool,
    /// Frames inside of the unit that this incarnation has sent, with those before it began.
    pub unit_sent: u64,
    /// The same of the incarnation that got furthest before this one.
    pub unit_earlier: u64,
}

impl SendAgain {
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
