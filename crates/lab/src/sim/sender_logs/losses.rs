//! Nodes that are lost with their files, and the keeper, which is never lost: it has what processes
//! of a lost node need on another one.
//!
//! What enters: cuts of nodes, and images. What leaves: processes that begin on another node; what
//! the agents of other nodes may release. What may never happen: the keeper knows an image before
//! it knows what the image depends on, unless that fault is planted.

use std::io;

use landbridge_proto::log::delivery::Delivery;
use landbridge_proto::log::image_logs::{ImageLogs, choose_images};
use landbridge_proto::log::release::LogPositions;

use super::carrier::CarriedFrames;
use super::fenced::{FencedNode, FencedProcess};
use super::network::NOT_KEPT;
use super::node::{ProcessCut, SimulatedNode};
use super::process::ProcessImage;
use super::{IMAGES_MAX, LogFault, LogWorld, Violation, failed, job_name};

/// An image that processes may need on another node.
#[derive(Clone)]
pub struct KeptImage {
    pub image: ProcessImage,
    pub logs: ImageLogs,
    pub frames: Vec<u8>,
}

/// What an agent has sent to the keeper of the processes of its node.
pub struct NodeCut {
    pub node: usize,
    /// 0: no process waits for an answer.
    pub ticket: u64,
    pub processes: Vec<ProcessCut>,
    /// An image that was taken before the cut, and its process.
    pub image: Option<(usize, KeptImage)>,
    /// Frames that the agents carry once the keeper has the cut.
    pub carried: Option<CarriedFrames>,
}

/// What the agents of other nodes are to know of the images of a process.
#[derive(Clone)]
pub struct ImageNotice {
    pub node: usize,
    pub process: usize,
    pub newest: (u64, LogPositions),
    pub oldest: Option<LogPositions>,
}

/// Nodes that are lost, and what the keeper gets of them.
pub struct NodeLosses {
    /// On the way to the keeper; those of a node arrive in order.
    pub cuts: Vec<NodeCut>,
    /// Nodes are lost in this run: their agents carry nothing.
    pub may_be: bool,
    /// Some image could not be read, or lacks what was discarded, and others may count on it.
    pub has_torn: bool,
    /// Images hold all that is kept of logs, if it takes at most so many bytes.
    pub whole_bytes_max: u64,
    /// Nodes that may still be lost.
    pub left: u32,
    /// Nodes that there were.
    pub nodes_made: usize,
    pub run: u64,
    /// Lost nodes of which processes go on.
    pub fenced: Vec<FencedNode>,
}

impl NodeLosses {
    /// Whether a process cannot go on because of an image that could not be read.
    pub fn is_unfit(&self, why: &Violation) -> bool {
        self.has_torn && (why.0.contains(NOT_KEPT) || why.0.contains("are not kept any more"))
    }
}

impl LogWorld {
    /// The agent of a node sends the keeper what it knows of the processes that wait for it.
    pub(super) fn cut(&mut self, node: usize) -> Result<(), Violation> {
        let is_split = self.planted == Some(LogFault::SplitCut);
        let ticket = self.nodes[node].take_ticket().map_err(|error| failed(&error))?;
        let Some(ticket) = ticket else { return Ok(()) };
        let mut local = self.local(node);
        if is_split {
            // All but one are as they were at the last cut.
            let place = self.random.index(local.len());
            local = vec![local[place]];
        }
        self.send_cut(node, ticket, &local, None)
    }

    pub(super) fn local(&self, node: usize) -> Vec<usize> {
        (0..self.ranks.len()).filter(|rank| self.ranks[*rank].node == node).collect()
    }

    /// Sends the keeper how far these processes of a node have come, and an image.
    pub(super) fn send_cut(
        &mut self,
        node: usize,
        ticket: u64,
        local: &[usize],
        image: Option<(usize, KeptImage)>,
    ) -> Result<(), Violation> {
        let of_process = |process: &usize| {
            let deliveries = self.nodes[node].deliveries(*process);
            let polls = self.ranks[*process].polls;
            deliveries.map(|deliveries| ProcessCut { process: *process, deliveries, polls })
        };
        let processes = local.iter().map(of_process).collect::<io::Result<_>>();
        let processes = processes.map_err(|error| failed(&error))?;
        self.losses.cuts.push(NodeCut { node, ticket, processes, image, carried: None });
        Ok(())
    }

