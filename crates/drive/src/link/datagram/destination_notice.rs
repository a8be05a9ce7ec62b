//! The kernel's reports about destinations: errors of sending, and ICMP messages from the error
//! queue.

use std::collections::VecDeque;
use std::io;
use std::mem::{self, MaybeUninit};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd};

/// The most notices that wait to be taken. Equal notices are kept only once; a caller could not use
/// more than these.
const NOTICES_MAX: usize = 64;
/// The most messages read from the error queue at once, so that a flood of messages cannot delay
/// this process.
const MESSAGES_MAX: usize = 64;

/// A notice about a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DestinationNotice {
    /// The destination.
    pub to: SocketAddr,
    /// The problem.
    pub error: DestinationError,
}

/// A problem of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationError {
    /// Nobody listens there, no route leads there, or a filter forbids sending, according to the
    /// error number `code`. Datagrams may still get through, so this is a reason to probe.
    Unreachable {
        /// The error number, as in errno(3).
        code: i32,
    },
    /// A datagram was larger than the path to the destination carries.
    TooLarge {
        /// The size in bytes of the datagram that this host refused; 0 if a router refused one.
        size: usize,
        /// The largest packet in bytes, IP header included, if known.
        mtu: Option<u32>,
    },
    /// A queue of this host was full, and datagrams were dropped: the sender should send less.
    QueueFull,
}

/// The notices, the oldest first.
#[derive(Default)]
pub(super) struct DestinationNotices(VecDeque<DestinationNotice>);

impl DestinationNotices {
    pub(super) fn add(&mut self, to: SocketAddr, destination_error: DestinationError) {
        let notice = DestinationNotice { to, error: destination_error };
        if self.0.len() < NOTICES_MAX && !self.0.contains(&notice) {
            self.0.push_back(notice);
        }
    }

    pub(super) fn take(&mut self) -> impl Iterator<Item = DestinationNotice> + '_ {
        self.0.drain(..)
    }

    /// Reads the error queue. Returns the MTU that the queue names for what this host itself just
    /// refused to send.
    ///
    /// # Errors
    /// If the socket cannot be used any more.
    pub(super) fn collect(&mut self, socket: impl AsFd) -> io::Result<Option<u32>> {
        let mut mtu = None;
        for _ in 0..MESSAGES_MAX {
            let Some(message) = next_message(&socket)? else { break };
            let code = message.error.ee_errno as i32;
            match (message.error.ee_origin, message.to) {
                // The address in this message lacks the port. The call that was refused knows the
                // destination.
                (libc::SO_EE_ORIGIN_LOCAL, _) => mtu = known_mtu(&message.error).or(mtu),
                (libc::SO_EE_ORIGIN_ICMP | libc::SO_EE_ORIGIN_ICMP6, Some(to)) => {
                    let is_too_large = code == libc::EMSGSIZE;
                    let mtu = known_mtu(&message.error);
                    let too_large = DestinationError::TooLarge { size: 0, mtu };
                    self.add(
                        to,
                        if is_too_large {
                            too_large
                        } else {
                            DestinationError::Unreachable { code }
                        },
                    );
                }
                _ => (),
            }
        }
        Ok(mtu)
    }
}

fn known_mtu(error: &libc::sock_extended_err) -> Option<u32> {
    (error.ee_errno as i32 == libc::EMSGSIZE && error.ee_info > 0).then_some(error.ee_info)
}

/// The problem of a destination that an error of sending a datagram of `size` bytes shows.
pub(super) fn destination_error(
    error: &io::Error,
    size: usize,
    mtu: Option<u32>,
) -> DestinationError {
    match error.raw_os_error() {
        Some(libc::EMSGSIZE) => DestinationError::TooLarge { size, mtu },
        Some(libc::ENOBUFS | libc::ENOMEM) => DestinationError::QueueFull,
        code => DestinationError::Unreachable { code: code.unwrap_or(libc::EIO) },
    }
}

/// Whether the error concerns the socket, and not a destination.
pub(super) fn is_fatal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBADF | libc::ENOTSOCK | libc::EFAULT))
}

/// A message of the error queue.
struct ErrorQueueMessage {
    error: libc::sock_extended_err,
    /// The destination of the datagram.
    to: Option<SocketAddr>,
}

/// The next message of the error queue, if there is one.
fn next_message(socket: impl AsFd) -> io::Result<Option<ErrorQueueMessage>> {
    /// Space for one error with its address, aligned as the kernel demands.
    #[repr(C, align(8))]
    struct Control([u8; 256]);

    let mut name = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let mut control = Control([0; 256]);
    // SAFETY: an all-zero msghdr is a valid one.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_name = name.as_mut_ptr().cast();
    header.msg_namelen = size_of::<libc::sockaddr_storage>() as u32;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = size_of::<Control>();
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the header describes memory of this function, which outlives the call.
    if unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &mut header, flags) } < 0 {
        let error = io::Error::last_os_error();
        return if is_fatal(&error) { Err(error) } else { Ok(None) };
    }
    // SAFETY: the kernel has filled in the header, and the memory that it points to still exists.
    let error = unsafe { extended_error(&header) };
    // SAFETY: all zeroes are a valid address storage, as is whatever the kernel wrote.
    let to = address(&unsafe { name.assume_init() });
    let nothing = libc::sock_extended_err {
        ee_errno: 0,
        ee_origin: libc::SO_EE_ORIGIN_NONE,
        ee_type: 0,
        ee_code: 0,
        ee_pad: 0,
        ee_info: 0,
        ee_data: 0,
    };
    Ok(Some(ErrorQueueMessage { error: error.unwrap_or(nothing), to }))
}

/// The extended error in the control messages.
///
/// # Safety
/// The kernel has filled in `header`.
unsafe fn extended_error(header: &libc::msghdr) -> Option<libc::sock_extended_err> {
    // SAFETY: the control messages come from the kernel, so each is whole; the error need not be
    // aligned.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(header);
        while !at.is_null() {
            let kind = ((*at).cmsg_level, (*at).cmsg_type);
            let wanted = [(libc::SOL_IP, libc::IP_RECVERR), (libc::SOL_IPV6, libc::IPV6_RECVERR)];
            if wanted.contains(&kind) {
                return Some(
                    libc::CMSG_DATA(at).cast::<libc::sock_extended_err>().read_unaligned(),
                );
            }
            at = libc::CMSG_NXTHDR(header, at);
        }
    }
    None
}

fn address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let base = std::ptr::from_ref(storage);
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family selects this type, and the storage is large enough and aligned for
            // every address.
            let found = unsafe { &*base.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(found.sin_addr.s_addr));
            Some((ip, u16::from_be(found.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family selects this type, and the storage is large enough and aligned for
            // every address.
            let found = unsafe { &*base.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(found.sin6_addr.s6_addr);
            let port = u16::from_be(found.sin6_port);
            Some(SocketAddrV6::new(ip, port, found.sin6_flowinfo, found.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// Sets a socket option that takes an int.
///
/// # Errors
/// The errors of setsockopt(2).
pub(super) fn set_option(socket: impl AsFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    let size = size_of::<i32>() as u32;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the option takes an int, and `value` outlives the call.
    match unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), size) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
