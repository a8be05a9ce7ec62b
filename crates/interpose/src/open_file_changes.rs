//! Calls that change the size or the attributes of an open file.
//!
//! In: arguments of such a call. Out: its result, noted in the record or taken from the record.

use landbridge_proto::nondeterminism::PRECONDITION_WORDS;
use libc::{c_int, c_long};

use crate::change_times::mark_open;
use crate::compared_arguments::of_values;
use crate::file_identity::FileKind;
use crate::file_metadata::identity_of;
use crate::kernel_calls::kernel;
use crate::session::{CallDescription, EffectOutcome, Session, call_of};

impl Session {
    /// Handles `ftruncate` and other calls that change the size or attributes of an open file.
    ///
    /// # Safety
    /// The arguments are those of such a call.
    pub unsafe fn resize(
        &mut self,
        number: c_long,
        descriptor: u64,
        arguments: [u64; 6],
    ) -> Option<i64> {
        let is_one = |kind| matches!(kind, FileKind::File | FileKind::Directory);
        let open = self.table.get(descriptor).filter(|open| is_one(open.kind))?;
        open.is_recorded = true;
        // SAFETY: the caller's promise.
        let values = unsafe { of_values(number, arguments) };
        let resizing = ResizeReplay::of(number, arguments);
        let call = call_of(number, [descriptor, values, 0, 0, 0], &[]);
        let about =
            CallDescription::Path("change of size or attributes", self.table.path_of(descriptor));
        if !self.is_live() {
            return Some(self.replay(call, about, &mut []));
        }
        let state = || {
            let now = identity_of(descriptor).map(|(_, now)| now).unwrap_or_default();
            [now.size as u64, now.changed as u64]
        };
        let precondition = |_| {
            let now = identity_of(descriptor).map(|(_, now)| now).unwrap_or_default();
            [now.size as u64, mark_open(descriptor, now), 0, 0, 0, 0, 0, 0]
        };
        let outcome =
            |before: [u64; PRECONDITION_WORDS]| resizing.outcome([before[0], before[1]], state());
        let perform = || kernel(number, arguments);
        let result = self.effect(call, about, precondition, outcome, perform);
        self.note(call, result, &[]);
        Some(result)
    }
}

/// What the repetition of an interrupted change of an open file would do.
#[derive(Clone, Copy)]
enum ResizeReplay {
    /// The file gets this length; a repetition would remove later bytes of other processes.
    Length(u64),
    /// The file gets this length if it is shorter, and its content stays.
    AtLeast(u64),
    /// A repetition could undo what another process has changed since, or fail.
    Other,
}

impl ResizeReplay {
    fn of(number: c_long, [_, second, third, fourth, ..]: [u64; 6]) -> ResizeReplay {
        match (number, second as c_int) {
            (libc::SYS_ftruncate, _) => ResizeReplay::Length(second),
            (libc::SYS_fallocate, 0) => ResizeReplay::AtLeast(third.saturating_add(fourth)),
            // Disk space alone, which no program sees in the content.
            (libc::SYS_fallocate, libc::FALLOC_FL_KEEP_SIZE) => ResizeReplay::AtLeast(0),
            _ => ResizeReplay::Other,
        }
    }

    /// Size and time of the last status change of the file, before the call and now. The time
    /// before may be [`crate::change_times::UNSURE`].
    fn outcome(self, before: [u64; 2], now: [u64; 2]) -> EffectOutcome {
        match self {
            _ if before == now => EffectOutcome::NotPerformed,
            ResizeReplay::Length(wanted) if wanted == now[0] => EffectOutcome::NotPerformed,
            ResizeReplay::AtLeast(wanted) if wanted <= now[0] => EffectOutcome::NotPerformed,
            _ => EffectOutcome::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_change_is_repeated_only_where_that_changes_nothing_of_others() {
        let is_repeated = |number, mode: c_int, now: [u64; 2]| {
            let replay = ResizeReplay::of(number, [0, mode as u64, 60, 40, 0, 0]);
            matches!(replay.outcome([50, 1], now), EffectOutcome::NotPerformed)
        };
        for (number, mode) in [
            (libc::SYS_ftruncate, 70),
            (libc::SYS_fallocate, 0),
            (libc::SYS_fallocate, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE),
            (libc::SYS_fchmod, 0o600),
        ] {
            assert!(is_repeated(number, mode, [50, 1]), "nothing has changed: {number} {mode}");
            assert!(!is_repeated(number, mode, [50, 2]), "others have changed it: {number} {mode}");
        }
        assert!(is_repeated(libc::SYS_ftruncate, 70, [70, 2]));
        assert!(!is_repeated(libc::SYS_ftruncate, 70, [100, 2]), "others have written behind it");
        assert!(is_repeated(libc::SYS_fallocate, 0, [100, 2]));
        assert!(is_repeated(libc::SYS_fallocate, 0, [130, 2]));
        assert!(!is_repeated(libc::SYS_fallocate, 0, [99, 2]), "others have cut it");
        assert!(is_repeated(libc::SYS_fallocate, libc::FALLOC_FL_KEEP_SIZE, [10, 2]));
        assert!(!is_repeated(libc::SYS_fallocate, libc::FALLOC_FL_PUNCH_HOLE, [130, 2]));
    }
}
