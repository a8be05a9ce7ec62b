//! Carries frames of logs to ranks of other nodes, while the ranks that have sent them do nothing
//! ([`landbridge_proto::log::agent_transfer`]).
//!
//! In: the file with the logs of this node's ranks, messages of the agents of other nodes. Out:
//! messages to them, and frames in the mailboxes of this node's ranks.
//!
//! What may never happen: frames are carried that may not leave this node yet; a mailbox is written
//! that its rank has not emptied.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use anyhow::Result;
use landbridge_proto::log::agent_transfer::{AgentTransfer, AgentTransferAction, frames_behind};
use landbridge_proto::log::contact::Contact;
use landbridge_proto::log::layout::{
    IS_BEING_WRITTEN, LOG_BYTES, LOGGED_PROCESSES_MAX, MAIL_BYTES_AT, MAIL_BYTES_MAX,
    MAIL_FRAMES_AT, MAIL_FROM_AT, MAIL_NUMBER_AT, MAIL_POSITION_AT, MAIL_TAKEN_AT, NOTHING_WAITS,
    STABLE_AT, TARGETS_AT, arrived_at, confirmed_at, control_at, log_at, mailbox_at,
};
use landbridge_proto::log::segment::LogCursor;
use landbridge_proto::log::walk::ReadLog;
use rustix::io::{Errno, pread, pwrite};

use super::node_logs::NodeLogs;
use super::parent_agent::ParentAgent;
use crate::control::{FrameTransfer, FrameTransferStep, Message};

/// Time between two looks at ranks that have sent nothing.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// Messages that wait for an empty mailbox at most, of each rank. Others are sent again.
const WAITING_MAX: usize = 8;
/// Questions of one look at most: all of them go through the launcher.
const QUESTIONS_MAX: usize = 32;

/// Carries frames between this node and others.
pub struct FrameCarrier {
    logs: Rc<NodeLogs>,
    senders: BTreeMap<u32, Sender>,
    mailboxes: BTreeMap<u32, Mailbox>,
    look_at: Instant,
    /// The rank with which the next look begins.
    turn: u32,
}

/// A rank of this node whose logs lead to other nodes.
#[derive(Default)]
struct Sender {
    /// Frames that it had sent when it was looked at last.
    sent_frames: u64,
    /// All of them have arrived.
    is_settled: bool,
    /// By rank of another node.
    transfers: BTreeMap<u32, AgentTransfer>,
}

/// The mailbox of a rank of this node.
#[derive(Default)]
struct Mailbox {
    /// The number of the frames in it, and their sender.
    full: Option<(u64, u32)>,
    waiting: VecDeque<(u32, u64, Vec<u8>)>,
}

impl FrameCarrier {
    /// Carries nothing yet.
    pub fn new(logs: Rc<NodeLogs>) -> FrameCarrier {
        FrameCarrier {
            logs,
            senders: BTreeMap::new(),
            mailboxes: BTreeMap::new(),
            look_at: Instant::now() + LOOK_INTERVAL,
            turn: 0,
        }
    }

    /// When the ranks are looked at next; `None`: all ranks are of this node.
    pub fn next_time(&self) -> Option<Instant> {
        self.logs.knows_other_nodes().then_some(self.look_at)
    }

    /// Looks at ranks that have sent nothing since the last look; returns questions for the agents
    /// of other nodes.
    fn look(&mut self, now: Instant) -> Vec<FrameTransfer> {
        if now < self.look_at || !self.logs.knows_other_nodes() {
            return Vec::new();
        }
        self.look_at = now + LOOK_INTERVAL;
        if self.logs.word(STABLE_AT) != NOTHING_WAITS {
            // Frames wait here for other reasons, too.
            return Vec::new();
        }
        let mut ranks = self.logs.local();
        let turn = self.turn;
        ranks.sort_by_key(|rank| (*rank < turn, *rank));
        let mut questions = Vec::new();
        for rank in ranks {
            if questions.len() >= QUESTIONS_MAX {
                break;
            }
            self.turn = rank + 1;
            questions.extend(self.look_at_rank(rank, QUESTIONS_MAX - questions.len()));
        }
        questions
    }

