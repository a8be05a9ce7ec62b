//! The trampoline: the only region of code from which system calls reach the kernel, while all
//! others are dispatched to this library.
//!
//! Syscall user dispatch (prctl(2), `PR_SET_SYSCALL_USER_DISPATCH`) lets calls through that are
//! made from one range of addresses. That range is a small region of machine code, written when the
//! process begins: a function that makes any system call ([`call`]), the return from signal
//! handlers, and one stub for each call site in the program whose calls are let through. A stub
//! makes the call with the program's own registers and stack, and jumps back. So signals interrupt
//! a stub, and children start in it, as if the call had been made at its own site.
//!
//! What may never happen: a stub is changed once it was used; memory is writable and executable at
//! the same addresses.

use std::ffi::{c_int, c_long};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::*};

/// Bytes of one stub; addresses of stubs are multiples of this number.
const STUB_BYTES: usize = 16;
/// Number of call sites in a program that have a stub; a C library has some 600. Calls of further
/// sites are performed by [`call`].
const STUBS: usize = 4096;
/// Offset of the first stub, after [`CALL`] and [`RETURN`].
const FIRST_STUB: usize = 64;
const REGION_BYTES: usize = FIRST_STUB + STUBS * STUB_BYTES;

/// Code of `fn(number, first, …, sixth)` in the C calling convention, which makes a system call.
const CALL: [u8; 26] = [
    0x48, 0x89, 0xf8, // mov rax, rdi
    0x48, 0x89, 0xf7, // mov rdi, rsi
    0x48, 0x89, 0xd6, // mov rsi, rdx
    0x48, 0x89, 0xca, // mov rdx, rcx
    0x4d, 0x89, 0xc2, // mov r10, r8
    0x4d, 0x89, 0xc8, // mov r8, r9
    0x4c, 0x8b, 0x4c, 0x24, 0x08, // mov r9, [rsp + 8]
    0x0f, 0x05, // syscall
    0xc3, // ret
];
/// Code of rt_sigreturn, in the bytes by which unwinders recognize a signal frame.
const RETURN: [u8; 10] = [
    0x48, 0xc7, 0xc0, 0x0f, 0x00, 0x00, 0x00, // mov rax, 15
    0x0f, 0x05, // syscall
    0xf4, // hlt: never reached
];
const RETURN_AT: usize = 32;
/// Code of a stub: syscall; jmp [rip + 0]. The address to return to follows.
const STUB: [u8; 8] = [0x0f, 0x05, 0xff, 0x25, 0x00, 0x00, 0x00, 0x00];

const _: () = assert!(CALL.len() <= RETURN_AT && RETURN_AT + RETURN.len() <= FIRST_STUB);
const _: () = assert!(STUB.len() + size_of::<usize>() == STUB_BYTES);

/// Address at which the region is executable; null before [`open`].
static REGION: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
/// Address at which the region is writable.
static WRITTEN: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
/// Return addresses of the program's call sites that have a stub, by hash; 0: free.
static CALL_SITES: [AtomicUsize; STUBS] = [const { AtomicUsize::new(0) }; STUBS];
static IS_ADDING: AtomicBool = AtomicBool::new(false);
/// Number of calls that found no free stub.
static STUBS_EXHAUSTED: AtomicU64 = AtomicU64::new(0);

/// Maps and writes the region. `None`: there is no memory. The only thread calls this function
/// once.
pub fn open() -> Option<()> {
    // SAFETY: a new memory file, mapped twice.
    unsafe {
        let file = libc::memfd_create(c"landbridge-gate".as_ptr(), libc::MFD_CLOEXEC);
        let is_there = file >= 0 && libc::ftruncate(file, REGION_BYTES as i64) == 0;
        let written = map(file, libc::PROT_READ | libc::PROT_WRITE).filter(|_| is_there);
        let executed = map(file, libc::PROT_READ | libc::PROT_EXEC).filter(|_| is_there);
        libc::close(file);
        let (written, executed) = written.zip(executed)?;
        CALL.as_ptr().copy_to_nonoverlapping(written, CALL.len());
        RETURN.as_ptr().copy_to_nonoverlapping(written.add(RETURN_AT), RETURN.len());
        WRITTEN.store(written, Release);
        REGION.store(executed, Release);
    }
    Some(())
}

