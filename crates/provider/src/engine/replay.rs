//! Taking in what the network brings so that it can be done again: by a new start of this process, should it be killed.
//!
//! All that this process gets comes through its relay, in one order, and enters at *polls*: calls of the program that look
//! for it. How many frames each poll has taken in is the only thing that chance decides; the relay hears it before anything
//! that follows from it ([`Kind::Intake`]). A new start is told all of it, and takes in the same frames at the same
//! polls; then it is live.
//!
//! What may never happen: a frame is taken in anywhere else; whether a frame goes out depends on how full a ring is.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use landbridge_proto::id::{Address, EXIT_CANNOT_GO_ON};
use landbridge_proto::wire::frame::{HEADER_BYTES, Header, Kind};

use super::Engine;
use super::handshake::Carrier;
use crate::{clocks, log};

/// How long the relay may take to go on telling what was.
const RECORD_TIME_MAX: Duration = Duration::from_secs(30);

/// See the module head.
#[derive(Default)]
pub struct Replay {
    /// Polls since the last one that took something in.
    polls: u64,
    /// What is to be done again: after so many polls, so many frames.
    record: VecDeque<(u64, u32)>,
    /// Frames that this start has sent, and an earlier one.
    sent: u64,
    sent_before: u64,
    /// Frames taken in again.
    repeated: u64,
}

impl Replay {
    /// Another poll: how many frames it is to take in. `None`: as many as there are.
    fn poll(&mut self) -> Option<u32> {
        self.polls += 1;
        let has_looked_before = clocks::count_poll();
        let next = self.record.front().copied();
        // What was sent or looked for after the last intake was so by who had taken in nothing more.
        let is_behind = has_looked_before || self.sent < self.sent_before;
        let (polls, frames) = next.or(is_behind.then_some((u64::MAX, 0)))?;
        if polls > self.polls {
            return Some(0);
        }
        self.record.pop_front();
        self.polls = 0;
        self.repeated += frames as u64;
        Some(frames)
    }
}

impl Engine {
    /// Whether what is taken in is recorded.
    #[inline]
    pub(super) fn is_recorded(&self) -> bool {
        self.replay.is_some()
    }

    /// Whether it does again what was done before.
    pub(super) fn is_repeating(&self) -> bool {
        let is_behind =
            |replay: &Replay| !replay.record.is_empty() || replay.sent < replay.sent_before;
        self.replay.as_ref().is_some_and(is_behind) || clocks::is_behind()
    }

    /// Hears from the relay what an earlier start of this process has taken in.
    pub(super) fn learn_record(&mut self) -> io::Result<()> {
        let mut deadline = Instant::now() + RECORD_TIME_MAX;
        let late =
            || io::Error::new(io::ErrorKind::TimedOut, "the relay does not say what was before");
        loop {
            let Some(ring) = self.relay_ring() else { return Err(late()) };
            let Some(frame) = ring.peek()? else {
                if Instant::now() > deadline || !ring.drain_doorbell() {
                    return Err(late());
                }
                std::thread::yield_now();
                continue;
            };
            let header = Header::parse(frame).map_err(|bad| io::Error::other(bad.0))?;
            ring.consume();
            deadline = Instant::now() + RECORD_TIME_MAX;
            let replay = self.replay.as_mut().ok_or_else(late)?;
            match (header.kind, header.sequence, header.credit) {
                (Kind::Intake, 0, 0) => {
                    replay.sent_before = header.delivered;
                    if !replay.record.is_empty() {
                        log!(Info, "started anew: {} polls are done again", replay.record.len());
                    }
                    return Ok(());
                }
                (Kind::Intake, polls, frames) => replay.record.push_back((polls, frames)),
                _ => {
                    return Err(io::Error::other(
                        "the relay begins with something else than what was before",
                    ));
                }
            }
        }
    }

    fn relay_ring(&mut self) -> Option<&mut landbridge_drive::link::shm::ShmLink> {
        let id = self.relay.link()?;
        match &mut self.links[id].as_mut()?.carrier {
            Carrier::Shm(ring) => Some(ring),
            _ => None,
        }
    }

    /// A poll of the program: takes in what it did before, or what there is. The number of frames.
    pub(super) fn poll_recorded(&mut self) -> usize {
        self.core.end_deferral();
        if self.idle.has_not_looked(self.idle.clock.now()) {
            // It brings nothing but the end of the relay, after which nothing goes on.
            self.look(0);
        }
        let Some(wanted) = self.replay.as_mut().map(Replay::poll) else { return 0 };
        let Some(id) = self.relay.link() else { return 0 };
        let frames = match wanted {
            Some(wanted) => self.take_in_again(id, wanted),
            None => {
                let frames = self.poll_ring(id);
                if frames > 0 {
                    self.record_intake(frames as u32);
                }
                frames
            }
        };
        self.flush();
        frames
    }

    fn take_in_again(&mut self, id: usize, wanted: u32) -> usize {
        let mut left = wanted as usize;
        while left > 0 {
            self.frames_per_turn = left;
            match self.poll_ring(id) {
                0 => self.wait_for_relay(),
                frames => left -= frames,
            }
        }
        self.frames_per_turn = super::receive::FRAMES_PER_TURN;
        if let Some(replay) =
            self.replay.as_ref().filter(|replay| replay.record.is_empty() && wanted > 0)
        {
            log!(Info, "live again, after {} frames", replay.repeated);
        }
        wanted as usize - left
    }

    /// The relay must do something before anything else can happen; this process ends if it is gone.
    fn wait_for_relay(&mut self) {
        if !self.relay_ring().is_some_and(|ring| ring.drain_doorbell()) {
            self.end_process("its relay has closed the connection");
        }
        std::thread::yield_now();
    }

    /// Whoever is recorded cannot go on without: what it took in and sent would be in no record, and what it did might be
    /// something else than before. Ends the process, which ends the job.
    #[cold]
    pub(super) fn end_process(&self, why: &str) -> ! {
        log!(Warn, "this process cannot go on: {why}");
        // SAFETY: ends the process at once; nothing of it may run any more.
        unsafe { libc::_exit(EXIT_CANNOT_GO_ON) }
    }

    /// A frame has gone to the relay.
    #[inline]
    pub(super) fn note_sent(&mut self) {
        if let Some(replay) = &mut self.replay {
            replay.sent += 1;
        }
    }

    /// Tells the relay, before anything follows from it.
    fn record_intake(&mut self, frames: u32) {
        let Some(replay) = self.replay.as_mut() else { return };
        let polls = std::mem::take(&mut replay.polls);
        let intake = Header {
            length: 0,
            kind: Kind::Intake,
            flags: 0,
            hops: 0,
            source: self.own.address,
            target: Address::ANONYMOUS,
            sequence: polls,
            delivered: 0,
            credit: frames,
        };
        let mut bytes = [0; HEADER_BYTES];
        intake.emit(&mut bytes);
        while self.relay_ring().is_some_and(|ring| !ring.send(&bytes, &[])) {
            self.wait_for_relay();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_frames_at_the_same_polls_and_nothing_new_before_all_is_sent_again() {
        let record = VecDeque::from([(2, 5), (1, 1)]);
        let mut replay = Replay { record, sent_before: 3, sent: 2, ..Replay::default() };
        let polls: Vec<_> = (0..6).map(|_| replay.poll()).collect();
        assert_eq!(polls, [Some(0), Some(5), Some(1), Some(0), Some(0), Some(0)]);
        replay.sent = 3;
        assert_eq!(replay.poll(), None);
        assert_eq!(replay.polls, 4, "the next intake counts from the last");
    }
}
