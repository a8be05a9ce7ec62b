//! Messages between the transports of processes on different nodes, and the transports themselves.
//!
//! A message between two transports arrives once. Later ones may overtake it, as if it had no
//! credit when it was sent: what says how much has arrived overtakes frames, and both overtake it.
//! (Frames that come before others of the same log wait in the transport.) Messages of a transport
//! that has ended may be lost from any point on; those to one that has ended are lost. A part of a
//! message never reaches a log, and a message that is sent again on another path does not come
//! twice: endpoints hand up whole messages, once, and give back the buffer of one whose sender is
//! gone. The simulator of endpoints breaks paths in the middle of frames.
//!
//! What enters: logs, and contacts in the file of the node. What leaves: frames in the logs of the
//! receiver. What may never happen: frames are out of order, or a message claims what cannot be.

use std::collections::{BTreeMap, VecDeque};
use std::io;

use landbridge_drive::link::node_log::mailbox::{mail, note_mail_taken};
use landbridge_drive::link::node_log::{self, NodeLogs};
use landbridge_proto::log::contact::{Contact, GENERATIONS_PER_NODE};
use landbridge_proto::log::transfer::{LogTransfer, TransferAction, TransferHeader, TransferKind};
use landbridge_proto::wire::name::NAME_BYTES;

use super::super::random::Random;
use super::super::{Violation, require};

/// Messages of one transport to another that are under way at most.
const IN_FLIGHT_MAX: usize = 4;
/// A process says what it has received after this many bytes.
const CONFIRMED_BYTES: u64 = 2_000;

/// What a process has sent again cannot be compared: the content of a [`Violation`].
pub const NOT_KEPT: &str = "what was sent again is not kept";

/// One transport: its process, and how often the process has opened one.
pub type TransportName = (usize, u32);

pub struct TransferMessage {
    header: TransferHeader,
    position: u64,
    digest: u64,
    frames: Vec<u8>,
}

impl TransferMessage {
    /// Lets the message count as one of another generation of its sender's transport.
    pub fn disguise(&mut self, generation: u32) {
        self.header.generation = generation;
    }
}

/// All messages under way, by sender and receiver.
#[derive(Default)]
pub struct Network(BTreeMap<(TransportName, TransportName), VecDeque<TransferMessage>>);

impl Network {
    fn push(&mut self, from: TransportName, to: TransportName, message: TransferMessage) {
        self.0.entry((from, to)).or_default().push_back(message);
    }

    fn in_flight(&self, from: TransportName, to: TransportName) -> usize {
        self.0.get(&(from, to)).map_or(0, VecDeque::len)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next message of some transport to some other.
    pub fn take_any(&mut self, random: &mut Random) -> Option<(TransportName, TransferMessage)> {
        let names = *self.0.keys().nth(random.index(self.0.len()))?;
        let queue = self.0.get_mut(&names)?;
        let is_overtaken = may_overtake(queue.front(), queue.get(1)) && random.percent(20);
        let message = queue.remove(usize::from(is_overtaken));
        if queue.is_empty() {
            self.0.remove(&names);
        }
        Some((names.1, message?))
    }

    /// A transport has ended: the last messages from it may be lost. Returns how many are.
    pub fn lose(&mut self, ended: TransportName, random: &mut Random) -> usize {
        let mut lost = 0;
        for ((from, _), queue) in &mut self.0 {
            if *from == ended {
                let kept = random.index(queue.len() + 1);
                lost += queue.len() - kept;
                queue.truncate(kept);
            }
        }
        self.0.retain(|_, queue| !queue.is_empty());
        lost
    }
}

/// Whether the second message may arrive before the first.
fn may_overtake(first: Option<&TransferMessage>, second: Option<&TransferMessage>) -> bool {
    let kinds = (first.map(|it| it.header.kind), second.map(|it| it.header.kind));
    let (frames, received) = (Some(TransferKind::Frames), Some(TransferKind::Received));
    kinds == (frames, received) || kinds == (received, frames) || kinds == (received, received)
}

/// What a transport knows of one other process.
struct Remote {
    transfer: LogTransfer,
    /// What remains to be said.
    owed: Option<TransferKind>,
    /// Before that: where a process has begun that has moved.
    owes_began: bool,
    /// First: where has the other process begun that has moved?
    owes_question: bool,
    /// Arrived bytes that the other process does not know of.
    unconfirmed: u64,
    /// Up to where the agents have carried frames.
    carried_end: u64,
}

/// The transport of one process.
pub struct Transport {
    name: TransportName,
    /// The process has moved to another node.
    has_moved: bool,
    remotes: BTreeMap<usize, Remote>,
    contacts_seen: Option<u64>,
}

impl Transport {
    /// Opens the next transport of a process, which has moved to another node so often, and makes
    /// it known to the agent.
    pub fn open(process: usize, moves: u32, logs: &NodeLogs) -> Transport {
        let generation = logs.generation(process).max(moves * GENERATIONS_PER_NODE) + 1;
        logs.write_contact(&Contact { generation, name: [process as u8; NAME_BYTES] });
        Transport {
            name: (process, generation),
            has_moved: moves > 0,
            remotes: BTreeMap::new(),
            contacts_seen: None,
        }
    }

