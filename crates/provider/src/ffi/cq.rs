//! Completion queues.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::Arc;

use super::{
    Head, Object, close, count, deadline, error_text, is_over, nosys, object, ops, publish,
};
use crate::abi::*;
use crate::engine_set::EngineSet;
use crate::queue::{EntryFormat, Queue};

/// Longest sleep of a blocking read in milliseconds. After this time at the latest the read notices
/// a signal, and an arrival on a second endpoint of the same queue.
const WAIT_SLICE_MS: i32 = 1;
/// Number of polls of a blocking read before it parks for the first time: a reply that is under way
/// arrives without a context switch.
const POLLS_BEFORE_WAIT: u32 = 200;

#[repr(C)]
pub struct CompletionQueue {
    head: Head<FidCq>,
    pub queue: Arc<Queue>,
    /// The engines whose progress feeds the queue: a read of the empty queue drives them.
    pub engines: EngineSet,
    /// The interface version decides how much of an error entry the program has memory for.
    api_version: u32,
}

// SAFETY: the type is `repr(C)`, its first field is the fid, and `CLASS` is its class.
unsafe impl Object for CompletionQueue {
    const CLASS: usize = CLASS_CQ;
}

impl CompletionQueue {
    /// Whether nothing can be read, after a poll of the network.
    pub fn is_idle(&self) -> bool {
        self.engines.progress();
        self.queue.is_empty()
    }
}

static OPS: Ops = ops(close::<CompletionQueue>, nosys::bind, nosys::control);

static CQ_OPS: OpsCq =
    OpsCq { size: size_of::<OpsCq>(), read, readfrom, readerr, sread, sreadfrom, signal, strerror };

/// # Safety
/// The contract of `fi_cq_open` holds.
pub unsafe fn open(
    api_version: u32,
    attr: Option<&mut CqAttr>,
    target: *mut *mut FidCq,
    context: *mut c_void,
) -> c_int {
    let (mut format, mut size) = (CQ_FORMAT_CONTEXT, 0);
    if let Some(attr) = attr {
        if attr.flags & PEER != 0 {
            return Errno::EOPNOTSUPP.negative();
        }
        if !matches!(attr.wait_obj, WAIT_NONE | WAIT_UNSPEC | WAIT_YIELD) {
            return Errno::ENOSYS.negative();
        }
        if attr.format == CQ_FORMAT_UNSPEC {
            attr.format = CQ_FORMAT_CONTEXT;
        }
        (format, size) = (attr.format, attr.size);
    }
    let format = match format {
        CQ_FORMAT_CONTEXT => EntryFormat::Context,
        CQ_FORMAT_MSG => EntryFormat::Message,
        CQ_FORMAT_DATA => EntryFormat::Data,
        CQ_FORMAT_TAGGED => EntryFormat::Tagged,
        _ => return Errno::ENOSYS.negative(),
    };
    let made = CompletionQueue {
        head: Head::new(FidCq { fid: super::fid(CLASS_CQ, context, &OPS), ops: &CQ_OPS }),
        queue: Arc::new(Queue::new(format, size)),
        engines: EngineSet::new(),
        api_version,
    };
    publish(Arc::new(made), target);
    0
}

unsafe extern "C" fn read(cq: *mut FidCq, target: *mut c_void, room: usize) -> isize {
    // SAFETY: `cq` is a completion queue of this provider; the buffer holds `room` entries.
    unsafe { readfrom(cq, target, room, ptr::null_mut()) }
}

unsafe extern "C" fn readfrom(
    cq: *mut FidCq,
    target: *mut c_void,
    room: usize,
    sources: *mut FiAddr,
) -> isize {
    // SAFETY: `cq` is a completion queue of this provider.
    let cq = unsafe { object::<CompletionQueue, _>(cq) };
    // SAFETY: the buffers hold `room` entries.
    count(unsafe { take(cq, target, room, sources) })
}

/// Reads waiting entries, and polls the network only if none wait. A library that reads until the
/// queue is empty thus polls the network once per round, not once per entry.
///
/// # Safety
/// The buffers hold `room` entries.
#[inline]
unsafe fn take(
    cq: &CompletionQueue,
    target: *mut c_void,
    room: usize,
    sources: *mut FiAddr,
) -> Result<usize, Errno> {
    cq.queue.note_read();
    if cq.queue.is_empty() {
        cq.engines.progress();
    }
    // SAFETY: the caller guarantees the size of the buffers.
    unsafe { cq.queue.read(target.cast(), room, sources) }
}

unsafe extern "C" fn readerr(cq: *mut FidCq, target: *mut CqErrEntry, _: u64) -> isize {
    // SAFETY: `cq` is a completion queue of this provider.
    let cq = unsafe { object::<CompletionQueue, _>(cq) };
    let Some(mut error) = cq.queue.read_error() else {
        return Errno::EAGAIN.negative() as isize;
    };
    // SAFETY: the program's entry has the size of its interface version. If the program offers a
    // buffer for details, the entry keeps the buffer, and reports the buffer as unused.
    unsafe {
        if cq.api_version >= version(1, 5) {
            error.err_data = (*target).err_data;
        }
        let from = ptr::from_ref(&error).cast::<u8>();
        target.cast::<u8>().copy_from_nonoverlapping(from, error_bytes(cq.api_version));
    }
    1
}

/// Size of `fi_cq_err_entry` in bytes for a program of this version.
fn error_bytes(api_version: u32) -> usize {
    if api_version < version(1, 5) {
        offset_of!(CqErrEntry, err_data_size)
    } else if api_version < version(1, 20) {
        offset_of!(CqErrEntry, src_addr)
    } else {
        size_of::<CqErrEntry>()
    }
}

unsafe extern "C" fn sread(
    cq: *mut FidCq,
    target: *mut c_void,
    room: usize,
    condition: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: the contract of `sreadfrom` holds.
    unsafe { sreadfrom(cq, target, room, ptr::null_mut(), condition, timeout) }
}

unsafe extern "C" fn sreadfrom(
    cq: *mut FidCq,
    target: *mut c_void,
    room: usize,
    sources: *mut FiAddr,
    _: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: `cq` is a completion queue of this provider.
    let cq = unsafe { object::<CompletionQueue, _>(cq) };
    let deadline = deadline(timeout);
    let mut polls = 0u32;
    loop {
        // SAFETY: the buffers hold `room` entries.
        match unsafe { take(cq, target, room, sources) } {
            Err(Errno::EAGAIN) if cq.queue.take_signal() || is_over(deadline) => {
                return Errno::EAGAIN.negative() as isize;
            }
            Err(Errno::EAGAIN) => park(cq, &mut polls),
            result => return count(result),
        }
    }
}

/// Spins for a while, then sleeps for a slice.
fn park(cq: &CompletionQueue, polls: &mut u32) {
    *polls += 1;
    if *polls < POLLS_BEFORE_WAIT {
        std::hint::spin_loop();
    } else if !cq.engines.wait(WAIT_SLICE_MS) {
        std::thread::sleep(std::time::Duration::from_millis(WAIT_SLICE_MS as u64));
    }
}

unsafe extern "C" fn signal(cq: *mut FidCq) -> c_int {
    // SAFETY: `cq` is a completion queue of this provider.
    unsafe { object::<CompletionQueue, _>(cq).queue.signal() };
    0
}

unsafe extern "C" fn strerror(
    _: *mut FidCq,
    errno: c_int,
    _: *const c_void,
    buffer: *mut c_char,
    len: usize,
) -> *const c_char {
    // SAFETY: the buffer is null or holds `len` bytes.
    unsafe { error_text(errno, buffer, len) }
}
