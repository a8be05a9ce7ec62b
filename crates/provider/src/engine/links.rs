//! The links of an engine: transport, peer and state of each link.
//!
//! Frames are sent in `transmit` and received in `receive`. What may never happen: a link touches
//! memory of an operation that has ended.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use landbridge_drive::checksum::Checksum;
use landbridge_drive::link::shm;
use landbridge_drive::link::stream::{Piece, StreamLink};
use landbridge_drive::link::unconfirmed::Unconfirmed;
use landbridge_drive::sys::{self, TcpInfo};
use landbridge_proto::channel::PathId;
use landbridge_proto::endpoint::{PathProperties, PayloadDestination, Peer};
use landbridge_proto::limit;
use landbridge_proto::path::time::Time;
use landbridge_proto::wire::frame::HEADER_BYTES;

use super::carrier::Carrier;
use super::event_token::{EventToken, watch};
use super::identity::Identity;
use super::integrity::IncomingChecksum;
use super::rails::ends_of;

/// Maximum payload of one frame in a ring.
pub const RING_PAYLOAD_MAX: usize =
    shm::FRAME_BYTES_MAX - HEADER_BYTES - limit::KIND_HEADER_BYTES_MAX - limit::CHECKSUM_BYTES;
/// Messages of more bytes are read out of the sender's memory where that is allowed: one copy and a
/// system call instead of two copies.
pub const RING_EAGER_MAX: u32 = 16 << 10;
/// Maximum payload of one frame over a direct TCP connection.
const TCP_PAYLOAD_MAX: u32 = 1 << 20;
/// Messages of up to this many bytes are sent in one frame over TCP.
const TCP_EAGER_MAX: u32 = 1 << 20;
/// First piece of a longer message: the receiver's grant arrives while this piece is under way.
const TCP_FIRST_PIECE: u32 = 256 << 10;

/// How long a probe of a closed window may have no answer. Linux answers two a second, and the
/// second probe of a window comes 0.4 s after the first, the third 0.8 s later.
const PROBE_ANSWER_TIME_MAX: Duration = Duration::from_secs(1);

/// The number of the path through the relay, for every peer. Direct paths have higher numbers.
pub const RELAY_PATH: PathId = PathId(0);

/// What is known of the confirmations of a link's bytes.
#[derive(Default)]
pub struct LinkHealth {
    /// The link has sent bytes that may not be confirmed yet.
    pub has_sent: bool,
    /// Bytes that every check has found unconfirmed.
    unconfirmed: Unconfirmed,
    /// How long they have been so, while confirmations were possible, as of the last check.
    pub unacked_for: Duration,
    /// Nothing is sent over this link while there is another one: confirmations are missing.
    pub is_suspected: bool,
    /// Confirmations have been missing for so long that another connection is dialled in addition.
    pub is_unresponsive: bool,
}

impl LinkHealth {
    /// Updates the time for which bytes in flight on `stream` have not been confirmed. Returns the
    /// round trip time, or `None` if no bytes are in flight.
    fn update(&mut self, stream: &StreamLink) -> Option<Duration> {
        self.unacked_for = Duration::ZERO;
        let has_any = self.has_sent || self.unconfirmed.is_any();
        // The clock first: whatever comes between only makes the bytes younger.
        let now = Instant::now();
        let tcp_info = has_any.then(|| sys::tcp_info(stream.fd())).flatten()?;
        self.note(&tcp_info, now)
    }

    fn note(&mut self, tcp_info: &TcpInfo, now: Instant) -> Option<Duration> {
        self.unacked_for = Duration::ZERO;
        let is_under_way = tcp_info.has_unacked || tcp_info.has_unsent;
        if !is_under_way && tcp_info.unanswered_probes == 0 {
            self.unconfirmed.clear();
            // What waits for the window of the other end leaves without another call.
            self.has_sent = tcp_info.is_zero_window;
            return None;
        }
        // The last confirmation may be long ago because nothing was sent.
        let waiting = self.unconfirmed.note(tcp_info.confirmed_bytes, now);
        let silent = waiting.min(Duration::from_millis(tcp_info.unacked_millis));
        let patience = if is_under_way { Duration::ZERO } else { PROBE_ANSWER_TIME_MAX };
        self.unacked_for = silent.saturating_sub(patience);
        Some(Duration::from_micros(tcp_info.round_trip_micros as u64))
    }
}

