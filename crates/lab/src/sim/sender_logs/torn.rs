//! What a process leaves behind that is killed between two stores to the memory file of its node.
//!
//! The logs are those of the provider, and run as in a process. So a state in between is made from
//! the one behind: the last stores are undone that the process did before its kill, and what they
//! were to replace is filled with something else. Nobody has looked at the file in between.
//!
//! What enters: the file, and a log before and behind its last append. What leaves: the file, as a
//! kill within that append leaves it. What may never happen: something is undone that an earlier
//! incarnation has written.

use std::io;
use std::os::fd::BorrowedFd;

use landbridge_drive::link::node_log::NodeLogs;
use landbridge_proto::log::layout::{
    DELIVERIES_BYTES, DELIVERIES_END_AT, IS_BEING_WRITTEN, confirmed_at, control_at, deliveries_at,
    log_at,
};
use landbridge_proto::log::segment::{LogCursor, SLOT_BYTES};
use rustix::io::{pread, pwrite};

use super::{LogFault, LogWorld};

/// What lies where nothing was written yet: no word of a log that means something.
const OTHER_BYTES: [u8; 16] = [0xa5; 16];

/// Which stores of an append a killed process has not come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TornAppend {
    /// The one that announces the frame.
    Announcement,
    /// The stores of the end of the frame, of the word behind it, and of its announcement. If the
    /// frame begins a segment, the jump there is announced, and nothing follows it.
    Payload,
    /// As before. If the frame begins a segment, the jump is not announced either.
    Jump,
    /// What never happens: as `Payload`, and the frame is announced.
    TooEarly,
}

/// The end of a log before a process appends its last frame.
pub struct LastAppend<'a> {
    file: BorrowedFd<'a>,
    region: u64,
    before: LogCursor,
}

impl<'a> LastAppend<'a> {
    /// The log of one process to another, which ends at `before`. `None`: an earlier incarnation
    /// has appended more.
    pub fn begin(
        file: BorrowedFd<'a>,
        (from, to): (usize, usize),
        before: Option<LogCursor>,
    ) -> io::Result<Option<LastAppend<'a>>> {
        let (region, before) = (log_at(from, to), before.unwrap_or(LogCursor::START));
        let is_end = word(file, region + before.at() as u64)? == 0;
        Ok(is_end.then_some(LastAppend { file, region, before }))
    }

    /// Undoes stores of the append of a frame of this many bytes, behind which the log ends now.
    pub fn tear(&self, torn: TornAppend, behind: &LogCursor, bytes: usize) -> io::Result<()> {
        let frame = behind.at() - bytes.next_multiple_of(SLOT_BYTES);
        let write = |at: usize, bytes: &[u8]| pwrite(self.file, bytes, self.region + at as u64);
        if torn != TornAppend::TooEarly {
            write(frame, &[0; 8])?;
        }
        if torn == TornAppend::Announcement {
            return Ok(());
        }
        write(behind.at(), &OTHER_BYTES[..8])?;
        let middle = frame + bytes / 2 / 8 * 8;
        if middle > frame {
            write(middle, &OTHER_BYTES[..(frame + bytes - middle).min(OTHER_BYTES.len())])?;
        }
        if torn == TornAppend::Jump && behind.segment() != self.before.segment() {
            write(self.before.at(), &[0; 8])?;
        }
        Ok(())
    }
}

impl LogWorld {
    /// What a process is to leave behind of its last append, if it is killed right behind one.
    pub(super) fn draw_torn_append(&mut self) -> Option<TornAppend> {
        if self.planted == Some(LogFault::AnnouncedTooEarly) {
            return Some(TornAppend::TooEarly);
        }
        let torn = [TornAppend::Announcement, TornAppend::Payload, TornAppend::Jump];
        self.random.percent(60).then(|| self.random.pick(&torn))
    }

    /// A process is killed between two stores to words of its own, now and then. `is_between`: it
    /// has not noted its delivery.
    pub(super) fn tear_words(
        &mut self,
        (rank, logs): (usize, &NodeLogs),
        is_between: bool,
    ) -> io::Result<()> {
        let file = self.nodes[self.ranks[rank].node].file();
        if is_between && self.random.percent(50) {
            tear_delivery(file, rank)?;
            self.counts.count("deliveries torn by a kill");
        }
        for to in logs.remote_processes() {
            if logs.confirmed(to)? > 0 && self.random.percent(20) {
                tear_confirmed(file, (rank, to))?;
                self.counts.count("words of what others have torn by a kill");
            }
        }
        Ok(())
    }
}

/// A process is killed before it has noted a delivery: bytes of it are there already, and do not
/// count.
pub fn tear_delivery(file: BorrowedFd<'_>, process: usize) -> io::Result<()> {
    let end = word(file, control_at(process) + DELIVERIES_END_AT as u64)?;
    let at = end % DELIVERIES_BYTES as u64;
    let bytes = OTHER_BYTES.len().min(DELIVERIES_BYTES - at as usize);
    pwrite(file, &OTHER_BYTES[..bytes], deliveries_at(process) + at)?;
    Ok(())
}

/// A process is killed while it notes up to where a process of another node has its log.
pub fn tear_confirmed(file: BorrowedFd<'_>, (from, to): (usize, usize)) -> io::Result<()> {
    pwrite(file, &IS_BEING_WRITTEN.to_ne_bytes(), confirmed_at(from, to))?;
    Ok(())
}

fn word(file: BorrowedFd<'_>, at: u64) -> io::Result<u64> {
    let mut word = [0; 8];
    pread(file, &mut word, at)?;
    Ok(u64::from_ne_bytes(word))
}
