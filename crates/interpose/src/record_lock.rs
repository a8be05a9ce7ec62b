//! Exclusive access to the record, for one recorded call at a time.
//!
//! In: calls of the recorded thread, of its signal handlers, and of other threads. Out: a guard of
//! the record, or none: the call is not recorded. What may never happen: two calls use the record
//! at the same time.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use landbridge_proto::nondeterminism::{NondeterminismRecord, RecordError};

use crate::messages::{info, warn};
use crate::record_head::{self, FIRST, is_owner, this_thread};
use crate::restart_refusals::{self, abort_replay};
use crate::{caller, dispatch, handler_frames};

/// True once the process has replayed the whole record.
static IS_LIVE: AtomicBool = AtomicBool::new(false);

/// Stack address of the recorded call in progress; [`FREE`] if there is none, [`QUIESCED`] while
/// the record is unmapped. A call of a signal handler that interrupts a recorded call is not
/// recorded.
static BUSY: AtomicUsize = AtomicUsize::new(FREE);

const FREE: usize = 0;
const QUIESCED: usize = usize::MAX;

/// Record of this process. It is written before the process has an owner
/// ([`record_head::set`]), and the owner alone uses it.
static RECORD_CELL: RecordCell = RecordCell(UnsafeCell::new(MaybeUninit::uninit()));

struct RecordCell(UnsafeCell<MaybeUninit<NondeterminismRecord<'static>>>);

// SAFETY: the recorded thread alone uses `RECORD_CELL`; `BUSY` excludes its own interruptions.
unsafe impl Sync for RecordCell {}

/// True once a warning has reported that another thread reads clocks or random numbers.
static IS_OTHER_REPORTED: AtomicBool = AtomicBool::new(false);

/// Exclusive access to the record for one recorded call.
pub struct RecordGuard(());

impl RecordGuard {
    #[inline]
    pub fn record(&mut self) -> &mut NondeterminismRecord<'static> {
        // SAFETY: one guard exists at a time, and only after the record was written (`lock`).
        unsafe { (*RECORD_CELL.0.get()).assume_init_mut() }
    }

    /// Runs `work` without exclusive access to the record: a handler of the program may interrupt
    /// `work`, and may leave it by `siglongjmp`.
    pub fn while_released<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let holder = BUSY.swap(FREE, Relaxed);
        let result = work();
        BUSY.store(holder, Relaxed);
        result
    }

    /// Time at which the first incarnation began, in nanoseconds since 1970.
    pub fn since(&mut self) -> i64 {
        self.record().files().since.load(Relaxed) as i64
    }
}

impl Drop for RecordGuard {
    #[inline]
    fn drop(&mut self) {
        BUSY.store(FREE, Relaxed);
    }
}

/// Makes this the record of the process, whose only thread calls this function.
pub fn set(record: NondeterminismRecord<'static>) {
    // SAFETY: no other thread exists, and no guard.
    unsafe { (*RECORD_CELL.0.get()).write(record) };
}

/// Reads the record's head again, which other incarnations may have changed.
pub fn refresh() {
    // SAFETY: the owner alone asks, outside of calls.
    unsafe { (*RECORD_CELL.0.get()).assume_init_mut().refresh() };
}

/// Whether a call of this incarnation has found the record replayed completely.
pub fn has_been_live() -> bool {
    IS_LIVE.load(Relaxed)
}

/// Notes whether the record is replayed completely.
pub fn note_live(is_live: bool) {
    IS_LIVE.store(is_live, Relaxed);
}

/// Excludes every recorded call until [`readmit`], while the record is unmapped for a checkpoint.
/// False: this thread is not the recorded one, or a call is in progress.
pub fn exclude() -> bool {
    let may = is_owner() && BUSY.load(Relaxed) == FREE;
    if may {
        BUSY.store(QUIESCED, Relaxed);
    }
    may
}

/// Whether recorded calls are excluded ([`exclude`]).
pub fn is_excluded() -> bool {
    BUSY.load(Relaxed) == QUIESCED
}

/// Ends what [`exclude`] has begun.
pub fn readmit() {
    BUSY.store(FREE, Relaxed);
}

/// Calls `work` with a guard in the thread that has excluded all calls ([`exclude`]).
pub fn while_excluded<R>(work: impl FnOnce(RecordGuard) -> R) -> R {
    let result = work(RecordGuard(()));
    BUSY.store(QUIESCED, Relaxed);
    result
}

