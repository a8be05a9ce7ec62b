//! Failover of nodes: detects that a node below is lost, and moves its ranks to a spare node. The
//! same module holds the other side, an agent that takes ranks over.
//!
//! In: silence or end of the stream to an agent below, and requests of an agent that cannot restart
//! a rank. Out: transfers of ranks to a spare node, or the end of the job.
//!
//! Where senders keep the logs, ranks of a lost node that have ended are executed again: what they
//! have sent was in its memory. They count as ended no more.
//!
//! What may never happen: ranks run on two nodes at once; a rank waits for what nobody has.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::checkpoint_scheduler::CheckpointScheduler;
use super::child_agent::{ChildAgent, ChildAgents};
use super::durable_effects::DurableEffects;
use super::image_service::ImageService;
use super::input::STDIN_RETAINED_BYTES_MAX;
use super::node_logs::NodeLogs;
use super::parent_agent::ParentAgent;
use super::pmi_replay::{EXCHANGED_BYTES_MAX, PmiReplay};
use super::process_manager::{AgentGroup, ProcessManager};
use super::rank::{LocalRank, NodeSpecificError};
use super::rank_recording::RankRecording;
use super::rank_supervisor::RankSupervisor;
use super::relay::RelayService;
use super::replicated_rank_state::ReplicatedRankStates;
use super::restore::{ImageSource, RestartCause};
use super::state_transfer::{RestartPermission, StateTransfer, TransferOutcome};
use super::unit_rollback::ended_otherwise;
use crate::agent_state::{AgentEvent, AgentState};
use crate::control::rank_state::{Adoption, Moved, RecordingUpdate, Spares};
use crate::control::{Assignment, Message, Node};
use crate::ending::Ending;
use crate::pmi::server::{Server, ServerConfig};
use crate::spare::{self, Spare};

/// Most bytes of PMI requests and answers of one node's ranks that move in one message; the message
/// with its overhead stays below [`FRAME_BYTES_MAX`].
///
/// [`FRAME_BYTES_MAX`]: crate::control::FRAME_BYTES_MAX
pub const ADOPTED_BYTES_MAX: usize = 48 << 20;

/// What the user reads about a lost node.
fn node_lost_text(lost: &str, why: &str, ranks: &[u32], to: &str) -> String {
    let (what, are) = if ranks.len() == 1 { ("rank", "is") } else { ("ranks", "are") };
    let ranks = comma_separated(ranks);
    format!("node {lost} is lost ({why}): {what} {ranks} {are} restarted on {to}")
}

fn comma_separated(ranks: &[u32]) -> String {
    ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// What the user reads about ranks of a lost node that have ended.
fn ended_ranks_text(ranks: &[u32]) -> String {
    let ranks = comma_separated(ranks);
    format!(
        "ranks that had ended there are executed again, others may need what they sent: {ranks}"
    )
}

/// Why a lost node's ranks cannot be restarted where `ranks` had ended on a lost node.
fn lost_logs_text(lost: &str, why: &str, ranks: &[u32]) -> String {
    let ranks = comma_separated(ranks);
    format!(
        "node {lost} is lost ({why}), and what ranks had sent that have ended on a lost node is \
         not kept any more: {ranks}"
    )
}

fn no_spare_left(lost: &str, why: &str) -> String {
    format!("node {lost} is lost ({why}), and there is no spare node left")
}

/// Why the ranks of a lost node cannot be moved, if they have exchanged more with their process
/// manager than is kept or than fits a message.
fn exchanged_too_much(
    replicas: &ReplicatedRankStates,
    ranks: &[u32],
    lost: &str,
) -> Option<String> {
    if let Some(rank) = ranks.iter().find(|&&rank| replicas.has_asked_too_much(rank)) {
        return Some(format!(
            "rank {rank} cannot be moved to another node: it has exchanged more than {} MiB with \
             its process manager, and no more is kept",
            EXCHANGED_BYTES_MAX >> 20
        ));
    }
    (replicas.exchanged_bytes(ranks) > ADOPTED_BYTES_MAX).then(|| {
        format!(
            "ranks of node {lost} cannot be moved to another node: together they have exchanged \
             more than {} MiB with their process manager",
            ADOPTED_BYTES_MAX >> 20
        )
    })
}

/// Ranks that move to another node when theirs is lost.
#[derive(Default)]
pub struct NodeFailover {
    /// State of the ranks of agents below, if these ranks may move to another node.
    pub replicas: ReplicatedRankStates,
    /// Moves in progress of ranks of lost nodes below.
    pub transfers: Vec<StateTransfer>,
    /// Ranks whose effects on files wait until the agent above has their record.
    pub effects: DurableEffects,
    /// Ranks that had ended when their node, of any cluster, was lost with their message logs.
    pub lost_logs: Vec<u32>,
    /// Recorded nondeterminism of ranks that this node is to take over, by rank.
    pub received_recordings: BTreeMap<u32, Rc<RankRecording>>,
}

/// What the failover of nodes below touches in one round of the agent's loop.
pub struct FailoverRound<'a> {
    /// Ranks have been started, and ranks of a lost node may be restarted.
    pub is_running: bool,
    pub failover: &'a mut NodeFailover,
    pub children: &'a mut ChildAgents,
    pub relay: &'a mut RelayService,
    pub processes: &'a mut ProcessManager,
    pub parent: &'a mut ParentAgent,
}

