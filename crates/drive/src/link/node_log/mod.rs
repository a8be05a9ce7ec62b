//! Frames between recorded processes, through logs in shared memory.
//!
//! A *log* holds the frames of one process to another in the order in which they were sent
//! ([`landbridge_proto::log::segment`]). Logs lie in a memory file of the node's agent, so they
//! outlive the processes. Frames of other nodes arrive by a transport, and are appended to logs in
//! the file of this node. A receiver reads frames in place. A later incarnation of the receiver
//! reads them again. A later incarnation of the sender produces them again: each frame is compared
//! with the one that is there and is not written twice, and from the end of the log on frames are
//! appended. The agent releases what the kept images of both cover, and the sender writes there
//! again.
//!
//! The file also holds, for each process, its *deliveries*: for each poll that had an effect, which
//! frames it delivered. With these a later incarnation delivers the same frames at the same polls.
//!
//! While an image of the process is taken, its logs are closed ([`ClosedLogs`]): the image holds
//! how far they had come, and nothing of the file.
//!
//! What enters: frames, deliveries, the agent's file. What leaves: frames, in the order of an
//! earlier incarnation if there was one. What may never happen: a side sleeps while a frame waits
//! for it; an effect of a delivery is seen that the file does not hold.
//!
//! | module | holds |
//! |---|---|
//! | `window` | memory of the file in this process |
//! | `disk_part` | where a log goes on when memory is full |
//! | `by_process` | what belongs to each of some processes |
//! | `pair_releases` | up to where a log may be used again |
//! | `log_end` | both ends of a log |
//! | `open_logs` | which logs are open |
//! | `deliveries` | what this process has delivered |
//! | `mailbox` | what the agents know, and carry, of logs between nodes |
//! | `between_nodes` | logs of and to processes of other nodes |
//! | `memory` | what the logs of a process take |
//! | `image_report` | how far its logs have come before an image |
//! | `send_again` | what earlier incarnations have sent |
//! | `moved` | logs of a process whose image was taken on another node |
//! | `stability` | which frames may leave this node |
//!
//! A log is opened when a frame is sent, or arrives: a pair of processes that never speaks costs
//! nothing.

mod between_nodes;
mod by_process;
mod deliveries;
mod disk_part;
mod image_report;
mod log_end;
pub mod mailbox;
mod memory;
mod moved;
mod open_logs;
pub mod pair_releases;
mod send_again;
pub mod stability;
mod window;

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use landbridge_proto::log::contact::agent_bell;
use landbridge_proto::log::counts::LogCount;
use landbridge_proto::log::layout::{
    AGENT_BELL_AT, BELL_AT, DELIVERIES_DISCARDED_AT, DELIVERIES_END_AT, DELIVERIES_RELEASED_AT,
    IMAGES_WANTED_AT, LOGGED_PROCESSES_MAX, MEMORY_MAX_AT, REGION_BYTES, ROLLBACKS_AT, SOURCES_AT,
    SOURCES_CHANGED_AT, TARGETS_AT, UNIT_SENT_AT,
};
use landbridge_proto::log::memory_share::{LogExtent, MemoryShare};
use landbridge_proto::log::segment::{LogCursor, SegmentChain};
use rustix::fd::AsRawFd;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, recv, sendto,
    socket_with,
};

use between_nodes::{ClosedRemote, RemoteLogs};
pub use between_nodes::{
    TRANSFER_BYTES_MAX, began, digest_of_arrived, digest_of_sent, note_compared,
};
use by_process::ByProcess;
use deliveries::{Deliveries, DeliveryCursor};
use image_report::report_for_image;
pub use log_end::{FRAME_BYTES_MAX, OtherFrame};
use memory::{ask_if_long, bound_deliveries, bound_memory};
use moved::Moved;
pub use open_logs::not_kept;
use open_logs::{LogOwner, OpenLogs, bell_of, no_such_process};
use pair_releases::{FileWords, PairReleases};
pub use send_again::EarlierCounts;
use send_again::SendAgain;
use stability::{Stability, await_cut};
pub use stability::{clear_frames, leave_at_once};
pub use window::LogFiles;
use window::{Mapped, Window, WindowAddress};