    /// The next cut of a node arrives at the keeper, which answers.
    pub(super) fn deliver_cut(&mut self, node: usize) -> Result<(), Violation> {
        let Some(place) = self.losses.cuts.iter().position(|cut| cut.node == node) else {
            return Ok(());
        };
        let cut = self.losses.cuts.remove(place);
        for ProcessCut { process, deliveries, polls } in cut.processes {
            self.ranks[process].kept = (deliveries, polls);
        }
        self.counts.count("cuts of nodes");
        if let Some((process, image)) = cut.image {
            self.keep_image(process, image);
        }
        self.between_agents.frames.extend(cut.carried);
        match cut.ticket {
            0 => Ok(()),
            ticket => self.nodes[node].answer_ticket(ticket).map_err(|error| failed(&error)),
        }
    }

    /// The agents carry frames, once the keeper knows what they depend on.
    pub(super) fn carry_after_cut(
        &mut self,
        node: usize,
        carried: CarriedFrames,
    ) -> Result<(), Violation> {
        self.send_cut(node, 0, &self.local(node), None)?;
        if let Some(cut) = self.losses.cuts.last_mut() {
            cut.carried = Some(carried);
        }
        Ok(())
    }

    /// The keeper knows an image, so the agents of other nodes may release what it covers.
    pub(super) fn keep_image(&mut self, process: usize, image: KeptImage) {
        let kept = &mut self.ranks[process].kept_images;
        kept.push(image);
        if kept.len() > IMAGES_MAX {
            kept.remove(0);
        }
        let positions = |image: &KeptImage| image.logs.positions.clone();
        let oldest = (kept.len() == IMAGES_MAX).then(|| positions(&kept[0]));
        let Some(newest) = kept.last().map(|it| (it.image.number, positions(it))) else { return };
        let own = self.ranks[process].node;
        for node in (0..self.nodes.len()).filter(|node| *node != own) {
            let (newest, oldest) = (newest.clone(), oldest.clone());
            self.between_agents.images.push(ImageNotice { node, process, newest, oldest });
        }
    }

    /// Notices of one agent arrive in any order, or, at a node that is lost, not at all.
    pub(super) fn deliver_image_notice(&mut self) -> Result<(), Violation> {
        let place = self.random.index(self.between_agents.images.len());
        let notice = self.between_agents.images.swap_remove(place);
        let ImageNotice { node, process, newest, oldest } = notice;
        let noted = self.nodes[node].note_kept_images(process, newest, oldest);
        noted.map_err(|error| failed(&error))
    }

    /// A node is lost: what is on its way from there may arrive, or not. Its processes begin again
    /// on another one, and may go on there.
    pub(super) fn lose_node(&mut self, node: usize) -> Result<(), Violation> {
        self.losses.left -= 1;
        self.counts.count("nodes lost");
        self.log_step(|| format!("node {node} is lost"));
        while self.random.percent(50) && self.losses.cuts.iter().any(|cut| cut.node == node) {
            self.deliver_cut(node)?;
        }
        self.losses.cuts.retain(|cut| cut.node != node);
        let (ranks, random) = (&self.ranks, &mut self.random);
        let mut arrives = |process: usize| ranks[process].node != node || random.percent(50);
        self.between_agents.contacts.retain(|(_, process, _)| arrives(*process));
        self.between_agents.images.retain(|notice| notice.node != node);
        let local = self.local(node);
        let waits = self.planted != Some(LogFault::LeavesAtOnce);
        let moving: Vec<usize> = (0..self.ranks.len()).collect();
        let job = job_name(self.losses.run, self.losses.nodes_made);
        let spare = SimulatedNode::new(job, (&local, &moving), waits);
        let spare = spare.map_err(|error| failed(&error))?;
        let lost = std::mem::replace(&mut self.nodes[node], spare);
        self.losses.nodes_made += 1;
        self.end_or_fence(lost, &local);
        for rank in local.iter().copied() {
            let it = &mut self.ranks[rank];
            it.moves += 1;
            it.polls = it.kept.1;
            self.nodes[node].note_move(rank, it.moves).map_err(|error| failed(&error))?;
            self.nodes[node].write_deliveries(rank, &it.kept.0).map_err(|error| failed(&error))?;
            // Nobody has seen what follows.
            it.events.truncate(events_of(&it.kept.0)?);
        }
        for rank in 0..self.ranks.len() {
            let from = self.ranks[rank].node;
            let contact = self.nodes[from].contact(rank).map_err(|error| failed(&error))?;
            if let Some(contact) = contact.filter(|_| from != node) {
                self.between_agents.contacts.push((node, rank, contact));
            }
        }
        self.choose_images(node, &local)
    }

