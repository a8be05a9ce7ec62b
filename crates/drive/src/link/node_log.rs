//! Frames between recorded processes of one node, through append-only logs in shared memory.
//!
//! A *log* holds the frames of one process to another in the order in which they were sent, from
//! the first frame on. Logs lie in a memory file of the node's agent, so they outlive the
//! processes. A receiver reads frames in place. A later incarnation of the receiver reads them
//! again. A later incarnation of the sender produces them again: each frame is compared with the
//! one that is there and is not written twice, and from the end of the log on frames are appended.
//!
//! The file also holds, for each process, its *deliveries*: a determinant for each poll that had an
//! effect (polls since the last determinant, frames delivered, microseconds), and the process from
//! which each frame came. With these a later incarnation delivers the same frames at the same
//! polls.
//!
//! A frame begins at a multiple of [`SLOT`] bytes. The first eight bytes of its header (length and
//! kind, never 0) are written last and announce the frame; the eight bytes behind the last frame
//! are 0.
//!
//! What may never happen: a frame is seen before it is whole; a frame that was announced changes; a
//! side sleeps while a frame waits for it.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use landbridge_proto::node_log::{
    CONTROL_BYTES, DETERMINANTS_BYTES, LOG_BYTES, NODE_PROCESSES_MAX, SOURCES_BYTES, control_at,
    determinants_at, file_bytes, log_at, sources_at,
};
use landbridge_proto::wire::frame::HEADER_BYTES;
use rustix::fd::AsRawFd;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, recv, sendto,
    socket_with,
};

/// Frames begin at multiples of this many bytes: a cache line.
const SLOT: usize = 64;
/// Pages of a log that are prepared at once, in bytes.
const PREPARED_BYTES: usize = 1 << 20;
/// The longest frame, header included, in bytes.
pub const FRAME_BYTES_MAX: usize = 64 << 10;

const _: () = assert!(PREPARED_BYTES >= 2 * FRAME_BYTES_MAX);

/// A part of the file in the memory of this process.
struct Mapped {
    memory: NonNull<u8>,
    bytes: usize,
    /// The pages before this position are prepared.
    prepared: usize,
}

impl Mapped {
    fn new(file: BorrowedFd<'_>, at: u64, bytes: usize) -> io::Result<Mapped> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping replaces no memory.
        let memory = unsafe { mmap(std::ptr::null_mut(), bytes, protection, flags, file, at)? };
        let memory = NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapped { memory, bytes, prepared: 0 })
    }

    /// Lets the kernel map the pages that are needed next, many at once: each page that is first
    /// touched by a store costs more.
    #[inline]
    fn prepare(&mut self, at: usize) {
        if at + PREPARED_BYTES / 2 > self.prepared {
            self.prepare_more();
        }
    }

    #[cold]
    fn prepare_more(&mut self) {
        let bytes = PREPARED_BYTES.min(self.bytes - self.prepared);
        // SAFETY: a part of this mapping. If the kernel cannot prepare it, stores map each page.
        unsafe {
            let place = self.memory.add(self.prepared).as_ptr().cast();
            libc::madvise(place, bytes, libc::MADV_POPULATE_WRITE);
        }
        self.prepared += bytes;
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.bytes);
        // SAFETY: an aligned word inside the mapping.
        unsafe { self.memory.add(at).cast::<AtomicU64>().as_ref() }
    }

    /// The bytes of a frame that has been announced, which nobody changes any more.
    #[inline]
    fn frame(&self, at: usize, bytes: usize) -> &[u8] {
        assert!(at + bytes <= self.bytes);
        // SAFETY: inside the mapping, and unchanged from its announcement on.
        unsafe { std::slice::from_raw_parts(self.memory.add(at).as_ptr(), bytes) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this object has mapped the memory and is its only user.
        let _ = unsafe { rustix::mm::munmap(self.memory.as_ptr().cast(), self.bytes) };
    }
}

