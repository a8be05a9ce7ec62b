//! Open files that must outlive this process: the node agent holds them
//! (`launch/src/agent/held_files.rs`).
//!
//! A lock, a file without a name, and the position after an append exist as long as some process
//! has the same open file. Before the program locks or removes a file that it has open, or appends
//! to it, the process sends the descriptor to the agent, over a Unix socket made for that one
//! message. The next incarnation asks for the descriptor back.
//!
//! Where another node may take over the rank, the agent also gets a request to make the record
//! durable there before an effect is performed ([`make_durable`]).
//!
//! What may never happen: the program continues while the agent lacks a file that a later
//! incarnation needs.

use std::mem::{MaybeUninit, size_of};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use landbridge_proto::nondeterminism::{
    DURABLE_ANSWER_SECONDS_MAX, DURABLE_SUFFIX, HELD_DROP, HELD_GET, HELD_KEEP, HELD_MAKE_DURABLE,
    HELD_WORD_BYTES, RecordHead,
};

use crate::kernel_calls::kernel;
use crate::record_head;

/// Seconds within which the agent must answer.
const ANSWER_SECONDS: i64 = 10;

/// Number of the last open file that this process has passed to the agent; in a replay the same.
static HELD: AtomicU64 = AtomicU64::new(0);
/// Bits of a number that count the files of one program.
const COUNT_BITS: u32 = 20;

/// Bytes of one descriptor's control message.
const SPACE: usize = 24;

#[repr(C, align(8))]
struct ControlMessage([u8; SPACE]);

/// Begins the numbers of a program, which stand behind those of the programs that this process
/// executed before. `place`: bytes of the record when the program begins, in every incarnation the
/// same.
pub fn begin_program(place: u64) {
    HELD.store(place << COUNT_BITS, Relaxed);
}

/// Number for the next open file that the agent is to hold.
pub fn next_number() -> u64 {
    HELD.fetch_add(1, Relaxed) + 1
}

/// Makes the agent hold this open file under this number. False: the agent cannot.
pub fn keep(descriptor: u64, number: u64) -> bool {
    record_head::head()
        .is_some_and(|head| exchange(head, HELD_KEEP, number, Some(descriptor), false).is_ok())
}

/// Makes the agent close the open file that it holds under this number.
pub fn release(number: u64) {
    let _ = record_head::head().map(|head| exchange(head, HELD_DROP, number, None, false));
}

/// A descriptor of the open file that the agent holds under this number.
pub fn get(number: u64) -> Option<u64> {
    record_head::head().and_then(|head| exchange(head, HELD_GET, number, None, true).ok()).flatten()
}

/// Waits without a time limit until another node has the record. A node that counts as lost gets no
/// answer, so it performs no effect that the rank's next incarnation performs elsewhere. An answer
/// that took more than [`DURABLE_ANSWER_SECONDS_MAX`] may be from before the loss and does not
/// count. False: no agent listens.
pub fn make_durable(head: &RecordHead) -> bool {
    loop {
        let asked = seconds();
        match exchange(head, HELD_MAKE_DURABLE, 0, None, true) {
            Ok(_) if seconds() - asked <= DURABLE_ANSWER_SECONDS_MAX => return true,
            Err(error) if error == -i64::from(libc::ECONNREFUSED) => return false,
            _ => (),
        }
    }
}

/// Seconds since the machine has booted, including suspended time.
fn seconds() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let room = (&raw mut time).addr() as u64;
    kernel(libc::SYS_clock_gettime, [libc::CLOCK_BOOTTIME as u64, room, 0, 0, 0, 0]);
    time.tv_sec
}

/// Sends a word to the agent, and waits for the answer if `is_answered`. `Err`: the error of the
/// system call if the agent did not receive the word or did not answer.
fn exchange(
    head: &RecordHead,
    what: u64,
    number: u64,
    descriptor: Option<u64>,
    is_answered: bool,
) -> Result<Option<u64>, i64> {
    let flags = (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC) as u64;
    let socket = kernel(libc::SYS_socket, [libc::AF_UNIX as u64, flags, 0, 0, 0, 0]);
    let socket = u64::try_from(socket).map_err(|_| socket)?;
    let outcome = talk(head, socket, [what, number], descriptor, is_answered);
    kernel(libc::SYS_close, [socket, 0, 0, 0, 0, 0]);
    outcome
}