    /// The next transport of the same process, on the same node.
    pub fn replaced(&self, logs: &NodeLogs) -> Transport {
        let (process, generation) = self.name;
        Transport::open(process, Contact::moves(generation), logs)
    }

    pub fn name(&self) -> TransportName {
        self.name
    }

    /// The newest generation that is known of the sender of a message, if the message is of one
    /// that the sender had on a node which is lost.
    pub fn fencing_generation(&self, message: &TransferMessage) -> Option<u32> {
        let remote = self.remotes.get(&usize::from(message.header.process))?;
        let (known, its) = (remote.transfer.generation(), message.header.generation);
        (Contact::moves(its) < Contact::moves(known)).then_some(known)
    }

    /// What is exchanged with other processes, for the developer.
    pub fn state(&self, logs: &NodeLogs) -> String {
        let each = |(process, remote): (&usize, &Remote)| {
            let (arrived, sent) = (logs.arrived(*process), logs.sent_end(*process));
            format!(
                ", {process}: {:?}, owed {:?}, {arrived:?} arrived, {sent:?} sent, contact {:?}",
                remote.transfer,
                remote.owed,
                logs.contact(*process).map(|contact| contact.generation)
            )
        };
        format!(", transport {}{}", self.name.1, self.remotes.iter().map(each).collect::<String>())
    }

    /// Begins with processes that are new, and says and sends what is possible now.
    pub fn progress(
        &mut self,
        logs: &mut NodeLogs,
        network: &mut Network,
    ) -> Result<(), Violation> {
        let known: Vec<usize> = logs.remote_processes().collect();
        for process in known
            .into_iter()
            .filter(|process| !self.remotes.contains_key(process))
            .collect::<Vec<_>>()
        {
            self.begin_with(process, logs)?;
        }
        let changed = logs.contacts_changed();
        if self.contacts_seen.replace(changed) != Some(changed) {
            for process in self.remotes.keys().copied().collect::<Vec<_>>() {
                self.handle_contact(process, logs)?;
            }
            self.take_mail(logs)?;
        }
        node_log::clear_frames(logs);
        for process in self.remotes.keys().copied().collect::<Vec<_>>() {
            self.handle_growth(process, logs)?;
            self.send_to(process, logs, network)?;
        }
        Ok(())
    }

    /// The log to a process that has more of it than was produced again may have grown.
    fn handle_growth(&mut self, process: usize, logs: &mut NodeLogs) -> Result<(), Violation> {
        let sent = logs.sent_end(process).map_err(failed)?;
        let Some(remote) = self.remotes.get_mut(&process) else { return Ok(()) };
        let action = remote.transfer.handle_growth(sent);
        let action = action.map_err(|why| Violation(format!("{process}: {}", why.0)))?;
        self.act(process, action, logs)
    }

