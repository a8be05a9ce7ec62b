//! How the frames of a log reach a process of another node: one process's end of the transfer of
//! two logs, of the own one to the other process and of its log to this one.
//!
//! Both processes have a *transport*: an endpoint that nothing records, which carries messages by
//! any path and retransmits what a network loses. A transport ends with its process, and while an
//! image is taken; the next one has a higher generation ([`super::contact`]). Two transports that
//! meet first say up to where each has the other's log in the file of its node ([`Resume`]). Then
//! each sends what the other lacks, and what is appended from then on.
//!
//! ```text
//! transport 1 of A                transport 1 of B
//!   Resume: I have 0 of yours →   ← Resume: I have 0 of yours
//!   frames 0 to 900           →
//!                             ←   Received: 900
//! (B is killed, and begins again)  transport 2 of B
//!   Resume: I have 0 of yours →   ← Resume: I have 900 of yours
//!   frames from 900 on        →
//! ```
//!
//! A process whose node was lost begins again on another node ([`Contact::moves`]), with its
//! program or with an image, and with what images hold of its logs. Others send it their logs from
//! where the image had them. Its own log grows again as it replays: once the log has come to where
//! the other side has it, both compare a digest of what was sent again, and frames flow from there
//! on. So it first says from which position on it sends again ([`Began`]).
//!
//! Each message has a word beside its payload ([`TransferHeader`]). A message between two
//! transports arrives once; that is the transports' part. A message arrives behind later ones if
//! its sender had no credit for the payload, which the first messages of a transport always have.
//!
//! What enters: contacts, messages, and the end of the own transport. What leaves: which messages
//! to send, and from where on frames are to be sent. What may never happen: frames of a transport
//! count after a newer one of the same process is known; frames are sent before the other side has
//! said what it has.
//!
//! [`Resume`]: TransferKind::Resume
//! [`Began`]: TransferKind::Began

use super::contact::Contact;

/// Messages between the transports of two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferKind {
    /// The sender has the receiver's log up to the position in the payload, from here on. The
    /// digest behind the position is that of the frames from where the receiver has begun
    /// ([`TransferKind::Began`]), if it has moved to another node; 0: there are none, or not all of
    /// them are kept.
    Resume,
    /// The payload is frames of the log, each with its padding.
    Frames,
    /// The sender has the receiver's log up to the position in the payload.
    Received,
    /// The sender wants to know up to where the receiver has its log.
    Query,
    /// The sender, which has moved to another node, sends its log again from the position in the
    /// payload on. Comes before its [`TransferKind::Resume`], and before that of the receiver.
    Began,
    /// The sender waits for [`TransferKind::Began`]: the receiver, which has moved, may not have
    /// come to where it exchanged something with the sender.
    AskBegan,
}

/// The position in [`TransferKind::Began`] of a process that has compared all that it has sent
/// again.
pub const COMPARED: u64 = u64::MAX;
/// Bytes of a position in a payload.
pub const POSITION_BYTES: usize = 8;
/// Bytes of the payload of [`TransferKind::Resume`]: a position, and the digest of the log before
/// it.
pub const RESUME_BYTES: usize = POSITION_BYTES + 8;

/// The word beside the payload of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferHeader {
    /// What the payload is.
    pub kind: TransferKind,
    /// The number of the sending process in the job.
    pub process: u16,
    /// The generation of the sender's transport.
    pub generation: u32,
}

impl TransferHeader {
    /// The word: the generation in its lower half, then the process, then the kind.
    pub fn emit(&self) -> u64 {
        let kind = self.kind as u64 + 1;
        u64::from(self.generation) | u64::from(self.process) << 32 | kind << 48
    }

    /// Reads a word. `None`: it is no such word.
    pub fn parse(word: u64) -> Option<TransferHeader> {
        let kind = match word >> 48 {
            1 => TransferKind::Resume,
            2 => TransferKind::Frames,
            3 => TransferKind::Received,
            4 => TransferKind::Query,
            5 => TransferKind::Began,
            6 => TransferKind::AskBegan,
            _ => return None,
        };
        Some(TransferHeader { kind, process: (word >> 32) as u16, generation: word as u32 })
    }
}

