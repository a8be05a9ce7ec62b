//! Counters.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Head, Object, close, deadline, is_over, nosys, object, ops, publish};
use crate::abi::*;
use crate::counter::Counter;
use crate::engine_set::EngineSet;

/// Longest sleep of a wait in milliseconds. After this time at the latest the wait notices a value
/// set by another thread.
const WAIT_SLICE_MS: i32 = 1;
/// Number of polls before a wait parks for the first time.
const POLLS_BEFORE_WAIT: u32 = 200;

#[repr(C)]
pub struct CompletionCounter {
    head: Head<FidCntr>,
    pub counter: Arc<Counter>,
    /// The counter counts more than one-sided operations of this process.
    counts_messages: AtomicBool,
    /// The engines whose progress feeds the counter: a read of the counter drives them.
    pub engines: EngineSet,
}

// SAFETY: the type is `repr(C)`, its first field is the fid, and `CLASS` is its class.
unsafe impl Object for CompletionCounter {
    const CLASS: usize = CLASS_CNTR;
}

impl CompletionCounter {
    /// Declares that the counter counts messages, or remote operations of peers on this process's
    /// memory.
    pub fn set_counts_messages(&self) {
        self.counts_messages.store(true, Ordering::Relaxed);
    }

    /// Makes progress for a program that reads the counter.
    #[inline]
    fn progress(&self) {
        if self.counts_messages.load(Ordering::Relaxed) {
            self.engines.progress();
        } else {
            self.engines.progress_for_counter();
        }
    }
}

static OPS: Ops = ops(close::<CompletionCounter>, nosys::bind, nosys::control);

static CNTR_OPS: OpsCntr =
    OpsCntr { size: size_of::<OpsCntr>(), read, readerr, add, set, wait, adderr, seterr };

/// # Safety
/// The contract of `fi_cntr_open` holds.
pub unsafe fn open(
    attr: Option<&mut CntrAttr>,
    target: *mut *mut FidCntr,
    context: *mut c_void,
) -> c_int {
    if let Some(attr) = attr {
        if attr.events != CNTR_EVENTS_COMP {
            return Errno::ENOSYS.negative();
        }
        if attr.flags & PEER != 0 {
            return Errno::EOPNOTSUPP.negative();
        }
        if !matches!(attr.wait_obj, WAIT_NONE | WAIT_UNSPEC | WAIT_YIELD) {
            return Errno::ENOSYS.negative();
        }
    }
    let made = CompletionCounter {
        head: Head::new(FidCntr { fid: super::fid(CLASS_CNTR, context, &OPS), ops: &CNTR_OPS }),
        counter: Arc::new(Counter::default()),
        counts_messages: AtomicBool::new(false),
        engines: EngineSet::new(),
    };
    publish(Arc::new(made), target);
    0
}

/// # Safety
/// `cntr` is a counter of this provider.
unsafe fn counter<'a>(cntr: *mut FidCntr) -> &'a Counter {
    // SAFETY: the caller guarantees the counter.
    unsafe { &object::<CompletionCounter, _>(cntr).counter }
}

unsafe extern "C" fn read(cntr: *mut FidCntr) -> u64 {
    // SAFETY: `cntr` is a counter of this provider.
    let cntr = unsafe { object::<CompletionCounter, _>(cntr) };
    cntr.progress();
    cntr.counter.value()
}

unsafe extern "C" fn readerr(cntr: *mut FidCntr) -> u64 {
    // SAFETY: `cntr` is a counter of this provider.
    let cntr = unsafe { object::<CompletionCounter, _>(cntr) };
    cntr.progress();
    cntr.counter.errors()
}

unsafe extern "C" fn add(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: `cntr` is a counter of this provider.
    unsafe { counter(cntr) }.add(value);
    0
}

unsafe extern "C" fn set(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: `cntr` is a counter of this provider.
    unsafe { counter(cntr) }.set(value);
    0
}

unsafe extern "C" fn adderr(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: `cntr` is a counter of this provider.
    unsafe { counter(cntr) }.add_errors(value);
    0
}

unsafe extern "C" fn seterr(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: `cntr` is a counter of this provider.
    unsafe { counter(cntr) }.set_errors(value);
    0
}

/// Waits until the counter has reached the threshold, an error is counted, or the time has passed.
/// Polls at least once, so that a wait of 0 ms makes progress.
unsafe extern "C" fn wait(cntr: *mut FidCntr, threshold: u64, timeout: c_int) -> c_int {
    // SAFETY: `cntr` is a counter of this provider.
    let CompletionCounter { counter, engines, .. } = unsafe { object(cntr) };
    let deadline = deadline(timeout);
    let errors = counter.errors();
    let mut polls = 0u32;
    loop {
        engines.progress();
        if counter.value() >= threshold {
            return 0;
        }
        if counter.errors() != errors {
            return Errno::EAVAIL.negative();
        }
        if is_over(deadline) {
            return Errno::ETIMEDOUT.negative();
        }
        polls += 1;
        if polls < POLLS_BEFORE_WAIT {
            std::hint::spin_loop();
        } else if !engines.wait(WAIT_SLICE_MS) {
            std::thread::sleep(std::time::Duration::from_millis(WAIT_SLICE_MS as u64));
        }
    }
}
