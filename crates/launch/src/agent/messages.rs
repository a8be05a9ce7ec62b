//! What the agent does with the messages of the agents above and below.
//!
//! In: messages, and the end or silence of the streams that carry them. Out: calls to the part of
//! the agent that owns the state, and messages to the other side.
//!
//! What may never happen: a message of an agent below that counts as lost has an effect.

use std::rc::Rc;
use std::time::Instant;

use anyhow::Context;

use super::Agent;
use super::checkpoint_scheduler::CheckpointRequester;
use super::child_agent::start_child;
use super::course::Phase;
use super::log_report;
use super::node_failover::FailoverRound;
use super::node_logs::NodeLogs;
use super::parent_agent::ParentAgent;
use super::path_query::PathQuery;
use super::process_manager::{self, AgentGroup};
use super::rank::NodeSpecificError;
use crate::agent_state::{AgentEvent, AgentState};
use crate::control::rank_state::{Adoption, Exchange, RankUpdate};
use crate::control::spawn_order::SpawnOrder;
use crate::control::{Assignment, Message};
use crate::pmi::wire::is_answered_later;
use crate::spawn;

impl Agent {
    pub(super) fn handle_parent(&mut self) {
        if !self.parent.stream.at_end() {
            if self.parent.stream.fill().is_err() {
                self.parent.stream.close_output();
            }
            loop {
                match self.parent.stream.poll_message() {
                    Ok(Some(message)) => self.handle_parent_message(message),
                    Ok(None) => break,
                    Err(error) => {
                        self.parent.fail(error.to_string());
                        break;
                    }
                }
            }
        }
        if self.parent.stream.at_end() {
            self.end_orphaned();
        }
    }

    /// Pings the agents below, and ends the ranks if a remote parent has been silent for
    /// [`SILENCE_MAX`].
    pub(super) fn check_parent(&mut self) {
        self.children.ping();
        if self.parent.is_silent() {
            self.parent.stream.close_output();
            self.end_orphaned();
        }
    }

    fn handle_parent_message(&mut self, message: Message) {
        match message {
            Message::Assign(assignment) => self.handle_assignment(*assignment),
            Message::StartRelay { config } => self.relay.start(&config, &mut self.parent),
            Message::Start { relay } => self.start_ranks(&relay),
            Message::BarrierDown { group, delta } => {
                self.processes.handle_barrier_down(group, delta)
            }
            Message::Answer { rank, line } => self.deliver_answer(rank, line),
            Message::SpawnOrder(order) => self.handle_order(*order),
            Message::RecordingUpdate(update) => {
                self.failover.apply_update(&update, self.supervisor.node_logs(), &mut self.parent);
            }
            Message::Stable { ticket } => {
                if let Err(error) = self.supervisor.handle_stable(ticket) {
                    self.parent.fail(format!("its message logs cannot be written: {error:#}"));
                }
            }
            Message::Durable { serial, .. } => self.failover.effects.end(serial),
            Message::Adopt(adoption) => self.handle_adoption(&adoption),
            Message::Spares(spares) => {
                if let Some(own) = &self.parent.assignment {
                    let leases = self.images.handle_spares(spares.names, own);
                    self.supervisor.set_spares(&leases);
                }
            }
            Message::Revoke { group } => {
                self.processes.revoke(group, &self.supervisor.ranks, &mut self.children);
            }
            Message::Stdin { bytes } => self.deliver_stdin(Some(&bytes)),
            Message::StdinEnd => self.deliver_stdin(None),
            Message::End { at_once } => self.begin_end(at_once),
            Message::Ping => {}
            Message::QueryPaths { serial, rows_max } => {
                self.children.send(&message);
                self.path_query = Some(PathQuery::begin(serial, rows_max, &self.supervisor.ranks));
            }
            Message::QueryLog { serial, ref question } => match self.supervisor.node_logs() {
                Some(logs) => {
                    self.children.send(&message);
                    let lines = log_report::answer(logs, &self.supervisor.ranks, question);
                    self.parent.send(&Message::LogStatus { serial, lines });
                }
                None => self.relay.query_log(serial, question, &mut self.parent),
            },
            Message::TakeCheckpoints { rank } => {
                self.request_checkpoints(rank, CheckpointRequester::User)
            }
            Message::FrameTransfer(transfer) => match self.children.holder(transfer.target()) {
                Some(child) => child.process.stream.send(&Message::FrameTransfer(transfer)),
                None => self.supervisor.handle_frame_transfer(*transfer, &mut self.parent),
            },
            Message::LogImages(_) | Message::LogContact { .. } => {
                self.children.send(&message);
                let logs = self.supervisor.node_logs();
                handle_log_news(logs, &message, &mut self.parent);
            }
            Message::LogsLost { ranks } => self.failover_round().handle_lost_logs(&ranks),
            Message::Again { ranks } => self.failover_round().handle_permission(&ranks),
            other => self.parent.fail(format!("the agent was sent {other:?}")),
        }
    }