    /// The processes of a lost node end, or go on.
    fn end_or_fence(&mut self, lost: SimulatedNode, local: &[usize]) {
        let lives_on = self.lives_on();
        let mut processes = Vec::new();
        for rank in local.iter().copied() {
            let polls = self.ranks[rank].polls;
            match self.ranks[rank].running.take() {
                Some((process, transport)) if lives_on => {
                    processes.push(FencedProcess { process, transport, polls });
                }
                Some((_, transport)) => self.lose_messages(&transport),
                None => (),
            }
        }
        if !processes.is_empty() {
            self.fence(lost, processes);
        }
    }

    /// Chooses the images with which the processes of a lost node begin on this one, and lays what
    /// these hold of the logs into its file.
    fn choose_images(&mut self, node: usize, local: &[usize]) -> Result<(), Violation> {
        for rank in local.iter().copied() {
            let kept = &mut self.ranks[rank].kept_images;
            if kept.len() == IMAGES_MAX && self.random.percent(10) {
                kept.pop();
                self.losses.has_torn = true;
                self.counts.count("images of lost nodes torn");
            }
        }
        let all = local.iter().map(|rank| {
            let kept = self.ranks[*rank].kept_images.iter().rev();
            (*rank, kept.map(|kept| kept.logs.clone()).collect::<Vec<_>>())
        });
        let Ok(choice) = choose_images(&all.collect()) else {
            self.counts.count("jobs ended by images that do not fit together");
            self.has_ended = true;
            return Ok(());
        };
        let chosen = |rank: usize| {
            let number = choice.images.get(&rank)?;
            self.ranks[rank].kept_images.iter().rev().nth(*number)
        };
        for log in &choice.logs {
            let frames = log.frames.and_then(|(rank, number)| {
                let kept = chosen(rank)?;
                let ends = ImageLogs::parse(&kept.logs.emit())?.1;
                let begin = ends[0];
                kept.frames
                    .get((ends[number] - begin) as usize..(ends[number + 1] - begin) as usize)
            });
            let begun =
                self.nodes[node].begin_log((log.from, log.to), log.begins, frames.unwrap_or(&[]));
            begun.map_err(|error| failed(&error))?;
        }
        let images: Vec<_> = local.iter().map(|rank| (*rank, chosen(*rank).cloned())).collect();
        for (rank, kept) in images {
            let it = &mut self.ranks[rank];
            it.images = kept.iter().map(|kept| kept.image.clone()).collect();
            if let Some(kept) = kept {
                self.counts.count("processes of lost nodes begun with an image");
                it.has_released = true;
                self.nodes[node].add_image(rank, kept.image.number, kept.logs.positions);
                self.nodes[node].note_from_elsewhere(rank, kept.image.number);
            }
        }
        Ok(())
    }
}

/// Events that a process has seen with these deliveries.
fn events_of(deliveries: &[u8]) -> Result<usize, Violation> {
    let mut bytes = deliveries.iter().copied().peekable();
    let mut events = 0;
    while bytes.peek().is_some() {
        let delivery = Delivery::parse(|| bytes.next());
        let delivery = delivery.map_err(|_| Violation("half a delivery is kept".to_string()))?;
        events += delivery.frames() as usize;
    }
    Ok(events)
}
