//! Calls that change the size or the attributes of an open file.
//!
//! In: arguments of such a call. Out: its result, noted in the record or taken from the record.

use libc::c_long;

use crate::compared_arguments::of_values;
use crate::descriptor_table::FileKind;
use crate::file_metadata::identity_of;
use crate::session::{CallDescription, EffectOutcome, Session, call_of, kernel};

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
        let resizing = ResizeReplay::of(number, arguments[1]);
        let call = call_of(number, [descriptor, values, 0, 0, 0], &[]);
        let about = CallDescription::Path("change of size or attributes", self.path_of(descriptor));
        if !self.is_live() {
            return Some(self.replay(call, about, &mut []));
        }
        let size = || identity_of(descriptor).map_or(0, |(_, now)| now.size) as u64;
        let precondition = || [size(), 0, 0, 0, 0, 0];
        let outcome = |precondition: [u64; 6]| resizing.outcome(precondition[0], size());
        let perform = || kernel(number, arguments);
        let result = self.effect(call, about, precondition, outcome, perform);
        self.note(call, result, &[]);
        Some(result)
    }
}

/// What the repetition of an interrupted change of an open file would do.
#[derive(Clone, Copy)]
enum ResizeReplay {
    /// The repetition changes nothing.
    Idempotent,
    /// The file gets this length; the repetition would remove later bytes of other processes.
    Length(u64),
    /// The change removes or inserts parts of the file, and moves what follows them.
    Moves,
}

impl ResizeReplay {
    fn of(number: c_long, second: u64) -> ResizeReplay {
        let moves = (libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE) as u64;
        match number {
            libc::SYS_ftruncate => ResizeReplay::Length(second),
            libc::SYS_fallocate if second & moves != 0 => ResizeReplay::Moves,
            _ => ResizeReplay::Idempotent,
        }
    }

    fn outcome(self, before: u64, now: u64) -> EffectOutcome {
        match self {
            ResizeReplay::Idempotent => EffectOutcome::NotPerformed,
            _ if before == now => EffectOutcome::NotPerformed,
            ResizeReplay::Length(wanted) if wanted == now => EffectOutcome::NotPerformed,
            _ => EffectOutcome::Unknown,
        }
    }
}
