//! The functions that programs find in this library instead of in the C library. Each function
//! passes its arguments on; most functions add the address from which they were called. The
//! interface to the provider (`landbridge_interpose_…`) is here too.

use std::arch::naked_asm;
use std::ffi::{c_char, c_int};

use landbridge_proto::nondeterminism::Polls;

use crate::{
    aio, child_programs, connections, dispatch, libc_wrappers, new_processes, program_random,
    record_head, recording, side_channels, spawn_actions, temporary, watched, yield_call,
};

/// Defines functions by `name => body, register`, where `register` is that of the argument after
/// the last one, on x86-64 and on ARM.
macro_rules! interpose_with_caller {
    ($clear:ident; $($name:ident => $body:path, $x86:literal, $arm:literal;)*) => {$(
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name() {
            naked_asm!(
                // Without this nothing above is found by who unwinds the stack.
                ".cfi_startproc",
                concat!("mov ", $x86, ", [rsp]"),
                "sub rsp, 8",
                ".cfi_adjust_cfa_offset 8",
                "call {body}",
                "add rsp, 8",
                ".cfi_adjust_cfa_offset -8",
                "jmp {clear}",
                ".cfi_endproc",
                body = sym $body,
                clear = sym $clear
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name() {
            naked_asm!(concat!("mov ", $arm, ", x30"), "b {body}", body = sym $body)
        }
    )*};
}

/// Defines a function that overwrites so many bytes of the stack that a body has left, and the
/// registers, and returns to the program. A call of the system leaves other bytes than an answer
/// from the record; programs send bytes of the stack in fields that they have never set, and the
/// dynamic linker saves registers there.
macro_rules! clear_and_return {
    ($name:ident, $bytes:literal) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        extern "C" fn $name() {
            naked_asm!(
                "pxor xmm0, xmm0",
                "pxor xmm1, xmm1",
                "pxor xmm2, xmm2",
                "pxor xmm3, xmm3",
                "pxor xmm4, xmm4",
                "pxor xmm5, xmm5",
                "pxor xmm6, xmm6",
                "pxor xmm7, xmm7",
                "pxor xmm8, xmm8",
                "pxor xmm9, xmm9",
                "pxor xmm10, xmm10",
                "pxor xmm11, xmm11",
                "pxor xmm12, xmm12",
                "pxor xmm13, xmm13",
                "pxor xmm14, xmm14",
                "pxor xmm15, xmm15",
                // The stack below the return address of the body.
                concat!("lea rcx, [rsp - 8 - ", $bytes, "]"),
                "lea rdx, [rsp - 8]",
                "2: movaps [rcx], xmm1",
                "movaps [rcx + 16], xmm1",
                "movaps [rcx + 32], xmm1",
                "movaps [rcx + 48], xmm1",
                "add rcx, 64",
                "cmp rcx,rdx",
                "jb 2b",
                "xor ecx,ecx",
                "xor edx,edx",
                "xor esi,esi",
                "xor edi,edi",
                "xor r8d, r8d",
                "xor r9d, r9d",
                "xor r10d, r10d",
                "xor r11d, r11d",
                "ret"
            )
        }
    };
}

// What a reading of a clock uses, several times; and calls that work with files and sockets.
clear_and_return!(clear_little_and_return, 1024);
clear_and_return!(clear_much_and_return, 4096);

interpose_with_caller! {
    clear_little_and_return;
    clock_gettime => libc_wrappers::clock_gettime, "rdx", "x2";
    gettimeofday => libc_wrappers::gettimeofday, "rdx", "x2";
    timespec_get => libc_wrappers::timespec_get, "rdx", "x2";
    time => libc_wrappers::time, "rsi", "x1";
    clock => libc_wrappers::clock, "rdi", "x0";
}

interpose_with_caller! {
    clear_much_and_return;
    getrandom => libc_wrappers::getrandom, "rcx", "x3";
    getentropy => libc_wrappers::getentropy, "rdx", "x2";
    arc4random => libc_wrappers::arc4random, "rdi", "x0";
    arc4random_buf => libc_wrappers::arc4random_buf, "rdx", "x2";
    arc4random_uniform => libc_wrappers::arc4random_uniform, "rsi", "x1";
    // `std::random_device::_M_getval()` of libstdc++, which reads the processor's own generator.
    _ZNSt13random_device9_M_getvalEv => libc_wrappers::random_device, "rsi", "x1";
    mkstemp => temporary::mkstemp, "rsi", "x1";
    mkstemp64 => temporary::mkstemp, "rsi", "x1";
    mkostemp => temporary::mkostemp, "rdx", "x2";
    mkostemp64 => temporary::mkostemp, "rdx", "x2";
    mkstemps => temporary::mkstemps, "rdx", "x2";
    mkstemps64 => temporary::mkstemps, "rdx", "x2";
    mkostemps => temporary::mkostemps, "rcx", "x3";
    mkostemps64 => temporary::mkostemps, "rcx", "x3";
    mkdtemp => temporary::mkdtemp, "rsi", "x1";
    pthread_create => new_processes::pthread_create, "r8", "x4";
    connect => connections::connect, "rcx", "x3";
    bind => side_channels::bind, "rcx", "x3";
    listen => side_channels::listen, "rdx", "x2";
    sendmsg => side_channels::sendmsg, "rcx", "x3";
    sendmmsg => side_channels::sendmmsg, "r8", "x4";
    shmat => side_channels::shmat, "rcx", "x3";
    semget => side_channels::semget, "rcx", "x3";
    msgget => side_channels::msgget, "rdx", "x2";
    shmget => side_channels::shmget, "rcx", "x3";
    shmctl => side_channels::shmctl, "rcx", "x3";
    semop => side_channels::semop, "rcx", "x3";
    semtimedop => side_channels::semtimedop, "r8", "x4";
    semctl => side_channels::semctl, "r8", "x4";
    msgsnd => side_channels::msgsnd, "r8", "x4";
    msgrcv => side_channels::msgrcv, "r9", "x5";
    msgctl => side_channels::msgctl, "rcx", "x3";
    mq_open => side_channels::mq_open, "r8", "x4";
}

/// Replaces `sendto`, whose arguments take all six registers: the address of the call goes on the
/// stack.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
extern "C" fn sendto() {
    naked_asm!(
        ".cfi_startproc",
        "mov rax, [rsp]",
        "push rax",
        ".cfi_adjust_cfa_offset 8",
        "call {body}",
        "add rsp, 8",
        ".cfi_adjust_cfa_offset -8",
        "jmp {clear}",
        ".cfi_endproc",
        body = sym side_channels::sendto,
        clear = sym clear_much_and_return
    )
}

/// Defines functions of any number of arguments by `name => notice`. `notice` gets the address of
/// the call and returns the address of the C library's function, which then gets all arguments: the
/// registers of numbers, pointers and floating point, and the stack.
macro_rules! interpose_with_any_arguments {
    ($($name:ident => $notice:path;)*) => {$(
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name() {
            naked_asm!(
                "sub rsp, 184",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov [rsp + 24], rcx",
                "mov [rsp + 32], r8",
                "mov [rsp + 40], r9",
                "mov [rsp + 48], rax",
                "movups [rsp + 56], xmm0",
                "movups [rsp + 72], xmm1",
                "movups [rsp + 88], xmm2",
                "movups [rsp + 104], xmm3",
                "movups [rsp + 120], xmm4",
                "movups [rsp + 136], xmm5",
                "movups [rsp + 152], xmm6",
                "movups [rsp + 168], xmm7",
                "mov rdi, [rsp + 184]",
                "call {notice}",
                "mov r11, rax",
                "mov rdi, [rsp]",
                "mov rsi, [rsp + 8]",
                "mov rdx, [rsp + 16]",
                "mov rcx, [rsp + 24]",
                "mov r8, [rsp + 32]",
                "mov r9, [rsp + 40]",
                "mov rax, [rsp + 48]",
                "movups xmm0, [rsp + 56]",
                "movups xmm1, [rsp + 72]",
                "movups xmm2, [rsp + 88]",
                "movups xmm3, [rsp + 104]",
                "movups xmm4, [rsp + 120]",
                "movups xmm5, [rsp + 136]",
                "movups xmm6, [rsp + 152]",
                "movups xmm7, [rsp + 168]",
                "add rsp, 184",
                "jmp r11",
                notice = sym $notice
            )
        }
    )*};
}

interpose_with_any_arguments! {
    syslog => side_channels::syslog;
    vsyslog => side_channels::vsyslog;
    __syslog_chk => side_channels::checked_syslog;
    __vsyslog_chk => side_channels::checked_vsyslog;
}

/// Defines functions by `name => body`, for bodies that need only their own arguments.
macro_rules! interpose {
    ($($name:ident => $body:path;)*) => {$(
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name() {
            naked_asm!("jmp {body}", body = sym $body)
        }
    )*};
}

interpose! {
    aio_read => aio::aio_read;
    aio_read64 => aio::aio_read;
    aio_write => aio::aio_write;
    aio_write64 => aio::aio_write;
    aio_fsync => aio::aio_fsync;
    aio_fsync64 => aio::aio_fsync;
    lio_listio => aio::lio_listio;
    lio_listio64 => aio::lio_listio;
    sched_yield => yield_call::sched_yield;
    posix_spawn => child_programs::posix_spawn;
    posix_spawnp => child_programs::posix_spawnp;
    posix_spawn_file_actions_addopen => spawn_actions::add_open;
    posix_spawn_file_actions_addchdir_np => spawn_actions::add_directory;
    posix_spawn_file_actions_addchdir => spawn_actions::add_directory;
    posix_spawn_file_actions_addfchdir_np => spawn_actions::add_open_directory;
    posix_spawn_file_actions_addfchdir => spawn_actions::add_open_directory;
    posix_spawn_file_actions_init => spawn_actions::init;
    posix_spawn_file_actions_destroy => spawn_actions::destroy;
}

/// Runs when the program is loaded, before the constructors of every other library (`build.rs`),
/// also before that of the C library, which sets the environment.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: unsafe extern "C" fn(c_int, Strings, Strings) = {
    unsafe extern "C" fn at_load(_: c_int, _: Strings, environment: Strings) {
        unsafe extern "C" {
            static mut environ: Strings;
        }
        // SAFETY: the only thread sets the variable to the value that the C library will give it.
        unsafe {
            if environ.is_null() {
                environ = environment;
            }
        }
        recording::initialize();
        // SAFETY: this is the first constructor, and there is one thread.
        unsafe { program_random::begin_program() };
    }
    at_load
};