    /// Handles a message for this transport; returns the bytes of its frames.
    pub fn handle(
        &mut self,
        message: &TransferMessage,
        logs: &mut NodeLogs,
    ) -> Result<usize, Violation> {
        let TransferMessage { header, position, digest, frames } = message;
        let process = usize::from(header.process);
        if !self.remotes.contains_key(&process) {
            require!(!logs.is_local(process), "{process} is on the node of {:?}", self.name);
            logs.open_other_node(process).map_err(failed)?;
            self.begin_with(process, logs)?;
        }
        let sent = logs.sent_end(process).map_err(failed)?;
        let Some(remote) = self.remotes.get_mut(&process) else { return Ok(0) };
        let said = if header.kind == TransferKind::Frames { 0 } else { *position };
        let action = remote.transfer.handle(header, (said, *digest), sent);
        let action = action.map_err(|why| {
            let own = self.name;
            Violation(format!("{process} to {own:?}: {} ({header:?}, {said} of {sent})", why.0))
        })?;
        match action {
            TransferAction::Append => {
                let arrived = logs.arrived(process).map_err(failed)?;
                let is_next =
                    *position == arrived || *position < arrived && *position < remote.carried_end;
                require!(is_next, "frames at {position}, and {arrived} bytes there");
                append_new(logs, process, *position, frames)?;
                remote.unconfirmed += logs.arrived(process).map_err(failed)? - arrived;
                if remote.unconfirmed >= CONFIRMED_BYTES {
                    remote.owed.get_or_insert(TransferKind::Received);
                }
                return Ok(frames.len());
            }
            TransferAction::NoteReceived(position) => {
                logs.confirm(process, position).map_err(failed)?;
            }
            action => self.act(process, action, logs)?,
        }
        Ok(0)
    }

    /// Takes frames that the agents have carried.
    fn take_mail(&mut self, logs: &mut NodeLogs) -> Result<(), Violation> {
        let Some(mail) = mail(logs) else { return Ok(()) };
        logs.open_other_node(mail.from).map_err(failed)?;
        if !self.remotes.contains_key(&mail.from) {
            self.begin_with(mail.from, logs)?;
        }
        let generation = self.remotes.get(&mail.from).map_or(0, |it| it.transfer.generation());
        let is_of_now = Contact::moves(generation) == mail.moves;
        if mail.is_next(logs.arrived(mail.from).map_err(failed)?) && is_of_now {
            if let Some(remote) = self.remotes.get_mut(&mail.from) {
                let end = mail.position + mail.frames.len() as u64;
                remote.carried_end = remote.carried_end.max(end);
            }
            append_new(logs, mail.from, mail.position, &mail.frames)?;
        }
        note_mail_taken(logs, &mail);
        Ok(())
    }

    fn begin_with(&mut self, process: usize, logs: &mut NodeLogs) -> Result<(), Violation> {
        let confirmed = logs.confirmed(process).map_err(failed)?;
        let began =
            if self.has_moved { node_log::began(logs, process).map_err(failed)? } else { None };
        let transfer = LogTransfer::new(confirmed, began);
        let (owed, owes_began, owes_question, unconfirmed, carried_end) =
            (None, false, false, 0, 0);
        let remote = Remote { transfer, owed, owes_began, owes_question, unconfirmed, carried_end };
        self.remotes.insert(process, remote);
        self.handle_contact(process, logs)
    }

    fn handle_contact(&mut self, process: usize, logs: &mut NodeLogs) -> Result<(), Violation> {
        let Some(contact) = logs.contact(process) else { return Ok(()) };
        let Some(remote) = self.remotes.get_mut(&process) else { return Ok(()) };
        if remote.transfer.handle_contact(&contact) != TransferAction::Resume {
            return Ok(());
        }
        (remote.owed, remote.unconfirmed) = (Some(TransferKind::Resume), 0);
        remote.owes_began = self.has_moved;
        remote.owes_question = Contact::moves(contact.generation) > 0;
        let wanted = remote.transfer.position_wanted(logs.sent_end(process).map_err(failed)?);
        let wanted = wanted.map_err(|why| Violation(format!("{process}: {}", why.0)))?;
        self.act(process, wanted, logs)
    }

