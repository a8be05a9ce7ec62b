//! Standard input of rank 0: what it has been given, so that its next start is given the same.
//!
//! In: bytes from the launcher, in order; starts of the rank, each from the first byte or from where an image of it stood. Out: bytes
//! into the pipe of the present start, and how many of them no start was given before, for which the launcher then sends more.
//!
//! Of a rank that does not come back nothing is kept; of one that does, the last [`STDIN_RETAINED_BYTES_MAX`] and what may still be asked for.
//!
//! What may never happen: a start is given other bytes than the one before it in the same place; the agent waits for a reader.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

/// Most that is kept of what has been given to some start already.
pub const STDIN_RETAINED_BYTES_MAX: usize = 64 << 20;

/// See the module head.
#[derive(Default)]
pub struct Stdin {
    /// The agent's end of the pipe.
    to: Option<OwnedFd>,
    /// From byte `first` on.
    retained: VecDeque<u8>,
    first: u64,
    /// The present start has been given all bytes before this one,
    given: u64,
    /// and whichever came furthest, all before this one.
    furthest: u64,
    /// No more will come.
    is_whole: bool,
    /// There may be another start.
    is_repeated: bool,
    /// Some of it had to be dropped that another start could need, and nobody was told.
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

    /// All has come.
    pub fn end(&mut self) {
        self.is_whole = true;
    }

    /// Nobody reads it any more.
    pub fn close(&mut self) {
        self.to = None;
    }

    /// The rank's next start reads it from byte `at` on, at the other end of `pipe`.
    pub fn begin(&mut self, at: u64, pipe: Stdin) {
        (self.to, self.given) = (pipe.to, at);
    }

    /// Whether a start can read it from byte `at` on.
    pub fn has(&self, at: u64) -> bool {
        at >= self.first
    }

    /// How much the present start has been given.
    pub fn given(&self) -> u64 {
        self.given
    }

    /// No start will read what lies before byte `at`.
    pub fn trim(&mut self, at: u64) {
        let count = at.min(self.given).saturating_sub(self.first);
        // A start on another node may have read what has not come there yet.
        let count = count.min(self.retained.len() as u64);
        self.retained.drain(..count as usize);
        self.first += count;
    }

    /// Said once.
    pub fn take_loss(&mut self) -> bool {
        let is_news = std::mem::take(&mut self.is_loss_unreported);
        self.is_loss_reported |= is_news;
        is_news
    }

    pub fn wants_write(&self) -> Option<BorrowedFd<'_>> {
        let is_behind = self.given < self.first + self.retained.len() as u64;
        self.to.as_ref().filter(|_| is_behind).map(AsFd::as_fd)
    }

    /// Gives the present start what it takes now; how many of these bytes are new. A process that has closed its end takes
    /// everything.
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

/// How much of what was written into the pipe of this number the process, which stands still, has not read. What it has closed it
/// will not read.
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

    /// Where a process would read, and what the agent writes into.
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
        // A process that another test starts has the other end for the moment before it becomes its program.
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
        // It is killed before it has taken that.
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
        // It has closed its standard input, and takes all.
        let (piece, pieces) = (vec![7; 1 << 20], STDIN_RETAINED_BYTES_MAX >> 20);
        for number in 0..pieces + 3 {
            input.close();
            input.queue(&piece);
            assert_eq!(input.write() as usize, piece.len());
            assert_eq!(input.take_loss(), number == pieces);
        }
        assert!(!input.has(2 << 20) && input.has(3 << 20));
        // One that has images has forgotten something before.
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
