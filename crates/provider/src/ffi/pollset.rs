//! Poll sets: several completion queues and counters looked at in one call. (Programs of libfabric 1.x.)

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::cntr::CompletionCounter;
use super::cq::CompletionQueue;
use super::{Head, Object, close, nosys, object, ops, publish};
use crate::abi::*;
use crate::counter::Counter;
use crate::queue::Queue;
use crate::sync::SpinLock;

#[repr(C)]
pub struct PollSet {
    head: Head<FidPoll>,
    members: SpinLock<Vec<Member>>,
}

struct Member {
    /// Which object it is; never followed.
    fid: *mut Fid,
    /// What the program is told.
    context: *mut c_void,
    source: Source,
}

enum Source {
    Queue(Arc<Queue>),
    /// With its successes and errors when it was last told.
    Counter(Arc<Counter>, (u64, u64)),
}

// SAFETY: the pointers are handed back to the program, never followed.
unsafe impl Send for Member {}

// SAFETY: `repr(C)`, fid first, class below.
unsafe impl Object for PollSet {
    const CLASS: usize = CLASS_POLL;
}

static OPS: Ops = ops(close::<PollSet>, nosys::bind, nosys::control);

static POLL_OPS: OpsPoll = OpsPoll { size: size_of::<OpsPoll>(), poll, add, del };

/// # Safety
/// As for `fi_poll_open`.
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
    /// Whether there is news; what is said of a counter is news once.
    fn take_news(&mut self) -> bool {
        match self {
            Source::Queue(queue) => {
                queue.engines.progress();
                !queue.is_empty()
            }
            Source::Counter(counter, told) => {
                counter.engines.progress();
                let now = (counter.value(), counter.errors());
                std::mem::replace(told, now) != now
            }
        }
    }
}

/// The contexts of those in which something may wait; their number.
unsafe extern "C" fn poll(set: *mut FidPoll, contexts: *mut *mut c_void, room: c_int) -> c_int {
    // SAFETY: a poll set of ours.
    let mut members = unsafe { object::<PollSet, _>(set) }.members.lock();
    let mut told = 0;
    for member in members.iter_mut() {
        if told < room && member.source.take_news() {
            // SAFETY: room for `room` contexts.
            unsafe { *contexts.add(told as usize) = member.context };
            told += 1;
        }
    }
    told
}

unsafe extern "C" fn add(set: *mut FidPoll, fid: *mut Fid, flags: u64) -> c_int {
    if flags != 0 {
        return Errno::EBADFLAGS.negative();
    }
    // SAFETY: a poll set and another object of ours, whose class says what it is.
    let (set, source, context) = unsafe {
        let source = match (*fid).class {
            CLASS_CQ => Source::Queue(Arc::clone(&object::<CompletionQueue, _>(fid).queue)),
            CLASS_CNTR => {
                let counter = &object::<CompletionCounter, _>(fid).counter;
                Source::Counter(Arc::clone(counter), (counter.value(), counter.errors()))
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
    // SAFETY: a poll set of ours.
    unsafe { object::<PollSet, _>(set) }.members.lock().retain(|member| member.fid != fid);
    0
}
