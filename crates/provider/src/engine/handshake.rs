//! The hello on a new connection, step by step, without waiting.
//!
//! Enters: a connected (or connecting) socket. Leaves: the socket with an authenticated peer, or an
//! error that names the reason. What may never happen: an unauthenticated connection makes this
//! process wait, or hold more than the bytes of one hello.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use landbridge_drive::link::recorded::RecordedLink;
use landbridge_drive::link::shm::{Mapper, ShmLink};
use landbridge_drive::link::stream::StreamLink;
use landbridge_proto::limit::HELLO_MILLIS_MAX;
use landbridge_proto::wire::hello::{
    CLOSE_BYTES, Dialler, Introduction, Listener, OPEN_BYTES, REPLY_BYTES,
};

use super::carrier::Carrier;
use super::identity::{Identity, random};

/// A hello under way.
pub struct Handshake {
    socket: Option<OwnedFd>,
    is_unix: bool,
    step: HandshakeStep,
    buffer: [u8; REPLY_BYTES],
    filled: usize,
    /// Beginning of the hello, or of its last step if that is [`HandshakeStep::AwaitMemory`].
    since: Instant,
    is_to_relay: bool,
    /// Longest time for the connection to be established.
    connect_max: Duration,
}

/// Shortest limit for establishing a connection to an address that was connected before. TCP
/// repeats a lost SYN only after a second, and its further attempts are further apart than the
/// engine's own dials.
const CONNECT_TIME_MIN: Duration = Duration::from_millis(500);
/// Longest time that an accepted connection with a valid first message may take for its next
/// message. Such a connection is usually from a process of the job that computes and does not poll
/// meanwhile. If slots become scarce, the connection is closed earlier.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(600);
/// Longest time that a relay may take to answer. A relay always serves its network, but its machine
/// may be very busy.
const RELAY_TIME_MAX: Duration = Duration::from_secs(30);
/// Longest time of any other step.
const STEP_TIME_MAX: Duration = Duration::from_millis(HELLO_MILLIS_MAX);

enum HandshakeStep {
    /// Dialled; the connection may not be established yet.
    Dialled(Dialler),
    /// The dialler's first message is sent.
    AwaitReply(Dialler),
    /// Accepted; no message has arrived yet.
    AwaitOpen(Box<Introduction>),
    /// The listener's answer is sent.
    AwaitClose(Listener),
    /// The dialler is authenticated, and will pass the shared memory of the link.
    AwaitMemory(Box<Introduction>),
    Over,
}

/// An established link.
pub struct EstablishedLink {
    pub introduction: Introduction,
    pub carrier: Carrier,
}

impl Handshake {
    /// Begins a hello on a socket that connects to a peer.
    pub fn dial(socket: OwnedFd, is_unix: bool, identity: &Identity, own: Introduction) -> Self {
        let dialler = Dialler::new(identity.job, identity.key.clone(), own, random());
        Self::new(socket, is_unix, HandshakeStep::Dialled(dialler))
    }

    /// Begins a hello on a socket that connects to the relay.
    pub fn dial_relay(
        socket: OwnedFd,
        is_unix: bool,
        identity: &Identity,
        own: Introduction,
    ) -> Self {
        Self { is_to_relay: true, ..Self::dial(socket, is_unix, identity, own) }
    }

    /// Begins a hello on an accepted socket.
    pub fn accept(socket: OwnedFd, is_unix: bool, own: Introduction) -> Self {
        Self::new(socket, is_unix, HandshakeStep::AwaitOpen(Box::new(own)))
    }

    fn new(socket: OwnedFd, is_unix: bool, step: HandshakeStep) -> Self {
        Self {
            socket: Some(socket),
            is_unix,
            step,
            buffer: [0; REPLY_BYTES],
            filled: 0,
            since: Instant::now(),
            is_to_relay: false,
            connect_max: STEP_TIME_MAX,
        }
    }

    /// Limits the time for establishing the connection: `pause` is the time until the next attempt,
    /// and a new connection is then better than a late one.
    pub fn with_connect_time(self, pause: Duration) -> Self {
        Self { connect_max: pause.clamp(CONNECT_TIME_MIN, STEP_TIME_MAX), ..self }
    }

