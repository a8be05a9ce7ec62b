//! Nodes that count as lost and go on living for a while: cut off from the agents above, or slow.
//!
//! The processes of such a node have begun again on another one. Each of the old ones goes on with
//! its program, its logs and its transport. The transport reaches those that it knows, and those
//! reach it that have not learnt yet that the process has moved. No agent has to do with the node
//! any more: nothing that waits for the keeper leaves it, and no contact of it is spread.
//!
//! What enters: processes that were running when their node was lost. What leaves: messages of
//! their transports. What may never happen: a process takes anything from them once it knows how
//! the process that has moved can be reached ([`LogTransfer::handle`]), unless that fault is
//! planted.
//!
//! [`LogTransfer::handle`]: landbridge_proto::log::transfer::LogTransfer::handle

use super::network::{TransferMessage, Transport, TransportName};
use super::node::SimulatedNode;
use super::process::{Chance, LoggedProcess};
use super::{LogFault, LogWorld, Violation};

/// Processes of a lost node that go on.
pub struct FencedNode {
    /// The memory file of the node, which lives as long as its processes.
    _node: SimulatedNode,
    processes: Vec<FencedProcess>,
}

pub struct FencedProcess {
    pub process: LoggedProcess,
    pub transport: Transport,
    /// Polls that incarnations on this node have made.
    pub polls: u64,
}

impl LogWorld {
    /// Whether the processes of a node that is lost now go on.
    pub(super) fn lives_on(&mut self) -> bool {
        self.random.percent(50) || self.planted == Some(LogFault::TakesFromTheFenced)
    }

    /// The processes of a lost node go on.
    pub(super) fn fence(&mut self, node: SimulatedNode, processes: Vec<FencedProcess>) {
        self.counts.add_some("processes that go on on a lost node", processes.len() as u64);
        self.losses.fenced.push(FencedNode { _node: node, processes });
    }

    /// The process on a lost node that has the transport of this name.
    pub(super) fn fenced_process(&mut self, name: TransportName) -> Option<&mut FencedProcess> {
        let mut all = self.losses.fenced.iter_mut().flat_map(|node| &mut node.processes);
        all.find(|it| it.transport.name() == name)
    }

    /// Some process on a lost node goes on, or replaces its transport, or all of that node end.
    pub(super) fn work_fenced(&mut self) -> Result<(), Violation> {
        let place = self.random.index(self.losses.fenced.len());
        if self.random.below(1_000) < 3 {
            self.end_fenced(place);
            return Ok(());
        }
        let chance = Chance {
            frames_max: self.random.pick(&[0, 1, 2, 10]),
            micros: self.random.pick(&[0, 0, 1, 500]),
            dies_after: None,
            torn: None,
        };
        let is_replaced = self.random.below(1_000) < self.rates.replaced_transports;
        let processes = &mut self.losses.fenced[place].processes;
        let number = self.random.index(processes.len());
        let FencedProcess { process, transport, polls } = &mut processes[number];
        process.step(&chance, *polls)?;
        *polls = process.polls().max(*polls);
        if is_replaced {
            let name = transport.name();
            *transport = transport.replaced(&process.logs);
            self.lose_messages_of(name);
            return Ok(());
        }
        let progress = transport.progress(&mut process.logs, &mut self.network);
        if progress.as_ref().is_err_and(|why| self.losses.is_unfit(why)) {
            self.end_fenced(place);
            return Ok(());
        }
        progress
    }

    /// Delivers a message to a process on a lost node whose transport has this name, or to none.
    pub(super) fn deliver_to_fenced(
        &mut self,
        to: TransportName,
        message: &TransferMessage,
    ) -> Result<(), Violation> {
        let Some(FencedProcess { process, transport, .. }) = self.fenced_process(to) else {
            self.counts.count("messages to a transport that has ended");
            return Ok(());
        };
        let handled = transport.handle(message, &mut process.logs);
        self.counts.count("messages to processes on lost nodes");
        match handled {
            Err(why) if !self.losses.is_unfit(&why) => Err(why),
            _ => Ok(()),
        }
    }

    /// The processes of a lost node end: their agent has seen that it is cut off.
    pub(super) fn end_fenced(&mut self, place: usize) {
        let node = self.losses.fenced.swap_remove(place);
        for FencedProcess { transport, .. } in node.processes {
            self.lose_messages(&transport);
        }
        self.counts.count("lost nodes that have ended");
    }
}