// SAFETY: the pointers lead to memory shared by design; all access goes through `&mut self`.
unsafe impl Send for Mapped {}

/// The end of a log that this process writes.
struct LogWriter {
    log: Mapped,
    at: usize,
    frames: u64,
}

impl LogWriter {
    /// Appends a frame, or compares it with the frame that an earlier incarnation has appended.
    #[inline]
    fn append(&mut self, front: &[u8], payload: &[IoSlice<'_>]) -> io::Result<()> {
        let bytes = front.len() + payload.iter().map(|piece| piece.len()).sum::<usize>();
        assert!(bytes <= FRAME_BYTES_MAX && front.len() >= HEADER_BYTES);
        let end = self.at + bytes.next_multiple_of(SLOT);
        if end + SLOT > self.log.bytes {
            return Err(full("a log of its messages"));
        }
        self.log.prepare(end);
        let announcement = u64::from_le_bytes(front[..8].try_into().unwrap_or_default());
        match self.log.word(self.at).load(Ordering::Acquire) {
            0 => self.write(front, payload, end, announcement),
            before => self.compare(front, payload, before == announcement)?,
        }
        (self.at, self.frames) = (end, self.frames + 1);
        Ok(())
    }

    fn write(&mut self, front: &[u8], payload: &[IoSlice<'_>], end: usize, announcement: u64) {
        // SAFETY: the frame ends inside the log, and only this process writes the log.
        unsafe {
            let mut to = self.log.memory.add(self.at + 8);
            for piece in std::iter::once(&front[8..]).chain(payload.iter().map(|piece| &piece[..]))
            {
                to.copy_from_nonoverlapping(NonNull::from(piece).cast(), piece.len());
                to = to.add(piece.len());
            }
        }
        // An earlier incarnation may have written a longer frame in part.
        self.log.word(end).store(0, Ordering::Relaxed);
        self.log.word(self.at).store(announcement, Ordering::Release);
    }

    #[cold]
    fn compare(&self, front: &[u8], payload: &[IoSlice<'_>], is_same: bool) -> io::Result<()> {
        let mut at = self.at;
        let mut matches = |piece: &[u8]| {
            at += piece.len();
            self.log.frame(at - piece.len(), piece.len()) == piece
        };
        if is_same && matches(front) && payload.iter().all(|piece| matches(piece)) {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "its frame {} to a process of its node is not what it sent there before",
                self.frames
            ),
        ))
    }

    /// Number of frames that earlier incarnations have appended.
    fn frames_before(&self) -> u64 {
        let (mut at, mut frames) = (0, 0);
        while at + SLOT <= self.log.bytes {
            let announcement = self.log.word(at).load(Ordering::Acquire);
            if announcement == 0 {
                break;
            }
            at += (HEADER_BYTES + announcement as u32 as usize).next_multiple_of(SLOT);
            frames += 1;
        }
        frames
    }
}

fn full(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::StorageFull, format!("{what} is full"))
}

/// The end of a log that this process reads.
struct LogReader {
    log: Mapped,
    at: usize,
}

impl LogReader {
    /// Bytes of the next frame; 0: there is none.
    #[inline]
    fn next(&self) -> io::Result<usize> {
        match self.log.word(self.at).load(Ordering::Acquire) {
            0 => Ok(0),
            announcement => {
                let bytes = HEADER_BYTES + announcement as u32 as usize;
                match bytes <= FRAME_BYTES_MAX && self.at + bytes + SLOT <= self.log.bytes {
                    true => Ok(bytes),
                    false => Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        "a frame longer than may be in a log",
                    )),
                }
            }
        }
    }

    #[inline]
    fn consume(&mut self, bytes: usize) {
        self.at += bytes.next_multiple_of(SLOT);
        self.log.prepare(self.at);
    }
}

/// What a process has delivered: for itself, while it runs, and for its next incarnation.
struct Deliveries {
    control: Mapped,
    determinants: Mapped,
    sources: Mapped,
}

