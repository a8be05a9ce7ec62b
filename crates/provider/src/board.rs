//! This process's board: shared memory on which endpoints say how their paths are when somebody asks (`landbridge ps
//! --paths`). The layout is [`landbridge_proto::board`]'s.
//!
//! What enters: a descriptor from whoever has started the process. What leaves: the account of each endpoint, written when
//! a new question stands on the board. A process without a board, or with more endpoints than it has slots, says nothing.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use landbridge_proto::board::{
    ANSWERED_AT, ASKED_AT, BOARD_BYTES, LENGTH_AT, MAGIC, OPENED_AT, SLOTS, TAKEN_AT, TEXT_AT,
    TEXT_BYTES_MAX, VERSION_AT, slot_at,
};

use crate::{arena, param};

struct Board {
    start: NonNull<u8>,
}

// SAFETY: words are atomic, and the text of a slot belongs to the one endpoint that has taken it.
unsafe impl Send for Board {}
// SAFETY: as above.
unsafe impl Sync for Board {}

static BOARD: OnceLock<Option<Board>> = OnceLock::new();

/// Puts memory of this process's own in the place of the board, so that an image of the process is none of the board. Whether
/// there is one.
pub fn step_aside() -> bool {
    let Some(Some(board)) = BOARD.get() else { return false };
    // SAFETY: the board's own place; what is written there meanwhile nobody reads.
    unsafe { arena::replace(board.start, BOARD_BYTES, None) }
}

/// Maps the board again. False: there is no board in that file.
pub fn come_back(file: BorrowedFd<'_>) -> bool {
    let is_whole = rustix::fs::fstat(file).is_ok_and(|data| data.st_size == BOARD_BYTES as i64);
    let Some(Some(board)) = BOARD.get().filter(|_| is_whole) else { return false };
    // SAFETY: as above.
    let is_back = unsafe { arena::replace(board.start, BOARD_BYTES, Some(file)) };
    // It may be another file than the one before.
    board.word(OPENED_AT).store(1, Ordering::Relaxed);
    is_back
}

/// An endpoint's place on the board.
pub struct Slot {
    board: &'static Board,
    at: usize,
    answered: u64,
}

impl Slot {
    /// A free place, if there is a board.
    pub fn take() -> Option<Slot> {
        Slot::take_on(BOARD.get_or_init(open).as_ref()?)
    }

    fn take_on(board: &'static Board) -> Option<Slot> {
        let is_free = |at: &usize| {
            let taken = board.word(at + TAKEN_AT);
            taken.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        board.word(OPENED_AT).store(1, Ordering::Relaxed);
        let at = (0..SLOTS).map(slot_at).find(is_free)?;
        Some(Slot { board, at, answered: 0 })
    }

    /// Whether a question stands there that has not been answered.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        self.board.word(ASKED_AT).load(Ordering::Relaxed) != self.answered
    }

    /// Answers it. Of a text that is too long the rest is left out.
    #[cold]
    pub fn write(&mut self, text: &str) {
        let bytes = &text.as_bytes()[..text.len().min(TEXT_BYTES_MAX)];
        self.answered = self.board.word(ASKED_AT).load(Ordering::Acquire);
        let version = self.board.word(self.at + VERSION_AT);
        // Odd for as long as it is being written.
        version.fetch_add(1, Ordering::AcqRel);
        std::sync::atomic::fence(Ordering::Release);
        // SAFETY: the text lies inside the board, and is this slot's alone; readers look at the version.
        unsafe {
            let text = self.board.start.as_ptr().add(self.at + TEXT_AT);
            bytes.as_ptr().copy_to_nonoverlapping(text, bytes.len());
        }
        self.board.word(self.at + LENGTH_AT).store(bytes.len() as u64, Ordering::Relaxed);
        self.board.word(self.at + ANSWERED_AT).store(self.answered, Ordering::Relaxed);
        version.fetch_add(1, Ordering::Release);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.board.word(self.at + LENGTH_AT).store(0, Ordering::Relaxed);
        self.board.word(self.at + TAKEN_AT).store(0, Ordering::Release);
    }
}

impl Board {
    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at + 8 <= BOARD_BYTES && at.is_multiple_of(8));
        // SAFETY: inside the mapping, which stays, and aligned; every side takes these words for atomic ones.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }
}

/// Maps the board that whoever has started this process has handed on; the descriptor is not needed any more.
fn open() -> Option<Board> {
    let number = param::BOARD.number().ok().flatten()?;
    let number = i32::try_from(number).ok().filter(|&number| number > 2)?;
    // SAFETY: a question about a number.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: it is open; whether it is ours is seen before it is changed or closed.
    let file = std::mem::ManuallyDrop::new(unsafe { File::from_raw_fd(number) });
    let mut magic = [0; MAGIC.len()];
    file.read_exact_at(&mut magic, 0).ok()?;
    let is_whole = file.metadata().is_ok_and(|data| data.len() == BOARD_BYTES as u64);
    if magic != MAGIC || !is_whole {
        return None;
    }
    let file = OwnedFd::from(std::mem::ManuallyDrop::into_inner(file));
    let start = arena::map_fd(file.as_fd(), BOARD_BYTES).ok()?;
    let board = Board { start };
    // An earlier start of this process may have been killed while it had some.
    (0..SLOTS).map(slot_at).for_each(|at| board.word(at + TAKEN_AT).store(0, Ordering::Relaxed));
    Some(board)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn board() -> &'static Board {
        let words = Box::leak(vec![0u64; BOARD_BYTES / 8].into_boxed_slice());
        Box::leak(Box::new(Board { start: NonNull::from(&mut words[0]).cast() }))
    }

    #[test]
    fn a_question_is_answered_once_and_slots_are_given_back() {
        let board = board();
        let mut slots: Vec<Slot> = std::iter::from_fn(|| Slot::take_on(board)).collect();
        assert_eq!(slots.len(), SLOTS);
        assert_eq!(board.word(OPENED_AT).load(Ordering::Relaxed), 1);
        assert!(!slots[1].is_wanted());
        board.word(ASKED_AT).store(5, Ordering::Relaxed);
        assert!(slots[1].is_wanted());
        slots[1].write("text");
        assert!(!slots[1].is_wanted() && slots[2].is_wanted());
        let at = slot_at(1);
        let words = [VERSION_AT, ANSWERED_AT, LENGTH_AT]
            .map(|place| board.word(at + place).load(Ordering::Relaxed));
        assert_eq!(words, [2, 5, 4]);
        slots[1].write(&"x".repeat(2 * TEXT_BYTES_MAX));
        assert_eq!(board.word(at + LENGTH_AT).load(Ordering::Relaxed), TEXT_BYTES_MAX as u64);
        let next = board.word(slot_at(2) + TAKEN_AT).load(Ordering::Relaxed);
        assert_eq!(next, 1, "nobody else's place is touched");
        drop(slots.remove(1));
        assert_eq!(Slot::take_on(board).unwrap().at, at);
    }
}
