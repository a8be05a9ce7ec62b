//! How frames reach another node while the process that has sent them does nothing: the agents of
//! both nodes carry them.
//!
//! A transport ([`super::transfer`]) works while its process looks for messages. A process that
//! computes, or waits for something else than messages, sends nothing again: what an ended
//! connection has lost, because the receiver was killed or an image of it was taken, would stay
//! away for as long. So the agent of the sender's node looks, now and then, at processes that have
//! sent nothing new for a while. For each log of such a process to another node it asks the
//! receiver's agent up to where the log has arrived. If nothing more arrives until the next look,
//! the agent sends what is missing, a part after the other, and the receiver's agent puts each part
//! into the receiver's mailbox ([`super::layout`]).
//!
//! ```text
//! sender's agent            receiver's agent        receiver
//!   Ask                →
//!                      ←    Arrived: 640
//!   (time passes)
//!   Ask                →
//!                      ←    Arrived: 640
//!   Frames from 640 on →    mailbox             →   appends them to its node's log
//!                      ←    Arrived: 1280       ←   mailbox is empty
//! ```
//!
//! A process that has moved to another node sends its log again. The receiver may have frames of
//! the lost node, which must be the same. Before its own transport has compared them, the agents
//! do: the question says from where on, and the answer holds a digest ([`super::frames_digest`]).
//! Frames of the lost node may arrive at the receiver until it knows of the move. So it takes
//! frames of a process that has moved only if they are the next ones, and the digest of the answer
//! to the next question covers what has arrived since.
//!
//! What enters: times at which the sender is quiet, answers, the file of the sender's node. What
//! leaves: questions and frames. What may never happen: something else than the sender's frames is
//! carried, because the sender has used their place again. Frames that arrive twice do no harm:
//! each part has its position.

use alloc::vec;
use alloc::vec::Vec;

use super::layout::MAIL_BYTES_MAX;
use super::segment::LogCursor;
use super::walk::{ReadLog, Walk};

/// What the sender's agent has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentTransferAction {
    /// Nothing.
    Nothing,
    /// Ask the receiver's agent up to where the log has arrived.
    Ask,
    /// Send frames from this position on, then call [`AgentTransfer::note_sent`].
    Send(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AgentTransferState {
    /// Nothing is missing, or it is not known.
    Idle,
    /// A question is under way. The answer before said this.
    Asked(Option<u64>),
    /// The log has arrived up to there, and more is missing.
    Answered(u64),
    /// Frames up to there are under way.
    Sent(u64),
}

/// The sender's agent's part for one log to a process of another node.
#[derive(Clone, Debug)]
pub struct AgentTransfer {
    state: AgentTransferState,
    /// Up to where the log is known to have arrived.
    arrived: u64,
}

impl AgentTransfer {
    /// Nothing is known. `confirmed`: up to where the sender knows that its log has arrived.
    pub fn new(confirmed: u64) -> AgentTransfer {
        AgentTransfer { state: AgentTransferState::Idle, arrived: confirmed }
    }

    /// Up to where the log is known to have arrived.
    pub fn arrived(&self) -> u64 {
        self.arrived
    }

    /// The sender knows that its log has arrived up to there.
    pub fn note_confirmed(&mut self, position: u64) {
        self.arrived = self.arrived.max(position);
    }

    /// The sender has been quiet for a while. `has_more`: its log goes on behind what has arrived.
    pub fn handle_time(&mut self, has_more: bool) -> AgentTransferAction {
        let before = match self.state {
            _ if !has_more => {
                self.state = AgentTransferState::Idle;
                return AgentTransferAction::Nothing;
            }
            AgentTransferState::Answered(position) => Some(position),
            // The question, or the frames, may be lost, or the mailbox is not empty yet.
            AgentTransferState::Asked(before) => before,
            AgentTransferState::Idle | AgentTransferState::Sent(_) => None,
        };
        self.state = AgentTransferState::Asked(before);
        AgentTransferAction::Ask
    }

    /// The receiver's agent says that the log has arrived up to there, and that the mailbox is
    /// empty. `has_more`: the log goes on behind that.
    pub fn handle_arrived(&mut self, position: u64, has_more: bool) -> AgentTransferAction {
        if position < self.arrived {
            // The answer is older than what is known, and `has_more` is not about it.
            return AgentTransferAction::Nothing;
        }
        self.arrived = position;
        match self.state {
            AgentTransferState::Idle => AgentTransferAction::Nothing,
            _ if !has_more => {
                self.state = AgentTransferState::Idle;
                AgentTransferAction::Nothing
            }
            // Nothing has arrived since, or just what the agents have carried.
            AgentTransferState::Asked(Some(before)) | AgentTransferState::Sent(before)
                if before == position =>
            {
                AgentTransferAction::Send(position)
            }
            _ => {
                self.state = AgentTransferState::Answered(position);
                AgentTransferAction::Nothing
            }
        }
    }

    /// The sender has sent more: what is missing is asked for again once it is quiet.
    pub fn stop(&mut self) {
        self.state = AgentTransferState::Idle;
    }

    /// Frames up to there were sent.
    pub fn note_sent(&mut self, end: u64) {
        self.state = AgentTransferState::Sent(end);
    }
}

/// Up to where a receiver is known to have what a process sends again that has moved.
#[derive(Clone, Copy, Debug)]
pub struct VerifiedLog(u64);

/// Whether the receiver has the same frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verification {
    /// As far as the log has arrived.
    Same,
    /// The process has not sent so much again yet, or one side does not keep all of it.
    Unknown,
    /// The process sends something else than before.
    Other,
}

