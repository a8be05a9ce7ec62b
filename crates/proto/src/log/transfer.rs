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
//! Each message has a word beside its payload ([`TransferHeader`]). Messages between two transports
//! arrive in order and once; that is the transports' part.
//!
//! What enters: contacts, messages, and the end of the own transport. What leaves: which messages
//! to send, and from where on frames are to be sent. What may never happen: frames of a transport
//! count after a newer one of the same process is known; frames are sent before the other side has
//! said what it has.
//!
//! [`Resume`]: TransferKind::Resume

use super::contact::Contact;

/// Messages between the transports of two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferKind {
    /// The sender has the receiver's log up to the position in the payload, from here on.
    Resume,
    /// The payload is frames of the log, each with its padding.
    Frames,
    /// The sender has the receiver's log up to the position in the payload.
    Received,
    /// The sender wants to know up to where the receiver has its log.
    Query,
}

/// Bytes of a position in a payload.
pub const POSITION_BYTES: usize = 8;

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
    /// Frames go to the other transport.
    Flowing,
    /// The other process has ended for good.
    Ended,
}

/// One process's end of the transfer with a process of another node.
#[derive(Clone, Debug)]
pub struct LogTransfer {
    state: TransferState,
    /// The newest generation of the other process's transport that is known.
    generation: u32,
    /// The position that a transport has sent before its contact was known.
    early: Option<(u32, u64)>,
    /// Up to where the other process has this process's log.
    confirmed: u64,
}

impl LogTransfer {
    /// `confirmed`: up to where the other process is known to have this process's log.
    pub fn new(confirmed: u64) -> LogTransfer {
        LogTransfer { state: TransferState::Unknown, generation: 0, early: None, confirmed }
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

    /// Handles a contact of the other process.
    pub fn handle_contact(&mut self, contact: &Contact) -> TransferAction {
        if self.has_ended() {
            return TransferAction::Nothing;
        }
        if contact.generation == Contact::ENDED {
            self.state = TransferState::Ended;
            return TransferAction::End;
        }
        let is_known = contact.generation == self.generation;
        let is_older = contact.generation < self.generation;
        if is_older || is_known && self.state != TransferState::Unknown {
            return TransferAction::Nothing;
        }
        self.generation = contact.generation;
        self.state = TransferState::AwaitPosition;
        TransferAction::Resume
    }

    /// The position from which the other side wants frames that has said so before its contact was
    /// known.
    ///
    /// # Errors
    /// As [`Self::handle`].
    pub fn position_wanted(&mut self) -> Result<TransferAction, MalformedTransfer> {
        // A contact of an earlier transport may come last.
        let early = self.early.take_if(|(generation, _)| *generation <= self.generation);
        match early {
            Some((generation, position)) if generation == self.generation => self.begin(position),
            _ => Ok(TransferAction::Nothing),
        }
    }

    /// Handles a message. `position`: its payload, where it is one. `sent`: the end of this
    /// process's log.
    ///
    /// # Errors
    /// The other process claims what cannot be.
    pub fn handle(
        &mut self,
        header: &TransferHeader,
        position: u64,
        sent: u64,
    ) -> Result<TransferAction, MalformedTransfer> {
        let is_newer = header.generation > self.generation
            || header.generation == self.generation && self.state == TransferState::Unknown;
        if header.generation < self.generation || self.has_ended() {
            return Ok(TransferAction::Nothing);
        }
        match header.kind {
            _ if position > sent => Err(MalformedTransfer("it has more than was sent to it")),
            TransferKind::Resume if is_newer => {
                let newest = self.early.filter(|(generation, _)| *generation > header.generation);
                self.early = newest.or(Some((header.generation, position)));
                Ok(TransferAction::Nothing)
            }
            _ if is_newer => Err(MalformedTransfer("it goes on without a beginning")),
            TransferKind::Resume => self.begin(position),
            TransferKind::Frames => Ok(TransferAction::Append),
            TransferKind::Query => Ok(TransferAction::Confirm),
            TransferKind::Received => {
                self.confirm(position)?;
                Ok(TransferAction::Nothing)
            }
        }
    }

    /// The transport of this process has ended. What the next one says begins from the start.
    pub fn close(&mut self) {
        if !self.has_ended() {
            self.state = TransferState::Unknown;
            self.early = None;
        }
    }

    fn begin(&mut self, position: u64) -> Result<TransferAction, MalformedTransfer> {
        self.confirm(position)?;
        self.state = TransferState::Flowing;
        Ok(TransferAction::SendFrom(position))
    }

    fn confirm(&mut self, position: u64) -> Result<(), MalformedTransfer> {
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
        ] {
            let header = TransferHeader { kind, process: 63, generation: 1 << 31 };
            assert_eq!(TransferHeader::parse(header.emit()), Some(header));
        }
        assert_eq!([TransferHeader::parse(0), TransferHeader::parse(9 << 48)], [None; 2]);
    }

    #[test]
    fn a_position_that_comes_before_its_contact_is_kept() {
        let mut transfer = LogTransfer::new(0);
        let early = transfer.handle(&header(TransferKind::Resume, 1), 64, 100);
        assert_eq!(early, Ok(TransferAction::Nothing));
        assert!(!transfer.is_flowing());
        assert_eq!(transfer.handle_contact(&contact(1)), TransferAction::Resume);
        assert_eq!(transfer.position_wanted(), Ok(TransferAction::SendFrom(64)));
        assert!(transfer.is_flowing());
    }

