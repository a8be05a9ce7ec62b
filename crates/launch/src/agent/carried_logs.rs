//! What agents do for logs between nodes: they carry frames, and compare what moved ranks send
//! again.
//!
//! In: the file with the logs of this node's ranks, messages of other agents. Out: messages to
//! them. What may never happen: an answer for one of the two parts is taken for one of the other.

use std::rc::Rc;
use std::time::Instant;

use super::end_comparison::{AnswerUse, EndComparisons};
use super::frame_carrier::FrameCarrier;
use super::node_cut::NodeCut;
use super::node_logs::NodeLogs;
use super::parent_agent::ParentAgent;
use crate::control::FrameTransfer;

pub struct CarriedLogs {
    pub carrier: FrameCarrier,
    end: EndComparisons,
}

impl CarriedLogs {
    /// Nothing is carried yet. `cut`: see [`FrameCarrier::new`].
    pub fn new(logs: Rc<NodeLogs>, cut: Option<Rc<NodeCut>>) -> CarriedLogs {
        let end = EndComparisons::new(logs.clone());
        CarriedLogs { carrier: FrameCarrier::new(logs, cut), end }
    }

    /// When something is due.
    pub fn next_time(&self) -> Option<Instant> {
        self.carrier.next_time().into_iter().chain(self.end.next_time(Instant::now())).min()
    }

    /// Does what is due.
    pub fn advance(&mut self, parent: &mut ParentAgent) {
        self.carrier.advance(parent);
        self.end.advance(Instant::now(), parent);
    }

    /// Whether what a rank has sent that has ended was compared with what it sent before it moved,
    /// if it has.
    pub fn is_compared(&mut self, rank: u32, parent: &mut ParentAgent) -> bool {
        self.end.is_compared(rank, Instant::now(), parent)
    }

    /// Handles what another agent says about a log of, or to, a rank of this node.
    pub fn handle(&mut self, transfer: FrameTransfer, parent: &mut ParentAgent) {
        let pair = (transfer.from, transfer.to);
        match self.end.handle(&transfer, Instant::now()) {
            Ok(AnswerUse::Nothing) => self.carrier.handle_message(transfer, parent),
            Ok(AnswerUse::Awaited) => (),
            Ok(AnswerUse::Compared(position)) => self.carrier.note_compared(pair, position),
            Err(error) => parent.fail(format!("{error:#}")),
        }
    }
}
