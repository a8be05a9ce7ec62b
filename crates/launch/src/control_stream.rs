//! A control stream between agent and parent: two non-blocking file descriptors, with a buffer in
//! each direction.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use anyhow::{Result, bail};
use rustix::io::Errno;

use crate::control::{Decoder, FRAME_BYTES_MAX, LENGTH_BYTES, Message, VERSION};

/// Unsent bytes above which the owner of the stream stops reading output of ranks.
pub const BACKLOG_BYTES_MAX: usize = 1024 * 1024;
const READ_BYTES: usize = 64 * 1024;
/// Bytes that a login shell may print before the agent's banner.
const NOISE_BYTES_MAX: usize = 256 * 1024;

pub struct ControlStream {
    input: OwnedFd,
    output: Option<OwnedFd>,
    decoder: Decoder,
    unsent: VecDeque<u8>,
    /// Bytes received before the agent's banner; `None` once the banner has been received, or where
    /// no banner is expected.
    noise: Option<Vec<u8>>,
    is_agent: bool,
    /// Why this side has closed its output.
    problem: Option<String>,
    at_end: bool,
    last_received_at: Instant,
}

impl ControlStream {
    /// The stream of the side that started the agent; this side waits for the agent's banner.
    pub fn to_agent(input: OwnedFd, output: OwnedFd) -> io::Result<ControlStream> {
        ControlStream::new(input, output, Some(Vec::new()))
    }

    /// The agent's own side of the stream; this side sends the banner.
    pub fn to_parent(input: OwnedFd, output: OwnedFd) -> io::Result<ControlStream> {
        let mut stream = ControlStream::new(input, output, None)?;
        stream.is_agent = true;
        stream.unsent.extend(banner().bytes());
        Ok(stream)
    }

    fn new(input: OwnedFd, output: OwnedFd, noise: Option<Vec<u8>>) -> io::Result<ControlStream> {
        set_nonblocking(&input)?;
        set_nonblocking(&output)?;
        Ok(ControlStream {
            input,
            output: Some(output),
            decoder: Decoder::default(),
            unsent: VecDeque::new(),
            noise,
            is_agent: false,
            problem: None,
            at_end: false,
            last_received_at: Instant::now(),
        })
    }

    pub fn input(&self) -> Option<BorrowedFd<'_>> {
        (!self.at_end).then(|| self.input.as_fd())
    }

    /// The output descriptor, for poll(2), while there are unsent bytes.
    pub fn output(&self) -> Option<BorrowedFd<'_>> {
        if self.unsent.is_empty() { None } else { self.output.as_ref().map(AsFd::as_fd) }
    }

    pub fn backlog_bytes(&self) -> usize {
        self.unsent.len()
    }

    /// Whether nothing more can be received: the peer has closed the stream, a read has failed, a
    /// frame was malformed, or no agent of the same version has answered.
    pub fn at_end(&self) -> bool {
        self.at_end
    }

    /// Whether the agent's banner has been received.
    pub fn has_answered(&self) -> bool {
        self.noise.is_none()
    }

    /// Time at which the last bytes were received.
    pub fn last_received_at(&self) -> Instant {
        self.last_received_at
    }

    /// The text that was received in place of a banner.
    pub fn noise(&self) -> String {
        self.noise.as_deref().map(String::from_utf8_lossy).unwrap_or_default().trim().to_string()
    }

    /// Why this side gave up the connection.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    pub fn send(&mut self, message: &Message) {
        if self.output.is_some() {
            let mut frame = Vec::new();
            message.emit(&mut frame);
            match frame.len() - LENGTH_BYTES {
                length if length > FRAME_BYTES_MAX => self.refuse_oversized(message, length),
                _ => self.unsent.extend(frame),
            }
        }
    }

    /// Refuses to send a message that the peer would reject for its length. An agent sends an error
    /// in place of the message; towards an agent the connection is closed, which ends the agent and
    /// is reported by it.
    fn refuse_oversized(&mut self, message: &Message, length: usize) {
        let text = format!(
            "{} takes {length} bytes, and at most {FRAME_BYTES_MAX} can be sent",
            message.description()
        );
        if self.is_agent {
            self.send(&Message::Failed { text });
        } else {
            self.close_output();
            self.problem = Some(text);
        }
    }

    /// Closes this side's output: the peer reads end-of-file, which ends an agent.
    pub fn close_output(&mut self) {
        self.output = None;
        self.unsent.clear();
    }

    /// Writes as many bytes as the descriptor takes without blocking.
    pub fn flush(&mut self) {
        while let (Some(output), false) = (&self.output, self.unsent.is_empty()) {
            match rustix::io::write(output, self.unsent.as_slices().0) {
                Ok(written) => drop(self.unsent.drain(..written)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // Reading reports the end of the stream; a write error here only stops sending.
                Err(_) => return self.close_output(),
            }
        }
    }

    /// Reads the available bytes, at most [`READ_BYTES`].
    pub fn fill(&mut self) -> Result<()> {
        let mut buffer = [0; READ_BYTES];
        match rustix::io::read(&self.input, &mut buffer) {
            Ok(0) => self.at_end = true,
            Ok(count) => {
                self.last_received_at = Instant::now();
                return self.handle_bytes(&buffer[..count]);
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(_) => self.at_end = true,
        }
        Ok(())
    }

    pub fn poll_message(&mut self) -> Result<Option<Message>> {
        match self.decoder.poll_message() {
            Ok(message) => Ok(message),
            Err(error) => {
                self.at_end = true;
                bail!("{error}; is the same version of landbridge installed on both sides?")
            }
        }
    }

    fn handle_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let Some(noise) = &mut self.noise else {
            self.decoder.handle_bytes(bytes);
            return Ok(());
        };
        noise.extend_from_slice(bytes);
        let marker = crate::control::BANNER.as_bytes();
        let Some(start) = find(noise, marker) else {
            if noise.len() > NOISE_BYTES_MAX {
                self.at_end = true;
                bail!("it printed {} bytes and no agent has answered", noise.len());
            }
            return Ok(());
        };
        let after = start + marker.len();
        let Some(length) = noise[after..].iter().position(|&byte| byte == b'\n') else {
            return Ok(());
        };
        let version = String::from_utf8_lossy(&noise[after..after + length]).into_owned();
        if version != VERSION.to_string() {
            self.at_end = true;
            bail!("its landbridge speaks control version {version}, this one {VERSION}");
        }
        let rest = noise.split_off(after + length + 1);
        self.noise = None;
        self.decoder.handle_bytes(&rest);
        Ok(())
    }
}