    fn handle_assignment(&mut self, assignment: Assignment) {
        let (job, node) = (&assignment.job, &assignment.node);
        self.processes.groups.insert(0, AgentGroup::first(job, node));
        self.course.begin_startup();
        for child in &node.children {
            match start_child(job, child) {
                Ok(child) => self.children.all.push(child),
                Err(error) => {
                    self.parent.fail(format!("cannot start an agent on {}: {error:#}", child.name));
                    return;
                }
            }
        }
        self.parent.assignment = Some(Rc::new(assignment));
        self.course.check_ready(&self.children, &mut self.parent);
    }

    fn start_ranks(&mut self, relay: &str) {
        self.relay.address = relay.to_string();
        self.children.send(&Message::Start { relay: relay.to_string() });
        let Some(assignment) = self.parent.assignment.clone() else { return };
        if let Err(error) =
            self.supervisor.start_own(&assignment, &mut self.images, relay, &mut self.parent)
        {
            self.parent.fail(format!("on node {}: {error:#}", assignment.node.name));
        }
        // Nodes that were lost after they were ready have waited for this moment.
        for index in 0..self.children.all.len() {
            self.check_child_end(index, None);
        }
    }

    /// Starts the part of a new group that runs on this node, and forwards the order to the agents
    /// below.
    fn handle_order(&mut self, order: SpawnOrder) {
        let Some(assignment) = self.parent.assignment.clone() else { return };
        if self.course.phase == Phase::Working {
            self.children.refuse_for_lost_nodes(&order, &mut self.parent);
            let children = self.children.forward_order(&order);
            let group = AgentGroup::spawned(&assignment.job, &assignment.node, &order, &children);
            self.processes.groups.insert(order.group, group);
            if order.on(&assignment.node).next().is_some() {
                let problem = match self.supervisor.start_group(
                    &assignment,
                    &order,
                    &self.relay.address,
                    &mut self.parent,
                ) {
                    Ok(()) => String::new(),
                    Err(error) => format!("on node {}: {error:#}", assignment.node.name),
                };
                self.parent.send(&Message::Started { group: order.group, problem });
            }
        }
    }

    fn deliver_answer(&mut self, rank: u32, line: String) {
        // The rank's node may be lost: then the next node receives the answer with the state of the
        // rank.
        self.failover.replicas.handle_answer(rank, &line);
        match self.children.holder(rank) {
            Some(child) => child.process.stream.send(&Message::Answer { rank, line }),
            None => {
                process_manager::reply(&mut self.supervisor.ranks, rank, &line, &mut self.parent)
            }
        }
    }

    /// Delivers standard input, or its end (`None`), to rank 0.
    fn deliver_stdin(&mut self, bytes: Option<&[u8]>) {
        if self.children.forward_input(bytes) {
            return;
        }
        if let Some(rank) = self.supervisor.ranks.iter_mut().find(|rank| rank.rank == 0) {
            match bytes {
                Some(bytes) => rank.streams.input.queue(bytes),
                None => rank.streams.input.end(),
            }
            rank.write_input(&mut self.parent);
        }
    }