    /// Looks at the logs of a rank; returns at most so many questions.
    fn look_at_rank(&mut self, rank: u32, questions_max: usize) -> Vec<FrameTransfer> {
        let logs = &self.logs;
        let sender = self.senders.entry(rank).or_default();
        let sent_frames = logs.counts(rank).sent_frames;
        if sent_frames != sender.sent_frames {
            (sender.sent_frames, sender.is_settled) = (sent_frames, false);
            sender.transfers.values_mut().for_each(AgentTransfer::stop);
            return Vec::new();
        }
        if sender.is_settled {
            return Vec::new();
        }
        sender.is_settled = true;
        let mut questions = Vec::new();
        for to in targets(logs, rank).into_iter().filter(|to| !logs.is_local(*to)) {
            if logs.contact(to).is_some_and(|contact| contact.generation == Contact::ENDED) {
                continue;
            }
            if questions.len() == questions_max {
                sender.is_settled = false;
                break;
            }
            let transfer = sender.transfers.entry(to).or_insert_with(|| AgentTransfer::new(0));
            let missing = missing_frames(logs, (rank, to), transfer);
            sender.is_settled &= missing.as_ref().is_some_and(Vec::is_empty);
            let Some(missing) = missing else { continue };
            if transfer.handle_time(!missing.is_empty()) == AgentTransferAction::Ask {
                questions.push(FrameTransfer { from: rank, to, step: FrameTransferStep::Ask });
            }
        }
        questions
    }

    /// Does what is due now, and sends what follows from it to the agents of other nodes.
    pub fn advance(&mut self, parent: &mut ParentAgent) {
        for question in self.look(Instant::now()) {
            parent.send(&Message::FrameTransfer(Box::new(question)));
        }
    }

    /// Handles a message that is for a rank of this node.
    pub fn handle_message(&mut self, message: FrameTransfer, parent: &mut ParentAgent) {
        let answer = self.handle(message).map(Vec::from_iter);
        send(answer, parent);
    }

    /// Looks which ranks have emptied their mailboxes.
    pub fn handle_bell(&mut self, parent: &mut ParentAgent) {
        let answers = self.empty_mailboxes();
        send(answers, parent);
    }

    /// Handles a message that is for a rank of this node; returns the answer.
    ///
    /// # Errors
    /// The file of the logs cannot be written.
    fn handle(&mut self, message: FrameTransfer) -> Result<Option<FrameTransfer>> {
        let FrameTransfer { from, to, step } = message;
        match step {
            FrameTransferStep::Ask => {
                let mailbox = self.mailboxes.entry(to).or_default();
                let is_empty = mailbox.full.is_none() && self.logs.is_local(to);
                Ok(is_empty.then(|| arrived(&self.logs, from, to)))
            }
            FrameTransferStep::Arrived(position) => Ok(self.handle_arrived(from, to, position)),
            FrameTransferStep::Frames { position, bytes } => {
                let is_mail = bytes.len() <= MAIL_BYTES_MAX && self.logs.is_local(to);
                let mailbox = self.mailboxes.entry(to).or_default();
                if is_mail && mailbox.waiting.len() < WAITING_MAX {
                    mailbox.waiting.push_back((from, position, bytes));
                    mailbox.fill(&self.logs, to)?;
                }
                Ok(None)
            }
        }
    }

    fn handle_arrived(&mut self, from: u32, to: u32, position: u64) -> Option<FrameTransfer> {
        let transfer = self.senders.get_mut(&from)?.transfers.get_mut(&to)?;
        transfer.note_confirmed(position);
        // From here on what is known is not before `position`; an older answer is ignored.
        let bytes = missing_frames(&self.logs, (from, to), transfer)?;
        match transfer.handle_arrived(position, !bytes.is_empty()) {
            AgentTransferAction::Send(position) => {
                transfer.note_sent(position + bytes.len() as u64);
                let step = FrameTransferStep::Frames { position, bytes };
                Some(FrameTransfer { from, to, step })
            }
            _ => None,
        }
    }