/// Exclusive access to the record, if a read by code at address `from` is recorded.
#[inline]
pub fn lock(from: usize) -> Option<RecordGuard> {
    // SAFETY: null, or a page that stays mapped.
    let recorded = unsafe { record_head::owner().as_ref() }?.load(Relaxed);
    let stack_pointer = handler_frames::stack_pointer();
    if is_in_handler(stack_pointer) {
        return None;
    }
    if recorded != this_thread() {
        note_other_thread(recorded, from);
        return None;
    }
    if BUSY.load(Relaxed) != FREE && !was_left(stack_pointer) {
        return None;
    }
    BUSY.store(stack_pointer, Relaxed);
    let mut guard = RecordGuard(());
    (caller::is_program(from) && !guard.record().is_full()).then_some(guard)
}

/// Notes a read by a thread that is not recorded. `recorded` is not 0 if the process is recorded.
/// The user gets one warning, for the first such read by the program, while a restart is still
/// possible.
#[inline]
fn note_other_thread(recorded: usize, from: usize) {
    if recorded != 0 && !IS_OTHER_REPORTED.load(Relaxed) {
        report_other_thread(from);
    }
}

#[cold]
fn report_other_thread(from: usize) {
    if caller::belongs_to_transport(from) || IS_OTHER_REPORTED.swap(true, Relaxed) {
        return;
    }
    info(format_args!(
        "a thread reads clocks or random numbers that are not recorded, for it is not the one that \
         begins the program. If this process is killed and the thread's next answers decide what \
         is sent or printed, the difference ends the job"
    ));
}

/// Whether the calling thread is the recorded one and runs a signal handler. `stack_pointer` is
/// that of the call that asks.
#[inline]
pub fn is_in_handler(stack_pointer: usize) -> bool {
    handler_frames::may_run() && is_owner() && runs_handler(stack_pointer)
}

#[cold]
fn runs_handler(stack_pointer: usize) -> bool {
    let handlers = handler_frames::drop_left(stack_pointer);
    if handlers.has_left_call {
        forget_left_call();
    }
    handlers.is_any
}

/// Exclusive access to the record, if the system calls of this thread are recorded.
#[inline]
pub fn lock_for_call() -> Option<RecordGuard> {
    if !is_owner() || BUSY.load(Relaxed) != FREE {
        return None;
    }
    BUSY.store(handler_frames::stack_pointer(), Relaxed);
    let mut guard = RecordGuard(());
    (!guard.record().is_full()).then_some(guard)
}

/// Whether a recorded call is in progress, which a signal handler interrupts if it asks.
pub fn is_busy() -> bool {
    !matches!(BUSY.load(Relaxed), FREE | QUIESCED)
}

/// Whether a signal handler has jumped out of the recorded call in progress, in a process whose
/// handlers are not seen ([`is_in_handler`]): the stack of the call has been left.
#[cold]
fn was_left(stack_pointer: usize) -> bool {
    let is_left =
        !dispatch::is_installed() && stack_pointer > BUSY.load(Relaxed) && !is_on_signal_stack();
    if is_left {
        forget_left_call();
    }
    is_left
}

fn is_on_signal_stack() -> bool {
    let mut stack = libc::stack_t { ss_sp: null_mut(), ss_flags: libc::SS_ONSTACK, ss_size: 0 };
    // SAFETY: a plain system call that fills in a local value.
    unsafe { libc::sigaltstack(std::ptr::null(), &mut stack) };
    stack.ss_flags & libc::SS_ONSTACK != 0
}

/// Ends a recorded call out of which a signal handler has jumped (`siglongjmp`). The next
/// incarnation would be interrupted elsewhere, after more or fewer recorded calls, so its restart
/// is forbidden.
#[cold]
pub fn forget_left_call() {
    BUSY.store(FREE, Relaxed);
    if let Some(head) = record_head::head() {
        refresh();
        if head.is_of(FIRST) || has_been_live() {
            head.skip_interrupted_read();
        }
    }
    restart_refusals::forbid_restart(format_args!(
        "a signal handler has jumped out of a call that was being recorded"
    ));
}

/// The result of a system call; ends the process if there is none.
pub fn outcome_of(answer: Result<i64, RecordError>) -> i64 {
    answer.unwrap_or_else(|problem| report_error(&problem))
}

#[cold]
pub fn report_error(problem: &RecordError) -> i64 {
    if let RecordError::Full(answer) = problem {
        warn(format_args!("{problem}: if this process is killed it cannot be restarted"));
        return *answer;
    }
    abort_replay(format_args!("{problem}"))
}
