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
//! | `log_end` | both ends of a log |
//! | `deliveries` | what this process has delivered |
//! | `between_nodes` | logs of and to processes of other nodes |

mod between_nodes;
mod deliveries;
mod log_end;
mod window;

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering, fence};

use landbridge_proto::log::contact::agent_bell;
use landbridge_proto::log::layout::{
    DELIVERIES_END_AT, DELIVERIES_RELEASED_AT, HUGE_PAGES_AT, LOG_BYTES, LOGGED_PROCESSES_MAX,
    PARKED_AT, control_at, file_bytes, log_at, release_at, report_at,
};
use landbridge_proto::log::release::LogPositions;
use landbridge_proto::log::segment::{LogCursor, SegmentChain};
use rustix::fd::AsRawFd;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, recv, sendto,
    socket_with,
};

pub use between_nodes::TRANSFER_BYTES_MAX;
use between_nodes::{RemoteLogs, is_local};
use deliveries::{Deliveries, DeliveryCursor};
pub use log_end::FRAME_BYTES_MAX;
use log_end::{LogReader, LogWriter, full};
use window::{Mapped, Window};

/// Numbers of descriptors from here on do not change the numbers that the program sees.
const LOWEST_FD: i32 = 512;
/// Bytes of deliveries after which the memory of the process is counted again.
const COUNTED_BYTES: u64 = 1 << 20;

/// Whose logs these are.
struct LogOwner {
    process: usize,
    processes: usize,
    /// Name of the job, which the doorbells bear.
    job: Vec<u8>,
    /// Bytes that the logs of this process, and its deliveries, may take.
    bytes_max: u64,
    window: Window,
}

/// The logs of a process that has not opened the agent's file: how far they have come.
pub struct ClosedLogs {
    owner: LogOwner,
    writers: Vec<SegmentChain>,
    readers: Vec<LogCursor>,
    /// For each process of another node: what has arrived of it, and up to where it has the log to
    /// it.
    remote: Vec<(SegmentChain, LogCursor)>,
    deliveries: DeliveryCursor,
    turn: usize,
}

impl ClosedLogs {
    /// The beginning of the logs of `process` on a node of `processes`. `job`: its name.
    /// `bytes_max`: what the logs to other processes, and the deliveries, may take.
    ///
    /// # Errors
    /// There are no addresses for the logs, or there is no such process.
    pub fn new(
        process: usize,
        processes: usize,
        job: &[u8],
        bytes_max: u64,
    ) -> io::Result<ClosedLogs> {
        if process >= processes || processes > LOGGED_PROCESSES_MAX {
            return Err(foreign());
        }
        let (job, window) = (job.to_vec(), Window::reserve(processes)?);
        Ok(ClosedLogs {
            owner: LogOwner { process, processes, job, bytes_max, window },
            writers: vec![SegmentChain::new(LOG_BYTES); processes],
            readers: vec![LogCursor::START; processes],
            remote: vec![(SegmentChain::new(LOG_BYTES), LogCursor::START); processes],
            deliveries: DeliveryCursor::default(),
            turn: 0,
        })
    }

    /// Opens the logs in the agent's file. What earlier incarnations have sent and delivered from
    /// here on is done again.
    ///
    /// # Errors
    /// The file is another one, memory is short, or the file holds what cannot be there.
    pub fn open(self, file: BorrowedFd<'_>) -> io::Result<NodeLogs> {
        let ClosedLogs { owner, writers, readers, remote, deliveries, turn } = self;
        let (own, processes) = (owner.process, owner.processes);
        if rustix::fs::fstat(file)?.st_size as u64 != file_bytes(processes) {
            return Err(foreign());
        }
        let window = owner.window;
        let head = window.head(file)?;
        let has_huge_pages = head.word(HUGE_PAGES_AT as usize).load(Ordering::Relaxed) != 0;
        let map = |place, at| window.log(file, has_huge_pages, place, at);
        let writers = writers.into_iter().enumerate().map(|(to, chain)| {
            let log = map(to, log_at(processes, own, to))?;
            Ok(LogWriter::new(log, chain))
        });
        let writers = writers.collect::<io::Result<Vec<_>>>()?;
        let readers = readers.into_iter().enumerate().map(|(from, cursor)| {
            let log = map(processes + from, log_at(processes, from, own))?;
            Ok(LogReader::new(log, cursor))
        });
        let readers = readers.collect::<io::Result<Vec<_>>>()?;
        let remote = remote.into_iter().enumerate().map(|(process, (chain, confirmed))| {
            if is_local(&head, process) {
                return Ok(None);
            }
            let log = map(2 * processes + process, log_at(processes, process, own))?;
            let arrivals = LogWriter::new(log, chain);
            RemoteLogs::open(arrivals, confirmed, &writers[process]).map(Some)
        });
        let remote = remote.collect::<io::Result<Vec<_>>>()?;
        let first_local = remote.iter().position(Option::is_none).unwrap_or(own);
        let end = head.word(control_at(own) as usize + DELIVERIES_END_AT);
        let deliveries = Deliveries::new(window.deliveries(file, own)?, deliveries, end);
        let sent = writers.iter().map(LogWriter::frames).sum::<io::Result<u64>>()?;
        Ok(NodeLogs {
            doorbell: Doorbell::new(&owner, first_local)?,
            counts: EarlierCounts { sent, deliveries: deliveries.count()? },
            owner,
            head,
            writers,
            readers,
            has_unsent: true,
            remote,
            deliveries,
            turn,
            shown: None,
        })
    }
}

