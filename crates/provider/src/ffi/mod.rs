//! libfabric's objects and calls: C arguments become requests to the engine.
//!
//! Every object is an `Arc` whose value starts with its `fid`. The program holds one count (until
//! `fi_close`), and objects made from the object hold others. So objects may be closed in any
//! order, as MPI libraries do: an object that is still needed lives on, unreachable for the
//! program. The program upholds libfabric's contract (a pointer is not used after its close, calls
//! get pointers of the right class). All unsafe code here relies on this contract, which `Object`
//! states once.
//!
//! The modules in order; each uses only those before it. An object whose calls open or use other
//! objects has two modules: the object, and its calls.
//!
//! | module | holds |
//! |---|---|
//! | `nosys` | calls that are not offered |
//! | `domain` | what the objects of a domain share |
//! | `mr` | memory registration |
//! | `eq` | event queues |
//! | `av` | address vectors |
//! | `cntr`, `cq` | counters, completion queues |
//! | `pollset` | poll sets |
//! | `bound_objects` | queues and counters of an endpoint |
//! | `ep` | endpoints: enabling, options, the common path of data calls |
//! | `cm` | names of endpoints |
//! | `msg` | messages without tags |
//! | `tagged` | messages with tags |
//! | `rma` | remote reads and writes |
//! | `atomic` | remote atomic operations |
//! | `ep_calls` | calls of an endpoint apart from its data calls |
//! | `domain_calls` | calls of a domain, which open objects |
//! | `fabric` | the fabric object, which opens domains and event queues |

mod atomic;
mod av;
mod bound_objects;
mod cm;
mod cntr;
mod cq;
mod domain;
mod domain_calls;
mod ep;
mod ep_calls;
mod eq;
pub mod fabric;
mod mr;
mod msg;
mod nosys;
mod pollset;
mod rma;
mod tagged;
#[cfg(test)]
mod tests;

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::abi::{Errno, Fid, Ops};

/// The C part at the beginning of an object. The host may write to it (it writes a fabric's
/// version), so no plain reference to it exists.
#[repr(transparent)]
struct Head<F>(UnsafeCell<F>);

// SAFETY: the head is written before the object is published, and by the host before it uses the
// object; afterwards the head is only read.
unsafe impl<F> Sync for Head<F> {}
// SAFETY: the pointers are the program's contexts and static tables.
unsafe impl<F> Send for Head<F> {}

impl<F> Head<F> {
    fn new(fid: F) -> Head<F> {
        Head(UnsafeCell::new(fid))
    }

    fn get(&self) -> *mut F {
        self.0.get()
    }
}

/// An object that begins with a `fid`.
///
/// # Safety
/// The type is `repr(C)`, its first field is the `Head` of a structure that starts with a `Fid` of
/// class `CLASS`, and the program only gets pointers made by `publish`.
unsafe trait Object: Sized {
    const CLASS: usize;
}

/// Passes an object to the program, as a pointer to its fid.
fn publish<T: Object, F>(object: Arc<T>, target: *mut *mut F) {
    // SAFETY: the caller of the open call gives a writable pointer.
    unsafe { *target = Arc::into_raw(object).cast_mut().cast() };
}

/// The object behind a fid.
///
/// # Safety
/// `fid` came from `publish::<T>` and is not closed.
#[inline(always)]
unsafe fn object<'a, T: Object, F>(fid: *const F) -> &'a T {
    // SAFETY: the caller guarantees the object; a fid starts with its class.
    unsafe {
        debug_assert_eq!(*fid.cast::<usize>(), T::CLASS, "an object of another class");
        &*fid.cast::<T>()
    }
}

/// Another count of the object behind a fid.
///
/// # Safety
/// `fid` came from `publish::<T>` and is not closed.
unsafe fn share<T: Object, F>(fid: *const F) -> Arc<T> {
    // SAFETY: published objects are in an Arc, and the program still holds its count.
    unsafe {
        debug_assert_eq!(*fid.cast::<usize>(), T::CLASS, "an object of another class");
        Arc::increment_strong_count(fid.cast::<T>());
        Arc::from_raw(fid.cast::<T>())
    }
}

/// Takes the program's count back.
///
/// # Safety
/// `fid` came from `publish::<T>` and is not closed; the program does not use the pointer any more.
unsafe fn reclaim<T: Object>(fid: *mut Fid) -> Arc<T> {
    // SAFETY: `publish` has passed this count to the program.
    unsafe { Arc::from_raw(fid.cast::<T>()) }
}

/// `close` for objects that need no other work.
unsafe extern "C" fn close<T: Object>(fid: *mut Fid) -> c_int {
    // SAFETY: the program closes the object once, through the table of a `T`.
    drop(unsafe { reclaim::<T>(fid) });
    0
}

/// A table of `fi_ops` whose other entries are not offered.
const fn ops(
    close: unsafe extern "C" fn(*mut Fid) -> c_int,
    bind: unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int,
    control: unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int,
) -> Ops {
    Ops {
        size: size_of::<Ops>(),
        close,
        bind,
        control,
        ops_open: nosys::ops_open,
        tostr: nosys::tostr,
        ops_set: nosys::ops_set,
    }
}

fn fid(class: usize, context: *mut c_void, ops: &'static Ops) -> Fid {
    Fid { class, context, ops }
}

/// The result of a call: 0 or a negative error.
fn status(result: Result<(), Errno>) -> c_int {
    result.map_or_else(Errno::negative, |()| 0)
}

/// The result of a call that returns `ssize_t`: 0 or a negative error.
#[inline(always)]
fn status_long(result: Result<(), Errno>) -> isize {
    match result {
        Ok(()) => 0,
        Err(errno) => errno.negative() as isize,
    }
}

/// The result of a call that returns a count or a negative error.
fn count(result: Result<usize, Errno>) -> isize {
    match result {
        Ok(count) => count as isize,
        Err(errno) => errno.negative() as isize,
    }
}

/// The time in `milliseconds` from now; a negative value means no deadline.
fn deadline(milliseconds: c_int) -> Option<Instant> {
    u64::try_from(milliseconds).ok().map(|ms| Instant::now() + Duration::from_millis(ms))
}

fn is_over(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

/// The answer of `fi_*_strerror`: in the caller's buffer if there is a buffer, else a static
/// string.
///
/// # Safety
/// `buffer` is null or holds `len` bytes.
unsafe fn error_text(errno: c_int, buffer: *mut c_char, len: usize) -> *const c_char {
    let text = Errno(errno.saturating_abs()).text();
    if buffer.is_null() || len == 0 {
        return c"landbridge: see the error number (fi_strerror)".as_ptr();
    }
    let copied = text.len().min(len - 1);
    // SAFETY: `copied + 1 <= len`.
    unsafe {
        buffer.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), copied);
        *buffer.add(copied) = 0;
    }
    buffer
}

/// Copies as much of a name as fits, and sets `*len` to the length of the whole name. `ETOOSMALL`:
/// the name did not fit.
///
/// # Safety
/// `target` holds `*len` bytes.
unsafe fn copy_name(name: &[u8], target: *mut c_void, len: *mut usize) -> c_int {
    // SAFETY: the caller guarantees the target; no more than fits is copied.
    unsafe {
        let room = std::mem::replace(&mut *len, name.len());
        let copied = room.min(name.len());
        if copied > 0 {
            target.cast::<u8>().copy_from_nonoverlapping(name.as_ptr(), copied);
        }
        if room < name.len() { Errno::ETOOSMALL.negative() } else { 0 }
    }
}