impl Deliveries {
    const COUNT_AT: usize = 2 * SLOT;
    const PARKED_AT: usize = 0;
    const DETERMINANT: usize = 24;

    fn count(&self) -> u64 {
        self.control.word(Self::COUNT_AT).load(Ordering::Acquire)
    }

    fn word(&self, number: u64, word: usize) -> &AtomicU64 {
        self.determinants.word(number as usize * Self::DETERMINANT + 8 * word)
    }

    fn get(&self, number: u64) -> Option<[u64; 3]> {
        let is_there = number < self.count();
        is_there.then(|| [0, 1, 2].map(|word| self.word(number, word).load(Ordering::Relaxed)))
    }

    fn note(&mut self, number: u64, determinant: [u64; 3]) -> io::Result<()> {
        let end = (number as usize + 1) * Self::DETERMINANT;
        if end > self.determinants.bytes {
            return Err(full("its record of deliveries"));
        }
        self.determinants.prepare(end);
        for (word, value) in determinant.into_iter().enumerate() {
            self.word(number, word).store(value, Ordering::Relaxed);
        }
        self.control.word(Self::COUNT_AT).store(number + 1, Ordering::Release);
        Ok(())
    }

    /// The byte that names the source of a frame.
    ///
    /// # Errors
    /// There is no room for so many frames.
    fn source(&mut self, frame: u64) -> io::Result<&mut u8> {
        if frame as usize >= self.sources.bytes {
            return Err(full("its record of deliveries"));
        }
        self.sources.prepare(frame as usize);
        // SAFETY: inside the mapping; only this process uses these bytes.
        Ok(unsafe { self.sources.memory.add(frame as usize).as_mut() })
    }
}

/// A process's ends of all logs of its node.
pub struct NodeLogs {
    own: usize,
    writers: Vec<LogWriter>,
    readers: Vec<LogReader>,
    deliveries: Deliveries,
    /// The control words of each process.
    controls: Vec<Mapped>,
    doorbell: OwnedFd,
    doorbells: Vec<SocketAddrUnix>,
    /// Frames that this incarnation has received, and frames that all determinants cover which were
    /// there when it began.
    received: u64,
    replayed: u64,
    /// Frames that earlier incarnations have sent.
    sent_before: u64,
    /// Bytes that the logs of this process may take, and that they take.
    bytes_max: u64,
    bytes: u64,
    /// The log that is looked at first.
    turn: usize,
    /// The log of the frame that was shown, and its bytes.
    shown: Option<(usize, usize)>,
}

impl NodeLogs {
    /// Opens the logs of process `own` of `processes` in the agent's file. `name`: of the job.
    /// `bytes_max`: what the frames that this process sends may take.
    ///
    /// # Errors
    /// The file has another size, or memory is short.
    pub fn open(
        file: BorrowedFd<'_>,
        own: usize,
        processes: usize,
        name: &[u8],
        bytes_max: u64,
    ) -> io::Result<NodeLogs> {
        let size = rustix::fs::fstat(file)?.st_size as u64;
        if own >= processes || processes > NODE_PROCESSES_MAX || size != file_bytes(processes) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not the logs of this node"));
        }
        let all = 0..processes;
        let log = |from, to| Mapped::new(file, log_at(processes, from, to), LOG_BYTES);
        let control = |process| Mapped::new(file, control_at(process), CONTROL_BYTES);
        let deliveries = Deliveries {
            control: control(own)?,
            determinants: Mapped::new(file, determinants_at(processes, own), DETERMINANTS_BYTES)?,
            sources: Mapped::new(file, sources_at(processes, own), SOURCES_BYTES)?,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let doorbell = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        let address = |process| {
            let process = format!("-{process}");
            SocketAddrUnix::new_abstract_name(&[b"landbridge-", name, process.as_bytes()].concat())
        };
        bind(&doorbell, &address(own)?)?;
        let covered = |number| deliveries.get(number).map_or(0, |[_, frames, _]| frames);
        let replayed = (0..deliveries.count()).map(covered).sum();
        let writer = |to| Ok(LogWriter { log: log(own, to)?, at: 0, frames: 0 });
        let writers = all.clone().map(writer).collect::<io::Result<Vec<_>>>()?;
        Ok(NodeLogs {
            own,
            bytes_max,
            bytes: 0,
            sent_before: writers.iter().map(LogWriter::frames_before).sum(),
            writers,
            readers: all
                .clone()
                .map(|from| Ok(LogReader { log: log(from, own)?, at: 0 }))
                .collect::<io::Result<_>>()?,
            deliveries,
            controls: all.clone().map(control).collect::<io::Result<_>>()?,
            doorbell,
            doorbells: all.map(|it| Ok(address(it)?)).collect::<io::Result<_>>()?,
            received: 0,
            replayed,
            turn: 0,
            shown: None,
        })
    }