/// What an image holds of the logs of another node; nothing for a process of this node.
fn closed_remote(remote: Option<RemoteLogs>) -> (SegmentChain, LogCursor) {
    match remote {
        None => (SegmentChain::new(LOG_BYTES), LogCursor::START),
        Some(remote) => (remote.arrivals.chain, remote.confirmed),
    }
}

fn foreign() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "not the logs of this node")
}

/// The socket that wakes this process, and the addresses of those of the others.
struct Doorbell {
    socket: OwnedFd,
    all: Vec<SocketAddrUnix>,
    agent: SocketAddrUnix,
}

impl Doorbell {
    fn new(owner: &LogOwner, first_local: usize) -> io::Result<Doorbell> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        let socket = rustix::io::fcntl_dupfd_cloexec(&socket, LOWEST_FD).unwrap_or(socket);
        let address = |process: usize| {
            let process = format!("-{process}");
            let name = [b"landbridge-", &owner.job[..], process.as_bytes()].concat();
            Ok(SocketAddrUnix::new_abstract_name(&name)?)
        };
        let all = (0..owner.processes).map(address).collect::<io::Result<Vec<_>>>()?;
        bind(&socket, &all[owner.process])?;
        let name = agent_bell(&owner.job, first_local);
        let agent = SocketAddrUnix::new_abstract_name(&name)?;
        Ok(Doorbell { socket, all, agent })
    }

    #[cold]
    fn ring(&self, process: usize) {
        // A full socket means that the doorbell has been rung often enough; no socket means that
        // the process is not there, and its next incarnation looks by itself.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = sendto(&self.socket, b"!", flags, &self.all[process]);
    }
}

/// What earlier incarnations have done, from the beginning of the process on.
#[derive(Clone, Copy)]
struct EarlierCounts {
    sent: u64,
    deliveries: u64,
}

/// A process's ends of all logs of its node.
pub struct NodeLogs {
    owner: LogOwner,
    head: Mapped,
    writers: Vec<LogWriter>,
    readers: Vec<LogReader>,
    /// By process; `None`: a process of this node.
    remote: Vec<Option<RemoteLogs>>,
    /// There may be frames for processes of other nodes that were not sent.
    has_unsent: bool,
    deliveries: Deliveries,
    doorbell: Doorbell,
    counts: EarlierCounts,
    /// The log that is looked at first.
    turn: usize,
    /// The log of the frame that was shown, and its bytes.
    shown: Option<(usize, usize)>,
}

impl NodeLogs {
    /// Closes the logs between two polls, and reports to the agent how far they have come.
    pub fn close(self) -> ClosedLogs {
        // A later incarnation may have to send to another node what that node has not confirmed.
        let sent = |(writer, remote): (&LogWriter, &Option<RemoteLogs>)| match remote {
            None => writer.chain.cursor().position(),
            Some(remote) => remote.confirmed.position(),
        };
        let positions = LogPositions {
            sent: self.writers.iter().zip(&self.remote).map(sent).collect(),
            received: self.readers.iter().map(|reader| reader.cursor.position()).collect(),
            deliveries: self.deliveries.cursor.position,
        };
        let report = report_at(self.owner.processes, self.owner.process) as usize;
        for (place, word) in positions.words().enumerate() {
            self.head.word(report + 8 * place).store(word, Ordering::Release);
        }
        ClosedLogs {
            owner: self.owner,
            writers: self.writers.into_iter().map(|writer| writer.chain).collect(),
            readers: self.readers.iter().map(|reader| reader.cursor).collect(),
            remote: self.remote.into_iter().map(closed_remote).collect(),
            deliveries: self.deliveries.cursor,
            turn: self.turn,
        }
    }

