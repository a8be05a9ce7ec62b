//! System calls on sockets and System V objects that the program makes without the C library's
//! functions: by `syscall(2)`, or by code of its own.
//!
//! In: a system call with the address of its instruction and the stack pointer, from `trap`. Out:
//! one report that the rank cannot be restarted (`side_channels`). The C library's functions are
//! replaced (`exports`), so a call that one of them makes is not reported here.
//!
//! What may never happen: this module waits for a lock of the loader.

use libc::{c_long, mmsghdr};

use crate::side_channels::{
    self, any_is_for_others, is_end, is_for_others, is_of_others, reaches_others,
};
use crate::{caller, watched};

/// Longest distance in bytes between the beginning of the C library's `syscall` and the end of its
/// instruction.
const SYSCALL_BYTES: usize = 64;

/// Reports a system call by which the program communicates, if it makes the call itself.
/// `instruction` is the address after the call's instruction.
///
/// # Safety
/// The arguments are those of a system call of this thread.
pub unsafe fn check(number: c_long, arguments: [u64; 6], instruction: usize, stack_pointer: usize) {
    // SAFETY: the caller's promise.
    let Some(what) = (unsafe { channel(number, arguments) }) else { return };
    // SAFETY: the caller's promise.
    let site = unsafe { call_site(instruction, stack_pointer) };
    if caller::is_known_network_call(site) || !watched::is_watched() {
        return;
    }
    if caller::is_program_in_maps(site) {
        side_channels::report(what);
    } else {
        caller::remember_network_call(site);
    }
}

/// The channel that a system call uses. `None`: the call communicates with no other process, or by
/// a socket for which an earlier call was reported.
///
/// # Safety
/// The arguments are those of a system call.
unsafe fn channel(number: c_long, arguments: [u64; 6]) -> Option<&'static str> {
    let [_, second, third, _, fifth, _] = arguments;
    let is_reported = |is_it: bool, what| is_it.then_some(what);
    // SAFETY: the caller's promise.
    unsafe {
        match number {
            libc::SYS_connect => {
                let address = second as *const _;
                let is_made = !is_end(address) && is_of_others(address);
                is_reported(is_made, side_channels::CONNECTS)
            }
            libc::SYS_bind => is_reported(is_of_others(second as *const _), side_channels::BINDS),
            libc::SYS_sendto => {
                is_reported(reaches_others(fifth as *const _), side_channels::SENDS)
            }
            libc::SYS_sendmsg => {
                is_reported(is_for_others(second as *const _), side_channels::SENDS)
            }
            libc::SYS_sendmmsg => {
                let is_sent = any_is_for_others(second as *const mmsghdr, third as u32);
                is_reported(is_sent, side_channels::SENDS)
            }
            libc::SYS_listen => Some(side_channels::LISTENS),
            libc::SYS_shmat => Some(side_channels::SHARES_MEMORY),
            libc::SYS_semget => Some(side_channels::SEMAPHORES),
            libc::SYS_msgget => Some(side_channels::MESSAGE_QUEUE),
            libc::SYS_shmget | libc::SYS_shmctl => Some(side_channels::SHARED_MEMORY),
            libc::SYS_semop | libc::SYS_semtimedop | libc::SYS_semctl => {
                Some(side_channels::SEMAPHORE)
            }
            libc::SYS_msgsnd | libc::SYS_msgrcv | libc::SYS_msgctl => Some(side_channels::MESSAGE),
            libc::SYS_mq_open => Some(side_channels::NAMED_QUEUE),
            _ => None,
        }
    }
}

/// Address of the code that makes a system call: of the instruction, or of the call of the C
/// library's `syscall`, which has only its return address on the stack.
///
/// # Safety
/// The stack pointer is that of the system call.
unsafe fn call_site(instruction: usize, stack_pointer: usize) -> usize {
    let function = libc::syscall as *const () as usize;
    if instruction.wrapping_sub(function) > SYSCALL_BYTES {
        return instruction;
    }
    // SAFETY: the caller's promise.
    unsafe { (stack_pointer as *const usize).read() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_to_other_processes_are_named_and_no_others() {
        let address = |family: libc::c_int| {
            // SAFETY: all zeros are a valid address.
            let mut address: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
            address.ss_family = family as libc::sa_family_t;
            address
        };
        let place = |it: &libc::sockaddr_storage| (&raw const *it).addr() as u64;
        let named = |number, arguments: [u64; 6]| {
            // SAFETY: the pointers are null or those of structures of this test.
            unsafe { channel(number, arguments) }
        };
        for family in [libc::AF_INET, libc::AF_INET6, libc::AF_UNIX, libc::AF_VSOCK] {
            let address = address(family);
            let it = place(&address);
            assert_eq!(named(libc::SYS_connect, [3, it, 0, 0, 0, 0]), Some("it connects a socket"));
            assert_eq!(named(libc::SYS_bind, [3, it, 0, 0, 0, 0]), Some("it binds a socket"));
            assert_eq!(named(libc::SYS_sendto, [3, 0, 0, 0, it, 0]), Some("it sends by a socket"));
            // SAFETY: all zeros are valid messages.
            let mut messages: [mmsghdr; 2] = unsafe { std::mem::zeroed() };
            let one = messages.as_ptr().addr() as u64;
            assert_eq!(named(libc::SYS_sendmsg, [3, one, 0, 0, 0, 0]), None, "a connected socket");
            messages[1].msg_hdr.msg_name = (&raw const address).cast_mut().cast();
            let many = messages.as_ptr().addr() as u64;
            let second = many + size_of::<mmsghdr>() as u64;
            let sends = Some("it sends by a socket");
            assert_eq!(named(libc::SYS_sendmsg, [3, second, 0, 0, 0, 0]), sends);
            assert_eq!(named(libc::SYS_sendmmsg, [3, many, 1, 0, 0, 0]), None);
            assert_eq!(named(libc::SYS_sendmmsg, [3, many, 2, 0, 0, 0]), sends);
        }
        let none = address(libc::AF_UNSPEC);
        assert_eq!(named(libc::SYS_connect, [3, place(&none), 0, 0, 0, 0]), None);
        assert_eq!(
            named(libc::SYS_sendto, [3, 0, 0, 0, place(&none), 0]),
            Some("it sends by a socket")
        );
        for family in [libc::AF_NETLINK, libc::AF_ALG] {
            let address = address(family);
            for number in [libc::SYS_connect, libc::SYS_bind] {
                assert_eq!(named(number, [3, place(&address), 0, 0, 0, 0]), None);
            }
        }
        for number in [libc::SYS_socketpair, libc::SYS_pipe2, libc::SYS_sendto, libc::SYS_read] {
            assert_eq!(named(number, [0; 6]), None);
        }
        assert!(named(libc::SYS_shmat, [0; 6]).is_some());
        assert!(named(libc::SYS_semget, [0; 6]).is_some());
    }

    #[test]
    fn a_call_by_the_c_librarys_syscall_is_its_callers() {
        let stack = [4711_usize, 5];
        let top = stack.as_ptr().addr();
        let function = libc::syscall as *const () as usize;
        // SAFETY: the stack pointer is that of two words.
        unsafe {
            assert_eq!(call_site(function + 29, top), 4711);
            assert_eq!(call_site(function - 8, top), function - 8);
            assert_eq!(call_site(function + 2000, top), function + 2000);
        }
    }
}
