//! Tests of the transfer: single steps, and two sides with losses, restarts and moves in any order.

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
        (TransferKind::Received, 1, 1001),
        (TransferKind::Frames, 2, 0),
    ] {
        let mut transfer = transfer.clone();
        let said = transfer.handle(&header(kind, generation), (position, 0), 1000);
        assert!(said.is_err(), "{kind:?} {position}");
    }
}

#[test]
fn a_position_behind_a_later_one_changes_nothing() {
    let mut transfer = LogTransfer::new(0, None);
    transfer.handle_contact(&contact(1));
    transfer.handle(&header(TransferKind::Resume, 1), (100, 0), 1000).unwrap();
    let mut received =
        |position| transfer.handle(&header(TransferKind::Received, 1), (position, 0), 1000);
    assert_eq!(received(600), Ok(TransferAction::NoteReceived(600)));
    assert_eq!(received(400), Ok(TransferAction::Nothing), "its sender had no credit");
    assert_eq!(transfer.confirmed(), 600);
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
            assert_eq!((transfer.awaited(), waits), (Some(64), TransferAction::Nothing));
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
    let moved = crate::log::contact::GENERATIONS_PER_NODE + 1;
    for is_contact_late in [false, true] {
        let mut transfer = LogTransfer::new(0, None);
        transfer.handle_contact(&contact(1));
        transfer.handle(&header(TransferKind::Resume, 1), (9, 0), 9).unwrap();
        assert_eq!(transfer.handle_contact(&Contact::ended(0)), TransferAction::End);
        let said = [(TransferKind::Began, 0), (TransferKind::Resume, 4)];
        let say = |transfer: &mut LogTransfer| {
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
            (Contact::moves(self.generation) + 1) * crate::log::contact::GENERATIONS_PER_NODE;
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