    /// Looks which ranks have emptied their mailboxes; returns what has arrived by that.
    ///
    /// # Errors
    /// The file of the logs cannot be written.
    fn empty_mailboxes(&mut self) -> Result<Vec<FrameTransfer>> {
        let mut answers = Vec::new();
        for (&rank, mailbox) in &mut self.mailboxes {
            let Some((number, from)) = mailbox.full else { continue };
            if self.logs.word(mailbox_at(rank as usize) + MAIL_TAKEN_AT) == number {
                mailbox.full = None;
                answers.push(arrived(&self.logs, from, rank));
                mailbox.fill(&self.logs, rank)?;
            }
        }
        Ok(answers)
    }
}

impl Mailbox {
    /// Puts the frames into it that wait longest, if it is empty.
    fn fill(&mut self, logs: &NodeLogs, rank: u32) -> Result<()> {
        if self.full.is_some() {
            return Ok(());
        }
        let Some((from, position, bytes)) = self.waiting.pop_front() else { return Ok(()) };
        let mailbox = mailbox_at(rank as usize);
        let number = logs.word(mailbox + MAIL_TAKEN_AT) + 1;
        let written = pwrite(logs.fd(), &bytes, mailbox + MAIL_FRAMES_AT)?;
        if written < bytes.len() {
            return Err(Errno::NOMEM.into());
        }
        for (at, word) in [
            (MAIL_FROM_AT, u64::from(from)),
            (MAIL_POSITION_AT, position),
            (MAIL_BYTES_AT, bytes.len() as u64),
        ] {
            pwrite(logs.fd(), &word.to_ne_bytes(), mailbox + at)?;
        }
        logs.write_release(mailbox + MAIL_NUMBER_AT, number)?;
        self.full = Some((number, from));
        logs.note_change()?;
        logs.ring(rank)
    }
}

fn send(messages: Result<Vec<FrameTransfer>>, parent: &mut ParentAgent) {
    match messages {
        Ok(messages) => {
            for message in messages {
                parent.send(&Message::FrameTransfer(Box::new(message)));
            }
        }
        Err(error) => parent.fail(format!("its message logs cannot be written: {error:#}")),
    }
}

/// What has arrived of a log at a rank of this node.
fn arrived(logs: &NodeLogs, from: u32, to: u32) -> FrameTransfer {
    let position = logs.word(arrived_at(from as usize, to as usize));
    FrameTransfer { from, to, step: FrameTransferStep::Arrived(position) }
}

/// The ranks to which a rank has sent something.
fn targets(logs: &NodeLogs, rank: u32) -> Vec<u32> {
    let at = control_at(rank as usize) + TARGETS_AT as u64;
    let words = (0..LOGGED_PROCESSES_MAX as u32 / 64).map(|place| (place, u64::from(place) * 8));
    let ranks = words.flat_map(|(place, offset)| {
        let word = logs.word(at + offset);
        (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| place * 64 + bit)
    });
    ranks.collect()
}

/// The frames of a log behind what has arrived ([`AgentTransfer::arrived`]). `None`: its sender
/// does something just now.
fn missing_frames(
    logs: &NodeLogs,
    (from, to): (u32, u32),
    transfer: &mut AgentTransfer,
) -> Option<Vec<u8>> {
    let at = confirmed_at(from as usize, to as usize);
    let confirmed = logs.word(at);
    if confirmed == IS_BEING_WRITTEN {
        return None;
    }
    let cursor = [confirmed, logs.word(at + 8), logs.word(at + 16)];
    let position = confirmed.max(transfer.arrived());
    let log = LogBytes { logs, start: log_at(from as usize, to as usize) };
    let frames = LogCursor::from_words(cursor, LOG_BYTES)
        .and_then(|cursor| frames_behind(&log, cursor, position, LOG_BYTES))?;
    // What lies behind the cursor is not used again before the cursor goes on.
    fence(Ordering::SeqCst);
    if logs.word(at) != confirmed {
        return None;
    }
    transfer.note_confirmed(confirmed);
    Some(frames)
}

/// The region of a log in the file.
struct LogBytes<'a> {
    logs: &'a NodeLogs,
    start: u64,
}

impl ReadLog for LogBytes<'_> {
    fn read(&self, at: usize, bytes: &mut [u8]) -> Option<()> {
        let wanted = bytes.len();
        let read = pread(self.logs.fd(), bytes, self.start + at as u64).ok()?;
        (read == wanted).then_some(())
    }
}
