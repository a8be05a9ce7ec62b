//! Checks whether a relay answers at an address: `landbridge doctor --relay HOST:PORT`.
//!
//! Any program may have opened the port, so the check begins both protocols of a relay. Relays use
//! TLS 1.3 with each other: a relay shows a certificate for `relay-N.landbridge`. The check reads
//! the certificate without verifying it, because only a job knows the relay's authority. On the
//! port for ranks the check sends the first message of the hello, for a job that does not exist: a
//! relay reads the whole message without an answer and closes the connection after the last byte.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use landbridge_proto::id::{Address, ClusterId, JobId, JobKey};
use landbridge_proto::wire::hello::{Dialler, Introduction, LogPosition, Role};
use landbridge_proto::wire::name::NAME_BYTES;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_name;
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, Error, SignatureScheme};

use super::{Finding, progress};
use crate::sys;

/// Time after which an address without an answer is unreachable; relays allow as much time for a
/// hello.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time in which a relay sends nothing before the hello is complete; other servers have sent their
/// greeting by then.
const EARLY_WORDS_WAIT: Duration = Duration::from_millis(300);
/// Number of cluster numbers whose relay names are compared with a certificate.
const CLUSTERS_MAX: u16 = 256;
/// Bytes of an unknown server's greeting that a finding shows at most.
const WORDS_MAX: usize = 60;

/// Checks each of these addresses.
pub fn check(addresses: &[String]) -> Vec<Finding> {
    addresses.iter().map(|address| check_one(address)).collect()
}

fn check_one(address: &str) -> Finding {
    progress(&format!("is there a relay at {address}? (up to {} s)", 3 * PATIENCE.as_secs()));
    match connect(address) {
        Ok(stream) => match certified_cluster(stream) {
            Some(cluster) => Finding::good(format!(
                "{address}: a relay answers other relays there (cluster number {cluster} of its \
                 job)"
            )),
            None => check_hello(address),
        },
        Err(why) => unreachable(address, &why),
    }
}

fn connect(address: &str) -> Result<TcpStream, String> {
    let found = address.to_socket_addrs().map_err(|error| format!("{error}; write HOST:PORT"))?;
    let found: Vec<_> = found.collect();
    let mut why = "the name stands for no address".to_string();
    for one in &found {
        // One address that does not answer leaves time for the others.
        match TcpStream::connect_timeout(one, PATIENCE / found.len() as u32) {
            Ok(stream) => {
                let limits = [
                    stream.set_read_timeout(Some(PATIENCE)),
                    stream.set_write_timeout(Some(PATIENCE)),
                ];
                return limits
                    .into_iter()
                    .try_for_each(|it| it)
                    .map_err(|e| e.to_string())
                    .map(|()| stream);
            }
            Err(error) => why = format!("{one}: {error}"),
        }
    }
    Err(why)
}

/// The finding for an unreachable relay, with the same advice that `landbridge run` gives.
fn unreachable(address: &str, why: &str) -> Finding {
    let port = address.rsplit_once(':').map_or("", |(_, port)| port);
    Finding::bad(
        format!("{address} cannot be reached: {why}"),
        format!(
            "a relay listens only while its job runs: is there one, and is this its address \
             (`listen` for ranks; `wan_listen`, `public` and [[link]] for other relays)?\n\
             a firewall must let TCP port {port} through, from this host to that one"
        ),
    )
}

// --- between relays

/// A verifier that accepts any certificate and stores it.
#[derive(Debug)]
struct CertificateRecorder {
    provider: Arc<CryptoProvider>,
    seen: Mutex<Option<CertificateDer<'static>>>,
}

