//! The transport of a recorded process whose messages lie in logs: an endpoint that nothing
//! records, by which frames reach processes of other nodes.
//!
//! The transport is an [`Engine`] of its own: it uses the same paths as a process that is not
//! recorded (TCP, UDP, several networks, relays), and repairs them alike. Its messages are parts of
//! logs and what two transports say about them ([`landbridge_proto::log::transfer`]).
//!
//! What enters: the logs of this process, contacts of other processes, and messages. What leaves:
//! messages, and frames that have arrived, in the file of this node. What may never happen: what
//! the program sees depends on the transport in another way than by frames in the file.
//!
//! If a message cannot be delivered and its receiver is not known to have begun again, this
//! transport is replaced by a new one, which begins with every other process from what that
//! process has.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use landbridge_drive::link::node_log::mailbox::{mail, note_mail_taken};
use landbridge_drive::link::node_log::{self, NodeLogs, TRANSFER_BYTES_MAX};
use landbridge_proto::id::Address;
use landbridge_proto::log::contact::Contact;
use landbridge_proto::log::transfer::{
    LogTransfer, MalformedTransfer, POSITION_BYTES, RESUME_BYTES, TransferAction, TransferHeader,
    TransferKind,
};

use super::Engine;
use super::log_carriage::Carriage;
use super::remote_transfer::{IN_FLIGHT_MAX, NO_SLOT, RemoteTransfer};
use super::request::Iov;
use crate::abi::{self, CqTaggedEntry, Errno};
use crate::log;

/// Messages of at most this many bytes are copied, so that they leave at once.
const INJECT_BYTES_MAX: usize = 4096;
/// Bytes of a log that are sent beyond what the other process is known to have. Short messages
/// overtake a long one meanwhile, and wait for it there.
const WINDOW_BYTES: u64 = 16 << 20;
/// A process says what it has received after this many bytes, unless it is asked.
const CONFIRMED_BYTES: u64 = 1 << 20;
/// Polls between two looks for processes that cannot be reached.
const POLLS_PER_LOOK: u32 = 64;
/// Shortest and longest time until a transport that cannot deliver is replaced.
const REPLACE_TIME_MIN: Duration = Duration::from_secs(1);
const REPLACE_TIME_MAX: Duration = Duration::from_secs(30);
/// Generations of one process that a transport meets at most: the numbers of endpoints repeat.
const GENERATIONS_MAX: u32 = 200;
/// Time between two questions what a process has received, while this one waits for that.
const QUERY_INTERVAL: Duration = Duration::from_millis(20);

pub(super) struct LogTransport {
    carriage: Carriage,
    process: u16,
    /// How often the process has moved to another node.
    moves: u32,
    generation: u32,
    contacts_seen: Option<u64>,
    /// The processes of other nodes with which something is exchanged, in the order of the logs.
    remotes: Vec<RemoteTransfer>,
    /// The places of the processes in `remotes`.
    places: BTreeMap<usize, usize>,
    /// When this transport is replaced, because it cannot reach some process.
    replace_at: Option<Instant>,
    /// Polls until it is looked for processes that cannot be reached.
    polls_left: u32,
    /// Time from the failure to that.
    pause: Duration,
    asked: Instant,
}

impl LogTransport {
    /// Opens a transport for the logs of a process, which has moved to another node so often.
    ///
    /// # Errors
    /// There are no sockets, or the environment of this process is not one of the launcher.
    pub fn open(logs: &NodeLogs, own: Address, moves: u32) -> io::Result<LogTransport> {
        let process = own.index() as u16;
        let (carriage, generation) = Carriage::open(logs, process, moves)?;
        Ok(LogTransport {
            carriage,
            process,
            moves,
            generation,
            contacts_seen: None,
            remotes: Vec::new(),
            places: BTreeMap::new(),
            replace_at: None,
            polls_left: 0,
            pause: REPLACE_TIME_MIN,
            asked: Instant::now(),
        })
    }

