//! Sockets and names of this endpoint, and dials to other endpoints.
//!
//! An endpoint listens on a TCP port and, where memory may be shared, on an abstract Unix socket.
//! No function here waits: a socket whose connection is still being established is returned at
//! once.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};
use rustix::process::{Resource, Rlimit, getrlimit, getuid, setrlimit};

use landbridge_drive::sys::tune_link;
use landbridge_proto::id::Address;
use landbridge_proto::wire::hello::{Introduction, LogPosition, Role};
use landbridge_proto::wire::name::{NAME_BYTES, Name};

use crate::log;

use super::event_token::{EventToken, watch};
use super::identity::{Identity, hash, random};

pub type NameBytes = [u8; NAME_BYTES];

/// Length of the accept queue: all processes of a large node may connect at once.
const BACKLOG: i32 = 1024;

/// What an endpoint lets processes of its node read, at the address that it introduces.
#[repr(C)]
pub struct Cookie {
    /// The number that the endpoint introduces.
    pub value: u64,
    /// Address of the [`PublishedTable`](crate::mr::PublishedTable) of its domain.
    pub regions: u64,
}

/// This endpoint, as other endpoints see it.
pub struct LocalEndpoint {
    pub address: Address,
    pub name: NameBytes,
    pub own_format: bool,
    tcp: Option<OwnedFd>,
    unix: Option<OwnedFd>,
    /// What the engine waits for.
    pub epoll: OwnedFd,
    /// The introduction of this endpoint in a hello.
    pub introduction: Introduction,
    /// Peers try to read it, to find out whether they may read this process's memory.
    _cookie: Box<Cookie>,
}

impl LocalEndpoint {
    /// Opens the listeners of a new endpoint, and the epoll set that watches them. `regions`: the
    /// address of the table of its registered memory.
    pub fn open(
        identity: &Identity,
        (address, unique): (Address, u64),
        own_format: bool,
        bound: Option<SocketAddrV4>,
        regions: u64,
    ) -> io::Result<LocalEndpoint> {
        raise_open_files();
        let epoll = high_fd(epoll::create(epoll::CreateFlags::CLOEXEC)?)?;
        let (tcp, ip, port) = open_tcp(identity, own_format, bound)?;
        let name = if own_format {
            let ip = match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            let (cluster, node) = (identity.cluster, identity.node);
            let further =
                if port == 0 || bound.is_some() { Default::default() } else { identity.further() };
            Name { address, unique, cluster, node, ip: ip.octets(), further, port }.emit()
        } else {
            sockaddr_name(ip, port)
        };
        let unix = (identity.settings.kinds.shm && !identity.recovers)
            .then(|| unix_name(identity, own_format, unique, port));
        let unix = unix.and_then(|name| {
            let opened = open_unix(&name);
            opened.inspect_err(|error| log!(Warn, "no shared memory: @{name}: {error}")).ok()
        });
        let cookie = Box::new(Cookie { value: u64::from_le_bytes(random()), regions });
        let introduction = Introduction {
            role: Role::Endpoint,
            address,
            incarnation: identity.incarnation,
            cluster: identity.cluster,
            pid: std::process::id(),
            eager_window: identity.eager_window(),
            cookie_address: (&raw const *cookie).expose_provenance() as u64,
            cookie: cookie.value,
            name,
            log_position: LogPosition::default(),
        };
        let own = LocalEndpoint {
            address,
            name,
            own_format,
            tcp,
            unix,
            epoll,
            introduction,
            _cookie: cookie,
        };
        own.set_watched(false, true)?;
        own.set_watched(true, true)?;
        Ok(own)
    }

