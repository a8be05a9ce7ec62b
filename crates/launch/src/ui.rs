//! The launcher's side of the terminal: output of ranks, with labels if the user asks for them, and
//! the launcher's own lines.
//!
//! Lines of different ranks do not mix: with labels only whole lines are given out; without labels,
//! an unfinished line (a prompt, a progress dot) is held for at most [`HOLD`].
//!
//! Bytes of ranks enter [`OutputPrinter`] and leave through stdout and stderr without ever blocking
//! the launcher: it writes only as many bytes as the descriptor takes without blocking. Bytes that
//! cannot be written yet are queued; [`OutputPrinter::is_full`] makes the launcher read no more
//! output.

mod status;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use crate::control::Stream;
use crate::control_stream::BACKLOG_BYTES_MAX;
use crate::own_lines::own_lines;
use status::TerminalStatusLine;

/// A pipe that polls as writable takes this many bytes without blocking (PIPE_BUF).
const WRITE_BYTES: usize = 4096;
/// Time that an unfinished line waits for its end where lines have no labels.
const HOLD: Duration = Duration::from_millis(50);
/// Bytes of a line at most; a longer line is cut, so that a rank that never ends its line cannot
/// fill the memory.
const LINE_BYTES_MAX: usize = 64 * 1024;

pub struct OutputPrinter {
    label: bool,
    queues: [VecDeque<u8>; 2],
    closed: [bool; 2],
    unread: bool,
    /// Ranks that have reported the loss of another rank since
    /// [`OutputPrinter::take_lost_peer_ranks`] was last called.
    lost_peer_ranks: Vec<u32>,
    /// The unfinished line of each rank and stream.
    lines: BTreeMap<(u32, usize), Unfinished>,
    /// Labels of ranks that are not labelled by their number.
    names: BTreeMap<u32, String>,
    status: TerminalStatusLine,
}

struct Unfinished {
    bytes: Vec<u8>,
    since: Instant,
}

impl OutputPrinter {
    pub fn new(label: bool) -> OutputPrinter {
        OutputPrinter {
            label,
            queues: Default::default(),
            closed: [false; 2],
            unread: false,
            lost_peer_ranks: Vec::new(),
            lines: BTreeMap::new(),
            names: BTreeMap::new(),
            status: TerminalStatusLine::new(rustix::termios::isatty(rustix::stdio::stderr())),
        }
    }

    /// Sets the status line at the bottom of the terminal; `None` removes it.
    pub fn set_status(&mut self, text: Option<String>) {
        self.status.set(text);
    }

    pub fn is_terminal(&self) -> bool {
        self.status.is_terminal()
    }

    pub fn is_full(&self) -> bool {
        self.queues.iter().any(|queue| queue.len() > BACKLOG_BYTES_MAX)
    }

    pub fn is_empty(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
    }

    /// Whether the reader of stdout or stderr has closed its end, and a later write has failed with
    /// EPIPE.
    pub fn is_unread(&self) -> bool {
        self.unread
    }