    /// The endpoint, whose descriptor becomes readable when something arrives.
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.carriage.engine
    }

    /// Nanoseconds until a timer of the endpoint is due, at most `millis` milliseconds.
    pub fn nap_nanos(&self, millis: i32) -> u64 {
        self.carriage.engine.nap_nanos(millis)
    }

    /// A number that changes with the endpoint.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Receives and sends what is possible now.
    ///
    /// # Errors
    /// Memory for logs is full, or another process claims what cannot be.
    pub fn progress(&mut self, logs: &mut NodeLogs) -> io::Result<()> {
        self.carriage.poll();
        self.begin_with_new(logs)?;
        let changed = logs.contacts_changed();
        if self.contacts_seen != Some(changed) {
            self.contacts_seen = Some(changed);
            self.handle_contacts(logs)?;
            self.take_mail(logs)?;
        }
        while let Some(completion) = self.carriage.queue.take() {
            match completion {
                Ok(entry) if entry.flags & abi::RECV != 0 => self.handle_arrival(&entry, logs)?,
                Ok(entry) => self.handle_sent(entry.op_context, Ok(()), logs),
                // The rest of a message whose sender is gone.
                Err(error) if error.flags & abi::RECV != 0 => {
                    self.give_back(error.flags, error.op_context)?;
                }
                Err(error) => self.handle_sent(error.op_context, Err(error.err), logs),
            }
        }
        self.find_lost();
        self.send_owed(logs)?;
        self.send(logs)?;
        if self.replace_at.is_some_and(|at| Instant::now() >= at) {
            self.replace(logs)?;
        }
        Ok(())
    }

    /// Sends frames that were appended to logs to other nodes.
    ///
    /// # Errors
    /// A log holds what cannot be there.
    #[inline]
    pub fn send(&mut self, logs: &mut NodeLogs) -> io::Result<()> {
        if !logs.take_unsent() {
            return Ok(());
        }
        self.begin_with_new(logs)?;
        if node_log::clear_frames(logs) {
            // Once another node knows what the frames depend on.
            logs.note_unsent();
        }
        for place in 0..self.remotes.len() {
            self.send_to(place, logs)?;
        }
        Ok(())
    }

    fn send_to(&mut self, place: usize, logs: &mut NodeLogs) -> io::Result<()> {
        if self.remotes[place].transfer.awaited().is_some() {
            self.handle_growth(place, logs)?;
        }
        let remote = &mut self.remotes[place];
        let process = remote.process;
        // The other side reads nothing before it knows what this process has.
        let may_send = remote.transfer.is_flowing() && remote.owed != Some(TransferKind::Resume);
        let Some(number) = remote.number.filter(|_| may_send) else { return Ok(()) };
        let header = TransferHeader {
            kind: TransferKind::Frames,
            process: self.process,
            generation: self.generation,
        };
        while let Some(slot) = remote.free_slots.last().copied() {
            let (position, frames) = logs.next_frames(process)?;
            let ahead = position.saturating_sub(remote.transfer.confirmed());
            if frames.is_empty() || ahead > WINDOW_BYTES {
                return Ok(());
            }
            remote.slots[slot] = position;
            let is_copied = frames.len() <= INJECT_BYTES_MAX;
            let pieces = [
                Iov { base: (&raw mut remote.slots[slot]).cast(), len: POSITION_BYTES },
                Iov { base: frames.as_ptr().cast_mut(), len: frames.len() },
            ];
            let slot = if is_copied { NO_SLOT } else { slot };
            let context = context_of(remote.round, place, slot);
            let sent = self.carriage.send(number, header, &pieces, context, is_copied);
            match sent {
                Ok(()) => logs.note_frames_sent(process),
                // The next poll tries again.
                Err(Errno::EAGAIN) => {
                    logs.note_unsent();
                    return Ok(());
                }
                Err(error) => {
                    self.schedule_replacement(place, error.0);
                    return Ok(());
                }
            }
            if !is_copied {
                remote.free_slots.pop();
            }
        }
        Ok(())
    }

    /// The log to a process has grown that has more of it than this process has produced again.
    #[cold]
    fn handle_growth(&mut self, place: usize, logs: &mut NodeLogs) -> io::Result<()> {
        let remote = &mut self.remotes[place];
        let sent = logs.sent_end(remote.process)?;
        let action = remote.transfer.handle_growth(sent).map_err(malformed)?;
        self.act(place, action, logs)
    }

    /// A message was sent, or cannot be delivered.
    fn handle_sent(&mut self, context: usize, outcome: Result<(), i32>, logs: &mut NodeLogs) {
        let (round, place, slot) = parts_of(context);
        let Some(remote) = self.remotes.get_mut(place) else { return };
        if remote.round != round {
            return;
        }
        if slot != NO_SLOT {
            remote.free_slots.push(slot);
            logs.note_unsent();
        }
        if let Err(errno) = outcome {
            self.schedule_replacement(place, errno);
        }
    }

    #[cold]
    fn schedule_replacement(&mut self, place: usize, errno: i32) {
        let remote = &mut self.remotes[place];
        if remote.transfer.has_ended() || std::mem::replace(&mut remote.is_lost, true) {
            return;
        }
        let error = io::Error::from_raw_os_error(errno);
        log!(Info, "process {} cannot be reached: {error}", remote.process);
        let pause = self.pause;
        self.replace_at.get_or_insert_with(|| Instant::now() + pause);
    }

    /// Looks now and then for processes that the endpoint has given up: a message that was copied
    /// does not say so.
    #[inline]
    fn find_lost(&mut self) {
        self.polls_left = self.polls_left.checked_sub(1).unwrap_or(POLLS_PER_LOOK);
        if self.polls_left == 0 {
            self.look_for_lost();
        }
    }

    #[cold]
    fn look_for_lost(&mut self) {
        for place in 0..self.remotes.len() {
            let number = self.remotes[place].number;
            if let Some(errno) = number.and_then(|number| self.carriage.failure(number)) {
                self.schedule_replacement(place, errno);
            }
        }
    }

    // --- contacts

    /// Begins with processes with which something is exchanged for the first time.
    #[inline]
    fn begin_with_new(&mut self, logs: &mut NodeLogs) -> io::Result<()> {
        match logs.remote_count() == self.remotes.len() {
            true => Ok(()),
            false => self.add_remotes(logs),
        }
    }

    #[cold]
    fn add_remotes(&mut self, logs: &mut NodeLogs) -> io::Result<()> {
        let new: Vec<usize> = logs.remote_processes().skip(self.remotes.len()).collect();
        for process in new {
            let place = self.remotes.len();
            let began = if self.moves > 0 { node_log::began(logs, process)? } else { None };
            let transfer = LogTransfer::new(logs.confirmed(process)?, began);
            self.places.insert(process, place);
            self.remotes.push(RemoteTransfer::new(process, transfer));
            self.handle_contact(place, logs)?;
        }
        Ok(())
    }

    #[cold]
    fn handle_contacts(&mut self, logs: &mut NodeLogs) -> io::Result<()> {
        (0..self.remotes.len()).try_for_each(|place| self.handle_contact(place, logs))
    }

    fn handle_contact(&mut self, place: usize, logs: &mut NodeLogs) -> io::Result<()> {
        let remote = &mut self.remotes[place];
        let Some(contact) = logs.contact(remote.process) else { return Ok(()) };
        match remote.transfer.handle_contact(&contact) {
            TransferAction::Resume => self.begin(place, &contact, logs)?,
            TransferAction::End => self.forget(place),
            _ => (),
        }
        Ok(())
    }

    /// Begins with a transport of another process.
    fn begin(&mut self, place: usize, contact: &Contact, logs: &mut NodeLogs) -> io::Result<()> {
        self.forget(place);
        let number = self.carriage.av.insert(contact.name);
        let remote = &mut self.remotes[place];
        if remote.first_generation == 0 {
            remote.first_generation = contact.generation;
        }
        if contact.generation - remote.first_generation >= GENERATIONS_MAX {
            return self.replace(logs);
        }
        remote.number = Some(number);
        remote.owed = Some(TransferKind::Resume);
        remote.owes_began = self.moves > 0;
        remote.owes_question = Contact::moves(contact.generation) > 0;
        let sent = logs.sent_end(remote.process)?;
        let wanted = remote.transfer.position_wanted(sent).map_err(malformed)?;
        self.act(place, wanted, logs)
    }

    /// Ends all that is under way to the earlier transport of a process.
    fn forget(&mut self, place: usize) {
        let remote = &mut self.remotes[place];
        if let Some(number) = remote.number.take() {
            self.carriage.give_up(number);
        }
        remote.round += 1;
        remote.free_slots = (0..IN_FLIGHT_MAX).collect();
        remote.early.clear();
        (remote.owed, remote.owes_began, remote.owes_question) = (None, false, false);
        (remote.unconfirmed, remote.is_lost) = (0, false);
        if self.remotes.iter().all(|remote| !remote.is_lost) {
            self.replace_at = None;
        }
    }

    // --- messages

    fn handle_arrival(&mut self, entry: &CqTaggedEntry, logs: &mut NodeLogs) -> io::Result<()> {
        let buffer = entry.op_context;
        // SAFETY: the engine has written the message there, in one of the buffers, which is not
        // posted again before the message was handled.
        let message = match entry.len {
            0 => &[][..],
            bytes => unsafe { std::slice::from_raw_parts(entry.buf.cast::<u8>(), bytes) },
        };
        let outcome = match TransferHeader::parse(entry.data) {
            Some(header) => self.handle_message(&header, message, logs),
            None => Err(malformed(MalformedTransfer("its message is of no known kind"))),
        };
        self.give_back(entry.flags, buffer)?;
        outcome
    }

    /// Gives a buffer to the engine again whose last message was handled.
    fn give_back(&mut self, flags: u64, buffer: usize) -> io::Result<()> {
        match flags & abi::MULTI_RECV != 0 {
            true => self.carriage.post(buffer),
            false => Ok(()),
        }
    }

    fn handle_message(
        &mut self,
        header: &TransferHeader,
        message: &[u8],
        logs: &mut NodeLogs,
    ) -> io::Result<()> {
        let process = usize::from(header.process);
        let place = self.place_of(process, logs)?;
        let remote = &mut self.remotes[place];
        let word = |at: usize| {
            let bytes = message.get(at..).and_then(<[u8]>::first_chunk::<POSITION_BYTES>);
            bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
        };
        let position = word(0);
        let said = match header.kind {
            TransferKind::Frames => (0, 0),
            _ => (position, word(POSITION_BYTES)),
        };
        let sent = logs.sent_end(process)?;
        let action = remote.transfer.handle(header, said, sent).map_err(malformed)?;
        match action {
            TransferAction::Append => {
                let frames = message.get(POSITION_BYTES..).unwrap_or_default();
                self.take_frames(place, position, frames, logs)
            }
            TransferAction::NoteReceived(position) => {
                // There may be room in the window.
                logs.note_unsent();
                logs.confirm(process, position)
            }
            action => self.act(place, action, logs),
        }
    }

    /// The place of the sender of a message, which may be the first one.
    fn place_of(&mut self, process: usize, logs: &mut NodeLogs) -> io::Result<usize> {
        if let Some(&place) = self.places.get(&process) {
            return Ok(place);
        }
        if logs.is_local(process) {
            return Err(malformed(MalformedTransfer("it claims to be a process of this node")));
        }
        logs.open_other_node(process)?;
        self.begin_with_new(logs)?;
        self.places.get(&process).copied().ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Long messages overtake each other: appends the frames if all before them are there.
    fn take_frames(
        &mut self,
        place: usize,
        position: u64,
        frames: &[u8],
        logs: &mut NodeLogs,
    ) -> io::Result<()> {
        let remote = &mut self.remotes[place];
        let process = remote.process;
        let arrived = logs.arrived(process)?;
        let early_max = WINDOW_BYTES + TRANSFER_BYTES_MAX as u64;
        if position > arrived && position - arrived <= early_max {
            remote.early.insert(position, frames.to_vec());
            return Ok(());
        }
        if position > arrived || position < arrived && position >= remote.carried_end {
            return Err(malformed(MalformedTransfer("its frames are not the next ones")));
        }
        append_new(logs, process, position, frames)?;
        while let Some((&position, _)) = remote.early.first_key_value()
            && position <= logs.arrived(process)?
            && let Some((_, frames)) = remote.early.pop_first()
        {
            append_new(logs, process, position, &frames)?;
        }
        remote.unconfirmed += logs.arrived(process)? - arrived;
        if remote.unconfirmed >= CONFIRMED_BYTES {
            remote.owed.get_or_insert(TransferKind::Received);
        }
        Ok(())
    }

    /// Takes frames that the agents have carried, because their sender does nothing.
    fn take_mail(&mut self, logs: &mut NodeLogs) -> io::Result<()> {
        let Some(mail) = mail(logs) else { return Ok(()) };
        let place = self.place_of(mail.from, logs)?;
        let arrived = logs.arrived(mail.from)?;
        let remote = &mut self.remotes[place];
        // What a sender sends again on another node is compared, and this is of the last one.
        let is_of_now = Contact::moves(remote.transfer.generation()) == mail.moves;
        if mail.is_next(arrived) && is_of_now {
            let end = mail.position + mail.frames.len() as u64;
            remote.carried_end = remote.carried_end.max(end);
            self.take_frames(place, mail.position, &mail.frames, logs)?;
        }
        note_mail_taken(logs, &mail);
        Ok(())
    }

    fn act(&mut self, place: usize, action: TransferAction, logs: &mut NodeLogs) -> io::Result<()> {
        let remote = &mut self.remotes[place];
        match action {
            TransferAction::SendFrom(position) => {
                self.pause = REPLACE_TIME_MIN;
                node_log::note_compared(logs, remote.process);
                logs.send_from(remote.process, position)
            }
            TransferAction::CompareAndSendFrom(position, digest) => {
                compare(logs, remote.process, position, digest)?;
                self.act(place, TransferAction::SendFrom(position), logs)
            }
            TransferAction::Confirm => {
                remote.owed.get_or_insert(TransferKind::Received);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Says to each process what is owed to it.
    fn send_owed(&mut self, logs: &mut NodeLogs) -> io::Result<()> {
        for place in 0..self.remotes.len() {
            while self.say(place, logs)? {}
        }
        Ok(())
    }

    /// Says one thing to a process, if something may be said now; returns whether something was.
    fn say(&mut self, place: usize, logs: &mut NodeLogs) -> io::Result<bool> {
        let remote = &mut self.remotes[place];
        let (Some(kind), Some(number)) = (remote.may_say(), remote.number) else {
            return Ok(false);
        };
        let position = match kind {
            TransferKind::Began => remote.transfer.began(),
            _ => logs.arrived(remote.process)?,
        };
        // A process that has moved compares what it sends again.
        let digest = match remote.transfer.other_began() {
            Some(began) if kind == TransferKind::Resume => {
                node_log::digest_of_arrived(logs, remote.process, began)?
            }
            _ => 0,
        };
        let mut words = [position, digest].map(u64::to_le_bytes);
        let len = match kind {
            TransferKind::Query | TransferKind::AskBegan => 0,
            TransferKind::Resume => RESUME_BYTES,
            _ => POSITION_BYTES,
        };
        let pieces = [Iov { base: words.as_mut_ptr().cast(), len }];
        let pieces = if len == 0 { &[][..] } else { &pieces };
        let header = TransferHeader { kind, process: self.process, generation: self.generation };
        let context = context_of(remote.round, place, NO_SLOT);
        match self.carriage.send(number, header, pieces, context, true) {
            Ok(()) => remote.note_said(kind),
            Err(Errno::EAGAIN) => return Ok(false),
            Err(error) => {
                self.schedule_replacement(place, error.0);
                return Ok(false);
            }
        }
        // Frames have waited for that.
        logs.note_unsent();
        Ok(true)
    }

    // --- the end

    /// Replaces the endpoint by a new one.
    #[cold]
    fn replace(&mut self, logs: &mut NodeLogs) -> io::Result<()> {
        for place in 0..self.remotes.len() {
            self.forget(place);
            let remote = &mut self.remotes[place];
            remote.transfer.close();
            remote.first_generation = 0;
        }
        self.pause = (2 * self.pause).min(REPLACE_TIME_MAX);
        match Carriage::open(logs, self.process, self.moves) {
            Ok(opened) => (self.carriage, self.generation) = opened,
            Err(error) => {
                log!(Warn, "no other endpoint can be opened for other nodes yet: {error}");
                self.replace_at = Some(Instant::now() + self.pause);
                return Ok(());
            }
        }
        self.contacts_seen = None;
        log!(Info, "the transport between nodes begins again");
        Ok(())
    }

    /// Says that this process reads nothing more.
    pub fn end(&mut self, logs: &NodeLogs) {
        self.carriage.leave();
        logs.write_contact(&Contact::ended(self.moves));
        logs.ring_agent();
    }

    /// Whether every other process has this process's log to it, or has ended. Asks those that may
    /// not.
    ///
    /// # Errors
    /// A log holds what cannot be there.
    pub fn is_delivered(&mut self, logs: &NodeLogs) -> io::Result<bool> {
        let is_time = self.asked.elapsed() >= QUERY_INTERVAL;
        if is_time {
            self.asked = Instant::now();
        }
        let mut is_delivered = logs.remote_count() == self.remotes.len();
        for remote in &mut self.remotes {
            let sent = logs.sent_end(remote.process)?;
            if remote.transfer.has_ended() {
                continue;
            }
            if remote.transfer.awaited().is_some_and(|position| position > sent) {
                return Err(sends_otherwise(remote.process));
            }
            if remote.transfer.confirmed() >= sent {
                continue;
            }
            is_delivered = false;
            if is_time && remote.transfer.is_flowing() {
                remote.owed.get_or_insert(TransferKind::Query);
            }
        }
        Ok(is_delivered)
    }
}

/// Appends the frames of a message that have not arrived before.
fn append_new(logs: &mut NodeLogs, process: usize, position: u64, frames: &[u8]) -> io::Result<()> {
    let known = logs.arrived(process)? - position;
    let new = usize::try_from(known).ok().and_then(|known| frames.get(known..));
    logs.append_arrived(process, new.unwrap_or_default())
}

/// Compares what this process has sent again, before `position`, with what the other process got
/// before the node of this one was lost.
#[cold]
fn compare(logs: &NodeLogs, process: usize, position: u64, expected: u64) -> io::Result<()> {
    match node_log::digest_of_sent(logs, process, position) {
        Ok(digest) if digest == 0 || expected == 0 => Err(node_log::not_kept()),
        Ok(digest) if digest == expected => Ok(()),
        // No frame ends there, or there are other ones.
        _ => Err(sends_otherwise(process)),
    }
}

#[cold]
fn sends_otherwise(process: usize) -> io::Error {
    let text = format!("what it sends to process {process} is not what it sent before it moved");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// The context of a message: round, place of the process, and slot.
fn context_of(round: u32, place: usize, slot: usize) -> usize {
    (round as usize) << 32 | place << 16 | slot
}

fn parts_of(context: usize) -> (u32, usize, usize) {
    ((context >> 32) as u32, context >> 16 & 0xffff, context & 0xffff)
}

#[cold]
fn malformed(why: MalformedTransfer) -> io::Error {
    let text = format!("a process of another node is not as it was: {}", why.0);
    io::Error::new(io::ErrorKind::InvalidData, text)
}