/// Numbers of descriptors from here on do not change the numbers that the program sees.
const LOWEST_FD: i32 = 512;
/// Logs that are open for a process of another node: to it, and the one from it twice, to append
/// and to read.
const LOGS_PER_PEER: usize = 3;
/// Bytes of deliveries after which the memory of the process is counted again.
const COUNTED_BYTES: u64 = 1 << 20;

/// The logs of a process that has not opened the agent's file: how far they have come, for each
/// process with which it has exchanged something.
#[derive(Clone)]
pub struct ClosedLogs {
    owner: LogOwner,
    /// The file that was open, and where it was mapped.
    file: Option<FileState>,
    address: Option<WindowAddress>,
    /// The addresses are taken again.
    has_addresses: bool,
    /// Most processes with which this one can exchange something.
    peers_max: usize,
    writers: Vec<(usize, SegmentChain)>,
    readers: Vec<(usize, LogCursor)>,
    remote: Vec<(usize, ClosedRemote)>,
    deliveries: DeliveryCursor,
    turn: usize,
    /// Frames that were sent to others of the recovery unit.
    unit_sent: u64,
}

/// Which file of logs was open, and when.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileState {
    /// A number that no file of another node has.
    number: u64,
    /// How often the recovery unit of the node had begun again.
    rollbacks: u64,
}

impl FileState {
    fn of(head: &Mapped) -> FileState {
        let word = |at: u64| head.word(at as usize).load(Ordering::Relaxed);
        FileState { number: word(AGENT_BELL_AT), rollbacks: word(ROLLBACKS_AT) }
    }
}

impl ClosedLogs {
    /// The beginning of the logs of `process`. `job`: its name. `bytes_max`: what the logs to other
    /// processes, and the deliveries, may take. `peers_max`: with how many processes it can
    /// exchange something, which is a question of addresses.
    ///
    /// # Errors
    /// There can be no such process.
    pub fn new(
        process: usize,
        job: &[u8],
        bytes_max: u64,
        peers_max: usize,
    ) -> io::Result<ClosedLogs> {
        if process >= LOGGED_PROCESSES_MAX {
            return Err(no_such_process(process));
        }
        Ok(ClosedLogs {
            owner: LogOwner { process, job: job.to_vec(), bytes_max },
            file: None,
            address: None,
            has_addresses: false,
            peers_max,
            writers: Vec::new(),
            readers: Vec::new(),
            remote: Vec::new(),
            deliveries: DeliveryCursor::default(),
            turn: 0,
            unit_sent: 0,
        })
    }

    /// Has the logs opened at other addresses than before. Only the program of a real process sees
    /// its addresses.
    pub fn elsewhere(self) -> ClosedLogs {
        ClosedLogs { address: None, ..self }
    }

    /// Takes the addresses where the file was mapped, before other threads of the process go on.
    ///
    /// # Errors
    /// Something lies there.
    pub fn take_addresses(&mut self) -> io::Result<()> {
        if let Some(address) = self.address {
            address.take()?;
            self.has_addresses = true;
        }
        Ok(())
    }

