//! Carries frames of logs to ranks of other nodes, while the ranks that have sent them do nothing
//! ([`landbridge_proto::log::agent_transfer`]).
//!
//! In: the file with the logs of this node's ranks, messages of the agents of other nodes. Out:
//! messages to them, and frames in the mailboxes of this node's ranks.
//!
//! Where ranks may move to another node, frames leave once the agent above knows what they depend
//! on ([`NodeCut`]): this agent asks for that itself, because their sender does nothing. A rank
//! that has moved lacks what it had before. What such a rank has sent again is compared with what
//! the receiver has, by the agents if it does nothing.
//!
//! What may never happen: frames are carried that may not leave this node yet, or behind other
//! frames than those that their sender has sent again; a mailbox is written that its rank has not
//! emptied.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use landbridge_proto::log::agent_transfer::{
    AgentTransfer, AgentTransferAction, Verification, VerifiedLog, frames_behind,
};
use landbridge_proto::log::contact::Contact;
use landbridge_proto::log::layout::{
    IS_BEING_WRITTEN, MAIL_BYTES_AT, MAIL_BYTES_MAX, MAIL_FRAMES_AT, MAIL_FROM_AT, MAIL_MOVES_AT,
    MAIL_NUMBER_AT, MAIL_POSITION_AT, MAIL_TAKEN_AT, REGION_BYTES, arrived_at, begins_at,
    confirmed_at, discarded_at, mailbox_at, release_at,
};
use landbridge_proto::log::segment::LogCursor;
use rustix::io::{Errno, pwrite};

use super::log_comparison::{
    arrived_digest, digest_of, is_compared, refuse_unless_other_part, sends_otherwise,
};
use super::node_cut::NodeCut;
use super::node_logs::NodeLogs;
use super::parent_agent::ParentAgent;
use crate::control::{FrameTransfer, FrameTransferStep, LogDigest, Message};

/// Time between two looks at ranks that have sent nothing.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// Time after which a question for a digest is repeated.
const REPEAT_AFTER: Duration = Duration::from_secs(5);
/// Messages that wait for an empty mailbox at most, of each rank. Others are sent again.
const WAITING_MAX: usize = 8;
/// Questions of one look at most: all of them go through the launcher.
const QUESTIONS_MAX: usize = 32;
/// Tickets from here on are those of agents; ranks draw lower ones.
pub const AGENT_TICKETS: u64 = 1 << 63;

/// Carries frames between this node and others.
pub struct FrameCarrier {
    logs: Rc<NodeLogs>,
    senders: BTreeMap<u32, Sender>,
    mailboxes: BTreeMap<u32, Mailbox>,
    look_at: Instant,
    /// The rank with which the next look begins.
    turn: u32,
    /// If ranks may move: with this the agent above gets what frames depend on.
    cut: Option<Rc<NodeCut>>,
    /// The last ticket that this agent has drawn, and whether it is answered.
    ticket: (u64, bool),
}

/// A rank of this node whose logs lead to other nodes.
#[derive(Default)]
struct Sender {
    /// Frames that it had sent when it was looked at last.
    sent_frames: u64,
    /// All of them have arrived.
    is_settled: bool,
    /// The receiver with which the next look begins.
    turn: u32,
    /// By rank of another node.
    transfers: BTreeMap<u32, CarriedLog>,
}

/// The log to a rank of another node.
struct CarriedLog {
    transfer: AgentTransfer,
    /// How often that rank has moved.
    moves: u32,
    /// The rank has moved since this node has known it: what it has of the log, it has not said to
    /// the sender, but to the agents.
    has_moved: bool,
    /// If the sender has moved: up to where the agents have compared what it sends again.
    verified: Option<VerifiedLog>,
    /// Where the frames begin that were read last: a search for later ones begins there.
    place: Option<LogCursor>,
    /// The end of the frames that were seen last.
    seen_end: u64,
    /// The ends of frames that were seen before a ticket was drawn, and before it was answered.
    asked_end: u64,
    cleared_end: u64,
    /// Before that, a question for a digest is not repeated: to make one may take seconds.
    repeat_at: Option<Instant>,
}