    #[test]
    fn a_position_that_comes_before_two_contacts_is_kept() {
        let mut transfer = LogTransfer::new(0);
        for (generation, position) in [(3, 64), (2, 32)] {
            transfer.handle(&header(TransferKind::Resume, generation), position, 100).unwrap();
        }
        for generation in [1, 2] {
            assert_eq!(transfer.handle_contact(&contact(generation)), TransferAction::Resume);
            assert_eq!(transfer.position_wanted(), Ok(TransferAction::Nothing));
        }
        assert_eq!(transfer.handle_contact(&contact(3)), TransferAction::Resume);
        assert_eq!(transfer.position_wanted(), Ok(TransferAction::SendFrom(64)));
    }

    #[test]
    fn an_older_transport_is_not_heard_any_more() {
        let mut transfer = LogTransfer::new(0);
        transfer.handle_contact(&contact(1));
        transfer.handle(&header(TransferKind::Resume, 1), 0, 0).unwrap();
        assert_eq!(transfer.handle_contact(&contact(2)), TransferAction::Resume);
        assert!(!transfer.is_flowing());
        for kind in [TransferKind::Frames, TransferKind::Resume, TransferKind::Query] {
            assert_eq!(transfer.handle(&header(kind, 1), 0, 0), Ok(TransferAction::Nothing));
        }
        assert_eq!(transfer.handle_contact(&contact(1)), TransferAction::Nothing);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let mut transfer = LogTransfer::new(500);
        transfer.handle_contact(&contact(1));
        for (kind, generation, position) in [
            (TransferKind::Resume, 1, 499),
            (TransferKind::Resume, 1, 1001),
            (TransferKind::Received, 1, 400),
            (TransferKind::Frames, 2, 0),
        ] {
            let mut transfer = transfer.clone();
            let said = transfer.handle(&header(kind, generation), position, 1000);
            assert!(said.is_err(), "{kind:?} {position}");
        }
    }

    #[test]
    fn an_ended_process_is_sent_nothing() {
        let mut transfer = LogTransfer::new(0);
        transfer.handle_contact(&contact(1));
        transfer.handle(&header(TransferKind::Resume, 1), 0, 9).unwrap();
        assert_eq!(transfer.handle_contact(&Contact::ended()), TransferAction::End);
        assert_eq!(transfer.handle_contact(&contact(2)), TransferAction::Nothing);
        transfer.close();
        assert!(transfer.has_ended() && !transfer.is_flowing());
    }

    /// One process, with its log to the other one and what has arrived of the other's.
    struct Side {
        transfer: LogTransfer,
        generation: u32,
        log: Vec<u32>,
        arrived: Vec<u32>,
        next: usize,
        /// Messages of the present transport to one of the other's transports.
        wire: VecDeque<(u32, TransferKind, u64, Vec<u32>)>,
    }

    impl Side {
        fn new() -> Side {
            Side {
                transfer: LogTransfer::new(0),
                generation: 1,
                log: vec![],
                arrived: vec![],
                next: 0,
                wire: VecDeque::new(),
            }
        }

        fn reopen(&mut self, is_killed: bool) {
            self.generation += 1;
            self.wire.clear();
            match is_killed {
                true => self.transfer = LogTransfer::new(0),
                false => self.transfer.close(),
            }
        }

        fn act(&mut self, action: TransferAction) {
            let to = self.transfer.generation();
            match action {
                TransferAction::Resume => {
                    let have = self.arrived.len() as u64;
                    self.wire.push_back((to, TransferKind::Resume, have, vec![]));
                    let wanted = self.transfer.position_wanted().unwrap();
                    self.act(wanted);
                }
                TransferAction::SendFrom(position) => self.next = position as usize,
                TransferAction::Confirm => {
                    let have = self.arrived.len() as u64;
                    self.wire.push_back((to, TransferKind::Received, have, vec![]));
                }
                TransferAction::Nothing | TransferAction::Append | TransferAction::End => (),
            }
        }

        fn send(&mut self, count: usize) {
            if self.transfer.is_flowing() {
                let end = (self.next + count).min(self.log.len());
                let frames = self.log[self.next..end].to_vec();
                self.next = end;
                let to = self.transfer.generation();
                self.wire.push_back((to, TransferKind::Frames, 0, frames));
                self.wire.push_back((to, TransferKind::Query, 0, vec![]));
            }
        }

        fn receive(&mut self, from: &mut Side) {
            let Some((to, kind, position, frames)) = from.wire.pop_front() else { return };
            // The addressed transport is gone, and with it all that was under way.
            if to != self.generation {
                return;
            }
            let header = header(kind, from.generation);
            let action = self.transfer.handle(&header, position, self.log.len() as u64).unwrap();
            if action == TransferAction::Append {
                self.arrived.extend(frames);
            }
            self.act(action);
        }
    }

    /// Two processes whose transports end at any moment, with or without the process: everything
    /// arrives once and in order.
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
                match random(12) {
                    0 if !is_over && random(8) == 0 => one.reopen(random(2) == 0),
                    1..3 if !is_over => one.log.push(step),
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
