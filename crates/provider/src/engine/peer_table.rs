//! The peers of an engine: the state of each, and the names and numbers by which they are found.
//!
//! What enters: names and numbers of the address vector, addresses in frames, introductions in
//! hellos, and further addresses that peers advertise. What leaves: peers by the numbers of the
//! protocol. What may never happen: two endpoints are one peer.

use std::collections::BTreeMap;
use std::io;
use std::ops::{Deref, DerefMut, Index, IndexMut};
use std::sync::Arc;
use std::time::Instant;

use landbridge_proto::endpoint::{Endpoint, Peer};
use landbridge_proto::id::Address;
use landbridge_proto::wire::hello::Introduction;
use landbridge_proto::wire::kind_header::AdvertisedAddress;
use landbridge_proto::wire::name::Name;

use super::identity::Identity;
use super::local_endpoint::NameBytes;
use super::memory::Bytes;
use super::peer_state::{PeerState, SendState};
use super::rails::{RailTable, advertised_address};
use super::reconnect::{Reconnect, is_handshake_failure, is_network_down};
use crate::abi::{Errno, FiAddr};
use crate::av::Av;

pub struct PeerTable {
    /// Indexed by the peer numbers of the protocol.
    states: Vec<PeerState>,
    av: Arc<Av>,
    /// Names are Landbridge names; otherwise each name is a `sockaddr_in`.
    own_format: bool,
    by_name: BTreeMap<NameBytes, Peer>,
    /// Peers by address-vector number; `u32::MAX` marks an unknown peer.
    by_number: Vec<u32>,
    /// Further addresses of peers.
    pub rails: RailTable,
    /// Peers with a lost path that the engine reopens.
    pub reconnects: Vec<Peer>,
    /// Some peer has several paths: the protocol needs the time.
    pub has_several: bool,
}

impl PeerTable {
    pub fn new(av: Arc<Av>, own_format: bool) -> PeerTable {
        PeerTable {
            states: Vec::new(),
            av,
            own_format,
            by_name: BTreeMap::new(),
            by_number: Vec::new(),
            rails: RailTable::default(),
            reconnects: Vec::new(),
            has_several: false,
        }
    }

    /// The state of a peer, which is a new one if nothing is known of it.
    #[inline]
    pub fn state(&mut self, peer: Peer) -> &mut PeerState {
        let index = peer.0 as usize;
        while self.states.len() <= index {
            self.states.push(PeerState::new(None));
        }
        &mut self.states[index]
    }

    /// All peers.
    pub fn all(&self) -> impl Iterator<Item = Peer> + use<> {
        (0..self.states.len() as u32).map(Peer)
    }

    /// The peer with address-vector number `number`.
    ///
    /// # Errors
    /// The address vector has no such number, or the name there is invalid.
    #[inline]
    pub fn numbered(&mut self, core: &mut Endpoint<Bytes>, number: FiAddr) -> Result<Peer, Errno> {
        match self.by_number.get(number as usize).filter(|&&known| known != u32::MAX) {
            Some(&known) => Ok(Peer(known)),
            None => self.look_up(core, number),
        }
    }

    #[cold]
    fn look_up(&mut self, core: &mut Endpoint<Bytes>, number: FiAddr) -> Result<Peer, Errno> {
        let name = self.av.name_of(number).ok_or(Errno::EINVAL)?;
        let peer = self.named(core, &name).ok_or(Errno::EINVAL)?;
        let index = number as usize;
        if self.by_number.len() <= index {
            self.by_number.resize(index + 1, u32::MAX);
        }
        self.by_number[index] = peer.0;
        Ok(peer)
    }

    /// The peer with this name; `None` if the bytes are no valid name.
    pub fn named(&mut self, core: &mut Endpoint<Bytes>, name: &NameBytes) -> Option<Peer> {
        let address =
            if self.own_format { Name::parse(name).ok()?.address } else { Address::ANONYMOUS };
        let peer = if address == Address::ANONYMOUS {
            *self.by_name.entry(*name).or_insert_with(|| core.peer(address))
        } else {
            core.peer(address)
        };
        self.state(peer).name.get_or_insert(*name);
        Some(peer)
    }

    /// The peer whose frames carry this address.
    #[inline]
    pub fn addressed(&mut self, core: &mut Endpoint<Bytes>, address: Address) -> Peer {
        let peer = core.peer(address);
        self.state(peer);
        peer
    }

    /// The node of a peer, if its name contains the node.
    pub fn node_of(&self, peer: Peer) -> Option<u64> {
        let name = self[peer].name.filter(|_| self.own_format)?;
        Name::parse(&name).ok().map(|name| name.node)
    }