/// Arguments or environment, as the loader passes them.
type Strings = *const *const c_char;

/// Interface to the provider: address of the counters of polls; null if this process is not
/// recorded.
#[unsafe(no_mangle)]
extern "C" fn landbridge_interpose_polls() -> *const Polls {
    record_head::polls().map_or(std::ptr::null(), |polls| polls)
}

/// Interface to the provider: whether this process is a child of a recorded process. 0: it is not.
#[unsafe(no_mangle)]
extern "C" fn landbridge_interpose_is_child() -> c_int {
    c_int::from(watched::is_child())
}

/// Interface to the provider: whether the calls of this thread are recorded. 0: they are not.
#[unsafe(no_mangle)]
extern "C" fn landbridge_interpose_is_recorded_thread() -> c_int {
    c_int::from(record_head::is_owner())
}

/// Interface to the provider: the process has repeated every poll of earlier incarnations. 0: ask
/// again at the next poll.
#[unsafe(no_mangle)]
extern "C" fn landbridge_interpose_confirm_live() -> c_int {
    c_int::from(recording::confirm_live())
}

/// Interface to the provider: unmaps the record while a checkpoint of this process is taken. 0:
/// this process has no record.
#[unsafe(no_mangle)]
extern "C" fn landbridge_interpose_quiesce() -> c_int {
    c_int::from(recording::quiesce())
}

/// Interface to the provider: address of the byte that is 0 while the system calls of this thread
/// are let through; null if they always are.
#[unsafe(no_mangle)]
extern "C" fn landbridge_interpose_selector() -> *mut u8 {
    dispatch::selector()
}

/// Interface to the provider: maps the record again after a checkpoint. 0: that failed, and the
/// process must end. 2: the descriptor must stay open.
#[unsafe(no_mangle)]
extern "C" fn landbridge_interpose_resume(descriptor: c_int, incarnation: u64) -> c_int {
    recording::resume(descriptor, incarnation) as c_int
}