impl FailoverRound<'_> {
    /// Treats agents below as lost that have been silent for too long, if there is a spare node for
    /// their ranks; otherwise the agent waits for them. While this agent itself does not read
    /// (backlog), silence does not count.
    pub fn check_lost_nodes(&mut self) {
        if !self.is_running || !self.parent.has_room() {
            return;
        }
        let patience = self.parent.node_patience();
        for index in 0..self.children.all.len() {
            let child = &self.children.all[index];
            let is_unresponsive = !child.state().is_over()
                && child.process.stream.last_received_at().elapsed() > patience;
            let has_way = self.choose_spare(child.node.rank_count).is_some()
                && self.failover.lost_logs.is_empty();
            if is_unresponsive && has_way {
                let seconds = patience.as_secs();
                self.handle_lost_node(
                    index,
                    &format!("nothing has arrived from it for {seconds} s"),
                );
            }
        }
    }

    /// Handles the loss of a node below: moves its ranks to a spare node.
    pub fn handle_lost_node(&mut self, index: usize, why: &str) {
        self.fail_over(index, why);
        self.send_spares();
    }

    fn fail_over(&mut self, index: usize, why: &str) {
        let child = &mut self.children.all[index];
        child.note(AgentEvent::Lose);
        // If the agent is alive after all, the end of this stream ends the agent and its ranks.
        child.process.stream.close_output();
        child.kill(libc::SIGKILL);
        let (lost, effects_end) = (child.node.clone(), child.effects_end());
        if let Some(place) =
            self.failover.transfers.iter().position(|transfer| transfer.to == index)
        {
            return self.redirect_transfer(place, &lost, why);
        }
        if self.has_lost_spawned(index) {
            return self.parent.fail(format!(
                "node {} is lost ({why}), with processes that ranks have spawned: these cannot be \
                 restarted",
                lost.name
            ));
        }
        let all = lost.first_rank..lost.first_rank + lost.rank_count;
        let living = self.failover.replicas.living(all.clone());
        let keeps_logs = self.parent.senders_keep_logs();
        let ranks: Vec<u32> = if keeps_logs { all.collect() } else { living.clone() };
        let spare = self.choose_spare(ranks.len() as u32);
        if living.is_empty() {
            let what = if lost.is_spare { "spare node" } else { "node" };
            let text = format!("{what} {} is lost ({why}): no rank is there", lost.name);
            self.parent.note(text);
            if ranks.is_empty() {
                return;
            }
            if spare.is_none() || !self.failover.lost_logs.is_empty() {
                return self.lose_logs(ranks);
            }
        }
        if !self.failover.lost_logs.is_empty() {
            return self.parent.fail(lost_logs_text(&lost.name, why, &self.failover.lost_logs));
        }
        let Some(to) = spare else {
            return self.parent.fail(no_spare_left(&lost.name, why));
        };
        if !living.is_empty() {
            let name = &self.children.all[to].node.name;
            self.parent.note(node_lost_text(&lost.name, why, &living, name));
        }
        let ended = self.failover.replicas.ended(&ranks);
        let transfer =
            StateTransfer::new(lost, (index, to), (ranks, ended), effects_end, !keeps_logs);
        self.failover.transfers.push(transfer);
    }

    /// The launcher waits for these ranks, which had ended, to end again.
    pub fn handle_permission(&mut self, ranks: &[u32]) {
        for transfer in &mut self.failover.transfers {
            if transfer.again == ranks {
                transfer.permission = RestartPermission::Given;
                self.failover.replicas.handle_again(ranks);
            }
        }
    }

    /// Handles the end of a rank of an agent below.
    pub fn handle_end(&mut self, rank: u32, ending: Ending) {
        if self.failover.replicas.handle_end(rank, ending) && self.is_running {
            self.parent.fail(ended_otherwise(rank));
        }
    }

    /// Whether processes that ranks have spawned are lost with a node, or their message logs.
    fn has_lost_spawned(&self, index: usize) -> bool {
        let child = &self.children.all[index];
        let mut spawned = child.spawned.values().flatten();
        let is_living =
            |indices: &Range<u32>| !self.failover.replicas.living(indices.clone()).is_empty();
        !child.spawned.is_empty() && self.parent.senders_keep_logs() || spawned.any(is_living)
    }

    /// The message logs of ranks that had ended are lost with their node, and none can execute the
    /// ranks again: the job goes on, unless others need what they have sent, now or after another
    /// loss.
    fn lose_logs(&mut self, ranks: Vec<u32>) {
        // The launcher sends it to all agents that move ranks, this one as well.
        self.parent.send(&Message::LogsLost { ranks });
    }

    /// Message logs of ranks that had ended are lost, in this cluster or in another one.
    pub fn handle_lost_logs(&mut self, ranks: &[u32]) {
        self.failover.lost_logs.extend(ranks);
        // One that is live may need frames that had not come before it moved, or a comparison.
        let is_needed = !self.failover.transfers.is_empty() || self.failover.replicas.has_moved();
        if is_needed {
            let ranks = comma_separated(ranks);
            self.parent.fail(format!(
                "ranks that have moved to another node may need what ranks had sent, or got, that \
                 have ended on a lost node: {ranks}"
            ));
        }
    }

    /// Ranks of a lost node cannot be moved: the job ends, unless all of them had ended and the
    /// launcher does not wait for them.
    fn cannot_move(&mut self, place: usize, text: String) {
        let StateTransfer { ranks, permission, .. } = self.failover.transfers.remove(place);
        let is_living = |rank: &u32| self.failover.replicas.is_living(*rank);
        match permission == RestartPermission::Asked || ranks.iter().any(is_living) {
            true => self.parent.fail(text),
            false => {
                self.parent.note(text);
                self.lose_logs(ranks);
            }
        }
    }

    /// Whether the launcher has received this request of a rank below already, from the rank's lost
    /// node.
    pub fn is_repeated_request(&mut self, index: usize, rank: u32) -> bool {
        let is_kept = self.parent.may_move_ranks() && self.children.all[index].node.holds(rank);
        is_kept && !self.failover.replicas.admit(rank)
    }

    /// Handles a rank of an agent below that cannot be restarted on its node.
    pub fn handle_unstartable(&mut self, index: usize, rank: u32, why: &str) {
        let has_moved_before = self.failover.replicas.handle_unstartable(rank);
        let is_spare_free = self.choose_spare(self.children.all[index].node.rank_count).is_some();
        match spare::after_failed_start(has_moved_before, is_spare_free && self.is_running) {
            spare::FailedStartAction::Elsewhere => self.handle_lost_node(index, why),
            spare::FailedStartAction::GiveUp(reason) => {
                self.parent.fail(format!("{why}; {reason}"))
            }
        }
    }

    /// Handles the loss of a node that was to take ranks over.
    fn redirect_transfer(&mut self, place: usize, lost: &Node, why: &str) {
        let ranks = self.failover.transfers[place].ranks.clone();
        let Some(to) = self.choose_spare(ranks.len() as u32) else {
            return self.cannot_move(place, no_spare_left(&lost.name, why));
        };
        self.failover.transfers[place].redirect(to);
        let text = node_lost_text(&lost.name, why, &ranks, &self.children.all[to].node.name);
        self.parent.note(text);
    }

    /// Handles a transfer, the first one, whose records the new node has. Returns false if the
    /// launcher has not permitted yet that ended ranks are executed again.
    fn complete_transfer(&mut self) -> bool {
        let Some(transfer) = self.failover.transfers.first_mut() else { return false };
        let (replicas, permission) = (&self.failover.replicas, transfer.permission);
        if let Some(why) = exchanged_too_much(replicas, &transfer.ranks, &transfer.lost.name) {
            self.cannot_move(0, why);
            return true;
        }
        if permission == RestartPermission::Unasked {
            transfer.permission = RestartPermission::Asked;
            self.parent.send(&Message::Again { ranks: transfer.again.clone() });
        }
        if permission == RestartPermission::Given {
            let transfer = self.failover.transfers.remove(0);
            self.move_ranks(transfer);
        }
        permission == RestartPermission::Given
    }

    /// Starts the ranks on their new node, which has received their records.
    fn move_ranks(&mut self, transfer: StateTransfer) {
        let StateTransfer { lost, from: index, to, ranks, again, .. } = transfer;
        if !again.is_empty() {
            self.parent.note(ended_ranks_text(&again));
        }
        let released = self.processes.groups.get(&0).map_or(0, |group| group.server.released());
        let with_ended = self.parent.senders_keep_logs();
        let transferred =
            self.failover.replicas.transfer(ranks, released, with_ended, Instant::now());
        let name = self.children.all[to].node.name.clone();
        let moved = Moved { cluster: lost.cluster, from: lost.name, to: name };
        let first = self.children.all[index].node.first_rank;
        let count = std::mem::take(&mut self.children.all[index].node.rank_count);
        let node = &mut self.children.all[to].node;
        (node.first_rank, node.rank_count) = (first, count);
        let (has_reached, keys) = match self.processes.groups.get_mut(&0) {
            Some(group) => (group.server.reassign(index, to), group.server.keys()),
            None => (false, Vec::new()),
        };
        self.parent.send(&Message::Moved(Box::new(moved)));
        let has_first = transferred.iter().any(|one| one.rank == 0);
        let adoption = Adoption { has_reached, keys, ranks: transferred };
        let stream = &mut self.children.all[to].process.stream;
        stream.send(&Message::Adopt(Box::new(adoption)));
        if has_first {
            match self.children.input.replay() {
                Some(replay) => replay.iter().for_each(|message| stream.send(message)),
                None => self.parent.fail(format!(
                    "rank 0 cannot be moved to another node: it was given more than {} MiB of \
                     standard input, and no more of it is kept",
                    STDIN_RETAINED_BYTES_MAX >> 20
                )),
            }
        }
    }

    /// Sends the agents below the names of the nodes that may still take over ranks, after a
    /// change.
    pub fn send_spares(&mut self) {
        let is_taken = |place: usize| self.failover.transfers.iter().any(|it| it.to == place);
        let all = self.children.all.iter().enumerate();
        let free = all.filter(|(place, child)| {
            child.node.is_spare
                && child.node.rank_count == 0
                && !child.state().is_over()
                && !is_taken(*place)
        });
        let names: Vec<String> = free.map(|(_, child)| child.node.name.clone()).collect();
        for child in self.children.all.iter_mut().filter(|child| !child.state().is_over()) {
            child.process.stream.send(&Message::Spares(Spares { names: names.clone() }));
        }
    }

    fn choose_spare(&self, ranks: u32) -> Option<usize> {
        let is_free = |child: &ChildAgent| {
            child.node.is_spare && child.node.rank_count == 0 && child.state() == AgentState::Ready
        };
        let is_taken = |place: &usize| self.failover.transfers.iter().any(|it| it.to == *place);
        let all = self.children.all.iter().enumerate();
        let all = all.filter(|(place, child)| is_free(child) && !is_taken(place));
        let spares: Vec<Spare> =
            all.map(|(place, child)| Spare { place, slots: child.node.slots }).collect();
        spare::choose(&spares, ranks).map(|spare| spare.place)
    }

    /// Advances the first of the transfers in progress as far as possible.
    pub(super) fn advance_transfers(&mut self) {
        while self.is_running && !self.failover.transfers.is_empty() {
            match self.advance_transfer() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    return self
                        .parent
                        .fail(format!("ranks cannot be moved to another node: {error:#}"));
                }
            }
        }
    }

    /// Advances the first transfer by one step. Returns false if the transfer waits for the relay,
    /// for the other agent, or for the end of effects.
    fn advance_transfer(&mut self) -> Result<bool> {
        let NodeFailover { transfers, replicas, .. } = &mut *self.failover;
        let (Some(transfer), Some(relay)) = (transfers.first_mut(), &mut self.relay.process) else {
            return Ok(false);
        };
        let stream = &mut self.children.all[transfer.to].process.stream;
        match transfer.advance(replicas, relay, stream)? {
            TransferOutcome::Waiting => Ok(false),
            TransferOutcome::Advanced => Ok(true),
            TransferOutcome::Complete => Ok(self.complete_transfer()),
        }
    }
}