    /// Opens the logs in the agent's files. What earlier incarnations have sent and delivered from
    /// here on is done again. The file of another node than before has what images hold of the logs
    /// ([`landbridge_proto::log::image_logs`]), and so has this file of the logs inside of a
    /// recovery unit that begins again.
    ///
    /// # Errors
    /// The file is another one, memory or addresses are short, or the file holds what cannot be
    /// there.
    pub fn open<'a>(self, files: impl Into<LogFiles<'a>>) -> io::Result<NodeLogs> {
        let files = files.into();
        let ClosedLogs { deliveries, turn, unit_sent, peers_max, .. } = self;
        let ClosedLogs { mut owner, mut writers, mut readers, mut remote, .. } = self;
        let mut window = match self.address {
            None => Window::new(files, LOGS_PER_PEER * peers_max)?,
            Some(address) => {
                if !self.has_addresses {
                    address.take()?;
                }
                Window::at(address, files)?
            }
        };
        let head = window.head()?;
        let memory_max = head.word(MEMORY_MAX_AT as usize).load(Ordering::Relaxed);
        if memory_max > 0 {
            owner.bytes_max = owner.bytes_max.min(memory_max);
        }
        let kept_from = deliveries_kept_from(&head, &owner);
        if kept_from > deliveries.position {
            return Err(not_kept());
        }
        // The agent may not have learnt of this wish, whose process was killed.
        head.word(owner.control() + IMAGES_WANTED_AT).store(0, Ordering::Release);
        let file = FileState::of(&head);
        let is_elsewhere = |before: FileState| before.number != file.number;
        if let Some(before) = self.file.filter(|before| *before != file) {
            let only_in_unit = !is_elsewhere(before);
            let moved = Moved { head: &head, window: &window, own: owner.process, only_in_unit };
            moved.place(&mut writers, &mut readers, &mut remote)?;
        }
        let end = head.word(owner.control() + DELIVERIES_END_AT);
        let deliveries =
            Deliveries::new(window.deliveries(owner.process)?, deliveries, kept_from, end);
        let count = deliveries.count()?;
        let mut logs = NodeLogs {
            doorbell: Doorbell::new(&owner, &head)?,
            counts: EarlierCounts { sent: 0, deliveries: count },
            again: SendAgain::default(),
            was_from_elsewhere: false,
            open: OpenLogs::new(owner, head, window),
            has_unsent: true,
            memory: MemoryShare::UNKNOWN,
            notice: Cell::default(),
            remote: ByProcess::default(),
            stability: Stability::default(),
            deliveries,
            turn,
            peers_max,
            shown: None,
        };
        for (to, chain) in writers {
            logs.open.open_writer(to, chain)?;
        }
        for (from, cursor) in readers {
            logs.open.open_reader(from, cursor)?;
        }
        for (process, closed) in remote {
            logs.open_remote(process, closed)?;
        }
        logs.open_earlier()?;
        // An image that was taken here holds all that was sent.
        let may_lack = self.file.is_none_or(is_elsewhere);
        (logs.again, logs.counts.sent) = SendAgain::find(&logs.open, unit_sent, may_lack)?;
        logs.open.count_word(LogCount::SentFrames).store(logs.counts.sent, Ordering::Relaxed);
        logs.open.count_word(LogCount::Deliveries).store(count, Ordering::Relaxed);
        Ok(logs)
    }
}

/// The socket that wakes this process, and the address of the agent's.
struct Doorbell {
    socket: OwnedFd,
    agent: SocketAddrUnix,
}

impl Doorbell {
    /// `head`: the words that the agent uses as well.
    fn new(owner: &LogOwner, head: &Mapped) -> io::Result<Doorbell> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        let socket = rustix::io::fcntl_dupfd_cloexec(&socket, LOWEST_FD).unwrap_or(socket);
        let number = head.word(owner.control() + BELL_AT);
        let next = number.load(Ordering::Relaxed) + 1;
        bind(&socket, &bell_of(owner, owner.process, next)?)?;
        number.store(next, Ordering::Release);
        let agent = head.word(AGENT_BELL_AT as usize).load(Ordering::Relaxed);
        let agent = SocketAddrUnix::new_abstract_name(&agent_bell(&owner.job, agent))?;
        Ok(Doorbell { socket, agent })
    }

    #[cold]
    fn ring(&self, bell: &SocketAddrUnix) {
        // A full socket means that the doorbell has been rung often enough; no socket means that
        // the process is not there, and its next incarnation looks by itself.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = sendto(&self.socket, b"!", flags, bell);
    }
}

