//! Lines of this library for the user, built without allocation.
//!
//! In: a text. Out: a line in the provider's format, in the pipe that the node agent reads. What
//! may never happen: a line goes into a file of the program, or into a pipe that the program reads.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use landbridge_proto::id::LINE_TAG;

use crate::kernel_calls::{HERE, kernel};

/// Writes a line of level "Warn" to standard error, in the provider's format.
#[cold]
pub fn warn(text: fmt::Arguments<'_>) {
    log_as("Warn", text);
}

/// Writes a line of level "Info" to standard error, for an event that may be harmless.
#[cold]
pub fn info(text: fmt::Arguments<'_>) {
    log_as("Info", text);
}

fn log_as(level: &str, text: fmt::Arguments<'_>) {
    let me = kernel(libc::SYS_getpid, [0; 6]);
    write(format_args!("{LINE_TAG}[{me}]: {level}: {text}\n"));
}

/// Writes a whole line, as it is.
pub fn write(text: fmt::Arguments<'_>) {
    let mut line = MessageBuffer::new();
    let _ = line.write_fmt(text);
    let bytes = line.bytes();
    let (start, length) = (bytes.as_ptr().addr() as u64, bytes.len() as u64);
    let put = |descriptor: u64| kernel(libc::SYS_write, [descriptor, start, length, 0, 0, 0]);
    match RANK.load(Relaxed) {
        0 => _ = line_descriptor().map(put),
        rank => with_pipe_of(rank, LINES.load(Relaxed), put),
    }
}

/// Descriptor of the pipe that the node agent reads; -1: none.
static LINES: AtomicI64 = AtomicI64::new(-1);
/// The rank that has started this process; 0: this process is the rank.
static RANK: AtomicU64 = AtomicU64::new(0);

/// Sets where this library writes its lines, instead of standard error.
pub fn write_lines_to(descriptor: Option<u64>) {
    LINES.store(descriptor.map_or(-1, |it| it as i64), Relaxed);
}

/// Makes this process one that the process `rank` has started.
pub fn write_lines_of(rank: u64) {
    RANK.store(rank, Relaxed);
}

/// Calls `put` with the agent's pipe as the rank has it. A program that the rank has started may
/// have closed the pipe, and the rank may read what the program writes to standard error: without
/// the pipe nothing is written. `pipe`: its number in the rank; -1: there is none.
fn with_pipe_of(rank: u64, pipe: i64, mut put: impl FnMut(u64) -> i64) {
    let Ok(pipe) = u64::try_from(pipe) else {
        put(libc::STDERR_FILENO as u64);
        return;
    };
    let mut name = MessageBuffer::new();
    let _ = write!(name, "/proc/{rank}/fd/{pipe}\0");
    let place = name.bytes().as_ptr().addr() as u64;
    let flags = (libc::O_WRONLY | libc::O_NONBLOCK | libc::O_CLOEXEC) as u64;
    let found = kernel(libc::SYS_openat, [HERE, place, flags, 0, 0, 0]);
    let Ok(descriptor) = u64::try_from(found) else { return };
    if has_kind(descriptor, libc::S_IFIFO) {
        put(descriptor);
    }
    kernel(libc::SYS_close, [descriptor, 0, 0, 0, 0, 0]);
}

/// Where a line of a rank goes: into the agent's pipe, or to standard error if the program has
/// closed the pipe. A line in a file to which the program has redirected standard error would move
/// the program's position in the file, which is recorded without the line.
fn line_descriptor() -> Option<u64> {
    let stderr = libc::STDERR_FILENO as u64;
    match u64::try_from(LINES.load(Relaxed)) {
        Ok(pipe) if has_kind(pipe, libc::S_IFIFO) => Some(pipe),
        Ok(_) if has_kind(stderr, libc::S_IFREG) => None,
        _ => Some(stderr),
    }
}

fn has_kind(descriptor: u64, kind: libc::mode_t) -> bool {
    // SAFETY: a structure for which all zeros are a valid value.
    let mut about: libc::stat = unsafe { std::mem::zeroed() };
    let room = (&raw mut about).addr() as u64;
    let found = kernel(libc::SYS_fstat, [descriptor, room, 0, 0, 0, 0]);
    found == 0 && about.st_mode & libc::S_IFMT == kind
}

/// A text of at most `MESSAGE_BYTES`, built without allocation; a newline at its end is kept.
pub struct MessageBuffer {
    bytes: [u8; MESSAGE_BYTES],
    length: usize,
}

const MESSAGE_BYTES: usize = 1024;

impl MessageBuffer {
    pub fn new() -> Self {
        Self { bytes: [0; MESSAGE_BYTES], length: 0 }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Write for MessageBuffer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = &mut self.bytes[self.length..];
        let length = text.len().min(room.len());
        room[..length].copy_from_slice(&text.as_bytes()[..length]);
        self.length += length;
        if length < text.len() && text.ends_with('\n') {
            self.bytes[MESSAGE_BYTES - 1] = b'\n';
        }
        Ok(())
    }
}

/// Shows the end of a path as text.
pub struct Path<'a>(pub &'a [u8]);

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 200;
        if self.0.len() > SHOWN {
            f.write_str("…")?;
        }
        let end = &self.0[self.0.len().saturating_sub(SHOWN)..];
        for chunk in end.utf8_chunks() {
            f.write_str(chunk.valid())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    /// A line of a child in its standard error would be data for a rank that reads that.
    #[test]
    fn lines_of_a_child_go_into_the_pipe_of_the_rank_or_nowhere() {
        let rank = u64::from(std::process::id());
        let written_to = |pipe: i64| {
            let mut found = None;
            with_pipe_of(rank, pipe, |descriptor| {
                found = Some((descriptor, has_kind(descriptor, libc::S_IFIFO)));
                0
            });
            found
        };
        let (_reader, writer) = std::io::pipe().unwrap();
        let pipe = i64::from(writer.as_raw_fd());
        let (descriptor, is_pipe) = written_to(pipe).unwrap();
        assert!(is_pipe && descriptor != libc::STDERR_FILENO as u64);
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(written_to(file.as_raw_fd().into()), None, "what the rank has there is a file");
        assert_eq!(written_to(1 << 20), None, "the rank has closed it");
        assert_eq!(written_to(-1).map(|it| it.0), Some(libc::STDERR_FILENO as u64));
    }
}
