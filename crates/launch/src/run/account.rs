//! What the launcher says about its ranks: where one runs, and to `landbridge ps` how all of them go.

use std::time::{SystemTime, UNIX_EPOCH};

use super::{Child, Launcher, Phase};
use crate::control::{Job, Node};
use crate::groups::Groups;
use crate::ps::desk::{self, Account, Desk};
use crate::ps::roll::{Counts, Place};

/// Characters of the program and its arguments that are told.
const PROGRAM_CHARS_MAX: usize = 200;

/// What stays the same of an [`Account`], and who is asked for it.
pub(super) struct Counter {
    desk: Desk,
    fixed: Account,
}

impl Counter {
    /// A job runs as well when nobody can ask; `say` hears of it.
    pub fn open(job: &Job, mut say: impl FnMut(&str)) -> Counter {
        let desk = Desk::open(&desk::directory(), &job.id).unwrap_or_else(|error| {
            say(&format!("`landbridge ps` will not show this job: {error:#}"));
            Desk::default()
        });
        let words = std::iter::once(&job.task.program).chain(&job.task.arguments);
        let words: Vec<&str> = words.map(String::as_str).collect();
        let is_it =
            |(name, value): &(String, String)| name == "LANDBRIDGE_RECOVER" && value == "on";
        let fixed = Account {
            job: job.id.clone(),
            launcher: std::process::id(),
            program: words.join(" ").chars().take(PROGRAM_CHARS_MAX).collect(),
            began: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            recover: job.environment.iter().any(is_it),
            restarts: 0,
            ranks: Vec::new(),
        };
        Counter { desk, fixed }
    }

    pub fn desk(&self) -> &Desk {
        &self.desk
    }
}

impl Launcher {
    /// Answers those who ask.
    pub(super) fn serve(&mut self) {
        let (groups, children, roll) = (&self.groups, &self.children, &self.roll);
        let Counter { desk, fixed } = &mut self.counter;
        desk.serve(std::time::Instant::now(), || Account {
            restarts: roll.counts().restarts,
            ranks: roll.lines(|rank| whereabouts(groups, children, rank)),
            ..fixed.clone()
        });
    }

    /// Says at the foot of the terminal how things stand while ranks come back.
    pub(super) fn show_status(&mut self) {
        if !self.counter.fixed.recover {
            return;
        }
        let Counts { running, starting_anew, restarts, .. } = self.roll.counts();
        let is_over = matches!(self.phase, Phase::Ending(_));
        let text = format!(
            "landbridge: {running} ranks up, {starting_anew} coming back; new starts so far: {restarts}"
        );
        self.output.set_status((starting_anew > 0 && !is_over).then_some(text));
    }

    pub(super) fn place(&self, rank: u32) -> String {
        place(&self.groups, &self.children, rank)
    }

    /// A name for the node of a rank that no other node has.
    pub(super) fn node_of(&self, rank: u32) -> String {
        match whereabouts(&self.groups, &self.children, rank) {
            Place { node, .. } if node.is_empty() => String::new(),
            Place { node, cluster, .. } => format!("{cluster}/{node}"),
        }
    }
}

fn whereabouts(groups: &Groups, children: &[Child], rank: u32) -> Place {
    if let (Some(name), Some((_, node, cluster))) = (groups.name(rank), groups.place_of(rank)) {
        return Place { rank: name, node: node.to_string(), cluster: cluster.to_string() };
    }
    let node = children.iter().find_map(|child| find_node(&child.node, rank));
    let (node, cluster) =
        node.map_or_else(Default::default, |node| (node.name.clone(), node.cluster_name.clone()));
    Place { rank: rank.to_string(), node, cluster }
}

/// Where a rank runs, for the user.
pub(super) fn place(groups: &Groups, children: &[Child], rank: u32) -> String {
    let spawned = groups.place_of(rank).map(|(name, ..)| name);
    let Place { node, cluster, .. } = whereabouts(groups, children, rank);
    let name = spawned.unwrap_or_else(|| format!("rank {rank}"));
    match children.len() {
        _ if node.is_empty() => name,
        1 => format!("{name} on node {node}"),
        _ => format!("{name} on node {node} (cluster {cluster})"),
    }
}

fn find_node(node: &Node, rank: u32) -> Option<&Node> {
    let own = node.first_rank..node.first_rank + node.rank_count;
    if own.contains(&rank) {
        return Some(node);
    }
    node.children.iter().find_map(|child| find_node(child, rank))
}