    /// The socket, to wait on.
    ///
    /// # Panics
    /// After the hello has ended.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_ref().expect("a hello under way").as_fd()
    }

    /// Address of the other side of a network connection, as long as the hello owns the socket.
    pub fn remote(&self) -> Option<SocketAddr> {
        rustix::net::getpeername(self.socket.as_ref()?).ok()??.try_into().ok()
    }

    /// Whether the hello waits for the socket to become writable: the connection is being
    /// established.
    pub fn wants_write(&self) -> bool {
        matches!(self.step, HandshakeStep::Dialled(_))
    }

    /// Whether the current step has exceeded its time limit.
    pub fn is_overdue(&self) -> bool {
        self.time_max().is_some_and(|most| self.since.elapsed() > most)
    }

    /// The time limit of the current step. A peer that owes the answer may compute without end: if
    /// the peer ends, its kernel closes the connection.
    fn time_max(&self) -> Option<Duration> {
        match self.step {
            HandshakeStep::AwaitReply(_) if self.is_to_relay => Some(RELAY_TIME_MAX),
            HandshakeStep::AwaitReply(_) => None,
            HandshakeStep::AwaitClose(_) => Some(CLOSE_TIME_MAX),
            HandshakeStep::Dialled(_) => Some(self.connect_max),
            _ => Some(STEP_TIME_MAX),
        }
    }

    /// Whether the hello has taken longer than a hello between two sides that serve their network.
    pub fn is_slow(&self) -> bool {
        self.since.elapsed() > STEP_TIME_MAX
    }

    /// Continues as far as possible. `Ok(None)`: the hello has not ended yet.
    ///
    /// # Errors
    /// The other side cannot be reached, or does not belong to the job; the text gives the reason.
    pub fn advance(
        &mut self,
        identity: &Identity,
        mapper: Mapper,
    ) -> io::Result<Option<EstablishedLink>> {
        loop {
            match self.step(identity, mapper) {
                Ok(Some(up)) => return Ok(Some(up)),
                Ok(None) => (),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    fn step(&mut self, identity: &Identity, mapper: Mapper) -> io::Result<Option<EstablishedLink>> {
        match std::mem::replace(&mut self.step, HandshakeStep::Over) {
            HandshakeStep::Dialled(dialler) => {
                if !self.is_connected()? {
                    self.step = HandshakeStep::Dialled(dialler);
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                self.write(&dialler.open())?;
                self.step = HandshakeStep::AwaitReply(dialler);
            }
            HandshakeStep::AwaitReply(dialler) => {
                let Some(reply) = self.read::<REPLY_BYTES>()? else {
                    self.step = HandshakeStep::AwaitReply(dialler);
                    return Err(io::ErrorKind::WouldBlock.into());
                };
                let (close, listener) = dialler.handle_reply(&reply).map_err(refused)?;
                self.write(&close)?;
                return self.finish(listener, identity, mapper).map(Some);
            }
            HandshakeStep::AwaitOpen(own) => {
                let Some(open) = self.read::<OPEN_BYTES>()? else {
                    self.step = HandshakeStep::AwaitOpen(own);
                    return Err(io::ErrorKind::WouldBlock.into());
                };
                let (listener, reply) =
                    Listener::handle_open(identity.job, &identity.key, &own, random(), &open)
                        .map_err(refused)?;
                self.write(&reply)?;
                self.step = HandshakeStep::AwaitClose(listener);
            }
            HandshakeStep::AwaitClose(listener) => {
                let Some(close) = self.read::<CLOSE_BYTES>()? else {
                    self.step = HandshakeStep::AwaitClose(listener);
                    return Err(io::ErrorKind::WouldBlock.into());
                };
                let dialler = listener.handle_close(&close).map_err(refused)?;
                if !self.is_unix {
                    return self.finish(dialler, identity, mapper).map(Some);
                }
                // The dialler may have computed for long before it sent this message; its own hello
                // has ended now, so the end of this connection would be the end of a link.
                self.since = Instant::now();
                self.step = HandshakeStep::AwaitMemory(Box::new(dialler));
            }
            HandshakeStep::AwaitMemory(dialler) => {
                let memory = match ShmLink::receive_memory(self.fd()) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.step = HandshakeStep::AwaitMemory(dialler);
                        return Err(error);
                    }
                    other => other?,
                };
                let link = ShmLink::accept(self.take_socket()?, memory, mapper)?;
                let carrier = Carrier::Shm(Box::new(link));
                return Ok(Some(EstablishedLink { introduction: *dialler, carrier }));
            }
            HandshakeStep::Over => return Err(io::Error::other("a hello that has ended")),
        }
        Ok(None)
    }

    fn finish(
        &mut self,
        introduction: Introduction,
        identity: &Identity,
        mapper: Mapper,
    ) -> io::Result<EstablishedLink> {
        let socket = self.take_socket()?;
        let carrier = if self.is_unix {
            Carrier::Shm(Box::new(ShmLink::dial(socket, mapper)?))
        } else if self.is_to_relay && identity.recovers {
            Carrier::Recorded(Box::new(RecordedLink::new(socket, identity.settings.peer_timeout)))
        } else {
            keep_in_cache(&socket)?;
            Carrier::Stream(Box::new(StreamLink::new(socket)?))
        };
        Ok(EstablishedLink { introduction, carrier })
    }

    fn take_socket(&mut self) -> io::Result<OwnedFd> {
        self.socket.take().ok_or_else(|| io::Error::other("a hello that has ended"))
    }

    fn is_connected(&self) -> io::Result<bool> {
        let mut poll =
            libc::pollfd { fd: self.fd().as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: the array is one local pollfd.
        let ready = unsafe { libc::poll(&mut poll, 1, 0) };
        if ready == 0 {
            return Ok(false);
        }
        match rustix::net::sockopt::socket_error(self.fd())? {
            Ok(()) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Writes a message of the hello. The messages are small and follow each other one at a time,
    /// so a fresh socket takes each of them whole.
    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
        match rustix::net::send(self.fd(), bytes, flags)? {
            sent if sent == bytes.len() => Ok(()),
            _ => Err(io::Error::other("the connection does not accept a hello")),
        }
    }

    fn read<const N: usize>(&mut self) -> io::Result<Option<[u8; N]>> {
        while self.filled < N {
            let room = self.buffer.as_mut_ptr().wrapping_add(self.filled).cast();
            let fd = self.fd().as_raw_fd();
            // SAFETY: N is at most the size of the buffer (the largest message), and `filled` is
            // below N.
            let got = unsafe { libc::recv(fd, room, N - self.filled, libc::MSG_DONTWAIT) };
            match got {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                1.. => self.filled += got as usize,
                _ => {
                    let error = io::Error::last_os_error();
                    match error.kind() {
                        io::ErrorKind::WouldBlock => return Ok(None),
                        io::ErrorKind::Interrupted => (),
                        _ => return Err(error),
                    }
                }
            }
        }
        self.filled = 0;
        let mut message = [0; N];
        message.copy_from_slice(&self.buffer[..N]);
        Ok(Some(message))
    }
}

/// Limits the send buffer of a connection within one machine. Such a connection has no delay to
/// cover, and its buffered bytes should still be in the processor's caches when they are copied
/// out. The kernel's automatic sizing would let several megabytes gather.
fn keep_in_cache(socket: &OwnedFd) -> io::Result<()> {
    /// 512 KiB. At 4 MiB messages the measured bandwidth is 1.2 to 1.4 times that of the kernel's
    /// sizing; for smaller messages it is equal.
    const SEND_BYTES: usize = 512 << 10;
    let ip = |address: rustix::net::SocketAddrAny| {
        std::net::SocketAddr::try_from(address).ok().map(|address| address.ip())
    };
    if ip(rustix::net::getsockname(socket)?) == rustix::net::getpeername(socket)?.and_then(ip) {
        rustix::net::sockopt::set_socket_send_buffer_size(socket, SEND_BYTES)?;
    }
    Ok(())
}

fn refused(refusal: landbridge_proto::wire::hello::Refusal) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, refusal.to_string())
}

const _: () = assert!(OPEN_BYTES <= REPLY_BYTES && CLOSE_BYTES <= REPLY_BYTES);

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;
    use landbridge_proto::id::{Address, ClusterId};
    use landbridge_proto::wire::hello::{LogPosition, Role};
    use landbridge_proto::wire::name::NAME_BYTES;

    const NO_MEMORY: Mapper =
        Mapper { map: |_, _| Err(io::ErrorKind::Unsupported.into()), unmap: |_, _| () };

    /// Only a peer's answer has no time limit, since the peer may compute.
    #[test]
    fn every_other_step_has_an_end() {
        let identity = Identity::current().unwrap();
        let pair = || std::os::unix::net::UnixStream::pair().unwrap();
        let (ours, theirs) = pair();
        let mut dialled = Handshake::dial(ours.into(), true, identity, introduction());
        let mut accepted = Handshake::accept(theirs.into(), true, introduction());
        assert_eq!(dialled.time_max(), Some(STEP_TIME_MAX));
        assert_eq!(accepted.time_max(), Some(STEP_TIME_MAX));
        assert!(dialled.advance(identity, NO_MEMORY).unwrap().is_none());
        assert_eq!(dialled.time_max(), None);
        assert!(accepted.advance(identity, NO_MEMORY).unwrap().is_none());
        assert_eq!(accepted.time_max(), Some(CLOSE_TIME_MAX));
        let (again, _nobody) = pair();
        let again = Handshake::dial(again.into(), true, identity, introduction());
        let again = again.with_connect_time(Duration::from_millis(20));
        assert_eq!(again.time_max(), Some(CONNECT_TIME_MIN));
        assert_eq!(
            again.with_connect_time(Duration::from_secs(60)).time_max(),
            Some(STEP_TIME_MAX)
        );
        let (to_relay, _relay) = pair();
        let mut relay = Handshake::dial_relay(to_relay.into(), true, identity, introduction());
        assert!(relay.advance(identity, NO_MEMORY).unwrap().is_none());
        assert_eq!(relay.time_max(), Some(RELAY_TIME_MAX));
        assert!(!relay.is_overdue() && !relay.is_slow());
    }

    /// The time that a dialler has computed before its last message is no time of the step after
    /// this message: the dialler believes that the link is up.
    #[test]
    fn the_last_step_after_a_slow_one_has_a_time_of_its_own() {
        let identity = Identity::current().unwrap();
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut accepted = Handshake::accept(theirs.into(), true, introduction());
        let own = introduction();
        let dialler = Dialler::new(identity.job, identity.key.clone(), own, random());
        (&ours).write_all(&dialler.open()).unwrap();
        assert!(accepted.advance(identity, NO_MEMORY).unwrap().is_none());
        let mut reply = [0; REPLY_BYTES];
        (&ours).read_exact(&mut reply).unwrap();
        let (close, _) = dialler.handle_reply(&reply).unwrap();
        accepted.since = Instant::now().checked_sub(2 * STEP_TIME_MAX).unwrap();
        assert!(accepted.is_slow() && !accepted.is_overdue(), "it may compute for 600 s");
        (&ours).write_all(&close).unwrap();
        assert!(accepted.advance(identity, NO_MEMORY).unwrap().is_none());
        assert_eq!(accepted.time_max(), Some(STEP_TIME_MAX));
        assert!(!accepted.is_overdue() && !accepted.is_slow());
        accepted.since = Instant::now().checked_sub(2 * STEP_TIME_MAX).unwrap();
        assert!(accepted.is_overdue(), "a dialler that never passes the memory");
    }

    fn introduction() -> Introduction {
        Introduction {
            role: Role::Endpoint,
            address: Address::ANONYMOUS,
            incarnation: 0,
            cluster: ClusterId(0),
            pid: 1,
            eager_window: 1 << 16,
            cookie_address: 0,
            cookie: 0,
            name: [0; NAME_BYTES],
            log_position: LogPosition::default(),
        }
    }
}
