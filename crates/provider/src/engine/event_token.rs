//! Tokens of the engine's epoll set: what an event of the kernel belongs to.
//!
//! What enters: descriptors, with the part of the engine that handles their events. What leaves:
//! registrations, and tokens read back from events. What may never happen: two tokens have the same
//! number.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll;

/// The token that epoll returns with an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventToken {
    Listener,
    UnixListener,
    Hello(usize),
    Link(usize),
    /// A UDP socket.
    Datagrams(usize),
    /// The transport of a recorded process.
    Transport,
}

impl EventToken {
    pub fn number(self) -> u64 {
        match self {
            EventToken::Listener => 0,
            EventToken::UnixListener => 1,
            EventToken::Hello(id) => 2 << 32 | id as u64,
            EventToken::Link(id) => 3 << 32 | id as u64,
            EventToken::Datagrams(socket) => 4 << 32 | socket as u64,
            EventToken::Transport => 5 << 32,
        }
    }

    pub fn of(number: u64) -> EventToken {
        let id = number as u32 as usize;
        match number >> 32 {
            0 if id == 0 => EventToken::Listener,
            0 => EventToken::UnixListener,
            2 => EventToken::Hello(id),
            4 => EventToken::Datagrams(id),
            5 => EventToken::Transport,
            _ => EventToken::Link(id),
        }
    }
}

/// Watches `fd` for `interest`; replaces an earlier registration of `fd`.
pub fn watch(
    epoll: &OwnedFd,
    fd: impl AsFd,
    token: EventToken,
    interest: epoll::EventFlags,
) -> io::Result<()> {
    let data = epoll::EventData::new_u64(token.number());
    match epoll::add(epoll, fd.as_fd(), data, interest) {
        Err(rustix::io::Errno::EXIST) => epoll::modify(epoll, fd, data, interest)?,
        other => other?,
    }
    Ok(())
}