    /// Returns the ranks that have reported the loss of another rank since the last call.
    pub fn take_lost_peer_ranks(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.lost_peer_ranks)
    }

    /// Labels a rank by a name instead of its number, until the rank has ended.
    pub fn set_name(&mut self, rank: u32, name: String) {
        self.names.insert(rank, name);
    }

    /// Handles bytes that a rank has printed.
    pub fn handle_bytes(&mut self, rank: u32, stream: Stream, bytes: &[u8], now: Instant) {
        let index = stream as usize;
        let fresh = || Unfinished { bytes: Vec::new(), since: now };
        let line = self.lines.entry((rank, index)).or_insert_with(fresh);
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            line.bytes.extend_from_slice(piece);
            if piece.ends_with(b"\n") || line.bytes.len() >= LINE_BYTES_MAX {
                let label = label(self.label, &self.names, rank);
                push_line(&mut self.queues[index], label, &line.bytes);
                if stream == Stream::Stderr && reports_peer_loss(&line.bytes) {
                    self.lost_peer_ranks.push(rank);
                }
                *line = fresh();
            }
        }
        if line.bytes.is_empty() {
            self.lines.remove(&(rank, index));
        }
    }

    /// Gives out the unfinished last lines of a rank that has ended.
    pub fn handle_end(&mut self, rank: u32) {
        self.give_out(|&(owner, _), _| owner == rank);
        self.names.remove(&rank);
    }

    /// Gives out every unfinished line.
    pub fn handle_last(&mut self) {
        self.give_out(|_, _| true);
    }

    /// The next time at which [`OutputPrinter::handle_time`] has something to do.
    pub fn next_time(&self) -> Option<Instant> {
        if self.label {
            return None;
        }
        self.lines.values().map(|line| line.since + HOLD).min()
    }

    /// Gives out unfinished lines that have waited for [`HOLD`].
    pub fn handle_time(&mut self, now: Instant) {
        if !self.label {
            self.give_out(|_, line| line.since + HOLD <= now);
        }
    }

    fn give_out(&mut self, wanted: impl Fn(&(u32, usize), &Unfinished) -> bool) {
        let (queues, names) = (&mut self.queues, &self.names);
        let is_labelled = self.label;
        self.lines.retain(|key, line| {
            let wanted = wanted(key, line);
            if wanted {
                let label = label(is_labelled, names, key.0);
                push_line(&mut queues[key.1], label, &line.bytes);
            }
            !wanted
        });
    }

    /// Queues a line of the launcher itself, in order with the ranks' stderr.
    pub fn say(&mut self, text: &str) {
        self.queues[Stream::Stderr as usize].extend(own_lines(text).bytes());
    }

    /// Descriptors with queued bytes, for poll(2).
    pub fn waiting(&self) -> impl Iterator<Item = BorrowedFd<'static>> {
        (0..2).filter(|&index| !self.queues[index].is_empty()).map(descriptor)
    }

    /// Writes as many bytes as stdout and stderr take without blocking.
    pub fn flush(&mut self) {
        if let Some(bytes) = self.status.erase(!self.is_empty()) {
            if !write_status(bytes) {
                return;
            }
            self.status.handle_erased();
        }
        for index in 0..2 {
            while !self.queues[index].is_empty() && self.write_once(index) {}
        }
        if let Some(line) = self.status.line(columns()).filter(|_| self.is_empty())
            && write_status(line.as_bytes())
        {
            self.status.handle_drawn();
        }
    }

    /// Drops queued bytes, for the end of a job whose output no one reads. Returns whether there
    /// were any.
    pub fn discard(&mut self) -> bool {
        let had_any = self.queues.iter().any(|queue| !queue.is_empty());
        self.queues.iter_mut().for_each(VecDeque::clear);
        had_any
    }

    fn write_once(&mut self, index: usize) -> bool {
        if self.closed[index] {
            self.queues[index].clear();
            return false;
        }
        let fd = descriptor(index);
        if !takes(fd) {
            return false;
        }
        let queue = &mut self.queues[index];
        let bytes = queue.as_slices().0;
        match rustix::io::write(fd, &bytes[..bytes.len().min(WRITE_BYTES)]) {
            Ok(count) => {
                self.status.handle_written(&bytes[..count]);
                queue.drain(..count);
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return false,
            Err(error) => self.close(index, error),
        }
        true
    }

    fn close(&mut self, index: usize, error: Errno) {
        self.closed[index] = true;
        self.unread |= error == Errno::PIPE;
        // The error is a full disk, for example. The job goes on, because its output may be its
        // least important result.
        if error != Errno::PIPE && index == Stream::Stdout as usize {
            self.say(&format!("cannot write standard output, the rest of it is lost: {error}"));
        }
    }
}

fn descriptor(index: usize) -> BorrowedFd<'static> {
    if index == 0 { rustix::stdio::stdout() } else { rustix::stdio::stderr() }
}

/// Whether a write to the descriptor would not block.
fn takes(fd: BorrowedFd) -> bool {
    let mut poll = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    crate::sys::wait(&mut poll, Some(Duration::ZERO));
    !poll[0].revents().is_empty()
}

/// Whether the bytes could be written; a terminal takes a status line in one write.
fn write_status(bytes: &[u8]) -> bool {
    let stderr = rustix::stdio::stderr();
    takes(stderr) && rustix::io::write(stderr, bytes).is_ok()
}

fn columns() -> usize {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stderr());
    // Some terminals report 0 columns if they do not know their size.
    size.ok().map(|size| usize::from(size.ws_col)).filter(|&columns| columns > 0).unwrap_or(80)
}

fn label(is_labelled: bool, names: &BTreeMap<u32, String>, rank: u32) -> Option<String> {
    let name = || names.get(&rank).cloned().unwrap_or_else(|| rank.to_string());
    is_labelled.then(name)
}

