//! The descriptors for which the agent's loop waits.
//!
//! In: the streams, ranks and relay of the agent. Out: what can be read or written now.
//!
//! What may never happen: the loop waits for a descriptor that the agent does not handle.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::rank::LocalRank;
use super::relay::RelayProcess;
use crate::control_stream::ControlStream;
use crate::sys;

/// What a descriptor in the poll set belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Parent,
    Child(usize),
    Pmi(usize),
    Output(usize),
    RankInput(usize),
    EffectRequest(usize),
    Readiness,
    Relay,
    /// A rank has written where it can be reached, or wants images.
    LogBell,
    Wake,
}

/// Descriptors with what they belong to, in the order in which the loop handles them.
#[derive(Default)]
pub struct PollSet<'a> {
    sources: Vec<Source>,
    fds: Vec<PollFd<'a>>,
}

impl<'a> PollSet<'a> {
    pub fn add(&mut self, source: Source, fd: BorrowedFd<'a>, flags: PollFlags) {
        self.sources.push(source);
        self.fds.push(PollFd::from_borrowed_fd(fd, flags));
    }

    /// `read`: whether the agent reads from the stream now.
    pub fn add_stream(&mut self, source: Source, stream: &'a ControlStream, read: bool) {
        if let Some(fd) = stream.input().filter(|_| read) {
            self.add(source, fd, PollFlags::IN);
        }
        if let Some(fd) = stream.output() {
            self.add(source, fd, PollFlags::OUT);
        }
    }

    /// `room`: whether the agent reads output of ranks now.
    pub fn add_rank(&mut self, index: usize, rank: &'a LocalRank, room: bool) {
        if let Some(pmi) = &rank.pmi {
            self.add(Source::Pmi(index), pmi.fd(), pmi.interest());
        }
        for fd in rank.streams.outputs().filter(|_| room) {
            self.add(Source::Output(index), fd, PollFlags::IN);
        }
        if let Some(held) = rank.recording.as_ref().and_then(|recording| recording.held_files()) {
            self.add(Source::EffectRequest(index), held.effects(), PollFlags::IN);
        }
        if let Some(fd) = rank.quiesce_fd() {
            self.add(Source::Readiness, fd, PollFlags::IN);
        }
        if let Some(fd) = rank.streams.input.wants_write().filter(|_| !rank.is_restoring) {
            self.add(Source::RankInput(index), fd, PollFlags::OUT);
        }
    }

    pub fn add_relay(&mut self, relay: &'a RelayProcess) {
        for fd in relay.outputs() {
            self.add(Source::Relay, fd, PollFlags::IN);
        }
        if let Some(fd) = relay.wants_write() {
            self.add(Source::Readiness, fd, PollFlags::OUT);
        }
    }

    /// Waits until a descriptor is ready or the time is over; returns what is ready.
    pub fn wait(mut self, timeout: Option<Duration>) -> Vec<Source> {
        sys::wait(&mut self.fds, timeout);
        let ready = |fd: &PollFd| !fd.revents().is_empty();
        let all = self.sources.into_iter().zip(&self.fds);
        all.filter(|(_, fd)| ready(fd)).map(|(source, _)| source).collect()
    }
}
