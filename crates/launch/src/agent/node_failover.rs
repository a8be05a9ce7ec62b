//! Failover of nodes: detects that a node below is lost, and moves its ranks to a spare node. The
//! same module holds the other side, an agent that takes ranks over.
//!
//! In: silence or end of the stream to an agent below, and requests of an agent that cannot restart
//! a rank. Out: transfers of ranks to a spare node, or the end of the job.
//!
//! What may never happen: ranks run on two nodes at once; a rank that has ended is started again.

use std::fmt;
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, Error, Result, bail};

use super::checkpoint_scheduler::CheckpointScheduler;
use super::groups::{AgentGroup, new_statistics_page};
use super::input::STDIN_RETAINED_BYTES_MAX;
use super::pmi_replay::{EXCHANGED_BYTES_MAX, PmiReplay};
use super::rank::LocalRank;
use super::rank_recording::RankRecording;
use super::restore::Restore;
use super::state_transfer::StateTransfer;
use super::{Agent, Phase};
use crate::control::rank_state::{Adoption, Exchange, Moved, RecordingUpdate, Spares};
use crate::control::{Assignment, Message, Node};
use crate::pmi::server::{Server, ServerConfig};
use crate::pmi::wire::is_answered_later;
use crate::spare::{self, Spare};

/// Most bytes of PMI requests and answers of one node's ranks that move in one message; the message
/// with its overhead stays below [`FRAME_BYTES_MAX`].
///
/// [`FRAME_BYTES_MAX`]: crate::control::FRAME_BYTES_MAX
pub const ADOPTED_BYTES_MAX: usize = 48 << 20;

/// What the user reads about a lost node.
fn node_lost_text(lost: &str, why: &str, ranks: &[u32], to: &str) -> String {
    let numbers: Vec<String> = ranks.iter().map(u32::to_string).collect();
    let (ranks, are) = if numbers.len() == 1 { ("rank", "is") } else { ("ranks", "are") };
    format!("node {lost} is lost ({why}): {ranks} {} {are} restarted on {to}", numbers.join(", "))
}

fn no_spare_left(lost: &str, why: &str) -> String {
    format!("node {lost} is lost ({why}), and there is no spare node left")
}

/// A rank cannot be started for a reason that lies with this node.
#[derive(Debug)]
pub(super) struct NodeSpecificError(String);

impl NodeSpecificError {
    pub(super) fn error(why: Error) -> Error {
        Error::new(NodeSpecificError(format!("{why:#}")))
    }
}

impl std::error::Error for NodeSpecificError {}

impl fmt::Display for NodeSpecificError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl Agent {
    /// Treats agents below as lost that have been silent for too long, if there is a spare node for
    /// their ranks; otherwise the agent waits for them. While this agent itself does not read
    /// (backlog), silence does not count.
    pub(super) fn check_lost_nodes(&mut self) {
        if !self.is_running() || !self.parent.has_room() {
            return;
        }
        let patience = self.parent.node_patience();
        for index in 0..self.children.len() {
            let child = &self.children[index];
            let is_unresponsive =
                !child.done && child.process.stream.last_received_at().elapsed() > patience;
            if is_unresponsive && self.choose_spare(child.node.rank_count).is_some() {
                let seconds = patience.as_secs();
                self.handle_lost_node(
                    index,
                    &format!("nothing has been heard of it for {seconds} s"),
                );
            }
        }
    }

    /// Whether ranks have been started, and ranks of a lost node may be restarted.
    pub(super) fn is_running(&self) -> bool {
        self.course.phase == Phase::Working
            && !self.relay.address.is_empty()
            && self.parent.may_move_ranks()
    }

    /// Handles the loss of a node below: moves its ranks to a spare node.
    pub(super) fn handle_lost_node(&mut self, index: usize, why: &str) {
        self.fail_over(index, why);
        self.send_spares();
    }

    fn fail_over(&mut self, index: usize, why: &str) {
        let child = &mut self.children[index];
        (child.done, child.is_lost) = (true, true);
        // If the agent is alive after all, the end of this stream ends the agent and its ranks.
        child.process.stream.close_output();
        child.kill(libc::SIGKILL);
        let (lost, effects_end) = (child.node.clone(), child.effects_end());
        if let Some(place) =
            self.failover.transfers.iter().position(|transfer| transfer.to == index)
        {
            return self.redirect_transfer(place, &lost, why);
        }
        let spawned = self.children[index].spawned.iter();
        let mut spawned =
            spawned.flat_map(|(_, indices)| self.failover.replicas.living(indices.clone()));
        if spawned.next().is_some() {
            return self.parent.fail(format!(
                "node {} is lost ({why}), with processes that ranks have spawned: these do not come back",
                lost.name
            ));
        }
        let ranks =
            self.failover.replicas.living(lost.first_rank..lost.first_rank + lost.rank_count);
        if ranks.is_empty() {
            let what = if lost.is_spare { "spare node" } else { "node" };
            let text = format!("{what} {} is lost ({why}): no rank is there", lost.name);
            return self.parent.note(text);
        }
        let Some(to) = self.choose_spare(ranks.len() as u32) else {
            return self.parent.fail(no_spare_left(&lost.name, why));
        };
        let name = &self.children[to].node.name;
        let text = node_lost_text(&lost.name, why, &ranks, name);
        self.parent.note(text);
        self.failover.transfers.push(StateTransfer::new(lost, index, to, ranks, effects_end));
    }