    /// Sends a frame to a process of this node, and wakes the process if it sleeps.
    ///
    /// # Errors
    /// The frame is another one than an earlier incarnation has sent, or memory for logs is full.
    #[inline]
    pub fn send(&mut self, to: usize, front: &[u8], payload: &[IoSlice<'_>]) -> io::Result<()> {
        let writer = self
            .writers
            .get_mut(to)
            .ok_or_else(|| io::Error::other("a frame for a process that is not on this node"))?;
        let touched = writer.chain.touched();
        let release = || release_at(self.owner.processes, self.owner.process, to) as usize;
        let released = || self.head.release(release(), 0);
        writer.append(front, payload, released)?;
        if writer.chain.touched() != touched {
            self.check_memory()?;
        }
        if self.remote[to].is_some() {
            self.has_unsent = true;
            return Ok(());
        }
        fence(Ordering::SeqCst);
        if self.parked(to).load(Ordering::Relaxed) != 0 {
            self.doorbell.ring(to);
        }
        Ok(())
    }

    /// # Errors
    /// The logs and deliveries of this process take more than they may.
    #[cold]
    fn check_memory(&mut self) -> io::Result<()> {
        let released = control_at(self.owner.process) as usize + DELIVERIES_RELEASED_AT;
        self.deliveries.note_release(|known| self.head.release(released, known));
        let arrivals = self.remote.iter().flatten().map(|remote| &remote.arrivals);
        let logs: usize =
            self.writers.iter().chain(arrivals).map(|writer| writer.chain.touched()).sum();
        match logs as u64 + self.deliveries.bytes() > self.owner.bytes_max {
            true => Err(full("its share of recover_memory")),
            false => Ok(()),
        }
    }

    fn parked(&self, process: usize) -> &AtomicU32 {
        let word = self.head.word(control_at(process) as usize + PARKED_AT);
        // SAFETY: the lower half of an aligned word that is used as this flag alone.
        unsafe { &*std::ptr::from_ref(word).cast::<AtomicU32>() }
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
        Ok(self.shown.map(|(from, bytes)| self.readers[from].frame(bytes)))
    }

    #[inline]
    fn next_live(&mut self) -> io::Result<Option<(usize, usize)>> {
        for step in 0..self.readers.len() {
            let from = (self.turn + step) % self.readers.len();
            match self.readers[from].next()? {
                0 => (),
                bytes => return Ok(Some((from, bytes))),
            }
        }
        Ok(None)
    }

    #[cold]
    fn next_replayed(&mut self) -> io::Result<Option<(usize, usize)>> {
        let Some(from) = self.deliveries.replayed_source() else { return Ok(None) };
        let reader = self.readers.get_mut(from).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Some(reader.next()?).filter(|bytes| *bytes > 0).map(|bytes| (from, bytes)))
    }

    /// Removes the frame that [`Self::peek`] has shown, and notes its source.
    #[inline]
    pub fn consume(&mut self) {
        if let Some((from, bytes)) = self.shown.take() {
            self.deliveries.note_frame(from);
            self.readers[from].consume(bytes);
            self.turn = from + 1;
        }
    }