/// A process's ends of all logs of its node.
pub struct NodeLogs {
    open: OpenLogs,
    /// Of processes of other nodes.
    remote: ByProcess<RemoteLogs>,
    stability: Stability,
    /// There may be frames for processes of other nodes that were not sent.
    has_unsent: bool,
    memory: MemoryShare,
    /// What [`NodeLogs::take_discard_notice`] returns.
    notice: Cell<Option<usize>>,
    deliveries: Deliveries,
    doorbell: Doorbell,
    counts: EarlierCounts,
    again: SendAgain,
    /// The last frame came from another node.
    was_from_elsewhere: bool,
    /// The place of the log that is looked at first.
    turn: usize,
    peers_max: usize,
    /// The place of the log of the frame that was shown, and its bytes.
    shown: Option<(usize, usize)>,
}

impl NodeLogs {
    /// Closes the logs between two polls, and reports to the agent how far they have come.
    pub fn close(mut self) -> ClosedLogs {
        // A log of which the image says nothing must be empty. If it cannot be opened, the image
        // does not fit to that of its sender.
        let changed = self.open.head.word(self.open.owner.control() + SOURCES_CHANGED_AT);
        let _ = self.open.open_sources(changed.load(Ordering::Acquire));
        report_for_image(&self);
        let writers = self.open.writers.into_iter().map(|(to, target)| (to, target.log.chain));
        let readers = self.open.readers.into_iter().map(|(from, reader)| (from, reader.cursor));
        let remote = self.remote.into_iter().map(|(process, remote)| (process, remote.close()));
        ClosedLogs {
            file: Some(FileState::of(&self.open.head)),
            unit_sent: self.again.unit_sent,
            owner: self.open.owner,
            address: Some(self.open.window.address()),
            has_addresses: false,
            peers_max: self.peers_max,
            writers: writers.collect(),
            readers: readers.collect(),
            remote: remote.collect(),
            deliveries: self.deliveries.cursor,
            turn: self.turn,
        }
    }

    // --- which logs are open

    /// Opens the logs that earlier incarnations have written, and those that they have read: they
    /// must not be discarded before they are read again.
    fn open_earlier(&mut self) -> io::Result<()> {
        let targets = self.open.head.set(self.open.owner.control() + TARGETS_AT);
        let sources = self.open.head.set(self.open.owner.control() + SOURCES_AT);
        for process in targets {
            self.open_target(process)?;
        }
        for process in sources {
            self.open_other_node(process)?;
            self.open.reader(process)?;
        }
        Ok(())
    }

    /// Opens the log to a process, if it is not open.
    #[cold]
    fn open_target(&mut self, to: usize) -> io::Result<()> {
        match to {
            LOGGED_PROCESSES_MAX.. => Err(no_such_process(to)),
            _ if self.open.writers.contains(to) => Ok(()),
            _ if self.open.is_local(to) => {
                self.open.open_writer(to, SegmentChain::new(REGION_BYTES))
            }
            _ => self.open_other_node(to),
        }?;
        self.check_memory();
        Ok(())
    }

    // --- frames

