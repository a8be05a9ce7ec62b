//! Logs of a process whose image was taken on another node, or whose recovery unit begins again.
//!
//! The file of this node has, for each log of the process, or for each inside of the unit, what
//! images hold of it: the log begins at some position, and its frames lie from the start of its
//! region on ([`landbridge_proto::log::image_logs`]). So the places that the image has of the log
//! are those of another file, or of an earlier time; positions are the same.
//!
//! What enters: how far the logs had come in the image. What leaves: the same positions, at their
//! places in this file. What may never happen: a process goes on where frames are missing.

use std::io;
use std::sync::atomic::Ordering;

use landbridge_proto::log::layout::{REGION_BYTES, begins_at};
use landbridge_proto::log::segment::{LogCursor, SegmentChain};

use super::between_nodes::ClosedRemote;
use super::log_end::LogWriter;
use super::open_logs::{are_in_unit, not_kept};
use super::window::{Mapped, Window};

/// The file of another node than before, or this node's after its unit has begun again.
pub(super) struct Moved<'a> {
    pub head: &'a Mapped,
    pub window: &'a Window,
    pub own: usize,
    /// Logs to and from processes outside of the unit are where they were.
    pub only_in_unit: bool,
}

impl Moved<'_> {
    /// Finds the places in this file: of logs that this process writes, of those that it reads, and
    /// of those between it and processes of other nodes.
    pub fn place(
        &self,
        writers: &mut [(usize, SegmentChain)],
        readers: &mut [(usize, LogCursor)],
        remote: &mut [(usize, ClosedRemote)],
    ) -> io::Result<()> {
        self.writers(writers)?;
        self.readers(readers)?;
        if !self.only_in_unit {
            self.remote(remote, writers);
        }
        Ok(())
    }

    fn has_moved(&self, other: usize) -> bool {
        !self.only_in_unit || are_in_unit(self.head, self.own, other)
    }

    fn writers(&self, writers: &mut [(usize, SegmentChain)]) -> io::Result<()> {
        let mut moved = writers.iter_mut().filter(|(to, _)| self.has_moved(*to));
        moved.try_for_each(|(to, chain)| {
            *chain = self.log(self.own, *to, chain.cursor())?.chain;
            Ok(())
        })
    }

    fn readers(&self, readers: &mut [(usize, LogCursor)]) -> io::Result<()> {
        let mut moved = readers.iter_mut().filter(|(from, _)| self.has_moved(*from));
        moved.try_for_each(|(from, cursor)| {
            *cursor = *self.log(*from, self.own, cursor)?.chain.cursor();
            Ok(())
        })
    }

    fn remote(&self, remote: &mut [(usize, ClosedRemote)], writers: &[(usize, SegmentChain)]) {
        for (process, closed) in remote {
            let sent = writers.iter().find(|(to, _)| to == process).map(|(_, chain)| chain);
            let at = sent.map_or(0, |chain| chain.cursor().position());
            // What was not compared before the image was taken is compared now.
            closed.began = Some(closed.began.map_or(at, |before| before.min(at)));
            closed.confirmed = LogCursor::beginning(self.begins(self.own, *process));
            let arrived = LogCursor::beginning(self.begins(*process, self.own));
            closed.arrivals = SegmentChain::beginning(REGION_BYTES, arrived);
        }
    }

    fn begins(&self, from: usize, to: usize) -> u64 {
        self.head.word(begins_at(from, to) as usize).load(Ordering::Acquire)
    }

    /// A log up to where it had come at `before`.
    fn log(&self, from: usize, to: usize, before: &LogCursor) -> io::Result<LogWriter> {
        let begin = LogCursor::beginning(self.begins(from, to));
        let at = |begin| -> io::Result<LogWriter> {
            let chain = SegmentChain::beginning(REGION_BYTES, begin);
            let mut log = LogWriter::new((self.window.look_at((from, to))?, None), chain);
            log.skip_to(before.position())?.then_some(log).ok_or_else(not_kept)
        };
        // Frames are counted from the beginning of the job.
        let kept = at(begin)?.chain.cursor().frames();
        at(begin.with_frames(before.frames().saturating_sub(kept)))
    }
}