impl CarriedLog {
    /// `began`: if the sender has moved, the position from which on it sends again.
    fn new(moves: u32, began: Option<u64>) -> CarriedLog {
        CarriedLog {
            transfer: AgentTransfer::new(0),
            moves,
            has_moved: moves > 0,
            verified: began.map(VerifiedLog::new),
            place: None,
            seen_end: 0,
            asked_end: 0,
            cleared_end: 0,
            repeat_at: None,
        }
    }

    /// Notes how often the rank has moved that reads the log.
    fn note_moves(&mut self, moves: u32) {
        if moves > self.moves {
            (self.transfer, self.moves, self.has_moved) = (AgentTransfer::new(0), moves, true);
        }
    }
}

/// Frames for a rank of this node.
struct CarriedFrames {
    from: u32,
    moves: u32,
    position: u64,
    digest_from: Option<u64>,
    bytes: Vec<u8>,
}

/// The mailbox of a rank of this node.
#[derive(Default)]
struct Mailbox {
    /// The number of the frames in it, their sender, and from where on a digest is wanted.
    full: Option<(u64, u32, Option<u64>)>,
    waiting: VecDeque<CarriedFrames>,
}

impl FrameCarrier {
    /// Carries nothing yet. `cut`: see [`FrameCarrier::cut`].
    pub fn new(logs: Rc<NodeLogs>, cut: Option<Rc<NodeCut>>) -> FrameCarrier {
        FrameCarrier {
            cut,
            ticket: (AGENT_TICKETS, true),
            logs,
            senders: BTreeMap::new(),
            mailboxes: BTreeMap::new(),
            look_at: Instant::now() + LOOK_INTERVAL,
            turn: 0,
        }
    }

    /// When the ranks are looked at next; `None`: all ranks are of this node.
    pub fn next_time(&self) -> Option<Instant> {
        self.logs.contacts.knows_other_nodes().then_some(self.look_at)
    }

    /// Looks at ranks that have sent nothing since the last look; returns questions for the agents
    /// of other nodes.
    fn look(&mut self, now: Instant) -> Vec<FrameTransfer> {
        if now < self.look_at || !self.logs.contacts.knows_other_nodes() {
            return Vec::new();
        }
        self.look_at = now + LOOK_INTERVAL;
        self.logs.release_deferred();
        let mut ranks = self.logs.local();
        let turn = self.turn;
        ranks.sort_by_key(|rank| (*rank < turn, *rank));
        let mut questions = Vec::new();
        for rank in ranks {
            if questions.len() >= QUESTIONS_MAX {
                break;
            }
            self.turn = rank + 1;
            questions.extend(self.look_at_rank(rank, QUESTIONS_MAX - questions.len(), now));
        }
        questions
    }

    /// Looks at the logs of a rank; returns at most so many questions.
    fn look_at_rank(
        &mut self,
        rank: u32,
        questions_max: usize,
        now: Instant,
    ) -> Vec<FrameTransfer> {
        let logs = &self.logs;
        let sender = self.senders.entry(rank).or_default();
        let sent_frames = logs.counts(rank).sent_frames;
        if sent_frames != sender.sent_frames {
            (sender.sent_frames, sender.is_settled) = (sent_frames, false);
            sender.transfers.values_mut().for_each(|log| log.transfer.stop());
            return Vec::new();
        }
        let has_moved = |(to, log): (&u32, &CarriedLog)| {
            let contact = logs.contacts.contact_of(*to);
            contact.is_some_and(|contact| Contact::moves(contact.generation) > log.moves)
        };
        if sender.is_settled && !sender.transfers.iter().any(has_moved) {
            return Vec::new();
        }
        sender.is_settled = true;
        let mut questions = Vec::new();
        let mut targets = logs.targets(rank);
        targets.retain(|to| !logs.is_local(*to));
        let turn = sender.turn;
        targets.sort_by_key(|to| (*to < turn, *to));
        for to in targets {
            if questions.len() == questions_max {
                (sender.is_settled, sender.turn) = (false, to);
                break;
            }
            let generation = logs.contacts.contact_of(to).map_or(0, |contact| contact.generation);
            let moves = Contact::moves(generation);
            let began = || logs.has_moved(rank).then(|| logs.sent_before(rank, to));
            let new = || CarriedLog::new(moves, began());
            let log = sender.transfers.entry(to).or_insert_with(new);
            log.note_moves(moves);
            if Contact::is_of_ended(generation) {
                // It reads nothing more, unless its node is lost.
                continue;
            }
            let missing = missing_frames(logs, (rank, to), log);
            sender.is_settled &= missing.as_ref().is_some_and(Vec::is_empty);
            let is_missing = match missing {
                Some(missing) => !missing.is_empty(),
                // What it has, it has to say first.
                None if log.has_moved || log.verified.is_some() => true,
                None => continue,
            };
            if is_missing && log.repeat_at.is_some_and(|at| now < at) {
                continue;
            }
            if log.transfer.handle_time(is_missing) == AgentTransferAction::Ask {
                let digest_from = digest_from(logs, (rank, to), log);
                log.repeat_at = digest_from.map(|_| now + REPEAT_AFTER);
                let step = FrameTransferStep::Ask { digest_from, has_ended: false };
                questions.push(FrameTransfer { from: rank, to, step });
            }
        }
        questions
    }

