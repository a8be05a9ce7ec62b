//! Which logs of a process are open: those in which something was sent, or has arrived.
//!
//! What enters: the first frame to a process, and the control words by which others say that they
//! send to this one. What leaves: logs. What may never happen: a log is written that its reader
//! does not look for.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use landbridge_proto::log::counts::LogCount;
use landbridge_proto::log::layout::{
    BELL_AT, DELIVERIES_DISCARDED_AT, DELIVERIES_END_AT, DELIVERIES_PUNCHED_AT, IN_UNIT, LOCAL_AT,
    LOGGED_PROCESSES_MAX, PARKED_AT, SOURCES_AT, SOURCES_CHANGED_AT, TARGETS_AT, begins_at,
    control_at, discarded_at,
};
use landbridge_proto::log::segment::{LogCursor, SegmentChain};
use rustix::net::SocketAddrUnix;

use super::by_process::ByProcess;
use super::disk_part::open_log;
use super::log_end::{LogReader, LogWriter};
use super::pair_releases::{FileWords, PairWords, begin_reading};
use super::window::{Mapped, Window};

/// How often a reader looks whether what it begins with is kept.
const BEGINS_MAX: u32 = 1_000_000;

/// Whose logs these are.
#[derive(Clone)]
pub(super) struct LogOwner {
    pub process: usize,
    /// Name of the job, which the doorbells bear.
    pub job: Vec<u8>,
    /// Bytes that the logs of this process, and its deliveries, may take.
    pub bytes_max: u64,
}

impl LogOwner {
    /// Position of the control words of this process.
    pub fn control(&self) -> usize {
        control_at(self.process) as usize
    }
}

/// A process to which this one sends.
pub(super) struct LogTarget {
    pub log: LogWriter,
    pub is_remote: bool,
    /// Both are of the node's recovery unit.
    pub is_in_unit: bool,
}

/// The logs of this process that are open.
pub(super) struct OpenLogs {
    pub owner: LogOwner,
    pub head: Mapped,
    pub writers: ByProcess<LogTarget>,
    pub readers: ByProcess<LogReader>,
    /// What the control word said when the processes were looked for that send to this one.
    pub sources_seen: u64,
    /// What is above lies in it.
    pub window: Window,
}

/// Control words of a process, for its deliveries.
pub(super) struct DeliveryWords<'a> {
    /// Bytes of deliveries that were ever written.
    pub end: &'a AtomicU64,
    /// Up to where deliveries are given up because the ring, or memory, was full.
    pub discarded: &'a AtomicU64,
    /// The agent gives back pages.
    pub punched: &'a AtomicU64,
}

impl OpenLogs {
    /// No log is open.
    pub fn new(owner: LogOwner, head: Mapped, window: Window) -> OpenLogs {
        OpenLogs {
            owner,
            head,
            writers: ByProcess::default(),
            readers: ByProcess::default(),
            sources_seen: 0,
            window,
        }
    }

    pub fn open_writer(&mut self, to: usize, chain: SegmentChain) -> io::Result<()> {
        self.check_kept(self.owner.process, to, chain.cursor())?;
        let log = open_log(&mut self.window, &self.head, (self.owner.process, to))?;
        let is_remote = !self.is_local(to);
        self.head.add_to_set(self.owner.control() + TARGETS_AT, to);
        if !is_remote {
            self.announce(self.owner.process, to);
        }
        let is_in_unit = self.is_in_unit(to);
        self.writers
            .insert(to, LogTarget { log: LogWriter::new(log, chain), is_remote, is_in_unit });
        Ok(())
    }

