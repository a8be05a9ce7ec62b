//! What agents do for logs between nodes: they carry frames, and compare what moved ranks send
//! again.
//!
//! In: the file with the logs of this node's ranks, messages of other agents. Out: messages to
//! them. What may never happen: an answer for one of the two parts is taken for one of the other.

use std::rc::Rc;
use std::time::Instant;

use super::ended_peers::EndedPeers;
use super::frame_carrier::FrameCarrier;
use super::node_cut::NodeCut;
use super::node_logs::NodeLogs;
use super::parent_agent::ParentAgent;
use crate::control::FrameTransfer;

pub struct CarriedLogs {
    pub carrier: FrameCarrier,
    ended_peers: EndedPeers,
}

impl CarriedLogs {
    /// Nothing is carried yet. `cut`: see [`FrameCarrier::new`].
    pub fn new(logs: Rc<NodeLogs>, cut: Option<Rc<NodeCut>>) -> CarriedLogs {
        let ended_peers = EndedPeers::new(logs.clone());
        CarriedLogs { carrier: FrameCarrier::new(logs, cut), ended_peers }
    }

    /// When something is due.
    pub fn next_time(&self) -> Option<Instant> {
        self.carrier.next_time().into_iter().chain(self.ended_peers.next_time()).min()
    }

    /// Does what is due.
    pub fn advance(&mut self, parent: &mut ParentAgent) {
        self.carrier.advance(parent);
        self.ended_peers.advance(Instant::now(), parent);
    }

    /// Whether what a rank has sent that has ended was compared with what ranks have got that ended
    /// before, if it has moved.
    pub fn is_compared(&mut self, rank: u32, parent: &mut ParentAgent) -> bool {
        self.ended_peers.is_compared(rank, Instant::now(), parent)
    }

    /// Handles what another agent says about a log of, or to, a rank of this node.
    pub fn handle(&mut self, transfer: FrameTransfer, parent: &mut ParentAgent) {
        match self.ended_peers.handle(&transfer) {
            Ok(true) => (),
            Ok(false) => self.carrier.handle_message(transfer, parent),
            Err(error) => parent.fail(format!("{error:#}")),
        }
    }
}
