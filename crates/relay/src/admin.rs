//! The control of a running relay: signals, and commands on its standard input. And its log: whole
//! lines on standard error, which never wait for a reader. The relay reports the state of its links
//! to other relays on its standard output to the process that started it, in lines such as
//!
//! ```text
//! landbridge-relay: link cluster=1 at=192.0.2.1:7711 is=up
//! landbridge-relay: link cluster=2 at=192.0.2.9:7711 is=unreachable why=Connection refused
//! ```
//!
//! It reports what the user should know in lines such as
//!
//! ```text
//! landbridge-relay: warns: recover_dir cannot be written: No space left on device
//! ```
//!
//! On its standard output, the relay also answers the queries that arrive on its standard input
//! (see `log_query`).

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use landbridge_drive::engine::{
    ControlAction, EngineHost, EngineReport, FencedRecord, LinkState, LogReply,
};
use landbridge_drive::sys;
use landbridge_proto::id::{Address, ClusterId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags};

use crate::log_query;

/// The meaning of a control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Control {
    Signals,
    Lifeline,
}

/// The control of a relay: see the module documentation.
pub struct Admin {
    controls: Vec<Control>,
    /// The bytes from standard input since the last whole line.
    input: Vec<u8>,
    /// The number of the query that is being answered.
    serial: u32,
    /// The endpoints to fence, each with the first incarnation that is not refused.
    fences: VecDeque<(Address, u32)>,
    log: LogWriter,
    events: LogWriter,
}

impl Admin {
    /// Takes over the signals and, with `lifeline`, standard input. Returns the descriptors to be
    /// watched.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new(cluster: u16, lifeline: bool) -> io::Result<(Self, Vec<OwnedFd>)> {
        let signals = [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1];
        let mut fds = vec![sys::signal_fd(&signals)?];
        let mut controls = vec![Control::Signals];
        if lifeline {
            fds.push(io::stdin().as_fd().try_clone_to_owned()?);
            controls.push(Control::Lifeline);
        }
        let name = format!("landbridge-relay[{cluster}]");
        let log = LogWriter::new(name, nonblocking_stream(io::stderr())?);
        let events = LogWriter::new("landbridge-relay".into(), nonblocking_stream(io::stdout())?);
        let (input, fences) = (Vec::new(), VecDeque::new());
        Ok((Self { controls, input, serial: 0, fences, log, events }, fds))
    }

    /// Writes the last line of a relay's log.
    pub fn summarize(&mut self, report: &EngineReport) {
        let relay = &report.relay;
        let mut text =
            format!("ended; it has passed on {} frames, {} bytes", relay.frames, relay.bytes);
        let counts = [
            ("malformed", relay.malformed),
            ("reports_dropped", relay.reports_dropped),
            ("lost", relay.lost),
            ("lost_bytes", relay.lost_bytes),
            ("refused", report.refused),
            ("delivered_frames", relay.delivered_frames),
            ("determinant_bytes", relay.determinant_bytes),
            ("nondeterminism_bytes", relay.nondeterminism_bytes),
            ("log_bytes", report.log_bytes),
            ("disk_bytes", report.disk_bytes),
            ("read_back_bytes", relay.read_back_bytes),
            ("disk_waits", relay.disk_waits),
        ];
        for (name, count) in counts.into_iter().filter(|&(_, count)| count > 0) {
            text.push_str(&format!(" {name}={count}"));
        }
        self.log(format_args!("{text}"));
    }

    fn handle_signal(&mut self, fd: &OwnedFd, report: &EngineReport) -> ControlAction {
        let mut info = [0; 128];
        let Ok(128) = rustix::io::read(fd, &mut info) else { return ControlAction::Continue };
        match i32::from_ne_bytes([info[0], info[1], info[2], info[3]]) {
            libc::SIGUSR1 => {
                self.log(format_args!("{report}"));
                ControlAction::Continue
            }
            _ => ControlAction::Stop,
        }
    }

    /// Reads commands. The end of standard input ends the relay. Of several queries that arrive at
    /// once, the last is answered; anything else is ignored.
    fn handle_lifeline(&mut self, fd: &OwnedFd) -> ControlAction {
        let mut buffer = [0; 256];
        let count = match rustix::io::read(fd, &mut buffer) {
            Ok(0) => return ControlAction::Stop,
            Ok(count) => count,
            Err(rustix::io::Errno::AGAIN) => return ControlAction::Continue,
            Err(_) => return ControlAction::Stop,
        };
        self.input.extend(&buffer[..count]);
        self.fences.extend(log_query::fences(&self.input));
        let (question, rest) = log_query::newest(&self.input);
        // A rest that is longer than any query cannot become one.
        self.input = if rest.len() > buffer.len() { Vec::new() } else { rest.to_vec() };
        let Some((serial, inquiry)) = question else { return ControlAction::Continue };
        self.serial = serial;
        ControlAction::Query(inquiry)
    }
}

impl EngineHost for Admin {
    fn log(&mut self, line: fmt::Arguments<'_>) {
        self.log.write(line);
    }

    fn warn(&mut self, line: fmt::Arguments<'_>) {
        self.log.write(line);
        self.events.write(format_args!("warns: {line}"));
    }