    /// Whether the launcher has received this request of a rank below already, from the rank's lost
    /// node.
    pub(super) fn is_repeated_request(&mut self, index: usize, rank: u32) -> bool {
        let is_kept = self.parent.may_move_ranks() && self.children[index].node.holds(rank);
        is_kept && !self.failover.replicas.admit(rank)
    }

    /// Handles a rank of an agent below that cannot be restarted on its node.
    pub(super) fn handle_unstartable(&mut self, index: usize, rank: u32, why: &str) {
        let has_moved_before = self.failover.replicas.handle_unstartable(rank);
        let is_spare_free = self.choose_spare(self.children[index].node.rank_count).is_some();
        match spare::after_failed_start(has_moved_before, is_spare_free && self.is_running()) {
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
            return self.parent.fail(no_spare_left(&lost.name, why));
        };
        self.failover.transfers[place].redirect(to);
        let text = node_lost_text(&lost.name, why, &ranks, &self.children[to].node.name);
        self.parent.note(text);
    }

    /// Starts the ranks on their new node, which has received their records.
    pub(super) fn move_ranks(&mut self, transfer: StateTransfer) {
        let StateTransfer { lost, from: index, to, ranks, .. } = transfer;
        let released = self.groups.get(&0).map_or(0, |group| group.server.released());
        if let Some(rank) =
            ranks.iter().find(|&&rank| self.failover.replicas.has_asked_too_much(rank))
        {
            return self.parent.fail(format!(
                "rank {rank} cannot go on on another node: it has asked its process manager more than {} MiB, with the answers, and no more of that is kept",
                EXCHANGED_BYTES_MAX >> 20
            ));
        }
        if self.failover.replicas.exchanged_bytes(&ranks) > ADOPTED_BYTES_MAX {
            return self.parent.fail(format!(
                "ranks of node {} cannot go on on another node: together they have asked their process manager more than {} MiB, with \
                 the answers",
                lost.name,
                ADOPTED_BYTES_MAX >> 20
            ));
        }
        let transferred = self.failover.replicas.transfer(ranks, released, Instant::now());
        let name = self.children[to].node.name.clone();
        let moved = Moved { cluster: lost.cluster, from: lost.name, to: name };
        let first = self.children[index].node.first_rank;
        let count = std::mem::take(&mut self.children[index].node.rank_count);
        let node = &mut self.children[to].node;
        (node.first_rank, node.rank_count) = (first, count);
        let (has_reached, keys) = match self.groups.get_mut(&0) {
            Some(group) => (group.server.reassign(index, to), group.server.keys()),
            None => (false, Vec::new()),
        };
        self.parent.send(&Message::Moved(Box::new(moved)));
        let has_first = transferred.iter().any(|one| one.rank == 0);
        let adoption = Adoption { has_reached, keys, ranks: transferred };
        let stream = &mut self.children[to].process.stream;
        stream.send(&Message::Adopt(Box::new(adoption)));
        if has_first {
            match self.forwarded_input.replay() {
                Some(replay) => replay.iter().for_each(|message| stream.send(message)),
                None => self.parent.fail(format!(
                    "rank 0 cannot go on on another node: it was given more than {} MiB of standard input, and no more of it is kept",
                    STDIN_RETAINED_BYTES_MAX >> 20
                )),
            }
        }
    }

    /// Sends the agents below the names of the nodes that may still take over ranks, after a
    /// change.
    pub(super) fn send_spares(&mut self) {
        let is_taken = |place: usize| self.failover.transfers.iter().any(|it| it.to == place);
        let all = self.children.iter().enumerate();
        let free = all.filter(|(place, child)| {
            child.node.is_spare && child.node.rank_count == 0 && !child.done && !is_taken(*place)
        });
        let names: Vec<String> = free.map(|(_, child)| child.node.name.clone()).collect();
        for child in self.children.iter_mut().filter(|child| !child.done) {
            child.process.stream.send(&Message::Spares(Spares { names: names.clone() }));
        }
    }