    /// Adds to a number of this process, of which nobody else writes.
    #[inline]
    pub fn count(&self, count: LogCount, more: u64) {
        let word = self.count_word(count);
        word.store(word.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    /// The word of a number of this process.
    #[inline]
    pub fn count_word(&self, count: LogCount) -> &AtomicU64 {
        self.head.word(self.owner.control() + count.at())
    }

    /// The control words of this process's deliveries.
    #[inline]
    pub fn delivery_words(&self) -> DeliveryWords<'_> {
        let control = self.owner.control();
        DeliveryWords {
            end: self.head.word(control + DELIVERIES_END_AT),
            discarded: self.head.word(control + DELIVERIES_DISCARDED_AT),
            punched: self.head.word(control + DELIVERIES_PUNCHED_AT),
        }
    }

    /// Makes known that a log may be written.
    pub fn announce(&self, from: usize, to: usize) {
        let control = control_at(to) as usize;
        self.head.add_to_set(control + SOURCES_AT, from);
        // An earlier incarnation may have been killed between the two.
        self.head.word(control + SOURCES_CHANGED_AT).fetch_add(1, Ordering::Release);
    }

    pub fn open_reader(&mut self, from: usize, cursor: LogCursor) -> io::Result<usize> {
        let to = self.owner.process;
        self.check_kept(from, to, &cursor)?;
        let words = FileWords { head: &self.head, from, to, confirmed: None };
        let begins = || begin_reading(&words, cursor.position());
        // A writer that was about to discard the log takes that back once it sees this reader.
        let mut attempts = 0;
        while !begins() {
            attempts += 1;
            if attempts == BEGINS_MAX {
                return Err(not_kept());
            }
            std::thread::yield_now();
        }
        let (log, _) = open_log(&mut self.window, &self.head, (from, self.owner.process))?;
        Ok(self.readers.insert(from, LogReader::new(log, cursor)))
    }

    /// Says up to where this incarnation has a log.
    #[cold]
    pub fn note_consumed(&self, from: usize, position: u64) {
        let to = self.owner.process;
        FileWords { head: &self.head, from, to, confirmed: None }.store_consumed(position);
    }

    /// # Errors
    /// What lies from the cursor on was discarded, or is in the file of no node.
    pub fn check_kept(&self, from: usize, to: usize, cursor: &LogCursor) -> io::Result<()> {
        let discarded = self.head.word(discarded_at(from, to) as usize).load(Ordering::Acquire);
        let begins = self.head.word(begins_at(from, to) as usize).load(Ordering::Relaxed);
        if discarded.max(begins) > cursor.position() { Err(not_kept()) } else { Ok(()) }
    }

    /// The place of the log from a process, which may have been opened just now.
    pub fn reader(&mut self, from: usize) -> io::Result<usize> {
        match self.readers.place(from) {
            Some(place) => Ok(place),
            None if from >= LOGGED_PROCESSES_MAX => Err(io::ErrorKind::InvalidData.into()),
            None => self.open_reader(from, LogCursor::START),
        }
    }

    #[cold]
    pub fn open_sources(&mut self, changed: u64) -> io::Result<()> {
        for from in self.head.set(self.owner.control() + SOURCES_AT) {
            self.reader(from)?;
        }
        self.sources_seen = changed;
        Ok(())
    }

    /// The address of the doorbell of a process of this node.
    pub fn bell(&self, process: usize) -> io::Result<SocketAddrUnix> {
        let number = self.head.word(control_at(process) as usize + BELL_AT);
        bell_of(&self.owner, process, number.load(Ordering::Acquire))
    }

    pub fn parked(&self, process: usize) -> &AtomicU32 {
        let word = self.head.word(control_at(process) as usize + PARKED_AT);
        // SAFETY: the lower half of an aligned word that is used as this flag alone.
        unsafe { &*std::ptr::from_ref(word).cast::<AtomicU32>() }
    }

    /// Whether a process runs on this node.
    pub fn is_local(&self, process: usize) -> bool {
        self.head.word(control_at(process) as usize + LOCAL_AT).load(Ordering::Relaxed) != 0
    }

    /// Whether this process and another one begin again together.
    pub fn is_in_unit(&self, other: usize) -> bool {
        are_in_unit(&self.head, self.owner.process, other)
    }
}

/// Whether two processes begin again together.
pub(super) fn are_in_unit(head: &Mapped, one: usize, other: usize) -> bool {
    let is_in_unit = |process| {
        let word = head.word(control_at(process) as usize + LOCAL_AT);
        word.load(Ordering::Relaxed) == IN_UNIT
    };
    is_in_unit(one) && is_in_unit(other)
}

/// The address of a process's doorbell. `number`: its number.
pub(super) fn bell_of(owner: &LogOwner, process: usize, number: u64) -> io::Result<SocketAddrUnix> {
    let process = format!("-{process}-{number}");
    let name = [b"landbridge-", &owner.job[..], process.as_bytes()].concat();
    Ok(SocketAddrUnix::new_abstract_name(&name)?)
}

pub(super) fn no_such_process(process: usize) -> io::Error {
    let text = format!(
        "process {process} cannot have logs, which {LOGGED_PROCESSES_MAX} processes of a job can, \
         spawned ones among them: use recover_log=relay"
    );
    io::Error::other(text)
}

/// An incarnation begins where messages were discarded.
pub fn not_kept() -> io::Error {
    io::Error::other(
        "messages that it needs are not kept any more, because memory for them was full \
         (recover_memory)",
    )
}