    /// Does what is due now, and sends what follows from it to the agents of other nodes.
    pub fn advance(&mut self, parent: &mut ParentAgent) {
        if self.logs.files().take_corrupt() {
            return parent.fail("a message log came back corrupt from the disk".to_string());
        }
        for question in self.look(Instant::now()) {
            parent.send(&Message::FrameTransfer(Box::new(question)));
        }
        self.draw_ticket(parent);
    }

    /// Asks the agent above to know what frames depend on that it may not know of, once it has
    /// answered the last ticket.
    fn draw_ticket(&mut self, parent: &mut ParentAgent) {
        let (Some(cut), (last, true)) = (&self.cut, self.ticket) else { return };
        let mut logs = self.senders.values_mut().flat_map(|sender| sender.transfers.values_mut());
        if logs.all(|log| log.seen_end <= log.cleared_end) {
            return;
        }
        for log in self.senders.values_mut().flat_map(|sender| sender.transfers.values_mut()) {
            log.asked_end = log.seen_end;
        }
        self.ticket = (last + 1, false);
        cut.send(last + 1, parent);
    }

    /// The agent above knows what the frames depend on that were seen before this ticket was drawn.
    pub fn handle_stable(&mut self, ticket: u64) {
        if ticket != self.ticket.0 {
            return;
        }
        self.ticket.1 = true;
        for log in self.senders.values_mut().flat_map(|sender| sender.transfers.values_mut()) {
            log.cleared_end = log.asked_end;
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
            FrameTransferStep::Ask { digest_from, has_ended } => {
                let mailbox = self.mailboxes.entry(to).or_default();
                if !self.logs.is_local(to) || !has_ended && mailbox.full.is_some() {
                    return Ok(None);
                }
                let not_yet = || FrameTransfer { from, to, step: FrameTransferStep::NotYet };
                Ok(match has_come(&self.logs, to) {
                    true => Some(arrived(&self.logs, (from, to), digest_from)),
                    false => has_ended.then(not_yet),
                })
            }
            FrameTransferStep::NotYet => Ok(None),
            FrameTransferStep::Arrived { position, digest } => {
                self.handle_arrived((from, to), position, digest)
            }
            FrameTransferStep::Frames { moves, position, digest_from, bytes } => {
                let is_mail = bytes.len() <= MAIL_BYTES_MAX && self.logs.is_local(to);
                let mailbox = self.mailboxes.entry(to).or_default();
                if is_mail && mailbox.waiting.len() < WAITING_MAX {
                    let frames = CarriedFrames { from, moves, position, digest_from, bytes };
                    mailbox.waiting.push_back(frames);
                    mailbox.fill(&self.logs, to)?;
                }
                Ok(None)
            }
        }
    }

    /// What a rank of this node that has moved has sent again is compared up to there.
    pub fn note_compared(&mut self, (from, to): (u32, u32), position: u64) {
        let generation = self.logs.contacts.contact_of(to).map_or(0, |contact| contact.generation);
        let transfers = &mut self.senders.entry(from).or_default().transfers;
        let new = || CarriedLog::new(Contact::moves(generation), Some(position));
        let log = transfers.entry(to).or_insert_with(new);
        let compared = log.verified.map_or(position, |verified| verified.position().max(position));
        log.verified = Some(VerifiedLog::new(compared));
    }