    fn choose_spare(&self, ranks: u32) -> Option<usize> {
        let is_free = |child: &super::child_agent::ChildAgent| {
            child.node.is_spare && child.node.rank_count == 0 && child.ready && !child.done
        };
        let is_taken = |place: &usize| self.failover.transfers.iter().any(|it| it.to == *place);
        let all = self.children.iter().enumerate();
        let all = all.filter(|(place, child)| is_free(child) && !is_taken(place));
        let spares: Vec<Spare> =
            all.map(|(place, child)| Spare { place, slots: child.node.slots }).collect();
        spare::choose(&spares, ranks).map(|spare| spare.place)
    }

    // --- on the spare node

    /// Takes a part of the record of a rank that is to be started here; all parts arrive before the
    /// rank.
    pub(super) fn apply_update(&mut self, update: &RecordingUpdate) {
        let Some(assignment) = self.parent.assignment.clone() else { return };
        let outcome = match self.failover.received_recordings.get(&update.rank) {
            Some(recording) => Ok(Some(recording.clone())),
            None => {
                RankRecording::new(&assignment.job, true).map(|recording| recording.map(Rc::new))
            }
        };
        let laid = outcome.and_then(|recording| {
            if let Some(recording) = recording {
                recording.apply(update).context("no memory for its record of clocks")?;
                self.failover.received_recordings.insert(update.rank, recording);
            }
            Ok(())
        });
        if let Err(error) = laid {
            self.parent
                .fail(format!("rank {} cannot go on on another node: {error:#}", update.rank));
        }
    }

    pub(super) fn handle_adoption(&mut self, adoption: &Adoption) {
        let Some(assignment) = self.parent.assignment.clone() else { return };
        if self.course.phase == Phase::Working
            && let Err(error) = self.adopt(&assignment, adoption)
        {
            let why = format!("on node {}: {error:#}", assignment.node.name);
            match adoption.ranks.first().filter(|_| error.is::<NodeSpecificError>()) {
                Some(one) => self.parent.request_other_node(one.rank, why),
                None => self.parent.fail(why),
            }
        }
        // The requests that the ranks wait for are sent to the server once all ranks are there to
        // receive the answers.
        for one in &adoption.ranks {
            for Exchange { question, answer } in one.unanswered_requests() {
                if let Some(group) = self.groups.get_mut(&0) {
                    group.server.handle_question(one.rank, question);
                }
                if answer.is_none() && is_answered_later(question) {
                    self.reply(one.rank, "");
                }
            }
        }
        self.drain_servers();
    }

    fn adopt(&mut self, assignment: &Assignment, adoption: &Adoption) -> Result<()> {
        let job = &assignment.job;
        let config = ServerConfig {
            group: 0,
            kvsname: job.kvsname.clone(),
            universe: job.universe,
            mapping: job.mapping.clone(),
        };
        let unreleased_puts = adoption.ranks.iter().flat_map(|one| one.unreleased_puts());
        let ranks = adoption.ranks.iter().map(|one| (one.rank, job.application(one.rank).0));
        let mut server = Server::new(config, ranks, [], &adoption.keys);
        server.adopt_state(unreleased_puts, adoption.has_reached);
        self.groups.insert(0, AgentGroup::adopted(server, adoption.ranks.len() as u32));
        let count = adoption.ranks.len() as u32;
        for (turn, one) in adoption.ranks.iter().enumerate() {
            let recording = match self.failover.received_recordings.remove(&one.rank) {
                None => RankRecording::new(job, true)?.map(Rc::new),
                laid => laid,
            };
            if recording.as_ref().is_some_and(|recording| recording.is_full()) {
                bail!("the nondeterminism record of rank {} is full", one.rank);
            }
            if let Some(why) = recording.as_ref().and_then(|recording| recording.refusal()) {
                bail!("rank {}: {why}", one.rank);
            }
            let polls = recording.as_ref().map(|recording| recording.poll_counts());
            let replay = PmiReplay::adopted(one, polls, Instant::now());
            let config = self.images.spare_config.clone().filter(|_| recording.is_some());
            let turn = (turn as u32, count);
            let mut rank = LocalRank::vacant(one.rank, recording, new_statistics_page());
            rank.scheduler =
                config.map(|config| CheckpointScheduler::new(config, one.rank, one.moves, turn));
            rank.replay = Some(replay);
            // The agent restores the rank from an image, or starts the program, in its next round.
            rank.restore = Some(Restore::begin(&mut rank, None, &one.images));
            self.ranks.push(rank);
        }
        Ok(())
    }
}
