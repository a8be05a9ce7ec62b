//! State of each peer.
//!
//! The engine knows a peer by its name in the address vector or by the address in its frames,
//! whichever comes first. A peer is the endpoint that introduced itself first. An endpoint that
//! uses the same socket address later is another peer. An endpoint that uses the same rank address
//! is refused.

use std::io;

use landbridge_proto::channel::{PATHS_MAX, PathId};
use landbridge_proto::endpoint::Peer;
use landbridge_proto::id::Address;
use landbridge_proto::wire::hello::Introduction;
use landbridge_proto::wire::name::Name;

use super::Engine;
use super::dialling::PathCandidate;
use super::local_endpoint::NameBytes;
use super::path_statistics;
use super::reconnect::Reconnect;
use crate::abi::{Errno, FiAddr};

/// Number of times that a peer is dialled again after it accepted a connection and closed it at
/// once.
const DIAL_RETRIES: u8 = 5;

/// A peer, as this endpoint sees it.
pub struct PeerState {
    pub name: Option<NameBytes>,
    pub send_state: SendState,
    /// The open paths, including paths by which only the peer sends.
    pub open_paths: Vec<OpenPath>,
    /// A candidate path is being tried.
    pub is_dialling: bool,
    /// The candidate is a further address, whose failure says little about the peer.
    pub is_further_address: bool,
    /// Attempts to reopen a lost path.
    pub reconnect: Option<Reconnect>,
    /// Number of times that all candidates may still be tried again.
    pub retries: u8,
    /// The cookie of the endpoint, which differs from that of any earlier endpoint with the same
    /// name.
    instance: Option<u64>,
    /// Candidates not yet tried; the best is the last.
    pub candidates: Option<Vec<PathCandidate>>,
    /// The peer's process id, if the peer's memory may be read.
    pub readable: Option<i32>,
    /// The peer's address-vector number, once looked up.
    pub number: Option<FiAddr>,
    /// Statistics of the peer's closed paths: see `path_statistics`.
    pub closed_paths: Vec<path_statistics::PathStatistics>,
    /// Frames that arrived corrupt, for each open path.
    pub corrupt: [u32; PATHS_MAX],
}

/// An open path of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenPath {
    pub path: PathId,
    pub link: usize,
}

/// State of sending to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendState {
    Unknown,
    /// A connection is being dialled.
    Dialling,
    /// The dial waits until fewer other dials are under way.
    DialQueued,
    /// Frames wait for the relay's connection.
    AwaitRelay,
    /// Frames are sent on this link.
    Up(usize),
    /// Every path is lost, and the engine is reopening a path.
    Reconnecting,
    /// The peer has left, or is given up.
    Closed,
}

impl PeerState {
    pub fn new(name: Option<NameBytes>) -> Self {
        Self {
            name,
            send_state: SendState::Unknown,
            open_paths: Vec::new(),
            is_dialling: false,
            is_further_address: false,
            reconnect: None,
            retries: DIAL_RETRIES,
            instance: None,
            candidates: None,
            readable: None,
            number: None,
            closed_paths: Vec::new(),
            corrupt: [0; PATHS_MAX],
        }
    }
}

impl Engine {
    /// The peer with address-vector number `number`.
    #[inline]
    pub(super) fn peer_of(&mut self, number: FiAddr) -> Result<Peer, Errno> {
        match self.peers.numbered(number) {
            Some(known) => Ok(known),
            None => self.look_up(number),
        }
    }

    #[cold]
    fn look_up(&mut self, number: FiAddr) -> Result<Peer, Errno> {
        let name = self.peers.av.name_of(number).ok_or(Errno::EINVAL)?;
        let peer = self.peer_named(&name).ok_or(Errno::EINVAL)?;
        self.peers.set_number(number, peer);
        Ok(peer)
    }

    /// The peer with this name; `None` if the bytes are no valid name.
    fn peer_named(&mut self, name: &NameBytes) -> Option<Peer> {
        let address =
            if self.own.own_format { Name::parse(name).ok()?.address } else { Address::ANONYMOUS };
        let peer = if address == Address::ANONYMOUS {
            let core = &mut self.core;
            *self.peers.by_name.entry(*name).or_insert_with(|| core.peer(address))
        } else {
            self.core.peer(address)
        };
        self.peers.state(peer).name.get_or_insert(*name);
        Some(peer)
    }

    /// The node of a peer, if its name contains the node.
    pub(super) fn node_of(&self, peer: Peer) -> Option<u64> {
        let name = self.peers[peer].name.filter(|_| self.own.own_format)?;
        Name::parse(&name).ok().map(|name| name.node)
    }

    /// The peer whose frames carry this address.
    #[inline]
    pub(super) fn peer_addressed(&mut self, address: Address) -> Peer {
        let peer = self.core.peer(address);
        self.peers.state(peer);
        peer
    }

    /// Peers with a link, peers whose link is being established, and peers that have sent
    /// something.
    pub(super) fn active_peers(&self) -> Vec<Peer> {
        let all = self.peers.iter().enumerate();
        let is_in_touch = |&(peer, out): &(Peer, SendState)| match out {
            // A peer that has only sent so far must receive the Goodbye, too: it may have more
            // frames for this endpoint.
            SendState::Unknown => self.core.channel(peer).has_been_heard(),
            SendState::Closed => false,
            _ => true,
        };
        all.map(|(index, peer_state)| (Peer(index as u32), peer_state.send_state))
            .filter(is_in_touch)
            .map(|(peer, _)| peer)
            .collect()
    }

    pub(super) fn peer_introduced(&mut self, introduction: &Introduction) -> Option<Peer> {
        if introduction.address == Address::ANONYMOUS {
            let peer = self.peer_named(&introduction.name)?;
            let known = self.peers[peer].instance;
            let is_another = known.is_some_and(|known| known != introduction.cookie);
            if is_another || self.core.channel(peer).failed().is_some() {
                self.forget_name(peer, &introduction.name);
            }
            return self.peer_named(&introduction.name);
        }
        let peer = self.peer_addressed(introduction.address);
        self.peers.state(peer).name.get_or_insert(introduction.name);
        Some(peer)
    }

    /// Binds a peer to the endpoint that has introduced itself first.
    ///
    /// # Errors
    /// Another endpoint uses the peer's address. All data so far was exchanged with the first
    /// endpoint, so the other endpoint cannot continue.
    pub(super) fn recognise(&mut self, peer: Peer, introduction: &Introduction) -> io::Result<()> {
        let peer_state = &mut self.peers[peer];
        if *peer_state.instance.get_or_insert(introduction.cookie) == introduction.cookie {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::AddrInUse, "another endpoint goes by the peer's address"))
    }

    /// Removes the name of an endpoint that has ended, because another endpoint uses the name now
    /// (an IP address and port can be reused). From now on the name means the new endpoint.
    fn forget_name(&mut self, peer: Peer, name: &NameBytes) {
        self.fail_peer(peer, libc::ECONNRESET);
        self.peers.forget_name(peer, name);
    }
}