    fn handle_adoption(&mut self, adoption: &Adoption) {
        let Some(assignment) = self.parent.assignment.clone() else { return };
        if self.course.phase == Phase::Working
            && let Err(error) = self.failover.adopt(
                &assignment,
                adoption,
                &self.images,
                &mut self.processes,
                &mut self.supervisor,
            )
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
                if let Some(group) = self.processes.groups.get_mut(&0) {
                    group.server.handle_question(one.rank, question);
                }
                if answer.is_none() && is_answered_later(question) {
                    process_manager::reply(
                        &mut self.supervisor.ranks,
                        one.rank,
                        "",
                        &mut self.parent,
                    );
                }
            }
        }
        self.drain_servers();
    }

    pub(super) fn handle_children(&mut self) {
        let room = self.parent.has_room() || self.course.phase != Phase::Working;
        for index in 0..self.children.all.len() {
            let stream = &mut self.children.all[index].process.stream;
            if stream.at_end() || !room {
                continue;
            }
            let mut problem = stream.fill().err();
            while problem.is_none() {
                match self.children.all[index].process.stream.poll_message() {
                    Ok(Some(message)) => self.handle_child_message(index, message),
                    Ok(None) => break,
                    Err(error) => problem = Some(error),
                }
            }
            self.check_child_end(index, problem);
        }
    }

    fn check_child_end(&mut self, index: usize, problem: Option<anyhow::Error>) {
        let child = &self.children.all[index];
        if child.process.stream.at_end() && !child.state().is_over() {
            let was_ready = child.state() == AgentState::Ready;
            if problem.is_none() && self.is_running() {
                return self
                    .failover_round()
                    .handle_lost_node(index, "the connection to its agent has ended");
            }
            // Before the ranks start; `start_ranks` looks at this node again.
            let is_early = self.course.is_working() && self.relay.address.is_empty();
            if problem.is_none() && was_ready && is_early && self.parent.may_move_ranks() {
                return;
            }
            let child = &mut self.children.all[index];
            child.note(AgentEvent::End);
            if self.course.phase == Phase::Working {
                let here = self.parent.assignment.as_ref().map(|own| own.node.name.as_str());
                let child = &self.children.all[index];
                let text = spawn::agent_failure::text(&child.node, &child.process, problem, here);
                self.parent.fail(text);
            }
        }
    }

    fn handle_child_message(&mut self, index: usize, message: Message) {
        match message {
            _ if self.children.all[index].state() == AgentState::Lost => {}
            Message::Ready => {
                self.children.all[index].note(AgentEvent::Ready);
                self.course.check_ready(&self.children, &mut self.parent);
            }
            Message::BarrierUp { group, delta } => {
                self.processes.handle_barrier_up(group, index, delta);
            }
            Message::Done => self.children.all[index].note(AgentEvent::End),
            Message::Exited { group, rank, ending, .. } => {
                if let Some(group) = self.processes.groups.get_mut(&group) {
                    group.handle_ended(rank);
                }
                self.failover_round().handle_end(rank, ending);
                self.parent.send(&message);
            }
            Message::Ping => {}
            Message::StdinTaken { bytes } => {
                let bytes = self.children.input.take(bytes);
                self.parent.send(&Message::StdinTaken { bytes });
            }
            Message::RankUpdate(update) => match *update {
                RankUpdate::Unstartable { rank, why } => {
                    self.failover_round().handle_unstartable(index, rank, &why)
                }
                update => self.failover.replicas.handle_update(update),
            },
            Message::RecordingUpdate(update) => {
                self.failover.replicas.handle_recording_update(*update)
            }
            Message::CutEnd { ticket } => {
                let child = &mut self.children.all[index];
                let first = child.node.first_rank;
                self.failover.replicas.handle_cut_end(first..first + child.node.rank_count);
                if ticket > 0 {
                    child.process.stream.send(&Message::Stable { ticket });
                }
            }
            Message::MakeDurable { rank, serial } => {
                self.children.all[index].allow_effect(rank, serial);
            }
            Message::Name { rank, .. } | Message::Spawn { rank, .. }
                if self.failover_round().is_repeated_request(index, rank) => {}
            Message::Output { rank, stream, ref bytes, own } => {
                if own > 0 && self.parent.may_move_ranks() && self.parent.has_spares() {
                    self.failover.replicas.handle_print(rank, stream, bytes);
                }
                self.parent.send(&message);
            }
            Message::Checkpoint { rank, number, .. } => {
                self.parent.send(&message);
                self.relay.report_recoverable_again(rank, number, &mut self.parent);
            }
            Message::Alive { group: 0, rank, incarnation, .. } => {
                self.failover.replicas.handle_incarnation(rank, incarnation, Instant::now());
                self.parent.send(&message);
            }
            Message::Again { ref ranks } => {
                self.failover.replicas.handle_again(ranks);
                self.parent.send(&message);
            }
            // The launcher handles every other message.
            other => self.parent.send(&other),
        }
    }

    pub(super) fn failover_round(&mut self) -> FailoverRound<'_> {
        FailoverRound {
            is_running: self.is_running(),
            failover: &mut self.failover,
            children: &mut self.children,
            relay: &mut self.relay,
            processes: &mut self.processes,
            parent: &mut self.parent,
        }
    }

    /// Whether ranks have been started, and ranks of a lost node may be restarted.
    fn is_running(&self) -> bool {
        self.course.phase == Phase::Working
            && !self.relay.address.is_empty()
            && self.parent.may_move_ranks()
    }
}

/// Notes what agents of other nodes say of the message logs of their ranks.
fn handle_log_news(logs: Option<&NodeLogs>, message: &Message, parent: &mut ParentAgent) {
    let Some(logs) = logs else { return };
    let noted = match message {
        Message::LogImages(images) => logs.note_other_images(images),
        Message::LogContact { rank, contact } => logs
            .note_contact(*rank, contact)
            .with_context(|| format!("a contact of rank {rank} is not noted")),
        _ => Ok(()),
    };
    if let Err(error) = noted {
        parent.fail(format!("its message logs cannot be written: {error:#}"));
    }
}
