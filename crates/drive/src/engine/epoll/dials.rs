//! The streams to other relays that this relay dials: when each is due, and at which address.

use std::net::SocketAddr;

use landbridge_proto::id::ClusterId;
use landbridge_proto::relay::{Relay, STREAMS_MAX};

use super::connection::{Connection, InputState, Phase, Remote};
use super::pending_connection::Origin;
use super::udp_backoff::UdpBackoff;
use super::udp_upgrade::UdpUpgrade;
use crate::engine::{EngineHost, Peer, Setup};
use crate::sys;

/// The first pause before a relay is dialled again. It doubles up to the configured maximum.
pub const DIAL_MILLIS_MIN: u64 = 100;

/// TCP that connects later suggests an outage: a network that drops only UDP answers sooner.
const OUTAGE_CONNECT_MILLIS: u64 = 900;

/// A stream to a relay that this relay dials.
pub struct Dial {
    pub peer: Peer,
    /// The number of the stream, from 0 on.
    pub stream: u32,
    pub next: usize,
    pub due_millis: Option<u64>,
    pub pause_millis: u64,
    pub pause_millis_max: u64,
    /// The reason for each unreachable address that was logged since the link was last up.
    pub reported: Vec<(String, String)>,
    /// The address at which UDP failed, and to which TCP is dialled next.
    pub fallback: Option<SocketAddr>,
    /// The time at which UDP failed, if TCP may still show that the whole network was down.
    pub udp_failed_millis: Option<u64>,
    /// UDP has failed twice in a row, or is about to be tried for the second time.
    pub is_udp_retry: bool,
    /// The TCP connection is closed in favour of another UDP dial.
    pub is_dropped_for_udp: bool,
    pub udp_backoff: UdpBackoff,
    pub udp_upgrade: UdpUpgrade,
}

impl Dial {
    /// The dials of all streams to `peer`.
    pub fn all(peer: &Peer, setup: &Setup, now_millis: u64) -> Vec<Self> {
        let pause_millis_max = (setup.redial_max.as_millis() as u64).max(DIAL_MILLIS_MIN);
        let new = |stream| Self {
            peer: peer.clone(),
            stream,
            next: 0,
            due_millis: Some(now_millis),
            pause_millis: DIAL_MILLIS_MIN,
            pause_millis_max,
            reported: Vec::new(),
            fallback: None,
            udp_failed_millis: None,
            is_udp_retry: false,
            is_dropped_for_udp: false,
            udp_backoff: UdpBackoff::default(),
            udp_upgrade: UdpUpgrade::default(),
        };
        (0..setup.wan_streams.clamp(1, STREAMS_MAX) as u32).map(new).collect()
    }

    pub fn is_scheduled(&self) -> bool {
        self.due_millis.is_some()
    }

    /// Records the reason for this address, one of at most as many entries as there are addresses,
    /// and returns whether it differs from the last reason.
    pub fn is_new_reason(&mut self, address: String, why: &str) -> bool {
        match self.reported.iter_mut().find(|(known, _)| *known == address) {
            Some((_, reason)) if reason == why => false,
            Some((_, reason)) => {
                *reason = why.to_string();
                true
            }
            None => {
                self.reported.push((address, why.to_string()));
                true
            }
        }
    }

    /// Whether TCP connects so late after UDP failed that the network was down: UDP is retried.
    pub fn suspects_outage(&mut self, now_millis: u64) -> bool {
        let failed = self.udp_failed_millis.take();
        self.is_dropped_for_udp = failed.is_some_and(|at| now_millis > at + OUTAGE_CONNECT_MILLIS);
        self.is_udp_retry |= self.is_dropped_for_udp;
        // The next dial takes the same address, not the one after it.
        self.next -= usize::from(self.is_dropped_for_udp);
        self.is_dropped_for_udp
    }

    pub fn next_address(&mut self) -> Option<SocketAddr> {
        let address = self.peer.addresses.get(self.next % self.peer.addresses.len().max(1));
        self.next += 1;
        address.copied()
    }
}

/// The streams that this relay dials.
pub struct Dials(pub Vec<Dial>);

impl Dials {
    pub fn find(&mut self, cluster: ClusterId, stream: u32) -> Option<&mut Dial> {
        let mut dials = self.0.iter_mut();
        dials.find(|dial| dial.peer.cluster == cluster && dial.stream == stream)
    }

    /// Whether the connection is a TCP dial that has just connected, and is closed in favour of
    /// another UDP dial.
    pub fn prefer_udp(&mut self, connection: &Connection) -> bool {
        let (Phase::Pending(pending), Remote::Ip(_)) = (&connection.phase, &connection.remote)
        else {
            return false;
        };
        let Origin::Dialled(cluster, number) = pending.origin else { return false };
        if connection.input != InputState::Open || !pending.is_connecting() {
            return false;
        }
        let dial = self.find(cluster, number);
        dial.is_some_and(|dial| dial.suspects_outage(sys::now_millis()))
    }

    /// Logs the failure of a UDP dial, once for each reason, unless other streams are up.
    pub fn report_udp_failure(
        &mut self,
        (cluster, stream): (ClusterId, u32),
        address: SocketAddr,
        why: &str,
        relay: &Relay,
        host: &mut dyn EngineHost,
    ) {
        let is_up = relay.peer(cluster).is_some_and(|peer| relay.ports().is_up(peer));
        let Some(dial) = self.find(cluster, stream) else { return };
        if !is_up && dial.is_new_reason(format!("{address}/udp"), why) {
            host.log(format_args!(
                "cannot reach the relay of cluster {} at {address} over UDP: {why}; TCP is tried",
                cluster.0
            ));
        }
    }

    /// Records that a dialled stream has broken. UDP is avoided for a time after several breaks.
    pub fn note_break(
        &mut self,
        cluster: ClusterId,
        stream: u32,
        was_said: bool,
        host: &mut dyn EngineHost,
    ) {
        let Some(dial) = self.find(cluster, stream) else { return };
        dial.udp_upgrade.note_break();
        if let Some(millis) = dial.udp_backoff.note_break(was_said, sys::now_millis()) {
            host.log(format_args!(
                "stream {stream} to the relay of cluster {} breaks again and again over UDP; TCP \
                 is used for the next {} s",
                cluster.0,
                millis / 1_000
            ));
        }
    }

    /// Lets the stream be dialled again after a pause, which grows.
    pub fn schedule(&mut self, cluster: ClusterId, stream: u32) {
        let now = sys::now_millis();
        if let Some(dial) = self.find(cluster, stream) {
            dial.due_millis = Some(now + dial.pause_millis);
            dial.pause_millis = (2 * dial.pause_millis).min(dial.pause_millis_max);
        }
    }
}
