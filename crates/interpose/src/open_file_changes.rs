//! Calls that change the size or the attributes of an open file.
//!
//! In: arguments of such a call. Out: its result, noted in the record or taken from the record.

use landbridge_proto::nondeterminism::PRECONDITION_WORDS;
use libc::c_long;

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
        let resizing = ResizeReplay::of(number, arguments[1]);
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
        let precondition = || {
            let [size, changed] = state();
            [size, changed, 0, 0, 0, 0, 0, 0]
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
    /// A repetition could undo what another process has changed since, or fail.
    Other,
}

impl ResizeReplay {
    fn of(number: c_long, second: u64) -> ResizeReplay {
        match number {
            libc::SYS_ftruncate => ResizeReplay::Length(second),
            _ => ResizeReplay::Other,
        }
    }

    /// Size and time of the last status change of the file, before the call and now.
    fn outcome(self, before: [u64; 2], now: [u64; 2]) -> EffectOutcome {
        match self {
            _ if before == now => EffectOutcome::NotPerformed,
            ResizeReplay::Length(wanted) if wanted == now[0] => EffectOutcome::NotPerformed,
            _ => EffectOutcome::Unknown,
        }
    }
}
