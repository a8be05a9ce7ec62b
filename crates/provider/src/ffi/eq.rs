//! Event queues: events of the program and of address vectors.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::{Head, Object, close, count, deadline, error_text, nosys, object, ops, publish};
use crate::abi::*;

#[repr(C)]
pub struct EventQueue {
    head: Head<FidEq>,
    state: Mutex<EventQueueState>,
    arrival: Condvar,
    /// FI_WAIT_FD: the descriptor is readable while an event waits.
    wait: Option<OwnedFd>,
    /// The program may write events (FI_WRITE).
    writable: bool,
}

#[derive(Default)]
struct EventQueueState {
    events: VecDeque<(u32, Vec<u8>)>,
    errors: VecDeque<EqErrEntry>,
}

// SAFETY: the queue passes the pointers in the errors to the program, and never dereferences them.
unsafe impl Send for EventQueueState {}

// SAFETY: the type is `repr(C)`, its first field is the fid, and `CLASS` is its class.
unsafe impl Object for EventQueue {
    const CLASS: usize = CLASS_EQ;
}

static OPS: Ops = ops(close::<EventQueue>, nosys::bind, control);

static EQ_OPS: OpsEq = OpsEq { size: size_of::<OpsEq>(), read, readerr, write, sread, strerror };

/// # Safety
/// The contract of `fi_eq_open` holds.
pub unsafe fn open(attr: Option<&EqAttr>, target: *mut *mut FidEq, context: *mut c_void) -> c_int {
    let wait_obj = attr.map_or(WAIT_NONE, |attr| attr.wait_obj);
    let wait = match wait_obj {
        WAIT_NONE | WAIT_UNSPEC | WAIT_YIELD => None,
        WAIT_FD => match event_fd() {
            Ok(fd) => Some(fd),
            Err(errno) => return errno.negative(),
        },
        _ => return Errno::ENOSYS.negative(),
    };
    let made = EventQueue {
        head: Head::new(FidEq { fid: super::fid(CLASS_EQ, context, &OPS), ops: &EQ_OPS }),
        state: Mutex::default(),
        arrival: Condvar::new(),
        wait,
        writable: attr.is_some_and(|attr| attr.flags & WRITE != 0),
    };
    publish(Arc::new(made), target);
    0
}