    /// Number of deliveries of the incarnation that got furthest, from the beginning of the
    /// process.
    pub fn delivery_count(&self) -> u64 {
        self.counts.deliveries
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
    ///
    /// # Errors
    /// There is no memory for more deliveries.
    #[inline]
    pub fn note_delivery(&mut self, polls: u64, micros: u64) -> io::Result<()> {
        let before = self.deliveries.cursor.position;
        let end = self.head.word(control_at(self.owner.process) as usize + DELIVERIES_END_AT);
        self.deliveries.write(polls, micros, end)?;
        match self.deliveries.cursor.position / COUNTED_BYTES != before / COUNTED_BYTES {
            true => self.check_memory(),
            false => Ok(()),
        }
    }

    /// Number of frames that earlier incarnations have sent, from the beginning of the process.
    pub fn sent_before(&self) -> u64 {
        self.counts.sent
    }

    /// Announces that this process will sleep on [`Self::fd`] until a frame arrives. Returns false
    /// if one has arrived: the caller must not sleep.
    pub fn prepare_park(&mut self) -> bool {
        self.parked(self.owner.process).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        matches!(self.peek(), Ok(None))
    }

    /// Records that this process is awake.
    pub fn unpark(&mut self) {
        self.parked(self.owner.process).store(0, Ordering::Relaxed);
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

impl std::fmt::Debug for NodeLogs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NodeLogs(fd {})", self.doorbell.socket.as_raw_fd())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use landbridge_proto::log::layout::LOCAL_AT;
    use landbridge_proto::wire::frame::HEADER_BYTES;

    use super::*;

    /// The memory file of a node, with the part of the agent.
    pub(super) struct Node {
        pub file: OwnedFd,
        job: String,
        processes: usize,
    }

    impl Node {
        /// All processes are on this node.
        pub fn new(name: &str, processes: usize) -> Node {
            let file = rustix::fs::memfd_create("logs", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, file_bytes(processes)).unwrap();
            let job = format!("test-{name}-{}", std::process::id());
            let node = Node { file, job, processes };
            node.set_local(&(0..processes).collect::<Vec<_>>());
            node
        }

        /// These processes are on this node, and no others.
        pub fn set_local(&self, local: &[usize]) {
            for process in 0..self.processes {
                let word = u64::from(local.contains(&process)).to_ne_bytes();
                let at = control_at(process) + LOCAL_AT as u64;
                rustix::io::pwrite(&self.file, &word, at).unwrap();
            }
        }

        pub fn begin(&self, process: usize, bytes_max: u64) -> NodeLogs {
            let job = self.job.as_bytes();
            let closed = ClosedLogs::new(process, self.processes, job, bytes_max).unwrap();
            closed.open(self.file.as_fd()).unwrap()
        }

        pub fn release(&self, from: usize, to: usize, position: u64) {
            let at = release_at(self.processes, from, to);
            for at in [at, at + 8] {
                rustix::io::pwrite(&self.file, &position.to_ne_bytes(), at).unwrap();
            }
        }

        pub fn report(&self, process: usize) -> LogPositions {
            let at = report_at(self.processes, process);
            LogPositions::from_words(self.processes, |place| {
                let mut word = [0; 8];
                rustix::io::pread(&self.file, &mut word, at + 8 * place as u64).unwrap();
                u64::from_ne_bytes(word)
            })
        }
    }

    /// The state that an image of a process holds, in the place of the one that is running.
    pub(super) fn copy(closed: &ClosedLogs) -> ClosedLogs {
        let LogOwner { process, processes, ref job, bytes_max, .. } = closed.owner;
        ClosedLogs {
            writers: closed.writers.clone(),
            readers: closed.readers.clone(),
            remote: closed.remote.clone(),
            deliveries: closed.deliveries,
            turn: closed.turn,
            ..ClosedLogs::new(process, processes, job, bytes_max).unwrap()
        }
    }

    /// Header and payload of a frame.
    fn frame(payload: &[u8]) -> Vec<u8> {
        let mut front = vec![7; HEADER_BYTES];
        front[..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        front
    }

    pub(super) fn send(logs: &mut NodeLogs, to: usize, payload: &[u8]) -> io::Result<()> {
        logs.send(to, &frame(payload), &[IoSlice::new(payload)])
    }

    pub(super) fn receive(logs: &mut NodeLogs) -> Option<Vec<u8>> {
        let payload = logs.peek().unwrap().map(|frame| frame[HEADER_BYTES..].to_vec());
        logs.consume();
        payload
    }

    #[test]
    fn the_next_incarnation_receives_and_sends_the_same_again() {
        let node = Node::new("again", 3);
        let begin = |process| node.begin(process, 1 << 30);
        let (mut zero, mut one, mut two) = (begin(0), begin(1), begin(2));
        send(&mut one, 0, b"first of one").unwrap();
        send(&mut two, 0, b"first of two").unwrap();
        let mut seen = vec![receive(&mut zero).unwrap(), receive(&mut zero).unwrap()];
        zero.note_delivery(4, 10).unwrap();
        send(&mut one, 0, &[9; 5000]).unwrap();
        seen.push(receive(&mut zero).unwrap());
        zero.note_delivery(1, 0).unwrap();
        send(&mut zero, 2, b"answer").unwrap();
        send(&mut two, 0, b"not delivered before the kill").unwrap();

        drop(zero);
        let mut zero = begin(0);
        assert_eq!((zero.delivery_count(), zero.sent_before()), (2, 1));
        assert_eq!(receive(&mut zero), None, "before the poll is known");
        assert_eq!(zero.next_delivery().unwrap(), Some([4, 2, 10]));
        let mut again = vec![receive(&mut zero).unwrap(), receive(&mut zero).unwrap()];
        assert_eq!(receive(&mut zero), None, "before its poll");
        assert_eq!(zero.next_delivery().unwrap(), Some([1, 1, 0]));
        again.push(receive(&mut zero).unwrap());
        assert_eq!(again, seen);
        assert_eq!(zero.next_delivery().unwrap(), None);
        send(&mut zero, 2, b"answer").unwrap();
        assert_eq!(receive(&mut zero).unwrap(), b"not delivered before the kill");
        send(&mut zero, 2, b"more").unwrap();
        assert_eq!(
            [receive(&mut two).unwrap(), receive(&mut two).unwrap()],
            [&b"answer"[..], b"more"]
        );
        assert_eq!(receive(&mut two), None);
    }

    #[test]
    fn frames_that_were_taken_at_a_poll_that_was_not_noted_come_again() {
        let node = Node::new("unnoted", 2);
        let (mut zero, mut one) = (node.begin(0, 1 << 30), node.begin(1, 1 << 30));
        send(&mut one, 0, b"a").unwrap();
        receive(&mut zero);
        drop(zero);
        let mut zero = node.begin(0, 1 << 30);
        assert_eq!((zero.delivery_count(), receive(&mut zero)), (0, Some(b"a".to_vec())));
    }

    #[test]
    fn another_frame_than_before_is_refused() {
        let node = Node::new("other", 2);
        let begin = || node.begin(0, 1 << 30);
        send(&mut begin(), 1, b"one").unwrap();
        let error = send(&mut begin(), 1, b"two").unwrap_err();
        assert!(
            error.to_string().contains("frame 0 to a process of its node is not what"),
            "{error}"
        );
        assert!(send(&mut begin(), 1, b"one longer").is_err());
        assert!(send(&mut begin(), 1, b"one").is_ok());
    }

    /// Both sides are closed and restored again and again, while the agent releases what both older
    /// images cover: nothing is lost, and memory is used again.
    #[test]
    fn images_release_memory_and_hold_what_is_needed() {
        let node = Node::new("images", 2);
        let mut zero = node.begin(0, 8 << 20);
        let mut one = node.begin(1, 8 << 20);
        // The kept images of process 1, oldest first: its logs, what they cover, frames received.
        let mut images: VecDeque<(ClosedLogs, u64, u32)> = VecDeque::new();
        let payload = |number: u32| vec![number as u8; 1000 + number as usize % 5000];
        for number in 0..6000 {
            send(&mut zero, 1, &payload(number)).unwrap();
            assert_eq!(receive(&mut one).unwrap(), payload(number));
            one.note_delivery(1, 0).unwrap();
            if number % 100 != 99 {
                continue;
            }
            let closed = one.close();
            let covered = node.report(1).received[0];
            assert_eq!(covered, closed.readers[0].position());
            images.push_back((copy(&closed), covered, number + 1));
            if images.len() > 2 {
                images.pop_front();
                node.release(0, 1, images[0].1);
            }
            one = closed.open(node.file.as_fd()).unwrap();
            if number % 300 == 299 {
                drop(one);
                let (image, _, received) = &images[0];
                one = copy(image).open(node.file.as_fd()).unwrap();
                for again in *received..=number {
                    assert_eq!(one.next_delivery().unwrap(), Some([1, 1, 0]));
                    assert_eq!(receive(&mut one).unwrap(), payload(again));
                }
                assert_eq!(one.next_delivery().unwrap(), None);
            }
        }
    }

    #[test]
    fn memory_is_bounded() {
        let node = Node::new("bounded", 2);
        let mut zero = node.begin(0, 1 << 20);
        let error = (0..2000).find_map(|_| send(&mut zero, 1, &[1; 1000]).err());
        assert!(error.is_some_and(|error| error.to_string().contains("share of recover_memory")));
    }

    #[test]
    fn who_sleeps_is_woken() {
        let node = Node::new("bell", 2);
        let (mut zero, mut one) = (node.begin(0, 1 << 30), node.begin(1, 1 << 30));
        let rings = |logs: &NodeLogs| {
            let fd = logs.fd();
            let mut fds =
                [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())).unwrap() == 1
        };
        send(&mut zero, 1, b"nobody sleeps").unwrap();
        assert!(!rings(&one) && !one.prepare_park(), "a frame waits");
        receive(&mut one);
        assert!(one.prepare_park());
        send(&mut zero, 1, b"wake").unwrap();
        assert!(rings(&one));
        one.unpark();
        one.drain_doorbell();
        assert!(!rings(&one) && receive(&mut one).is_some());
    }
}