    /// Sends a frame to a process, and wakes the process if it sleeps.
    ///
    /// # Errors
    /// The frame is another one than an earlier incarnation has sent, memory for logs is full, or
    /// there can be no log to the process.
    #[inline]
    pub fn send(&mut self, to: usize, front: &[u8], payload: &[IoSlice<'_>]) -> io::Result<()> {
        if !self.open.writers.contains(to) {
            self.open_target(to)?;
        }
        let Some(target) = self.open.writers.get_mut(to) else { return Err(no_such_process(to)) };
        let before = LogExtent::of(&target.log.chain);
        let confirmed = || self.remote.get(to).map(|remote| remote.confirmed.position());
        let own = self.open.owner.process;
        let confirmed = if target.is_remote { confirmed() } else { None };
        let words = FileWords { head: &self.open.head, from: own, to, confirmed };
        let is_in_unit = target.is_in_unit;
        let (memory, notice) = (self.memory, &self.notice);
        let releases = PairReleases { words, is_in_unit, memory, notice, own };
        let mut is_new = true;
        if is_in_unit {
            is_new = self.again.note_in_unit();
            if is_new {
                let word = self.open.head.word(self.open.owner.control() + UNIT_SENT_AT);
                word.store(self.again.unit_sent, Ordering::Relaxed);
            }
        } else if !self.again.note_outside(&target.log)? {
            // An earlier incarnation has sent other frames, to other processes.
            return Err(unexpected_frame(front, payload));
        }
        is_new &= target.log.append(front, payload, &releases)?;
        let has_grown = memory.is_changed(before, LogExtent::of(&target.log.chain));
        let is_remote = target.is_remote;
        self.open.count(LogCount::SentFrames, is_new.into());
        if has_grown {
            self.check_memory();
        }
        if is_remote {
            self.has_unsent = true;
            return Ok(());
        }
        fence(Ordering::SeqCst);
        if self.open.parked(to).load(Ordering::Acquire) != 0 {
            self.doorbell.ring(&self.open.bell(to)?);
        }
        Ok(())
    }

    /// Counts what the logs and deliveries of this process take. From half of what they may take on
    /// it asks for images, so that something is released; beyond that, logs go on on disk, or are
    /// discarded.
    #[cold]
    fn check_memory(&mut self) {
        let released = self.open.owner.control() + DELIVERIES_RELEASED_AT;
        self.deliveries.note_release(|known| self.open.head.release(released, known));
        bound_deliveries(self);
        let (bytes_max, deliveries) = (self.open.owner.bytes_max, self.deliveries.bytes());
        let memory = bound_memory(self, bytes_max.saturating_sub(deliveries));
        self.open.count_word(LogCount::LogBytes).store(memory.taken, Ordering::Relaxed);
        self.memory = MemoryShare::of(memory.taken + deliveries, bytes_max, memory.logs);
        ask_if_long(self, &memory, deliveries);
    }

    /// A process whose log to this one, or from it, was discarded since this was asked, because
    /// memory was full: neither of both can be restarted before its next image. This process
    /// itself: its deliveries were, and it alone cannot.
    #[inline]
    pub fn take_discard_notice(&mut self) -> Option<usize> {
        self.notice.take()
    }

    /// The next frame, if one has arrived: the one that an earlier incarnation has received here,
    /// or one of any process. The frame stays until [`Self::consume`].
    ///
    /// # Errors
    /// A log holds an impossible frame.
    #[inline]
    pub fn peek(&mut self) -> io::Result<Option<&[u8]>> {
        if self.shown.is_none() {
            self.shown = match self.deliveries.is_replaying() {
                true => self.next_replayed()?,
                false => self.next_live()?,
            };
        }
        Ok(self.shown.map(|(place, bytes)| self.open.readers.at(place).frame(bytes)))
    }

    #[inline]
    fn next_live(&mut self) -> io::Result<Option<(usize, usize)>> {
        let changed = self.open.head.word(self.open.owner.control() + SOURCES_CHANGED_AT);
        let changed = changed.load(Ordering::Acquire);
        if changed != self.open.sources_seen {
            self.open.open_sources(changed)?;
        }
        let count = self.open.readers.len();
        for step in 0..count {
            let place = self.turn + step;
            let place = if place < count { place } else { place - count };
            match self.open.readers.at_mut(place).next()? {
                0 => (),
                bytes => return Ok(Some((place, bytes))),
            }
        }
        Ok(None)
    }

    #[cold]
    fn next_replayed(&mut self) -> io::Result<Option<(usize, usize)>> {
        let Some(from) = self.deliveries.replayed_source() else { return Ok(None) };
        let place = self.open.reader(from)?;
        let bytes = self.open.readers.at_mut(place).next()?;
        Ok((bytes > 0).then_some((place, bytes)))
    }

    /// Removes the frame that [`Self::peek`] has shown, and notes its source.
    #[inline]
    pub fn consume(&mut self) {
        if let Some((place, bytes)) = self.shown.take() {
            let from = self.open.readers.process_at(place);
            self.was_from_elsewhere = self.remote.len() > 0 && self.remote.contains(from);
            self.deliveries.note_frame(from);
            let reader = self.open.readers.at_mut(place);
            if reader.consume(bytes) {
                let position = reader.cursor.position();
                self.open.note_consumed(from, position);
            }
            self.turn = if place + 1 < self.open.readers.len() { place + 1 } else { 0 };
        }
    }

    /// What earlier incarnations have done.
    pub fn earlier(&self) -> EarlierCounts {
        self.counts
    }

    /// Begins to replay the next delivery of an earlier incarnation: polls since the last one,
    /// frames, microseconds. `None`: there is none.
    ///
    /// # Errors
    /// The record holds something else.
    pub fn next_delivery(&mut self) -> io::Result<Option<[u64; 3]>> {
        self.deliveries.begin_replayed()
    }

    /// Notes what this poll has delivered, before anything can follow from it.
    #[inline]
    pub fn note_delivery(&mut self, polls: u64, micros: u64) {
        await_cut(&self.open.head);
        let before = self.deliveries.cursor.position;
        let words = self.open.delivery_words();
        let frames = self.deliveries.write(polls, micros, &words);
        self.open.count(LogCount::Deliveries, 1);
        self.open.count(LogCount::DeliveredFrames, frames);
        self.open.count(LogCount::Polls, polls);
        self.open.count(LogCount::Micros, micros);
        if self.deliveries.cursor.position / COUNTED_BYTES != before / COUNTED_BYTES {
            self.check_memory();
        }
    }

    /// Announces that this process will sleep on [`Self::fd`] until a frame arrives. Returns false
    /// if one has arrived: the caller must not sleep.
    pub fn prepare_park(&mut self) -> bool {
        self.open.parked(self.open.owner.process).store(1, Ordering::Release);
        fence(Ordering::SeqCst);
        matches!(self.peek(), Ok(None))
    }

    /// Records that this process is awake.
    pub fn unpark(&mut self) {
        self.open.parked(self.open.owner.process).store(0, Ordering::Relaxed);
    }

    /// The descriptor that becomes readable when a process rings the doorbell.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.doorbell.socket.as_fd()
    }