/// What follows from a contact or a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferAction {
    /// Nothing.
    Nothing,
    /// Begin to reach the other transport, and send [`TransferKind::Resume`] to it; then do what
    /// [`LogTransfer::position_wanted`] says.
    Resume,
    /// Send frames from this position on.
    SendFrom(u64),
    /// End the process unless the digest of its log from where it has begun up to the position is
    /// this one, and not 0; then do as for [`TransferAction::SendFrom`].
    CompareAndSendFrom(u64, u64),
    /// The other process has this process's log up to this position.
    NoteReceived(u64),
    /// Append the frames of the message.
    Append,
    /// Send [`TransferKind::Received`].
    Confirm,
    /// The other process reads nothing more.
    End,
}

/// The other process says what cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MalformedTransfer(pub &'static str);

/// How far the exchange with the other transport has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferState {
    /// No transport of the other process is known.
    Unknown,
    /// The other side has been sent what this process has, and has not said what it has.
    AwaitPosition,
    /// The other side has more than this process, which has moved, has produced again: a position,
    /// and the digest of what is before it.
    AwaitLog(u64, u64),
    /// Frames go to the other transport.
    Flowing,
    /// The other process has ended, and reads nothing more unless it moves to another node.
    Ended,
}

/// One process's end of the transfer with a process of another node.
#[derive(Clone, Debug)]
pub struct LogTransfer {
    state: TransferState,
    /// The newest generation of the other process's transport that is known.
    generation: u32,
    early: Option<EarlyMessages>,
    /// Up to where the other process has this process's log.
    confirmed: u64,
    /// This process has moved to this node, sends its log again from here on, and has not compared
    /// yet what the other process has of that.
    began: Option<u64>,
    /// The other process has moved, and sends its log again from here on.
    other_began: Option<u64>,
}

/// What a transport has said before its contact was known.
#[derive(Clone, Copy, Debug, Default)]
struct EarlyMessages {
    generation: u32,
    began: Option<u64>,
    /// The position and the digest of [`TransferKind::Resume`].
    resume: Option<(u64, u64)>,
}

impl LogTransfer {
    /// `confirmed`: up to where the other process is known to have this process's log. `began`: if
    /// this process has moved to this node, and has not compared yet what the other process has of
    /// what it sends again: from where on it does.
    pub fn new(confirmed: u64, began: Option<u64>) -> LogTransfer {
        LogTransfer {
            state: TransferState::Unknown,
            generation: 0,
            early: None,
            confirmed,
            began,
            other_began: None,
        }
    }

    /// Up to where the other process has this process's log.
    pub fn confirmed(&self) -> u64 {
        self.confirmed
    }

    /// Whether frames may be sent to the other transport.
    #[inline]
    pub fn is_flowing(&self) -> bool {
        self.state == TransferState::Flowing
    }

    /// Whether the other process reads nothing more.
    pub fn has_ended(&self) -> bool {
        self.state == TransferState::Ended
    }

    /// The generation of the other transport.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// From where on this process sends its log again; [`COMPARED`]: all that the other process has
    /// of it was compared.
    pub fn began(&self) -> u64 {
        self.began.unwrap_or(COMPARED)
    }

    /// From where on the other process sends its log again, if it has moved and has said so.
    pub fn other_began(&self) -> Option<u64> {
        self.other_began
    }

    /// Whether [`TransferKind::Resume`] may be sent: who has moved must have said where it begins.
    pub fn may_resume(&self) -> bool {
        Contact::moves(self.generation) == 0 || self.other_began.is_some()
    }

    /// Up to where the other process has this process's log, if it had more than was produced again
    /// when it said so.
    pub fn awaited(&self) -> Option<u64> {
        match self.state {
            TransferState::AwaitLog(position, _) => Some(position),
            _ => None,
        }
    }

    /// Handles a contact of the other process.
    pub fn handle_contact(&mut self, contact: &Contact) -> TransferAction {
        let is_known = contact.generation == self.generation;
        let is_older = contact.generation < self.generation;
        if is_older || is_known && self.state != TransferState::Unknown {
            return TransferAction::Nothing;
        }
        if Contact::is_of_ended(contact.generation) {
            (self.state, self.generation) = (TransferState::Ended, contact.generation);
            return TransferAction::End;
        }
        if Contact::moves(contact.generation) > Contact::moves(self.generation) {
            // Its node has nothing.
            self.confirmed = 0;
        }
        self.generation = contact.generation;
        self.state = TransferState::AwaitPosition;
        let early = self.early.filter(|early| early.generation == self.generation);
        self.other_began = early.and_then(|early| early.began);
        TransferAction::Resume
    }