/// Gives a forked child a region of its own at the same addresses, so that a stub that the child
/// writes does not overwrite one that its parent is writing for another call site. The only thread
/// of the child calls this function. False: there is no memory.
pub fn make_own() -> bool {
    let (written, executed) = (WRITTEN.load(Relaxed).addr(), REGION.load(Relaxed).addr());
    if executed == 0 {
        return true;
    }
    let kernel = |number, arguments| {
        // SAFETY: a memory file with the same content replaces the one that is mapped there.
        unsafe { call(number, arguments) }
    };
    let name = c"landbridge-gate".as_ptr().addr() as u64;
    let flags = u64::from(libc::MFD_CLOEXEC);
    let Ok(file) = u64::try_from(kernel(libc::SYS_memfd_create, [name, flags, 0, 0, 0, 0])) else {
        return false;
    };
    let bytes = REGION_BYTES as u64;
    let mut is_done =
        kernel(libc::SYS_write, [file, written as u64, bytes, 0, 0, 0]) == REGION_BYTES as i64;
    let flags = (libc::MAP_SHARED | libc::MAP_FIXED) as u64;
    for (place, more) in [(written, libc::PROT_WRITE), (executed, libc::PROT_EXEC)] {
        let protection = (libc::PROT_READ | more) as u64;
        is_done = is_done
            && kernel(libc::SYS_mmap, [place as u64, bytes, protection, flags, file, 0])
                == place as i64;
    }
    kernel(libc::SYS_close, [file, 0, 0, 0, 0, 0]);
    IS_ADDING.store(false, Relaxed);
    is_done
}

/// Address of the region, and its length in bytes.
pub fn range() -> (usize, usize) {
    (REGION.load(Relaxed).addr(), REGION_BYTES)
}

/// Address to which signal handlers return.
pub fn restorer() -> usize {
    REGION.load(Relaxed).addr() + RETURN_AT
}

/// Makes a system call. Returns the kernel's result: a negative value is an error.
///
/// # Safety
/// The arguments are valid for the system call `number`.
pub unsafe fn call(number: c_long, arguments: [u64; 6]) -> i64 {
    type Gate = unsafe extern "C" fn(c_long, u64, u64, u64, u64, u64, u64) -> i64;
    let [a, b, c, d, e, f] = arguments;
    let region = REGION.load(Acquire);
    // SAFETY: the region begins with the code of `Gate`; the rest is the caller's promise.
    unsafe {
        if !region.is_null() {
            return std::mem::transmute::<*mut u8, Gate>(region)(number, a, b, c, d, e, f);
        }
        match libc::syscall(number, a, b, c, d, e, f) {
            -1 => -i64::from(*libc::__errno_location()),
            result => result,
        }
    }
}

/// Address of the stub for the call site that returns to `behind`. `None`: no stub is free.
pub fn stub(behind: usize) -> Option<usize> {
    let start = (behind >> 1).wrapping_mul(0x9e37_79b1) % STUBS;
    let places = CALL_SITES[start..].iter().chain(&CALL_SITES[..start]);
    for (distance, place) in places.enumerate() {
        let at = (start + distance) % STUBS;
        match place.load(Acquire) {
            found if found == behind => return Some(address_of(at)),
            0 => return add(at, behind),
            _ => (),
        }
    }
    STUBS_EXHAUSTED.fetch_add(1, Relaxed);
    None
}

fn address_of(at: usize) -> usize {
    REGION.load(Relaxed).addr() + FIRST_STUB + at * STUB_BYTES
}

#[cold]
fn add(at: usize, behind: usize) -> Option<usize> {
    while IS_ADDING.swap(true, Acquire) {
        std::hint::spin_loop();
    }
    let is_free = CALL_SITES[at].load(Relaxed) == 0;
    if is_free {
        let address = behind.to_ne_bytes();
        // SAFETY: the bytes of the stub, which no thread executes before its site is stored.
        unsafe {
            let stub = WRITTEN.load(Relaxed).add(FIRST_STUB + at * STUB_BYTES);
            STUB.as_ptr().copy_to_nonoverlapping(stub, STUB.len());
            address.as_ptr().copy_to_nonoverlapping(stub.add(STUB.len()), address.len());
        }
        CALL_SITES[at].store(behind, Release);
    }
    IS_ADDING.store(false, Release);
    if is_free { Some(address_of(at)) } else { stub(behind) }
}

/// Maps the file by the system call itself, because another library may be replacing the C
/// library's function at this moment.
///
/// # Safety
/// The file has [`REGION_BYTES`], or no code uses the mapping.
unsafe fn map(file: c_int, protection: c_int) -> Option<*mut u8> {
    let (bytes, shared) = (REGION_BYTES, libc::MAP_SHARED);
    // SAFETY: the kernel chooses free addresses.
    let found =
        unsafe { libc::syscall(libc::SYS_mmap, 0_usize, bytes, protection, shared, file, 0_usize) };
    (found > 0).then_some(found as *mut u8)
}
