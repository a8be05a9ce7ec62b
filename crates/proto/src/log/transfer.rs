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
//! Each message has a word beside its payload ([`TransferHeader`]). Messages between two transports
//! arrive in order and once; that is the transports' part.
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

    /// Whether the other process has more of this process's log than was produced again.
    pub fn awaits_log(&self) -> bool {
        matches!(self.state, TransferState::AwaitLog(..))
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
mod tests {
    use alloc::collections::VecDeque;
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;
    use crate::wire::name::NAME_BYTES;

    fn contact(generation: u32) -> Contact {
        Contact { generation, name: [1; NAME_BYTES] }
    }

    fn header(kind: TransferKind, generation: u32) -> TransferHeader {
        TransferHeader { kind, process: 3, generation }
    }

    #[test]
    fn a_word_is_read_as_it_was_written() {
        for kind in [
            TransferKind::Resume,
            TransferKind::Frames,
            TransferKind::Received,
            TransferKind::Query,
            TransferKind::Began,
            TransferKind::AskBegan,
        ] {
            let header = TransferHeader { kind, process: 63, generation: 1 << 31 };
            assert_eq!(TransferHeader::parse(header.emit()), Some(header));
        }
        assert_eq!([TransferHeader::parse(0), TransferHeader::parse(9 << 48)], [None; 2]);
    }

    #[test]
    fn a_position_that_comes_before_its_contact_is_kept() {
        let mut transfer = LogTransfer::new(0, None);
        let early = transfer.handle(&header(TransferKind::Resume, 1), (64, 0), 100);
        assert_eq!(early, Ok(TransferAction::Nothing));
        assert!(!transfer.is_flowing());
        assert_eq!(transfer.handle_contact(&contact(1)), TransferAction::Resume);
        assert_eq!(transfer.position_wanted(100), Ok(TransferAction::SendFrom(64)));
        assert!(transfer.is_flowing());
    }

    #[test]
    fn a_position_that_comes_before_two_contacts_is_kept() {
        let mut transfer = LogTransfer::new(0, None);
        for (generation, position) in [(3, 64), (2, 32)] {
            transfer.handle(&header(TransferKind::Resume, generation), (position, 0), 100).unwrap();
        }
        for generation in [1, 2] {
            assert_eq!(transfer.handle_contact(&contact(generation)), TransferAction::Resume);
            assert_eq!(transfer.position_wanted(100), Ok(TransferAction::Nothing));
        }
        assert_eq!(transfer.handle_contact(&contact(3)), TransferAction::Resume);
        assert_eq!(transfer.position_wanted(100), Ok(TransferAction::SendFrom(64)));
    }

    #[test]
    fn an_older_transport_is_not_heard_any_more() {
        let mut transfer = LogTransfer::new(0, None);
        transfer.handle_contact(&contact(1));
        transfer.handle(&header(TransferKind::Resume, 1), (0, 0), 0).unwrap();
        assert_eq!(transfer.handle_contact(&contact(2)), TransferAction::Resume);
        assert!(!transfer.is_flowing());
        for kind in [TransferKind::Frames, TransferKind::Resume, TransferKind::Query] {
            assert_eq!(transfer.handle(&header(kind, 1), (0, 0), 0), Ok(TransferAction::Nothing));
        }
        assert_eq!(transfer.handle_contact(&contact(1)), TransferAction::Nothing);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let mut transfer = LogTransfer::new(500, None);
        transfer.handle_contact(&contact(1));
        for (kind, generation, position) in [
            (TransferKind::Resume, 1, 499),
            (TransferKind::Resume, 1, 1001),
            (TransferKind::Received, 1, 400),
            (TransferKind::Frames, 2, 0),
        ] {
            let mut transfer = transfer.clone();
            let said = transfer.handle(&header(kind, generation), (position, 0), 1000);
            assert!(said.is_err(), "{kind:?} {position}");
        }
    }

    #[test]
    fn who_has_moved_compares_what_the_other_side_has() {
        for (position, digest, action) in [
            (0, 0, TransferAction::SendFrom(0)),
            (64, 7, TransferAction::CompareAndSendFrom(64, 7)),
            // The other side has not kept it: nothing shows that it is the same.
            (64, 0, TransferAction::CompareAndSendFrom(64, 0)),
        ] {
            let mut transfer = LogTransfer::new(0, Some(0));
            transfer.handle_contact(&contact(1));
            let said = (position, digest);
            let waits = transfer.handle(&header(TransferKind::Resume, 1), said, 32).unwrap();
            if position > 32 {
                assert!(transfer.awaits_log() && waits == TransferAction::Nothing);
                assert_eq!(transfer.handle_growth(63), Ok(TransferAction::Nothing));
                assert_eq!(transfer.handle_growth(64), Ok(action));
            } else {
                assert_eq!(waits, action);
            }
            assert!(transfer.is_flowing());
            // The next transport of the same incarnation need not compare once more.
            transfer.close();
            transfer.handle_contact(&contact(2));
            let again = transfer.handle(&header(TransferKind::Resume, 2), (position, 0), 64);
            assert_eq!(again, Ok(TransferAction::SendFrom(position)));
        }
    }

    #[test]
    fn an_ended_process_is_sent_nothing() {
        let mut transfer = LogTransfer::new(0, None);
        transfer.handle_contact(&contact(1));
        transfer.handle(&header(TransferKind::Resume, 1), (0, 0), 9).unwrap();
        assert_eq!(transfer.handle_contact(&Contact::ended(0)), TransferAction::End);
        assert_eq!(transfer.handle_contact(&contact(2)), TransferAction::Nothing);
        let late = transfer.handle(&header(TransferKind::Frames, 1), (0, 0), 9);
        assert_eq!(late, Ok(TransferAction::Nothing));
        transfer.close();
        assert!(transfer.has_ended() && !transfer.is_flowing());
    }

    #[test]
    fn an_ended_process_that_moves_is_sent_all_that_its_image_lacks() {
        let moved = super::super::contact::GENERATIONS_PER_NODE + 1;
        for is_contact_late in [false, true] {
            let mut transfer = LogTransfer::new(0, None);
            transfer.handle_contact(&contact(1));
            transfer.handle(&header(TransferKind::Resume, 1), (9, 0), 9).unwrap();
            assert_eq!(transfer.handle_contact(&Contact::ended(0)), TransferAction::End);
            let said = [(TransferKind::Began, 0), (TransferKind::Resume, 4)];
            let mut say = |transfer: &mut LogTransfer| {
                said.map(|(kind, at)| transfer.handle(&header(kind, moved), (at, 0), 9).unwrap())[1]
            };
            let early = is_contact_late.then(|| say(&mut transfer));
            assert!(transfer.has_ended() && early.is_none_or(|at| at == TransferAction::Nothing));
            assert_eq!(transfer.handle_contact(&contact(moved)), TransferAction::Resume);
            assert_eq!(transfer.confirmed(), 0);
            let wanted = match is_contact_late {
                true => transfer.position_wanted(9).unwrap(),
                false => say(&mut transfer),
            };
            assert_eq!(wanted, TransferAction::SendFrom(4));
            assert_eq!(transfer.other_began(), Some(0));
            assert_eq!(transfer.handle_contact(&Contact::ended(1)), TransferAction::End);
        }
    }

    /// One process, with its log to the other one and what has arrived of the other's.
    struct Side {
        transfer: LogTransfer,
        generation: u32,
        log: Vec<u32>,
        /// What a process that has moved produces again, the next one last.
        again: Vec<u32>,
        arrived: Vec<u32>,
        /// How much of the log, and of what has arrived, an image holds.
        image: (usize, usize),
        began: Option<u64>,
        next: usize,
        owes_resume: bool,
        /// Messages of the present transport to one of the other's transports.
        wire: VecDeque<Sent>,
    }

    /// The receiver's generation, the kind, position and digest, frames.
    type Sent = (u32, TransferKind, (u64, u64), Vec<u32>);

    fn digest(frames: &[u32]) -> u64 {
        frames.iter().fold(1, |sum, frame| sum * 31 % 1_000_003 + u64::from(*frame))
    }

    impl Side {
        fn new() -> Side {
            Side {
                transfer: LogTransfer::new(0, None),
                generation: 1,
                log: vec![],
                again: vec![],
                arrived: vec![],
                image: (0, 0),
                began: None,
                next: 0,
                owes_resume: false,
                wire: VecDeque::new(),
            }
        }

        fn reopen(&mut self, is_killed: bool) {
            self.generation += 1;
            self.wire.clear();
            self.owes_resume = false;
            match is_killed {
                true => self.transfer = LogTransfer::new(0, self.began),
                false => self.transfer.close(),
            }
        }

        /// Loses the node, and begins on another one with the image.
        fn lose_node(&mut self) {
            self.generation =
                (Contact::moves(self.generation) + 1) * super::super::contact::GENERATIONS_PER_NODE;
            self.log.extend(self.again.drain(..).rev());
            self.again = self.log.split_off(self.image.0);
            self.again.reverse();
            self.arrived.truncate(self.image.1);
            self.began = Some(self.image.0 as u64);
            self.reopen(true);
        }

        /// No image is taken of a process that replays.
        fn take_image(&mut self) {
            if self.again.is_empty() {
                self.image = (self.log.len(), self.arrived.len());
            }
        }

        /// Says what is owed, and may be said.
        fn say(&mut self) {
            if self.owes_resume && self.transfer.may_resume() {
                self.owes_resume = false;
                let from = self.transfer.other_began().unwrap_or(COMPARED) as usize;
                let digest = self.arrived.get(from..).map_or(0, digest);
                let said = (self.arrived.len() as u64, digest);
                let to = self.transfer.generation();
                self.wire.push_back((to, TransferKind::Resume, said, vec![]));
            }
        }

        /// Appends a frame: one of before, if there is one.
        fn append(&mut self, frame: u32) {
            self.log.push(self.again.pop().unwrap_or(frame));
            let action = self.transfer.handle_growth(self.log.len() as u64).unwrap();
            self.act(action);
        }

        fn act(&mut self, action: TransferAction) {
            let to = self.transfer.generation();
            match action {
                TransferAction::Resume => {
                    if Contact::moves(to) > 0 {
                        self.wire.push_back((to, TransferKind::AskBegan, (0, 0), vec![]));
                    }
                    if Contact::moves(self.generation) > 0 {
                        let said = (self.transfer.began(), 0);
                        self.wire.push_back((to, TransferKind::Began, said, vec![]));
                    }
                    self.owes_resume = true;
                    let wanted = self.transfer.position_wanted(self.log.len() as u64).unwrap();
                    self.act(wanted);
                }
                TransferAction::SendFrom(position) => self.next = position as usize,
                TransferAction::CompareAndSendFrom(position, expected) => {
                    let from = self.began.take().unwrap() as usize;
                    assert_eq!(digest(&self.log[from..position as usize]), expected);
                    self.next = position as usize;
                }
                TransferAction::Confirm => {
                    let have = self.arrived.len() as u64;
                    self.wire.push_back((to, TransferKind::Received, (have, 0), vec![]));
                }
                TransferAction::Nothing
                | TransferAction::NoteReceived(_)
                | TransferAction::Append
                | TransferAction::End => (),
            }
        }

        fn send(&mut self, count: usize) {
            self.say();
            if self.transfer.is_flowing() && !self.owes_resume {
                let end = (self.next + count).min(self.log.len());
                let frames = self.log[self.next..end].to_vec();
                self.next = end;
                let to = self.transfer.generation();
                self.wire.push_back((to, TransferKind::Frames, (0, 0), frames));
                self.wire.push_back((to, TransferKind::Query, (0, 0), vec![]));
            }
        }

        fn receive(&mut self, from: &mut Side) {
            let Some((to, kind, said, frames)) = from.wire.pop_front() else { return };
            // The addressed transport is gone, and with it all that was under way.
            if to != self.generation {
                return;
            }
            let header = header(kind, from.generation);
            let action = self.transfer.handle(&header, said, self.log.len() as u64).unwrap();
            if action == TransferAction::Append {
                self.arrived.extend(frames);
            }
            self.act(action);
        }
    }

    /// Two processes whose transports end at any moment, with or without the process, and one of
    /// which may lose its node: everything arrives once and in order.
    #[test]
    fn every_frame_arrives_once_and_in_order() {
        for seed in 0..500_u64 {
            let mut state = seed;
            let mut random = |below: usize| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) as usize % below
            };
            let (mut one, mut other) = (Side::new(), Side::new());
            for step in 0..4000 {
                let is_over = step > 3000;
                while is_over && !other.wire.is_empty() {
                    one.receive(&mut other);
                }
                while is_over && !one.again.is_empty() {
                    one.append(step);
                }
                match random(12) {
                    0 if !is_over && random(8) == 0 => one.reopen(random(2) == 0),
                    // Frames that the other one has come from what was logged before.
                    0 if !is_over && random(60) == 0 => one.lose_node(),
                    0 if !is_over && random(10) == 0 => one.take_image(),
                    1..3 if !is_over => one.append(step),
                    3..5 => {
                        let contact = contact(other.generation);
                        let action = one.transfer.handle_contact(&contact);
                        one.act(action);
                    }
                    5..8 => one.send(1 + random(5)),
                    8..12 => one.receive(&mut other),
                    _ => (),
                }
                core::mem::swap(&mut one, &mut other);
            }
            for (from, to) in [(&one, &other), (&other, &one)] {
                assert_eq!(from.log, to.arrived, "seed {seed}");
                assert_eq!(from.transfer.confirmed(), from.log.len() as u64, "seed {seed}");
            }
        }
    }
}