    /// Reads and discards what the doorbell has received.
    pub fn drain_doorbell(&mut self) {
        let mut bytes = [0u8; 8];
        let flags = rustix::net::RecvFlags::DONTWAIT;
        while recv(&self.doorbell.socket, &mut bytes[..], flags).is_ok() {}
    }
}

/// Whether the last frame came from another node, as the next one will.
#[inline]
pub fn awaits_other_node(logs: &NodeLogs) -> bool {
    logs.was_from_elsewhere
}

/// Whether earlier incarnations have sent frames that this one has not sent yet.
pub fn is_behind(logs: &NodeLogs) -> bool {
    logs.again.is_behind()
}

/// Where the next frame of this process to another one goes in its log. `None`: that is not open.
pub fn end_of_log(logs: &NodeLogs, to: usize) -> Option<LogCursor> {
    logs.open.writers.get(to).map(|target| *target.log.chain.cursor())
}

/// The byte from which on the deliveries of a process are kept.
fn deliveries_kept_from(head: &Mapped, owner: &LogOwner) -> u64 {
    let discarded = head.word(owner.control() + DELIVERIES_DISCARDED_AT).load(Ordering::Acquire);
    discarded.max(head.release(owner.control() + DELIVERIES_RELEASED_AT, 0))
}

/// A frame to a process to which an earlier incarnation has sent none at that point.
#[cold]
fn unexpected_frame(front: &[u8], payload: &[IoSlice<'_>]) -> io::Error {
    let pieces = payload.iter().map(|piece| &piece[..]);
    let is = std::iter::once(front).chain(pieces).collect::<Vec<_>>().concat();
    io::Error::new(io::ErrorKind::InvalidData, OtherFrame { was: Vec::new(), is })
}

impl std::fmt::Debug for NodeLogs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NodeLogs(fd {})", self.doorbell.socket.as_raw_fd())
    }
}

#[cfg(test)]
mod tests;