impl NodeFailover {
    /// Takes a part of the record of a rank that is to be started here; all parts arrive before the
    /// rank.
    pub fn apply_update(
        &mut self,
        update: &RecordingUpdate,
        node_logs: Option<&NodeLogs>,
        parent: &mut ParentAgent,
    ) {
        let Some(assignment) = parent.assignment.clone() else { return };
        let outcome = match self.received_recordings.get(&update.rank) {
            Some(recording) => Ok(Some(recording.clone())),
            None => RankRecording::new(&assignment.job, update.rank, true)
                .map(|recording| recording.map(Rc::new)),
        };
        let laid = outcome.and_then(|recording| {
            if let Some(recording) = recording {
                recording.apply(update).context("no memory for its nondeterminism record")?;
                self.received_recordings.insert(update.rank, recording);
            }
            if let Some(logs) = node_logs {
                logs.deliveries.write_moved(update).context("no memory for its message logs")?;
            }
            Ok(())
        });
        if let Err(error) = laid {
            parent.fail(format!("rank {} cannot be moved to another node: {error:#}", update.rank));
        }
    }

    /// Takes over ranks of a lost node: this node is to start them.
    pub fn adopt(
        &mut self,
        assignment: &Assignment,
        adoption: &Adoption,
        images: &ImageService,
        processes: &mut ProcessManager,
        supervisor: &mut RankSupervisor,
    ) -> Result<()> {
        let job = &assignment.job;
        let mut recordings = Vec::new();
        for one in &adoption.ranks {
            let recording = match self.received_recordings.remove(&one.rank) {
                // Another spare node may have the memory.
                None => {
                    let made = RankRecording::new(job, one.rank, true);
                    made.map_err(NodeSpecificError::error)?.map(Rc::new)
                }
                received => received,
            };
            recordings.push(recording);
        }
        let config = ServerConfig {
            group: 0,
            kvsname: job.kvsname.clone(),
            universe: job.universe,
            mapping: job.mapping.clone(),
        };
        let unreleased_puts = adoption.ranks.iter().flat_map(|one| one.unreleased_puts());
        let applications = adoption.ranks.iter().map(|one| (one.rank, job.application(one.rank).0));
        let mut server = Server::new(config, applications, [], &adoption.keys);
        server.adopt_state(unreleased_puts, adoption.has_reached);
        let count = adoption.ranks.len() as u32;
        processes.groups.insert(0, AgentGroup::adopted(server, count));
        let moved = match (supervisor.node_logs(), &images.spare_config) {
            (Some(logs), Some(config)) => Some(logs.moved_ranks(&adoption.ranks, config)?),
            _ => None,
        };
        for (turn, (one, recording)) in adoption.ranks.iter().zip(recordings).enumerate() {
            if recording.as_ref().is_some_and(|recording| recording.is_full()) {
                bail!("the nondeterminism record of rank {} is full", one.rank);
            }
            if let Some(why) = recording.as_ref().and_then(|recording| recording.refusal()) {
                bail!("rank {}: {why}", one.rank);
            }
            let polls = recording.as_ref().map(|recording| recording.poll_counts());
            let replay = PmiReplay::adopted(one, polls, Instant::now());
            let config = images.spare_config.clone().filter(|_| recording.is_some());
            let turn = (turn as u32, count);
            if let Some(logs) = supervisor.node_logs() {
                logs.add_moved(one.rank, one.moves)?;
            }
            supervisor.note_recorded(one.rank, recording.as_ref());
            let shared = supervisor.shared_memory();
            let mut rank = LocalRank::vacant(one.rank, recording, shared);
            rank.scheduler =
                config.map(|config| CheckpointScheduler::new(config, one.rank, one.moves, turn));
            rank.replay = Some(replay);
            // The agent restores the rank from an image, or starts the program, in its next round.
            supervisor.ranks.push(rank);
            let images = match &moved {
                Some(moved) => ImageSource::Chosen(moved.clone()),
                None => ImageSource::Located(one.images.clone()),
            };
            supervisor.begin_restore(supervisor.ranks.len() - 1, RestartCause::Moved, images);
        }
        Ok(())
    }
}
