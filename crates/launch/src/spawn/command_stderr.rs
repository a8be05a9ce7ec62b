//! Reads the standard error of a command that leads to a host, and copies it to this process's
//! standard error with a delay of [`PRINT_DELAY`]. The delay lets the launcher quote the last line
//! that ssh prints before it gives up, without printing the line twice.
//!
//! A separate thread reads the stream, because the thread that started the command waits for other
//! events; the reading thread ends with the command.

use std::io::{self, Read, Write};
use std::process::ChildStderr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::sys;

/// Time that printed bytes are held. ssh exits at once after its last line.
const PRINT_DELAY: Duration = Duration::from_millis(300);
/// Time to wait for the end of standard error after the command has closed its stdout: a process
/// that the command has left running may keep standard error open.
const PATIENCE: Duration = Duration::from_millis(500);
/// Bytes that are held at most; more bytes are copied without delay.
const HELD_BYTES_MAX: usize = 16 * 1024;

/// The standard error of a command. The module head describes the delay.
pub struct CommandStderr {
    end: Receiver<StderrEnd>,
}

#[derive(Default)]
struct StderrEnd {
    /// The last line, without its line end.
    last_line: String,
    /// Bytes that have not been copied yet.
    held: Vec<u8>,
}

impl CommandStderr {
    pub fn listen(stderr: ChildStderr) -> io::Result<CommandStderr> {
        let (sender, end) = channel();
        let thread = std::thread::Builder::new().name("stderr".to_string());
        thread.spawn(move || pass_on(stderr, &sender))?;
        Ok(CommandStderr { end })
    }

    /// The last line of a command that has ended, for the caller to show; bytes in front of the
    /// line are printed.
    pub fn last_words(&self) -> String {
        let Ok(StderrEnd { last_line, held }) = self.end.recv_timeout(PATIENCE) else {
            return String::new();
        };
        let text = held.trim_ascii_end();
        let before = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        print(&text[..before]);
        last_line
    }
}

impl Drop for CommandStderr {
    /// Prints the held bytes if no caller has asked for the last line.
    fn drop(&mut self) {
        if let Ok(end) = self.end.try_recv() {
            print(&end.held);
        }
    }
}

fn pass_on(mut stderr: ChildStderr, sender: &Sender<StderrEnd>) {
    let mut end = StderrEnd::default();
    let mut since = Instant::now();
    let mut buffer = [0; HELD_BYTES_MAX];
    loop {
        let due = (!end.held.is_empty()).then(|| PRINT_DELAY.saturating_sub(since.elapsed()));
        let mut fds = [PollFd::new(&stderr, PollFlags::IN)];
        sys::wait(&mut fds, due);
        if !fds[0].revents().is_empty() {
            let count = stderr.read(&mut buffer).unwrap_or(0);
            if count == 0 {
                break;
            }
            if end.held.is_empty() {
                since = Instant::now();
            }
            end.held.extend_from_slice(&buffer[..count]);
            end.last_line = last_line(&end.held).unwrap_or(end.last_line);
        }
        if since.elapsed() >= PRINT_DELAY || end.held.len() > HELD_BYTES_MAX {
            print(&std::mem::take(&mut end.held));
        }
    }
    // The owner of the receiver may have ended; then this process ends soon as well.
    if let Err(unheard) = sender.send(end) {
        print(&unheard.0.held);
    }
}

fn last_line(text: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(text);
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).map(str::to_string)
}

/// Prints bytes to standard error. An error is ignored, because no process may be left that reads
/// the stream.
fn print(text: &[u8]) {
    let _ = io::stderr().write_all(text);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn the_last_line_is_given() {
        for (script, expected) in [
            ("exit 1", ""),
            ("echo first >&2; echo 'Permission denied' >&2", "Permission denied"),
            ("printf 'no end' >&2", "no end"),
            ("echo early >&2; sleep 0.5; echo >&2; exit 255", "early"),
        ] {
            let mut child =
                Command::new("sh").args(["-c", script]).stderr(Stdio::piped()).spawn().unwrap();
            let said = CommandStderr::listen(child.stderr.take().unwrap()).unwrap();
            child.wait().unwrap();
            assert_eq!(said.last_words(), expected, "{script}");
        }
    }
}
