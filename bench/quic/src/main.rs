//! Messages there and back over QUIC (quinn), over one stream or as datagrams: what a program that used QUIC for its
//! messages would see.
//!
//! ```text
//! landbridge-bench-quic serve ADDRESS cubic|bbr stream|datagrams
//! landbridge-bench-quic ping ADDRESS cubic|bbr stream|datagrams SECONDS SIZE...
//! ```
//!
//! `ping` prints a line for each size: bytes, rounds, MB/s as IMB PingPong counts them (the size over half the time of a
//! round). IPv4 alone. Windows are large enough for the line; certificates are not verified, since nothing is secret here.

mod datagrams;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use datagrams::Exchange;
use quinn::congestion::{BbrConfig, CubicConfig};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    ClientConfig, Endpoint, RecvStream, SendStream, ServerConfig, TransportConfig, VarInt,
};
use rustls::DigitallySignedStruct;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};

/// What may be under way: 250 ms of 1 Gbit/s.
const WINDOW_BYTES: u32 = 32 << 20;
/// Rounds before those that are timed, as IMB has them.
const WARM_UP: usize = 2;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["serve", address, congestion, way] => serve(address.parse()?, congestion, way).await,
        ["ping", address, congestion, way, seconds, ref sizes @ ..] => {
            let sizes = sizes.iter().map(|size| size.parse()).collect::<Result<Vec<_>, _>>()?;
            let seconds = Duration::from_secs_f64(seconds.parse()?);
            ping(address.parse()?, congestion, way, seconds, &sizes).await
        }
        _ => bail!("serve|ping ADDRESS cubic|bbr stream|datagrams [SECONDS SIZE...]"),
    }
}

async fn serve(address: SocketAddr, congestion: &str, way: &str) -> Result<()> {
    let own = rcgen::generate_simple_self_signed(vec!["bench".to_string()])?;
    let key = PrivatePkcs8KeyDer::from(own.signing_key.serialize_der());
    let crypto = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key.into())?;
    let crypto = Arc::new(QuicServerConfig::try_from(crypto)?);
    let mut config = ServerConfig::with_crypto(crypto);
    config.transport_config(transport(congestion)?);
    let endpoint = Endpoint::server(config, address)?;
    while let Some(incoming) = endpoint.accept().await {
        let connection = incoming.await?;
        let mut ends = match way {
            "datagrams" => Ends::Datagrams(Exchange::new(connection)?),
            _ => {
                let (send, receive) = connection.accept_bi().await?;
                Ends::Stream(send, receive)
            }
        };
        let mut bytes = Vec::new();
        while ends.take(&mut bytes).await.is_ok() {
            ends.give(&bytes).await?;
        }
    }
    Ok(())
}

async fn ping(
    to: SocketAddr,
    congestion: &str,
    way: &str,
    time: Duration,
    sizes: &[usize],
) -> Result<()> {
    let crypto = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody(provider())))
        .with_no_client_auth();
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(crypto)?));
    config.transport_config(transport(congestion)?);
    let mut endpoint = Endpoint::client(SocketAddr::from(([0, 0, 0, 0], 0)))?;
    endpoint.set_default_client_config(config);
    let connection = endpoint.connect(to, "bench")?.await?;
    let mut ends = match way {
        "datagrams" => Ends::Datagrams(Exchange::new(connection)?),
        _ => {
            let (send, receive) = connection.open_bi().await?;
            Ends::Stream(send, receive)
        }
    };
    let mut back = Vec::new();
    for &size in sizes {
        let bytes = vec![7; size];
        let (mut rounds, mut started) = (0, Instant::now());
        while rounds < WARM_UP || (rounds == WARM_UP || started.elapsed() < time) {
            if rounds == WARM_UP {
                started = Instant::now();
            }
            ends.give(&bytes).await?;
            ends.take(&mut back).await?;
            rounds += 1;
        }
        let half_round = started.elapsed().as_secs_f64() / (rounds - WARM_UP) as f64 / 2.0;
        println!("{size} {} {:.3}", rounds - WARM_UP, size as f64 / half_round / 1e6);
    }
    Ok(())
}

/// What carries the messages.
enum Ends {
    Stream(SendStream, RecvStream),
    Datagrams(Exchange),
}

impl Ends {
    async fn give(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Stream(send, _) => give(send, bytes).await,
            Self::Datagrams(exchange) => exchange.give(bytes).await,
        }
    }

    async fn take(&mut self, bytes: &mut Vec<u8>) -> Result<()> {
        match self {
            Self::Stream(_, receive) => take(receive, bytes).await,
            Self::Datagrams(exchange) => exchange.take(bytes).await,
        }
    }
}

/// A message on a stream: how long it is, and its bytes.
async fn give(send: &mut SendStream, bytes: &[u8]) -> Result<()> {
    send.write_all(&(bytes.len() as u32).to_le_bytes()).await?;
    Ok(send.write_all(bytes).await?)
}

async fn take(receive: &mut RecvStream, bytes: &mut Vec<u8>) -> Result<()> {
    let mut size = [0; 4];
    receive.read_exact(&mut size).await?;
    bytes.resize(u32::from_le_bytes(size) as usize, 0);
    Ok(receive.read_exact(bytes).await?)
}

fn transport(congestion: &str) -> Result<Arc<TransportConfig>> {
    let mut config = TransportConfig::default();
    config.stream_receive_window(VarInt::from_u32(WINDOW_BYTES));
    config.receive_window(VarInt::from_u32(WINDOW_BYTES));
    config.send_window(WINDOW_BYTES as u64);
    config.datagram_receive_buffer_size(Some(WINDOW_BYTES as usize));
    // Less than the window of the link, so that congestion control and not this queue decides.
    config.datagram_send_buffer_size(1 << 20);
    match congestion {
        "cubic" => config.congestion_controller_factory(Arc::new(CubicConfig::default())),
        "bbr" => config.congestion_controller_factory(Arc::new(BbrConfig::default())),
        other => bail!("there is no congestion control called {other}"),
    };
    Ok(Arc::new(config))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Takes every certificate.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