/// A digest of what has arrived of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivedDigest {
    /// The position at which it begins.
    pub from: u64,
    /// See [`super::frames_digest`].
    pub digest: u64,
}

impl VerifiedLog {
    /// The process sends its log again from here on; what is before, its image has sent.
    pub fn new(began: u64) -> VerifiedLog {
        VerifiedLog(began)
    }

    /// From where on the receiver's agent makes a digest.
    pub fn position(self) -> u64 {
        self.0
    }

    /// The log has arrived up to `position`, and has this digest there. `sent`: the digest of what
    /// was sent again, from [`Self::position`] on. `None`: not all is there, or kept.
    pub fn verify(
        &mut self,
        position: u64,
        arrived: Option<ArrivedDigest>,
        sent: impl FnOnce() -> Option<u64>,
    ) -> Verification {
        if position <= self.0 {
            return Verification::Same;
        }
        // Another part: the answer to an earlier question.
        let arrived = arrived.filter(|arrived| arrived.from == self.0);
        match (arrived, sent()) {
            (Some(arrived), Some(sent)) if arrived.digest == sent => {
                self.0 = position;
                Verification::Same
            }
            (Some(_), Some(_)) => Verification::Other,
            _ => Verification::Unknown,
        }
    }
}

/// The frames of a log from `position` on, each with its padding, as many as are carried at once;
/// none: the log ends there. `cursor`: of a place at or before `position`, which the writer does
/// not use again before the caller has looked whether it is still the newest confirmed one; it goes
/// on to `position`. `None`: the log was written meanwhile, or no frame ends at `position`.
pub fn frames_behind(
    log: &impl ReadLog,
    cursor: &mut LogCursor,
    position: u64,
    region: usize,
) -> Option<Vec<u8>> {
    let mut walk = Walk::new(log, region);
    walk.pass_to(cursor, position)?;
    walk.check_segments();
    let (mut next, mut frames) = (*cursor, Vec::new());
    while let Some(at) = walk.pass(&mut next)? {
        let bytes = (next.position() - position) as usize - frames.len();
        if frames.len() + bytes > MAIL_BYTES_MAX {
            break;
        }
        frames.extend(twice(log, at, bytes)?);
    }
    Some(frames)
}

