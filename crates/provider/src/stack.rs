//! A stack of the provider.
//!
//! The bytes that a call leaves below the program's stack pointer stay there, and MPI libraries
//! send such bytes: fields of their messages that they never set (MPICH does so with each fetching
//! one-sided operation). After a restart a process takes other code paths through the provider than
//! its earlier incarnation, so it would leave and send other bytes, and its messages would differ.
//! So the engine of a recorded process works on a stack that the program never sees.
//!
//! What may never happen: two calls use the stack at the same time. The holder of the engine's lock
//! uses the stack of the engine.

use std::arch::asm;
use std::ffi::c_void;
use std::mem::MaybeUninit;

/// Several times the size of the deepest call; unused pages are never touched.
const STACK_BYTES: usize = 1 << 20;
/// Inaccessible memory at the lower end: an overflow ends the process, and does not corrupt other
/// memory. No machine has larger pages.
const GUARD_BYTES: usize = 64 << 10;
/// Alignment of the stack pointer, which both processor architectures require.
const ALIGNMENT: usize = 16;

/// Memory of a stack for the engine of a recorded process.
pub struct Stack(Box<[MaybeUninit<u8>]>);

/// The upper end of a stack, where use begins: a stack grows downwards.
#[derive(Clone, Copy)]
pub struct Top(*mut u8);

struct Call<W, R> {
    work: Option<W>,
    result: Option<R>,
}

impl Stack {
    pub fn new() -> Self {
        let mut stack = Self(Box::new_uninit_slice(STACK_BYTES + 2 * GUARD_BYTES));
        // The stack works without a guard, too, so an error is ignored.
        stack.protect(libc::PROT_NONE);
        stack
    }

    fn protect(&mut self, protection: i32) {
        let start = self.0.as_mut_ptr().map_addr(|start| start.next_multiple_of(GUARD_BYTES));
        // SAFETY: these pages belong to the stack alone, and no code uses bytes below them.
        unsafe { libc::mprotect(start.cast(), GUARD_BYTES, protection) };
    }

    /// The top of the stack, aligned for a call.
    pub fn top(&mut self) -> Top {
        let end = self.0.as_mut_ptr_range().end.cast::<u8>();
        Top(end.map_addr(|address| address & !(ALIGNMENT - 1)))
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        self.protect(libc::PROT_READ | libc::PROT_WRITE);
    }
}

impl Default for Stack {
    fn default() -> Self {
        Self::new()
    }
}

impl Top {
    /// Runs `work` on the stack.
    ///
    /// # Safety
    /// The stack lives until the function returns, and nothing else uses the stack.
    #[inline(never)]
    pub unsafe fn run<R>(self, work: impl FnOnce() -> R) -> R {
        let mut call = Call { work: Some(work), result: None };
        // SAFETY: the caller guarantees the stack; `begin` gets the call for which it was made. A
        // panic ends the process (`panic = "abort"`).
        unsafe { switch(self.0, begin_of(&call), (&raw mut call).cast()) };
        call.result.expect("the work is done")
    }
}

/// The function that begins on the other stack.
type Begin = unsafe extern "C" fn(*mut c_void);

fn begin_of<W: FnOnce() -> R, R>(_: &Call<W, R>) -> Begin {
    begin::<W, R>
}

/// # Safety
/// `call` is a `Call<W, R>` that nothing else uses.
unsafe extern "C" fn begin<W: FnOnce() -> R, R>(call: *mut c_void) {
    // SAFETY: the caller guarantees the type and exclusive use.
    let call = unsafe { &mut *call.cast::<Call<W, R>>() };
    call.result = call.work.take().map(|work| work());
}

/// # Safety
/// Below `top` is a stack that nothing else uses; `begin` may be called with `call`.
#[cfg(target_arch = "x86_64")]
unsafe fn switch(top: *mut u8, begin: Begin, call: *mut c_void) {
    // SAFETY: the caller guarantees the stack; the register with the old stack pointer survives
    // calls.
    unsafe {
        asm!(
            "mov r12, rsp",
            "mov rsp, {top}",
            "call {begin}",
            "mov rsp, r12",
            top = in(reg) top,
            begin = in(reg) begin,
            in("rdi") call,
            out("r12") _,
            clobber_abi("C"),
        );
    }
}

/// # Safety
/// Below `top` is a stack that nothing else uses; `begin` may be called with `call`.
#[cfg(target_arch = "aarch64")]
unsafe fn switch(top: *mut u8, begin: Begin, call: *mut c_void) {
    // SAFETY: the caller guarantees the stack; the register with the old stack pointer survives
    // calls.
    unsafe {
        asm!(
            "mov x20, sp",
            "mov sp, {top}",
            "blr {begin}",
            "mov sp, x20",
            top = in(reg) top,
            begin = in(reg) begin,
            in("x0") call,
            out("x20") _,
            clobber_abi("C"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes to some stack memory, and returns its address.
    #[inline(never)]
    fn leave_something(secret: u8) -> usize {
        let mut room = [0_u8; 4096];
        std::hint::black_box(&mut room).fill(secret);
        room.as_ptr().addr()
    }

    #[test]
    fn work_is_done_on_it_and_its_result_comes_back() {
        let mut stack = Stack::new();
        let range = stack.0.as_ptr_range();
        let (first, last) = (range.start.addr(), range.end.addr());
        let top = stack.top();
        let text = String::from("kept");
        for round in 0..3 {
            // SAFETY: the stack belongs to this test.
            let (place, kept_text) = unsafe { top.run(|| (leave_something(round), text.clone())) };
            assert!((first..last).contains(&place) && kept_text == "kept");
        }
        let here = leave_something(1);
        assert!(!(first..last).contains(&here));
        // A call on one stack contains a call on another stack.
        let mut other = Stack::new();
        let inner = other.top();
        // SAFETY: both stacks belong to this test.
        let sum = unsafe { top.run(|| 1 + inner.run(|| 2.5_f64 as i32 * 4)) };
        assert_eq!(sum, 9);
    }
}
