//! The signal handlers that the recorded thread is running.
//!
//! In: handlers that begin and end, and stack addresses of calls. Out: whether a call comes from a
//! handler. A handler that was left by `longjmp` has ended: the stack pointer is above its frame.
//! What may never happen: a call of a handler counts as one of the interrupted program.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Bytes of the handler's signal stack: enough for a signal frame with every extension of today's
/// processors, and for the handler.
pub const STACK_BYTES: usize = 256 << 10;
/// Number of nested handlers with an entry of their own; deeper handlers share the last entry.
const HANDLERS_MAX: usize = 8;

#[repr(align(64))]
struct HandlerStack(UnsafeCell<MaybeUninit<[u8; STACK_BYTES]>>);
// SAFETY: only the kernel and the handler of one thread use the stack.
unsafe impl Sync for HandlerStack {}
static STACK: HandlerStack = HandlerStack(UnsafeCell::new(MaybeUninit::uninit()));

/// Stack addresses of the signal handlers that the recorded thread is running; each handler has
/// interrupted the one before it.
static HANDLER_FRAMES: [AtomicUsize; HANDLERS_MAX] = [const { AtomicUsize::new(0) }; HANDLERS_MAX];
static HANDLERS_RUNNING: AtomicUsize = AtomicUsize::new(0);
/// Whether the first of these handlers has interrupted a recorded call. (While a handler runs, no
/// recorded call begins.)
static HAS_INTERRUPTED_CALL: AtomicBool = AtomicBool::new(false);

/// What is left of the handlers below a stack address.
pub struct RunningHandlers {
    /// A handler runs that has not been left.
    pub is_any: bool,
    /// All handlers have been left, and the first one had interrupted a recorded call.
    pub has_left_call: bool,
}

/// The signal stack of the recorded thread, of [`STACK_BYTES`].
pub fn stack() -> *mut u8 {
    STACK.0.get().cast()
}

/// Whether any handler may be running.
#[inline]
pub fn may_run() -> bool {
    HANDLERS_RUNNING.load(Relaxed) > 0
}

/// Notes that a handler begins; returns what [`end`] takes. `frame`: an address in the frame of the
/// function that calls the handler. `is_busy`: a recorded call is in progress.
pub fn begin(frame: usize, is_busy: bool) -> usize {
    let depth = HANDLERS_RUNNING.load(Relaxed);
    if depth == 0 {
        HAS_INTERRUPTED_CALL.store(is_busy, Relaxed);
    }
    HANDLER_FRAMES[depth.min(HANDLERS_MAX - 1)].store(frame, Relaxed);
    HANDLERS_RUNNING.store(depth + 1, Relaxed);
    depth
}

/// Notes that a handler has returned.
pub fn end(depth: usize) {
    HANDLERS_RUNNING.store(depth, Relaxed);
}

/// Drops the handlers that were left: `stack_pointer`, of the call that asks, is above their
/// frames.
#[cold]
pub fn drop_left(stack_pointer: usize) -> RunningHandlers {
    let alternate = stack().addr()..stack().addr() + STACK_BYTES;
    let mut has_left_call = false;
    loop {
        let depth = HANDLERS_RUNNING.load(Relaxed);
        if depth == 0 {
            return RunningHandlers { is_any: false, has_left_call };
        }
        let frame = HANDLER_FRAMES[depth.min(HANDLERS_MAX) - 1].load(Relaxed);
        let is_left = match (alternate.contains(&frame), alternate.contains(&stack_pointer)) {
            (false, true) => false,
            (true, false) => true,
            _ => stack_pointer > frame,
        };
        if !is_left {
            return RunningHandlers { is_any: true, has_left_call };
        }
        HANDLERS_RUNNING.store(depth - 1, Relaxed);
        has_left_call |= depth == 1 && HAS_INTERRUPTED_CALL.swap(false, Relaxed);
    }
}

/// Approximate address of the caller's stack top.
#[inline(always)]
pub fn stack_pointer() -> usize {
    let here = 0_u8;
    (&raw const here).addr()
}
