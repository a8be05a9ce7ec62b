//! What a command that leads to a host prints on stderr. It goes on to our own stderr, a moment late: what
//! ssh says right before it gives up is quoted in the launcher's message then, and not printed twice.
//!
//! A thread of its own reads it, since whoever has started the command waits for other things; the thread
//! ends with the command.

use std::io::{self, Read, Write};
use std::process::ChildStderr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::sys;

/// How long what was printed is kept back. ssh exits at once after its last words.
const PRINT_DELAY: Duration = Duration::from_millis(300);
/// How long last words are waited for when the command has closed its stdout: something it has left running
/// may hold its stderr open.
const PATIENCE: Duration = Duration::from_millis(500);
/// More than this at once is passed on without delay.
const HELD_BYTES_MAX: usize = 16 * 1024;

/// See the module head.
pub struct CommandStderr {
    end: Receiver<StderrEnd>,
}

#[derive(Default)]
struct StderrEnd {
    /// The last line, without its end.
    last_line: String,
    /// What has not been passed on yet.
    held: Vec<u8>,
}

impl CommandStderr {
    pub fn listen(stderr: ChildStderr) -> io::Result<CommandStderr> {
        let (sender, end) = channel();
        let thread = std::thread::Builder::new().name("stderr".to_string());
        thread.spawn(move || pass_on(stderr, &sender))?;
        Ok(CommandStderr { end })
    }

    /// The last line of a command that has ended, for the caller to show; what came before it is printed.
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
    /// Nobody has asked for it: it is printed like the rest.
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
    // Its owner may be gone: then so is this process, soon.
    if let Err(unheard) = sender.send(end) {
        print(&unheard.0.held);
    }
}

fn last_line(text: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(text);
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).map(str::to_string)
}

/// Nobody may be left to read it.
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