    /// Sends a frame to a process of this node, and wakes the process if it sleeps.
    ///
    /// # Errors
    /// The frame is another one than an earlier incarnation has sent, or the log is full.
    #[inline]
    pub fn send(&mut self, to: usize, front: &[u8], payload: &[IoSlice<'_>]) -> io::Result<()> {
        let writer = self
            .writers
            .get_mut(to)
            .ok_or_else(|| io::Error::other("a frame for a process that is not on this node"))?;
        let before = writer.at;
        writer.append(front, payload)?;
        self.bytes += (writer.at - before) as u64;
        if self.bytes > self.bytes_max {
            return Err(full("its share of recover_memory"));
        }
        fence(Ordering::SeqCst);
        if self.parked(to).load(Ordering::Relaxed) != 0 {
            self.ring_doorbell(to);
        }
        Ok(())
    }

    #[cold]
    fn ring_doorbell(&self, to: usize) {
        // A full socket means that the doorbell has been rung often enough; no socket means that
        // the process is not there, and its next incarnation looks by itself.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = sendto(&self.doorbell, b"!", flags, &self.doorbells[to]);
    }

    fn parked(&self, process: usize) -> &AtomicU32 {
        let word = self.controls[process].word(Deliveries::PARKED_AT);
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
            self.shown = match self.received < self.replayed {
                true => self.next_replayed()?,
                false => self.next_live()?,
            };
        }
        let readers = &self.readers;
        Ok(self.shown.map(|(from, bytes)| readers[from].log.frame(readers[from].at, bytes)))
    }

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
        let from = usize::from(*self.deliveries.source(self.received)?);
        let reader = self.readers.get(from).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Some(reader.next()?).filter(|bytes| *bytes > 0).map(|bytes| (from, bytes)))
    }

    /// Removes the frame that [`Self::peek`] has shown, and notes its source.
    ///
    /// # Errors
    /// There is no room for so many frames.
    #[inline]
    pub fn consume(&mut self) -> io::Result<()> {
        if let Some((from, bytes)) = self.shown.take() {
            *self.deliveries.source(self.received)? = from as u8;
            self.readers[from].consume(bytes);
            self.received += 1;
            self.turn = from + 1;
        }
        Ok(())
    }

    /// Number of determinants of the incarnation that got furthest.
    pub fn determinant_count(&self) -> u64 {
        self.deliveries.count()
    }

    /// Determinant `number`: polls since the last one, frames, microseconds.
    pub fn determinant(&self, number: u64) -> Option<[u64; 3]> {
        self.deliveries.get(number)
    }

    /// Notes determinant `number`.
    ///
    /// # Errors
    /// There is no room for so many determinants.
    pub fn note_determinant(&mut self, number: u64, determinant: [u64; 3]) -> io::Result<()> {
        self.deliveries.note(number, determinant)
    }

    /// Number of frames that earlier incarnations have sent.
    pub fn sent_before(&self) -> u64 {
        self.sent_before
    }

    /// Announces that this process will sleep on [`Self::fd`] until a frame arrives. Returns false
    /// if one has arrived: the caller must not sleep.
    pub fn prepare_park(&mut self) -> bool {
        self.parked(self.own).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        matches!(self.peek(), Ok(None))
    }

    /// Records that this process is awake.
    pub fn unpark(&mut self) {
        self.parked(self.own).store(0, Ordering::Relaxed);
    }

    /// The descriptor that becomes readable when a process rings the doorbell.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }

    /// Reads and discards what the doorbell has received.
    pub fn drain_doorbell(&mut self) {
        let mut bytes = [0u8; 8];
        while recv(&self.doorbell, &mut bytes[..], rustix::net::RecvFlags::DONTWAIT).is_ok() {}
    }
}

