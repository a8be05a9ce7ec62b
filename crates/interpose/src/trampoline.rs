//! The trampoline: the only region of code from which system calls reach the kernel, while all
//! others are dispatched to this library.
//!
//! Syscall user dispatch (prctl(2), `PR_SET_SYSCALL_USER_DISPATCH`) lets calls through that are
//! made from one range of addresses. That range is a small region of machine code, written when the
//! process begins: a function that makes any system call ([`call`]), the return from signal
//! handlers, and one stub for each call site in the program whose calls are let through. A stub
//! makes the call with the program's own registers and stack, and jumps back. So signals interrupt
//! a stub, and children start in it, as if the call had been made at its own site. While a
//! checkpoint image is taken, calls do not return from stubs (`thread_gate`).
//!
//! What may never happen: a stub is changed once it was used; memory is writable and executable at
//! the same addresses.

use std::ffi::{c_int, c_long};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

/// Bytes of one stub; addresses of stubs are multiples of this number.
const STUB_BYTES: usize = 32;
/// Number of call sites in a program that have a stub; a C library has some 600. Calls of further
/// sites are performed by [`call`].
const STUBS: usize = 4096;
/// Offset of the first stub, after [`CALL`], [`RETURN`] and [`TAIL`].
const FIRST_STUB: usize = 192;
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
/// Code of a stub. The address to return to stands in it at [`STUB_TARGET_AT`], and the distance to
/// the tail at [`STUB_TAIL_AT`].
const STUB: [u8; 17] = [
    0x0f, 0x05, // syscall
    0x48, 0xb9, 0, 0, 0, 0, 0, 0, 0, 0, // mov rcx, address to return to
    0xe9, 0, 0, 0, 0, // jmp tail
];
const STUB_TARGET_AT: usize = 4;
const STUB_TAIL_AT: usize = 13;

/// Code by which each stub returns, with the address to return to in rcx. It waits while the word
/// at the address [`GATE_AT`] is not 0 (`thread_gate`). Like the kernel, it changes no register but
/// rcx and r11, and no flag; it uses memory below the red zone of the stack.
const TAIL: [u8; 84] = [
    0x4c, 0x8b, 0x1d, 0x51, 0x00, 0x00, 0x00, // mov r11, [rip + 81]: the address of the word
    0x45, 0x8b, 0x1b, // mov r11d, [r11]
    0x4c, 0x87, 0xd9, // xchg rcx, r11
    0xe3, 0x42, // jrcxz to the last instruction
    0x48, 0x8d, 0x64, 0x24, 0x80, // lea rsp, [rsp - 128]
    0x41, 0x53, // push r11
    0x50, // push rax
    0x57, // push rdi
    0x56, // push rsi
    0x52, // push rdx
    0x41, 0x52, // push r10
    0x41, 0x50, // push r8
    0x41, 0x51, // push r9
    0x48, 0x89, 0xca, // mov rdx, rcx
    0x48, 0x8b, 0x3d, 0x2e, 0x00, 0x00, 0x00, // mov rdi, [rip + 46]: the address of the word
    0xbe, 0x80, 0x00, 0x00, 0x00, // mov esi, FUTEX_WAIT | FUTEX_PRIVATE_FLAG
    0x41, 0xba, 0x00, 0x00, 0x00, 0x00, // mov r10d, 0
    0xb8, 0xca, 0x00, 0x00, 0x00, // mov eax, SYS_futex
    0x0f, 0x05, // syscall
    0x41, 0x59, // pop r9
    0x41, 0x58, // pop r8
    0x41, 0x5a, // pop r10
    0x5a, // pop rdx
    0x5e, // pop rsi
    0x5f, // pop rdi
    0x58, // pop rax
    0x59, // pop rcx
    0x48, 0x8d, 0xa4, 0x24, 0x80, 0x00, 0x00, 0x00, // lea rsp, [rsp + 128]
    0xeb, 0xaf, // jmp to the first instruction
    0x41, 0xff, 0xe3, // jmp r11
];
const TAIL_AT: usize = 64;
/// Offset of the address of the word for which the tail waits.
const GATE_AT: usize = 152;

const _: () = assert!(CALL.len() <= RETURN_AT && RETURN_AT + RETURN.len() <= TAIL_AT);
const _: () = assert!(TAIL_AT + TAIL.len() <= GATE_AT && GATE_AT + 8 <= FIRST_STUB);
const _: () = assert!(STUB.len() <= STUB_BYTES);

/// Address at which the region is executable; null before [`open`].
static REGION: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
/// Address at which the region is writable.
static WRITTEN: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
/// Return addresses of the program's call sites that have a stub, by hash; 0: free.
static CALL_SITES: [AtomicUsize; STUBS] = [const { AtomicUsize::new(0) }; STUBS];
static IS_ADDING: AtomicBool = AtomicBool::new(false);
/// Number of calls that found no free stub.
static STUBS_EXHAUSTED: AtomicU64 = AtomicU64::new(0);

/// Maps and writes the region. `gate`: while this word is not 0, calls that are let through do not
/// return. `None`: there is no memory. The only thread calls this function once.
pub fn open(gate: &'static AtomicU32) -> Option<()> {
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
        TAIL.as_ptr().copy_to_nonoverlapping(written.add(TAIL_AT), TAIL.len());
        written.add(GATE_AT).cast::<usize>().write_unaligned((&raw const *gate).addr());
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
        let from = FIRST_STUB + at * STUB_BYTES + STUB.len();
        let distance = (TAIL_AT as i32 - from as i32).to_ne_bytes();
        let address = behind.to_ne_bytes();
        // SAFETY: the bytes of the stub, which no thread executes before its site is stored.
        unsafe {
            let stub = WRITTEN.load(Relaxed).add(FIRST_STUB + at * STUB_BYTES);
            STUB.as_ptr().copy_to_nonoverlapping(stub, STUB.len());
            address.as_ptr().copy_to_nonoverlapping(stub.add(STUB_TARGET_AT), address.len());
            distance.as_ptr().copy_to_nonoverlapping(stub.add(STUB_TAIL_AT), distance.len());
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
