//! The head of this process's record, and which thread is recorded.
//!
//! In: the record that `recording` has mapped. Out: its head for the recorded process, nothing for
//! its children. What may never happen: a process that the recorded process starts counts as
//! recorded.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{
    AtomicI32, AtomicPtr, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use landbridge_proto::nondeterminism::{NONDETERMINISM_BYTES, Polls, RecordHead};

use crate::kernel_calls::kernel_or_libc;

/// Beginning of the file name of this library.
pub const LIBRARY: &[u8] = b"liblandbridge_interpose";

/// Identity of the recorded thread, in a page that is empty in a child however the child was
/// created. Null: this process is not recorded.
static OWNER: AtomicPtr<AtomicUsize> = AtomicPtr::new(null_mut());

/// Head of the record, also while it is unmapped for a checkpoint.
static HEAD: AtomicPtr<RecordHead> = AtomicPtr::new(null_mut());

/// Descriptor of the record, which stays open across exec.
static DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);

/// The first incarnation of a process, which replays nothing.
pub const FIRST: u64 = 1;

/// Makes the calling thread the recorded one. `descriptor` and `head` are those of the record;
/// `owner` is a page that is empty in children.
pub fn set(descriptor: c_int, head: *mut RecordHead, owner: *mut AtomicUsize) {
    // SAFETY: the page stays mapped, and no other thread knows of it yet.
    unsafe { (*owner).store(this_thread(), Relaxed) };
    DESCRIPTOR.store(descriptor, Relaxed);
    HEAD.store(head, Release);
    OWNER.store(owner, Release);
}

/// The page with the identity of the recorded thread; null if this process is not recorded.
#[inline]
pub fn owner() -> *mut AtomicUsize {
    OWNER.load(Acquire)
}

/// The place of the record, also while the record is unmapped for a checkpoint; null if this
/// process has none.
pub fn place() -> *mut RecordHead {
    HEAD.load(Acquire)
}

/// Head of the record, if this process is recorded.
pub fn head() -> Option<&'static RecordHead> {
    let owner = OWNER.load(Acquire);
    // SAFETY: null, or a page that stays mapped and is empty in a child.
    let is_recorded = unsafe { owner.as_ref() }.is_some_and(|owner| owner.load(Relaxed) != 0);
    // SAFETY: null, or the head of the record, which stays mapped in the recorded process.
    unsafe { HEAD.load(Acquire).as_ref() }.filter(|_| is_recorded)
}

/// Descriptor of the record; negative: none.
pub fn descriptor() -> c_int {
    DESCRIPTOR.load(Relaxed)
}

/// Notes that the record has no descriptor that stays open across exec.
pub fn forget_descriptor() {
    DESCRIPTOR.store(-1, Relaxed);
}

/// Counter of polls, if this process is recorded. A child shares its parent's memory except for the
/// record.
pub fn polls() -> Option<&'static Polls> {
    head().map(|head| &head.polls)
}

/// Whether the calling thread is the recorded one.
#[inline]
pub fn is_owner() -> bool {
    // SAFETY: null, or a page that stays mapped.
    let owner = unsafe { OWNER.load(Acquire).as_ref() };
    owner.is_some_and(|owner| owner.load(Relaxed) == this_thread())
}

/// Identifies the calling thread within its process, without a system call.
#[inline]
pub fn this_thread() -> usize {
    let pointer: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the first word of the thread control block is its address.
    unsafe {
        std::arch::asm!(
            "mov {}, fs:0",
            out(reg) pointer,
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction reads a register.
    unsafe {
        std::arch::asm!(
            "mrs {}, tpidr_el0",
            out(reg) pointer,
            options(nostack, preserves_flags, nomem)
        );
    }
    pointer
}

/// Whether a descriptor is that of a record, by the size of its file. The handler of system calls
/// uses this function, so the function makes system calls only through the trampoline.
pub fn is_record(descriptor: c_int) -> bool {
    // SAFETY: a structure for which all zeros are a valid value.
    let mut about: libc::stat = unsafe { std::mem::zeroed() };
    let (descriptor, room) = (descriptor as u32 as u64, (&raw mut about).addr() as u64);
    let found = kernel_or_libc(libc::SYS_fstat, [descriptor, room, 0, 0, 0, 0]);
    found == 0 && about.st_size == NONDETERMINISM_BYTES as i64
}