    fn poll_fence(&mut self) -> Option<(Address, u32)> {
        self.fences.pop_front()
    }

    fn handle_fenced(&mut self, who: Address, fenced: &FencedRecord) {
        self.events.write(format_args!("{}", log_query::fenced(who, fenced)));
    }

    fn handle_checkpoint_due(&mut self, who: Address) {
        self.events.write(format_args!("checkpoint-due process={}", who.index()));
    }

    fn handle_log_abandoned(&mut self, who: Address) {
        self.events.write(format_args!("unrecoverable process={}", who.index()));
    }

    fn handle_log_resumed(&mut self, who: Address) {
        self.events.write(format_args!("recoverable process={}", who.index()));
    }

    fn handle_log_reply(&mut self, exhibit: &LogReply) {
        for line in log_query::lines(self.serial, exhibit) {
            self.events.write(format_args!("log {line}"));
        }
    }

    fn handle_link(&mut self, cluster: ClusterId, remote: &dyn fmt::Display, state: LinkState<'_>) {
        let is = match state {
            LinkState::Up => "up".to_string(),
            LinkState::Down(why) => format!("down why={why}"),
            LinkState::Unreachable(why) => format!("unreachable why={why}"),
        };
        self.events.write(format_args!("link cluster={} at={remote} is={is}", cluster.0));
    }

    fn handle_control(
        &mut self,
        index: usize,
        fd: &OwnedFd,
        report: &EngineReport,
    ) -> ControlAction {
        match self.controls[index] {
            Control::Signals => self.handle_signal(fd, report),
            Control::Lifeline => self.handle_lifeline(fd),
        }
    }
}

/// The longest line in bytes, which a pipe takes whole or not at all.
const LINE_BYTES_MAX: usize = 4096;

/// A writer of lines for a reader who may not read: lines that find no space are dropped and
/// counted.
struct LogWriter {
    name: String,
    out: OwnedFd,
    dropped: u64,
}

impl LogWriter {
    fn new(name: String, out: OwnedFd) -> Self {
        Self { name, out, dropped: 0 }
    }

    fn write(&mut self, line: fmt::Arguments<'_>) {
        if self.dropped > 0 {
            let dropped = self.dropped;
            if !self.write_line(format_args!("{dropped} lines were dropped: nobody read the log")) {
                self.dropped += 1;
                return;
            }
            self.dropped = 0;
        }
        if !self.write_line(line) {
            self.dropped += 1;
        }
    }

    /// Writes a line. Returns false if there is no space.
    fn write_line(&mut self, line: fmt::Arguments<'_>) -> bool {
        let mut text = format!("{}: {line}", self.name);
        while text.len() >= LINE_BYTES_MAX {
            text.pop();
        }
        text.push('\n');
        let mut fds = [PollFd::new(&self.out, PollFlags::OUT)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        // A log that cannot be written must not end the relay.
        matches!(poll(&mut fds, Some(&at_once)), Ok(1))
            && rustix::io::write(&self.out, text.as_bytes()).is_ok()
    }
}

/// Standard output or error as a descriptor whose writes do not wait. Where non-blocking mode is a
/// property of the open file, it must not affect other processes that have the file open, so the
/// file is opened a second time.
fn nonblocking_stream(stream: impl AsFd) -> io::Result<OwnedFd> {
    let shared = stream.as_fd().try_clone_to_owned()?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&shared)?.st_mode);
    if kind != FileType::Fifo && kind != FileType::CharacterDevice {
        return Ok(shared);
    }
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let path = format!("/proc/self/fd/{}", shared.as_raw_fd());
    Ok(rustix::fs::open(path, flags, Mode::empty()).unwrap_or(shared))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_nobody_reads_is_dropped_and_counted() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let mut log = LogWriter::new("relay".into(), writer);
        let mut written = 0;
        while log.dropped < 10 {
            log.write(format_args!("line {written}"));
            written += 1;
            assert!(written < 1_000_000, "a pipe has an end");
        }
        let mut bytes = vec![0; 1 << 20];
        let got = rustix::io::read(&reader, &mut bytes).unwrap();
        let text = std::str::from_utf8(&bytes[..got]).unwrap();
        assert!(text.starts_with("relay: line 0\n") && text.ends_with('\n'), "whole lines");
        assert_eq!(text.lines().count(), written - 10);

        log.write(format_args!("somebody reads again"));
        let got = rustix::io::read(&reader, &mut bytes).unwrap();
        let expected_text =
            "relay: 10 lines were dropped: nobody read the log\nrelay: somebody reads again\n";
        assert_eq!(std::str::from_utf8(&bytes[..got]).unwrap(), expected_text);
    }

    #[test]
    fn a_long_line_is_cut() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        LogWriter::new("relay".into(), writer)
            .write(format_args!("{}", "ä".repeat(LINE_BYTES_MAX)));
        let mut bytes = vec![0; 2 * LINE_BYTES_MAX];
        let got = rustix::io::read(&reader, &mut bytes).unwrap();
        assert!(
            got <= LINE_BYTES_MAX && std::str::from_utf8(&bytes[..got]).unwrap().ends_with('\n')
        );
    }
}
