//! Poll sets: one call polls several completion queues and counters. Programs of libfabric 1.x use
//! them.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::cntr::CompletionCounter;
use super::cq::CompletionQueue;
use super::{Head, Object, close, nosys, object, ops, publish, share};
use crate::abi::*;
use crate::sync::SpinLock;

#[repr(C)]
pub struct PollSet {
    head: Head<FidPoll>,
    members: SpinLock<Vec<Member>>,
}

struct Member {
    /// Identifies the object; never dereferenced.
    fid: *mut Fid,
    /// The context that the program receives.
    context: *mut c_void,
    source: Source,
}

enum Source {
    Queue(Arc<CompletionQueue>),
    /// A counter, with its successes and errors at the last report.
    Counter(Arc<CompletionCounter>, (u64, u64)),
}

// SAFETY: the poll set passes the pointers back to the program, and never dereferences them.
unsafe impl Send for Member {}

// SAFETY: the type is `repr(C)`, its first field is the fid, and `CLASS` is its class.
unsafe impl Object for PollSet {
    const CLASS: usize = CLASS_POLL;
}

static OPS: Ops = ops(close::<PollSet>, nosys::bind, nosys::control);

static POLL_OPS: OpsPoll = OpsPoll { size: size_of::<OpsPoll>(), poll, add, del };

/// # Safety
/// The contract of `fi_poll_open` holds.
pub unsafe fn open(
    attr: Option<&PollAttr>,
    target: *mut *mut FidPoll,
    context: *mut c_void,
) -> c_int {
    if attr.is_some_and(|attr| attr.flags != 0) {
        return Errno::EBADFLAGS.negative();
    }
    let made = PollSet {
        head: Head::new(FidPoll { fid: super::fid(CLASS_POLL, context, &OPS), ops: &POLL_OPS }),
        members: SpinLock::new(Vec::new()),
    };
    publish(Arc::new(made), target);
    0
}

impl Source {
    /// Whether the source has news. A change of a counter is news once.
    fn take_news(&mut self) -> bool {
        match self {
            Source::Queue(cq) => !cq.is_idle(),
            Source::Counter(cntr, reported) => {
                cntr.engines.progress();
                let now = (cntr.counter.value(), cntr.counter.errors());
                std::mem::replace(reported, now) != now
            }
        }
    }
}

/// Writes the contexts of the members with news to `contexts`, at most `room`; returns their
/// number.
unsafe extern "C" fn poll(set: *mut FidPoll, contexts: *mut *mut c_void, room: c_int) -> c_int {
    // SAFETY: `set` is a poll set of this provider.
    let mut members = unsafe { object::<PollSet, _>(set) }.members.lock();
    let mut reported = 0;
    for member in members.iter_mut() {
        if reported < room && member.source.take_news() {
            // SAFETY: `contexts` holds `room` contexts.
            unsafe { *contexts.add(reported as usize) = member.context };
            reported += 1;
        }
    }
    reported
}

unsafe extern "C" fn add(set: *mut FidPoll, fid: *mut Fid, flags: u64) -> c_int {
    if flags != 0 {
        return Errno::EBADFLAGS.negative();
    }
    // SAFETY: `set` is a poll set, and `fid` is another object of this provider, whose class gives
    // its type.
    let (set, source, context) = unsafe {
        let source = match (*fid).class {
            CLASS_CQ => Source::Queue(share(fid)),
            CLASS_CNTR => {
                let cntr: Arc<CompletionCounter> = share(fid);
                let reported = (cntr.counter.value(), cntr.counter.errors());
                Source::Counter(cntr, reported)
            }
            _ => return Errno::EINVAL.negative(),
        };
        (object::<PollSet, _>(set), source, (*fid).context)
    };
    let mut members = set.members.lock();
    if !members.iter().any(|member| member.fid == fid) {
        members.push(Member { fid, context, source });
    }
    0
}

unsafe extern "C" fn del(set: *mut FidPoll, fid: *mut Fid, _: u64) -> c_int {
    // SAFETY: `set` is a poll set of this provider.
    unsafe { object::<PollSet, _>(set) }.members.lock().retain(|member| member.fid != fid);
    0
}