/// Bytes of a log that are the same when they are read again: the first word of a frame may be
/// written meanwhile.
fn twice(log: &impl ReadLog, at: usize, bytes: usize) -> Option<Vec<u8>> {
    let (mut first, mut second) = (vec![0; bytes], vec![0; bytes]);
    log.read(at, &mut first)?;
    log.read(at, &mut second)?;
    (first == second).then_some(first)
}

#[cfg(test)]
mod tests {
    use core::cell::RefCell;

    use super::*;
    use crate::log::segment::{SLOT_BYTES, SegmentChain};
    use crate::wire::frame::HEADER_BYTES;

    const REGION: usize = 16 << 20;

    /// A log in memory.
    struct Log {
        bytes: RefCell<Vec<u8>>,
        chain: SegmentChain,
        frames: Vec<Vec<u8>>,
    }

    impl ReadLog for Log {
        fn read(&self, at: usize, bytes: &mut [u8]) -> Option<()> {
            bytes.copy_from_slice(self.bytes.borrow().get(at..at + bytes.len())?);
            Some(())
        }
    }

    impl Log {
        fn new() -> Log {
            let bytes = RefCell::new(vec![0; REGION]);
            Log { bytes, chain: SegmentChain::new(REGION), frames: Vec::new() }
        }

        fn append(&mut self, payload: usize) {
            let bytes = HEADER_BYTES + payload;
            if !self.chain.cursor().has_room(bytes) {
                let to = self.chain.new_segment(bytes).unwrap();
                self.write(self.chain.cursor().at(), &to.announcement().to_le_bytes());
                self.chain.jump(to);
            }
            let mut frame =
                vec![(self.frames.len() % 250) as u8 + 1; bytes.next_multiple_of(SLOT_BYTES)];
            frame[..8].copy_from_slice(&(payload as u64 | 1 << 32).to_le_bytes());
            self.write(self.chain.cursor().at(), &frame);
            self.chain.pass(bytes);
            self.frames.push(frame);
        }