    fn act(
        &mut self,
        process: usize,
        action: TransferAction,
        logs: &mut NodeLogs,
    ) -> Result<(), Violation> {
        match action {
            TransferAction::SendFrom(position) => {
                node_log::note_compared(logs, process);
                logs.send_from(process, position).map_err(failed)
            }
            TransferAction::CompareAndSendFrom(position, expected) => {
                let own = self.name;
                let digest = node_log::digest_of_sent(logs, process, position);
                let digest = digest.map_err(|_| {
                    Violation(format!("{own:?} has sent {process} other frames before {position}"))
                })?;
                require!(digest != 0 && expected != 0, "{own:?} to {process}: {NOT_KEPT}");
                require!(digest == expected, "{own:?} has not sent {process} the same again");
                node_log::note_compared(logs, process);
                logs.send_from(process, position).map_err(failed)
            }
            TransferAction::Confirm => {
                if let Some(remote) = self.remotes.get_mut(&process) {
                    remote.owed.get_or_insert(TransferKind::Received);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn send_to(
        &mut self,
        process: usize,
        logs: &mut NodeLogs,
        network: &mut Network,
    ) -> Result<(), Violation> {
        let Some(remote) = self.remotes.get_mut(&process) else { return Ok(()) };
        let to = (process, remote.transfer.generation());
        let header =
            |kind| TransferHeader { kind, process: self.name.0 as u16, generation: self.name.1 };
        let questions = [
            (&mut remote.owes_question, TransferKind::AskBegan),
            (&mut remote.owes_began, TransferKind::Began),
        ];
        for (owes, kind) in questions {
            if to.1 > 0 && std::mem::take(owes) {
                let (header, position) = (header(kind), remote.transfer.began());
                let message = TransferMessage { header, position, digest: 0, frames: Vec::new() };
                network.push(self.name, to, message);
            }
        }
        let may_say =
            |kind: &mut TransferKind| *kind != TransferKind::Resume || remote.transfer.may_resume();
        if to.1 > 0
            && let Some(kind) = remote.owed.take_if(may_say)
        {
            remote.unconfirmed = 0;
            let position = logs.arrived(process).map_err(failed)?;
            let digest = match remote.transfer.other_began() {
                Some(began) if kind == TransferKind::Resume => {
                    node_log::digest_of_arrived(logs, process, began).map_err(failed)?
                }
                _ => 0,
            };
            let frames = Vec::new();
            let message = TransferMessage { header: header(kind), position, digest, frames };
            network.push(self.name, to, message);
        }
        // The other side reads nothing before it knows what this process has.
        let may_send = remote.transfer.is_flowing() && remote.owed != Some(TransferKind::Resume);
        while may_send && network.in_flight(self.name, to) < IN_FLIGHT_MAX {
            let (position, frames) = logs.next_frames(process).map_err(failed)?;
            if frames.is_empty() {
                break;
            }
            let frames = frames.to_vec();
            let header = header(TransferKind::Frames);
            let message = TransferMessage { header, position, digest: 0, frames };
            network.push(self.name, to, message);
            logs.note_frames_sent(process);
        }
        Ok(())
    }
}

/// Appends frames that have not arrived before.
fn append_new(
    logs: &mut NodeLogs,
    process: usize,
    position: u64,
    frames: &[u8],
) -> Result<(), Violation> {
    let known = logs.arrived(process).map_err(failed)? - position;
    let new = frames.get(known as usize..).unwrap_or_default();
    logs.append_arrived(process, new).map_err(failed)
}

fn failed(error: io::Error) -> Violation {
    Violation(format!("a transport fails: {error}"))
}
