//! A pending connection: a connection between being accepted (or dialled) and the end of the hello.
//!
//! What enters: exactly the bytes of the hello, and no more. What leaves: the introduction of the
//! other side, or the reason for its refusal. A pending connection costs one of
//! [`super::PENDING_MAX`] places for at most [`HELLO_MILLIS_MAX`], and less than a kilobyte of
//! memory. At the listener for relays, it costs the buffers of a
//! [`TlsLink`](crate::link::tls::TlsLink) and what rustls keeps, some 50 KiB.

use std::io;
use std::os::fd::OwnedFd;

use landbridge_proto::id::{ClusterId, JobId, JobKey};
use landbridge_proto::limit::HELLO_MILLIS_MAX;
use landbridge_proto::wire::hello::{
    CLOSE_BYTES, Dialler, Introduction, Listener, Nonce, OPEN_BYTES, REPLY_BYTES, Refusal, Role,
};

use super::transport::Transport;
use super::udp_upgrade::TAKES_OVER;
use crate::link::shm::ShmLink;
use crate::sys;

/// The listener at which the connection arrived, or the dial that opened it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// TCP, for endpoints of the relay's own cluster.
    Ranks,
    /// The Unix socket, for endpoints of the relay's own node.
    Unix,
    /// TLS or QUIC, for other relays.
    Relays,
    /// This relay dialled the relay of this cluster, for a stream of this number.
    Dialled(ClusterId, u32),
}

/// What this relay shows in a hello.
pub struct HelloCredentials {
    pub job: JobId,
    pub key: JobKey,
    pub introduction: Introduction,
}

/// A connection whose hello is not complete: see the module documentation.
pub struct PendingConnection {
    pub origin: Origin,
    pub deadline_millis: u64,
    /// Dialled to replace an older stream of the same number.
    pub takes_over: bool,
    step: HelloStep,
    is_certified: bool,
    buffer: Vec<u8>,
}

enum HelloStep {
    /// The network connection or TLS is not established yet.
    Connecting,
    Open,
    Close(Listener),
    /// An endpoint of the same node: the memory of the link comes after the hello.
    Memory(Introduction),
    Reply(Dialler),
    Done,
}

/// The progress of the hello.
pub enum HelloProgress {
    Waits,
    /// A relay has shown a certificate: see [`PendingConnection::set_certified`].
    Certified,
    /// The hello is complete. Endpoints of the relay's own node have sent the memory of their link,
    /// too.
    Known(Introduction, Option<OwnedFd>),
}

impl PendingConnection {
    pub fn new(origin: Origin, now_millis: u64) -> Self {
        let deadline_millis = now_millis + HELLO_MILLIS_MAX;
        let is_certified = origin != Origin::Relays;
        let (step, buffer) = (HelloStep::Connecting, Vec::new());
        Self { origin, deadline_millis, takes_over: false, step, is_certified, buffer }
    }

    /// Whether nothing has been sent yet.
    pub fn is_connecting(&self) -> bool {
        matches!(self.step, HelloStep::Connecting)
    }

    /// Records that the certificate is valid, so that the hello may begin.
    pub fn set_certified(&mut self) {
        self.is_certified = true;
    }

    /// Advances the hello as far as the bytes that have arrived allow.
    ///
    /// # Errors
    /// The reason why the other side is refused.
    pub fn advance(
        &mut self,
        transport: &mut Transport,
        own: &HelloCredentials,
    ) -> Result<HelloProgress, String> {
        loop {
            if !transport.advance_handshake().map_err(|error| tls_refusal(&error))? {
                return Ok(HelloProgress::Waits);
            }
            if !self.is_certified {
                return Ok(HelloProgress::Certified);
            }
            if let Some(progress) = self.step(transport, own)? {
                return Ok(progress);
            }
        }
    }

