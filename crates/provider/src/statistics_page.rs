//! The statistics page of this process: shared memory in which endpoints report the state of their
//! paths on request (`landbridge ps --paths`). [`landbridge_proto::statistics_page`] defines the
//! layout.
//!
//! What enters: a descriptor from the rank supervisor. What leaves: the report of each endpoint,
//! written when the page holds a new request. A process without a page, or an endpoint for which
//! the page has no free slot, reports nothing.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use landbridge_proto::statistics_page::{
    IN_USE_AT, LENGTH_AT, MAGIC, OPENED_AT, REPLY_AT, REQUEST_AT, SLOTS, STATISTICS_PAGE_BYTES,
    TEXT_AT, TEXT_BYTES_MAX, VERSION_AT, slot_at,
};

use crate::{arena, param};

struct StatisticsPage {
    start: NonNull<u8>,
}

// SAFETY: words are atomic, and the text of a slot belongs to the endpoint that has taken the slot.
unsafe impl Send for StatisticsPage {}
// SAFETY: words are atomic, and the text of a slot belongs to the endpoint that has taken the slot.
unsafe impl Sync for StatisticsPage {}

static PAGE: OnceLock<Option<StatisticsPage>> = OnceLock::new();

/// Replaces the page by private memory of this process, so that a checkpoint image does not contain
/// the page. Returns whether there is a page.
pub fn quiesce() -> bool {
    let Some(Some(page)) = PAGE.get() else { return false };
    // SAFETY: the range is the page's own; what is written to it meanwhile is never read.
    unsafe { arena::replace(page.start, STATISTICS_PAGE_BYTES, None) }
}

/// Maps the page again. False: the file does not hold a statistics page.
pub fn resume(file: BorrowedFd<'_>) -> bool {
    let is_whole =
        rustix::fs::fstat(file).is_ok_and(|data| data.st_size == STATISTICS_PAGE_BYTES as i64);
    let Some(Some(page)) = PAGE.get().filter(|_| is_whole) else { return false };
    // SAFETY: the range is the page's own.
    let is_resumed = unsafe { arena::replace(page.start, STATISTICS_PAGE_BYTES, Some(file)) };
    // The file may be another one than before the checkpoint.
    page.word(OPENED_AT).store(1, Ordering::Relaxed);
    is_resumed
}

/// An endpoint's slot of the statistics page.
pub struct StatisticsSlot {
    page: &'static StatisticsPage,
    at: usize,
    answered: u64,
}

impl StatisticsSlot {
    /// Takes a free slot, if there is a page with a free slot.
    pub fn take() -> Option<StatisticsSlot> {
        StatisticsSlot::take_slot_of(PAGE.get_or_init(open).as_ref()?)
    }

    fn take_slot_of(page: &'static StatisticsPage) -> Option<StatisticsSlot> {
        let is_free = |at: &usize| {
            let taken = page.word(at + IN_USE_AT);
            taken.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        page.word(OPENED_AT).store(1, Ordering::Relaxed);
        let at = (0..SLOTS).map(slot_at).find(is_free)?;
        Some(StatisticsSlot { page, at, answered: 0 })
    }

    /// Whether the page holds a request that this slot has not answered.
    #[inline]
    pub fn is_requested(&self) -> bool {
        self.page.word(REQUEST_AT).load(Ordering::Relaxed) != self.answered
    }

    /// Answers the request. A text beyond [`TEXT_BYTES_MAX`] bytes is cut off.
    #[cold]
    pub fn write(&mut self, text: &str) {
        let bytes = &text.as_bytes()[..text.len().min(TEXT_BYTES_MAX)];
        self.answered = self.page.word(REQUEST_AT).load(Ordering::Acquire);
        let version = self.page.word(self.at + VERSION_AT);
        // The version is odd while the text is being written.
        version.fetch_add(1, Ordering::AcqRel);
        std::sync::atomic::fence(Ordering::Release);
        // SAFETY: the text lies inside the page, and belongs to this slot; readers verify the
        // version.
        unsafe {
            let text = self.page.start.as_ptr().add(self.at + TEXT_AT);
            bytes.as_ptr().copy_to_nonoverlapping(text, bytes.len());
        }
        self.page.word(self.at + LENGTH_AT).store(bytes.len() as u64, Ordering::Relaxed);
        self.page.word(self.at + REPLY_AT).store(self.answered, Ordering::Relaxed);
        version.fetch_add(1, Ordering::Release);
    }
}

impl Drop for StatisticsSlot {
    fn drop(&mut self) {
        self.page.word(self.at + LENGTH_AT).store(0, Ordering::Relaxed);
        self.page.word(self.at + IN_USE_AT).store(0, Ordering::Release);
    }
}

impl StatisticsPage {
    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at + 8 <= STATISTICS_PAGE_BYTES && at.is_multiple_of(8));
        // SAFETY: the word lies inside the mapping, which stays, and is aligned; all sides use
        // these words as atomics.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }
}