pub struct Link {
    pub(super) carrier: Carrier,
    /// The peer at the other end; `None`: the relay.
    pub(super) peer: Option<Peer>,
    /// The number of the path that this link is for its peers.
    pub(super) path: PathId,
    /// The addresses that a direct stream or UDP path joins: the local address and the peer's.
    pub(super) ends: Option<(IpAddr, IpAddr)>,
    /// The peer has dialled this connection.
    pub(super) is_accepted: bool,
    pub(super) health: LinkHealth,
    /// The round of polls in which the link has sent a frame last ([`Bursts`](super::bursts)).
    pub(super) last_round: u64,
    /// When the link came up.
    pub(super) since: Instant,
    /// When something was received over the link; kept only while UDP paths are in use.
    pub(super) last_received: Time,
    /// The checksum of frames on this link.
    pub(super) sum: Checksum,
    /// The arriving payload, as far as it has been summed.
    pub(super) summing: Option<IncomingChecksum>,
    /// Peers with frames for which the link had no free space.
    pub(super) blocked: VecDeque<Peer>,
    /// The peer whose frame the link has sent only in part.
    pub(super) holding: Option<Peer>,
    /// The peer whose payload is arriving, and the destination of the payload.
    pub(super) inside: Option<(Peer, PayloadDestination)>,
    /// The errno with which the sender is given up, as soon as its payload has arrived.
    pub(super) fail_after_payload: Option<i32>,
    /// Operands of an atomic operation that are arriving.
    pub(super) scratch: Vec<u8>,
}

impl Link {
    pub fn new(carrier: Carrier, peer: Option<Peer>) -> Self {
        Self {
            carrier,
            peer,
            path: RELAY_PATH,
            ends: None,
            is_accepted: false,
            health: LinkHealth::default(),
            last_round: 0,
            since: Instant::now(),
            last_received: Time(0),
            sum: Checksum::Off,
            summing: None,
            blocked: VecDeque::new(),
            holding: None,
            inside: None,
            fail_after_payload: None,
            scratch: Vec::new(),
        }
    }

    /// A link over a connection whose hello has succeeded.
    pub fn established(
        carrier: Carrier,
        peer: Option<Peer>,
        is_accepted: bool,
        identity: &Identity,
    ) -> Self {
        let sum = match &carrier {
            // Frames to the relay continue over networks.
            Carrier::Shm(_) if peer.is_some() => identity.settings.integrity_shm,
            Carrier::Shm(_) => identity.settings.integrity,
            Carrier::Stream(_) | Carrier::Recorded(_) | Carrier::Datagram(_) => {
                identity.settings.integrity
            }
            Carrier::Logs(_) => identity.settings.integrity_shm,
            Carrier::Loopback => Checksum::Off,
        };
        let ends = match &carrier {
            Carrier::Stream(stream) if peer.is_some() => ends_of(stream.fd()),
            _ => None,
        };
        Self { sum, ends, is_accepted, ..Self::new(carrier, peer) }
    }

    /// Adds the link to the epoll set, for incoming data.
    pub fn watch(&self, epoll: &OwnedFd, id: usize) -> io::Result<()> {
        self.set_interest(epoll, id, EventFlags::IN)
    }

    pub(super) fn set_interest(
        &self,
        epoll: &OwnedFd,
        id: usize,
        interest: EventFlags,
    ) -> io::Result<()> {
        match &self.carrier {
            Carrier::Shm(link) => watch(epoll, link.fd(), EventToken::Link(id), interest),
            Carrier::Stream(link) => watch(epoll, link.fd(), EventToken::Link(id), interest),
            Carrier::Recorded(link) => watch(epoll, link.fd(), EventToken::Link(id), interest),
            Carrier::Logs(logs) => watch(epoll, logs.fd(), EventToken::Link(id), interest),
            // The engine watches the socket that UDP paths share.
            Carrier::Datagram(_) | Carrier::Loopback => Ok(()),
        }
    }

    pub fn is_stream(&self) -> bool {
        matches!(self.carrier, Carrier::Stream(_))
    }

    /// The number of the socket that a UDP path shares with other UDP paths.
    #[inline]
    pub fn socket(&self) -> Option<usize> {
        match &self.carrier {
            Carrier::Datagram(udp_path) => Some(udp_path.socket()),
            _ => None,
        }
    }