    /// The position from which the other side wants frames that has said so before its contact was
    /// known. `sent`: the end of this process's log.
    ///
    /// # Errors
    /// As [`Self::handle`].
    pub fn position_wanted(&mut self, sent: u64) -> Result<TransferAction, MalformedTransfer> {
        // A contact of an earlier transport may come last.
        let early = self.early.take_if(|early| early.generation <= self.generation);
        match early.filter(|early| early.generation == self.generation) {
            Some(EarlyMessages { resume: Some((position, digest)), .. }) => {
                self.begin(position, digest, sent)
            }
            _ => Ok(TransferAction::Nothing),
        }
    }

    /// This process's log has grown, and ends at `sent`.
    ///
    /// # Errors
    /// As [`Self::handle`].
    pub fn handle_growth(&mut self, sent: u64) -> Result<TransferAction, MalformedTransfer> {
        match self.state {
            TransferState::AwaitLog(position, digest) if position <= sent => {
                self.begin(position, digest, sent)
            }
            _ => Ok(TransferAction::Nothing),
        }
    }

    /// Handles a message. `position` and `digest`: of its payload, where it has any. `sent`: the
    /// end of this process's log.
    ///
    /// # Errors
    /// The other process claims what cannot be.
    pub fn handle(
        &mut self,
        header: &TransferHeader,
        (position, digest): (u64, u64),
        sent: u64,
    ) -> Result<TransferAction, MalformedTransfer> {
        let is_newer = header.generation > self.generation
            || header.generation == self.generation && self.state == TransferState::Unknown;
        if header.generation < self.generation {
            return Ok(TransferAction::Nothing);
        }
        match header.kind {
            // The contact of the sender is, or will be, answered.
            TransferKind::AskBegan => Ok(TransferAction::Nothing),
            TransferKind::Resume | TransferKind::Began if is_newer => {
                self.note_early(header, (position, digest));
                Ok(TransferAction::Nothing)
            }
            _ if is_newer => Err(MalformedTransfer("it goes on without a beginning")),
            TransferKind::Resume => self.begin(position, digest, sent),
            TransferKind::Began => {
                self.other_began = Some(position);
                Ok(TransferAction::Nothing)
            }
            TransferKind::Frames => Ok(TransferAction::Append),
            TransferKind::Query => Ok(TransferAction::Confirm),
            // A message that had no credit as it was sent arrives behind later ones.
            TransferKind::Received if position < self.confirmed => Ok(TransferAction::Nothing),
            TransferKind::Received => {
                self.confirm(position, sent)?;
                Ok(TransferAction::NoteReceived(position))
            }
        }
    }

    /// The transport of this process has ended. What the next one says begins from the start.
    pub fn close(&mut self) {
        if !self.has_ended() {
            self.state = TransferState::Unknown;
        }
        self.early = None;
        self.other_began = None;
    }

    fn note_early(&mut self, header: &TransferHeader, (position, digest): (u64, u64)) {
        let generation = header.generation;
        let mut early = self.early.filter(|early| early.generation >= generation);
        let early = early.get_or_insert(EarlyMessages { generation, ..Default::default() });
        if early.generation == generation {
            match header.kind {
                TransferKind::Began => early.began = Some(position),
                _ => early.resume = Some((position, digest)),
            }
        }
        self.early = Some(*early);
    }

    fn begin(
        &mut self,
        position: u64,
        digest: u64,
        sent: u64,
    ) -> Result<TransferAction, MalformedTransfer> {
        if self.began.is_some() && position > sent {
            self.state = TransferState::AwaitLog(position, digest);
            return Ok(TransferAction::Nothing);
        }
        self.confirm(position, sent)?;
        self.state = TransferState::Flowing;
        Ok(match self.began.take() {
            Some(began) if position > began => TransferAction::CompareAndSendFrom(position, digest),
            _ => TransferAction::SendFrom(position),
        })
    }

    fn confirm(&mut self, position: u64, sent: u64) -> Result<(), MalformedTransfer> {
        if position > sent {
            return Err(MalformedTransfer("it has more than was sent to it"));
        }
        if position < self.confirmed {
            return Err(MalformedTransfer("it has lost what it had"));
        }
        self.confirmed = position;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