fn talk(
    head: &RecordHead,
    socket: u64,
    word: [u64; 2],
    descriptor: Option<u64>,
    is_answered: bool,
) -> Result<Option<u64>, i64> {
    set_time_limit(socket, libc::SO_SNDTIMEO);
    let suffix = if word[0] == HELD_MAKE_DURABLE { DURABLE_SUFFIX } else { "" };
    let nobody = -i64::from(libc::ECONNREFUSED);
    let (mut address, length) = address(head, suffix).ok_or(nobody)?;
    let mut control = ControlMessage([0; SPACE]);
    descriptor.iter().for_each(|descriptor| control.put(*descriptor as i32));
    let sent = Message { word, control, has_control: descriptor.is_some() };
    if !is_answered {
        return sent.pass(libc::SYS_sendmsg, socket, Some((&mut address, length))).map(|_| None);
    }
    set_time_limit(socket, libc::SO_RCVTIMEO);
    let address = (&raw const address).addr() as u64;
    let connected = kernel(libc::SYS_connect, [socket, address, length, 0, 0, 0]);
    if connected != 0 {
        return Err(connected);
    }
    // The kernel chooses a unique address, to which the agent can answer. The socket is connected,
    // so no other process can answer.
    let family = libc::AF_UNIX as libc::sa_family_t;
    let own = (&raw const family).addr() as u64;
    let own_length = size_of::<libc::sa_family_t>() as u64;
    kernel(libc::SYS_bind, [socket, own, own_length, 0, 0, 0]);
    sent.pass(libc::SYS_sendmsg, socket, None)?;
    let answer = Message { word: [0; 2], control: ControlMessage([0; SPACE]), has_control: true };
    let answer = answer.pass(libc::SYS_recvmsg, socket, None)?;
    if answer.word == word { Ok(answer.control.take()) } else { Err(-i64::from(libc::EPROTO)) }
}

fn set_time_limit(socket: u64, option: i32) {
    let time = libc::timeval { tv_sec: ANSWER_SECONDS, tv_usec: 0 };
    let (time, length) = ((&raw const time).addr() as u64, size_of::<libc::timeval>() as u64);
    let level = libc::SOL_SOCKET as u64;
    kernel(libc::SYS_setsockopt, [socket, level, option as u64, time, length, 0]);
}

/// One message of one word, with a descriptor or without.
struct Message {
    word: [u64; 2],
    control: ControlMessage,
    has_control: bool,
}

impl Message {
    /// Sends the message, to this address of this length if the socket is not connected; or
    /// receives another one into it.
    fn pass(
        mut self,
        number: i64,
        socket: u64,
        to: Option<(&mut libc::sockaddr_un, u64)>,
    ) -> Result<Message, i64> {
        let base = self.word.as_mut_ptr().cast();
        let mut piece = libc::iovec { iov_base: base, iov_len: HELD_WORD_BYTES };
        // SAFETY: all zeros are an empty message.
        let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        header.msg_iov = &raw mut piece;
        header.msg_iovlen = 1;
        if let Some((address, length)) = to {
            header.msg_name = std::ptr::from_mut(address).cast();
            header.msg_namelen = length as libc::socklen_t;
        }
        if self.has_control {
            header.msg_control = self.control.0.as_mut_ptr().cast();
            header.msg_controllen = SPACE;
        }
        let flags = (libc::MSG_NOSIGNAL | libc::MSG_CMSG_CLOEXEC) as u64;
        let header = (&raw mut header).addr() as u64;
        let done = kernel(number, [socket, header, flags, 0, 0, 0]);
        match done {
            done if done == HELD_WORD_BYTES as i64 => Ok(self),
            error if error < 0 => Err(error),
            _ => Err(-i64::from(libc::EPROTO)),
        }
    }
}

/// A `struct cmsghdr` with one descriptor.
impl ControlMessage {
    const LENGTH: usize = 20;

    fn put(&mut self, descriptor: i32) {
        self.0[..8].copy_from_slice(&Self::LENGTH.to_ne_bytes());
        self.0[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
        self.0[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
        self.0[16..20].copy_from_slice(&descriptor.to_ne_bytes());
    }

    fn take(&self) -> Option<u64> {
        let number =
            |at: usize| i32::from_ne_bytes(self.0[at..at + 4].try_into().unwrap_or_default());
        let is_there = self.0[..8] == Self::LENGTH.to_ne_bytes() && number(12) == libc::SCM_RIGHTS;
        u64::try_from(number(16)).ok().filter(|_| is_there)
    }
}

/// Address of the agent's listener: a name in the abstract namespace (unix(7)) with this suffix.
fn address(head: &RecordHead, suffix: &str) -> Option<(libc::sockaddr_un, u64)> {
    let name = head.held_name()?;
    // SAFETY: all zeros are a valid address.
    let mut address: libc::sockaddr_un = unsafe { MaybeUninit::zeroed().assume_init() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let count = name.len() + suffix.len();
    let room = address.sun_path.get_mut(1..=count)?;
    let letters = name.iter().chain(suffix.as_bytes());
    room.iter_mut().zip(letters).for_each(|(to, from)| *to = *from as std::ffi::c_char);
    let length = size_of::<libc::sa_family_t>() + 1 + count;
    Some((address, length as u64))
}
