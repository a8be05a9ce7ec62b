//! TLS 1.3 between two relays, each of which checks the other's certificate.
//!
//! What enters: slices of frames, packed into full records. What leaves: the bytes of frames,
//! decrypted into the caller's buffer. Buffered ciphertext is bounded in both directions. What may
//! never happen: plaintext on the wire, or a peer without a certificate of the job's authority.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use landbridge_proto::id::ClusterId;
use rustls::client::{UnbufferedClientConnection, WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, UnbufferedServerConnection, WebPkiClientVerifier};
use rustls::unbuffered::{ConnectionState, UnbufferedStatus};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::socket::{Socket, SocketRead, SocketWrite};

/// The plaintext bytes of a full record (RFC 8446, section 5.1).
const RECORD_BYTES: usize = 16 << 10;
/// The bytes of a full record's ciphertext: the plaintext, a header, a content type and a tag; the
/// rest is slack.
const SEALED_BYTES: usize = RECORD_BYTES + 256;
/// The ciphertext read at once: sixteen records, as much as the engine reads elsewhere.
const INPUT_BYTES: usize = 16 * SEALED_BYTES;
/// The ciphertext that may wait for the socket: two records more than one write passes in.
const OUTPUT_BYTES: usize = 16 * SEALED_BYTES;
/// The least plaintext that is worth encrypting straight from the caller's memory.
const STRAIGHT_BYTES_MIN: usize = RECORD_BYTES;

/// The ALPN name of the relay protocol, inside QUIC.
const PROTOCOL: &[u8] = b"landbridge";

/// The certificate that a relay shows to other relays, and the authority that it asks of them.
#[derive(Clone)]
pub struct Identity {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Identity {
    /// Creates the identity from the job's authority, this relay's certificate and its key, all in
    /// PEM.
    ///
    /// # Errors
    /// The text names the invalid part.
    pub fn new(authority: &str, certificate: &str, private_key: &str) -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        for root in certificates(authority, "ca")? {
            roots.add(root).map_err(|error| format!("ca: {error}"))?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(certificate, "certificate")?;
        let key = PrivateKeyDer::from_pem_slice(private_key.as_bytes())
            .map_err(|error| format!("private_key: {error}"))?;
        let provider = Arc::new(provider());
        let mine = |error: rustls::Error| format!("certificate and private_key: {error}");

        let verifier = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|error| format!("ca: {error}"))?;
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(mine)?
            .with_webpki_verifier(verifier)
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(mine)?;
        // Each connection authenticates by itself: sessions are not resumed.
        client.resumption = rustls::client::Resumption::disabled();

        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(|error| format!("ca: {error}"))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(mine)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(mine)?;
        server.send_tls13_tickets = 0;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }

    /// The configurations for QUIC, which demands that both sides name their protocol (ALPN).
    pub fn for_quic(&self) -> (ClientConfig, ServerConfig) {
        let (mut client, mut server) = ((*self.client).clone(), (*self.server).clone());
        client.alpn_protocols = vec![PROTOCOL.into()];
        server.alpn_protocols = vec![PROTOCOL.into()];
        (client, server)
    }
}