    /// Whether the link has no free space. Epoll reports when there is space again; earlier
    /// attempts are useless.
    #[inline]
    pub fn is_full(&self) -> bool {
        matches!(&self.carrier, Carrier::Stream(stream) if stream.is_holding())
            || (self.is_stream() && !self.blocked.is_empty())
    }

    /// Whether the link delivers frames, as far as is known: the link is neither a suspected UDP
    /// path nor a connection without confirmations for so long that another connection is dialled.
    pub fn works(&self) -> bool {
        match &self.carrier {
            Carrier::Datagram(udp_path) => udp_path.is_open() && !udp_path.is_suspected(),
            _ => !self.health.is_unresponsive,
        }
    }

    /// Records that `peer` has frames for this link, which has no free space.
    #[cold]
    pub(super) fn await_room(&mut self, peer: Peer) {
        if !self.blocked.contains(&peer) {
            self.blocked.push_back(peer);
        }
    }

    /// Updates the time for which bytes in flight have not been confirmed. Returns the round trip
    /// time, or `None` if no bytes are in flight or the link is not a stream.
    pub fn update_health(&mut self) -> Option<Duration> {
        match &self.carrier {
            Carrier::Stream(stream) => self.health.update(stream),
            _ => None,
        }
    }

    /// Begins the checksum of a payload that arrives in `pieces`. The `skip` bytes without a
    /// destination get a piece of their own.
    pub fn begin_sum(&mut self, expected: u32, pieces: &mut Vec<Piece>, skip: &mut usize) {
        self.summing = Some(IncomingChecksum::new(self.sum, expected, pieces, skip));
    }

    /// Sums the bytes that have arrived since the last call, while they are in the caches.
    #[inline]
    pub fn sum_arrived(&mut self) {
        let Some(summing) = &mut self.summing else {
            return;
        };
        let Carrier::Stream(stream) = &self.carrier else {
            return;
        };
        // SAFETY: the stream has written these bytes, in memory that belongs to the engine until
        // the payload is complete.
        unsafe { summing.update(stream.payload_left()) };
    }

    /// Discards the rest of the arriving payload.
    pub fn discard_rest(&mut self) {
        self.summing = None;
        if let Carrier::Stream(stream) = &mut self.carrier {
            stream.discard_rest();
        }
    }

    pub fn describe(&self) -> &'static str {
        match self.carrier {
            Carrier::Shm(_) => "shared memory",
            Carrier::Logs(_) => "message logs",
            Carrier::Stream(_) | Carrier::Recorded(_) => "tcp",
            Carrier::Datagram(_) => "udp",
            Carrier::Loopback => "itself",
        }
    }

    /// Handles a stream that has sent only a part of a frame of `peer`. If the frame's memory may
    /// be released before the rest has left
    /// ([`OutgoingFrame::must_release_memory`](landbridge_proto::endpoint::OutgoingFrame)), the
    /// stream copies the rest.
    pub(super) fn hold(&mut self, peer: Peer, must_release_memory: bool) {
        match &mut self.carrier {
            Carrier::Stream(stream) if must_release_memory => {
                stream.copy_held();
                self.await_room(peer);
            }
            _ => self.holding = Some(peer),
        }
    }

    /// The properties of this path, for the peers that the link reaches.
    pub fn traits(&self, may_pull: bool, copy_max: u32) -> PathProperties {
        let checked = self.sum != Checksum::Off;
        match self.carrier {
            Carrier::Logs(_) => PathProperties { checked, ..LOG_PATH },
            _ if self.peer.is_none() => PathProperties { checked, ..PathProperties::RELAY },
            Carrier::Shm(_) => PathProperties { checked, ..ring_path(may_pull) },
            Carrier::Datagram(ref udp_path) => {
                PathProperties { checked, ..udp_path.traits(copy_max) }
            }
            Carrier::Stream(_) | Carrier::Recorded(_) | Carrier::Loopback => PathProperties {
                payload_max: TCP_PAYLOAD_MAX,
                eager_max: TCP_EAGER_MAX,
                first_piece: TCP_FIRST_PIECE,
                pull: false,
                window: u64::MAX,
                ahead: false,
                lossless: matches!(self.carrier, Carrier::Loopback),
                unbounded: false,
                checked,
                copy_max,
                spare: false,
                silent_loss: false,
                datagram: None,
                reorders: false,
            },
        }
    }
}