/// Whether this line says that another rank cannot be reached any more. The line is a message of
/// our provider, or, of a rank that had left MPI properly, the error with which MPICH and Intel MPI
/// pass on the error of the provider. No other process knows of the loss, and ranks report it only
/// on standard error.
fn reports_peer_loss(line: &[u8]) -> bool {
    let says = |words: &[u8]| line.windows(words.len()).any(|found| found == words);
    if line.starts_with(b"landbridge[") || line.starts_with(b"libfabric:") {
        return says(b"the connection to rank ") || says(b"the relay cannot reach rank ");
    }
    let is_loss = || says(b"No route to host") || says(b"Connection reset by peer");
    says(b"OFI poll failed") && is_loss()
}

/// Queues a line; a line with a label always gets a line end.
fn push_line(queue: &mut VecDeque<u8>, label: Option<String>, line: &[u8]) {
    let Some(label) = label else { return queue.extend(line) };
    queue.extend(format!("[{label}] ").bytes());
    queue.extend(line);
    if !line.ends_with(b"\n") {
        queue.push_back(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(output: &OutputPrinter, index: usize) -> String {
        String::from_utf8(output.queues[index].iter().copied().collect()).unwrap()
    }

    #[test]
    fn labelled_lines_are_whole() {
        let mut output = OutputPrinter::new(true);
        let now = Instant::now();
        output.handle_bytes(0, Stream::Stdout, b"a", now);
        output.handle_bytes(1, Stream::Stdout, b"b\nc", now);
        output.handle_bytes(0, Stream::Stdout, b"d\n", now);
        output.handle_bytes(0, Stream::Stderr, b"e\n", now);
        output.set_name(70, "1:0".to_string());
        output.handle_bytes(70, Stream::Stderr, b"f", now);
        output.handle_end(70);
        assert_eq!(output.next_time(), None);
        output.handle_time(now + 2 * HOLD);
        output.handle_end(1);
        assert_eq!(text(&output, 0), "[1] b\n[0] ad\n[1] c\n");
        assert_eq!(text(&output, 1), "[0] e\n[1:0] f\n");
        assert!(output.names.is_empty());
    }

    #[test]
    fn ranks_that_lost_a_peer_are_recorded() {
        let mut output = OutputPrinter::new(false);
        let now = Instant::now();
        let line = b"landbridge[7]: Warn: the connection to rank 2 is lost: end of file\n";
        output.handle_bytes(0, Stream::Stderr, &line[..20], now);
        assert!(output.take_lost_peer_ranks().is_empty());
        output.handle_bytes(0, Stream::Stderr, &line[20..], now);
        output.handle_bytes(1, Stream::Stdout, line, now);
        output.handle_bytes(2, Stream::Stderr, b"the connection to rank 2 is lost\n", now);
        let relay = b"landbridge[8]: Warn: the relay cannot reach rank 2\n";
        output.handle_bytes(3, Stream::Stderr, relay, now);
        let mpich = b"MPIDI_OFI_handle_cq_error(593): OFI poll failed (nic=x: No route to host)\n";
        output.handle_bytes(4, Stream::Stderr, mpich, now);
        let other = b"MPIDI_OFI_handle_cq_error(593): OFI poll failed (nic=x: Cannot allocate)\n";
        output.handle_bytes(5, Stream::Stderr, other, now);
        assert_eq!(output.take_lost_peer_ranks(), [0, 3, 4]);
        assert!(output.take_lost_peer_ranks().is_empty());
    }

    #[test]
    fn an_endless_line_is_cut() {
        let mut output = OutputPrinter::new(true);
        output.handle_bytes(0, Stream::Stdout, &vec![b'x'; LINE_BYTES_MAX], Instant::now());
        assert_eq!(output.queues[0].len(), LINE_BYTES_MAX + "[0] \n".len());
        assert!(output.lines.is_empty());
    }

    #[test]
    fn without_labels_an_unfinished_line_is_held_for_a_while() {
        let mut output = OutputPrinter::new(false);
        let now = Instant::now();
        output.handle_bytes(0, Stream::Stdout, b"a", now);
        output.handle_bytes(1, Stream::Stdout, b"b\n", now);
        output.handle_bytes(0, Stream::Stdout, b"c\nprompt> ", now);
        assert_eq!(text(&output, 0), "b\nac\n");
        assert_eq!(output.next_time(), Some(now + HOLD));
        output.handle_time(now + HOLD);
        assert_eq!(text(&output, 0), "b\nac\nprompt> ");
        output.say("x\n  y");
        assert_eq!(text(&output, 1), "landbridge: x\nlandbridge:   y\n");
    }
}