/// Maps the page that the rank supervisor has passed to this process; afterwards the descriptor is
/// closed.
fn open() -> Option<StatisticsPage> {
    let number = param::STATISTICS_PAGE.number().ok().flatten()?;
    let number = i32::try_from(number).ok().filter(|&number| number > 2)?;
    // SAFETY: fcntl only queries a number.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: the descriptor is open; its content is verified before it is changed or closed.
    let file = std::mem::ManuallyDrop::new(unsafe { File::from_raw_fd(number) });
    let mut magic = [0; MAGIC.len()];
    file.read_exact_at(&mut magic, 0).ok()?;
    let is_whole = file.metadata().is_ok_and(|data| data.len() == STATISTICS_PAGE_BYTES as u64);
    if magic != MAGIC || !is_whole {
        return None;
    }
    let file = OwnedFd::from(std::mem::ManuallyDrop::into_inner(file));
    let start = arena::map_fd(file.as_fd(), STATISTICS_PAGE_BYTES).ok()?;
    let page = StatisticsPage { start };
    // An earlier incarnation of this process may have been killed while it held slots.
    (0..SLOTS).map(slot_at).for_each(|at| page.word(at + IN_USE_AT).store(0, Ordering::Relaxed));
    Some(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> &'static StatisticsPage {
        let words = Box::leak(vec![0u64; STATISTICS_PAGE_BYTES / 8].into_boxed_slice());
        Box::leak(Box::new(StatisticsPage { start: NonNull::from(&mut words[0]).cast() }))
    }

    #[test]
    fn a_question_is_answered_once_and_slots_are_given_back() {
        let page = page();
        let mut slots: Vec<StatisticsSlot> =
            std::iter::from_fn(|| StatisticsSlot::take_slot_of(page)).collect();
        assert_eq!(slots.len(), SLOTS);
        assert_eq!(page.word(OPENED_AT).load(Ordering::Relaxed), 1);
        assert!(!slots[1].is_requested());
        page.word(REQUEST_AT).store(5, Ordering::Relaxed);
        assert!(slots[1].is_requested());
        slots[1].write("text");
        assert!(!slots[1].is_requested() && slots[2].is_requested());
        let at = slot_at(1);
        let words = [VERSION_AT, REPLY_AT, LENGTH_AT]
            .map(|place| page.word(at + place).load(Ordering::Relaxed));
        assert_eq!(words, [2, 5, 4]);
        slots[1].write(&"x".repeat(2 * TEXT_BYTES_MAX));
        assert_eq!(page.word(at + LENGTH_AT).load(Ordering::Relaxed), TEXT_BYTES_MAX as u64);
        let next = page.word(slot_at(2) + IN_USE_AT).load(Ordering::Relaxed);
        assert_eq!(next, 1, "nobody else's place is touched");
        drop(slots.remove(1));
        assert_eq!(StatisticsSlot::take_slot_of(page).unwrap().at, at);
    }
}
