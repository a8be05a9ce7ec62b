//! How our QUIC connections are set up: who proves what, how much may be under way, how soon silence counts.

use std::sync::Arc;
use std::time::Duration;

use quinn_proto::congestion::{BbrConfig, ControllerFactory, CubicConfig};
use quinn_proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn_proto::{
    AckFrequencyConfig, ClientConfig, EndpointConfig, IdleTimeout, MtuDiscoveryConfig,
    ServerConfig, TransportConfig, VarInt,
};

use super::window_share::{WINDOW_BYTES, WINDOW_BYTES_MIN};
use crate::link::tls::Identity;

/// A connection on which nothing is heard for this long is broken, a dial on which nothing is heard too: as long as a
/// TCP stream between relays may be silent.
const IDLE_TIMEOUT: Duration = Duration::from_millis(4_000);
/// Relays say something every second; this is for one that is held up.
const KEEP_ALIVE: Duration = Duration::from_millis(1_300);
/// Taken for the round trip until it is known. Decides when a first datagram that is lost goes again: after three times
/// this.
const ROUND_TRIP_UNKNOWN: Duration = Duration::from_millis(100);
/// Largest datagram that is tried: 9000 bytes on the wire, less the headers of IPv6 and UDP.
const DATAGRAM_BYTES_MAX: u16 = 8_952;
/// Datagrams confirmed by one, less one: of every other, as is usual, the way back would carry half as many datagrams as
/// the way there. One that is missing is told of at once, and none waits for more than a delay of QUIC's (25 ms).
const UNACKED_DATAGRAMS_MAX: u32 = 9;
/// Messages of a handshake that come early and are kept: more than a certificate of ours has.
const CRYPTO_BYTES_MAX: usize = 16 << 10;

/// What decides how fast a connection sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// Its estimate of the line.
    #[default]
    Bbr,
    /// Losses.
    Cubic,
}

/// The three configurations quinn-proto wants.
pub struct QuicConfig {
    pub endpoint: Arc<EndpointConfig>,
    pub client: ClientConfig,
    pub server: Arc<ServerConfig>,
}

impl QuicConfig {
    /// # Errors
    /// If the identity is of no use for QUIC.
    pub fn new(identity: &Identity, congestion: Congestion) -> Result<Self, String> {
        let text = |error: &dyn std::fmt::Display| format!("QUIC: {error}");
        let (client, server) = identity.for_quic();
        let client = QuicClientConfig::try_from(client).map_err(|error| text(&error))?;
        let server = QuicServerConfig::try_from(server).map_err(|error| text(&error))?;
        let transport = Arc::new(transport(congestion));
        let mut client = ClientConfig::new(Arc::new(client));
        client.transport_config(transport.clone());
        let mut server = ServerConfig::with_crypto(Arc::new(server));
        server.transport_config(transport);
        let mut endpoint = EndpointConfig::default();
        endpoint.max_udp_payload_size(DATAGRAM_BYTES_MAX).map_err(|error| text(&error))?;
        Ok(Self { endpoint: Arc::new(endpoint), client, server: Arc::new(server) })
    }
}

/// One stream, from the dialler, and nothing else.
fn transport(congestion: Congestion) -> TransportConfig {
    let mut transport = TransportConfig::default();
    let mut discovery = MtuDiscoveryConfig::default();
    discovery.upper_bound(DATAGRAM_BYTES_MAX);
    let mut ack_frequency = AckFrequencyConfig::default();
    ack_frequency.ack_eliciting_threshold(VarInt::from_u32(UNACKED_DATAGRAMS_MAX));
    // What a connection may send before it has been let in; `WindowShare` decides later.
    let first = VarInt::from_u32(WINDOW_BYTES_MIN as u32);
    let window = VarInt::from_u32(WINDOW_BYTES as u32);
    let idle_timeout = VarInt::from_u32(IDLE_TIMEOUT.as_millis() as u32);
    let controller: Arc<dyn ControllerFactory + Send + Sync> = match congestion {
        Congestion::Bbr => Arc::new(BbrConfig::default()),
        Congestion::Cubic => Arc::new(CubicConfig::default()),
    };
    transport
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None)
        .stream_receive_window(window)
        .receive_window(first)
        .send_window(WINDOW_BYTES_MIN)
        .max_idle_timeout(Some(IdleTimeout::from(idle_timeout)))
        .keep_alive_interval(Some(KEEP_ALIVE))
        .initial_rtt(ROUND_TRIP_UNKNOWN)
        .mtu_discovery_config(Some(discovery))
        .ack_frequency_config(Some(ack_frequency))
        .crypto_buffer_size(CRYPTO_BYTES_MAX)
        .allow_spin(false)
        .congestion_controller_factory(controller);
    transport
}
