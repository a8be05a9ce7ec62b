//! The disk for the part of a relay's message logs that exceeds its memory: one file, written and
//! read by a thread of its own.
//!
//! What enters: orders of the relay ([`landbridge_proto::relay::DiskRequest`]). What leaves: their
//! results, and an eventfd that announces results. The relay bounds the number of waiting orders: a
//! few writes, and a few reads for each process that is replayed. Reads come first.
//!
//! The page cache must not hold the logs either: it would grow by everything that is written, and
//! displace the pages of the application. So the thread waits for segments that were written some
//! time ago, and drops their pages.
//!
//! The file has no name, so it disappears with the relay, however the relay ends. A segment lies in
//! a *slot* of the file; its CRC-32C is in memory. What may never happen: the relay waits for the
//! disk; a segment is returned that differs from what was written; the file takes more than was
//! allowed, by more than one slot.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use landbridge_proto::relay::{DiskRequest, SEGMENT_BYTES, SegmentId};
use rustix::event::EventfdFlags;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::checksum::Checksum;
use crate::sys;

/// The segments that may be in writeback from the page cache to the disk: enough to keep the disk
/// busy.
const WRITEBACK_SEGMENTS_MAX: usize = 16;

/// The result of an order.
#[derive(Debug)]
pub enum DiskCompletion {
    /// The segment has been written, or the error.
    Written(SegmentId, io::Result<()>),
    /// The segment has been read as it was written, or the error.
    Read(SegmentId, io::Result<Vec<u8>>),
}

/// The disk of a relay: see the module documentation.
pub struct Disk {
    shared: Arc<DiskShared>,
    bytes_max: u64,
}

struct DiskShared {
    orders: Mutex<DiskQueue>,
    work: Condvar,
    done: Mutex<Vec<DiskCompletion>>,
    completion_fd: OwnedFd,
}

#[derive(Default)]
struct DiskQueue {
    reads: VecDeque<DiskRequest>,
    others: VecDeque<DiskRequest>,
    is_closed: bool,
}

impl Disk {
    /// Creates a file in `directory` that may take `bytes_max` bytes, and starts its thread. The
    /// thread inherits the signal mask of this thread.
    ///
    /// # Errors
    /// If the file or the thread cannot be created.
    pub fn open(directory: &Path, bytes_max: u64) -> io::Result<Self> {
        let file = open_unnamed(directory)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let completion_fd = rustix::event::eventfd(0, flags)?;
        let (orders, work, done) = Default::default();
        let shared = Arc::new(DiskShared { orders, work, done, completion_fd });
        let worker = DiskWorker::new(file, shared.clone());
        std::thread::Builder::new().name("record".into()).spawn(move || worker.run())?;
        Ok(Self { shared, bytes_max })
    }

    /// The most bytes that the file may take.
    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// The eventfd, which is readable when results are available.
    pub fn completion_fd(&self) -> &OwnedFd {
        &self.shared.completion_fd
    }

    /// Queues an order.
    pub fn submit(&self, order: DiskRequest) {
        let mut orders = lock(&self.shared.orders);
        match order {
            DiskRequest::Read(..) => orders.reads.push_back(order),
            _ => orders.others.push_back(order),
        }
        self.shared.work.notify_one();
    }

    /// The results since the last call.
    pub fn take_completions(&self) -> Vec<DiskCompletion> {
        let _ = rustix::io::read(&self.shared.completion_fd, &mut [0; 8]);
        std::mem::take(&mut *lock(&self.shared.done))
    }
}

impl Drop for Disk {
    /// The thread is not joined, because it may be waiting for a disk that does not answer.
    fn drop(&mut self) {
        lock(&self.shared.orders).is_closed = true;
        self.shared.work.notify_one();
    }
}

/// Locks a mutex. Nothing that holds a lock here can panic; if it did, the protected data would
/// still be valid.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The slot of a segment in the file.
struct DiskSlot {
    number: u64,
    bytes: usize,
    sum: u32,
}

