//! Where others find this endpoint, and how it knocks at theirs: sockets and the names they go by.
//!
//! An endpoint listens on a TCP port and, where memory may be shared, on an abstract Unix socket. Nothing here waits:
//! a socket that connects is given out at once.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

use rustix::event::epoll;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};
use rustix::process::getuid;

use landbridge_drive::sys::tune_link;
use landbridge_proto::id::Address;
use landbridge_proto::wire::hello::{Introduction, Role};
use landbridge_proto::wire::name::{NAME_BYTES, Name};

use crate::log;

use super::identity::{Identity, hash, random};
use super::peers::{Token, watch};

pub type NameBytes = [u8; NAME_BYTES];

/// Connections that may wait to be accepted: a whole large node connecting at once.
const BACKLOG: i32 = 1024;

/// This endpoint, as others see it.
pub struct Own {
    pub address: Address,
    pub name: NameBytes,
    pub own_format: bool,
    tcp: Option<OwnedFd>,
    unix: Option<OwnedFd>,
    /// What it says of itself in a hello.
    pub introduction: Introduction,
    /// Peers try to read this to find out whether they may.
    _cookie: Box<u64>,
}

impl Own {
    /// Opens the doors of a new endpoint, and the epoll that watches them.
    pub fn open(
        identity: &Identity,
        own_format: bool,
        bound: Option<SocketAddrV4>,
    ) -> io::Result<(Own, OwnedFd)> {
        let epoll = high_fd(epoll::create(epoll::CreateFlags::CLOEXEC)?)?;
        let (address, unique) = identity.next_endpoint();
        let (tcp, ip, port) = open_tcp(identity, own_format, bound)?;
        let name = if own_format {
            let ip = match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            let (cluster, node) = (identity.cluster, identity.node);
            Name { address, unique, cluster, node, ip: ip.octets(), port }.emit()
        } else {
            sockaddr_name(ip, port)
        };
        let unix = identity.paths.shm.then(|| unix_name(identity, own_format, unique, port));
        let unix = unix.and_then(|name| {
            let opened = open_unix(&name);
            opened.inspect_err(|error| log!(Warn, "no shared memory: @{name}: {error}")).ok()
        });
        if let Some(tcp) = &tcp {
            watch(&epoll, tcp, Token::Listener, epoll::EventFlags::IN)?;
        }
        if let Some(unix) = &unix {
            watch(&epoll, unix, Token::UnixListener, epoll::EventFlags::IN)?;
        }
        let cookie = Box::new(u64::from_le_bytes(random()));
        let introduction = Introduction {
            role: Role::Endpoint,
            address,
            incarnation: 0,
            cluster: identity.cluster,
            pid: std::process::id(),
            eager_window: identity.eager_window(),
            cookie_address: (&raw const *cookie).expose_provenance() as u64,
            cookie: *cookie,
            name,
        };
        Ok((Own { address, name, own_format, tcp, unix, introduction, _cookie: cookie }, epoll))
    }

    /// Whoever knocks next at a door; `None` if nobody does.
    pub fn accept(&self, is_unix: bool) -> Option<OwnedFd> {
        let door = if is_unix { &self.unix } else { &self.tcp };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = accept_with(door.as_ref()?, flags).map_err(io::Error::from);
        let socket = socket.and_then(high_fd).ok()?;
        if !is_unix {
            tune_link(&socket);
        }
        Some(socket)
    }

    /// The endpoint's address: a Landbridge name, or a `sockaddr_in`.
    pub fn name(&self) -> &[u8] {
        let size = if self.own_format { NAME_BYTES } else { size_of::<libc::sockaddr_in>() };
        &self.name[..size]
    }
}

/// Descriptors whose numbers depend on the network stay away from the low numbers, which programs see.
fn high_fd(fd: OwnedFd) -> io::Result<OwnedFd> {
    const LOWEST: i32 = 512;
    match rustix::io::fcntl_dupfd_cloexec(&fd, LOWEST) {
        Ok(high) => Ok(high),
        // The limit of open files is lower than that: keep the number.
        Err(rustix::io::Errno::INVAL) => Ok(fd),
        Err(error) => Err(error.into()),
    }
}

fn open_tcp(
    identity: &Identity,
    own_format: bool,
    bound: Option<SocketAddrV4>,
) -> io::Result<(Option<OwnedFd>, IpAddr, u16)> {
    if !identity.paths.tcp && own_format {
        return Ok((None, identity.ip, 0));
    }
    let at = bound.map_or_else(|| any_address(identity.ip), SocketAddr::V4);
    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = high_fd(socket_with(family, SocketType::STREAM, flags, None)?)?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &at)?;
    listen(&socket, BACKLOG)?;
    let local: SocketAddr = rustix::net::getsockname(&socket)?
        .try_into()
        .map_err(|_| io::Error::other("a socket without an address"))?;
    let ip = if at.ip().is_unspecified() { identity.ip } else { at.ip() };
    Ok((Some(socket), ip, local.port()))
}

fn any_address(like: IpAddr) -> SocketAddr {
    match like {
        IpAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        IpAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    }
}

pub fn dial_tcp(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = high_fd(socket_with(family, SocketType::STREAM, flags, None)?)?;
    // From the start: a node that loses its power in the middle of the hello must be noticed, too.
    tune_link(&socket);
    match connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}

fn open_unix(name: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = high_fd(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

pub fn dial_unix(name: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = high_fd(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    // Anybody may take an abstract name, and then never say a word.
    let (theirs, ours) = (rustix::net::sockopt::socket_peercred(&socket)?.uid, getuid());
    if theirs != ours && !theirs.is_root() {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another user has taken the name"));
    }
    Ok(socket)
}

/// The abstract Unix socket of an endpoint: found by whoever knows its name.
pub fn unix_name(identity: &Identity, own_format: bool, unique: u64, port: u16) -> String {
    let job = hash(&[&identity.job.0]);
    if own_format {
        format!("landbridge-{job:016x}-{unique:016x}")
    } else {
        format!("landbridge-{job:016x}-port-{port}")
    }
}

fn sockaddr_name(ip: IpAddr, port: u16) -> NameBytes {
    let mut name = [0; NAME_BYTES];
    let IpAddr::V4(ip) = ip else {
        return name;
    };
    name[0..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    name[2..4].copy_from_slice(&port.to_be_bytes());
    name[4..8].copy_from_slice(&ip.octets());
    name
}

pub fn sockaddr_parts(name: &NameBytes) -> (Ipv4Addr, u16) {
    let ip = Ipv4Addr::new(name[4], name[5], name[6], name[7]);
    (ip, u16::from_be_bytes([name[2], name[3]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise a node that loses its power is waited for without end.
    #[test]
    fn a_silent_peer_is_asked_whether_it_lives() {
        let door = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = dial_tcp(door.local_addr().unwrap()).unwrap();
        assert_eq!(rustix::net::sockopt::socket_keepalive(&socket), Ok(true));
    }
}