    /// # Errors
    /// The receiver has other frames than the sender sends again.
    fn handle_arrived(
        &mut self,
        (from, to): (u32, u32),
        position: u64,
        digest: Option<LogDigest>,
    ) -> Result<Option<FrameTransfer>> {
        let sender = self.senders.get_mut(&from);
        let Some(log) = sender.and_then(|sender| sender.transfers.get_mut(&to)) else {
            return Ok(None);
        };
        if let Some(verified) = log.verified.as_mut().filter(|_| !is_compared(&self.logs, from, to))
        {
            let part = (verified.position(), position);
            let arrived = digest.as_ref().and_then(arrived_digest);
            match verified.verify(position, arrived, || digest_of(&self.logs, (from, to), part)) {
                Verification::Same => (),
                Verification::Unknown => {
                    // One that has ended sends nothing more, so no later answer says anything else.
                    if has_ended(&self.logs, from) {
                        refuse_unless_other_part(&self.logs, (from, to), part, digest.as_ref())?;
                    }
                    return Ok(None);
                }
                Verification::Other => bail!(sends_otherwise(from, to)),
            }
        }
        log.repeat_at = None;
        log.transfer.note_confirmed(position);
        Ok(self.frames_from(from, to, position))
    }

    /// The frames of a log that has arrived up to `position`, if they are to be carried.
    fn frames_from(&mut self, from: u32, to: u32, position: u64) -> Option<FrameTransfer> {
        let log = self.senders.get_mut(&from)?.transfers.get_mut(&to)?;
        // From here on what is known is not before `position`; an older answer is ignored.
        let mut bytes = missing_frames(&self.logs, (from, to), log)?;
        if self.cut.is_some() {
            let cleared = log.cleared_end.saturating_sub(position) as usize;
            // What was seen ends where a frame does.
            bytes.truncate(cleared);
        }
        match log.transfer.handle_arrived(position, !bytes.is_empty()) {
            AgentTransferAction::Send(position) => {
                log.transfer.note_sent(position + bytes.len() as u64);
                let generation =
                    self.logs.contacts.contact_of(from).map_or(0, |contact| contact.generation);
                let moves = Contact::moves(generation);
                let digest_from = digest_from(&self.logs, (from, to), log);
                let step = FrameTransferStep::Frames { moves, position, digest_from, bytes };
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
            let Some((number, from, digest_from)) = mailbox.full else { continue };
            if self.logs.word(mailbox_at(rank as usize) + MAIL_TAKEN_AT) == number {
                mailbox.full = None;
                answers.push(arrived(&self.logs, (from, rank), digest_from));
                mailbox.fill(&self.logs, rank)?;
            }
        }
        Ok(answers)
    }
}

impl Mailbox {
    /// Puts the frames into it that wait longest, if it is empty.
    fn fill(&mut self, logs: &NodeLogs, rank: u32) -> Result<()> {
        self.fill_from(logs, rank).context("its message logs cannot be written")
    }

