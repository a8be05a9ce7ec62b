//! Ranges of a file that one open file description has locked by fcntl(2).
//!
//! In: locked and unlocked ranges, in bytes from the start of the file, with their ends excluded.
//! Out: whether a range may be locked. What may never happen: a locked range is forgotten. Beyond
//! [`LOCKED_RANGES_MAX`] separate ranges, gaps between them count as locked.

use libc::flock;

/// Largest number of separate ranges of one open file.
const LOCKED_RANGES_MAX: usize = 8;

/// Start and end of a range in bytes.
type Range = (i64, i64);

/// The whole file.
const WHOLE: Range = (0, i64::MAX);

/// The locked ranges of one open file, and perhaps more than these.
#[derive(Clone, Copy)]
pub struct LockedRanges([Option<Range>; LOCKED_RANGES_MAX]);

impl LockedRanges {
    pub const NONE: LockedRanges = LockedRanges([None; LOCKED_RANGES_MAX]);

    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// Notes that a lock was taken or released. `offset`: the program's position in the file.
    pub fn note(&mut self, asked: &flock, offset: i64) {
        let range = range_of(asked, offset);
        match i32::from(asked.l_type) {
            libc::F_UNLCK => range.into_iter().for_each(|range| self.remove(range)),
            _ => self.add(range.unwrap_or(WHOLE)),
        }
    }

    fn add(&mut self, (mut start, mut end): Range) {
        for held in &mut self.0 {
            if let Some((from, to)) = held.filter(|(from, to)| *from <= end && start <= *to) {
                (start, end) = (start.min(from), end.max(to));
                *held = None;
            }
        }
        self.put((start, end));
    }

    fn remove(&mut self, (start, end): Range) {
        for (from, to) in std::mem::replace(self, LockedRanges::NONE).0.into_iter().flatten() {
            let (left, right) = ((from, to.min(start)), (from.max(end), to));
            [left, right].into_iter().filter(|(from, to)| from < to).for_each(|it| self.put(it));
        }
    }

    /// Adds a range; if there is no place for it, the nearest range is widened.
    fn put(&mut self, (start, end): Range) {
        if let Some(free) = self.0.iter_mut().find(|held| held.is_none()) {
            *free = Some((start, end));
            return;
        }
        let gap = |(from, to): &Range| (start.saturating_sub(*to)).max(from.saturating_sub(end));
        if let Some((from, to)) = self.0.iter_mut().flatten().min_by_key(|held| gap(held)) {
            (*from, *to) = ((*from).min(start), (*to).max(end));
        }
    }
}

/// The range that a call locks or unlocks. `None`: it depends on the present size of the file.
fn range_of(asked: &flock, offset: i64) -> Option<Range> {
    let base = match i32::from(asked.l_whence) {
        libc::SEEK_SET => 0,
        libc::SEEK_CUR => offset,
        _ => return None,
    };
    let (start, length) = (base.saturating_add(asked.l_start), asked.l_len);
    Some(match length {
        0 => (start, i64::MAX),
        1.. => (start, start.saturating_add(length)),
        _ => (start.saturating_add(length), start),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(kind: i32, whence: i32, start: i64, length: i64) -> flock {
        let (l_type, l_whence) = (kind as i16, whence as i16);
        flock { l_type, l_whence, l_start: start, l_len: length, l_pid: 0 }
    }

    fn lock(start: i64, length: i64) -> flock {
        asked(libc::F_WRLCK, libc::SEEK_SET, start, length)
    }

    fn unlock(start: i64, length: i64) -> flock {
        asked(libc::F_UNLCK, libc::SEEK_SET, start, length)
    }

    #[test]
    fn what_is_unlocked_piece_by_piece_is_unlocked() {
        let mut ranges = LockedRanges::NONE;
        ranges.note(&lock(10, 20), 0);
        [(10, 5), (20, 10)].iter().for_each(|(start, length)| {
            ranges.note(&unlock(*start, *length), 0);
            assert!(!ranges.is_empty());
        });
        ranges.note(&unlock(15, 5), 0);
        assert!(ranges.is_empty());
    }

    #[test]
    fn no_locked_range_is_forgotten_however_many_there_are() {
        let mut ranges = LockedRanges::NONE;
        (0..40).for_each(|at| ranges.note(&lock(at * 10, 2), 0));
        for at in 0..39 {
            ranges.note(&unlock(at * 10, 2), 0);
            assert!(!ranges.is_empty(), "after range {at}");
        }
        ranges.note(&unlock(0, 0), 0);
        assert!(ranges.is_empty());
    }

    #[test]
    fn ranges_count_from_the_start_the_position_or_the_end() {
        let mut ranges = LockedRanges::NONE;
        ranges.note(&asked(libc::F_RDLCK, libc::SEEK_CUR, -10, 10), 50);
        ranges.note(&unlock(50, -10), 0);
        assert!(ranges.is_empty(), "a length below zero ends at the start");
        ranges.note(&asked(libc::F_RDLCK, libc::SEEK_END, 0, 5), 0);
        ranges.note(&asked(libc::F_UNLCK, libc::SEEK_END, 0, 0), 0);
        assert!(!ranges.is_empty(), "the size may have changed in between");
        ranges.note(&unlock(0, 0), 0);
        assert!(ranges.is_empty());
    }
}