fn certificates(pem: &str, name: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        Ok(_) => Err(format!("{name}: no certificate in PEM form")),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

/// The cryptographic provider, with the cipher that current processors do fastest in front.
fn provider() -> CryptoProvider {
    let mut provider = ring::default_provider();
    provider.cipher_suites = vec![
        ring::cipher_suite::TLS13_AES_128_GCM_SHA256,
        ring::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    provider
}

/// The name in the certificate of the relay of `cluster`.
pub fn relay_name(cluster: ClusterId) -> String {
    format!("relay-{}.landbridge", cluster.0)
}

/// The cluster for which a certificate was made, of `clusters` clusters.
pub fn certified_cluster(certificate: &CertificateDer<'_>, clusters: usize) -> Option<ClusterId> {
    let certificate = ParsedCertificate::try_from(certificate).ok()?;
    (0..clusters).map(|number| ClusterId(number as u16)).find(|cluster| {
        let name = ServerName::try_from(relay_name(*cluster));
        name.is_ok_and(|name| verify_server_name(&certificate, &name).is_ok())
    })
}

enum TlsConnection {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// A TLS link: see the module documentation.
pub struct TlsLink {
    connection: TlsConnection,
    socket: Socket,
    /// Ciphertext `input[input_start..input_end]` has not been decrypted.
    input: Vec<u8>,
    input_start: usize,
    input_end: usize,
    /// Plaintext that did not fit into the caller's buffer.
    spill: Vec<u8>,
    /// Ciphertext `output[output_start..output_end]` waits for the socket.
    output: Vec<u8>,
    output_start: usize,
    output_end: usize,
    stage: Vec<u8>,
    is_ready: bool,
    is_broken: bool,
    at_end: bool,
}

/// The result of one step over the ciphertext.
enum TlsStep {
    Plain(usize),
    Again,
    Sealed,
    Idle,
    Ended,
}

impl TlsLink {
    /// Starts a connection to the relay of `cluster`.
    ///
    /// # Errors
    /// If the configuration does not allow it.
    pub fn dial(
        identity: &Identity,
        cluster: ClusterId,
        socket: OwnedFd,
    ) -> Result<Self, rustls::Error> {
        let name = ServerName::try_from(relay_name(cluster))
            .map_err(|_| rustls::Error::General("the relay's name is no DNS name".into()))?;
        let client = UnbufferedClientConnection::new(identity.client.clone(), name)?;
        Ok(Self::new(TlsConnection::Client(client), socket))
    }

    /// Accepts a connection.
    ///
    /// # Errors
    /// If the configuration does not allow it.
    pub fn accept(identity: &Identity, socket: OwnedFd) -> Result<Self, rustls::Error> {
        let server = UnbufferedServerConnection::new(identity.server.clone())?;
        Ok(Self::new(TlsConnection::Server(server), socket))
    }

    fn new(connection: TlsConnection, socket: OwnedFd) -> Self {
        Self {
            connection,
            socket: Socket(socket),
            // A pending connection gets buffers for one record in each direction (33 KiB); an
            // authenticated one gets more.
            input: vec![0; SEALED_BYTES],
            input_start: 0,
            input_end: 0,
            spill: Vec::new(),
            output: vec![0; SEALED_BYTES],
            output_start: 0,
            output_end: 0,
            stage: Vec::new(),
            is_ready: false,
            is_broken: false,
            at_end: false,
        }
    }

    /// The descriptor to wait on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.0.as_fd()
    }

    /// Whether the handshake is complete, so that the peer's certificate is valid.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Gives an authenticated link its full buffers.
    pub fn grow(&mut self) {
        self.input.resize(INPUT_BYTES, 0);
        self.output.resize(OUTPUT_BYTES, 0);
    }

    /// The cluster for which the peer's certificate was made, of `clusters` clusters.
    pub fn peer_cluster(&self, clusters: usize) -> Option<ClusterId> {
        let certificates = match &self.connection {
            TlsConnection::Client(connection) => connection.peer_certificates(),
            TlsConnection::Server(connection) => connection.peer_certificates(),
        };
        certified_cluster(certificates?.first()?, clusters)
    }

    /// Advances the handshake as far as possible without waiting.
    ///
    /// # Errors
    /// If the peer ends the handshake, or if its certificate is refused.
    pub fn advance(&mut self) -> io::Result<()> {
        while !self.is_ready {
            match self.advance_handshake()? {
                TlsStep::Plain(_) | TlsStep::Again | TlsStep::Sealed => continue,
                TlsStep::Ended => return Err(io::ErrorKind::UnexpectedEof.into()),
                TlsStep::Idle => (),
            }
            self.flush()?;
            if self.is_ready {
                break;
            }
            match self.fill() {
                Ok(SocketRead { bytes: 0, .. }) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => (),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads from the socket at most once, and decrypts.
    ///
    /// # Errors
    /// `WouldBlock` if no whole record has arrived; otherwise the link is broken.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<SocketRead> {
        let mut bytes = self.take_spill(buffer);
        bytes += self.open_records(&mut buffer[bytes..])?;
        if bytes > 0 || self.at_end {
            return Ok(SocketRead { bytes, more: !self.at_end });
        }
        let filled = self.fill()?;
        if filled.bytes == 0 {
            // A TLS stream ends with a message; without it, the stream was cut.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let bytes = self.open_records(buffer)?;
        if self.output_end > self.output_start {
            self.flush()?;
        }
        match bytes {
            0 if self.at_end => Ok(SocketRead { bytes: 0, more: false }),
            0 if !filled.more => Err(io::ErrorKind::WouldBlock.into()),
            0 => self.read(buffer),
            _ => {
                let more = filled.more || bytes == buffer.len() || self.at_end;
                Ok(SocketRead { bytes, more })
            }
        }
    }

    /// Advances the handshake by one step. If this side refuses the certificate, it notifies the
    /// peer, so that both logs contain the reason.
    fn advance_handshake(&mut self) -> io::Result<TlsStep> {
        let step = self.step(&mut [], None);
        if step.as_ref().is_err_and(is_about_certificate) {
            // The one message that waits to be sent is encoded before any input is read. After it,
            // this connection must not be used again.
            self.is_broken = false;
            let _ = self.step(&mut [], None);
            let _ = self.flush();
            self.is_broken = true;
        }
        step
    }

    fn take_spill(&mut self, buffer: &mut [u8]) -> usize {
        let bytes = self.spill.len().min(buffer.len());
        buffer[..bytes].copy_from_slice(&self.spill[..bytes]);
        self.spill.drain(..bytes);
        bytes
    }

    /// Decrypts whole records as long as the buffer has space.
    fn open_records(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut bytes = 0;
        while self.input_end > self.input_start && bytes < buffer.len() {
            match self.step(&mut buffer[bytes..], None)? {
                TlsStep::Plain(more) => bytes += more,
                TlsStep::Again | TlsStep::Sealed => (),
                TlsStep::Idle => break,
                TlsStep::Ended => {
                    self.at_end = true;
                    break;
                }
            }
        }
        Ok(bytes)
    }

    /// Reads ciphertext once.
    fn fill(&mut self) -> io::Result<SocketRead> {
        if self.input_start > 0 {
            self.input.copy_within(self.input_start..self.input_end, 0);
            self.input_end -= self.input_start;
            self.input_start = 0;
        }
        if self.input_end == self.input.len() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a TLS record is too long"));
        }
        let read = self.socket.read(&mut self.input[self.input_end..])?;
        self.input_end += read.bytes;
        Ok(read)
    }

    /// Processes the next record that has arrived; if there is none, encrypts `to_seal`.
    fn step(&mut self, plain: &mut [u8], to_seal: Option<&[u8]>) -> io::Result<TlsStep> {
        if self.is_broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let input = &mut self.input[self.input_start..self.input_end];
        let room = &mut RecordBuffers {
            output: &mut self.output,
            output_end: &mut self.output_end,
            spill: &mut self.spill,
            is_ready: &mut self.is_ready,
            to_seal,
        };
        let (used, step) = match &mut self.connection {
            TlsConnection::Client(client) => look(client.process_tls_records(input), plain, room),
            TlsConnection::Server(server) => look(server.process_tls_records(input), plain, room),
        };
        self.input_start += used;
        self.is_broken = step.is_err();
        step.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Encrypts and writes as many of `slices` as the output buffer has space for.
    ///
    /// # Errors
    /// If the link is broken.
    pub fn write<'a>(&mut self, slices: impl Iterator<Item = &'a [u8]>) -> io::Result<SocketWrite> {
        // Once everything earlier has left, the buffer has space, so a write that is not blocked
        // makes progress.
        self.flush()?;
        if self.output_end > self.output_start {
            return Ok(SocketWrite { bytes: 0, blocked: true });
        }
        let mut bytes = 0;
        let mut stage = std::mem::take(&mut self.stage);
        let mut is_full = false;
        'slices: for mut slice in slices {
            while !slice.is_empty() {
                if stage.is_empty() && slice.len() >= STRAIGHT_BYTES_MIN {
                    if !self.seal(&slice[..RECORD_BYTES])? {
                        is_full = true;
                        break 'slices;
                    }
                    bytes += RECORD_BYTES;
                    slice = &slice[RECORD_BYTES..];
                    continue;
                }
                let size = slice.len().min(RECORD_BYTES - stage.len());
                stage.extend_from_slice(&slice[..size]);
                slice = &slice[size..];
                if stage.len() == RECORD_BYTES {
                    if !self.seal(&stage)? {
                        is_full = true;
                        break 'slices;
                    }
                    bytes += stage.len();
                    stage.clear();
                }
            }
        }
        if !is_full && !stage.is_empty() && self.seal(&stage)? {
            bytes += stage.len();
        }
        stage.clear();
        self.stage = stage;
        self.flush()?;
        Ok(SocketWrite { bytes, blocked: self.output_end > self.output_start })
    }

    /// Encrypts one record. Returns false if the output buffer has no space.
    fn seal(&mut self, plain: &[u8]) -> io::Result<bool> {
        if self.output_end + SEALED_BYTES > self.output.len() {
            return Ok(false);
        }
        loop {
            match self.step(&mut [], Some(plain))? {
                TlsStep::Sealed => return Ok(true),
                TlsStep::Plain(_) | TlsStep::Again => (),
                TlsStep::Idle | TlsStep::Ended => return Ok(false),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.output_end > self.output_start {
            let waiting = &self.output[self.output_start..self.output_end];
            let written = self.socket.write(std::iter::once(waiting))?;
            self.output_start += written.bytes;
            if written.blocked {
                return Ok(());
            }
        }
        (self.output_start, self.output_end) = (0, 0);
        Ok(())
    }
}

fn is_about_certificate(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    matches!(
        inner,
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented)
    )
}

struct RecordBuffers<'a> {
    output: &'a mut Vec<u8>,
    output_end: &'a mut usize,
    spill: &'a mut Vec<u8>,
    is_ready: &'a mut bool,
    to_seal: Option<&'a [u8]>,
}

fn look<D>(
    status: UnbufferedStatus<'_, '_, D>,
    plain: &mut [u8],
    room: &mut RecordBuffers<'_>,
) -> (usize, Result<TlsStep, Box<dyn std::error::Error + Send + Sync>>) {
    let UnbufferedStatus { mut discard, state, .. } = status;
    let step = match state {
        Err(error) => Err(error.into()),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => {
            let mut bytes = 0;
            let mut result = Ok(());
            while let Some(record) = traffic.next_record() {
                match record {
                    Ok(record) => {
                        discard += record.discard;
                        let size = record.payload.len().min(plain.len() - bytes);
                        plain[bytes..bytes + size].copy_from_slice(&record.payload[..size]);
                        room.spill.extend_from_slice(&record.payload[size..]);
                        bytes += size;
                    }
                    Err(error) => result = Err(error.into()),
                }
            }
            result.map(|()| TlsStep::Plain(bytes))
        }
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            // This case is rare, and the messages that rustls sends by itself are short.
            if *room.output_end + SEALED_BYTES > room.output.len() {
                room.output.resize(*room.output_end + SEALED_BYTES, 0);
            }
            match data.encode(&mut room.output[*room.output_end..]) {
                Ok(bytes) => {
                    *room.output_end += bytes;
                    Ok(TlsStep::Again)
                }
                Err(error) => Err(error.to_string().into()),
            }
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Ok(TlsStep::Again)
        }
        Ok(ConnectionState::WriteTraffic(mut traffic)) => {
            *room.is_ready = true;
            match room.to_seal {
                None => Ok(TlsStep::Idle),
                Some(bytes) => match traffic.encrypt(bytes, &mut room.output[*room.output_end..]) {
                    Ok(sealed) => {
                        *room.output_end += sealed;
                        Ok(TlsStep::Sealed)
                    }
                    Err(error) => Err(error.to_string().into()),
                },
            }
        }
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Ok(TlsStep::Ended),
        Ok(_) => Ok(TlsStep::Idle),
    };
    (discard, step)
}