impl std::fmt::Debug for NodeLogs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NodeLogs(fd {})", self.doorbell.as_raw_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory_file(processes: usize) -> OwnedFd {
        let file = rustix::fs::memfd_create("logs", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, file_bytes(processes)).unwrap();
        file
    }

    /// Header and payload of a frame.
    fn frame(payload: &[u8]) -> Vec<u8> {
        let mut front = vec![7; HEADER_BYTES];
        front[..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        front
    }

    fn send(logs: &mut NodeLogs, to: usize, payload: &[u8]) -> io::Result<()> {
        logs.send(to, &frame(payload), &[IoSlice::new(payload)])
    }

    fn receive(logs: &mut NodeLogs) -> Option<Vec<u8>> {
        let payload = logs.peek().unwrap().map(|frame| frame[HEADER_BYTES..].to_vec());
        logs.consume().unwrap();
        payload
    }

    #[test]
    fn the_next_incarnation_receives_and_sends_the_same_again() {
        let name = format!("test-{}", std::process::id());
        let file = memory_file(3);
        let open = |own| NodeLogs::open(file.as_fd(), own, 3, name.as_bytes(), 1 << 30).unwrap();
        let (mut zero, mut one, mut two) = (open(0), open(1), open(2));
        send(&mut one, 0, b"first of one").unwrap();
        send(&mut two, 0, b"first of two").unwrap();
        send(&mut one, 0, &[9; 5000]).unwrap();
        let seen: Vec<_> = std::iter::from_fn(|| receive(&mut zero)).collect();
        assert_eq!(seen.len(), 3);
        zero.note_determinant(0, [4, 2, 10]).unwrap();
        zero.note_determinant(1, [1, 1, 0]).unwrap();
        send(&mut zero, 2, b"answer").unwrap();
        send(&mut two, 0, b"not delivered before the kill").unwrap();

        drop(zero);
        let mut zero = open(0);
        assert_eq!((zero.determinant_count(), zero.determinant(1)), (2, Some([1, 1, 0])));
        assert_eq!(zero.sent_before(), 1);
        let again: Vec<_> = (0..3).map(|_| receive(&mut zero).unwrap()).collect();
        assert_eq!(again, seen);
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
    fn another_frame_than_before_is_refused() {
        let name = format!("test-other-{}", std::process::id());
        let file = memory_file(2);
        let open = || NodeLogs::open(file.as_fd(), 0, 2, name.as_bytes(), 1 << 30).unwrap();
        send(&mut open(), 1, b"one").unwrap();
        let error = send(&mut open(), 1, b"two").unwrap_err();
        assert!(
            error.to_string().contains("frame 0 to a process of its node is not what"),
            "{error}"
        );
        assert!(send(&mut open(), 1, b"one longer").is_err());
        assert!(send(&mut open(), 1, b"one").is_ok());
    }

    #[test]
    fn who_sleeps_is_woken() {
        let name = format!("test-bell-{}", std::process::id());
        let file = memory_file(2);
        let open = |own| NodeLogs::open(file.as_fd(), own, 2, name.as_bytes(), 1 << 30).unwrap();
        let (mut zero, mut one) = (open(0), open(1));
        let rings = |logs: &NodeLogs| {
            let mut fds =
                [rustix::event::PollFd::new(&logs.doorbell, rustix::event::PollFlags::IN)];
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
