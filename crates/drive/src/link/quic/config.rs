//! The configuration of QUIC connections: authentication, windows, and timeouts.

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

/// A connection on which nothing is heard for this long is broken, and so is a dial: as long as a
/// TCP stream between relays may be silent.
const IDLE_TIMEOUT: Duration = Duration::from_millis(4_000);
/// The keepalive interval of QUIC. Relays send a keepalive of their own every second; this one
/// serves a relay that is delayed.
const KEEP_ALIVE: Duration = Duration::from_millis(1_300);
/// The assumed round trip until it is measured. A lost first datagram is retransmitted after three
/// times this.
const ROUND_TRIP_UNKNOWN: Duration = Duration::from_millis(100);
/// The largest datagram that is probed, in bytes: 9000 bytes on the wire, less the headers of IPv6
/// and UDP.
const DATAGRAM_BYTES_MAX: u16 = 8_952;
/// The datagrams that one acknowledgement covers, less one. With an acknowledgement for every
/// second datagram, as is usual, the return path would carry half as many datagrams as the forward
/// path. A missing datagram is reported at once, and no acknowledgement waits for longer than
/// QUIC's delay (25 ms).
const UNACKED_DATAGRAMS_MAX: u32 = 9;
/// The bytes of handshake messages that arrive early and are kept: more than a certificate of this
/// project has.
const CRYPTO_BYTES_MAX: usize = 16 << 10;

/// The congestion control of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// BBR: follows an estimate of the path.
    #[default]
    Bbr,
    /// CUBIC: follows losses.
    Cubic,
}

/// The three configurations that quinn-proto needs.
pub struct QuicConfig {
    pub endpoint: Arc<EndpointConfig>,
    pub client: ClientConfig,
    pub server: Arc<ServerConfig>,
}

impl QuicConfig {
    /// Creates the configurations.
    ///
    /// # Errors
    /// If the identity cannot be used for QUIC.
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

/// The transport configuration: one stream, opened by the dialler, and nothing else.
fn transport(congestion: Congestion) -> TransportConfig {
    let mut transport = TransportConfig::default();
    let mut discovery = MtuDiscoveryConfig::default();
    discovery.upper_bound(DATAGRAM_BYTES_MAX);
    let mut ack_frequency = AckFrequencyConfig::default();
    ack_frequency.ack_eliciting_threshold(VarInt::from_u32(UNACKED_DATAGRAMS_MAX));
    // The bytes that a connection may send before its hello; `WindowShare` decides later.
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