    /// Whether the process that answered is the dialled peer, whose frames carry `address`.
    /// Addresses are reused: an IP address and port after the end of a process; and processes
    /// without the Landbridge launcher may all belong to one job.
    pub fn is_expected(&self, peer: Peer, address: Address, introduction: &Introduction) -> bool {
        let name = self[peer].name;
        // A socket address says less than a name, and the same endpoint may have several.
        let is_named = !self.own_format || name.is_none_or(|name| name == introduction.name);
        introduction.address == address && is_named
    }

    /// Peers with a link, peers whose link is being established, and peers that have sent
    /// something.
    pub fn active(&self, core: &Endpoint<Bytes>) -> Vec<Peer> {
        let is_in_touch = |peer: &Peer| match self[*peer].send_state {
            // A peer that has only sent so far must receive the Goodbye, too: it may have more
            // frames for this endpoint.
            SendState::Unknown => core.channel(*peer).has_been_heard(),
            SendState::Closed => false,
            _ => true,
        };
        self.all().filter(is_in_touch).collect()
    }

    /// The peer's address-vector number, if it has one.
    pub fn number_of(&mut self, peer: Peer) -> Option<FiAddr> {
        let state = &mut self.states[peer.0 as usize];
        if state.number.is_none() {
            state.number = self.av.addr_of(state.name.as_ref()?);
        }
        state.number
    }

    /// Forgets the further addresses of peers that are given up.
    pub fn drop_rails_of_closed(&mut self) {
        let states = &self.states;
        self.rails.retain(|peer| states[peer.0 as usize].send_state != SendState::Closed);
    }

    /// Adds the further address of `peer` in an advertisement, if the address may lead to another
    /// node. Returns false if the address was not added.
    pub fn add_rail(
        &mut self,
        peer: Peer,
        advertisement: &AdvertisedAddress,
        identity: &Identity,
        own_name: &NameBytes,
    ) -> bool {
        let is_ours = Some(*own_name) < self[peer].name;
        let address = advertised_address(advertisement);
        let ip = address.ip();
        let is_allowed = identity.settings.rail_networks.iter().any(|network| network.contains(ip));
        // An address that both nodes have leads to this node itself: bridges of containers have the
        // same address on every host.
        let is_elsewhere = Some(identity.node) != self.node_of(peer);
        if !is_allowed || (is_elsewhere && identity.rails.contains(&ip)) {
            return false;
        }
        self.rails.add(peer, address, is_ours, Instant::now())
    }

    /// Begins to reopen a path of `peer`, unless that is under way. `has_lost`: a path was lost,
    /// and not only suspected. Returns whether the peer is to be dialled now.
    pub fn begin_reconnect(&mut self, peer: Peer, has_lost: bool) -> bool {
        let peer_state = &mut self.states[peer.0 as usize];
        if let Some(reconnect) = &mut peer_state.reconnect {
            reconnect.has_lost |= has_lost;
            return false;
        }
        peer_state.reconnect = Some(Reconnect::new(has_lost, Instant::now()));
        if !self.reconnects.contains(&peer) {
            self.reconnects.push(peer);
        }
        !peer_state.is_dialling
    }

    /// Records that an attempt to reach `peer` has failed.
    pub fn note_attempt(&mut self, peer: Peer, error: &io::Error) {
        let peer_state = &mut self.states[peer.0 as usize];
        let may_come = is_network_down(error) || is_handshake_failure(error);
        if peer_state.reconnect.is_none() && may_come && peer_state.open_paths.is_empty() {
            // The network fails before the first path to this peer was open. The engine waits for
            // the network as after the loss of a path.
            peer_state.reconnect = Some(Reconnect::new(true, Instant::now()));
            self.reconnects.push(peer);
        }
        if peer_state.is_further_address {
            // A further address may never have had a listener, so its failure says nothing about
            // the peer.
            return;
        }
        if let Some(reconnect) = &mut peer_state.reconnect {
            reconnect.note(error);
        }
    }

    /// Removes a name, which another endpoint uses from now on, and the numbers of its peer.
    pub fn forget_name(&mut self, peer: Peer, name: &NameBytes) {
        self.by_name.remove(name);
        for number in &mut self.by_number {
            if *number == peer.0 {
                *number = u32::MAX;
            }
        }
    }
}

impl Deref for PeerTable {
    type Target = [PeerState];

    fn deref(&self) -> &[PeerState] {
        &self.states
    }
}

impl DerefMut for PeerTable {
    fn deref_mut(&mut self) -> &mut [PeerState] {
        &mut self.states
    }
}

impl Index<Peer> for PeerTable {
    type Output = PeerState;

    #[inline]
    fn index(&self, peer: Peer) -> &PeerState {
        &self.states[peer.0 as usize]
    }
}

impl IndexMut<Peer> for PeerTable {
    #[inline]
    fn index_mut(&mut self, peer: Peer) -> &mut PeerState {
        &mut self.states[peer.0 as usize]
    }
}