/// The state that the thread owns.
struct DiskWorker {
    file: File,
    shared: Arc<DiskShared>,
    slots: BTreeMap<SegmentId, DiskSlot>,
    /// The unused slots before `end`.
    free: Vec<u64>,
    end: u64,
    /// The offsets of the segments in writeback, in the order of writing.
    in_writeback: VecDeque<u64>,
}

impl DiskWorker {
    fn new(file: File, shared: Arc<DiskShared>) -> Self {
        let (slots, free, in_writeback) = Default::default();
        Self { file, shared, slots, free, end: 0, in_writeback }
    }

    fn run(mut self) {
        while let Some(order) = self.next() {
            let done = match order {
                DiskRequest::Write(id, bytes) => {
                    Some(DiskCompletion::Written(id, self.write(id, &bytes)))
                }
                DiskRequest::Read(id, length, into) => {
                    Some(DiskCompletion::Read(id, self.read(id, length, into)))
                }
                DiskRequest::Delete(id) => {
                    self.forget(id);
                    None
                }
            };
            if let Some(done) = done {
                lock(&self.shared.done).push(done);
                let _ = rustix::io::write(&self.shared.completion_fd, &1u64.to_ne_bytes());
            }
        }
    }

    fn next(&self) -> Option<DiskRequest> {
        let mut orders = lock(&self.shared.orders);
        loop {
            if orders.is_closed {
                return None;
            }
            let order = orders.reads.pop_front();
            if let Some(order) = order.or_else(|| orders.others.pop_front()) {
                return Some(order);
            }
            orders = self.shared.work.wait(orders).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn write(&mut self, id: SegmentId, bytes: &[u8]) -> io::Result<()> {
        let number = self.free.pop().unwrap_or(self.end);
        self.end = self.end.max(number + 1);
        let at = number * SEGMENT_BYTES as u64;
        if let Err(error) = self.file.write_all_at(bytes, at) {
            self.free.push(number);
            return Err(error);
        }
        self.start_writeback(at);
        let sum = Checksum::Crc32c.of(bytes);
        self.slots.insert(id, DiskSlot { number, bytes: bytes.len(), sum });
        Ok(())
    }

    /// Starts writeback of a segment from the page cache to the disk.
    fn start_writeback(&mut self, at: u64) {
        sys::begin_writeback(&self.file, at, SEGMENT_BYTES as u64);
        self.in_writeback.push_back(at);
        if self.in_writeback.len() > WRITEBACK_SEGMENTS_MAX
            && let Some(first) = self.in_writeback.pop_front()
        {
            sys::drop_written_pages(&self.file, first, SEGMENT_BYTES as u64);
        }
    }

    fn read(&self, id: SegmentId, length: usize, mut into: Vec<u8>) -> io::Result<Vec<u8>> {
        let torn = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_string());
        let slot = self.slots.get(&id).filter(|slot| slot.bytes == length);
        let slot = slot.ok_or_else(|| torn("no such segment has been written"))?;
        into.resize(length, 0);
        let at = slot.number * SEGMENT_BYTES as u64;
        self.file.read_exact_at(&mut into, at)?;
        sys::drop_written_pages(&self.file, at, SEGMENT_BYTES as u64);
        match Checksum::Crc32c.of(&into) == slot.sum {
            true => Ok(into),
            false => Err(torn("what the disk gives back is not what was written: its check fails")),
        }
    }

    fn forget(&mut self, id: SegmentId) {
        let Some(slot) = self.slots.remove(&id) else { return };
        self.free.push(slot.number);
        // The disk space is released, because others may need it sooner. Where this is not
        // possible, the slot is used again.
        let at = slot.number * SEGMENT_BYTES as u64;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fallocate(&self.file, flags, at, SEGMENT_BYTES as u64);
    }
}

/// Opens a file without a name.
fn open_unnamed(directory: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    match rustix::fs::open(directory, flags | OFlags::TMPFILE, mode) {
        Ok(file) => return Ok(file.into()),
        // Some file systems and kernels do not support such files.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => (),
        Err(error) => return Err(error.into()),
    }
    let name = u64::from_le_bytes(sys::random()?);
    let path = directory.join(format!("landbridge-record-{name:016x}"));
    let file = rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
    std::fs::remove_file(&path)?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn done(disk: &Disk) -> DiskCompletion {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(done) = disk.take_completions().pop() {
                return done;
            }
            assert!(Instant::now() < deadline, "the disk does not answer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn write(disk: &Disk, id: u64, bytes: &[u8]) -> io::Result<()> {
        disk.submit(DiskRequest::Write(SegmentId(id), Arc::new(bytes.to_vec())));
        match done(disk) {
            DiskCompletion::Written(SegmentId(other), result) if other == id => result,
            other => panic!("{other:?}"),
        }
    }

    fn read(disk: &Disk, id: u64, length: usize) -> io::Result<Vec<u8>> {
        disk.submit(DiskRequest::Read(SegmentId(id), length, Vec::new()));
        match done(disk) {
            DiskCompletion::Read(SegmentId(other), result) if other == id => result,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_written_is_read_again_and_slots_are_used_again() {
        let directory = std::env::temp_dir();
        let disk = Disk::open(&directory, 1 << 30).unwrap();
        let content = |id: u64| vec![id as u8 + 1; SEGMENT_BYTES - id as usize];
        for id in 0..5 {
            write(&disk, id, &content(id)).unwrap();
        }
        disk.submit(DiskRequest::Delete(SegmentId(2)));
        write(&disk, 7, &content(7)).unwrap();
        for id in [0, 1, 3, 4, 7] {
            assert!(read(&disk, id, SEGMENT_BYTES - id as usize).unwrap() == content(id), "{id}");
        }
        assert!(read(&disk, 2, SEGMENT_BYTES - 2).is_err(), "it is forgotten");
        assert!(read(&disk, 1, 5).is_err(), "another length");
    }

    fn worker(file: File) -> DiskWorker {
        let completion_fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (orders, work, done) = Default::default();
        let shared = Arc::new(DiskShared { orders, work, done, completion_fd });
        DiskWorker::new(file, shared)
    }

    #[test]
    fn what_is_torn_is_not_handed_out() {
        let mut worker = worker(open_unnamed(&std::env::temp_dir()).unwrap());
        let bytes: Vec<u8> = (0..SEGMENT_BYTES).map(|at| at as u8).collect();
        worker.write(SegmentId(0), &bytes).unwrap();
        worker.write(SegmentId(1), &bytes).unwrap();
        assert_eq!(rustix::fs::fstat(worker.file.as_fd()).unwrap().st_nlink, 0, "it has no name");
        for (at, byte) in [(0, 1), (SEGMENT_BYTES - 1, 0), (SEGMENT_BYTES / 2, 7)] {
            worker.file.write_all_at(&[byte], at as u64).unwrap();
            let error = worker.read(SegmentId(0), SEGMENT_BYTES, Vec::new()).unwrap_err();
            assert!(error.to_string().contains("check fails"), "{error}");
            worker.file.write_all_at(&bytes[at..at + 1], at as u64).unwrap();
        }
        assert!(worker.read(SegmentId(0), SEGMENT_BYTES, Vec::new()).unwrap() == bytes);
        worker.file.set_len(SEGMENT_BYTES as u64 + 5).unwrap();
        assert!(worker.read(SegmentId(1), SEGMENT_BYTES, Vec::new()).is_err(), "it is cut short");
    }

    #[test]
    fn a_full_disk_says_so_and_keeps_what_it_has() {
        let full = File::options().read(true).write(true).open("/dev/full").unwrap();
        let mut worker = worker(full);
        let error = worker.write(SegmentId(0), &[1; 100]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(Disk::open(Path::new("/nonexistent"), 1).is_err());
    }
}