        fn write(&self, at: usize, bytes: &[u8]) {
            self.bytes.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    fn behind(log: &Log, position: u64) -> Option<Vec<u8>> {
        frames_behind(log, &mut LogCursor::beginning(0), position, REGION)
    }

    #[test]
    fn frames_are_read_from_any_position_on_over_segments() {
        let mut log = Log::new();
        for number in 0..500 {
            log.append(number * 97 % 9000);
        }
        let all = log.frames.concat();
        let mut position = 0;
        let mut carried = Vec::new();
        let mut place = LogCursor::START;
        loop {
            let found = behind(&log, position).unwrap();
            assert_eq!(frames_behind(&log, &mut place, position, REGION).as_ref(), Some(&found));
            assert_eq!(place.position(), position, "the next search begins here");
            assert!(found.len() <= MAIL_BYTES_MAX);
            if found.is_empty() {
                break;
            }
            position += found.len() as u64;
            carried.extend(found);
        }
        assert!(carried == all, "all frames, in their order");
        let inside = log.frames[0].len() as u64 + 1;
        assert_eq!(behind(&log, inside), None);
        assert_eq!(behind(&log, position + 64), None);
    }

    #[test]
    fn a_frame_of_the_greatest_length_is_carried_alone() {
        let mut log = Log::new();
        log.append(100);
        log.append(MAIL_BYTES_MAX - HEADER_BYTES);
        let first = behind(&log, 0).unwrap();
        assert!(first == log.frames[0]);
        let second = behind(&log, first.len() as u64).unwrap();
        assert!(second == log.frames[1]);
    }

    #[test]
    fn what_does_not_arrive_by_itself_is_sent_part_by_part() {
        let mut transfer = AgentTransfer::new(64);
        assert_eq!(transfer.handle_time(true), AgentTransferAction::Ask);
        assert_eq!(transfer.handle_arrived(128, true), AgentTransferAction::Nothing);
        assert_eq!(transfer.handle_time(true), AgentTransferAction::Ask);
        assert_eq!(transfer.handle_arrived(128, true), AgentTransferAction::Send(128));
        transfer.note_sent(640);
        assert_eq!(transfer.handle_arrived(640, true), AgentTransferAction::Send(640));
        transfer.note_sent(704);
        assert_eq!(transfer.handle_arrived(704, false), AgentTransferAction::Nothing);
        assert_eq!(transfer.arrived(), 704);
        assert_eq!(transfer.handle_time(false), AgentTransferAction::Nothing);
    }

    #[test]
    fn what_arrives_by_itself_is_not_sent() {
        let mut transfer = AgentTransfer::new(0);
        assert_eq!(transfer.handle_time(true), AgentTransferAction::Ask);
        for position in [64, 128, 192] {
            assert_eq!(transfer.handle_arrived(position, true), AgentTransferAction::Nothing);
            assert_eq!(transfer.handle_time(true), AgentTransferAction::Ask);
        }
        // A part was carried, and the transport has carried more.
        assert_eq!(transfer.handle_arrived(192, true), AgentTransferAction::Send(192));
        transfer.note_sent(256);
        assert_eq!(transfer.handle_arrived(320, true), AgentTransferAction::Nothing);
        assert_eq!(transfer.handle_time(false), AgentTransferAction::Nothing);
        assert_eq!(transfer.handle_arrived(320, true), AgentTransferAction::Nothing, "late");
    }

    #[test]
    fn an_answer_that_is_older_than_what_is_known_sends_nothing() {
        let mut transfer = AgentTransfer::new(0);
        assert_eq!(transfer.handle_time(true), AgentTransferAction::Ask);
        assert_eq!(transfer.handle_arrived(64, true), AgentTransferAction::Nothing);
        assert_eq!(transfer.handle_time(true), AgentTransferAction::Ask);
        transfer.note_confirmed(128);
        assert_eq!(transfer.handle_arrived(64, true), AgentTransferAction::Nothing);
        assert_eq!(transfer.arrived(), 128);
        assert_eq!(transfer.handle_time(true), AgentTransferAction::Ask);
        assert_eq!(transfer.handle_arrived(128, true), AgentTransferAction::Nothing);
        transfer.stop();
        assert_eq!(transfer.handle_arrived(128, true), AgentTransferAction::Nothing, "stopped");
    }

    #[test]
    fn what_was_verified_is_not_compared_again() {
        let mut log = VerifiedLog::new(64);
        let never = || -> Option<u64> { panic!("nothing is compared") };
        assert_eq!(log.verify(64, None, never), Verification::Same);
        assert_eq!(log.verify(128, None, || Some(7)), Verification::Unknown);
        let arrived = Some(ArrivedDigest { from: 64, digest: 7 });
        assert_eq!(log.verify(128, arrived, || None), Verification::Unknown);
        assert_eq!(log.verify(128, arrived, || Some(8)), Verification::Other);
        assert_eq!(log.position(), 64);
        assert_eq!(log.verify(128, arrived, || Some(7)), Verification::Same);
        assert_eq!(log.verify(192, arrived, || Some(8)), Verification::Unknown, "late");
        assert_eq!((log.position(), log.verify(100, None, never)), (128, Verification::Same));
    }

    #[test]
    fn lost_questions_and_frames_are_repeated() {
        let mut transfer = AgentTransfer::new(0);
        assert_eq!(transfer.handle_time(true), AgentTransferAction::Ask);
        assert_eq!(transfer.handle_time(true), AgentTransferAction::Ask);
        assert_eq!(transfer.handle_arrived(0, true), AgentTransferAction::Nothing);
        assert_eq!(transfer.handle_time(true), AgentTransferAction::Ask);
        assert_eq!(transfer.handle_time(true), AgentTransferAction::Ask);
        assert_eq!(transfer.handle_arrived(0, true), AgentTransferAction::Send(0));
        transfer.note_sent(64);
        assert_eq!(transfer.handle_time(true), AgentTransferAction::Ask);
        assert_eq!(transfer.handle_arrived(0, true), AgentTransferAction::Nothing);
        assert_eq!(transfer.handle_time(true), AgentTransferAction::Ask);
        assert_eq!(transfer.handle_arrived(0, true), AgentTransferAction::Send(0));
    }
}
