//! Standard input of rank 0: keeps what rank 0 has received, so that the next incarnation of rank 0
//! receives the same.
//!
//! In: bytes from the launcher, in order; incarnations of the rank, each of which reads from the
//! first byte or from its image's position on. Out: bytes into the pipe of the present incarnation,
//! and the count of bytes that no incarnation has received before, for which the launcher then
//! sends more.
//!
//! For a rank that is not restarted nothing is kept. For a rank that may be restarted, the last
//! [`STDIN_RETAINED_BYTES_MAX`] are kept, and what an incarnation may still need.
//!
//! What may never happen: an incarnation receives other bytes at a position than the incarnation
//! before; the agent waits for a reader.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

/// Most bytes that are kept of what some incarnation has received.
pub const STDIN_RETAINED_BYTES_MAX: usize = 64 << 20;

/// Standard input of one rank.
#[derive(Default)]
pub struct Stdin {
    /// The agent's end of the rank's pipe; `None`: the rank reads no more input.
    to: Option<OwnedFd>,
    /// Bytes from byte `first` on.
    retained: VecDeque<u8>,
    first: u64,
    /// Bytes that the present incarnation has received.
    given: u64,
    /// Bytes that the incarnation which came furthest has received.
    furthest: u64,
    /// The launcher has sent the end of standard input.
    is_whole: bool,
    /// The rank may be restarted.
    is_repeated: bool,
    /// Bytes were dropped that another incarnation could need, and the loss is not reported yet.
    is_loss_unreported: bool,
    is_loss_reported: bool,
}

impl Stdin {
    pub fn new(to: Option<OwnedFd>, is_repeated: bool) -> Stdin {
        Stdin { to, is_repeated, ..Stdin::default() }
    }

    pub fn queue(&mut self, bytes: &[u8]) {
        self.retained.extend(bytes);
    }

    /// Notes that the launcher has sent all of standard input.
    pub fn end(&mut self) {
        self.is_whole = true;
    }

    /// Closes the pipe, because no process reads from it any more.
    pub fn close(&mut self) {
        self.to = None;
    }

    /// Begins the next incarnation of the rank, which reads from byte `at` on at the other end of
    /// `pipe`.
    pub fn begin(&mut self, at: u64, pipe: Stdin) {
        (self.to, self.given) = (pipe.to, at);
    }

    /// Whether an incarnation can read from byte `at` on.
    pub fn has(&self, at: u64) -> bool {
        at >= self.first
    }

    /// Bytes that the present incarnation has received.
    pub fn given(&self) -> u64 {
        self.given
    }

    /// Drops bytes before byte `at`, which no incarnation will read any more.
    pub fn trim(&mut self, at: u64) {
        let count = at.min(self.given).saturating_sub(self.first);
        // An incarnation on another node may have read bytes that have not arrived here yet.
        let count = count.min(self.retained.len() as u64);
        self.retained.drain(..count as usize);
        self.first += count;
    }

    /// Whether bytes were dropped that another incarnation could need; true once.
    pub fn take_loss(&mut self) -> bool {
        let is_news = std::mem::take(&mut self.is_loss_unreported);
        self.is_loss_reported |= is_news;
        is_news
    }

    pub fn wants_write(&self) -> Option<BorrowedFd<'_>> {
        let is_behind = self.given < self.first + self.retained.len() as u64;
        self.to.as_ref().filter(|_| is_behind).map(AsFd::as_fd)
    }

    /// Writes as much as the pipe of the present incarnation takes now; returns how many of these
    /// bytes no incarnation has received before. For a process that has closed its end all bytes
    /// count as received.
    pub fn write(&mut self) -> u32 {
        while let Some(to) = self.to.as_ref().filter(|_| self.wants_write().is_some()) {
            let (before, after) = self.retained.as_slices();
            let place = (self.given - self.first) as usize;
            let bytes = before.get(place..).filter(|some| !some.is_empty());
            match rustix::io::write(to, bytes.unwrap_or_else(|| &after[place - before.len()..])) {
                Ok(count) => self.given += count as u64,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => self.to = None,
            }
        }
        let end = self.first + self.retained.len() as u64;
        if self.to.is_none() {
            self.given = end;
        }
        if self.is_whole && self.given == end {
            self.to = None;
        }
        let new = self.given.saturating_sub(self.furthest);
        self.furthest += new;
        self.drop_oldest();
        u32::try_from(new).unwrap_or(u32::MAX)
    }

    fn drop_oldest(&mut self) {
        let most = if self.is_repeated { STDIN_RETAINED_BYTES_MAX } else { 0 };
        let count = self.retained.len().saturating_sub(most);
        if count > 0 {
            let before = self.first;
            self.trim(before + count as u64);
            self.is_loss_unreported |= self.is_repeated && !self.is_loss_reported;
        }
    }
}

