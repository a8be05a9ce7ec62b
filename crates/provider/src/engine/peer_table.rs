//! The peers of an engine: the state of each, and the names and numbers by which they are found.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut, Index, IndexMut};
use std::sync::Arc;

use landbridge_proto::endpoint::Peer;

use super::local_endpoint::NameBytes;
use super::peer_state::{PeerState, SendState};
use super::rails::Rail;
use crate::abi::FiAddr;
use crate::av::Av;

pub struct PeerTable {
    /// Indexed by the peer numbers of the protocol.
    states: Vec<PeerState>,
    pub av: Arc<Av>,
    pub by_name: BTreeMap<NameBytes, Peer>,
    /// Peers by address-vector number; `u32::MAX` marks an unknown peer.
    by_number: Vec<u32>,
    /// Further addresses of peers.
    pub rails: Vec<Rail>,
    /// Some peer has several paths: the protocol needs the time.
    pub has_several: bool,
}

impl PeerTable {
    pub fn new(av: Arc<Av>) -> PeerTable {
        PeerTable {
            states: Vec::new(),
            av,
            by_name: BTreeMap::new(),
            by_number: Vec::new(),
            rails: Vec::new(),
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

    /// The peer with an address-vector number, if it was looked up before.
    #[inline]
    pub fn numbered(&self, number: FiAddr) -> Option<Peer> {
        self.by_number.get(number as usize).filter(|&&known| known != u32::MAX).map(|&it| Peer(it))
    }

    /// Records the peer that has an address-vector number.
    pub fn set_number(&mut self, number: FiAddr, peer: Peer) {
        let index = number as usize;
        if self.by_number.len() <= index {
            self.by_number.resize(index + 1, u32::MAX);
        }
        self.by_number[index] = peer.0;
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
        self.rails.retain(|rail| states[rail.peer.0 as usize].send_state != SendState::Closed);
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
