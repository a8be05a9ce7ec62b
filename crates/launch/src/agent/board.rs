//! The boards of this host's ranks ([`landbridge_proto::board`]): memory on which each says how its paths are.
//!
//! A look begins with a question on every board and ends when every rank has answered, or after [`PATIENCE`]: ranks that
//! compute do not answer. Then the launcher hears of all of them in one message.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use landbridge_proto::board::{
    ANSWERED_AT, ASKED_AT, BOARD_BYTES, LENGTH_AT, MAGIC, SLOTS, TAKEN_AT, TEXT_AT, TEXT_BYTES_MAX,
    VERSION_AT, slot_at,
};
use rustix::fs::MemfdFlags;
use rustix::io::{pread, pwrite};

use super::Agent;
use crate::control::Message;
use crate::ps::paths::Paths;
use crate::sys;

/// Ranks inside MPI look at their network every millisecond or so; the machine may be busy.
const PATIENCE: Duration = Duration::from_millis(400);
/// Between two glances at boards that are not answered.
const GLANCE: Duration = Duration::from_millis(5);
/// A text that is changed again and again while it is read is given up.
const READS_MAX: u32 = 8;

/// The board of one rank, for all its starts.
pub struct Board(OwnedFd);

/// What one endpoint of a rank says, and to which question.
struct Account {
    answered: u64,
    text: String,
}

/// A look that is under way.
pub struct Look {
    serial: u32,
    rows_max: usize,
    until: Instant,
}

impl Board {
    pub fn new() -> Result<Board> {
        let file = rustix::fs::memfd_create("landbridge-board", MemfdFlags::CLOEXEC);
        let file = file.context("no memory file for a board")?;
        rustix::fs::ftruncate(&file, BOARD_BYTES as u64)?;
        pwrite(&file, &MAGIC, 0)?;
        Ok(Board(sys::out_of_the_way(file)))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn ask(&self, number: u64) {
        let _ = pwrite(&self.0, &number.to_ne_bytes(), ASKED_AT as u64);
    }

    pub(super) fn word(&self, at: usize) -> u64 {
        let mut word = [0; 8];
        match pread(&self.0, &mut word[..], at as u64) {
            Ok(8) => u64::from_ne_bytes(word),
            _ => 0,
        }
    }

    fn is_taken(slot: &usize, board: &Board) -> bool {
        board.word(slot + TAKEN_AT) != 0
    }

    /// What the endpoints of the rank say, which it has written itself: nothing in it is trusted.
    fn accounts(&self) -> Vec<Account> {
        let taken = (0..SLOTS).map(slot_at).filter(|at| Board::is_taken(at, self));
        taken.filter_map(|at| self.account(at)).collect()
    }

    fn account(&self, at: usize) -> Option<Account> {
        for _ in 0..READS_MAX {
            let version = self.word(at + VERSION_AT);
            let answered = self.word(at + ANSWERED_AT);
            let length = (self.word(at + LENGTH_AT) as usize).min(TEXT_BYTES_MAX);
            let mut bytes = vec![0; length];
            let read = pread(&self.0, &mut bytes[..], (at + TEXT_AT) as u64);
            let is_whole = read == Ok(length) && version.is_multiple_of(2);
            if is_whole && version == self.word(at + VERSION_AT) {
                let text = String::from_utf8_lossy(&bytes).into_owned();
                return Some(Account { answered, text });
            }
        }
        None
    }
}

impl Look {
    /// When the boards are to be looked at again.
    pub fn next_time(&self) -> Instant {
        self.until.min(Instant::now() + GLANCE)
    }
}

impl Agent {
    /// Asks the ranks here, and the agents below.
    pub(super) fn begin_look(&mut self, serial: u32, rows_max: u32) {
        for child in &mut self.children {
            child.process.link.send(&Message::Look { serial, rows_max });
        }
        for rank in self.ranks.iter().filter(|rank| rank.ending.is_none()) {
            rank.board.iter().for_each(|board| board.ask(u64::from(serial)));
        }
        let until = Instant::now() + PATIENCE;
        self.look = Some(Look { serial, rows_max: rows_max as usize, until });
    }

    /// Tells the launcher what they say, once all have answered or had their time.
    pub(super) fn advance_look(&mut self) {
        let Some(look) = &self.look else { return };
        let serial = u64::from(look.serial);
        let mut paths = Paths::default();
        for rank in self.ranks.iter().filter(|rank| rank.ending.is_none()) {
            let accounts = rank.board.as_ref().map(|board| board.accounts()).unwrap_or_default();
            let has_answered = accounts.iter().all(|account| account.answered == serial);
            match has_answered && !accounts.is_empty() {
                true => paths.ranks += 1,
                false => paths.miss(rank.rank),
            }
            for account in &accounts {
                paths.take_in(rank.rank, &account.text, account.answered != serial);
            }
        }
        if paths.silent_count > 0 && Instant::now() < look.until {
            return;
        }
        paths.cut(look.rows_max);
        let (serial, paths) = (look.serial, Box::new(paths));
        self.look = None;
        self.parent.send(&Message::Paths { serial, paths });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(board: &Board, at: usize, word: u64) {
        pwrite(&board.0, &word.to_ne_bytes(), at as u64).unwrap();
    }

    #[test]
    fn a_board_is_read_as_a_rank_has_written_it() {
        let board = Board::new().unwrap();
        assert!(board.accounts().is_empty());
        board.ask(3);
        assert_eq!(board.word(ASKED_AT), 3);
        let at = slot_at(2);
        write(&board, at + TAKEN_AT, 1);
        write(&board, at + ANSWERED_AT, 3);
        write(&board, at + LENGTH_AT, 4);
        pwrite(&board.0, b"text", (at + TEXT_AT) as u64).unwrap();
        let accounts = board.accounts();
        assert_eq!((accounts[0].answered, accounts[0].text.as_str()), (3, "text"));
        // It is being written, for ever.
        write(&board, at + VERSION_AT, 7);
        assert!(board.accounts().is_empty());
        // A rank writes what it likes there.
        write(&board, at + VERSION_AT, 8);
        write(&board, at + LENGTH_AT, u64::MAX);
        assert_eq!(board.accounts()[0].text.len(), TEXT_BYTES_MAX);
    }
}
