//! Reasons why this process must not be restarted.
//!
//! In: reasons. Out: a log line for the user and an entry in the record's head for the node agent,
//! both for the first reason only. During replay the process ends instead. What may never happen: a
//! process continues its replay past a call that cannot be replayed.

use std::fmt::{self, Write};
use std::sync::atomic::Ordering::Relaxed;

use landbridge_proto::id::{EXIT_LINE, EXIT_UNRECOVERABLE, LINE_TAG};
use landbridge_proto::nondeterminism::RecordHead;

use crate::kernel_calls::kernel;
use crate::messages::{self, warn};
use crate::{held_files, processes, record_head};

/// Forbids a restart of this process from now on, and reports the reason once.
#[cold]
pub fn forbid_restart(reason: fmt::Arguments<'_>) {
    if let Some(head) = record_head::head() {
        forbid_restart_in(head, reason);
    }
}

/// Whether a restart of this process was forbidden, or this process is not recorded.
pub fn is_restart_forbidden() -> bool {
    record_head::head().is_none_or(|head| head.files.is_restart_forbidden())
}

/// Forbids a restart of the process that has this record, and reports the reason once.
#[cold]
pub fn forbid_restart_in(head: &RecordHead, reason: fmt::Arguments<'_>) {
    let mut text = crate::messages::MessageBuffer::new();
    let _ = text.write_fmt(reason);
    if processes::replays(head) {
        return end_replay(head, reason);
    }
    if head.files.forbid_restart(text.bytes()) {
        warn(format_args!("{reason}: if this process is killed it cannot be restarted"));
        if head.has_durable_effects() {
            held_files::make_durable(head);
        }
    }
}

/// Ends a process that performs an unreplayable call during replay: the call may have another
/// result than in the earlier incarnation. (If the earlier incarnation had been seen to make the
/// call, the rank would not have been restarted.)
#[cold]
fn end_replay(head: &RecordHead, reason: fmt::Arguments<'_>) {
    if record_head::head().is_some() {
        abort_replay(format_args!("{reason}, and cannot be replayed"));
    }
    let mut text = crate::messages::MessageBuffer::new();
    let _ = write!(text, "{reason}, and cannot be replayed");
    head.files.forbid_restart(text.bytes());
    let rank = head.owner.load(Relaxed);
    crate::kernel_calls::kernel(libc::SYS_kill, [rank, libc::SIGKILL as u64, 0, 0, 0, 0]);
}

/// Ends the process, whose replay differs from an earlier incarnation or cannot be completed.
#[cold]
pub fn abort_replay(why: fmt::Arguments<'_>) -> ! {
    let polls = record_head::polls().map_or(0, |polls| polls.present.load(Relaxed));
    warn(format_args!("this process cannot go on: {why}, after {polls} polls"));
    messages::write(format_args!("{LINE_TAG}{EXIT_LINE}\n"));
    loop {
        // No other code of the process may run any more.
        kernel(libc::SYS_exit_group, [EXIT_UNRECOVERABLE as u64, 0, 0, 0, 0, 0]);
    }
}
