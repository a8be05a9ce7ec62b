//! Path candidates: the ways by which a peer may be reached, the best first.
//!
//! What enters: the names of this endpoint and of the peer, and the settings of this process. What
//! leaves: candidates for `dialling`: shared memory on the same node, TCP inside the cluster, the
//! cluster's relay otherwise. What may never happen: a recorded process gets another candidate than
//! itself and its relay.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use landbridge_proto::wire::name::Name;

use super::identity::Identity;
use super::local_endpoint::{LocalEndpoint, NameBytes, sockaddr_parts, unix_name};

/// A candidate path to a peer.
#[derive(Clone, Debug)]
pub enum PathCandidate {
    Loopback,
    Shm(String),
    Tcp(SocketAddr),
    /// A further address, for the case that the first TCP address does not answer.
    Further(SocketAddr),
    Relay,
}

/// The addresses of an endpoint without a relay, according to the endpoint's name.
struct DirectAddresses {
    address: SocketAddr,
    further: Vec<SocketAddr>,
    unix: String,
    /// Whether the endpoint is on this node.
    is_on_this_node: bool,
}

/// What decides about the candidates of one peer.
pub struct CandidateSearch<'a> {
    pub identity: &'a Identity,
    pub own: &'a LocalEndpoint,
    /// The peer's name, if it is known.
    pub name: Option<NameBytes>,
    /// The peer has an address in the job, so that a relay can reach it.
    pub is_addressed: bool,
    /// The peer has an open path, including suspected ones.
    pub has_open_path: bool,
    /// The peer has an open path that may carry frames.
    pub has_usable_path: bool,
}

impl CandidateSearch<'_> {
    /// The candidates in reverse order: the best is the last. `is_tried`: an address that is being
    /// tried as an advertised rail.
    pub fn candidates(&self, is_tried: impl Fn(SocketAddr) -> bool) -> Vec<PathCandidate> {
        let CandidateSearch { identity, own, .. } = *self;
        let kinds = identity.settings.kinds;
        let mut candidates = Vec::new();
        // The relay is a candidate only for a peer without any other usable path, and is needed
        // once.
        let has_relay = kinds.relay && !identity.relays.is_empty();
        if has_relay && self.is_addressed && !self.has_usable_path {
            candidates.push(PathCandidate::Relay);
        }
        let Some(bytes) = self.name else {
            return candidates;
        };
        if bytes == own.name {
            return vec![PathCandidate::Loopback];
        }
        if identity.recovers {
            return candidates;
        }
        let Some(direct) = DirectAddresses::of(&bytes, identity, own.own_format) else {
            return candidates;
        };
        if kinds.tcp && direct.address.port() != 0 {
            if !self.has_open_path && !direct.is_on_this_node {
                let further = direct.further.iter().rev().filter(|address| {
                    identity.is_further_elsewhere(address.ip()) && !is_tried(**address)
                });
                candidates.extend(further.map(|&address| PathCandidate::Further(address)));
            }
            candidates.push(PathCandidate::Tcp(direct.address));
        }
        if kinds.shm && direct.is_on_this_node {
            candidates.push(PathCandidate::Shm(direct.unix));
        }
        candidates
    }
}

impl DirectAddresses {
    fn of(bytes: &NameBytes, identity: &Identity, own_format: bool) -> Option<Self> {
        if !own_format {
            let (ip, port) = sockaddr_parts(bytes);
            let is_on_this_node = ip.is_loopback() || IpAddr::V4(ip) == identity.ip;
            let address = SocketAddr::from((ip, port));
            let unix = unix_name(identity, false, 0, port);
            return Some(Self { address, further: Vec::new(), unix, is_on_this_node });
        }
        let name = Name::parse(bytes).ok()?;
        if name.cluster != identity.cluster {
            return None;
        }
        let ip = Ipv6Addr::from(name.ip);
        let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
        let unix = unix_name(identity, true, name.unique, 0);
        let known = name.further.into_iter().filter(|further| *further != [0; 4]);
        let further = known.map(|further| SocketAddr::from((further, name.port))).collect();
        let (address, is_on_this_node) =
            (SocketAddr::new(ip, name.port), name.node == identity.node);
        Some(Self { address, further, unix, is_on_this_node })
    }
}
