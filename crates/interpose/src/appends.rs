//! Appends to files: writes whose place the kernel chooses.
//!
//! Other processes may append the same bytes, and others may remove what was appended, so the
//! content of the file does not show whether an interrupted append has happened. The position of
//! the open file does: an append moves it to the end of the appended bytes. Before the first append
//! the open file is passed to the node agent, where it outlives this process; the next incarnation
//! takes it back with its position. Where nothing is passed back, such as on another node, the
//! content must do.
//!
//! What may never happen: an append is done twice, or is left out.

use landbridge_proto::nondeterminism::PRECONDITION_WORDS;

use crate::file_content::{PAGE_BYTES, is_there, is_within_page};
use crate::file_metadata::identity_of;
use crate::io_vectors::IoVectors;
use crate::kernel_calls::kernel;
use crate::session::{EffectOutcome, Session};

impl Session {
    /// Passes an open file to the agent before the first append. `moves`: the append moves the
    /// position of the open file, so restoring the position beforehand is needless and would
    /// destroy what the position shows.
    pub fn hold_for_append(&mut self, descriptor: u64, moves: bool) {
        let Some(index) = self.table.index(descriptor) else { return };
        self.table.kept_offset = moves.then_some(index);
        self.hold(index);
        self.is_live();
        self.table.kept_offset = None;
    }

    /// Whether the position of the open file is the one that an earlier incarnation has left.
    pub fn offset_tells(&mut self, descriptor: u64) -> bool {
        self.table.get(descriptor).is_some_and(|open| open.is_returned)
    }

    /// Whether other processes append to the file as well, or may begin to, as far as its size
    /// shows.
    pub fn is_shared_append(&mut self, descriptor: u64, size: i64) -> bool {
        let Some(open) = self.table.get(descriptor) else { return true };
        // A process that found the file empty and has appended nothing is the only writer so far.
        let is_own = match open.append_end {
            0 => size == 0,
            end => end == size,
        };
        open.is_shared_append |= !is_own;
        // Other processes may begin with the same bytes as this one does.
        open.is_shared_append || open.append_end == 0
    }
}

/// Position of an open file.
pub fn offset_of(descriptor: u64) -> u64 {
    kernel(libc::SYS_lseek, [descriptor, 0, libc::SEEK_CUR as u64, 0, 0, 0]).max(0) as u64
}

/// Whether an append has happened during which the last incarnation was killed. `before`: size of
/// the file, whether others append, mark of the bytes that the thread had written, mark of the last
/// change, position of the open file. `done`: how many bytes the append has written, where that was
/// counted. An append that has happened in part is truncated away.
///
/// # Safety
/// The memory of `pieces` is valid.
pub unsafe fn appended(
    descriptor: u64,
    pieces: &IoVectors<'_>,
    before: [u64; PRECONDITION_WORDS],
    (done, offset_tells): (Option<u64>, bool),
) -> EffectOutcome {
    let [size, is_shared, _, _, changed, _, _, offset] = before;
    let Some((_, now)) = identity_of(descriptor) else { return EffectOutcome::Unknown };
    let wanted = pieces.length() as u64;
    let size_now = now.size as u64;
    // SAFETY: the caller's promise.
    let is_ours = |at, length: u64| unsafe { is_there(descriptor, at, pieces, length as usize) };
    // A position beyond the end may be the end after the append.
    if offset_tells && offset <= size {
        let end = offset_of(descriptor);
        if end == offset {
            return EffectOutcome::NotPerformed;
        }
        // Between the look at the size and the append others may have appended, or truncated.
        let grown = end.checked_sub(size);
        return match (done, grown) {
            (Some(0), _) => EffectOutcome::NotPerformed,
            (Some(done), _) if done >= wanted => EffectOutcome::Performed(wanted as i64),
            (Some(done), _) if end == size_now && done <= end && is_ours(end - done, done) => {
                take_back(descriptor, end - done, end)
            }
            (None, Some(grown))
                if grown >= wanted
                    && (is_shared == 0 || is_within_page(end - wanted, wanted))
                    && (size_now < end || is_ours(end - wanted, wanted)) =>
            {
                EffectOutcome::Performed(wanted as i64)
            }
            (None, Some(grown @ 1..))
                if grown < wanted && end == size_now && is_ours(size, grown) =>
            {
                take_back(descriptor, size, end)
            }
            _ => EffectOutcome::Unknown,
        };
    }
    let grown = size_now.saturating_sub(size);
    if size_now == size && now.changed as u64 == changed {
        return EffectOutcome::NotPerformed;
    }
    match grown > 0 && grown <= wanted && is_shared == 0 && is_ours(size, grown) {
        false => EffectOutcome::Unknown,
        true if grown == wanted => EffectOutcome::Performed(wanted as i64),
        true => take_back(descriptor, size, size_now),
    }
}

/// Truncates the part of an append that has happened. A kill ends a write only between two pages of
/// the file, so any other part is the append of another process.
fn take_back(descriptor: u64, size: u64, end: u64) -> EffectOutcome {
    let is_part = end.is_multiple_of(PAGE_BYTES as u64);
    match is_part && kernel(libc::SYS_ftruncate, [descriptor, size, 0, 0, 0, 0]) == 0 {
        true => EffectOutcome::NotPerformed,
        false => EffectOutcome::Unknown,
    }
}
