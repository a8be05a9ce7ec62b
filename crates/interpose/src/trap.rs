//! Handler for the system calls of the recorded thread: the kernel delivers them to this module as
//! signals (syscall user dispatch, Linux 5.11).
//!
//! In: a SIGSYS for each system call of the thread, made by the program, the C library or the MPI
//! library. Out: this module performs and records the call (`syscalls`), or lets the call through
//! (`trampoline`). The provider's calls are not the program's, so the provider turns dispatch off
//! by one byte while it works ([`dispatch::selector`]).
//!
//! A signal handler interrupts the program at another point in each incarnation, so replay cannot
//! repeat what a handler does. This module observes the calls of a handler like the calls of
//! another thread (`observe`), also while the provider works.
//!
//! The kernel ends a process whose SIGSYS is blocked or has no handler. So this handler stays
//! installed (`rt_sigaction`), no signal mask of the program contains SIGSYS (`rt_sigprocmask`),
//! and the handler has a signal stack of its own (`sigaltstack`): no program sends what the handler
//! leaves on that stack.
//!
//! What may never happen: this handler makes a system call outside the trampoline's region.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use libc::{c_long, siginfo_t, ucontext_t};

use crate::dispatch::{
    self, REARM, SIGSYS_BIT, WIDE_STACK_BYTES, new_wide_stack, raw, start_dispatch, unblock,
};
use crate::handler_frames::{self, STACK_BYTES};
use crate::thread_gate::STOP;
use crate::user_memory::{self, Readable};
use crate::{
    observe, process_calls, raw_channels, record_head, record_lock, restart_refusals, signal_mask,
    syscalls, thread_gate, trampoline, unsaved_attributes, watched,
};

/// `si_code` of a dispatched call.
const SYS_USER_DISPATCH: c_int = 2;

/// Offset in bytes of `si_arch` in the kernel's `struct siginfo`, after `si_call_addr` and
/// `si_syscall`.
const SI_ARCH: usize = 28;

const SA_RESTORER: u64 = 0x0400_0000;

/// Number of dispatched calls, and number of those calls that were let through.
pub static TRAPS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Signal stack that the program has set and believes to use.
struct EmulatedStack(UnsafeCell<MaybeUninit<libc::stack_t>>);
// SAFETY: the recorded thread alone uses the value.
unsafe impl Sync for EmulatedStack {}
static EMULATED_STACK: EmulatedStack = EmulatedStack(UnsafeCell::new(MaybeUninit::uninit()));

/// Number of table entries: Linux numbers its signals 1 to 64.
const SIGNALS: usize = 65;
/// The program's signal handlers by signal number: address, and the flags of their installation.
/// The kernel calls [`on_signal`], which calls them.
static HANDLERS: [(AtomicUsize, AtomicU64); SIGNALS] =
    [const { (AtomicUsize::new(0), AtomicU64::new(0)) }; SIGNALS];