fn event_fd() -> Result<OwnedFd, Errno> {
    // SAFETY: the descriptor is new, and has no other owner.
    unsafe {
        let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        if fd < 0 { Err(Errno::last()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}

impl EventQueue {
    pub fn is_idle(&self) -> bool {
        let state = self.state();
        state.events.is_empty() && state.errors.is_empty()
    }

    /// Reports an event of the provider.
    pub fn report(&self, event: u32, entry: EqEntry) {
        let from = std::ptr::from_ref(&entry).cast::<u8>();
        // SAFETY: an entry is plain bytes without padding (three words).
        let bytes = unsafe { std::slice::from_raw_parts(from, size_of::<EqEntry>()) };
        self.push(event, bytes);
    }

    pub fn report_error(&self, fid: *mut Fid, context: *mut c_void, data: u64, errno: Errno) {
        self.state().errors.push_back(EqErrEntry {
            fid,
            context,
            data,
            err: errno.0,
            prov_errno: errno.0,
            err_data: std::ptr::null_mut(),
            err_data_size: 0,
        });
        self.announce();
    }

    fn push(&self, event: u32, bytes: &[u8]) {
        self.state().events.push_back((event, bytes.to_vec()));
        self.announce();
    }

    fn announce(&self) {
        self.arrival.notify_all();
        if let Some(fd) = &self.wait {
            let one = 1u64;
            // SAFETY: the call reads eight bytes of a local variable. A full counter is readable
            // already.
            unsafe { libc::write(fd.as_raw_fd(), (&raw const one).cast(), 8) };
        }
    }

    /// Locks the state. No thread panics with the lock held, so a poisoned state is still
    /// consistent.
    fn state(&self) -> MutexGuard<'_, EventQueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the descriptor unreadable after a read that has emptied the queue.
    fn settle(&self, state: &EventQueueState) {
        if let (Some(fd), true, true) =
            (&self.wait, state.events.is_empty(), state.errors.is_empty())
        {
            let mut counter = 0u64;
            // SAFETY: the call writes eight bytes of a local variable; the descriptor does not
            // block.
            unsafe { libc::read(fd.as_raw_fd(), (&raw mut counter).cast(), 8) };
        }
    }

    /// # Safety
    /// `target` holds `len` bytes, `event` is writable.
    unsafe fn take(
        &self,
        state: &mut EventQueueState,
        event: *mut u32,
        target: *mut c_void,
        len: usize,
        flags: u64,
    ) -> Result<usize, Errno> {
        if !state.errors.is_empty() {
            return Err(Errno::EAVAIL);
        }
        let (kind, bytes) = state.events.front().ok_or(Errno::EAGAIN)?;
        if len < bytes.len() {
            return Err(Errno::ETOOSMALL);
        }
        let size = bytes.len();
        // SAFETY: the event fits.
        unsafe {
            *event = *kind;
            target.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), size);
        }
        if flags & PEEK == 0 {
            state.events.pop_front();
            self.settle(state);
        }
        Ok(size)
    }
}

unsafe extern "C" fn read(
    eq: *mut FidEq,
    event: *mut u32,
    target: *mut c_void,
    len: usize,
    flags: u64,
) -> isize {
    // SAFETY: `eq` is an event queue of this provider; `target` holds `len` bytes.
    unsafe {
        let eq = object::<EventQueue, _>(eq);
        count(eq.take(&mut eq.state(), event, target, len, flags))
    }
}

unsafe extern "C" fn sread(
    eq: *mut FidEq,
    event: *mut u32,
    target: *mut c_void,
    len: usize,
    timeout: c_int,
    flags: u64,
) -> isize {
    // SAFETY: `eq` is an event queue of this provider.
    let eq = unsafe { object::<EventQueue, _>(eq) };
    let deadline = deadline(timeout);
    let mut state = eq.state();
    loop {
        // SAFETY: `target` holds `len` bytes.
        match unsafe { eq.take(&mut state, event, target, len, flags) } {
            Err(Errno::EAGAIN) => {}
            result => return count(result),
        }
        state = match deadline {
            None => eq.arrival.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(std::time::Instant::now());
                if left.is_zero() {
                    return Errno::EAGAIN.negative() as isize;
                }
                let waited = eq.arrival.wait_timeout(state, left);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
}

unsafe extern "C" fn readerr(eq: *mut FidEq, target: *mut EqErrEntry, flags: u64) -> isize {
    // SAFETY: `eq` is an event queue of this provider.
    let eq = unsafe { object::<EventQueue, _>(eq) };
    let mut state = eq.state();
    let Some(mut error) = state.errors.front().copied() else {
        return Errno::EAGAIN.negative() as isize;
    };
    if flags & PEEK == 0 {
        state.errors.pop_front();
        eq.settle(&state);
    }
    // SAFETY: `target` is the program's entry; its buffer for details stays, unused.
    unsafe {
        error.err_data = (*target).err_data;
        *target = error;
    }
    size_of::<EqErrEntry>() as isize
}

unsafe extern "C" fn write(
    eq: *mut FidEq,
    event: u32,
    source: *const c_void,
    len: usize,
    _: u64,
) -> isize {
    // SAFETY: `eq` is an event queue of this provider; `source` holds `len` bytes.
    unsafe {
        let eq = object::<EventQueue, _>(eq);
        if !eq.writable {
            return Errno::EINVAL.negative() as isize;
        }
        let bytes: &[u8] = match len {
            0 => &[],
            _ => std::slice::from_raw_parts(source.cast(), len),
        };
        eq.push(event, bytes);
    }
    len as isize
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: `fid` is an event queue of this provider.
    let eq = unsafe { object::<EventQueue, _>(fid) };
    match (command, &eq.wait) {
        (GETWAIT, Some(fd)) => {
            // SAFETY: with FI_WAIT_FD the argument of FI_GETWAIT is a writable int.
            unsafe { *argument.cast::<c_int>() = fd.as_raw_fd() };
            0
        }
        _ => Errno::ENOSYS.negative(),
    }
}

unsafe extern "C" fn strerror(
    _: *mut FidEq,
    errno: c_int,
    _: *const c_void,
    buffer: *mut c_char,
    len: usize,
) -> *const c_char {
    // SAFETY: the buffer is null or holds `len` bytes.
    unsafe { error_text(errno, buffer, len) }
}
