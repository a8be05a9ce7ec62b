//! The 16 random bytes that the kernel gives to each program (`getauxval(AT_RANDOM)`), the same
//! ones in every incarnation.
//!
//! The C library makes of these bytes what protects the stack (the "canary", between the buffers
//! of a function and its return address) and stored code addresses. Both stay on the stack below
//! the frames of functions that have returned. MPI libraries send such bytes: fields of their
//! messages that they never set. MPICH does so with each unlock of a window.
//!
//! In: the bytes that the agent has chosen for the process. Out: the bytes at their place, and what
//! the C library has made of them. What may never happen: a function that has saved the canary
//! compares it with another one. So this happens before the constructors of all other libraries;
//! the dynamic linker, which calls the first constructor, protects none of its functions.

use std::arch::asm;
use std::ffi::CStr;
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::Ordering::Relaxed;

use crate::record_head;

/// Bytes of the kernel's random number.
const RANDOM_BYTES: usize = 16;

/// Gives the program its random bytes, if it is recorded.
///
/// # Safety
/// The only thread calls this function, from the first constructor.
pub unsafe fn begin_program() {
    let Some(head) = record_head::head() else { return };
    let words = [0, 1].map(|place| head.program_random[place].load(Relaxed));
    // SAFETY: reads the process's own auxiliary vector.
    let kernel = unsafe { libc::getauxval(libc::AT_RANDOM) } as usize;
    if words == [0; 2] || kernel == 0 {
        return;
    }
    let bytes = words.map(u64::to_le_bytes);
    // SAFETY: the kernel has put 16 bytes there, on the stack of the program.
    unsafe {
        with_exposed_provenance_mut::<u8>(kernel)
            .copy_from_nonoverlapping(bytes.as_flattened().as_ptr(), RANDOM_BYTES);
    }
    // The lowest byte of the canary is 0, which ends a string.
    let canary = words[0] & !0xff;
    // SAFETY: the word of the thread control block for the canary, whose place is part of the
    // interface between compilers and C libraries. No function that is running has used it.
    unsafe { asm!("mov fs:0x28, {}", in(reg) canary, options(nostack, preserves_flags)) };
    if is_first_constructor() {
        // SAFETY: as above, the word with which code addresses are stored, such as those of
        // functions that run at exit; none was stored yet.
        unsafe { asm!("mov fs:0x30, {}", in(reg) words[1], options(nostack, preserves_flags)) };
    }
}

/// Whether no other constructor has run: before glibc 2.34 that of libpthread does.
fn is_first_constructor() -> bool {
    // SAFETY: the C library returns a text that stays.
    let version = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) };
    let mut numbers = version.to_str().unwrap_or_default().split('.').map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (2, 34),
        _ => false,
    }
}