    /// Accepts the next pending connection of a listener; `None` if no connection is pending.
    ///
    /// # Errors
    /// See accept(2). The connection stays pending, for example if no descriptor is available.
    pub fn accept(&self, is_unix: bool) -> io::Result<Option<OwnedFd>> {
        let Some(listener) = self.listener(is_unix) else {
            return Ok(None);
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            match accept_with(listener, flags) {
                Ok(socket) => {
                    if !is_unix {
                        tune_link(&socket);
                    }
                    return high_fd(socket).map(Some);
                }
                // The pending connection was closed again, or a signal interrupted the call.
                Err(Errno::CONNABORTED | Errno::INTR) => (),
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Lets epoll watch a listener for pending connections, or not.
    ///
    /// # Errors
    /// See epoll_ctl(2).
    pub fn set_watched(&self, is_unix: bool, watched: bool) -> io::Result<()> {
        let Some(listener) = self.listener(is_unix) else {
            return Ok(());
        };
        if watched {
            let token = if is_unix { EventToken::UnixListener } else { EventToken::Listener };
            return watch(&self.epoll, listener, token, epoll::EventFlags::IN);
        }
        Ok(epoll::delete(&self.epoll, listener)?)
    }

    /// The TCP port at which the endpoint accepts connections on every address, if it does.
    pub fn port(&self) -> Option<u16> {
        let local: SocketAddr =
            rustix::net::getsockname(self.tcp.as_ref()?).ok()?.try_into().ok()?;
        local.ip().is_unspecified().then_some(local.port())
    }

    fn listener(&self, is_unix: bool) -> Option<&OwnedFd> {
        if is_unix { self.unix.as_ref() } else { self.tcp.as_ref() }
    }

    /// The endpoint's name: a Landbridge name, or a `sockaddr_in`.
    pub fn name(&self) -> &[u8] {
        let size = if self.own_format { NAME_BYTES } else { size_of::<libc::sockaddr_in>() };
        &self.name[..size]
    }
}

/// Number of open files that this process may need: two for each of very many peers.
const OPEN_FILES_WANTED: u64 = 1 << 16;

/// Raises this process's limit of open files, as far as the system allows.
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.map_or(OPEN_FILES_WANTED, |most| most.min(OPEN_FILES_WANTED));
    if limit.current.is_some_and(|current| current < most) {
        // With a lower limit fewer peers are possible, and the log reports connections that have to
        // wait.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit });
    }
}

/// Lowest number of a descriptor whose number depends on the network.
const LOWEST: i32 = 512;

/// Moves a descriptor whose number depends on the network to a high number, away from the low
/// numbers that programs see.
fn high_fd(fd: OwnedFd) -> io::Result<OwnedFd> {
    match rustix::io::fcntl_dupfd_cloexec(&fd, LOWEST) {
        Ok(high) => Ok(high),
        // The limit of open files is lower, or all higher numbers are taken: the descriptor keeps
        // its number.
        Err(Errno::INVAL | Errno::MFILE) => Ok(fd),
        Err(error) => Err(error.into()),
    }
}

fn open_tcp(
    identity: &Identity,
    own_format: bool,
    bound: Option<SocketAddrV4>,
) -> io::Result<(Option<OwnedFd>, IpAddr, u16)> {
    if !identity.settings.kinds.tcp && own_format {
        return Ok((None, identity.ip, 0));
    }
    let at = bound.map_or_else(|| listening_address(identity.ip), SocketAddr::V4);
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

/// The address at which an endpoint listens that peers dial at `ip`. A loopback address means a job
/// of one host, or a host without a network: no other host has to reach the endpoint.
fn listening_address(ip: IpAddr) -> SocketAddr {
    match ip {
        loopback if loopback.is_loopback() => SocketAddr::from((loopback, 0)),
        IpAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        IpAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    }
}

pub fn dial_tcp(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = high_fd(socket_with(family, SocketType::STREAM, flags, None)?)?;
    // The socket options apply from here on: a node that loses its power during the hello must be
    // noticed, too.
    tune_link(&socket);
    match connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
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
    // Any process may take an abstract name, and then never answer.
    let (theirs, ours) = (rustix::net::sockopt::socket_peercred(&socket)?.uid, getuid());
    if theirs != ours && !theirs.is_root() {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another user has taken the name"));
    }
    Ok(socket)
}

/// The name of an endpoint's abstract Unix socket, which peers compute from the endpoint's name.
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
    use std::os::fd::AsRawFd;

    use super::*;

    /// Runs in a process of its own, whose table of open files can be filled.
    #[test]
    fn a_number_is_kept_where_the_high_ones_are_taken() {
        const CHILD: &str = "LANDBRIDGE_TEST_FULL_TABLE";
        if std::env::var_os(CHILD).is_none() {
            let name =
                "engine::local_endpoint::tests::a_number_is_kept_where_the_high_ones_are_taken";
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            let ended = child.args(["--exact", name]).env(CHILD, "1").status().unwrap();
            return assert!(ended.success());
        }
        let most = LOWEST as u64 + 8;
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit }).unwrap();
        let file = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let taken: Vec<OwnedFd> = (0..8).map(|_| high_fd(file()).unwrap()).collect();
        assert!(taken.iter().all(|fd| fd.as_raw_fd() >= LOWEST));
        assert!(high_fd(file()).unwrap().as_raw_fd() < LOWEST);
    }

    #[test]
    fn an_endpoint_that_is_called_at_the_loopback_listens_there_alone() {
        let at = |ip: &str| listening_address(ip.parse().unwrap()).to_string();
        assert_eq!([at("127.0.0.1"), at("::1")], ["127.0.0.1:0", "[::1]:0"]);
        assert_eq!([at("10.1.2.3"), at("2001:db8::1")], ["0.0.0.0:0", "[::]:0"]);
    }

    /// Without keep-alive the engine would wait for ever for a node that loses its power.
    #[test]
    fn a_silent_peer_is_asked_whether_it_lives() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = dial_tcp(listener.local_addr().unwrap()).unwrap();
        assert_eq!(rustix::net::sockopt::socket_keepalive(&socket), Ok(true));
    }
}
