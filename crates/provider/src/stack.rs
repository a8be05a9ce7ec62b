//! A stack of the provider's own.
//!
//! What a call leaves below the program's stack pointer stays there, and MPI libraries send such leavings: fields of their
//! messages that they never set (MPICH does with each fetching one-sided operation). A new start of a killed process goes
//! other ways through the provider than the one before, so it would leave something else there, and send it: another
//! message than before. So where a process is recorded the engine works on a stack that the program never sees.
//!
//! What may never happen: two calls are on it at once (whoever is holds the lock of the engine whose it is).

use std::arch::asm;
use std::ffi::c_void;
use std::mem::MaybeUninit;

/// Enough for the deepest call, several times over; pages that nobody gets to are never touched.
const STACK_BYTES: usize = 1 << 20;
/// At its lower end: whoever gets there ends the process instead of spoiling other memory. No machine's pages are larger.
const GUARD_BYTES: usize = 64 << 10;
/// Both processors want the stack pointer at a multiple of this.
const ALIGNMENT: usize = 16;

/// See the module head.
pub struct Stack(Box<[MaybeUninit<u8>]>);

/// Where a stack begins: it grows downwards.
#[derive(Clone, Copy)]
pub struct Top(*mut u8);

struct Call<W, R> {
    work: Option<W>,
    result: Option<R>,
}

impl Stack {
    pub fn new() -> Self {
        let mut stack = Self(Box::new_uninit_slice(STACK_BYTES + 2 * GUARD_BYTES));
        // Without a guard it works as well.
        stack.protect(libc::PROT_NONE);
        stack
    }

    fn protect(&mut self, protection: i32) {
        let start = self.0.as_mut_ptr().map_addr(|start| start.next_multiple_of(GUARD_BYTES));
        // SAFETY: these pages are ours alone, and nobody works below them.
        unsafe { libc::mprotect(start.cast(), GUARD_BYTES, protection) };
    }

    /// Where whoever works on it begins.
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
    /// Does `work` there.
    ///
    /// # Safety
    /// The stack lives until this returns, and nobody else is on it.
    #[inline(never)]
    pub unsafe fn run<R>(self, work: impl FnOnce() -> R) -> R {
        let mut call = Call { work: Some(work), result: None };
        // SAFETY: the caller's promise; `begin` gets the call that it was made for. A panic ends the process (`panic = "abort"`).
        unsafe { switch(self.0, begin_of(&call), (&raw mut call).cast()) };
        call.result.expect("the work is done")
    }
}

/// What begins on the other stack.
type Begin = unsafe extern "C" fn(*mut c_void);

fn begin_of<W: FnOnce() -> R, R>(_: &Call<W, R>) -> Begin {
    begin::<W, R>
}

/// # Safety
/// `call` is a `Call<W, R>` that nobody else looks at.
unsafe extern "C" fn begin<W: FnOnce() -> R, R>(call: *mut c_void) {
    // SAFETY: the caller's promise.
    let call = unsafe { &mut *call.cast::<Call<W, R>>() };
    call.result = call.work.take().map(|work| work());
}

/// # Safety
/// Below `top` is a stack that nobody else is on; `begin` may be called with `call`.
#[cfg(target_arch = "x86_64")]
unsafe fn switch(top: *mut u8, begin: Begin, call: *mut c_void) {
    // SAFETY: the caller's promise; the register that keeps the old stack is one that calls preserve.
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
/// As above.
#[cfg(target_arch = "aarch64")]
unsafe fn switch(top: *mut u8, begin: Begin, call: *mut c_void) {
    // SAFETY: as above.
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

    /// Uses some stack, and says where.
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
            // SAFETY: the stack is this test's own.
            let (place, told) = unsafe { top.run(|| (leave_something(round), text.clone())) };
            assert!((first..last).contains(&place) && told == "kept");
        }
        let here = leave_something(1);
        assert!(!(first..last).contains(&here));
        // One within the other, on another stack.
        let mut other = Stack::new();
        let inner = other.top();
        // SAFETY: as above.
        let sum = unsafe { top.run(|| 1 + inner.run(|| 2.5_f64 as i32 * 4)) };
        assert_eq!(sum, 9);
    }
}