/// Bytes in the pipe with this inode number that the process, which stands still, has not read; 0
/// if the process has closed the pipe.
pub fn unread(pid: u32, pipe: u64) -> u64 {
    let name = format!("pipe:[{pipe}]");
    let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else { return 0 };
    let is_it =
        |path: &std::path::Path| fs::read_link(path).is_ok_and(|to| to.as_os_str() == &*name);
    let found = files.flatten().map(|file| file.path()).find(|path| is_it(path));
    let file = found.and_then(|path| File::open(path).ok());
    file.and_then(|file| rustix::io::ioctl_fionread(file).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::time::{Duration, Instant};

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    /// The read end of a pipe, and an input that writes into the pipe.
    fn pipe() -> (OwnedFd, Stdin) {
        let (from, to) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        (from, Stdin::new(Some(to), true))
    }

    fn read(from: &OwnedFd) -> Option<Vec<u8>> {
        let mut bytes = vec![0; 1 << 20];
        let count = rustix::io::read(from, &mut bytes).ok()?;
        bytes.truncate(count);
        Some(bytes)
    }

    fn is_at_end(from: &OwnedFd) -> bool {
        // A process that another test starts holds the write end until it executes its program.
        let until = Instant::now() + Duration::from_secs(5);
        while read(from).is_none() && Instant::now() < until {}
        read(from) == Some(Vec::new())
    }

    #[test]
    fn another_incarnation_is_given_the_same_and_each_byte_is_reported_once() {
        let (from, mut input) = pipe();
        input.queue(b"one ");
        assert_eq!((input.write(), read(&from)), (4, Some(b"one ".to_vec())));
        input.queue(b"two ");
        // The process is killed before it reads that.
        let (from, next) = pipe();
        input.begin(0, next);
        assert!(input.wants_write().is_some());
        assert_eq!((input.write(), read(&from)), (4, Some(b"one two ".to_vec())));
        assert_eq!((input.write(), read(&from)), (0, None), "there may come more");
        input.end();
        assert_eq!(input.write(), 0);
        assert!(is_at_end(&from));
        let (from, next) = pipe();
        input.begin(4, next);
        assert_eq!((input.write(), read(&from)), (0, Some(b"two ".to_vec())));
        assert!(is_at_end(&from));
    }

    #[test]
    fn what_no_incarnation_needs_is_trimmed_and_an_overflow_is_reported_once() {
        let (from, mut input) = pipe();
        input.queue(b"12345678");
        input.write();
        input.trim(3);
        assert!(input.has(3) && !input.has(2) && !input.take_loss());
        let (_, mut input) = pipe();
        drop(from);
        // The process has closed its standard input, so all bytes count as received.
        let (piece, pieces) = (vec![7; 1 << 20], STDIN_RETAINED_BYTES_MAX >> 20);
        for number in 0..pieces + 3 {
            input.close();
            input.queue(&piece);
            assert_eq!(input.write() as usize, piece.len());
            assert_eq!(input.take_loss(), number == pieces);
        }
        assert!(!input.has(2 << 20) && input.has(3 << 20));
        // Bytes that the images do not need were dropped before.
        let (_from, mut input) = pipe();
        input.queue(b"12345678");
        input.write();
        input.trim(3);
        input.close();
        for number in 0..pieces + 2 {
            input.queue(&piece);
            input.write();
            assert_eq!(input.take_loss(), number + 1 == pieces);
        }
        let mut passing = Stdin::new(None, false);
        passing.queue(&piece);
        assert_eq!((passing.write() as usize, passing.retained.len()), (piece.len(), 0));
        assert!(!passing.take_loss(), "nobody comes back");
    }

    #[test]
    fn what_waits_in_a_pipe_has_not_been_read() {
        let (from, mut input) = pipe();
        input.queue(b"12345");
        input.write();
        let number = File::from(from.try_clone().unwrap()).metadata().unwrap().ino();
        assert_eq!(unread(std::process::id(), number), 5);
        read(&from);
        assert_eq!((unread(std::process::id(), number), unread(std::process::id(), 0)), (0, 0));
    }

    #[test]
    fn an_incarnation_may_have_read_elsewhere_what_has_not_arrived_here_yet() {
        let (from, mut input) = pipe();
        let to = input.to.take();
        input.begin(5, Stdin::new(to, true));
        input.queue(b"123");
        input.trim(4);
        input.queue(b"4567");
        input.write();
        assert_eq!(read(&from), Some(b"67".to_vec()));
    }
}