fn banner() -> String {
    format!("{}{VERSION}\n", crate::control::BANNER)
}

pub fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

pub fn set_nonblocking(fd: &impl AsFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn pair() -> (ControlStream, ControlStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let parent =
            ControlStream::to_agent(ours.try_clone().unwrap().into(), ours.into()).unwrap();
        let agent =
            ControlStream::to_parent(theirs.try_clone().unwrap().into(), theirs.into()).unwrap();
        (parent, agent)
    }

    #[test]
    fn noise_before_the_banner_is_skipped() {
        let (mut parent, mut agent) = pair();
        let greeting = b"Welcome to n1!\nlandbridge-agent? no\n";
        rustix::io::write(agent.output.as_ref().unwrap(), greeting).unwrap();
        agent.send(&Message::Ready);
        agent.flush();
        parent.fill().unwrap();
        assert_eq!(parent.poll_message().unwrap(), Some(Message::Ready));
    }

    #[test]
    fn another_version_is_refused() {
        let (mut parent, agent) = pair();
        let greeting = b"\nlandbridge-agent 999\n";
        rustix::io::write(agent.output.as_ref().unwrap(), greeting).unwrap();
        assert!(parent.fill().unwrap_err().to_string().contains("version 999"));
        assert!(parent.at_end());
    }

    #[test]
    fn an_oversized_message_is_reported_by_the_sender() {
        let (mut parent, mut agent) = pair();
        let value = "x".repeat(FRAME_BYTES_MAX);
        let delta = crate::pmi::kvs::Delta::from([("key".to_string(), value)]);
        agent.send(&Message::BarrierUp { group: 0, delta: delta.clone() });
        agent.flush();
        parent.fill().unwrap();
        let Some(Message::Failed { text }) = parent.poll_message().unwrap() else { panic!() };
        assert!(text.starts_with("what ranks have put into") && text.contains("67108"), "{text}");
        parent.send(&Message::BarrierDown { group: 0, delta });
        assert_eq!(parent.problem(), Some(text.as_str()));
        assert!(parent.output.is_none(), "its end is what ends the agent");
    }

    #[test]
    fn closing_one_side_ends_the_other() {
        let (mut parent, mut agent) = pair();
        agent.flush();
        drop(agent);
        parent.fill().unwrap();
        assert!(!parent.at_end());
        parent.fill().unwrap();
        assert!(parent.at_end());
    }
}