    fn fill_from(&mut self, logs: &NodeLogs, rank: u32) -> Result<()> {
        if self.full.is_some() {
            return Ok(());
        }
        let Some(frames) = self.waiting.pop_front() else { return Ok(()) };
        let CarriedFrames { from, moves, position, digest_from, bytes } = frames;
        let mailbox = mailbox_at(rank as usize);
        let number = logs.word(mailbox + MAIL_TAKEN_AT) + 1;
        let written = pwrite(&logs.files().memory, &bytes, mailbox + MAIL_FRAMES_AT)?;
        if written < bytes.len() {
            return Err(Errno::NOMEM.into());
        }
        for (at, word) in [
            (MAIL_FROM_AT, u64::from(from)),
            (MAIL_MOVES_AT, u64::from(moves)),
            (MAIL_POSITION_AT, position),
            (MAIL_BYTES_AT, bytes.len() as u64),
        ] {
            pwrite(&logs.files().memory, &word.to_ne_bytes(), mailbox + at)?;
        }
        logs.files().write_release(mailbox + MAIL_NUMBER_AT, number)?;
        self.full = Some((number, from, digest_from));
        logs.contacts.note_change()?;
        logs.contacts.ring(rank)
    }
}

fn send(messages: Result<Vec<FrameTransfer>>, parent: &mut ParentAgent) {
    match messages {
        Ok(messages) => {
            for message in messages {
                parent.send(&Message::FrameTransfer(Box::new(message)));
            }
        }
        Err(error) => parent.fail(format!("{error:#}")),
    }
}

/// What has arrived of a log at a rank of this node, with a digest from some position on.
fn arrived(logs: &NodeLogs, (from, to): (u32, u32), digest_from: Option<u64>) -> FrameTransfer {
    let position = logs.word(arrived_at(from as usize, to as usize));
    let digest = digest_from.map(|began| {
        let part = (began < position).then_some((began, position));
        let digest = part.and_then(|part| digest_of(logs, (from, to), part));
        LogDigest { from: began, digest }
    });
    FrameTransfer { from, to, step: FrameTransferStep::Arrived { position, digest } }
}

/// Whether the file of this node says what a rank of this node has: not before a rank that has
/// moved here has found its logs. Until then its image may have more.
fn has_come(logs: &NodeLogs, rank: u32) -> bool {
    let contact = logs.contacts.contact_of(rank);
    contact.map_or(0, |contact| Contact::moves(contact.generation)) >= logs.moves(rank)
}

/// Whether a rank sends and reads nothing more, unless its node is lost.
fn has_ended(logs: &NodeLogs, rank: u32) -> bool {
    let contact = logs.contacts.contact_of(rank);
    contact.is_some_and(|contact| Contact::is_of_ended(contact.generation))
}

/// From where on the receiver's agent is to make a digest; `None`: the agents need not compare.
fn digest_from(logs: &NodeLogs, (from, to): (u32, u32), log: &CarriedLog) -> Option<u64> {
    log.verified.filter(|_| !is_compared(logs, from, to)).map(VerifiedLog::position)
}

/// The frames of a log behind what has arrived ([`AgentTransfer::arrived`]). `None`: its sender
/// does something just now, or nothing can be said of what has arrived.
fn missing_frames(
    logs: &NodeLogs,
    (from, to): (u32, u32),
    log: &mut CarriedLog,
) -> Option<Vec<u8>> {
    let pair = (from as usize, to as usize);
    let at = confirmed_at(pair.0, pair.1);
    let confirmed = logs.word(at);
    if confirmed == IS_BEING_WRITTEN {
        return None;
    }
    let knows_nothing = log.has_moved || !is_compared(logs, from, to);
    let position = match knows_nothing {
        true => log.transfer.arrived(),
        false => confirmed.max(log.transfer.arrived()),
    };
    let released = logs.word(release_at(pair.0, pair.1));
    let known = match confirmed {
        0 if logs.word(at + 16) == 0 => {
            let begin = LogCursor::beginning(logs.word(begins_at(pair.0, pair.1)));
            // Something else may lie there now.
            if released > begin.position() { logs.start(pair)? } else { begin }
        }
        _ if position < confirmed => logs.start(pair)?,
        _ => {
            let cursor = [confirmed, logs.word(at + 8), logs.word(at + 16)];
            LogCursor::from_words(cursor, REGION_BYTES)?
        }
    };
    if confirmed == 0 && released > known.position() {
        return None;
    }
    let is_between = |place: &LogCursor| (known.position()..=position).contains(&place.position());
    let mut cursor = log.place.take().filter(is_between).unwrap_or(known);
    let begin = cursor.position();
    let region = logs.files().region(pair);
    let frames = frames_behind(&region, &mut cursor, position, REGION_BYTES);
    // What lies behind the cursor is not used again before the cursor goes on.
    fence(Ordering::SeqCst);
    if logs.word(at) != confirmed || logs.word(discarded_at(pair.0, pair.1)) > begin {
        return None;
    }
    logs.files().note_read(&region);
    let frames = frames?;
    log.place = Some(cursor);
    if !knows_nothing {
        log.transfer.note_confirmed(confirmed);
    }
    log.seen_end = log.seen_end.max(position + frames.len() as u64);
    Some(frames)
}