impl ServerCertVerifier for CertificateRecorder {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        *seen = Some(certificate.clone().into_owned());
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("relays speak TLS 1.3".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// The cluster of the relay that shows its certificate on this connection; `None` if the server
/// shows no relay's certificate.
fn certified_cluster(stream: TcpStream) -> Option<u16> {
    let provider = Arc::new(ring::default_provider());
    let witness =
        Arc::new(CertificateRecorder { provider: provider.clone(), seen: Mutex::default() });
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .ok()?
        .dangerous()
        .with_custom_certificate_verifier(witness.clone())
        .with_no_client_auth();
    let name = ServerName::try_from(relay_name(0)).ok()?;
    let mut connection = ClientConnection::new(Arc::new(config), name).ok()?;
    let mut stream = TimedStream { stream, deadline: Instant::now() + PATIENCE };
    while connection.is_handshaking() {
        // A relay finally refuses a client without a certificate; by then the relay has shown its
        // own certificate.
        if connection.complete_io(&mut stream).is_err() {
            break;
        }
    }
    let seen = witness.seen.lock().unwrap_or_else(PoisonError::into_inner);
    let certificate = ParsedCertificate::try_from(seen.as_ref()?).ok()?;
    (0..CLUSTERS_MAX).find(|&cluster| {
        let name = ServerName::try_from(relay_name(cluster));
        name.is_ok_and(|name| verify_server_name(&certificate, &name).is_ok())
    })
}

/// A connection that ends at a deadline, however few bytes each read brings.
struct TimedStream {
    stream: TcpStream,
    deadline: Instant,
}

impl Read for TimedStream {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(bytes)
    }
}

impl Write for TimedStream {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

fn relay_name(cluster: u16) -> String {
    format!("relay-{cluster}.landbridge")
}

// --- where ranks attach

fn check_hello(address: &str) -> Finding {
    let answer =
        connect(address).and_then(|stream| hello(stream).map_err(|error| error.to_string()));
    match answer {
        Ok(HelloReply::Closed) => Finding::good(format!(
            "{address}: a relay answers ranks there (it has heard a hello, and refused one of \
             another job)"
        )),
        Ok(HelloReply::Words(words)) => {
            no_relay(address, &format!("it answers {:?}", String::from_utf8_lossy(&words)))
        }
        Ok(HelloReply::ClosedEarly) => {
            no_relay(address, "it ends the connection in the midst of a hello")
        }
        Ok(HelloReply::Nothing) => no_relay(address, "it does not answer a hello"),
        Err(why) => unreachable(address, &why),
    }
}

fn no_relay(address: &str, why: &str) -> Finding {
    Finding::bad(
        format!("{address} takes connections, and is no relay: {why}"),
        "is the port right, or does something else listen there, such as a proxy?",
    )
}

#[derive(Debug, PartialEq, Eq)]
enum HelloReply {
    /// The server closed the connection after the last byte of the hello's first message, and not
    /// earlier.
    Closed,
    ClosedEarly,
    Words(Vec<u8>),
    Nothing,
}

fn hello(mut stream: TcpStream) -> std::io::Result<HelloReply> {
    let open = open();
    let (front, last) = open.split_at(open.len() - 1);
    stream.write_all(front)?;
    stream.set_read_timeout(Some(EARLY_WORDS_WAIT))?;
    match read_reply(&mut stream)? {
        HelloReply::Nothing => {}
        HelloReply::Closed => return Ok(HelloReply::ClosedEarly),
        early => return Ok(early),
    }
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(last)?;
    read_reply(&mut stream)
}

fn read_reply(stream: &mut TcpStream) -> std::io::Result<HelloReply> {
    use std::io::ErrorKind::{ConnectionReset, TimedOut, WouldBlock};
    let mut words = [0; WORDS_MAX];
    match stream.read(&mut words) {
        Ok(0) => Ok(HelloReply::Closed),
        Ok(count) => Ok(HelloReply::Words(words[..count].to_vec())),
        Err(error) if matches!(error.kind(), WouldBlock | TimedOut) => Ok(HelloReply::Nothing),
        Err(error) if error.kind() == ConnectionReset => Ok(HelloReply::Closed),
        Err(error) => Err(error),
    }
}

/// The first message of a hello, for a job that does not exist.
fn open() -> Vec<u8> {
    let own = Introduction {
        role: Role::Doctor,
        address: Address::ANONYMOUS,
        incarnation: 0,
        cluster: ClusterId(0),
        pid: std::process::id(),
        eager_window: 0,
        cookie_address: 0,
        cookie: 0,
        name: [0; NAME_BYTES],
        log_position: LogPosition::default(),
    };
    let mut numbers = [0; 48];
    let digits = sys::random_hex(2 * numbers.len()).unwrap_or_default();
    for (byte, digits) in numbers.iter_mut().zip(digits.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).unwrap_or_default();
        *byte = u8::from_str_radix(digits, 16).unwrap_or_default();
    }
    let (mut job, mut nonce) = ([0; 16], [0; 32]);
    job.copy_from_slice(&numbers[..16]);
    nonce.copy_from_slice(&numbers[16..]);
    Dialler::new(JobId(job), JobKey([0; 32]), own, nonce).open().to_vec()
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};

    use landbridge_proto::wire::hello::OPEN_BYTES;
    use rustix::net::{AddressFamily, SocketType, getsockname, socket};

    use super::super::Grade;
    use super::*;

    /// A server that serves two connections, as many as one check of the doctor makes.
    fn server(serve: fn(TcpStream)) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            for stream in listener.incoming().take(2) {
                serve(stream.unwrap());
            }
        });
        address
    }

    #[test]
    fn a_relay_is_distinguished_from_what_only_accepts_connections() {
        let relay = server(|mut stream| {
            let mut open = [0; OPEN_BYTES];
            drop(stream.read_exact(&mut open));
        });
        let found = check_one(&relay);
        assert_eq!(found.grade, Grade::Good, "{}", found.text);
        let ssh = server(|mut stream| {
            drop(stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n"));
            std::thread::sleep(Duration::from_secs(1));
        });
        let found = check_one(&ssh);
        assert_eq!(found.grade, Grade::Bad);
        assert!(found.text.contains("is no relay: it answers \"SSH-2.0"), "{}", found.text);
        let closing = server(drop);
        assert_eq!(check_one(&closing).grade, Grade::Bad);
    }

    #[test]
    fn who_is_not_reached_is_explained() {
        // The bound socket does not listen, and its port cannot be used by any other program
        // meanwhile.
        let taken = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&taken, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = SocketAddr::try_from(getsockname(&taken).unwrap()).unwrap();
        let found = check_one(&address.to_string());
        assert_eq!(found.grade, Grade::Bad);
        let advice = found.advice.unwrap();
        assert!(advice.contains(&format!("TCP port {}", address.port())), "{advice}");
        assert!(check_one("no port").text.contains("write HOST:PORT"));
    }

    #[test]
    fn a_relay_is_known_by_its_certificate() {
        let key = rcgen::KeyPair::generate().unwrap();
        let names = vec![relay_name(1)];
        let certificate = rcgen::CertificateParams::new(names).unwrap().self_signed(&key).unwrap();
        let config =
            rustls::ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_protocol_versions(&[&rustls::version::TLS13])
                .unwrap()
                .with_no_client_auth()
                .with_single_cert(
                    vec![certificate.der().clone()],
                    rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
                )
                .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut connection = rustls::ServerConnection::new(Arc::new(config)).unwrap();
            while connection.is_handshaking() && connection.complete_io(&mut stream).is_ok() {}
        });
        let found = check_one(&address);
        assert!(found.text.contains("other relays there (cluster number 1"), "{}", found.text);
    }
}