    /// Advances the hello by one step. Returns `None` if the next step may be possible at once.
    fn step(
        &mut self,
        transport: &mut Transport,
        own: &HelloCredentials,
    ) -> Result<Option<HelloProgress>, String> {
        match std::mem::replace(&mut self.step, HelloStep::Done) {
            HelloStep::Connecting => self.step = self.start(transport, own)?,
            HelloStep::Open => {
                let Some(open) = self.take::<OPEN_BYTES>(transport)? else {
                    self.step = HelloStep::Open;
                    return Ok(Some(HelloProgress::Waits));
                };
                let nonce = fresh_nonce()?;
                let (listener, reply) =
                    Listener::handle_open(own.job, &own.key, &own.introduction, nonce, &open)
                        .map_err(text)?;
                send_whole(transport, &reply)?;
                self.step = HelloStep::Close(listener);
            }
            HelloStep::Close(listener) => {
                let Some(close) = self.take::<CLOSE_BYTES>(transport)? else {
                    self.step = HelloStep::Close(listener);
                    return Ok(Some(HelloProgress::Waits));
                };
                let introduction = listener.handle_close(&close).map_err(text)?;
                if self.origin != Origin::Unix || introduction.role != Role::Endpoint {
                    return Ok(Some(HelloProgress::Known(introduction, None)));
                }
                self.step = HelloStep::Memory(introduction);
            }
            HelloStep::Memory(introduction) => match receive_memory(transport) {
                Ok(memory) => return Ok(Some(HelloProgress::Known(introduction, Some(memory)))),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.step = HelloStep::Memory(introduction);
                    return Ok(Some(HelloProgress::Waits));
                }
                Err(error) => return Err(format!("it does not share memory ({error})")),
            },
            HelloStep::Reply(dialler) => {
                let Some(reply) = self.take::<REPLY_BYTES>(transport)? else {
                    self.step = HelloStep::Reply(dialler);
                    return Ok(Some(HelloProgress::Waits));
                };
                let (close, introduction) = dialler.handle_reply(&reply).map_err(text)?;
                send_whole(transport, &close)?;
                return Ok(Some(HelloProgress::Known(introduction, None)));
            }
            HelloStep::Done => return Ok(Some(HelloProgress::Waits)),
        }
        Ok(None)
    }

    fn start(
        &self,
        transport: &mut Transport,
        own: &HelloCredentials,
    ) -> Result<HelloStep, String> {
        let Origin::Dialled(_, stream) = self.origin else { return Ok(HelloStep::Open) };
        // Relays use the cookie field to say which stream this is.
        let takes_over = if self.takes_over { TAKES_OVER } else { 0 };
        let cookie = u64::from(stream) | takes_over;
        let introduction = Introduction { cookie, ..own.introduction };
        let dialler = Dialler::new(own.job, own.key.clone(), introduction, fresh_nonce()?);
        send_whole(transport, &dialler.open())?;
        Ok(HelloStep::Reply(dialler))
    }

    /// The next `N` bytes, if they have all arrived.
    fn take<const N: usize>(
        &mut self,
        transport: &mut Transport,
    ) -> Result<Option<[u8; N]>, String> {
        let mut chunk = [0; N];
        while self.buffer.len() < N {
            let wanted = N - self.buffer.len();
            match transport.read(&mut chunk[..wanted]) {
                Ok(read) if read.bytes == 0 => {
                    return Err("it closed the connection before the end of the hello".into());
                }
                Ok(read) => self.buffer.extend_from_slice(&chunk[..read.bytes]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => {
                    return Err(format!(
                        "it closed the connection before the end of the hello ({error})"
                    ));
                }
            }
        }
        chunk.copy_from_slice(&self.buffer);
        self.buffer.clear();
        Ok(Some(chunk))
    }

    /// Why the hello was not complete in time.
    pub fn timeout_reason(&self) -> String {
        let what = match self.step {
            HelloStep::Connecting => "did not finish connecting",
            _ if self.buffer.is_empty() => "said nothing",
            _ => "stopped in the middle of the hello",
        };
        format!("it {what} within {} s", HELLO_MILLIS_MAX / 1_000)
    }
}

/// Sends a message of the hello as a whole. A message is shorter than any socket buffer: if it
/// cannot be written, the other side is not there.
fn send_whole(transport: &mut Transport, bytes: &[u8]) -> Result<(), String> {
    let written = transport
        .write(std::iter::once(bytes), std::iter::once(bytes.len()))
        .map_err(|error| format!("it does not accept the hello ({error})"))?;
    if written.bytes < bytes.len() {
        return Err("it does not accept the hello".into());
    }
    Ok(())
}

fn receive_memory(transport: &Transport) -> io::Result<OwnedFd> {
    ShmLink::receive_memory(transport.fd().ok_or(io::ErrorKind::Unsupported)?)
}

fn fresh_nonce() -> Result<Nonce, String> {
    sys::random().map_err(|error| format!("no random numbers: {error}"))
}

fn text(refusal: Refusal) -> String {
    refusal.to_string()
}

fn tls_refusal(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            "it closed the connection before the end of the hello".into()
        }
        // The error is one of the network: TLS has not begun.
        _ if error.raw_os_error().is_some() => error.to_string(),
        // Errors of QUIC describe themselves.
        io::ErrorKind::TimedOut | io::ErrorKind::Other => error.to_string(),
        _ => format!("TLS: {error}"),
    }
}
