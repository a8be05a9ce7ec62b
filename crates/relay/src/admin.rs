//! Who may tell a running relay what to do: signals, and whoever holds its standard input.

use std::fmt;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use landbridge_drive::engine::{Next, Report, Watch};
use landbridge_drive::sys;

/// What each control means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Control {
    Signals,
    Lifeline,
}

/// See the module head.
pub struct Admin {
    cluster: u16,
    controls: Vec<Control>,
}

impl Admin {
    /// Takes over the signals and, with `lifeline`, standard input. The descriptors are to be
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
        Ok((Self { cluster, controls }, fds))
    }

    /// The last line of a relay's log.
    pub fn summarize(&mut self, report: &Report) {
        self.log(format_args!("ended; {report}"));
    }

    fn handle_signal(&mut self, fd: &OwnedFd, report: &Report) -> Next {
        let mut info = [0; 128];
        let Ok(128) = rustix::io::read(fd, &mut info) else { return Next::GoOn };
        match i32::from_ne_bytes([info[0], info[1], info[2], info[3]]) {
            libc::SIGUSR1 => {
                self.log(format_args!("{report}"));
                Next::GoOn
            }
            _ => Next::Stop,
        }
    }

    /// Whatever comes is ignored; only the end means something.
    fn handle_lifeline(fd: &OwnedFd) -> Next {
        match rustix::io::read(fd, &mut [0; 256]) {
            Ok(0) => Next::Stop,
            Err(error) if error != rustix::io::Errno::AGAIN => Next::Stop,
            _ => Next::GoOn,
        }
    }
}

impl Watch for Admin {
    fn log(&mut self, line: fmt::Arguments<'_>) {
        // A log that cannot be written must not end the relay.
        let _ = writeln!(io::stderr().lock(), "landbridge-relay[{}]: {line}", self.cluster);
    }

    fn handle_control(&mut self, index: usize, fd: &OwnedFd, report: &Report) -> Next {
        match self.controls[index] {
            Control::Signals => self.handle_signal(fd, report),
            Control::Lifeline => Self::handle_lifeline(fd),
        }
    }
}