/// The properties of the path through message logs, to all processes. A log keeps every frame, in
/// order, until nobody can need it: what recovery retains is all that is retained.
const LOG_PATH: PathProperties = PathProperties {
    lossless: true,
    unbounded: true,
    copy_max: 0,
    reorders: false,
    silent_loss: false,
    ..PathProperties::RELAY
};

/// The properties of a path through shared memory.
fn ring_path(may_pull: bool) -> PathProperties {
    let payload_max = RING_PAYLOAD_MAX as u32;
    let eager_max = if may_pull { RING_EAGER_MAX } else { payload_max };
    PathProperties {
        payload_max,
        eager_max,
        first_piece: payload_max,
        pull: may_pull,
        window: u64::MAX,
        ahead: false,
        lossless: true,
        unbounded: false,
        checked: false,
        copy_max: 0,
        spare: false,
        silent_loss: false,
        datagram: None,
        reorders: false,
    }
}

const _: () = assert!(RING_PAYLOAD_MAX >= limit::RELAY_PAYLOAD_BYTES_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    /// In flight: these many bytes were confirmed before, the last of them so long ago.
    fn in_flight(confirmed_bytes: u64, unacked_millis: u64) -> TcpInfo {
        TcpInfo {
            idle_millis: unacked_millis,
            unacked_millis,
            confirmed_bytes,
            has_unacked: true,
            has_unsent: false,
            is_zero_window: false,
            unanswered_probes: 0,
            round_trip_micros: 100,
            variation_micros: 0,
            bytes_per_second: 0,
        }
    }

    /// Checks at these times in milliseconds, and for how long bytes have been silent by then.
    fn check(checks: &[(u64, TcpInfo, u128)]) {
        let (mut health, start) = (LinkHealth::default(), Instant::now());
        for (millis, tcp_info, expected) in checks {
            health.note(tcp_info, start + Duration::from_millis(*millis));
            assert_eq!(health.unacked_for.as_millis(), *expected, "after {millis} ms");
        }
    }

    #[test]
    fn who_was_busy_finds_other_bytes_in_flight_than_before() {
        check(&[
            (0, in_flight(1_000, 0), 0),
            (2_000, in_flight(1_500, 1_990), 0),
            (2_020, in_flight(1_500, 2_010), 20),
        ]);
    }

    #[test]
    fn bytes_that_are_never_confirmed_are_silent_however_seldom_one_looks() {
        check(&[
            (0, in_flight(1_000, 900), 0),
            (500, in_flight(1_000, 1_400), 500),
            (1_000, in_flight(1_000, 1_900), 1_000),
            (1_500, TcpInfo { has_unacked: false, ..in_flight(1_000, 0) }, 0),
            (2_000, in_flight(1_000, 2_400), 0),
            // What was in flight at two checks was confirmed late, and some of it is still there.
            (2_500, in_flight(1_000, 300), 300),
        ]);
    }

    #[test]
    fn what_waits_for_a_closed_window_is_looked_at_again_until_it_has_left() {
        let closed = |unanswered_probes| TcpInfo {
            has_unacked: false,
            is_zero_window: true,
            unanswered_probes,
            ..in_flight(1_000, 9_000)
        };
        let (mut health, start) = (LinkHealth::default(), Instant::now());
        let mut look = |millis, tcp_info: TcpInfo| {
            health.note(&tcp_info, start + Duration::from_millis(millis));
            (health.has_sent, health.unacked_for.as_millis())
        };
        assert_eq!(look(0, closed(0)), (true, 0), "it may leave without another call");
        assert_eq!(look(9_000, closed(1)), (true, 0), "nobody reads at the other end");
        assert_eq!(look(9_800, closed(1)), (true, 0), "probes are answered seldom");
        assert_eq!(look(10_000, closed(2)), (true, 0));
        assert_eq!(look(10_100, closed(2)), (true, 100), "probes do not arrive");
        assert_eq!(look(10_200, closed(0)), (true, 0));
        assert_eq!(look(10_300, in_flight(1_000, 0)), (true, 0), "the window is open");
        assert_eq!(look(10_900, in_flight(1_000, 600)), (true, 600));
        let idle = TcpInfo { has_unacked: false, ..in_flight(2_000, 0) };
        assert_eq!(look(11_000, idle), (false, 0));
    }
}
