//! Tests of the handler of system calls, on dispatched threads of this process.

use super::*;
use crate::dispatch::{PR_SET_SYSCALL_USER_DISPATCH, rearm};
use crate::processes;

/// Dispatches the calls of this thread, in a process that may not have the handler yet.
fn observe_this_thread() -> bool {
    install_handler() && dispatch::observe_this_thread()
}

#[test]
fn calls_of_a_dispatched_thread_come_here_and_work_as_ever() {
    let thread = std::thread::spawn(|| {
        if !observe_this_thread() {
            eprintln!("skipped: this kernel has no syscall user dispatch");
            return;
        }
        let before = TRAPS[0].load(Relaxed);
        // SAFETY: plain system calls on structures of this test.
        unsafe {
            assert_eq!(libc::getppid(), libc::syscall(libc::SYS_getppid) as i32);
            // A thread that blocks every signal can still make calls.
            let (mut all, mut was) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut all);
            assert_eq!(libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut was), 0);
            assert!(libc::getppid() > 0);
            assert_eq!(libc::pthread_sigmask(libc::SIG_SETMASK, &was, &mut all), 0);
            assert_eq!(libc::sigismember(&all, libc::SIGUSR1), 1);
            assert_eq!(libc::sigismember(&all, libc::SIGSYS), 0);
            assert_eq!(libc::open(c"/no/such".as_ptr(), libc::O_RDONLY), -1);
            assert_eq!(*libc::__errno_location(), libc::ENOENT);
        }
        // A dispatched thread can start a child, and sees the child end.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        assert!(child.wait().unwrap().success());
        assert!(TRAPS[0].load(Relaxed) > before + 5);
    });
    thread.join().unwrap();
}

#[test]
fn handlers_of_signals_are_what_the_program_believes() {
    static SEEN: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn one(signal: c_int) {
        SEEN.store(signal as usize, Relaxed);
    }
    let thread = std::thread::spawn(|| {
        if !observe_this_thread() {
            return;
        }
        let signal = libc::SIGWINCH;
        // SAFETY: structures for which all zeros are a valid value, and a handler.
        unsafe {
            let (mut new, mut old): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
            new.sa_sigaction = one as *const () as usize;
            new.sa_flags = libc::SA_RESTART;
            assert_eq!(libc::sigaction(signal, &new, &mut old), 0);
            assert_eq!(old.sa_sigaction, libc::SIG_DFL);
            assert_eq!(libc::sigaction(signal, std::ptr::null(), &mut old), 0);
            assert_eq!(old.sa_sigaction, one as *const () as usize);
            assert_eq!(old.sa_flags & (libc::SA_SIGINFO | libc::SA_RESTART), libc::SA_RESTART);
            assert_eq!(libc::raise(signal), 0);
            assert_eq!(SEEN.load(Relaxed), signal as usize);
            assert_eq!(libc::signal(signal, libc::SIG_DFL), one as *const () as usize);
            assert_eq!(libc::signal(signal, libc::SIG_IGN), libc::SIG_DFL);
            assert_eq!(libc::signal(signal, libc::SIG_DFL), libc::SIG_IGN);
            assert_eq!(libc::sigaction(libc::SIGKILL, &new, &mut old), -1);
        }
    });
    thread.join().unwrap();
}

#[test]
fn a_thread_whose_dispatch_is_gone_begins_again_on_demand() {
    use std::sync::mpsc::channel;
    let ((ready, is_ready), (go_on, may_go_on)) = (channel(), channel());
    let thread = std::thread::spawn(move || {
        if !observe_this_thread() {
            return ready.send(None).unwrap();
        }
        // SAFETY: the call changes only how the kernel treats calls of this thread.
        unsafe { raw(libc::SYS_prctl, [PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0, 0]) };
        ready.send(Some(unsafe { raw(libc::SYS_gettid, [0; 6]) })).unwrap();
        may_go_on.recv().unwrap();
        let before = TRAPS[0].load(Relaxed);
        // SAFETY: a call without arguments.
        unsafe { libc::getppid() };
        assert!(TRAPS[0].load(Relaxed) > before);
    });
    if let Some(thread_id) = is_ready.recv().unwrap() {
        let mut found = false;
        processes::each_other_thread(|process, other| {
            if other == thread_id as u64 {
                found = true;
                rearm(process, other);
            }
        });
        assert!(found);
        go_on.send(()).unwrap();
    }
    thread.join().unwrap();
}

/// A call of a 32-bit program would otherwise be taken for another one: number 20 is `getpid` there
/// and `writev` here.
#[test]
fn calls_of_32_bit_programs_fail() {
    assert!(is_native(0xc000_003e, libc::SYS_read) && is_native(0xc000_003e, -1));
    assert!(!is_native(0x4000_0003, 20) && !is_native(0xc000_003e, 0x4000_0000 | 20));
    if !install_handler() {
        return;
    }
    // SAFETY: the child makes system calls only, then ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let mut result: i64 = 20;
            if dispatch::observe_this_thread() {
                std::arch::asm!("int 0x80", inout("rax") result, out("r8") _, out("r9") _,
                    out("r10") _, out("r11") _);
            } else {
                result = -i64::from(libc::ENOSYS);
            }
            libc::_exit(c_int::from(result as i32 != -libc::ENOSYS));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        // A kernel without 32-bit programs ends the child.
        let is_killed = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV;
        assert!(status == 0 || is_killed, "{status:#x}");
    }
}

/// The kernel ignores the upper half of a call's number. A mask with SIGSYS that came to the kernel
/// would end the child at its next call.
#[test]
fn a_call_is_known_by_the_lower_half_of_its_number() {
    if !install_handler() {
        return;
    }
    // SAFETY: the child makes system calls only, then ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let is_observed = dispatch::observe_this_thread();
            let (set, how) = (SIGSYS_BIT, libc::SIG_BLOCK);
            let number = 1 << 32 | libc::SYS_rt_sigprocmask;
            let result = libc::syscall(number, how, &raw const set, 0_usize, 8_usize);
            libc::getppid();
            libc::_exit(c_int::from(is_observed && result != 0));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        assert_eq!(status, 0);
    }
}