/// `struct sigaction` in the layout of the kernel's system call.
#[repr(C)]
#[derive(Clone, Copy)]
struct SignalAction {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

/// System call of the program, with the registers at the call.
pub struct TrappedCall {
    pub number: c_long,
    pub arguments: [u64; 6],
    context: *mut ucontext_t,
}

/// Turns dispatch on for the calling thread, which is the recorded one. False: the kernel does not
/// support dispatch, and nothing has changed.
pub fn install() -> bool {
    if !install_handler() {
        return false;
    }
    let stack =
        libc::stack_t { ss_sp: handler_frames::stack().cast(), ss_flags: 0, ss_size: STACK_BYTES };
    // SAFETY: the structure lives until the call returns, and the stack stays.
    unsafe {
        let none = libc::stack_t { ss_sp: null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
        (*EMULATED_STACK.0.get()).write(none);
        raw(libc::SYS_sigaltstack, [(&raw const stack).addr() as u64, 0, 0, 0, 0, 0]);
    }
    start_dispatch()
}

/// Installs the handler in this process. False: there is no memory for the trampoline.
pub fn install_handler() -> bool {
    // Threads may install it at the same time, and dispatch depends on one trampoline.
    static IS_OPEN: OnceLock<bool> = OnceLock::new();
    if !IS_OPEN.get_or_init(|| trampoline::open(&thread_gate::GATE).is_some()) {
        return false;
    }
    // A thread that is asked to turn dispatch on again ([`REARM`]) may wait in the kernel.
    let action = SignalAction {
        handler: on_trap as *const () as usize,
        flags: (libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART) as u64 | SA_RESTORER,
        restorer: trampoline::restorer(),
        mask: !0,
    };
    let action = (&raw const action).addr() as u64;
    // SAFETY: the structure lives until the call returns, and its address is that of a handler.
    unsafe { raw(libc::SYS_rt_sigaction, [libc::SIGSYS as u64, action, 0, 8, 0, 0]) };
    unblock();
    dispatch::note_installed();
    true
}

/// Handler of SIGSYS, for a dispatched call, a request to turn dispatch on again ([`REARM`]), or a
/// signal of another origin.
unsafe extern "C" fn on_trap(_: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel hands in both structures, and nothing else refers to them.
    unsafe {
        let context = context.cast::<ucontext_t>();
        if (*info).si_code == libc::SI_QUEUE {
            match (*info).si_value().sival_ptr.addr() {
                REARM => return dispatch::observe_again(),
                STOP => return thread_gate::wait(),
                _ => (),
            }
        }
        if (*info).si_code != SYS_USER_DISPATCH {
            return raise_default_sigsys();
        }
        // The kernel ignores the upper half of this register.
        let number = (*context).uc_mcontext.gregs[libc::REG_RAX as usize] as i32 as c_long;
        if !is_native(architecture_of(info), number) {
            watched::forbid_restart_of(format_args!("it makes system calls of 32-bit programs"));
            (*context).uc_mcontext.gregs[libc::REG_RAX as usize] = -i64::from(libc::ENOSYS);
            return;
        }
        let registers = &mut (*context).uc_mcontext.gregs;
        let register = |at: c_int| registers[at as usize] as u64;
        let arguments = [
            register(libc::REG_RDI),
            register(libc::REG_RSI),
            register(libc::REG_RDX),
            register(libc::REG_R10),
            register(libc::REG_R8),
            register(libc::REG_R9),
        ];
        let mut trapped = TrappedCall { number, arguments, context };
        TRAPS[0].fetch_add(1, Relaxed);
        let is_recorded = record_head::is_owner();
        if !is_recorded {
            thread_gate::enter();
        }
        let result = trapped.handle();
        if !is_recorded {
            thread_gate::leave();
        }
        let registers = &mut (*context).uc_mcontext.gregs;
        let rip = libc::REG_RIP as usize;
        if let Some(result) = result {
            registers[libc::REG_RAX as usize] = result;
            return;
        }
        TRAPS[1].fetch_add(1, Relaxed);
        match trampoline::stub(registers[rip] as usize) {
            Some(stub) => registers[rip] = stub as i64,
            None => registers[libc::REG_RAX as usize] = raw(number, arguments),
        }
    }
}

/// The instruction set for which the number of a dispatched call is meant: `si_arch`.
///
/// # Safety
/// The kernel's description of a dispatched call.
unsafe fn architecture_of(info: *const siginfo_t) -> u32 {
    // SAFETY: the caller's promise; the field is the third after the address of the call.
    unsafe { info.cast::<u8>().add(SI_ARCH).cast::<u32>().read() }
}

/// Whether a system call has the numbers of this library's tables. `int $0x80` makes calls of
/// 32-bit programs, and a bit of the number those of the x32 ABI.
fn is_native(architecture: u32, number: c_long) -> bool {
    const AUDIT_ARCH_I386: u32 = 0x4000_0003;
    const X32_BIT: c_long = 0x4000_0000;
    architecture != AUDIT_ARCH_I386 && (number < 0 || number & X32_BIT == 0)
}

/// Runs before each signal handler of the program. Dispatches the calls of the handler, whatever
/// code it has interrupted; the calls are observed and not recorded.
extern "C" fn on_signal(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
    let handler = HANDLERS[signal as usize].0.load(Relaxed);
    // SAFETY: the address is that of a handler. A handler of one argument ignores the others, which
    // are in registers.
    let handler = unsafe { std::mem::transmute::<usize, Handler>(handler) };
    if !record_head::is_owner() {
        // While an image is taken, files of the recorded thread are placeholders.
        thread_gate::wait();
        return handler(signal, info, context);
    }
    note_sender(signal, info);
    // SAFETY: the kernel's frame.
    record_lock::is_in_handler(unsafe { stack_pointer_of(context.cast()) });
    let depth = handler_frames::begin(handler_frames::stack_pointer(), record_lock::is_busy());
    let before = dispatch::begin_handler();
    handler(signal, info, context);
    dispatch::end_handler(before);
    handler_frames::end(depth);
}

/// Stack pointer of interrupted code.
///
/// # Safety
/// The context is a frame of the kernel.
unsafe fn stack_pointer_of(context: *const ucontext_t) -> usize {
    // SAFETY: the caller's promise.
    unsafe { (*context).uc_mcontext.gregs[libc::REG_RSP as usize] as usize }
}

/// Removes SIGSYS from the mask of a wait, because a handler of the program may make system calls
/// during the wait. A mask in memory that cannot be written stays.
///
/// # Safety
/// The mask is null or an argument of a system call.
unsafe fn clear_sigsys(mask: u64) {
    let mask = mask as *mut u64;
    // SAFETY: the caller's promise. Only a mask that contains SIGSYS is written, and only if the
    // kernel can write it.
    unsafe {
        if !mask.is_null() && mask.read_unaligned() & SIGSYS_BIT != 0 {
            let wanted = mask.read_unaligned() & !SIGSYS_BIT;
            let probe = [libc::SIG_BLOCK as u64, 0, mask.addr() as u64, 8, 0, 0];
            if raw(libc::SYS_rt_sigprocmask, probe) == 0 {
                mask.write_unaligned(wanted);
            }
        }
    }
}

/// Forbids a restart if another process has sent the signal, because the signal does not arrive
/// again in a later incarnation. The parent process may send any signal: the parent is the node
/// agent, which ends the job by signals.
fn note_sender(signal: c_int, info: *mut siginfo_t) {
    // SAFETY: null, or the kernel's description of the signal.
    let Some(info) = (unsafe { info.as_ref() }) else { return };
    if !matches!(info.si_code, libc::SI_USER | libc::SI_QUEUE | libc::SI_TKILL) {
        return;
    }
    // SAFETY: signals with these codes name their sender.
    let sender = unsafe { info.si_pid() };
    // SAFETY: a call without arguments.
    let parent = unsafe { raw(libc::SYS_getppid, [0; 6]) };
    if i64::from(sender) != parent && !crate::processes::is_own_process(sender) {
        restart_refusals::forbid_restart(format_args!(
            "another process has sent it signal {signal}"
        ));
    }
}

/// Raises a SIGSYS of another origin with the default action.
unsafe fn raise_default_sigsys() {
    let default = SignalAction { handler: libc::SIG_DFL, flags: 0, restorer: 0, mask: 0 };
    let sigsys = libc::SIGSYS as u64;
    // SAFETY: the action lives until the call returns; the signal arrives when this handler has
    // returned.
    unsafe {
        raw(libc::SYS_rt_sigaction, [sigsys, (&raw const default).addr() as u64, 0, 8, 0, 0]);
        let (process, thread) = (raw(libc::SYS_getpid, [0; 6]), raw(libc::SYS_gettid, [0; 6]));
        raw(libc::SYS_tgkill, [process as u64, thread as u64, sigsys, 0, 0, 0]);
    }
}

impl TrappedCall {
    fn stack_pointer(&self) -> usize {
        self.register(libc::REG_RSP)
    }

    fn register(&self, at: c_int) -> usize {
        // SAFETY: the context is the kernel's frame.
        unsafe { (*self.context).uc_mcontext.gregs[at as usize] as usize }
    }

    /// The program's signal mask at the call.
    fn mask(&self) -> u64 {
        // SAFETY: the context is the kernel's frame, whose signal set has eight bytes.
        unsafe { (&raw const (*self.context).uc_sigmask).cast::<u64>().read() }
    }

    /// Handles the call. `None`: the kernel performs the call at its stub.
    ///
    /// # Safety
    /// The registers are those of a system call of this thread.
    unsafe fn handle(&mut self) -> Option<i64> {
        let [first, second, third, fourth, ..] = self.arguments;
        // SAFETY: the program's pointers are as valid as they are for the kernel; an invalid
        // pointer ends the program.
        unsafe {
            match self.number {
                libc::SYS_rt_sigprocmask => self.change_mask(first as c_int, second, third, fourth),
                libc::SYS_rt_sigaction => self.set_action(first as c_int, second, third, fourth),
                libc::SYS_rt_sigsuspend => {
                    clear_sigsys(first);
                    None
                }
                libc::SYS_ppoll => {
                    clear_sigsys(fourth);
                    self.handle_file_call(self.number)
                }
                libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => {
                    clear_sigsys(self.arguments[4]);
                    self.handle_file_call(self.number)
                }
                // The last argument is a pair of mask and length.
                libc::SYS_pselect6 => {
                    let pair = self.arguments[5] as *const u64;
                    clear_sigsys(if pair.is_null() { 0 } else { pair.read_unaligned() });
                    self.handle_file_call(self.number)
                }
                libc::SYS_sigaltstack if record_head::is_owner() => {
                    Some(self.set_stack(first, second))
                }
                libc::SYS_sigaltstack => self.widen_stack(first, second),
                number => self.handle_file_call(number),
            }
        }
    }

    /// Handles calls that use files or communicate with other processes.
    ///
    /// # Safety
    /// The registers are those of a system call of this thread.
    unsafe fn handle_file_call(&mut self, number: c_long) -> Option<i64> {
        // SAFETY: the caller's promise.
        unsafe {
            let instruction = self.register(libc::REG_RIP);
            raw_channels::check(number, self.arguments, instruction, self.stack_pointer());
            unsaved_attributes::note(number, self.arguments);
            match user_memory::check(number, self.arguments) {
                Readable::All => (),
                Readable::NotForKernel => return None,
                Readable::Not => return Some(-i64::from(libc::EFAULT)),
                Readable::First(count) => self.arguments[2] = count,
            }
            if let Some(refused) = process_calls::refuse(number, self.arguments) {
                return Some(refused);
            }
            let is_recorded =
                record_head::is_owner() && !record_lock::is_in_handler(self.stack_pointer());
            let result = if is_recorded {
                signal_mask::note_program_mask(self.mask());
                syscalls::handle(number, self.arguments)
            } else {
                observe::handle(number, self.arguments)
            };
            let asks = result.is_none() && process_calls::asks_for_process(number, self.arguments);
            if asks { Some(process_calls::perform(number, self.arguments)) } else { result }
        }
    }

    /// Sets the mask of the frame to which this handler returns: the program's mask without SIGSYS.
    unsafe fn change_mask(&mut self, how: c_int, set: u64, old: u64, bytes: u64) -> Option<i64> {
        if bytes != 8 {
            return None;
        }
        // SAFETY: the context is the kernel's frame, and a signal set has eight bytes.
        unsafe {
            let mask = (&raw mut (*self.context).uc_sigmask).cast::<u64>();
            let before = mask.read();
            if set != 0 {
                let set = (set as *const u64).read_unaligned();
                let wanted = match how {
                    libc::SIG_BLOCK => before | set,
                    libc::SIG_UNBLOCK => before & !set,
                    libc::SIG_SETMASK => set,
                    _ => return Some(-i64::from(libc::EINVAL)),
                };
                mask.write(wanted & !SIGSYS_BIT);
            }
            if old != 0 {
                (old as *mut u64).write_unaligned(before);
            }
        }
        Some(0)
    }

    /// Installs [`on_signal`] for a handler of the program, with the program's mask without SIGSYS.
    unsafe fn set_action(&self, signal: c_int, new: u64, old: u64, bytes: u64) -> Option<i64> {
        let handlers = usize::try_from(signal).ok().and_then(|signal| HANDLERS.get(signal))?;
        if bytes != 8 {
            return None;
        }
        let (handler, flags) = (handlers.0.load(Relaxed), handlers.1.load(Relaxed));
        let mut before = SignalAction { handler: libc::SIG_DFL, flags: 0, restorer: 0, mask: 0 };
        let place = (&raw mut before).addr() as u64;
        // SAFETY: the kernel reads and writes exactly these structures.
        unsafe {
            // The program sees the default action for SIGSYS.
            if signal != libc::SIGSYS {
                let mut action = (new != 0).then(|| (new as *const SignalAction).read_unaligned());
                if let Some(action) = &mut action {
                    action.mask &= !SIGSYS_BIT;
                    if !matches!(action.handler, libc::SIG_DFL | libc::SIG_IGN) {
                        handlers.0.store(action.handler, Relaxed);
                        handlers.1.store(action.flags, Relaxed);
                        action.handler = on_signal as *const () as usize;
                        action.flags |= libc::SA_SIGINFO as u64;
                    }
                }
                let action = action.as_ref().map_or(0, |action| (&raw const *action).addr() as u64);
                let result =
                    raw(libc::SYS_rt_sigaction, [signal as u64, action, place, bytes, 0, 0]);
                if result != 0 {
                    handlers.0.store(handler, Relaxed);
                    handlers.1.store(flags, Relaxed);
                    return Some(result);
                }
            }
            if before.handler == on_signal as *const () as usize {
                (before.handler, before.flags) = (handler, flags);
            }
            if old != 0 {
                (old as *mut SignalAction).write_unaligned(before);
            }
        }
        Some(0)
    }

    /// Replaces a signal stack that another thread sets. This handler runs on the same stack and
    /// needs more than programs ask for (Rust's runtime: 8 KiB). The return from this handler sets
    /// the stack that the frame names (sigreturn(2)).
    unsafe fn widen_stack(&self, new: u64, old: u64) -> Option<i64> {
        // SAFETY: the kernel's frame and the program's structures; the memory is newly mapped, or
        // this function has mapped it.
        unsafe {
            let frame = &mut (*self.context).uc_stack;
            let before = *frame;
            if new != 0 {
                let wanted = (new as *const libc::stack_t).read_unaligned();
                let is_off = wanted.ss_flags & libc::SS_DISABLE != 0;
                *frame = wanted;
                if !is_off && wanted.ss_size < WIDE_STACK_BYTES {
                    let Some(wide) = new_wide_stack() else {
                        *frame = before;
                        return Some(-i64::from(libc::ENOMEM));
                    };
                    (frame.ss_sp, frame.ss_size) = (wide, WIDE_STACK_BYTES);
                }
                let has_own = before.ss_flags & libc::SS_DISABLE == 0;
                if has_own && before.ss_size == WIDE_STACK_BYTES {
                    let place = before.ss_sp as u64;
                    self.unmap_later(place);
                }
            }
            if old != 0 {
                (old as *mut libc::stack_t).write_unaligned(before);
            }
        }
        Some(0)
    }

    /// Unmaps an unused signal stack when the next one is dropped, because this handler may be
    /// running on the stack.
    unsafe fn unmap_later(&self, stack: u64) {
        static DROPPED: AtomicU64 = AtomicU64::new(0);
        let earlier = DROPPED.swap(stack, Relaxed);
        if earlier != 0 && earlier != stack {
            // SAFETY: `widen_stack` has mapped the stack, and its thread has left the stack.
            unsafe { raw(libc::SYS_munmap, [earlier, WIDE_STACK_BYTES as u64, 0, 0, 0, 0]) };
        }
    }

    /// Notes the signal stack that the program sets. The program's handlers run on [`STACK`],
    /// whatever the size of the stack that the program sets.
    unsafe fn set_stack(&self, new: u64, old: u64) -> i64 {
        // SAFETY: the kernel would read and write exactly these structures.
        unsafe {
            let believed = (*EMULATED_STACK.0.get()).assume_init_mut();
            let before = *believed;
            if new != 0 {
                *believed = (new as *const libc::stack_t).read_unaligned();
            }
            if old != 0 {
                (old as *mut libc::stack_t).write_unaligned(before);
            }
        }
        0
    }
}

const _: () = assert!(offset_of!(SignalAction, mask) == 24 && size_of::<SignalAction>() == 32);

#[cfg(test)]
mod tests;
