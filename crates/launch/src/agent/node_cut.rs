//! What another node must know of all ranks of this node at once, if a spare node may take them
//! over and their senders log messages.
//!
//! Ranks of a node exchange messages through shared memory, which is lost with the node. So the
//! records and deliveries of all of them are read together, while none delivers anything
//! (`NodeDeliveries::cut`): what one of them has delivered follows from nothing that the copy of
//! another one lacks. Frames leave the node, and lines and requests of ranks are passed on, once
//! the agent above has the copies of all ranks.
//!
//! In: records and deliveries of the ranks. Out: updates for the agent above, which count together.
//!
//! What may never happen: a copy follows from something that no other copy holds.

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::Result;

use super::node_logs::NodeLogs;
use super::parent_agent::ParentAgent;
use super::rank_recording::RankRecording;
use crate::control::Message;
use crate::control::rank_state::RecordingUpdate;

/// The recorded ranks of this node.
pub struct NodeCut {
    logs: Rc<NodeLogs>,
    ranks: RefCell<Vec<(u32, Rc<RankRecording>)>>,
}

impl NodeCut {
    pub fn new(logs: Rc<NodeLogs>) -> Rc<NodeCut> {
        Rc::new(NodeCut { logs, ranks: RefCell::default() })
    }

    /// Adds a rank, before it starts.
    pub fn add(&self, rank: u32, recording: &Rc<RankRecording>) {
        self.ranks.borrow_mut().push((rank, recording.clone()));
    }

    /// Sends the agent above what is new of all ranks. It answers this ticket, unless it is 0.
    pub fn send(&self, ticket: u64, parent: &mut ParentAgent) {
        match self.updates() {
            Ok(updates) if updates.is_empty() && ticket == 0 => {}
            Ok(updates) => {
                for update in updates {
                    parent.send(&Message::RecordingUpdate(Box::new(update)));
                }
                parent.send(&Message::CutEnd { ticket });
            }
            Err(error) => parent.fail(format!("its message logs cannot be read: {error:#}")),
        }
    }

    fn updates(&self) -> Result<Vec<RecordingUpdate>> {
        let ranks = self.ranks.borrow();
        let of_rank = |(rank, recording): &(u32, Rc<RankRecording>)| {
            recording.updates(*rank, |from| {
                let base = self.logs.kept_deliveries_begin(*rank);
                (base, self.logs.deliveries.written_since(*rank, from.max(base)))
            })
        };
        let mut updates: Vec<RecordingUpdate> =
            self.logs.deliveries.cut(|| ranks.iter().flat_map(of_rank).collect())?;
        updates.iter_mut().for_each(|update| update.is_in_cut = true);
        Ok(updates)
    }
}
