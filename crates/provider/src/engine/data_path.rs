//! What sending and receiving need: the protocol, the links to peers, and the memory that frames
//! are copied from and to.
//!
//! What enters: frames of one link, and the protocol's frames for one peer. What leaves: bytes on
//! links, completions, and an error if the link has failed.
//!
//! What may never happen: a method of [`DataPath`] dials, closes the last path of a peer, or gives
//! a peer up. [`Engine`](super::Engine), which owns the data path, does that. While a link is being
//! read or written it is outside of the table of links, and ends and dials would miss it. So an
//! error of the link is a return value, and whatever concerns other links waits in
//! [`PendingPeers`] until the link is back in the table.

use landbridge_proto::endpoint::{Endpoint, Peer};

use super::application::Application;
use super::bursts::Bursts;
use super::datagrams::Datagrams;
use super::identity::Identity;
use super::link_table::LinkTable;
use super::local_endpoint::LocalEndpoint;
use super::log_pieces::LogPieces;
use super::memory::Bytes;
use super::path_manager::PathManager;
use super::path_report::PathReport;
use super::peer_table::PeerTable;
use super::pending_peers::PendingPeers;
use super::receive_buffers::ReceiveBuffers;
use super::recording::Recording;
use crate::abi::{self, Errno, FiAddr};
use crate::tick_clock::Clock;

/// The state that changes when a frame is sent or received.
pub struct DataPath {
    pub(super) identity: &'static Identity,
    pub(super) own: LocalEndpoint,
    pub(super) clock: Clock,
    pub(super) application: Application,
    pub(super) core: Endpoint<Bytes>,
    pub(super) peers: PeerTable,
    pub(super) links: LinkTable,
    pub(super) pending: PendingPeers,
    pub(super) buffers: ReceiveBuffers,
    /// UDP paths, if the setting `udp` is on.
    pub(super) datagrams: Option<Box<Datagrams>>,
    /// State of recording and replay, if this process is recorded.
    pub(super) recording: Option<Recording>,
    /// Where sending pauses, if messages go to other nodes by logs.
    pub(super) pieces: LogPieces,
    /// Small frames that leave together.
    pub(super) bursts: Bursts,
}

impl DataPath {
    /// The parts of the data path that change together when a path opens, changes or closes.
    #[inline]
    pub(super) fn paths(&mut self) -> PathManager<'_> {
        PathManager {
            identity: self.identity,
            own: &self.own,
            core: &mut self.core,
            peers: &mut self.peers,
            links: &mut self.links,
            uses_udp: self.datagrams.is_some(),
        }
    }

    /// The statistics of all paths.
    pub(super) fn path_report(&self) -> PathReport<'_> {
        let uses_udp = self.datagrams.is_some();
        PathReport { core: &self.core, peers: &self.peers, links: &self.links, uses_udp }
    }

    /// The peer with address-vector number `number`.
    #[inline]
    pub(super) fn peer_of(&mut self, number: FiAddr) -> Result<Peer, Errno> {
        self.peers.numbered(&mut self.core, number)
    }

    #[inline]
    pub(super) fn source_of(&mut self, number: FiAddr) -> Result<Option<Peer>, Errno> {
        if number == abi::ADDR_UNSPEC { Ok(None) } else { self.peer_of(number).map(Some) }
    }
}
